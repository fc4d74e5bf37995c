//! Collects what is needed to diagnose a failure after the pod is deleted.

use k8s_openapi::api::events::v1::Event;
use kube::{
    Api,
    api::{ListParams, LogParams},
};
use paddock_core::{
    api::{FAILURE_MESSAGE_MAX, Failure, LOG_TAIL_MAX, PodEvent, clip},
    boards::pod::JIT_CONFIG,
};
use secrecy::{ExposeSecret, SecretString};

use super::Work;

/// Events kept per pod, the latest ones.
const MAX_EVENTS: usize = 16;

impl Work<'_> {
    /// Adds the pod's events and the end of its log to the failure. Reading them is best effort.
    pub async fn diagnose(&self, failure: Failure) -> Failure {
        if self.pod.is_none() {
            return failure;
        }
        let (events, log_tail) = tokio::join!(self.events(), self.log_tail());
        Failure { events, log_tail, ..failure }
    }

    async fn events(&self) -> Vec<PodEvent> {
        let uid = self.pod.and_then(|pod| pod.metadata.uid.as_deref()).unwrap_or_default();
        let api: Api<Event> = Api::namespaced(self.board.shared.client.clone(), &self.namespace);
        let about = ListParams::default().fields(&format!("regarding.kind=Pod,regarding.name={}", self.name));
        let Ok(found) = api.list(&about).await else { return vec![] };
        let of_pod = |event: &Event| event.regarding.as_ref().and_then(|pod| pod.uid.as_deref()) == Some(uid);
        let mut events: Vec<_> = found.items.iter().filter(|event| of_pod(event)).map(pod_event).collect();
        events.sort_by_key(|event| event.at.as_ref().map(|at| at.0));
        events.split_off(events.len().saturating_sub(MAX_EVENTS))
    }

    /// The end of the log, with the config redacted; `None` if there is no log.
    async fn log_tail(&self) -> Option<String> {
        let parameters = LogParams { tail_lines: Some(100), limit_bytes: Some(1 << 18), ..LogParams::default() };
        let log = self.pods().logs(&self.name, &parameters).await.ok().filter(|log| !log.is_empty())?;
        let secret = self.secrets().get_opt(&self.name).await.ok()?;
        let config = secret.and_then(|mut secret| secret.data.as_mut()?.remove(JIT_CONFIG));
        let config = config.and_then(|bytes| String::from_utf8(bytes.0).ok()).map(SecretString::from);
        let redacted = match config.as_ref().map(ExposeSecret::expose_secret) {
            Some(config) if !config.is_empty() => log.replace(config, "[redacted]"),
            _ => log,
        };
        Some(clip(&redacted, LOG_TAIL_MAX))
    }
}

fn pod_event(event: &Event) -> PodEvent {
    let series = event.series.as_ref();
    let last =
        series.map(|series| series.last_observed_time.0).or_else(|| event.event_time.as_ref().map(|time| time.0));
    let last = event.deprecated_last_timestamp.as_ref().map(|time| time.0).or(last);
    let count = series.map(|series| series.count).or(event.deprecated_count).unwrap_or(1);
    PodEvent {
        at: last.map(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time),
        reason: clip(event.reason.as_deref().unwrap_or_default(), 256),
        message: clip(event.note.as_deref().unwrap_or_default(), FAILURE_MESSAGE_MAX),
        count: u32::try_from(count).unwrap_or(1),
    }
}
