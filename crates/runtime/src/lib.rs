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
//! `THREATS.md` says who is trusted with what.

pub mod error;
mod init;
mod sandboxes;
pub mod spec;

pub use error::{Result, RuntimeError};
pub use init::{INIT_ARG0, init_main};
pub use sandboxes::{FreezeGuard, Sandbox, SandboxState, Sandboxes, SandboxesOptions, SweepReport};
pub use spec::{
    ExecSpec, Exit, IdMap, Limits, Network, SandboxId, SandboxName, SandboxSpec, StackLayer,
    Streams, Terminal,
};
