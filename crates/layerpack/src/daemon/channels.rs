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
use axum::extract::{ConnectInfo, DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use layerpack_runtime::Sandbox;
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::connections::{OfSandbox, Peer, pid_namespace};
use super::handlers::Refusal;
use super::packing;
use crate::api;
use crate::launch::{PACK_DIFF_LABEL, RULES_FILE, sandboxes};
use crate::policy::matches;

/// Snapshots that one sandbox may have asked for at a time, those that wait for their turn included,
/// whether or not anybody still waits for the answer.
const MOST_SNAPSHOTS: usize = 8;
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
    snapshots: Arc<Semaphore>,
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
        let listener = OfSandbox::new(listener, namespace);
        let channel = Arc::new(Channel {
            root: root.to_owned(),
            id: id.clone(),
            snapshots: Arc::new(Semaphore::new(MOST_SNAPSHOTS)),
        });
        let router = Router::new()
            .route(api::INSIDE, post(pack_diff))
            .layer(DefaultBodyLimit::max(MAX_REQUEST))
            .with_state(channel)
            .into_make_service_with_connect_info::<Peer>();
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

async fn pack_diff(
    State(channel): State<Arc<Channel>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    body: Result<Json<api::InsideRequest>, JsonRejection>,
) -> Response {
    let _busy = peer.busy();
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
    let turn = Arc::clone(&channel.snapshots);
    let turn = turn.try_acquire_owned().map_err(|_| {
        let why = format!(
            "{MOST_SNAPSHOTS} snapshots of this sandbox are being made or wait for their turn: ask again when one has ended"
        );
        Refusal::with(StatusCode::SERVICE_UNAVAILABLE, why)
    })?;
    packing::pack(&channel.root, &sandbox, &request, Some(turn)).await
}
