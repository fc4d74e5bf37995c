//! Lost webhooks. GitHub never repeats a delivery by itself, but each App may read the log of its own: what failed is
//! taken in from there, as if it had come. Only the leader reads.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, stream};
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::Context;
use crate::{
    api::{Hardware, RunnerPool},
    effects::{credentials::Credentials, github::GitHubError},
    metrics::WebhookLabel,
    plan::{
        deliveries::{Delivery, Reading, is_not_trusted},
        webhook::Outcome,
    },
};

/// How often a log is read: mostly one call of the 5,000 an hour that an App has.
const PERIOD: Duration = Duration::from_secs(60);
/// How soon it is read again while something of it could not be taken in.
const AGAIN: Duration = Duration::from_secs(10);
/// The most pages of 100 that one reading asks for: of all deliveries, which show also what arrived on another attempt, and
/// where that is not enough, of those alone that GitHub calls failures.
const PAGES: [(bool, usize); 2] = [(false, 3), (true, 10)];
/// Deliveries that are fetched at a time; GitHub allows 100 calls at once.
const AT_ONCE: usize = 8;
/// How long the API server may take for one of them.
const PATIENCE: Duration = Duration::from_secs(30);

pub async fn run(context: Arc<Context>, stop: CancellationToken) {
    if context.settings.webhook_secret_file.is_none() {
        // Whoever wants no webhooks wants none from a log either.
        return;
    }
    let mut logs = Logs { context, readings: HashMap::new(), said: BTreeMap::new() };
    loop {
        let wait = tokio::select! {
            () = stop.cancelled() => return,
            wait = logs.read() => wait,
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

struct Logs {
    context: Arc<Context>,
    /// By App. Lost with the leader: the next one goes back as far as it makes sense.
    readings: HashMap<u64, Reading>,
    /// What was last said of each Secret and App, so that it is said once.
    said: BTreeMap<String, String>,
}

/// How a reading went.
struct Read {
    reading: Reading,
    /// Whether everything that was lost is taken in.
    whole: bool,
    trouble: Option<String>,
}

impl Logs {
    /// Reads the log of every App once, each for itself: one that answers slowly delays no other for long.
    async fn read(&mut self) -> Duration {
        let began = Timestamp::now();
        let retention = SignedDuration::try_from(self.context.settings.retention).unwrap_or(SignedDuration::MAX);
        let apps = self.apps().await;
        self.readings.retain(|app, _| apps.contains_key(app));
        let mut readings = Vec::new();
        for (app, credentials) in &apps {
            let reading = self.readings.remove(app).unwrap_or_else(|| Reading::new(began, retention));
            readings.push(read(&self.context, credentials, reading, began));
        }
        let readings = futures::future::join_all(readings).await;
        let mut wait = PERIOD;
        for (app, read) in apps.keys().zip(readings) {
            if !read.whole {
                wait = AGAIN;
            }
            self.say(format!("App {app}"), read.trouble);
            self.readings.insert(*app, read.reading);
        }
        wait
    }

    /// Every App that a pool uses, by its number.
    async fn apps(&mut self) -> BTreeMap<u64, Credentials> {
        let pools = self.context.stores.pools.store.state();
        let secrets: BTreeSet<_> = pools.iter().flat_map(|pool| secrets(pool)).collect();
        let mut apps = BTreeMap::new();
        for (namespace, name) in secrets {
            let trouble = match self.context.credentials.get(&namespace, &name).await {
                Ok(credentials) => match credentials.app() {
                    Some(app) => {
                        apps.insert(app, credentials);
                        None
                    }
                    None => Some("those that are lost cannot be found: a token has no log of deliveries".to_owned()),
                },
                Err(error) => Some(format!("those that are lost cannot be found: {error}")),
            };
            self.say(format!("Secret {namespace}/{name}"), trouble);
        }
        apps
    }

    /// Says what is wrong with somebody's webhooks, once.
    fn say(&mut self, whose: String, trouble: Option<String>) {
        match trouble {
            None => {
                self.said.remove(&whose);
            }
            Some(trouble) => {
                if self.said.get(&whose) != Some(&trouble) {
                    tracing::warn!("webhooks of {whose}: {trouble}");
                    self.said.insert(whose, trouble);
                }
            }
        }
    }
}

/// The Secrets that a pool's credentials are in.
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

async fn read(context: &Context, app: &Credentials, mut reading: Reading, began: Timestamp) -> Read {
    let log = match log(context, app, &reading).await {
        Ok(log) => log,
        Err(error) => {
            let trouble = Some(format!("the log of deliveries cannot be read: {error}"));
            return Read { reading, whole: true, trouble };
        }
    };
    let lost: Vec<Delivery> = reading.lost(&log).into_iter().cloned().collect();
    let recoveries: Vec<_> = lost.iter().map(|delivery| recover(context, app, delivery)).collect();
    let outcomes: Vec<_> = stream::iter(recoveries).buffered(AT_ONCE).collect().await;
    let (mut left, mut taken) = (Vec::new(), 0);
    for (delivery, outcome) in lost.iter().zip(outcomes) {
        match outcome {
            Ok(outcome) if outcome.is_final() => {
                taken += 1;
                reading.took(delivery);
            }
            Ok(_) | Err(_) => left.push(delivery),
        }
    }
    if taken > 0 || !left.is_empty() {
        tracing::info!(app = ?app, taken, left = left.len(), "webhooks that had been lost were taken in");
    }
    let trouble = is_not_trusted(&log).then(|| {
        "they are signed with a secret that the webhook secret file does not have; they are taken in late".to_owned()
    });
    let whole = left.is_empty();
    reading.ended(began, left);
    Read { reading, whole, trouble }
}

/// The log as far back as it was not read before: all of it, and where that is more than can be asked for, the rest of
/// what failed.
async fn log(context: &Context, app: &Credentials, reading: &Reading) -> Result<Vec<Delivery>, GitHubError> {
    let mut log = Vec::new();
    for (failures, pages) in PAGES {
        let mut cursor = None;
        for _ in 0..pages {
            let page = context.github.deliveries(app, failures, cursor.as_deref()).await?;
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

async fn recover(context: &Context, app: &Credentials, delivery: &Delivery) -> Result<Outcome, GitHubError> {
    let payload = match context.github.delivered(app, delivery.id).await {
        Ok(payload) => payload,
        // The log forgets after some days.
        Err(GitHubError::NotFound(_)) => Value::Null,
        Err(error) => return Err(error),
    };
    let body = payload.to_string();
    let taken = tokio::time::timeout(PATIENCE, context.intake.take(&delivery.event, body.as_bytes())).await;
    let outcome = taken.unwrap_or_else(|_| Outcome::Unavailable("the API server does not answer".into()));
    let (word, reason) = outcome.words();
    context.metrics.webhooks.get_or_create(&WebhookLabel { source: "log", outcome: word, reason }).inc();
    Ok(outcome)
}
