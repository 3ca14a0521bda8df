//! Writing a layer's chunks: hashed (but for large files) and deduplicated on the caller's thread,
//! gathered into frames, compressed and written by the [`Pipeline`].

use std::io::{self, Read};
use std::path::PathBuf;

use super::LayerStore;
use super::chunks::{Holdings, Place};
use super::dedupe::IndexSet;
use super::hashing::LARGE;
use super::passed::StoredFrame;
use super::pipeline::{FrameChunk, Pipeline, RawFrame};
use super::publish::Sealed;
use super::trust::Trust;
use crate::chunker::{Params, cut};
use crate::codec::{MAX_LEVEL, MIN_LEVEL};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::map::MAX_CHUNK_LEN;

/// See [`WriterOptions::frame`]. `cargo xtask bench frames` shows the trade-off: twice as large
/// frames take 1 to 2% less room and let a partial read fetch a tenth more.
const FRAME: usize = 128 << 10;
/// What frames may have: a chunk of 1 MiB more and they are still far from the format's limit.
const FRAMES: std::ops::RangeInclusive<usize> = 4096..=(2 << 20);
/// Threads that compress, at most.
const MAX_JOBS: usize = 256;

/// How a layer is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriterOptions {
    /// zstd level, -7 to 22. Not part of a layer's identity.
    pub level: i32,
    /// Threads that compress, up to 256; 0: as many as the machine runs at once. Not part of a
    /// layer's identity.
    pub jobs: usize,
    /// How files are cut. Part of a layer's identity.
    pub chunker: Params,
    /// Raw bytes of a frame: chunks are gathered until it has so many, and a chunk that has them
    /// alone is a frame of its own. 4 KiB to 2 MiB. Not part of a layer's identity.
    pub frame: usize,
    /// Directory in which this machine remembers which frames of which packs it has verified
    /// lately, so that they can be shared without being read again (FORMAT.md, "Sharing
    /// frames"). `None`: every frame is read and verified once before it is shared.
    pub verified_cache: Option<PathBuf>,
    /// Read and verify every frame before it is shared, whatever is remembered; what is found is
    /// remembered instead.
    pub verify_all: bool,
    /// Directory of this machine for an unnamed temporary file with what has to be known of each
    /// chunk of a large layer (44 bytes). `None`: that stays in memory.
    pub scratch: Option<PathBuf>,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self {
            level: 3,
            jobs: 0,
            chunker: Params::default(),
            frame: FRAME,
            verified_cache: None,
            verify_all: false,
            scratch: None,
        }
    }
}

/// What writing did so far. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteStats {
    /// Raw bytes of all chunks given.
    pub raw_bytes: u64,
    /// Raw bytes of chunks that were new.
    pub new_raw_bytes: u64,
    /// Bytes written to the store: packs, index, metadata, map, locator, manifest, reference.
    /// Known after publishing.
    pub new_bytes: u64,
    /// Chunks that were new.
    pub new_chunks: u64,
    /// Chunks that the store or this layer had.
    pub reused_chunks: u64,
    /// Frames handed over for writing.
    pub new_frames: u64,
    /// Packs written. Known after publishing.
    pub new_packs: u64,
}

impl WriteStats {
    /// What was done since then.
    pub(super) const fn since(&self, earlier: &Self) -> Self {
        Self {
            raw_bytes: self.raw_bytes.saturating_sub(earlier.raw_bytes),
            new_raw_bytes: self.new_raw_bytes.saturating_sub(earlier.new_raw_bytes),
            new_bytes: self.new_bytes.saturating_sub(earlier.new_bytes),
            new_chunks: self.new_chunks.saturating_sub(earlier.new_chunks),
            reused_chunks: self.reused_chunks.saturating_sub(earlier.reused_chunks),
            new_frames: self.new_frames.saturating_sub(earlier.new_frames),
            new_packs: self.new_packs.saturating_sub(earlier.new_packs),
        }
    }
}

/// A file's content as chunks. Equal for equal content and chunker.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct FileChunks {
    /// Digest and length of each chunk, in order.
    pub chunks: Vec<(Digest, u32)>,
    /// The file's size in bytes: the sum of the lengths.
    pub size: u64,
}

impl FileChunks {
    /// Adds a chunk, which is not longer than one may be.
    pub(super) fn push(&mut self, digest: Digest, len: usize) {
        self.chunks
            .push((digest, u32::try_from(len).unwrap_or(u32::MAX)));
        self.size += len as u64;
    }
}

/// Writes one layer's chunks, then publishes it with [`LayerWriter::finish`]. Dropped without
/// that, nothing of it is visible except packs that no index names.
///
/// Memory: what the store's index needs (see [`crate::index`]; about 1.4 bytes a chunk with a
/// cache), 5 to 10 bytes for each chunk of this layer (without [`WriterOptions::scratch`] about
/// 54), and a bounded number of frames.
#[derive(Debug)]
pub struct LayerWriter {
    pub(super) store: LayerStore,
    pub(super) options: WriterOptions,
    pub(super) index: IndexSet,
    pub(super) held: Holdings,
    /// A frame's number in the pipeline, by the ticket it got when it was begun, counted from the
    /// first that was not settled before.
    pub(super) tickets: Vec<Option<u64>>,
    first_ticket: usize,
    pub(super) pipeline: Pipeline,
    /// No chunk can be added any more.
    closed: bool,
    pending: RawFrame,
    pending_ticket: u32,
    pub(super) stats: WriteStats,
    /// Of an earlier part of the same session.
    pub(super) warnings: Vec<String>,
    buffer: Vec<u8>,
}

impl LayerWriter {
    pub(super) fn new(store: LayerStore, options: WriterOptions) -> Result<Self> {
        let invalid = |what: String| StoreError::InvalidInput {
            object: "a layer".to_owned(),
            what,
        };
        options
            .chunker
            .check()
            .map_err(|e| invalid(e.to_string()))?;
        if !(MIN_LEVEL..=MAX_LEVEL).contains(&options.level) {
            return Err(invalid(format!(
                "level {} is not within {MIN_LEVEL} to {MAX_LEVEL}",
                options.level
            )));
        }
        if !FRAMES.contains(&options.frame) {
            return Err(invalid(format!(
                "frames of {} bytes are not within {} to {}",
                options.frame,
                FRAMES.start(),
                FRAMES.end()
            )));
        }
        let jobs = jobs_of(options.jobs)?;
        store.check_marker()?;
        let mut index = IndexSet::open(store.clone())?;
        index.frames.trust = options
            .verified_cache
            .as_deref()
            .map(|directory| Trust::load(directory, store.url(), options.verify_all));
        let pipeline = Pipeline::new(store.clone(), options.level, jobs)?;
        let held = Holdings::new(options.scratch.as_deref());
        Ok(Self {
            store,
            options,
            index,
            held,
            tickets: vec![None],
            first_ticket: 0,
            pipeline,
            closed: false,
            pending: RawFrame::default(),
            pending_ticket: 0,
            stats: WriteStats::default(),
            warnings: Vec::new(),
            buffer: Vec::new(),
        })
    }

    /// A writer that goes on after [`Sealed::reopen`]: all that it knows is in the store.
    pub(super) fn resume(sealed: Sealed) -> Result<Self> {
        let jobs = jobs_of(sealed.options.jobs)?;
        let pipeline = Pipeline::new(sealed.store.clone(), sealed.options.level, jobs)?;
        let first_ticket = sealed.held.first_ticket();
        Ok(Self {
            store: sealed.store,
            options: sealed.options,
            index: sealed.index,
            held: sealed.held,
            tickets: vec![None],
            first_ticket,
            pipeline,
            closed: false,
            pending: RawFrame::default(),
            pending_ticket: u32::try_from(first_ticket).unwrap_or(u32::MAX), // its use is checked
            stats: sealed.stats,
            warnings: sealed.warnings,
            buffer: Vec::new(),
        })
    }

    /// Adds one chunk of 1 byte to 1 MiB. Does nothing more if the layer or the store has it.
    ///
    /// # Errors
    /// [`StoreError::InvalidInput`] for an empty or longer chunk; else what went wrong in reading
    /// the store's packs or in writing this or an earlier chunk.
    pub fn add_chunk(&mut self, bytes: &[u8]) -> Result<Digest> {
        let len = u32::try_from(bytes.len())
            .ok()
            .filter(|len| (1..=MAX_CHUNK_LEN).contains(len))
            .ok_or_else(|| StoreError::InvalidInput {
                object: "a layer".to_owned(),
                what: format!(
                    "a chunk has {} bytes, 1 to {MAX_CHUNK_LEN} are allowed",
                    bytes.len()
                ),
            })?;
        self.check_open()?;
        self.add_known(bytes, len, Digest::of(bytes))
    }

    /// Adds a chunk whose digest is known.
    pub(super) fn add_hashed(&mut self, bytes: &[u8], digest: Digest) -> Result<()> {
        self.check_open()?;
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX); // the chunker's are smaller
        self.add_known(bytes, len, digest).map(drop)
    }

    fn add_known(&mut self, bytes: &[u8], len: u32, digest: Digest) -> Result<Digest> {
        self.stats.raw_bytes += u64::from(len);
        if self.held.contains(&digest)? || self.find_stored(&digest, len)? {
            self.stats.reused_chunks += 1;
            return Ok(digest);
        }
        let (ticket, offset) = self.put_new(digest, len, bytes)?;
        self.held
            .insert_new(digest, len, Place::New(ticket), offset)?;
        Ok(digest)
    }

    /// Adds a chunk though the store has it: it lies in a new frame.
    pub(super) fn add_anew(&mut self, bytes: &[u8]) -> Result<()> {
        self.check_open()?;
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX); // one of a pack's table
        self.stats.raw_bytes += u64::from(len);
        let digest = Digest::of(bytes);
        let (ticket, offset) = self.put_new(digest, len, bytes)?;
        self.held.insert(digest, len, Place::New(ticket), offset)
    }

    /// Puts a chunk into a frame: its ticket, and where the chunk begins in it.
    fn put_new(&mut self, digest: Digest, len: u32, bytes: &[u8]) -> Result<(u32, u32)> {
        let (ticket, offset) = if bytes.len() >= self.options.frame {
            let ticket = self.ticket()?;
            let chunks = vec![FrameChunk {
                digest,
                offset: 0,
                len,
            }];
            self.submit(
                RawFrame {
                    raw: bytes.to_vec(),
                    chunks,
                },
                ticket,
            )?;
            (ticket, 0)
        } else {
            let offset = u32::try_from(self.pending.raw.len()).unwrap_or(u32::MAX); // below 2 MiB
            self.pending.raw.extend_from_slice(bytes);
            self.pending.chunks.push(FrameChunk {
                digest,
                offset,
                len,
            });
            let ticket = self.pending_ticket;
            if self.pending.raw.len() >= self.options.frame {
                self.flush()?;
            }
            (ticket, offset)
        };
        self.stats.new_chunks += 1;
        self.stats.new_raw_bytes += u64::from(len);
        Ok((ticket, offset))
    }

    /// Whether this writer or the store has a usable chunk of this digest and length. A chunk of
    /// the store counts only after its frame was read and verified, once.
    ///
    /// # Errors
    /// What went wrong in reading the store's packs.
    pub fn has_chunk(&mut self, digest: &Digest, len: u32) -> Result<bool> {
        self.check_open()?;
        Ok(match self.held.get(digest)? {
            Some(known) => known.len == len,
            None => self.find_stored(digest, len)?,
        })
    }

    /// Uses chunks whose bytes the caller knows to be those of the digests, without having them
    /// at hand. `false`, and nothing counted, unless the layer or the store has every one of them.
    ///
    /// # Errors
    /// What went wrong in reading the store's packs.
    pub fn reuse(&mut self, chunks: &[(Digest, u32)]) -> Result<bool> {
        self.index.expect(chunks.iter().map(|(digest, _)| *digest));
        for (digest, len) in chunks {
            if !self.has_chunk(digest, *len)? {
                return Ok(false);
            }
        }
        for (_, len) in chunks {
            self.stats.raw_bytes += u64::from(*len);
            self.stats.reused_chunks += 1;
        }
        Ok(true)
    }

    /// Adds a frame as another store holds it, without compressing it anew. Where the store has
    /// most of its chunks, only the others are added, in new frames.
    ///
    /// # Errors
    /// What went wrong in reading the store's packs or in writing this or an earlier frame.
    pub fn add_stored_frame(&mut self, frame: StoredFrame) -> Result<()> {
        let mut missing = Vec::new();
        self.index
            .expect(frame.frame.chunks.iter().map(|chunk| chunk.digest));
        for chunk in &frame.frame.chunks {
            if !self.has_chunk(&chunk.digest, chunk.len)? {
                missing.push(*chunk);
            }
        }
        let bytes: u64 = missing.iter().map(|c| u64::from(c.len)).sum();
        if missing.is_empty()
            || (!frame.raw.is_empty()
                && (frame.apart || bytes * 2 < u64::from(frame.frame.raw_len)))
        {
            for chunk in missing {
                let start = usize::try_from(chunk.offset).unwrap_or(usize::MAX);
                let len = usize::try_from(chunk.len).unwrap_or(usize::MAX);
                let range = start..start.saturating_add(len);
                self.add_chunk(frame.raw.get(range).unwrap_or_default())?;
            }
            return Ok(());
        }
        let ticket = self.ticket()?;
        for chunk in missing {
            let place = Place::New(ticket);
            self.held
                .insert(chunk.digest, chunk.len, place, chunk.offset)?;
            self.stats.new_chunks += 1;
            self.stats.new_raw_bytes += u64::from(chunk.len);
            self.stats.raw_bytes += u64::from(chunk.len);
        }
        let number = self.pipeline.submit_ready(frame.frame)?;
        self.note(ticket, number);
        Ok(())
    }

    /// Says that no chunk comes any more: what is left is written to the store while the caller lays
    /// the layer out. Only [`LayerWriter::finish`] and [`LayerWriter::seal`] can follow; what
    /// would add or look up a chunk is refused.
    ///
    /// # Errors
    /// What went wrong in writing an earlier chunk.
    pub fn close(&mut self) -> Result<()> {
        self.flush()?;
        self.pipeline.close();
        self.held.rest();
        self.index.rest();
        self.closed = true;
        Ok(())
    }

    fn check_open(&self) -> Result<()> {
        if self.closed {
            return Err(StoreError::InvalidInput {
                object: "a layer".to_owned(),
                what: "a chunk came after its last".to_owned(),
            });
        }
        Ok(())
    }

    /// Looks a chunk up in the store and remembers it.
    pub(super) fn find_stored(&mut self, digest: &Digest, len: u32) -> Result<bool> {
        match self.index.locate(digest)? {
            Some(chunk) if chunk.len == len => {
                self.held.insert_stored(digest, &chunk)?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    fn ticket(&mut self) -> Result<u32> {
        let next = self.first_ticket.saturating_add(self.tickets.len());
        let ticket = u32::try_from(next).map_err(|_| StoreError::InvalidInput {
            object: "a layer".to_owned(),
            what: "it has more than 2^32-1 frames".to_owned(),
        })?;
        self.tickets.push(None);
        Ok(ticket)
    }

    fn submit(&mut self, frame: RawFrame, ticket: u32) -> Result<()> {
        let number = self.pipeline.submit(frame)?;
        self.note(ticket, number);
        Ok(())
    }

    fn note(&mut self, ticket: u32, number: u64) {
        let index = usize::try_from(ticket).unwrap_or(usize::MAX);
        let index = index.saturating_sub(self.first_ticket);
        if let Some(slot) = self.tickets.get_mut(index) {
            *slot = Some(number);
        }
        self.stats.new_frames += 1;
    }

    /// Hands over the frame that small chunks are gathered in.
    pub(super) fn flush(&mut self) -> Result<()> {
        if self.pending.raw.is_empty() {
            return Ok(());
        }
        let next = RawFrame {
            // As much as it will have, or nearly: what is in it already was less than a frame.
            raw: Vec::with_capacity(self.options.frame + self.options.frame / 2),
            chunks: Vec::new(),
        };
        let frame = std::mem::replace(&mut self.pending, next);
        let ticket = self.pending_ticket;
        self.pending_ticket = self.ticket()?;
        self.submit(frame, ticket)
    }

    /// Adds a file's bytes, to the end of `reader`: one chunk if it is small, else cut by the
    /// writer's chunker. `size_hint` (bytes) need not be right.
    ///
    /// # Errors
    /// [`StoreError::Input`] if `reader` fails; else as [`LayerWriter::add_chunk`].
    pub fn add_file(&mut self, reader: &mut dyn Read, size_hint: u64) -> Result<FileChunks> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let result = self.add_file_with(&mut buffer, reader, size_hint);
        self.buffer = buffer;
        result
    }

    /// As [`LayerWriter::add_file`] for a whole file in memory.
    ///
    /// # Errors
    /// As [`LayerWriter::add_chunk`].
    pub fn add_bytes(&mut self, bytes: &[u8]) -> Result<FileChunks> {
        let params = self.options.chunker;
        let mut file = FileChunks::default();
        let mut rest = bytes;
        while !rest.is_empty() {
            let len = match bytes.len() <= params.whole {
                true => rest.len(),
                false => cut(rest, &params),
            };
            let (piece, others) = rest.split_at_checked(len).unwrap_or((rest, &[]));
            self.add_piece(&mut file, piece)?;
            rest = others;
        }
        Ok(file)
    }

    fn add_file_with(
        &mut self,
        buffer: &mut Vec<u8>,
        reader: &mut dyn Read,
        size_hint: u64,
    ) -> Result<FileChunks> {
        let params = self.options.chunker;
        buffer.resize(params.max.max(256 << 10) * 4, 0);
        let mut file = FileChunks::default();
        // The buffer's bytes not yet cut are buffer[..len]. First only as much as tells a small
        // file from others.
        let mut len = fill(reader, buffer.get_mut(..=params.whole).unwrap_or_default())?;
        if len <= params.whole {
            if len > 0 {
                self.add_piece(&mut file, buffer.get(..len).unwrap_or_default())?;
            }
            return Ok(file);
        }
        if size_hint >= LARGE {
            let begun = buffer.get(..len).unwrap_or_default();
            if let Some(file) = self.add_large(begun, reader)? {
                return Ok(file);
            }
        }
        file.chunks
            .reserve(usize::try_from(size_hint >> 16).unwrap_or(0).min(1 << 16));
        loop {
            let space = buffer.get_mut(len..).unwrap_or_default();
            let wanted = space.len();
            let got = fill(reader, space)?;
            len += got;
            let ended = got < wanted;
            let mut rest = buffer.get(..len).unwrap_or_default();
            while rest.len() >= params.max || (ended && !rest.is_empty()) {
                let (piece, others) = rest
                    .split_at_checked(cut(rest, &params))
                    .unwrap_or((rest, &[]));
                self.add_piece(&mut file, piece)?;
                rest = others;
            }
            if ended {
                return Ok(file);
            }
            let kept = rest.len();
            buffer.copy_within(len - kept..len, 0);
            len = kept;
        }
    }

    fn add_piece(&mut self, file: &mut FileChunks, bytes: &[u8]) -> Result<()> {
        let digest = self.add_chunk(bytes)?;
        file.push(digest, bytes.len());
        Ok(())
    }

    pub(super) fn chunker(&self) -> Params {
        self.options.chunker
    }

    /// The store's address.
    pub(super) fn url(&self) -> &str {
        self.store.url()
    }

    /// What was done so far.
    #[must_use]
    pub const fn stats(&self) -> WriteStats {
        self.stats
    }
}

/// Threads for this option.
fn jobs_of(option: usize) -> Result<usize> {
    match option {
        0 => Ok(std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MAX_JOBS)),
        jobs if jobs <= MAX_JOBS => Ok(jobs),
        jobs => Err(StoreError::InvalidInput {
            object: "a layer".to_owned(),
            what: format!("{jobs} jobs are more than {MAX_JOBS}"),
        }),
    }
}

/// Reads until `buffer` is full or the input ends.
pub(super) fn fill(reader: &mut dyn Read, buffer: &mut [u8]) -> Result<usize> {
    let mut len = 0;
    while let Some(space) = buffer.get_mut(len..).filter(|space| !space.is_empty()) {
        match reader.read(space) {
            Ok(0) => break,
            Ok(n) => len += n.min(space.len()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(StoreError::Input(e)),
        }
    }
    Ok(len)
}
