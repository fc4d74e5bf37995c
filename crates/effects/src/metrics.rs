//! The metrics of `/metrics`.

use std::sync::{Arc, atomic::AtomicU64};

use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ControllerLabel {
    pub controller: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DiscardLabel {
    pub reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ClockLabel {
    /// `aws`, `github`, or `agents`.
    pub source: &'static str,
}

/// All values are from fixed sets; user input is never part of a label.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WebhookLabel {
    /// `http`, or `log` if it was read from GitHub's delivery log.
    pub source: &'static str,
    pub outcome: &'static str,
    pub reason: &'static str,
}

#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    /// 1 while this replica leads.
    pub leading: Gauge<f64, AtomicU64>,
    pub reconciles: Family<ControllerLabel, Counter>,
    pub reconcile_errors: Family<ControllerLabel, Counter>,
    /// From the claim's creation to Ready.
    pub claim_seconds: Histogram,
    /// Discarded messages of the idle queues, by reason.
    pub discarded_messages: Family<DiscardLabel, Counter>,
    /// How far this machine's clock is ahead of a service's, and that of the worst agent ahead of the operator's.
    pub clock_skew: Family<ClockLabel, Gauge<f64, AtomicU64>>,
    /// Webhooks, by outcome.
    pub webhooks: Family<WebhookLabel, Counter>,
    /// From a webhook's arrival to its response.
    pub webhook_seconds: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        // A claim takes 0.1 s with a warm instance, minutes with a new one.
        let seconds = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
        let leading = Gauge::default();
        let (reconciles, reconcile_errors) = (Family::default(), Family::default());
        let claim_seconds = Histogram::new(seconds);
        let (discarded_messages, webhooks) = (Family::default(), Family::default());
        let clock_skew = Family::default();
        // An ignored webhook takes less than a millisecond; GitHub's timeout is 10 s.
        let webhook_seconds = Histogram::new([0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0]);

        let mut registry = Registry::with_prefix("paddock");
        registry.register("leading", "1 while this replica leads", leading.clone());
        registry.register("reconciles", "Reconciliations, by controller", reconciles.clone());
        registry.register("reconcile_errors", "Reconciliations that failed, by controller", reconcile_errors.clone());
        registry.register("claim_ready_seconds", "Time from a claim's creation to Ready", claim_seconds.clone());
        let help = "Messages of the idle pool that were thrown away, by reason";
        registry.register("discarded_messages", help, discarded_messages.clone());
        let help =
            "How far the operator's clock is ahead of a service's, to 1 s, and the worst agent's ahead of it, to 2 s";
        registry.register("clock_skew_seconds", help, clock_skew.clone());
        registry.register("webhooks", "Webhooks, by what became of them and why", webhooks.clone());
        registry.register("webhook_seconds", "Time from a webhook's arrival to its answer", webhook_seconds.clone());
        Self {
            registry: Arc::new(registry),
            leading,
            reconciles,
            reconcile_errors,
            claim_seconds,
            discarded_messages,
            clock_skew,
            webhooks,
            webhook_seconds,
        }
    }
}

impl Metrics {
    /// Encodes all metrics in the OpenMetrics text format.
    pub fn text(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a string cannot fail");
        text
    }
}
