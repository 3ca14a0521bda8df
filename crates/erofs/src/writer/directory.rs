//! Content of directories: entries sorted by name bytes, `.` and `..` among them, packed into
//! blocks.

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U64};

use crate::format::{BLOCK, FileType, RawDirent};

/// One entry to be written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dirent<'a> {
    pub(super) name: &'a [u8],
    pub(super) nid: u64,
    pub(super) file_type: FileType,
}

/// Result of packing names into blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Packed {
    /// Blocks before the last one, all counted full.
    pub(super) full_blocks: u64,
    /// Bytes in the last block.
    pub(super) tail: usize,
    /// Number of the first entry in the last block.
    pub(super) tail_first: usize,
}

impl Packed {
    /// `i_size` of the directory.
    pub(super) fn size(&self) -> u64 {
        self.full_blocks * crate::BLOCK_SIZE + self.tail as u64
    }
}

/// Packs entries with names of the given lengths greedily.
pub(super) fn pack(name_lengths: impl Iterator<Item = usize>) -> Packed {
    let mut packed = Packed::default();
    for (index, len) in name_lengths.enumerate() {
        let need = size_of::<RawDirent>() + len;
        if packed.tail + need > BLOCK {
            packed.full_blocks += 1;
            packed.tail = 0;
            packed.tail_first = index;
        }
        packed.tail += need;
    }
    packed
}

/// Encodes entries into blocks, calling `block` with each; the last is not padded.
pub(super) fn encode<'a, E>(
    entries: impl Iterator<Item = Dirent<'a>>,
    mut block: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut pending: Vec<Dirent<'a>> = Vec::new();
    let mut used = 0;
    let mut buffer = Vec::with_capacity(BLOCK);
    for entry in entries {
        let need = size_of::<RawDirent>() + entry.name.len();
        if used + need > BLOCK {
            encode_block(&pending, &mut buffer);
            buffer.resize(BLOCK, 0);
            block(&buffer)?;
            pending.clear();
            used = 0;
        }
        used += need;
        pending.push(entry);
    }
    encode_block(&pending, &mut buffer);
    block(&buffer)
}

fn encode_block(entries: &[Dirent<'_>], out: &mut Vec<u8>) {
    out.clear();
    let mut name_offset = size_of::<RawDirent>() * entries.len();
    for entry in entries {
        let dirent = RawDirent {
            nid: U64::new(entry.nid),
            // A block is 4096 bytes, so this fits.
            name_offset: U16::new(u16::try_from(name_offset).unwrap_or(u16::MAX)),
            file_type: entry.file_type as u8,
            reserved: 0,
        };
        out.extend_from_slice(dirent.as_bytes());
        name_offset += entry.name.len();
    }
    for entry in entries {
        out.extend_from_slice(entry.name);
    }
}
