//! Frames of one pack that several layers want at the same moment: one of them asks the store.
//!
//! Within a layer flights see to that. Between layers a frame is known by where it lies: the store's
//! address, the pack, and the offset in it. A thread that is about to ask the store enters its frames
//! here. Those that another one has entered it leaves until it has fetched its own, then waits for
//! them, and copies them from that layer's cache. So nobody waits while others wait for him, and
//! whoever is waited for waits for the store and nothing else.
//!
//! A frame leaves the table when its extents are in the cache of the layer that fetched it, or when
//! that failed. Then who waited looks, and what did not come it fetches by itself: once waited is
//! enough.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use layerpack_store::Digest;

use crate::sync::{Condvar, Mutex};

/// A frame of a store.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) store: Arc<str>,
    pub(super) pack: Digest,
    /// First byte in the pack.
    pub(super) offset: u64,
}

/// What is being fetched.
#[derive(Debug, Default)]
pub(super) struct Joint {
    state: Mutex<State>,
    /// Some place was left.
    left: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Numbers entries, so that who waits for one does not wait for the next.
    next: u64,
    entered: HashMap<Place, u64>,
}

/// A place that somebody else has entered.
#[derive(Debug)]
pub(super) struct Entered {
    pub(super) frame: u32,
    place: Place,
    number: u64,
}

/// Places that are left with this, at the latest.
#[derive(Debug)]
pub(super) struct Own<'a> {
    joint: &'a Joint,
    places: HashMap<u32, (Place, u64)>,
}

impl Joint {
    /// Enters the frames that nobody has, and those that are to be entered `over` who has them. The
    /// others come back.
    pub(super) fn enter(
        &self,
        frames: impl IntoIterator<Item = (u32, Place)>,
        over: impl Fn(u32) -> bool,
    ) -> (Own<'_>, Vec<Entered>) {
        let mut own = Own {
            joint: self,
            places: HashMap::new(),
        };
        let mut others = Vec::new();
        let mut state = self.state.lock();
        for (frame, place) in frames {
            let entered = state.entered.get(&place).copied();
            if let Some(number) = entered.filter(|_| !over(frame)) {
                others.push(Entered {
                    frame,
                    place,
                    number,
                });
                continue;
            }
            let number = state.next;
            state.next += 1;
            state.entered.insert(place.clone(), number);
            own.places.insert(frame, (place, number));
        }
        drop(state);
        // Who waited for one that was entered over goes on.
        self.left.notify_all();
        (own, others)
    }

    /// Frames of these that somebody has entered.
    pub(super) fn entered(&self, frames: impl IntoIterator<Item = (u32, Place)>) -> Vec<Entered> {
        let state = self.state.lock();
        let known = frames.into_iter().filter_map(|(frame, place)| {
            let number = state.entered.get(&place).copied()?;
            Some(Entered {
                frame,
                place,
                number,
            })
        });
        known.collect()
    }

    /// Waits until all these were left, or until the deadline.
    pub(super) fn wait(&self, others: &[Entered], deadline: Instant) {
        let mut state = self.state.lock();
        loop {
            let is_there = |other: &Entered| state.entered.get(&other.place) == Some(&other.number);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !others.iter().any(is_there) {
                return;
            }
            state = self.left.wait_timeout(state, left);
        }
    }
}

impl State {
    fn leave(&mut self, place: &Place, number: u64) {
        if self.entered.get(place) == Some(&number) {
            self.entered.remove(place);
        }
    }
}

impl Own<'_> {
    /// Leaves a frame's place: who waits for it can go on.
    pub(super) fn leave(&mut self, frame: u32) {
        if let Some((place, number)) = self.places.remove(&frame) {
            self.joint.state.lock().leave(&place, number);
            self.joint.left.notify_all();
        }
    }
}

impl Drop for Own<'_> {
    fn drop(&mut self) {
        if self.places.is_empty() {
            return;
        }
        let mut state = self.joint.state.lock();
        for (place, number) in self.places.values() {
            state.leave(place, *number);
        }
        drop(state);
        self.joint.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn place(offset: u64) -> Place {
        Place {
            store: "memory:".into(),
            pack: Digest::of(b"pack"),
            offset,
        }
    }

    #[test]
    fn a_place_is_entered_once_and_left_in_any_case() {
        let joint = Joint::default();
        let free = |_| false;
        let far = || Instant::now() + Duration::from_secs(60);
        let (mut first, others) = joint.enter([(1, place(10)), (2, place(20))], free);
        assert!(others.is_empty());
        let (second, others) = joint.enter([(7, place(20)), (8, place(30)), (9, place(10))], free);
        let frames: Vec<u32> = others.iter().map(|other| other.frame).collect();
        assert_eq!(frames, [7, 9]);
        assert_eq!(joint.entered([(3, place(30)), (4, place(40))]).len(), 1);
        // Nobody waits beyond the deadline.
        joint.wait(&others, Instant::now());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| joint.wait(&others, far()));
            first.leave(2);
            first.leave(2);
            drop(first);
            waiting.join().unwrap();
        });
        // Entered again by another, it is not waited for.
        let (third, others_again) = joint.enter([(5, place(10))], free);
        assert!(others_again.is_empty());
        joint.wait(&others, far());
        drop((second, third));
        assert!(joint.state.lock().entered.is_empty());
        // What hangs can be entered over, and then leaves nothing of its own.
        let (hangs, _) = joint.enter([(1, place(50))], free);
        let (_, waits_for) = joint.enter([(1, place(50))], free);
        let (anew, others) = joint.enter([(1, place(50))], |_| true);
        assert!(others.is_empty());
        joint.wait(&waits_for, far());
        drop(hangs);
        assert_eq!(joint.entered([(1, place(50))]).len(), 1);
        drop(anew);
        // A panic leaves too.
        let panicked = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let _own = joint.enter([(1, place(1))], free);
                panic!("on purpose");
            });
            thread.join().is_err()
        });
        assert!(panicked && joint.state.lock().entered.is_empty());
    }
}
