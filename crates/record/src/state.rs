use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A text that is no state or signal.
#[derive(Debug, PartialEq, Eq)]
pub struct UnknownValue(pub String);

/// An enum whose variants have fixed texts, for serde, `Display` and `FromStr`.
macro_rules! string_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name { $($(#[$variant_doc])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = UnknownValue;
            fn from_str(text: &str) -> Result<Self, UnknownValue> {
                Self::ALL.iter().copied().find(|it| it.as_str() == text).ok_or_else(|| UnknownValue(text.to_owned()))
            }
        }
    };
}

string_enum! {
    /// The state of an instance.
    State {
        /// Launched; scripts and first registration are pending.
        Created = "created",
        /// Serves the run in its `run_id`.
        Running = "running",
        /// Healthy, without a claim, available in the pool.
        Idle = "idle",
        /// Reserved for a run; its runner is not registered yet.
        Claimed = "claimed",
        /// Final; EC2 has terminated the machine or is about to.
        Terminated = "terminated",
        /// A state of another version of Paddock. Such an instance can only be terminated.
        Unknown = "unknown",
    }
}

string_enum! {
    /// The agent's last result.
    Signal {
        ScriptOk = "UD_OK",
        ScriptFailed = "UD_FAILED",
        Registered = "UD_REG_OK",
        RegistrationFailed = "UD_REG_FAILED",
        Deregistered = "UD_REMOVE_REG_OK",
        DeregistrationFailed = "UD_REMOVE_REG_FAILED",
    }
}

impl State {
    /// Whether the state machine has a transition from this state to `next`.
    pub const fn may_become(self, next: Self) -> bool {
        use State::*;
        match (self, next) {
            (Created, Running) | (Running, Idle) | (Idle, Claimed) | (Claimed, Running | Idle) => true,
            (Created | Running | Idle | Claimed | Unknown, Terminated) => true,
            (Created, Created | Idle | Claimed) => false,
            (Running, Created | Running | Claimed) => false,
            (Idle, Created | Running | Idle) => false,
            (Claimed, Created | Claimed) => false,
            (Unknown, Created | Running | Idle | Claimed) => false,
            (Terminated, Created | Running | Idle | Claimed | Terminated) => false,
            (_, Unknown) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_parse_back_to_their_values() {
        for state in State::ALL {
            assert_eq!(state.to_string().parse(), Ok(*state));
        }
        for signal in Signal::ALL {
            assert_eq!(signal.to_string().parse(), Ok(*signal));
        }
        assert_eq!("Idle".parse::<State>(), Err(UnknownValue("Idle".into())));
    }

    #[test]
    fn i6_exactly_the_ten_arrows_exist_and_nothing_leaves_terminated() {
        let arrows: Vec<_> = State::ALL
            .iter()
            .flat_map(|from| State::ALL.iter().map(move |to| (*from, *to)))
            .filter(|(from, to)| from.may_become(*to))
            .collect();
        assert_eq!(arrows.len(), 10, "{arrows:?}");
        assert!(arrows.iter().all(|(from, _)| *from != State::Terminated));
    }
}
