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

/// `struct fuse_backing_map`.
#[repr(C)]
struct BackingMap {
    fd: i32,
    flags: u32,
    padding: u64,
}
const _: () = assert!(size_of::<BackingMap>() == 16);

/// `FUSE_DEV_IOC_BACKING_OPEN`: `_IOW(229, 1, struct fuse_backing_map)`.
const IOC_BACKING_OPEN: libc::c_ulong = (1 << 30) | (16 << 16) | (229 << 8) | 1;
/// `FUSE_DEV_IOC_BACKING_CLOSE`: `_IOW(229, 2, uint32_t)`.
const IOC_BACKING_CLOSE: libc::c_ulong = (1 << 30) | (4 << 16) | (229 << 8) | 2;

/// Gives the kernel a file that opens of the mounted connection `dev` can be answered with. Returns
/// its number, valid until [`backing_close`]; opens that were answered with it keep the file.
///
/// # Errors
/// `EPERM` without privileges in the first user namespace or where passthrough was not agreed on,
/// `ELOOP` for a file of a stacked filesystem, `ENOTTY` before Linux 6.9.
pub fn backing_open(dev: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<u32> {
    let map = BackingMap {
        fd: file.as_raw_fd(),
        flags: 0,
        padding: 0,
    };
    // SAFETY: the request reads one `BackingMap`, which lives for the time of the call; both
    // descriptors are open for that long.
    let result = unsafe { libc::ioctl(dev.as_raw_fd(), IOC_BACKING_OPEN, &raw const map) };
    u32::try_from(result).map_err(|_| SysError::last("ioctl FUSE_DEV_IOC_BACKING_OPEN", DEVICE))
}

/// Takes a number of [`backing_open`] back.
///
/// # Errors
/// `ENOENT` for a number that is not in use.
pub fn backing_close(dev: BorrowedFd<'_>, backing: u32) -> Result<()> {
    // SAFETY: the request reads one u32, which lives for the time of the call; the descriptor is
    // open for that long.
    let result = unsafe { libc::ioctl(dev.as_raw_fd(), IOC_BACKING_CLOSE, &raw const backing) };
    if result < 0 {
        return Err(SysError::last("ioctl FUSE_DEV_IOC_BACKING_CLOSE", DEVICE));
    }
    Ok(())
}
