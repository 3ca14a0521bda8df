//! Sandboxes' own way to the daemon: a socket for each, by which its processes ask for snapshots.
//!
//! The socket lies in a directory that nobody but root can enter and that is mounted into one
//! sandbox, so whoever speaks through it is of that sandbox: nothing that a process inside could
//! read, copy or forge says so. The peer's pid namespace is compared all the same. What is asked
//! for is done by a process of its own, `layerpack pack-diff`, so that neither its memory nor its
//! end is the daemon's.

use std::collections::HashMap;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use axum::Json;
use axum::Router;
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use layerpack_runtime::Sandbox;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::SocketAddr;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

use super::handlers::Refusal;
use super::packing;
use crate::api;
use crate::launch::{PACK_DIFF_LABEL, RULES_FILE, sandboxes};
use crate::policy::matches;

/// Connections of one sandbox at a time; more are closed.
const MOST_CONNECTIONS: usize = 8;
/// Largest request of a sandbox in bytes.
const MAX_REQUEST: usize = 64 << 10;

/// The sockets that are served, by the sandbox's id.
#[derive(Debug, Default)]
pub(super) struct Channels {
    open: Mutex<HashMap<String, JoinHandle<()>>>,
}

/// What the requests of one sandbox share.
#[derive(Debug)]
struct Channel {
    root: PathBuf,
    id: String,
}

impl Channels {
    /// Serves the channels of all sandboxes that have one.
    pub(super) fn at_start(&self, root: &Path) {
        let all = sandboxes(root).and_then(|all| Ok(all.list()?));
        for sandbox in all.unwrap_or_default() {
            if sandbox.spec.channel
                && let Err(error) = self.open(root, &sandbox)
            {
                let error = format!("{error:#}");
                tracing::warn!(sandbox = %sandbox.spec.id, %error, "its channel cannot be served");
            }
        }
    }

    /// Serves the channel of a sandbox. Within a runtime.
    pub(super) fn open(&self, root: &Path, sandbox: &Sandbox) -> anyhow::Result<()> {
        let id = sandbox.spec.id.to_string();
        let init = sandbox.pid.context("the sandbox does not run")?;
        let namespace = pid_namespace(init.as_raw_nonzero().get())
            .context("the sandbox's processes cannot be told from others")?;
        let listener = bind(&sandbox.channel)
            .with_context(|| format!("cannot listen in {}", sandbox.channel.display()))?;
        let listener = OfSandbox {
            inner: listener,
            namespace,
            free: Arc::new(Semaphore::new(MOST_CONNECTIONS)),
        };
        let channel = Arc::new(Channel {
            root: root.to_owned(),
            id: id.clone(),
        });
        let router = Router::new()
            .route(api::INSIDE, post(pack_diff))
            .layer(DefaultBodyLimit::max(MAX_REQUEST))
            .with_state(channel);
        let task = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                tracing::warn!(%error, "a channel ended");
            }
        });
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = open.insert(id, task) {
            before.abort();
        }
        Ok(())
    }

    /// Ends the channel of a sandbox, if it has one.
    pub(super) fn close(&self, id: &str) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = open.remove(id) {
            task.abort();
        }
    }
}

/// Makes the socket anew: one that is there belongs to a daemon that is gone.
fn bind(directory: &Path) -> std::io::Result<UnixListener> {
    use rustix::fs::{Mode, OFlags};
    // The directory's own name may be too long for a socket's.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let held = rustix::fs::open(directory, flags, Mode::empty())?;
    let path =
        PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd())).join(api::INSIDE_SOCKET);
    match fs_err::remove_file(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    // Any user of the sandbox; nobody else comes to this directory.
    fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

fn pid_namespace(pid: i32) -> Option<PathBuf> {
    fs_err::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

/// Accepts connections of one sandbox's processes, so many at a time.
#[derive(Debug)]
struct OfSandbox {
    inner: UnixListener,
    namespace: PathBuf,
    free: Arc<Semaphore>,
}

impl OfSandbox {
    fn is_inside(&self, stream: &UnixStream) -> bool {
        stream
            .peer_cred()
            .ok()
            .and_then(|peer| peer.pid())
            .and_then(pid_namespace)
            .is_some_and(|namespace| namespace == self.namespace)
    }
}

impl axum::serve::Listener for OfSandbox {
    type Io = Counted;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Counted, SocketAddr) {
        loop {
            match self.inner.accept().await {
                Ok((stream, _)) if !self.is_inside(&stream) => {
                    tracing::warn!("dropped a connection to a sandbox's channel from elsewhere");
                }
                Ok((stream, peer)) => match Arc::clone(&self.free).try_acquire_owned() {
                    Ok(permit) => {
                        return (
                            Counted {
                                stream,
                                _permit: permit,
                            },
                            peer,
                        );
                    }
                    Err(_) => tracing::warn!("a sandbox has too many connections"),
                },
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a sandbox's connection");
                    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// A connection, counted while it lasts.
#[derive(Debug)]
struct Counted {
    stream: UnixStream,
    _permit: OwnedSemaphorePermit,
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
        bytes: &[u8],
    ) -> std::task::Poll<std::io::Result<usize>> {
        std::pin::Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

async fn pack_diff(
    State(channel): State<Arc<Channel>>,
    body: Result<Json<api::InsideRequest>, JsonRejection>,
) -> Response {
    let request = match super::handlers::parsed(body) {
        Ok(request) => request,
        Err(refusal) => return refusal.into_response(),
    };
    match pack(&channel, request).await {
        Ok(report) => Json(report).into_response(),
        Err(refusal) => refusal.into_response(),
    }
}

async fn pack(
    channel: &Channel,
    request: api::InsideRequest,
) -> Result<serde_json::Value, Refusal> {
    let refuse = |why| Refusal::with(StatusCode::FORBIDDEN, why);
    let sandbox = packing::find(&channel.root, channel.id.clone()).await?;
    let allowed = sandbox
        .spec
        .labels
        .get(PACK_DIFF_LABEL)
        .ok_or_else(|| refuse("snapshots are not allowed".to_owned()))?;
    if !matches(allowed, &request.name) {
        return Err(refuse(format!(
            "this sandbox may publish snapshots named {allowed:?}, not {:?}",
            request.name
        )));
    }
    let mut labels = vec!["layerpack.by=sandbox".to_owned()];
    labels.extend(request.labels);
    let rules = sandbox.channel.with_file_name(RULES_FILE);
    let request = api::PackRequest {
        sandbox: channel.id.clone(),
        name: request.name,
        version: request.version,
        store: None,
        rules: rules.exists().then_some(rules),
        no_rules: false,
        sign: None,
        labels,
        excludes: request.excludes,
        dry_run: request.dry_run,
        squash: request.squash,
        no_git_index: request.no_git_index,
    };
    packing::pack(&channel.root, &sandbox, &request).await
}
