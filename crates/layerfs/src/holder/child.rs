//! A worker as its holder sees it.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal};

use super::control::Who;
use super::{ToWorker, send};

/// A worker.
#[derive(Debug)]
pub(super) struct Child {
    pub(super) pid: Pid,
    pub(super) pidfd: OwnedFd,
    pub(super) link: OwnedFd,
    /// The other end is still there.
    pub(super) link_open: bool,
    /// Whether it is a child of this process.
    pub(super) ours: bool,
    pub(super) program: Rc<OwnedFd>,
    pub(super) version: Option<String>,
    pub(super) ready: Option<Instant>,
    pub(super) stopping: bool,
    /// When it is killed.
    pub(super) leave_by: Option<Instant>,
    /// Since when it was seen dying.
    pub(super) dying: Option<Instant>,
}

impl Child {
    pub(super) fn number(&self) -> u32 {
        self.pid.as_raw_pid().unsigned_abs()
    }

    pub(super) fn who(&self) -> Who {
        Who {
            pid: self.number(),
            version: self.version.clone().unwrap_or_else(|| "unknown".to_owned()),
        }
    }

    pub(super) fn say(&self, message: &ToWorker, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        send(self.link.as_fd(), message, fds)
    }

    pub(super) fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    pub(super) fn has_ended(&self) -> bool {
        has_ended(&self.pidfd)
    }
}

/// Whether the process or thread of this descriptor has ended.
pub(super) fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}
