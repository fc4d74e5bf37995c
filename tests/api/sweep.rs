//! Every limit of every field, broken one at a time: the schemas say what to try, `whole.yaml` where.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt, stream};
use libtest_mimic::Trial;
use paddock::api;
use serde_json::{Value, json};

use crate::{Shared, cases, server, test};

/// How many requests are under way at once: enough to keep a small machine busy.
const CONCURRENCY: usize = 8;

/// Fields that exclude another one.
const EITHER: [&str; 4] = ["ec2", "board", "ssmParameter", "repository"];

/// One way to break one limit: the object, the field that the answer must name, and a word that it must use.
struct Break {
    object: Value,
    field: String,
    how: &'static str,
    says: &'static str,
}

pub fn tests(shared: &Arc<Shared>) -> Result<Vec<Trial>> {
    let schemas: Value = json!(api::crds());
    cases::whole()?
        .into_iter()
        .map(|object| {
            let crd =
                schemas.as_array().into_iter().flatten().find(|crd| crd["spec"]["names"]["kind"] == object["kind"]);
            let crd = crd.context("a kind of ours")?;
            let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
            let mut breaks = vec![];
            walk(&object, &["spec".to_owned()], schema, &mut breaks)?;
            let name = format!("sweep::{}::every_limit_is_kept", server::name(&object));
            Ok(test(shared, name, move |shared| async move { all_refused(&shared, breaks).await }))
        })
        .collect()
}

async fn all_refused(shared: &Shared, breaks: Vec<Break>) -> Result<()> {
    let count = breaks.len();
    let accepted: Vec<String> = stream::iter(breaks)
        .map(|case| async move {
            let what = format!("{}: {}", case.field, case.how);
            match shared.server().create(&case.object, true).await {
                Ok(_) => Some(format!("{what}: accepted")),
                Err(message) if message.contains(&case.field) && message.contains(case.says) => None,
                Err(message) => Some(format!("{what}: {}", message.chars().take(500).collect::<String>())),
            }
        })
        .buffer_unordered(CONCURRENCY)
        .filter_map(async |failure| failure)
        .collect()
        .await;
    ensure!(accepted.is_empty(), "{} of {count}:\n{}", accepted.len(), accepted.join("\n"));
    Ok(())
}

/// Adds the breaks of the field at `path` and of all inside it.
fn walk(whole: &Value, path: &[String], schema: &Value, breaks: &mut Vec<Break>) -> Result<()> {
    let pointer = format!("/{}", path.iter().map(|part| part.replace('/', "~1")).collect::<Vec<_>>().join("/"));
    let value = whole.pointer(&pointer).with_context(|| format!("whole.yaml has no {pointer}"))?;
    let mut add = |how, value: Value, says| {
        let mut object = whole.clone();
        *object.pointer_mut(&pointer).expect("it is there") = value;
        breaks.push(Break { object, field: field(path), how, says });
    };
    let number = |keyword: &str| schema[keyword].as_f64().map(|number| number as i64);
    match schema["type"].as_str() {
        Some("string") => {
            add("wrong type", json!(7), "must be of type string");
            if !schema["enum"].is_null() {
                add("no such value", json!("nonsense"), "Unsupported value");
                add("a megabyte", json!("a".repeat(1 << 20)), "Unsupported value");
            }
            if let Some(max) = number("maxLength") {
                add("one too long", json!("a".repeat(max as usize + 1)), "Too long: may not be more than");
                add("a megabyte", json!("a".repeat(1 << 20)), "Too long: may not be more than");
            }
            if number("minLength").is_some_and(|min| min > 0) {
                add("empty", json!(""), "should be at least");
            }
            if !schema["pattern"].is_null() {
                add("a NUL", json!("\0"), "should match");
            }
        }
        Some("integer") => {
            add("wrong type", json!("7"), "must be of type integer");
            add("a fraction", json!(1.5), "must be of type integer");
            let min = number("minimum").with_context(|| format!("{pointer} has no minimum"))?;
            add("too small", json!(min - 1), "should be greater than or equal to");
            match number("maximum") {
                Some(max) => add("too large", json!(max + 1), "should be less than or equal to"),
                None => ensure!(schema["format"] == "int64", "{pointer} has no maximum"),
            }
        }
        Some("boolean") => add("wrong type", json!("yes"), "must be of type boolean"),
        Some("array") => {
            let items =
                value.as_array().filter(|items| !items.is_empty()).with_context(|| format!("{pointer} is empty"))?;
            add("wrong type", json!("a"), "must be of type array");
            if number("minItems").is_some_and(|min| min > 0) {
                add("empty", json!([]), "should have at least");
            }
            let max = number("maxItems").with_context(|| format!("{pointer} has no maxItems"))?;
            add("one too many", json!(vec![&items[0]; max as usize + 1]), "must have at most");
            if schema["x-kubernetes-list-type"] != "atomic" {
                let mut twice = items.clone();
                twice.push(items[0].clone());
                add("twice the same", json!(twice), "Duplicate value");
            }
            walk(whole, &[path, &["0".to_owned()]].concat(), &schema["items"], breaks)?;
        }
        Some("object") => {
            add("wrong type", json!("a"), "must be of type object");
            for (name, part) in schema["properties"].as_object().into_iter().flatten() {
                let inner = [path, std::slice::from_ref(name)].concat();
                // Where only one of two may be set, the other one is in another object, or in refused.yaml.
                if EITHER.contains(&name.as_str()) && value.get(name).is_none() {
                    continue;
                }
                // It is refused, whatever it is.
                if part["description"].as_str().is_some_and(|text| text.starts_with("Moved to ")) {
                    continue;
                }
                walk(whole, &inner, part, breaks)?;
                if schema["required"].as_array().into_iter().flatten().any(|required| required == name) {
                    let mut object = whole.clone();
                    object.pointer_mut(&pointer).and_then(Value::as_object_mut).context("an object")?.remove(name);
                    breaks.push(Break { object, field: field(&inner), how: "missing", says: "Required value" });
                }
            }
            match &schema["additionalProperties"] {
                Value::Null => {
                    let mut object = whole.clone();
                    object.pointer_mut(&pointer).expect("it is there")["bogus"] = json!(1);
                    let field = field(&[path, &["bogus".to_owned()]].concat());
                    breaks.push(Break { object, field, how: "unknown", says: "unknown field" });
                }
                values => {
                    let max = number("maxProperties").with_context(|| format!("{pointer} has no maxProperties"))?;
                    let many: serde_json::Map<_, _> = (0..=max).map(|n| (format!("k{n}"), json!("v"))).collect();
                    let mut object = whole.clone();
                    *object.pointer_mut(&pointer).expect("it is there") = json!(many);
                    breaks.push(Break { object, field: field(path), how: "too many", says: "must have at most" });
                    let key = value.as_object().and_then(|map| map.keys().next()).context("an entry")?;
                    walk(whole, &[path, std::slice::from_ref(key)].concat(), values, breaks)?;
                }
            }
        }
        other => bail!("{pointer} has the type {other:?}"),
    }
    Ok(())
}

/// The field as the server writes it: `spec.ec2.subnetIds[0]`.
fn field(path: &[String]) -> String {
    let mut text = String::new();
    for part in path {
        match part.parse::<usize>() {
            Ok(index) => text.push_str(&format!("[{index}]")),
            Err(_) if text.is_empty() => text.push_str(part),
            Err(_) => text.push_str(&format!(".{part}")),
        }
    }
    text
}
