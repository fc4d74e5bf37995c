//! Every transition of an instance's record, and the condition under which it may be stored.
//!
//! Each function takes the record as last seen and returns `None` if its guard fails. `sealed` is a token sealed to the
//! instance's key, `None` while that key is unknown. No job runs before [`seal`] or [`warm_up`] has stored that key.
//! `threshold` is when the instance's time in the new state expires. `scope` is whose claims the instance may serve
//! after this one; it stays with the instance when the claim is over.

use jiff::Timestamp;

use crate::{Instance, PublicKey, State};

/// A change from the record as last seen to the next one. Only the functions of this module create one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    seen: Option<Instance>,
    next: Instance,
}

/// The claim that an instance serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimRef<'a> {
    pub name: &'a str,
    pub uid: &'a str,
    pub run: &'a str,
}

/// The attributes that never change after the launch.
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
    /// The runner group that it joins; a claim may change that.
    pub runner_group: String,
    /// The digest of the launch template that it was made from, and the image.
    pub template: String,
    pub image: String,
}

impl Transition {
    /// The record that the change starts from; none for the first record of an instance.
    pub fn seen(&self) -> Option<&Instance> {
        self.seen.as_ref()
    }

    pub fn next(&self) -> &Instance {
        &self.next
    }

    /// Whether the change may replace the stored record at `now`. State, run, claim, `leaving` and the number of claims
    /// must be as last seen, because any two conflicting changes differ in one of these: the number, where a claim has
    /// returned an instance and taken it again.
    pub fn holds(&self, stored: Option<&Instance>, now: Timestamp) -> bool {
        match (&self.seen, stored) {
            (None, stored) => stored.is_none(),
            (Some(_), None) => false,
            (Some(seen), Some(stored)) => {
                let unexpired = stored.threshold.is_some_and(|threshold| threshold > now);
                let same = |of: fn(&Instance) -> &str| of(stored) == of(seen);
                stored.state == seen.state
                    && same(|instance| &instance.run_id)
                    && same(|instance| &instance.claim_uid)
                    && same(|instance| &instance.leaving)
                    && stored.claims == seen.claims
                    && (unexpired || !self.requires_unexpired())
            }
        }
    }

    /// An expired instance can only be terminated.
    pub(crate) fn requires_unexpired(&self) -> bool {
        self.next.state != State::Terminated
    }
}

/// EC2 launched the instance, for a claim or as a warm instance. It must not have a record (`stored`) yet.
pub fn launch(
    stored: Option<&Instance>,
    identity: Identity,
    claim: Option<ClaimRef>,
    scope: &str,
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
        claim_uid: claim.map_or("", |claim| claim.uid).to_owned(),
        resource_class: identity.resource_class,
        instance_type: identity.instance_type,
        usage_class: identity.usage_class,
        zone: identity.zone,
        cpu: identity.cpu,
        mem: identity.mem,
        github_url: identity.github_url,
        runner_group: identity.runner_group,
        template: identity.template,
        image: identity.image,
        sealed: String::new(),
        public_key: None,
        leaving: String::new(),
        initial_run_id: run_id.clone(),
        claims: u32::from(claim.is_some()),
        scope: scope.to_owned(),
        failure_reason: String::new(),
        failure_message: String::new(),
        failure_log: String::new(),
        run_id,
    };
    stored.is_none().then_some(Transition { seen: None, next })
}

/// The agent has published its key and gets its registration token. The threshold stays the same.
pub fn seal(seen: &Instance, key: Option<&PublicKey>, sealed: Option<String>) -> Option<Transition> {
    let guard = matches!(seen.state, State::Created | State::Claimed);
    change(guard, seen, Instance { sealed: sealed?, ..with_key(seen, key?) })
}

/// A claim takes the instance from the pool, whose runner group may have changed. It must have left its last run, or it would be registered for two.
pub fn claim(
    seen: &Instance,
    claim: ClaimRef,
    scope: &str,
    runner_group: &str,
    sealed: Option<String>,
    threshold: Timestamp,
    now: Timestamp,
) -> Option<Transition> {
    let guard = seen.state == State::Idle && seen.leaving.is_empty();
    let next = Instance {
        claim: claim.name.to_owned(),
        claim_uid: claim.uid.to_owned(),
        run_id: claim.run.to_owned(),
        runner_group: runner_group.to_owned(),
        sealed: sealed?,
        claims: seen.claims + 1,
        scope: scope.to_owned(),
        ..with_state(seen, State::Claimed, threshold, now)
    };
    change(guard, seen, next)
}

/// The runner is registered for its run.
pub fn start(seen: &Instance, threshold: Timestamp, now: Timestamp) -> Option<Transition> {
    let guard = matches!(seen.state, State::Created | State::Claimed) && !seen.run_id.is_empty();
    change(guard, seen, Instance { sealed: String::new(), ..with_state(seen, State::Running, threshold, now) })
}

/// The claim releases the instance, with a token to deregister. It is claimable once it has left its run: see [`pool`].
pub fn release(seen: &Instance, sealed: Option<String>, threshold: Timestamp, now: Timestamp) -> Option<Transition> {
    let guard = matches!(seen.state, State::Running | State::Claimed) && !seen.run_id.is_empty();
    let next = Instance {
        claim: String::new(),
        claim_uid: String::new(),
        run_id: String::new(),
        leaving: seen.run_id.clone(),
        sealed: sealed?,
        ..with_state(seen, State::Idle, threshold, now)
    };
    change(guard, seen, next)
}

/// A warm instance has booted, and its agent has published its key. [`make_idle`] follows, because no transition leads
/// from created to idle.
pub fn warm_up(seen: &Instance, key: Option<&PublicKey>, threshold: Timestamp, now: Timestamp) -> Option<Transition> {
    let guard = seen.state == State::Created && seen.run_id.is_empty();
    change(guard, seen, with_state(&with_key(seen, key?), State::Running, threshold, now))
}

/// A warm instance enters the pool.
pub fn make_idle(seen: &Instance, threshold: Timestamp, now: Timestamp) -> Option<Transition> {
    let guard = seen.state == State::Running && seen.run_id.is_empty();
    change(guard, seen, with_state(seen, State::Idle, threshold, now))
}

/// The instance is kept warm for another idle period.
pub fn renew(seen: &Instance, threshold: Timestamp, now: Timestamp) -> Option<Transition> {
    let guard = seen.state == State::Idle && seen.leaving.is_empty();
    change(guard, seen, with_state(seen, State::Idle, threshold, now))
}

/// The instance has left its last run and its message is sent, so it can be claimed. The message is sent first: after a
/// crash in between it is sent twice instead of never.
pub fn pool(seen: &Instance) -> Option<Transition> {
    let guard = seen.state == State::Idle && !seen.leaving.is_empty();
    change(guard, seen, Instance { leaving: String::new(), sealed: String::new(), ..seen.clone() })
}

/// The instance is terminated, for this reason and with the end of its log. `leaving` is the run it may still be
/// registered for, until [`runner_gone`].
pub fn terminate(seen: &Instance, reason: &str, message: &str, log: &str, now: Timestamp) -> Option<Transition> {
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
        failure_log: log.to_owned(),
        ..seen.clone()
    };
    change(seen.state != State::Terminated, seen, next)
}

/// GitHub no longer has a runner of the terminated instance.
pub fn runner_gone(seen: &Instance) -> Option<Transition> {
    let guard = seen.state == State::Terminated && !seen.leaving.is_empty();
    change(guard, seen, Instance { leaving: String::new(), ..seen.clone() })
}

/// The record with a new state and threshold.
fn with_state(seen: &Instance, state: State, threshold: Timestamp, now: Timestamp) -> Instance {
    Instance { state, threshold: Some(threshold), updated_at: now, ..seen.clone() }
}

/// The record with its agent's key: the first one that was seen.
fn with_key(seen: &Instance, key: &PublicKey) -> Instance {
    let public_key = seen.public_key.clone().or_else(|| Some(key.clone()));
    Instance { public_key, ..seen.clone() }
}

fn change(guard: bool, seen: &Instance, next: Instance) -> Option<Transition> {
    guard.then(|| Transition { seen: Some(seen.clone()), next })
}

#[cfg(test)]
#[path = "transition_tests.rs"]
pub(crate) mod tests;
