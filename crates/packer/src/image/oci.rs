//! OCI image layouts: a directory with `oci-layout`, `index.json` and `blobs/sha256/`.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::hashing::Sha;
use super::spec::{self, Config, Descriptor, Index, LayoutFile, Manifest, Platform, REF_NAME};
use super::{Blob, Image, Place, parse_json};
use crate::error::{PackError, Result};

/// Largest JSON document in bytes.
const MAX_DOCUMENT: u64 = 4 << 20;
/// Indexes within indexes.
const MAX_NESTED: usize = 4;
/// Images of one layout.
const MAX_IMAGES: usize = 10_000;

/// Where the documents of an image are. What comes has been checked against its descriptor.
pub(super) trait Documents {
    /// A manifest or index, and its name for messages.
    fn manifest(&self, descriptor: &Descriptor) -> Result<(PathBuf, Vec<u8>)>;
    /// A configuration.
    fn blob(&self, descriptor: &Descriptor) -> Result<(PathBuf, Vec<u8>)>;
}

impl Documents for &Path {
    fn manifest(&self, descriptor: &Descriptor) -> Result<(PathBuf, Vec<u8>)> {
        blob_document(self, descriptor)
    }

    fn blob(&self, descriptor: &Descriptor) -> Result<(PathBuf, Vec<u8>)> {
        blob_document(self, descriptor)
    }
}

/// Finds the image called `tag`, or the only one, for a platform.
pub(super) fn open(
    dir: &Path,
    tag: Option<&str>,
    wanted: Option<&Platform>,
    host: &Platform,
) -> Result<Image> {
    let layout: LayoutFile =
        parse_json(&dir.join("oci-layout"), &document(&dir.join("oci-layout"))?)?;
    if !layout.version.starts_with("1.") {
        let what = format!("its version is {:?}, known is 1.0.0", layout.version);
        return Err(bad(&dir.join("oci-layout"), what));
    }
    let at = dir.join("index.json");
    let index: Index = parse_json(&at, &document(&at)?)?;
    let named = by_tag(&at, index.manifests, tag)?;
    let mut images = Vec::new();
    collect(&dir, &at, named, 0, &mut images)?;
    let descriptor = choose(&at, images, wanted, host)?;
    let (path, bytes) = blob_document(dir, &descriptor)?;
    let manifest: Manifest = parse_json(&path, &bytes)?;
    let (config_path, config_bytes) = blob_document(dir, &manifest.config)?;
    let config: Config = parse_json(&config_path, &config_bytes)?;
    let mut layers = Vec::with_capacity(manifest.layers.len());
    for layer in &manifest.layers {
        if !spec::is_layer(&layer.media_type) {
            let what = format!(
                "a layer is of type {:?}, which is not known",
                layer.media_type
            );
            return Err(bad(&path, what));
        }
        let digest = Sha::parse(&layer.digest).map_err(|what| bad(&path, what))?;
        layers.push(Blob {
            name: blob_path(dir, &digest),
            place: Place::File(blob_path(dir, &digest)),
            stored: Some((digest, layer.size)),
        });
    }
    Ok(Image {
        at: path,
        config,
        layers,
        digest: Some(descriptor.digest),
    })
}

/// The entries of `index.json` that a tag names.
fn by_tag(at: &Path, all: Vec<Descriptor>, tag: Option<&str>) -> Result<Vec<Descriptor>> {
    let name = |descriptor: &Descriptor| descriptor.annotations.get(REF_NAME).cloned();
    let mut names: Vec<String> = all.iter().filter_map(name).collect();
    names.sort();
    names.dedup();
    let listed = names.join(", ");
    match tag {
        Some(tag) => {
            let found: Vec<Descriptor> = all
                .into_iter()
                .filter(|descriptor| name(descriptor).as_deref() == Some(tag))
                .collect();
            if found.is_empty() {
                let what = format!("it has no image {tag:?}; it has: {listed}");
                return Err(bad(at, what));
            }
            Ok(found)
        }
        None if names.len() > 1 => {
            let what = format!("it has several images; name one as oci:DIR:TAG: {listed}");
            Err(bad(at, what))
        }
        None => Ok(all),
    }
}

/// Follows indexes down to manifests.
pub(super) fn collect(
    documents: &dyn Documents,
    at: &Path,
    descriptors: Vec<Descriptor>,
    depth: usize,
    images: &mut Vec<Descriptor>,
) -> Result<()> {
    for mut descriptor in descriptors {
        if spec::is_index(&descriptor.media_type) {
            if depth >= MAX_NESTED {
                return Err(bad(
                    at,
                    format!("its indexes are more than {MAX_NESTED} deep"),
                ));
            }
            let (path, bytes) = documents.manifest(&descriptor)?;
            let index: Index = parse_json(&path, &bytes)?;
            collect(documents, at, index.manifests, depth + 1, images)?;
        } else if spec::is_manifest(&descriptor.media_type) {
            if images.len() >= MAX_IMAGES {
                return Err(bad(at, format!("it has more than {MAX_IMAGES} images")));
            }
            if descriptor.platform.is_none() {
                descriptor.platform = platform_of(documents, &descriptor)?;
            }
            images.push(descriptor);
        }
    }
    Ok(())
}

/// The platform that an image's own configuration names, if it is an image at all.
fn platform_of(documents: &dyn Documents, descriptor: &Descriptor) -> Result<Option<Platform>> {
    let (path, bytes) = documents.manifest(descriptor)?;
    let manifest: Manifest = parse_json(&path, &bytes)?;
    let (path, bytes) = documents.blob(&manifest.config)?;
    // An artifact's configuration may be anything.
    Ok(parse_json::<Config>(&path, &bytes)
        .ok()
        .map(|config| config.platform()))
}

pub(super) fn choose(
    at: &Path,
    images: Vec<Descriptor>,
    wanted: Option<&Platform>,
    host: &Platform,
) -> Result<Descriptor> {
    // Attestations are listed as images for no platform.
    let mut images: Vec<Descriptor> = images
        .into_iter()
        .filter(|image| {
            image
                .platform
                .as_ref()
                .is_none_or(|platform| platform.os != "unknown")
        })
        .collect();
    let listed: Vec<String> = images
        .iter()
        .filter_map(|image| image.platform.as_ref().map(Platform::text))
        .collect();
    let only_one = images.len() == 1;
    let first = |wanted: &Platform| {
        images
            .iter()
            .position(|image| image.platform.as_ref().is_some_and(|p| p.serves(wanted)))
    };
    let position = match wanted {
        Some(wanted) => first(wanted),
        None if only_one => Some(0),
        None => first(host),
    };
    match position {
        Some(position) => Ok(images.swap_remove(position)),
        None if listed.is_empty() => Err(bad(at, "it has no image".to_owned())),
        None => {
            let what = format!(
                "it has no image for {}; it has: {}",
                wanted.unwrap_or(host).text(),
                listed.join(", ")
            );
            Err(bad(at, what))
        }
    }
}

fn blob_path(dir: &Path, digest: &Sha) -> PathBuf {
    dir.join("blobs").join("sha256").join(digest.hex())
}

/// A small blob, verified.
fn blob_document(dir: &Path, descriptor: &Descriptor) -> Result<(PathBuf, Vec<u8>)> {
    let digest =
        Sha::parse(&descriptor.digest).map_err(|what| bad(&dir.join("index.json"), what))?;
    let path = blob_path(dir, &digest);
    let bytes = document(&path)?;
    if bytes.len() as u64 != descriptor.size || Sha::of(&bytes) != digest {
        let what = format!(
            "it has {} bytes with the digest {}, the image says {} and {digest}",
            bytes.len(),
            Sha::of(&bytes),
            descriptor.size
        );
        return Err(bad(&path, what));
    }
    Ok((path, bytes))
}

/// A JSON document's bytes, bounded.
fn document(path: &Path) -> Result<Vec<u8>> {
    let io = |source| PackError::io("read", path.display().to_string(), source);
    let mut bytes = Vec::new();
    let file = super::open_regular(path)?;
    file.take(MAX_DOCUMENT + 1)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    if bytes.len() as u64 > MAX_DOCUMENT {
        return Err(bad(path, format!("it has more than {MAX_DOCUMENT} bytes")));
    }
    Ok(bytes)
}

fn bad(path: &Path, what: String) -> PackError {
    PackError::BadImage {
        path: path.display().to_string(),
        what,
    }
}
