//! Workers that die again and again: what is known of it, and what becomes of reads meanwhile.
//!
//! Reads wait for a worker that stays. One that has waited for as long as the worker lets reads wait
//! for a store fails (EIO), by the holder's hand, in the pauses in which no worker lives. So a daemon
//! that cannot be started, or a request that kills whoever takes it up, costs a read its time and not
//! for ever.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Set;
use super::stuck::Waiting;

/// Deaths come to nothing mostly: what waits is not looked at before they have gone on for so long.
const BEFORE: Duration = Duration::from_secs(1);
/// Between two looks.
const EVERY: Duration = Duration::from_millis(100);

/// Workers that do not stay, as a holder tells of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failing {
    /// How many died in a row, each soon after it began.
    pub deaths: u64,
    /// How the last one ended: `with code 1`, `by signal 9`.
    pub last: String,
    /// Since when, in milliseconds before now.
    pub since_ms: u64,
    /// For how long none has served, in milliseconds.
    pub down_ms: u64,
    /// When the next one is started, in milliseconds from now; `None` while one lives.
    pub next_ms: Option<u64>,
    /// How long a read waits before it fails, in milliseconds; `None`: for ever.
    pub patience_ms: Option<u64>,
    /// Reads that have failed so.
    pub given_up: u64,
}

/// A row of deaths.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    since: Option<Instant>,
    /// Since when none serves.
    down: Option<Instant>,
    deaths: u64,
    last: String,
    given_up: u64,
    patience: Option<Duration>,
    waiting: Waiting,
    looked: Option<Instant>,
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Trouble {
    /// A worker serves; `patience_ms`: how long it has reads wait.
    pub(super) fn serves(&mut self, patience_ms: Option<u64>) {
        self.down = None;
        self.patience = patience_ms.map(Duration::from_millis);
    }

    /// A worker died; `young`: soon after it began.
    pub(super) fn died(&mut self, young: bool, how: &str) {
        if !young {
            self.over();
        }
        let now = Instant::now();
        self.since.get_or_insert(now);
        self.down.get_or_insert(now);
        self.deaths += 1;
        how.clone_into(&mut self.last);
    }

    /// The row is over: a worker stayed.
    fn over(&mut self) {
        *self = Self {
            patience: self.patience,
            ..Self::default()
        };
    }

    /// Fails what has waited for too long. No worker may live. Gives a line for the log.
    pub(super) fn look(&mut self, fuse: Option<&Set>) -> Option<String> {
        let (patience, since, fuse) = (self.patience?, self.since?, fuse?);
        let now = Instant::now();
        let due = self.looked.is_none_or(|at| now - at >= EVERY);
        if !due || now - since < BEFORE.min(patience) {
            return None;
        }
        self.looked = Some(now);
        // Who comes now would wait for nothing.
        let hopeless = self.down.is_some_and(|at| now - at >= patience);
        let wait = if hopeless { Duration::ZERO } else { patience };
        match self.waiting.give_up(&fuse.fds, wait) {
            Ok(0) => None,
            Ok(n) => {
                self.given_up += n as u64;
                Some(format!(
                    "{n} reads failed: for {} ms they waited, or nobody served",
                    patience.as_millis()
                ))
            }
            Err(e) => Some(format!(
                "reads that have waited for long are not failed: {e}"
            )),
        }
    }

    /// What there is to tell; `next`: when the next worker is started.
    pub(super) fn told(&self, next: Option<Instant>) -> Option<Failing> {
        let now = Instant::now();
        Some(Failing {
            deaths: self.deaths,
            last: self.last.clone(),
            since_ms: millis(now - self.since?),
            down_ms: self.down.map_or(0, |at| millis(now - at)),
            next_ms: next.map(|at| millis(at.saturating_duration_since(now))),
            patience_ms: self.patience.map(millis),
            given_up: self.given_up,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_deaths_is_told_until_one_stays() {
        let mut trouble = Trouble::default();
        assert_eq!(trouble.told(None), None);
        trouble.serves(Some(60_000));
        trouble.died(false, "by signal 9");
        trouble.died(true, "with code 1");
        std::thread::sleep(Duration::from_millis(5));
        let told = trouble.told(Some(Instant::now())).unwrap();
        assert_eq!((told.deaths, told.last.as_str()), (2, "with code 1"));
        assert_eq!((told.next_ms, told.given_up), (Some(0), 0));
        assert_eq!(told.patience_ms, Some(60_000));
        assert!(told.down_ms >= 5 && told.since_ms >= told.down_ms);
        // One serves: the row goes on if it dies soon, but it is not down.
        trouble.serves(Some(1000));
        let told = trouble.told(None).unwrap();
        assert_eq!((told.deaths, told.down_ms), (2, 0));
        trouble.died(true, "by signal 11");
        assert_eq!(trouble.told(None).unwrap().deaths, 3);
        // One that served for long was no part of it: its death begins another row.
        trouble.serves(Some(1000));
        trouble.died(false, "by signal 6");
        assert_eq!(trouble.told(None).unwrap().deaths, 1);
        // Without a connection there is nothing to look at.
        assert_eq!(trouble.look(None), None);
        trouble.over();
        assert_eq!(trouble.told(None), None);
        assert_eq!(trouble.patience, Some(Duration::from_secs(1)));
    }
}
