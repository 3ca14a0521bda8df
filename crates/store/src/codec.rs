//! zstd, with contexts kept per thread. One place decides how much memory hostile input may cost.

use std::cell::RefCell;

use zstd_safe::{CCtx, DCtx, InBuffer, OutBuffer};

use crate::buffers;
use crate::digest::{Digest, Hasher};
use crate::error::FormatError;

/// How a frame is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Codec {
    /// As it is: compression did not make it smaller.
    Raw,
    /// One zstd frame.
    Zstd,
}

impl Codec {
    pub(crate) fn from_wire(format: &'static str, value: u32) -> Result<Self, FormatError> {
        match value {
            0 => Ok(Self::Raw),
            1 => Ok(Self::Zstd),
            other => Err(FormatError::newer(
                format,
                format!("a frame uses the unknown codec {other}"),
            )),
        }
    }

    pub(crate) const fn to_wire(self) -> u32 {
        match self {
            Self::Raw => 0,
            Self::Zstd => 1,
        }
    }
}

/// Lowest zstd level accepted.
pub(crate) const MIN_LEVEL: i32 = -7;
/// Highest zstd level accepted.
pub(crate) const MAX_LEVEL: i32 = 22;

const NAME: &str = "zstd";

/// Largest window that a reader allocates for: what level 22 uses on large input.
const MAX_WINDOW_LOG: u32 = 27;

thread_local! {
    static DECOMPRESS: RefCell<DCtx<'static>> = RefCell::new(new_decompressor());
}

fn new_decompressor() -> DCtx<'static> {
    let mut context = DCtx::create();
    // Cannot fail: the value is within zstd's bounds on every platform.
    let _ = context.set_parameter(zstd_safe::DParameter::WindowLogMax(MAX_WINDOW_LOG));
    context
}

fn text(code: usize) -> String {
    zstd_safe::get_error_name(code).to_owned()
}

/// A compressor: one per thread, reused for every frame.
pub(crate) struct Compressor {
    context: CCtx<'static>,
    level: i32,
}

impl Compressor {
    pub(crate) fn new(level: i32) -> Self {
        Self {
            context: CCtx::create(),
            level: level.clamp(MIN_LEVEL, MAX_LEVEL),
        }
    }

    /// One zstd frame of `raw`, with its content size.
    pub(crate) fn compress(&mut self, raw: &[u8]) -> Result<Vec<u8>, FormatError> {
        let mut out = Vec::with_capacity(zstd_safe::compress_bound(raw.len()));
        self.context
            .compress(&mut out, raw, self.level)
            .map_err(|code| FormatError::new(NAME, text(code)))?;
        Ok(out)
    }

    /// `raw` compressed, or as it is where that is not smaller.
    pub(crate) fn frame(&mut self, raw: Vec<u8>) -> Result<(Codec, Vec<u8>), FormatError> {
        let mut packed = self.compress(&raw)?;
        if packed.len() < raw.len() {
            packed.shrink_to_fit();
            Ok((Codec::Zstd, packed))
        } else {
            Ok((Codec::Raw, raw))
        }
    }
}

/// An object as it is stored, and what its raw bytes were.
pub(crate) struct Object {
    pub(crate) digest: Digest,
    /// Raw bytes.
    pub(crate) size: u64,
    pub(crate) stored: Vec<u8>,
}

/// Compresses and hashes an object that comes in pieces; only what is stored is kept.
pub(crate) struct ObjectWriter {
    context: CCtx<'static>,
    hasher: Hasher,
    size: u64,
    stored: Vec<u8>,
    block: Vec<u8>,
}

impl ObjectWriter {
    pub(crate) fn new(level: i32) -> Self {
        let mut context = CCtx::create();
        let level = level.clamp(MIN_LEVEL, MAX_LEVEL);
        // Cannot fail: the value is within zstd's bounds.
        let _ = context.set_parameter(zstd_safe::CParameter::CompressionLevel(level));
        Self {
            context,
            hasher: Hasher::new(),
            size: 0,
            stored: Vec::new(),
            block: vec![0; CCtx::out_size()],
        }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        self.hasher.update(bytes);
        self.size += bytes.len() as u64;
        let mut input = InBuffer::around(bytes);
        while input.pos < bytes.len() {
            let mut output = OutBuffer::around(self.block.as_mut_slice());
            self.context
                .compress_stream(&mut output, &mut input)
                .map_err(|code| FormatError::new(NAME, text(code)))?;
            self.stored.extend_from_slice(output.as_slice());
        }
        Ok(())
    }

    /// What is compressed so far, if it is `least` bytes or more; it is not part of
    /// [`Object::stored`] then.
    pub(crate) fn take_stored(&mut self, least: usize) -> Option<Vec<u8>> {
        (self.stored.len() >= least).then(|| std::mem::take(&mut self.stored))
    }

    pub(crate) fn finish(mut self) -> Result<Object, FormatError> {
        loop {
            let mut output = OutBuffer::around(self.block.as_mut_slice());
            let left = self
                .context
                .end_stream(&mut output)
                .map_err(|code| FormatError::new(NAME, text(code)))?;
            self.stored.extend_from_slice(output.as_slice());
            if left == 0 {
                break;
            }
        }
        Ok(Object {
            digest: self.hasher.finish(),
            size: self.size,
            stored: self.stored,
        })
    }
}

/// Decompresses to exactly `raw_len` bytes, which the caller has capped.
pub(crate) fn decompress_frame(
    codec: Codec,
    stored: &[u8],
    raw_len: usize,
) -> Result<Vec<u8>, FormatError> {
    let out = match codec {
        Codec::Raw => {
            let mut out = buffers::take(stored.len());
            out.extend_from_slice(stored);
            out
        }
        Codec::Zstd => DECOMPRESS.with_borrow_mut(|context| {
            let mut out = buffers::take(raw_len);
            context
                .decompress(&mut out, stored)
                .map_err(|code| FormatError::new(NAME, text(code)))?;
            Ok(out)
        })?,
    };
    if out.len() == raw_len {
        Ok(out)
    } else {
        Err(FormatError::new(
            NAME,
            format!("a frame has {} raw bytes, not {raw_len}", out.len()),
        ))
    }
}

/// Decompresses a whole object of one or more zstd frames to exactly `raw_len` bytes. Memory grows
/// with what really comes out, never beyond `raw_len`.
pub(crate) fn decompress_object(stored: &[u8], raw_len: u64) -> Result<Vec<u8>, FormatError> {
    let mut out: Vec<u8> = Vec::new();
    let len = decompress_into(stored, raw_len, |piece| out.extend_from_slice(piece))?;
    if len == raw_len {
        Ok(out)
    } else {
        Err(FormatError::new(
            NAME,
            format!("it decompresses to {len} bytes, not {raw_len}"),
        ))
    }
}

/// The `len` bytes that a part of an object of the format `name` decompresses to. Memory grows with
/// what really comes out, never beyond `len`.
pub(crate) fn decompress_bounded(
    name: &'static str,
    stored: &[u8],
    len: u64,
) -> Result<Vec<u8>, FormatError> {
    decompress_object(stored, len).map_err(|error| FormatError::new(name, error.to_string()))
}

/// The digest of what an object of one or more zstd frames decompresses to, if that is at most
/// `limit` bytes.
pub(crate) fn digest_of_raw(stored: &[u8], limit: u64) -> Result<Digest, FormatError> {
    let mut hasher = Hasher::new();
    decompress_into(stored, limit, |piece| hasher.update(piece))?;
    Ok(hasher.finish())
}

/// The digest of what an object of zstd frames decompresses to, which comes in pieces.
pub(crate) struct RawDigest {
    context: DCtx<'static>,
    hasher: Hasher,
    /// Raw bytes that may still come.
    left: u64,
    /// Whether a frame is under way.
    within: bool,
    block: Vec<u8>,
}

impl RawDigest {
    /// Of an object of at most `limit` raw bytes.
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            context: new_decompressor(),
            hasher: Hasher::new(),
            left: limit,
            within: true,
            block: vec![0; DCtx::out_size()],
        }
    }

    /// The next bytes as they are stored.
    ///
    /// # Errors
    /// If they are no part of such an object.
    pub(crate) fn push(&mut self, stored: &[u8]) -> Result<(), FormatError> {
        let fail = |what: String| FormatError::new(NAME, what);
        let mut input = InBuffer::around(stored);
        loop {
            let mut output = OutBuffer::around(self.block.as_mut_slice());
            let hint = self
                .context
                .decompress_stream(&mut output, &mut input)
                .map_err(|code| fail(text(code)))?;
            let produced = output.as_slice();
            self.left = (self.left)
                .checked_sub(produced.len() as u64)
                .ok_or_else(|| fail("it decompresses to more bytes than it has".to_owned()))?;
            self.hasher.update(produced);
            self.within = hint != 0;
            // Asked once more after the end of a frame, it would begin another.
            if input.pos == stored.len() && (hint == 0 || produced.is_empty()) {
                return Ok(());
            }
        }
    }

    /// The digest, and the raw bytes that did not come.
    ///
    /// # Errors
    /// If the last frame has not ended.
    pub(crate) fn finish(self) -> Result<(Digest, u64), FormatError> {
        if self.within {
            return Err(FormatError::new(NAME, "it is truncated"));
        }
        Ok((self.hasher.finish(), self.left))
    }
}

/// Gives `sink` what zstd frames decompress to, at most `limit` bytes; their number.
fn decompress_into(
    stored: &[u8],
    limit: u64,
    mut sink: impl FnMut(&[u8]),
) -> Result<u64, FormatError> {
    let fail = |what: String| FormatError::new(NAME, what);
    let mut context = new_decompressor();
    let mut input = InBuffer::around(stored);
    let mut block = vec![0_u8; DCtx::out_size()];
    let mut len = 0_u64;
    loop {
        let mut output = OutBuffer::around(block.as_mut_slice());
        let hint = context
            .decompress_stream(&mut output, &mut input)
            .map_err(|code| fail(text(code)))?;
        let produced = output.as_slice();
        len += produced.len() as u64;
        if len > limit {
            return Err(fail(format!("it decompresses to more than {limit} bytes")));
        }
        let idle = produced.is_empty();
        sink(produced);
        let done = input.pos == stored.len();
        if done && hint == 0 {
            return Ok(len);
        }
        if done && idle {
            return Err(fail("it is truncated".to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_of_pieces_is_that_of_the_whole() {
        let mut raw: Vec<u8> = (0..600_000_u32).flat_map(u32::to_le_bytes).collect();
        raw.extend(vec![7; 300_000]);
        let (first, second) = raw.split_at(1_000_001);
        let mut stored = Compressor::new(3).compress(first).unwrap();
        stored.extend(Compressor::new(3).compress(second).unwrap());
        let digest = |stored: &[u8], piece: usize, limit: u64| {
            let mut digest = RawDigest::new(limit);
            for bytes in stored.chunks(piece) {
                digest.push(bytes)?;
            }
            digest.finish()
        };
        let len = raw.len() as u64;
        for piece in [1000, 128 << 10, stored.len()] {
            assert_eq!(digest(&stored, piece, len).unwrap(), (Digest::of(&raw), 0));
        }
        assert_eq!(digest(&stored, 999, len + 3).unwrap().1, 3);
        assert!(digest(&stored, 1000, len - 1).is_err());
        assert!(digest(&stored[..stored.len() - 1], 1000, len).is_err());
        assert!(digest(b"no frame at all", 1000, len).is_err());
        assert!(digest(b"", 1000, len).is_err());
    }
}
