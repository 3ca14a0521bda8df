//! What remote backends share: one runtime for the whole process, and the time limits.
//!
//! [`BlobStore`](super::BlobStore) blocks, the clients are asynchronous. Their runtime is made
//! when a remote store is first used and has two worker threads, however many stores and callers
//! there are: a caller polls its own request on its own thread, the workers move the connections.
//! A process that must have one thread (it is about to fork) calls [`shutdown`] first.

use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

/// Worker threads of the runtime.
const WORKERS: usize = 2;
/// How long [`shutdown`] waits for a thread that is stuck in a system call.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

/// Far below every time limit of an operation.
const TICK: Duration = Duration::from_millis(250);

/// Whether the runtime has a task in [`tick`].
static TICKING: AtomicBool = AtomicBool::new(false);
/// Whether an operation began since it looked last.
static USED: AtomicBool = AtomicBool::new(false);

static RUNTIME: Mutex<Option<Arc<Runtime>>> = Mutex::new(None);

/// How long a remote backend may take. No operation can hang: each of these ends in
/// [`StoreError::TimedOut`](crate::StoreError::TimedOut) naming the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Until a connection is there, with name look-up and TLS.
    pub connect: Duration,
    /// From the request to the head of its answer. Requests that carry data have
    /// [`Timeouts::operation`] for it, since sending takes as long as the data does.
    pub response: Duration,
    /// Between two pieces of an answer's body.
    pub idle: Duration,
    /// For the whole of one operation, with everything that is resumed in it.
    pub operation: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            response: Duration::from_secs(30),
            idle: Duration::from_secs(30),
            operation: Duration::from_secs(300),
        }
    }
}

fn slot() -> MutexGuard<'static, Option<Arc<Runtime>>> {
    // Holds one whole value or none, whatever panicked.
    RUNTIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process's runtime, made if there is none.
///
/// # Errors
/// If its threads cannot be started.
pub fn runtime() -> io::Result<Arc<Runtime>> {
    let mut slot = slot();
    if let Some(runtime) = slot.as_ref() {
        return Ok(Arc::clone(runtime));
    }
    let runtime = Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("layerpack-net")
        .enable_all()
        .build()?;
    let runtime = Arc::new(runtime);
    *slot = Some(Arc::clone(&runtime));
    Ok(runtime)
}

/// Runs `future` on this thread to its end. To be called from ordinary threads, also those of
/// another runtime's `spawn_blocking`, but not from inside asynchronous code.
///
/// # Errors
/// If the runtime cannot be started.
pub fn block_on<F: Future>(future: F) -> io::Result<F::Output> {
    let runtime = runtime()?;
    USED.store(true, Ordering::Relaxed);
    if !TICKING.swap(true, Ordering::Relaxed) {
        runtime.spawn(tick());
    }
    Ok(runtime.block_on(future))
}

/// Wakes up now and then while there are operations. A timer that is the next to end has to wake
/// the thread that waits for the network, so that it waits no longer than that; every request has
/// several time limits, and each would do so. Behind this one they do not.
async fn tick() {
    while USED.swap(false, Ordering::Relaxed) {
        tokio::time::sleep(TICK).await;
    }
    // An operation that begins just now has none: it takes a little longer.
    TICKING.store(false, Ordering::Relaxed);
}

/// Ends the runtime's threads, and waits until they are gone. Connections are lost; a store that
/// is used afterwards makes new ones. `false` if another thread is in the middle of an operation:
/// then the runtime ends with it.
pub fn shutdown() -> bool {
    let Some(runtime) = slot().take() else {
        return true;
    };
    TICKING.store(false, Ordering::Relaxed);
    match Arc::into_inner(runtime) {
        Some(runtime) => {
            runtime.shutdown_timeout(SHUTDOWN_LIMIT);
            true
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, since the runtime is the process's: it is made, shared, ended and made again.
    #[test]
    fn the_runtime_comes_and_goes() {
        assert_eq!(block_on(async { 1 }).unwrap(), 1);
        let first = runtime().unwrap();
        assert!(Arc::ptr_eq(&first, &runtime().unwrap()));
        assert!(!shutdown(), "it is in use here");
        drop(first);
        assert_eq!(block_on(async { 2 }).unwrap(), 2);
        assert!(shutdown());
        assert!(shutdown(), "there is none");
        // From a thread that another runtime keeps for blocking work.
        let other = Builder::new_current_thread().build().unwrap();
        let result = other.block_on(async {
            tokio::task::spawn_blocking(|| block_on(async { 3 }).unwrap())
                .await
                .unwrap()
        });
        assert_eq!(result, 3);
    }
}
