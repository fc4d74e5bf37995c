//! Webhooks become claims, whichever replica receives them, in whatever order, and also if none could.

use anyhow::{Context, Result, ensure};
use paddock::api::{ANNOTATION_JOB_RUNNER, ANNOTATION_RUN_STATE, ClaimPhase, OwnerType, RunnerClaim};
use paddock_bed::{
    github::{JobRequest, signature},
    stage::WEBHOOK_SECRET,
    wait::{Check, Wait},
};
use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::fixture::{
    ec2_pool::Ec2Pool,
    webhook::{
        CREDENTIALS, Header, ORGANIZATION, PERSON, REPOSITORY, WebhookPool, annotation, is_completed, metrics, post,
        post_signed,
    },
    world::{DEADLINE, World},
};

/// A queued job becomes a claim with the job's data, for organisations and for people; a job that waits for approval
/// becomes one once it is approved.
pub async fn a_queued_job_becomes_a_claim(world: &World) -> Result<()> {
    let pool = WebhookPool::new(world).await?;
    let github = &world.stage.github;
    let waiting = github.queue_job(JobRequest { waiting: true, ..pool.request(ORGANIZATION) })?.id;
    let job = github.queue_job(pool.request(ORGANIZATION))?;
    let claim = pool.until_job_state(job.id, "queued").await?;
    let (owner, spec) = (github.organization(ORGANIZATION), &claim.spec);
    ensure!(spec.labels.as_deref() == Some(&[pool.label.to_uppercase(), "board".into()]), "{spec:?}");
    ensure!(spec.run_id == job.run_id.to_string() && spec.pool.is_none(), "{spec:?}");
    ensure!(spec.repository.as_deref() == Some("hooked/rocket") && spec.installation_id.is_some(), "{spec:?}");
    ensure!(spec.owner.as_ref().map(|it| (it.id, it.type_)) == Some((owner.id as i64, OwnerType::Organization)));
    ensure!(spec.job.as_ref().and_then(|it| it.name.as_deref()) == Some("build"), "{spec:?}");
    ensure!(
        !pool.claims().await?.contains_key(&format!("job-{waiting}")),
        "a job that waits for approval has no claim"
    );

    github.approve_job(waiting);
    pool.until_job_state(waiting, "queued").await?;
    let personal = github.queue_job(pool.request(PERSON))?;
    let claim = pool.until_job_state(personal.id, "queued").await?;
    let repository = github.repository(PERSON, REPOSITORY, true)?;
    ensure!(claim.spec.entity() == Some(repository.id.to_string()), "a person's entity is the repository");

    github.cancel_job(job.id);
    pool.until_job_state(job.id, "completed").await?;
    let name = format!("job-{}", job.id);
    world.until::<RunnerClaim>(&pool.namespace, &name, "Completed", is_completed).await?;
    ensure!(pool.claims().await?.len() == 3, "one claim per job: {:?}", pool.claims().await?.keys());
    ensure!(!world.operator_log().contains(WEBHOOK_SECRET), "I10: the secret is in no log");
    Ok(())
}

/// I9: a request that GitHub did not sign, or that is malformed, is refused with a reason and changes nothing.
pub async fn i9_forged_and_broken_webhooks_change_nothing(world: &World) -> Result<()> {
    let pool = WebhookPool::new(world).await?;
    let url = world.url();
    let body = pool.body(900_001, "queued").to_string();
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
        (
            "signed with another secret",
            &body,
            &[json, event, by(&wrong)],
            StatusCode::UNAUTHORIZED,
            "not signed with a secret",
        ),
        ("altered", &altered, &[json, event, by(&right)], StatusCode::UNAUTHORIZED, "not signed with a secret"),
        ("too long", &long, &[json, event, by(&signed_long)], StatusCode::PAYLOAD_TOO_LARGE, "longer than"),
        ("a form", form, &[form_type, event, by(&signed_form)], StatusCode::UNSUPPORTED_MEDIA_TYPE, "application/json"),
        ("deep", &deep, &[json, event, by(&signed_deep)], StatusCode::BAD_REQUEST, "not what GitHub sends"),
        ("no event", &body, &[json, by(&right)], StatusCode::BAD_REQUEST, "X-GitHub-Event"),
        ("another event", &body, &[json, ("x-github-event", "push"), by(&right)], StatusCode::OK, "ignored"),
        ("a ping", &body, &[json, ("x-github-event", "ping"), by(&right)], StatusCode::OK, "pong"),
    ];
    let other = json!(pool.body(900_001, "queued").to_string().replace(&pool.label, "unserved"));
    let other: Value = serde_json::from_str(other.as_str().unwrap_or_default())?;
    // Counters are lost if the operator restarts meanwhile: then every case is sent again.
    let counted = ["wrong_signature", "sha1_signature", "too_large", "malformed", "no_pool", "other_event", "ping"];
    let all_counted = async || {
        for (what, body, headers, status, words) in cases {
            let (answered, text) =
                post(world, &url, body.as_bytes(), headers).await.with_context(|| (*what).to_owned())?;
            ensure!(answered == *status && text.contains(words), "{what}: {answered} {text}");
            ensure!(
                !text.contains(&right[7..]) && !text.contains(WEBHOOK_SECRET),
                "{what}: the answer contains a secret: {text}"
            );
        }
        let claims = pool.claims().await?;
        ensure!(claims.is_empty(), "no claim is created: {:?}", claims.keys());
        let (status, text) = post_signed(world, &url, WEBHOOK_SECRET, &other).await?;
        let ignored = text.contains("no board pool serves exactly these labels");
        ensure!(status == StatusCode::OK && ignored, "{status} {text}");
        let metrics = metrics(&url).await.unwrap_or_default();
        Ok(counted.iter().all(|reason| metrics.contains(&format!("reason=\"{reason}\""))))
    };
    world.until_true("each refusal is counted", all_counted).await
}

/// I6, I9: the final state that comes first wins; repeated and late events change nothing.
pub async fn i6_i9_order_and_repetition_do_not_matter(world: &World) -> Result<()> {
    let pool = WebhookPool::new(world).await?;
    let url = world.url();
    let mut jobs = 910_001..;
    let mut whole = Vec::new();
    for (actions, answers) in [
        (["completed", "queued", "in_progress", "completed"], ["made", "nothing new", "nothing new", "nothing new"]),
        (["in_progress", "queued", "completed", "queued"], ["made", "nothing new", "told", "nothing new"]),
        (["queued", "queued", "in_progress", "completed"], ["made", "nothing new", "told", "told"]),
    ] {
        // If an answer is lost, its text is unknown: then the events are sent for another job.
        let one_by_one = async || {
            let job = jobs.next().context("a number")?;
            Ok(pool.send_events(job, actions).await.map(|texts| (job, texts)))
        };
        let (job, texts) = world.until_found("every event of a job is answered", one_by_one).await?;
        for (text, words) in texts.iter().zip(answers) {
            ensure!(text.starts_with("200") && text.contains(words), "{job} {actions:?}: {texts:?}");
        }
        whole.push(format!("job-{job}"));
        let claim = pool.until_job_state(job, "completed").await?;
        ensure!(annotation(&claim, ANNOTATION_JOB_RUNNER) == Some("5/r/1"), "{claim:?}");
        let name = claim.spec.job.as_ref().and_then(|job| job.name.as_deref());
        ensure!(name == Some("line\nbreak \u{202e}$(id)"), "a name is data: {name:?}");
    }
    let job = jobs.next().context("a number")?;
    let bodies: Vec<_> = ["queued", "in_progress", "completed"].map(|action| pool.body(job, action)).into();
    let all = (0..30).map(|index| post_signed(world, &url, WEBHOOK_SECRET, &bodies[index % 3]));
    for answer in futures::future::try_join_all(all).await? {
        ensure!(answer.0 == StatusCode::OK, "{answer:?}");
    }
    pool.until_job_state(job, "completed").await?;
    whole.push(format!("job-{job}"));
    let tried: Vec<_> = (910_001..=job).map(|job| format!("job-{job}")).collect();
    let claims = pool.claims().await?;
    ensure!(whole.iter().all(|name| claims.contains_key(name)), "each job has a claim: {:?}", claims.keys());
    ensure!(claims.keys().all(|name| tried.contains(name)), "one claim per job: {:?}", claims.keys());
    Ok(())
}

/// A replica that does not lead accepts webhooks, and reloads its secrets while it runs.
pub async fn a_follower_takes_webhooks_and_secrets_rotate(world: &World) -> Result<()> {
    let pool = WebhookPool::new(world).await?;
    let file = world.stage.dir().join("follower-secrets");
    std::fs::write(&file, "old\n")?;
    let arguments = ["--webhook-secret-file", &file.to_string_lossy()];
    let mut jobs = 920_001..920_006;
    let (follower, job) = loop {
        let job = jobs.next().context("none of five replicas was a follower")?;
        let follower = world.stage.operator("follower", &arguments).await?;
        ensure!(!pool.is_accepted(&follower.url(), "new", job).await?);
        ensure!(!pool.claims().await?.contains_key(&format!("job-{job}")));
        ensure!(pool.is_accepted(&follower.url(), "old", job).await?);
        pool.until_job_state(job, "queued").await?;
        if metrics(&follower.url()).await?.contains("paddock_leading 0.0") {
            break (follower, job);
        }
        // This replica took over the lease; another one is tried.
        follower.stop().await?;
    };
    let url = follower.url();
    let accepts = async |secret: &str| -> Result<bool> { pool.is_accepted(&url, secret, job).await };

    std::fs::write(&file, "old\nnew\n")?;
    world.until_true("the second secret is accepted", async || accepts("new").await).await?;
    ensure!(accepts("old").await?, "both secrets are accepted");
    std::fs::write(&file, "new\n")?;
    world.until_true("the first secret is refused", async || Ok(!accepts("old").await?)).await?;
    std::fs::write(&file, "")?;
    let noticed = async || {
        ensure!(accepts("new").await?, "an empty file changes nothing");
        Ok(follower.log().contains("keeping the last valid content"))
    };
    world.until_true("the follower logs the empty file", noticed).await?;
    ensure!(!accepts("old").await? && !accepts("").await?, "an empty file accepts no other secret");
    follower.stop().await?;
    Ok(())
}

/// Webhooks that were sent while no operator ran are read from GitHub's delivery log by the next leader.
pub async fn webhooks_lost_while_no_operator_runs_are_recovered(world: &World) -> Result<()> {
    let pool = WebhookPool::new(world).await?;
    let github = &world.stage.github;
    world.kill_operator()?;
    let (queued, cancelled) = (pool.queue_job()?, pool.queue_job()?);
    github.cancel_job(cancelled);
    // Deliveries of other tests may have failed before.
    let ids = [queued, cancelled].map(|job| format!("\"id\":{job},"));
    let failed = || {
        let deliveries = github.deliveries();
        let own =
            deliveries.iter().filter(|it| it.event == "workflow_job" && ids.iter().any(|id| it.body.contains(id)));
        own.filter(|it| it.outcome.as_ref().is_some_and(|it| it.status_code == 502)).count()
    };
    world.until_true("all three deliveries have failed", async || Ok(failed() >= 3)).await?;
    world.start_operator().await?;
    pool.until_job_state(queued, "queued").await?;
    pool.until_job_state(cancelled, "completed").await?;
    ensure!(pool.claims().await?.len() == 2);
    // A claim exists a moment before it is counted.
    let created = "source=\"log\",outcome=\"accepted\",reason=\"claim_made\"";
    let counted = async || Ok(metrics(&world.url()).await.is_ok_and(|metrics| metrics.contains(created)));
    world.until_true("claims were created from the log", counted).await
}

/// Deliveries that failed for want of an API server are read from GitHub's delivery log later; none is lost.
pub async fn webhooks_refused_without_api_server_are_recovered(world: &World) -> Result<()> {
    let pool = WebhookPool::new(world).await?;
    let github = &world.stage.github;
    world.stage.kube.stop_apiserver().await;
    let job = pool.queue_job()?;
    let refused = async || {
        let deliveries = github.deliveries();
        let of_job = deliveries.iter().find(|delivery| delivery.body.contains(&format!("\"id\":{job},")));
        let outcome = of_job.and_then(|delivery| delivery.outcome.as_ref());
        Ok(match outcome.filter(|outcome| outcome.status_code >= 500) {
            Some(_) => Check::Found(()),
            None => Check::NotYet(format!("{:?}", deliveries.last())),
        })
    };
    // Not the world's wait: an operator that exits cannot be restarted without an API server.
    Wait::at_most(DEADLINE).until("the delivery fails", refused).await?;
    world.stage.kube.start_apiserver().await?;
    pool.until_job_state(job, "queued").await?;
    Ok(())
}

/// A webhook that reports the end of a run releases the machine that was claimed for it.
pub async fn the_end_of_a_run_releases_its_machine(world: &World) -> Result<()> {
    let hooks = WebhookPool::new(world).await?;
    let pool = Ec2Pool::in_namespace(world, hooks.namespace.clone());
    let github = json!({ "owner": ORGANIZATION, "credentialsRef": { "name": CREDENTIALS } });
    pool.apply(json!({ "github": github, "maxInstances": 1 })).await?;
    let request = JobRequest { labels: vec!["run".into()], ..hooks.request(ORGANIZATION) };
    let job = world.stage.github.queue_job(request)?;
    pool.claim("build", &job.run_id.to_string(), json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    world.stage.github.cancel_job(job.id);
    let ended =
        |claim: &RunnerClaim| annotation(claim, ANNOTATION_RUN_STATE) == Some("completed") && is_completed(claim);
    world.until::<RunnerClaim>(&pool.namespace, "build", "annotated with the run's end, and Completed", ended).await?;
    pool.until_pool("warm", |status| status.workers.idle == 1).await?;
    pool.clean_up().await
}
