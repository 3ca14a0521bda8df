//! LPMAP: a layer's data address space, as extents of chunks, and its implicit directories.
//! FORMAT.md, section "Map".

use std::iter::Copied;
use std::ops::Range;
use std::slice::Iter;
use std::sync::OnceLock;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Prelude, header_crc, split, split_slice};
use crate::digest::{Digest, Hasher};
use crate::error::FormatError;
use crate::manifest::Blob;

const NAME: &str = "LPMAP";
const MAGIC: [u8; 8] = *b"LPMAP\0\r\n";
/// Extents or paths encoded at a time.
const PIECE: usize = 1024;

/// Block size of the data address space in bytes.
pub const BLOCK: u64 = 4096;
/// Largest data address space in bytes: what 32-bit block numbers of 4 KiB reach.
pub const MAX_DATA_SIZE: u64 = 1 << 44;
/// Largest chunk in bytes.
pub const MAX_CHUNK_LEN: u32 = 1 << 20;
/// Largest map in bytes.
pub const MAX_MAP_BYTES: u64 = 4 << 30;
/// Longest implicit directory's path in bytes.
pub const MAX_PATH_LEN: usize = u16::MAX as usize;

#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct Header {
    prelude: Prelude,
    /// Bytes, a multiple of 4096.
    data_size: U64,
    extent_count: U64,
    implicit_count: U64,
    /// Bytes of the implicit directories' records.
    implicit_bytes: U64,
    /// crc32c of everything after the header.
    body_crc: U32,
    /// crc32c of the 60 bytes above.
    crc: U32,
}
const _: () = assert!(size_of::<Header>() == 64);

#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct WireExtent {
    /// Bytes from the start of the data address space.
    data_offset: U64,
    /// Bytes, 1 to 1 MiB.
    len: U32,
    /// No bit is defined: 0.
    flags: U32,
    digest: Digest,
}
const _: () = assert!(size_of::<WireExtent>() == 48);

/// One chunk's place in the data address space. A chunk may have several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Bytes from the start of the data address space.
    pub data_offset: u64,
    /// Bytes, 1 to [`MAX_CHUNK_LEN`].
    pub len: u32,
    /// Digest of the chunk's raw bytes.
    pub digest: Digest,
}

impl Extent {
    /// First byte after the extent.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.data_offset.saturating_add(self.len as u64)
    }
}

/// A layer's map. Invariants: extents are sorted, do not overlap and lie within the data size;
/// implicit directories are normal paths, sorted, without repeats. Bytes that no extent covers are
/// zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerMap {
    data_size: u64,
    extents: Vec<Extent>,
    implicit: Vec<Vec<u8>>,
    blob: Known,
}

/// What [`LayerMap::blob`] found. No part of what a map is.
#[derive(Debug, Clone, Default)]
struct Known(OnceLock<Blob>);

impl PartialEq for Known {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Known {}

impl LayerMap {
    /// Parses a map's raw bytes.
    ///
    /// # Errors
    /// If the bytes break the format or an invariant.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let fail = |what: String| Err(FormatError::new(NAME, what));
        if bytes.len() as u64 > MAX_MAP_BYTES {
            return fail(format!(
                "it has {} bytes, at most {MAX_MAP_BYTES} are allowed",
                bytes.len()
            ));
        }
        let (header, body) = split::<Header>(NAME, "header", bytes)?;
        header.prelude.check_start(NAME, &MAGIC)?;
        if header.crc.get() != header_crc(header) {
            return fail("the header's checksum is wrong".to_owned());
        }
        header.prelude.check_features(NAME)?;
        let data_size = header.data_size.get();
        check_data_size(data_size)?;
        if header.body_crc.get() != crc32c::crc32c(body) {
            return fail("the body's checksum is wrong".to_owned());
        }
        let (wire, rest) =
            split_slice::<WireExtent>(NAME, "extents", body, header.extent_count.get())?;
        if rest.len() as u64 != header.implicit_bytes.get() {
            return fail(format!(
                "{} bytes of implicit directories follow, {} were announced",
                rest.len(),
                header.implicit_bytes
            ));
        }
        if let Some((i, _)) = wire.iter().enumerate().find(|(_, e)| e.flags.get() != 0) {
            return Err(FormatError::newer(
                NAME,
                format!("extent {i} has unknown flags"),
            ));
        }
        let extents: Vec<Extent> = wire
            .iter()
            .map(|e| Extent {
                data_offset: e.data_offset.get(),
                len: e.len.get(),
                digest: e.digest,
            })
            .collect();
        check_extents(&extents, data_size)?;
        let implicit = parse_implicit(rest, header.implicit_count.get())?;
        Ok(Self {
            data_size,
            extents,
            implicit,
            blob: Known::default(),
        })
    }

    /// The map's raw bytes: the same for the same map.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _: Result<(), std::convert::Infallible> = self.emit(&mut |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        });
        bytes
    }

    /// Digest and size of the raw bytes. Found once.
    #[must_use]
    pub fn blob(&self) -> Blob {
        *self.blob.0.get_or_init(|| self.parts().blob())
    }

    /// The raw bytes piece by piece.
    pub(crate) fn emit<E>(&self, out: &mut dyn FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        self.parts().emit(out)
    }

    fn parts<'a>(&'a self) -> Parts<'a, impl Fn() -> Copied<Iter<'a, Extent>>> {
        Parts {
            data_size: self.data_size,
            count: self.extents.len(),
            extents: || self.extents.iter().copied(),
            implicit: &self.implicit,
        }
    }

    /// Size of the data address space in bytes, a multiple of 4096.
    #[must_use]
    pub const fn data_size(&self) -> u64 {
        self.data_size
    }

    /// The extents, sorted by offset.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Indexes of the extents that share a byte with `range`.
    #[must_use]
    pub fn extents_in(&self, range: Range<u64>) -> Range<usize> {
        let first = self.extents.partition_point(|e| e.end() <= range.start);
        let last = self.extents.partition_point(|e| e.data_offset < range.end);
        first..last.max(first)
    }

    /// Directories that the layer passes through without defining them: paths from the layer's
    /// root without a leading `/`, `""` for the root; sorted by bytes.
    #[must_use]
    pub fn implicit_dirs(&self) -> &[Vec<u8>] {
        &self.implicit
    }

    /// Sum of the extents' lengths in bytes.
    #[must_use]
    pub fn covered(&self) -> u64 {
        self.extents.iter().map(|e| u64::from(e.len)).sum()
    }
}

/// What a map's bytes are made of.
pub(crate) struct Parts<'a, F> {
    pub(crate) data_size: u64,
    pub(crate) count: usize,
    pub(crate) extents: F,
    pub(crate) implicit: &'a [Vec<u8>],
}

impl<I: Iterator<Item = Extent>, F: Fn() -> I> Parts<'_, F> {
    pub(crate) fn blob(&self) -> Blob {
        let mut hasher = Hasher::new();
        let mut size = 0;
        let _: Result<(), std::convert::Infallible> = self.emit(&mut |piece| {
            hasher.update(piece);
            size += piece.len() as u64;
            Ok(())
        });
        Blob {
            digest: hasher.finish(),
            size,
        }
    }

    pub(crate) fn emit<E>(&self, out: &mut dyn FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut body_crc = 0;
        let _: Result<(), std::convert::Infallible> = self.emit_body(&mut |piece| {
            body_crc = crc32c::crc32c_append(body_crc, piece);
            Ok(())
        });
        let implicit_bytes: usize = self.implicit.iter().map(|p| 2 + p.len()).sum();
        let mut header = Header {
            prelude: Prelude::new(MAGIC),
            data_size: self.data_size.into(),
            extent_count: (self.count as u64).into(),
            implicit_count: (self.implicit.len() as u64).into(),
            implicit_bytes: (implicit_bytes as u64).into(),
            body_crc: body_crc.into(),
            crc: U32::new(0),
        };
        header.crc = header_crc(&header).into();
        out(header.as_bytes())?;
        self.emit_body(out)
    }

    fn emit_body<E>(&self, out: &mut dyn FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut piece = Vec::with_capacity(PIECE * size_of::<WireExtent>());
        let mut extents = (self.extents)().peekable();
        while extents.peek().is_some() {
            piece.clear();
            for e in extents.by_ref().take(PIECE) {
                let wire = WireExtent {
                    data_offset: e.data_offset.into(),
                    len: e.len.into(),
                    flags: U32::new(0),
                    digest: e.digest,
                };
                piece.extend_from_slice(wire.as_bytes());
            }
            out(&piece)?;
        }
        for paths in self.implicit.chunks(PIECE) {
            piece.clear();
            for path in paths {
                let len = u16::try_from(path.len()).unwrap_or(u16::MAX); // checked by the builder
                piece.extend_from_slice(&len.to_le_bytes());
                piece.extend_from_slice(path);
            }
            out(&piece)?;
        }
        Ok(())
    }
}

/// Collects a map. Extents and directories may come in any order.
#[derive(Debug, Default)]
pub struct MapBuilder {
    data_size: u64,
    extents: Vec<Extent>,
    implicit: Vec<Vec<u8>>,
}

impl MapBuilder {
    /// A map of `data_size` bytes, a multiple of 4096, so far all zero.
    #[must_use]
    pub fn new(data_size: u64) -> Self {
        Self {
            data_size,
            ..Self::default()
        }
    }

    /// Adds a chunk's place.
    pub fn push(&mut self, extent: Extent) -> &mut Self {
        self.extents.push(extent);
        self
    }

    /// Adds an implicit directory; a repeat is ignored. See [`LayerMap::implicit_dirs`].
    pub fn implicit(&mut self, path: &[u8]) -> &mut Self {
        self.implicit.push(path.to_vec());
        self
    }

    /// The map.
    ///
    /// # Errors
    /// If an invariant of [`LayerMap`] does not hold.
    pub fn build(mut self) -> Result<LayerMap, FormatError> {
        check_data_size(self.data_size)?;
        self.extents
            .sort_unstable_by_key(|e| (e.data_offset, e.len));
        check_extents(&self.extents, self.data_size)?;
        let implicit = normal(self.implicit, self.extents.len())?;
        Ok(LayerMap {
            data_size: self.data_size,
            extents: self.extents,
            implicit,
            blob: Known::default(),
        })
    }
}

/// Implicit directories as a map of `extents` extents has them.
pub(crate) fn normal(
    mut implicit: Vec<Vec<u8>>,
    extents: usize,
) -> Result<Vec<Vec<u8>>, FormatError> {
    implicit.sort_unstable();
    implicit.dedup();
    for path in &implicit {
        check_path(path)?;
    }
    let implicit_bytes: u64 = implicit.iter().map(|p| 2 + p.len() as u64).sum();
    let size = (extents as u64)
        .saturating_mul(size_of::<WireExtent>() as u64)
        .saturating_add(implicit_bytes)
        .saturating_add(size_of::<Header>() as u64);
    if size > MAX_MAP_BYTES {
        return Err(FormatError::new(
            NAME,
            format!("it would have {size} bytes, at most {MAX_MAP_BYTES} are allowed"),
        ));
    }
    Ok(implicit)
}

pub(crate) fn check_data_size(data_size: u64) -> Result<(), FormatError> {
    if data_size > MAX_DATA_SIZE || !data_size.is_multiple_of(BLOCK) {
        return Err(FormatError::new(
            NAME,
            format!("the data size {data_size} is not a multiple of {BLOCK} up to {MAX_DATA_SIZE}"),
        ));
    }
    Ok(())
}

fn check_extents(extents: &[Extent], data_size: u64) -> Result<(), FormatError> {
    let mut check = ExtentCheck::new(data_size);
    extents.iter().try_for_each(|extent| check.next(extent))
}

/// Whether extents are in order and within a data size.
#[derive(Debug)]
pub(crate) struct ExtentCheck {
    data_size: u64,
    /// Extents so far, and where the last one ends.
    count: usize,
    end: u64,
}

impl ExtentCheck {
    pub(crate) const fn new(data_size: u64) -> Self {
        Self {
            data_size,
            count: 0,
            end: 0,
        }
    }

    /// Where the last extent ends.
    pub(crate) const fn end(&self) -> u64 {
        self.end
    }

    pub(crate) fn next(&mut self, e: &Extent) -> Result<(), FormatError> {
        let (i, data_size) = (self.count, self.data_size);
        if e.len == 0 || e.len > MAX_CHUNK_LEN {
            return Err(FormatError::new(
                NAME,
                format!("extent {i} has {} bytes", e.len),
            ));
        }
        let next = e
            .data_offset
            .checked_add(u64::from(e.len))
            .filter(|&next| next <= data_size)
            .ok_or_else(|| {
                FormatError::new(
                    NAME,
                    format!(
                        "extent {i} at {} goes beyond the data size {data_size}",
                        e.data_offset
                    ),
                )
            })?;
        if e.data_offset < self.end {
            return Err(FormatError::new(
                NAME,
                format!("extent {i} at {} overlaps the one before", e.data_offset),
            ));
        }
        self.end = next;
        self.count += 1;
        Ok(())
    }
}

fn parse_implicit(mut bytes: &[u8], count: u64) -> Result<Vec<Vec<u8>>, FormatError> {
    let mut paths: Vec<Vec<u8>> = Vec::new(); // grows with the bytes that are really there
    for i in 0..count {
        let (len, rest) = split::<U16>(NAME, "implicit directories", bytes)?;
        let (path, rest) = rest
            .split_at_checked(usize::from(len.get()))
            .ok_or_else(|| {
                FormatError::new(NAME, format!("it ends within implicit directory {i}"))
            })?;
        check_path(path)?;
        if paths.last().is_some_and(|last| last.as_slice() >= path) {
            return Err(FormatError::new(
                NAME,
                format!("implicit directory {i} is out of order"),
            ));
        }
        paths.push(path.to_vec());
        bytes = rest;
    }
    if bytes.is_empty() {
        Ok(paths)
    } else {
        Err(FormatError::new(
            NAME,
            format!("{} bytes follow the last implicit directory", bytes.len()),
        ))
    }
}

fn check_path(path: &[u8]) -> Result<(), FormatError> {
    let bad = path.len() > MAX_PATH_LEN
        || path.contains(&0)
        || (!path.is_empty()
            && path
                .split(|&b| b == b'/')
                .any(|c| c.is_empty() || c == b"." || c == b".." || c.len() > 255));
    if bad {
        let text: String = String::from_utf8_lossy(path).chars().take(100).collect();
        return Err(FormatError::new(
            NAME,
            format!("{text:?} is not a normal path"),
        ));
    }
    Ok(())
}
