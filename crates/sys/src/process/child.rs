//! The child's side of [`super::spawn`]: between fork and exec, with nothing but system calls on
//! memory that was prepared before the fork.

use std::os::fd::{AsRawFd, RawFd};
use std::ptr;

use super::{KIND_FAILURE, KIND_PID, Prepared, Program, Stage};
use crate::ns::{CloneArgs, clone3};

/// Highest capability number tried; the kernel ends the list with `EINVAL`.
const CAPABILITY_LIMIT: libc::c_int = 64;

fn errno() -> i32 {
    // SAFETY: the location is this thread's and always valid.
    unsafe { *libc::__errno_location() }
}

/// Sends a record and, for a failure, ends the process.
unsafe fn report(status: RawFd, kind: u8, stage: u8, number: i32) {
    let [a, b, c, d] = number.to_ne_bytes();
    let record = [kind, stage, a, b, c, d];
    // SAFETY: the buffer is live and of the size given.
    unsafe {
        libc::send(
            status,
            record.as_ptr().cast(),
            record.len(),
            libc::MSG_NOSIGNAL,
        );
    }
}

unsafe fn fail(status: RawFd, stage: Stage, errno: i32) -> ! {
    // SAFETY: system calls only.
    unsafe {
        report(status, KIND_FAILURE, stage as u8, errno);
        libc::_exit(125)
    }
}

/// Fails at `$stage` unless the call gave something other than a negative value.
macro_rules! step {
    ($p:expr, $stage:expr, $call:expr) => {
        if $call < 0 {
            fail($p.status, $stage, errno());
        }
    };
}

/// The child's side of [`spawn`].
///
/// # Safety
/// Must be called in a forked child whose memory holds `p`; makes system calls only.
pub(super) unsafe fn child(p: &Prepared<'_>) -> ! {
    // SAFETY: every pointer passed below points into `p`, the launch it
    // borrows from, or the stack, all alive in this copy of the caller's
    // memory; the raw set*id calls are used because the libc wrappers would
    // signal threads that this process does not have.
    unsafe {
        // Should it fail, the second time says so.
        close_all_but(&p.keep_first);
        for tasks in &p.launch.cgroup_tasks {
            step!(
                p,
                Stage::Cgroup,
                libc::write(tasks.as_raw_fd(), c"0".as_ptr().cast(), 1)
            );
        }
        libc::syscall(libc::SYS_keyctl, libc::KEYCTL_JOIN_SESSION_KEYRING, 0usize);
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        if p.launch.cgroup_namespace {
            step!(
                p,
                Stage::CgroupNamespace,
                libc::unshare(libc::CLONE_NEWCGROUP)
            );
        }
        if let Some(join) = &p.launch.join {
            let flags = join.namespaces.bits().cast_signed();
            step!(p, Stage::Join, libc::setns(join.pidfd.as_raw_fd(), flags));
            let args = CloneArgs {
                flags: u64::from(libc::CLONE_PARENT.cast_unsigned()),
                ..CloneArgs::default()
            };
            match clone3(&args) {
                Ok(0) => {}
                Ok(pid) => {
                    report(p.status, KIND_PID, 0, pid);
                    libc::_exit(0);
                }
                Err(e) => fail(p.status, Stage::Fork, e.raw_os_error()),
            }
        }
        if p.launch.gate {
            let mut byte = 0u8;
            let n = libc::recv(p.status, ptr::from_mut(&mut byte).cast(), 1, 0);
            if n != 1 {
                fail(p.status, Stage::Gate, libc::EPIPE);
            }
        }
        if p.launch.session {
            step!(p, Stage::Session, libc::setsid());
        }
        for (target, &fd) in (0..).zip(&p.stdio) {
            step!(p, Stage::Streams, libc::dup2(fd, target));
        }
        if p.launch.terminal {
            step!(p, Stage::Terminal, libc::ioctl(0, libc::TIOCSCTTY, 0));
        }
        reset_signals();
        if let Some(mask) = p.launch.umask {
            libc::umask(mask);
        }
        for limit in &p.launch.limits {
            let value = libc::rlimit {
                rlim_cur: limit.soft,
                rlim_max: limit.hard,
            };
            step!(
                p,
                Stage::Limits,
                libc::setrlimit(limit.resource, &raw const value)
            );
        }
        step!(p, Stage::Close, close_all_but(&p.keep_last));
        if let Some(fd) = &p.launch.pass {
            step!(
                p,
                Stage::Close,
                libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0)
            );
        }
        if let Some(cwd) = &p.launch.cwd {
            step!(p, Stage::Directory, libc::chdir(cwd.as_ptr()));
            let mut buffer = [0u8; libc::PATH_MAX as usize];
            // The raw call: the kernel prefixes a directory outside our root
            // with "(unreachable)", which the libc wrapper would hide.
            step!(
                p,
                Stage::Directory,
                libc::syscall(libc::SYS_getcwd, buffer.as_mut_ptr(), buffer.len())
            );
            if buffer[0] != b'/' {
                fail(p.status, Stage::DirectoryOutside, libc::EXDEV);
            }
        }
        drop_privileges(p);
        if p.launch.die_with_parent {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
            // The parent may have ended before that took effect.
            let mut byte = 0u8;
            let flags = libc::MSG_DONTWAIT | libc::MSG_PEEK;
            if libc::recv(p.status, ptr::from_mut(&mut byte).cast(), 1, flags) == 0 {
                libc::_exit(125);
            }
        }
        execute(p)
    }
}

/// Gives every signal its default action and blocks none.
unsafe fn reset_signals() {
    // SAFETY: the structures are live and zero is a valid value for both.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        for signal in 1..=64 {
            libc::sigaction(signal, &raw const action, ptr::null_mut());
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
}

/// Closes every descriptor from 3 on but those in `keep`, which is sorted.
/// Gives a negative value if that failed.
unsafe fn close_all_but(keep: &[RawFd]) -> libc::c_long {
    let mut from = 3u32;
    let mut result = 0;
    let mut close = |from: u32, to: u32| {
        if from <= to {
            // SAFETY: a system call on numbers; this process has one thread,
            // which uses no descriptor outside `keep` any more.
            result |= unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) };
        }
    };
    for &fd in keep {
        let fd = fd.cast_unsigned();
        if fd >= from {
            close(from, fd - 1);
            from = fd + 1;
        }
    }
    close(from, u32::MAX);
    result
}

#[repr(C)]
pub(super) struct CapHeader {
    pub(super) version: u32,
    pub(super) pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CapData {
    pub(super) effective: u32,
    pub(super) permitted: u32,
    pub(super) inheritable: u32,
}

/// `_LINUX_CAPABILITY_VERSION_3`.
pub(super) const CAPABILITY_VERSION: u32 = 0x2008_0522;

unsafe fn drop_privileges(p: &Prepared<'_>) {
    // SAFETY: system calls on values that live in `p` or on the stack.
    unsafe {
        if p.launch.no_new_privs {
            step!(
                p,
                Stage::NoNewPrivs,
                libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            );
        }
        // Before the capabilities go: without no_new_privs it takes CAP_SYS_ADMIN.
        if let Some(filter) = &p.filter {
            step!(
                p,
                Stage::Filter,
                libc::syscall(
                    libc::SYS_seccomp,
                    libc::SECCOMP_SET_MODE_FILTER,
                    libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW,
                    ptr::from_ref(filter)
                )
            );
        }
        let Some(credentials) = &p.launch.credentials else {
            return;
        };
        for capability in 0..CAPABILITY_LIMIT {
            if credentials.capabilities & (1 << capability) != 0 {
                continue;
            }
            if libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) < 0 {
                if errno() == libc::EINVAL {
                    break;
                }
                fail(p.status, Stage::Bounding, errno());
            }
        }
        step!(
            p,
            Stage::Groups,
            libc::syscall(libc::SYS_setgroups, p.groups.len(), p.groups.as_ptr())
        );
        let (uid, gid) = (credentials.uid, credentials.gid);
        step!(
            p,
            Stage::Gid,
            libc::syscall(libc::SYS_setresgid, gid, gid, gid)
        );
        step!(
            p,
            Stage::Uid,
            libc::syscall(libc::SYS_setresuid, uid, uid, uid)
        );
        set_capabilities(
            p.status,
            if uid == 0 {
                credentials.capabilities
            } else {
                0
            },
        );
    }
}

/// Sets permitted and effective capabilities, and no inheritable ones.
unsafe fn set_capabilities(status: RawFd, capabilities: u64) {
    let header = CapHeader {
        version: CAPABILITY_VERSION,
        pid: 0,
    };
    let half = |shift: u32| {
        let bits = (capabilities >> shift) & 0xffff_ffff;
        let bits = bits as u32;
        CapData {
            effective: bits,
            permitted: bits,
            inheritable: 0,
        }
    };
    let data = [half(0), half(32)];
    // SAFETY: capset reads a header and, for version 3, two data structures.
    unsafe {
        if libc::syscall(libc::SYS_capset, ptr::from_ref(&header), data.as_ptr()) < 0 {
            fail(status, Stage::Capabilities, errno());
        }
    }
}

unsafe fn execute(p: &Prepared<'_>) -> ! {
    // SAFETY: argv and env are arrays of C strings that end with a null pointer.
    unsafe {
        let (argv, env) = (p.argv.as_ptr(), p.env.as_ptr());
        let mut last = libc::ENOENT;
        match &p.launch.program {
            Program::File(fd) => {
                libc::syscall(
                    libc::SYS_execveat,
                    fd.as_raw_fd(),
                    c"".as_ptr(),
                    argv,
                    env,
                    libc::AT_EMPTY_PATH,
                );
                last = errno();
            }
            Program::Paths(paths) => {
                let mut denied = false;
                for path in paths {
                    libc::execve(path.as_ptr(), argv, env);
                    last = errno();
                    match last {
                        libc::EACCES => denied = true,
                        libc::ENOENT | libc::ENOTDIR => {}
                        _ => fail(p.status, Stage::Exec, last),
                    }
                }
                if denied {
                    last = libc::EACCES;
                }
            }
        }
        fail(p.status, Stage::Exec, last)
    }
}
