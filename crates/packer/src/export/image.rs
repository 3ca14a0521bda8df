//! OCI layouts and archives for `docker load`.

use std::io::{self, BufWriter, Seek as _, SeekFrom, Write};
use std::path::Path;

use flate2::write::GzEncoder;
use layerpack_store::{Digest, LayerStore, Manifest};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::archive::plain_header;
use super::contents::Contents;
use super::layer::Writing;
use super::{Compression, ExportOptions, ExportReport, persist, temporary, write_error};
use crate::error::{PackError, Result};
use crate::image::config_annotation;
use crate::image::hashing::Sha;
use crate::merge::{self, overlay};
use crate::model::Layer;
use crate::options::Progress;
use crate::warnings::Warnings;

pub(super) const CONFIG_TYPE: &str = "application/vnd.oci.image.config.v1+json";
pub(super) const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
const LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar";
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// Largest index that is added to, in bytes.
const MAX_INDEX: u64 = 4 << 20;

/// Hashes and counts what is written through it.
pub(super) struct Sink<W> {
    inner: W,
    hasher: Sha256,
    bytes: u64,
}

impl<W> Sink<W> {
    pub(super) fn new(inner: W) -> Self {
        Self {
            inner,
            hasher: Sha256::new(),
            bytes: 0,
        }
    }

    /// Digest and number of the bytes.
    pub(super) fn finish(self) -> (Sha, u64) {
        (Sha::from_hasher(self.hasher), self.bytes)
    }
}

impl<W: Write> Write for Sink<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hasher.update(bytes.get(..n).unwrap_or_default());
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// A compressor or none.
pub(super) enum Packer<W: Write> {
    Gzip(GzEncoder<W>),
    Zstd(zstd::stream::write::Encoder<'static, W>),
    Plain(W),
}

impl<W: Write> Packer<W> {
    pub(super) fn new(compression: Compression, out: W) -> io::Result<Self> {
        Ok(match compression {
            // No time and no name in its header.
            Compression::Gzip => Self::Gzip(GzEncoder::new(out, flate2::Compression::new(6))),
            Compression::Zstd => Self::Zstd(zstd::stream::write::Encoder::new(out, 3)?),
            Compression::None => Self::Plain(out),
        })
    }

    pub(super) fn finish(self) -> io::Result<W> {
        match self {
            Self::Gzip(encoder) => encoder.finish(),
            Self::Zstd(encoder) => encoder.finish(),
            Self::Plain(out) => Ok(out),
        }
    }
}

impl<W: Write> Write for Packer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Gzip(encoder) => encoder.write(bytes),
            Self::Zstd(encoder) => encoder.write(bytes),
            Self::Plain(out) => out.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Gzip(encoder) => encoder.flush(),
            Self::Zstd(encoder) => encoder.flush(),
            Self::Plain(out) => out.flush(),
        }
    }
}

/// Goes through the layers of a stack, each with the merge of those below it.
pub(super) struct Layers<'a> {
    store: &'a LayerStore,
    progress: &'a dyn Progress,
    warnings: &'a mut Warnings,
    below: Option<Layer>,
}

impl<'a> Layers<'a> {
    pub(super) fn new(
        store: &'a LayerStore,
        progress: &'a dyn Progress,
        warnings: &'a mut Warnings,
    ) -> Self {
        Self {
            store,
            progress,
            warnings,
            below: None,
        }
    }

    /// Writes the next layer's archive; digest and size of it, uncompressed.
    pub(super) fn next<W: Write>(
        &mut self,
        manifest: &Manifest,
        target: &str,
        out: W,
    ) -> Result<(W, Sha)> {
        let layer = merge::load(self.store, manifest, false)?;
        let mut contents = Contents::new(self.store, [manifest])?;
        let mut sink = Sink::new(out);
        Writing {
            below: self.below.as_ref(),
            image: true,
            target,
            progress: self.progress,
            warnings: self.warnings,
        }
        .write(&layer, &mut contents, &mut sink)?;
        let diff_id = Sha::from_hasher(sink.hasher);
        match &mut self.below {
            Some(below) => overlay::apply(below, &layer)?,
            below @ None => *below = Some(layer),
        }
        Ok((sink.inner, diff_id))
    }
}

/// The image's configuration.
pub(super) fn config(
    options: &ExportOptions,
    stack: &[(Digest, Manifest)],
    diff_ids: &[Sha],
) -> Result<(Vec<u8>, Value)> {
    let named = stack
        .iter()
        .find(|(_, manifest)| !manifest.platform.is_empty());
    let platform = named.map_or(&options.platform, |(_, manifest)| &manifest.platform);
    let mut parts = platform.split('/');
    let os = parts.next().unwrap_or_default();
    let architecture = parts.next().unwrap_or_default();
    let mut described = json!({"os": os, "architecture": architecture});
    if let Some(variant) = parts.next() {
        described
            .as_object_mut()
            .map(|map| map.insert("variant".to_owned(), variant.into()));
    }
    // What containers are run with: the topmost layer that came from an image says it.
    let run = stack
        .iter()
        .rev()
        .find_map(|(_, manifest)| config_annotation(manifest))
        .unwrap_or_else(|| json!({}));
    let history: Vec<Value> = stack
        .iter()
        .map(|(digest, manifest)| {
            json!({"created_by": format!("layerpack {} {digest}", manifest.reference())})
        })
        .collect();
    let ids: Vec<String> = diff_ids.iter().map(ToString::to_string).collect();
    let mut config = described.clone();
    if let Some(map) = config.as_object_mut() {
        map.insert("config".to_owned(), run);
        map.insert(
            "rootfs".to_owned(),
            json!({"type": "layers", "diff_ids": ids}),
        );
        map.insert("history".to_owned(), history.into());
    }
    Ok((to_bytes(&config)?, described))
}

pub(super) fn to_bytes(value: &Value) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| PackError::BadImage {
        path: "the image to be written".to_owned(),
        what: error.to_string(),
    })
}

pub(super) fn top(stack: &[(Digest, Manifest)]) -> Result<&Manifest> {
    stack
        .last()
        .map(|(_, manifest)| manifest)
        .ok_or_else(|| PackError::InvalidOption {
            option: "layers".to_owned(),
            why: "there is none".to_owned(),
        })
}

/// Writes an OCI layout.
pub(super) fn oci(
    store: &LayerStore,
    options: &ExportOptions,
    stack: &[(Digest, Manifest)],
    dir: &Path,
    progress: &dyn Progress,
    warnings: &mut Warnings,
) -> Result<ExportReport> {
    let tag = match &options.name {
        Some(name) => name.clone(),
        None => top(stack)?.version.to_string(),
    };
    let index = open_layout(dir)?;
    let blobs = dir.join("blobs").join("sha256");
    fs_err::create_dir_all(&blobs).map_err(|source| write_error(&blobs, source))?;
    let mut layers = Layers::new(store, progress, warnings);
    let mut total = 0;
    let (mut descriptors, mut diff_ids) = (Vec::new(), Vec::new());
    let media_type = layer_type(options.compression);
    for (_, manifest) in stack {
        let at = blobs.join(manifest.reference().to_string().replace('/', "-"));
        let error = |source| write_error(&at, source);
        let mut file = temporary(&at)?;
        let out = Sink::new(BufWriter::with_capacity(1 << 20, file.as_file_mut()));
        let packer = Packer::new(options.compression, out).map_err(error)?;
        let (packer, diff_id) = layers.next(manifest, &at.display().to_string(), packer)?;
        let mut out = packer.finish().map_err(error)?;
        out.flush().map_err(error)?;
        let (digest, bytes) = out.finish();
        persist(file, &blobs.join(digest.hex()))?;
        total += bytes;
        descriptors.push(json!({
            "mediaType": media_type, "digest": digest.to_string(), "size": bytes,
        }));
        diff_ids.push(diff_id);
    }
    let (config, platform) = config(options, stack, &diff_ids)?;
    total += config.len() as u64;
    let manifest = to_bytes(&json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {
            "mediaType": CONFIG_TYPE,
            "digest": put(&blobs, &config)?.to_string(),
            "size": config.len(),
        },
        "layers": descriptors,
    }))?;
    total += manifest.len() as u64;
    let digest = put(&blobs, &manifest)?;
    let entry = json!({
        "mediaType": MANIFEST_TYPE,
        "digest": digest.to_string(),
        "size": manifest.len(),
        "platform": platform,
        "annotations": {REF_NAME: tag},
    });
    write(
        &dir.join("oci-layout"),
        br#"{"imageLayoutVersion":"1.0.0"}"#,
    )?;
    write(
        &dir.join("index.json"),
        &to_bytes(&with_image(index, &tag, &platform, entry))?,
    )?;
    Ok(ExportReport {
        digest: digest.to_string(),
        name: Some(tag),
        layers: stack.len(),
        bytes: total,
        reused_bytes: 0,
        warnings: Vec::new(),
    })
}

/// The media type of a layer.
pub(super) fn layer_type(compression: Compression) -> String {
    match compression {
        Compression::Gzip => format!("{LAYER_TYPE}+gzip"),
        Compression::Zstd => format!("{LAYER_TYPE}+zstd"),
        Compression::None => LAYER_TYPE.to_owned(),
    }
}

/// The index of a layout that is there, or an empty one for a directory that is new or empty, or that
/// has only blobs, which a first export that failed leaves.
fn open_layout(dir: &Path) -> Result<Value> {
    let empty = json!({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []});
    fs_err::create_dir_all(dir).map_err(|source| write_error(dir, source))?;
    let io = |source| PackError::io("read", dir.display().to_string(), source);
    let mut begun = true;
    for entry in fs_err::read_dir(dir).map_err(io)? {
        begun &= entry.map_err(io)?.file_name() == "blobs";
    }
    if begun {
        return Ok(empty);
    }
    let path = dir.join("index.json");
    let bad = |what: String| PackError::BadImage {
        path: path.display().to_string(),
        what,
    };
    if !dir.join("oci-layout").exists() || !path.exists() {
        let why = "it has files and is no OCI layout; name another directory".to_owned();
        return Err(PackError::BadImage {
            path: dir.display().to_string(),
            what: why,
        });
    }
    if fs_err::metadata(&path).map_err(io)?.len() > MAX_INDEX {
        return Err(bad(format!("it has more than {MAX_INDEX} bytes")));
    }
    let index: Value = serde_json::from_slice(&fs_err::read(&path).map_err(io)?)
        .map_err(|error| bad(error.to_string()))?;
    if index.get("manifests").is_some_and(Value::is_array) {
        Ok(index)
    } else {
        Err(bad("it lists no manifests".to_owned()))
    }
}

/// The index with the image in place of one of the same name and platform.
fn with_image(mut index: Value, tag: &str, platform: &Value, entry: Value) -> Value {
    if let Some(list) = index.get_mut("manifests").and_then(Value::as_array_mut) {
        list.retain(|old| {
            let named = old.get("annotations").and_then(|all| all.get(REF_NAME));
            let same = named.and_then(Value::as_str) == Some(tag);
            let elsewhere = old.get("platform").is_some_and(|other| other != platform);
            !same || elsewhere
        });
        list.push(entry);
    }
    index
}

fn put(blobs: &Path, bytes: &[u8]) -> Result<Sha> {
    let digest = Sha::of(bytes);
    write(&blobs.join(digest.hex()), bytes)?;
    Ok(digest)
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = temporary(path)?;
    file.write_all(bytes)
        .map_err(|source| write_error(path, source))?;
    persist(file, path)
}

/// Writes an archive for `docker load`.
pub(super) fn docker(
    store: &LayerStore,
    options: &ExportOptions,
    stack: &[(Digest, Manifest)],
    path: &Path,
    progress: &dyn Progress,
    warnings: &mut Warnings,
) -> Result<ExportReport> {
    let name = match &options.name {
        Some(name) => name.clone(),
        None => {
            let top = top(stack)?;
            format!("{}:{}", top.name, top.version)
        }
    };
    let error = |source| write_error(path, source);
    let mut layers = Layers::new(store, progress, warnings);
    let mut file = temporary(path)?;
    let mut diff_ids = Vec::new();
    let mut members: Vec<String> = Vec::new();
    let mut end = 0;
    for (_, manifest) in stack {
        let start = end;
        let mut out = BufWriter::with_capacity(1 << 20, file.as_file_mut());
        // Name and size are known afterwards.
        out.write_all(&plain_header("", 0)).map_err(error)?;
        let (mut out, diff_id) =
            layers.next(manifest, &path.display().to_string(), Sink::new(out))?;
        out.flush().map_err(error)?;
        let (_, size) = out.finish();
        let member = format!("{}.tar", diff_id.hex());
        let header = plain_header(&member, size);
        let file = file.as_file_mut();
        file.seek(SeekFrom::Start(start)).map_err(error)?;
        if members.contains(&member) {
            // The same layer again: one copy will do.
            file.set_len(start).map_err(error)?;
        } else {
            file.write_all(&header).map_err(error)?;
            end = start + header.len() as u64 + size;
            file.seek(SeekFrom::Start(end)).map_err(error)?;
        }
        members.push(member);
        diff_ids.push(diff_id);
    }
    let (config, _) = config(options, stack, &diff_ids)?;
    let digest = Sha::of(&config);
    let config_name = format!("{}.json", digest.hex());
    let manifest = to_bytes(&json!([{
        "Config": config_name, "RepoTags": [name], "Layers": members,
    }]))?;
    let mut tail = Vec::new();
    for (name, bytes) in [
        (config_name.as_str(), &config),
        ("manifest.json", &manifest),
    ] {
        tail.extend_from_slice(&plain_header(name, bytes.len() as u64));
        tail.extend_from_slice(bytes);
        tail.resize(tail.len().next_multiple_of(512), 0);
    }
    tail.resize(tail.len() + 1024, 0);
    file.write_all(&tail).map_err(error)?;
    persist(file, path)?;
    Ok(ExportReport {
        digest: digest.to_string(),
        name: Some(name),
        layers: stack.len(),
        bytes: end + tail.len() as u64,
        reused_bytes: 0,
        warnings: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_replaces_only_one_of_its_name_and_platform() {
        let (amd, arm) = (
            json!({"architecture": "amd64"}),
            json!({"architecture": "arm64"}),
        );
        let entry = |tag: &str, platform: &Value, digest: u32| json!({"digest": digest, "platform": platform, "annotations": {REF_NAME: tag}});
        let mut index = json!({"manifests": []});
        for (tag, platform, digest) in [
            ("a", &amd, 1),
            ("a", &arm, 2),
            ("b", &amd, 3),
            ("a", &amd, 4),
        ] {
            index = with_image(index, tag, platform, entry(tag, platform, digest));
        }
        let digests: Vec<u64> = index["manifests"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["digest"].as_u64().unwrap())
            .collect();
        assert_eq!(digests, [2, 3, 4]);
    }
}
