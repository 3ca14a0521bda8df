//! The crate's errors: each names the file or archive, what is wrong with it, and the remedy.

use std::io;
use std::path::{Path, PathBuf};

use layerpack_store::StoreError;

/// Result of this crate.
pub type Result<T, E = PackError> = std::result::Result<T, E>;

/// Everything that can go wrong while packing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// The source's text form is not one of ours.
    #[error(
        "invalid source {text:?}: {why}; expected dir:PATH, tar:PATH, oci:DIR[:TAG], docker-archive:FILE[:NAME] or registry:HOST/REPOSITORY[:TAG]"
    )]
    InvalidSource {
        /// The text as given.
        text: String,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// The source cannot be used at all.
    #[error("cannot use source {}: {why}", path.display())]
    UnusableSource {
        /// The source's path.
        path: PathBuf,
        /// Why, and what to do.
        why: &'static str,
    },
    /// The source itself cannot be opened.
    #[error("cannot open the source {path}; check that it exists and may be read")]
    Source {
        /// The source's path.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// The system refused to read something.
    #[error("cannot {action} {path}; check that it exists and may be read, or exclude it")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file concerned.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// A file or directory changed while it was read.
    #[error(
        "{path} changed while it was being packed ({what}); stop what writes to it and run again"
    )]
    Changed {
        /// The file concerned.
        path: String,
        /// What differed.
        what: String,
    },
    /// The archive breaks its format.
    #[error("archive {archive} is damaged or not a tar at byte {offset}{}: {what}; make or fetch it again", in_entry(.entry))]
    Archive {
        /// The archive's path.
        archive: String,
        /// Offset in the uncompressed archive, in bytes.
        offset: u64,
        /// The entry concerned, or empty.
        entry: String,
        /// What was found.
        what: String,
    },
    /// An archive without any entry, such as zeros alone.
    #[error(
        "archive {archive} has no entries; check what made it, or pack it as an empty layer with --allow-empty"
    )]
    EmptyArchive {
        /// The archive's path.
        archive: String,
    },
    /// The archive's bytes cannot be read or decompressed.
    #[error("cannot read archive {archive} at byte {offset} of its contents; {}", if_bytes_are_bad(.source))]
    ArchiveRead {
        /// The archive's path.
        archive: String,
        /// Offset in the uncompressed archive, in bytes.
        offset: u64,
        /// The decompressor's or the system's error.
        source: io::Error,
    },
    /// The system refused to write something.
    #[error("cannot write {path}; check that there is room and that it may be written")]
    Write {
        /// The file concerned.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// A container image's parts do not fit together.
    #[error("the image at {path} cannot be used: {what}")]
    BadImage {
        /// The file concerned.
        path: String,
        /// What was found.
        what: String,
    },
    /// Something that a layer cannot hold.
    #[error("cannot pack {path}: {why}")]
    Unsupported {
        /// The file concerned.
        path: String,
        /// Why, and what to do.
        why: String,
    },
    /// A path in a layer or stack at which there is not what was asked for.
    #[error("cannot read {path} in the layers: {why}")]
    NotThere {
        /// The path.
        path: String,
        /// What is there, or that nothing is.
        why: String,
    },
    /// A limit of [`crate::Limits`] was passed.
    #[error("{object} has more than {limit} {unit}{}", remedy(name))]
    Limit {
        /// The source, or the file concerned.
        object: String,
        /// The limit's field in [`crate::Limits`]; another name for what cannot be raised.
        name: &'static str,
        /// The limit's value.
        limit: u64,
        /// What is counted.
        unit: &'static str,
    },
    /// An option that cannot be.
    #[error("invalid option {option}: {why}")]
    InvalidOption {
        /// The option's name and value.
        option: String,
        /// The rule that it breaks.
        why: String,
    },
    /// Rules forbid to pack something.
    #[error(
        "nothing was packed, since rules forbid it: {paths}; remove what is named in the sandbox, or change the rules"
    )]
    Forbidden {
        /// The rule of the first.
        rule: String,
        /// The first paths, each with its rule.
        paths: String,
    },
    /// The sandbox cannot be halted, or does not go on.
    #[error("cannot halt the sandbox, or let it go on")]
    Halt {
        /// What whoever halts it says.
        source: crate::halt::HaltError,
    },
    /// The filesystem image cannot be made.
    #[error("cannot write the layer's filesystem")]
    Image(#[source] Box<layerpack_erofs::Error>),
    /// The store refused.
    #[error(transparent)]
    Store(Box<StoreError>),
}

/// The remedy when the compressed bytes end early or make no sense, or the system fails.
fn if_bytes_are_bad(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::UnexpectedEof => "the archive is incomplete: fetch or make it again",
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::Other => {
            "if it is damaged, fetch or make it again"
        }
        _ => "check that it may be read and its disk is sound",
    }
}

fn in_entry(entry: &str) -> String {
    if entry.is_empty() {
        String::new()
    } else {
        format!(" (entry {entry})")
    }
}

impl From<StoreError> for PackError {
    fn from(error: StoreError) -> Self {
        Self::Store(Box::new(error))
    }
}

impl From<layerpack_erofs::Error> for PackError {
    fn from(error: layerpack_erofs::Error) -> Self {
        Self::Image(Box::new(error))
    }
}

impl PackError {
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<String>,
        source: impl Into<io::Error>,
    ) -> Self {
        Self::Io {
            action,
            path: path.into(),
            source: source.into(),
        }
    }

    pub(crate) fn source(path: &Path, source: impl Into<io::Error>) -> Self {
        Self::Source {
            path: path.display().to_string(),
            source: source.into(),
        }
    }

    pub(crate) fn unsupported(path: &[u8], why: impl Into<String>) -> Self {
        Self::Unsupported {
            path: crate::show(path),
            why: why.into(),
        }
    }
}

/// A path that a view does not have, or not as a file.
pub(crate) fn not_there(path: &[u8], why: impl Into<String>) -> PackError {
    PackError::NotThere {
        path: crate::show(path),
        why: why.into(),
    }
}

/// How a limit is raised.
fn remedy(limit: &str) -> String {
    match limit {
        "max_apparent" => "; if that is right, raise it with --max-bytes".to_owned(),
        "max_xattr_value" => "; if that is right, raise it with --max-xattr".to_owned(),
        "max_entries" | "max_bytes" | "max_ratio" | "max_path" | "max_depth" => format!(
            "; if that is right, raise it with --{}",
            limit.replace('_', "-")
        ),
        _ => ", which no option raises".to_owned(),
    }
}
