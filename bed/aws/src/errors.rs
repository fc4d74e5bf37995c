//! The error codes of the services, which are in no usable model: which operation answers with which code and status.
//! Every error that the front makes up, that an emulator answers, or that a rule asks for must be here; a new row needs
//! a source.

use crate::call::Service::{self, DynamoDb, Ec2, Sqs};

pub struct Row {
    service: Service,
    code: &'static str,
    /// None for every operation.
    operations: Option<&'static [&'static str]>,
    pub status: u16,
    /// The page or file that says so.
    pub source: &'static str,
}

const fn row(
    service: Service,
    code: &'static str,
    operations: &'static [&'static str],
    status: u16,
    source: &'static str,
) -> Row {
    Row { service, code, operations: if operations.is_empty() { None } else { Some(operations) }, status, source }
}

const ANY: &[&str] = &[];

/// "Error codes for the Amazon EC2 API": docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html. It has the
/// codes, and for server errors the status; "4xx" for client errors, which are 400 but for these.
const EC2_ERRORS: &str = "EC2 API reference, Error codes for the Amazon EC2 API";
const LAUNCHES: &[&str] = &["CreateFleet", "RunInstances"];
const INSTANCES: &[&str] =
    &["DescribeInstances", "GetConsoleOutput", "TerminateInstances", "StopInstances", "CreateTags", "DeleteTags"];
const TEMPLATES: &[&str] = &[
    "CreateFleet",
    "RunInstances",
    "CreateLaunchTemplateVersion",
    "DescribeLaunchTemplates",
    "DescribeLaunchTemplateVersions",
    "DeleteLaunchTemplate",
];
/// "Common errors" of the DynamoDB API reference, and "Error handling with DynamoDB" in the developer guide.
const DYNAMODB_ERRORS: &str = "DynamoDB developer guide, Error handling with DynamoDB";
/// The `errors` of an operation in botocore's `service-2.json`. It has no status; a client error is 400 in these protocols.
const MODEL: &str = "botocore, service-2.json";
/// It calls a denial `AccessDenied`, status 403; the JSON protocol has that name in `x-amzn-query-error`.
const SQS_ERRORS: &str = "SQS API reference, Common Errors";
const KARPENTER: &str = "aws/karpenter-provider-aws, pkg/errors/errors.go";

const READS: &[&str] = &["GetItem", "BatchGetItem", "Query", "Scan", "TransactGetItems"];
const WRITES: &[&str] = &["PutItem", "UpdateItem", "DeleteItem", "BatchWriteItem", "TransactWriteItems"];

const ROWS: &[Row] = &[
    // Of every operation of EC2.
    row(Ec2, "AuthFailure", ANY, 401, EC2_ERRORS),
    row(Ec2, "UnauthorizedOperation", ANY, 403, EC2_ERRORS),
    row(Ec2, "RequestExpired", ANY, 400, EC2_ERRORS),
    row(Ec2, "RequestLimitExceeded", ANY, 503, EC2_ERRORS),
    row(Ec2, "InternalError", ANY, 500, EC2_ERRORS),
    row(Ec2, "Unavailable", ANY, 503, EC2_ERRORS),
    row(Ec2, "ServiceUnavailable", ANY, 503, EC2_ERRORS),
    row(Ec2, "InvalidParameterValue", ANY, 400, EC2_ERRORS),
    row(Ec2, "InvalidParameterCombination", ANY, 400, EC2_ERRORS),
    row(Ec2, "MissingParameter", ANY, 400, EC2_ERRORS),
    row(Ec2, "UnsupportedOperation", ANY, 400, EC2_ERRORS),
    row(Ec2, "DryRunOperation", ANY, 412, EC2_ERRORS),
    // Of some.
    row(Ec2, "IdempotentParameterMismatch", LAUNCHES, 400, EC2_ERRORS),
    row(Ec2, "InvalidFleetConfig", &["CreateFleet"], 400, "github-aws-runners/terraform-aws-github-runner issue 5297"),
    row(Ec2, "InsufficientInstanceCapacity", LAUNCHES, 500, EC2_ERRORS),
    row(Ec2, "UnfulfillableCapacity", LAUNCHES, 400, EC2_ERRORS),
    row(Ec2, "Unsupported", LAUNCHES, 400, EC2_ERRORS),
    row(Ec2, "MaxFleetCountExceeded", LAUNCHES, 400, KARPENTER),
    row(Ec2, "VcpuLimitExceeded", LAUNCHES, 400, EC2_ERRORS),
    row(Ec2, "InstanceLimitExceeded", LAUNCHES, 400, EC2_ERRORS),
    row(Ec2, "MaxSpotInstanceCountExceeded", LAUNCHES, 400, EC2_ERRORS),
    row(Ec2, "InsufficientFreeAddressesInSubnet", LAUNCHES, 400, EC2_ERRORS),
    row(Ec2, "ReservationCapacityExceeded", LAUNCHES, 400, KARPENTER),
    row(Ec2, "InsufficientHostCapacity", LAUNCHES, 500, EC2_ERRORS),
    row(Ec2, "AuthFailure.ServiceLinkedRoleCreationNotPermitted", LAUNCHES, 403, "determined-ai/determined issue 1830"),
    row(Ec2, "InvalidSubnetID.NotFound", &["CreateFleet", "RunInstances", "DescribeSubnets"], 400, EC2_ERRORS),
    row(Ec2, "InvalidAMIID.NotFound", &["CreateFleet", "RunInstances", "DescribeImages"], 400, EC2_ERRORS),
    row(Ec2, "InvalidAMIID.Malformed", &["CreateFleet", "RunInstances", "DescribeImages"], 400, EC2_ERRORS),
    row(Ec2, "InvalidAMIID.Unavailable", LAUNCHES, 400, EC2_ERRORS),
    row(Ec2, "InvalidGroup.NotFound", &["CreateFleet", "RunInstances", "DescribeSecurityGroups"], 400, EC2_ERRORS),
    row(Ec2, "InvalidInstanceID.NotFound", INSTANCES, 400, EC2_ERRORS),
    row(Ec2, "InvalidInstanceID.Malformed", INSTANCES, 400, EC2_ERRORS),
    row(Ec2, "OperationNotPermitted", &["TerminateInstances", "StopInstances"], 400, EC2_ERRORS),
    row(Ec2, "IncorrectInstanceState", &["TerminateInstances", "StopInstances"], 400, EC2_ERRORS),
    row(Ec2, "InvalidInstanceType", &["DescribeInstanceTypes"], 400, EC2_ERRORS),
    row(Ec2, "InvalidLaunchTemplateId.NotFound", TEMPLATES, 400, EC2_ERRORS),
    row(Ec2, "InvalidLaunchTemplateId.VersionNotFound", TEMPLATES, 400, EC2_ERRORS),
    row(Ec2, "InvalidLaunchTemplateName.NotFoundException", TEMPLATES, 400, EC2_ERRORS),
    row(Ec2, "InvalidLaunchTemplateName.AlreadyExistsException", &["CreateLaunchTemplate"], 400, EC2_ERRORS),
    // DynamoDB.
    row(DynamoDb, "AccessDeniedException", ANY, 400, DYNAMODB_ERRORS),
    row(DynamoDb, "UnrecognizedClientException", ANY, 400, DYNAMODB_ERRORS),
    row(DynamoDb, "ExpiredTokenException", ANY, 403, "DynamoDB API reference, Common Error Types"),
    row(DynamoDb, "ThrottlingException", ANY, 400, DYNAMODB_ERRORS),
    row(DynamoDb, "ValidationException", ANY, 400, DYNAMODB_ERRORS),
    row(DynamoDb, "InternalServerError", ANY, 500, DYNAMODB_ERRORS),
    row(DynamoDb, "ServiceUnavailable", ANY, 503, DYNAMODB_ERRORS),
    row(DynamoDb, "ProvisionedThroughputExceededException", READS, 400, MODEL),
    row(DynamoDb, "ProvisionedThroughputExceededException", WRITES, 400, MODEL),
    row(DynamoDb, "RequestLimitExceeded", READS, 400, MODEL),
    row(DynamoDb, "RequestLimitExceeded", WRITES, 400, MODEL),
    row(DynamoDb, "ResourceNotFoundException", READS, 400, MODEL),
    row(DynamoDb, "ResourceNotFoundException", WRITES, 400, MODEL),
    row(DynamoDb, "ResourceNotFoundException", TABLES, 400, MODEL),
    row(
        DynamoDb,
        "ResourceInUseException",
        &["CreateTable", "DeleteTable", "UpdateTable", "UpdateTimeToLive"],
        400,
        MODEL,
    ),
    row(DynamoDb, "LimitExceededException", &["CreateTable", "DeleteTable", "UpdateTimeToLive"], 400, MODEL),
    row(DynamoDb, "ConditionalCheckFailedException", &["PutItem", "UpdateItem", "DeleteItem"], 400, MODEL),
    row(DynamoDb, "TransactionCanceledException", &["TransactWriteItems", "TransactGetItems"], 400, MODEL),
    row(DynamoDb, "TransactionInProgressException", &["TransactWriteItems"], 400, MODEL),
    row(DynamoDb, "TransactionConflictException", &["PutItem", "UpdateItem", "DeleteItem"], 400, MODEL),
    // SQS.
    row(Sqs, "AccessDeniedException", ANY, 403, SQS_ERRORS),
    row(Sqs, "UnrecognizedClientException", ANY, 403, SQS_ERRORS),
    row(Sqs, "ExpiredTokenException", ANY, 403, SQS_ERRORS),
    row(Sqs, "InternalError", ANY, 500, SQS_ERRORS),
    row(Sqs, "ServiceUnavailable", ANY, 503, SQS_ERRORS),
    row(Sqs, "RequestThrottled", ANY, 400, MODEL),
    row(Sqs, "QueueDoesNotExist", QUEUES, 400, MODEL),
    row(Sqs, "QueueNameExists", &["CreateQueue"], 400, MODEL),
    row(Sqs, "QueueDeletedRecently", &["CreateQueue"], 400, MODEL),
    row(Sqs, "InvalidAttributeName", &["CreateQueue", "SetQueueAttributes", "GetQueueAttributes"], 400, MODEL),
    row(Sqs, "InvalidAttributeValue", &["CreateQueue", "SetQueueAttributes"], 400, MODEL),
    row(Sqs, "ReceiptHandleIsInvalid", &["DeleteMessage", "ChangeMessageVisibility"], 400, MODEL),
    row(Sqs, "InvalidMessageContents", &["SendMessage"], 400, MODEL),
    row(Sqs, "BatchRequestTooLong", &["SendMessageBatch"], 400, MODEL),
    row(Sqs, "EmptyBatchRequest", BATCHES, 400, MODEL),
    row(Sqs, "TooManyEntriesInBatchRequest", BATCHES, 400, MODEL),
    row(Sqs, "BatchEntryIdsNotDistinct", BATCHES, 400, MODEL),
    row(Sqs, "InvalidBatchEntryId", BATCHES, 400, MODEL),
];

const TABLES: &[&str] = &["DeleteTable", "DescribeTable", "DescribeTimeToLive", "UpdateTimeToLive"];
const QUEUES: &[&str] = &[
    "GetQueueUrl",
    "GetQueueAttributes",
    "SetQueueAttributes",
    "DeleteQueue",
    "PurgeQueue",
    "SendMessage",
    "SendMessageBatch",
    "ReceiveMessage",
    "DeleteMessage",
    "DeleteMessageBatch",
    "ChangeMessageVisibility",
    "ChangeMessageVisibilityBatch",
];
const BATCHES: &[&str] = &["SendMessageBatch", "DeleteMessageBatch", "ChangeMessageVisibilityBatch"];

/// The rows that name the model as their source, and are not in it: `operation code`.
#[cfg(test)]
pub fn not_in_model(service: Service, model: &crate::model::Model) -> Vec<String> {
    let rows = ROWS.iter().filter(|row| row.service == service && row.source == MODEL);
    let each =
        |row: &'static Row| row.operations.unwrap_or_default().iter().map(move |operation| (row.code, operation));
    let wrong = rows.flat_map(each).filter(|(code, operation)| !model.lists_error(operation, code));
    wrong.map(|(code, operation)| format!("{operation} {code}")).collect()
}

/// The row of a code, for an operation or for all of them.
pub fn row_of(service: Service, operation: Option<&str>, code: &str) -> Option<&'static Row> {
    let fits = |row: &&Row| match (row.operations, operation) {
        (None, _) => true,
        (Some(operations), Some(operation)) => operations.contains(&operation),
        (Some(_), None) => false,
    };
    ROWS.iter().filter(|row| row.service == service && row.code == code).find(fits)
}

/// The status of a code that the front makes up.
pub fn status_of(service: Service, code: &str) -> u16 {
    let row = ROWS.iter().find(|row| row.service == service && row.code == code);
    row.unwrap_or_else(|| panic!("{service:?} has no error {code}: add it to {} with a source", file!())).status
}
