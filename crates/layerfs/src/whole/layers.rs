//! One layer's metadata and data for a filesystem that no node serves: verified copies in a
//! directory of the caller's own, which needs no privilege and no particular filesystem.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use layerpack_erofs::{Image, Tree};
use layerpack_store::{Blob as BlobRef, Digest, LayerMap, LayerStore, Locator, Manifest};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::merge::LayerTree;
use crate::cache::{BlobCache, BootId};
use crate::error::{IoContext, LayerfsError, Result};
use crate::fetch::{Blob, BlobParts, Fetcher};
use crate::files;

const META: &str = "meta.erofs";
const MAP: &str = "map";
const LOCATOR: &str = "locator";
const LOCK: &str = "lock";

/// Most mounts of one layer, by one user, each with a cache of its own.
const MAX_PLACES: u32 = 256;

/// A layer that was opened.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) tree: LayerTree,
    /// Its data; `None` if it has none.
    pub(super) blob: Option<Arc<Blob>>,
    /// Keeps other processes out of its cache.
    pub(super) place: Place,
}

/// A directory for one layer's cache, locked.
#[derive(Debug)]
pub(super) struct Place {
    path: PathBuf,
    _lock: fs_err::File,
}

impl Place {
    /// The first directory below `dir` that no other process uses. Mounts of one layer beside
    /// each other have different ones, and each finds again what an earlier one left.
    fn take(dir: &Path) -> Result<Self> {
        for number in 0..MAX_PLACES {
            let path = dir.join(number.to_string());
            private_dir(&path)?;
            let lock_path = path.join(LOCK);
            let lock = fs_err::OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&lock_path)
                .at("open", &lock_path)?;
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { path, _lock: lock }),
                Err(Errno::WOULDBLOCK) => {}
                Err(e) => return Err(e).at("lock", &lock_path),
            }
        }
        Err(LayerfsError::InUse {
            what: format!(
                "{MAX_PLACES} caches below {}, each by another mount",
                dir.display()
            ),
        })
    }
}

/// Makes a directory, and those above it, that only its owner can look into: layers hold files
/// that are not for everybody.
pub(super) fn private_dir(path: &Path) -> Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder.create(path).at("create", path)
}

/// Reads a layer's metadata and opens its data, with what is cached below `cache`.
pub(super) fn open(
    store: &LayerStore,
    manifest: &Manifest,
    cache: &Path,
    boot: BootId,
    fetcher: &Arc<Fetcher>,
    open_store: &crate::StoreOpener,
) -> Result<Opened> {
    let layer = manifest.layer_id();
    let place = Place::take(&cache.join(layer.hex()))?;
    let dir = &place.path;
    let damaged = |what: String| LayerfsError::Damaged {
        layer: *layer.digest(),
        what,
    };
    let meta = verified(dir, META, &manifest.meta, || Ok(store.meta(manifest)?))?;
    let image = Image::open(&meta).map_err(|e| damaged(e.to_string()))?;
    let tree = Tree::from_image(&image).map_err(|e| damaged(e.to_string()))?;
    drop(meta);
    let map = verified(dir, MAP, &manifest.map, || {
        Ok(store.map(manifest)?.to_bytes())
    })?;
    let map = LayerMap::parse(&map).map_err(|e| damaged(e.to_string()))?;
    if map.data_size() != manifest.data_size {
        return Err(damaged(format!(
            "its map speaks of {} bytes of data, its manifest of {}",
            map.data_size(),
            manifest.data_size
        )));
    }
    let mut implicit = std::collections::HashSet::new();
    for path in map.implicit_dirs() {
        let id = tree.resolve(path).filter(|id| tree.is_dir(*id));
        implicit.insert(id.ok_or_else(|| {
            damaged(format!(
                "its map lists the directory {:?}, which its metadata does not have",
                String::from_utf8_lossy(path)
            ))
        })?);
    }
    let blob = if map.data_size() == 0 {
        None
    } else {
        Some(open_blob(
            store, manifest, map, dir, boot, fetcher, open_store,
        )?)
    };
    Ok(Opened {
        tree: LayerTree { tree, implicit },
        blob,
        place,
    })
}

fn open_blob(
    store: &LayerStore,
    manifest: &Manifest,
    map: LayerMap,
    dir: &Path,
    boot: BootId,
    fetcher: &Arc<Fetcher>,
    open_store: &crate::StoreOpener,
) -> Result<Arc<Blob>> {
    let cache = BlobCache::open(
        dir,
        manifest.map.digest.as_bytes(),
        map.data_size(),
        map.extents().len() as u64,
        boot,
    )?;
    let locator = locator(store, manifest, &map, dir)?;
    let url = store.url().to_owned();
    let (opener, address) = (Arc::clone(open_store), url.clone());
    Ok(Blob::new(
        BlobParts {
            manifest: manifest.clone(),
            map,
            locator,
            cache,
            store_url: url,
            store: Some(store.clone()),
            open_store: Arc::new(move || opener(&address)),
        },
        Arc::clone(fetcher),
    ))
}

/// Where the store has the layer's frames, or had them when it last answered.
fn locator(store: &LayerStore, manifest: &Manifest, map: &LayerMap, dir: &Path) -> Result<Locator> {
    let path = dir.join(LOCATOR);
    match store.locator(manifest, map) {
        Ok(locator) => {
            files::replace(dir, &path, &[&locator.to_bytes()], false)?;
            Ok(locator)
        }
        Err(e) => {
            let kept = fs_err::read(&path)
                .ok()
                .and_then(|bytes| Locator::parse(&bytes, &manifest.map.digest, map).ok());
            kept.ok_or(LayerfsError::Store(e))
        }
    }
}

/// The bytes of a small file in the cache if they are what the manifest says, else fetched.
fn verified(
    dir: &Path,
    name: &str,
    blob: &BlobRef,
    fetch: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<Vec<u8>> {
    let path = dir.join(name);
    let fits = fs_err::metadata(&path).is_ok_and(|found| found.len() == blob.size);
    if fits
        && let Ok(bytes) = fs_err::read(&path)
        && Digest::of(&bytes) == blob.digest
    {
        return Ok(bytes);
    }
    let bytes = fetch()?;
    files::replace(dir, &path, &[&bytes], false)?;
    Ok(bytes)
}
