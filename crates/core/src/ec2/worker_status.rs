//! The Worker of a machine: its record and its agent's report, as `kubectl get workers` shows them.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube_core::{Resource, ResourceExt};
use paddock_record::{Instance, State};

use super::machine::Machine;
use crate::api::{
    Ec2Pool, Ec2Worker, FAILURE_MESSAGE_MAX, Failure, FailureReason, Heartbeat, HeartbeatState, InstanceInfo,
    LABEL_CLAIM, LABEL_POOL, LOG_TAIL_MAX, Runner, RunnerPool, SCOPE_MAX, UsageClass, Worker, WorkerCounts, WorkerSpec,
    WorkerState, WorkerStatus, clip, head,
};

/// A record's state as its Worker shows it.
pub const fn worker_state(state: State) -> WorkerState {
    match state {
        State::Created => WorkerState::Created,
        State::Running => WorkerState::Running,
        State::Idle => WorkerState::Idle,
        State::Claimed => WorkerState::Claimed,
        // The next upkeep terminates a machine whose state is unknown.
        State::Terminated | State::Unknown => WorkerState::Terminated,
    }
}

/// How many machines of a pool are in each state.
pub fn counts(instances: &[Machine]) -> WorkerCounts {
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

/// The Worker of a machine, without its status.
pub fn worker(pool: &RunnerPool, tracked: &Machine) -> Worker {
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

/// `old`: the status that the Worker has.
pub fn status(tracked: &Machine, pool: &Ec2Pool, old: Option<&WorkerStatus>) -> WorkerStatus {
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
        reclaimed: !ended && tracked.is_reclaimed(),
        runner: None,
        claims_served: record.claims,
        scope: some(&head(&record.scope, SCOPE_MAX)),
        failure: failure(record).map(Box::new),
        ..WorkerStatus::default()
    };
    if matches!(record.state, State::Running | State::Claimed) && !record.run_id.is_empty() {
        status.runner = Some(Runner { id: None, name: record.instance_id.clone() });
    }
    status.set_instance(InstanceInfo {
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

/// Truncated to seconds, as Kubernetes stores times, so that it equals what is read back.
fn seconds(time: Timestamp) -> Time {
    Time(Timestamp::from_second(time.as_second()).unwrap_or(time))
}

/// Why the machine was terminated, from its record.
fn failure(record: &Instance) -> Option<Failure> {
    let reason: FailureReason = serde_json::from_value(record.failure_reason.clone().into()).ok()?;
    let message = clip(&record.failure_message, FAILURE_MESSAGE_MAX);
    let log_tail = (!record.failure_log.is_empty()).then(|| clip(&record.failure_log, LOG_TAIL_MAX));
    Some(Failure { reason, message, containers: Vec::new(), events: Vec::new(), log_tail })
}

/// Whether the agent is alive and since when; a beat alone changes nothing, so that it causes no write.
fn heartbeat(tracked: &Machine, pool: &Ec2Pool, old: Option<&WorkerStatus>) -> Option<Heartbeat> {
    let beat = tracked.report.heartbeat.as_ref()?;
    let fresh = tracked.heartbeat_is_fresh(&pool.timeouts);
    let state = if fresh { HeartbeatState::Fresh } else { HeartbeatState::Stale };
    let before = old.and_then(|old| old.heartbeat.as_ref()).filter(|before| before.state == state);
    Some(before.cloned().unwrap_or(Heartbeat { state, since: seconds(beat.updated_at) }))
}
