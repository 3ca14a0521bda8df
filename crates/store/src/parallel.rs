//! Many small jobs on a few threads, their results handed to the caller's thread one at a time,
//! with a bound on what is in memory meanwhile.
//!
//! Jobs are begun in order and each takes its weight (bytes) out of a budget until its result was
//! handed over. The job whose turn is next was therefore begun before any that waits for budget:
//! handing over in order cannot starve. A job heavier than the whole budget runs alone.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// How much may be under way at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Jobs at once, at least one.
    pub(crate) threads: usize,
    /// Bytes of jobs begun and not yet handed over.
    pub(crate) bytes: u64,
}

/// When results are handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// In the order of the jobs.
    Kept,
    /// As they come.
    Free,
}

#[derive(Debug)]
struct State<R> {
    next: usize,
    used: u64,
    done: BTreeMap<usize, R>,
    /// No further job is begun.
    stopped: bool,
    panicked: bool,
}

#[derive(Debug)]
struct Shared<R> {
    state: Mutex<State<R>>,
    /// A job may be begun.
    free: Condvar,
    /// A job has ended.
    ended: Condvar,
}

impl<R> Shared<R> {
    fn lock(&self) -> MutexGuard<'_, State<R>> {
        // Only plain moves happen under the lock: it is never left half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(&self, panicked: bool) {
        let mut state = self.lock();
        state.stopped = true;
        state.panicked |= panicked;
        drop(state);
        self.free.notify_all();
        self.ended.notify_all();
    }
}

/// Tells the caller's thread of a job that panicked, and ends the other threads when the caller's
/// thread leaves for any reason.
struct Guard<'a, R> {
    shared: &'a Shared<R>,
    always: bool,
}

impl<R> Drop for Guard<'_, R> {
    fn drop(&mut self) {
        let panicking = std::thread::panicking();
        if self.always || panicking {
            self.shared.stop(panicking);
        }
    }
}

/// Does `work` on each item and hands each result with its item's number to `sink`, on the
/// caller's thread. The first error of `sink` ends the call: no further job is begun.
pub(crate) fn for_each<I: Sync, R: Send, E>(
    items: &[I],
    bounds: Bounds,
    order: Order,
    weight: impl Fn(&I) -> u64 + Sync,
    work: impl Fn(&I) -> R + Sync,
    mut sink: impl FnMut(usize, R) -> Result<(), E>,
) -> Result<(), E> {
    let alone = |sink: &mut dyn FnMut(usize, R) -> Result<(), E>| {
        items
            .iter()
            .enumerate()
            .try_for_each(|(i, item)| sink(i, work(item)))
    };
    if bounds.threads <= 1 || items.len() <= 1 {
        return alone(&mut sink);
    }
    let shared = Shared {
        state: Mutex::new(State {
            next: 0,
            used: 0,
            done: BTreeMap::new(),
            stopped: false,
            panicked: false,
        }),
        free: Condvar::new(),
        ended: Condvar::new(),
    };
    std::thread::scope(|scope| {
        let _guard = Guard {
            shared: &shared,
            always: true,
        };
        let (shared, weight, work) = (&shared, &weight, &work);
        let mut started = 0;
        for _ in 0..bounds.threads.min(items.len()) {
            let thread = std::thread::Builder::new().name("store-read".to_owned());
            let job = move || worker(shared, items, bounds.bytes, weight, work);
            // The system has no thread to give: with what there is.
            if thread.spawn_scoped(scope, job).is_err() {
                break;
            }
            started += 1;
        }
        if started == 0 {
            return alone(&mut sink);
        }
        for turn in 0..items.len() {
            let mut state = shared.lock();
            let taken = loop {
                if state.panicked {
                    return Ok(()); // the scope passes the panic on
                }
                let taken = match order {
                    Order::Kept => state.done.remove_entry(&turn),
                    Order::Free => state.done.pop_first(),
                };
                if let Some(taken) = taken {
                    break taken;
                }
                state = shared
                    .ended
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            let (number, result) = taken;
            sink(number, result)?;
            let mut state = shared.lock();
            state.used = state
                .used
                .saturating_sub(items.get(number).map_or(0, weight));
            drop(state);
            shared.free.notify_all();
        }
        Ok(())
    })
}

/// What `work` makes of each item, in their order, with at most `most` items worked on at once.
///
/// # Errors
/// The first in the items' order that `work` answers; what is under way then is waited for, and
/// nothing further is begun.
pub fn at_once<I: Sync, T: Send, E: Send>(
    items: &[I],
    most: usize,
    work: impl Fn(&I) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let bounds = Bounds {
        threads: most,
        bytes: u64::MAX,
    };
    let mut made = Vec::with_capacity(items.len());
    for_each(
        items,
        bounds,
        Order::Kept,
        |_| 0,
        work,
        |_, result| {
            made.push(result?);
            Ok(())
        },
    )?;
    Ok(made)
}

fn worker<I, R>(
    shared: &Shared<R>,
    items: &[I],
    budget: u64,
    weight: &(impl Fn(&I) -> u64 + Sync),
    work: &(impl Fn(&I) -> R + Sync),
) {
    let _guard = Guard {
        shared,
        always: false,
    };
    loop {
        let mut state = shared.lock();
        let (number, item) = loop {
            if state.stopped {
                return;
            }
            let number = state.next;
            let Some(item) = items.get(number) else {
                return;
            };
            let bytes = weight(item);
            if state.used == 0 || state.used.saturating_add(bytes) <= budget {
                state.next += 1;
                state.used = state.used.saturating_add(bytes);
                break (number, item);
            }
            state = shared
                .free
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        let result = work(item);
        shared.lock().done.insert(number, result);
        shared.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const BOUNDS: Bounds = Bounds {
        threads: 4,
        bytes: 100,
    };

    #[test]
    fn results_come_in_order_within_the_budget() {
        let items: Vec<u64> = (0..500).collect();
        let (now, peak) = (AtomicU64::new(0), AtomicU64::new(0));
        let weight = |i: &u64| 10 + i % 30;
        let mut seen = Vec::new();
        let result: Result<(), ()> = for_each(
            &items,
            BOUNDS,
            Order::Kept,
            weight,
            |i| {
                let used = now.fetch_add(weight(i), Ordering::SeqCst) + weight(i);
                peak.fetch_max(used, Ordering::SeqCst);
                std::thread::yield_now();
                i * 2
            },
            |number, double| {
                now.fetch_sub(weight(&(number as u64)), Ordering::SeqCst);
                assert_eq!(double, number as u64 * 2);
                seen.push(number as u64);
                Ok(())
            },
        );
        assert_eq!(result, Ok(()));
        assert_eq!(seen, items);
        let peak = peak.load(Ordering::SeqCst);
        assert!(peak <= 100, "{peak}");
    }

    #[test]
    fn every_result_comes_once_in_any_order() {
        let items: Vec<usize> = (0..300).collect();
        let mut seen = vec![0; 300];
        let done: Result<(), ()> = for_each(
            &items,
            BOUNDS,
            Order::Free,
            |_| 1000, // heavier than the budget: one at a time
            |i| *i,
            |number, i| {
                assert_eq!(number, i);
                seen[i] += 1;
                Ok(())
            },
        );
        assert_eq!(done, Ok(()));
        assert!(seen.iter().all(|n| *n == 1));
    }

    #[test]
    fn the_first_error_ends_it() {
        let items: Vec<usize> = (0..10_000).collect();
        let begun = AtomicU64::new(0);
        let result = for_each(
            &items,
            BOUNDS,
            Order::Kept,
            |_| 20,
            |i| {
                begun.fetch_add(1, Ordering::SeqCst);
                *i
            },
            |_, i| if i == 7 { Err(i) } else { Ok(()) },
        );
        assert_eq!(result, Err(7));
        assert!(begun.load(Ordering::SeqCst) <= 7 + 6);
    }

    #[test]
    fn a_panic_is_passed_on_and_nobody_waits() {
        let items: Vec<usize> = (0..100).collect();
        let caught = std::panic::catch_unwind(|| {
            let _: Result<(), ()> = for_each(
                &items,
                BOUNDS,
                Order::Kept,
                |_| 1,
                |i| assert!(*i != 50, "item {i}"),
                |_, ()| Ok(()),
            );
        });
        assert!(caught.is_err());
    }
}
