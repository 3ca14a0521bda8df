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

/// A connected pair of sockets that keep messages apart, closed on exec. Each message arrives whole,
/// with its descriptors, or not at all.
///
/// # Errors
/// `EMFILE` and the like.
pub fn pair() -> Result<(OwnedFd, OwnedFd)> {
    rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .context("socketpair", || "AF_UNIX")
}

/// User id and process id of who made the other end of a unix socket (of who called `connect`, or
/// `socketpair`).
///
/// # Errors
/// `ENOTSOCK` and the like.
pub fn peer(socket: BorrowedFd<'_>) -> Result<(u32, rustix::process::Pid)> {
    let found = rustix::net::sockopt::socket_peercred(socket)
        .context("getsockopt SO_PEERCRED", || "a unix socket")?;
    Ok((found.uid.as_raw(), found.pid))
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
    fn a_pair_keeps_messages_apart_and_knows_its_maker() {
        let (a, b) = pair().unwrap();
        send_fds(a.as_fd(), b"one", &[]).unwrap();
        send_fds(a.as_fd(), b"two", &[b.as_fd()]).unwrap();
        let mut buffer = [0; 32];
        let (n, fds) = recv_fds(b.as_fd(), &mut buffer).unwrap();
        assert_eq!((&buffer[..n], fds.len()), (&b"one"[..], 0));
        let (n, fds) = recv_fds(b.as_fd(), &mut buffer).unwrap();
        assert_eq!((&buffer[..n], fds.len()), (&b"two"[..], 1));
        let (uid, pid) = peer(a.as_fd()).unwrap();
        assert_eq!(uid, rustix::process::geteuid().as_raw());
        assert_eq!(pid, rustix::process::getpid());
    }

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
