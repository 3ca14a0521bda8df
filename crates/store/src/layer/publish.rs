//! Publishing.
use super::writer::{LayerWriter, WriteStats};
use crate::digest::Digest;
use crate::error::Result;
use crate::format::map::LayerMap;
use crate::manifest::{Counts, LayerId, ParentRef};
use crate::reference::Reference;
use std::collections::BTreeMap;

/// What is to be published.
#[derive(Debug, Clone)]
pub struct Draft {
    /// Under which name.
    pub reference: Reference,
    /// See [`crate::Manifest::platform`].
    pub platform: String,
    /// See [`crate::Manifest::parents`].
    pub parents: Vec<ParentRef>,
    /// How much is in the layer.
    pub counts: Counts,
    /// See [`crate::Manifest::parameters`]; the writer adds `chunker`.
    pub parameters: BTreeMap<String, String>,
    /// The user's labels.
    pub labels: BTreeMap<String, String>,
    /// Further facts.
    pub annotations: BTreeMap<String, String>,
    /// The metadata image.
    pub meta: Vec<u8>,
    /// The map; every chunk in it was added to the writer or is in the store.
    pub map: LayerMap,
}

impl Draft {
    /// A draft with empty optional fields.
    #[must_use]
    pub fn new(reference: Reference, meta: Vec<u8>, map: LayerMap) -> Self {
        Self {
            reference,
            platform: String::new(),
            parents: Vec::new(),
            counts: Counts::default(),
            parameters: BTreeMap::new(),
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            meta,
            map,
        }
    }
}

/// Whether publishing changed the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishOutcome {
    /// The version is new.
    Created,
    /// The version was published before with the same content.
    Already,
}

/// A published layer.
#[derive(Debug, Clone)]
pub struct Published {
    /// Its name.
    pub reference: Reference,
    /// Digest of its manifest.
    pub digest: Digest,
    /// Identity of its content.
    pub layer_id: LayerId,
    /// Whether it is new.
    pub outcome: PublishOutcome,
    /// What was written.
    pub stats: WriteStats,
}

impl LayerWriter {
    /// Publishes the layer.
    ///
    /// # Errors
    /// TODO
    pub fn finish(self, _draft: Draft) -> Result<Published> {
        todo!()
    }
}
