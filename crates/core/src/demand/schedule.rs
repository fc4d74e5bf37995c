//! Scheduling: which claims get a slot of a board now, what the others wait for, and which workers are surplus.
//!
//! Claims and workers are matched by owner and labels, not one to one, because GitHub gives a job to any idle runner with
//! its labels. Within that, a worker is created for one claim, oldest first.

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

/// Input of [`decide`].
pub struct DemandFacts<'a> {
    pub pools: &'a [Arc<RunnerPool>],
    pub claims: &'a [Arc<RunnerClaim>],
    /// Workers that are active or belong to an open claim, including new ones that are not in the cache yet.
    pub workers: &'a [Arc<Worker>],
    pub capacity: Capacity,
    pub limits: &'a EntityLimits,
    /// Pools that cannot create workers, and why.
    pub not_ready: &'a BTreeMap<PoolKey, String>,
    /// GitHub's answers about the claims' jobs, by claim uid.
    pub jobs: &'a BTreeMap<String, JobSeen>,
    /// Owners that GitHub refused a runner for.
    pub owner_backoffs: &'a BTreeMap<String, OwnerBackoff>,
    /// Name prefix of workers.
    pub prefix: &'a str,
    pub now: Timestamp,
}

/// GitHub refused a runner for an owner. The owner gets no worker until `retry_at`, so that others do not wait for it,
/// and then one worker as a trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerBackoff {
    pub why: String,
    pub since: Timestamp,
    pub retry_at: Timestamp,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub decisions: Vec<Decision>,
    /// What the runners of active workers do, derived from jobs, by worker name.
    pub bindings: BTreeMap<String, Binding>,
    /// The names of workers that no open claim needs.
    pub surplus: BTreeSet<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Create this worker for this claim. Its name is derived from the claim, so the same decision from a stale cache
    /// creates the same object, and the API server accepts only one.
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
    /// When the decision may change without an event.
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
    /// None for a claim whose owner or labels are unknown.
    group: Option<Group>,
    /// Runners that the claim still needs, with or without a worker.
    demand: u32,
    /// Those of them that have no worker yet.
    need: u32,
    /// The number of its last worker.
    attempt: u32,
    failures: Vec<&'a Worker>,
    placement: Result<Placement<'a>, Wait>,
}

/// Where a claim can be served.
struct Placement<'a> {
    pool: PoolKey,
    owner: &'a Owner,
    board: &'a BoardPool,
    group: Group,
    labels: &'a [String],
}

pub fn decide(mut facts: DemandFacts<'_>) -> Plan {
    let index = Index::of(facts.claims, facts.workers, facts.jobs);
    let bindings = index.bindings(facts.claims, facts.now);
    let requests: Vec<_> = oldest_first(facts.claims)
        .into_iter()
        .filter_map(|claim| request_of(claim, &facts, &index, &bindings))
        .collect();
    let mut deficits: BTreeMap<Group, i64> = BTreeMap::new();
    for request in &requests {
        if let Some(group) = &request.group {
            *deficits.entry(group.clone()).or_default() += i64::from(request.demand);
        }
    }
    let mut running: BTreeMap<String, u32> = BTreeMap::new();
    let mut spare: BTreeMap<Group, Vec<&Worker>> = BTreeMap::new();
    for (worker, spec) in active_boards(facts.workers) {
        *running.entry(spec.entity.clone()).or_default() += 1;
        if takes_jobs(worker, &bindings) {
            let group = (spec.entity.clone(), spec.labels.iter().collect());
            *deficits.entry(group.clone()).or_default() -= 1;
            spare.entry(group).or_default().push(worker);
        }
    }
    let surplus = surplus(&requests, &deficits, spare);

    let mut decisions = Vec::new();
    // Owners that get a worker in this pass; during a backoff one trial is enough.
    let mut trying: BTreeSet<&str> = BTreeSet::new();
    // Waiting claims by group: later claims do not overtake them.
    let mut queues: BTreeMap<Group, u32> = BTreeMap::new();
    for request in &requests {
        let mut attempt = request.attempt;
        let placement = match &request.placement {
            Ok(placement) => placement,
            Err(wait) => {
                decisions.push(Decision::Wait { claim: request.claim.clone(), wait: wait.clone() });
                continue;
            }
        };
        let deficit = deficits.entry(placement.group.clone()).or_default();
        let entity = &placement.group.0;
        for _ in 0..request.need {
            let count = running.entry(entity.clone()).or_default();
            let wait = if *deficit <= 0 {
                let message = "there are already as many runners with these labels as jobs for them";
                Some(Wait::new(ClaimReason::WaitingInLine, message))
            } else if let Some(wait) = backoff(&request.failures, facts.now) {
                Some(wait)
            } else {
                let ahead = queues.get(&placement.group).copied().unwrap_or(0);
                let wait = blocked(request.claim, placement, &facts, *count, ahead, trying.contains(entity.as_str()));
                if wait.is_some() {
                    *queues.entry(placement.group.clone()).or_default() += 1;
                }
                wait
            };
            if let Some(wait) = wait {
                decisions.push(Decision::Wait { claim: request.claim.clone(), wait });
                break;
            }
            attempt += 1;
            trying.insert(entity);
            let worker = worker(request.claim, placement, attempt, facts.prefix);
            facts.capacity.take(&placement.pool);
            (*count, *deficit) = (*count + 1, *deficit - 1);
            decisions.push(Decision::Provision { claim: request.claim.clone(), worker: Box::new(worker) });
        }
    }
    Plan { decisions, bindings, surplus }
}

/// Workers beyond the demand whose own claim needs none any more, pending and youngest first.
fn surplus(
    requests: &[Request<'_>],
    deficits: &BTreeMap<Group, i64>,
    spare: BTreeMap<Group, Vec<&Worker>>,
) -> BTreeSet<String> {
    let asking = requests.iter().filter(|request| request.demand > 0);
    let asking: BTreeSet<_> = asking.filter_map(|request| request.claim.metadata.uid.as_deref()).collect();
    let mut names = BTreeSet::new();
    for (group, mut workers) in spare {
        let most = deficits.get(&group).map_or(0, |deficit| usize::try_from(-deficit).unwrap_or(0));
        workers.retain(|worker| !worker.claim_uid().is_some_and(|uid| asking.contains(uid)));
        workers.sort_by_key(|worker| {
            let created = worker.metadata.creation_timestamp.as_ref().map(|time| time.0);
            std::cmp::Reverse((state(worker) == WorkerState::Pending, created, name(worker)))
        });
        names.extend(workers.into_iter().take(most).map(|worker| name(worker).to_owned()));
    }
    names
}

/// Open claims, oldest first; the name breaks ties.
fn oldest_first(claims: &[Arc<RunnerClaim>]) -> Vec<&Arc<RunnerClaim>> {
    let mut open: Vec<_> = claims.iter().filter(|claim| is_open(claim)).collect();
    open.sort_by_key(|claim| {
        let created = claim.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (created.unwrap_or(Timestamp::MAX), &claim.metadata.namespace, &claim.metadata.name)
    });
    open
}

/// `None` for a claim that boards do not serve.
fn request_of<'a>(
    claim: &'a Arc<RunnerClaim>,
    facts: &DemandFacts<'a>,
    index: &Index<'a>,
    bindings: &BTreeMap<String, Binding>,
) -> Option<Request<'a>> {
    let here = facts.pools.iter().filter(|pool| pool.metadata.namespace == claim.metadata.namespace);
    let pool = pool_selection::select(claim, here.map(Arc::as_ref));
    let placement = match &pool {
        Err((reason, message)) => Err(Wait::new(*reason, message.clone())),
        Ok(pool) => match pool.spec.hardware()? {
            Hardware::Ec2(_) => return None,
            Hardware::Board(board) => placement_of(claim, pool, board),
        },
    };
    let group = placement.as_ref().ok().map(|placement| placement.group.clone());
    let usable = pool.ok().map_or(Ok(()), |pool| check_pool(pool, facts));

    let own = index.own(claim);
    let (demand, need) = demand_and_need(claim, index, bindings);
    let failures = own.iter().copied().filter(|worker| is_failed(worker)).collect();
    let attempt = own.iter().map(|worker| attempt(worker)).max().unwrap_or(0);
    Some(Request { claim, group, demand, need, attempt, failures, placement: usable.and(placement) })
}

/// Runners that the claim still needs, and those of them that have no worker yet.
fn demand_and_need(claim: &RunnerClaim, index: &Index<'_>, bindings: &BTreeMap<String, Binding>) -> (u32, u32) {
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
        // A completed worker may have run it although the webhook was lost, unless it ran another job. GitHub knows.
        Some((JobState::Queued, _)) => {
            let candidates = completed().filter(|worker| !index.taken.contains(name(worker)));
            let last = candidates.filter_map(|worker| since(worker)).max();
            let answer = index.seen(claim).filter(|seen| seen.state == JobState::Queued);
            let waits = last.is_none_or(|last| answer.is_some_and(|seen| seen.at >= last));
            (count, if waits { count.saturating_sub(free) } else { 0 })
        }
        Some((JobState::Running | JobState::Completed | JobState::Gone | JobState::Stuck, _)) => (0, 0),
    }
}

/// Where a claim can be served, or why it cannot.
fn placement_of<'a>(claim: &'a RunnerClaim, pool: &RunnerPool, board: &'a BoardPool) -> Result<Placement<'a>, Wait> {
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

/// Whether the pool can create workers.
fn check_pool(pool: &RunnerPool, facts: &DemandFacts<'_>) -> Result<(), Wait> {
    let key = PoolKey::of(pool);
    if pool.metadata.deletion_timestamp.is_some() {
        return Err(Wait::new(ClaimReason::PoolNotReady, format!("pool {} is being deleted", key.name)));
    }
    match facts.not_ready.get(&key) {
        Some(why) => Err(Wait::new(ClaimReason::PoolNotReady, format!("pool {} is not ready: {why}", key.name))),
        None => Ok(()),
    }
}

/// What a claim waits for: its owner's backoff and quota, earlier claims, then slots, which all owners share.
fn blocked(
    claim: &RunnerClaim,
    placement: &Placement<'_>,
    facts: &DemandFacts<'_>,
    running: u32,
    ahead: u32,
    trying: bool,
) -> Option<Wait> {
    let entity = &placement.group.0;
    let login = claim.spec.owner.as_ref().map_or("the owner", |owner| owner.login.as_str());
    if let Some(owner_backoff) = facts.owner_backoffs.get(entity) {
        let retry_at = Some(owner_backoff.retry_at).filter(|at| *at > facts.now);
        if retry_at.is_some() || trying || is_trying(entity, owner_backoff, facts) {
            return Some(Wait { reason: ClaimReason::GitHubUnavailable, message: owner_backoff.why.clone(), retry_at });
        }
    }
    let cap = facts.limits.of(entity);
    if running >= cap {
        let message = format!("quota {running}/{cap}: {login} runs as many workers as it may");
        return Some(Wait::new(ClaimReason::QuotaReached, message));
    }
    if ahead > 0 {
        let claims = if ahead == 1 { "claim comes" } else { "claims come" };
        return Some(Wait::new(ClaimReason::WaitingInLine, format!("{ahead} earlier {claims} first")));
    }
    if facts.capacity.free(&placement.pool) == 0 {
        let (board, total) = (&placement.board.board, facts.capacity.total(&placement.pool));
        return Some(Wait::new(ClaimReason::NoFreeSlot, format!("no free slot on board {board} (0 of {total})")));
    }
    None
}

/// Whether a worker was created since the backoff began: one trial is enough.
fn is_trying(entity: &str, owner_backoff: &OwnerBackoff, facts: &DemandFacts<'_>) -> bool {
    active_boards(facts.workers).any(|(worker, spec)| {
        let created = worker.metadata.creation_timestamp.as_ref();
        spec.entity == entity && created.is_none_or(|created| created.0 >= owner_backoff.since)
    })
}

/// A claim whose workers fail backs off, and later claims do not wait for it.
fn backoff(failures: &[&Worker], now: Timestamp) -> Option<Wait> {
    let last = failures.iter().max_by_key(|worker| since(worker))?;
    let delay = FAILURE_BACKOFF.delay(failures.len() as u32);
    let retry_at = since(last)?.saturating_add(delay).ok()?;
    let failure = last.status.as_ref().and_then(|status| status.failure.as_ref());
    let why = failure
        .map_or("for no known reason".into(), |failure| format!("({}): {}", failure.reason.as_str(), failure.message));
    (retry_at > now).then(|| Wait {
        reason: ClaimReason::WorkerLost,
        message: format!("worker {} failed {why}; the next one is created at {retry_at:.0}", name(last)),
        retry_at: Some(retry_at),
    })
}

fn worker(claim: &RunnerClaim, placement: &Placement<'_>, attempt: u32, prefix: &str) -> Worker {
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    let spec = &claim.spec;
    let board = BoardWorker {
        claim: claim.metadata.name.clone().unwrap_or_default(),
        claim_uid: uid.to_owned(),
        attempt,
        entity: placement.group.0.clone(),
        labels: placement.labels.to_vec(),
        owner: placement.owner.clone(),
        repository: spec.repository.clone(),
        installation_id: spec.installation_id,
    };
    let name = worker_name(prefix, &placement.pool.name, uid, attempt);
    worker::worker(name, claim, &placement.pool.name, board)
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
