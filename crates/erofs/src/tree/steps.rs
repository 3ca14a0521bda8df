//! Counts what look-ups without a table cost, so that there is one before they cost much.

use std::sync::atomic::{AtomicU64, Ordering};

/// Entries that may be passed for each entry that there is: making the table passes each about as often.
const EACH: u64 = 8;
/// And so many anyway.
const FEW: u64 = 1 << 14;

/// Entries that were passed so far.
#[derive(Debug, Default)]
pub(super) struct Steps(AtomicU64);

impl Clone for Steps {
    fn clone(&self) -> Self {
        Self(AtomicU64::new(self.0.load(Ordering::Relaxed)))
    }
}

impl Steps {
    /// So many more.
    pub(super) fn add(&self, passed: u64) {
        if passed > 0 {
            self.0.fetch_add(passed, Ordering::Relaxed);
        }
    }

    /// None so far.
    pub(super) fn reset(&mut self) {
        *self.0.get_mut() = 0;
    }

    /// Whether a table is due where there are so many entries.
    pub(super) fn are_many(&mut self, entries: usize) -> bool {
        *self.0.get_mut() > EACH * entries as u64 + FEW
    }
}
