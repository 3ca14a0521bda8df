//! Keys of a store's objects. The layout is in FORMAT.md, section "Keys".

use std::fmt;

use crate::channel::ChannelName;
use crate::digest::Digest;
use crate::error::StoreError;
use crate::manifest::LayerId;
use crate::reference::{Kind, LayerName, Reference, Version};
use crate::signature::PublicKey;

/// Name of an object in a store: `/`-separated segments that are safe as file names everywhere.
///
/// Invariant: 1 to 512 bytes; each segment has 1 to 200 bytes of `A-Z a-z 0-9 . _ -` and does not
/// begin with `.`; the first segment is not `tmp`, which the file store keeps for itself.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

impl Key {
    /// Longest key in bytes.
    pub const MAX_LEN: usize = 512;
    /// Longest segment in bytes.
    pub const MAX_SEGMENT: usize = 200;

    /// Checks `text` and makes a key of it.
    ///
    /// # Errors
    /// [`StoreError::InvalidKey`] with the rule that is broken.
    pub fn new(text: &str) -> Result<Self, StoreError> {
        let fail = |why| {
            Err(StoreError::InvalidKey {
                key: text.chars().take(600).collect(),
                why,
            })
        };
        if text.is_empty() || text.len() > Self::MAX_LEN {
            return fail("a key has 1 to 512 bytes");
        }
        for (i, segment) in text.split('/').enumerate() {
            if segment.is_empty() || segment.len() > Self::MAX_SEGMENT {
                return fail("each part of a key has 1 to 200 bytes");
            }
            if segment.starts_with('.') {
                return fail("no part of a key begins with '.'");
            }
            if !segment
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
            {
                return fail("a key consists of letters, digits, '.', '_', '-' and '/'");
            }
            if i == 0 && segment == "tmp" {
                return fail("tmp/ is reserved");
            }
        }
        Ok(Self(text.to_owned()))
    }

    /// The marker that makes a directory or bucket a store.
    #[must_use]
    pub fn marker() -> Self {
        Self("layerpack.json".to_owned())
    }

    /// A published version. The version's segment begins with `_`, which no segment of a name
    /// does, so that `a:b` and `a/b:c` can both exist as files.
    #[must_use]
    pub fn reference(reference: &Reference) -> Self {
        Self(format!(
            "refs/{}/{}/_{}",
            reference.kind, reference.name, reference.version
        ))
    }

    /// The reference that a key under `refs/` is for; `None` if it is not one.
    #[must_use]
    pub fn to_reference(&self) -> Option<Reference> {
        let rest = self.0.strip_prefix("refs/")?;
        let (kind, rest) = rest.split_once('/')?;
        let (name, version) = rest.rsplit_once('/')?;
        Some(Reference {
            kind: kind.parse::<Kind>().ok()?,
            name: LayerName::new(name).ok()?,
            version: Version::new(version.strip_prefix('_')?).ok()?,
        })
    }

    /// A writer's claim on a version, made while it is published: for which manifest, and a number
    /// that no other writer has.
    #[must_use]
    pub fn claim(reference: &Reference, manifest: &Digest, writer: u64) -> Self {
        let prefix = Self::claims(reference);
        Self(format!("{prefix}{}-{writer:016x}", manifest.hex()))
    }

    /// What the keys of all claims on a version begin with.
    #[must_use]
    pub fn claims(reference: &Reference) -> String {
        format!(
            "claims/{}/{}/_{}/",
            reference.kind, reference.name, reference.version
        )
    }

    /// A manifest, by its digest.
    #[must_use]
    pub fn manifest(digest: &Digest) -> Self {
        Self(format!("manifests/{}", digest.hex()))
    }

    /// A layer's metadata image, by the digest of its raw bytes.
    #[must_use]
    pub fn meta(digest: &Digest) -> Self {
        Self(format!("meta/{}", digest.hex()))
    }

    /// A layer's map, by the digest of its raw bytes.
    #[must_use]
    pub fn map(digest: &Digest) -> Self {
        Self(format!("maps/{}", digest.hex()))
    }

    /// Where a map's extents lie in this store, by the map's digest.
    #[must_use]
    pub fn locator(map: &Digest) -> Self {
        Self(format!("locators/{}", map.hex()))
    }

    /// A pack, by its id.
    #[must_use]
    pub fn pack(id: &Digest) -> Self {
        let hex = id.hex();
        Self(format!(
            "packs/{}/{hex}",
            hex.chars().take(2).collect::<String>()
        ))
    }

    /// An index segment, by its id.
    #[must_use]
    pub fn index(id: &Digest) -> Self {
        Self(format!("index/{}", id.hex()))
    }

    /// A key's signature of a manifest.
    #[must_use]
    pub fn signature(manifest: &Digest, key: &PublicKey) -> Self {
        Self(format!("signatures/{}/{}", manifest.hex(), key.hex()))
    }

    /// A lease, by its identity.
    ///
    /// # Errors
    /// If `id` cannot be part of a key.
    pub fn lease(id: &str) -> Result<Self, StoreError> {
        Self::new(&format!("leases/{id}"))
    }

    /// A list of objects that a collection will delete.
    pub(crate) fn condemned(id: &str) -> Result<Self, StoreError> {
        Self::new(&format!("gc/list-{id}"))
    }

    /// The mark of a collector that deletes the objects of list `id`.
    pub(crate) fn sweep(id: &str, collector: &str) -> Result<Self, StoreError> {
        Self::new(&format!("gc/sweep-{id}-{collector}"))
    }

    /// A channel. As a version's, its segment begins with `_`.
    #[must_use]
    pub fn channel(name: &ChannelName) -> Self {
        Self(format!(
            "channels/{}/{}/_{}",
            name.kind, name.name, name.channel
        ))
    }

    /// The channel that a key under `channels/` is for; `None` if it is not one.
    #[must_use]
    pub fn to_channel(&self) -> Option<ChannelName> {
        let rest = self.0.strip_prefix("channels/")?;
        let (kind, rest) = rest.split_once('/')?;
        let (name, channel) = rest.rsplit_once('/')?;
        Some(ChannelName {
            kind: kind.parse::<Kind>().ok()?,
            name: LayerName::new(name).ok()?,
            channel: Version::new(channel.strip_prefix('_')?).ok()?,
        })
    }

    /// An access profile: by the layer on top of its stack and the digest of its bytes.
    #[must_use]
    pub fn profile(top: &LayerId, digest: &Digest) -> Self {
        Self(format!("profiles/{}/{}", top.hex(), digest.hex()))
    }

    /// The marker of a map of which this store has only a part.
    #[must_use]
    pub fn seed(map: &Digest) -> Self {
        Self(format!("seeds/{}", map.hex()))
    }

    /// The digest that the key's last segment spells, if it does.
    #[must_use]
    pub fn digest(&self) -> Option<Digest> {
        let (_, last) = self.0.rsplit_once('/')?;
        Digest::from_hex(last).ok()
    }

    /// The key's text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
