//! Every instance by id, and found by what is asked for: its pool, its claim, and when its agent is next looked at.

use std::{
    collections::{BTreeSet, HashMap},
    time::{Duration, Instant},
};

use jiff::{SignedDuration, Timestamp};
use paddock_core::ec2::machine::{AgentReport, Machine, look_again};
use paddock_record::State;

use crate::aws::dynamodb::Look;

/// A heartbeat of this age has a successor by now.
const BEAT_AGE: SignedDuration = SignedDuration::from_secs(5);
/// Looks that are due so soon are taken along with those that are due now.
const TOGETHER: Duration = Duration::from_millis(5);

#[derive(Default)]
pub struct LedgerIndex {
    all: HashMap<String, Machine>,
    pools: HashMap<String, BTreeSet<String>>,
    /// By pool and name.
    claims: HashMap<(String, String), BTreeSet<String>>,
    /// Those whose next step hangs on their agent.
    awaited: HashMap<String, Awaited>,
}

#[derive(Clone, Copy)]
struct Awaited {
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

    pub fn of_claim(&self, pool: &str, claim: &str) -> impl Iterator<Item = &Machine> {
        let ids = self.claims.get(&(pool.to_owned(), claim.to_owned()));
        ids.into_iter().flatten().filter_map(|id| self.all.get(id))
    }

    /// Enters an instance, or what has become of it.
    pub fn put(&mut self, tracked: Machine, now: Instant) {
        let id = tracked.record.instance_id.clone();
        let old = self.take(&id);
        let unchanged = old.as_ref().is_some_and(|(old, _)| old.record == tracked.record);
        let (pool, claim) = (tracked.record.pool.clone(), tracked.record.claim.clone());
        self.pools.entry(pool.clone()).or_default().insert(id.clone());
        if !claim.is_empty() {
            self.claims.entry((pool, claim)).or_default().insert(id.clone());
        }
        if tracked.awaits_agent() {
            let anew = Awaited { since: now, next: now + look_again(Duration::ZERO, self.awaited.len()) };
            let awaited = old.and_then(|(_, awaited)| awaited).filter(|_| unchanged).unwrap_or(anew);
            self.awaited.insert(id.clone(), awaited);
        }
        self.all.insert(id, tracked);
    }

    pub fn remove(&mut self, id: &str) -> Option<Machine> {
        self.take(id).map(|(tracked, _)| tracked)
    }

    fn take(&mut self, id: &str) -> Option<(Machine, Option<Awaited>)> {
        let tracked = self.all.remove(id)?;
        let (pool, claim) = (tracked.record.pool.clone(), tracked.record.claim.clone());
        discard(&mut self.pools, &pool, id);
        discard(&mut self.claims, &(pool, claim), id);
        Some((tracked, self.awaited.remove(id)))
    }

    /// The agents that are to be looked at now.
    pub fn due(&self, now: Instant) -> Vec<Look> {
        let due = self.awaited.iter().filter(|(_, awaited)| awaited.next <= now + TOGETHER);
        let stale = |report: &AgentReport| {
            let old = Timestamp::now() - BEAT_AGE;
            report.heartbeat.as_ref().is_none_or(|beat| beat.updated_at < old || beat.public_key.is_none())
        };
        let look = |id: &String| Some(Look { id: id.clone(), heartbeat: stale(&self.all.get(id)?.report) });
        due.filter_map(|(id, _)| look(id)).collect()
    }

    /// Whether a claim waits for a machine of the pool.
    pub fn is_claiming(&self) -> bool {
        let claimed = |id: &String| self.all.get(id).is_some_and(|tracked| tracked.record.state == State::Claimed);
        self.awaited.keys().any(claimed)
    }

    /// When the next look is due, if anybody waits.
    pub fn next_look(&self) -> Option<Instant> {
        self.awaited.values().map(|awaited| awaited.next).min()
    }

    /// Takes note of what a look brought; gives the instances of which there is news. A mere beat is none: only its
    /// absence is, and that is judged when its time is up.
    pub fn looked(&mut self, looks: &[Look], mut report: HashMap<String, AgentReport>, now: Instant) -> Vec<Machine> {
        let (mut news, awaited) = (Vec::new(), self.awaited.len());
        for look in looks {
            let Some(tracked) = self.all.get_mut(&look.id) else { continue };
            let found = report.remove(&look.id).unwrap_or_default();
            let key = |report: &AgentReport| report.heartbeat.as_ref().map(|beat| beat.public_key.clone());
            let new_key = look.heartbeat && key(&tracked.report) != key(&found);
            let new_signal = tracked.report.signal != found.signal;
            tracked.report.signal = found.signal;
            if look.heartbeat {
                (tracked.report.heartbeat, tracked.read_at) = (found.heartbeat, Timestamp::now());
            }
            if new_key || new_signal {
                news.push(tracked.clone());
            }
            if let Some(look) = self.awaited.get_mut(&look.id) {
                look.next = now + look_again(now.duration_since(look.since), awaited);
            }
        }
        news
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
    use paddock_record::Signal;

    use super::*;

    fn held(id: &str, claim: &str, state: State) -> Machine {
        let mut tracked = tracked(record(id, state, "7", at(0)));
        tracked.record.claim = claim.into();
        tracked
    }

    fn ids<'a>(found: impl Iterator<Item = &'a Machine>) -> Vec<&'a str> {
        found.map(|tracked| tracked.record.instance_id.as_str()).collect()
    }

    #[test]
    fn an_instance_is_found_by_the_claim_that_has_it_now_and_by_no_other() {
        let (mut known, now) = (LedgerIndex::default(), Instant::now());
        for (id, claim) in [("i-2", "a"), ("i-1", "a"), ("i-3", "b"), ("i-2", "b"), ("i-3", "")] {
            known.put(held(id, claim, State::Running), now);
        }
        assert_eq!(ids(known.of_claim("ci/linux", "a")), ["i-1"]);
        assert_eq!(ids(known.of_claim("ci/linux", "b")), ["i-2"]);
        assert_eq!(ids(known.of_pool("ci/linux")), ["i-1", "i-2", "i-3"]);
        assert!(known.remove("i-1").is_some() && known.remove("i-1").is_none());
        assert!(ids(known.of_claim("ci/linux", "a")).is_empty());
        assert_eq!(ids(known.of_pool("ci/linux")), ["i-2", "i-3"]);
    }

    #[test]
    fn only_those_that_are_waited_for_are_looked_at_and_the_longer_the_less_often() {
        let (mut known, start) = (LedgerIndex::default(), Instant::now());
        known.put(held("i-1", "a", State::Running), start);
        assert!(known.next_look().is_none(), "a settled system reads nothing");
        known.put(held("i-2", "a", State::Claimed), start);
        assert!(known.due(start).is_empty());
        let mut looks = Vec::new();
        while looks.last().is_none_or(|last: &Instant| last.duration_since(start) < Duration::from_secs(5)) {
            let at = known.next_look().unwrap();
            let due = known.due(at);
            assert_eq!(due, [Look { id: "i-2".into(), heartbeat: true }]);
            known.looked(&due, HashMap::new(), at);
            looks.push(at);
        }
        let pauses: Vec<_> = looks.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses.is_sorted() && pauses[0] <= Duration::from_millis(60), "{pauses:?}");
        assert!(pauses.iter().all(|pause| *pause <= Duration::from_millis(200)), "seen within 250 ms: {pauses:?}");
        known.put(held("i-2", "a", State::Running), start);
        assert!(known.next_look().is_none());
    }

    #[test]
    fn a_signal_and_a_first_key_are_news_and_a_beat_is_not() {
        let (mut known, now) = (LedgerIndex::default(), Instant::now());
        known.put(held("i-1", "a", State::Claimed), now);
        let both = [Look { id: "i-1".into(), heartbeat: true }];
        let with = |heartbeat, signal| HashMap::from([("i-1".to_owned(), AgentReport { heartbeat, signal })]);
        assert_eq!(known.looked(&both, with(Some(beat(at(1))), None), now).len(), 1);
        assert_eq!(known.looked(&both, with(Some(beat(at(2))), None), now).len(), 0);
        let signal = Some(said(Signal::Registered, "7"));
        let one = [Look { id: "i-1".into(), heartbeat: false }];
        assert_eq!(known.looked(&one, with(None, signal.clone()), now).len(), 1);
        assert_eq!(known.looked(&one, with(None, signal), now).len(), 0);
        assert!(known.get("i-1").unwrap().report.heartbeat.is_some(), "what was not asked for is not forgotten");
    }
}
