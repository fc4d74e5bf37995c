use paddock_record::Signal;
use serde_json::json;

use super::*;
use crate::{
    api::UsageClass,
    ec2::claim_scenario::{check, held, scenario, unsealed},
    fixtures::ec2::at,
};

#[test]
fn the_phase_decides_before_anything_else() {
    use ClaimPhase::{Claiming, Completed, Creating, Failed, Pending, Ready, Releasing, Validating};
    let running = held("i-1", State::Running, Some(Signal::Registered));
    let one = || scenario(1, std::slice::from_ref(&running));
    check([
        ("completed", one().phase(Completed), "settle"),
        ("failed", one().phase(Failed), "settle"),
        ("releasing", one().phase(Releasing), "finish Completed Completed"),
        ("ready", one().phase(Ready), "watch"),
        ("ready, and the run is completed", one().phase(Ready).run_completed(), "release"),
        ("completed, and so is the run", one().phase(Completed).run_completed(), "settle"),
        ("releasing, and the run is completed", one().phase(Releasing).run_completed(), "finish Completed Completed"),
        ("ready without machines", scenario(1, &[]).phase(Ready), "watch"),
    ]);
    for phase in [Pending, Claiming, Creating, Validating] {
        check([("acquiring", one().phase(phase), "serve")]);
        check([("acquiring for a completed run", one().phase(phase).run_completed(), "release")]);
    }
    for phase in [Pending, Claiming, Creating, Validating, Ready, Completed, Failed] {
        check([("deleted", one().phase(phase).deleted(), "release")]);
    }
    check([
        ("deleted and releasing", one().phase(Releasing).deleted(), "finalize"),
        ("deleted, and the run is completed", one().phase(Ready).run_completed().deleted(), "release"),
        ("deleted without a pool", one().phase(Ready).no_pool().deleted(), "finalize"),
        (
            "deleted without a finalizer",
            one().phase(Ready).deleted().claim(json!({"metadata": {"finalizers": []}})),
            "nothing",
        ),
    ]);
}

#[test]
fn a_claim_waits_until_its_pool_can_serve_it() {
    let claimed = held("i-1", State::Claimed, None);
    let deleting = json!({"metadata": {"deletionTimestamp": at(1)}});
    check([
        ("no pool", scenario(1, &[]).no_pool(), "wait PoolNotFound"),
        ("no pool for a claim that is over", scenario(1, &[]).phase(ClaimPhase::Completed).no_pool(), "nothing"),
        ("deleting", scenario(1, &[]).pool(deleting.clone()), "wait PoolNotReady"),
        ("deleting, with a machine held", scenario(1, &[claimed]).pool(deleting), "await agents"),
        ("no queue", scenario(1, &[]).pool(json!({"status": {"queues": null}})), "wait PoolNotReady"),
        ("no template", scenario(1, &[]).pool(json!({"status": {"launchTemplate": null}})), "wait PoolNotReady"),
        ("no status", scenario(1, &[]).pool(json!({"status": null})), "wait PoolNotReady"),
        (
            "no such class",
            scenario(1, &[]).claim(json!({"spec": {"resourceClass": "huge"}})),
            "finish Failed InvalidSpec",
        ),
    ]);
    let condition = json!({"type": "Ready", "status": "False", "reason": "InvalidSpec", "message": "no such AMI",
        "lastTransitionTime": at(0)});
    let unready = scenario(1, &[]).pool(json!({"status": {"queues": null, "conditions": [condition]}}));
    match unready.decide() {
        ClaimAction::Wait(wait) => assert_eq!(wait.message, "the pool is not ready: no such AMI"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn i4_nobody_starts_before_all_are_confirmed() {
    let waiting = held("i-2", State::Claimed, None);
    let confirmed = held("i-1", State::Claimed, Some(Signal::Registered));
    let created = held("i-2", State::Created, Some(Signal::Registered));
    check([
        ("one still registers", scenario(2, &[confirmed.clone(), waiting]).exhausted(), "await agents"),
        ("one has no token yet", scenario(2, &[confirmed.clone(), unsealed("i-2", State::Created)]), "seal i-2"),
        (
            "all are registered",
            scenario(2, &[confirmed, created]).exhausted().ordered(UsageClass::OnDemand, 1, &["i-2"]),
            "start i-1 i-2",
        ),
    ]);
}

#[test]
fn i5_a_start_that_was_cut_short_is_finished() {
    let running = held("i-1", State::Running, Some(Signal::Registered));
    let confirmed = held("i-2", State::Claimed, Some(Signal::Registered));
    let other = held("i-2", State::Running, Some(Signal::Registered));
    check([
        ("one runs", scenario(2, &[running.clone(), confirmed]), "start i-2"),
        ("both run", scenario(2, &[running, other]), "serve"),
    ]);
}

#[test]
fn a_machine_of_the_pool_that_fails_its_checks_is_replaced() {
    let failed = held("i-1", State::Claimed, Some(Signal::RegistrationFailed));
    let ended = held("i-1", State::Terminated, None);
    check([
        ("failed", scenario(1, std::slice::from_ref(&failed)), "replace i-1"),
        ("beside one without a token", scenario(2, &[failed, unsealed("i-2", State::Created)]), "seal i-2"),
        ("terminated", scenario(1, std::slice::from_ref(&ended)), "select 1"),
    ]);
    let created = held("i-2", State::Created, Some(Signal::Registered));
    let mixed = || scenario(2, &[ended.clone(), created.clone()]).ordered(UsageClass::OnDemand, 1, &["i-2"]);
    let lost = scenario(2, &[held("i-1", State::Claimed, None), held("i-2", State::Terminated, None)]);
    check([
        ("beside a created one", mixed(), "select 1"),
        ("and the pool has no more", mixed().exhausted(), "place order 2: 1 on-demand"),
        ("the created one", lost.ordered(UsageClass::OnDemand, 1, &["i-2"]), "finish Failed WorkerLost"),
    ]);
}

#[test]
fn i4_a_created_machine_that_fails_its_checks_fails_the_claim() {
    let fine = held("i-1", State::Claimed, Some(Signal::Registered));
    let failed = held("i-2", State::Created, Some(Signal::ScriptFailed));
    match scenario(2, &[fine, failed]).exhausted().ordered(UsageClass::OnDemand, 1, &["i-2"]).decide() {
        ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::ValidationFailed, message) => {
            assert!(message.starts_with("i-2: "), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_machine_that_ec2_takes_back_is_replaced_and_a_created_one_fails_the_claim_as_lost() {
    let noticed = |state| {
        let mut it = held("i-1", state, Some(Signal::Registered));
        it.record.usage_class = "spot".into();
        it.report.heartbeat.as_mut().unwrap().reclaimed = true;
        it
    };
    let created = scenario(1, &[noticed(State::Created)]).ordered(UsageClass::Spot, 1, &["i-1"]);
    check([
        ("of the pool", scenario(1, &[noticed(State::Claimed)]), "replace i-1"),
        ("created", created, "finish Failed WorkerLost"),
    ]);
}

#[test]
fn i4_a_claim_lets_go_of_what_it_does_not_need_machines_of_the_pool_first() {
    let [claimed, created, running] =
        [("i-1", State::Claimed), ("i-2", State::Created), ("i-3", State::Running)].map(|(id, s)| held(id, s, None));
    let all = [created.clone(), claimed.clone(), running.clone()];
    for (count, ready, spare) in
        [(3, false, &[][..]), (2, false, &["i-1"][..]), (1, false, &["i-1", "i-2"][..]), (3, true, &["i-1", "i-2"][..])]
    {
        assert_eq!(surplus(&all, count, ready), spare, "{count} {ready}");
    }
    assert!(surplus(std::slice::from_ref(&running), 1, true).is_empty());
    assert!(surplus(&[running, held("i-4", State::Terminated, None)], 1, true).is_empty());
    check([
        ("acquiring", scenario(2, &all), "return i-1"),
        ("ready", scenario(3, &all).phase(ClaimPhase::Ready), "return i-1 i-2"),
        ("ready, after one try", scenario(3, &all).phase(ClaimPhase::Ready).last(Applied::Done), "watch"),
    ]);
}

#[test]
fn a_status_is_written_only_where_the_claim_waits_or_a_new_leader_needs_it() {
    let order = || {
        let ordered = scenario(1, &[]).exhausted().decide();
        let ClaimAction::PlaceOrder(order) = ordered else { panic!("{ordered:?}") };
        order
    };
    let until = |seconds| Wait { reason: ClaimReason::PoolFull, message: String::new(), retry_at: Some(at(seconds)) };
    let make_room = || ClaimAction::MakeRoom { order: order(), terminate: vec!["i-9".into()] };
    let fall_back = || ClaimAction::FallBack { order: order(), terminate: Vec::new(), message: String::new() };
    let finish = || ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::WorkerLost, String::new());
    let launched = || Applied::Launched { fleet_id: "f".into(), instance_ids: vec!["i-1".into()] };
    let outage = || Applied::Unavailable(ClaimReason::GitHubUnavailable, "down".into());
    let after = |seconds| Break(Next::After(Duration::from_secs(seconds)));
    let (done, incomplete) = (Applied::Done, Applied::Incomplete);
    for (action, applied, expected) in [
        (ClaimAction::Nothing, done.clone(), (false, Break(Next::AwaitChange))),
        (wait(ClaimReason::PoolNotReady, String::new()), done.clone(), (true, after(5))),
        (wait(ClaimReason::PoolFull, String::new()), done.clone(), (true, after(30))),
        (ClaimAction::Wait(until(12)), done.clone(), (true, after(10))),
        (ClaimAction::Wait(until(2)), done.clone(), (true, after(1))),
        (ClaimAction::Wait(until(500)), done.clone(), (true, after(30))),
        (ClaimAction::Abandon(until(12)), done.clone(), (true, after(10))),
        (ClaimAction::Abandon(until(12)), incomplete.clone(), (false, after(1))),
        (ClaimAction::Select(1), Applied::Selected { exhausted: true }, (false, Continue(()))),
        (ClaimAction::Select(1), outage(), (true, after(5))),
        (ClaimAction::PlaceOrder(order()), done.clone(), (true, Continue(()))),
        (ClaimAction::PlaceOrder(order()), Applied::NoRoom, (false, Continue(()))),
        (make_room(), done.clone(), (true, Continue(()))),
        (make_room(), Applied::NoRoom, (false, Break(Next::After(CONFLICT_RETRY)))),
        (ClaimAction::SendOrder(order()), launched(), (true, Continue(()))),
        (ClaimAction::SendOrder(order()), Applied::Refused("no".into()), (false, Continue(()))),
        (fall_back(), done.clone(), (true, Continue(()))),
        (ClaimAction::Seal(Vec::new()), done.clone(), (false, Continue(()))),
        (ClaimAction::Replace(Vec::new()), done.clone(), (true, Continue(()))),
        (ClaimAction::AwaitAgents, done.clone(), (false, Continue(()))),
        (ClaimAction::AwaitAgents, incomplete.clone(), (true, after(1))),
        (ClaimAction::Start(Vec::new()), done.clone(), (false, Continue(()))),
        (ClaimAction::Serve, done.clone(), (true, Break(Next::AwaitChange))),
        (ClaimAction::Watch, done.clone(), (true, Break(Next::AwaitChange))),
        (ClaimAction::Return(Vec::new()), done.clone(), (false, Continue(()))),
        (ClaimAction::Return(Vec::new()), outage(), (true, after(5))),
        (ClaimAction::Release(String::new()), done.clone(), (true, Continue(()))),
        (finish(), done.clone(), (true, Break(Next::AwaitChange))),
        (finish(), incomplete.clone(), (false, after(1))),
        (ClaimAction::Settle, done.clone(), (true, Break(Next::AwaitChange))),
        (ClaimAction::Settle, incomplete.clone(), (false, after(1))),
        (ClaimAction::Finalize, done, (false, Break(Next::After(CONFLICT_RETRY)))),
        (ClaimAction::Finalize, incomplete, (false, after(1))),
    ] {
        assert_eq!(next(&action, &applied, at(2)), expected, "{action:?} {applied:?}");
    }
}

#[test]
fn a_claim_that_aws_refuses_is_tried_again_after_a_while_and_dumped_after_five_tries() {
    let claimed = held("i-1", State::Claimed, Some(Signal::Registered));
    let tried = |tries: u32, retry_at: i64| {
        let condition = json!({"type": READY, "status": "False", "reason": "AwsUnavailable", "message": "denied",
            "lastTransitionTime": at(0)});
        let status = json!({"failedTries": tries, "retryAt": at(retry_at), "conditions": [condition]});
        scenario(1, std::slice::from_ref(&claimed)).claim(json!({"status": status}))
    };
    let dump = "dump: given up after 5 tries, and all machines are terminated: denied";
    check([
        ("too early", tried(1, 3), "wait AwsUnavailable"),
        ("in time", tried(1, 2), "start i-1"),
        ("the last try", tried(5, 3), dump),
        ("the run is completed", tried(5, 3).run_completed(), "release"),
        ("deleted", tried(5, 3).deleted(), "release"),
        ("dumped", tried(5, 3).phase(ClaimPhase::Failed), "settle"),
    ]);
    let failed = |tries| next(&ClaimAction::Select(1), &Applied::Failed { tries, message: String::new() }, at(0));
    let after = |seconds| (true, Break(Next::After(Duration::from_secs(seconds))));
    assert_eq!([1, 2, 3, 4].map(failed), [5, 10, 20, 40].map(after));
    assert_eq!(failed(5), (true, Continue(())));
}
