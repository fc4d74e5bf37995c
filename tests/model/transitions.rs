//! Converts the model's records to the operator's, and changes them with the operator's own functions.

use std::sync::LazyLock;

use aws_sdk_dynamodb::types::AttributeValue;
use jiff::{SignedDuration, Timestamp};
use paddock_record::{
    ClaimRef, Identity, Instance, KeyPair, PublicKey, Transition, attribute, instance_key, transition,
};

use crate::world::*;

pub const NOW: Timestamp = Timestamp::UNIX_EPOCH;
const SECOND: SignedDuration = SignedDuration::from_secs(1);
const MINUTE: SignedDuration = SignedDuration::from_mins(1);

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

/// The key of every agent.
pub static KEY: LazyLock<PublicKey> = LazyLock::new(|| KeyPair::from_bytes([1; 32]).public());

/// The id of a run, by the number of its claim.
pub fn run_id(run: Option<usize>) -> String {
    run.map(|run| run.to_string()).unwrap_or_default()
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
    instance.run_id = run_id(record.run);
    instance.claim_uid = run_id(record.run);
    instance.leaving = run_id(record.leaving);
    instance.claims = record.claims.into();
    instance.sealed = if record.sealed { "sealed".into() } else { String::new() };
    instance.threshold = record.is_live().then(|| NOW + left);
    instance.updated_at = NOW - since;
    instance
}

impl From<&Instance> for Record {
    fn from(instance: &Instance) -> Self {
        let run = |id: &str| (!id.is_empty()).then(|| id.parse().expect("the number of a claim"));
        Self {
            state: instance.state,
            run: run(&instance.run_id),
            leaving: run(&instance.leaving),
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
        let run = match self {
            Self::Launch(claim) | Self::Claim(claim) => run_id(Some(claim)),
            _ => String::new(),
        };
        let claim = ClaimRef { name: &run, uid: &run, run: &run };
        if let Self::Launch(_) = self {
            return transition::launch(seen.as_ref(), identity(id), Some(claim), "", threshold, NOW);
        }
        let seen = &seen?;
        match self {
            Self::Launch(_) => None,
            Self::Claim(_) => transition::claim(seen, claim, "", sealed(), threshold, NOW),
            Self::Seal => transition::seal(seen, key, sealed()),
            Self::Start => transition::start(seen, threshold, NOW),
            Self::Release => transition::release(seen, sealed(), threshold, NOW),
            Self::WarmUp => transition::warm_up(seen, key, threshold, NOW),
            Self::MakeIdle => transition::make_idle(seen, threshold, NOW),
            Self::Renew => transition::renew(seen, threshold, NOW),
            Self::Pool => transition::pool(seen),
            Self::Terminate => transition::terminate(seen, "", "", NOW),
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
    }
}
