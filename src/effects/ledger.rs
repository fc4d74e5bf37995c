//! What is known of every instance: the table, kept in memory while this replica leads.
//!
//! The leader alone writes `INSTANCE` records, so its own writes keep the ledger true; a full read from time to time
//! corrects whatever a predecessor did late. What agents write is read for exactly those instances that somebody
//! waits for, all in one batch, so a settled system reads nothing.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{Stream, stream};
use jiff::{SignedDuration, Timestamp};
use paddock_record::{Instance, State};
use tokio::sync::{Notify, OnceCell, broadcast};
use tokio_util::sync::CancellationToken;

use super::{
    aws::AwsError,
    records::{Outcome, Records},
};
use crate::plan::instance::{Tracked, Vitals};

/// How often agents that somebody waits for are looked at; a ready runner is seen within a quarter of a second.
const POLL: Duration = Duration::from_millis(100);
/// After a failed read: the store is in trouble, more reads do not help it.
const BACKOFF: Duration = Duration::from_secs(2);

/// How long an agent without a record must have been silent before what it wrote is removed: longer than a machine takes
/// to get its record, or to go down.
const LEFTOVER_AGE: SignedDuration = SignedDuration::from_mins(10);

/// A record of this age may have been written while pages were being read that do not have it.
const YOUNG: SignedDuration = SignedDuration::from_mins(1);

pub struct Ledger {
    pub records: Records,
    known: Mutex<HashMap<String, Tracked>>,
    changes: broadcast::Sender<Change>,
    waiting: Notify,
    loaded: OnceCell<()>,
}

/// Something about an instance changed: its pool and its claim (or its former one) may have work to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// `namespace/name`.
    pub pool: String,
    /// Empty when no claim holds the instance.
    pub claim: String,
}

impl Ledger {
    pub fn new(records: Records) -> Self {
        let changes = broadcast::Sender::new(4096);
        Self { records, known: Mutex::default(), changes, waiting: Notify::new(), loaded: OnceCell::new() }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Tracked>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, id: &str) -> Option<Tracked> {
        self.known().get(id).cloned()
    }

    pub fn all(&self) -> Vec<Tracked> {
        self.select(|_| true)
    }

    pub fn of_pool(&self, pool: &str) -> Vec<Tracked> {
        self.select(|record| record.pool == pool)
    }

    pub fn of_claim(&self, pool: &str, claim: &str) -> Vec<Tracked> {
        self.select(|record| record.pool == pool && record.claim == claim)
    }

    fn select(&self, wanted: impl Fn(&Instance) -> bool) -> Vec<Tracked> {
        let mut found: Vec<_> = self.known().values().filter(|tracked| wanted(&tracked.record)).cloned().collect();
        found.sort_by(|a, b| a.record.instance_id.cmp(&b.record.instance_id));
        found
    }

    /// Changes from now on.
    pub fn changes(&self) -> impl Stream<Item = Change> + Send + use<> {
        stream::unfold(self.changes.subscribe(), |mut changes| async move {
            loop {
                match changes.recv().await {
                    Ok(change) => return Some((change, changes)),
                    // The next reload tells of everything anew.
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => return None,
                }
            }
        })
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
        let (instances, mut vitals) = tokio::try_join!(self.records.instances(), self.records.all_vitals())?;
        let now = Timestamp::now();
        let mut changed = Vec::new();
        {
            let mut known = self.known();
            let mut fresh = HashMap::with_capacity(instances.len());
            for record in instances {
                let id = record.instance_id.clone();
                let tracked = Tracked { vitals: vitals.remove(&id).unwrap_or_default(), record, read_at: now };
                // A write of ours that ended while the pages were being read is newer than the page.
                let tracked = match known.remove(&id) {
                    Some(ours) if ours.record.updated_at > tracked.record.updated_at => ours,
                    _ => tracked,
                };
                fresh.insert(id, tracked);
            }
            // Entered while the pages were being read.
            let young = now - YOUNG;
            fresh.extend(known.extract_if(|_, tracked| tracked.record.updated_at > young));
            let gone: Vec<_> = known.drain().map(|(_, tracked)| change(&tracked.record)).collect();
            changed.extend(fresh.values().map(|tracked| change(&tracked.record)));
            changed.extend(gone);
            *known = fresh;
        }
        self.clear_leftovers(vitals).await?;
        changed.sort_by(|a, b| (&a.pool, &a.claim).cmp(&(&b.pool, &b.claim)));
        changed.dedup();
        for change in changed {
            let _ = self.changes.send(change);
        }
        self.waiting.notify_one();
        Ok(())
    }

    /// An agent may write until its machine is off. Whose record is gone and who has been silent for long is.
    async fn clear_leftovers(&self, vitals: HashMap<String, Vitals>) -> Result<(), AwsError> {
        let silent_since = Timestamp::now() - LEFTOVER_AGE;
        for (id, vitals) in vitals {
            let beat = vitals.heartbeat.map(|beat| beat.updated_at);
            let last = beat.max(vitals.signal.map(|signal| signal.updated_at));
            if last.is_none_or(|last| last < silent_since) && self.get(&id).is_none() {
                self.records.forget_vitals(&id).await?;
            }
        }
        Ok(())
    }

    /// Enters a new instance.
    pub async fn create(&self, instance: &Instance) -> Result<Outcome, AwsError> {
        let outcome = self.records.create(instance).await?;
        self.settle(&outcome);
        Ok(outcome)
    }

    /// Moves an instance on; see [`Records::advance`].
    pub async fn advance(&self, seen: &Instance, next: &Instance, now: Timestamp) -> Result<Outcome, AwsError> {
        let outcome = self.records.advance(seen, next, now).await?;
        self.settle(&outcome);
        if seen.claim != next.claim {
            let _ = self.changes.send(change(seen));
        }
        Ok(outcome)
    }

    /// Removes an ended instance for good.
    pub async fn forget(&self, id: &str) -> Result<(), AwsError> {
        self.records.forget(id).await?;
        if let Some(tracked) = self.known().remove(id) {
            let _ = self.changes.send(change(&tracked.record));
        }
        Ok(())
    }

    fn settle(&self, outcome: &Outcome) {
        if let Outcome::Won(record) | Outcome::Lost(Some(record)) = outcome {
            let mut known = self.known();
            let (vitals, read_at) = match known.remove(&record.instance_id) {
                Some(tracked) => (tracked.vitals, tracked.read_at),
                None => (Vitals::default(), Timestamp::now()),
            };
            known.insert(record.instance_id.clone(), Tracked { record: record.clone(), vitals, read_at });
            drop(known);
            let _ = self.changes.send(change(record));
            self.waiting.notify_one();
        }
    }

    /// Reads what awaited agents write, until `stop`; sleeps while nobody waits for one.
    pub async fn listen(&self, stop: CancellationToken) {
        loop {
            let awaited: Vec<_> = {
                let known = self.known();
                known.values().filter(|t| t.awaits_agent()).map(|t| t.record.instance_id.clone()).collect()
            };
            let pause = if awaited.is_empty() {
                None
            } else {
                match self.records.vitals(&awaited).await {
                    Ok(vitals) => {
                        self.take_in(vitals);
                        Some(POLL)
                    }
                    Err(error) => {
                        tracing::warn!(%error, "agents cannot be heard");
                        Some(BACKOFF)
                    }
                }
            };
            let pause = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => self.waiting.notified().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = pause => {}
            }
        }
    }

    fn take_in(&self, vitals: HashMap<String, Vitals>) {
        let mut known = self.known();
        for (id, new) in vitals {
            let Some(tracked) = known.get_mut(&id) else { continue };
            let key = |vitals: &Vitals| vitals.heartbeat.as_ref().and_then(|b| b.public_key.clone());
            // A mere beat is no news: only its absence is, and that is judged when its time is up.
            let news = tracked.vitals.signal != new.signal
                || key(&tracked.vitals) != key(&new)
                || tracked.vitals.heartbeat.is_none() != new.heartbeat.is_none();
            (tracked.vitals, tracked.read_at) = (new, Timestamp::now());
            if news && tracked.record.state != State::Terminated {
                let _ = self.changes.send(change(&tracked.record));
            }
        }
    }
}

fn change(record: &Instance) -> Change {
    Change { pool: record.pool.clone(), claim: record.claim.clone() }
}
