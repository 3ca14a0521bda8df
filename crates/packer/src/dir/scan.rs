//! The first pass: names, metadata, attributes, links. Either a directory at a time, in the memory
//! of one, or of what was [gathered](super::gather) before.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;

use layerpack_erofs::{FileData, Metadata, NodeId, NodeKind, Rdev};
use rustix::fs::{AtFlags, FileType, RawDir, SeekFrom, Stat, fstat, readlinkat, statat};
use rustix::io::Errno;

use super::file::Identity;
use super::gather::Gathered;
use super::{DirSource, Meaning, View, attributes};
use crate::error::{PackError, Result};
use crate::filter::Filter;
use crate::model::Layer;
use crate::path::{components, join};
use crate::warnings::Warnings;

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

impl<'a> State<'a> {
    fn new(layer: &'a mut Layer) -> Self {
        Self {
            layer,
            attributes: attributes::Reader::default(),
            links: HashMap::new(),
            entries: 0,
            bytes: 0,
            apparent: 0,
        }
    }
}

/// An entry as the filesystem has it.
pub(super) struct Entry {
    /// Its name; empty for the root.
    pub(super) name: Box<[u8]>,
    pub(super) stat: Stat,
    /// Those that are wanted.
    pub(super) attributes: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Of a symbolic link.
    pub(super) target: Option<Vec<u8>>,
    /// Where what was gathered has a directory's entries.
    pub(super) inside: Option<usize>,
}

/// Looks at entries.
pub(super) struct Look<'a> {
    pub(super) filter: &'a Filter,
    pub(super) view: &'a dyn View,
    pub(super) attributes: &'a mut attributes::Reader,
    /// Takes note of attributes that nobody wants.
    pub(super) dropped: &'a mut Warnings,
}

impl Look<'_> {
    /// What `name` is in the directory; `None` if it is to be left out. `path` is that from the
    /// source's root.
    pub(super) fn at<'p>(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        path: &dyn Fn() -> Cow<'p, [u8]>,
    ) -> Result<Option<Entry>> {
        let at = OsStr::from_bytes(name);
        let stat = statat(dir, at, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| gone_or("read", &path(), errno))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if self.filter.asks() {
            let (path, directory) = (path(), kind == FileType::Directory);
            // What is in a directory that is not wanted may be.
            let wanted = directory || self.filter.includes(&path, directory);
            if !wanted || self.filter.excludes_here(&path, directory) {
                return Ok(None);
            }
        }
        let attributes = self
            .attributes_of(dir, name)
            .map_err(|errno| gone_or("read the extended attributes of", &path(), errno))?;
        let target = match kind {
            FileType::Symlink => Some(
                readlinkat(dir, at, Vec::new())
                    .map_err(|errno| gone_or("read symbolic link", &path(), errno))?
                    .into_bytes(),
            ),
            _ => None,
        };
        Ok(Some(Entry {
            name: name.into(),
            stat,
            attributes,
            target,
            inside: None,
        }))
    }

    fn attributes_of(
        &mut self,
        dir: BorrowedFd<'_>,
        file: &[u8],
    ) -> rustix::io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
        let (view, dropped) = (self.view, &mut *self.dropped);
        self.attributes.read(dir, file, |name| {
            let wants = view.wants(name);
            if !wants {
                dropped.dropped(name);
            }
            wants
        })
    }
}

/// Where an entry is.
struct Place<'a> {
    dir: u32,
    parent: NodeId,
    path: &'a [u8],
}

impl DirSource<'_> {
    /// Reads the whole tree into `layer`, the source's root becoming the directory `start`.
    pub(crate) fn scan(
        &mut self,
        layer: &mut Layer,
        start: NodeId,
        defines_root: bool,
    ) -> Result<()> {
        let root = self.root_entry(self.opener.root(), &mut layer.warnings)?;
        let seen = Identity::of(&root.stat);
        let mut state = State::new(layer);
        let dir = self.begin(&mut state, root, start, defines_root)?;
        let mut pending = vec![Pending {
            dir,
            node: start,
            seen,
        }];
        while let Some(next) = pending.pop() {
            let first = pending.len();
            self.directory(&mut state, &next, &mut pending)?;
            // The first by name comes next.
            pending.get_mut(first..).unwrap_or_default().reverse();
        }
        self.end(&mut state, start)
    }

    /// The same of what was gathered.
    pub(crate) fn take_in(
        &mut self,
        gathered: Gathered,
        layer: &mut Layer,
        start: NodeId,
        defines_root: bool,
    ) -> Result<()> {
        let too_many = gathered.too_many;
        let mut listings = gathered.listings;
        layer.warnings.absorb(gathered.dropped);
        let mut state = State::new(layer);
        let dir = self.begin(&mut state, gathered.root, start, defines_root)?;
        let mut pending = vec![(dir, start, 0)];
        while let Some((dir, parent, listing)) = pending.pop() {
            let listing = listings.get_mut(listing).map(std::mem::take);
            let here = self.dirs.path(dir);
            let first = pending.len();
            for entry in listing.unwrap_or_default().in_order()? {
                let (path, inside) = (join(&here, &entry.name), entry.inside);
                let place = Place {
                    dir,
                    parent,
                    path: &path,
                };
                let directory = self.entry(&mut state, &place, entry)?;
                if let (Some((dir, node)), Some(inside)) = (directory, inside) {
                    pending.push((dir, node, inside));
                }
            }
            pending.get_mut(first..).unwrap_or_default().reverse();
        }
        if too_many {
            return Err(self.over("max_entries", self.limits.max_entries, "entries"));
        }
        self.end(&mut state, start)
    }

    /// The source's root.
    pub(super) fn root_entry(&self, fd: BorrowedFd<'_>, dropped: &mut Warnings) -> Result<Entry> {
        let stat = fstat(fd).map_err(|errno| PackError::io("read", shown(b""), errno))?;
        let mut look = Look {
            filter: self.filter,
            view: self.view,
            attributes: &mut attributes::Reader::default(),
            dropped,
        };
        let attributes = look
            .attributes_of(fd, b".")
            .map_err(|errno| gone_or("read the extended attributes of", b"", errno))?;
        Ok(Entry {
            name: Box::default(),
            stat,
            attributes,
            target: None,
            inside: None,
        })
    }

    /// Puts the root in; its number among the directories.
    fn begin(
        &mut self,
        state: &mut State<'_>,
        root: Entry,
        start: NodeId,
        defines_root: bool,
    ) -> Result<u32> {
        let layer = &mut *state.layer;
        let meaning = self
            .view
            .meaning(b"", &root.stat, root.attributes, &mut layer.warnings)?;
        match meaning {
            Meaning::Entry { metadata, opaque } => {
                layer.define_start(start, metadata, defines_root);
                if opaque {
                    layer.add_opaque(start);
                }
            }
            Meaning::Whiteout | Meaning::Nothing => {}
        }
        Ok(self.dirs.push(0, b""))
    }

    fn end(&self, state: &mut State<'_>, start: NodeId) -> Result<()> {
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
            let mut look = Look {
                filter: self.filter,
                view: self.view,
                attributes: &mut state.attributes,
                dropped: &mut state.layer.warnings,
            };
            let found = look.at(fd.as_fd(), name, &|| Cow::Borrowed(path.as_slice()))?;
            let Some(found) = found else { continue };
            let seen = Identity::of(&found.stat);
            let place = Place {
                dir: at.dir,
                parent: at.node,
                path: &path,
            };
            if let Some((dir, node)) = self.entry(state, &place, found)? {
                pending.push(Pending { dir, node, seen });
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

    /// Adds an entry to the layer; of a directory that is to be read too, its number among the
    /// directories and its node.
    fn entry(
        &mut self,
        state: &mut State<'_>,
        at: &Place<'_>,
        entry: Entry,
    ) -> Result<Option<(u32, NodeId)>> {
        let Place { parent, path, .. } = *at;
        let (stat, name) = (&entry.stat, &*entry.name);
        let kind = FileType::from_raw_mode(stat.st_mode);
        self.progress.entry(path);
        self.limits.check_path(path)?;
        state.entries += 1;
        if state.entries > self.limits.max_entries {
            return Err(self.over("max_entries", self.limits.max_entries, "entries"));
        }
        let warnings = &mut state.layer.warnings;
        let meaning = self.view.meaning(path, stat, entry.attributes, warnings)?;
        let (metadata, opaque) = match meaning {
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
                if self.filter.selects() && self.filter.includes(path, true) {
                    state.layer.keep(node);
                }
                if opaque {
                    state.layer.add_opaque(node);
                }
                return Ok(Some((self.dirs.push(at.dir, name), node)));
            }
            FileType::RegularFile => self.file(state, at, name, stat, metadata)?,
            FileType::Symlink => {
                let target = entry.target.unwrap_or_default();
                tree.insert(parent, name, metadata, NodeKind::Symlink(target))?
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
        at: &Place<'_>,
        name: &[u8],
        stat: &Stat,
        metadata: Metadata,
    ) -> Result<NodeId> {
        let kind = NodeKind::File(FileData::empty());
        let node = state.layer.tree.insert(at.parent, name, metadata, kind)?;
        let identity = Identity::of(stat);
        if identity.size() > 0 {
            // Holes are not read: only what has blocks counts.
            let blocks = u64::try_from(stat.st_blocks)
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
            self.files.push(node, at.dir, name, identity);
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
pub(super) fn shown(path: &[u8]) -> String {
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
