//! The device plugin and a real kubelet: slots that are counted, that come back, and a label that stays.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node as KubeNode, Pod};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use paddock::api::LABEL_BOARD;
use paddock_bed::{
    device_plugin::{DevicePlugin, allocatable},
    kube::{RELEASE, RELEASE_NAMESPACE, client_from},
    node::Node,
};
use serde_json::{Value, json};

use crate::{
    boards::{BOARD, IMAGE, node},
    support::World,
};

/// A resource with one slot that no other test has, and a namespace for its pods.
struct Slot<'a> {
    world: &'a World,
    node: &'static Node,
    namespace: String,
    resource: String,
    plugin: DevicePlugin,
}

impl<'a> Slot<'a> {
    async fn new(world: &'a World) -> Result<Self> {
        let node = node(world).await?;
        let namespace = world.namespace().await?;
        let resource = format!("paddock.test/{namespace}");
        let plugin = DevicePlugin::start(&world.stage.kube, node, BOARD, &resource, 1).await?;
        Ok(Self { world, node, namespace, resource, plugin })
    }

    /// A pod that needs the slot and sleeps in it.
    async fn pod(&self, name: &str) -> Result<()> {
        let container = json!({
            "name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "1000000"],
            "resources": { "limits": { &self.resource: "1" } },
        });
        // With no grace at all the API server forgets the pod before the kubelet does, and offers a slot that is not free.
        let spec = json!({
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
            "nodeSelector": { LABEL_BOARD: BOARD }, "containers": [container],
        });
        let pod = serde_json::from_value(json!({ "metadata": { "name": name }, "spec": spec }))?;
        self.world.api::<Pod>(&self.namespace).create(&PostParams::default(), &pod).await?;
        Ok(())
    }

    async fn until_running(&self, name: &str) -> Result<Pod> {
        let running = |pod: &Pod| phase(pod) == "Running";
        self.world.until(&self.namespace, name, "Running", running).await
    }

    /// Waits until the scheduler has no place for the pod, because of the slot.
    async fn until_waiting(&self, name: &str) -> Result<()> {
        let lacks = format!("Insufficient {}", self.resource);
        let waiting = |pod: &Pod| {
            let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
            let why = conditions.iter().find(|condition| condition.type_ == "PodScheduled");
            phase(pod) == "Pending" && why.and_then(|why| why.message.as_ref()).is_some_and(|why| why.contains(&lacks))
        };
        self.world.until::<Pod>(&self.namespace, name, "waiting for the slot", waiting).await.map(drop)
    }

    /// How often plugins for the resource have registered.
    fn registrations(&self) -> usize {
        let registered = |line: &&str| {
            line.contains("registered with the kubelet") && !line.contains("not registered with the kubelet")
        };
        self.plugin.log().lines().filter(registered).count()
    }

    /// Waits until one more has registered; what the node offers may still be what it offered before.
    async fn until_registered_again(&self, before: usize) -> Result<()> {
        self.world.until_true("the plugin registers again", async || Ok(self.registrations() > before)).await
    }

    async fn until_slots(&self, count: u32) -> Result<()> {
        let nodes = nodes(self.world);
        let what = format!("{} offers {count} of {}", self.node.name(), self.resource);
        let offered = async || Ok(allocatable(&nodes, self.node.name(), &self.resource).await? == count);
        self.world.until_true(&what, offered).await
    }
}

fn nodes(world: &World) -> Api<KubeNode> {
    Api::all(world.stage.kube.client())
}

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

fn container_id(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()?.container_id.as_deref()
}

/// I7: two pods on one slot; the second waits until the first is gone.
pub async fn second_pod_waits_for_the_slot(world: &World) -> Result<()> {
    let slot = Slot::new(world).await?;
    slot.pod("first").await?;
    slot.until_running("first").await?;
    slot.pod("second").await?;
    slot.until_waiting("second").await?;
    world.api::<Pod>(&slot.namespace).delete("first", &DeleteParams::default()).await?;
    slot.until_running("second").await.map(drop)
}

/// A kubelet that restarts knows no plugin and removes its socket: the slots come back, the pod that has one runs on,
/// and still nobody shares it.
pub async fn slots_outlive_a_restart_of_the_kubelet(world: &World) -> Result<()> {
    let slot = Slot::new(world).await?;
    slot.pod("first").await?;
    let before = slot.until_running("first").await?;
    let registrations = slot.registrations();
    slot.node.stop_kubelet().await;
    slot.node.start_kubelet().await?;
    slot.until_registered_again(registrations).await?;
    slot.until_slots(1).await?;
    slot.pod("second").await?;
    slot.until_waiting("second").await?;
    let after = slot.until_running("first").await?;
    ensure!(container_id(&before) == container_id(&after), "it was restarted: {:?}", after.status);
    world.api::<Pod>(&slot.namespace).delete("first", &DeleteParams::default()).await?;
    slot.until_running("second").await.map(drop)
}

/// A plugin that is asked to end takes its socket and its slots along; the pod that has one stays. The next plugin offers
/// the same slots.
pub async fn slots_go_and_come_with_the_plugin(world: &World) -> Result<()> {
    let slot = Slot::new(world).await?;
    slot.pod("first").await?;
    slot.until_running("first").await?;
    let socket = format!("/var/lib/kubelet/device-plugins/paddock-{}.sock", slot.resource.replace('/', "-"));
    ensure!(Path::new(&socket).exists(), "{socket} is the plugin's");
    let registrations = slot.registrations();
    let Slot { plugin, .. } = slot;
    ensure!(plugin.stop().await?.success(), "an orderly end");
    ensure!(!Path::new(&socket).exists(), "{socket} is left");
    let plugin = DevicePlugin::start(&world.stage.kube, slot.node, BOARD, &slot.resource, 1).await?;
    let slot = Slot { plugin, ..slot };
    slot.until_registered_again(registrations).await?;
    slot.until_slots(1).await?;
    slot.until_running("first").await?;
    slot.pod("second").await?;
    slot.until_waiting("second").await
}

/// The node has its board's label, and gets it back.
pub async fn removed_label_comes_back(world: &World) -> Result<()> {
    let slot = Slot::new(world).await?;
    let labelled = async || {
        let node = nodes(world).get(slot.node.name()).await?;
        Ok(node.labels().get(LABEL_BOARD).is_some_and(|board| board == BOARD))
    };
    world.until_true("the node is labelled", labelled).await?;
    for damage in [json!(null), json!("another")] {
        patch_node(world.stage.kube.client(), slot.node.name(), label(LABEL_BOARD, damage)).await?;
        world.until_true("the label is back", labelled).await?;
    }
    Ok(())
}

/// The chart's rights of a plugin reach as far as the label of its own node.
pub async fn plugin_may_label_its_own_node_and_nothing_else(world: &World) -> Result<()> {
    let node = node(world).await?;
    let account = format!("{RELEASE}-device-plugin");
    let kubeconfig = world.stage.kube.kubeconfig_of_pod(RELEASE_NAMESPACE, &account, node.name()).await?;
    let plugin = client_from(&kubeconfig).await?;
    let other = format!("other-{}", world.namespace().await?);
    let object = serde_json::from_value(json!({ "metadata": { "name": other } }))?;
    nodes(world).create(&PostParams::default(), &object).await?;

    patch_node(plugin.clone(), node.name(), label(LABEL_BOARD, json!(BOARD))).await?;
    let taint = json!({ "spec": { "taints": [{ "key": "gone", "effect": "NoExecute" }] } });
    let (own, alone) = (node.name(), "may change the label riseproject.dev/board alone");
    for (name, change, why) in [
        (other.as_str(), label(LABEL_BOARD, json!(BOARD)), "may label its own node alone"),
        (own, label("kubernetes.io/arch", json!("another")), alone),
        (own, label("kubernetes.io/hostname", json!(null)), alone),
        (own, label("example.com/new", json!("one")), alone),
        (own, json!({ "metadata": { "annotations": { "a": "b" } } }), alone),
        (own, json!({ "spec": { "unschedulable": true } }), alone),
        (own, taint, alone),
    ] {
        let refusal = patch_node(plugin.clone(), name, change.clone()).await.err().context(change.to_string())?;
        ensure!(format!("{refusal:#}").contains(why), "{change}: {refusal:#}");
    }
    let deleted = Api::<KubeNode>::all(plugin).delete(own, &DeleteParams::default()).await;
    ensure!(deleted.is_err(), "a plugin could delete its node");
    nodes(world).delete(&other, &DeleteParams::default()).await?;
    Ok(())
}

fn label(key: &str, value: Value) -> Value {
    json!({ "metadata": { "labels": { key: value } } })
}

async fn patch_node(client: Client, name: &str, change: Value) -> Result<()> {
    let nodes: Api<KubeNode> = Api::all(client);
    nodes.patch(name, &PatchParams::default(), &Patch::Merge(change)).await?;
    Ok(())
}
