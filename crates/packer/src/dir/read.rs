//! The second pass: contents, on two threads. One opens and reads ahead, the other hashes, cuts
//! and hands on to the writer, whose own threads compress. A file that the build cache knows is
//! not opened at all.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::SystemTime;

use crossbeam_channel::{Sender, bounded};
use layerpack_store::{Digest, LayerWriter};
use rustix::fs::{Advice, AtFlags, FileType, fadvise, statat};
use rustix::io::Errno;

use super::file::{Identity, OpenFile};
use super::open::{Dirs, Opener, open_file};
use super::scan::gone_or;
use super::{DirSource, FileRecord, Files, Meaning, SMALL, attributes};
use crate::cache::{self, New, Old};
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

/// A file read ahead.
enum Loaded {
    Whole(Vec<u8>),
    Open(OpenFile),
    /// Not read: what an earlier build found in it.
    Known(Content),
}

/// A file on its way from one thread to the other.
struct Ahead {
    /// Before anything of it was read.
    time: SystemTime,
    loaded: Result<Loaded>,
}

/// What both threads need to open a file.
struct Access<'a> {
    dirs: &'a Dirs,
    files: &'a Files,
    opener: Opener,
}

impl Access<'_> {
    fn path(&self, record: &FileRecord) -> Vec<u8> {
        join(&self.dirs.path(record.dir), self.files.name(record))
    }

    fn open(&mut self, record: &FileRecord, identity: Identity) -> Result<OpenFile> {
        let dir = self.opener.open(self.dirs, record.dir)?;
        let fd = open_file((*dir).as_fd(), self.files.name(record)).map_err(|errno| {
            let path = self.path(record);
            match errno {
                Errno::LOOP | Errno::NXIO => PackError::Changed {
                    path: crate::show(&path),
                    what: "another file took its place".to_owned(),
                },
                errno => gone_or("read", &path, errno),
            }
        })?;
        Ok(OpenFile::new(fd, self.path(record), identity))
    }

    fn load(&mut self, record: &FileRecord, progress: &dyn Progress) -> Result<Loaded> {
        let mut file = self.open(record, record.identity)?;
        if record.identity.size() <= WHOLE {
            return file.read_whole(progress).map(Loaded::Whole);
        }
        file.look()?;
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
            .records
            .sort_by_key(|record| record.identity.size() > SMALL);
        let (files, progress) = (&self.files, self.progress);
        let (old, mut new) = match &self.cache {
            // Git's names of contents are told by nothing but the contents.
            Some((place, fresh)) => (
                (!fresh && git.is_none()).then(|| place.old()),
                place.new_records(),
            ),
            None => (None, None),
        };
        let mut ahead = Access {
            dirs: &self.dirs,
            files,
            opener: self.opener.again(),
        };
        let mut again = Access {
            dirs: &self.dirs,
            files,
            opener: self.opener.again(),
        };
        // Cleared when the store lacks what the cache knows: then everything is read ahead.
        let useful = AtomicBool::new(true);
        thread::scope(|scope| {
            let (sender, receiver) = bounded(DEPTH);
            let useful = &useful;
            scope.spawn(move || {
                read_ahead(&files.records, &mut ahead, old, useful, progress, &sender)
            });
            for record in &files.records {
                let Ok(Ahead { time, loaded }) = receiver.recv() else {
                    break;
                };
                let loaded = match loaded {
                    Ok(Loaded::Known(content)) => {
                        if reuse(writer, &content)? {
                            remember(&mut new, &again, record, &content);
                            layer.set_content(record.node, content);
                            continue;
                        }
                        useful.store(false, Ordering::Relaxed);
                        again.load(record, progress)
                    }
                    loaded => loaded,
                };
                let stored = loaded.and_then(|loaded| {
                    hand_on(
                        writer,
                        loaded,
                        progress,
                        git.as_deref_mut(),
                        files.name(record),
                    )
                });
                let content = match stored {
                    Err(PackError::Changed { .. }) if self.view.retries() > 0 => {
                        self.retry(layer, writer, record, &mut again, git.as_deref_mut())?
                    }
                    stored => {
                        let content = stored?;
                        if cache::is_settled(&record.identity, time) {
                            remember(&mut new, &again, record, &content);
                        }
                        content
                    }
                };
                layer.set_content(record.node, content);
            }
            Ok::<(), PackError>(())
        })?;
        if let Some(new) = new {
            new.keep();
        }
        Ok(())
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
            OsStr::from_bytes(access.files.name(record)),
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
            .read(
                &super::open::proc_path(&*dir, access.files.name(record)),
                |name| self.view.wants(name),
            )
            .map_err(|errno| gone_or("read the extended attributes of", &path, errno))?;
        if let Meaning::Entry { metadata, .. } =
            self.view
                .meaning(&path, &stat, xattrs, &mut layer.warnings)?
        {
            layer.tree.node_mut(record.node).metadata = metadata;
        }
        let mut file = access.open(record, identity)?;
        file.look()?;
        let name = access.files.name(record);
        hand_on(writer, Loaded::Open(file), self.progress, git, name)
    }
}

fn read_ahead(
    files: &[FileRecord],
    access: &mut Access<'_>,
    mut old: Option<Old>,
    useful: &AtomicBool,
    progress: &dyn Progress,
    sender: &Sender<Ahead>,
) {
    for record in files {
        let known = match &mut old {
            Some(old) if useful.load(Ordering::Relaxed) => {
                old.find(&access.path(record), &record.identity)
            }
            _ => None,
        };
        let time = SystemTime::now();
        let loaded = match known {
            Some(content) => Ok(Loaded::Known(content)),
            None => access.load(record, progress),
        };
        if sender.send(Ahead { time, loaded }).is_err() {
            return;
        }
    }
}

/// Whether the store has every chunk of a file that was not read.
fn reuse(writer: &mut LayerWriter, content: &Content) -> Result<bool> {
    let chunks: Vec<(Digest, u32)> = content
        .pieces
        .iter()
        .map(|piece| (piece.digest, piece.len))
        .collect();
    Ok(writer.reuse(&chunks)?)
}

fn remember(new: &mut Option<New>, access: &Access<'_>, record: &FileRecord, content: &Content) {
    if let Some(records) = new
        && !records.add(&access.path(record), &record.identity, content)
    {
        *new = None; // a full disk, say: the next build reads all again
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
        Loaded::Known(content) => Ok(content),
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
