//! What the launcher tells PID 1, and what PID 1 answers.
//!
//! One request: a length, a JSON head, and a block of C strings (arguments and
//! environment need not be text), with the descriptors of the sandbox's mounts
//! and streams. One answer, JSON, ended by the socket's end. Both parts of a
//! request are bounded; each side treats the other's bytes as untrusted.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use layerpack_sys::fdpass::{recv_fds, send_fds};
use layerpack_sys::process::Credentials;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{Result, RuntimeError};
use crate::mounts::TTY_GROUP;
use crate::spec::IdMap;

/// Largest request, in bytes: the kernel's own limit for arguments is 2 MiB here.
const REQUEST_LIMIT: usize = 4 << 20;
/// Changes with what is said: PID 1 may be a program of its own.
const VERSION: u32 = 1;
/// Largest answer, in bytes.
const ANSWER_LIMIT: usize = 64 << 10;

/// A command with everything looked up, ready to be executed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Paths to try.
    pub(crate) paths: Vec<CString>,
    /// Arguments.
    pub(crate) argv: Vec<CString>,
    /// Environment.
    pub(crate) env: Vec<CString>,
    /// Working directory.
    pub(crate) cwd: CString,
    /// Ids inside the sandbox.
    pub(crate) credentials: Credentials,
    /// Its streams are a terminal.
    pub(crate) terminal: bool,
    /// Exec gives no privileges.
    pub(crate) no_new_privs: bool,
}

impl Plan {
    /// Host ids of the command's user and group.
    pub(crate) fn host_owner(&self, map: IdMap) -> (u32, u32) {
        let host = |id: u32| map.base.saturating_add(id);
        (host(self.credentials.uid), host(self.credentials.gid))
    }

    /// Host ids that own the command's terminal: its group is `tty`, by custom 5.
    pub(crate) fn terminal_owner(&self, map: IdMap) -> (u32, u32) {
        (self.host_owner(map).0, map.base.saturating_add(TTY_GROUP))
    }
}

/// Head of a request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Head {
    version: u32,
    /// Host name.
    pub(crate) hostname: String,
    /// The sandbox has a network namespace of its own.
    pub(crate) own_network: bool,
    /// v1 controllers to show in `/sys/fs/cgroup`; `None`: show v2.
    pub(crate) v1_controllers: Option<Vec<String>>,
    /// Number of the terminal to show as `/dev/console`.
    pub(crate) console: Option<u32>,
    /// There is a channel.
    pub(crate) channel: bool,
    /// The command of a one-shot sandbox.
    command: Option<CommandHead>,
}

#[derive(Debug, Serialize, Deserialize)]
struct CommandHead {
    paths: usize,
    argv: usize,
    env: usize,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    capabilities: u64,
    terminal: bool,
    no_new_privs: bool,
}

/// A request: [`Head`], command, descriptors.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) head: Head,
    pub(crate) command: Option<Plan>,
    /// Mounts first (root, dev, pts, shm, sys unless `own_network`, the channel's
    /// directory and program if there is one), then the command's three streams.
    pub(crate) fds: Vec<OwnedFd>,
}

/// PID 1's answer once the sandbox is set up (and its command executed).
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// All is well.
    Ready,
    /// A step failed.
    Failed { step: String, problem: String },
    /// The command could not be executed.
    NotExecuted {
        errno: i32,
        stage: String,
        exec: bool,
    },
}

impl Head {
    pub(crate) fn new(hostname: String, own_network: bool) -> Self {
        Self {
            version: VERSION,
            hostname,
            own_network,
            v1_controllers: None,
            console: None,
            channel: false,
            command: None,
        }
    }
}

fn broken(problem: impl ToString) -> RuntimeError {
    RuntimeError::Setup {
        step: "talking to PID 1 of the sandbox".to_owned(),
        problem: problem.to_string(),
    }
}

/// Sends a request.
pub(crate) fn send_request(
    socket: BorrowedFd<'_>,
    mut head: Head,
    command: Option<&Plan>,
    fds: &[BorrowedFd<'_>],
) -> Result<()> {
    let mut strings = Vec::new();
    if let Some(plan) = command {
        let cwd = std::slice::from_ref(&plan.cwd);
        for list in [&plan.paths, &plan.argv, &plan.env, cwd] {
            for string in list {
                strings.extend_from_slice(string.as_bytes_with_nul());
            }
        }
        head.command = Some(CommandHead {
            paths: plan.paths.len(),
            argv: plan.argv.len(),
            env: plan.env.len(),
            uid: plan.credentials.uid,
            gid: plan.credentials.gid,
            groups: plan.credentials.groups.clone(),
            capabilities: plan.credentials.capabilities,
            terminal: plan.terminal,
            no_new_privs: plan.no_new_privs,
        });
    }
    let head = serde_json::to_vec(&head).map_err(broken)?;
    let mut message = Vec::with_capacity(8 + head.len() + strings.len());
    for part in [&head, &strings] {
        let len = u32::try_from(part.len()).map_err(broken)?;
        message.extend_from_slice(&len.to_le_bytes());
    }
    message.extend_from_slice(&head);
    message.extend_from_slice(&strings);
    if message.len() > REQUEST_LIMIT {
        return Err(broken("arguments and environment are too long"));
    }
    send_fds(socket, &message, fds)?;
    Ok(())
}

/// Receives a request.
pub(crate) fn recv_request(socket: BorrowedFd<'_>) -> Result<Request> {
    let mut bytes = Vec::new();
    let mut fds = Vec::new();
    let mut fill = |bytes: &mut Vec<u8>, want: usize| -> Result<()> {
        while bytes.len() < want {
            let have = bytes.len();
            bytes.resize(want, 0);
            let (n, new) = recv_fds(socket, bytes.get_mut(have..).unwrap_or_default())?;
            bytes.truncate(have + n);
            fds.extend(new);
            if n == 0 {
                return Err(broken("the launcher has ended"));
            }
        }
        Ok(())
    };
    fill(&mut bytes, 8)?;
    let number = |at: usize| {
        bytes
            .get(at..at + 4)
            .and_then(|b| <[u8; 4]>::try_from(b).ok())
            .and_then(|b| usize::try_from(u32::from_le_bytes(b)).ok())
            .unwrap_or(usize::MAX)
    };
    let (head_len, strings_len) = (number(0), number(4));
    let total = head_len.saturating_add(strings_len).saturating_add(8);
    if total > REQUEST_LIMIT {
        return Err(broken("a request is too long"));
    }
    fill(&mut bytes, total)?;
    let (head, strings) = bytes
        .get(8..)
        .and_then(|rest| rest.split_at_checked(head_len))
        .ok_or_else(|| broken("a request is cut off"))?;
    let mut head: Head = serde_json::from_slice(head).map_err(broken)?;
    if head.version != VERSION {
        return Err(broken(
            "its program is of another version: install layerpack and layerpack-init together",
        ));
    }
    let command = match head.command.take() {
        Some(command) => Some(plan_from(command, strings)?),
        None => None,
    };
    Ok(Request { head, command, fds })
}

fn plan_from(command: CommandHead, strings: &[u8]) -> Result<Plan> {
    let mut strings = strings.split_inclusive(|&b| b == 0);
    let mut take = |count: usize| -> Result<Vec<CString>> {
        let list: Vec<CString> = strings
            .by_ref()
            .take(count)
            .map_while(|s| CString::from_vec_with_nul(s.to_vec()).ok())
            .collect();
        if list.len() == count {
            Ok(list)
        } else {
            Err(broken("a request is cut off"))
        }
    };
    Ok(Plan {
        paths: take(command.paths)?,
        argv: take(command.argv)?,
        env: take(command.env)?,
        cwd: take(1)?
            .pop()
            .ok_or_else(|| broken("a request is cut off"))?,
        credentials: Credentials {
            uid: command.uid,
            gid: command.gid,
            groups: command.groups,
            capabilities: command.capabilities,
        },
        terminal: command.terminal,
        no_new_privs: command.no_new_privs,
    })
}

/// Sends an answer; the launcher may be gone, which is not PID 1's concern.
pub(crate) fn send_answer(socket: BorrowedFd<'_>, answer: &Answer) {
    if let Ok(bytes) = serde_json::to_vec(answer) {
        let bytes = bytes
            .get(..ANSWER_LIMIT.min(bytes.len()))
            .unwrap_or_default();
        let _ = rustix::net::send(socket, bytes, rustix::net::SendFlags::NOSIGNAL);
    }
}

/// Receives the answer; `None` if PID 1 ended without one.
pub(crate) fn recv_answer(socket: impl AsFd) -> Result<Option<Answer>> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0u8; ANSWER_LIMIT];
    while bytes.len() < ANSWER_LIMIT {
        let n = match rustix::io::retry_on_intr(|| rustix::io::read(&socket, &mut buffer)) {
            Ok(n) => n,
            Err(Errno::CONNRESET) => 0,
            Err(e) => return Err(broken(e)),
        };
        if n == 0 {
            break;
        }
        bytes.extend_from_slice(buffer.get(..n).unwrap_or_default());
    }
    if bytes.is_empty() {
        return Ok(None);
    }
    serde_json::from_slice(&bytes).map(Some).map_err(broken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    fn plan() -> Plan {
        let c = |s: &str| CString::new(s).unwrap();
        Plan {
            paths: vec![c("/bin/x"), c("/usr/bin/x")],
            argv: vec![c("x"), CString::new(vec![0xff, b' ']).unwrap(), c("")],
            env: vec![c("A=b")],
            cwd: c("/w"),
            credentials: Credentials {
                uid: 1,
                gid: 2,
                groups: vec![3],
                capabilities: 4,
            },
            terminal: true,
            no_new_privs: true,
        }
    }

    #[test]
    fn a_request_arrives_as_it_was() {
        let (a, b) = UnixStream::pair().unwrap();
        let (read, _write) = rustix::pipe::pipe().unwrap();
        let head = Head::new("box".to_owned(), true);
        send_request(a.as_fd(), head, Some(&plan()), &[read.as_fd()]).unwrap();
        let request = recv_request(b.as_fd()).unwrap();
        assert_eq!(request.command, Some(plan()));
        assert_eq!(
            (request.head.hostname.as_str(), request.fds.len()),
            ("box", 1)
        );
    }

    #[test]
    fn damaged_requests_are_errors() {
        for bytes in [
            &b"\xff\xff\xff\xff\xff\xff\xff\xff"[..],
            b"\x02\0\0\0\0\0\0\0{",
            b"\x02\0\0\0\0\0\0\0[]",
            b"\0\0\0",
        ] {
            let (mut a, b) = UnixStream::pair().unwrap();
            a.write_all(bytes).unwrap();
            drop(a);
            assert!(recv_request(b.as_fd()).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn an_answer_or_none() {
        let (a, b) = UnixStream::pair().unwrap();
        send_answer(a.as_fd(), &Answer::Ready);
        drop(a);
        assert!(matches!(recv_answer(&b).unwrap(), Some(Answer::Ready)));
        assert!(recv_answer(&b).unwrap().is_none());
    }
}
