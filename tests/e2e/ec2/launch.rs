//! Launches of machines: capacity that is missing, answers that are lost, and launches that AWS refuses.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use paddock::api::{ClaimPhase, ClaimReason, RunnerClaimStatus, RunnerPoolStatus, UsageClass};
use paddock_bed::aws::{
    Limit, Service, Usage,
    faults::{Effect, Rule},
};
use paddock_record::State;
use serde_json::json;

use crate::fixture::{
    ec2_pool::{Ec2Pool, POOL, is_pooled, pool_why, why},
    world::World,
};

/// EC2 has so many machines of this type in every zone.
pub fn limit(instance_type: &str, usage: Option<Usage>, available: u32) -> Limit {
    Limit { zone: "*".into(), instance_type: instance_type.into(), usage, available }
}

/// Without capacity in any zone the claim names every zone and holds nothing.
pub async fn claim_without_any_capacity_names_every_zone(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "defaults": { "allowedInstanceTypes": ["m5ad.large"] } })).await?;
    world.stage.aws.set_capacity(limit("m5ad.large", None, 0));
    pool.claim("build", "8650", json!({})).await?;
    let told = |status: &RunnerClaimStatus| why(status).0 == "InsufficientCapacity";
    let told = pool.until_claim("build", "without capacity", told).await?;
    let zones = world.stage.aws.subnets();
    ensure!(zones.iter().all(|(_, zone)| why(&told).1.contains(zone.as_str())), "{told:?}");
    ensure!(pool.instances().is_empty(), "nothing was launched");
    pool.release("build").await?;
    pool.clean_up().await
}

/// After one claim found no capacity, the next sends no request: it waits, and says for which zones and until when.
pub async fn claim_waits_while_no_zone_has_capacity(world: &World) -> Result<()> {
    let types = json!({ "allowedInstanceTypes": ["r5.large"] });
    world.stage.aws.set_capacity(limit("r5.large", None, 0));
    let pool = Ec2Pool::new(world, json!({ "defaults": types })).await?;
    pool.claim("first", "8401", json!({})).await?;
    let asked = |status: &RunnerClaimStatus| status.shortage.as_ref().is_some_and(|shortage| shortage.attempt > 0);
    let first = pool.until_claim("first", "without capacity", asked).await?;
    let (reason, message) = why(&first);
    let zones: Vec<_> = world.stage.aws.subnets().into_iter().map(|(_, zone)| format!("{zone} (r5.large)")).collect();
    ensure!(reason == "InsufficientCapacity" && zones.iter().all(|zone| message.contains(zone)), "{message}");
    // The operator remembers missing capacity only for a short time. A claim that comes later asks EC2 like the first;
    // then another one tries.
    let mut claims = vec!["first".to_owned()];
    let waits = loop {
        ensure!(claims.len() < 10, "no claim waits: all of {claims:?} asked EC2");
        let name = format!("second-{}", claims.len());
        claims.push(name.clone());
        pool.claim(&name, "8402", json!({})).await?;
        let status = pool.until_claim(&name, "waiting", |status| status.shortage.is_some()).await?;
        if !asked(&status) {
            break status;
        }
    };
    let (reason, message) = why(&waits);
    ensure!(reason == "InsufficientCapacity" && message.contains(", retry at "), "{message}");
    ensure!(waits.fleet.is_none() && waits.retry_at.is_some() && pool.instances().is_empty(), "{waits:?}");
    // Other instance types have capacity.
    pool.claim("third", "8403", json!({ "allowedInstanceTypes": ["r5d.large"] })).await?;
    pool.until_phase("third", ClaimPhase::Ready).await?;
    world.stage.aws.set_capacity(limit("r5.large", None, 9));
    for claim in &claims {
        let served = pool.until_phase(claim, ClaimPhase::Ready).await?;
        ensure!(served.retry_at.is_none() && served.shortage.is_none(), "{served:?}");
    }
    claims.push("third".to_owned());
    for claim in &claims {
        pool.release(claim).await?;
    }
    pool.clean_up().await
}

/// I4: if spot capacity falls short, the pool may fall back to on-demand machines; the spot machines are terminated.
pub async fn i4_spot_falls_back_to_on_demand_and_keeps_nothing_of_the_first_order(world: &World) -> Result<()> {
    world.stage.aws.set_capacity(limit("m5d.large", Some(Usage::Spot), 1));
    let settings = json!({
        "defaults": { "usageClass": "spot", "allowedInstanceTypes": ["m5d.large"] },
        "fallback": { "spotToOnDemand": true },
    });
    let pool = Ec2Pool::new(world, settings).await?;
    pool.claim("build", "8501", json!({ "count": 2 })).await?;
    let status = pool.until_phase("build", ClaimPhase::Ready).await?;
    let order = status.fleet.as_ref().context("the claim has a launch order")?;
    ensure!(order.usage_class == UsageClass::OnDemand && order.instance_ids.len() == 2, "{order:?}");
    let serving = pool.ids(State::Running).await?;
    pool.until_running(&serving).await?;
    let usage = |id: &String| pool.instances().iter().any(|i| i.id == *id && i.usage == Usage::OnDemand);
    ensure!(serving.len() == 2 && serving.iter().all(usage), "{serving:?}");
    pool.until_event("build", "FellBack").await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// I2: a `CreateFleet` whose answer is lost is repeated with the same token, and launches no second fleet.
pub async fn i2_a_lost_create_fleet_answer_makes_no_second_fleet(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({})).await?;
    let lost = Rule::on(Service::Ec2, "CreateFleet", Effect::LostResponse).containing(&pool.key()).times(2);
    let lost = pool.fault(lost);
    pool.claim("build", "8660", json!({ "count": 2 })).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(lost.hits() == 2, "two answers were lost, not {}", lost.hits());
    ensure!(ready.workers.len() == 2 && pool.instances().len() == 2, "{ready:?} {:?}", pool.instances());
    pool.release("build").await?;
    pool.clean_up().await
}

/// I4: a launch order whose answer was lost is repeated unchanged, even if the pool was edited meanwhile.
pub async fn i4_an_order_is_repeated_as_it_was_after_the_pool_was_edited(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({})).await?;
    let version = |status: &RunnerPoolStatus| status.launch_template.as_ref().map(|template| template.version);
    let before = version(&pool.pool_status().await?);
    let lost = Rule::on(Service::Ec2, "CreateFleet", Effect::LostResponse).containing(&pool.key());
    let lost = pool.fault(lost);
    pool.claim("build", "8701", json!({})).await?;
    world.until_true("EC2 has launched the machine", async || Ok(!pool.instances().is_empty())).await?;
    let larger = json!([{ "name": "medium", "cpu": 2, "memoryMiB": 8192 }]);
    pool.set(json!({ "preRunnerScript": "true", "resourceClasses": larger })).await?;
    pool.until_pool("updated to a new template", |status| version(status) > before).await?;
    drop(lost);
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(pool.instances().len() == 1, "one machine was requested, {} were launched", pool.instances().len());
    let order = ready.fleet.context("the claim has a launch order")?;
    ensure!(Some(order.launch_template.version) == before && order.attempt == 1, "{order:?}");
    pool.release("build").await?;
    pool.clean_up().await
}

/// A new machine that EC2 does not list yet is not taken for gone.
pub async fn machine_that_ec2_does_not_list_yet_is_kept(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({})).await?;
    let hidden = Duration::from_secs(35); // longer than the time between two sweeps
    let unlisted = Effect::Invisible { ms: hidden.as_millis() as u64 };
    let _unlisted = pool.fault(Rule::on(Service::Ec2, "CreateFleet", unlisted).containing(&pool.key()));
    pool.claim("build", "8670", json!({})).await?;
    let launched = Instant::now();
    let id = pool.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
    world.until_true("a sweep did not see it", async || Ok(launched.elapsed() > hidden)).await?;
    let record = pool.cloud.record(&id).await?.context("the machine has a record")?;
    ensure!(record.state == State::Running, "{record:?}");
    pool.release("build").await?;
    pool.until_record(&id, "idle", is_pooled).await?;
    pool.clean_up().await
}

/// The pool's condition and an event show why AWS refuses a launch, until a launch succeeds.
pub async fn pool_condition_shows_refused_launch_until_it_succeeds(world: &World) -> Result<()> {
    let pool = Ec2Pool::unready(world, json!({ "minIdle": 1, "subnetIds": ["subnet-0123abcd"] })).await?;
    let said = async |reason: &str, hint: &str| {
        pool.until_pool(hint, |status| pool_why(status).0 == reason && pool_why(status).1.contains(hint))
            .await
            .with_context(|| reason.to_owned())
    };
    said("InvalidSpec", "check spec.ec2.subnetIds").await?;
    pool.set(json!({ "minIdle": 1, "ami": { "id": "ami-0123abcd" } })).await?;
    said("InvalidSpec", "check spec.ec2.ami").await?;
    pool.set(json!({ "minIdle": 1, "securityGroupIds": ["sg-0123abcd"] })).await?;
    said("InvalidSpec", "check spec.ec2.securityGroupIds").await?;
    pool.set(json!({ "minIdle": 1, "instanceProfile": "mistyped" })).await?;
    said("InvalidSpec", "check spec.ec2.instanceProfile").await?;
    let denied = Rule::on(Service::Ec2, "CreateFleet", Effect::error("UnauthorizedOperation"));
    let denied = pool.fault(denied.containing(&pool.key()));
    pool.set(json!({ "minIdle": 1 })).await?;
    said("AwsDenied", "docs/iam").await?;
    pool.until_event(POOL, "AwsDenied").await?;
    drop(denied);
    pool.set(json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    pool.until_pool("Ready and warm", |status| pool_why(status).0 == "Ready" && status.workers.idle == 1).await?;
    pool.clean_up().await
}

/// An order that an earlier leader has recorded and not sent counts for `maxInstances`.
pub async fn resumed_order_counts_for_max_instances(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "maxInstances": 2 })).await?;
    let throttled = pool.fault(Rule::on(Service::Ec2, "CreateFleet", Effect::Throttle).containing(&pool.key()));
    pool.claim("first", "9200", json!({ "count": 2 })).await?;
    pool.until_claim("first", "ordering", |status| status.fleet.is_some()).await?;
    world.kill_operator()?;
    pool.claim("second", "9201", json!({ "count": 2 })).await?;
    world.start_operator().await?;
    let full = |status: &RunnerClaimStatus| why(status).0 == ClaimReason::PoolFull.as_str();
    pool.until_claim("second", "waiting for room", full).await?;
    drop(throttled);
    pool.until_phase("first", ClaimPhase::Ready).await?;
    ensure!(pool.instances().len() == 2, "{:?}", pool.instances());
    pool.release("first").await?;
    pool.until_phase("second", ClaimPhase::Ready).await?;
    pool.release("second").await?;
    pool.clean_up().await
}
