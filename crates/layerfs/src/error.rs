//! The crate's error type.

use std::io;
use std::path::{Path, PathBuf};

use layerpack_store::{Digest, StoreError};
use layerpack_sys::SysError;

/// Result of this crate's functions.
pub type Result<T, E = LayerfsError> = std::result::Result<T, E>;

/// Why a layer cannot be served or mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerfsError {
    /// A file or directory of the node's state could not be used.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The object.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A store object is missing, damaged or out of reach.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A mount operation failed.
    #[error(transparent)]
    Sys(#[from] SysError),
    /// Another process serves this node directory.
    #[error(
        "{} is in use by another layerpack daemon ({holder}); stop it, or choose another directory",
        root.display()
    )]
    Owned {
        /// The node directory.
        root: PathBuf,
        /// What the lock file says about the owner.
        holder: String,
    },
    /// Something in the way of layerpack's own files or directories.
    #[error("{} is unusable: {what}", path.display())]
    Unusable {
        /// The object.
        path: PathBuf,
        /// What is wrong and what to do about it.
        what: String,
    },
    /// A layer's metadata does not hold what its manifest or format promises.
    #[error("layer {layer} is damaged: {what}; verify it in its store and publish it again")]
    Damaged {
        /// The layer's identity, or its manifest.
        layer: Digest,
        /// What is wrong.
        what: String,
    },
    /// A recording cannot begin or end.
    #[error(
        "recording {id}: {what}; end it with `layerpack profile record --stop`, or choose another name"
    )]
    Recording {
        /// Its name.
        id: String,
        /// What is in the way.
        what: String,
    },
    /// Peers cannot be asked or answered.
    #[error("peers: {what}")]
    Peers {
        /// What is in the way, and what to do about it.
        what: String,
    },
    /// A trace cannot begin or go on.
    #[error("trace: {what}")]
    Trace {
        /// What is in the way.
        what: String,
    },
    /// Mounts are still in use.
    #[error("still in use: {what}; end the users first, or force it")]
    InUse {
        /// Who holds what.
        what: String,
    },
    /// A layer that the node's cache does not have.
    #[error("nothing of layer {layer} is in this node's cache; `layerpack cache ls` lists what is")]
    NotCached {
        /// Identity of the layer.
        layer: Digest,
    },
    /// No such lease.
    #[error("lease {id} is not known to this node")]
    UnknownLease {
        /// The identifier that was asked for.
        id: String,
    },
    /// A lease identifier cannot be used as a name.
    #[error("invalid lease identifier {id:?}: use 1 to 128 of the characters a-z A-Z 0-9 . _ -")]
    InvalidLease {
        /// The identifier.
        id: String,
    },
    /// The lease exists with another stack.
    #[error("lease {id} already holds another stack; release it first")]
    LeaseTaken {
        /// The identifier.
        id: String,
    },
    /// A stack that cannot be put together.
    #[error("cannot stack these layers: {what}")]
    Stack {
        /// Why not.
        what: String,
    },
    /// The machine lacks something.
    #[error("{feature} does not work here: {reason}; {remedy}")]
    Unsupported {
        /// What is missing.
        feature: &'static str,
        /// How that showed.
        reason: String,
        /// What helps.
        remedy: &'static str,
    },
    /// Something that is not on the node, and whose store was not to be asked.
    #[error("it is not all on this node, and its store {url} was not asked yet")]
    Unasked {
        /// Address of the store.
        url: String,
    },
    /// The node was stopped.
    #[error("the node at {} is stopped", root.display())]
    Stopped {
        /// The node directory.
        root: PathBuf,
    },
}

/// Adds action and path to an [`io::Error`].
pub(crate) trait IoContext<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T> {
        self.map_err(|source| LayerfsError::Io {
            action,
            path: path.to_path_buf(),
            source,
        })
    }
}

impl<T> IoContext<T> for rustix::io::Result<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T> {
        self.map_err(io::Error::from).at(action, path)
    }
}
