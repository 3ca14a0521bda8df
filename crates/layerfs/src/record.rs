//! Recording which extents of some layers are read, in the order of their first use.
//!
//! A recording costs a reader one look at a flag when there is none, and a short lock when there
//! is one. Its memory is bounded: one bit for each extent of its layers, and 16 bytes for each
//! extent that was read, of which there are at most 2^20; what comes after that is counted and
//! left out.
//!
//! What a node learns by itself is recorded the same way, in less memory and for a limited time,
//! and **quietly**: it changes nothing about how blobs are opened, so what the kernel has cached
//! stays cached.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use layerpack_store::LayerId;

use crate::sync::{AtomicBool, Mutex, Ordering, RwLock};
use crate::trace::{TraceEvent, Tracer, Traces};

/// Most extents that a recording holds: of the usual length they make 64 GiB.
const MAX_TOUCHES: usize = 1 << 20;

/// An extent that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Touch {
    /// Index into the recording's layers.
    pub layer: u32,
    /// Index into the extents of that layer's map.
    pub extent: u32,
    /// The extent's length in bytes.
    pub len: u32,
    /// Milliseconds since the recording began.
    pub time_ms: u32,
}

#[derive(Debug, Default)]
struct State {
    /// Per layer: a bit for each extent that was read.
    seen: BTreeMap<u32, Vec<u64>>,
    touches: Vec<Touch>,
    left_out: u64,
    ended: bool,
}

/// A recording under way.
#[derive(Debug)]
pub(crate) struct Recorder {
    begun: Instant,
    /// Most extents that it holds.
    max: usize,
    /// What is read later does not count.
    window: Option<Duration>,
    state: Mutex<State>,
}

impl Recorder {
    pub(crate) fn new() -> Arc<Self> {
        Self::bounded(MAX_TOUCHES, None)
    }

    /// One that holds at most `max` extents, read within `window`.
    pub(crate) fn bounded(max: usize, window: Option<Duration>) -> Arc<Self> {
        Arc::new(Self {
            begun: Instant::now(),
            max,
            window,
            state: Mutex::new(State::default()),
        })
    }

    /// Whether its time is over.
    pub(crate) fn is_over(&self) -> bool {
        self.window
            .is_some_and(|window| self.begun.elapsed() > window)
    }

    /// Extents `range` of a layer are read.
    fn touch(&self, layer: u32, range: Range<usize>, len: impl Fn(usize) -> u32) {
        if self.is_over() {
            return;
        }
        let time_ms = u32::try_from(self.begun.elapsed().as_millis()).unwrap_or(u32::MAX);
        let mut state = self.state.lock();
        let State {
            seen,
            touches,
            left_out,
            ended,
        } = &mut *state;
        if *ended {
            return;
        }
        let bits = seen.entry(layer).or_default();
        for index in range {
            let (word, bit) = (index / 64, 1_u64 << (index % 64));
            if bits.len() <= word {
                bits.resize(word + 1, 0);
            }
            let Some(word) = bits.get_mut(word).filter(|word| **word & bit == 0) else {
                continue;
            };
            *word |= bit;
            match u32::try_from(index) {
                Ok(extent) if touches.len() < self.max => touches.push(Touch {
                    layer,
                    extent,
                    len: len(index),
                    time_ms,
                }),
                _ => *left_out += 1,
            }
        }
    }

    /// Ends it: what was read, in order, and how many extents were left out.
    pub(crate) fn end(&self) -> (Vec<Touch>, u64) {
        let mut state = self.state.lock();
        state.ended = true;
        state.seen.clear();
        (std::mem::take(&mut state.touches), state.left_out)
    }
}

/// Where one layer's reads are told.
#[derive(Debug, Clone)]
pub(crate) struct Tap {
    pub(crate) recorder: Arc<Recorder>,
    /// The layer's index in that recording.
    pub(crate) layer: u32,
    /// Whether it is content with the reads that reach us.
    pub(crate) quiet: bool,
}

/// The recordings that a blob's reads go to.
#[derive(Debug, Default)]
pub(crate) struct Taps {
    any: AtomicBool,
    /// Whether one of them wants to see what the kernel could answer from its caches too.
    loud: AtomicBool,
    list: RwLock<Vec<Tap>>,
    watched: AtomicBool,
    watchers: RwLock<Vec<(Arc<Tracer>, u32)>>,
}

impl Taps {
    /// Whether any recording listens.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Whether a recording listens that wants to see everything.
    pub(crate) fn loud(&self) -> bool {
        self.loud.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, taps: Vec<Tap>) {
        let mut list = self.list.write();
        let loud = taps.iter().any(|tap| !tap.quiet);
        self.loud.store(loud, Ordering::Relaxed);
        self.any.store(!taps.is_empty(), Ordering::Relaxed);
        *list = taps;
    }

    /// Whether somebody watches the reads.
    pub(crate) fn watched(&self) -> bool {
        self.watched.load(Ordering::Relaxed)
    }

    /// Tells who watches.
    pub(crate) fn tell(&self, event: &TraceEvent) {
        for (tracer, layer) in self.watchers.read().iter() {
            tracer.tell(*layer, event);
        }
    }

    pub(crate) fn watch(&self, watchers: Vec<(Arc<Tracer>, u32)>) {
        let mut list = self.watchers.write();
        self.watched.store(!watchers.is_empty(), Ordering::Relaxed);
        *list = watchers;
    }

    pub(crate) fn touch(&self, range: Range<usize>, len: impl Fn(usize) -> u32) {
        if !self.any() {
            return;
        }
        for tap in self.list.read().iter() {
            tap.recorder.touch(tap.layer, range.clone(), &len);
        }
    }
}

/// A recording's layers and where their reads are told.
type Running = (Vec<LayerId>, Arc<Recorder>);

/// All recordings of a node, by name.
#[derive(Debug, Default)]
pub(crate) struct Recordings {
    running: Mutex<BTreeMap<String, Running>>,
    /// What the node learns by itself, by lease.
    learning: Mutex<BTreeMap<String, Running>>,
    /// Who watches reads.
    pub(crate) traces: Traces,
}

/// Recordings that may run at once; as many again may be learnt from.
const MAX_RUNNING: usize = 16;

impl Recordings {
    /// Adds a recording. `None` if the name is taken or too many run.
    pub(crate) fn add(&self, id: &str, layers: Vec<LayerId>) -> Option<Arc<Recorder>> {
        let mut running = self.running.lock();
        if running.contains_key(id) || running.len() >= MAX_RUNNING {
            return None;
        }
        let recorder = Recorder::new();
        running.insert(id.to_owned(), (layers, Arc::clone(&recorder)));
        Some(recorder)
    }

    pub(crate) fn remove(&self, id: &str) -> Option<Running> {
        self.running.lock().remove(id)
    }

    /// Begins to learn from a lease's reads. `false` if too many are learnt from, or that one is.
    pub(crate) fn learn(&self, lease: &str, layers: Vec<LayerId>, recorder: Arc<Recorder>) -> bool {
        let mut learning = self.learning.lock();
        if learning.contains_key(lease) || learning.len() >= MAX_RUNNING {
            return false;
        }
        learning.insert(lease.to_owned(), (layers, recorder));
        true
    }

    /// Ends learning from a lease.
    pub(crate) fn learnt(&self, lease: &str) -> Option<Running> {
        self.learning.lock().remove(lease)
    }

    /// Leases that are learnt from; with `over`, those whose time is over.
    pub(crate) fn learning(&self, over: bool) -> Vec<String> {
        let learning = self.learning.lock();
        let found = learning.iter().filter(|(_, (_, r))| !over || r.is_over());
        found.map(|(lease, _)| lease.clone()).collect()
    }

    /// Where reads of a layer are told.
    pub(crate) fn taps(&self, layer: LayerId) -> Vec<Tap> {
        let mut taps = Vec::new();
        for (table, quiet) in [(&self.running, false), (&self.learning, true)] {
            for (layers, recorder) in table.lock().values() {
                let own = (0_u32..).zip(layers).filter(|(_, id)| **id == layer);
                taps.extend(own.map(|(index, _)| Tap {
                    recorder: Arc::clone(recorder),
                    layer: index,
                    quiet,
                }));
            }
        }
        taps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_extent_counts_once_in_the_order_of_first_use() {
        let recorder = Recorder::new();
        let taps = Taps::default();
        taps.touch(0..9, |_| 1); // nobody listens
        let tap = |layer| Tap {
            recorder: Arc::clone(&recorder),
            layer,
            quiet: false,
        };
        taps.set(vec![tap(1)]);
        assert!(taps.any() && taps.loud());
        taps.touch(100..102, |i| u32::try_from(i).unwrap());
        taps.touch(64..65, |_| 5);
        taps.touch(99..102, |_| 7);
        taps.set(vec![tap(0)]);
        taps.touch(100..101, |_| 3);
        taps.set(Vec::new());
        taps.touch(7..8, |_| 3);
        let (touches, left_out) = recorder.end();
        let flat: Vec<_> = touches.iter().map(|t| (t.layer, t.extent, t.len)).collect();
        assert_eq!(
            flat,
            [
                (1, 100, 100),
                (1, 101, 101),
                (1, 64, 5),
                (1, 99, 7),
                (0, 100, 3)
            ]
        );
        assert_eq!(left_out, 0);
        tap(0).recorder.touch(0, 0..1, |_| 1);
        assert!(recorder.end().0.is_empty(), "it has ended");
    }

    #[test]
    fn names_are_taken_once() {
        let all = Recordings::default();
        let layer = LayerId::from_digest(layerpack_store::Digest::of(b"x"));
        assert!(all.add("a", vec![layer, layer]).is_some());
        assert!(all.add("a", vec![layer]).is_none());
        assert_eq!(all.taps(layer).len(), 2);
        assert!(all.remove("a").is_some());
        assert!(all.remove("a").is_none());
        assert!(all.taps(layer).is_empty());
    }

    #[test]
    fn what_is_learnt_is_bounded_and_quiet() {
        let all = Recordings::default();
        let layer = LayerId::from_digest(layerpack_store::Digest::of(b"x"));
        let recorder = Recorder::bounded(2, None);
        assert!(all.learn("lease", vec![layer], Arc::clone(&recorder)));
        assert!(!all.learn("lease", vec![layer], Arc::clone(&recorder)));
        let taps = Taps::default();
        taps.set(all.taps(layer));
        assert!(taps.any() && !taps.loud());
        taps.touch(5..9, |_| 1);
        assert!(all.add("loud", vec![layer]).is_some());
        taps.set(all.taps(layer));
        assert!(taps.loud());
        let over = Recorder::bounded(2, Some(Duration::ZERO));
        std::thread::sleep(Duration::from_millis(2));
        over.touch(0, 0..1, |_| 1);
        assert!(over.is_over() && over.end().0.is_empty());
        assert_eq!(all.learning(false), ["lease"]);
        assert!(all.learning(true).is_empty());
        let (_, ended) = all.learnt("lease").unwrap();
        let (touches, left_out) = ended.end();
        assert_eq!((touches.len(), left_out), (2, 2));
    }
}
