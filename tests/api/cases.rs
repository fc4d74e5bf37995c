//! `refused.yaml` and `accepted.yaml`, one test for each entry.

use std::{collections::BTreeMap, fs, sync::Arc};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use paddock::api;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    Shared,
    server::{Server, root},
    test,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    rule: String,
    from: String,
    #[serde(default)]
    change: Value,
    #[serde(default)]
    then: Value,
    #[serde(default)]
    says: String,
}

pub fn tests(shared: &Arc<Shared>) -> Result<Vec<Trial>> {
    let objects = Arc::new(objects()?);
    let refused = read("refused.yaml")?;
    let mut tests = vec![every_rule_is_shown(&refused)];
    for (number, case) in refused.into_iter().enumerate() {
        let objects = objects.clone();
        let name = format!("refused::{}", case.rule.replace(' ', "_"));
        tests.push(test(shared, name, move |shared| async move {
            let answer = run(shared.server(), &objects, &case, &format!("refused-{number}")).await?;
            let Err(answer) = answer else { bail!("the server accepts it") };
            ensure!(answer.contains(&case.says), "the server says: {answer}");
            Ok(())
        }));
    }
    for (number, case) in read("accepted.yaml")?.into_iter().enumerate() {
        let objects = objects.clone();
        let name = format!("accepted::{}", case.rule.replace(' ', "_"));
        tests.push(test(shared, name, move |shared| async move {
            match run(shared.server(), &objects, &case, &format!("accepted-{number}")).await? {
                Ok((sent, stored)) => contains(&stored, &sent, ""),
                Err(answer) => bail!("the server refuses it: {answer}"),
            }
        }));
    }
    Ok(tests)
}

/// Each CEL rule has a message, and each message is expected by an entry of `refused.yaml`.
fn every_rule_is_shown(refused: &[Case]) -> Trial {
    let shown: Vec<_> = refused.iter().map(|case| case.says.clone()).collect();
    Trial::test("refused::every_rule_is_shown", move || {
        fn messages(value: &Value, found: &mut Vec<String>) {
            match value {
                Value::Object(fields) => {
                    for rule in fields.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten() {
                        found.push(rule["message"].as_str().expect("a message for a person").to_owned());
                    }
                    fields.values().for_each(|value| messages(value, found));
                }
                Value::Array(items) => items.iter().for_each(|item| messages(item, found)),
                _ => {}
            }
        }
        let mut found = vec![];
        messages(&json!(api::crds()), &mut found);
        found.retain(|message| !shown.iter().any(|says| says.contains(message.as_str())));
        if found.is_empty() { Ok(()) } else { Err(format!("no refused YAML shows {found:#?}").into()) }
    })
}

/// Creates the changed object and updates it if the case says so: what was sent, and what the server has stored.
async fn run(
    server: &Server,
    objects: &BTreeMap<String, Value>,
    case: &Case,
    name: &str,
) -> Result<Result<(Value, Value), String>> {
    let mut sent = objects.get(&case.from).with_context(|| format!("no object {}", case.from))?.clone();
    let renames = case.change["metadata"]["name"].is_string();
    merge(&mut sent, &case.change);
    if case.then.is_null() {
        return Ok(server.create(&sent, true).await.map(|stored| (sent, stored)));
    }
    if !renames {
        sent["metadata"]["name"] = json!(name);
    }
    server.create(&sent, false).await.map_err(anyhow::Error::msg)?;
    let answer = server.patch(&sent, None, &case.then).await;
    server.delete(&sent).await?;
    merge(&mut sent, &case.then);
    Ok(answer.map(|stored| (sent, stored)))
}

/// That everything in `part` is in `whole` as it is.
pub fn contains(whole: &Value, part: &Value, path: &str) -> Result<()> {
    match part {
        Value::Object(fields) => fields.iter().try_for_each(|(k, v)| contains(&whole[k], v, &format!("{path}.{k}"))),
        part => {
            ensure!(whole == part, "{path} is {whole}, not {part}");
            Ok(())
        }
    }
}

/// The examples by file, and the objects of `whole.yaml` by name.
pub fn objects() -> Result<BTreeMap<String, Value>> {
    let mut objects = BTreeMap::new();
    for file in fs::read_dir(root().join("examples"))? {
        let path = file?.path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            let stem = path.file_stem().and_then(|stem| stem.to_str()).context("a file name")?;
            objects.insert(stem.to_owned(), serde_saphyr::from_str(&fs::read_to_string(&path)?)?);
        }
    }
    for object in whole()? {
        objects.insert(crate::server::name(&object).to_owned(), object);
    }
    Ok(objects)
}

pub fn whole() -> Result<Vec<Value>> {
    Ok(serde_saphyr::from_multiple(&fs::read_to_string(root().join("tests/api/whole.yaml"))?)?)
}

fn read(file: &str) -> Result<Vec<Case>> {
    let text = fs::read_to_string(root().join("tests/api").join(file))?;
    serde_saphyr::from_str(&text).with_context(|| file.to_owned())
}

/// A JSON merge patch.
fn merge(object: &mut Value, patch: &Value) {
    match patch {
        Value::Object(fields) => {
            for (key, value) in fields {
                match (value, object.as_object_mut()) {
                    (Value::Null, Some(object)) => drop(object.remove(key)),
                    _ => merge(&mut object[key], value),
                }
            }
        }
        Value::Null => {}
        patch => *object = patch.clone(),
    }
}
