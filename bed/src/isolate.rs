//! Isolates one bed in namespaces that disappear with its program, even if it is killed.
//!
//! [`enter`] splits the calling program into three processes:
//!
//! - the *outer* one, started by the user: it forwards signals and returns the exit status;
//! - the *init* of a new PID namespace: it reaps orphans, and the kernel kills it when the outer one dies and
//!   everything in the namespace when it dies;
//! - the *inner* one, which returns from [`enter`] and continues the program, in its own network, mount, IPC, UTS and
//!   cgroup namespaces, with a tmpfs for all it writes.
//!
//! Only cgroups and the mount point outlive the namespaces. A janitor process outside waits until init's end of a pipe
//! closes, and removes them.

mod cgroups;
mod network;

use std::{
    fs,
    io::{PipeReader, PipeWriter, Read, Write, pipe},
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    process::exit,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    errno::Errno,
    libc,
    mount::{MsFlags, mount},
    sched::CloneFlags,
    sys::{
        prctl,
        signal::{SigSet, SigmaskHow, Signal, kill},
        signalfd::SignalFd,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{ForkResult, Pid, dup2_stderr, dup2_stdin, dup2_stdout, fork, getegid, geteuid, setsid},
};
use paddock_bed_process::{free_listener, tool};

use cgroups::Cgroups;
pub use network::{BED_ADDRESS, POD_RANGE, SERVICE_ADDRESS, SERVICE_RANGE};

/// Tools that only a real node needs; if they are unavailable, the bed has no node.
const NODE_TOOLS: [&str; 2] = ["kubelet", "containerd"];

/// Preparations before the network is isolated.
#[derive(Default)]
pub struct Options<'a> {
    /// Tools that the bed will start; downloaded or built now, because there is no network inside.
    pub tools: &'a [&'a str],
    /// How many listeners to open on the host's loopback, for the user's kubectl and browser.
    pub listen: usize,
}

/// The inside of a bed.
pub struct Isolated {
    /// For everything the bed writes; removed with the bed.
    pub dir: PathBuf,
    /// A directory that is visible on the host, for files that users open; removed at the end.
    pub shared: PathBuf,
    /// Bound to the host's loopback; see [`forward`]. `free_port` never returns their ports inside, so a server of the
    /// bed can use the same port and have the same address inside and outside.
    pub listeners: Vec<TcpListener>,
    /// The address of the bed's servers for each other and for pods: [`BED_ADDRESS`], or loopback without a network
    /// namespace.
    pub address: Ipv4Addr,
    /// Whether a real kubelet can run here, or why not, in one sentence.
    pub node_possible: Result<(), String>,
}

/// The degree of isolation that this machine allows.
#[derive(Clone, Copy, PartialEq)]
enum Depth {
    /// All namespaces, as root.
    Root,
    /// All namespaces, as the root of a user namespace: no cgroups, so no node.
    User,
    /// No namespaces: the bed shares the host's network, and only its processes and directory are cleaned up.
    Processes,
}

/// Moves the program into its own namespaces. Must be called first in `main`, before any thread exists.
pub fn enter(options: Options) -> Result<Isolated> {
    ensure!(
        fs::read_dir("/proc/self/task")?.count() == 1,
        "isolate::enter forks, so it must be called before the program starts a thread"
    );
    let node_tools = fetch(options.tools)?;
    let home = tempfile::Builder::new().prefix("paddock-bed-").tempdir()?.keep();
    let cgroups = match geteuid().is_root() {
        true => Cgroups::create(&home.file_name().unwrap_or_default().to_string_lossy()),
        false => bail_string("it needs root, to make cgroups and mounts"),
    };
    let (janitor, alive) = start_janitor(&home, cgroups.as_ref().ok())?;
    let listeners = (0..options.listen).map(|_| free_listener()).collect::<Result<_>>()?;

    let signals = forwarded_signals();
    let mask_before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let (go, ready) = pipe()?;
    let (child, depth) = clone_process()?;
    if let Some(init) = child {
        drop((alive, go, listeners));
        outer(init, depth, ready, janitor);
    }
    drop(ready);
    let cgroups = become_init(go, alive, cgroups, mask_before)?;

    // From here on this is the inner process.
    let dir = home.join("bed");
    let shared = home.join("shared");
    fs::create_dir_all(&dir)?;
    fs::create_dir_all(&shared)?;
    let mut node_possible = node_tools.and(cgroups.map(|_| ()));
    match depth {
        Depth::Processes => {
            node_possible = node_possible.and(bail_string("this machine allows no namespaces"));
        }
        Depth::User => {
            own_mounts(&dir)?;
            node_possible = node_possible.and(bail_string("it needs root with all its capabilities"));
        }
        Depth::Root => {
            own_mounts(&dir)?;
            node_possible = node_possible.and(cgroups::mount_own().map_err(|e| format!("{e:#}")));
        }
    }
    if depth != Depth::Processes {
        network::configure().context("cannot configure the bed's own network")?;
    }
    let temporary = dir.join("tmp");
    fs::create_dir_all(&temporary)?;
    // SAFETY: there is one thread, as checked above.
    unsafe { std::env::set_var("TMPDIR", &temporary) };
    let address = if depth == Depth::Processes { Ipv4Addr::LOCALHOST } else { BED_ADDRESS };
    let node_possible = node_possible.map_err(|why| format!("no real node can run here: {why}"));
    Ok(Isolated { dir, shared, listeners, address, node_possible })
}

/// Forwards every connection of one of [`Isolated::listeners`] to `target` inside the bed. Never returns.
pub async fn forward(listener: TcpListener, target: SocketAddr) -> Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    loop {
        let Ok((mut outside, _)) = listener.accept().await else {
            // Usually out of file descriptors, for a moment.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        tokio::spawn(async move {
            if let Ok(mut inside) = tokio::net::TcpStream::connect(target).await {
                let _ = tokio::io::copy_bidirectional(&mut outside, &mut inside).await;
            }
        });
    }
}

/// Downloads the tools into the cache. The inner result is an error if only a tool for the node is missing.
fn fetch(tools: &[&str]) -> Result<Result<(), String>> {
    let (node, needed): (Vec<&str>, Vec<&str>) = tools.iter().partition(|name| NODE_TOOLS.contains(name));
    for name in needed {
        tool(name)?;
    }
    if !geteuid().is_root() {
        return Ok(Ok(()));
    }
    Ok(node.into_iter().try_for_each(|name| tool(name).map(|_| ()).map_err(|e| format!("{e:#}"))))
}

fn bail_string<T>(why: &str) -> Result<T, String> {
    Err(why.to_owned())
}

/// Creates the init process, in as many namespaces as the machine allows. Returns `None` in the child.
fn clone_process() -> Result<(Option<Pid>, Depth)> {
    let namespaces = CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS;
    let mut depths =
        vec![(Depth::User, namespaces | CloneFlags::CLONE_NEWUSER), (Depth::Processes, CloneFlags::empty())];
    if geteuid().is_root() {
        depths.insert(0, (Depth::Root, namespaces));
    }
    for (depth, flags) in depths {
        // SAFETY: without a stack of its own the child is a copy of this single-threaded process, as after fork.
        let pid = unsafe { libc::syscall(libc::SYS_clone, flags.bits() | libc::SIGCHLD, 0, 0, 0, 0) };
        match Errno::result(pid) {
            Ok(0) => return Ok((None, depth)),
            Ok(pid) => return Ok((Some(Pid::from_raw(pid as i32)), depth)),
            Err(Errno::EPERM | Errno::ENOSPC | Errno::EINVAL | Errno::EUSERS) => {}
            Err(error) => return Err(error).context("cannot make a process in namespaces of its own"),
        }
    }
    bail!("cannot make a process")
}

/// The outer process: lets init continue, then only forwards signals and the exit status.
fn outer(init: Pid, depth: Depth, mut ready: PipeWriter, janitor: Pid) -> ! {
    let mapped = if depth == Depth::User { map_root(init) } else { Ok(()) };
    if let Err(error) = mapped.and_then(|()| Ok(ready.write_all(b"!")?)) {
        eprintln!("the bed cannot start: {error:#}");
    }
    drop(ready);
    let code = supervise(init, false);
    let _ = waitpid(janitor, None);
    exit(code)
}

/// Maps this user to root in the user namespace of `init`.
fn map_root(init: Pid) -> Result<()> {
    let proc = Path::new("/proc").join(init.to_string());
    fs::write(proc.join("setgroups"), "deny")?;
    fs::write(proc.join("uid_map"), format!("0 {} 1", geteuid()))?;
    fs::write(proc.join("gid_map"), format!("0 {} 1", getegid())).context("cannot map this user into a namespace")
}

/// Turns the new process into init and returns in its child, the inner process. Init keeps `alive` open until it exits.
fn become_init(
    mut go: PipeReader,
    alive: PipeWriter,
    cgroups: Result<Cgroups, String>,
    mask: SigSet,
) -> Result<Result<Cgroups, String>> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    prctl::set_child_subreaper(true)?;
    if go.read(&mut [0])? == 0 {
        exit(1); // the outer process died, or could not map this user, before the death signal was set
    }
    let cgroups = cgroups.and_then(|cgroups| cgroups.join().map(|()| cgroups).map_err(|e| format!("{e:#}")));
    // SAFETY: there is one thread.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(alive);
            prctl::set_pdeathsig(Signal::SIGKILL)?;
            mask.thread_set_mask()?;
            Ok(cgroups)
        }
        ForkResult::Parent { child } => exit(supervise(child, true)),
    }
}

fn forwarded_signals() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGCHLD].into_iter().collect()
}

/// Waits for `child`, forwarding signals to it; returns its exit code as a shell would.
///
/// A signal from the terminal goes to every process of the foreground group, including the inner one: forwarding it
/// would deliver it twice.
fn supervise(child: Pid, reap_orphans: bool) -> i32 {
    let signals = SignalFd::new(&forwarded_signals()).expect("signals can be read");
    loop {
        match signals.read_signal() {
            Ok(Some(info)) if info.ssi_signo as i32 == libc::SIGCHLD => {
                if let Some(code) = reap(child, reap_orphans) {
                    return code;
                }
            }
            Ok(Some(info)) if info.ssi_code != libc::SI_KERNEL => {
                let _ = kill(child, Signal::try_from(info.ssi_signo as i32).ok());
            }
            _ => {}
        }
    }
}

fn reap(child: Pid, orphans: bool) -> Option<i32> {
    let whom = if orphans { Pid::from_raw(-1) } else { child };
    let mut code = None;
    loop {
        match waitpid(whom, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(pid, status)) if pid == child => code = Some(status),
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == child => code = Some(128 + signal as i32),
            Ok(WaitStatus::StillAlive) | Err(_) => return code,
            Ok(_) => {}
        }
    }
}

/// Mounts that stay in this namespace: a /proc for its processes and the bed's directory in memory.
fn own_mounts(dir: &Path) -> Result<()> {
    let hardened = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
    mount(Some("proc"), "/proc", Some("proc"), hardened, None::<&str>).context("cannot mount /proc for the bed")?;
    // The size is a limit, not a reservation. The kubelet reports it as ephemeral storage, so the largest pod must fit.
    mount(Some("paddock-bed"), dir, Some("tmpfs"), MsFlags::empty(), Some("size=200g,mode=755"))
        .context("cannot mount the bed's directory")
}

/// Starts the janitor, which removes what the kernel does not, once every copy of the returned pipe end is closed.
fn start_janitor(home: &Path, cgroups: Option<&Cgroups>) -> Result<(Pid, PipeWriter)> {
    let (end, alive) = pipe()?;
    // SAFETY: there is one thread.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok((child, alive)),
        ForkResult::Child => {
            drop(alive);
            let _ = janitor(end, home, cgroups);
            exit(0)
        }
    }
}

fn janitor(end: PipeReader, home: &Path, cgroups: Option<&Cgroups>) -> Result<()> {
    setsid()?; // so that Ctrl-C does not reach it
    let null = fs::File::options().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    // Close all other inherited descriptors, such as the stdout pipe of a caller that waits for its end.
    // SAFETY: descriptor 3 becomes the pipe and nothing that owns another is used again: `exit` comes next.
    let mut end = unsafe {
        Errno::result(libc::dup2(end.as_raw_fd(), 3))?;
        libc::syscall(libc::SYS_close_range, 4, libc::c_uint::MAX, 0);
        fs::File::from(OwnedFd::from_raw_fd(3))
    };
    let _ = end.read(&mut [0]);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(300) {
        let cgroups_gone = cgroups.is_none_or(Cgroups::remove);
        let home_gone = fs::remove_dir_all(home).is_ok() || !home.exists();
        if cgroups_gone && home_gone {
            break;
        }
        sleep(Duration::from_millis(20));
    }
    Ok(())
}
