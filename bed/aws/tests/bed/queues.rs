use std::time::Duration;

use aws_sdk_sqs::{
    Client,
    error::ProvideErrorMetadata,
    operation::create_queue::CreateQueueError,
    types::{Message, QueueAttributeName},
};
use paddock_bed_aws::{
    Aws, Service,
    faults::{Effect, Rule},
};
use serde_json::{Value, json};

use crate::support::{config, eventually, http};

/// A queue with these messages.
async fn queue(aws: &Aws, name: &str, bodies: &[&str]) -> (Client, String) {
    let client = Client::new(&config(aws));
    let url = client.create_queue().queue_name(name).send().await.unwrap().queue_url.unwrap();
    for body in bodies {
        client.send_message().queue_url(&url).message_body(*body).send().await.unwrap();
        // ElasticMQ orders messages by millisecond.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    (client, url)
}

async fn receive(client: &Client, url: &str) -> Vec<Message> {
    client.receive_message().queue_url(url).max_number_of_messages(1).send().await.unwrap().messages.unwrap_or_default()
}

async fn bodies(client: &Client, url: &str) -> Vec<String> {
    receive(client, url).await.into_iter().filter_map(|message| message.body).collect()
}

async fn delete(client: &Client, url: &str, message: &Message) {
    let delete = client.delete_message().queue_url(url).receipt_handle(message.receipt_handle().unwrap());
    delete.send().await.unwrap();
}

pub async fn queue_urls_lead_to_the_front(aws: &Aws) {
    let (client, url) = queue(aws, "address", &[]).await;
    assert_eq!(url, format!("{}/000000000000/address", aws.endpoint()));
    let missing = client.get_queue_url().queue_name("no-such-queue").send().await.unwrap_err();
    assert!(missing.as_service_error().is_some_and(|error| error.is_queue_does_not_exist()), "{missing:?}");
}

pub async fn a_message_is_delivered_twice(aws: &Aws) {
    aws.add_fault(Rule::on(Service::Sqs, "ReceiveMessage", Effect::Duplicate).containing("twin").once());
    let (client, url) = queue(aws, "twice", &["twin", "single"]).await;
    let first = receive(&client, &url).await;
    delete(&client, &url, &first[0]).await;
    let second = receive(&client, &url).await;
    assert_eq!([first[0].body(), second[0].body()], [Some("twin"); 2]);
    delete(&client, &url, &second[0]).await;
    assert_eq!(bodies(&client, &url).await, ["single"]);
    assert!(bodies(&client, &url).await.is_empty());
}

pub async fn a_message_is_delivered_late(aws: &Aws) {
    aws.add_fault(Rule::on(Service::Sqs, "ReceiveMessage", Effect::Late { seconds: 1 }).containing("snail").once());
    let (client, url) = queue(aws, "late", &["snail"]).await;
    assert!(bodies(&client, &url).await.is_empty());
    let late = eventually("the late message", async || bodies(&client, &url).await.pop()).await;
    assert_eq!(late, "snail");
}

pub async fn a_message_is_delivered_after_its_deletion(aws: &Aws) {
    aws.add_fault(Rule::on(Service::Sqs, "DeleteMessage", Effect::AfterDeletion).containing("ghost").once());
    let (client, url) = queue(aws, "haunted", &["ghost"]).await;
    let message = receive(&client, &url).await.remove(0);
    delete(&client, &url, &message).await;
    let ghost = receive(&client, &url).await.remove(0);
    assert_eq!((ghost.body(), ghost.message_id()), (Some("ghost"), message.message_id()));
    delete(&client, &url, &ghost).await;
    assert!(bodies(&client, &url).await.is_empty());
}

pub async fn a_receive_is_falsely_empty(aws: &Aws) {
    aws.add_fault(Rule::on(Service::Sqs, "ReceiveMessage", Effect::FalseEmpty).containing("shy-queue").once());
    let (client, url) = queue(aws, "shy-queue", &["there"]).await;
    assert!(bodies(&client, &url).await.is_empty());
    assert_eq!(bodies(&client, &url).await, ["there"]);
}

pub async fn a_receive_is_out_of_order(aws: &Aws) {
    aws.add_fault(Rule::on(Service::Sqs, "ReceiveMessage", Effect::Reorder).containing("unordered").once());
    let (client, url) = queue(aws, "unordered", &["one", "two", "three"]).await;
    assert_eq!(bodies(&client, &url).await, ["three"]);
    let mut rest = [bodies(&client, &url).await, bodies(&client, &url).await].concat();
    rest.sort();
    assert_eq!(rest, ["one", "two"]);
}

pub async fn deleting_twice_is_no_error(aws: &Aws) {
    let (client, url) = queue(aws, "deleted", &["once"]).await;
    let message = receive(&client, &url).await.remove(0);
    delete(&client, &url, &message).await;
    delete(&client, &url, &message).await;
    let entry = aws_sdk_sqs::types::DeleteMessageBatchRequestEntry::builder().id("a");
    let entry = entry.receipt_handle(message.receipt_handle().unwrap()).build().unwrap();
    let batch = client.delete_message_batch().queue_url(&url).entries(entry).send().await.unwrap();
    assert_eq!((batch.successful().len(), batch.failed().len()), (1, 0));
}

pub async fn batch_is_answered_with_both_lists(aws: &Aws) {
    let (client, url) = queue(aws, "batches", &[]).await;
    let entry = aws_sdk_sqs::types::SendMessageBatchRequestEntry::builder().id("a").message_body("one").build();
    client.send_message_batch().queue_url(&url).entries(entry.unwrap()).send().await.unwrap();
    let raw = json!({ "QueueUrl": url, "Entries": [{ "Id": "a", "MessageBody": "two" }] });
    let send = http().post(aws.endpoint()).header("x-amz-target", "AmazonSQS.SendMessageBatch");
    let send = send.header("content-type", "application/x-amz-json-1.0").body(raw.to_string());
    let answer: Value = send.send().await.unwrap().json().await.unwrap();
    assert_eq!((answer["Successful"].as_array().unwrap().len(), &answer["Failed"]), (1, &json!([])), "{answer}");
}

async fn create(client: &Client, name: &str, retention: Option<&str>) -> Result<String, CreateQueueError> {
    let mut create = client.create_queue().queue_name(name);
    if let Some(seconds) = retention {
        create = create.attributes(QueueAttributeName::MessageRetentionPeriod, seconds);
    }
    let answer = create.send().await.map_err(aws_sdk_sqs::error::SdkError::into_service_error)?;
    Ok(answer.queue_url.unwrap())
}

pub async fn queue_with_other_attributes_is_not_made_again(aws: &Aws) {
    let client = Client::new(&config(aws));
    let url = create(&client, "other", Some("3600")).await.unwrap();
    assert_eq!(create(&client, "other", Some("3600")).await.unwrap(), url);
    assert_eq!(create(&client, "other", None).await.unwrap(), url, "only attributes that are named are compared");
    let refused = create(&client, "other", Some("7200")).await.unwrap_err();
    assert!(refused.is_queue_name_exists() && refused.code() == Some("QueueAlreadyExists"), "{refused:?}");

    let name = QueueAttributeName::MessageRetentionPeriod;
    client.set_queue_attributes().queue_url(&url).attributes(name.clone(), "7200").send().await.unwrap();
    assert_eq!(create(&client, "other", Some("7200")).await.unwrap(), url);
    let got = client.get_queue_attributes().queue_url(&url).attribute_names(QueueAttributeName::All).send().await;
    let got = got.unwrap().attributes.unwrap();
    assert_eq!((got[&name].as_str(), got[&QueueAttributeName::VisibilityTimeout].as_str()), ("7200", "30"));
    let refused = create(&client, "short", Some("59")).await.unwrap_err();
    assert!(refused.is_invalid_attribute_value(), "{refused:?}");
}

pub async fn deleted_queue_is_not_made_again_for_a_minute(aws: &Aws) {
    let client = Client::new(&config(aws));
    let url = create(&client, "phoenix", None).await.unwrap();
    client.delete_queue().queue_url(&url).send().await.unwrap();
    let refused = create(&client, "phoenix", None).await.unwrap_err();
    assert!(refused.is_queue_deleted_recently(), "{refused:?}");
    aws.set_queue_deletion_time(Duration::from_millis(1));
    eventually("the name to be free", async || create(&client, "phoenix", None).await.ok()).await;
    aws.set_queue_deletion_time(Duration::from_secs(60));
}

/// "When you delete a queue, any messages in the queue are no longer available": what is under way ends, too.
pub async fn calls_under_way_end_with_their_queue(aws: &Aws) {
    let client = Client::new(&config(aws));
    let url = create(&client, "mayfly", None).await.unwrap();
    let receive = client.receive_message().queue_url(&url).wait_time_seconds(2);
    let waiting = tokio::spawn(receive.send());
    tokio::time::sleep(Duration::from_millis(500)).await;
    client.delete_queue().queue_url(&url).send().await.unwrap();
    match waiting.await.unwrap() {
        Ok(answer) => assert!(answer.messages().is_empty()),
        Err(error) => assert!(error.as_service_error().unwrap().is_queue_does_not_exist(), "{error:?}"),
    }
    let late = client.send_message().queue_url(&url).message_body("late").send().await.unwrap_err();
    assert!(late.as_service_error().unwrap().is_queue_does_not_exist(), "{late:?}");
}

pub async fn queues_are_listed_by_prefix_and_page_by_page(aws: &Aws) {
    let client = Client::new(&config(aws));
    let mut made = Vec::new();
    for name in ["listed-a", "listed-b", "listed-c"] {
        made.push(create(&client, name, None).await.unwrap());
    }
    create(&client, "unlisted", None).await.unwrap();
    let (mut listed, mut pages, mut next) = (Vec::new(), 0, None);
    loop {
        let list = client.list_queues().queue_name_prefix("listed-").max_results(2).set_next_token(next);
        let page = list.send().await.unwrap();
        listed.extend(page.queue_urls.unwrap_or_default());
        pages += 1;
        next = page.next_token;
        if next.is_none() {
            break;
        }
    }
    listed.sort();
    assert_eq!((listed, pages), (made, 2));
}

pub async fn a_message_ends_the_wait_of_a_receiver(aws: &Aws) {
    let client = Client::new(&config(aws));
    let url = create(&client, "awaited", None).await.unwrap();
    let began = std::time::Instant::now();
    let waiting = tokio::spawn(client.receive_message().queue_url(&url).wait_time_seconds(20).send());
    tokio::time::sleep(Duration::from_millis(300)).await;
    client.send_message().queue_url(&url).message_body("{}").send().await.unwrap();
    let received = waiting.await.unwrap().unwrap();
    assert_eq!(received.messages().len(), 1);
    assert!(began.elapsed() < Duration::from_secs(15), "the receiver has waited for its whole time");
}
