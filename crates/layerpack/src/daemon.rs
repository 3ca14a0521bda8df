//! The node daemon: owns the node's layers and serves the API of `API.md` on a unix socket.
//!
//! One process per node root; the library's lock on the root makes a second one fail. It is the
//! worker of a holder ([`crate::holder`]), which starts it again when it dies, with the mounts, the
//! lock and the socket of the one before. Requests
//! are accepted by one thread and worked on by a bounded pool, since mounting and fetching block.
//! The bytes of layers do not pass through here: the FUSE threads of `layerpack_layerfs` serve
//! them.

mod channels;
mod connections;
mod guards;
mod handlers;
mod lost;
mod metrics;
mod orphans;
mod packing;
mod panics;
mod prune;
pub(crate) mod socket;

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{delete, get, post};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use crate::api;
use crate::client;
use handlers::Server;
use layerpack_layerfs::holder::Sets;
use socket::OwnerOnly;

use crate::holder::{Linked, Worker};
use crate::settings::Settings;

/// Name under which the holder keeps the API's socket.
pub(crate) const SOCKET_SET: &str = "socket";
/// Noted with it: a service manager opened it, and has it for the next daemon, too.
pub(crate) const PASSED_ON: &str = "passed on";

/// Threads that work on requests; more requests than that wait.
const WORKERS: usize = 32;

/// Serves the node at `root` under the signature policy in the file `policy` until it is told to
/// stop, by the API, by the holder, or by SIGTERM or SIGINT. With a `link`, what it serves goes on
/// when this process ends otherwise.
///
/// # Errors
/// When the root belongs to a running daemon, or the node cannot be started on this machine.
pub(crate) fn run(
    root: &Path,
    policy: PathBuf,
    settings: &Settings,
    linked: Option<Linked>,
) -> anyhow::Result<()> {
    let (mut sets, worker) = match linked {
        Some(linked) => (linked.sets, Some(linked.worker)),
        None => (Sets::new(), None),
    };
    panics::watch(worker.is_some());
    let socket = Socket::handed_on(root, &mut sets, worker.is_none())?;
    let ours = !socket.passed_on;
    let mut config = layerpack_layerfs::NodeConfig::recommended(root.to_owned());
    config.fetch.cache_max = settings.cache_max;
    config.fill_bytes_per_second = settings.fill_rate;
    config.erofs = settings.erofs;
    settings.node.apply(&mut config);
    config.open_store = crate::stores::opener(config.fetch.read_timeout);
    let keeper = worker.as_ref().map(Worker::keeper);
    let node = layerpack_layerfs::Node::start_with(config, &mut sets, keeper)?;
    let took_over = node.took_over();
    prune::at_start(&node, root, took_over);
    orphans::begin(&node, root);
    guards::at_start(root, &mut sets, worker.as_ref());
    let served = serve(
        root,
        Arc::clone(&node),
        policy,
        settings,
        socket,
        worker.clone(),
    );
    if let Some(worker) = &worker {
        if let Err(error) = &served
            && (took_over || worker.was_ready())
        {
            tracing::error!(error = %format!("{error:#}"), "ends; the holder starts another process");
            node.abandon();
            return served;
        }
        worker.stopping();
    }
    // Whatever ended the serving, nothing may stay mounted. After a stop by the API this finds
    // nothing to do.
    let stopped = node.stop(true).context("cannot unmount everything");
    // A service manager's socket is for the next daemon, too.
    if ours && let Err(error) = fs_err::remove_file(api::socket_path(root)) {
        tracing::debug!(%error, "the socket was gone");
    }
    served?;
    stopped?;
    tracing::info!("stopped");
    Ok(())
}

/// The API's socket as this process got it.
struct Socket {
    /// `None`: it is to be bound.
    fd: Option<OwnedFd>,
    /// A service manager opened it.
    passed_on: bool,
}

impl Socket {
    /// What the process before had, or `first`, without a holder, what a service manager passed on.
    fn handed_on(root: &Path, sets: &mut Sets, first: bool) -> anyhow::Result<Self> {
        if first {
            let fd = socket::passed_on(root)?.map(OwnedFd::from);
            let passed_on = fd.is_some();
            return Ok(Self { fd, passed_on });
        }
        let set = sets.remove(SOCKET_SET);
        let passed_on = set.as_ref().is_some_and(|set| set.state == PASSED_ON);
        let fd = set.and_then(|set| set.fds.into_iter().next());
        Ok(Self { fd, passed_on })
    }

    /// Listens on it.
    fn listen(self, root: &Path, worker: Option<&Worker>) -> anyhow::Result<OwnerOnly> {
        let inherited = self.fd.map(OwnerOnly::inherit);
        let listener = match inherited {
            Some(Ok(listener)) => listener,
            Some(Err(error)) if self.passed_on => {
                return Err(error).context("cannot use the socket that was passed on");
            }
            _ => OwnerOnly::bind(root).with_context(|| {
                format!("cannot listen on {}", api::socket_path(root).display())
            })?,
        };
        if let Some(worker) = worker {
            let state = match self.passed_on {
                true => PASSED_ON.into(),
                false => serde_json::Value::Null,
            };
            worker.keep(SOCKET_SET, &state, listener.as_fd());
        }
        Ok(listener)
    }
}

/// Who answers.
fn info(root: &Path, worker: Option<&Worker>) -> anyhow::Result<api::Info> {
    Ok(api::Info {
        api: api::VERSION,
        version: crate::holder::version(),
        pid: std::process::id(),
        root: root.to_owned(),
        started: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
        mount_namespace: client::mount_namespace()?,
        holder: worker.and_then(Worker::holder),
    })
}

fn serve(
    root: &Path,
    node: Arc<layerpack_layerfs::Node>,
    policy: PathBuf,
    settings: &Settings,
    socket: Socket,
    worker: Option<Worker>,
) -> anyhow::Result<()> {
    let info = info(root, worker.as_ref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(WORKERS)
        .enable_all()
        .build()
        .context("cannot start the daemon's threads")?;
    let stop = Arc::new(Notify::new());
    let server = Arc::new(Server::new(
        Arc::clone(&node),
        info,
        Arc::clone(&stop),
        policy,
        worker.clone(),
    ));
    runtime.block_on(async {
        let listener = socket.listen(root, worker.as_ref())?;
        if let Some(address) = settings.metrics_listen {
            metrics::listen(address, Arc::clone(&server)).await?;
        }
        // Registered before anyone is told that the daemon is ready.
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        server.channels.at_start(root);
        tracing::info!(root = %root.display(), pid = std::process::id(), took_over = node.took_over(), "ready");
        match &worker {
            Some(worker) => worker.ready(&node, &stop)?,
            None => {
                if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
                    tracing::warn!(%error, "cannot tell the service manager");
                }
            }
        }
        axum::serve(listener, router(server))
            .with_graceful_shutdown(async move {
                tokio::select! {
                    () = stop.notified() => tracing::info!("told to stop"),
                    _ = terminate.recv() => tracing::info!("ended by SIGTERM"),
                    _ = interrupt.recv() => tracing::info!("ended by SIGINT"),
                }
                match &worker {
                    Some(worker) => worker.stopping(),
                    None => {
                        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
                    }
                }
            })
            .await
            .context("serving failed")
    })
}

fn router(server: Arc<Server>) -> Router {
    Router::new()
        .route(api::INFO, get(handlers::info))
        .route(api::METRICS, get(metrics::answer))
        .route(api::STATUS, get(handlers::status))
        .route(api::STACKS, post(handlers::stack_up))
        .route(&api::stack_path("{lease}"), delete(handlers::release))
        .route(api::RECORDINGS, post(handlers::record_begin))
        .route(&api::recording_path("{id}"), delete(handlers::record_end))
        .route(api::TRACES, post(handlers::traces::begin))
        .route(
            &api::trace_path("{id}"),
            get(handlers::traces::next).delete(handlers::traces::end),
        )
        .route(api::PROFILES, get(handlers::profiles::list))
        .route(api::PROFILES, post(handlers::profiles::publish))
        .route(api::PACK_DIFF, post(packing::pack_diff))
        .route(api::GUARDS, post(handlers::guard))
        .route(api::HOLDER, post(handlers::holder))
        .route(api::CHANNELS, post(handlers::channel))
        .route(api::CACHE, get(handlers::cache::status))
        .route(api::CACHE_PINS, post(handlers::cache::pin))
        .route(api::CACHE_EVICT, post(handlers::cache::evict))
        .route(api::CACHE_VERIFY, post(handlers::cache::verify))
        .route(api::STOP, post(handlers::stop))
        .fallback(handlers::unknown)
        .layer(DefaultBodyLimit::max(api::MAX_REQUEST))
        .with_state(server)
}
