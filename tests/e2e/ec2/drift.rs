//! Pools that are edited, or whose image moves: their machines are replaced.

use anyhow::{Context, Result, ensure};
use kube::api::{Patch, PatchParams};
use paddock::api::{ClaimPhase, FailureReason, RUNNER_OUTDATED, RunnerPool, RunnerPoolStatus};
use paddock_record::State;
use serde_json::{Value, json};

use crate::fixture::{
    ec2_pool::{Ec2Pool, POOL},
    world::World,
};

/// Idle machines are replaced, a busy one ends when it is released, and the pool counts what is left to do.
pub async fn machines_of_an_edited_pool_are_replaced(world: &World) -> Result<()> {
    let settings = |script: &str| json!({ "minIdle": 2, "maxInstances": 4, "preRunnerScript": script });
    let pool = Ec2Pool::new(world, settings("echo old")).await?;
    pool.claim("build", "9801", json!({})).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    let busy = ready.workers.first().context("a machine")?.name.clone();
    pool.until_pool("warm again", |status| status.workers.idle == 2).await?;
    let idle = pool.ids(State::Idle).await?;
    ensure!(pool.pool_status().await?.outdated == 0, "nothing was edited");

    pool.set(settings("echo new")).await?;
    for id in &idle {
        pool.until_ended(id, FailureReason::Outdated).await?;
    }
    let rest = |status: &RunnerPoolStatus| status.outdated == 1 && status.workers.idle == 2;
    pool.until_pool("warm with new machines beside the busy one", rest).await?;
    let record = pool.cloud.record(&busy).await?.context("it has a record")?;
    ensure!(record.state == State::Running, "I8: {record:?}");
    pool.release("build").await?;
    pool.until_ended(&busy, FailureReason::Outdated).await?;
    pool.until_pool("replaced", |status| status.outdated == 0 && status.workers.idle == 2).await?;
    pool.clean_up().await
}

/// A machine is made from the image that an SSM parameter holds, and replaced when that is another one.
pub async fn image_that_moves_replaces_machines(world: &World) -> Result<()> {
    let aws = &world.stage.aws;
    let namespace = world.namespace().await?;
    let name = format!("/{namespace}/image");
    let settings = |max: u32| json!({ "ami": { "ssmParameter": name }, "minIdle": 1, "maxInstances": max });
    let pool = Ec2Pool::in_namespace(world, namespace.clone());
    pool.set(settings(2)).await?;
    pool.until_pool_said(&format!("parameter {name} does not exist")).await?;
    aws.set_parameter(&name, aws.ami_id());
    let first = pool.the(State::Idle).await?;
    let image = |id: &str| pool.instances().into_iter().find(|instance| instance.id == id).map(|it| it.image_id);
    ensure!(image(&first).as_deref() == Some(aws.ami_id()), "{:?}", image(&first));

    let newer = aws.register_image(&format!("newer of {namespace}")).await?;
    aws.set_parameter(&name, &newer);
    // An edit makes the operator look at once; otherwise it does every five minutes.
    pool.set(settings(3)).await?;
    pool.until_ended(&first, FailureReason::Outdated).await?;
    let second = pool.the(State::Idle).await?;
    ensure!(image(&second).as_ref() == Some(&newer), "{:?}", image(&second));
    let template = pool.pool_status().await?.launch_template.context("a pool has a template")?;
    ensure!((template.version, template.image.as_ref()) == (1, Some(&newer)), "the template is the same: {template:?}");
    pool.until_pool("replaced", |status| status.outdated == 0).await?;
    pool.clean_up().await
}

/// What a pool says about its machines is in their launch template; a runner group reaches warm machines with their next claim.
pub async fn machines_are_made_as_the_pool_says(world: &World) -> Result<()> {
    // Nothing answers there, and nothing is sent there: the agent's own addresses are exceptions.
    let nowhere = "http://127.0.0.1:9";
    let host_of_github = world.stage.github.html_url().replace("http://", "");
    let host_of_github = host_of_github.split(':').next().unwrap_or_default();
    let settings = |github: Value| {
        let mut settings = json!({
            "minIdle": 1, "maxInstances": 1, "publicAddress": true, "tags": { "team": "rocket", "Name": "ci" },
            "blockDevices": [{ "deviceName": "/dev/xvdb", "size": 30, "encrypted": true }],
            "proxy": { "http": nowhere, "noProxy": [host_of_github, ".internal"] },
        });
        if !github.is_null() {
            settings["github"] = github;
        }
        settings
    };
    let pool = Ec2Pool::new(world, settings(Value::Null)).await?;
    let id = pool.the(State::Idle).await?;
    let instance = pool.instances().into_iter().find(|instance| instance.id == id).context("an instance")?;
    let tag = |name: &str| instance.tags.get(name).map(String::as_str);
    ensure!(
        (tag("team"), tag("Name"), tag("paddock:pool")) == (Some("rocket"), Some("ci"), Some(&pool.key())),
        "{instance:?}"
    );
    let ec2 = async |action: &str, field: &str, value: &str| -> Result<String> {
        let form = [
            ("Action", action),
            ("Version", "2016-11-15"),
            (field, value),
            ("Filter.1.Name", "attachment.instance-id"),
        ];
        let form = if action == "DescribeVolumes" { &form[..] } else { &form[..3] };
        let client = reqwest::Client::builder().no_proxy().build()?;
        Ok(client.post(world.stage.aws.endpoint()).form(form).send().await?.text().await?)
    };
    let volumes = ec2("DescribeVolumes", "Filter.1.Value.1", &id).await?;
    for part in ["<size>30</size>", "<volumeType>gp3</volumeType>", "<encrypted>true</encrypted>", "<key>team</key>"] {
        ensure!(volumes.contains(part), "no {part}: {volumes}");
    }
    let described = ec2("DescribeInstances", "InstanceId.1", &id).await?;
    ensure!(described.contains("<publicIp>"), "no public address: {described}");

    let mut github = world.api::<RunnerPool>(&pool.namespace).get(POOL).await?.spec.ec2.context("an EC2 pool")?.github;
    github.runner_group = Some("Default".into());
    pool.set(settings(json!(github))).await?;
    pool.claim("build", "9802", json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    let record = pool.cloud.record(&id).await?.context("the machine was not replaced")?;
    ensure!((record.state, record.runner_group.as_str()) == (State::Running, "Default"), "{record:?}");
    pool.release("build").await?;
    pool.clean_up().await
}

/// A pool that pins a release says until when GitHub takes it; without the pin it has the one that GitHub lists.
pub async fn pool_with_an_old_runner_says_until_when_it_works(world: &World) -> Result<()> {
    let sums = json!({ "x64": "0".repeat(64), "arm64": "1".repeat(64) });
    let pool = Ec2Pool::new(world, json!({ "runnerVersion": "2.300.0", "runnerSha256": sums })).await?;
    let condition = |status: &RunnerPoolStatus| {
        let found = status.conditions.iter().find(|condition| condition.type_ == RUNNER_OUTDATED);
        found.map(|condition| (condition.status.clone(), condition.message.clone()))
    };
    pool.until_pool("outdated", |status| condition(status).is_some_and(|(status, _)| status == "True")).await?;
    let status = pool.pool_status().await?;
    let runner = status.runner.clone().context("a pool has a runner")?;
    let (since, deadline) = (runner.newer_since.context("since")?.0, runner.deadline.context("until")?.0);
    ensure!(deadline.duration_since(since).as_hours() == 30 * 24, "{since} {deadline}");
    let message = condition(&status).unwrap_or_default().1;
    ensure!(message.contains("runner 2.300.0 is older than") && message.contains(&runner.latest), "{message}");

    let unpin = json!({ "spec": { "ec2": { "runnerVersion": null, "runnerSha256": null } } });
    let pools = world.api::<RunnerPool>(&pool.namespace);
    pools.patch(POOL, &PatchParams::default(), &Patch::Merge(unpin)).await?;
    pool.until_pool("current", |status| condition(status).is_some_and(|(status, _)| status == "False")).await?;
    let runner = pool.pool_status().await?.runner.context("a pool has a runner")?;
    ensure!(runner.version == runner.latest && runner.deadline.is_none(), "{runner:?}");
    pool.clean_up().await
}
