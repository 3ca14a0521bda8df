//! Publishing: index, metadata, map, locator, manifest, reference, each durable before the next.
//! An object that exists already is checked before a layer relies on it, and replaced if it is
//! damaged; a locator is replaced unless it is the same: publishing again heals.

use std::collections::{BTreeMap, HashMap};

use super::LayerStore;
use super::pack_writer::WrittenPack;
use super::writer::{LayerWriter, Place, WriteStats};
use super::{RefObject, max_stored};
use crate::blob::{PutMode, PutOutcome};
use crate::codec::Compressor;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::index::{IndexEntry, IndexPack, IndexSegment};
use crate::format::locator::{FrameLoc, Locator, MAX_LOCATOR_BYTES, PackLoc};
use crate::format::map::LayerMap;
use crate::format::pack::PackFrame;
use crate::key::Key;
use crate::manifest::{Blob, Counts, Features, LayerId, Manifest, ParentRef};
use crate::reference::Reference;

/// What is to be published. Nothing in it may depend on time, threads or the store.
#[derive(Debug, Clone)]
pub struct Draft {
    /// Under which name.
    pub reference: Reference,
    /// See [`Manifest::platform`].
    pub platform: String,
    /// See [`Manifest::parents`].
    pub parents: Vec<ParentRef>,
    /// How much is in the layer.
    pub counts: Counts,
    /// See [`Manifest::parameters`]; publishing adds `chunker`.
    pub parameters: BTreeMap<String, String>,
    /// The user's labels.
    pub labels: BTreeMap<String, String>,
    /// Further facts.
    pub annotations: BTreeMap<String, String>,
    /// The metadata image.
    pub meta: Vec<u8>,
    /// The map; every chunk in it was added to the writer or is in the store.
    pub map: LayerMap,
}

impl Draft {
    /// A draft with empty optional fields.
    #[must_use]
    pub fn new(reference: Reference, meta: Vec<u8>, map: LayerMap) -> Self {
        Self {
            reference,
            platform: String::new(),
            parents: Vec::new(),
            counts: Counts::default(),
            parameters: BTreeMap::new(),
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            meta,
            map,
        }
    }
}

/// Whether publishing changed the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishOutcome {
    /// The version is new.
    Created,
    /// The version was published before with the same content.
    Already,
}

/// A published layer.
#[derive(Debug, Clone)]
pub struct Published {
    /// Its name.
    pub reference: Reference,
    /// Digest of its manifest.
    pub digest: Digest,
    /// Identity of its content.
    pub layer_id: LayerId,
    /// Whether it is new.
    pub outcome: PublishOutcome,
    /// What was written.
    pub stats: WriteStats,
    /// Damage found in the store and worked around or healed, one line each.
    pub warnings: Vec<String>,
}

/// A frame that the layer uses, before its place in the locator is known.
pub(super) struct Used {
    pack: PackLoc,
    frame: PackFrame,
}

impl LayerWriter {
    /// Publishes the layer: waits until its packs are durable, then writes what describes them, and
    /// last the reference.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] if the version is published with other content;
    /// [`StoreError::InvalidInput`] if the draft breaks a limit or its map names a chunk that was
    /// not added and is not in the store; else what went wrong in writing. After an error the
    /// reference is as it was before (or, if an answer was lost, published): run again.
    pub fn finish(mut self, draft: Draft) -> Result<Published> {
        self.flush()?;
        let mut warnings: Vec<String> = self.store.ensure_marker()?.into_iter().collect();
        let map_bytes = draft.map.to_bytes();
        let manifest = self.manifest(&draft, &map_bytes)?;
        let invalid = |e: crate::error::FormatError| StoreError::InvalidInput {
            object: draft.reference.to_string(),
            what: e.to_string(),
        };
        let manifest_bytes = manifest.to_bytes().map_err(invalid)?;
        let digest = Digest::of(&manifest_bytes);

        let Self {
            store,
            options,
            mut index,
            mut known,
            mut stored,
            tickets,
            pipeline,
            mut stats,
            ..
        } = self;
        let packs = pipeline.finish()?;
        stats.new_packs = packs.len() as u64;
        stats.new_bytes += packs.iter().map(|p| p.size).sum::<u64>();
        stats.new_bytes += store.put_index(&packs)?;

        // Before more is written: the version may be taken.
        let conflict = |existing: Digest| StoreError::Conflict {
            reference: Box::new(draft.reference.clone()),
            store: store.url().to_owned(),
            existing,
            new: digest,
        };
        if let Some(existing) = store
            .read_ref(&draft.reference)?
            .filter(|existing| existing != &digest)
        {
            return Err(conflict(existing));
        }

        // Chunks of the map that were not added: of layers that this one is made from.
        for extent in draft.map.extents() {
            if known.contains_key(&extent.digest) {
                continue;
            }
            if let Some(chunk) = index.locate(&extent.digest)? {
                known.insert(
                    extent.digest,
                    (
                        Place::Stored {
                            index: stored.len(),
                        },
                        chunk.len,
                    ),
                );
                stored.push(chunk);
            } else if let Some(damage) = index.damage_of(&extent.digest)? {
                return Err(damage);
            }
        }
        warnings.extend(index.take_warnings());
        let places = resolve(&known, &stored, &tickets, &packs, &draft)?;
        let locator = build_locator(manifest.map.digest, &draft.map, places).map_err(invalid)?;

        let mut compressor = Compressor::new(options.level);
        stats.new_bytes += store.put_raw(
            &Key::meta(&manifest.meta.digest),
            &manifest.meta,
            &compressor.compress(&draft.meta)?,
            &mut warnings,
        )?;
        stats.new_bytes += store.put_raw(
            &Key::map(&manifest.map.digest),
            &manifest.map,
            &compressor.compress(&map_bytes)?,
            &mut warnings,
        )?;
        stats.new_bytes +=
            store.put_locator(&manifest.map.digest, &draft.map, &locator, &mut warnings)?;
        let key = Key::manifest(&digest);
        stats.new_bytes += store.put_checked(&key, &manifest_bytes, &mut warnings, || {
            store.manifest(&digest).map(|_| ())
        })?;

        let object = serde_json::to_vec(&RefObject {
            format: 1,
            manifest: digest,
        })
        .unwrap_or_default();
        let outcome = match store.create_reference(&draft.reference, &digest, &object)? {
            PutOutcome::Created => {
                stats.new_bytes += object.len() as u64;
                PublishOutcome::Created
            }
            PutOutcome::Exists => match store.read_ref(&draft.reference)? {
                Some(existing) if existing == digest => PublishOutcome::Already,
                Some(existing) => return Err(conflict(existing)),
                None => return Err(store.missing(&Key::reference(&draft.reference))), // removed just now
            },
        };
        Ok(Published {
            reference: draft.reference,
            digest,
            layer_id: manifest.layer_id(),
            outcome,
            stats,
            warnings,
        })
    }

    fn manifest(&self, draft: &Draft, map_bytes: &[u8]) -> Result<Manifest> {
        let mut parameters = draft.parameters.clone();
        parameters.insert("chunker".to_owned(), self.options.chunker.to_string());
        let manifest = Manifest {
            format: Manifest::FORMAT,
            features: Features::default(),
            kind: draft.reference.kind,
            name: draft.reference.name.clone(),
            version: draft.reference.version.clone(),
            platform: draft.platform.clone(),
            parents: draft.parents.clone(),
            meta: Blob::of(&draft.meta),
            map: Blob::of(map_bytes),
            data_size: draft.map.data_size(),
            counts: draft.counts,
            parameters,
            labels: draft.labels.clone(),
            annotations: draft.annotations.clone(),
        };
        Ok(manifest)
    }
}

/// For each extent of the map: its frame, and its first byte in the frame's raw bytes.
pub(super) fn resolve(
    known: &HashMap<Digest, (Place, u32)>,
    stored: &[super::dedupe::StoredChunk],
    tickets: &[Option<u64>],
    packs: &[WrittenPack],
    draft: &Draft,
) -> Result<Vec<(Used, u32)>> {
    // Frames of this writer in the order of their numbers.
    let written: Vec<(PackLoc, PackFrame)> = packs
        .iter()
        .flat_map(|p| {
            p.table.frames.iter().map(|f| {
                (
                    PackLoc {
                        id: p.id,
                        size: p.size,
                    },
                    *f,
                )
            })
        })
        .collect();
    draft
        .map
        .extents()
        .iter()
        .map(|extent| {
            let invalid = |what: String| StoreError::InvalidInput {
                object: draft.reference.to_string(),
                what,
            };
            let gone = || {
                invalid(format!(
                    "chunk {} of its map was not added and is not in the store",
                    extent.digest
                ))
            };
            let &(place, len) = known.get(&extent.digest).ok_or_else(gone)?;
            if len != extent.len {
                let what = format!(
                    "chunk {} has {len} bytes, its map says {}",
                    extent.digest, extent.len
                );
                return Err(invalid(what));
            }
            match place {
                Place::New { ticket, offset } => {
                    let number = tickets
                        .get(ticket)
                        .copied()
                        .flatten()
                        .and_then(|n| usize::try_from(n).ok());
                    let (pack, frame) = number
                        .and_then(|n| written.get(n))
                        .copied()
                        .ok_or_else(gone)?;
                    Ok((Used { pack, frame }, offset))
                }
                Place::Stored { index } => {
                    let chunk = stored.get(index).ok_or_else(gone)?;
                    let pack = PackLoc {
                        id: chunk.pack.id,
                        size: chunk.pack.size,
                    };
                    Ok((
                        Used {
                            pack,
                            frame: chunk.frame,
                        },
                        chunk.offset,
                    ))
                }
            }
        })
        .collect()
}

/// Packs in the order of first use, frames in the order of packs and offsets.
pub(super) fn build_locator(
    map_digest: Digest,
    map: &LayerMap,
    places: Vec<(Used, u32)>,
) -> Result<Locator, crate::error::FormatError> {
    let too_many =
        || crate::error::FormatError::new("LPLOC", "it has more than 2^32-1 packs or frames");
    let mut packs: Vec<PackLoc> = Vec::new();
    let mut pack_numbers: HashMap<Digest, u32> = HashMap::new();
    let mut frames: Vec<FrameLoc> = Vec::new();
    let mut keys: Vec<(u32, u64)> = Vec::with_capacity(places.len());
    let mut seen: HashMap<(u32, u64), ()> = HashMap::new();
    for (used, _) in &places {
        let next = u32::try_from(packs.len()).map_err(|_| too_many())?;
        let pack = *pack_numbers.entry(used.pack.id).or_insert(next);
        if pack == next {
            packs.push(used.pack);
        }
        let key = (pack, used.frame.offset);
        keys.push(key);
        if seen.insert(key, ()).is_none() {
            frames.push(FrameLoc {
                pack,
                codec: used.frame.codec,
                offset: used.frame.offset,
                stored_len: used.frame.stored_len,
                raw_len: used.frame.raw_len,
                digest: used.frame.digest,
            });
        }
    }
    frames.sort_unstable_by_key(|f| (f.pack, f.offset));
    let extents = places
        .iter()
        .zip(&keys)
        .map(|((_, offset), key)| {
            let frame = frames.partition_point(|f| (f.pack, f.offset) < *key);
            Ok((u32::try_from(frame).map_err(|_| too_many())?, *offset))
        })
        .collect::<Result<Vec<_>, crate::error::FormatError>>()?;
    Locator::new(map_digest, map, packs, frames, extents)
}

impl LayerStore {
    /// An index segment of new packs; bytes written.
    pub(super) fn put_index(&self, packs: &[WrittenPack]) -> Result<u64> {
        if packs.is_empty() {
            return Ok(0);
        }
        let mut entries = Vec::with_capacity(packs.iter().map(|p| p.table.chunks.len()).sum());
        for (pack, written) in (0_u32..).zip(packs) {
            entries.extend(
                (0_u32..)
                    .zip(&written.table.chunks)
                    .map(|(chunk, c)| IndexEntry {
                        digest: c.digest,
                        pack,
                        chunk,
                    }),
            );
        }
        let packs = packs
            .iter()
            .map(|p| IndexPack {
                id: p.id,
                size: p.size,
                table_offset: p.table_offset,
            })
            .collect();
        let bytes = IndexSegment::new(packs, entries)?.to_bytes()?;
        self.blobs()
            .put(&Key::index(&Digest::of(&bytes)), &bytes, PutMode::Overwrite)?;
        Ok(bytes.len() as u64)
    }

    /// Writes an object whose content the key decides. If it exists it must pass `check`; if it
    /// does not, it is replaced. Bytes written.
    fn put_checked(
        &self,
        key: &Key,
        bytes: &[u8],
        warnings: &mut Vec<String>,
        check: impl FnOnce() -> Result<()>,
    ) -> Result<u64> {
        if self.blobs().put(key, bytes, PutMode::IfAbsent)? == PutOutcome::Exists {
            match check() {
                Ok(()) => return Ok(0),
                Err(error) if error.is_damage() => {
                    tracing::warn!("replaced: {error}");
                    warnings.push(format!("replaced: {error}"));
                    self.blobs().put(key, bytes, PutMode::Overwrite)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(bytes.len() as u64)
    }

    /// A compressed object.
    fn put_raw(
        &self,
        key: &Key,
        blob: &Blob,
        stored: &[u8],
        warnings: &mut Vec<String>,
    ) -> Result<u64> {
        debug_assert!(stored.len() as u64 <= max_stored(blob.size));
        self.put_checked(key, stored, warnings, || self.object(key, blob).map(|_| ()))
    }

    /// An existing locator stays only if it is the same: each frame of `locator` was verified or
    /// written by this writer, and what another one points at was not. Bytes written.
    pub(crate) fn put_locator(
        &self,
        map_digest: &Digest,
        map: &LayerMap,
        locator: &Locator,
        warnings: &mut Vec<String>,
    ) -> Result<u64> {
        let key = Key::locator(map_digest);
        let bytes = locator.to_bytes();
        let len = bytes.len() as u64;
        if self.blobs().put(&key, &bytes, PutMode::IfAbsent)? == PutOutcome::Created {
            return Ok(len);
        }
        let damage = match self.blobs().get(&key, MAX_LOCATOR_BYTES) {
            Ok(Some(old)) if old == bytes => return Ok(0),
            Ok(Some(old)) => Locator::parse(&old, map_digest, map)
                .err()
                .map(|e| self.bad(&key, &e)),
            Ok(None) => None, // deleted meanwhile
            Err(error) if error.is_damage() => Some(error),
            Err(error) => return Err(error),
        };
        if let Some(error) = damage {
            tracing::warn!("replaced: {error}");
            warnings.push(format!("replaced: {error}"));
        }
        self.blobs().put(&key, &bytes, PutMode::Overwrite)?;
        Ok(len)
    }
}
