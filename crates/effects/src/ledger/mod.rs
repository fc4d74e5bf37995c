//! The ledger: an in-memory copy of the table, kept while this replica leads.
//!
//! Only the leader writes `INSTANCE` records, so its own writes keep the ledger current. A periodic reload picks up
//! late writes of a previous leader. Signals are polled in batches, only for instances whose next transition depends on
//! them, so a settled system reads heartbeats alone. Agents' items are read by key, never by a query: what a machine
//! writes cannot add to what is read.

mod change_queue;
mod index;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::{
    Stream, StreamExt,
    future::{join_all, ready},
    stream,
};
use jiff::SignedDuration;
use paddock_core::{
    ec2::machine::{AgentReport, Machine},
    names::PoolKey,
};
use paddock_record::{ClaimRef, Instance, State, Transition, wakes};
use tokio::sync::{Notify, OnceCell, watch};
use tokio_util::sync::CancellationToken;

use self::{change_queue::ChangeQueue, index::LedgerIndex};
use crate::{
    aws::{
        AwsError,
        dynamodb::{MOVES_PER_WRITE, Records, WriteOutcome},
        reports::ReportQuery,
    },
    clock,
    kube::lanes::{Lanes, UrgentGuard},
};

/// Delay after a failed poll of agent reports.
const POLL_BACKOFF: Duration = Duration::from_secs(2);

/// A reload keeps younger records that it did not find: they may have been written after their page was read.
const RELOAD_GRACE: SignedDuration = SignedDuration::from_mins(1);

/// How long agent reports are batched before their pool is reconciled.
const POOL_WINDOW: Duration = Duration::from_millis(10);
/// How long other changes are batched before their pool's counts are updated.
const COUNT_WINDOW: Duration = Duration::from_secs(1);
/// How long changes are batched before Workers are updated, so that two quick changes cause one write.
pub const WORKER_WINDOW: Duration = Duration::from_millis(200);

pub struct Ledger {
    pub records: Records,
    index: Mutex<LedgerIndex>,
    /// Claims, by pool and name, whose instances changed.
    claims: Arc<ChangeQueue<(String, String)>>,
    /// Pools with new reports of unclaimed instances, and pools whose counts changed.
    pools: Arc<ChangeQueue<String>>,
    counts: Arc<ChangeQueue<String>>,
    /// Instances that changed.
    workers: Arc<ChangeQueue<String>>,
    /// Instances whose agents have to read their records.
    woken: Arc<ChangeQueue<String>>,
    /// Notified of every change.
    changed: watch::Sender<()>,
    poll_wakeup: Notify,
    loaded: OnceCell<()>,
    lanes: Lanes,
    /// Open while warm agents are about to answer.
    urgent: Mutex<Option<UrgentGuard>>,
}

impl Ledger {
    pub fn new(records: Records, lanes: Lanes) -> Self {
        Self {
            records,
            index: Mutex::default(),
            claims: Arc::default(),
            pools: Arc::default(),
            counts: Arc::default(),
            workers: Arc::default(),
            woken: Arc::default(),
            changed: watch::Sender::default(),
            poll_wakeup: Notify::new(),
            loaded: OnceCell::new(),
            lanes,
            urgent: Mutex::default(),
        }
    }

    fn index(&self) -> MutexGuard<'_, LedgerIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, id: &str) -> Option<Machine> {
        self.index().get(id).cloned()
    }

    pub fn all(&self) -> Vec<Machine> {
        self.index().all().cloned().collect()
    }

    pub fn of_pool(&self, pool: &PoolKey) -> Vec<Machine> {
        self.index().of_pool(&pool.to_string()).cloned().collect()
    }

    /// The instances in the service of a claim, terminated ones included.
    pub fn of_claim(&self, pool: &PoolKey, claim: ClaimRef) -> Vec<Machine> {
        self.index().of_claim(&pool.to_string(), claim).cloned().collect()
    }

    /// How many live instances a claim has.
    pub fn count_held(&self, pool: &PoolKey, claim: ClaimRef) -> u32 {
        let is_live = |machine: &&Machine| machine.record.state != State::Terminated;
        self.index().of_claim(&pool.to_string(), claim).filter(is_live).count() as u32
    }

    /// The instances of a pool that match `wanted`.
    pub fn find(&self, pool: &PoolKey, wanted: impl Fn(&Machine) -> bool) -> Vec<Machine> {
        self.index().of_pool(&pool.to_string()).filter(|machine| wanted(machine)).cloned().collect()
    }

    /// How many instances of a pool match `wanted`.
    pub fn count(&self, pool: &PoolKey, wanted: impl Fn(&Machine) -> bool) -> u32 {
        self.index().of_pool(&pool.to_string()).filter(|machine| wanted(machine)).count() as u32
    }

    /// The instances of a pool, without a copy. Nothing else can use the ledger meanwhile.
    pub fn read_pool<T>(&self, pool: &PoolKey, read: impl FnOnce(&mut dyn Iterator<Item = &Machine>) -> T) -> T {
        read(&mut self.index().of_pool(&pool.to_string()))
    }

    /// Notifies of every change in the ledger.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Claims, by pool and name, whose instances changed. Like the other streams it supports a single reader.
    pub fn changed_claims(&self) -> impl Stream<Item = (PoolKey, String)> + Send + use<> {
        let parse = |(pool, claim): (String, String)| ready(PoolKey::parse(&pool).map(|pool| (pool, claim)));
        self.claims.stream(Duration::ZERO).filter_map(parse)
    }

    /// Pools to reconcile.
    pub fn changed_pools(&self) -> impl Stream<Item = PoolKey> + Send + use<> {
        let changed = stream::select(self.pools.stream(POOL_WINDOW), self.counts.stream(COUNT_WINDOW));
        changed.filter_map(|pool| ready(PoolKey::parse(&pool)))
    }

    /// Instances that were changed or removed.
    pub fn changed_instances(&self) -> impl Stream<Item = HashSet<String>> + Send + use<> {
        self.workers.batches(WORKER_WINDOW)
    }

    /// Instances whose records have changed in a way that their agents act on.
    pub fn woken_instances(&self) -> impl Stream<Item = String> + Send + use<> {
        self.woken.stream(Duration::ZERO)
    }

    /// Enqueues the Worker of an instance.
    pub fn enqueue_worker(&self, id: &str) {
        self.workers.enqueue(id.to_owned());
    }

    /// Loads the ledger once; false while the table is being created. Until then, an instance that the ledger does not
    /// have may still exist.
    pub async fn load(&self) -> Result<bool, AwsError> {
        if !self.loaded.initialized() {
            if !self.records.ensure_table().await? {
                return Ok(false);
            }
            self.loaded.get_or_try_init(|| self.reload()).await?;
        }
        Ok(true)
    }

    /// Like [`Self::load`], and recreates the table if it was deleted.
    pub async fn ensure(&self) -> Result<bool, AwsError> {
        Ok(self.load().await? && self.records.ensure_table().await?)
    }

    pub fn is_loaded(&self) -> bool {
        self.loaded.initialized()
    }

    /// Reloads all records, with the reports of live instances that are new.
    pub async fn reload(&self) -> Result<(), AwsError> {
        let instances = self.records.instances().await?;
        let new: Vec<_> = {
            let index = self.index();
            let live = instances.iter().filter(|record| record.state != State::Terminated);
            let ids = live.map(|record| record.instance_id.clone()).filter(|id| index.get(id).is_none());
            ids.map(|id| ReportQuery { id, heartbeat: true }).collect()
        };
        let mut reports = self.records.report(&new).await?;
        let (now, grace_start) = (Instant::now(), clock::now() - RELOAD_GRACE);
        let mut touched = Vec::new();
        {
            let mut index = self.index();
            let mut gone: HashSet<_> = index.all().map(|machine| machine.record.instance_id.clone()).collect();
            for record in instances {
                let id = record.instance_id.clone();
                gone.remove(&id);
                let machine = match index.get(&id) {
                    // A write may have completed during the reload.
                    Some(ours) if ours.record.updated_at > record.updated_at => ours.clone(),
                    Some(ours) => Machine { record, ..ours.clone() },
                    None => {
                        let read = reports.remove(&id).unwrap_or_default();
                        if let Some(fault) = &read.fault {
                            index.note_fault(&id, fault);
                        }
                        Machine::new(record, read.report, clock::now())
                    }
                };
                touched.push(machine.record.clone());
                index.put(machine, now);
            }
            for id in gone {
                // It may have been inserted during the reload.
                if index.get(&id).is_some_and(|machine| machine.record.updated_at <= grace_start) {
                    touched.extend(index.remove(&id).map(|machine| machine.record));
                }
            }
        }
        touched.iter().for_each(|record| self.record_changed(record));
        self.poll_wakeup.notify_one();
        Ok(())
    }

    /// Stores transitions in batches, each under its own condition. If a batch fails with an AWS error, the ledger
    /// still has the results of the others.
    pub async fn apply(&self, transitions: Vec<Transition>) -> Result<Vec<WriteOutcome>, AwsError> {
        let writes = transitions.chunks(MOVES_PER_WRITE).map(async |transitions| {
            let outcomes = self.records.apply(transitions).await?;
            for (outcome, transition) in outcomes.iter().zip(transitions) {
                self.store_outcome(outcome);
                if let Some(seen) = transition.seen() {
                    self.drop_vanished(seen, outcome);
                    self.notify_previous_claim(seen, transition.next());
                    if matches!(outcome, WriteOutcome::Won(_)) && wakes(seen, transition.next()) {
                        self.woken.enqueue(seen.instance_id.clone());
                    }
                }
            }
            Ok(outcomes)
        });
        let outcomes: Result<Vec<_>, AwsError> = join_all(writes).await.into_iter().collect();
        Ok(outcomes?.into_iter().flatten().collect())
    }

    /// Deletes the record of a terminated instance, after what its agent wrote on its way down.
    pub async fn forget(&self, id: &str) -> Result<(), AwsError> {
        self.records.forget_report(id).await?;
        self.records.forget(id).await?;
        let forgotten = self.index().remove(id);
        forgotten.iter().for_each(|machine| self.record_changed(&machine.record));
        Ok(())
    }

    fn store_outcome(&self, outcome: &WriteOutcome) {
        if let WriteOutcome::Won(record) | WriteOutcome::Lost(Some(record)) = outcome {
            let mut index = self.index();
            let machine = match index.get(&record.instance_id) {
                Some(machine) => Machine { record: record.clone(), ..machine.clone() },
                None => Machine::new(record.clone(), AgentReport::default(), clock::now()),
            };
            index.put(machine, Instant::now());
            drop(index);
            self.record_changed(record);
            self.poll_wakeup.notify_one();
        }
    }

    /// Drops an instance whose record was deleted by another writer.
    fn drop_vanished(&self, seen: &Instance, outcome: &WriteOutcome) {
        if *outcome == WriteOutcome::Lost(None) {
            self.index().remove(&seen.instance_id);
            self.record_changed(seen);
        }
    }

    /// Enqueues the claim that a transition took the instance from.
    fn notify_previous_claim(&self, seen: &Instance, next: &Instance) {
        if seen.claim != next.claim && !seen.claim.is_empty() {
            self.claims.enqueue((seen.pool.clone(), seen.claim.clone()));
        }
    }

    fn record_changed(&self, record: &Instance) {
        self.update_urgency();
        self.changed.send_replace(());
        self.counts.enqueue(record.pool.clone());
        self.workers.enqueue(record.instance_id.clone());
        if !record.claim.is_empty() {
            self.claims.enqueue((record.pool.clone(), record.claim.clone()));
        }
    }

    fn update_urgency(&self) {
        // Locked first, so that of two changes at once the later one counts.
        let mut urgent = self.urgent.lock().unwrap_or_else(PoisonError::into_inner);
        let awaits_warm_agents = self.index().awaits_warm_agents();
        if urgent.is_some() != awaits_warm_agents {
            *urgent = awaits_warm_agents.then(|| self.lanes.urgent());
        }
    }

    /// Reads the heartbeats whose turn it is. `limit` is how long a machine may be silent.
    pub async fn read_heartbeats(&self, limit: impl Fn(&Machine) -> SignedDuration) -> Result<(), AwsError> {
        if !self.is_loaded() || !self.index().has_live() {
            return Ok(());
        }
        let next = self.index().next_heartbeats(limit, clock::now());
        let heartbeats = self.records.heartbeats(&next).await?;
        let changed = self.index().update_heartbeats(heartbeats, clock::now());
        changed.iter().for_each(|machine| self.report_changed(machine));
        let unread = self.index().unread_signals(&next);
        if !unread.is_empty() {
            let reports = self.records.report(&unread).await?;
            let changed = {
                let mut index = self.index();
                index.note_signals(reports.keys());
                index.update(&unread, reports, Instant::now())
            };
            changed.iter().for_each(|machine| self.report_changed(machine));
        }
        Ok(())
    }

    /// The largest skew of a live agent's clock; zero without any.
    pub fn worst_skew(&self) -> SignedDuration {
        let index = self.index();
        let live = index.all().filter(|machine| machine.record.state != State::Terminated);
        live.filter_map(|machine| machine.skew).max_by_key(|skew| skew.abs()).unwrap_or_default()
    }

    /// The pause until the next of those reads.
    pub fn heartbeat_pause(&self, limit: impl Fn(&Machine) -> SignedDuration) -> Duration {
        self.index().heartbeat_pause(limit, clock::now())
    }

    /// Polls the reports of awaited agents until `stop`; sleeps while none is awaited.
    pub async fn listen(&self, stop: CancellationToken) {
        loop {
            if stop.is_cancelled() {
                return;
            }
            let queries = self.index().due(Instant::now());
            let next = if queries.is_empty() {
                self.index().next_poll()
            } else {
                match self.records.report(&queries).await {
                    Ok(reports) => {
                        let changed = self.index().update(&queries, reports, Instant::now());
                        changed.iter().for_each(|machine| self.report_changed(machine));
                        continue;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "agent report poll failed");
                        Some(Instant::now() + POLL_BACKOFF)
                    }
                }
            };
            let due = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.poll_wakeup.notified() => {}
                () = due => {}
            }
        }
    }

    /// Notifies of a new agent report.
    fn report_changed(&self, machine: &Machine) {
        let record = &machine.record;
        if record.state != State::Terminated {
            self.record_changed(record);
            // Without a run, the pool reconciles the instance.
            if record.run_id.is_empty() {
                self.pools.enqueue(record.pool.clone());
            }
        }
    }
}
