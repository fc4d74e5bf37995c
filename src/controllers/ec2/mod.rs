//! EC2 pools and their claims.

pub mod claim;
pub mod idle_queue;
mod launch_room;
mod machines;
pub mod pool;
pub mod pool_memory;
mod runner_release;
pub mod runner_tokens;
mod sweep;
mod waiting_line;
mod wake;
pub mod worker_mirror;
pub mod workflow_runs;

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use jiff::SignedDuration;
use paddock_core::{
    api::{Ec2Timeouts, RunnerPool},
    ec2::{capacity_memory::CapacityMemory, machine::Machine, pool_status::PoolProblem},
    names::PoolKey,
};
use paddock_effects::{
    aws::{Clients, dynamodb::Records, ec2::Machines, sqs::Queues, wake_queues::WakeQueues},
    clock,
    fence::Fence,
    ledger::Ledger,
    lock,
    metrics::ClockLabel,
};
use paddock_record::table_name;
use tokio_util::sync::CancellationToken;

use self::{
    idle_queue::IdleQueues, launch_room::LaunchRoom, pool::aws_problem, pool_memory::PoolMemory, runner_tokens::Tokens,
    workflow_runs::Runs,
};
use super::{Error, Shared, every, paced, reference};

/// How often all records are read again.
const LEDGER_RELOAD_PERIOD: Duration = Duration::from_secs(30);

/// State shared by the controllers of EC2 pools and their claims.
pub struct Ec2Context {
    pub shared: Arc<Shared>,
    pub ledger: Arc<Ledger>,
    pub queues: Queues,
    pub wake_queues: WakeQueues,
    pub machines: Machines,
    pub idle_queues: Arc<IdleQueues>,
    pub pools: PoolMemory,
    pub launch_room: Arc<LaunchRoom>,
    pub runs: Runs,
    pub tokens: Tokens,
    capacity_memory: Mutex<CapacityMemory>,
}

impl Ec2Context {
    pub async fn new(shared: Arc<Shared>, fence: &Fence) -> Self {
        let aws = Clients::new(fence).await;
        let wake_queues = WakeQueues::new(aws.sqs.clone(), &shared.settings.cluster_name);
        let queues = Queues::new(aws.sqs);
        let table = table_name(&shared.settings.cluster_name);
        let ledger = Arc::new(Ledger::new(Records::new(aws.dynamodb, table), shared.lanes.clone()));
        Self {
            machines: Machines::new(aws.ec2),
            idle_queues: IdleQueues::new(queues.clone(), ledger.clone(), shared.metrics.clone()),
            ledger,
            queues,
            wake_queues,
            pools: PoolMemory::default(),
            launch_room: Arc::default(),
            runs: Runs::default(),
            tokens: Tokens::default(),
            capacity_memory: Mutex::new(CapacityMemory::new(shared.settings.capacity_memory)),
            shared,
        }
    }

    /// Where EC2 recently had no capacity.
    pub fn capacity_memory(&self) -> MutexGuard<'_, CapacityMemory> {
        lock(&self.capacity_memory)
    }

    /// Stores the outcome of the last launch for a pool.
    pub fn note_launch_outcome(&self, pool: Option<&RunnerPool>, problem: Option<PoolProblem>) {
        if let Some(pool) = pool {
            self.pools.note_launch(&PoolKey::of(pool), pool.metadata.generation, problem);
        }
    }
}

pub async fn run(context: Arc<Ec2Context>, stop: CancellationToken) {
    let metrics = context.shared.metrics.clone();
    let pause = || context.ledger.heartbeat_pause(|machine| heartbeat_limit(&context, machine));
    tokio::join!(
        every("ledger", LEDGER_RELOAD_PERIOD, metrics.clone(), stop.clone(), || reload(&context)),
        paced("heartbeats", pause, metrics, stop.clone(), || heartbeats(&context)),
        context.ledger.listen(stop.clone()),
        worker_mirror::run(context.clone(), stop.clone()),
        wake::run(context.clone(), stop.clone()),
        pool::run(context.clone(), stop.clone()),
        sweep::run(context.clone(), stop.clone()),
        claim::run(context.clone(), stop.clone()),
    );
}

async fn heartbeats(context: &Ec2Context) -> Result<(), Error> {
    let read = context.ledger.read_heartbeats(|machine| heartbeat_limit(context, machine)).await;
    measure_clocks(context);
    Ok(read?)
}

/// How long a machine may be silent.
fn heartbeat_limit(context: &Ec2Context, machine: &Machine) -> SignedDuration {
    let key = PoolKey::parse(&machine.record.pool);
    let pool = key.and_then(|key| context.shared.stores.pools.store.get(&reference(&key.namespace, &key.name)));
    let limit = pool.and_then(|pool| Some(pool.spec.ec2.as_ref()?.timeouts.heartbeat));
    SignedDuration::from(limit.unwrap_or_else(|| Ec2Timeouts::default().heartbeat))
}

fn measure_clocks(context: &Ec2Context) {
    let set = |source, skew: SignedDuration| {
        context.shared.metrics.clock_skew.get_or_create(&ClockLabel { source }).set(skew.as_secs_f64());
    };
    clock::skews().for_each(|(service, skew)| set(service.label(), skew));
    set("agents", context.ledger.worst_skew());
}

async fn reload(context: &Ec2Context) -> Result<(), Error> {
    if !context.ledger.is_loaded() {
        return Ok(());
    }
    let pass = async {
        context.ledger.reload().await?;
        worker_mirror::enqueue_orphans(context);
        context.end_orphans().await
    };
    let outcome = pass.await;
    context.pools.note_reload(outcome.clone().err().map(aws_problem));
    Ok(outcome?)
}
