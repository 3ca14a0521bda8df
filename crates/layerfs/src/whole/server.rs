//! Answers the kernel for a merged stack.
//!
//! Everything but reads of file contents comes from memory. The tree never changes, so the kernel
//! may keep entries, attributes, links, listings and pages for as long as it likes, and need not
//! tell us of opens at all (`open` and `opendir` answer `ENOSYS`, which it takes as "never ask").

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, InitFlags, IoctlFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyOpen, ReplyStatfs, ReplyXattr, Request,
};
use layerpack_erofs::{BLOCK_SIZE, FileData, FileLayout, Node, NodeId, NodeKind, Rdev};

use super::merge::Merged;
use crate::fetch::Blob;
use crate::fuse::ReplyBuf;
use crate::pool::Pool;
use crate::sync::Mutex;

/// How long the kernel may believe what it was told: it never changes.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Listings kept for directories that are being read.
const LISTINGS: usize = 32;
/// Largest read that the kernel may ask for, in bytes.
const MAX_READ: u32 = 1 << 20;
/// Readahead requests under way at once.
const MAX_BACKGROUND: u16 = 64;
/// Reads that may be queued for the threads that wait.
const WAIT_QUEUE: usize = 4096;

/// A directory's names in order, `.` and `..` first.
#[derive(Debug)]
struct Listing {
    entries: Vec<(Box<[u8]>, NodeId)>,
}

/// What is served.
#[derive(Debug)]
pub(super) struct Shared {
    merged: Merged,
    /// Data of each layer, from the bottom.
    blobs: Vec<Option<Arc<Blob>>>,
    /// Directory that holds each inode, by index; of directories it is the only one.
    parents: Vec<NodeId>,
    bytes: u64,
    pool: Pool,
    listings: Mutex<VecDeque<(NodeId, Arc<Listing>)>>,
    /// Whether the kernel is to check modes, owners and ACLs.
    checks: bool,
}

impl Shared {
    pub(super) fn new(
        merged: Merged,
        blobs: Vec<Option<Arc<Blob>>>,
        wait_threads: usize,
        checks: bool,
    ) -> Self {
        let mut parents = Vec::new();
        let mut bytes = 0_u64;
        for entry in merged.tree().walk() {
            let index = entry.id.index();
            if parents.len() <= index {
                parents.resize(index + 1, NodeId::ROOT);
            }
            if let Some(parent) = parents.get_mut(index) {
                *parent = entry.parent;
            }
            bytes = bytes.saturating_add(size_of_node(&merged.tree().node(entry.id).kind));
        }
        Self {
            merged,
            blobs,
            parents,
            bytes,
            pool: Pool::new("tree-wait", wait_threads, WAIT_QUEUE),
            listings: Mutex::new(VecDeque::new()),
            checks,
        }
    }

    pub(super) fn blobs(&self) -> impl Iterator<Item = &Arc<Blob>> {
        self.blobs.iter().flatten()
    }

    /// Drops what is queued and waits for the threads.
    pub(super) fn close(&self, limit: Duration) {
        self.pool.close(limit);
    }

    /// The inode of a number; `ESTALE` for one that was never given out.
    fn node(&self, ino: INodeNo) -> Result<NodeId, Errno> {
        usize::try_from(ino.0)
            .ok()
            .and_then(|number| number.checked_sub(1))
            .and_then(|index| self.merged.tree().id_at(index))
            .filter(|id| self.merged.tree().node(*id).nlink() > 0)
            .ok_or(Errno::ESTALE)
    }

    fn attr(&self, id: NodeId) -> FileAttr {
        let node = self.merged.tree().node(id);
        let metadata = &node.metadata;
        let size = size_of_node(&node.kind);
        let mtime = time_of(&node);
        FileAttr {
            ino: ino_of(id),
            size,
            blocks: size.div_ceil(512),
            atime: mtime,
            mtime,
            ctime: mtime,
            crtime: mtime,
            kind: type_of(&node.kind),
            perm: metadata.mode,
            nlink: node.nlink(),
            uid: metadata.uid,
            gid: metadata.gid,
            rdev: match node.kind {
                NodeKind::CharDevice(rdev) | NodeKind::BlockDevice(rdev) => encoded(rdev),
                _ => 0,
            },
            blksize: 4096,
            flags: 0,
        }
    }

    fn parent(&self, id: NodeId) -> NodeId {
        self.parents
            .get(id.index())
            .copied()
            .unwrap_or(NodeId::ROOT)
    }

    fn listing(&self, id: NodeId) -> Result<Arc<Listing>, Errno> {
        if !self.merged.tree().is_dir(id) {
            return Err(Errno::ENOTDIR);
        }
        let kept = {
            let listings = self.listings.lock();
            listings
                .iter()
                .find(|(of, _)| *of == id)
                .map(|(_, listing)| Arc::clone(listing))
        };
        if let Some(listing) = kept {
            return Ok(listing);
        }
        let mut entries: Vec<(Box<[u8]>, NodeId)> = vec![
            (Box::from(b".".as_slice()), id),
            (Box::from(b"..".as_slice()), self.parent(id)),
        ];
        entries.extend(
            self.merged
                .tree()
                .children(id)
                .map(|(name, child)| (Box::from(name), child)),
        );
        let listing = Arc::new(Listing { entries });
        let mut listings = self.listings.lock();
        if listings.len() >= LISTINGS {
            listings.pop_front();
        }
        listings.push_back((id, Arc::clone(&listing)));
        Ok(listing)
    }

    /// Fills `buf` with a file's bytes; short only at its end. Without `wait`, `None` says that
    /// something must be fetched.
    fn read(
        &self,
        id: NodeId,
        offset: u64,
        len: u32,
        wait: bool,
        buf: &mut ReplyBuf,
    ) -> Option<Result<(), Errno>> {
        buf.clear();
        let node = self.merged.tree().node(id);
        let NodeKind::File(data) = &node.kind else {
            return Some(Err(if node.kind.is_dir() {
                Errno::EISDIR
            } else {
                Errno::EINVAL
            }));
        };
        let end = offset.saturating_add(u64::from(len)).min(data.size);
        if end <= offset {
            return Some(Ok(()));
        }
        let blob = self
            .blobs
            .get(self.merged.origin(id))
            .and_then(Option::as_ref);
        let runs = match runs(data, offset, end) {
            Some(runs) => runs,
            None => return Some(Err(Errno::EIO)),
        };
        if let [
            Run {
                place: Some(at), ..
            },
        ] = runs.as_slice()
        {
            return self.fetch(blob, *at, end - offset, wait, buf);
        }
        let Ok(total) = usize::try_from(end - offset) else {
            return Some(Err(Errno::EIO));
        };
        // Zeros where there is a hole in the file itself, never for what could not be read.
        let mut bytes = vec![0_u8; total];
        let mut part = ReplyBuf::new();
        for run in runs {
            let Some(at) = run.place else { continue };
            match self.fetch(blob, at, run.len, wait, &mut part) {
                Some(Ok(())) => {}
                other => return other,
            }
            let target = usize::try_from(run.at)
                .ok()
                .zip(usize::try_from(run.len).ok())
                .and_then(|(from, len)| bytes.get_mut(from..from.checked_add(len)?));
            match target {
                Some(target) if target.len() == part.as_slice().len() => {
                    target.copy_from_slice(part.as_slice());
                }
                _ => return Some(Err(Errno::EIO)),
            }
        }
        buf.fill(total).copy_from_slice(&bytes);
        Some(Ok(()))
    }

    /// `len` bytes of a layer's data, all of them or an error.
    fn fetch(
        &self,
        blob: Option<&Arc<Blob>>,
        offset: u64,
        len: u64,
        wait: bool,
        buf: &mut ReplyBuf,
    ) -> Option<Result<(), Errno>> {
        let (Some(blob), Ok(wanted)) = (blob, usize::try_from(len)) else {
            return Some(Err(Errno::EIO));
        };
        let result = if wait {
            blob.read(offset, wanted, buf)
        } else {
            blob.try_read(offset, wanted, buf)?
        };
        Some(match result {
            Ok(()) if buf.as_slice().len() == wanted => Ok(()),
            Ok(()) => {
                tracing::error!(layer = %blob.layer(), offset, len,
                    "a file's bytes lie beyond the end of its layer's data; verify the layer");
                buf.clear();
                Err(Errno::EIO)
            }
            Err(e) => Err(Errno::from_i32(e.errno().raw_os_error())),
        })
    }
}

/// Part of a file: `len` bytes from `at` (counted from where the read begins) lie at `place` of
/// the layer's data, or are a hole.
struct Run {
    at: u64,
    len: u64,
    place: Option<u64>,
}

/// Where the bytes `offset..end` of a file are. `None` if the layout does not say.
fn runs(data: &FileData, offset: u64, end: u64) -> Option<Vec<Run>> {
    match &data.layout {
        FileLayout::Empty => None,
        FileLayout::Contiguous { start } => Some(vec![Run {
            at: 0,
            len: end - offset,
            place: Some(start.byte_offset().checked_add(offset)?),
        }]),
        FileLayout::Chunked { chunk_bits, chunks } => {
            let chunk = 1_u64.checked_shl(u32::from(*chunk_bits))?;
            let mut runs: Vec<Run> = Vec::new();
            let mut from = offset;
            while from < end {
                let index = from / chunk;
                let within = from % chunk;
                let len = (chunk - within).min(end - from);
                let block = chunks.get(usize::try_from(index).ok()?)?;
                let place = match block {
                    Some(block) => Some(block.get().checked_mul(BLOCK_SIZE)?.checked_add(within)?),
                    None => None,
                };
                match runs.last_mut() {
                    Some(last)
                        if last.place.map(|p| p + last.len) == place
                            && last.place.is_some() == place.is_some() =>
                    {
                        last.len += len;
                    }
                    _ => runs.push(Run {
                        at: from - offset,
                        len,
                        place,
                    }),
                }
                from += len;
            }
            Some(runs)
        }
    }
}

fn ino_of(id: NodeId) -> INodeNo {
    INodeNo(id.index() as u64 + 1)
}

fn type_of(kind: &NodeKind) -> FileType {
    match kind {
        NodeKind::Directory => FileType::Directory,
        NodeKind::File(_) => FileType::RegularFile,
        NodeKind::Symlink(_) => FileType::Symlink,
        NodeKind::CharDevice(_) => FileType::CharDevice,
        NodeKind::BlockDevice(_) => FileType::BlockDevice,
        NodeKind::Fifo => FileType::NamedPipe,
        NodeKind::Socket => FileType::Socket,
    }
}

fn size_of_node(kind: &NodeKind) -> u64 {
    match kind {
        NodeKind::File(data) => data.size,
        NodeKind::Symlink(target) => target.len() as u64,
        NodeKind::Directory => BLOCK_SIZE,
        _ => 0,
    }
}

fn time_of(node: &Node) -> SystemTime {
    let mtime = node.metadata.mtime;
    let nanoseconds = Duration::from_nanos(u64::from(mtime.nsec));
    let seconds = Duration::from_secs(mtime.sec.unsigned_abs());
    let whole = if mtime.sec < 0 {
        UNIX_EPOCH.checked_sub(seconds)
    } else {
        UNIX_EPOCH.checked_add(seconds)
    };
    whole
        .and_then(|time| time.checked_add(nanoseconds))
        .unwrap_or(UNIX_EPOCH)
}

/// A device number as the protocol has it.
fn encoded(rdev: Rdev) -> u32 {
    (rdev.minor & 0xff) | (rdev.major << 8) | ((rdev.minor & !0xff) << 12)
}

/// The filesystem as `fuser` wants it.
#[derive(Debug)]
pub(super) struct Server(pub(super) Arc<Shared>);

impl Filesystem for Server {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let mut wanted = InitFlags::FUSE_ASYNC_READ
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_ASYNC_DIO
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_CACHE_SYMLINKS
            | InitFlags::FUSE_NO_OPEN_SUPPORT
            | InitFlags::FUSE_NO_OPENDIR_SUPPORT
            | InitFlags::FUSE_EXPLICIT_INVAL_DATA
            | InitFlags::FUSE_MAX_PAGES;
        if self.0.checks {
            wanted |= InitFlags::FUSE_POSIX_ACL;
        }
        // What the kernel lacks only makes it slower.
        let _ = config.add_capabilities(wanted & config.capabilities());
        // Nothing is written; the number of pages of a read goes by it, though.
        let _ = config.set_max_write(MAX_READ);
        let _ = config.set_max_background(MAX_BACKGROUND);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let shared = &self.0;
        let parent = match shared.node(parent) {
            Ok(id) => id,
            Err(e) => return reply.error(e),
        };
        let found = match name.as_bytes() {
            b"." => Some(parent),
            b".." => Some(shared.parent(parent)),
            name => shared.merged.tree().child(parent, name),
        };
        match found {
            Some(id) => reply.entry(&FOREVER, &shared.attr(id), Generation(0)),
            None => {
                // Number 0: there is no such name, and there never will be.
                let mut attr = shared.attr(NodeId::ROOT);
                attr.ino = INodeNo(0);
                reply.entry(&FOREVER, &attr, Generation(0));
            }
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.0.node(ino) {
            Ok(id) => reply.attr(&FOREVER, &self.0.attr(id)),
            Err(e) => reply.error(e),
        }
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        match self.0.node(ino) {
            Ok(id) => match &self.0.merged.tree().node(id).kind {
                NodeKind::Symlink(target) => reply.data(target),
                _ => reply.error(Errno::EINVAL),
            },
            Err(e) => reply.error(e),
        }
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // Never ask: pages are kept from open to open.
        reply.error(Errno::ENOSYS);
    }

    fn opendir(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // Never ask: listings are kept from open to open.
        reply.error(Errno::ENOSYS);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let id = match self.0.node(ino) {
            Ok(id) => id,
            Err(e) => return reply.error(e),
        };
        let mut buf = ReplyBuf::new();
        match self.0.read(id, offset, size, false, &mut buf) {
            Some(Ok(())) => return reply.data(buf.as_slice()),
            Some(Err(e)) => return reply.error(e),
            None => {}
        }
        drop(buf);
        let shared = Arc::clone(&self.0);
        let job = Box::new(move || {
            let mut buf = ReplyBuf::new();
            match shared.read(id, offset, size, true, &mut buf) {
                Some(Ok(())) => reply.data(buf.as_slice()),
                Some(Err(e)) => reply.error(e),
                None => reply.error(Errno::EIO),
            }
        });
        // A reply that is dropped with its job answers EIO.
        if let Err(job) = self.0.pool.submit(job) {
            job();
        }
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // Never tell: there is nothing to write at a close.
        reply.error(Errno::ENOSYS);
    }

    fn fsync(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn fsyncdir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listing = match self.0.node(ino).and_then(|id| self.0.listing(id)) {
            Ok(listing) => listing,
            Err(e) => return reply.error(e),
        };
        let first = usize::try_from(offset).unwrap_or(usize::MAX);
        for (next, (name, id)) in (1_u64..).zip(&listing.entries).skip(first) {
            let kind = type_of(&self.0.merged.tree().node(*id).kind);
            if reply.add(ino_of(*id), next, kind, OsStr::from_bytes(name)) {
                break;
            }
        }
        reply.ok();
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let listing = match self.0.node(ino).and_then(|id| self.0.listing(id)) {
            Ok(listing) => listing,
            Err(e) => return reply.error(e),
        };
        let first = usize::try_from(offset).unwrap_or(usize::MAX);
        for (next, (name, id)) in (1_u64..).zip(&listing.entries).skip(first) {
            let attr = self.0.attr(*id);
            let name = OsStr::from_bytes(name);
            if reply.add(attr.ino, next, name, &FOREVER, &attr, Generation(0)) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let blocks = self.0.bytes.div_ceil(BLOCK_SIZE);
        let files = self.0.merged.tree().len() as u64;
        reply.statfs(blocks, 0, 0, files, 0, 4096, 255, 4096);
    }

    fn getxattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let id = match self.0.node(ino) {
            Ok(id) => id,
            Err(e) => return reply.error(e),
        };
        match self.0.merged.tree().xattrs(id).get(name.as_bytes()) {
            Some(value) => answer_xattr(value, size, reply),
            None => reply.error(Errno::NO_XATTR),
        }
    }

    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let id = match self.0.node(ino) {
            Ok(id) => id,
            Err(e) => return reply.error(e),
        };
        let mut names = Vec::new();
        for name in self.0.merged.tree().xattrs(id).keys() {
            // Only root may read them.
            if req.uid() != 0 && name.starts_with(b"trusted.") {
                continue;
            }
            names.extend_from_slice(name);
            names.push(0);
        }
        answer_xattr(&names, size, reply);
    }

    fn ioctl(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }
}

/// Gives a value, or its length to who asks with no room.
fn answer_xattr(value: &[u8], size: u32, reply: ReplyXattr) {
    let Ok(len) = u32::try_from(value.len()) else {
        return reply.error(Errno::E2BIG);
    };
    if size == 0 {
        reply.size(len);
    } else if size < len {
        reply.error(Errno::ERANGE);
    } else {
        reply.data(value);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use layerpack_erofs::BlockIndex;

    use super::*;

    fn flat(data: &FileData, offset: u64, end: u64) -> Vec<(u64, u64, Option<u64>)> {
        let runs = runs(data, offset, end).unwrap();
        runs.into_iter().map(|r| (r.at, r.len, r.place)).collect()
    }

    #[test]
    fn runs_follow_chunks_and_join_neighbours() {
        let block = |index| BlockIndex::new(index);
        let sparse = FileData {
            size: 5 * 4096 - 10,
            layout: FileLayout::Chunked {
                chunk_bits: 12,
                chunks: vec![block(7), block(8), None, None, block(3)],
            },
        };
        assert_eq!(
            flat(&sparse, 100, sparse.size),
            [
                (0, 8092, Some(7 * 4096 + 100)),
                (8092, 8192, None),
                (16284, 4086, Some(3 * 4096)),
            ]
        );
        assert_eq!(flat(&sparse, 9000, 9001), [(0, 1, None)]);
        let dense = FileData {
            size: 10_000,
            layout: FileLayout::Contiguous {
                start: block(2).unwrap(),
            },
        };
        assert_eq!(flat(&dense, 5000, 6000), [(0, 1000, Some(2 * 4096 + 5000))]);
        // A layout that is too short for its size is an error, not a hole.
        let short = FileData {
            size: 9000,
            layout: FileLayout::Chunked {
                chunk_bits: 12,
                chunks: vec![block(1)],
            },
        };
        assert!(runs(&short, 0, 9000).is_none());
    }

    #[test]
    fn times_before_the_epoch_and_devices_are_encoded() {
        let mut node = layerpack_erofs::Tree::new(layerpack_erofs::Metadata::default());
        node.node_mut(NodeId::ROOT).metadata.mtime = layerpack_erofs::Timestamp {
            sec: -2,
            nsec: 500_000_000,
        };
        let time = time_of(&node.node(NodeId::ROOT));
        let before = UNIX_EPOCH.duration_since(time).unwrap();
        assert_eq!(before, Duration::from_millis(1500));
        let rdev = Rdev {
            major: 8,
            minor: 0x12345,
        };
        assert_eq!(encoded(rdev), 0x1230_0845);
    }
}
