//! `run.sh`: the session with GitHub, one job at a time.

use std::{path::Path, time::Duration};

use reqwest::{Client, Method, RequestBuilder, Response, StatusCode};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{Failure, Outcome, files, job, version};
use crate::{
    Conclusion,
    protocol::{Assignment, Ending},
};

/// The pause before a lost connection is retried.
const CONNECT_RETRY: Duration = Duration::from_millis(500);

/// How long closing the session may take; less than the agent waits for the runner to exit.
const CLOSE_SESSION_TIMEOUT: Duration = Duration::from_secs(30);

const DELETED: &str = "Failed to create a session. The runner registration has been deleted from the server, please \
    re-configure. Runner registrations are automatically deleted for runners that have not connected to the service \
    recently.";

/// What a runner says that is deleted while it listens, before it deletes its registration and ends well (`Runner.cs`, since
/// 2.336.0).
const GONE: &str = "The runner no longer exists on the server. Cleaning up local configuration.";

/// The exit status for a refused version, if the caller asks for it (`Program.cs`).
const STATUS_REFUSED: u8 = 7;

pub async fn run_configured() -> Outcome {
    let dir = Path::new(".");
    let files = files::read(dir)
        .map_err(|_| "An error occurred: Not configured. Run config.(sh/cmd) to configure the runner.")?;
    let ephemeral = files.settings.ephemeral;
    let ended = Listener::new(files)?.run().await?;
    if ended == Ended::Deleted || ephemeral && ended == Ended::JobDone {
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
    /// An ephemeral runner has run its job.
    JobDone,
    /// GitHub does not have the runner any more.
    Deleted,
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

/// The connection to the server, with the runner's credentials.
struct Link {
    http: Client,
    files: files::Files,
}

struct Listener {
    link: Link,
    stop: Stop,
}

fn log(text: &str) {
    println!("{}: {text}", jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M:%SZ"));
}

impl Listener {
    fn new(files: files::Files) -> Outcome<Self> {
        let on = |kind| signal(kind).map_err(|error| error.to_string());
        let stop = Stop { interrupt: on(SignalKind::interrupt())?, terminate: on(SignalKind::terminate())? };
        Ok(Self { link: Link { http: Client::new(), files }, stop })
    }

    async fn run(mut self) -> Outcome<Ended> {
        if !self.connect().await? {
            return Ok(Ended::Stopped);
        }
        println!("\n√ Connected to GitHub\n\nCurrent runner version: '{}'", version());
        // Before the first poll, which alone can tell of a refusal (`Runner.cs`).
        log("Listening for Jobs");
        let path = format!("/message?runnerVersion={}", version());
        loop {
            let poll = persistent(|| self.link.request(Method::GET, &path));
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
                }
                StatusCode::GONE => {
                    eprintln!("{GONE}");
                    return Ok(Ended::Deleted);
                }
                // `BrokerHttpClient.cs` and `Program.cs`. Seen for refusals of any kind, not only of the version.
                StatusCode::FORBIDDEN => {
                    let wanted = std::env::var("ACTIONS_RUNNER_RETURN_VERSION_DEPRECATED_EXIT_CODE");
                    let status = if wanted.is_ok_and(|wanted| wanted == "1") { STATUS_REFUSED } else { 1 };
                    let message = format!(
                        "An error occurred: Runner version v{} is deprecated and cannot receive messages.",
                        version()
                    );
                    self.link.leave().await;
                    return Err(Failure { status, message });
                }
                // The server considered this runner offline and dropped its session.
                StatusCode::CONFLICT if !self.connect().await? => return Ok(Ended::Stopped),
                _ => {}
            }
        }
    }

    /// Opens the session, waiting for another session of this runner to end; returns false if asked to stop meanwhile.
    async fn connect(&mut self) -> Outcome<bool> {
        let mut logged = false;
        loop {
            let attempt = persistent(|| self.link.request(Method::POST, "/session"));
            let answer = tokio::select! {
                answer = attempt => answer,
                () = self.stop.asked() => return Ok(false),
            };
            match answer.status() {
                StatusCode::GONE => return Err(DELETED.into()),
                StatusCode::CONFLICT => {
                    if !logged {
                        log("A session for this runner already exists.");
                    }
                    logged = true;
                    tokio::select! {
                        () = tokio::time::sleep(CONNECT_RETRY) => {}
                        () = self.stop.asked() => return Ok(false),
                    }
                }
                _ => return Ok(true),
            }
        }
    }

    /// Runs one job until it ends, is cancelled, or the runner stops; returns true if asked to stop.
    async fn work(&mut self, assignment: Assignment) -> bool {
        log(&format!("Running job: {}", assignment.name));
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
        log(&format!("Job {} completed with result: {}", assignment.name, job::result(conclusion)));
        stopped
    }
}

impl Link {
    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let url = format!("{}/_runner{path}", self.files.settings.server_url);
        self.http.request(method, url).bearer_auth(&self.files.credentials.data.client_id)
    }

    /// Waits until the server asks to stop the job early.
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
        let _ = self.request(Method::DELETE, "/session").timeout(CLOSE_SESSION_TIMEOUT).send().await;
    }
}

/// Retries until the server gives a definite answer: success, gone, a conflict, or the refusal of a poll.
async fn persistent(request: impl Fn() -> RequestBuilder) -> Response {
    let mut lost = false;
    loop {
        match request().send().await {
            Ok(answer)
                if answer.status().is_success()
                    || [StatusCode::GONE, StatusCode::CONFLICT].contains(&answer.status())
                    || answer.status() == StatusCode::FORBIDDEN && answer.url().path().ends_with("/message") =>
            {
                if lost {
                    log("Runner reconnected.");
                }
                return answer;
            }
            failure => {
                if !lost {
                    let why = failure.map_or_else(|error| error.to_string(), |answer| answer.status().to_string());
                    log(&format!("Runner connect error: {why}. Retrying until reconnected."));
                }
                lost = true;
                tokio::time::sleep(CONNECT_RETRY).await;
            }
        }
    }
}
