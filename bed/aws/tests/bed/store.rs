use aws_sdk_dynamodb::{
    Client,
    types::{
        AttributeDefinition, AttributeValue, BillingMode, KeySchemaElement, KeyType, KeysAndAttributes, PutRequest,
        ScalarAttributeType::S, WriteRequest,
    },
};
use futures::future::join_all;
use paddock_bed_aws::{
    Aws, Service,
    faults::{Effect, Rule},
};

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

pub async fn batches_are_processed_in_part(aws: &Aws) {
    let client = table(aws, "batches").await;
    let in_part =
        |action| Rule::on(Service::DynamoDb, action, Effect::Unprocessed { processed: 1 }).containing("batches").once();
    aws.add_fault(in_part("BatchWriteItem"));
    aws.add_fault(in_part("BatchGetItem"));
    let key = |id: &str| ("id".to_owned(), AttributeValue::S(id.into()));
    let put = |id: &str| {
        let put = PutRequest::builder().set_item(Some([key(id)].into())).build().unwrap();
        WriteRequest::builder().put_request(put).build()
    };
    let write = client.batch_write_item().request_items("batches", vec![put("a"), put("b"), put("c")]);
    let left = write.send().await.unwrap().unprocessed_items.unwrap();
    assert_eq!(left["batches"], [put("b"), put("c")]);
    assert!(exists(&client, "batches", "a").await && !exists(&client, "batches", "b").await);
    client.batch_write_item().set_request_items(Some(left)).send().await.unwrap();

    let keys = ["a", "b", "c"].map(|id| [key(id)].into());
    let wanted = KeysAndAttributes::builder().set_keys(Some(keys.into())).consistent_read(true).build().unwrap();
    let first = client.batch_get_item().request_items("batches", wanted).send().await.unwrap();
    let left = first.unprocessed_keys.unwrap();
    assert_eq!((first.responses.unwrap()["batches"].len(), left["batches"].keys().len()), (1, 2));
    assert_eq!(left["batches"].consistent_read(), Some(true));
    let rest = client.batch_get_item().set_request_items(Some(left)).send().await.unwrap();
    assert_eq!(rest.responses.unwrap()["batches"].len(), 2);
}
