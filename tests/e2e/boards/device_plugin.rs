//! The device plugin with a real kubelet: slots that are counted and restored, and the label of the board.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node as KubeNode, Pod};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use paddock::api::LABEL_BOARD;
use paddock_bed::{
    device_plugin::DevicePlugin,
    kube::{RELEASE, RELEASE_NAMESPACE, client_from},
};
use serde_json::{Value, json};

use crate::fixture::{
    board_pool::{BOARD, node},
    slot::{Slot, nodes},
    world::World,
};

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

/// A kubelet that restarts forgets the plugin and removes its socket: the slots come back, the pod that has one
/// continues, and no other pod gets it.
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
    ensure!(container_id(&before) == container_id(&after), "the container was restarted: {:?}", after.status);
    world.api::<Pod>(&slot.namespace).delete("first", &DeleteParams::default()).await?;
    slot.until_running("second").await.map(drop)
}

/// A plugin that stops removes its socket and its slots; the pod that has one continues. The next plugin advertises the
/// same slots.
pub async fn slots_disappear_and_return_with_the_plugin(world: &World) -> Result<()> {
    let slot = Slot::new(world).await?;
    slot.pod("first").await?;
    slot.until_running("first").await?;
    let socket = format!("/var/lib/kubelet/device-plugins/paddock-{}.sock", slot.resource.replace('/', "-"));
    ensure!(Path::new(&socket).exists(), "the plugin has the socket {socket}");
    let registrations = slot.registrations();
    let Slot { plugin, .. } = slot;
    ensure!(plugin.stop().await?.success(), "the plugin stopped in order");
    ensure!(!Path::new(&socket).exists(), "{socket} was not removed");
    let plugin = DevicePlugin::start(&world.stage.kube, slot.node, BOARD, &slot.resource, 1).await?;
    let slot = Slot { plugin, ..slot };
    slot.until_registered_again(registrations).await?;
    slot.until_slots(1).await?;
    slot.until_running("first").await?;
    slot.pod("second").await?;
    slot.until_waiting("second").await
}

/// The plugin labels its node, and restores the label when it is removed or changed.
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

/// With the chart's permissions a plugin can change the label of its own node, and nothing else.
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
