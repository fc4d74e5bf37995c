//! Every change of an instance's record, and the condition under which it may be stored.
//!
//! Each function takes what was seen and gives nothing where its guard fails. `sealed` is a token sealed to the
//! instance's key: none while that key is unknown. `threshold` ends the instance's time in the state it enters.

use jiff::Timestamp;

use crate::{Instance, State};

/// A change from what was seen to what shall be. Only the functions of this module make one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    seen: Option<Instance>,
    next: Instance,
}

/// The claim that an instance works for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimRef<'a> {
    pub name: &'a str,
    pub uid: &'a str,
    pub run: &'a str,
}

/// What stays the same from an instance's launch to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub instance_id: String,
    /// `namespace/name` of the RunnerPool.
    pub pool: String,
    pub resource_class: String,
    pub instance_type: String,
    /// `on-demand` or `spot`.
    pub usage_class: String,
    pub zone: String,
    pub cpu: u32,
    /// Memory in MiB.
    pub mem: u32,
    /// Where the runner registers.
    pub github_url: String,
}

impl Transition {
    /// What the change starts from; none for the first record of an instance.
    pub fn seen(&self) -> Option<&Instance> {
        self.seen.as_ref()
    }

    pub fn next(&self) -> &Instance {
        &self.next
    }

    /// Whether the change may be stored over what is stored at `now`. The state, the run and `leaving` must be what was
    /// seen, because any two changes that could undo each other differ in one of these.
    pub fn holds(&self, stored: Option<&Instance>, now: Timestamp) -> bool {
        match (&self.seen, stored) {
            (None, stored) => stored.is_none(),
            (Some(_), None) => false,
            (Some(seen), Some(stored)) => {
                let in_time = stored.threshold.is_some_and(|threshold| threshold > now);
                let same = |of: fn(&Instance) -> &str| of(stored) == of(seen);
                stored.state == seen.state
                    && same(|instance| &instance.run_id)
                    && same(|instance| &instance.leaving)
                    && (in_time || !self.needs_time())
            }
        }
    }

    /// An instance whose time is up can only be terminated.
    pub(crate) fn needs_time(&self) -> bool {
        self.next.state != State::Terminated
    }
}

/// EC2 launched it: for a claim, or to be kept warm. `stored` is its record, which it must not have yet.
pub fn launch(
    stored: Option<&Instance>,
    identity: Identity,
    claim: Option<ClaimRef>,
    threshold: Timestamp,
    now: Timestamp,
) -> Option<Transition> {
    let run_id = claim.map_or("", |claim| claim.run).to_owned();
    let next = Instance {
        instance_id: identity.instance_id,
        state: State::Created,
        threshold: Some(threshold),
        updated_at: now,
        pool: identity.pool,
        claim: claim.map_or("", |claim| claim.name).to_owned(),
        resource_class: identity.resource_class,
        instance_type: identity.instance_type,
        usage_class: identity.usage_class,
        zone: identity.zone,
        cpu: identity.cpu,
        mem: identity.mem,
        github_url: identity.github_url,
        sealed: String::new(),
        leaving: String::new(),
        initial_run_id: run_id.clone(),
        claims: u32::from(claim.is_some()),
        failure_reason: String::new(),
        failure_message: String::new(),
        run_id,
    };
    stored.is_none().then_some(Transition { seen: None, next })
}

/// Its agent has a key by now, and gets the token to register with. Its timeout counts on from its last move.
pub fn seal(seen: &Instance, sealed: Option<String>) -> Option<Transition> {
    let guard = matches!(seen.state, State::Created | State::Claimed);
    change(guard, seen, Instance { sealed: sealed?, ..seen.clone() })
}

/// A claim takes it from the pool. One that has yet to leave its last run would be registered for two.
pub fn claim(
    seen: &Instance,
    claim: ClaimRef,
    sealed: Option<String>,
    threshold: Timestamp,
    now: Timestamp,
) -> Option<Transition> {
    let guard = seen.state == State::Idle && seen.leaving.is_empty();
    let next = Instance {
        claim: claim.name.to_owned(),
        run_id: claim.run.to_owned(),
        sealed: sealed?,
        claims: seen.claims + 1,
        ..moved(seen, State::Claimed, threshold, now)
    };
    change(guard, seen, next)
}

/// Its runner is registered for its run.
pub fn start(seen: &Instance, threshold: Timestamp, now: Timestamp) -> Option<Transition> {
    let guard = matches!(seen.state, State::Created | State::Claimed) && !seen.run_id.is_empty();
    change(guard, seen, Instance { sealed: String::new(), ..moved(seen, State::Running, threshold, now) })
}

/// Its claim gives it back, with a token to deregister with. It is offered after it has left its run: see [`pool`].
pub fn release(seen: &Instance, sealed: Option<String>, threshold: Timestamp, now: Timestamp) -> Option<Transition> {
    let guard = matches!(seen.state, State::Running | State::Claimed) && !seen.run_id.is_empty();
    let next = Instance {
        claim: String::new(),
        run_id: String::new(),
        leaving: seen.run_id.clone(),
        sealed: sealed?,
        ..moved(seen, State::Idle, threshold, now)
    };
    change(guard, seen, next)
}

/// A machine to be kept warm has come up. [`make_idle`] follows: there is no way from created to idle.
pub fn warm_up(seen: &Instance, threshold: Timestamp, now: Timestamp) -> Option<Transition> {
    let guard = seen.state == State::Created && seen.run_id.is_empty();
    change(guard, seen, moved(seen, State::Running, threshold, now))
}

/// A machine to be kept warm enters the pool.
pub fn make_idle(seen: &Instance, threshold: Timestamp, now: Timestamp) -> Option<Transition> {
    let guard = seen.state == State::Running && seen.run_id.is_empty();
    change(guard, seen, moved(seen, State::Idle, threshold, now))
}

/// It is kept warm for another idle time.
pub fn renew(seen: &Instance, threshold: Timestamp, now: Timestamp) -> Option<Transition> {
    let guard = seen.state == State::Idle && seen.leaving.is_empty();
    change(guard, seen, moved(seen, State::Idle, threshold, now))
}

/// It has left its last run and its message is sent: it can be claimed. The message comes first, because a crash in
/// between then sends it twice instead of never.
pub fn pool(seen: &Instance) -> Option<Transition> {
    let guard = seen.state == State::Idle && !seen.leaving.is_empty();
    change(guard, seen, Instance { leaving: String::new(), sealed: String::new(), ..seen.clone() })
}

/// It is given up. `leaving` names the run it may still be registered for, until [`runner_gone`].
pub fn terminate(seen: &Instance, reason: &str, message: &str, now: Timestamp) -> Option<Transition> {
    let last_run = if seen.run_id.is_empty() { &seen.leaving } else { &seen.run_id };
    let next = Instance {
        state: State::Terminated,
        run_id: String::new(),
        threshold: None,
        updated_at: now,
        sealed: String::new(),
        leaving: last_run.clone(),
        failure_reason: reason.to_owned(),
        failure_message: message.to_owned(),
        ..seen.clone()
    };
    change(seen.state != State::Terminated, seen, next)
}

/// GitHub has no runner of a terminated instance any more.
pub fn runner_gone(seen: &Instance) -> Option<Transition> {
    let guard = seen.state == State::Terminated && !seen.leaving.is_empty();
    change(guard, seen, Instance { leaving: String::new(), ..seen.clone() })
}

/// What was seen, in a state whose time begins now.
fn moved(seen: &Instance, state: State, threshold: Timestamp, now: Timestamp) -> Instance {
    Instance { state, threshold: Some(threshold), updated_at: now, ..seen.clone() }
}

fn change(guard: bool, seen: &Instance, next: Instance) -> Option<Transition> {
    guard.then(|| Transition { seen: Some(seen.clone()), next })
}

#[cfg(test)]
#[path = "transition_tests.rs"]
pub(crate) mod tests;
