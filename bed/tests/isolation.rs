//! A bed is a world of its own, and nothing of it outlives its program.
//!
//! Run with the argument `inside`, this program is the bed that the tests watch from the host.

mod processes;

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Failed, Trial};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, geteuid},
};
use paddock_bed::{
    isolate::{Isolated, Options, enter},
    kube::{self, ControlPlane},
    node::{self, Node},
    process::spawn,
};
use processes::{pids, processes, started, stat};
use serde::{Deserialize, Serialize};
use tokio::{
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
};

/// Longer than anything takes on a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);
const PORT: u16 = 8080;
const NAMESPACES: [&str; 3] = ["pid", "net", "mnt"];

/// What the inside tells the test about itself.
#[derive(Serialize, Deserialize)]
struct Report {
    dir: PathBuf,
    shared: PathBuf,
    host_port: u16,
    namespaces: Vec<String>,
    processes: usize,
    node_possible: Result<(), String>,
}

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("inside") {
        return inside();
    }
    let node_possible = Bed::start(this_program(&["inside"])).report.node_possible.clone();
    if let Err(why) = &node_possible {
        println!("skipped: {why}");
    }
    let trials = vec![
        Trial::test("a_killed_bed_leaves_nothing_behind", killed),
        Trial::test("a_killed_bed_with_a_node_leaves_nothing_behind", killed_with_node)
            .with_ignored_flag(node_possible.is_err()),
        Trial::test("a_bed_that_ends_by_itself_leaves_nothing_behind", ended),
        Trial::test("a_bed_of_a_user_without_root_leaves_nothing_behind", unprivileged)
            .with_ignored_flag(!geteuid().is_root()), // without root the two before have shown it
        Trial::test("two_beds_do_not_see_each_other", side_by_side),
        Trial::test("the_host_reaches_the_bed_through_a_listener", reached),
    ];
    // One at a time: what is left of a bed is told by its namespaces, and the kernel gives the numbers of those that
    // are gone to the next bed. And no other thread may start a program while one writes a program that it will run.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Leaves whatever it can: a daemon, a cgroup, files; then answers each connection until it is told to end.
fn inside() -> ExitCode {
    let node_wanted = std::env::args().nth(2).as_deref() == Some("node");
    let tools = if node_wanted { [&kube::TOOLS[..], &node::TOOLS].concat() } else { Vec::new() };
    let Isolated { dir, shared, listeners, address, node_possible } =
        enter(Options { tools: &tools, listen: 1 }).unwrap();
    let runtime = Runtime::new().unwrap();
    let mut told_to_end = runtime.block_on(async { signal(SignalKind::terminate()) }).unwrap();
    let _node = node_wanted.then(|| runtime.block_on(run_a_pod(&dir, address)).unwrap());
    Command::new("sh").args(["-c", "setsid sleep 1000 &"]).status().unwrap();
    if node_possible.is_ok() {
        fs::create_dir_all(pids_cgroup().join("pods/one")).unwrap();
    }
    fs::write(dir.join("file"), "x").unwrap();
    fs::write(shared.join("file"), "x").unwrap();
    let _served = TcpListener::bind((address, PORT)).unwrap();
    let namespace = |kind| fs::read_link(format!("/proc/self/ns/{kind}")).unwrap().display().to_string();
    let report = Report {
        host_port: listeners[0].local_addr().unwrap().port(),
        namespaces: NAMESPACES.map(namespace).to_vec(),
        processes: processes().count(),
        dir,
        shared,
        node_possible,
    };
    println!("{}", serde_json::to_string(&report).unwrap());
    let [listener] = <[TcpListener; 1]>::try_from(listeners).unwrap();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            connection.unwrap().write_all(b"from the bed").unwrap();
        }
    });
    runtime.block_on(told_to_end.recv());
    ExitCode::from(7)
}

/// A real node with a pod that would run for ever.
async fn run_a_pod(dir: &Path, address: Ipv4Addr) -> anyhow::Result<(ControlPlane, Node)> {
    let plane = ControlPlane::start(dir, address).await?;
    let node = Node::start(&plane, "node", &[]).await?;
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: stays, namespace: default}, spec: {containers: \
               [{name: main, image: paddock-bed/sandbox:1, imagePullPolicy: Never}]}}";
    plane.apply(pod).await?;
    let wait = ["wait", "--for=condition=Ready", "--timeout=300s", "pod/stays"];
    kube::succeeded("kubectl wait", plane.kubectl(&wait).await?)?;
    Ok((plane, node))
}

fn pids_cgroup() -> PathBuf {
    let v1 = Path::new("/sys/fs/cgroup/pids");
    if v1.exists() { v1 } else { Path::new("/sys/fs/cgroup") }.to_owned()
}

struct Bed {
    child: Child,
    report: Report,
    /// Its init and its janitor, with the moment each was started: another process may have the number later.
    helpers: BTreeMap<u32, String>,
}

impl Bed {
    fn start(mut program: Command) -> Self {
        program.stdout(Stdio::piped());
        let mut child = spawn(program).unwrap(); // it dies with this program, should that be killed
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let report = serde_json::from_str(&line).unwrap();
        let parent = child.id().to_string();
        let children = pids().filter(|pid| stat(*pid).is_some_and(|stat| stat[1] == parent));
        let helpers: BTreeMap<_, _> = children.filter_map(|pid| Some((pid, started(pid)?))).collect();
        assert_eq!(helpers.len(), 2, "init and the janitor: {helpers:?}");
        Self { child, report, helpers }
    }

    fn end(&mut self, signal: Signal) -> Option<i32> {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
        self.child.wait().unwrap().code()
    }

    /// What is still there of this bed, seen from the host.
    fn remains(&self) -> Vec<String> {
        let home = self.report.dir.parent().unwrap();
        let name = home.file_name().unwrap().to_str().unwrap();
        let mut remains = Vec::new();
        for process in processes() {
            let link = |kind| fs::read_link(process.join("ns").join(kind)).unwrap_or_default().display().to_string();
            let shares = NAMESPACES.iter().zip(&self.report.namespaces).any(|(kind, own)| link(kind) == *own);
            let mounts = fs::read_to_string(process.join("mountinfo")).unwrap_or_default().contains(name);
            let pid = process.file_name().and_then(|name| name.to_str()?.parse().ok());
            let lives = |pid: u32| self.helpers.get(&pid).is_some_and(|moment| started(pid).as_ref() == Some(moment));
            let helps = pid.is_some_and(lives);
            if shares || mounts || helps {
                remains.push(process.display().to_string());
            }
        }
        remains.extend(home.exists().then(|| home.display().to_string()));
        remains.extend(find_cgroups(Path::new("/sys/fs/cgroup"), name));
        remains
    }

    fn assert_gone(&self) -> Result<(), Failed> {
        let start = Instant::now();
        loop {
            match self.remains() {
                remains if remains.is_empty() => return Ok(()),
                remains if start.elapsed() > DEADLINE => return Err(format!("still there: {remains:?}").into()),
                _ => sleep(Duration::from_millis(20)),
            }
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn this_program(arguments: &[&str]) -> Command {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(arguments);
    program
}

fn find_cgroups(dir: &Path, name: &str) -> Vec<String> {
    let children = fs::read_dir(dir).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir());
    children
        .flat_map(|entry| match entry.file_name().to_str() == Some(name) {
            true => vec![entry.path().display().to_string()],
            false => find_cgroups(&entry.path(), name),
        })
        .collect()
}

fn killed() -> Result<(), Failed> {
    let mut bed = Bed::start(this_program(&["inside"]));
    let before = bed.remains();
    if bed.report.node_possible.is_ok() {
        assert!(
            before.iter().any(|what| what.contains("cgroup")),
            "the test finds no cgroup of a live bed: {before:?}"
        );
    }
    assert!(before.iter().filter(|what| what.starts_with("/proc")).count() >= 3, "{before:?}");
    bed.end(Signal::SIGKILL);
    bed.assert_gone()
}

fn killed_with_node() -> Result<(), Failed> {
    let mut bed = Bed::start(this_program(&["inside", "node"]));
    bed.end(Signal::SIGKILL);
    bed.assert_gone()
}

fn ended() -> Result<(), Failed> {
    let mut bed = Bed::start(this_program(&["inside"]));
    assert_eq!(bed.end(Signal::SIGTERM), Some(7), "the signal reached the inside, and its exit code the outside");
    assert_eq!(bed.remains(), Vec::<String>::new(), "an orderly end waits until all is gone");
    Ok(())
}

fn unprivileged() -> Result<(), Failed> {
    let dir = tempfile::tempdir()?; // the program's own place may be closed to other users
    let copy = dir.path().join("bed");
    fs::copy(std::env::current_exe()?, &copy)?;
    fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let mut program = Command::new(copy);
    program.arg("inside").uid(65534).gid(65534).current_dir("/");
    let mut bed = Bed::start(program);
    let why = bed.report.node_possible.clone().unwrap_err();
    assert!(why.contains("root"), "{why}");
    bed.end(Signal::SIGKILL);
    bed.assert_gone()
}

fn side_by_side() -> Result<(), Failed> {
    let beds = [Bed::start(this_program(&["inside"])), Bed::start(this_program(&["inside"]))];
    let [one, other] = &beds; // both serve the same address and port
    assert_ne!(one.report.dir, other.report.dir);
    for (a, b) in one.report.namespaces.iter().zip(&other.report.namespaces) {
        assert_ne!(a, b);
    }
    for bed in &beds {
        assert_eq!(bed.report.processes, 3, "init, the program and its daemon");
        assert!(!bed.report.dir.join("file").exists(), "the bed's directory is its own");
        assert!(bed.report.shared.join("file").exists(), "the shared one is the host's too");
    }
    Ok(())
}

fn reached() -> Result<(), Failed> {
    let bed = Bed::start(this_program(&["inside"]));
    let mut answer = String::new();
    TcpStream::connect(("127.0.0.1", bed.report.host_port))?.read_to_string(&mut answer)?;
    assert_eq!(answer, "from the bed");
    Ok(())
}
