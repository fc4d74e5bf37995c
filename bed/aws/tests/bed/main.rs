//! Tests of the AWS part of the bed. All share one emulated AWS, started by the first test and stopped after the last.
//! They run in parallel, so each has its own tables, queues, templates and zones.

mod admin;
mod faults;
mod fleet;
mod fleet_rules;
mod iam;
mod machines;
mod queues;
mod store;
mod support;
mod template_fields;
mod visibility;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

macro_rules! trials {
    ($($module:ident: $($test:ident)*;)*) => {
        vec![$($(Trial::test(concat!(stringify!($module), "::", stringify!($test)), || {
            support::run(async |aws| $module::$test(aws).await);
            Ok(())
        }),)*)*]
    };
}

fn main() -> ExitCode {
    let trials = trials! {
        admin: rules_counts_and_capacity_are_set_over_http file_is_served_with_its_digest;
        store: conditional_writers_race_and_exactly_one_wins batches_are_processed_in_part;
        iam: a_machine_writes_its_own_items_and_nothing_else;
        faults: each_service_throttles_in_its_own_words any_error_code_can_be_asked_for server_errors_are_the_services_own
            lost_response_is_carried_out reset_is_not_carried_out hanging_call_is_not_carried_out
            delayed_call_is_carried_out_later rules_look_into_the_request what_is_not_as_aws_has_it_is_told;
        queues: queue_urls_lead_to_the_front a_message_is_delivered_twice a_message_is_delivered_late
            a_message_is_delivered_after_its_deletion a_receive_is_falsely_empty a_receive_is_out_of_order
            deleting_twice_is_no_error queue_with_other_attributes_is_not_made_again
            deleted_queue_is_not_made_again_for_a_minute batch_is_answered_with_both_lists
            calls_under_way_end_with_their_queue queues_are_listed_by_prefix_and_page_by_page
            a_message_ends_the_wait_of_a_receiver;
        fleet: requirements_become_the_cheapest_type burstable_types_can_be_had_when_asked_for
            same_token_same_fleet_even_at_once same_token_other_request_is_refused
            a_zone_without_capacity_sends_the_fleet_elsewhere a_fleet_is_fulfilled_in_part
            a_fleet_without_capacity_has_only_errors fleet_below_its_minimum_launches_nothing
            tags_come_from_template_and_fleet instances_are_described_in_pages
            fresh_instance_is_missing_for_a_while one_fleet_falls_short_and_others_do_not user_data_over_16_kib_is_refused
            requirements_are_previewed_in_pages an_ended_instance_says_why image_has_its_root_on_ebs boto3_reads_the_answer;
        fleet_rules: fleet_has_one_subnet_of_a_zone fleet_has_at_most_four_requirements
            requirements_that_leave_no_type_are_refused price_protection_leaves_types_out
            answer_says_where_instances_are missing_spot_capacity_is_told_once
            errors_of_a_fleet_can_be_asked_for;
        visibility: new_launch_template_is_missing_for_a_while new_version_is_missing_for_a_while
            new_instance_is_unknown_for_a_while;
        template_fields: an_image_is_looked_up_in_ssm_when_it_is_needed volumes_and_an_address_come_from_the_template;
        machines: user_data_runs_with_metadata_of_its_own and_dies_with_the_instance
            shutdown_terminates_as_the_template_says spot_instance_is_announced_then_taken
            frozen_machine_stops_and_thaws crashed_machine_leaves_its_instance_running
            a_hundred_machines_run_side_by_side failed_boot_runs_nothing nothing_is_left_when_dropped the_agent_is_fetched_and_checked;
    };
    let conclusion = libtest_mimic::run(&Arguments::from_args(), trials);
    let violations = support::stop();
    for violation in &violations {
        eprintln!("not as AWS has it: {violation}");
    }
    if violations.is_empty() { conclusion.exit_code() } else { ExitCode::FAILURE }
}
