//! From what a caller asks for to what is executed: search path, environment,
//! user.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt as _;

use layerpack_sys::process::{Credentials, LaunchFailure, Stage};
use rustix::io::Errno;

use crate::capabilities;
use crate::error::{Result, RuntimeError};
use crate::protocol::Plan;
use crate::spec::{ExecSpec, SandboxSpec};
use crate::user;

/// `PATH` of commands unless the sandbox or the command sets it.
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Added to it where there is a channel.
const CHANNEL_PATH: &[u8] = b":/dev/layerpack";

fn c_string(what: &'static str, bytes: impl Into<Vec<u8>>) -> Result<CString> {
    CString::new(bytes).map_err(|_| RuntimeError::InvalidSpec {
        what,
        problem: "must not contain a zero byte".to_owned(),
    })
}

/// Makes the plan of `command` in the sandbox whose tree is at `root`.
pub(crate) fn plan(spec: &SandboxSpec, command: &ExecSpec, root: BorrowedFd<'_>) -> Result<Plan> {
    let Some(program) = command.argv.first().filter(|p| !p.is_empty()) else {
        return Err(RuntimeError::InvalidSpec {
            what: "command",
            problem: "give a program to run".to_owned(),
        });
    };
    let user = user::look_up(root, command.user.as_deref(), spec.id_map.count)?;
    let env = environment(spec, command, &user.home)?;
    let path = env.get(&b"PATH"[..]).cloned().unwrap_or_default();
    let cwd = command
        .cwd
        .as_deref()
        .map_or(OsStr::new("/"), |p| p.as_os_str());
    if !cwd.as_bytes().starts_with(b"/") {
        return Err(RuntimeError::InvalidSpec {
            what: "working directory",
            problem: format!("{} is not absolute", cwd.display()),
        });
    }
    Ok(Plan {
        paths: candidates(program.as_bytes(), &path)?,
        argv: command
            .argv
            .iter()
            .map(|arg| c_string("argument", arg.as_bytes()))
            .collect::<Result<_>>()?,
        env: env
            .into_iter()
            .map(|(name, value)| c_string("environment", [name, value].join(&b'=')))
            .collect::<Result<_>>()?,
        cwd: c_string("working directory", cwd.as_bytes())?,
        credentials: Credentials {
            uid: user.uid,
            gid: user.gid,
            groups: user.groups,
            capabilities: capabilities::DEFAULT,
        },
        terminal: command.terminal.is_some(),
        no_new_privs: spec.no_new_privileges,
    })
}

fn environment(
    spec: &SandboxSpec,
    command: &ExecSpec,
    home: &[u8],
) -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut env = BTreeMap::new();
    let mut set = |name: &[u8], value: &[u8]| -> Result<()> {
        if name.is_empty() || name.contains(&b'=') {
            return Err(RuntimeError::InvalidSpec {
                what: "environment",
                problem: format!(
                    "{:?} is not a variable's name",
                    String::from_utf8_lossy(name)
                ),
            });
        }
        env.insert(name.to_vec(), value.to_vec());
        Ok(())
    };
    if spec.channel {
        set(b"PATH", &[DEFAULT_PATH, CHANNEL_PATH].concat())?;
    } else {
        set(b"PATH", DEFAULT_PATH)?;
    }
    set(b"HOME", home)?;
    set(b"HOSTNAME", spec.hostname().as_bytes())?;
    if command.terminal.is_some() {
        set(b"TERM", b"xterm")?;
    }
    for (name, value) in &spec.env {
        set(name.as_bytes(), value.as_bytes())?;
    }
    for (name, value) in &command.env {
        set(name.as_bytes(), value.as_bytes())?;
    }
    Ok(env)
}

/// The paths that `execvp` would try.
fn candidates(program: &[u8], path: &[u8]) -> Result<Vec<CString>> {
    if program.contains(&b'/') {
        return Ok(vec![c_string("command", program)?]);
    }
    path.split(|&b| b == b':')
        .map(|dir| {
            // An empty entry means the working directory.
            let dir = if dir.is_empty() { &b"."[..] } else { dir };
            c_string("command", [dir, program].join(&b'/'))
        })
        .collect()
}

/// The error of a command that could not be executed, with the exit code that
/// shells and docker give it.
pub(crate) fn not_executed(command: &str, failure: &LaunchFailure) -> RuntimeError {
    not_executed_raw(
        command,
        failure.stage.describe(),
        failure.stage == Stage::Exec,
        failure.errno,
    )
}

/// As [`not_executed`], from what PID 1 reports.
pub(crate) fn not_executed_raw(
    command: &str,
    stage: &str,
    exec: bool,
    errno: Errno,
) -> RuntimeError {
    let command = command.to_owned();
    let (problem, code) = match errno {
        _ if !exec => (format!("{stage}: {}", std::io::Error::from(errno)), 126),
        Errno::NOENT | Errno::NOTDIR => (
            "command not found in the sandbox (or its interpreter is missing)".to_owned(),
            127,
        ),
        Errno::ACCESS | Errno::PERM | Errno::ISDIR => {
            ("not executable: permission denied".to_owned(), 126)
        }
        Errno::NOEXEC => (
            "not executable: neither a program for this machine nor a script with #!".to_owned(),
            126,
        ),
        other => (std::io::Error::from(other).to_string(), 126),
    };
    RuntimeError::Command {
        command,
        problem,
        code,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_path_as_execvp_has_it() {
        let list = |program: &[u8], path: &[u8]| -> Vec<String> {
            candidates(program, path)
                .unwrap()
                .iter()
                .map(|c| c.to_string_lossy().into_owned())
                .collect()
        };
        assert_eq!(list(b"ls", b"/a:/b"), ["/a/ls", "/b/ls"]);
        assert_eq!(list(b"ls", b"/a::"), ["/a/ls", "./ls", "./ls"]);
        assert_eq!(list(b"./ls", b"/a"), ["./ls"]);
        assert!(candidates(b"a\0b", b"/a").is_err());
    }
}
