//! The sandboxes of a node.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use layerpack_sys::process::{self, Join, Launch, Launched, Program};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::process::{Pid, Signal};

use crate::cgroup::{Group, Hierarchies};
use crate::error::{Result, RuntimeError};
use crate::launch::{self, Programs};
use crate::protocol::Plan;
use crate::record::{InitProcess, Layout, Lock, Record};
use crate::seccomp;
use crate::session::{Outcome, Served, Session};
use crate::spec::{ExecSpec, Exit, SandboxId, SandboxSpec, Streams, Terminal};
use crate::user::open_inside;

/// Exit code of a command that was killed because its time was over.
const TIMED_OUT: u8 = 124;

/// How long a removal waits for a snapshot to end.
const SNAPSHOT_WAIT: Duration = Duration::from_secs(60);
/// How long the processes of a killed sandbox may take to end.
const END_WAIT: Duration = Duration::from_secs(20);

/// `f_type` of devpts.
const DEVPTS_MAGIC: i64 = 0x1cd1;

/// How sandboxes are launched on this node.
#[derive(Debug, Clone)]
pub struct SandboxesOptions {
    /// Directory of the sandboxes' state and uppers, on a local filesystem.
    pub root: PathBuf,
    /// Program to start as PID 1 (it must call [`crate::init_main`]); `None`: this process's own program.
    pub init: Option<PathBuf>,
    /// Program to show in sandboxes that have a channel, as `/dev/layerpack/pack_diff`; `None`: this
    /// process's own program.
    pub agent: Option<PathBuf>,
    /// Control group below which each sandbox gets its own.
    pub cgroup_parent: String,
    /// Halt sandboxes by signals also where control groups can freeze.
    pub stop_by_signals: bool,
}

/// The sandboxes below one directory.
///
/// Any number of processes may use the same directory; they agree by locks.
#[derive(Debug)]
pub struct Sandboxes {
    options: SandboxesOptions,
    pub(crate) layout: Layout,
    pub(crate) hierarchies: Hierarchies,
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
    /// The directory that its processes see as `/dev/layerpack`, if its specification says so.
    pub channel: PathBuf,
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
    /// Leases of the sandboxes removed.
    pub leases: Vec<String>,
}

/// A sandbox that is being made; removed on drop unless it was finished.
struct Making<'a> {
    sandboxes: &'a Sandboxes,
    spec: &'a SandboxSpec,
    group: Option<Group>,
    lock: Option<Lock>,
    finished: bool,
}

impl Making<'_> {
    fn clean(&mut self) -> Result<()> {
        self.finished = true;
        let group = match &self.group {
            Some(group) => {
                group.kill();
                group.remove()
            }
            None => Ok(()),
        };
        self.sandboxes.layout.delete(self.spec)?;
        self.lock = None;
        group
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        if !self.finished {
            let _ = self.clean();
        }
    }
}

impl Sandboxes {
    /// Opens the sandboxes below `options.root`, which is made if need be.
    ///
    /// # Errors
    /// If the directory cannot be made, or there are no control groups.
    pub fn open(options: SandboxesOptions) -> Result<Self> {
        let parent = options.cgroup_parent.as_str();
        if parent.is_empty() || parent.starts_with('/') || parent.split('/').any(|p| p == "..") {
            return Err(RuntimeError::InvalidSpec {
                what: "control group",
                problem: format!("{parent:?} is not a relative path without '..'"),
            });
        }
        let hierarchies = Hierarchies::detect(parent)?;
        let layout = Layout::open(&options.root)?;
        Ok(Self {
            options,
            layout,
            hierarchies,
        })
    }

    fn programs(&self) -> Programs<'_> {
        Programs {
            init: self.options.init.as_deref(),
            agent: self.options.agent.as_deref(),
        }
    }

    pub(crate) fn stops_by_signals(&self) -> bool {
        self.options.stop_by_signals
    }

    fn make<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        one_shot: bool,
        keep: bool,
    ) -> Result<(Making<'a>, Record)> {
        spec.check()?;
        let lock = match self.layout.make(spec) {
            // Looked at only now: a name that is free costs nothing.
            Err(RuntimeError::NameTaken { owner, .. }) if self.reclaim_owner(&owner) => {
                self.layout.make(spec)?
            }
            other => other?,
        };
        let mut making = Making {
            sandboxes: self,
            spec,
            group: None,
            lock: Some(lock),
            finished: false,
        };
        let record = Record::new(spec.clone(), one_shot, keep);
        self.layout.write(&record)?;
        making.group = Some(self.hierarchies.create(&spec.id, &spec.limits)?);
        Ok((making, record))
    }

    /// Makes a lasting sandbox: an empty one, for [`Sandboxes::exec`]. It
    /// outlives the caller.
    ///
    /// # Errors
    /// Any; nothing is left then.
    pub fn create(&self, spec: &SandboxSpec) -> Result<Sandbox> {
        let (mut making, mut record) = self.make(spec, false, false)?;
        let dirs = self.layout.directories(&spec.id);
        let group = making.group.as_ref().ok_or_else(|| no_group(&spec.id))?;
        let (init, _) = launch::launch(spec, &dirs, group, self.programs(), None)?;
        record.init = Some(InitProcess::of(init.launched().pid)?);
        self.layout.write(&record)?;
        init.keep();
        making.finished = true;
        Ok(self.describe(record))
    }

    /// Runs one command in a sandbox of its own and removes the sandbox
    /// (with `keep`, it stays as a dead one, with its upper).
    ///
    /// The sandbox dies with the calling **thread**, whatever ends that.
    ///
    /// # Errors
    /// Any; nothing is left then. [`RuntimeError::Output`] if the command ran
    /// to its end but what it wrote could not be passed on; with `keep`, the
    /// sandbox stays then too.
    pub fn run(
        &self,
        spec: &SandboxSpec,
        command: &ExecSpec,
        streams: Streams,
        keep: bool,
    ) -> Result<Exit> {
        let (mut making, mut record) = self.make(spec, true, keep)?;
        let dirs = self.layout.directories(&spec.id);
        let group = making.group.as_ref().ok_or_else(|| no_group(&spec.id))?;
        let command = Some((command, streams));
        let (init, session) = launch::launch(spec, &dirs, group, self.programs(), command)?;
        let session = session.ok_or_else(|| no_group(&spec.id))?;
        record.init = Some(InitProcess::of(init.launched().pid)?);
        self.layout.write(&record)?;
        let Served { outcome, lost } = session.serve(init.launched().pidfd.as_fd(), &|signal| {
            let _ = init.launched().kill(signal);
        })?;
        if outcome == Outcome::TimedOut {
            group.kill();
            let _ = init.launched().kill(Signal::KILL);
        }
        let ended = init.wait()?;
        let exit = Exit {
            code: if outcome == Outcome::TimedOut {
                TIMED_OUT
            } else {
                ended.shell_code()
            },
            oom_killed: group.oom_kills() > 0,
            timed_out: outcome == Outcome::TimedOut,
        };
        if keep {
            group.remove()?;
            record.one_shot = false;
            self.layout.write(&record)?;
            making.finished = true;
        } else {
            making.clean()?;
        }
        lost.map_or(Ok(exit), Err)
    }

    /// Runs a command in a lasting sandbox, which the command may leave
    /// background processes in. The command itself dies with the calling **thread**.
    ///
    /// # Errors
    /// [`RuntimeError::Dead`], [`RuntimeError::Command`], [`RuntimeError::Output`]
    /// and others.
    pub fn exec(&self, sandbox: &str, command: &ExecSpec, streams: Streams) -> Result<Exit> {
        let id = self.layout.find(sandbox)?;
        let record = self.record(&id)?;
        let spec = &record.spec;
        let init = record.init.as_ref().ok_or_else(|| RuntimeError::Busy {
            id: id.clone(),
            by: "it is still being made",
        })?;
        let dead = || RuntimeError::Dead(id.clone());
        let pid = init.alive().ok_or_else(dead)?;
        let pidfd = layerpack_sys::ns::pidfd_open(pid).map_err(|_| dead())?;
        // It was the right process before the descriptor was taken, and is now.
        init.alive().ok_or_else(dead)?;
        let group = self.hierarchies.group(&id, &spec.limits);
        self.heal(&id, &group)?;

        let path = format!("/proc/{}/root", pid.as_raw_nonzero());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&path, flags, Mode::empty()).map_err(|_| dead())?;
        let plan = crate::command::plan(spec, command, root.as_fd())?;
        let (session, ends) = match command.terminal {
            None => Session::with_pipes(streams, command, plan.host_owner(spec.id_map))?,
            Some(size) => self.terminal(&root, spec, streams, command, size, &plan)?,
        };
        let before = group.oom_kills();
        let launched = {
            let [stdin, stdout, stderr] = ends.as_fds();
            enter(
                spec,
                &group,
                &pidfd,
                &plan,
                [stdin, stdout, stderr],
                command,
            )?
        };
        drop(ends);
        let served = session.serve(launched.pidfd.as_fd(), &|signal| {
            let _ = launched.kill(signal);
        });
        if !served
            .as_ref()
            .is_ok_and(|served| served.outcome == Outcome::Ended)
        {
            // It leads its session and group.
            let _ = rustix::process::kill_process_group(launched.pid, Signal::KILL);
            let _ = launched.kill(Signal::KILL);
        }
        let (ended, Served { outcome, lost }) = (launched.wait()?, served?);
        let exit = Exit {
            code: if outcome == Outcome::TimedOut {
                TIMED_OUT
            } else {
                ended.shell_code()
            },
            oom_killed: group.oom_kills() > before,
            timed_out: outcome == Outcome::TimedOut,
        };
        lost.map_or(Ok(exit), Err)
    }

    /// A session on a new terminal of the sandbox's own devpts.
    fn terminal(
        &self,
        root: &OwnedFd,
        spec: &SandboxSpec,
        streams: Streams,
        command: &ExecSpec,
        size: Terminal,
        plan: &Plan,
    ) -> Result<(Session, crate::session::ChildEnds)> {
        let error = |problem: String| RuntimeError::Setup {
            step: "opening a terminal in the sandbox".to_owned(),
            problem,
        };
        // The sandbox's root may have put anything there: look before opening.
        let found = open_inside(
            root.as_fd(),
            "dev/pts/ptmx",
            OFlags::PATH | OFlags::NOFOLLOW,
        )
        .map_err(|e| error(e.to_string()))?;
        let filesystem = rustix::fs::fstatfs(&found).map_err(|e| error(e.to_string()))?;
        let stat = rustix::fs::fstat(&found).map_err(|e| error(e.to_string()))?;
        if filesystem.f_type != DEVPTS_MAGIC || stat.st_rdev != rustix::fs::makedev(5, 2) {
            return Err(error(
                "/dev/pts/ptmx is not a terminal multiplexer any more".to_owned(),
            ));
        }
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&found));
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let master =
            rustix::fs::open(link, flags, Mode::empty()).map_err(|e| error(e.to_string()))?;
        Session::with_terminal(
            streams,
            command,
            size,
            master,
            plan.terminal_owner(spec.id_map),
        )
    }

    pub(crate) fn record(&self, id: &SandboxId) -> Result<Record> {
        self.layout.read(id)?.ok_or_else(|| RuntimeError::Busy {
            id: id.clone(),
            by: "it is still being made",
        })
    }

    fn describe(&self, record: Record) -> Sandbox {
        let id = &record.spec.id;
        let pid = record.init.as_ref().and_then(InitProcess::alive);
        let group = self.hierarchies.group(id, &record.spec.limits);
        let state = match pid {
            None => SandboxState::Dead,
            Some(_) if group.is_frozen().unwrap_or(false) => SandboxState::Frozen,
            Some(_) => SandboxState::Running,
        };
        Sandbox {
            upper: self.layout.directories(id).upper,
            channel: self.layout.directories(id).channel,
            created: record.created(),
            one_shot: record.one_shot,
            spec: record.spec,
            state,
            pid,
        }
    }

    /// All sandboxes, by id. Those with a damaged record are left out, with a
    /// warning in the log. One-shot sandboxes that a dead launcher should have
    /// removed are removed first.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn list(&self) -> Result<Vec<Sandbox>> {
        let mut found = Vec::new();
        for id in self.layout.ids()? {
            match self.layout.read(&id) {
                Ok(Some(record)) => {
                    if !self.reclaim(&record) {
                        found.push(self.describe(record));
                    }
                }
                Ok(None) => {}
                Err(e) => tracing::warn!(sandbox = %id, "{e}"),
            }
        }
        Ok(found)
    }

    /// The id that a name or an id means, also if the record is damaged.
    ///
    /// # Errors
    /// [`RuntimeError::NotFound`].
    pub fn find(&self, name_or_id: &str) -> Result<SandboxId> {
        self.layout.find(name_or_id)
    }

    /// The sandbox with this name or id.
    ///
    /// # Errors
    /// [`RuntimeError::NotFound`]; [`RuntimeError::Record`] if its record is damaged.
    pub fn get(&self, name_or_id: &str) -> Result<Sandbox> {
        let id = self.layout.find(name_or_id)?;
        Ok(self.describe(self.record(&id)?))
    }

    /// Ends a sandbox and deletes its files; what it was is returned, so that
    /// the caller can release its lease.
    ///
    /// With `force` also one whose record is damaged or lost: what is returned then says
    /// no more than its id, which is also given as its lease.
    ///
    /// # Errors
    /// [`RuntimeError::Running`] without `force` if it runs;
    /// [`RuntimeError::Busy`] while somebody makes or runs it, or when a snapshot that is being made
    /// of it does not end within a minute. With `force` its processes are killed before that wait, so
    /// that they cannot ask for one snapshot after the other.
    pub fn remove(&self, name_or_id: &str, force: bool) -> Result<Sandbox> {
        let id = self.layout.find(name_or_id)?;
        let record = match self.record(&id) {
            Err(error) if force && self.is_damaged(&id, &error)? => {
                tracing::warn!(sandbox = %id, "{error}");
                return self.remove_damaged(&id);
            }
            other => other?,
        };
        let group = self.hierarchies.group(&id, &record.spec.limits);
        let sandbox = self.describe(record.clone());
        if sandbox.pid.is_some() && !force {
            return Err(RuntimeError::Running(id));
        }
        let busy = |by| RuntimeError::Busy { id: id.clone(), by };
        let Some(_lock) = self.layout.lock(&id)? else {
            if sandbox.pid.is_some() && record.one_shot {
                // Its launcher is there to clean up behind it.
                group.kill();
                return Ok(sandbox);
            }
            return Err(busy("it is being made, run or removed"));
        };
        let mut pack = self.layout.pack_lock(&id, Duration::ZERO)?;
        if pack.is_none() {
            if force {
                self.kill(&record, &group);
            }
            pack = self.layout.pack_lock(&id, SNAPSHOT_WAIT)?;
        }
        let Some(_pack) = pack else {
            return Err(busy("a snapshot of it is being made"));
        };
        let Some(_freeze) = self.layout.freeze_lock(&id)? else {
            return Err(busy("it is frozen for a snapshot"));
        };
        self.destroy(&id, Some(&record), &group)?;
        Ok(sandbox)
    }

    /// Kills what runs, and does not wait for the end of it.
    fn kill(&self, record: &Record, group: &Group) {
        let init = record.init.as_ref();
        if let Some(pid) = init.and_then(InitProcess::alive)
            && let Ok(pidfd) = layerpack_sys::ns::pidfd_open(pid)
            && init.and_then(InitProcess::alive).is_some()
        {
            let _ = rustix::process::pidfd_send_signal(&pidfd, Signal::KILL);
        }
        group.kill();
    }

    /// Kills what runs, then removes control groups, name and files.
    pub(crate) fn destroy(
        &self,
        id: &SandboxId,
        record: Option<&Record>,
        group: &Group,
    ) -> Result<()> {
        let init = record.and_then(|record| record.init.as_ref());
        if let Some(pid) = init.and_then(InitProcess::alive)
            && let Ok(pidfd) = layerpack_sys::ns::pidfd_open(pid)
            && init.and_then(InitProcess::alive).is_some()
        {
            let _ = rustix::process::pidfd_send_signal(&pidfd, Signal::KILL);
            group.kill();
            wait_end(&pidfd, id)?;
        } else {
            group.kill();
        }
        group.remove()?;
        match record {
            Some(record) => self.layout.delete(&record.spec),
            None => self.layout.delete_unknown(id),
        }
    }

    /// Removes what dead launchers left behind: one-shot sandboxes, half-made
    /// ones, interrupted deletions. Sandboxes whose processes are gone and whose
    /// files are to stay (lasting, or run with `keep`) lose their control groups only.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn sweep(&self) -> Result<SweepReport> {
        let mut report = SweepReport::default();
        for path in self.layout.deleting()? {
            let name = path.display().to_string();
            match crate::delete::tree(&path) {
                Ok(()) => report.removed.push(name),
                Err(e) => report.failed.push((name, e.to_string())),
            }
        }
        for id in self.layout.ids()? {
            let lock = {
                // So that a directory without a lock is not one just being made.
                let _alone = self.layout.lock_all(FlockOperation::LockExclusive)?;
                self.layout.lock(&id)
            };
            let Ok(Some(_lock)) = lock else { continue };
            if let Err(e) = self.sweep_one(&id, &mut report) {
                report.failed.push((id.to_string(), e.to_string()));
            }
        }
        Ok(report)
    }

    fn sweep_one(&self, id: &SandboxId, report: &mut SweepReport) -> Result<()> {
        let record = self.layout.read(id)?;
        let limits = record.as_ref().map(|r| r.spec.limits).unwrap_or_default();
        let group = self.hierarchies.group(id, &limits);
        match &record {
            Some(Record {
                one_shot: false,
                init: Some(init),
                ..
            }) => {
                if init.alive().is_none() {
                    group.kill();
                    group.remove()?;
                    report.dead.push(id.clone());
                }
            }
            Some(kept @ Record { keep: true, .. }) if kept.init.is_some() => {
                self.settle(kept, &group)?;
                report.dead.push(id.clone());
            }
            half_made => {
                self.destroy(id, half_made.as_ref(), &group)?;
                report.leases.extend(record.and_then(|r| r.spec.lease));
                report.removed.push(id.to_string());
            }
        }
        Ok(())
    }
}

fn no_group(id: &SandboxId) -> RuntimeError {
    RuntimeError::Busy {
        id: id.clone(),
        by: "it is being removed",
    }
}

/// Waits until the process behind `pidfd` (and with it, as it is PID 1, every
/// process of the sandbox) has ended, and reaps it if it is ours.
fn wait_end(pidfd: &OwnedFd, id: &SandboxId) -> Result<()> {
    let wait = Timespec {
        tv_sec: i64::try_from(END_WAIT.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    let ready =
        rustix::io::retry_on_intr(|| poll(&mut fds, Some(&wait))).map_err(std::io::Error::from)?;
    if ready == 0 {
        return Err(RuntimeError::Busy {
            id: id.clone(),
            by: "a killed process does not end",
        });
    }
    let _ = process::wait_pidfd(pidfd.as_fd());
    Ok(())
}

/// Starts a planned command in a running sandbox.
fn enter(
    spec: &SandboxSpec,
    group: &Group,
    pidfd: &OwnedFd,
    plan: &Plan,
    streams: [std::os::fd::BorrowedFd<'_>; 3],
    command: &ExecSpec,
) -> Result<Launched> {
    let filter = seccomp::default_filter();
    let tasks = group.tasks()?;
    let v2 = group.v2_dir()?;
    let launch = Launch {
        argv: plan.argv.clone(),
        env: plan.env.clone(),
        cwd: Some(plan.cwd.clone()),
        cgroup_tasks: tasks.iter().map(AsFd::as_fd).collect(),
        cgroup_v2: v2.as_ref().map(AsFd::as_fd),
        join: Some(Join {
            pidfd: pidfd.as_fd(),
            namespaces: launch::namespaces(spec.network)
                | layerpack_sys::ns::Namespaces::CONTROL_GROUP,
        }),
        session: true,
        terminal: plan.terminal,
        die_with_parent: true,
        umask: Some(0o022),
        no_new_privs: plan.no_new_privs,
        filter: Some(&filter),
        credentials: Some(plan.credentials.clone()),
        ..Launch::new(Program::Paths(plan.paths.clone()), streams)
    };
    let name = command
        .argv
        .first()
        .map(|a| a.display().to_string())
        .unwrap_or_default();
    let launched = process::spawn(&launch)?
        .map_err(|failure| crate::command::not_executed(&name, &failure))?;
    launched
        .wait_exec()?
        .map_err(|failure| crate::command::not_executed(&name, &failure))?;
    Ok(launched)
}
