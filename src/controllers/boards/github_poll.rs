//! What webhooks did not tell: GitHub is asked for its runners, and for jobs that nothing was heard of.
//!
//! One visit at a time to each place, so that one that does not answer keeps nobody else. A list of runners serves every
//! worker of its place, and the sweep.

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
use paddock_effects::github::{GitHubError, WorkflowJob};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{
    BoardContext, LOOK_AGAIN,
    accounts::{Account, AccountError, RunnerScope},
    lock,
};
use crate::controllers::{Error, reference, stale_runners::remove_without_worker, time_until};

/// How often the runners of a place that has workers are gone through for those without one.
const SWEEP: SignedDuration = SignedDuration::from_mins(10);
/// How soon after the start, for what was left by the leader before.
const FIRST_SWEEP: SignedDuration = SignedDuration::from_mins(1);
/// As many jobs are asked for in one visit.
const JOBS: usize = 20;
/// As many are asked for in a minute, in all places together, that nothing is wrong with as far as is known.
const QUIET_JOBS: usize = 15;
/// The agenda is not made more often than this.
const PAUSE: Duration = Duration::from_millis(500);
/// How long a place that cannot be asked is left alone.
const PLACE_BACKOFF: Backoff = Backoff::new(LOOK_AGAIN, Duration::from_secs(600));

/// What is to be done in one place.
#[derive(Default)]
struct PollTask {
    installation: Option<i64>,
    list: bool,
    jobs: Vec<(Arc<RunnerClaim>, jiff::Timestamp)>,
}

/// What is remembered about a place.
struct PollState {
    swept: Timestamp,
    /// It had a worker since.
    used: bool,
    installation: Option<i64>,
    /// After failures: not before this moment.
    not_before: Timestamp,
    failures: u32,
}

pub async fn run(board: Arc<BoardContext>, stop: CancellationToken) {
    let mut visits: HashMap<RunnerScope, PollState> = HashMap::new();
    let mut under_way: HashSet<RunnerScope> = HashSet::new();
    let mut tasks = JoinSet::new();
    let mut first = true;
    let mut asked = VecDeque::new();
    loop {
        let now = Timestamp::now();
        let (agenda, next) = board.agenda(&mut visits, &under_way, &mut asked, first, now);
        first = false;
        for (place, errand) in agenda {
            if visits.get(&place).is_some_and(|visits| visits.not_before > now) || !under_way.insert(place.clone()) {
                continue;
            }
            let board = board.clone();
            tasks.spawn(async move {
                let outcome = board.visit(&place, errand).await;
                (place, outcome)
            });
        }
        let wait = next.map_or(LOOK_AGAIN, time_until).min(LOOK_AGAIN);
        tokio::select! {
            () = stop.cancelled() => return,
            () = board.curious.notified() => {}
            () = tokio::time::sleep(wait) => {}
            Some(done) = tasks.join_next() => match done {
                Ok((place, outcome)) => {
                    under_way.remove(&place);
                    if let Some(visits) = visits.get_mut(&place) {
                        visits.end(&place, outcome);
                    }
                }
                Err(error) => tracing::error!(%error, "a visit broke off"),
            },
        }
        tokio::time::sleep(PAUSE).await;
    }
}

impl PollState {
    fn end(&mut self, place: &RunnerScope, outcome: Result<bool, AccountError>) {
        let now = Timestamp::now();
        match outcome {
            Ok(listed) => {
                self.failures = 0;
                if listed {
                    self.swept = now;
                }
            }
            Err(error) => {
                self.failures += 1;
                let wait = PLACE_BACKOFF.delay(self.failures).max(error.retry());
                self.not_before = now.saturating_add(wait).unwrap_or(now);
                tracing::warn!(place = %place.scope, %error, "GitHub could not be asked");
            }
        }
    }
}

impl BoardContext {
    /// Who is to be visited now, and when the next one may be due.
    fn agenda(
        &self,
        visits: &mut HashMap<RunnerScope, PollState>,
        under_way: &HashSet<RunnerScope>,
        asked: &mut VecDeque<Timestamp>,
        first: bool,
        now: Timestamp,
    ) -> (HashMap<RunnerScope, PollTask>, Option<Timestamp>) {
        let mut agenda: HashMap<RunnerScope, PollTask> = HashMap::new();
        let mut next: Option<Timestamp> = None;
        let mut later = |at: Timestamp| next = Some(next.map_or(at, |soonest| soonest.min(at)));
        let stores = &self.shared.stores;
        for visits in visits.values_mut() {
            visits.used &= now.duration_since(visits.swept) < SWEEP || visits.failures > 0;
        }
        let workers = self.all_workers();
        for worker in &workers {
            let Some(spec) = &worker.spec.board else { continue };
            let active = is_active(worker);
            if !active && !first {
                continue;
            }
            let namespace = worker.namespace().unwrap_or_default();
            let Some(pool) = self.pool(&namespace, &worker.spec.pool) else { continue };
            let Some(board) = pool.spec.board.as_ref() else { continue };
            let Ok(place) = RunnerScope::of(&namespace, board, &spec.owner, spec.repository.as_deref()) else {
                continue;
            };
            let known = visits.entry(place.clone()).or_insert_with(|| PollState::new(first, now));
            known.used = true;
            known.installation = spec.installation_id.or(known.installation);
            if !active || worker.metadata.deletion_timestamp.is_some() {
                continue;
            }
            let Some(pod) = self.pod_of(worker) else { continue };
            let (exam, _) = self.exam(worker, Some(board), &pod, now);
            exam.next.into_iter().for_each(&mut later);
            if exam.ask.is_some() {
                agenda.entry(place).or_default().list = true;
            }
        }
        let mut ended: HashMap<&str, Timestamp> = HashMap::new();
        for worker in &workers {
            if let (Some(uid), Some(end)) = (worker.claim_uid(), worker::ended(worker)) {
                let last = ended.entry(uid).or_insert(end);
                *last = end.max(*last);
            }
        }
        while asked.front().is_some_and(|then| now.duration_since(*then) >= SignedDuration::from_mins(1)) {
            asked.pop_front();
        }
        let pools = stores.pools.store.state();
        for claim in stores.claims.store.state().iter().filter(|claim| claim.spec.job.is_some() && is_open(claim)) {
            let Some((place, board)) = place_of_claim(claim, &pools) else { continue };
            let ended = claim.metadata.uid.as_deref().and_then(|uid| ended.get(uid)).copied();
            let Some(ask) = self.ask_for(claim, board, ended) else { continue };
            if ask.at > now {
                later(ask.at);
                continue;
            }
            let known = visits.entry(place.clone()).or_insert_with(|| PollState::new(false, now));
            if under_way.contains(&place) || known.not_before > now {
                continue;
            }
            if !ask.urgent {
                if asked.len() >= QUIET_JOBS {
                    continue;
                }
                asked.push_back(now);
            }
            known.installation = claim.spec.installation_id.or(known.installation);
            agenda
                .entry(place)
                .or_default()
                .jobs
                .push((claim.clone(), board.timeouts.stuck_queued.after(created(claim))));
        }
        for (place, visits) in visits.iter() {
            let due = visits.swept.saturating_add(SWEEP).unwrap_or(Timestamp::MAX);
            if visits.used && due <= now {
                agenda.entry(place.clone()).or_default().list = true;
            } else if visits.used {
                later(due);
            }
            if visits.not_before > now {
                later(visits.not_before);
            }
            if let Some(errand) = agenda.get_mut(place) {
                errand.installation = visits.installation;
            }
        }
        (agenda, next)
    }

    /// When GitHub is to be asked about the claim's job. One that runs on a worker of ours is not asked for: the end of
    /// that worker is seen here.
    fn ask_for(&self, claim: &RunnerClaim, board: &BoardPool, ended: Option<Timestamp>) -> Option<job::Ask> {
        let (state, worker) = self.job_of(claim)?;
        let ended = match (state, worker) {
            (JobState::Queued, _) => ended,
            (JobState::Running, Some(worker)) => Some(worker::ended(&worker)?),
            (JobState::Running, None) => None,
            (JobState::Completed | JobState::Gone | JobState::Stuck, _) => return None,
        };
        job::ask(claim, self.memory.job(claim).as_ref(), ended, board.timeouts.stuck_queued)
    }

    /// Says whether the runners were listed.
    async fn visit(&self, place: &RunnerScope, errand: PollTask) -> Result<bool, AccountError> {
        let account = self.account_at(place, errand.installation).await?;
        if errand.list {
            let (github, at) = (&self.shared.github, Timestamp::now());
            let runners = github.runners(&account.credentials, &account.scope, &place.group).await?;
            tracing::debug!(place = %place.scope, runners = runners.len(), "runners were listed");
            self.memory.list(place.clone(), at, &runners);
            for worker in self.all_workers().iter().filter(|worker| worker.spec.board.is_some() && is_active(worker)) {
                let _ = self.workers.send(reference(&worker.namespace().unwrap_or_default(), &worker.name_any()));
            }
            match remove_without_worker(self, &account.credentials, &account.scope, &runners).await {
                Ok(()) => {}
                Err(Error::GitHub(error)) => return Err(error.into()),
                Err(error) => tracing::warn!(place = %place.scope, %error, "stale runners not removed"),
            }
        }
        for (claim, stuck_at) in errand.jobs.into_iter().take(JOBS) {
            self.ask(&account, &claim, stuck_at).await?;
        }
        Ok(errand.list)
    }

    async fn ask(&self, account: &Account, claim: &Arc<RunnerClaim>, stuck_at: Timestamp) -> Result<(), AccountError> {
        let (Some(uid), Some(job)) = (claim.uid(), claim.spec.job.as_ref()) else { return Ok(()) };
        let Some(repository) = claim.spec.repository.as_deref() else { return Ok(()) };
        let (github, at) = (&self.shared.github, Timestamp::now());
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
            Err(error) => return Err(error.into()),
        };
        lock(&self.memory.jobs).insert(uid, seen);
        self.changed.notify_one();
        let _ = self.claims.send(ObjectRef::from_obj(&**claim));
        Ok(())
    }
}

impl PollState {
    fn new(first: bool, now: Timestamp) -> Self {
        let swept = if first { now - SWEEP + FIRST_SWEEP } else { now };
        Self { swept, used: false, installation: None, not_before: Timestamp::UNIX_EPOCH, failures: 0 }
    }
}

fn place_of_claim<'a>(claim: &RunnerClaim, pools: &'a [Arc<RunnerPool>]) -> Option<(RunnerScope, &'a BoardPool)> {
    let here = pools.iter().filter(|pool| pool.namespace() == claim.namespace()).map(Arc::as_ref);
    let pool = pool_selection::select(claim, here).ok()?;
    let board = pool.spec.board.as_ref()?;
    let place =
        RunnerScope::of(&claim.namespace()?, board, claim.spec.owner.as_ref()?, claim.spec.repository.as_deref());
    Some((place.ok()?, board))
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
