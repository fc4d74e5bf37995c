//! EC2 pools: their AWS resources, the upkeep of their machines, and their status.

pub mod upkeep;
mod warm;

use std::{borrow::Cow, sync::Arc, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use futures::StreamExt;
use jiff::SignedDuration;
use kube::runtime::{controller::Controller, events::EventType};
use paddock_core::{
    api::{
        CLOCK_SKEW, ClassTypes, Ec2Pool, FailureReason, Hardware, METADATA_ACCESS, PoolReason, Queue, READY,
        RUNNER_OUTDATED, RunnerPool, RunnerPoolStatus,
    },
    clock_skew::{SkewedClock, Skews},
    ec2::{
        launch::{queue_name, template, template_name},
        machine::Machine,
        network::Network,
        pool_status::{self, PoolProblem},
        requirements::Requirements,
        runner_release,
        user_data::user_data,
    },
    names::PoolKey,
};
use paddock_effects::{
    aws::AwsError,
    clock,
    kube::objects::{self, Written},
};
use paddock_record::{AgentConfig, Instance, State};
use tokio_util::sync::CancellationToken;

pub use self::upkeep::FirstError;
use self::{upkeep::keep_up, warm::keep_warm};
use super::Ec2Context;
use crate::controllers::{CONFLICT_RETRY, Error, Next, drive, reference, stale_runners};

/// How often a pool is reconciled without an event: an instance outlives its threshold by at most this.
pub const REFRESH_PERIOD: Duration = Duration::from_secs(10);
/// How often the deletion of a pool is retried.
const REMOVE_RETRY: Duration = Duration::from_secs(5);
/// How often the AWS resources are verified.
const VERIFY_PERIOD: Duration = Duration::from_secs(300);

pub async fn run(context: Arc<Ec2Context>, stop: CancellationToken) {
    let changed = context.ledger.changed_pools().map(|pool| reference(&pool.namespace, &pool.name));
    let stores = &context.shared.stores;
    let controller =
        Controller::for_shared_stream(stores.pools.stream(), stores.pools.store.clone()).reconcile_on(changed);
    drive("pool", controller, context.clone(), context.shared.metrics.clone(), stop, reconcile).await;
}

async fn reconcile(pool: Arc<RunnerPool>, context: Arc<Ec2Context>) -> Result<Next, Error> {
    let Some(Hardware::Ec2(_)) = pool.spec.hardware() else { return Ok(Next::AwaitChange) };
    let deleted = pool.metadata.deletion_timestamp.is_some();
    let pool = match objects::has_finalizer(&*pool) {
        true => pool,
        false if deleted => return Ok(Next::AwaitChange),
        false => match objects::add_finalizer(&context.shared.client, &*pool).await? {
            Some(pool) => Arc::new(pool),
            None => return Err(Error::Conflict),
        },
    };
    if deleted { remove(&context, &pool).await } else { refresh(&context, &pool).await }
}

/// Prepares the AWS resources, keeps the machines up, and writes the status.
async fn refresh(context: &Arc<Ec2Context>, pool: &RunnerPool) -> Result<Next, Error> {
    let Some(ec2) = &pool.spec.ec2 else { return Ok(Next::AwaitChange) };
    let key = PoolKey::of(pool);
    let mut new = pool_status::initial(pool);
    let prepare_due = context.pools.is_prepare_due(&key, pool.metadata.generation, VERIFY_PERIOD);
    let prepared = match prepare_due || new.launch_template.is_none() {
        true => prepare(context, pool, ec2, &mut new).await,
        false => Ok(()),
    };
    // The upkeep runs even if the preparation failed: machines still expire.
    let kept = match context.ledger.is_loaded() {
        true => {
            let kept = keep_up(context, pool, ec2, &key, &new).await;
            kept.and(context.pools.upkeep_problem(&key).map_or(Ok(()), Err))
        }
        false => Ok(()),
    };
    let mut pool = Cow::Borrowed(pool);
    let problem = match prepared.and(kept) {
        Ok(()) => keep_warm(context, &mut pool, ec2, &key, &mut new).await?,
        Err(problem) => Some(problem),
    };
    let pool = pool.as_ref();
    // An AWS resource may be missing: the next reconciliation repairs it. It cannot repair missing capacity.
    if problem.as_ref().is_some_and(|(reason, _)| *reason != PoolReason::InsufficientCapacity) {
        context.pools.prepare_again(&key);
    }
    let generation = pool.metadata.generation;
    let launch = context.pools.launch_problem(&key, generation).map(|(problem, _)| problem);
    let boot = context.pools.failed_boots(&key, generation).and_then(|boots| boots.problem(generation));
    let credentials = context.credentials_problem(pool, ec2).await;
    let machines = context.ledger.of_pool(&key);
    let problem = problem.or(credentials).or(launch).or(boot);
    let skews = context.pools.show_skews(&key, measured(&machines));
    let new = pool_status::status(pool, new, &machines, problem, &skews, clock::now());
    // Urgent, counts too: the next upkeep, which returns machines to the pool, waits for it.
    let written = objects::write_status(&context.shared.client, pool, pool.status.as_ref(), &new).await?;
    if written == Written::Yes {
        report_conditions(context, pool, &new);
    }
    if written == Written::Stale { Err(Error::Conflict) } else { Ok(Next::After(REFRESH_PERIOD)) }
}

/// How far the clocks of the operator and of the pool's machines differ.
fn measured(machines: &[Machine]) -> impl Iterator<Item = (SkewedClock, SignedDuration)> {
    let live = machines.iter().filter(|machine| machine.record.state != State::Terminated);
    let agents = live.filter_map(|it| Some((SkewedClock::Machine(it.record.instance_id.clone()), it.skew?)));
    clock::skews().map(|(service, skew)| (SkewedClock::Operator(service.name()), skew)).chain(agents)
}

/// Publishes an event when a condition of the pool changes.
fn report_conditions(context: &Ec2Context, pool: &RunnerPool, new: &RunnerPoolStatus) {
    const BAD: [(&str, &str); 3] = [(CLOCK_SKEW, "False"), (RUNNER_OUTDATED, "False"), (METADATA_ACCESS, "False")];
    for (type_, good) in [(READY, "True")].into_iter().chain(BAD) {
        let of = |status: &RunnerPoolStatus| status.conditions.iter().find(|known| known.type_ == type_).cloned();
        let (before, Some(now)) = (pool.status.as_ref().and_then(of), of(new)) else { continue };
        if before.is_none_or(|before| (&before.reason, &before.message) != (&now.reason, &now.message)) {
            let event = if now.status == good { EventType::Normal } else { EventType::Warning };
            context.shared.events.record(pool, event, "Refresh", &now.reason, now.message);
        }
    }
}

pub fn aws_problem(error: AwsError) -> PoolProblem {
    let reason = match error {
        AwsError::Denied { .. } => PoolReason::AwsDenied,
        AwsError::Throttled { .. } | AwsError::Unreachable { .. } => PoolReason::AwsUnavailable,
        AwsError::NotYet { .. } => PoolReason::Preparing,
        AwsError::Refused { .. } => PoolReason::InvalidSpec,
    };
    (reason, error.to_string())
}

/// Creates or repairs the table, the queues and the launch template.
async fn prepare(
    context: &Ec2Context,
    pool: &RunnerPool,
    ec2: &Ec2Pool,
    new: &mut RunnerPoolStatus,
) -> Result<(), PoolProblem> {
    let key = PoolKey::of(pool);
    let cluster = &context.shared.settings.cluster_name;
    if !context.ledger.ensure().await.map_err(aws_problem)? {
        return Err((PoolReason::Preparing, "the DynamoDB table is being created".into()));
    }
    let mut queues = Vec::new();
    for class in &ec2.resource_classes {
        let queue = queue_name(cluster, &key, &class.name);
        let url = context.queues.ensure(&queue, ec2.lifetimes.idle.into()).await.map_err(aws_problem)?;
        queues.push(Queue { resource_class: class.name.clone(), url });
    }
    new.queues = queues;
    let runner = context.runner_choice(pool, ec2).await?;
    new.runner = Some(runner_release::shown(new.runner.as_ref(), &runner, clock::now()));
    let config = AgentConfig {
        pre_runner_script: ec2.pre_runner_script.clone().unwrap_or_default(),
        scrub_script: ec2.reuse.scrub_script.clone(),
        runner_version: Some(runner.version),
        runner_archives: runner.archives,
        listed_runner_version: Some(runner.listed),
        runner_metadata_access: ec2.metadata.runner_access,
        ..AgentConfig::new(cluster, &key.to_string(), ec2.lifetimes.created.into())
    };
    let script = user_data(&config, &ec2.agent.url, &ec2.agent.sha256, Network::of(ec2))
        .map_err(|error| (PoolReason::UserDataTooLarge, error.to_string()))?;
    let wanted = template(cluster, &key, ec2, BASE64_STANDARD.encode(script))?;
    let template = context.machines.ensure_template(&wanted).await.map_err(aws_problem)?;
    let Some(image) = &template.image else {
        return Err((PoolReason::Preparing, "EC2 does not show the new launch template yet".into()));
    };
    let site = context.machines.check(ec2, image).await.map_err(aws_problem)?;
    context.pools.note_site(&key, site.clone());
    new.launch_template = Some(template);
    let mut classes = Vec::new();
    for class in &ec2.resource_classes {
        let needs = Requirements::of_class(ec2, class);
        let counted = context.machines.count_types(&site.architecture, &needs).await;
        classes.push(ClassTypes { name: class.name.clone(), instance_types: counted.map_err(aws_problem)? });
    }
    new.classes = classes;
    Ok(())
}

/// Deletes a pool: waits for its claims, then ends its machines and deletes its AWS resources.
async fn remove(context: &Arc<Ec2Context>, pool: &RunnerPool) -> Result<Next, Error> {
    let key = PoolKey::of(pool);
    let Some(ec2) = &pool.spec.ec2 else { return Ok(Next::AwaitChange) };
    let status = pool_status::initial(pool);
    let problem = match context.ledger.load().await {
        Ok(true) => keep_up(context, pool, ec2, &key, &status).await.err(),
        Ok(false) => Some((PoolReason::Deleting, "the DynamoDB table is being created".into())),
        Err(error) => Some(aws_problem(error)),
    };
    let machines = context.ledger.of_pool(&key);
    let outcome = match problem.or_else(|| pool_status::deletion_waits_for(&machines)) {
        Some(problem) => Err(problem),
        None => tear_down(context, pool, ec2, &key).await.map_err(aws_problem),
    };
    match outcome {
        Ok(()) => {
            objects::remove_finalizer(&context.shared.client, pool).await?;
            context.pools.forget(&key);
            context.idle_queues.forget(&key);
            context.launch_room.forget(&key);
            Ok(Next::After(CONFLICT_RETRY))
        }
        Err(problem) => {
            tracing::info!(pool = %key, message = problem.1, "pool not deleted yet");
            let new = pool_status::status(pool, status, &machines, Some(problem), &Skews::new(), clock::now());
            objects::write_status(&context.shared.client, pool, pool.status.as_ref(), &new).await?;
            Ok(Next::After(REMOVE_RETRY))
        }
    }
}

async fn end_and_forget(context: &Ec2Context, ec2: &Ec2Pool, record: &Instance) -> Result<(), AwsError> {
    if record.state != State::Terminated {
        let why = "its pool was deleted";
        context.end_instance(&record.instance_id, FailureReason::CreationAborted, why).await?;
    }
    stale_runners::remove_last(context, ec2, record).await;
    context.ledger.forget(&record.instance_id).await
}

async fn tear_down(context: &Ec2Context, pool: &RunnerPool, ec2: &Ec2Pool, key: &PoolKey) -> Result<(), AwsError> {
    let mut failures = FirstError::default();
    for machine in context.ledger.of_pool(key) {
        failures.note(end_and_forget(context, ec2, &machine.record).await);
    }
    failures.first()?;
    let cluster = &context.shared.settings.cluster_name;
    let described = context.machines.of_pool(cluster, key).await?;
    let left: Vec<_> = described.into_iter().filter(|d| !d.gone).map(|d| d.id).collect();
    context.machines.terminate(&left).await?;
    for queue in pool.status.iter().flat_map(|status| &status.queues) {
        context.queues.remove(&queue.url).await?;
    }
    context.machines.remove_template(&template_name(cluster, key)).await
}
