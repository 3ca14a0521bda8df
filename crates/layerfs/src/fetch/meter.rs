//! What a fetcher did since it began, over all blobs, also those that are gone.

use std::time::Duration;

use super::ReadError;
use crate::sync::{AtomicU64, Ordering};

/// Upper bounds of the histograms' buckets, in milliseconds; the last bucket has none.
pub const BUCKETS_MS: [u64; 14] = [
    1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000,
];
/// A read that waits longer is a stall.
pub const STALL: Duration = Duration::from_secs(1);

/// Kinds of errors that reads end with.
pub const ERROR_KINDS: [&str; 6] = [
    "store",
    "damaged",
    "cache",
    "timeout",
    "abandoned",
    "no_store",
];

/// How often something took how long.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Latencies {
    /// Per bucket of [`BUCKETS_MS`], and what took longer than the last.
    pub counts: [u64; BUCKETS_MS.len() + 1],
    /// Sum of all, in microseconds.
    pub sum_us: u64,
}

#[derive(Debug, Default)]
struct Histogram {
    counts: [AtomicU64; BUCKETS_MS.len() + 1],
    sum_us: AtomicU64,
}

impl Histogram {
    fn observe(&self, took: Duration) {
        let bucket = BUCKETS_MS.partition_point(|ms| Duration::from_millis(*ms) < took);
        if let Some(count) = self.counts.get(bucket) {
            add(count, 1);
        }
        add(&self.sum_us, u64::try_from(took.as_micros()).unwrap_or(0));
    }

    fn read(&self) -> Latencies {
        Latencies {
            counts: std::array::from_fn(|i| self.counts.get(i).map_or(0, get)),
            sum_us: get(&self.sum_us),
        }
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Counters; plain numbers and bytes.
#[derive(Debug, Default)]
pub(super) struct Meter {
    hits: AtomicU64,
    misses: AtomicU64,
    served: AtomicU64,
    requests: AtomicU64,
    fetched_stored: AtomicU64,
    fetched_raw: AtomicU64,
    verified: AtomicU64,
    written: AtomicU64,
    passed: AtomicU64,
    copied: AtomicU64,
    stalls: AtomicU64,
    ahead: [AtomicU64; 3],
    errors: [AtomicU64; ERROR_KINDS.len()],
    fetches: Histogram,
    waits: Histogram,
}

/// A [`super::Fetcher`]'s counters. Bytes, or plain numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MeterStatus {
    /// Reads answered from the cache.
    pub hits: u64,
    /// Reads that had to wait for a fetch.
    pub misses: u64,
    /// Bytes given to readers.
    pub served: u64,
    /// Requests to stores for data.
    pub requests: u64,
    /// Bytes fetched, as stored.
    pub fetched_stored: u64,
    /// Bytes fetched, after decompression.
    pub fetched_raw: u64,
    /// Bytes of extents that had the right digest.
    pub verified: u64,
    /// Bytes written to the cache.
    pub written: u64,
    /// Bytes given to readers that the cache did not keep.
    pub passed: u64,
    /// Bytes of extents that other layers of the node had.
    pub copied: u64,
    /// Reads that waited longer than [`STALL`].
    pub stalls: u64,
    /// Bytes fetched ahead of demand, of these read since, of these evicted unread.
    pub ahead: [u64; 3],
    /// Reads that failed, by [`ERROR_KINDS`].
    pub errors: [u64; ERROR_KINDS.len()],
    /// Time that fetches of one or several frames took.
    pub fetches: Latencies,
    /// Time that reads waited for fetches.
    pub waits: Latencies,
    /// Reads that wait right now.
    pub waiting: u64,
    /// How long the oldest of them has waited, in milliseconds.
    pub oldest_wait_ms: u64,
    /// Bytes of frames that readers wait for right now.
    pub inflight: u64,
}

impl Meter {
    pub(super) fn hit(&self, bytes: u64) {
        add(&self.hits, 1);
        add(&self.served, bytes);
    }

    /// A read that had to wait has ended.
    pub(super) fn waited(&self, took: Duration, result: Result<u64, &ReadError>) {
        add(&self.misses, 1);
        self.waits.observe(took);
        if took > STALL {
            add(&self.stalls, 1);
        }
        match result {
            Ok(bytes) => add(&self.served, bytes),
            Err(error) => self.failed(error),
        }
    }

    pub(super) fn failed(&self, error: &ReadError) {
        if let Some(counter) = self.errors.get(kind(error)) {
            add(counter, 1);
        }
    }

    pub(super) fn fetched(&self, took: Duration, requests: u64, stored: u64) {
        self.fetches.observe(took);
        add(&self.requests, requests);
        add(&self.fetched_stored, stored);
    }

    pub(super) fn frame(&self, raw: u64, verified: u64) {
        add(&self.fetched_raw, raw);
        add(&self.verified, verified);
    }

    pub(super) fn wrote(&self, bytes: u64) {
        add(&self.written, bytes);
    }

    /// Extents were fetched ahead (0), read since (1) or evicted unread (2).
    pub(super) fn ahead(&self, what: usize, bytes: u64) {
        if let Some(counter) = self.ahead.get(what) {
            add(counter, bytes);
        }
    }

    pub(super) fn copied(&self, bytes: u64) {
        add(&self.copied, bytes);
    }

    pub(super) fn passed(&self, bytes: u64) {
        add(&self.passed, bytes);
    }

    pub(super) fn read(&self) -> MeterStatus {
        MeterStatus {
            hits: get(&self.hits),
            misses: get(&self.misses),
            served: get(&self.served),
            requests: get(&self.requests),
            fetched_stored: get(&self.fetched_stored),
            fetched_raw: get(&self.fetched_raw),
            verified: get(&self.verified),
            written: get(&self.written),
            passed: get(&self.passed),
            copied: get(&self.copied),
            stalls: get(&self.stalls),
            ahead: std::array::from_fn(|i| self.ahead.get(i).map_or(0, get)),
            errors: std::array::from_fn(|i| self.errors.get(i).map_or(0, get)),
            fetches: self.fetches.read(),
            waits: self.waits.read(),
            ..MeterStatus::default()
        }
    }
}

/// Index into [`ERROR_KINDS`].
fn kind(error: &ReadError) -> usize {
    match error {
        ReadError::TimedOut { .. } => 3,
        ReadError::Store(source)
            if matches!(**source, layerpack_store::StoreError::TimedOut { .. }) =>
        {
            3
        }
        ReadError::Store(source) if source.is_damage() => 1,
        ReadError::Store(_) => 0,
        ReadError::Damaged { .. } => 1,
        ReadError::Cache(_) => 2,
        ReadError::Abandoned => 4,
        ReadError::NoStore { .. } => 5,
        ReadError::Shared(shared) => kind(shared),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_duration_has_one_bucket() {
        let meter = Meter::default();
        for ms in [0, 1, 2, 3, 1000, 1001, 60_000] {
            meter.fetched(Duration::from_millis(ms), 1, 10);
        }
        let status = meter.read();
        let counts = status.fetches.counts;
        assert_eq!((counts[0], counts[1], counts[2]), (2, 1, 1));
        assert_eq!((counts[9], counts[10], counts[14]), (1, 1, 1));
        assert_eq!(counts.iter().sum::<u64>(), 7);
        assert_eq!(status.fetches.sum_us, 62_007_000);
        assert_eq!((status.requests, status.fetched_stored), (7, 70));
        let error = ReadError::Shared(std::sync::Arc::new(ReadError::Abandoned));
        meter.waited(STALL * 2, Err(&error));
        let status = meter.read();
        assert_eq!(status.errors, [0, 0, 0, 0, 1, 0]);
        assert_eq!((status.stalls, status.misses, status.hits), (1, 1, 0));
    }
}
