//! Descriptors of `/dev/fuse`.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

use crate::error::{Context, Result, SysError};

const DEVICE: &str = "/dev/fuse";

/// `FUSE_DEV_IOC_CLONE`: `_IOR(229, 0, uint32_t)`.
const IOC_CLONE: libc::c_ulong = (2 << 30) | (4 << 16) | (229 << 8);

/// Opens `/dev/fuse`: a connection that has yet to be mounted.
///
/// # Errors
/// `ENOENT` or `ENODEV` if the kernel has no FUSE, `EACCES` or `EPERM` without privileges.
pub fn open() -> Result<OwnedFd> {
    rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .context("open", || DEVICE)
}

/// Another descriptor of the mounted connection `fd`, with a queue of its own: an answer has to
/// go to the descriptor its request came from.
///
/// # Errors
/// `EINVAL` if `fd` is not a mounted connection.
pub fn clone(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    let new = open()?;
    let source = u32::try_from(fd.as_raw_fd())
        .map_err(|_| SysError::new("ioctl", DEVICE, rustix::io::Errno::BADF))?;
    // SAFETY: the request reads one u32, which `source` is for the time of the call; both
    // descriptors are open for that long.
    let result = unsafe { libc::ioctl(new.as_raw_fd(), IOC_CLONE, &raw const source) };
    if result < 0 {
        return Err(SysError::last("ioctl FUSE_DEV_IOC_CLONE", DEVICE));
    }
    Ok(new)
}
