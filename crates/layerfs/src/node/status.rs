//! What a node reports of itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use layerpack_store::{Digest, LayerId, Manifest};

use super::Node;
use super::types::{LayerStatus, NodeStatus, Totals};
use crate::fetch::{MeterStatus, SpaceStatus};
use crate::peers::{PeerLink, PeerStatus};
use crate::sync::Ordering;

/// A node's counters and gauges, for monitoring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeMetrics {
    /// Reads and fetches of data.
    pub meter: MeterStatus,
    /// Room in the cache.
    pub space: SpaceStatus,
    /// Bytes of metadata fetched.
    pub meta_fetched: u64,
    /// Requests of the kernel.
    pub fuse_requests: u64,
    /// Memory that this process takes up, in bytes.
    pub rss: u64,
    /// Stacks of which something was learnt.
    pub learnt: u64,
    /// What came of peers.
    pub peers: PeerStatus,
    /// Layers whose data is served now.
    pub layers_served: u64,
    /// Leases held now.
    pub leases: u64,
    /// Problems listed in the status now, with lost leases.
    pub problems: u64,
}

/// Memory that this process takes up; 0 if the kernel does not say.
fn resident_bytes() -> u64 {
    let status = fs_err::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map_or(0, |kib| kib.saturating_mul(1024))
}

impl Node {
    /// The state of all layers and their sums.
    #[must_use]
    pub fn status(&self) -> NodeStatus {
        let mut known: BTreeMap<LayerId, (Manifest, Digest)> = BTreeMap::new();
        let slots: Vec<_> = self
            .slots
            .lock()
            .iter()
            .map(|(id, slot)| (*id, Arc::clone(slot)))
            .collect();
        for (id, slot) in slots {
            // A layer on its way up or down is not mounted yet or no longer.
            if let Some(slot) = slot.try_lock()
                && let Some(up) = slot.up.as_ref()
            {
                known.insert(id, (Manifest::clone(&up.manifest), up.manifest_digest));
            }
        }
        let mounted: Vec<LayerId> = known.keys().copied().collect();
        for entry in self.registry.entries() {
            // One that was taken over and cannot be opened is a problem, and listed as such.
            let Some(blob) = entry.blob() else { continue };
            let manifest = blob.manifest();
            known.entry(entry.layer).or_insert_with(|| {
                (
                    manifest.clone(),
                    manifest.digest().unwrap_or_else(|_| *entry.layer.digest()),
                )
            });
        }
        let layers: Vec<LayerStatus> = known
            .into_iter()
            .map(|(id, (manifest, digest))| {
                self.layer_status(id, &manifest, digest, mounted.binary_search(&id).is_ok())
            })
            .collect();
        let waiting = self.fetcher.waiting_by_layer();
        let mut layers = layers;
        for layer in &mut layers {
            if let Some((count, oldest)) = waiting.get(&layer.layer_id) {
                layer.waiting = *count;
                layer.oldest_wait_ms = u64::try_from(oldest.as_millis()).unwrap_or(u64::MAX);
            }
        }
        let sum = |field: fn(&LayerStatus) -> u64| layers.iter().map(field).sum::<u64>();
        let space = self.fetcher.space();
        let meta_fetched = self.meta_fetched.load(Ordering::Relaxed);
        let totals = Totals {
            layers: mounted.len(),
            leases: self.leases.lock().len(),
            layer_bytes: sum(|l| {
                if l.mounted {
                    l.meta_bytes + l.data_bytes
                } else {
                    0
                }
            }),
            cached_bytes: sum(|l| l.cached_bytes),
            meta_fetched_bytes: meta_fetched,
            fetched_bytes: sum(|l| l.fetched_bytes),
            fetched_raw_bytes: sum(|l| l.fetched_raw_bytes),
            requests: sum(|l| l.requests),
            written_bytes: meta_fetched + sum(|l| l.written_bytes),
            frames: sum(|l| l.frames),
            from_peers_bytes: sum(|l| l.from_peers_bytes),
            copied_bytes: sum(|l| l.copied_bytes),
            reads: sum(|l| l.reads),
            misses: sum(|l| l.misses),
            waiting: sum(|l| l.waiting),
            passed_through_bytes: sum(|l| l.passed_through_bytes),
            evicted_bytes: sum(|l| l.evicted_bytes),
            prefetched_bytes: sum(|l| l.prefetched_bytes),
            prefetch_used_bytes: sum(|l| l.prefetch_used_bytes),
            prefetch_wasted_bytes: sum(|l| l.prefetch_wasted_bytes),
            served_bytes: sum(|l| l.served_bytes),
            errors: sum(|l| l.errors),
            inflight_bytes: self.fetcher.inflight_bytes(),
            rss_bytes: resident_bytes(),
            fuse_requests: self.session.lock().as_ref().map_or(0, |s| s.requests()),
            cache_used_bytes: space.used,
            cache_max_bytes: space.max.unwrap_or(0),
            evictions: space.evictions,
        };
        let peers = self
            .peers
            .lock()
            .as_ref()
            .map_or_else(Vec::new, PeerLink::list);
        let mut problems = self.problems.lock().clone();
        problems.extend(peers.iter().filter(|peer| peer.refused).map(|peer| {
            format!(
                "peer {} refuses this node's token: give all peers the same",
                peer.address
            )
        }));
        NodeStatus {
            root: self.root.clone(),
            layers,
            totals,
            problems,
            peers,
            swept: self.swept.lock().clone(),
        }
    }

    /// What the node did since it started, for monitoring.
    #[must_use]
    pub fn metrics(&self) -> NodeMetrics {
        let link = self.peers.lock();
        let peers = link
            .as_ref()
            .map_or_else(PeerStatus::default, PeerLink::status);
        let refused = link.as_ref().map_or(0, |link| {
            link.list().iter().filter(|peer| peer.refused).count()
        });
        drop(link);
        let lost = self.leases.lock().lost();
        NodeMetrics {
            meter: self.fetcher.meter(),
            space: self.fetcher.space(),
            meta_fetched: self.meta_fetched.load(Ordering::Relaxed),
            fuse_requests: self.session.lock().as_ref().map_or(0, |s| s.requests()),
            peers,
            rss: resident_bytes(),
            learnt: self.learner.learnt.count(),
            layers_served: self.registry.entries().len() as u64,
            leases: self.leases.lock().len() as u64,
            problems: (self.problems.lock().len() + lost + refused) as u64,
        }
    }

    fn layer_status(
        &self,
        id: LayerId,
        manifest: &Manifest,
        digest: Digest,
        mounted: bool,
    ) -> LayerStatus {
        let leases = self.leases.lock().count(id);
        let mut status = LayerStatus {
            layer_id: id,
            reference: manifest.reference().to_string(),
            manifest: digest,
            mounted,
            leases,
            opens: 0,
            meta_bytes: manifest.meta.size,
            data_bytes: manifest.data_size,
            cached_bytes: 0,
            whole: false,
            fetched_bytes: 0,
            fetched_raw_bytes: 0,
            requests: 0,
            frames: 0,
            from_peers_bytes: 0,
            copied_bytes: 0,
            waiting: 0,
            oldest_wait_ms: 0,
            written_bytes: 0,
            served_bytes: 0,
            reads: 0,
            misses: 0,
            errors: 0,
            passed_through_bytes: 0,
            evicted_bytes: 0,
            prefetched_bytes: 0,
            prefetch_used_bytes: 0,
            prefetch_wasted_bytes: 0,
        };
        let Some(entry) = self.registry.get(id) else {
            return status;
        };
        status.opens = entry.opens();
        let Some(blob) = entry.blob() else {
            return status;
        };
        let counters = &blob.counters;
        status.cached_bytes = counters.cached.load(Ordering::Relaxed);
        status.whole = blob.cache().is_whole();
        status.fetched_bytes = counters.fetched_stored.load(Ordering::Relaxed);
        status.fetched_raw_bytes = counters.fetched_raw.load(Ordering::Relaxed);
        status.requests = counters.requests.load(Ordering::Relaxed);
        status.from_peers_bytes = counters.from_peers.load(Ordering::Relaxed);
        status.copied_bytes = counters.copied.load(Ordering::Relaxed);
        status.frames = counters.frames.load(Ordering::Relaxed);
        status.written_bytes = blob.cache().written_bytes();
        status.served_bytes = counters.served.load(Ordering::Relaxed);
        status.reads = counters.reads.load(Ordering::Relaxed);
        status.misses = counters.misses.load(Ordering::Relaxed);
        status.errors = counters.errors.load(Ordering::Relaxed);
        status.passed_through_bytes = counters.passed_through.load(Ordering::Relaxed);
        status.evicted_bytes = blob.evicted_bytes();
        (
            status.prefetched_bytes,
            status.prefetch_used_bytes,
            status.prefetch_wasted_bytes,
        ) = blob.ahead();
        status
    }
}
