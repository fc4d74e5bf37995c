//! The idle queue as a state machine: which idle machine goes to which request, and what happens to each message.
//!
//! No machine is created while an idle one fits. So the state machine tracks which machines are handed out, takes messages
//! that it has put back when a later request fits them, and, once the queue shows nothing more, asks the ledger: a message
//! is only a hint, and one that a crash hides for a while is not waited for.

use std::{collections::HashMap, mem, time::Duration};

use jiff::Timestamp;
use paddock_record::{Discard, IdleMessage};

use super::{
    matching::{Availability, Exhaustion, Pickup, assign, pick},
    requirements::Requirements,
};

/// The most messages in one SQS call.
pub const BATCH: usize = 10;
/// How long a message that fits no request stays hidden, so that the queue does not show the same ones all the time.
pub const PUT_BACK_DELAY: Duration = Duration::from_secs(3);
/// How long before it becomes visible again a message that was put back can still be taken.
const RECALL_MARGIN: Duration = Duration::from_millis(500);
/// Parallel receives: 100 messages a round are more than are claimed meanwhile.
const MAX_RECEIVES: usize = 10;
/// How long deletions wait for others, so that many go in one call.
const DELETE_DELAY: Duration = Duration::from_secs(1);
/// How long to wait for the outcome of other claims before the queue is polled again.
const SETTLE_WAIT: Duration = Duration::from_millis(20);

/// Chosen by the reader, unique within a queue.
pub type RequestId = u64;

/// A message that is hidden from other readers until its visibility timeout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    pub receipt: String,
    pub body: String,
}

/// A machine that is handed out to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selected {
    pub machine: IdleMessage,
    /// None where the ledger knew of the machine and the queue did not.
    pub message: Option<Received>,
}

/// Outcome of a machine that was handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disposition {
    /// Claimed, or no claim can have it: its message is deleted.
    Over,
    /// It cannot be claimed yet: its message is shown again after a while.
    Busy,
    /// Not tried: its message is shown again at once.
    Unused,
}

#[derive(Debug, Clone)]
pub enum Input {
    Request {
        id: RequestId,
        needs: Requirements,
        count: u32,
    },
    Settled(Selected, Disposition),
    /// The answer to [`Output::Receive`]; `failed` if one of the receives did.
    Received {
        messages: Vec<Received>,
        failed: bool,
    },
    /// The answer to [`Output::ListFree`].
    Listed(Vec<IdleMessage>),
    /// The time of [`Output::Wait`] has passed without another input.
    Tick,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Receive this many batches: [`Input::Received`] must be the next input.
    Receive(usize),
    /// List the pool's claimable machines that meet one of these: [`Input::Listed`] must be the next input.
    ListFree(Vec<Requirements>),
    /// `exhausted`: the pool has nothing more that fits.
    Answer {
        request: RequestId,
        selected: Vec<Selected>,
        exhausted: bool,
    },
    /// No receive succeeded: the request is answered with the error.
    Fail(RequestId),
    Delete(Vec<Received>),
    /// Show these messages again after this time.
    PutBack(Vec<Received>, Duration),
    /// Log and count it; the deletion of the message follows.
    Discarded(Received, Discard),
    /// [`Input::Tick`] is due after this time. Without a `Wait`, only another input counts.
    Wait(Duration),
}

/// In-memory state of the reader of one queue. All of it can be lost.
#[derive(Debug, Default)]
pub struct IdleQueue {
    /// In order of arrival.
    waiting: Vec<Waiting>,
    /// How often each machine is handed out.
    handed_out: HashMap<String, u32>,
    /// Only machines that are handed out can still serve those that wait.
    awaits_others: bool,
    /// There was a request or a settled machine since the last tick.
    has_input: bool,
    /// Messages to delete, to show again at once, and to show again later.
    done: Vec<Received>,
    unused: Vec<Received>,
    unfit: Vec<(IdleMessage, Received)>,
    /// Put back at that time; can be taken without a receive until they become visible again.
    hidden: Vec<(IdleMessage, Received, Timestamp)>,
}

#[derive(Debug)]
struct Waiting {
    id: RequestId,
    needs: Requirements,
    count: u32,
    selected: Vec<Selected>,
    exhaustion: Exhaustion,
    exhausted: bool,
}

impl Waiting {
    fn missing(&self) -> usize {
        (self.count as usize).saturating_sub(self.selected.len())
    }

    /// The queue has nothing more for it.
    fn needs_ledger(&self) -> bool {
        self.missing() > 0 && self.exhaustion.is_exhausted()
    }
}

impl IdleQueue {
    /// Requests and settled machines are gathered until the next tick, so that all requests share what is received.
    pub fn step(
        &mut self,
        input: Input,
        availability: impl Fn(&IdleMessage) -> Availability,
        now: Timestamp,
    ) -> Vec<Output> {
        let mut outputs = Vec::new();
        match input {
            Input::Request { id, needs, count } => {
                let (selected, exhaustion) = (Vec::new(), Exhaustion::default());
                self.waiting.push(Waiting { id, needs, count, selected, exhaustion, exhausted: false });
                (self.has_input, self.awaits_others) = (true, false);
            }
            Input::Settled(selected, disposition) => self.settle(selected, disposition),
            Input::Tick => {
                let quiet = !mem::take(&mut self.has_input);
                self.flush(quiet, now, &mut outputs);
                self.recall(availability, now);
                let missing: usize = self.waiting.iter().map(Waiting::missing).sum();
                if missing > 0 {
                    outputs.push(Output::Receive(missing.div_ceil(BATCH).min(MAX_RECEIVES)));
                    return outputs;
                }
                self.answer(&mut outputs);
            }
            Input::Received { messages, failed } if failed && messages.is_empty() => self.fail(&mut outputs),
            Input::Received { messages, failed: _ } => {
                outputs.extend(self.match_received(messages, availability, now));
                self.flush(false, now, &mut outputs);
                if self.waiting.iter().any(Waiting::needs_ledger) {
                    let asking = self.waiting.iter().filter(|waiting| waiting.needs_ledger());
                    outputs.push(Output::ListFree(asking.map(|waiting| waiting.needs.clone()).collect()));
                    return outputs;
                }
                self.answer(&mut outputs);
            }
            Input::Listed(machines) => {
                for index in 0..self.waiting.len() {
                    if self.waiting[index].needs_ledger() {
                        self.fill_from_ledger(index, &machines);
                    }
                }
                self.answer(&mut outputs);
            }
        }
        outputs.extend(self.wait().map(Output::Wait));
        outputs
    }

    fn wait(&self) -> Option<Duration> {
        match (self.waiting.is_empty(), self.done.is_empty()) {
            _ if self.has_input => Some(Duration::ZERO),
            (false, _) if self.awaits_others => Some(SETTLE_WAIT),
            (false, _) => Some(Duration::ZERO),
            (true, false) => Some(DELETE_DELAY),
            (true, true) => None,
        }
    }

    fn settle(&mut self, Selected { machine, message }: Selected, disposition: Disposition) {
        self.has_input = true;
        if let Some(times) = self.handed_out.get_mut(&machine.instance_id) {
            *times -= 1;
            if *times == 0 {
                self.handed_out.remove(&machine.instance_id);
            }
        }
        match (message, disposition) {
            (None, _) => {}
            (Some(message), Disposition::Over) => self.done.push(message),
            (Some(message), Disposition::Busy) => self.unfit.push((machine, message)),
            (Some(message), Disposition::Unused) => self.unused.push(message),
        }
    }

    /// Deletes and puts back what has gathered. Deletions wait for others unless it is `quiet`.
    fn flush(&mut self, quiet: bool, now: Timestamp, outputs: &mut Vec<Output>) {
        if !self.done.is_empty() && (quiet || self.done.len() >= BATCH) {
            outputs.push(Output::Delete(mem::take(&mut self.done)));
        }
        if !self.unused.is_empty() {
            outputs.push(Output::PutBack(mem::take(&mut self.unused), Duration::ZERO));
        }
        if !self.unfit.is_empty() {
            let messages = self.unfit.iter().map(|(_, message)| message.clone()).collect();
            outputs.push(Output::PutBack(messages, PUT_BACK_DELAY));
            self.hidden.extend(self.unfit.drain(..).map(|(machine, message)| (machine, message, now)));
        }
    }

    /// Takes messages that were put back and now fit a request.
    fn recall(&mut self, availability: impl Fn(&IdleMessage) -> Availability, now: Timestamp) {
        let is_hidden = |since: Timestamp| now.duration_since(since).unsigned_abs() + RECALL_MARGIN < PUT_BACK_DELAY;
        self.hidden.retain(|(_, _, since)| is_hidden(*since));
        let mut open = self.open();
        // As in [`pick`].
        self.hidden.sort_by_key(|(machine, _, _)| machine.scope.is_empty());
        for (machine, message, since) in mem::take(&mut self.hidden) {
            let free = self.availability_of(&machine, &availability) == Availability::Free;
            match free.then(|| assign(&machine, &mut open)).flatten() {
                Some(index) => self.hand_out(index, machine, Some(message)),
                None => self.hidden.push((machine, message, since)),
            }
        }
    }

    /// Matches received messages; returns those that are discarded.
    fn match_received(
        &mut self,
        messages: Vec<Received>,
        availability: impl Fn(&IdleMessage) -> Availability,
        now: Timestamp,
    ) -> Vec<Output> {
        let bodies: Vec<_> = messages.iter().map(|message| message.body.clone()).collect();
        let picks = pick(&bodies, &mut self.open(), |machine| self.availability_of(machine, &availability), now);
        let (mut seen, mut discarded) = (Vec::new(), Vec::new());
        for (message, pickup) in messages.into_iter().zip(picks) {
            match pickup {
                Pickup::Take(index, machine) => self.hand_out(index, machine, Some(message)),
                Pickup::PutBack(machine) => {
                    seen.push(machine.instance_id.clone());
                    self.unfit.push((machine, message));
                }
                Pickup::Discard(why) => {
                    discarded.push(Output::Discarded(message.clone(), why));
                    self.done.push(message);
                }
            }
        }
        self.awaits_others = false;
        for waiting in &mut self.waiting {
            waiting.exhaustion.note(bodies.len(), seen.iter().map(String::as_str));
        }
        discarded
    }

    /// The queue has nothing more for this request: `machines` that are free according to the ledger, or that other
    /// requests may return, come before new ones.
    fn fill_from_ledger(&mut self, index: usize, machines: &[IdleMessage]) {
        // Its own machines are claimed as soon as it is answered. Those of later requests are not waited for either:
        // they wait for this one, and two requests must not wait for each other.
        let own = |machine: &IdleMessage| {
            let mut selected = self.waiting[index..].iter().flat_map(|waiting| &waiting.selected);
            selected.any(|selected| selected.machine.instance_id == machine.instance_id)
        };
        let needs = &self.waiting[index].needs;
        let fitting = machines.iter().filter(|machine| needs.met_by(machine) && !own(machine));
        let (others, mut free): (Vec<_>, Vec<_>) =
            fitting.partition(|machine| self.handed_out.contains_key(&machine.instance_id));
        free.sort_by_key(|machine| machine.scope.is_empty());
        for machine in free.into_iter().take(self.waiting[index].missing()) {
            self.hand_out(index, machine.clone(), None);
        }
        let waiting = &mut self.waiting[index];
        match (waiting.missing(), others.is_empty()) {
            (0, _) => {}
            (_, true) => waiting.exhausted = true,
            (_, false) => (waiting.exhaustion, self.awaits_others) = (Exhaustion::default(), true),
        }
    }

    /// Answers the requests that have all they asked for, or all there is.
    fn answer(&mut self, outputs: &mut Vec<Output>) {
        let answered = self.waiting.extract_if(.., |waiting| waiting.exhausted || waiting.missing() == 0);
        let answer = |Waiting { id, selected, exhausted, .. }| Output::Answer { request: id, selected, exhausted };
        outputs.extend(answered.map(answer));
    }

    fn fail(&mut self, outputs: &mut Vec<Output>) {
        for waiting in mem::take(&mut self.waiting) {
            outputs.push(Output::Fail(waiting.id));
            waiting.selected.into_iter().for_each(|selected| self.settle(selected, Disposition::Unused));
        }
    }

    fn hand_out(&mut self, index: usize, machine: IdleMessage, message: Option<Received>) {
        *self.handed_out.entry(machine.instance_id.clone()).or_default() += 1;
        self.waiting[index].selected.push(Selected { machine, message });
    }

    /// What each request still wants.
    fn open(&self) -> Vec<(Requirements, u32)> {
        self.waiting.iter().map(|waiting| (waiting.needs.clone(), waiting.missing() as u32)).collect()
    }

    fn availability_of(
        &self,
        machine: &IdleMessage,
        availability: impl Fn(&IdleMessage) -> Availability,
    ) -> Availability {
        match availability(machine) {
            Availability::Free if self.handed_out.contains_key(&machine.instance_id) => Availability::Busy,
            availability => availability,
        }
    }
}

#[cfg(test)]
#[path = "idle_queue_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "idle_queue_property_tests.rs"]
mod property_tests;
