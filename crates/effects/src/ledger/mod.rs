//! What is known of every instance: the table, kept in memory while this replica leads.
//!
//! The leader alone writes `INSTANCE` records, so its own writes keep the ledger true; a full read from time to time
//! corrects whatever a predecessor did late. What agents write is read for exactly those instances that somebody
//! waits for, all in one batch, so a settled system reads nothing.

mod change_queue;
mod index;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::{
    Stream, StreamExt,
    future::{join_all, ready},
    stream,
};
use jiff::{SignedDuration, Timestamp};
use paddock_core::{
    ec2::machine::{AgentReport, Machine},
    names::PoolKey,
};
use paddock_record::{Instance, State, Transition};
use tokio::sync::{Notify, OnceCell, watch};
use tokio_util::sync::CancellationToken;

use self::{change_queue::ChangeQueue, index::LedgerIndex};
use crate::aws::{
    AwsError,
    dynamodb::{MOVES_PER_WRITE, Records, WriteOutcome},
};

/// After a failed read: the store is in trouble, more reads do not help it.
const BACKOFF: Duration = Duration::from_secs(2);

/// How long an agent without a record must have been silent before what it wrote is removed: longer than a machine takes
/// to get its record, or to go down.
const LEFTOVER_AGE: SignedDuration = SignedDuration::from_mins(10);

/// A record of this age may have been written while pages were being read that do not have it.
const YOUNG: SignedDuration = SignedDuration::from_mins(1);

/// How long news of agents gather before a pool looks: one look serves many.
const POOL_WINDOW: Duration = Duration::from_millis(10);
/// How long moves of claims gather before a pool counts again.
const COUNT_WINDOW: Duration = Duration::from_secs(1);
/// How long changes gather before Workers show them, so that one that changes twice in a moment is written once.
pub const WORKER_WINDOW: Duration = Duration::from_millis(200);

pub struct Ledger {
    pub records: Records,
    known: Mutex<LedgerIndex>,
    /// Claims, by pool and name, whose machines changed.
    claims: Arc<ChangeQueue<(String, String)>>,
    /// Pools whose own machines have an agent with something to say, and those whose numbers changed.
    pools: Arc<ChangeQueue<String>>,
    counts: Arc<ChangeQueue<String>>,
    /// Instances that changed.
    workers: Arc<ChangeQueue<String>>,
    /// Told of all that becomes known.
    news: watch::Sender<()>,
    waiting: Notify,
    loaded: OnceCell<()>,
}

impl Ledger {
    pub fn new(records: Records) -> Self {
        Self {
            records,
            known: Mutex::default(),
            claims: Arc::default(),
            pools: Arc::default(),
            counts: Arc::default(),
            workers: Arc::default(),
            news: watch::Sender::default(),
            waiting: Notify::new(),
            loaded: OnceCell::new(),
        }
    }

    fn known(&self) -> MutexGuard<'_, LedgerIndex> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, id: &str) -> Option<Machine> {
        self.known().get(id).cloned()
    }

    pub fn all(&self) -> Vec<Machine> {
        self.known().all().cloned().collect()
    }

    pub fn of_pool(&self, pool: &PoolKey) -> Vec<Machine> {
        self.known().of_pool(&pool.to_string()).cloned().collect()
    }

    pub fn of_claim(&self, pool: &PoolKey, claim: &str) -> Vec<Machine> {
        self.known().of_claim(&pool.to_string(), claim).cloned().collect()
    }

    /// The instances of a pool that are as `wanted`.
    pub fn find(&self, pool: &PoolKey, wanted: impl Fn(&Machine) -> bool) -> Vec<Machine> {
        self.known().of_pool(&pool.to_string()).filter(|tracked| wanted(tracked)).cloned().collect()
    }

    /// Changes with all that becomes known, for those who wait a moment for something.
    pub fn news(&self) -> watch::Receiver<()> {
        self.news.subscribe()
    }

    /// Claims, by pool and name, whose machines have changed. For one reader, as the others.
    pub fn changed_claims(&self) -> impl Stream<Item = (PoolKey, String)> + Send + use<> {
        let parse = |(pool, claim): (String, String)| ready(PoolKey::parse(&pool).map(|pool| (pool, claim)));
        self.claims.stream(Duration::ZERO).filter_map(parse)
    }

    /// Pools that have something to do or to count.
    pub fn changed_pools(&self) -> impl Stream<Item = PoolKey> + Send + use<> {
        let changed = stream::select(self.pools.stream(POOL_WINDOW), self.counts.stream(COUNT_WINDOW));
        changed.filter_map(|pool| ready(PoolKey::parse(&pool)))
    }

    /// Instances that have changed, or are gone.
    pub fn changed_instances(&self) -> impl Stream<Item = HashSet<String>> + Send + use<> {
        self.workers.batches(WORKER_WINDOW)
    }

    /// Whether a claim waits for machines of the pool to answer.
    pub fn is_claiming(&self) -> bool {
        self.known().is_claiming()
    }

    /// Has the Worker of an instance looked at.
    pub fn show(&self, id: &str) {
        self.workers.tell(id.to_owned());
    }

    /// Reads everything for the first time, once the table is there; false while it is being created. Until then
    /// nothing is known of any instance, so nobody may conclude that there is none.
    pub async fn load(&self) -> Result<bool, AwsError> {
        if !self.loaded.initialized() {
            if !self.records.ensure_table().await? {
                return Ok(false);
            }
            self.loaded.get_or_try_init(|| self.reload()).await?;
        }
        Ok(true)
    }

    /// As [`Self::load`], and makes the table anew should it be gone.
    pub async fn ensure(&self) -> Result<bool, AwsError> {
        Ok(self.load().await? && self.records.ensure_table().await?)
    }

    pub fn is_loaded(&self) -> bool {
        self.loaded.initialized()
    }

    /// Reads everything anew, and removes what agents of ended instances left behind.
    pub async fn reload(&self) -> Result<(), AwsError> {
        let (instances, mut report) = tokio::try_join!(self.records.instances(), self.records.all_reports())?;
        let (now, young) = (Instant::now(), Timestamp::now() - YOUNG);
        let mut touched = Vec::new();
        {
            let mut known = self.known();
            let mut gone: HashSet<_> = known.all().map(|tracked| tracked.record.instance_id.clone()).collect();
            for record in instances {
                let found = report.remove(&record.instance_id).unwrap_or_default();
                gone.remove(&record.instance_id);
                let fresh = Machine { report: found, record, read_at: Timestamp::now() };
                let tracked = match known.get(&fresh.record.instance_id) {
                    Some(ours) => newest(ours.clone(), fresh),
                    None => fresh,
                };
                touched.push(tracked.record.clone());
                known.put(tracked, now);
            }
            for id in gone {
                // Unless it was entered while the pages were being read.
                if known.get(&id).is_some_and(|tracked| tracked.record.updated_at <= young) {
                    touched.extend(known.remove(&id).map(|tracked| tracked.record));
                }
            }
        }
        touched.iter().for_each(|record| self.tell(record));
        self.waiting.notify_one();
        self.clear_leftovers(report).await
    }

    /// An agent may write until its machine is off. Whose record is gone and who has been silent for long is.
    async fn clear_leftovers(&self, report: HashMap<String, AgentReport>) -> Result<(), AwsError> {
        let silent_since = Timestamp::now() - LEFTOVER_AGE;
        for (id, report) in report {
            let beat = report.heartbeat.map(|beat| beat.updated_at);
            let last = beat.max(report.signal.map(|signal| signal.updated_at));
            if last.is_none_or(|last| last < silent_since) && self.get(&id).is_none() {
                self.records.forget_report(&id).await?;
            }
        }
        Ok(())
    }

    /// Stores transitions, many at once and each under its own condition. What could not be done for want of AWS is the
    /// error; whatever was done is known.
    pub async fn apply(&self, transitions: Vec<Transition>) -> Result<Vec<WriteOutcome>, AwsError> {
        let writes = transitions.chunks(MOVES_PER_WRITE).map(async |transitions| {
            let outcomes = self.records.apply(transitions).await?;
            for (outcome, transition) in outcomes.iter().zip(transitions) {
                self.settle(outcome);
                if let Some(seen) = transition.seen() {
                    self.drop_vanished(seen, outcome);
                    self.tell_former(seen, transition.next());
                }
            }
            Ok(outcomes)
        });
        let outcomes: Result<Vec<_>, AwsError> = join_all(writes).await.into_iter().collect();
        Ok(outcomes?.into_iter().flatten().collect())
    }

    /// Removes an ended instance for good.
    pub async fn forget(&self, id: &str) -> Result<(), AwsError> {
        self.records.forget(id).await?;
        let forgotten = self.known().remove(id);
        forgotten.iter().for_each(|tracked| self.tell(&tracked.record));
        Ok(())
    }

    fn settle(&self, outcome: &WriteOutcome) {
        if let WriteOutcome::Won(record) | WriteOutcome::Lost(Some(record)) = outcome {
            let mut known = self.known();
            let (report, read_at) = match known.get(&record.instance_id) {
                Some(tracked) => (tracked.report.clone(), tracked.read_at),
                None => (AgentReport::default(), Timestamp::now()),
            };
            known.put(Machine { record: record.clone(), report, read_at }, Instant::now());
            drop(known);
            self.tell(record);
            self.waiting.notify_one();
        }
    }

    /// Somebody has removed the record: there is nothing more to be done with it.
    fn drop_vanished(&self, seen: &Instance, outcome: &WriteOutcome) {
        if *outcome == WriteOutcome::Lost(None) {
            self.known().remove(&seen.instance_id);
            self.tell(seen);
        }
    }

    /// The claim that had an instance hears that it is gone.
    fn tell_former(&self, seen: &Instance, next: &Instance) {
        if seen.claim != next.claim && !seen.claim.is_empty() {
            self.claims.tell((seen.pool.clone(), seen.claim.clone()));
        }
    }

    fn tell(&self, record: &Instance) {
        self.news.send_replace(());
        self.counts.tell(record.pool.clone());
        self.workers.tell(record.instance_id.clone());
        if !record.claim.is_empty() {
            self.claims.tell((record.pool.clone(), record.claim.clone()));
        }
    }

    /// Reads what awaited agents write, until `stop`; sleeps while nobody waits for one.
    pub async fn listen(&self, stop: CancellationToken) {
        loop {
            if stop.is_cancelled() {
                return;
            }
            let looks = self.known().due(Instant::now());
            let pause = if looks.is_empty() {
                self.known().next_look()
            } else {
                match self.records.report(&looks).await {
                    Ok(report) => {
                        let news = self.known().looked(&looks, report, Instant::now());
                        news.iter().for_each(|tracked| self.hear(tracked));
                        continue;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "agents cannot be heard");
                        Some(Instant::now() + BACKOFF)
                    }
                }
            };
            let due = async {
                match pause {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.waiting.notified() => {}
                () = due => {}
            }
        }
    }

    /// An agent has said something new.
    fn hear(&self, tracked: &Machine) {
        let record = &tracked.record;
        if record.state != State::Terminated {
            self.tell(record);
            // Nobody but its pool moves it on.
            if record.run_id.is_empty() {
                self.pools.tell(record.pool.clone());
            }
        }
    }
}

/// What came later of both: a write of ours, or a look at an agent, may have ended while pages were being read.
fn newest(ours: Machine, read: Machine) -> Machine {
    let signal = |report: &AgentReport| report.signal.as_ref().map(|signal| signal.updated_at);
    let newer = signal(&ours.report) > signal(&read.report);
    let report = AgentReport { signal: if newer { ours.report.signal } else { read.report.signal }, ..read.report };
    let record = if ours.record.updated_at > read.record.updated_at { ours.record } else { read.record };
    Machine { record, report, read_at: read.read_at }
}
