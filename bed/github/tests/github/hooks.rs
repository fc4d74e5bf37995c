//! Webhooks, their faults, and the delivery log.

use std::time::Duration;

use axum::http::{Method, StatusCode};
use paddock_bed_github::{Conclusion, HookEffect, HookFault, HookSource, JobRequest, Options, signature};
use serde_json::{Value, json};

use crate::bed::{Bed, DEADLINE, Receiver};

const SECRET: &str = "It's a Secret to Everybody";

async fn bed_with_hook() -> (Bed, Receiver) {
    hooked(Bed::start().await).await
}

async fn hooked(bed: Bed) -> (Bed, Receiver) {
    let mut receiver = Receiver::start().await;
    bed.github.hook(HookSource::App(bed.app.id), &receiver.url, SECRET);
    assert_eq!(receiver.event().await.0, "ping");
    (bed, receiver)
}

fn fault(action: &str, effect: HookEffect) -> HookFault {
    HookFault { event: Some("workflow_job".into()), action: Some(action.into()), times: Some(1), effect }
}

/// Polls the log until the delivery of this event has ended.
async fn logged(bed: &Bed, name: &str) -> Value {
    let start = std::time::Instant::now();
    loop {
        let log = bed.app_get("/app/hook/deliveries").await.body;
        let named = |entry: &&Value| format!("{} {}", entry["event"], entry["action"]).replace('"', "") == name;
        if let Some(entry) = log.as_array().unwrap().iter().find(named).filter(|entry| entry["status"] != "pending") {
            return entry.clone();
        }
        assert!(start.elapsed() < DEADLINE, "{name} is not in the log: {log}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[test]
fn signatures_are_those_of_githubs_documentation() {
    let expected = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
    assert_eq!(signature(SECRET, b"Hello, World!"), expected);
}

#[tokio::test]
async fn a_jobs_life_is_told_in_order_and_signed() {
    let (bed, mut receiver) = bed_with_hook().await;
    let job = bed.github.queue_job(JobRequest { waiting: true, ..bed.job(&["x"]) }).unwrap();
    let (headers, body) = receiver.next().await;
    assert_eq!(headers["x-hub-signature-256"].to_str().unwrap(), signature(SECRET, &body));
    assert!(headers["x-hub-signature"].to_str().unwrap().starts_with("sha1="));
    assert_eq!(headers["x-github-event"], "workflow_job");
    assert_eq!(headers["x-github-hook-installation-target-type"], "integration");
    assert!(headers["user-agent"].to_str().unwrap().starts_with("GitHub-Hookshot/"));
    assert!(serde_json::from_slice::<Value>(&body).unwrap()["action"] == "waiting");

    bed.github.approve_job(job.id);
    let runner = bed.jit("r1", &["x"]).await.body["runner"]["id"].clone();
    bed.github.play_runner("r1").unwrap();
    bed.github.finish_job(job.id, Conclusion::Success);
    let (name, queued) = receiver.event().await;
    assert_eq!(name, "workflow_job queued");
    assert_eq!(queued["installation"]["id"], bed.installation);
    assert_eq!((&queued["workflow_job"]["id"], &queued["workflow_job"]["runner_id"]), (&json!(job.id), &json!(null)));
    let (name, running) = receiver.event().await;
    assert_eq!(name, "workflow_job in_progress");
    assert_eq!(
        (&running["workflow_job"]["runner_name"], &running["workflow_job"]["runner_id"]),
        (&json!("r1"), &runner)
    );
    let (name, completed) = receiver.event().await;
    assert_eq!(name, "workflow_job completed");
    assert_eq!(completed["workflow_job"]["conclusion"], "success");
    let (name, run) = receiver.event().await;
    assert_eq!((name.as_str(), &run["workflow_run"]["conclusion"]), ("workflow_run completed", &json!("success")));
    bed.finish().await;
}

#[tokio::test]
async fn a_failed_delivery_is_not_repeated_until_somebody_asks() {
    let (bed, mut receiver) = bed_with_hook().await;
    *receiver.answer.lock().await = Some(StatusCode::INTERNAL_SERVER_ERROR);
    bed.github.queue_job(bed.job(&["x"])).unwrap();
    let (first, body) = receiver.next().await;
    let entry = logged(&bed, "workflow_job queued").await;
    assert_eq!((&entry["status_code"], &entry["redelivery"]), (&json!(500), &json!(false)));
    assert_eq!(entry["installation_id"], bed.installation);
    assert!(receiver.nothing_waits());

    *receiver.answer.lock().await = Some(StatusCode::OK);
    let path = format!("/app/hook/deliveries/{}", entry["id"]);
    let whole = bed.app_get(&path).await;
    assert_eq!(whole.body["request"]["payload"], serde_json::from_slice::<Value>(&body).unwrap());
    let asked = bed.call_as(&bed.jwt(), Method::POST, &format!("{path}/attempts"), None).await;
    assert_eq!(asked.status, 202);
    let (second, again) = receiver.next().await;
    assert_eq!((&second["x-github-delivery"], again), (&first["x-github-delivery"], body));
    let start = std::time::Instant::now();
    while bed.app_get("/app/hook/deliveries?status=success").await.body[0]["redelivery"] != true {
        assert!(start.elapsed() < DEADLINE);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let failed = bed.app_get("/app/hook/deliveries?status=failure").await.body;
    assert_eq!(failed.as_array().unwrap().len(), 1);
    assert_eq!(bed.app_get("/app/hook/deliveries/1").await.status, 404);
    bed.finish().await;
}

#[tokio::test]
async fn a_receiver_that_does_not_answer_is_given_up() {
    // Long enough for a slow machine to deliver the webhook.
    let options = Options { hook_timeout: Duration::from_secs(5), ..Options::default() };
    let (bed, mut receiver) = hooked(Bed::with(options).await).await;
    *receiver.answer.lock().await = None;
    bed.github.queue_job(bed.job(&["x"])).unwrap();
    receiver.next().await;
    assert_eq!(logged(&bed, "workflow_job queued").await["status"], "timed out");
    bed.finish().await;
}

#[tokio::test]
async fn the_log_is_read_with_a_cursor_newest_first() {
    let (bed, mut receiver) = bed_with_hook().await;
    for _ in 0..5 {
        bed.github.queue_job(bed.job(&["x"])).unwrap();
        receiver.next().await;
    }
    let mut ids = vec![];
    let mut next = Some("/app/hook/deliveries?per_page=2".to_owned());
    while let Some(url) = next {
        let page = bed.app_get(&url).await;
        ids.extend(page.body.as_array().unwrap().iter().map(|entry| entry["id"].as_u64().unwrap()));
        next = page.next();
    }
    assert_eq!(ids.len(), 6, "five jobs and the ping");
    assert!(ids.is_sorted_by(|a, b| a > b), "{ids:?}");
    assert_eq!(bed.app_get("/app/hook/deliveries?cursor=nonsense").await.status, 422);
    bed.finish().await;
}

#[tokio::test]
async fn webhooks_are_lost_with_and_without_a_trace() {
    let (bed, mut receiver) = bed_with_hook().await;
    bed.github.hook_fault(fault("queued", HookEffect::Drop));
    bed.github.hook_fault(fault("queued", HookEffect::Vanish));
    for _ in 0..2 {
        bed.github.queue_job(bed.job(&["x"])).unwrap();
    }
    let arrives = bed.github.queue_job(bed.job(&["x"])).unwrap();
    assert_eq!(receiver.event().await.1["workflow_job"]["id"], arrives.id);
    let log = bed.app_get("/app/hook/deliveries").await.body;
    let codes: Vec<_> = log.as_array().unwrap().iter().map(|entry| entry["status_code"].clone()).collect();
    assert_eq!(codes.iter().filter(|code| **code == 502).count(), 1);
    assert_eq!(codes.len(), 3, "a ping, a lost one and one that arrived: {log}");
    bed.finish().await;
}

#[tokio::test]
async fn webhooks_come_twice_late_and_in_the_wrong_order() {
    let (bed, mut receiver) = bed_with_hook().await;
    bed.github.hook_fault(fault("queued", HookEffect::Duplicate));
    let job = bed.github.queue_job(bed.job(&["x"])).unwrap();
    let (one, two) = (receiver.next().await, receiver.next().await);
    assert_eq!((&one.0["x-github-delivery"], one.1), (&two.0["x-github-delivery"], two.1));

    let all = HookFault { event: None, action: None, times: None, effect: HookEffect::Hold };
    bed.github.hook_fault(all);
    bed.jit("r1", &["x"]).await;
    bed.github.play_runner("r1").unwrap();
    bed.github.finish_job(job.id, Conclusion::Success);
    assert!(receiver.nothing_waits());
    bed.github.clear_hook_faults();
    bed.github.release_hooks(true);
    let names = receiver.names(3).await;
    assert_eq!(names, ["workflow_run completed", "workflow_job completed", "workflow_job in_progress"]);

    bed.github.hook_fault(fault("queued", HookEffect::DelayMs(3_600_000)));
    let late = bed.github.queue_job(bed.job(&["y"])).unwrap();
    bed.github.cancel_job(late.id);
    assert_eq!(receiver.names(2).await, ["workflow_job completed", "workflow_run completed"]);
    bed.github.advance(Duration::from_secs(3600));
    assert_eq!(receiver.event().await.0, "workflow_job queued");
    bed.finish().await;
}

#[tokio::test]
async fn hooks_hear_only_of_their_own_owners() {
    let (bed, mut receiver) = bed_with_hook().await;
    bed.github.organization("rival");
    let mut of_rival = Receiver::start().await;
    bed.github.hook(HookSource::Owner("rival".into()), &of_rival.url, "s");
    assert_eq!(of_rival.event().await.0, "ping");
    bed.github.queue_job(JobRequest { owner: "rival".into(), ..bed.job(&["x"]) }).unwrap();
    let own = bed.github.queue_job(bed.job(&["x"])).unwrap();
    assert!(of_rival.event().await.1["installation"].is_null());
    let payload = receiver.event().await.1;
    assert_eq!((&payload["workflow_job"]["id"], &payload["organization"]["login"]), (&json!(own.id), &json!("acme")));
    bed.github.user("alice");
    let personal = bed.github.install(bed.app.id, "alice").unwrap();
    bed.github.queue_job(JobRequest { owner: "alice".into(), ..bed.job(&["x"]) }).unwrap();
    let payload = receiver.event().await.1;
    assert_eq!((&payload["installation"]["id"], &payload["organization"]), (&json!(personal), &json!(null)));
    bed.finish().await;
}

#[tokio::test]
async fn an_app_reads_and_changes_where_its_hook_goes() {
    let (bed, _) = bed_with_hook().await;
    let mut elsewhere = Receiver::start().await;
    let change = Some(json!({"url": elsewhere.url, "secret": "new"}));
    assert_eq!(bed.call_as(&bed.jwt(), Method::PATCH, "/app/hook/config", change).await.status, 200);
    assert_eq!(bed.app_get("/app/hook/config").await.body["url"], elsewhere.url);
    bed.github.queue_job(bed.job(&["x"])).unwrap();
    let (headers, body) = elsewhere.next().await;
    assert_eq!(headers["x-hub-signature-256"].to_str().unwrap(), signature("new", &body));
    bed.finish().await;
}
