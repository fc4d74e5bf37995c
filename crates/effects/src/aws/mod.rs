//! The AWS clients, their configuration, and the mapping of their errors.

pub mod dynamodb;
pub mod ec2;
pub mod instance_types;
pub mod reports;
pub mod sqs;

use std::time::Duration;

use aws_config::{BehaviorVersion, SdkConfig, retry::RetryConfig, timeout::TimeoutConfig};
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};

use crate::{
    clock::{CorrectedTime, DateInterceptor},
    fence::{Fence, FenceInterceptor},
};

/// Timeout of one attempt, after which the call is retried. `CreateFleet`, the slowest call, answers within seconds.
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

/// A table or queue that is missing. A queue that was just deleted cannot be created for 60 s.
const REPAIRED_BY_POOL: [&str; 4] = [
    "ResourceNotFoundException",
    "QueueDoesNotExist",
    "AWS.SimpleQueueService.NonExistentQueue",
    "AWS.SimpleQueueService.QueueDeletedRecently",
];

/// An AWS error, by what the caller can do about it.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum AwsError {
    #[error("AWS refuses {call}: {message}. Grant the operator's role this action (docs/iam)")]
    Denied { call: &'static str, message: String },
    #[error("AWS throttles {call}: {message}")]
    Throttled { call: &'static str, message: String },
    #[error("AWS does not accept {call}: {code}: {message}")]
    Refused { call: &'static str, code: String, message: String },
    #[error("AWS cannot be reached for {call}: {message}")]
    Unreachable { call: &'static str, message: String },
}

impl AwsError {
    /// Whether a launch template, or its version, does not exist.
    pub fn is_template_gone(&self) -> bool {
        self.code().is_some_and(|code| code.starts_with("InvalidLaunchTemplate") && code.contains("NotFound"))
    }

    /// Whether the same call may succeed later: after an outage, or when the pool has repaired its table or queue.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Throttled { .. } | Self::Unreachable { .. } => true,
            Self::Refused { code, .. } => REPAIRED_BY_POOL.contains(&code.as_str()),
            Self::Denied { .. } => false,
        }
    }

    /// The AWS error code of a [`Self::Refused`] call.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Refused { code, .. } => Some(code),
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
    match code.as_str() {
        "UnauthorizedOperation"
        | "AccessDenied"
        | "AccessDeniedException"
        | "AuthFailure"
        | "UnrecognizedClientException"
        | "InvalidClientTokenId" => AwsError::Denied { call, message: format!("{code}: {message}") },
        "RequestLimitExceeded"
        | "Throttling"
        | "ThrottlingException"
        | "RequestThrottled"
        // Concurrent writes to one record: a retry sees their result.
        | "TransactionCanceledException"
        | "TransactionConflictException"
        | "ProvisionedThroughputExceededException"
        | "TooManyRequestsException" => AwsError::Throttled { call, message: format!("{code}: {message}") },
        // Credentials that have expired are renewed.
        "InternalError" | "InternalServerError" | "InternalFailure" | "ServiceUnavailable" | "Unavailable"
        | "ExpiredToken" | "ExpiredTokenException" | "RequestExpired" => {
            AwsError::Unreachable { call, message: format!("{code}: {message}") }
        }
        _ => AwsError::Refused { call, code, message },
    }
}
