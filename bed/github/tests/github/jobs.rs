//! Jobs, runs, and the assignment to runners.

use std::{
    collections::HashSet,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use axum::http::Method;
use paddock_bed_github::{API_VERSION, Conclusion, GitHub, JobRequest, Options, Status};
use paddock_bed_process::free_port;
use serde_json::json;

use crate::bed::{Bed, DEADLINE};

#[tokio::test]
async fn any_idle_runner_with_the_labels_may_take_a_job() {
    let mut takers = HashSet::new();
    for seed in 0..8 {
        let bed = Bed::with(Options { seed, ..Options::default() }).await;
        for name in ["a", "b", "c"] {
            bed.jit(name, &["linux", "GPU"]).await;
            bed.github.play_runner(name).unwrap();
        }
        bed.jit("other", &["linux"]).await;
        bed.github.play_runner("other").unwrap();
        bed.jit("offline", &["gpu"]).await;
        let job = bed.github.queue_job(bed.job(&["gpu"])).unwrap();
        let job = bed.github.job(job.id).unwrap();
        assert_eq!(job.status, Status::InProgress);
        takers.insert(job.taken_by.unwrap().runner_name);
        assert_eq!(bed.github.queue_job(bed.job(&["gpu", "arm"])).unwrap().status, Status::Queued);
        bed.finish().await;
    }
    assert!(takers.len() > 1 && takers.iter().all(|name| ["a", "b", "c"].contains(&name.as_str())), "{takers:?}");
}

#[tokio::test]
async fn a_job_and_its_run_are_seen_through_the_api_at_every_stage() {
    let bed = Bed::start().await;
    let job = bed.github.queue_job(JobRequest { run_id: Some(77), ..bed.job(&["x"]) }).unwrap();
    let second = bed.github.queue_job(JobRequest { run_id: Some(77), ..bed.job(&["y"]) }).unwrap();
    let path = format!("/repos/acme/app/actions/jobs/{}", job.id);
    let queued = bed.get(&path).await;
    assert_eq!((&queued.body["status"], &queued.body["runner_name"]), (&json!("queued"), &json!(null)));
    assert_eq!(bed.get("/repos/acme/app/actions/runs?status=queued").await.body["total_count"], 1);

    bed.jit("r1", &["x"]).await;
    bed.github.play_runner("r1").unwrap();
    let running = bed.get(&path).await;
    assert_eq!((&running.body["status"], &running.body["runner_name"]), (&json!("in_progress"), &json!("r1")));
    assert_eq!(running.body["runner_group_name"], "Default");
    assert_eq!(bed.get("/repos/acme/app/actions/runs/77").await.body["status"], "in_progress");

    bed.github.finish_job(job.id, Conclusion::Failure);
    assert_eq!(bed.get(&path).await.body["conclusion"], "failure");
    assert_eq!(bed.get("/repos/acme/app/actions/runs/77").await.body["status"], "in_progress");
    bed.github.finish_job(second.id, Conclusion::Success);
    let run = bed.get("/repos/acme/app/actions/runs/77").await;
    assert_eq!((&run.body["status"], &run.body["conclusion"]), (&json!("completed"), &json!("failure")));
    let jobs = bed.get("/repos/acme/app/actions/runs/77/jobs?per_page=1").await;
    assert_eq!((&jobs.body["total_count"], jobs.next().is_some()), (&json!(2), true));
    assert_eq!(bed.get("/repos/acme/app/actions/runs/78").await.status, 404);
    assert_eq!(bed.get("/repos/acme/app/actions/jobs/78").await.status, 404);
    bed.finish().await;
}

#[tokio::test]
async fn a_played_job_ends_when_its_time_is_over() {
    let bed = Bed::start().await;
    bed.jit("r1", &["x"]).await;
    bed.github.play_runner("r1").unwrap();
    let long = JobRequest { duration_ms: Some(1_800_000), ..bed.job(&["x"]) };
    let job = bed.github.queue_job(long).unwrap();
    bed.github.advance(Duration::from_secs(1700));
    assert_eq!(bed.github.job(job.id).unwrap().status, Status::InProgress);
    bed.github.advance(Duration::from_secs(200));
    assert_eq!(bed.github.job(job.id).unwrap().conclusion, Some(Conclusion::Success));
    assert!(bed.github.runner("r1").is_none());

    bed.jit("r2", &["x"]).await;
    bed.github.play_runner("r2").unwrap();
    let short = bed.github.queue_job(JobRequest { duration_ms: Some(50), ..bed.job(&["x"]) }).unwrap();
    bed.github.until_job(short.id, DEADLINE, |job| job.status == Status::Completed).await.unwrap();
    bed.finish().await;
}

#[tokio::test]
async fn cancelling_a_run_ends_its_jobs_once() {
    let bed = Bed::start().await;
    let request = JobRequest { run_id: Some(5), ..bed.job(&["x"]) };
    let job = bed.github.queue_job(request.clone()).unwrap();
    assert_eq!(bed.post("/repos/acme/app/actions/runs/5/cancel", json!({})).await.status, 202);
    assert_eq!(bed.github.job(job.id).unwrap().conclusion, Some(Conclusion::Cancelled));
    let again = bed.post("/repos/acme/app/actions/runs/5/cancel", json!({})).await;
    assert_eq!((again.status, again.message()), (409, "Cannot cancel a workflow run that is completed."));
    let another = bed.github.queue_job(request).unwrap();
    assert_eq!(bed.post("/repos/acme/app/actions/runs/5/force-cancel", json!({})).await.status, 202);
    assert_eq!(bed.github.job(another.id).unwrap().conclusion, Some(Conclusion::Cancelled));
    bed.finish().await;
}

#[tokio::test]
async fn a_run_may_be_over_while_a_job_of_it_is_still_queued() {
    let bed = Bed::start().await;
    let job = bed.github.queue_job(JobRequest { run_id: Some(5), ..bed.job(&["x"]) }).unwrap();
    bed.github.finish_run(5, Conclusion::Cancelled);
    assert_eq!(bed.get("/repos/acme/app/actions/runs/5").await.body["status"], "completed");
    assert_eq!(bed.get(&format!("/repos/acme/app/actions/jobs/{}", job.id)).await.body["status"], "queued");
    bed.finish().await;
}

#[tokio::test]
async fn public_repositories_need_a_group_that_allows_them() {
    let bed = Bed::start().await;
    bed.github.repository("acme", "public", false).unwrap();
    let job = bed.github.queue_job(JobRequest { repo: "public".into(), ..bed.job(&["x"]) }).unwrap();
    bed.jit("default", &["x"]).await;
    bed.github.play_runner("default").unwrap();
    assert_eq!(bed.github.job(job.id).unwrap().status, Status::Queued);
    let open = json!({"name": "open", "allows_public_repositories": true});
    let group = bed.post("/orgs/acme/actions/runner-groups", open).await.body["id"].clone();
    let jit = json!({"name": "open", "runner_group_id": group, "labels": ["x"]});
    bed.post("/orgs/acme/actions/runners/generate-jitconfig", jit).await;
    bed.github.play_runner("open").unwrap();
    assert_eq!(bed.github.job(job.id).unwrap().taken_by.unwrap().group_name, "open");
    bed.finish().await;
}

#[tokio::test]
async fn a_runner_of_a_persons_repository_serves_that_one_alone() {
    let bed = Bed::start().await;
    bed.github.user("alice");
    bed.github.repository("alice", "site", false).unwrap();
    bed.github.install(bed.app.id, "alice").unwrap();
    let token = bed.github.personal_token(&["alice"]);
    let body = json!({"name": "r1", "runner_group_id": 1, "labels": ["x"]});
    let path = "/repos/alice/site/actions/runners/generate-jitconfig";
    assert_eq!(bed.call_as(&token, Method::POST, path, Some(body)).await.status, 201);
    bed.github.play_runner("r1").unwrap();
    let elsewhere = |owner: &str, repo: &str| JobRequest { owner: owner.into(), repo: repo.into(), ..bed.job(&["x"]) };
    let foreign = [elsewhere("alice", "other"), elsewhere("acme", "app")];
    let foreign = foreign.map(|request| bed.github.queue_job(request).unwrap());
    let own = bed.github.queue_job(elsewhere("alice", "site")).unwrap();
    assert_eq!(bed.github.job(own.id).unwrap().status, Status::InProgress);
    assert!(foreign.iter().all(|job| bed.github.job(job.id).unwrap().status == Status::Queued));
    bed.finish().await;
}

#[tokio::test]
async fn a_lost_runner_stays_busy_until_github_gives_its_job_up() {
    let bed = Bed::start().await;
    let id = bed.jit("r1", &["x"]).await.body["runner"]["id"].clone();
    bed.github.play_runner("r1").unwrap();
    let job = bed.github.queue_job(bed.job(&["x"])).unwrap();
    bed.github.lose_runner("r1").unwrap();
    bed.github.advance(Duration::from_secs(60));
    let lost = bed.get(&format!("/orgs/acme/actions/runners/{id}")).await;
    assert_eq!((&lost.body["status"], &lost.body["busy"]), (&json!("offline"), &json!(true)));
    assert_eq!(bed.delete(&format!("/orgs/acme/actions/runners/{id}")).await.status, 422);
    bed.github.advance(Duration::from_secs(600));
    assert_eq!(bed.github.job(job.id).unwrap().conclusion, Some(Conclusion::Failure));
    assert!(bed.github.runner("r1").is_none());
    bed.finish().await;
}

#[tokio::test]
async fn a_job_that_its_runner_does_not_pick_up_goes_to_another() {
    let bed = Bed::start().await;
    bed.jit("r1", &["x"]).await;
    bed.github.play_runner("r1").unwrap();
    bed.github.lose_runner("r1").unwrap();
    let job = bed.github.queue_job(bed.job(&["x"])).unwrap();
    let taker = || bed.github.job(job.id).unwrap().taken_by.map(|taken| taken.runner_name);
    assert_eq!(taker().as_deref(), Some("r1"), "GitHub has not missed it yet");
    bed.github.advance(Duration::from_secs(61));
    assert_eq!((bed.github.job(job.id).unwrap().status, taker()), (Status::Queued, None));
    bed.jit("r2", &["x"]).await;
    bed.github.play_runner("r2").unwrap();
    assert_eq!(taker().as_deref(), Some("r2"));
    bed.finish().await;
}

/// Behind a forwarder the simulator's own address may be unreachable.
#[tokio::test]
async fn links_lead_back_to_the_address_that_was_called() {
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port().unwrap()));
    let options = Options { listen, url: Some("http://own.invalid".into()), ..Options::default() };
    let github = GitHub::start(options).await.unwrap();
    github.organization("acme");
    github.repository("acme", "app", true).unwrap();
    for _ in 0..2 {
        github.queue_job(JobRequest { owner: "acme".into(), repo: "app".into(), ..JobRequest::default() }).unwrap();
    }
    let runs = format!("http://{listen}/api/v3/repos/acme/app/actions/runs");
    let page = reqwest::Client::new().get(format!("{runs}?per_page=1")).bearer_auth(github.personal_token(&["acme"]));
    let page = page.header(API_VERSION.0, API_VERSION.1).send().await.unwrap();
    let link = page.headers()["link"].to_str().unwrap().to_owned();
    assert!(link.starts_with(&format!("<{runs}?")), "{link}");
    let body = page.text().await.unwrap();
    assert!(body.contains(&runs) && !body.contains("own.invalid"), "{body}");
}

#[tokio::test]
async fn jobs_run_again_in_the_next_attempt_of_their_run_once_it_has_completed() {
    let bed = Bed::start().await;
    let request = |label: &str| JobRequest { run_id: Some(5), ..bed.job(&[label]) };
    let [good, bad, worse] = ["a", "b", "c"].map(|label| bed.github.queue_job(request(label)).unwrap().id);
    let all = "/repos/acme/app/actions/runs/5/rerun-failed-jobs";
    let one = |id: u64| format!("/repos/acme/app/actions/jobs/{id}/rerun");
    bed.github.give_up_job(bad);
    for (path, message) in [
        (all.to_owned(), "This workflow is already running"),
        (one(bad), "The workflow run containing this job is already running"),
    ] {
        let early = bed.post(&path, json!({})).await;
        assert_eq!((early.status, early.message()), (403, message));
    }
    bed.github.finish_job(good, Conclusion::Success);
    bed.github.finish_job(worse, Conclusion::Cancelled);
    assert_eq!(bed.get("/repos/acme/app/actions/runs/5").await.body["run_attempt"], 1);

    assert_eq!(bed.post(all, json!({})).await.status, 201);
    let run = bed.get("/repos/acme/app/actions/runs/5").await.body;
    assert_eq!((&run["status"], &run["run_attempt"]), (&json!("queued"), &json!(2)));
    let jobs = async |query: &str| bed.get(&format!("/repos/acme/app/actions/runs/5/jobs?{query}")).await.body;
    let latest = jobs("filter=latest").await;
    let seen: Vec<_> =
        latest["jobs"].as_array().unwrap().iter().map(|job| (&job["status"], &job["run_attempt"])).collect();
    let (done, queued) = (json!("completed"), json!("queued"));
    assert_eq!(seen, [(&done, &json!(1)), (&queued, &json!(2)), (&queued, &json!(2))]);
    assert_eq!(jobs("filter=all").await["total_count"], 5);

    for job in latest["jobs"].as_array().unwrap() {
        bed.github.finish_job(job["id"].as_u64().unwrap(), Conclusion::Success);
    }
    assert_eq!(bed.get("/repos/acme/app/actions/runs/5").await.body["conclusion"], "success");
    let nothing = bed.post(all, json!({})).await;
    assert_eq!((nothing.status, nothing.message()), (403, "This workflow run cannot be retried"));
    assert_eq!(bed.post(&one(good), json!({})).await.status, 201);
    assert_eq!(bed.get("/repos/acme/app/actions/runs/5").await.body["run_attempt"], 3);

    let bed = bed.read_only().await;
    let denied = bed.post(&one(good), json!({})).await;
    assert_eq!((denied.status, denied.message()), (403, "Resource not accessible by integration"));
    bed.finish().await;
}
