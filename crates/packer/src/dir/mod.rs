//! A directory as a source: scanned once for its tree, then its files are read in the order in
//! which they lie in the layer.
//!
//! Everything goes through descriptors from the source's root down, and no symbolic link is
//! followed below it, so nobody who can change the source can make us read something else. What
//! changes between the scan and the end of reading is an error.

mod attributes;
mod capture;
mod file;
mod files;
mod gather;
mod open;
mod read;
mod scan;

use std::collections::BTreeMap;
use std::path::Path;

use layerpack_erofs::{Metadata, Timestamp};
use rustix::fs::Stat;

use crate::cache::Place;
use crate::error::Result;
use crate::filter::Filter;
use crate::options::{Limits, Progress};
use crate::warnings::Warnings;

pub(crate) use self::capture::{Captured, Which};
pub(crate) use self::file::Identity;
use self::files::{Block, FileRecord, Files};
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

    /// Keeps records of many files in a file of the directory `scratch` between the two passes. For
    /// [`DirSource::store`] alone.
    pub(crate) fn spilling(&mut self, scratch: Option<&Path>) {
        self.files = Files::new(scratch);
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
