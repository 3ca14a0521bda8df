//! Binary formats of FORMAT.md. All are little endian, begin with a prelude and are parsed
//! with capped lengths and checked arithmetic: their bytes come from outside.

pub mod index;
pub mod locator;
pub mod map;
pub mod pack;
mod planes;
pub mod profile;

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::FormatError;

/// First 24 bytes of every binary object.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub(crate) struct Prelude {
    magic: [u8; 8],
    /// Layout of what follows; another version: refuse.
    version: U32,
    /// Unknown bits are harmless.
    compat: U32,
    /// Unknown bits allow reading, not appending or rewriting.
    ro_compat: U32,
    /// Unknown bits: refuse.
    incompat: U32,
}
const _: () = assert!(size_of::<Prelude>() == 24);

impl Prelude {
    pub(crate) const VERSION: u32 = 1;

    pub(crate) const fn new(magic: [u8; 8]) -> Self {
        Self {
            magic,
            version: U32::new(Self::VERSION),
            compat: U32::new(0),
            ro_compat: U32::new(0),
            incompat: U32::new(0),
        }
    }

    /// Whether it begins with this magic.
    pub(crate) fn has_magic(&self, magic: &[u8; 8]) -> bool {
        &self.magic == magic
    }

    /// Checks magic and version. Comes before the checksum: another version may lay out and sum
    /// what follows in another way.
    pub(crate) fn check_start(
        &self,
        format: &'static str,
        magic: &[u8; 8],
    ) -> Result<(), FormatError> {
        if &self.magic != magic {
            return Err(FormatError::new(format, "it does not begin with its magic"));
        }
        if self.version.get() != Self::VERSION {
            return Err(FormatError::newer(
                format,
                format!(
                    "its version is {}, known is {}",
                    self.version,
                    Self::VERSION
                ),
            ));
        }
        Ok(())
    }

    /// The same with features that a reader has to know.
    pub(crate) const fn with(mut self, incompat: u32) -> Self {
        self.incompat = U32::new(incompat);
        self
    }

    /// Checks the feature sets. Comes after the checksum, so that damage does not pass for a
    /// newer version.
    pub(crate) fn check_features(&self, format: &'static str) -> Result<(), FormatError> {
        self.features(format, 0).map(|_| ())
    }

    /// The same for a format that has features of its own; those that are used.
    pub(crate) fn features(&self, format: &'static str, known: u32) -> Result<u32, FormatError> {
        let used = self.incompat.get();
        if used & !known == 0 {
            return Ok(used);
        }
        Err(FormatError::newer(
            format,
            format!("it uses unknown features {:#x}", used & !known),
        ))
    }
}

/// Splits a fixed-size structure off the front of `bytes`.
pub(crate) fn split<'a, T>(
    format: &'static str,
    what: &str,
    bytes: &'a [u8],
) -> Result<(&'a T, &'a [u8]), FormatError>
where
    T: FromBytes + Immutable + KnownLayout + Unaligned,
{
    T::ref_from_prefix(bytes)
        .map_err(|_| FormatError::new(format, format!("it ends within its {what}")))
}

/// Splits `count` fixed-size structures off the front of `bytes`. Allocates nothing.
pub(crate) fn split_slice<'a, T>(
    format: &'static str,
    what: &str,
    bytes: &'a [u8],
    count: u64,
) -> Result<(&'a [T], &'a [u8]), FormatError>
where
    T: FromBytes + Immutable + KnownLayout + Unaligned,
{
    let short = || FormatError::new(format, format!("it ends within its {count} {what}"));
    let count = usize::try_from(count).map_err(|_| short())?;
    if count
        .checked_mul(size_of::<T>())
        .is_none_or(|need| need > bytes.len())
    {
        return Err(short());
    }
    <[T]>::ref_from_prefix_with_elems(bytes, count).map_err(|_| short())
}

/// crc32c of the header's bytes before its last four.
pub(crate) fn header_crc<T: IntoBytes + Immutable>(header: &T) -> u32 {
    let bytes = header.as_bytes();
    crc32c::crc32c(
        bytes
            .split_at_checked(bytes.len().saturating_sub(4))
            .map_or(bytes, |(front, _)| front),
    )
}
