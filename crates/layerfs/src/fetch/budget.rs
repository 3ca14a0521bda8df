//! A node-wide limit on the bytes that readers wait for, first come first served.

use std::collections::VecDeque;
use std::time::Instant;

use crate::sync::{Condvar, Mutex};

/// Bytes that may be in flight.
#[derive(Debug)]
pub(super) struct Budget {
    limit: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    used: u64,
    next: u64,
    waiting: VecDeque<u64>,
}

/// Bytes taken; given back on drop.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl Budget {
    pub(super) fn new(limit: u64) -> Self {
        Self {
            limit: limit.max(1),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
        }
    }

    /// What one reader should take at most, so that several can.
    pub(super) fn piece(&self) -> u64 {
        self.limit / 4
    }

    pub(super) fn used(&self) -> u64 {
        self.state.lock().used
    }

    /// Takes `bytes`, waiting for those before; more than the whole limit is let through when
    /// nothing else is taken. `None` when the deadline passes first.
    pub(super) fn take(&self, bytes: u64, deadline: Instant) -> Option<Permit<'_>> {
        let mut state = self.state.lock();
        let ticket = state.next;
        state.next += 1;
        state.waiting.push_back(ticket);
        loop {
            let fits = state.used == 0 || state.used.saturating_add(bytes) <= self.limit;
            if state.waiting.front() == Some(&ticket) && fits {
                state.waiting.pop_front();
                state.used += bytes;
                drop(state);
                self.changed.notify_all();
                return Some(Permit {
                    budget: self,
                    bytes,
                });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.waiting.retain(|t| *t != ticket);
                drop(state);
                self.changed.notify_all();
                return None;
            }
            state = self.changed.wait_timeout(state, left);
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock();
        state.used = state.used.saturating_sub(self.bytes);
        drop(state);
        self.budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::{AtomicU64, Ordering};
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn never_exceeds_its_limit_and_returns_to_zero() {
        let budget = Budget::new(1000);
        let (now, peak) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let (budget, now, peak) = (&budget, &now, &peak);
                scope.spawn(move || {
                    for round in 0..200_u64 {
                        let bytes = (thread * 37 + round * 13) % 400;
                        let permit = budget.take(bytes, soon()).unwrap();
                        let used = now.fetch_add(bytes, Ordering::SeqCst) + bytes;
                        peak.fetch_max(used, Ordering::SeqCst);
                        now.fetch_sub(bytes, Ordering::SeqCst);
                        drop(permit);
                    }
                });
            }
        });
        assert!(peak.load(Ordering::SeqCst) <= 1000);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn more_than_everything_is_served_alone() {
        let budget = Budget::new(10);
        let big = budget.take(1000, soon()).unwrap();
        assert!(budget.take(1, Instant::now()).is_none());
        drop(big);
        assert!(budget.take(1, Instant::now()).is_some());
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn one_who_gives_up_does_not_block_those_behind() {
        let budget = Budget::new(10);
        let held = budget.take(8, soon()).unwrap();
        assert!(budget.take(5, Instant::now()).is_none());
        assert!(budget.take(2, Instant::now()).is_some());
        drop(held);
    }
}
