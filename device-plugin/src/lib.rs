//! `paddock device-plugin`: advertises the runner slots of a board to its kubelet.

/// The kubelet's interface for device plugins, as the kubelet itself describes it.
#[allow(clippy::all)]
pub mod v1beta1 {
    tonic::include_proto!("v1beta1");
}
