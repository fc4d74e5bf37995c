use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A word that no state or signal has.
#[derive(Debug, PartialEq, Eq)]
pub struct UnknownWord(pub String);

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name { $($(#[$variant_doc])* #[serde(rename = $word)] $variant),+ }

        impl $name {
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = UnknownWord;
            fn from_str(text: &str) -> Result<Self, UnknownWord> {
                Self::ALL.iter().copied().find(|word| word.as_str() == text).ok_or_else(|| UnknownWord(text.to_owned()))
            }
        }
    };
}

words! {
    /// Where an instance stands.
    State {
        /// Launched; its scripts and first registration are still to come.
        Created = "created",
        /// Works for the run whose id it carries.
        Running = "running",
        /// Healthy, belongs to nobody, waits in the pool.
        Idle = "idle",
        /// Reserved for a run, proving that it can serve it.
        Claimed = "claimed",
        /// Given up; the machine is, or is about to be, gone.
        Terminated = "terminated",
    }
}

words! {
    /// What the agent has last done.
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
    /// Whether an instance may go from this state to `next`. Nothing else is possible.
    pub const fn may_become(self, next: Self) -> bool {
        use State::*;
        match (self, next) {
            (Created, Running) | (Running, Idle) | (Idle, Claimed) | (Claimed, Running | Idle) => true,
            (Created | Running | Idle | Claimed, Terminated) => true,
            (Created, Created | Idle | Claimed) => false,
            (Running, Created | Running | Claimed) => false,
            (Idle, Created | Running | Idle) => false,
            (Claimed, Created | Claimed) => false,
            (Terminated, Created | Running | Idle | Claimed | Terminated) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_read_back_as_what_they_were_written_from() {
        for state in State::ALL {
            assert_eq!(state.to_string().parse(), Ok(*state));
        }
        for signal in Signal::ALL {
            assert_eq!(signal.to_string().parse(), Ok(*signal));
        }
        assert_eq!("Idle".parse::<State>(), Err(UnknownWord("Idle".into())));
    }

    #[test]
    fn i6_exactly_the_nine_arrows_exist_and_nothing_leaves_terminated() {
        let arrows: Vec<_> = State::ALL
            .iter()
            .flat_map(|from| State::ALL.iter().map(move |to| (*from, *to)))
            .filter(|(from, to)| from.may_become(*to))
            .collect();
        assert_eq!(arrows.len(), 9, "{arrows:?}");
        assert!(arrows.iter().all(|(from, _)| *from != State::Terminated));
    }
}
