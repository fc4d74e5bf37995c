//! What became of a webhook.

/// What became of an event that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WebhookOutcome {
    /// A claim was made.
    Made(String),
    /// What it tells was written to this many claims.
    Noted(usize),
    /// The claims already say all that it tells.
    Known,
    /// There is nothing to do about it.
    Ignored(Ignored),
    /// It is not what GitHub sends.
    Malformed(String),
    /// The API server did not take it. GitHub's log says that the delivery failed, and it is read again from there.
    Unavailable(String),
}

/// Why nothing is done about an event that is as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ignored {
    Ping,
    OtherEvent,
    OtherAction,
    Waiting,
    NoPool,
    NameTaken,
    NoClaim,
}

impl Ignored {
    /// For a person who looks at the delivery.
    pub const fn message(self) -> &'static str {
        match self {
            Self::Ping => "pong",
            Self::OtherEvent => "ignored: only workflow_job and workflow_run are used",
            Self::OtherAction => "ignored: nothing is done about this action",
            Self::Waiting => "ignored: the job waits for approval and is told of again when it is queued",
            Self::NoPool => "ignored: no board pool serves exactly these labels for this repository",
            Self::NameTaken => "ignored: somebody made a claim of this name for something else",
            Self::NoClaim => "ignored: no claim on an EC2 pool was made for this run",
        }
    }

    const fn reason(self) -> &'static str {
        match self {
            Self::Ping => "ping",
            Self::OtherEvent => "other_event",
            Self::OtherAction => "other_action",
            Self::Waiting => "waiting",
            Self::NoPool => "no_pool",
            Self::NameTaken => "name_taken",
            Self::NoClaim => "no_claim",
        }
    }
}

impl WebhookOutcome {
    /// Two words for metrics, from a fixed vocabulary: how it went, and why.
    pub const fn words(&self) -> (&'static str, &'static str) {
        match self {
            Self::Made(_) => ("accepted", "claim_made"),
            Self::Noted(_) => ("accepted", "claim_noted"),
            Self::Known => ("accepted", "known"),
            Self::Ignored(why) => ("ignored", why.reason()),
            Self::Malformed(_) => ("refused", "malformed"),
            Self::Unavailable(_) => ("failed", "api_server"),
        }
    }

    /// Whether trying again may go better.
    pub const fn is_final(&self) -> bool {
        match self {
            Self::Made(_) | Self::Noted(_) | Self::Known | Self::Ignored(_) | Self::Malformed(_) => true,
            Self::Unavailable(_) => false,
        }
    }
}
