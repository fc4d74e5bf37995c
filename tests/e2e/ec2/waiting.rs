//! Claims that wait for room or capacity: they hold nothing, and the oldest is served first.

use anyhow::{Result, ensure};
use paddock::api::{ClaimPhase, ClaimReason, RunnerClaimStatus};
use paddock_record::State;
use serde_json::json;

use super::launch::limit;
use crate::fixture::{
    ec2_pool::{Ec2Pool, is_pooled, why},
    world::World,
};

fn waits_for_room(status: &RunnerClaimStatus) -> bool {
    why(status).0 == ClaimReason::PoolFull.as_str() && status.workers.is_empty()
}

fn lacks_capacity(status: &RunnerClaimStatus) -> bool {
    why(status).0 == ClaimReason::InsufficientCapacity.as_str() && status.workers.is_empty()
}

/// A claim that waits for room leaves idle machines to others, and is served as soon as there is enough.
pub async fn claim_that_waits_for_room_holds_nothing(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 2, "maxInstances": 2 })).await?;
    pool.set(json!({ "maxInstances": 2 })).await?;
    pool.claim("first", "9300", json!({})).await?;
    pool.until_phase("first", ClaimPhase::Ready).await?;
    let idle = pool.the(State::Idle).await?;
    pool.claim("both", "9301", json!({ "count": 2 })).await?;
    pool.until_claim("both", "waiting for room", waits_for_room).await?;
    ensure!(pool.ids(State::Idle).await? == [idle.clone()], "it holds a machine: {:?}", pool.records().await?);
    pool.claim("small", "9302", json!({})).await?;
    let small = pool.until_phase("small", ClaimPhase::Ready).await?;
    ensure!(small.workers[0].name == idle, "{small:?}");
    pool.release("small").await?;
    pool.until_record(&idle, "idle", is_pooled).await?;
    pool.until_claim("both", "still waiting", waits_for_room).await?;
    pool.release("first").await?;
    let both = pool.until_phase("both", ClaimPhase::Ready).await?;
    ensure!(both.workers.len() == 2 && pool.instances().len() == 2, "{both:?} {:?}", pool.instances());
    pool.release("both").await?;
    pool.clean_up().await
}

/// Of two claims that each need every machine, the older one is served, then the other.
pub async fn two_claims_for_all_machines_are_served_in_turn(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 2, "maxInstances": 2 })).await?;
    pool.set(json!({ "maxInstances": 2 })).await?;
    let claims = ["build-a", "build-b", "build-c"];
    for (number, claim) in claims.iter().enumerate() {
        pool.claim(claim, &format!("931{number}"), json!({ "count": 2 })).await?;
    }
    // Created within a second, they have no order; but each is whole or empty.
    let mut left: Vec<_> = claims.to_vec();
    while !left.is_empty() {
        let served = async || {
            for claim in &left {
                let status = pool.claim_status(claim).await?;
                if status.phase == Some(ClaimPhase::Ready) {
                    return Ok(Some(*claim));
                }
            }
            Ok(None)
        };
        let served = world.until_found(&format!("one of {left:?} is Ready"), served).await?;
        left.retain(|claim| *claim != served);
        for claim in &left {
            pool.until_claim(claim, "waiting for room", waits_for_room).await?;
        }
        pool.release(served).await?;
    }
    ensure!(pool.instances().len() == 2, "no machine was replaced: {:?}", pool.instances());
    pool.clean_up().await
}

/// A claim for more machines than the pool may have fails at once, and says both numbers.
pub async fn claim_above_max_instances_fails_at_once(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "maxInstances": 2 })).await?;
    pool.claim("build", "9320", json!({ "count": 3 })).await?;
    let failed = pool.until_phase("build", ClaimPhase::Failed).await?;
    let (reason, message) = why(&failed);
    ensure!(reason == ClaimReason::InvalidSpec.as_str(), "{failed:?}");
    ensure!(message.contains("3 machines") && message.contains("2 (maxInstances)"), "{message}");
    ensure!(pool.instances().is_empty(), "{:?}", pool.instances());
    pool.release("build").await?;
    pool.clean_up().await
}

/// I4: a claim that EC2 has too few machines for gives back what it got, waits, and is served when there are enough.
pub async fn i4_claim_that_waits_for_capacity_holds_nothing(world: &World) -> Result<()> {
    // Only this test uses the instance type, so its limit concerns no other.
    let types = json!({ "allowedInstanceTypes": ["m5a.large"] });
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 9, "defaults": types })).await?;
    pool.set(json!({ "maxInstances": 9, "defaults": types })).await?;
    let warm = pool.the(State::Idle).await?;
    world.stage.aws.set_capacity(limit("m5a.large", None, 1));
    pool.claim("build", "8640", json!({ "count": 4 })).await?;
    let told = pool.until_claim("build", "without capacity", lacks_capacity).await?;
    ensure!(why(&told).1.contains("insufficient capacity in zones") && why(&told).1.contains("us-east-1"), "{told:?}");
    ensure!(told.fleet.is_none() && told.retry_at.is_some(), "{told:?}");
    // What the claim gave back can be launched again, and the next claim is to take the idle machine.
    world.stage.aws.set_capacity(limit("m5a.large", None, 0));
    pool.until_running(std::slice::from_ref(&warm)).await?;
    pool.until_record(&warm, "idle", is_pooled).await?;
    pool.until_event("build", "InsufficientCapacity").await?;
    // Another claim takes the idle machine meanwhile.
    pool.claim("small", "8641", json!({})).await?;
    let small = pool.until_phase("small", ClaimPhase::Ready).await?;
    ensure!(small.workers[0].name == warm, "{small:?}");
    world.stage.aws.set_capacity(limit("m5a.large", None, 9));
    let served = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(served.workers.len() == 4 && served.shortage.is_none(), "{served:?}");
    pool.release("small").await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// A claim that EC2 has no capacity for fails after `timeouts.capacity`, with EC2's reasons by zone and type.
pub async fn claim_without_capacity_fails_after_its_timeout(world: &World) -> Result<()> {
    let types = json!({ "allowedInstanceTypes": ["r5n.large"] });
    world.stage.aws.set_capacity(limit("r5n.large", None, 0));
    let zones: Vec<_> = world.stage.aws.subnets().into_iter().map(|(_, zone)| format!("{zone} (r5n.large)")).collect();
    for (claim, timeout) in [("at-once", "0s"), ("later", "2s")] {
        let pool = Ec2Pool::new(world, json!({ "defaults": types, "timeouts": { "capacity": timeout } })).await?;
        pool.claim(claim, "9330", json!({})).await?;
        let failed = pool.until_phase(claim, ClaimPhase::Failed).await?;
        let (reason, message) = why(&failed);
        ensure!(reason == ClaimReason::InsufficientCapacity.as_str(), "{failed:?}");
        let names_types = zones.iter().all(|zone| message.contains(zone));
        // The second one may know from the first that there is none, and then it knows the zones only.
        let names_zones = world.stage.aws.subnets().iter().all(|(_, zone)| message.contains(zone.as_str()));
        ensure!(if timeout == "0s" { names_types } else { names_zones }, "{message}");
        ensure!(message.contains(timeout) && pool.instances().is_empty(), "{message} {:?}", pool.instances());
        pool.release(claim).await?;
        pool.clean_up().await?;
    }
    Ok(())
}
