//! Pools of boards for tests: on the real kubelet, or on nodes that KWOK plays.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use paddock::api::{
    ANNOTATION_JOB_RUNNER, ANNOTATION_JOB_STATE, ClaimPhase, LABEL_BOARD, READY, RunnerClaim, RunnerPool, Worker,
    WorkerState,
};
use paddock_bed::{
    device_plugin::DevicePlugin,
    github::{Job, JobRequest, Status},
    image::runner_image,
    kwok::SimulatedNodes,
    node::Node,
    stage::{CREDENTIALS, REPOSITORY, binary},
};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::support::{DEADLINE, World};

pub const BOARD: &str = "test-board";
pub const IMAGE: &str = "paddock-bed/runner:1";

/// The one real node, and KWOK; they end with the bed.
static NODE: OnceCell<Node> = OnceCell::const_new();
static SIMULATED: OnceCell<SimulatedNodes> = OnceCell::const_new();

/// A namespace with a pool of its own: its jobs have an organisation and a label, and its slots a resource, that no other
/// test has. Caps, faults and troubles with GitHub count by organisation.
pub struct Boards<'a> {
    pub world: &'a World,
    pub namespace: String,
    pub label: String,
    /// The organisation, and the App's installation there.
    pub login: String,
    pub installation: u64,
    /// Whose jobs are served, and in which repository they are.
    pub owner: Value,
    pub repository: Value,
    /// Advertises the real node's slots.
    _plugin: Option<DevicePlugin>,
}

impl<'a> Boards<'a> {
    /// On the real node.
    pub async fn real(world: &'a World, slots: u32) -> Result<Self> {
        let node = node(world).await?;
        let mut boards = Self::new(world).await?;
        let plugin = DevicePlugin::start(&world.stage.kube, node, BOARD, &boards.resource(), slots).await?;
        boards._plugin = Some(plugin);
        boards.pool(BOARD, slots, json!({})).await?;
        Ok(boards)
    }

    /// On as many simulated nodes, called after the namespace, with a slot each; `changes` are merged into the pool's
    /// `spec.board`. Pods run and do nothing.
    pub async fn simulated(world: &'a World, nodes: u32, changes: Value) -> Result<Self> {
        let kwok = simulated_nodes(world).await?;
        let boards = Self::new(world).await?;
        let (name, resource) = (boards.namespace.clone(), boards.resource());
        kwok.add(&name, usize::try_from(nodes)?, &[(LABEL_BOARD, &name)], &[(&resource, "1")]).await?;
        boards.pool(&name, nodes, changes).await?;
        Ok(boards)
    }

    async fn new(world: &'a World) -> Result<Self> {
        let namespace = world.namespace().await?;
        let (label, login) = (format!("rv-{namespace}"), format!("org-{namespace}"));
        Self::of_organization(world, namespace, label, login)
    }

    /// The same pool for the jobs of another organisation, which has the App installed.
    pub fn for_organization(&self, login: &str) -> Result<Boards<'a>> {
        Self::of_organization(self.world, self.namespace.clone(), self.label.clone(), login.to_owned())
    }

    fn of_organization(world: &'a World, namespace: String, label: String, login: String) -> Result<Self> {
        let github = &world.stage.github;
        let (owner, repository) = (github.organization(&login), github.repository(&login, REPOSITORY, true)?);
        let installation = github.install(world.stage.app_id(), &login)?;
        Ok(Self {
            world,
            namespace,
            label,
            owner: json!({ "id": owner.id, "login": owner.login, "type": "Organization" }),
            repository: json!({ "id": repository.id, "name": format!("{login}/{REPOSITORY}") }),
            login,
            installation,
            _plugin: None,
        })
    }

    /// How often GitHub was asked this in the name of the organisation, and so for this pool alone.
    pub fn asked(&self, method: &str, route: &str) -> u64 {
        let account = format!("installation ID {}", self.installation);
        let calls = self.world.stage.github.calls().into_iter();
        let own = calls.filter(|call| call.account == account && call.method == method && call.route == route);
        own.map(|call| call.count).sum()
    }

    fn resource(&self) -> String {
        format!("paddock.test/{}", self.namespace)
    }

    async fn pool(&self, board: &str, slots: u32, changes: Value) -> Result<()> {
        let mut spec = json!({
            "board": board, "labels": [[self.label]], "image": IMAGE, "resourceName": self.resource(),
            "github": { "credentialsRef": { "name": CREDENTIALS }, "runnerGroup": "Boards" },
        });
        if let (Value::Object(spec), Value::Object(changes)) = (&mut spec, changes) {
            spec.extend(changes);
        }
        let pool = json!({
            "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerPool",
            "metadata": { "name": "riscv", "namespace": self.namespace },
            "spec": { "board": spec },
        });
        self.world.stage.kube.apply(&pool.to_string()).await?;
        let free = |pool: &RunnerPool| pool.status.as_ref().and_then(|status| Some(status.slots.as_ref()?.free));
        self.world.until::<RunnerPool>(&self.namespace, "riscv", "free", |pool| free(pool) == Some(slots)).await?;
        Ok(())
    }

    pub async fn claim(&self, name: &str) -> Result<()> {
        self.claim_with(name, json!({})).await
    }

    /// A claim for a job, as a webhook makes it.
    pub async fn claim_for(&self, job: &Job) -> Result<String> {
        let name = format!("job-{}", job.id);
        self.claim_with(&name, json!({ "runId": job.run_id.to_string(), "job": { "id": job.id } })).await?;
        Ok(name)
    }

    pub async fn claim_with(&self, name: &str, changes: Value) -> Result<()> {
        let mut spec = json!({
            "runId": "1", "labels": [self.label], "owner": self.owner,
            "repository": self.repository["name"], "repositoryId": self.repository["id"],
        });
        if let (Value::Object(spec), Value::Object(changes)) = (&mut spec, changes) {
            spec.extend(changes);
        }
        let claim = json!({
            "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerClaim",
            "metadata": { "name": name, "namespace": self.namespace },
            "spec": spec,
        });
        self.world.stage.kube.apply(&claim.to_string()).await
    }

    /// What a webhook writes on a job's claim.
    pub async fn tell(&self, claim: &str, state: &str, runner: Option<&str>) -> Result<()> {
        let runner = runner.map(|name| {
            let id = self.world.stage.github.runner(name).map_or(0, |runner| runner.id);
            format!("{id}/{name}")
        });
        let annotations = json!({ ANNOTATION_JOB_STATE: state, ANNOTATION_JOB_RUNNER: runner });
        let patch = Patch::Merge(json!({ "metadata": { "annotations": annotations } }));
        self.world.api::<RunnerClaim>(&self.namespace).patch(claim, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    pub fn job(&self, duration_ms: Option<u64>) -> Result<u64> {
        Ok(self.queue(duration_ms)?.id)
    }

    pub fn queue(&self, duration_ms: Option<u64>) -> Result<Job> {
        let full = self.repository["name"].as_str().unwrap_or_default();
        let (owner, repo) = full.split_once('/').context("a repository has an owner")?;
        let labels = vec![self.label.clone()];
        let request =
            JobRequest { owner: owner.into(), repo: repo.into(), labels, duration_ms, ..JobRequest::default() };
        self.world.stage.github.queue_job(request)
    }

    pub async fn until_claim(&self, name: &str, phase: ClaimPhase) -> Result<RunnerClaim> {
        let is = |claim: &RunnerClaim| claim.status.as_ref().and_then(|status| status.phase) == Some(phase);
        self.world.until(&self.namespace, name, phase.as_str(), is).await
    }

    /// Waits until the claim is, or was, in this phase: one that passes may be over before anybody looks.
    pub async fn until_was(&self, name: &str, phase: ClaimPhase) -> Result<RunnerClaim> {
        let was = |claim: &RunnerClaim| claim.status.as_ref().is_some_and(|it| it.phase_times.of(phase).is_some());
        self.world.until(&self.namespace, name, phase.as_str(), was).await
    }

    /// Waits until the claim says this.
    pub async fn until_says(&self, name: &str, words: &str) -> Result<RunnerClaim> {
        let says = |claim: &RunnerClaim| message(claim).contains(words);
        self.world.until(&self.namespace, name, &format!("saying {words:?}"), says).await
    }

    pub async fn until_worker(&self, name: &str, state: WorkerState) -> Result<Worker> {
        let is = |worker: &Worker| worker.status.as_ref().and_then(|status| status.state) == Some(state);
        self.world.until(&self.namespace, name, state.as_str(), is).await
    }

    /// The name of the claim's only worker.
    pub fn worker_of(&self, claim: &RunnerClaim) -> Result<String> {
        let workers = claim.status.as_ref().map(|status| status.workers.as_slice()).unwrap_or_default();
        ensure!(workers.len() == 1, "one worker, not {workers:?}");
        Ok(workers[0].name.clone())
    }

    pub async fn workers(&self) -> Result<Vec<Worker>> {
        Ok(self.world.api::<Worker>(&self.namespace).list(&ListParams::default()).await?.items)
    }

    /// Waits until the claim's worker has a pod that runs, and gives its name.
    pub async fn until_running(&self, claim: &str) -> Result<String> {
        let mut name = None;
        let running = async || {
            let workers = self.workers().await?.into_iter();
            let mut own = workers.filter(|worker| worker.spec.board.as_ref().is_some_and(|board| board.claim == claim));
            name = own
                .find(|worker| worker.status.as_ref().and_then(|status| status.state) == Some(WorkerState::Running))
                .map(|worker| worker.name_any());
            Ok(name.is_some())
        };
        self.world.until_true(&format!("{claim} has a worker that runs"), running).await?;
        name.context("it was there")
    }

    pub async fn pods(&self) -> Result<Vec<Pod>> {
        Ok(self.world.api::<Pod>(&self.namespace).list(&ListParams::default()).await?.items)
    }

    pub async fn until_taken(&self, job: u64) -> Result<String> {
        let github = &self.world.stage.github;
        let job = github.until_job(job, DEADLINE, |job| job.status == Status::InProgress && job.heard).await?;
        Ok(job.taken_by.context("somebody runs it")?.runner_name)
    }

    pub async fn until_no_runner(&self, name: &str) -> Result<()> {
        let github = &self.world.stage.github;
        self.world.until_true(&format!("runner {name} is gone"), async || Ok(github.runner(name).is_none())).await
    }
}

/// For a pool whose runners are not played, or late: they are not given up for that.
pub fn unplayed() -> Value {
    json!({ "timeouts": { "registration": "1h" } })
}

pub async fn node(world: &World) -> Result<&'static Node> {
    NODE.get_or_try_init(|| start_node(world)).await
}

pub async fn simulated_nodes(world: &World) -> Result<&'static SimulatedNodes> {
    SIMULATED.get_or_try_init(|| SimulatedNodes::start(&world.stage.kube)).await
}

async fn start_node(world: &World) -> Result<Node> {
    let node = Node::start(&world.stage.kube, "board-1", &[]).await?;
    let archive = world.stage.dir().join("runner.tar");
    runner_image(IMAGE, Path::new(&binary("paddock-bed-runner")?), &["jit"])?.write(&archive)?;
    node.import_image(&archive).await?;
    Ok(node)
}

pub fn message(claim: &RunnerClaim) -> &str {
    let conditions = claim.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    conditions.iter().find(|condition| condition.type_ == READY).map_or("", |condition| &condition.message)
}
