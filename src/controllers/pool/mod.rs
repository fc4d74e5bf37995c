//! EC2 pools: what they need at AWS, their machines' upkeep, and what they show.

mod upkeep;
mod warm;

use std::{borrow::Cow, collections::HashSet, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use base64::{Engine, prelude::BASE64_STANDARD};
use futures::StreamExt;
use jiff::Timestamp;
use kube::{
    ResourceExt,
    runtime::{
        controller::{Action, Controller},
        events::EventType,
    },
};
use paddock_record::{AgentConfig, State};
use tokio_util::sync::CancellationToken;

use self::{upkeep::keep_up, warm::keep_warm};
use super::{
    Context, drive, mirror,
    objects::{self, Written},
    reference, registrations,
};
use crate::{
    api::{
        Ec2Pool, FailureReason, Hardware, PoolKind, PoolReason, Queue, READY, RunnerPool, RunnerPoolStatus,
        ready_condition, set_condition,
    },
    effects::aws::AwsError,
    plan::{
        fleet::{pool_key, queue_name, template},
        shortage::hint,
        user_data::user_data,
    },
};

/// How long a pool goes without a look when nothing happens: an instance outlives its threshold by no more.
pub const REFRESH: Duration = Duration::from_secs(10);
/// How long a deleted pool that waits goes without a look.
const REMOVE: Duration = Duration::from_secs(5);
/// How long a pool whose view was stale goes without a look; mostly the news comes first.
const STALE: Duration = Duration::from_millis(200);
/// How often AWS is compared with what it should be.
const VERIFY: Duration = Duration::from_secs(300);

pub async fn run(context: Arc<Context>, stop: CancellationToken) {
    let changed = context.ledger.changed_pools().filter_map(|pool| {
        std::future::ready(pool.split_once('/').map(|(namespace, name)| reference(namespace, name)))
    });
    let stores = &context.stores;
    let controller =
        Controller::for_shared_stream(stores.pools.stream(), stores.pools.store.clone()).reconcile_on(changed);
    drive("pool", controller, context.clone(), stop, reconcile).await;
}

async fn reconcile(pool: Arc<RunnerPool>, context: Arc<Context>) -> Result<Action> {
    let Some(Hardware::Ec2(_)) = pool.spec.hardware() else { return Ok(Action::await_change()) };
    let deleted = pool.metadata.deletion_timestamp.is_some();
    let pool = match objects::has_finalizer(&*pool) {
        true => pool,
        false if deleted => return Ok(Action::await_change()),
        false => match objects::hold(&context.client, &*pool).await? {
            Some(pool) => Arc::new(pool),
            None => return Ok(Action::requeue(STALE)),
        },
    };
    if deleted { remove(&context, &pool).await } else { refresh(&context, &pool).await }
}

/// Observe, keep up, show.
async fn refresh(context: &Arc<Context>, pool: &RunnerPool) -> Result<Action> {
    let Some(ec2) = &pool.spec.ec2 else { return Ok(Action::await_change()) };
    let key = pool_key(&pool.namespace().unwrap_or_default(), &pool.name_any());
    let mut new = pool.status.clone().unwrap_or_default();
    new.kind = Some(PoolKind::Ec2);
    new.observed_generation = pool.metadata.generation;
    let timer = prepare_timer(pool);
    let prepared = match new.launch_template.is_some() && !context.timers.due(&timer, VERIFY) {
        true => Ok(()),
        false => prepare(context, pool, ec2, &mut new).await,
    };
    // Machines are looked after whatever became of the preparations: their time runs on.
    let kept = match context.ledger.is_loaded() {
        true => keep_up(context, pool, ec2, &key, &new.queues).await,
        false => Ok(()),
    };
    let mut pool = Cow::Borrowed(pool);
    let outcome = match prepared.and(kept) {
        Ok(()) => keep_warm(context, &mut pool, ec2, &key, &mut new).await?,
        trouble => trouble,
    };
    let pool = pool.as_ref();
    // Something may have been taken away: the next look sees to it. Capacity is nothing that we could make.
    if outcome.as_ref().is_err_and(|(reason, _)| *reason != PoolReason::InsufficientCapacity) {
        context.timers.reset(&timer);
    }
    let launch = context.troubles.of_launch(&key, pool.metadata.generation).map(|(trouble, _)| trouble);
    let trouble = outcome.err().or(launch);
    let (reason, message) = trouble.unwrap_or((PoolReason::Ready, "the pool serves claims".to_owned()));
    let instances = context.ledger.of_pool(&key);
    new.workers = mirror::counts(&instances);
    let ready = reason == PoolReason::Ready;
    let condition = ready_condition(ready, reason, message, pool.metadata.generation, Timestamp::now());
    set_condition(&mut new.conditions, condition);
    let written = objects::write_status(&context.client, pool, pool.status.as_ref(), &new).await?;
    if written == Written::Yes {
        tell(context, pool, &new);
    }
    Ok(Action::requeue(if written == Written::Yes { REFRESH } else { STALE }))
}

/// An event for each new word of the pool's condition.
fn tell(context: &Context, pool: &RunnerPool, new: &RunnerPoolStatus) {
    let ready = |status: &RunnerPoolStatus| status.conditions.iter().find(|known| known.type_ == READY).cloned();
    let (before, Some(now)) = (pool.status.as_ref().and_then(ready), ready(new)) else { return };
    if before.is_none_or(|before| (&before.reason, &before.message) != (&now.reason, &now.message)) {
        let type_ = if now.status == "True" { EventType::Normal } else { EventType::Warning };
        context.events.tell(pool, type_, "Refresh", &now.reason, now.message);
    }
}

/// Why a pool is not ready.
pub type Trouble = (PoolReason, String);

pub fn at_aws(error: AwsError) -> Trouble {
    let reason = match error {
        AwsError::Denied { .. } => PoolReason::AwsDenied,
        AwsError::Throttled { .. } | AwsError::Unreachable { .. } => PoolReason::AwsUnavailable,
        AwsError::Refused { .. } => PoolReason::InvalidSpec,
    };
    let hint = error.code().map_or("", hint);
    (reason, if hint.is_empty() { error.to_string() } else { format!("{error}; {hint}") })
}

/// When a pool was last prepared. Another generation of it has a timer of its own, which is due at once.
pub fn prepare_timer(pool: &RunnerPool) -> String {
    let generation = pool.metadata.generation.unwrap_or_default();
    format!("prepare {}/{} {generation}", pool.namespace().unwrap_or_default(), pool.name_any())
}

/// Table, queues and launch template, made or mended; asked for anew when the spec changed or some time has passed.
async fn prepare(
    context: &Context,
    pool: &RunnerPool,
    ec2: &Ec2Pool,
    new: &mut RunnerPoolStatus,
) -> Result<(), Trouble> {
    let (name, namespace) = (pool.name_any(), pool.namespace().unwrap_or_default());
    let key = pool_key(&namespace, &name);
    let cluster = &context.settings.cluster_name;
    if !context.ledger.ensure().await.map_err(at_aws)? {
        return Err((PoolReason::Preparing, "the DynamoDB table is being created".into()));
    }
    let mut queues = Vec::new();
    for class in &ec2.resource_classes {
        let queue = queue_name(cluster, &namespace, &name, &class.name);
        let url = context.queues.ensure(&queue, ec2.lifetimes.idle.into()).await.map_err(at_aws)?;
        queues.push(Queue { resource_class: class.name.clone(), url });
    }
    new.queues = queues;
    context.machines.check(ec2).await.map_err(at_aws)?;
    let config = AgentConfig {
        pre_runner_script: ec2.pre_runner_script.clone().unwrap_or_default(),
        scrub_script: ec2.reuse.scrub_script.clone(),
        runner_version: Some(ec2.runner_version.clone()),
        ..AgentConfig::new(cluster, &key, ec2.lifetimes.created.into())
    };
    let script = user_data(&config, &ec2.agent.url, &ec2.agent.sha256)
        .map_err(|error| (PoolReason::UserDataTooLarge, error.to_string()))?;
    let wanted = template(cluster, &namespace, &name, ec2, BASE64_STANDARD.encode(script));
    new.launch_template = Some(context.machines.ensure_template(&wanted).await.map_err(at_aws)?);
    Ok(())
}

/// A deleted pool waits for its claims, then ends its machines and takes down what it had at AWS.
async fn remove(context: &Arc<Context>, pool: &RunnerPool) -> Result<Action> {
    let (name, namespace) = (pool.name_any(), pool.namespace().unwrap_or_default());
    let key = pool_key(&namespace, &name);
    let ec2 = pool.spec.ec2.as_ref().context("an EC2 pool")?;
    let mut new = pool.status.clone().unwrap_or_default();
    let trouble = match context.ledger.load().await {
        Ok(true) => keep_up(context, pool, ec2, &key, &new.queues).await.err(),
        Ok(false) => Some((PoolReason::Deleting, "the DynamoDB table is being created".into())),
        Err(error) => Some(at_aws(error)),
    };
    let instances = context.ledger.of_pool(&key);
    let live = instances.iter().map(|tracked| &tracked.record).filter(|record| record.state != State::Terminated);
    let holders: HashSet<_> = live.clone().filter(|record| !record.claim.is_empty()).map(|r| &r.claim).collect();
    // A machine that ends before it has left GitHub leaves its runner there.
    let leaving = live.filter(|record| !record.leaving.is_empty()).count();
    let outcome = match (trouble, holders.len(), leaving) {
        (Some(trouble), ..) => Err(trouble),
        (None, 0, 0) => take_down(context, pool, ec2, &key).await.map_err(at_aws),
        (None, 0, leaving) => Err((PoolReason::Deleting, format!("waiting for {leaving} machines to leave GitHub"))),
        (None, claims, _) => {
            let message = format!("waiting for {claims} claims that hold machines to be deleted or to end");
            Err((PoolReason::Deleting, message))
        }
    };
    match outcome {
        Ok(()) => {
            objects::remove_finalizer(&context.client, pool).await?;
            Ok(Action::requeue(STALE))
        }
        Err((reason, message)) => {
            let condition = ready_condition(false, reason, &message, pool.metadata.generation, Timestamp::now());
            set_condition(&mut new.conditions, condition);
            objects::write_status(&context.client, pool, pool.status.as_ref(), &new).await?;
            tracing::info!(pool = key, message, "a deleted pool cannot go yet");
            Ok(Action::requeue(REMOVE))
        }
    }
}

async fn take_down(context: &Context, pool: &RunnerPool, ec2: &Ec2Pool, key: &str) -> Result<(), AwsError> {
    let (name, namespace) = (pool.name_any(), pool.namespace().unwrap_or_default());
    for tracked in context.ledger.of_pool(key) {
        if tracked.record.state != State::Terminated {
            let why = "its pool was deleted";
            context.end_instance(&tracked.record.instance_id, FailureReason::CreationAborted, why).await?;
        }
        registrations::remove_last(context, ec2, &tracked.record).await;
        context.ledger.forget(&tracked.record.instance_id).await?;
    }
    let cluster = &context.settings.cluster_name;
    let described = context.machines.of_pool(cluster, key).await?;
    let left: Vec<_> = described.into_iter().filter(|d| !d.gone).map(|d| d.id).collect();
    context.machines.terminate(&left).await?;
    for queue in pool.status.iter().flat_map(|status| &status.queues) {
        context.queues.remove(&queue.url).await?;
    }
    context.machines.remove_template(&template(cluster, &namespace, &name, ec2, String::new()).name).await
}
