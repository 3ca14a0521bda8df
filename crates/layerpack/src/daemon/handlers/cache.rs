//! Requests about the node's cache.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::StatusCode;
use layerpack_layerfs::{CacheStatus, Evicted};
use layerpack_store::{Digest, LayerId};

use super::{Refusal, Reply, Server, blocking, parsed};
use crate::api;

fn identities(texts: &[String]) -> Result<Vec<LayerId>, Refusal> {
    texts
        .iter()
        .map(|text| text.parse::<Digest>().map(LayerId::from_digest))
        .collect::<Result<_, _>>()
        .map_err(|e| Refusal::new(StatusCode::BAD_REQUEST, e))
}

pub(in crate::daemon) async fn status(State(server): State<Arc<Server>>) -> Reply<CacheStatus> {
    blocking(move || Ok(server.node.cache_status())).await
}

pub(in crate::daemon) async fn pin(
    State(server): State<Arc<Server>>,
    body: Result<Json<api::CachePin>, JsonRejection>,
) -> Reply<api::CachePinned> {
    let request = parsed(body)?;
    blocking(move || {
        let layers = identities(&request.layers)?;
        server.node.cache_pin(&layers, request.pinned)?;
        let pinned = server.node.cache_pins();
        Ok(api::CachePinned {
            pinned: pinned.iter().map(ToString::to_string).collect(),
        })
    })
    .await
}

pub(in crate::daemon) async fn evict(
    State(server): State<Arc<Server>>,
    body: Result<Json<api::CacheEvict>, JsonRejection>,
) -> Reply<Evicted> {
    let request = parsed(body)?;
    blocking(move || {
        if request.layers.is_some() && request.bytes.is_some() {
            return Err(Refusal::bad_request(
                "layers and bytes exclude each other".to_owned(),
            ));
        }
        let layers = request.layers.as_deref().map(identities).transpose()?;
        Ok(server.node.cache_evict(layers.as_deref(), request.bytes))
    })
    .await
}

pub(in crate::daemon) async fn verify(
    State(server): State<Arc<Server>>,
    body: Result<Json<api::CacheLayers>, JsonRejection>,
) -> Reply<api::CacheVerified> {
    let request = parsed(body)?;
    blocking(move || {
        let layers = request.layers.as_deref().map(identities).transpose()?;
        Ok(api::CacheVerified {
            layers: server.node.cache_verify(layers.as_deref())?,
        })
    })
    .await
}
