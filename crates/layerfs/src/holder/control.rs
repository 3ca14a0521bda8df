//! Questions to the holder: `ROOT/holder.sock`, for root and the holder's own user only.
//!
//! One question and one answer to a connection, each one line of JSON; with the question to upgrade
//! comes a descriptor of the new program.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use layerpack_sys::fdpass;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use super::trouble::Failing;

/// Name of the socket in the node's directory.
const SOCKET: &str = "holder.sock";
/// Longest question or answer in bytes.
const MAX_LINE: usize = 16 << 10;
/// How long who connects may take to ask: the holder does nothing else meanwhile.
const PATIENCE: Duration = Duration::from_millis(500);

/// What is asked of a holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub enum Question {
    /// Who is there.
    Status,
    /// Let the program that comes with this take over from the worker.
    Upgrade,
    /// Have the worker unmount everything and end, and end.
    Stop,
}

/// A process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Who {
    /// Its id.
    pub pid: u32,
    /// Version of its program.
    pub version: String,
}

/// What a holder answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// To [`Question::Status`] and [`Question::Stop`].
    Standing {
        /// The holder.
        holder: Who,
        /// The worker, if one lives.
        worker: Option<Who>,
        /// How often a worker died and was started again.
        restarts: u64,
        /// How often a worker gave way to a newer one.
        upgrades: u64,
        /// Workers that do not stay.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failing: Option<Failing>,
    },
    /// To [`Question::Upgrade`]: it serves.
    Upgraded {
        /// The worker before; `None` if none lived.
        old: Option<Who>,
        /// The worker now.
        new: Who,
    },
    /// It is not done.
    Refused {
        /// Why, and what is the case instead.
        why: String,
    },
}

fn path_in(root: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    // The directory's own name may be too long for a socket's.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let held = rustix::fs::open(root, flags, Mode::empty())?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd())).join(SOCKET);
    Ok((held, path))
}

/// Asks the holder of the node at `root`; `program` goes with [`Question::Upgrade`]. Waits for the
/// answer, at most `limit`.
///
/// # Errors
/// `NotFound` or `ConnectionRefused` if no holder is there; `TimedOut`, which names its process and
/// what to do, if it does not answer.
pub fn ask(
    root: &Path,
    question: &Question,
    program: Option<&OwnedFd>,
    limit: Duration,
) -> io::Result<Reply> {
    let (_held, path) = path_in(root)?;
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    let mut line = serde_json::to_vec(question)?;
    line.push(b'\n');
    let fds: Vec<_> = program.iter().map(|fd| fd.as_fd()).collect();
    fdpass::send_fds(stream.as_fd(), &line, &fds).map_err(|e| e.to_io())?;
    let mut answer = Vec::new();
    io::Read::by_ref(&mut stream)
        .take(MAX_LINE as u64)
        .read_to_end(&mut answer)
        .map_err(|e| match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => silent(&stream, limit),
            _ => e,
        })?;
    if answer.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the holder ended without an answer",
        ));
    }
    Ok(serde_json::from_slice(&answer)?)
}

/// The error about a holder that does not answer.
fn silent(stream: &UnixStream, limit: Duration) -> io::Error {
    // Who listens there is who made the socket.
    let what = match fdpass::peer(stream.as_fd()) {
        Ok((_, pid)) => {
            let pid = pid.as_raw_pid();
            format!(
                "the holder (process {pid}) did not answer within {} s: {}",
                limit.as_secs(),
                remedy(pid)
            )
        }
        Err(_) => format!("the holder did not answer within {} s", limit.as_secs()),
    };
    io::Error::new(io::ErrorKind::TimedOut, what)
}

/// What to do about a holder that does not answer or end.
#[must_use]
pub fn remedy(pid: i32) -> String {
    if is_stopped(pid) {
        format!(
            "it is stopped, by a signal or a debugger; `kill -CONT {pid}` lets it go on, or `kill -KILL {pid}` ends it: a daemon that lives then starts another one"
        )
    } else {
        format!(
            "look at it, or end it with `kill -KILL {pid}`: a daemon that lives then starts another one"
        )
    }
}

/// Whether a process is stopped, as job control and debuggers do it.
fn is_stopped(pid: i32) -> bool {
    let Ok(stat) = fs_err::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    // The name, in parentheses, may hold anything.
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    state.is_some_and(|rest| rest.starts_with(['T', 't']))
}

/// The listening end.
#[derive(Debug)]
pub(super) struct Control {
    listener: UnixListener,
    root: PathBuf,
}

/// Somebody who waits for an answer.
#[derive(Debug)]
pub(super) struct Asker(UnixStream);

impl Asker {
    /// Answers. Whoever asked may be gone.
    pub(super) fn answer(mut self, reply: &Reply) {
        if let Ok(mut line) = serde_json::to_vec(reply) {
            line.push(b'\n');
            let _ = self.0.write_all(&line);
        }
    }
}

impl Control {
    pub(super) fn bind(root: &Path) -> io::Result<Self> {
        let (_held, path) = path_in(root)?;
        match fs_err::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            root: root.to_owned(),
        })
    }

    /// The next question, its descriptor, and who waits for the answer.
    pub(super) fn next(&self) -> io::Result<Option<(Question, Option<OwnedFd>, Asker)>> {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(e) => return Err(e),
        };
        let (uid, _) = fdpass::peer(stream.as_fd()).map_err(|e| e.to_io())?;
        if uid != 0 && uid != rustix::process::geteuid().as_raw() {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("dropped a connection of user {uid}"),
            ));
        }
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut line = Vec::new();
        let mut found = None;
        while !line.ends_with(b"\n") && line.len() < MAX_LINE {
            let mut buffer = [0_u8; 4096];
            let (len, mut fds) =
                fdpass::recv_fds(stream.as_fd(), &mut buffer).map_err(|e| e.to_io())?;
            if len == 0 {
                break;
            }
            line.extend_from_slice(buffer.get(..len).unwrap_or_default());
            found = found.or_else(|| fds.pop());
        }
        let asker = Asker(stream);
        match serde_json::from_slice(&line) {
            Ok(question) => Ok(Some((question, found, asker))),
            Err(e) => {
                asker.answer(&Reply::Refused {
                    why: format!("the holder does not understand this: {e}"),
                });
                Ok(None)
            }
        }
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if let Ok((_held, path)) = path_in(&self.root) {
            let _ = fs_err::remove_file(path);
        }
    }
}
