//! The JSON documents of registries: OCI image specification 1.1, "Content Descriptors", "Image
//! Manifest" and "Image Index". Unknown fields are ignored when read, as that text demands.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::sha::Sha256;

/// Media type of an image's or artifact's manifest.
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Media type of a list of manifests.
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Media type of the same in docker's older format.
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Media type of a list of them.
pub const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
/// Media type of `{}`, where a document has to name something and there is nothing.
pub const EMPTY: &str = "application/vnd.oci.empty.v1+json";
/// The bytes of that.
pub const EMPTY_BYTES: &[u8] = b"{}";
/// Annotation with the name of a blob as a file.
pub const TITLE: &str = "org.opencontainers.image.title";

/// What a document says of a blob or of another document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    /// What kind of bytes they are.
    #[serde(rename = "mediaType", default)]
    pub media_type: String,
    /// Digest of the bytes.
    pub digest: Sha256,
    /// Their number.
    pub size: u64,
    /// The bytes themselves in base64, if they are few.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// The kind of an artifact, in lists of them.
    #[serde(
        rename = "artifactType",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub artifact_type: Option<String>,
    /// Further facts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Descriptor {
    /// Describes `bytes`.
    #[must_use]
    pub fn of(media_type: &str, bytes: &[u8]) -> Self {
        Self::new(media_type, Sha256::of(bytes), bytes.len() as u64)
    }

    /// Describes a blob.
    #[must_use]
    pub fn new(media_type: &str, digest: Sha256, size: u64) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest,
            size,
            data: None,
            artifact_type: None,
            annotations: BTreeMap::new(),
        }
    }
}

/// The manifest of an artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// 2.
    #[serde(rename = "schemaVersion")]
    pub schema_version: u32,
    /// [`MANIFEST`].
    #[serde(rename = "mediaType", default)]
    pub media_type: String,
    /// What the artifact is.
    #[serde(
        rename = "artifactType",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub artifact_type: Option<String>,
    /// Its configuration, or [`EMPTY`].
    pub config: Descriptor,
    /// Its blobs.
    #[serde(default)]
    pub layers: Vec<Descriptor>,
    /// The manifest that this one says something of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Descriptor>,
    /// Further facts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Manifest {
    /// The manifest of an artifact without a configuration.
    #[must_use]
    pub fn artifact(artifact_type: &str, layers: Vec<Descriptor>) -> Self {
        Self {
            schema_version: 2,
            media_type: MANIFEST.to_owned(),
            artifact_type: Some(artifact_type.to_owned()),
            config: Descriptor::of(EMPTY, EMPTY_BYTES),
            layers,
            subject: None,
            annotations: BTreeMap::new(),
        }
    }
}

/// A list of manifests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// 2.
    #[serde(rename = "schemaVersion")]
    pub schema_version: u32,
    /// [`INDEX`].
    #[serde(rename = "mediaType", default)]
    pub media_type: String,
    /// The manifests.
    #[serde(default)]
    pub manifests: Vec<Descriptor>,
}

impl Index {
    /// A list.
    #[must_use]
    pub fn new(manifests: Vec<Descriptor>) -> Self {
        Self {
            schema_version: 2,
            media_type: INDEX.to_owned(),
            manifests,
        }
    }
}

/// A page of tags.
#[derive(Debug, Deserialize)]
pub(super) struct Tags {
    /// `null` where a repository has none.
    #[serde(default)]
    pub tags: Option<Vec<String>>,
}
