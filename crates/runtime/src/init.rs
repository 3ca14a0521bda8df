//! PID 1 of a sandbox.
//!
//! Started by the launcher under [`INIT_ARG0`] with an empty environment, in
//! all of the sandbox's namespaces but with the host's mounts still in sight.
//! It attaches the mounts it is handed, adds those that only a process inside
//! can make (proc, sysfs, mqueue, control groups), hides and write-protects
//! what OCI runtimes do, makes the overlay its root and lets the host's tree
//! go. Then it starts the command of a one-shot sandbox, gives up its
//! privileges, and reaps until the end.

mod mounts;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use layerpack_sys::process::{self, Launch, Program};
use layerpack_sys::signals::SignalFd;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, WaitOptions};

use crate::capabilities;
use crate::error::{Result, RuntimeError};
use crate::protocol::{self, Answer, Plan, Request};
use crate::seccomp;

/// The name under which a program must call [`init_main`] at once.
pub const INIT_ARG0: &str = "layerpack-init";

/// Exit code of PID 1 when it fails itself.
const FAILED: i32 = 125;

/// Signals that are passed on to the command.
const FORWARDED: [i32; 7] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGTERM,
    libc::SIGCONT,
];

/// Runs the calling process as PID 1 of a sandbox and never returns.
///
/// Its second argument names the socket to the launcher. Without one, or
/// outside a new pid namespace, the process exits with an error code.
pub fn init_main() -> ! {
    std::process::exit(run().unwrap_or(FAILED))
}

fn run() -> Option<i32> {
    process::hide_self().ok()?;
    let _ = rustix::thread::set_name(c"layerpack-init");
    if rustix::process::getpid() != Pid::INIT {
        return None;
    }
    let number: i32 = std::env::args().nth(1)?.parse().ok()?;
    let socket = layerpack_sys::fdpass::inherited(number)?;
    let mut signals = FORWARDED.to_vec();
    signals.push(libc::SIGCHLD);
    let signals = SignalFd::new(&signals).ok()?;
    match set_up(socket.as_fd()) {
        Ok(Some(child)) => {
            protocol::send_answer(socket.as_fd(), &Answer::Ready);
            drop(socket);
            process::restrict_self(capabilities::KILL).ok()?;
            Some(serve(&signals, Some(child)))
        }
        Ok(None) => {
            process::restrict_self(0).ok()?;
            protocol::send_answer(socket.as_fd(), &Answer::Ready);
            drop(socket);
            Some(serve(&signals, None))
        }
        Err(answer) => {
            protocol::send_answer(socket.as_fd(), &answer);
            Some(FAILED)
        }
    }
}

/// Sets the sandbox up and starts its command; `None` if it has none.
fn set_up(socket: BorrowedFd<'_>) -> Result<Option<Pid>, Answer> {
    let failed = |e: RuntimeError| match e {
        RuntimeError::Setup { step, problem } => Answer::Failed { step, problem },
        other => Answer::Failed {
            step: "starting PID 1".to_owned(),
            problem: other.to_string(),
        },
    };
    let request = protocol::recv_request(socket).map_err(failed)?;
    let Request { head, command, fds } = request;
    let mut fds = fds.into_iter();
    mounts::attach_all(&head, &mut fds).map_err(failed)?;
    match command {
        None => Ok(None),
        Some(plan) => {
            let streams: Vec<OwnedFd> = fds.collect();
            start(&plan, &streams).map(Some)
        }
    }
}

fn start(plan: &Plan, streams: &[OwnedFd]) -> Result<Pid, Answer> {
    let internal = |problem: String| Answer::Failed {
        step: "starting the command".to_owned(),
        problem,
    };
    let [stdin, stdout, stderr] = streams else {
        return Err(internal("streams are missing".to_owned()));
    };
    let filter = seccomp::default_filter();
    let launch = Launch {
        argv: plan.argv.clone(),
        env: plan.env.clone(),
        cwd: Some(plan.cwd.clone()),
        session: true,
        terminal: plan.terminal,
        umask: Some(0o022),
        no_new_privs: plan.no_new_privs,
        filter: Some(&filter),
        credentials: Some(plan.credentials.clone()),
        ..Launch::new(
            Program::Paths(plan.paths.clone()),
            [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
        )
    };
    let not_executed = |failure: process::LaunchFailure| Answer::NotExecuted {
        errno: failure.errno.raw_os_error(),
        stage: failure.stage.describe().to_owned(),
        exec: failure.stage == process::Stage::Exec,
    };
    let launched = process::spawn(&launch)
        .map_err(|e| internal(e.to_string()))?
        .map_err(not_executed)?;
    launched
        .wait_exec()
        .map_err(|e| internal(e.to_string()))?
        .map_err(not_executed)?;
    Ok(launched.pid)
}

/// Reaps, and passes signals on, until the command has ended: its exit code.
/// Without a command: until SIGTERM comes from outside the sandbox.
fn serve(signals: &SignalFd, child: Option<Pid>) -> i32 {
    loop {
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            if Some(pid) == child {
                return status
                    .exit_status()
                    .or_else(|| status.terminating_signal().map(|signal| 128 + signal))
                    .unwrap_or(FAILED);
            }
        }
        let mut fds = [PollFd::new(signals, PollFlags::IN)];
        if poll(&mut fds, None).is_err() {
            continue;
        }
        while let Ok(Some(received)) = signals.read() {
            match (received.signal, child) {
                (libc::SIGCHLD, _) => {}
                (signal, Some(child)) => {
                    if let Some(signal) = Signal::from_named_raw(signal) {
                        let _ = rustix::process::kill_process(child, signal);
                    }
                }
                // Processes inside cannot end a lasting sandbox by this.
                (libc::SIGTERM, None) if received.sender == 0 => return 0,
                _ => {}
            }
        }
    }
}
