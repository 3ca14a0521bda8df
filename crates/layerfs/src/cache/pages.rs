//! Which pages of a data file the kernel is told to let go.
//!
//! Who reads a layer keeps a copy of what they read, so the data file's pages are of no use once they
//! were read. What was fetched ahead and waits for its reader is another matter: without its pages it
//! would have to reach the disk and come back.

use std::ops::Range;
use std::sync::OnceLock;

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Parts of the file for which it is counted what waits for readers.
const REGION: u64 = 1 << 20;
/// A region is kept while that many of its bytes wait.
const WORTH_KEEPING: u32 = 128 << 10;
/// Bytes that may wait with their pages kept; beyond, all of them go.
const MAX_WAITING: u64 = 256 << 20;

/// Bytes that were fetched ahead and not read since, by region. Approximate: it decides about memory,
/// never about content.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    regions: OnceLock<Box<[AtomicU32]>>,
    total: AtomicU64,
}

/// The regions that a range touches, each with the bytes of it.
fn parts(range: Range<u64>) -> impl Iterator<Item = (usize, u32)> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let region = at / REGION;
        let end = range.end.min((region + 1).saturating_mul(REGION));
        let part = u32::try_from(end.checked_sub(at)?)
            .ok()
            .filter(|n| *n > 0)?;
        at = end;
        Some((usize::try_from(region).ok()?, part))
    })
}

impl Waiting {
    /// Bytes of a file of `size` bytes were written for a later reader.
    pub(super) fn wrote(&self, size: u64, range: Range<u64>) {
        let count = usize::try_from(size.div_ceil(REGION)).unwrap_or(0);
        let regions = self
            .regions
            .get_or_init(|| (0..count).map(|_| AtomicU32::new(0)).collect());
        for (at, bytes) in parts(range) {
            let Some(region) = regions.get(at) else { break };
            region.fetch_add(bytes, Ordering::Relaxed);
            self.total.fetch_add(u64::from(bytes), Ordering::Relaxed);
        }
    }

    /// Somebody read these bytes.
    pub(super) fn read(&self, range: Range<u64>) {
        if self.total.load(Ordering::Relaxed) == 0 {
            return;
        }
        let Some(regions) = self.regions.get() else {
            return;
        };
        for (at, bytes) in parts(range) {
            let Some(region) = regions.get(at) else { break };
            let before = region.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| {
                Some(n.saturating_sub(bytes))
            });
            let gone = u64::from(bytes.min(before.unwrap_or(0)));
            let less = |total: u64| Some(total.saturating_sub(gone));
            let _ = self
                .total
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// Nothing waits any more. Whether something did.
    pub(super) fn forget(&self) -> bool {
        let waited = self.total.swap(0, Ordering::Relaxed) > 0;
        if waited {
            for region in self.regions.get().into_iter().flatten() {
                region.store(0, Ordering::Relaxed);
            }
        }
        waited
    }

    /// Parts of a file of `size` bytes whose pages may go; `None` stands for all of it.
    pub(super) fn may_go(&self, size: u64) -> Option<Vec<Range<u64>>> {
        match self.total.load(Ordering::Relaxed) {
            0 => return None,
            total if total > MAX_WAITING => {
                self.forget();
                return None;
            }
            _ => {}
        }
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut start = 0;
        for region in self.regions.get()? {
            let end = size.min(start + REGION);
            if region.load(Ordering::Relaxed) < WORTH_KEEPING {
                match ranges.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => ranges.push(start..end),
                }
            }
            start = end;
        }
        Some(ranges)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    const SIZE: u64 = 10 * REGION + 5000;

    #[test]
    fn what_waits_for_its_reader_is_kept() {
        let waiting = Waiting::default();
        assert_eq!(waiting.may_go(SIZE), None);
        waiting.read(0..SIZE);
        assert!(!waiting.forget());
        // Across a border, and at the end.
        waiting.wrote(SIZE, REGION - 200_000..REGION + 200_000);
        waiting.wrote(SIZE, 10 * REGION..SIZE);
        waiting.wrote(SIZE, 4 * REGION..6 * REGION);
        let kept = waiting.may_go(SIZE).unwrap();
        assert_eq!(kept, [2 * REGION..4 * REGION, 6 * REGION..SIZE]);
        // Read once more than written: nothing goes below zero.
        for _ in 0..2 {
            waiting.read(0..REGION + 100_000);
        }
        let kept = waiting.may_go(SIZE).unwrap();
        assert_eq!(kept, [0..4 * REGION, 6 * REGION..SIZE]);
        waiting.read(0..SIZE);
        assert_eq!(waiting.may_go(SIZE), None);
    }

    #[test]
    fn what_waits_is_bounded() {
        let size = 2 * MAX_WAITING;
        let waiting = Waiting::default();
        waiting.wrote(size, 0..MAX_WAITING);
        let kept = waiting.may_go(size).unwrap();
        assert_eq!(kept.len(), 1);
        assert_eq!(kept.first(), Some(&(MAX_WAITING..size)));
        waiting.wrote(size, MAX_WAITING..MAX_WAITING + 1);
        assert_eq!(waiting.may_go(size), None);
        assert!(!waiting.forget(), "all of it was given up");
    }
}
