//! The AWS part of the test bed: DynamoDB, SQS and EC2 behind one endpoint with fault injection, and simulated machines
//! that run the launched instances.

mod admin;
mod call;
mod capacity;
mod catalogue;
mod checker;
mod describe;
mod dynamodb;
mod ec2;
mod emulators;
mod errors;
pub mod faults;
mod fleet;
mod fleet_answer;
mod fleet_request;
mod form;
mod front;
mod iam;
mod imds;
mod instances;
mod line;
pub mod machines;
mod model;
mod namespace;
mod queues;
mod records;
mod requirements;
mod sqs;
mod systemd;
mod template_fields;
mod templates;
mod validate;
mod xml;

use std::{
    fmt::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use paddock_bed_process::{emulator::Emulator, tool};
use roxmltree::Document;
use sha2::{Digest, Sha256};
use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::mpsc::UnboundedReceiver,
};

pub use crate::{
    call::Service,
    capacity::{Limit, Usage},
    front::Calls,
    iam::access_key,
    instances::{Ending, Event, Instance, InstanceState, Shutdown},
};
use crate::{
    catalogue::Catalogue,
    checker::Checker,
    faults::{Fault, Rule},
    form::Form,
    front::{Failure, Front, Outcome, Upstream},
    line::{Line, LineListener},
};

/// Where everything is, as ARNs and metadata name it.
pub const PARTITION: &str = "aws";
pub const REGION: &str = "us-east-1";
pub const ACCOUNT: &str = "000000000000";

/// An emulator that takes longer than this for one call hangs. Launching a hundred instances takes seconds.
const CALL_DEADLINE: Duration = Duration::from_secs(300);

/// Idle connections are closed well before the server's own idle timeout, which could hit a call in flight. Jetty, used
/// by DynamoDB Local, defaults to 30 s; this was not measured here.
const CONNECTION_IDLE: Duration = Duration::from_secs(5);

/// A running emulated AWS, stopped on drop or with the program.
pub struct Aws {
    front: Arc<Front>,
    endpoint: String,
    dir: PathBuf,
    subnets: Vec<(String, String)>,
    ami_id: String,
    security_group_id: String,
    /// The front end has its own threads, so that it answers while a test blocks and outlives a test's runtime.
    runtime: OwnRuntime,
    _emulators: Vec<Emulator>,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The endpoint's loopback port; 0 picks a free one.
    pub port: u16,
    /// Checks all requests and answers against AWS's service models.
    pub validate: bool,
    /// Starts neither SQS nor EC2.
    pub dynamodb_alone: bool,
}

/// A file that machines can download.
#[derive(Clone, Debug)]
pub struct ServedFile {
    pub url: String,
    pub sha256: String,
}

impl Aws {
    /// Starts everything with its files and logs below `dir`, and checks all calls; see [`Self::violations`].
    pub async fn start(dir: &Path) -> Result<Self> {
        Self::start_with(dir, Options { validate: true, ..Options::default() }).await
    }

    pub async fn start_with(dir: &Path, options: Options) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let dir = dir.canonicalize()?;
        let runtime = OwnRuntime::new()?;
        let aws =
            runtime.handle().spawn(prepare(dir, options)).await.context("the start of the AWS bed panicked")??;
        Ok(Self { runtime, ..aws })
    }

    /// The single URL of all services.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The environment variables an SDK client needs to use this AWS.
    pub fn env(&self) -> Vec<(String, String)> {
        let pairs = [
            ("AWS_ENDPOINT_URL", self.endpoint.as_str()),
            ("AWS_REGION", REGION),
            ("AWS_ACCESS_KEY_ID", "AKIABED"),
            ("AWS_SECRET_ACCESS_KEY", "bed"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ];
        pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The subnets of the default network, one per zone: `(subnet id, zone)`.
    pub fn subnets(&self) -> Vec<(String, String)> {
        self.subnets.clone()
    }

    /// An image that can be launched.
    pub fn ami_id(&self) -> &str {
        &self.ami_id
    }

    /// One more image, as a newer build of the first.
    pub async fn register_image(&self, name: &str) -> Result<String> {
        let image = Form::action("RegisterImage").with("Name", name).with("Architecture", "x86_64");
        let front = self.front.clone();
        self.runtime.handle().spawn(async move { learn(&front, &image, "imageId").await }).await?
    }

    /// Sets a parameter of SSM to the id of an image.
    pub fn set_parameter(&self, name: &str, image: &str) {
        self.front.parameters.set(name, image);
    }

    /// A security group that can be launched into.
    pub fn security_group_id(&self) -> &str {
        &self.security_group_id
    }

    /// Adds a rule after the active ones; returns its number.
    ///
    /// # Panics
    /// If the service does not have the error that the rule asks for.
    pub fn add_fault(&self, rule: Rule) -> u64 {
        rule.check().unwrap_or_else(|error| panic!("{error}"));
        self.front.faults.lock().unwrap().add(rule)
    }

    pub fn remove_fault(&self, id: u64) {
        self.front.faults.lock().unwrap().remove(id);
    }

    pub fn clear_faults(&self) {
        self.front.faults.lock().unwrap().clear();
    }

    pub fn faults(&self) -> Vec<Fault> {
        self.front.faults.lock().unwrap().list().to_vec()
    }

    /// Where requests or answers so far were not as AWS's service models and the table of errors have them; empty without
    /// [`Options::validate`].
    pub async fn violations(&self) -> Vec<String> {
        self.front.violations().await
    }

    /// Drops the violations with this text, which a test made on purpose.
    pub fn forget_violations(&self, text: &str) {
        if let Some(checker) = &self.front.checker {
            checker.forget(text);
        }
    }

    /// How often each action was called since the start or the last reset.
    pub fn calls(&self) -> Calls {
        self.front.calls.lock().unwrap().clone()
    }

    /// How often a machine has called each action since its launch.
    pub fn calls_of(&self, id: &str) -> Calls {
        self.front.machine_calls.lock().unwrap().get(id).cloned().unwrap_or_default()
    }

    pub fn call_count(&self, service: Service, action: &str) -> u64 {
        self.calls().get(&service).and_then(|actions| actions.get(action)).copied().unwrap_or(0)
    }

    /// Whether the emulated EC2 is processing a call.
    pub fn is_ec2_busy(&self) -> bool {
        self.front.moto.try_lock().is_err()
    }

    pub fn reset_calls(&self) {
        self.front.calls.lock().unwrap().clear();
    }

    /// Limits how many more instances a fleet gets; a limit for the same zone, type and usage is replaced.
    pub fn set_capacity(&self, limit: Limit) {
        self.front.capacity.lock().unwrap().set(limit);
    }

    pub fn clear_capacity(&self) {
        self.front.capacity.lock().unwrap().clear();
    }

    /// How long after its deletion a queue cannot be made again: 60 s at SQS, which is the default.
    pub fn set_queue_deletion_time(&self, time: Duration) {
        self.front.queues.names.set_deletion_time(time);
    }

    /// Every instance that was ever launched.
    pub fn instances(&self) -> Vec<Instance> {
        self.front.instances.list()
    }

    /// All future launches and terminations, preceded by a launch event for each running instance.
    pub fn watch_instances(&self) -> UnboundedReceiver<Event> {
        self.front.instances.watch()
    }

    /// The instances whose records are written from now on, each once DynamoDB has acknowledged the write.
    pub fn watch_records(&self) -> UnboundedReceiver<String> {
        self.front.records.watch()
    }

    /// DynamoDB itself, without call counts or faults.
    pub fn dynamodb_url(&self) -> &str {
        &self.front.dynamodb.url
    }

    /// Terminates an instance as its owner would at the console, without call counts or faults.
    pub async fn terminate(&self, id: &str) -> Result<()> {
        self.terminate_because(id, Ending::user()).await
    }

    /// Terminates an instance for a reason that EC2 gives as its `StateReason`.
    pub async fn terminate_because(&self, id: &str, why: Ending) -> Result<()> {
        let (front, id) = (self.front.clone(), id.to_owned());
        self.run(async move { ec2::terminate(&front, &id, why).await }).await
    }

    /// Stops an instance as its owner would at the console, without call counts or faults.
    pub async fn stop(&self, id: &str) -> Result<()> {
        let (front, id) = (self.front.clone(), id.to_owned());
        self.run(async move { ec2::stop(&front, &id, Ending::user()).await }).await
    }

    /// Makes a file available to machines by HTTP.
    pub fn serve_file(&self, path: &Path) -> Result<ServedFile> {
        let shown = path.display();
        let content = std::fs::read(path).with_context(|| format!("cannot serve {shown}"))?;
        let sha256 = Sha256::digest(&content).iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        });
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { bail!("{shown} has no plain name") };
        let key = format!("{sha256}/{name}");
        let url = format!("{}/_files/{key}", self.endpoint);
        self.front.files.lock().unwrap().insert(key, content.into());
        Ok(ServedFile { url, sha256 })
    }

    async fn run<T: Send + 'static>(&self, work: impl Future<Output = Outcome<T>> + Send + 'static) -> Result<T> {
        self.runtime.handle().spawn(work).await?.map_err(explain)
    }
}

/// A runtime that may be dropped from within another.
struct OwnRuntime(Option<Runtime>);

impl OwnRuntime {
    fn new() -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(2).thread_name("aws").enable_all().build()?;
        Ok(Self(Some(runtime)))
    }

    fn handle(&self) -> &Handle {
        self.0.as_ref().expect("there until it is dropped").handle()
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

async fn prepare(dir: PathBuf, options: Options) -> Result<Aws> {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", options.port)).await?;
    let port = listener.local_addr()?.port();
    let http = reqwest::Client::builder().no_proxy().timeout(CALL_DEADLINE);
    let http = http.pool_idle_timeout(CONNECTION_IDLE).build()?;
    let catalogue = tokio::task::spawn_blocking(|| Catalogue::of_moto(&tool("moto")?));
    let others = async {
        if options.dynamodb_alone {
            return Ok(None);
        }
        tokio::try_join!(emulators::sqs(&dir, &http, port), emulators::ec2(&dir, &http)).map(Some)
    };
    let (dynamodb, others) = tokio::try_join!(Emulator::dynamodb(&dir, &http), others)?;
    let (sqs, moto) = others.unzip();
    let upstream = |emulator: Option<&Emulator>| {
        emulator.map_or_else(Upstream::default, |it| Upstream { url: it.url.clone(), log: it.log().to_owned() })
    };
    let front = Arc::new(Front {
        http,
        dynamodb: upstream(Some(&dynamodb)),
        sqs: upstream(sqs.as_ref()),
        ec2: upstream(moto.as_ref()),
        faults: Default::default(),
        calls: Default::default(),
        machine_calls: Default::default(),
        capacity: Default::default(),
        catalogue: catalogue.await??,
        queues: Default::default(),
        instances: Default::default(),
        records: Default::default(),
        fleets: Default::default(),
        templates: Default::default(),
        checker: options.validate.then(Checker::start),
        parameters: Default::default(),
        files: Default::default(),
        moto: Default::default(),
    });
    let (mut subnets, mut ami_id, mut security_group_id) = Default::default();
    if moto.is_some() {
        subnets = ec2::subnets(&front).await.map_err(explain)?;
        let image = Form::action("RegisterImage").with("Name", "paddock").with("Architecture", "x86_64");
        ami_id = learn(&front, &image, "imageId").await?;
        security_group_id = learn(&front, &Form::action("DescribeSecurityGroups"), "groupId").await?;
    }
    let service = admin::router(front.clone()).into_make_service_with_connect_info::<Line>();
    tokio::spawn(async move { axum::serve(LineListener(listener), service).await });
    Ok(Aws {
        front,
        endpoint: format!("http://127.0.0.1:{port}"),
        dir,
        subnets,
        ami_id,
        security_group_id,
        runtime: OwnRuntime(None),
        _emulators: [Some(dynamodb), sqs, moto].into_iter().flatten().collect(),
    })
}

/// One value of moto's response.
async fn learn(front: &Front, form: &Form, name: &str) -> Result<String> {
    let text = front.moto(form).await.map_err(explain)?;
    let document = Document::parse(&text)?;
    let value = xml::find(&document, name).and_then(|node| node.text());
    Ok(value.with_context(|| format!("moto answers without {name}: {text}"))?.to_owned())
}

fn explain(failure: Failure) -> anyhow::Error {
    match failure {
        Failure::Refused(answer) => anyhow!("EC2 refuses: {}", answer.text()),
        Failure::Broken(error) => error,
    }
}
