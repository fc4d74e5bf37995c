//! Runner groups and runners.

use std::time::Duration;

use axum::http::Method;
use paddock_bed_github::API_VERSION;
use serde_json::{Value, json};

use crate::bed::Bed;

#[tokio::test]
async fn groups_are_made_changed_listed_and_deleted() {
    let bed = Bed::start().await;
    let groups = "/orgs/acme/actions/runner-groups";
    let made = bed.post(groups, json!({"name": "boards", "visibility": "all"})).await;
    assert_eq!((made.status, &made.body["default"]), (201, &json!(false)));
    let again = bed.post(groups, json!({"name": "Boards"})).await;
    assert_eq!(again.status, 409, "{}", again.body);
    assert_eq!(bed.post(groups, json!({"visibility": "all"})).await.status, 422);
    assert_eq!(bed.post(groups, json!({"name": "x", "visibility": "everyone"})).await.status, 422);

    let one = format!("{groups}/{}", made.body["id"]);
    assert_eq!(bed.get(&one).await.body["name"], "boards");
    let change = Some(json!({"name": "boards", "allows_public_repositories": true}));
    let changed = bed.call_as(&bed.token, Method::PATCH, &one, change).await;
    assert_eq!(changed.body["allows_public_repositories"], true);
    let listed = bed.get(groups).await;
    assert_eq!(listed.body["total_count"], 2);
    assert_eq!(listed.body["runner_groups"][0]["name"], "Default");

    let jit = json!({"name": "r1", "runner_group_id": made.body["id"], "labels": ["x"]});
    assert_eq!(bed.post("/orgs/acme/actions/runners/generate-jitconfig", jit).await.status, 201);
    assert_eq!(bed.get(&format!("{one}/runners")).await.body["runners"][0]["name"], "r1");
    assert_eq!(bed.delete(&one).await.status, 204);
    assert_eq!(bed.get(&one).await.status, 404);
    assert_eq!(bed.get(&format!("{groups}/1/runners")).await.body["total_count"], 1);
    assert_eq!(bed.delete(&format!("{groups}/1")).await.status, 422);
    bed.finish().await;
}

#[tokio::test]
async fn a_jit_config_makes_an_offline_runner_whose_name_is_taken() {
    let bed = Bed::start().await;
    for base in ["/orgs/acme/actions/runners", "/repos/acme/app/actions/runners"] {
        let path = format!("{base}/generate-jitconfig");
        let body = json!({"name": "board-1", "runner_group_id": 1, "labels": ["ubuntu-24.04-riscv"]});
        let made = bed.post(&path, body.clone()).await;
        assert_eq!(made.status, 201, "{}", made.body);
        let runner = &made.body["runner"];
        assert_eq!((&runner["status"], &runner["busy"]), (&json!("offline"), &json!(false)));
        assert_eq!(runner["labels"], json!([{"id": 1, "name": "ubuntu-24.04-riscv", "type": "custom"}]));
        let conflict = bed.post(&path, body).await;
        assert_eq!(conflict.status, 409, "{}", conflict.body);
        assert!(conflict.message().contains("already exists"));

        let one = format!("{base}/{}", runner["id"]);
        assert_eq!(&bed.get(&one).await.body, runner);
        assert_eq!(bed.delete(&one).await.status, 204);
        assert_eq!(bed.delete(&one).await.status, 404);
        assert_eq!(bed.get(&one).await.status, 404);
    }
    for wrong in [
        json!({"name": "a", "runner_group_id": 1, "labels": []}),
        json!({"name": "", "runner_group_id": 1, "labels": ["x"]}),
        json!({"name": "a", "labels": ["x"]}),
    ] {
        assert_eq!(bed.post("/orgs/acme/actions/runners/generate-jitconfig", wrong).await.status, 422);
    }
    let foreign = json!({"name": "a", "runner_group_id": 77, "labels": ["x"]});
    assert_eq!(bed.post("/orgs/acme/actions/runners/generate-jitconfig", foreign).await.status, 404);
    bed.finish().await;
}

#[tokio::test]
async fn a_list_is_read_page_by_page_through_its_links() {
    let bed = Bed::start().await;
    for number in 0..7 {
        assert_eq!(bed.jit(&format!("r{number}"), &["x"]).await.status, 201);
    }
    let mut names = vec![];
    let mut next = Some("/orgs/acme/actions/runners?per_page=3".to_owned());
    while let Some(url) = next {
        let page = bed.get(&url).await;
        assert_eq!(page.body["total_count"], 7);
        names.extend(page.body["runners"].as_array().unwrap().iter().map(|runner| runner["name"].clone()));
        next = page.next();
    }
    assert_eq!(Value::from(names), json!(["r0", "r1", "r2", "r3", "r4", "r5", "r6"]));
    let found = bed.get("/orgs/acme/actions/runners?name=r4").await;
    assert_eq!((&found.body["total_count"], found.next()), (&json!(1), None));
    assert_eq!(bed.get("/repos/acme/app/actions/runners").await.body["total_count"], 0);
    bed.finish().await;
}

#[tokio::test]
async fn a_busy_runner_cannot_be_deleted() {
    let bed = Bed::start().await;
    let id = bed.jit("r1", &["x"]).await.body["runner"]["id"].clone();
    bed.github.play_runner("r1").unwrap();
    let job = bed.github.queue_job(bed.job(&["x"])).unwrap();
    let path = format!("/orgs/acme/actions/runners/{id}");
    assert_eq!(bed.get(&path).await.body["busy"], true);
    let refused = bed.delete(&path).await;
    assert_eq!(refused.status, 422);
    assert!(refused.message().contains("is still running a job"), "{}", refused.message());
    bed.github.finish_job(job.id, paddock_bed_github::Conclusion::Success);
    assert_eq!(bed.get(&path).await.status, 404, "a JIT runner runs one job and is gone");
    bed.finish().await;
}

#[tokio::test]
async fn registration_and_remove_tokens_are_handed_out_for_an_hour() {
    let bed = Bed::start().await;
    for base in ["/orgs/acme/actions/runners", "/repos/acme/app/actions/runners"] {
        for kind in ["registration-token", "remove-token"] {
            let answer = bed.post(&format!("{base}/{kind}"), json!({})).await;
            assert_eq!(answer.status, 201);
            let expiry: jiff::Timestamp = answer.body["expires_at"].as_str().unwrap().parse().unwrap();
            let life = expiry.duration_since(bed.github.clock().now());
            assert!(life <= Duration::from_secs(3600).try_into().unwrap() && life.is_positive());
        }
    }
    bed.finish().await;
}

#[tokio::test]
async fn runners_for_download_are_listed_and_an_unchanged_list_is_free() {
    let bed = Bed::start().await;
    for base in ["/orgs/acme/actions/runners", "/repos/acme/app/actions/runners"] {
        let path = format!("{base}/downloads");
        let first = bed.get(&path).await;
        let linux: Vec<_> = first.body.as_array().unwrap().iter().filter(|runner| runner["os"] == "linux").collect();
        assert_eq!(linux[0]["architecture"], "x64");
        assert_eq!(linux[0]["sha256_checksum"].as_str().unwrap().len(), 64);
        let again = reqwest::Client::new().get(format!("{}{path}", bed.github.api_url())).bearer_auth(&bed.token);
        let again = again
            .header(API_VERSION.0, API_VERSION.1)
            .header("if-none-match", first.header("etag"))
            .send()
            .await
            .unwrap();
        assert_eq!(
            (again.status().as_u16(), again.headers().get("etag").unwrap().to_str().unwrap()),
            (304, first.header("etag"))
        );
        assert_eq!(again.headers()["x-ratelimit-remaining"], first.header("x-ratelimit-remaining"));
        assert_eq!(again.bytes().await.unwrap().len(), 0);
    }
    bed.github.list_runner("acme", "9.0.0", false);
    let newer = bed.get("/orgs/acme/actions/runners/downloads").await;
    assert_eq!(newer.body[0]["filename"], "actions-runner-linux-x64-9.0.0.tar.gz");
    assert_eq!(newer.body[0]["sha256_checksum"], Value::Null);
    bed.finish().await;
}
