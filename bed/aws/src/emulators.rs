//! The three emulators behind the front, started at the same time.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use futures::{FutureExt, future::BoxFuture};
use paddock_bed_process::{Process, free_port, tool};
use reqwest::Client;

use crate::{form::Form, front::EC2_CREDENTIAL};

/// Generous, for a cold machine that compiles at the same time; an idle one takes about five seconds.
const START_DEADLINE: Duration = Duration::from_secs(300);

/// A port that was free a moment ago may be taken when the emulator comes to it.
const START_ATTEMPTS: u32 = 3;

/// What Java and Python say of such a port. ElasticMQ says it and lives on.
const PORT_TAKEN: &str = "Address already in use";

/// Neither DynamoDB Local nor ElasticMQ checks the signature.
const CREDENTIAL: &str =
    "AWS4-HMAC-SHA256 Credential=bed/20260101/us-east-1/dynamodb/aws4_request, SignedHeaders=host, Signature=bed";

pub struct Emulator {
    pub url: String,
    process: Process,
}

impl Emulator {
    pub fn log(&self) -> &Path {
        self.process.log()
    }
}

/// Amazon's own DynamoDB Local: its conditional writes are truly atomic.
pub async fn dynamodb(dir: &Path, http: &Client) -> Result<Emulator> {
    let jars = fetch("dynamodb").await?;
    let command = |port: u16| {
        let mut command = java(dir);
        command.arg(format!("-Djava.library.path={}", jars.display())).arg("-cp").arg(jars.join("*"));
        command.arg("com.amazonaws.services.dynamodbv2.local.main.ServerRunner");
        command.args(["-inMemory", "-sharedDb", "-disableTelemetry", "-port", &port.to_string()]);
        Ok(command)
    };
    start("dynamodb", dir, command, carries_out(http, "DynamoDB_20120810.ListTables")).await
}

/// ElasticMQ, whose queue URLs lead back to the front.
pub async fn sqs(dir: &Path, http: &Client, front: u16) -> Result<Emulator> {
    let jars = fetch("elasticmq").await?;
    let command = |port: u16| {
        let config = dir.join("elasticmq.conf");
        let text = format!(
            r#"include classpath("application.conf")
node-address {{ protocol = http, host = "127.0.0.1", port = {front}, context-path = "" }}
rest-sqs {{ enabled = true, bind-hostname = "127.0.0.1", bind-port = {port}, sqs-limits = strict }}
rest-stats {{ enabled = false }}
aws {{ region = us-east-1, accountId = "000000000000" }}
"#
        );
        fs::write(&config, text)?;
        let mut command = java(dir);
        command.arg(format!("-Dconfig.file={}", config.display())).arg("-cp").arg(jars.join("*"));
        command.arg("org.elasticmq.server.Main");
        Ok(command)
    };
    start("elasticmq", dir, command, carries_out(http, "AmazonSQS.ListQueues")).await
}

/// moto, for EC2 alone; it looks up nothing outside and knows only the images that are registered.
pub async fn ec2(dir: &Path, http: &Client) -> Result<Emulator> {
    let packages = fetch("moto").await?;
    let command = |port: u16| {
        let mut command = Command::new("python3");
        command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()]);
        command.env("PYTHONPATH", &packages).env("PYTHONUNBUFFERED", "1");
        command.env("MOTO_EC2_LOAD_DEFAULT_AMIS", "false").env("MOTO_ENABLE_AMI_VALIDATION", "true");
        command.env("AWS_EC2_METADATA_DISABLED", "true");
        Ok(command)
    };
    // The first EC2 call loads half of moto: made here, no client waits for it.
    let probe = Form::action("DescribeSubnets").encode();
    let answers = |url: String| {
        let call = http.post(url).header("authorization", EC2_CREDENTIAL).body(probe.clone()).send();
        async { call.await.is_ok_and(|answer| answer.status().is_success()) }.boxed()
    };
    start("moto", dir, command, answers).await
}

async fn start(
    name: &str,
    dir: &Path,
    command: impl Fn(u16) -> Result<Command>,
    ready: impl Fn(String) -> BoxFuture<'static, bool>,
) -> Result<Emulator> {
    let mut attempt = 1;
    loop {
        let port = free_port()?;
        let url = format!("http://127.0.0.1:{port}/");
        let own_log = if attempt == 1 { name.to_owned() } else { format!("{name}-{attempt}") };
        let mut process = Process::spawn(&own_log, command(port)?, &dir.join("log"))?;
        let log = process.log().to_owned();
        let taken = || fs::read_to_string(&log).is_ok_and(|text| text.contains(PORT_TAKEN));
        let settled = || {
            let (taken, answer) = (taken(), ready(url.clone()));
            async move { taken || answer.await }
        };
        let outcome = process.until_ready(START_DEADLINE, settled).await;
        // What answers may be the one that has the port.
        let failed = taken() || process.exited().is_some();
        match outcome {
            Ok(()) if !failed => return Ok(Emulator { url, process }),
            _ if failed && attempt < START_ATTEMPTS => attempt += 1,
            Ok(()) => bail!("{name} has no port to listen on; see {}", log.display()),
            Err(error) => return Err(error).context(format!("see {}", log.display())),
        }
    }
}

/// Ready when it carries out a call: the first one takes long, and none of ours is to wait for it.
fn carries_out(http: &Client, target: &'static str) -> impl Fn(String) -> BoxFuture<'static, bool> {
    let http = http.clone();
    move |url| {
        let call = http.post(url).header("x-amz-target", target).header("authorization", CREDENTIAL);
        let call = call.header("content-type", "application/x-amz-json-1.0").body("{}").send();
        async { call.await.is_ok_and(|answer| answer.status().is_success()) }.boxed()
    }
}

/// The tool may have to be fetched first, which takes its time.
async fn fetch(name: &'static str) -> Result<PathBuf> {
    tokio::task::spawn_blocking(move || tool(name)).await?
}

/// A JVM that starts fast, stays small and leaves no file outside the bed's directory.
fn java(dir: &Path) -> Command {
    let mut command = Command::new("java");
    command.args(["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Xmx256m", "-XX:-UsePerfData"]);
    command.arg(format!("-Djava.io.tmpdir={}", dir.display()));
    command
}
