//! The bytes of a build cache. Local to one machine and one user, so the only promise is that
//! anything but what this version wrote is recognised and ignored.
//!
//! ```text
//! file    magic, key (32), blocks
//! block   length (u32), digest of the records (32), records
//! record  path: bytes shared with the one before in the block, further bytes, those bytes;
//!         device, inode, size, mtime, ctime; number of chunks; chunks: gap, length, digest (32)
//! ```
//!
//! Numbers are LEB128, times zigzag seconds and nanoseconds. A file of some gigabytes makes a
//! record of some megabytes; larger ones are not remembered.

use std::fs::Metadata;
use std::io::{BufReader, BufWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use layerpack_store::Digest;

use crate::content::{Content, Piece};
use crate::dir::Identity;

const MAGIC: &[u8; 8] = b"LPFILES1";
/// A block ends when its records have this many bytes.
const BLOCK: usize = 64 << 10;
/// Largest block in bytes.
const MAX_BLOCK: usize = 32 << 20;
/// Most bytes that a chunk takes in a record.
const PIECE: usize = 10 + 5 + Digest::LEN;

/// A file as a build left it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    /// Path from the source's root.
    pub path: Vec<u8>,
    /// What it was.
    pub identity: Identity,
    /// What it held.
    pub content: Content,
}

/// Reads records until the end, or until something is not as it was written.
pub(super) struct Reader {
    input: BufReader<fs_err::File>,
    block: Vec<u8>,
    at: usize,
    path: Vec<u8>,
}

impl Reader {
    pub(super) fn open(path: &Path, key: &Digest) -> Option<Self> {
        let file = fs_err::File::open(path).ok()?;
        if !is_ours(&file.metadata().ok()?) {
            return None;
        }
        let mut input = BufReader::with_capacity(BLOCK, file);
        let mut head = [0; MAGIC.len() + Digest::LEN];
        input.read_exact(&mut head).ok()?;
        let (magic, found) = head.split_at(MAGIC.len());
        if magic != MAGIC || found != key.as_bytes() {
            return None;
        }
        Some(Self {
            input,
            block: Vec::new(),
            at: 0,
            path: Vec::new(),
        })
    }

    pub(super) fn next(&mut self) -> Option<Record> {
        if self.at == self.block.len() {
            self.next_block()?;
        }
        let mut rest = self.block.get(self.at..)?;
        let before = rest.len();
        let record = decode(&mut rest, &mut self.path)?;
        self.at += before - rest.len();
        Some(record)
    }

    fn next_block(&mut self) -> Option<()> {
        let mut head = [0; 4 + Digest::LEN];
        self.input.read_exact(&mut head).ok()?;
        let (len, digest) = head.split_first_chunk::<4>()?;
        let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
        if !(1..=MAX_BLOCK).contains(&len) {
            return None;
        }
        self.block.clear();
        self.at = 0;
        self.path.clear();
        // Grows with the bytes that are really there.
        let mut input = (&mut self.input).take(len as u64);
        input.read_to_end(&mut self.block).ok()?;
        if self.block.len() != len || Digest::of(&self.block).as_bytes() != digest {
            self.block.clear();
            return None;
        }
        Some(())
    }
}

/// Whether nobody else but root can have written it.
fn is_ours(metadata: &Metadata) -> bool {
    let owner = metadata.uid();
    let me = rustix::process::geteuid().as_raw();
    (owner == me || owner == 0) && metadata.mode() & 0o022 == 0
}

/// Writes records.
pub(super) struct Writer<W: Write> {
    out: BufWriter<W>,
    block: Vec<u8>,
    path: Vec<u8>,
}

impl<W: Write> Writer<W> {
    pub(super) fn new(out: W, key: &Digest) -> Option<Self> {
        let mut out = BufWriter::with_capacity(BLOCK, out);
        out.write_all(MAGIC).ok()?;
        out.write_all(key.as_bytes()).ok()?;
        Some(Self {
            out,
            block: Vec::new(),
            path: Vec::new(),
        })
    }

    /// Appends a record; leaves out one that is too long.
    pub(super) fn push(
        &mut self,
        path: &[u8],
        identity: &Identity,
        content: &Content,
    ) -> Option<()> {
        let most = path.len() + content.pieces.len().saturating_mul(PIECE) + 128;
        if most > MAX_BLOCK {
            return Some(());
        }
        if !self.block.is_empty() && self.block.len() + most > MAX_BLOCK {
            self.flush()?;
        }
        encode(path, identity, content, &mut self.path, &mut self.block);
        if self.block.len() >= BLOCK {
            self.flush()?;
        }
        Some(())
    }

    fn flush(&mut self) -> Option<()> {
        if self.block.is_empty() {
            return Some(());
        }
        let len = u32::try_from(self.block.len()).ok()?;
        self.out.write_all(&len.to_le_bytes()).ok()?;
        self.out
            .write_all(Digest::of(&self.block).as_bytes())
            .ok()?;
        self.out.write_all(&self.block).ok()?;
        self.block.clear();
        self.path.clear();
        Some(())
    }

    pub(super) fn finish(mut self) -> Option<W> {
        self.flush()?;
        self.out.into_inner().ok()
    }
}

fn encode(
    path: &[u8],
    identity: &Identity,
    content: &Content,
    last: &mut Vec<u8>,
    out: &mut Vec<u8>,
) {
    let shared = path.iter().zip(&*last).take_while(|(a, b)| a == b).count();
    let new = path.get(shared..).unwrap_or_default();
    put(out, shared as u64);
    put(out, new.len() as u64);
    out.extend_from_slice(new);
    last.clear();
    last.extend_from_slice(path);
    let (device, inode) = identity.place();
    for number in [device, inode, identity.size()] {
        put(out, number);
    }
    for (seconds, nanoseconds) in [identity.mtime(), identity.ctime()] {
        put(out, ((seconds << 1) ^ (seconds >> 63)).cast_unsigned());
        put(out, nanoseconds);
    }
    put(out, content.pieces.len() as u64);
    let mut end = 0;
    for piece in &content.pieces {
        put(out, piece.offset - end);
        put(out, piece.len.into());
        out.extend_from_slice(piece.digest.as_bytes());
        end = piece.offset + u64::from(piece.len);
    }
}

/// `None`: not something that `encode` wrote.
fn decode(rest: &mut &[u8], last: &mut Vec<u8>) -> Option<Record> {
    let shared = usize::try_from(get(rest)?).ok()?;
    let new = usize::try_from(get(rest)?).ok()?;
    if shared > last.len() {
        return None;
    }
    last.truncate(shared);
    last.extend_from_slice(take(rest, new)?);
    let place = (get(rest)?, get(rest)?);
    let size = get(rest)?;
    let mut time = || -> Option<(i64, u64)> {
        let seconds = get(rest)?;
        let sign = (seconds & 1).cast_signed();
        Some(((seconds >> 1).cast_signed() ^ -sign, get(rest)?))
    };
    let (mtime, ctime) = (time()?, time()?);
    let count = usize::try_from(get(rest)?).ok()?;
    if count > rest.len() / Digest::LEN {
        return None;
    }
    let mut pieces = Vec::with_capacity(count);
    let mut end = 0_u64;
    for _ in 0..count {
        let offset = end.checked_add(get(rest)?)?;
        let len = u32::try_from(get(rest)?).ok()?;
        let digest = take(rest, Digest::LEN)?.try_into().ok()?;
        end = offset.checked_add(len.into())?;
        pieces.push(Piece {
            offset,
            len,
            digest: Digest::from_bytes(digest),
        });
    }
    if end > size {
        return None;
    }
    Some(Record {
        path: last.clone(),
        identity: Identity::from_parts(place, size, mtime, ctime),
        content: Content {
            size,
            pieces: pieces.into(),
        },
    })
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (head, tail) = rest.split_at_checked(len)?;
    *rest = tail;
    Some(head)
}

fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(u8::try_from(number & 0x7f).unwrap_or_default() | 0x80);
        number >>= 7;
    }
    out.push(u8::try_from(number).unwrap_or_default());
}

fn get(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, tail) = rest.split_first()?;
        *rest = tail;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}
