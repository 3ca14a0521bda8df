//! What the kernel's page cache holds of a file.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::error::{Result, SysError};

/// `cachestat(2)`, the same number on every architecture; from Linux 6.5.
const SYS_CACHESTAT: libc::c_long = 451;

#[repr(C)]
struct Range {
    offset: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct Stat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

const _: () = assert!(size_of::<Range>() == 16 && size_of::<Stat>() == 40);

/// Bytes of the file that are in the page cache, in whole pages.
///
/// # Errors
/// `ENOSYS` before Linux 6.5; `EBADF` for a descriptor that was opened as a path.
pub fn cached_bytes(fd: BorrowedFd<'_>) -> Result<u64> {
    // A length of 0 means: to the end.
    let range = Range { offset: 0, len: 0 };
    let mut stat = Stat::default();
    // SAFETY: the call reads one `Range` and writes one `Stat`, which live for the time of the
    // call and have the kernel's layout; flags must be 0.
    let result = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            fd.as_raw_fd(),
            &raw const range,
            &raw mut stat,
            0_u32,
        )
    };
    if result < 0 {
        return Err(SysError::last("cachestat", "page cache of a file"));
    }
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    Ok(stat.cached.saturating_mul(page))
}
