//! AWS's own description of its services: `service-2.json` of botocore, in the version that is pinned with moto. SDKs are
//! made from it.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use regex::Regex;
use serde::Deserialize;

use crate::call::Service;

/// What the model of one service says, without its documentation, which is most of it.
pub struct Model {
    operations: HashMap<String, Operation>,
    shapes: HashMap<String, Shape>,
}

#[derive(Deserialize)]
pub struct Operation {
    pub input: Option<Reference>,
    pub output: Option<Reference>,
    #[cfg(test)]
    #[serde(default)]
    errors: Vec<Reference>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reference {
    shape: String,
    /// Its name in messages, where it is not the member's.
    pub location_name: Option<String>,
    query_name: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawShape {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    members: HashMap<String, Reference>,
    #[serde(default)]
    required: Vec<String>,
    member: Option<Reference>,
    key: Option<Reference>,
    value: Option<Reference>,
    #[serde(default, rename = "enum")]
    values: HashSet<String>,
    min: Option<f64>,
    max: Option<f64>,
    pattern: Option<String>,
}

pub struct Shape {
    pub kind: Kind,
    /// The range of a number, or of the length of a text, list or map.
    pub min: f64,
    pub max: f64,
    pub values: HashSet<String>,
    pub pattern: Option<Regex>,
}

pub enum Kind {
    Structure {
        members: HashMap<String, Reference>,
        required: Vec<String>,
        /// The members by their elements in XML, and by their keys in a form.
        elements: HashMap<String, String>,
        keys: HashMap<String, String>,
    },
    List(Reference),
    Map {
        key: Reference,
        value: Reference,
    },
    Text,
    Blob,
    Boolean,
    Integer,
    Float,
    Timestamp,
}

impl Reference {
    /// Its key in a request of EC2's query protocol (EC2QuerySerializer in botocore's serialize.py).
    fn key(&self, member: &str) -> String {
        let capitalised = |name: &str| name[..1].to_uppercase() + &name[1..];
        self.query_name.clone().or(self.location_name.as_deref().map(capitalised)).unwrap_or_else(|| member.to_owned())
    }

    fn element(&self, member: &str) -> String {
        self.location_name.clone().unwrap_or_else(|| member.to_owned())
    }
}

#[derive(Deserialize)]
struct Raw {
    operations: HashMap<String, Operation>,
    shapes: HashMap<String, RawShape>,
}

impl Model {
    pub fn of_botocore(packages: &Path, service: Service) -> Result<Self> {
        let directory = match service {
            Service::DynamoDb => "dynamodb/2012-08-10",
            Service::Ec2 => "ec2/2016-11-15",
            Service::Sqs => "sqs/2012-11-05",
        };
        let file = packages.join("botocore/data").join(directory).join("service-2.json.gz");
        Self::parse(&unzipped(&file)?).with_context(|| format!("{}", file.display()))
    }

    pub fn parse(text: &[u8]) -> Result<Self> {
        let Raw { operations, shapes } = serde_json::from_slice(text)?;
        let shapes = shapes.into_iter().map(|(name, raw)| Ok((name, Shape::new(raw)?)));
        Ok(Self { operations, shapes: shapes.collect::<Result<_>>()? })
    }

    pub fn operation(&self, name: &str) -> Option<&Operation> {
        self.operations.get(name)
    }

    pub fn shape(&self, reference: &Reference) -> &Shape {
        &self.shapes[&reference.shape]
    }

    /// Whether an operation has this error in its list. EC2's operations have none.
    #[cfg(test)]
    pub fn lists_error(&self, operation: &str, code: &str) -> bool {
        self.operation(operation).is_some_and(|known| known.errors.iter().any(|error| error.shape == code))
    }
}

impl Shape {
    fn new(raw: RawShape) -> Result<Self> {
        let missing = "a shape without what it is made of";
        let kind = match raw.kind.as_str() {
            "structure" => {
                let named = |name_of: fn(&Reference, &str) -> String| {
                    raw.members.iter().map(|(name, member)| (name_of(member, name), name.clone())).collect()
                };
                let (elements, keys) = (named(Reference::element), named(Reference::key));
                Kind::Structure { elements, keys, members: raw.members, required: raw.required }
            }
            "list" => Kind::List(raw.member.context(missing)?),
            "map" => Kind::Map { key: raw.key.context(missing)?, value: raw.value.context(missing)? },
            "string" | "character" => Kind::Text,
            "blob" => Kind::Blob,
            "boolean" => Kind::Boolean,
            "integer" | "long" => Kind::Integer,
            "float" | "double" => Kind::Float,
            "timestamp" => Kind::Timestamp,
            other => anyhow::bail!("a shape of type {other}"),
        };
        // A pattern is of Java. The few that do not compile here belong to operations that the bed does not have.
        let pattern = raw.pattern.and_then(|pattern| Regex::new(&format!("^(?:{pattern})$")).ok());
        let (min, max) = (raw.min.unwrap_or(f64::MIN), raw.max.unwrap_or(f64::MAX));
        Ok(Self { kind, min, max, values: raw.values, pattern })
    }
}

/// The content of a `.gz` file.
pub fn unzipped(file: &Path) -> Result<Vec<u8>> {
    let output = Command::new("gzip").arg("-dc").arg(file).output().context("gzip")?;
    ensure!(output.status.success(), "cannot read {}", file.display());
    Ok(output.stdout)
}
