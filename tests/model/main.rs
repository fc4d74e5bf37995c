//! A model of the EC2 pool's protocol, checked exhaustively: pickup, claim, fleet, wait, release, termination, sweep,
//! and a crash of the operator between any two writes, combined with what SQS, EC2, agents, users and time may do
//! meanwhile.
//!
//! **Files.** `world.rs`: the state. `operator.rs`: the leader's next write. `protocol.rs`: every action and its
//! effect. `transitions.rs`: records as the operator's types, and their changes. `properties.rs`: the invariants.
//! `mutant.rs`: defects. This file: the bounds of the search, and the property that each mutant breaks, with the
//! shortest counterexample. `cargo test --test model -- --nocapture` shows these.
//!
//! **Real code.** `ec2::claim::decide` and `surplus`, `ec2::waiting_line::admit_last`, `upkeep`, `is_abandoned` and
//! `lost` of `ec2::upkeep`, `ec2::matching::pick` and `Exhaustion` make the decisions. `Instance::serves` tells whose
//! a machine is, the functions of `paddock_record::transition` change records, `Transition::holds` checks the condition
//! of a write, and `State::may_become` defines the allowed transitions. The model converts its records to their types.
//! The controllers' use of a decision and the agent are modelled by hand, each under the name of the original: change
//! both together.
//!
//! **Two leaders.** Only one replica leads. A former leader is modelled as a single write in flight that may arrive at
//! any later time; the new leader knows the table as of its takeover or its last read. Within one leader, writes to
//! idle records may arrive after later ones, because both claims and the pool change them.
//!
//! **Quiet.** Progress is what happens eventually by itself: a decided write, an agent's next step, a hidden message
//! that becomes visible. A world without progress is quiet, and final properties must hold in every quiet world.
//! Faults, deletions and time are not progress, but may occur at any moment, as often as the bounds allow.
//!
//! **Which machine.** An empty receive proves nothing: a claim that finds the queue empty checks the ledger next, and
//! takes a free machine without its message. It orders a new one only if no fitting machine is free or being claimed.
//!
//! **A claim made again.** The first claim can be removed by force at any moment, whatever it holds, and made again
//! under its name and run, as the second claim of the model: another uid tells them apart. The second one may also
//! follow an orderly deletion.
//!
//! **A machine that dies.** EC2 can take any machine (`kills`); the sweep finds it. A machine in the pool can die or
//! freeze while EC2 shows it as running (`deaths`): then its heartbeat does not change any more, its agent does
//! nothing, and every timeout of its record passes.
//!
//! **Left out.** Time has three ages: fresh, late (past every timeout), expired. A sweep may find an orphan at once,
//! not only after a minute, and silence counts at once. A fleet is limited by EC2's capacity; AWS errors are requests
//! that did not arrive. The leader knows at once which claims exist. Tokens, the silence of machines outside the pool,
//! the pool's size and deletion, and two claims of one run at a time are not modelled. A message has no threshold of
//! its own: an outdated one is as valid as its record.
//!
//! **Rules found by the checker.** It found four violations of the invariants. The code now prevents them, and the
//! mutants `ForgetsLeaving`, `ForgetsClaims`, `KeepsSurplus` and `RestoresByCount` restore the old behaviour:
//! - a write also checks `leaving`. Otherwise a late renewal, or a late write that clears `leaving`, undoes an earlier
//!   release, and the machine is claimable while it is still registered;
//! - a write also checks how many claims a machine has been assigned to. Otherwise, where a claim returns a machine and
//!   takes it again, a late write that clears the first `leaving` clears the second, with the same result;
//! - a claim releases machines beyond its count. Otherwise a claim that a former leader's last write served twice
//!   waits for thresholds, or is Ready with one too many;
//! - a leader sends a message for each idle machine for which it has not sent one yet. Otherwise an obsolete message
//!   counts in place of one that was never sent.

mod mutant;
mod operator;
mod properties;
mod protocol;
mod transitions;
mod world;

use mutant::Mutant;
use properties::*;
use protocol::{
    Protocol,
    Start::{Absent, Never, Pooled, Warming},
};
use stateright::{Checker, HasDiscoveries, Model};
use world::Faults;

const NO_FAULTS: Faults = Faults { crashes: 0, messages: 0, ticks: 0, kills: 0, deaths: 0 };

/// Two claims and one machine.
const REUSE: Protocol = Protocol {
    machines: [Pooled, Never],
    counts: [1, 1],
    max: 2,
    deletable: 2,
    again: false,
    keep_warm: false,
    faults: Faults { crashes: 1, messages: 1, ..NO_FAULTS },
    mutant: Mutant::None,
};

/// A claim for two, one from the pool and one from EC2.
const FLEET: Protocol = Protocol {
    machines: [Pooled, Absent],
    counts: [2, 0],
    faults: Faults { crashes: 2, kills: 1, ..NO_FAULTS },
    ..REUSE
};

/// Two machines kept warm, one of them still booting.
const WARM: Protocol = Protocol {
    machines: [Warming, Pooled],
    counts: [1, 0],
    keep_warm: true,
    faults: Faults { crashes: 1, ticks: 1, ..NO_FAULTS },
    ..REUSE
};

/// Two claims, each for every machine of a full pool.
const COMPETE: Protocol =
    Protocol { machines: [Pooled, Pooled], counts: [2, 2], faults: Faults { crashes: 1, ..NO_FAULTS }, ..REUSE };

/// A claim that is removed by force or deleted, and made again under its name and run.
const AGAIN: Protocol = Protocol { machines: [Pooled, Absent], again: true, faults: NO_FAULTS, ..REUSE };

/// A machine that dies in the pool, and one that may replace it.
const DEATH: Protocol = Protocol {
    machines: [Pooled, Absent],
    counts: [1, 0],
    faults: Faults { crashes: 1, deaths: 1, ..NO_FAULTS },
    ..REUSE
};

fn holds(protocol: Protocol) {
    let checker = protocol.checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    println!("{} states, at most {} steps: {:?}", checker.unique_state_count(), checker.max_depth(), checker.model());
    checker.assert_properties();
}

/// Searches for ever shorter counterexamples: the checker's first one is rarely the shortest.
fn breaks(protocol: Protocol, property: &'static str) {
    let mut shortest = None;
    loop {
        let checker = protocol.clone().checker().finish_when(HasDiscoveries::AnyOf([property].into()));
        let checker = checker.target_max_depth(shortest.as_ref().map_or(usize::MAX, Vec::len)).spawn_bfs().join();
        let Some(path) = checker.discovery(property) else { break };
        let mut steps = path.into_vec();
        let holds = protocol.property(property).condition;
        let bad = steps.iter().position(|(world, _)| !holds(&protocol, world)).expect("the path breaks it");
        steps.truncate(bad + 1);
        shortest = Some(steps);
    }
    let steps = shortest.unwrap_or_else(|| panic!("{:?} does not break this: {property}", protocol.mutant));
    println!("{:?} after {} steps breaks {property}", protocol.mutant, steps.len() - 1);
    steps[..steps.len() - 1].iter().for_each(|(_, action)| println!("    {:?}", action.as_ref().expect("a step")));
}

#[test]
fn machines_go_from_claim_to_claim_whatever_dies_or_comes_twice() {
    holds(REUSE);
}

#[test]
fn two_claims_race_for_two_machines() {
    holds(Protocol { machines: [Pooled, Pooled], faults: Faults { messages: 1, ..NO_FAULTS }, ..REUSE });
}

#[test]
fn of_two_claims_for_too_few_machines_one_is_served_and_one_holds_nothing() {
    holds(COMPETE);
    holds(Protocol { machines: [Pooled, Absent], ..COMPETE });
    holds(Protocol { machines: [Pooled, Never], counts: [1, 1], max: 1, ..COMPETE });
}

#[test]
fn i5_two_claims_that_hold_half_of_what_each_needs_wait_for_ever() {
    breaks(Protocol { mutant: Mutant::HoldsWhileItWaits, faults: NO_FAULTS, ..COMPETE }, CONVERGES);
}

#[test]
fn a_claim_made_again_gets_its_own_machines_and_those_of_the_old_one_are_reclaimed() {
    holds(AGAIN);
    holds(Protocol { machines: [Absent, Absent], ..AGAIN });
    holds(Protocol { faults: Faults { crashes: 1, ..NO_FAULTS }, ..AGAIN });
    holds(Protocol { machines: [Pooled, Pooled], faults: Faults { crashes: 1, ..NO_FAULTS }, deletable: 0, ..AGAIN });
}

#[test]
fn i1_a_claim_that_owns_by_name_and_run_is_served_with_the_machines_of_another() {
    breaks(Protocol { mutant: Mutant::OwnsByName, ..AGAIN }, STOLEN);
    breaks(Protocol { mutant: Mutant::OwnsByName, ..AGAIN }, ALL_OR_NOTHING);
}

#[test]
fn i2_a_claim_removed_by_force_keeps_its_machines_if_none_reclaims_them() {
    breaks(Protocol { mutant: Mutant::NeverReclaims, ..AGAIN }, ALL_OR_NOTHING);
}

#[test]
fn a_machine_that_dies_in_the_pool_is_found_and_costs_no_claim() {
    holds(DEATH);
    holds(Protocol { machines: [Pooled, Pooled], faults: Faults { deaths: 1, ..NO_FAULTS }, counts: [1, 1], ..DEATH });
}

#[test]
fn i2_a_machine_that_dies_in_the_pool_stays_there_if_its_silence_does_not_count() {
    breaks(Protocol { mutant: Mutant::IgnoresSilence, ..DEATH }, LEAK);
}

#[test]
fn i2_without_a_sweep_a_machine_that_ec2_took_stays_in_the_pool() {
    let taken = Faults { kills: 1, ..NO_FAULTS };
    breaks(Protocol { mutant: Mutant::NeverSweeps, faults: taken, ..DEATH }, LEAK);
}

#[test]
fn fleets_are_ordered_once_and_claims_end_whole_or_empty() {
    holds(FLEET);
}

#[test]
fn warm_machines_reach_the_pool_and_keep_a_message() {
    holds(WARM);
}

#[test]
fn thresholds_and_slow_agents_strand_no_machine() {
    holds(Protocol { keep_warm: true, faults: Faults { ticks: 2, ..NO_FAULTS }, ..REUSE });
    holds(Protocol { keep_warm: true, faults: Faults { crashes: 1, ticks: 3, ..NO_FAULTS }, counts: [1, 0], ..REUSE });
}

#[test]
fn a_crash_alone_loses_no_message_even_if_none_is_restored() {
    holds(Protocol { mutant: Mutant::NeverRestores, faults: Faults { crashes: 1, ..NO_FAULTS }, ..REUSE });
}

#[test]
fn i3_deleting_a_message_before_its_machine_is_claimed_strands_the_machine() {
    breaks(Protocol { mutant: Mutant::DeletesFirst, ..REUSE }, STRAND);
}

#[test]
fn i3_a_warm_machine_whose_offer_was_never_sent_is_stranded_if_none_is_restored() {
    breaks(Protocol { mutant: Mutant::NeverRestores, ..WARM }, STRAND);
}

#[test]
fn i1_claiming_without_a_condition_gives_a_machine_two_owners() {
    breaks(Protocol { mutant: Mutant::ClaimsBlindly, ..REUSE }, STOLEN);
    breaks(Protocol { mutant: Mutant::ClaimsBlindly, ..REUSE }, ARROWS);
}

#[test]
fn i1_claiming_a_machine_that_has_yet_to_leave_gives_it_two_runs() {
    breaks(Protocol { mutant: Mutant::IgnoresLeaving, ..REUSE }, OWNER);
}

#[test]
fn i2_an_order_without_a_token_of_its_own_is_launched_twice() {
    breaks(Protocol { mutant: Mutant::NewTokenPerOrder, machines: [Absent, Absent], counts: [1, 0], ..FLEET }, ONCE);
}

#[test]
fn i2_without_a_sweep_a_crash_after_create_fleet_leaks_a_machine() {
    breaks(Protocol { mutant: Mutant::NeverSweeps, faults: Faults { crashes: 1, ..NO_FAULTS }, ..FLEET }, LEAK);
}

#[test]
fn i1_a_late_renewal_undoes_a_release_unless_it_names_the_leaving_it_saw() {
    breaks(Protocol { mutant: Mutant::ForgetsLeaving, faults: Faults { ticks: 1, ..NO_FAULTS }, ..WARM }, OWNER);
    breaks(Protocol { mutant: Mutant::ForgetsLeaving, faults: Faults { crashes: 1, ..NO_FAULTS }, ..REUSE }, OWNER);
}

#[test]
fn i1_a_late_write_undoes_the_second_release_of_a_claim_unless_it_names_the_assignment() {
    breaks(Protocol { mutant: Mutant::ForgetsClaims, counts: [2, 0], deletable: 1, ..COMPETE }, OWNER);
}

#[test]
fn i1_a_signal_of_the_first_claim_of_a_run_pools_a_machine_that_serves_the_second() {
    breaks(Protocol { mutant: Mutant::CountsOldSignals, faults: NO_FAULTS, ..COMPETE }, OWNER);
}

#[test]
fn i4_a_claim_served_twice_keeps_one_too_many_or_waits_for_ever() {
    let twice = |faults| Protocol { mutant: Mutant::KeepsSurplus, counts: [1, 0], deletable: 0, faults, ..COMPETE };
    breaks(twice(Faults { crashes: 1, ..NO_FAULTS }), ALL_OR_NOTHING);
    breaks(twice(Faults { crashes: 2, ..NO_FAULTS }), CONVERGES);
}

#[test]
fn i3_a_needless_message_hides_a_missing_one_from_a_restore_by_count() {
    breaks(Protocol { mutant: Mutant::RestoresByCount, keep_warm: false, ..WARM }, STRAND);
}
