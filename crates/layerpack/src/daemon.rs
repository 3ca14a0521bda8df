//! The node daemon: owns the node's layers and serves the API of `API.md` on a unix socket.
//!
//! One process per node root; the library's lock on the root makes a second one fail. Requests
//! are accepted by one thread and worked on by a bounded pool, since mounting and fetching block.
//! The bytes of layers do not pass through here: the FUSE threads of `layerpack_layerfs` serve
//! them.

mod channels;
mod guards;
mod handlers;
mod metrics;
mod prune;
pub(crate) mod socket;

use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
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
use socket::OwnerOnly;

use crate::settings::Settings;

/// Threads that work on requests; more requests than that wait.
const WORKERS: usize = 32;

/// Serves the node at `root` under the signature policy in the file `policy` until it is told to stop, by the API or by SIGTERM or SIGINT.
///
/// # Errors
/// When the root belongs to a running daemon, or the node cannot be started on this machine.
pub(crate) fn run(root: &Path, policy: PathBuf, settings: &Settings) -> anyhow::Result<()> {
    // Before anything else is opened.
    let passed_on = socket::passed_on(root)?;
    let ours = passed_on.is_none();
    let mut config = layerpack_layerfs::NodeConfig::recommended(root.to_owned());
    config.fetch.cache_max = settings.cache_max;
    config.fill_bytes_per_second = settings.fill_rate;
    config.erofs = settings.erofs;
    settings.node.apply(&mut config);
    let node = layerpack_layerfs::Node::start(config)?;
    prune::at_start(&node, root);
    guards::at_start(root);
    let served = serve(
        root,
        Arc::clone(&node),
        policy,
        settings.metrics_listen,
        passed_on,
    );
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

fn serve(
    root: &Path,
    node: Arc<layerpack_layerfs::Node>,
    policy: PathBuf,
    metrics_listen: Option<SocketAddr>,
    passed_on: Option<UnixListener>,
) -> anyhow::Result<()> {
    let info = api::Info {
        api: api::VERSION,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        root: root.to_owned(),
        started: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
        mount_namespace: client::mount_namespace()?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(WORKERS)
        .enable_all()
        .build()
        .context("cannot start the daemon's threads")?;
    let stop = Arc::new(Notify::new());
    let server = Arc::new(Server::new(node, info, Arc::clone(&stop), policy));
    runtime.block_on(async {
        let listener = match passed_on {
            Some(listener) => OwnerOnly::on(listener),
            None => OwnerOnly::bind(root),
        }
        .with_context(|| format!("cannot listen on {}", api::socket_path(root).display()))?;
        if let Some(address) = metrics_listen {
            metrics::listen(address, Arc::clone(&server)).await?;
        }
        // Registered before anyone is told that the daemon is ready.
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        server.channels.at_start(root);
        tracing::info!(root = %root.display(), pid = std::process::id(), "ready");
        if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
            tracing::warn!(%error, "cannot tell the service manager");
        }
        axum::serve(listener, router(server))
            .with_graceful_shutdown(async move {
                tokio::select! {
                    () = stop.notified() => tracing::info!("told to stop"),
                    _ = terminate.recv() => tracing::info!("ended by SIGTERM"),
                    _ = interrupt.recv() => tracing::info!("ended by SIGINT"),
                }
                let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
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
        .route(api::GUARDS, post(handlers::guard))
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
