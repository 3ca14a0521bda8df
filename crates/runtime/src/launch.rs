//! Launching a sandbox: from a directory to a set-up PID 1.

use std::ffi::CString;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;

use layerpack_sys::SysError;
use layerpack_sys::bare::BareMounts;
use layerpack_sys::ns::{IdRange, Namespaces};
use layerpack_sys::process::{self, Credentials, Ended, Launch, Launched, Program};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::Signal;

use crate::capabilities;
use crate::cgroup::Group;
use crate::command;
use crate::error::{Result, RuntimeError};
use crate::init::INIT_ARG0;
use crate::mounts::{self, Directories};
use crate::protocol::{self, Answer, Head};
use crate::session::{ChildEnds, Session};
use crate::spec::{ExecSpec, Network, SandboxSpec, Streams};

/// A launched PID 1; killed and reaped on drop unless it is kept.
#[derive(Debug)]
pub(crate) struct Init {
    launched: Launched,
    kept: bool,
}

impl Init {
    pub(crate) fn launched(&self) -> &Launched {
        &self.launched
    }

    /// Lets it live on.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self) -> Result<Ended> {
        self.kept = true;
        Ok(self.launched.wait()?)
    }
}

impl Drop for Init {
    fn drop(&mut self) {
        if !self.kept {
            let _ = self.launched.kill(Signal::KILL);
            let _ = self.launched.wait();
        }
    }
}

fn setup(step: &str, problem: impl ToString) -> RuntimeError {
    RuntimeError::Setup {
        step: step.to_owned(),
        problem: problem.to_string(),
    }
}

/// Opens the program that becomes PID 1. It is executed by the sandbox's root,
/// who has no rights on the host; if the file does not let everybody execute
/// it, a sealed copy in memory does.
fn open_init(program: Option<&Path>) -> Result<OwnedFd> {
    let path = program.unwrap_or(Path::new("/proc/self/exe"));
    let step = format!("opening {} as PID 1", path.display());
    let error = |e: rustix::io::Errno| setup(&step, std::io::Error::from(e));
    let fd =
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(error)?;
    let mode = rustix::fs::fstat(&fd).map_err(error)?.st_mode;
    if mode & 0o001 != 0 {
        return Ok(fd);
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let copy = rustix::fs::memfd_create(INIT_ARG0, flags).map_err(error)?;
    let mut from = std::fs::File::from(fd);
    let mut to = std::fs::File::from(copy);
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let n = from.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        to.write_all(buffer.get(..n).unwrap_or_default())?;
    }
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&to, seals).map_err(error)?;
    // Executing wants a descriptor that is not open for writing.
    let read_only = format!("/proc/self/fd/{}", to.as_raw_fd());
    rustix::fs::open(read_only, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(error)
}

/// Namespaces of a sandbox.
pub(crate) fn namespaces(network: Network) -> Namespaces {
    let all = Namespaces::USER
        | Namespaces::MOUNT
        | Namespaces::PROCESS_ID
        | Namespaces::INTER_PROCESS_COMMUNICATION
        | Namespaces::HOST_NAME_AND_NIS_DOMAIN_NAME;
    match network {
        Network::None => all | Namespaces::NETWORK,
        Network::Host => all,
    }
}

/// Programs that run in a sandbox; `None`: this process's own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Programs<'a> {
    /// As PID 1.
    pub(crate) init: Option<&'a Path>,
    /// In the channel's directory.
    pub(crate) agent: Option<&'a Path>,
}

/// Starts PID 1 of `spec`'s sandbox and waits until everything is set up.
/// With a command (a one-shot sandbox) that is running then, and PID 1 dies
/// with the caller.
pub(crate) fn launch(
    spec: &SandboxSpec,
    dirs: &Directories,
    group: &Group,
    programs: Programs<'_>,
    command: Option<(&ExecSpec, Streams)>,
) -> Result<(Init, Option<Session>)> {
    let (socket, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|e| setup("making a socket", e))?;
    let init = start_init(spec, group, programs.init, &theirs, command.is_some())?;
    drop(theirs);
    let result = hand_over(spec, dirs, group, &init, &socket, programs.agent, command);
    // If PID 1 was not executed at all, that is the reason for anything later.
    init.launched.wait_exec()?.map_err(|failure| {
        setup(
            "starting PID 1",
            format!("{failure} (is its program executable?)"),
        )
    })?;
    let (session, command) = match result {
        Ok(done) => done,
        // PID 1 has gone, or hung up: its own word says more than ours.
        Err(RuntimeError::Sys(error)) if error.errno == rustix::io::Errno::PIPE => {
            (None, String::new())
        }
        Err(error) => return Err(error),
    };
    let answer = protocol::recv_answer(&socket)?;
    match answer {
        Some(Answer::Ready) => Ok((init, session)),
        Some(Answer::Failed { step, problem }) => Err(RuntimeError::Setup { step, problem }),
        Some(Answer::NotExecuted { errno, stage, exec }) => Err(command::not_executed_raw(
            &command,
            &stage,
            exec,
            rustix::io::Errno::from_raw_os_error(errno),
        )),
        None => {
            let ended = init
                .wait()
                .map_or_else(|e| e.to_string(), |ended| format!("{ended:?}"));
            Err(setup(
                "starting PID 1",
                format!(
                    "it ended without a word, by {ended} (does the program call init_main? is there enough memory?)"
                ),
            ))
        }
    }
}

fn start_init(
    spec: &SandboxSpec,
    group: &Group,
    program: Option<&Path>,
    socket: &OwnedFd,
    one_shot: bool,
) -> Result<Init> {
    let program = open_init(program)?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| setup("opening /dev/null", e))?;
    let tasks = group.tasks()?;
    let v2 = group.v2_dir()?;
    let number = CString::new(socket.as_raw_fd().to_string()).unwrap_or_default();
    let launch = Launch {
        argv: vec![CString::new(INIT_ARG0).unwrap_or_default(), number],
        pass: Some(socket.as_fd()),
        namespaces: namespaces(spec.network),
        cgroup_tasks: tasks.iter().map(AsFd::as_fd).collect(),
        cgroup_v2: v2.as_ref().map(AsFd::as_fd),
        cgroup_namespace: true,
        gate: true,
        session: true,
        die_with_parent: one_shot,
        umask: Some(0o022),
        credentials: Some(Credentials {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            capabilities: capabilities::ALL,
        }),
        ..Launch::new(
            Program::File(program.as_fd()),
            [null.as_fd(), null.as_fd(), null.as_fd()],
        )
    };
    let launched = in_bare_mounts(|| process::spawn(&launch))
        .map_err(new_namespaces)?
        .map_err(|failure| setup("starting PID 1", failure))?;
    Ok(Init {
        launched,
        kept: false,
    })
}

/// Calls `spawn` where there is next to nothing of the host's mounts to copy (see
/// [`layerpack_sys::bare`]). Where that cannot be had the sandbox starts all the same; its copy of
/// the host's mounts then goes when it ends.
fn in_bare_mounts<T>(spawn: impl FnOnce() -> Result<T, SysError>) -> Result<T, SysError> {
    static BARE: OnceLock<Option<BareMounts>> = OnceLock::new();
    let bare = BARE.get_or_init(|| {
        BareMounts::new()
            .inspect_err(|error| {
                tracing::warn!(%error, "sandboxes keep the host's mounts alive while they live");
            })
            .ok()
    });
    match bare {
        Some(bare) => bare.within(spawn)?,
        None => spawn(),
    }
}

/// Says what to do about the usual reasons for which a fork fails here.
fn new_namespaces(e: SysError) -> RuntimeError {
    use rustix::io::Errno;
    let remedy = match e.errno {
        Errno::PERM => "run it as root, and not in a chroot",
        Errno::NOSPC | Errno::USERS => "raise the sysctls below user.max_*_namespaces",
        Errno::AGAIN | Errno::NOMEM => "the machine is out of processes or memory",
        Errno::INVAL => "this kernel lacks a namespace type",
        _ => return e.into(),
    };
    setup("making namespaces", format!("{e}: {remedy}"))
}

/// Writes the id maps, makes the mounts and sends PID 1 everything. Returns
/// the session and the command's name, for messages.
fn hand_over(
    spec: &SandboxSpec,
    dirs: &Directories,
    group: &Group,
    init: &Init,
    socket: &OwnedFd,
    agent: Option<&Path>,
    command: Option<(&ExecSpec, Streams)>,
) -> Result<(Option<Session>, String)> {
    let launched = &init.launched;
    let map = [IdRange {
        inside: 0,
        outside: spec.id_map.base,
        count: spec.id_map.count,
    }];
    layerpack_sys::ns::write_id_maps(launched.pid, &map, &map)?;
    let path = format!("/proc/{}/ns/user", launched.pid.as_raw_nonzero());
    let userns = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| setup("opening the sandbox's user namespace", e))?;
    launched.open_gate()?;

    let terminal = command.as_ref().and_then(|(exec, _)| exec.terminal);
    let mounts = mounts::make(spec, dirs, userns.as_fd(), terminal.is_some(), agent)?;
    let mut head = Head::new(spec.hostname().to_owned(), mounts.sys.is_none());
    if !group.is_unified() {
        head.v1_controllers = Some(
            group
                .v1_controllers()
                .map(|c| c.name().to_owned())
                .collect(),
        );
    }
    let mut fds = vec![
        mounts.root.as_fd(),
        mounts.dev.as_fd(),
        mounts.pts.as_fd(),
        mounts.shm.as_fd(),
    ];
    fds.extend(mounts.sys.as_ref().map(AsFd::as_fd));
    if let Some((directory, program)) = &mounts.channel {
        head.channel = true;
        fds.extend([directory.as_fd(), program.as_fd()]);
    }
    let Some((exec, streams)) = command else {
        protocol::send_request(socket.as_fd(), head, None, &fds)?;
        return Ok((None, String::new()));
    };
    let plan = command::plan(spec, exec, mounts.root.as_fd())?;
    let (session, ends) = match terminal {
        None => Session::with_pipes(streams, exec, plan.host_owner(spec.id_map))?,
        Some(size) => {
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
            let master = rustix::fs::openat(&mounts.pts, "ptmx", flags, Mode::empty())
                .map_err(|e| setup("opening a terminal", e))?;
            head.console = Some(0);
            Session::with_terminal(
                streams,
                exec,
                size,
                master,
                plan.terminal_owner(spec.id_map),
            )?
        }
    };
    send_with_streams(socket, head, &plan, fds, &ends)?;
    let name = exec
        .argv
        .first()
        .map(|a| a.display().to_string())
        .unwrap_or_default();
    Ok((Some(session), name))
}

fn send_with_streams<'a>(
    socket: &OwnedFd,
    head: Head,
    plan: &protocol::Plan,
    mut fds: Vec<std::os::fd::BorrowedFd<'a>>,
    ends: &'a ChildEnds,
) -> Result<()> {
    fds.extend(ends.as_fds());
    protocol::send_request(socket.as_fd(), head, Some(plan), &fds)
}
