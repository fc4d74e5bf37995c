//! A real node: the kubelet with containerd, runc and CNI, running pods from images that the repository built.
//!
//! In the bed's mount namespace the kubelet has its own standard directories, including the one for device plugins.
//! Pods get addresses in the bed's network and reach its servers at `isolate::BED_ADDRESS`.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::{Api, Client};
use nix::mount::{MsFlags, mount};
use serde_json::json;
use tokio::{net::UnixStream, sync::Mutex};

use crate::{
    image::{full_reference, sandbox_image},
    isolate::POD_RANGE,
    kube::{ControlPlane, Identity, succeeded},
    process::{Process, tool},
};

/// The tools that [`Node::start`] needs, for `isolate::Options`.
pub const TOOLS: [&str; 2] = ["kubelet", "containerd"];

const DEADLINE: Duration = Duration::from_secs(120);
const SANDBOX_IMAGE: &str = "paddock-bed/sandbox:1";

/// Host directories that the node's programs always write to, with the subdirectories that they use there.
const PRIVATE_DIRS: [(&str, &[&str]); 3] = [
    ("/run", &["containerd", "runc", "netns"]),
    ("/var/lib", &["kubelet", "containerd", "cni"]),
    ("/var/log", &["pods", "containers"]),
];

pub struct Node {
    name: String,
    dir: PathBuf,
    client: Client,
    tools: PathBuf,
    labels: String,
    kubelet: Mutex<Option<Process>>,
    _containerd: Process,
}

impl Node {
    /// Starts the node and returns when it is Ready. Requires `Isolated::node_possible`; at most once per bed.
    pub async fn start(plane: &ControlPlane, name: &str, labels: &[(&str, &str)]) -> Result<Self> {
        let dir = plane.dir().join("node");
        for (place, own) in PRIVATE_DIRS {
            make_room(Path::new(place), own, &dir.join("rooms"))
                .with_context(|| format!("cannot make {place} the bed's own"))?;
        }
        let tools = tool("containerd")?;
        let containerd = start_containerd(&dir, &tools)?;
        write_kubelet_config(plane, &dir, name)?;
        let labels = labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",");
        let mut node = Self {
            name: name.to_owned(),
            client: plane.client(),
            tools,
            labels,
            kubelet: Mutex::new(None),
            _containerd: containerd,
            dir,
        };
        let socket = node.socket();
        node._containerd.until_ready(DEADLINE, async || UnixStream::connect(&socket).await.is_ok()).await?;
        let sandbox = node.dir.join("sandbox.tar");
        sandbox_image(SANDBOX_IMAGE)?.write(&sandbox)?;
        node.import_image(&sandbox).await?;
        node.start_kubelet().await?;
        Ok(node)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Imports the images of an archive, such as from `image::Image::write`, for pods that never pull.
    pub async fn import_image(&self, archive: &Path) -> Result<()> {
        let output = tokio::process::Command::from(self.program("usr/bin/ctr"))
            .arg("--address")
            .arg(self.socket())
            .args(["--namespace", "k8s.io", "images", "import", "--no-unpack=false"])
            .arg(archive)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await?;
        succeeded(&format!("importing {}", archive.display()), output).map(drop)
    }

    /// Starts the kubelet if it is not running, and waits until the node is Ready.
    pub async fn start_kubelet(&self) -> Result<()> {
        let mut running = self.kubelet.lock().await;
        if running.is_some() {
            return Ok(());
        }
        let mut command = self.path_of_tools(Command::new(tool("kubelet")?));
        command
            .arg(format!("--config={}", self.dir.join("kubelet.json").display()))
            .arg(format!("--kubeconfig={}", self.dir.join("kubelet.kubeconfig").display()))
            .arg(format!("--hostname-override={}", self.name))
            .arg(format!("--node-ip={}", crate::isolate::BED_ADDRESS))
            .arg(format!("--node-labels={}", self.labels));
        let mut kubelet = Process::spawn("kubelet", command, &self.dir.join("log"))?;
        kubelet.until_ready(DEADLINE, async || self.is_ready().await).await?;
        *running = Some(kubelet);
        Ok(())
    }

    /// Kills the kubelet; its pods keep running.
    pub async fn stop_kubelet(&self) {
        drop(self.kubelet.lock().await.take());
    }

    async fn is_ready(&self) -> bool {
        let nodes: Api<KubeNode> = Api::all(self.client.clone());
        let conditions = nodes.get(&self.name).await.ok().and_then(|node| node.status?.conditions);
        conditions.unwrap_or_default().iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("containerd.sock")
    }

    fn program(&self, path: &str) -> Command {
        self.path_of_tools(Command::new(self.tools.join(path)))
    }

    fn path_of_tools(&self, command: Command) -> Command {
        path_of_tools(&self.tools, command)
    }
}

/// Sets the search paths for programs and libraries of the unpacked Debian packages.
fn path_of_tools(tools: &Path, mut command: Command) -> Command {
    let dirs = ["usr/bin", "usr/sbin"].map(|dir| tools.join(dir).display().to_string()).join(":");
    let path = std::env::var("PATH").unwrap_or_default();
    let libraries = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    command.env("PATH", format!("{dirs}:{path}")).env("LD_LIBRARY_PATH", tools.join(libraries));
    command
}

fn start_containerd(dir: &Path, tools: &Path) -> Result<Process> {
    let network = dir.join("cni");
    fs::create_dir_all(&network)?;
    let configuration = format!(
        r#"version = 2
root = "{dir}/containerd/root"
state = "{dir}/containerd/state"
[grpc]
address = "{dir}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{dir}/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{sandbox}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{tools}/usr/sbin/runc"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{tools}/usr/lib/cni"
conf_dir = "{network}"
"#,
        dir = dir.display(),
        sandbox = full_reference(SANDBOX_IMAGE),
        tools = tools.display(),
        network = network.display(),
    );
    let path = dir.join("containerd.toml");
    fs::write(&path, configuration)?;
    // A default route is safe: the bed's network has no route out.
    let ipam = json!({
        "type": "host-local",
        "ranges": [[{ "subnet": POD_RANGE }]],
        "routes": [{ "dst": "0.0.0.0/0" }],
        "dataDir": dir.join("addresses"),
    });
    let list = json!({ "cniVersion": "0.4.0", "name": "bed", "plugins": [{ "type": "ptp", "ipam": ipam }] });
    fs::write(network.join("bed.conflist"), list.to_string())?;
    let mut command = path_of_tools(tools, Command::new(tools.join("usr/bin/containerd")));
    command.arg("--config").arg(path);
    Process::spawn("containerd", command, &dir.join("log"))
}

fn write_kubelet_config(plane: &ControlPlane, dir: &Path, name: &str) -> Result<()> {
    let pki = plane.pki();
    let client = pki.client(&format!("system:node:{name}"), &["system:nodes"])?;
    let serving = pki.server(&format!("kubelet-{name}"), &[name], &[plane.address().into()])?;
    pki.kubeconfig(&dir.join("kubelet.kubeconfig"), plane.url(), "default", Identity::Certificate(&client))?;
    fs::write(dir.join("resolv.conf"), "")?;
    let configuration = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": format!("unix://{}", dir.join("containerd.sock").display()),
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": pki.authority_file() },
        },
        "authorization": { "mode": "Webhook" },
        "tlsCertFile": serving.cert,
        "tlsPrivateKeyFile": serving.key,
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": false,
        "enforceNodeAllocatable": [],
        "failCgroupV1": false,
        "failSwapOn": false,
        "localStorageCapacityIsolation": true,
        // A full disk of the host must not evict pods.
        "evictionHard": { "nodefs.available": "0%", "imagefs.available": "0%", "memory.available": "0%" },
        "imageGCHighThresholdPercent": 100,
        "makeIPTablesUtilChains": false,
        "resolvConf": dir.join("resolv.conf"),
        "nodeStatusUpdateFrequency": "2s",
        "oomScoreAdj": 0, // lower values need privileges that root in a container lacks
        "healthzPort": 0,
    });
    Ok(fs::write(dir.join("kubelet.json"), configuration.to_string())?)
}

/// Mounts a directory over `place` that has the host's entries, but empty directories for `own`.
fn make_room(place: &Path, own: &[&str], rooms: &Path) -> Result<()> {
    let name = place.strip_prefix("/")?.to_string_lossy().replace('/', "-");
    let room = rooms.join(name);
    if room.exists() {
        bail!("a bed has one node, and it was started already");
    }
    fs::create_dir_all(&room)?;
    let bind =
        |from: &Path, to: &Path| mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>);
    for entry in fs::read_dir(place)? {
        let entry = entry?;
        let (from, to) = (entry.path(), room.join(entry.file_name()));
        if own.iter().any(|own| entry.file_name() == *own) {
            continue;
        }
        let kind = entry.file_type()?;
        if kind.is_symlink() {
            symlink(fs::read_link(&from)?, &to)?;
            continue;
        }
        if kind.is_dir() {
            fs::create_dir(&to)?;
        } else {
            fs::File::create(&to)?;
        }
        bind(&from, &to)?;
    }
    for own in own {
        fs::create_dir(room.join(own))?;
    }
    bind(&room, place)?;
    Ok(())
}
