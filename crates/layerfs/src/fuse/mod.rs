//! A small FUSE transport for one directory of read-only, immutable blobs.
//!
//! The kernel's EROFS reads layer data from files; this module is what answers those reads. It
//! knows nothing of layers: a [`BlobSource`] names the blobs and gives their bytes.
//!
//! Three properties decide the shape:
//!
//! * **No state in the transport.** Node ids and blob inode numbers are the same thing, chosen
//!   by the source and stable for the blob's content; file handles are always 0. A process that
//!   is handed the descriptors of a live mount can serve it without knowing what was said
//!   before: [`Session::resume`] does that and asks the kernel to send requests again that were
//!   in flight. Who opened the descriptors, and whether INIT was already answered, is the
//!   caller's business.
//! * **A slow store never stalls what is cached.** Each channel's thread answers only what
//!   [`BlobSource::try_read`] has at hand; anything that must wait goes to a bounded pool.
//! * **Every request is answered.** A reply that is dropped unanswered (error path, panic)
//!   answers EIO. Nothing is ever answered with bytes that the source did not give.

pub(crate) mod abi;
mod channel;
mod dispatch;
mod passthrough;

mod session;

pub use channel::ReplyBuf;
pub use rustix::io::Errno;
pub use session::{Negotiated, Session, SessionConfig};

/// Name, size and identity of one blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobAttr {
    /// Inode number, at least 2 (1 is the directory). The same number always means the same
    /// bytes for as long as the mount lives: the kernel keeps cached pages by it.
    pub ino: u64,
    /// Size in bytes.
    pub size: u64,
    /// Bytes held locally; only shown as `st_blocks`.
    pub held: u64,
}

/// How the kernel is to read an opened blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// Through the page cache of the blob file, kept between opens.
    Cached,
    /// Through the page cache, after dropping what earlier opens left there.
    Fresh,
    /// Past it: only the reader above (EROFS) caches.
    Direct,
}

/// The directory a [`Session`] serves. Called from many threads at once.
///
/// Nothing in here may touch the mount that the session serves: that would wait for itself.
pub trait BlobSource: Send + Sync + 'static {
    /// The blob of that name, or `None` (ENOENT).
    fn lookup(&self, name: &[u8]) -> Option<BlobAttr>;

    /// The blob of that inode number, or `None` (ESTALE).
    fn attr(&self, ino: u64) -> Option<BlobAttr>;

    /// All names, in a stable order.
    fn list(&self) -> Vec<(Vec<u8>, BlobAttr)>;

    /// An open begins. Errors are passed to the opener.
    ///
    /// # Errors
    /// The errno that open(2) is to give, for instance `ESTALE` for a blob that is gone.
    fn open(&self, ino: u64) -> Result<OpenMode, Errno>;

    /// An open ended (once for each successful [`BlobSource::open`]).
    fn release(&self, ino: u64);

    /// A file that holds the blob's bytes, all of them, for the kernel to read by itself; `None`
    /// if there is none. What it gives stays readable until [`BlobSource::give_back`], and
    /// should this process die, until nobody has the blob open.
    fn lend(&self, _ino: u64) -> Option<std::os::fd::OwnedFd> {
        None
    }

    /// The kernel no longer reads what [`BlobSource::lend`] gave.
    fn give_back(&self, _ino: u64) {}

    /// An open ends that may be the last one, and is still counted; or one that an earlier process
    /// answered. Not called beside [`BlobSource::lend`].
    fn closed(&self, _ino: u64) {}

    /// Bytes of a blob went to the kernel, which keeps them. Returns whether it is to drop the
    /// pages that it has of the blob now.
    fn pages_due(&self, _ino: u64, _bytes: u64) -> bool {
        false
    }

    /// Has the kernel drop the pages of a blob that nobody waits for. May itself ask this source, so
    /// it is not called by who answers.
    fn drop_pages(&self, _ino: u64) {}

    /// Fills `buf` with `len` bytes from `offset` if that needs no waiting for a store;
    /// `None` says that it does. Short only at the end of the blob.
    fn try_read(
        &self,
        ino: u64,
        offset: u64,
        len: usize,
        buf: &mut ReplyBuf,
    ) -> Option<Result<(), Errno>>;

    /// As [`BlobSource::try_read`], but may wait. Must end within a bounded time.
    ///
    /// # Errors
    /// The errno that read(2) is to give: `EIO`, or `ETIMEDOUT` when the bytes did not come in
    /// time.
    fn read(&self, ino: u64, offset: u64, len: usize, buf: &mut ReplyBuf) -> Result<(), Errno>;
}
