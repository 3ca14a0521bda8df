//! All names and metadata of a tree, read by several threads before anything is made of them.
//!
//! Whatever writes to an upper is halted meanwhile, so nothing happens here that can happen
//! later: no order, no rules, no tree. Each directory is listed once, and its entries are looked
//! at in parts, so that one large directory keeps all threads busy too.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use rustix::fs::{FileType, Mode, RawDir, Stat, fstat, openat};
use rustix::io::Errno;

use super::attributes;
use super::file::Identity;
use super::open::DIRECTORY;
use super::scan::{Entry, Look, shown};
use super::{DirSource, View};
use crate::error::{PackError, Result};
use crate::filter::Filter;
use crate::path::join;
use crate::warnings::Warnings;

/// Names that are looked at in one go.
const PART: usize = 256;
/// Room for a directory's names, in bytes.
const LIST: usize = 32 << 10;
/// Most threads; more do not help, as they wait for the same directories.
const MOST_THREADS: usize = 4;
/// Directories inside each other, each of which may be open meanwhile.
const DEEPEST: usize = 128;

/// A tree as it was at one moment.
pub(crate) struct Gathered {
    pub(super) root: Entry,
    /// What is in each directory, the root's first.
    pub(super) listings: Vec<Listing>,
    /// Attributes that nobody wants.
    pub(super) dropped: Warnings,
    latest: Option<(i64, u64)>,
    /// There are more entries than are allowed; some were not looked at.
    pub(super) too_many: bool,
}

impl Gathered {
    /// The latest change time of any file with contents: seconds since 1970, nanoseconds.
    pub(crate) fn latest_change(&self) -> Option<(i64, u64)> {
        self.latest
    }
}

/// What is in a directory, in no order.
#[derive(Default)]
pub(super) struct Listing {
    pub(super) parts: Vec<Vec<Entry>>,
    /// Entries that could not be read, by name; without one, the directory itself.
    pub(super) failed: Vec<(Box<[u8]>, PackError)>,
}

impl Listing {
    /// Its entries by name.
    pub(super) fn in_order(self) -> Result<Vec<Entry>> {
        if let Some((_, error)) = self.failed.into_iter().min_by(|(a, _), (b, _)| a.cmp(b)) {
            return Err(error);
        }
        let mut entries: Vec<Entry> = self.parts.into_iter().flatten().collect();
        entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }
}

/// An open directory.
struct Directory {
    id: usize,
    fd: OwnedFd,
    path: Vec<u8>,
    depth: usize,
    /// As it was seen in the one above.
    seen: Identity,
    /// Parts that are not done, its listing being one.
    left: AtomicUsize,
}

enum Work {
    /// A directory to list.
    Directory {
        id: usize,
        above: Option<Arc<Directory>>,
        name: Box<[u8]>,
        seen: Identity,
    },
    /// Some of a directory's names.
    Part {
        directory: Arc<Directory>,
        names: Vec<Box<[u8]>>,
    },
}

#[derive(Default)]
struct State {
    /// The last is next, so that few directories are open at once.
    work: Vec<Work>,
    /// Threads that may still add to it.
    busy: usize,
    listings: Vec<Listing>,
    dropped: Warnings,
    latest: Option<(i64, u64)>,
    entries: u64,
    /// Nobody needs the rest.
    stopped: bool,
    /// Directories are nested deeper than descriptors should be held.
    too_deep: bool,
}

struct Shared<'a> {
    root: BorrowedFd<'a>,
    view: &'a dyn View,
    filter: &'a Filter,
    /// Entries beyond this are an error anyhow.
    most: u64,
    state: Mutex<State>,
    more: Condvar,
}

impl DirSource<'_> {
    /// Reads the whole tree, for [`DirSource::take_in`]. `None` where directories are nested so
    /// deep that it has to be read one by one, by [`DirSource::scan`].
    ///
    /// # Errors
    /// If the root cannot be read. All else is told by `take_in`.
    pub(crate) fn gather(&self) -> Result<Option<Gathered>> {
        let fd = self.opener.root();
        let mut dropped = Warnings::default();
        let root = self.root_entry(fd, &mut dropped)?;
        let shared = Shared {
            root: fd,
            view: self.view,
            filter: self.filter,
            most: self.limits.max_entries,
            state: Mutex::new(State {
                work: vec![Work::Directory {
                    id: 0,
                    above: None,
                    name: Box::default(),
                    seen: Identity::of(&root.stat),
                }],
                listings: vec![Listing::default()],
                dropped,
                ..State::default()
            }),
            more: Condvar::new(),
        };
        let threads = threads();
        thread::scope(|scope| {
            let shared = &shared;
            let mut running = 0;
            for _ in 0..threads {
                let thread = thread::Builder::new().name("gather".to_owned());
                running += usize::from(thread.spawn_scoped(scope, || shared.run()).is_ok());
            }
            if running == 0 {
                shared.run(); // the system has no thread to give
            }
        });
        let state = shared
            .state
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        Ok((!state.too_deep).then_some(Gathered {
            root,
            listings: state.listings,
            dropped: state.dropped,
            latest: state.latest,
            too_many: state.stopped,
        }))
    }
}

/// How many threads gather. Asking the system reads files, so it is done once.
fn threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| {
        thread::available_parallelism().map_or(1, |threads| threads.get().min(MOST_THREADS))
    })
}

/// A thread is no longer busy, also after a panic, so that the others do not wait for it.
struct Busy<'s, 'a>(&'s Shared<'a>);

impl Drop for Busy<'_, '_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.busy -= 1;
        if state.busy == 0 || thread::panicking() {
            self.0.more.notify_all();
        }
    }
}

/// What a thread carries along.
struct Hands {
    attributes: attributes::Reader,
    list: Vec<u8>,
    dropped: Warnings,
}

impl Shared<'_> {
    fn state(&self) -> MutexGuard<'_, State> {
        // Only plain moves happen under the lock: it is never left half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Works until there is nothing left to do.
    fn run(&self) {
        let mut hands = Hands {
            attributes: attributes::Reader::default(),
            list: Vec::with_capacity(LIST),
            dropped: Warnings::default(),
        };
        while let Some((work, _busy)) = self.next() {
            match work {
                Work::Directory {
                    id,
                    above,
                    name,
                    seen,
                } => self.directory(&mut hands, id, above.as_deref(), &name, seen),
                Work::Part { directory, names } => self.part(&mut hands, &directory, &names),
            }
        }
        self.state().dropped.absorb(hands.dropped);
    }

    fn next(&self) -> Option<(Work, Busy<'_, '_>)> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return None;
            }
            if let Some(work) = state.work.pop() {
                state.busy += 1;
                return Some((work, Busy(self)));
            }
            if state.busy == 0 {
                return None;
            }
            state = self
                .more
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn add(&self, work: Work) {
        self.state().work.push(work);
        self.more.notify_one();
    }

    fn fail(&self, id: usize, name: Box<[u8]>, error: PackError) {
        if let Some(listing) = self.state().listings.get_mut(id) {
            listing.failed.push((name, error));
        }
    }

    fn directory(
        &self,
        hands: &mut Hands,
        id: usize,
        above: Option<&Directory>,
        name: &[u8],
        seen: Identity,
    ) {
        let path = above.map_or_else(Vec::new, |above| join(&above.path, name));
        let depth = above.map_or(0, |above| above.depth + 1);
        if depth > DEEPEST {
            let mut state = self.state();
            state.too_deep = true;
            state.stopped = true;
            self.more.notify_all();
            return;
        }
        let name = if above.is_some() { name } else { b"." };
        let parent = above.map_or(self.root, |above| above.fd.as_fd());
        let opened = openat(parent, OsStr::from_bytes(name), DIRECTORY, Mode::empty());
        let fd = match opened {
            Ok(fd) => fd,
            Err(Errno::NOTDIR | Errno::LOOP | Errno::NOENT) => {
                let what = "it was a directory and is none now".to_owned();
                let path = shown(&path);
                return self.fail(id, Box::default(), PackError::Changed { path, what });
            }
            Err(errno) => {
                let error = PackError::io("open directory", shown(&path), errno);
                return self.fail(id, Box::default(), error);
            }
        };
        let directory = Arc::new(Directory {
            id,
            fd,
            path,
            depth,
            seen,
            left: AtomicUsize::new(1),
        });
        if let Err(error) = directory.unchanged() {
            return self.fail(id, Box::default(), error);
        }
        match self.list(hands, &directory) {
            // The last part is this thread's own.
            Ok(rest) => self.part(hands, &directory, &rest),
            Err(errno) => {
                let error = PackError::io("list", shown(&directory.path), errno);
                self.fail(id, Box::default(), error);
            }
        }
    }

    /// Hands a directory's names to whoever has time, but for the last part.
    fn list(&self, hands: &mut Hands, directory: &Arc<Directory>) -> Result<Vec<Box<[u8]>>, Errno> {
        let mut names: Vec<Box<[u8]>> = Vec::new();
        let mut entries = RawDir::new(&directory.fd, hands.list.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                // The directory was removed meanwhile: the last look at it tells.
                Err(Errno::NOENT) => break,
                Err(errno) => return Err(errno),
            };
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            if names.len() == PART {
                let full = std::mem::replace(&mut names, Vec::with_capacity(PART));
                directory.left.fetch_add(1, Ordering::Relaxed);
                self.add(Work::Part {
                    directory: Arc::clone(directory),
                    names: full,
                });
            }
            names.push(name.into());
        }
        Ok(names)
    }

    fn part(&self, hands: &mut Hands, directory: &Arc<Directory>, names: &[Box<[u8]>]) {
        let mut look = Look {
            filter: self.filter,
            view: self.view,
            attributes: &mut hands.attributes,
            dropped: &mut hands.dropped,
        };
        let mut found = Vec::with_capacity(names.len());
        let mut failed = Vec::new();
        let mut latest = None;
        for name in names {
            let path = || -> Cow<'_, [u8]> { Cow::Owned(join(&directory.path, name)) };
            match look.at(directory.fd.as_fd(), name, &path) {
                Ok(Some(entry)) => {
                    if has_contents(&entry.stat) {
                        latest = latest.max(Some(Identity::of(&entry.stat).ctime()));
                    }
                    found.push(entry);
                }
                Ok(None) => {}
                Err(error) => failed.push((name.clone(), error)),
            }
        }
        // Whoever is last: all of it was read while the directory was what it is.
        if directory.left.fetch_sub(1, Ordering::AcqRel) == 1
            && let Err(error) = directory.unchanged()
        {
            failed.push((Box::default(), error));
        }
        self.done(directory, found, failed, latest);
    }

    fn done(
        &self,
        directory: &Arc<Directory>,
        mut found: Vec<Entry>,
        failed: Vec<(Box<[u8]>, PackError)>,
        latest: Option<(i64, u64)>,
    ) {
        let mut state = self.state();
        let state = &mut *state;
        let before = state.work.len();
        for entry in &mut found {
            if FileType::from_raw_mode(entry.stat.st_mode) == FileType::Directory {
                let id = state.listings.len();
                state.listings.push(Listing::default());
                entry.inside = Some(id);
                state.work.push(Work::Directory {
                    id,
                    above: Some(Arc::clone(directory)),
                    name: entry.name.clone(),
                    seen: Identity::of(&entry.stat),
                });
            }
        }
        state.entries += found.len() as u64;
        state.stopped |= state.entries > self.most;
        state.latest = state.latest.max(latest);
        if let Some(listing) = state.listings.get_mut(directory.id) {
            listing.parts.push(found);
            listing.failed.extend(failed);
        }
        if state.work.len() > before || state.stopped {
            self.more.notify_all();
        }
    }
}

impl Directory {
    fn unchanged(&self) -> Result<()> {
        let stat =
            fstat(&self.fd).map_err(|errno| PackError::io("read", shown(&self.path), errno))?;
        match self.seen.difference(&Identity::of(&stat)) {
            None => Ok(()),
            Some(what) => Err(PackError::Changed {
                path: shown(&self.path),
                what: what.to_owned(),
            }),
        }
    }
}

fn has_contents(stat: &Stat) -> bool {
    stat.st_size > 0 && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}
