//! A limit of the load on a store: so many bytes and requests a second.
//!
//! Each limit is a bucket that fills at its rate and holds one second's worth. A call takes what
//! it needs even if the bucket then owes something, and the next one waits until that is paid
//! back: large and small calls are served in the order in which they come.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{BlobStore, BlobWriter, Leftovers, ObjectInfo, PutMode, PutOutcome, Span};
use crate::error::Result;
use crate::key::Key;

/// How much may be asked of a store; `None`: as much as possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RateLimits {
    /// Bytes of objects a second, read and written together; at least 1.
    pub bytes_per_second: Option<u64>,
    /// Requests a second; at least 1.
    pub requests_per_second: Option<u32>,
}

/// One limit.
#[derive(Debug)]
struct Bucket {
    /// Units a second.
    rate: f64,
    state: Mutex<Level>,
}

#[derive(Debug, Clone, Copy)]
struct Level {
    /// Units there at `at`; less than nothing if some are owed.
    units: f64,
    at: Instant,
}

impl Bucket {
    fn new(rate: f64, now: Instant) -> Self {
        let rate = rate.max(1.0);
        Self {
            rate,
            state: Mutex::new(Level {
                units: rate,
                at: now,
            }),
        }
    }

    /// Takes `units` and answers how long the caller must wait first.
    fn take(&self, units: f64, now: Instant) -> Duration {
        // Written in one step: a panic elsewhere leaves no half of it.
        let mut level = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = now.saturating_duration_since(level.at).as_secs_f64();
        let there = (level.units + passed * self.rate).min(self.rate);
        *level = Level {
            units: there - units,
            at: now.max(level.at),
        };
        if there >= 0.0 {
            return Duration::ZERO;
        }
        Duration::try_from_secs_f64(-there / self.rate).unwrap_or(Duration::from_secs(60))
    }
}

/// A store that is not asked for more than its limits.
#[derive(Debug)]
pub struct LimitedStore {
    inner: Arc<dyn BlobStore>,
    bytes: Option<Bucket>,
    requests: Option<Bucket>,
}

impl LimitedStore {
    /// Limits the load on `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn BlobStore>, limits: RateLimits) -> Self {
        let now = Instant::now();
        #[expect(
            clippy::cast_precision_loss,
            reason = "a rate need not be exact to the byte"
        )]
        let bytes = limits.bytes_per_second.map(|rate| rate as f64);
        Self {
            inner,
            bytes: bytes.map(|rate| Bucket::new(rate, now)),
            requests: limits
                .requests_per_second
                .map(|rate| Bucket::new(f64::from(rate), now)),
        }
    }

    /// Waits until one more request may be made that moves `bytes`.
    fn admit(&self, bytes: u64) {
        let now = Instant::now();
        let requests = self
            .requests
            .as_ref()
            .map_or(Duration::ZERO, |bucket| bucket.take(1.0, now));
        let wait = requests.max(self.charge(bytes, now));
        if !wait.is_zero() {
            std::thread::sleep(wait);
        }
    }

    fn charge(&self, bytes: u64, now: Instant) -> Duration {
        #[expect(
            clippy::cast_precision_loss,
            reason = "a rate need not be exact to the byte"
        )]
        let units = bytes as f64;
        self.bytes
            .as_ref()
            .map_or(Duration::ZERO, |bucket| bucket.take(units, now))
    }
}

impl BlobStore for LimitedStore {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        self.admit(0);
        let found = self.inner.get(key, max_len)?;
        // Its size is known only now: who comes next pays.
        let _ = self.charge(
            found.as_ref().map_or(0, |bytes| bytes.len() as u64),
            Instant::now(),
        );
        Ok(found)
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        // What a range asks for may be nonsense, what comes is not.
        self.admit(0);
        let bytes = self.inner.get_range(key, range)?;
        let _ = self.charge(bytes.len() as u64, Instant::now());
        Ok(bytes)
    }

    fn reread(
        &self,
        key: &Key,
        span: &Span,
        accept: &mut dyn FnMut(&[u8], &str) -> bool,
    ) -> Result<bool> {
        self.admit(0);
        self.inner.reread(key, span, &mut |bytes, from| {
            let _ = self.charge(bytes.len() as u64, Instant::now());
            accept(bytes, from)
        })
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        self.admit(bytes.len() as u64);
        self.inner.put(key, bytes, mode)
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        self.admit(0);
        let inner = self.inner.put_stream()?;
        Ok(Box::new(LimitedWriter { store: self, inner }))
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        self.admit(0);
        self.inner.size(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.admit(0);
        self.inner.list(prefix)
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        self.admit(0);
        self.inner.delete(key)
    }

    fn put_volatile(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        self.admit(bytes.len() as u64);
        self.inner.put_volatile(key, bytes)
    }

    fn delete_volatile(&self, key: &Key) -> Result<bool> {
        self.admit(0);
        self.inner.delete_volatile(key)
    }

    fn leftovers(&self, remove: bool) -> Result<Leftovers> {
        self.inner.leftovers(remove)
    }

    fn reserve(&self, keep: bool) -> Result<bool> {
        self.inner.reserve(keep)
    }

    fn url(&self) -> String {
        self.inner.url()
    }

    fn is_away(&self) -> bool {
        self.inner.is_away()
    }

    fn decides_races(&self) -> bool {
        self.inner.decides_races()
    }
}

struct LimitedWriter<'a> {
    store: &'a LimitedStore,
    inner: Box<dyn BlobWriter + 'a>,
}

impl BlobWriter for LimitedWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let wait = self.store.charge(bytes.len() as u64, Instant::now());
        if !wait.is_zero() {
            std::thread::sleep(wait);
        }
        self.inner.write(bytes)
    }

    fn commit(self: Box<Self>, key: &Key, mode: PutMode) -> Result<PutOutcome> {
        let Self { store, inner } = *self;
        store.admit(0);
        inner.commit(key, mode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clock is the test's own.
    #[test]
    fn a_bucket_lends_and_is_paid_back() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let bucket = Bucket::new(100.0, begin);
        assert_eq!(bucket.take(100.0, begin), Duration::ZERO, "it begins full");
        assert_eq!(bucket.take(50.0, begin), Duration::ZERO, "it lends");
        assert_eq!(bucket.take(50.0, begin), Duration::from_millis(500));
        assert_eq!(bucket.take(10.0, at(500)), Duration::from_millis(500));
        assert_eq!(bucket.take(10.0, at(1100)), Duration::ZERO);
        // An hour of rest is worth one second.
        assert_eq!(bucket.take(100.0, at(3_600_000)), Duration::ZERO);
        assert_eq!(bucket.take(1.0, at(3_600_000)), Duration::ZERO);
        assert_eq!(bucket.take(1.0, at(3_600_000)), Duration::from_millis(10));
        // A clock that goes back changes nothing.
        assert_eq!(bucket.take(0.0, begin), Duration::from_millis(20));
    }
}
