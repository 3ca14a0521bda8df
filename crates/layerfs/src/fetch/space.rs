//! How much room the caches of a node may take, and making some.
//!
//! What is counted is what the filesystem says that the files take up: it is measured when there
//! may be too much, and between two measurements what is written is added. Above the high water
//! mark a thread brings it down to the low one; at the limit itself a fetch makes
//! room first, and if there is none to be had at once, its readers get their bytes without the
//! cache keeping them. So nobody waits for room.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use layerpack_store::LayerId;

use super::Fetcher;
use super::blob::Blob;
use super::evict::MAX_HEAT;
use crate::cache::RUN_BYTES;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};

/// Time between two searches for room when there is hardly any to be had.
const BARREN: Duration = Duration::from_secs(1);
/// Room made when the disk is full, in bytes, but not more than an eighth of what there is.
const SLACK: u64 = 4 << 20;
/// Bytes in a file that no presence bit speaks of, from which on they are looked for.
const GARBAGE: u64 = 1 << 20;

/// Caches of layers that are not served now, and files beside the data.
pub trait ColdCache: Send + Sync {
    /// Bytes on disk, without the data files of blobs that are served.
    fn bytes(&self) -> u64;
    /// Removes caches that are not in use, those first that were used longest ago, until `want`
    /// bytes are free. Returns how many are.
    fn evict(&self, want: u64) -> u64;
}

/// State of the room for caches, in bytes; counters begin with the fetcher.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpaceStatus {
    /// The limit, if there is one.
    pub max: Option<u64>,
    /// Taken up: as measured last, and what was written since.
    pub used: u64,
    /// Runs evicted from blobs that were served, and caches removed whole.
    pub evictions: u64,
    /// Bytes of disk that this gave back.
    pub freed: u64,
    /// Bytes that were not kept for want of room.
    pub refused: u64,
}

#[derive(Debug, Clone, Copy)]
struct Limits {
    max: u64,
    high: u64,
    low: u64,
}

/// The room for all caches of a fetcher.
#[derive(Default)]
pub(super) struct Space {
    limits: Option<Limits>,
    used: AtomicU64,
    /// Admitted, and not written yet.
    pending: AtomicU64,
    blobs: Mutex<Vec<Weak<Blob>>>,
    cold: OnceLock<Box<dyn ColdCache>>,
    /// The blob at which the search goes on. Whoever has the lock makes room.
    hand: Mutex<Option<LayerId>>,
    queued: AtomicBool,
    barren: Mutex<Option<Instant>>,
    evictions: AtomicU64,
    freed: AtomicU64,
    refused: AtomicU64,
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Space")
            .field("limits", &self.limits)
            .field("used", &self.used)
            .finish_non_exhaustive()
    }
}

/// Takes the mark of a queued job away however it ends.
struct Queued(Arc<Fetcher>);

impl Drop for Queued {
    fn drop(&mut self) {
        self.0.space.queued.store(false, Ordering::Release);
    }
}

impl Space {
    pub(super) fn new(max: Option<u64>) -> Self {
        Self {
            limits: max.map(|max| Limits {
                max,
                high: max - max / 20,
                low: max - max / 20 * 3,
            }),
            ..Self::default()
        }
    }

    fn live(&self) -> Vec<Arc<Blob>> {
        let mut blobs = self.blobs.lock();
        blobs.retain(|blob| blob.strong_count() > 0);
        let mut live: Vec<Arc<Blob>> = blobs.iter().filter_map(Weak::upgrade).collect();
        drop(blobs);
        live.sort_by_key(|blob| blob.layer());
        live
    }

    /// Asks the filesystem, and adds what is on its way: that may be counted twice, but not never.
    fn measure(&self) -> u64 {
        // In this order: what is admitted from here on is in the difference below or in `pending`,
        // and what is no longer pending is on the disk.
        let before = self.used.load(Ordering::Acquire);
        let pending = self.pending.load(Ordering::Acquire);
        let hot: u64 = self
            .live()
            .iter()
            .map(|blob| blob.cache().disk_bytes().unwrap_or(0))
            .sum();
        let all = hot + self.cold.get().map_or(0, |cold| cold.bytes()) + pending;
        let _ = self
            .used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                Some(all.saturating_add(now.saturating_sub(before)))
            });
        all
    }

    fn is_barren(&self) -> bool {
        self.barren.lock().is_some_and(|at| at.elapsed() < BARREN)
    }

    /// Evicts until `want` bytes are free, or nothing is left to evict. Returns how many are.
    fn sweep(&self, hand: &mut Option<LayerId>, want: u64) -> u64 {
        let mut freed = self.cold.get().map_or(0, |cold| cold.evict(want));
        if freed > 0 {
            self.evictions.fetch_add(1, Ordering::Relaxed);
        }
        // Each round cools everything by one, so the last one finds all that may go.
        for _round in 0..=u32::from(MAX_HEAT) + 1 {
            if freed >= want {
                break;
            }
            freed += self.round(hand, want - freed);
        }
        if freed < want {
            freed += self.collect_garbage();
        }
        self.freed.fetch_add(freed, Ordering::Relaxed);
        *self.barren.lock() = (freed < want / 2).then(Instant::now);
        freed
    }

    /// One round of the hand over all blobs.
    fn round(&self, hand: &mut Option<LayerId>, want: u64) -> u64 {
        // What is only looked at has no store, and may be pinned.
        let evictable = |blob: &Arc<Blob>| !blob.pinned() && !blob.store_url().is_empty();
        let mut blobs: Vec<_> = self.live().into_iter().filter(evictable).collect();
        let start = blobs.partition_point(|blob| Some(blob.layer()) < *hand);
        blobs.rotate_left(start);
        let mut freed = 0;
        for blob in blobs {
            *hand = Some(blob.layer());
            loop {
                let left = want - freed;
                let (runs, ended) = blob.victims(left.div_ceil(RUN_BYTES));
                freed += self.evict(&blob, &runs);
                if freed >= want {
                    return freed;
                }
                if ended {
                    break;
                }
            }
        }
        // The next round begins where this one did.
        *hand = None;
        freed
    }

    /// Evicts runs of a blob. Returns the bytes that this freed on disk.
    fn evict(&self, blob: &Blob, runs: &[u64]) -> u64 {
        if runs.is_empty() {
            return 0;
        }
        let before = blob.cache().disk_bytes().unwrap_or(0);
        match blob.evict_runs(runs) {
            Ok(went) => {
                self.evictions.fetch_add(went, Ordering::Relaxed);
            }
            Err(e) => {
                tracing::warn!(layer = %blob.layer(), error = %e, "cached data cannot be evicted");
            }
        }
        before.saturating_sub(blob.cache().disk_bytes().unwrap_or(before))
    }

    fn collect_garbage(&self) -> u64 {
        let mut freed = 0;
        for blob in self.live() {
            let before = blob.cache().disk_bytes().unwrap_or(0);
            // Each extent may end in the middle of a block.
            let padding = blob.cache().extents() * 4096;
            if before > blob.cached_bytes() + padding.min(blob.cached_bytes()) + GARBAGE {
                blob.punch_absent();
                freed += before.saturating_sub(blob.cache().disk_bytes().unwrap_or(before));
            }
        }
        freed
    }

    fn to_low(&self) {
        let Some(limits) = self.limits else { return };
        let mut hand = self.hand.lock();
        let used = self.measure();
        if used > limits.high {
            let freed = self.sweep(&mut hand, used - limits.low);
            let now = self.measure();
            tracing::info!(used, now, freed, max = limits.max, "made room in the cache");
        }
    }
}

impl Fetcher {
    pub(super) fn know(&self, blob: &Arc<Blob>) {
        self.space.blobs.lock().push(Arc::downgrade(blob));
    }

    /// The blob of a layer that this fetcher still serves, also if only a fetch under way holds it.
    #[must_use]
    pub fn find(&self, layer: LayerId) -> Option<Arc<Blob>> {
        let blobs = self.space.blobs.lock();
        let mut live = blobs.iter().filter_map(Weak::upgrade);
        live.find(|blob| blob.layer() == layer)
    }

    /// The blobs that it serves, by layer.
    #[must_use]
    pub fn served(&self) -> BTreeMap<LayerId, Arc<Blob>> {
        let live = self.space.live();
        live.into_iter().map(|blob| (blob.layer(), blob)).collect()
    }

    /// Names the caches that are not served, and measures once. Works once only.
    pub fn set_cold(self: &Arc<Self>, cold: Box<dyn ColdCache>) {
        let _ = self.space.cold.set(cold);
        let used = self.space.measure();
        if self.space.limits.is_some_and(|l| used > l.high) {
            self.queue_sweep();
        }
    }

    /// State of the room for caches.
    #[must_use]
    pub fn space(&self) -> SpaceStatus {
        let space = &self.space;
        SpaceStatus {
            max: space.limits.map(|l| l.max),
            used: space.used.load(Ordering::Relaxed),
            evictions: space.evictions.load(Ordering::Relaxed),
            freed: space.freed.load(Ordering::Relaxed),
            refused: space.refused.load(Ordering::Relaxed),
        }
    }

    /// Asks the filesystem what the caches take up.
    #[must_use]
    pub fn measure(&self) -> u64 {
        self.space.measure()
    }

    /// Evicts what is cached of a blob, as much as is not in use. Returns the bytes freed on disk.
    pub fn evict_blob(&self, blob: &Blob) -> u64 {
        let _hand = self.space.hand.lock();
        let freed = self.space.evict(blob, &blob.cached_runs());
        self.space.freed.fetch_add(freed, Ordering::Relaxed);
        freed
    }

    /// Evicts by the rules of pressure until `want` bytes are free. Returns how many are.
    pub fn evict_bytes(&self, want: u64) -> u64 {
        let mut hand = self.space.hand.lock();
        let freed = self.space.sweep(&mut hand, want);
        self.space.measure();
        freed
    }

    /// Whether the cache may take so many bytes more. If so, [`Fetcher::settle`] follows.
    pub(super) fn admit(self: &Arc<Self>, bytes: u64) -> bool {
        let space = &self.space;
        space.pending.fetch_add(bytes, Ordering::AcqRel);
        let used = space.used.fetch_add(bytes, Ordering::AcqRel) + bytes;
        let Some(limits) = space.limits else {
            return true;
        };
        if used > limits.high {
            self.queue_sweep();
        }
        if used <= limits.max || (!space.is_barren() && self.make_room(limits)) {
            return true;
        }
        self.settle(bytes);
        // It may have been measured anew meanwhile, without these.
        let _ = space
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                Some(used.saturating_sub(bytes))
            });
        space.refused.fetch_add(bytes, Ordering::Relaxed);
        false
    }

    /// Whether the cache may take so many bytes more without anything being evicted for them.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        let used = self.space.used.load(Ordering::Relaxed);
        let limits = self.space.limits;
        limits.is_none_or(|limits| used.saturating_add(bytes) <= limits.high)
    }

    /// Bytes that were admitted are written, or will not be.
    pub(super) fn settle(&self, bytes: u64) {
        self.space.pending.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// Makes room for what is admitted now, unless somebody else is at it.
    fn make_room(&self, limits: Limits) -> bool {
        let space = &self.space;
        let Some(mut hand) = space.hand.try_lock() else {
            return false;
        };
        let used = space.measure();
        if used > limits.max {
            let want = (used - limits.max).max((limits.max - limits.low) / 2);
            space.sweep(&mut hand, want);
            space.measure();
        }
        space.used.load(Ordering::Acquire) <= limits.max
    }

    /// The disk is full: gives some of it back. Whether that was possible.
    pub(super) fn relieve(&self, bytes: u64) -> bool {
        let space = &self.space;
        if space.is_barren() {
            return false;
        }
        let Some(mut hand) = space.hand.try_lock() else {
            return false;
        };
        let some = space.used.load(Ordering::Relaxed) / 8;
        space.sweep(&mut hand, bytes.max(some.min(SLACK))) >= bytes
    }

    pub(super) fn refuse(&self, bytes: u64) {
        self.space.refused.fetch_add(bytes, Ordering::Relaxed);
    }

    fn queue_sweep(self: &Arc<Self>) {
        if self.space.is_barren() || self.space.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        let queued = Queued(Arc::clone(self));
        drop(
            self.upkeep
                .submit(Box::new(move || queued.0.space.to_low())),
        );
    }
}
