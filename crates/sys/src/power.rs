//! A filesystem as a power cut leaves it: for tests of what is found afterwards.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::error::{Result, SysError};

/// `FS_IOC_SHUTDOWN`, of ext4, XFS, F2FS and others: `_IOR('X', 125, __u32)`.
const SHUTDOWN: libc::c_ulong = (2 << 30) | (4 << 16) | (0x58 << 8) | 125;
/// Not even the journal's own log is written out.
const NO_LOG_FLUSH: u32 = 2;

/// Cuts off the filesystem of an open file or directory from its disk: what is not durable yet is
/// lost, and everything fails that would read or write the disk, until it is unmounted and mounted
/// again.
///
/// # Errors
/// `EPERM` without privileges, `ENOTTY` for filesystems that cannot.
pub fn cut(file: BorrowedFd<'_>) -> Result<()> {
    let how = NO_LOG_FLUSH;
    // SAFETY: the request reads one u32, which `how` is for the time of the call; the
    // descriptor is open for that long.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), SHUTDOWN, &raw const how) };
    if result < 0 {
        return Err(SysError::last("ioctl FS_IOC_SHUTDOWN", "a filesystem"));
    }
    Ok(())
}
