//! Trying again what failed for a passing reason: too many requests, an overloaded server, a
//! time limit, a broken connection, an answer of the wrong length.
//!
//! Waits are drawn at random below a doubling limit, so that clients that failed together do not
//! come back together, and never shorter than a server asks for. A budget bounds how much load
//! retries may add when everything fails: each costs one unit, each success earns a tenth.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::{BlobStore, BlobWriter, Leftovers, ObjectInfo, PutMode, PutOutcome, Span};
use crate::error::{Result, StoreError};
use crate::key::Key;

/// Retries that may be made without any success, in tenths.
const BUDGET: u32 = 300;
/// How often damaged bytes are read again.
const REREADS: u32 = 2;

/// When and how often an operation that failed for a passing reason is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Attempts in all; 1: never again.
    pub attempts: u32,
    /// Longest wait before the second attempt; it doubles with each further one. The wait itself
    /// is drawn between nothing and that.
    pub first_wait: Duration,
    /// The longest wait. A server that asks for more (`Retry-After`) is not asked again.
    pub longest_wait: Duration,
    /// No attempt begins after this much time since the first began.
    pub total: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts: 6,
            first_wait: Duration::from_millis(100),
            longest_wait: Duration::from_secs(20),
            total: Duration::from_secs(180),
        }
    }
}

impl RetryPolicy {
    /// Every operation is tried once.
    #[must_use]
    pub fn never() -> Self {
        Self {
            attempts: 1,
            ..Self::default()
        }
    }

    /// How long to wait after `failed` failures in a row, at least `asked`.
    pub(crate) fn wait(&self, failed: u32, asked: Option<Duration>) -> Duration {
        let doubled = 1_u32
            .checked_shl(failed.saturating_sub(1))
            .filter(|_| failed <= 31)
            .unwrap_or(u32::MAX);
        let limit = self.first_wait.saturating_mul(doubled);
        let drawn = limit.min(self.longest_wait).mul_f64(fastrand::f64());
        asked.map_or(drawn, |asked| asked.saturating_add(drawn))
    }

    /// How long to wait before trying again after `failed` failures, the last of which was
    /// `error`; `None`: it stays at that error.
    pub(crate) fn next(&self, failed: u32, since: Instant, error: &StoreError) -> Option<Duration> {
        if !error.is_transient() || failed >= self.attempts {
            return None;
        }
        let asked = match error {
            StoreError::Throttled { retry_after_ms, .. } => {
                retry_after_ms.map(Duration::from_millis)
            }
            _ => None,
        };
        if asked.is_some_and(|asked| asked > self.longest_wait) {
            return None;
        }
        let wait = self.wait(failed, asked);
        (since.elapsed().saturating_add(wait) < self.total).then_some(wait)
    }

    /// Runs `act` until it succeeds or should not be tried again.
    pub(crate) async fn run<T>(&self, mut act: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        let since = Instant::now();
        let mut failed = 0;
        loop {
            let error = match act().await {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            failed += 1;
            let Some(wait) = self.next(failed, since, &error) else {
                return Err(error);
            };
            tracing::debug!(?wait, "trying again: {error}");
            tokio::time::sleep(wait).await;
        }
    }
}

/// A store that tries again.
///
/// A write whose answer was lost and that is tried again may find its own object:
/// [`PutOutcome::Exists`] then means "it is there", and a delete answers `false`. Streams are not
/// tried again here, since their bytes are gone: a backend with streams does that itself.
#[derive(Debug)]
pub struct RetryStore {
    inner: Arc<dyn BlobStore>,
    policy: RetryPolicy,
    budget: AtomicU32,
}

impl RetryStore {
    /// Tries again what fails in `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn BlobStore>, policy: RetryPolicy) -> Self {
        Self {
            inner,
            policy,
            budget: AtomicU32::new(BUDGET),
        }
    }

    fn spend(&self) -> bool {
        self.budget
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(10)
            })
            .is_ok()
    }

    fn earn(&self) {
        let _ = self
            .budget
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                (left < BUDGET).then_some(left + 1)
            });
    }

    fn run<T>(&self, act: impl Fn() -> Result<T>) -> Result<T> {
        let since = Instant::now();
        let mut failed = 0;
        loop {
            let error = match act() {
                Ok(value) => {
                    self.earn();
                    return Ok(value);
                }
                Err(error) => error,
            };
            failed += 1;
            let Some(wait) = self.policy.next(failed, since, &error) else {
                return Err(error);
            };
            if !self.spend() {
                tracing::warn!("too many failures to try again: {error}");
                return Err(error);
            }
            tracing::debug!(?wait, "trying again: {error}");
            std::thread::sleep(wait);
        }
    }

    fn broken(&self, key: &Key, what: String) -> StoreError {
        StoreError::Io {
            operation: "read",
            store: self.inner.url(),
            key: key.to_string(),
            source: std::io::Error::new(std::io::ErrorKind::UnexpectedEof, what),
        }
    }
}

impl BlobStore for RetryStore {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        self.run(|| self.inner.get(key, max_len))
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        self.run(|| {
            let bytes = self.inner.get_range(key, range.clone())?;
            let len = range.end.saturating_sub(range.start);
            if bytes.len() as u64 == len {
                Ok(bytes)
            } else {
                let what = format!("{} bytes came, not {len}", bytes.len());
                Err(self.broken(key, what))
            }
        })
    }

    /// At most twice: bytes that are wrong three times are wrong where they lie.
    fn reread(
        &self,
        key: &Key,
        span: &Span,
        accept: &mut dyn FnMut(&[u8], &str) -> bool,
    ) -> Result<bool> {
        let since = Instant::now();
        let mut turn = 0;
        let mut failed = 0;
        loop {
            if !self.spend() {
                tracing::warn!(%key, "too many failures to read again what came damaged");
                return Ok(false);
            }
            tracing::debug!(%key, "reading again: the bytes are not what they must be");
            match self.inner.reread(key, span, accept) {
                Ok(true) => return Ok(true),
                Ok(false) => {
                    turn += 1;
                    if turn >= REREADS.min(self.policy.attempts.saturating_sub(1)) {
                        return Ok(false);
                    }
                    std::thread::sleep(self.policy.wait(turn, None));
                }
                Err(error) => {
                    failed += 1;
                    let Some(wait) = self.policy.next(failed, since, &error) else {
                        return Err(error);
                    };
                    std::thread::sleep(wait);
                }
            }
        }
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        self.run(|| self.inner.put(key, bytes, mode))
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        let since = Instant::now();
        let mut failed = 0;
        loop {
            // A loop of its own: what succeeds borrows the store.
            let error = match self.inner.put_stream() {
                Ok(writer) => return Ok(writer),
                Err(error) => error,
            };
            failed += 1;
            match self.policy.next(failed, since, &error) {
                Some(wait) if self.spend() => std::thread::sleep(wait),
                _ => return Err(error),
            }
        }
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        self.run(|| self.inner.size(key))
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.run(|| self.inner.list(prefix))
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        self.run(|| self.inner.delete(key))
    }

    fn put_volatile(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        self.run(|| self.inner.put_volatile(key, bytes))
    }

    fn delete_volatile(&self, key: &Key) -> Result<bool> {
        self.run(|| self.inner.delete_volatile(key))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn throttled(retry_after_ms: Option<u64>) -> StoreError {
        StoreError::Throttled {
            store: "s".to_owned(),
            key: "k".to_owned(),
            retry_after_ms,
        }
    }

    #[test]
    fn waits_double_up_to_the_longest_and_are_never_shorter_than_asked() {
        let policy = RetryPolicy {
            attempts: 100,
            first_wait: Duration::from_millis(100),
            longest_wait: Duration::from_secs(3),
            total: Duration::from_secs(1000),
        };
        for failed in 1..100 {
            let limit = Duration::from_millis(100)
                .saturating_mul(2_u32.saturating_pow(failed - 1))
                .min(policy.longest_wait);
            for _ in 0..50 {
                assert!(policy.wait(failed, None) <= limit);
                let asked = Duration::from_secs(2);
                assert!(policy.wait(failed, Some(asked)) >= asked);
            }
        }
        let now = Instant::now();
        assert!(policy.next(1, now, &throttled(Some(2000))) >= Some(Duration::from_secs(2)));
        assert_eq!(policy.next(1, now, &throttled(Some(4000))), None);
        assert_eq!(policy.next(100, now, &throttled(None)), None);
        let missing = StoreError::Missing {
            store: "s".to_owned(),
            key: "k".to_owned(),
        };
        assert_eq!(policy.next(1, now, &missing), None);
        let hurried = RetryPolicy {
            total: Duration::ZERO,
            ..policy
        };
        assert_eq!(hurried.next(1, now, &throttled(None)), None);
    }
}
