//! The emulators of SQS and EC2 behind the front end.

use std::{fs, path::Path, process::Command};

use anyhow::Result;
use paddock_bed_process::emulator::{Emulator, fetch, java, serves};
use reqwest::Client;

use crate::{form::Form, front::EC2_CREDENTIAL};

/// ElasticMQ, whose queue URLs point to the front end.
pub async fn sqs(dir: &Path, http: &Client, front: u16) -> Result<Emulator> {
    let jars = fetch("elasticmq").await?;
    let command = |port: u16| {
        let config = dir.join("elasticmq.conf");
        let text = format!(
            r#"include classpath("application.conf")
node-address {{ protocol = http, host = "127.0.0.1", port = {front}, context-path = "" }}
rest-sqs {{ enabled = true, bind-hostname = "127.0.0.1", bind-port = {port}, sqs-limits = strict }}
rest-stats {{ enabled = false }}
pekko.http.server.request-timeout = 60s
aws {{ region = us-east-1, accountId = "000000000000" }}
"#
        );
        fs::write(&config, text)?;
        let mut command = java(dir);
        command.arg(format!("-Dconfig.file={}", config.display())).arg("-cp").arg(jars.join("*"));
        command.arg("org.elasticmq.server.Main");
        Ok(command)
    };
    Emulator::start("elasticmq", dir, command, |url| serves(http.clone(), url, "AmazonSQS.ListQueues")).await
}

/// moto, for EC2 only. It makes no outside requests and knows only registered images.
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
    // The first EC2 call is slow because it loads most of moto; made here, it delays no client.
    let probe = Form::action("DescribeSubnets").encode();
    let is_ready = |url: String| {
        let call = http.post(url).header("authorization", EC2_CREDENTIAL).body(probe.clone()).send();
        async { call.await.is_ok_and(|answer| answer.status().is_success()) }
    };
    Emulator::start("moto", dir, command, is_ready).await
}
