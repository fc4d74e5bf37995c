//! An API server with the CRDs of `crds/`, and short ways to ask it.

use std::{
    io::Write,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use kube::{
    Client,
    core::{
        Request,
        params::{ListParams, Patch, PatchParams, PostParams, ValidationDirective},
    },
};
use paddock_bed::{kube::ControlPlane, process::tool, wait::Wait};
use serde_json::Value;
use tempfile::TempDir;

/// Longer than anything takes on a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);

pub struct Server {
    pub client: Client,
    kubectl: PathBuf,
    kubeconfig: PathBuf,
    _plane: ControlPlane,
    dir: TempDir,
}

/// The root of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("PADDOCK_SOURCE"))
}

impl Server {
    pub async fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let plane = ControlPlane::start(dir.path(), Ipv4Addr::LOCALHOST).await?;
        let (client, kubeconfig) = (plane.client(), plane.kubeconfig());
        let server = Self { client, kubectl: tool("kubectl")?, kubeconfig, _plane: plane, dir };
        let crds = root().join("crds");
        let applied = server.kubectl(&["apply", "--server-side", "-f", crds.to_str().context("crds/")?], "")?;
        let (out, warnings) = (String::from_utf8(applied.stdout)?, String::from_utf8(applied.stderr)?);
        ensure!(applied.status.success(), "the API server refuses the CRDs: {warnings}");
        ensure!(warnings.is_empty(), "the API server warns about the CRDs: {warnings}");
        ensure!(out.lines().count() == 3, "three CRDs should be applied: {out}");
        let wait = server.kubectl(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=120s"], "")?;
        ensure!(wait.status.success(), "{}", String::from_utf8_lossy(&wait.stderr));
        let wait = Wait::at_most(DEADLINE).every(Duration::from_millis(100));
        wait.until_ok("the API server serves the CRDs", async || server.serves_all().await).await?;
        Ok(server)
    }

    /// Whether every kind is served, listed and explained, which comes a moment after its CRD is established.
    async fn serves_all(&self) -> Result<()> {
        for kinds in ["runnerpools", "runnerclaims", "workers"] {
            let place = Request::new(format!("/apis/paddock.dev/v1alpha1/namespaces/default/{kinds}"));
            self.client.request::<Value>(place.list(&ListParams::default())?).await?;
            self.kubectl_text(&["explain", &format!("{kinds}.spec")])?;
        }
        let listed = self.kubectl_text(&["api-resources", "--api-group=paddock.dev", "--output=name"])?;
        ensure!(listed.lines().count() == 3, "three kinds should be listed: {listed}");
        Ok(())
    }

    /// Creates the object under strict field validation, as `kubectl apply` does; the answer, or what the server says.
    pub async fn create(&self, object: &Value, dry_run: bool) -> Result<Value, String> {
        let params = PostParams { dry_run, ..PostParams::default() };
        let body = serde_json::to_vec(object).expect("JSON");
        let mut request = Request::new(path(object)).create(&params, body).expect("a request");
        let strict = format!("{}&fieldValidation=Strict", request.uri());
        *request.uri_mut() = strict.parse().expect("a path and query");
        self.client.request(request).await.map_err(message)
    }

    /// Applies a JSON merge patch to the object of this name and kind, or to its `status`.
    pub async fn patch(&self, object: &Value, subresource: Option<&str>, patch: &Value) -> Result<Value, String> {
        let params = PatchParams { field_validation: Some(ValidationDirective::Strict), ..PatchParams::default() };
        let (name, patch) = (name(object), Patch::Merge(patch));
        let url = Request::new(path(object));
        let request = match subresource {
            Some(part) => url.patch_subresource(part, name, &params, &patch),
            None => url.patch(name, &params, &patch),
        };
        self.client.request(request.expect("a request")).await.map_err(message)
    }

    pub async fn delete(&self, object: &Value) -> Result<()> {
        let request = Request::new(path(object)).delete(name(object), &Default::default())?;
        self.client.request::<Value>(request).await?;
        Ok(())
    }

    /// Runs `kubectl` with `input` as its standard input.
    pub fn kubectl(&self, args: &[&str], input: &str) -> Result<Output> {
        let mut child = Command::new(&self.kubectl)
            .args(args)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", self.dir.path()) // its cache of what the server can do
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        child.stdin.take().context("stdin")?.write_all(input.as_bytes())?;
        Ok(child.wait_with_output()?)
    }

    /// What `kubectl` prints, given that it succeeds.
    pub fn kubectl_text(&self, args: &[&str]) -> Result<String> {
        let output = self.kubectl(args, "")?;
        ensure!(output.status.success(), "kubectl {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// Where objects of this one's kind are.
fn path(object: &Value) -> String {
    let kind = object["kind"].as_str().expect("a kind").to_lowercase();
    let group = match object["apiVersion"].as_str().expect("an apiVersion") {
        "v1" => "api/v1".into(),
        group => format!("apis/{group}"),
    };
    format!("/{group}/namespaces/default/{kind}s")
}

pub fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().expect("a name")
}

fn message(error: kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message,
        other => other.to_string(),
    }
}
