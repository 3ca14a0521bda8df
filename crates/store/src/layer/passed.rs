//! Frames that go from one store to another as they are: verified like any frame that is read,
//! but not compressed again.

use std::collections::HashMap;

use super::LayerStore;
use super::pipeline::{Frame, FrameChunk};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::{FrameLoc, Locator, PackLoc};
use crate::format::map::LayerMap;
use crate::format::pack::{FOOTER_LEN, PackTable};
use crate::key::Key;

/// A verified frame of another store: its stored bytes have the digest that was asked for, and
/// each of its chunks the digest that the layer's map (or the pack's table) says.
#[derive(Debug)]
pub struct StoredFrame {
    pub(super) frame: Frame,
    /// Its raw bytes, if single chunks of it may be wanted; else empty.
    pub(super) raw: Vec<u8>,
    /// Only its chunks are to be taken, never its bytes as they are stored.
    pub(super) apart: bool,
}

impl StoredFrame {
    /// Bytes as stored.
    #[must_use]
    pub fn stored_len(&self) -> u64 {
        self.frame.stored.len() as u64
    }

    /// The same, of which only the chunks are taken: they go to new frames. Its raw bytes must be
    /// there.
    pub(crate) fn apart(self) -> Self {
        Self {
            apart: true,
            ..self
        }
    }
}

/// Which chunks are in a frame: digest, first byte in the frame's raw bytes, length.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FrameChunks {
    /// Chunks that the layer needs: a frame without one of them is damaged.
    pub needed: Vec<(Digest, u32, u32)>,
    /// Chunks that the pack's table says the frame has besides. The table is a hint: one that is
    /// not there is left out.
    pub others: Vec<(Digest, u32, u32)>,
}

/// Tables of a store's packs, kept while frames of them are moved.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    /// `None`: it cannot be read, or is not what the locator says.
    known: HashMap<Digest, Option<PackTable>>,
    /// Requests made.
    pub(crate) requests: u64,
    /// Bytes read.
    pub(crate) bytes: u64,
}

/// Tables in memory at most.
const MAX_TABLES: usize = 32;

impl Tables {
    /// The chunks of frame `number`. The pack's table is looked at only if the layer does not use
    /// all of the frame.
    pub(crate) fn chunks(
        &mut self,
        store: &LayerStore,
        map: &LayerMap,
        locator: &Locator,
        number: u32,
    ) -> Result<FrameChunks> {
        let mut chunks = FrameChunks::default();
        for &i in locator.extents_of_frame(number) {
            let Ok(i) = usize::try_from(i) else { continue };
            if let (Some(extent), Some((_, offset))) = (map.extents().get(i), locator.extent(i)) {
                chunks.needed.push((extent.digest, offset, extent.len));
            }
        }
        chunks.needed.sort_unstable_by_key(|c| (c.1, c.2, c.0));
        chunks.needed.dedup();
        let at = usize::try_from(number).unwrap_or(usize::MAX);
        let Some(frame) = locator.frames().get(at) else {
            return Ok(chunks);
        };
        let used: u64 = chunks.needed.iter().map(|c| u64::from(c.2)).sum();
        if used >= u64::from(frame.raw_len) {
            return Ok(chunks);
        }
        let pack = usize::try_from(frame.pack).unwrap_or(usize::MAX);
        if let Some(pack) = locator.packs().get(pack)
            && let Some(table) = self.table(store, pack)?
            && let Ok(index) = table
                .frames
                .binary_search_by_key(&frame.offset, |f| f.offset)
            && table
                .frames
                .get(index)
                .is_some_and(|f| f.digest == frame.digest)
        {
            let index = u32::try_from(index).unwrap_or(u32::MAX);
            let first = table.chunks.partition_point(|c| c.frame < index);
            let others = table.chunks.iter().skip(first);
            for chunk in others.take_while(|c| c.frame == index) {
                let chunk = (chunk.digest, chunk.offset, chunk.len);
                if !chunks.needed.contains(&chunk) {
                    chunks.others.push(chunk);
                }
            }
        }
        Ok(chunks)
    }

    fn table(&mut self, store: &LayerStore, pack: &PackLoc) -> Result<Option<&PackTable>> {
        if !self.known.contains_key(&pack.id) {
            if self.known.len() >= MAX_TABLES {
                self.known.clear();
            }
            let table = match self.read(store, pack) {
                Ok(table) => Some(table),
                Err(error) if error.is_damage() => None, // a hint: the frame itself is verified
                Err(error) => return Err(error),
            };
            self.known.insert(pack.id, table);
        }
        Ok(self.known.get(&pack.id).and_then(Option::as_ref))
    }

    fn read(&mut self, store: &LayerStore, pack: &PackLoc) -> Result<PackTable> {
        let key = Key::pack(&pack.id);
        let footer = store.read_footer(&key, pack.size)?;
        self.requests += 2;
        self.bytes += FOOTER_LEN + pack.size.saturating_sub(footer.table_offset);
        store.read_table(&key, pack.size, footer.table_offset)
    }
}

impl LayerStore {
    /// Verifies a frame of this store that is to go to another: `stored` are its bytes. `whole`:
    /// it will be wanted as a whole, so that its raw bytes need not be kept.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] naming the pack and the range.
    pub fn stored_frame(
        &self,
        pack: &Digest,
        frame: &FrameLoc,
        stored: &[u8],
        chunks: &FrameChunks,
        whole: bool,
    ) -> Result<StoredFrame> {
        let raw = self.open_frame(pack, frame, stored)?;
        let bytes = |offset: u32, len: u32| {
            let start = usize::try_from(offset).ok()?;
            raw.get(start..start.checked_add(usize::try_from(len).ok()?)?)
        };
        let mut kept = Vec::with_capacity(chunks.needed.len() + chunks.others.len());
        for &(digest, offset, len) in &chunks.needed {
            let found = bytes(offset, len).map(Digest::of);
            if found != Some(digest) {
                return Err(StoreError::Corrupt {
                    store: self.url().to_owned(),
                    key: Key::pack(pack).to_string(),
                    range: Some(frame.offset..frame.offset.saturating_add(frame.stored_len.into())),
                    what: format!("chunk {digest} is not at byte {offset} of this frame"),
                });
            }
            kept.push(FrameChunk {
                digest,
                offset,
                len,
            });
        }
        for &(digest, offset, len) in &chunks.others {
            if bytes(offset, len).map(Digest::of) == Some(digest) {
                kept.push(FrameChunk {
                    digest,
                    offset,
                    len,
                });
            }
        }
        kept.sort_by_key(|c| c.offset);
        let frame = Frame {
            codec: frame.codec,
            stored: stored.to_vec(),
            raw_len: frame.raw_len,
            digest: frame.digest,
            chunks: kept,
        };
        Ok(StoredFrame {
            frame,
            raw: if whole { Vec::new() } else { raw },
            apart: false,
        })
    }
}
