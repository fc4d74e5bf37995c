//! Machines that fail, fall silent or are lost, and what reaches them of a pool's settings.

use anyhow::{Context, Result, ensure};
use paddock::api::{
    ClaimPhase, FailureReason, HeartbeatState, PoolReason, RunnerClaimStatus, RunnerPoolStatus, Worker,
};
use paddock_bed::{
    github::{JobRequest, Status},
    stage::{ORGANIZATION, REPOSITORY},
};
use paddock_record::{Signal, State};
use serde_json::json;

use crate::fixture::{
    ec2_pool::{Ec2Pool, POOL, is_pooled, pool_why, why},
    world::{DEADLINE, World},
};

/// Machines that fail after their launch are shown in the pool's condition, and launched less and less often: after a
/// failure one at a time, until one boots or the pool is edited.
pub async fn pool_backs_off_when_its_machines_fail(world: &World) -> Result<()> {
    let settings = json!({ "minIdle": 2, "maxInstances": 4, "preRunnerScript": "echo broken >&2; exit 7" });
    let pool = Ec2Pool::unready(world, settings).await?;
    for (count, launched) in [("2 machines have failed", 2), ("3 machines have failed", 3)] {
        let failing = |status: &RunnerPoolStatus| {
            let (reason, message) = pool_why(status);
            reason == PoolReason::MachinesFailing.as_str()
                && message.contains(count)
                && message.contains("pre-runner script failed")
        };
        pool.until_pool(count, failing).await?;
        ensure!(pool.instances().len() == launched, "{:?}", pool.instances());
    }
    pool.set(json!({ "minIdle": 2, "maxInstances": 4 })).await?;
    pool.until_pool("warm", |status| status.workers.idle == 2 && pool_why(status).0 == "Ready").await?;
    pool.clean_up().await
}

/// Waits until the claim has failed for this reason and holds nothing.
async fn until_failed(pool: &Ec2Pool<'_>, reason: &str) -> Result<RunnerClaimStatus> {
    let failed = pool.until_phase("build", ClaimPhase::Failed).await?;
    ensure!(why(&failed).0 == reason, "{failed:?}");
    ensure!(failed.workers.is_empty(), "I4: a failed claim holds nothing: {failed:?}");
    Ok(failed)
}

/// A pre-runner script that fails on a new machine fails the claim, and the machine ends.
pub async fn i4_a_failed_pre_runner_script_fails_the_claim(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "preRunnerScript": "echo no good; exit 3" })).await?;
    pool.claim("build", "8600", json!({ "count": 2 })).await?;
    let failed = until_failed(&pool, "ValidationFailed").await?;
    ensure!(why(&failed).1.contains("pre-runner script"), "{failed:?}");
    pool.until_running(&[]).await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// A new machine that does not start in time fails the claim; the selected idle one returns to the pool.
pub async fn i4_a_machine_that_never_comes_up_fails_the_claim(world: &World) -> Result<()> {
    let namespace = world.namespace().await?;
    let stuck = world.stage.aws.dir().join(format!("stuck-{namespace}"));
    // An edit of the script would replace the warm machine.
    let script = format!("while [ -e '{}' ]; do sleep 1; done", stuck.display());
    let pool = Ec2Pool::in_namespace(world, namespace);
    pool.set(json!({ "minIdle": 1, "maxInstances": 2, "preRunnerScript": script })).await?;
    let warm = pool.the(State::Idle).await?;
    std::fs::write(&stuck, "")?;
    pool.set(json!({ "maxInstances": 2, "preRunnerScript": script, "timeouts": { "validation": "6s" } })).await?;
    pool.claim("build", "8610", json!({ "count": 2 })).await?;
    let failed = until_failed(&pool, "ValidationFailed").await?;
    ensure!(why(&failed).1.contains("within 6s"), "{failed:?}");
    pool.until_running(std::slice::from_ref(&warm)).await?;
    pool.until_record(&warm, "idle", is_pooled).await?;
    let queue = pool.queue().await?;
    world
        .until_true("the queue has a message for it", async || Ok(pool.cloud.queued_ids(&queue).await?.contains(&warm)))
        .await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// An idle machine that does not answer its claim is terminated and replaced; a signal for another run does not count.
pub async fn machine_that_does_not_register_for_its_run_is_replaced(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "timeouts": { "registration": "4s" } })).await?;
    let silent = pool.the(State::Idle).await?;
    pool.set(json!({ "timeouts": { "registration": "4s" } })).await?;
    world.stage.machines.freeze(&silent)?;
    pool.cloud.forge_signal(&silent, Signal::Registered, "1").await?;
    pool.claim("build", "8620", json!({})).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.workers.len() == 1 && ready.workers[0].name != silent, "{ready:?}");
    pool.until_ended(&silent, FailureReason::RegistrationTimeout).await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// A pooled machine that fails beside a created one is replaced; the created one stays.
pub async fn failed_machine_of_the_pool_is_replaced_beside_a_created_one(world: &World) -> Result<()> {
    let settings = |warm: u32| json!({ "minIdle": warm, "maxInstances": 3, "timeouts": { "registration": "4s" } });
    let pool = Ec2Pool::new(world, settings(1)).await?;
    let silent = pool.the(State::Idle).await?;
    pool.set(settings(0)).await?;
    world.stage.machines.freeze(&silent)?;
    pool.claim("build", "8621", json!({ "count": 2 })).await?;
    let ordered =
        |status: &RunnerClaimStatus| status.fleet.as_ref().is_some_and(|order| !order.instance_ids.is_empty());
    let first = pool.until_claim("build", "with its first order", ordered).await?;
    let created = first.fleet.context("the claim has a launch order")?.instance_ids;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    let names: Vec<_> = ready.workers.iter().map(|worker| worker.name.clone()).collect();
    ensure!(created.len() == 1 && names.contains(&created[0]) && !names.contains(&silent), "{created:?} {ready:?}");
    pool.until_ended(&silent, FailureReason::RegistrationTimeout).await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// An idle machine whose heartbeat stops is terminated, and another one is kept warm instead.
pub async fn idle_machine_that_died_is_replaced(world: &World) -> Result<()> {
    let settings = json!({ "minIdle": 1, "maxInstances": 1, "timeouts": { "heartbeat": "20s" } });
    let pool = Ec2Pool::new(world, settings).await?;
    let dead = pool.the(State::Idle).await?;
    world.stage.machines.freeze(&dead)?;
    pool.until_ended(&dead, FailureReason::HeartbeatStale).await?;
    pool.until_event(POOL, "WorkerEnded").await?;
    let alive = async || Ok(pool.ids(State::Idle).await?.pop().filter(|id| *id != dead));
    world.until_found("another machine is idle", alive).await?;
    pool.clean_up().await
}

/// A machine that died in the pool is noticed by its heartbeat, long before its time to register has passed.
pub async fn claimed_machine_that_died_is_replaced_before_its_time_to_register(world: &World) -> Result<()> {
    let timeouts = json!({ "heartbeat": "20s", "registration": "30m" });
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 2, "timeouts": timeouts })).await?;
    pool.set(json!({ "maxInstances": 2, "timeouts": timeouts })).await?;
    let dead = pool.the(State::Idle).await?;
    world.stage.machines.freeze(&dead)?;
    pool.claim("build", "8631", json!({})).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.workers.len() == 1 && ready.workers[0].name != dead, "{ready:?}");
    pool.until_ended(&dead, FailureReason::HeartbeatStale).await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// I8: a running machine whose heartbeat stops is shown as stale and kept: it may be running a job.
pub async fn i8_running_machine_without_heartbeat_is_shown_stale_and_kept(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "timeouts": { "heartbeat": "20s" } })).await?;
    pool.claim("build", "8630", json!({})).await?;
    let id = pool.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
    let heart = |worker: &Worker| Some(worker.status.as_ref()?.heartbeat.as_ref()?.state);
    world.stage.machines.freeze(&id)?;
    let stale = |worker: &Worker| heart(worker) == Some(HeartbeatState::Stale);
    world.until::<Worker>(&pool.namespace, &id, "stale", stale).await?;
    ensure!(
        pool.cloud.record(&id).await?.is_some_and(|record| record.state == State::Running),
        "the machine is still running"
    );
    world.stage.machines.thaw(&id)?;
    let fresh = |worker: &Worker| heart(worker) == Some(HeartbeatState::Fresh);
    world.until::<Worker>(&pool.namespace, &id, "fresh again", fresh).await?;
    pool.release("build").await?;
    pool.until_pooled(1).await?;
    pool.clean_up().await
}

/// I2: a claim that loses machines says how many are left and why; their runners are removed at GitHub.
pub async fn i2_lost_machines_are_reported_by_cause_and_their_runners_removed(world: &World) -> Result<()> {
    let settings = json!({ "defaults": { "usageClass": "spot" } });
    let pool = Ec2Pool::new(world, settings).await?;
    pool.claim("build", "8601", json!({ "count": 2 })).await?;
    let status = pool.until_phase("build", ClaimPhase::Ready).await?;
    let [reclaimed, terminated] = [0, 1].map(|index: usize| status.workers[index].name.clone());
    world.stage.machines.interrupt_spot(&reclaimed, std::time::Duration::from_secs(1))?;
    let short = pool.until_claim("build", "short of one", |status| status.progress == "1/2").await?;
    let (reason, message) = why(&short);
    ensure!(reason == "WorkerLost" && message.contains("spot_reclaimed"), "{message}");
    ensure!(short.phase == Some(ClaimPhase::Ready), "the other machine still runs");
    pool.until_ended(&reclaimed, FailureReason::SpotReclaimed).await?;
    world.stage.aws.terminate(&terminated).await?;
    let failed = pool.until_phase("build", ClaimPhase::Failed).await?;
    let (reason, message) = why(&failed);
    ensure!(reason == "WorkerLost" && message.contains("instance_gone"), "{message}");
    pool.until_event("build", "WorkerLost").await?;
    pool.until_no_runners().await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// Scripts are data: quotes, newlines and substitutions reach bash unchanged. So do long and unusual run ids.
pub async fn scripts_and_run_ids_are_data_whatever_they_contain(world: &World) -> Result<()> {
    let script = "#!/bin/bash\nset -eu\ncat > \"$PADDOCK_ROOT/proof\" <<'EOF'\n'\"`id`$(id)\\ \\n ${HOME} %s ünï 漢字 🐴\nEOF\n\
                  printf '%s' \"$(printf 'it'\"'\"'s')\" >> \"$PADDOCK_ROOT/proof\"\n";
    let run = "Zz9._-aB".repeat(7) + "_z.0-9A"; // 63 characters, the maximum
    let settings = json!({ "preRunnerScript": script, "reuse": { "scrubScript": "touch \"$PADDOCK_ROOT/it's \\\"scrubbed\\\"\"" } });
    let pool = Ec2Pool::new(world, settings).await?;
    pool.claim("build", &run, json!({})).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    let id = ready.workers[0].name.clone();
    let proof = std::fs::read_to_string(world.stage.machines.root(&id).join("proof"))?;
    ensure!(proof == "'\"`id`$(id)\\ \\n ${HOME} %s ünï 漢字 🐴\nit's", "the script was altered: {proof:?}");
    ensure!(pool.runners().get(&id) == Some(&vec![run]), "{:?}", pool.runners());
    pool.release("build").await?;
    pool.until_pooled(1).await?;
    ensure!(world.stage.machines.root(&id).join("it's \"scrubbed\"").exists(), "the scrub script ran as written");
    pool.clean_up().await
}

/// User data runs at the first boot only: after a reboot the agent comes back as a unit of systemd, and its runner takes jobs.
pub async fn machine_serves_its_claim_after_a_reboot(world: &World) -> Result<()> {
    world.stage.machines.set_systemd(true);
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await;
    world.stage.machines.set_systemd(false);
    let pool = pool?;
    pool.claim("build", "8640", json!({})).await?;
    let id = pool.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
    world.stage.machines.reboot(&id)?;
    let job = world.stage.github.queue_job(JobRequest {
        owner: ORGANIZATION.into(),
        repo: REPOSITORY.into(),
        labels: vec!["8640".into()],
        duration_ms: Some(10),
        ..JobRequest::default()
    })?;
    let job = world.stage.github.until_job(job.id, DEADLINE, |job| job.status == Status::Completed).await?;
    ensure!(job.taken_by.is_some_and(|taker| taker.runner_name == id), "{:?}", pool.running());
    ensure!(pool.claim_status("build").await?.phase == Some(ClaimPhase::Ready));
    pool.release("build").await?;
    pool.until_pooled(1).await?;
    pool.clean_up().await
}
