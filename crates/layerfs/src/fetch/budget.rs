//! A node-wide limit on the bytes that readers wait for, first come first served.
//!
//! Those who read from one store take at most three quarters of it, and those who wait for that alone
//! hold up nobody else: a store that hangs leaves room for the others.

use std::collections::{HashMap, VecDeque};
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
    by_store: HashMap<usize, u64>,
    next: u64,
    waiting: VecDeque<Wanted>,
}

/// Who waits.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    ticket: u64,
    store: usize,
    bytes: u64,
}

/// Bytes taken; given back on drop.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    budget: &'a Budget,
    store: usize,
    bytes: u64,
}

impl State {
    /// Whether the readers of a store have as much as they may. A single one always may.
    fn has_its_share(&self, wanted: &Wanted, share: u64) -> bool {
        let taken = self.by_store.get(&wanted.store).copied().unwrap_or(0);
        taken > 0 && taken.saturating_add(wanted.bytes) > share
    }

    /// Whether it is this one's turn.
    fn may(&self, wanted: &Wanted, limit: u64) -> bool {
        let share = limit - limit / 4;
        let fits = self.used == 0 || self.used.saturating_add(wanted.bytes) <= limit;
        let before = self
            .waiting
            .iter()
            .take_while(|w| w.ticket != wanted.ticket);
        // Of a store whose first reader waits for its share nobody comes before that one, however
        // little they want.
        let passed = |w: &Wanted| {
            let first = self.waiting.iter().find(|first| first.store == w.store);
            w.store != wanted.store && first.is_some_and(|w| self.has_its_share(w, share))
        };
        fits && !self.has_its_share(wanted, share) && before.copied().all(|w| passed(&w))
    }

    fn give(&mut self, wanted: &Wanted) {
        self.used += wanted.bytes;
        *self.by_store.entry(wanted.store).or_default() += wanted.bytes;
    }
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

    fn permit(&self, wanted: &Wanted) -> Permit<'_> {
        Permit {
            budget: self,
            store: wanted.store,
            bytes: wanted.bytes,
        }
    }

    /// Takes `bytes` for a reader of a store, if nobody has to be waited for.
    pub(super) fn take_now(&self, store: usize, bytes: u64) -> Option<Permit<'_>> {
        let mut state = self.state.lock();
        let wanted = Wanted {
            ticket: state.next,
            store,
            bytes,
        };
        if !state.may(&wanted, self.limit) {
            return None;
        }
        state.give(&wanted);
        Some(self.permit(&wanted))
    }

    /// Takes `bytes` for a reader of a store, waiting for those before; more than the whole limit is
    /// let through when nothing else is taken. `None` when the deadline passes first.
    pub(super) fn take(&self, store: usize, bytes: u64, deadline: Instant) -> Option<Permit<'_>> {
        let mut state = self.state.lock();
        let wanted = Wanted {
            ticket: state.next,
            store,
            bytes,
        };
        state.next += 1;
        state.waiting.push_back(wanted);
        loop {
            let turn = state.may(&wanted, self.limit);
            let left = deadline.saturating_duration_since(Instant::now());
            if turn || left.is_zero() {
                state.waiting.retain(|w| w.ticket != wanted.ticket);
                if turn {
                    state.give(&wanted);
                }
                drop(state);
                self.changed.notify_all();
                return turn.then(|| self.permit(&wanted));
            }
            state = self.changed.wait_timeout(state, left);
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock();
        state.used = state.used.saturating_sub(self.bytes);
        if let Some(taken) = state.by_store.get_mut(&self.store) {
            *taken = taken.saturating_sub(self.bytes);
        }
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
                        let permit = budget
                            .take(usize::from(thread % 3 == 0), bytes, soon())
                            .unwrap();
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
        let big = budget.take(0, 1000, soon()).unwrap();
        assert!(budget.take(0, 1, Instant::now()).is_none());
        drop(big);
        assert!(budget.take(0, 1, Instant::now()).is_some());
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn who_wants_little_behind_who_has_its_share_holds_up_no_other_store() {
        let budget = &Budget::new(1000);
        let held = budget.take(0, 700, soon()).unwrap();
        std::thread::scope(|scope| {
            let waits = |bytes: u64, waiting: usize| {
                let reader = scope.spawn(move || drop(budget.take(0, bytes, soon()).unwrap()));
                while budget.state.lock().waiting.len() < waiting {
                    std::thread::yield_now();
                }
                reader
            };
            let _large = waits(100, 1);
            let _small = waits(10, 2);
            assert!(budget.take_now(1, 50).is_some());
            assert!(budget.take(1, 50, soon()).is_some());
            // Within the store it is first come, first served.
            assert!(budget.take_now(0, 10).is_none());
            drop(held);
        });
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn one_who_gives_up_does_not_block_those_behind() {
        let budget = Budget::new(10);
        let held = budget.take(0, 6, soon()).unwrap();
        assert!(budget.take(1, 5, Instant::now()).is_none());
        assert!(budget.take_now(1, 5).is_none());
        assert!(budget.take(1, 2, Instant::now()).is_some());
        assert!(budget.take_now(0, 2).is_some());
        drop(held);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn one_store_leaves_room_for_the_others() {
        let budget = Budget::new(100);
        let held: Vec<_> = (0..3)
            .map(|_| budget.take(0, 25, soon()).unwrap())
            .collect();
        std::thread::scope(|scope| {
            // It waits for its own store's readers, and nobody else waits for it.
            let behind = scope.spawn(|| budget.take(0, 25, soon()).map(drop));
            while budget.state.lock().waiting.is_empty() {
                std::thread::yield_now();
            }
            let other = budget.take(1, 20, soon()).unwrap();
            assert!(budget.take_now(1, 20).is_none(), "more than the limit");
            drop(other);
            // Its own readers do not overtake it.
            assert!(budget.take_now(0, 1).is_none());
            assert!(!behind.is_finished());
            drop(held);
            behind.join().unwrap().unwrap();
        });
        assert_eq!(budget.used(), 0);
    }
}
