//! The contents of an upper whose sandbox may have gone on.
//!
//! What a file held when it was scanned is what it holds as long as its change time is the same,
//! so every file is checked after it was read. A large one is first copied by reference where the
//! filesystem can do that: the copy takes an instant, its reading can take its time. Files that
//! changed are not stored and left for another round; those that did not are known by then.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::thread;

use crossbeam_channel::bounded;
use layerpack_erofs::NodeId;
use layerpack_store::{LayerWriter, StoreError};
use rustix::fs::{Mode, OFlags, fstat, ioctl_ficlone};
use rustix::io::Errno;

use super::file::{Identity, OpenFile};
use super::open::{Dirs, Opener, open_file};
use super::scan::gone_or;
use super::{Block, DirSource, FileRecord};
use crate::content::{Bytes, Content, Next};
use crate::error::{PackError, Result};
use crate::git::{self, Git};
use crate::model::Layer;
use crate::options::Progress;
use crate::path::join;
use crate::scrub::{Judged, Look, Scrub};

/// Files up to this size are read whole, and are not worth a copy by reference.
const WHOLE: u64 = 256 << 10;
/// Bytes that are read at once of a file that is only looked at.
const WHOLE_PIECE: usize = 256 << 10;
/// Files go from thread to thread in batches of at most so many files, and few bytes more than
/// this, so that threads seldom have to wake each other.
const BATCH: usize = 32;
const BATCH_BYTES: usize = 256 << 10;
/// Batches that may wait, which bounds memory and descriptors.
const DEPTH: usize = 2;
/// Copies by reference at a time, which bounds descriptors.
const MOST_COPIES: usize = 256;

/// Which files to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    /// Those that were not copied by reference.
    InPlace,
    /// Those that were.
    Copied,
}

/// What is known of the files of an upper after some rounds.
#[derive(Default)]
pub(crate) struct Captured {
    contents: HashMap<(u64, u64), (Identity, Content)>,
    /// Files whose contents rules leave out.
    scrubbed: HashMap<(u64, u64), Identity>,
    /// Copies by reference of this round's files.
    copies: HashMap<NodeId, OwnedFd>,
    /// Paths of files that changed in this round.
    pub changed: Vec<Vec<u8>>,
    /// Nodes of this round that rules leave out.
    pub left_out: HashSet<NodeId>,
    /// Files that were copied by reference, of all rounds.
    pub copied: u64,
}

impl Captured {
    /// Begins another round.
    pub(crate) fn restart(&mut self) {
        self.copies.clear();
        self.changed.clear();
        self.left_out.clear();
    }
}

/// A file that was read ahead.
enum Loaded {
    Whole(Vec<u8>),
    Open(OpenFile),
}

struct Access<'a> {
    dirs: &'a Dirs,
    opener: Opener,
}

/// A file with the block that has its name.
type Found<'f> = (&'f Block, &'f FileRecord);

impl Access<'_> {
    fn path(&self, (block, record): Found<'_>) -> Vec<u8> {
        join(&self.dirs.path(record.dir), block.name(record))
    }

    fn open(&mut self, found: Found<'_>) -> Result<OpenFile> {
        let (block, record) = found;
        let dir = self.opener.open(self.dirs, record.dir)?;
        let fd = open_file((*dir).as_fd(), block.name(record)).map_err(|errno| {
            let path = self.path(found);
            match errno {
                Errno::LOOP | Errno::NXIO => PackError::Changed {
                    path: crate::show(&path),
                    what: "another file took its place".to_owned(),
                },
                errno => gone_or("read", &path, errno),
            }
        })?;
        Ok(OpenFile::new(fd, self.path(found), record.identity))
    }

    fn load(&mut self, found: Found<'_>, progress: &dyn Progress) -> Result<Loaded> {
        let mut file = self.open(found)?;
        if found.1.identity.size() <= WHOLE {
            return file.read_whole(progress).map(Loaded::Whole);
        }
        file.look()?;
        Ok(Loaded::Open(file))
    }
}

impl DirSource<'_> {
    /// The latest change time of any file: seconds since 1970, nanoseconds.
    pub(crate) fn latest_change(&self) -> Option<(i64, u64)> {
        self.files
            .iter()
            .map(|(_, record)| record.identity.ctime())
            .max()
    }

    /// Copies large files that are not known yet by reference, into unnamed files of the
    /// directory `scratch`. Nothing happens where the filesystem cannot do that.
    pub(crate) fn copy_large(&self, captured: &mut Captured, scratch: &Path) {
        let mut access = Access {
            dirs: &self.dirs,
            opener: self.opener.again(),
        };
        let mut large: Vec<Found<'_>> = self
            .files
            .iter()
            .filter(|(_, record)| record.identity.size() > WHOLE)
            .filter(|(_, record)| captured.known(record).is_none())
            .collect();
        // The largest take longest to read.
        large.sort_by_key(|(_, record)| std::cmp::Reverse(record.identity.size()));
        for found in large.into_iter().take(MOST_COPIES) {
            let Ok(mut file) = access.open(found) else {
                continue; // reading it will tell
            };
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            let Ok(copy) = rustix::fs::open(scratch, flags, Mode::from_raw_mode(0o600)) else {
                return;
            };
            match ioctl_ficlone(&copy, file.fd()) {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::XDEV | Errno::NOTTY) => return,
                Err(_) => continue,
            }
            // The copy is what was scanned if the file still is.
            if file.look().is_ok() {
                captured.copies.insert(found.1.node, copy);
                captured.copied += 1;
            }
        }
    }

    /// Stores the contents of files; without a writer they are only judged, and those that nobody
    /// judges are not read. What rules leave out by its contents, and what changed since the scan,
    /// is in `captured` afterwards.
    pub(crate) fn capture(
        &mut self,
        which: Which,
        layer: &mut Layer,
        mut writer: Option<&mut LayerWriter>,
        captured: &mut Captured,
        scrub: Option<&Scrub<'_>>,
        mut git: Option<&mut Git>,
    ) -> Result<()> {
        let (files, progress) = (&self.files, self.progress);
        let mut access = Access {
            dirs: &self.dirs,
            opener: self.opener.again(),
        };
        let paths = Access {
            dirs: &self.dirs,
            opener: self.opener.again(),
        };
        let mut wanted: Vec<Found<'_>> = Vec::new();
        for found in files.iter() {
            let record = found.1;
            if captured.copies.contains_key(&record.node) != (which == Which::Copied) {
                continue;
            }
            let gone = scrub.is_some_and(|s| s.takes_links(record.identity.place()));
            if gone || captured.was_left_out(record) {
                captured.left_out.insert(record.node);
            } else if let Some(content) = captured.known(record) {
                layer.set_content(record.node, content.clone())?;
            } else if writer.is_some() || scrub.is_some_and(Scrub::looks_inside) {
                wanted.push(found);
            } else {
                layer.set_content(record.node, unread(record))?;
            }
        }
        if which == Which::Copied {
            for found in wanted {
                let record = found.1;
                let Some(copy) = captured.copies.remove(&record.node) else {
                    continue;
                };
                let path = paths.path(found);
                let loaded = copied(copy, &path)?;
                take(
                    record,
                    &path,
                    Ok(loaded),
                    layer,
                    writer.as_deref_mut(),
                    captured,
                    scrub,
                    git.as_deref_mut(),
                    progress,
                )?;
            }
            return Ok(());
        }
        thread::scope(|scope| {
            let (sender, receiver) = bounded(DEPTH);
            let wanted = &wanted;
            scope.spawn(move || {
                let mut batch = Vec::with_capacity(BATCH);
                let mut bytes = 0;
                for found in wanted {
                    let loaded = access.load(*found, progress);
                    bytes += match &loaded {
                        Ok(Loaded::Whole(whole)) => whole.len(),
                        Ok(Loaded::Open(_)) => BATCH_BYTES / 4, // so few descriptors are open
                        Err(_) => 0,
                    };
                    batch.push(loaded);
                    if batch.len() >= BATCH || bytes >= BATCH_BYTES {
                        bytes = 0;
                        let full = std::mem::replace(&mut batch, Vec::with_capacity(BATCH));
                        if sender.send(full).is_err() {
                            return;
                        }
                    }
                }
                // Nobody takes it after an error.
                let _ = sender.send(batch);
            });
            let mut ahead = receiver.iter().flatten();
            for &found in wanted {
                let record = found.1;
                let Some(loaded) = ahead.next() else { break };
                let path = paths.path(found);
                take(
                    record,
                    &path,
                    loaded,
                    layer,
                    writer.as_deref_mut(),
                    captured,
                    scrub,
                    git.as_deref_mut(),
                    progress,
                )?;
            }
            Ok(())
        })
    }
}

impl Captured {
    fn known(&self, record: &FileRecord) -> Option<&Content> {
        self.contents
            .get(&record.identity.place())
            .filter(|(identity, _)| *identity == record.identity)
            .map(|(_, content)| content)
    }

    fn was_left_out(&self, record: &FileRecord) -> bool {
        self.scrubbed.get(&record.identity.place()) == Some(&record.identity)
    }
}

/// A copy by reference, as a file of its own.
fn copied(copy: OwnedFd, path: &[u8]) -> Result<Loaded> {
    let stat =
        fstat(&copy).map_err(|errno| PackError::io("read a copy of", crate::show(path), errno))?;
    let mut file = OpenFile::new(copy, path.to_vec(), Identity::of(&stat));
    file.look()?;
    Ok(Loaded::Open(file))
}

/// What stands for contents that are not stored.
fn unread(record: &FileRecord) -> Content {
    Content {
        size: record.identity.size(),
        pieces: Vec::new().into(),
    }
}

/// A piece of a file.
enum Piece<'b> {
    Data(&'b [u8]),
    Hole(u64),
}

/// Reads a file a piece at a time; its bytes.
fn pieces(file: &OpenFile, mut sink: impl FnMut(Piece<'_>)) -> Result<u64> {
    let mut buffer = vec![0; WHOLE_PIECE];
    let mut source = file.bytes(&Quiet);
    let mut read: u64 = 0;
    loop {
        match source.next(&mut buffer) {
            Ok(Next::End) => return Ok(read),
            Ok(Next::Hole(len)) => {
                read = read.saturating_add(len);
                sink(Piece::Hole(len));
            }
            Ok(Next::Data(len)) => {
                read = read.saturating_add(len as u64);
                sink(Piece::Data(buffer.get(..len).unwrap_or_default()));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(StoreError::Input(error).into()),
        }
    }
}

/// Judges and stores one file.
#[expect(clippy::too_many_arguments, reason = "what a capture carries along")]
fn take(
    record: &FileRecord,
    path: &[u8],
    loaded: Result<Loaded>,
    layer: &mut Layer,
    writer: Option<&mut LayerWriter>,
    captured: &mut Captured,
    scrub: Option<&Scrub<'_>>,
    git: Option<&mut Git>,
    progress: &dyn Progress,
) -> Result<()> {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let metadata = &layer.tree.node(record.node).metadata;
    let stored = loaded.and_then(|loaded| {
        let size = record.identity.size();
        let look = scrub.map_or(Look::Not, |scrub| scrub.wants(path, size, metadata));
        if let Some(scrub) = scrub.filter(|_| look != Look::Not) {
            let judged = match (&loaded, look) {
                (Loaded::Whole(bytes), Look::Stream) => {
                    let mut search = scrub.search(path, size, metadata);
                    search.feed(bytes);
                    scrub.searched(path, size, search)
                }
                (Loaded::Open(file), Look::Stream) => {
                    let mut search = scrub.search(path, size, metadata);
                    let read = pieces(file, |piece| match piece {
                        Piece::Data(bytes) => search.feed(bytes),
                        Piece::Hole(len) => search.hole(len),
                    })?;
                    file.check(read)?;
                    scrub.searched(path, size, search)
                }
                (Loaded::Whole(bytes), _) => scrub.contents(path, bytes, metadata),
                (Loaded::Open(file), _) => {
                    scrub.contents(path, &file.read_whole(&Quiet)?, metadata)
                }
            };
            match judged {
                Judged::Pack => {}
                Judged::Leave => return Ok(None),
                Judged::Instead(bytes) => {
                    return match writer {
                        Some(writer) => git::store_small(git, writer, name, &bytes).map(Some),
                        None => Ok(Some(unread(record))),
                    };
                }
            }
        }
        let Some(writer) = writer else {
            return Ok(Some(unread(record)));
        };
        match loaded {
            Loaded::Whole(bytes) => git::store_small(git, writer, name, &bytes).map(Some),
            Loaded::Open(file) => {
                let content =
                    git::store(git, writer, name, &mut file.bytes(progress), file.size())?;
                file.check(content.size)?;
                Ok(Some(content))
            }
        }
    });
    let place = record.identity.place();
    match stored {
        Ok(Some(content)) => {
            captured
                .contents
                .insert(place, (record.identity, content.clone()));
            layer.set_content(record.node, content)?;
        }
        Ok(None) => {
            captured.scrubbed.insert(place, record.identity);
            captured.left_out.insert(record.node);
        }
        Err(PackError::Changed { .. }) => captured.changed.push(path.to_vec()),
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Bytes that are read twice are counted once.
struct Quiet;

impl Progress for Quiet {}
