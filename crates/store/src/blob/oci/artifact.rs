//! Objects as artifacts: which manifest stands for an object, and what it lists (FORMAT.md,
//! "Registries").

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

use crate::error::StoreError;
use crate::key::Key;
use crate::registry::document::{Descriptor, Manifest, TITLE};
use crate::registry::{Fetched, Sha256};

/// The kind of artifact that an object is.
const OBJECT: &str = "application/vnd.layerpack.object.v1";
/// The kind of artifact that a published layer is: a reference with all that it reaches.
const LAYER: &str = "application/vnd.layerpack.layer.v1";
/// Annotation with an object's key.
const KEY: &str = "layerpack.key";
/// Annotation that makes manifests of objects that are replaced unlike each other.
const NONCE: &str = "layerpack.nonce";
/// Annotation with the time when an object that may change was written, by the registry's clock,
/// in seconds since 1970.
const WRITTEN: &str = "layerpack.written";
/// Largest object that is also in its manifest, in bytes.
pub(super) const MAX_INLINE: u64 = 4 << 10;
/// Most parts of a layer that its manifest lists, so that it stays below 4 MiB.
pub(super) const MAX_PARTS: usize = 8000;

/// An object as its manifest describes it.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// Digest and size of the manifest; `None` if the object is known as a part of a layer only.
    pub manifest: Option<(Sha256, u64)>,
    /// Its bytes.
    pub blob: Descriptor,
    /// For a reference: what it reaches.
    pub parts: Vec<Descriptor>,
    /// When it was written, by the registry's clock.
    pub written: Option<SystemTime>,
}

/// The media type of an object's bytes.
fn media_type(key: &Key) -> String {
    let family = key.as_str().split('/').next().unwrap_or_default();
    match family {
        "refs" => "application/vnd.layerpack.reference.v1+json".to_owned(),
        "manifests" => "application/vnd.layerpack.manifest.v1+json".to_owned(),
        "meta" | "maps" => {
            format!(
                "application/vnd.layerpack.{}.v1.zstd",
                family.trim_end_matches('s')
            )
        }
        "locators" | "packs" => {
            format!(
                "application/vnd.layerpack.{}.v1",
                family.trim_end_matches('s')
            )
        }
        "index" => "application/vnd.layerpack.index.v1".to_owned(),
        _ => "application/octet-stream".to_owned(),
    }
}

/// Describes an object's bytes.
pub(super) fn describe(key: &Key, digest: Sha256, size: u64) -> Descriptor {
    let mut blob = Descriptor::new(&media_type(key), digest, size);
    // Tools that write an artifact's blobs as files make a directory store of it.
    blob.annotations.insert(TITLE.to_owned(), key.to_string());
    blob
}

/// The same with the bytes themselves.
pub(super) fn inline(mut blob: Descriptor, bytes: &[u8]) -> Descriptor {
    if bytes.len() as u64 <= MAX_INLINE {
        blob.data = Some(BASE64_STANDARD.encode(bytes));
    }
    blob
}

/// The bytes that a descriptor holds, if they are the right ones.
pub(super) fn inlined(blob: &Descriptor) -> Option<Vec<u8>> {
    let text = blob.data.as_ref()?;
    if text.len() as u64 > MAX_INLINE * 2 {
        return None;
    }
    let bytes = BASE64_STANDARD.decode(text).ok()?;
    (Sha256::of(&bytes) == blob.digest && bytes.len() as u64 == blob.size).then_some(bytes)
}

/// The manifest of an object.
pub(super) fn manifest(
    key: &Key,
    blob: Descriptor,
    parts: Vec<Descriptor>,
    nonce: Option<u64>,
    written: Option<SystemTime>,
) -> Manifest {
    let kind = if parts.is_empty() { OBJECT } else { LAYER };
    let mut layers = vec![blob];
    layers.extend(parts);
    let mut manifest = Manifest::artifact(kind, layers);
    manifest.annotations.insert(KEY.to_owned(), key.to_string());
    if let Some(nonce) = nonce {
        manifest
            .annotations
            .insert(NONCE.to_owned(), format!("{nonce:016x}"));
    }
    if let Some(age) = written.and_then(|at| at.duration_since(UNIX_EPOCH).ok()) {
        manifest
            .annotations
            .insert(WRITTEN.to_owned(), age.as_secs().to_string());
    }
    manifest
}

/// The key that a part of a layer has.
pub(super) fn key_of(part: &Descriptor) -> Option<Key> {
    Key::new(part.annotations.get(TITLE)?).ok()
}

/// What a manifest says; `None` if it is not of ours.
pub(super) fn read(fetched: &Fetched) -> Option<(Key, Entry)> {
    let manifest: Manifest = serde_json::from_slice(&fetched.bytes).ok()?;
    let ours = matches!(manifest.artifact_type.as_deref(), Some(OBJECT | LAYER));
    // Tools that copy an artifact keep its manifest, or write its known fields anew: what is
    // needed is in fields that all of them know.
    let key = manifest.annotations.get(KEY)?;
    let written = manifest
        .annotations
        .get(WRITTEN)
        .and_then(|seconds| seconds.parse().ok())
        .and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds)));
    let mut layers = manifest.layers.into_iter();
    let blob = layers.next()?;
    if !ours && blob.annotations.get(TITLE) != Some(key) {
        return None;
    }
    let entry = Entry {
        manifest: Some((fetched.digest, fetched.bytes.len() as u64)),
        blob,
        parts: layers.collect(),
        written,
    };
    Some((Key::new(key).ok()?, entry))
}

/// Names the object in an error that names its blob or manifest.
pub(super) fn named(error: StoreError, object: &str) -> StoreError {
    let mut error = error;
    match &mut error {
        StoreError::Missing { key, .. }
        | StoreError::Corrupt { key, .. }
        | StoreError::TooLarge { key, .. }
        | StoreError::NoSpace { key, .. }
        | StoreError::Io { key, .. }
        | StoreError::TimedOut { key, .. }
        | StoreError::Throttled { key, .. }
        | StoreError::Denied { key, .. } => {
            key.clear();
            key.push_str(object);
        }
        _ => {}
    }
    error
}
