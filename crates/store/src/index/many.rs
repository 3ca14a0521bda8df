//! Looking up many chunks of a run together.
//!
//! Their digests are taken in order, so that neighbours share pages of the file, of the tables and
//! of what the system keeps about them: a look-up of a chunk that is there is mostly waiting for
//! memory, and costs less than half of what it does in random order. What is asked of the tables is
//! asked of a few digests at a time, so that the machine fetches their cache lines together, and
//! chunks that lie close to each other are read in one piece.

use std::io;

use super::run::{Run, RunChunk, block_of, filter_byte, to_usize};
use crate::digest::Digest;

/// Digests that are taken through the tables together.
const TOGETHER: usize = 64;
/// Chunks between two that are read in one piece, at most: copying them costs less than a read.
const GAP: u32 = 48;
/// Chunks of such a piece, at most, unless one digest has more.
const PIECE: u32 = 1024;

/// A place of one of the chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hit {
    /// The number that came with its digest.
    pub(super) wanted: u32,
    /// Number of the pack in the run.
    pub(super) pack: u32,
    /// Index into the chunks of that pack's table.
    pub(super) chunk: u32,
}

/// Chunks of the run that may be the one of a digest.
#[derive(Debug, Clone, Copy)]
struct Likely {
    /// Index of the digest among those taken together.
    wanted: usize,
    /// Its first chunk in the run.
    first: u32,
    /// How many.
    count: u32,
}

impl Likely {
    const fn end(self) -> u32 {
        self.first.saturating_add(self.count)
    }
}

/// Adds each place of these digests to `found`. They come with numbers of the caller's, and ascend.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if the run is damaged; what `found` has then is right.
pub(super) fn find_many(
    run: &Run,
    wanted: &[(Digest, u32)],
    found: &mut Vec<Hit>,
) -> io::Result<()> {
    let starts = run.starts()?;
    let mut buffer = Vec::new();
    let Some(filter) = run.filter(wanted.len())? else {
        let mut places = Vec::new();
        for (digest, number) in wanted {
            places.clear();
            run.find(digest, &mut buffer, &mut places)?;
            found.extend(places.iter().map(|&(pack, chunk)| Hit {
                wanted: *number,
                pack,
                chunk,
            }));
        }
        return Ok(());
    };
    let mut likely: Vec<Likely> = Vec::with_capacity(TOGETHER * 2);
    for wanted in wanted.chunks(TOGETHER) {
        let mut blocks = [(0_u32, 0_u32); TOGETHER];
        for ((digest, _), block) in wanted.iter().zip(&mut blocks) {
            let i = to_usize(block_of(digest, run.bits()));
            if let (Some(&from), Some(&to)) = (starts.get(i), starts.get(i + 1)) {
                *block = (from, to);
            }
        }
        likely.clear();
        for (number, ((digest, _), block)) in wanted.iter().zip(&blocks).enumerate() {
            note_likely(filter, number, filter_byte(digest), *block, &mut likely);
        }
        // They are nearly so: only digests of one block may be in another order.
        likely.sort_unstable_by_key(|likely| likely.first);
        read_likely(run, wanted, &likely, &mut buffer, found)?;
    }
    Ok(())
}

/// Notes the chunks of a block whose byte in the filter is `byte`.
fn note_likely(
    filter: &[u8],
    wanted: usize,
    byte: u8,
    (from, to): (u32, u32),
    likely: &mut Vec<Likely>,
) {
    let block = filter.get(to_usize(from.into())..to_usize(to.into()));
    for (first, known) in (from..).zip(block.unwrap_or_default()) {
        if *known != byte {
            continue;
        }
        match likely.last_mut() {
            Some(last) if last.wanted == wanted && last.end() == first => last.count += 1,
            _ => likely.push(Likely {
                wanted,
                first,
                count: 1,
            }),
        }
    }
}

/// Reads the likely chunks, which ascend, in few pieces, and adds those that are it.
fn read_likely(
    run: &Run,
    wanted: &[(Digest, u32)],
    likely: &[Likely],
    buffer: &mut Vec<u8>,
    found: &mut Vec<Hit>,
) -> io::Result<()> {
    let mut rest = likely;
    while let Some((first, others)) = rest.split_first() {
        let mut end = first.end();
        let mut count = 1;
        for next in others {
            let reaches = next.end().max(end);
            if next.first > end.saturating_add(GAP) || reaches - first.first > PIECE {
                break;
            }
            end = reaches;
            count += 1;
        }
        let (piece, others) = rest.split_at_checked(count).unwrap_or((rest, &[]));
        rest = others;
        let chunks = run.read_chunks(first.first, end - first.first, buffer)?;
        for likely in piece {
            let at = to_usize((likely.first - first.first).into());
            let chunks = chunks.get(at..at.saturating_add(to_usize(likely.count.into())));
            let Some((digest, number)) = wanted.get(likely.wanted) else {
                continue;
            };
            for chunk in chunks.unwrap_or_default() {
                add_if(chunk, digest, *number, found)?;
            }
        }
    }
    Ok(())
}

fn add_if(chunk: &RunChunk, digest: &Digest, wanted: u32, found: &mut Vec<Hit>) -> io::Result<()> {
    let chunk = chunk.check()?;
    if &chunk.digest == digest {
        found.push(Hit {
            wanted,
            pack: chunk.pack.get(),
            chunk: chunk.chunk.get(),
        });
    }
    Ok(())
}
