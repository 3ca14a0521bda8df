//! Layers of which everything but the reference is in the store, and several references at once.

use super::LayerStore;
use super::publish::{PublishOutcome, Published};
use super::writer::WriteStats;
use crate::blob::PutOutcome;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::key::Key;
use crate::manifest::LayerId;
use crate::reference::Reference;

/// A layer of which all is durable in the store but the reference, so that nobody sees it. As long
/// as this lives, no collector takes what it needs.
#[derive(Debug)]
pub struct Staged {
    pub(super) store: LayerStore,
    pub(super) reference: Reference,
    /// Digest of its manifest.
    pub(super) digest: Digest,
    /// What its reference will be.
    pub(super) object: Vec<u8>,
    pub(super) layer_id: LayerId,
    pub(super) stats: WriteStats,
    pub(super) warnings: Vec<String>,
}

impl Staged {
    /// Its name to be.
    #[must_use]
    pub const fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Digest of its manifest, which can be read already.
    #[must_use]
    pub const fn digest(&self) -> &Digest {
        &self.digest
    }

    /// What was written for it and for what was staged before it by the same writer.
    #[must_use]
    pub const fn stats(&self) -> WriteStats {
        self.stats
    }

    /// The same, but its figures begin where `earlier` ended.
    #[must_use]
    pub fn counted_from(mut self, earlier: WriteStats) -> Self {
        self.stats = self.stats.since(&earlier);
        self
    }

    fn conflict(&self, existing: Digest) -> StoreError {
        StoreError::Conflict {
            reference: Box::new(self.reference.clone()),
            store: self.store.url().to_owned(),
            existing,
            new: self.digest,
        }
    }

    /// Whether the version is free, or this very layer's.
    pub(super) fn check(&self) -> Result<()> {
        let existing = self.store.read_ref(&self.reference)?;
        match existing.filter(|existing| *existing != self.digest) {
            Some(existing) => Err(self.conflict(existing)),
            None => Ok(()),
        }
    }

    /// Creates the reference.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] if the version is published with other content; else what went wrong
    /// in writing.
    pub fn publish(mut self) -> Result<Published> {
        let (store, reference) = (&self.store, &self.reference);
        let outcome = match store.create_reference(reference, &self.digest, &self.object)? {
            PutOutcome::Created => {
                self.stats.new_bytes += self.object.len() as u64;
                PublishOutcome::Created
            }
            PutOutcome::Exists => match store.read_ref(reference)? {
                Some(existing) if existing == self.digest => PublishOutcome::Already,
                Some(existing) => return Err(self.conflict(existing)),
                None => return Err(store.missing(&Key::reference(reference))), // removed just now
            },
        };
        Ok(Published {
            reference: self.reference,
            digest: self.digest,
            layer_id: self.layer_id,
            outcome,
            stats: self.stats,
            warnings: self.warnings,
        })
    }
}

/// Publishes layers together, in this order: looks at all versions before it creates the first
/// reference, so that one that is taken leaves the store without any of them.
///
/// References are objects of their own, which no store creates at once. So if one is taken between
/// looking and creating, or the store ends to answer, those before it are published. They stay:
/// each is whole, another writer may have been told that it is there, and the same call again
/// completes them.
///
/// # Errors
/// As [`Staged::publish`], for the first that fails.
pub fn publish_all(staged: Vec<Staged>) -> Result<Vec<Published>> {
    staged.iter().try_for_each(Staged::check)?;
    staged.into_iter().map(Staged::publish).collect()
}
