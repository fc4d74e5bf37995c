//! Shared by the tests: the emulated AWS, its clients, and waiting.

use std::{
    future::Future,
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use aws_config::{BehaviorVersion, Region, SdkConfig, retry::RetryConfig, timeout::TimeoutConfig};
use aws_sdk_dynamodb::{config::Credentials, config::SharedCredentialsProvider};
use paddock_bed_aws::Aws;
use paddock_bed_process::wait::Wait;
use roxmltree::Document;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Far longer than any step takes, even on a slow machine.
const DEADLINE: Duration = Duration::from_secs(180);

static AWS: Mutex<Option<(Arc<Aws>, TempDir)>> = Mutex::new(None);

/// Runs a test on its own runtime against the shared AWS.
pub fn run(test: impl AsyncFnOnce(&Aws)) {
    let runtime = Runtime::new().unwrap();
    let aws = {
        let mut shared = AWS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (aws, _) = shared.get_or_insert_with(|| {
            let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            clean_up_after_us(dir.path());
            (Arc::new(runtime.block_on(Aws::start(dir.path())).unwrap()), dir)
        });
        aws.clone()
    };
    runtime.block_on(test(&aws));
}

/// Removes `dir` when this program ends, even if it is killed: the janitor process sees a pipe close.
fn clean_up_after_us(dir: &Path) {
    let mut janitor = Command::new("sh");
    janitor.args(["-c", r#"cat; rm -rf "$0""#]).arg(dir).stdin(Stdio::piped()).process_group(0);
    janitor.stdout(Stdio::null()).stderr(Stdio::null());
    // The pipe stays open until the program ends.
    std::mem::forget(janitor.spawn().unwrap().stdin);
}

/// Stops the shared AWS and removes its files. Returns what was not as AWS has it.
pub fn stop() -> Vec<String> {
    let shared = AWS.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
    shared.map_or_else(Vec::new, |(aws, _)| Runtime::new().unwrap().block_on(aws.violations()))
}

/// A client configuration without retries, so that faults are visible. The default connect timeout is a few seconds.
pub fn config(aws: &Aws) -> SdkConfig {
    SdkConfig::builder()
        .behavior_version(BehaviorVersion::latest())
        .endpoint_url(aws.endpoint())
        .region(Region::from_static("us-east-1"))
        .retry_config(RetryConfig::disabled())
        .timeout_config(TimeoutConfig::builder().connect_timeout(DEADLINE).build())
        .credentials_provider(SharedCredentialsProvider::new(Credentials::new("AKIABED", "bed", None, None, "bed")))
        .build()
}

pub fn http() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().unwrap()
}

/// Sends an EC2 request; returns the status and the body.
pub async fn ec2(aws: &Aws, action: &str, fields: &[(&str, &str)]) -> (u16, String) {
    let form: Vec<_> = [("Action", action), ("Version", "2016-11-15")].iter().chain(fields).copied().collect();
    let answer = http().post(aws.endpoint()).form(&form).send().await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

/// The texts of all elements with this name, in order.
pub fn texts(xml: &str, name: &str) -> Vec<String> {
    let document = Document::parse(xml).unwrap_or_else(|error| panic!("{error}: {xml}"));
    let found = document.descendants().filter(|node| node.tag_name().name() == name);
    found.filter_map(|node| Some(node.text()?.to_owned())).collect()
}

/// Polls until there is a result.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut ask: impl FnMut() -> F) -> T {
    let found = Wait::at_most(DEADLINE).until(what, async || Ok(ask().await)).await;
    found.unwrap_or_else(|error| panic!("{error:#}"))
}
