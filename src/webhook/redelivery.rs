//! Recovers lost webhooks. GitHub never retries a delivery by itself, but an App can read the log of its deliveries:
//! failed ones are processed as if they had arrived. Only the leader reads the log.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, stream};
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use paddock_core::{
    api::{Hardware, RunnerPool},
    webhook::{
        outcome::WebhookOutcome,
        redelivery::{Delivery, Reading, is_not_trusted},
    },
};
use paddock_effects::{
    clock,
    github::{GitHubError, credentials::Credentials},
    metrics::WebhookLabel,
};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::intake::Intake;
use crate::controllers::{Error, Shared, every};

/// How often a log is read: mostly one call of the 5,000 an hour that an App has.
const LOG_READ_PERIOD: Duration = Duration::from_secs(60);
/// Maximum pages of 100 in one reading: first of all deliveries, which show what arrived on another attempt, then of
/// failed ones only.
const MAX_PAGES: [(bool, usize); 2] = [(false, 3), (true, 10)];
/// Deliveries fetched concurrently; GitHub allows 100 concurrent calls.
const CONCURRENT_FETCHES: usize = 8;
/// Time limit for processing one delivery, in case the API server is slow.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(30);

pub async fn run(shared: Arc<Shared>, intake: Intake, stop: CancellationToken) {
    if shared.settings.webhook_secret_file.is_none() {
        // Webhooks are disabled.
        return;
    }
    let metrics = shared.metrics.clone();
    let logs = Logs { shared, intake, readings: HashMap::new(), reported: BTreeMap::new() };
    // Passes do not overlap, so the lock is never contended.
    let logs = tokio::sync::Mutex::new(logs);
    every("redelivery", LOG_READ_PERIOD, metrics, stop, || async { logs.lock().await.read().await }).await;
}

struct Logs {
    shared: Arc<Shared>,
    intake: Intake,
    /// By App. Not persisted: a new leader reads the log back to the retention time.
    readings: HashMap<u64, Reading>,
    /// The last problem logged for each Secret and App, so that it is logged once.
    reported: BTreeMap<String, String>,
}

/// The outcome of one reading.
struct ReadOutcome {
    reading: Reading,
    /// Lost deliveries that could not be processed yet.
    left: usize,
    problem: Option<String>,
}

impl Logs {
    /// Reads the log of every App once, concurrently, so that a slow one does not delay the others.
    async fn read(&mut self) -> Result<(), Error> {
        let began = clock::now();
        let retention = SignedDuration::try_from(self.shared.settings.retention).unwrap_or(SignedDuration::MAX);
        let apps = self.apps().await;
        self.readings.retain(|app, _| apps.contains_key(app));
        let mut readings = Vec::new();
        for (app, credentials) in &apps {
            let reading = self.readings.remove(app).unwrap_or_else(|| Reading::new(began, retention));
            readings.push(read(&self.shared, &self.intake, credentials, reading, began));
        }
        let readings = futures::future::join_all(readings).await;
        let mut left = 0;
        for (app, read) in apps.keys().zip(readings) {
            left += read.left;
            self.report(format!("App {app}"), read.problem);
            self.readings.insert(*app, read.reading);
        }
        match left {
            0 => Ok(()),
            left => Err(Error::Incomplete(format!("{left} lost webhooks are not processed yet"))),
        }
    }

    /// Every App that a pool uses, by its ID.
    async fn apps(&mut self) -> BTreeMap<u64, Credentials> {
        let pools = self.shared.stores.pools.store.state();
        let secrets: BTreeSet<_> = pools.iter().flat_map(|pool| secrets(pool)).collect();
        let mut apps = BTreeMap::new();
        for (namespace, name) in secrets {
            let problem = match self.shared.credentials.get(&namespace, &name).await {
                Ok(credentials) => match credentials.app() {
                    Some(app) => {
                        apps.insert(app, credentials);
                        None
                    }
                    None => Some("a token cannot read the log of deliveries, only an App can".to_owned()),
                },
                Err(error) => Some(error.to_string()),
            };
            self.report(format!("Secret {namespace}/{name}"), problem);
        }
        apps
    }

    /// Logs a problem with the webhooks of a Secret or an App, once.
    fn report(&mut self, subject: String, problem: Option<String>) {
        match problem {
            None => {
                self.reported.remove(&subject);
            }
            Some(problem) => {
                if self.reported.get(&subject) != Some(&problem) {
                    tracing::warn!(subject, problem, "lost webhooks cannot be recovered");
                    self.reported.insert(subject, problem);
                }
            }
        }
    }
}

/// The Secrets with a pool's credentials.
fn secrets(pool: &RunnerPool) -> Vec<(String, String)> {
    let names = match pool.spec.hardware() {
        Some(Hardware::Ec2(ec2)) => vec![&ec2.github.credentials_ref],
        Some(Hardware::Board(board)) => {
            let personal = board.github.personal_credentials_ref.as_ref();
            personal.into_iter().chain([&board.github.credentials_ref]).collect()
        }
        None => vec![],
    };
    names.into_iter().map(|secret| (pool.namespace().unwrap_or_default(), secret.name.clone())).collect()
}

async fn read(
    shared: &Shared,
    intake: &Intake,
    app: &Credentials,
    mut reading: Reading,
    began: Timestamp,
) -> ReadOutcome {
    let log = match log(shared, app, &reading).await {
        Ok(log) => log,
        Err(error) => {
            let problem = Some(format!("the log of deliveries cannot be read: {error}"));
            return ReadOutcome { reading, left: 0, problem };
        }
    };
    let lost: Vec<Delivery> = reading.lost(&log).into_iter().cloned().collect();
    let recoveries: Vec<_> = lost.iter().map(|delivery| recover(shared, intake, app, delivery)).collect();
    let outcomes: Vec<_> = stream::iter(recoveries).buffered(CONCURRENT_FETCHES).collect().await;
    let (mut left, mut recovered) = (Vec::new(), 0);
    for (delivery, outcome) in lost.iter().zip(outcomes) {
        match outcome {
            Ok(outcome) if outcome.is_final() => {
                recovered += 1;
                reading.took(delivery);
            }
            Ok(_) | Err(_) => left.push(delivery),
        }
    }
    if recovered > 0 || !left.is_empty() {
        tracing::info!(app = ?app, recovered, left = left.len(), "recovered lost webhooks");
    }
    let problem = is_not_trusted(&log).then(|| {
        "they are signed with a secret that the webhook secret file does not have; they are processed late".to_owned()
    });
    let count = left.len();
    reading.ended(began, left);
    ReadOutcome { reading, left: count, problem }
}

/// The log since the last reading: all deliveries, and beyond the page limit failed ones only.
async fn log(shared: &Shared, app: &Credentials, reading: &Reading) -> Result<Vec<Delivery>, GitHubError> {
    let mut log = Vec::new();
    for (failures, pages) in MAX_PAGES {
        let mut cursor = None;
        for _ in 0..pages {
            let page = shared.github.deliveries(app, failures, cursor.as_deref()).await?;
            let goes_on = reading.goes_on_after(&page.deliveries);
            log.extend(page.deliveries);
            cursor = page.next;
            if cursor.is_none() || !goes_on {
                return Ok(log);
            }
        }
    }
    Ok(log)
}

async fn recover(
    shared: &Shared,
    intake: &Intake,
    app: &Credentials,
    delivery: &Delivery,
) -> Result<WebhookOutcome, GitHubError> {
    let payload = match shared.github.delivered(app, delivery.id).await {
        Ok(payload) => payload,
        // GitHub deletes deliveries after some days.
        Err(GitHubError::NotFound(_)) => Value::Null,
        Err(error) => return Err(error),
    };
    let body = payload.to_string();
    let processed = tokio::time::timeout(PROCESS_TIMEOUT, intake.process(&delivery.event, body.as_bytes())).await;
    let outcome = processed.unwrap_or_else(|_| WebhookOutcome::Unavailable("the API server does not answer".into()));
    let (word, reason) = outcome.words();
    shared.metrics.webhooks.get_or_create(&WebhookLabel { source: "log", outcome: word, reason }).inc();
    Ok(outcome)
}
