//! Events, published behind the work: one after the other, and after claims that wait for their machines.

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

/// How long an event waits while claims come first.
const YIELD: Duration = Duration::from_secs(3);
/// Events that wait while the API server is away; more are dropped, and said to be in the log.
const BACKLOG: usize = 4096;
/// How often it is looked whether they still do.
const LOOK: Duration = Duration::from_millis(100);

/// What is told of whom, and since when.
type About = (Event, ObjectReference, Instant);

pub struct Events {
    recorder: Recorder,
    sender: Sender<About>,
    /// Until somebody publishes.
    receiver: Mutex<Option<Receiver<About>>>,
}

impl Events {
    pub fn new(client: Client) -> Self {
        let reporter = Reporter { controller: "paddock".into(), instance: std::env::var("HOSTNAME").ok() };
        let (sender, receiver) = channel(BACKLOG);
        Self { recorder: Recorder::new(client, reporter), sender, receiver: Mutex::new(Some(receiver)) }
    }

    pub fn tell<K>(&self, object: &K, type_: EventType, action: &str, reason: &str, note: String)
    where
        K: Resource<DynamicType = ()>,
    {
        let event = Event { type_, reason: reason.into(), note: Some(note), action: action.into(), secondary: None };
        if self.sender.try_send((event, object.object_ref(&()), Instant::now())).is_err() {
            tracing::warn!(reason, "an event was dropped: the API server takes none");
        }
    }

    /// Publishes what is told, until `stop`; then what is left. An event that cannot be published is not worth failing for.
    pub async fn publish(&self, ledger: &Ledger, stop: CancellationToken) {
        let receiver = lock(&self.receiver).take();
        let Some(mut told) = receiver else { return };
        let next = async |told: &mut Receiver<About>| {
            tokio::select! {
                biased;
                next = told.recv() => next,
                () = stop.cancelled() => None,
            }
        };
        while let Some((event, about, since)) = next(&mut told).await {
            while ledger.is_claiming() && since.elapsed() < YIELD && !stop.is_cancelled() {
                tokio::time::sleep(LOOK).await;
            }
            if let Err(error) = self.recorder.publish(&event, &about).await {
                tracing::warn!(%error, reason = event.reason, "an event could not be published");
            }
        }
    }
}
