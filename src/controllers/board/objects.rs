//! Writing objects so that a stale view cannot undo what happened since.

use std::fmt::Debug;

use anyhow::{Context as _, Result};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
    core::NamespaceResourceScope,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;

use crate::api::{FIELD_MANAGER, FINALIZER};

pub trait Object:
    Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
}

impl<K> Object for K where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Send
        + Sync
        + 'static
{
}

/// Whether a write took place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    Yes,
    /// The object is not as it was seen, or is gone: look again when the news comes.
    Stale,
}

pub fn api<K: Object>(client: &Client, object: &K) -> Api<K> {
    Api::namespaced(client.clone(), &object.namespace().unwrap_or_default())
}

/// The status over exactly the version that was seen; nothing where nothing changed.
pub async fn write_status<K: Object, S: Serialize + PartialEq>(
    client: &Client,
    object: &K,
    old: Option<&S>,
    new: &S,
) -> Result<Written> {
    if old == Some(new) {
        return Ok(Written::Yes);
    }
    let patch = json!({
        "apiVersion": K::api_version(&()), "kind": K::kind(&()),
        "metadata": {"resourceVersion": object.resource_version()},
        "status": new,
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    told(object, api(client, object).patch_status(&object.name_any(), &parameters, &Patch::Apply(patch)).await)
}

pub fn has_finalizer<K: Object>(object: &K) -> bool {
    object.finalizers().iter().any(|finalizer| finalizer == FINALIZER)
}

pub async fn add_finalizer<K: Object>(client: &Client, object: &K) -> Result<Written> {
    let finalizers = object.finalizers().iter().cloned().chain([FINALIZER.into()]).collect();
    set_finalizers(client, object, finalizers).await
}

pub async fn remove_finalizer<K: Object>(client: &Client, object: &K) -> Result<Written> {
    let finalizers = object.finalizers().iter().filter(|finalizer| *finalizer != FINALIZER).cloned().collect();
    set_finalizers(client, object, finalizers).await
}

async fn set_finalizers<K: Object>(client: &Client, object: &K, finalizers: Vec<String>) -> Result<Written> {
    let patch = json!({"metadata": {"resourceVersion": object.resource_version(), "finalizers": finalizers}});
    let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
    told(object, api(client, object).patch(&object.name_any(), &parameters, &Patch::Merge(patch)).await)
}

fn told<K: Object>(object: &K, outcome: kube::Result<K>) -> Result<Written> {
    match outcome {
        Ok(_) => Ok(Written::Yes),
        Err(kube::Error::Api(status)) if status.is_conflict() || status.is_not_found() => Ok(Written::Stale),
        Err(error) => Err(error).with_context(|| format!("cannot write {} {}", K::kind(&()), object.name_any())),
    }
}

/// Deletes by name; one that is gone is deleted.
pub async fn delete<K: Object>(api: &Api<K>, name: &str) -> Result<()> {
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot delete {} {name}", K::kind(&()))),
    }
}

/// Whether the API server itself said no, and would again; not that it was busy or did not answer.
pub fn is_refusal(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 400 | 403 | 422))
}
