#![allow(dead_code)]
#[path = "../../tests/e2e/board.rs"]
mod board;
#[path = "../../tests/e2e/support.rs"]
mod support;
use libtest_mimic::{Arguments, Trial};
use paddock_bed::{
    isolate::{self, Options},
    node,
    stage::{Stage, TOOLS},
};
use std::{process::ExitCode, sync::Arc};
use support::World;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let tools = [TOOLS, &node::TOOLS].concat();
    let isolated = isolate::enter(Options { tools: &tools, listen: 0 }).unwrap();
    println!("node possible: {:?}", isolated.node_possible);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (stage, operator) = runtime.block_on(async {
        let stage = Stage::start(&isolated).await.unwrap();
        let operator = stage.operator("operator", &[]).await.unwrap();
        (stage, operator)
    });
    let world = Arc::new(World::new(runtime, stage, operator));
    let test = |name: &str, test: support::Test| {
        let world = world.clone();
        Trial::test(name, move || world.play(test).map_err(|error| format!("{error:?}").into()))
    };
    let trials = vec![
        test("claim_runs_a_job_on_the_board", |w| Box::pin(board::claim_runs_a_job_on_the_board(w))),
        test("second_claim_waits_for_the_slot", |w| Box::pin(board::second_claim_waits_for_the_slot(w))),
        test("busy_worker_outlives_the_deletion_of_its_claim", |w| {
            Box::pin(board::busy_worker_outlives_the_deletion_of_its_claim(w))
        }),
        test("deleted_claim_takes_its_idle_runner_along", |w| {
            Box::pin(board::deleted_claim_takes_its_idle_runner_along(w))
        }),
        test("lost_jit_config_is_replaced", |w| Box::pin(board::lost_jit_config_is_replaced(w))),
        test("failed_pod_is_explained_and_replaced", |w| Box::pin(board::failed_pod_is_explained_and_replaced(w))),
    ];
    let conclusion = libtest_mimic::run(&arguments, trials);
    println!("--- operator log ---\n{}", world.operator_log());
    conclusion.exit_code()
}
