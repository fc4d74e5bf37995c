//! Compares a request or an answer with AWS's service model.

use std::fmt;

use base64::{Engine, engine::general_purpose::STANDARD};
use roxmltree::Node;
use serde_json::{Map, Value};

use crate::{
    form::Form,
    model::{Kind, Model, Reference, Shape},
};

/// How many violations of one message are told.
const TOLD_MAX: usize = 5;

/// Numbers, times and truth values are texts in XML and in forms, and have JSON's own types in JSON.
#[derive(Clone, Copy, PartialEq)]
pub enum Scalars {
    Text,
    Json,
}

/// Limits are for requests. AWS itself answers `"UnprocessedKeys": {}` and `"NumberOfDecreasesToday": 0` (examples in the
/// DynamoDB API reference), where the model has a minimum of 1.
#[derive(Clone, Copy, PartialEq)]
pub enum Side {
    Request,
    Answer,
}

/// One message, with the violations found so far.
pub struct Check<'a> {
    model: &'a Model,
    scalars: Scalars,
    side: Side,
    found: Vec<String>,
}

/// Where in a message: spelled only when there is something to tell.
#[derive(Clone, Copy)]
enum Path<'a> {
    Root,
    Member(&'a Path<'a>, &'a str),
    Item(&'a Path<'a>),
    Key(&'a Path<'a>),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => write!(f, "it"),
            Self::Member(Path::Root, name) => write!(f, "{name}"),
            Self::Member(parent, name) => write!(f, "{parent}.{name}"),
            Self::Item(parent) => write!(f, "{parent}[]"),
            Self::Key(parent) => write!(f, "{parent}[key]"),
        }
    }
}

impl<'a> Check<'a> {
    pub fn new(model: &'a Model, scalars: Scalars, side: Side) -> Self {
        Self { model, scalars, side, found: Vec::new() }
    }

    pub fn json(mut self, reference: Option<&Reference>, body: &[u8]) -> Vec<String> {
        match (reference, serde_json::from_slice(body)) {
            (Some(reference), Ok(value)) => self.value(reference, &value, &Path::Root),
            // An operation without output answers nothing, or an empty object.
            (None, Ok(Value::Object(members))) if members.is_empty() => {}
            (None, _) if body.is_empty() => {}
            (None, Ok(_)) => self.add(&Path::Root, "has content"),
            (_, Err(_)) => self.add(&Path::Root, "is no JSON"),
        }
        self.found
    }

    /// A request in EC2's query protocol.
    pub fn form(mut self, reference: &Reference, form: &Form) -> Vec<String> {
        let mut form = form.clone();
        form.remove("Action");
        form.remove("Version");
        let value = self.of_form(reference, &form, &Path::Root);
        self.value(reference, &value, &Path::Root);
        self.found
    }

    /// An answer of EC2. Every one has a `requestId`, which is in no model.
    pub fn xml(mut self, reference: Option<&Reference>, root: Node<'_, '_>) -> Vec<String> {
        if let Some(reference) = reference {
            let value = self.of_xml(reference, root, &Path::Root);
            self.value(reference, &value, &Path::Root);
        }
        self.found
    }

    fn add(&mut self, path: &Path<'_>, what: &str) {
        if self.found.len() < TOLD_MAX {
            self.found.push(format!("{path} {what}"));
        }
    }

    /// A form as a tree with members' names.
    fn of_form(&mut self, reference: &Reference, form: &Form, path: &Path<'_>) -> Value {
        match &self.model.shape(reference).kind {
            Kind::Structure { members, keys, .. } => {
                let mut object = Map::new();
                for key in form.heads() {
                    match keys.get(key) {
                        Some(name) => {
                            let value = self.of_form(&members[name], &form.part(key), &Path::Member(path, name));
                            object.insert(name.clone(), value);
                        }
                        None => self.add(&Path::Member(path, key), "is no member"),
                    }
                }
                Value::Object(object)
            }
            Kind::List(member) => {
                if form.get("").is_some_and(|text| !text.is_empty()) {
                    self.add(path, "is no numbered list");
                }
                form.parts().iter().map(|item| self.of_form(member, item, &Path::Item(path))).collect()
            }
            _ => form.get("").map_or(Value::Null, Value::from),
        }
    }

    /// An element as a tree with members' names.
    fn of_xml(&mut self, reference: &Reference, node: Node<'_, '_>, path: &Path<'_>) -> Value {
        let elements = node.children().filter(Node::is_element);
        match &self.model.shape(reference).kind {
            Kind::Structure { members, elements: names, .. } => {
                let mut object = Map::new();
                for element in elements {
                    let tag = element.tag_name().name();
                    match names.get(tag) {
                        Some(name) => {
                            let value = self.of_xml(&members[name], element, &Path::Member(path, name));
                            if object.insert(name.clone(), value).is_some() {
                                self.add(&Path::Member(path, name), "is there twice");
                            }
                        }
                        None if matches!(path, Path::Root) && tag == "requestId" => {}
                        None => self.add(&Path::Member(path, tag), "is no member"),
                    }
                }
                Value::Object(object)
            }
            Kind::List(member) => {
                let wanted = member.location_name.as_deref().unwrap_or("member");
                let mut items = Vec::new();
                for element in elements {
                    if element.tag_name().name() != wanted {
                        self.add(path, &format!("has an element {}", element.tag_name().name()));
                    }
                    items.push(self.of_xml(member, element, &Path::Item(path)));
                }
                Value::Array(items)
            }
            _ if elements.count() > 0 => Value::Object(Map::new()),
            _ => node.text().unwrap_or_default().into(),
        }
    }

    fn value(&mut self, reference: &Reference, value: &Value, path: &Path<'_>) {
        let shape = self.model.shape(reference);
        match (&shape.kind, value) {
            (Kind::Structure { members, required, .. }, Value::Object(given)) => {
                for (name, value) in given.iter().filter(|(_, value)| !value.is_null()) {
                    match members.get(name) {
                        Some(member) => self.value(member, value, &Path::Member(path, name)),
                        None => self.add(&Path::Member(path, name), "is no member"),
                    }
                }
                for name in required.iter().filter(|name| given.get(*name).is_none_or(Value::is_null)) {
                    self.add(&Path::Member(path, name), "is missing");
                }
            }
            (Kind::List(member), Value::Array(items)) => {
                self.range(shape, items.len() as f64, path);
                items.iter().for_each(|item| self.value(member, item, &Path::Item(path)));
            }
            (Kind::Map { key, value }, Value::Object(given)) => {
                self.range(shape, given.len() as f64, path);
                for (name, item) in given {
                    self.text(self.model.shape(key), name, &Path::Key(path));
                    self.value(value, item, &Path::Item(path));
                }
            }
            (Kind::Text, Value::String(text)) => self.text(shape, text, path),
            (Kind::Blob, Value::String(text)) if STANDARD.decode(text).is_ok() => {}
            (kind, Value::String(text)) if self.scalars == Scalars::Text => self.scalar(shape, kind, text, path),
            (Kind::Boolean, Value::Bool(_)) => {}
            (Kind::Integer, Value::Number(number)) if number.is_f64() => self.add(path, "is no integer"),
            (Kind::Integer | Kind::Float | Kind::Timestamp, Value::Number(number)) => {
                self.range(shape, number.as_f64().unwrap_or_default(), path);
            }
            (kind, _) => self.add(path, &format!("is no {}", kind.name())),
        }
    }

    fn text(&mut self, shape: &Shape, text: &str, path: &Path<'_>) {
        self.range(shape, text.chars().count() as f64, path);
        if !shape.values.is_empty() && !shape.values.contains(text) {
            self.add(path, &format!("is {text:?}, which is no value of its enum"));
        }
        if shape.pattern.as_ref().is_some_and(|pattern| !pattern.is_match(text)) {
            self.add(path, &format!("is {text:?}, which does not match its pattern"));
        }
    }

    /// A number, time or truth value as text.
    fn scalar(&mut self, shape: &Shape, kind: &Kind, text: &str, path: &Path<'_>) {
        let number = match kind {
            Kind::Integer => text.parse::<i64>().ok().map(|number| number as f64),
            Kind::Float => text.parse().ok(),
            Kind::Boolean => ["true", "false"].contains(&text).then_some(0.0),
            Kind::Timestamp => text.parse::<jiff::Timestamp>().ok().map(|_| 0.0),
            _ => None,
        };
        match (kind, number) {
            (_, None) => self.add(path, &format!("is {text:?}, which is no {}", kind.name())),
            (Kind::Integer | Kind::Float, Some(number)) => self.range(shape, number, path),
            _ => {}
        }
    }

    fn range(&mut self, shape: &Shape, size: f64, path: &Path<'_>) {
        if self.side == Side::Request && !(shape.min..=shape.max).contains(&size) {
            self.add(path, &format!("is of size {size}, out of its range {:e}..={:e}", shape.min, shape.max));
        }
    }
}

impl Kind {
    fn name(&self) -> &'static str {
        match self {
            Self::Structure { .. } => "structure",
            Self::List(_) => "list",
            Self::Map { .. } => "map",
            Self::Text => "text",
            Self::Blob => "base64",
            Self::Boolean => "truth value",
            Self::Integer => "integer",
            Self::Float => "number",
            Self::Timestamp => "time",
        }
    }
}
