//! LPPACK: frames of chunks, one table and a footer. FORMAT.md, section "Pack".

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::map::MAX_CHUNK_LEN;
use super::{Prelude, header_crc, split, split_slice};
use crate::codec::Codec;
use crate::digest::Digest;
use crate::error::FormatError;

const NAME: &str = "LPPACK";
const MAGIC: [u8; 8] = *b"LPPACK\r\n";
const FOOTER_MAGIC: [u8; 8] = *b"LPPACKF\n";

/// Largest pack in bytes.
pub const MAX_PACK_LEN: u64 = 4 << 30;
/// A writer ends a pack once it has this many bytes.
pub const TARGET_PACK_LEN: u64 = 64 << 20;
/// Largest frame in bytes, stored or raw.
pub const MAX_FRAME_LEN: u32 = 4 << 20;
/// Where the first frame of a pack begins: after the header.
pub const FRAMES_START: u64 = 32;
/// Length of the footer in bytes.
pub const FOOTER_LEN: u64 = 96;
/// Largest table of a pack in bytes.
pub const MAX_TABLE_LEN: u64 = 256 << 20;

#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct Header {
    prelude: Prelude,
    reserved: U32,
    /// crc32c of the 28 bytes above.
    crc: U32,
}
const _: () = assert!(size_of::<Header>() as u64 == FRAMES_START);

#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct Footer {
    prelude: Prelude,
    /// Bytes from the start of the pack: the end of the last frame.
    table_offset: U64,
    /// Bytes.
    table_len: U64,
    frame_count: U32,
    chunk_count: U32,
    /// Digest of the table's bytes.
    table_digest: Digest,
    reserved: [u8; 12],
    /// crc32c of the 92 bytes above.
    crc: U32,
}
const _: () = assert!(size_of::<Footer>() as u64 == FOOTER_LEN);

#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct WireFrame {
    /// Bytes from the start of the pack.
    offset: U64,
    stored_len: U32,
    raw_len: U32,
    codec: U32,
    /// Chunks of the table that are in this frame, after those of the frames before.
    chunk_count: U32,
    /// Digest of the stored bytes.
    digest: Digest,
}
const _: () = assert!(size_of::<WireFrame>() == 56);

#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct WireChunk {
    digest: Digest,
    /// Bytes from the start of the frame's raw bytes.
    offset: U32,
    /// Bytes.
    len: U32,
}
const _: () = assert!(size_of::<WireChunk>() == 40);

/// A frame of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackFrame {
    /// Bytes from the start of the pack.
    pub offset: u64,
    /// Bytes in the pack.
    pub stored_len: u32,
    /// Bytes after decompression.
    pub raw_len: u32,
    /// How it is stored.
    pub codec: Codec,
    /// Digest of the stored bytes.
    pub digest: Digest,
}

/// A chunk of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackChunk {
    /// Digest of the chunk's raw bytes.
    pub digest: Digest,
    /// The frame it is in: index into [`PackTable::frames`].
    pub frame: u32,
    /// Bytes from the start of the frame's raw bytes.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// What is in a pack. Invariants: frames follow each other without gaps from [`FRAMES_START`];
/// chunks are in the order of their frames and lie within them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PackTable {
    /// The frames, in the order of their offsets.
    pub frames: Vec<PackFrame>,
    /// The chunks, in the order of their frames.
    pub chunks: Vec<PackChunk>,
}

/// The footer's facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackFooter {
    /// Bytes from the start of the pack.
    pub table_offset: u64,
    /// Bytes.
    pub table_len: u64,
    frame_count: u32,
    chunk_count: u32,
    table_digest: Digest,
}

/// The bytes that every pack begins with.
pub(crate) fn header_bytes() -> Vec<u8> {
    let mut header = Header {
        prelude: Prelude::new(MAGIC),
        reserved: U32::new(0),
        crc: U32::new(0),
    };
    header.crc = header_crc(&header).into();
    header.as_bytes().to_vec()
}

/// Checks a pack's first [`FRAMES_START`] bytes.
///
/// # Errors
/// If they are not a pack's header.
pub fn check_header(bytes: &[u8]) -> Result<(), FormatError> {
    let (header, _) = split::<Header>(NAME, "header", bytes)?;
    header.prelude.check_start(NAME, &MAGIC)?;
    if header.crc.get() != header_crc(header) {
        return Err(FormatError::new(NAME, "the header's checksum is wrong"));
    }
    header.prelude.check_features(NAME)
}

impl PackFooter {
    /// Parses the last [`FOOTER_LEN`] bytes of a pack of `pack_len` bytes.
    ///
    /// # Errors
    /// If they are not a pack's footer or it does not fit the pack's length.
    pub fn parse(bytes: &[u8], pack_len: u64) -> Result<Self, FormatError> {
        let fail = |what: String| Err(FormatError::new(NAME, what));
        if bytes.len() as u64 != FOOTER_LEN {
            return fail("it is too short for a footer".to_owned());
        }
        let (footer, _) = split::<Footer>(NAME, "footer", bytes)?;
        footer.prelude.check_start(NAME, &FOOTER_MAGIC)?;
        if footer.crc.get() != header_crc(footer) {
            return fail("the footer's checksum is wrong".to_owned());
        }
        footer.prelude.check_features(NAME)?;
        let (offset, len) = (footer.table_offset.get(), footer.table_len.get());
        let (frames, chunks) = (footer.frame_count.get(), footer.chunk_count.get());
        let want = u64::from(frames) * size_of::<WireFrame>() as u64
            + u64::from(chunks) * size_of::<WireChunk>() as u64;
        if len != want || len > MAX_TABLE_LEN {
            return fail(format!(
                "its table has {len} bytes for {frames} frames and {chunks} chunks"
            ));
        }
        let end = offset
            .checked_add(len)
            .and_then(|end| end.checked_add(FOOTER_LEN));
        if offset < FRAMES_START || end != Some(pack_len) || pack_len > MAX_PACK_LEN {
            return fail(format!(
                "its table at {offset} with {len} bytes does not fit its {pack_len} bytes"
            ));
        }
        Ok(Self {
            table_offset: offset,
            table_len: len,
            frame_count: frames,
            chunk_count: chunks,
            table_digest: footer.table_digest,
        })
    }
}

impl PackTable {
    /// Table and footer as they end a pack whose last frame ends at `table_offset`.
    pub(crate) fn tail_bytes(&self, table_offset: u64) -> Result<Vec<u8>, FormatError> {
        let too_many = || FormatError::new(NAME, "it has more than 2^32-1 chunks");
        let mut counts = vec![0_u32; self.frames.len()];
        for chunk in &self.chunks {
            let count = usize::try_from(chunk.frame)
                .ok()
                .and_then(|f| counts.get_mut(f));
            *count.ok_or_else(|| FormatError::new(NAME, "a chunk is in no frame"))? += 1;
        }
        let mut out = Vec::with_capacity(
            self.frames.len() * 56 + self.chunks.len() * 40 + size_of::<Footer>(),
        );
        for (frame, &chunk_count) in self.frames.iter().zip(&counts) {
            let wire = WireFrame {
                offset: frame.offset.into(),
                stored_len: frame.stored_len.into(),
                raw_len: frame.raw_len.into(),
                codec: frame.codec.to_wire().into(),
                chunk_count: chunk_count.into(),
                digest: frame.digest,
            };
            out.extend_from_slice(wire.as_bytes());
        }
        for chunk in &self.chunks {
            let wire = WireChunk {
                digest: chunk.digest,
                offset: chunk.offset.into(),
                len: chunk.len.into(),
            };
            out.extend_from_slice(wire.as_bytes());
        }
        let mut footer = Footer {
            prelude: Prelude::new(FOOTER_MAGIC),
            table_offset: table_offset.into(),
            table_len: (out.len() as u64).into(),
            frame_count: u32::try_from(self.frames.len())
                .map_err(|_| too_many())?
                .into(),
            chunk_count: u32::try_from(self.chunks.len())
                .map_err(|_| too_many())?
                .into(),
            table_digest: Digest::of(&out),
            reserved: [0; 12],
            crc: U32::new(0),
        };
        footer.crc = header_crc(&footer).into();
        out.extend_from_slice(footer.as_bytes());
        Ok(out)
    }

    /// Parses a pack's table.
    ///
    /// # Errors
    /// If the bytes are not those that the footer names, or break an invariant.
    pub fn parse(bytes: &[u8], footer: &PackFooter) -> Result<Self, FormatError> {
        let fail = |what: String| Err(FormatError::new(NAME, what));
        if bytes.len() as u64 != footer.table_len || Digest::of(bytes) != footer.table_digest {
            return fail("its table is not the one that its footer names".to_owned());
        }
        let (wire_frames, rest) =
            split_slice::<WireFrame>(NAME, "frames", bytes, footer.frame_count.into())?;
        let (wire_chunks, _) =
            split_slice::<WireChunk>(NAME, "chunks", rest, footer.chunk_count.into())?;
        let mut frames = Vec::with_capacity(wire_frames.len());
        let mut chunks = Vec::with_capacity(wire_chunks.len());
        let mut remaining = wire_chunks;
        let mut end = FRAMES_START;
        for (i, wire) in (0_u32..).zip(wire_frames) {
            let frame = PackFrame {
                offset: wire.offset.get(),
                stored_len: wire.stored_len.get(),
                raw_len: wire.raw_len.get(),
                codec: Codec::from_wire(NAME, wire.codec.get())?,
                digest: wire.digest,
            };
            let sizes = 1..=MAX_FRAME_LEN;
            if !sizes.contains(&frame.stored_len) || !sizes.contains(&frame.raw_len) {
                return fail(format!(
                    "frame {i} has {} stored and {} raw bytes",
                    frame.stored_len, frame.raw_len
                ));
            }
            if frame.offset != end {
                return fail(format!(
                    "frame {i} begins at {}, the one before ends at {end}",
                    frame.offset
                ));
            }
            end += u64::from(frame.stored_len);
            let mine = usize::try_from(wire.chunk_count.get())
                .ok()
                .and_then(|n| remaining.split_at_checked(n));
            let Some((mine, others)) = mine else {
                return fail(format!("frame {i} has more chunks than the table"));
            };
            for chunk in mine {
                let (offset, len) = (chunk.offset.get(), chunk.len.get());
                if len == 0
                    || len > MAX_CHUNK_LEN
                    || offset.checked_add(len).is_none_or(|e| e > frame.raw_len)
                {
                    return fail(format!(
                        "a chunk of frame {i} at {offset} with {len} bytes lies outside it"
                    ));
                }
                chunks.push(PackChunk {
                    digest: chunk.digest,
                    frame: i,
                    offset,
                    len,
                });
            }
            remaining = others;
            frames.push(frame);
        }
        if end != footer.table_offset {
            return fail(format!(
                "its frames end at {end}, its table begins at {}",
                footer.table_offset
            ));
        }
        if !remaining.is_empty() {
            return fail(format!("{} chunks are in no frame", remaining.len()));
        }
        Ok(Self { frames, chunks })
    }
}
