//! Each store has threads of its own that fetch from it, so that one that hangs holds up nobody who
//! reads from another.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::pool::Pool;
use crate::sync::Mutex;

/// Stores that are told apart; those beyond share the threads of one of these.
const MOST: usize = 4;

/// The threads that fetch from one store, or several.
#[derive(Debug, Clone)]
pub(super) struct Lane {
    /// Different for different threads.
    pub(super) number: usize,
    pub(super) pool: Arc<Pool>,
}

/// The stores of a fetcher.
#[derive(Debug)]
pub(super) struct Stores {
    threads: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Address and threads of each.
    lanes: Vec<(String, Lane)>,
    closed: bool,
}

impl Stores {
    /// So many threads for each store.
    pub(super) fn new(threads: usize) -> Self {
        Self {
            threads,
            state: Mutex::default(),
        }
    }

    /// The threads for a store.
    pub(super) fn lane(&self, url: &str) -> Lane {
        let mut state = self.state.lock();
        if let Some((_, lane)) = state.lanes.iter().find(|(known, _)| known == url) {
            return lane.clone();
        }
        let number = state.lanes.len();
        if number >= MOST {
            let mut hasher = DefaultHasher::new();
            url.hash(&mut hasher);
            let rest = usize::try_from(hasher.finish() % MOST as u64).unwrap_or(0);
            if let Some((_, lane)) = state.lanes.get(rest) {
                return lane.clone();
            }
        }
        let pool = Arc::new(Pool::new("fetch", self.threads, usize::MAX));
        if state.closed {
            pool.close(Duration::ZERO);
        }
        let lane = Lane { number, pool };
        state.lanes.push((url.to_owned(), lane.clone()));
        lane
    }

    /// Gives up what is queued, takes in nothing more, and waits at most `limit` for what is under
    /// way. Returns whether all ended.
    pub(super) fn close(&self, limit: Duration) -> bool {
        let mut state = self.state.lock();
        state.closed = true;
        let lanes = state.lanes.clone();
        drop(state);
        let end = Instant::now() + limit;
        let mut all = true;
        // Each of them, also after one that does not end.
        for (_, lane) in &lanes {
            let left = end.saturating_duration_since(Instant::now());
            all &= lane.pool.close(left);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_share_threads_only_when_there_are_many() {
        let stores = Stores::new(2);
        let of = |n: usize| stores.lane(&format!("file:///{n}")).number;
        let first: Vec<usize> = (0..MOST).map(of).collect();
        assert_eq!(first, (0..MOST).collect::<Vec<_>>());
        for n in 0..20 {
            assert!(of(n) < MOST);
            assert_eq!(of(n), of(n));
        }
        assert!(stores.close(Duration::from_secs(60)));
        let refused = stores.lane("file:///0").pool.submit(Box::new(|| {}));
        assert!(refused.is_err());
    }
}
