//! The crate's only error: which call failed, on what, and why.

use std::fmt;
use std::io;

use rustix::io::Errno;

/// Result of this crate's functions.
pub type Result<T, E = SysError> = std::result::Result<T, E>;

/// A system call that failed.
///
/// The message reads `CALL OBJECT: reason`, and ends with what the kernel said
/// about it where it keeps such a log (mount contexts do).
#[derive(Debug)]
pub struct SysError {
    /// The call, as the manual names it, with its sub-command where it has one.
    pub call: &'static str,
    /// What it was applied to: a path, a process, a mount option.
    pub what: String,
    /// The error number it returned.
    pub errno: Errno,
    /// Messages of the kernel's mount context log, joined; empty if there are none.
    pub log: String,
}

impl SysError {
    /// An error of `call` on `what`.
    pub fn new(call: &'static str, what: impl fmt::Display, errno: Errno) -> Self {
        Self {
            call,
            what: what.to_string(),
            errno,
            log: String::new(),
        }
    }

    /// The last error of a libc call in this thread, as an error of `call` on `what`.
    pub fn last(call: &'static str, what: impl fmt::Display) -> Self {
        let errno = io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO);
        Self::new(call, what, Errno::from_raw_os_error(errno))
    }

    /// The error number as an [`io::Error`], which loses the context.
    pub fn to_io(&self) -> io::Error {
        io::Error::from(self.errno)
    }
}

impl fmt::Display for SysError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {}: {}",
            self.call,
            self.what,
            io::Error::from(self.errno)
        )?;
        if !self.log.is_empty() {
            write!(f, " (kernel: {})", self.log)?;
        }
        Ok(())
    }
}

impl std::error::Error for SysError {}

/// Adds call and object to a rustix result.
pub(crate) trait Context<T> {
    /// Names the call and its object, built only on failure.
    fn context<W: fmt::Display>(self, call: &'static str, what: impl FnOnce() -> W) -> Result<T>;
}

impl<T> Context<T> for rustix::io::Result<T> {
    fn context<W: fmt::Display>(self, call: &'static str, what: impl FnOnce() -> W) -> Result<T> {
        self.map_err(|errno| SysError::new(call, what(), errno))
    }
}
