//! One error type for the whole crate.
//!
//! Two families: a tree that EROFS (or Linux) cannot express, found while building or writing,
//! and bytes that are not an image this crate accepts, found while reading. Messages name the
//! object (path, inode, byte range) and, where there is one, the remedy.

use std::io;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a tree could not be built or written, or an image could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name cannot be a directory entry: empty, `.`, `..`, longer than 255 bytes, or with
    /// `/` or NUL in it.
    #[error("name \"{}\" cannot be a directory entry: {reason}", name.escape_ascii())]
    InvalidName {
        /// The refused name.
        name: Vec<u8>,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// The directory already has an entry of that name.
    #[error("entry \"{}\" exists already; remove it first", name.escape_ascii())]
    Exists {
        /// The name in its directory.
        name: Vec<u8>,
    },

    /// The directory has no entry of that name.
    #[error("no entry \"{}\"", name.escape_ascii())]
    NotFound {
        /// The name in its directory.
        name: Vec<u8>,
    },

    /// A parent given for an entry is not a directory.
    #[error("the parent of \"{}\" is not a directory", name.escape_ascii())]
    NotADirectory {
        /// The name of the entry (or, when reading, of the file used as a directory).
        name: Vec<u8>,
    },

    /// Hard links to directories do not exist on Linux.
    #[error("\"{}\" would be a hard link to a directory", name.escape_ascii())]
    DirectoryLink {
        /// The name of the refused link.
        name: Vec<u8>,
    },

    /// An inode holds something that the format (or Linux) has no room for.
    #[error("\"{}\": {reason}", path.escape_ascii())]
    Unrepresentable {
        /// Path from the root, without a leading `/`; empty for the root.
        path: Vec<u8>,
        /// What does not fit, and the limit.
        reason: String,
    },

    /// A limit of the image as a whole was passed.
    #[error("image too large: {what} (at most {limit})")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// The limit, in the units that `what` names.
        limit: u64,
    },

    /// The bytes are not an EROFS image, or one that uses features this crate does not know.
    #[error("not a usable EROFS image: {reason}")]
    Unsupported {
        /// Which field says so.
        reason: String,
    },

    /// The image contradicts itself or points outside of its bytes.
    #[error("damaged EROFS image: {object} (byte {offset}): {reason}; fetch or build it again")]
    Corrupt {
        /// Which structure, e.g. `inode 40`.
        object: String,
        /// Where it starts, in bytes from the start of the image.
        offset: u64,
        /// What is wrong.
        reason: String,
    },

    /// The output refused bytes.
    #[error("cannot write the EROFS image at byte {offset}")]
    Write {
        /// Bytes written before.
        offset: u64,
        /// What the output said.
        #[source]
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn corrupt(
        object: impl Into<String>,
        offset: u64,
        reason: impl Into<String>,
    ) -> Self {
        Self::Corrupt {
            object: object.into(),
            offset,
            reason: reason.into(),
        }
    }

    pub(crate) fn unsupported(reason: impl Into<String>) -> Self {
        Self::Unsupported {
            reason: reason.into(),
        }
    }
}
