//! Frames to packs: one pack open at a time, its id hashed while it is written, and the one before on its
//! way to the disk; and packs to index segments, so that of many chunks only those of the last packs are
//! in memory.

use std::thread::{Scope, ScopedJoinHandle};

use super::LayerStore;
use super::pipeline::Frame;
use crate::blob::{BlobStore, BlobWriter, PutMode};
use crate::digest::{Digest, Hasher};
use crate::error::{Result, StoreError};
use crate::format::index::{IndexEntry, IndexPack, IndexSegment};
use crate::format::pack::{self, FRAMES_START, PackChunk, PackFrame, PackTable, TARGET_PACK_LEN};
use crate::key::Key;

/// A pack also ends here, so that chunks of a few bytes cannot make its table grow without bound.
const MAX_CHUNKS: usize = 64 << 10;
/// An index segment is written as soon as it has so many chunks.
const SEGMENT_CHUNKS: usize = 64 << 10;

/// A durable pack.
#[derive(Debug)]
pub(super) struct WrittenPack {
    pub(super) id: Digest,
    pub(super) size: u64,
    pub(super) table_offset: u64,
    pub(super) frames: Vec<PackFrame>,
    /// Digests of its chunks in the order of its table; empty once it is in an index.
    pub(super) chunks: Vec<Digest>,
}

/// Durable packs whose index is durable too.
#[derive(Debug, Default)]
pub(super) struct Written {
    /// In the order of their frames.
    pub(super) packs: Vec<WrittenPack>,
    /// Bytes of the index segments.
    pub(super) index_bytes: u64,
    /// Damage found in the store and worked around, one line each.
    pub(super) warnings: Vec<String>,
}

pub(super) struct PackWriter<'scope, 'a> {
    store: &'a LayerStore,
    /// Where full packs are made durable while the next one begins; `None`: at once.
    scope: Option<&'scope Scope<'scope, 'a>>,
    open: Option<Open<'a>>,
    /// The pack before that.
    committing: Option<ScopedJoinHandle<'scope, Result<WrittenPack>>>,
    done: Written,
    /// Packs of `done` that are in an index.
    indexed: usize,
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
            chunks: self.table.chunks.iter().map(|c| c.digest).collect(),
            frames: self.table.frames,
        })
    }
}

impl<'scope, 'a> PackWriter<'scope, 'a> {
    pub(super) fn new(store: &'a LayerStore, scope: Option<&'scope Scope<'scope, 'a>>) -> Self {
        Self {
            store,
            scope,
            open: None,
            committing: None,
            done: Written::default(),
            indexed: 0,
        }
    }

    /// Appends a frame.
    pub(super) fn push(&mut self, frame: &Frame) -> Result<()> {
        let mut open = match self.open.take() {
            Some(open) => open,
            None => {
                let mut open = Open {
                    out: self.store.blobs().put_stream()?,
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
            self.settle()?;
            match self.scope {
                Some(scope) => self.committing = Some(scope.spawn(move || open.commit())),
                None => self.add(open.commit()?)?,
            }
        } else {
            self.open = Some(open);
        }
        Ok(())
    }

    /// Waits until the pack that is on its way is durable.
    fn settle(&mut self) -> Result<()> {
        let Some(thread) = self.committing.take() else {
            return Ok(());
        };
        let failed = |_| StoreError::WriterFailed {
            store: self.store.url().to_owned(),
        };
        let pack = thread.join().map_err(failed)??;
        self.add(pack)
    }

    fn add(&mut self, pack: WrittenPack) -> Result<()> {
        self.done.packs.push(pack);
        let waiting = self.done.packs.get(self.indexed..).unwrap_or_default();
        if waiting.iter().map(|p| p.chunks.len()).sum::<usize>() >= SEGMENT_CHUNKS {
            self.index()?;
        }
        Ok(())
    }

    /// Writes an index segment of the packs that are in none.
    fn index(&mut self) -> Result<()> {
        let waiting = self.done.packs.get_mut(self.indexed..).unwrap_or_default();
        if waiting.is_empty() {
            return Ok(());
        }
        // Before the first index.
        self.done.warnings.extend(self.store.ensure_marker()?);
        self.done.index_bytes += put_segment(self.store.blobs().as_ref(), waiting)?;
        for pack in waiting {
            pack.chunks = Vec::new();
        }
        self.indexed = self.done.packs.len();
        Ok(())
    }

    /// Ends the last pack and the index.
    pub(super) fn finish(mut self) -> Result<Written> {
        self.settle()?;
        if let Some(open) = self.open.take() {
            self.done.packs.push(open.commit()?);
        }
        self.index()?;
        Ok(self.done)
    }
}

/// Writes an index segment of packs; its bytes.
pub(super) fn put_segment(blobs: &dyn BlobStore, packs: &[WrittenPack]) -> Result<u64> {
    if packs.is_empty() {
        return Ok(0);
    }
    let mut entries = Vec::with_capacity(packs.iter().map(|p| p.chunks.len()).sum());
    for (pack, written) in (0_u32..).zip(packs) {
        let chunks = (0_u32..).zip(&written.chunks);
        entries.extend(chunks.map(|(chunk, digest)| IndexEntry {
            digest: *digest,
            pack,
            chunk,
        }));
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
    blobs.put(&Key::index(&Digest::of(&bytes)), &bytes, PutMode::Overwrite)?;
    Ok(bytes.len() as u64)
}
