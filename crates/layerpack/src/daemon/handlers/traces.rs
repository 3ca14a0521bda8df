//! Requests about reads as they happen.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};
use layerpack_layerfs::TraceBatch;

use super::{Reply, Server, blocking, parsed};
use crate::api;

/// How long a request waits for the next read.
const WAIT: Duration = Duration::from_millis(500);

pub(in crate::daemon) async fn begin(
    State(server): State<Arc<Server>>,
    body: Result<Json<api::TraceRequest>, JsonRejection>,
) -> Reply<api::TraceBegun> {
    let request = parsed(body)?;
    blocking(move || {
        let (trace, layers) = server.node.trace_begin(&request.lease)?;
        Ok(api::TraceBegun { trace, layers })
    })
    .await
}

pub(in crate::daemon) async fn next(
    State(server): State<Arc<Server>>,
    Path(id): Path<u64>,
) -> Reply<TraceBatch> {
    blocking(move || Ok(server.node.trace_next(id, WAIT)?)).await
}

pub(in crate::daemon) async fn end(
    State(server): State<Arc<Server>>,
    Path(id): Path<u64>,
) -> Reply<api::TraceEnded> {
    blocking(move || {
        Ok(api::TraceEnded {
            ended: server.node.trace_end(id),
        })
    })
    .await
}
