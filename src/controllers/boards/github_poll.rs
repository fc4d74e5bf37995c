//! Polls GitHub for runners, and for jobs without a webhook.
//!
//! One poll at a time per runner scope, so that a scope that does not answer delays no other. A list of runners serves
//! every worker of its scope, and the sweep.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use kube::{ResourceExt, runtime::reflector::ObjectRef};
use paddock_core::{
    api::{BoardPool, Runner, RunnerClaim, RunnerPool},
    backoff::Backoff,
    boards::{slots::is_active, worker},
    demand::{
        job::{self, JobSeen, JobState},
        pool_selection,
        schedule::is_open,
    },
};
use paddock_effects::{
    clock,
    github::{GitHubError, WorkflowJob},
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{
    BoardContext, RESYNC_PERIOD,
    accounts::{Account, AccountError, RunnerScope},
};
use crate::controllers::{Error, reference, stale_runners::remove_without_worker, time_until};

/// How often the runners of a scope with workers are checked for those without a worker.
const SWEEP_PERIOD: SignedDuration = SignedDuration::from_mins(10);
/// The delay of the first sweep after the start, which finds runners that the previous leader left.
const FIRST_SWEEP_DELAY: SignedDuration = SignedDuration::from_mins(1);
/// How often finished workers and claims are read for scopes to sweep; there may be thousands.
const RECORDS_PERIOD: SignedDuration = SignedDuration::from_mins(1);
/// GitHub removes a JIT runner that is offline for a day.
const RUNNER_LIFE: SignedDuration = SignedDuration::from_hours(24);
/// A job waits for a runner for a day at most.
const QUEUE_LIFE: SignedDuration = SignedDuration::from_hours(24);
/// Jobs requested in one poll.
const MAX_JOBS_PER_POLL: usize = 20;
/// Jobs requested per minute in all scopes together, without a sign that something is wrong with them.
const MAX_QUIET_JOBS_PER_MINUTE: usize = 15;
/// The minimum time between two passes, which coalesces requests.
const MIN_PASS_INTERVAL: Duration = Duration::from_millis(500);
/// The backoff of a scope whose poll failed.
const SCOPE_BACKOFF: Backoff = Backoff::new(RESYNC_PERIOD, Duration::from_secs(600));

/// What to request in one poll of a scope.
#[derive(Default)]
struct PollTask {
    installation: Option<i64>,
    list: bool,
    jobs: Vec<(Arc<RunnerClaim>, jiff::Timestamp)>,
}

/// What is remembered about a scope.
struct PollState {
    swept: Timestamp,
    /// When a worker or claim of it was last seen. Workers are kept for a while after their end, and their runners may
    /// outlive them: it is swept once more after the last.
    seen: Timestamp,
    installation: Option<i64>,
    /// Backoff after failures of the owner.
    not_before: Timestamp,
    failures: u32,
    /// The same for the list of runners alone.
    no_list_before: Timestamp,
    list_failures: u32,
}

pub async fn run(board: Arc<BoardContext>, stop: CancellationToken) {
    let mut states: HashMap<RunnerScope, PollState> = HashMap::new();
    let mut under_way: HashSet<RunnerScope> = HashSet::new();
    let mut polls = JoinSet::new();
    let mut first = true;
    let mut quiet_polls = VecDeque::new();
    let mut recorded = Timestamp::UNIX_EPOCH;
    loop {
        let now = clock::now();
        if now.duration_since(recorded) >= RECORDS_PERIOD {
            board.note_records(&mut states, first, now);
            (recorded, first) = (now, false);
        }
        let (tasks, next) = board.due_tasks(&mut states, &under_way, &mut quiet_polls, now);
        for (runner_scope, task) in tasks {
            let nothing = !task.list && task.jobs.is_empty();
            if nothing
                || states.get(&runner_scope).is_some_and(|state| state.not_before > now)
                || !under_way.insert(runner_scope.clone())
            {
                continue;
            }
            let board = board.clone();
            polls.spawn(async move {
                let outcome = board.poll(&runner_scope, task).await;
                (runner_scope, outcome)
            });
        }
        let wait = next.map_or(RESYNC_PERIOD, time_until).min(RESYNC_PERIOD);
        tokio::select! {
            () = stop.cancelled() => return,
            () = board.poll_requested.notified() => {}
            () = tokio::time::sleep(wait) => {}
            Some(done) = polls.join_next() => match done {
                Ok((runner_scope, outcome)) => {
                    under_way.remove(&runner_scope);
                    if let Some(state) = states.get_mut(&runner_scope) {
                        state.finish(&runner_scope, outcome);
                    }
                }
                Err(error) => tracing::error!(%error, "poll task failed"),
            },
        }
        tokio::time::sleep(MIN_PASS_INTERVAL).await;
    }
}

impl PollState {
    fn finish(&mut self, runner_scope: &RunnerScope, outcome: Result<bool, AccountError>) {
        let now = clock::now();
        let error = match outcome {
            Ok(listed) => {
                self.failures = 0;
                if listed {
                    (self.swept, self.list_failures) = (now, 0);
                }
                return;
            }
            Err(error) => error,
        };
        tracing::warn!(scope = %runner_scope.scope, %error, "GitHub poll failed");
        let (failures, until) = match error.is_of_owner() {
            true => (&mut self.failures, &mut self.not_before),
            false => (&mut self.list_failures, &mut self.no_list_before),
        };
        *failures += 1;
        *until = now.saturating_add(SCOPE_BACKOFF.delay(*failures).max(error.retry())).unwrap_or(now);
    }
}

impl BoardContext {
    /// Notes the scopes of all workers and claims, finished ones included: stray runners are where no worker is left.
    fn note_records(&self, states: &mut HashMap<RunnerScope, PollState>, first: bool, now: Timestamp) {
        let pools = self.shared.stores.pools.store.state();
        let claims = self.shared.stores.claims.store.state();
        let claims = claims.iter().filter_map(|claim| {
            let (runner_scope, _) = scope_of_claim(claim, &pools)?;
            Some((runner_scope, claim.spec.installation_id))
        });
        let workers = self.all_workers();
        let workers = workers.iter().filter_map(|worker| {
            let (spec, namespace) = (worker.spec.board.as_ref()?, worker.namespace()?);
            let pool = self.pool(&namespace, &worker.spec.pool)?;
            let repository = spec.repository.as_deref();
            let runner_scope = RunnerScope::of(&namespace, pool.spec.board.as_ref()?, &spec.owner, repository);
            Some((runner_scope.ok()?, spec.installation_id))
        });
        for (runner_scope, installation) in claims.chain(workers) {
            let state = states.entry(runner_scope).or_insert_with(|| PollState::new(first, now));
            state.seen = now;
            state.installation = installation.or(state.installation);
        }
        states.retain(|_, state| state.seen >= state.swept && now.duration_since(state.seen) < RUNNER_LIFE);
    }

    /// The polls that are due now, and when the next one may be due.
    fn due_tasks(
        &self,
        states: &mut HashMap<RunnerScope, PollState>,
        under_way: &HashSet<RunnerScope>,
        quiet_polls: &mut VecDeque<Timestamp>,
        now: Timestamp,
    ) -> (HashMap<RunnerScope, PollTask>, Option<Timestamp>) {
        let mut tasks: HashMap<RunnerScope, PollTask> = HashMap::new();
        let mut next: Option<Timestamp> = None;
        let mut later = |at: Timestamp| next = Some(next.map_or(at, |soonest| soonest.min(at)));
        let stores = &self.shared.stores;
        let workers = self.all_workers();
        for worker in &workers {
            let Some(spec) = &worker.spec.board else { continue };
            if !is_active(worker) {
                continue;
            }
            let namespace = worker.namespace().unwrap_or_default();
            let Some(pool) = self.pool(&namespace, &worker.spec.pool) else { continue };
            let Some(board) = pool.spec.board.as_ref() else { continue };
            let Ok(runner_scope) = RunnerScope::of(&namespace, board, &spec.owner, spec.repository.as_deref()) else {
                continue;
            };
            let state = states.entry(runner_scope.clone()).or_insert_with(|| PollState::new(false, now));
            state.seen = now;
            state.installation = spec.installation_id.or(state.installation);
            if worker.metadata.deletion_timestamp.is_some() {
                continue;
            }
            let Some(pod) = self.pod_of(worker) else { continue };
            let (health, _) = self.health_check(worker, Some(board), &pod, now);
            health.next.into_iter().for_each(&mut later);
            if health.ask.is_some() {
                tasks.entry(runner_scope).or_default().list = true;
            }
        }
        let mut ended: HashMap<&str, Timestamp> = HashMap::new();
        for worker in &workers {
            if let (Some(uid), Some(end)) = (worker.claim_uid(), worker::ended(worker)) {
                let last = ended.entry(uid).or_insert(end);
                *last = end.max(*last);
            }
        }
        while quiet_polls.front().is_some_and(|then| now.duration_since(*then) >= SignedDuration::from_mins(1)) {
            quiet_polls.pop_front();
        }
        let pools = stores.pools.store.state();
        let mut quiet = Vec::new();
        for claim in stores.claims.store.state().iter().filter(|claim| claim.spec.job.is_some() && is_open(claim)) {
            let Some((runner_scope, board)) = scope_of_claim(claim, &pools) else { continue };
            let ended = claim.metadata.uid.as_deref().and_then(|uid| ended.get(uid)).copied();
            let Some(ask) = self.job_poll(claim, board, ended) else { continue };
            let paused = claim.metadata.uid.as_deref().and_then(|uid| self.memory.job_paused(uid, now));
            let at = paused.map_or(ask.at, |until| ask.at.max(until));
            if at > now {
                later(at);
                continue;
            }
            let state = states.entry(runner_scope.clone()).or_insert_with(|| PollState::new(false, now));
            if under_way.contains(&runner_scope) || state.not_before > now {
                continue;
            }
            state.installation = claim.spec.installation_id.or(state.installation);
            let stuck_at = board.timeouts.stuck_queued.after(created(claim));
            if ask.urgent {
                tasks.entry(runner_scope).or_default().jobs.push((claim.clone(), stuck_at));
            } else {
                let owner = runner_scope.scope.owner().to_lowercase();
                quiet.push((ask.at, owner, (runner_scope, claim.clone(), stuck_at)));
            }
        }
        let room = MAX_QUIET_JOBS_PER_MINUTE.saturating_sub(quiet_polls.len());
        for (runner_scope, claim, stuck_at) in job::in_turn(quiet, room) {
            quiet_polls.push_back(now);
            tasks.entry(runner_scope).or_default().jobs.push((claim, stuck_at));
        }
        for (runner_scope, state) in states.iter() {
            let due = state.swept.saturating_add(SWEEP_PERIOD).unwrap_or(Timestamp::MAX);
            if due <= now {
                tasks.entry(runner_scope.clone()).or_default().list = true;
            } else {
                later(due);
            }
            let paused = state.not_before.max(state.no_list_before);
            if paused > now {
                later(paused);
            }
            if let Some(task) = tasks.get_mut(runner_scope) {
                task.installation = state.installation;
                task.list &= state.no_list_before <= now;
            }
        }
        (tasks, next)
    }

    /// When to request the claim's job. A job that runs on one of our workers is not requested: the end of that worker
    /// is observed here.
    fn job_poll(&self, claim: &RunnerClaim, board: &BoardPool, ended: Option<Timestamp>) -> Option<job::Ask> {
        let (state, worker) = self.job_of(claim)?;
        let ended = match (state, worker) {
            (JobState::Queued, _) => ended,
            (JobState::Running, Some(worker)) => Some(worker::ended(&worker)?),
            (JobState::Running, None) => None,
            (JobState::Completed | JobState::Gone | JobState::Stuck, _) => return None,
        };
        job::ask(claim, self.memory.job(claim).as_ref(), ended, board.timeouts.stuck_queued)
    }

    /// Polls one scope; returns whether the runners were listed. What concerns the list or one job alone stops nothing else.
    async fn poll(&self, runner_scope: &RunnerScope, task: PollTask) -> Result<bool, AccountError> {
        let account = self.account_at(runner_scope, task.installation).await?;
        let listed = if task.list { self.list(runner_scope, &account).await } else { Ok(false) };
        if listed.as_ref().is_err_and(AccountError::is_of_owner) {
            return listed;
        }
        for (claim, stuck_at) in task.jobs.into_iter().take(MAX_JOBS_PER_POLL) {
            match self.poll_job(&account, &claim, stuck_at).await {
                Err(error) if error.is_of_owner() => return Err(error),
                Err(error) => {
                    tracing::warn!(claim = claim.name_any(), %error, "GitHub did not tell about a job");
                    self.memory.pause_job(&claim.uid().unwrap_or_default(), clock::now());
                }
                Ok(()) => {}
            }
        }
        listed
    }

    /// Lists the runners of a scope, and removes stray ones.
    async fn list(&self, runner_scope: &RunnerScope, account: &Account) -> Result<bool, AccountError> {
        let (github, at) = (&self.shared.github, clock::now());
        let runners = github.runners(&account.credentials, &account.scope, &runner_scope.group).await?;
        tracing::debug!(scope = %runner_scope.scope, runners = runners.len(), "runners listed");
        self.memory.note_runners(runner_scope.clone(), at, &runners);
        for worker in self.all_workers().iter().filter(|worker| worker.spec.board.is_some() && is_active(worker)) {
            let _ = self.workers.send(reference(&worker.namespace().unwrap_or_default(), &worker.name_any()));
        }
        match remove_without_worker(self, &account.credentials, &account.scope, &runners).await {
            Ok(()) => {}
            Err(Error::GitHub(error)) => return Err(error.into()),
            Err(error) => tracing::warn!(scope = %runner_scope.scope, %error, "stale runners not removed"),
        }
        Ok(true)
    }

    /// Whether the claim's job is queued for longer than GitHub keeps one.
    fn outlived(&self, claim: &RunnerClaim, now: Timestamp) -> bool {
        let queued = self.job_of(claim).is_some_and(|(state, _)| state == JobState::Queued);
        queued && now.duration_since(created(claim)) > QUEUE_LIFE
    }

    async fn poll_job(
        &self,
        account: &Account,
        claim: &Arc<RunnerClaim>,
        stuck_at: Timestamp,
    ) -> Result<(), AccountError> {
        let (Some(uid), Some(job)) = (claim.uid(), claim.spec.job.as_ref()) else { return Ok(()) };
        let Some(repository) = claim.spec.repository.as_deref() else { return Ok(()) };
        let (github, at) = (&self.shared.github, clock::now());
        let seen = match github.job(&account.credentials, repository, job.id).await {
            Ok(job) => {
                let mut state = job_state(&job);
                if state == JobState::Queued
                    && at >= stuck_at
                    && github.run_is_over(&account.credentials, repository, job.run_id).await?
                {
                    state = JobState::Stuck;
                }
                let runner = job.runner_name.filter(|name| !name.is_empty());
                JobSeen { state, runner: runner.map(|name| Runner { id: job.runner_id, name }), at }
            }
            Err(GitHubError::NotFound(_)) => JobSeen { state: JobState::Gone, runner: None, at },
            // Its repository was deleted or hidden.
            Err(GitHubError::Unexpected(_)) if self.outlived(claim, at) => {
                JobSeen { state: JobState::Gone, runner: None, at }
            }
            Err(error) => return Err(error.into()),
        };
        self.memory.note_job(uid, seen);
        self.changed.notify_one();
        let _ = self.claims.send(ObjectRef::from_obj(&**claim));
        Ok(())
    }
}

impl PollState {
    fn new(first: bool, now: Timestamp) -> Self {
        let swept = if first { now - SWEEP_PERIOD + FIRST_SWEEP_DELAY } else { now };
        Self {
            swept,
            seen: now,
            installation: None,
            not_before: Timestamp::UNIX_EPOCH,
            failures: 0,
            no_list_before: Timestamp::UNIX_EPOCH,
            list_failures: 0,
        }
    }
}

fn scope_of_claim<'a>(claim: &RunnerClaim, pools: &'a [Arc<RunnerPool>]) -> Option<(RunnerScope, &'a BoardPool)> {
    let in_namespace = pools.iter().filter(|pool| pool.namespace() == claim.namespace()).map(Arc::as_ref);
    let pool = pool_selection::select(claim, in_namespace).ok()?;
    let board = pool.spec.board.as_ref()?;
    let runner_scope =
        RunnerScope::of(&claim.namespace()?, board, claim.spec.owner.as_ref()?, claim.spec.repository.as_deref());
    Some((runner_scope.ok()?, board))
}

fn created(claim: &RunnerClaim) -> Timestamp {
    claim.metadata.creation_timestamp.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0)
}

fn job_state(job: &WorkflowJob) -> JobState {
    match job.status.as_str() {
        "completed" => JobState::Completed,
        "in_progress" => JobState::Running,
        // `queued`, and the states before it: `waiting`, `pending`, `requested`.
        _ => JobState::Queued,
    }
}
