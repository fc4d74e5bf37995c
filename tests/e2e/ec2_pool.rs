//! Who gets which machine: idle ones first, each to one claim alone, whatever lies in the queue.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use paddock::api::{ClaimPhase, RunnerClaimStatus, WorkerSource};
use paddock_bed::{
    aws::{
        Service,
        faults::{Effect, Rule},
    },
    github::Scope,
    stage::{ORGANIZATION, REPOSITORY},
};
use paddock_record::{IdleMessage, State, stamp};
use serde_json::json;

use crate::{
    linux::{Linux, parts, why},
    support::World,
};

fn names(status: &RunnerClaimStatus) -> BTreeSet<String> {
    status.workers.iter().map(|worker| worker.name.clone()).collect()
}

fn from(status: &RunnerClaimStatus, source: WorkerSource) -> usize {
    status.workers.iter().filter(|worker| worker.source == source).count()
}

/// A claim takes what is idle and has the rest made; all of them serve its run, and all are pooled after it.
pub async fn claim_of_ten_takes_four_idle_machines_and_six_new_ones(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 4, "maxInstances": 10 })).await?;
    linux.set(json!({ "maxInstances": 10 })).await?;
    let idle: BTreeSet<_> = linux.ids(State::Idle).await?.into_iter().collect();
    linux.claim("build", "8100", json!({ "count": 10 })).await?;
    let ready = linux.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.progress == "10/10", "{ready:?}");
    ensure!((from(&ready, WorkerSource::Pool), from(&ready, WorkerSource::Created)) == (4, 6), "{ready:?}");
    ensure!(names(&ready).is_superset(&idle), "{idle:?} were idle: {ready:?}");
    let runners = linux.runners();
    ensure!(runners.len() == 10 && runners.values().all(|labels| labels == &["8100"]), "{runners:?}");
    ensure!(linux.instances().len() == 10, "no machine too many was made");

    linux.release("build").await?;
    linux.until_pooled(10).await?;
    linux.clean_up().await
}

/// I1: claims that come at once share what is idle; nobody gets a machine that another has, and none is made.
pub async fn i1_ten_claims_of_ten_race_for_a_hundred_idle_machines(world: &World) -> Result<()> {
    // A hundred agents and runners on a machine of two cores take their time.
    let settings = json!({
        "minIdle": 100, "maxInstances": 100,
        "timeouts": { "registration": "20m", "validation": "20m", "deregistration": "20m" },
        "lifetimes": { "created": "30m", "claimed": "30m", "idle": "30m" },
    });
    let linux = Linux::new(world, settings).await?;
    let claims: Vec<_> = (0..10).map(|number| (format!("build-{number}"), format!("820{number}"))).collect();
    try_join_all(claims.iter().map(|(name, run)| linux.claim(name, run, json!({ "count": 10 })))).await?;
    for part in parts(100) {
        let more = async || Ok(linux.runners().len() >= part);
        world.until_true(&format!("{part} runners are registered"), more).await?;
    }
    let mut owned = BTreeSet::new();
    for (name, run) in &claims {
        let ready = linux.until_phase(name, ClaimPhase::Ready).await?;
        ensure!(from(&ready, WorkerSource::Pool) == 10, "all are from the pool: {ready:?}");
        let runners = linux.runners();
        for id in names(&ready) {
            ensure!(runners.get(&id) == Some(&vec![run.clone()]), "{id} serves {run} alone: {runners:?}");
            ensure!(owned.insert(id), "I1: a machine has two claims: {ready:?}");
        }
    }
    ensure!(linux.instances().len() == 100, "none was made");
    try_join_all(claims.iter().map(|(name, _)| linux.release(name))).await?;
    linux.until_pooled(100).await?;
    linux.clean_up().await
}

/// Two claims of one run have machines of their own, and one leaves without the other's.
pub async fn i1_two_claims_of_one_run_share_no_machine(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    linux.claim("a", "8300", json!({})).await?;
    linux.claim("b", "8300", json!({})).await?;
    let (a, b) = (linux.until_phase("a", ClaimPhase::Ready).await?, linux.until_phase("b", ClaimPhase::Ready).await?);
    ensure!((a.workers.len(), b.workers.len()) == (1, 1) && names(&a).is_disjoint(&names(&b)), "{a:?} {b:?}");
    linux.release("a").await?;
    let runners = linux.runners();
    let rest: BTreeSet<_> = names(&b);
    ensure!(rest.iter().all(|id| runners.get(id) == Some(&vec!["8300".into()])), "b keeps its runner: {runners:?}");
    linux.release("b").await?;
    linux.clean_up().await
}

/// A claim that no idle machine fits has one made; I3: the idle one stays offered.
pub async fn i3_an_idle_machine_that_does_not_fit_stays_for_others(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    let small = linux.the(State::Idle).await?;
    linux.claim("big", "8400", json!({ "cpu": 8 })).await?;
    let ready = linux.until_phase("big", ClaimPhase::Ready).await?;
    ensure!(from(&ready, WorkerSource::Created) == 1 && !names(&ready).contains(&small), "{ready:?}");
    linux.claim("fitting", "8401", json!({})).await?;
    let ready = linux.until_phase("fitting", ClaimPhase::Ready).await?;
    ensure!(names(&ready) == BTreeSet::from([small]), "the idle one was there: {ready:?}");
    linux.release("big").await?;
    linux.release("fitting").await?;
    linux.clean_up().await
}

/// Malformed, foreign, expired and repeated messages, and those of machines that are gone, are thrown away; the claim
/// gets the machine that is really there, once.
pub async fn poisoned_messages_are_dropped_and_the_next_one_tried(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    let (id, queue) = (linux.the(State::Idle).await?, linux.queue().await?);
    let record = linux.cloud.record(&id).await?.context("it has a record")?;
    let honest = IdleMessage {
        instance_id: id.clone(),
        usage_class: record.usage_class,
        instance_type: record.instance_type,
        cpu: record.cpu,
        mem: record.mem,
        resource_class: record.resource_class,
        threshold: record.threshold.map(stamp).unwrap_or_default(),
    };
    let poison = [
        "{".to_owned(),
        "[]".to_owned(),
        "'; rm -rf / #\n$(reboot) \u{1F4A3}".to_owned(),
        json!({ "instanceId": id }).to_string(),
        IdleMessage { instance_id: "i-0123456789abcdef0".into(), ..honest.clone() }.write(),
        IdleMessage { threshold: "2020-01-01T00:00:00Z".into(), ..honest.clone() }.write(),
        honest.write(),
    ];
    let _twice = linux.fault(Rule::on(Service::Sqs, "ReceiveMessage", Effect::Duplicate).containing(&id).times(2));
    let _ghost = linux.fault(Rule::on(Service::Sqs, "DeleteMessage", Effect::AfterDeletion).containing(&id).once());
    for body in &poison {
        linux.cloud.send(&queue, body).await?;
    }
    linux.claim("build", "8500", json!({})).await?;
    let ready = linux.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(names(&ready) == BTreeSet::from([id.clone()]), "{ready:?}");
    // Whatever poison was not met yet is met by one that finds nothing.
    linux.claim("late", "8501", json!({})).await?;
    let full = |status: &RunnerClaimStatus| why(status).0 == "PoolFull";
    linux.until_claim("late", "waiting for room", full).await?;
    let empty = async || Ok(linux.cloud.queue_size(&queue).await? == 0);
    world.until_true("the queue is rid of poison", empty).await?;
    let owners = linux.records().await?;
    ensure!(owners[&id].run_id == "8500", "I1: it still serves its first run: {owners:?}");
    linux.delete_claim("late").await?;
    linux.release("build").await?;
    linux.clean_up().await
}

/// Scripts are data: quotes, newlines, substitutions and any script reach bash as they were written, and nothing else
/// runs them. So do long and odd run ids.
pub async fn scripts_and_run_ids_are_data_whatever_they_contain(world: &World) -> Result<()> {
    let script = "#!/bin/bash\nset -eu\ncat > \"$PADDOCK_ROOT/proof\" <<'EOF'\n'\"`id`$(id)\\ \\n ${HOME} %s ünï 漢字 🐴\nEOF\n\
                  printf '%s' \"$(printf 'it'\"'\"'s')\" >> \"$PADDOCK_ROOT/proof\"\n";
    let run = "Zz9._-aB".repeat(7) + "_z.0-9A"; // 63 characters, the most there may be
    let settings = json!({ "preRunnerScript": script, "reuse": { "scrubScript": "touch \"$PADDOCK_ROOT/it's \\\"scrubbed\\\"\"" } });
    let linux = Linux::new(world, settings).await?;
    linux.claim("build", &run, json!({})).await?;
    let ready = linux.until_phase("build", ClaimPhase::Ready).await?;
    let id = ready.workers[0].name.clone();
    let proof = std::fs::read_to_string(world.stage.machines.root(&id).join("proof"))?;
    ensure!(proof == "'\"`id`$(id)\\ \\n ${HOME} %s ünï 漢字 🐴\nit's", "the script was changed on its way: {proof:?}");
    ensure!(linux.runners().get(&id) == Some(&vec![run]), "{:?}", linux.runners());
    linux.release("build").await?;
    linux.until_pooled(1).await?;
    ensure!(world.stage.machines.root(&id).join("it's \"scrubbed\"").exists(), "the scrub script ran as written");
    linux.clean_up().await
}

/// A pool can have a person's token in place of an App, and a repository in place of an organisation.
pub async fn a_personal_token_and_a_repository_serve_as_well(world: &World) -> Result<()> {
    let linux = Linux::unready(world, json!({})).await?;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "token", "namespace": linux.namespace },
        "stringData": { "github_token": world.stage.github.personal_token(&[ORGANIZATION]) },
    });
    world.stage.kube.apply(&secret.to_string()).await?;
    let github = json!({ "owner": ORGANIZATION, "repository": REPOSITORY, "credentialsRef": { "name": "token" } });
    linux.set(json!({ "github": github })).await?;
    linux.claim("build", "8450", json!({})).await?;
    let id = linux.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
    let runner = world.stage.github.runner(&id).context("GitHub knows the runner")?;
    ensure!(runner.scope == Scope::Repository(ORGANIZATION.into(), REPOSITORY.into()), "{runner:?}");
    linux.release("build").await?;
    linux.until_pooled(1).await?;
    linux.clean_up().await
}
