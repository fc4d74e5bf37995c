//! Publishes Events in the background.

use std::sync::Mutex;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Resource,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use paddock_core::redaction::redact;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio_util::sync::CancellationToken;

use super::lanes::Background;
use crate::lock;

/// Events queued while the API server is unavailable; further ones are dropped and logged.
const EVENT_BACKLOG: usize = 4096;
/// Events published in one turn of the background lane.
const EVENTS_PER_TURN: usize = 16;

/// The longest note that the API server accepts, in bytes (`NoteLengthLimit`, pkg/apis/core/validation/events.go).
const NOTE_MAX: usize = 1024;

/// An Event and its object.
type QueuedEvent = (Event, ObjectReference);

pub struct Events {
    background: Background,
    recorder: Recorder,
    sender: Sender<QueuedEvent>,
    /// Taken by [`Self::publish`].
    receiver: Mutex<Option<Receiver<QueuedEvent>>>,
}

impl Events {
    pub fn new(background: Background) -> Self {
        let reporter = Reporter { controller: "paddock".into(), instance: std::env::var("HOSTNAME").ok() };
        let (sender, receiver) = channel(EVENT_BACKLOG);
        let recorder = Recorder::new(background.in_turn.clone(), reporter);
        Self { background, recorder, sender, receiver: Mutex::new(Some(receiver)) }
    }

    /// Queues an Event.
    pub fn record<K>(&self, object: &K, type_: EventType, action: &str, reason: &str, note: String)
    where
        K: Resource<DynamicType = ()>,
    {
        let event =
            Event { type_, reason: reason.into(), note: Some(cut(&note)), action: action.into(), secondary: None };
        if self.sender.try_send((event, object.object_ref(&()))).is_err() {
            tracing::warn!(reason, "event dropped");
        }
    }

    /// Publishes queued Events until `stop`, then those that are left. A failure is only logged. One at a time: the
    /// recorder counts repetitions, and two equal Events at once would become two objects.
    pub async fn publish(&self, stop: CancellationToken) {
        let Some(mut queue) = lock(&self.receiver).take() else { return };
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                _ = queue.recv_many(&mut batch, EVENTS_PER_TURN) => {}
                () = stop.cancelled() => return,
            }
            let _turn = self.background.turn().await;
            for (event, object) in batch.drain(..) {
                if let Err(error) = self.recorder.publish(&event, &object).await {
                    tracing::warn!(%error, reason = event.reason, "event publish failed");
                }
            }
        }
    }
}

/// `note` without credentials, and cut to what the API server accepts, marked where it was cut.
fn cut(note: &str) -> String {
    const MARK: &str = "…";
    let note = redact(note);
    if note.len() <= NOTE_MAX {
        return note.into_owned();
    }
    format!("{}{MARK}", &note[..note.floor_char_boundary(NOTE_MAX - MARK.len())])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_cut_to_what_the_api_server_accepts() {
        assert_eq!(cut("short"), "short");
        assert_eq!(cut("ghs_16C7e42F292c6912E7710c838347Ae178B4a"), "[redacted]");
        for text in ["x".repeat(NOTE_MAX), "x".repeat(9999), "é".repeat(9999), "日".repeat(9999)] {
            let note = cut(&text);
            assert!(note.len() <= NOTE_MAX && note.len() > NOTE_MAX - 4, "{}", note.len());
            assert_eq!(note == text, text.len() == NOTE_MAX);
        }
    }
}
