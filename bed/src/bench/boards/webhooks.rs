//! How many webhooks a second the operator takes.

use std::time::Instant;

use anyhow::{Context, Result};
use futures::{StreamExt, stream};
use serde_json::{Value, json};

use super::{Bench, LABEL, Report, SECRET};
use crate::github::signature;

impl Bench {
    /// Deliveries per second: of jobs that become claims, of known jobs, and of jobs that no pool serves.
    pub(super) async fn webhooks(&self, report: &mut Report) -> Result<()> {
        let delivery =
            self.github.deliveries().into_iter().rfind(|delivery| delivery.action.as_deref() == Some("queued"));
        let body: Value = serde_json::from_str(&delivery.context("a job was queued")?.body)?;
        let client = reqwest::Client::new();
        let url = format!("{}/webhook", self.operator()?.url());
        let rate = async |bodies: Vec<Value>| {
            let signed = bodies.iter().map(Value::to_string).map(|body| (signature(SECRET, body.as_bytes()), body));
            let signed: Vec<_> = signed.collect();
            let start = Instant::now();
            let answers = stream::iter(signed).map(|(signature, body)| {
                let request = client.post(&url).header("x-hub-signature-256", signature).body(body);
                let request = request.header("content-type", "application/json");
                let request = request.header("x-github-event", "workflow_job");
                async move { request.send().await.is_ok_and(|answer| answer.status().is_success()) }
            });
            let accepted = answers.buffer_unordered(64).filter(|accepted| std::future::ready(*accepted)).count().await;
            accepted as f64 / start.elapsed().as_secs_f64()
        };
        let job = |id: u64, labels: &[&str]| {
            let mut body = body.clone();
            body["workflow_job"]["id"] = json!(id);
            body["workflow_job"]["labels"] = json!(labels);
            body
        };
        let foreign = rate((0..4000).map(|id| job(1 << 40 | id, &["ubuntu-latest"])).collect()).await;
        let old = body["workflow_job"]["id"].as_u64().context("a job has a number")?;
        let known = rate((0..4000).map(|_| job(old, &[LABEL])).collect()).await;
        let new: Vec<u64> = (0..2000).map(|id| 1 << 41 | id).collect();
        let before = self.operator()?.cpu()?;
        let made = rate(new.iter().map(|id| job(*id, &[LABEL])).collect()).await;
        report.cpu_per_job = (self.operator()?.cpu()? - before) / new.len() as u32;
        report.webhooks = [made, known, foreign];
        Ok(())
    }
}
