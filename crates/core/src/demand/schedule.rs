//! Demand: which claims get a board's slot now, what the others wait for, and which workers nobody needs.
//!
//! Claims and workers are matched by owner and labels, not one to one, because GitHub gives a job to any idle runner with
//! its labels. Within that, a worker is made for one claim, oldest first.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;

use super::{
    job::{JobSeen, JobState},
    pool_selection::{self, LabelSet},
    quota::{EntityLimits, Scope},
    supply::{Index, name, takes_jobs},
};
use crate::{
    api::{BoardPool, BoardWorker, ClaimReason, Hardware, Owner, RunnerClaim, RunnerPool, Worker, WorkerState},
    backoff::Backoff,
    boards::{
        health::Binding,
        slots::{Capacity, is_active},
        worker::{self, attempt, is_failed, since, state},
    },
    names::{PoolKey, worker_name},
};

/// How long a claim waits after its workers failed.
const FAILURE_BACKOFF: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_mins(10));

/// Everything that a decision rests on.
pub struct DemandFacts<'a> {
    pub pools: &'a [Arc<RunnerPool>],
    pub claims: &'a [Arc<RunnerClaim>],
    /// Those that are active or asked for by an open claim, also such just made that no cache shows yet.
    pub workers: &'a [Arc<Worker>],
    pub capacity: Capacity,
    pub limits: &'a EntityLimits,
    /// Pools that cannot make workers, and why.
    pub not_ready: &'a BTreeMap<PoolKey, String>,
    /// What GitHub said of the claims' jobs, by the claim's uid.
    pub jobs: &'a BTreeMap<String, JobSeen>,
    /// Owners that GitHub gave no runner for.
    pub troubles: &'a BTreeMap<String, OwnerBackoff>,
    /// How the names of workers begin.
    pub prefix: &'a str,
    pub now: Timestamp,
}

/// GitHub gives an owner no runner. Others are not made to wait for that owner's workers, so that it gets none until
/// later, and then one to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerBackoff {
    pub why: String,
    pub since: Timestamp,
    pub retry_at: Timestamp,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub decisions: Vec<Decision>,
    /// What the runners of active workers do, as far as jobs tell, by the worker's name.
    pub bindings: BTreeMap<String, Binding>,
    /// The names of workers that no open claim needs.
    pub surplus: BTreeSet<String>,
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

/// An open claim: what it asks for, and what it has.
struct Request<'a> {
    claim: &'a Arc<RunnerClaim>,
    /// Nothing for a claim whose owner or labels are not known.
    group: Option<Group>,
    /// Runners that the claim still stands for.
    demand: u32,
    /// Runners that it has no worker of its own for.
    need: u32,
    /// The number of its last worker.
    attempt: u32,
    failures: Vec<&'a Worker>,
    place: Result<Placement<'a>, Wait>,
}

/// Where a claim can be served.
struct Placement<'a> {
    pool: PoolKey,
    owner: &'a Owner,
    board: &'a BoardPool,
    group: Group,
    labels: &'a [String],
}

pub fn decide(mut scene: DemandFacts<'_>) -> Plan {
    let index = Index::of(scene.claims, scene.workers, scene.jobs);
    let bindings = index.bindings(scene.claims, scene.now);
    let orders: Vec<_> =
        in_line(scene.claims).into_iter().filter_map(|claim| order(claim, &scene, &index, &bindings)).collect();
    let mut deficits: BTreeMap<Group, i64> = BTreeMap::new();
    for order in &orders {
        if let Some(group) = &order.group {
            *deficits.entry(group.clone()).or_default() += i64::from(order.demand);
        }
    }
    let mut running: BTreeMap<String, u32> = BTreeMap::new();
    let mut spare: BTreeMap<Group, Vec<&Worker>> = BTreeMap::new();
    for (worker, spec) in active_boards(scene.workers) {
        *running.entry(spec.entity.clone()).or_default() += 1;
        if takes_jobs(worker, &bindings) {
            let group = (spec.entity.clone(), spec.labels.iter().collect());
            *deficits.entry(group.clone()).or_default() -= 1;
            spare.entry(group).or_default().push(worker);
        }
    }
    let surplus = surplus(&orders, &deficits, spare);

    let mut decisions = Vec::new();
    // Owners whose trouble somebody tries again already.
    let mut trying: BTreeSet<&str> = BTreeSet::new();
    // Groups in which an earlier claim waits: nobody overtakes.
    let mut queues: BTreeMap<Group, u32> = BTreeMap::new();
    for order in &orders {
        let mut attempt = order.attempt;
        let place = match &order.place {
            Ok(place) => place,
            Err(wait) => {
                decisions.push(Decision::Wait { claim: order.claim.clone(), wait: wait.clone() });
                continue;
            }
        };
        let deficit = deficits.entry(place.group.clone()).or_default();
        let entity = &place.group.0;
        for _ in 0..order.need {
            let count = running.entry(entity.clone()).or_default();
            let wait = if *deficit <= 0 {
                let message = "as many runners with these labels are on their way as there are jobs for them";
                Some(Wait::new(ClaimReason::WaitingInLine, message))
            } else if let Some(wait) = backoff(&order.failures, scene.now) {
                Some(wait)
            } else {
                let ahead = queues.get(&place.group).copied().unwrap_or(0);
                let wait = blocked(order.claim, place, &scene, *count, ahead, trying.contains(entity.as_str()));
                if wait.is_some() {
                    *queues.entry(place.group.clone()).or_default() += 1;
                }
                wait
            };
            if let Some(wait) = wait {
                decisions.push(Decision::Wait { claim: order.claim.clone(), wait });
                break;
            }
            attempt += 1;
            trying.insert(entity);
            let worker = worker(order.claim, place, attempt, scene.prefix);
            scene.capacity.take(&place.pool);
            (*count, *deficit) = (*count + 1, *deficit - 1);
            decisions.push(Decision::Provision { claim: order.claim.clone(), worker: Box::new(worker) });
        }
    }
    Plan { decisions, bindings, surplus }
}

/// More runners than jobs: those whose own claim needs none any more go, the youngest first.
fn surplus(
    orders: &[Request<'_>],
    deficits: &BTreeMap<Group, i64>,
    spare: BTreeMap<Group, Vec<&Worker>>,
) -> BTreeSet<String> {
    let asking = orders.iter().filter(|order| order.demand > 0);
    let asking: BTreeSet<_> = asking.filter_map(|order| order.claim.metadata.uid.as_deref()).collect();
    let mut names = BTreeSet::new();
    for (group, mut workers) in spare {
        let most = deficits.get(&group).map_or(0, |deficit| usize::try_from(-deficit).unwrap_or(0));
        workers.retain(|worker| !worker.claim_uid().is_some_and(|uid| asking.contains(uid)));
        workers.sort_by_key(|worker| {
            let made = worker.metadata.creation_timestamp.as_ref().map(|time| time.0);
            std::cmp::Reverse((state(worker) == WorkerState::Pending, made, name(worker)))
        });
        names.extend(workers.into_iter().take(most).map(|worker| name(worker).to_owned()));
    }
    names
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
fn order<'a>(
    claim: &'a Arc<RunnerClaim>,
    scene: &DemandFacts<'a>,
    index: &Index<'a>,
    bindings: &BTreeMap<String, Binding>,
) -> Option<Request<'a>> {
    let here = scene.pools.iter().filter(|pool| pool.metadata.namespace == claim.metadata.namespace);
    let pool = pool_selection::select(claim, here.map(Arc::as_ref));
    let place = match &pool {
        Err((reason, message)) => Err(Wait::new(*reason, message.clone())),
        Ok(pool) => match pool.spec.hardware()? {
            Hardware::Ec2(_) => return None,
            Hardware::Board(board) => place(claim, pool, board),
        },
    };
    let group = place.as_ref().ok().map(|place| place.group.clone());
    let usable = pool.ok().map_or(Ok(()), |pool| serves(pool, scene));

    let own = index.own(claim);
    let (demand, need) = asked(claim, index, bindings);
    let failures = own.iter().copied().filter(|worker| is_failed(worker)).collect();
    let attempt = own.iter().map(|worker| attempt(worker)).max().unwrap_or(0);
    Some(Request { claim, group, demand, need, attempt, failures, place: usable.and(place) })
}

/// Runners that the claim stands for, and those that it has no worker of its own for.
fn asked(claim: &RunnerClaim, index: &Index<'_>, bindings: &BTreeMap<String, Binding>) -> (u32, u32) {
    let (own, count) = (index.own(claim), claim.spec.count);
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let free = number(own.iter().filter(|worker| takes_jobs(worker, bindings)).count());
    let completed = || own.iter().filter(|worker| state(worker) == WorkerState::Completed);
    match index.job(claim) {
        None => {
            let busy = own.iter().filter(|worker| is_active(worker) && bindings.contains_key(name(worker)));
            let demand = count.saturating_sub(number(completed().count() + busy.count()));
            (demand, demand.saturating_sub(free))
        }
        // Its worker may have run it unheard, unless it is known to have run another. Only GitHub can tell.
        Some((JobState::Queued, _)) => {
            let unheard = completed().filter(|worker| !index.taken.contains(name(worker)));
            let last = unheard.filter_map(|worker| since(worker)).max();
            let asked = index.seen(claim).filter(|seen| seen.state == JobState::Queued);
            let waits = last.is_none_or(|last| asked.is_some_and(|seen| seen.at >= last));
            (count, if waits { count.saturating_sub(free) } else { 0 })
        }
        Some((JobState::Running | JobState::Completed | JobState::Gone | JobState::Stuck, _)) => (0, 0),
    }
}

/// Where a claim belongs, or why nowhere.
fn place<'a>(claim: &'a RunnerClaim, pool: &RunnerPool, board: &'a BoardPool) -> Result<Placement<'a>, Wait> {
    let invalid = |message: &str| Wait::new(ClaimReason::InvalidSpec, message);
    let spec = &claim.spec;
    let owner = spec.owner.as_ref();
    let owner = owner.ok_or_else(|| invalid("a claim on a board pool needs spec.owner: its runners register there"))?;
    let entity = spec.entity().ok_or_else(|| invalid("a personal account's claim needs spec.repositoryId"))?;
    Scope::of(owner, spec.repository.as_deref()).map_err(|error| invalid(&error.to_string()))?;
    let labels = pool_selection::runner_labels(claim, board);
    if labels.is_empty() {
        return Err(invalid("the pool serves overrides alone: the claim needs spec.labels"));
    }
    Ok(Placement { pool: PoolKey::of(pool), owner, board, group: (entity, labels.iter().collect()), labels })
}

/// Whether the pool makes workers at all.
fn serves(pool: &RunnerPool, scene: &DemandFacts<'_>) -> Result<(), Wait> {
    let key = PoolKey::of(pool);
    if pool.metadata.deletion_timestamp.is_some() {
        return Err(Wait::new(ClaimReason::PoolNotReady, format!("pool {} is being deleted", key.name)));
    }
    match scene.not_ready.get(&key) {
        Some(why) => Err(Wait::new(ClaimReason::PoolNotReady, format!("pool {} is not ready: {why}", key.name))),
        None => Ok(()),
    }
}

/// The owner's own troubles and cap, the line and the slots, in this order: a slot is everybody's.
fn blocked(
    claim: &RunnerClaim,
    place: &Placement<'_>,
    scene: &DemandFacts<'_>,
    running: u32,
    ahead: u32,
    trying: bool,
) -> Option<Wait> {
    let entity = &place.group.0;
    let login = claim.spec.owner.as_ref().map_or("the owner", |owner| owner.login.as_str());
    if let Some(trouble) = scene.troubles.get(entity) {
        let retry_at = Some(trouble.retry_at).filter(|at| *at > scene.now);
        if retry_at.is_some() || trying || is_trying(entity, trouble, scene) {
            return Some(Wait { reason: ClaimReason::GitHubUnavailable, message: trouble.why.clone(), retry_at });
        }
    }
    let cap = scene.limits.of(entity);
    if running >= cap {
        let message = format!("quota {running}/{cap}: {login} runs as many workers as it may");
        return Some(Wait::new(ClaimReason::QuotaReached, message));
    }
    if ahead > 0 {
        let claims = if ahead == 1 { "claim comes" } else { "claims come" };
        return Some(Wait::new(ClaimReason::WaitingInLine, format!("{ahead} earlier {claims} first")));
    }
    if scene.capacity.free(&place.pool) == 0 {
        let (board, total) = (&place.board.board, scene.capacity.total(&place.pool));
        return Some(Wait::new(ClaimReason::NoFreeSlot, format!("no free slot on board {board} (0 of {total})")));
    }
    None
}

/// Whether a worker was made since the trouble: one tries for all.
fn is_trying(entity: &str, trouble: &OwnerBackoff, scene: &DemandFacts<'_>) -> bool {
    active_boards(scene.workers).any(|(worker, spec)| {
        let made = worker.metadata.creation_timestamp.as_ref();
        spec.entity == entity && made.is_none_or(|made| made.0 >= trouble.since)
    })
}

/// A claim whose workers fail waits longer each time, and nobody waits for it.
fn backoff(failures: &[&Worker], now: Timestamp) -> Option<Wait> {
    let last = failures.iter().max_by_key(|worker| since(worker))?;
    let delay = FAILURE_BACKOFF.delay(failures.len() as u32);
    let retry_at = since(last)?.saturating_add(delay).ok()?;
    let failure = last.status.as_ref().and_then(|status| status.failure.as_ref());
    let why = failure
        .map_or("for no known reason".into(), |failure| format!("({}): {}", failure.reason.as_str(), failure.message));
    (retry_at > now).then(|| Wait {
        reason: ClaimReason::WorkerLost,
        message: format!("worker {} failed {why}; the next one is made at {retry_at:.0}", name(last)),
        retry_at: Some(retry_at),
    })
}

fn worker(claim: &RunnerClaim, place: &Placement<'_>, attempt: u32, prefix: &str) -> Worker {
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    let spec = &claim.spec;
    let board = BoardWorker {
        claim: claim.metadata.name.clone().unwrap_or_default(),
        claim_uid: uid.to_owned(),
        attempt,
        entity: place.group.0.clone(),
        labels: place.labels.to_vec(),
        owner: place.owner.clone(),
        repository: spec.repository.clone(),
        installation_id: spec.installation_id,
    };
    let name = worker_name(prefix, &place.pool.name, uid, attempt);
    worker::worker(name, claim, &place.pool.name, board)
}

fn active_boards(workers: &[Arc<Worker>]) -> impl Iterator<Item = (&Worker, &BoardWorker)> {
    workers
        .iter()
        .filter(|worker| is_active(worker))
        .filter_map(|worker| Some((&**worker, worker.spec.board.as_ref()?)))
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
