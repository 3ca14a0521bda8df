//! The second pass: contents, on two threads. One opens and reads ahead, the other hashes, cuts
//! and hands on to the writer, whose own threads compress.

use std::os::fd::AsFd;
use std::thread;

use crossbeam_channel::{Sender, bounded};
use layerpack_store::LayerWriter;
use rustix::fs::{Advice, AtFlags, FileType, fadvise, statat};
use rustix::io::Errno;

use super::file::{Identity, OpenFile};
use super::open::{Dirs, Opener, open_file};
use super::scan::gone_or;
use super::{DirSource, FileRecord, Meaning, attributes};
use crate::content::Content;
use crate::error::{PackError, Result};
use crate::git::{self, Git};
use crate::model::Layer;
use crate::options::Progress;
use crate::path::join;

/// Files up to this size are read whole by the thread that reads ahead.
const WHOLE: u64 = 256 << 10;
/// Files that may wait, which bounds memory and descriptors.
const DEPTH: usize = 32;
/// Files up to this size come first, as in the layer.
const SMALL: u64 = 4096;

/// A file read ahead.
enum Loaded {
    Whole(Vec<u8>),
    Open(OpenFile),
}

/// What both threads need to open a file.
struct Access<'a> {
    dirs: &'a Dirs,
    opener: Opener,
}

impl Access<'_> {
    fn path(&self, record: &FileRecord) -> Vec<u8> {
        join(&self.dirs.path(record.dir), &record.name)
    }

    fn open(&mut self, record: &FileRecord, identity: Identity) -> Result<OpenFile> {
        let dir = self.opener.open(self.dirs, record.dir)?;
        let fd = open_file((*dir).as_fd(), &record.name).map_err(|errno| {
            let path = self.path(record);
            match errno {
                Errno::LOOP | Errno::NXIO => PackError::Changed {
                    path: crate::show(&path),
                    what: "another file took its place".to_owned(),
                },
                errno => gone_or("read", &path, errno),
            }
        })?;
        OpenFile::new(fd, crate::show(&self.path(record)), identity)
    }

    fn load(&mut self, record: &FileRecord, progress: &dyn Progress) -> Result<Loaded> {
        let file = self.open(record, record.identity)?;
        if record.identity.size() <= WHOLE {
            return file.read_whole(progress).map(Loaded::Whole);
        }
        file.will_need();
        Ok(Loaded::Open(file))
    }
}

impl DirSource<'_> {
    /// Stores the contents of all files that the scan found.
    /// `git` takes note of them.
    pub(crate) fn store(
        &mut self,
        layer: &mut Layer,
        writer: &mut LayerWriter,
        mut git: Option<&mut Git>,
    ) -> Result<()> {
        // Small files first, each group in the order of the scan.
        self.files
            .sort_by_key(|record| record.identity.size() > SMALL);
        let (files, progress) = (&self.files, self.progress);
        let mut ahead = Access {
            dirs: &self.dirs,
            opener: self.opener.again(),
        };
        let mut again = Access {
            dirs: &self.dirs,
            opener: self.opener.again(),
        };
        thread::scope(|scope| {
            let (sender, receiver) = bounded(DEPTH);
            scope.spawn(move || read_ahead(files, &mut ahead, progress, &sender));
            for record in files {
                let Ok(loaded) = receiver.recv() else { break };
                let stored = loaded.and_then(|loaded| {
                    hand_on(writer, loaded, progress, git.as_deref_mut(), &record.name)
                });
                let content = match stored {
                    Err(PackError::Changed { .. }) if self.view.retries() > 0 => {
                        self.retry(layer, writer, record, &mut again, git.as_deref_mut())?
                    }
                    stored => stored?,
                };
                layer.set_content(record.node, content);
            }
            Ok(())
        })
    }

    /// Takes a file that changed as it is now, if it holds still for one reading.
    fn retry(
        &self,
        layer: &mut Layer,
        writer: &mut LayerWriter,
        record: &FileRecord,
        access: &mut Access<'_>,
        mut git: Option<&mut Git>,
    ) -> Result<Content> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let result = self.take_again(layer, writer, record, access, git.as_deref_mut());
            match result {
                Err(PackError::Changed { .. }) if attempt < self.view.retries() => {}
                result => return result,
            }
        }
    }

    fn take_again(
        &self,
        layer: &mut Layer,
        writer: &mut LayerWriter,
        record: &FileRecord,
        access: &mut Access<'_>,
        git: Option<&mut Git>,
    ) -> Result<Content> {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;

        let path = access.path(record);
        let dir = access.opener.open(access.dirs, record.dir)?;
        let stat = statat(
            &*dir,
            OsStr::from_bytes(&record.name),
            AtFlags::SYMLINK_NOFOLLOW,
        )
        .map_err(|errno| gone_or("read", &path, errno))?;
        let identity = Identity::of(&stat);
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(PackError::Changed {
                path: crate::show(&path),
                what: "something else took its place".to_owned(),
            });
        }
        let xattrs = attributes::Reader::default()
            .read(&super::open::proc_path(&*dir, &record.name), |name| {
                self.view.wants(name)
            })
            .map_err(|errno| gone_or("read the extended attributes of", &path, errno))?;
        if let Meaning::Entry { metadata, .. } =
            self.view
                .meaning(&path, &stat, xattrs, &mut layer.warnings)?
        {
            layer.tree.node_mut(record.node).metadata = metadata;
        }
        let file = access.open(record, identity)?;
        hand_on(writer, Loaded::Open(file), self.progress, git, &record.name)
    }
}

fn read_ahead(
    files: &[FileRecord],
    access: &mut Access<'_>,
    progress: &dyn Progress,
    sender: &Sender<Result<Loaded>>,
) {
    for record in files {
        let loaded = access.load(record, progress);
        if sender.send(loaded).is_err() {
            return;
        }
    }
}

fn hand_on(
    writer: &mut LayerWriter,
    loaded: Loaded,
    progress: &dyn Progress,
    git: Option<&mut Git>,
    name: &[u8],
) -> Result<Content> {
    match loaded {
        Loaded::Whole(bytes) => git::store_small(git, writer, name, &bytes),
        Loaded::Open(file) => {
            let content = git::store(git, writer, name, &mut file.bytes(progress), file.size())?;
            file.check(content.size)?;
            Ok(content)
        }
    }
}

impl OpenFile {
    /// Lets the kernel begin to read.
    fn will_need(&self) {
        // Only advice: failing changes nothing.
        let length = std::num::NonZeroU64::new(1 << 20);
        let _ = fadvise(self.fd(), 0, length, Advice::WillNeed);
    }
}
