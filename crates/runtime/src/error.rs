//! The crate's error.

use std::path::PathBuf;

use layerpack_sys::SysError;

use crate::spec::{SandboxId, SandboxName};

/// Result of this crate's functions.
pub type Result<T, E = RuntimeError> = std::result::Result<T, E>;

/// Why a sandbox operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// A name or id has characters that cannot be used.
    #[error(
        "{what} {value:?} is not valid: use 1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit"
    )]
    InvalidName {
        /// What was named: a sandbox, an id.
        what: &'static str,
        /// The text given.
        value: String,
    },
    /// A setting is out of range.
    #[error("{what}: {problem}")]
    InvalidSpec {
        /// The setting.
        what: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// No sandbox has this id or name.
    #[error("no sandbox {0:?}: see `layerpack sandbox ls`")]
    NotFound(String),
    /// The name belongs to another sandbox.
    #[error("the name {name} is taken by sandbox {owner}: remove that one or choose another name")]
    NameTaken {
        /// The name asked for.
        name: SandboxName,
        /// The sandbox that has it.
        owner: String,
    },
    /// The id belongs to another sandbox.
    #[error("sandbox {0} exists already")]
    IdTaken(SandboxId),
    /// The sandbox has ended, so nothing can run in it.
    #[error(
        "sandbox {0} is not running any more: its files can still be packed; remove it with `layerpack sandbox rm`"
    )]
    Dead(SandboxId),
    /// The sandbox runs and may not be removed just so.
    #[error("sandbox {0} is running: remove it with --force")]
    Running(SandboxId),
    /// Another operation holds the sandbox.
    #[error("sandbox {id} is busy: {by}")]
    Busy {
        /// The sandbox.
        id: SandboxId,
        /// What holds it.
        by: &'static str,
    },
    /// The processes of a sandbox did not come to rest in time.
    #[error(
        "sandbox {id} could not be frozen within {waited_ms} ms: a process of it is stuck in the kernel"
    )]
    FreezeTimeout {
        /// The sandbox.
        id: SandboxId,
        /// How long it was waited for.
        waited_ms: u128,
    },
    /// The command could not be started.
    #[error("{command}: {problem}")]
    Command {
        /// The command as given.
        command: String,
        /// Why it could not be started.
        problem: String,
        /// Exit code by the custom of shells: 127 not found, 126 not executable.
        code: u8,
    },
    /// The user to run as is unknown in the sandbox.
    #[error("user {user:?}: {problem}")]
    User {
        /// The user as given.
        user: String,
        /// What is wrong.
        problem: String,
    },
    /// A step of setting up the sandbox failed.
    #[error("setting up the sandbox: {step}: {problem}")]
    Setup {
        /// What was being done.
        step: String,
        /// Why it failed, and the remedy if there is one.
        problem: String,
    },
    /// The control groups of this machine cannot be used as needed.
    #[error("control group {path}: {problem}", path = path.display())]
    Cgroup {
        /// The directory or file of the group.
        path: PathBuf,
        /// What is wrong, and the remedy.
        problem: String,
    },
    /// The record of a sandbox on disk is damaged.
    #[error("record {path} is damaged: {problem}; remove the sandbox with `layerpack sandbox rm -f {id}`", path = path.display())]
    Record {
        /// The sandbox.
        id: SandboxId,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The command ran, but what it wrote could not be passed on to the caller.
    #[error("the command's {stream} was lost: writing it failed: {problem}")]
    Output {
        /// Standard output or standard error.
        stream: &'static str,
        /// Why it could not be written.
        problem: String,
    },
    /// A system call failed.
    #[error(transparent)]
    Sys(#[from] SysError),
    /// A file operation failed; the message names the path.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl RuntimeError {
    /// The exit code which a command line shows for this error, as docker
    /// does: 127 command not found, 126 not executable, else 125.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Command { code, .. } => *code,
            _ => 125,
        }
    }
}
