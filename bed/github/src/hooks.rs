//! Webhooks: event subscriptions, delivery faults, and the delivery log.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use hmac::{Hmac, KeyInit, Mac};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha1::Sha1;
use sha2::Sha256;
use tokio::sync::oneshot;

use crate::{
    clock::stamp,
    hub::Hub,
    model::{same, signed},
    world::{Event, World},
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HookSource {
    /// The one hook of an App, for all owners that installed it.
    App(u64),
    /// A hook that an owner created in the settings.
    Owner(String),
}

#[derive(Clone, Debug, Serialize)]
pub struct Hook {
    pub id: u64,
    pub source: HookSource,
    pub url: String,
    #[serde(skip)]
    pub secret: String,
}

/// A fault of webhook delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HookEffect {
    /// It does not arrive; the delivery log shows the failure.
    Drop,
    /// It does not arrive, and the log does not contain it.
    Vanish,
    /// It arrives twice.
    Duplicate,
    /// It arrives later, by the simulator's clock.
    DelayMs(u64),
    /// It is held until [`crate::GitHub::release_hooks`], which may also reverse the order.
    Hold,
}

/// A rule for future webhooks. Without event or action it matches all, without `times` it never expires.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HookFault {
    pub event: Option<String>,
    pub action: Option<String>,
    pub times: Option<u32>,
    pub effect: HookEffect,
}

#[derive(Clone, Debug, Serialize)]
pub struct Delivery {
    pub id: u64,
    pub guid: String,
    pub hook: u64,
    pub event: String,
    pub action: Option<String>,
    pub installation_id: Option<u64>,
    pub repository_id: Option<u64>,
    pub delivered_at: Timestamp,
    pub redelivery: bool,
    /// The exact bytes of the body.
    pub body: String,
    pub held: bool,
    pub outcome: Option<Outcome>,
    /// Deliveries of one run are sent in order.
    #[serde(skip)]
    run: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub seconds: f64,
    pub status: String,
    pub status_code: u16,
    pub response: String,
}

impl Outcome {
    fn failed(seconds: f64, status_code: u16, status: &str) -> Self {
        Self { seconds, status: status.to_owned(), status_code, response: String::new() }
    }
}

/// A delivery to be sent.
pub(crate) struct PendingDelivery {
    delivery: u64,
    copies: u32,
    delay: Duration,
}

impl World {
    /// Logs a delivery for each hook that is subscribed to the event, and applies the fault rules.
    pub(crate) fn enqueue(&mut self, event: Event, now: Timestamp) -> Vec<PendingDelivery> {
        let owner = self.repository_by_id(event.repository).owner.clone();
        let listens = |hook: &Hook| match &hook.source {
            HookSource::Owner(login) => same(login, &owner).then_some(None),
            HookSource::App(app) => {
                let installed = self.installations.iter().find(|installation| {
                    installation.app_id == *app
                        && same(&installation.owner, &owner)
                        && installation.suspended_at.is_none()
                        && installation.repositories.as_ref().is_none_or(|only| only.contains(&event.repository))
                });
                installed.map(|installation| Some(installation.id))
            }
        };
        let targets: Vec<_> = self.hooks.iter().filter_map(|hook| Some((hook.id, listens(hook)?))).collect();
        let mut pending = vec![];
        for (hook, installation_id) in targets {
            let effect = self.hook_effect(event.name, &event.action);
            if effect == Some(HookEffect::Vanish) {
                continue;
            }
            let mut payload = event.payload.clone();
            if let Some(id) = installation_id {
                payload.insert("installation".into(), json!({"id": id, "node_id": format!("installation{id}")}));
            }
            let delivery = self.log_delivery(hook, event.name, payload, event.run, now);
            delivery.installation_id = installation_id;
            delivery.repository_id = Some(event.repository);
            let send = |copies, delay| PendingDelivery { delivery: delivery.id, copies, delay };
            match effect {
                None | Some(HookEffect::Vanish) => pending.push(send(1, Duration::ZERO)),
                Some(HookEffect::Duplicate) => pending.push(send(2, Duration::ZERO)),
                Some(HookEffect::DelayMs(ms)) => pending.push(send(1, Duration::from_millis(ms))),
                Some(HookEffect::Hold) => delivery.held = true,
                Some(HookEffect::Drop) => {
                    delivery.outcome = Some(Outcome::failed(0.0, 502, "failed to connect to host"));
                }
            }
        }
        pending
    }

    fn log_delivery(
        &mut self,
        hook: u64,
        event: &str,
        payload: Map<String, Value>,
        run: u64,
        now: Timestamp,
    ) -> &mut Delivery {
        let id = self.id();
        self.deliveries.push(Delivery {
            id,
            guid: guid(),
            hook,
            event: event.to_owned(),
            action: payload.get("action").and_then(Value::as_str).map(str::to_owned),
            installation_id: None,
            repository_id: None,
            delivered_at: now,
            redelivery: false,
            body: Value::Object(payload).to_string(),
            held: false,
            outcome: None,
            run,
        });
        self.deliveries.last_mut().expect("just pushed")
    }

    fn hook_effect(&mut self, event: &str, action: &str) -> Option<HookEffect> {
        let fits = |fault: &HookFault| {
            fault.event.as_ref().is_none_or(|wanted| wanted == event)
                && fault.action.as_ref().is_none_or(|wanted| wanted == action)
                && fault.times != Some(0)
        };
        let fault = self.hook_faults.iter_mut().find(|fault| fits(fault))?;
        fault.times = fault.times.map(|left| left - 1);
        Some(fault.effect)
    }

    /// The ping event that GitHub sends when a hook is created.
    pub(crate) fn ping(&mut self, hook: u64, now: Timestamp) -> PendingDelivery {
        let at = self.hooks.iter().find(|known| known.id == hook).expect("just made");
        let payload = json!({
            "zen": "Keep it logically awesome.",
            "hook_id": hook,
            "hook": {
                "type": if matches!(at.source, HookSource::App(_)) { "App" } else { "Organization" },
                "id": hook,
                "name": "web",
                "active": true,
                "events": ["workflow_job", "workflow_run"],
                "config": {"content_type": "json", "insecure_ssl": "0", "secret": "********", "url": at.url},
                "created_at": stamp(now),
                "updated_at": stamp(now),
            },
        });
        let Value::Object(payload) = payload else { unreachable!("written with braces") };
        PendingDelivery {
            delivery: self.log_delivery(hook, "ping", payload, hook, now).id,
            copies: 1,
            delay: Duration::ZERO,
        }
    }

    /// Redelivers: the same guid and body under a new id.
    pub(crate) fn redeliver(&mut self, id: u64, now: Timestamp) -> Option<PendingDelivery> {
        let mut again = self.deliveries.iter().find(|delivery| delivery.id == id)?.clone();
        again.id = self.id();
        (again.redelivery, again.delivered_at, again.outcome, again.held) = (true, now, None, false);
        let pending = PendingDelivery { delivery: again.id, copies: 1, delay: Duration::ZERO };
        self.deliveries.push(again);
        Some(pending)
    }

    pub(crate) fn release_held(&mut self, reverse: bool) -> Vec<PendingDelivery> {
        let held = self.deliveries.iter_mut().filter(|delivery| delivery.held).map(|delivery| {
            delivery.held = false;
            PendingDelivery { delivery: delivery.id, copies: 1, delay: Duration::ZERO }
        });
        let mut held: Vec<_> = held.collect();
        if reverse {
            held.reverse();
        }
        held
    }
}

/// For each hook and run, completes when the latest delivery has ended; the next one waits for it.
pub(crate) type LastDeliveries = HashMap<(u64, u64), oneshot::Receiver<()>>;

/// Sends a delivery in the background, after earlier ones of the same run that are not delayed.
pub(crate) fn send(hub: &Arc<Hub>, pending: PendingDelivery) {
    let found = hub.read(|world, _| {
        let delivery = world.deliveries.iter().rfind(|delivery| delivery.id == pending.delivery)?.clone();
        let hook = world.hooks.iter().find(|hook| hook.id == delivery.hook)?.clone();
        Some((delivery, hook))
    });
    let Some((delivery, hook)) = found else { return };
    if let Some(checker) = &hub.checker {
        checker.webhook(&delivery.event, &delivery.body);
    }
    let (sent, receiver) = oneshot::channel();
    let previous = match pending.delay.is_zero() {
        true => hub.last_deliveries.lock().expect("no panic while held").insert((hook.id, delivery.run), receiver),
        false => None,
    };
    let (hub, due) = (Arc::clone(hub), hub.clock.now() + signed(pending.delay));
    tokio::spawn(async move {
        let _hold_back_the_next: oneshot::Sender<()> = sent;
        hub.clock.sleep_until(due).await;
        if let Some(previous) = previous {
            let _ = previous.await;
        }
        for _ in 0..pending.copies {
            let outcome = post(&hub, &hook, &delivery).await;
            hub.change(|world, _| {
                if let Some(logged) = world.deliveries.iter_mut().rfind(|logged| logged.id == delivery.id) {
                    logged.outcome = Some(outcome);
                }
            });
        }
    });
}

async fn post(hub: &Hub, hook: &Hook, delivery: &Delivery) -> Outcome {
    let start = Instant::now();
    let mut request = hub.http.post(&hook.url).timeout(hub.options.hook_timeout).body(delivery.body.clone());
    for (name, value) in headers(hook, delivery) {
        request = request.header(name, value);
    }
    let answer = request.send().await;
    let seconds = (start.elapsed().as_secs_f64() * 100.0).round() / 100.0;
    match answer {
        Ok(answer) => {
            let code = answer.status();
            let status =
                if code.is_success() { "OK".to_owned() } else { format!("Invalid HTTP Response: {}", code.as_u16()) };
            let response = answer.text().await.unwrap_or_default();
            Outcome { seconds, status, status_code: code.as_u16(), response }
        }
        Err(error) if error.is_timeout() => Outcome::failed(seconds, 504, "timed out"),
        Err(_) => Outcome::failed(seconds, 502, "failed to connect to host"),
    }
}

pub(crate) fn headers(hook: &Hook, delivery: &Delivery) -> Vec<(&'static str, String)> {
    let (kind, target) = match &hook.source {
        HookSource::App(id) => ("integration", id.to_string()),
        HookSource::Owner(_) => ("organization", hook.id.to_string()),
    };
    vec![
        ("accept", "*/*".into()),
        ("content-type", "application/json".into()),
        ("user-agent", "GitHub-Hookshot/0123456".into()),
        ("x-github-delivery", delivery.guid.clone()),
        ("x-github-event", delivery.event.clone()),
        ("x-github-hook-id", hook.id.to_string()),
        ("x-github-hook-installation-target-id", target),
        ("x-github-hook-installation-target-type", kind.into()),
        ("x-hub-signature", format!("sha1={}", hmac_hex::<Hmac<Sha1>>(&hook.secret, delivery.body.as_bytes()))),
        ("x-hub-signature-256", signature(&hook.secret, delivery.body.as_bytes())),
    ]
}

/// The value of `X-Hub-Signature-256` for a body, as GitHub signs it with the hook's secret.
pub fn signature(secret: &str, body: &[u8]) -> String {
    format!("sha256={}", hmac_hex::<Hmac<Sha256>>(secret, body))
}

fn hmac_hex<M: Mac + KeyInit>(secret: &str, body: &[u8]) -> String {
    let mut mac = <M as KeyInit>::new_from_slice(secret.as_bytes()).expect("HMAC takes keys of any length");
    mac.update(body);
    mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn guid() -> String {
    let hex: String = rand::random::<[u8; 16]>().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
