//! Publishing: index, then metadata, map and locator, then manifest, then reference, each step
//! durable before the next.
//! An object that exists already is checked before a layer relies on it, and replaced if it is
//! damaged; a locator is replaced unless it is the same: publishing again heals.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use super::LayerStore;
use super::chunks::{Holdings, Place};
use super::dedupe::IndexSet;
use super::map_image::{MapImage, MapSource};
use super::meta_image::{Image, MetaImage, compressed};
use super::named::Named;
use super::objects::STREAMED;
use super::pack_writer::Written;
use super::staged::Staged;
use super::writer::{LayerWriter, WriteStats, WriterOptions};
use crate::digest::Digest;
use crate::error::{FormatError, Result, StoreError};
use crate::format::locator::{FrameLoc, Locator, PackLoc, Tables};
use crate::format::map::LayerMap;
use crate::format::pack::PackFrame;
use crate::key::Key;
use crate::manifest::{Blob, Counts, Features, LayerId, Manifest, ParentRef};
use crate::parallel::{Bounds, Order, for_each};
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
    pub meta: MetaImage,
    /// The map; every chunk in it was added to the writer or is in the store.
    pub map: MapImage,
}

impl Draft {
    /// A draft with empty optional fields.
    #[must_use]
    pub fn new(reference: Reference, meta: impl Into<MetaImage>, map: impl Into<MapImage>) -> Self {
        let (meta, map) = (meta.into(), map.into());
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

/// Frames that the layer may use, and where the map's extents are in them.
pub(super) struct Places {
    packs: Vec<PackLoc>,
    /// Each with its pack's number.
    frames: Vec<(u32, PackFrame)>,
    /// For each extent: its frame, and its first byte in the frame's raw bytes.
    extents: Vec<(u32, u32)>,
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
        let manifest = manifest_of(&draft, &self.options);
        let invalid = |e: FormatError| invalid_layer(&draft.reference, &e);
        manifest.to_bytes().map_err(invalid)?; // before anything more is written
        self.seal()?
            .stage_image(&manifest, draft.meta, &draft.map, None, true)?
            .publish()
    }

    /// As [`LayerWriter::finish`], but the reference is left to [`Staged::publish`]. Others can be
    /// staged of the same chunks then.
    ///
    /// # Errors
    /// As [`LayerWriter::finish`].
    pub fn stage(self, draft: Draft) -> Result<(Staged, Sealed)> {
        let mut sealed = self.seal()?;
        let staged = sealed.stage(draft)?;
        Ok((staged, sealed))
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
            mut held,
            tickets,
            pipeline,
            mut stats,
            ..
        } = self;
        let Written {
            packs,
            index_bytes,
            warnings: own,
        } = pipeline.finish()?;
        warnings.extend(own);
        stats.new_packs += packs.len() as u64;
        stats.new_bytes += packs.iter().map(|p| p.size).sum::<u64>();
        stats.new_bytes += index_bytes;
        if let Some(trust) = &mut index.frames.trust {
            for pack in &packs {
                let frames = pack.frames.len();
                trust.wrote(store.blobs().as_ref(), &pack.id, frames);
            }
            trust.save();
        }
        held.settle(&tickets, &packs)?;
        held.wake()?;
        Ok(Sealed {
            store,
            options,
            index,
            held,
            stats,
            warnings,
        })
    }
}

fn manifest_of(draft: &Draft, options: &WriterOptions) -> Manifest {
    let mut parameters = draft.parameters.clone();
    parameters.insert("chunker".to_owned(), options.chunker.to_string());
    Manifest {
        format: Manifest::FORMAT,
        features: Features::default(),
        kind: draft.reference.kind,
        name: draft.reference.name.clone(),
        version: draft.reference.version.clone(),
        platform: draft.platform.clone(),
        parents: draft.parents.clone(),
        meta: draft.meta.blob(),
        map: draft.map.blob(),
        data_size: draft.map.data_size(),
        counts: draft.counts,
        parameters,
        labels: draft.labels.clone(),
        annotations: draft.annotations.clone(),
    }
}

fn invalid_layer(reference: &Reference, error: &FormatError) -> StoreError {
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
    pub(super) held: Holdings,
    pub(super) stats: WriteStats,
    pub(super) warnings: Vec<String>,
}

impl Sealed {
    /// Goes on with a writer that knows the chunks written so far.
    ///
    /// # Errors
    /// If its threads cannot be started.
    pub fn reopen(self) -> Result<LayerWriter> {
        LayerWriter::resume(self)
    }

    /// What was written so far.
    #[must_use]
    pub const fn stats(&self) -> WriteStats {
        self.stats
    }

    /// Writes all of a layer but its reference. Its chunks are in the store.
    ///
    /// # Errors
    /// As [`LayerWriter::finish`].
    pub fn stage(&mut self, draft: Draft) -> Result<Staged> {
        let manifest = manifest_of(&draft, &self.options);
        self.stage_image(&manifest, draft.meta, &draft.map, None, false)
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
        let meta = MetaImage(Image::Stored {
            blob: Blob::of(meta),
            stored: Arc::new(compressed(self.options.level, meta)?.into()),
        });
        let staged = self.stage_image(manifest, meta, map, elsewhere, false)?;
        let published = staged.publish()?;
        self.stats = published.stats;
        Ok(published)
    }

    /// Writes all but the reference. `last`: no further layer of these chunks will be published.
    fn stage_image(
        &mut self,
        manifest: &Manifest,
        meta: MetaImage,
        map: &dyn MapSource,
        elsewhere: Option<&Locator>,
        last: bool,
    ) -> Result<Staged> {
        let reference = manifest.reference();
        let invalid = |e: FormatError| invalid_layer(&reference, &e);
        let manifest_bytes = manifest.to_bytes().map_err(invalid)?;
        let digest = Digest::of(&manifest_bytes);
        if meta.blob() != manifest.meta || map.blob() != manifest.map {
            return Err(StoreError::InvalidInput {
                object: reference.to_string(),
                what: "its metadata or map is not what its manifest names".to_owned(),
            });
        }
        let mut staged = Staged {
            store: self.store.clone(),
            reference: reference.clone(),
            digest,
            object: Named::object(&manifest_bytes),
            layer_id: manifest.layer_id(),
            stats: WriteStats::default(),
            warnings: Vec::new(),
        };
        // Before more is written: the version may be taken.
        staged.check()?;

        let places = resolve(&mut self.held, &mut self.index, &reference, map, elsewhere)?;
        if last {
            self.held = Holdings::default(); // it is large
        }
        let mut warnings = std::mem::take(&mut self.warnings);
        warnings.extend(self.index.take_warnings());
        if let Some(trust) = &mut self.index.frames.trust {
            trust.save();
        }
        // Only its bytes are needed from here on: of a million chunks they are few.
        let locator = {
            let tables = tables_of(manifest.map.digest, places).map_err(invalid)?;
            check_tables(&tables, map).map_err(|error| match error {
                StoreError::Format(error) => invalid(error),
                other => other,
            })?;
            tables.to_bytes()
        };

        // Where no chunk was new, the layer most likely is not either, whatever its name.
        let known = self.stats.new_chunks == 0;
        let (store, level) = (&self.store, self.options.level);
        let meta = Mutex::new(Some(meta));
        let mut written = 0;
        // Each of them waits for the disk, or for a server, so they do it together, but for a map that
        // is large in memory.
        for_each(
            &[Part::Meta, Part::Map, Part::Locator],
            Bounds {
                threads: if manifest.map.size < STREAMED { 3 } else { 1 },
                bytes: u64::MAX,
            },
            Order::Kept,
            |_| 0,
            |part| {
                let mut warnings = Vec::new();
                let bytes = match part {
                    Part::Meta => {
                        let meta = meta.lock().unwrap_or_else(PoisonError::into_inner).take();
                        let Some(meta) = meta else {
                            return Ok((0, warnings)); // each part is there once
                        };
                        store.put_meta(&manifest.meta, meta, known, level, &mut warnings)
                    }
                    Part::Map => store.put_map(manifest, map, known, level, &mut warnings),
                    Part::Locator => {
                        let (digest, count) = (&manifest.map.digest, map.count());
                        let sound = |old: &[u8]| {
                            let tables = Tables::parse(old, digest, count)?;
                            check_tables(&tables, map)
                        };
                        store.put_locator_bytes(digest, &locator, &sound, &mut warnings)
                    }
                };
                Ok((bytes?, warnings))
            },
            |_, part: Result<(u64, Vec<String>)>| {
                let (bytes, more) = part?;
                written += bytes;
                warnings.extend(more);
                Ok::<(), StoreError>(())
            },
        )?;
        let key = Key::manifest(&digest);
        written += store.put_checked(&key, &manifest_bytes, &mut warnings, || {
            store.manifest(&digest).map(|_| ())
        })?;

        self.stats.new_bytes += written;
        staged.stats = self.stats;
        staged.warnings = warnings;
        Ok(staged)
    }
}

/// What describes a layer's chunks.
#[derive(Debug, Clone, Copy)]
enum Part {
    Meta,
    Map,
    Locator,
}

/// For each extent of the map: its frame, and its first byte in the frame's raw bytes. Chunks that
/// were not added, of layers that this one is made from, are looked up in the store. `elsewhere` says
/// where those are that are not here.
pub(super) fn resolve(
    held: &mut Holdings,
    index: &mut IndexSet,
    reference: &Reference,
    map: &dyn MapSource,
    elsewhere: Option<&Locator>,
) -> Result<Places> {
    let invalid = |what: String| StoreError::InvalidInput {
        object: reference.to_string(),
        what,
    };
    let gone = |digest: &Digest| {
        invalid(format!(
            "chunk {digest} of its map was not added and is not in the store"
        ))
    };
    let mut extents = Vec::with_capacity(map.count());
    let mut missing = Vec::new();
    map.each(&mut |extent| {
        let mut known = held.get(&extent.digest)?;
        if known.is_none()
            && let Some(chunk) = index.locate(&extent.digest)?
        {
            held.insert_stored(&extent.digest, &chunk)?;
            known = held.get(&extent.digest)?;
        }
        let place = match known {
            Some(known) if known.len != extent.len => {
                let what = format!(
                    "chunk {} has {} bytes, its map says {}",
                    extent.digest, known.len, extent.len
                );
                return Err(invalid(what));
            }
            Some(known) => match known.place() {
                Place::Stored(number) => (number, known.offset),
                Place::New(_) => return Err(gone(&extent.digest)), // its frame was never written
            },
            None => {
                if elsewhere.is_none() {
                    let damage = index.damage_of(&extent.digest)?;
                    return Err(damage.unwrap_or_else(|| gone(&extent.digest)));
                }
                missing.push((extents.len(), extent.digest));
                (0, 0)
            }
        };
        extents.push(place);
        Ok(())
    })?;
    let mut places = Places {
        packs: held.packs().to_vec(),
        frames: held.frames().map(|(pack, frame)| (pack, *frame)).collect(),
        extents,
    };
    let mut taken = HashMap::new();
    for (i, digest) in missing {
        let place = elsewhere.and_then(|locator| places.take(&mut taken, locator, i));
        let (Some(place), Some(slot)) = (place, places.extents.get_mut(i)) else {
            return Err(gone(&digest));
        };
        *slot = place;
    }
    Ok(places)
}

impl Places {
    /// Where a locator has an extent; its frame is added. `taken` has the numbers of those that
    /// were added before.
    fn take(
        &mut self,
        taken: &mut HashMap<u32, u32>,
        locator: &Locator,
        extent: usize,
    ) -> Option<(u32, u32)> {
        let (number, offset) = locator.extent(extent)?;
        if let Some(known) = taken.get(&number) {
            return Some((*known, offset));
        }
        let frame = locator.frames().get(usize::try_from(number).ok()?)?;
        let pack = *locator.packs().get(usize::try_from(frame.pack).ok()?)?;
        let pack_number = match self.packs.iter().position(|known| *known == pack) {
            Some(number) => number,
            None => {
                self.packs.push(pack);
                self.packs.len() - 1
            }
        };
        let next = u32::try_from(self.frames.len()).ok()?;
        self.frames.push((
            u32::try_from(pack_number).ok()?,
            PackFrame {
                offset: frame.offset,
                stored_len: frame.stored_len,
                raw_len: frame.raw_len,
                codec: frame.codec,
                digest: frame.digest,
            },
        ));
        taken.insert(number, next);
        Some((next, offset))
    }
}

/// The locator of a map in memory.
pub(super) fn build_locator(
    map_digest: Digest,
    map: &LayerMap,
    places: Places,
) -> Result<Locator, FormatError> {
    let Tables {
        map: digest,
        packs,
        frames,
        extents,
    } = tables_of(map_digest, places)?;
    Locator::new(digest, map, packs, frames, extents)
}

/// Whether a locator's tables fit the map.
fn check_tables(tables: &Tables, map: &dyn MapSource) -> Result<()> {
    tables.check(map.count())?;
    let mut number = 0;
    map.each(&mut |extent| {
        tables.check_extent(number, extent.len)?;
        number += 1;
        Ok(())
    })
}

/// Packs in the order of first use, frames in the order of packs and offsets.
fn tables_of(map_digest: Digest, places: Places) -> Result<Tables, FormatError> {
    let too_many = || FormatError::new("LPLOC", "it has more than 2^32-1 packs or frames");
    let Places {
        packs: all_packs,
        frames: all,
        mut extents,
    } = places;
    let mut packs: Vec<PackLoc> = Vec::new();
    let mut pack_numbers: HashMap<Digest, u32> = HashMap::new();
    // By number in `all`: pack and offset of those that are used.
    let mut keys: Vec<Option<(u32, u64)>> = vec![None; all.len()];
    let mut frames: Vec<FrameLoc> = Vec::new();
    for (number, _) in &extents {
        let index = usize::try_from(*number).unwrap_or(usize::MAX);
        let (Some(key), Some((pack, frame))) = (keys.get_mut(index), all.get(index)) else {
            continue; // `resolve` made the numbers
        };
        let loc = usize::try_from(*pack).ok().and_then(|p| all_packs.get(p));
        let Some(loc) = loc.filter(|_| key.is_none()) else {
            continue;
        };
        let next = u32::try_from(packs.len()).map_err(|_| too_many())?;
        let pack = *pack_numbers.entry(loc.id).or_insert(next);
        if pack == next {
            packs.push(*loc);
        }
        *key = Some((pack, frame.offset));
        frames.push(FrameLoc {
            pack,
            codec: frame.codec,
            offset: frame.offset,
            stored_len: frame.stored_len,
            raw_len: frame.raw_len,
            digest: frame.digest,
        });
    }
    frames.sort_unstable_by_key(|f| (f.pack, f.offset));
    // A frame that is here and elsewhere is the same one.
    frames.dedup_by_key(|f| (f.pack, f.offset));
    let numbers = keys
        .into_iter()
        .map(|key| {
            let Some(key) = key else { return Ok(0) };
            let frame = frames.partition_point(|f| (f.pack, f.offset) < key);
            u32::try_from(frame).map_err(|_| too_many())
        })
        .collect::<Result<Vec<u32>, FormatError>>()?;
    for (number, _) in &mut extents {
        let index = usize::try_from(*number).unwrap_or(usize::MAX);
        *number = numbers.get(index).copied().unwrap_or_default();
    }
    Ok(Tables {
        map: map_digest,
        packs,
        frames,
        extents,
    })
}
