//! DynamoDB as AWS has it, where DynamoDB Local differs.

use serde_json::{Map, Value, json};

use crate::{
    PARTITION, REGION,
    call::{Answer, Call},
    faults::Effect,
    front::{Front, Outcome},
};

/// More than DynamoDB answers about a table of ours.
const TABLE_ANSWER_MAX: usize = 8 << 10;

pub async fn perform(front: &Front, call: &Call, quirk: Option<Effect>) -> Outcome<Answer> {
    match (quirk, call.action.as_str()) {
        (Some(Effect::Unprocessed { processed }), "BatchGetItem") => in_part(front, call, "Keys", processed).await,
        (Some(Effect::Unprocessed { processed }), "BatchWriteItem") => in_part(front, call, "", processed).await,
        _ => Ok(in_our_region(front.forward(call, call.body.clone()).await?)),
    }
}

/// Carries out the first items of a batch and leaves the others to the caller. DynamoDB processes at least one, or
/// throttles the whole call.
async fn in_part(front: &Front, call: &Call, list: &str, processed: usize) -> Outcome<Answer> {
    let mut request: Value = serde_json::from_slice(&call.body)?;
    let (mut left, mut unprocessed) = (processed.max(1), Map::new());
    for (table, wanted) in request["RequestItems"].as_object_mut().into_iter().flatten() {
        let items = if list.is_empty() { &mut *wanted } else { &mut wanted[list] };
        let items = items.as_array_mut().map(std::mem::take).unwrap_or_default();
        let (now, later) = items.split_at(left.min(items.len()));
        left -= now.len();
        let with = |part: &[Value]| match list {
            "" => json!(part),
            list => {
                let mut whole = wanted.clone();
                whole[list] = json!(part);
                whole
            }
        };
        if !later.is_empty() {
            unprocessed.insert(table.clone(), with(later));
        }
        *wanted = with(now);
    }
    let empty = |wanted: &Value| wanted.as_array().or(wanted[list].as_array()).is_none_or(Vec::is_empty);
    if let Some(tables) = request["RequestItems"].as_object_mut() {
        tables.retain(|_, wanted| !empty(wanted));
    }
    let answer = front.forward(call, request.to_string().into()).await?;
    if !answer.ok() {
        return Ok(answer);
    }
    let mut result: Value = serde_json::from_slice(&answer.body)?;
    result[if list.is_empty() { "UnprocessedItems" } else { "UnprocessedKeys" }] = Value::Object(unprocessed);
    Ok(Answer::json(&result))
}

/// The answer with ARNs of tables as AWS would have them: DynamoDB Local has a region of its own.
fn in_our_region(mut answer: Answer) -> Answer {
    const LOCAL: &str = "arn:aws:dynamodb:ddblocal:";
    // Answers about tables are short. Those with items may be large, and have no ARN.
    if answer.body.len() < TABLE_ANSWER_MAX
        && let Ok(text) = std::str::from_utf8(&answer.body)
        && text.contains(LOCAL)
    {
        answer.headers.remove("x-amz-crc32");
        answer.body = text.replace(LOCAL, &format!("arn:{PARTITION}:dynamodb:{REGION}:")).into();
    }
    answer
}
