use paddock_record::Signal;
use serde_json::{Value, json};

use super::*;
use crate::{
    api::UsageClass,
    ec2::{claim_status, machine::AgentReport},
    fixtures::{
        boards::with,
        ec2::{at, beat, ec2_claim, ready_pool, record, said, tracked},
    },
};

const RUN: &str = "7890";

/// A claim and what surrounds it; its methods change one thing each.
struct Scenario {
    claim: RunnerClaim,
    pool: Option<RunnerPool>,
    machines: Vec<Machine>,
    live: u32,
    capacity: CapacityMemory,
    pool_exhausted: bool,
    run_completed: bool,
    last: Applied,
}

fn scenario(count: u32, machines: &[Machine]) -> Scenario {
    Scenario {
        claim: ec2_claim(count, RUN),
        pool: Some(ready_pool()),
        machines: machines.to_vec(),
        live: 0,
        capacity: CapacityMemory::new(Duration::from_mins(3)),
        pool_exhausted: false,
        run_completed: false,
        last: Applied::default(),
    }
}

impl Scenario {
    fn claim(mut self, change: Value) -> Self {
        self.claim = with(&self.claim, change);
        self
    }

    fn phase(self, phase: ClaimPhase) -> Self {
        self.claim(json!({"status": {"phase": phase}}))
    }

    fn deleted(self) -> Self {
        self.claim(json!({"metadata": {"deletionTimestamp": at(1)}}))
    }

    fn pool(mut self, change: Value) -> Self {
        self.pool = self.pool.map(|pool| with(&pool, change));
        self
    }

    fn no_pool(self) -> Self {
        Self { pool: None, ..self }
    }

    fn exhausted(self) -> Self {
        Self { pool_exhausted: true, ..self }
    }

    fn run_completed(self) -> Self {
        Self { run_completed: true, ..self }
    }

    fn last(self, last: Applied) -> Self {
        Self { last, ..self }
    }

    /// With an order for `count` machines, and what EC2 gave.
    fn ordered(self, usage_class: UsageClass, template: i64, instance_ids: &[&str]) -> Self {
        let order = json!({
            "clientToken": "t", "attempt": 1, "requested": self.claim.spec.count, "usageClass": usage_class,
            "orderedAt": at(1), "launchTemplate": {"id": "lt-1", "version": template},
            "subnetIds": ["subnet-12345678"], "instanceIds": instance_ids,
        });
        self.claim(json!({"status": {"fleet": order}}))
    }

    fn decide(&self) -> ClaimAction {
        let status = claim_status::initial(&self.claim, at(2));
        let live = |tracked: &Machine| tracked.record.state != State::Terminated;
        let facts = ClaimFacts {
            claim: &self.claim,
            status: &status,
            pool: PoolView::of(&self.claim.spec, self.pool.as_ref(), self.machines.iter().any(live)),
            machines: &self.machines,
            launch: LaunchOptions { live: self.live, capacity: &self.capacity },
            pool_exhausted: self.pool_exhausted,
            run_completed: self.run_completed,
            last: &self.last,
        };
        decide(&facts, at(2))
    }
}

fn held(id: &str, state: State, signal: Option<Signal>) -> Machine {
    let mut tracked = tracked(record(id, state, RUN, at(0)));
    tracked.report = AgentReport { heartbeat: Some(beat(at(1))), signal: signal.map(|signal| said(signal, RUN)) };
    tracked.record.sealed = "sealed".into();
    tracked
}

fn unsealed(id: &str, state: State) -> Machine {
    let mut tracked = held(id, state, None);
    tracked.record.sealed.clear();
    let key = paddock_record::KeyPair::generate().public();
    tracked.report.heartbeat.as_mut().unwrap().public_key = Some(key);
    tracked
}

fn out_of_capacity() -> Cause {
    let (code, subnet) = ("InsufficientInstanceCapacity".into(), "subnet-12345678".into());
    Cause { code, subnet, zone: "zone-a".into(), ..Cause::default() }
}

/// The name of an action, its reason or phase, and how many machines it is about.
fn summary(action: &ClaimAction) -> String {
    match action {
        ClaimAction::Nothing => "nothing".into(),
        ClaimAction::Wait(wait) => format!("wait {}", wait.reason.as_str()),
        ClaimAction::Select(count) => format!("select {count}"),
        ClaimAction::PlaceOrder(order) => {
            format!("place order {}: {} {}", order.attempt, order.requested, order.usage_class.as_str())
        }
        ClaimAction::SendOrder(order) => format!("send order {}", order.attempt),
        ClaimAction::FallBack { order, terminate, .. } => {
            format!("terminate {}, order {} {}", terminate.join(" "), order.requested, order.usage_class.as_str())
        }
        ClaimAction::Seal(ids) => format!("seal {}", ids.join(" ")),
        ClaimAction::Replace(failed) => {
            format!("replace {}", failed.iter().map(|machine| machine.id.as_str()).collect::<Vec<_>>().join(" "))
        }
        ClaimAction::AwaitAgents => "await agents".into(),
        ClaimAction::Start(ids) => format!("start {}", ids.join(" ")),
        ClaimAction::Serve => "serve".into(),
        ClaimAction::Watch => "watch".into(),
        ClaimAction::Return(ids) => format!("return {}", ids.join(" ")),
        ClaimAction::Release(_) => "release".into(),
        ClaimAction::Finish(phase, reason, _) => format!("finish {} {}", phase.as_str(), reason.as_str()),
        ClaimAction::Settle => "settle".into(),
        ClaimAction::Finalize => "finalize".into(),
    }
}

fn check<const N: usize>(cases: [(&str, Scenario, &str); N]) {
    for (name, scenario, expected) in cases {
        assert_eq!(summary(&scenario.decide()), expected, "{name}");
    }
}

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
fn the_pool_is_asked_first_and_machines_are_created_only_when_it_has_none() {
    let claimed = held("i-1", State::Claimed, None);
    let one = std::slice::from_ref(&claimed);
    let full =
        Scenario { live: 99, ..scenario(3, one).exhausted() }.pool(json!({"spec": {"ec2": {"maxInstances": 100}}}));
    let room =
        Scenario { live: 98, ..scenario(3, one).exhausted() }.pool(json!({"spec": {"ec2": {"maxInstances": 100}}}));
    check([
        ("nothing held", scenario(3, &[]), "select 3"),
        ("one of three", scenario(3, one), "select 2"),
        ("the pool has no more", scenario(3, one).exhausted(), "place order 1: 2 on-demand"),
        ("no room", full, "wait PoolFull"),
        ("just enough room", room, "place order 1: 2 on-demand"),
    ]);
}

#[test]
fn nothing_is_ordered_where_ec2_has_no_capacity() {
    let spot = |fallback: bool| {
        let ec2 = json!({"defaults": {"usageClass": "spot", "allowedInstanceTypes": ["c6i.large"]},
            "fallback": {"spotToOnDemand": fallback}});
        scenario(1, &[]).exhausted().pool(json!({"spec": {"ec2": ec2}}))
    };
    let short = |mut scenario: Scenario| {
        let ordered = scenario.decide();
        let ClaimAction::PlaceOrder(order) = ordered else { panic!("{ordered:?}") };
        scenario.capacity.note(&order, 0, &[out_of_capacity()], at(1));
        scenario
    };
    check([
        ("with capacity", spot(false), "place order 1: 1 spot"),
        ("without", short(spot(false)), "wait InsufficientCapacity"),
        ("with a fallback", short(spot(true)), "place order 1: 1 on-demand"),
        ("without either", short(short(spot(true))), "wait InsufficientCapacity"),
    ]);
    match short(spot(false)).decide() {
        ClaimAction::Wait(wait) => assert_eq!(wait.retry_at, Some(at(181))),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_order_is_sent_until_its_machines_have_records() {
    use UsageClass::{OnDemand, Spot};
    let sent = || scenario(2, &[]).ordered(OnDemand, 1, &[]);
    let short = |causes: Vec<Cause>| Applied::Short { launched: vec!["i-1".into()], causes };
    let other = Cause { code: "InvalidSubnetID.NotFound".into(), ..Cause::default() };
    let spot = || {
        scenario(2, &[]).ordered(Spot, 1, &[]).pool(json!({"spec": {"ec2": {"fallback": {"spotToOnDemand": true}}}}))
    };
    let gone = || Applied::TemplateGone("no template".into());
    check([
        ("found after a restart", sent(), "send order 1"),
        ("just placed", sent().last(Applied::Done), "send order 1"),
        ("refused", sent().last(Applied::Refused("no".into())), "finish Failed AwsUnavailable"),
        ("short", sent().last(short(vec![out_of_capacity()])), "finish Failed InsufficientCapacity"),
        ("short for another reason", sent().last(short(vec![other.clone()])), "finish Failed AwsUnavailable"),
        ("spot is short", spot().last(short(vec![out_of_capacity()])), "terminate i-1, order 2 on-demand"),
        ("spot fails for another reason", spot().last(short(vec![other])), "finish Failed AwsUnavailable"),
        ("its template is gone", sent().last(gone()), "wait PoolNotReady"),
        (
            "the pool has another template by now",
            scenario(2, &[]).ordered(Spot, 7, &[]).last(gone()),
            "place order 2: 2 spot",
        ),
    ]);
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
fn a_fleet_is_ordered_once() {
    let lost = scenario(1, &[]).exhausted().ordered(UsageClass::OnDemand, 1, &["i-1"]);
    check([("its machine is lost", lost, "finish Failed WorkerLost")]);
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
    let fall_back = || ClaimAction::FallBack { order: order(), terminate: Vec::new(), message: String::new() };
    let finish = || ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::WorkerLost, String::new());
    let launched = || Applied::Launched { fleet_id: "f".into(), instance_ids: vec!["i-1".into()] };
    let outage = || Applied::Unavailable(ClaimReason::GitHubUnavailable, "down".into());
    let after = |seconds| Break(Next::After(Duration::from_secs(seconds)));
    let (done, incomplete) = (Applied::Done, Applied::Incomplete);
    for (action, applied, expected) in [
        (ClaimAction::Nothing, done.clone(), (false, Break(Next::AwaitChange))),
        (wait(ClaimReason::PoolFull, String::new()), done.clone(), (true, after(5))),
        (ClaimAction::Wait(until(12)), done.clone(), (true, after(10))),
        (ClaimAction::Wait(until(2)), done.clone(), (true, after(1))),
        (ClaimAction::Wait(until(500)), done.clone(), (true, after(30))),
        (ClaimAction::Select(1), Applied::Selected { exhausted: true }, (false, Continue(()))),
        (ClaimAction::Select(1), outage(), (true, after(5))),
        (ClaimAction::PlaceOrder(order()), done.clone(), (true, Continue(()))),
        (ClaimAction::PlaceOrder(order()), Applied::NoRoom, (false, Continue(()))),
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
