//! The CRDs, generated from the types.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube_core::CustomResourceExt;
use serde_json::Value;

use super::{RunnerClaim, RunnerPool, Worker};

/// The three CRDs as they are installed.
pub fn crds() -> Vec<CustomResourceDefinition> {
    [RunnerPool::crd(), RunnerClaim::crd(), Worker::crd()].map(finish).into()
}

/// Each CRD as YAML, with the name of its file in `crds/`.
pub fn crds_yaml() -> Vec<(String, String)> {
    crds()
        .iter()
        .map(|crd| {
            let name = format!("{}_{}.yaml", crd.spec.group, crd.spec.names.plural);
            let mut data = serde_json::to_value(crd).expect("a CRD is plain data");
            whole_numbers(&mut data);
            let yaml = serde_saphyr::to_string(&data).expect("JSON is YAML");
            (name, format!("# Generated from crates/core/src/api by `make generate`.\n{yaml}"))
        })
        .collect()
}

fn finish(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    for version in &mut crd.spec.versions {
        if let Some(schema) = version.schema.as_mut().and_then(|s| s.open_api_v3_schema.as_mut()) {
            normalize(schema);
        }
    }
    crd
}

/// Normalizes the derived schema for the API server. `null` is the same as leaving a field out (the server drops it
/// from fields that are not nullable), formats of Rust's unsigned integers are unknown to it, and `kubectl explain`
/// breaks lines itself.
fn normalize(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    schema.enum_.iter_mut().for_each(|values| values.retain(|value| !value.0.is_null()));
    if let Some(text) = &mut schema.description {
        *text = text.replace('\n', " ");
    }
    if schema.format.as_deref().is_some_and(|format| format.starts_with("uint")) {
        schema.format = None;
    }
    schema.properties.iter_mut().flat_map(|properties| properties.values_mut()).for_each(normalize);
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(items)) => normalize(items),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items.iter_mut().for_each(normalize),
        None => {}
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        normalize(values);
    }
}

/// Writes whole floats as integers: `minimum: 1`, not `minimum: 1.0`.
fn whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            if let Some(float) = number.as_f64().filter(|float| float.fract() == 0.0) {
                *number = (float as i64).into();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(whole_numbers),
        Value::Object(fields) => fields.values_mut().for_each(whole_numbers),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}
