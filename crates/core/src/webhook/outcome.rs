//! Outcomes of a webhook.

/// Outcome of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WebhookOutcome {
    /// This claim was created.
    Made(String),
    /// Its facts were written to this many claims.
    Noted(usize),
    /// The claims already have its facts.
    Known,
    /// It requires no action.
    Ignored(Ignored),
    /// It is not what GitHub sends.
    Malformed(String),
    /// The API server did not accept the change. GitHub logs a failed delivery, and redelivery reads it from there.
    Unavailable(String),
}

/// Why a valid event is ignored.
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
    /// The answer that GitHub shows with the delivery.
    pub const fn message(self) -> &'static str {
        match self {
            Self::Ping => "pong",
            Self::OtherEvent => "ignored: only workflow_job and workflow_run are used",
            Self::OtherAction => "ignored: nothing is done about this action",
            Self::Waiting => "ignored: the job waits for approval; GitHub sends another event when it is queued",
            Self::NoPool => "ignored: no board pool serves exactly these labels for this repository",
            Self::NameTaken => "ignored: a claim of this name exists for something else",
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
    /// Metric labels from a fixed set: result and reason.
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

    /// Whether a retry cannot change the outcome.
    pub const fn is_final(&self) -> bool {
        match self {
            Self::Made(_) | Self::Noted(_) | Self::Known | Self::Ignored(_) | Self::Malformed(_) => true,
            Self::Unavailable(_) => false,
        }
    }
}
