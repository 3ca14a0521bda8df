//! Requests about what the node has learnt.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use layerpack_layerfs::LearntProfile;

use super::{Reply, Server, blocking, parsed};
use crate::api;

pub(in crate::daemon) async fn list(
    State(server): State<Arc<Server>>,
) -> Reply<Vec<LearntProfile>> {
    blocking(move || Ok(server.node.learnt())).await
}

pub(in crate::daemon) async fn publish(
    State(server): State<Arc<Server>>,
    body: Result<Json<api::PublishRequest>, JsonRejection>,
) -> Reply<api::Published> {
    let request = parsed(body)?;
    blocking(move || {
        let store = server.store(&request.store)?;
        let stacks = request.stacks.as_deref();
        let published = server.node.publish_learnt(&store, stacks)?;
        Ok(api::Published { published })
    })
    .await
}
