//! A directory as a source: scanned once for its tree, then its files are read in the order in
//! which they lie in the layer.
//!
//! Everything goes through descriptors from the source's root down, and no symbolic link is
//! followed below it, so nobody who can change the source can make us read something else. What
//! changes between the scan and the end of reading is an error.

mod attributes;
mod capture;
mod file;
mod gather;
mod open;
mod read;
mod scan;

use std::collections::BTreeMap;
use std::path::Path;

use layerpack_erofs::{Metadata, NodeId, Timestamp};
use rustix::fs::Stat;

use crate::cache::Place;
use crate::error::Result;
use crate::filter::Filter;
use crate::options::{Limits, Progress};
use crate::warnings::Warnings;

pub(crate) use self::capture::{Captured, Which};
pub(crate) use self::file::Identity;
pub(crate) use self::open::{Dirs, Opener, proc_path};

/// Files up to this size come first, as in the layer.
pub(crate) const SMALL: u64 = 4096;

/// What an entry of a directory means in the layer.
#[derive(Debug)]
pub(crate) enum Meaning {
    /// An entry of its own.
    Entry {
        /// With this metadata.
        metadata: Metadata,
        /// A directory that hides what lies below it.
        opaque: bool,
    },
    /// The layers below lose the name.
    Whiteout,
    /// Nothing.
    Nothing,
}

/// How the entries of a directory are to be understood.
pub(crate) trait View: Sync {
    /// Whether an attribute has to be read.
    fn wants(&self, name: &[u8]) -> bool;

    /// What an entry means. `xattrs` are those that are wanted.
    fn meaning(
        &self,
        path: &[u8],
        stat: &Stat,
        xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
        warnings: &mut Warnings,
    ) -> Result<Meaning>;

    /// How often a file that changed while it was read is read again.
    fn retries(&self) -> u32 {
        0
    }
}

/// Files whose records lie together in memory.
const BLOCK: usize = 4096;

/// A file whose bytes are to be stored.
#[derive(Debug)]
struct FileRecord {
    node: NodeId,
    dir: u32,
    /// Where its name begins in [`Block::names`].
    name: u32,
    len: u8,
    identity: Identity,
}

/// Some files whose bytes are to be stored, their names in one piece of memory.
#[derive(Debug, Default)]
struct Block {
    records: Vec<FileRecord>,
    names: Vec<u8>,
}

impl Block {
    fn name(&self, record: &FileRecord) -> &[u8] {
        let start = usize::try_from(record.name).unwrap_or(usize::MAX);
        let end = start.saturating_add(record.len.into());
        self.names.get(start..end).unwrap_or_default()
    }
}

/// The files whose bytes are to be stored: small ones first, each group in the order of the scan.
/// In blocks, so that memory of those that are done is free again.
#[derive(Debug, Default)]
struct Files {
    small: Vec<Block>,
    large: Vec<Block>,
}

impl Files {
    fn push(&mut self, node: NodeId, dir: u32, name: &[u8], identity: Identity) {
        let blocks = match identity.size() <= SMALL {
            true => &mut self.small,
            false => &mut self.large,
        };
        if blocks.last().is_none_or(|last| last.records.len() >= BLOCK) {
            blocks.push(Block::default());
        }
        let Some(block) = blocks.last_mut() else {
            return; // one was just added
        };
        block.records.push(FileRecord {
            node,
            dir,
            // Below 2^20: the kernel's names have at most 255 bytes.
            name: u32::try_from(block.names.len()).unwrap_or(u32::MAX),
            len: u8::try_from(name.len()).unwrap_or(u8::MAX),
            identity,
        });
        block.names.extend_from_slice(name);
    }

    /// All of them with their blocks, which have their names.
    fn iter(&self) -> impl Iterator<Item = (&Block, &FileRecord)> {
        (self.small.iter().chain(&self.large))
            .flat_map(|block| block.records.iter().map(move |record| (block, record)))
    }

    fn into_blocks(self) -> impl Iterator<Item = Block> {
        self.small.into_iter().chain(self.large)
    }
}

/// See the module's documentation.
pub(crate) struct DirSource<'a> {
    opener: Opener,
    dirs: Dirs,
    files: Files,
    view: &'a dyn View,
    filter: &'a Filter,
    limits: Limits,
    progress: &'a dyn Progress,
    /// Where the build cache lies, and whether what it holds is to be used.
    cache: Option<(Place, bool)>,
}

impl<'a> DirSource<'a> {
    /// Opens the directory at `path`.
    pub(crate) fn open(
        path: &Path,
        view: &'a dyn View,
        filter: &'a Filter,
        limits: Limits,
        progress: &'a dyn Progress,
    ) -> Result<Self> {
        let opener = Opener::new(path)?;
        Ok(Self {
            opener,
            dirs: Dirs::default(),
            files: Files::default(),
            view,
            filter,
            limits,
            progress,
            cache: None,
        })
    }

    /// Keeps a build cache at `place`; with `fresh`, what it holds is not used.
    pub(crate) fn cached(&mut self, place: Option<Place>, fresh: bool) {
        self.cache = place.map(|place| (place, fresh));
    }
}

/// Metadata as a stat gives it.
pub(crate) fn metadata(stat: &Stat, xattrs: BTreeMap<Vec<u8>, Vec<u8>>) -> Metadata {
    Metadata {
        mode: u16::try_from(stat.st_mode & 0o7777).unwrap_or_default(),
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: Timestamp {
            sec: stat.st_mtime,
            nsec: u32::try_from(stat.st_mtime_nsec).unwrap_or_default(),
        },
        xattrs,
    }
}
