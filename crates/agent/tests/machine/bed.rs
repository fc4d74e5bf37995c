//! Simulated machines for the agent. Each is a PID namespace with its own files, metadata service and `shutdown`; all
//! share one DynamoDB Local, behind the front of the bed's AWS, and one simulated GitHub.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail};
use aws_sdk_dynamodb::{
    Client,
    config::{BehaviorVersion, Credentials, Region},
    types::{AttributeDefinition, AttributeValue, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType},
};
use axum::{
    Router,
    http::StatusCode,
    routing::{get, put},
};
use jiff::{SignedDuration, Timestamp};
use nix::{
    sys::signal::{Signal as UnixSignal, kill},
    unistd::Pid,
};
use paddock_bed_aws::{self as aws, Aws};
use paddock_bed_github::{API_VERSION, GitHub, Options, runner::write_runner_dir};
use paddock_bed_process::{Process, wait::Wait, write_program};
use paddock_record::{
    AgentConfig, Heartbeat, MachineArns, PublicKey, Signal, State, WorkerSignal, attribute, entity, instance_key,
    report_key, stamp,
};

/// Far longer than any step takes, even on a slow machine.
const DEADLINE: Duration = Duration::from_secs(180);
const OWNER: &str = "acme";

pub struct Bed {
    pub github: GitHub,
    /// Dropped before its directory.
    pub aws: Aws,
    dir: tempfile::TempDir,
    dynamodb: Client,
    github_token: String,
    /// Every token that GitHub issued.
    tokens: Mutex<Vec<String>>,
    machines: AtomicU32,
}

/// Per-test settings of a machine.
pub struct Setup {
    pub script: &'static str,
    pub scrub: Option<&'static str>,
    /// How long ago the agent first started, and its `created` lifetime. `None`: it has never run.
    pub age: Option<(Duration, Duration)>,
    pub table: bool,
    /// The table is reached through a proxy alone.
    pub proxy: bool,
    /// The runner's version, and the newest that GitHub lists.
    pub versions: Option<(&'static str, &'static str)>,
    /// What `config.sh` says about a library that the image lacks.
    pub missing: Option<&'static str>,
    /// The number of the image's user `runner`, if it has one.
    pub runner_uid: Option<u32>,
    /// What `iptables`, `ip6tables` and `nft` do after they have noted their arguments.
    pub firewall: &'static str,
    pub metadata_access: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            script: "",
            scrub: None,
            age: None,
            table: true,
            proxy: false,
            versions: None,
            missing: None,
            runner_uid: None,
            firewall: "exit 1",
            metadata_access: false,
        }
    }
}

pub struct Machine<'a> {
    bed: &'a Bed,
    pub id: String,
    table: String,
    root: PathBuf,
    spot_notice: Arc<AtomicBool>,
    process: Process,
}

impl Bed {
    pub async fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let dynamodb = aws::Options { validate: true, dynamodb_alone: true, ..aws::Options::default() };
        let aws = Aws::start_with(dir.path(), dynamodb).await?;
        let config = aws_sdk_dynamodb::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .endpoint_url(aws.endpoint())
            .region(Region::new("us-east-1"))
            .credentials_provider(Credentials::new("AKIABED", "bed", None, None, "bed"))
            .build();
        let github = GitHub::start(Options::default()).await?;
        github.organization(OWNER);
        github.repository(OWNER, "app", true)?;
        Ok(Self {
            github_token: github.personal_token(&[OWNER]),
            github,
            tokens: Mutex::default(),
            dir,
            dynamodb: Client::from_conf(config),
            aws,
            machines: AtomicU32::new(1),
        })
    }

    /// Boots a machine that restarts the agent whenever it exits.
    pub async fn boot(&self, setup: Setup) -> Result<Machine<'_>> {
        let number = self.machines.fetch_add(1, Ordering::Relaxed);
        let (id, table) = (format!("i-{number:017x}"), format!("paddock-{number}"));
        let root = self.dir.path().join(&id);
        let [bin, state, logs] = ["bin", "var/lib/paddock", "log"].map(|below| root.join(below));
        for dir in [&bin, &state] {
            fs::create_dir_all(dir)?;
        }
        let (own, runner) = (std::env::current_exe()?, root.join("opt/actions-runner"));
        write_runner_dir(&runner, &[&own.to_string_lossy(), "stand-in"])?;
        if let Some((version, _)) = setup.versions {
            fs::write(runner.join(".version"), version)?;
        }
        if let Some(missing) = setup.missing {
            fs::write(runner.join(".missing"), format!("{missing}\n"))?;
        }
        let shutdown = format!("#!/bin/sh\necho \"$*\" >>'{}/shutdown'\n", root.display());
        write_program(&bin.join("shutdown"), &shutdown)?;
        for tool in ["iptables", "ip6tables", "nft"] {
            let stub = format!("#!/bin/sh\necho \"{tool} $*\" >>'{}/firewall'\n{}\n", root.display(), setup.firewall);
            write_program(&bin.join(tool), &stub)?;
        }
        if let Some(uid) = setup.runner_uid {
            let user = format!("runner:x:{uid}:{uid}::/home/runner:/bin/sh\n");
            fs::write(root.join("passwd"), fs::read_to_string("/etc/passwd")? + &user)?;
        }

        let lifetime = setup.age.map_or(Duration::from_secs(600), |(_, lifetime)| lifetime);
        let config = AgentConfig {
            table: table.clone(),
            pre_runner_script: setup.script.to_owned(),
            scrub_script: setup.scrub.map(str::to_owned),
            listed_runner_version: setup.versions.map(|(_, latest)| latest.to_owned()),
            runner_metadata_access: setup.metadata_access,
            heartbeat_seconds: 1,
            ..AgentConfig::new("bed", "ci/linux", lifetime)
        };
        fs::write(state.join("config.json"), serde_json::to_vec(&config)?)?;
        if let Some((age, _)) = setup.age {
            fs::write(state.join("key"), [7; 32])?;
            fs::File::options()
                .write(true)
                .open(state.join("key"))?
                .set_modified(std::time::SystemTime::now() - age)?;
        }

        let spot_notice = Arc::new(AtomicBool::new(false));
        let metadata = metadata(id.clone(), spot_notice.clone()).await?;
        let mut command = Command::new("unshare");
        if !nix::unistd::geteuid().is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]);
        // The machine has its own mounts.
        let image = "if [ -e passwd ]; then mount --bind passwd /etc/passwd || exit 1; fi";
        command.arg(format!(
            "{image}\nwhile :; do \"$0\" --config var/lib/paddock/config.json; echo $? >>exits; sleep 0.1; done"
        ));
        command.arg(env!("CARGO_BIN_EXE_paddock-agent")).current_dir(&root).env_clear();
        command.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH")?));
        command.env("HOME", &root).env("PADDOCK_ROOT", &root).env("PADDOCK_LOG_FORMAT", "json");
        command.env("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata);
        if setup.proxy {
            // The AWS bed answers whichever host it is asked for, as a proxy would.
            command.env("http_proxy", self.aws.endpoint()).env("no_proxy", "127.0.0.1");
            command.env("AWS_ENDPOINT_URL_DYNAMODB", "http://dynamodb.invalid");
        } else {
            command.env("AWS_ENDPOINT_URL_DYNAMODB", self.aws.endpoint());
        }
        let process = Process::spawn("machine", command, &logs)?;
        let machine = Machine { bed: self, id, table, root, spot_notice, process };
        if setup.table {
            machine.create_table().await?;
        }
        Ok(machine)
    }

    pub fn github_url(&self) -> String {
        format!("{}/{OWNER}", self.github.html_url())
    }

    /// A `registration-token` or `remove-token`.
    pub async fn token(&self, kind: &str) -> Result<String> {
        let url = format!("{}/orgs/{OWNER}/actions/runners/{kind}", self.github.api_url());
        let answer =
            reqwest::Client::new().post(url).bearer_auth(&self.github_token).header(API_VERSION.0, API_VERSION.1);
        let answer: serde_json::Value = answer.send().await?.error_for_status()?.json().await?;
        let token = answer["token"].as_str().context("GitHub answers without a token")?.to_owned();
        self.tokens.lock().unwrap().push(token.clone());
        Ok(token)
    }
}

impl Machine<'_> {
    /// Deletes its runner at GitHub, as an admin would.
    pub async fn delete_runner(&self) -> Result<()> {
        let id = self.bed.github.runner(&self.id).context("it has no runner")?.id;
        let url = format!("{}/orgs/{OWNER}/actions/runners/{id}", self.bed.github.api_url());
        let delete =
            reqwest::Client::new().delete(url).bearer_auth(&self.bed.github_token).header(API_VERSION.0, API_VERSION.1);
        delete.send().await?.error_for_status()?;
        Ok(())
    }

    pub async fn create_table(&self) -> Result<()> {
        let mut create =
            self.bed.dynamodb.create_table().table_name(&self.table).billing_mode(BillingMode::PayPerRequest);
        for (name, kind) in [(attribute::PK, KeyType::Hash), (attribute::SK, KeyType::Range)] {
            let definition = AttributeDefinition::builder().attribute_name(name);
            create = create
                .attribute_definitions(definition.attribute_type(ScalarAttributeType::S).build()?)
                .key_schema(KeySchemaElement::builder().attribute_name(name).key_type(kind).build()?);
        }
        match create.send().await {
            // A retry by the SDK finds the table that the first attempt created.
            Err(error) if error.as_service_error().is_some_and(|error| error.is_resource_in_use_exception()) => Ok(()),
            made => Ok(made.map(drop)?),
        }
    }

    /// Writes the record as the operator does; `threshold` is relative to now.
    pub async fn record(&self, state: State, run: &str, sealed: &str, threshold: SignedDuration) -> Result<()> {
        let (mut item, now) = (instance_key(&self.id), Timestamp::now());
        let texts = [
            (attribute::STATE, state.to_string()),
            (attribute::RUN_ID, run.to_owned()),
            (attribute::UPDATED_AT, stamp(now)),
            (attribute::THRESHOLD, stamp(now + threshold)),
            (attribute::SEALED, sealed.to_owned()),
            (attribute::GITHUB_URL, self.bed.github_url()),
        ];
        item.extend(texts.map(|(name, text)| (name.to_owned(), AttributeValue::S(text))));
        self.bed.dynamodb.put_item().table_name(&self.table).set_item(Some(item)).send().await?;
        Ok(())
    }

    /// Assigns the machine to a run, with a token sealed to the machine's key.
    pub async fn claim(&self, run: &str) -> Result<()> {
        let sealed = self.public_key().await?.seal(&self.bed.token("registration-token").await?);
        self.record(State::Claimed, run, &sealed, SignedDuration::from_mins(5)).await
    }

    pub async fn release(&self) -> Result<()> {
        let sealed = self.public_key().await?.seal(&self.bed.token("remove-token").await?);
        self.record(State::Idle, "", &sealed, SignedDuration::from_mins(7)).await
    }

    async fn read(&self, entity: &str) -> Result<Option<std::collections::HashMap<String, AttributeValue>>> {
        let get = self.bed.dynamodb.get_item().table_name(&self.table).consistent_read(true);
        Ok(get.set_key(Some(report_key(entity, &arns(), &self.id))).send().await?.item)
    }

    pub async fn heartbeat(&self) -> Result<Heartbeat> {
        self.until("a heartbeat", async || {
            Ok(self.read(entity::HEARTBEAT).await?.map(|item| Heartbeat::from_item(&item)).transpose()?)
        })
        .await
    }

    pub async fn public_key(&self) -> Result<PublicKey> {
        self.heartbeat().await?.public_key.context("the heartbeat has no public key")
    }

    pub async fn signal(&self) -> Result<Option<WorkerSignal>> {
        Ok(self.read(entity::SIGNAL).await?.map(|item| WorkerSignal::from_item(&item)).transpose()?)
    }

    pub async fn reports(&self, signal: Signal, run: &str) -> Result<()> {
        self.until(&format!("{signal} for {run:?}"), async || {
            Ok(self.signal().await?.filter(|sent| sent.signal == signal && sent.run_id == run).map(drop))
        })
        .await
    }

    /// The failure that the agent reports.
    pub async fn failure(&self, signal: Signal, run: &str) -> Result<WorkerSignal> {
        self.until(&format!("{signal} for {run:?}"), async || {
            Ok(self.signal().await?.filter(|sent| sent.signal == signal && sent.run_id == run))
        })
        .await
    }

    /// Waits until `check` finds something; the error shows the last signal and the agent's log.
    pub async fn until<T>(&self, what: &str, check: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
        match Wait::at_most(DEADLINE).until(what, check).await {
            Err(error) => bail!("{error:#}; last signal {:?}; the agent:\n{}", self.signal().await.ok(), self.log()),
            found => found,
        }
    }

    pub async fn until_true(&self, what: &str, check: impl Fn() -> bool) -> Result<()> {
        self.until(what, async || Ok(check().then_some(()))).await
    }

    pub fn file(&self, below: &str) -> String {
        fs::read_to_string(self.root.join(below)).unwrap_or_default()
    }

    /// The runner's logs about itself.
    pub fn diagnostics(&self) -> String {
        let dir = fs::read_dir(self.path("opt/actions-runner/_diag")).into_iter().flatten().flatten();
        dir.filter_map(|file| fs::read_to_string(file.path()).ok()).collect()
    }

    pub fn path(&self, below: &str) -> PathBuf {
        self.root.join(below)
    }

    /// Whether `shutdown` was called, at least once and always with the right arguments.
    pub fn shut_down(&self) -> bool {
        let calls = self.file("shutdown");
        !calls.is_empty() && calls.lines().all(|call| call == "-h now")
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.process.log()).unwrap_or_default()
    }

    /// Whether any file of the machine, including its logs, contains a token.
    pub fn contains_token(&self) -> bool {
        let mut grep = Command::new("grep");
        grep.args(["--recursive", "--quiet", "--fixed-strings", "--text"]);
        for token in self.bed.tokens.lock().unwrap().iter() {
            grep.args(["-e", token]);
        }
        grep.arg(&self.root).status().is_ok_and(|status| status.code() == Some(0))
    }

    /// Waits until the runner logs that it has a job; until then the agent does not see it as busy.
    pub async fn until_busy(&self) -> Result<()> {
        let busy = || self.file("var/log/paddock-runner.log").contains("Running job");
        self.until_true("the job in the runner's log", busy).await
    }

    pub fn interrupt_spot(&self) {
        self.spot_notice.store(true, Ordering::Relaxed);
    }

    /// Signals the one process of this machine that runs `program` with the last argument `last`.
    pub async fn kill(&self, program: &Path, last: &str, signal: UnixSignal) -> Result<()> {
        let root = format!("PADDOCK_ROOT={}", self.root.display());
        let home = format!("HOME={}", self.root.display());
        let is_it = |pid: &i32| {
            let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let mut args = read("cmdline");
            let (environment, has) = (read("environ"), |line: &str, all: &[u8]| {
                all.split(|byte| *byte == 0).any(|own| own == line.as_bytes())
            });
            args.pop();
            fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == program)
                && args.ends_with(last.as_bytes())
                && (has(&root, &environment) || has(&home, &environment))
        };
        let what = format!("one process that runs {} … {last}", program.display());
        // For a moment there are two: a forked child is a copy of its parent until it calls exec.
        let found = self.until(&what, async || {
            let all = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
            let found: Vec<i32> = all.filter(|pid| is_it(pid)).collect();
            Ok((found.len() == 1).then(|| found[0]))
        });
        Ok(kill(Pid::from_raw(found.await?), signal)?)
    }

    pub async fn kill_agent(&self, signal: UnixSignal) -> Result<()> {
        self.kill(Path::new(env!("CARGO_BIN_EXE_paddock-agent")), "config.json", signal).await
    }
}

/// What the metadata service tells of the machines' ARNs.
fn arns() -> MachineArns {
    MachineArns { partition: "aws".into(), region: "us-east-1".into(), account: "000000000000".into() }
}

/// Serves the parts of the EC2 metadata service that the agent uses, including credentials.
async fn metadata(id: String, spot_notice: Arc<AtomicBool>) -> Result<String> {
    const CREDENTIALS: &str = r#"{"Code":"Success","Type":"AWS-HMAC","AccessKeyId":"AKIABED","SecretAccessKey":"bed",
        "Token":"session","Expiration":"2100-01-01T00:00:00Z","LastUpdated":"2025-01-01T00:00:00Z"}"#;
    let spot = move || async move {
        match spot_notice.load(Ordering::Relaxed) {
            true => Ok(r#"{"action":"terminate","time":"2025-05-31T12:02:00Z"}"#),
            false => Err(StatusCode::NOT_FOUND),
        }
    };
    let MachineArns { region, account, .. } = arns();
    let document = serde_json::json!({ "instanceId": id, "region": region, "accountId": account }).to_string();
    let token = || async { ([("x-aws-ec2-metadata-token-ttl-seconds", "21600")], "metadata-token") };
    let router = Router::new()
        .route("/latest/api/token", put(token))
        .route("/latest/dynamic/instance-identity/document", get(move || async { document }))
        .route("/latest/meta-data/services/partition", get(|| async { arns().partition }))
        .route("/latest/meta-data/placement/region", get(|| async { "us-east-1" }))
        .route("/latest/meta-data/iam/security-credentials/", get(|| async { "role" }))
        .route("/latest/meta-data/iam/security-credentials/role", get(|| async { CREDENTIALS }))
        .route("/latest/meta-data/spot/instance-action", get(spot));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(url)
}
