//! What answers of a store are about: a part of an object, what addresses of one store do not agree
//! about, and what lies there that is no object.

use std::ops::Range;
use std::time::SystemTime;

use serde::Serialize;

use super::BlobStore;
use crate::error::{Result, StoreError};
use crate::key::Key;

/// What of an object is to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Span {
    /// All of it, if it has at most so many bytes.
    Whole {
        /// See [`BlobStore::get`].
        max_len: u64,
    },
    /// These bytes.
    Range(Range<u64>),
}

impl Span {
    /// Reads it once. `None`: there is no such object.
    ///
    /// # Errors
    /// As [`BlobStore::get`] and [`BlobStore::get_range`]; [`StoreError::Corrupt`] if another
    /// number of bytes came than was asked for.
    pub fn read<S: BlobStore + ?Sized>(&self, store: &S, key: &Key) -> Result<Option<Vec<u8>>> {
        match self {
            Self::Whole { max_len } => store.get(key, *max_len),
            Self::Range(range) => match store.get_range(key, range.clone()) {
                Ok(bytes) if bytes.len() as u64 == range.end.saturating_sub(range.start) => {
                    Ok(Some(bytes))
                }
                Ok(bytes) => Err(StoreError::Corrupt {
                    store: store.url(),
                    key: key.to_string(),
                    range: Some(range.clone()),
                    what: format!("the store answered with {} bytes", bytes.len()),
                }),
                Err(StoreError::Missing { .. }) => Ok(None),
                Err(error) => Err(error),
            },
        }
    }

    /// The range, if it is not the whole object.
    #[must_use]
    pub fn range(&self) -> Option<Range<u64>> {
        match self {
            Self::Whole { .. } => None,
            Self::Range(range) => Some(range.clone()),
        }
    }
}

impl Disagreement {
    /// In words, with what to do.
    pub(crate) fn to_error(&self) -> StoreError {
        StoreError::Corrupt {
            store: self.bad.clone(),
            key: self.key.clone(),
            range: self.range.map(|(start, end)| start..end),
            what: format!("{}, while {} has it right", self.what, self.good),
        }
    }
}

/// An object that one address of a store had wrong, or not at all, and another had right.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Disagreement {
    /// The object's key.
    pub key: String,
    /// First byte and end of the part that was read, if not all of it.
    pub range: Option<(u64, u64)>,
    /// The address that had it wrong.
    pub bad: String,
    /// The address that had it right.
    pub good: String,
    /// What was wrong there.
    pub what: String,
}

/// Temporaries: what writers are at, and what dead ones left. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Leftovers {
    /// Files that are there.
    pub files: u64,
    /// Their sizes.
    pub bytes: u64,
    /// When the oldest was written last, in seconds since 1970 by the store's clock.
    pub oldest: Option<u64>,
    /// Files that were removed: their writers are dead.
    pub removed_files: u64,
    /// Their sizes.
    pub removed_bytes: u64,
}

impl Leftovers {
    pub(crate) fn add(&mut self, bytes: u64, modified: Option<SystemTime>) {
        self.files += 1;
        self.bytes += bytes;
        let since = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).ok();
        if let Some(time) = modified.and_then(since) {
            let time = time.as_secs();
            self.oldest = Some(self.oldest.map_or(time, |oldest| oldest.min(time)));
        }
    }
}
