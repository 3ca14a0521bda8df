//! A command's streams while it runs.
//!
//! The command has pipes or a terminal of its own, never the caller's
//! descriptors: it cannot push input into the caller's terminal, and a
//! background process that keeps its streams open does not hold the caller.
//! Once the command has ended, what its streams hold is passed on and the
//! session is over. One loop, no threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use layerpack_sys::signals::SignalFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::Signal;
use rustix::termios::{OptionalActions, Termios, Winsize};

use crate::error::{Result, RuntimeError};
use crate::spec::{ExecSpec, Streams, Terminal};

/// Bytes moved at once from a stream of the command.
const CHUNK: usize = 64 << 10;
/// Bytes that a pipe or terminal takes without blocking once it is writable.
const SMALL: usize = 4096;

/// Most reads and writes per stream once the time is over: what a full pipe holds.
const DRAIN_STEPS: usize = 256;

/// Signals that are passed on.
const FORWARDED: [(i32, Signal); 6] = [
    (libc::SIGHUP, Signal::HUP),
    (libc::SIGINT, Signal::INT),
    (libc::SIGQUIT, Signal::QUIT),
    (libc::SIGUSR1, Signal::USR1),
    (libc::SIGUSR2, Signal::USR2),
    (libc::SIGTERM, Signal::TERM),
];

/// End of transmission, which a terminal takes as end of file.
const EOT: u8 = 4;

/// How a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The command has ended; it is still to be reaped.
    Ended,
    /// Its time is over.
    TimedOut,
}

/// What came of a session.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) outcome: Outcome,
    /// What could not be passed on to the caller, who still wants it.
    pub(crate) lost: Option<RuntimeError>,
}

/// The ends that the command gets.
#[derive(Debug)]
pub(crate) struct ChildEnds {
    pub(crate) stdin: OwnedFd,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

impl ChildEnds {
    pub(crate) fn as_fds(&self) -> [BorrowedFd<'_>; 3] {
        [self.stdin.as_fd(), self.stdout.as_fd(), self.stderr.as_fd()]
    }
}

/// Bytes on their way from one descriptor to another.
#[derive(Debug)]
struct Flow {
    from: Option<OwnedFd>,
    to: Option<OwnedFd>,
    /// `to` may be written in large pieces without blocking.
    large: bool,
    buffer: Vec<u8>,
    done: usize,
    /// Sent when `from` ends, before `to` is closed.
    farewell: Option<u8>,
    /// Towards the command: nothing is read from the caller once that has ended.
    input: bool,
    /// What the stream is called.
    name: &'static str,
    /// Why it could not be passed on, unless its reader had enough (`EPIPE`).
    failed: Option<Errno>,
}

/// The caller's side of a command's streams.
#[derive(Debug)]
pub(crate) struct Session {
    flows: Vec<Flow>,
    master: Option<OwnedFd>,
    /// The caller's terminal, whose size and mode count.
    own_terminal: Option<OwnedFd>,
    deadline: Option<Instant>,
    forward: bool,
}

fn error(what: &'static str) -> impl FnOnce(Errno) -> RuntimeError {
    move |errno| RuntimeError::Setup {
        step: format!("setting up the command's streams: {what}"),
        problem: std::io::Error::from(errno).to_string(),
    }
}

impl Flow {
    fn new(name: &'static str, from: OwnedFd, to: OwnedFd) -> Self {
        let large = rustix::fs::fstat(&to).is_ok_and(|stat| {
            use rustix::fs::FileType;
            FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        });
        Self {
            from: Some(from),
            to: Some(to),
            large,
            buffer: Vec::new(),
            done: 0,
            farewell: None,
            input: false,
            name,
            failed: None,
        }
    }

    fn input(from: OwnedFd, to: OwnedFd) -> Self {
        Self {
            input: true,
            ..Self::new("standard input", from, to)
        }
    }

    fn pending(&self) -> bool {
        self.done < self.buffer.len()
    }

    fn finished(&self) -> bool {
        self.to.is_none() || (self.from.is_none() && !self.pending())
    }

    /// Output whose receiver has gone or failed.
    fn is_cut(&self) -> bool {
        !self.input && self.to.is_none()
    }

    /// The descriptor to wait for, and for what.
    fn interest(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        if self.finished() {
            None
        } else if self.pending() {
            self.to.as_ref().map(|fd| (fd.as_fd(), PollFlags::OUT))
        } else {
            self.from.as_ref().map(|fd| (fd.as_fd(), PollFlags::IN))
        }
    }

    /// Moves some bytes; to be called when [`Self::interest`] is fulfilled.
    /// `false`: nothing could be moved now.
    fn advance(&mut self) -> bool {
        let moved = if self.pending() {
            self.write()
        } else {
            self.read()
        };
        if self.from.is_none() && !self.pending() {
            self.to = None;
        }
        if self.to.is_none() {
            // Nobody takes it any more: the writer is to notice that.
            self.from = None;
        }
        moved
    }

    fn read(&mut self) -> bool {
        let Some(from) = &self.from else { return false };
        self.buffer.resize(CHUNK, 0);
        self.done = 0;
        match rustix::io::read(from, &mut self.buffer[..]) {
            Ok(n) if n > 0 => {
                self.buffer.truncate(n);
                true
            }
            Err(Errno::AGAIN | Errno::INTR) => {
                self.buffer.clear();
                false
            }
            // The end; a terminal whose other side is closed says EIO.
            _ => {
                self.buffer.clear();
                self.buffer.extend(self.farewell.take());
                self.from = None;
                true
            }
        }
    }

    fn write(&mut self) -> bool {
        let Some(to) = &self.to else { return false };
        let rest = self.buffer.get(self.done..).unwrap_or_default();
        let piece = if self.large {
            rest
        } else {
            rest.get(..SMALL.min(rest.len())).unwrap_or(rest)
        };
        match rustix::io::write(to, piece) {
            Ok(n) => {
                self.done += n;
                true
            }
            Err(Errno::AGAIN | Errno::INTR) => false,
            Err(e) => {
                if e != Errno::PIPE {
                    self.failed = Some(e);
                }
                self.to = None;
                self.buffer.clear();
                true
            }
        }
    }

    /// The error of output that was not passed on.
    fn lost(&self) -> Option<RuntimeError> {
        let errno = self.failed.filter(|_| !self.input)?;
        Some(RuntimeError::Output {
            stream: self.name,
            problem: std::io::Error::from(errno).to_string(),
        })
    }

    /// After the command has ended: passes on what is there already.
    fn drain(&mut self) {
        let Some(from) = &self.from else {
            return self.flush();
        };
        if rustix::io::ioctl_fionbio(from, true).is_err() {
            return self.flush();
        }
        self.flush();
        while !self.finished() && self.read() {
            self.flush();
        }
    }

    /// After the time is over: passes on what is there and can be taken at once.
    fn drain_ready(&mut self) {
        // Bounded: the command may still be writing.
        for _ in 0..DRAIN_STEPS {
            let Some((fd, flags)) = self.interest() else {
                break;
            };
            let mut fds = [PollFd::from_borrowed_fd(fd, flags)];
            let now = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            if !matches!(poll(&mut fds, Some(&now)), Ok(1)) {
                break;
            }
            self.advance();
        }
    }

    fn flush(&mut self) {
        while self.pending() && self.to.is_some() {
            if !self.write() {
                let Some(to) = &self.to else { return };
                let mut fds = [PollFd::new(to, PollFlags::OUT)];
                let _ = poll(&mut fds, None);
            }
        }
    }
}

fn null(flags: OFlags) -> Result<OwnedFd> {
    rustix::fs::open(
        "/dev/null",
        flags | OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )
    .map_err(error("opening /dev/null"))
}

/// A pipe that the command's user may open again by `/dev/stdout`.
fn pipe(owner: (u32, u32)) -> Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(error("making a pipe"))?;
    give(&write, owner).map_err(error("giving a pipe to the command's user"))?;
    Ok((read, write))
}

fn give(fd: &OwnedFd, (uid, gid): (u32, u32)) -> rustix::io::Result<()> {
    rustix::fs::fchown(
        fd,
        Some(rustix::fs::Uid::from_raw(uid)),
        Some(rustix::fs::Gid::from_raw(gid)),
    )
}

impl Session {
    /// A session over pipes; `owner`: host ids of the command's user.
    pub(crate) fn with_pipes(
        streams: Streams,
        command: &ExecSpec,
        owner: (u32, u32),
    ) -> Result<(Self, ChildEnds)> {
        let mut flows = Vec::new();
        let stdin = match streams.stdin {
            None => null(OFlags::RDONLY)?,
            Some(from) => {
                let (read, write) = pipe(owner)?;
                rustix::io::ioctl_fionbio(&write, true).map_err(error("a pipe"))?;
                flows.push(Flow::input(from, write));
                read
            }
        };
        let mut output = |name: &'static str, to: Option<OwnedFd>| -> Result<OwnedFd> {
            match to {
                None => null(OFlags::WRONLY),
                Some(to) => {
                    let (read, write) = pipe(owner)?;
                    flows.push(Flow::new(name, read, to));
                    Ok(write)
                }
            }
        };
        let stdout = output("standard output", streams.stdout)?;
        let stderr = output("standard error", streams.stderr)?;
        let session = Self {
            flows,
            master: None,
            own_terminal: None,
            deadline: deadline(command),
            forward: command.forward_signals,
        };
        Ok((
            session,
            ChildEnds {
                stdin,
                stdout,
                stderr,
            },
        ))
    }

    /// A session over a new terminal of the devpts filesystem at `pts`, whose
    /// `ptmx` the caller has opened as `master`.
    pub(crate) fn with_terminal(
        streams: Streams,
        command: &ExecSpec,
        size: Terminal,
        master: OwnedFd,
        owner: (u32, u32),
    ) -> Result<(Self, ChildEnds)> {
        use rustix::pty::OpenptFlags;
        rustix::pty::unlockpt(&master).map_err(error("unlocking a terminal"))?;
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let slave =
            rustix::pty::ioctl_tiocgptpeer(&master, flags).map_err(error("opening a terminal"))?;
        give(&slave, owner).map_err(error("giving a terminal to the command's user"))?;
        set_size(&master, size);
        rustix::io::ioctl_fionbio(&master, true).map_err(error("a terminal"))?;
        let copy = |fd: &OwnedFd| fd.try_clone().map_err(RuntimeError::from);
        let mut flows = Vec::new();
        let mut own_terminal = None;
        if let Some(from) = streams.stdin {
            if rustix::termios::isatty(&from) {
                own_terminal = Some(copy(&from)?);
            }
            let mut flow = Flow::input(from, copy(&master)?);
            flow.farewell = Some(EOT);
            flows.push(flow);
        }
        let to = match streams.stdout {
            Some(to) => to,
            None => null(OFlags::WRONLY)?,
        };
        flows.push(Flow::new("terminal output", copy(&master)?, to));
        let session = Self {
            flows,
            master: Some(master),
            own_terminal,
            deadline: deadline(command),
            forward: command.forward_signals,
        };
        let ends = ChildEnds {
            stdin: copy(&slave)?,
            stdout: copy(&slave)?,
            stderr: slave,
        };
        Ok((session, ends))
    }

    /// Runs until the process behind `pidfd` has ended or its time is over.
    /// `signal` sends it a signal.
    ///
    /// Output that cannot be written is closed, so that the command notices
    /// (a terminal hangs up); the session goes on to the command's end.
    pub(crate) fn serve(
        mut self,
        pidfd: BorrowedFd<'_>,
        signal: &dyn Fn(Signal),
    ) -> Result<Served> {
        let own_terminal = self.own_terminal.take();
        let _raw = own_terminal.as_ref().map(RawMode::enter);
        let signals = if self.forward {
            let mut numbers: Vec<i32> = FORWARDED.iter().map(|(number, _)| *number).collect();
            numbers.push(libc::SIGWINCH);
            Some(SignalFd::new(&numbers)?)
        } else {
            None
        };
        loop {
            let now = Instant::now();
            if self.deadline.is_some_and(|deadline| now >= deadline) {
                for flow in self.flows.iter_mut().filter(|flow| !flow.input) {
                    flow.drain_ready();
                }
                return Ok(self.served(Outcome::TimedOut));
            }
            let timeout = self.deadline.map(|deadline| timespec(deadline - now));
            let mut fds = vec![PollFd::from_borrowed_fd(pidfd, PollFlags::IN)];
            if let Some(signals) = &signals {
                fds.push(PollFd::new(signals, PollFlags::IN));
            }
            let mut waiting = Vec::new();
            for (index, flow) in self.flows.iter().enumerate() {
                if let Some((fd, flags)) = flow.interest() {
                    waiting.push((index, fds.len()));
                    fds.push(PollFd::from_borrowed_fd(fd, flags));
                }
            }
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(error("waiting")(e)),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            let is_ready = |at: usize| ready.get(at).copied().unwrap_or(false);
            drop(fds);
            for (index, at) in waiting {
                if is_ready(at)
                    && let Some(flow) = self.flows.get_mut(index)
                {
                    flow.advance();
                }
            }
            if self.master.is_some() && self.flows.iter().any(|flow| flow.is_cut()) {
                self.hang_up();
            }
            if let Some(signals) = &signals {
                while let Some(received) = signals.read()? {
                    self.pass_on(received.signal, own_terminal.as_ref(), signal);
                }
            }
            if is_ready(0) {
                for flow in self.flows.iter_mut().filter(|flow| !flow.input) {
                    flow.drain();
                }
                return Ok(self.served(Outcome::Ended));
            }
        }
    }

    fn served(&self, outcome: Outcome) -> Served {
        Served {
            outcome,
            lost: self.flows.iter().find_map(Flow::lost),
        }
    }

    /// Closes the terminal's side of the caller: nobody would read what the
    /// command writes to it, and the command would wait for that for ever.
    fn hang_up(&mut self) {
        self.master = None;
        for flow in &mut self.flows {
            (flow.from, flow.to) = (None, None);
        }
    }

    fn pass_on(&self, number: i32, own: Option<&OwnedFd>, signal: &dyn Fn(Signal)) {
        if number == libc::SIGWINCH {
            if let (Some(master), Some(own)) = (&self.master, own)
                && let Ok(size) = rustix::termios::tcgetwinsize(own)
            {
                let _ = rustix::termios::tcsetwinsize(master, size);
            }
        } else if let Some((_, known)) = FORWARDED.iter().find(|(n, _)| *n == number) {
            signal(*known);
        }
    }
}

fn deadline(command: &ExecSpec) -> Option<Instant> {
    command
        .timeout
        .and_then(|timeout| Instant::now().checked_add(timeout))
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

fn set_size(master: &OwnedFd, size: Terminal) {
    let size = Winsize {
        ws_row: size.rows,
        ws_col: size.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let _ = rustix::termios::tcsetwinsize(master, size);
}

/// The caller's terminal in raw mode, until dropped.
struct RawMode<'a> {
    terminal: &'a OwnedFd,
    before: Option<Termios>,
}

impl<'a> RawMode<'a> {
    fn enter(terminal: &'a OwnedFd) -> Self {
        let before = rustix::termios::tcgetattr(terminal).ok();
        if let Some(before) = &before {
            let mut raw = before.clone();
            raw.make_raw();
            let _ = rustix::termios::tcsetattr(terminal, OptionalActions::Now, &raw);
        }
        Self { terminal, before }
    }
}

impl Drop for RawMode<'_> {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = rustix::termios::tcsetattr(self.terminal, OptionalActions::Now, before);
        }
    }
}
