//! LPLOC: where each extent of a map lies in this store. A hint: readers verify the frame and the
//! chunk before they use a byte. FORMAT.md, section "Locator".

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::map::LayerMap;
use super::pack::{FRAMES_START, MAX_FRAME_LEN, MAX_PACK_LEN};
use super::planes::{self, Table};
use super::{Prelude, header_crc, split, split_slice};
use crate::codec::Codec;
use crate::digest::Digest;
use crate::error::FormatError;

const NAME: &str = "LPLOC";
const MAGIC: [u8; 8] = *b"LPLOC\0\r\n";

/// Feature: frames and extents are compressed.
const COMPRESSED: u32 = 1;
/// Frames and extents below so many bytes stay as they are.
const WORTH_IT: usize = 64 << 10;

/// Largest locator in bytes.
pub const MAX_LOCATOR_BYTES: u64 = 4 << 30;

#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct Header {
    prelude: Prelude,
    /// The map that this is for.
    map: Digest,
    extent_count: U64,
    pack_count: U32,
    frame_count: U32,
    /// crc32c of everything after the header.
    body_crc: U32,
    /// crc32c of the 76 bytes above.
    crc: U32,
}
const _: () = assert!(size_of::<Header>() == 80);

#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct WirePack {
    id: Digest,
    /// Size of the whole pack in bytes.
    size: U64,
}
const _: () = assert!(size_of::<WirePack>() == 40);

#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct WireFrame {
    /// Index into the packs.
    pack: U32,
    codec: U32,
    /// Bytes from the start of the pack.
    offset: U64,
    stored_len: U32,
    raw_len: U32,
    /// Digest of the stored bytes.
    digest: Digest,
}
const _: () = assert!(size_of::<WireFrame>() == 56);

#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct WireExtent {
    /// Index into the frames.
    frame: U32,
    /// Bytes from the start of the frame's raw bytes.
    offset: U32,
}
const _: () = assert!(size_of::<WireExtent>() == 8);

/// How frames are compressed: all but their digests by planes.
const FRAMES: Table = Table {
    record: 56,
    planes: 24,
};
/// How extents are.
const EXTENTS: Table = Table {
    record: 8,
    planes: 8,
};
// They are split by planes alone.
const _: () = assert!(EXTENTS.record == EXTENTS.planes);

/// A pack that a locator uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackLoc {
    /// The pack's id.
    pub id: Digest,
    /// Size of the whole pack in bytes.
    pub size: u64,
}

/// Where a frame lies and what it must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FrameLoc {
    /// Index into [`Locator::packs`].
    pub pack: u32,
    /// How the frame is stored.
    pub codec: Codec,
    /// Bytes from the start of the pack.
    pub offset: u64,
    /// Bytes in the pack.
    pub stored_len: u32,
    /// Bytes after decompression.
    pub raw_len: u32,
    /// Digest of the stored bytes.
    pub digest: Digest,
}

/// A parsed locator that fits its map: every extent lies within its frame, every frame within its
/// pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Locator {
    map: Digest,
    packs: Vec<PackLoc>,
    frames: Vec<FrameLoc>,
    /// Per extent of the map: frame and offset in it.
    extents: Vec<(u32, u32)>,
    /// Extents grouped by frame: those of frame `i` are `by_frame[starts[i]..starts[i + 1]]`.
    starts: Vec<u32>,
    by_frame: Vec<u32>,
}

impl Locator {
    /// Puts a locator together and checks it against `map`, whose digest is `map_digest`.
    ///
    /// # Errors
    /// If an invariant of [`Locator`] does not hold.
    pub fn new(
        map_digest: Digest,
        map: &LayerMap,
        packs: Vec<PackLoc>,
        frames: Vec<FrameLoc>,
        extents: Vec<(u32, u32)>,
    ) -> Result<Self, FormatError> {
        let tables = Tables {
            map: map_digest,
            packs,
            frames,
            extents,
        };
        tables.check(map.extents().len())?;
        let mut starts = vec![0_u32; tables.frames.len() + 1];
        for (i, extent) in map.extents().iter().enumerate() {
            let frame = tables.check_extent(i, extent.len)?;
            if let Some(count) = starts.get_mut(frame + 1) {
                *count += 1;
            }
        }
        let Tables {
            packs,
            frames,
            extents,
            ..
        } = tables;
        let mut sum = 0;
        for start in &mut starts {
            sum += *start;
            *start = sum;
        }
        let mut next = starts.clone();
        let mut by_frame = vec![0_u32; extents.len()];
        for (i, &(frame, _)) in (0_u32..).zip(&extents) {
            if let Some(slot) = usize::try_from(frame).ok().and_then(|f| next.get_mut(f)) {
                if let Some(place) = usize::try_from(*slot)
                    .ok()
                    .and_then(|s| by_frame.get_mut(s))
                {
                    *place = i;
                }
                *slot += 1;
            }
        }
        Ok(Self {
            map: map_digest,
            packs,
            frames,
            extents,
            starts,
            by_frame,
        })
    }

    /// Parses a locator's bytes and checks it against its map.
    ///
    /// # Errors
    /// If the bytes break the format, are for another map, or do not fit it.
    pub fn parse(bytes: &[u8], map_digest: &Digest, map: &LayerMap) -> Result<Self, FormatError> {
        let most = Some(map.extents().len() as u64);
        let (places, extents) = Places::split(bytes, map_digest, most)?;
        Self::new(*map_digest, map, places.packs, places.frames, extents)
    }

    /// The first `most` packs that a locator names, from the beginning of its bytes: 80 bytes and
    /// 40 for each pack are enough. Nothing else of it is looked at.
    ///
    /// # Errors
    /// If the bytes are not the beginning of a locator.
    pub(crate) fn peek_packs(start: &[u8], most: usize) -> Result<Vec<PackLoc>, FormatError> {
        let (header, body) = split::<Header>(NAME, "header", start)?;
        header.prelude.check_start(NAME, &MAGIC)?;
        if header.crc.get() != header_crc(header) {
            return Err(FormatError::new(NAME, "the header's checksum is wrong"));
        }
        header.prelude.features(NAME, COMPRESSED)?;
        let count = u64::from(header.pack_count.get()).min(most as u64);
        let (packs, _) = split_slice::<WirePack>(NAME, "packs", body, count)?;
        Ok(packs
            .iter()
            .map(|p| PackLoc {
                id: p.id,
                size: p.size.get(),
            })
            .collect())
    }

    /// The locator's bytes, as [`Locator::parse`] reads them.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        to_bytes(&self.map, &self.packs, &self.frames, &self.extents)
    }

    /// Digest of the map that this locator is for.
    #[must_use]
    pub const fn map_digest(&self) -> &Digest {
        &self.map
    }

    /// The packs used.
    #[must_use]
    pub fn packs(&self) -> &[PackLoc] {
        &self.packs
    }

    /// The frames used, in the order of packs and of offsets in them as far as the writer could.
    #[must_use]
    pub fn frames(&self) -> &[FrameLoc] {
        &self.frames
    }

    /// Number of extents: that of the map.
    #[must_use]
    pub fn extent_count(&self) -> usize {
        self.extents.len()
    }

    /// Frame of extent `i` of the map, and its first byte within the frame's raw bytes.
    #[must_use]
    pub fn extent(&self, i: usize) -> Option<(u32, u32)> {
        self.extents.get(i).copied()
    }

    /// Indexes, ascending, of the extents whose bytes are in `frame`. Empty if there is no such
    /// frame.
    #[must_use]
    pub fn extents_of_frame(&self, frame: u32) -> &[u32] {
        let bound = |f: usize| self.starts.get(f).and_then(|&s| usize::try_from(s).ok());
        usize::try_from(frame)
            .ok()
            .and_then(|f| Some(bound(f)?..bound(f.checked_add(1)?)?))
            .and_then(|range| self.by_frame.get(range))
            .unwrap_or_default()
    }

    /// Sum of the stored lengths of all frames in bytes: what a full fetch costs.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.frames.iter().map(|f| u64::from(f.stored_len)).sum()
    }
}

/// What a locator says, without what helps to read by it: to be written, or to be checked.
#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) map: Digest,
    pub(crate) packs: Vec<PackLoc>,
    pub(crate) frames: Vec<FrameLoc>,
    /// Per extent of the map: frame and offset in it.
    pub(crate) extents: Vec<(u32, u32)>,
}

impl Tables {
    /// Parses a locator's bytes. Only the counts are checked, against a map of `extents` extents.
    pub(crate) fn parse(
        bytes: &[u8],
        map_digest: &Digest,
        extents: usize,
    ) -> Result<Self, FormatError> {
        let (places, extents) = Places::split(bytes, map_digest, Some(extents as u64))?;
        Ok(Self {
            map: *map_digest,
            packs: places.packs,
            frames: places.frames,
            extents,
        })
    }

    /// Checks all but the extents, of which the map has `most`.
    pub(crate) fn check(&self, most: usize) -> Result<(), FormatError> {
        let fail = |what: String| Err(FormatError::new(NAME, what));
        let count = self.extents.len();
        if count != most {
            return fail(format!("it has {count} extents, its map has {most}"));
        }
        if u32::try_from(count).is_err() {
            return fail(format!("it has {count} extents, more than 2^32-1"));
        }
        for (i, pack) in self.packs.iter().enumerate() {
            if pack.size > MAX_PACK_LEN {
                return fail(format!(
                    "pack {i} has {} bytes, at most {MAX_PACK_LEN} are allowed",
                    pack.size
                ));
            }
        }
        for (i, frame) in self.frames.iter().enumerate() {
            let pack = usize::try_from(frame.pack).ok();
            let Some(pack) = pack.and_then(|p| self.packs.get(p)) else {
                return fail(format!(
                    "frame {i} is in pack {} of {}",
                    frame.pack,
                    self.packs.len()
                ));
            };
            check_frame(i, frame, pack.size)?;
        }
        Ok(())
    }

    /// Checks the extent with this number, which has `len` bytes; the index of its frame.
    pub(crate) fn check_extent(&self, i: usize, len: u32) -> Result<usize, FormatError> {
        let fail = |what: String| Err(FormatError::new(NAME, what));
        let Some(&(frame, offset)) = self.extents.get(i) else {
            return fail(format!("it has no extent {i}"));
        };
        let index = usize::try_from(frame).unwrap_or(usize::MAX);
        let Some(location) = self.frames.get(index) else {
            return fail(format!(
                "extent {i} is in frame {frame} of {}",
                self.frames.len()
            ));
        };
        if offset
            .checked_add(len)
            .is_none_or(|end| end > location.raw_len)
        {
            return fail(format!(
                "extent {i} goes beyond its frame's {} bytes",
                location.raw_len
            ));
        }
        Ok(index)
    }

    /// The locator's bytes.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        to_bytes(&self.map, &self.packs, &self.frames, &self.extents)
    }
}

/// A locator's bytes. Of a million extents it takes 8 MB and what the bytes are.
fn to_bytes(
    map: &Digest,
    packs: &[PackLoc],
    frames: &[FrameLoc],
    extents: &[(u32, u32)],
) -> Vec<u8> {
    let mut body = Vec::with_capacity(size_of::<Header>() + packs.len() * 40);
    body.resize(size_of::<Header>(), 0); // its place
    for p in packs {
        let wire = WirePack {
            id: p.id,
            size: p.size.into(),
        };
        body.extend_from_slice(wire.as_bytes());
    }
    let mut wires = Vec::with_capacity(frames.len() * FRAMES.record);
    for f in frames {
        let wire = WireFrame {
            pack: f.pack.into(),
            codec: f.codec.to_wire().into(),
            offset: f.offset.into(),
            stored_len: f.stored_len.into(),
            raw_len: f.raw_len.into(),
            digest: f.digest,
        };
        wires.extend_from_slice(wire.as_bytes());
    }
    let wire = |&(frame, offset): &(u32, u32)| WireExtent {
        frame: frame.into(),
        offset: offset.into(),
    };
    let len = wires.len() + extents.len() * EXTENTS.record;
    let packed = (len >= WORTH_IT).then(|| {
        let mut tables = Vec::with_capacity(len);
        planes::split(FRAMES, &wires, &mut tables);
        // As `planes::split` does, without all of the extents' bytes in memory.
        for plane in 0..EXTENTS.planes {
            let byte = |extent| wire(extent).as_bytes().get(plane).copied();
            tables.extend(extents.iter().filter_map(byte));
        }
        planes::compress(&tables)
    });
    let features = match packed.flatten() {
        Some(packed) => {
            body.extend_from_slice(&packed);
            COMPRESSED
        }
        None => {
            body.reserve(len);
            body.extend_from_slice(&wires);
            for extent in extents {
                body.extend_from_slice(wire(extent).as_bytes());
            }
            0
        }
    };
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX); // indexes are u32: checked before
    let mut header = Header {
        prelude: Prelude::new(MAGIC).with(features),
        map: *map,
        extent_count: (extents.len() as u64).into(),
        pack_count: count(packs.len()).into(),
        frame_count: count(frames.len()).into(),
        body_crc: crc32c::crc32c(body.get(size_of::<Header>()..).unwrap_or_default()).into(),
        crc: U32::new(0),
    };
    header.crc = header_crc(&header).into();
    if let Some(place) = body.get_mut(..size_of::<Header>()) {
        place.copy_from_slice(header.as_bytes());
    }
    body
}

/// The packs and frames that a locator names, without its extents: enough to tell what it uses.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) packs: Vec<PackLoc>,
    pub(crate) frames: Vec<FrameLoc>,
}

impl Places {
    /// Parses a locator without its map. Whether its extents fit the map is not checked.
    pub(crate) fn parse(bytes: &[u8], map_digest: &Digest) -> Result<Self, FormatError> {
        let (places, _) = Self::split(bytes, map_digest, None)?;
        for (i, frame) in places.frames.iter().enumerate() {
            let pack = usize::try_from(frame.pack)
                .ok()
                .and_then(|p| places.packs.get(p))
                .ok_or_else(|| {
                    FormatError::new(NAME, format!("frame {i} is in pack {}", frame.pack))
                })?;
            check_frame(i, frame, pack.size)?;
        }
        Ok(places)
    }

    /// The places, and of each extent its frame and its offset in that. `extents`: how many there
    /// must be.
    fn split(
        bytes: &[u8],
        map_digest: &Digest,
        extents: Option<u64>,
    ) -> Result<(Self, Vec<(u32, u32)>), FormatError> {
        let fail = |what: String| Err(FormatError::new(NAME, what));
        let (header, body) = split::<Header>(NAME, "header", bytes)?;
        header.prelude.check_start(NAME, &MAGIC)?;
        if header.crc.get() != header_crc(header) {
            return fail("the header's checksum is wrong".to_owned());
        }
        let features = header.prelude.features(NAME, COMPRESSED)?;
        if header.body_crc.get() != crc32c::crc32c(body) {
            return fail("the body's checksum is wrong".to_owned());
        }
        if &header.map != map_digest {
            return fail(format!("it is for map {}, not {map_digest}", header.map));
        }
        let counts = (
            u64::from(header.frame_count.get()),
            header.extent_count.get(),
        );
        if let Some(most) = extents.filter(|most| *most != counts.1) {
            return fail(format!("it has {} extents, its map has {most}", counts.1));
        }
        let (packs, rest) =
            split_slice::<WirePack>(NAME, "packs", body, header.pack_count.get().into())?;
        let tables = match features & COMPRESSED {
            0 => Vec::new(),
            _ => tables(rest, counts)?,
        };
        let rest = if tables.is_empty() { rest } else { &tables };
        let (frames, rest) = split_slice::<WireFrame>(NAME, "frames", rest, counts.0)?;
        let (extents, rest) = split_slice::<WireExtent>(NAME, "extents", rest, counts.1)?;
        if !rest.is_empty() {
            return fail(format!("{} bytes follow its extents", rest.len()));
        }
        let packs = packs
            .iter()
            .map(|p| PackLoc {
                id: p.id,
                size: p.size.get(),
            })
            .collect();
        let frames = frames
            .iter()
            .map(|f| {
                Ok(FrameLoc {
                    pack: f.pack.get(),
                    codec: Codec::from_wire(NAME, f.codec.get())?,
                    offset: f.offset.get(),
                    stored_len: f.stored_len.get(),
                    raw_len: f.raw_len.get(),
                    digest: f.digest,
                })
            })
            .collect::<Result<Vec<_>, FormatError>>()?;
        let extents = extents
            .iter()
            .map(|e| (e.frame.get(), e.offset.get()))
            .collect();
        Ok((Self { packs, frames }, extents))
    }
}

/// Frames and extents, so many of each, as they are without compression.
fn tables(packed: &[u8], (frames, extents): (u64, u64)) -> Result<Vec<u8>, FormatError> {
    let frames = frames.saturating_mul(FRAMES.record as u64);
    let len = extents
        .saturating_mul(EXTENTS.record as u64)
        .saturating_add(frames);
    if len > MAX_LOCATOR_BYTES {
        return Err(FormatError::new(
            NAME,
            format!(
                "it has {len} bytes of frames and extents, at most {MAX_LOCATOR_BYTES} are allowed"
            ),
        ));
    }
    let bytes = planes::decompress(NAME, packed, len)?;
    let at = usize::try_from(frames).unwrap_or(usize::MAX);
    let (frames, extents) = bytes.split_at_checked(at).unwrap_or((&bytes, &[]));
    let mut tables = planes::join(FRAMES, frames);
    tables.append(&mut planes::join(EXTENTS, extents));
    Ok(tables)
}

fn check_frame(i: usize, frame: &FrameLoc, pack_size: u64) -> Result<(), FormatError> {
    let fail = |what: String| Err(FormatError::new(NAME, what));
    if frame.stored_len == 0
        || frame.raw_len == 0
        || frame.stored_len > MAX_FRAME_LEN
        || frame.raw_len > MAX_FRAME_LEN
    {
        return fail(format!(
            "frame {i} has {} stored and {} raw bytes, 1 to {MAX_FRAME_LEN} are allowed",
            frame.stored_len, frame.raw_len
        ));
    }
    if frame.codec == Codec::Raw && frame.stored_len != frame.raw_len {
        return fail(format!("frame {i} is stored raw but its lengths differ"));
    }
    let inside = frame.offset >= FRAMES_START
        && frame
            .offset
            .checked_add(frame.stored_len.into())
            .is_some_and(|end| end <= pack_size);
    if inside {
        Ok(())
    } else {
        fail(format!(
            "frame {i} at {} lies outside its pack of {pack_size} bytes",
            frame.offset
        ))
    }
}
