//! Serves layers on a node: on-demand, verified reads, a disk cache, kernel mounts.
//!
//! See `SEMANTICS.md` beside this crate for what is promised to readers, in which states.
//!
//! * [`fuse`]: a small transport for a directory of read-only blobs.
//! * [`cache`]: what the node holds of a layer's data.
//! * [`fetch`]: what brings the rest, verified.

pub mod cache;
mod error;
pub mod fetch;
mod files;
pub mod fuse;
mod pool;
mod sync;

pub use error::{LayerfsError, Result};
