//! Answering peers.

use std::collections::HashMap;
use std::io::{self, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::wire::{EXTENTS, Head, NODE, Timed, numbers, ranges};
use super::{PeerAnswer, PeerAsk, PeerToken};
use crate::digest::Digest;
use crate::manifest::LayerId;

/// Connections at once; more are closed unread.
const MAX_CONNECTIONS: usize = 128;
/// How long a connection waits for its next request.
const IDLE: Duration = Duration::from_secs(30);
/// How long the rest of a request, or the taking of an answer, may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for connections at the end.
const END_LIMIT: Duration = Duration::from_secs(5);

/// Who answers.
pub trait PeerService: Send + Sync + 'static {
    /// The node's identity.
    fn node(&self) -> String;

    /// What the node has of these extents. Only verified bytes.
    fn extents(&self, ask: &PeerAsk) -> Served;
}

/// An answer to a peer.
#[derive(Debug)]
pub enum Served {
    /// The layer is not served here.
    Absent,
    /// There is too much to do; the store is as near.
    Busy,
    /// What there is.
    Extents(PeerAnswer),
}

/// Connections under way.
#[derive(Default)]
struct Connections {
    open: Mutex<HashMap<u64, TcpStream>>,
    gone: Condvar,
    next: AtomicU64,
    ended: AtomicBool,
}

/// Answers peers until it is dropped.
pub struct PeerServer {
    address: SocketAddr,
    connections: Arc<Connections>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for PeerServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerServer")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl PeerServer {
    /// Listens on `address` (port 0: any) and answers with `service`.
    ///
    /// # Errors
    /// When the address cannot be listened on, or no thread can be started.
    pub fn start(
        address: SocketAddr,
        token: Option<PeerToken>,
        service: Arc<dyn PeerService>,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let connections = Arc::new(Connections::default());
        let shared = Arc::clone(&connections);
        let thread = std::thread::Builder::new()
            .name("peers".to_owned())
            .stack_size(128 << 10)
            .spawn(move || accept(&listener, &token, &service, &shared))?;
        Ok(Self {
            address,
            connections,
            thread: Some(thread),
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for PeerServer {
    fn drop(&mut self) {
        self.connections.ended.store(true, Ordering::Release);
        // Wakes the thread that accepts.
        let mut own = self.address;
        if own.ip().is_unspecified() {
            let loopback: std::net::IpAddr = match own {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            };
            own.set_ip(loopback);
        }
        let woken = TcpStream::connect_timeout(&own, END_LIMIT);
        if let (Ok(_), Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
        let end = Instant::now() + END_LIMIT;
        let mut open = lock(&self.connections.open);
        for stream in open.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        while !open.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            open = self
                .connections
                .gone
                .wait_timeout(open, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A table of streams: whole at each step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept(
    listener: &TcpListener,
    token: &Option<PeerToken>,
    service: &Arc<dyn PeerService>,
    connections: &Arc<Connections>,
) {
    loop {
        let accepted = listener.accept();
        if connections.ended.load(Ordering::Acquire) {
            return;
        }
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely: wait for some to be closed.
                tracing::warn!(%error, "cannot accept a peer's connection");
                std::thread::sleep(Duration::from_millis(200));
                continue;
            }
        };
        let Ok(copy) = stream.try_clone() else {
            continue;
        };
        let number = connections.next.fetch_add(1, Ordering::Relaxed);
        {
            let mut open = lock(&connections.open);
            if open.len() >= MAX_CONNECTIONS {
                continue;
            }
            open.insert(number, copy);
        }
        let guard = Open {
            connections: Arc::clone(connections),
            number,
        };
        let (token, service) = (token.clone(), Arc::clone(service));
        let started = std::thread::Builder::new()
            .name("peer".to_owned())
            .stack_size(512 << 10)
            .spawn(move || {
                let _guard = guard;
                if let Err(error) = serve(stream, &token, &*service) {
                    tracing::debug!(%error, "a peer's connection ended");
                }
            });
        if let Err(error) = started {
            tracing::warn!(%error, "no thread for a peer's connection");
        }
    }
}

/// Takes a connection out of the table, however its thread ends.
struct Open {
    connections: Arc<Connections>,
    number: u64,
}

impl Drop for Open {
    fn drop(&mut self) {
        lock(&self.connections.open).remove(&self.number);
        self.connections.gone.notify_all();
    }
}

fn serve(
    stream: TcpStream,
    token: &Option<PeerToken>,
    service: &dyn PeerService,
) -> io::Result<()> {
    let _ = stream.set_nodelay(true);
    let mut reader = BufReader::new(Timed {
        stream,
        end: Instant::now() + IDLE,
    });
    loop {
        reader.get_mut().end = Instant::now() + IDLE;
        let Some(head) = Head::read(&mut reader)? else {
            return Ok(());
        };
        reader.get_mut().end = Instant::now() + PATIENCE;
        let may = token.as_ref().is_none_or(|token| {
            head.get("authorization")
                .and_then(|value| value.strip_prefix("Bearer "))
                .is_some_and(|shown| token.is(shown))
        });
        // Bodies belong to no request: what follows would not be understood.
        let last = head.closes() || head.body_len()? > 0;
        let reply = if may {
            answer(&head, service)
        } else {
            Reply::status(401)
        };
        let stream = reader.get_mut();
        // The answer may have taken its time; taking it may take some too.
        stream.end = Instant::now() + PATIENCE;
        reply.write(stream, last)?;
        if last || !may {
            return Ok(());
        }
    }
}

struct Reply {
    status: u16,
    header: Option<(&'static str, String)>,
    body: Vec<u8>,
}

impl Reply {
    fn status(status: u16) -> Self {
        Self {
            status,
            header: None,
            body: Vec::new(),
        }
    }

    fn write(&self, stream: &mut impl Write, last: bool) -> io::Result<()> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            401 => "Unauthorized",
            404 => "Not Found",
            _ => "Service Unavailable",
        };
        let mut head = format!(
            "HTTP/1.1 {} {reason}\r\ncontent-length: {}\r\n",
            self.status,
            self.body.len()
        );
        if let Some((name, value)) = &self.header {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if last || self.status == 401 {
            head.push_str("connection: close\r\n");
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes())?;
        stream.write_all(&self.body)?;
        stream.flush()
    }
}

fn answer(head: &Head, service: &dyn PeerService) -> Reply {
    let mut words = head.start.split(' ');
    let (method, target) = (words.next(), words.next().unwrap_or_default());
    if method != Some("GET") {
        return Reply::status(400);
    }
    if target == "/v1/node" {
        return Reply {
            header: Some((NODE, service.node())),
            ..Reply::status(200)
        };
    }
    let Some(rest) = target.strip_prefix("/v1/extents/") else {
        return Reply::status(404);
    };
    let Some(ask) = parse(rest) else {
        return Reply::status(400);
    };
    match service.extents(&ask) {
        Served::Absent => Reply::status(404),
        Served::Busy => Reply::status(503),
        Served::Extents(found) => Reply {
            status: 200,
            header: Some((EXTENTS, ranges(&found.extents))),
            body: found.bytes,
        },
    }
}

/// `LAYER?of=…&fill=…`.
fn parse(text: &str) -> Option<PeerAsk> {
    let (layer, query) = text.split_once('?')?;
    let layer = format!("b3:{layer}").parse::<Digest>().ok()?;
    let mut ask = PeerAsk {
        layer: LayerId::from_digest(layer),
        extents: Vec::new(),
        fill: false,
    };
    for field in query.split('&') {
        match field.split_once('=')? {
            ("of", list) => ask.extents = numbers(list).ok()?,
            ("fill", text) => ask.fill = text == "1",
            _ => {}
        }
    }
    Some(ask)
}
