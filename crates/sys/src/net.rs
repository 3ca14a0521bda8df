//! The loopback device of a new network namespace.

use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::error::{Context, Result, SysError};

/// Brings `lo` of the calling thread's network namespace up.
///
/// # Errors
/// `EPERM` without CAP_NET_ADMIN over the namespace.
pub fn loopback_up() -> Result<()> {
    let socket = socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .context("socket", || "AF_INET")?;
    // SAFETY: zero is a valid ifreq; the ioctl reads a name and flags from it.
    let rc = unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
            *to = libc::c_char::from_ne_bytes([*from]);
        }
        let flags = libc::IFF_UP | libc::IFF_RUNNING;
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or(0);
        libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request)
    };
    if rc < 0 {
        return Err(SysError::last("ioctl", "SIOCSIFFLAGS lo"));
    }
    Ok(())
}
