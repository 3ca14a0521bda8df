//! The part of the kernel's FUSE protocol (`linux/fuse.h`, version 7) that a
//! read-only directory of blobs needs: message layouts and constants.
//!
//! All integers are in the byte order of the machine, as the protocol has it. Every structure
//! has its size asserted, since the kernel cuts messages by these sizes.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Major protocol version. The kernel has never changed it since 2005.
pub(crate) const KERNEL_VERSION: u32 = 7;
/// Newest minor version this transport speaks: the one that brought `FUSE_NOTIFY_RESEND`.
pub(crate) const MINOR_VERSION: u32 = 40;
/// Oldest minor version accepted: structure sizes of before 7.23 (Linux 3.15) differ.
pub(crate) const OLDEST_MINOR: u32 = 23;
/// Node id of the directory.
pub(crate) const ROOT_ID: u64 = 1;
/// Smallest buffer the kernel accepts for reading a request. Requests to a read-only directory
/// are far smaller: the longest carries one file name.
pub(crate) const READ_BUFFER: usize = 16 * 1024;

pub(crate) mod op {
    //! Request numbers (`enum fuse_opcode`).
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const GETXATTR: u32 = 22;
    pub(crate) const LISTXATTR: u32 = 23;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const OPENDIR: u32 = 27;
    pub(crate) const READDIR: u32 = 28;
    pub(crate) const RELEASEDIR: u32 = 29;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const FSYNCDIR: u32 = 30;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const IOCTL: u32 = 39;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const READDIRPLUS: u32 = 44;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const SYMLINK: u32 = 6;
    pub(crate) const MKNOD: u32 = 8;
    pub(crate) const MKDIR: u32 = 9;
    pub(crate) const UNLINK: u32 = 10;
    pub(crate) const RMDIR: u32 = 11;
    pub(crate) const RENAME: u32 = 12;
    pub(crate) const LINK: u32 = 13;
    pub(crate) const SETXATTR: u32 = 21;
    pub(crate) const REMOVEXATTR: u32 = 24;
    pub(crate) const CREATE: u32 = 35;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const RENAME2: u32 = 45;
    pub(crate) const TMPFILE: u32 = 51;
}

pub(crate) mod init {
    //! Capabilities asked for in the answer to INIT (`flags` and, from bit 32, `flags2`).
    pub(crate) const ASYNC_READ: u64 = 1 << 0;
    pub(crate) const DO_READDIRPLUS: u64 = 1 << 13;
    pub(crate) const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub(crate) const ASYNC_DIO: u64 = 1 << 15;
    pub(crate) const PARALLEL_DIROPS: u64 = 1 << 18;
    pub(crate) const MAX_PAGES: u64 = 1 << 22;
    pub(crate) const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub(crate) const INIT_EXT: u64 = 1 << 30;
    pub(crate) const PASSTHROUGH: u64 = 1 << 37;
    pub(crate) const HAS_RESEND: u64 = 1 << 39;
}

/// `FOPEN_DIRECT_IO`: reads bypass the page cache of the blob file.
pub(crate) const FOPEN_DIRECT_IO: u32 = 1 << 0;
/// `FOPEN_KEEP_CACHE`: pages cached by an earlier open stay valid.
pub(crate) const FOPEN_KEEP_CACHE: u32 = 1 << 1;
/// `FOPEN_PASSTHROUGH`: the kernel reads a file that it was given (Linux 6.9).
pub(crate) const FOPEN_PASSTHROUGH: u32 = 1 << 7;
/// `FOPEN_NOFLUSH`: close(2) sends no FLUSH.
pub(crate) const FOPEN_NOFLUSH: u32 = 1 << 5;

/// `FUSE_NOTIFY_RESEND`: asks the kernel to send every request again that was read by a
/// server which is gone (Linux 6.9).
pub(crate) const NOTIFY_RESEND: i32 = 7;

#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug)]
pub(crate) struct InHeader {
    pub(crate) len: u32,
    pub(crate) opcode: u32,
    pub(crate) unique: u64,
    pub(crate) nodeid: u64,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: u32,
    pub(crate) total_extlen: u16,
    pub(crate) padding: u16,
}
const _: () = assert!(size_of::<InHeader>() == 40);

#[repr(C)]
#[derive(IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug)]
pub(crate) struct OutHeader {
    pub(crate) len: u32,
    pub(crate) error: i32,
    pub(crate) unique: u64,
}
const _: () = assert!(size_of::<OutHeader>() == OUT_HEADER_LEN as usize);
/// Length of a message without a body.
pub(crate) const OUT_HEADER_LEN: u32 = 16;

/// What INIT carries up to 7.35; later kernels append `flags2` and more.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug)]
pub(crate) struct InitIn {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) max_readahead: u32,
    pub(crate) flags: u32,
}
const _: () = assert!(size_of::<InitIn>() == 16);

#[repr(C)]
#[derive(IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default)]
pub(crate) struct InitOut {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) max_readahead: u32,
    pub(crate) flags: u32,
    pub(crate) max_background: u16,
    pub(crate) congestion_threshold: u16,
    pub(crate) max_write: u32,
    pub(crate) time_gran: u32,
    pub(crate) max_pages: u16,
    pub(crate) map_alignment: u16,
    pub(crate) flags2: u32,
    pub(crate) max_stack_depth: u32,
    pub(crate) unused: [u32; 6],
}
const _: () = assert!(size_of::<InitOut>() == 64);

#[repr(C)]
#[derive(IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default)]
pub(crate) struct Attr {
    pub(crate) ino: u64,
    pub(crate) size: u64,
    pub(crate) blocks: u64,
    pub(crate) atime: u64,
    pub(crate) mtime: u64,
    pub(crate) ctime: u64,
    pub(crate) atimensec: u32,
    pub(crate) mtimensec: u32,
    pub(crate) ctimensec: u32,
    pub(crate) mode: u32,
    pub(crate) nlink: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) rdev: u32,
    pub(crate) blksize: u32,
    pub(crate) flags: u32,
}
const _: () = assert!(size_of::<Attr>() == 88);

#[repr(C)]
#[derive(IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default)]
pub(crate) struct EntryOut {
    pub(crate) nodeid: u64,
    pub(crate) generation: u64,
    pub(crate) entry_valid: u64,
    pub(crate) attr_valid: u64,
    pub(crate) entry_valid_nsec: u32,
    pub(crate) attr_valid_nsec: u32,
    pub(crate) attr: Attr,
}
const _: () = assert!(size_of::<EntryOut>() == 128);

#[repr(C)]
#[derive(IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default)]
pub(crate) struct AttrOut {
    pub(crate) attr_valid: u64,
    pub(crate) attr_valid_nsec: u32,
    pub(crate) dummy: u32,
    pub(crate) attr: Attr,
}
const _: () = assert!(size_of::<AttrOut>() == 104);

#[repr(C)]
#[derive(FromBytes, Immutable, KnownLayout, Clone, Copy, Debug)]
pub(crate) struct OpenIn {
    pub(crate) flags: u32,
    pub(crate) open_flags: u32,
}
const _: () = assert!(size_of::<OpenIn>() == 8);

#[repr(C)]
#[derive(IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default)]
pub(crate) struct OpenOut {
    pub(crate) fh: u64,
    pub(crate) open_flags: u32,
    pub(crate) backing_id: u32,
}
const _: () = assert!(size_of::<OpenOut>() == 16);

#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug)]
pub(crate) struct ReadIn {
    pub(crate) fh: u64,
    pub(crate) offset: u64,
    pub(crate) size: u32,
    pub(crate) read_flags: u32,
    pub(crate) lock_owner: u64,
    pub(crate) flags: u32,
    pub(crate) padding: u32,
}
const _: () = assert!(size_of::<ReadIn>() == 40);

#[repr(C)]
#[derive(FromBytes, Immutable, KnownLayout, Clone, Copy, Debug)]
pub(crate) struct GetxattrIn {
    pub(crate) size: u32,
    pub(crate) padding: u32,
}
const _: () = assert!(size_of::<GetxattrIn>() == 8);

#[repr(C)]
#[derive(IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default)]
pub(crate) struct GetxattrOut {
    pub(crate) size: u32,
    pub(crate) padding: u32,
}
const _: () = assert!(size_of::<GetxattrOut>() == 8);

#[repr(C)]
#[derive(IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default)]
pub(crate) struct StatfsOut {
    pub(crate) blocks: u64,
    pub(crate) bfree: u64,
    pub(crate) bavail: u64,
    pub(crate) files: u64,
    pub(crate) ffree: u64,
    pub(crate) bsize: u32,
    pub(crate) namelen: u32,
    pub(crate) frsize: u32,
    pub(crate) padding: u32,
    pub(crate) spare: [u32; 6],
}
const _: () = assert!(size_of::<StatfsOut>() == 80);

/// Fixed part of a directory entry; the name follows, padded to 8 bytes.
#[repr(C)]
#[derive(IntoBytes, Immutable, KnownLayout, Clone, Copy, Debug, Default)]
pub(crate) struct Dirent {
    pub(crate) ino: u64,
    pub(crate) off: u64,
    pub(crate) namelen: u32,
    pub(crate) kind: u32,
}
const _: () = assert!(size_of::<Dirent>() == 24);

/// File type bits as directory entries carry them (`S_IFREG >> 12`).
pub(crate) const DT_REG: u32 = 8;
/// Directory type of a directory entry.
pub(crate) const DT_DIR: u32 = 4;
