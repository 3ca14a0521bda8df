//! Writes a run in one pass over sorted chunks: blocks go to the file as they come, the byte of
//! each digest to a second temporary, the blocks' places stay in memory (4 bytes for each eight
//! chunks or more). The header comes last, then the file gets its name. Nothing is synced: a run is
//! a copy, all of it is under checksums, and a damaged one is made again.

use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use zerocopy::IntoBytes;

use super::run::{
    BLOCKS_START, Header, MAX_BLOCK, RunChunk, RunPack, bits_for, block_of, damaged, filter_byte,
};
use crate::digest::{Digest, Hasher as DigestHasher};
use crate::format::index::WireChunk;

/// What temporaries of a cache directory begin with.
pub(super) const TEMPORARY: &str = "tmp-";
/// How names of runs end.
pub(super) const SUFFIX: &str = ".run";

#[derive(Debug)]
pub(super) struct RunWriter {
    dir: PathBuf,
    temporary: Temporary,
    out: BufWriter<File>,
    filter_temporary: Temporary,
    filter: BufWriter<File>,
    filter_crc: u32,
    bits: u32,
    /// The block that `pending` is.
    block: u64,
    pending: Vec<WireChunk>,
    starts: Vec<u32>,
    chunks: u32,
    left_out: u64,
    last: Option<Digest>,
}

impl RunWriter {
    /// A run in `dir` of at most about `expected` chunks.
    pub(super) fn create(dir: &Path, expected: u64) -> io::Result<Self> {
        let bits = bits_for(expected);
        let (temporary, file) = Temporary::create(dir)?;
        let (filter_temporary, filter) = Temporary::create(dir)?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.write_all(&[0; 64])?;
        Ok(Self {
            dir: dir.to_owned(),
            temporary,
            out,
            filter_temporary,
            filter: BufWriter::with_capacity(64 << 10, filter),
            filter_crc: 0,
            bits,
            block: 0,
            pending: Vec::new(),
            starts: vec![0],
            chunks: 0,
            left_out: 0,
            last: None,
        })
    }

    /// Leading bits of a digest that choose its block.
    pub(super) const fn bits(&self) -> u32 {
        self.bits
    }

    /// Adds a chunk: not below the one before. The same place twice is written once.
    pub(super) fn push(&mut self, chunk: WireChunk) -> io::Result<()> {
        let block = block_of(&chunk.digest, self.bits);
        if self.last.is_some_and(|last| last > chunk.digest) {
            return Err(damaged("its chunks are not in order"));
        }
        while self.block < block {
            self.end_block()?;
        }
        self.last = Some(chunk.digest);
        let repeated = self
            .pending
            .iter()
            .rev()
            .take_while(|c| c.digest == chunk.digest)
            .any(|c| (c.pack, c.chunk) == (chunk.pack, chunk.chunk));
        if repeated {
            return Ok(());
        }
        if self.pending.len() >= MAX_BLOCK || self.chunks == u32::MAX {
            self.left_out += 1;
            return Ok(());
        }
        self.pending.push(chunk);
        self.chunks += 1;
        Ok(())
    }

    fn end_block(&mut self) -> io::Result<()> {
        for chunk in &self.pending {
            self.out.write_all(RunChunk::new(*chunk).as_bytes())?;
            let byte = [filter_byte(&chunk.digest)];
            self.filter_crc = crc32c::crc32c_append(self.filter_crc, &byte);
            self.filter.write_all(&byte)?;
        }
        self.pending.clear();
        self.starts.push(self.chunks);
        self.block += 1;
        Ok(())
    }

    /// Writes the rest and gives the file its name, which says which segments are in it.
    pub(super) fn finish(mut self, packs: &[RunPack], segments: &[Digest]) -> io::Result<PathBuf> {
        while self.block < 1 << self.bits {
            self.end_block()?;
        }
        let mut filter = self.filter.into_inner().map_err(|e| e.into_error())?;
        filter.seek(SeekFrom::Start(0))?;
        io::copy(&mut filter.take(u64::from(self.chunks)), &mut self.out)?;
        drop(self.filter_temporary);
        let mut starts_crc = 0;
        for start in &self.starts {
            let bytes = start.to_le_bytes();
            starts_crc = crc32c::crc32c_append(starts_crc, &bytes);
            self.out.write_all(&bytes)?;
        }
        self.out.write_all(packs.as_bytes())?;
        self.out.write_all(segments.as_bytes())?;
        let too_many = |_| damaged("it has more than 2^32-1 packs or segments");
        let header = Header::new(
            self.chunks.into(),
            u32::try_from(segments.len()).map_err(too_many)?,
            u32::try_from(packs.len()).map_err(too_many)?,
            self.bits,
            [
                crc32c::crc32c(segments.as_bytes()),
                starts_crc,
                self.filter_crc,
            ],
        );
        let file = self.out.into_inner().map_err(|e| e.into_error())?;
        file.write_all_at(header.as_bytes(), 0)?;
        debug_assert_eq!(header.as_bytes().len() as u64, BLOCKS_START);
        if self.left_out > 0 {
            tracing::debug!(chunks = self.left_out, "chunks left out of a crowded run");
        }
        let path = self.dir.join(name_of(segments));
        fs_err::rename(self.temporary.path(), &path)?;
        Ok(path)
    }
}

/// The name of a run of these segments: equal sets, equal names.
fn name_of(segments: &[Digest]) -> String {
    let mut sorted = segments.to_vec();
    sorted.sort_unstable();
    let mut hasher = DigestHasher::default();
    for segment in &sorted {
        hasher.update(segment.as_bytes());
    }
    let hex: String = hasher.finish().hex().chars().take(40).collect();
    format!("{hex}{SUFFIX}")
}

/// A file without a public name. Dropped: gone, unless it was renamed.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Temporary {
    fn create(dir: &Path) -> io::Result<(Self, File)> {
        for _ in 0..16 {
            let random = RandomState::new().build_hasher().finish();
            let path = dir.join(format!("{TEMPORARY}{}-{random:016x}", std::process::id()));
            let file = fs_err::OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path);
            match file {
                Ok(file) => return Ok((Self(path), file.into_parts().0)),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::other("no free name for a temporary"))
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs_err::remove_file(&self.0); // not there after a rename
    }
}
