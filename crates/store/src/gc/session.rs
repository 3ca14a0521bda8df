//! A writer's session: its lease, what is condemned, and the claims against that.
//!
//! The order is what makes it safe. A writer **puts its session, then reads the condemned lists**,
//! then says in its session which lists it knows. A collector that wants to delete a list's objects
//! **puts its marker, then reads the sessions**: while one lives that does not know the list, it
//! deletes nothing. So either the collector waits for the writer, or the writer knows what is
//! condemned. A writer that needs a condemned object **claims it in its session, then looks for
//! markers**; the collector puts the marker before it reads the claims. So either the collector sees
//! the claim and leaves the object, or the writer sees the marker and waits until it is gone.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::condemned::{Condemned, Sweep};
use super::lease::{Lease, LeaseKind, random_id, store_time, this_process};
use crate::blob::BlobStore;
use crate::error::{Result, StoreError};
use crate::key::Key;

/// A session lasts so long without being renewed.
pub(super) const SESSION_TTL: Duration = Duration::from_secs(30 * 60);
/// How long a writer waits for a collector that deletes.
const SWEEP_WAIT: Duration = Duration::from_secs(60);

/// A clock that also runs while the machine sleeps.
#[derive(Debug, Clone, Copy)]
pub(super) struct BootInstant(Duration);

impl BootInstant {
    pub(super) fn now() -> Self {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
        Self(Duration::new(seconds, nanos))
    }

    pub(super) fn elapsed(self) -> Duration {
        Self::now().0.saturating_sub(self.0)
    }
}

#[derive(Debug)]
struct State {
    lease: Lease,
    renewed: BootInstant,
    ended: bool,
}

#[derive(Debug)]
struct Shared {
    blobs: Arc<dyn BlobStore>,
    key: Key,
    state: Mutex<State>,
    wake: Condvar,
}

/// A writer's session. Dropped, it is over.
#[derive(Debug)]
pub(crate) struct Session {
    shared: Arc<Shared>,
    /// Condemned objects, with the lists that they are in.
    condemned: HashMap<String, Vec<String>>,
    /// Condemned objects that this session claimed and may use.
    claimed: Mutex<BTreeSet<String>>,
    thread: Option<JoinHandle<()>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Changed in single steps only.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, state: &mut State) -> Result<()> {
        let begun = BootInstant::now();
        state.lease.put(&*self.blobs, &self.key)?;
        state.renewed = begun;
        Ok(())
    }

    /// Writes the session again. One that was or may have been taken for dead does not come back:
    /// what it relied on may be gone.
    fn renew(&self, state: &mut State) -> Result<()> {
        self.check(state)?;
        self.put(state)
    }

    fn check(&self, state: &State) -> Result<()> {
        if state.renewed.elapsed() > SESSION_TTL * 2 / 3 || self.blobs.size(&self.key)?.is_none() {
            return Err(StoreError::LeaseLost {
                store: self.blobs.url(),
                key: self.key.to_string(),
            });
        }
        Ok(())
    }

    /// Renews until the session ends.
    fn keep(&self) {
        let pause = SESSION_TTL / 6;
        let mut state = self.lock();
        while !state.ended {
            (state, _) = self
                .wake
                .wait_timeout(state, pause)
                .unwrap_or_else(PoisonError::into_inner);
            if state.ended || state.renewed.elapsed() < pause / 2 {
                continue;
            }
            match self.renew(&mut state) {
                Ok(()) => {}
                Err(StoreError::LeaseLost { .. }) => return, // `check` tells the writer
                Err(error) => {
                    tracing::warn!(key = %self.key, %error, "the session is not renewed yet");
                }
            }
        }
    }
}

impl Session {
    /// Registers a writer, before it reads anything that it will rely on.
    pub(crate) fn begin(blobs: Arc<dyn BlobStore>) -> Result<Self> {
        let key = Key::lease(&format!("session-{}", random_id()?))?;
        let shared = Arc::new(Shared {
            blobs,
            key,
            state: Mutex::new(State {
                lease: Lease::new(LeaseKind::Session, this_process(), SESSION_TTL),
                renewed: BootInstant::now(),
                ended: false,
            }),
            wake: Condvar::new(),
        });
        let mut session = Self {
            shared: Arc::clone(&shared),
            condemned: HashMap::new(),
            claimed: Mutex::default(),
            thread: None,
        };
        shared.put(&mut shared.lock())?;
        session.learn()?;
        let keeper = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("session".to_owned())
            .stack_size(2 << 20)
            .spawn(move || keeper.keep())
            .map_err(|source| StoreError::Io {
                operation: "start",
                store: shared.blobs.url(),
                key: "the thread that renews the session".to_owned(),
                source,
            })?;
        session.thread = Some(thread);
        Ok(session)
    }

    /// Reads what is condemned, and says so.
    fn learn(&mut self) -> Result<()> {
        let blobs = &self.shared.blobs;
        let begun = Instant::now();
        let all = loop {
            let all = Condemned::read(&**blobs)?;
            // The list of such a marker is gone: nobody can tell any more what it deletes.
            let orphans = |s: &Sweep| !all.lists.iter().any(|l| l.id == s.list);
            let markers: Vec<&Sweep> = all.sweeps.iter().filter(|s| orphans(s)).collect();
            if !self.any_live(&markers)? {
                break all;
            }
            self.pause(begun, "gc/")?;
        };
        if let Some((_, error)) = all.damaged.into_iter().next() {
            return Err(error);
        }
        if all.lists.is_empty() {
            return Ok(());
        }
        let mut knows = BTreeSet::new();
        for list in all.lists {
            for key in list.keys {
                self.condemned.entry(key).or_default().push(list.id.clone());
            }
            knows.insert(list.id);
        }
        let mut state = self.shared.lock();
        state.lease.knows = knows;
        self.shared.renew(&mut state)
    }

    fn any_live(&self, markers: &[&Sweep]) -> Result<bool> {
        if markers.is_empty() {
            return Ok(false);
        }
        let ago = self.shared.lock().renewed.elapsed();
        let now = store_time(&*self.shared.blobs, &self.shared.key, ago)?;
        Ok(markers.iter().any(|marker| marker.is_live(now)))
    }

    fn pause(&self, begun: Instant, key: &str) -> Result<()> {
        if begun.elapsed() > SWEEP_WAIT {
            return Err(StoreError::Collecting {
                store: self.shared.blobs.url(),
                key: key.to_owned(),
            });
        }
        std::thread::sleep(Duration::from_millis(50));
        Ok(())
    }

    /// Whether a list condemns the object, claimed or not.
    pub(super) fn knows_condemned(&self, key: &Key) -> bool {
        self.condemned.contains_key(key.as_str())
    }

    fn claimed(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes sure that no collector deletes the object from now on.
    pub(super) fn claim(&self, key: &Key) -> Result<()> {
        let Some(lists) = self.condemned.get(key.as_str()) else {
            return Ok(());
        };
        if self.claimed().contains(key.as_str()) {
            return Ok(());
        }
        {
            let mut state = self.shared.lock();
            state.lease.claims.insert(key.as_str().to_owned());
            self.shared.renew(&mut state)?;
        }
        let begun = Instant::now();
        // Looked for twice: one list that is wrong must not lose the object.
        let mut clear = 0;
        while clear < 2 {
            let sweeps = Condemned::sweeps(&*self.shared.blobs)?;
            let mine: Vec<&Sweep> = sweeps.iter().filter(|s| lists.contains(&s.list)).collect();
            if self.any_live(&mine)? {
                clear = 0;
                self.pause(begun, key.as_str())?;
            } else {
                clear += 1;
            }
        }
        self.claimed().insert(key.as_str().to_owned());
        Ok(())
    }

    /// That the session holds: nobody has taken this writer for dead.
    pub(crate) fn check(&self) -> Result<()> {
        let state = self.shared.lock();
        self.shared.check(&state)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Err(error) = self.shared.blobs.delete_volatile(&self.shared.key) {
            tracing::debug!(key = %self.shared.key, %error, "the session ends by its age");
        }
    }
}
