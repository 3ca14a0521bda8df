//! File contents on their way into the store: found holes, chunks, digests.
//!
//! Holes are a matter of content, not of the source: a run of at least [`HOLE`] zero bytes that
//! starts and ends on block borders (or ends with the file) is a hole, whoever stored it how.
//! Known holes of a source are only a short cut to such runs. So a directory, an archive made with
//! or without `--sparse` and any filesystem come to the same layer. What lies between holes is
//! chunked like a file of its own.

use std::io::{self, Read};
use std::ops::Deref;
use std::sync::Arc;

use layerpack_store::{Digest, Hasher, LayerWriter, StoreError};

use crate::error::{PackError, Result};

/// Shortest run of zeros that is a hole, in bytes.
pub(crate) const HOLE: u64 = 64 << 10;
const BLOCK: usize = 4096;
/// Files are looked at in pieces of this size, smaller ones whole.
const BUFFER: usize = 256 << 10;
static ZEROS: [u8; BLOCK] = [0; BLOCK];

/// A chunk of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Where it lies in the file, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u32,
    /// Digest of its bytes.
    pub digest: Digest,
}

/// A file's content: chunks with holes between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Content {
    /// The file's size in bytes.
    pub size: u64,
    /// Its chunks in order.
    pub pieces: Pieces,
}

/// Chunks in order. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) enum Pieces {
    /// A single one.
    One(Piece),
    /// None, or several.
    Many(Arc<[Piece]>),
}

impl Deref for Pieces {
    type Target = [Piece];

    fn deref(&self) -> &[Piece] {
        match self {
            Self::One(piece) => std::slice::from_ref(piece),
            Self::Many(pieces) => pieces,
        }
    }
}

impl From<Vec<Piece>> for Pieces {
    fn from(pieces: Vec<Piece>) -> Self {
        match *pieces {
            [piece] => Self::One(piece),
            _ => Self::Many(pieces.into()),
        }
    }
}

impl PartialEq for Pieces {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Pieces {}

impl<'a> IntoIterator for &'a Pieces {
    type Item = &'a Piece;
    type IntoIter = std::slice::Iter<'a, Piece>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl Content {
    /// A digest that is the same for the same content only.
    pub(crate) fn identity(&self) -> Digest {
        let mut hasher = Hasher::new();
        hasher.update(&self.size.to_le_bytes());
        for piece in &self.pieces {
            hasher.update(&piece.offset.to_le_bytes());
            hasher.update(&piece.len.to_le_bytes());
            hasher.update(piece.digest.as_bytes());
        }
        hasher.finish()
    }

    /// True if every byte is covered by a chunk.
    pub(crate) fn is_dense(&self) -> bool {
        self.pieces
            .iter()
            .map(|piece| u64::from(piece.len))
            .sum::<u64>()
            == self.size
    }
}

/// What comes next in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// So many bytes were put at the start of the buffer, at least one.
    Data(usize),
    /// So many zero bytes, at least one, which were not read.
    Hole(u64),
    /// The file's end.
    End,
}

/// A file's bytes in order, with the holes that its source knows of.
pub(crate) trait Bytes {
    /// What comes next. `buffer` is not empty.
    fn next(&mut self, buffer: &mut [u8]) -> io::Result<Next>;
}

/// A whole file in memory.
impl Bytes for &[u8] {
    fn next(&mut self, buffer: &mut [u8]) -> io::Result<Next> {
        match self.read(buffer)? {
            0 => Ok(Next::End),
            n => Ok(Next::Data(n)),
        }
    }
}

/// Puts a file of about `size_hint` bytes into the store. The caller compares the size that came
/// out with what it expects.
pub(crate) fn store(
    writer: &mut LayerWriter,
    source: &mut dyn Bytes,
    size_hint: u64,
) -> Result<Content> {
    let mut segments = Segments::new(source, size_hint);
    let mut pieces = Vec::new();
    while let Some(start) = segments
        .next_segment()
        .map_err(StoreError::Input)
        .map_err(unwrap)?
    {
        let mut offset = start;
        let added = writer
            .add_file(&mut segments, size_hint.saturating_sub(start))
            .map_err(unwrap)?;
        for (digest, len) in added.chunks {
            pieces.push(Piece {
                offset,
                len,
                digest,
            });
            offset += u64::from(len);
        }
    }
    Ok(Content {
        size: segments.position,
        pieces: pieces.into(),
    })
}

/// Puts a whole small file into the store.
pub(crate) fn store_small(writer: &mut LayerWriter, bytes: &[u8]) -> Result<Content> {
    let size = bytes.len() as u64;
    if size == 0 {
        return Ok(Content {
            size,
            pieces: Vec::new().into(),
        });
    }
    if size >= HOLE {
        return store_whole(writer, bytes);
    }
    let len = u32::try_from(size).unwrap_or(u32::MAX);
    let digest = writer.add_chunk(bytes)?;
    Ok(Content {
        size,
        pieces: Pieces::One(Piece {
            offset: 0,
            len,
            digest,
        }),
    })
}

/// A file in memory that is large enough for holes.
fn store_whole(writer: &mut LayerWriter, bytes: &[u8]) -> Result<Content> {
    let mut pieces = Vec::new();
    for (start, segment) in data_of(bytes) {
        let mut offset = start;
        for (digest, len) in writer.add_bytes(segment)?.chunks {
            pieces.push(Piece {
                offset,
                len,
                digest,
            });
            offset += u64::from(len);
        }
    }
    Ok(Content {
        size: bytes.len() as u64,
        pieces: pieces.into(),
    })
}

/// What lies between the holes of a file, with where it begins.
fn data_of(bytes: &[u8]) -> Vec<(u64, &[u8])> {
    let mut found = Vec::new();
    // The segment and the run of zeros at hand.
    let (mut segment, mut zeros) = (0, 0);
    let mut close = |segment: usize, end: usize| {
        if let Some(data) = bytes.get(segment..end).filter(|data| !data.is_empty()) {
            found.push((segment as u64, data));
        }
    };
    for (at, block) in (0..).step_by(BLOCK).zip(bytes.chunks(BLOCK)) {
        if is_zero(block) {
            continue;
        }
        if (at - zeros) as u64 >= HOLE {
            close(segment, zeros);
            segment = at;
        }
        zeros = at + block.len();
    }
    if (bytes.len() - zeros) as u64 >= HOLE {
        close(segment, zeros);
    } else {
        close(segment, bytes.len());
    }
    found
}

/// The error that a source put into an I/O error on its way through the writer.
pub(crate) fn unwrap(error: StoreError) -> PackError {
    match error {
        StoreError::Input(source) => match source.downcast::<PackError>() {
            Ok(error) => error,
            Err(source) => StoreError::Input(source).into(),
        },
        other => other.into(),
    }
}

/// Splits a file at its holes. `Read` gives one segment of data and then 0.
struct Segments<'a> {
    source: &'a mut dyn Bytes,
    buffer: Box<[u8]>,
    /// Bytes of the buffer that were not handed out yet; they begin on a block border of the file
    /// whenever `zeros` and `data` are 0.
    start: usize,
    end: usize,
    /// Zeros that the source knows of, after the buffer.
    hole: u64,
    ended: bool,
    /// Zeros to hand out: a run too short to be a hole.
    zeros: u64,
    /// Bytes of the buffer to hand out without looking at them again.
    data: usize,
    /// The segment is over: a hole or the end was reached.
    gap: bool,
    /// Bytes of the file that were looked at and passed.
    position: u64,
}

enum Block {
    Zeros(u64),
    Data,
    End,
}

impl<'a> Segments<'a> {
    fn new(source: &'a mut dyn Bytes, size_hint: u64) -> Self {
        let wanted = usize::try_from(size_hint).unwrap_or(usize::MAX);
        // A block more than the file has, to see its end.
        let buffer = wanted.min(BUFFER).next_multiple_of(BLOCK) + BLOCK;
        Self {
            source,
            buffer: vec![0; buffer].into_boxed_slice(),
            start: 0,
            end: 0,
            hole: 0,
            ended: false,
            zeros: 0,
            data: 0,
            gap: true,
            position: 0,
        }
    }

    /// Goes to the next data: its offset in the file, None at the end. Only to be called when the
    /// segment before was read to its end.
    fn next_segment(&mut self) -> io::Result<Option<u64>> {
        loop {
            match self.block()? {
                Block::End => return Ok(None),
                Block::Data => {
                    self.gap = false;
                    return Ok(Some(self.position));
                }
                Block::Zeros(_) => {
                    let start = self.position;
                    let run = self.zero_run()?;
                    if run < HOLE {
                        self.gap = false;
                        self.zeros = run;
                        return Ok(Some(start));
                    }
                }
            }
        }
    }

    /// What the next block is. Afterwards the buffer holds at least all of it, unless it is part
    /// of a hole that the source knows of.
    fn block(&mut self) -> io::Result<Block> {
        while self.end - self.start < BLOCK && !self.ended {
            if self.start == self.end && self.hole >= BLOCK as u64 {
                return Ok(Block::Zeros(self.hole - self.hole % BLOCK as u64));
            }
            if self.start == self.end || self.buffer.len() - self.start < BLOCK {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
            }
            let room = self.buffer.get_mut(self.end..).unwrap_or_default();
            if self.hole > 0 {
                // A hole that begins or ends within a block.
                let missing = BLOCK - (self.end - self.start);
                let n = missing.min(usize::try_from(self.hole).unwrap_or(usize::MAX));
                room.get_mut(..n).unwrap_or_default().fill(0);
                self.end += n;
                self.hole -= n as u64;
                continue;
            }
            match self.source.next(room) {
                Ok(Next::Data(n)) => self.end += n.min(room.len()),
                Ok(Next::Hole(n)) => self.hole = n,
                Ok(Next::End) => self.ended = true,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let block = self.loaded();
        let block = block.get(..BLOCK).unwrap_or(block);
        Ok(match block.len() {
            0 => Block::End,
            n if is_zero(block) => Block::Zeros(n as u64),
            _ => Block::Data,
        })
    }

    fn loaded(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or_default()
    }

    /// Passes over zero blocks and counts their bytes.
    fn zero_run(&mut self) -> io::Result<u64> {
        let mut run = 0;
        while let Block::Zeros(n) = self.block()? {
            if self.start == self.end {
                self.hole -= n;
            } else {
                self.start += usize::try_from(n).unwrap_or_default();
            }
            run += n;
            self.position += n;
        }
        Ok(run)
    }
}

impl Read for Segments<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            if self.zeros > 0 {
                let n = out
                    .len()
                    .min(usize::try_from(self.zeros).unwrap_or(usize::MAX));
                out.get_mut(..n).unwrap_or_default().fill(0);
                self.zeros -= n as u64;
                return Ok(n);
            }
            if self.data > 0 {
                let n = out.len().min(self.data);
                let from = self
                    .buffer
                    .get(self.start..self.start + n)
                    .unwrap_or_default();
                out.get_mut(..n).unwrap_or_default().copy_from_slice(from);
                self.start += n;
                self.data -= n;
                self.position += n as u64;
                return Ok(n);
            }
            if self.gap {
                return Ok(0);
            }
            match self.block()? {
                Block::End => self.gap = true,
                Block::Data => {
                    let blocks = self.loaded().chunks(BLOCK);
                    // A last block that is not whole may have more to come.
                    let whole = blocks.take_while(|block| {
                        (block.len() == BLOCK || self.ended && self.hole == 0) && !is_zero(block)
                    });
                    self.data = whole.map(<[u8]>::len).sum();
                }
                Block::Zeros(_) => {
                    let run = self.zero_run()?;
                    if run < HOLE {
                        self.zeros = run;
                    } else {
                        self.gap = true;
                    }
                }
            }
        }
    }
}

fn is_zero(block: &[u8]) -> bool {
    ZEROS.get(..block.len()) == Some(block)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source that hands out its parts one by one.
    struct Parts(Vec<Part>);

    #[derive(Clone)]
    enum Part {
        Data(Vec<u8>),
        Hole(u64),
    }

    impl Bytes for Parts {
        fn next(&mut self, buffer: &mut [u8]) -> io::Result<Next> {
            let Some(part) = self.0.first_mut() else {
                return Ok(Next::End);
            };
            match part {
                Part::Hole(n) => {
                    let n = *n;
                    self.0.remove(0);
                    Ok(Next::Hole(n))
                }
                Part::Data(data) => {
                    let n = data.len().min(buffer.len());
                    buffer[..n].copy_from_slice(&data[..n]);
                    data.drain(..n);
                    if data.is_empty() {
                        self.0.remove(0);
                    }
                    Ok(Next::Data(n))
                }
            }
        }
    }

    fn segments(parts: Vec<Part>) -> (Vec<(u64, Vec<u8>)>, u64) {
        // A hint may be wrong in both directions.
        let hint = parts.len() as u64 * 9000;
        let mut source = Parts(parts);
        let mut segments = Segments::new(&mut source, hint);
        let mut found = Vec::new();
        while let Some(start) = segments.next_segment().unwrap() {
            let mut data = Vec::new();
            segments.read_to_end(&mut data).unwrap();
            found.push((start, data));
        }
        (found, segments.position)
    }

    /// The rule in its plainest form.
    fn model(file: &[u8]) -> Vec<(u64, Vec<u8>)> {
        let blocks: Vec<&[u8]> = file.chunks(BLOCK).collect();
        let mut keep = vec![true; blocks.len()];
        let mut at = 0;
        while at < blocks.len() {
            let run = blocks[at..]
                .iter()
                .take_while(|block| block.iter().all(|&b| b == 0))
                .count();
            let bytes: usize = blocks[at..at + run].iter().map(|block| block.len()).sum();
            if bytes as u64 >= HOLE {
                keep[at..at + run].fill(false);
            }
            at += run.max(1);
        }
        let mut found: Vec<(u64, Vec<u8>)> = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            if !keep[index] {
                continue;
            }
            if index > 0 && keep[index - 1] {
                found.last_mut().unwrap().1.extend_from_slice(block);
            } else {
                found.push(((index * BLOCK) as u64, block.to_vec()));
            }
        }
        found
    }

    #[test]
    fn holes_follow_the_content_however_the_source_cuts_it() {
        let mut state = 7u64;
        let mut random = |below: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        let size = |len: u64| usize::try_from(len).unwrap();
        for round in 0..400u32 {
            let mut file = Vec::new();
            let mut parts = Vec::new();
            for _ in 0..random(8) {
                let len = match random(4) {
                    0 => random(5000),
                    1 => 4096 * (random(40)),
                    2 => HOLE - 2 + random(5),
                    _ => 4096 * random(20) + 2048,
                };
                if len == 0 {
                    continue;
                }
                match random(3) {
                    0 => {
                        file.resize(file.len() + size(len), 0);
                        parts.push(Part::Hole(len));
                    }
                    1 => {
                        file.resize(file.len() + size(len), 0);
                        parts.push(Part::Data(vec![0; size(len)]));
                    }
                    _ => {
                        let mut data = vec![1 + u8::try_from(round % 255).unwrap(); size(len)];
                        // Zeros within that no rule may touch.
                        data[size(len / 2)] = 0;
                        file.extend_from_slice(&data);
                        parts.push(Part::Data(data));
                    }
                }
            }
            let (found, size) = segments(parts);
            assert_eq!(size, file.len() as u64);
            assert_eq!(found, model(&file), "round {round}");
        }
    }

    #[test]
    fn a_file_in_memory_has_the_same_holes() {
        let hole = usize::try_from(HOLE).unwrap();
        let mut cases: Vec<Vec<(usize, u8)>> = vec![vec![], vec![(hole, 0)], vec![(9 * hole, 0)]];
        for zeros in [
            hole - BLOCK,
            hole - 1,
            hole,
            hole + 1,
            hole + BLOCK,
            3 * hole,
        ] {
            for head in [0, 1, BLOCK, BLOCK + 1, hole] {
                for tail in [0, 1, BLOCK, 5 * BLOCK + 7] {
                    cases.push(vec![(head, 1), (zeros, 0), (tail, 2)]);
                    cases.push(vec![
                        (head, 1),
                        (zeros, 0),
                        (tail, 2),
                        (zeros, 0),
                        (head, 3),
                    ]);
                }
            }
        }
        for case in cases {
            let mut file = Vec::new();
            for (len, byte) in &case {
                file.resize(file.len() + len, *byte);
            }
            let found: Vec<_> = data_of(&file)
                .into_iter()
                .map(|(start, data)| (start, data.to_vec()))
                .collect();
            assert_eq!(found, model(&file), "{case:?}");
        }
    }

    #[test]
    fn a_vast_hole_costs_nothing() {
        let parts = vec![
            Part::Data(vec![1; 10]),
            Part::Hole((8 << 40) - 10),
            Part::Data(vec![2; 5000]),
        ];
        let (found, size) = segments(parts);
        assert_eq!(size, (8 << 40) + 5000);
        assert_eq!(found.len(), 2);
        assert_eq!(found[1], (8 << 40, vec![2; 5000]));
        let mut first = vec![1; 10];
        first.resize(BLOCK, 0);
        assert_eq!(found[0], (0, first));
    }

    #[test]
    fn nothing_but_a_hole() {
        assert_eq!(segments(vec![Part::Hole(1 << 50)]), (vec![], 1 << 50));
        assert_eq!(segments(vec![]), (vec![], 0));
    }
}
