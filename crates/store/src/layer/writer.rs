//! Writing.
use super::LayerStore;
use crate::chunker::Params;
use crate::digest::Digest;
use crate::error::Result;
use std::io::Read;

/// How a layer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriterOptions {
    /// zstd level, -7 to 22. Not part of a layer's identity.
    pub level: i32,
    /// Threads that compress; 0: as many as the machine runs at once.
    pub jobs: usize,
    /// How files are cut. Part of a layer's identity.
    pub chunker: Params,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self {
            level: 3,
            jobs: 0,
            chunker: Params::default(),
        }
    }
}

/// What writing did so far. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteStats {
    /// Raw bytes of all chunks given.
    pub raw_bytes: u64,
    /// Raw bytes of chunks that were new.
    pub new_raw_bytes: u64,
    /// Bytes written to the store: packs, indexes, metadata, map, locator, manifest.
    pub new_bytes: u64,
    /// Chunks that were new.
    pub new_chunks: u64,
    /// Chunks that the store or this layer had.
    pub reused_chunks: u64,
    /// Frames written.
    pub new_frames: u64,
    /// Packs written.
    pub new_packs: u64,
}

/// A file's content as chunks. Equal for equal content and chunker.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct FileChunks {
    /// Digest and length of each chunk, in order.
    pub chunks: Vec<(Digest, u32)>,
    /// The file's size in bytes: the sum of the lengths.
    pub size: u64,
}

/// Writes one layer's chunks, then publishes it.
#[derive(Debug)]
pub struct LayerWriter {}

impl LayerWriter {
    pub(super) fn new(_store: LayerStore, _options: WriterOptions) -> Result<Self> {
        todo!()
    }
    /// Adds one chunk of 1 byte to 1 MiB.
    ///
    /// # Errors
    /// TODO
    pub fn add_chunk(&mut self, _bytes: &[u8]) -> Result<Digest> {
        todo!()
    }
    /// Adds a file's bytes.
    ///
    /// # Errors
    /// TODO
    pub fn add_file(&mut self, _reader: &mut dyn Read, _size_hint: u64) -> Result<FileChunks> {
        todo!()
    }
    /// What was done so far.
    #[must_use]
    pub fn stats(&self) -> WriteStats {
        todo!()
    }
}
