//! The first pass: names, metadata, attributes, links.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;

use layerpack_erofs::{FileData, Metadata, NodeId, NodeKind, Rdev};
use rustix::fs::{AtFlags, FileType, RawDir, SeekFrom, Stat, fstat, readlinkat, statat};
use rustix::io::Errno;

use super::attributes;
use super::file::Identity;
use super::{DirSource, Meaning};
use crate::error::{PackError, Result};
use crate::model::Layer;
use crate::path::components;

/// A directory whose entries are still to be read.
struct Pending {
    dir: u32,
    node: NodeId,
    seen: Identity,
}

/// Bytes of a directory's listing that the kernel gives at once.
const LISTING: usize = 32 << 10;

/// The names in a directory, in one piece of memory: there may be a million.
#[derive(Default)]
struct Names {
    bytes: Vec<u8>,
    /// Where each begins, after a byte with its length.
    starts: Vec<usize>,
}

impl Names {
    fn push(&mut self, name: &[u8]) {
        // The kernel's names have at most 255 bytes.
        self.bytes.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        self.starts.push(self.bytes.len());
        self.bytes.extend_from_slice(name);
    }

    fn sort(&mut self) {
        let bytes = &self.bytes;
        self.starts
            .sort_unstable_by(|a, b| name_at(bytes, *a).cmp(name_at(bytes, *b)));
    }

    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.starts.iter().map(|start| name_at(&self.bytes, *start))
    }
}

fn name_at(bytes: &[u8], start: usize) -> &[u8] {
    let len = start.checked_sub(1).and_then(|before| bytes.get(before));
    let end = start + usize::from(*len.unwrap_or(&0));
    bytes.get(start..end).unwrap_or_default()
}

/// What the scan carries along.
struct State<'a> {
    layer: &'a mut Layer,
    attributes: attributes::Reader,
    /// First sight of inodes with several names.
    links: HashMap<(u64, u64), NodeId>,
    entries: u64,
    bytes: u64,
    /// The same with holes.
    apparent: u64,
}

/// An entry in its directory.
struct Found<'a> {
    dir: u32,
    fd: BorrowedFd<'a>,
    parent: NodeId,
    name: &'a [u8],
    path: &'a [u8],
    stat: &'a Stat,
}

impl DirSource<'_> {
    /// Reads the whole tree into `layer`, the source's root becoming the directory `start`.
    pub(crate) fn scan(
        &mut self,
        layer: &mut Layer,
        start: NodeId,
        defines_root: bool,
    ) -> Result<()> {
        let mut state = State {
            layer,
            attributes: attributes::Reader::default(),
            links: HashMap::new(),
            entries: 0,
            bytes: 0,
            apparent: 0,
        };
        let root = self.dirs.push(0, b"");
        let fd = self.opener.open(&self.dirs, root)?;
        let stat =
            fstat(&*fd).map_err(|errno| PackError::io("read", "the source's root", errno))?;
        match self.meaning(&mut state, fd.as_fd(), b".", b"", &stat)? {
            Meaning::Entry { metadata, opaque } => {
                state.layer.define_start(start, metadata, defines_root);
                if opaque {
                    state.layer.add_opaque(start);
                }
            }
            Meaning::Whiteout | Meaning::Nothing => {}
        }
        let mut pending = vec![Pending {
            dir: root,
            node: start,
            seen: Identity::of(&stat),
        }];
        while let Some(next) = pending.pop() {
            let first = pending.len();
            self.directory(&mut state, &next, &mut pending)?;
            // The first by name comes next.
            pending.get_mut(first..).unwrap_or_default().reverse();
        }
        if self.filter.selects() {
            state.layer.prune(start)?;
        }
        Ok(())
    }

    fn directory(
        &mut self,
        state: &mut State<'_>,
        at: &Pending,
        pending: &mut Vec<Pending>,
    ) -> Result<()> {
        let fd = self.opener.open(&self.dirs, at.dir)?;
        let here = self.dirs.path(at.dir);
        self.unchanged(&here, fd.as_fd(), &at.seen)?;
        let names = self.names(&here, fd.as_fd())?;
        let mut path = here.clone();
        if !path.is_empty() {
            path.push(b'/');
        }
        let start = path.len();
        for name in names.iter() {
            path.truncate(start);
            path.extend_from_slice(name);
            let stat = statat(&*fd, OsStr::from_bytes(name), AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|errno| gone_or("read", &path, errno))?;
            let found = Found {
                dir: at.dir,
                fd: fd.as_fd(),
                parent: at.node,
                name,
                path: &path,
                stat: &stat,
            };
            if let Some(node) = self.entry(state, &found)? {
                let dir = self.dirs.push(at.dir, name);
                pending.push(Pending {
                    dir,
                    node,
                    seen: Identity::of(&stat),
                });
            }
        }
        self.unchanged(&here, fd.as_fd(), &at.seen)
    }

    fn unchanged(&self, path: &[u8], fd: BorrowedFd<'_>, seen: &Identity) -> Result<()> {
        let stat = fstat(fd).map_err(|errno| PackError::io("read", shown(path), errno))?;
        match seen.difference(&Identity::of(&stat)) {
            None => Ok(()),
            Some(what) => Err(PackError::Changed {
                path: shown(path),
                what: what.to_owned(),
            }),
        }
    }

    /// Names in a directory, sorted: the order in which a filesystem lists them is its own.
    fn names(&self, path: &[u8], fd: BorrowedFd<'_>) -> Result<Names> {
        let error = |errno| PackError::io("list", shown(path), errno);
        let mut names = Names::default();
        let mut buffer = Vec::with_capacity(LISTING);
        // The descriptor may have been listed before.
        rustix::fs::seek(fd, SeekFrom::Start(0)).map_err(error)?;
        let mut entries = RawDir::new(fd, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(error)?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn meaning(
        &self,
        state: &mut State<'_>,
        fd: BorrowedFd<'_>,
        name: &[u8],
        path: &[u8],
        stat: &Stat,
    ) -> Result<Meaning> {
        let warnings = &mut state.layer.warnings;
        let xattrs = state
            .attributes
            .read(fd, name, |name| {
                let wants = self.view.wants(name);
                if !wants {
                    warnings.dropped(name);
                }
                wants
            })
            .map_err(|errno| gone_or("read the extended attributes of", path, errno))?;
        self.view
            .meaning(path, stat, xattrs, &mut state.layer.warnings)
    }

    /// Adds an entry to the layer; the node of a directory that is to be read too.
    fn entry(&mut self, state: &mut State<'_>, found: &Found<'_>) -> Result<Option<NodeId>> {
        let Found {
            parent,
            name,
            path,
            stat,
            ..
        } = *found;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if self.filter.excludes_here(path, kind == FileType::Directory) {
            return Ok(None);
        }
        let wanted = self.filter.includes(path, kind == FileType::Directory);
        if !wanted && kind != FileType::Directory {
            return Ok(None);
        }
        self.progress.entry(path);
        self.limits.check_path(path)?;
        state.entries += 1;
        if state.entries > self.limits.max_entries {
            return Err(self.over("max_entries", self.limits.max_entries, "entries"));
        }
        let (metadata, opaque) = match self.meaning(state, found.fd, name, path, stat)? {
            Meaning::Nothing => return Ok(None),
            Meaning::Whiteout => {
                state.layer.add_whiteout(parent, name.to_vec());
                return Ok(None);
            }
            Meaning::Entry { metadata, opaque } => (metadata, opaque),
        };
        let tree = &mut state.layer.tree;
        let inode = (stat.st_dev, stat.st_ino);
        let linked = kind != FileType::Directory && stat.st_nlink > 1;
        if linked && let Some(&first) = state.links.get(&inode) {
            tree.link(parent, name, first)?;
            return Ok(None);
        }
        let rdev = || Rdev {
            major: rustix::fs::major(stat.st_rdev),
            minor: rustix::fs::minor(stat.st_rdev),
        };
        let node = match kind {
            FileType::Directory => {
                let node = tree.insert(parent, name, metadata, NodeKind::Directory)?;
                if wanted && self.filter.selects() {
                    state.layer.keep(node);
                }
                if opaque {
                    state.layer.add_opaque(node);
                }
                return Ok(Some(node));
            }
            FileType::RegularFile => self.file(state, found, metadata)?,
            FileType::Symlink => {
                let target = readlinkat(found.fd, OsStr::from_bytes(name), Vec::new())
                    .map_err(|errno| gone_or("read symbolic link", path, errno))?;
                tree.insert(
                    parent,
                    name,
                    metadata,
                    NodeKind::Symlink(target.into_bytes()),
                )?
            }
            FileType::Fifo => tree.insert(parent, name, metadata, NodeKind::Fifo)?,
            FileType::Socket => tree.insert(parent, name, metadata, NodeKind::Socket)?,
            FileType::CharacterDevice => {
                tree.insert(parent, name, metadata, NodeKind::CharDevice(rdev()))?
            }
            FileType::BlockDevice => {
                tree.insert(parent, name, metadata, NodeKind::BlockDevice(rdev()))?
            }
            FileType::Unknown => return Err(PackError::unsupported(path, "its type is not known")),
        };
        if linked {
            state.links.insert(inode, node);
        }
        Ok(None)
    }

    fn file(
        &mut self,
        state: &mut State<'_>,
        found: &Found<'_>,
        metadata: Metadata,
    ) -> Result<NodeId> {
        let node = state.layer.tree.insert(
            found.parent,
            found.name,
            metadata,
            NodeKind::File(FileData::empty()),
        )?;
        let identity = Identity::of(found.stat);
        if identity.size() > 0 {
            // Holes are not read: only what has blocks counts.
            let blocks = u64::try_from(found.stat.st_blocks)
                .unwrap_or_default()
                .saturating_mul(512);
            state.bytes = state.bytes.saturating_add(identity.size().min(blocks));
            if state.bytes > self.limits.max_bytes {
                return Err(self.over("max_bytes", self.limits.max_bytes, "bytes"));
            }
            state.apparent = state.apparent.saturating_add(identity.size());
            if state.apparent > self.limits.max_apparent {
                let limit = self.limits.max_apparent;
                return Err(self.over("max_apparent", limit, "bytes, holes included"));
            }
            self.files.push(node, found.dir, found.name, identity);
        }
        Ok(node)
    }

    fn over(&self, name: &'static str, limit: u64, unit: &'static str) -> PackError {
        PackError::Limit {
            object: "the source".to_owned(),
            name,
            limit,
            unit,
        }
    }
}

/// A path for messages; the root has no name of its own.
fn shown(path: &[u8]) -> String {
    if components(path).is_empty() {
        "the source's root".to_owned()
    } else {
        crate::show(path)
    }
}

/// An entry that was listed and cannot be found was removed meanwhile.
pub(super) fn gone_or(action: &'static str, path: &[u8], errno: Errno) -> PackError {
    match errno {
        Errno::NOENT => PackError::Changed {
            path: shown(path),
            what: "it was removed".to_owned(),
        },
        errno => PackError::io(action, shown(path), errno),
    }
}
