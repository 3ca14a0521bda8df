//! Processor time of this process.

use rustix::time::{ClockId, Timespec, clock_gettime};

/// A point in the process's own time.
pub(crate) struct Clock(Timespec);

impl Clock {
    /// Now.
    pub(crate) fn start() -> Self {
        Self(clock_gettime(ClockId::ProcessCPUTime))
    }

    /// Seconds of processor time since then, of all threads, user and system.
    pub(crate) fn seconds(&self) -> f64 {
        let now = clock_gettime(ClockId::ProcessCPUTime);
        let nanos = (i128::from(now.tv_sec) - i128::from(self.0.tv_sec)) * 1_000_000_000
            + i128::from(now.tv_nsec)
            - i128::from(self.0.tv_nsec);
        std::time::Duration::from_nanos(u64::try_from(nanos).unwrap_or_default()).as_secs_f64()
    }
}
