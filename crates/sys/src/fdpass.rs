//! Messages with descriptors over a unix socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::error::{Context, Result, SysError};

/// Most descriptors in one message.
pub const MAX_FDS: usize = 16;

/// Sends all of `bytes`, the descriptors with the first of them.
///
/// # Errors
/// `EPIPE` if the other end is closed, `EINVAL` for more than [`MAX_FDS`] descriptors.
pub fn send_fds(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(SysError::new(
            "sendmsg",
            format!("{} descriptors", fds.len()),
            Errno::INVAL,
        ));
    }
    let mut rest = bytes;
    while !rest.is_empty() {
        let sent = rustix::io::retry_on_intr(|| {
            sendmsg(
                socket,
                &[IoSlice::new(rest)],
                &mut control,
                SendFlags::NOSIGNAL,
            )
        })
        .context("sendmsg", || "a message with descriptors")?;
        control.clear();
        rest = rest.get(sent..).unwrap_or_default();
    }
    Ok(())
}

/// Receives at most `buffer.len()` bytes and the descriptors that came with
/// them, closed on exec. No bytes: the other end is closed.
///
/// # Errors
/// Those of `recvmsg`; `EMSGSIZE` if descriptors were cut off.
pub fn recv_fds(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = rustix::io::retry_on_intr(|| {
        recvmsg(
            socket,
            &mut [IoSliceMut::new(buffer)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
    })
    .context("recvmsg", || "a message with descriptors")?;
    let mut fds = Vec::new();
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = ancillary {
            fds.extend(received);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(SysError::new(
            "recvmsg",
            "a message with descriptors",
            Errno::MSGSIZE,
        ));
    }
    Ok((message.bytes, fds))
}

/// Takes over a descriptor that this program was started with, and has it
/// closed on exec. `None` if there is no such open descriptor, or if it is one
/// of the standard streams.
///
/// Call it once for a number, before anything else could have opened one.
pub fn inherited(number: i32) -> Option<OwnedFd> {
    if number < 3 {
        return None;
    }
    // SAFETY: fcntl on a number that may or may not be open.
    let rc = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    // SAFETY: it is open, and by contract nobody else in this program owns it.
    (rc == 0).then(|| unsafe { std::os::fd::FromRawFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    #[test]
    fn descriptors_arrive_with_their_bytes() {
        let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        send_fds(a.as_fd(), b"hello", &[write.as_fd()]).unwrap();
        drop(write);
        let mut buffer = [0; 32];
        let (n, fds) = recv_fds(b.as_fd(), &mut buffer).unwrap();
        assert_eq!((&buffer[..n], fds.len()), (&b"hello"[..], 1));
        rustix::io::write(&fds[0], b"x").unwrap();
        drop(fds);
        assert_eq!(rustix::io::read(&read, &mut buffer).unwrap(), 1);
        assert_eq!(rustix::io::read(&read, &mut buffer).unwrap(), 0);
        drop(a);
        assert_eq!(recv_fds(b.as_fd(), &mut buffer).unwrap().0, 0);
    }
}
