//! The protocol of the EC2 pool as a model that a checker takes through everything that can happen: pickup, claim,
//! fleet, release, end, sweep, and between any two writes the death of the operator, with what SQS, EC2, agents and the
//! passing of time may do meanwhile.
//!
//! **Files.** `world.rs`: what there is. `operator.rs`: what the leader does next. `protocol.rs`: every action and what it
//! does. `transitions.rs`: how a record changes. `properties.rs`: what must hold. Here: the bounds within which everything is tried, and the protocol broken on
//! purpose, one rule at a time, each with the shortest way into disaster. `cargo test --test model -- --nocapture` shows these.
//!
//! **What is the code itself.** `plan::claim::step` (with `standing`) and `surplus`, `plan::instance::upkeep`, `plan::pickup::pick` and
//! `Exhaustion` decide; the functions of `paddock_record::transition` change records, and `Transition::holds` says whether a
//! change may be stored; `State::may_become` says which arrows there are. The model spells its records out as the values that
//! these take. What the controllers do with a decision and the agent are written down a second time, each under the name of
//! its original: who changes one of those changes it here.
//!
//! **Two leaders.** Only one replica leads. A former leader is a single write that is still on its way and may arrive at
//! any later time; the new leader knows what the table said when it took over, or when it last read it. Within a leader,
//! writes to idle records may arrive after those that were decided later, because claims and the pool both move them.
//!
//! **Quiet.** What happens by itself sooner or later is progress: a decided write, an agent's next step, a hidden message
//! that comes back. A world without any is quiet, and what must hold in the end must hold in every quiet world. Faults,
//! deletions and the passing of time are no progress, but may come at any moment, each as often as the bounds say.
//!
//! **Which machine.** A queue that shows nothing is no proof: a claim that finds it empty asks the ledger next, and takes a free
//! machine without its message. A new one is ordered only when the ledger has none that is free or in another's hand.
//!
//! **What is left out.** Time is three ages: fresh, late (past every timeout), expired. A sweep may find an orphan at once,
//! not after a minute. A fleet is what EC2 has left; errors of AWS are requests that did not arrive. Tokens, heartbeats
//! that stop, the pool's size, its deletion, and two claims of one run are not here. A message carries no threshold of
//! its own: one that outlives its time is as good as its record.
//!
//! **Rules that the checker asked for.** Three ways out of the invariants were found here first. What closes them is in the
//! code now, and the mutants `ForgetsLeaving`, `KeepsSurplus` and `RestoresByCount` are the code as it was:
//! - a write also expects the `leaving` that was seen. Else a renewal or a clearing of `leaving` that comes late undoes a
//!   release that came first, and the machine is offered while it is still registered;
//! - a claim lets go of what it holds beyond its count. Else one that a former leader's last write served twice waits for
//!   thresholds, or is Ready with one too many;
//! - a leader offers idle machines that it has not offered yet. Else a message that nobody needs any more stands in the
//!   count for one that was never sent.

mod operator;
mod properties;
mod protocol;
mod transitions;
mod world;

use properties::*;
use protocol::{
    Mutant, Protocol,
    Start::{Absent, Never, Pooled, Warming},
};
use stateright::{Checker, HasDiscoveries, Model};
use world::Faults;

const NO_FAULTS: Faults = Faults { crashes: 0, messages: 0, ticks: 0, kills: 0 };

/// Two claims and one machine.
const REUSE: Protocol = Protocol {
    machines: [Pooled, Never],
    counts: [1, 1],
    deletable: 2,
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

/// Two machines kept warm, one of them still coming up.
const WARM: Protocol = Protocol {
    machines: [Warming, Pooled],
    counts: [1, 0],
    keep_warm: true,
    faults: Faults { crashes: 1, ticks: 1, ..NO_FAULTS },
    ..REUSE
};

fn holds(protocol: Protocol) {
    let checker = protocol.checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    println!("{} states, at most {} steps: {:?}", checker.unique_state_count(), checker.max_depth(), checker.model());
    checker.assert_properties();
}

/// Looks for ever shorter counterexamples: the checker's first one is rarely the shortest.
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
fn fleets_are_ordered_once_and_claims_end_whole_or_empty() {
    holds(FLEET);
}

#[test]
fn warm_machines_reach_the_pool_and_stay_offered() {
    holds(WARM);
}

#[test]
fn thresholds_and_slow_agents_strand_nobody() {
    holds(Protocol { keep_warm: true, faults: Faults { ticks: 2, ..NO_FAULTS }, ..REUSE });
    holds(Protocol { keep_warm: true, faults: Faults { crashes: 1, ticks: 3, ..NO_FAULTS }, counts: [1, 0], ..REUSE });
}

#[test]
fn a_crash_alone_costs_no_offer_even_if_none_is_restored() {
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
    breaks(Protocol { mutant: Mutant::OrdersAnew, machines: [Absent, Absent], counts: [1, 0], ..FLEET }, ONCE);
}

#[test]
fn i2_without_a_sweep_a_crash_after_create_fleet_leaks_a_machine() {
    breaks(Protocol { mutant: Mutant::NeverSweeps, ..FLEET }, LEAK);
}

#[test]
fn i1_a_late_renewal_undoes_a_release_unless_it_names_the_leaving_it_saw() {
    breaks(Protocol { mutant: Mutant::ForgetsLeaving, faults: Faults { ticks: 1, ..NO_FAULTS }, ..WARM }, OWNER);
    breaks(Protocol { mutant: Mutant::ForgetsLeaving, faults: Faults { crashes: 1, ..NO_FAULTS }, ..REUSE }, OWNER);
}

#[test]
fn i4_a_claim_served_twice_keeps_one_too_many_or_waits_for_ever() {
    let twice = Protocol { mutant: Mutant::KeepsSurplus, machines: [Pooled, Pooled], counts: [1, 0], ..FLEET };
    breaks(twice.clone(), ALL_OR_NOTHING);
    breaks(twice, CONVERGES);
}

#[test]
fn i3_a_needless_message_hides_a_missing_one_from_a_restore_by_count() {
    breaks(Protocol { mutant: Mutant::RestoresByCount, keep_warm: false, ..WARM }, STRAND);
}
