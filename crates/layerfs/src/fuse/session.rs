//! Threads that serve the channels of one mount, and the INIT conversation.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, IntoBytes};

use super::abi::{self, InHeader, InitIn, InitOut, init};
use super::channel::{Channel, Ended, Reply, ReplyBuf};

use super::passthrough::Opens;
use super::{BlobSource, dispatch};
use crate::pool::Pool;
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, Ordering};

/// Limits of a [`Session`].
#[derive(Debug, Clone, Copy)]
pub struct SessionConfig {
    /// Longest read the kernel may send, in bytes; rounded to pages of 4 KiB, at most 1 MiB.
    pub max_read: u32,
    /// Readahead requests the kernel may have under way at once before it holds others back.
    pub max_background: u16,
    /// Threads that wait for the store, at most; they exist only while there is work.
    pub wait_threads: usize,
    /// Have the kernel read by itself what is here as a whole, where it can (Linux 6.9).
    pub passthrough: bool,
    /// Reads that may be queued for those threads before channels stop taking in requests, and cached
    /// bytes have to wait as well.
    pub wait_queue: usize,
}

impl SessionConfig {
    /// Limits that suit a node of a few cores: reads of 1 MiB, 64 of them in flight.
    pub const RECOMMENDED: Self = Self {
        max_read: 1 << 20,
        max_background: 1024,
        wait_threads: 64,
        passthrough: true,
        wait_queue: 4096,
    };

    fn pages(&self) -> u16 {
        u16::try_from((self.max_read / 4096).clamp(1, 256)).unwrap_or(256)
    }
}

/// What was agreed with the kernel at INIT: all the state a connection has. Another process
/// that takes the descriptors over needs it for [`Session::resume`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Negotiated {
    /// Minor protocol version.
    pub minor: u32,
    /// Capability bits in force.
    pub flags: u64,
}

impl Negotiated {
    /// Whether the kernel can read files by itself.
    #[must_use]
    pub fn can_pass_through(&self) -> bool {
        self.flags & init::PASSTHROUGH != 0
    }

    /// Whether requests in flight survive the death of the serving process.
    #[must_use]
    pub fn can_resend(&self) -> bool {
        self.flags & init::HAS_RESEND != 0
    }
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: SessionConfig,
    pub(crate) pool: Pool,
    /// The thread that has the kernel drop pages: one that answers reads must not.
    pub(crate) drops: Pool,
    pub(crate) negotiated: OnceLock<Negotiated>,
    pub(crate) requests: AtomicU64,
    pub(crate) opens: Opens,
    running: Mutex<usize>,
    ended: Condvar,
    /// What comes in is left to whoever takes over.
    leaving: AtomicBool,
    /// INIT was answered.
    agreed: (Mutex<bool>, Condvar),
}

/// A mount being served. Dropping it does not end the service: unmount (or abort) does, and
/// [`Session::wait`] waits for it.
pub struct Session {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    source: Arc<dyn BlobSource>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("shared", &self.shared)
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Serves a new mount whose INIT has not been answered yet. `channels` are the descriptor
    /// that was mounted and its clones (`FUSE_DEV_IOC_CLONE`); each gets a thread.
    ///
    /// # Errors
    /// When no thread can be started, or `channels` is empty.
    pub fn start(
        channels: Vec<OwnedFd>,
        config: SessionConfig,
        source: Arc<dyn BlobSource>,
    ) -> io::Result<Self> {
        Self::spawn(channels, None, config, source)
    }

    /// Serves a mount that another process served before, and has the kernel send again what
    /// that process had read and not answered, before anything new is read. Where the kernel cannot
    /// (before 6.9) those requests stay unanswered until the mount is aborted, so callers check
    /// [`Negotiated::can_resend`] first. That process must have ended.
    ///
    /// # Errors
    /// When no thread can be started, `channels` is empty, or the kernel refuses to resend.
    pub fn resume(
        channels: Vec<OwnedFd>,
        negotiated: Negotiated,
        config: SessionConfig,
        source: Arc<dyn BlobSource>,
    ) -> io::Result<Self> {
        Self::spawn(channels, Some(negotiated), config, source)
    }

    fn spawn(
        channels: Vec<OwnedFd>,
        negotiated: Option<Negotiated>,
        config: SessionConfig,
        source: Arc<dyn BlobSource>,
    ) -> io::Result<Self> {
        if channels.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a FUSE session needs at least one descriptor",
            ));
        }
        let shared = Arc::new(Shared {
            config,
            pool: Pool::new("fuse-wait", config.wait_threads, config.wait_queue),
            drops: Pool::new("fuse-drop", 1, 64),
            negotiated: OnceLock::new(),
            requests: AtomicU64::new(0),
            opens: Opens::default(),
            running: Mutex::new(0),
            ended: Condvar::new(),
            leaving: AtomicBool::new(false),
            agreed: (Mutex::new(negotiated.is_some()), Condvar::new()),
        });
        let channels: Vec<_> = channels
            .into_iter()
            .map(|fd| Arc::new(Channel::new(fd)))
            .collect();
        if let Some(negotiated) = negotiated {
            let _ = shared.negotiated.set(negotiated);
            // Before any thread reads: what this process takes in is not to come twice.
            if let Some(first) = channels.first() {
                first.request_resend()?;
            }
        }
        let mut threads = Vec::with_capacity(channels.len());
        for channel in channels {
            let (shared, source) = (Arc::clone(&shared), Arc::clone(&source));
            *shared.running.lock() += 1;
            let guard = Running(Arc::clone(&shared));
            let thread = std::thread::Builder::new()
                .name("fuse".to_owned())
                .stack_size(512 * 1024)
                .spawn(move || {
                    let _guard = guard;
                    serve(&shared, &channel, &source);
                })?;
            threads.push(thread);
        }
        Ok(Self {
            shared,
            threads,
            source,
        })
    }

    /// Waits until INIT was answered, at most `limit`; gives what was agreed on.
    #[must_use]
    pub fn agreed(&self, limit: Duration) -> Option<Negotiated> {
        let end = Instant::now() + limit;
        let mut agreed = self.shared.agreed.0.lock();
        while !*agreed {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            agreed = self.shared.agreed.1.wait_timeout(agreed, left);
        }
        self.negotiated()
    }

    /// Takes in nothing more, and waits until what waits for a store is answered, at most `limit`.
    /// The kernel sends the rest again to whoever takes over, after this process has ended.
    pub fn leave(&self, limit: Duration) {
        // Who drops pages may be asking this process.
        self.shared.drops.wait_idle(limit);
        self.shared.leaving.store(true, Ordering::Release);
        self.shared.pool.wait_idle(limit);
    }

    /// What INIT agreed on; `None` until the kernel has asked.
    #[must_use]
    pub fn negotiated(&self) -> Option<Negotiated> {
        self.shared.negotiated.get().copied()
    }

    /// Requests taken in so far.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Relaxed)
    }

    /// Has the kernel drop the pages of a blob's file, soon.
    pub fn drop_pages(&self, ino: u64) {
        let source = Arc::clone(&self.source);
        let _ = self
            .shared
            .drops
            .submit(Box::new(move || source.drop_pages(ino)));
    }

    /// Whether any channel is still served.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        *self.shared.running.lock() > 0
    }

    /// Waits until the mount is gone and every thread has ended, at most `limit`. Returns
    /// whether that happened.
    #[must_use]
    pub fn wait(self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let mut running = self.shared.running.lock();
        while *running > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            running = self.shared.ended.wait_timeout(running, left);
        }
        drop(running);
        for thread in self.threads {
            let _ = thread.join();
        }
        self.shared
            .drops
            .close(end.saturating_duration_since(Instant::now()));
        self.shared
            .pool
            .close(end.saturating_duration_since(Instant::now()))
    }
}

/// Counts a serving thread out however it ends.
struct Running(Arc<Shared>);

impl Drop for Running {
    fn drop(&mut self) {
        *self.0.running.lock() -= 1;
        self.0.ended.notify_all();
    }
}

/// One channel's thread.
fn serve(shared: &Arc<Shared>, channel: &Arc<Channel>, source: &Arc<dyn BlobSource>) {
    let mut request = vec![0_u8; abi::READ_BUFFER];
    let mut answer = ReplyBuf::new();
    loop {
        let len = match channel.receive(&mut request) {
            Ok(len) => len,
            Err(Ended::Unmounted) => return,
            Err(Ended::Failed(e)) => {
                tracing::error!(error = %e, "FUSE descriptor failed; its mount is not served");
                return;
            }
        };
        if shared.leaving.load(Ordering::Acquire) {
            // Unanswered, so it is sent again.
            return;
        }
        shared.requests.fetch_add(1, Ordering::Relaxed);
        let message = request.get(..len).unwrap_or_default();
        let Ok((header, body)) = InHeader::read_from_prefix(message) else {
            tracing::error!(len, "FUSE request is shorter than its header");
            continue;
        };
        let reply = Reply::new(Arc::clone(channel), header.unique);
        let handled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            if header.opcode == abi::op::INIT {
                initialise(shared, body, reply);
            } else {
                dispatch::handle(shared, source, &header, body, reply, &mut answer);
            }
        }));
        if handled.is_err() {
            tracing::error!(
                opcode = header.opcode,
                "a FUSE request panicked; it got EIO"
            );
        }
    }
}

/// Answers INIT.
fn initialise(shared: &Shared, body: &[u8], reply: Reply) {
    let Ok((asked, rest)) = InitIn::read_from_prefix(body) else {
        return reply.error(Errno::PROTO);
    };
    if asked.major > abi::KERNEL_VERSION {
        // The kernel then asks again with our version.
        let out = InitOut {
            major: abi::KERNEL_VERSION,
            minor: abi::MINOR_VERSION,
            ..InitOut::default()
        };
        return reply.data(out.as_bytes());
    }
    if asked.major < abi::KERNEL_VERSION || asked.minor < abi::OLDEST_MINOR {
        tracing::error!(
            major = asked.major,
            minor = asked.minor,
            "kernel speaks a FUSE protocol older than 7.23"
        );
        return reply.error(Errno::PROTO);
    }
    let mut offered = u64::from(asked.flags);
    if offered & init::INIT_EXT != 0
        && let Ok((flags2, _)) = u32::read_from_prefix(rest)
    {
        offered |= u64::from(flags2) << 32;
    }
    let passthrough = if shared.config.passthrough {
        init::PASSTHROUGH
    } else {
        0
    };
    let wanted = passthrough
        | init::ASYNC_READ
        | init::DO_READDIRPLUS
        | init::READDIRPLUS_AUTO
        | init::ASYNC_DIO
        | init::PARALLEL_DIROPS
        | init::MAX_PAGES
        | init::EXPLICIT_INVAL_DATA
        | init::INIT_EXT
        | init::HAS_RESEND;
    let flags = offered & wanted;
    let negotiated = Negotiated {
        minor: asked.minor.min(abi::MINOR_VERSION),
        flags,
    };
    let background = shared.config.max_background.max(1);
    let out = InitOut {
        major: abi::KERNEL_VERSION,
        minor: negotiated.minor,
        // The kernel takes the smaller of this and what the mount's bdi says when the answer
        // arrives, 128 KiB or what was written to its read_ahead_kb before: so no limit here,
        // else a larger value written early would be cut down again.
        max_readahead: u32::MAX,
        flags: u32::try_from(flags & u64::from(u32::MAX)).unwrap_or(0),
        max_background: background,
        congestion_threshold: background - background / 4,
        // Nothing is ever written: keeps the kernel's demand on the request buffer small.
        max_write: 4096,
        time_gran: 1,
        max_pages: shared.config.pages(),
        map_alignment: 0,
        flags2: u32::try_from(flags >> 32).unwrap_or(0),
        // Files of a filesystem that lies on no other. EROFS takes data from a filesystem of
        // this depth, though not its metadata.
        max_stack_depth: u32::from(flags & init::PASSTHROUGH != 0),
        unused: [0; 6],
    };
    let _ = shared.negotiated.set(negotiated);
    reply.data(out.as_bytes());
    *shared.agreed.0.lock() = true;
    shared.agreed.1.notify_all();
}
