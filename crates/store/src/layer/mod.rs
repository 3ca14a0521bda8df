//! Layers in a store: reading ([`LayerStore`]), verifying, and writing ([`LayerWriter`]).

pub(crate) mod again;
mod chunks;
mod claim;
mod dedupe;
mod frames;
mod hashing;
mod map_image;
mod meta_image;
mod named;
mod objects;
mod pack_writer;
mod part;
mod passed;
mod pipeline;
mod publish;
mod read;
mod reframe;
pub(crate) mod repack;
mod staged;
mod together;
mod trust;
mod verify;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

pub use map_image::{MapImage, MapWriter};
pub(crate) use meta_image::stored_len;
pub use meta_image::{MetaImage, MetaWriter};
pub use part::SeedMarker;
pub(crate) use passed::Tables;
pub use passed::{FrameChunks, StoredFrame};
pub use publish::{Draft, PublishOutcome, Published, Sealed};
pub use read::{Delivery, FetchStats, ReadLimits};
pub use staged::{Staged, publish_all};
pub use together::{Parts, PartsWanted};
pub use verify::{Damage, VerifyReport};
pub use writer::{FileChunks, LayerWriter, WriteStats, WriterOptions};

use crate::blob::{BlobStore, PutMode, PutOutcome};
use crate::codec::decompress_object;
use crate::digest::Digest;
use crate::error::{FormatError, Result, StoreError};
use crate::format::locator::{Locator, MAX_LOCATOR_BYTES};
use crate::format::map::LayerMap;
use crate::key::Key;
use crate::manifest::{Blob, MAX_MANIFEST_BYTES, Manifest};
use crate::reference::Reference;

/// Largest marker or reference object in bytes.
pub(crate) const MAX_SMALL: u64 = 64 << 10;

/// Layers in one store. Cheap to clone; nothing is read until asked for.
#[derive(Debug, Clone)]
pub struct LayerStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    blobs: Arc<dyn BlobStore>,
    url: String,
    /// Set once the store's marker was read and understood.
    known: OnceLock<()>,
    /// Held while it is read: of several who need it at once one reads it.
    looking: Mutex<()>,
    /// Where writers keep their copy of the index.
    index_cache: Option<PathBuf>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Marker {
    format: u32,
    incompat: Vec<String>,
}

/// A reference in a list. A damaged reference does not hide the others.
#[derive(Debug)]
pub struct RefEntry {
    /// The reference.
    pub reference: Reference,
    /// Digest of its manifest, or why it cannot be told.
    pub manifest: Result<Digest>,
    /// When it was published, by the store's clock; `None` where the store does not say.
    pub modified: Option<SystemTime>,
}

/// The bytes of a store's marker.
fn marker() -> Vec<u8> {
    serde_json::to_vec(&Marker {
        format: 1,
        incompat: Vec::new(),
    })
    .unwrap_or_default()
}

impl LayerStore {
    /// Layers in `blobs`. No input or output happens here.
    #[must_use]
    pub fn new(blobs: Arc<dyn BlobStore>) -> Self {
        let url = blobs.url();
        Self {
            inner: Arc::new(Inner {
                blobs,
                url,
                known: OnceLock::new(),
                looking: Mutex::new(()),
                index_cache: None,
            }),
        }
    }

    /// The same store through a wrapper of its backend. What is known of the marker stays known.
    pub(crate) fn over(&self, blobs: Arc<dyn BlobStore>) -> Self {
        let url = blobs.url();
        Self {
            inner: Arc::new(Inner {
                blobs,
                url,
                known: self.inner.known.clone(),
                looking: Mutex::new(()),
                index_cache: self.inner.index_cache.clone(),
            }),
        }
    }

    /// The same store, whose writers keep a copy of the index in the directory `cache` (of all
    /// stores: each has a directory of its own in it). Without one, every writer reads the whole
    /// index.
    #[must_use]
    pub fn with_index_cache(self, cache: impl Into<PathBuf>) -> Self {
        Self {
            inner: Arc::new(Inner {
                blobs: Arc::clone(&self.inner.blobs),
                url: self.inner.url.clone(),
                known: self.inner.known.clone(),
                looking: Mutex::new(()),
                index_cache: Some(cache.into()),
            }),
        }
    }

    /// Where writers keep their copy of the index.
    #[must_use]
    pub fn index_cache(&self) -> Option<&Path> {
        self.inner.index_cache.as_deref()
    }

    /// The backend.
    #[must_use]
    pub fn blobs(&self) -> &Arc<dyn BlobStore> {
        &self.inner.blobs
    }

    /// The store's address.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.inner.url
    }

    /// Whether the marker was read and understood.
    fn knows_marker(&self) -> bool {
        self.inner.known.get().is_some()
    }

    /// Reads the marker once. `false`: there is none, so nothing was ever written here.
    pub(crate) fn check_marker(&self) -> Result<bool> {
        if self.knows_marker() {
            return Ok(true);
        }
        let _looking = (self.inner.looking.lock()).unwrap_or_else(PoisonError::into_inner);
        if self.knows_marker() {
            return Ok(true);
        }
        let key = Key::marker();
        let found = self.get_checked(&key, MAX_SMALL, &mut |bytes| {
            let marker: Marker = serde_json::from_slice(bytes)
                .map_err(|e| self.bad(&key, &FormatError::new("store marker", e.to_string())))?;
            if marker.format != 1 {
                let what = format!("the store's format is {}, known is 1", marker.format);
                return Err(self.bad(&key, &FormatError::newer("store marker", what)));
            }
            if let Some(unknown) = marker.incompat.first() {
                let what = format!("the store uses the feature {unknown:?}");
                return Err(self.bad(&key, &FormatError::newer("store marker", what)));
            }
            Ok(())
        })?;
        if found.is_none() {
            return Ok(false);
        }
        let _ = self.inner.known.set(());
        Ok(true)
    }

    /// Whether there is a store at the address: its marker is there, or layers are that lost it. A
    /// backend that cannot list is taken for one.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn exists(&self) -> Result<bool> {
        self.is_there(true)
    }

    /// That there is a store at the address, as [`LayerStore::exists`] tells.
    ///
    /// # Errors
    /// [`StoreError::NoStore`], or what the backend fails with.
    pub fn must_exist(&self) -> Result<()> {
        if self.exists()? {
            return Ok(());
        }
        Err(self.no_store(String::new()))
    }

    fn no_store(&self, wanted: String) -> StoreError {
        StoreError::NoStore {
            wanted,
            store: self.inner.url.clone(),
        }
    }

    /// `unlisted`: the answer for a backend that cannot list, if there is no marker.
    fn is_there(&self, unlisted: bool) -> Result<bool> {
        if self.check_marker()? {
            return Ok(true);
        }
        for family in ["refs/", "packs/"] {
            match self.inner.blobs.list(family) {
                Ok(listed) if listed.is_empty() => {}
                Ok(_) => return Ok(true),
                Err(StoreError::NotSupported { .. }) => return Ok(unlisted),
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// The error for a name that is not in the store: `unknown`, or that there is no store.
    pub(crate) fn not_here(&self, unknown: StoreError) -> StoreError {
        match self.is_there(false) {
            Ok(false) => self.no_store(match unknown {
                StoreError::UnknownReference { reference, .. } => reference.to_string(),
                StoreError::UnknownChannel { channel, .. } => channel,
                StoreError::NoProfile { name, .. } => name,
                _ => String::new(),
            }),
            // Why it cannot be told is no better an answer.
            Ok(true) | Err(_) => unknown,
        }
    }

    fn unknown_reference(&self, reference: &Reference) -> StoreError {
        self.not_here(StoreError::UnknownReference {
            reference: reference.clone(),
            store: self.inner.url.clone(),
        })
    }

    /// Makes the store one if it is none yet. A warning if the marker was lost: looked at before
    /// the marker is written, so that another writer's first layer is not taken for an old one.
    pub(crate) fn ensure_marker(&self) -> Result<Option<String>> {
        if self.check_marker()? {
            return Ok(None);
        }
        let lost = self.lost_marker()?;
        match self
            .inner
            .blobs
            .put(&Key::marker(), &marker(), PutMode::IfAbsent)?
        {
            PutOutcome::Created => {
                if let Err(error) = self.inner.blobs.reserve(true) {
                    tracing::debug!("no room is kept for collecting on a full disk: {error}");
                }
                Ok(lost.map(|error| {
                    tracing::warn!("written anew: {error}");
                    format!("written anew: {error}")
                }))
            }
            PutOutcome::Exists => self.check_marker().map(|_| None),
        }
    }

    /// Whether the marker is of a store that is newer than this program, as far as it can be read.
    pub(crate) fn has_newer_marker(&self) -> Result<bool> {
        let bytes = self.inner.blobs.get(&Key::marker(), MAX_SMALL)?;
        let text = bytes.unwrap_or_default();
        let Ok(marker) = serde_json::from_slice::<serde_json::Value>(&text) else {
            return Ok(false);
        };
        let format = marker.get("format");
        let features = marker.get("incompat").and_then(|list| list.as_array());
        Ok(format.is_some_and(|format| *format != 1)
            || features.is_some_and(|features| !features.is_empty()))
    }

    /// Writes a marker in the place of one that is damaged.
    pub(crate) fn replace_marker(&self) -> Result<()> {
        let key = Key::marker();
        self.inner
            .blobs
            .put(&key, &marker(), PutMode::Overwrite)
            .map(|_| ())
    }

    /// The damage, if the store has references but no marker.
    pub(crate) fn lost_marker(&self) -> Result<Option<StoreError>> {
        if self.check_marker()? || self.inner.blobs.list("refs/")?.is_empty() {
            return Ok(None);
        }
        Ok(Some(self.missing(&Key::marker())))
    }

    pub(crate) fn bad(&self, key: &Key, error: &FormatError) -> StoreError {
        StoreError::format(&self.inner.url, key.as_str(), error)
    }

    pub(crate) fn missing(&self, key: &Key) -> StoreError {
        StoreError::Missing {
            store: self.inner.url.clone(),
            key: key.as_str().to_owned(),
        }
    }

    pub(crate) fn corrupt(&self, key: &Key, what: impl Into<String>) -> StoreError {
        StoreError::Corrupt {
            store: self.inner.url.clone(),
            key: key.as_str().to_owned(),
            range: None,
            what: what.into(),
        }
    }

    /// Digest of the manifest that a version is published as.
    ///
    /// # Errors
    /// [`StoreError::UnknownReference`] if there is no such version, [`StoreError::NoStore`] if
    /// there is no store, [`StoreError::DamagedReference`] if it cannot be told what it names.
    pub fn resolve(&self, reference: &Reference) -> Result<Digest> {
        self.beside_marker(|| self.resolve_now(reference))
    }

    fn resolve_now(&self, reference: &Reference) -> Result<Digest> {
        self.read_ref(reference)?
            .ok_or_else(|| self.unknown_reference(reference))
    }

    /// Digest of the manifest that a reference names; `None` if there is none.
    pub(crate) fn read_ref(&self, reference: &Reference) -> Result<Option<Digest>> {
        Ok(self.read_named(reference)?.map(|named| named.manifest))
    }

    fn damaged_ref(&self, reference: &Reference, what: String) -> StoreError {
        StoreError::DamagedReference {
            reference: Box::new(reference.clone()),
            store: self.inner.url.clone(),
            key: Key::reference(reference).to_string(),
            what,
        }
    }

    /// The manifest with this digest, verified.
    ///
    /// # Errors
    /// [`StoreError::Missing`], or [`StoreError::Corrupt`] if its bytes are not those of `digest`.
    pub fn manifest(&self, digest: &Digest) -> Result<Manifest> {
        self.beside_marker(|| self.manifest_now(digest))
    }

    fn manifest_now(&self, digest: &Digest) -> Result<Manifest> {
        let key = Key::manifest(digest);
        self.need_checked(&key, MAX_MANIFEST_BYTES, &mut |bytes| {
            let found = Digest::of(bytes);
            if &found != digest {
                return Err(self.corrupt(&key, format!("its digest is {found}")));
            }
            Manifest::from_bytes(bytes).map_err(|e| self.bad(&key, &e))
        })
    }

    /// Resolves a reference and reads its manifest: from the copy in the reference, if that has the
    /// digest which the reference names.
    ///
    /// # Errors
    /// As [`LayerStore::resolve`] and [`LayerStore::manifest`];
    /// [`StoreError::DamagedReference`] if the manifest is for another reference.
    pub fn load(&self, reference: &Reference) -> Result<(Digest, Manifest)> {
        self.beside_marker(|| self.load_now(reference))
    }

    fn load_now(&self, reference: &Reference) -> Result<(Digest, Manifest)> {
        let named = self
            .read_named(reference)?
            .ok_or_else(|| self.unknown_reference(reference))?;
        let digest = named.manifest;
        if let Some(manifest) = named.copy_for(reference) {
            return Ok((digest, manifest));
        }
        let error = match self.manifest_of(reference, &digest) {
            Ok(manifest) => return Ok((digest, manifest)),
            Err(error) if error.is_damage() => error,
            Err(error) => return Err(error),
        };
        // A reference has no digest: one that came with a wrong bit names a manifest that is not
        // there. Read again, it names another.
        for _ in 0..2 {
            match self.read_ref(reference)? {
                Some(again) if again != digest => {
                    return Ok((again, self.manifest_of(reference, &again)?));
                }
                Some(_) => {}
                None => break,
            }
        }
        Err(error)
    }

    fn manifest_of(&self, reference: &Reference, digest: &Digest) -> Result<Manifest> {
        let manifest = self.manifest_now(digest)?;
        if &manifest.reference() != reference {
            let what = format!("it names the manifest of {}", manifest.reference());
            return Err(self.damaged_ref(reference, what));
        }
        Ok(manifest)
    }

    /// A layer's metadata image: raw bytes, verified.
    ///
    /// # Errors
    /// [`StoreError::Missing`] or [`StoreError::Corrupt`].
    pub fn meta(&self, manifest: &Manifest) -> Result<Vec<u8>> {
        self.beside_marker(|| self.meta_now(manifest))
    }

    fn meta_now(&self, manifest: &Manifest) -> Result<Vec<u8>> {
        self.object(&Key::meta(&manifest.meta.digest), &manifest.meta)
    }

    /// A layer's map, verified.
    ///
    /// # Errors
    /// [`StoreError::Missing`] or [`StoreError::Corrupt`].
    pub fn map(&self, manifest: &Manifest) -> Result<LayerMap> {
        self.beside_marker(|| self.map_now(manifest))
    }

    fn map_now(&self, manifest: &Manifest) -> Result<LayerMap> {
        let key = Key::map(&manifest.map.digest);
        let bytes = self.object(&key, &manifest.map)?;
        let map = LayerMap::parse(&bytes).map_err(|e| self.bad(&key, &e))?;
        if map.data_size() != manifest.data_size {
            let what = format!(
                "its data size is {}, the manifest says {}",
                map.data_size(),
                manifest.data_size
            );
            return Err(self.corrupt(&key, what));
        }
        Ok(map)
    }

    /// Where the map's extents lie in this store; checked to fit the map.
    ///
    /// # Errors
    /// [`StoreError::Missing`] or [`StoreError::Corrupt`].
    pub fn locator(&self, manifest: &Manifest, map: &LayerMap) -> Result<Locator> {
        self.locator_of(&manifest.map.digest, map)
    }

    fn locator_of(&self, map_digest: &Digest, map: &LayerMap) -> Result<Locator> {
        let key = Key::locator(map_digest);
        self.beside_marker(|| {
            self.need_checked(&key, MAX_LOCATOR_BYTES, &mut |bytes| {
                Locator::parse(bytes, map_digest, map).map_err(|e| self.bad(&key, &e))
            })
        })
    }

    /// A compressed object by the digest and size of its raw bytes. Reads no marker.
    fn object(&self, key: &Key, blob: &Blob) -> Result<Vec<u8>> {
        self.need_checked(key, max_stored(blob.size), &mut |stored| {
            let raw = decompress_object(stored, blob.size).map_err(|e| self.bad(key, &e))?;
            let digest = Digest::of(&raw);
            if digest != blob.digest {
                return Err(self.corrupt(key, format!("the digest of its raw bytes is {digest}")));
            }
            Ok(raw)
        })
    }

    /// All published versions, sorted. A reference that cannot be read fails the call: see
    /// [`LayerStore::entries`] for one that goes on.
    ///
    /// # Errors
    /// If the backend fails or a reference is damaged.
    pub fn list(&self) -> Result<Vec<(Reference, Digest)>> {
        self.entries()?
            .into_iter()
            .map(|e| Ok((e.reference, e.manifest?)))
            .collect()
    }

    /// All published versions, sorted, each with its manifest's digest or its own error. Objects
    /// under `refs/` that are no references are not listed.
    ///
    /// # Errors
    /// If the list itself cannot be read.
    pub fn entries(&self) -> Result<Vec<RefEntry>> {
        self.check_marker()?;
        let mut entries = Vec::new();
        for object in self.inner.blobs.list("refs/")? {
            let Some(reference) = object.key.to_reference() else {
                continue;
            };
            match self.read_ref(&reference) {
                Ok(None) => {} // removed meanwhile
                Ok(Some(digest)) => entries.push(RefEntry {
                    reference,
                    manifest: Ok(digest),
                    modified: object.modified,
                }),
                Err(error) => entries.push(RefEntry {
                    reference,
                    manifest: Err(error),
                    modified: object.modified,
                }),
            }
        }
        entries.sort_by(|a, b| a.reference.cmp(&b.reference));
        Ok(entries)
    }

    /// Whether a reference exists, damaged or not: whether [`LayerStore::remove`] has something to
    /// remove.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn has_reference(&self, reference: &Reference) -> Result<bool> {
        self.check_marker()?;
        Ok(self.inner.blobs.size(&Key::reference(reference))?.is_some())
    }

    /// Removes a reference, also a damaged one: it is not read. The objects that it named stay
    /// until garbage is collected.
    ///
    /// # Errors
    /// [`StoreError::UnknownReference`] if there is no such version, [`StoreError::NoStore`] if
    /// there is no store.
    pub fn remove(&self, reference: &Reference) -> Result<()> {
        self.check_marker()?;
        if self.inner.blobs.delete(&Key::reference(reference))? {
            Ok(())
        } else {
            Err(self.unknown_reference(reference))
        }
    }

    /// Begins to write a layer, under a session that keeps collectors from deleting what it relies
    /// on.
    ///
    /// # Errors
    /// If the options are not allowed, the session cannot be registered, or the store's index
    /// cannot be read.
    pub fn writer(&self, options: WriterOptions) -> Result<LayerWriter> {
        LayerWriter::new(self.guarded()?, options)
    }
}

/// Largest stored size of an object whose raw size is `raw`: what zstd may add, and room for
/// frame headers.
const fn max_stored(raw: u64) -> u64 {
    raw.saturating_add(raw >> 7).saturating_add(64 << 10)
}
