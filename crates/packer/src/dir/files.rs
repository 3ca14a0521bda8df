//! The files whose bytes are to be stored, between the two passes: small ones first, each group in the
//! order of the scan. In blocks, so that memory of those that are done is free again; of many files,
//! all but the last blocks lie in an unnamed temporary file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use layerpack_erofs::NodeId;

use super::SMALL;
use super::file::Identity;
use crate::error::{PackError, Result};

/// Files whose records lie together.
const BLOCK: usize = 4096;
/// Full blocks of a group that stay in memory: below so many files there is no temporary file.
const KEEP: usize = 4;
/// Bytes of a record in the temporary file, beside its name.
const RECORD: usize = 4 + 4 + 1 + 7 * 8;

/// A file whose bytes are to be stored.
#[derive(Debug)]
pub(super) struct FileRecord {
    pub(super) node: NodeId,
    pub(super) dir: u32,
    /// Where its name begins in [`Block::names`].
    name: u32,
    len: u8,
    pub(super) identity: Identity,
}

/// Some files whose bytes are to be stored, their names in one piece of memory.
#[derive(Debug, Default)]
pub(super) struct Block {
    pub(super) records: Vec<FileRecord>,
    names: Vec<u8>,
}

impl Block {
    pub(super) fn name(&self, record: &FileRecord) -> &[u8] {
        let start = usize::try_from(record.name).unwrap_or(usize::MAX);
        let end = start.saturating_add(record.len.into());
        self.names.get(start..end).unwrap_or_default()
    }

    fn push(&mut self, node: NodeId, dir: u32, name: &[u8], identity: Identity) {
        self.records.push(FileRecord {
            node,
            dir,
            // Below 2^20: the kernel's names have at most 255 bytes.
            name: u32::try_from(self.names.len()).unwrap_or(u32::MAX),
            len: u8::try_from(name.len()).unwrap_or(u8::MAX),
            identity,
        });
        self.names.extend_from_slice(name);
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.records.len() * RECORD + self.names.len());
        for record in &self.records {
            let node = u32::try_from(record.node.index()).unwrap_or(u32::MAX); // it is made of one
            bytes.extend_from_slice(&node.to_le_bytes());
            bytes.extend_from_slice(&record.dir.to_le_bytes());
            bytes.push(record.len);
            let identity = &record.identity;
            let ((dev, ino), size) = (identity.place(), identity.size());
            for number in [dev, ino, size] {
                bytes.extend_from_slice(&number.to_le_bytes());
            }
            for (seconds, nanoseconds) in [identity.mtime(), identity.ctime()] {
                bytes.extend_from_slice(&seconds.to_le_bytes());
                bytes.extend_from_slice(&nanoseconds.to_le_bytes());
            }
        }
        bytes.extend_from_slice(&self.names);
        bytes
    }

    /// `None`: not what [`Block::encode`] made of so many files.
    fn decode(bytes: &[u8], count: usize) -> Option<Self> {
        let (mut rest, names) = bytes.split_at_checked(count.checked_mul(RECORD)?)?;
        let mut block = Self {
            records: Vec::with_capacity(count),
            names: Vec::with_capacity(names.len()),
        };
        let mut at = 0_usize;
        while !rest.is_empty() {
            let node = u32::from_le_bytes(take(&mut rest)?);
            let dir = u32::from_le_bytes(take(&mut rest)?);
            let [len] = take::<1>(&mut rest)?;
            let mut number = || take(&mut rest).map(u64::from_le_bytes);
            let place = (number()?, number()?);
            let size = number()?;
            let mtime = (number()?.cast_signed(), number()?);
            let ctime = (number()?.cast_signed(), number()?);
            let end = at.checked_add(len.into())?;
            let identity = Identity::from_parts(place, size, mtime, ctime);
            block.push(NodeId::from_index(node), dir, names.get(at..end)?, identity);
            at = end;
        }
        (at == names.len()).then_some(block)
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk()?;
    *rest = tail;
    Some(*head)
}

/// A block in the temporary file.
#[derive(Debug)]
struct Spilled {
    offset: u64,
    /// Bytes.
    len: usize,
    /// Files.
    count: usize,
}

/// Files of one kind: first those in the temporary file, then those in memory.
#[derive(Debug, Default)]
struct Group {
    spilled: Vec<Spilled>,
    blocks: Vec<Block>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Files {
    small: Group,
    large: Group,
    /// Where the temporary file is to be; `None`: there is to be none (any more).
    scratch: Option<PathBuf>,
    file: Option<File>,
    /// Bytes in it.
    written: u64,
}

impl Files {
    /// None so far. A temporary file is to be in the directory `scratch`.
    pub(super) fn new(scratch: Option<&Path>) -> Self {
        Self {
            scratch: scratch.map(Path::to_owned),
            ..Self::default()
        }
    }

    pub(super) fn push(&mut self, node: NodeId, dir: u32, name: &[u8], identity: Identity) {
        let small = identity.size() <= SMALL;
        let group = match small {
            true => &mut self.small,
            false => &mut self.large,
        };
        let full = |block: &Block| block.records.len() >= BLOCK;
        if group.blocks.last().is_none_or(full) {
            group.blocks.push(Block::default());
            if group.blocks.len() > KEEP + 1 && self.scratch.is_some() {
                self.spill(small);
            }
        }
        let group = match small {
            true => &mut self.small,
            false => &mut self.large,
        };
        if let Some(block) = group.blocks.last_mut() {
            block.push(node, dir, name, identity);
        }
    }

    /// Writes all full blocks of a group to the temporary file. If that fails, they stay in memory,
    /// as do those that follow.
    fn spill(&mut self, small: bool) {
        if self.file.is_none() {
            self.file = self.scratch.as_deref().and_then(create);
        }
        let group = match small {
            true => &mut self.small,
            false => &mut self.large,
        };
        let full = group.blocks.len().saturating_sub(1);
        for _ in 0..full {
            let written =
                (group.blocks.first())
                    .zip(self.file.as_ref())
                    .and_then(|(block, file)| {
                        let bytes = block.encode();
                        file.write_all_at(&bytes, self.written).ok()?;
                        Some(Spilled {
                            offset: self.written,
                            len: bytes.len(),
                            count: block.records.len(),
                        })
                    });
            let Some(written) = written else {
                self.scratch = None;
                return;
            };
            self.written += written.len as u64;
            group.spilled.push(written);
            group.blocks.remove(0);
        }
    }

    /// All of them with their blocks, which have their names. Only without a temporary file.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Block, &FileRecord)> {
        debug_assert!(self.file.is_none(), "not all files are in memory");
        (self.small.blocks.iter().chain(&self.large.blocks))
            .flat_map(|block| block.records.iter().map(move |record| (block, record)))
    }

    /// All blocks in order, each read when it is asked for.
    pub(super) fn into_blocks(self) -> impl Iterator<Item = Result<Block>> {
        let (file, scratch) = (self.file, self.scratch);
        let groups = [self.small, self.large].into_iter();
        let read = move |spilled: &Spilled| {
            read(file.as_ref(), spilled).map_err(|source| PackError::Write {
                path: match &scratch {
                    Some(scratch) => format!("a temporary file in {}", scratch.display()),
                    None => "a temporary file".to_owned(),
                },
                source,
            })
        };
        let mut todo = Vec::new();
        for group in groups {
            todo.extend(group.spilled.into_iter().map(Kept::Spilled));
            todo.extend(group.blocks.into_iter().map(Kept::Here));
        }
        todo.into_iter().map(move |kept| match kept {
            Kept::Here(block) => Ok(block),
            Kept::Spilled(spilled) => read(&spilled),
        })
    }
}

enum Kept {
    Spilled(Spilled),
    Here(Block),
}

fn create(directory: &Path) -> Option<File> {
    fs_err::create_dir_all(directory).ok()?;
    tempfile::tempfile_in(directory).ok()
}

fn read(file: Option<&File>, spilled: &Spilled) -> io::Result<Block> {
    let missing = || io::Error::from(io::ErrorKind::InvalidData);
    let mut bytes = vec![0; spilled.len];
    file.ok_or_else(missing)?
        .read_exact_at(&mut bytes, spilled.offset)?;
    Block::decode(&bytes, spilled.count).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every third file is a large one.
    fn record(i: u32) -> (NodeId, u32, Vec<u8>, Identity) {
        let size = if i.is_multiple_of(3) { SMALL + 1 } else { 1 };
        let identity = Identity::from_parts(
            (1, i.into()),
            size + u64::from(i) * u64::from(i.is_multiple_of(3)),
            (-i64::from(i), 5),
            (i.into(), 999_999_999),
        );
        let name = format!("file-{i}").repeat(1 + i as usize % 5);
        (NodeId::from_index(i), i / 7, name.into_bytes(), identity)
    }

    fn check(scratch: Option<&Path>, count: u32, spills: bool) {
        let mut files = Files::new(scratch);
        for i in 0..count {
            let (node, dir, name, identity) = record(i);
            files.push(node, dir, &name, identity);
        }
        assert_eq!(files.file.is_some(), spills);
        if !spills {
            assert_eq!(files.iter().count(), count as usize);
        }
        let order = (0..count)
            .filter(|i| !i.is_multiple_of(3))
            .chain((0..count).filter(|i| i.is_multiple_of(3)));
        let mut order = order.map(record);
        for block in files.into_blocks() {
            let block = block.unwrap();
            for found in &block.records {
                let (node, dir, name, identity) = order.next().unwrap();
                assert_eq!((found.node, found.dir), (node, dir));
                assert_eq!(block.name(found), name);
                assert_eq!(found.identity, identity);
            }
        }
        assert!(order.next().is_none());
    }

    #[test]
    fn files_come_back_in_order_wherever_they_were() {
        let dir = tempfile::tempdir().unwrap();
        for (count, spills) in [(0, false), (1, false), (9000, false), (100_000, true)] {
            check(Some(dir.path()), count, spills);
        }
        check(None, 100_000, false);
        // A file where the directory should be.
        let file = tempfile::NamedTempFile::new().unwrap();
        check(Some(file.path()), 100_000, false);
        assert_eq!(fs_err::read_dir(dir.path()).unwrap().count(), 0);
    }
}
