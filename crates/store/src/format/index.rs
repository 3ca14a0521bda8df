//! LPIDX: an index segment, from chunk digests to packs. FORMAT.md, section "Index segment".

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::pack::{FOOTER_LEN, FRAMES_START, MAX_PACK_LEN};
use super::{Prelude, header_crc, split, split_slice};
use crate::digest::Digest;
use crate::error::FormatError;

const NAME: &str = "LPIDX";
const MAGIC: [u8; 8] = *b"LPIDX\0\r\n";

/// Largest index segment in bytes.
pub const MAX_INDEX_BYTES: u64 = 4 << 30;
/// Most packs of a segment.
pub const MAX_INDEX_PACKS: u32 = 1 << 20;

#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct Header {
    prelude: Prelude,
    chunk_count: U64,
    pack_count: U32,
    reserved: U32,
    /// crc32c of everything after the header.
    body_crc: U32,
    /// crc32c of the 44 bytes above.
    crc: U32,
}
const _: () = assert!(size_of::<Header>() == 48);

#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct WirePack {
    id: Digest,
    /// Size of the whole pack in bytes.
    size: U64,
    /// Where its table begins, in bytes: one range from there to the end has table and footer.
    table_offset: U64,
}
const _: () = assert!(size_of::<WirePack>() == 48);

/// A chunk as it is in a segment.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub(crate) struct WireChunk {
    pub(crate) digest: Digest,
    /// Index into the segment's packs.
    pub(crate) pack: U32,
    /// Index into that pack's chunks.
    pub(crate) chunk: U32,
}
const _: () = assert!(size_of::<WireChunk>() == 40);

/// Bytes of a segment's header and of each pack after it.
pub(crate) const HEADER_LEN: u64 = 48;
pub(crate) const PACK_LEN: u64 = 48;

/// The number of packs that a segment's first [`HEADER_LEN`] bytes tell.
pub(crate) fn pack_count(bytes: &[u8]) -> Result<u32, FormatError> {
    let (header, _) = split::<Header>(NAME, "header", bytes)?;
    header.prelude.check_start(NAME, &MAGIC)?;
    if header.crc.get() != header_crc(header) {
        return Err(FormatError::new(NAME, "the header's checksum is wrong"));
    }
    header.prelude.check_features(NAME)?;
    Ok(header.pack_count.get())
}

/// The packs in the bytes that follow the header. Their checksum is not checked.
pub(crate) fn packs_in(bytes: &[u8], count: u32) -> Result<Vec<IndexPack>, FormatError> {
    let (packs, _) = split_slice::<WirePack>(NAME, "packs", bytes, count.into())?;
    Ok(packs
        .iter()
        .map(|p| IndexPack {
            id: p.id,
            size: p.size.get(),
            table_offset: p.table_offset.get(),
        })
        .collect())
}

/// A pack that a segment covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IndexPack {
    /// The pack's id.
    pub id: Digest,
    /// Size of the whole pack in bytes.
    pub size: u64,
    /// Where its table begins, in bytes.
    pub table_offset: u64,
}

/// Where a chunk is, by a segment's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexEntry {
    /// Digest of the chunk's raw bytes.
    pub digest: Digest,
    /// Index into [`IndexSegment::packs`].
    pub pack: u32,
    /// Index into that pack's chunks.
    pub chunk: u32,
}

/// A parsed index segment. Invariants: entries are sorted by digest without repeats, and their
/// packs exist in the segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexSegment {
    packs: Vec<IndexPack>,
    entries: Vec<IndexEntry>,
}

impl Header {
    fn new(chunks: u64, packs: u32, body_crc: u32) -> Self {
        let mut header = Self {
            prelude: Prelude::new(MAGIC),
            chunk_count: chunks.into(),
            pack_count: packs.into(),
            reserved: U32::new(0),
            body_crc: body_crc.into(),
            crc: U32::new(0),
        };
        header.crc = header_crc(&header).into();
        header
    }

    fn check(&self) -> Result<(), FormatError> {
        self.prelude.check_start(NAME, &MAGIC)?;
        if self.crc.get() != header_crc(self) {
            return Err(FormatError::new(NAME, "the header's checksum is wrong"));
        }
        self.prelude.check_features(NAME)?;
        if self.pack_count.get() > MAX_INDEX_PACKS {
            let what = format!("it has {} packs, at most 2^20 are allowed", self.pack_count);
            return Err(FormatError::new(NAME, what));
        }
        Ok(())
    }
}

impl WirePack {
    fn pack(&self) -> IndexPack {
        IndexPack {
            id: self.id,
            size: self.size.get(),
            table_offset: self.table_offset.get(),
        }
    }
}

impl WireChunk {
    pub(crate) fn entry(&self) -> IndexEntry {
        IndexEntry {
            digest: self.digest,
            pack: self.pack.get(),
            chunk: self.chunk.get(),
        }
    }
}

fn check_packs(packs: &[IndexPack]) -> Result<(), FormatError> {
    if packs.len() as u64 > u64::from(MAX_INDEX_PACKS) {
        let what = format!("it has {} packs, at most 2^20 are allowed", packs.len());
        return Err(FormatError::new(NAME, what));
    }
    for (i, pack) in packs.iter().enumerate() {
        let table = FRAMES_START..=pack.size.saturating_sub(FOOTER_LEN);
        if pack.size > MAX_PACK_LEN || !table.contains(&pack.table_offset) {
            let what = format!(
                "pack {i} has {} bytes and its table at {}",
                pack.size, pack.table_offset
            );
            return Err(FormatError::new(NAME, what));
        }
    }
    Ok(())
}

/// Reads a segment piece by piece, in memory for its packs and one piece. The same rules as
/// [`IndexSegment::parse`]; a checksum or digest that is wrong is known at the end only.
#[derive(Debug)]
pub(crate) struct SegmentScan {
    packs: Vec<IndexPack>,
    left: u64,
    last: Option<Digest>,
    body_crc: u32,
    crc: u32,
    seen: u64,
}

impl SegmentScan {
    /// Bytes of the header.
    pub(crate) const HEADER: u64 = size_of::<Header>() as u64;
    /// Bytes of a chunk.
    pub(crate) const CHUNK: u64 = size_of::<WireChunk>() as u64;

    /// From the header of a segment of `size` bytes: how many bytes its packs take.
    pub(crate) fn packs_len(header: &[u8], size: u64) -> Result<u64, FormatError> {
        let (header, _) = split::<Header>(NAME, "header", header)?;
        header.check()?;
        let packs = u64::from(header.pack_count.get()) * size_of::<WirePack>() as u64;
        let chunks = header.chunk_count.get().checked_mul(Self::CHUNK);
        if chunks.and_then(|c| c.checked_add(packs + Self::HEADER)) != Some(size) {
            let what = format!("it has {size} bytes, its counts say otherwise");
            return Err(FormatError::new(NAME, what));
        }
        Ok(packs)
    }

    /// From a segment's header and packs.
    pub(crate) fn new(start: &[u8]) -> Result<Self, FormatError> {
        let (header, rest) = split::<Header>(NAME, "header", start)?;
        header.check()?;
        let (wire, rest) =
            split_slice::<WirePack>(NAME, "packs", rest, header.pack_count.get().into())?;
        let packs: Vec<IndexPack> = wire.iter().map(WirePack::pack).collect();
        check_packs(&packs)?;
        debug_assert!(rest.is_empty());
        Ok(Self {
            packs,
            left: header.chunk_count.get(),
            last: None,
            body_crc: header.body_crc.get(),
            crc: crc32c::crc32c(wire.as_bytes()),
            seen: 0,
        })
    }

    pub(crate) fn packs(&self) -> &[IndexPack] {
        &self.packs
    }

    /// Chunks not yet read.
    pub(crate) const fn left(&self) -> u64 {
        self.left
    }

    /// The chunks of the next piece, which ends between two chunks.
    pub(crate) fn next<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [WireChunk], FormatError> {
        let count = bytes.len() as u64 / Self::CHUNK;
        let (chunks, rest) = split_slice::<WireChunk>(NAME, "chunks", bytes, count)?;
        if !rest.is_empty() || count > self.left {
            return Err(FormatError::new(NAME, "a piece of it has a wrong length"));
        }
        for chunk in chunks {
            let pack = usize::try_from(chunk.pack.get()).unwrap_or(usize::MAX);
            if pack >= self.packs.len() {
                let what = format!(
                    "chunk {} is in pack {} of {}",
                    self.seen,
                    chunk.pack,
                    self.packs.len()
                );
                return Err(FormatError::new(NAME, what));
            }
            if self.last.is_some_and(|last| last >= chunk.digest) {
                let what = format!("chunk {} is out of order", self.seen);
                return Err(FormatError::new(NAME, what));
            }
            self.last = Some(chunk.digest);
            self.seen += 1;
        }
        self.left -= count;
        self.crc = crc32c::crc32c_append(self.crc, bytes);
        Ok(chunks)
    }

    /// After the last piece.
    pub(crate) fn finish(&self) -> Result<(), FormatError> {
        if self.crc != self.body_crc {
            return Err(FormatError::new(NAME, "the body's checksum is wrong"));
        }
        Ok(())
    }
}

impl IndexSegment {
    /// A segment of these packs and chunks. Of several entries with one digest the first in the
    /// order of packs and chunks is kept.
    ///
    /// # Errors
    /// If an entry's pack does not exist.
    pub fn new(packs: Vec<IndexPack>, mut entries: Vec<IndexEntry>) -> Result<Self, FormatError> {
        entries.sort_unstable_by_key(|e| (e.digest, e.pack, e.chunk));
        entries.dedup_by_key(|e| e.digest);
        let segment = Self { packs, entries };
        segment.check()?;
        Ok(segment)
    }

    /// Parses a segment's bytes.
    ///
    /// # Errors
    /// If the bytes break the format or an invariant.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let fail = |what: String| Err(FormatError::new(NAME, what));
        let (header, body) = split::<Header>(NAME, "header", bytes)?;
        header.check()?;
        if header.body_crc.get() != crc32c::crc32c(body) {
            return fail("the body's checksum is wrong".to_owned());
        }
        let (packs, rest) =
            split_slice::<WirePack>(NAME, "packs", body, header.pack_count.get().into())?;
        let (chunks, rest) =
            split_slice::<WireChunk>(NAME, "chunks", rest, header.chunk_count.get())?;
        if !rest.is_empty() {
            return fail(format!("{} bytes follow its chunks", rest.len()));
        }
        let segment = Self {
            packs: packs.iter().map(WirePack::pack).collect(),
            entries: chunks.iter().map(WireChunk::entry).collect(),
        };
        segment.check()?;
        Ok(segment)
    }

    fn check(&self) -> Result<(), FormatError> {
        let fail = |what: String| Err(FormatError::new(NAME, what));
        check_packs(&self.packs)?;
        for (i, entry) in self.entries.iter().enumerate() {
            if usize::try_from(entry.pack).map_or(true, |p| p >= self.packs.len()) {
                return fail(format!(
                    "chunk {i} is in pack {} of {}",
                    entry.pack,
                    self.packs.len()
                ));
            }
        }
        match self
            .entries
            .iter()
            .zip(self.entries.iter().skip(1))
            .position(|(a, b)| a.digest >= b.digest)
        {
            Some(i) => fail(format!("chunk {} is out of order", i + 1)),
            None => Ok(()),
        }
    }

    /// The segment's bytes.
    ///
    /// # Errors
    /// If there are more than 2^32-1 packs.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        let len = self.packs.len() * 48 + self.entries.len() * 40;
        let mut body = Vec::with_capacity(size_of::<Header>() + len);
        body.resize(size_of::<Header>(), 0); // its place
        for p in &self.packs {
            let wire = WirePack {
                id: p.id,
                size: p.size.into(),
                table_offset: p.table_offset.into(),
            };
            body.extend_from_slice(wire.as_bytes());
        }
        for e in &self.entries {
            let wire = WireChunk {
                digest: e.digest,
                pack: e.pack.into(),
                chunk: e.chunk.into(),
            };
            body.extend_from_slice(wire.as_bytes());
        }
        let pack_count = u32::try_from(self.packs.len())
            .map_err(|_| FormatError::new(NAME, "it has more than 2^32-1 packs"))?;
        let crc = crc32c::crc32c(body.get(size_of::<Header>()..).unwrap_or_default());
        let header = Header::new(self.entries.len() as u64, pack_count, crc);
        if let Some(place) = body.get_mut(..size_of::<Header>()) {
            place.copy_from_slice(header.as_bytes());
        }
        Ok(body)
    }

    /// The packs covered.
    #[must_use]
    pub fn packs(&self) -> &[IndexPack] {
        &self.packs
    }

    /// The chunks, sorted by digest.
    #[must_use]
    pub fn entries(&self) -> &[IndexEntry] {
        &self.entries
    }
}
