//! Directories.

use std::cmp::Ordering;

use zerocopy::FromBytes;

use crate::error::{Error, Result};
use crate::format::{FileType, RawDirent};
use crate::reader::Image;
use crate::reader::inode::{Inode, Layout};
use crate::tree::MAX_NAME;
use crate::{BLOCK_BITS, BLOCK_SIZE};

/// An entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// Name: 1 to 255 bytes without `/` and NUL.
    pub name: &'a [u8],
    /// Number of the inode.
    pub nid: u64,
    /// Type, as the directory says; the inode may contradict it in a damaged image.
    pub file_type: FileType,
}

/// Entries of a directory in order of their names, from [`Image::read_dir`]. Ends after the
/// first error.
#[derive(Clone, Debug)]
pub struct ReadDir<'i, 'a> {
    image: &'i Image<'a>,
    inode: Inode,
    blocks: u64,
    block: u64, // next to be opened
    current: Option<DirBlock<'a>>,
    previous: Option<&'a [u8]>,
    dots: bool,
}

/// One block of a directory.
#[derive(Clone, Copy, Debug)]
struct DirBlock<'a> {
    bytes: &'a [u8],
    count: usize,
    next: usize,
}

impl<'a> Image<'a> {
    /// Entries of a directory, without `.` and `..`, strictly sorted (that is checked).
    ///
    /// # Errors
    /// [`Error::NotADirectory`], or [`Error::Corrupt`] if the directory cannot lie in the
    /// image; items are errors where entries are damaged.
    pub fn read_dir(&self, inode: &Inode) -> Result<ReadDir<'_, 'a>> {
        self.read_dir_all(inode).map(|entries| ReadDir {
            dots: false,
            ..entries
        })
    }

    /// As [`Image::read_dir`], with `.` and `..` in their places.
    pub(crate) fn read_dir_all(&self, inode: &Inode) -> Result<ReadDir<'_, 'a>> {
        if !inode.is_dir() {
            let name = format!("inode {}", inode.nid).into_bytes();
            return Err(Error::NotADirectory { name });
        }
        if inode.layout == Layout::Chunked || inode.size > self.len() {
            return Err(inode.corrupt(format!("directory of {} bytes", inode.size)));
        }
        if inode.size == 0 {
            return Err(inode.corrupt("directory without entries, not even \".\""));
        }
        Ok(ReadDir {
            image: self,
            inode: *inode,
            blocks: inode.size.div_ceil(BLOCK_SIZE),
            block: 0,
            current: None,
            previous: None,
            dots: true,
        })
    }

    /// The entry of a directory with a given name, found by bisection.
    ///
    /// # Errors
    /// As [`Image::read_dir`], where damage is met.
    pub fn lookup(&self, inode: &Inode, name: &[u8]) -> Result<Option<DirEntry<'a>>> {
        let all = self.read_dir_all(inode)?;
        // The last block whose first name is not above the wanted one.
        let (mut low, mut high) = (0, all.blocks);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if DirBlock::open(self, inode, middle)?.entry(inode, 0)?.name > name {
                high = middle;
            } else {
                low = middle;
            }
        }
        let block = DirBlock::open(self, inode, low)?;
        for index in 0..block.count {
            let entry = block.entry(inode, index)?;
            match entry.name.cmp(name) {
                Ordering::Less => {}
                Ordering::Equal => return Ok(Some(entry)),
                Ordering::Greater => break,
            }
        }
        Ok(None)
    }
}

impl<'a> DirBlock<'a> {
    fn open(image: &Image<'a>, inode: &Inode, number: u64) -> Result<Self> {
        let bytes = image.content_block(inode, number)?;
        let entry = size_of::<RawDirent>();
        let first = RawDirent::read_from_prefix(bytes).map(|(dirent, _)| dirent.name_offset.get());
        let names = first.map(usize::from).unwrap_or(0);
        if names < entry || names % entry != 0 || names >= bytes.len() {
            return Err(inode.corrupt(format!(
                "directory block {number} of {} bytes has its first name at {names}",
                bytes.len()
            )));
        }
        Ok(Self {
            bytes,
            count: names / entry,
            next: 0,
        })
    }

    fn dirent(&self, index: usize) -> Option<RawDirent> {
        let entry = size_of::<RawDirent>();
        let bytes = self.bytes.get(index.checked_mul(entry)?..)?;
        RawDirent::read_from_prefix(bytes)
            .ok()
            .map(|(dirent, _)| dirent)
    }

    fn entry(&self, inode: &Inode, index: usize) -> Result<DirEntry<'a>> {
        let damaged = || inode.corrupt(format!("directory entry {index} of a block is damaged"));
        let dirent = self.dirent(index).ok_or_else(damaged)?;
        let start = usize::from(dirent.name_offset.get());
        let last = index + 1 == self.count;
        let end = if last {
            self.bytes.len()
        } else {
            usize::from(
                self.dirent(index + 1)
                    .ok_or_else(damaged)?
                    .name_offset
                    .get(),
            )
        };
        // Names start behind the entries and do not overlap.
        if start < self.count * size_of::<RawDirent>() || start >= end {
            return Err(damaged());
        }
        let mut name = self.bytes.get(start..end).ok_or_else(damaged)?;
        if last && let Some(len) = name.iter().position(|byte| *byte == 0) {
            name = name.get(..len).ok_or_else(damaged)?; // padding of a block
        }
        let bad = name.is_empty()
            || name.len() > MAX_NAME
            || name.iter().any(|byte| matches!(byte, 0 | b'/'));
        let file_type = FileType::from_raw(dirent.file_type);
        match file_type {
            Some(file_type) if !bad => Ok(DirEntry {
                name,
                nid: dirent.nid.get(),
                file_type,
            }),
            _ => Err(damaged()),
        }
    }
}

impl<'a> ReadDir<'_, 'a> {
    fn step(&mut self) -> Result<Option<DirEntry<'a>>> {
        loop {
            let mut block = match self.current {
                Some(block) => block,
                None if self.block == self.blocks => return Ok(None),
                None => {
                    self.block += 1;
                    DirBlock::open(self.image, &self.inode, self.block - 1)?
                }
            };
            if block.next == block.count {
                self.current = None;
                continue;
            }
            let entry = block.entry(&self.inode, block.next)?;
            block.next += 1;
            self.current = Some(block);
            if self.previous.is_some_and(|previous| previous >= entry.name) {
                return Err(self.inode.corrupt(format!(
                    "entry \"{}\" is out of order",
                    entry.name.escape_ascii()
                )));
            }
            self.previous = Some(entry.name);
            if self.dots || !matches!(entry.name, b"." | b"..") {
                return Ok(Some(entry));
            }
        }
    }
}

impl<'a> Iterator for ReadDir<'_, 'a> {
    type Item = Result<DirEntry<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.step();
        if item.is_err() {
            self.current = None;
            self.block = self.blocks;
        }
        item.transpose()
    }
}

const _: () = assert!(1 << BLOCK_BITS == BLOCK_SIZE);
