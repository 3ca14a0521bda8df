//! Reads as they happen, for somebody who watches.
//!
//! A trace costs readers one look at a flag when there is none. Events wait in a queue of limited
//! length; what does not fit is counted. A trace that nobody asks for its events ends by itself.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use layerpack_store::LayerId;
use serde::{Deserialize, Serialize};

use crate::sync::{AtomicU64, Condvar, Mutex, Ordering};

/// Events that wait for who watches, at most.
const MAX_EVENTS: usize = 1 << 16;
/// Events that are handed out at once.
const MAX_BATCH: usize = 1 << 13;
/// Traces at once.
const MAX_TRACES: usize = 8;
/// A trace ends if it is not asked for so long.
const FORGOTTEN: Duration = Duration::from_secs(30);

/// What a read was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TraceKind {
    /// Answered from the cache.
    Hit,
    /// It waited for a fetch.
    Miss,
    /// It failed.
    Failed,
    /// No read: it was fetched ahead.
    Ahead,
}

/// A read of a layer's data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceEvent {
    /// Microseconds since the trace began.
    pub time_us: u64,
    /// Index into the trace's layers.
    pub layer: u32,
    /// First byte in the layer's data.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What it was.
    pub kind: TraceKind,
    /// Microseconds that it waited.
    #[serde(default)]
    pub waited_us: u64,
    /// Frames that were fetched for it.
    #[serde(default)]
    pub frames: u32,
    /// Of these, frames that other nodes gave.
    #[serde(default)]
    pub peer_frames: u32,
    /// Frames that other layers of the node had.
    #[serde(default)]
    pub copied_frames: u32,
    /// Frames that it waited for and that somebody else had fetched.
    #[serde(default)]
    pub joined: u32,
    /// Bytes of the frames that were fetched for it, as stored.
    #[serde(default)]
    pub fetched_bytes: u64,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What a read cost.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cost {
    pub(crate) frames: u32,
    pub(crate) peer_frames: u32,
    pub(crate) copied: u32,
    pub(crate) joined: u32,
    pub(crate) bytes: u64,
}

impl TraceEvent {
    pub(crate) fn new(kind: TraceKind, offset: u64, end: u64) -> Self {
        Self {
            time_us: 0,
            layer: 0,
            offset,
            len: end.saturating_sub(offset),
            kind,
            waited_us: 0,
            frames: 0,
            peer_frames: 0,
            copied_frames: 0,
            joined: 0,
            fetched_bytes: 0,
            error: None,
        }
    }

    pub(crate) fn with(self, cost: Cost, waited: Duration) -> Self {
        Self {
            waited_us: u64::try_from(waited.as_micros()).unwrap_or(u64::MAX),
            frames: cost.frames,
            peer_frames: cost.peer_frames,
            copied_frames: cost.copied,
            joined: cost.joined,
            fetched_bytes: cost.bytes,
            ..self
        }
    }
}

/// Events of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TraceBatch {
    /// In the order in which the reads ended.
    pub events: Vec<TraceEvent>,
    /// Events that did not fit into the queue since the last batch.
    pub dropped: u64,
}

#[derive(Debug)]
struct Queue {
    events: VecDeque<TraceEvent>,
    dropped: u64,
    asked: Instant,
}

/// One trace.
#[derive(Debug)]
pub(crate) struct Tracer {
    begun: Instant,
    queue: Mutex<Queue>,
    more: Condvar,
}

impl Tracer {
    /// Adds an event of the layer with this index.
    pub(crate) fn tell(&self, layer: u32, event: &TraceEvent) {
        let mut queue = self.queue.lock();
        if queue.events.len() >= MAX_EVENTS {
            queue.dropped += 1;
            return;
        }
        let time = self.begun.elapsed().as_micros();
        queue.events.push_back(TraceEvent {
            time_us: u64::try_from(time).unwrap_or(u64::MAX),
            layer,
            ..event.clone()
        });
        drop(queue);
        self.more.notify_one();
    }

    /// Events, if there are any within `wait`.
    pub(crate) fn take(&self, wait: Duration) -> TraceBatch {
        let end = Instant::now() + wait;
        let mut queue = self.queue.lock();
        while queue.events.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            queue = self.more.wait_timeout(queue, left);
        }
        queue.asked = Instant::now();
        let many = queue.events.len().min(MAX_BATCH);
        TraceBatch {
            events: queue.events.drain(..many).collect(),
            dropped: std::mem::take(&mut queue.dropped),
        }
    }
}

/// A trace's layers and its events.
type Running = (Vec<LayerId>, Arc<Tracer>);

/// All traces of a node.
#[derive(Debug)]
pub(crate) struct Traces {
    running: Mutex<BTreeMap<u64, Running>>,
    next: AtomicU64,
}

impl Default for Traces {
    /// Numbers begin by the clock, so that who asks for a trace of an earlier process does not get
    /// another one's events. They fit into the 53 bits of a number in JSON.
    fn default() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let millis = now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(0));
        Self {
            running: Mutex::default(),
            next: AtomicU64::new((millis << 10) & ((1 << 52) - 1)),
        }
    }
}

impl Traces {
    /// Begins one. `None` if too many run.
    pub(crate) fn begin(&self, layers: Vec<LayerId>) -> Option<u64> {
        let mut running = self.running.lock();
        if running.len() >= MAX_TRACES {
            return None;
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        let tracer = Tracer {
            begun: Instant::now(),
            queue: Mutex::new(Queue {
                events: VecDeque::new(),
                dropped: 0,
                asked: Instant::now(),
            }),
            more: Condvar::new(),
        };
        running.insert(id, (layers, Arc::new(tracer)));
        Some(id)
    }

    pub(crate) fn get(&self, id: u64) -> Option<Arc<Tracer>> {
        self.running.lock().get(&id).map(|(_, t)| Arc::clone(t))
    }

    /// Ends one: its layers.
    pub(crate) fn end(&self, id: u64) -> Option<Vec<LayerId>> {
        self.running.lock().remove(&id).map(|(layers, _)| layers)
    }

    /// Traces that nobody has asked for long.
    pub(crate) fn forgotten(&self) -> Vec<u64> {
        let running = self.running.lock();
        let old = running
            .iter()
            .filter(|(_, (_, tracer))| tracer.queue.lock().asked.elapsed() > FORGOTTEN);
        old.map(|(id, _)| *id).collect()
    }

    /// Who watches a layer, with its index there.
    pub(crate) fn of(&self, layer: LayerId) -> Vec<(Arc<Tracer>, u32)> {
        let running = self.running.lock();
        running
            .values()
            .flat_map(|(layers, tracer)| {
                let own = (0_u32..).zip(layers).filter(move |(_, id)| **id == layer);
                own.map(|(index, _)| (Arc::clone(tracer), index))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_and_are_bounded() {
        let traces = Traces::default();
        let layer = LayerId::from_digest(layerpack_store::Digest::of(b"x"));
        let id = traces.begin(vec![layer]).unwrap();
        let watchers = traces.of(layer);
        assert_eq!(watchers.len(), 1);
        let tracer = traces.get(id).unwrap();
        assert_eq!(tracer.take(Duration::ZERO), TraceBatch::default());
        for at in 0..MAX_EVENTS as u64 + 5 {
            let (tracer, index) = &watchers[0];
            tracer.tell(*index, &TraceEvent::new(TraceKind::Hit, at, at + 2));
        }
        let batch = tracer.take(Duration::from_secs(60));
        assert_eq!((batch.events.len(), batch.dropped), (MAX_BATCH, 5));
        assert_eq!((batch.events[1].offset, batch.events[1].len), (1, 2));
        assert!(traces.forgotten().is_empty());
        for _ in 1..MAX_TRACES {
            assert!(traces.begin(vec![]).is_some());
        }
        assert!(traces.begin(vec![]).is_none());
        assert_eq!(traces.end(id), Some(vec![layer]));
        assert!(traces.of(layer).is_empty() && traces.end(id).is_none());
    }
}
