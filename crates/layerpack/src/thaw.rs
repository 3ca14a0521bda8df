//! A frozen sandbox must not stay frozen because the user lost patience.
//!
//! While a [`Thaw`] lives, a thread waits for the signals that end a command; it lets the sandbox
//! go on, then ends the process as the signal would have. Against what cannot be waited for, the
//! node daemon watches the process: see `daemon::guards`.

use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use layerpack_packer::{Halt, HaltError};
use layerpack_runtime::{FreezeGuard, HaltedBy, RuntimeError, Sandbox, Sandboxes};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// How long the processes of a sandbox may take to come to rest, in one try: one that waits in the
/// kernel must not keep the others halted.
const FREEZE: Duration = Duration::from_millis(250);
/// How long is tried.
const TRIES: Duration = Duration::from_secs(30);
/// How long a sandbox goes on between two tries.
const PAUSE: Duration = Duration::from_millis(500);

/// Freezes a sandbox and lets it go on, at the latest when it is dropped or the process is told
/// to end.
#[derive(Debug)]
pub(crate) struct Thaw<'a> {
    sandboxes: &'a Sandboxes,
    sandbox: &'a Sandbox,
    guard: Arc<Mutex<Option<FreezeGuard>>>,
    by: Mutex<HaltedBy>,
    /// Dropped: the waiting thread ends.
    _over: oneshot::Sender<()>,
}

impl<'a> Thaw<'a> {
    /// Begins to wait for signals; nothing is frozen yet.
    pub(crate) fn on_signals(
        sandboxes: &'a Sandboxes,
        sandbox: &'a Sandbox,
    ) -> anyhow::Result<Self> {
        let guard = Arc::new(Mutex::new(None));
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
        let shared: Arc<Mutex<Option<FreezeGuard>>> = Arc::clone(&guard);
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
                    // Kept: nothing is frozen any more while the process ends.
                    let mut held = lock(&shared);
                    drop(held.take());
                    process::exit(128 + number);
                }
            })
            .context("cannot watch for signals")?;
        Ok(Self {
            sandboxes,
            sandbox,
            guard,
            by: Mutex::new(HaltedBy::Nothing),
            _over: over,
        })
    }

    /// By what the sandbox was halted.
    pub(crate) fn by(&self) -> HaltedBy {
        *lock(&self.by)
    }

    /// Whether a process of the sandbox writes to files through memory maps; in doubt, it does.
    fn maps_files(&self) -> bool {
        let id = self.sandbox.spec.id.as_str();
        self.sandboxes.maps_files(id).unwrap_or(true)
    }

    fn sync(&self) -> std::io::Result<()> {
        let upper = fs_err::File::open(&self.sandbox.upper)?;
        rustix::fs::syncfs(upper.file()).map_err(|errno| {
            let what = std::io::Error::from(errno);
            std::io::Error::new(
                what.kind(),
                format!("cannot sync {}: {what}", self.sandbox.upper.display()),
            )
        })
    }
}

impl Halt for Thaw<'_> {
    fn prepare(&self) {
        // Most of what there is to write is written while the sandbox still runs.
        if self.maps_files() {
            let _ = self.sync();
        }
    }

    fn halt(&self) -> Result<(), HaltError> {
        let id = self.sandbox.spec.id.as_str();
        let deadline = Instant::now() + TRIES;
        let (mut held, guard) = loop {
            let held = lock(&self.guard);
            match self.sandboxes.freeze(id, FREEZE) {
                Ok(guard) => break (held, guard),
                Err(RuntimeError::FreezeTimeout { id, .. }) if Instant::now() >= deadline => {
                    let waited_ms = TRIES.as_millis();
                    return Err(RuntimeError::FreezeTimeout { id, waited_ms }.into());
                }
                Err(RuntimeError::FreezeTimeout { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            drop(held);
            std::thread::sleep(PAUSE);
        };
        *lock(&self.by) = guard.by();
        *held = Some(guard);
        drop(held);
        // A page that is written through a map and was not yet written back can be written again
        // without a trace; nothing else can.
        if self.maps_files()
            && let Err(error) = self.sync()
        {
            let _ = self.resume();
            return Err(error.into());
        }
        Ok(())
    }

    fn resume(&self) -> Result<(), HaltError> {
        match lock(&self.guard).take() {
            None => Ok(()),
            Some(guard) => Ok(guard.thaw()?),
        }
    }
}

impl Drop for Thaw<'_> {
    fn drop(&mut self) {
        drop(lock(&self.guard).take());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
