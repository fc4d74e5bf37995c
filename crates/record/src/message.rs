use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::instant;

/// One idle instance, as it lies in the queue of its resource class.
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
    /// When the instance stops being idle by itself, and the message with it.
    pub threshold: String,
}

/// Why a message is thrown away instead of being offered or put back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Discard {
    Malformed(String),
    Expired,
    /// Its instance is not idle any more.
    Taken,
    /// Its instance is not of this pool, or of nobody's.
    Foreign,
}

impl Discard {
    /// One word for metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "malformed",
            Self::Expired => "expired",
            Self::Taken => "taken",
            Self::Foreign => "foreign",
        }
    }
}

impl IdleMessage {
    /// Reads a message that is still worth something at `now`.
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
    fn a_message_lives_until_its_threshold() {
        let before = "2025-05-31T12:19:59Z".parse().unwrap();
        let message = IdleMessage::read(SEED, before).unwrap();
        assert_eq!((message.instance_id.as_str(), message.mem), ("i-12345678", 4096));
        assert_eq!(IdleMessage::read(&message.write(), before), Ok(message));
        assert_eq!(IdleMessage::read(SEED, "2025-05-31T12:20:00Z".parse().unwrap()), Err(Discard::Expired));
    }

    #[test]
    fn what_cannot_be_read_is_malformed() {
        let now = Timestamp::UNIX_EPOCH;
        for body in ["", "{", "[]", r#"{"instanceId":"i-1"}"#, &SEED.replace("2025-05-31T12:20:00Z", "soon")] {
            assert!(matches!(IdleMessage::read(body, now), Err(Discard::Malformed(_))), "{body}");
        }
    }
}
