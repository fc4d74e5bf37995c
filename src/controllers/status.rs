//! Writing to Kubernetes: server-side apply by one manager, and nothing when nothing changed.

use std::fmt::Debug;

use anyhow::{Context as _, Result};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams},
    core::NamespaceResourceScope,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;

use crate::api::FIELD_MANAGER;

/// Applies the status of a namespaced object, if it differs from the one that is there.
pub async fn apply<K, S>(client: &Client, object: &K, old: Option<&S>, new: &S) -> Result<()>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
    S: Serialize + PartialEq,
{
    if old == Some(new) {
        return Ok(());
    }
    let (name, namespace) = (object.name_any(), object.namespace().unwrap_or_default());
    let patch = json!({ "apiVersion": K::api_version(&()), "kind": K::kind(&()), "status": new });
    let api: Api<K> = Api::namespaced(client.clone(), &namespace);
    api.patch_status(&name, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(patch))
        .await
        .with_context(|| format!("cannot write the status of {} {namespace}/{name}", K::kind(&())))?;
    Ok(())
}
