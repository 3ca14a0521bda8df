//! Objects that do not depend on each other, asked for at the same time.
//!
//! What a reader waits for is then as many round trips as its objects are deep, not as many as they
//! are: a reference, which has its manifest with it, and then metadata, map and locator at once. The store's marker is
//! read beside the first of them. Nothing that came is given out before all was understood that it
//! rests on: without a marker that this version understands, the rest is thrown away.

use super::LayerStore;
use super::again::{is_wrong, reread};
use crate::blob::Span;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::{Locator, MAX_LOCATOR_BYTES};
use crate::format::map::LayerMap;
use crate::key::Key;
use crate::manifest::Manifest;
use crate::parallel::{Bounds, Order, at_once, for_each};
use crate::reference::Reference;

/// References or manifests that are asked for at once.
const AT_ONCE: usize = 8;

/// Which objects of a layer are to be read.
#[derive(Debug, Clone, Copy, Default)]
pub struct PartsWanted<'a> {
    /// The metadata image.
    pub meta: bool,
    /// The map.
    pub map: bool,
    /// The locator. Without `map`, `known_map` says what it must fit.
    pub locator: bool,
    /// The layer's map, if it is at hand.
    pub known_map: Option<&'a LayerMap>,
}

/// What came of [`PartsWanted`]; `None` where nothing was asked for.
#[derive(Debug, Default)]
pub struct Parts {
    /// Raw bytes of the metadata image, verified.
    pub meta: Option<Result<Vec<u8>>>,
    /// The map, verified.
    pub map: Option<Result<LayerMap>>,
    /// The locator, which fits the map. `None` also if that did not come.
    pub locator: Option<Result<Locator>>,
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Meta,
    Map,
    Locator,
}

/// Its answer.
enum Came {
    Meta(Result<Vec<u8>>),
    Map(Result<LayerMap>),
    /// As it came: the map that it must fit may not be there yet.
    Locator(Result<Vec<u8>>),
}

impl LayerStore {
    /// Does `work`, which reads of the store, and reads the marker at the same time if nobody did
    /// before.
    pub(crate) fn beside_marker<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.knows_marker() {
            return work();
        }
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("store-read".to_owned());
            let Ok(marker) = thread.spawn_scoped(scope, || self.check_marker()) else {
                // The system has no thread to give.
                self.check_marker()?;
                return work();
            };
            let done = work();
            match marker.join() {
                Ok(marker) => marker.and(done),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// As [`LayerStore::load`] of each reference, several at once, in their order.
    ///
    /// # Errors
    /// Those of [`LayerStore::load`], of the first in order that fails.
    pub fn load_all(&self, references: &[Reference]) -> Result<Vec<(Digest, Manifest)>> {
        self.beside_marker(|| at_once(references, AT_ONCE, |reference| self.load_now(reference)))
    }

    /// As [`LayerStore::manifest`] of each digest, several at once, in their order.
    ///
    /// # Errors
    /// Those of [`LayerStore::manifest`], of the first in order that fails.
    pub fn manifests(&self, digests: &[Digest]) -> Result<Vec<Manifest>> {
        self.beside_marker(|| at_once(digests, AT_ONCE, |digest| self.manifest_now(digest)))
    }

    /// Whether the store has the manifest of this digest. It is not read.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn has_manifest(&self, digest: &Digest) -> Result<bool> {
        Ok(self.blobs().size(&Key::manifest(digest))?.is_some())
    }

    /// Reads objects of a layer, all at once, each verified against the manifest. One that cannot be
    /// had takes nothing from the others.
    ///
    /// # Errors
    /// If the store's marker cannot be read or understood. Errors of single objects are with them:
    /// those of [`LayerStore::meta`], [`LayerStore::map`] and [`LayerStore::locator`].
    pub fn parts(&self, manifest: &Manifest, wanted: PartsWanted<'_>) -> Result<Parts> {
        let asked: Vec<Part> = [
            (Part::Meta, wanted.meta),
            (Part::Map, wanted.map),
            (Part::Locator, wanted.locator),
        ]
        .into_iter()
        .filter_map(|(part, wanted)| wanted.then_some(part))
        .collect();
        let bounds = Bounds {
            threads: asked.len(),
            bytes: u64::MAX,
        };
        self.beside_marker(|| {
            let mut parts = Parts::default();
            let mut locator = None;
            for_each(
                &asked,
                bounds,
                Order::Free,
                |_| 0,
                |part| match part {
                    Part::Meta => Came::Meta(self.meta_now(manifest)),
                    Part::Map => Came::Map(self.map_now(manifest)),
                    Part::Locator => Came::Locator(self.locator_bytes(&manifest.map.digest)),
                },
                |_, came| {
                    match came {
                        Came::Meta(meta) => parts.meta = Some(meta),
                        Came::Map(map) => parts.map = Some(map),
                        Came::Locator(bytes) => locator = Some(bytes),
                    }
                    Ok::<(), StoreError>(())
                },
            )?;
            let map = match &parts.map {
                Some(Ok(map)) => Some(map),
                Some(Err(_)) => None,
                None => wanted.known_map,
            };
            parts.locator = locator
                .zip(map)
                .map(|(bytes, map)| self.locator_from(&manifest.map.digest, map, bytes));
            Ok(parts)
        })
    }

    fn locator_bytes(&self, map_digest: &Digest) -> Result<Vec<u8>> {
        let key = Key::locator(map_digest);
        LOCATOR
            .read(&**self.blobs(), &key)?
            .ok_or_else(|| self.missing(&key))
    }

    /// The locator in bytes that came; read again if they are wrong.
    fn locator_from(
        &self,
        map_digest: &Digest,
        map: &LayerMap,
        came: Result<Vec<u8>>,
    ) -> Result<Locator> {
        let key = Key::locator(map_digest);
        let mut check =
            |bytes: &[u8]| Locator::parse(bytes, map_digest, map).map_err(|e| self.bad(&key, &e));
        match came.and_then(|bytes| check(&bytes)) {
            Err(error) if is_wrong(&error) => {
                reread(&**self.blobs(), &key, &LOCATOR, error, &mut check)
            }
            other => other,
        }
    }
}

/// What is read of a locator: all of it.
const LOCATOR: Span = Span::Whole {
    max_len: MAX_LOCATOR_BYTES,
};
