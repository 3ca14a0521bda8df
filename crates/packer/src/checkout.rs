//! Writes what a stack of layers shows into a directory.
//!
//! The tree is made beside its place and takes that when it is whole. Contents are verified before
//! a byte of them is written. Without the rights to give files away or to make devices, those are
//! left as they can be, with a warning.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use layerpack_erofs::{Metadata, NodeId, NodeKind, Rdev};
use layerpack_store::{Digest, LayerStore};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use crate::content::Content;
use crate::dir::{Dirs, Opener, proc_path};
use crate::error::{PackError, Result};
use crate::export::Contents;
use crate::merge;
use crate::model::Layer;
use crate::options::Progress;
use crate::path::join;
use crate::warnings::Warnings;

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckoutReport {
    /// Names written, directories included.
    pub entries: u64,
    /// Bytes of file contents, holes left out.
    pub bytes: u64,
    /// What could not be made as it is in the layers, in words.
    pub warnings: Vec<String>,
}

/// Writes what the layers given (digests of manifests, bottom first) show into `target`, which
/// must not exist or be an empty directory.
///
/// # Errors
/// [`PackError::Write`], [`PackError::Store`]. The target stays as it was then.
pub fn checkout(
    store: &LayerStore,
    layers: &[Digest],
    target: &Path,
    progress: &dyn Progress,
) -> Result<CheckoutReport> {
    progress.phase("checkout");
    let mut manifests = Vec::with_capacity(layers.len());
    for digest in layers {
        manifests.push((*digest, store.manifest(digest)?));
    }
    let mut warnings = Warnings::default();
    let mut layer = merge::stack(store, &manifests, true, &mut warnings)?;
    merge::overlay::bottom(&mut layer)?;
    let contents = Contents::new(store, manifests.iter().map(|(_, manifest)| manifest))?;
    let beside = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let failed = |source| PackError::Write {
        path: target.display().to_string(),
        source,
    };
    match fs_err::read_dir(target) {
        Ok(mut entries) => {
            if entries.next().is_some() {
                let why = "it is not empty; name a new directory, or an empty one";
                return Err(failed(std::io::Error::other(why)));
            }
        }
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        Err(_) => {}
    }
    let made = tempfile::Builder::new()
        .prefix(".layerpack-")
        .tempdir_in(beside)
        .map_err(failed)?;
    // Removed with all that is in it, whatever its modes are, unless it takes its place.
    let place = made.path().join("tree");
    fs_err::create_dir(&place).map_err(failed)?;
    let writer = Writer {
        layer: &layer,
        contents,
        opener: Opener::new(&place)?,
        dirs: Dirs::default(),
        names: HashMap::new(),
        refused: Refused::default(),
        entries: 1,
        bytes: 0,
        progress,
    };
    let (entries, bytes, refused) = match writer.write() {
        Ok(written) => written,
        Err(error) => {
            open_up(&place);
            return Err(error);
        }
    };
    refused.tell(&mut warnings);
    rustix::fs::rename(&place, target).map_err(|errno| {
        open_up(&place);
        failed(errno.into())
    })?;
    Ok(CheckoutReport {
        entries,
        bytes,
        warnings: warnings.into_vec(),
    })
}

/// Lets a tree that was half written be deleted by its owner.
fn open_up(place: &Path) {
    let mut todo: Vec<PathBuf> = vec![place.to_owned()];
    while let Some(dir) = todo.pop() {
        let _ = rustix::fs::chmod(&dir, Mode::from_raw_mode(0o700));
        let Ok(entries) = fs_err::read_dir(&dir) else {
            continue;
        };
        for entry in entries.filter_map(Result::ok) {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                todo.push(entry.path());
            }
        }
    }
}

/// What the caller may not do.
#[derive(Default)]
struct Refused {
    owners: u64,
    devices: u64,
    xattrs: u64,
}

impl Refused {
    fn tell(&self, warnings: &mut Warnings) {
        for (count, what) in [
            (
                self.owners,
                "entries belong to you: only root can give them away",
            ),
            (self.devices, "devices are missing: only root can make them"),
            (
                self.xattrs,
                "extended attributes are missing: they may not be set here",
            ),
        ] {
            if count > 0 {
                warnings.add(format!("{count} {what}"));
            }
        }
    }
}

struct Writer<'a> {
    layer: &'a Layer,
    contents: Contents,
    opener: Opener,
    dirs: Dirs,
    /// First name of files that have several.
    names: HashMap<NodeId, (u32, Vec<u8>)>,
    refused: Refused,
    entries: u64,
    bytes: u64,
    progress: &'a dyn Progress,
}

/// An entry to be made: where, and what.
struct At<'a> {
    fd: &'a OwnedFd,
    name: &'a [u8],
    path: &'a [u8],
}

impl At<'_> {
    fn failed(&self, errno: Errno) -> PackError {
        PackError::Write {
            path: crate::show(self.path),
            source: errno.into(),
        }
    }
}

impl Writer<'_> {
    fn write(mut self) -> Result<(u64, u64, Refused)> {
        // Directories in the order in which they are gone through, which is that of contents.
        let root = self.dirs.push(0, b"");
        let mut order = Vec::new();
        let mut seen = std::collections::HashSet::new();
        let mut todo = vec![(NodeId::ROOT, root)];
        while let Some((id, dir)) = todo.pop() {
            order.push((id, dir));
            for (name, child) in self.layer.tree.children(id) {
                let node = self.layer.tree.node(child);
                if node.kind.is_dir() {
                    todo.push((child, self.dirs.push(dir, name)));
                } else if (node.nlink() < 2 || seen.insert(child))
                    && let Some(content) = self.layer.content(child)
                {
                    for piece in &content.pieces {
                        self.contents.expect(piece.digest, piece.len);
                    }
                }
            }
        }
        for (id, dir) in &order {
            self.directory(*id, *dir)?;
        }
        // Times of directories change as long as something is put into them.
        for (id, dir) in order.iter().rev() {
            let fd = self.opener.open(&self.dirs, *dir)?;
            let path = self.dirs.path(*dir);
            let at = At {
                fd: &fd,
                name: b".",
                path: &path,
            };
            let metadata = &self.layer.tree.node(*id).metadata;
            self.metadata(&at, metadata, FileType::Directory)?;
        }
        Ok((self.entries, self.bytes, self.refused))
    }

    /// Makes what is in a directory.
    fn directory(&mut self, id: NodeId, dir: u32) -> Result<()> {
        let layer = self.layer;
        let fd: Arc<OwnedFd> = self.opener.open(&self.dirs, dir)?;
        let here = self.dirs.path(dir);
        for (name, child) in layer.tree.children(id) {
            let path = join(&here, name);
            let at = At {
                fd: &fd,
                name,
                path: &path,
            };
            self.progress.entry(&path);
            self.entries += 1;
            let node = layer.tree.node(child);
            if node.kind.is_dir() {
                rustix::fs::mkdirat(at.fd, OsStr::from_bytes(name), Mode::from_raw_mode(0o700))
                    .map_err(|errno| at.failed(errno))?;
                continue;
            }
            if let Some((first_dir, first_name)) = self.names.get(&child).cloned() {
                let first = self.opener.again().open(&self.dirs, first_dir)?;
                let from = OsStr::from_bytes(&first_name);
                rustix::fs::linkat(
                    &*first,
                    from,
                    at.fd,
                    OsStr::from_bytes(name),
                    AtFlags::empty(),
                )
                .map_err(|errno| at.failed(errno))?;
                continue;
            }
            if node.nlink() > 1 {
                self.names.insert(child, (dir, name.to_vec()));
            }
            self.entry(&at, child)?;
        }
        Ok(())
    }

    fn entry(&mut self, at: &At<'_>, id: NodeId) -> Result<()> {
        let node = self.layer.tree.node(id);
        let name = OsStr::from_bytes(at.name);
        let kind = match &node.kind {
            NodeKind::File(_) => {
                let content = self.layer.content(id);
                self.file(at, content.as_ref())?;
                FileType::RegularFile
            }
            NodeKind::Symlink(target) => {
                rustix::fs::symlinkat(OsStr::from_bytes(target), at.fd, name)
                    .map_err(|errno| at.failed(errno))?;
                FileType::Symlink
            }
            NodeKind::CharDevice(rdev) => self.node(at, FileType::CharacterDevice, *rdev)?,
            NodeKind::BlockDevice(rdev) => self.node(at, FileType::BlockDevice, *rdev)?,
            NodeKind::Fifo => self.node(at, FileType::Fifo, Rdev { major: 0, minor: 0 })?,
            NodeKind::Socket => self.node(at, FileType::Socket, Rdev { major: 0, minor: 0 })?,
            NodeKind::Directory => FileType::Directory,
        };
        if kind == FileType::Unknown {
            return Ok(()); // it could not be made
        }
        self.metadata(at, &node.metadata, kind)
    }

    fn node(&mut self, at: &At<'_>, kind: FileType, rdev: Rdev) -> Result<FileType> {
        let device = rustix::fs::makedev(rdev.major, rdev.minor);
        let mode = Mode::from_raw_mode(0o600);
        match rustix::fs::mknodat(at.fd, OsStr::from_bytes(at.name), kind, mode, device) {
            Ok(()) => Ok(kind),
            Err(Errno::PERM) => {
                self.refused.devices += 1;
                Ok(FileType::Unknown)
            }
            Err(errno) => Err(at.failed(errno)),
        }
    }

    fn file(&mut self, at: &At<'_>, content: Option<&Content>) -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o600);
        let file = rustix::fs::openat(at.fd, OsStr::from_bytes(at.name), flags, mode)
            .map_err(|errno| at.failed(errno))?;
        let Some(content) = content else {
            return Ok(());
        };
        for piece in &content.pieces {
            let bytes = self.contents.get(&piece.digest)?;
            let mut done = 0;
            while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
                match rustix::io::pwrite(&file, rest, piece.offset + done as u64) {
                    Ok(0) => return Err(at.failed(Errno::NOSPC)),
                    Ok(n) => done += n,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(at.failed(errno)),
                }
            }
            self.bytes += u64::from(piece.len);
            self.progress.bytes(u64::from(piece.len));
        }
        // Holes are what was not written.
        rustix::fs::ftruncate(&file, content.size).map_err(|errno| at.failed(errno))
    }

    /// Owner first, since that takes set-id bits and capabilities away; times last.
    fn metadata(&mut self, at: &At<'_>, metadata: &Metadata, kind: FileType) -> Result<()> {
        let name = OsStr::from_bytes(at.name);
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        let (uid, gid) = (Uid::from_raw(metadata.uid), Gid::from_raw(metadata.gid));
        match rustix::fs::chownat(at.fd, name, Some(uid), Some(gid), flags) {
            Ok(()) => {}
            Err(Errno::PERM) => self.refused.owners += 1,
            Err(errno) => return Err(at.failed(errno)),
        }
        if kind != FileType::Symlink {
            let mode = Mode::from_raw_mode(u32::from(metadata.mode));
            rustix::fs::chmodat(at.fd, name, mode, AtFlags::empty())
                .map_err(|errno| at.failed(errno))?;
        }
        let path = proc_path(at.fd.as_fd(), at.name);
        for (attribute, value) in &metadata.xattrs {
            let set = rustix::fs::lsetxattr(
                OsStr::from_bytes(&path),
                OsStr::from_bytes(attribute),
                value,
                XattrFlags::empty(),
            );
            match set {
                Ok(()) => {}
                Err(Errno::PERM | Errno::OPNOTSUPP | Errno::ACCESS) => self.refused.xattrs += 1,
                Err(errno) => return Err(at.failed(errno)),
            }
        }
        let time = Timespec {
            tv_sec: metadata.mtime.sec,
            tv_nsec: i64::from(metadata.mtime.nsec),
        };
        let times = Timestamps {
            last_access: time,
            last_modification: time,
        };
        rustix::fs::utimensat(at.fd, name, &times, flags).map_err(|errno| at.failed(errno))
    }
}
