//! Tables of records with a digest each, the way they compress best: the digests do not compress at
//! all, and bytes of one place in all records are much alike.

use crate::codec::{Compressor, decompress_bounded};
use crate::error::FormatError;

/// Level at which tables are compressed. Not the writer's: the same table gives the same bytes
/// whatever its layer was built with.
const LEVEL: i32 = 3;
/// A table never decompresses to more than so many times its bytes: digests do not compress.
const MAX_RATIO: u64 = 256;

/// A table: its records' length in bytes, and how many bytes at the start of each go by planes. The
/// others stay together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Table {
    pub(super) record: usize,
    pub(super) planes: usize,
}

/// Appends the records of `table`, rearranged.
pub(super) fn split(table: Table, records: &[u8], out: &mut Vec<u8>) {
    for plane in 0..table.planes {
        out.extend(records.iter().skip(plane).step_by(table.record));
    }
    for record in records.chunks_exact(table.record) {
        out.extend_from_slice(record.get(table.planes..).unwrap_or_default());
    }
}

/// The records as they were, of the bytes that [`split`] made of them.
pub(super) fn join(table: Table, bytes: &[u8]) -> Vec<u8> {
    let count = bytes.len() / table.record;
    let (planes, rest) = bytes
        .split_at_checked(count * table.planes)
        .unwrap_or_default();
    let mut records = vec![0; count * table.record];
    let tail = table.record - table.planes;
    for (index, record) in records.chunks_exact_mut(table.record).enumerate() {
        for (plane, byte) in record.iter_mut().take(table.planes).enumerate() {
            *byte = planes
                .get(plane * count + index)
                .copied()
                .unwrap_or_default();
        }
        if let (Some(to), Some(from)) = (
            record.get_mut(table.planes..),
            rest.get(index * tail..(index + 1) * tail),
        ) {
            to.copy_from_slice(from);
        }
    }
    records
}

/// `bytes` compressed, if that saves a quarter at least and a reader takes it.
pub(super) fn compress(bytes: &[u8]) -> Option<Vec<u8>> {
    let packed = Compressor::new(LEVEL).compress(bytes).ok()?;
    let (len, raw) = (packed.len() as u64, bytes.len() as u64);
    (len < raw / 4 * 3 && raw <= len.saturating_mul(MAX_RATIO)).then_some(packed)
}

/// Exactly `len` bytes of what [`compress`] made. Bounded by the bytes that are there.
///
/// # Errors
/// If they are not that.
pub(super) fn decompress(
    name: &'static str,
    bytes: &[u8],
    len: u64,
) -> Result<Vec<u8>, FormatError> {
    if len > (bytes.len() as u64).saturating_mul(MAX_RATIO) {
        return Err(FormatError::new(
            name,
            format!("{} bytes cannot be {len} bytes compressed", bytes.len()),
        ));
    }
    decompress_bounded(name, bytes, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_come_back() {
        for (record, planes) in [(8, 8), (56, 24), (5, 0), (1, 1)] {
            let table = Table { record, planes };
            for count in [0, 1, 2, 100] {
                let records: Vec<u8> = (0..record * count)
                    .map(|i| (i * 7 % 251).to_le_bytes()[0])
                    .collect();
                let mut out = vec![9];
                split(table, &records, &mut out);
                assert_eq!(out.len(), records.len() + 1);
                assert_eq!(join(table, &out[1..]), records, "{table:?} {count}");
            }
        }
    }

    #[test]
    fn what_is_compressed_is_bounded() {
        let bytes: Vec<u8> = (0..100_000_u32)
            .map(|i| (i % 17).to_le_bytes()[0])
            .collect();
        assert!(compress(&bytes).is_none(), "more than its bytes could be");
        let mut mixed = bytes.clone();
        let mut state = 1_u64;
        for byte in mixed.iter_mut().take(40_000) {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            *byte = (state >> 56).to_le_bytes()[0];
        }
        let packed = compress(&mixed).unwrap();
        assert_eq!(decompress("X", &packed, 100_000).unwrap(), mixed);
        assert!(decompress("X", &packed, 99_999).is_err());
        assert!(decompress("X", &packed, 100_001).is_err());
        assert!(decompress("X", &packed, 1 << 40).is_err());
        assert!(decompress("X", &packed[..packed.len() - 1], 100_000).is_err());
        assert!(decompress("X", b"", 0).is_err());
    }
}
