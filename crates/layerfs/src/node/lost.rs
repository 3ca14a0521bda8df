//! Users of layers that a former life of the node mounted, and that nobody serves any more.
//!
//! When a process and its holder are gone, the FUSE connection is too. The next process mounts the
//! layers anew, but an overlay that was made of the old mounts keeps those: it shows what the kernel
//! has cached of them, and every other read fails. Such a lease is *lost*. It is told from the fact
//! that the connection was not taken over, not by looking at the mount, which could hang.
//!
//! The mark is in the lease's record, so that it outlives restarts, and goes with the lease, or when
//! its owner asks for the stack again.

use std::path::Path;

use serde::Deserialize;

use super::Node;
use super::lease::{Record, check_id};
use crate::error::Result;

/// What is read of a record here.
#[derive(Debug, Deserialize)]
struct Marked {
    info: Mark,
}

#[derive(Debug, Deserialize)]
struct Mark {
    #[serde(default)]
    lost: bool,
}

/// Whether the lease of that name is lost, by its record in the node directory `root`; needs no
/// running node. `false` when there is no such lease.
#[must_use]
pub fn is_lost(root: &Path, lease: &str) -> bool {
    if check_id(lease).is_err() {
        return false;
    }
    let path = root.join("leases").join(format!("{lease}.json"));
    fs_err::read(path)
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Marked>(&bytes).ok())
        .is_some_and(|marked| marked.info.lost)
}

impl Node {
    /// Marks a lease of a former life, after its layers were mounted anew (`restored`) or could not
    /// be. One of layers without data loses nothing: no blob was under them.
    pub(super) fn mark_lost(&self, mut record: Record, restored: bool) {
        if self.took_over() {
            return;
        }
        let layers = &record.info.stack.layers;
        if restored && layers.iter().all(|id| self.registry.get(*id).is_none()) {
            return;
        }
        record.info.lost = true;
        self.leases.lock().insert(record.clone());
        if let Err(error) = record.save(&self.root.join("leases")) {
            // Known until the next restart.
            tracing::warn!(%error, "a lost lease cannot be recorded as such");
        }
    }

    /// The owner of a lease asks for its stack again, to mount what is served now.
    pub(super) fn unmark_lost(&self, id: &str) -> Result<()> {
        let record = {
            let mut leases = self.leases.lock();
            match leases.record(id) {
                Some(mut record) if record.info.lost => {
                    record.info.lost = false;
                    leases.insert(record.clone());
                    record
                }
                _ => return Ok(()),
            }
        };
        record.save(&self.root.join("leases"))
    }
}
