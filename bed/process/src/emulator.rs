//! Emulators of AWS services, each started on a free port.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use reqwest::Client;

use crate::{Process, free_port, tool};

/// Generous for a busy machine; an idle one takes about five seconds.
const START_DEADLINE: Duration = Duration::from_secs(300);

/// Another program may take a free port before the emulator listens on it.
const START_ATTEMPTS: u32 = 3;

/// The error of Java and Python for such a port. ElasticMQ logs it and keeps running.
const PORT_TAKEN: &str = "Address already in use";

/// Neither DynamoDB Local nor ElasticMQ checks the signature.
const CREDENTIAL: &str =
    "AWS4-HMAC-SHA256 Credential=bed/20260101/us-east-1/dynamodb/aws4_request, SignedHeaders=host, Signature=bed";

pub struct Emulator {
    pub url: String,
    process: Process,
}

impl Emulator {
    /// Starts `command` with its log below `dir`, and waits until `is_ready` returns true for its URL.
    pub async fn start<F: Future<Output = bool>>(
        name: &str,
        dir: &Path,
        command: impl Fn(u16) -> Result<Command>,
        is_ready: impl Fn(String) -> F,
    ) -> Result<Self> {
        let mut attempt = 1;
        loop {
            let port = free_port()?;
            let url = format!("http://127.0.0.1:{port}/");
            let own_log = if attempt == 1 { name.to_owned() } else { format!("{name}-{attempt}") };
            let mut process = Process::spawn(&own_log, command(port)?, &dir.join("log"))?;
            let log = process.log().to_owned();
            let taken = || fs::read_to_string(&log).is_ok_and(|text| text.contains(PORT_TAKEN));
            let answered = || {
                let (taken, ready) = (taken(), is_ready(url.clone()));
                async move { taken || ready.await }
            };
            let outcome = process.until_ready(START_DEADLINE, answered).await;
            // Another program that has taken the port may have answered.
            let failed = taken() || process.exited().is_some();
            match outcome {
                Ok(()) if !failed => return Ok(Self { url, process }),
                _ if failed && attempt < START_ATTEMPTS => attempt += 1,
                Ok(()) => bail!("{name} has no port to listen on; see {}", log.display()),
                Err(error) => return Err(error).context(format!("see {}", log.display())),
            }
        }
    }

    /// Amazon's DynamoDB Local, whose conditional writes are atomic.
    pub async fn dynamodb(dir: &Path, http: &Client) -> Result<Self> {
        let jars = fetch("dynamodb").await?;
        let command = |port: u16| {
            let mut command = java(dir);
            command.arg(format!("-Djava.library.path={}", jars.display())).arg("-cp").arg(jars.join("*"));
            command.arg("com.amazonaws.services.dynamodbv2.local.main.ServerRunner");
            command.args(["-inMemory", "-sharedDb", "-disableTelemetry", "-port", &port.to_string()]);
            Ok(command)
        };
        let is_ready = |url| serves(http.clone(), url, "DynamoDB_20120810.ListTables");
        Self::start("dynamodb", dir, command, is_ready).await
    }

    pub fn log(&self) -> &Path {
        self.process.log()
    }
}

/// Whether a DynamoDB or SQS emulator answers a call. The first call is slow; made here, it delays no client.
pub async fn serves(http: Client, url: String, target: &'static str) -> bool {
    let call = http.post(url).header("x-amz-target", target).header("authorization", CREDENTIAL);
    let call = call.header("content-type", "application/x-amz-json-1.0").body("{}");
    call.send().await.is_ok_and(|answer| answer.status().is_success())
}

/// The path of a tool, which may have to be downloaded first.
pub async fn fetch(name: &'static str) -> Result<PathBuf> {
    tokio::task::spawn_blocking(move || tool(name)).await?
}

/// A JVM that starts fast, uses little memory and writes no file outside `dir`.
pub fn java(dir: &Path) -> Command {
    let mut command = Command::new("java");
    command.args(["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Xmx256m", "-XX:-UsePerfData"]);
    command.arg(format!("-Djava.io.tmpdir={}", dir.display()));
    command
}
