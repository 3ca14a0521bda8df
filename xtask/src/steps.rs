//! Numbered steps with timings on standard output.

use std::time::{Duration, Instant};

/// Counts and times the steps of a task.
#[derive(Debug)]
pub(crate) struct Steps {
    total: usize,
    begun: usize,
    started: Instant,
    step: Instant,
}

impl Steps {
    /// For `total` steps.
    pub(crate) fn new(total: usize) -> Self {
        let now = Instant::now();
        Self {
            total,
            begun: 0,
            started: now,
            step: now,
        }
    }

    /// Announces the next step.
    pub(crate) fn begin(&mut self, title: &str) {
        self.begun += 1;
        self.step = Instant::now();
        println!("\n[{}/{}] {title}", self.begun, self.total);
    }

    /// Says that the current step is done; hands out how long it took.
    pub(crate) fn done(&self) -> Duration {
        let took = self.step.elapsed();
        say(format!("done in {}", seconds(took)));
        took
    }

    /// Since the first step.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

/// One indented line.
pub(crate) fn say(text: impl AsRef<str>) {
    println!("     {}", text.as_ref());
}

/// A duration for people: `0.042 s`, `3.14 s`, `2 min 5 s`.
pub(crate) fn seconds(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    if seconds < 1.0 {
        format!("{seconds:.3} s")
    } else if seconds < 60.0 {
        format!("{seconds:.2} s")
    } else {
        format!(
            "{} min {} s",
            duration.as_secs() / 60,
            duration.as_secs() % 60
        )
    }
}

/// A number of bytes for people, in binary units: `512 B`, `1.5 KiB`, `280.3 MiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    // Tenths of the unit, in whole numbers: no float can round a count wrongly.
    let mut tenths = u128::from(count) * 10;
    let mut shown = "B";
    for unit in UNITS {
        if tenths < 10 * 1024 {
            break;
        }
        tenths = (tenths + 512) / 1024;
        shown = unit;
    }
    format!("{}.{} {shown}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1024), "1.0 KiB");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(293_900_000), "280.3 MiB");
        assert_eq!(bytes(3 << 40), "3.0 TiB");
    }

    #[test]
    fn times_read_well() {
        assert_eq!(seconds(Duration::from_millis(42)), "0.042 s");
        assert_eq!(seconds(Duration::from_millis(3141)), "3.14 s");
        assert_eq!(seconds(Duration::from_secs(125)), "2 min 5 s");
    }
}
