//! Parses and validates webhook bodies. Their signature is already verified, but names and labels come from workflow
//! authors: they are untrusted data.

use jiff::Timestamp;
use serde::{Deserialize, de::DeserializeOwned};

use super::outcome::{Ignored, WebhookOutcome};
use crate::{
    api::{Job, Owner, OwnerType, RUNNER_NAME_MAX, Runner, head},
    demand::job_facts::{JobFacts, JobStage},
};

/// The longest job name and the longest URL that a claim accepts.
const JOB_NAME_MAX: usize = 1024;
const URL_MAX: usize = 2048;

/// An event that Paddock handles.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Job(Box<JobEvent>),
    Run(RunEvent),
}

/// A job was queued, started or completed.
#[derive(Clone, Debug, PartialEq)]
pub struct JobEvent {
    pub job: Job,
    pub run_id: i64,
    /// As in the workflow, without duplicates.
    pub labels: Vec<String>,
    pub repository: Repository,
    pub installation_id: Option<i64>,
    /// Progress of the job, and its runner.
    pub facts: JobFacts,
}

/// A workflow run is completed.
#[derive(Clone, Debug, PartialEq)]
pub struct RunEvent {
    pub id: i64,
    pub repository: Repository,
    /// When it ended: a re-run has the same id and ends later.
    pub ended_at: Timestamp,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Repository {
    pub id: i64,
    pub name: String,
    pub owner: Owner,
}

impl Repository {
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.owner.login, self.name)
    }
}

/// Whether Paddock handles such events; others are not parsed.
pub fn is_used(event: &str, action: Option<&str>) -> bool {
    match event {
        "workflow_job" => action.is_none_or(|action| JobStage::parse(action).is_some()),
        "workflow_run" => action.is_none_or(|action| action == RUN_COMPLETED),
        _ => false,
    }
}

const RUN_COMPLETED: &str = "completed";

/// Reads the body of an event.
pub fn read(event: &str, body: &[u8]) -> Result<Event, WebhookOutcome> {
    match event {
        "workflow_job" => parse::<JobBody>(body)?.event(),
        "workflow_run" => parse::<RunBody>(body)?.event(),
        "ping" => Err(WebhookOutcome::Ignored(Ignored::Ping)),
        _ => Err(WebhookOutcome::Ignored(Ignored::OtherEvent)),
    }
}

/// The parser itself refuses JSON that is nested too deeply.
fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, WebhookOutcome> {
    serde_json::from_slice(body).map_err(|error| WebhookOutcome::Malformed(head(&error.to_string(), 200)))
}

#[derive(Deserialize)]
struct JobBody {
    action: String,
    workflow_job: WorkflowJob,
    repository: RepositoryBody,
    installation: Option<Installation>,
}

#[derive(Deserialize)]
struct WorkflowJob {
    id: i64,
    run_id: i64,
    name: Option<String>,
    html_url: Option<String>,
    labels: Vec<String>,
    runner_id: Option<i64>,
    runner_name: Option<String>,
}

#[derive(Deserialize)]
struct RunBody {
    action: String,
    workflow_run: WorkflowRun,
    repository: RepositoryBody,
}

#[derive(Deserialize)]
struct WorkflowRun {
    id: i64,
    updated_at: Timestamp,
}

#[derive(Deserialize)]
struct RepositoryBody {
    id: i64,
    name: String,
    owner: OwnerBody,
}

#[derive(Deserialize)]
struct OwnerBody {
    id: i64,
    login: String,
    #[serde(rename = "type")]
    type_: OwnerType,
}

#[derive(Deserialize)]
struct Installation {
    id: i64,
}

impl JobBody {
    fn event(self) -> Result<Event, WebhookOutcome> {
        let stage = match self.action.as_str() {
            // It needs no runner until it is approved, and is `queued` then.
            "waiting" => return Err(WebhookOutcome::Ignored(Ignored::Waiting)),
            action => JobStage::parse(action).ok_or(WebhookOutcome::Ignored(Ignored::OtherAction))?,
        };
        let job = self.workflow_job;
        let runner = match (stage, job.runner_name) {
            // A queued job has no runner yet, whatever the payload contains.
            (JobStage::Queued, _) | (_, None) => None,
            (JobStage::InProgress | JobStage::Completed, Some(name)) => {
                let id = job.runner_id.filter(|id| *id > 0);
                (!name.is_empty()).then(|| Runner { id, name: head(&name, RUNNER_NAME_MAX) })
            }
        };
        let mut labels: Vec<String> = Vec::with_capacity(job.labels.len().min(32));
        for label in job.labels {
            let lower = label.to_lowercase();
            if !labels.iter().any(|known| known.to_lowercase() == lower) {
                labels.push(label);
            }
            // No pool has label sets of more than 16.
            if labels.len() > 16 {
                break;
            }
        }
        Ok(Event::Job(Box::new(JobEvent {
            run_id: number("workflow_job.run_id", job.run_id)?,
            labels,
            repository: self.repository.checked()?,
            installation_id: self.installation.map(|it| number("installation.id", it.id)).transpose()?,
            facts: JobFacts { job: Some(stage), runner, run_completed: false },
            job: Job {
                id: number("workflow_job.id", job.id)?,
                url: job.html_url.filter(|url| is_http_url(url)),
                name: job.name.map(|name| head(&name, JOB_NAME_MAX)),
            },
        })))
    }
}

impl RunBody {
    fn event(self) -> Result<Event, WebhookOutcome> {
        if self.action != RUN_COMPLETED {
            return Err(WebhookOutcome::Ignored(Ignored::OtherAction));
        }
        let id = number("workflow_run.id", self.workflow_run.id)?;
        let ended_at = self.workflow_run.updated_at;
        Ok(Event::Run(RunEvent { id, repository: self.repository.checked()?, ended_at }))
    }
}

impl RepositoryBody {
    fn checked(self) -> Result<Repository, WebhookOutcome> {
        let OwnerBody { id, login, type_ } = self.owner;
        let word = |text: &str, more: &[u8]| {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || more.contains(&byte);
            (1..=100).contains(&text.len()) && text.bytes().all(fits)
        };
        if !word(&login, b"-_") || login.starts_with(['-', '_']) {
            return Err(WebhookOutcome::Malformed("repository.owner.login is not a name that GitHub gives".into()));
        }
        if !word(&self.name, b"-._") {
            return Err(WebhookOutcome::Malformed("repository.name is not a name that GitHub gives".into()));
        }
        let owner = Owner { id: number("repository.owner.id", id)?, login, type_ };
        Ok(Repository { id: number("repository.id", self.id)?, name: self.name, owner })
    }
}

fn number(field: &str, value: i64) -> Result<i64, WebhookOutcome> {
    if value > 0 {
        Ok(value)
    } else {
        Err(WebhookOutcome::Malformed(format!("{field} is not a number that GitHub gives")))
    }
}

/// Whether the claim's schema accepts it: RFC 3986 characters only.
fn is_http_url(text: &str) -> bool {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~:/?#[]@!$&'()*+,;=%".contains(&byte);
    text.len() <= URL_MAX && rest.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(allowed))
}
