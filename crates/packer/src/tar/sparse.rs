//! Sparse members: GNU's old form and the three PAX forms.
//!
//! Every form comes to one list of pieces of data in rising order; the rest of the file is holes.

use super::header::{BLOCK, Header};
use super::pax::{Effective, SparseKey, decimal};

/// One piece of a sparse file's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Where it lies in the file, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// How a member says that it is sparse.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Form {
    /// Not at all.
    Dense,
    /// The map is in hand.
    Listed {
        /// The pieces.
        pieces: Vec<Piece>,
        /// The file's size.
        size: u64,
    },
    /// PAX 1.0: the map stands before the data.
    InData {
        /// The file's size.
        size: u64,
    },
}

/// The form that the PAX records give.
pub(crate) fn from_pax(records: &Effective<'_>) -> Result<Form, String> {
    let size = |key: &str| -> Result<u64, String> {
        records
            .number(key)?
            .ok_or_else(|| format!("a sparse file has no {key}"))
    };
    if let Some(major) = records.number("GNU.sparse.major")? {
        let minor = records.number("GNU.sparse.minor")?.unwrap_or(0);
        return match (major, minor) {
            (1, 0) => Ok(Form::InData {
                size: size("GNU.sparse.realsize")?,
            }),
            _ => Err(format!("sparse format {major}.{minor} is not known")),
        };
    }
    if let Some(map) = records.get("GNU.sparse.map") {
        let numbers: Option<Vec<u64>> = map.split(|&byte| byte == b',').map(decimal).collect();
        let numbers = numbers.ok_or("GNU.sparse.map is not a list of numbers")?;
        let (pairs, rest) = numbers.as_chunks::<2>();
        if !rest.is_empty() {
            return Err("GNU.sparse.map has an odd count of numbers".to_owned());
        }
        let pieces = pairs
            .iter()
            .map(|&[offset, len]| Piece { offset, len })
            .collect();
        return Ok(Form::Listed {
            pieces,
            size: size("GNU.sparse.size")?,
        });
    }
    if !records.sparse_pieces().is_empty() || records.get("GNU.sparse.numblocks").is_some() {
        let mut pieces = Vec::new();
        for pair in records.sparse_pieces().chunks(2) {
            match *pair {
                [(SparseKey::Offset, offset), (SparseKey::Length, len)] => {
                    pieces.push(Piece { offset, len });
                }
                _ => return Err("a sparse map's offsets and lengths do not alternate".to_owned()),
            }
        }
        return Ok(Form::Listed {
            pieces,
            size: size("GNU.sparse.size")?,
        });
    }
    Ok(Form::Dense)
}

/// The pieces that stand in an old GNU header (4) or extension block (21); the flag says whether
/// another extension block follows.
pub(crate) fn old_gnu(
    block: &Header,
    at: usize,
    count: usize,
    more_at: usize,
) -> Result<(Vec<Piece>, bool), String> {
    let mut pieces = Vec::new();
    for index in 0..count {
        let at = at + index * 24;
        if block.field(at + 12, 1) == b"\0" {
            break;
        }
        pieces.push(Piece {
            offset: block.unsigned(at, 12, "sparse offset")?,
            len: block.unsigned(at + 12, 12, "sparse length")?,
        });
    }
    Ok((pieces, block.field(more_at, 1) != b"\0"))
}

/// A map in decimal lines, as PAX 1.0 puts it before the data.
#[derive(Debug, Default)]
pub(crate) struct MapLines {
    expected: Option<u64>,
    numbers: Vec<u64>,
    digits: Vec<u8>,
}

impl MapLines {
    /// Takes the next block of the map; true when the map is complete.
    pub(crate) fn block(&mut self, block: &[u8; BLOCK]) -> Result<bool, String> {
        let bad = "a sparse map's number is not one";
        for &byte in block {
            if byte != b'\n' {
                self.digits.push(byte);
                if self.digits.len() > 20 {
                    return Err(bad.to_owned());
                }
                continue;
            }
            let number = decimal(&self.digits).ok_or(bad)?;
            self.digits.clear();
            match self.expected {
                None => {
                    let count = number.checked_mul(2).ok_or(bad)?;
                    self.expected = Some(count);
                }
                Some(_) => self.numbers.push(number),
            }
            if self.expected == u64::try_from(self.numbers.len()).ok() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The pieces.
    pub(crate) fn pieces(&self) -> Vec<Piece> {
        self.numbers
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&[offset, len]| Piece { offset, len })
            .collect()
    }

    /// Bytes that the map takes in memory, for a bound.
    pub(crate) fn weight(&self) -> usize {
        self.numbers.len() * 8
    }
}

/// Checks that pieces rise without overlap within `size` and sum up to `stored`.
pub(crate) fn check(pieces: &[Piece], size: u64, stored: u64) -> Result<(), String> {
    let (mut end, mut sum) = (0u64, 0u64);
    for piece in pieces {
        let next = piece
            .offset
            .checked_add(piece.len)
            .filter(|&next| next <= size);
        let next = next.ok_or_else(|| {
            format!(
                "sparse piece at {} ends beyond the file's {size} bytes",
                piece.offset
            )
        })?;
        if piece.offset < end {
            return Err(format!(
                "sparse piece at {} overlaps the one before",
                piece.offset
            ));
        }
        end = next;
        sum = sum.saturating_add(piece.len);
    }
    if sum == stored {
        Ok(())
    } else {
        Err(format!(
            "sparse pieces come to {sum} bytes, the archive holds {stored}"
        ))
    }
}
