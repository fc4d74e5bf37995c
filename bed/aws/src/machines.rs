//! Simulates machines. Each launched instance runs its real user data in its own process tree, with its own files and
//! metadata service, until the instance ends.
//!
//! A machine is a PID namespace: all its processes, in any session, end with the namespace's first process, which ends
//! with this program even if the program is killed.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use jiff::Timestamp;
use paddock_bed_process::{Process, Signal, write_program};
use serde::Serialize;
use tokio::{
    runtime::Handle,
    task::{AbortHandle, spawn_blocking},
};

use crate::{
    Aws, Usage, ec2,
    front::{Failure, Front},
    imds,
    instances::{END_OF_CONSOLE, Ending, Event, Instance, InstanceState},
    namespace::{inhabitants, namespace},
    systemd,
};

/// The machine's first process: runs the user data, then keeps the machine running.
const INIT: &str = r#""$0"; echo "user data ended with $?"; while :; do sleep 3600; done"#;

/// How long the removal of a machine's files is retried.
const REMOVAL_DEADLINE: Duration = Duration::from_secs(120);

/// Shuts the machine down at once, whatever the arguments.
const SHUTDOWN: &str = "#!/bin/sh\nexec curl -fsS --noproxy '*' -m 300 -X POST";

#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A directory with the machine image's contents; each machine has its own copy as `$PADDOCK_ROOT`.
    pub ami: Option<PathBuf>,
    /// The time from launch to user data.
    pub boot_delay: Duration,
    /// No machine boots: the caller simulates the agents.
    pub unmanned: bool,
    /// The number of machines, from the first, that never run their user data.
    pub failing_boots: u32,
    /// Additions to the machines' environment.
    pub env: Vec<(String, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MachineState {
    /// Its boot failed: the instance is running without any process.
    Dead,
    Running,
    Frozen,
}

/// All machines of an [`Aws`]. Dropping it removes them and their files; the instances stay.
pub struct Machines {
    park: Arc<Park>,
    runtime: Handle,
    watch: AbortHandle,
}

struct Park {
    front: Arc<Front>,
    endpoint: String,
    dir: PathBuf,
    options: Options,
    failing_boots: AtomicU32,
    /// Additions to the environment of machines that boot from now on.
    env: Mutex<Vec<(String, String)>>,
    /// Whether machines that are launched from now on have systemd.
    systemd: AtomicBool,
    /// `None` once the simulator has stopped, so that no machine boots later.
    machines: Mutex<Option<BTreeMap<String, Machine>>>,
}

struct Machine {
    process: Option<Process>,
    frozen: bool,
    metadata: AbortHandle,
    metadata_url: String,
    dir: PathBuf,
    /// The part that outlives it.
    log: PathBuf,
}

impl Machines {
    /// Runs a machine for each running instance and each one launched later.
    pub fn start(aws: &Aws, options: Options) -> Result<Self> {
        let probe = namespace().arg("true").output().context("machines need unshare: apt-get install util-linux")?;
        ensure!(
            probe.status.success(),
            "machines need PID namespaces: run as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1): {}",
            String::from_utf8_lossy(&probe.stderr)
        );
        let dir = aws.dir.join(format!("machines-{:08x}", rand::random::<u32>()));
        fs::create_dir_all(&dir)?;
        let park = Arc::new(Park {
            front: aws.front.clone(),
            endpoint: aws.endpoint.clone(),
            dir,
            failing_boots: options.failing_boots.into(),
            env: Mutex::new(options.env.clone()),
            systemd: AtomicBool::new(false),
            options,
            machines: Mutex::new(Some(BTreeMap::new())),
        });
        let runtime = aws.runtime.handle().clone();
        let watch = runtime.spawn(park.clone().follow()).abort_handle();
        Ok(Self { park, runtime, watch })
    }

    /// The machines of instances that have not ended, by instance id.
    pub fn list(&self) -> BTreeMap<String, MachineState> {
        let state = |machine: &Machine| match (&machine.process, machine.frozen) {
            (None, _) => MachineState::Dead,
            (Some(_), true) => MachineState::Frozen,
            (Some(_), false) => MachineState::Running,
        };
        let machines = self.park.machines.lock().unwrap();
        machines.iter().flatten().map(|(id, machine)| (id.clone(), state(machine))).collect()
    }

    /// The next `count` machines never run their user data.
    pub fn fail_next_boots(&self, count: u32) {
        self.park.failing_boots.store(count, Ordering::Release);
    }

    /// Replaces the environment additions of machines that boot from now on.
    pub fn set_env(&self, env: Vec<(String, String)>) {
        *self.park.env.lock().unwrap() = env;
    }

    /// Whether machines that are launched from now on have systemd.
    pub fn set_systemd(&self, systemd: bool) {
        self.park.systemd.store(systemd, Ordering::Release);
    }

    /// Ends every process of the machine, and starts what is enabled as a unit. Its files stay.
    pub fn reboot(&self, id: &str) -> Result<()> {
        self.park.with(id, |machine| {
            machine.process = None;
            let mut command = self.park.command(&machine.dir, &machine.metadata_url);
            command.args(["sh", "-c", systemd::INIT]);
            machine.process = Some(Process::spawn(id, command, &self.park.log_dir())?);
            Ok(())
        })
    }

    /// Announces a spot interruption in the metadata and terminates the instance after `notice` (two minutes at EC2).
    pub fn interrupt_spot(&self, id: &str, notice: Duration) -> Result<()> {
        let (front, id) = (self.park.front.clone(), id.to_owned());
        let instance = front.instances.get(&id).with_context(|| format!("no instance {id}"))?;
        ensure!(instance.usage == Usage::Spot, "{id} is not a spot instance");
        let time = (Timestamp::now() + notice).strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        front.instances.update(&id, |instance| instance.spot_notice = Some(time));
        self.runtime.spawn(async move {
            tokio::time::sleep(notice).await;
            if let Err(failure) = ec2::terminate(&front, &id, Ending::reclaimed()).await {
                tracing::error!("{id} could not be reclaimed: {}", Failure::into_answer(failure).text());
            }
        });
        Ok(())
    }

    /// Pauses every process of the machine, so its heartbeat stops.
    pub fn freeze(&self, id: &str) -> Result<()> {
        self.park.signal(id, Signal::SIGSTOP)
    }

    pub fn thaw(&self, id: &str) -> Result<()> {
        self.park.signal(id, Signal::SIGCONT)
    }

    /// Kills every process of the machine; the instance stays `running`.
    pub fn crash(&self, id: &str) -> Result<()> {
        self.park.with(id, |machine| {
            machine.process = None;
            Ok(())
        })
    }

    /// The output of the user data and its children, and the machine's `/var/log`, as of its end if it has ended.
    pub fn log(&self, id: &str) -> String {
        // Read first, because a machine that ends now removes it: duplicates are better than nothing.
        let live = files_of(&self.root(id).join("var/log")).unwrap_or_default();
        let kept = fs::read(self.park.log(id)).unwrap_or_default();
        String::from_utf8_lossy(&[kept, live].concat()).into_owned()
    }

    /// The directory that the machine sees as `$PADDOCK_ROOT`.
    pub fn root(&self, id: &str) -> PathBuf {
        self.park.dir.join(id).join("root")
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        self.watch.abort();
        let machines = self.park.machines.lock().unwrap().take();
        drop(machines);
        remove(&self.park.dir);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.metadata.abort();
        self.process = None;
        if let Err(error) = self.keep_logs() {
            tracing::error!("{}: cannot keep the logs: {error:#}", self.dir.display());
        }
        remove(&self.dir);
    }
}

impl Machine {
    fn keep_logs(&self) -> Result<()> {
        let logs = files_of(&self.dir.join("root/var/log"))?;
        if !logs.is_empty() {
            let mut kept = fs::File::options().create(true).append(true).open(&self.log)?;
            kept.write_all(END_OF_CONSOLE)?;
            kept.write_all(&logs)?;
        }
        Ok(())
    }
}

/// The contents of a directory's files; empty if there is no directory.
fn files_of(dir: &Path) -> Result<Vec<u8>> {
    let Ok(files) = fs::read_dir(dir) else { return Ok(Vec::new()) };
    files.map(|file| Ok(fs::read(file?.path())?)).collect::<Result<Vec<_>>>().map(|texts| texts.concat())
}

impl Park {
    async fn follow(self: Arc<Self>) {
        let mut events = self.front.instances.watch();
        while let Some(event) = events.recv().await {
            let park = self.clone();
            match event {
                Event::Launched(_) if self.options.unmanned => {}
                Event::Launched(instance) => {
                    tokio::spawn(async move {
                        if let Err(error) = park.boot(*instance).await {
                            tracing::error!("machine boot failed: {error:#}");
                        }
                    });
                }
                Event::Ended(id) => {
                    spawn_blocking(move || {
                        let machine = park.machines.lock().unwrap().as_mut().and_then(|machines| machines.remove(&id));
                        drop(machine);
                    });
                }
            }
        }
    }

    async fn boot(self: Arc<Self>, instance: Instance) -> Result<()> {
        tokio::time::sleep(self.options.boot_delay).await;
        let (url, metadata) = imds::serve(self.front.clone(), &instance.id).await?;
        let (dir, log) = (self.dir.join(&instance.id), self.log(&instance.id));
        let mut machine = Machine { process: None, frozen: false, metadata, metadata_url: url, dir, log };
        let less = |left: u32| left.checked_sub(1);
        let fails = self.failing_boots.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok();
        spawn_blocking(move || {
            // One at a time, so that an instance that ends during boot leaves no machine.
            let mut machines = self.machines.lock().unwrap();
            let runs = self.front.instances.get(&instance.id).is_some_and(|now| now.state == InstanceState::Running);
            let Some(machines) = machines.as_mut().filter(|_| runs) else { return Ok(()) };
            let command = if fails { None } else { self.install(&machine.dir, &instance, &machine.metadata_url)? };
            self.front.instances.update(&instance.id, |known| known.console = Some(machine.log.clone()));
            if let Some(command) = command {
                machine.process = Some(Process::spawn(&instance.id, command, &self.log_dir())?);
            }
            machines.insert(instance.id, machine);
            Ok(())
        })
        .await?
    }

    /// Creates the machine's files; returns the command that boots it, if there is user data.
    fn install(&self, dir: &Path, instance: &Instance, metadata: &str) -> Result<Option<Command>> {
        let (root, bin) = (dir.join("root"), dir.join("bin"));
        for path in [&root, &bin, &dir.join("tmp")] {
            fs::create_dir_all(path)?;
        }
        if let Some(ami) = &self.options.ami {
            let copied = Command::new("cp").arg("-a").arg(ami.join(".")).arg(&root).output()?;
            ensure!(copied.status.success(), "cannot copy the image: {}", String::from_utf8_lossy(&copied.stderr));
        }
        let shutdown = format!("{SHUTDOWN} '{}/_admin/instances/{}/shutdown'\n", self.endpoint, instance.id);
        write_program(&bin.join("shutdown"), &shutdown)?;
        for name in ["poweroff", "halt"] {
            std::os::unix::fs::symlink("shutdown", bin.join(name))?;
        }
        // Like cloud-init: only user data that begins with #! is a script.
        if !instance.user_data.starts_with(b"#!") {
            return Ok(None);
        }
        if self.systemd.load(Ordering::Acquire) {
            systemd::install(&root, &bin)?;
        }
        let user_data = dir.join("user-data");
        write_program(&user_data, &instance.user_data)?;
        let mut command = self.command(dir, metadata);
        command.args(["sh", "-c", INIT]).arg(user_data);
        Ok(Some(command))
    }

    /// A command that runs as the machine's first process.
    fn command(&self, dir: &Path, metadata: &str) -> Command {
        let (root, bin) = (dir.join("root"), dir.join("bin"));
        let mut command = namespace();
        command.current_dir(&root).env_clear();
        command.env("PATH", format!("{}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", bin.display()));
        command.env("HOME", &root).env("TMPDIR", dir.join("tmp")).env("LANG", "C.UTF-8").env("PADDOCK_ROOT", &root);
        command.env("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata).env("AWS_ENDPOINT_URL", &self.endpoint);
        command.envs(self.env.lock().unwrap().iter().cloned());
        command
    }

    fn log_dir(&self) -> PathBuf {
        self.dir.join("log")
    }

    fn log(&self, id: &str) -> PathBuf {
        self.log_dir().join(format!("{id}.log"))
    }

    fn with<T>(&self, id: &str, act: impl FnOnce(&mut Machine) -> Result<T>) -> Result<T> {
        let mut machines = self.machines.lock().unwrap();
        let machine = machines.as_mut().and_then(|machines| machines.get_mut(id));
        act(machine.ok_or_else(|| anyhow!("instance {id} has no machine: not booted yet, or ended"))?)
    }

    fn signal(&self, id: &str, signal: Signal) -> Result<()> {
        self.with(id, |machine| {
            let Some(process) = &machine.process else { bail!("nothing runs on {id}") };
            let (freezing, mut reached) = (signal == Signal::SIGSTOP, HashSet::new());
            loop {
                let mut others = inhabitants(process.pid())?;
                others.retain(|pid| reached.insert(*pid));
                for pid in &others {
                    // The process may have ended already.
                    let _ = nix::sys::signal::kill(*pid, signal);
                }
                // A process may have forked before it was paused.
                if !freezing || others.is_empty() {
                    break;
                }
            }
            machine.frozen = freezing;
            Ok(())
        })
    }
}

/// Removes a directory whose writers were just killed and may still be exiting.
fn remove(dir: &Path) {
    let start = Instant::now();
    while let Err(error) = fs::remove_dir_all(dir) {
        // NotFound may refer to a file that another process removed meanwhile.
        if error.kind() == std::io::ErrorKind::NotFound && !dir.exists() {
            return;
        }
        if start.elapsed() > REMOVAL_DEADLINE {
            tracing::error!("cannot remove {}: {error}", dir.display());
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
