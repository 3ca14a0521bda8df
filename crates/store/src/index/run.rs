//! A run: many segments as one file of the node's own. FORMAT.md, section "Index run".
//!
//! Chunks lie in the order of digests, each with its own checksum, in blocks by their first bits;
//! two tables behind them say where each block begins, and one byte of each digest. A look-up takes
//! the block's place from the first table, the chunk's place in it from the second, and reads that
//! chunk alone: 44 bytes of one page. Absent chunks cost no read but for one in twenty. Only the
//! header and the segments' names are read when a run is opened; the tables are when they are first
//! needed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::digest::Digest;
use crate::format::index::{IndexPack, WireChunk};
use crate::format::{Prelude, header_crc};

const NAME: &str = "LPRUN";
const MAGIC: [u8; 8] = *b"LPRUN2\r\n";
/// Of the runs before, whose blocks had a checksum and their chunks none.
const OLD_MAGIC: [u8; 8] = *b"LPRUN\0\r\n";
/// Bits of a digest that choose its block, at most.
const MAX_BITS: u32 = 24;
/// Chunks of a block, at most. Digests are uniform: a usual block has 8 to 16, and what does not fit
/// is left out, which costs a chunk its sharing and nothing else.
pub(super) const MAX_BLOCK: usize = 4096;
/// Look-ups after which the table of digest bytes is worth reading.
const FILTER_AFTER: u32 = 512;
/// Bytes of the table of digest bytes that are kept in memory, at most: larger runs do without.
const MAX_FILTER: u64 = 96 << 20;
/// Packs of a run whose records are kept in memory, at most (3.5 MiB): those of larger runs are read
/// one by one.
const MAX_RECORDS: u32 = 1 << 16;
/// Segments of a run, at most.
const MAX_SEGMENTS: u32 = 1 << 24;

#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub(super) struct Header {
    prelude: Prelude,
    chunk_count: U64,
    segment_count: U32,
    pack_count: U32,
    /// Leading bits of a digest that are its block's number.
    bits: U32,
    pub(super) segments_crc: U32,
    pub(super) starts_crc: U32,
    pub(super) filter_crc: U32,
    reserved: U32,
    /// crc32c of the 60 bytes above.
    crc: U32,
}
const _: () = assert!(size_of::<Header>() == 64);

/// A pack as a run has it. One that several segments name has a record for each: which chunks of
/// it count depends on which of them the store still has.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub(super) struct RunPack {
    id: Digest,
    size: U64,
    table_offset: U64,
    /// Index into the run's segments: the one that names it so.
    segment: U32,
    /// crc32c of the 52 bytes above.
    crc: U32,
}
const _: () = assert!(size_of::<RunPack>() == 56);

/// A chunk as a run has it.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub(super) struct RunChunk {
    chunk: WireChunk,
    /// crc32c of the 40 bytes above.
    crc: U32,
}
const _: () = assert!(size_of::<RunChunk>() == 44);

impl RunChunk {
    pub(super) fn new(chunk: WireChunk) -> Self {
        Self {
            crc: crc32c::crc32c(chunk.as_bytes()).into(),
            chunk,
        }
    }

    pub(super) fn check(&self) -> io::Result<&WireChunk> {
        if crc32c::crc32c(self.chunk.as_bytes()) == self.crc.get() {
            Ok(&self.chunk)
        } else {
            Err(damaged("the checksum of a chunk is wrong"))
        }
    }
}

/// Bytes of a chunk.
pub(super) const CHUNK: u64 = size_of::<RunChunk>() as u64;
pub(super) const BLOCKS_START: u64 = size_of::<Header>() as u64;

impl Header {
    pub(super) fn new(chunks: u64, segments: u32, packs: u32, bits: u32, crcs: [u32; 3]) -> Self {
        let [segments_crc, starts_crc, filter_crc] = crcs;
        let mut header = Self {
            prelude: Prelude::new(MAGIC),
            chunk_count: chunks.into(),
            segment_count: segments.into(),
            pack_count: packs.into(),
            bits: bits.into(),
            segments_crc: segments_crc.into(),
            starts_crc: starts_crc.into(),
            filter_crc: filter_crc.into(),
            reserved: U32::new(0),
            crc: U32::new(0),
        };
        header.crc = header_crc(&header).into();
        header
    }

    fn check(&self) -> Result<(), String> {
        let text = |e: crate::error::FormatError| e.to_string();
        self.prelude.check_start(NAME, &MAGIC).map_err(text)?;
        if self.crc.get() != header_crc(self) {
            return Err("the header's checksum is wrong".to_owned());
        }
        self.prelude.check_features(NAME).map_err(text)?;
        if self.bits.get() > MAX_BITS
            || self.chunk_count.get() > u64::from(u32::MAX)
            || self.segment_count.get() > MAX_SEGMENTS
        {
            return Err("a count is out of its limits".to_owned());
        }
        Ok(())
    }

    pub(super) fn layout(&self) -> Layout {
        let chunks = self.chunk_count.get();
        let blocks = 1_u64 << self.bits.get().min(MAX_BITS);
        let filter = BLOCKS_START + chunks * CHUNK;
        let starts = filter + chunks;
        let packs = starts + (blocks + 1) * 4;
        let segments = packs + u64::from(self.pack_count.get()) * size_of::<RunPack>() as u64;
        Layout {
            filter,
            starts,
            packs,
            segments,
            end: segments + u64::from(self.segment_count.get()) * Digest::LEN as u64,
        }
    }
}

/// Where a run's sections begin, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    filter: u64,
    starts: u64,
    packs: u64,
    segments: u64,
    end: u64,
}

impl RunPack {
    pub(super) fn new(pack: &IndexPack, segment: u32) -> Self {
        let mut wire = Self {
            id: pack.id,
            size: pack.size.into(),
            table_offset: pack.table_offset.into(),
            segment: segment.into(),
            crc: U32::new(0),
        };
        wire.crc = header_crc(&wire).into();
        wire
    }

    fn check(&self) -> io::Result<()> {
        if self.crc.get() == header_crc(self) {
            return Ok(());
        }
        Err(damaged("the checksum of a pack's record is wrong"))
    }

    pub(super) fn pack(&self) -> IndexPack {
        IndexPack {
            id: self.id,
            size: self.size.get(),
            table_offset: self.table_offset.get(),
        }
    }

    pub(super) fn segment(&self) -> u32 {
        self.segment.get()
    }
}

pub(super) fn damaged(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// Bits for a run of about `chunks` chunks: 8 to 16 in a block.
pub(super) fn bits_for(chunks: u64) -> u32 {
    (chunks / 8).checked_ilog2().unwrap_or(0).min(MAX_BITS)
}

/// The block of a digest.
pub(super) fn block_of(digest: &Digest, bits: u32) -> u64 {
    let first = digest.as_bytes().first_chunk::<8>().copied();
    let first = u64::from_be_bytes(first.unwrap_or_default());
    first.checked_shr(64 - bits).unwrap_or(0)
}

/// The byte of a digest that the filter has.
pub(super) fn filter_byte(digest: &Digest) -> u8 {
    digest.as_bytes().get(8).copied().unwrap_or(0)
}

/// An open run. The file may have lost its name since: it stays readable.
#[derive(Debug)]
pub(super) struct Run {
    path: PathBuf,
    file: File,
    chunks: u64,
    packs: u32,
    bits: u32,
    layout: Layout,
    crcs: (u32, u32),
    segments: Vec<Digest>,
    /// Of each segment, whether the store has it.
    pub(super) live: Vec<bool>,
    starts: OnceLock<Vec<u32>>,
    filter: OnceLock<Vec<u8>>,
    records: OnceLock<Vec<RunPack>>,
    lookups: AtomicU32,
}

impl Run {
    /// Opens and checks header and segments. [`io::ErrorKind::InvalidData`]: damaged;
    /// [`io::ErrorKind::Unsupported`]: of an older version.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = fs_err::File::open(path)?.into_file();
        let mut header = [0; size_of::<Header>()];
        let short = |e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => damaged("it is too short"),
            _ => e,
        };
        file.read_exact_at(&mut header, 0).map_err(short)?;
        let header = Header::ref_from_bytes(&header).map_err(|_| damaged("it is too short"))?;
        if header.prelude.has_magic(&OLD_MAGIC) {
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        }
        header.check().map_err(damaged)?;
        let layout = header.layout();
        let size = file.metadata()?.len();
        if size != layout.end {
            return Err(damaged(format!(
                "it has {size} bytes instead of {}",
                layout.end
            )));
        }
        let mut segments = vec![0; to_usize(layout.end - layout.segments)];
        file.read_exact_at(&mut segments, layout.segments)
            .map_err(short)?;
        if crc32c::crc32c(&segments) != header.segments_crc.get() {
            return Err(damaged("the checksum of its segments' names is wrong"));
        }
        let segments: Vec<Digest> = segments
            .chunks_exact(Digest::LEN)
            .filter_map(|bytes| bytes.first_chunk().copied().map(Digest::from_bytes))
            .collect();
        Ok(Self {
            path: path.to_owned(),
            file,
            chunks: header.chunk_count.get(),
            packs: header.pack_count.get(),
            bits: header.bits.get(),
            layout,
            crcs: (header.starts_crc.get(), header.filter_crc.get()),
            live: vec![true; segments.len()],
            segments,
            starts: OnceLock::new(),
            filter: OnceLock::new(),
            records: OnceLock::new(),
            lookups: AtomicU32::new(0),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn segments(&self) -> &[Digest] {
        &self.segments
    }

    pub(super) const fn chunks(&self) -> u64 {
        self.chunks
    }

    pub(super) const fn bits(&self) -> u32 {
        self.bits
    }

    pub(super) const fn file_len(&self) -> u64 {
        self.layout.end
    }

    pub(super) fn memory(&self) -> u64 {
        let starts = self.starts.get().map_or(0, |s| s.len() as u64 * 4);
        let filter = self.filter.get().map_or(0, |f| f.len() as u64);
        let records = self.records.get().map_or(0, |r| r.len() as u64 * 56);
        starts + filter + records + self.segments.len() as u64 * 33
    }

    /// Whether the store has the segment that names this pack of the run.
    pub(super) fn is_live(&self, pack: &RunPack) -> bool {
        let segment = usize::try_from(pack.segment()).ok();
        segment.and_then(|s| self.live.get(s)) == Some(&true)
    }

    /// Where each block begins, in chunks; one more than there are blocks.
    pub(super) fn starts(&self) -> io::Result<&[u32]> {
        if let Some(starts) = self.starts.get() {
            return Ok(starts);
        }
        let count = (1_usize << self.bits) + 1;
        let mut starts: Vec<u32> = Vec::with_capacity(count);
        let mut buffer = vec![0; (count * 4).min(64 << 10)];
        let (mut at, mut crc) = (self.layout.starts, 0);
        while at < self.layout.packs {
            let len = to_usize(self.layout.packs - at).min(buffer.len());
            let part = buffer.get_mut(..len).unwrap_or_default();
            self.file.read_exact_at(part, at)?;
            crc = crc32c::crc32c_append(crc, part);
            starts.extend(
                part.chunks_exact(4)
                    .filter_map(|b| b.first_chunk().copied().map(u32::from_le_bytes)),
            );
            at += len as u64;
        }
        let most = u32::try_from(MAX_BLOCK).unwrap_or(u32::MAX);
        let sound = crc == self.crcs.0
            && starts.first() == Some(&0)
            && starts.last().map(|n| u64::from(*n)) == Some(self.chunks)
            && starts
                .windows(2)
                .all(|w| matches!(w, [a, b] if b.checked_sub(*a).is_some_and(|n| n <= most)));
        if !sound {
            return Err(damaged("its table of blocks is damaged"));
        }
        Ok(self.starts.get_or_init(|| starts))
    }

    /// The filter, once it is worth its memory: `lookups` more are about to ask it.
    pub(super) fn filter(&self, lookups: usize) -> io::Result<Option<&[u8]>> {
        if let Some(filter) = self.filter.get() {
            return Ok(Some(filter));
        }
        let lookups = u32::try_from(lookups.clamp(1, 1 << 16)).unwrap_or(1);
        let before = self.lookups.fetch_add(lookups, Ordering::Relaxed);
        if self.chunks > MAX_FILTER || before.saturating_add(lookups) <= FILTER_AFTER {
            return Ok(None);
        }
        let mut filter = vec![0; to_usize(self.chunks)];
        self.file.read_exact_at(&mut filter, self.layout.filter)?;
        if crc32c::crc32c(&filter) != self.crcs.1 {
            return Err(damaged("its table of digest bytes is damaged"));
        }
        Ok(Some(self.filter.get_or_init(|| filter)))
    }

    /// Adds (pack, chunk) of each place of the digest to `found`. `buffer` is scratch space.
    pub(super) fn find(
        &self,
        digest: &Digest,
        buffer: &mut Vec<u8>,
        found: &mut Vec<(u32, u32)>,
    ) -> io::Result<()> {
        let starts = self.starts()?;
        let block = block_of(digest, self.bits);
        let i = to_usize(block);
        let (Some(&from), Some(&to)) = (starts.get(i), starts.get(i + 1)) else {
            return Ok(());
        };
        if from == to {
            return Ok(());
        }
        match self.filter(1)? {
            Some(filter) => self.find_by_filter(filter, digest, from, to, buffer, found),
            None => {
                let chunks = self.read_chunks(from, to - from, buffer)?;
                let first = chunks.partition_point(|c| &c.chunk.digest < digest);
                // All of the block: a wrong bit may have put the order wrong.
                for chunk in chunks {
                    chunk.check()?;
                }
                let rest = chunks.get(first..).unwrap_or_default().iter();
                found.extend(
                    rest.take_while(|c| &c.chunk.digest == digest)
                        .map(|c| (c.chunk.pack.get(), c.chunk.chunk.get())),
                );
                Ok(())
            }
        }
    }

    /// Reads those chunks of `from..to` whose byte in the filter is the digest's: places of one
    /// digest lie side by side.
    fn find_by_filter(
        &self,
        filter: &[u8],
        digest: &Digest,
        from: u32,
        to: u32,
        buffer: &mut Vec<u8>,
        found: &mut Vec<(u32, u32)>,
    ) -> io::Result<()> {
        let byte = filter_byte(digest);
        let (mut first, end) = (to_usize(from.into()), to_usize(to.into()));
        while let Some(skipped) = filter
            .get(first..end)
            .and_then(|rest| rest.iter().position(|b| *b == byte))
        {
            first += skipped;
            let rest = filter.get(first..end).unwrap_or_default();
            let count = rest.iter().take_while(|b| **b == byte).count();
            let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX); // within `from..to`
            let before = found.len();
            let mut beyond = false;
            for chunk in self.read_chunks(number(first), number(count), buffer)? {
                let chunk = chunk.check()?;
                match chunk.digest.cmp(digest) {
                    std::cmp::Ordering::Less => {}
                    std::cmp::Ordering::Equal => {
                        found.push((chunk.pack.get(), chunk.chunk.get()));
                    }
                    std::cmp::Ordering::Greater => beyond = true,
                }
            }
            if beyond || found.len() > before {
                break;
            }
            first += count;
        }
        Ok(())
    }

    /// The `count` chunks from number `first` on, not checked.
    pub(super) fn read_chunks<'b>(
        &self,
        first: u32,
        count: u32,
        buffer: &'b mut Vec<u8>,
    ) -> io::Result<&'b [RunChunk]> {
        let len = to_usize(u64::from(count) * CHUNK);
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        let bytes = buffer.get_mut(..len).unwrap_or_default();
        self.file.read_exact_at(bytes, chunk_offset(first))?;
        <[RunChunk]>::ref_from_bytes(bytes).map_err(|_| damaged("a chunk is cut off"))
    }

    /// A pack's record.
    pub(super) fn pack(&self, number: u32) -> io::Result<RunPack> {
        if number >= self.packs {
            return Err(damaged("a chunk is in a pack that it does not have"));
        }
        if let Some(records) = self.records()? {
            let record = usize::try_from(number).ok().and_then(|n| records.get(n));
            return record.copied().ok_or_else(|| damaged("a pack is cut off"));
        }
        let mut bytes = [0; size_of::<RunPack>()];
        let at = self.layout.packs + u64::from(number) * size_of::<RunPack>() as u64;
        self.file.read_exact_at(&mut bytes, at)?;
        let pack = RunPack::read_from_bytes(&bytes).map_err(|_| damaged("a pack is cut off"))?;
        pack.check()?;
        Ok(pack)
    }

    /// The packs' records, if they are few enough to be kept.
    fn records(&self) -> io::Result<Option<&[RunPack]>> {
        if self.packs > MAX_RECORDS {
            return Ok(None);
        }
        if let Some(records) = self.records.get() {
            return Ok(Some(records));
        }
        let mut records = Vec::with_capacity(usize::try_from(self.packs).unwrap_or(0));
        self.for_each_pack(|pack| records.push(pack))?;
        Ok(Some(self.records.get_or_init(|| records)))
    }

    /// All packs, in bounded pieces.
    pub(super) fn for_each_pack(&self, mut each: impl FnMut(RunPack)) -> io::Result<()> {
        let mut buffer = vec![0; size_of::<RunPack>() * 1024];
        let mut at = self.layout.packs;
        while at < self.layout.segments {
            let len = to_usize(self.layout.segments - at).min(buffer.len());
            let part = buffer.get_mut(..len).unwrap_or_default();
            self.file.read_exact_at(part, at)?;
            let (packs, _) =
                <[RunPack]>::ref_from_prefix_with_elems(part, part.len() / size_of::<RunPack>())
                    .map_err(|_| damaged("a pack is cut off"))?;
            for pack in packs {
                pack.check()?;
                each(*pack);
            }
            at += len as u64;
        }
        Ok(())
    }

    /// Reads and checks everything.
    pub(super) fn check_all(&self) -> io::Result<()> {
        let starts = self.starts()?;
        let mut buffer = Vec::new();
        let mut block = 0;
        let mut crc = 0;
        while block < 1 << self.bits {
            let end = self.read_blocks(block, 1 << 20, &mut buffer)?;
            let mut rest = buffer.as_slice();
            for b in block..end {
                let start = |b: u64| starts.get(to_usize(b)).copied().unwrap_or(0);
                let len = u64::from(start(b + 1) - start(b)) * CHUNK;
                let (bytes, others) = rest
                    .split_at_checked(to_usize(len))
                    .ok_or_else(|| damaged("a block is cut off"))?;
                for chunk in chunks_of(bytes)? {
                    let chunk = chunk.check()?;
                    if block_of(&chunk.digest, self.bits) != b || chunk.pack.get() >= self.packs {
                        return Err(damaged("a chunk is out of place"));
                    }
                    crc = crc32c::crc32c_append(crc, &[filter_byte(&chunk.digest)]);
                }
                rest = others;
            }
            block = end;
        }
        if crc != self.crcs.1 {
            return Err(damaged("its table of digest bytes is damaged"));
        }
        self.for_each_pack(|_| ())
    }

    /// Reads blocks from `block` on, about `most` bytes of them but at least one; the block after
    /// them.
    pub(super) fn read_blocks(
        &self,
        block: u64,
        most: u64,
        buffer: &mut Vec<u8>,
    ) -> io::Result<u64> {
        let starts = self.starts()?;
        let start = |b: u64| starts.get(to_usize(b)).copied();
        let from = chunk_offset(start(block).unwrap_or(0));
        let mut end = block;
        let mut until = from;
        while let Some(first) = start(end + 1) {
            let next = chunk_offset(first);
            if end > block && next - from > most {
                break;
            }
            end += 1;
            until = next;
        }
        buffer.resize(to_usize(until - from), 0);
        self.file.read_exact_at(buffer, from)?;
        Ok(end)
    }
}

/// Where the chunk with this number begins, in bytes.
fn chunk_offset(number: u32) -> u64 {
    BLOCKS_START + u64::from(number) * CHUNK
}

/// A block's chunks, each to be checked.
pub(super) fn chunks_of(bytes: &[u8]) -> io::Result<&[RunChunk]> {
    <[RunChunk]>::ref_from_bytes(bytes).map_err(|_| damaged("a block is cut off"))
}

/// Offsets are below 2^40 and this crate needs 64 bits to hold a layer's data anyway; a smaller
/// machine reads nothing rather than the wrong place.
pub(super) fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
