//! Frames to packs: one pack open at a time, its id hashed while it is written.

use super::pipeline::Frame;
use crate::blob::{BlobStore, BlobWriter, PutMode};
use crate::digest::{Digest, Hasher};
use crate::error::Result;
use crate::format::pack::{self, FRAMES_START, PackChunk, PackFrame, PackTable, TARGET_PACK_LEN};
use crate::key::Key;

/// A pack also ends here, so that chunks of a few bytes cannot make its table grow without bound.
const MAX_CHUNKS: usize = 512 << 10;

/// A durable pack.
#[derive(Debug)]
pub(super) struct WrittenPack {
    pub(super) id: Digest,
    pub(super) size: u64,
    pub(super) table_offset: u64,
    pub(super) table: PackTable,
}

pub(super) struct PackWriter<'a> {
    blobs: &'a dyn BlobStore,
    open: Option<Open<'a>>,
    done: Vec<WrittenPack>,
}

struct Open<'a> {
    out: Box<dyn BlobWriter + 'a>,
    hasher: Hasher,
    len: u64,
    table: PackTable,
}

impl Open<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write(bytes)?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn commit(mut self) -> Result<WrittenPack> {
        let table_offset = self.len;
        let tail = self.table.tail_bytes(table_offset)?;
        self.write(&tail)?;
        let id = self.hasher.finish();
        // Over whatever has the name: it should be the same bytes, and now it is.
        self.out.commit(&Key::pack(&id), PutMode::Overwrite)?;
        Ok(WrittenPack {
            id,
            size: self.len,
            table_offset,
            table: self.table,
        })
    }
}

impl<'a> PackWriter<'a> {
    pub(super) fn new(blobs: &'a dyn BlobStore) -> Self {
        Self {
            blobs,
            open: None,
            done: Vec::new(),
        }
    }

    /// Appends a frame.
    pub(super) fn push(&mut self, frame: &Frame) -> Result<()> {
        let mut open = match self.open.take() {
            Some(open) => open,
            None => {
                let mut open = Open {
                    out: self.blobs.put_stream()?,
                    hasher: Hasher::new(),
                    len: 0,
                    table: PackTable::default(),
                };
                open.write(&pack::header_bytes())?;
                debug_assert_eq!(open.len, FRAMES_START);
                open
            }
        };
        let index = u32::try_from(open.table.frames.len()).unwrap_or(u32::MAX); // far below: see TARGET_PACK_LEN
        open.table.frames.push(PackFrame {
            offset: open.len,
            stored_len: frame.stored_len(),
            raw_len: frame.raw_len,
            codec: frame.codec,
            digest: frame.digest,
        });
        open.table
            .chunks
            .extend(frame.chunks.iter().map(|c| PackChunk {
                digest: c.digest,
                frame: index,
                offset: c.offset,
                len: c.len,
            }));
        open.write(&frame.stored)?;
        if open.len >= TARGET_PACK_LEN || open.table.chunks.len() >= MAX_CHUNKS {
            self.done.push(open.commit()?);
        } else {
            self.open = Some(open);
        }
        Ok(())
    }

    /// Ends the last pack. The packs, in the order of their frames.
    pub(super) fn finish(mut self) -> Result<Vec<WrittenPack>> {
        if let Some(open) = self.open.take() {
            self.done.push(open.commit()?);
        }
        Ok(self.done)
    }
}
