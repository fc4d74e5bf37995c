//! Converts the model's records to the operator's, and changes them with the operator's own functions.

use std::sync::LazyLock;

use aws_sdk_dynamodb::types::AttributeValue;
use jiff::{SignedDuration, Timestamp};
use paddock_core::ec2::machine::{AgentReport, Machine as Ec2Machine};
use paddock_record::{
    ClaimRef, Heartbeat, Identity, Instance, KeyPair, PublicKey, Signal, Transition, WorkerSignal, attribute,
    instance_key, transition,
};

use crate::world::*;

pub const NOW: Timestamp = Timestamp::UNIX_EPOCH;
const SECOND: SignedDuration = SignedDuration::from_secs(1);
const MINUTE: SignedDuration = SignedDuration::from_mins(1);

/// Longer than `timeouts.heartbeat`.
pub const SILENT: SignedDuration = SignedDuration::from_mins(10);

/// The key of every agent.
static KEY: LazyLock<PublicKey> = LazyLock::new(|| KeyPair::from_bytes([1; 32]).public());
static INSTANCE: LazyLock<Instance> = LazyLock::new(|| {
    let mut item = instance_key("");
    let texts = [
        (attribute::STATE, "terminated"),
        (attribute::RESOURCE_CLASS, "medium"),
        (attribute::USAGE_CLASS, "on-demand"),
    ];
    item.extend(texts.map(|(name, text)| (name.to_owned(), AttributeValue::S(text.to_owned()))));
    Instance::from_item(&item)
});

/// Uids, names and ids of runs.
const NUMBERS: [&str; CLAIMS] = ["0", "1"];

fn run_id(run: Option<usize>) -> &'static str {
    run.map_or("", |run| NUMBERS[run])
}

impl Owner {
    pub fn claim_ref(self) -> ClaimRef<'static> {
        ClaimRef { name: NUMBERS[self.run], uid: NUMBERS[self.uid], run: NUMBERS[self.run] }
    }
}

/// A record of the model as it is stored. Its last update is before `NOW`, so that a transition is detectable.
pub fn instance(id: usize, record: &Record, age: Age) -> Instance {
    let (since, left) = match age {
        Age::Fresh => (SECOND, MINUTE * 5),
        Age::Late => (MINUTE * 6, MINUTE),
        Age::Expired => (MINUTE * 60, SignedDuration::ZERO),
    };
    let mut instance = INSTANCE.clone();
    instance.instance_id = id.to_string();
    instance.state = record.state;
    if let Some(claim) = record.owner.map(Owner::claim_ref) {
        (instance.claim, instance.claim_uid) = (claim.name.to_owned(), claim.uid.to_owned());
        claim.run.clone_into(&mut instance.run_id);
    }
    instance.leaving = run_id(record.leaving).to_owned();
    instance.claims = record.claims.into();
    instance.sealed = if record.sealed { "sealed".into() } else { String::new() };
    instance.threshold = record.is_live().then(|| NOW + left);
    instance.updated_at = NOW - since;
    instance
}

/// With its agent's report. A dead machine is past every timeout, and has been silent for this long.
pub fn tracked(id: usize, record: &Record, machine: &Machine, silent: SignedDuration) -> Ec2Machine {
    let beat = Heartbeat::new("", Some(KEY.clone()), NOW);
    let signal = |(signal, run, claims): (Signal, Option<usize>, u8)| {
        WorkerSignal::new("", signal, run_id(run), claims.into(), NOW)
    };
    let report = AgentReport { heartbeat: machine.signal.map(|_| beat), signal: machine.signal.map(signal) };
    let age = if machine.dead && machine.age == Age::Fresh { Age::Late } else { machine.age };
    let tracked = Ec2Machine::new(instance(id, record, age), report, NOW);
    if machine.dead { Ec2Machine { silent, ..tracked } } else { tracked }
}

impl From<&Instance> for Record {
    fn from(instance: &Instance) -> Self {
        let number = |id: &str| NUMBERS.iter().position(|number| *number == id);
        let owner = |run| Some(Owner { uid: number(&instance.claim_uid)?, run });
        Self {
            state: instance.state,
            owner: number(&instance.run_id).and_then(owner),
            leaving: number(&instance.leaving),
            sealed: !instance.sealed.is_empty(),
            claims: (instance.claims % CLAIMS_COUNTED) as u8,
        }
    }
}

impl Change {
    /// Applies the transition to the record as seen, with or without a key to seal a token to.
    pub fn of(self, id: usize, seen: Option<Record>, has_key: bool) -> Option<Transition> {
        let (key, sealed) = (has_key.then(|| &*KEY), || has_key.then(|| "sealed".to_owned()));
        let threshold = NOW + MINUTE * 5;
        let seen = seen.map(|seen| instance(id, &seen, Age::Fresh));
        if let Self::Launch(owner) = self {
            return transition::launch(seen.as_ref(), identity(id), Some(owner.claim_ref()), "", threshold, NOW);
        }
        let seen = &seen?;
        match self {
            Self::Launch(_) => None,
            Self::Claim(owner) => transition::claim(seen, owner.claim_ref(), "", "", sealed(), threshold, NOW),
            Self::Seal => transition::seal(seen, key, sealed()),
            Self::Start => transition::start(seen, threshold, NOW),
            Self::Release => transition::release(seen, sealed(), threshold, NOW),
            Self::WarmUp => transition::warm_up(seen, key, threshold, NOW),
            Self::MakeIdle => transition::make_idle(seen, threshold, NOW),
            Self::Renew => transition::renew(seen, threshold, NOW),
            Self::Pool => transition::pool(seen),
            Self::Terminate => transition::terminate(seen, "", "", "", NOW),
            Self::RunnerGone => transition::runner_gone(seen),
        }
    }
}

fn identity(id: usize) -> Identity {
    Identity {
        instance_id: id.to_string(),
        pool: INSTANCE.pool.clone(),
        resource_class: INSTANCE.resource_class.clone(),
        instance_type: INSTANCE.instance_type.clone(),
        usage_class: INSTANCE.usage_class.clone(),
        zone: INSTANCE.zone.clone(),
        cpu: INSTANCE.cpu,
        mem: INSTANCE.mem,
        github_url: INSTANCE.github_url.clone(),
        runner_group: INSTANCE.runner_group.clone(),
        template: INSTANCE.template.clone(),
        image: INSTANCE.image.clone(),
    }
}
