//! What the running kernel is, and what it offers.

use std::os::fd::{AsFd as _, AsRawFd as _};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Context, Result, SysError};

/// Major and minor version of the running kernel; zeros if it does not say.
///
/// Distributions back-port features: use this only to choose what to try
/// first, never to refuse.
pub fn kernel_version() -> (u32, u32) {
    parse(&rustix::system::uname().release().to_string_lossy()).unwrap_or((0, 0))
}

/// What the kernel's FUSE offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FuseOffer {
    /// Minor protocol version, of 7.
    pub minor: u32,
    /// Capability bits of INIT (`FUSE_*` in `linux/fuse.h`), `flags2` from bit 32 on.
    pub flags: u64,
}

impl FuseOffer {
    /// Reads a file by itself in place of the server (6.9).
    pub const PASSTHROUGH: u64 = 1 << 37;
    /// Sends unanswered requests again to a new server (6.9).
    pub const RESEND: u64 = 1 << 39;
    /// Requests through a ring in memory (6.14).
    pub const IO_URING: u64 = 1 << 41;

    /// Whether all of these bits are offered.
    #[must_use]
    pub fn has(&self, bits: u64) -> bool {
        self.flags & bits == bits
    }
}

/// Asks the kernel, by a mount that nobody ever sees.
///
/// # Errors
/// Those of opening `/dev/fuse` and of mounting; `EPROTO` for an offer that is not understood.
pub fn fuse_offer() -> Result<FuseOffer> {
    const INIT: u32 = 26;
    const FLAGS_EXT: u32 = 1 << 30;
    let device = crate::fusedev::open()?;
    let _mount = crate::mount::fuse(device.as_fd(), false, 0, "layerpack-probe")?;
    // The smallest buffer that the kernel takes is 8 KiB.
    let mut message = vec![0_u8; 16 << 10];
    let len = rustix::io::retry_on_intr(|| rustix::io::read(&device, &mut message))
        .context("read", || "/dev/fuse")?;
    let word = |at: usize| {
        message
            .get(..len)
            .and_then(|m| m.get(at..at + 4))
            .and_then(|b| b.try_into().ok())
            .map(u32::from_ne_bytes)
    };
    let strange = || SysError::new("read", "/dev/fuse", Errno::PROTO);
    // A header of 40 bytes, then major, minor, readahead, flags, flags2.
    if word(4) != Some(INIT) {
        return Err(strange());
    }
    let (minor, low) = word(44).zip(word(52)).ok_or_else(strange)?;
    let high = if low & FLAGS_EXT == 0 {
        0
    } else {
        word(56).unwrap_or(0)
    };
    Ok(FuseOffer {
        minor,
        flags: u64::from(low) | (u64::from(high) << 32),
    })
}

/// The version of Landlock that the kernel enforces; `None` if it is off or missing.
#[must_use]
pub fn landlock_abi() -> Option<u32> {
    const VERSION: u32 = 1;
    // SAFETY: with this flag the call takes no attributes (null, 0) and touches no memory.
    let abi = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<libc::c_void>(),
            0_usize,
            VERSION,
        )
    };
    u32::try_from(abi).ok().filter(|abi| *abi > 0)
}

/// The version of the KVM interface, 12 since 2007.
///
/// # Errors
/// `ENOENT` without virtualisation, `EACCES` where it may not be used.
pub fn kvm_api() -> Result<u32> {
    const DEVICE: &str = "/dev/kvm";
    /// `KVM_GET_API_VERSION`: `_IO(0xAE, 0)`.
    const GET_API_VERSION: libc::c_ulong = 0xAE00;
    let fd = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .context("open", || DEVICE)?;
    // SAFETY: the request takes no argument and touches no memory.
    let version = unsafe { libc::ioctl(fd.as_raw_fd(), GET_API_VERSION, 0) };
    u32::try_from(version).map_err(|_| SysError::last("ioctl KVM_GET_API_VERSION", DEVICE))
}

fn parse(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_as_distributions_write_them() {
        assert_eq!(parse("6.18.44-fc-v657"), Some((6, 18)));
        assert_eq!(parse("6.12+deb13-amd64"), Some((6, 12)));
        assert_eq!(parse("7.0-rc1"), Some((7, 0)));
        assert_eq!(parse("custom"), None);
        assert!(kernel_version() > (3, 0));
    }
}
