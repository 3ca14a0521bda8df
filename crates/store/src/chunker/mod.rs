//! `gear64-v1`: content-defined cut points. Frozen: cut points decide digests, so a change of
//! behaviour is a new name, never a new version of this one. FORMAT.md, section "Chunker".
//!
//! A gear hash of 64 bits rolls over the bytes; a chunk ends after the first byte at or beyond
//! `min` whose hash has its top bits zero: more bits before `avg`, fewer after (normalised
//! chunking), and at `max` in any case. Rolling begins 64 bytes before `min`, so that every
//! decision looks at the 64 bytes before the cut and at nothing else: equal content cuts at equal
//! places whatever precedes it.

mod table;

use std::fmt;
use std::str::FromStr;

use crate::error::FormatError;
use crate::format::map::MAX_CHUNK_LEN;
use table::GEAR;

/// Bytes that a hash depends on.
const WINDOW: usize = 64;

/// Sizes of `gear64-v1` in bytes. Part of a layer's recorded parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Params {
    /// No chunk is shorter, except a file's last.
    pub min: usize,
    /// Where cutting becomes easier; a power of two.
    pub avg: usize,
    /// No chunk is longer.
    pub max: usize,
    /// A file of up to this many bytes is one chunk and is not cut.
    pub whole: usize,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            min: 16 << 10,
            avg: 64 << 10,
            max: 256 << 10,
            whole: 64 << 10,
        }
    }
}

const NAME: &str = "gear64-v1";

impl Params {
    /// Checks `64 <= min <= avg <= max`, `whole <= max <= 1 MiB`, and that `avg` is a power of two
    /// from 256 to 2^20.
    ///
    /// # Errors
    /// If one of them does not hold.
    pub fn check(&self) -> Result<(), FormatError> {
        let sound = self.min >= WINDOW
            && self.min <= self.avg
            && self.avg <= self.max
            && self.whole <= self.max
            && self.max <= MAX_CHUNK_LEN as usize
            && self.avg.is_power_of_two()
            && self.avg >= 256;
        if sound {
            Ok(())
        } else {
            Err(FormatError::new(
                NAME,
                format!("its sizes {self:?} are not allowed"),
            ))
        }
    }
}

/// `gear64-v1:MIN:AVG:MAX:WHOLE`, as recorded in manifests.
impl fmt::Display for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{NAME}:{}:{}:{}:{}",
            self.min, self.avg, self.max, self.whole
        )
    }
}

impl FromStr for Params {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let bad = || {
            FormatError::new(
                NAME,
                format!(
                    "{:?} is not gear64-v1:MIN:AVG:MAX:WHOLE",
                    text.chars().take(80).collect::<String>()
                ),
            )
        };
        let mut parts = text
            .strip_prefix(NAME)
            .and_then(|t| t.strip_prefix(':'))
            .ok_or_else(bad)?
            .split(':');
        let mut next = || parts.next().and_then(|p| p.parse().ok()).ok_or_else(bad);
        let params = Self {
            min: next()?,
            avg: next()?,
            max: next()?,
            whole: next()?,
        };
        if parts.next().is_some() {
            return Err(bad());
        }
        params.check()?;
        Ok(params)
    }
}

/// Length of the first chunk of `data`, where `data` is what remains of a file or at least the
/// next `params.max` bytes of it. 0 only for no data. Does not look at [`Params::whole`].
#[must_use]
pub fn cut(data: &[u8], params: &Params) -> usize {
    let data = data.get(..params.max).unwrap_or(data);
    if data.len() <= params.min {
        return data.len();
    }
    let bits = params.avg.trailing_zeros();
    let hard = top_bits(bits + 2);
    let easy = top_bits(bits.saturating_sub(2));
    let mut hash = 0_u64;
    // The window before the first place where a cut is allowed: no decision yet.
    let warm = params.min.saturating_sub(WINDOW);
    for &byte in data
        .get(warm..params.min.saturating_sub(1))
        .unwrap_or_default()
    {
        hash = roll(hash, byte);
    }
    let first = params.min.saturating_sub(1);
    let turn = params.avg.saturating_sub(1).clamp(first, data.len());
    for (from, to, mask) in [(first, turn, hard), (turn, data.len(), easy)] {
        let part = data.get(from..to).unwrap_or_default();
        if let Some(at) = scan(&mut hash, part, mask) {
            return from + at + 1;
        }
    }
    data.len()
}

#[inline]
fn roll(hash: u64, byte: u8) -> u64 {
    #[expect(
        clippy::indexing_slicing,
        reason = "256 entries and a u8 index: always within"
    )]
    let gear = GEAR[usize::from(byte)];
    (hash << 1).wrapping_add(gear)
}

/// Index of the first byte of `part` after which the hash has no bit of `mask`.
fn scan(hash: &mut u64, part: &[u8], mask: u64) -> Option<usize> {
    let mut h = *hash;
    for (i, &byte) in part.iter().enumerate() {
        h = roll(h, byte);
        if h & mask == 0 {
            return Some(i);
        }
    }
    *hash = h;
    None
}

const fn top_bits(bits: u32) -> u64 {
    // 1 <= bits <= 22: `avg` is a power of two from 2^8 to 2^20.
    !(u64::MAX >> bits)
}
