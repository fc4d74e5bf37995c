//! The device plugin service that the kubelet calls.

use std::{collections::BTreeSet, sync::Arc};

use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::v1beta1::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions, Empty,
    ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, device_plugin_server::DevicePlugin,
};

/// The kubelet's spelling. A slot is only a counter, so it is always healthy.
const HEALTHY: &str = "Healthy";

/// The slots of a board. A slot adds nothing to a container: the pool defines the runner pod.
pub struct Slots {
    ids: BTreeSet<String>,
    /// The number of open `ListAndWatch` streams; `None` before the first.
    listeners: Arc<watch::Sender<Option<usize>>>,
    end: CancellationToken,
}

impl Slots {
    pub fn new(count: u32, listeners: watch::Sender<Option<usize>>, end: CancellationToken) -> Self {
        // The ids are stable across restarts: the kubelet remembers which pod has which slot.
        let ids = (0..count).map(|index| format!("slot-{index}")).collect();
        Self { ids, listeners: Arc::new(listeners), end }
    }
}

#[tonic::async_trait]
impl DevicePlugin for Slots {
    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(&self, _: Request<Empty>) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    /// Sends all slots and keeps the stream open until the kubelet or the plugin ends it. When the stream ends, the
    /// kubelet drops the slots.
    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |id: &String| Device { id: id.clone(), health: HEALTHY.into(), topology: None };
        let all = ListAndWatchResponse { devices: self.ids.iter().map(device).collect() };
        let (sender, receiver) = mpsc::channel(1);
        sender.try_send(Ok(all)).map_err(|error| Status::internal(error.to_string()))?;
        let (listeners, end) = (self.listeners.clone(), self.end.clone());
        listeners.send_modify(|open| *open = Some(open.unwrap_or(0) + 1));
        tokio::spawn(async move {
            tokio::select! {
                () = sender.closed() => {}
                () = end.cancelled() => {}
            }
            listeners.send_modify(|open| *open = open.map(|open| open.saturating_sub(1)));
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn allocate(&self, request: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests;
        if let Some(id) =
            containers.iter().flat_map(|container| &container.devices_ids).find(|id| !self.ids.contains(*id))
        {
            return Err(Status::not_found(format!("there is no slot {id}")));
        }
        let container_responses = containers.iter().map(|_| ContainerAllocateResponse::default()).collect();
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("one slot is as good as another"))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Err(Status::unimplemented("a slot needs no preparation"))
    }
}
