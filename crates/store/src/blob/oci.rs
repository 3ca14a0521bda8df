//! A store in a repository of a container registry (FORMAT.md, "Registries").
//!
//! Every object is an artifact: a blob with its bytes and a manifest that names it, under a tag
//! that spells the key. The manifest of a reference also lists everything that the layer needs,
//! with the keys, so that a tool that copies this one artifact copies the layer; objects that have
//! no tag of their own after that are found through it.
//!
//! A registry moves tags in one step but cannot create one exclusively:
//! [`PutMode::IfAbsent`] looks first, and of two writers at the same moment both may be told
//! [`PutOutcome::Created`], the last one's bytes stay ([`BlobStore::decides_races`] is false).
//! Names of content cannot suffer from that; for references, publishing makes sure otherwise.

mod artifact;
mod tags;

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use artifact::{Entry, named};
use bytes::Bytes;
use fs_err::File;
use serde::Deserialize;
use tags::Meaning;

use super::{BlobStore, BlobWriter, ObjectInfo, PutMode, PutOutcome};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::Locator;
use crate::key::Key;
use crate::manifest::{MAX_MANIFEST_BYTES, Manifest};
use crate::registry::document::{Descriptor, EMPTY_BYTES};
use crate::registry::{
    Deleted, ManifestName, Registry, RegistryName, RegistryOptions, Sha256, Sha256Hasher, Upload,
};

/// How long is believed what a tag of content means, and that no layer was copied in.
const BELIEVED: Duration = Duration::from_secs(300);
const UNCHANGED: Duration = Duration::from_secs(60);
/// Most objects whose place is remembered.
const MAX_KNOWN: usize = 1 << 16;
/// Objects up to this size wait for their key in memory, in bytes.
const IN_MEMORY: usize = 1 << 20;

/// A store in a registry's repository.
#[derive(Debug)]
pub struct OciStore {
    registry: Registry,
    url: String,
    has_empty: AtomicBool,
    /// Where the bytes of content lie, and since when that is known.
    known: Mutex<HashMap<Key, (Instant, Entry)>>,
    copied: Mutex<Copied>,
}

/// Parts of layers, which may have no tags of their own.
#[derive(Debug, Default)]
struct Copied {
    parts: HashMap<Key, Descriptor>,
    /// When all layers of the repository were looked through.
    looked: Option<Instant>,
}

/// Whether a registry refuses a manifest for a blob that it does not have.
fn misses_blob(error: &StoreError) -> bool {
    matches!(error, StoreError::Io { source, .. }
        if source.to_string().contains("MANIFEST_BLOB_UNKNOWN"))
}

impl OciStore {
    /// The store in the repository `HOST[:PORT]/REPOSITORY`. Nothing is sent yet.
    ///
    /// # Errors
    /// [`StoreError::InvalidUrl`] if `name` is no repository.
    pub fn new(name: &str, options: RegistryOptions) -> Result<Self> {
        let suffix = options
            .plain_http
            .map(|plain| format!("?plain_http={plain}"))
            .unwrap_or_default();
        let url = format!("oci://{name}{suffix}");
        let invalid = |why: String| StoreError::InvalidUrl {
            url: url.clone(),
            why,
        };
        let parsed: RegistryName = name.parse().map_err(|e| invalid(format!("{e}")))?;
        if parsed.manifest().is_some() {
            return Err(invalid(
                "a store is a whole repository: oci://HOST[:PORT]/REPOSITORY without tag or digest"
                    .to_owned(),
            ));
        }
        Ok(Self {
            registry: Registry::with_address(parsed, options, url.clone())?,
            url,
            has_empty: AtomicBool::new(false),
            known: Mutex::new(HashMap::new()),
            copied: Mutex::new(Copied::default()),
        })
    }

    /// The repository.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Key, (Instant, Entry)>> {
        // Facts, each whole.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn copied(&self) -> MutexGuard<'_, Copied> {
        self.copied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the object's tag means now.
    fn tagged(&self, key: &Key) -> Result<Option<Entry>> {
        let tag = tags::tag_of(key);
        let Some(fetched) = self.registry.manifest(&ManifestName::Tag(tag.clone()))? else {
            self.known().remove(key);
            return Ok(None);
        };
        match artifact::read(&fetched) {
            Some((named, entry)) if &named == key => {
                self.remember(key, &entry);
                Ok(Some(entry))
            }
            _ => Err(StoreError::Corrupt {
                store: self.url.clone(),
                key: key.to_string(),
                range: None,
                what: format!("its tag {tag} means something else than this object"),
            }),
        }
    }

    fn remember(&self, key: &Key, entry: &Entry) {
        if is_content(key) {
            let mut known = self.known();
            if known.len() >= MAX_KNOWN {
                known.clear();
            }
            known.insert(key.clone(), (Instant::now(), entry.clone()));
        }
        if !entry.parts.is_empty() {
            let mut copied = self.copied();
            if copied.parts.len() >= MAX_KNOWN * 16 {
                copied.parts.clear();
            }
            for part in &entry.parts {
                if let Some(key) = artifact::key_of(part) {
                    copied.parts.insert(key, part.clone());
                }
            }
        }
    }

    /// Where an object's bytes are, by its tag or through a layer that was copied here.
    fn find(&self, key: &Key) -> Result<Option<Entry>> {
        if let Some(entry) = self.tagged(key)? {
            return Ok(Some(entry));
        }
        if !is_part(key) {
            return Ok(None);
        }
        let part = |copied: &Copied| copied.parts.get(key).cloned();
        let found = {
            let copied = self.copied();
            let fresh = copied.looked.is_some_and(|at| at.elapsed() < UNCHANGED);
            match part(&copied) {
                Some(found) => Some(found),
                None if fresh => return Ok(None),
                None => None,
            }
        };
        let found = match found {
            Some(found) => Some(found),
            None => {
                let layers = self.names("refs/")?;
                self.each(&layers, |key| self.tagged(key).map(drop))?;
                let mut copied = self.copied();
                copied.looked = Some(Instant::now());
                part(&copied)
            }
        };
        Ok(found.map(|blob| Entry {
            manifest: None,
            blob,
            parts: Vec::new(),
            written: None,
        }))
    }

    /// The same, by what was true a moment ago for content, which does not change.
    fn place(&self, key: &Key) -> Result<Option<Entry>> {
        if let Some((since, entry)) = self.known().get(key)
            && since.elapsed() < BELIEVED
        {
            return Ok(Some(entry.clone()));
        }
        self.find(key)
    }

    /// Keys of objects with a prefix, by their tags. The manifests of hashed ones are read.
    fn names(&self, prefix: &str) -> Result<Vec<Key>> {
        let mut keys = Vec::new();
        let mut hashed = Vec::new();
        for tag in self.registry.tags()? {
            match tags::meaning(&tag) {
                Meaning::Object(key) if key.as_str().starts_with(prefix) => keys.push(key),
                Meaning::Hashed => hashed.push(tag),
                Meaning::Object(_) | Meaning::Foreign => {}
            }
        }
        let read = self.each(&hashed, |tag| {
            let name = ManifestName::Tag(tag.clone());
            let fetched = self.registry.manifest(&name)?;
            Ok(fetched
                .as_ref()
                .and_then(artifact::read)
                .map(|(key, _)| key))
        })?;
        keys.extend(
            read.into_iter()
                .flatten()
                .filter(|key| key.as_str().starts_with(prefix)),
        );
        keys.sort();
        Ok(keys)
    }

    /// Does something for each item, several at once; results in the items' order.
    fn each<I: Sync, T: Send>(
        &self,
        items: &[I],
        act: impl Fn(&I) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let workers = self.registry.options().max_concurrency.min(items.len());
        if workers <= 1 {
            return items.iter().map(act).collect();
        }
        let next = AtomicUsize::new(0);
        let results = Mutex::new(Vec::with_capacity(items.len()));
        let failed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    while !failed.load(Ordering::Relaxed) {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        let Some(item) = items.get(at) else { return };
                        let result = act(item);
                        if result.is_err() {
                            failed.store(true, Ordering::Relaxed);
                        }
                        results
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .push((at, result));
                    }
                });
            }
        });
        let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        results.sort_by_key(|(at, _)| *at);
        results.into_iter().map(|(_, result)| result).collect()
    }

    /// The bytes of an object that was found.
    fn read(&self, key: &Key, entry: &Entry, max_len: u64) -> Result<Vec<u8>> {
        if entry.blob.size > max_len {
            return Err(StoreError::TooLarge {
                store: self.url.clone(),
                key: key.to_string(),
                size: entry.blob.size,
                limit: max_len,
            });
        }
        if let Some(bytes) = artifact::inlined(&entry.blob) {
            return Ok(bytes);
        }
        self.registry
            .blob(&entry.blob.digest, entry.blob.size)?
            .ok_or_else(|| self.missing(key))
    }

    fn missing(&self, key: &Key) -> StoreError {
        StoreError::Missing {
            store: self.url.clone(),
            key: key.to_string(),
        }
    }

    fn write(
        &self,
        key: &Key,
        digest: Sha256,
        upload: &Upload,
        mode: PutMode,
    ) -> Result<PutOutcome> {
        let before = match mode {
            PutMode::IfAbsent if self.tagged(key)?.is_some() => return Ok(PutOutcome::Exists),
            PutMode::IfAbsent => None,
            PutMode::Overwrite if is_content(key) => None,
            PutMode::Overwrite => self
                .registry
                .manifest_digest(&ManifestName::Tag(tags::tag_of(key)))?,
        };
        if !self.has_empty.load(Ordering::Relaxed) {
            let empty = Upload::Bytes(Bytes::from_static(EMPTY_BYTES));
            self.registry
                .push_blob(&Sha256::of(EMPTY_BYTES), &empty, &[])?;
            self.has_empty.store(true, Ordering::Relaxed);
        }
        match mode {
            PutMode::IfAbsent => drop(self.registry.push_blob(&digest, upload, &[])?),
            // What is there may be damaged.
            PutMode::Overwrite => self.registry.send_blob(&digest, upload)?,
        }
        let mut blob = artifact::describe(key, digest, upload.size());
        let mut parts = Vec::new();
        if let Upload::Bytes(bytes) = upload {
            blob = artifact::inline(blob, bytes);
            if key.as_str().starts_with("refs/") {
                parts = self.parts(bytes)?;
            }
        }
        // A manifest that is replaced is deleted by its digest: it must not come again.
        let nonce = (mode == PutMode::Overwrite && !is_content(key)).then(|| fastrand::u64(..));
        // Manifests of content are the same whoever writes them, and when.
        let written = self.registry.now().filter(|_| !is_content(key));
        let mut manifest = artifact::manifest(key, blob.clone(), parts.clone(), nonce, written);
        manifest.subject = self.subject(key)?;
        let name = ManifestName::Tag(tags::tag_of(key));
        // A registry in which others write the same blobs just then may not see them yet.
        let mut tries = 3;
        let digest = loop {
            match self.registry.put_referrer(&name, &manifest) {
                Err(error) if tries > 0 && misses_blob(&error) => {
                    tries -= 1;
                    tracing::debug!(%key, "its blobs are sent again: {error}");
                    let empty = Upload::Bytes(Bytes::from_static(EMPTY_BYTES));
                    self.registry.send_blob(&Sha256::of(EMPTY_BYTES), &empty)?;
                    self.registry.send_blob(&digest, upload)?;
                }
                done => break done?,
            }
        };
        let entry = Entry {
            manifest: Some((digest, 0)),
            blob,
            parts,
            written,
        };
        self.remember(key, &entry);
        if let Some(before) = before.filter(|before| *before != digest) {
            // Where that is not allowed, it stays without a tag until the registry is cleaned up.
            if let Err(error) = self.registry.delete_manifest(&before) {
                tracing::debug!(%key, "the replaced manifest stays: {error}");
            }
        }
        Ok(PutOutcome::Created)
    }

    /// What a reference reaches, as far as it is there; nothing if the object is no reference.
    fn parts(&self, reference: &[u8]) -> Result<Vec<Descriptor>> {
        let mut parts = Vec::new();
        let Ok(reference) = serde_json::from_slice::<Referring>(reference) else {
            return Ok(parts);
        };
        let key = Key::manifest(&reference.manifest);
        let Some(entry) = self.find(&key)? else {
            return Ok(parts);
        };
        let bytes = self.read(&key, &entry, MAX_MANIFEST_BYTES)?;
        parts.push(entry.blob);
        let Ok(manifest) = Manifest::from_bytes(&bytes) else {
            return Ok(parts);
        };
        let locator = Key::locator(&manifest.map.digest);
        for key in [
            Key::meta(&manifest.meta.digest),
            Key::map(&manifest.map.digest),
        ] {
            parts.extend(self.find(&key)?.map(|entry| entry.blob));
        }
        let Some(entry) = self.find(&locator)? else {
            return Ok(parts);
        };
        let room = artifact::MAX_PARTS.saturating_sub(parts.len() + 1);
        let start = entry.blob.size.min(80 + 40 * room as u64);
        let start = self
            .registry
            .blob_range(&entry.blob.digest, entry.blob.size, 0..start)?;
        parts.push(entry.blob);
        // It is a hint, and may be damaged: then the layer is listed without its packs.
        let packs: Vec<Key> = Locator::peek_packs(&start, room)
            .map(|packs| packs.iter().map(|pack| Key::pack(&pack.id)).collect())
            .unwrap_or_default();
        let found = self.each(&packs, |key| self.place(key))?;
        parts.extend(found.into_iter().flatten().map(|entry| entry.blob));
        for part in &mut parts {
            part.data = None;
        }
        Ok(parts)
    }

    /// What an object says something of: a layer, for its signatures and profiles.
    fn subject(&self, key: &Key) -> Result<Option<Descriptor>> {
        let mut segments = key.as_str().split('/');
        if !matches!(segments.next(), Some("signatures" | "profiles")) {
            return Ok(None);
        }
        let Some(digest) = segments.next().and_then(|hex| Digest::from_hex(hex).ok()) else {
            return Ok(None);
        };
        let object = Key::manifest(&digest);
        let Some(entry) = self.tagged(&object)? else {
            return Ok(None);
        };
        let bytes = self.read(&object, &entry, MAX_MANIFEST_BYTES)?;
        let layer = match Manifest::from_bytes(&bytes) {
            Ok(manifest) => self.tagged(&Key::reference(&manifest.reference()))?,
            Err(_) => None,
        };
        let manifest = layer.unwrap_or(entry).manifest;
        Ok(manifest.map(|(digest, size)| {
            Descriptor::new(crate::registry::document::MANIFEST, digest, size)
        }))
    }
}

/// The part of a reference that is looked at here.
#[derive(Deserialize)]
struct Referring {
    manifest: Digest,
}

/// Whether a key names content: whoever writes it writes the same.
fn is_content(key: &Key) -> bool {
    let named = ["packs/", "index/", "manifests/", "meta/", "maps/"];
    named.iter().any(|family| key.as_str().starts_with(family)) && key.digest().is_some()
}

/// Whether an object may be a part of a copied layer.
fn is_part(key: &Key) -> bool {
    (is_content(key) && !key.as_str().starts_with("index/"))
        || (key.as_str().starts_with("locators/") && key.digest().is_some())
}

impl BlobStore for OciStore {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        let get = || match self.find(key)? {
            Some(entry) => self.read(key, &entry, max_len).map(Some),
            None => Ok(None),
        };
        get().map_err(|error| named(error, key.as_str()))
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        let get = |entry: Option<Entry>| {
            let blob = entry.ok_or_else(|| self.missing(key))?.blob;
            self.registry
                .blob_range(&blob.digest, blob.size, range.clone())
        };
        let mut result = self.place(key).and_then(get);
        if matches!(result, Err(StoreError::Missing { .. })) && self.known().remove(key).is_some() {
            result = self.find(key).and_then(get);
        }
        result.map_err(|error| named(error, key.as_str()))
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        let upload = Upload::Bytes(Bytes::copy_from_slice(bytes));
        self.write(key, Sha256::of(bytes), &upload, mode)
            .map_err(|error| named(error, key.as_str()))
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        Ok(Box::new(OciWriter {
            store: self,
            buffer: Vec::new(),
            file: None,
            size: 0,
            hasher: Sha256Hasher::new(),
        }))
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        let tagged = self
            .tagged(key)
            .map_err(|error| named(error, key.as_str()))?;
        let size = tagged.map(|entry| entry.blob.size);
        Ok(size.or_else(|| self.copied().parts.get(key).map(|part| part.size)))
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let list = || {
            let keys = self.names(prefix)?;
            self.each(&keys, |key| {
                let known = self.known().get(key).cloned();
                let entry = match known {
                    Some((since, entry)) if since.elapsed() < BELIEVED => Some(entry),
                    _ => match self.tagged(key) {
                        // Something else with a tag like ours.
                        Err(StoreError::Corrupt { .. }) => None,
                        other => other?,
                    },
                };
                Ok(entry.map(|entry| ObjectInfo {
                    key: key.clone(),
                    size: entry.blob.size,
                    modified: entry.written,
                }))
            })
        };
        let listed = list().map_err(|error| named(error, &format!("{prefix}…")))?;
        Ok(listed.into_iter().flatten().collect())
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        let delete = || {
            self.known().remove(key);
            let Some((manifest, _)) = self.tagged(key)?.and_then(|entry| entry.manifest) else {
                return Ok(false);
            };
            self.known().remove(key);
            Ok(self.registry.delete_manifest(&manifest)? == Deleted::Deleted)
        };
        delete().map_err(|error| named(error, key.as_str()))
    }

    fn url(&self) -> String {
        self.url.clone()
    }
}

/// An object on its way: kept here until its key and digest are known.
struct OciWriter<'a> {
    store: &'a OciStore,
    buffer: Vec<u8>,
    file: Option<File>,
    size: u64,
    hasher: Sha256Hasher,
}

impl OciWriter<'_> {
    fn fail(&self, source: io::Error) -> StoreError {
        let (store, key) = (self.store.url.clone(), "a temporary file".to_owned());
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                StoreError::NoSpace { store, key, source }
            }
            _ => StoreError::Io {
                operation: "write",
                store,
                key,
                source,
            },
        }
    }

    /// Moves what is in memory to the file.
    fn spill(&mut self) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                let file = match &self.store.registry.options().spool {
                    Some(dir) => {
                        fs_err::create_dir_all(dir)?;
                        tempfile::tempfile_in(dir)?
                    }
                    None => tempfile::tempfile()?,
                };
                none.insert(File::from_parts(file, "an object on its way"))
            }
        };
        file.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }
}

impl BlobWriter for OciWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        self.size += bytes.len() as u64;
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() > IN_MEMORY {
            self.spill().map_err(|e| self.fail(e))?;
        }
        Ok(())
    }

    fn commit(mut self: Box<Self>, key: &Key, mode: PutMode) -> Result<PutOutcome> {
        if self.file.is_some() {
            self.spill().map_err(|e| self.fail(e))?;
        }
        let upload = match self.file {
            Some(file) => Upload::File(Arc::new(file), self.size),
            None => Upload::Bytes(self.buffer.into()),
        };
        let digest = self.hasher.finish();
        self.store
            .write(key, digest, &upload, mode)
            .map_err(|error| named(error, key.as_str()))
    }
}
