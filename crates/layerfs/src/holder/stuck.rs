//! Requests that the holder answers itself: those of a killed worker that waits for itself, and those
//! that have waited for a worker for too long.
//!
//! A thread of the worker that mounts a layer asks, through the kernel, another thread of the worker
//! to open the blob. Killed in between, the first waits for an answer that nobody gives, and the
//! process does not end. Its successor must not begin before that. So the holder answers such
//! requests, and those only: what other processes wait for stays for the successor.
//!
//! Where no successor stays, what they wait for fails after a time.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::fuse::abi::{self, InHeader, OutHeader, op};

/// Requests looked at in one go, at most.
const MOST: usize = 4096;
/// Bit of a request's number that says that it is sent again.
const RESENT: u64 = 1 << 63;

/// Whether a process was killed and has not ended yet.
pub(super) fn is_dying(pid: i32) -> bool {
    let Ok(status) = fs_err::read_to_string(format!("/proc/{pid}/status")) else {
        return false;
    };
    let field = |name: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .map(str::trim)
    };
    let pending = |name| {
        field(name)
            .and_then(|mask| u64::from_str_radix(mask, 16).ok())
            .is_some_and(|mask| mask & (1 << 8) != 0)
    };
    field("State:").is_some_and(|state| state.starts_with(['Z', 'X']))
        || pending("SigPnd:")
        || pending("ShdPnd:")
}

fn threads(pid: i32) -> Vec<u32> {
    let entries = fs_err::read_dir(format!("/proc/{pid}/task"));
    entries
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// Answers the requests of a dying process's own threads with EINTR. Nobody else may read the
/// connection meanwhile. Gives how many there were.
pub(super) fn let_go(fuse: &[OwnedFd], pid: i32) -> io::Result<usize> {
    let threads = threads(pid);
    answer(fuse, |header| {
        threads.contains(&header.pid).then_some(Errno::INTR)
    })
}

/// Requests that wait while no worker lives, by their numbers, and since when they were seen to.
#[derive(Debug, Default)]
pub(super) struct Waiting(HashMap<u64, Instant>);

impl Waiting {
    /// Answers with EIO what was seen to wait for `patience`. Nobody else may read the connection
    /// meanwhile. Gives how many there were.
    pub(super) fn give_up(&mut self, fuse: &[OwnedFd], patience: Duration) -> io::Result<usize> {
        let now = Instant::now();
        let mut seen = HashMap::new();
        let answered = answer(fuse, |header| {
            // Nobody waits for the end of an open, and the next worker must hear of it.
            if matches!(header.opcode, op::RELEASE | op::RELEASEDIR | op::DESTROY) {
                return None;
            }
            // Numbers are never used again.
            let number = header.unique & !RESENT;
            let since = self.0.get(&number).copied().unwrap_or(now);
            if now - since >= patience {
                return Some(Errno::IO);
            }
            seen.insert(number, since);
            None
        });
        self.0 = seen;
        answered
    }
}

/// Has the kernel send what is unanswered, and answers what `judge` has an error for. The rest is
/// sent again to the next worker.
fn answer(fuse: &[OwnedFd], judge: impl FnMut(&InHeader) -> Option<Errno>) -> io::Result<usize> {
    let Some(device) = fuse.first() else {
        return Ok(0);
    };
    let flags = fcntl_getfl(device)?;
    fcntl_setfl(device, flags | OFlags::NONBLOCK)?;
    let result = answer_all(device, judge);
    fcntl_setfl(device, flags)?;
    result
}

fn answer_all(
    device: &OwnedFd,
    mut judge: impl FnMut(&InHeader) -> Option<Errno>,
) -> io::Result<usize> {
    let resend = OutHeader {
        len: abi::OUT_HEADER_LEN,
        error: abi::NOTIFY_RESEND,
        unique: 0,
    };
    rustix::io::write(device.as_fd(), resend.as_bytes())?;
    let mut buffer = vec![0_u8; abi::READ_BUFFER];
    let mut answered = 0;
    for _ in 0..MOST {
        let len = match rustix::io::read(device, buffer.as_mut_slice()) {
            Ok(len) => len,
            Err(Errno::AGAIN) => break,
            Err(Errno::INTR | Errno::NOENT) => continue,
            Err(e) => return Err(e.into()),
        };
        let message = buffer.get(..len).unwrap_or_default();
        let Ok((header, _)) = InHeader::read_from_prefix(message) else {
            continue;
        };
        let asks = !matches!(header.opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT);
        if asks && let Some(errno) = judge(&header) {
            let out = OutHeader {
                len: abi::OUT_HEADER_LEN,
                error: -errno.raw_os_error(),
                unique: header.unique,
            };
            match rustix::io::write(device.as_fd(), out.as_bytes()) {
                Ok(_) => answered += 1,
                Err(Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
    Ok(answered)
}
