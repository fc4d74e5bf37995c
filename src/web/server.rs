//! The HTTP server. What a client that sends slowly, or nothing, can take of it is bounded.
//!
//! Where a bound is reached, the connection that has kept the server waiting for longest is closed in favour of the new
//! one. So a client that sends its request at once is served beside any number of clients that do not.

use std::{
    collections::HashMap,
    net::IpAddr,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{Router, body::Body};
use hyper::{body::Body as _, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use paddock_effects::lock;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

/// The buffer of a connection, and so the longest head of a request. GitHub's have 2 KB.
const BUFFER_BYTES: usize = 16 << 10;
/// The pause after a failed `accept`: mostly the process has too many open files.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// How often closed connections are logged.
const LOG_PERIOD: Duration = Duration::from_secs(60);

/// What clients may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at a time; half of the files that a process may open by default.
    pub connections: usize,
    /// Connections of one address. All deliveries may come from one: an ingress.
    pub per_address: usize,
    /// How long a client may take for the head of a request, and may be idle between two.
    pub head: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 512, per_address: 256, head: Duration::from_secs(10) }
    }
}

/// Serves until `stop`, then until the requests under way are answered.
pub async fn serve(listener: TcpListener, router: Router, limits: Limits, stop: CancellationToken) {
    let (connections, tasks) = (Arc::new(Connections::new(limits)), TaskTracker::new());
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                if let Some(connection) = connections.open(peer.ip().to_canonical()) {
                    tasks.spawn(serve_connection(stream, router.clone(), connection, limits, stop.clone()));
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

async fn serve_connection(
    stream: TcpStream,
    router: Router,
    connection: Connection,
    limits: Limits,
    stop: CancellationToken,
) {
    let closed = connection.0.closed.clone();
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        let (router, connection) = (router.clone(), connection.clone());
        async move {
            if request.body().is_end_stream() {
                connection.received();
            }
            request.extensions_mut().insert(connection.clone());
            let answer = router.oneshot(request.map(Body::new)).await;
            connection.waits();
            answer
        }
    });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(BUFFER_BYTES);
    let mut served = pin!(server.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        // An error is the client's: it left, or sent no HTTP.
        _ = served.as_mut() => return,
        () = closed.cancelled() => return,
        () = stop.cancelled() => served.as_mut().graceful_shutdown(),
    }
    let _ = served.await;
}

/// The open connections.
struct Connections {
    limits: Limits,
    open: Mutex<HashMap<u64, Entry>>,
    next: AtomicU64,
    log: Mutex<Option<Instant>>,
}

struct Entry {
    address: IpAddr,
    /// Since when the server waits for the client; none while it works for it.
    waits_since: Option<Instant>,
    closed: CancellationToken,
}

/// An open connection; in the extensions of its requests.
#[derive(Clone)]
pub struct Connection(Arc<OpenConnection>);

struct OpenConnection {
    id: u64,
    connections: Arc<Connections>,
    closed: CancellationToken,
}

impl Connections {
    fn new(limits: Limits) -> Self {
        Self { limits, open: Mutex::default(), next: AtomicU64::default(), log: Mutex::default() }
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<u64, Entry>> {
        lock(&self.open)
    }

    /// Registers a connection, and closes another one if there are too many; `None` if the server works for all of them.
    fn open(self: &Arc<Self>, address: IpAddr) -> Option<Connection> {
        let mut open = self.entries();
        let of_address = open.values().filter(|entry| entry.address == address).count();
        let crowded = |entry: &Entry| match of_address >= self.limits.per_address {
            true => entry.address == address,
            false => open.len() >= self.limits.connections,
        };
        if of_address >= self.limits.per_address || open.len() >= self.limits.connections {
            let closed = longest_waiting(open.iter().filter(|(_, entry)| crowded(entry)))?;
            self.close(&mut open, closed);
        }
        let (id, closed) = (self.next.fetch_add(1, Ordering::Relaxed), CancellationToken::new());
        open.insert(id, Entry { address, waits_since: Some(Instant::now()), closed: closed.clone() });
        Some(Connection(Arc::new(OpenConnection { id, connections: self.clone(), closed })))
    }

    fn close(&self, open: &mut HashMap<u64, Entry>, id: u64) {
        let Some(entry) = open.remove(&id) else { return };
        entry.closed.cancel();
        let mut logged = lock(&self.log);
        if logged.is_none_or(|last| last.elapsed() >= LOG_PERIOD) {
            *logged = Some(Instant::now());
            tracing::warn!(address = %entry.address, open = open.len(), "connection closed to make room: it kept the server waiting");
        }
    }
}

fn longest_waiting<'a>(entries: impl Iterator<Item = (&'a u64, &'a Entry)>) -> Option<u64> {
    let waiting = entries.filter_map(|(id, entry)| Some((entry.waits_since?, *id)));
    waiting.min().map(|(_, id)| id)
}

impl Connection {
    /// The request has arrived whole: the connection is not closed before its answer.
    pub fn received(&self) {
        self.set(None);
    }

    fn waits(&self) {
        self.set(Some(Instant::now()));
    }

    fn set(&self, waits_since: Option<Instant>) {
        if let Some(entry) = self.0.connections.entries().get_mut(&self.0.id) {
            entry.waits_since = waits_since;
        }
    }

    /// Closes the connection that has kept the server waiting for longest, if that is longer than this one has.
    pub fn close_another(&self) -> bool {
        let mut open = self.0.connections.entries();
        match longest_waiting(open.iter()) {
            Some(longest) if longest != self.0.id => {
                self.0.connections.close(&mut open, longest);
                true
            }
            Some(_) | None => false,
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.connections.entries().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::routing::get;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        sync::Notify,
    };

    use super::*;

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    const SLOW_REQUEST: &[u8] = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n";

    struct Served {
        address: SocketAddr,
        /// A request for `/slow` has arrived.
        arrived: Arc<Notify>,
        /// Lets it be answered.
        answered: Arc<Notify>,
        stop: CancellationToken,
    }

    async fn start(limits: Limits) -> Served {
        let (arrived, answered) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (tell, wait) = (arrived.clone(), answered.clone());
        let slow = async move || {
            tell.notify_one();
            wait.notified().await;
            "late"
        };
        let router = Router::new().route("/", get(async || "served")).route("/slow", get(slow));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        tokio::spawn(serve(listener, router, limits, stop.clone()));
        Served { address, arrived, answered, stop }
    }

    async fn connect(address: SocketAddr, sent: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(sent).await.unwrap();
        stream
    }

    async fn answer(stream: &mut TcpStream) -> String {
        let mut buffer = vec![0; 4096];
        let read = stream.read(&mut buffer).await.unwrap_or(0);
        String::from_utf8_lossy(&buffer[..read]).into_owned()
    }

    #[tokio::test]
    async fn a_client_that_sends_is_served_beside_many_that_do_not() {
        let head = Duration::from_secs(600);
        for (connections, per_address) in [(4, 100), (100, 4)] {
            let served = start(Limits { connections, per_address, head }).await;
            let mut silent = Vec::new();
            for number in 0..40 {
                silent.push(connect(served.address, [&b""[..], b"POST / HTTP/1.1\r\nContent-Le"][number % 2]).await);
            }
            assert!(answer(&mut connect(served.address, REQUEST).await).await.ends_with("served"));
            assert_eq!(answer(&mut silent[0]).await, "", "the first one was closed");
        }
    }

    #[tokio::test]
    async fn a_request_under_way_is_not_closed_for_others() {
        let served = start(Limits { connections: 2, per_address: 2, head: Duration::from_secs(600) }).await;
        let mut slow = connect(served.address, SLOW_REQUEST).await;
        served.arrived.notified().await;
        for _ in 0..10 {
            assert!(answer(&mut connect(served.address, REQUEST).await).await.ends_with("served"));
        }
        served.answered.notify_one();
        assert!(answer(&mut slow).await.ends_with("late"));
    }

    #[tokio::test]
    async fn a_head_that_does_not_arrive_is_waited_for_only_so_long() {
        let served = start(Limits { head: Duration::from_millis(50), ..Limits::default() }).await;
        for sent in [&b""[..], b"GET / HTTP/1.1\r\nHost:", REQUEST] {
            let mut stream = connect(served.address, sent).await;
            while !answer(&mut stream).await.is_empty() {}
        }
    }

    #[tokio::test]
    async fn it_stops_when_told_and_answers_what_is_under_way() {
        let served = start(Limits::default()).await;
        let mut slow = connect(served.address, SLOW_REQUEST).await;
        served.arrived.notified().await;
        served.stop.cancel();
        while TcpStream::connect(served.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
        served.answered.notify_one();
        assert!(answer(&mut slow).await.ends_with("late"));
    }
}
