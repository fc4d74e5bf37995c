//! The model's state: AWS, the cluster, and the leader's memory.

use std::fmt;

use paddock_record::{Signal, State};

pub const MACHINES: usize = 2;
pub const CLAIMS: usize = 2;

/// A set of machines.
pub type Ids = [bool; MACHINES];

/// The claim that holds a machine. `run` stands for its run and its name: a claim that was made again has another uid
/// only.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The number of the claim.
    pub uid: usize,
    pub run: usize,
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "claim {}", self.uid)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Record {
    pub state: State,
    pub owner: Option<Owner>,
    /// A run, as everything that an agent knows.
    pub leaving: Option<usize>,
    pub sealed: bool,
    /// How many claims it has been assigned to, modulo [`CLAIMS_COUNTED`].
    pub claims: u8,
}

/// A machine that is assigned so often while one late write is on its way is not modelled.
pub const CLAIMS_COUNTED: u32 = 4;

impl Record {
    pub const fn new(state: State) -> Self {
        Self { state, owner: None, leaving: None, sealed: false, claims: 0 }
    }

    pub fn run(&self) -> Option<usize> {
        self.owner.map(|owner| owner.run)
    }

    /// Whether this claim holds the machine, whatever the operator makes of the record.
    pub fn is_held_by(&self, claim: usize) -> bool {
        self.is_live() && self.owner.is_some_and(|owner| owner.uid == claim)
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
        let owner = self.owner.map(|owner| format!(" for {owner:?}")).unwrap_or_default();
        let leaving = self.leaving.map(|run| format!(" leaving run {run}")).unwrap_or_default();
        write!(f, "{}{owner}{leaving}", self.state)
    }
}

/// Time since the record's last transition, relative to its limits.
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

pub const SCRIPT_OK: (Signal, Option<usize>, u8) = (Signal::ScriptOk, None, 0);

/// An instance and its agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Machine {
    pub ec2: Ec2,
    pub age: Age,
    /// Its agent is dead or frozen, while EC2 shows the instance as running.
    pub dead: bool,
    /// The run that its runner is registered for.
    pub serving: Option<usize>,

    /// With its run, and the record's number of claims.
    pub signal: Option<(Signal, Option<usize>, u8)>,
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
    /// Its instances have records.
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
    /// For this claim; so is the next one.
    Launch(Owner),
    Claim(Owner),
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
    /// A conditional write, based on the record as seen; `None` for the first write.
    Apply {
        id: usize,
        seen: Option<Record>,
        change: Change,
    },
    /// `CreateFleet` for a claim's order.
    Fleet(usize, u32),
    Terminate(usize),
    /// Sends messages to the queue, one by one; then `leaving` is cleared in the record as seen.
    SendMessages(Ids, Option<Record>),
    /// The end of the message that a claim has received.
    DeleteMessage(usize),
    PutBack(usize),
    /// Phase and order of a claim.
    Status(usize, Phase, Order),
    /// Removes the finalizer of a deleted claim.
    Finalize(usize),
}

/// The in-memory state of one claim's reconciliation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct ClaimMemory {
    /// The machine that it tries to claim, and whether it came with a message.
    pub candidate: Option<usize>,
    pub message: bool,
    pub exhausted: bool,
    /// EC2's answer to the fleet order, until the order is settled.
    pub fleet: Option<Ids>,
    /// The write in flight.
    pub next: Option<Write>,
}

/// All of this is lost in a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Leader {
    pub ledger: [Option<Record>; MACHINES],
    pub claims: [ClaimMemory; CLAIMS],
    pub pool: Option<Write>,
    /// Idle machines for which this leader has sent a message.
    pub announced: Ids,
}

/// The remaining number of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Faults {
    pub crashes: u8,
    /// Messages that SQS delivers twice, or after their deletion.
    pub messages: u8,
    /// Steps of time: a timeout or a threshold passes.
    pub ticks: u8,
    /// Machines that EC2 reclaims.
    pub kills: u8,
    /// Machines that die in the pool, while EC2 shows them as running.
    pub deaths: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct World {
    pub table: [Option<Record>; MACHINES],
    pub machines: [Machine; MACHINES],
    /// Visible messages, and hidden ones without a holder, which become visible again.
    pub shown: [u8; MACHINES],
    pub hidden: [u8; MACHINES],
    /// `None` if the claim does not exist (yet or any more).
    pub claims: [Option<Claim>; CLAIMS],
    /// The first claim was made again, as the second one.
    pub made_again: bool,
    /// The machines EC2 launched for each claim.
    pub fleets: [Option<Ids>; CLAIMS],
    pub leader: Leader,
    /// A write of a former leader that is still in flight.
    pub late: Option<Write>,
    pub left: Faults,
    /// A machine was killed or has expired.
    pub lost: bool,
    /// Violations are sticky, so that no later state hides them.
    pub stolen: bool,
    pub wrong_arrow: bool,
}

impl World {
    /// The leader reads the record from the table.
    pub fn reload(&mut self, id: usize) {
        self.leader.ledger[id] = self.table[id];
        self.leader.announced[id] &= self.table[id].is_some_and(|record| record.state == State::Idle);
    }

    pub fn end(&mut self, id: usize) {
        self.machines[id] = Machine { ec2: Ec2::Gone, age: self.machines[id].age, ..Machine::default() };
    }

    /// The agent's next step for its record.
    pub fn agent(&self, id: usize) -> Option<Machine> {
        let (machine, record) = (self.machines[id], self.table[id]?);
        let report = |signal, run| Machine { signal: Some((signal, run, record.claims)), ..machine };
        let next = match (machine.signal, machine.serving, record.run()) {
            _ if machine.ec2 != Ec2::Running || machine.dead => machine,
            _ if !record.is_live() => Machine { ec2: Ec2::Gone, ..Machine::default() },
            (None, _, _) => Machine { signal: Some(SCRIPT_OK), ..machine },
            (_, None, None) if record.leaving.is_some() => report(Signal::Deregistered, record.leaving),
            // It registers, and signals a moment later.
            (_, None, run) if run.is_some() && record.sealed => Machine { serving: run, ..machine },
            (_, None, _) => machine,
            (_, own, run) if own == run => report(Signal::Registered, own),
            (_, own, _) => Machine { serving: None, ..report(Signal::Deregistered, own) },
        };
        (next != machine).then_some(next)
    }

    /// Forgets signals for earlier claims, which count for nothing.
    pub fn forget_old_signals(&mut self) {
        for (record, machine) in self.table.iter().zip(&mut self.machines) {
            let claims = record.map(|record| record.claims);
            let is_old = |(signal, _, of): &(Signal, _, u8)| *signal != Signal::ScriptOk && Some(*of) != claims;
            machine.signal = machine.signal.map(|signal| if is_old(&signal) { SCRIPT_OK } else { signal });
        }
    }

    /// Normalises state that no longer makes a difference, which keeps the state space small.
    pub fn tidy(&mut self) {
        for (claim, memory) in self.claims.iter_mut().zip(&mut self.leader.claims) {
            memory.message &= memory.candidate.is_some();
            match claim {
                None => {
                    *memory = ClaimMemory {
                        candidate: memory.candidate,
                        message: memory.message,
                        next: memory.next,
                        ..ClaimMemory::default()
                    }
                }
                Some(claim) => {
                    if claim.phase == Phase::Over {
                        (claim.order, memory.fleet) = (Order::None, None);
                    }
                    memory.exhausted &= (claim.phase, claim.order) == (Phase::Working, Order::None);
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
