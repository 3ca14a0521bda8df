//! Leases in the stores: what a node has mounted is not collected as garbage there.
//!
//! One lease for each store that layers are mounted from. It names a layer before the layer comes
//! up, and is kept true by housekeeping. A store that takes no lease (a read-only one, one that is
//! out of reach) costs a warning and is asked again later: mounting does not depend on it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use layerpack_store::{Digest, NodeLease, StoreError};

use super::Node;
use super::layer::StoreRef;
use crate::error::{LayerfsError, Result};
use crate::files;
use crate::sync::Mutex;

/// How long a lease outlives its node.
const TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// How long a mount waits for a collector that deletes the layer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two attempts with a store that took no lease.
const AGAIN: Duration = Duration::from_secs(600);

/// The node's leases, by the stores' addresses.
#[derive(Debug)]
pub(super) struct StoreLeases {
    /// The node's name in them: random, and kept in the node's directory, so that a later process
    /// of the node goes on with the leases of this one.
    id: String,
    who: String,
    stores: Mutex<BTreeMap<String, Entry>>,
}

#[derive(Debug, Default)]
struct Entry {
    lease: Option<Arc<NodeLease>>,
    /// When it failed last.
    failed: Option<Instant>,
}

impl StoreLeases {
    /// The node's identity.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn new(root: &Path) -> Result<Self> {
        let path = root.join("node-id");
        let known = fs_err::read_to_string(&path).ok();
        let known = known.filter(|id| {
            (16..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric())
        });
        let id = match known {
            Some(id) => id,
            None => {
                let seed = format!(
                    "{:?} {} {:?}",
                    std::time::SystemTime::now(),
                    std::process::id(),
                    std::collections::hash_map::RandomState::new()
                );
                let random = fs_err::read_to_string("/proc/sys/kernel/random/uuid");
                let seed = format!("{seed} {}", random.unwrap_or_default());
                let id = Digest::of(seed.as_bytes()).hex().chars().take(32).collect();
                let id: String = id;
                files::replace(root, &path, &[id.as_bytes()], true)?;
                id
            }
        };
        let host = fs_err::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Ok(Self {
            id,
            who: format!("node {} at {}", host.trim(), root.display()),
            stores: Mutex::new(BTreeMap::new()),
        })
    }
}

impl Node {
    /// Has the store keep these layers, before they are mounted. Whether it does.
    ///
    /// # Errors
    /// If a layer is being deleted just now.
    pub(super) fn protect(&self, store: &StoreRef, manifests: &[Digest]) -> Result<bool> {
        let Some(lease) = self.store_lease(store) else {
            return Ok(false);
        };
        match lease.hold(manifests) {
            Ok(()) => Ok(true),
            Err(error @ StoreError::Collecting { .. }) => Err(LayerfsError::Store(error)),
            Err(error) => {
                self.lease_failed(store.url(), &error);
                Ok(false)
            }
        }
    }

    /// Whether the store keeps these layers as it is, with nothing to be asked; `None` while it takes
    /// no lease.
    pub(super) fn is_kept(&self, store: &StoreRef, manifests: &[Digest]) -> Option<bool> {
        let stores = self.store_leases.stores.lock();
        let Some(entry) = stores.get(store.url()) else {
            return Some(false);
        };
        if entry.failed.is_some_and(|at| at.elapsed() < AGAIN) {
            return None;
        }
        Some(entry.lease.as_ref().is_some_and(|l| l.holds(manifests)))
    }

    /// The lease in a store; `None` while there is none to be had.
    fn store_lease(&self, store: &StoreRef) -> Option<Arc<NodeLease>> {
        let mut stores = self.store_leases.stores.lock();
        let entry = stores.entry(store.url().to_owned()).or_default();
        if entry.failed.is_some_and(|at| at.elapsed() < AGAIN) {
            return None;
        }
        if let Some(lease) = &entry.lease {
            return Some(Arc::clone(lease));
        }
        drop(stores);
        let made = self.opened(store).and_then(|open| {
            let (id, who) = (&self.store_leases.id, self.store_leases.who.clone());
            Ok(NodeLease::new(&open, id, who, TTL, PATIENCE)?)
        });
        match made {
            Ok(lease) => {
                // An earlier process of this node may have named more than is asked for now.
                lease.adopt(self.held_from(store.url()));
                let lease = Arc::new(lease);
                let mut stores = self.store_leases.stores.lock();
                let entry = stores.entry(store.url().to_owned()).or_default();
                // Another thread may have been faster.
                Some(Arc::clone(entry.lease.get_or_insert(lease)))
            }
            Err(error) => {
                self.lease_failed(store.url(), &error);
                None
            }
        }
    }

    /// What is leased or mounted from a store now.
    fn held_from(&self, url: &str) -> BTreeSet<Digest> {
        let mut leased = BTreeMap::new();
        self.leases.lock().by_store(&mut leased);
        let mut held = leased.remove(url).unwrap_or_default();
        let slots: Vec<_> = self.slots.lock().values().map(Arc::clone).collect();
        for slot in slots {
            // One that is locked is coming up, and is named by who brings it up.
            let Some(slot) = slot.try_lock() else {
                continue;
            };
            if let Some(up) = slot.up.as_ref().filter(|up| up.store == url) {
                held.insert(up.manifest_digest);
            }
        }
        held
    }

    fn lease_failed(&self, url: &str, error: &dyn std::fmt::Display) {
        let mut stores = self.store_leases.stores.lock();
        let entry = stores.entry(url.to_owned()).or_default();
        let first = entry.failed.replace(Instant::now()).is_none();
        drop(stores);
        if first {
            tracing::warn!(store = %url, error = %error,
                "the store takes no lease: keep its garbage collector from layers that are mounted here");
        }
    }

    /// Has each store's lease name what is mounted from it now, and renews it.
    pub(super) fn update_store_leases(&self) {
        let mut mounted: BTreeMap<String, BTreeSet<Digest>> = BTreeMap::new();
        for url in self.store_leases.stores.lock().keys() {
            mounted.entry(url.clone()).or_default();
        }
        let slots: Vec<_> = self.slots.lock().values().map(Arc::clone).collect();
        for slot in slots {
            // One that is locked is coming up, and was named before that.
            let Some(slot) = slot.try_lock() else { return };
            if let Some(up) = &slot.up {
                let of_store = mounted.entry(up.store.clone()).or_default();
                of_store.insert(up.manifest_digest);
            }
        }
        self.leases.lock().by_store(&mut mounted);
        for (url, manifests) in mounted {
            let store = StoreRef::Address(url.clone());
            let Some(lease) = self.store_lease(&store) else {
                continue;
            };
            match lease.update(manifests) {
                Ok(()) => {
                    if let Some(entry) = self.store_leases.stores.lock().get_mut(&url) {
                        entry.failed = None;
                    }
                }
                Err(error) => self.lease_failed(&url, &error),
            }
        }
    }
}
