//! The model's actions and their effects.

use paddock_core::ec2::matching::Pickup;
use paddock_record::State;
use stateright::{Model, Property};

use crate::{
    mutant::Mutant,
    operator::{Next, only},
    properties,
    transitions::{NOW, instance},
    world::*,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    Pooled,
    /// Launched to be kept warm.
    Warming,
    /// EC2 can launch it.
    Absent,
    /// EC2 has no capacity for it.
    Never,
}

#[derive(Clone, Debug)]
pub struct Protocol {
    pub machines: [Start; MACHINES],
    /// The machine count of each claim; 0 if there is no such claim.
    pub counts: [u32; CLAIMS],
    /// `maxInstances` of the pool.
    pub max: u32,
    /// How many claims, from the first, may be deleted.
    pub deletable: usize,
    /// The second claim is the first one, removed by force or deleted, and made again under its name and run.
    pub again: bool,
    pub keep_warm: bool,
    pub faults: Faults,
    pub mutant: Mutant,
}

/// The sender of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    Claim(usize),
    Pool,
    Former,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// The leader reads the table again.
    Load,
    /// A claim polls the queue and receives a machine's message, or none until the pool counts as exhausted.
    Receive(usize, Option<usize>),
    /// A write is sent and arrives.
    Do(Who, Write),
    /// A write is sent; others may arrive first.
    Send(Who, Write),
    Arrive(Who),
    Agent(usize, Machine),
    /// A hidden message becomes visible again.
    Reappear(usize),
    // The following may happen, but need not.
    Delete(usize),
    /// The first claim's finalizer is removed by hand.
    Remove,
    MakeAgain,
    /// The leader dies or loses the lease, perhaps with a write in flight; the next one reads the table.
    Crash(Option<Write>),
    Redeliver(usize),
    Tick(usize),
    Kill(usize),
    Die(usize),
}

impl World {
    fn in_flight(&mut self, who: Who) -> &mut Option<Write> {
        match who {
            Who::Claim(claim) => &mut self.leader.claims[claim].next,
            Who::Pool => &mut self.leader.pool,
            Who::Former => &mut self.late,
        }
    }
}

impl Protocol {
    pub fn deletes_first(&self) -> bool {
        self.mutant == Mutant::DeletesFirst
    }

    /// Adds the actions that happen eventually, whatever the leader decides; returns the writes in flight.
    fn events(&self, world: &World, actions: &mut Vec<Action>) -> Vec<Write> {
        if world.leader.ledger != world.table {
            actions.push(Action::Load);
        }
        let senders = [Who::Claim(0), Who::Claim(1), Who::Pool, Who::Former];
        let sent: Vec<_> = senders.into_iter().filter_map(|who| Some((who, (*{ *world }.in_flight(who))?))).collect();
        actions.extend(sent.iter().map(|(who, _)| Action::Arrive(*who)));
        actions.extend((0..MACHINES).filter_map(|id| Some(Action::Agent(id, world.agent(id)?))));
        actions.extend((0..MACHINES).filter(|id| world.hidden[*id] > 0).map(Action::Reappear));
        sent.into_iter().map(|(_, write)| write).collect()
    }

    /// Adds the leader's possible next actions; returns the writes among them.
    fn decisions(&self, world: &World, actions: &mut Vec<Action>) -> Vec<Write> {
        let mut writes: Vec<_> = self.pool(world).into_iter().map(|write| (Who::Pool, write)).collect();
        for claim in 0..CLAIMS {
            match self.claim(world, claim) {
                Next::Nothing => {}
                Next::Write(write) => writes.push((Who::Claim(claim), write)),
                Next::Receive => {
                    let shown = (0..MACHINES).filter(|id| world.shown[*id] > 0);
                    actions.extend(shown.map(Some).chain([None]).map(|shown| Action::Receive(claim, shown)));
                }
            }
        }
        actions.extend(writes.iter().map(|(who, write)| match write {
            // Claims and the pool both change idle records, so their writes can race. Other writes have no competitor.
            Write::Apply { seen: Some(seen), .. } if seen.state == State::Idle => Action::Send(*who, *write),
            _ => Action::Do(*who, *write),
        }));
        writes.into_iter().map(|(_, write)| write).collect()
    }

    /// Whether nothing happens any more without a user request or a fault.
    pub fn is_quiet(&self, world: &World) -> bool {
        let mut actions = Vec::new();
        self.events(world, &mut actions);
        if actions.is_empty() {
            self.decisions(world, &mut actions);
        }
        actions.is_empty()
    }

    fn faults(&self, world: &World, writes: Vec<Write>, actions: &mut Vec<Action>) {
        let deletable = |claim: &usize| world.claims[*claim].is_some_and(|claim| !claim.deleting);
        actions.extend((0..self.deletable).filter(deletable).map(Action::Delete));
        if self.again {
            let (there, made) = (world.claims[0].is_some(), world.made_again);
            actions.extend(there.then_some(Action::Remove).or_else(|| (!made).then_some(Action::MakeAgain)));
        }
        if world.left.crashes > 0 {
            // Other late writes are covered: a late termination is a kill, a late message is a redelivery, and a late
            // deletion has no effect.
            let lasting = |write: &Write| matches!(write, Write::Apply { .. } | Write::Fleet(..) | Write::Status(..));
            let late = writes.into_iter().filter(|write| world.late.is_none() && lasting(write));
            actions.extend(late.map(Some).chain([None]).map(Action::Crash));
        }
        for (id, machine) in world.machines.iter().enumerate() {
            let Some(record) = world.table[id] else { continue };
            if world.left.messages > 0 && record.state != State::Created {
                actions.push(Action::Redeliver(id));
            }
            if world.left.ticks > 0 && machine.age != Age::Expired && record.is_live() {
                actions.push(Action::Tick(id));
            }
            if world.left.kills > 0 && machine.ec2 == Ec2::Running {
                actions.push(Action::Kill(id));
            }
            if world.left.deaths > 0 && machine.ec2 == Ec2::Running && record.state == State::Idle && !machine.dead {
                actions.push(Action::Die(id));
            }
        }
    }

    /// The write arrives. Returns the sender's next write.
    fn arrive(&self, world: &mut World, who: Who, write: Write) -> Option<Write> {
        let leads = who != Who::Former;
        match write {
            Write::Apply { id, seen, change } => {
                let owner = world.table[id].and_then(|there| there.owner);
                let won = self.apply(world, id, seen, change);
                if let (Who::Claim(claim), true) = (who, won) {
                    world.stolen |= owner.is_some_and(|owner| owner.uid != claim);
                }
                if leads {
                    world.reload(id);
                }
                match (who, change) {
                    (Who::Claim(claim), Change::Claim(_)) => {
                        let idle = world.table[id].is_some_and(|there| there.state == State::Idle);
                        Some(if idle { Write::PutBack(claim) } else { Write::DeleteMessage(claim) })
                    }
                    (_, Change::Terminate) if won => Some(Write::Terminate(id)),
                    (_, Change::MakeIdle | Change::Renew) if won => Some(Write::SendMessages(only(id), None)),
                    _ => None,
                }
            }
            Write::Fleet(claim, count) => {
                let before = world.fleets[claim].unwrap_or_default();
                let again = world.fleets[claim].is_some() && self.mutant != Mutant::NewTokenPerOrder;
                let absent = (0..MACHINES).filter(|id| world.machines[*id].ec2 == Ec2::Absent && !again);
                let new: Vec<_> = absent.take(count as usize).collect();
                new.iter().for_each(|id| world.machines[*id].ec2 = Ec2::Running);
                world.fleets[claim] = Some(std::array::from_fn(|id| before[id] || new.contains(&id)));
                if let Who::Claim(claim) = who {
                    let answer = std::array::from_fn(|id| if again { before[id] } else { new.contains(&id) });
                    world.leader.claims[claim].fleet = Some(answer);
                }
                None
            }
            Write::Terminate(id) => {
                world.end(id);
                None
            }
            Write::SendMessages(mut ids, leaving) => {
                let id = ids.iter().position(|wanted| *wanted).expect("there is one to send");
                (world.leader.announced[id], ids[id]) = (true, false);
                world.shown[id] += 1;
                let clear = |seen| Write::Apply { id, seen: Some(seen), change: Change::Pool };
                leaving.map(clear).or_else(|| ids.contains(&true).then_some(Write::SendMessages(ids, None)))
            }
            Write::DeleteMessage(claim) => {
                world.leader.claims[claim].candidate = None;
                None
            }
            Write::PutBack(claim) => {
                let memory = &mut world.leader.claims[claim];
                if let Some(id) = memory.candidate.take().filter(|_| memory.message && !self.deletes_first()) {
                    world.shown[id] += 1;
                }
                None
            }
            Write::Status(claim, phase, order) => {
                if let Some(there) = &mut world.claims[claim] {
                    (there.phase, there.order) = (phase, order);
                }
                if order == Order::Settled && leads {
                    world.leader.claims[claim].fleet = None;
                }
                None
            }
            Write::Finalize(claim) => {
                world.claims[claim] = None;
                None
            }
        }
    }

    /// `Records::apply`: stores the changed record if the condition holds.
    fn apply(&self, world: &mut World, id: usize, seen: Option<Record>, change: Change) -> bool {
        let made = change.of(id, seen, true).expect("its guard held when it was decided");
        let there = world.table[id];
        let mut stored = there.map(|record| instance(id, &record, world.machines[id].age));
        let claims = matches!(change, Change::Claim(_));
        // A condition without `leaving` behaves as if it were unchanged.
        let forgets = match self.mutant {
            Mutant::IgnoresLeaving => true,
            Mutant::ForgetsLeaving => !claims,
            _ => false,
        };
        if let (Some(stored), Some(seen)) = (&mut stored, made.seen()) {
            if forgets {
                stored.leaving.clone_from(&seen.leaving);
            }
            if forgets || self.mutant == Mutant::ForgetsClaims {
                stored.claims = seen.claims;
            }
        }
        let blindly = claims && there.is_some() && self.mutant == Mutant::ClaimsBlindly;
        if !(made.holds(stored.as_ref(), NOW) || blindly) {
            return false;
        }
        let next = Record::from(made.next());
        let owner = there.and_then(|there| there.owner);
        world.stolen |= owner.is_some() && next.owner.is_some() && next.owner != owner;
        let arrow = |from: State| from == next.state || from.may_become(next.state);
        world.wrong_arrow |= there.is_some_and(|there| !arrow(there.state));
        world.table[id] = Some(next);
        if made.next().updated_at == NOW {
            world.machines[id].age = Age::Fresh;
        }
        true
    }
}

impl Model for Protocol {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let claims = self.counts.map(|count| (count > 0).then(Claim::default));
        let mut world = World { claims, left: self.faults, ..World::default() };
        world.claims[1] = world.claims[1].filter(|_| !self.again);
        for (id, start) in self.machines.into_iter().enumerate() {
            let (record, ec2, signal) = match start {
                Start::Pooled => (Some(State::Idle), Ec2::Running, Some(SCRIPT_OK)),
                Start::Warming => (Some(State::Created), Ec2::Running, None),
                Start::Absent => (None, Ec2::Absent, None),
                Start::Never => (None, Ec2::Gone, None),
            };
            world.table[id] = record.map(Record::new);
            world.machines[id] = Machine { ec2, signal, ..Machine::default() };
            world.shown[id] = u8::from(start == Start::Pooled);
            world.leader.announced[id] = start == Start::Pooled;
        }
        world.leader.ledger = world.table;
        vec![world]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        let mut writes = self.events(world, actions);
        writes.extend(self.decisions(world, actions));
        self.faults(world, writes, actions);
    }

    fn next_state(&self, last: &World, action: Action) -> Option<World> {
        let mut world = *last;
        match action {
            Action::Load => (0..MACHINES).for_each(|id| world.reload(id)),
            Action::Receive(claim, shown) => {
                let memory = &mut world.leader.claims[claim];
                match shown.map(|id| (id, self.pickup(last, id))) {
                    Some((id, Pickup::Take(..))) => {
                        (memory.candidate, memory.message) = (Some(id), true);
                        world.shown[id] -= 1;
                    }
                    Some((_, Pickup::PutBack(_))) => {}
                    Some((id, Pickup::Discard(_))) => world.shown[id] -= 1,
                    None => match self.last_resort(last) {
                        Some(Some(id)) => (memory.candidate, memory.message) = (Some(id), false),
                        Some(None) => memory.exhausted = true,
                        None => {}
                    },
                }
            }
            Action::Send(who, write) => *world.in_flight(who) = Some(write),
            Action::Do(who, write) => *world.in_flight(who) = self.arrive(&mut world, who, write),
            Action::Arrive(who) => {
                let write = world.in_flight(who).take().expect("it is in flight");
                let next = self.arrive(&mut world, who, write);
                *world.in_flight(who) = next.filter(|_| who != Who::Former);
            }
            Action::Agent(id, machine) => world.machines[id] = machine,
            Action::Reappear(id) => {
                world.hidden[id] -= 1;
                world.shown[id] += 1;
            }
            Action::Delete(claim) => world.claims[claim] = world.claims[claim].map(|c| Claim { deleting: true, ..c }),
            Action::Remove => world.claims[0] = None,
            Action::MakeAgain => (world.claims[1], world.made_again) = (Some(Claim::default()), true),
            Action::Crash(late) => {
                world.left.crashes -= 1;
                world.late = late.or(world.late);
                let memories = world.leader.claims.iter().filter(|memory| memory.message && !self.deletes_first());
                memories.filter_map(|memory| memory.candidate).for_each(|id| world.hidden[id] += 1);
                world.leader = Leader { ledger: world.table, ..Leader::default() };
            }
            Action::Redeliver(id) => {
                world.left.messages -= 1;
                world.shown[id] += 1;
            }
            Action::Tick(id) => {
                world.left.ticks -= 1;
                let running = world.table[id].is_some_and(|record| record.state == State::Running);
                let over = running || world.machines[id].age == Age::Late;
                world.machines[id].age = if over { Age::Expired } else { Age::Late };
                world.lost |= over;
            }
            Action::Kill(id) => {
                world.left.kills -= 1;
                world.lost = true;
                world.end(id);
            }
            Action::Die(id) => {
                world.left.deaths -= 1;
                world.machines[id].dead = true;
            }
        }
        if self.mutant != Mutant::CountsOldSignals {
            world.forget_old_signals();
        }
        world.tidy();
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all()
    }
}
