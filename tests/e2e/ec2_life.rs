//! How claims on machines end, how machines are used again, and what a pool says when EC2 does not give.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Event;
use kube::api::{ListParams, Patch, PatchParams};
use paddock::api::{
    ANNOTATION_RUN_STATE, ClaimPhase, ClaimReason, FailureReason, RunnerClaim, RunnerClaimStatus, RunnerPoolStatus,
    Worker,
};
use paddock_bed::{
    aws::{
        Limit, Service, Usage,
        faults::{Effect, Rule},
    },
    github::JobRequest,
    stage::{ORGANIZATION, REPOSITORY},
};
use paddock_record::State;
use serde_json::json;

use crate::{
    linux::{Linux, POOL, pool_why, why},
    support::World,
};

/// Waits until there was an event about an object; they follow behind.
async fn until_event(linux: &Linux<'_>, name: &str, reason: &str) -> Result<()> {
    let of = ListParams::default().fields(&format!("involvedObject.name={name},reason={reason}"));
    let told = async || Ok(!linux.world.api::<Event>(&linux.namespace).list(&of).await?.items.is_empty());
    linux.world.until_true(&format!("an event told {reason} of {name}"), told).await
}

/// A webhook marks the claim: its machine goes back to the pool, and the claim stays to be looked at.
pub async fn a_run_that_a_webhook_calls_completed_releases_its_claim(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    linux.claim("build", "8001", json!({})).await?;
    linux.until_phase("build", ClaimPhase::Ready).await?;
    let told = json!({ "metadata": { "annotations": { ANNOTATION_RUN_STATE: "completed" } } });
    let claims = world.api::<RunnerClaim>(&linux.namespace);
    claims.patch("build", &PatchParams::default(), &Patch::Merge(told)).await?;
    let status = linux.until_phase("build", ClaimPhase::Completed).await?;
    ensure!(why(&status).0 == ClaimReason::Completed.as_str() && status.workers.is_empty(), "{status:?}");
    let times = &status.phase_times;
    ensure!(times.ready <= times.releasing && times.releasing <= times.completed, "{times:?}");
    linux.until_pooled(1).await?;
    for phase in ["Pending", "Claiming", "Validating", "Ready", "Releasing", "Completed"] {
        until_event(&linux, "build", phase).await?;
    }
    linux.release("build").await?;
    linux.clean_up().await
}

/// The webhook is lost: GitHub, asked, says that the run is over. The finished claim goes after the retention time.
pub async fn a_run_that_is_over_releases_its_claim_and_the_claim_goes_in_time(world: &World) -> Result<()> {
    world.kill_operator()?;
    // Were its lease lost, it would be started again without these settings.
    world.start_operator_with(&["--run-poll", "2s", "--retention", "5s", "--lease-duration", "15s"]).await?;
    let outcome = goes_in_time(world).await;
    world.kill_operator()?;
    world.start_operator().await?;
    outcome
}

async fn goes_in_time(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    let repository = format!("{ORGANIZATION}/{REPOSITORY}");
    let request = JobRequest {
        owner: ORGANIZATION.into(),
        repo: REPOSITORY.into(),
        labels: vec!["8101".into()],
        run_id: Some(8101),
        duration_ms: Some(100),
        ..Default::default()
    };
    let job = world.stage.github.queue_job(request)?.id;
    linux.claim("build", "8101", json!({ "repository": repository })).await?;
    linux.claim("other", "8102", json!({ "repository": repository })).await?;
    let done = async || Ok(world.stage.github.job(job).is_some_and(|job| job.conclusion.is_some()));
    world.until_true("the job is done", done).await?;
    world.until_gone::<RunnerClaim>(&linux.namespace, "build").await?;
    // The other claim's run is unknown to GitHub, which proves nothing: it keeps its machine.
    linux.until_phase("other", ClaimPhase::Ready).await?;
    linux.release("other").await?;
    linux.clean_up().await
}

/// A machine serves as many claims as it may, leaves GitHub, and ends.
pub async fn i2_a_machine_that_has_served_its_claims_ends_and_leaves_no_runner(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "reuse": { "maxClaims": 2 }, "maxInstances": 1 })).await?;
    linux.claim("first", "8201", json!({})).await?;
    let id = linux.until_phase("first", ClaimPhase::Ready).await?.workers[0].name.clone();
    linux.release("first").await?;
    linux.until_pooled(1).await?;
    linux.claim("second", "8202", json!({})).await?;
    let status = linux.until_phase("second", ClaimPhase::Ready).await?;
    ensure!(status.workers[0].name == id, "it is used again");
    linux.release("second").await?;
    linux.until_ended(&id, FailureReason::MaxClaimsServed).await?;
    ensure!(linux.runners().is_empty(), "it left GitHub first: {:?}", linux.runners());
    linux.clean_up().await
}

/// A machine that cannot be scrubbed serves nobody any more, and says why.
pub async fn a_machine_whose_scrub_script_fails_is_never_pooled(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "reuse": { "scrubScript": "exit 3" } })).await?;
    linux.claim("build", "8301", json!({})).await?;
    let id = linux.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
    linux.release("build").await?;
    linux.until_ended(&id, FailureReason::ScrubFailed).await?;
    let worker = world.api::<Worker>(&linux.namespace).get(&id).await?;
    let failure = worker.status.and_then(|status| status.failure).context("it says why")?;
    ensure!(failure.message.contains("exit status: 3"), "{failure:?}");
    ensure!(linux.runners().is_empty() && linux.cloud.queue_size(&linux.queue().await?).await? == 0, "nobody gets it");
    linux.clean_up().await
}

fn out_of(instance_type: &str, usage: Option<Usage>) -> Limit {
    Limit { zone: "*".into(), instance_type: instance_type.into(), usage, available: 0 }
}

/// Where EC2 had nothing for one claim, the next does not ask: it waits, and says where and until when.
pub async fn a_claim_waits_while_every_zone_is_known_to_be_empty(world: &World) -> Result<()> {
    let types = json!({ "allowedInstanceTypes": ["r5.large"] });
    world.stage.aws.set_capacity(out_of("r5.large", None));
    let linux = Linux::new(world, json!({ "defaults": types })).await?;
    linux.claim("first", "8401", json!({})).await?;
    let failed = linux.until_phase("first", ClaimPhase::Failed).await?;
    let (reason, message) = why(&failed);
    let zones: Vec<_> = world.stage.aws.subnets().into_iter().map(|(_, zone)| format!("{zone} (r5.large)")).collect();
    ensure!(reason == "InsufficientCapacity" && zones.iter().all(|zone| message.contains(zone)), "{message}");
    // What EC2 said is soon forgotten. A claim that came too late for it asks, fails as the first, and another follows.
    let mut claims = vec!["first".to_owned()];
    let (second, waits) = loop {
        ensure!(claims.len() < 10, "no claim waits: all of {claims:?} asked EC2");
        let name = format!("second-{}", claims.len());
        claims.push(name.clone());
        linux.claim(&name, "8402", json!({})).await?;
        let decided =
            |status: &RunnerClaimStatus| status.retry_at.is_some() || status.phase == Some(ClaimPhase::Failed);
        let status = linux.until_claim(&name, "waiting", decided).await?;
        if status.phase != Some(ClaimPhase::Failed) {
            break (name, status);
        }
    };
    let launched = linux.instances();
    // Asked again in time, EC2 has one. Nothing is waited for before: a claim that asks and gets none has failed.
    world.stage.aws.set_capacity(Limit { available: 1, ..out_of("r5.large", None) });
    let (reason, message) = why(&waits);
    ensure!(reason == "InsufficientCapacity" && message.contains(", retry at "), "{message}");
    ensure!(waits.fleet.is_none() && launched.is_empty(), "EC2 was not asked again: {waits:?} {launched:?}");
    // Other machines are to be had.
    linux.claim("third", "8403", json!({ "allowedInstanceTypes": ["r5d.large"] })).await?;
    linux.until_phase("third", ClaimPhase::Ready).await?;
    let served = linux.until_phase(&second, ClaimPhase::Ready).await?;
    ensure!(served.retry_at.is_none(), "{served:?}");
    claims.push("third".to_owned());
    for claim in &claims {
        linux.release(claim).await?;
    }
    linux.clean_up().await
}

/// A spot order that falls short is followed by one for on-demand machines, where the pool says so.
pub async fn i4_spot_falls_back_to_on_demand_and_keeps_nothing_of_the_first_order(world: &World) -> Result<()> {
    let one = Limit { available: 1, ..out_of("m5d.large", Some(Usage::Spot)) };
    world.stage.aws.set_capacity(one);
    let settings = json!({
        "defaults": { "usageClass": "spot", "allowedInstanceTypes": ["m5d.large"] },
        "fallback": { "spotToOnDemand": true },
    });
    let linux = Linux::new(world, settings).await?;
    linux.claim("build", "8501", json!({ "count": 2 })).await?;
    let status = linux.until_phase("build", ClaimPhase::Ready).await?;
    let order = status.fleet.as_ref().context("it was ordered")?;
    ensure!(order.attempt == 2 && order.instance_ids.len() == 2, "{order:?}");
    let serving = linux.ids(State::Running).await?;
    linux.until_running(&serving).await?;
    let usage = |id: &String| linux.instances().iter().any(|i| i.id == *id && i.usage == Usage::OnDemand);
    ensure!(serving.len() == 2 && serving.iter().all(usage), "{serving:?}");
    until_event(&linux, "build", "FellBack").await?;
    linux.release("build").await?;
    linux.clean_up().await
}

/// A claim that loses machines says how many are left and who took them; their runners do not stay at GitHub.
pub async fn i2_lost_machines_are_told_apart_and_their_runners_removed(world: &World) -> Result<()> {
    let settings = json!({ "defaults": { "usageClass": "spot" } });
    let linux = Linux::new(world, settings).await?;
    linux.claim("build", "8601", json!({ "count": 2 })).await?;
    let status = linux.until_phase("build", ClaimPhase::Ready).await?;
    let [reclaimed, terminated] = [0, 1].map(|index: usize| status.workers[index].name.clone());
    world.stage.machines.interrupt_spot(&reclaimed, std::time::Duration::from_secs(1))?;
    let short = linux.until_claim("build", "short of one", |status| status.progress == "1/2").await?;
    let (reason, message) = why(&short);
    ensure!(reason == "WorkerLost" && message.contains("spot_reclaimed"), "{message}");
    ensure!(short.phase == Some(ClaimPhase::Ready), "the other still serves");
    linux.until_ended(&reclaimed, FailureReason::SpotReclaimed).await?;
    world.stage.aws.terminate(&terminated).await?;
    let failed = linux.until_phase("build", ClaimPhase::Failed).await?;
    let (reason, message) = why(&failed);
    ensure!(reason == "WorkerLost" && message.contains("instance_gone"), "{message}");
    until_event(&linux, "build", "WorkerLost").await?;
    linux.until_no_runners().await?;
    linux.release("build").await?;
    linux.clean_up().await
}

/// What AWS says against a launch stands in the pool's condition and in an event, and goes when it is mended.
pub async fn a_pool_says_what_is_wrong_with_it_until_it_is_mended(world: &World) -> Result<()> {
    let linux = Linux::unready(world, json!({ "minIdle": 1, "subnetIds": ["subnet-0123abcd"] })).await?;
    let said = async |reason: &str, hint: &str| {
        linux
            .until_pool(hint, |status| pool_why(status).0 == reason && pool_why(status).1.contains(hint))
            .await
            .with_context(|| reason.to_owned())
    };
    said("InvalidSpec", "check spec.ec2.subnetIds").await?;
    linux.set(json!({ "minIdle": 1, "amiId": "ami-0123abcd" })).await?;
    said("InvalidSpec", "check spec.ec2.amiId").await?;
    linux.set(json!({ "minIdle": 1, "securityGroupIds": ["sg-0123abcd"] })).await?;
    said("InvalidSpec", "check spec.ec2.securityGroupIds").await?;
    linux.set(json!({ "minIdle": 1, "instanceProfile": "mistyped" })).await?;
    said("InvalidSpec", "check spec.ec2.instanceProfile").await?;
    let denied = Rule::on(Service::Ec2, "CreateFleet", Effect::error("UnauthorizedOperation"));
    let denied = linux.fault(denied.containing(&linux.key()));
    linux.set(json!({ "minIdle": 1 })).await?;
    said("AwsDenied", "docs/iam").await?;
    until_event(&linux, POOL, "AwsDenied").await?;
    drop(denied);
    linux.set(json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    linux.until_pool("mended and warm", |status| pool_why(status).0 == "Ready" && status.workers.idle == 1).await?;
    linux.clean_up().await
}

/// I4: an order whose answer was lost is repeated as it was, though the pool is another by then: the machines are the same.
pub async fn i4_an_order_is_repeated_as_it_was_after_the_pool_was_edited(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({})).await?;
    let version = |status: &RunnerPoolStatus| status.launch_template.as_ref().map(|template| template.version);
    let before = version(&linux.pool_status().await?);
    let lost = Rule::on(Service::Ec2, "CreateFleet", Effect::LostResponse).containing(&linux.key());
    let lost = linux.fault(lost);
    linux.claim("build", "8701", json!({})).await?;
    world.until_true("EC2 has launched it", async || Ok(!linux.instances().is_empty())).await?;
    let larger = json!([{ "name": "medium", "cpu": 2, "memoryMiB": 8192 }]);
    linux.set(json!({ "preRunnerScript": "true", "resourceClasses": larger })).await?;
    linux.until_pool("made anew", |status| version(status) > before).await?;
    drop(lost);
    let ready = linux.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(linux.instances().len() == 1, "one machine was asked for, and {} came", linux.instances().len());
    let order = ready.fleet.context("it was ordered")?;
    ensure!(Some(order.launch_template.version) == before && order.attempt == 1, "{order:?}");
    linux.release("build").await?;
    linux.clean_up().await
}
