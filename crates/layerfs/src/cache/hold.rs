//! Who reads and writes which part of the file: what keeps it from being evicted meanwhile.
//!
//! The file is divided into runs of [`RUN_BYTES`]; an extent belongs to the run in which it begins.
//! Runs share a few locks. Readers and writers of a run hold its lock shared, for as long as they
//! rely on what they found; who evicts asks for it alone and goes elsewhere when it is not to be
//! had at once. So nobody ever waits for a reader, and a reader waits for an eviction at most as
//! long as some bits and one hole take.

use std::ops::Range;

use super::BlobCache;
use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Bytes of the file whose extents are evicted together: as much as a frame usually holds.
pub const RUN_BYTES: u64 = 128 << 10;
/// Locks of one blob, at most.
const STRIPES: u64 = 64;

#[derive(Debug)]
pub(super) struct Stripes(Vec<RwLock<()>>);

impl Stripes {
    pub(super) fn new(size: u64) -> Self {
        let count = size.div_ceil(RUN_BYTES).clamp(1, STRIPES);
        Self((0..count).map(|_| RwLock::new(())).collect())
    }

    /// The locks of all runs that begin in `range` or contain its start, each once.
    fn of(&self, range: &Range<u64>) -> impl Iterator<Item = &RwLock<()>> {
        let first = range.start / RUN_BYTES;
        let last = range.end.saturating_sub(1).max(range.start) / RUN_BYTES;
        let count = self.0.len() as u64;
        (first..=last.min(first + count - 1)).filter_map(move |run| self.of_run(run))
    }

    fn of_run(&self, run: u64) -> Option<&RwLock<()>> {
        let at = usize::try_from(run % self.0.len().max(1) as u64).ok()?;
        self.0.get(at)
    }
}

/// Extents that begin in a range stay as they are, present or not written over by a hole, for as
/// long as this lives.
#[derive(Debug)]
#[must_use]
pub struct Held<'a> {
    _locks: Vec<RwLockReadGuard<'a, ()>>,
}

/// Nobody reads or writes in a run for as long as this lives.
#[derive(Debug)]
#[must_use]
pub(crate) struct Exclusive<'a> {
    _lock: RwLockWriteGuard<'a, ()>,
}

impl BlobCache {
    /// Keeps the extents that begin in `range` from being evicted.
    pub fn hold(&self, range: &Range<u64>) -> Held<'_> {
        Held {
            _locks: self.stripes.of(range).map(RwLock::read).collect(),
        }
    }

    /// As [`BlobCache::hold`], if nothing is being evicted there right now.
    pub fn try_hold(&self, range: &Range<u64>) -> Option<Held<'_>> {
        let locks: Option<Vec<_>> = self.stripes.of(range).map(RwLock::try_read).collect();
        Some(Held { _locks: locks? })
    }

    /// A run to oneself, if nobody reads or writes there right now.
    pub(crate) fn try_alone(&self, run: u64) -> Option<Exclusive<'_>> {
        let lock = self.stripes.of_run(run)?.try_write()?;
        Some(Exclusive { _lock: lock })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_each_lock_once() {
        for (size, range, expected) in [
            (1, 0..1, 1),
            (RUN_BYTES * 3, 0..RUN_BYTES, 1),
            (RUN_BYTES * 3, 0..RUN_BYTES + 1, 2),
            (RUN_BYTES * 3, RUN_BYTES - 1..RUN_BYTES * 3, 3),
            (RUN_BYTES * 1000, 5..RUN_BYTES * 1000, 64),
            (RUN_BYTES * 1000, RUN_BYTES..RUN_BYTES, 1),
        ] {
            let stripes = Stripes::new(size);
            let mut seen: Vec<*const RwLock<()>> =
                stripes.of(&range).map(std::ptr::from_ref).collect();
            assert_eq!(seen.len(), expected, "{range:?} of {size}");
            seen.sort();
            seen.dedup();
            assert_eq!(seen.len(), expected, "{range:?} of {size}");
        }
    }
}
