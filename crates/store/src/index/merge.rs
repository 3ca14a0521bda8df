//! Several runs become one, in one pass and bounded memory: the runs' blocks are read in order, a
//! piece at a time, and for each block of the new run the chunks of all are sorted together. Packs
//! that no segment of the store names any more are dropped on the way, and so are their chunks.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use zerocopy::little_endian::U32;

use super::run::{CHUNK, Run, RunPack, block_of, chunks_of, damaged, to_usize};
use super::run_writer::RunWriter;
use crate::digest::Digest;
use crate::format::index::{IndexPack, WireChunk};

/// Bytes of read buffers of all inputs together.
const BUFFERS: u64 = 6 << 20;
/// A pack of an input that the new run does not have.
const DROPPED: u32 = u32::MAX;

/// Merges `inputs` into a new run in `dir`. Segments that are not in `live` are left out.
pub(super) fn merge(dir: &Path, inputs: &[&Run], live: &HashSet<Digest>) -> io::Result<PathBuf> {
    let mut segments: Vec<Digest> = Vec::new();
    let mut numbers: HashMap<Digest, u32> = HashMap::new();
    for segment in inputs.iter().flat_map(|run| run.segments()) {
        if live.contains(segment) && !numbers.contains_key(segment) {
            numbers.insert(*segment, count(segments.len())?);
            segments.push(*segment);
        }
    }
    let mut packs: Vec<RunPack> = Vec::new();
    let mut pack_numbers: HashMap<(IndexPack, u32), u32> = HashMap::new();
    let mut cursors = Vec::with_capacity(inputs.len());
    for run in inputs {
        let mut mapped = Vec::new();
        let mut overflow = false;
        run.for_each_pack(|pack| {
            let segment = usize::try_from(pack.segment()).ok();
            let segment = segment.and_then(|s| numbers.get(run.segments().get(s)?));
            let Some(&segment) = segment else {
                mapped.push(DROPPED);
                return;
            };
            let Ok(next) = count(packs.len()) else {
                overflow = true;
                return;
            };
            let number = *pack_numbers.entry((pack.pack(), segment)).or_insert(next);
            if number == next {
                packs.push(RunPack::new(&pack.pack(), segment));
            }
            mapped.push(number);
        })?;
        if overflow {
            return Err(damaged("it has more than 2^32-1 packs"));
        }
        cursors.push(Cursor {
            run,
            mapped,
            next_block: 0,
            end_block: 0,
            piece: Vec::new(),
            at: 0,
            chunks: Vec::new(),
            used: 0,
        });
    }
    drop(pack_numbers);
    let expected = inputs.iter().map(|run| run.chunks()).sum();
    let mut writer = RunWriter::create(dir, expected)?;
    let most = (BUFFERS / (inputs.len() as u64).max(1)).max(64 << 10);
    let mut together: Vec<WireChunk> = Vec::new();
    for block in 0..1_u64 << writer.bits() {
        together.clear();
        for cursor in &mut cursors {
            cursor.take(block, writer.bits(), most, &mut together)?;
        }
        together.sort_unstable_by_key(|c| (c.digest, c.pack.get(), c.chunk.get()));
        for chunk in &together {
            writer.push(*chunk)?;
        }
    }
    writer.finish(&packs, &segments)
}

fn count(n: usize) -> io::Result<u32> {
    u32::try_from(n)
        .ok()
        .filter(|n| *n != DROPPED)
        .ok_or_else(|| damaged("it has more than 2^32-1 packs or segments"))
}

/// How far an input was read.
struct Cursor<'a> {
    run: &'a Run,
    /// Pack numbers of the new run by those of this one.
    mapped: Vec<u32>,
    /// First block not yet in `chunks`.
    next_block: u64,
    /// First block not in `piece`.
    end_block: u64,
    piece: Vec<u8>,
    /// Where `next_block` begins in `piece`.
    at: usize,
    /// Chunks of the block before `next_block`, the first `used` of them taken.
    chunks: Vec<WireChunk>,
    used: usize,
}

impl Cursor<'_> {
    /// Takes the chunks of the new run's block `block`.
    fn take(
        &mut self,
        block: u64,
        bits: u32,
        most: u64,
        out: &mut Vec<WireChunk>,
    ) -> io::Result<()> {
        loop {
            while let Some(chunk) = self.chunks.get(self.used) {
                match block_of(&chunk.digest, bits).cmp(&block) {
                    std::cmp::Ordering::Greater => return Ok(()),
                    std::cmp::Ordering::Equal => out.push(*chunk),
                    // Blocks of every input ascend, or the writer would refuse them.
                    std::cmp::Ordering::Less => return Err(damaged("a chunk is out of place")),
                }
                self.used += 1;
            }
            // The next block of this run may begin in `block` if its first digest can.
            let own = self.run.bits();
            if self.next_block >= 1 << own || first_block(self.next_block, own, bits) > block {
                return Ok(());
            }
            self.load(most)?;
        }
    }

    /// Loads the run's next block.
    fn load(&mut self, most: u64) -> io::Result<()> {
        if self.next_block == self.end_block {
            self.end_block = self
                .run
                .read_blocks(self.next_block, most, &mut self.piece)?;
            self.at = 0;
        }
        let starts = self.run.starts()?;
        let start = |b: u64| starts.get(to_usize(b)).copied().unwrap_or(0);
        let len = u64::from(start(self.next_block + 1) - start(self.next_block)) * CHUNK;
        let bytes = self
            .piece
            .get(self.at..self.at.saturating_add(to_usize(len)))
            .unwrap_or_default();
        self.at += bytes.len();
        self.chunks.clear();
        self.used = 0;
        for chunk in chunks_of(bytes)? {
            let chunk = chunk.check()?;
            let pack = usize::try_from(chunk.pack.get())
                .ok()
                .and_then(|p| self.mapped.get(p))
                .copied()
                .ok_or_else(|| damaged("a chunk is in a pack that it does not have"))?;
            if pack != DROPPED {
                self.chunks.push(WireChunk {
                    pack: U32::new(pack),
                    ..*chunk
                });
            }
        }
        self.next_block += 1;
        Ok(())
    }
}

/// The first block among `2^bits` in which a chunk of block `block` among `2^own` can be.
fn first_block(block: u64, own: u32, bits: u32) -> u64 {
    if bits >= own {
        block << (bits - own)
    } else {
        block >> (own - bits)
    }
}
