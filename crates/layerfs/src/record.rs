//! Recording which extents of some layers are read, in the order of their first use.
//!
//! A recording costs a reader one look at a flag when there is none, and a short lock when there
//! is one. Its memory is bounded: one bit for each extent of its layers, and 16 bytes for each
//! extent that was read, of which there are at most 2^20; what comes after that is counted and
//! left out.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use layerpack_store::LayerId;

use crate::sync::{AtomicBool, Mutex, Ordering, RwLock};

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
    state: Mutex<State>,
}

impl Recorder {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            begun: Instant::now(),
            state: Mutex::new(State::default()),
        })
    }

    /// Extents `range` of a layer are read.
    fn touch(&self, layer: u32, range: Range<usize>, len: impl Fn(usize) -> u32) {
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
                Ok(extent) if touches.len() < MAX_TOUCHES => touches.push(Touch {
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
}

/// The recordings that a blob's reads go to.
#[derive(Debug, Default)]
pub(crate) struct Taps {
    any: AtomicBool,
    list: RwLock<Vec<Tap>>,
}

impl Taps {
    /// Whether any recording listens.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, taps: Vec<Tap>) {
        let mut list = self.list.write();
        self.any.store(!taps.is_empty(), Ordering::Relaxed);
        *list = taps;
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
}

/// Recordings that may run at once.
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

    /// Where reads of a layer are told.
    pub(crate) fn taps(&self, layer: LayerId) -> Vec<Tap> {
        let running = self.running.lock();
        running
            .values()
            .flat_map(|(layers, recorder)| {
                let own = (0_u32..).zip(layers).filter(move |(_, id)| **id == layer);
                own.map(|(index, _)| Tap {
                    recorder: Arc::clone(recorder),
                    layer: index,
                })
            })
            .collect()
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
        };
        taps.set(vec![tap(1)]);
        assert!(taps.any());
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
}
