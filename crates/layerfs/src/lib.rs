//! Serves layers on a node: on-demand, verified reads, a disk cache, kernel mounts.
//!
//! See `SEMANTICS.md` beside this crate for what is promised to readers, in which states.
//!
//! * [`fuse`]: a small transport for a directory of read-only blobs.

pub mod fuse;
mod sync;
