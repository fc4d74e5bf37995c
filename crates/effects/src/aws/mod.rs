//! The AWS clients, their configuration, and the mapping of their errors.

pub mod dynamodb;
pub mod ec2;
#[cfg(test)]
mod ec2_stand_in;
mod fleet;
pub mod instance_types;
mod launch_template;
pub mod reports;
pub mod sqs;
pub mod wake_queues;

use std::time::Duration;

use aws_config::{BehaviorVersion, SdkConfig, retry::RetryConfig, timeout::TimeoutConfig};
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use paddock_core::ec2::launch_error::{Kind, hint, separated};

use crate::{
    clock::{CorrectedTime, DateInterceptor},
    fence::{Fence, FenceInterceptor},
};

/// Timeout of one attempt, after which the call is retried. `CreateFleet`, the slowest call, has its own.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(15);
/// Timeout of all attempts together. After that the reconciler reports the error and requeues.
const CALL_TIMEOUT: Duration = Duration::from_secs(45);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

pub struct Clients {
    pub dynamodb: aws_sdk_dynamodb::Client,
    pub sqs: aws_sdk_sqs::Client,
    pub ec2: aws_sdk_ec2::Client,
}

impl Clients {
    pub async fn new(fence: &Fence) -> Self {
        let config = aws_config::defaults(BehaviorVersion::latest())
            .time_source(CorrectedTime)
            .retry_config(RetryConfig::standard().with_max_attempts(4))
            .timeout_config(
                TimeoutConfig::builder()
                    .connect_timeout(CONNECT_TIMEOUT)
                    .operation_attempt_timeout(ATTEMPT_TIMEOUT)
                    .operation_timeout(CALL_TIMEOUT)
                    .build(),
            )
            .load()
            .await;
        Self::from_config(&config, fence)
    }

    pub(super) fn from_config(config: &SdkConfig, fence: &Fence) -> Self {
        let interceptor = || FenceInterceptor(fence.clone());
        let dynamodb = aws_sdk_dynamodb::config::Builder::from(config)
            .interceptor(interceptor())
            .interceptor(DateInterceptor)
            .build();
        let sqs = aws_sdk_sqs::config::Builder::from(config).interceptor(interceptor()).build();
        let ec2 = aws_sdk_ec2::config::Builder::from(config).interceptor(interceptor()).build();
        Self {
            dynamodb: aws_sdk_dynamodb::Client::from_conf(dynamodb),
            sqs: aws_sdk_sqs::Client::from_conf(sqs),
            ec2: aws_sdk_ec2::Client::from_conf(ec2),
        }
    }
}

/// A table or queue that is missing.
const REPAIRED_BY_POOL: [&str; 3] =
    ["ResourceNotFoundException", "QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue"];

/// An AWS error, by what the caller can do about it.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum AwsError {
    #[error("AWS refuses {call}: {code}: {message}; {}", hint(code, message, call))]
    Denied { call: &'static str, code: String, message: String },
    #[error("AWS throttles {call}: {message}")]
    Throttled { call: &'static str, message: String },
    #[error("AWS cannot do {call} yet: {code}: {message}; {}", hint(code, message, call))]
    NotYet { call: &'static str, code: String, message: String },
    #[error("AWS does not accept {call}: {code}: {message}{}", separated("; ", &hint(code, message, call)))]
    Refused { call: &'static str, code: String, message: String },
    #[error("AWS cannot be reached for {call}: {message}")]
    Unreachable { call: &'static str, message: String },
}

impl AwsError {
    /// Whether a launch template, or its version, does not exist or is not visible yet.
    pub fn is_template_gone(&self) -> bool {
        self.code().is_some_and(|code| code.starts_with("InvalidLaunchTemplate") && code.contains("NotFound"))
    }

    /// Whether a queue does not exist.
    pub fn is_queue_gone(&self) -> bool {
        self.code().is_some_and(|code| code.contains("NonExistentQueue") || code.contains("QueueDoesNotExist"))
    }

    /// Whether the same call may succeed later: after an outage, or when the pool has repaired its table or queue.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Throttled { .. } | Self::NotYet { .. } | Self::Unreachable { .. } => true,
            Self::Refused { code, .. } => REPAIRED_BY_POOL.contains(&code.as_str()),
            Self::Denied { .. } => false,
        }
    }

    /// The AWS error code of a call that would have to be another one, or come later.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Refused { code, .. } | Self::NotYet { code, .. } => Some(code),
            Self::Denied { .. } | Self::Throttled { .. } | Self::Unreachable { .. } => None,
        }
    }
}

/// Maps an SDK error of `call` to an [`AwsError`].
pub fn word<E, R>(call: &'static str) -> impl FnOnce(SdkError<E, R>) -> AwsError
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
    R: std::fmt::Debug + Send + Sync + 'static,
{
    move |error| match error.as_service_error().and_then(|service| service.code()).map(str::to_owned) {
        Some(code) => {
            let message = error.as_service_error().and_then(|service| service.message()).unwrap_or("no reason given");
            classify(call, code, without_encoded_details(message).to_owned())
        }
        None => {
            let causes = std::iter::successors(std::error::Error::source(&error), |cause| cause.source());
            let message = causes.last().map_or_else(|| error.to_string(), ToString::to_string);
            AwsError::Unreachable { call, message }
        }
    }
}

/// Strips the encoded details of a denial. EC2 encodes them differently in every response, so a condition that contains
/// them would change on every reconcile.
pub fn without_encoded_details(message: &str) -> &str {
    message.split("Encoded authorization failure message").next().unwrap_or(message).trim()
}

fn classify(call: &'static str, code: String, message: String) -> AwsError {
    match Kind::of(&code) {
        Kind::Denied => AwsError::Denied { call, code, message },
        Kind::Throttled => AwsError::Throttled { call, message: format!("{code}: {message}") },
        Kind::Unavailable => AwsError::Unreachable { call, message: format!("{code}: {message}") },
        Kind::NotYet => AwsError::NotYet { call, code, message },
        Kind::Capacity | Kind::Spec => AwsError::Refused { call, code, message },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_to_do() {
        let said = |code: &str, message: &str| classify("CreateFleet", code.into(), message.into()).to_string();
        for (code, message, words) in [
            (
                "UnauthorizedOperation",
                "User: arn:aws:iam::1:role/p is not authorized to perform: ec2:RunInstances on resource: *",
                "grant the operator's role ec2:RunInstances (docs/iam)",
            ),
            ("UnauthorizedOperation", "You are not authorized.", "ec2:RunInstances, ec2:CreateTags and iam:PassRole"),
            (
                "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
                "The provided credentials do not have permission.",
                "create-service-linked-role --aws-service-name spot.amazonaws.com",
            ),
            ("AWS.SimpleQueueService.QueueDeletedRecently", "Wait.", "60 s after its deletion"),
            ("InvalidSubnetID.NotFound", "No.", "check spec.ec2.subnetIds"),
        ] {
            assert!(said(code, message).contains(words), "{}", said(code, message));
        }
        assert_eq!(said("InvalidFleetConfig", "No."), "AWS does not accept CreateFleet: InvalidFleetConfig: No.");
    }

    #[test]
    fn what_passes_by_itself_is_transient() {
        let is_transient = |code: &str| classify("CreateFleet", code.into(), String::new()).is_transient();
        for code in [
            "RequestLimitExceeded",
            "InternalError",
            "ExpiredToken",
            "QueueDeletedRecently",
            "InvalidLaunchTemplateName.AlreadyExistsException",
            "InvalidLaunchTemplateId.VersionNotFound",
        ] {
            assert!(is_transient(code), "{code}");
        }
        for code in
            ["UnauthorizedOperation", "AuthFailure.ServiceLinkedRoleCreationNotPermitted", "InvalidAMIID.NotFound"]
        {
            assert!(!is_transient(code), "{code}");
        }
    }
}
