//! End-to-end tests: the real operator, under the chart's own rights, on real parts.
//!
//! The whole program runs in namespaces of its own (see `paddock_bed::isolate`), one stage serves all tests, and each
//! test has a Kubernetes namespace for itself.

mod ec2;
mod operator;
mod support;

use std::{process::ExitCode, sync::Arc};

use anyhow::Result;
use libtest_mimic::{Arguments, Trial};
use paddock_bed::{
    isolate::{self, Options},
    stage::{Stage, TOOLS},
};
use support::{Test, World};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    if arguments.list {
        return libtest_mimic::run(&arguments, trials(None)).exit_code();
    }
    match start() {
        Ok(world) => {
            let conclusion = libtest_mimic::run(&arguments, trials(Some(world.clone())));
            if conclusion.has_failed() {
                eprintln!("--- the operator's log ---\n{}", world.operator_log());
            }
            let violations = world.violations();
            for violation in &violations {
                eprintln!("not as GitHub has it: {violation}");
            }
            if violations.is_empty() { conclusion.exit_code() } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("the stage could not be set: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start() -> Result<Arc<World>> {
    let isolated = isolate::enter(Options { tools: &[TOOLS, &["github-schemas"]].concat(), listen: 0 })?;
    let runtime = tokio::runtime::Runtime::new()?;
    let (stage, operator) = runtime.block_on(async {
        let stage = Stage::start(&isolated, true).await?;
        let operator = stage.operator("operator", &[]).await?;
        anyhow::Ok((stage, operator))
    })?;
    Ok(Arc::new(World::new(runtime, stage, operator)))
}

/// Every test by its name; without a world they can only be listed.
fn trials(world: Option<Arc<World>>) -> Vec<Trial> {
    let trial = |name: &str, test: Test, play: fn(Arc<World>, Test) -> Result<()>| {
        let world = world.clone();
        Trial::test(name, move || match world {
            Some(world) => play(world, test).map_err(|error| format!("{error:#}").into()),
            None => Err("tests are only listed".into()),
        })
    };
    let beside = |name, test| trial(name, test, World::play);
    let alone = |name, test| trial(name, test, World::play_alone);
    vec![
        beside("ec2_claim_from_the_warm_pool_and_back", |world| {
            Box::pin(ec2::claim_from_the_warm_pool_and_back(world))
        }),
        beside("ec2_claim_from_an_empty_pool", |world| Box::pin(ec2::claim_from_an_empty_pool(world))),
        beside("dashboards_show_what_goes_on", |world| Box::pin(operator::dashboards_show_what_goes_on(world))),
        alone("i5_killed_in_the_middle_of_a_claim", |world| Box::pin(operator::killed_in_the_middle_of_a_claim(world))),
        alone("a_paused_leader_is_replaced_and_ends", |world| {
            Box::pin(operator::a_paused_leader_is_replaced_and_ends(world))
        }),
        alone("a_missing_right_is_missed", |world| Box::pin(operator::a_missing_right_is_missed(world))),
        alone("the_api_server_restarts", |world| Box::pin(operator::the_api_server_restarts(world))),
    ]
}
