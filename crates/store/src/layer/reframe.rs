//! A layer that goes without its neighbours: chunks that share a frame with chunks of no concern to
//! it are written anew, so that its locator names only frames that are wholly its own.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::chunks::Place;
use super::dedupe::StoredChunk;
use super::repack::{chunks_by_frame, place_of};
use super::writer::LayerWriter;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::index::IndexPack;
use crate::format::map::LayerMap;

impl LayerWriter {
    /// Chunks of `map` that lie in frames of the store with any chunk that `map` does not name are
    /// read and written to new frames; the number of chunks. What is published of this map then
    /// takes no other bytes along to another store. The layer's identity is not touched. The bytes
    /// stay where they were, too.
    ///
    /// Memory: 32 bytes and some for each chunk of the map.
    ///
    /// # Errors
    /// [`StoreError::InvalidInput`] if a chunk was not added and is not in the store; else what
    /// went wrong in reading or writing.
    pub fn reframe(&mut self, map: &LayerMap) -> Result<u64> {
        let wanted: HashSet<Digest> = map.extents().iter().map(|extent| extent.digest).collect();
        // By pack, the frames that the layer would use.
        let mut used: BTreeMap<Digest, (IndexPack, BTreeSet<u64>)> = BTreeMap::new();
        let mut seen: HashSet<Digest> = HashSet::with_capacity(wanted.len());
        for extent in map.extents() {
            if !seen.insert(extent.digest) {
                continue;
            }
            if let Some(known) = self.held.get(&extent.digest)?
                && matches!(known.place(), Place::New(_))
            {
                continue; // of this writer, with others that were added for this layer
            }
            let Some(chunk) = self.index.locate(&extent.digest)? else {
                if let Some(damage) = self.index.damage_of(&extent.digest)? {
                    return Err(damage);
                }
                return Err(StoreError::InvalidInput {
                    object: "a layer".to_owned(),
                    what: format!(
                        "chunk {} of its map was not added and is not in the store",
                        extent.digest
                    ),
                });
            };
            let frames = used.entry(chunk.pack.id);
            let (_, frames) = frames.or_insert_with(|| (chunk.pack, BTreeSet::new()));
            frames.insert(chunk.frame.offset);
        }
        drop(seen);
        let mut written = 0;
        for (pack, offsets) in used.into_values() {
            written += self.reframe_pack(&wanted, &pack, &offsets)?;
        }
        self.flush()?;
        Ok(written)
    }

    fn reframe_pack(
        &mut self,
        wanted: &HashSet<Digest>,
        pack: &IndexPack,
        offsets: &BTreeSet<u64>,
    ) -> Result<u64> {
        let store = self.store.clone();
        let table = store.pack_table(pack)?;
        let chunks = chunks_by_frame(&table);
        let mut mixed = Vec::new();
        for (index, frame) in table.frames.iter().enumerate() {
            if !offsets.contains(&frame.offset) {
                continue;
            }
            let (first, count) = chunks.get(index).copied().unwrap_or_default();
            let mine = table.chunks.get(first..first.saturating_add(count));
            let mine = mine.unwrap_or_default();
            if mine.iter().any(|chunk| !wanted.contains(&chunk.digest)) {
                mixed.push(index);
                continue;
            }
            // Said to be here, so that nobody finds another place for them.
            for chunk in mine {
                let stored = StoredChunk {
                    pack: *pack,
                    frame: *frame,
                    offset: chunk.offset,
                    len: chunk.len,
                };
                self.held.put_stored(&chunk.digest, &stored)?;
            }
        }
        let mut written = 0;
        store.read_stored_frames(&pack.id, &table, &mixed, &mut |index, stored| {
            let stored = stored?;
            let Some(frame) = table.frames.get(index) else {
                return Ok(());
            };
            let raw = store.open_frame(&pack.id, &place_of(frame, 0), stored)?;
            let (first, count) = chunks.get(index).copied().unwrap_or_default();
            let mine = table.chunks.get(first..first.saturating_add(count));
            for chunk in mine.unwrap_or_default() {
                if !wanted.contains(&chunk.digest) {
                    continue;
                }
                if let Some(known) = self.held.get(&chunk.digest)?
                    && matches!(known.place(), Place::New(_))
                {
                    continue;
                }
                let from = usize::try_from(chunk.offset).unwrap_or(usize::MAX);
                let len = usize::try_from(chunk.len).unwrap_or(usize::MAX);
                let bytes = raw.get(from..from.saturating_add(len)).unwrap_or_default();
                self.add_anew(bytes)?;
                written += 1;
            }
            Ok(())
        })?;
        Ok(written)
    }
}
