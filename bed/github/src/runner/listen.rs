//! `run.sh`: the session with GitHub, one job after the other.

use std::{path::Path, time::Duration};

use reqwest::{Client, Method, RequestBuilder, Response, StatusCode};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{Outcome, VERSION, files, job};
use crate::{
    Conclusion,
    protocol::{Assignment, Ending},
};

/// The pause before a lost connection is tried again.
const RETRY: Duration = Duration::from_millis(500);

/// How long the server may take for a goodbye; less than the agent waits for the runner's end.
const GOODBYE: Duration = Duration::from_secs(30);

const DELETED: &str = "Failed to create a session. The runner registration has been deleted from the server, please \
    re-configure. Runner registrations are automatically deleted for runners that have not connected to the service \
    recently.";

pub async fn run_configured() -> Outcome {
    let dir = Path::new(".");
    let files = files::read(dir).map_err(|_| "Not configured. Run config.(sh/cmd) to configure the runner.")?;
    let ephemeral = files.settings.ephemeral;
    let ended = Listener::new(files)?.run().await?;
    if ephemeral && ended == Ended::JobDone {
        files::remove(dir);
    }
    Ok(())
}

pub async fn run_jit(config: &str) -> Outcome {
    let files = files::decoded(config).ok_or("The JIT config cannot be read: it is not what GitHub handed out.")?;
    Listener::new(files)?.run().await.map(drop)
}

#[derive(PartialEq, Eq)]
enum Ended {
    /// An ephemeral runner has had its job.
    JobDone,
    Stopped,
}

/// SIGINT or SIGTERM, whichever comes first.
struct Stop {
    interrupt: Signal,
    terminate: Signal,
}

impl Stop {
    async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// The way to the server, with the runner's credentials.
struct Link {
    http: Client,
    files: files::Files,
}

struct Listener {
    link: Link,
    stop: Stop,
}

fn say(text: &str) {
    println!("{}: {text}", jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M:%SZ"));
}

impl Listener {
    fn new(files: files::Files) -> Result<Self, String> {
        let on = |kind| signal(kind).map_err(|error| error.to_string());
        let stop = Stop { interrupt: on(SignalKind::interrupt())?, terminate: on(SignalKind::terminate())? };
        Ok(Self { link: Link { http: Client::new(), files }, stop })
    }

    async fn run(mut self) -> Result<Ended, String> {
        if !self.connect().await? {
            return Ok(Ended::Stopped);
        }
        println!("\n√ Connected to GitHub\n\nCurrent runner version: '{VERSION}'");
        say("Listening for Jobs");
        loop {
            let poll = persistent(|| self.link.request(Method::GET, "/message"));
            let answer = tokio::select! {
                answer = poll => answer,
                () = self.stop.asked() => {
                    println!("Exiting...");
                    self.link.leave().await;
                    return Ok(Ended::Stopped);
                }
            };
            match answer.status() {
                StatusCode::OK => {
                    let job: Assignment = answer.json().await.map_err(|error| error.to_string())?;
                    let stopped = self.work(job).await;
                    if self.link.files.settings.ephemeral {
                        return Ok(Ended::JobDone);
                    }
                    if stopped {
                        println!("Exiting...");
                        self.link.leave().await;
                        return Ok(Ended::Stopped);
                    }
                    say("Listening for Jobs");
                }
                StatusCode::GONE => return Err(DELETED.into()),
                // The server took this runner for gone and forgot its session.
                StatusCode::CONFLICT if !self.connect().await? => return Ok(Ended::Stopped),
                _ => {}
            }
        }
    }

    /// Opens the session; false when asked to stop meanwhile. Another session of the same runner is waited for.
    async fn connect(&mut self) -> Result<bool, String> {
        let mut told = false;
        loop {
            let attempt = persistent(|| self.link.request(Method::POST, "/session"));
            let answer = tokio::select! {
                answer = attempt => answer,
                () = self.stop.asked() => return Ok(false),
            };
            match answer.status() {
                StatusCode::GONE => return Err(DELETED.into()),
                StatusCode::CONFLICT => {
                    if !told {
                        say("A session for this runner already exists.");
                    }
                    told = true;
                    tokio::select! {
                        () = tokio::time::sleep(RETRY) => {}
                        () = self.stop.asked() => return Ok(false),
                    }
                }
                _ => return Ok(true),
            }
        }
    }

    /// Runs one job to its end, its cancellation, or the runner's own; true when asked to stop.
    async fn work(&mut self, assignment: Assignment) -> bool {
        say(&format!("Running job: {}", assignment.name));
        let mut stopped = false;
        let conclusion = tokio::select! {
            conclusion = job::run(&assignment, &self.link.files.settings) => conclusion,
            conclusion = self.link.order(assignment.id) => conclusion,
            () = self.stop.asked() => {
                stopped = true;
                Conclusion::Cancelled
            }
        };
        let path = format!("/jobs/{}/finish", assignment.id);
        persistent(|| self.link.request(Method::POST, &path).json(&Ending { conclusion })).await;
        say(&format!("Job {} completed with result: {}", assignment.name, job::result(conclusion)));
        stopped
    }
}

impl Link {
    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let url = format!("{}/_runner{path}", self.files.settings.server_url);
        self.http.request(method, url).bearer_auth(&self.files.credentials.data.client_id)
    }

    /// Waits for the word that the job is to end before its time.
    async fn order(&self, job: u64) -> Conclusion {
        let path = format!("/jobs/{job}/order");
        loop {
            let answer = persistent(|| self.request(Method::GET, &path)).await;
            if answer.status() == StatusCode::GONE {
                return Conclusion::Cancelled;
            }
            if answer.status() == StatusCode::OK
                && let Ok(ending) = answer.json::<Ending>().await
            {
                return ending.conclusion;
            }
        }
    }

    async fn leave(&self) {
        let _ = self.request(Method::DELETE, "/session").timeout(GOODBYE).send().await;
    }
}

/// Tries until the server has a word for the runner: yes, gone, or a conflict. Everything else passes.
async fn persistent(request: impl Fn() -> RequestBuilder) -> Response {
    let mut lost = false;
    loop {
        match request().send().await {
            Ok(answer)
                if answer.status().is_success()
                    || [StatusCode::GONE, StatusCode::CONFLICT].contains(&answer.status()) =>
            {
                if lost {
                    say("Runner reconnected.");
                }
                return answer;
            }
            failure => {
                if !lost {
                    let why = failure.map_or_else(|error| error.to_string(), |answer| answer.status().to_string());
                    say(&format!("Runner connect error: {why}. Retrying until reconnected."));
                }
                lost = true;
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}
