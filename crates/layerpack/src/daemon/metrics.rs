//! Counters for monitoring, in the text format of Prometheus. All names and units are here, and
//! described in API.md; a name that was given once keeps its meaning.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use layerpack_layerfs::NodeMetrics;
use layerpack_layerfs::fetch::{BUCKETS_MS, ERROR_KINDS, Latencies};
use layerpack_layerfs::peers::PEER_FAILURES;
use tokio::net::TcpListener;

use super::handlers::Server;
use crate::api;

/// Name, kind, what it says; the value.
type Simple = (&'static str, &'static str, &'static str, u64);

fn simple(m: &NodeMetrics) -> Vec<Simple> {
    let (c, g) = ("counter", "gauge");
    let [ahead, ahead_used, ahead_wasted] = m.meter.ahead;
    vec![
        (
            "layerpack_read_hits_total",
            c,
            "Reads of layer data answered from the node's cache",
            m.meter.hits,
        ),
        (
            "layerpack_read_misses_total",
            c,
            "Reads of layer data that waited for a fetch",
            m.meter.misses,
        ),
        (
            "layerpack_read_stalls_total",
            c,
            "Reads that waited longer than one second",
            m.meter.stalls,
        ),
        (
            "layerpack_reads_waiting",
            g,
            "Reads that wait for a fetch now",
            m.meter.waiting,
        ),
        (
            "layerpack_inflight_bytes",
            g,
            "Bytes of frames that reads wait for now",
            m.meter.inflight,
        ),
        (
            "layerpack_served_bytes_total",
            c,
            "Bytes of layer data given to the kernel",
            m.meter.served,
        ),
        (
            "layerpack_passed_through_bytes_total",
            c,
            "Bytes given to the kernel that the cache did not keep",
            m.meter.passed,
        ),
        (
            "layerpack_fetch_requests_total",
            c,
            "Requests to stores for layer data",
            m.meter.requests,
        ),
        (
            "layerpack_fetched_bytes_total",
            c,
            "Bytes of layer data fetched, as stored",
            m.meter.fetched_stored,
        ),
        (
            "layerpack_fetched_raw_bytes_total",
            c,
            "Bytes of layer data fetched, after decompression",
            m.meter.fetched_raw,
        ),
        (
            "layerpack_verified_bytes_total",
            c,
            "Bytes fetched whose digests were right",
            m.meter.verified,
        ),
        (
            "layerpack_copied_bytes_total",
            c,
            "Bytes of layer data copied from other layers of the node instead of fetched",
            m.meter.copied,
        ),
        (
            "layerpack_metadata_fetched_bytes_total",
            c,
            "Bytes of metadata fetched, uncompressed",
            m.meta_fetched,
        ),
        (
            "layerpack_written_bytes_total",
            c,
            "Bytes of layer data written to the cache",
            m.meter.written,
        ),
        (
            "layerpack_prefetched_bytes_total",
            c,
            "Bytes fetched ahead of demand",
            ahead,
        ),
        (
            "layerpack_prefetch_used_bytes_total",
            c,
            "Bytes fetched ahead and read since",
            ahead_used,
        ),
        (
            "layerpack_prefetch_wasted_bytes_total",
            c,
            "Bytes fetched ahead and evicted unread",
            ahead_wasted,
        ),
        (
            "layerpack_cache_used_bytes",
            g,
            "Disk that the cache takes up",
            m.space.used,
        ),
        (
            "layerpack_cache_max_bytes",
            g,
            "Limit of the cache; 0 means none",
            m.space.max.unwrap_or(0),
        ),
        (
            "layerpack_cache_evictions_total",
            c,
            "Runs of data and whole layers evicted",
            m.space.evictions,
        ),
        (
            "layerpack_cache_freed_bytes_total",
            c,
            "Disk that evictions gave back",
            m.space.freed,
        ),
        (
            "layerpack_cache_refused_bytes_total",
            c,
            "Bytes fetched that the cache had no room for",
            m.space.refused,
        ),
        (
            "layerpack_fuse_requests_total",
            c,
            "Requests of the kernel to the data directory",
            m.fuse_requests,
        ),
        (
            "layerpack_layers_served",
            g,
            "Layers whose data is served now",
            m.layers_served,
        ),
        ("layerpack_leases", g, "Leases held now", m.leases),
        (
            "layerpack_daemon_rss_bytes",
            g,
            "Memory that the daemon takes up",
            m.rss,
        ),
        (
            "layerpack_learned_stacks",
            g,
            "Stacks of which the node has learnt what is read first",
            m.learnt,
        ),
        (
            "layerpack_peers",
            g,
            "Other nodes that are asked for data at present",
            m.peers.members,
        ),
        (
            "layerpack_peer_requests_total",
            c,
            "Requests for layer data to other nodes",
            m.peers.requests,
        ),
        (
            "layerpack_peer_received_bytes_total",
            c,
            "Bytes of layer data from other nodes that were right, uncompressed",
            m.peers.received,
        ),
        (
            "layerpack_peer_served_requests_total",
            c,
            "Requests of other nodes that were answered with data",
            m.peers.served_requests,
        ),
        (
            "layerpack_peer_served_bytes_total",
            c,
            "Bytes of layer data given to other nodes, uncompressed",
            m.peers.served,
        ),
        (
            "layerpack_problems",
            g,
            "Problems that the daemon's status lists now",
            m.problems,
        ),
    ]
}

/// Milliseconds as seconds.
fn seconds(ms: u64) -> String {
    format!("{}.{:03}", ms / 1000, ms % 1000)
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}.\n# TYPE {name} {kind}");
}

fn histogram(out: &mut String, name: &str, help: &str, of: &Latencies) {
    head(out, name, "histogram", help);
    let mut sum = 0;
    for (at, count) in of.counts.iter().enumerate() {
        sum += count;
        let bound = BUCKETS_MS
            .get(at)
            .map_or_else(|| "+Inf".to_owned(), |ms| seconds(*ms));
        let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {sum}");
    }
    let (whole, rest) = (of.sum_us / 1_000_000, of.sum_us % 1_000_000);
    let _ = writeln!(out, "{name}_sum {whole}.{rest:06}\n{name}_count {sum}");
}

/// The whole page. `holder`: if there is one.
fn render(metrics: &NodeMetrics, holder: Option<&api::Holder>) -> String {
    let mut out = String::new();
    if let Some(holder) = holder {
        let name = "layerpack_daemon_restarts_total";
        let help = "How often the daemon's process died and was started again";
        head(&mut out, name, "counter", help);
        let _ = writeln!(out, "{name} {}", holder.restarts);
        let name = "layerpack_daemon_upgrades_total";
        let help = "How often the daemon's process gave way to another program";
        head(&mut out, name, "counter", help);
        let _ = writeln!(out, "{name} {}", holder.upgrades);
    }
    let name = "layerpack_daemon_panics_total";
    let help = "Panics in the daemon: bugs, which cost one read or request each";
    head(&mut out, name, "counter", help);
    let _ = writeln!(out, "{name} {}", super::panics::count());
    for (name, kind, help, value) in simple(metrics) {
        head(&mut out, name, kind, help);
        let _ = writeln!(out, "{name} {value}");
    }
    let name = "layerpack_read_oldest_wait_seconds";
    head(
        &mut out,
        name,
        "gauge",
        "How long the read that waits longest has waited",
    );
    let _ = writeln!(out, "{name} {}", seconds(metrics.meter.oldest_wait_ms));
    let name = "layerpack_read_errors_total";
    head(
        &mut out,
        name,
        "counter",
        "Reads that failed, by kind of error",
    );
    for (kind, count) in ERROR_KINDS.iter().zip(metrics.meter.errors) {
        let _ = writeln!(out, "{name}{{kind=\"{kind}\"}} {count}");
    }
    let name = "layerpack_peer_failures_total";
    head(
        &mut out,
        name,
        "counter",
        "Requests to other nodes that did not help, by what was wrong",
    );
    for (kind, count) in PEER_FAILURES.iter().zip(metrics.peers.failures) {
        let _ = writeln!(out, "{name}{{kind=\"{kind}\"}} {count}");
    }
    histogram(
        &mut out,
        "layerpack_fetch_seconds",
        "Time of fetches of one or several frames",
        &metrics.meter.fetches,
    );
    histogram(
        &mut out,
        "layerpack_read_wait_seconds",
        "Time that reads waited for fetches",
        &metrics.meter.waits,
    );
    out
}

/// `GET /metrics`.
pub(super) async fn answer(State(server): State<Arc<Server>>) -> Response {
    let page = tokio::task::spawn_blocking(move || {
        let holder = server.info().holder;
        render(&server.node.metrics(), holder.as_ref())
    })
    .await;
    match page {
        Ok(page) => ([(CONTENT_TYPE, "text/plain; version=0.0.4")], page).into_response(),
        Err(_) => axum::http::StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Serves metrics, and nothing else, on an address of the network.
///
/// # Errors
/// When the address cannot be listened on.
pub(super) async fn listen(address: SocketAddr, server: Arc<Server>) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot serve metrics on {address}"))?;
    let router = Router::new()
        .route(api::METRICS, get(answer))
        .with_state(server);
    // Ends with the runtime.
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%error, "metrics are no longer served");
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_of_the_format() {
        let mut metrics = NodeMetrics::default();
        metrics.meter.fetches.counts[3] = 2;
        metrics.meter.fetches.sum_us = 1_500_000;
        metrics.meter.oldest_wait_ms = 1234;
        let holder = api::Holder {
            pid: 1,
            version: "1".to_owned(),
            restarts: 3,
            upgrades: 0,
        };
        let page = render(&metrics, Some(&holder));
        let mut names = std::collections::BTreeSet::new();
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                assert!(names.insert(rest.split(' ').next().unwrap()), "{line}");
            } else if !line.starts_with("# HELP ") {
                let (name, value) = line.rsplit_once(' ').unwrap();
                assert!(value.parse::<f64>().is_ok(), "{line}");
                let name = name.split('{').next().unwrap();
                let of = |suffix| name.strip_suffix(suffix).is_some_and(|n| names.contains(n));
                let known = names.contains(name) || of("_bucket") || of("_sum") || of("_count");
                assert!(known, "{line}");
                assert!(name.starts_with("layerpack_"), "{line}");
            }
        }
        for line in [
            "layerpack_fetch_seconds_bucket{le=\"0.005\"} 0",
            "layerpack_fetch_seconds_bucket{le=\"0.010\"} 2",
            "layerpack_fetch_seconds_bucket{le=\"+Inf\"} 2",
            "layerpack_fetch_seconds_sum 1.500000",
            "layerpack_read_oldest_wait_seconds 1.234",
            "layerpack_daemon_restarts_total 3",
            "layerpack_read_errors_total{kind=\"timeout\"} 0",
        ] {
            assert!(page.lines().any(|l| l == line), "{line}\n{page}");
        }
    }
}
