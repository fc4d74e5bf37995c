//! Webhooks: what GitHub tells becomes claims, whoever hears it, in whatever order, and also when nobody could.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use kube::api::ListParams;
use paddock::api::{
    ANNOTATION_JOB_RUNNER, ANNOTATION_JOB_STATE, ANNOTATION_RUN_STATE, ClaimPhase, OwnerType, RunnerClaim, RunnerPool,
};
use paddock_bed::{
    github::{App, HookSource, JobRequest, signature},
    stage::WEBHOOK_SECRET,
};
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::{
    ec2::{clean_up, is_ready},
    support::{DEADLINE, World},
};

/// Owners of their own: nobody else's jobs are told of.
const ORGANIZATION: &str = "hooked";
const PERSON: &str = "hooked-person";
const REPOSITORY: &str = "rocket";
const CREDENTIALS: &str = "hooked-app";

/// The one App whose webhook goes to the operator.
static APP: OnceCell<App> = OnceCell::const_new();

async fn app(world: &World) -> Result<&'static App> {
    APP.get_or_try_init(async || {
        let github = &world.stage.github;
        github.organization(ORGANIZATION);
        github.user(PERSON);
        let app = github.app("hooked");
        for owner in [ORGANIZATION, PERSON] {
            github.repository(owner, REPOSITORY, true)?;
            github.install(app.id, owner)?;
        }
        github.hook(HookSource::App(app.id), &format!("{}/webhook", world.url()), WEBHOOK_SECRET);
        Ok(app)
    })
    .await
}

/// A namespace with a board pool of its own. No node has its board, so that its claims do nothing but wait.
struct Hooked<'a> {
    world: &'a World,
    namespace: String,
    label: String,
}

impl<'a> Hooked<'a> {
    async fn new(world: &'a World) -> Result<Self> {
        let app = app(world).await?;
        let namespace = world.namespace().await?;
        let label = format!("rv-{namespace}");
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": CREDENTIALS, "namespace": namespace },
            "stringData": { "github_app_id": app.id.to_string(), "github_app_private_key": app.private_key },
        });
        world.stage.kube.apply(&secret.to_string()).await?;
        let pool = json!({
            "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerPool",
            "metadata": { "name": "boards", "namespace": namespace },
            "spec": { "board": {
                "board": "nowhere", "labels": [["Board", label]], "image": "none",
                "github": { "credentialsRef": { "name": CREDENTIALS } },
            } },
        });
        world.stage.kube.apply(&pool.to_string()).await?;
        let hooked = Self { world, namespace, label };
        let seen = |pool: &RunnerPool| pool.status.as_ref().is_some_and(|status| !status.conditions.is_empty());
        world.until::<RunnerPool>(&hooked.namespace, "boards", "seen by the operator", seen).await?;
        Ok(hooked)
    }

    fn request(&self, owner: &str) -> JobRequest {
        let labels = vec![self.label.to_uppercase(), "board".into()];
        JobRequest { owner: owner.into(), repo: REPOSITORY.into(), labels, ..JobRequest::default() }
    }

    fn job(&self) -> Result<u64> {
        Ok(self.world.stage.github.queue_job(self.request(ORGANIZATION))?.id)
    }

    async fn until_told(&self, job: u64, state: &str) -> Result<RunnerClaim> {
        let told = |claim: &RunnerClaim| said(claim, ANNOTATION_JOB_STATE) == Some(state);
        self.world.until(&self.namespace, &format!("job-{job}"), state, told).await
    }

    /// Tells the operator of a job, event by event, and gives its answers; `None` where one of them is not known.
    async fn tell(&self, job: u64, actions: [&str; 4]) -> Option<Vec<String>> {
        let mut texts = Vec::new();
        for action in actions {
            let body = self.body(job, action).to_string();
            let signature = signature(WEBHOOK_SECRET, body.as_bytes());
            let (status, text) = post_once(&self.world.url(), body.as_bytes(), &headers(&signature)).await?;
            texts.push(format!("{status} {text}"));
        }
        Some(texts)
    }

    /// Whether the operator at `url` takes a job's event in that is signed with this secret.
    async fn is_trusted(&self, url: &str, secret: &str, job: u64) -> Result<bool> {
        let (status, text) = signed(self.world, url, secret, &self.body(job, "queued")).await?;
        ensure!(status == StatusCode::OK || status == StatusCode::UNAUTHORIZED, "{status} {text}");
        Ok(status == StatusCode::OK)
    }

    async fn claims(&self) -> Result<BTreeMap<String, RunnerClaim>> {
        let claims = self.world.api::<RunnerClaim>(&self.namespace).list(&ListParams::default()).await?;
        Ok(claims.items.into_iter().filter_map(|claim| Some((claim.metadata.name.clone()?, claim))).collect())
    }

    /// The body of an event of a job that the simulator does not know.
    fn body(&self, job: u64, action: &str) -> Value {
        let runner = action != "queued";
        json!({
            "action": action,
            "workflow_job": {
                "id": job, "run_id": 1, "name": "line\nbreak \u{202e}$(id)", "labels": [self.label, "BOARD"],
                "html_url": "https://github.com/x", "runner_id": runner.then_some(5), "runner_name": runner.then_some("r/1"),
            },
            "repository": {
                "id": 3, "name": REPOSITORY, "owner": { "id": 2, "login": ORGANIZATION, "type": "Organization" },
            },
        })
    }
}

fn said<'a>(claim: &'a RunnerClaim, annotation: &str) -> Option<&'a str> {
    claim.metadata.annotations.as_ref()?.get(annotation).map(String::as_str)
}

fn is_completed(claim: &RunnerClaim) -> bool {
    claim.status.as_ref().and_then(|status| status.phase) == Some(ClaimPhase::Completed)
}

type Header<'a> = (&'a str, &'a str);
type Answer = (StatusCode, String);

/// Posts a body as GitHub does, or almost. `None` where it was not taken in and not refused for good either, as when the
/// operator has just been replaced; it may have been written or not.
async fn post_once(url: &str, body: &[u8], headers: &[Header<'_>]) -> Option<Answer> {
    let mut request = reqwest::Client::new().post(format!("{url}/webhook")).body(body.to_vec());
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = request.send().await.ok()?;
    let answer = (answer.status(), answer.text().await.ok()?);
    (answer.0 != StatusCode::SERVICE_UNAVAILABLE).then_some(answer)
}

/// Posts until there is an answer.
async fn post(world: &World, url: &str, body: &[u8], headers: &[Header<'_>]) -> Result<Answer> {
    let mut answer = None;
    world
        .until_true("the webhook is answered", async || {
            answer = post_once(url, body, headers).await;
            Ok(answer.is_some())
        })
        .await?;
    answer.context("it was there")
}

/// The headers of a job's event, with this signature.
fn headers(signature: &str) -> [Header<'_>; 3] {
    [("content-type", "application/json"), ("x-github-event", "workflow_job"), ("x-hub-signature-256", signature)]
}

async fn signed(world: &World, url: &str, secret: &str, body: &Value) -> Result<Answer> {
    let body = body.to_string();
    let signature = signature(secret, body.as_bytes());
    post(world, url, body.as_bytes(), &headers(&signature)).await
}

async fn metrics(url: &str) -> Result<String> {
    Ok(reqwest::get(format!("{url}/metrics")).await?.text().await?)
}

/// What GitHub sends becomes a claim with all that it says, for organisations and for people; and a job that waits for
/// approval asks for nothing until it is approved.
pub async fn a_queued_job_becomes_a_claim(world: &World) -> Result<()> {
    let hooked = Hooked::new(world).await?;
    let github = &world.stage.github;
    let waiting = github.queue_job(JobRequest { waiting: true, ..hooked.request(ORGANIZATION) })?.id;
    let job = github.queue_job(hooked.request(ORGANIZATION))?;
    let claim = hooked.until_told(job.id, "queued").await?;
    let (owner, spec) = (github.organization(ORGANIZATION), &claim.spec);
    ensure!(spec.labels.as_deref() == Some(&[hooked.label.to_uppercase(), "board".into()]), "{spec:?}");
    ensure!(spec.run_id == job.run_id.to_string() && spec.pool.is_none(), "{spec:?}");
    ensure!(spec.repository.as_deref() == Some("hooked/rocket") && spec.installation_id.is_some(), "{spec:?}");
    ensure!(spec.owner.as_ref().map(|it| (it.id, it.type_)) == Some((owner.id as i64, OwnerType::Organization)));
    ensure!(spec.job.as_ref().and_then(|it| it.name.as_deref()) == Some("build"), "{spec:?}");
    ensure!(!hooked.claims().await?.contains_key(&format!("job-{waiting}")), "what waits asks for nothing");

    github.approve_job(waiting);
    hooked.until_told(waiting, "queued").await?;
    let personal = github.queue_job(hooked.request(PERSON))?;
    let claim = hooked.until_told(personal.id, "queued").await?;
    let repository = github.repository(PERSON, REPOSITORY, true)?;
    ensure!(claim.spec.entity() == Some(repository.id.to_string()), "a person's runners are the repository's");

    github.cancel_job(job.id);
    hooked.until_told(job.id, "completed").await?;
    let name = format!("job-{}", job.id);
    world.until::<RunnerClaim>(&hooked.namespace, &name, "Completed", is_completed).await?;
    ensure!(hooked.claims().await?.len() == 3, "one claim a job: {:?}", hooked.claims().await?.keys());
    ensure!(!world.operator_log().contains(WEBHOOK_SECRET), "I10: the secret is in no log");
    Ok(())
}

/// I9: whatever is not signed by GitHub, or is not what GitHub sends, is refused with its reason and changes nothing.
pub async fn i9_forged_and_broken_webhooks_change_nothing(world: &World) -> Result<()> {
    let hooked = Hooked::new(world).await?;
    let url = world.url();
    let body = hooked.body(900_001, "queued").to_string();
    let (right, sha1) = (signature(WEBHOOK_SECRET, body.as_bytes()), "sha1=01dc10d0c83e72ed246219cdd91669667fe2ca59");
    let wrong = signature("not the secret", body.as_bytes());
    let (json, event) = (("content-type", "application/json"), ("x-github-event", "workflow_job"));
    let by = |signature| ("x-hub-signature-256", signature);
    let altered = body.replace("900001", "900002");
    let long = format!("{body}{}", " ".repeat(5 << 20));
    let signed_long = signature(WEBHOOK_SECRET, long.as_bytes());
    let (form, deep) = ("payload=%7B%7D", format!("{{\"action\":{}", "[".repeat(100_000)));
    let (signed_form, signed_deep) =
        (signature(WEBHOOK_SECRET, form.as_bytes()), signature(WEBHOOK_SECRET, deep.as_bytes()));
    let form_type = ("content-type", "application/x-www-form-urlencoded");
    let cases: &[(&str, &str, &[Header<'_>], StatusCode, &str)] = &[
        ("not signed", &body, &[json, event], StatusCode::UNAUTHORIZED, "X-Hub-Signature-256 is missing"),
        ("signed with SHA-1", &body, &[json, event, ("x-hub-signature", sha1)], StatusCode::UNAUTHORIZED, "SHA-1"),
        (
            "half a signature",
            &body,
            &[json, event, by(&right[..40])],
            StatusCode::UNAUTHORIZED,
            "64 hexadecimal digits",
        ),
        ("another's secret", &body, &[json, event, by(&wrong)], StatusCode::UNAUTHORIZED, "not signed with a secret"),
        ("altered", &altered, &[json, event, by(&right)], StatusCode::UNAUTHORIZED, "not signed with a secret"),
        ("too long", &long, &[json, event, by(&signed_long)], StatusCode::PAYLOAD_TOO_LARGE, "longer than"),
        ("a form", form, &[form_type, event, by(&signed_form)], StatusCode::UNSUPPORTED_MEDIA_TYPE, "application/json"),
        ("deep", &deep, &[json, event, by(&signed_deep)], StatusCode::BAD_REQUEST, "not what GitHub sends"),
        ("no event", &body, &[json, by(&right)], StatusCode::BAD_REQUEST, "X-GitHub-Event"),
        ("another event", &body, &[json, ("x-github-event", "push"), by(&right)], StatusCode::OK, "ignored"),
        ("a ping", &body, &[json, ("x-github-event", "ping"), by(&right)], StatusCode::OK, "pong"),
    ];
    let other = json!(hooked.body(900_001, "queued").to_string().replace(&hooked.label, "somebody-elses"));
    let other: Value = serde_json::from_str(other.as_str().unwrap_or_default())?;
    // An operator that is replaced meanwhile takes along what it has counted: then all of it comes again.
    let counted = ["wrong_signature", "sha1_signature", "too_large", "malformed", "no_pool", "other_event", "ping"];
    let all_counted = async || {
        for (what, body, headers, status, words) in cases {
            let (answered, text) =
                post(world, &url, body.as_bytes(), headers).await.with_context(|| (*what).to_owned())?;
            ensure!(answered == *status && text.contains(words), "{what}: {answered} {text}");
            ensure!(!text.contains(&right[7..]) && !text.contains(WEBHOOK_SECRET), "{what} tells a secret: {text}");
        }
        let claims = hooked.claims().await?;
        ensure!(claims.is_empty(), "nothing was made: {:?}", claims.keys());
        let (status, text) = signed(world, &url, WEBHOOK_SECRET, &other).await?;
        let ignored = text.contains("no board pool serves exactly these labels");
        ensure!(status == StatusCode::OK && ignored, "{status} {text}");
        let metrics = metrics(&url).await.unwrap_or_default();
        Ok(counted.iter().all(|reason| metrics.contains(&format!("reason=\"{reason}\""))))
    };
    world.until_true("each refusal is counted", all_counted).await
}

/// I6, I9: the end that comes first wins, and what comes again or late changes nothing.
pub async fn i6_i9_order_and_repetition_do_not_matter(world: &World) -> Result<()> {
    let hooked = Hooked::new(world).await?;
    let url = world.url();
    let mut jobs = 910_001..;
    let mut whole = Vec::new();
    for (actions, answers) in [
        (["completed", "queued", "in_progress", "completed"], ["made", "nothing new", "nothing new", "nothing new"]),
        (["in_progress", "queued", "completed", "queued"], ["made", "nothing new", "told", "nothing new"]),
        (["queued", "queued", "in_progress", "completed"], ["made", "nothing new", "told", "told"]),
    ] {
        // What an answer that was lost said is not known: then another job begins from the start.
        let mut told = None;
        let one_by_one = async || {
            let job = jobs.next().context("a number")?;
            told = hooked.tell(job, actions).await.map(|texts| (job, texts));
            Ok(told.is_some())
        };
        world.until_true("the events of a job are taken in one after the other", one_by_one).await?;
        let (job, texts) = told.context("it was there")?;
        for (text, words) in texts.iter().zip(answers) {
            ensure!(text.starts_with("200") && text.contains(words), "{job} {actions:?}: {texts:?}");
        }
        whole.push(format!("job-{job}"));
        let claim = hooked.until_told(job, "completed").await?;
        ensure!(said(&claim, ANNOTATION_JOB_RUNNER) == Some("5/r/1"), "{claim:?}");
        let name = claim.spec.job.as_ref().and_then(|job| job.name.as_deref());
        ensure!(name == Some("line\nbreak \u{202e}$(id)"), "a name is data: {name:?}");
    }
    let job = jobs.next().context("a number")?;
    let bodies: Vec<_> = ["queued", "in_progress", "completed"].map(|action| hooked.body(job, action)).into();
    let all = (0..30).map(|index| signed(world, &url, WEBHOOK_SECRET, &bodies[index % 3]));
    for answer in futures::future::try_join_all(all).await? {
        ensure!(answer.0 == StatusCode::OK, "{answer:?}");
    }
    hooked.until_told(job, "completed").await?;
    whole.push(format!("job-{job}"));
    let tried: Vec<_> = (910_001..=job).map(|job| format!("job-{job}")).collect();
    let claims = hooked.claims().await?;
    ensure!(whole.iter().all(|name| claims.contains_key(name)), "each job has a claim: {:?}", claims.keys());
    ensure!(claims.keys().all(|name| tried.contains(name)), "one claim a job: {:?}", claims.keys());
    Ok(())
}

/// A replica that does not lead takes webhooks in, and its secrets change while it runs.
pub async fn a_follower_takes_webhooks_and_secrets_rotate(world: &World) -> Result<()> {
    let hooked = Hooked::new(world).await?;
    let file = world.stage.dir().join("follower-secrets");
    std::fs::write(&file, "old\n")?;
    let arguments = ["--webhook-secret-file", &file.to_string_lossy()];
    let mut jobs = 920_001..920_006;
    let (follower, job) = loop {
        let job = jobs.next().context("one of the replicas does not lead")?;
        let follower = world.stage.operator("follower", &arguments).await?;
        ensure!(!hooked.is_trusted(&follower.url(), "new", job).await?);
        ensure!(!hooked.claims().await?.contains_key(&format!("job-{job}")));
        ensure!(hooked.is_trusted(&follower.url(), "old", job).await?);
        hooked.until_told(job, "queued").await?;
        if metrics(&follower.url()).await?.contains("paddock_leading 0.0") {
            break (follower, job);
        }
        // The leader lost its lease to this one, of all times: another one follows.
        follower.stop().await?;
    };
    let url = follower.url();
    let trusts = async |secret: &str| -> Result<bool> { hooked.is_trusted(&url, secret, job).await };

    std::fs::write(&file, "old\nnew\n")?;
    world.until_true("the second secret counts", async || trusts("new").await).await?;
    ensure!(trusts("old").await?, "both count");
    std::fs::write(&file, "new\n")?;
    world.until_true("the first secret does not count any more", async || Ok(!trusts("old").await?)).await?;
    std::fs::write(&file, "")?;
    let noticed = async || {
        ensure!(trusts("new").await?, "an empty file changes nothing");
        Ok(follower.log().contains("the last good ones hold"))
    };
    world.until_true("it noticed the empty file", noticed).await?;
    ensure!(!trusts("old").await? && !trusts("").await?, "an empty file opens no door");
    follower.stop().await?;
    Ok(())
}

/// FAULTS 19: what nobody could hear is read from the log of deliveries by the next leader.
pub async fn webhooks_lost_while_nobody_listens_are_found(world: &World) -> Result<()> {
    let hooked = Hooked::new(world).await?;
    let github = &world.stage.github;
    world.kill_operator()?;
    let (waits, over) = (hooked.job()?, hooked.job()?);
    github.cancel_job(over);
    // Others' deliveries may have failed before.
    let ids = [waits, over].map(|job| format!("\"id\":{job},"));
    let failed = || {
        let deliveries = github.deliveries();
        let own =
            deliveries.iter().filter(|it| it.event == "workflow_job" && ids.iter().any(|id| it.body.contains(id)));
        own.filter(|it| it.outcome.as_ref().is_some_and(|it| it.status_code == 502)).count()
    };
    world.until_true("GitHub gave up", async || Ok(failed() >= 3)).await?;
    world.start_operator().await?;
    hooked.until_told(waits, "queued").await?;
    hooked.until_told(over, "completed").await?;
    ensure!(hooked.claims().await?.len() == 2);
    // A claim is there a moment before it is counted.
    let made = "source=\"log\",outcome=\"accepted\",reason=\"claim_made\"";
    let counted = async || Ok(metrics(&world.url()).await.is_ok_and(|metrics| metrics.contains(made)));
    world.until_true("claims were made from the log", counted).await
}

/// FAULTS 23: while the API server is away deliveries fail, which GitHub's log remembers; nothing is lost.
pub async fn webhooks_wait_for_the_api_server(world: &World) -> Result<()> {
    let hooked = Hooked::new(world).await?;
    let github = &world.stage.github;
    world.stage.kube.stop_apiserver().await;
    let job = hooked.job()?;
    let refused = || {
        let deliveries = github.deliveries();
        let of_job = deliveries.iter().find(|delivery| delivery.body.contains(&format!("\"id\":{job},")));
        of_job.and_then(|delivery| delivery.outcome.as_ref()).is_some_and(|outcome| outcome.status_code >= 500)
    };
    let start = std::time::Instant::now();
    while !refused() {
        ensure!(start.elapsed() < DEADLINE, "the delivery fails: {:?}", github.deliveries().last());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    world.stage.kube.start_apiserver().await?;
    hooked.until_told(job, "queued").await?;
    Ok(())
}

/// The end of a run is told by a webhook too, and gives back the machine that was claimed for it.
pub async fn the_end_of_a_run_releases_its_machine(world: &World) -> Result<()> {
    let hooked = Hooked::new(world).await?;
    let namespace = &hooked.namespace;
    let github = json!({ "owner": ORGANIZATION, "credentialsRef": { "name": CREDENTIALS } });
    let pool = world.stage.ec2_pool(namespace, "linux", json!({ "github": github, "maxInstances": 1 }));
    world.stage.kube.apply(&pool.to_string()).await?;
    let job =
        world.stage.github.queue_job(JobRequest { labels: vec!["run".into()], ..hooked.request(ORGANIZATION) })?;
    let claim = world.stage.claim(namespace, "build", "linux", &job.run_id.to_string(), 1);
    world.stage.kube.apply(&claim.to_string()).await?;
    world.until::<RunnerClaim>(namespace, "build", "Ready", is_ready).await?;
    world.stage.github.cancel_job(job.id);
    let over = |claim: &RunnerClaim| said(claim, ANNOTATION_RUN_STATE) == Some("completed") && is_completed(claim);
    world.until::<RunnerClaim>(namespace, "build", "told of the run's end, and Completed", over).await?;
    let pooled = |pool: &RunnerPool| pool.status.as_ref().is_some_and(|status| status.workers.idle == 1);
    world.until::<RunnerPool>(namespace, "linux", "warm", pooled).await?;
    clean_up(world, namespace, "linux").await
}
