//! The crate's errors: each names the object, the range where known, and what to do next.

use std::fmt;
use std::io;
use std::ops::Range;

use crate::digest::Digest;
use crate::reference::Reference;

/// Result of this crate.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// Why bytes do not follow FORMAT.md. Carries no object name: the caller that knows the object
/// wraps it in [`StoreError::Corrupt`] or [`StoreError::Unsupported`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormatError {
    /// The format's short name, for instance `LPMAP`.
    pub format: &'static str,
    /// What is wrong, with the values found.
    pub what: String,
    /// True if the bytes may be sound but were made by a newer version (unknown version or
    /// incompatible feature), so that upgrading is the remedy.
    pub newer: bool,
}

impl FormatError {
    /// Damaged or hostile bytes.
    pub(crate) fn new(format: &'static str, what: impl Into<String>) -> Self {
        Self {
            format,
            what: what.into(),
            newer: false,
        }
    }

    /// Bytes of a version or feature that this build does not know.
    pub(crate) fn newer(format: &'static str, what: impl Into<String>) -> Self {
        Self {
            format,
            what: what.into(),
            newer: true,
        }
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.format, self.what)
    }
}

impl std::error::Error for FormatError {}

/// Everything that can go wrong with a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The text is not a reference, name or version.
    #[error(
        "invalid reference {text:?}: {why}; expected kind/name:version, for instance base/debian:12"
    )]
    InvalidReference {
        /// The text as given.
        text: String,
        /// The rule that it breaks.
        why: String,
    },
    /// The text is not a digest.
    #[error("invalid digest {text:?}: expected b3: and 64 lowercase hexadecimal digits")]
    InvalidDigest {
        /// The text as given.
        text: String,
    },
    /// Text that is no key of signatures. It is not repeated: it may be a secret.
    #[error("not a key for signatures: {why}; make one with `layerpack key generate`")]
    InvalidSigningKey {
        /// What is wrong with it.
        why: String,
    },
    /// The text is not an object key.
    #[error("invalid object key {key:?}: {why}")]
    InvalidKey {
        /// The text as given.
        key: String,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// The store's address cannot be used.
    #[error("cannot use store {url:?}: {why}")]
    InvalidUrl {
        /// The address as given.
        url: String,
        /// Why, and what is accepted.
        why: String,
    },
    /// No such version is published.
    #[error(
        "reference {reference} is not in store {store}; check its spelling against the list of layers, or use another store"
    )]
    UnknownReference {
        /// The reference asked for.
        reference: Reference,
        /// The store's address.
        store: String,
    },
    /// Neither the store's marker nor a layer is at the address.
    #[error(
        "{}there is no store at {store}: it has no layerpack.json and no layers; check the address, or build or push a layer there first{}", asked_for(.wanted), comma_hint(.store)
    )]
    NoStore {
        /// The layer, channel or profile that was asked for; empty: none.
        wanted: String,
        /// The address.
        store: String,
    },
    /// No such channel, or it leads nowhere.
    #[error("channel {channel} in store {store}: {what}; move it with `layerpack tag`")]
    UnknownChannel {
        /// The channel asked for.
        channel: String,
        /// The store's address.
        store: String,
        /// What is wrong.
        what: String,
    },
    /// A reference that cannot be read, or that names another's manifest. Publishing does not
    /// replace it: the version may have been published with other content, and of two writers
    /// that both replace one the second would undo the first.
    #[error(
        "reference {reference} in store {store} is damaged (object {key}: {what}); restore the object from a copy, or remove the reference (layerpack rm {reference}) and publish it again"
    )]
    DamagedReference {
        /// The reference.
        reference: Box<Reference>,
        /// The store's address.
        store: String,
        /// The object's key.
        key: String,
        /// What was found.
        what: String,
    },
    /// An object that another object names is gone.
    #[error(
        "object {key} is missing from store {store}; publish the layer again or restore the object from a copy"
    )]
    Missing {
        /// The store's address.
        store: String,
        /// The object's key.
        key: String,
    },
    /// An object is not what its digest, its format or the object that names it says.
    #[error("object {key}{} in store {store} is damaged: {what}; verify the layer, then restore the object from a copy or publish again", range_text(.range.as_ref()))]
    Corrupt {
        /// The store's address.
        store: String,
        /// The object's key.
        key: String,
        /// Bytes of the object concerned, if not all of it.
        range: Option<Range<u64>>,
        /// What was found.
        what: String,
    },
    /// An object of a newer format.
    #[error("{object} needs a newer version of layerpack: {what}")]
    Unsupported {
        /// Object and store, or address.
        object: String,
        /// The version or feature that is not known here.
        what: String,
    },
    /// An object is larger than the reader accepts. Nothing was allocated for it.
    #[error(
        "object {key} in store {store} has {size} bytes, more than the {limit} expected; it is damaged or not ours"
    )]
    TooLarge {
        /// The store's address.
        store: String,
        /// The object's key.
        key: String,
        /// Its size in bytes.
        size: u64,
        /// The largest size accepted, in bytes.
        limit: u64,
    },
    /// The version is published with other content. Versions never change.
    #[error(
        "{reference} is already published in store {store} as {existing}, this content is {new}; choose another version, or remove the reference first"
    )]
    Conflict {
        /// The reference.
        reference: Box<Reference>,
        /// The store's address.
        store: String,
        /// Manifest digest in the store.
        existing: Digest,
        /// Manifest digest of what was to be published.
        new: Digest,
    },
    /// The store has only a part of the layer, and this is not in it.
    #[error(
        "object {key} is not in store {store}, which has only a part of the layer, seeded from {origin}; name both stores (--store {store},{origin}), or copy the layer whole"
    )]
    NotSeeded {
        /// The store's address.
        store: String,
        /// The object's key.
        key: String,
        /// Where the rest is.
        origin: String,
    },
    /// The store's filesystem or quota is full. Nothing of the object is visible.
    #[error(
        "no space left in store {store} while writing {key}; free space there or use another store, then run again"
    )]
    NoSpace {
        /// The store's address.
        store: String,
        /// The object's key, or the temporary's name.
        key: String,
        /// The system's error.
        source: io::Error,
    },
    /// The backend failed.
    #[error("cannot {operation} {key} in store {store}")]
    Io {
        /// What was tried: read, write, list, delete.
        operation: &'static str,
        /// The store's address.
        store: String,
        /// The object's key.
        key: String,
        /// The system's error.
        source: io::Error,
    },
    /// The backend did not answer in its time.
    #[error(
        "store {store} did not answer within {limit_ms} ms for {key}; check the connection and run again"
    )]
    TimedOut {
        /// The store's address.
        store: String,
        /// The object's key.
        key: String,
        /// The limit that passed, in milliseconds.
        limit_ms: u64,
    },
    /// A collection deletes an object that a writer needs, and does not come to its end.
    #[error(
        "object {key} in store {store} is being deleted by a garbage collection; run again when it has ended, at most ten minutes after its last sign of life"
    )]
    Collecting {
        /// The store's address.
        store: String,
        /// The object's key.
        key: String,
    },
    /// A writer was taken for dead, so that what it relies on may have been deleted.
    #[error(
        "the lease {key} in store {store} was not renewed in time, and a collection may have deleted what it protected; run again"
    )]
    LeaseLost {
        /// The store's address.
        store: String,
        /// The lease's key.
        key: String,
    },
    /// The backend asks for fewer requests, or is overloaded (429, 503 and their like). Nothing
    /// was done.
    #[error(
        "store {store} asks for fewer requests (for {key}); run again later, lower the rate limit, or raise the store's limits"
    )]
    Throttled {
        /// The store's address.
        store: String,
        /// The object's key.
        key: String,
        /// How long the backend asks to wait, in milliseconds, if it says so.
        retry_after_ms: Option<u64>,
    },
    /// The backend refuses: no or wrong credentials, or no right to do this.
    #[error(
        "store {store} refuses access to {key}: {what}; check the credentials, their rights on this store, and the clock"
    )]
    Denied {
        /// The store's address.
        store: String,
        /// The object's key.
        key: String,
        /// What the backend said.
        what: String,
    },
    /// The backend has no such operation: a web server can neither be listed nor written to.
    #[error("cannot {operation} in store {store}: {why}")]
    NotSupported {
        /// What was tried.
        operation: &'static str,
        /// The store's address.
        store: String,
        /// Why, and what to use instead.
        why: &'static str,
    },
    /// Bytes given to a parser break their format.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The caller's input cannot be published.
    #[error("cannot publish {object}: {what}")]
    InvalidInput {
        /// What was to be published.
        object: String,
        /// What is wrong with it.
        what: String,
    },
    /// No published version matches a pattern.
    #[error("no layer of store {store} matches {pattern:?}; `layerpack ls` lists what is there")]
    NoMatch {
        /// The pattern as given.
        pattern: String,
        /// The store's address.
        store: String,
    },
    /// No profile, or more than one, is meant.
    #[error("no profile {name:?} in store {store}: {what}; list them, or name one by its digest")]
    NoProfile {
        /// The text as given.
        name: String,
        /// The store's address.
        store: String,
        /// How many match.
        what: String,
    },
    /// The source of a file's bytes failed.
    #[error("cannot read the input")]
    Input(#[source] io::Error),
    /// An earlier call on this writer failed: nothing more can be added.
    #[error("cannot continue writing to store {store}: an earlier write failed")]
    WriterFailed {
        /// The store's address.
        store: String,
    },
}

fn range_text(range: Option<&Range<u64>>) -> String {
    range.map_or_else(String::new, |r| format!(" (bytes {}..{})", r.start, r.end))
}

fn asked_for(wanted: &str) -> String {
    match wanted {
        "" => String::new(),
        wanted => format!("{wanted} cannot be looked up: "),
    }
}

/// What may have been meant by a comma that separates nothing.
fn comma_hint(store: &str) -> &'static str {
    let separates = |rest: &str| rest.starts_with('/') || rest.contains("://");
    match store.split(',').skip(1).all(separates) {
        true => "",
        false => {
            " (a comma separates addresses where one with a scheme or an absolute path follows)"
        }
    }
}

impl StoreError {
    /// The object that a damaged, missing, too large or unreachable object's error is about.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::Missing { key, .. }
            | Self::DamagedReference { key, .. }
            | Self::Corrupt { key, .. }
            | Self::TooLarge { key, .. }
            | Self::NotSeeded { key, .. }
            | Self::NoSpace { key, .. }
            | Self::Io { key, .. }
            | Self::TimedOut { key, .. }
            | Self::Collecting { key, .. }
            | Self::LeaseLost { key, .. }
            | Self::Throttled { key, .. }
            | Self::Denied { key, .. }
            | Self::InvalidKey { key, .. } => Some(key),
            Self::InvalidReference { .. }
            | Self::InvalidDigest { .. }
            | Self::InvalidSigningKey { .. }
            | Self::InvalidUrl { .. }
            | Self::UnknownReference { .. }
            | Self::NoStore { .. }
            | Self::Unsupported { .. }
            | Self::Conflict { .. }
            | Self::NotSupported { .. }
            | Self::Format(_)
            | Self::InvalidInput { .. }
            | Self::NoProfile { .. }
            | Self::NoMatch { .. }
            | Self::UnknownChannel { .. }
            | Self::Input(_)
            | Self::WriterFailed { .. } => None,
        }
    }

    /// True if the object is there but wrong, or should be there and is not.
    #[must_use]
    pub const fn is_damage(&self) -> bool {
        matches!(
            self,
            Self::Missing { .. }
                | Self::DamagedReference { .. }
                | Self::Corrupt { .. }
                | Self::TooLarge { .. }
                | Self::Unsupported { .. }
        )
    }

    /// True if the same call may succeed a little later: the backend is overloaded or slow, or the
    /// connection broke. A write that failed so may have happened.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        use io::ErrorKind as Kind;
        match self {
            Self::Throttled { .. } | Self::TimedOut { .. } => true,
            Self::Io { source, .. } => matches!(
                source.kind(),
                Kind::ConnectionRefused
                    | Kind::ConnectionReset
                    | Kind::ConnectionAborted
                    | Kind::NotConnected
                    | Kind::BrokenPipe
                    | Kind::HostUnreachable
                    | Kind::NetworkUnreachable
                    | Kind::NetworkDown
                    | Kind::UnexpectedEof
                    | Kind::TimedOut
                    | Kind::Interrupted
            ),
            _ => false,
        }
    }

    /// Names the object for a format error.
    pub(crate) fn format(store: &str, key: &str, error: &FormatError) -> Self {
        if error.newer {
            Self::Unsupported {
                object: format!("object {key} in store {store}"),
                what: error.to_string(),
            }
        } else {
            Self::Corrupt {
                store: store.to_owned(),
                key: key.to_owned(),
                range: None,
                what: error.to_string(),
            }
        }
    }
}
