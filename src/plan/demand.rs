//! Demand: which claims get a board's slot now, and what the others wait for.
//!
//! Claims and workers are matched by owner and labels, not one to one, because GitHub gives a job to any idle runner with
//! its labels. Within that, a worker is made for one claim, oldest first.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use jiff::{SignedDuration, Timestamp};
use sha2::{Digest, Sha256};

use super::{
    board_worker::{self, is_failed, since},
    capacity::{Capacity, PoolKey, is_active},
    entity::{EntityLimits, Scope},
    labels::{self, LabelSet},
};
use crate::api::{BoardPool, BoardWorker, ClaimReason, Hardware, RunnerClaim, RunnerPool, Worker, WorkerState};

/// The wait after a claim's first failed worker; each further one doubles it.
const FIRST_RETRY: SignedDuration = SignedDuration::from_secs(5);
/// The longest wait: what fails for an hour is looked at by a person, who should not wait for another.
const LAST_RETRY: SignedDuration = SignedDuration::from_mins(10);

/// Everything that a decision rests on.
pub struct Scene<'a> {
    pub pools: &'a [Arc<RunnerPool>],
    pub claims: &'a [Arc<RunnerClaim>],
    /// All workers, also those just made that no cache shows yet.
    pub workers: &'a [Arc<Worker>],
    pub capacity: Capacity,
    pub limits: &'a EntityLimits,
    /// Pools that cannot make workers, and why.
    pub not_ready: &'a BTreeMap<PoolKey, String>,
    /// What GitHub said of the claims' jobs, by the claim's uid.
    pub jobs: &'a BTreeMap<String, JobSeen>,
    pub now: Timestamp,
}

/// What GitHub said of a job, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobSeen {
    pub state: JobState,
    pub at: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// No runner has taken it.
    Queued,
    Running,
    Completed,
    /// GitHub does not know it.
    Gone,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Make this worker for this claim. Its name follows from the claim, so that whoever decides the same from an older
    /// view makes the same worker, and the API server lets only one through.
    Provision {
        claim: Arc<RunnerClaim>,
        worker: Box<Worker>,
    },
    Wait {
        claim: Arc<RunnerClaim>,
        wait: Wait,
    },
}

/// What a claim waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    pub reason: ClaimReason,
    pub message: String,
    /// When the decision may change by itself.
    pub retry_at: Option<Timestamp>,
}

impl Wait {
    fn new(reason: ClaimReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), retry_at: None }
    }
}

/// Whether a claim still asks for runners.
pub fn is_open(claim: &RunnerClaim) -> bool {
    let over = claim.status.as_ref().and_then(|status| status.phase).is_some_and(|phase| phase.is_over());
    !over && claim.metadata.deletion_timestamp.is_none()
}

type Group = (String, LabelSet);

/// A claim that can be served: what is asked, of whom, and what it has.
struct Order<'a> {
    claim: &'a Arc<RunnerClaim>,
    pool: PoolKey,
    board: &'a BoardPool,
    group: Group,
    labels: &'a [String],
    /// Runners that the claim still stands for.
    demand: u32,
    /// Runners that it has no worker of its own for.
    need: u32,
    failures: Vec<&'a Worker>,
}

pub fn decide(mut scene: Scene<'_>) -> Vec<Decision> {
    let mut decisions = Vec::new();
    let mut orders = Vec::new();
    for claim in in_line(scene.claims) {
        match order(claim, &scene) {
            None => {}
            Some(Ok(order)) => orders.push(order),
            Some(Err(wait)) => decisions.push(Decision::Wait { claim: claim.clone(), wait }),
        }
    }
    let mut deficits: BTreeMap<Group, i64> = BTreeMap::new();
    for order in &orders {
        *deficits.entry(order.group.clone()).or_default() += i64::from(order.demand);
    }
    let mut running: BTreeMap<String, u32> = BTreeMap::new();
    for (worker, spec) in active_boards(scene.workers) {
        *running.entry(spec.entity.clone()).or_default() += 1;
        // One that is being deleted takes no further job.
        if worker.metadata.deletion_timestamp.is_none() {
            *deficits.entry((spec.entity.clone(), spec.labels.iter().collect())).or_default() -= 1;
        }
    }
    let mut names: BTreeSet<String> = scene.workers.iter().filter_map(|worker| worker.metadata.name.clone()).collect();
    // Groups in which an earlier claim waits: nobody overtakes.
    let mut queues: BTreeMap<Group, u32> = BTreeMap::new();
    for order in orders {
        let deficit = deficits.entry(order.group.clone()).or_default();
        let entity = &order.group.0;
        for _ in 0..order.need {
            let count = running.entry(entity.clone()).or_default();
            let wait = if *deficit <= 0 {
                let message = "as many runners with these labels are on their way as there are jobs for them";
                Some(Wait::new(ClaimReason::WaitingInLine, message))
            } else if let Some(wait) = backoff(&order.failures, scene.now) {
                Some(wait)
            } else {
                let ahead = queues.get(&order.group).copied().unwrap_or(0);
                let wait = blocked(&order, &scene, *count, ahead);
                if wait.is_some() {
                    *queues.entry(order.group.clone()).or_default() += 1;
                }
                wait
            };
            if let Some(wait) = wait {
                decisions.push(Decision::Wait { claim: order.claim.clone(), wait });
                break;
            }
            let worker = worker(&order, &mut names);
            scene.capacity.take(&order.pool);
            (*count, *deficit) = (*count + 1, *deficit - 1);
            decisions.push(Decision::Provision { claim: order.claim.clone(), worker: Box::new(worker) });
        }
    }
    decisions
}

/// Claims that ask for runners, oldest first; the name decides within a second.
fn in_line(claims: &[Arc<RunnerClaim>]) -> Vec<&Arc<RunnerClaim>> {
    let mut open: Vec<_> = claims.iter().filter(|claim| is_open(claim)).collect();
    open.sort_by_key(|claim| {
        let created = claim.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (created.unwrap_or(Timestamp::MAX), &claim.metadata.namespace, &claim.metadata.name)
    });
    open
}

/// `None` for a claim that boards do not serve.
fn order<'a>(claim: &'a Arc<RunnerClaim>, scene: &Scene<'a>) -> Option<Result<Order<'a>, Wait>> {
    let here = scene.pools.iter().filter(|pool| pool.metadata.namespace == claim.metadata.namespace);
    let pool = match labels::select(claim, here.map(Arc::as_ref)) {
        Ok(pool) => pool,
        Err((reason, message)) => return Some(Err(Wait::new(reason, message))),
    };
    match pool.spec.hardware()? {
        Hardware::Ec2(_) => None,
        Hardware::Board(board) => Some(board_order(claim, pool, board, scene)),
    }
}

fn board_order<'a>(
    claim: &'a Arc<RunnerClaim>,
    pool: &RunnerPool,
    board: &'a BoardPool,
    scene: &Scene<'a>,
) -> Result<Order<'a>, Wait> {
    let invalid = |message: &str| Wait::new(ClaimReason::InvalidSpec, message);
    let spec = &claim.spec;
    let key = pool_key(pool);
    let owner = spec.owner.as_ref();
    let owner = owner.ok_or_else(|| invalid("a claim on a board pool needs spec.owner: its runners register there"))?;
    let entity = spec.entity().ok_or_else(|| invalid("a personal account's claim needs spec.repositoryId"))?;
    Scope::of(owner, spec.repository.as_deref()).map_err(|error| invalid(&error.to_string()))?;
    let labels = labels::runner_labels(claim, board);
    if labels.is_empty() {
        return Err(invalid("the pool serves overrides alone: the claim needs spec.labels"));
    }
    if pool.metadata.deletion_timestamp.is_some() {
        return Err(Wait::new(ClaimReason::PoolNotReady, format!("pool {} is being deleted", key.1)));
    }
    if let Some(why) = scene.not_ready.get(&key) {
        return Err(Wait::new(ClaimReason::PoolNotReady, format!("pool {} is not ready: {why}", key.1)));
    }
    let own: Vec<&Worker> =
        scene.workers.iter().map(Arc::as_ref).filter(|worker| board_worker::serves(worker, claim)).collect();
    let active = own.iter().filter(|worker| is_active(worker) && worker.metadata.deletion_timestamp.is_none()).count();
    let completed = own.iter().filter(|worker| board_worker::state(worker) == WorkerState::Completed);
    let active = u32::try_from(active).unwrap_or(u32::MAX);
    let (demand, need) = match spec.job {
        None => {
            let done = u32::try_from(completed.count()).unwrap_or(u32::MAX);
            let demand = spec.count.saturating_sub(done);
            (demand, demand.saturating_sub(active))
        }
        // Its worker may have run another job. Only GitHub knows whether this one still waits.
        Some(_) => {
            let last = completed.filter_map(|worker| since(worker)).max();
            let seen = claim.metadata.uid.as_ref().and_then(|uid| scene.jobs.get(uid));
            let waits =
                last.is_none_or(|last| seen.is_some_and(|seen| seen.state == JobState::Queued && seen.at >= last));
            (spec.count, if waits { spec.count.saturating_sub(active) } else { 0 })
        }
    };
    let failures = own.into_iter().filter(|worker| is_failed(worker)).collect();
    let group = (entity, labels.iter().collect());
    Ok(Order { claim, pool: key, board, group, labels, demand, need, failures })
}

/// The cap, the line and the slots, in this order: a cap is the owner's own business, a slot is everybody's.
fn blocked(order: &Order<'_>, scene: &Scene<'_>, running: u32, ahead: u32) -> Option<Wait> {
    let cap = scene.limits.of(&order.group.0);
    if running >= cap {
        let login = order.claim.spec.owner.as_ref().map_or("the owner", |owner| owner.login.as_str());
        return Some(Wait::new(ClaimReason::QuotaReached, format!("{login} has {running} of {cap} workers")));
    }
    if ahead > 0 {
        let claims = if ahead == 1 { "claim comes" } else { "claims come" };
        return Some(Wait::new(ClaimReason::WaitingInLine, format!("{ahead} earlier {claims} first")));
    }
    if scene.capacity.free(&order.pool) == 0 {
        let (board, total) = (&order.board.board, scene.capacity.total(&order.pool));
        return Some(Wait::new(ClaimReason::NoFreeSlot, format!("no free slot on board {board} (0 of {total})")));
    }
    None
}

/// A claim whose workers fail waits longer each time, and nobody waits for it.
fn backoff(failures: &[&Worker], now: Timestamp) -> Option<Wait> {
    let last = failures.iter().max_by_key(|worker| since(worker))?;
    let doubled = FIRST_RETRY.checked_mul(1 << failures.len().saturating_sub(1).min(16)).unwrap_or(LAST_RETRY);
    let retry_at = since(last)?.saturating_add(doubled.min(LAST_RETRY)).ok()?;
    let failure = last.status.as_ref().and_then(|status| status.failure.as_ref());
    let why = failure
        .map_or("for no known reason".into(), |failure| format!("({}): {}", failure.reason.as_str(), failure.message));
    let name = last.metadata.name.as_deref().unwrap_or_default();
    (retry_at > now).then(|| Wait {
        reason: ClaimReason::WorkerLost,
        message: format!("worker {name} failed {why}; the next one is made at {retry_at:.0}"),
        retry_at: Some(retry_at),
    })
}

fn worker(order: &Order<'_>, names: &mut BTreeSet<String>) -> Worker {
    let uid = order.claim.metadata.uid.as_deref().unwrap_or_default();
    let name = (0u32..).map(|index| worker_name(&order.pool.1, uid, index)).find(|name| names.insert(name.clone()));
    let spec = &order.claim.spec;
    let board = BoardWorker {
        claim: order.claim.metadata.name.clone().unwrap_or_default(),
        entity: order.group.0.clone(),
        labels: order.labels.to_vec(),
        owner: spec.owner.clone().expect("an order has an owner"),
        repository: spec.repository.clone(),
        installation_id: spec.installation_id,
    };
    board_worker::worker(name.expect("numbers do not run out"), order.claim, &order.pool.1, board)
}

/// At most 51 characters; GitHub takes 64 for a runner's name.
fn worker_name(pool: &str, claim_uid: &str, index: u32) -> String {
    let digest = Sha256::digest(format!("{claim_uid}/{index}"));
    let digest: String = digest.iter().take(5).map(|byte| format!("{byte:02x}")).collect();
    format!("{pool}-{digest}")
}

pub fn pool_key(pool: &RunnerPool) -> PoolKey {
    let meta = &pool.metadata;
    (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
}

fn active_boards(workers: &[Arc<Worker>]) -> impl Iterator<Item = (&Worker, &BoardWorker)> {
    workers
        .iter()
        .filter(|worker| is_active(worker))
        .filter_map(|worker| Some((&**worker, worker.spec.board.as_ref()?)))
}

#[cfg(test)]
#[path = "demand_tests.rs"]
mod tests;
