//! End-to-end tests: the real operator, under the chart's own rights, on real parts.
//!
//! The whole program runs in namespaces of its own (see `paddock_bed::isolate`), one stage serves all tests, and each
//! test has a Kubernetes namespace for itself.

mod board;
mod board_burst;
mod board_health;
mod board_jobs;
mod board_whole;
mod boards;
mod canary;
mod device_plugin;
mod ec2;
mod ec2_end;
mod ec2_faults;
mod ec2_life;
mod ec2_pool;
mod linux;
mod operator;
mod support;
mod webhook;

use std::{process::ExitCode, sync::Arc};

use anyhow::Result;
use libtest_mimic::{Arguments, Trial};
use paddock_bed::{
    isolate::{self, Options},
    kwok, node,
    stage::{Stage, TOOLS},
};
use support::{Test, World};

/// Tests beside each other.
const AT_ONCE: usize = 8;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // They wait most of the time.
    arguments.test_threads.get_or_insert(AT_ONCE);
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
            let leaks = world.leaks();
            for leak in &leaks {
                eprintln!("I10: a secret is in {leak}");
            }
            if violations.is_empty() && leaks.is_empty() { conclusion.exit_code() } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("the stage could not be set: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start() -> Result<Arc<World>> {
    let isolated = isolate::enter(Options {
        tools: &[TOOLS, &node::TOOLS, &kwok::TOOLS, &["github-schemas"]].concat(),
        listen: 0,
    })?;
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
        ec2_end::i2_machines_end_themselves_in_every_state_when_the_operator_does_not,
        ec2_end::i2_the_operator_ends_a_machine_whose_time_to_start_is_up,
        ec2_end::i2_the_operator_ends_a_claimed_machine_whose_time_is_up,
        ec2_end::i2_the_operator_ends_machines_in_service_and_idle_ones_whose_time_is_up,
        ec2_end::i11_a_claim_can_be_deleted_in_every_phase,
        ec2_end::i11_a_deleted_pool_waits_for_its_claims,
        ec2_end::i11_a_namespace_goes_with_pools_and_claims_in_it,
        ec2_faults::drift_at_aws_is_repaired,
        ec2_faults::i2_a_denied_termination_is_shown_and_tried_again,
        ec2_faults::i2_a_lost_create_fleet_answer_makes_no_second_fleet,
        ec2_faults::i4_a_failed_pre_runner_script_fails_the_claim,
        ec2_faults::i4_a_machine_that_never_comes_up_fails_the_claim,
        ec2_faults::i4_partial_capacity_fails_the_claim_and_keeps_nothing,
        ec2_faults::i8_a_silent_machine_in_service_is_shown_and_left_alone,
        ec2_faults::a_machine_that_ec2_does_not_list_yet_is_not_given_up,
        ec2_faults::a_machine_that_registers_for_another_run_or_not_at_all_is_replaced,
        ec2_faults::total_capacity_loss_is_told_by_zone,
        ec2_life::a_run_that_a_webhook_calls_completed_releases_its_claim,
        ec2_life::i2_a_machine_that_has_served_its_claims_ends_and_leaves_no_runner,
        ec2_life::a_machine_whose_scrub_script_fails_is_never_pooled,
        ec2_life::a_claim_waits_while_every_zone_is_known_to_be_empty,
        ec2_life::i4_spot_falls_back_to_on_demand_and_keeps_nothing_of_the_first_order,
        ec2_life::i4_an_order_is_repeated_as_it_was_after_the_pool_was_edited,
        ec2_life::i2_lost_machines_are_told_apart_and_their_runners_removed,
        ec2_life::a_pool_says_what_is_wrong_with_it_until_it_is_mended,
        ec2_pool::a_personal_token_and_a_repository_serve_as_well,
        ec2_pool::claim_of_ten_takes_four_idle_machines_and_six_new_ones,
        ec2_pool::i1_two_claims_of_one_run_share_no_machine,
        ec2_pool::i3_an_idle_machine_that_does_not_fit_stays_for_others,
        ec2_pool::poisoned_messages_are_dropped_and_the_next_one_tried,
        ec2_pool::scripts_and_run_ids_are_data_whatever_they_contain,
        board_health::a_pod_that_never_starts_is_given_up,
        board_health::a_runner_that_never_registers_is_replaced,
        board_health::a_runner_without_a_job_is_given_up,
        board_health::i8_a_busy_runner_is_never_given_up,
        board_health::i8_github_refuses_to_remove_a_busy_runner,
        board_health::a_lost_node_fails_its_worker_and_another_takes_over,
        board_health::a_worker_without_a_pod_is_over_and_replaced,
        board_health::i2_a_runner_without_a_worker_is_swept,
        board_jobs::a_claim_follows_its_job,
        board_jobs::a_job_cancelled_before_provisioning_makes_no_pod,
        board_jobs::a_job_cancelled_after_provisioning_frees_its_slot,
        board_jobs::a_runner_that_takes_another_job_leaves_none_waiting,
        board_jobs::jobs_that_will_never_run_fail,
        board_jobs::a_personal_account_is_served,
        board_jobs::i7_an_owner_at_its_cap_waits,
        board_jobs::an_owner_without_the_app_is_told_and_harms_nobody,
        board_jobs::i12_an_owner_that_hangs_delays_nobody_else,
        board_jobs::a_claim_for_two_by_hand,
        webhook::a_queued_job_becomes_a_claim,
        webhook::i9_forged_and_broken_webhooks_change_nothing,
        webhook::i6_i9_order_and_repetition_do_not_matter,
        webhook::a_follower_takes_webhooks_and_secrets_rotate,
        webhook::the_end_of_a_run_releases_its_machine,
    );
    let alone = trials!(play_alone:
        operator::i5_killed_in_the_middle_of_a_claim,
        operator::a_paused_leader_is_replaced_and_ends,
        operator::a_missing_right_is_missed,
        operator::the_api_server_restarts,
        ec2_life::a_run_that_is_over_releases_its_claim_and_the_claim_goes_in_time,
        ec2_end::i11_a_deleted_claim_waits_for_github_and_says_so,
        ec2_end::i11_a_claim_goes_without_its_credentials,
        ec2_pool::i1_ten_claims_of_ten_race_for_a_hundred_idle_machines,
        ec2_faults::i12_a_throttled_table_slows_a_claim_and_breaks_nothing,
        ec2_faults::i2_a_deleted_table_is_made_anew,
        webhook::webhooks_lost_while_nobody_listens_are_found,
        webhook::webhooks_wait_for_the_api_server,
        board_burst::burst_of_300_jobs_over_20_organisations,
        board_burst::i1_i7_a_thousand_jobs_at_once_none_lost_none_double,
    );
    let on_a_node = trials!(play:
        board::claim_runs_a_job_on_the_board,
        board::second_claim_waits_for_the_slot,
        board::busy_worker_outlives_the_deletion_of_its_claim,
        board::deleted_claim_takes_its_idle_runner_along,
        board::lost_jit_config_is_replaced,
        board::failed_pod_is_explained_and_replaced,
        board_whole::job_goes_from_github_to_the_board_and_back,
        device_plugin::second_pod_waits_for_the_slot,
        device_plugin::slots_go_and_come_with_the_plugin,
        device_plugin::plugin_may_label_its_own_node_and_nothing_else,
    );
    let alone_on_a_node = trials!(play_alone:
        device_plugin::slots_outlive_a_restart_of_the_kubelet,
        // Pods that start while the label is gone are refused by the kubelet.
        device_plugin::removed_label_comes_back,
    );
    let no_node = world.is_some_and(|world| world.node_possible.is_err());
    let on_a_node = on_a_node.into_iter().chain(alone_on_a_node).map(|trial| trial.with_ignored_flag(no_node));
    beside.into_iter().chain(alone).chain(on_a_node).collect()
}
