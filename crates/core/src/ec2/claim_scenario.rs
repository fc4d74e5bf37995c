//! A claim and what surrounds it, for the tests of its next action.

use std::time::Duration;

use paddock_record::{Instance, Signal, State};
use serde_json::{Value, json};

use super::{
    capacity_memory::CapacityMemory,
    claim::{Applied, ClaimAction, ClaimFacts, Offer, PoolView, decide},
    claim_status,
    launch_error::Cause,
    machine::{AgentReport, Machine},
    requirements::Requirements,
    waiting_line::{Admission, OpenClaim, Stock, admit_last},
};
use crate::{
    api::{ClaimPhase, RunnerClaim, RunnerPool, UsageClass},
    fixtures::{
        boards::with,
        ec2::{at, beat, ec2_claim, ready_pool, record, said, subnets, tracked},
    },
};

pub const RUN: &str = "7890";

/// A claim and what surrounds it; its methods change one thing each.
pub struct Scenario {
    pub claim: RunnerClaim,
    pub pool: Option<RunnerPool>,
    pub machines: Vec<Machine>,
    /// The idle machines of the pool.
    pub idle: Vec<Instance>,
    /// Machines of the pool that exist or are being launched.
    pub live: u32,
    pub capacity: CapacityMemory,
    pub offer: Option<Offer>,
    pub pool_exhausted: bool,
    pub run_completed: bool,
    pub last: Applied,
}

pub fn scenario(count: u32, machines: &[Machine]) -> Scenario {
    Scenario {
        claim: ec2_claim(count, RUN),
        pool: Some(ready_pool()),
        machines: machines.to_vec(),
        idle: Vec::new(),
        live: 0,
        capacity: CapacityMemory::new(Duration::from_mins(3)),
        offer: Some(Offer { subnets: subnets(), instance_types: Some(9) }),
        pool_exhausted: false,
        run_completed: false,
        last: Applied::default(),
    }
}

impl Scenario {
    pub fn claim(mut self, change: Value) -> Self {
        self.claim = with(&self.claim, change);
        self
    }

    pub fn phase(self, phase: ClaimPhase) -> Self {
        self.claim(json!({"status": {"phase": phase}}))
    }

    pub fn deleted(self) -> Self {
        self.claim(json!({"metadata": {"deletionTimestamp": at(1)}}))
    }

    pub fn pool(mut self, change: Value) -> Self {
        self.pool = self.pool.map(|pool| with(&pool, change));
        self
    }

    pub fn no_pool(self) -> Self {
        Self { pool: None, ..self }
    }

    pub fn exhausted(self) -> Self {
        Self { pool_exhausted: true, ..self }
    }

    pub fn run_completed(self) -> Self {
        Self { run_completed: true, ..self }
    }

    pub fn last(self, last: Applied) -> Self {
        Self { last, ..self }
    }

    /// With an order for `count` machines, and what EC2 gave.
    pub fn ordered(self, usage_class: UsageClass, template: i64, instance_ids: &[&str]) -> Self {
        let order = json!({
            "clientToken": "t", "attempt": 1, "requested": self.claim.spec.count, "usageClass": usage_class,
            "orderedAt": at(1), "launchTemplate": {"id": "lt-1", "version": template},
            "subnets": [{"id": "subnet-12345678", "zone": "zone-a"}], "instanceIds": instance_ids,
        });
        self.claim(json!({"status": {"fleet": order}}))
    }

    /// Without other claims.
    pub fn admission(&self) -> Admission {
        let none = Ok(Vec::new());
        let Some(spec) = self.pool.as_ref().and_then(|pool| pool.spec.ec2.as_ref()) else { return none };
        let Some(needs) = Requirements::of(&self.claim.spec, "ci", spec) else { return none };
        let held = self.machines.iter().filter(|machine| machine.record.state != State::Terminated).count() as u32;
        let missing = self.claim.spec.count.saturating_sub(held);
        let own = OpenClaim { name: "c".into(), needs, missing, since: at(0) };
        let (idle, exhausted) = (self.idle.iter().collect(), self.pool_exhausted);
        let subnets = self.offer.as_ref().map_or(&[][..], |offer| &offer.subnets);
        let stock = Stock { spec, idle, exhausted, live: self.live, capacity: &self.capacity, subnets };
        if missing == 0 { none } else { admit_last(&[own], stock, at(2)) }
    }

    pub fn decide(&self) -> ClaimAction {
        let status = claim_status::initial(&self.claim, at(2));
        let live = |tracked: &Machine| tracked.record.state != State::Terminated;
        let facts = ClaimFacts {
            claim: &self.claim,
            status: &status,
            pool: PoolView::of(&self.claim.spec, self.pool.as_ref(), self.machines.iter().any(live)),
            machines: &self.machines,
            admission: &self.admission(),
            capacity: &self.capacity,
            offer: self.offer.as_ref(),
            cluster: "prod",
            pool_exhausted: self.pool_exhausted,
            run_completed: self.run_completed,
            reruns: self
                .pool
                .as_ref()
                .is_some_and(|pool| pool.spec.ec2.as_ref().is_some_and(|it| it.rerun_interrupted)),
            last: &self.last,
        };
        decide(&facts, at(2))
    }
}

pub fn held(id: &str, state: State, signal: Option<Signal>) -> Machine {
    let mut tracked = tracked(record(id, state, RUN, at(0)));
    tracked.report = AgentReport { heartbeat: Some(beat(at(1))), signal: signal.map(|signal| said(signal, RUN)) };
    tracked.record.sealed = "sealed".into();
    tracked
}

pub fn unsealed(id: &str, state: State) -> Machine {
    let mut tracked = held(id, state, None);
    tracked.record.sealed.clear();
    let key = paddock_record::KeyPair::generate().public();
    tracked.report.heartbeat.as_mut().unwrap().public_key = Some(key);
    tracked
}

pub fn out_of_capacity() -> Cause {
    let (code, subnet) = ("InsufficientInstanceCapacity".into(), "subnet-12345678".into());
    Cause { code, subnet, zone: "zone-a".into(), ..Cause::default() }
}

/// The name of an action, its reason or phase, and how many machines it is about.
pub fn summary(action: &ClaimAction) -> String {
    match action {
        ClaimAction::Nothing => "nothing".into(),
        ClaimAction::Wait(wait) => format!("wait {}", wait.reason.as_str()),
        ClaimAction::Abandon(wait) => format!("abandon {}", wait.reason.as_str()),
        ClaimAction::Select(count) => format!("select {count}"),
        ClaimAction::LookUpOffer => "look up offer".into(),
        ClaimAction::PlaceOrder(order) => {
            format!("place order {}: {} {}", order.attempt, order.requested, order.usage_class.as_str())
        }
        ClaimAction::MakeRoom { order, terminate } => {
            let usage_class = order.usage_class.as_str();
            format!(
                "terminate {}, place order {}: {} {usage_class}",
                terminate.join(" "),
                order.attempt,
                order.requested
            )
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
        ClaimAction::Dump(why) => format!("dump: {why}"),
        ClaimAction::Settle => "settle".into(),
        ClaimAction::Rerun(step) => format!("rerun {step:?}"),
        ClaimAction::Finalize => "finalize".into(),
    }
}

pub fn check<const N: usize>(cases: [(&str, Scenario, &str); N]) {
    for (name, scenario, expected) in cases {
        assert_eq!(summary(&scenario.decide()), expected, "{name}");
    }
}
