//! One descriptor of `/dev/fuse`: reading requests, writing answers.
//!
//! An answer has to be written to the descriptor its request was read from (the kernel keeps a
//! queue for each), so a [`Reply`] carries its channel and can be answered from any thread.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::abi::{self, OUT_HEADER_LEN, OutHeader};

/// One descriptor of a mounted connection.
#[derive(Debug)]
pub(crate) struct Channel {
    file: File,
}

/// Why no further request will come from a channel.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The filesystem was unmounted or the connection aborted.
    Unmounted,
    /// The descriptor cannot be read.
    Failed(std::io::Error),
}

impl Channel {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self {
            file: File::from(fd),
        }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Reads one request into `buf` and returns its length.
    pub(crate) fn receive(&self, buf: &mut [u8]) -> Result<usize, Ended> {
        loop {
            match (&self.file).read(buf) {
                Ok(0) => return Err(Ended::Unmounted),
                Ok(n) => return Ok(n),
                Err(e) => match Errno::from_io_error(&e) {
                    // ENOENT: the request was interrupted before it could be copied.
                    Some(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
                    Some(Errno::NODEV | Errno::CONNABORTED) => return Err(Ended::Unmounted),
                    _ => return Err(Ended::Failed(e)),
                },
            }
        }
    }

    /// Writes one message made of a header and a body, in one call as the protocol wants it.
    fn send(&self, unique: u64, error: i32, body: &[u8]) {
        let Ok(len) = u32::try_from(size_of::<OutHeader>() + body.len()) else {
            return;
        };
        let header = OutHeader { len, error, unique };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(body)];
        let parts = if body.is_empty() {
            parts.get(..1).unwrap_or(&parts)
        } else {
            &parts
        };
        loop {
            match (&self.file).write_vectored(parts) {
                // The device takes a message whole or refuses it.
                Ok(written) if written == size_of::<OutHeader>() + body.len() => return,
                Ok(written) => {
                    tracing::error!(unique, written, "FUSE answer was cut short");
                    return;
                }
                Err(e) => match Errno::from_io_error(&e) {
                    Some(Errno::INTR) => {}
                    // The reader was interrupted, or the mount is gone: nobody waits.
                    Some(Errno::NOENT | Errno::NODEV | Errno::CONNABORTED | Errno::PERM) => {
                        return;
                    }
                    _ => {
                        tracing::warn!(unique, error = %e, "FUSE answer was not accepted");
                        return;
                    }
                },
            }
        }
    }

    /// Asks the kernel to send requests again that another process read and never answered.
    /// Kernels before 6.9 refuse; the error says so.
    pub(crate) fn request_resend(&self) -> std::io::Result<()> {
        let header = OutHeader {
            len: OUT_HEADER_LEN,
            error: abi::NOTIFY_RESEND,
            unique: 0,
        };
        (&self.file).write_all(header.as_bytes())
    }
}

/// The duty to answer one request. Dropped unanswered, it answers EIO.
#[derive(Debug)]
pub(crate) struct Reply {
    channel: Arc<Channel>,
    unique: u64,
    answered: bool,
}

impl Reply {
    pub(crate) fn new(channel: Arc<Channel>, unique: u64) -> Self {
        Self {
            channel,
            unique,
            answered: false,
        }
    }

    /// Where the answer goes.
    pub(crate) fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    /// Success with these bytes.
    pub(crate) fn data(mut self, body: &[u8]) {
        self.answered = true;
        self.channel.send(self.unique, 0, body);
    }

    /// Failure.
    pub(crate) fn error(mut self, errno: Errno) {
        self.answered = true;
        self.channel.send(self.unique, -errno.raw_os_error(), &[]);
    }

    /// The request takes no answer (FORGET and its like).
    pub(crate) fn none(mut self) {
        self.answered = true;
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.answered {
            self.channel
                .send(self.unique, -Errno::IO.raw_os_error(), &[]);
        }
    }
}

/// A buffer for the bytes of one answer, used again from request to request.
///
/// It grows only when bytes are at hand, so a request that waits for a store holds no memory.
#[derive(Debug, Default)]
pub struct ReplyBuf {
    bytes: Vec<u8>,
    len: usize,
}

impl ReplyBuf {
    /// An empty buffer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the answer `len` bytes long and hands them out to be overwritten, all of them:
    /// what they hold before is unspecified. A caller that fails must call
    /// [`ReplyBuf::clear`] or return an error.
    pub fn fill(&mut self, len: usize) -> &mut [u8] {
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
        self.len = len;
        self.bytes.get_mut(..len).unwrap_or_default()
    }

    /// Forgets what was filled in.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// The bytes filled in.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}
