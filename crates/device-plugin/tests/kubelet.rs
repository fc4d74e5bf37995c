//! The plugin against a fake kubelet that uses its sockets as the real one does.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use paddock_device_plugin::{
    kubelet::Plugin,
    v1beta1::{
        AllocateRequest, ContainerAllocateRequest, DevicePluginOptions, Empty, ListAndWatchResponse, RegisterRequest,
        device_plugin_client::DevicePluginClient,
        registration_server::{Registration, RegistrationServer},
    },
};
use tempfile::TempDir;
use tokio::{net::UnixListener, sync::mpsc, task::JoinHandle, time};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{
    Code, Request, Response, Status, Streaming,
    transport::{Channel, Endpoint, Server},
};

/// Far longer than any step takes, even on a slow machine.
const DEADLINE: Duration = Duration::from_secs(120);
const RESOURCE: &str = "example.com/runner";
const ENDPOINT: &str = "paddock-example.com-runner.sock";

/// A fake kubelet, stopped on drop.
struct Kubelet {
    dir: PathBuf,
    requests: mpsc::UnboundedReceiver<RegisterRequest>,
    server: JoinHandle<()>,
}

struct Register {
    requests: mpsc::UnboundedSender<RegisterRequest>,
    refusals: std::sync::atomic::AtomicU32,
}

#[tonic::async_trait]
impl Registration for Register {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        use std::sync::atomic::Ordering::SeqCst;
        if self.refusals.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() {
            return Err(Status::invalid_argument("not today"));
        }
        let _ = self.requests.send(request.into_inner());
        Ok(Response::new(Empty {}))
    }
}

impl Kubelet {
    fn start(dir: &Path) -> Self {
        Self::that_refuses(dir, 0)
    }

    /// Like the real one at start: removes every socket in the directory and creates its own.
    fn that_refuses(dir: &Path, times: u32) -> Self {
        for entry in fs::read_dir(dir).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let (sender, requests) = mpsc::unbounded_channel();
        let listener = UnixListener::bind(dir.join("kubelet.sock")).unwrap();
        let service = RegistrationServer::new(Register { requests: sender, refusals: times.into() });
        let server = Server::builder().add_service(service).serve_with_incoming(UnixListenerStream::new(listener));
        let server = tokio::spawn(async move { server.await.unwrap() });
        Self { dir: dir.to_owned(), requests, server }
    }

    async fn registration(&mut self) -> RegisterRequest {
        let request = time::timeout(DEADLINE, self.requests.recv()).await;
        request.expect("the plugin registers in time").expect("this kubelet runs")
    }

    /// Waits for a registration and lists the slots, as the kubelet does.
    async fn slots(&mut self) -> (DevicePluginClient<Channel>, Streaming<ListAndWatchResponse>, Vec<String>) {
        let request = self.registration().await;
        assert_eq!(request.version, "v1beta1");
        assert_eq!(request.endpoint, ENDPOINT);
        assert_eq!(request.resource_name, RESOURCE);
        assert_eq!(request.options, Some(DevicePluginOptions::default()));
        let socket = format!("unix:{}", self.dir.join(&request.endpoint).display());
        let mut client = DevicePluginClient::new(Endpoint::from_shared(socket).unwrap().connect().await.unwrap());
        let mut stream = client.list_and_watch(Empty {}).await.unwrap().into_inner();
        let devices = stream.message().await.unwrap().expect("the slots are sent at once").devices;
        assert!(devices.iter().all(|device| device.health == "Healthy" && device.id.len() <= 63));
        (client, stream, devices.into_iter().map(|device| device.id).collect())
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// A plugin with two slots, stopped on drop.
struct Running {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    fn start(dir: &Path) -> Self {
        let (stop, plugin) = (CancellationToken::new(), Plugin::new(dir.to_owned(), RESOURCE.into(), 2));
        let token = stop.clone();
        Self { stop, task: tokio::spawn(async move { plugin.serve(&token).await }) }
    }

    async fn stop(mut self) {
        self.stop.cancel();
        time::timeout(DEADLINE, &mut self.task).await.expect("it stops in time").unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn allocate(ids: &[&str]) -> AllocateRequest {
    let container = |id: &&str| ContainerAllocateRequest { devices_ids: vec![(*id).to_owned()] };
    AllocateRequest { container_requests: ids.iter().map(container).collect() }
}

#[tokio::test]
async fn slots_are_advertised_and_given_out() {
    let dir = dir();
    let mut kubelet = Kubelet::start(dir.path());
    let plugin = Running::start(dir.path());
    let (mut client, mut stream, slots) = kubelet.slots().await;
    assert_eq!(slots, ["slot-0", "slot-1"]);
    assert_eq!(
        client.get_device_plugin_options(Empty {}).await.unwrap().into_inner(),
        DevicePluginOptions::default(),
        "the options it registered with"
    );
    let answer = client.allocate(allocate(&["slot-1", "slot-0"])).await.unwrap().into_inner();
    assert_eq!(answer.container_responses.len(), 2, "one answer for each container");
    let refusal = client.allocate(allocate(&["slot-0", "slot-2"])).await.unwrap_err();
    assert_eq!((refusal.code(), refusal.message()), (Code::NotFound, "there is no slot slot-2"));

    plugin.stop().await;
    assert!(stream.message().await.is_ok_and(|last| last.is_none()), "the stream ends in order");
    assert!(!dir.path().join(ENDPOINT).exists(), "the socket goes with the plugin");
    assert!(dir.path().join("kubelet.sock").exists());
}

#[tokio::test]
async fn a_kubelet_that_comes_later_is_waited_for() {
    let dir = dir();
    let _plugin = Running::start(&dir.path().join("not-there-yet"));
    let plugin = Running::start(dir.path());
    time::sleep(Duration::from_millis(100)).await;
    assert!(!plugin.task.is_finished());
    let mut kubelet = Kubelet::start(dir.path());
    kubelet.slots().await;
}

#[tokio::test]
async fn the_slots_come_back_with_a_restarted_kubelet() {
    let dir = dir();
    let mut kubelet = Kubelet::start(dir.path());
    let _plugin = Running::start(dir.path());
    let first = kubelet.slots().await;
    drop(kubelet);
    let mut kubelet = Kubelet::start(dir.path());
    let again = kubelet.slots().await;
    assert_eq!(again.2, first.2, "the same slots under the same names");
}

#[tokio::test]
async fn a_kubelet_that_dies_and_comes_back_is_found() {
    let dir = dir();
    let mut kubelet = Kubelet::start(dir.path());
    let _plugin = Running::start(dir.path());
    drop(kubelet.slots().await);
    // Its socket file stays, without a listener.
    drop(kubelet);
    let mut kubelet = Kubelet::start(dir.path());
    kubelet.slots().await;
}

#[tokio::test]
async fn a_closed_stream_leads_to_a_new_registration() {
    let dir = dir();
    let mut kubelet = Kubelet::start(dir.path());
    let _plugin = Running::start(dir.path());
    drop(kubelet.slots().await);
    kubelet.slots().await;
}

#[tokio::test]
async fn a_removed_socket_is_created_again() {
    let dir = dir();
    let mut kubelet = Kubelet::start(dir.path());
    let _plugin = Running::start(dir.path());
    let _first = kubelet.slots().await;
    fs::remove_file(dir.path().join(ENDPOINT)).unwrap();
    kubelet.slots().await;
}

#[tokio::test]
async fn a_refused_registration_is_tried_again() {
    let dir = dir();
    let mut kubelet = Kubelet::that_refuses(dir.path(), 1);
    let _plugin = Running::start(dir.path());
    kubelet.slots().await;
}

#[tokio::test]
async fn the_socket_of_a_killed_plugin_is_no_obstacle() {
    let dir = dir();
    let mut kubelet = Kubelet::start(dir.path());
    drop(UnixListener::bind(dir.path().join(ENDPOINT)).unwrap());
    let _plugin = Running::start(dir.path());
    kubelet.slots().await;
}

#[tokio::test]
async fn a_plugin_that_stops_leaves_the_socket_of_its_successor() {
    let dir = dir();
    let mut kubelet = Kubelet::start(dir.path());
    let plugin = Running::start(dir.path());
    let _open = kubelet.slots().await;
    // Sockets are compared by change time, which the kernel records with a granularity of milliseconds.
    time::sleep(Duration::from_millis(50)).await;
    plugin.stop.cancel();
    // No await in between: the plugin has had no chance to clean up.
    fs::remove_file(dir.path().join(ENDPOINT)).unwrap();
    let _successor = UnixListener::bind(dir.path().join(ENDPOINT)).unwrap();
    plugin.stop().await;
    assert!(dir.path().join(ENDPOINT).exists());
}
