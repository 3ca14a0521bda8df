//! What peers are given: verified extents of layers that this node serves.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use layerpack_store::peer::{PeerAsk, PeerService, Served};

use super::Peers;
use crate::fetch::Fetcher;
use crate::sync::{Condvar, Mutex, Ordering};

/// Requests that are worked on at once.
const AT_ONCE: usize = 6;
/// How long a request waits for its turn.
const TURN: Duration = Duration::from_millis(1000);
/// Longest answer in bytes.
pub(crate) const MAX_ANSWER: u64 = 4 << 20;

/// Answers peers out of a fetcher's blobs.
pub(super) struct Service {
    own: String,
    fetcher: Weak<Fetcher>,
    peers: Weak<Peers>,
    patience: Duration,
    busy: Mutex<usize>,
    free: Condvar,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").finish_non_exhaustive()
    }
}

struct Turn<'a>(&'a Service);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.busy.lock() -= 1;
        self.0.free.notify_one();
    }
}

impl Service {
    pub(super) fn new(
        own: &str,
        fetcher: &Arc<Fetcher>,
        peers: &Arc<Peers>,
        patience: Duration,
    ) -> Self {
        Self {
            own: own.to_owned(),
            fetcher: Arc::downgrade(fetcher),
            peers: Arc::downgrade(peers),
            patience,
            busy: Mutex::new(0),
            free: Condvar::new(),
        }
    }

    fn turn(&self) -> Option<Turn<'_>> {
        let end = Instant::now() + TURN.min(self.patience / 4);
        let mut busy = self.busy.lock();
        while *busy >= AT_ONCE {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            busy = self.free.wait_timeout(busy, left);
        }
        *busy += 1;
        Some(Turn(self))
    }
}

impl PeerService for Service {
    fn node(&self) -> String {
        self.own.clone()
    }

    fn extents(&self, ask: &PeerAsk) -> Served {
        let blob = self.fetcher.upgrade().and_then(|f| f.shared(ask.layer));
        let Some(blob) = blob else {
            return Served::Absent;
        };
        // Who asks waits no longer than for its patience: a store that is slow must not look like a
        // peer that hangs.
        let end = Instant::now() + self.patience * 3 / 4;
        let Some(_turn) = self.turn() else {
            return Served::Busy;
        };
        let answer = blob.give(ask, MAX_ANSWER, end);
        if let Some(peers) = self.peers.upgrade()
            && !answer.extents.is_empty()
        {
            let meter = &peers.meter;
            meter.served_requests.fetch_add(1, Ordering::Relaxed);
            let bytes = answer.bytes.len() as u64;
            meter.served.fetch_add(bytes, Ordering::Relaxed);
        }
        Served::Extents(answer)
    }
}
