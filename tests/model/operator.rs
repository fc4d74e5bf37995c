//! The leader's next write: the operator's own decisions from `paddock_core::ec2`, and a model of how
//! `src/controllers` applies them, one write at a time.

use std::{sync::LazyLock, time::Duration};

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use paddock_core::{
    api::{ClaimPhase, Ec2Pool, FINALIZER, LaunchOrder, LaunchTemplate, RunnerClaim, RunnerClaimSpec, UsageClass},
    ec2::{
        capacity_memory::CapacityMemory,
        claim::{Applied, ClaimAction, ClaimFacts, Offer, PoolView, Supply, decide, surplus},
        launch_error::Cause,
        machine::Machine as Ec2Machine,
        matching::{Availability, EMPTY_POLLS, Exhaustion, Pickup, pick},
        requirements::Requirements,
        upkeep::{Ec2State, Upkeep, is_abandoned, lost, upkeep},
        waiting_line::{Admission, OpenClaim, Stock, admit_last},
        zones::Subnet,
    },
};
use paddock_record::{IdleMessage, Instance, State};

use crate::{
    mutant::Mutant,
    protocol::Protocol,
    transitions::{NOW, SILENT, instance, tracked},
    world::*,
};

/// By `maxInstances`.
static POOLS: LazyLock<[Ec2Pool; MACHINES + 1]> = LazyLock::new(|| {
    std::array::from_fn(|max| {
        serde_json::from_value(serde_json::json!({
            "ami": { "id": "ami-1" }, "instanceProfile": "runner", "securityGroupIds": ["sg-1"], "subnetIds": ["subnet-1"],
            "agent": { "url": "https://example.com/agent", "sha256": "0" },
            "resourceClasses": [{ "name": "medium", "cpu": 2, "memoryMiB": 4096 }], "maxInstances": max,
            "github": { "owner": "acme", "credentialsRef": { "name": "github" } },
        }))
        .unwrap()
    })
});
static SPEC: LazyLock<RunnerClaimSpec> =
    LazyLock::new(|| serde_json::from_value(serde_json::json!({ "pool": "linux", "runId": "1" })).unwrap());
static OFFER: LazyLock<Offer> = LazyLock::new(|| {
    let subnet = Subnet { id: "subnet-1".into(), zone: "a".into(), free_addresses: 1 };
    Offer { subnets: vec![subnet], instance_types: None }
});
/// Why EC2 launches nothing: no retry helps.
static REFUSED: LazyLock<Cause> = LazyLock::new(|| Cause { code: "InvalidSubnet".into(), ..Cause::default() });
static ORDER: LazyLock<LaunchOrder> = LazyLock::new(|| {
    let order = serde_json::json!({
        "clientToken": "", "attempt": 1, "requested": 1, "usageClass": "on-demand", "orderedAt": NOW,
    });
    serde_json::from_value(order).unwrap()
});

/// The result of a claim's reconciliation.
pub enum Next {
    Nothing,
    /// Poll the queue.
    Receive,
    Write(Write),
}

pub fn only(id: usize) -> Ids {
    std::array::from_fn(|other| other == id)
}

/// The write of a change, if its guard holds. A machine whose agent has sent a signal has a key.
fn apply(world: &World, id: usize, seen: Option<Record>, change: Change) -> Option<Write> {
    change.of(id, seen, world.machines[id].signal.is_some()).map(|_| Write::Apply { id, seen, change })
}

/// The first phase of a termination; the second follows if the write succeeds.
fn end(world: &World, id: usize, seen: Record) -> Option<Write> {
    apply(world, id, Some(seen), Change::Terminate)
}

/// One step of `Work::return_all`.
fn give_back(world: &World, id: usize, seen: Record) -> Option<Write> {
    apply(world, id, Some(seen), Change::Release).or_else(|| end(world, id, seen))
}

impl Protocol {
    pub fn owner(&self, claim: usize) -> Owner {
        Owner { uid: claim, run: if self.again { 0 } else { claim } }
    }

    /// Whether the operator counts a machine as the claim's.
    fn serves(&self, record: &Instance, claim: usize) -> bool {
        let mut record = record.clone();
        if self.mutant == Mutant::OwnsByName {
            record.claim_uid.clear();
        }
        record.serves(self.owner(claim).claim_ref())
    }

    /// `Ledger::of_claim`, without what has ended.
    fn holds(&self, record: &Record, claim: usize) -> bool {
        record.is_live() && record.owner.is_some() && self.serves(&instance(0, record, Age::Fresh), claim)
    }

    /// A record of the model as the operator's type.
    fn tracked(&self, id: usize, record: &Record, machine: &Machine) -> Ec2Machine {
        let deaf = self.mutant == Mutant::IgnoresSilence;
        let mut machine = *machine;
        if self.mutant == Mutant::CountsOldSignals {
            machine.signal = machine.signal.map(|(signal, run, _)| (signal, run, record.claims));
        }
        tracked(id, record, &machine, if deaf { SignedDuration::ZERO } else { SILENT })
    }

    /// `Work::run`, up to the next write.
    pub fn claim(&self, world: &World, claim: usize) -> Next {
        let (memory, ledger) = (world.leader.claims[claim], world.leader.ledger);
        if memory.next.is_some() {
            return Next::Nothing;
        }
        // Even if the claim is gone by now: it was there when the candidate was received.
        if let Some(id) = memory.candidate {
            return Next::Write(self.claim_one(world, claim, id));
        }
        let Some(seen) = world.claims[claim] else { return Next::Nothing };
        let launched = (0..MACHINES).filter(|id| memory.fleet.is_some_and(|ids| ids[*id]));
        let launches = launched.filter_map(|id| apply(world, id, ledger[id], Change::Launch(self.owner(claim))));
        if let Some(write) = launches.into_iter().next() {
            return Next::Write(write);
        }
        let known = ledger.iter().enumerate().filter_map(|(id, record)| Some((id, (*record)?)));
        let held: Vec<_> = known.filter(|(_, record)| self.holds(record, claim)).collect();
        let status = |phase, order| Next::Write(Write::Status(claim, phase, order));
        // The answer to the order is in the leader's memory; the claim's status follows.
        let launched = memory.fleet.map(|ids| ids.into_iter().filter(|there| *there).count() as u32);
        let last = match (seen.order, launched) {
            (Order::Placed(count), Some(launched)) if launched >= count => {
                if !seen.deleting && seen.phase == Phase::Working {
                    return status(seen.phase, Order::Settled);
                }
                Applied::Done
            }
            (Order::Placed(_), Some(_)) => Applied::Short { launched: Vec::new(), causes: vec![REFUSED.clone()] },
            (Order::None | Order::Settled, _) | (_, None) => Applied::UnderWay,
        };
        let moved = |id: &str, change| {
            let (id, seen) = find(&held, id);
            apply(world, id, Some(seen), change).map_or(Next::Nothing, Next::Write)
        };
        let returned =
            |then: Next| held.first().and_then(|(id, seen)| give_back(world, *id, *seen)).map_or(then, Next::Write);
        let mut action = self.decide(world, claim, &held, &last, memory.exhausted);
        // A claim that waits is reconciled again, and looks at the pool again.
        if memory.exhausted && matches!(action, ClaimAction::Wait(_)) {
            action = self.decide(world, claim, &held, &last, false);
        }
        match action {
            ClaimAction::Return(_)
                if self.mutant == Mutant::HoldsWhileItWaits && held.len() <= self.counts[claim] as usize =>
            {
                Next::Nothing
            }
            ClaimAction::Select(_) => Next::Receive,
            ClaimAction::PlaceOrder(order) => status(seen.phase, Order::Placed(order.requested)),
            ClaimAction::SendOrder(order) => Next::Write(Write::Fleet(claim, order.requested)),
            ClaimAction::Seal(ids) => moved(&ids[0], Change::Seal),
            ClaimAction::Replace(failed) => moved(&failed[0].id, Change::Terminate),
            ClaimAction::Start(ids) => moved(&ids[0], Change::Start),
            ClaimAction::Serve => status(Phase::Ready, seen.order),
            ClaimAction::Watch if held.is_empty() => status(Phase::Over, seen.order),
            ClaimAction::Return(ids) => {
                let (id, seen) = find(&held, &ids[0]);
                give_back(world, id, seen).map_or(Next::Nothing, Next::Write)
            }
            ClaimAction::Finish(..) => returned(status(Phase::Over, seen.order)),
            ClaimAction::Settle | ClaimAction::Rerun(_) => returned(Next::Nothing),
            ClaimAction::Finalize => returned(Next::Write(Write::Finalize(claim))),
            ClaimAction::Nothing | ClaimAction::Wait(_) | ClaimAction::AwaitAgents | ClaimAction::Watch => {
                Next::Nothing
            }
            // The model's pools have no scope and no fallback, its AWS refuses nothing, and its deleted claims are marked as such.
            action @ (ClaimAction::FallBack { .. }
            | ClaimAction::LookUpOffer
            | ClaimAction::MakeRoom { .. }
            | ClaimAction::Abandon(_)
            | ClaimAction::Release(_)
            | ClaimAction::Dump(_)) => unreachable!("{action:?}"),
        }
    }

    fn pool_spec(&self) -> &'static Ec2Pool {
        &POOLS[self.max as usize]
    }

    /// `Ec2Context::admission`: claims are numbered by age.
    fn admission(&self, world: &World, claim: usize, exhausted: bool) -> Admission {
        let leader = &world.leader;
        let missing = |claim: usize| {
            let ordered = match world.claims[claim]?.order {
                Order::Placed(count) => count,
                Order::None | Order::Settled => 0,
            };
            let own = leader.ledger.iter().flatten().filter(|record| self.holds(record, claim));
            Some(self.counts[claim].saturating_sub(own.count() as u32).saturating_sub(ordered))
        };
        let is_open =
            |claim: usize| world.claims[claim].is_some_and(|claim| !claim.deleting && claim.phase == Phase::Working);
        let open = (0..=claim).filter(|claim| is_open(*claim));
        let line = open.filter_map(|claim| {
            let missing = missing(claim).filter(|missing| *missing > 0)?;
            Some(OpenClaim { name: claim.to_string(), needs: needs(), missing, since: NOW })
        });
        let line: Vec<_> = line.collect();
        if missing(claim).is_none_or(|missing| missing == 0) {
            return Ok(Vec::new());
        }
        let others = (0..CLAIMS).filter(|other| *other != claim).filter_map(|other| match world.claims[other]?.order {
            Order::Placed(count) => {
                let recorded = |id: usize| leader.ledger[id].is_some_and(|record| self.holds(&record, other));
                Some(count.saturating_sub((0..MACHINES).filter(|id| recorded(*id)).count() as u32))
            }
            Order::None | Order::Settled => None,
        });
        let live =
            leader.ledger.iter().flatten().filter(|record| record.is_live()).count() as u32 + others.sum::<u32>();
        let free = (0..MACHINES).filter(|id| self.is_claimable(world, *id));
        let idle: Vec<_> = free.filter_map(|id| self.machine(world, id)).collect();
        let idle = idle.iter().map(|machine| &machine.record).collect();
        let capacity = &CapacityMemory::new(Duration::ZERO);
        admit_last(
            &line,
            Stock { spec: self.pool_spec(), idle, exhausted, live, capacity, subnets: &OFFER.subnets },
            NOW,
        )
    }

    fn decide(
        &self,
        world: &World,
        claim: usize,
        held: &[(usize, Record)],
        last: &Applied,
        exhausted: bool,
    ) -> ClaimAction {
        let seen = world.claims[claim].expect("it is there");
        let mut machines: Vec<_> =
            held.iter().map(|(id, record)| self.tracked(*id, record, &world.machines[*id])).collect();
        if self.mutant == Mutant::KeepsSurplus {
            let spare = surplus(&machines, self.counts[claim], seen.phase == Phase::Ready);
            machines.retain(|tracked| !spare.contains(&tracked.record.instance_id));
        }
        let object = self.object(claim, seen);
        let (needs, template, capacity) = (needs(), LaunchTemplate::default(), CapacityMemory::new(Duration::ZERO));
        let admission = match self.mutant {
            Mutant::HoldsWhileItWaits if !exhausted => Ok(Vec::new()),
            _ => self.admission(world, claim, exhausted),
        };
        let facts = ClaimFacts {
            claim: &object,
            status: object.status.as_ref().expect("it has one"),
            pool: PoolView::Ready(Supply { spec: self.pool_spec(), needs, queue: "", template: &template }),
            machines: &machines,
            admission: &admission,
            capacity: &capacity,
            offer: Some(&OFFER),
            cluster: "model",
            pool_exhausted: exhausted,
            run_completed: false,
            reruns: false,
            last,
        };
        decide(&facts, NOW)
    }

    /// A claim of the model as the operator's type.
    fn object(&self, claim: usize, seen: Claim) -> RunnerClaim {
        let mut object = RunnerClaim::new("", SPEC.clone());
        object.spec.count = self.counts[claim];
        object.metadata.finalizers = Some(vec![FINALIZER.into()]);
        object.metadata.deletion_timestamp = seen.deleting.then_some(Time(NOW));
        let status = object.status.get_or_insert_default();
        status.phase = Some(match (seen.deleting, seen.phase) {
            (true, _) => ClaimPhase::Releasing,
            (false, Phase::Working) => ClaimPhase::Pending,
            (false, Phase::Ready) => ClaimPhase::Ready,
            (false, Phase::Over) => ClaimPhase::Failed,
        });
        let order = |requested, instance_ids| LaunchOrder { requested, instance_ids, ..ORDER.clone() };
        status.fleet = match seen.order {
            Order::None => None,
            Order::Placed(count) => Some(order(count, Vec::new()).into()),
            Order::Settled => Some(order(self.counts[claim], vec!["launched".into()]).into()),
        };
        object
    }

    /// `upkeep::keep_up`: all possible next writes.
    pub fn pool(&self, world: &World) -> Vec<Write> {
        let leader = &world.leader;
        let mut writes = Vec::new();
        for (id, machine) in world.machines.iter().enumerate().filter(|_| leader.pool.is_none()) {
            let entering = leader.claims.iter().any(|memory| memory.fleet.is_some_and(|ids| ids[id]));
            let known = leader.ledger[id];
            let known_as = known.map(|seen| (seen, self.tracked(id, &seen, machine)));
            let exists = |record: &Instance| (0..CLAIMS).any(|c| world.claims[c].is_some() && self.serves(record, c));
            let keep_up =
                |(seen, tracked): &(Record, Ec2Machine)| match upkeep(tracked, self.pool_spec(), self.keep_warm, NOW) {
                    Upkeep::Leave if is_abandoned(&tracked.record, exists) && self.mutant != Mutant::NeverReclaims => {
                        give_back(world, id, *seen)
                    }
                    Upkeep::Leave => None,
                    Upkeep::Warm => {
                        let up = apply(world, id, known, Change::WarmUp);
                        up.or_else(|| apply(world, id, known, Change::MakeIdle))
                    }
                    Upkeep::Pool => Some(Write::SendMessages(only(id), Some(*seen))),
                    Upkeep::Renew => apply(world, id, known, Change::Renew),
                    Upkeep::End(..) => end(world, id, *seen),
                };
            writes.extend(known_as.as_ref().and_then(keep_up));
            let state = (machine.ec2 != Ec2::Absent).then_some(Ec2State {
                gone: machine.ec2 == Ec2::Gone,
                reclaimed: false,
                reason: "",
            });
            let is_lost = known_as.is_some_and(|(_, tracked)| lost(&tracked, state, true).is_some());
            writes.extend(match (machine.ec2, known) {
                // `registrations::check`: GitHub has no runner of a terminated machine.
                (Ec2::Gone, Some(seen)) if !seen.is_live() => apply(world, id, known, Change::RunnerGone),
                _ if self.mutant == Mutant::NeverSweeps => None,
                (Ec2::Running, None) if !entering => Some(Write::Terminate(id)),
                (Ec2::Running, Some(seen)) if !seen.is_live() => Some(Write::Terminate(id)),
                (_, Some(seen)) if is_lost => end(world, id, seen),
                _ => None,
            });
        }
        writes.extend(self.restore(world).filter(|_| leader.pool.is_none()));
        writes
    }

    /// `upkeep::restore_offers` and `offer_missing`: all idle machines if messages are missing, and those for
    /// which this leader never sent one.
    fn restore(&self, world: &World) -> Option<Write> {
        let free = world.leader.ledger.map(|record| record.is_some_and(|record| record.is_free()));
        let holds = |memory: &&ClaimMemory| memory.candidate.is_some() && memory.message && !self.deletes_first();
        let received = world.leader.claims.iter().filter(holds).count();
        let stored = world.shown.iter().chain(&world.hidden).sum::<u8>() as usize + received;
        let missing = stored < free.iter().filter(|free| **free).count();
        let ids = std::array::from_fn(|id| match self.mutant {
            Mutant::NeverRestores | Mutant::DeletesFirst => false,
            Mutant::RestoresByCount => free[id] && missing,
            _ => free[id] && (missing || !world.leader.announced[id]),
        });
        ids.contains(&true).then_some(Write::SendMessages(ids, None))
    }

    /// `Work::claim_all`, before its write.
    fn claim_one(&self, world: &World, claim: usize, id: usize) -> Write {
        let seen = world.leader.ledger[id].filter(|_| world.machines[id].age != Age::Expired);
        let seen = seen.map(|seen| self.without_leaving(seen));
        apply(world, id, seen, Change::Claim(self.owner(claim))).unwrap_or(Write::PutBack(claim))
    }

    /// The record as `IgnoresLeaving` sees it.
    fn without_leaving(&self, seen: Record) -> Record {
        if self.mutant == Mutant::IgnoresLeaving { Record { leaving: None, ..seen } } else { seen }
    }

    /// A machine in the leader's ledger.
    fn machine(&self, world: &World, id: usize) -> Option<Ec2Machine> {
        let seen = world.leader.ledger[id].map(|seen| self.without_leaving(seen))?;
        Some(self.tracked(id, &seen, &world.machines[id]))
    }

    fn is_claimable(&self, world: &World, id: usize) -> bool {
        self.machine(world, id).is_some_and(|machine| machine.is_claimable(NOW))
    }

    /// `IdleQueue::sort_out`: the decision about a received message.
    pub fn pickup(&self, world: &World, id: usize) -> Pickup {
        let machine = self.machine(world, id);
        let known = |message: &IdleMessage| match Availability::of(machine.as_ref(), message, NOW) {
            Availability::Free if is_candidate(world, id) => Availability::Busy,
            known => known,
        };
        // What it says is as valid as the record.
        let record =
            world.leader.ledger[id].map_or(Record::new(State::Idle), |seen| Record { state: State::Idle, ..seen });
        let body = self.tracked(id, &record, &world.machines[id]).idle_message().write();
        pick(&[body], &mut [(needs(), 1)], known, NOW).swap_remove(0)
    }

    /// `IdleQueue::last_resort`, after enough empty polls: a machine that is free in the ledger, or none. Undecided
    /// while another claim is trying to claim a fitting machine.
    pub fn last_resort(&self, world: &World) -> Option<Option<usize>> {
        let mut exhaustion = Exhaustion::default();
        (0..EMPTY_POLLS).for_each(|_| exhaustion.note(0, []));
        assert!(exhaustion.is_exhausted());
        let fitting: Vec<_> = (0..MACHINES).filter(|id| self.is_claimable(world, *id)).collect();
        match fitting.iter().find(|id| !is_candidate(world, **id)) {
            Some(id) => Some(Some(*id)),
            None => fitting.is_empty().then_some(None),
        }
    }
}

fn needs() -> Requirements {
    Requirements {
        usage_class: UsageClass::OnDemand,
        resource_class: "medium".into(),
        cpu: 0,
        memory_mib: 0,
        allowed_instance_types: vec!["*".into()],
        scope: String::new(),
    }
}

fn is_candidate(world: &World, id: usize) -> bool {
    world.leader.claims.iter().any(|memory| memory.candidate == Some(id))
}

fn find(held: &[(usize, Record)], id: &str) -> (usize, Record) {
    *held.iter().find(|(held, _)| held.to_string() == id).expect("it is held")
}
