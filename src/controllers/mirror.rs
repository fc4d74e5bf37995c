//! Workers mirror records: one `Worker` object per instance, written only when it changed.

use std::collections::HashSet;

use anyhow::Result;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Api, Resource, ResourceExt,
    api::{ObjectMeta, Patch, PatchParams},
};
use paddock_record::State;

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

/// Makes the Workers of a pool show its instances, and removes those that stand for none. Stale: some were seen as they
/// are not any more, and have to be looked at again.
pub async fn mirror(context: &Context, pool: &RunnerPool, ec2: &Ec2Pool, instances: &[Tracked]) -> Result<Written> {
    let (name, namespace) = (pool.name_any(), pool.namespace().unwrap_or_default());
    let api: Api<Worker> = Api::namespaced(context.client.clone(), &namespace);
    let mut all = Written::Yes;
    for tracked in instances {
        let id = &tracked.record.instance_id;
        let old = context.stores.workers.store.get(&reference(&namespace, id));
        let old_status = old.as_ref().and_then(|worker| worker.status.as_ref());
        let new = worker_status(tracked, ec2, old_status);
        let wanted = worker(pool, tracked);
        let worker = match old {
            Some(old) if old.labels() == wanted.labels() => (*old).clone(),
            _ => api.patch(id, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&wanted)).await?,
        };
        if objects::write_status(&context.client, &worker, worker.status.as_ref(), &new).await? == Written::Stale {
            all = Written::Stale;
        }
    }
    let there: HashSet<_> = instances.iter().map(|tracked| tracked.record.instance_id.as_str()).collect();
    let strays = context.stores.workers.store.state_filter(|worker| {
        worker.spec.ec2.is_some()
            && worker.spec.pool == name
            && worker.namespace().as_deref() == Some(&namespace)
            && !there.contains(worker.name_any().as_str())
    });
    for stray in strays {
        objects::delete(&api, &stray.name_any()).await?;
    }
    Ok(all)
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
        failure: failure(record),
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
