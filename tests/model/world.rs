//! What there is: AWS, the cluster, and the memory of the one who leads.

use std::fmt;

use paddock_record::{Signal, State};

pub const MACHINES: usize = 2;
pub const CLAIMS: usize = 2;

/// A set of machines.
pub type Ids = [bool; MACHINES];

/// A run is known by the number of its claim, so `run` is the record's `runId` and `claim` in one.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Record {
    pub state: State,
    pub run: Option<usize>,
    pub leaving: Option<usize>,
    pub sealed: bool,
}

impl Record {
    pub const fn new(state: State, run: Option<usize>) -> Self {
        Self { state, run, leaving: None, sealed: false }
    }

    pub fn is_live(&self) -> bool {
        self.state != State::Terminated
    }

    pub fn is_free(&self) -> bool {
        self.state == State::Idle && self.leaving.is_none()
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |word, run: Option<usize>| run.map(|run| format!(" {word} {run}")).unwrap_or_default();
        write!(f, "{}{}{}", self.state, part("for", self.run), part("leaving", self.leaving))
    }
}

/// How much of the time that the record's last move gave is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Age {
    #[default]
    Fresh,
    /// Past every timeout and half of the idle time.
    Late,
    /// Past its threshold.
    Expired,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Ec2 {
    #[default]
    Absent,
    Running,
    Gone,
}

/// An instance and its agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Machine {
    pub ec2: Ec2,
    pub age: Age,
    /// The run that its runner is registered for.
    pub serving: Option<usize>,
    pub said: Option<(Signal, Option<usize>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Phase {
    #[default]
    Working,
    Ready,
    /// Completed or failed.
    Over,
}

/// The fleet order in the claim's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Order {
    #[default]
    None,
    Placed(u32),
    /// Its instances have their records.
    Settled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Claim {
    pub deleting: bool,
    pub phase: Phase,
    pub order: Order,
}

/// A function of `paddock_record::transition`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// For this claim, as the next.
    Launch(usize),
    Claim(usize),
    Seal,
    Start,
    Release,
    WarmUp,
    MakeIdle,
    Renew,
    Pool,
    Terminate,
    RunnerGone,
}

/// One request that changes something outside the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Write {
    /// The conditional write of a record that was seen so; none when it is the first.
    Apply {
        id: usize,
        seen: Option<Record>,
        change: Change,
    },
    /// `CreateFleet` for a claim's order.
    Fleet(usize, u32),
    Terminate(usize),
    /// Offers into the queue, one after the other; then `leaving` is cleared in what was seen.
    Offer(Ids, Option<Record>),
    /// What becomes of the message that a claim has in hand.
    DeleteMessage(usize),
    PutBack(usize),
    /// Phase and order of a claim.
    Status(usize, Phase, Order),
    /// Takes the finalizer of a deleted claim away.
    Finalize(usize),
}

/// What one claim's reconciliation knows beyond the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Mind {
    /// The machine that it tries to claim, and whether that came with a message.
    pub hand: Option<usize>,
    pub message: bool,
    pub exhausted: bool,
    /// EC2's answer to the fleet order, until the order is settled.
    pub fleet: Option<Ids>,
    /// The write that is on its way.
    pub next: Option<Write>,
}

/// All of this is lost in a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Leader {
    pub ledger: [Option<Record>; MACHINES],
    pub claims: [Mind; CLAIMS],
    pub pool: Option<Write>,
    /// Idle machines that this leader has offered.
    pub offered: Ids,
}

/// How much may still go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Faults {
    pub crashes: u8,
    /// Messages that SQS delivers once more, or after their deletion.
    pub messages: u8,
    /// Times that somebody is slow, or a threshold passes.
    pub ticks: u8,
    /// Machines that EC2 takes.
    pub kills: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct World {
    pub table: [Option<Record>; MACHINES],
    pub machines: [Machine; MACHINES],
    /// Messages that can be received, and those that nobody holds any more and that show themselves again.
    pub shown: [u8; MACHINES],
    pub hidden: [u8; MACHINES],
    /// None where there is no claim, or none any more.
    pub claims: [Option<Claim>; CLAIMS],
    /// What EC2 launched for each claim.
    pub fleets: [Option<Ids>; CLAIMS],
    pub leader: Leader,
    /// A write of a former leader that is still on its way.
    pub late: Option<Write>,
    pub left: Faults,
    /// A machine was killed, or its time ran out.
    pub lost: bool,
    /// What must never be seen is kept, so that no later state hides it.
    pub stolen: bool,
    pub wrong_arrow: bool,
}

impl World {
    /// The leader learns what the table has.
    pub fn know(&mut self, id: usize) {
        self.leader.ledger[id] = self.table[id];
        self.leader.offered[id] &= self.table[id].is_some_and(|record| record.state == State::Idle);
    }

    pub fn end(&mut self, id: usize) {
        self.machines[id] = Machine { ec2: Ec2::Gone, age: self.machines[id].age, ..Machine::default() };
    }

    /// What the agent does about its record.
    pub fn agent(&self, id: usize) -> Option<Machine> {
        let (machine, record) = (self.machines[id], self.table[id]?);
        let say = |signal, run| Machine { said: Some((signal, run)), ..machine };
        let next = match (machine.said, machine.serving, record.run) {
            _ if machine.ec2 != Ec2::Running => machine,
            _ if !record.is_live() => Machine { ec2: Ec2::Gone, ..Machine::default() },
            (None, _, _) => say(Signal::ScriptOk, None),
            (_, None, None) if record.leaving.is_some() => say(Signal::Deregistered, record.leaving),
            (_, None, run) if run.is_some() && record.sealed => {
                Machine { serving: run, ..say(Signal::Registered, run) }
            }
            (_, None, _) => machine,
            (_, own, run) if own == run => machine,
            (_, own, _) => Machine { serving: None, ..say(Signal::Deregistered, own) },
        };
        (next != machine).then_some(next)
    }

    /// Whether the record names a claim that is gone.
    pub fn is_orphaned(&self, id: usize) -> bool {
        let run = self.table[id].filter(Record::is_live).and_then(|record| record.run);
        run.is_some_and(|run| self.claims[run].is_none()) && self.machines[id].age != Age::Expired
    }

    /// Forgets what makes no difference any more.
    pub fn tidy(&mut self) {
        for (claim, mind) in self.claims.iter_mut().zip(&mut self.leader.claims) {
            mind.message &= mind.hand.is_some();
            match claim {
                None => *mind = Mind { hand: mind.hand, message: mind.message, next: mind.next, ..Mind::default() },
                Some(claim) => {
                    if claim.phase == Phase::Over {
                        (claim.order, mind.fleet) = (Order::None, None);
                    }
                    mind.exhausted &= (claim.phase, claim.order) == (Phase::Working, Order::None);
                }
            }
        }
        let void = match self.late {
            Some(Write::Apply { id, seen: Some(_), .. }) => self.table[id].is_none_or(|there| !there.is_live()),
            Some(Write::Apply { id, seen: None, .. }) => self.table[id].is_some(),
            Some(Write::Status(claim, ..)) => self.claims[claim].is_none(),
            _ => false,
        };
        self.late = self.late.filter(|_| !void);
    }
}
