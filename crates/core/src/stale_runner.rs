//! Runners at GitHub without a machine or worker, and machines whose agent is silent.

use jiff::{SignedDuration, Timestamp};
use paddock_record::State;

use crate::{
    api::{Ec2Timeouts, FailureReason},
    ec2::machine::Machine,
};

/// How long past `timeouts.heartbeat` a running machine may be silent before GitHub is asked about its runner.
const SILENT_AGENT_GRACE: SignedDuration = SignedDuration::from_mins(2);

/// A runner as GitHub lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    pub id: i64,
    pub online: bool,
    pub busy: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Leave,
    /// GitHub still lists the runner of a terminated machine.
    Delete(i64),
    /// GitHub has no runner of that name: nothing is left to do.
    Settled,
    /// Its heartbeat stopped, and its runner is offline at GitHub.
    End(FailureReason, String),
}

/// Whether GitHub has to be asked: a terminated machine may have left its runner behind, and a silent one may still
/// run a job.
pub fn is_doubtful(tracked: &Machine, timeouts: &Ec2Timeouts) -> bool {
    match tracked.record.state {
        State::Terminated => !tracked.record.leaving.is_empty(),
        State::Running => !tracked.record.run_id.is_empty() && is_silent(tracked, timeouts),
        State::Created | State::Idle | State::Claimed | State::Unknown => false,
    }
}

fn last_heartbeat(tracked: &Machine) -> Timestamp {
    tracked.report.heartbeat.as_ref().map_or(tracked.record.updated_at, |beat| beat.updated_at)
}

fn is_silent(tracked: &Machine, timeouts: &Ec2Timeouts) -> bool {
    tracked.silent > SignedDuration::from(timeouts.heartbeat) + SILENT_AGENT_GRACE
}

/// What GitHub's answer means for a doubtful machine. A busy or online runner and its machine are left alone.
pub fn verdict(tracked: &Machine, runner: Option<Listed>) -> Verdict {
    match (tracked.record.state, runner) {
        (_, Some(Listed { busy: true, .. } | Listed { online: true, .. })) => Verdict::Leave,
        (State::Terminated, Some(Listed { id, .. })) => Verdict::Delete(id),
        (State::Terminated, None) => Verdict::Settled,
        (State::Running, Some(_) | None) if tracked.is_reclaimed() => {
            Verdict::End(FailureReason::SpotReclaimed, "EC2 took the spot machine back".into())
        }
        (State::Running, Some(_) | None) => {
            let since = last_heartbeat(tracked).strftime("%Y-%m-%dT%H:%M:%SZ");
            let message = format!("its last heartbeat was at {since}, and its runner is offline at GitHub");
            Verdict::End(FailureReason::HeartbeatStale, message)
        }
        (State::Created | State::Idle | State::Claimed | State::Unknown, Some(_) | None) => Verdict::Leave,
    }
}

/// The listed runners that have our prefix, are not busy and have no worker. All others are left alone.
pub fn without_worker<'a>(
    runners: impl IntoIterator<Item = (&'a str, Listed)>,
    prefix: &str,
    has_worker: impl Fn(&str) -> bool,
) -> Vec<(String, i64)> {
    let stale = |(name, runner): &(&str, Listed)| name.starts_with(prefix) && !runner.busy && !has_worker(name);
    runners.into_iter().filter(stale).map(|(name, runner)| (name.to_owned(), runner.id)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::ec2::{at, beat, leaving, pool, record, tracked};

    #[test]
    fn only_idle_runners_of_ours_without_a_worker_are_stale() {
        let listed = |id, busy| Listed { id, online: true, busy };
        let runners = [
            ("paddock-1-gone", listed(1, false)),
            ("paddock-1-busy", listed(2, true)),
            ("paddock-1-live", listed(3, false)),
            ("other", listed(4, false)),
        ];
        let stale = without_worker(runners, "paddock-1-", |name| name == "paddock-1-live");
        assert_eq!(stale, [("paddock-1-gone".to_owned(), 1)]);
    }

    const RUN: &str = "7890";

    fn ended(last_run: &str) -> Machine {
        tracked(leaving(last_run, record("i-1", State::Terminated, "", at(0))))
    }

    fn serving(silent_for: i64) -> Machine {
        let mut it = tracked(record("i-1", State::Running, RUN, at(0)));
        it.report.heartbeat = Some(beat(at(0)));
        it.silent = SignedDuration::from_secs(silent_for);
        it
    }

    #[test]
    fn github_is_asked_about_machines_that_ended_with_a_run_and_those_that_are_silent() {
        let timeouts = pool().timeouts;
        assert!(is_doubtful(&ended(RUN), &timeouts));
        assert!(!is_doubtful(&ended(""), &timeouts), "it deregistered before it ended");
        assert!(!is_doubtful(&serving(135), &timeouts));
        assert!(is_doubtful(&serving(136), &timeouts));
        for state in [State::Created, State::Idle, State::Claimed] {
            let it = Machine { silent: SignedDuration::from_secs(9999), ..tracked(record("i-1", state, RUN, at(0))) };
            assert!(!is_doubtful(&it, &timeouts), "{state}");
        }
    }

    #[test]
    fn i8_a_busy_or_online_runner_and_its_machine_are_left_alone() {
        for (online, busy) in [(true, false), (false, true), (true, true)] {
            let runner = Some(Listed { id: 7, online, busy });
            assert_eq!(verdict(&serving(999), runner), Verdict::Leave);
            assert_eq!(verdict(&ended(RUN), runner), Verdict::Leave);
        }
    }

    #[test]
    fn i2_a_runner_without_a_machine_goes_and_a_machine_without_a_runner_ends() {
        let offline = Some(Listed { id: 7, online: false, busy: false });
        assert_eq!(verdict(&ended(RUN), offline), Verdict::Delete(7));
        assert_eq!(verdict(&ended(RUN), None), Verdict::Settled);
        for runner in [offline, None] {
            assert!(matches!(verdict(&serving(999), runner), Verdict::End(FailureReason::HeartbeatStale, _)));
            let mut noticed = serving(999);
            noticed.record.usage_class = "spot".into();
            noticed.report.heartbeat.as_mut().unwrap().reclaimed = true;
            assert!(matches!(verdict(&noticed, runner), Verdict::End(FailureReason::SpotReclaimed, _)));
        }
    }
}
