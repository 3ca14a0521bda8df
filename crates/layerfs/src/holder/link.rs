//! The worker's end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::process::{PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Keeper, PROTOCOL, Set, Sets, ToHolder, ToWorker, WITNESS, receive, send};
use crate::sync::{AtomicU64, Mutex, Ordering, RwLock};
use std::sync::Arc;
use std::time::Duration;

/// What the holder says of itself and of the workers so far.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// Version of its messages.
    pub protocol: u32,
    /// Its process id.
    pub pid: u32,
    /// Version of its program.
    pub version: String,
    /// How often a worker died and was started again.
    pub restarts: u64,
    /// How often a worker gave way to a newer one.
    pub upgrades: u64,
    /// The out-of-memory score that a worker is to give itself.
    pub oom_score_adj: Option<i32>,
}

/// What the holder wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Another worker takes over: leave everything as it is, and end.
    Drain,
    /// Unmount everything and end.
    Stop,
    /// The holder is gone.
    Gone,
}

/// Connection to the holder.
#[derive(Debug)]
pub struct Link {
    socket: RwLock<Arc<OwnedFd>>,
    /// How many holders took the place of another.
    renewed: AtomicU64,
    /// How long reads wait, in milliseconds; 0 until that was said.
    patience_ms: AtomicU64,
    /// Names and states of what is kept, to tell another holder.
    kept: Mutex<Vec<(String, Value, Vec<OwnedFd>)>>,
}

impl Link {
    /// Greets the holder at the other end of `socket` and gets what it keeps. Waits until the worker
    /// before is gone.
    ///
    /// # Errors
    /// When the holder is gone or speaks another version.
    pub fn open(socket: OwnedFd, version: &str) -> io::Result<(Self, Sets, Standing)> {
        let hello = ToHolder::Hello {
            protocol: PROTOCOL,
            version: version.to_owned(),
            before: (0, 0),
        };
        send(socket.as_fd(), &hello, &[])?;
        let mut sets = Sets::new();
        loop {
            match receive(socket.as_fd())? {
                None => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the holder is gone, or of another version",
                    ));
                }
                Some((ToWorker::Kept { name, state }, fds)) => {
                    sets.insert(name, Set { state, fds });
                }
                Some((ToWorker::Go(standing), _)) => {
                    let link = Self::of(socket);
                    link.remember(&sets)?;
                    return Ok((link, sets, standing));
                }
                // Ended before it began.
                Some((ToWorker::Drain | ToWorker::Stop, _)) => {
                    return Err(io::Error::new(
                        io::ErrorKind::Interrupted,
                        "told to end at the start",
                    ));
                }
            }
        }
    }

    fn of(socket: OwnedFd) -> Self {
        Self {
            socket: RwLock::new(Arc::new(socket)),
            renewed: AtomicU64::new(0),
            patience_ms: AtomicU64::new(0),
            kept: Mutex::new(Vec::new()),
        }
    }

    /// Takes note of what came from the holder: another one is to get it, too.
    fn remember(&self, sets: &Sets) -> io::Result<()> {
        let mut kept = self.kept.lock();
        for (name, set) in sets {
            let copies = set
                .fds
                .iter()
                .map(OwnedFd::try_clone)
                .collect::<io::Result<Vec<_>>>()?;
            kept.push((name.clone(), set.state.clone(), copies));
        }
        Ok(())
    }

    fn say(&self, message: &ToHolder, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let socket = Arc::clone(&self.socket.read());
        send((*socket).as_fd(), message, fds)
    }

    /// Everything is served. Reads that have waited for longer than `patience` for a worker that
    /// stays are failed by the holder.
    ///
    /// # Errors
    /// When the holder is gone.
    pub fn ready(&self, patience: Duration) -> io::Result<()> {
        let millis = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        self.patience_ms.store(millis.max(1), Ordering::Release);
        self.say_ready()
    }

    fn say_ready(&self) -> io::Result<()> {
        let patience = self.patience_ms.load(Ordering::Acquire);
        let patience_ms = (patience > 0).then_some(patience);
        self.say(&ToHolder::Ready { patience_ms }, &[])
    }

    /// Has the holder watch the thread that calls this, which is to end with the process only: so it
    /// learns at once that the process is being killed. Before Linux 6.9 it does after a moment.
    ///
    /// # Errors
    /// When the kernel cannot, or the holder is gone.
    pub fn watch_this_thread(&self) -> io::Result<()> {
        // `PIDFD_THREAD`.
        let thread = PidfdFlags::from_bits_retain(OFlags::EXCL.bits());
        let fd = pidfd_open(rustix::thread::gettid(), thread)?;
        let message = ToHolder::Keep {
            name: WITNESS.to_owned(),
            state: Value::Null,
        };
        self.say(&message, &[fd.as_fd()])
    }

    /// This process is going to end on purpose.
    ///
    /// # Errors
    /// When the holder is gone.
    pub fn stopping(&self) -> io::Result<()> {
        self.say(&ToHolder::Stopping, &[])
    }

    /// Waits for what the holder wants next. Words that are not known are passed over.
    #[must_use]
    pub fn wait(&self) -> Event {
        let socket = Arc::clone(&self.socket.read());
        loop {
            match receive((*socket).as_fd()) {
                Ok(Some((ToWorker::Drain, _))) => return Event::Drain,
                Ok(Some((ToWorker::Stop, _))) => return Event::Stop,
                Ok(None) => return Event::Gone,
                Ok(Some(_)) => {}
                Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                    tracing::warn!(error = %e, "a message of the holder is not understood");
                }
                Err(e) => {
                    tracing::warn!(error = %e, "the holder cannot be heard");
                    return Event::Gone;
                }
            }
        }
    }

    /// How many holders took the place of another so far: tells whether the one that is gone is the
    /// one that counts.
    #[must_use]
    pub fn renewed(&self) -> u64 {
        self.renewed.load(Ordering::Acquire)
    }

    /// Goes on with another holder, at the other end of `socket`: it gets all that is kept, and what
    /// the one `before` counted. This process is ready.
    ///
    /// # Errors
    /// When that holder is gone, too, or speaks another version.
    pub fn renew(&self, socket: OwnedFd, version: &str, before: &Standing) -> io::Result<Standing> {
        let hello = ToHolder::Hello {
            protocol: PROTOCOL,
            version: version.to_owned(),
            before: (before.restarts, before.upgrades),
        };
        send(socket.as_fd(), &hello, &[])?;
        let standing = loop {
            match receive(socket.as_fd())? {
                Some((ToWorker::Go(standing), _)) => break standing,
                Some(_) => {}
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        };
        // Held, so that nothing that is kept meanwhile gets lost between the two.
        let kept = self.kept.lock();
        *self.socket.write() = Arc::new(socket);
        self.renewed.fetch_add(1, Ordering::AcqRel);
        for (name, state, fds) in kept.iter() {
            let message = ToHolder::Keep {
                name: name.clone(),
                state: state.clone(),
            };
            self.say(&message, &super::borrowed(fds))?;
        }
        self.say_ready()?;
        Ok(standing)
    }
}

impl Keeper for Link {
    fn keep(&self, name: &str, state: &Value, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let copies = fds
            .iter()
            .map(BorrowedFd::try_clone_to_owned)
            .collect::<io::Result<Vec<_>>>()?;
        let mut kept = self.kept.lock();
        kept.retain(|(known, _, _)| known != name);
        kept.push((name.to_owned(), state.clone(), copies));
        let message = ToHolder::Keep {
            name: name.to_owned(),
            state: state.clone(),
        };
        self.say(&message, fds)
    }

    fn forget(&self, name: &str) -> io::Result<()> {
        self.kept.lock().retain(|(known, _, _)| known != name);
        self.say(
            &ToHolder::Forget {
                name: name.to_owned(),
            },
            &[],
        )
    }
}
