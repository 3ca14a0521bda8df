//! Single flight: one fetch of a frame however many readers want it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Instant;

use super::ReadError;
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering};

/// How a flight ended.
#[derive(Debug, Clone)]
pub(super) enum Outcome {
    /// All extents of the frame are in the cache.
    Stored,
    /// All extents of the frame were verified, but the cache did not take them all.
    Passed(Arc<Vec<u8>>),
    /// The locator was replaced: ask again.
    Moved,
    /// No bytes.
    Failed(Arc<ReadError>),
}

/// One fetch under way.
#[derive(Debug)]
pub(super) struct Flight {
    begun: Instant,
    /// Whether the store is asked, as it will be in the end, and not a peer, who may be waiting
    /// for us.
    direct: AtomicBool,
    /// Whether another layer of the node had the frame.
    copied: AtomicBool,
    /// A reader waited for as long as readers do, in vain.
    given_up: AtomicBool,
    /// It took the place of one that was given up.
    anew: AtomicBool,
    outcome: Mutex<Option<Outcome>>,
    landed: Condvar,
}

impl Default for Flight {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            direct: AtomicBool::default(),
            copied: AtomicBool::default(),
            given_up: AtomicBool::default(),
            anew: AtomicBool::default(),
            outcome: Mutex::default(),
            landed: Condvar::default(),
        }
    }
}

impl Flight {
    /// From now on only the store is asked.
    pub(super) fn go_direct(&self) {
        self.direct.store(true, Ordering::Release);
    }

    /// Whether only the store is asked.
    pub(super) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Acquire)
    }

    /// Nobody had to be asked for the frame.
    pub(super) fn set_copied(&self) {
        self.copied.store(true, Ordering::Release);
    }

    /// Whether another layer of the node had the frame.
    pub(super) fn was_copied(&self) -> bool {
        self.copied.load(Ordering::Acquire)
    }

    /// When it was asked for.
    pub(super) fn begun(&self) -> Instant {
        self.begun
    }

    /// The store had its time: whoever comes next asks it anew.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    /// Whether the store is asked anew, beside a request that was given up.
    pub(super) fn is_anew(&self) -> bool {
        self.anew.load(Ordering::Acquire)
    }

    fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// Waits for the end; `None` when the deadline passes first.
    pub(super) fn wait(&self, deadline: Instant) -> Option<Outcome> {
        let mut outcome = self.outcome.lock();
        loop {
            if let Some(outcome) = outcome.as_ref() {
                return Some(outcome.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            outcome = self.landed.wait_timeout(outcome, left);
        }
    }
}

/// Frame within one generation of the locator.
type FlightKey = (u64, u32);

/// Flights of one blob.
#[derive(Debug, Default)]
pub(super) struct Flights(Mutex<HashMap<FlightKey, Arc<Flight>>>);

/// What a reader has to do about the frames it wants.
#[derive(Debug)]
pub(super) struct Claim {
    /// To be fetched by this reader's call.
    pub(super) ours: Vec<(u32, Arc<Flight>)>,
    /// To be waited for, `ours` included.
    pub(super) all: Vec<(u32, Arc<Flight>)>,
}

impl Flights {
    /// Joins the flights of `frames`, and opens those that nobody has under way, or only a request
    /// that was given up. Frames that
    /// `present` says landed since the caller looked are left out.
    pub(super) fn claim(
        &self,
        generation: u64,
        frames: &[u32],
        present: impl Fn(u32) -> bool,
    ) -> Claim {
        let mut claim = Claim {
            ours: Vec::new(),
            all: Vec::with_capacity(frames.len()),
        };
        let mut flights = self.0.lock();
        for frame in frames {
            let under_way = flights.get(&(generation, *frame));
            if let Some(flight) = under_way.filter(|flight| !flight.is_given_up()) {
                claim.all.push((*frame, Arc::clone(flight)));
                continue;
            }
            let anew = AtomicBool::new(under_way.is_some());
            // A flight leaves the table only after its extents are marked. So with the table
            // locked, "no flight" and "not present" together mean that nobody fetches it.
            if present(*frame) {
                continue;
            }
            let flight = Arc::new(Flight {
                anew,
                ..Flight::default()
            });
            flights.insert((generation, *frame), Arc::clone(&flight));
            claim.ours.push((*frame, Arc::clone(&flight)));
            claim.all.push((*frame, flight));
        }
        claim
    }

    /// The flight of a frame, if one is under way.
    pub(super) fn under_way(&self, generation: u64, frame: u32) -> Option<Arc<Flight>> {
        self.0.lock().get(&(generation, frame)).cloned()
    }

    /// Whether somebody may still wait for a flight: it is the one of its frame.
    pub(super) fn is_current(&self, generation: u64, frame: u32, flight: &Flight) -> bool {
        let flights = self.0.lock();
        let current = flights.get(&(generation, frame));
        current.is_some_and(|current| std::ptr::eq(Arc::as_ptr(current), flight))
    }

    /// Ends a flight: takes it out of the table and tells everybody who waits. In this order: one
    /// who is told of a failure and asks again must not meet the same flight.
    pub(super) fn land(&self, generation: u64, frame: u32, flight: &Flight, outcome: Outcome) {
        let mut flights = self.0.lock();
        if let Entry::Occupied(entry) = flights.entry((generation, frame))
            && std::ptr::eq(Arc::as_ptr(entry.get()), flight)
        {
            entry.remove();
        }
        drop(flights);
        *flight.outcome.lock() = Some(outcome);
        flight.landed.notify_all();
    }
}
