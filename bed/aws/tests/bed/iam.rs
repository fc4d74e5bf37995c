//! What a machine's credentials are good for: the policy of `docs/iam` is evaluated for each of its calls.

use aws_config::SdkConfig;
use aws_sdk_dynamodb::{
    Client,
    config::{Credentials, SharedCredentialsProvider},
    error::ProvideErrorMetadata,
    operation::RequestId,
    types::{
        AttributeDefinition, AttributeValue, BillingMode, KeySchemaElement, KeyType, KeysAndAttributes, PutRequest,
        ScalarAttributeType::S, WriteRequest,
    },
};
use paddock_bed_aws::{Aws, access_key};

use crate::{
    fleet::{fleet, ids, template},
    support::{config, http},
};

const TABLE: &str = "paddock-authority";

/// A client configuration with the credentials of an instance's role.
fn machine_config(aws: &Aws, id: &str) -> SdkConfig {
    let credentials = Credentials::new(access_key(id), "bed", Some(format!("bed-{id}")), None, "bed");
    config(aws).into_builder().credentials_provider(SharedCredentialsProvider::new(credentials)).build()
}

async fn launch(aws: &Aws) -> String {
    template(aws, "authority", "#!/bin/sh\n").await;
    let subnet = &aws.subnets()[0].0;
    let (_, text) = fleet(aws, "authority", 1, &[(subnet, &[("InstanceType", "m5.large")])], &[]).await;
    ids(&text).pop().unwrap_or_else(|| panic!("{text}"))
}

/// A table like the operator's; returns its ARN.
async fn table(client: &Client) -> String {
    let mut create = client.create_table().table_name(TABLE).billing_mode(BillingMode::PayPerRequest);
    for (name, role) in [("PK", KeyType::Hash), ("SK", KeyType::Range)] {
        let attribute = AttributeDefinition::builder().attribute_name(name).attribute_type(S).build().unwrap();
        let key = KeySchemaElement::builder().attribute_name(name).key_type(role).build().unwrap();
        create = create.attribute_definitions(attribute).key_schema(key);
    }
    create.send().await.unwrap();
    client.describe_table().table_name(TABLE).send().await.unwrap().table.unwrap().table_arn.unwrap()
}

/// The error code of a refused call.
fn refused<T: std::fmt::Debug, E>(outcome: Result<T, E>) -> String
where
    E: ProvideErrorMetadata + std::fmt::Debug,
{
    outcome.expect_err("it is refused").code().unwrap_or("no code").to_owned()
}

pub async fn a_machine_writes_its_own_items_and_nothing_else(aws: &Aws) {
    const DENIED: &str = "AccessDeniedException";
    let operator = Client::new(&config(aws));
    assert_eq!(table(&operator).await, format!("arn:aws:dynamodb:us-east-1:000000000000:table/{TABLE}"));
    let id = launch(aws).await;
    let machine = Client::new(&machine_config(aws, &id));
    let arn = |id: &str| format!("arn:aws:ec2:us-east-1:000000000000:instance/{id}");
    let (own_beat, own_signal) = (format!("TYPE#Heartbeat#{}", arn(&id)), format!("TYPE#WS#{}", arn(&id)));
    let text = |text: &str| AttributeValue::S(text.to_owned());
    let put = async |partition: &str| {
        machine.put_item().table_name(TABLE).item("PK", text(partition)).item("SK", text("ID#i-1")).send().await
    };
    let get = async |partition: &str| {
        machine.get_item().table_name(TABLE).key("PK", text(partition)).key("SK", text("ID#i-1")).send().await
    };

    for own in [&own_beat, &own_signal] {
        assert!(put(own).await.unwrap().request_id().is_some());
    }
    get("TYPE#INSTANCE").await.unwrap();

    let (other_beat, other_signal) = (format!("TYPE#Heartbeat#{}", arn("i-1")), format!("TYPE#WS#{}", arn("i-1")));
    for partition in [&other_beat, &other_signal, "TYPE#INSTANCE", "TYPE#Heartbeat", "TYPE#WS"] {
        assert_eq!(refused(put(partition).await), DENIED, "{partition}");
    }
    for partition in [&own_beat, &own_signal, &other_beat] {
        assert_eq!(refused(get(partition).await), DENIED, "{partition}");
    }
    let (pk, sk) = (text(&own_beat), text("ID#i-1"));
    let update = machine.update_item().table_name(TABLE).key("PK", pk.clone()).key("SK", sk.clone());
    assert_eq!(
        refused(update.update_expression("SET a = :a").expression_attribute_values(":a", text("1")).send().await),
        DENIED
    );
    let delete = machine.delete_item().table_name(TABLE).key("PK", pk.clone()).key("SK", sk.clone());
    assert_eq!(refused(delete.send().await), DENIED);
    let query = machine.query().table_name(TABLE).key_condition_expression("PK = :pk");
    assert_eq!(refused(query.expression_attribute_values(":pk", text("TYPE#INSTANCE")).send().await), DENIED);
    assert_eq!(refused(machine.scan().table_name(TABLE).send().await), DENIED);
    let key = [("PK".to_owned(), text("TYPE#INSTANCE")), ("SK".to_owned(), sk.clone())].into();
    let keys = KeysAndAttributes::builder().keys(key).build().unwrap();
    assert_eq!(refused(machine.batch_get_item().request_items(TABLE, keys).send().await), DENIED);
    let item = PutRequest::builder().item("PK", pk).item("SK", sk).build().unwrap();
    let write = WriteRequest::builder().put_request(item).build();
    assert_eq!(refused(machine.batch_write_item().request_items(TABLE, vec![write]).send().await), DENIED);
    assert_eq!(refused(machine.describe_table().table_name(TABLE).send().await), DENIED);

    let queues = aws_sdk_sqs::Client::new(&machine_config(aws, &id));
    assert_eq!(refused(queues.create_queue().queue_name("paddock-authority").send().await), "AccessDenied");
    let form = [("Action", "TerminateInstances"), ("Version", "2016-11-15"), ("InstanceId.1", &id)];
    let signed = format!("AWS4-HMAC-SHA256 Credential={}/20260101/us-east-1/ec2/aws4_request", access_key(&id));
    let answer = http().post(aws.endpoint()).header("authorization", signed).form(&form).send().await.unwrap();
    assert_eq!(answer.status(), 403);
    assert!(answer.text().await.unwrap().contains("UnauthorizedOperation"));

    let unknown = Client::new(&machine_config(aws, "i-00000000000000bad"));
    let outcome =
        unknown.get_item().table_name(TABLE).key("PK", text("TYPE#INSTANCE")).key("SK", text("ID#i-1")).send();
    assert_eq!(refused(outcome.await), "UnrecognizedClientException");
}
