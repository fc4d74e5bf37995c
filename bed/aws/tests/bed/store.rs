use aws_sdk_dynamodb::{
    Client,
    types::{AttributeDefinition, AttributeValue, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType::S},
};
use futures::future::join_all;
use paddock_bed_aws::Aws;

use crate::support::config;

/// A table with the key `id`.
pub async fn table(aws: &Aws, name: &str) -> Client {
    let client = Client::new(&config(aws));
    let attribute = AttributeDefinition::builder().attribute_name("id").attribute_type(S).build().unwrap();
    let key = KeySchemaElement::builder().attribute_name("id").key_type(KeyType::Hash).build().unwrap();
    let create = client.create_table().table_name(name).attribute_definitions(attribute).key_schema(key);
    create.billing_mode(BillingMode::PayPerRequest).send().await.unwrap();
    client
}

pub async fn exists(client: &Client, table: &str, id: &str) -> bool {
    let get = client.get_item().table_name(table).key("id", AttributeValue::S(id.into())).consistent_read(true);
    get.send().await.unwrap().item.is_some()
}

/// Every claim relies on this: of several writes with the same condition, exactly one succeeds.
pub async fn conditional_writers_race_and_exactly_one_wins(aws: &Aws) {
    let client = table(aws, "race").await;
    for round in 0..100 {
        let write = |writer: i32| {
            let put = client.put_item().table_name("race").item("id", AttributeValue::S(format!("round-{round}")));
            put.item("winner", AttributeValue::N(writer.to_string()))
                .condition_expression("attribute_not_exists(id)")
                .send()
        };
        let results = join_all((0..8).map(write)).await;
        let winners = results.iter().filter(|result| result.is_ok()).count();
        let losers = results.iter().filter_map(|result| result.as_ref().err()?.as_service_error());
        assert_eq!((winners, losers.filter(|error| error.is_conditional_check_failed_exception()).count()), (1, 7));
    }
}
