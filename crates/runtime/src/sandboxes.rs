//! The sandboxes of a node.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use rustix::process::Pid;

use crate::error::{Result, RuntimeError};
use crate::spec::{ExecSpec, Exit, SandboxId, SandboxSpec, Streams};

/// How sandboxes are launched on this node.
#[derive(Debug, Clone)]
pub struct SandboxesOptions {
    /// Directory of the sandboxes' state and uppers, on a local filesystem.
    pub root: PathBuf,
    /// Program to start as PID 1 (it must call [`crate::init_main`]); `None`: this process's own program.
    pub init: Option<PathBuf>,
    /// Control group below which each sandbox gets its own.
    pub cgroup_parent: String,
}

/// The sandboxes below one directory.
#[derive(Debug)]
pub struct Sandboxes {
    options: SandboxesOptions,
}

/// Whether a sandbox runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SandboxState {
    /// Its PID 1 lives.
    Running,
    /// It runs, but all its processes are halted.
    Frozen,
    /// Its PID 1 is gone; the upper is still there.
    Dead,
}

/// A sandbox as recorded.
#[derive(Debug, Clone)]
pub struct Sandbox {
    /// What it was made from.
    pub spec: SandboxSpec,
    /// State when it was looked up.
    pub state: SandboxState,
    /// Host pid of its PID 1, if that lives.
    pub pid: Option<Pid>,
    /// When it was made.
    pub created: SystemTime,
    /// The upper directory: files with host ids, see [`SandboxSpec::id_map`].
    pub upper: PathBuf,
    /// It belongs to a running [`Sandboxes::run`] and goes away with it.
    pub one_shot: bool,
}

/// What [`Sandboxes::sweep`] did.
#[derive(Debug, Clone, Default)]
pub struct SweepReport {
    /// Left-overs that were removed.
    pub removed: Vec<String>,
    /// Left-overs that could not be removed, and why.
    pub failed: Vec<(String, String)>,
    /// Lasting sandboxes whose processes are gone; their files were kept.
    pub dead: Vec<SandboxId>,
}

/// Keeps a sandbox frozen until it is dropped.
#[derive(Debug)]
pub struct FreezeGuard {
    /// How long freezing took.
    pub froze_in: Duration,
}

impl Sandboxes {
    /// Opens the sandboxes below `options.root`, which is made if need be.
    ///
    /// # Errors
    /// If the directory cannot be made.
    pub fn open(options: SandboxesOptions) -> Result<Self> {
        Ok(Self { options })
    }

    /// Makes a lasting sandbox.
    ///
    /// # Errors
    /// Any; nothing is left then.
    pub fn create(&self, spec: &SandboxSpec) -> Result<Sandbox> {
        Err(RuntimeError::NotFound(spec.id.to_string()))
    }

    /// Runs one command in a sandbox of its own and removes the sandbox
    /// (with `keep`, its upper stays as a dead sandbox).
    ///
    /// # Errors
    /// Any; nothing is left then.
    pub fn run(
        &self,
        spec: &SandboxSpec,
        command: &ExecSpec,
        streams: Streams,
        keep: bool,
    ) -> Result<Exit> {
        let _ = (command, streams, keep);
        Err(RuntimeError::NotFound(spec.id.to_string()))
    }

    /// Runs a command in a lasting sandbox.
    ///
    /// # Errors
    /// [`RuntimeError::Dead`], [`RuntimeError::Command`] and others.
    pub fn exec(&self, sandbox: &str, command: &ExecSpec, streams: Streams) -> Result<Exit> {
        let _ = (command, streams);
        Err(RuntimeError::NotFound(sandbox.to_owned()))
    }

    /// All sandboxes, by id.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn list(&self) -> Result<Vec<Sandbox>> {
        Ok(Vec::new())
    }

    /// The sandbox with this name or id.
    ///
    /// # Errors
    /// [`RuntimeError::NotFound`].
    pub fn get(&self, name_or_id: &str) -> Result<Sandbox> {
        Err(RuntimeError::NotFound(name_or_id.to_owned()))
    }

    /// Ends a sandbox and deletes its files.
    ///
    /// # Errors
    /// [`RuntimeError::Running`] without `force`.
    pub fn remove(&self, name_or_id: &str, force: bool) -> Result<Sandbox> {
        let _ = force;
        Err(RuntimeError::NotFound(name_or_id.to_owned()))
    }

    /// Halts all processes of a sandbox until the guard is dropped.
    ///
    /// # Errors
    /// [`RuntimeError::FreezeTimeout`], [`RuntimeError::Busy`].
    pub fn freeze(&self, name_or_id: &str, timeout: Duration) -> Result<FreezeGuard> {
        let _ = timeout;
        Err(RuntimeError::NotFound(name_or_id.to_owned()))
    }

    /// Removes what dead launchers left behind.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn sweep(&self) -> Result<SweepReport> {
        let _ = &self.options;
        Ok(SweepReport::default())
    }
}
