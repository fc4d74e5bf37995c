//! `docs/reference.md`, generated from the same schemas as the CRDs, so that the two cannot differ.

use std::fmt::Write;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};

use super::{ClaimReason, FailureReason, PoolReason, common::pattern, crds};

const INTRODUCTION: &str = "\
<!-- Generated from crates/core/src/api by `make generate`. -->
# API reference

Every field of the three kinds, with what the API server enforces. `kubectl explain rclaim.spec` says the same in a
terminal. Unknown fields are refused under strict field validation, which `kubectl` asks for by default, and dropped
otherwise. A duration is whole hours, minutes and seconds (`30s`, `10m`, `1h30m`) from 1s to 8784h; a time is ISO-8601
in UTC.
";

/// The whole reference as Markdown.
pub fn reference_markdown() -> String {
    let mut out = INTRODUCTION.to_owned();
    crds().iter().for_each(|crd| kind(&mut out, crd));
    reasons(&mut out, "Reasons of a pool's `Ready` condition", PoolReason::ALL, PoolReason::as_str);
    reasons(&mut out, "Reasons of a claim's `Ready` condition", ClaimReason::ALL, ClaimReason::as_str);
    reasons(&mut out, "Reasons of a worker's `failure`", FailureReason::ALL, FailureReason::as_str);
    out
}

fn kind(out: &mut String, crd: &CustomResourceDefinition) {
    let names = &crd.spec.names;
    let short = names.short_names.iter().flatten().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    for version in &crd.spec.versions {
        let Some(schema) = version.schema.as_ref().and_then(|s| s.open_api_v3_schema.as_ref()) else { continue };
        let description = schema.description.as_deref().unwrap_or_default();
        let api_version = format!("{}/{}", crd.spec.group, version.name);
        put(out, format_args!("\n## {}\n\n`{api_version}`, short name {short}. {description}\n", names.kind));
        rules(out, schema);
        let selectable = version.selectable_fields.iter().flatten().map(|field| format!("`{}`", &field.json_path[1..]));
        match selectable.collect::<Vec<_>>().join(", ") {
            none if none.is_empty() => {}
            fields => put(out, format_args!("\nField selectors: {fields}.\n")),
        }
        for (name, part) in schema.properties.iter().flatten() {
            object(out, name, part);
        }
    }
}

/// A heading, the rules and a table for this object, then the same for the objects inside it.
fn object(out: &mut String, path: &str, schema: &JSONSchemaProps) {
    let Some(properties) = schema.properties.as_ref().filter(|properties| !properties.is_empty()) else { return };
    put(out, format_args!("\n### `{path}`\n"));
    schema.description.iter().for_each(|text| put(out, format_args!("\n{text}\n")));
    rules(out, schema);
    out.push_str("\n| field | type | default | meaning |\n|---|---|---|---|\n");
    for (name, field) in properties {
        let required = schema.required.iter().flatten().any(|required| required == name);
        let default = match &field.default {
            _ if required => "required".into(),
            Some(default) if field.properties.is_none() => format!("`{}`", cell(&plain(&default.0))),
            _ => String::new(),
        };
        let description = cell(field.description.as_deref().unwrap_or_default());
        let limits = limits(field);
        let meaning = if limits.is_empty() { description } else { format!("{description} *{limits}.*") };
        put(out, format_args!("| `{name}` | {} | {default} | {meaning} |\n", type_name(field)));
    }
    for (name, field) in properties {
        match element(field) {
            Some(items) => object(out, &format!("{path}.{name}[]"), items),
            None => object(out, &format!("{path}.{name}"), field),
        }
    }
}

/// The CEL rules of an object, as their messages.
fn rules(out: &mut String, schema: &JSONSchemaProps) {
    let messages = messages(schema);
    if !messages.is_empty() {
        out.push('\n');
        messages.iter().for_each(|message| put(out, format_args!("- {message}\n")));
    }
}

fn messages(schema: &JSONSchemaProps) -> Vec<&str> {
    schema.x_kubernetes_validations.iter().flatten().filter_map(|rule| rule.message.as_deref()).collect()
}

/// The schema of the elements of a list or map.
fn element(schema: &JSONSchemaProps) -> Option<&JSONSchemaProps> {
    match (&schema.items, &schema.additional_properties) {
        (Some(JSONSchemaPropsOrArray::Schema(items)), _) => Some(items),
        (_, Some(JSONSchemaPropsOrBool::Schema(values))) => Some(values),
        _ => None,
    }
}

fn type_name(schema: &JSONSchemaProps) -> String {
    match (schema.type_.as_deref(), schema.format.as_deref()) {
        (Some("array"), _) => format!("list of {}", element(schema).map(plural).unwrap_or_default()),
        (Some("object"), _) if element(schema).is_some() => "map of strings".into(),
        (Some("string"), Some("date-time")) => "time".into(),
        (Some("string"), _) if is_duration(schema) => "duration".into(),
        (Some(name), _) => name.into(),
        (None, _) => String::new(),
    }
}

fn plural(schema: &JSONSchemaProps) -> String {
    match element(schema) {
        Some(items) => format!("lists of {}", plural(items)),
        None => format!("{}s", type_name(schema)),
    }
}

fn is_duration(schema: &JSONSchemaProps) -> bool {
    schema.pattern.as_deref() == Some(pattern::DURATION)
}

/// The limits that the API server checks for a field, as text.
fn limits(schema: &JSONSchemaProps) -> String {
    let mut limits = Vec::new();
    if !is_duration(schema) && schema.properties.is_none() {
        limits.extend(between(schema.min_items, schema.max_items, "items"));
        limits.extend(between(schema.min_length, schema.max_length, "characters"));
        limits.extend(between(None, schema.max_properties, "entries"));
        limits.extend(between(schema.minimum.map(|n| n as i64), schema.maximum.map(|n| n as i64), ""));
        limits.extend(schema.pattern.as_deref().map(|pattern| format!("matches `{}`", cell(pattern))));
        limits.extend(messages(schema).into_iter().map(str::to_owned));
    }
    let values = schema.enum_.iter().flatten().map(|value| format!("`{}`", value.0.as_str().unwrap_or_default()));
    match values.collect::<Vec<_>>().join(", ") {
        none if none.is_empty() => {}
        values => limits.push(format!("one of {values}")),
    }
    limits
        .extend(element(schema).map(self::limits).filter(|each| !each.is_empty()).map(|each| format!("each: {each}")));
    limits.join("; ")
}

fn between(min: Option<i64>, max: Option<i64>, what: &str) -> Option<String> {
    let text = match (min.filter(|min| *min > 0 || what.is_empty()), max) {
        (Some(min), Some(max)) => format!("{min} to {max} {what}"),
        (Some(min), None) => format!("at least {min} {what}"),
        (None, Some(max)) => format!("at most {max} {what}"),
        (None, None) => return None,
    };
    Some(text.trim_end().to_owned())
}

fn reasons<R: Copy>(out: &mut String, title: &str, all: &[(R, &str)], as_str: fn(R) -> &'static str) {
    put(out, format_args!("\n## {title}\n\n| reason | meaning |\n|---|---|\n"));
    for (reason, meaning) in all {
        put(out, format_args!("| `{}` | {} |\n", as_str(*reason), meaning.trim()));
    }
}

/// A default as it is written in YAML.
fn plain(value: &serde_json::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Escapes `|`, which would end the table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn put(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("writing to a String cannot fail");
}
