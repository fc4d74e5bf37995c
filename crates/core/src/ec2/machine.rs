//! A machine's condition, from its record and its agent's report.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use paddock_record::{
    Heartbeat, IdleMessage, Instance, LOG_MAX, PublicKey, RUNNER_ENDED, Signal, State, WorkerSignal, tail,
};

use super::reuse_scope;
use crate::{
    api::{Ec2Pool, Ec2Timeouts, FailureReason, UsageClass, head},
    clock_skew::CLOCK_SKEW_MAX,
};

/// A heartbeat that a new leader finds is of a machine that died if it is older than this, the only comparison with an
/// agent's clock: [`CLOCK_SKEW_MAX`], and a minute between two beats, their reads, and until the leader knows its own skew.
const OLD_HEARTBEAT: SignedDuration = CLOCK_SKEW_MAX.saturating_add(SignedDuration::from_mins(1));

/// How many heartbeats one call reads: the limit of `BatchGetItem`.
pub const HEARTBEATS_PER_READ: usize = 100;

/// How often each heartbeat is read, unless there are too many of them.
const HEARTBEAT_READ_PERIOD: Duration = Duration::from_secs(2);

/// The time between two calls that read heartbeats. 1,100 machines take 11 calls in 4.6 s: 2.4 calls a second, of the 3
/// that a settled system may make. Each of those machines is still found dead within 5 s of its time: a read is up to
/// 4.6 s late, and the one that decides is not (see [`HeartbeatReads::order`] and [`HeartbeatReads::pause`]).
const HEARTBEAT_CALL_PERIOD: Duration = Duration::from_millis(420);

/// The least time between two of those calls, where one is made early to decide about a machine.
const HEARTBEAT_CALL_MIN: Duration = Duration::from_millis(50);

/// The least that the time between two reads may count as silence, however often they are made.
const READ_GAP_MAX: Duration = Duration::from_secs(4);

/// How the heartbeats of so many machines are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeartbeatReads {
    calls: u32,
}

impl HeartbeatReads {
    pub fn of(machines: usize) -> Self {
        Self { calls: machines.div_ceil(HEARTBEATS_PER_READ).max(1) as u32 }
    }

    /// The time between two calls: they are spread over the period.
    fn spacing(self) -> Duration {
        (HEARTBEAT_READ_PERIOD / self.calls).max(HEARTBEAT_CALL_PERIOD)
    }

    /// The pause until the next call, which is made early if the silence of a machine passes its limit before. `decisions`
    /// are [`HeartbeatReads::decision`] of each machine.
    pub fn pause(self, decisions: impl Iterator<Item = Option<SignedDuration>>) -> Duration {
        let soonest = decisions.flatten().min().and_then(|left| Duration::try_from(left).ok());
        let early = soonest.map(|left| left.max(HEARTBEAT_CALL_MIN));
        early.map_or(self.spacing(), |early| early.min(self.spacing()))
    }

    /// The time between two reads of one heartbeat.
    pub fn period(self) -> Duration {
        self.spacing() * self.calls
    }

    /// The most that the time between two reads counts as silence: if it was longer, the table could not be read, and
    /// the agents could perhaps not write to it either.
    pub fn gap_max(self) -> SignedDuration {
        SignedDuration::try_from((self.period() * 5 / 4).max(READ_GAP_MAX)).unwrap_or(SignedDuration::MAX)
    }

    /// Sorts by the order in which machines are read: first those whose silence has passed its limit since, so that one
    /// read decides whether they are dead, then those that were read the longest ago.
    pub fn order(machine: &Machine, limit: SignedDuration, now: Timestamp) -> (bool, Timestamp) {
        let decides = machine.has_spoken() && machine.silent <= limit && machine.silence(now) > limit;
        (!decides, machine.read_at)
    }

    /// The time until the silence of a machine has passed its limit, unless it has or the agent has never spoken.
    pub fn decision(machine: &Machine, limit: SignedDuration, now: Timestamp) -> Option<SignedDuration> {
        let left = limit - machine.silence(now);
        (machine.has_spoken() && left.is_positive()).then(|| left + SignedDuration::from_millis(1))
    }
}

/// Why a machine ends, or is not used, once EC2 has announced to take it back.
pub const RECLAIMED: &str = "EC2 takes the spot machine back";

/// How much of an agent's detail is shown. A machine may write anything there, up to DynamoDB's 400 KB.
const DETAIL_MAX: usize = 1024;

/// What the agent of a machine has written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AgentReport {
    pub heartbeat: Option<Heartbeat>,
    pub signal: Option<WorkerSignal>,
}

/// The interval until an agent's report is read again, after a wait of `waited` and with `awaited` reports pending.
/// Short at first, because a warm machine answers at once; longer for few agents, where each read is a call of its own,
/// and for very many. The maximum lets a ready runner be seen within 250 ms.
pub fn report_poll_delay(waited: Duration, awaited: usize) -> Duration {
    let least = if awaited < FEW_AWAITED { 60 } else { 40 * (awaited as u64 / 500 + 1) };
    (waited / 8).max(Duration::from_millis(least)).min(Duration::from_millis(150))
}

/// Below this many pending reports, each read is a call of its own.
const FEW_AWAITED: usize = 10;

/// A machine: its record and its agent's report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub record: Instance,
    pub report: AgentReport,
    /// When its heartbeat was last read.
    pub read_at: Timestamp,
    /// How long its heartbeat has been the same, by this operator's clock alone.
    pub silent: SignedDuration,
    /// How far its clock is ahead of the operator's, by its last heartbeat. That is up to [`HEARTBEAT_READ_PERIOD`] old, and
    /// so is what a clock seems to be behind. None before a second one has come.
    pub skew: Option<SignedDuration>,
}

impl Machine {
    /// A machine that this operator has not read before. Its heartbeat counts as new unless it is older than clocks differ.
    pub fn new(record: Instance, report: AgentReport, now: Timestamp) -> Self {
        let age = report.heartbeat.as_ref().map(|beat| now.duration_since(beat.updated_at));
        let silent = age.filter(|age| *age > OLD_HEARTBEAT).unwrap_or_default();
        let mut machine = Self { record, report: AgentReport::default(), read_at: now, silent, skew: None };
        let forged = report.heartbeat.as_ref().is_some_and(|beat| machine.is_forged(beat));
        machine.report = AgentReport { heartbeat: report.heartbeat.filter(|_| !forged), ..report };
        machine
    }

    /// Takes in the heartbeat as it was read at `now`. One that is missing counts as unchanged: a read that is not
    /// consistent may miss it. So does one that is forged.
    pub fn read_heartbeat(&mut self, found: Option<Heartbeat>, gap_max: SignedDuration, now: Timestamp) {
        let elapsed = now.duration_since(self.read_at);
        let gap = elapsed.clamp(SignedDuration::ZERO, gap_max);
        let last = self.report.heartbeat.as_ref().map(|beat| beat.updated_at);
        self.read_at = now;
        match (found.filter(|found| !self.is_forged(found)), last) {
            (Some(mut found), last) if last != Some(found.updated_at) => {
                // Otherwise it may have been there for longer.
                if last.is_some() && elapsed <= gap_max {
                    self.skew = Some(found.updated_at.duration_since(now));
                }
                found.public_key = found.public_key.or_else(|| self.public_key().cloned());
                // An agent that has restarted may not have read the notice yet.
                found.reclaimed |= self.is_reclaimed();
                (self.report.heartbeat, self.silent) = (Some(found), SignedDuration::ZERO);
            }
            _ if self.has_spoken() => self.silent += gap,
            _ => {}
        }
    }

    /// How long its heartbeat has been the same, if it still is.
    fn silence(&self, now: Timestamp) -> SignedDuration {
        self.silent + now.duration_since(self.read_at)
    }

    /// Whether its agent has ever sent a heartbeat. An earlier leader may have seen it.
    pub fn has_spoken(&self) -> bool {
        self.report.heartbeat.is_some() || self.record.public_key.is_some()
    }

    /// Whether a heartbeat has another key than the first one of its machine. It was not written by the agent, whose key
    /// is on disk, but by another program with the machine's role.
    pub fn is_forged(&self, beat: &Heartbeat) -> bool {
        matches!((self.public_key(), &beat.public_key), (Some(known), Some(found)) if known != found)
    }

    /// Whether EC2 has announced that it takes the machine back, within two minutes.
    pub fn is_reclaimed(&self) -> bool {
        let announced = self.report.heartbeat.as_ref().is_some_and(|beat| beat.reclaimed);
        announced && self.record.usage_class == UsageClass::Spot.as_str()
    }

    /// Whether the next action depends on the agent's report, so that it is read often.
    pub fn awaits_agent(&self) -> bool {
        match self.record.state {
            State::Created | State::Claimed => true,
            State::Idle => !self.record.leaving.is_empty(),
            State::Running | State::Terminated | State::Unknown => false,
        }
    }

    /// Whether its time in this state is over. Without a threshold it is: no transition could be written.
    pub fn expired(&self, now: Timestamp) -> bool {
        self.record.threshold.is_none_or(|threshold| threshold <= now)
    }

    /// Idle, and deregistered from its last run.
    pub fn is_free(&self) -> bool {
        self.record.state == State::Idle && self.record.leaving.is_empty()
    }

    /// Whether a claim can take it now: free, not expired, not about to end, and with a key to seal a token to.
    pub fn is_claimable(&self, now: Timestamp) -> bool {
        self.is_free() && !self.expired(now) && !self.is_reclaimed() && self.has_key()
    }

    /// The key to seal tokens to, which its agent publishes with its first heartbeat.
    pub fn public_key(&self) -> Option<&PublicKey> {
        let published = || self.report.heartbeat.as_ref()?.public_key.as_ref();
        self.record.public_key.as_ref().or_else(published)
    }

    pub(super) fn has_key(&self) -> bool {
        self.public_key().is_some()
    }

    /// Whether its agent's last signal is this one, for the record's number of claims: a re-run has the same id, and a
    /// signal of the first attempt must not count for the second. Without a number, of an agent of an earlier version, it
    /// counts for the run unless it would return the machine to the pool: such a machine serves one more claim and ends.
    pub(super) fn signalled(&self, signal: Signal, run_id: &str) -> bool {
        let same_claim = |last: &WorkerSignal| match last.claims {
            Some(claims) => claims == self.record.claims,
            None => signal != Signal::Deregistered,
        };
        let is_it = |last: &WorkerSignal| last.signal == signal && last.run_id == run_id && same_claim(last);
        self.report.signal.as_ref().is_some_and(is_it)
    }

    /// `what` with the detail that the agent reported; the machine's own log is lost with the machine.
    pub(super) fn with_detail(&self, what: &str) -> String {
        match self.report.signal.as_ref().map(|signal| signal.detail.as_str()) {
            None | Some("") => what.to_owned(),
            Some(detail) => format!("{what}: {}", head(detail, DETAIL_MAX)),
        }
    }

    /// What the machine said last before a failure; empty if it did not say anything.
    pub fn failure_log(&self) -> &str {
        self.report.signal.as_ref().map_or("", |signal| tail(&signal.log, LOG_MAX))
    }

    /// Whether the runner that serves this run has ended, and starting it again does not help.
    pub(super) fn runner_is_over(&self, run_id: &str) -> bool {
        let for_good = self.report.signal.as_ref().is_some_and(|signal| signal.reason == RUNNER_ENDED);
        for_good && self.signalled(Signal::RegistrationFailed, run_id)
    }

    /// Whether its agent has written a signal that was not read.
    pub fn has_unread_signal(&self) -> bool {
        let written = self.signalled_at();
        written.is_some() && written != self.report.signal.as_ref().map(|signal| signal.updated_at)
    }

    /// When its agent wrote its last signal, by the agent's heartbeat and clock.
    pub fn signalled_at(&self) -> Option<Timestamp> {
        self.report.heartbeat.as_ref()?.signalled_at
    }

    pub fn heartbeat_is_fresh(&self, timeouts: &Ec2Timeouts) -> bool {
        self.has_spoken() && self.silent <= SignedDuration::from(timeouts.heartbeat)
    }

    pub(super) fn half_idle(&self, pool: &Ec2Pool, now: Timestamp) -> bool {
        let half = SignedDuration::from(pool.lifetimes.idle) / 2;
        self.record.threshold.is_some_and(|threshold| threshold.duration_since(now) < half)
    }

    /// The message that the idle queue holds for this machine.
    pub fn idle_message(&self) -> IdleMessage {
        let record = &self.record;
        IdleMessage {
            instance_id: record.instance_id.clone(),
            usage_class: record.usage_class.clone(),
            instance_type: record.instance_type.clone(),
            cpu: record.cpu,
            mem: record.mem,
            resource_class: record.resource_class.clone(),
            scope: reuse_scope::of_machine(record).to_owned(),
            threshold: record.threshold.map(paddock_record::stamp).unwrap_or_default(),
        }
    }
}

/// The state of a machine for the claim that holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineCheck {
    /// Booting or registering, within its timeout.
    Waiting,
    /// Its agent has published its key and waits for the token to register with.
    NeedsToken,
    /// Registered for this run and alive.
    Confirmed,
    /// Running.
    Working,
    /// Will not become ready.
    Failed(FailureReason, String),
}

/// Checks a machine that a claim holds.
pub fn check(tracked: &Machine, timeouts: &Ec2Timeouts, now: Timestamp) -> MachineCheck {
    let record = &tracked.record;
    let limit = match record.state {
        State::Running => return MachineCheck::Working,
        State::Idle | State::Terminated | State::Unknown => {
            return MachineCheck::Failed(
                FailureReason::InstanceGone,
                "the instance was terminated or returned to the pool".into(),
            );
        }
        State::Created => timeouts.validation,
        State::Claimed => timeouts.registration,
    };
    if tracked.is_reclaimed() {
        return MachineCheck::Failed(FailureReason::SpotReclaimed, RECLAIMED.into());
    }
    let run = record.run_id.as_str();
    let dead = || {
        let message = format!("it has sent no heartbeat for {}", timeouts.heartbeat);
        MachineCheck::Failed(FailureReason::HeartbeatStale, message)
    };
    let late = now.duration_since(record.updated_at) > SignedDuration::from(limit);
    let fresh = tracked.heartbeat_is_fresh(timeouts);
    if tracked.signalled(Signal::Registered, run) {
        return match fresh {
            true => MachineCheck::Confirmed,
            false if late => dead(),
            false => MachineCheck::Waiting,
        };
    }
    // A machine that died in the pool does not cost its claim the whole time to register.
    if record.state == State::Claimed && tracked.has_key() && !fresh {
        return dead();
    }
    if tracked.signalled(Signal::RegistrationFailed, run) {
        let message = tracked.with_detail("its agent could not register with GitHub");
        return MachineCheck::Failed(FailureReason::RegistrationFailed, message);
    }
    if record.state == State::Created
        && tracked.report.signal.as_ref().is_some_and(|s| s.signal == Signal::ScriptFailed)
    {
        let message = tracked.with_detail("its pre-runner script failed");
        return MachineCheck::Failed(FailureReason::PreRunnerFailed, message);
    }
    if late {
        return match record.state {
            State::Created => MachineCheck::Failed(
                FailureReason::ValidationTimeout,
                format!("it did not boot and register within {limit}"),
            ),
            State::Claimed | State::Running | State::Idle | State::Terminated | State::Unknown => {
                MachineCheck::Failed(FailureReason::RegistrationTimeout, format!("it did not register within {limit}"))
            }
        };
    }
    if record.sealed.is_empty() && tracked.has_key() { MachineCheck::NeedsToken } else { MachineCheck::Waiting }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
