//! Which message of an idle machine goes to which request, and when a queue has nothing more for one.

use std::collections::HashMap;

use jiff::Timestamp;
use paddock_record::{Discard, IdleMessage, State};

use super::{machine::Machine, requirements::Requirements, reuse_scope};

/// A queue that returned one id this often counts as exhausted.
pub const SEEN_LIMIT: u32 = 5;
/// This many empty polls in a row exhaust a queue. One is no proof: a short poll asks only some of SQS's servers.
pub const EMPTY_POLLS: u32 = 3;

/// Whether a machine can be claimed, according to the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Availability {
    Free,
    /// It is idle but cannot be claimed yet: it still leaves its last run, or it is handed out.
    Busy,
    /// Its record is not idle, or EC2 takes it back.
    Taken,
    /// There is no such machine in this pool.
    Foreign,
    /// It has served a claim since the message was sent.
    Outdated,
}

impl Availability {
    /// `machine`: what the ledger has of it, if it is of this pool.
    pub fn of(machine: Option<&Machine>, message: &IdleMessage, now: Timestamp) -> Self {
        match machine {
            None => Self::Foreign,
            Some(machine) if machine.record.state != State::Idle || machine.is_reclaimed() => Self::Taken,
            Some(machine) if reuse_scope::of_machine(&machine.record) != message.scope => Self::Outdated,
            Some(machine) if machine.is_claimable(now) => Self::Free,
            Some(_) => Self::Busy,
        }
    }
}

/// Decision about one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pickup {
    /// To the request with this index.
    Take(usize, IdleMessage),
    /// Fits no request, or cannot be claimed yet: shown again after a while.
    PutBack(IdleMessage),
    Discard(Discard),
}

/// Matches a batch of messages against every waiting request before anything is put back: `open` is what each still
/// wants, first come first served. Machines with a scope come first, so that those without are left for others.
pub fn pick(
    bodies: &[String],
    open: &mut [(Requirements, u32)],
    availability: impl Fn(&IdleMessage) -> Availability,
    now: Timestamp,
) -> Vec<Pickup> {
    let mut decide = |message: Result<IdleMessage, Discard>| match message {
        Err(discard) => Pickup::Discard(discard),
        Ok(machine) => match availability(&machine) {
            Availability::Taken => Pickup::Discard(Discard::Taken),
            Availability::Foreign => Pickup::Discard(Discard::Foreign),
            Availability::Outdated => Pickup::Discard(Discard::Outdated),
            Availability::Busy => Pickup::PutBack(machine),
            Availability::Free => match assign(&machine, open) {
                Some(index) => Pickup::Take(index, machine),
                None => Pickup::PutBack(machine),
            },
        },
    };
    let mut messages: Vec<_> = bodies.iter().map(|body| IdleMessage::read(body, now)).enumerate().collect();
    messages.sort_by_key(|(_, message)| message.as_ref().is_ok_and(|machine| machine.scope.is_empty()));
    let mut decided: Vec<_> = messages.into_iter().map(|(index, message)| (index, decide(message))).collect();
    decided.sort_by_key(|(index, _)| *index);
    decided.into_iter().map(|(_, pickup)| pickup).collect()
}

/// The first request that a machine fits; it wants one less from then on.
pub fn assign(machine: &IdleMessage, open: &mut [(Requirements, u32)]) -> Option<usize> {
    let (index, (_, left)) =
        open.iter_mut().enumerate().find(|(_, (needs, left))| *left > 0 && needs.met_by(machine))?;
    *left -= 1;
    Some(index)
}

/// Whether a queue has nothing more for a request.
#[derive(Debug, Default)]
pub struct Exhaustion {
    empty_polls: u32,
    seen: HashMap<String, u32>,
}

impl Exhaustion {
    /// Records one poll: how many messages came, and the ids that were put back.
    pub fn note<'a>(&mut self, received: usize, put_back: impl IntoIterator<Item = &'a str>) {
        self.empty_polls = if received == 0 { self.empty_polls + 1 } else { 0 };
        for id in put_back {
            *self.seen.entry(id.to_owned()).or_default() += 1;
        }
    }

    pub fn is_exhausted(&self) -> bool {
        self.empty_polls >= EMPTY_POLLS || self.seen.values().any(|times| *times >= SEEN_LIMIT)
    }
}

#[cfg(test)]
#[path = "matching_tests.rs"]
pub(super) mod tests;
