//! Bringing one layer up and down.
//!
//! Up: metadata, map and locator are fetched (or found in the cache), all at once, and verified, the
//! blob joins the FUSE directory, the kernel mounts EROFS over metadata file and blob. Every
//! step can be repeated, and what a failed one leaves is used or replaced by the next.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use layerpack_erofs::Image;
use layerpack_store::{
    Blob as BlobRef, Digest, LayerId, LayerMap, LayerStore, Locator, Manifest, PartsWanted,
    StoreError,
};
use layerpack_sys::mount;

use super::Node;
use super::caches::NO_STORE;
use super::given::Candidate;
use super::promise::Promise;
use super::types::LayerHandle;
use crate::cache::BlobCache;
use crate::error::{IoContext, LayerfsError, Result};
use crate::fetch::{Blob, BlobParts};
use crate::files;
use crate::sync::Ordering;

/// Name of the metadata image in a layer's cache directory.
pub(super) const META: &str = "meta.erofs";
pub(super) const MAP: &str = "map";
pub(super) const LOCATOR: &str = "locator";

/// A layer on the node. Locked while it goes up or down.
#[derive(Debug, Default)]
pub(super) struct Slot {
    pub(super) up: Option<Up>,
}

/// A layer that is mounted.
#[derive(Debug)]
pub(super) struct Up {
    pub(super) mountpoint: PathBuf,
    pub(super) manifest: Arc<Manifest>,
    pub(super) manifest_digest: Digest,
    /// Address of the store that it comes from.
    pub(super) store: String,
    /// Since when no lease uses it.
    pub(super) idle_since: Instant,
}

/// What is at hand of a layer before its blob is made: read of the store just now, or in the cache.
#[derive(Debug, Default)]
struct Fetched {
    map: Option<LayerMap>,
    /// What the store said, if it was asked.
    locator: Option<Result<Locator>>,
}

/// A layer's store as the node knows it: open already, or by address only (after a restart).
#[derive(Clone)]
pub(super) enum StoreRef {
    Open(LayerStore),
    Address(String),
    /// That of this address is not to be asked: what is on the node has to do.
    Away(String),
}

impl StoreRef {
    pub(super) fn url(&self) -> &str {
        match self {
            Self::Open(store) => store.url(),
            Self::Address(url) | Self::Away(url) => url,
        }
    }
}

impl Node {
    /// Opens a store as it is opened for layers that are mounted.
    ///
    /// # Errors
    /// If the address cannot be used.
    pub fn open_store(&self, url: &str) -> std::result::Result<LayerStore, StoreError> {
        (self.config.open_store)(url)
    }

    pub(super) fn opened(&self, store: &StoreRef) -> Result<LayerStore> {
        match store {
            StoreRef::Open(store) => Ok(store.clone()),
            StoreRef::Address(url) => Ok((self.config.open_store)(url)?),
            StoreRef::Away(url) => Err(LayerfsError::Unasked { url: url.clone() }),
        }
    }

    /// The manifest of that digest, from the node's copy or the store.
    pub(super) fn manifest(&self, store: &StoreRef, digest: &Digest) -> Result<Arc<Manifest>> {
        if let Some(manifest) = self.kept_manifest(digest) {
            return Ok(manifest);
        }
        let manifest = self.opened(store)?.manifest(digest)?;
        self.keep_manifest(digest, &manifest)?;
        Ok(Arc::new(manifest))
    }

    /// Brings a layer up, or finds it up. Fetches what is missing at once, and goes on when the
    /// store's promise to keep the layer is there.
    pub(super) fn bring_up(
        &self,
        store: &StoreRef,
        candidate: &Candidate,
        promise: &Promise,
    ) -> Result<LayerHandle> {
        let manifest = &*candidate.manifest;
        let layer_id = manifest.layer_id();
        let slot = self.slot(layer_id);
        let mut slot = slot.lock();
        if let Some(up) = &slot.up {
            promise.wait()?;
            self.keep_given(candidate)?;
            return Ok(LayerHandle {
                layer_id,
                mountpoint: up.mountpoint.clone(),
            });
        }
        let dir = self.root.join("cache").join(layer_id.hex());
        fs_err::create_dir_all(&dir).at("create", &dir)?;
        let meta = dir.join(META);
        let fetched = self.fetch_parts(store, candidate, &dir)?;
        promise.wait()?;
        self.keep_given(candidate)?;
        // Before the kernel can ask for the blob: a process that takes over must know of it.
        let entry = self.registry.get(layer_id);
        let opens = entry.as_deref().map(|entry| entry.open_count());
        self.served.write(
            layer_id,
            &candidate.digest,
            manifest.data_size,
            store.url(),
            opens,
        )?;
        let made = self.ensure_blob(store, manifest, &dir, fetched);
        let blob = made.inspect_err(|_| {
            if entry.is_none() {
                self.served.remove(layer_id);
            }
        })?;
        let mountpoint = self.root.join("layers").join(layer_id.hex());
        match self.mount_layer(&meta, blob.is_some().then_some(layer_id), &mountpoint) {
            Ok(()) => {}
            Err(e) => {
                self.registry.retire(layer_id);
                return Err(e);
            }
        }
        slot.up = Some(Up {
            mountpoint: mountpoint.clone(),
            manifest: Arc::clone(&candidate.manifest),
            manifest_digest: candidate.digest,
            store: store.url().to_owned(),
            idle_since: Instant::now(),
        });
        Ok(LayerHandle {
            layer_id,
            mountpoint,
        })
    }

    /// Has the verified metadata image in the cache, and asks the store at once for all that is not
    /// there. Reading the image to verify it also leaves it in the page cache, so that the first
    /// walk of the tree waits for no disk.
    fn fetch_parts(&self, store: &StoreRef, candidate: &Candidate, dir: &Path) -> Result<Fetched> {
        let manifest = &*candidate.manifest;
        let path = dir.join(META);
        let kept = read_verified(&path, &manifest.meta);
        let meta_is_here = match kept {
            Some(bytes) => check_meta(manifest, &bytes).map(|()| true)?,
            None => false,
        };
        // A blob that serves on has its map and its locator.
        let layer = manifest.layer_id();
        let serves = (self.registry.get(layer)).is_some_and(|entry| entry.blob().is_some())
            || (self.fetcher.find(layer)).is_some_and(|blob| blob.store_url() != NO_STORE);
        let mut fetched = Fetched::default();
        let mut ask_locator = !serves && manifest.data_size > 0;
        if !serves {
            fetched.map = kept_map(manifest, dir);
            if !matches!(store, StoreRef::Open(_)) {
                // The store's last answer will do: see `ensure_locator`.
                let kept = |map| kept_locator(manifest, map, dir).is_some();
                ask_locator &= !fetched.map.as_ref().is_some_and(kept);
            }
        }
        let ask_map = !serves && fetched.map.is_none();
        if meta_is_here && !ask_map && !ask_locator {
            return Ok(fetched);
        }
        let wanted = PartsWanted {
            meta: !meta_is_here,
            map: ask_map,
            locator: ask_locator,
            known_map: fetched.map.as_ref(),
        };
        let asked = self
            .opened(store)
            .and_then(|open| Ok(open.parts(manifest, wanted)?));
        let parts = match asked {
            Ok(parts) => parts,
            // Where its frames are can be known from before.
            Err(e) if meta_is_here && !ask_map => {
                fetched.locator = Some(Err(e));
                return Ok(fetched);
            }
            Err(e) => return Err(e),
        };
        if let Some(bytes) = parts.meta {
            let bytes = bytes?;
            self.count_meta(bytes.len());
            replace_with(&path, &bytes)?;
            check_meta(manifest, &bytes)?;
        }
        if let Some(map) = parts.map {
            let map = map?;
            let bytes = map.to_bytes();
            self.count_meta(bytes.len());
            replace_with(&dir.join(MAP), &bytes)?;
            fetched.map = Some(map);
        }
        fetched.locator = parts.locator.map(|locator| Ok(locator?));
        Ok(fetched)
    }

    /// The layer's blob, in the FUSE directory; `None` if the layer has no file data.
    fn ensure_blob(
        &self,
        store: &StoreRef,
        manifest: &Manifest,
        dir: &Path,
        fetched: Fetched,
    ) -> Result<Option<Arc<Blob>>> {
        let layer = manifest.layer_id();
        if let Some(entry) = self.registry.get(layer) {
            // Still held by a mount that outlived our own: the same blob serves on.
            self.registry.revive(layer);
            // Taken over and not opened yet, perhaps because that could not be done before.
            return entry
                .opened(&self.recordings, || {
                    let map = self.ensure_map(store, manifest, dir, fetched.map)?;
                    self.make_blob(store, manifest, map, dir, fetched.locator)
                })
                .map(Some);
        }
        if let Some(blob) = self.lingering(layer)? {
            return self.serve(blob).map(Some);
        }
        let map = self.ensure_map(store, manifest, dir, fetched.map)?;
        if map.data_size() == 0 {
            return Ok(None);
        }
        let blob = self.make_blob(store, manifest, map, dir, fetched.locator)?;
        self.serve(blob).map(Some)
    }

    /// Opens the cache of a layer's data and what fills it. `said`: the store's answer about the
    /// locator, if it was asked.
    pub(super) fn make_blob(
        &self,
        store: &StoreRef,
        manifest: &Manifest,
        map: LayerMap,
        dir: &Path,
        said: Option<Result<Locator>>,
    ) -> Result<Arc<Blob>> {
        let layer = manifest.layer_id();
        let locator = self.ensure_locator(store, manifest, &map, dir, said)?;
        let cache = BlobCache::open(
            dir,
            manifest.map.digest.as_bytes(),
            map.data_size(),
            map.extents().len() as u64,
            self.boot,
        )?;
        let url = store.url().to_owned();
        let (opener, address) = (Arc::clone(&self.config.open_store), url.clone());
        let blob = Blob::new(
            BlobParts {
                manifest: manifest.clone(),
                map,
                locator,
                cache,
                store_url: url,
                store: match store {
                    StoreRef::Open(store) => Some(store.clone()),
                    StoreRef::Address(_) | StoreRef::Away(_) => None,
                },
                open_store: Arc::new(move || opener(&address)),
            },
            Arc::clone(&self.fetcher),
        );
        blob.set_pinned(self.is_pinned(layer));
        Ok(blob)
    }

    fn serve(&self, blob: Arc<Blob>) -> Result<Arc<Blob>> {
        self.registry
            .add(Arc::clone(&blob))
            .ok_or_else(|| LayerfsError::Damaged {
                layer: *blob.layer().digest(),
                what: "its identity begins like that of another layer on this node".to_owned(),
            })?;
        Ok(blob)
    }

    /// A blob of the layer that left the directory and is still held by a fetch that outlived its
    /// readers. It serves on: a second one over the same files must not be.
    fn lingering(&self, layer: LayerId) -> Result<Option<Arc<Blob>>> {
        for _ in 0..1000 {
            match self.fetcher.find(layer) {
                None => return Ok(None),
                Some(blob) if blob.store_url() != NO_STORE => return Ok(Some(blob)),
                // One that was only looked at is let go of in a moment.
                Some(blob) => drop(blob),
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Err(LayerfsError::InUse {
            what: format!("the cache of layer {layer}"),
        })
    }

    /// The layer's map, unless it is `known`: it never changes, so a verified copy is as good as the
    /// store's.
    pub(super) fn ensure_map(
        &self,
        store: &StoreRef,
        manifest: &Manifest,
        dir: &Path,
        known: Option<LayerMap>,
    ) -> Result<LayerMap> {
        let map = match known.or_else(|| kept_map(manifest, dir)) {
            Some(map) => map,
            None => {
                let map = self.opened(store)?.map(manifest)?;
                let bytes = map.to_bytes();
                self.count_meta(bytes.len());
                replace_with(&dir.join(MAP), &bytes)?;
                map
            }
        };
        if map.data_size() != manifest.data_size {
            return Err(LayerfsError::Damaged {
                layer: *manifest.layer_id().digest(),
                what: format!(
                    "its map speaks of {} bytes of data, its manifest of {}",
                    map.data_size(),
                    manifest.data_size
                ),
            });
        }
        Ok(map)
    }

    /// Where the store has the layer's frames. That is the store's business and may change, so
    /// a store that is at hand is asked first; after a restart the last answer will do (a fetch
    /// that does not find its frame asks again).
    fn ensure_locator(
        &self,
        store: &StoreRef,
        manifest: &Manifest,
        map: &LayerMap,
        dir: &Path,
        said: Option<Result<Locator>>,
    ) -> Result<Locator> {
        let path = dir.join(LOCATOR);
        let kept = || kept_locator(manifest, map, dir);
        if let (StoreRef::Address(_) | StoreRef::Away(_), None) = (store, &said)
            && let Some(locator) = kept()
        {
            return Ok(locator);
        }
        let said = said.unwrap_or_else(|| {
            self.opened(store)
                .and_then(|store| Ok(store.locator(manifest, map)?))
        });
        match said {
            Ok(locator) => {
                let bytes = locator.to_bytes();
                self.count_meta(bytes.len());
                replace_with(&path, &bytes)?;
                Ok(locator)
            }
            Err(e) => {
                let Some(kept) = kept() else { return Err(e) };
                tracing::warn!(layer = %manifest.layer_id(), error = %e,
                    "the store does not answer; using what it said before");
                Ok(kept)
            }
        }
    }

    /// Mounts EROFS at `mountpoint`.
    pub(super) fn mount_layer(
        &self,
        meta: &Path,
        data: Option<LayerId>,
        mountpoint: &Path,
    ) -> Result<()> {
        fs_err::create_dir_all(mountpoint).at("create", mountpoint)?;
        let device = data.map(|layer| self.blobs_dir().join(layer.hex()));
        let devices: Vec<&Path> = device.iter().map(PathBuf::as_path).collect();
        let fd = self.backing.mount(meta, &devices)?;
        mount::attach(std::os::fd::AsFd::as_fd(&fd), mountpoint)?;
        // An open descriptor of the mount would keep it busy.
        drop(fd);
        Ok(())
    }

    /// Takes a layer down unless something still uses its mount point. Returns whether it is
    /// down.
    pub(super) fn take_down(&self, layer: LayerId, force: bool) -> Result<bool> {
        let slot = self.slot(layer);
        let mut slot = slot.lock();
        let Some(up) = &slot.up else {
            return Ok(true);
        };
        if !force && self.is_leased(layer) {
            return Ok(false);
        }
        match super::unmount_busy(&up.mountpoint, force)? {
            false => return Ok(false),
            true => {
                let _ = fs_err::remove_dir(&up.mountpoint);
            }
        }
        self.registry.retire(layer);
        if self.registry.get(layer).is_none() {
            // One without data; others keep their record until nothing has the blob open.
            self.served.remove(layer);
        }
        slot.up = None;
        Ok(true)
    }

    fn count_meta(&self, len: usize) {
        self.meta_fetched.fetch_add(len as u64, Ordering::Relaxed);
    }
}

/// Looks whether a metadata image fits its manifest.
fn check_meta(manifest: &Manifest, bytes: &[u8]) -> Result<()> {
    let damaged = |what: String| LayerfsError::Damaged {
        layer: *manifest.layer_id().digest(),
        what,
    };
    let image = Image::open(bytes).map_err(|e| damaged(e.to_string()))?;
    let devices = image.devices().len();
    if devices != usize::from(manifest.data_size > 0) {
        return Err(damaged(format!(
            "its metadata names {devices} data files, its manifest says {} bytes of data",
            manifest.data_size
        )));
    }
    Ok(())
}

/// The map in a layer's cache directory.
fn kept_map(manifest: &Manifest, dir: &Path) -> Option<LayerMap> {
    read_verified(&dir.join(MAP), &manifest.map).and_then(|bytes| LayerMap::parse(&bytes).ok())
}

/// The locator in a layer's cache directory.
fn kept_locator(manifest: &Manifest, map: &LayerMap, dir: &Path) -> Option<Locator> {
    let bytes = fs_err::read(dir.join(LOCATOR)).ok()?;
    Locator::parse(&bytes, &manifest.map.digest, map).ok()
}

/// The file's bytes if they are exactly what the manifest says.
pub(super) fn read_verified(path: &Path, blob: &BlobRef) -> Option<Vec<u8>> {
    if fs_err::metadata(path).ok()?.len() != blob.size {
        return None;
    }
    let bytes = fs_err::read(path).ok()?;
    (Digest::of(&bytes) == blob.digest).then_some(bytes)
}

/// Replaces a file of a layer's cache directory. Not synced: what is read later is verified.
fn replace_with(path: &Path, bytes: &[u8]) -> Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    files::replace(dir, path, &[bytes], false)
}
