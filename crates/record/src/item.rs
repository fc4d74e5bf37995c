use std::collections::HashMap;

use aws_sdk_dynamodb::types::AttributeValue;
use jiff::Timestamp;

use crate::{ClaimRef, MachineArns, PublicKey, Signal, State, entity, instance_key, instant, report_key, stamp};

type Item = HashMap<String, AttributeValue>;

/// Attribute names.
pub mod attribute {
    pub const PK: &str = "PK";
    pub const SK: &str = "SK";
    pub const INSTANCE_ID: &str = "instanceId";
    pub const STATE: &str = "state";
    pub const RUN_ID: &str = "runId";
    pub const THRESHOLD: &str = "threshold";
    pub const UPDATED_AT: &str = "updatedAt";
    pub const VALUE: &str = "value";
    pub const SIGNAL: &str = "signal";
    pub const REASON: &str = "reason";
    pub const DETAIL: &str = "detail";
    pub const PUBLIC_KEY: &str = "publicKey";
    pub const RECLAIMED: &str = "reclaimed";
    pub const RESOURCE_CLASS: &str = "resourceClass";
    pub const INSTANCE_TYPE: &str = "instanceType";
    pub const USAGE_CLASS: &str = "usageClass";
    pub const POOL: &str = "pool";
    pub const CLAIM: &str = "claim";
    pub const CLAIM_UID: &str = "claimUid";
    pub const ZONE: &str = "zone";
    pub const CPU: &str = "cpu";
    pub const MEM: &str = "mem";
    pub const SEALED: &str = "sealed";
    pub const LEAVING: &str = "leaving";
    pub const CLAIMS: &str = "claims";
    pub const SCOPE: &str = "scope";
    pub const TEMPLATE: &str = "template";
    pub const IMAGE: &str = "image";
    pub const RUNNER_GROUP: &str = "runnerGroup";
    pub const FAILURE_REASON: &str = "failureReason";
    pub const FAILURE_MESSAGE: &str = "failureMessage";
    pub const INITIAL_RUN_ID: &str = "initialRunId";
    pub const GITHUB_URL: &str = "githubUrl";
}
use attribute as a;

/// What is read of an agent's item. It may have other attributes, of any length.
pub const REPORT_ATTRIBUTES: [&str; 6] = [a::PK, a::SK, a::VALUE, a::UPDATED_AT, a::PUBLIC_KEY, a::RECLAIMED];

/// The most that an agent's item may have in these attributes. An agent writes less than 2 KB; DynamoDB takes 400 KB.
const REPORT_SIZE_MAX: usize = 8 * 1024;

/// How much of each text of an agent's item is kept.
const REPORT_TEXT_MAX: usize = 4 * 1024;

/// How much of an invalid attribute its error shows.
const FOUND_MAX: usize = 100;

/// Whether an item is larger than any that an agent writes.
pub fn is_oversized(item: &Item) -> bool {
    item.iter().map(|(name, value)| name.len() + size(value)).sum::<usize>() > REPORT_SIZE_MAX
}

/// Roughly as DynamoDB counts it.
fn size(value: &AttributeValue) -> usize {
    match value {
        AttributeValue::S(text) | AttributeValue::N(text) => text.len(),
        AttributeValue::B(bytes) => bytes.as_ref().len(),
        AttributeValue::Ss(texts) | AttributeValue::Ns(texts) => texts.iter().map(String::len).sum(),
        AttributeValue::Bs(list) => list.iter().map(|bytes| bytes.as_ref().len()).sum(),
        AttributeValue::L(list) => list.iter().map(|value| 1 + size(value)).sum(),
        AttributeValue::M(map) => map.iter().map(|(name, value)| 1 + name.len() + size(value)).sum(),
        // Null, Boolean, and kinds that the SDK does not know.
        _ => 1,
    }
}

/// A record with a missing or invalid attribute.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("attribute {attribute} of {id} is {found}")]
pub struct ItemError {
    pub id: String,
    pub attribute: &'static str,
    pub found: String,
}

/// The operator's record of one instance. Other crates get it from the table or from a transition.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Instance {
    pub instance_id: String,
    pub state: State,
    /// The run that owns the instance; empty if none does.
    pub run_id: String,
    /// When the instance's time in this state expires; none once it is terminated, or if it cannot be read.
    pub threshold: Option<Timestamp>,
    pub updated_at: Timestamp,
    /// `namespace/name` of the RunnerPool.
    pub pool: String,
    /// Name of the RunnerClaim, in the pool's namespace; empty if none holds the instance.
    pub claim: String,
    /// Uid of that claim: another claim of the same name does not own the instance.
    pub claim_uid: String,
    pub resource_class: String,
    pub instance_type: String,
    /// `on-demand` or `spot`.
    pub usage_class: String,
    pub zone: String,
    pub cpu: u32,
    /// Memory in MiB.
    pub mem: u32,
    /// Where the runner registers, such as `https://github.com/acme`.
    pub github_url: String,
    /// The runner group that the runner joins; empty: the default one.
    pub runner_group: String,
    /// What the instance was made from: the digest of the launch template, and the image. Empty in records of earlier versions.
    pub template: String,
    pub image: String,
    /// The current run's registration or removal token, sealed to the instance's public key.
    pub sealed: String,
    /// The key of its agent, once a token was sealed to it or the instance was pooled. It never changes: the agent keeps
    /// its key on disk, so that another one comes from another program on the machine.
    pub public_key: Option<PublicKey>,
    /// The run that the instance must deregister from before it can be claimed again; usually empty.
    pub leaving: String,
    /// The run it was created for; empty if it was created as a warm instance.
    pub initial_run_id: String,
    /// How many claims it has been assigned to.
    pub claims: u32,
    /// Whose claims it may serve after its last one; empty if it has served none, or one that leaves that open.
    pub scope: String,
    /// Why it was terminated, as a reason and as a message; empty before that.
    pub failure_reason: String,
    pub failure_message: String,
}

/// The agent's heartbeat, with its public key and what it knows of the machine's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heartbeat {
    pub instance_id: String,
    pub updated_at: Timestamp,
    pub public_key: Option<PublicKey>,
    /// EC2 has announced that it takes the spot machine back. An earlier version does not write it.
    pub reclaimed: bool,
}

/// The agent's last result, and the run it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerSignal {
    pub instance_id: String,
    pub signal: Signal,
    pub run_id: String,
    /// The record's [`Instance::claims`] as the agent had read it: a restarted run has the same id, and clocks differ. None
    /// if an earlier version wrote it.
    pub claims: Option<u32>,
    /// By the agent's clock.
    pub updated_at: Timestamp,
    /// What failed, if the signal does not show it, such as [`SCRUB`]; otherwise empty.
    pub reason: String,
    /// The error message of a failure; otherwise empty.
    pub detail: String,
}

/// The reason if the machine could not be scrubbed after its run.
pub const SCRUB: &str = "scrub";

impl Instance {
    /// Whether it is, or was last, in the service of this claim. A record without a uid is of an earlier version; there
    /// the run tells claims of one name apart.
    pub fn serves(&self, claim: ClaimRef) -> bool {
        let same = match self.claim_uid.as_str() {
            "" => self.run_id == claim.run,
            uid => uid == claim.uid,
        };
        self.claim == claim.name && same
    }

    pub fn to_item(&self) -> Item {
        let mut item = instance_key(&self.instance_id);
        let texts = [
            (a::INSTANCE_ID, self.instance_id.clone()),
            (a::STATE, self.state.to_string()),
            (a::RUN_ID, self.run_id.clone()),
            (a::THRESHOLD, self.threshold.map(stamp).unwrap_or_default()),
            (a::UPDATED_AT, stamp(self.updated_at)),
            (a::POOL, self.pool.clone()),
            (a::CLAIM, self.claim.clone()),
            (a::CLAIM_UID, self.claim_uid.clone()),
            (a::RESOURCE_CLASS, self.resource_class.clone()),
            (a::INSTANCE_TYPE, self.instance_type.clone()),
            (a::USAGE_CLASS, self.usage_class.clone()),
            (a::ZONE, self.zone.clone()),
            (a::GITHUB_URL, self.github_url.clone()),
            (a::RUNNER_GROUP, self.runner_group.clone()),
            (a::TEMPLATE, self.template.clone()),
            (a::IMAGE, self.image.clone()),
            (a::SEALED, self.sealed.clone()),
            (a::PUBLIC_KEY, self.public_key.as_ref().map(ToString::to_string).unwrap_or_default()),
            (a::LEAVING, self.leaving.clone()),
            (a::INITIAL_RUN_ID, self.initial_run_id.clone()),
            (a::SCOPE, self.scope.clone()),
            (a::FAILURE_REASON, self.failure_reason.clone()),
            (a::FAILURE_MESSAGE, self.failure_message.clone()),
        ];
        item.extend(texts.map(|(name, text)| (name.to_owned(), AttributeValue::S(text))));
        item.extend(
            [(a::CPU, self.cpu), (a::MEM, self.mem), (a::CLAIMS, self.claims)]
                .map(|(name, number)| (name.to_owned(), AttributeValue::N(number.to_string()))),
        );
        item
    }

    /// Reads a record, whichever version of Paddock wrote it: every record must be found, so that its instance can be
    /// terminated. A missing or invalid attribute is empty, an unknown state is [`State::Unknown`]. Transitions keep
    /// attributes that are not known here.
    pub fn from_item(item: &Item) -> Self {
        let read = Reader::new(item);
        let state = read.parsed(a::STATE).unwrap_or(State::Unknown);
        Self {
            state,
            run_id: read.text(a::RUN_ID),
            threshold: match state {
                State::Terminated => None,
                State::Created | State::Running | State::Idle | State::Claimed | State::Unknown => {
                    read.time(a::THRESHOLD).ok()
                }
            },
            updated_at: read.time(a::UPDATED_AT).unwrap_or(Timestamp::UNIX_EPOCH),
            pool: read.text(a::POOL),
            claim: read.text(a::CLAIM),
            claim_uid: read.text(a::CLAIM_UID),
            resource_class: read.text(a::RESOURCE_CLASS),
            instance_type: read.text(a::INSTANCE_TYPE),
            usage_class: read.text(a::USAGE_CLASS),
            zone: read.text(a::ZONE),
            cpu: read.number(a::CPU),
            mem: read.number(a::MEM),
            github_url: read.text(a::GITHUB_URL),
            runner_group: read.text(a::RUNNER_GROUP),
            template: read.text(a::TEMPLATE),
            image: read.text(a::IMAGE),
            sealed: read.text(a::SEALED),
            public_key: PublicKey::parse(&read.text(a::PUBLIC_KEY)).ok(),
            leaving: read.text(a::LEAVING),
            initial_run_id: read.text(a::INITIAL_RUN_ID),
            claims: read.number(a::CLAIMS),
            scope: read.text(a::SCOPE),
            failure_reason: read.text(a::FAILURE_REASON),
            failure_message: read.text(a::FAILURE_MESSAGE),
            instance_id: read.id,
        }
    }
}

impl Heartbeat {
    pub fn to_item(&self, arns: &MachineArns) -> Item {
        let mut item = report_key(entity::HEARTBEAT, arns, &self.instance_id);
        item.insert(a::VALUE.into(), AttributeValue::S("PING".into()));
        item.insert(a::UPDATED_AT.into(), AttributeValue::S(stamp(self.updated_at)));
        if let Some(key) = &self.public_key {
            item.insert(a::PUBLIC_KEY.into(), AttributeValue::S(key.to_string()));
        }
        if self.reclaimed {
            item.insert(a::RECLAIMED.into(), AttributeValue::Bool(true));
        }
        item
    }

    pub fn from_item(item: &Item) -> Result<Self, ItemError> {
        let read = Reader::of_report(item);
        Ok(Self {
            updated_at: read.time(a::UPDATED_AT)?,
            public_key: PublicKey::parse(&read.text(a::PUBLIC_KEY)).ok(),
            reclaimed: item.get(a::RECLAIMED).and_then(|value| value.as_bool().ok()).is_some_and(|it| *it),
            instance_id: read.id,
        })
    }
}

impl WorkerSignal {
    pub fn new(instance_id: &str, signal: Signal, run_id: &str, claims: u32, updated_at: Timestamp) -> Self {
        let (instance_id, run_id, claims) = (instance_id.to_owned(), run_id.to_owned(), Some(claims));
        Self { instance_id, signal, run_id, claims, updated_at, reason: String::new(), detail: String::new() }
    }

    pub fn to_item(&self, arns: &MachineArns) -> Item {
        let mut item = report_key(entity::SIGNAL, arns, &self.instance_id);
        let value = [(a::SIGNAL, self.signal.to_string()), (a::RUN_ID, self.run_id.clone())];
        let failure = [(a::REASON, self.reason.clone()), (a::DETAIL, self.detail.clone())];
        let value = value.into_iter().chain(failure.into_iter().filter(|(_, text)| !text.is_empty()));
        let claims = self.claims.map(|claims| (a::CLAIMS.to_owned(), AttributeValue::N(claims.to_string())));
        let value = value.map(|(name, text)| (name.to_owned(), AttributeValue::S(text))).chain(claims).collect();
        item.insert(a::VALUE.into(), AttributeValue::M(value));
        item.insert(a::UPDATED_AT.into(), AttributeValue::S(stamp(self.updated_at)));
        item
    }

    pub fn from_item(item: &Item) -> Result<Self, ItemError> {
        let outer = Reader::of_report(item);
        let empty = Item::new();
        let value = item.get(a::VALUE).and_then(|value| value.as_m().ok()).unwrap_or(&empty);
        let inner = Reader { id: outer.id.clone(), item: value, text_max: outer.text_max };
        Ok(Self {
            signal: inner.parsed(a::SIGNAL)?,
            run_id: inner.text(a::RUN_ID),
            claims: value.contains_key(a::CLAIMS).then(|| inner.number(a::CLAIMS)),
            reason: inner.text(a::REASON),
            detail: inner.text(a::DETAIL),
            updated_at: outer.time(a::UPDATED_AT).unwrap_or(Timestamp::UNIX_EPOCH),
            instance_id: outer.id,
        })
    }
}

struct Reader<'a> {
    id: String,
    item: &'a Item,
    /// Longer texts are cut.
    text_max: usize,
}

impl<'a> Reader<'a> {
    fn new(item: &'a Item) -> Self {
        let sort_key = item.get(a::SK).and_then(|value| value.as_s().ok()).map_or("", String::as_str);
        Self { id: sort_key.strip_prefix("ID#").unwrap_or(sort_key).to_owned(), item, text_max: usize::MAX }
    }

    /// A reader for what a machine wrote.
    fn of_report(item: &'a Item) -> Self {
        Self { text_max: REPORT_TEXT_MAX, ..Self::new(item) }
    }

    fn text(&self, name: &str) -> String {
        let text = self.item.get(name).and_then(|value| value.as_s().ok()).map_or("", String::as_str);
        text[..text.floor_char_boundary(self.text_max)].to_owned()
    }

    fn number(&self, name: &str) -> u32 {
        self.item.get(name).and_then(|value| value.as_n().ok()).and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    fn parsed<T: std::str::FromStr>(&self, name: &'static str) -> Result<T, ItemError> {
        self.text(name).parse().map_err(|_| self.invalid(name))
    }

    fn time(&self, name: &'static str) -> Result<Timestamp, ItemError> {
        instant(&self.text(name)).ok_or_else(|| self.invalid(name))
    }

    fn invalid(&self, attribute: &'static str) -> ItemError {
        let mut found = self.item.get(attribute).map_or("missing".to_owned(), |value| format!("{value:?}"));
        found.truncate(found.floor_char_boundary(FOUND_MAX));
        ItemError { id: self.id.clone(), attribute, found }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{KeyPair, key::tests::arns};

    /// A record with a value in every attribute.
    pub(crate) fn instance(state: State) -> Instance {
        Instance {
            instance_id: "i-123456".into(),
            state,
            run_id: "7890".into(),
            threshold: (state != State::Terminated).then(|| "2025-05-31T12:00:00Z".parse().unwrap()),
            updated_at: "2025-05-31T11:50:00Z".parse().unwrap(),
            pool: "ci/linux".into(),
            claim: "build-7890".into(),
            claim_uid: "7d2e".into(),
            resource_class: "medium".into(),
            instance_type: "c6i.large".into(),
            usage_class: "spot".into(),
            zone: "us-east-1a".into(),
            cpu: 2,
            mem: 4096,
            github_url: "https://github.com/acme".into(),
            runner_group: "EC2".into(),
            template: "0a1b2c".into(),
            image: "ami-12345678".into(),
            sealed: "c2VhbGVk".into(),
            public_key: Some(KeyPair::from_bytes([1; 32]).public()),
            leaving: "7889".into(),
            initial_run_id: "7000".into(),
            claims: 3,
            scope: "repository:acme/rocket".into(),
            failure_reason: "heartbeat_stale".into(),
            failure_message: "silent".into(),
        }
    }

    #[test]
    fn records_survive_a_round_trip() {
        for state in State::ALL {
            assert_eq!(Instance::from_item(&instance(*state).to_item()), instance(*state));
        }
        let time = "2025-05-31T12:00:00Z".parse().unwrap();
        let public_key = Some(KeyPair::generate().public());
        for reclaimed in [false, true] {
            let public_key = public_key.clone();
            let beat = Heartbeat { instance_id: "i-1".into(), updated_at: time, public_key, reclaimed };
            assert_eq!(Heartbeat::from_item(&as_read(beat.to_item(&arns()))), Ok(beat));
        }
        let signal = WorkerSignal::new("i-1", Signal::Registered, "9", 2, time);
        assert_eq!(WorkerSignal::from_item(&as_read(signal.to_item(&arns()))), Ok(signal.clone()));
        let earlier = WorkerSignal { claims: None, ..signal.clone() };
        assert_eq!(WorkerSignal::from_item(&as_read(earlier.to_item(&arns()))), Ok(earlier));
        let failure = WorkerSignal { reason: SCRUB.into(), detail: "exit status: 1".into(), ..signal };
        assert_eq!(WorkerSignal::from_item(&as_read(failure.to_item(&arns()))), Ok(failure));
    }

    /// What the operator reads of an agent's item.
    fn as_read(mut item: Item) -> Item {
        item.retain(|name, _| REPORT_ATTRIBUTES.contains(&name.as_str()));
        item
    }

    #[test]
    fn what_a_machine_wrote_is_cut_and_found_to_be_too_long() {
        let honest = WorkerSignal { detail: "\u{1F4BE}".repeat(300), ..failure() };
        assert!(!is_oversized(&honest.to_item(&arns())));
        assert_eq!(WorkerSignal::from_item(&honest.to_item(&arns())), Ok(honest));
        let flood = WorkerSignal { detail: format!("no disk {}", "\u{1F4BE}".repeat(90_000)), ..failure() };
        let item = flood.to_item(&arns());
        assert!(is_oversized(&item));
        let read = WorkerSignal::from_item(&item).unwrap();
        assert!(read.detail.starts_with("no disk") && read.detail.len() <= REPORT_TEXT_MAX);

        let mut beat = report_key(entity::HEARTBEAT, &arns(), "i-1");
        let list = AttributeValue::L(vec![AttributeValue::S("x".repeat(1000)); 9]);
        beat.insert(a::UPDATED_AT.into(), AttributeValue::M(HashMap::from([("deep".to_owned(), list)])));
        assert!(is_oversized(&beat));
        beat.insert(a::UPDATED_AT.into(), AttributeValue::S("x".repeat(300_000)));
        assert!(Heartbeat::from_item(&beat).unwrap_err().to_string().len() < 200);
    }

    fn failure() -> WorkerSignal {
        WorkerSignal::new("i-1", Signal::ScriptFailed, "9", 1, Timestamp::UNIX_EPOCH)
    }

    #[test]
    fn a_record_of_another_version_is_read() {
        let mut item = instance(State::Idle).to_item();
        item.retain(|name, _| [a::PK, a::SK, a::STATE, a::THRESHOLD].contains(&name.as_str()));
        let read = Instance::from_item(&item);
        assert_eq!((read.instance_id.as_str(), read.state, read.run_id.as_str()), ("i-123456", State::Idle, ""));
        item.insert(a::THRESHOLD.into(), AttributeValue::S("never".into()));
        item.insert(a::STATE.into(), AttributeValue::S("hibernated".into()));
        let read = Instance::from_item(&item);
        assert_eq!((read.state, read.threshold), (State::Unknown, None));
        item.retain(|name, _| [a::PK, a::SK].contains(&name.as_str()));
        assert_eq!(Instance::from_item(&item).state, State::Unknown);
    }

    #[test]
    fn an_instance_serves_the_claim_of_its_uid_and_without_one_that_of_its_run() {
        let serves = |claim_uid: &str, name, uid, run| {
            let record = Instance { claim_uid: claim_uid.into(), ..instance(State::Running) };
            record.serves(ClaimRef { name, uid, run })
        };
        assert!(serves("7d2e", "build-7890", "7d2e", "7890"));
        assert!(!serves("7d2e", "build-7890", "made-again", "7890"), "a later claim of the same name and run");
        assert!(!serves("7d2e", "another", "7d2e", "7890"));
        assert!(serves("", "build-7890", "7d2e", "7890") && !serves("", "build-7890", "7d2e", "7891"));
    }

    #[test]
    fn an_invalid_attribute_is_named_in_the_error() {
        let mut item = report_key(entity::HEARTBEAT, &arns(), "i-123456");
        assert_eq!(Heartbeat::from_item(&item).unwrap_err().to_string(), "attribute updatedAt of i-123456 is missing");
        item.insert(a::UPDATED_AT.into(), AttributeValue::S("never".into()));
        let error = Heartbeat::from_item(&item).unwrap_err();
        assert_eq!((error.id.as_str(), error.attribute), ("i-123456", "updatedAt"));
    }
}
