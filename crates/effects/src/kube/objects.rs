//! Object writes with optimistic concurrency: a stale view cannot undo later changes.

use std::fmt::Debug;

use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
    core::NamespaceResourceScope,
};
use paddock_core::api::{FIELD_MANAGER, FINALIZER};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;

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

/// A request to the API server that failed.
#[derive(Debug, thiserror::Error)]
#[error("{request}: {source}")]
pub struct KubeError {
    request: String,
    source: kube::Error,
}

impl KubeError {
    /// `request` describes the failure, such as "cannot create the pod".
    pub fn new(request: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        |source| Self { request: request.into(), source }
    }
}

impl KubeError {
    /// Whether the API server refused the request for good; see [`is_refusal`].
    pub fn is_refusal(&self) -> bool {
        is_refusal(&self.source)
    }
}

type Result<T> = std::result::Result<T, KubeError>;

/// Creates an object, unless there is one of its name.
pub async fn create<K: Object + Serialize>(client: &Client, object: &K) -> Result<()> {
    let parameters = PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() };
    match api(client, object).create(&parameters, object).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => Err(KubeError::new(cannot_write("", object))(error)),
    }
}

/// Whether a write was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    Yes,
    /// The object has changed or was deleted; its watch event triggers the next reconcile.
    Stale,
}

pub fn api<K: Object>(client: &Client, object: &K) -> Api<K> {
    Api::namespaced(client.clone(), &object.namespace().unwrap_or_default())
}

/// Writes a changed status over exactly the observed version.
pub async fn write_status<K: Object, S: Serialize + PartialEq>(
    client: &Client,
    object: &K,
    old: Option<&S>,
    new: &S,
) -> Result<Written> {
    if old == Some(new) {
        return Ok(Written::Yes);
    }
    replace_status(client, object, new).await.map(written)
}

/// Writes the status over exactly the observed version; returns the new version, or `None` if the object was stale.
pub async fn replace_status<K: Object>(client: &Client, object: &K, new: &impl Serialize) -> Result<Option<K>> {
    let patch = json!({
        "apiVersion": K::api_version(&()), "kind": K::kind(&()),
        "metadata": {"resourceVersion": object.resource_version()},
        "status": new,
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    let outcome = api(client, object).patch_status(&object.name_any(), &parameters, &Patch::Apply(patch)).await;
    unless_stale(outcome).map_err(KubeError::new(cannot_write("the status of ", object)))
}

pub fn has_finalizer<K: Object>(object: &K) -> bool {
    object.finalizers().iter().any(|finalizer| finalizer == FINALIZER)
}

/// Adds the finalizer; returns the new version, or `None` if the object was stale.
pub async fn add_finalizer<K: Object>(client: &Client, object: &K) -> Result<Option<K>> {
    let finalizers = object.finalizers().iter().cloned().chain([FINALIZER.into()]).collect();
    set_finalizers(client, object, finalizers).await
}

pub async fn remove_finalizer<K: Object>(client: &Client, object: &K) -> Result<Written> {
    let finalizers = object.finalizers().iter().filter(|finalizer| *finalizer != FINALIZER).cloned().collect();
    set_finalizers(client, object, finalizers).await.map(written)
}

async fn set_finalizers<K: Object>(client: &Client, object: &K, finalizers: Vec<String>) -> Result<Option<K>> {
    let patch = json!({"metadata": {"resourceVersion": object.resource_version(), "finalizers": finalizers}});
    let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
    let outcome = api(client, object).patch(&object.name_any(), &parameters, &Patch::Merge(patch)).await;
    unless_stale(outcome).map_err(KubeError::new(cannot_write("", object)))
}

fn unless_stale<K>(outcome: kube::Result<K>) -> kube::Result<Option<K>> {
    match outcome {
        Ok(object) => Ok(Some(object)),
        Err(kube::Error::Api(status)) if status.is_conflict() || status.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

fn written<K>(object: Option<K>) -> Written {
    if object.is_some() { Written::Yes } else { Written::Stale }
}

fn cannot_write<K: Object>(what: &str, object: &K) -> String {
    let namespace = object.namespace().unwrap_or_default();
    format!("cannot write {what}{} {namespace}/{}", K::kind(&()), object.name_any())
}

/// Deletes by name; not found is a success.
pub async fn delete<K: Object>(api: &Api<K>, name: &str) -> Result<()> {
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => Err(KubeError::new(format!("cannot delete {} {name}", K::kind(&())))(error)),
    }
}

/// Deletes exactly this object, not another one of its name; one that is gone is a success.
pub async fn delete_exactly<K: Object>(api: &Api<K>, object: &K, parameters: DeleteParams) -> Result<()> {
    let preconditions = Some(Preconditions { uid: object.uid(), resource_version: None });
    match api.delete(&object.name_any(), &DeleteParams { preconditions, ..parameters }).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        Err(error) => Err(KubeError::new(format!("cannot delete {} {}", K::kind(&()), object.name_any()))(error)),
    }
}

/// Whether the API server rejected the request for good, as opposed to being busy or unreachable: what is asked for is
/// wrong, not allowed, beyond a quota, or an admission webhook denies it or does not answer. Such a webhook may choose any
/// status code.
pub fn is_refusal(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    let admission = ["admission webhook", "failed calling webhook"].iter().any(|words| status.message.contains(words));
    admission || matches!(status.code, 400 | 402 | 403 | 405 | 406 | 411..=418 | 422)
}

/// Whether a pod is refused because its service account does not exist yet, as in a new namespace. The message is that
/// of the ServiceAccount admission plugin (plugin/pkg/admission/serviceaccount/admission.go, v1.35.4).
pub fn lacks_service_account(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status)
        if status.code == 403 && status.message.contains("error looking up service account"))
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn a_missing_service_account_differs_from_other_refusals() {
        let answer = |code, message: &str| kube::Error::Api(Status::failure(message, "").with_code(code).boxed());
        for (code, message) in
            [(403, "pods \"a\" is forbidden: exceeded quota"), (422, "spec.containers: Required value")]
        {
            let refusal = answer(code, message);
            assert!(is_refusal(&refusal) && !lacks_service_account(&refusal), "{message}");
        }
        let missing = "pods \"a\" is forbidden: error looking up service account ci/default: serviceaccount \"default\" not found";
        assert!(lacks_service_account(&answer(403, missing)));
        for (code, message) in [
            (500, "Internal error occurred: failed calling webhook \"policy.example\": connection refused"),
            (409, "admission webhook \"policy.example\" denied the request: no"),
        ] {
            assert!(is_refusal(&answer(code, message)), "{message}");
        }
        assert!(!is_refusal(&answer(409, "the object has been modified")));
        assert!(!is_refusal(&answer(503, "busy")) && !lacks_service_account(&answer(503, missing)));
    }
}
