//! System calls of layerpack: mounts, namespaces, processes, descriptors, attributes.
//!
//! Everything that needs `unsafe` lives here, so that the other crates can
//! forbid it. The modules are thin: each function does one kernel operation
//! (or one that only makes sense as a whole, such as starting a process in new
//! namespaces), takes and returns owned descriptors, and reports failures as
//! [`SysError`] with the call, the object and the errno.
//!
//! Nothing here keeps state, prints, reads the environment or chooses defaults
//! for a caller.

pub mod bare;
pub mod error;
pub mod fdpass;
pub mod fusedev;
pub mod loopdev;
pub mod memory;
pub mod mount;
pub mod mountinfo;
pub mod net;
pub mod ns;
pub mod pagecache;
pub mod power;
pub mod probe;
pub mod process;
pub mod signals;
pub mod xattr;

pub use error::{Result, SysError};
