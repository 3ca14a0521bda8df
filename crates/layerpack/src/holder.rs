//! The holder of the daemon's mounts, and the daemon's link to it.
//!
//! `layerpack daemon run` checks what it was asked for and then becomes the holder: the same binary,
//! executed anew under the name `layerpack-holder`, so that it is small and has one thread. The holder
//! (`layerpack_layerfs::holder`) starts the daemon proper with the same command line and a socket to
//! it. Should the holder die, the daemon starts another one and gives it everything.

use std::ffi::{CString, OsStr, OsString};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use layerpack_layerfs::Node;
use layerpack_layerfs::holder::{
    Event, Holder, HolderOptions, Keeper, Link, Notice, Set, Sets, Standing,
};
use layerpack_sys::fdpass;
use layerpack_sys::process::{Launch, Launched, Program, spawn};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use tokio::sync::Notify;

use crate::settings::Settings;
use crate::{api, daemon};

/// The name under which the binary is started as a holder.
pub(crate) const NAME: &str = "layerpack-holder";
/// Option of a daemon that a command started, and that nobody waits for.
pub(crate) const DETACHED: &str = "--detached";
/// Tells a daemon the number of its socket to the holder and the holder's process id.
const LINK: &str = "LAYERPACK_LINK";
/// Says that there is no socket yet.
const NO_LINK: &str = "-";
/// Name under which the holder keeps the settings.
const SETTINGS_SET: &str = "settings";
/// Where the kernel says, and is told, whom to spare when memory runs out.
const OOM: &str = "/proc/self/oom_score_adj";
/// Never, not even where a control group's processes are killed together: it is small, does not grow,
/// and everything hangs on it.
const OOM_SCORE: i32 = -1000;
/// How much earlier than a holder that may not spare itself a worker is to be ended: enough for what
/// they share of the program's file not to decide it.
const OOM_APART: i32 = 100;
/// The highest there is.
const OOM_MOST: i32 = 1000;
/// A holder that lived for less is one that died young.
const YOUNG: Duration = Duration::from_secs(5);
/// Young ones in a row, after which the daemon goes on alone.
const HOLDERS: u32 = 5;

/// Name of the thread that does what the holder wants.
pub(crate) const THREAD: &str = "holder";

/// Version of this program.
pub(crate) fn version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

fn own_program() -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::open("/proc/self/exe", flags, Mode::empty())?)
}

/// This program, to be handed to a holder.
///
/// # Errors
/// When `/proc` is not mounted.
pub(crate) fn program() -> anyhow::Result<OwnedFd> {
    own_program().context("cannot open the running program")
}

fn oom_score() -> Option<i32> {
    fs_err::read_to_string(OOM).ok()?.trim().parse().ok()
}

/// Spares this process when memory runs out, as far as it may. Gives the score for workers: what this
/// process had, or if it cannot be spared, more than it has.
fn spare_this_process() -> Option<i32> {
    let had = oom_score()?;
    let lower = |score: i32| fs_err::write(OOM, score.to_string()).is_ok();
    if had <= OOM_SCORE || lower(OOM_SCORE) {
        return Some(had);
    }
    // A worker started this one. Back to where that came from needs no privilege.
    let has = if had > 0 && lower(0) { 0 } else { had };
    Some(had.max(has.saturating_add(OOM_APART)).min(OOM_MOST))
}

/// Becomes the holder of the node at `root`; comes back only if that fails.
pub(crate) fn become_holder(root: &Path) -> anyhow::Error {
    let error = Command::new("/proc/self/exe")
        .arg0(NAME)
        .arg(root)
        .arg(NO_LINK)
        .args(std::env::args_os().skip(1))
        .exec();
    anyhow::Error::new(error).context("cannot start the holder")
}

/// The holder's own program: `layerpack-holder ROOT LINK ARGUMENT...`, where the arguments are those
/// of the daemon.
pub(crate) fn main() -> ExitCode {
    match hold() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// A line to stderr, which is the daemon's log. Nobody can be told if that fails.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

fn c_string(text: impl AsRef<OsStr>) -> anyhow::Result<CString> {
    CString::new(text.as_ref().as_bytes()).context("an argument holds a zero byte")
}

fn hold() -> anyhow::Result<u8> {
    let mut arguments = std::env::args_os().skip(1);
    let root = arguments.next().context("the node's root is missing")?;
    let link = arguments.next().context("the link is missing")?;
    let link = if link == NO_LINK {
        None
    } else {
        let number = link.to_str().and_then(|text| text.parse().ok());
        Some(
            number
                .and_then(fdpass::inherited)
                .context("the link is no open descriptor")?,
        )
    };
    let mut argv = vec![c_string("layerpack")?];
    for argument in arguments {
        argv.push(c_string(argument)?);
    }
    let mut env = Vec::new();
    for (name, value) in std::env::vars_os() {
        if name != LINK {
            let mut both = name;
            both.push("=");
            both.push(value);
            env.push(c_string(both)?);
        }
    }
    let oom_score_adj = spare_this_process();
    // A service manager passes a socket on to this very process only.
    let root = PathBuf::from(root);
    let mut kept = Sets::new();
    if link.is_none()
        && let Some(listener) = daemon::socket::passed_on(&root)?
    {
        let set = Set {
            state: Value::from(daemon::PASSED_ON),
            fds: vec![listener.into()],
        };
        kept.insert(daemon::SOCKET_SET.to_owned(), set);
    }
    let options = HolderOptions {
        root,
        program: own_program()?,
        argv,
        env,
        variable: LINK.to_owned(),
        version: version(),
        oom_score_adj,
        kept,
        notice: Box::new(notice),
    };
    let code = match link {
        None => Holder::run(options)?,
        Some(link) => Holder::adopt(options, link)?,
    };
    Ok(code)
}

fn notice(notice: &Notice) {
    use sd_notify::NotifyState;
    let told = match notice {
        Notice::Ready { pid } => {
            say(&format!("holder: process {pid} serves"));
            sd_notify::notify(&[NotifyState::Ready, NotifyState::MainPid(std::process::id())])
        }
        Notice::Stopping => sd_notify::notify(&[NotifyState::Stopping]),
        Notice::Said(line) => {
            say(&format!("holder: {line}"));
            Ok(())
        }
    };
    if let Err(error) = told {
        say(&format!("holder: cannot tell the service manager: {error}"));
    }
}

/// The daemon's end, with what an earlier process left.
#[derive(Debug)]
pub(crate) struct Linked {
    pub(crate) worker: Worker,
    pub(crate) sets: Sets,
}

/// This process as its holder sees it.
#[derive(Debug, Clone)]
pub(crate) struct Worker {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    link: Arc<Link>,
    /// `None` while there is no holder.
    standing: Mutex<Option<Standing>>,
    ready: AtomicBool,
    stopping: AtomicBool,
    /// Held while another holder takes over.
    replacing: Mutex<()>,
    /// The holder, if this process started it: its child, reaped when it ends.
    child: Mutex<Option<Launched>>,
}

/// The socket to the holder that started this process; `None` if none did.
fn socket() -> Option<OwnedFd> {
    let link = std::env::var(LINK).ok()?;
    let (number, parent) = link.split_once(':')?;
    // A process that was started by a daemon has its variables, but not its parent.
    let ours = rustix::process::getppid().is_some_and(|pid| parent == pid.as_raw_pid().to_string());
    if !ours {
        return None;
    }
    fdpass::inherited(number.parse().ok()?)
}

/// What is locked here is replaced as a whole: a panic leaves none of it half changed.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Linked {
    /// Greets the holder that started this process, if one did, and waits for its turn.
    ///
    /// # Errors
    /// When that holder is gone.
    pub(crate) fn open(root: &Path) -> anyhow::Result<Option<Self>> {
        let Some(socket) = socket() else {
            return Ok(None);
        };
        let (link, sets, standing) =
            Link::open(socket, &version()).context("the daemon's holder does not answer")?;
        if let Some(score) = standing.oom_score_adj {
            let _ = fs_err::write(OOM, score.to_string());
        }
        let inner = Inner {
            root: root.to_owned(),
            link: Arc::new(link),
            standing: Mutex::new(Some(standing)),
            ready: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            replacing: Mutex::new(()),
            child: Mutex::new(None),
        };
        Ok(Some(Self {
            worker: Worker {
                inner: Arc::new(inner),
            },
            sets,
        }))
    }

    /// The settings of the process before, so that all are of one mind; else those that `load` gives.
    ///
    /// # Errors
    /// Those of `load`.
    pub(crate) fn settings(
        &mut self,
        load: impl FnOnce() -> anyhow::Result<Settings>,
    ) -> anyhow::Result<Settings> {
        let before = self.sets.remove(SETTINGS_SET);
        if let Some(settings) = before.and_then(|set| serde_json::from_value(set.state).ok()) {
            return Ok(settings);
        }
        let settings = load()?;
        let state = serde_json::to_value(&settings)?;
        if let Err(error) = self.worker.inner.link.keep(SETTINGS_SET, &state, &[]) {
            tracing::warn!(%error, "the holder does not have the settings");
        }
        Ok(settings)
    }
}

impl Worker {
    /// What keeps descriptors for the process after this one.
    pub(crate) fn keeper(&self) -> Arc<dyn Keeper> {
        Arc::clone(&self.inner.link) as _
    }

    /// Has a descriptor kept. Without it the next process makes a new one.
    pub(crate) fn keep(&self, name: &str, state: &Value, fd: BorrowedFd<'_>) {
        if let Err(error) = self.inner.link.keep(name, state, &[fd]) {
            tracing::warn!(name, %error, "the holder does not have a descriptor");
        }
    }

    /// Lets go of what was kept.
    pub(crate) fn forget(&self, name: &str) {
        if let Err(error) = self.inner.link.forget(name) {
            tracing::debug!(name, %error, "the holder does not let go of a descriptor");
        }
    }

    /// The holder, if there is one.
    pub(crate) fn holder(&self) -> Option<api::Holder> {
        self.standing().as_ref().map(|standing| api::Holder {
            pid: standing.pid,
            version: standing.version.clone(),
            restarts: standing.restarts,
            upgrades: standing.upgrades,
        })
    }

    /// Whether this process has served everything.
    pub(crate) fn was_ready(&self) -> bool {
        self.inner.ready.load(Ordering::Acquire)
    }

    /// This process ends on purpose, and is not to be started again.
    pub(crate) fn stopping(&self) {
        self.inner.stopping.store(true, Ordering::Release);
        if let Err(error) = self.inner.link.stopping() {
            tracing::debug!(%error, "there is no holder to tell of the end");
        }
    }

    /// Everything is served; from now on the holder's wishes are followed.
    ///
    /// # Errors
    /// When no thread can be started for that.
    pub(crate) fn ready(&self, node: &Arc<Node>, stop: &Arc<Notify>) -> anyhow::Result<()> {
        self.inner.ready.store(true, Ordering::Release);
        if let Err(error) = self.inner.link.ready(node.read_timeout()) {
            tracing::warn!(%error, "there is no holder to tell of the start");
        }
        let (worker, node, stop) = (self.clone(), Arc::clone(node), Arc::clone(stop));
        std::thread::Builder::new()
            .name(THREAD.to_owned())
            .spawn(move || worker.obey(&node, &stop))
            .context("cannot start a thread for the holder")?;
        Ok(())
    }

    fn obey(&self, node: &Node, stop: &Notify) {
        let mut since = Instant::now();
        let mut young = 0;
        let Some(mut before) = self.standing().clone() else {
            return;
        };
        loop {
            // Each holder anew.
            if let Err(error) = self.inner.link.watch_this_thread() {
                tracing::debug!(%error, "the holder does not watch this thread");
            }
            let renewed = self.inner.link.renewed();
            match self.inner.link.wait() {
                Event::Drain => {
                    tracing::info!("gives way to another process");
                    node.leave();
                    // What is unanswered is sent again; nothing else may happen here any more.
                    std::process::exit(0);
                }
                Event::Stop => stop.notify_one(),
                Event::Gone => {
                    let _one = lock(&self.inner.replacing);
                    if self.inner.link.renewed() != renewed {
                        // Its place was taken before it went.
                        continue;
                    }
                    self.reap();
                    if self.inner.stopping.load(Ordering::Acquire) {
                        return;
                    }
                    if let Some(gone) = self.standing().take() {
                        before = gone;
                    }
                    tracing::error!("the holder died: starting another one");
                    young = if since.elapsed() < YOUNG {
                        young + 1
                    } else {
                        1
                    };
                    if young > HOLDERS {
                        tracing::error!(
                            "holders die at once: without one, reads fail if this process dies; `layerpack daemon stop` and a new start help"
                        );
                        return;
                    }
                    since = Instant::now();
                    match self.new_holder(&before) {
                        Ok((launched, standing)) => {
                            tracing::info!(pid = standing.pid, "another holder has everything");
                            *self.standing() = Some(standing);
                            *lock(&self.inner.child) = Some(launched);
                        }
                        Err(error) => {
                            tracing::error!(error = %format!("{error:#}"), "no holder can be started");
                            std::thread::sleep(Duration::from_millis(200));
                        }
                    }
                }
            }
        }
    }

    /// Takes note of the end of a holder that this process started.
    fn reap(&self) {
        if let Some(child) = lock(&self.inner.child).take() {
            let _ = child.wait();
        }
    }

    /// Has a holder of this process's own program take the place of the one that is there. That one
    /// is stopped first, so that it does nothing when this process turns away from it, and killed
    /// when the other has everything. If this process dies in between, which takes some
    /// milliseconds, its mounts are lost as if both had died.
    ///
    /// # Errors
    /// When there is none, it was started in the foreground, or no other can be started: then it
    /// stays.
    pub(crate) fn replace_holder(&self) -> anyhow::Result<api::Holder> {
        // Who started it in the foreground, a service manager or a container, takes its end for the
        // daemon's.
        if !std::env::args_os().any(|argument| argument == DETACHED) {
            bail!("whoever started the daemon watches it: start the daemon anew for that");
        }
        let _one = lock(&self.inner.replacing);
        let before = self.standing().clone().context("there is none")?;
        let pid = i32::try_from(before.pid).ok().and_then(Pid::from_raw);
        let pid = pid.context("it has no process")?;
        let is_child = || {
            lock(&self.inner.child)
                .as_ref()
                .is_some_and(|child| child.pid == pid)
        };
        let old = layerpack_sys::ns::pidfd_open(pid)?;
        // Nobody else's process has that number while it is one of the two.
        if rustix::process::getppid() != Some(pid) && !is_child() {
            bail!("process {} is not known to be it", before.pid);
        }
        let send = |signal| rustix::process::pidfd_send_signal(&old, signal);
        send(Signal::STOP).context("it cannot be stopped")?;
        match self.new_holder(&before) {
            Ok((launched, standing)) => {
                let _ = send(Signal::KILL);
                self.reap();
                *self.standing() = Some(standing);
                *lock(&self.inner.child) = Some(launched);
            }
            Err(error) => {
                let _ = send(Signal::CONT);
                return Err(error);
            }
        }
        tracing::info!(old = before.pid, "another holder took over");
        self.holder().context("there is none any more")
    }

    fn standing(&self) -> std::sync::MutexGuard<'_, Option<Standing>> {
        lock(&self.inner.standing)
    }

    /// Starts a holder for this process, which goes on as its worker.
    fn new_holder(&self, before: &Standing) -> anyhow::Result<(Launched, Standing)> {
        let (mine, theirs) = fdpass::pair()?;
        let program = own_program()?;
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let (out, err) = (io::stdout(), io::stderr());
        let mut launch = Launch::new(
            Program::File(program.as_fd()),
            [null.as_fd(), out.as_fd(), err.as_fd()],
        );
        let head: [OsString; 3] = [
            NAME.into(),
            self.inner.root.clone().into(),
            theirs.as_raw_fd().to_string().into(),
        ];
        for argument in head.into_iter().chain(std::env::args_os().skip(1)) {
            launch.argv.push(c_string(argument)?);
        }
        for (name, value) in std::env::vars_os() {
            let mut both = name;
            both.push("=");
            both.push(value);
            launch.env.push(c_string(both)?);
        }
        launch.pass = Some(theirs.as_fd());
        launch.session = true;
        let launched = spawn(&launch)?.map_err(|e| anyhow::anyhow!("{e}"))?;
        launched.wait_exec()?.map_err(|e| anyhow::anyhow!("{e}"))?;
        drop(theirs);
        let standing = self.inner.link.renew(mine, &version(), before)?;
        Ok((launched, standing))
    }
}
