//! Workers mirror records: one `Worker` object per instance, written only when it changed.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Result;
use futures::{StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Api, Resource, ResourceExt,
    api::{ObjectMeta, Patch, PatchParams},
};
use paddock_record::State;
use tokio_util::sync::CancellationToken;

use super::{
    Context,
    objects::{self, Written},
    reference,
};
use crate::{
    api::{
        Ec2Pool, Ec2Worker, FIELD_MANAGER, Failure, FailureReason, Heartbeat, HeartbeatState, Instance, LABEL_CLAIM,
        LABEL_POOL, RunnerPool, UsageClass, Worker, WorkerCounts, WorkerSpec, WorkerState, WorkerStatus,
    },
    plan::instance::Tracked,
};

/// Workers written at once: they follow behind, and leave the API server to those who wait for it.
const WRITES: usize = 4;
/// How long claims come first, and how long a write waits for them after that.
const YIELD: Duration = Duration::from_secs(3);
const TRICKLE: Duration = Duration::from_millis(50);
/// After a write over a version that is not there any more: the news are on their way.
const STALE: Duration = Duration::from_millis(200);
const RETRY: Duration = Duration::from_secs(5);

pub const fn worker_state(state: State) -> WorkerState {
    match state {
        State::Created => WorkerState::Created,
        State::Running => WorkerState::Running,
        State::Idle => WorkerState::Idle,
        State::Claimed => WorkerState::Claimed,
        State::Terminated => WorkerState::Terminated,
    }
}

pub fn counts(instances: &[Tracked]) -> WorkerCounts {
    let of = |state| instances.iter().filter(|tracked| tracked.record.state == state).count() as u32;
    WorkerCounts {
        created: of(State::Created),
        running: of(State::Running),
        idle: of(State::Idle),
        claimed: of(State::Claimed),
        terminated: of(State::Terminated),
        ..WorkerCounts::default()
    }
}

/// Makes Workers show their instances as these change, until `stop`. Nobody waits for it.
pub async fn run(context: Arc<Context>, stop: CancellationToken) {
    let mut changed = Box::pin(context.ledger.changed_instances().take_until(stop.cancelled_owned()));
    while let Some(ids) = changed.next().await {
        let since = Instant::now();
        while context.ledger.is_claiming() && since.elapsed() < YIELD {
            tokio::time::sleep(STALE).await;
        }
        let shown = stream::iter(ids).for_each_concurrent(WRITES, async |id| {
            show(&context, id).await;
            if context.ledger.is_claiming() {
                tokio::time::sleep(TRICKLE).await;
            }
        });
        shown.await;
    }
}

/// Has those Workers looked at that stand for no instance any more.
pub fn find_strays(context: &Context) {
    let stray = |worker: &Worker| worker.spec.ec2.is_some() && context.ledger.get(&worker.name_any()).is_none();
    for worker in context.stores.workers.store.state_filter(stray) {
        context.ledger.show(&worker.name_any());
    }
}

async fn show(context: &Arc<Context>, id: String) {
    let outcome = match context.ledger.get(&id) {
        Some(tracked) => mirror(context, &tracked).await,
        None => remove(context, &id).await,
    };
    let trouble = match outcome {
        Ok(Written::Yes) => return,
        Ok(Written::Stale) => None,
        Err(error) => Some(error),
    };
    let pause = if trouble.is_some() { RETRY } else { STALE };
    if let Some(error) = trouble {
        tracing::warn!(worker = id, "a Worker cannot be written: {error:#}");
    }
    let context = context.clone();
    tokio::spawn(async move {
        tokio::time::sleep(pause).await;
        context.ledger.show(&id);
    });
}

async fn mirror(context: &Context, tracked: &Tracked) -> Result<Written> {
    let (id, key) = (&tracked.record.instance_id, &tracked.record.pool);
    let pool = key
        .split_once('/')
        .and_then(|(namespace, name)| context.stores.pools.store.get(&reference::<RunnerPool>(namespace, name)));
    // Without its pool an instance is about to end, and so is its Worker.
    let Some(pool) = pool else { return Ok(Written::Yes) };
    let (Some(ec2), namespace) = (&pool.spec.ec2, pool.namespace().unwrap_or_default()) else {
        return Ok(Written::Yes);
    };
    let old = context.stores.workers.store.get(&reference(&namespace, id));
    let new = worker_status(tracked, ec2, old.as_ref().and_then(|worker| worker.status.as_ref()));
    let wanted = worker(&pool, tracked);
    let worker = match old {
        Some(old) if old.labels() == wanted.labels() => (*old).clone(),
        _ => {
            let api: Api<Worker> = Api::namespaced(context.client.clone(), &namespace);
            api.patch(id, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&wanted)).await?
        }
    };
    objects::write_status(&context.client, &worker, worker.status.as_ref(), &new).await
}

async fn remove(context: &Context, id: &str) -> Result<Written> {
    let stray = |worker: &Worker| worker.spec.ec2.is_some() && worker.name_any() == id;
    for worker in context.stores.workers.store.state_filter(stray) {
        objects::delete(&objects::api(&context.client, &*worker), id).await?;
    }
    Ok(Written::Yes)
}

fn worker(pool: &RunnerPool, tracked: &Tracked) -> Worker {
    let id = tracked.record.instance_id.clone();
    let labels = [(LABEL_POOL, pool.name_any()), (LABEL_CLAIM, tracked.record.claim.clone())];
    let labels = labels.into_iter().filter(|(_, value)| !value.is_empty());
    Worker {
        metadata: ObjectMeta {
            name: Some(id.clone()),
            labels: Some(labels.map(|(name, value)| (name.to_owned(), value)).collect()),
            owner_references: pool.controller_owner_ref(&()).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        spec: WorkerSpec { pool: pool.name_any(), ec2: Some(Ec2Worker { instance_id: id }), board: None },
        status: None,
    }
}

fn worker_status(tracked: &Tracked, pool: &Ec2Pool, old: Option<&WorkerStatus>) -> WorkerStatus {
    let record = &tracked.record;
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let ended = record.state == State::Terminated;
    let mut status = WorkerStatus {
        state: Some(worker_state(record.state)),
        state_since: Some(seconds(record.updated_at)),
        claim: some(&record.claim),
        run_id: some(&record.run_id),
        threshold: record.threshold.map(seconds),
        heartbeat: if ended { None } else { heartbeat(tracked, pool, old) },
        runner: None,
        claims_served: record.claims,
        failure: failure(record).map(Box::new),
        ..WorkerStatus::default()
    };
    if matches!(record.state, State::Running | State::Claimed) && !record.run_id.is_empty() {
        status.runner = Some(crate::api::Runner { id: None, name: record.instance_id.clone() });
    }
    status.set_instance(Instance {
        id: record.instance_id.clone(),
        type_: record.instance_type.clone(),
        usage_class: if record.usage_class == UsageClass::Spot.as_str() {
            UsageClass::Spot
        } else {
            UsageClass::OnDemand
        },
        resource_class: record.resource_class.clone(),
        zone: record.zone.clone(),
    });
    status
}

/// A time as Kubernetes keeps it: a finer one would differ from itself once it is read back.
fn seconds(time: Timestamp) -> Time {
    Time(Timestamp::from_second(time.as_second()).unwrap_or(time))
}

/// Why the instance was given up, as its record tells.
fn failure(record: &paddock_record::Instance) -> Option<Failure> {
    let reason: FailureReason = serde_json::from_value(record.failure_reason.clone().into()).ok()?;
    let message = record.failure_message.clone();
    Some(Failure { reason, message, containers: Vec::new(), events: Vec::new(), log_tail: None })
}

/// Whether the agent is alive and since when; a beat alone changes nothing, so a settled system writes nothing.
fn heartbeat(tracked: &Tracked, pool: &Ec2Pool, old: Option<&WorkerStatus>) -> Option<Heartbeat> {
    let beat = tracked.vitals.heartbeat.as_ref()?;
    let fresh = tracked.heartbeat_is_fresh(&pool.timeouts, tracked.read_at);
    let state = if fresh { HeartbeatState::Fresh } else { HeartbeatState::Stale };
    let before = old.and_then(|old| old.heartbeat.as_ref()).filter(|before| before.state == state);
    Some(before.cloned().unwrap_or(Heartbeat { state, since: seconds(beat.updated_at) }))
}
