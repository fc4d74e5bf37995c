use std::time::Duration;

use aws_sdk_dynamodb::{Client, error::ProvideErrorMetadata, types::AttributeValue};
use paddock_bed_aws::{
    Aws, Service,
    faults::{Effect, Rule},
};

use serde_json::json;

use crate::{
    store::{exists, table},
    support::{config, ec2, eventually, http, texts},
};

async fn put(client: &Client, table: &str, id: &str) -> Result<(), aws_sdk_dynamodb::Error> {
    let put = client.put_item().table_name(table).item("id", AttributeValue::S(id.into()));
    Ok(put.send().await.map(drop)?)
}

fn on_put(table: &str, effect: Effect) -> Rule {
    Rule::on(Service::DynamoDb, "PutItem", effect).containing(table)
}

/// Puts an item under a rule that drops the response: the call reaches the front end, the client gets no answer.
async fn put_in_vain(aws: &Aws, client: &Client, table: &'static str, id: &'static str, rule: Rule) {
    let rule = aws.add_fault(rule);
    let client = client.clone();
    let mut call = tokio::spawn(async move { put(&client, table, id).await });
    let hit = || aws.faults().iter().any(|fault| fault.id == rule && fault.hit == 1);
    eventually("the call to come", async || hit().then_some(())).await;
    assert!(tokio::time::timeout(Duration::from_millis(500), &mut call).await.is_err());
    call.abort();
}

pub async fn each_service_throttles_in_its_own_words(aws: &Aws) {
    let client = table(aws, "throttled").await;
    aws.add_fault(on_put("throttled", Effect::Throttle).times(1));
    let error = put(&client, "throttled", "a").await.unwrap_err();
    assert!(matches!(error, aws_sdk_dynamodb::Error::ProvisionedThroughputExceededException(_)), "{error:?}");
    put(&client, "throttled", "a").await.unwrap();

    let sqs = aws_sdk_sqs::Client::new(&config(aws));
    aws.add_fault(Rule::on(Service::Sqs, "CreateQueue", Effect::Throttle).containing("throttled").times(1));
    let error = sqs.create_queue().queue_name("throttled").send().await.unwrap_err();
    assert_eq!(error.code(), Some("RequestThrottled"), "{error:?}");

    aws.add_fault(Rule::on(Service::Ec2, "DescribeSubnets", Effect::Throttle).containing("throttled").times(1));
    let (status, text) = ec2(aws, "DescribeSubnets", &[("Filter.1.Value.1", "throttled")]).await;
    assert_eq!((status, texts(&text, "Code")), (503, vec!["RequestLimitExceeded".to_owned()]));
}

pub async fn any_error_code_can_be_asked_for(aws: &Aws) {
    let client = table(aws, "any-error").await;
    aws.add_fault(on_put("any-error", Effect::error("ThrottlingException")).once());
    let error = put(&client, "any-error", "a").await.unwrap_err();
    assert_eq!(error.code(), Some("ThrottlingException"));

    for (action, code, expected) in
        [("DescribeVpcs", "UnauthorizedOperation", 403), ("RunInstances", "InsufficientInstanceCapacity", 500)]
    {
        aws.add_fault(Rule::on(Service::Ec2, action, Effect::error(code)).once());
        let (status, text) = ec2(aws, action, &[]).await;
        assert_eq!((status, texts(&text, "Code")), (expected, vec![code.to_owned()]));
    }
}

pub async fn what_is_not_as_aws_has_it_is_told(aws: &Aws) {
    let (status, text) = ec2(aws, "DescribeSubnets", &[("MaxFun", "1")]).await;
    assert_eq!(status, 200, "{text}");
    aws.add_fault(Rule::on(Service::Ec2, "DescribeVpcs", Effect::ServerError { status: 502 }).containing("Deliberate"));
    ec2(aws, "DescribeVpcs", &[("Deliberate", "1")]).await;
    let wanted = [
        "ec2 DescribeSubnets request: MaxFun is no member",
        "ec2 DescribeVpcs: error InternalError has status 502 and not 500",
    ];
    let violations = aws.violations().await;
    for text in wanted {
        assert!(violations.iter().any(|violation| violation.starts_with(text)), "{text}: {violations:?}");
        aws.forget_violations(text);
    }
    let rule = json!({ "service": "sqs", "effect": "error", "code": "Nonsense" });
    let url = format!("{}/_admin/faults", aws.endpoint());
    let refused = http().post(url).json(&rule).send().await.unwrap();
    assert_eq!(refused.status(), 400);
    assert!(refused.text().await.unwrap().contains("sqs as a whole has no error Nonsense"));
}

pub async fn server_errors_are_the_services_own(aws: &Aws) {
    let client = table(aws, "server-error").await;
    aws.add_fault(on_put("server-error", Effect::ServerError { status: 500 }).once());
    let error = put(&client, "server-error", "a").await.unwrap_err();
    assert!(matches!(error, aws_sdk_dynamodb::Error::InternalServerError(_)), "{error:?}");
    assert!(!exists(&client, "server-error", "a").await);
}

pub async fn lost_response_is_carried_out(aws: &Aws) {
    let client = table(aws, "lost").await;
    aws.add_fault(on_put("lost", Effect::LostResponse).skip(1).once());
    put(&client, "lost", "a").await.unwrap();
    let lost = client.put_item().table_name("lost").item("id", AttributeValue::S("b".into())).send().await.unwrap_err();
    assert!(matches!(lost, aws_sdk_dynamodb::error::SdkError::DispatchFailure(_)), "{lost:?}");
    assert!(exists(&client, "lost", "b").await);
    put(&client, "lost", "c").await.unwrap();
}

pub async fn reset_is_not_carried_out(aws: &Aws) {
    let client = table(aws, "reset").await;
    aws.add_fault(on_put("reset", Effect::Reset).once());
    let reset =
        client.put_item().table_name("reset").item("id", AttributeValue::S("a".into())).send().await.unwrap_err();
    assert!(matches!(reset, aws_sdk_dynamodb::error::SdkError::DispatchFailure(_)), "{reset:?}");
    assert!(!exists(&client, "reset", "a").await);
}

pub async fn hanging_call_is_not_carried_out(aws: &Aws) {
    let client = table(aws, "hanging").await;
    put_in_vain(aws, &client, "hanging", "a", on_put("hanging", Effect::Hang).once()).await;
    assert!(!exists(&client, "hanging", "a").await);
}

pub async fn delayed_call_is_carried_out_later(aws: &Aws) {
    let client = table(aws, "delayed").await;
    put_in_vain(aws, &client, "delayed", "late", on_put("delayed", Effect::Delay { ms: 600_000 }).once()).await;
    assert!(!exists(&client, "delayed", "late").await);

    aws.add_fault(on_put("delayed", Effect::Delay { ms: 100 }).once());
    put(&client, "delayed", "soon").await.unwrap();
    eventually("the delayed write", async || exists(&client, "delayed", "soon").await.then_some(())).await;
}

pub async fn rules_look_into_the_request(aws: &Aws) {
    let client = table(aws, "picky").await;
    aws.add_fault(on_put("picky", Effect::Throttle).skip(1).times(2));
    let results = [
        put(&client, "picky", "a").await.is_ok(),
        put(&client, "picky", "b").await.is_ok(),
        put(&client, "picky", "c").await.is_ok(),
        put(&client, "picky", "d").await.is_ok(),
    ];
    assert_eq!(results, [true, false, false, true]);
    let fault = aws.faults().into_iter().find(|fault| fault.rule.contains.as_deref() == Some("picky")).unwrap();
    assert_eq!((fault.seen, fault.hit), (4, 2));
}
