//! One function per request of the API.

pub(super) mod cache;
pub(super) mod profiles;
pub(super) mod traces;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use layerpack_layerfs::{GivenManifests, LayerfsError, Node};
use layerpack_store::{Digest, LayerStore, StoreError, at_once};
use tokio::sync::Notify;

use super::channels::Channels;
use super::{guards, lost, prune};
use crate::api;
use crate::failure::one_line;
use crate::holder::Worker;
use crate::launch::sandboxes;
use crate::policy::{CHECKS, Policy};

/// Stores that are kept open; past that the daemon opens them anew for each request.
const MAX_STORES: usize = 64;

/// How long a stop waits for mounts that nobody holds a lease on.
const BUSY: Duration = Duration::from_secs(5);

/// What all requests share.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) node: Arc<Node>,
    info: api::Info,
    stop: Arc<Notify>,
    /// File of the signature policy.
    policy: PathBuf,
    stores: Mutex<HashMap<String, LayerStore>>,
    /// This process as its holder has it.
    worker: Option<Worker>,
    /// The sockets of sandboxes.
    pub(super) channels: Channels,
}

impl Server {
    /// The node's directory.
    pub(super) fn root(&self) -> &std::path::Path {
        &self.info.root
    }

    pub(super) fn new(
        node: Arc<Node>,
        info: api::Info,
        stop: Arc<Notify>,
        policy: PathBuf,
        worker: Option<Worker>,
    ) -> Self {
        Self {
            node,
            info,
            stop,
            policy,
            worker,
            stores: Mutex::new(HashMap::new()),
            channels: Channels::default(),
        }
    }

    /// Who answers, and who its holder is now.
    pub(super) fn info(&self) -> api::Info {
        api::Info {
            holder: self.worker.as_ref().and_then(Worker::holder),
            ..self.info.clone()
        }
    }

    /// Holds the layers to the signature policy; warnings where it only warns.
    fn check_policy(
        &self,
        store: &LayerStore,
        layers: &[Digest],
        given: &GivenManifests,
    ) -> Result<Vec<String>, Refusal> {
        let refused = |error: anyhow::Error| Refusal::new(StatusCode::FORBIDDEN, error);
        let Some(policy) = Policy::load(&self.policy).map_err(refused)? else {
            return Ok(Vec::new());
        };
        let checked = at_once(layers, CHECKS, |digest| {
            policy
                .check(store, digest, given.get(digest))
                .map_err(refused)
        })?;
        let mut warnings = Vec::new();
        for (digest, warning) in layers.iter().zip(checked) {
            if let Some(warning) = warning {
                tracing::warn!(layer = %digest, "{warning}");
                warnings.push(warning);
            }
        }
        Ok(warnings)
    }

    fn store(&self, url: &str) -> Result<LayerStore, Refusal> {
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = stores.get(url) {
            return Ok(store.clone());
        }
        let opened = self.node.open_store(url);
        let store = opened.map_err(|e| Refusal::new(StatusCode::BAD_REQUEST, e))?;
        if stores.len() < MAX_STORES {
            stores.insert(url.to_owned(), store.clone());
        }
        Ok(store)
    }
}

/// A request that fails: the reply's status and its one line.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    message: String,
}

impl Refusal {
    fn new(status: StatusCode, error: impl Into<anyhow::Error>) -> Self {
        Self {
            status,
            message: one_line(&error.into()),
        }
    }

    /// In these words.
    pub(super) fn with(status: StatusCode, message: String) -> Self {
        Self { status, message }
    }

    fn bad_request(message: String) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message,
        }
    }
}

impl From<LayerfsError> for Refusal {
    fn from(error: LayerfsError) -> Self {
        let status = match &error {
            LayerfsError::Store(
                StoreError::Missing { .. }
                | StoreError::UnknownReference { .. }
                | StoreError::NoStore { .. },
            ) => StatusCode::NOT_FOUND,
            LayerfsError::NotCached { .. }
            | LayerfsError::Trace { .. }
            | LayerfsError::UnknownLease { .. } => StatusCode::NOT_FOUND,
            LayerfsError::InvalidLease { .. } | LayerfsError::Stack { .. } => {
                StatusCode::BAD_REQUEST
            }
            LayerfsError::Recording { .. }
            | LayerfsError::LeaseTaken { .. }
            | LayerfsError::InUse { .. }
            | LayerfsError::Stopped { .. } => StatusCode::CONFLICT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        tracing::warn!(status = self.status.as_u16(), message = %self.message, "request failed");
        let body = api::ErrorReply {
            error: api::ErrorBody {
                message: self.message,
            },
        };
        (self.status, Json(body)).into_response()
    }
}

pub(super) type Reply<T> = Result<Json<T>, Refusal>;

pub(super) async fn info(State(server): State<Arc<Server>>) -> Json<api::Info> {
    Json(server.info())
}

pub(super) async fn status(State(server): State<Arc<Server>>) -> Reply<api::Status> {
    blocking(move || {
        let leases = server.node.leases();
        let mut node = server.node.status();
        node.problems.extend(lost::lines(server.root(), &leases));
        Ok(api::Status {
            daemon: server.info(),
            node,
            leases,
        })
    })
    .await
}

pub(super) async fn stack_up(
    State(server): State<Arc<Server>>,
    body: Result<Json<api::StackRequest>, JsonRejection>,
) -> Reply<api::StackReply> {
    let request = parsed(body)?;
    blocking(move || {
        if request.layers.is_empty() {
            return Err(Refusal::bad_request(
                "a stack needs at least one layer".to_owned(),
            ));
        }
        let layers = request
            .layers
            .iter()
            .map(|text| text.parse::<Digest>())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| Refusal::new(StatusCode::BAD_REQUEST, e))?;
        let lease = request.lease;
        if !api::valid_lease(&lease.id) {
            return Err(Refusal::bad_request(format!(
                "lease id {:?} is not 1 to 64 letters, digits, '-', '_' or '.'",
                lease.id
            )));
        }
        let store = server.store(&request.store)?;
        let given = GivenManifests::of(&request.manifests);
        let warnings = server.check_policy(&store, &layers, &given)?;
        let stack = (server.node).stack_up_with(&store, &layers, &given, &lease)?;
        server.node.prefetch(&store, &lease.id, &request.prefetch)?;
        Ok(api::StackReply {
            lease: lease.id,
            lowers: stack.lowers,
            warnings,
        })
    })
    .await
}

pub(super) async fn release(
    State(server): State<Arc<Server>>,
    Path(id): Path<String>,
) -> Reply<api::Released> {
    // A sandbox's lease has its id: with it goes the channel.
    server.channels.close(&id);
    blocking(move || match server.node.release(&id) {
        Ok(()) => Ok(api::Released { released: true }),
        Err(LayerfsError::UnknownLease { .. }) => Ok(api::Released { released: false }),
        Err(error) => Err(error.into()),
    })
    .await
}

pub(super) async fn record_begin(
    State(server): State<Arc<Server>>,
    body: Result<Json<api::RecordRequest>, JsonRejection>,
) -> Reply<api::RecordBegun> {
    let request = parsed(body)?;
    blocking(move || {
        if request.layers.is_empty() || !api::valid_lease(&request.id) {
            return Err(Refusal::bad_request(
                "a recording needs a name of 1 to 64 letters, digits, '-', '_' or '.', and at least one layer".to_owned(),
            ));
        }
        let layers = request
            .layers
            .iter()
            .map(|text| text.parse::<Digest>())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| Refusal::new(StatusCode::BAD_REQUEST, e))?;
        let store = server.store(&request.store)?;
        let begun = server.node.record_begin(&request.id, &store, &layers)?;
        Ok(api::RecordBegun {
            warm: begun.warm.iter().map(ToString::to_string).collect(),
        })
    })
    .await
}

pub(super) async fn record_end(
    State(server): State<Arc<Server>>,
    Path(id): Path<String>,
) -> Reply<api::Recording> {
    blocking(move || {
        let recorded = server.node.record_end(&id)?;
        Ok(api::Recording {
            layers: recorded.layers.iter().map(ToString::to_string).collect(),
            touches: recorded
                .touches
                .iter()
                .map(|t| (t.layer, t.extent, t.len, t.time_ms))
                .collect(),
            left_out: recorded.left_out,
        })
    })
    .await
}

pub(super) async fn guard(
    State(server): State<Arc<Server>>,
    body: Result<Json<api::GuardRequest>, JsonRejection>,
) -> Reply<api::Guarding> {
    let request = parsed(body)?;
    blocking(move || {
        let (root, worker) = (&server.info.root, server.worker.as_ref());
        guards::watch(root, &request.sandbox, request.pid, worker)
            .map_err(|error| Refusal::new(StatusCode::NOT_FOUND, error))?;
        Ok(api::Guarding { guarding: true })
    })
    .await
}

pub(super) async fn holder(State(server): State<Arc<Server>>) -> Reply<api::Holder> {
    blocking(move || {
        let Some(worker) = &server.worker else {
            let message = "the daemon runs without a holder".to_owned();
            return Err(Refusal::with(StatusCode::CONFLICT, message));
        };
        worker.replace_holder().map_err(|error| {
            Refusal::new(
                StatusCode::CONFLICT,
                error.context("the holder stays as it is"),
            )
        })
    })
    .await
}

pub(super) async fn channel(
    State(server): State<Arc<Server>>,
    body: Result<Json<api::ChannelRequest>, JsonRejection>,
) -> Reply<api::ChannelOpen> {
    let request = parsed(body)?;
    let root = server.info.root.clone();
    let found = blocking(move || {
        sandboxes(&root)
            .and_then(|all| Ok(all.get(&request.sandbox)?))
            .map_err(|error| Refusal::new(StatusCode::NOT_FOUND, error))
    });
    let Json(sandbox) = found.await?;
    if !sandbox.spec.channel {
        return Err(Refusal::bad_request(format!(
            "sandbox {} was made without a channel",
            sandbox.spec.id
        )));
    }
    server
        .channels
        .open(&server.info.root, &sandbox)
        .map_err(|error| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error))?;
    Ok(Json(api::ChannelOpen { open: true }))
}

pub(super) async fn stop(
    State(server): State<Arc<Server>>,
    body: Result<Json<api::StopRequest>, JsonRejection>,
) -> Reply<api::Stopping> {
    let request = parsed(body)?;
    let stop = Arc::clone(&server.stop);
    let reply = blocking(move || {
        prune::at_stop(&server.node, &server.info.root);
        stop_node(&server.node, request.force).map_err(|error| {
            let in_use = matches!(error, LayerfsError::InUse { .. });
            let mut refusal = Refusal::from(error);
            if in_use && !request.force {
                refusal.message.push_str(" (layerpack daemon stop --force)");
            }
            refusal
        })?;
        Ok(api::Stopping { stopping: true })
    })
    .await?;
    // One permit is kept until the server looks, so this cannot come too early.
    stop.notify_one();
    Ok(reply)
}

pub(super) async fn unknown() -> Refusal {
    Refusal {
        status: StatusCode::NOT_FOUND,
        message: format!("no such path in version {} of the API", api::VERSION),
    }
}

/// Stops the node. Without leases it may still be busy for a moment: whoever starts a container,
/// us or others, holds copies of all mounts until it has left the old root.
fn stop_node(node: &Node, force: bool) -> Result<(), LayerfsError> {
    let begun = Instant::now();
    loop {
        match node.stop(force) {
            Err(LayerfsError::InUse { .. })
                if node.leases().is_empty() && begun.elapsed() < BUSY =>
            {
                std::thread::sleep(Duration::from_millis(50));
            }
            ended => return ended,
        }
    }
}

pub(super) fn parsed<T>(body: Result<Json<T>, JsonRejection>) -> Result<T, Refusal> {
    match body {
        Ok(Json(request)) => Ok(request),
        Err(rejection) => Err(Refusal::bad_request(format!(
            "the request's body is wrong: {}",
            rejection.body_text()
        ))),
    }
}

/// Runs what blocks on the pool of workers.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Reply<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map(Json),
        Err(error) => Err(Refusal::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            anyhow::Error::new(error)
                .context("the daemon failed at this request (a bug; see its log)"),
        )),
    }
}
