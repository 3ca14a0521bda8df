//! Starting a program: in new namespaces, in those of another process, with
//! other ids, fewer capabilities and a system call filter.
//!
//! [`spawn`] forks with `clone3` and does everything between fork and exec
//! with plain system calls on memory that was prepared before, so it may be
//! called in a process with threads. The order of the steps, each optional:
//!
//! 0. close what the child does not need;
//! 1. join control groups (v1: the child writes itself into `tasks`, which
//!    spares the kernel's global lock; v2: at the fork);
//! 2. a keyring of its own, so that the caller's keys stay outside;
//! 3. a control group namespace rooted at the groups just joined;
//! 4. the namespaces of a running sandbox, then a second fork, whose child is
//!    the caller's and lives in the sandbox's pid namespace;
//! 5. the gate: wait for the caller's go (it writes the id maps meanwhile);
//! 6. session and terminal, streams, signals, umask, limits;
//! 7. close every other descriptor, then change directory, so that no path
//!    (`/proc/self/fd/7`) can lead out of the sandbox;
//! 8. `no_new_privs`, filter, bounding set, groups, ids, capabilities;
//! 9. the death signal, which changing ids would have reset; exec.
//!
//! Until exec the child cannot be inspected by the sandbox (not dumpable).
//! Failures come back over a socket that closes on exec, as stage and errno.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::{fmt, ptr};

use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus};

use crate::error::{Context, Result, SysError};
use crate::ns::{CloneArgs, Namespaces, clone3};

/// One instruction of a classic BPF program, `struct sock_filter`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BpfInstruction {
    /// Operation.
    pub code: u16,
    /// Instructions to skip if the condition holds.
    pub jt: u8,
    /// Instructions to skip if it does not.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

const _: () = assert!(size_of::<BpfInstruction>() == 8);

#[repr(C)]
struct BpfProgram {
    len: u16,
    filter: *const BpfInstruction,
}

/// What to execute.
#[derive(Debug)]
pub enum Program<'a> {
    /// The first of these paths that can be executed, as `execvp` does.
    Paths(Vec<CString>),
    /// An open file.
    File(BorrowedFd<'a>),
}

/// Namespaces to enter before the program starts.
#[derive(Debug, Clone, Copy)]
pub struct Join<'a> {
    /// A process in them.
    pub pidfd: BorrowedFd<'a>,
    /// Which of its namespaces.
    pub namespaces: Namespaces,
}

/// Who the program runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Capabilities (bit N: capability N) of the bounding set, and of the
    /// program itself if `uid` is 0.
    pub capabilities: u64,
}

/// A limit of `setrlimit(2)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResourceLimit {
    /// `RLIMIT_*`.
    pub resource: u32,
    /// Soft limit.
    pub soft: u64,
    /// Hard limit.
    pub hard: u64,
}

/// A program to start, and how.
#[derive(Debug)]
pub struct Launch<'a> {
    /// What to execute.
    pub program: Program<'a>,
    /// Its arguments, the name first.
    pub argv: Vec<CString>,
    /// Its environment, `NAME=value`.
    pub env: Vec<CString>,
    /// Working directory, seen after joining namespaces.
    pub cwd: Option<CString>,
    /// Standard input, output and error.
    pub stdio: [BorrowedFd<'a>; 3],
    /// A descriptor to leave open, under its number.
    pub pass: Option<BorrowedFd<'a>>,
    /// New namespaces.
    pub namespaces: Namespaces,
    /// v1 `tasks` files of control groups to join.
    pub cgroup_tasks: Vec<BorrowedFd<'a>>,
    /// v2 control group to be born in.
    pub cgroup_v2: Option<BorrowedFd<'a>>,
    /// Root the view of control groups at those joined.
    pub cgroup_namespace: bool,
    /// Namespaces to enter.
    pub join: Option<Join<'a>>,
    /// Wait for [`Launched::open_gate`] before step 6.
    pub gate: bool,
    /// Start a session.
    pub session: bool,
    /// Make standard input the session's terminal.
    pub terminal: bool,
    /// End the program when the calling **thread** ends.
    pub die_with_parent: bool,
    /// File mode creation mask.
    pub umask: Option<u32>,
    /// Resource limits.
    pub limits: Vec<ResourceLimit>,
    /// Never gain privileges by exec.
    pub no_new_privs: bool,
    /// System call filter.
    pub filter: Option<&'a [BpfInstruction]>,
    /// Ids and capabilities.
    pub credentials: Option<Credentials>,
}

impl<'a> Launch<'a> {
    /// A launch of `program` that changes nothing but the streams.
    pub fn new(program: Program<'a>, stdio: [BorrowedFd<'a>; 3]) -> Self {
        Self {
            program,
            argv: Vec::new(),
            env: Vec::new(),
            cwd: None,
            stdio,
            pass: None,
            namespaces: Namespaces::empty(),
            cgroup_tasks: Vec::new(),
            cgroup_v2: None,
            cgroup_namespace: false,
            join: None,
            gate: false,
            session: false,
            terminal: false,
            die_with_parent: false,
            umask: None,
            limits: Vec::new(),
            no_new_privs: false,
            filter: None,
            credentials: None,
        }
    }
}

/// The step at which starting a program failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Joining a control group.
    Cgroup = 1,
    /// Making the control group namespace.
    CgroupNamespace,
    /// Entering namespaces.
    Join,
    /// The second fork.
    Fork,
    /// The caller ended before its go.
    Gate,
    /// New session.
    Session,
    /// Standard streams.
    Streams,
    /// Taking the terminal.
    Terminal,
    /// Resource limits.
    Limits,
    /// Closing descriptors.
    Close,
    /// Changing directory.
    Directory,
    /// The directory lies outside the sandbox.
    DirectoryOutside,
    /// `no_new_privs`.
    NoNewPrivs,
    /// System call filter.
    Filter,
    /// Bounding set.
    Bounding,
    /// Supplementary groups.
    Groups,
    /// Group id.
    Gid,
    /// User id.
    Uid,
    /// Capabilities.
    Capabilities,
    /// Executing the program.
    Exec,
}

impl Stage {
    const ALL: [Self; 20] = [
        Self::Cgroup,
        Self::CgroupNamespace,
        Self::Join,
        Self::Fork,
        Self::Gate,
        Self::Session,
        Self::Streams,
        Self::Terminal,
        Self::Limits,
        Self::Close,
        Self::Directory,
        Self::DirectoryOutside,
        Self::NoNewPrivs,
        Self::Filter,
        Self::Bounding,
        Self::Groups,
        Self::Gid,
        Self::Uid,
        Self::Capabilities,
        Self::Exec,
    ];

    fn from_raw(raw: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&stage| stage as u8 == raw)
    }

    /// Whether the step comes before the second fork of a joining process.
    fn before_second(self) -> bool {
        matches!(
            self,
            Self::Cgroup | Self::CgroupNamespace | Self::Join | Self::Fork
        )
    }

    /// What the step does, for a message.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Cgroup => "joining its control group",
            Self::CgroupNamespace => "making its control group namespace",
            Self::Join => "entering the sandbox's namespaces",
            Self::Fork => "starting a process in the sandbox",
            Self::Gate => "waiting for the launcher",
            Self::Session => "starting a session",
            Self::Streams => "setting up its streams",
            Self::Terminal => "taking its terminal",
            Self::Limits => "setting resource limits",
            Self::Close => "closing descriptors",
            Self::Directory => "changing to its working directory",
            Self::DirectoryOutside => "its working directory lies outside the sandbox",
            Self::NoNewPrivs => "giving up new privileges",
            Self::Filter => "loading the system call filter",
            Self::Bounding => "dropping capabilities",
            Self::Groups => "setting its groups",
            Self::Gid => "setting its group id",
            Self::Uid => "setting its user id",
            Self::Capabilities => "setting its capabilities",
            Self::Exec => "executing",
        }
    }
}

/// Why a program did not start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchFailure {
    /// At which step.
    pub stage: Stage,
    /// With which error.
    pub errno: Errno,
}

impl fmt::Display for LaunchFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {}",
            self.stage.describe(),
            std::io::Error::from(self.errno)
        )
    }
}

/// A process that was started.
#[derive(Debug)]
pub struct Launched {
    /// Its pid in the caller's pid namespace.
    pub pid: Pid,
    /// Readable once it has ended.
    pub pidfd: OwnedFd,
    status: OwnedFd,
    /// A failure that was read already.
    early: Option<LaunchFailure>,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

impl Ended {
    /// The exit code that a shell shows: 128 and the number for a signal.
    pub fn shell_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        };
        u8::try_from(code & 0xff).unwrap_or(255)
    }

    fn from_status(status: &WaitIdStatus) -> Self {
        status
            .exit_status()
            .map(Self::Code)
            .or_else(|| status.terminating_signal().map(Self::Signal))
            .unwrap_or(Self::Code(255))
    }
}

const KIND_FAILURE: u8 = 0;
const KIND_PID: u8 = 1;

impl Launched {
    /// Lets a child that waits at the gate go on.
    ///
    /// # Errors
    /// `EPIPE` or `ECONNRESET` if it has died.
    pub fn open_gate(&self) -> Result<()> {
        rustix::net::send(&self.status, b"g", rustix::net::SendFlags::NOSIGNAL)
            .context("send", || "to a starting process")?;
        Ok(())
    }

    /// Waits until the program was executed. `Ok(Err(_))`: it was not, and
    /// why; the process has then ended and was reaped.
    ///
    /// # Errors
    /// If the socket fails.
    pub fn wait_exec(&self) -> Result<std::result::Result<(), LaunchFailure>> {
        if let Some(failure) = self.early {
            let _ = self.wait();
            return Ok(Err(failure));
        }
        match recv_record(self.status.as_fd())? {
            None => Ok(Ok(())),
            Some((KIND_FAILURE, stage, errno)) => {
                let _ = self.wait();
                Ok(Err(failure(stage, errno)))
            }
            Some(_) => Err(SysError::new("recv", "a starting process", Errno::PROTO)),
        }
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// `ESRCH` if it has been reaped.
    pub fn kill(&self, signal: rustix::process::Signal) -> Result<()> {
        rustix::process::pidfd_send_signal(&self.pidfd, signal)
            .context("pidfd_send_signal", || self.pid.as_raw_nonzero())
    }

    /// Waits for its end and reaps it.
    ///
    /// # Errors
    /// `ECHILD` if it is not (or no longer) a child of this process.
    pub fn wait(&self) -> Result<Ended> {
        wait_pidfd(self.pidfd.as_fd())
    }
}

/// Waits for the child behind `pidfd` and reaps it.
///
/// # Errors
/// `ECHILD` if it is not a child of this process.
pub fn wait_pidfd(pidfd: BorrowedFd<'_>) -> Result<Ended> {
    let status = rustix::io::retry_on_intr(|| {
        rustix::process::waitid(WaitId::PidFd(pidfd), WaitIdOptions::EXITED)
    })
    .context("waitid", || "a child")?;
    match status {
        Some(status) => Ok(Ended::from_status(&status)),
        None => Err(SysError::new("waitid", "a child", Errno::CHILD)),
    }
}

fn failure(stage: u8, errno: i32) -> LaunchFailure {
    LaunchFailure {
        stage: Stage::from_raw(stage).unwrap_or(Stage::Exec),
        errno: Errno::from_raw_os_error(errno),
    }
}

/// Reads one record: kind, stage, number. `None` at the end of the stream.
fn recv_record(fd: BorrowedFd<'_>) -> Result<Option<(u8, u8, i32)>> {
    let mut buffer = [0u8; 8];
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recv(fd, &mut buffer[..], rustix::net::RecvFlags::empty())
    });
    let n = match received {
        Ok((n, _)) => n,
        Err(Errno::CONNRESET) => 0,
        Err(errno) => return Err(SysError::new("recv", "a starting process", errno)),
    };
    match (n, buffer) {
        (6, [kind, stage, a, b, c, d, ..]) => {
            Ok(Some((kind, stage, i32::from_ne_bytes([a, b, c, d]))))
        }
        (0, _) => Ok(None),
        _ => Err(SysError::new("recv", "a starting process", Errno::PROTO)),
    }
}

/// All that the child touches, prepared before the fork.
struct Prepared<'a> {
    launch: &'a Launch<'a>,
    stdio: [RawFd; 3],
    argv: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    groups: Vec<libc::gid_t>,
    filter: Option<BpfProgram>,
    status: RawFd,
    /// Descriptors that the child itself needs.
    keep_first: Vec<RawFd>,
    /// Those that are needed until exec.
    keep_last: Vec<RawFd>,
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings
        .iter()
        .map(|s| s.as_ptr())
        .chain(std::iter::once(ptr::null()))
        .collect()
}

/// Duplicates a descriptor to a number above the standard ones.
fn above_stdio(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(fd, 3).context("fcntl", || "a stream")
}

/// A connected pair, both above the standard streams.
fn socketpair() -> Result<(OwnedFd, OwnedFd)> {
    let (one, two) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .context("socketpair", || "for a new process")?;
    Ok((above_stdio(one.as_fd())?, above_stdio(two.as_fd())?))
}

/// The descriptors that a child keeps at first, and those that it keeps until
/// exec; sorted.
///
/// The rest is closed at once: a child that waits at its gate must not hold
/// locks, pipes or the other ends of sockets of its parent.
fn kept(launch: &Launch<'_>, stdio: &[OwnedFd; 3], status: &OwnedFd) -> (Vec<RawFd>, Vec<RawFd>) {
    let mut last = vec![status.as_raw_fd()];
    last.extend(launch.pass.map(|fd| fd.as_raw_fd()));
    if let Program::File(fd) = &launch.program {
        last.push(fd.as_raw_fd());
    }
    let mut first = last.clone();
    first.extend(stdio.iter().map(AsRawFd::as_raw_fd));
    first.extend(launch.cgroup_tasks.iter().map(AsRawFd::as_raw_fd));
    first.extend(launch.join.map(|join| join.pidfd.as_raw_fd()));
    first.sort_unstable();
    last.sort_unstable();
    (first, last)
}

/// Blocks all signals of the calling thread until dropped, so that no handler
/// of the caller runs in the child.
struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    fn new() -> Self {
        // SAFETY: both sets are live; sigfillset initialises the first and
        // pthread_sigmask the second.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut old: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
            Self(old)
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: `self.0` was initialised by pthread_sigmask.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut());
        }
    }
}

/// Starts a program. It may still fail until [`Launched::wait_exec`] says otherwise.
///
/// # Errors
/// If the fork fails, or with `join` if the sandbox cannot be entered.
pub fn spawn(launch: &Launch<'_>) -> Result<std::result::Result<Launched, LaunchFailure>> {
    let stdio = [
        above_stdio(launch.stdio[0])?,
        above_stdio(launch.stdio[1])?,
        above_stdio(launch.stdio[2])?,
    ];
    let (parent_status, status) = socketpair()?;
    let (keep_first, keep_last) = kept(launch, &stdio, &status);
    let prepared = Prepared {
        launch,
        stdio: [
            stdio[0].as_raw_fd(),
            stdio[1].as_raw_fd(),
            stdio[2].as_raw_fd(),
        ],
        argv: pointers(&launch.argv),
        env: pointers(&launch.env),
        groups: launch
            .credentials
            .as_ref()
            .map(|c| c.groups.clone())
            .unwrap_or_default(),
        filter: match launch.filter {
            None => None,
            Some(filter) => Some(BpfProgram {
                len: u16::try_from(filter.len())
                    .map_err(|_| SysError::new("seccomp", "filter", Errno::INVAL))?,
                filter: filter.as_ptr(),
            }),
        },
        status: status.as_raw_fd(),
        keep_first,
        keep_last,
    };
    let mut pidfd: i32 = -1;
    let mut args = CloneArgs {
        flags: u64::from(launch.namespaces.bits()) | u64::from(libc::CLONE_PIDFD.cast_unsigned()),
        pidfd: ptr::from_mut(&mut pidfd) as u64,
        exit_signal: u64::from(libc::SIGCHLD.cast_unsigned()),
        ..CloneArgs::default()
    };
    if let Some(group) = launch.cgroup_v2 {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = u64::try_from(group.as_raw_fd()).unwrap_or(u64::MAX);
    }
    let blocked = SignalsBlocked::new();
    // SAFETY: the child only runs `child`, which makes nothing but system
    // calls on prepared memory and never returns.
    let raw = unsafe {
        let raw = clone3(&args);
        if raw == Ok(0) {
            child(&prepared);
        }
        raw
    };
    drop(blocked);
    let raw = raw.context("clone3", || "a new process")?;
    drop(status);
    // SAFETY: the kernel stored a new descriptor there, which nobody else owns.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let pid =
        Pid::from_raw(raw).ok_or_else(|| SysError::new("clone3", "a new process", Errno::INVAL))?;
    let first = Launched {
        pid,
        pidfd,
        status: parent_status,
        early: None,
    };
    if launch.join.is_none() {
        return Ok(Ok(first));
    }
    second(first)
}

/// The process that a joining process has forked: that one says its pid, and
/// ends. The second may have failed and said so even before.
fn second(first: Launched) -> Result<std::result::Result<Launched, LaunchFailure>> {
    let mut early = None;
    let raw = loop {
        match recv_record(first.status.as_fd()) {
            Ok(Some((KIND_PID, _, raw))) => break raw,
            Ok(Some((_, stage, errno))) => {
                let failure = failure(stage, errno);
                if failure.stage.before_second() {
                    let _ = first.wait();
                    return Ok(Err(failure));
                }
                early = Some(failure);
            }
            Ok(None) => {
                let _ = first.wait();
                return Ok(Err(LaunchFailure {
                    stage: Stage::Join,
                    errno: Errno::SRCH,
                }));
            }
            Err(error) => {
                let _ = first.wait();
                return Err(error);
            }
        }
    };
    let _ = first.wait();
    let pid = Pid::from_raw(raw)
        .ok_or_else(|| SysError::new("clone3", "a joining process", Errno::INVAL))?;
    // It is our child, so the number is its own until we reap it.
    match crate::ns::pidfd_open(pid) {
        Ok(pidfd) => Ok(Ok(Launched {
            pid,
            pidfd,
            status: first.status,
            early,
        })),
        Err(error) => {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
            Err(error)
        }
    }
}

/// `CLONE_INTO_CGROUP` of `clone3(2)`.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
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
unsafe fn child(p: &Prepared<'_>) -> ! {
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
struct CapHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// `_LINUX_CAPABILITY_VERSION_3`.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

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

/// Takes all capabilities but those in `keep` (bit N: capability N) from the
/// calling thread, and hides its memory from other processes of its user.
///
/// # Errors
/// Those of `capset`.
pub fn restrict_self(keep: u64) -> Result<()> {
    let header = CapHeader {
        version: CAPABILITY_VERSION,
        pid: 0,
    };
    let zero = CapData {
        effective: 0,
        permitted: 0,
        inheritable: 0,
    };
    let mut data = [zero; 2];
    // SAFETY: capget fills a header's worth and two data structures.
    let rc = unsafe { libc::syscall(libc::SYS_capget, ptr::from_ref(&header), data.as_mut_ptr()) };
    if rc < 0 {
        return Err(SysError::last("capget", "this process"));
    }
    for (index, half) in data.iter_mut().enumerate() {
        let bits = (keep >> (32 * index)) & 0xffff_ffff;
        let bits = u32::try_from(bits).unwrap_or(0);
        *half = CapData {
            effective: half.permitted & bits,
            permitted: half.permitted & bits,
            inheritable: 0,
        };
    }
    // SAFETY: as above, read only.
    let rc = unsafe { libc::syscall(libc::SYS_capset, ptr::from_ref(&header), data.as_ptr()) };
    if rc < 0 {
        return Err(SysError::last("capset", "this process"));
    }
    hide_self()
}

/// Hides the memory, environment and descriptors of this process from other
/// processes of its user (makes it not dumpable).
///
/// # Errors
/// Those of `prctl`.
pub fn hide_self() -> Result<()> {
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
        .context("prctl", || "dumpable")
}

/// Sends this process SIGKILL when its parent (the thread that made it) ends.
///
/// # Errors
/// Those of `prctl`.
pub fn die_with_parent() -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .context("prctl", || "parent death signal")
}
