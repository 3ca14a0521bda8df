//! Translates requests into calls of the [`BlobSource`] and its answers into messages.

use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use super::abi::{
    self, Attr, AttrOut, Dirent, EntryOut, GetxattrIn, GetxattrOut, InHeader, OpenIn, OpenOut,
    ROOT_ID, ReadIn, StatfsOut, op,
};
use super::channel::{Reply, ReplyBuf};
use super::session::Shared;
use super::{BlobAttr, BlobSource, OpenMode};

/// Seconds the kernel may keep names and attributes. They never change while a name exists,
/// and opening a blob that is gone fails by itself (ESTALE makes the kernel look again).
const VALID_SECONDS: u64 = 3600;
const BLOCK: u64 = 4096;
/// Access mode bits of open flags.
const O_ACCMODE: u32 = 0o3;

/// Answers one request, at once or (for reads that must wait) later from the pool.
pub(crate) fn handle(
    shared: &Arc<Shared>,
    source: &Arc<dyn BlobSource>,
    header: &InHeader,
    body: &[u8],
    reply: Reply,
    answer: &mut ReplyBuf,
) {
    let node = header.nodeid;
    match header.opcode {
        op::FORGET | op::BATCH_FORGET | op::INTERRUPT => reply.none(),
        op::LOOKUP => lookup(source.as_ref(), node, body, reply),
        op::GETATTR => match attr(source.as_ref(), node) {
            Ok(attr) => reply.data(
                AttrOut {
                    attr_valid: VALID_SECONDS,
                    attr,
                    ..AttrOut::default()
                }
                .as_bytes(),
            ),
            Err(e) => reply.error(e),
        },
        op::OPEN => open(shared, source.as_ref(), node, body, reply),
        op::RELEASE => {
            // Before the source may let go of the blob.
            shared.opens.end(reply.channel(), source.as_ref(), node);
            // In this order: one that was counted and not answered would be sent again to who takes
            // over, and counted twice.
            reply.data(&[]);
            source.release(node);
        }
        op::READ => read(shared, source, node, body, reply, answer),
        op::OPENDIR => {
            if node == ROOT_ID {
                reply.data(OpenOut::default().as_bytes());
            } else {
                reply.error(Errno::NOTDIR);
            }
        }
        op::READDIR | op::READDIRPLUS => {
            let plus = header.opcode == op::READDIRPLUS;
            readdir(source.as_ref(), node, body, plus, reply);
        }
        op::RELEASEDIR | op::FLUSH | op::FSYNC | op::FSYNCDIR | op::DESTROY => reply.data(&[]),
        op::STATFS => statfs(source.as_ref(), reply),
        op::GETXATTR => reply.error(Errno::NODATA),
        op::LISTXATTR => match GetxattrIn::read_from_prefix(body) {
            Ok((asked, _)) if asked.size == 0 => reply.data(GetxattrOut::default().as_bytes()),
            Ok(_) => reply.data(&[]),
            Err(_) => reply.error(Errno::PROTO),
        },
        // ENOSYS would reach the caller of ioctl(2), where cp, df and copy-up expect ENOTTY.
        op::IOCTL => reply.error(Errno::NOTTY),
        op::WRITE
        | op::SETATTR
        | op::SYMLINK
        | op::MKNOD
        | op::MKDIR
        | op::UNLINK
        | op::RMDIR
        | op::RENAME
        | op::RENAME2
        | op::LINK
        | op::SETXATTR
        | op::REMOVEXATTR
        | op::CREATE
        | op::FALLOCATE
        | op::TMPFILE => reply.error(Errno::ROFS),
        _ => reply.error(Errno::NOSYS),
    }
}

fn file_attr(blob: &BlobAttr) -> Attr {
    Attr {
        ino: blob.ino,
        size: blob.size,
        blocks: blob.held.div_ceil(512),
        mode: 0o100_444,
        nlink: 1,
        blksize: 4096,
        ..Attr::default()
    }
}

fn attr(source: &dyn BlobSource, node: u64) -> Result<Attr, Errno> {
    if node == ROOT_ID {
        return Ok(Attr {
            ino: ROOT_ID,
            mode: 0o040_555,
            nlink: 2,
            blksize: 4096,
            ..Attr::default()
        });
    }
    source
        .attr(node)
        .as_ref()
        .map(file_attr)
        .ok_or(Errno::STALE)
}

fn entry(blob: &BlobAttr) -> EntryOut {
    EntryOut {
        nodeid: blob.ino,
        entry_valid: VALID_SECONDS,
        attr_valid: VALID_SECONDS,
        attr: file_attr(blob),
        ..EntryOut::default()
    }
}

fn lookup(source: &dyn BlobSource, node: u64, body: &[u8], reply: Reply) {
    if node != ROOT_ID {
        return reply.error(Errno::NOTDIR);
    }
    // The name ends with a NUL.
    let name = body.split(|b| *b == 0).next().unwrap_or_default();
    match source.lookup(name) {
        Some(blob) if blob.ino > ROOT_ID => reply.data(entry(&blob).as_bytes()),
        _ => reply.error(Errno::NOENT),
    }
}

fn open(shared: &Shared, source: &dyn BlobSource, node: u64, body: &[u8], reply: Reply) {
    let Ok((asked, _)) = OpenIn::read_from_prefix(body) else {
        return reply.error(Errno::PROTO);
    };
    if node == ROOT_ID {
        return reply.error(Errno::ISDIR);
    }
    if asked.flags & O_ACCMODE != 0 {
        return reply.error(Errno::ROFS);
    }
    match source.open(node) {
        Ok(mode) => {
            let agreed = shared.negotiated.get();
            let may_lend = mode == OpenMode::Cached && agreed.is_some_and(|n| n.can_pass_through());
            let backing = shared.opens.begin(reply.channel(), source, node, may_lend);
            let how = match (backing, mode) {
                (Some(_), _) => abi::FOPEN_PASSTHROUGH,
                (None, OpenMode::Cached) => abi::FOPEN_KEEP_CACHE,
                (None, OpenMode::Fresh) => 0,
                (None, OpenMode::Direct) => abi::FOPEN_DIRECT_IO,
            };
            reply.data(
                OpenOut {
                    open_flags: how | abi::FOPEN_NOFLUSH,
                    backing_id: backing.unwrap_or(0),
                    ..OpenOut::default()
                }
                .as_bytes(),
            );
        }
        Err(e) => reply.error(e),
    }
}

fn read(
    shared: &Arc<Shared>,
    source: &Arc<dyn BlobSource>,
    node: u64,
    body: &[u8],
    reply: Reply,
    answer: &mut ReplyBuf,
) {
    let Ok((asked, _)) = ReadIn::read_from_prefix(body) else {
        return reply.error(Errno::PROTO);
    };
    // The kernel keeps to max_pages, or to the 128 KiB of old when it does not know it.
    let Some(len) = usize::try_from(asked.size)
        .ok()
        .filter(|n| *n <= (1 << 20).max(usize::try_from(shared.config.max_read).unwrap_or(0)))
    else {
        return reply.error(Errno::INVAL);
    };
    answer.clear();
    match source.try_read(node, asked.offset, len, answer) {
        Some(Ok(())) => {
            reply.data(answer.as_slice());
            return passed(shared, source, node, answer);
        }
        Some(Err(e)) => return reply.error(e),
        None => {}
    }
    let (waiting, sharing) = (Arc::clone(source), Arc::clone(shared));
    let offset = asked.offset;
    let job = Box::new(move || {
        let mut buf = ReplyBuf::new();
        match waiting.read(node, offset, len, &mut buf) {
            Ok(()) => {
                reply.data(buf.as_slice());
                passed(&sharing, &waiting, node, &buf);
            }
            Err(e) => reply.error(e),
        }
    });
    if let Err(job) = shared.pool.submit(job) {
        job();
    }
}

/// Drops a blob's pages when enough of them are there: its reader has its own by now.
fn passed(shared: &Shared, source: &Arc<dyn BlobSource>, node: u64, answer: &ReplyBuf) {
    if source.pages_due(node, answer.as_slice().len() as u64) {
        let source = Arc::clone(source);
        // If there is no room, it is done the next time.
        let _ = shared
            .drops
            .submit(Box::new(move || source.drop_pages(node)));
    }
}

fn statfs(source: &dyn BlobSource, reply: Reply) {
    let blobs = source.list();
    let bytes = blobs
        .iter()
        .fold(0_u64, |sum, (_, blob)| sum.saturating_add(blob.size));
    reply.data(
        StatfsOut {
            blocks: bytes.div_ceil(BLOCK),
            files: blobs.len() as u64 + 1,
            bsize: 4096,
            namelen: 255,
            frsize: 4096,
            ..StatfsOut::default()
        }
        .as_bytes(),
    );
}

fn readdir(source: &dyn BlobSource, node: u64, body: &[u8], plus: bool, reply: Reply) {
    let Ok((asked, _)) = ReadIn::read_from_prefix(body) else {
        return reply.error(Errno::PROTO);
    };
    if node != ROOT_ID {
        return reply.error(Errno::NOTDIR);
    }
    let limit = usize::try_from(asked.size).unwrap_or(0).min(1 << 20);
    let start = usize::try_from(asked.offset).unwrap_or(usize::MAX);
    let mut out = Vec::with_capacity(limit.min(64 * 1024));
    let dots: [(&[u8], Option<BlobAttr>); 2] = [(b".", None), (b"..", None)];
    let blobs = source.list();
    let entries = dots.into_iter().chain(
        blobs
            .iter()
            .map(|(name, blob)| (name.as_slice(), Some(*blob))),
    );
    for (index, (name, blob)) in entries.enumerate().skip(start) {
        let dirent = Dirent {
            ino: blob.map_or(ROOT_ID, |b| b.ino),
            off: index as u64 + 1,
            namelen: u32::try_from(name.len()).unwrap_or(0),
            kind: if blob.is_some() {
                abi::DT_REG
            } else {
                abi::DT_DIR
            },
        };
        let fixed = size_of::<Dirent>() + if plus { size_of::<EntryOut>() } else { 0 };
        let padded = (fixed + name.len()).next_multiple_of(8);
        if out.len() + padded > limit {
            break;
        }
        if plus {
            // A node id of 0 tells the kernel not to look "." and ".." up.
            let found = blob.as_ref().map_or_else(EntryOut::default, entry);
            out.extend_from_slice(found.as_bytes());
        }
        out.extend_from_slice(dirent.as_bytes());
        out.extend_from_slice(name);
        out.resize(out.len().next_multiple_of(8), 0);
    }
    reply.data(&out);
}
