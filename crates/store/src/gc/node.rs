//! The lease of a node: which manifests it has mounted.
//!
//! A layer is protected from the return of [`NodeLease::hold`] on: the lease is written first, then a
//! collector that is deleting just then is waited for. It read the leases after it wrote its marker,
//! so it either saw this one, or is seen here.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::condemned::{Condemned, CondemnedList};
use super::lease::{Lease, LeaseKind, store_time};
use super::session::BootInstant;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::key::Key;
use crate::layer::LayerStore;

/// A node's lease in one store. It outlives the process that took it, until it expires.
#[derive(Debug)]
pub struct NodeLease {
    store: LayerStore,
    key: Key,
    /// How long it lasts without being renewed.
    ttl: Duration,
    /// How long a collector that deletes is waited for.
    patience: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    lease: Lease,
    /// When it was written last by this process.
    written: Option<BootInstant>,
    /// Of what it names: that for which no collector was at work after the lease was written.
    settled: BTreeSet<Digest>,
    /// Counts the times that something was taken out of the lease, or that it cannot be told what
    /// the store has of it.
    epoch: u64,
}

impl State {
    fn unsettle(&mut self) {
        self.settled.clear();
        self.epoch += 1;
    }
}

impl NodeLease {
    /// The lease named `id` (letters, digits, `-`) of the node that people know as `who`. Nothing is
    /// written yet. A lease of that name that an earlier process took is replaced by the first
    /// [`NodeLease::hold`], with what was [adopted](NodeLease::adopt) until then.
    ///
    /// # Errors
    /// If `id` cannot be part of a key.
    pub fn new(
        store: &LayerStore,
        id: &str,
        who: String,
        ttl: Duration,
        patience: Duration,
    ) -> Result<Self> {
        Ok(Self {
            store: store.clone(),
            key: Key::lease(&format!("node-{id}"))?,
            ttl,
            patience,
            state: Mutex::new(State {
                lease: Lease::new(LeaseKind::Node, who, ttl),
                written: None,
                settled: BTreeSet::new(),
                epoch: 0,
            }),
        })
    }

    /// Adds manifests that an earlier lease of this name may protect: the first write keeps them.
    /// Writes nothing.
    pub fn adopt(&self, manifests: impl IntoIterator<Item = Digest>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.lease.manifests.extend(manifests);
    }

    /// Whether these manifests are protected: [`NodeLease::hold`] has nothing to ask for.
    #[must_use]
    pub fn holds(&self, manifests: &[Digest]) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.written.is_some() && manifests.iter().all(|m| state.settled.contains(m))
    }

    /// Has the lease name at least these manifests before it returns, and sees to it that no
    /// collector is deleting one of them. Who asks for some that another thread has just had named
    /// waits for collectors as that one does.
    ///
    /// # Errors
    /// If it cannot be written (then they are not protected), which a directory that has no store any
    /// more is not, or [`StoreError::Collecting`] if a
    /// collector that deletes one of them does not end in time.
    pub fn hold(&self, manifests: &[Digest]) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh: Vec<Digest> = manifests
            .iter()
            .filter(|digest| !state.lease.manifests.contains(digest))
            .copied()
            .collect();
        if !fresh.is_empty() || state.written.is_none() {
            state.lease.manifests.extend(manifests);
            let written = self.write(&mut state);
            if written.is_err() {
                for digest in &fresh {
                    state.lease.manifests.remove(digest);
                }
            }
            written?;
        }
        let open: Vec<Digest> = (manifests.iter())
            .filter(|digest| !state.settled.contains(digest))
            .copied()
            .collect();
        let epoch = state.epoch;
        drop(state);
        if open.is_empty() {
            return Ok(());
        }
        self.wait_for_sweeps(&open)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // What was taken out meanwhile may have been named again since, after we looked.
        if state.epoch == epoch {
            state.settled.extend(open);
        }
        Ok(())
    }

    /// A store that is gone from its place gets no lease: that would make another one there.
    fn write(&self, state: &mut State) -> Result<()> {
        if self.store.blobs().is_away() {
            return Err(StoreError::NoStore {
                wanted: String::new(),
                store: self.store.url().to_owned(),
            });
        }
        let begun = BootInstant::now();
        state.lease.put(&**self.store.blobs(), &self.key)?;
        state.written = Some(begun);
        Ok(())
    }

    fn wait_for_sweeps(&self, manifests: &[Digest]) -> Result<()> {
        let blobs = &**self.store.blobs();
        let begun = Instant::now();
        loop {
            let mut busy = None;
            let sweeps = Condemned::sweeps(blobs)?;
            let now = match sweeps.is_empty() {
                true => return Ok(()),
                false => store_time(blobs, &self.key, begun.elapsed())?,
            };
            for sweep in sweeps.iter().filter(|sweep| sweep.is_live(now)) {
                let list = CondemnedList::get(blobs, &Key::condemned(&sweep.list)?, &sweep.list)?;
                let touched = manifests.iter().find(|digest| {
                    list.as_ref()
                        .is_none_or(|list| list.keys.contains(Key::manifest(digest).as_str()))
                });
                busy = busy.or(touched);
            }
            let Some(digest) = busy else { return Ok(()) };
            if begun.elapsed() > self.patience {
                return Err(StoreError::Collecting {
                    store: self.store.url().to_owned(),
                    key: Key::manifest(digest).to_string(),
                });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Has the lease name exactly these manifests, and renews it if that is due. Removes it if there
    /// are none.
    ///
    /// # Errors
    /// If it cannot be written; it then protects what it did until it expires.
    pub fn update(&self, manifests: BTreeSet<Digest>) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if manifests.is_empty() {
            if state.written.is_some() || !state.lease.manifests.is_empty() {
                state.lease.manifests = manifests;
                state.unsettle();
                self.store.blobs().delete_volatile(&self.key)?;
                state.written = None;
            }
            return Ok(());
        }
        let due = state
            .written
            .is_none_or(|written| written.elapsed() > self.ttl / 8);
        if !due && manifests == state.lease.manifests {
            return Ok(());
        }
        let before = std::mem::replace(&mut state.lease.manifests, manifests);
        let State { lease, settled, .. } = &mut *state;
        settled.retain(|digest| lease.manifests.contains(digest));
        if !before.is_subset(&state.lease.manifests) {
            state.epoch += 1;
        }
        let written = self.write(&mut state);
        if written.is_err() {
            state.unsettle();
            let now = std::mem::take(&mut state.lease.manifests);
            // Neither set is known to be there: claim both when it works again.
            state.written = None;
            state.lease.manifests = now.union(&before).copied().collect();
        }
        written
    }

    /// The store that it is in.
    #[must_use]
    pub fn store(&self) -> &LayerStore {
        &self.store
    }
}
