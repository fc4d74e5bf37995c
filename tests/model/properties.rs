//! The properties to check, by the project's invariants.

use paddock_record::State;
use stateright::Property;

use crate::{protocol::Protocol, world::*};

pub const OWNER: &str = "I1: a machine is registered for its owner alone, and a free one not at all";
pub const STOLEN: &str = "I1: an owner is never replaced, and no claim changes another's machine";
pub const ONCE: &str = "I2: an order is launched once";
pub const LEAK: &str = "I2: in quiet, every machine has a live record, and every live record a live machine";
pub const STRAND: &str = "I3: in quiet, every idle machine has a message";
pub const ALL_OR_NOTHING: &str =
    "I4: in quiet, a Ready claim holds its count of running machines, and a finished one none";
pub const CONVERGES: &str = "I5: in quiet, a claim in progress holds nothing and cannot be served";
pub const ARROWS: &str = "I6: only allowed transitions";

type Holds = fn(&Protocol, &World) -> bool;

pub fn all() -> Vec<Property<Protocol>> {
    let always: [(&'static str, Holds); 8] = [
        (OWNER, |_, world| world.pairs().all(|(record, machine)| fits(record, machine))),
        (STOLEN, |_, world| !world.stolen),
        (ONCE, |protocol, world| {
            let launched = |fleet: Option<Ids>| fleet.unwrap_or_default().iter().filter(|there| **there).count();
            (0..CLAIMS).all(|claim| launched(world.fleets[claim]) <= protocol.counts[claim] as usize)
        }),
        (LEAK, |protocol, world| {
            let agree = |(record, machine): (Option<Record>, Machine)| {
                record.is_some_and(|record| record.is_live()) == (machine.ec2 == Ec2::Running && !machine.dead)
            };
            world.pairs().all(agree) || !protocol.is_quiet(world)
        }),
        (STRAND, |protocol, world| {
            let idle = |id: usize| world.table[id].is_some_and(|record| record.state == State::Idle);
            (0..MACHINES).all(|id| !idle(id) || world.shown[id] > 0) || !protocol.is_quiet(world)
        }),
        (ALL_OR_NOTHING, |protocol, world| {
            (0..CLAIMS).all(|claim| whole(protocol, world, claim)) || !protocol.is_quiet(world)
        }),
        (CONVERGES, |protocol, world| {
            let settled = |index: usize| {
                let waits = || waits(protocol, world, index);
                world.claims[index].is_none_or(|claim| !claim.deleting && (claim.phase != Phase::Working || waits()))
            };
            (0..CLAIMS).all(settled) || !protocol.is_quiet(world)
        }),
        (ARROWS, |_, world| !world.wrong_arrow),
    ];
    let always = always.map(|(name, holds)| Property::always(name, holds));
    always.into_iter().chain([Property::sometimes("a claim is Ready and all is quiet", ready as Holds)]).collect()
}

fn ready(protocol: &Protocol, world: &World) -> bool {
    world.claims.iter().flatten().any(|claim| claim.phase == Phase::Ready) && protocol.is_quiet(world)
}

fn fits(record: Option<Record>, machine: Machine) -> bool {
    let Some(record) = record.filter(|_| machine.ec2 == Ec2::Running) else { return true };
    match record.state {
        State::Created | State::Claimed => machine.serving.is_none() || machine.serving == record.run(),
        State::Running => machine.serving == record.run(),
        State::Idle => machine.serving.is_none() || !record.is_free(),
        State::Terminated | State::Unknown => true,
    }
}

/// Whether a claim holds nothing, and there is not enough for it.
fn waits(protocol: &Protocol, world: &World, claim: usize) -> bool {
    let live = world.table.iter().flatten().filter(|record| record.is_live());
    let held = live.clone().filter(|record| record.is_held_by(claim)).count();
    let free = live.clone().filter(|record| record.is_free()).count();
    let absent = world.machines.iter().filter(|machine| machine.ec2 == Ec2::Absent).count();
    let room = (protocol.max as usize).saturating_sub(live.count());
    held == 0 && free + room.min(absent) < protocol.counts[claim] as usize
}

fn whole(protocol: &Protocol, world: &World, claim: usize) -> bool {
    let held: Vec<_> = world.table.iter().flatten().filter(|record| record.is_held_by(claim)).collect();
    let count = protocol.counts[claim] as usize;
    match world.claims[claim].map(|claim| claim.phase) {
        Some(Phase::Working) => true,
        Some(Phase::Ready) => {
            let short = world.lost && held.len() < count;
            (short || held.len() == count) && held.iter().all(|record| record.state == State::Running)
        }
        Some(Phase::Over) | None => held.is_empty(),
    }
}

impl World {
    fn pairs(&self) -> impl Iterator<Item = (Option<Record>, Machine)> {
        self.table.into_iter().zip(self.machines)
    }
}
