//! Container images as sources: OCI layouts, archives of `docker save`, registries.
//!
//! The layers of an image are read in order, each above the merge of those below it, so that
//! paths lead through their symbolic links, hard links find their files and directories that a
//! layer only passes through keep what they are. The result is one layer of everything, or one
//! layer for each of the image's.
//!
//! Every digest is checked: of documents before they are believed, of layers while they are read
//! and before anything is published.

mod archive;
pub(crate) mod hashing;
mod import;
mod oci;
mod registry;
mod spec;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use hashing::Sha;
pub(crate) use import::{CONFIG, config_annotation};
pub use import::{ImportOptions, ImportReport, import, import_split};
use layerpack_store::registry::document::Descriptor;
use layerpack_store::registry::{NotRegistryName, Registry, RegistryName};

use crate::error::{PackError, Result};

/// Where an image comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageSource {
    /// An OCI image layout.
    Oci {
        /// Its directory.
        dir: PathBuf,
        /// Which image, by its `org.opencontainers.image.ref.name`; None: the only one.
        tag: Option<String>,
    },
    /// An archive of `docker save`, plain or compressed.
    DockerArchive {
        /// Its file.
        file: PathBuf,
        /// Which image, by one of its `RepoTags`; None: the only one.
        name: Option<String>,
    },
    /// An image of a registry, by tag (default: `latest`) or digest.
    Registry(RegistryName),
}

impl ImageSource {
    /// Whether a source's text is one of an image: `oci:DIR[:TAG]`, `docker-archive:FILE[:NAME]` or
    /// `registry:HOST/REPOSITORY[:TAG]`.
    #[must_use]
    pub fn is_image(text: &str) -> bool {
        ["oci:", "docker-archive:", "registry:"]
            .iter()
            .any(|scheme| text.starts_with(scheme))
    }
}

impl FromStr for ImageSource {
    type Err = PackError;

    /// A path may hold colons: where all of the text names something, it is the path; else the
    /// shortest beginning that does, with the rest as tag or name.
    fn from_str(text: &str) -> Result<Self> {
        let invalid = |why| PackError::InvalidSource {
            text: text.chars().take(300).collect(),
            why,
        };
        let (scheme, rest) = text
            .split_once(':')
            .ok_or_else(|| invalid("it has no scheme"))?;
        if rest.is_empty() {
            return Err(invalid("its path is empty"));
        }
        if scheme == "registry" {
            let name = rest.parse().map_err(|e: NotRegistryName| invalid(e.why))?;
            return Ok(Self::Registry(name));
        }
        let cuts = rest.match_indices(':').map(|(at, _)| at);
        let cut = cuts
            .filter(|at| *at > 0 && !Path::new(rest).exists())
            .find(|at| rest.get(..*at).is_some_and(|path| Path::new(path).exists()));
        let (path, name) = match cut.and_then(|at| rest.split_at_checked(at)) {
            Some((path, name)) => (path, name.strip_prefix(':').map(str::to_owned)),
            None => (rest, None),
        };
        if name.as_deref() == Some("") {
            return Err(invalid("the image's name is empty"));
        }
        match scheme {
            "oci" => Ok(Self::Oci {
                dir: PathBuf::from(path),
                tag: name,
            }),
            "docker-archive" => Ok(Self::DockerArchive {
                file: PathBuf::from(path),
                name,
            }),
            _ => Err(invalid("its scheme is not known")),
        }
    }
}

/// An image that was found.
struct Image {
    /// The file that describes it.
    at: PathBuf,
    config: spec::Config,
    layers: Vec<Blob>,
    /// Digest of its manifest, if it has one.
    digest: Option<String>,
}

/// A layer of an image as it is stored.
struct Blob {
    /// For messages.
    name: PathBuf,
    place: Place,
    /// Digest and size of what is stored, if the image says so.
    stored: Option<(Sha, u64)>,
}

enum Place {
    File(PathBuf),
    Member {
        archive: PathBuf,
        plain: bool,
        offset: u64,
        size: u64,
    },
    Registry {
        registry: Registry,
        blob: Descriptor,
        /// File that keeps what has come of it.
        kept: Option<PathBuf>,
    },
}

impl Blob {
    /// Whether what is stored is known to be for lazy readers before it is read.
    fn is_lazy(&self) -> bool {
        match &self.place {
            Place::File(path) => crate::tar::is_lazy_file(path),
            // Its end tells, when it comes.
            Place::Member { .. } | Place::Registry { .. } => false,
        }
    }

    /// The stored bytes.
    fn open(&self) -> Result<Box<dyn Read + Send>> {
        match &self.place {
            Place::File(path) => Ok(Box::new(open_regular(path)?)),
            Place::Member {
                archive,
                plain,
                offset,
                size,
            } => archive::member(archive, *plain, *offset, *size),
            Place::Registry {
                registry,
                blob,
                kept,
            } => Ok(registry::read(registry, blob, kept.as_deref())),
        }
    }
}

fn parse_json<T: serde::de::DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| PackError::BadImage {
        path: path.display().to_string(),
        what: error.to_string(),
    })
}

/// Opens a file of an image. Anything but a regular file is refused: a pipe would have the build
/// wait for whoever writes to it.
fn open_regular(path: &Path) -> Result<fs_err::File> {
    let io = |source| PackError::source(path, source);
    let flags = rustix::fs::OFlags::NONBLOCK.bits();
    let file = fs_err::OpenOptions::new()
        .read(true)
        .custom_flags(flags.cast_signed())
        .open(path)
        .map_err(io)?;
    if !file.metadata().map_err(io)?.is_file() {
        return Err(PackError::BadImage {
            path: path.display().to_string(),
            what: "it is not a regular file".to_owned(),
        });
    }
    Ok(file)
}
