//! Instances by id, indexed by pool, by claim, and by the next poll of their agent.

use std::{
    collections::{BTreeSet, HashMap},
    time::{Duration, Instant},
};

use jiff::{SignedDuration, Timestamp};
use paddock_core::ec2::machine::{AgentReport, Machine, report_poll_delay};
use paddock_record::{ClaimRef, Heartbeat, State};

use crate::{aws::dynamodb::ReportQuery, clock};

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
        if machine.awaits_agent() {
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
        self.take(id).map(|(machine, _)| machine)
    }

    fn take(&mut self, id: &str) -> Option<(Machine, Option<Awaited>)> {
        let machine = self.all.remove(id)?;
        let (pool, claim) = (machine.record.pool.clone(), machine.record.claim.clone());
        discard(&mut self.pools, &pool, id);
        discard(&mut self.claims, &(pool, claim), id);
        let awaited = self.awaited.remove(id);
        self.warm_awaited -= usize::from(awaited.is_some_and(|awaited| awaited.warm));
        Some((machine, awaited))
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

    /// Stores the heartbeats of all agents and returns the instances that are silent or have a new key.
    pub fn update_heartbeats(&mut self, mut heartbeats: HashMap<String, Heartbeat>, now: Timestamp) -> Vec<Machine> {
        let mut changed = Vec::new();
        for (id, machine) in self.all.iter_mut().filter(|(_, machine)| machine.record.state != State::Terminated) {
            let had_key = machine.public_key().is_some();
            machine.read_heartbeat(heartbeats.remove(id), now);
            if machine.silent >= SILENCE_REPORTED || machine.public_key().is_some() != had_key {
                changed.push(machine.clone());
            }
        }
        changed
    }

    /// Whether there are agents to hear from.
    pub fn has_live(&self) -> bool {
        self.all().any(|machine| machine.record.state != State::Terminated)
    }

    /// Stores the polled reports and returns the instances with a new signal or key. A heartbeat alone is not a change:
    /// only a missing one matters, and that is checked at the timeout.
    pub fn update(
        &mut self,
        queries: &[ReportQuery],
        mut reports: HashMap<String, AgentReport>,
        now: Instant,
    ) -> Vec<Machine> {
        let (mut changed, awaited) = (Vec::new(), self.awaited.len());
        for query in queries {
            let Some(machine) = self.all.get_mut(&query.id) else { continue };
            let found = reports.remove(&query.id).unwrap_or_default();
            let had_key = machine.public_key().is_some();
            let new_signal = machine.report.signal != found.signal;
            machine.report.signal = found.signal;
            if query.heartbeat {
                machine.read_heartbeat(found.heartbeat, clock::now());
            }
            if new_signal || machine.public_key().is_some() != had_key {
                changed.push(machine.clone());
            }
            if let Some(poll) = self.awaited.get_mut(&query.id) {
                poll.next = now + report_poll_delay(now.duration_since(poll.since), awaited);
            }
        }
        changed
    }
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
mod tests {
    use paddock_core::fixtures::ec2::{at, beat, record, said, tracked};
    use paddock_record::{KeyPair, Signal};

    use super::*;

    fn held(id: &str, claim: &str, state: State) -> Machine {
        let mut machine = tracked(record(id, state, "7", at(0)));
        (machine.record.claim, machine.record.claim_uid) = (claim.into(), format!("uid-of-{claim}"));
        machine
    }

    const A: ClaimRef = ClaimRef { name: "a", uid: "uid-of-a", run: "7" };
    const B: ClaimRef = ClaimRef { name: "b", uid: "uid-of-b", run: "7" };

    fn ids<'a>(found: impl Iterator<Item = &'a Machine>) -> Vec<&'a str> {
        found.map(|machine| machine.record.instance_id.as_str()).collect()
    }

    #[test]
    fn an_instance_is_indexed_by_its_current_claim_only() {
        let (mut index, now) = (LedgerIndex::default(), Instant::now());
        for (id, claim) in [("i-2", "a"), ("i-1", "a"), ("i-3", "b"), ("i-2", "b"), ("i-3", "")] {
            index.put(held(id, claim, State::Running), now);
        }
        assert_eq!(ids(index.of_claim("ci/linux", A)), ["i-1"]);
        assert_eq!(ids(index.of_claim("ci/linux", B)), ["i-2"]);
        let again = ClaimRef { uid: "made-again", ..B };
        assert!(ids(index.of_claim("ci/linux", again)).is_empty(), "another claim of the same name and run");
        assert_eq!(ids(index.of_pool("ci/linux")), ["i-1", "i-2", "i-3"]);
        assert!(index.remove("i-1").is_some() && index.remove("i-1").is_none());
        assert!(ids(index.of_claim("ci/linux", A)).is_empty());
        assert_eq!(ids(index.of_pool("ci/linux")), ["i-2", "i-3"]);
    }

    #[test]
    fn only_awaited_agents_are_polled_and_less_often_over_time() {
        let (mut index, start) = (LedgerIndex::default(), Instant::now());
        index.put(held("i-1", "a", State::Running), start);
        assert!(index.next_poll().is_none() && !index.awaits_warm_agents(), "a settled system reads nothing");
        index.put(held("i-3", "a", State::Created), start);
        assert!(!index.awaits_warm_agents(), "a machine that boots takes long");
        index.remove("i-3");
        index.put(held("i-2", "a", State::Claimed), start);
        assert!(index.awaits_warm_agents());
        assert!(index.due(start).is_empty());
        let mut polls = Vec::new();
        while polls.last().is_none_or(|last: &Instant| last.duration_since(start) < Duration::from_secs(5)) {
            let at = index.next_poll().unwrap();
            let due = index.due(at);
            assert_eq!(due, [ReportQuery { id: "i-2".into(), heartbeat: true }]);
            index.update(&due, HashMap::new(), at);
            polls.push(at);
        }
        let pauses: Vec<_> = polls.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses.is_sorted() && pauses[0] <= Duration::from_millis(60), "{pauses:?}");
        assert!(pauses.iter().all(|pause| *pause <= Duration::from_millis(200)), "seen within 250 ms: {pauses:?}");
        index.put(held("i-2", "a", State::Running), start);
        assert!(index.next_poll().is_none() && !index.awaits_warm_agents());
    }

    #[test]
    fn a_signal_and_a_first_key_are_changes_and_a_heartbeat_is_not() {
        let (mut index, now) = (LedgerIndex::default(), Instant::now());
        index.put(held("i-1", "a", State::Claimed), now);
        let both = [ReportQuery { id: "i-1".into(), heartbeat: true }];
        let with = |heartbeat, signal| HashMap::from([("i-1".to_owned(), AgentReport { heartbeat, signal })]);
        let key = KeyPair::generate().public();
        let beat = |second| Some(Heartbeat { public_key: Some(key.clone()), ..beat(at(second)) });
        assert_eq!(index.update(&both, with(beat(1), None), now).len(), 1);
        assert_eq!(index.update(&both, with(beat(2), None), now).len(), 0);
        let signal = Some(said(Signal::Registered, "7"));
        let one = [ReportQuery { id: "i-1".into(), heartbeat: false }];
        assert_eq!(index.update(&one, with(None, signal.clone()), now).len(), 1);
        assert_eq!(index.update(&one, with(None, signal), now).len(), 0);
        assert!(index.get("i-1").unwrap().report.heartbeat.is_some(), "a heartbeat that was not queried is kept");
    }
}
