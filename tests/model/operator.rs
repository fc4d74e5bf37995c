//! What the leader does next: the operator's own decisions from `paddock::plan`, and around them what `src/controllers`
//! makes of these, one write at a time.

use std::sync::LazyLock;

use aws_sdk_dynamodb::types::AttributeValue;
use jiff::{SignedDuration, Timestamp};
use paddock::{
    api::{Ec2Pool, UsageClass},
    plan::{
        claim::{Step, View, step, surplus},
        instance::{Tracked, Upkeep, Vitals, upkeep},
        pickup::{EMPTY_POLLS, Exhaustion, Known, Needs, Pickup, pick},
    },
};
use paddock_record::{
    Heartbeat, IdleMessage, Instance, KeyPair, PublicKey, State, WorkerSignal, attribute, entity, key,
};

use crate::{
    protocol::{Mutant, Protocol},
    world::*,
};

const NOW: Timestamp = Timestamp::UNIX_EPOCH;
const MINUTE: SignedDuration = SignedDuration::from_mins(1);

static POOL: LazyLock<Ec2Pool> = LazyLock::new(|| {
    serde_json::from_value(serde_json::json!({
        "amiId": "ami-1", "instanceProfile": "runner", "securityGroupIds": ["sg-1"], "subnetIds": ["subnet-1"],
        "runnerVersion": "2.330.0", "agent": { "url": "https://example.com/agent", "sha256": "0" },
        "resourceClasses": [{ "name": "medium", "cpu": 2, "memoryMiB": 4096 }],
        "github": { "owner": "acme", "credentialsRef": { "name": "github" } },
    }))
    .unwrap()
});
static KEY: LazyLock<PublicKey> = LazyLock::new(|| KeyPair::generate().public());
static INSTANCE: LazyLock<Instance> = LazyLock::new(|| {
    let mut item = key(entity::INSTANCE, "");
    let texts = [
        (attribute::STATE, "terminated"),
        (attribute::RESOURCE_CLASS, "medium"),
        (attribute::USAGE_CLASS, "on-demand"),
    ];
    item.extend(texts.map(|(name, text)| (name.to_owned(), AttributeValue::S(text.to_owned()))));
    Instance::from_item(&item).unwrap()
});

/// A record of the model, spelled out as the operator reads it.
fn tracked(id: usize, record: &Record, machine: &Machine) -> Tracked {
    let text = |run: Option<usize>| run.map(|run| run.to_string()).unwrap_or_default();
    let (since, left) = match machine.age {
        Age::Fresh => (SignedDuration::ZERO, MINUTE * 5),
        Age::Late => (MINUTE * 6, MINUTE),
        Age::Expired => (MINUTE * 60, SignedDuration::ZERO),
    };
    let beat = Heartbeat { instance_id: String::new(), updated_at: NOW, public_key: Some(KEY.clone()) };
    let spoken = |(signal, run)| WorkerSignal::new("", signal, &text(run), NOW);
    Tracked {
        vitals: Vitals { heartbeat: machine.said.map(|_| beat), signal: machine.said.map(spoken) },
        read_at: NOW,
        record: Instance {
            instance_id: id.to_string(),
            state: record.state,
            run_id: text(record.run),
            leaving: text(record.leaving),
            sealed: if record.sealed { "sealed".into() } else { String::new() },
            threshold: record.is_live().then(|| NOW + left),
            updated_at: NOW - since,
            ..INSTANCE.clone()
        },
    }
}

/// What a claim's reconciliation comes to.
pub enum Next {
    Nothing,
    /// Ask the pool.
    Receive,
    Write(Write),
}

pub fn only(id: usize) -> Ids {
    std::array::from_fn(|other| other == id)
}

const fn advance(id: usize, seen: Record, next: Record) -> Write {
    Write::Advance { id, seen, next, fresh: true }
}

/// The first phase of an end; the second follows when it is won.
const fn end(id: usize, seen: Record) -> Write {
    advance(id, seen, Record::new(State::Terminated, None))
}

/// One turn of `Work::give_all_back`.
fn give_back(id: usize, seen: Record) -> Write {
    match seen.state {
        State::Running | State::Claimed => {
            advance(id, seen, Record { leaving: seen.run, sealed: true, ..Record::new(State::Idle, None) })
        }
        State::Created | State::Idle | State::Terminated => end(id, seen),
    }
}

impl Protocol {
    /// `Work::provision` or `Work::release`, up to the next write.
    pub fn claim(&self, world: &World, claim: usize) -> Next {
        let (mind, ledger) = (world.leader.claims[claim], world.leader.ledger);
        let Some(seen) = world.claims[claim].filter(|_| mind.next.is_none()) else { return Next::Nothing };
        if let Some(id) = mind.hand {
            return Next::Write(self.claim_one(world, claim, id));
        }
        if let Some(id) = (0..MACHINES).find(|id| mind.fleet.is_some_and(|ids| ids[*id]) && ledger[*id].is_none()) {
            return Next::Write(Write::Enter(id, claim));
        }
        let known = ledger.iter().enumerate().filter_map(|(id, record)| Some((id, (*record)?)));
        let held: Vec<_> = known.filter(|(_, record)| record.is_live() && record.run == Some(claim)).collect();
        let status = |phase, order| Next::Write(Write::Status(claim, phase, order));
        let given_back = held.first().map(|(id, seen)| Next::Write(give_back(*id, *seen)));
        match (seen.deleting, seen.phase) {
            (true, _) => given_back.unwrap_or(Next::Write(Write::Finalize(claim))),
            (false, Phase::Over) => given_back.unwrap_or(Next::Nothing),
            (false, Phase::Ready) if held.is_empty() => status(Phase::Over, seen.order),
            (false, Phase::Ready) => self.surplus(world, claim, &held, true).unwrap_or(Next::Nothing),
            (false, Phase::Working) => {
                let fail = || given_back.unwrap_or_else(|| status(Phase::Over, seen.order));
                let launched = mind.fleet.map(|ids| ids.into_iter().filter(|there| *there).count() as u32);
                match (seen.order, launched) {
                    (Order::Placed(count), None) => return Next::Write(Write::Fleet(claim, count)),
                    (Order::Placed(count), Some(launched)) if launched < count => return fail(),
                    (Order::Placed(_), Some(_)) => return status(seen.phase, Order::Settled),
                    (Order::None | Order::Settled, _) => {}
                }
                let surplus = self.surplus(world, claim, &held, false);
                surplus.unwrap_or_else(|| match self.step(world, claim, &held, seen.order == Order::Settled) {
                    Step::Select(_) => Next::Receive,
                    Step::Create(count) => status(seen.phase, Order::Placed(count)),
                    Step::Validate { tokens, failed } => match (tokens.first(), failed.first()) {
                        (Some(id), _) => {
                            let (id, seen) = find(&held, id);
                            Next::Write(Write::Advance {
                                id,
                                seen,
                                next: Record { sealed: true, ..seen },
                                fresh: false,
                            })
                        }
                        (None, Some((id, ..))) => Next::Write(end(find(&held, id).0, find(&held, id).1)),
                        (None, None) => Next::Nothing,
                    },
                    Step::Start(ids) => {
                        let (id, seen) = find(&held, &ids[0]);
                        Next::Write(advance(id, seen, Record::new(State::Running, seen.run)))
                    }
                    Step::Serve => status(Phase::Ready, seen.order),
                    Step::Fail(..) => fail(),
                })
            }
        }
    }

    fn step(&self, world: &World, claim: usize, held: &[(usize, Record)], fleet_settled: bool) -> Step {
        let held: Vec<_> = held.iter().map(|(id, record)| tracked(*id, record, &world.machines[*id])).collect();
        let pool_exhausted = world.leader.claims[claim].exhausted;
        step(&View { count: self.counts[claim], held: &held, pool_exhausted, fleet_settled }, &POOL, NOW)
    }

    /// `Work::let_go`, one at a time.
    fn surplus(&self, world: &World, claim: usize, held: &[(usize, Record)], ready: bool) -> Option<Next> {
        let known: Vec<_> = held.iter().map(|(id, record)| tracked(*id, record, &world.machines[*id])).collect();
        let spare = surplus(&known, self.counts[claim], ready);
        let (id, seen) = find(held, spare.first().filter(|_| self.mutant != Mutant::KeepsSurplus)?);
        Some(Next::Write(give_back(id, seen)))
    }

    /// `upkeep::keep_up`: every write that may come next.
    pub fn pool(&self, world: &World) -> Vec<Write> {
        let leader = &world.leader;
        let mut writes = Vec::new();
        for (id, machine) in world.machines.iter().enumerate().filter(|_| leader.pool.is_none()) {
            let entering = leader.claims.iter().any(|mind| mind.fleet.is_some_and(|ids| ids[id]));
            let known = leader.ledger[id];
            let kept = known.map(|seen| (seen, upkeep(&tracked(id, &seen, machine), &POOL, self.keep_warm, NOW)));
            writes.extend(kept.and_then(|(seen, upkeep)| match upkeep {
                Upkeep::Leave => None,
                Upkeep::Warm if seen.state == State::Created => {
                    Some(advance(id, seen, Record { state: State::Running, ..seen }))
                }
                Upkeep::Warm => Some(advance(id, seen, Record { state: State::Idle, ..seen })),
                Upkeep::Offer => Some(Write::Offer(only(id), Some(seen))),
                Upkeep::Renew => Some(advance(id, seen, seen)),
                Upkeep::End(..) => Some(end(id, seen)),
            }));
            writes.extend(match (machine.ec2, known) {
                (Ec2::Running, None) if !entering && self.mutant != Mutant::NeverSweeps => Some(Write::Terminate(id)),
                (Ec2::Running, Some(seen)) if !seen.is_live() => Some(Write::Terminate(id)),
                (Ec2::Gone, Some(seen)) if seen.is_live() => Some(end(id, seen)),
                _ => None,
            });
        }
        writes.extend(self.restore(world).filter(|_| leader.pool.is_none()));
        writes
    }

    /// `upkeep::restore_offers` and `offer_missing`: all that are idle where messages are missing, and those that this
    /// leader never offered.
    fn restore(&self, world: &World) -> Option<Write> {
        let free = world.leader.ledger.map(|record| record.is_some_and(|record| record.is_free()));
        let holds = |mind: &&Mind| mind.hand.is_some() && mind.message && !self.deletes_first();
        let in_hand = world.leader.claims.iter().filter(holds).count();
        let stored = world.shown.iter().chain(&world.hidden).sum::<u8>() as usize + in_hand;
        let missing = stored < free.iter().filter(|free| **free).count();
        let ids = std::array::from_fn(|id| match self.mutant {
            Mutant::NeverRestores | Mutant::DeletesFirst => false,
            Mutant::RestoresByCount => free[id] && missing,
            _ => free[id] && (missing || !world.leader.offered[id]),
        });
        ids.contains(&true).then_some(Write::Offer(ids, None))
    }

    /// `Work::claim_all`, before its write.
    fn claim_one(&self, world: &World, claim: usize, id: usize) -> Write {
        match world.leader.ledger[id] {
            Some(seen) if self.is_claimable(world, id) => {
                advance(id, seen, Record { state: State::Claimed, run: Some(claim), sealed: true, ..seen })
            }
            _ => Write::PutBack(claim),
        }
    }

    fn is_claimable(&self, world: &World, id: usize) -> bool {
        let whatever = self.mutant == Mutant::IgnoresLeaving;
        world.leader.ledger[id].is_some_and(|seen| {
            let seen = if whatever { Record { leaving: None, ..seen } } else { seen };
            tracked(id, &seen, &world.machines[id]).is_claimable(NOW)
        })
    }

    /// `Pickups::sort_out`: what becomes of a message that is shown.
    pub fn pickup(&self, world: &World, id: usize) -> Pickup {
        let known = |_: &IdleMessage| match world.leader.ledger[id] {
            None => Known::Foreign,
            Some(seen) if seen.state != State::Idle => Known::Taken,
            Some(_) if in_hand(world, id) || !self.is_claimable(world, id) => Known::Busy,
            Some(_) => Known::Free,
        };
        let needs = Needs {
            usage_class: UsageClass::OnDemand,
            resource_class: "medium".into(),
            cpu: 0,
            memory_mib: 0,
            allowed_instance_types: vec!["*".into()],
        };
        let body = tracked(id, &Record::new(State::Idle, None), &world.machines[id]).idle_message().write();
        pick(&[body], &mut [(needs, 1)], known, NOW).swap_remove(0)
    }

    /// `Pickups::last_resort`, when the queue has shown nothing often enough: a machine that the ledger knows to be free,
    /// or none at all; nothing is decided while somebody has one in hand.
    pub fn last_resort(&self, world: &World) -> Option<Option<usize>> {
        let mut exhaustion = Exhaustion::default();
        (0..EMPTY_POLLS).for_each(|_| exhaustion.note(0, []));
        assert!(exhaustion.is_exhausted());
        let fitting: Vec<_> = (0..MACHINES).filter(|id| self.is_claimable(world, *id)).collect();
        match fitting.iter().find(|id| !in_hand(world, **id)) {
            Some(id) => Some(Some(*id)),
            None => fitting.is_empty().then_some(None),
        }
    }
}

fn in_hand(world: &World, id: usize) -> bool {
    world.leader.claims.iter().any(|mind| mind.hand == Some(id))
}

fn find(held: &[(usize, Record)], id: &str) -> (usize, Record) {
    *held.iter().find(|(held, _)| held.to_string() == id).expect("it is held")
}
