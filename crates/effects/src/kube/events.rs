//! Publishes Events in the background.

use std::sync::Mutex;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client, Resource,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio_util::sync::CancellationToken;

use crate::lock;

/// Events queued while the API server is unavailable; further ones are dropped and logged.
const EVENT_BACKLOG: usize = 4096;
/// Events published at a time, so that those that the background lane delays do not queue up.
const CONCURRENT_EVENTS: usize = 16;

/// An Event and its object.
type QueuedEvent = (Event, ObjectReference);

pub struct Events {
    recorder: Recorder,
    sender: Sender<QueuedEvent>,
    /// Taken by [`Self::publish`].
    receiver: Mutex<Option<Receiver<QueuedEvent>>>,
}

impl Events {
    /// `client`: of the background lane.
    pub fn new(client: Client) -> Self {
        let reporter = Reporter { controller: "paddock".into(), instance: std::env::var("HOSTNAME").ok() };
        let (sender, receiver) = channel(EVENT_BACKLOG);
        Self { recorder: Recorder::new(client, reporter), sender, receiver: Mutex::new(Some(receiver)) }
    }

    /// Queues an Event.
    pub fn record<K>(&self, object: &K, type_: EventType, action: &str, reason: &str, note: String)
    where
        K: Resource<DynamicType = ()>,
    {
        let event = Event { type_, reason: reason.into(), note: Some(note), action: action.into(), secondary: None };
        if self.sender.try_send((event, object.object_ref(&()))).is_err() {
            tracing::warn!(reason, "event dropped");
        }
    }

    /// Publishes queued Events until `stop`, then those that are left. A failure is only logged.
    pub async fn publish(&self, stop: CancellationToken) {
        let Some(queue) = lock(&self.receiver).take() else { return };
        let queued = stream::unfold(queue, async |mut queue| {
            let next = tokio::select! {
                biased;
                next = queue.recv() => next,
                () = stop.cancelled() => None,
            };
            next.map(|next| (next, queue))
        });
        let publish = async |(event, object): QueuedEvent| {
            if let Err(error) = self.recorder.publish(&event, &object).await {
                tracing::warn!(%error, reason = event.reason, "event publish failed");
            }
        };
        queued.for_each_concurrent(CONCURRENT_EVENTS, publish).await;
    }
}
