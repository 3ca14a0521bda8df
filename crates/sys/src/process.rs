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

mod child;

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::{fmt, ptr};

use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus};

use crate::error::{Context, Result, SysError};
use crate::ns::{CloneArgs, Namespaces, clone3};
use child::{CAPABILITY_VERSION, CapData, CapHeader, child};

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
