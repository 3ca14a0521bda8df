//! The parts of OCI's and Docker's JSON documents that an import reads: OCI image specification
//! 1.1 ("Image Layout", "Index", "Manifest", "Configuration") and Docker's image specification
//! v1.2 (`manifest.json` of `docker save`). Unknown fields are ignored, as those texts demand.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The annotation that names an image in a layout.
pub(crate) const REF_NAME: &str = "org.opencontainers.image.ref.name";

#[derive(Debug, Deserialize)]
pub(crate) struct LayoutFile {
    #[serde(rename = "imageLayoutVersion")]
    pub version: String,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Descriptor {
    #[serde(rename = "mediaType", default)]
    pub media_type: String,
    pub digest: String,
    pub size: u64,
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
    #[serde(default)]
    pub platform: Option<Platform>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Platform {
    #[serde(default)]
    pub os: String,
    #[serde(default)]
    pub architecture: String,
    #[serde(default)]
    pub variant: Option<String>,
}

/// An index or, by its media type, a Docker manifest list.
#[derive(Debug, Deserialize)]
pub(crate) struct Index {
    #[serde(default)]
    pub manifests: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Manifest {
    pub config: Descriptor,
    #[serde(default)]
    pub layers: Vec<Descriptor>,
}

/// An image's configuration.
#[derive(Debug, Deserialize)]
pub(crate) struct Config {
    #[serde(default)]
    pub os: String,
    #[serde(default)]
    pub architecture: String,
    #[serde(default)]
    pub variant: Option<String>,
    /// What containers are run with; passed on as it is.
    #[serde(default)]
    pub config: Option<serde_json::Value>,
    #[serde(default)]
    pub rootfs: RootFs,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct RootFs {
    #[serde(default)]
    pub diff_ids: Vec<String>,
}

/// One image of `manifest.json`.
#[derive(Debug, Deserialize)]
pub(crate) struct Saved {
    #[serde(rename = "Config")]
    pub config: String,
    #[serde(rename = "RepoTags", default)]
    pub tags: Option<Vec<String>>,
    #[serde(rename = "Layers", default)]
    pub layers: Vec<String>,
}

impl Platform {
    /// `os/architecture` or `os/architecture/variant`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let platform = Self {
            os: parts.next()?.to_owned(),
            architecture: parts.next()?.to_owned(),
            variant: parts.next().map(str::to_owned),
        };
        let whole = !platform.os.is_empty() && !platform.architecture.is_empty();
        (whole && parts.next().is_none()).then_some(platform)
    }

    /// Whether an image for this platform is one for `wanted`.
    pub(crate) fn serves(&self, wanted: &Self) -> bool {
        self.os == wanted.os
            && self.architecture == wanted.architecture
            && (wanted.variant.is_none() || wanted.variant == self.variant)
    }

    /// As [`Platform::parse`] takes it.
    pub(crate) fn text(&self) -> String {
        match &self.variant {
            Some(variant) if !variant.is_empty() => {
                format!("{}/{}/{variant}", self.os, self.architecture)
            }
            _ => format!("{}/{}", self.os, self.architecture),
        }
    }
}

impl Config {
    pub(crate) fn platform(&self) -> Platform {
        Platform {
            os: self.os.clone(),
            architecture: self.architecture.clone(),
            variant: self.variant.clone().filter(|variant| !variant.is_empty()),
        }
    }
}

/// Whether a document of this media type lists others.
pub(crate) fn is_index(media_type: &str) -> bool {
    matches!(
        media_type,
        "application/vnd.oci.image.index.v1+json"
            | "application/vnd.docker.distribution.manifest.list.v2+json"
    )
}

/// Whether it is an image's manifest; OCI's own examples leave the type out at times.
pub(crate) fn is_manifest(media_type: &str) -> bool {
    matches!(
        media_type,
        "" | "application/vnd.oci.image.manifest.v1+json"
            | "application/vnd.docker.distribution.manifest.v2+json"
    )
}

/// Whether it is a layer that we can read. How it is compressed is told by its first bytes.
pub(crate) fn is_layer(media_type: &str) -> bool {
    let oci = media_type
        .strip_prefix("application/vnd.oci.image.layer.")
        .map(|rest| rest.strip_prefix("nondistributable.").unwrap_or(rest));
    match oci {
        Some(rest) => matches!(rest, "v1.tar" | "v1.tar+gzip" | "v1.tar+zstd"),
        None => matches!(
            media_type,
            "application/vnd.docker.image.rootfs.diff.tar.gzip"
                | "application/vnd.docker.image.rootfs.diff.tar"
                | "application/vnd.docker.image.rootfs.diff.tar.zstd"
                | "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
        ),
    }
}
