//! Tests the client against the simulator. The end-to-end tests check its requests against GitHub's published API.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use paddock_bed_github::{Conclusion, Effect, Fault, GitHub as Simulator, JobRequest, Options};
use secrecy::ExposeSecret;

use super::{super::credentials::Auth, *};

const JIT: &str = "/orgs/{org}/actions/runners/generate-jitconfig";
const TOKENS: &str = "/app/installations/{installation_id}/access_tokens";

struct Stage {
    simulator: Simulator,
    github: GitHub,
    app: Credentials,
    fence: Fence,
    scope: Scope,
}

async fn stage() -> Stage {
    stage_at(Simulator::start(Options::default()).await.unwrap())
}

fn stage_at(simulator: Simulator) -> Stage {
    simulator.organization("acme");
    simulator.repository("acme", "hello", false).unwrap();
    let app = simulator.app("paddock");
    simulator.install(app.id, "acme").unwrap();
    let key = octocrab::auth::EncodingKey::from_rsa_pem(app.private_key.as_bytes()).unwrap();
    let auth = Auth::App { id: app.id.into(), key, installation: None };
    let fence = Fence::default();
    fence.open_until(Instant::now() + Duration::from_secs(600));
    let github = GitHub::new(&simulator.api_url(), fence.clone());
    let app = Credentials { auth, fingerprint: "app".into() };
    Stage { simulator, github, app, fence, scope: Scope::Organization("acme".into()) }
}

impl Stage {
    async fn jit(&self, name: &str) -> Result<JitConfig, GitHubError> {
        self.github.create_jit_config(&self.app, &self.scope, name, &["rv".into()], Some("Boards")).await
    }

    async fn remove(&self, name: &str) -> Result<Removal, GitHubError> {
        self.github.remove_runner(&self.app, &self.scope, name).await
    }

    fn fail(&self, method: &str, path: &str, effect: Effect) {
        self.simulator.fault(Fault::new(method, path, effect).times(1));
    }
}

#[tokio::test]
async fn one_token_and_one_group_serve_many_runners_at_once() {
    let stage = stage().await;
    let names = ["a", "b", "c", "d"];
    let made = futures::future::join_all(names.map(|name| stage.jit(name))).await;
    assert!(made.iter().all(Result::is_ok), "{made:?}");
    assert_eq!(stage.simulator.count("POST", TOKENS), 1);
    assert_eq!(stage.simulator.count("POST", "/orgs/{org}/actions/runner-groups"), 1);
    assert_eq!(stage.simulator.runners().len(), 4);
    assert!(!format!("{made:?}").contains(made[0].as_ref().unwrap().encoded.expose_secret()));
}

#[tokio::test]
async fn a_taken_name_is_detected_and_can_be_freed() {
    let stage = stage().await;
    stage.jit("a").await.unwrap();
    assert_eq!(stage.jit("a").await.unwrap_err(), GitHubError::NameTaken);
    assert_eq!(stage.remove("a").await, Ok(Removal::Deleted));
    assert_eq!(stage.remove("a").await, Ok(Removal::Gone));
    stage.jit("a").await.unwrap();
}

#[tokio::test]
async fn a_lost_answer_is_not_repeated_and_leaves_the_name_taken() {
    let stage = stage().await;
    stage.fail("POST", "/orgs/acme/actions/runners/generate-jitconfig", Effect::LostResponse);
    assert!(matches!(stage.jit("a").await, Err(GitHubError::Unavailable(_))));
    assert_eq!(stage.simulator.count("POST", JIT), 1);
    assert_eq!(stage.jit("a").await.unwrap_err(), GitHubError::NameTaken);
}

#[tokio::test]
async fn i5_a_failed_write_is_not_repeated_behind_the_fence() {
    for status in [429, 500, 503] {
        let stage = stage().await;
        let failure = Effect::Status { status, retry_after: None, reset_in: None };
        stage.fail("POST", "/orgs/acme/actions/runners/generate-jitconfig", failure);
        assert!(stage.jit("a").await.is_err(), "{status}");
        assert_eq!(stage.simulator.count("POST", JIT), 1, "{status}");
    }
}

#[tokio::test]
async fn a_busy_runner_stays() {
    let stage = stage().await;
    stage.jit("a").await.unwrap();
    stage.simulator.play_runner("a").unwrap();
    let request =
        JobRequest { owner: "acme".into(), repo: "hello".into(), labels: vec!["rv".into()], ..JobRequest::default() };
    let job = stage.simulator.queue_job(request).unwrap();
    let taken =
        stage.simulator.until_job(job.id, Duration::from_secs(120), |job| job.taken_by.is_some()).await.unwrap();
    let runner = stage.github.runner_by_name(&stage.app, &stage.scope, "a").await.unwrap().unwrap();
    assert!(runner.busy && runner.is_up());
    assert_eq!(stage.remove("a").await, Ok(Removal::Busy));
    let removed = stage.github.delete_runner(&stage.app, &stage.scope, runner.id).await;
    assert_eq!(removed, Ok(Removal::Busy), "also if it became busy after the check");
    let id = i64::try_from(taken.id).unwrap();
    let seen = stage.github.job(&stage.app, "acme/hello", id).await.unwrap();
    assert_eq!((seen.status.as_str(), seen.runner_name.as_deref()), ("in_progress", Some("a")));
}

#[tokio::test]
async fn a_rate_limit_pauses_that_installation_and_nobody_else() {
    let stage = stage().await;
    let limit = Effect::Status { status: 403, retry_after: Some(600), reset_in: None };
    stage.fail("GET", "/orgs/acme/actions/runners", limit);
    let before = Timestamp::now();
    let Err(GitHubError::RateLimited { until }) = stage.remove("a").await else { panic!("must be limited") };
    assert!(until >= before + jiff::SignedDuration::from_secs(600));
    let calls = stage.simulator.calls();
    assert_eq!(stage.remove("a").await, Err(GitHubError::RateLimited { until }));
    assert_eq!(stage.simulator.calls(), calls, "no request was sent");
    let other = Credentials { fingerprint: "other".into(), ..stage.app.clone() };
    assert_eq!(stage.github.remove_runner(&other, &stage.scope, "a").await, Ok(Removal::Gone));
}

#[tokio::test]
async fn a_refused_token_is_replaced_once() {
    let stage = stage().await;
    stage.remove("a").await.unwrap();
    stage.fail("GET", "/orgs/acme/actions/runners", Effect::Status { status: 401, retry_after: None, reset_in: None });
    assert_eq!(stage.remove("a").await, Ok(Removal::Gone));
    assert_eq!(stage.simulator.count("POST", TOKENS), 2);
}

#[tokio::test]
async fn the_runners_of_a_group_are_listed_page_by_page_with_a_token_that_expires_on_the_way() {
    let stage = stage().await;
    let list = |group: &'static str| stage.github.runners(&stage.app, &stage.scope, group);
    assert_eq!(list("Boards").await, Ok(vec![]), "the group does not exist yet");
    stage.jit("a").await.unwrap();
    let like = stage.simulator.runner("a").unwrap();
    for number in 0..150 {
        stage.simulator.add_runner(&like, &format!("r{number}"));
    }
    let expired = Effect::Status { status: 401, retry_after: None, reset_in: None };
    let path = "/orgs/acme/actions/runner-groups/*/runners";
    stage.simulator.fault(Fault { skip: 1, ..Fault::new("GET", path, expired).times(1) });
    assert_eq!(list("Boards").await.unwrap().len(), 151);
    assert_eq!(list("Default").await, Ok(vec![]), "other groups are not ours");
}

#[tokio::test]
async fn the_last_tenth_of_the_limit_is_kept_for_urgent_calls() {
    let simulator = Simulator::start(Options { hourly_limit: 50, ..Options::default() }).await.unwrap();
    let stage = stage_at(simulator);
    let mut made = 0;
    let until = loop {
        match stage.github.job(&stage.app, "acme/hello", 1).await {
            Err(GitHubError::NotFound(_)) => made += 1,
            Err(GitHubError::RateLimited { until }) => break until,
            other => panic!("{other:?}"),
        }
    };
    assert!((40..50).contains(&made), "{made} calls");
    assert!(until > Timestamp::now());
    stage.jit("a").await.expect("creating a runner is urgent");
}

#[tokio::test]
async fn an_owner_that_gets_no_answer_is_left_alone_for_a_while_and_others_are_served() {
    let stage = stage().await;
    let limit = super::super::concurrency::Concurrency::new().owner_limit("app", &stage.scope);
    let timed_out = async || limit.run(async { Err::<(), _>(GitHubError::NoAnswer(Duration::ZERO)) }).await;
    let Err(GitHubError::NoAnswer(pause)) = timed_out().await else { panic!("no answer") };
    assert_eq!(pause, Duration::from_secs(5));
    let skipped = limit.run(async { Ok(()) }).await;
    assert!(matches!(skipped, Err(GitHubError::NoAnswer(_))), "no request is sent meanwhile");
    stage.jit("b").await.unwrap();
}

#[tokio::test]
async fn without_the_lease_nothing_is_written() {
    let stage = stage().await;
    stage.remove("a").await.unwrap();
    stage.fence.close();
    assert!(matches!(stage.jit("a").await, Err(GitHubError::Fenced(_))));
    assert_eq!(stage.remove("a").await, Ok(Removal::Gone), "reads are allowed");
    assert!(stage.simulator.runners().is_empty());
}

#[tokio::test]
async fn an_owner_without_the_app_gets_a_clear_error() {
    let stage = stage().await;
    stage.simulator.organization("other");
    let scope = Scope::Organization("other".into());
    let error = stage.github.registration_token(&stage.app, &scope).await.unwrap_err();
    assert_eq!(error, GitHubError::NoInstallation("the App is not installed for other".into()));
    assert!(error.is_final());
}

#[tokio::test]
async fn a_token_of_a_person_and_a_repository_work_too() {
    let stage = stage().await;
    stage.simulator.user("octo");
    stage.simulator.repository("octo", "hello", true).unwrap();
    let token = stage.simulator.personal_token(&["octo"]);
    let token = Credentials { auth: Auth::Token(token.into()), fingerprint: "token".into() };
    let scope = Scope::Repository { owner: "octo".into(), name: "hello".into() };
    let jit = stage.github.create_jit_config(&token, &scope, "a", &["rv".into()], Some("Boards")).await.unwrap();
    assert_eq!(stage.github.delete_runner(&token, &scope, jit.runner_id).await, Ok(Removal::Deleted));
    stage.github.registration_token(&token, &scope).await.unwrap();
    stage.github.remove_token(&token, &scope).await.unwrap();
}

#[tokio::test]
async fn i8_a_busy_runner_is_not_called_gone_because_its_installation_is() {
    let stage = stage().await;
    let installation = stage.simulator.install(stage.app.app().unwrap(), "acme").unwrap();
    stage.simulator.uninstall(installation - 1);
    for pinned in [Some(i64::try_from(installation).unwrap()), None] {
        let app = stage.app.clone().for_installation(pinned);
        let name = format!("r{}", pinned.is_some());
        let jit =
            stage.github.create_jit_config(&app, &stage.scope, &name, &["rv".into()], Some("Boards")).await.unwrap();
        let delete = async || stage.github.delete_runner(&app, &stage.scope, jit.runner_id).await;
        let current = stage.simulator.installation_of("acme").unwrap();
        stage.simulator.suspend(current, true);
        let suspended = delete().await.unwrap_err();
        assert!(suspended.to_string().contains("suspended"), "{suspended}");
        stage.simulator.suspend(current, false);
        stage.simulator.uninstall(current);
        let gone = delete().await.unwrap_err();
        assert!(gone.to_string().contains("the App is not installed for acme"), "{gone}");
        stage.simulator.install(stage.app.app().unwrap(), "acme").unwrap();
        assert_eq!(delete().await, Ok(Removal::Deleted), "the new installation is found");
        assert_eq!(delete().await, Ok(Removal::Gone));
    }
}

#[tokio::test]
async fn a_wrong_installation_id_is_looked_up() {
    let stage = stage().await;
    stage.simulator.organization("other");
    let other = stage.simulator.install(stage.app.app().unwrap(), "other").unwrap();
    for wrong in [other, 1] {
        let app = stage.app.clone().for_installation(i64::try_from(wrong).ok());
        let github = GitHub::new(&stage.simulator.api_url(), stage.fence.clone());
        let name = format!("r{wrong}");
        let jit = github.create_jit_config(&app, &stage.scope, &name, &["rv".into()], Some("Boards")).await.unwrap();
        assert_eq!(github.delete_runner(&app, &stage.scope, jit.runner_id).await, Ok(Removal::Deleted));
    }
}

#[tokio::test]
async fn a_404_is_about_the_runner_or_the_job_only_if_the_rest_is_seen() {
    let stage = stage().await;
    let jit = stage.jit("a").await.unwrap();
    let request = JobRequest { owner: "acme".into(), repo: "hello".into(), ..JobRequest::default() };
    let job = i64::try_from(stage.simulator.queue_job(request).unwrap().id).unwrap();
    let asked = async || stage.github.job(&stage.app, "acme/hello", job).await;
    asked().await.unwrap();
    assert!(matches!(stage.github.job(&stage.app, "acme/hello", 7).await, Err(GitHubError::NotFound(_))));
    stage.simulator.restrict(stage.simulator.installation_of("acme").unwrap(), None, Some(vec![]));
    let hidden = asked().await.unwrap_err();
    assert!(hidden.to_string().contains("repository acme/hello"), "{hidden}");
    stage.simulator.rename_owner("acme", "apex");
    let renamed = stage.github.delete_runner(&stage.app, &stage.scope, jit.runner_id).await;
    assert!(renamed.is_err(), "{renamed:?}");
}

#[tokio::test]
async fn renamed_repositories_are_followed_and_other_hosts_are_not() {
    let stage = stage().await;
    let scope = Scope::Repository { owner: "acme".into(), name: "hello".into() };
    let jit = stage.github.create_jit_config(&stage.app, &scope, "a", &["rv".into()], None).await.unwrap();
    stage.simulator.rename_repository("acme", "hello", "goodbye");
    assert!(stage.github.runner_by_name(&stage.app, &scope, "a").await.unwrap().is_some());
    assert_eq!(stage.github.delete_runner(&stage.app, &scope, jit.runner_id).await, Ok(Removal::Deleted));
    let other = Simulator::start(Options::default()).await.unwrap();
    let here = stage.simulator.api_url();
    for (status, location, follows) in [
        (301, format!("{here}/orgs/acme/actions/runners"), true),
        (307, "/api/v3/orgs/acme/actions/runners".to_owned(), true),
        (308, format!("{here}/orgs/acme/actions/runners"), true),
        (308, format!("{}/orgs/acme/actions/runners", other.api_url()), false),
        (302, format!("{}.evil.example/x", stage.simulator.html_url()), false),
    ] {
        stage.fail("GET", "/orgs/acme/actions/runners", Effect::Redirect { status, location: location.clone() });
        let listed = stage.github.runner_by_name(&stage.app, &stage.scope, "a").await;
        assert_eq!(listed.is_ok(), follows, "{status} {location}: {listed:?}");
    }
    assert_eq!(other.calls(), [], "no token goes to another host");
}

#[tokio::test]
async fn an_answer_that_nobody_expects_does_not_mean_busy() {
    let stage = stage().await;
    for status in [400, 410, 418, 451] {
        let jit = stage.jit("a").await.unwrap();
        let odd = Effect::Status { status, retry_after: None, reset_in: None };
        stage.fail("DELETE", "/orgs/acme/actions/runners/*", odd);
        let delete = async || stage.github.delete_runner(&stage.app, &stage.scope, jit.runner_id).await;
        let error = delete().await.unwrap_err();
        assert!(error.to_string().contains(&status.to_string()) && !error.is_final(), "{error}");
        assert_eq!(delete().await, Ok(Removal::Deleted));
    }
}

#[tokio::test]
async fn what_has_not_changed_is_read_for_free() {
    let simulator = Simulator::start(Options { hourly_limit: 20, ..Options::default() }).await.unwrap();
    let stage = stage_at(simulator);
    let request = JobRequest { owner: "acme".into(), repo: "hello".into(), ..JobRequest::default() };
    let job = stage.simulator.queue_job(request).unwrap().id;
    let asked = async || stage.github.job(&stage.app, "acme/hello", i64::try_from(job).unwrap()).await.unwrap().status;
    for _ in 0..40 {
        assert_eq!(asked().await, "queued");
    }
    stage.simulator.cancel_job(job);
    assert_eq!(asked().await, "completed");
}

#[test]
fn the_web_address_follows_from_the_api_address() {
    for (api, html) in [
        ("https://api.github.com", "https://github.com"),
        ("https://ghes.example/api/v3", "https://ghes.example"),
        ("http://127.0.0.1:9/api/v3/", "http://127.0.0.1:9"),
        ("https://api.acme.ghe.com", "https://acme.ghe.com"),
    ] {
        assert_eq!(html_url(api), html);
    }
}

#[tokio::test]
async fn failed_jobs_of_a_completed_run_run_again_and_githubs_refusals_are_told() {
    let stage = stage().await;
    let jobs: Vec<_> = (0..101)
        .map(|_| {
            let request =
                JobRequest { owner: "acme".into(), repo: "hello".into(), run_id: Some(7), ..JobRequest::default() };
            stage.simulator.queue_job(request).unwrap().id
        })
        .collect();
    let seen = async || stage.github.workflow_run(&stage.app, "acme/hello", 7).await.unwrap();
    let rerun = async |job| stage.github.rerun(&stage.app, "acme/hello", 7, job).await;
    jobs.iter().skip(2).for_each(|job| stage.simulator.finish_job(*job, Conclusion::Success));
    assert_eq!((seen().await.completed, seen().await.jobs.len()), (false, 101), "two pages");
    assert_eq!(rerun(None).await, Err(GitHubError::Forbidden("This workflow is already running".into())));
    jobs.iter().take(2).for_each(|job| stage.simulator.finish_job(*job, Conclusion::Failure));
    let run = seen().await;
    assert_eq!((run.completed, run.attempt), (true, 1));
    let failed: Vec<_> = run.jobs.iter().filter(|job| job.conclusion.as_deref() == Some("failure")).collect();
    assert!(failed.len() == 2 && failed.iter().all(|job| job.completed_at.is_some()));
    assert_eq!(rerun(Some(failed[0].id)).await, Ok(()));
    let run = seen().await;
    assert_eq!((run.completed, run.attempt, run.jobs.len()), (false, 2, 101));
    let waits = run.jobs.iter().find(|job| job.conclusion.is_none()).unwrap().id;
    stage.simulator.finish_job(waits.unsigned_abs(), Conclusion::Success);
    assert_eq!(rerun(None).await, Ok(()));
    assert_eq!(seen().await.attempt, 3);
}

#[tokio::test]
async fn the_list_of_runners_is_read_once_in_a_while_and_kept_while_github_is_down() {
    const DOWNLOADS: &str = "/orgs/{org}/actions/runners/downloads";
    let stage = stage().await;
    let list = async || stage.github.runner_list(&stage.app, &stage.scope).await;
    let first = list().await.unwrap();
    assert!(first.iter().any(|runner| runner.os == "linux" && runner.architecture == "arm64"), "{first:?}");
    assert_eq!(list().await.unwrap(), first);
    assert_eq!(stage.simulator.count("GET", DOWNLOADS), 1);

    let key = (stage.app.fingerprint.clone(), stage.scope.to_string());
    stage.github.runner_lists.expire(&key).await;
    assert_eq!(list().await.unwrap(), first, "it has not changed");
    assert_eq!(stage.simulator.count("GET", DOWNLOADS), 2);

    stage.simulator.list_runner("acme", "9.0.0", false);
    stage.github.runner_lists.expire(&key).await;
    stage.fail(
        "GET",
        "/orgs/acme/actions/runners/downloads",
        Effect::Status { status: 502, retry_after: None, reset_in: None },
    );
    assert_eq!(list().await.unwrap(), first, "the last one, while GitHub is down");
    let newest = list().await.unwrap();
    assert!(
        newest.iter().all(|runner| runner.filename.contains("9.0.0") && runner.sha256_checksum.is_none()),
        "{newest:?}"
    );
}
