//! A directory as a source: scanned once for its tree, then its files are read in the order in
//! which they lie in the layer.
//!
//! Everything goes through descriptors from the source's root down, and no symbolic link is
//! followed below it, so nobody who can change the source can make us read something else. What
//! changes between the scan and the end of reading is an error.

mod attributes;
mod file;
mod open;
mod read;
mod scan;

use std::collections::BTreeMap;
use std::path::Path;

use layerpack_erofs::{Metadata, NodeId, Timestamp};
use rustix::fs::Stat;

use crate::error::Result;
use crate::filter::Filter;
use crate::options::{Limits, Progress};
use crate::warnings::Warnings;

use self::file::Identity;
use self::open::{Dirs, Opener};

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

/// A file whose bytes are to be stored.
#[derive(Debug)]
struct FileRecord {
    node: NodeId,
    dir: u32,
    name: Box<[u8]>,
    identity: Identity,
}

/// See the module's documentation.
pub(crate) struct DirSource<'a> {
    opener: Opener,
    dirs: Dirs,
    files: Vec<FileRecord>,
    view: &'a dyn View,
    filter: &'a Filter,
    limits: Limits,
    progress: &'a dyn Progress,
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
            files: Vec::new(),
            view,
            filter,
            limits,
            progress,
        })
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
