//! Freeing a killed worker that waits for itself.
//!
//! A thread of the worker that mounts a layer asks, through the kernel, another thread of the worker
//! to open the blob. Killed in between, the first waits for an answer that nobody gives, and the
//! process does not end. Its successor must not begin before that. So the holder answers such
//! requests, and those only: what other processes wait for stays for the successor.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::fuse::abi::{self, InHeader, OutHeader, op};

/// Requests looked at in one go, at most.
const MOST: usize = 4096;

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
    let Some(device) = fuse.first() else {
        return Ok(0);
    };
    let flags = fcntl_getfl(device)?;
    fcntl_setfl(device, flags | OFlags::NONBLOCK)?;
    let result = answer_threads(device, &threads(pid));
    fcntl_setfl(device, flags)?;
    result
}

fn answer_threads(device: &OwnedFd, threads: &[u32]) -> io::Result<usize> {
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
        if asks && threads.contains(&header.pid) {
            let out = OutHeader {
                len: abi::OUT_HEADER_LEN,
                error: -Errno::INTR.raw_os_error(),
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
