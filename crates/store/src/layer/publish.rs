//! Publishing: index, metadata, map, locator, manifest, reference, each durable before the next.
//! An object that exists already is checked before a layer relies on it, and replaced if it is
//! damaged; a locator is replaced unless it is the same: publishing again heals.

use std::collections::{BTreeMap, HashMap};

use super::LayerStore;
use super::dedupe::{IndexSet, StoredChunk};
use super::pack_writer::WrittenPack;
use super::writer::{LayerWriter, Place, WriteStats, WriterOptions};
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
    pub fn finish(self, draft: Draft) -> Result<Published> {
        let manifest = self.manifest(&draft, &draft.map.to_bytes());
        let invalid = |e: crate::error::FormatError| invalid_layer(&draft.reference, &e);
        manifest.to_bytes().map_err(invalid)?; // before anything more is written
        self.seal()?.publish(&manifest, &draft.meta, &draft.map)
    }

    /// Ends the writing of chunks: all packs and their index are durable afterwards. Layers made
    /// of these chunks, and of those in the store, can then be published.
    ///
    /// # Errors
    /// What went wrong in writing.
    pub fn seal(mut self) -> Result<Sealed> {
        self.flush()?;
        let mut warnings = std::mem::take(&mut self.warnings);
        warnings.extend(self.store.ensure_marker()?);
        let Self {
            store,
            options,
            mut index,
            known,
            stored,
            tickets,
            pipeline,
            mut stats,
            ..
        } = self;
        let packs = pipeline.finish()?;
        stats.new_packs += packs.len() as u64;
        stats.new_bytes += packs.iter().map(|p| p.size).sum::<u64>();
        stats.new_bytes += store.put_index(&packs)?;
        if let Some(trust) = &mut index.frames.trust {
            for pack in &packs {
                let frames = pack.table.frames.len();
                trust.wrote(store.blobs().as_ref(), &pack.id, frames);
            }
            trust.save();
        }
        let written = packs
            .iter()
            .flat_map(|p| {
                let pack = PackLoc {
                    id: p.id,
                    size: p.size,
                };
                p.table.frames.iter().map(move |f| (pack, *f))
            })
            .collect();
        Ok(Sealed {
            store,
            options,
            index,
            known,
            stored,
            tickets,
            written,
            stats,
            warnings,
        })
    }

    fn manifest(&self, draft: &Draft, map_bytes: &[u8]) -> Manifest {
        let mut parameters = draft.parameters.clone();
        parameters.insert("chunker".to_owned(), self.options.chunker.to_string());
        Manifest {
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
        }
    }
}

fn invalid_layer(reference: &Reference, error: &crate::error::FormatError) -> StoreError {
    StoreError::InvalidInput {
        object: reference.to_string(),
        what: error.to_string(),
    }
}

/// Chunks that are durable in a store, of which layers can be published.
#[derive(Debug)]
pub struct Sealed {
    pub(super) store: LayerStore,
    pub(super) options: WriterOptions,
    pub(super) index: IndexSet,
    pub(super) known: HashMap<Digest, (Place, u32)>,
    pub(super) stored: Vec<StoredChunk>,
    tickets: Vec<Option<u64>>,
    /// Frames of this writer in the order of their numbers.
    written: Vec<(PackLoc, PackFrame)>,
    pub(super) stats: WriteStats,
    pub(super) warnings: Vec<String>,
}

impl Sealed {
    /// Goes on with a writer that knows the chunks written so far.
    ///
    /// # Errors
    /// If its threads cannot be started.
    pub fn reopen(mut self) -> Result<LayerWriter> {
        for (place, len) in self.known.values_mut() {
            let Place::New { ticket, offset } = *place else {
                continue;
            };
            // A ticket without a frame cannot be: sealing has flushed them all.
            let Some(&(pack, frame)) = written_frame(&self.tickets, &self.written, ticket) else {
                continue;
            };
            *place = Place::Stored {
                index: self.stored.len(),
            };
            self.stored.push(StoredChunk {
                pack: IndexPack {
                    id: pack.id,
                    size: pack.size,
                    table_offset: 0, // not needed any more
                },
                frame,
                offset,
                len: *len,
            });
        }
        LayerWriter::resume(self)
    }

    /// What was written so far.
    #[must_use]
    pub const fn stats(&self) -> WriteStats {
        self.stats
    }

    /// Publishes a layer whose manifest, metadata and map are given: writes metadata, map,
    /// locator, manifest and last the reference. Every chunk of the map was added before or is in
    /// the store.
    ///
    /// # Errors
    /// As [`LayerWriter::finish`]; [`StoreError::InvalidInput`] also if metadata or map are not
    /// those that the manifest names.
    pub fn publish(
        &mut self,
        manifest: &Manifest,
        meta: &[u8],
        map: &LayerMap,
    ) -> Result<Published> {
        self.publish_part(manifest, meta, map, None)
    }

    /// As [`Sealed::publish`]; chunks that are not here are said to be where `elsewhere`, another
    /// store's locator of this map, has them.
    pub(crate) fn publish_part(
        &mut self,
        manifest: &Manifest,
        meta: &[u8],
        map: &LayerMap,
        elsewhere: Option<&Locator>,
    ) -> Result<Published> {
        let reference = manifest.reference();
        let invalid = |e: crate::error::FormatError| invalid_layer(&reference, &e);
        let map_bytes = map.to_bytes();
        let manifest_bytes = manifest.to_bytes().map_err(invalid)?;
        let digest = Digest::of(&manifest_bytes);
        if Blob::of(meta) != manifest.meta || Blob::of(&map_bytes) != manifest.map {
            return Err(StoreError::InvalidInput {
                object: reference.to_string(),
                what: "its metadata or map is not what its manifest names".to_owned(),
            });
        }
        // Before more is written: the version may be taken.
        let conflict = |existing: Digest| StoreError::Conflict {
            reference: Box::new(reference.clone()),
            store: self.store.url().to_owned(),
            existing,
            new: digest,
        };
        if let Some(existing) = self
            .store
            .read_ref(&reference)?
            .filter(|existing| existing != &digest)
        {
            return Err(conflict(existing));
        }

        // Chunks of the map that were not added: of layers that this one is made from.
        for extent in map.extents() {
            if self.known.contains_key(&extent.digest) {
                continue;
            }
            if let Some(chunk) = self.index.locate(&extent.digest)? {
                let place = Place::Stored {
                    index: self.stored.len(),
                };
                self.known.insert(extent.digest, (place, chunk.len));
                self.stored.push(chunk);
            } else if elsewhere.is_none()
                && let Some(damage) = self.index.damage_of(&extent.digest)?
            {
                return Err(damage);
            }
        }
        let mut warnings = std::mem::take(&mut self.warnings);
        warnings.extend(self.index.take_warnings());
        if let Some(trust) = &mut self.index.frames.trust {
            trust.save();
        }
        let places = Places {
            known: &self.known,
            stored: &self.stored,
            tickets: &self.tickets,
            written: &self.written,
        };
        let places = resolve(&places, &reference, map, elsewhere)?;
        let locator = build_locator(manifest.map.digest, map, places).map_err(invalid)?;

        let store = &self.store;
        let mut compressor = Compressor::new(self.options.level);
        let mut written = store.put_raw(
            &Key::meta(&manifest.meta.digest),
            &manifest.meta,
            &compressor.compress(meta)?,
            &mut warnings,
        )?;
        written += store.put_raw(
            &Key::map(&manifest.map.digest),
            &manifest.map,
            &compressor.compress(&map_bytes)?,
            &mut warnings,
        )?;
        written += store.put_locator(&manifest.map.digest, map, &locator, &mut warnings)?;
        let key = Key::manifest(&digest);
        written += store.put_checked(&key, &manifest_bytes, &mut warnings, || {
            store.manifest(&digest).map(|_| ())
        })?;

        let object = serde_json::to_vec(&RefObject {
            format: 1,
            manifest: digest,
        })
        .unwrap_or_default();
        let outcome = match store.create_reference(&reference, &digest, &object)? {
            PutOutcome::Created => {
                written += object.len() as u64;
                PublishOutcome::Created
            }
            PutOutcome::Exists => match store.read_ref(&reference)? {
                Some(existing) if existing == digest => PublishOutcome::Already,
                Some(existing) => return Err(conflict(existing)),
                None => return Err(store.missing(&Key::reference(&reference))), // removed just now
            },
        };
        self.stats.new_bytes += written;
        Ok(Published {
            reference,
            digest,
            layer_id: manifest.layer_id(),
            outcome,
            stats: self.stats,
            warnings,
        })
    }
}

/// What a writer knows of where chunks are.
pub(super) struct Places<'a> {
    pub(super) known: &'a HashMap<Digest, (Place, u32)>,
    pub(super) stored: &'a [StoredChunk],
    pub(super) tickets: &'a [Option<u64>],
    /// Frames of this writer in the order of their numbers.
    pub(super) written: &'a [(PackLoc, PackFrame)],
}

/// For each extent of the map: its frame, and its first byte in the frame's raw bytes. `elsewhere`
/// says where those are that are not known.
pub(super) fn resolve(
    places: &Places<'_>,
    reference: &Reference,
    map: &LayerMap,
    elsewhere: Option<&Locator>,
) -> Result<Vec<(Used, u32)>> {
    let invalid = |what: String| StoreError::InvalidInput {
        object: reference.to_string(),
        what,
    };
    map.extents()
        .iter()
        .enumerate()
        .map(|(i, extent)| {
            if !places.known.contains_key(&extent.digest)
                && let Some(place) = elsewhere.and_then(|locator| place_in(locator, i))
            {
                return Ok(place);
            }
            let gone = || {
                invalid(format!(
                    "chunk {} of its map was not added and is not in the store",
                    extent.digest
                ))
            };
            let &(place, len) = places.known.get(&extent.digest).ok_or_else(gone)?;
            if len != extent.len {
                let what = format!(
                    "chunk {} has {len} bytes, its map says {}",
                    extent.digest, extent.len
                );
                return Err(invalid(what));
            }
            match place {
                Place::New { ticket, offset } => {
                    let &(pack, frame) =
                        written_frame(places.tickets, places.written, ticket).ok_or_else(gone)?;
                    Ok((Used { pack, frame }, offset))
                }
                Place::Stored { index } => {
                    let chunk = places.stored.get(index).ok_or_else(gone)?;
                    let pack = PackLoc {
                        id: chunk.pack.id,
                        size: chunk.pack.size,
                    };
                    let frame = chunk.frame;
                    Ok((Used { pack, frame }, chunk.offset))
                }
            }
        })
        .collect()
}

/// Where a locator has an extent.
fn place_in(locator: &Locator, extent: usize) -> Option<(Used, u32)> {
    let (frame, offset) = locator.extent(extent)?;
    let frame = locator.frames().get(usize::try_from(frame).ok()?)?;
    let pack = *locator.packs().get(usize::try_from(frame.pack).ok()?)?;
    let frame = PackFrame {
        offset: frame.offset,
        stored_len: frame.stored_len,
        raw_len: frame.raw_len,
        codec: frame.codec,
        digest: frame.digest,
    };
    Some((Used { pack, frame }, offset))
}

/// The frame that got this ticket.
fn written_frame<'a>(
    tickets: &[Option<u64>],
    written: &'a [(PackLoc, PackFrame)],
    ticket: usize,
) -> Option<&'a (PackLoc, PackFrame)> {
    let number = tickets.get(ticket).copied().flatten()?;
    written.get(usize::try_from(number).ok()?)
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
