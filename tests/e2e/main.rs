//! End-to-end tests: the real operator, under the chart's own rights, on real parts.
//!
//! The whole program runs in namespaces of its own (see `paddock_bed::isolate`), one stage serves all tests, and each
//! test has a Kubernetes namespace for itself.

mod board;
mod device_plugin;
mod ec2;
mod operator;
mod support;

use std::{process::ExitCode, sync::Arc};

use anyhow::Result;
use libtest_mimic::{Arguments, Trial};
use paddock_bed::{
    isolate::{self, Options},
    node,
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
            let conclusion = libtest_mimic::run(&arguments, trials(Some(&world)));
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
    let isolated = isolate::enter(Options { tools: &[TOOLS, &node::TOOLS, &["github-schemas"]].concat(), listen: 0 })?;
    let runtime = tokio::runtime::Runtime::new()?;
    let (stage, operator) = runtime.block_on(async {
        let stage = Stage::start(&isolated, true).await?;
        let operator = stage.operator("operator", &[]).await?;
        anyhow::Ok((stage, operator))
    })?;
    if let Err(why) = &isolated.node_possible {
        eprintln!("the tests of boards are skipped: {why}");
    }
    Ok(Arc::new(World::new(runtime, stage, operator, isolated.node_possible)))
}

/// Every test by its name; without a world they can only be listed.
fn trials(world: Option<&Arc<World>>) -> Vec<Trial> {
    let trial = |name: &str, test: Test, play: fn(Arc<World>, Test) -> Result<()>| {
        let world = world.cloned();
        Trial::test(name, move || match world {
            Some(world) => play(world, test).map_err(|error| format!("{error:#}").into()),
            None => Err("tests are only listed".into()),
        })
    };
    // Tests that do something to the operator or the API server run alone, the others side by side.
    macro_rules! trials {
        ($play:ident: $($module:ident::$test:ident),+ $(,)?) => {
            [$(trial(concat!(stringify!($module), "::", stringify!($test)), |world| Box::pin($module::$test(world)), World::$play)),+]
        };
    }
    let beside = trials!(play:
        ec2::claim_from_the_warm_pool_and_back,
        ec2::claim_from_an_empty_pool,
        operator::dashboards_show_what_goes_on,
    );
    let alone = trials!(play_alone:
        operator::i5_killed_in_the_middle_of_a_claim,
        operator::a_paused_leader_is_replaced_and_ends,
        operator::a_missing_right_is_missed,
        operator::the_api_server_restarts,
    );
    let on_a_node = trials!(play:
        board::claim_runs_a_job_on_the_board,
        board::second_claim_waits_for_the_slot,
        board::busy_worker_outlives_the_deletion_of_its_claim,
        board::deleted_claim_takes_its_idle_runner_along,
        board::lost_jit_config_is_replaced,
        board::failed_pod_is_explained_and_replaced,
        device_plugin::second_pod_waits_for_the_slot,
        device_plugin::slots_go_and_come_with_the_plugin,
        device_plugin::removed_label_comes_back,
        device_plugin::plugin_may_label_its_own_node_and_nothing_else,
    );
    let alone_on_a_node = trials!(play_alone:
        device_plugin::slots_outlive_a_restart_of_the_kubelet,
    );
    let no_node = world.is_some_and(|world| world.node_possible.is_err());
    let on_a_node = on_a_node.into_iter().chain(alone_on_a_node).map(|trial| trial.with_ignored_flag(no_node));
    beside.into_iter().chain(alone).chain(on_a_node).collect()
}
