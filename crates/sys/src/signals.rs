//! Signals read from a descriptor instead of handled.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use rustix::io::Errno;

use crate::error::{Context, Result, SysError};

/// Holds some signals of the calling thread back and lets them be read; on
/// drop they are delivered as before again.
///
/// In a process with other threads those may still get the signals.
#[derive(Debug)]
pub struct SignalFd {
    fd: OwnedFd,
    old: libc::sigset_t,
}

/// A signal that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Its number.
    pub signal: i32,
    /// Pid of the sender, 0 if the kernel sent it.
    pub sender: u32,
}

impl SignalFd {
    /// Holds back the signals with these numbers.
    ///
    /// # Errors
    /// Those of `signalfd`.
    pub fn new(signals: &[i32]) -> Result<Self> {
        // SAFETY: the sets are live; sigemptyset and pthread_sigmask
        // initialise them; signalfd only reads the set.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            let mut old: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for &signal in signals {
                libc::sigaddset(&raw mut set, signal);
            }
            let raw = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if raw < 0 {
                return Err(SysError::last("signalfd", "signals"));
            }
            let fd = OwnedFd::from_raw_fd(raw);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut old);
            Ok(Self { fd, old })
        }
    }

    /// The next signal, if one is waiting.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn read(&self) -> Result<Option<Received>> {
        let mut buffer = [0u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::retry_on_intr(|| rustix::io::read(&self.fd, &mut buffer)) {
            Ok(n) if n == buffer.len() => {}
            Ok(_) | Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(errno).context("read", || "signalfd"),
        }
        // SAFETY: the kernel filled the whole structure, which is plain data;
        // the copy is unaligned-safe.
        let info: libc::signalfd_siginfo = unsafe { ptr::read_unaligned(buffer.as_ptr().cast()) };
        Ok(Some(Received {
            signal: i32::try_from(info.ssi_signo).unwrap_or(0),
            sender: info.ssi_pid,
        }))
    }
}

impl AsFd for SignalFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SignalFd {
    fn drop(&mut self) {
        // SAFETY: `old` was initialised by pthread_sigmask.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.old, ptr::null_mut());
        }
    }
}
