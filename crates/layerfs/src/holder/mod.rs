//! What outlives the serving process: a holder that keeps its descriptors.
//!
//! ```text
//! holder ── socket pair ── worker (the daemon proper)
//!   │                        serves /dev/fuse, the API, everything
//!   └ keeps: /dev/fuse and its clones, the node's lock, the API's socket, and a few lines of state
//! ```
//!
//! The holder starts the worker, waits for its end and starts it again. It knows nothing of layers:
//! it keeps **sets** of descriptors, each with a name and a piece of JSON, which a worker gave it and
//! the next one gets. So old holders can keep what newer workers need. `SEMANTICS.md`, "Staying
//! alive", has protocol and states.
//!
//! Messages are JSON, one to a packet of a `SOCK_SEQPACKET` pair that only the two processes have.

mod child;
mod control;
mod link;
mod run;
mod stuck;
mod trouble;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use layerpack_sys::fdpass;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use control::{Question, Reply, Who, ask, remedy};
pub use link::{Event, Link, Standing};
pub use run::{Holder, HolderOptions, Notice};
pub use trouble::Failing;

/// Version of the messages. A holder and a worker of different versions do not work together.
pub const PROTOCOL: u32 = 1;
/// Longest message in bytes.
const MAX_MESSAGE: usize = 64 << 10;

/// Name of the set that is the FUSE connection.
pub const FUSE: &str = "fuse";
/// Name of the set that is the lock on the node's directory.
pub const LOCK: &str = "lock";
/// Name of the set that is a thread of the worker: it ends when the worker is killed, where the whole
/// process may have to wait for itself first.
const WITNESS: &str = "witness";

/// Descriptors and what is to be known of them.
#[derive(Debug, Default)]
pub struct Set {
    /// What its maker noted.
    pub state: Value,
    /// At most [`fdpass::MAX_FDS`] of them.
    pub fds: Vec<OwnedFd>,
}

/// Sets by name.
pub type Sets = BTreeMap<String, Set>;

/// Keeps sets beyond the end of this process.
pub trait Keeper: std::fmt::Debug + Send + Sync {
    /// Keeps these descriptors (as copies) and this state under a name, in place of what was there.
    ///
    /// # Errors
    /// When there is no holder any more, or too much is to be kept.
    fn keep(&self, name: &str, state: &Value, fds: &[BorrowedFd<'_>]) -> io::Result<()>;

    /// Lets a set go.
    ///
    /// # Errors
    /// When there is no holder any more.
    fn forget(&self, name: &str) -> io::Result<()>;
}

/// What a worker says.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
enum ToHolder {
    /// The first message.
    Hello {
        protocol: u32,
        version: String,
        /// Restarts and upgrades under a holder that has died.
        #[serde(default)]
        before: (u64, u64),
    },
    /// Keep the descriptors that come with this.
    Keep { name: String, state: Value },
    /// Close them.
    Forget { name: String },
    /// Everything is served.
    Ready {
        /// How long reads wait for what they need, in milliseconds.
        #[serde(default)]
        patience_ms: Option<u64>,
    },
    /// It is going to end, and is not to be started again.
    Stopping,
}

/// What the holder says.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
enum ToWorker {
    /// A set of the worker before; its descriptors come with this.
    Kept { name: String, state: Value },
    /// That was all: the worker before is gone, serve.
    Go(Standing),
    /// Another one takes over: leave everything as it is, and end.
    Drain,
    /// Unmount everything and end.
    Stop,
}

fn send(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_MESSAGE {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a message of {} bytes to or from the holder", bytes.len()),
        ));
    }
    fdpass::send_fds(socket, &bytes, fds).map_err(|e| e.to_io())
}

/// The next message with its descriptors; `None` when the other end is closed.
fn receive<M: DeserializeOwned>(socket: BorrowedFd<'_>) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    let mut buffer = vec![0_u8; MAX_MESSAGE + 1];
    let (len, fds) = match fdpass::recv_fds(socket, &mut buffer) {
        Err(e) if e.errno == rustix::io::Errno::CONNRESET => return Ok(None),
        other => other.map_err(|e| e.to_io())?,
    };
    if len == 0 {
        return Ok(None);
    }
    let message = buffer.get(..len).unwrap_or_default();
    Ok(Some((serde_json::from_slice(message)?, fds)))
}

fn borrowed(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}
