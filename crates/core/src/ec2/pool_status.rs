//! The status of an EC2 pool.

use std::collections::{BTreeSet, HashSet};

use jiff::Timestamp;
use paddock_record::State;

use super::{drift::is_outdated, machine::Machine, runner_release, worker_status::counts};
use crate::{
    api::{
        CLOCK_SKEW, METADATA_ACCESS, PoolKind, PoolReason, RUNNER_OUTDATED, RunnerPool, RunnerPoolStatus, condition,
        head, ready_condition, set_condition,
    },
    clock_skew::{self, Skews},
};

/// Why a pool is not ready.
pub type PoolProblem = (PoolReason, String);

/// The status that a reconciliation starts from; it adds what it creates at AWS.
pub fn initial(pool: &RunnerPool) -> RunnerPoolStatus {
    let mut status = pool.status.clone().unwrap_or_default();
    status.kind = Some(PoolKind::Ec2);
    status.observed_generation = pool.metadata.generation;
    status
}

/// The status at the end of a reconciliation.
pub fn status(
    pool: &RunnerPool,
    mut status: RunnerPoolStatus,
    machines: &[Machine],
    problem: Option<PoolProblem>,
    skews: &Skews,
    now: Timestamp,
) -> RunnerPoolStatus {
    let (reason, message) = problem.unwrap_or((PoolReason::Ready, "the pool serves claims".to_owned()));
    let ready = reason == PoolReason::Ready;
    status.workers = counts(machines);
    let template = status.launch_template.as_ref();
    status.outdated = machines.iter().filter(|machine| is_outdated(&machine.record, template)).count() as u32;
    let generation = pool.metadata.generation;
    set_condition(&mut status.conditions, ready_condition(ready, reason, message, generation, now));
    let outdated = status.runner.as_ref().and_then(runner_release::outdated_message);
    for (type_, bad, (reason, good, message)) in [
        (CLOCK_SKEW, clock_skew::message(skews), ("ClocksDiffer", "ClocksAgree", "no clock differs much any more")),
        (RUNNER_OUTDATED, outdated, ("NewerRunner", "NewestRunner", "the runner is the one that GitHub lists")),
        (
            METADATA_ACCESS,
            warnings(machines),
            ("MetadataReachable", "MetadataBlocked", "no machine warns of it any more"),
        ),
    ] {
        // Absent unless it was bad before.
        let known = status.conditions.iter().any(|known| known.type_ == type_);
        let shown = match bad {
            Some(message) => condition(type_, true, reason, message, generation, now),
            None if known => condition(type_, false, good, message, generation, now),
            None => continue,
        };
        set_condition(&mut status.conditions, shown);
    }
    status
}

/// How much of a machine's warning is shown, and how many different ones.
const WARNING_MAX: usize = 300;
const WARNINGS_MAX: usize = 3;

/// What live machines warn of: each text once, so that it stays the same while machines come and go.
fn warnings(machines: &[Machine]) -> Option<String> {
    let live = machines.iter().filter(|machine| machine.record.state != State::Terminated);
    let warnings = live.filter_map(|machine| machine.report.heartbeat.as_ref()).map(|beat| beat.warning.as_str());
    let warnings: BTreeSet<_> =
        warnings.filter(|warning| !warning.is_empty()).map(|warning| head(warning, WARNING_MAX)).collect();
    let shown: Vec<_> = warnings.into_iter().take(WARNINGS_MAX).collect();
    (!shown.is_empty())
        .then(|| format!("{} (allow it with metadata.runnerAccess, or change the image)", shown.join("; ")))
}

/// What a deleted pool waits for before its machines are terminated.
pub fn deletion_waits_for(machines: &[Machine]) -> Option<PoolProblem> {
    let live = machines.iter().map(|machine| &machine.record).filter(|record| record.state != State::Terminated);
    let claims: HashSet<_> = live.clone().map(|record| &record.claim).filter(|claim| !claim.is_empty()).collect();
    // A machine that ends before it has deregistered leaves its runner at GitHub.
    let leaving = live.filter(|record| !record.leaving.is_empty()).count();
    let message = match (claims.len(), leaving) {
        (0, 0) => return None,
        (0, leaving) => format!("waiting for {leaving} machines to deregister from GitHub"),
        (claims, _) => format!("waiting for {claims} claims that hold machines to be deleted or to end"),
    };
    Some((PoolReason::Deleting, message))
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use paddock_record::Heartbeat;

    use super::*;
    use crate::{
        api::{READY, RunnerRelease},
        clock_skew::SkewedClock,
        fixtures::ec2::{at, beat, ready_pool, record, tracked},
    };

    fn machine(id: &str, state: State, claim: &str, leaving: &str) -> Machine {
        let mut machine = tracked(record(id, state, "", at(0)));
        machine.record.claim = claim.into();
        machine.record.leaving = leaving.into();
        machine
    }

    #[test]
    fn a_pool_is_ready_unless_it_has_a_problem() {
        let (pool, machines) = (ready_pool(), [machine("i-1", State::Idle, "", "")]);
        let condition_with = |problem| {
            let status = status(&pool, initial(&pool), &machines, problem, &Skews::new(), at(0));
            let ready = status.conditions.iter().find(|condition| condition.type_ == READY).unwrap();
            assert_eq!((status.kind, status.workers.idle), (Some(PoolKind::Ec2), 1));
            (ready.status.clone(), ready.reason.clone(), ready.message.clone())
        };
        assert_eq!(condition_with(None).0, "True");
        let denied = condition_with(Some((PoolReason::AwsDenied, "no".into())));
        assert_eq!(denied, ("False".into(), "AwsDenied".into(), "no".into()));
    }

    #[test]
    fn a_pool_says_which_clock_differs_and_when_none_does_any_more() {
        let mut pool = ready_pool();
        let mut skew_after = |skews: Skews| {
            let status = status(&pool, initial(&pool), &[], None, &skews, at(0));
            pool.status = Some(status.clone());
            let found = status.conditions.into_iter().find(|condition| condition.type_ == CLOCK_SKEW);
            found.map(|condition| (condition.status, condition.message))
        };
        assert_eq!(skew_after(Skews::new()), None);
        let ahead = Skews::from([(SkewedClock::Machine("i-1".into()), SignedDuration::from_secs(300))]);
        let (state, message) = skew_after(ahead).unwrap();
        assert!(state == "True" && message.contains("i-1 is 300 s ahead"), "{state} {message}");
        assert_eq!(skew_after(Skews::new()).unwrap().0, "False");
    }

    #[test]
    fn a_pool_says_until_when_github_takes_its_runner_and_when_it_is_the_newest() {
        let mut pool = ready_pool();
        let mut outdated_with = |newer_since: Option<Timestamp>| {
            let newer_since = newer_since.map(Time);
            let release =
                RunnerRelease { newer_since: newer_since.clone(), deadline: newer_since, ..Default::default() };
            let status = RunnerPoolStatus { runner: Some(release), ..initial(&pool) };
            let status = super::status(&pool, status, &[], None, &Skews::new(), at(0));
            pool.status = Some(status.clone());
            let found = status.conditions.into_iter().find(|condition| condition.type_ == RUNNER_OUTDATED);
            found.map(|condition| condition.status)
        };
        assert_eq!(outdated_with(None), None);
        assert_eq!(outdated_with(Some(at(0))).as_deref(), Some("True"));
        assert_eq!(outdated_with(None).as_deref(), Some("False"));
    }

    #[test]
    fn a_pool_says_that_jobs_reach_the_metadata_service_once_for_all_its_machines() {
        let mut pool = ready_pool();
        let warning = |id: &str, warning: &str| {
            let mut machine = machine(id, State::Idle, "", "");
            machine.report.heartbeat = Some(Heartbeat { warning: warning.into(), ..beat(at(0)) });
            machine
        };
        let mut shown = |machines: &[Machine]| {
            let status = status(&pool, initial(&pool), machines, None, &Skews::new(), at(0));
            pool.status = Some(status.clone());
            let found = status.conditions.into_iter().find(|condition| condition.type_ == METADATA_ACCESS);
            found.map(|condition| (condition.status, condition.message))
        };
        assert_eq!(shown(&[warning("i-1", "")]), None);
        let one = shown(&[warning("i-1", "no iptables")]).unwrap();
        assert!(one.0 == "True" && one.1.starts_with("no iptables (allow it with"), "{one:?}");
        assert_eq!(shown(&[warning("i-2", "no iptables"), warning("i-3", "no iptables")]).unwrap(), one);
        let mut ended = warning("i-1", "no iptables");
        ended.record.state = State::Terminated;
        assert_eq!(shown(&[ended]).unwrap().0, "False");
    }

    #[test]
    fn a_deleted_pool_waits_for_claims_first_and_then_for_runners() {
        let gone = machine("i-0", State::Terminated, "old", "7");
        let leaving = machine("i-1", State::Idle, "", "7");
        let held = machine("i-2", State::Running, "build", "");
        let idle = machine("i-3", State::Idle, "", "");
        let message = |machines: &[&Machine]| {
            let machines: Vec<_> = machines.iter().map(|machine| (*machine).clone()).collect();
            deletion_waits_for(&machines).map(|(_, message)| message)
        };
        assert_eq!(message(&[&gone, &idle]), None);
        assert_eq!(message(&[&leaving, &idle]).unwrap(), "waiting for 1 machines to deregister from GitHub");
        assert!(message(&[&held, &leaving]).unwrap().starts_with("waiting for 1 claims"));
    }
}
