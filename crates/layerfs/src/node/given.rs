//! Manifests: those that a caller has read already, and what is known of a layer that is to come up.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use layerpack_store::{Digest, Key, LayerId, Manifest, StoreError, at_once};

use super::Node;
use super::layer::StoreRef;
use crate::error::Result;
use crate::files;

/// Manifests that are kept in memory.
const PARSED: usize = 4096;
/// Manifests that are asked for at once.
pub(super) const AT_ONCE: usize = 8;

/// Manifests that a caller has read, so that they need not be fetched again.
#[derive(Debug, Clone, Default)]
pub struct GivenManifests(BTreeMap<Digest, Given>);

/// One of them. It is parsed when it is wanted: most are known already.
#[derive(Debug, Clone)]
struct Given {
    text: Vec<u8>,
    parsed: OnceLock<Option<Manifest>>,
}

impl GivenManifests {
    /// Those among `texts`, each under the digest of its bytes. What is no manifest counts for none.
    pub fn of<T: AsRef<[u8]>>(texts: impl IntoIterator<Item = T>) -> Self {
        let read = texts.into_iter().map(|text| {
            let text = text.as_ref();
            let given = Given {
                text: text.to_vec(),
                parsed: OnceLock::new(),
            };
            (Digest::of(text), given)
        });
        Self(read.collect())
    }

    /// The manifest of this digest, if it was given.
    #[must_use]
    pub fn get(&self, digest: &Digest) -> Option<&Manifest> {
        let given = self.0.get(digest)?;
        let parsed = (given.parsed).get_or_init(|| Manifest::from_bytes(&given.text).ok());
        parsed.as_ref()
    }
}

/// Manifests in memory: stacks come up again and again, and each needs those of all its layers.
#[derive(Debug, Default)]
pub(super) struct Parsed(HashMap<Digest, Arc<Manifest>>);

impl Parsed {
    fn put(&mut self, digest: &Digest, manifest: Arc<Manifest>) {
        // Some two megabytes. Who has more layers in use reads some again.
        if self.0.len() >= PARSED {
            self.0.clear();
        }
        self.0.insert(*digest, manifest);
    }
}

/// Where a manifest is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// The node has a copy.
    Kept,
    /// The caller gave it, who read it before the store promised to keep it.
    Given,
}

/// A layer that is to come up.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) manifest: Arc<Manifest>,
    pub(super) digest: Digest,
    origin: Origin,
}

impl Candidate {
    /// One whose manifest the node has a copy of.
    pub(super) fn kept(manifest: Arc<Manifest>, digest: Digest) -> Self {
        Self {
            manifest,
            digest,
            origin: Origin::Kept,
        }
    }

    pub(super) fn layer(&self) -> LayerId {
        self.manifest.layer_id()
    }

    /// Whether its manifest was read by a caller, some time before.
    pub(super) fn is_given(&self) -> bool {
        self.origin == Origin::Given
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
    /// by the store, which is asked for several at once. With `protect` the store has to promise
    /// to keep them before manifests are read from it.
    pub(super) fn candidates(
        &self,
        store: &StoreRef,
        digests: &[Digest],
        given: &GivenManifests,
        protect: bool,
    ) -> Result<Vec<Candidate>> {
        let at_hand = |digest: &Digest| {
            if let Some(manifest) = self.kept_manifest(digest) {
                return Some(Candidate::kept(manifest, *digest));
            }
            Some(Candidate {
                manifest: Arc::new(given.get(digest)?.clone()),
                digest: *digest,
                origin: Origin::Given,
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
        if protect {
            self.protect(store, digests)?;
        }
        let open = self.opened(store)?;
        let mut fetched = at_once(&missing, AT_ONCE, |digest| {
            let manifest = open.manifest(digest)?;
            self.keep_manifest(digest, &manifest)?;
            Ok::<_, crate::LayerfsError>(Candidate::kept(Arc::new(manifest), *digest))
        })?
        .into_iter();
        Ok(found
            .into_iter()
            .filter_map(|found| found.or_else(|| fetched.next()))
            .collect())
    }

    /// The node's copy of a manifest.
    pub(super) fn kept_manifest(&self, digest: &Digest) -> Option<Arc<Manifest>> {
        if let Some(manifest) = self.parsed.lock().0.get(digest) {
            return Some(Arc::clone(manifest));
        }
        let bytes = fs_err::read(self.root.join("manifests").join(digest.hex())).ok()?;
        if Digest::of(&bytes) != *digest {
            return None;
        }
        let manifest = Arc::new(Manifest::from_bytes(&bytes).ok()?);
        self.parsed.lock().put(digest, Arc::clone(&manifest));
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
            Origin::Given => self.keep_manifest(&candidate.digest, &candidate.manifest),
        }
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
