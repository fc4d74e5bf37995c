//! A worker's pod, and the Secret that carries its JIT config there.

use std::collections::BTreeMap;

use k8s_openapi::{
    ByteString, Metadata,
    api::core::v1::{
        Container, EnvVar, EnvVarSource, Pod, PodSpec, ResourceRequirements, Secret, SecretKeySelector, SecurityContext,
    },
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{ObjectMeta, OwnerReference},
    },
};

use super::worker;
use crate::api::{APP, BoardPool, GROUP, LABEL_APP, LABEL_BOARD, VERSION, Worker};

/// The Secret's one key.
pub const JIT_CONFIG: &str = "jitconfig";
/// Annotation of the Secret: the uid of the worker that it was made for, also after its pod has become its owner.
const WORKER_UID_ANNOTATION: &str = "paddock.dev/worker-uid";
/// Annotation of pod and Secret: the runner's id at GitHub.
const RUNNER_ID_ANNOTATION: &str = "paddock.dev/runner-id";
const CONTAINER_NAME: &str = "runner";

/// The pod has its worker's name and reads the JIT config from the Secret of that name: its spec does not contain it.
pub fn pod(worker: &Worker, pool: &BoardPool, runner_id: Option<i64>) -> Pod {
    let name = worker.metadata.name.clone().unwrap_or_default();
    let mut labels = labels(worker);
    labels.insert(LABEL_APP.into(), APP.into());
    labels.insert(LABEL_BOARD.into(), pool.board.clone());
    let mut node_selector = pool.node_selector.clone();
    node_selector.insert(LABEL_BOARD.into(), pool.board.clone());

    let mut limits = BTreeMap::from([(pool.resource_name.clone(), Quantity("1".into()))]);
    let mut requests = limits.clone();
    if let Some(storage) = &pool.ephemeral_storage {
        limits.insert("ephemeral-storage".into(), storage.limit.clone());
        requests.insert("ephemeral-storage".into(), storage.request.clone());
    }
    let jit_config = EnvVarSource {
        secret_key_ref: Some(SecretKeySelector { name: name.clone(), key: JIT_CONFIG.into(), optional: Some(false) }),
        ..EnvVarSource::default()
    };
    let container = Container {
        name: CONTAINER_NAME.into(),
        image: Some(pool.image.clone()),
        env: Some(vec![
            EnvVar { name: "RUNNER_JITCONFIG".into(), value_from: Some(jit_config), ..EnvVar::default() },
            EnvVar { name: "RUNNER_WAIT_FOR_DOCKER_IN_SECONDS".into(), value: Some("60".into()), ..EnvVar::default() },
        ]),
        resources: Some(ResourceRequirements {
            limits: Some(limits),
            requests: Some(requests),
            ..ResourceRequirements::default()
        }),
        security_context: pool
            .privileged
            .then(|| SecurityContext { privileged: Some(true), ..SecurityContext::default() }),
        ..Container::default()
    };
    Pod {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: worker.metadata.namespace.clone(),
            labels: Some(labels),
            annotations: runner_id.map(annotations),
            owner_references: Some(vec![owned_by_worker(worker)]),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            containers: vec![container],
            node_selector: Some(node_selector),
            host_network: pool.host_network.then_some(true),
            restart_policy: Some("Never".into()),
            active_deadline_seconds: Some(i64::try_from(pool.active_deadline.as_secs()).unwrap_or(i64::MAX)),
            // Jobs are untrusted code: they get no API server token.
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            ..PodSpec::default()
        }),
        status: None,
    }
}

fn labels(worker: &Worker) -> BTreeMap<String, String> {
    worker.spec.board.as_ref().map(|board| worker::labels(&worker.spec.pool, board)).unwrap_or_default()
}

/// The Secret, created before the pod; its worker owns it until [`adoption`].
pub fn secret(worker: &Worker, jit_config: &str, runner_id: i64) -> Secret {
    Secret {
        metadata: ObjectMeta {
            name: worker.metadata.name.clone(),
            namespace: worker.metadata.namespace.clone(),
            labels: Some(labels(worker)),
            annotations: Some(secret_annotations(worker, runner_id)),
            owner_references: Some(vec![owned_by_worker(worker)]),
            ..ObjectMeta::default()
        },
        data: Some([(JIT_CONFIG.to_owned(), ByteString(jit_config.as_bytes().to_vec()))].into()),
        type_: Some("paddock.dev/jit-config".into()),
        ..Secret::default()
    }
}

fn secret_annotations(worker: &Worker, runner_id: i64) -> BTreeMap<String, String> {
    let uid = worker.metadata.uid.clone().unwrap_or_default();
    annotations(runner_id).into_iter().chain([(WORKER_UID_ANNOTATION.to_owned(), uid)]).collect()
}

fn annotations(runner_id: i64) -> BTreeMap<String, String> {
    [(RUNNER_ID_ANNOTATION.to_owned(), runner_id.to_string())].into()
}

/// The runner's id at GitHub, from the annotation of its pod or Secret.
pub fn runner_id<K: Metadata<Ty = ObjectMeta>>(object: &K) -> Option<i64> {
    object.metadata().annotations.as_ref()?.get(RUNNER_ID_ANNOTATION)?.parse().ok()
}

/// The reference that makes the pod the only owner of its Secret, so that the config never outlives the pod.
pub fn adoption(pod: &Pod) -> OwnerReference {
    OwnerReference {
        api_version: "v1".into(),
        kind: "Pod".into(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        uid: pod.metadata.uid.clone().unwrap_or_default(),
        ..OwnerReference::default()
    }
}

/// The uid of the pod that owns the Secret, if one does.
pub fn adopted_by(secret: &Secret) -> Option<&str> {
    let owners = secret.metadata.owner_references.as_deref().unwrap_or_default();
    owners.iter().find(|owner| owner.kind == "Pod").map(|owner| owner.uid.as_str())
}

/// The uid of the worker that the pod was made for.
pub fn worker_uid(pod: &Pod) -> Option<&str> {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    owners.iter().find(|owner| owner.kind == "Worker").map(|owner| owner.uid.as_str())
}

/// Whether the pod was made for this worker, not for an earlier one of its name.
pub fn is_pod_of(pod: &Pod, worker: &Worker) -> bool {
    worker.metadata.uid.is_some() && worker_uid(pod) == worker.metadata.uid.as_deref()
}

/// The same for a Secret.
pub fn is_secret_of(secret: &Secret, worker: &Worker) -> bool {
    let uid = secret.metadata.annotations.as_ref().and_then(|annotations| annotations.get(WORKER_UID_ANNOTATION));
    uid.is_some() && uid == worker.metadata.uid.as_ref()
}

fn owned_by_worker(worker: &Worker) -> OwnerReference {
    OwnerReference {
        api_version: format!("{GROUP}/{VERSION}"),
        kind: "Worker".into(),
        name: worker.metadata.name.clone().unwrap_or_default(),
        uid: worker.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixtures::boards::{board, board_pool, board_worker, with};

    #[test]
    fn the_pod_is_the_documented_one() {
        let pool = with(
            &board_pool("p"),
            json!({"spec": {"board": {
                "hostNetwork": true, "privileged": true, "nodeSelector": {"kubernetes.io/arch": "riscv64"},
                "ephemeralStorage": {"request": "40Gi", "limit": "90Gi"},
            }}}),
        );
        let worker = board_worker("w", "p", "c");
        assert_eq!(
            json!(pod(&worker, board(&pool), Some(7))),
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {
                    "name": "w", "namespace": "default", "annotations": {"paddock.dev/runner-id": "7"},
                    "labels": {
                        "app": "rise-riscv-runner", "riseproject.dev/board": "b",
                        "paddock.dev/pool": "p", "paddock.dev/claim": "c", "paddock.dev/entity": "1",
                    },
                    "ownerReferences": [{
                        "apiVersion": "paddock.dev/v1alpha1", "kind": "Worker", "name": "w", "uid": "worker-w", "controller": true,
                    }],
                },
                "spec": {
                    "activeDeadlineSeconds": 525_600,
                    "automountServiceAccountToken": false,
                    "enableServiceLinks": false,
                    "hostNetwork": true,
                    "nodeSelector": {"kubernetes.io/arch": "riscv64", "riseproject.dev/board": "b"},
                    "restartPolicy": "Never",
                    "containers": [{
                        "name": "runner", "image": "runner:1",
                        "env": [
                            {"name": "RUNNER_JITCONFIG", "valueFrom": {"secretKeyRef": {"name": "w", "key": "jitconfig", "optional": false}}},
                            {"name": "RUNNER_WAIT_FOR_DOCKER_IN_SECONDS", "value": "60"},
                        ],
                        "resources": {
                            "limits": {"riseproject.com/runner": "1", "ephemeral-storage": "90Gi"},
                            "requests": {"riseproject.com/runner": "1", "ephemeral-storage": "40Gi"},
                        },
                        "securityContext": {"privileged": true},
                    }],
                },
            })
        );
    }

    #[test]
    fn a_plain_pool_asks_for_nothing_special() {
        let spec = pod(&board_worker("w", "p", "c"), board(&board_pool("p")), None).spec.unwrap();
        assert_eq!((spec.host_network, &spec.containers[0].security_context), (None, &None));
        let limits = spec.containers[0].resources.clone().unwrap().limits.unwrap();
        assert_eq!(limits.keys().collect::<Vec<_>>(), ["riseproject.com/runner"]);
    }

    #[test]
    fn the_secret_belongs_to_the_worker_until_the_pod_adopts_it() {
        let worker = board_worker("w", "p", "c");
        let mut secret = secret(&worker, "canary", 7);
        assert_eq!(adopted_by(&secret), None);
        assert_eq!(runner_id(&secret), Some(7));
        let pod = with(&pod(&worker, board(&board_pool("p")), Some(7)), json!({"metadata": {"uid": "u"}}));
        secret.metadata.owner_references = Some(vec![adoption(&pod)]);
        assert_eq!(adopted_by(&secret), Some("u"));
        assert!(!json!(pod).to_string().contains("canary"));
    }

    #[test]
    fn a_worker_made_again_under_its_name_does_not_inherit_pod_and_secret() {
        let worker = board_worker("w", "p", "c");
        let again = with(&worker, json!({"metadata": {"uid": "another"}}));
        let pod = with(&pod(&worker, board(&board_pool("p")), Some(7)), json!({"metadata": {"uid": "u"}}));
        let mut secret = secret(&worker, "canary", 7);
        secret.metadata.owner_references = Some(vec![adoption(&pod)]);
        assert!(is_pod_of(&pod, &worker) && is_secret_of(&secret, &worker));
        assert!(!is_pod_of(&pod, &again) && !is_secret_of(&secret, &again));
        let unborn = with(&worker, json!({"metadata": {"uid": null}}));
        assert!(!is_pod_of(&with(&pod, json!({"metadata": {"ownerReferences": null}})), &unborn));
    }
}
