//! Sandboxes: running environments made of layers.
//!
//! A sandbox is an overlay of read-only lower directories (which the node
//! serves) with a writable upper on the local disk, run in namespaces of its
//! own. There is no daemon in the way: the calling process is the launcher,
//! and a lasting sandbox is held by its own PID 1.
//!
//! The caller's program must hand over to [`init_main`] when it is started
//! under the name [`INIT_ARG0`], before it does anything else: the launcher
//! starts it again under that name as PID 1 of a sandbox.
//!
//! How a sandbox comes to be, in order: its directory, lock and name; its
//! control groups; a process in new namespaces, waiting; its id maps; the
//! mounts that need the host's root, detached; PID 1, which attaches them, adds
//! its own, pivots, starts the command and reaps. Each step is undone if a
//! later one fails, and nothing is ever attached in the host's mount table.
//!
//! `THREATS.md` says who is trusted with what.

mod capabilities;
mod cgroup;
mod command;
mod delete;
pub mod error;
mod freeze;
mod init;
mod launch;
mod leftovers;
mod mounts;
mod protocol;
mod record;
mod sandboxes;
mod seccomp;
mod session;
pub mod spec;
mod stop;
mod user;

pub use error::{Result, RuntimeError};
pub use freeze::{FreezeGuard, HaltedBy, Hold};
pub use init::{INIT_ARG0, init_main};
pub use mounts::like_top;
pub use sandboxes::{Sandbox, SandboxState, Sandboxes, SandboxesOptions, SweepReport};
pub use spec::{
    ExecSpec, Exit, IdMap, Limits, Network, SandboxId, SandboxName, SandboxSpec, StackLayer,
    Streams, Terminal,
};
