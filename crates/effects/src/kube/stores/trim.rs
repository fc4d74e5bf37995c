//! Trims cached objects to the fields that are read, and detects finished objects.

use std::mem::take;

use k8s_openapi::api::core::v1::{Container, Node, NodeStatus, Pod, PodSpec, PodStatus};
use kube::{Resource, ResourceExt};
use paddock_core::api::{ClaimPhase, RunnerClaim, Worker, WorkerState};

/// Drops the copy of the object that `kubectl apply` stores as an annotation.
pub fn drop_last_applied<K: Resource>(object: &mut K) {
    object.annotations_mut().remove("kubectl.kubernetes.io/last-applied-configuration");
}

/// Labels are only for users; the controllers read the spec.
pub fn trim_claim(claim: &mut RunnerClaim) {
    drop_last_applied(claim);
    claim.metadata.labels = None;
}

/// Trims board workers only: the labels of EC2 workers are compared with the desired ones. A finished worker keeps what
/// pages show and claims count, because its status is not written again.
pub fn trim_worker(worker: &mut Worker) {
    if worker.spec.board.is_none() {
        return;
    }
    worker.metadata.labels = None;
    let is_over = is_worker_over(worker);
    if let Some(status) = worker.status.as_mut().filter(|_| is_over) {
        (status.pod, status.runner, status.conditions) = (None, None, Vec::new());
    }
}

pub fn is_claim_over(claim: &RunnerClaim) -> bool {
    let phase = claim.status.as_ref().and_then(|status| status.phase);
    phase.is_some_and(ClaimPhase::is_over) && claim.metadata.deletion_timestamp.is_none()
}

/// A worker with a finalizer may still have a runner.
pub fn is_worker_over(worker: &Worker) -> bool {
    let state = worker.status.as_ref().and_then(|status| status.state);
    state.is_some_and(WorkerState::is_over) && worker.finalizers().is_empty()
}

/// Keeps a pod's metadata, node, deadline, resources and status; of a succeeded one only the phase and start time.
pub fn trim_pod(pod: &mut Pod) {
    if let Some(status) = pod.status.as_mut().filter(|status| status.phase.as_deref() == Some("Succeeded")) {
        let (phase, start_time) = (take(&mut status.phase), take(&mut status.start_time));
        *status = PodStatus { phase, start_time, ..PodStatus::default() };
        pod.spec.iter_mut().for_each(|spec| spec.containers.clear());
    }
    if let Some(spec) = &mut pod.spec {
        let trim = |container: Container| Container {
            name: container.name,
            resources: container.resources,
            ..Container::default()
        };
        *spec = PodSpec {
            node_name: take(&mut spec.node_name),
            active_deadline_seconds: spec.active_deadline_seconds,
            containers: take(&mut spec.containers).into_iter().map(trim).collect(),
            ..PodSpec::default()
        };
    }
}

/// Keeps what scheduling needs; drops images, addresses and volumes.
pub fn trim_node(node: &mut Node) {
    node.annotations_mut().clear();
    if let Some(status) = &mut node.status {
        let (allocatable, conditions) = (take(&mut status.allocatable), take(&mut status.conditions));
        let ready = conditions.map(|all| all.into_iter().filter(|condition| condition.type_ == "Ready").collect());
        *status = NodeStatus { allocatable, conditions: ready, ..NodeStatus::default() };
    }
}

#[cfg(test)]
mod tests {
    use paddock_core::fixtures::boards;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_trimmed_pod_keeps_what_plans_read() {
        let mut pod: Pod = serde_json::from_value(json!({
            "metadata": { "name": "a", "annotations": { "a": "b" } },
            "spec": {
                "nodeName": "n", "activeDeadlineSeconds": 1, "volumes": [{ "name": "v" }],
                "containers": [{ "name": "c", "image": "i", "resources": { "limits": { "x/y": "1" } } }],
            },
            "status": { "phase": "Running", "reason": "r" },
        }))
        .unwrap();
        let whole = pod.clone();
        trim_pod(&mut pod);
        let expected = json!({
            "nodeName": "n", "activeDeadlineSeconds": 1,
            "containers": [{ "name": "c", "resources": { "limits": { "x/y": "1" } } }],
        });
        assert_eq!(json!(pod.spec), expected);
        assert_eq!((&pod.metadata, &pod.status), (&whole.metadata, &whole.status));
        pod.status.as_mut().unwrap().phase = Some("Succeeded".into());
        trim_pod(&mut pod);
        assert_eq!(
            json!([pod.spec, pod.status]),
            json!([
                { "nodeName": "n", "activeDeadlineSeconds": 1, "containers": [] }, { "phase": "Succeeded" },
            ])
        );
    }

    #[test]
    fn a_trimmed_worker_keeps_what_plans_read() {
        let mut worker = boards::board_worker("w", "p", "c");
        let (running, over) = (
            json!({ "state": "running", "claimsServed": 0, "pod": { "name": "w" }, "runner": { "name": "w" } }),
            json!({ "state": "completed", "claimsServed": 0 }),
        );
        worker.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
        worker.status = serde_json::from_value(running.clone()).unwrap();
        trim_worker(&mut worker);
        assert_eq!((&worker.metadata.labels, json!(worker.status)), (&None, running));
        worker.status.as_mut().unwrap().state = Some(WorkerState::Completed);
        let spec = worker.spec.clone();
        trim_worker(&mut worker);
        assert!(json!(worker.status)["pod"].is_object(), "its runner may still be there");
        worker.metadata.finalizers = None;
        trim_worker(&mut worker);
        assert_eq!((worker.spec, json!(worker.status)), (spec, over));
    }

    #[test]
    fn a_trimmed_node_keeps_what_plans_read() {
        let mut node: Node = serde_json::from_value(json!({
            "metadata": { "name": "n", "labels": { "l": "v" }, "annotations": { "a": "b" } },
            "spec": { "unschedulable": true, "taints": [{ "key": "k", "effect": "NoSchedule" }] },
            "status": {
                "allocatable": { "x/y": "1" }, "capacity": { "x/y": "1" }, "images": [{ "names": ["i"] }],
                "conditions": [{ "type": "Ready", "status": "True" }, { "type": "DiskPressure", "status": "False" }],
            },
        }))
        .unwrap();
        let whole = node.clone();
        trim_node(&mut node);
        let expected = json!({ "allocatable": { "x/y": "1" }, "conditions": [{ "type": "Ready", "status": "True" }] });
        assert_eq!(json!(node.status), expected);
        assert_eq!((&node.spec, &node.metadata.labels), (&whole.spec, &whole.metadata.labels));
    }
}
