//! Orders and queues where AWS is stricter or slower than it seems: each is waited for or done otherwise, and said.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Event;
use kube::api::ListParams;
use paddock::api::{ClaimPhase, ClaimReason, PoolReason, RunnerPoolStatus, UsageClass};
use paddock_bed::aws::{
    Limit, Service,
    faults::{Effect, Rule},
};
use paddock_record::State;
use serde_json::json;

use super::launch::limit;
use crate::fixture::{
    ec2_pool::{Ec2Pool, POOL, pool_why, why},
    world::World,
};

fn is_ready(status: &RunnerPoolStatus) -> bool {
    pool_why(status).0 == PoolReason::Ready.as_str()
}

/// A pool's idle time can be edited: SQS refuses to create the queue again with another retention time.
pub async fn idle_time_can_be_edited(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({})).await?;
    pool.until_pool("Ready", is_ready).await?;
    for idle in ["9m", "8m"] {
        pool.set(json!({ "lifetimes": { "idle": idle } })).await?;
        pool.until_pool("Ready after it was edited", is_ready).await?;
    }
    pool.claim("build", "9800", json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    pool.release("build").await?;
    pool.until_pooled(1).await?;
    pool.clean_up().await
}

/// A queue that was deleted a moment ago is waited for. The pool says so, and its spec is not to blame.
pub async fn queue_deleted_a_moment_ago_is_waited_for(world: &World) -> Result<()> {
    let pool = Ec2Pool::in_namespace(world, world.namespace().await?);
    let refused = Rule::on(Service::Sqs, "CreateQueue", Effect::error("QueueDeletedRecently"));
    let refused = pool.fault(refused.containing(&pool.namespace));
    pool.apply(json!({})).await?;
    pool.until_pool("waiting for its queue", |status| {
        let (reason, message) = pool_why(status);
        reason == PoolReason::Preparing.as_str() && message.contains("60 s after its deletion")
    })
    .await?;
    drop(refused);
    pool.until_pool("Ready", is_ready).await?;
    pool.clean_up().await
}

/// A launch template that EC2 does not show yet is waited for. The pool says so, and its spec is not to blame.
pub async fn launch_template_that_is_not_visible_yet_is_waited_for(world: &World) -> Result<()> {
    let pool = Ec2Pool::in_namespace(world, world.namespace().await?);
    // Longer than a busy machine takes from the template to the first order.
    let hidden = Rule::on(Service::Ec2, "CreateLaunchTemplate", Effect::Invisible { ms: 30_000 });
    let _hidden = pool.fault(hidden.containing(&pool.namespace));
    pool.apply(json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    pool.until_pool_said("EC2 shows a new launch template after a while").await?;
    pool.until_pool("Ready and warm", |status| is_ready(status) && status.workers.idle == 1).await?;
    ensure!(pool.instances().len() == 1, "{:?}", pool.instances());
    let about = ListParams::default().fields(&format!("involvedObject.name={POOL},reason=InvalidSpec"));
    let blamed = world.api::<Event>(&pool.namespace).list(&about).await?.items;
    ensure!(blamed.is_empty(), "{blamed:?}");
    pool.clean_up().await
}

/// A pool may have subnets in more zones than EC2 takes in one order: the first four are asked, then the others.
pub async fn zones_beyond_the_first_four_are_asked_too(world: &World) -> Result<()> {
    let zones: Vec<_> = world.stage.aws.subnets().into_iter().map(|(_, zone)| zone).collect();
    ensure!(zones.len() > 4, "{zones:?}");
    // Only this test uses the instance type.
    let last = zones.last().context("there are zones")?;
    for zone in zones.iter().filter(|zone| *zone != last) {
        let none = Limit { zone: zone.clone(), ..limit("m5dn.large", None, 0) };
        world.stage.aws.set_capacity(none);
    }
    let types = json!({ "allowedInstanceTypes": ["m5dn.large"] });
    let pool = Ec2Pool::new(world, json!({ "defaults": types, "timeouts": { "capacity": "0s" } })).await?;
    pool.claim("build", "9810", json!({ "count": 2 })).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    let order = ready.fleet.context("the claim has an order")?;
    ensure!(order.subnets.len() <= 4 && order.subnets.iter().any(|subnet| subnet.zone == *last), "{order:?}");
    let records = pool.records().await?;
    ensure!(records.values().all(|record| record.zone == *last), "{records:?}");
    ensure!(pool.instances().len() == 2, "{:?}", pool.instances());
    pool.release("build").await?;
    pool.clean_up().await
}

/// A pool gets the types that it names, however dear: EC2 leaves out what costs much more than the cheapest of them.
pub async fn named_types_are_launched_at_any_price(world: &World) -> Result<()> {
    world.stage.aws.set_capacity(limit("r5a.large", None, 0));
    let types = json!({ "allowedInstanceTypes": ["r5a.large", "r5a.8xlarge"] });
    let pool = Ec2Pool::new(world, json!({ "defaults": types, "timeouts": { "capacity": "0s" } })).await?;
    pool.claim("build", "9820", json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    let id = pool.the(State::Running).await?;
    let record = pool.cloud.record(&id).await?.context("the machine has a record")?;
    ensure!(record.instance_type == "r5a.8xlarge", "{record:?}");
    pool.release("build").await?;
    pool.clean_up().await
}

/// A pool says how many instance types its classes leave, and a claim that leaves none fails at once.
pub async fn claim_that_no_instance_type_meets_fails_at_once(world: &World) -> Result<()> {
    let classes = json!([
        { "name": "medium", "cpu": 2, "memoryMiB": 4096 }, { "name": "vast", "cpu": 1024, "memoryMiB": 4096 },
    ]);
    let types = json!({ "allowedInstanceTypes": ["c5.large", "m5.large"] });
    let pool = Ec2Pool::new(world, json!({ "resourceClasses": classes, "defaults": types })).await?;
    let counted = |status: &RunnerPoolStatus| {
        let counts: Vec<_> = status.classes.iter().map(|class| (class.name.as_str(), class.instance_types)).collect();
        counts == [("medium", 2), ("vast", 0)]
    };
    pool.until_pool("its types are counted", counted).await?;
    for (claim, settings) in [
        ("vast", json!({ "resourceClass": "vast" })),
        ("unknown", json!({ "allowedInstanceTypes": ["m5.lage"] })),
        ("small", json!({ "memoryMiB": 1_000_000 })),
    ] {
        pool.claim(claim, "9830", settings).await?;
        let failed = pool.until_phase(claim, ClaimPhase::Failed).await?;
        let (reason, message) = why(&failed);
        ensure!(reason == ClaimReason::InvalidSpec.as_str(), "{failed:?}");
        ensure!(message.contains("EC2 has no instance type"), "{message}");
        pool.release(claim).await?;
    }
    ensure!(pool.instances().is_empty(), "{:?}", pool.instances());
    pool.clean_up().await
}

/// EC2 may say that it has no spot machines without naming a zone: the claim gets on-demand ones.
pub async fn spot_without_capacity_anywhere_falls_back_to_on_demand(world: &World) -> Result<()> {
    let settings = json!({
        "defaults": { "usageClass": "spot", "allowedInstanceTypes": ["r5dn.large"] },
        "fallback": { "spotToOnDemand": true },
    });
    let pool = Ec2Pool::new(world, settings).await?;
    let unfulfilled = Rule::on(Service::Ec2, "CreateFleet", Effect::error("UnfulfillableCapacity")).times(2);
    let unfulfilled = pool.fault(unfulfilled.containing(&pool.key()));
    pool.claim("build", "9840", json!({})).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    let order = ready.fleet.context("the claim has an order")?;
    ensure!(unfulfilled.hits() == 2 && order.usage_class == UsageClass::OnDemand, "{order:?}");
    pool.until_event("build", "FellBack").await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// What EC2 says inside a fleet's answer and passes by itself is tried again: it is neither a shortage nor a bad spec.
pub async fn passing_error_inside_an_answer_is_tried_again(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "timeouts": { "capacity": "0s" } })).await?;
    let throttled = Effect::FleetError { code: "RequestLimitExceeded".into(), message: "Slow down.".into() };
    let throttled = pool.fault(Rule::on(Service::Ec2, "CreateFleet", throttled).containing(&pool.key()));
    pool.claim("build", "9850", json!({})).await?;
    let told = pool.until_claim("build", "throttled", |status| status.retry_at.is_some()).await?;
    let (reason, message) = why(&told);
    ensure!(reason == ClaimReason::AwsUnavailable.as_str() && message.contains("RequestLimitExceeded"), "{told:?}");
    ensure!(told.shortage.is_some_and(|shortage| shortage.since.is_none()), "it is no shortage");
    pool.until_pool("Ready all the while", is_ready).await?;
    drop(throttled);
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.fleet.is_some_and(|order| order.attempt > 1), "with a token of its own");
    pool.release("build").await?;
    pool.clean_up().await
}

/// The role that EC2 needs for spot machines is named, with the command that creates it.
pub async fn missing_role_for_spot_machines_is_named(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "defaults": { "usageClass": "spot" } })).await?;
    let code = "AuthFailure.ServiceLinkedRoleCreationNotPermitted";
    let denied = pool.fault(Rule::on(Service::Ec2, "CreateFleet", Effect::error(code)).containing(&pool.key()));
    pool.set(json!({ "defaults": { "usageClass": "spot" }, "minIdle": 1, "maxInstances": 1 })).await?;
    pool.until_pool("denied", |status| {
        let (reason, message) = pool_why(status);
        reason == PoolReason::AwsDenied.as_str() && message.contains("create-service-linked-role")
    })
    .await?;
    drop(denied);
    pool.set(json!({ "defaults": { "usageClass": "spot" }, "maxInstances": 1 })).await?;
    pool.until_pool("Ready", is_ready).await?;
    pool.clean_up().await
}
