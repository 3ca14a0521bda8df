//! One layer's metadata and data for a filesystem that no node serves: verified copies in a
//! directory of the caller's own, which needs no privilege and no particular filesystem.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use layerpack_erofs::{Image, Tree};
use layerpack_store::{
    Blob as BlobRef, Digest, LayerMap, LayerStore, Locator, Manifest, Parts, PartsWanted,
    StoreError,
};
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
    let kept_meta = kept(dir, META, &manifest.meta);
    let kept_map = kept(dir, MAP, &manifest.map).and_then(|bytes| LayerMap::parse(&bytes).ok());
    // All that is not here at once.
    let parts = store.parts(
        manifest,
        PartsWanted {
            meta: kept_meta.is_none(),
            map: kept_map.is_none(),
            locator: manifest.data_size > 0,
            known_map: kept_map.as_ref(),
        },
    );
    let parts = match parts {
        Ok(parts) => parts,
        // What was read before will do.
        Err(e) if kept_meta.is_some() && kept_map.is_some() => Parts {
            locator: Some(Err(e)),
            ..Parts::default()
        },
        Err(e) => return Err(e.into()),
    };
    let meta = match (kept_meta, parts.meta) {
        (None, Some(read)) => {
            let bytes = read?;
            files::replace(dir, &dir.join(META), &[&bytes], false)?;
            bytes
        }
        (kept, _) => kept.unwrap_or_default(),
    };
    let image = Image::open(&meta).map_err(|e| damaged(e.to_string()))?;
    let tree = Tree::from_image(&image).map_err(|e| damaged(e.to_string()))?;
    drop(meta);
    let map = match (kept_map, parts.map) {
        (Some(map), _) => map,
        (None, Some(read)) => {
            let map = read?;
            files::replace(dir, &dir.join(MAP), &[&map.to_bytes()], false)?;
            map
        }
        (None, None) => store.map(manifest)?,
    };
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
        let said = parts
            .locator
            .unwrap_or_else(|| store.locator(manifest, &map));
        let locator = locator(said, manifest, &map, dir)?;
        let located = Located { map, locator };
        Some(open_blob(
            store, manifest, located, dir, boot, fetcher, open_store,
        )?)
    };
    Ok(Opened {
        tree: LayerTree { tree, implicit },
        blob,
        place,
    })
}

/// Where a layer's chunks are: in its data, and in the store.
struct Located {
    map: LayerMap,
    locator: Locator,
}

fn open_blob(
    store: &LayerStore,
    manifest: &Manifest,
    Located { map, locator }: Located,
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

/// Where the store has the layer's frames, as it said, or had them when it last answered.
fn locator(
    said: Result<Locator, StoreError>,
    manifest: &Manifest,
    map: &LayerMap,
    dir: &Path,
) -> Result<Locator> {
    let path = dir.join(LOCATOR);
    match said {
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

/// The bytes of a small file in the cache if they are what the manifest says.
fn kept(dir: &Path, name: &str, blob: &BlobRef) -> Option<Vec<u8>> {
    let path = dir.join(name);
    if fs_err::metadata(&path).ok()?.len() != blob.size {
        return None;
    }
    let bytes = fs_err::read(&path).ok()?;
    (Digest::of(&bytes) == blob.digest).then_some(bytes)
}
