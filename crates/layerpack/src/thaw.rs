//! A frozen sandbox must not stay frozen because the user lost patience.
//!
//! While a [`Thaw`] lives, a thread waits for the signals that end a command; it lets the sandbox
//! go on, then ends the process as the signal would have.

use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context as _;
use layerpack_runtime::FreezeGuard;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// Keeps a sandbox frozen until it is dropped or the process is told to end.
#[derive(Debug)]
pub(crate) struct Thaw {
    guard: Arc<Mutex<Option<FreezeGuard>>>,
    /// Dropped: the waiting thread ends.
    _over: oneshot::Sender<()>,
}

impl Thaw {
    /// Takes charge of `guard`. On an error the sandbox goes on.
    pub(crate) fn on_signals(guard: FreezeGuard) -> anyhow::Result<Self> {
        let guard = Arc::new(Mutex::new(Some(guard)));
        let (over, wait) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .context("cannot watch for signals")?;
        // Registered here, so that no signal is missed once this returns.
        let (mut interrupt, mut terminate, mut hangup) = {
            let _inside = runtime.enter();
            (
                signal(SignalKind::interrupt())?,
                signal(SignalKind::terminate())?,
                signal(SignalKind::hangup())?,
            )
        };
        let shared = Arc::clone(&guard);
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                let number = runtime.block_on(async move {
                    tokio::select! {
                        _ = interrupt.recv() => Some(2),
                        _ = terminate.recv() => Some(15),
                        _ = hangup.recv() => Some(1),
                        _ = wait => None,
                    }
                });
                if let Some(number) = number {
                    drop(lock(&shared).take());
                    process::exit(128 + number);
                }
            })
            .context("cannot watch for signals")?;
        Ok(Self { guard, _over: over })
    }
}

impl Drop for Thaw {
    fn drop(&mut self) {
        drop(lock(&self.guard).take());
    }
}

fn lock(guard: &Mutex<Option<FreezeGuard>>) -> MutexGuard<'_, Option<FreezeGuard>> {
    guard.lock().unwrap_or_else(PoisonError::into_inner)
}
