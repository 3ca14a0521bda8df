//! Images in registries.
//!
//! Layers are read as they come and are never in memory as a whole. With a directory for downloads,
//! what has come is also kept there until the import has succeeded: a run that ended early is
//! followed by one that fetches the rest.

use std::io::{self, Read, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err::File;
use layerpack_store::registry::document::{Descriptor as Named, EMPTY};
use layerpack_store::registry::{BlobReader, ManifestName, Registry, RegistryName, Sha256};
use rustix::fs::FlockOperation;

use super::hashing::Sha;
use super::oci::{self, Documents};
use super::spec::{self, Config, Descriptor, Index, Manifest, Platform};
use super::{Blob, Image, Place, parse_json};
use crate::error::{PackError, Result};

/// Largest configuration in bytes.
const MAX_DOCUMENT: u64 = 4 << 20;
/// What has come of a layer that nobody asked for again for so long is deleted.
const STALE: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Documents of one repository.
struct Remote<'a> {
    registry: &'a Registry,
    at: PathBuf,
}

impl Remote<'_> {
    fn bad(&self, what: String) -> PackError {
        PackError::BadImage {
            path: self.at.display().to_string(),
            what,
        }
    }

    fn digest(&self, descriptor: &Descriptor) -> Result<Sha256> {
        descriptor
            .digest
            .parse()
            .map_err(|error| self.bad(format!("{error}")))
    }

    fn path(&self, digest: &Sha256) -> PathBuf {
        let name = self.registry.name();
        PathBuf::from(format!("registry:{name}@{digest}"))
    }
}

impl Documents for Remote<'_> {
    fn manifest(&self, descriptor: &Descriptor) -> Result<(PathBuf, Vec<u8>)> {
        let digest = self.digest(descriptor)?;
        let fetched = self
            .registry
            .manifest(&ManifestName::Digest(digest))?
            .ok_or_else(|| self.bad(format!("its registry lacks the manifest {digest}")))?;
        Ok((self.path(&digest), fetched.bytes))
    }

    fn blob(&self, descriptor: &Descriptor) -> Result<(PathBuf, Vec<u8>)> {
        let digest = self.digest(descriptor)?;
        if descriptor.size > MAX_DOCUMENT {
            let size = descriptor.size;
            return Err(self.bad(format!(
                "its configuration has {size} bytes, at most {MAX_DOCUMENT} are read"
            )));
        }
        let bytes = self
            .registry
            .blob(&digest, descriptor.size)?
            .ok_or_else(|| self.bad(format!("its registry lacks the blob {digest}")))?;
        Ok((self.path(&digest), bytes))
    }
}

/// Finds an image by its tag (default `latest`) or digest, for a platform.
pub(super) fn open(
    registry: &Registry,
    name: &RegistryName,
    wanted: Option<&Platform>,
    host: &Platform,
    downloads: Option<&Path>,
) -> Result<Image> {
    let latest = ManifestName::Tag("latest".to_owned());
    let asked = name.manifest().unwrap_or(&latest);
    let at = PathBuf::from(format!(
        "registry:{}",
        name.clone().with_manifest(Some(asked.clone()))
    ));
    let remote = Remote { registry, at };
    let top = registry.manifest(asked)?.ok_or_else(|| {
        remote.bad("the registry has no such image, or does not show it to this user".to_owned())
    })?;
    let stated: Typed = parse_json(&remote.at, &top.bytes)?;
    let media_type = stated.media_type.unwrap_or(top.media_type);
    let named = Descriptor {
        media_type: media_type.clone(),
        digest: top.digest.to_string(),
        size: top.bytes.len() as u64,
        annotations: Default::default(),
        platform: None,
    };
    let (digest, bytes, path) = if spec::is_index(&media_type) {
        let index: Index = parse_json(&remote.at, &top.bytes)?;
        let mut images = Vec::new();
        oci::collect(&remote, &remote.at, index.manifests, 1, &mut images)?;
        let chosen = oci::choose(&remote.at, images, wanted, host)?;
        let (path, bytes) = remote.manifest(&chosen)?;
        (chosen.digest, bytes, path)
    } else if spec::is_manifest(&media_type) {
        (named.digest, top.bytes, remote.at.clone())
    } else {
        return Err(remote.bad(format!("it is of type {media_type:?}, which is not known")));
    };
    let manifest: Manifest = parse_json(&path, &bytes)?;
    if manifest.config.media_type == EMPTY {
        return Err(remote.bad("it is an artifact and not an image of files".to_owned()));
    }
    let (config_path, config_bytes) = remote.blob(&manifest.config)?;
    let config: Config = parse_json(&config_path, &config_bytes)?;
    // A lone manifest says nothing of its platform; its configuration does.
    if let Some(wanted) = wanted.filter(|wanted| !config.platform().serves(wanted)) {
        return Err(remote.bad(format!(
            "its image is for {}, not for {}",
            config.platform().text(),
            wanted.text()
        )));
    }
    if let Some(dir) = downloads {
        sweep(dir);
    }
    let mut layers = Vec::with_capacity(manifest.layers.len());
    for layer in &manifest.layers {
        if !spec::is_layer(&layer.media_type) {
            let kind = &layer.media_type;
            return Err(remote.bad(format!("a layer is of type {kind:?}, which is not known")));
        }
        let digest = remote.digest(layer)?;
        let stored = Sha::parse(&layer.digest).map_err(|what| remote.bad(what))?;
        layers.push(Blob {
            name: remote.path(&digest),
            place: Place::Registry {
                registry: registry.clone(),
                blob: Named::new(&layer.media_type, digest, layer.size),
                kept: downloads.map(|dir| dir.join(format!("{}.part", digest.hex()))),
            },
            stored: Some((stored, layer.size)),
        });
    }
    Ok(Image {
        at: remote.at,
        config,
        layers,
        digest: Some(digest),
    })
}

/// The type that a document states itself.
#[derive(serde::Deserialize)]
struct Typed {
    #[serde(rename = "mediaType", default)]
    media_type: Option<String>,
}

/// The bytes of a layer.
pub(super) fn read(registry: &Registry, blob: &Named, kept: Option<&Path>) -> Box<dyn Read + Send> {
    let remote = registry.blob_reader(blob.digest, blob.size);
    match kept.and_then(|path| Kept::open(path, blob.size)) {
        Some((file, had)) => Box::new(Resumed {
            remote,
            kept: Some(file),
            left: had,
        }),
        None => Box::new(remote),
    }
}

/// Deletes what was kept of an image's layers.
pub(super) fn forget(image: &Image) {
    for blob in &image.layers {
        if let Place::Registry {
            kept: Some(path), ..
        } = &blob.place
        {
            // Whatever hinders it: it is swept later.
            let _ = fs_err::remove_file(path);
        }
    }
}

fn sweep(dir: &Path) {
    let Ok(entries) = fs_err::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let stale = path.extension().is_some_and(|end| end == "part")
            && entry
                .metadata()
                .and_then(|metadata| metadata.modified())
                .is_ok_and(|at| at.elapsed().is_ok_and(|age| age > STALE));
        if stale {
            let _ = fs_err::remove_file(path);
        }
    }
}

/// The file that keeps what has come of a layer.
struct Kept {
    file: File,
    path: PathBuf,
}

impl Kept {
    /// The file and how many bytes it has; `None` where it cannot be used, as when another process
    /// uses it: then nothing is kept.
    fn open(path: &Path, size: u64) -> Option<(Self, u64)> {
        fs_err::create_dir_all(path.parent()?).ok()?;
        let file = fs_err::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .ok()?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
        let mut had = file.metadata().ok()?.len();
        if had > size {
            file.set_len(0).ok()?;
            had = 0;
        }
        let path = path.to_owned();
        Some((Self { file, path }, had))
    }
}

/// A layer whose beginning came earlier.
struct Resumed {
    remote: BlobReader,
    kept: Option<Kept>,
    /// Bytes of the file that are still to be read.
    left: u64,
}

impl Resumed {
    fn read_kept(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let Some(kept) = &mut self.kept else {
            return Ok(0);
        };
        let room = usize::try_from(self.left)
            .unwrap_or(usize::MAX)
            .min(out.len());
        let part = out.get_mut(..room).unwrap_or_default();
        let n = kept.file.read(part)?;
        if n == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("{} became shorter", kept.path.display()),
            ));
        }
        self.remote.had(part.get(..n).unwrap_or_default());
        self.left -= n as u64;
        if self.left == 0 {
            let end = kept.file.stream_position()?;
            kept.file.seek(SeekFrom::Start(end))?;
        }
        Ok(n)
    }
}

impl Read for Resumed {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.left > 0 && !out.is_empty() {
            return self.read_kept(out);
        }
        let n = match self.remote.read(out) {
            Ok(n) => n,
            Err(error) => {
                // What was kept may be what is wrong.
                if error.kind() == io::ErrorKind::InvalidData
                    && let Some(kept) = self.kept.take()
                {
                    let _ = kept.file.set_len(0);
                }
                return Err(error);
            }
        };
        if let Some(kept) = &mut self.kept
            && kept
                .file
                .write_all(out.get(..n).unwrap_or_default())
                .is_err()
        {
            // A full disk is no reason to fail: it is only kept for next time. Half a piece is
            // cut off by the digest then.
            self.kept = None;
        }
        Ok(n)
    }
}
