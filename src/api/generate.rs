//! Files made from the types: the CRDs.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt;

use super::{RunnerClaim, RunnerPool, Worker};

/// The three CRDs as they are installed.
pub fn crds() -> Vec<CustomResourceDefinition> {
    [RunnerPool::crd(), RunnerClaim::crd(), Worker::crd()].map(finish).into()
}

/// Each CRD as YAML, with the name of its file in `crds/`.
pub fn crds_yaml() -> Vec<(String, String)> {
    crds()
        .into_iter()
        .map(|crd| {
            let name = format!("{}_{}.yaml", crd.spec.group, crd.spec.names.plural);
            let yaml = serde_saphyr::to_string(&crd).expect("a CRD is plain data");
            (name, format!("# Generated from src/api by `make generate`.\n{yaml}"))
        })
        .collect()
}

fn finish(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    for version in &mut crd.spec.versions {
        if let Some(schema) = version.schema.as_mut().and_then(|s| s.open_api_v3_schema.as_mut()) {
            plain(schema);
        }
    }
    crd
}

/// Says what the derived schema means in words that the API server knows. `null` is the same as leaving a field out
/// (the server drops it from fields that are not nullable), and formats of Rust's unsigned integers are unknown to it.
fn plain(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    if schema.format.as_deref().is_some_and(|format| format.starts_with("uint")) {
        schema.format = None;
    }
    schema.properties.iter_mut().flat_map(|properties| properties.values_mut()).for_each(plain);
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(items)) => plain(items),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items.iter_mut().for_each(plain),
        None => {}
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        plain(values);
    }
}
