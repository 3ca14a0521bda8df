//! Channels: names that move from version to version (`workspace/x@latest`). Versions never do.
//! FORMAT.md, section "Channels".

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::blob::PutMode;
use crate::digest::Digest;
use crate::error::{FormatError, Result, StoreError};
use crate::key::Key;
use crate::layer::LayerStore;
use crate::reference::{Kind, LayerName, Reference, Version};

/// Moves that a channel remembers besides the current one.
pub const MAX_HISTORY: usize = 32;
/// Largest channel object in bytes.
const MAX_CHANNEL: u64 = 64 << 10;

/// A channel's name: `kind/name@channel`. The channel follows the rules of versions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChannelName {
    /// Kind of its layers.
    pub kind: Kind,
    /// Name of its layers.
    pub name: LayerName,
    /// Which of the name's channels.
    pub channel: Version,
}

impl ChannelName {
    /// The channel of this name among the versions of a layer.
    #[must_use]
    pub fn of(reference: &Reference, channel: Version) -> Self {
        Self {
            kind: reference.kind,
            name: reference.name.clone(),
            channel,
        }
    }

    /// The version of this channel's layer.
    #[must_use]
    pub fn version(&self, version: Version) -> Reference {
        Reference::new(self.kind, self.name.clone(), version)
    }
}

impl fmt::Display for ChannelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}@{}", self.kind, self.name, self.channel)
    }
}

impl FromStr for ChannelName {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = |why: String| StoreError::InvalidReference {
            text: text.chars().take(300).collect(),
            why,
        };
        let (front, channel) = text
            .rsplit_once('@')
            .ok_or_else(|| invalid("there is no '@' before the channel".to_owned()))?;
        let (kind, name) = front
            .split_once('/')
            .ok_or_else(|| invalid("there is no '/' after the kind".to_owned()))?;
        let whole = |error: StoreError| match error {
            StoreError::InvalidReference { why, .. } => invalid(why),
            other => other,
        };
        Ok(Self {
            kind: kind.parse().map_err(whole)?,
            name: LayerName::new(name).map_err(whole)?,
            channel: Version::new(channel).map_err(whole)?,
        })
    }
}

/// A move of a channel to a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// The version.
    pub version: Version,
    /// Digest of its manifest.
    pub manifest: Digest,
    /// When, in seconds since 1970 by the mover's clock. For people.
    pub moved: u64,
}

/// Where a channel is and was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Channel {
    /// Where it is.
    pub current: Move,
    /// Where it was before, newest first; at most [`MAX_HISTORY`].
    pub history: Vec<Move>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Object {
    format: u32,
    #[serde(flatten)]
    current: Move,
    #[serde(default)]
    history: Vec<Move>,
}

/// A channel in a list. A damaged one does not hide the others.
#[derive(Debug)]
pub struct ChannelEntry {
    /// Its name.
    pub name: ChannelName,
    /// Where it is, or why it cannot be read.
    pub channel: Result<Channel>,
}

impl LayerStore {
    /// Where a channel is; `None` if there is no such channel.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if it cannot be read: moving it again mends it.
    pub fn channel(&self, name: &ChannelName) -> Result<Option<Channel>> {
        let key = Key::channel(name);
        let bad = |e: FormatError| StoreError::format(self.url(), key.as_str(), &e);
        self.get_checked(&key, MAX_CHANNEL, &mut |bytes| {
            let object: Object = serde_json::from_slice(bytes)
                .map_err(|e| bad(FormatError::new("channel", e.to_string())))?;
            if object.format != 1 {
                let what = format!("its format is {}, known is 1", object.format);
                return Err(bad(FormatError::newer("channel", what)));
            }
            Ok(Channel {
                current: object.current,
                history: object.history,
            })
        })
    }

    /// Moves a channel to a published version, or makes it. `now`: seconds since 1970. Moving it
    /// to where it is changes nothing. Of two that move it at once one is the last; its history
    /// may lack the other's move.
    ///
    /// # Errors
    /// [`StoreError::UnknownReference`] if the version is not published.
    pub fn move_channel(&self, name: &ChannelName, version: &Version, now: u64) -> Result<Channel> {
        let manifest = self.resolve(&name.version(version.clone()))?;
        let before = match self.channel(name) {
            Ok(before) => before,
            Err(error) if error.is_damage() => {
                tracing::warn!("replaced: {error}");
                None
            }
            Err(error) => return Err(error),
        };
        let mut history = Vec::new();
        if let Some(before) = before {
            if before.current.version == *version && before.current.manifest == manifest {
                return Ok(before);
            }
            history.push(before.current);
            history.extend(before.history);
            history.truncate(MAX_HISTORY);
        }
        let channel = Channel {
            current: Move {
                version: version.clone(),
                manifest,
                moved: now,
            },
            history,
        };
        let object = Object {
            format: 1,
            current: channel.current.clone(),
            history: channel.history.clone(),
        };
        let bytes =
            serde_json::to_vec(&object).map_err(|e| FormatError::new("channel", e.to_string()))?;
        self.blobs()
            .put(&Key::channel(name), &bytes, PutMode::Overwrite)?;
        Ok(channel)
    }

    /// The version that a channel is at, after checking that it is what it was when the channel
    /// was moved there.
    ///
    /// # Errors
    /// [`StoreError::UnknownChannel`] if there is none, or its version is gone or another one;
    /// [`StoreError::NoStore`] if there is no store.
    pub fn resolve_channel(&self, name: &ChannelName) -> Result<Reference> {
        let unknown = |what: String| StoreError::UnknownChannel {
            channel: name.to_string(),
            store: self.url().to_owned(),
            what,
        };
        let channel = self
            .channel(name)?
            .ok_or_else(|| self.not_here(unknown("there is no such channel".to_owned())))?;
        let reference = name.version(channel.current.version);
        match self.resolve(&reference) {
            Ok(digest) if digest == channel.current.manifest => Ok(reference),
            Ok(_) => Err(unknown(format!(
                "its version {reference} was removed and published anew with other content"
            ))),
            Err(StoreError::UnknownReference { .. }) => Err(unknown(format!(
                "its version {reference} is no longer published"
            ))),
            Err(error) => Err(error),
        }
    }

    /// Removes a channel; its versions stay.
    ///
    /// # Errors
    /// [`StoreError::UnknownChannel`] if there is none, [`StoreError::NoStore`] if there is no
    /// store.
    pub fn remove_channel(&self, name: &ChannelName) -> Result<()> {
        if self.blobs().delete(&Key::channel(name))? {
            return Ok(());
        }
        Err(self.not_here(StoreError::UnknownChannel {
            channel: name.to_string(),
            store: self.url().to_owned(),
            what: "there is no such channel".to_owned(),
        }))
    }

    /// All channels, sorted by key. The manifests that they are at are in use, whether their
    /// versions are published or not.
    ///
    /// # Errors
    /// If the list cannot be read.
    pub fn channels(&self) -> Result<Vec<ChannelEntry>> {
        let mut entries = Vec::new();
        for object in self.blobs().list("channels/")? {
            let Some(name) = object.key.to_channel() else {
                continue;
            };
            match self.channel(&name) {
                Ok(None) => {} // removed meanwhile
                Ok(Some(channel)) => entries.push(ChannelEntry {
                    name,
                    channel: Ok(channel),
                }),
                Err(error) => entries.push(ChannelEntry {
                    name,
                    channel: Err(error),
                }),
            }
        }
        Ok(entries)
    }
}
