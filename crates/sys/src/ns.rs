//! Namespaces: user namespaces made only for their id map, `setns`, `pivot_root`.

use std::fmt::Write as _;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::process::Pid;

use crate::error::{Context, Result, SysError};

pub use rustix::thread::ThreadNameSpaceType as Namespaces;

/// One range of an id map, as a line of `/proc/PID/uid_map`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdRange {
    /// First id inside the namespace.
    pub inside: u32,
    /// First id outside, in the namespace of the writer.
    pub outside: u32,
    /// How many ids.
    pub count: u32,
}

/// `struct clone_args` of `clone3(2)`, up to `cgroup` (kernel 5.7).
#[repr(C)]
#[derive(Default)]
pub(crate) struct CloneArgs {
    pub(crate) flags: u64,
    pub(crate) pidfd: u64,
    pub(crate) child_tid: u64,
    pub(crate) parent_tid: u64,
    pub(crate) exit_signal: u64,
    pub(crate) stack: u64,
    pub(crate) stack_size: u64,
    pub(crate) tls: u64,
    pub(crate) set_tid: u64,
    pub(crate) set_tid_size: u64,
    pub(crate) cgroup: u64,
}

const _: () = assert!(size_of::<CloneArgs>() == 88);

/// Forks by `clone3`: 0 in the child, its pid in the parent.
///
/// # Safety
/// The child is a copy of the calling thread only, in a process that may have
/// others: until it execs or exits it may only make system calls (no
/// allocation, no locks, no libc state).
pub(crate) unsafe fn clone3(args: &CloneArgs) -> rustix::io::Result<i32> {
    // SAFETY: `args` is a live repr(C) value of the size passed; no stack is
    // given, so that the child runs on a copy of ours (no CLONE_VM, by contract).
    let rc = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            std::ptr::from_ref(args),
            size_of::<CloneArgs>(),
        )
    };
    if rc < 0 {
        let errno = std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO);
        return Err(rustix::io::Errno::from_raw_os_error(errno));
    }
    Ok(i32::try_from(rc).unwrap_or(i32::MAX))
}

/// Writes the id maps of the user namespace of process `pid`.
///
/// # Errors
/// `EPERM` without privileges over the ids or when a map was written already.
pub fn write_id_maps(pid: Pid, uid_map: &[IdRange], gid_map: &[IdRange]) -> Result<()> {
    for (file, map) in [("uid_map", uid_map), ("gid_map", gid_map)] {
        let mut text = String::new();
        for range in map {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{} {} {}", range.inside, range.outside, range.count);
        }
        let path = format!("/proc/{}/{file}", pid.as_raw_nonzero());
        let fd = rustix::fs::open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
            .context("open", || &path)?;
        rustix::io::write(&fd, text.as_bytes()).context("write", || &path)?;
    }
    Ok(())
}

/// A user namespace that exists only for its id maps, as a descriptor for
/// [`crate::mount::set_idmap`]. No process is left in it.
///
/// # Errors
/// `ENOSPC` or `EUSERS` if user namespaces are used up or disabled
/// (`user.max_user_namespaces`), `EPERM` without privileges over the ids.
pub fn userns_fd(uid_map: &[IdRange], gid_map: &[IdRange]) -> Result<OwnedFd> {
    let (parent_end, child_end) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .context("socketpair", || "for a user namespace")?;
    let (parent_raw, child_raw) = (parent_end.as_raw_fd(), child_end.as_raw_fd());
    let mut pidfd: i32 = -1;
    let args = CloneArgs {
        flags: u64::from(Namespaces::USER.bits()) | u64::from(libc::CLONE_PIDFD.cast_unsigned()),
        pidfd: std::ptr::from_mut(&mut pidfd) as u64,
        exit_signal: u64::from(libc::SIGCHLD.cast_unsigned()),
        ..CloneArgs::default()
    };
    // SAFETY: the child makes only system calls.
    let raw = unsafe { clone3(&args) }.context("clone3", || "a user namespace")?;
    if raw == 0 {
        // Wait for the end of the parent, or to be killed by it.
        // SAFETY: plain system calls; `byte` outlives the read; _exit ends the
        // child without running anything of the parent's.
        unsafe {
            libc::close(parent_raw);
            let mut byte = 0u8;
            libc::read(child_raw, std::ptr::from_mut(&mut byte).cast(), 1);
            libc::_exit(0);
        }
    }
    // SAFETY: the kernel stored a new descriptor there, which nobody else owns.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let result = Pid::from_raw(raw)
        .ok_or_else(|| SysError::new("clone3", "a user namespace", rustix::io::Errno::INVAL))
        .and_then(|pid| {
            write_id_maps(pid, uid_map, gid_map)?;
            let path = format!("/proc/{raw}/ns/user");
            rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                .context("open", || &path)
        });
    let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
    let _ = rustix::io::retry_on_intr(|| {
        rustix::process::waitid(
            rustix::process::WaitId::PidFd(std::os::fd::AsFd::as_fd(&pidfd)),
            rustix::process::WaitIdOptions::EXITED,
        )
    });
    result
}

/// Opens a descriptor of process `pid`.
///
/// # Errors
/// `ESRCH` if there is no such process.
pub fn pidfd_open(pid: Pid) -> Result<OwnedFd> {
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())
        .context("pidfd_open", || pid.as_raw_nonzero())
}

/// Moves the calling thread into `namespaces` of the process behind `pidfd`.
///
/// # Errors
/// `EPERM`, or `EINVAL` for a user namespace in a process with several threads.
pub fn setns(pidfd: BorrowedFd<'_>, namespaces: Namespaces) -> Result<()> {
    rustix::thread::move_into_thread_name_spaces(pidfd, namespaces)
        .context("setns", || format!("descriptor {}", pidfd.as_raw_fd()))
}

/// Gives the calling thread a mount namespace of its own (a copy). The
/// thread's root, working directory and umask stop being shared with other
/// threads.
///
/// # Errors
/// `EPERM` without privileges.
pub fn unshare_mounts() -> Result<()> {
    // SAFETY: NEWNS (and FS, which it implies) do not touch descriptors.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }
        .context("unshare", || "mount namespace")
}

/// Makes `new_root`, a mount point, the root of this mount namespace; the old
/// root is then mounted on it at `put_old`.
///
/// # Errors
/// Those of `pivot_root`.
pub fn pivot_root(new_root: &Path, put_old: &Path) -> Result<()> {
    rustix::process::pivot_root(new_root, put_old).context("pivot_root", || new_root.display())
}
