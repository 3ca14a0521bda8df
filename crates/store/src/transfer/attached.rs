//! What belongs to a layer without being part of it: signatures of its manifest and access
//! profiles of environments that it is the top of. They are small objects that go along.

use crate::blob::{PutMode, PutOutcome};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::layer::LayerStore;
use crate::manifest::Manifest;

/// Largest signature in bytes.
const MAX_SIGNATURE: u64 = 64 << 10;
/// Largest profile in bytes.
const MAX_PROFILE: u64 = crate::profile::MAX_PROFILE_BYTES;
/// Objects of a family that go along with one layer.
const MAX_OBJECTS: usize = 1024;

/// What was copied.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Attached {
    pub(super) objects: u64,
    pub(super) bytes: u64,
}

/// Bytes of what goes along with a layer.
pub(super) fn size(source: &LayerStore, digest: &Digest, manifest: &Manifest) -> Result<u64> {
    let mut bytes = 0;
    for (prefix, _) in families(digest, manifest) {
        match source.blobs().list(&prefix) {
            Ok(list) => {
                let sizes = list.iter().take(MAX_OBJECTS).map(|object| object.size);
                bytes += sizes.sum::<u64>();
            }
            Err(StoreError::NotSupported { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes)
}

/// Prefixes of the objects that go along with a layer, and how large one may be.
fn families(digest: &Digest, manifest: &Manifest) -> [(String, u64); 2] {
    [
        (format!("signatures/{}/", digest.hex()), MAX_SIGNATURE),
        (
            format!("profiles/{}/", manifest.layer_id().hex()),
            MAX_PROFILE,
        ),
    ]
}

/// Copies what the target does not have. Whether it is genuine is for its readers to check.
pub(super) fn copy(
    source: &LayerStore,
    target: &LayerStore,
    digest: &Digest,
    manifest: &Manifest,
) -> Result<Attached> {
    let mut copied = Attached::default();
    for (prefix, limit) in families(digest, manifest) {
        let list = match source.blobs().list(&prefix) {
            Ok(list) => list,
            // A store that cannot list (plain HTTP without an index): the layer is what counts.
            Err(StoreError::NotSupported { .. }) => continue,
            Err(error) => return Err(error),
        };
        for object in list.into_iter().take(MAX_OBJECTS) {
            if target.blobs().size(&object.key)?.is_some() {
                continue;
            }
            let Some(bytes) = source.blobs().get(&object.key, limit)? else {
                continue; // removed meanwhile
            };
            if target.blobs().put(&object.key, &bytes, PutMode::IfAbsent)? == PutOutcome::Created {
                copied.objects += 1;
                copied.bytes += bytes.len() as u64;
            }
        }
    }
    Ok(copied)
}
