//! Scheduling: which claims get a slot of a board now, what the others wait for, and which workers are surplus.
//!
//! Claims and workers are matched by owner and labels, not one to one, because GitHub gives a job to any idle runner with
//! its labels. Within that, a worker is created for one claim, oldest first.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use jiff::Timestamp;

use super::{
    job::{JobSeen, JobState},
    pool_selection::{self, LabelSet},
    quota::{EntityLimits, Registration, Scope},
    refusals::{Refusal, Refusals, Subject, active_boards, after_failures},
    supply::{Index, name, takes_jobs},
};
use crate::{
    api::{BoardPool, BoardWorker, ClaimReason, Hardware, Owner, RunnerClaim, RunnerPool, Worker, WorkerState},
    boards::{
        health::Binding,
        slots::{Capacity, is_active},
        worker::{self, attempt, is_failed, since, state},
    },
    names::{PoolKey, worker_name},
};

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
    /// What GitHub and the API server refused.
    pub refusals: &'a BTreeMap<Subject, Refusal>,
    /// Name prefix of workers.
    pub prefix: &'a str,
    pub now: Timestamp,
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
    registration: Registration,
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
    let mut refusals = Refusals::new(facts.refusals, facts.pools, facts.workers, facts.now);
    // Waiting claims by group and pool: later claims do not overtake them, but a full board blocks no other one.
    let mut queues: BTreeMap<(&Group, &PoolKey), u32> = BTreeMap::new();
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
            } else if let Some(wait) = after_failures(&request.failures, facts.now)
                .or_else(|| refusals.of_claim(request.claim.metadata.uid.as_deref()))
                .or_else(|| refusals.at_github(&placement.registration))
            {
                // It holds up only those who meet the same refusal.
                Some(wait)
            } else {
                let line = queues.entry((&placement.group, &placement.pool)).or_default();
                let wait = blocked(request.claim, placement, &facts, *count, *line);
                *line += u32::from(wait.is_some());
                wait
            };
            if let Some(wait) = wait {
                decisions.push(Decision::Wait { claim: request.claim.clone(), wait });
                break;
            }
            attempt += 1;
            refusals.note_trial(&placement.registration);
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
    let scope = Scope::of(owner, spec.repository.as_deref()).map_err(|error| invalid(&error.to_string()))?;
    let labels = pool_selection::runner_labels(claim, board);
    if labels.is_empty() {
        return Err(invalid("the pool serves overrides alone: the claim needs spec.labels"));
    }
    let pool = PoolKey::of(pool);
    let registration = Registration::new(&pool.namespace, board, owner, scope);
    Ok(Placement { pool, owner, board, group: (entity, labels.iter().collect()), labels, registration })
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

/// What a claim waits for: its owner's quota, earlier claims, then slots, which all owners share.
fn blocked(
    claim: &RunnerClaim,
    placement: &Placement<'_>,
    facts: &DemandFacts<'_>,
    running: u32,
    ahead: u32,
) -> Option<Wait> {
    let entity = &placement.group.0;
    let login = claim.spec.owner.as_ref().map_or("the owner", |owner| owner.login.as_str());
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

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
