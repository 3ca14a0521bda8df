//! Opens things below a directory by descriptor, never through a symbolic link.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

use crate::error::{PackError, Result};
use crate::path::join;

/// Open directories kept on the way to the one at hand.
const KEPT: usize = 64;

/// A directory of the source: a name in another one.
#[derive(Debug)]
pub(crate) struct Dir {
    /// The directory that holds it; itself for the root.
    pub parent: u32,
    /// Its name there; empty for the root.
    pub name: Box<[u8]>,
}

/// All directories of the source, the root first.
#[derive(Debug, Default)]
pub(crate) struct Dirs(Vec<Dir>);

impl Dirs {
    /// Adds one.
    pub(crate) fn push(&mut self, parent: u32, name: &[u8]) -> u32 {
        let index = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        self.0.push(Dir {
            parent,
            name: name.into(),
        });
        index
    }

    fn get(&self, index: u32) -> Option<&Dir> {
        self.0.get(usize::try_from(index).ok()?)
    }

    /// Path from the source's root; empty for the root.
    pub(crate) fn path(&self, index: u32) -> Vec<u8> {
        let mut names: Vec<&[u8]> = Vec::new();
        let mut at = index;
        while at != 0 {
            let Some(dir) = self.get(at) else { break };
            names.push(&dir.name);
            at = dir.parent;
        }
        names.reverse();
        names.join(&b'/')
    }
}

/// Opens directories, keeping open those on the way to the last one, so that walking the tree in
/// order opens each about once and deep trees need no more descriptors than shallow ones.
pub(crate) struct Opener {
    root: Arc<OwnedFd>,
    kept: Vec<(u32, Arc<OwnedFd>)>,
}

/// How directories are opened.
pub(super) const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK);

impl Opener {
    /// Opens the source's root. The last component may be a symbolic link: the caller named it.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let flags = DIRECTORY.difference(OFlags::NOFOLLOW);
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(root) => Ok(Self {
                root: Arc::new(root),
                kept: Vec::new(),
            }),
            Err(Errno::NOTDIR) => Err(PackError::UnusableSource {
                path: path.to_owned(),
                why: "it is not a directory; use tar:PATH for archives",
            }),
            Err(errno) => Err(PackError::source(path, errno)),
        }
    }

    /// The source's root.
    pub(super) fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// Another one of the same root, for another thread.
    pub(crate) fn again(&self) -> Self {
        Self {
            root: Arc::clone(&self.root),
            kept: Vec::new(),
        }
    }

    /// Opens a directory.
    pub(crate) fn open(&mut self, dirs: &Dirs, index: u32) -> Result<Arc<OwnedFd>> {
        // The way up until something that is open.
        let mut way = Vec::new();
        let mut at = index;
        let (mut fd, base) = loop {
            if at == 0 {
                break (Arc::clone(&self.root), 0);
            }
            if let Some(place) = self.kept.iter().rposition(|(kept, _)| *kept == at) {
                let fd = self
                    .kept
                    .get(place)
                    .map_or_else(|| Arc::clone(&self.root), |(_, fd)| Arc::clone(fd));
                break (fd, place + 1);
            }
            way.push(at);
            at = dirs.get(at).map_or(0, |dir| dir.parent);
        };
        self.kept.truncate(base);
        for at in way.into_iter().rev() {
            let name: &[u8] = dirs.get(at).map_or(&[], |dir| &dir.name);
            let next = openat(&*fd, OsStr::from_bytes(name), DIRECTORY, Mode::empty()).map_err(
                |errno| match errno {
                    Errno::NOTDIR | Errno::LOOP | Errno::NOENT => PackError::Changed {
                        path: crate::show(&dirs.path(at)),
                        what: "it was a directory and is none now".to_owned(),
                    },
                    errno => PackError::io("open directory", crate::show(&dirs.path(at)), errno),
                },
            )?;
            fd = Arc::new(next);
            if self.kept.len() >= KEPT {
                self.kept.remove(0);
            }
            self.kept.push((at, Arc::clone(&fd)));
        }
        Ok(fd)
    }
}

/// Opens a file for reading, not waiting for anything.
pub(crate) fn open_file(dir: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags =
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    openat(
        dir,
        OsStr::from_bytes(name),
        flags | OFlags::NOATIME,
        Mode::empty(),
    )
    // Only a file's owner may leave its access time alone.
    .or_else(|errno| match errno {
        Errno::PERM => openat(dir, OsStr::from_bytes(name), flags, Mode::empty()),
        errno => Err(errno),
    })
}

/// A path that the kernel resolves to `name` in the directory, for calls without an `at` form.
pub(crate) fn proc_path(dir: impl AsFd, name: &[u8]) -> Vec<u8> {
    use std::os::fd::AsRawFd;
    let fd = dir.as_fd().as_raw_fd();
    join(format!("/proc/self/fd/{fd}").as_bytes(), name)
}
