//! I5: the operator is killed right after each single write that it makes in a claim's life and in a pool's upkeep, one
//! by one, and the next one brings everything to the same end.

mod board;
mod ec2;
mod ec2_faults;
mod gate;
mod life;
mod scene;

use std::{process::ExitCode, sync::Arc};

use anyhow::Result;
use futures::future::try_join_all;
use libtest_mimic::{Arguments, Trial};
use paddock_bed::{
    isolate::{self, Isolated, Options},
    node,
    stage::{Stage, TOOLS},
};
use tokio::runtime::Runtime;

use crate::life::{Scenario, sweep};

/// The tests, with scenarios that are swept beside each other, and whether each needs a node.
const TESTS: [(&str, &[&Scenario], bool); 3] = [
    ("i5_each_write_of_an_ec2_pools_life_can_be_the_operators_last", &[&ec2::SCENARIO], false),
    (
        "i5_each_write_while_ec2_or_a_machine_fails_can_be_the_operators_last",
        // A claim is dumped after 75 s, most of which are a pause.
        &[&ec2_faults::SHORTAGES, &ec2_faults::DUMP],
        false,
    ),
    ("i5_each_write_of_a_board_claims_life_can_be_the_operators_last", &[&board::SCENARIO], true),
];

fn main() -> ExitCode {
    // One after the other: each sweep fills the machine by itself.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    if arguments.list {
        let trials = TESTS.map(|(name, ..)| Trial::test(name, || Ok(())));
        return libtest_mimic::run(&arguments, trials.into()).exit_code();
    }
    let tools = [TOOLS, &node::TOOLS, &["github-schemas"]].concat();
    let isolated = isolate::enter(Options { tools: &tools, listen: 0 }).expect("a bed of its own");
    let (runtime, stage) = set(&isolated).expect("a stage");
    let (runtime, stage) = (Arc::new(runtime), Arc::new(stage));
    let trials = TESTS.map(|(name, scenarios, on_a_node)| {
        let (runtime, stage) = (runtime.clone(), stage.clone());
        let skipped = isolated.node_possible.as_ref().err().filter(|_| on_a_node);
        if let Some(why) = skipped {
            println!("{name} is skipped: {why}");
        }
        let test = move || {
            let outcome = runtime.block_on(async {
                let _node = if on_a_node { Some(board::start_node(&stage).await?) } else { None };
                try_join_all(scenarios.iter().map(|scenario| sweep(&stage, scenario))).await.map(drop)
            });
            outcome.map_err(|error| format!("{error:?}").into())
        };
        Trial::test(name, test).with_ignored_flag(skipped.is_some())
    });
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

fn set(isolated: &Isolated) -> Result<(Runtime, Stage)> {
    let runtime = Runtime::new()?;
    let stage = runtime.block_on(Stage::start(isolated, true))?;
    Ok((runtime, stage))
}
