//! Moving frames to new packs as they are, and finding a layer's chunks anew.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::LayerStore;
use super::pack_writer::{PackWriter, Written, WrittenPack, put_segment};
use super::pipeline::{Frame, FrameChunk};
use super::publish::{build_locator, resolve};
use super::read::{MAX_GAP, MAX_REQUEST};
use super::writer::LayerWriter;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::{FrameLoc, Locator, PackLoc};
use crate::format::map::LayerMap;
use crate::format::pack::{FOOTER_LEN, FRAMES_START, PackFrame, PackTable};
use crate::key::Key;
use crate::manifest::Manifest;

/// Where a frame was: pack and offset.
pub(crate) type FramePlace = (Digest, u64);

/// Frames to move: by pack its size, and the offsets of its frames.
pub(crate) type FramesOfPacks = BTreeMap<Digest, (u64, Vec<u64>)>;

/// Takes a frame's number in its pack and its stored bytes, or why they cannot be used.
pub(crate) type FrameSink<'a> = dyn FnMut(usize, Result<&[u8]>) -> Result<()> + 'a;

/// What moving frames came to.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    /// By the old place: the new pack, and the frame in it. Its pack number is not set.
    pub(crate) places: HashMap<FramePlace, (PackLoc, FrameLoc)>,
    /// Bytes of the new packs.
    pub(crate) written: u64,
    /// Packs that are damaged, so that none of their frames was moved.
    pub(crate) damaged: BTreeMap<Digest, StoreError>,
    /// Packs of which every frame was asked for: there is nothing to gain.
    pub(crate) full: BTreeSet<Digest>,
}

impl LayerStore {
    /// Header, footer and table of a pack, by its size alone; with where the table begins.
    pub(crate) fn structure_of_pack(&self, id: &Digest, size: u64) -> Result<(u64, PackTable)> {
        let key = Key::pack(id);
        if size < FRAMES_START + FOOTER_LEN {
            return Err(self.corrupt(&key, format!("it has only {size} bytes")));
        }
        self.check_pack_header(&key, size)?;
        let footer = self.read_footer(&key, size)?;
        let table = self.read_table(&key, size, footer.table_offset)?;
        Ok((footer.table_offset, table))
    }

    /// Reads these frames of a pack (indexes into its table, ascending), a few at a time, and
    /// verifies each with its chunks. `sink` gets a frame's index and its stored bytes, or why they
    /// cannot be used.
    pub(crate) fn read_stored_frames(
        &self,
        id: &Digest,
        table: &PackTable,
        frames: &[usize],
        sink: &mut FrameSink<'_>,
    ) -> Result<()> {
        let chunks = chunks_by_frame(table);
        let at = |index: usize| table.frames.get(index).copied();
        let mut rest = frames;
        while let Some((&first, _)) = rest.split_first() {
            let Some(start) = at(first).map(|f| f.offset) else {
                break;
            };
            let mut end = start;
            let run = rest
                .iter()
                .take_while(|&&index| {
                    at(index).is_some_and(|frame| {
                        let after = end_of(&frame);
                        let joins = end == start
                            || (frame.offset <= end + MAX_GAP && after - start <= MAX_REQUEST);
                        if joins {
                            end = after;
                        }
                        joins
                    })
                })
                .count()
                .max(1);
            let (run, others) = rest.split_at_checked(run).unwrap_or((rest, &[]));
            rest = others;
            let whole = self.fetch(id, start..end);
            for &index in run {
                let Some(frame) = at(index) else { continue };
                let mine = chunks.get(index).copied().unwrap_or_default();
                let check =
                    |stored: &[u8]| self.check_stored_frame(id, table, &frame, mine, stored);
                let first = whole.as_ref().ok().map(|bytes| {
                    let from = usize::try_from(frame.offset - start).unwrap_or(usize::MAX);
                    let len = usize::try_from(frame.stored_len).unwrap_or(usize::MAX);
                    bytes
                        .get(from..from.saturating_add(len))
                        .unwrap_or_default()
                });
                let wrong = match first.map(|stored| (stored, check(stored))) {
                    Some((stored, Ok(()))) => {
                        sink(index, Ok(stored))?;
                        continue;
                    }
                    Some((_, Err(error))) => Some(error),
                    // Part of the range cannot be read: find out which frames.
                    None => None,
                };
                let mut keep = |stored: &[u8]| check(stored).map(|()| stored.to_vec());
                let (key, range) = (Key::pack(id), frame.offset..end_of(&frame));
                let again = match wrong {
                    Some(error) => self.reread_range(&key, range, error, &mut keep),
                    None => self.range_checked(&key, range, &mut keep),
                };
                match again {
                    Ok(stored) => sink(index, Ok(&stored))?,
                    Err(error) => sink(index, Err(error))?,
                }
            }
        }
        Ok(())
    }

    /// That a frame's stored bytes and all its chunks are what the pack's table says.
    fn check_stored_frame(
        &self,
        id: &Digest,
        table: &PackTable,
        frame: &PackFrame,
        (first, count): (usize, usize),
        stored: &[u8],
    ) -> Result<()> {
        let place = place_of(frame, 0);
        let raw = self.open_frame(id, &place, stored)?;
        let chunks = table.chunks.get(first..first.saturating_add(count));
        for chunk in chunks.unwrap_or_default() {
            let from = usize::try_from(chunk.offset).unwrap_or(usize::MAX);
            let len = usize::try_from(chunk.len).unwrap_or(usize::MAX);
            let bytes = raw.get(from..from.saturating_add(len)).unwrap_or_default();
            let digest = Digest::of(bytes);
            if digest != chunk.digest {
                return Err(StoreError::Corrupt {
                    store: self.url().to_owned(),
                    key: Key::pack(id).to_string(),
                    range: Some(frame.offset..end_of(frame)),
                    what: format!(
                        "the chunk at {} of this frame has the digest {digest}, not {}",
                        chunk.offset, chunk.digest
                    ),
                });
            }
        }
        Ok(())
    }

    /// Writes index segments of these packs: id, size, where its table begins, and the table.
    pub(crate) fn index_packs(
        &self,
        packs: Vec<(Digest, u64, u64, PackTable)>,
        max_chunks: usize,
    ) -> Result<()> {
        let mut part: Vec<WrittenPack> = Vec::new();
        let mut chunks = 0;
        for (id, size, table_offset, table) in packs {
            chunks += table.chunks.len();
            part.push(WrittenPack {
                id,
                size,
                table_offset,
                chunks: table.chunks.iter().map(|c| c.digest).collect(),
                frames: Vec::new(), // an index does not name them
            });
            if chunks >= max_chunks {
                put_segment(self.blobs().as_ref(), &std::mem::take(&mut part))?;
                chunks = 0;
            }
        }
        put_segment(self.blobs().as_ref(), &part).map(|_| ())
    }

    /// Copies frames, verified, to new packs, and writes an index of those. A pack with a frame that
    /// is damaged stays as it is.
    pub(crate) fn move_frames(&self, wanted: &FramesOfPacks) -> Result<Moved> {
        let mut moved = Moved::default();
        let mut order: Vec<FramePlace> = Vec::new();
        let mut writer = PackWriter::new(self, None);
        for (id, (size, offsets)) in wanted {
            let result = self.structure_of_pack(id, *size).and_then(|(_, table)| {
                let chunks = chunks_by_frame(&table);
                let mut frames = Vec::with_capacity(offsets.len());
                for offset in offsets {
                    let found = table.frames.binary_search_by_key(offset, |f| f.offset);
                    frames.push(found.map_err(|_| {
                        self.corrupt(
                            &Key::pack(id),
                            format!("its table has no frame at {offset}"),
                        )
                    })?);
                }
                frames.sort_unstable();
                frames.dedup();
                if frames.len() == table.frames.len() {
                    moved.full.insert(*id);
                    return Ok(());
                }
                self.read_stored_frames(id, &table, &frames, &mut |index, stored| {
                    let stored = stored?;
                    let (Some(frame), Some(&(first, count))) =
                        (table.frames.get(index), chunks.get(index))
                    else {
                        return Ok(());
                    };
                    let mine = table.chunks.get(first..first.saturating_add(count));
                    writer.push(&Frame {
                        codec: frame.codec,
                        stored: stored.to_vec(),
                        raw_len: frame.raw_len,
                        digest: frame.digest,
                        chunks: mine
                            .unwrap_or_default()
                            .iter()
                            .map(|c| FrameChunk {
                                digest: c.digest,
                                offset: c.offset,
                                len: c.len,
                            })
                            .collect(),
                    })?;
                    order.push((*id, frame.offset));
                    Ok(())
                })
            });
            match result {
                Ok(()) => {}
                Err(error) if error.is_damage() && is_of(&error, id) => {
                    // What was copied of it lies unused in a new pack.
                    tracing::warn!("{error}");
                    moved.damaged.insert(*id, error);
                }
                Err(error) => return Err(error),
            }
        }
        let Written { packs, .. } = writer.finish()?;
        let mut places = order.into_iter();
        for pack in &packs {
            moved.written += pack.size;
            let loc = PackLoc {
                id: pack.id,
                size: pack.size,
            };
            for frame in &pack.frames {
                if let Some(old) = places.next()
                    && !moved.damaged.contains_key(&old.0)
                {
                    moved.places.insert(old, (loc, place_of(frame, 0)));
                }
            }
        }
        Ok(moved)
    }
}

/// Whether the error is about this pack, not about one that is being written.
fn is_of(error: &StoreError, id: &Digest) -> bool {
    error.key() == Some(Key::pack(id).as_str())
}

fn end_of(frame: &PackFrame) -> u64 {
    frame.offset.saturating_add(frame.stored_len.into())
}

pub(crate) fn place_of(frame: &PackFrame, pack: u32) -> FrameLoc {
    FrameLoc {
        pack,
        codec: frame.codec,
        offset: frame.offset,
        stored_len: frame.stored_len,
        raw_len: frame.raw_len,
        digest: frame.digest,
    }
}

/// For each frame of a table, its first chunk and their number.
pub(crate) fn chunks_by_frame(table: &PackTable) -> Vec<(usize, usize)> {
    let mut ranges = vec![(0, 0); table.frames.len()];
    for (at, chunk) in table.chunks.iter().enumerate() {
        if let Some(range) = usize::try_from(chunk.frame)
            .ok()
            .and_then(|f| ranges.get_mut(f))
        {
            if range.1 == 0 {
                range.0 = at;
            }
            range.1 += 1;
        }
    }
    ranges
}

impl LayerWriter {
    /// Looks every chunk of a published layer up in the store's index and writes a locator that
    /// says where they are. Warnings, one line each.
    ///
    /// # Errors
    /// [`StoreError::InvalidInput`] or damage if a chunk is nowhere in the store, or only in damaged
    /// packs.
    pub(crate) fn relocate(mut self, manifest: &Manifest, map: &LayerMap) -> Result<Vec<String>> {
        let reference = manifest.reference();
        let places = resolve(&mut self.held, &mut self.index, &reference, map, None)?;
        let mut warnings = self.index.take_warnings();
        let locator = build_locator(manifest.map.digest, map, places)?;
        self.store
            .put_locator(&manifest.map.digest, map, &locator, &mut warnings)?;
        Ok(warnings)
    }
}

/// A locator with frames of moved packs replaced. `None` if it names none of them.
pub(crate) fn relocated(
    map_digest: Digest,
    map: &LayerMap,
    old: &Locator,
    moved: &Moved,
) -> Result<Option<Locator>> {
    let mut packs: Vec<PackLoc> = Vec::new();
    let mut numbers: HashMap<Digest, u32> = HashMap::new();
    let mut frames: Vec<(FrameLoc, usize)> = Vec::with_capacity(old.frames().len());
    let mut changed = false;
    for (at, frame) in old.frames().iter().enumerate() {
        let Some(pack) = usize::try_from(frame.pack)
            .ok()
            .and_then(|p| old.packs().get(p))
        else {
            continue;
        };
        let (pack, mut frame) = match moved.places.get(&(pack.id, frame.offset)) {
            Some((pack, new)) if new.digest == frame.digest => {
                changed = true;
                (*pack, *new)
            }
            _ => (*pack, *frame),
        };
        let next = u32::try_from(packs.len()).unwrap_or(u32::MAX); // no more than before
        frame.pack = *numbers.entry(pack.id).or_insert(next);
        if frame.pack == next {
            packs.push(pack);
        }
        frames.push((frame, at));
    }
    if !changed {
        return Ok(None);
    }
    frames.sort_by_key(|(frame, _)| (frame.pack, frame.offset));
    let mut new_number = vec![0_u32; frames.len()];
    for (new, (_, at)) in (0_u32..).zip(&frames) {
        if let Some(slot) = new_number.get_mut(*at) {
            *slot = new;
        }
    }
    let extents = (0..old.extent_count())
        .filter_map(|i| {
            let (frame, offset) = old.extent(i)?;
            let number = new_number.get(usize::try_from(frame).ok()?)?;
            Some((*number, offset))
        })
        .collect();
    let frames = frames.into_iter().map(|(frame, _)| frame).collect();
    Ok(Some(Locator::new(map_digest, map, packs, frames, extents)?))
}
