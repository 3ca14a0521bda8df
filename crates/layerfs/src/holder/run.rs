//! The holder itself: one thread, one loop.
//!
//! | a worker | then |
//! |---|---|
//! | ends before any was ready | the holder ends with its exit code: the start failed |
//! | dies later | another one is started: at once, later and later if they die young |
//! | said that it is stopping | the holder ends when it has ended |
//! | is to give way to a newer one | that one is started beside it and waits; the old one is told to leave, and when it has ended the new one gets everything |

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use layerpack_sys::process::{Ended, Launch, Program, spawn, wait_pidfd};
use layerpack_sys::signals::SignalFd;
use layerpack_sys::{fdpass, ns};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::Signal;

use super::child::{Child, has_ended};
use super::control::{Asker, Control, Question, Reply, Who};
use super::trouble::{Failing, Trouble};
use super::{
    FUSE, LOCK, PROTOCOL, Set, Sets, Standing, ToHolder, ToWorker, WITNESS, borrowed, receive,
    stuck,
};

/// How often a dying worker is looked after, and limits are checked.
const LOOK: Duration = Duration::from_millis(250);
/// The same, once it is seen dying: readers wait.
const SOON: Duration = Duration::from_millis(10);
/// How long a killed worker may take to end before it is looked into.
const DYING: Duration = Duration::from_millis(20);
/// A worker that served for less has died young.
const YOUNG: Duration = Duration::from_secs(2);
/// Young deaths in a row that are taken for chance.
const CHANCE: u32 = 10;
/// The same, of workers that were never ready.
const UNREADY: u32 = 2;
/// The same, of workers that somebody killed: another start is no worse than this one, and the pause
/// after more does not grow.
const KILLED: u32 = 20;
/// That pause: little, since readers wait, and enough for who kills to be seen by others.
const KILLED_PAUSE: Duration = Duration::from_millis(20);
/// Shortest and longest pause between two starts, once there is one.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(10);
/// How long a new version may take to greet and to be ready.
const GREETING: Duration = Duration::from_secs(20);
const READINESS: Duration = Duration::from_secs(120);
/// How long a worker may take to leave; then it is killed, which costs only its checkpoint.
const LEAVING: Duration = Duration::from_secs(10);
/// Workers that may die while they stop before the holder ends without them.
const STOPS: u32 = 3;

/// What a holder is started with.
pub struct HolderOptions {
    /// The node's directory.
    pub root: PathBuf,
    /// The worker's program.
    pub program: OwnedFd,
    /// Its arguments, the name first.
    pub argv: Vec<CString>,
    /// Its environment.
    pub env: Vec<CString>,
    /// Variable that tells it the number of its socket and the holder's process id, `FD:PID`.
    pub variable: String,
    /// Version of this program.
    pub version: String,
    /// The out-of-memory score of workers.
    pub oom_score_adj: Option<i32>,
    /// What it keeps from the start.
    pub kept: Sets,
    /// Is told what happens.
    pub notice: Box<dyn FnMut(&Notice)>,
}

impl std::fmt::Debug for HolderOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HolderOptions")
            .field("root", &self.root)
            .field("argv", &self.argv)
            .finish_non_exhaustive()
    }
}

/// What happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// A worker serves everything.
    Ready {
        /// Its process id.
        pid: u32,
    },
    /// The worker is ending on purpose.
    Stopping,
    /// A line for the log.
    Said(String),
}

/// A newer worker and who waits for it.
#[derive(Debug)]
struct Upgrade {
    /// `None` once it is the worker.
    next: Option<Child>,
    old: Option<Who>,
    asker: Asker,
    until: Instant,
}

/// A running holder.
#[derive(Debug)]
pub struct Holder {
    options: HolderOptions,
    kept: Sets,
    /// The program whose worker was ready last.
    good: Rc<OwnedFd>,
    worker: Option<Child>,
    upgrade: Option<Upgrade>,
    control: Option<Control>,
    ever_ready: bool,
    restarts: u64,
    upgrades: u64,
    /// Young deaths in a row.
    young: u32,
    not_before: Option<Instant>,
    trouble: Trouble,
    /// The worker's witness has ended.
    alarmed: bool,
    /// Told to end.
    stop: bool,
    stop_starts: u32,
    /// The exit code, once it is known.
    code: Option<u8>,
}

impl Holder {
    fn new(mut options: HolderOptions) -> io::Result<Self> {
        let program = std::mem::replace(
            &mut options.program,
            rustix::fs::open(
                "/dev/null",
                OFlags::RDONLY | OFlags::CLOEXEC,
                rustix::fs::Mode::empty(),
            )?,
        );
        let kept = std::mem::take(&mut options.kept);
        Ok(Self {
            options,
            kept,
            good: Rc::new(program),
            worker: None,
            upgrade: None,
            control: None,
            ever_ready: false,
            restarts: 0,
            upgrades: 0,
            young: 0,
            not_before: None,
            trouble: Trouble::default(),
            alarmed: false,
            stop: false,
            stop_starts: 0,
            code: None,
        })
    }

    /// Starts a worker and holds for it and its successors until one ends on purpose. Gives the exit
    /// code.
    ///
    /// # Errors
    /// When the first worker cannot be started, or the kernel refuses to wait.
    pub fn run(options: HolderOptions) -> io::Result<u8> {
        let mut holder = Self::new(options)?;
        let program = Rc::clone(&holder.good);
        holder.worker = Some(holder.start(&program)?);
        holder.serve()
    }

    /// Holds for a worker that lives already, at the other end of `link`: one whose holder has died.
    ///
    /// # Errors
    /// When that worker is gone, or the kernel refuses to wait.
    pub fn adopt(options: HolderOptions, link: OwnedFd) -> io::Result<u8> {
        let mut holder = Self::new(options)?;
        let (_, pid) = fdpass::peer(link.as_fd()).map_err(|e| e.to_io())?;
        let pidfd = ns::pidfd_open(pid).map_err(|e| e.to_io())?;
        nonblocking(&link)?;
        holder.worker = Some(Child {
            pid,
            pidfd,
            link,
            link_open: true,
            ours: false,
            program: Rc::clone(&holder.good),
            version: None,
            ready: None,
            stopping: false,
            leave_by: None,
            dying: None,
        });
        holder.serve()
    }

    fn log(&mut self, line: String) {
        (self.options.notice)(&Notice::Said(line));
    }

    fn standing(&self) -> Standing {
        Standing {
            protocol: PROTOCOL,
            pid: std::process::id(),
            version: self.options.version.clone(),
            restarts: self.restarts,
            upgrades: self.upgrades,
            oom_score_adj: self.options.oom_score_adj,
        }
    }

    fn start(&mut self, program: &Rc<OwnedFd>) -> io::Result<Child> {
        let (mine, theirs) = fdpass::pair().map_err(|e| e.to_io())?;
        nonblocking(&mine)?;
        let null = rustix::fs::open(
            "/dev/null",
            OFlags::RDONLY | OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )?;
        let (out, err) = (io::stdout(), io::stderr());
        let mut launch = Launch::new(
            Program::File((**program).as_fd()),
            [null.as_fd(), out.as_fd(), err.as_fd()],
        );
        launch.argv.clone_from(&self.options.argv);
        launch.env.clone_from(&self.options.env);
        let link = format!(
            "{}={}:{}",
            self.options.variable,
            theirs.as_raw_fd(),
            std::process::id()
        );
        launch
            .env
            .push(CString::new(link).map_err(io::Error::other)?);
        launch.pass = Some(theirs.as_fd());
        let launched = spawn(&launch)
            .map_err(|e| e.to_io())?
            .map_err(|e| io::Error::other(e.to_string()))?;
        launched
            .wait_exec()
            .map_err(|e| e.to_io())?
            .map_err(|e| io::Error::other(format!("the program cannot be started: {e}")))?;
        drop(theirs);
        // Not what this process has: memory is to be taken from workers first.
        if let Some(score) = self.options.oom_score_adj {
            let path = format!("/proc/{}/oom_score_adj", launched.pid.as_raw_pid());
            let _ = fs_err::write(path, score.to_string());
        }
        Ok(Child {
            pid: launched.pid,
            pidfd: launched.pidfd,
            link: mine,
            link_open: true,
            ours: true,
            program: Rc::clone(program),
            version: None,
            ready: None,
            stopping: false,
            leave_by: None,
            dying: None,
        })
    }

    fn serve(mut self) -> io::Result<u8> {
        let signals = SignalFd::new(&[
            Signal::TERM.as_raw(),
            Signal::INT.as_raw(),
            Signal::HUP.as_raw(),
        ])
        .map_err(|e| e.to_io())?;
        loop {
            self.wait(&signals)?;
            while let Some(received) = signals.read().map_err(|e| e.to_io())? {
                if received.signal != Signal::HUP.as_raw() {
                    self.log(format!("told to end by signal {}", received.signal));
                    self.end();
                }
            }
            self.listen();
            self.hear();
            self.look_after();
            self.take_turns();
            if let Some(code) = self.code {
                return Ok(code);
            }
        }
    }

    /// Until something happens, or it is time to look.
    fn wait(&self, signals: &SignalFd) -> io::Result<()> {
        let mut fds = vec![PollFd::new(signals, PollFlags::IN)];
        if let Some(control) = &self.control {
            fds.push(PollFd::new(control, PollFlags::IN));
        }
        let next = self.upgrade.as_ref().and_then(|u| u.next.as_ref());
        for child in self.worker.iter().chain(next) {
            fds.push(PollFd::new(&child.pidfd, PollFlags::IN));
            if child.link_open {
                fds.push(PollFd::new(&child.link, PollFlags::IN));
            }
        }
        let mut limit = LOOK;
        if self.alarmed {
            limit = SOON;
        } else if let Some(witness) = self.witness() {
            fds.push(PollFd::new(witness, PollFlags::IN));
        }
        if self.worker.is_none()
            && let Some(at) = self.not_before
        {
            limit = limit.min(at.saturating_duration_since(Instant::now()));
        }
        let limit = Timespec {
            tv_sec: 0,
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        match poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// The thread that tells of the worker's end before the process has ended.
    fn witness(&self) -> Option<&OwnedFd> {
        let set = self.worker.as_ref().and_then(|_| self.kept.get(WITNESS));
        set.and_then(|set| set.fds.first())
    }

    /// Told to end: the worker unmounts everything.
    fn end(&mut self) {
        self.stop = true;
        if let Some(upgrade) = self.upgrade.take() {
            self.refuse(upgrade, "the holder was told to stop");
        }
        if let Some(worker) = &self.worker {
            // One that has not begun yet is told when it has.
            if worker.version.is_some() {
                let _ = worker.say(&ToWorker::Stop, &[]);
            }
        }
        self.not_before = None;
    }

    fn refuse(&mut self, upgrade: Upgrade, why: &str) {
        if let Some(next) = upgrade.next {
            next.kill();
            if next.ours {
                let _ = wait_pidfd(next.pidfd.as_fd());
            }
        }
        self.log(format!("no upgrade: {why}"));
        upgrade.asker.answer(&Reply::Refused {
            why: why.to_owned(),
        });
    }

    /// Questions from outside.
    fn listen(&mut self) {
        loop {
            let Some(control) = &self.control else { return };
            let (question, program, asker) = match control.next() {
                Ok(Some(asked)) => asked,
                Ok(None) => return,
                Err(e) => return self.log(format!("a question was lost: {e}")),
            };
            match (question, program) {
                (Question::Upgrade, Some(program)) => self.begin_upgrade(program, asker),
                (Question::Upgrade, None) => asker.answer(&Reply::Refused {
                    why: "no program came with the question".to_owned(),
                }),
                (Question::Status, _) => asker.answer(&self.status()),
                (Question::Stop, _) => {
                    asker.answer(&self.status());
                    self.end();
                }
            }
        }
    }

    fn status(&self) -> Reply {
        Reply::Standing {
            holder: Who {
                pid: std::process::id(),
                version: self.options.version.clone(),
            },
            worker: self.worker.as_ref().map(Child::who),
            restarts: self.restarts,
            upgrades: self.upgrades,
            failing: self.failing(),
        }
    }

    /// Workers that do not stay; `None` once one did.
    fn failing(&self) -> Option<Failing> {
        let ready = self.worker.as_ref().and_then(|worker| worker.ready);
        if ready.is_some_and(|at| at.elapsed() >= YOUNG) {
            return None;
        }
        let next = self.not_before.filter(|_| self.worker.is_none());
        self.trouble.told(next)
    }

    fn begin_upgrade(&mut self, program: OwnedFd, asker: Asker) {
        let refused = |asker: Asker, why: &str| {
            asker.answer(&Reply::Refused {
                why: why.to_owned(),
            });
        };
        if self.stop || self.worker.as_ref().is_some_and(|w| w.stopping) {
            return refused(asker, "the daemon is stopping");
        }
        if self.upgrade.is_some() {
            return refused(asker, "another upgrade is under way");
        }
        if !self.ever_ready {
            return refused(asker, "the daemon is still starting; try again");
        }
        match self.start(&Rc::new(program)) {
            Ok(next) => {
                let old = self.worker.as_ref().map(Child::who);
                self.log(format!("process {} is to take over", next.number()));
                self.upgrade = Some(Upgrade {
                    next: Some(next),
                    old,
                    asker,
                    until: Instant::now() + GREETING,
                });
            }
            Err(e) => refused(
                asker,
                &format!("the new version does not start ({e}); the old one serves on"),
            ),
        }
    }

    /// What workers say.
    fn hear(&mut self) {
        if let Some(mut worker) = self.worker.take() {
            self.hear_one(&mut worker, true);
            self.worker = Some(worker);
        }
        if let Some(mut upgrade) = self.upgrade.take() {
            if let Some(next) = upgrade.next.as_mut() {
                self.hear_one(next, false);
            }
            self.upgrade = Some(upgrade);
        }
    }

    fn hear_one(&mut self, child: &mut Child, is_worker: bool) {
        while child.link_open {
            let (message, fds) = match receive::<ToHolder>(child.link.as_fd()) {
                Ok(Some(heard)) => heard,
                Ok(None) => {
                    child.link_open = false;
                    return;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // A newer worker's word, perhaps: it does not depend on what it does not know.
                Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                    self.log(format!("process {} is not understood: {e}", child.number()));
                    continue;
                }
                Err(e) => {
                    self.log(format!("process {} cannot be heard: {e}", child.number()));
                    child.link_open = false;
                    return;
                }
            };
            match message {
                ToHolder::Hello {
                    protocol,
                    version,
                    before,
                } if protocol == PROTOCOL => {
                    child.version = Some(version);
                    self.restarts += before.0;
                    self.upgrades += before.1;
                    if is_worker {
                        self.grant(child);
                    }
                }
                ToHolder::Hello { protocol, .. } => {
                    self.log(format!(
                        "process {} speaks version {protocol} of the holder's messages, this is {PROTOCOL}: stop the daemon and start it with the new version",
                        child.number()
                    ));
                    child.kill();
                }
                // What waits for its turn has nothing to say yet.
                _ if !is_worker => {}
                ToHolder::Keep { name, state } => self.keep(name, Set { state, fds }),
                ToHolder::Forget { name } => {
                    self.kept.remove(&name);
                }
                ToHolder::Ready { patience_ms } => {
                    self.trouble.serves(patience_ms);
                    self.ready(child);
                }
                ToHolder::Stopping => {
                    child.stopping = true;
                    (self.options.notice)(&Notice::Stopping);
                }
            }
        }
    }

    fn keep(&mut self, name: String, set: Set) {
        let lock = name == LOCK;
        self.kept.insert(name, set);
        // Who has the lock is the node's only worker, so this is its only holder.
        if lock && self.control.is_none() {
            match Control::bind(&self.options.root) {
                Ok(control) => self.control = Some(control),
                Err(e) => self.log(format!("no questions can be asked: {e}")),
            }
        }
    }

    /// Gives a worker what is kept, and its turn.
    fn grant(&mut self, child: &Child) {
        let result = self
            .kept
            .iter()
            .try_for_each(|(name, set)| {
                let message = ToWorker::Kept {
                    name: name.clone(),
                    state: set.state.clone(),
                };
                child.say(&message, &borrowed(&set.fds))
            })
            .and_then(|()| child.say(&ToWorker::Go(self.standing()), &[]));
        if let Err(e) = result {
            self.log(format!(
                "process {} cannot be given what is kept: {e}",
                child.number()
            ));
            child.kill();
        } else if self.stop {
            let _ = child.say(&ToWorker::Stop, &[]);
        }
    }

    fn ready(&mut self, child: &mut Child) {
        child.ready = Some(Instant::now());
        self.ever_ready = true;
        self.good = Rc::clone(&child.program);
        let pid = child.number();
        (self.options.notice)(&Notice::Ready { pid });
        if let Some(upgrade) = self.upgrade.take_if(|u| u.next.is_none()) {
            let new = child.who();
            self.log(format!("process {pid} took over"));
            upgrade.asker.answer(&Reply::Upgraded {
                old: upgrade.old,
                new,
            });
        }
    }

    /// Workers that do not end, or take too long.
    fn look_after(&mut self) {
        let now = Instant::now();
        let mut lines = Vec::new();
        self.alarmed |= self.witness().is_some_and(has_ended);
        if let Some(worker) = &mut self.worker
            && !worker.has_ended()
        {
            if stuck::is_dying(worker.pid.as_raw_pid()) {
                self.alarmed = true;
                let since = *worker.dying.get_or_insert(now);
                if now - since >= DYING
                    && let Some(set) = self.kept.get(FUSE)
                {
                    match stuck::let_go(&set.fds, worker.pid.as_raw_pid()) {
                        Ok(0) => {}
                        Ok(n) => lines.push(format!(
                            "process {} died waiting for itself: {n} of its requests were given up",
                            worker.number()
                        )),
                        Err(e) => lines.push(format!("a dying process is not freed: {e}")),
                    }
                }
            } else if worker.leave_by.is_some_and(|at| now >= at) {
                lines.push(format!(
                    "process {} does not leave; killed",
                    worker.number()
                ));
                worker.kill();
                worker.leave_by = None;
            } else if !worker.link_open && worker.leave_by.is_none() {
                // It closed its end and lives: it cannot be held for.
                worker.leave_by = Some(now + LEAVING);
            }
        }
        for line in lines {
            self.log(line);
        }
        if let Some(upgrade) = self.upgrade.take_if(|u| now >= u.until) {
            let greeted = upgrade.next.is_none();
            if greeted && let Some(worker) = &self.worker {
                // Its successor is of the old version.
                worker.kill();
                self.upgrades = self.upgrades.saturating_sub(1);
            }
            let why = if greeted {
                "the new version did not become ready; the old one takes over again"
            } else {
                "the new version did not answer; the old one serves on"
            };
            self.refuse(upgrade, why);
        }
    }

    /// Who has ended, and who is next.
    fn take_turns(&mut self) {
        if let Some(next) = self.upgrade.as_ref().and_then(|u| u.next.as_ref())
            && next.has_ended()
            && let Some(upgrade) = self.upgrade.take()
        {
            self.refuse(
                upgrade,
                "the new version ended at its start (its reason is in the log); the old one serves on",
            );
        }
        if self.worker.as_ref().is_some_and(Child::has_ended)
            && let Some(mut worker) = self.worker.take()
        {
            // What it said last.
            self.hear_one(&mut worker, true);
            self.ended(&worker);
        }
        self.call_next();
        if self.worker.is_none()
            && let Some(line) = self.trouble.look(self.kept.get(FUSE))
        {
            self.log(line);
        }
        if self.worker.is_none()
            && self.code.is_none()
            && self.not_before.is_none_or(|at| Instant::now() >= at)
        {
            let program = Rc::clone(&self.good);
            match self.start(&program) {
                Ok(child) => {
                    self.not_before = None;
                    self.log(format!("process {} was started", child.number()));
                    self.worker = Some(child);
                }
                Err(e) => {
                    self.log(format!("no worker can be started: {e}"));
                    self.not_before = Some(Instant::now() + Duration::from_secs(1));
                }
            }
        }
    }

    /// The newer worker's turn, once it has greeted and the old one is gone; until then the old one
    /// is asked to leave.
    fn call_next(&mut self) {
        let Some(upgrade) = self.upgrade.as_mut() else {
            return;
        };
        if upgrade.next.as_ref().is_none_or(|n| n.version.is_none()) {
            return;
        }
        match &mut self.worker {
            Some(worker) => {
                if worker.leave_by.is_none() && worker.version.is_some() {
                    let _ = worker.say(&ToWorker::Drain, &[]);
                    let at = Instant::now() + LEAVING;
                    worker.leave_by = Some(at);
                    upgrade.until = at + READINESS;
                }
            }
            None => {
                if let Some(next) = upgrade.next.take() {
                    upgrade.until = Instant::now() + READINESS;
                    self.not_before = None;
                    // Counted before it is told; taken back if it does not get ready.
                    self.upgrades += 1;
                    self.grant(&next);
                    self.worker = Some(next);
                }
            }
        }
    }

    /// The worker has ended: what that means.
    fn ended(&mut self, worker: &Child) {
        self.kept.remove(WITNESS);
        self.alarmed = false;
        let how = if worker.ours {
            wait_pidfd(worker.pidfd.as_fd()).ok()
        } else {
            None
        };
        let (text, code) = match how {
            Some(Ended::Code(code)) => {
                (format!("with code {code}"), u8::try_from(code).unwrap_or(1))
            }
            Some(Ended::Signal(signal)) => (format!("by signal {signal}"), 1),
            None => ("for a reason unknown".to_owned(), 1),
        };
        if worker.stopping {
            self.code = Some(code);
            return;
        }
        if worker.leave_by.is_some() && self.upgrade.is_some() {
            return;
        }
        if !self.ever_ready && matches!(how, Some(Ended::Code(_))) {
            // It has said why.
            self.code = Some(code.max(1));
            return;
        }
        self.log(format!("process {} ended {text}", worker.number()));
        if let Some(upgrade) = self.upgrade.take_if(|u| u.next.is_none()) {
            self.upgrades = self.upgrades.saturating_sub(1);
            self.refuse(
                upgrade,
                "the new version ended before it was ready (its reason is in the log); the old one takes over again",
            );
        }
        if self.stop {
            self.stop_starts += 1;
            if self.stop_starts >= STOPS {
                self.log("workers die while they stop: mounts stay behind".to_owned());
                self.code = Some(1);
                return;
            }
        }
        self.restarts += 1;
        let lived = worker.ready.map(|at| at.elapsed());
        let stayed = lived.is_some_and(|lived| lived >= YOUNG);
        self.trouble.died(!stayed, &text);
        if stayed {
            self.young = 0;
        } else {
            self.young += 1;
        }
        let killed = matches!(how, Some(Ended::Signal(signal)) if signal == Signal::KILL.as_raw());
        let free = match lived {
            _ if killed => KILLED,
            Some(_) => CHANCE,
            None => UNREADY,
        };
        if self.young > free && !self.stop {
            let steps = (self.young - free - 1).min(16);
            let pause = match killed {
                true => KILLED_PAUSE,
                false => PAUSE.saturating_mul(1 << steps).min(LONGEST),
            };
            self.log(format!(
                "{} died young in a row: the next one starts in {} ms",
                self.young,
                pause.as_millis()
            ));
            self.not_before = Some(Instant::now() + pause);
        }
    }
}

fn nonblocking(fd: &OwnedFd) -> io::Result<()> {
    let flags = fcntl_getfl(fd)?;
    fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
    Ok(())
}
