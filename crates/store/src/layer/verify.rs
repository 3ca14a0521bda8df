//! Proving every byte of a layer.
use super::LayerStore;
use crate::digest::Digest;
use crate::error::Result;
use crate::manifest::LayerId;
use crate::reference::Reference;
use std::ops::Range;

/// One damaged object, or part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The object's key.
    pub key: String,
    /// Bytes of the object concerned, if not all of it.
    pub range: Option<Range<u64>>,
    /// What was found.
    pub what: String,
    /// Ranges of the layer's data address space that cannot be read because of it.
    pub data: Vec<Range<u64>>,
}

/// What verifying a layer found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    /// The layer.
    pub reference: Reference,
    /// Digest of its manifest, if the reference could be read.
    pub manifest: Option<Digest>,
    /// Identity of its content, if the manifest could be read.
    pub layer_id: Option<LayerId>,
    /// Objects looked at.
    pub objects: u64,
    /// Frames verified.
    pub frames: u64,
    /// Chunks verified.
    pub chunks: u64,
    /// Bytes read from the store.
    pub stored_bytes: u64,
    /// Bytes of chunks verified.
    pub raw_bytes: u64,
    /// What is damaged. Empty: every byte of the layer is right.
    pub damaged: Vec<Damage>,
}

impl VerifyReport {
    /// True if every byte of the layer is right.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.damaged.is_empty()
    }
}

impl LayerStore {
    /// Reads and verifies every byte of a layer.
    ///
    /// # Errors
    /// TODO
    pub fn verify(&self, _reference: &Reference) -> Result<VerifyReport> {
        todo!()
    }
}
