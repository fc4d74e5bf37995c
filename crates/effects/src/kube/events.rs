//! Publishes Events in the background, one at a time, and defers them while claims wait for instances.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client, Resource,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio_util::sync::CancellationToken;

use crate::{ledger::Ledger, lock};

/// How long an Event is deferred at most while claims wait for instances.
const CLAIM_DEFERRAL_MAX: Duration = Duration::from_secs(3);
/// Events queued while the API server is unavailable; further ones are dropped and logged.
const EVENT_BACKLOG: usize = 4096;
/// Interval of the check whether claims still wait.
const CLAIM_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// An Event, its object, and when it was queued.
type QueuedEvent = (Event, ObjectReference, Instant);

pub struct Events {
    recorder: Recorder,
    sender: Sender<QueuedEvent>,
    /// Taken by [`Self::publish`].
    receiver: Mutex<Option<Receiver<QueuedEvent>>>,
}

impl Events {
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
        if self.sender.try_send((event, object.object_ref(&()), Instant::now())).is_err() {
            tracing::warn!(reason, "event dropped");
        }
    }

    /// Publishes queued Events until `stop`, then those that are left. A failure is only logged.
    pub async fn publish(&self, ledger: &Ledger, stop: CancellationToken) {
        let receiver = lock(&self.receiver).take();
        let Some(mut queue) = receiver else { return };
        let next = async |queue: &mut Receiver<QueuedEvent>| {
            tokio::select! {
                biased;
                next = queue.recv() => next,
                () = stop.cancelled() => None,
            }
        };
        while let Some((event, object, since)) = next(&mut queue).await {
            while ledger.is_claiming() && since.elapsed() < CLAIM_DEFERRAL_MAX && !stop.is_cancelled() {
                tokio::time::sleep(CLAIM_CHECK_INTERVAL).await;
            }
            if let Err(error) = self.recorder.publish(&event, &object).await {
                tracing::warn!(%error, reason = event.reason, "event publish failed");
            }
        }
    }
}
