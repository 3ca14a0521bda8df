//! How long a read waits after one that waited in vain.
//!
//! The kernel answers a failed read of many pages by asking for each of them once more. If each of these
//! waited for the whole time, one `read(2)` would fail after many times that.

use std::time::{Duration, Instant};

use crate::sync::Mutex;

/// A read that failed after that long waited in vain; the next one waits no longer than that.
const AGAIN: Duration = Duration::from_secs(1);
/// The kernel asks again at once. Who comes later than that has the whole time.
const FRESH: Duration = Duration::from_secs(2);

/// When a read of a blob last waited in vain.
#[derive(Debug, Default)]
pub(super) struct Patience(Mutex<Option<Instant>>);

impl Patience {
    /// How long a read that begins now may wait; `full` is the configured limit.
    pub(super) fn limit(&self, now: Instant, full: Duration) -> Duration {
        let failed = *self.0.lock();
        match failed {
            Some(at) if now.saturating_duration_since(at) < FRESH => full.min(AGAIN),
            _ => full,
        }
    }

    /// A read that began at `begun` ends.
    pub(super) fn ended(&self, begun: Instant, now: Instant, good: bool) {
        if good {
            *self.0.lock() = None;
        } else if now.saturating_duration_since(begun) >= AGAIN {
            *self.0.lock() = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_asks_again_waits_little() {
        let full = Duration::from_secs(60);
        let patience = Patience::default();
        let mut now = Instant::now();
        assert_eq!(patience.limit(now, full), full);
        // The first read of a store that hangs, and nine pages of it.
        let begun = now;
        now += full;
        patience.ended(begun, now, false);
        for _ in 0..9 {
            let limit = patience.limit(now, full);
            assert_eq!(limit, AGAIN);
            let begun = now;
            now += limit;
            patience.ended(begun, now, false);
        }
        // Somebody else, later.
        now += FRESH;
        assert_eq!(patience.limit(now, full), full);
        // Failures that took no time are no reason to hurry.
        patience.ended(now, now, false);
        assert_eq!(patience.limit(now, full), full);
    }

    #[test]
    fn an_answer_gives_everybody_the_whole_time_again() {
        let full = Duration::from_secs(4);
        let patience = Patience::default();
        let begun = Instant::now();
        let now = begun + full;
        patience.ended(begun, now, false);
        assert_eq!(patience.limit(now, full), AGAIN);
        assert_eq!(patience.limit(now, AGAIN / 2), AGAIN / 2);
        patience.ended(now, now, true);
        assert_eq!(patience.limit(now, full), full);
    }
}
