//! The second pass: contents, on two threads. One opens and reads ahead, the other hashes, cuts
//! and hands on to the writer, whose own threads compress. A file that the build cache knows is
//! not opened at all.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::SystemTime;

use crossbeam_channel::{Sender, bounded};
use layerpack_store::{Digest, LayerWriter};
use rustix::fs::{Advice, fadvise};
use rustix::io::Errno;

use super::file::{Identity, OpenFile};
use super::open::{Dirs, Opener, open_file};
use super::scan::gone_or;
use super::{Block, DirSource, FileRecord, Files};
use crate::cache::{self, New, Old};
use crate::content::Content;
use crate::error::{PackError, Result};
use crate::git::{self, Git};
use crate::model::Layer;
use crate::options::Progress;
use crate::path::join;

/// Files up to this size are read whole by the thread that reads ahead.
const WHOLE: u64 = 256 << 10;
/// Files go from thread to thread in batches of at most so many files, and few bytes more than
/// this, so that threads seldom have to wake each other.
const BATCH: usize = 64;
const BATCH_BYTES: usize = 512 << 10;
/// Batches that may wait, which bounds memory and descriptors.
const DEPTH: usize = 2;

/// A file read ahead.
enum Loaded {
    Whole(Vec<u8>),
    Open(OpenFile),
    /// Not read: what an earlier build found in it.
    Known(Content),
}

/// A file on its way from one thread to the other: one of the records of a block.
struct Ahead {
    block: Arc<Block>,
    index: usize,
    /// Before anything of it was read.
    time: SystemTime,
    loaded: Result<Loaded>,
}

/// Files that were not read in a batch: there is nothing to wait for.
const KNOWN_BATCH: usize = 1024;

/// What both threads need to open a file.
struct Access<'a> {
    dirs: &'a Dirs,
    opener: Opener,
    path: PathBuffer,
}

/// The path of the file at hand, in one buffer; that of a directory is made once for its files.
#[derive(Default)]
struct PathBuffer {
    dir: Option<u32>,
    /// Bytes of the directory's path and the slash after it.
    len: usize,
    bytes: Vec<u8>,
}

impl PathBuffer {
    fn of(&mut self, dirs: &Dirs, file: File<'_>) -> &[u8] {
        if self.dir != Some(file.record.dir) {
            self.bytes = dirs.path(file.record.dir);
            if !self.bytes.is_empty() {
                self.bytes.push(b'/');
            }
            self.len = self.bytes.len();
            self.dir = Some(file.record.dir);
        }
        self.bytes.truncate(self.len);
        self.bytes.extend_from_slice(file.name);
        &self.bytes
    }
}

/// A file with its name.
#[derive(Clone, Copy)]
struct File<'a> {
    record: &'a FileRecord,
    name: &'a [u8],
}

impl Block {
    fn file(&self, index: usize) -> Option<File<'_>> {
        let record = self.records.get(index)?;
        let name = self.name(record);
        Some(File { record, name })
    }
}

impl Access<'_> {
    fn path(&self, file: File<'_>) -> Vec<u8> {
        join(&self.dirs.path(file.record.dir), file.name)
    }

    fn open(&mut self, file: File<'_>, identity: Identity) -> Result<OpenFile> {
        let dir = self.opener.open(self.dirs, file.record.dir)?;
        let fd = open_file((*dir).as_fd(), file.name).map_err(|errno| {
            let path = self.path(file);
            match errno {
                Errno::LOOP | Errno::NXIO => PackError::Changed {
                    path: crate::show(&path),
                    what: "another file took its place".to_owned(),
                },
                errno => gone_or("read", &path, errno),
            }
        })?;
        Ok(OpenFile::new(fd, self.path(file), identity))
    }

    fn load(&mut self, file: File<'_>, progress: &dyn Progress) -> Result<Loaded> {
        let identity = file.record.identity;
        let mut file = self.open(file, identity)?;
        if identity.size() <= WHOLE {
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
        let (files, progress) = (std::mem::take(&mut self.files), self.progress);
        let (old, mut new) = match &self.cache {
            // Git's names of contents are told by nothing but the contents, and what stands for an
            // index that is held back is no content to remember.
            Some((place, fresh)) if git.is_none() => {
                ((!fresh).then(|| place.old()), place.new_records())
            }
            _ => (None, None),
        };
        let mut ahead = Access {
            dirs: &self.dirs,
            opener: self.opener.again(),
            path: PathBuffer::default(),
        };
        let mut again = Access {
            dirs: &self.dirs,
            opener: self.opener.again(),
            path: PathBuffer::default(),
        };
        // Cleared when the store lacks what the cache knows: then everything is read ahead.
        let useful = AtomicBool::new(true);
        thread::scope(|scope| {
            let (sender, receiver) = bounded(DEPTH);
            let useful = &useful;
            scope.spawn(move || read_ahead(files, &mut ahead, old, useful, progress, &sender));
            for batch in receiver {
                for ahead in batch? {
                    let Ahead {
                        block,
                        index,
                        time,
                        loaded,
                    } = ahead;
                    let Some(file) = block.file(index) else {
                        break; // it was just sent
                    };
                    let record = file.record;
                    let loaded = match loaded {
                        Ok(Loaded::Known(content)) => {
                            if reuse(writer, &content)? {
                                remember(&mut new, &mut again, file, &content);
                                layer.set_content(record.node, content)?;
                                continue;
                            }
                            useful.store(false, Ordering::Relaxed);
                            again.load(file, progress)
                        }
                        loaded => loaded,
                    };
                    let stored = loaded.and_then(|loaded| {
                        hand_on(writer, loaded, progress, git.as_deref_mut(), file.name)
                    });
                    let content = stored?;
                    if cache::is_settled(&record.identity, time) {
                        remember(&mut new, &mut again, file, &content);
                    }
                    layer.set_content(record.node, content)?;
                }
            }
            Ok::<(), PackError>(())
        })?;
        if let Some(new) = new {
            new.keep();
        }
        Ok(())
    }
}

fn read_ahead(
    files: Files,
    access: &mut Access<'_>,
    mut old: Option<Old>,
    useful: &AtomicBool,
    progress: &dyn Progress,
    sender: &Sender<Result<Vec<Ahead>>>,
) {
    let mut batch = Vec::with_capacity(BATCH);
    let (mut bytes, mut read) = (0, 0);
    for block in files.into_blocks() {
        let block = match block {
            Ok(block) => Arc::new(block),
            Err(error) => {
                let _ = sender.send(Err(error));
                return;
            }
        };
        for index in 0..block.records.len() {
            let Some(file) = block.file(index) else { break };
            let known = match &mut old {
                Some(old) if useful.load(Ordering::Relaxed) => {
                    let path = access.path.of(access.dirs, file);
                    old.find(path, &file.record.identity)
                }
                _ => None,
            };
            let time = SystemTime::now();
            let loaded = match known {
                Some(content) => Ok(Loaded::Known(content)),
                None => access.load(file, progress),
            };
            read += usize::from(!matches!(loaded, Ok(Loaded::Known(_))));
            bytes += match &loaded {
                Ok(Loaded::Whole(whole)) => whole.len(),
                Ok(Loaded::Open(_)) => BATCH_BYTES / 4, // so few descriptors are open
                Ok(Loaded::Known(_)) | Err(_) => 0,
            };
            batch.push(Ahead {
                block: Arc::clone(&block),
                index,
                time,
                loaded,
            });
            if read >= BATCH || batch.len() >= KNOWN_BATCH || bytes >= BATCH_BYTES {
                (bytes, read) = (0, 0);
                let full = std::mem::replace(&mut batch, Vec::with_capacity(BATCH));
                if sender.send(Ok(full)).is_err() {
                    return;
                }
            }
        }
    }
    // Nobody takes it after an error.
    let _ = sender.send(Ok(batch));
}

/// Whether the store has every chunk of a file that was not read.
fn reuse(writer: &mut LayerWriter, content: &Content) -> Result<bool> {
    if let [piece] = &*content.pieces {
        return Ok(writer.reuse(&[(piece.digest, piece.len)])?);
    }
    let chunks: Vec<(Digest, u32)> = content
        .pieces
        .iter()
        .map(|piece| (piece.digest, piece.len))
        .collect();
    Ok(writer.reuse(&chunks)?)
}

fn remember(new: &mut Option<New>, access: &mut Access<'_>, file: File<'_>, content: &Content) {
    if let Some(records) = new
        && !records.add(
            access.path.of(access.dirs, file),
            &file.record.identity,
            content,
        )
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
