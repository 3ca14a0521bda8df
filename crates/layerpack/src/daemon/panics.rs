//! What becomes of panics in the daemon: bugs, by definition, and none of them strands a read.
//!
//! | where | then |
//! |---|---|
//! | a thread that answers the kernel, one that fetches | its readers get EIO, the thread goes on (`layerpack_layerfs`) |
//! | a request of the API | it gets status 500 |
//! | housekeeping | that round is given up and listed as a problem |
//! | the thread that the process began with, the one that obeys the holder | the process aborts, the holder starts another one, reads wait for that |
//!
//! Unwinding the first thread would unmount everything on its way. All panics are in the log, with
//! thread and place, and counted.

use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicU64, Ordering};

/// Threads without which the process is of no use.
const VITAL: [&str; 2] = ["main", crate::holder::THREAD];

/// Panics of this process.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Panics so far.
pub(super) fn count() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// From now on panics are logged and counted; with `held` one that nobody can go on after ends the
/// process, since a holder starts another.
pub(super) fn watch(held: bool) {
    std::panic::set_hook(Box::new(move |info| {
        COUNT.fetch_add(1, Ordering::Relaxed);
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed");
        let place = info.location().map(ToString::to_string);
        tracing::error!(
            thread = name,
            place = place.as_deref().unwrap_or("unknown"),
            message = said(info),
            "panicked (a bug)"
        );
        if held && VITAL.contains(&name) {
            tracing::error!("aborts: another process goes on with the mounts");
            std::process::abort();
        }
    }));
}

fn said<'a>(info: &'a PanicHookInfo<'_>) -> &'a str {
    let payload = info.payload();
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    // The hook is the process's: these tests rely on each test being a process of its own only in
    // that others may add to the count meanwhile.
    #[test]
    fn panics_are_counted_and_cost_their_thread_only() {
        watch(true);
        let before = count();
        let ended = std::thread::Builder::new()
            .name("fuse-wait".to_owned())
            .spawn(|| panic!("on purpose: {}", 1))
            .unwrap()
            .join();
        assert!(ended.is_err());
        assert!(count() > before);
        let _ = std::panic::take_hook();
    }
}
