//! Layers as archives and container images for other tools.
//!
//! A stack becomes an image with one layer for each of its own, in an OCI layout, a registry or an
//! archive that `docker load` takes, or one plain archive of what the stack shows. Same layers, same
//! bytes. Results appear under their names when they are whole.

mod archive;
mod contents;
mod flatten;
mod image;
mod layer;
mod registry;

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use layerpack_store::registry::{ManifestName, NotRegistryName, RegistryName, RegistryOptions};
use layerpack_store::{Digest, LayerStore, Manifest};
use tempfile::NamedTempFile;

pub use self::flatten::{FlattenOptions, FlattenReport, flatten};

pub(crate) use self::contents::Contents;
use self::layer::Writing;
use crate::error::{PackError, Result};
use crate::merge;
use crate::options::Progress;
use crate::warnings::Warnings;

/// Where layers go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExportTarget {
    /// One tar archive of what the stack shows. An existing file is replaced; a pipe or a device
    /// is written to, and gets a part of the archive if that fails.
    Tar(PathBuf),
    /// An OCI image layout; other images that the directory has stay in it.
    Oci(PathBuf),
    /// An archive as `docker save` writes and `docker load` reads. An existing file is replaced.
    DockerArchive(PathBuf),
    /// An image in a registry, with the name's tag.
    Registry(RegistryName),
}

impl FromStr for ExportTarget {
    type Err = PackError;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = |why: &str| PackError::InvalidOption {
            option: format!("target {:?}", text.chars().take(300).collect::<String>()),
            why: format!(
                "{why}; expected tar:FILE, oci:DIR, docker-archive:FILE or registry:HOST/REPOSITORY[:TAG]"
            ),
        };
        match text.split_once(':') {
            None => Err(invalid("it has no scheme")),
            Some((_, "")) => Err(invalid("its path is empty")),
            // As a file's name it would surprise; for standard output there is `export_tar`.
            Some((_, "-")) => Err(invalid("- is no file; ./- is one")),
            Some(("tar", path)) => Ok(Self::Tar(PathBuf::from(path))),
            Some(("oci", path)) => Ok(Self::Oci(PathBuf::from(path))),
            Some(("docker-archive", path)) => Ok(Self::DockerArchive(PathBuf::from(path))),
            Some(("registry", name)) => {
                let name: RegistryName =
                    name.parse().map_err(|e: NotRegistryName| invalid(e.why))?;
                match name.manifest() {
                    Some(ManifestName::Digest(_)) => Err(invalid(
                        "what is written cannot have a digest that is given before",
                    )),
                    _ => Ok(Self::Registry(name)),
                }
            }
            Some(_) => Err(invalid("its scheme is not known")),
        }
    }
}

/// How layers of an OCI layout or in a registry are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    /// gzip, which every tool reads.
    #[default]
    Gzip,
    /// zstd: faster and smaller; docker from 23, podman, containerd.
    Zstd,
    /// Not at all.
    None,
}

/// Which layers to export, to what.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ExportOptions {
    /// Digests of the stack's manifests, bottom first.
    pub layers: Vec<Digest>,
    /// Where they go.
    pub target: ExportTarget,
    /// The image's name: the tag in an OCI layout or registry (default: the topmost layer's
    /// version), or `NAME:TAG` in an archive (default: the topmost layer's name and version).
    pub name: Option<String>,
    /// The platform of an image whose layers name none.
    pub platform: String,
    /// How layers of an OCI layout or in a registry are compressed.
    pub compression: Compression,
    /// How a registry is spoken to.
    pub registry: RegistryOptions,
    /// Repositories of the same registry that may have layers, which are then not sent.
    pub mount_from: Vec<RegistryName>,
}

impl ExportOptions {
    /// Options with everything at its default.
    #[must_use]
    pub fn new(layers: Vec<Digest>, target: ExportTarget) -> Self {
        Self {
            layers,
            target,
            name: None,
            platform: "linux/amd64".to_owned(),
            compression: Compression::default(),
            registry: RegistryOptions::default(),
            mount_from: Vec::new(),
        }
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportReport {
    /// Digest of the image's manifest in an OCI layout or registry, of its configuration in an
    /// archive, of the whole file for a plain archive: `sha256:` and 64 digits.
    pub digest: String,
    /// The image's name; None for a plain archive.
    pub name: Option<String>,
    /// Layers written.
    pub layers: usize,
    /// Bytes of the archive, or of the image's layers and documents.
    pub bytes: u64,
    /// Bytes that were not sent, since the registry had them.
    pub reused_bytes: u64,
    /// What was left out, in words.
    pub warnings: Vec<String>,
}

/// Exports a stack.
///
/// # Errors
/// [`PackError::Unsupported`] for what the target's format cannot hold, [`PackError::Write`],
/// [`PackError::Store`]. What was there before stays as it was; blobs that an OCI layout got and
/// its index does not name may stay.
pub fn export(
    store: &LayerStore,
    options: &ExportOptions,
    progress: &dyn Progress,
) -> Result<ExportReport> {
    progress.phase("export");
    let stack = manifests(store, &options.layers, "export")?;
    let mut warnings = Warnings::default();
    let mut report = match &options.target {
        ExportTarget::Tar(path) => flat(store, &stack, path, progress, &mut warnings)?,
        ExportTarget::Oci(dir) => image::oci(store, options, &stack, dir, progress, &mut warnings)?,
        ExportTarget::DockerArchive(path) => {
            image::docker(store, options, &stack, path, progress, &mut warnings)?
        }
        ExportTarget::Registry(name) => {
            registry::push(store, options, &stack, name, progress, &mut warnings)?
        }
    };
    report.warnings = warnings.into_vec();
    Ok(report)
}

/// The manifests of a stack; `verb` is what is done with it.
fn manifests(store: &LayerStore, layers: &[Digest], verb: &str) -> Result<Vec<(Digest, Manifest)>> {
    if layers.is_empty() {
        return Err(PackError::InvalidOption {
            option: "layers".to_owned(),
            why: format!("there is nothing to {verb}; name at least one layer"),
        });
    }
    let mut stack = Vec::with_capacity(layers.len());
    for digest in layers {
        stack.push((*digest, store.manifest(digest)?));
    }
    Ok(stack)
}

/// Writes one archive of what a stack shows (`layers`: manifests, bottom first) to a stream that
/// `target` names in errors. What was written when an error comes is a part of an archive.
///
/// # Errors
/// As [`export`].
pub fn export_tar(
    store: &LayerStore,
    layers: &[Digest],
    target: &str,
    out: &mut dyn Write,
    progress: &dyn Progress,
) -> Result<ExportReport> {
    progress.phase("export");
    let stack = manifests(store, layers, "export")?;
    let mut warnings = Warnings::default();
    let mut report = stream(store, &stack, target, out, progress, &mut warnings)?;
    report.warnings = warnings.into_vec();
    Ok(report)
}

/// One archive of what the stack shows.
fn flat(
    store: &LayerStore,
    stack: &[(Digest, Manifest)],
    path: &Path,
    progress: &dyn Progress,
    warnings: &mut Warnings,
) -> Result<ExportReport> {
    let target = path.display().to_string();
    let error = |source| write_error(path, source);
    if is_special(path) {
        let mut file = fs_err::OpenOptions::new()
            .write(true)
            .open(path)
            .map_err(error)?;
        return stream(store, stack, &target, &mut file, progress, warnings);
    }
    let mut file = temporary(path)?;
    let report = stream(
        store,
        stack,
        &target,
        file.as_file_mut(),
        progress,
        warnings,
    )?;
    persist(file, path)?;
    Ok(report)
}

fn stream(
    store: &LayerStore,
    stack: &[(Digest, Manifest)],
    target: &str,
    out: &mut dyn Write,
    progress: &dyn Progress,
    warnings: &mut Warnings,
) -> Result<ExportReport> {
    let mut merged = merge::stack(store, stack, true, warnings)?;
    merge::overlay::bottom(&mut merged)?;
    let mut contents = Contents::new(store, stack.iter().map(|(_, manifest)| manifest))?;
    let mut out = image::Sink::new(BufWriter::with_capacity(1 << 20, out));
    Writing {
        below: None,
        image: false,
        target,
        progress,
        warnings,
    }
    .write(&merged, &mut contents, &mut out)?;
    out.flush()
        .map_err(|source| write_error(Path::new(target), source))?;
    let (digest, bytes) = out.finish();
    Ok(ExportReport {
        digest: digest.to_string(),
        name: None,
        layers: stack.len(),
        bytes,
        reused_bytes: 0,
        warnings: Vec::new(),
    })
}

/// Whether something that is no regular file has this name: a pipe, a device, a directory.
fn is_special(path: &Path) -> bool {
    fs_err::metadata(path).is_ok_and(|there| !there.is_file())
}

/// Where a file is, if a symbolic link leads to it.
fn behind(path: &Path) -> PathBuf {
    fs_err::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Writes the topmost layer of a stack (digests of manifests, bottom first) to the file `path` as a
/// layer of an image: a plain archive with whiteouts, for tools that put it on the others.
///
/// # Errors
/// As [`export`].
pub fn export_layer(
    store: &LayerStore,
    stack: &[Digest],
    path: &Path,
    progress: &dyn Progress,
) -> Result<ExportReport> {
    progress.phase("export");
    let manifests = manifests(store, stack, "export")?;
    let Some((top, below)) = manifests.split_last() else {
        return Err(PackError::InvalidOption {
            option: "layers".to_owned(),
            why: "there is nothing to export; name a layer".to_owned(),
        });
    };
    let mut warnings = Warnings::default();
    let merged = match below.is_empty() {
        true => None,
        false => {
            let mut merged = merge::stack(store, below, true, &mut warnings)?;
            merge::overlay::bottom(&mut merged)?;
            Some(merged)
        }
    };
    let layer = merge::load(store, &top.1, false)?;
    let mut contents = Contents::new(store, [&top.1])?;
    let target = path.display().to_string();
    let mut file = temporary(path)?;
    let mut out = image::Sink::new(BufWriter::with_capacity(1 << 20, file.as_file_mut()));
    Writing {
        below: merged.as_ref(),
        image: true,
        target: &target,
        progress,
        warnings: &mut warnings,
    }
    .write(&layer, &mut contents, &mut out)?;
    out.flush().map_err(|source| write_error(path, source))?;
    let (digest, bytes) = out.finish();
    persist(file, path)?;
    Ok(ExportReport {
        digest: digest.to_string(),
        name: None,
        layers: 1,
        bytes,
        reused_bytes: 0,
        warnings: warnings.into_vec(),
    })
}

/// A file next to `path`, gone unless it is persisted.
fn temporary(path: &Path) -> Result<NamedTempFile> {
    if is_special(path) {
        return Err(PackError::InvalidOption {
            option: format!("target {}", path.display()),
            why: "it exists and is no regular file, which alone can be replaced".to_owned(),
        });
    }
    let path = &behind(path);
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    NamedTempFile::with_prefix_in(".layerpack-", dir).map_err(|source| write_error(path, source))
}

/// Gives a temporary file its name, when its bytes are on disk.
fn persist(file: NamedTempFile, path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let path = &behind(path);
    let error = |source| write_error(path, source);
    file.as_file()
        .set_permissions(std::fs::Permissions::from_mode(0o644))
        .map_err(error)?;
    file.as_file().sync_all().map_err(error)?;
    file.persist(path).map_err(|failed| error(failed.error))?;
    Ok(())
}

fn write_error(path: &Path, source: std::io::Error) -> PackError {
    PackError::Write {
        path: path.display().to_string(),
        source,
    }
}
