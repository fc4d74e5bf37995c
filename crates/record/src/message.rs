use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::instant;

/// One idle instance, as a message in the queue of its resource class.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IdleMessage {
    pub instance_id: String,
    /// `on-demand` or `spot`.
    pub usage_class: String,
    pub instance_type: String,
    pub cpu: u32,
    /// Memory in MiB.
    pub mem: u32,
    pub resource_class: String,
    /// Whose claims the instance may serve; empty if it has served none.
    #[serde(default)]
    pub scope: String,
    /// When the idle instance, and with it the message, expires.
    pub threshold: String,
}

/// Why a message is discarded instead of used or returned to the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Discard {
    Malformed(String),
    Expired,
    /// Its instance is no longer idle, or about to end.
    Taken,
    /// Its instance belongs to another pool or to none.
    Foreign,
    /// Its instance has served a claim since it was sent, which sent another.
    Outdated,
}

impl Discard {
    /// The label value for metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "malformed",
            Self::Expired => "expired",
            Self::Taken => "taken",
            Self::Foreign => "foreign",
            Self::Outdated => "outdated",
        }
    }
}

impl IdleMessage {
    /// Parses a message that has not expired at `now`.
    pub fn read(body: &str, now: Timestamp) -> Result<Self, Discard> {
        let message: Self = serde_json::from_str(body).map_err(|error| Discard::Malformed(error.to_string()))?;
        match instant(&message.threshold) {
            None => Err(Discard::Malformed(format!("threshold {:?} is no time", message.threshold))),
            Some(threshold) if threshold <= now => Err(Discard::Expired),
            Some(_) => Ok(message),
        }
    }

    pub fn write(&self) -> String {
        serde_json::to_string(self).expect("strings and numbers are always JSON")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: &str = r#"{"instanceId":"i-12345678","usageClass":"on-demand","instanceType":"c6i.large","cpu":2,
        "mem":4096,"resourceClass":"medium","threshold":"2025-05-31T12:20:00Z"}"#;

    #[test]
    fn a_message_is_valid_until_its_threshold() {
        let before = "2025-05-31T12:19:59Z".parse().unwrap();
        let message = IdleMessage::read(SEED, before).unwrap();
        assert_eq!((message.instance_id.as_str(), message.mem), ("i-12345678", 4096));
        assert_eq!(message.scope, "", "as a version without scopes wrote it");
        assert_eq!(IdleMessage::read(&message.write(), before), Ok(message));
        assert_eq!(IdleMessage::read(SEED, "2025-05-31T12:20:00Z".parse().unwrap()), Err(Discard::Expired));
    }

    #[test]
    fn an_unreadable_message_is_malformed() {
        let now = Timestamp::UNIX_EPOCH;
        for body in ["", "{", "[]", r#"{"instanceId":"i-1"}"#, &SEED.replace("2025-05-31T12:20:00Z", "soon")] {
            assert!(matches!(IdleMessage::read(body, now), Err(Discard::Malformed(_))), "{body}");
        }
    }
}
