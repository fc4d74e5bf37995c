//! Clocks that are five minutes wrong do no harm, and pools say so.

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use paddock::api::{CLOCK_SKEW, ClaimPhase, RunnerPoolStatus};
use paddock_bed::faketime;
use paddock_record::{Instance as Record, State};
use serde_json::{Value, json};

use crate::fixture::{
    ec2_pool::{Ec2Pool, is_pooled},
    webhook::metrics,
    world::World,
};

/// As far as clocks may differ, in seconds.
const FIVE_MINUTES: i64 = 300;

/// How far a measured skew may be from the real one, in seconds: an answer may be late on a busy machine.
const TOLERATED: f64 = 20.0;

/// Far shorter than the skew, even with the minute that an agent gives itself; long enough to leave GitHub in.
const IDLE: i64 = 90;

/// No machine is launched beside `most`: of more than are kept warm, the oldest ends when its idle time is over.
fn settings(warm: u32, most: u32) -> Value {
    json!({
        "minIdle": warm, "maxInstances": most,
        "lifetimes": { "idle": format!("{IDLE}s") },
        // Machines that have served a claim are kept warm too.
        "reuse": { "scope": "Pool" },
    })
}

pub async fn operator_five_minutes_ahead_harms_nothing(world: &World) -> Result<()> {
    operator_serves(world, FIVE_MINUTES, "11201").await
}

pub async fn operator_five_minutes_behind_harms_nothing(world: &World) -> Result<()> {
    operator_serves(world, -FIVE_MINUTES, "11202").await
}

async fn operator_serves(world: &World, ahead: i64, run: &str) -> Result<()> {
    world.start_operator_ahead(ahead).await?;
    let outcome = async {
        let pool = Ec2Pool::new(world, settings(1, 1)).await?;
        let id = pool.the(State::Idle).await?;
        serve(&pool, run, 1).await?;
        until_renewed(&pool, &id).await?;
        until_says(&pool, "the operator's clock", ahead).await?;
        for source in ["aws", "github"] {
            until_metric(world, source, |skew| (skew - ahead as f64).abs() < TOLERATED).await?;
        }
        pool.clean_up().await
    };
    let outcome = outcome.await;
    world.start_operator().await?;
    outcome
}

/// A claimed machine and an idle one outlive a leader with the right time, and the next one, whose clock is wrong.
pub async fn next_leader_five_minutes_ahead_ends_no_machine(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, settings(1, 2)).await?;
    let claimed = pool.the(State::Idle).await?;
    world.stage.machines.freeze(&claimed)?;
    pool.claim("build", "11203", json!({})).await?;
    pool.until_record(&claimed, "claimed", |record| record.state == State::Claimed).await?;
    let idle = pool.the(State::Idle).await?;
    world.start_operator_ahead(FIVE_MINUTES).await?;
    let outcome = async {
        until_says(&pool, "the operator's clock", FIVE_MINUTES).await?;
        until_renewed(&pool, &idle).await?;
        world.stage.machines.thaw(&claimed)?;
        let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
        ensure!(ready.workers[0].name == claimed, "the claim got another machine: {ready:?}");
        pool.until_running(&[claimed, idle]).await
    };
    let outcome = outcome.await;
    world.start_operator().await?;
    outcome?;
    pool.until_pool("without a skew", |status| skew(status).is_none_or(|(differs, _)| !differs)).await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// Machines with a clock ahead and behind serve a claim, return to the pool and stay there, and the pool names them.
pub async fn machines_five_minutes_ahead_and_behind_are_served_and_named(world: &World) -> Result<()> {
    let machines = &world.stage.machines;
    let outcome = async {
        machines.set_env(faketime::ahead(FIVE_MINUTES)?);
        let pool = Ec2Pool::new(world, settings(1, 1)).await?;
        let ahead = pool.the(State::Idle).await?;
        machines.set_env(faketime::ahead(-FIVE_MINUTES)?);
        pool.set(settings(2, 2)).await?;
        pool.until_pooled(2).await?;
        let behind = pool.ids(State::Idle).await?.into_iter().find(|id| *id != ahead).context("there are two")?;
        for (id, by) in [(&ahead, FIVE_MINUTES), (&behind, -FIVE_MINUTES)] {
            let beat = pool.cloud.heartbeat(id).await?.context("it beats")?.updated_at;
            let error = beat.duration_since(Timestamp::now()).as_secs() - by;
            ensure!(error.abs() < FIVE_MINUTES / 2, "the clock of {id} is not as the test wants it: {beat}");
        }
        serve(&pool, "11204", 2).await?;
        for id in [&ahead, &behind] {
            until_renewed(&pool, id).await?;
        }
        until_says(&pool, &format!("the clock of {ahead}"), FIVE_MINUTES).await?;
        until_says(&pool, &format!("the clock of {behind}"), -FIVE_MINUTES).await?;
        until_metric(world, "agents", |skew| (skew.abs() - FIVE_MINUTES as f64).abs() < TOLERATED).await?;
        pool.clean_up().await
    };
    let outcome = outcome.await;
    machines.set_env(Vec::new());
    outcome
}

/// The idle machines serve a claim for all of them, and return to the pool.
async fn serve(pool: &Ec2Pool<'_>, run: &str, count: usize) -> Result<()> {
    let idle = pool.ids(State::Idle).await?;
    pool.claim("build", run, json!({ "count": count })).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    let served: Vec<_> = ready.workers.iter().map(|worker| worker.name.clone()).collect();
    ensure!(served.iter().all(|id| idle.contains(id)), "{served:?} are not of {idle:?}");
    pool.release("build").await?;
    pool.until_pooled(count).await?;
    let pooled = pool.ids(State::Idle).await?;
    ensure!(served.iter().all(|id| pooled.contains(id)), "{served:?} have ended");
    Ok(())
}

/// Waits until the idle time of a machine in the pool was renewed, by the right time.
async fn until_renewed(pool: &Ec2Pool<'_>, id: &str) -> Result<()> {
    let first = pool.cloud.record(id).await?.with_context(|| format!("{id} has no record"))?;
    let renewed = |record: &Record| is_pooled(record) && record.threshold > first.threshold;
    pool.until_record(id, "renewed", renewed).await?;
    let last = pool.cloud.record(id).await?.and_then(|record| record.threshold).context("it is idle")?;
    let left = last.duration_since(Timestamp::now());
    ensure!(left.as_secs_f64() <= IDLE as f64 + TOLERATED, "it is renewed for {left}");
    ensure!(pool.running().iter().any(|running| running == id), "{id} has ended");
    Ok(())
}

/// Whether clocks differ, and which.
fn skew(status: &RunnerPoolStatus) -> Option<(bool, &str)> {
    let condition = status.conditions.iter().find(|condition| condition.type_ == CLOCK_SKEW)?;
    Some((condition.status == "True", &condition.message))
}

/// Waits until the pool says that a clock is about so many seconds ahead.
async fn until_says(pool: &Ec2Pool<'_>, clock: &str, ahead: i64) -> Result<()> {
    let said = |status: &RunnerPoolStatus| {
        let (_, message) = skew(status).filter(|(differs, _)| *differs)?;
        let rest = message.split(", ").find_map(|part| part.strip_prefix(clock)?.strip_prefix(" is "))?;
        let (seconds, rest) = rest.split_once(" s ")?;
        let sign = if rest.starts_with("ahead of AWS's") { 1 } else { -1 };
        Some(sign * seconds.parse::<i64>().ok()?)
    };
    let says = |status: &RunnerPoolStatus| said(status).is_some_and(|said| ((said - ahead) as f64).abs() < TOLERATED);
    pool.until_pool(&format!("saying that {clock} is {ahead} s ahead"), says).await
}

/// Waits until the metric of a source is as `wanted`.
async fn until_metric(world: &World, source: &str, wanted: impl Fn(f64) -> bool) -> Result<()> {
    let name = format!("paddock_clock_skew_seconds{{source=\"{source}\"}} ");
    let says = async || {
        let text = metrics(&world.url()).await?;
        Ok(text.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).is_some_and(&wanted))
    };
    world.until_true(&format!("the metric of {source} says so"), says).await
}
