//! What the node's cache holds, and taking it out: lists, pins, eviction, checks.
//!
//! A layer's cache is a directory. While its blob is served, its data goes run by run
//! (`crate::fetch`); otherwise the directory goes whole, unless the layer is mounted (one
//! without data has no blob), leased or pinned.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::UNIX_EPOCH;

use layerpack_store::{Digest, LayerId, LayerMap, LayerStore, Locator, Manifest};
use serde::{Deserialize, Serialize};

use super::Node;
use super::layer::{LOCATOR, MAP, META, read_verified};
use crate::cache::{BlobCache, DATA};
use crate::error::{IoContext, LayerfsError, Result};
use crate::fetch::{Blob, BlobParts, Checked, ColdCache};
use crate::files;

/// A layer in the node's cache. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedLayer {
    /// Identity of the layer's content.
    pub layer_id: LayerId,
    /// A `kind/name:version` that it was mounted as, if the node knows one.
    pub reference: Option<String>,
    /// Whether its data is served now.
    pub served: bool,
    /// Whether eviction leaves it alone.
    pub pinned: bool,
    /// Size of its data, if the node knows it.
    pub data_bytes: Option<u64>,
    /// Data that is here, if it is served now.
    pub cached_bytes: Option<u64>,
    /// What its files take up on disk.
    pub disk_bytes: u64,
    /// Data evicted since it was last opened.
    pub evicted_bytes: u64,
    /// When something was last written of it or it was opened, in seconds since 1970.
    pub used: u64,
}

/// State of the node's cache. Sizes are in bytes, counters begin with the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheStatus {
    /// The limit, if there is one.
    pub max_bytes: Option<u64>,
    /// What all caches take up on disk.
    pub used_bytes: u64,
    /// Runs of extents and whole caches evicted.
    pub evictions: u64,
    /// What that gave back to the disk.
    pub freed_bytes: u64,
    /// Fetched and not kept, for want of room.
    pub refused_bytes: u64,
    /// Layers in order of identity.
    pub layers: Vec<CachedLayer>,
}

/// What an eviction came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    /// Bytes that it gave back to the disk.
    pub freed_bytes: u64,
    /// Layers that were left alone because they are pinned.
    pub pinned: Vec<LayerId>,
}

/// What a check of one layer's cache found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheChecked {
    /// The layer.
    pub layer_id: LayerId,
    /// A name of it, if the node knows one.
    pub reference: Option<String>,
    /// Extents of data that were compared with their digests.
    pub extents: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Of these, extents that were wrong: they are fetched again when somebody wants them.
    pub damaged: u64,
    /// Extents that are wrong and could not be taken out, because they were in use all the time.
    pub stuck: u64,
    /// Why nothing could be checked; it is all fetched or checked again before it is used.
    pub unchecked: Option<String>,
    /// The cache cannot be opened, so the layer cannot be mounted either until its directory, which
    /// `unchecked` names, is deleted.
    #[serde(default)]
    pub unusable: bool,
}

/// Why a cache that nobody serves from cannot be looked at.
struct Unchecked {
    why: String,
    /// As [`CacheChecked::unusable`].
    unusable: bool,
}

impl From<&str> for Unchecked {
    fn from(why: &str) -> Self {
        Self {
            why: why.to_owned(),
            unusable: false,
        }
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Pins {
    format: u32,
    layers: BTreeSet<LayerId>,
}

const PINS_FORMAT: u32 = 1;
const PINS: &str = "pins.json";
/// Address of the store of a blob that is only looked at.
pub(super) const NO_STORE: &str = "";

/// The layers that eviction leaves alone.
pub(super) fn load_pins(root: &Path, problems: &mut Vec<String>) -> BTreeSet<LayerId> {
    let path = root.join(PINS);
    let bytes = match fs_err::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return BTreeSet::new(),
        Err(e) => {
            problems.push(format!("nothing is pinned: {e}"));
            return BTreeSet::new();
        }
    };
    match serde_json::from_slice::<Pins>(&bytes) {
        Ok(pins) if pins.format == PINS_FORMAT => pins.layers,
        _ => {
            problems.push(format!(
                "nothing is pinned: {} is damaged or of another version; pin anew",
                path.display()
            ));
            BTreeSet::new()
        }
    }
}

/// Bytes on disk of the files in a directory, of `data` and of the others, and the time of the
/// last change.
fn disk_usage(dir: &Path) -> (u64, u64, u64) {
    let (mut data, mut rest, mut used) = (0, 0, 0);
    for entry in fs_err::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(found) = entry.metadata() else {
            continue;
        };
        let bytes = found.blocks().saturating_mul(512);
        if entry.file_name() == DATA {
            data += bytes;
        } else {
            rest += bytes;
            let seconds = found
                .modified()
                .ok()
                .and_then(|at| at.duration_since(UNIX_EPOCH).ok())
                .map_or(0, |d| d.as_secs());
            used = used.max(seconds);
        }
    }
    (data, rest, used)
}

/// The node's caches that are not served.
pub(super) struct Cold(pub(super) Weak<Node>);

impl ColdCache for Cold {
    fn bytes(&self) -> u64 {
        let Some(node) = self.0.upgrade() else {
            return 0;
        };
        let served = node.fetcher.served();
        node.cache_dirs()
            .into_iter()
            .map(|layer| {
                let (data, rest, _) = disk_usage(&node.cache_dir(layer));
                let data = if served.contains_key(&layer) { 0 } else { data };
                rest + data
            })
            .sum()
    }

    fn evict(&self, want: u64) -> u64 {
        let Some(node) = self.0.upgrade() else {
            return 0;
        };
        let mut candidates: Vec<(u64, LayerId)> = node
            .cache_dirs()
            .into_iter()
            .filter(|layer| !node.is_pinned(*layer))
            .map(|layer| (disk_usage(&node.cache_dir(layer)).2, layer))
            .collect();
        candidates.sort();
        let mut freed = 0;
        for (_, layer) in candidates {
            if freed >= want {
                break;
            }
            freed += node.drop_cold(layer);
        }
        freed
    }
}

impl Node {
    fn cache_dir(&self, layer: LayerId) -> std::path::PathBuf {
        self.root.join("cache").join(layer.hex())
    }

    /// Layers that have a cache directory.
    fn cache_dirs(&self) -> Vec<LayerId> {
        let entries = fs_err::read_dir(self.root.join("cache"));
        let mut layers: Vec<LayerId> = entries
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name();
                let digest: Digest = format!("b3:{}", name.to_str()?).parse().ok()?;
                Some(LayerId::from_digest(digest))
            })
            .collect();
        layers.sort();
        layers
    }

    pub(super) fn is_pinned(&self, layer: LayerId) -> bool {
        self.pins.lock().contains(&layer)
    }

    /// Removes a cache that nothing uses. Returns the bytes that this freed.
    fn drop_cold(&self, layer: LayerId) -> u64 {
        let slot = self.slot(layer);
        // Locked while the layer goes up or down.
        let Some(slot) = slot.try_lock() else {
            return 0;
        };
        let used = slot.up.is_some() || self.is_leased(layer) || self.registry.get(layer).is_some();
        if used || self.fetcher.find(layer).is_some() {
            return 0;
        }
        let dir = self.cache_dir(layer);
        let (data, rest, _) = disk_usage(&dir);
        match fs_err::remove_dir_all(&dir) {
            Ok(()) => data + rest,
            Err(e) => {
                tracing::warn!(layer = %layer, error = %e, "a cache cannot be removed");
                0
            }
        }
    }

    /// Manifests that the node has, by the layers that they are of.
    fn known_manifests(&self) -> BTreeMap<LayerId, Manifest> {
        let mut known = BTreeMap::new();
        let entries = fs_err::read_dir(self.root.join("manifests"));
        for entry in entries.into_iter().flatten().flatten() {
            if let Ok(bytes) = fs_err::read(entry.path())
                && entry.file_name().to_str() == Some(Digest::of(&bytes).hex().as_str())
                && let Ok(manifest) = Manifest::from_bytes(&bytes)
            {
                known.entry(manifest.layer_id()).or_insert(manifest);
            }
        }
        known
    }

    /// Lines on what lies in the cache and belongs to no layer that the node knows. It stays: a layer
    /// may come back, and then finds its data.
    #[must_use]
    pub fn unknown_caches(&self) -> Vec<String> {
        let known = self.known_manifests();
        let (mut layers, mut bytes) = (0_u64, 0);
        for layer in self.cache_dirs() {
            if !known.contains_key(&layer) {
                let (data, rest, _) = disk_usage(&self.cache_dir(layer));
                layers += 1;
                bytes += data + rest;
            }
        }
        let mut lines = Vec::new();
        if layers > 0 {
            lines.push(format!(
                "caches of {layers} layers without a manifest here ({bytes} bytes): kept for their next use"
            ));
        }
        let entries = fs_err::read_dir(self.root.join("cache"));
        for entry in entries.into_iter().flatten().flatten() {
            let name = entry.file_name();
            let is_layer = name
                .to_str()
                .is_some_and(|name| format!("b3:{name}").parse::<Digest>().is_ok());
            if !is_layer {
                lines.push(format!(
                    "{} is of no layer: left alone, delete it if you do not know it",
                    entry.path().display()
                ));
            }
        }
        lines
    }

    /// What the cache holds.
    #[must_use]
    pub fn cache_status(&self) -> CacheStatus {
        let used_bytes = self.fetcher.measure();
        let known = self.known_manifests();
        let served = self.fetcher.served();
        let layers = self
            .cache_dirs()
            .into_iter()
            .map(|layer| {
                let blob = served.get(&layer);
                let (data, rest, used) = disk_usage(&self.cache_dir(layer));
                let manifest = known.get(&layer);
                CachedLayer {
                    layer_id: layer,
                    reference: manifest.map(|m| m.reference().to_string()),
                    served: blob.is_some(),
                    pinned: self.is_pinned(layer),
                    data_bytes: manifest.map(|m| m.data_size),
                    cached_bytes: blob.map(|b| b.cached_bytes()),
                    disk_bytes: data + rest,
                    evicted_bytes: blob.map_or(0, |b| b.evicted_bytes()),
                    used,
                }
            })
            .collect();
        let space = self.fetcher.space();
        CacheStatus {
            max_bytes: space.max,
            used_bytes,
            evictions: space.evictions,
            freed_bytes: space.freed,
            refused_bytes: space.refused,
            layers,
        }
    }

    /// Has eviction leave layers alone (`pinned`) or not. What is not cached of them is not
    /// fetched by this; layers that are not here yet may be pinned.
    ///
    /// # Errors
    /// When the change cannot be stored; it is then not in force.
    pub fn cache_pin(&self, layers: &[LayerId], pinned: bool) -> Result<()> {
        let mut pins = self.pins.lock();
        let mut next = pins.clone();
        for layer in layers {
            if pinned {
                next.insert(*layer);
            } else {
                next.remove(layer);
            }
        }
        let path = self.root.join(PINS);
        let bytes = serde_json::to_vec_pretty(&Pins {
            format: PINS_FORMAT,
            layers: next.clone(),
        })
        .map_err(std::io::Error::other)
        .at("write", &path)?;
        files::replace(&self.root, &path, &[&bytes], true)?;
        *pins = next;
        drop(pins);
        for layer in layers {
            if let Some(blob) = self.fetcher.find(*layer) {
                blob.set_pinned(self.is_pinned(*layer));
            }
        }
        Ok(())
    }

    /// Layers that eviction leaves alone.
    #[must_use]
    pub fn cache_pins(&self) -> Vec<LayerId> {
        self.pins.lock().iter().copied().collect()
    }

    /// Evicts what is cached of these layers, or of all (`None`), except what is in use right now
    /// and what is pinned. With `bytes`, only until so many are free, by the rules of pressure
    /// (and then `layers` does not matter).
    pub fn cache_evict(&self, layers: Option<&[LayerId]>, bytes: Option<u64>) -> Evicted {
        if let Some(bytes) = bytes {
            return Evicted {
                freed_bytes: self.fetcher.evict_bytes(bytes),
                pinned: Vec::new(),
            };
        }
        let layers = layers.map_or_else(|| self.cache_dirs(), <[LayerId]>::to_vec);
        let (pinned, free): (Vec<_>, Vec<_>) =
            layers.into_iter().partition(|layer| self.is_pinned(*layer));
        let freed_bytes = free
            .into_iter()
            .map(|layer| match self.fetcher.find(layer) {
                Some(blob) => self.fetcher.evict_blob(&blob),
                None => self.drop_cold(layer),
            })
            .sum();
        let _ = self.fetcher.measure();
        Evicted {
            freed_bytes,
            pinned,
        }
    }

    /// Reads what is cached of these layers, or of all (`None`), and compares it with its digests.
    ///
    /// # Errors
    /// [`LayerfsError::NotCached`] if one of them is not here; when what is wrong cannot be taken
    /// out.
    pub fn cache_verify(&self, layers: Option<&[LayerId]>) -> Result<Vec<CacheChecked>> {
        let here = self.cache_dirs();
        let wanted = layers.map_or_else(|| here.clone(), <[LayerId]>::to_vec);
        if let Some(layer) = wanted.iter().find(|layer| !here.contains(layer)) {
            return Err(LayerfsError::NotCached {
                layer: *layer.digest(),
            });
        }
        let known = self.known_manifests();
        wanted
            .into_iter()
            .map(|layer| {
                let manifest = known.get(&layer);
                let (found, unchecked, unusable) = match self.verify_one(layer, manifest)? {
                    Ok(found) => (found, None, false),
                    Err(Unchecked { why, unusable }) => (Checked::default(), Some(why), unusable),
                };
                Ok(CacheChecked {
                    layer_id: layer,
                    reference: manifest.map(|m| m.reference().to_string()),
                    extents: found.extents,
                    bytes: found.bytes,
                    damaged: found.damaged,
                    stuck: found.stuck,
                    unchecked,
                    unusable,
                })
            })
            .collect()
    }

    /// Checks one layer's data; the inner error says why nothing could be checked.
    fn verify_one(
        &self,
        layer: LayerId,
        manifest: Option<&Manifest>,
    ) -> Result<Result<Checked, Unchecked>> {
        let slot = self.slot(layer);
        // Nobody brings the layer up while its cache is open here.
        let up = slot.lock();
        if let Some(blob) = self.fetcher.find(layer) {
            drop(up);
            return Ok(Ok(blob.verify_cache()?));
        }
        if self.registry.get(layer).is_some() {
            let why = "it was taken over from another process and cannot be opened";
            return Ok(Err(Unchecked::from(why)));
        }
        match self.open_cold(layer, manifest) {
            Ok(Some(blob)) => Ok(Ok(blob.verify_cache()?)),
            Ok(None) => Ok(Ok(Checked::default())),
            Err(why) => Ok(Err(why)),
        }
    }

    /// Opens the cache of a layer that is not served, to look at it. `None` if it has no data. The
    /// caller has the layer's slot locked until the blob is gone.
    fn open_cold(
        &self,
        layer: LayerId,
        manifest: Option<&Manifest>,
    ) -> Result<Option<Arc<Blob>>, Unchecked> {
        let manifest = manifest.ok_or("the node does not know its manifest")?;
        let dir = self.cache_dir(layer);
        if read_verified(&dir.join(META), &manifest.meta).is_none() {
            return Err(Unchecked::from("its metadata is missing or damaged"));
        }
        let map = read_verified(&dir.join(MAP), &manifest.map)
            .and_then(|bytes| LayerMap::parse(&bytes).ok())
            .ok_or("its map is missing or damaged")?;
        if map.data_size() == 0 {
            return Ok(None);
        }
        let locator = fs_err::read(dir.join(LOCATOR))
            .ok()
            .and_then(|bytes| Locator::parse(&bytes, &manifest.map.digest, &map).ok())
            .ok_or("its locator is missing or damaged")?;
        let cache = BlobCache::open(
            &dir,
            manifest.map.digest.as_bytes(),
            map.data_size(),
            map.extents().len() as u64,
            self.boot,
        )
        .map_err(|error| Unchecked {
            why: format!(
                "{error}: delete the directory {} while nothing of the layer is mounted",
                dir.display()
            ),
            unusable: true,
        })?;
        let parts = BlobParts {
            manifest: manifest.clone(),
            map,
            locator,
            cache,
            store_url: NO_STORE.to_owned(),
            store: None,
            open_store: Arc::new(|| layerpack_store::open_url(NO_STORE).map(LayerStore::new)),
        };
        Ok(Some(Blob::new(parts, Arc::clone(&self.fetcher))))
    }
}
