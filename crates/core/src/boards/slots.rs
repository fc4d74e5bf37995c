//! How many slots the boards have, and how many are free.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::{
    api::core::v1::{Node, Pod},
    apimachinery::pkg::api::resource::Quantity,
};

use super::pod::worker_uid;
use crate::{
    api::{BoardPool, LABEL_BOARD, LABEL_POOL, Worker},
    names::PoolKey,
};

/// The slots of every board pool. Pools that share a node share its slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    pools: BTreeMap<PoolKey, PoolSlots>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct PoolSlots {
    total: i64,
    /// Slots that no pod bound to a node holds.
    unbound: i64,
    /// Slots that are reserved and not bound to a node: for unscheduled pods and for workers without a pod.
    reserved: i64,
    /// Pools that share a node with this one, itself included: a reservation of any of them may take a slot there.
    rivals: Vec<PoolKey>,
}

impl Capacity {
    /// `pods` are the runner pods, `workers` those of the board pools. A worker whose pod is known counts by its pod
    /// alone.
    pub fn count<'a>(
        pools: impl IntoIterator<Item = (PoolKey, &'a BoardPool)>,
        nodes: &[Arc<Node>],
        pods: &[Arc<Pod>],
        workers: &[Arc<Worker>],
    ) -> Self {
        let pools: Vec<_> = pools.into_iter().collect();
        let mut capacity = Self { pools: pools.iter().map(|(key, _)| (key.clone(), PoolSlots::default())).collect() };
        let mut bound: BTreeMap<&str, Vec<&Pod>> = BTreeMap::new();
        let mut with_pod = BTreeSet::new();
        for pod in pods {
            with_pod.extend(worker_uid(pod));
            if has_ended(pod) {
                continue;
            }
            match pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) {
                Some(node) => bound.entry(node).or_default().push(pod),
                None => {
                    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
                    let pool = pod.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_POOL)).cloned();
                    capacity.take(&PoolKey::new(namespace, pool.unwrap_or_default()));
                }
            }
        }
        for worker in workers {
            let has_pod = worker.metadata.uid.as_deref().is_some_and(|uid| with_pod.contains(uid));
            if is_active(worker) && !has_pod {
                let namespace = worker.metadata.namespace.clone().unwrap_or_default();
                capacity.take(&PoolKey::new(namespace, worker.spec.pool.clone()));
            }
        }
        let mut rivals: BTreeSet<(&PoolKey, &PoolKey)> = pools.iter().map(|(key, _)| (key, key)).collect();
        for node in nodes.iter().filter(|node| is_usable(node)) {
            let here: Vec<_> = pools.iter().filter(|(_, pool)| carries(node, pool)).collect();
            let pods = node.metadata.name.as_deref().and_then(|name| bound.get(name)).map_or(&[][..], Vec::as_slice);
            for (key, pool) in &here {
                let resource = &pool.resource_name;
                let all = allocatable(node, resource);
                let held: i64 = pods.iter().map(|pod| requested(pod, resource)).sum();
                let slots = capacity.pools.entry(key.clone()).or_default();
                slots.total += all;
                slots.unbound += (all - held).max(0);
                let same = here.iter().filter(|(_, other)| other.resource_name == *resource);
                rivals.extend(same.map(|(other, _)| (key, other)));
            }
        }
        for (key, rival) in rivals {
            capacity.pools.entry(key.clone()).or_default().rivals.push(rival.clone());
        }
        capacity
    }

    /// Reserves one slot of the pool.
    pub fn take(&mut self, pool: &PoolKey) {
        if let Some(slots) = self.pools.get_mut(pool) {
            slots.reserved += 1;
        }
    }

    pub fn total(&self, pool: &PoolKey) -> u32 {
        self.pools.get(pool).map_or(0, |slots| clamp(slots.total))
    }

    /// Slots that the pool can still use.
    pub fn free(&self, pool: &PoolKey) -> u32 {
        let Some(slots) = self.pools.get(pool) else { return 0 };
        let reserved = slots.rivals.iter().filter_map(|rival| self.pools.get(rival)).map(|rival| rival.reserved);
        clamp(slots.unbound - reserved.sum::<i64>())
    }
}

/// A pod holds its slot from its creation until it has ended, also while it is being deleted.
pub fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether no container of the pod runs yet.
pub fn is_pending(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).is_none_or(|phase| phase == "Pending")
}

fn clamp(count: i64) -> u32 {
    u32::try_from(count.max(0)).unwrap_or(u32::MAX)
}

/// Whether a worker has not ended.
pub fn is_active(worker: &Worker) -> bool {
    !worker.status.as_ref().and_then(|status| status.state).is_some_and(|state| state.is_over())
}

/// Ready, schedulable, and without a taint, because runner pods tolerate none, such as
/// `node.kubernetes.io/unreachable`.
fn is_usable(node: &Node) -> bool {
    let spec = node.spec.as_ref();
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let taints = spec.and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
        && !spec.and_then(|spec| spec.unschedulable).unwrap_or(false)
        && !taints.iter().any(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute"))
        && node.metadata.deletion_timestamp.is_none()
}

fn carries(node: &Node, pool: &BoardPool) -> bool {
    let has = |key: &str, value: &str| {
        node.metadata.labels.as_ref().and_then(|labels| labels.get(key)).is_some_and(|found| found == value)
    };
    has(LABEL_BOARD, &pool.board) && pool.node_selector.iter().all(|(key, value)| has(key, value))
}

fn allocatable(node: &Node, resource: &str) -> i64 {
    let all = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    all.and_then(|all| all.get(resource)).map_or(0, whole)
}

fn requested(pod: &Pod, resource: &str) -> i64 {
    let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let limits = containers.iter().filter_map(|container| container.resources.as_ref()?.limits.as_ref()?.get(resource));
    limits.map(whole).sum()
}

/// Extended resources are whole numbers, possibly with a suffix such as `2k`.
fn whole(quantity: &Quantity) -> i64 {
    let text = quantity.0.as_str();
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let factor = match &text[digits.len()..] {
        "k" => 1000,
        "M" => 1_000_000,
        "" => 1,
        _ => 0,
    };
    digits.parse::<i64>().unwrap_or(0).saturating_mul(factor)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        api::RunnerPool,
        fixtures::boards::{board, board_pool, board_worker, node, pod, with},
    };

    fn key(name: &str) -> PoolKey {
        PoolKey::new("default", name)
    }

    fn count(pools: &[RunnerPool], nodes: Vec<Node>, pods: Vec<Pod>, workers: Vec<Worker>) -> Capacity {
        let pools = pools.iter().map(|pool| (key(pool.metadata.name.as_ref().unwrap()), board(pool)));
        let (nodes, pods): (Vec<_>, Vec<_>) = (arcs(nodes), arcs(pods));
        Capacity::count(pools, &nodes, &pods, &arcs(workers))
    }

    fn arcs<K>(objects: Vec<K>) -> Vec<Arc<K>> {
        objects.into_iter().map(Arc::new).collect()
    }

    #[test]
    fn only_ready_schedulable_reachable_nodes_with_the_board_and_selector_count() {
        let pool = with(&board_pool("p"), json!({"spec": {"board": {"nodeSelector": {"rack": "1"}}}}));
        let good = with(&node("good", 4), json!({"metadata": {"labels": {"rack": "1"}}}));
        let taint =
            |effect: &str| json!({"spec": {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": effect}]}});
        let nodes = vec![
            good.clone(),
            with(&good, json!({"metadata": {"name": "other-rack", "labels": {"rack": "2"}}})),
            with(&good, json!({"metadata": {"name": "other-board", "labels": {LABEL_BOARD: "other"}}})),
            with(&good, json!({"metadata": {"name": "cordoned"}, "spec": {"unschedulable": true}})),
            with(&with(&good, json!({"metadata": {"name": "unreachable"}})), taint("NoExecute")),
            with(&with(&good, json!({"metadata": {"name": "kept-free"}})), taint("NoSchedule")),
            with(
                &good,
                json!({"metadata": {"name": "down"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}),
            ),
        ];
        assert_eq!(count(std::slice::from_ref(&pool), nodes.clone(), vec![], vec![]).total(&key("p")), 4);
        let soft = with(&with(&good, json!({"metadata": {"name": "soft"}})), taint("PreferNoSchedule"));
        let nodes = nodes.into_iter().chain([soft]).collect();
        assert_eq!(count(&[pool], nodes, vec![], vec![]).total(&key("p")), 8);
    }

    #[test]
    fn a_pod_holds_a_slot_until_it_has_ended_and_a_worker_until_its_pod_is_known() {
        let pools = [board_pool("p")];
        let going = with(
            &pod("d", "p", Some("n"), "Running"),
            json!({"metadata": {"deletionTimestamp": "2025-01-01T00:00:00Z"}}),
        );
        let pods = vec![
            pod("a", "p", Some("n"), "Running"),
            pod("b", "p", None, "Pending"),
            pod("c", "p", Some("n"), "Succeeded"),
            going,
        ];
        let workers = vec![board_worker("a", "p", "c"), board_worker("just-made", "p", "c")];
        let failed = with(&board_worker("x", "p", "c"), json!({"status": {"state": "failed"}}));
        // Made again while the pod of its predecessor ends.
        let again = with(&board_worker("d", "p", "c"), json!({"metadata": {"uid": "another"}}));
        let workers = workers.into_iter().chain([failed, again]).collect();
        let capacity = count(&pools, vec![node("n", 8)], pods, workers);
        assert_eq!((capacity.total(&key("p")), capacity.free(&key("p"))), (8, 8 - 5));
    }

    #[test]
    fn pools_that_share_a_node_share_its_slots_and_others_do_not() {
        let other = with(&board_pool("other"), json!({"spec": {"board": {"board": "b2"}}}));
        let pools = [board_pool("p"), board_pool("q"), other];
        let apart = with(&node("m", 2), json!({"metadata": {"labels": {LABEL_BOARD: "b2"}}}));
        let workers = vec![board_worker("w", "q", "c"), board_worker("v", "other", "c")];
        let capacity = count(&pools, vec![node("n", 3), apart], vec![pod("a", "q", Some("n"), "Running")], workers);
        assert_eq!(["p", "q", "other"].map(|pool| capacity.free(&key(pool))), [1, 1, 1]);
    }

    #[test]
    fn a_board_whose_capacity_drops_below_its_use_has_none_free() {
        let pods = vec![pod("a", "p", Some("n"), "Running"), pod("b", "p", Some("n"), "Running")];
        let nodes = vec![node("n", 1), node("m", 1)];
        let capacity = count(&[board_pool("p")], nodes, pods, vec![]);
        assert_eq!(capacity.free(&key("p")), 1, "an overfull node takes nothing from its neighbour");
        assert_eq!(capacity.free(&key("gone")), 0);
    }

    #[test]
    fn quantities_of_extended_resources_are_whole() {
        for (text, expected) in [("4", 4), ("0", 0), ("2k", 2000), ("-1", -1), ("1500m", 0), ("x", 0)] {
            assert_eq!(whole(&Quantity(text.into())), expected, "{text}");
        }
    }
}
