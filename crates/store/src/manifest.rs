//! Manifests: what a published version is. Canonical JSON, see FORMAT.md, section "Manifest".

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::digest::{Digest, Hasher};
use crate::error::FormatError;
use crate::format::map::{MAX_DATA_SIZE, MAX_MAP_BYTES};
use crate::reference::{Kind, LayerName, Reference, Version};

const NAME: &str = "manifest";

/// Largest manifest in bytes.
pub const MAX_MANIFEST_BYTES: u64 = 4 << 20;
/// Largest metadata image in bytes.
pub const MAX_META_BYTES: u64 = 4 << 30;
const MAX_PARENTS: usize = 4096;
const MAX_ENTRIES: usize = 4096;
const MAX_TEXT: usize = 64 << 10;

/// Names of features that a reader may have to know. Sets are sorted and without repeats.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Features {
    /// Unknown ones are harmless.
    pub compat: Vec<String>,
    /// Unknown ones allow reading but not deriving a new manifest from this one.
    pub ro_compat: Vec<String>,
    /// Unknown ones: refuse.
    pub incompat: Vec<String>,
}

/// An object by the digest and size of its raw bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blob {
    /// Digest of the raw (uncompressed) bytes.
    pub digest: Digest,
    /// Size of the raw bytes.
    pub size: u64,
}

impl Blob {
    /// Digest and size of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self {
            digest: Digest::of(bytes),
            size: bytes.len() as u64,
        }
    }
}

/// A layer that this one was made on top of.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParentRef {
    /// Its reference at the time, if it had one. For people; the digest is what counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Reference>,
    /// Digest of its manifest.
    pub manifest: Digest,
}

impl ParentRef {
    /// What to call it: its reference, else its digest.
    #[must_use]
    pub fn name(&self) -> String {
        let name = self.reference.as_ref().map(ToString::to_string);
        name.unwrap_or_else(|| self.manifest.to_string())
    }
}

/// How much is in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Regular files (inodes).
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// Devices, fifos, sockets, whiteouts.
    pub others: u64,
    /// Sum of the files' sizes in bytes.
    pub bytes: u64,
}

/// What a published version is: its metadata image, its map and where they came from. Two
/// manifests with equal bytes are the same manifest; nothing in it depends on a store, on time or
/// on threads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the manifest format: [`Manifest::FORMAT`].
    pub format: u32,
    /// Feature sets.
    pub features: Features,
    /// The layer's kind.
    pub kind: Kind,
    /// The layer's name.
    pub name: LayerName,
    /// The layer's version.
    pub version: Version,
    /// For which machine, as in OCI: `linux/amd64`; empty if it does not matter.
    pub platform: String,
    /// The layers below, bottom first, as far as this layer depends on them.
    pub parents: Vec<ParentRef>,
    /// The metadata image: an EROFS image without file data.
    pub meta: Blob,
    /// The map of the data address space.
    pub map: Blob,
    /// Size of the data address space in bytes, a multiple of 4096.
    pub data_size: u64,
    /// How much is in the layer.
    pub counts: Counts,
    /// How the layer was made, as far as it decides its bytes (the chunker, for instance).
    pub parameters: BTreeMap<String, String>,
    /// The user's labels.
    pub labels: BTreeMap<String, String>,
    /// Further facts; readers must not depend on them.
    pub annotations: BTreeMap<String, String>,
}

/// Just enough to tell a newer manifest from a damaged one.
#[derive(Deserialize)]
struct Probe {
    format: u32,
    #[serde(default)]
    features: Option<Features>,
}

impl Manifest {
    /// The format version that this build writes and reads.
    pub const FORMAT: u32 = 1;

    /// The manifest's canonical bytes.
    ///
    /// # Errors
    /// If a limit of the format is exceeded; the text says which.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        self.check()?;
        let bytes = serde_json::to_vec(self).map_err(|e| FormatError::new(NAME, e.to_string()))?;
        if bytes.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(FormatError::new(
                NAME,
                format!(
                    "it has {} bytes, at most {MAX_MANIFEST_BYTES} are allowed",
                    bytes.len()
                ),
            ));
        }
        Ok(bytes)
    }

    /// Parses canonical bytes.
    ///
    /// # Errors
    /// If the bytes are not a manifest, break a limit, are not in canonical form (so that bytes
    /// and value stand for each other), or need a newer version (`newer` is then set).
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, FormatError> {
        if bytes.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(FormatError::new(
                NAME,
                format!("it has {} bytes", bytes.len()),
            ));
        }
        let probe: Probe =
            serde_json::from_slice(bytes).map_err(|e| FormatError::new(NAME, e.to_string()))?;
        if probe.format != Self::FORMAT {
            return Err(FormatError::newer(
                NAME,
                format!("its format is {}, known is {}", probe.format, Self::FORMAT),
            ));
        }
        if let Some(unknown) = probe.features.as_ref().and_then(|f| f.incompat.first()) {
            return Err(FormatError::newer(
                NAME,
                format!("it uses the feature {unknown:?}"),
            ));
        }
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|e| FormatError::new(NAME, e.to_string()))?;
        if manifest.to_bytes()? != bytes {
            return Err(FormatError::new(NAME, "it is not in canonical form"));
        }
        Ok(manifest)
    }

    fn check(&self) -> Result<(), FormatError> {
        let fail = |what: String| Err(FormatError::new(NAME, what));
        if self.format != Self::FORMAT {
            return fail(format!("format {} cannot be written", self.format));
        }
        for set in [
            &self.features.compat,
            &self.features.ro_compat,
            &self.features.incompat,
        ] {
            if !set.iter().zip(set.iter().skip(1)).all(|(a, b)| a < b) {
                return fail("a feature set is not sorted".to_owned());
            }
        }
        if self.meta.size > MAX_META_BYTES {
            return fail(format!(
                "its metadata has {} bytes, at most {MAX_META_BYTES} are allowed",
                self.meta.size
            ));
        }
        if self.map.size > MAX_MAP_BYTES {
            return fail(format!(
                "its map has {} bytes, at most {MAX_MAP_BYTES} are allowed",
                self.map.size
            ));
        }
        if self.data_size > MAX_DATA_SIZE || !self.data_size.is_multiple_of(4096) {
            return fail(format!(
                "its data size {} is not a multiple of 4096 up to {MAX_DATA_SIZE}",
                self.data_size
            ));
        }
        if self.parents.len() > MAX_PARENTS {
            return fail(format!(
                "it has {} parents, at most {MAX_PARENTS} are allowed",
                self.parents.len()
            ));
        }
        if self.platform.len() > MAX_TEXT {
            return fail("its platform is too long".to_owned());
        }
        for (what, map) in [
            ("parameters", &self.parameters),
            ("labels", &self.labels),
            ("annotations", &self.annotations),
        ] {
            if map.len() > MAX_ENTRIES {
                return fail(format!(
                    "it has {} {what}, at most {MAX_ENTRIES} are allowed",
                    map.len()
                ));
            }
            if let Some((key, _)) = map
                .iter()
                .find(|(k, v)| k.is_empty() || k.len() > MAX_TEXT || v.len() > MAX_TEXT)
            {
                return fail(format!(
                    "{what}: {:?} is empty, or it or its value is longer than {MAX_TEXT} bytes",
                    key.chars().take(60).collect::<String>()
                ));
            }
        }
        Ok(())
    }

    /// Digest of the canonical bytes: the layer's published identity.
    ///
    /// # Errors
    /// As [`Manifest::to_bytes`].
    pub fn digest(&self) -> Result<Digest, FormatError> {
        Ok(Digest::of(&self.to_bytes()?))
    }

    /// The reference that the manifest is for.
    #[must_use]
    pub fn reference(&self) -> Reference {
        Reference {
            kind: self.kind,
            name: self.name.clone(),
            version: self.version.clone(),
        }
    }

    /// Identity of the layer's content (metadata and map), whatever its name and its store.
    #[must_use]
    pub fn layer_id(&self) -> LayerId {
        LayerId::of(&self.meta.digest, &self.map.digest)
    }
}

/// Identity of a layer's content: what a node caches and mounts by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerId(Digest);

impl LayerId {
    /// `blake3("layerpack layer v1\0" || meta || map)`.
    #[must_use]
    pub fn of(meta: &Digest, map: &Digest) -> Self {
        let mut hasher = Hasher::new();
        hasher.update(b"layerpack layer v1\0");
        hasher.update(meta.as_bytes());
        hasher.update(map.as_bytes());
        Self(hasher.finish())
    }

    /// The identity that these digest's bytes spell.
    #[must_use]
    pub const fn from_digest(digest: Digest) -> Self {
        Self(digest)
    }

    /// As a digest.
    #[must_use]
    pub const fn digest(&self) -> &Digest {
        &self.0
    }

    /// 64 lowercase hexadecimal digits, for paths.
    #[must_use]
    pub fn hex(&self) -> String {
        self.0.hex()
    }
}

impl std::fmt::Display for LayerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::str::FromStr for LayerId {
    type Err = crate::error::StoreError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}
