//! Client of the daemon's API: one HTTP request per connection over the unix socket.
//!
//! Calls block. Each client owns a current-thread runtime, so no thread outlives it: a sandbox is
//! launched from a process with a single thread, after the client was dropped.

mod failing;
mod start;

pub(crate) use start::{ensure, mount_namespace};

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use layerpack_layerfs::{CacheStatus, Evicted, LearntProfile, TraceBatch};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::api;
use crate::daemon::socket::Address;

/// For answers that need no work.
const QUICK: Duration = Duration::from_secs(30);
/// For answers that wait for a store or for unmounting.
const PATIENT: Duration = Duration::from_secs(600);

/// How often a request is repeated whose answer was lost, and the pause before.
const AGAIN: u32 = 8;
const PAUSE: Duration = Duration::from_millis(50);
/// How long an answer may take before it is asked whether anybody lives who could give it.
const SILENCE: Duration = Duration::from_secs(2);

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// No process serves the socket.
    #[error("no layerpack daemon runs for {root} (start it with `layerpack daemon`)")]
    NotRunning {
        /// The node's root directory.
        root: String,
    },
    /// The socket cannot be used.
    #[error("cannot reach the daemon at {socket} (root only; see `layerpack doctor`)")]
    Connect {
        /// Path of the socket.
        socket: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The socket of a sandbox cannot be used.
    #[error(
        "nobody answers at {socket}: the node's daemon may be starting anew; ask again in a moment"
    )]
    Away {
        /// Path of the socket.
        socket: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The daemon said no.
    #[error("{message}")]
    Refused {
        /// Status of the reply.
        status: u16,
        /// Its words.
        message: String,
    },
    /// Its processes end one after another.
    #[error("{0}")]
    Failing(String),
    /// The connection ended early, or what came is no answer.
    #[error("the daemon gave no answer to {request} ({hint})")]
    Lost {
        /// Method and path.
        request: String,
        /// What may have happened, and where to look.
        hint: String,
        /// What was seen.
        source: anyhow::Error,
    },
}

/// Talks to the daemon of one node.
#[derive(Debug)]
pub(crate) struct Client {
    root: PathBuf,
    /// Another socket than the node's.
    socket: Option<PathBuf>,
    runtime: tokio::runtime::Runtime,
}

impl Client {
    /// A client of the node at `root`; connects on each call only.
    pub(crate) fn new(root: &Path) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start the client")?;
        Ok(Self {
            root: root.to_owned(),
            socket: None,
            runtime,
        })
    }

    /// A client of the socket at this path, as a sandbox has one.
    pub(crate) fn at(socket: &Path) -> anyhow::Result<Self> {
        let root = socket.parent().unwrap_or(Path::new("/"));
        let client = Self::new(root)?;
        Ok(Self {
            socket: Some(socket.to_owned()),
            ..client
        })
    }

    /// Who answers.
    pub(crate) fn info(&self) -> Result<api::Info, ClientError> {
        self.call::<(), _>(Method::GET, api::INFO, None, QUICK)
    }

    /// What the node holds.
    pub(crate) fn status(&self) -> Result<api::Status, ClientError> {
        self.call::<(), _>(Method::GET, api::STATUS, None, QUICK)
    }

    /// Mounts a stack of layers and takes a lease on it.
    pub(crate) fn stack_up(
        &self,
        request: &api::StackRequest,
    ) -> Result<api::StackReply, ClientError> {
        self.call(Method::POST, api::STACKS, Some(request), PATIENT)
    }

    /// Ends a lease.
    pub(crate) fn release(&self, lease: &str) -> Result<api::Released, ClientError> {
        self.call::<(), _>(Method::DELETE, &api::stack_path(lease), None, PATIENT)
    }

    /// Begins a recording.
    pub(crate) fn record_begin(
        &self,
        request: &api::RecordRequest,
    ) -> Result<api::RecordBegun, ClientError> {
        self.call(Method::POST, api::RECORDINGS, Some(request), PATIENT)
    }

    /// Ends a recording.
    pub(crate) fn record_end(&self, id: &str) -> Result<api::Recording, ClientError> {
        self.call::<(), _>(Method::DELETE, &api::recording_path(id), None, PATIENT)
    }

    /// What the node has learnt.
    pub(crate) fn learnt(&self) -> Result<Vec<LearntProfile>, ClientError> {
        self.call::<(), _>(Method::GET, api::PROFILES, None, QUICK)
    }

    /// Has what the node has learnt stored.
    pub(crate) fn publish(
        &self,
        request: &api::PublishRequest,
    ) -> Result<api::Published, ClientError> {
        self.call(Method::POST, api::PROFILES, Some(request), PATIENT)
    }

    /// Begins to watch reads.
    pub(crate) fn trace_begin(
        &self,
        request: &api::TraceRequest,
    ) -> Result<api::TraceBegun, ClientError> {
        self.call(Method::POST, api::TRACES, Some(request), QUICK)
    }

    /// Reads since the last call; waits for some for a moment.
    pub(crate) fn trace_next(&self, id: u64) -> Result<TraceBatch, ClientError> {
        self.call::<(), _>(Method::GET, &api::trace_path(&id.to_string()), None, QUICK)
    }

    /// Ends it.
    pub(crate) fn trace_end(&self, id: u64) -> Result<api::TraceEnded, ClientError> {
        self.call::<(), _>(
            Method::DELETE,
            &api::trace_path(&id.to_string()),
            None,
            QUICK,
        )
    }

    /// Has the daemon let a sandbox go on if process `pid` ends while it keeps that frozen.
    pub(crate) fn guard(&self, sandbox: &str, pid: u32) -> Result<api::Guarding, ClientError> {
        let request = api::GuardRequest {
            sandbox: sandbox.to_owned(),
            pid,
        };
        self.call(Method::POST, api::GUARDS, Some(&request), QUICK)
    }

    /// Has another holder, of the daemon's own program, take the place of the one there is.
    pub(crate) fn replace_holder(&self) -> Result<api::Holder, ClientError> {
        self.call::<(), _>(Method::POST, api::HOLDER, None, QUICK)
    }

    /// Has the daemon serve the channel of a sandbox.
    pub(crate) fn channel(&self, sandbox: &str) -> Result<api::ChannelOpen, ClientError> {
        let request = api::ChannelRequest {
            sandbox: sandbox.to_owned(),
        };
        self.call(Method::POST, api::CHANNELS, Some(&request), QUICK)
    }

    /// Asks for a snapshot, from inside a sandbox.
    pub(crate) fn pack_diff(
        &self,
        request: &api::InsideRequest,
    ) -> Result<serde_json::Value, ClientError> {
        self.call(Method::POST, api::INSIDE, Some(request), PATIENT)
    }

    /// What the node's cache holds.
    pub(crate) fn cache(&self) -> Result<CacheStatus, ClientError> {
        self.call::<(), _>(Method::GET, api::CACHE, None, PATIENT)
    }

    /// Pins layers, or lets them go.
    pub(crate) fn cache_pin(
        &self,
        request: &api::CachePin,
    ) -> Result<api::CachePinned, ClientError> {
        self.call(Method::POST, api::CACHE_PINS, Some(request), QUICK)
    }

    /// Evicts.
    pub(crate) fn cache_evict(&self, request: &api::CacheEvict) -> Result<Evicted, ClientError> {
        self.call(Method::POST, api::CACHE_EVICT, Some(request), PATIENT)
    }

    /// Checks what is cached.
    pub(crate) fn cache_verify(
        &self,
        request: &api::CacheLayers,
    ) -> Result<api::CacheVerified, ClientError> {
        self.call(Method::POST, api::CACHE_VERIFY, Some(request), PATIENT)
    }

    /// Ends the daemon.
    pub(crate) fn stop(&self, force: bool) -> Result<api::Stopping, ClientError> {
        self.call(
            Method::POST,
            api::STOP,
            Some(&api::StopRequest { force }),
            PATIENT,
        )
    }

    /// Asks. A daemon that dies before it has answered is started again by its holder and asked again:
    /// what may be repeated is then done after all.
    fn call<B: Serialize, R: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&B>,
        limit: Duration,
    ) -> Result<R, ClientError> {
        let repeatable = !matches!(path, api::STOP | api::INSIDE | api::RECORDINGS);
        let begun = std::time::Instant::now();
        let mut again = 0;
        loop {
            match self.call_once(method.clone(), path, body, limit) {
                Err(ClientError::Lost { .. })
                    if repeatable && again < AGAIN && begun.elapsed() < limit =>
                {
                    again += 1;
                    std::thread::sleep(PAUSE);
                }
                other => return other,
            }
        }
    }

    fn call_once<B: Serialize, R: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&B>,
        limit: Duration,
    ) -> Result<R, ClientError> {
        let lost = |source: anyhow::Error| {
            ClientError::Lost {
            request: format!("{method} {path}"),
            hint: match &self.socket {
                None => format!(
                    "it may have been killed; its log is {}",
                    self.root.join(api::LOG_NAME).display()
                ),
                Some(_) => "it may have been started anew, or too many connections of this sandbox are open; ask again: nothing is published twice".to_owned(),
            },
            source,
        }
        };
        let bytes = match body {
            Some(body) => serde_json::to_vec(body).map_err(|e| lost(e.into()))?,
            None => Vec::new(),
        };
        let request = Request::builder()
            .method(&method)
            .uri(path)
            .header(hyper::header::HOST, "localhost")
            .header(hyper::header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(bytes)))
            .map_err(|e| lost(e.into()))?;
        self.runtime.block_on(async {
            let stream = self.connect().await?;
            let (status, reply) = self.answer(exchange(stream, request), limit, &lost).await?;
            if status == StatusCode::OK {
                return serde_json::from_slice(&reply).map_err(|e| lost(e.into()));
            }
            match serde_json::from_slice::<api::ErrorReply>(&reply) {
                Ok(refusal) => Err(ClientError::Refused {
                    status: status.as_u16(),
                    message: refusal.error.message,
                }),
                Err(_) => Err(lost(anyhow::anyhow!("status {status} without a reason"))),
            }
        })
    }

    /// Waits for an answer: not for long where no process lives for long enough to give one.
    async fn answer(
        &self,
        exchange: impl Future<Output = anyhow::Result<(StatusCode, Bytes)>>,
        limit: Duration,
        lost: impl Fn(anyhow::Error) -> ClientError,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let failing = || {
            let of_node = self.socket.is_none();
            let said = of_node.then(|| failing::failing(&self.root)).flatten();
            said.map_or(Ok(()), |said| Err(ClientError::Failing(said)))
        };
        let mut exchange = std::pin::pin!(exchange);
        let end = tokio::time::Instant::now() + limit;
        loop {
            let next = end.min(tokio::time::Instant::now() + SILENCE);
            match tokio::time::timeout_at(next, &mut exchange).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => return Err(lost(error)),
                Err(_) if next >= end => {
                    let limit = limit.as_secs();
                    return Err(lost(anyhow::anyhow!("nothing came within {limit} s")));
                }
                Err(_) => failing()?,
            }
        }
    }

    async fn connect(&self) -> Result<UnixStream, ClientError> {
        if let Some(socket) = &self.socket {
            return UnixStream::connect(socket)
                .await
                .map_err(|source| ClientError::Away {
                    socket: socket.display().to_string(),
                    source,
                });
        }
        let socket = api::socket_path(&self.root);
        let absent = |e: &io::Error| {
            matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            )
        };
        let connected = match Address::of(&self.root) {
            Ok(address) => UnixStream::connect(address.path()).await,
            Err(e) => Err(e),
        };
        connected.map_err(|source| {
            if absent(&source) {
                ClientError::NotRunning {
                    root: self.root.display().to_string(),
                }
            } else {
                ClientError::Connect {
                    socket: socket.display().to_string(),
                    source,
                }
            }
        })
    }
}

async fn exchange(
    stream: UnixStream,
    request: Request<Full<Bytes>>,
) -> anyhow::Result<(StatusCode, Bytes)> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // The driver ends by itself when `sender` and the body are dropped.
    let driver = tokio::spawn(connection);
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), api::MAX_REPLY)
        .collect()
        .await
        .map_err(|e| anyhow::anyhow!("{e}"))?
        .to_bytes();
    driver.abort();
    Ok((status, body))
}
