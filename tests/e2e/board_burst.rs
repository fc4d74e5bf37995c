//! Many jobs at once, on boards that KWOK plays and with runners that GitHub's simulator plays.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use kube::{ResourceExt, api::ListParams, runtime::watcher};
use paddock::api::{ClaimPhase, LABEL_ENTITY, RunnerClaim, RunnerPool, Worker, WorkerState};
use paddock_bed::{
    boards::{Boards, Seen},
    github::{Conclusion, HookSource, JobRequest, Status},
    stage::WEBHOOK_SECRET,
};
use serde_json::{Value, json};
use tokio::task::AbortHandle;

use crate::{boards::simulated_nodes, support::World};

const ORGANIZATIONS: usize = 20;
/// What an entity may have at a time, unless the operator is told otherwise.
const CAP: usize = 20;
/// Longer than all of it takes on a slow machine.
const DEADLINE: Duration = Duration::from_secs(600);
/// Jobs that end at a time.
const ENDING: usize = 20;

const RUNNERS_OF_GROUP: &str = "/orgs/{org}/actions/runner-groups/{runner_group_id}/runners";

/// A pool on a board of its own, for organisations of its own, whose jobs GitHub tells the operator of.
struct Fleet<'a> {
    world: &'a World,
    /// Also the name of the board and the label of its jobs.
    namespace: String,
    /// Whose calls at GitHub are for this pool.
    accounts: Vec<String>,
    boards: Boards,
    watch: Arc<Mutex<Watch>>,
    tasks: Vec<AbortHandle>,
}

/// What was seen that must not be, and the order in which workers were made.
#[derive(Default)]
struct Watch {
    violations: Vec<String>,
    most: usize,
    workers: Vec<Worker>,
}

impl Drop for Fleet<'_> {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl<'a> Fleet<'a> {
    async fn new(world: &'a World) -> Result<Self> {
        let (namespace, accounts) = hooked_pool(world, ORGANIZATIONS, json!({})).await?;
        let boards = Boards::play(world.stage.kube.client(), world.stage.github.control(), &namespace);
        let watch: Arc<Mutex<Watch>> = Arc::default();
        let workers = watcher(world.api::<Worker>(&namespace), watcher::Config::default());
        let seen = watch.clone();
        let made = tokio::spawn(workers.for_each(move |event| {
            if let Ok(watcher::Event::Apply(worker) | watcher::Event::InitApply(worker)) = event {
                let workers = &mut seen.lock().expect("no panic while held").workers;
                if !workers.iter().any(|known| known.metadata.uid == worker.metadata.uid) {
                    workers.push(worker);
                }
            }
            std::future::ready(())
        }));
        Ok(Self { world, namespace, accounts, boards, watch, tasks: vec![made.abort_handle()] })
    }

    async fn add_nodes(&self, count: usize) -> Result<()> {
        let nodes = simulated_nodes(self.world).await?;
        Boards::add(nodes, &self.namespace, count, &resource(&self.namespace)).await
    }

    /// Jobs, as many of each organisation.
    fn queue(&self, count: usize, duration_ms: Option<u64>) -> Result<Vec<u64>> {
        let number = |number: usize| queue(self.world, &self.namespace, number % ORGANIZATIONS, duration_ms);
        (0..count).map(number).collect()
    }

    /// I7, at this moment: no slot and no cap is exceeded.
    fn sample(&self, nodes: usize) {
        let mut watch = self.watch.lock().expect("no panic while held");
        self.boards.pods(|pods| {
            let active: Vec<&Seen> = pods.values().filter(|seen| seen.is_active()).collect();
            let (mut on_node, mut of_entity) = (HashMap::new(), HashMap::new());
            for seen in &active {
                *of_entity.entry(seen.pod.labels().get(LABEL_ENTITY)).or_insert(0) += 1;
                if let Some(node) = seen.node() {
                    *on_node.entry(node).or_insert(0) += 1;
                }
            }
            let (full, greedy) = (on_node.values().max().unwrap_or(&0), of_entity.values().max().unwrap_or(&0));
            if active.len() > nodes || *full > 1 || *greedy > CAP {
                let found = format!("{} pods on {nodes} nodes, {full} on one, {greedy} of one entity", active.len());
                watch.violations.push(found);
            }
            watch.most = watch.most.max(active.len());
        });
    }

    /// Looks at the pods again and again until something is true.
    async fn until(&self, nodes: usize, what: &str, mut wanted: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            // A busy API server may cost it the lease.
            self.world.keep_operator_alive().await?;
            self.sample(nodes);
            if wanted().await? {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let claims = self.claims().await?;
        let mut phases: BTreeMap<String, usize> = BTreeMap::new();
        for claim in &claims {
            *phases.entry(format!("{:?}", phase(claim))).or_default() += 1;
        }
        bail!("not within {DEADLINE:?}: {what}; claims: {phases:?}")
    }

    async fn claims(&self) -> Result<Vec<RunnerClaim>> {
        Ok(self.world.api::<RunnerClaim>(&self.namespace).list(&ListParams::default()).await?.items)
    }

    async fn workers(&self) -> Result<Vec<Worker>> {
        Ok(self.world.api::<Worker>(&self.namespace).list(&ListParams::default()).await?.items)
    }

    /// Waits until the pool has so many free slots.
    async fn until_free(&self, slots: usize) -> Result<()> {
        let pools = self.world.api::<RunnerPool>(&self.namespace);
        let free = async || Ok(free(&pools.get("riscv").await?) == u32::try_from(slots).ok());
        self.until(slots, "every slot is free", free).await
    }

    /// Ends the jobs, a few at a time: GitHub is asked about a job of which nothing is heard for long after its runner's
    /// end, and that is not what is looked at here.
    async fn finish(&self, nodes: usize, jobs: &[u64]) -> Result<()> {
        let claims = self.world.api::<RunnerClaim>(&self.namespace);
        for some in jobs.chunks(ENDING) {
            for job in some {
                self.world.stage.github.finish_job(*job, Conclusion::Success);
            }
            let mut left = some.iter().peekable();
            self.until(nodes, "the claims of ended jobs are Completed", async || {
                while let Some(job) = left.peek() {
                    if phase(&claims.get(&format!("job-{job}")).await?) != Some(ClaimPhase::Completed) {
                        return Ok(false);
                    }
                    left.next();
                }
                Ok(true)
            })
            .await?;
        }
        Ok(())
    }

    /// Waits until every job is done and its claim and all workers know it: a claim whose job another one's worker ran may be
    /// Completed before its own worker is.
    async fn until_done(&self, nodes: usize, jobs: &[u64]) -> Result<()> {
        let github = &self.world.stage.github;
        let done = |job: &u64| github.job(*job).is_some_and(|job| job.conclusion == Some(Conclusion::Success));
        self.until(nodes, "every job is done", async || Ok(jobs.iter().all(done))).await?;
        self.until(nodes, "every claim is Completed", async || {
            Ok(self.claims().await?.iter().all(|claim| phase(claim) == Some(ClaimPhase::Completed)))
        })
        .await?;
        self.until(nodes, "every worker is Completed", async || {
            let state = |worker: &Worker| worker.status.as_ref().and_then(|status| status.state);
            Ok(self.workers().await?.iter().all(|worker| state(worker) == Some(WorkerState::Completed)))
        })
        .await
    }

    /// I1, I7: one claim and one worker per job, each of which has served, and never too many at a time. Whose worker ran
    /// which job is GitHub's choice.
    async fn check(&self, jobs: &[u64]) -> Result<()> {
        let claims = self.claims().await?;
        ensure!(claims.len() == jobs.len(), "{} claims for {} jobs", claims.len(), jobs.len());
        let workers = self.workers().await?;
        ensure!(workers.len() == jobs.len(), "{} workers for {} jobs", workers.len(), jobs.len());
        for job in jobs {
            ensure!(claims.iter().any(|claim| claim.name_any() == format!("job-{job}")), "job {job} has no claim");
        }
        let watch = self.watch.lock().expect("no panic while held");
        ensure!(watch.violations.is_empty(), "{:?}", watch.violations);
        Ok(())
    }

    /// I7: within an organisation claims got their first worker in their order, oldest first. Workers of one decision are
    /// made side by side, in any order, and no decision makes more of them than there are slots.
    async fn check_order(&self, slots: usize) -> Result<()> {
        let claims: HashMap<String, RunnerClaim> =
            self.claims().await?.into_iter().map(|claim| (claim.name_any(), claim)).collect();
        // Which of all workers was the first of each claim, by owner and in the order of the claims.
        let mut served: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for (number, worker) in self.watch.lock().expect("no panic while held").workers.iter().enumerate() {
            let board = worker.spec.board.as_ref().context("a worker on a board")?;
            let claim = claims.get(&board.claim).context("its claim")?;
            let place = (claim.metadata.creation_timestamp.as_ref().map(|time| time.0), claim.name_any());
            served.entry(board.entity.clone()).or_default().entry(place).or_insert(number);
        }
        for line in served.values() {
            let mut latest: usize = 0;
            for (place, number) in line {
                ensure!(number + slots > latest, "{place:?} has overtaken: {line:?}");
                latest = latest.max(*number);
            }
        }
        Ok(())
    }
}

fn phase(claim: &RunnerClaim) -> Option<ClaimPhase> {
    claim.status.as_ref()?.phase
}

fn free(pool: &RunnerPool) -> Option<u32> {
    Some(pool.status.as_ref()?.slots.as_ref()?.free)
}

pub fn resource(namespace: &str) -> String {
    format!("paddock.test/{namespace}")
}

/// A namespace with a pool whose board and label are called like it, for organisations of its own (`NAMESPACE-0` and so
/// on), whose jobs GitHub tells the operator of; with the accounts of its App at GitHub. `changes` are merged into
/// `spec.board`.
pub async fn hooked_pool(world: &World, organizations: usize, changes: Value) -> Result<(String, Vec<String>)> {
    let (github, kube) = (&world.stage.github, &world.stage.kube);
    let namespace = world.namespace().await?;
    let app = github.app(&namespace);
    let mut accounts = vec![format!("app {}", app.id)];
    for number in 0..organizations {
        let login = format!("{namespace}-{number}");
        github.organization(&login);
        github.repository(&login, "rocket", true)?;
        accounts.push(format!("installation ID {}", github.install(app.id, &login)?));
    }
    github.hook(HookSource::App(app.id), &format!("{}/webhook", world.url()), WEBHOOK_SECRET);
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "hooked", "namespace": namespace },
        "stringData": { "github_app_id": app.id.to_string(), "github_app_private_key": app.private_key },
    });
    kube.apply(&secret.to_string()).await?;
    let mut board = json!({
        "board": namespace, "labels": [[namespace]], "image": "runner", "resourceName": resource(&namespace),
        "github": { "credentialsRef": { "name": "hooked" }, "runnerGroup": "Boards" },
    });
    if let (Value::Object(board), Value::Object(changes)) = (&mut board, changes) {
        board.extend(changes);
    }
    let pool = json!({
        "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerPool",
        "metadata": { "name": "riscv", "namespace": namespace }, "spec": { "board": board },
    });
    kube.apply(&pool.to_string()).await?;
    world.until::<RunnerPool>(&namespace, "riscv", "known", |pool| pool.status.is_some()).await?;
    Ok((namespace, accounts))
}

/// Queues a job for such a pool, of one of its organisations.
pub fn queue(world: &World, namespace: &str, organization: usize, duration_ms: Option<u64>) -> Result<u64> {
    let request = JobRequest {
        owner: format!("{namespace}-{organization}"),
        repo: "rocket".into(),
        labels: vec![namespace.to_owned()],
        duration_ms,
        ..JobRequest::default()
    };
    Ok(world.stage.github.queue_job(request)?.id)
}

pub async fn until_free(world: &World, namespace: &str, slots: u32) -> Result<()> {
    world.until::<RunnerPool>(namespace, "riscv", "free", |pool| free(pool) == Some(slots)).await.map(drop)
}

/// An operator with the lease that the chart gives it: all parts share two cores, and a shorter one than that is lost while
/// the API server has hundreds of pods to make.
async fn patient_operator(world: &World) -> Result<()> {
    world.kill_operator()?;
    world.start_operator_with(&["--lease-duration", "15s"]).await
}

/// 300 jobs of 20 organisations at once, on 300 boards: each gets a runner of its own, once, and GitHub is asked little more
/// than once per job.
pub async fn burst_of_300_jobs_over_20_organisations(world: &World) -> Result<()> {
    const JOBS: usize = 300;
    patient_operator(world).await?;
    let fleet = Fleet::new(world).await?;
    fleet.add_nodes(JOBS).await?;
    fleet.until_free(JOBS).await?;
    let github = &world.stage.github;
    github.reset_calls();
    let start = Instant::now();
    let jobs = fleet.queue(JOBS, None)?;
    let taken = |job: &u64| github.job(*job).is_some_and(|job| job.status == Status::InProgress);
    fleet.until(JOBS, "every job is taken", async || Ok(jobs.iter().all(taken))).await?;
    // All of them, now: those that were looked at before may have been fewer.
    fleet.sample(JOBS);
    fleet.finish(JOBS, &jobs).await?;
    fleet.until_done(JOBS, &jobs).await?;
    let mut calls = github.calls();
    calls.retain(|call| fleet.accounts.contains(&call.account));
    let count = |wanted: &dyn Fn(&str) -> bool| -> u64 {
        calls.iter().filter(|call| wanted(&call.route)).map(|call| call.count).sum()
    };
    // What the clock asks for is counted apart: the log of deliveries, and once a minute the runners of an organisation,
    // for each of them of which nothing was heard.
    let (is_log, is_list) =
        (|route: &str| route.starts_with("/app/hook/deliveries"), |route: &str| route == RUNNERS_OF_GROUP);
    let (lists, minutes) = (count(&is_list), start.elapsed().as_secs() / 60);
    ensure!(lists <= minutes * JOBS as u64, "{lists} lists of runners in {minutes} min: {calls:?}");
    let asked = count(&|route| !is_log(route) && !is_list(route));
    ensure!(asked as f64 <= 1.2 * JOBS as f64, "{asked} calls for {JOBS} jobs: {calls:?}");
    fleet.check(&jobs).await?;
    let most = fleet.watch.lock().expect("no panic while held").most;
    ensure!(most == JOBS, "only {most} ran at a time");
    Ok(())
}

/// I1, I7: 1,000 jobs at once for 50 boards; none is lost, none is served twice, and each organisation's come in order.
pub async fn i1_i7_a_thousand_jobs_at_once_none_lost_none_double(world: &World) -> Result<()> {
    const JOBS: usize = 1000;
    const NODES: usize = 50;
    patient_operator(world).await?;
    let fleet = Fleet::new(world).await?;
    let jobs = fleet.queue(JOBS, Some(1))?;
    // The line is complete, and the operator knows it, before the first is served, so that its order is certain.
    let waits = |claim: &RunnerClaim| phase(claim) == Some(ClaimPhase::Pending);
    let in_line = async || {
        let claims = fleet.claims().await?;
        Ok(claims.len() == JOBS && claims.iter().all(waits))
    };
    fleet.until(NODES, "every job has a claim that waits", in_line).await?;
    fleet.add_nodes(NODES).await?;
    fleet.until_done(NODES, &jobs).await?;
    fleet.check(&jobs).await?;
    fleet.check_order(NODES).await
}
