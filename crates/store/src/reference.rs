//! References to published layers: `kind/name:version`.
//!
//! Names follow the grammar of OCI repository names and versions that of OCI tags, so that every
//! reference can be pushed to a registry as it is. Both are safe as path segments.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::error::StoreError;

/// What a layer is for. Decides its place in a stack: base, workspace, toolkits, diffs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// An operating system's root filesystem: bottom of a stack.
    Base,
    /// What work is done on: a repository with its data.
    Workspace,
    /// Tools brought in from outside.
    Toolkit,
    /// A snapshot of what a sandbox changed.
    Diff,
}

impl Kind {
    /// All kinds, bottom of a stack first.
    pub const ALL: [Self; 4] = [Self::Base, Self::Workspace, Self::Toolkit, Self::Diff];

    /// The kind's name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Workspace => "workspace",
            Self::Toolkit => "toolkit",
            Self::Diff => "diff",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Kind {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.as_str() == text)
            .ok_or_else(|| invalid(text, "the kind is one of base, workspace, toolkit, diff"))
    }
}

fn invalid(text: &str, why: impl Into<String>) -> StoreError {
    StoreError::InvalidReference {
        text: text.chars().take(300).collect(),
        why: why.into(),
    }
}

/// A layer's name: one or more segments joined by `/`, each of `a-z 0-9 . _ -`, beginning and
/// ending with a letter or digit, at most 100 bytes; at most 200 bytes in all.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerName(String);

impl LayerName {
    /// Longest name in bytes.
    pub const MAX_LEN: usize = 200;
    /// Longest segment of a name in bytes.
    pub const MAX_SEGMENT: usize = 100;

    /// Checks `text` and makes a name of it.
    ///
    /// # Errors
    /// [`StoreError::InvalidReference`] with the rule that is broken.
    pub fn new(text: &str) -> Result<Self, StoreError> {
        if text.is_empty() || text.len() > Self::MAX_LEN {
            return Err(invalid(
                text,
                format!("a name has 1 to {} bytes", Self::MAX_LEN),
            ));
        }
        let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        for segment in text.split('/') {
            let bytes = segment.as_bytes();
            if bytes.is_empty() || bytes.len() > Self::MAX_SEGMENT {
                return Err(invalid(
                    text,
                    format!("each part of a name has 1 to {} bytes", Self::MAX_SEGMENT),
                ));
            }
            if !bytes
                .iter()
                .all(|&b| alphanumeric(b) || matches!(b, b'.' | b'_' | b'-'))
            {
                return Err(invalid(
                    text,
                    "a name consists of a-z, 0-9, '.', '_', '-' and '/'",
                ));
            }
            if !bytes.first().copied().is_some_and(alphanumeric)
                || !bytes.last().copied().is_some_and(alphanumeric)
            {
                return Err(invalid(
                    text,
                    "each part of a name begins and ends with a-z or 0-9",
                ));
            }
        }
        Ok(Self(text.to_owned()))
    }

    /// The name's text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A layer's version: 1 to 128 bytes of `A-Z a-z 0-9 . _ -`, not beginning with `.` or `-`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(String);

impl Version {
    /// Longest version in bytes.
    pub const MAX_LEN: usize = 128;

    /// Checks `text` and makes a version of it.
    ///
    /// # Errors
    /// [`StoreError::InvalidReference`] with the rule that is broken.
    pub fn new(text: &str) -> Result<Self, StoreError> {
        let bytes = text.as_bytes();
        if bytes.is_empty() || bytes.len() > Self::MAX_LEN {
            return Err(invalid(
                text,
                format!("a version has 1 to {} bytes", Self::MAX_LEN),
            ));
        }
        if !bytes
            .iter()
            .all(|&b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        {
            return Err(invalid(
                text,
                "a version consists of letters, digits, '.', '_' and '-'",
            ));
        }
        if matches!(bytes.first(), Some(b'.' | b'-')) {
            return Err(invalid(text, "a version does not begin with '.' or '-'"));
        }
        Ok(Self(text.to_owned()))
    }

    /// The version's text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

macro_rules! text_newtype {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl FromStr for $name {
            type Err = StoreError;

            fn from_str(text: &str) -> Result<Self, StoreError> {
                Self::new(text)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                Self::new(&text).map_err(de::Error::custom)
            }
        }
    };
}

text_newtype!(LayerName);
text_newtype!(Version);

/// A published layer's name: `kind/name:version`. What it names never changes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    /// The layer's kind.
    pub kind: Kind,
    /// The layer's name.
    pub name: LayerName,
    /// The layer's version.
    pub version: Version,
}

impl Reference {
    /// A reference from its parts.
    #[must_use]
    pub const fn new(kind: Kind, name: LayerName, version: Version) -> Self {
        Self {
            kind,
            name,
            version,
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}:{}", self.kind, self.name, self.version)
    }
}

impl fmt::Debug for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Reference {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let whole = |e: StoreError| match e {
            StoreError::InvalidReference { why, .. } => invalid(text, why),
            other => other,
        };
        let (kind, rest) = text
            .split_once('/')
            .ok_or_else(|| invalid(text, "there is no '/' after the kind"))?;
        let (name, version) = rest.split_once(':').ok_or_else(|| {
            invalid(
                text,
                match rest.contains('@') {
                    true => {
                        "it is a channel, where a version is asked for (untag removes a channel)"
                    }
                    false => "there is no ':' before the version",
                },
            )
        })?;
        Ok(Self {
            kind: kind.parse().map_err(whole)?,
            name: LayerName::new(name).map_err(whole)?,
            version: Version::new(version).map_err(whole)?,
        })
    }
}

impl Serialize for Reference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Reference {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}
