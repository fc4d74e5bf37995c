//! End-to-end tests: the real operator, with the chart's own permissions, on real parts.
//!
//! The whole program runs in namespaces of its own (see `paddock_bed::isolate`), one stage serves all tests, and each
//! test has a Kubernetes namespace for itself.

mod boards;
mod ec2;
mod fixture;
mod jobs;
mod operator;

use std::{net::Ipv4Addr, process::ExitCode, sync::Arc};

use anyhow::Result;
use fixture::world::{Test, World};
use libtest_mimic::{Arguments, Trial};
use operator::secrets;
use paddock_bed::{
    faketime,
    isolate::{self, Options},
    kwok, node,
    operator::{Additions, Supervisor},
    process::{free_port, tool},
    stage::{Stage, TOOLS},
};

/// Tests that run in parallel.
const PARALLEL_TESTS: usize = 8;

/// How many of the tests that took longest are listed at the end.
const SLOWEST_LISTED: usize = 20;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // More than cores: tests wait most of the time.
    arguments.test_threads.get_or_insert(PARALLEL_TESTS);
    if arguments.list {
        return libtest_mimic::run(&arguments, trials(None)).exit_code();
    }
    match start() {
        Ok(world) => {
            let conclusion = libtest_mimic::run(&arguments, trials(Some(&world)));
            if conclusion.has_failed() {
                eprintln!("--- the operator's log ---\n{}", world.operator_log());
            }
            for (duration, name) in world.slowest(SLOWEST_LISTED) {
                eprintln!("{:>5} s {name}", duration.as_secs());
            }
            let violations = world.check(world.stage.violations());
            for violation in &violations {
                eprintln!("{violation}");
            }
            let leaks = world.check(secrets::leaks(&world));
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
    let skew_possible = tool(faketime::TOOL).map(drop).map_err(|error| format!("{error:#}"));
    let isolated = isolate::enter(Options {
        tools: &[TOOLS, &node::TOOLS, &kwok::TOOLS, &["github-schemas"]].concat(),
        listen: 0,
    })?;
    let runtime = tokio::runtime::Runtime::new()?;
    let (stage, operator) = runtime.block_on(async {
        let stage = Arc::new(Stage::start(&isolated, true).await?);
        let operator = Supervisor::new(stage.clone(), (Ipv4Addr::LOCALHOST, free_port()?).into());
        operator.start(Additions::default()).await?;
        anyhow::Ok((stage, operator))
    })?;
    if let Err(why) = &isolated.node_possible {
        eprintln!("tests on a real node are skipped: {why}");
    }
    if let Err(why) = &skew_possible {
        eprintln!("tests with wrong clocks are skipped: {why}");
    }
    Ok(Arc::new(World::new(runtime, stage, operator, isolated.node_possible, skew_possible)))
}

/// All tests; without a world they can only be listed.
fn trials(world: Option<&Arc<World>>) -> Vec<Trial> {
    let trial = |name: &'static str, test: Test, run: fn(Arc<World>, &str, Test) -> Result<()>| {
        let world = world.cloned();
        Trial::test(name, move || match world {
            Some(world) => run(world, name, test).map_err(|error| format!("{error:#}").into()),
            None => Err("tests are only listed".into()),
        })
    };
    // Tests that disturb the operator or the API server run alone, the others in parallel.
    macro_rules! trials {
        ($run:ident: $($topic:ident::$file:ident::$test:ident),+ $(,)?) => {
            [$(trial(
                concat!(stringify!($topic), "::", stringify!($file), "::", stringify!($test)),
                |world| Box::pin($topic::$file::$test(world)),
                World::$run,
            )),+]
        };
    }
    let parallel = trials!(run:
        ec2::authority::machine_that_floods_the_table_stops_no_other,
        ec2::claim::claim_takes_warm_machine_and_returns_it,
        ec2::claim::claim_on_empty_pool_launches_machines,
        ec2::claim::pool_with_personal_token_registers_runners_in_repository,
        ec2::deletion::i11_a_claim_can_be_deleted_in_every_phase,
        ec2::deletion::i11_a_deleted_pool_waits_for_its_claims,
        ec2::deletion::i11_namespace_with_pools_and_claims_can_be_deleted,
        ec2::drift::machines_of_an_edited_pool_are_replaced,
        ec2::drift::image_that_moves_replaces_machines,
        ec2::drift::machines_are_made_as_the_pool_says,
        ec2::drift::pool_with_an_old_runner_says_until_when_it_works,
        ec2::expiry::i2_expired_machine_shuts_down_in_every_state_without_the_operator,
        ec2::expiry::i2_operator_terminates_machine_that_starts_too_late,
        ec2::expiry::i2_operator_terminates_expired_claimed_machine,
        ec2::expiry::i2_operator_terminates_expired_running_and_idle_machines,
        ec2::faults::drift_at_aws_is_repaired,
        ec2::faults::pool_says_that_its_credentials_are_missing_or_refused,
        ec2::faults::i2_denied_termination_is_shown_and_retried,
        ec2::faults::i2_stuck_machine_stops_no_sweep,
        ec2::faults::i4_claim_that_aws_keeps_refusing_is_dumped,
        ec2::faults::i2_lost_machine_is_noticed_without_sqs,
        ec2::faults::i2_machine_of_no_pool_is_terminated,
        ec2::interruption::idle_machine_that_ec2_takes_back_is_replaced,
        ec2::interruption::interrupted_job_is_announced_and_run_again_once,
        ec2::interruption::interrupted_job_that_is_not_run_again_is_explained,
        ec2::launch::i2_a_lost_create_fleet_answer_makes_no_second_fleet,
        ec2::launch::machine_that_ec2_does_not_list_yet_is_kept,
        ec2::launch::claim_without_any_capacity_names_every_zone,
        ec2::launch::claim_waits_while_no_zone_has_capacity,
        ec2::launch::i4_spot_falls_back_to_on_demand_and_keeps_nothing_of_the_first_order,
        ec2::launch::i4_an_order_is_repeated_as_it_was_after_the_pool_was_edited,
        ec2::launch::pool_condition_shows_refused_launch_until_it_succeeds,
        ec2::last_words::failed_script_is_shown_with_what_it_printed,
        ec2::last_words::machine_without_an_agent_shows_its_console,
        ec2::last_words::deleted_runner_ends_its_machine_and_the_claim_says_why,
        ec2::last_words::pool_says_that_its_jobs_reach_the_metadata_service,
        ec2::machine::i4_a_failed_pre_runner_script_fails_the_claim,
        ec2::machine::i4_a_machine_that_never_comes_up_fails_the_claim,
        ec2::machine::i8_running_machine_without_heartbeat_is_shown_stale_and_kept,
        ec2::machine::machine_that_does_not_register_for_its_run_is_replaced,
        ec2::machine::failed_machine_of_the_pool_is_replaced_beside_a_created_one,
        ec2::machine::idle_machine_that_died_is_replaced,
        ec2::machine::claimed_machine_that_died_is_replaced_before_its_time_to_register,
        ec2::machine::i2_lost_machines_are_reported_by_cause_and_their_runners_removed,
        ec2::machine::machine_serves_its_claim_after_a_reboot,
        ec2::machine::scripts_and_run_ids_are_data_whatever_they_contain,
        ec2::machine::pool_backs_off_when_its_machines_fail,
        ec2::orders::idle_time_can_be_edited,
        ec2::orders::queue_deleted_a_moment_ago_is_waited_for,
        ec2::orders::launch_template_that_is_not_visible_yet_is_waited_for,
        ec2::orders::zones_beyond_the_first_four_are_asked_too,
        ec2::orders::named_types_are_launched_at_any_price,
        ec2::orders::claim_that_no_instance_type_meets_fails_at_once,
        ec2::orders::spot_without_capacity_anywhere_falls_back_to_on_demand,
        ec2::orders::passing_error_inside_an_answer_is_tried_again,
        ec2::orders::missing_role_for_spot_machines_is_named,
        ec2::ownership::i1_claim_made_again_under_its_name_gets_its_own_machines,
        ec2::ownership::records_of_other_versions_are_used_or_reclaimed,
        ec2::refusals::long_error_of_a_machine_is_cut_and_shown,
        ec2::refusals::refused_status_is_logged_once_and_written_later,
        ec2::release::run_completed_by_webhook_releases_its_claim,
        ec2::release::i2_machine_at_its_claim_limit_ends_and_leaves_no_runner,
        ec2::release::a_machine_whose_scrub_script_fails_is_never_pooled,
        ec2::scope::machine_of_one_repository_is_not_given_to_another,
        ec2::scope::pool_may_give_a_machine_to_every_repository,
        ec2::scope::idle_machine_of_another_repository_makes_room,
        ec2::scope::warm_minimum_is_refilled_by_a_new_machine_after_one_was_used,
        ec2::selection::claim_of_ten_takes_four_idle_machines_and_six_new_ones,
        ec2::selection::i1_two_claims_of_one_run_share_no_machine,
        ec2::selection::i3_idle_machine_that_does_not_fit_stays_claimable,
        ec2::selection::machine_larger_than_its_class_serves_a_claim_that_needs_its_size,
        ec2::selection::machine_of_unknown_size_counts_as_its_class,
        ec2::selection::poisoned_messages_are_dropped_and_the_next_one_tried,
        ec2::wake::idle_machine_costs_a_tenth_and_is_woken_for_a_claim,
        ec2::wake::machine_that_is_not_woken_serves_its_claim_all_the_same,
        ec2::waiting::claim_that_waits_for_room_holds_nothing,
        ec2::waiting::two_claims_for_all_machines_are_served_in_turn,
        ec2::waiting::claim_above_max_instances_fails_at_once,
        ec2::waiting::i4_claim_that_waits_for_capacity_holds_nothing,
        ec2::waiting::claim_without_capacity_fails_after_its_timeout,
        boards::claim::claim_for_two_is_ready_when_both_runners_are_online,
        boards::health::pod_that_never_starts_fails_its_worker,
        boards::health::a_runner_that_never_registers_is_replaced,
        boards::health::idle_runner_is_removed_after_its_timeout,
        boards::health::i8_busy_runner_is_kept,
        boards::health::i8_runner_that_github_calls_busy_is_kept,
        boards::health::a_lost_node_fails_its_worker_and_another_takes_over,
        boards::health::worker_without_pod_fails_and_is_replaced,
        boards::health::i2_runner_without_worker_is_removed,
        boards::refusals::i8_busy_runner_outlives_the_installation_of_the_app,
        boards::refusals::i11_unknown_answer_holds_up_no_deletion,
        boards::refusals::pod_that_ends_well_without_a_job_is_a_failure,
        boards::refusals::worker_made_again_does_not_take_its_predecessors_pod,
        boards::refusals::deleted_node_fails_its_worker,
        boards::refusals::refused_secret_is_shown_and_leaves_no_runner,
        jobs::claim::a_claim_follows_its_job,
        jobs::claim::a_job_cancelled_before_provisioning_makes_no_pod,
        jobs::claim::a_job_cancelled_after_provisioning_frees_its_slot,
        jobs::claim::runners_that_swap_jobs_leave_no_job_waiting,
        jobs::claim::jobs_that_github_does_not_tell_about_delay_no_other,
        jobs::claim::jobs_that_will_never_run_fail,
        jobs::owner::a_personal_account_is_served,
        jobs::owner::i7_an_owner_at_its_cap_waits,
        jobs::owner::owner_without_the_app_is_told_and_blocks_no_other,
        jobs::owner::claim_with_wrong_data_delays_no_other,
        jobs::owner::i12_owner_whose_requests_hang_delays_no_other,
        jobs::webhook::a_queued_job_becomes_a_claim,
        jobs::webhook::i9_forged_and_broken_webhooks_change_nothing,
        jobs::webhook::i6_i9_order_and_repetition_do_not_matter,
        jobs::webhook::a_follower_takes_webhooks_and_secrets_rotate,
        jobs::webhook::the_end_of_a_run_releases_its_machine,
        operator::hostile_network::i9_clients_that_send_nothing_delay_no_delivery,
        operator::pages::dashboards_show_pools_claims_and_workers,
        operator::permissions::claimer_can_claim_and_do_nothing_else,
    );
    let alone = trials!(run_alone:
        ec2::authority::token_goes_to_the_first_key_of_its_machine,
        ec2::deletion::i11_a_deleted_claim_waits_for_github_and_says_so,
        ec2::deletion::i11_claim_can_be_deleted_after_its_credentials,
        ec2::faults::i12_a_throttled_table_slows_a_claim_and_breaks_nothing,
        ec2::faults::i2_deleted_table_is_recreated,
        ec2::launch::resumed_order_counts_for_max_instances,
        ec2::ownership::finished_claim_keeps_its_condition_without_its_pool,
        ec2::release::run_completed_without_webhook_releases_its_claim_which_retention_deletes,
        ec2::selection::i1_ten_claims_of_ten_race_for_a_hundred_idle_machines,
        boards::refusals::i2_stray_runner_is_removed_where_no_worker_is_active,
        jobs::webhook::webhooks_lost_while_no_operator_runs_are_recovered,
        jobs::webhook::webhooks_refused_without_api_server_are_recovered,
        operator::outage::i5_claim_survives_kill_of_the_operator,
        operator::outage::paused_leader_is_replaced_and_exits,
        operator::outage::claim_survives_restart_of_the_api_server,
        operator::permissions::claim_waits_while_the_operator_lacks_a_permission,
        // Last: they leave more than a thousand objects.
        jobs::burst::burst_of_300_jobs_over_20_organisations,
        jobs::burst::i1_i7_each_of_a_thousand_jobs_is_served_once_and_in_order,
    );
    let on_a_node = trials!(run:
        boards::claim::claim_runs_a_job_on_the_board,
        boards::claim::second_claim_waits_for_the_slot,
        boards::claim::busy_worker_outlives_the_deletion_of_its_claim,
        boards::claim::deleted_claim_removes_its_idle_runner,
        boards::claim::lost_jit_config_is_replaced,
        boards::claim::failed_pod_is_explained_and_replaced,
        boards::device_plugin::second_pod_waits_for_the_slot,
        boards::device_plugin::slots_disappear_and_return_with_the_plugin,
        boards::device_plugin::plugin_may_label_its_own_node_and_nothing_else,
        jobs::round_trip::job_goes_from_github_to_the_board_and_back,
    );
    let alone_on_a_node = trials!(run_alone:
        boards::device_plugin::slots_outlive_a_restart_of_the_kubelet,
        // The kubelet refuses pods that start while the label is missing.
        boards::device_plugin::removed_label_comes_back,
    );
    let skewed = trials!(run_alone:
        ec2::clocks::operator_five_minutes_ahead_harms_nothing,
        ec2::clocks::operator_five_minutes_behind_harms_nothing,
        ec2::clocks::next_leader_five_minutes_ahead_ends_no_machine,
        ec2::clocks::machines_five_minutes_ahead_and_behind_are_served_and_named,
    );
    let no_node = world.is_some_and(|world| world.node_possible.is_err());
    let on_a_node = on_a_node.into_iter().chain(alone_on_a_node).map(|trial| trial.with_ignored_flag(no_node));
    let no_skew = world.is_some_and(|world| world.skew_possible.is_err());
    let skewed = skewed.into_iter().map(|trial| trial.with_ignored_flag(no_skew));
    parallel.into_iter().chain(skewed).chain(alone).chain(on_a_node).collect()
}
