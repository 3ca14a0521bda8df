//! What layers take up, and what they share.
//!
//! A chunk counts once for each layer that has it, and is shared if another layer of the store has
//! it, too. What a chunk takes up in the store is its part of the frame that it lies in.
//!
//! Memory: about 70 bytes per different chunk of the store.

use std::collections::{HashMap, HashSet};

use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::Locator;
use crate::format::map::LayerMap;
use crate::key::Key;
use crate::layer::LayerStore;
use crate::manifest::Manifest;
use crate::reference::{Kind, Reference};

/// A number of different chunks and what they take up in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amount {
    /// Chunks.
    pub chunks: u64,
    /// Their raw bytes.
    pub raw_bytes: u64,
    /// Their part of the frames that they lie in, in bytes.
    pub stored_bytes: u64,
}

impl Amount {
    fn add(&mut self, chunk: Self) {
        self.chunks += chunk.chunks;
        self.raw_bytes += chunk.raw_bytes;
        self.stored_bytes += chunk.stored_bytes;
    }
}

/// What one layer takes up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerUsage {
    /// The layer.
    pub reference: Reference,
    /// Digest of its manifest.
    pub digest: Digest,
    /// All its chunks.
    pub all: Amount,
    /// Chunks that no other layer has: what removing the layer would free.
    pub unique: Amount,
    /// Metadata image, map and locator as stored, in bytes.
    pub metadata_bytes: u64,
}

/// What the layers of one kind take up together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KindUsage {
    /// The kind.
    pub kind: Kind,
    /// Layers of this kind.
    pub layers: u64,
    /// Their different chunks.
    pub all: Amount,
    /// Chunks that no layer of another kind has.
    pub unique: Amount,
}

/// What the layers of a store take up.
#[derive(Debug, Default)]
pub struct Usage {
    /// Layers in the order of their references.
    pub layers: Vec<LayerUsage>,
    /// Kinds that have layers.
    pub kinds: Vec<KindUsage>,
    /// Different chunks of all layers.
    pub total: Amount,
    /// Layers that cannot be read; they do not count.
    pub unreadable: Vec<(Reference, StoreError)>,
}

/// A chunk of the store.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// First layer that has it: index.
    layer: u32,
    shared: bool,
    /// Bit per kind.
    kinds: u8,
    raw: u32,
    stored: u32,
}

impl Known {
    fn amount(&self) -> Amount {
        Amount {
            chunks: 1,
            raw_bytes: self.raw.into(),
            stored_bytes: self.stored.into(),
        }
    }
}

fn kind_bit(kind: Kind) -> u8 {
    Kind::ALL
        .iter()
        .position(|&k| k == kind)
        .and_then(|at| u32::try_from(at).ok())
        .and_then(|at| 1_u8.checked_shl(at))
        .unwrap_or(0)
}

/// Stored bytes of a chunk: its part of the frame.
fn stored_part(locator: &Locator, extent: usize, len: u32) -> u32 {
    let frame = locator
        .extent(extent)
        .and_then(|(frame, _)| usize::try_from(frame).ok())
        .and_then(|frame| locator.frames().get(frame));
    frame.map_or(len, |f| {
        let part = u64::from(len) * u64::from(f.stored_len) / u64::from(f.raw_len.max(1));
        u32::try_from(part).unwrap_or(u32::MAX)
    })
}

/// The different chunks of a layer: digest, raw and stored bytes.
fn chunks(map: &LayerMap, locator: &Locator) -> Vec<(Digest, u32, u32)> {
    let mut seen = HashSet::new();
    map.extents()
        .iter()
        .enumerate()
        .filter(|(_, extent)| seen.insert(extent.digest))
        .map(|(i, extent)| {
            (
                extent.digest,
                extent.len,
                stored_part(locator, i, extent.len),
            )
        })
        .collect()
}

/// What the store's layers take up.
///
/// # Errors
/// If the backend fails; layers that are damaged are in the answer.
pub fn usage(store: &LayerStore) -> Result<Usage> {
    let mut usage = Usage::default();
    let mut known: HashMap<Digest, Known> = HashMap::new();
    for entry in store.entries()? {
        let reference = entry.reference;
        let read = entry.manifest.and_then(|digest| {
            let manifest = store.manifest(&digest)?;
            let map = store.map(&manifest)?;
            let locator = store.locator(&manifest, &map)?;
            let metadata = metadata_bytes(store, &manifest)?;
            Ok((digest, chunks(&map, &locator), metadata))
        });
        let (digest, chunks, metadata_bytes) = match read {
            Ok(read) => read,
            Err(error) if error.is_damage() => {
                usage.unreadable.push((reference, error));
                continue;
            }
            Err(error) => return Err(error),
        };
        let number = u32::try_from(usage.layers.len()).unwrap_or(u32::MAX);
        let bit = kind_bit(reference.kind);
        let mut all = Amount::default();
        for (digest, raw, stored) in chunks {
            let chunk = Known {
                layer: number,
                shared: false,
                kinds: bit,
                raw,
                stored,
            };
            all.add(chunk.amount());
            known
                .entry(digest)
                .and_modify(|k| {
                    k.shared = true;
                    k.kinds |= bit;
                })
                .or_insert(chunk);
        }
        usage.layers.push(LayerUsage {
            reference,
            digest,
            all,
            unique: Amount::default(),
            metadata_bytes,
        });
    }
    let mut kinds: Vec<KindUsage> = Kind::ALL
        .iter()
        .map(|&kind| KindUsage {
            kind,
            layers: usage
                .layers
                .iter()
                .filter(|l| l.reference.kind == kind)
                .count() as u64,
            all: Amount::default(),
            unique: Amount::default(),
        })
        .collect();
    for chunk in known.values() {
        usage.total.add(chunk.amount());
        let layer = usize::try_from(chunk.layer)
            .ok()
            .and_then(|l| usage.layers.get_mut(l));
        if let Some(layer) = layer.filter(|_| !chunk.shared) {
            layer.unique.add(chunk.amount());
        }
        for kind in &mut kinds {
            let bit = kind_bit(kind.kind);
            if chunk.kinds & bit != 0 {
                kind.all.add(chunk.amount());
            }
            if chunk.kinds == bit {
                kind.unique.add(chunk.amount());
            }
        }
    }
    kinds.retain(|k| k.layers > 0);
    usage.kinds = kinds;
    Ok(usage)
}

fn metadata_bytes(store: &LayerStore, manifest: &Manifest) -> Result<u64> {
    let mut bytes = 0;
    for key in [
        Key::meta(&manifest.meta.digest),
        Key::map(&manifest.map.digest),
        Key::locator(&manifest.map.digest),
    ] {
        bytes += store.blobs().size(&key)?.unwrap_or(0);
    }
    Ok(bytes)
}

/// What a layer shares with another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shared {
    /// The other layer.
    pub reference: Reference,
    /// Chunks of the first layer that the other has, too.
    pub amount: Amount,
}

/// What a layer takes up, and what each other layer of the store shares with it, most first.
/// Layers that share nothing or cannot be read are left out.
///
/// # Errors
/// Damage of the layer itself; if the backend fails.
pub fn shared_with(
    store: &LayerStore,
    reference: &Reference,
    manifest: &Manifest,
) -> Result<(Amount, Vec<Shared>)> {
    let map = store.map(manifest)?;
    let locator = store.locator(manifest, &map)?;
    let mut all = Amount::default();
    let mut own: HashMap<Digest, Amount> = HashMap::new();
    for (digest, raw, stored) in chunks(&map, &locator) {
        let amount = Amount {
            chunks: 1,
            raw_bytes: raw.into(),
            stored_bytes: stored.into(),
        };
        all.add(amount);
        own.insert(digest, amount);
    }
    drop((map, locator));
    let mut shared = Vec::new();
    for entry in store.entries()? {
        if &entry.reference == reference {
            continue;
        }
        let other = entry
            .manifest
            .and_then(|digest| store.manifest(&digest))
            .and_then(|manifest| store.map(&manifest));
        let map = match other {
            Ok(map) => map,
            Err(error) if error.is_damage() => continue,
            Err(error) => return Err(error),
        };
        let mut amount = Amount::default();
        let mut seen = HashSet::new();
        for extent in map.extents() {
            if let Some(chunk) = own.get(&extent.digest)
                && seen.insert(extent.digest)
            {
                amount.add(*chunk);
            }
        }
        if amount.chunks > 0 {
            shared.push(Shared {
                reference: entry.reference,
                amount,
            });
        }
    }
    shared.sort_by(|a, b| {
        (b.amount.raw_bytes, &a.reference).cmp(&(a.amount.raw_bytes, &b.reference))
    });
    Ok((all, shared))
}
