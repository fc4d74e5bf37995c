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
    pub const LOG: &str = "log";
    pub const SIGNALLED_AT: &str = "signalledAt";
    pub const WARNING: &str = "warning";
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
    pub const FAILURE_LOG: &str = "failureLog";
    pub const INITIAL_RUN_ID: &str = "initialRunId";
    pub const GITHUB_URL: &str = "githubUrl";
}
use attribute as a;

/// What is read of an agent's item. It may have other attributes, of any length.
pub const REPORT_ATTRIBUTES: [&str; 8] =
    [a::PK, a::SK, a::VALUE, a::UPDATED_AT, a::PUBLIC_KEY, a::RECLAIMED, a::SIGNALLED_AT, a::WARNING];

/// The most that an agent's item may have in these attributes. An agent writes less than 7 KB; DynamoDB takes 400 KB.
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
    /// The end of the machine's log, as far as it is known; empty before that.
    pub failure_log: String,
}

/// The agent's heartbeat, with its public key and what it knows of the machine's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heartbeat {
    pub instance_id: String,
    pub updated_at: Timestamp,
    pub public_key: Option<PublicKey>,
    /// EC2 has announced that it takes the spot machine back. An earlier version does not write it.
    pub reclaimed: bool,
    /// The `updatedAt` of the agent's last signal: whether there is one that the operator has not read. None before it has
    /// sent one.
    pub signalled_at: Option<Timestamp>,
    /// What is wrong with the machine and does not keep it from serving; empty if nothing is.
    pub warning: String,
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
    /// The end of what the script or the runner wrote before a failure; otherwise empty.
    pub log: String,
}

/// The reason if the machine could not be scrubbed after its run.
pub const SCRUB: &str = "scrub";

/// The reason if the runner has ended and starting it again does not help.
pub const RUNNER_ENDED: &str = "runner";

/// How many bytes of a log an agent sends, and a record keeps.
pub const LOG_MAX: usize = 3 * 1024;

/// The end of a log as an agent sends it.
pub fn log_tail(log: &str) -> &str {
    tail(log, LOG_MAX)
}

/// The end of a log, at most so many bytes, from the start of a line if it has several.
pub fn tail(log: &str, max: usize) -> &str {
    let log = log.trim_end();
    let tail = &log[log.ceil_char_boundary(log.len().saturating_sub(max))..];
    match tail.split_once('\n') {
        Some((_, rest)) if tail.len() < log.len() => rest,
        _ => tail,
    }
}

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
            (a::FAILURE_LOG, self.failure_log.clone()),
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
            failure_log: read.text(a::FAILURE_LOG),
            instance_id: read.id,
        }
    }
}

impl Heartbeat {
    /// Of an agent that has sent no signal and has nothing to warn of.
    pub fn new(instance_id: &str, public_key: Option<PublicKey>, updated_at: Timestamp) -> Self {
        let instance_id = instance_id.to_owned();
        Self { instance_id, updated_at, public_key, reclaimed: false, signalled_at: None, warning: String::new() }
    }

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
        if let Some(at) = self.signalled_at {
            item.insert(a::SIGNALLED_AT.into(), AttributeValue::S(stamp(at)));
        }
        if !self.warning.is_empty() {
            item.insert(a::WARNING.into(), AttributeValue::S(self.warning.clone()));
        }
        item
    }

    pub fn from_item(item: &Item) -> Result<Self, ItemError> {
        let read = Reader::of_report(item);
        Ok(Self {
            updated_at: read.time(a::UPDATED_AT)?,
            public_key: PublicKey::parse(&read.text(a::PUBLIC_KEY)).ok(),
            reclaimed: item.get(a::RECLAIMED).and_then(|value| value.as_bool().ok()).is_some_and(|it| *it),
            signalled_at: read.time(a::SIGNALLED_AT).ok(),
            warning: read.text(a::WARNING),
            instance_id: read.id,
        })
    }
}

impl WorkerSignal {
    pub fn new(instance_id: &str, signal: Signal, run_id: &str, claims: u32, updated_at: Timestamp) -> Self {
        let (instance_id, run_id, claims) = (instance_id.to_owned(), run_id.to_owned(), Some(claims));
        let (reason, detail, log) = (String::new(), String::new(), String::new());
        Self { instance_id, signal, run_id, claims, updated_at, reason, detail, log }
    }

    pub fn to_item(&self, arns: &MachineArns) -> Item {
        let mut item = report_key(entity::SIGNAL, arns, &self.instance_id);
        let value = [(a::SIGNAL, self.signal.to_string()), (a::RUN_ID, self.run_id.clone())];
        let failure = [(a::REASON, self.reason.clone()), (a::DETAIL, self.detail.clone()), (a::LOG, self.log.clone())];
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
            log: inner.text(a::LOG),
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
#[path = "item_tests.rs"]
pub(crate) mod tests;
