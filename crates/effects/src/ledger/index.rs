//! Instances by id, indexed by pool, by claim, and by the next poll of their agent.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    time::{Duration, Instant},
};

use jiff::{SignedDuration, Timestamp};
use paddock_core::ec2::machine::{HEARTBEATS_PER_READ, HeartbeatReads, Machine, report_poll_delay};
use paddock_record::{ClaimRef, State};

use crate::{
    aws::reports::{ReadReport, ReportFault, ReportQuery, Reports},
    clock,
};

/// An agent that has been silent for so long may be dead; its pool decides.
const SILENCE_REPORTED: SignedDuration = SignedDuration::from_secs(10);
/// Polls that are due within this window are sent together.
const POLL_BATCH_WINDOW: Duration = Duration::from_millis(5);

#[derive(Default)]
pub struct LedgerIndex {
    all: HashMap<String, Machine>,
    pools: HashMap<String, BTreeSet<String>>,
    /// By pool and name.
    claims: HashMap<(String, String), BTreeSet<String>>,
    /// Instances whose next transition depends on their agent.
    awaited: HashMap<String, Awaited>,
    /// How many of those have booted.
    warm_awaited: usize,
    /// Instances that have written more than any agent does. They are not read again: one item of 400 KB costs as much
    /// as the heartbeats of hundreds. So they fall silent, and end as a machine whose agent has died.
    muted: HashSet<String>,
    /// Instances that have written what their agent does not, which is logged once.
    reported: HashSet<String>,
    /// When instances wrote the signal that was read because their heartbeat said so: each is read once.
    signals: HashMap<String, Timestamp>,
}

#[derive(Clone, Copy)]
struct Awaited {
    /// It has booted, so that its agent answers soon.
    warm: bool,
    since: Instant,
    next: Instant,
}

impl LedgerIndex {
    pub fn get(&self, id: &str) -> Option<&Machine> {
        self.all.get(id)
    }

    pub fn all(&self) -> impl Iterator<Item = &Machine> {
        self.all.values()
    }

    pub fn of_pool(&self, pool: &str) -> impl Iterator<Item = &Machine> {
        self.pools.get(pool).into_iter().flatten().filter_map(|id| self.all.get(id))
    }

    pub fn of_claim(&self, pool: &str, claim: ClaimRef) -> impl Iterator<Item = &Machine> {
        let ids = self.claims.get(&(pool.to_owned(), claim.name.to_owned()));
        let named = ids.into_iter().flatten().filter_map(|id| self.all.get(id));
        named.filter(move |machine| machine.record.serves(claim))
    }

    /// Inserts or replaces an instance.
    pub fn put(&mut self, machine: Machine, now: Instant) {
        let id = machine.record.instance_id.clone();
        let old = self.take(&id);
        let unchanged = old.as_ref().is_some_and(|(old, _)| old.record == machine.record);
        let (pool, claim) = (machine.record.pool.clone(), machine.record.claim.clone());
        self.pools.entry(pool.clone()).or_default().insert(id.clone());
        if !claim.is_empty() {
            self.claims.entry((pool, claim)).or_default().insert(id.clone());
        }
        if machine.awaits_agent() && !self.muted.contains(&id) {
            let warm = machine.record.state != State::Created;
            let new_wait =
                Awaited { warm, since: now, next: now + report_poll_delay(Duration::ZERO, self.awaited.len()) };
            let awaited = old.and_then(|(_, awaited)| awaited).filter(|_| unchanged).unwrap_or(new_wait);
            self.warm_awaited += usize::from(awaited.warm);
            self.awaited.insert(id.clone(), awaited);
        }
        self.all.insert(id, machine);
    }

    pub fn remove(&mut self, id: &str) -> Option<Machine> {
        self.muted.remove(id);
        self.reported.remove(id);
        self.signals.remove(id);
        self.take(id).map(|(machine, _)| machine)
    }

    fn take(&mut self, id: &str) -> Option<(Machine, Option<Awaited>)> {
        let machine = self.all.remove(id)?;
        let (pool, claim) = (machine.record.pool.clone(), machine.record.claim.clone());
        discard(&mut self.pools, &pool, id);
        discard(&mut self.claims, &(pool, claim), id);
        let awaited = self.expect_nothing(id);
        Some((machine, awaited))
    }

    fn expect_nothing(&mut self, id: &str) -> Option<Awaited> {
        let awaited = self.awaited.remove(id);
        self.warm_awaited -= usize::from(awaited.is_some_and(|awaited| awaited.warm));
        awaited
    }

    /// Notes what a machine has written and its agent would not.
    pub fn note_fault(&mut self, id: &str, fault: &ReportFault) {
        let new = self.reported.insert(id.to_owned());
        match fault {
            ReportFault::Oversized => {
                if self.muted.insert(id.to_owned()) {
                    tracing::warn!(instance = id, "machine wrote more than an agent does; it is not read again");
                }
                self.expect_nothing(id);
            }
            ReportFault::Unreadable(error) if new => {
                tracing::warn!(instance = id, error, "agent record unreadable");
            }
            ReportFault::Unreadable(_) => {}
        }
    }

    /// Whether the agent of a claimed or released instance is about to answer.
    pub fn awaits_warm_agents(&self) -> bool {
        self.warm_awaited > 0
    }

    /// The agents to poll now.
    pub fn due(&self, now: Instant) -> Vec<ReportQuery> {
        let due = self.awaited.iter().filter(|(_, awaited)| awaited.next <= now + POLL_BATCH_WINDOW);
        // The heartbeats of all agents are read anyway; here only the key counts.
        let query =
            |id: &String| Some(ReportQuery { id: id.clone(), heartbeat: self.all.get(id)?.public_key().is_none() });
        due.filter_map(|(id, _)| query(id)).collect()
    }

    /// When the next poll is due; none if no agent is awaited.
    pub fn next_poll(&self) -> Option<Instant> {
        self.awaited.values().map(|awaited| awaited.next).min()
    }

    fn heartbeat_reads(&self) -> HeartbeatReads {
        HeartbeatReads::of(self.live().count())
    }

    /// The pause until heartbeats are read again. `limit` is how long a machine may be silent.
    pub fn heartbeat_pause(&self, limit: impl Fn(&Machine) -> SignedDuration, now: Timestamp) -> Duration {
        let decisions = self.heard().map(|machine| HeartbeatReads::decision(machine, limit(machine), now));
        self.heartbeat_reads().pause(decisions)
    }

    /// The agents whose heartbeats are read next.
    pub fn next_heartbeats(&self, limit: impl Fn(&Machine) -> SignedDuration, now: Timestamp) -> Vec<String> {
        let mut order: Vec<_> = self
            .heard()
            .map(|machine| (HeartbeatReads::order(machine, limit(machine), now), &machine.record.instance_id))
            .collect();
        order.sort_unstable();
        order.into_iter().take(HEARTBEATS_PER_READ).map(|(_, id)| id.clone()).collect()
    }

    /// Stores heartbeats and returns the instances that are silent, have a new key, or are about to be taken back.
    pub fn update_heartbeats(&mut self, reports: Reports, now: Timestamp) -> Vec<Machine> {
        let gap_max = self.heartbeat_reads().gap_max();
        let mut changed = Vec::new();
        let unheard = self.muted.iter().map(|id| (id.clone(), ReadReport::default()));
        for (id, read) in reports.into_iter().chain(unheard.collect::<Vec<_>>()) {
            let before = self.all.get(&id).map(news);
            self.take_heartbeat(&id, read, gap_max, now);
            let Some(machine) = self.all.get(&id).filter(|it| it.record.state != State::Terminated) else { continue };
            if machine.silent >= SILENCE_REPORTED || Some(news(machine)) != before {
                changed.push(machine.clone());
            }
        }
        changed
    }

    /// Those of these instances that have written a signal that no poll awaits, such as of a runner that has ended.
    pub fn unread_signals(&self, ids: &[String]) -> Vec<ReportQuery> {
        let is_unread = |id: &&String| {
            let heard = self.all.get(*id).filter(|machine| !self.muted.contains(*id) && machine.has_unread_signal());
            heard.is_some_and(|machine| machine.signalled_at() != self.signals.get(*id).copied())
        };
        ids.iter().filter(is_unread).map(|id| ReportQuery { id: id.clone(), heartbeat: false }).collect()
    }

    /// Notes that the signals of these instances were read.
    pub fn note_signals<'a>(&mut self, ids: impl Iterator<Item = &'a String>) {
        for id in ids {
            if let Some(at) = self.all.get(id).and_then(Machine::signalled_at) {
                self.signals.insert(id.clone(), at);
            }
        }
    }

    fn take_heartbeat(&mut self, id: &str, read: ReadReport, gap_max: SignedDuration, now: Timestamp) {
        let Some(machine) = self.all.get_mut(id) else { return };
        if read.report.heartbeat.as_ref().is_some_and(|beat| machine.is_forged(beat))
            && self.reported.insert(id.to_owned())
        {
            tracing::warn!(instance = id, "heartbeat with another key than the machine's first one ignored");
        }
        machine.read_heartbeat(read.report.heartbeat, gap_max, now);
        if let Some(fault) = &read.fault {
            self.note_fault(id, fault);
        }
    }

    fn live(&self) -> impl Iterator<Item = &Machine> {
        self.all().filter(|machine| machine.record.state != State::Terminated)
    }

    /// The live instances that are not muted.
    fn heard(&self) -> impl Iterator<Item = &Machine> {
        self.live().filter(|machine| !self.muted.contains(&machine.record.instance_id))
    }

    /// Whether there are agents to hear from.
    pub fn has_live(&self) -> bool {
        self.live().next().is_some()
    }

    /// Stores the polled reports and returns the instances with a new signal or key. A heartbeat alone is not a change:
    /// only a missing one matters, and that is checked at the timeout.
    pub fn update(&mut self, queries: &[ReportQuery], mut reports: Reports, now: Instant) -> Vec<Machine> {
        let (mut changed, awaited, gap_max) = (Vec::new(), self.awaited.len(), self.heartbeat_reads().gap_max());
        for query in queries {
            let delay = |poll: &Awaited| report_poll_delay(now.duration_since(poll.since), awaited);
            if let Some(poll) = self.awaited.get_mut(&query.id) {
                poll.next = now + delay(poll);
            }
            let (Some(mut read), Some(machine)) = (reports.remove(&query.id), self.all.get_mut(&query.id)) else {
                continue;
            };
            let before = news(machine);
            let signal = read.report.signal.take();
            let new_signal = machine.report.signal != signal;
            machine.report.signal = signal;
            if query.heartbeat {
                self.take_heartbeat(&query.id, read, gap_max, clock::now());
            } else if let Some(fault) = &read.fault {
                self.note_fault(&query.id, fault);
            }
            let Some(machine) = self.all.get(&query.id) else { continue };
            if new_signal || news(machine) != before {
                changed.push(machine.clone());
            }
        }
        changed
    }
}

/// What matters of a heartbeat, besides that it comes: whether there is a key, and a notice of EC2's.
fn news(machine: &Machine) -> (bool, bool) {
    (machine.public_key().is_some(), machine.is_reclaimed())
}

fn discard<K: std::hash::Hash + Eq>(index: &mut HashMap<K, BTreeSet<String>>, key: &K, id: &str) {
    if let Some(ids) = index.get_mut(key) {
        ids.remove(id);
        if ids.is_empty() {
            index.remove(key);
        }
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
