//! The bed as a program outside has it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use paddock_bed::{
    kube::succeeded,
    process::{spawn, tool},
    stage::binary,
};
use serde_json::Value;

use crate::processes::{pids, started, stat};

/// Longer than anything takes on a machine with busy cores.
const DEADLINE: Duration = Duration::from_secs(300);

/// Few, so that a job more than these reaches the real kubelet.
pub const SIMULATED_NODES: usize = 2;

pub struct Bed {
    pub child: Child,
    pub env_file: PathBuf,
    pub env: BTreeMap<String, String>,
    pub http: reqwest::Client,
}

impl Bed {
    pub fn start() -> Result<Self> {
        let mut command = Command::new(binary("paddock-bed")?);
        command.args(["serve", "--nodes", &SIMULATED_NODES.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = spawn(command)?; // it dies with this program, should that be killed
        let stdout = BufReader::new(child.stdout.take().context("standard output is a pipe")?);
        let (sender, line) = mpsc::channel();
        std::thread::spawn(move || sender.send(stdout.lines().next()));
        let http = reqwest::Client::builder().no_proxy().timeout(DEADLINE).build()?;
        let mut bed = Self { child, env_file: PathBuf::new(), env: BTreeMap::new(), http };
        let line = line.recv_timeout(2 * DEADLINE).context("it printed nothing")?.context("it ended")?;
        bed.env_file = line?.into();
        bed.env = sourced(&bed.env_file)?;
        Ok(bed)
    }

    pub fn var(&self, name: &str) -> &str {
        self.env.get(name).map_or("", String::as_str)
    }

    /// `NAME/path`, where the variable has an address.
    pub fn url(&self, name: &str, path: &str) -> String {
        format!("{}{path}", self.var(name))
    }

    pub async fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let mut command = tokio::process::Command::new(tool("kubectl")?);
        command.args(arguments).args(["-n", self.var("BED_NAMESPACE")]).env("KUBECONFIG", self.var("KUBECONFIG"));
        let home = tempfile::tempdir()?; // for its caches
        let output = command.env("HOME", home.path()).kill_on_drop(true).output().await?;
        succeeded(&format!("kubectl {arguments:?}"), output)
    }

    pub async fn kubectl_json(&self, arguments: &[&str]) -> Result<Value> {
        Ok(serde_json::from_str(&self.kubectl(&[arguments, &["-o", "json"]].concat()).await?)?)
    }

    /// The pool that has this field in its spec.
    pub async fn pool(&self, kind: &str) -> Result<Value> {
        let pools = self.kubectl_json(&["get", "rpools"]).await?;
        let found = pools["items"].as_array().into_iter().flatten().find(|pool| pool["spec"].get(kind).is_some());
        found.cloned().with_context(|| format!("no pool of kind {kind} in {pools}"))
    }

    pub async fn get(&self, url: &str) -> Result<Value> {
        let (status, text) = self.call("GET", url, "").await?;
        ensure!(status == 200, "GET {url}: {status} {text}");
        serde_json::from_str(&text).with_context(|| format!("GET {url}: {text}"))
    }

    pub async fn call(&self, method: &str, url: &str, body: &str) -> Result<(u16, String)> {
        let request = self.http.request(method.parse()?, url).header("content-type", "application/json");
        let answer = request.body(body.to_owned()).send().await?;
        Ok((answer.status().as_u16(), answer.text().await?))
    }

    /// An admin call of the bed that must succeed.
    pub async fn admin(&self, method: &str, path: &str, body: Value) -> Result<()> {
        let (status, text) = self.call(method, &self.url("BED_ADMIN_URL", path), &body.to_string()).await?;
        ensure!(status == 200, "{method} {path}: {status} {text}");
        Ok(())
    }

    /// The machines' states by their ids.
    pub async fn machines(&self) -> Result<BTreeMap<String, String>> {
        let machines = self.get(&self.url("BED_ADMIN_URL", "/machines")).await?;
        let text = |machine: &Value, key: &str| machine[key].as_str().unwrap_or_default().to_owned();
        Ok(machines.as_array().into_iter().flatten().map(|it| (text(it, "id"), text(it, "state"))).collect())
    }

    pub async fn operator_log(&self) -> Result<String> {
        Ok(self.call("GET", &self.url("BED_ADMIN_URL", "/operator/log"), "").await?.1)
    }

    /// All processes of the bed, with the moment each was started.
    pub fn processes(&self) -> BTreeMap<u32, String> {
        let parents: Vec<(u32, u32)> = pids().filter_map(|pid| Some((pid, stat(pid)?.get(1)?.parse().ok()?))).collect();
        let mut found = BTreeSet::from([self.child.id()]);
        loop {
            let before = found.len();
            found.extend(
                parents.iter().filter(|(_, parent)| found.contains(parent)).map(|(pid, _)| *pid).collect::<Vec<_>>(),
            );
            if found.len() == before {
                return found.into_iter().filter_map(|pid| Some((pid, started(pid)?))).collect();
            }
        }
    }

    pub fn operator(&self) -> Option<u32> {
        let is_operator = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<_> = line.split(|byte| *byte == 0).collect();
            words.first().is_some_and(|program| program.ends_with(b"/paddock")) && words.get(1) == Some(&&b"run"[..])
        };
        self.processes().into_keys().find(is_operator)
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a shell that reads the file passes on to its children.
fn sourced(file: &Path) -> Result<BTreeMap<String, String>> {
    let mut shell = Command::new("sh");
    shell.args(["-euc", ". \"$0\"; env -0"]).arg(file).env_clear().env("PATH", std::env::var("PATH")?);
    let text = succeeded("reading the env file", shell.output()?)?;
    let pairs = text.split('\0').filter_map(|line| line.split_once('='));
    Ok(pairs
        .filter(|(name, _)| !["PATH", "PWD", "_", "SHLVL", "OLDPWD"].contains(name))
        .map(|(n, v)| (n.into(), v.into()))
        .collect())
}

/// Looks again and again until there is something; what failed is looked at again, too.
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    let mut last = None;
    while start.elapsed() < DEADLINE {
        match look().await {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => last = None,
            Err(error) => last = Some(error),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    bail!("not within {DEADLINE:?}: {what} ({last:?})")
}
