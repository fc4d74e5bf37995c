//! Rate limits, faults, counters, and the admin API.

use std::time::Duration;

use axum::http::Method;
use paddock_bed_github::{API_VERSION, Effect, Fault, Options, Secondary};
use serde_json::{Value, json};

use crate::bed::{Bed, DEADLINE};

const RUNNERS: &str = "/orgs/acme/actions/runners";

/// The pause between polls: polls that are requests must not exhaust the hourly limit.
const POLL_PAUSE: Duration = Duration::from_millis(50);

/// Waits until the only fault has been applied to its only request.
async fn fault_is_met(bed: &Bed) {
    let start = std::time::Instant::now();
    while bed.github.faults()[0].times != Some(0) {
        assert!(start.elapsed() < DEADLINE, "the request does not come");
        tokio::time::sleep(POLL_PAUSE).await;
    }
}

#[tokio::test]
async fn the_primary_limit_is_announced_spent_and_renewed() {
    let bed = Bed::with(Options { hourly_limit: 3, ..Options::default() }).await;
    let first = bed.get(RUNNERS).await;
    assert_eq!((first.header("x-ratelimit-limit"), first.header("x-ratelimit-remaining")), ("3", "2"));
    bed.get(RUNNERS).await;
    assert_eq!(bed.get(RUNNERS).await.status, 200);
    let spent = bed.get(RUNNERS).await;
    assert_eq!((spent.status, spent.header("x-ratelimit-remaining")), (403, "0"));
    assert_eq!(spent.message(), format!("API rate limit exceeded for installation ID {}.", bed.installation));
    let asked = bed.get("/rate_limit").await;
    assert_eq!((asked.status, &asked.body["rate"]["remaining"]), (200, &json!(0)));
    assert_eq!(asked.body["rate"]["reset"].to_string(), spent.header("x-ratelimit-reset"));
    bed.github.advance(Duration::from_secs(3600));
    let token = bed.installation_token().await;
    let renewed = bed.call_as(&token, Method::GET, RUNNERS, None).await;
    assert_eq!((renewed.status, renewed.header("x-ratelimit-used")), (200, "1"));
    bed.finish().await;
}

#[tokio::test]
async fn a_request_names_a_version_of_the_api_that_there_is() {
    let bed = Bed::start().await;
    let get = |version: Option<&str>| {
        let request = bed.http.get(format!("{}{RUNNERS}", bed.github.api_url())).bearer_auth(&bed.token);
        version.into_iter().fold(request, |request, version| request.header(API_VERSION.0, version)).send()
    };
    assert_eq!(get(Some(API_VERSION.1)).await.unwrap().status(), 200);
    for wrong in [None, Some("2011-01-01")] {
        let refused = get(wrong).await.unwrap();
        assert_eq!(refused.status(), 400);
        assert!(refused.text().await.unwrap().contains(API_VERSION.1));
    }
    bed.finish().await;
}

#[tokio::test]
async fn an_answer_that_the_caller_has_is_free() {
    let bed = Bed::start().await;
    let first = bed.get(RUNNERS).await;
    let again = async |tag: &str| {
        let url = format!("{}{RUNNERS}", bed.github.api_url());
        let request = bed.authorized(url).header("if-none-match", tag);
        let answer = request.send().await.unwrap();
        let used = answer.headers()["x-ratelimit-used"].to_str().unwrap().to_owned();
        (answer.status().as_u16(), used)
    };
    assert_eq!(first.header("x-ratelimit-used"), "1");
    assert_eq!(again(first.header("etag")).await, (304, "1".into()));
    bed.jit("a", &["x"]).await;
    assert_eq!(again(first.header("etag")).await, (200, "3".into()));
    bed.finish().await;
}

#[tokio::test]
async fn too_many_jit_configs_in_a_minute_meet_the_secondary_limit() {
    for retry_after in [Some(7), None] {
        let secondary = Secondary { jit_configs_per_minute: 2, retry_after, ..Secondary::default() };
        let bed = Bed::with(Options { secondary: Some(secondary), ..Options::default() }).await;
        assert_eq!(bed.jit("a", &["x"]).await.status, 201);
        assert_eq!(bed.jit("b", &["x"]).await.status, 201);
        let refused = bed.jit("c", &["x"]).await;
        assert_eq!(
            (refused.status, refused.header("retry-after")),
            (403, if retry_after.is_some() { "7" } else { "" })
        );
        assert!(refused.message().contains("secondary rate limit"));
        assert_eq!(bed.get(RUNNERS).await.status, 200, "other calls are free");
        bed.github.advance(Duration::from_secs(60));
        assert_eq!(bed.jit("c", &["x"]).await.status, 201);
        bed.finish().await;
    }
}

#[tokio::test]
async fn too_many_requests_at_once_meet_the_secondary_limit() {
    let secondary = Secondary { concurrent: 1, ..Secondary::default() };
    let bed = Bed::with(Options { secondary: Some(secondary), ..Options::default() }).await;
    bed.github.fault(Fault::new("GET", "/orgs/acme", Effect::Hang));
    let url = format!("{}/orgs/acme", bed.github.api_url());
    let hung = tokio::spawn(bed.authorized(url).send());
    let start = std::time::Instant::now();
    while bed.get(RUNNERS).await.status != 403 {
        assert!(start.elapsed() < DEADLINE, "the hung request is not counted");
        tokio::time::sleep(POLL_PAUSE).await;
    }
    hung.abort();
    while bed.get(RUNNERS).await.status != 200 {
        assert!(start.elapsed() < DEADLINE, "the hung request is counted for ever");
        tokio::time::sleep(POLL_PAUSE).await;
    }
    bed.finish().await;
}

#[tokio::test]
async fn errors_come_on_demand_with_retry_after_with_reset_and_with_neither() {
    let bed = Bed::start().await;
    let status = |status, retry_after, reset_in| Effect::Status { status, retry_after, reset_in };
    for (effect, code, retry_after, remaining) in [
        (status(429, Some(3), None), 429, "3", ""),
        (status(403, None, Some(9)), 403, "", "0"),
        (status(403, None, None), 403, "", ""),
        (status(502, None, None), 502, "", ""),
    ] {
        bed.github.fault(Fault::new("GET", "/orgs/*/actions/runners", effect).times(1));
        let hit = bed.get(RUNNERS).await;
        assert_eq!((hit.status, hit.header("retry-after")), (code, retry_after));
        assert_eq!(hit.header("x-ratelimit-remaining"), remaining);
        assert_eq!(bed.get(RUNNERS).await.status, 200);
    }
    bed.github.fault(Fault { skip: 1, ..Fault::new("POST", "*", status(500, None, None)) });
    assert_eq!(bed.jit("a", &["x"]).await.status, 201);
    assert_eq!(bed.jit("b", &["x"]).await.status, 500);
    assert_eq!(bed.jit("b", &["x"]).await.status, 500);
    bed.github.clear_faults();
    assert_eq!(bed.jit("b", &["x"]).await.status, 201);
    bed.finish().await;
}

#[tokio::test]
async fn a_lost_response_was_carried_out_and_a_dropped_request_was_not() {
    let bed = Bed::start().await;
    let path = "/orgs/acme/actions/runners/generate-jitconfig";
    let body = |name| Some(json!({"name": name, "runner_group_id": 1, "labels": ["x"]}));
    bed.github.fault(Fault::new("POST", path, Effect::LostResponse).times(1));
    bed.github.fault(Fault::new("POST", path, Effect::Drop).times(1));
    assert!(bed.try_call(&bed.token, Method::POST, path, body("lost")).await.is_err());
    assert!(bed.try_call(&bed.token, Method::POST, path, body("dropped")).await.is_err());
    assert!(bed.github.runner("lost").is_some() && bed.github.runner("dropped").is_none());
    assert_eq!(bed.jit("lost", &["x"]).await.status, 409);
    bed.finish().await;
}

#[tokio::test]
async fn answers_can_be_slow_or_never_come() {
    let bed = Bed::start().await;
    let url = format!("{}{RUNNERS}", bed.github.api_url());
    bed.github.fault(Fault::new("GET", RUNNERS, Effect::Hang).times(1));
    let mut hung = tokio::spawn(bed.http.get(&url).send());
    fault_is_met(&bed).await;
    assert!(tokio::time::timeout(Duration::from_millis(200), &mut hung).await.is_err());
    hung.abort();

    bed.github.clear_faults();
    bed.github.fault(Fault::new("GET", RUNNERS, Effect::DelayMs(1_800_000)).times(1));
    let slow = tokio::spawn(bed.authorized(url.clone()).send());
    fault_is_met(&bed).await;
    assert_eq!(bed.get(RUNNERS).await.status, 200);
    assert!(!slow.is_finished(), "a later request overtakes it");
    bed.github.advance(Duration::from_secs(1800));
    assert_eq!(slow.await.unwrap().unwrap().status(), 200);
    bed.finish().await;
}

#[tokio::test]
async fn calls_are_counted_by_route_and_installation() {
    let bed = Bed::start().await;
    bed.github.reset_calls();
    bed.get(RUNNERS).await;
    bed.get("/repos/acme/app/actions/jobs/1").await;
    bed.get("/repos/acme/app/actions/jobs/2").await;
    bed.app_get("/app").await;
    assert_eq!(bed.github.count("GET", "/repos/{owner}/{repo}/actions/jobs/{job_id}"), 2);
    let account = format!("installation ID {}", bed.installation);
    let of_installation = bed.github.calls().into_iter().filter(|call| call.account == account);
    assert_eq!(of_installation.map(|call| call.count).sum::<u64>(), 3);
    assert_eq!(bed.github.count("GET", "/app"), 1);
    bed.finish().await;
}

#[tokio::test]
async fn an_address_that_github_does_not_have_is_a_violation() {
    let bed = Bed::start().await;
    assert_eq!(bed.get("/orgs/acme/actions/runer").await.status, 404);
    let violations = bed.github.violations().await;
    assert_eq!(violations, ["GET /orgs/acme/actions/runer: GitHub has no such operation"]);
    assert_eq!(bed.get("/orgs/acme/teams").await.status, 404);
    assert!(bed.github.violations().await.contains(&"GET /orgs/{org}/teams: not simulated".to_owned()));
}

#[tokio::test]
async fn the_admin_api_does_what_the_methods_do() {
    let bed = Bed::start().await;
    let url = bed.github.html_url();
    let post = async |path: &str, body: Value| {
        let answer = bed.http.post(format!("{url}/_admin{path}")).json(&body).send().await.unwrap();
        let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
        assert_eq!(status, 200, "{path}: {text}");
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let get = async |path: &str| {
        let answer = bed.http.get(format!("{url}/_admin{path}")).send().await.unwrap();
        answer.json::<Value>().await.unwrap()
    };
    post("/owners", json!({"login": "alice", "kind": "User"})).await;
    post("/repositories", json!({"owner": "alice", "name": "site", "private": true})).await;
    let app = post("/apps", json!({"slug": "second"})).await;
    assert!(app["private_key"].as_str().unwrap().starts_with("-----BEGIN RSA PRIVATE KEY-----"));
    let installation = post("/installations", json!({"app_id": app["id"], "owner": "alice"})).await["id"].clone();
    post(&format!("/installations/{installation}/suspended"), json!(true)).await;
    assert!(!post("/tokens", json!({"owners": ["alice"]})).await["token"].is_null());

    bed.jit("r1", &["x"]).await;
    post("/runners/r1/play", json!({})).await;
    let job = post("/jobs", json!({"owner": "acme", "repo": "app", "labels": ["x"]})).await["id"].clone();
    assert_eq!(get(&format!("/jobs/{job}")).await["status"], "in_progress");
    assert_eq!(get("/runners").await[0]["job"], job);
    post(&format!("/jobs/{job}/finish"), json!({"conclusion": "success"})).await;
    assert_eq!(get("/jobs").await[0]["conclusion"], "success");

    let second = post("/jobs", json!({"owner": "acme", "repo": "app", "waiting": true})).await;
    post(&format!("/jobs/{}/approve", second["id"]), json!({})).await;
    post(&format!("/jobs/{}/cancel", second["id"]), json!({})).await;
    let third = post("/jobs", json!({"owner": "acme", "repo": "app"})).await;
    post(&format!("/runs/{}/finish", third["run_id"]), json!({"conclusion": "failure"})).await;

    let effect = json!({"status": {"status": 503, "retry_after": null, "reset_in": null}});
    post("/faults", json!({"path": "/orgs/*", "times": 1, "effect": effect})).await;
    assert_eq!(get("/faults").await[0]["times"], 1);
    assert_eq!(bed.get(RUNNERS).await.status, 503);
    post("/hook-faults", json!({"effect": "drop"})).await;
    let hook = json!({"source": {"app": bed.app.id}, "url": "http://127.0.0.1:9/", "secret": "s"});
    post("/hooks", hook).await;
    post("/hooks/release", json!({"reverse": false})).await;
    assert_eq!(get("/deliveries").await[0]["event"], "ping");
    post("/clock", json!({"seconds": 3700})).await;
    assert_eq!(bed.get(RUNNERS).await.status, 401);
    assert!(!get("/calls").await.as_array().unwrap().is_empty());
    assert_eq!(get("/violations").await, json!([]));
    let unknown = json!({"owner": "nobody", "repo": "x"});
    let refused = bed.http.post(format!("{url}/_admin/jobs")).json(&unknown).timeout(DEADLINE).send().await.unwrap();
    assert_eq!(refused.status(), 422);
    assert!(refused.text().await.unwrap().contains("nobody is called 'nobody'"));
    bed.finish().await;
}
