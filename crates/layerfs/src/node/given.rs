//! Manifests: those that a caller has read already, and what is known of a layer that is to come up.

use std::collections::{BTreeMap, HashMap};

use layerpack_store::{Digest, Key, LayerId, Manifest, StoreError, at_once};

use super::Node;
use super::layer::StoreRef;
use crate::error::Result;
use crate::files;

/// Manifests that are kept in memory.
const PARSED: usize = 4096;
/// Manifests that are asked for at once.
const AT_ONCE: usize = 8;

/// Manifests that a caller has read, so that they need not be fetched again.
#[derive(Debug, Clone, Default)]
pub struct GivenManifests(BTreeMap<Digest, Manifest>);

impl GivenManifests {
    /// Those among `texts`, each under the digest of its bytes. What is no manifest is left out.
    pub fn of<T: AsRef<[u8]>>(texts: impl IntoIterator<Item = T>) -> Self {
        let read = texts.into_iter().filter_map(|text| {
            let manifest = Manifest::from_bytes(text.as_ref()).ok()?;
            Some((Digest::of(text.as_ref()), manifest))
        });
        Self(read.collect())
    }

    /// The manifest of this digest, if it was given.
    #[must_use]
    pub fn get(&self, digest: &Digest) -> Option<&Manifest> {
        self.0.get(digest)
    }
}

/// Manifests in memory: stacks come up again and again, and each needs those of all its layers.
#[derive(Debug, Default)]
pub(super) struct Parsed(HashMap<Digest, Manifest>);

impl Parsed {
    fn put(&mut self, digest: &Digest, manifest: &Manifest) {
        // Some two megabytes. Who has more layers in use reads some again.
        if self.0.len() >= PARSED {
            self.0.clear();
        }
        self.0.insert(*digest, manifest.clone());
    }
}

/// Where a manifest is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// The node has a copy.
    Kept,
    /// The caller gave it.
    Given {
        /// The store is asked whether it still has it: it keeps the layer for this node, and who
        /// gave the manifest read it before that.
        confirm: bool,
    },
}

/// A layer that is to come up.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) manifest: Manifest,
    pub(super) digest: Digest,
    origin: Origin,
}

impl Candidate {
    /// One whose manifest the node has a copy of.
    pub(super) fn kept(manifest: Manifest, digest: Digest) -> Self {
        Self {
            manifest,
            digest,
            origin: Origin::Kept,
        }
    }

    pub(super) fn layer(&self) -> LayerId {
        self.manifest.layer_id()
    }

    /// The digest of a manifest that the store must be asked for.
    pub(super) fn to_confirm(&self) -> Option<&Digest> {
        (self.origin == Origin::Given { confirm: true }).then_some(&self.digest)
    }

    pub(super) fn missing(&self, store: &StoreRef) -> StoreError {
        StoreError::Missing {
            store: store.url().to_owned(),
            key: Key::manifest(&self.digest).to_string(),
        }
    }
}

impl Node {
    /// What these digests stand for, in their order: by the node's copies, by what was given, else
    /// by the store, which is asked for several at once. `held` says whether the store keeps the
    /// layers for this node.
    pub(super) fn candidates(
        &self,
        store: &StoreRef,
        digests: &[Digest],
        given: &GivenManifests,
        held: bool,
    ) -> Result<Vec<Candidate>> {
        let at_hand = |digest: &Digest| {
            if let Some(manifest) = self.kept_manifest(digest) {
                return Some(Candidate::kept(manifest, *digest));
            }
            Some(Candidate {
                manifest: given.get(digest)?.clone(),
                digest: *digest,
                origin: Origin::Given { confirm: held },
            })
        };
        let found: Vec<Option<Candidate>> = digests.iter().map(at_hand).collect();
        let missing: Vec<Digest> = digests
            .iter()
            .zip(&found)
            .filter_map(|(digest, found)| found.is_none().then_some(*digest))
            .collect();
        if missing.is_empty() {
            return Ok(found.into_iter().flatten().collect());
        }
        let open = self.opened(store)?;
        let mut fetched = at_once(&missing, AT_ONCE, |digest| {
            let manifest = open.manifest(digest)?;
            self.keep_manifest(digest, &manifest)?;
            Ok::<_, crate::LayerfsError>(Candidate::kept(manifest, *digest))
        })?
        .into_iter();
        Ok(found
            .into_iter()
            .filter_map(|found| found.or_else(|| fetched.next()))
            .collect())
    }

    /// The node's copy of a manifest.
    pub(super) fn kept_manifest(&self, digest: &Digest) -> Option<Manifest> {
        if let Some(manifest) = self.parsed.lock().0.get(digest) {
            return Some(manifest.clone());
        }
        let bytes = fs_err::read(self.root.join("manifests").join(digest.hex())).ok()?;
        if Digest::of(&bytes) != *digest {
            return None;
        }
        let manifest = Manifest::from_bytes(&bytes).ok()?;
        self.parsed.lock().put(digest, &manifest);
        Some(manifest)
    }

    /// Keeps a copy.
    pub(super) fn keep_manifest(&self, digest: &Digest, manifest: &Manifest) -> Result<()> {
        let dir = self.root.join("manifests");
        let bytes = manifest
            .to_bytes()
            .map_err(layerpack_store::StoreError::from)?;
        files::replace(&dir, &dir.join(digest.hex()), &[&bytes], false)
    }

    /// Keeps the manifest that came with a candidate, whose store has it as far as that was asked.
    pub(super) fn keep_given(&self, candidate: &Candidate) -> Result<()> {
        match candidate.origin {
            Origin::Kept => Ok(()),
            Origin::Given { .. } => self.keep_manifest(&candidate.digest, &candidate.manifest),
        }
    }

    /// Asks for a manifest that was given, where nothing else is asked of the store.
    pub(super) fn confirm(&self, store: &StoreRef, candidate: &Candidate) -> Result<()> {
        if let Some(digest) = candidate.to_confirm()
            && !self.opened(store)?.has_manifest(digest)?
        {
            return Err(candidate.missing(store).into());
        }
        self.keep_given(candidate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_is_known_by_its_bytes() {
        let given = GivenManifests::of(["{}", "", "no manifest"]);
        assert!(given.get(&Digest::of(b"{}")).is_none());
        assert!(given.get(&Digest::of(b"")).is_none());
    }
}
