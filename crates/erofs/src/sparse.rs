//! How a file with holes is laid out on device 1.
//!
//! A chunk-based inode has one chunk size. Large chunks make a short index but give address
//! space (not stored bytes: uncovered space of the data file is a hole) to the holes that they
//! span; small chunks the reverse. The plan takes the size that costs least, counting an index
//! byte like a block of address space, so 8 TiB with one block of data take 128 KiB of index
//! and half a GiB of addresses, and a file without holes one index entry.

use std::ops::Range;

use crate::tree::{BlockIndex, FileLayout};
use crate::{BLOCK_BITS, BLOCK_SIZE, MAX_CHUNK_BITS};

/// Most chunks a plan uses while a larger chunk size is left.
const MAX_CHUNKS: u64 = 1 << 22;
const HOLE: u32 = u32::MAX;

/// Chunk size of a file and which of its chunks have a place on device 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SparsePlan {
    size: u64,
    chunk_bits: u8,
    slots: Vec<u32>, // rank among the chunks with data, or HOLE
    blocks: u64,
}

/// Plans a file of `size` bytes whose data, everything else being zeros, lies in the byte
/// ranges `data`. Ranges may come in any order, overlap or pass the end of the file.
pub fn plan_sparse(size: u64, data: &[Range<u64>]) -> SparsePlan {
    let data = normalise(size, data);
    let (least, most) = bits_for(size);
    let mut best = (u64::MAX, most);
    for bits in (least..=most).rev() {
        let blocks = count_blocks(size, &data, bits);
        let cost = size
            .div_ceil(1 << bits)
            .saturating_mul(8)
            .saturating_add(blocks);
        if cost < best.0 {
            best = (cost, bits);
        }
    }
    let chunk_bits = best.1;
    let count = usize::try_from(size.div_ceil(1 << chunk_bits)).unwrap_or(usize::MAX);
    let mut slots = vec![HOLE; count];
    let mut next = 0;
    for range in &data {
        for chunk in range.start >> chunk_bits..=(range.end - 1) >> chunk_bits {
            let slot = usize::try_from(chunk)
                .ok()
                .and_then(|chunk| slots.get_mut(chunk));
            if let Some(slot @ &mut HOLE) = slot {
                *slot = next;
                next += 1;
            }
        }
    }
    SparsePlan {
        size,
        chunk_bits,
        slots,
        blocks: count_blocks(size, &data, chunk_bits),
    }
}

impl SparsePlan {
    /// Binary logarithm of the chunk size in bytes.
    pub fn chunk_bits(&self) -> u8 {
        self.chunk_bits
    }

    /// Blocks of address space that the file takes on device 1.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Where byte `offset` of the file lies, in bytes from the start of the file's own address
    /// space; `None` in a hole or past the end. Neighbouring bytes of one chunk are neighbours
    /// there.
    pub fn address_of(&self, offset: u64) -> Option<u64> {
        if offset >= self.size {
            return None;
        }
        let chunk = usize::try_from(offset >> self.chunk_bits).ok()?;
        let slot = self.slots.get(chunk).filter(|slot| **slot != HOLE)?;
        let within = offset & ((1 << self.chunk_bits) - 1);
        Some((u64::from(*slot) << self.chunk_bits) + within)
    }

    /// The layout with the file's address space starting at block `start` of device 1; `None`
    /// if it would end past what the format can address.
    pub fn layout(&self, start: BlockIndex) -> Option<FileLayout> {
        if self.size == 0 {
            return Some(FileLayout::Empty);
        }
        BlockIndex::new(start.get().checked_add(self.blocks.saturating_sub(1))?)?;
        if self.slots == [0] {
            return Some(FileLayout::Contiguous { start });
        }
        let per_chunk = 1_u64 << (self.chunk_bits - BLOCK_BITS);
        let chunks = self.slots.iter().map(|slot| match *slot {
            HOLE => Some(None),
            slot => BlockIndex::new(start.get() + u64::from(slot) * per_chunk).map(Some),
        });
        Some(FileLayout::Chunked {
            chunk_bits: self.chunk_bits,
            chunks: chunks.collect::<Option<_>>()?,
        })
    }
}

/// Smallest and largest sensible chunk sizes for a file, as binary logarithms.
fn bits_for(size: u64) -> (u8, u8) {
    let most = chunk_bits_for(size);
    let least = (BLOCK_BITS..=most).find(|bits| size.div_ceil(1 << bits) <= MAX_CHUNKS);
    (least.unwrap_or(most), most)
}

/// The chunk size that holds a file of `size` bytes in one chunk, or the largest there is.
pub(crate) fn chunk_bits_for(size: u64) -> u8 {
    (BLOCK_BITS..MAX_CHUNK_BITS)
        .find(|bits| size <= 1 << bits)
        .unwrap_or(MAX_CHUNK_BITS)
}

fn normalise(size: u64, data: &[Range<u64>]) -> Vec<Range<u64>> {
    let clipped = data.iter().map(|range| range.start..range.end.min(size));
    let mut sorted: Vec<_> = clipped.filter(|range| range.start < range.end).collect();
    sorted.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// Blocks of the chunks that meet any of the (sorted, disjoint) ranges.
fn count_blocks(size: u64, data: &[Range<u64>], bits: u8) -> u64 {
    let mut next = 0; // first chunk not counted yet
    let mut chunks = 0;
    for range in data {
        let first = (range.start >> bits).max(next);
        let end = ((range.end - 1) >> bits) + 1;
        chunks += end.saturating_sub(first);
        next = next.max(end);
    }
    let whole = chunks << (bits - BLOCK_BITS);
    // A chunk that holds the end of the file stops there.
    let past_end = (next << (bits - BLOCK_BITS)).saturating_sub(size.div_ceil(BLOCK_SIZE));
    whole - past_end.min(whole)
}
