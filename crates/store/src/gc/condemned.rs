//! What a collection is about to delete: *condemned lists*, and *sweep markers* while it deletes.
//!
//! A list is written when its objects were found unused, and its objects are deleted a grace period
//! later if they are still unused. Writers that begin meanwhile read the list and do not rely on its
//! objects without claiming them. While a collector deletes a list's objects, a marker says so.

use std::collections::BTreeSet;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::lease::unix_now;
use super::sealed::{seal, unseal};
use crate::blob::{BlobStore, PutMode, Span};
use crate::error::{FormatError, Result, StoreError};
use crate::key::Key;
use crate::layer::again::read_checked;

const NAME: &str = "condemned list";
/// Objects in one list, at most.
pub(super) const MAX_KEYS: usize = 100_000;
const MAX_LIST: u64 = 64 << 20;
/// A sweep marker that is older belongs to a dead collector.
pub(super) const SWEEP_TTL: std::time::Duration = std::time::Duration::from_secs(600);

/// A condemned list as stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct CondemnedList {
    format: u32,
    /// Its identity, which is in its key too.
    #[serde(skip)]
    pub(super) id: String,
    /// When the store wrote it, where the store tells.
    #[serde(skip)]
    pub(super) modified: Option<SystemTime>,
    /// Who condemned, for people.
    pub(super) who: String,
    /// Seconds since 1970 by the collector's clock.
    pub(super) created: u64,
    pub(super) keys: BTreeSet<String>,
}

/// Lists and markers of a store.
#[derive(Debug, Default)]
pub(super) struct Condemned {
    pub(super) lists: Vec<CondemnedList>,
    /// Lists that cannot be read: key and why.
    pub(super) damaged: Vec<(Key, StoreError)>,
    pub(super) sweeps: Vec<Sweep>,
}

/// A marker: a collector deletes a list's objects, or died at it.
#[derive(Debug, Clone)]
pub(super) struct Sweep {
    pub(super) key: Key,
    /// The list's identity.
    pub(super) list: String,
    pub(super) modified: Option<SystemTime>,
}

impl Sweep {
    /// Whether the collector may still be deleting. `true` in doubt.
    pub(super) fn is_live(&self, now: Option<SystemTime>) -> bool {
        match (self.modified, now) {
            (Some(modified), Some(now)) => now
                .duration_since(modified)
                .map_or(true, |age| age <= SWEEP_TTL),
            _ => true,
        }
    }
}

impl CondemnedList {
    pub(super) fn new(id: String, who: String, keys: BTreeSet<String>) -> Self {
        Self {
            format: 1,
            id,
            modified: None,
            who,
            created: unix_now(),
            keys,
        }
    }

    pub(super) fn key(&self) -> Result<Key> {
        Key::condemned(&self.id)
    }

    pub(super) fn put(&self, blobs: &dyn BlobStore) -> Result<()> {
        let bytes = seal(NAME, self)?;
        blobs.put(&self.key()?, &bytes, PutMode::Overwrite)?;
        Ok(())
    }

    /// Reads a list; `None` if it is gone.
    pub(super) fn get(blobs: &dyn BlobStore, key: &Key, id: &str) -> Result<Option<Self>> {
        let parse = |bytes: &[u8]| {
            let mut list: Self = unseal(NAME, bytes)?;
            if list.format != 1 {
                let what = format!("its format is {}, known is 1", list.format);
                return Err(FormatError::newer(NAME, what));
            }
            list.id = id.to_owned();
            Ok(list)
        };
        let whole = Span::Whole { max_len: MAX_LIST };
        read_checked(blobs, key, &whole, &mut |bytes| {
            parse(bytes).map_err(|e| StoreError::format(&blobs.url(), key.as_str(), &e))
        })
    }
}

impl Condemned {
    /// Reads all lists and markers.
    pub(super) fn read(blobs: &dyn BlobStore) -> Result<Self> {
        let mut all = Self::default();
        for object in blobs.list("gc/")? {
            let text = object.key.as_str();
            if let Some(rest) = text.strip_prefix("gc/sweep-") {
                let list = rest.split_once('-').map_or(rest, |(list, _)| list);
                all.sweeps.push(Sweep {
                    list: list.to_owned(),
                    modified: object.modified,
                    key: object.key,
                });
            } else if let Some(id) = text.strip_prefix("gc/list-") {
                match CondemnedList::get(blobs, &object.key, id) {
                    Ok(Some(mut list)) => {
                        list.modified = object.modified;
                        all.lists.push(list);
                    }
                    Ok(None) => {} // swept meanwhile
                    Err(error) if error.is_damage() => all.damaged.push((object.key, error)),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(all)
    }

    /// Markers alone.
    pub(super) fn sweeps(blobs: &dyn BlobStore) -> Result<Vec<Sweep>> {
        let markers = blobs.list("gc/sweep-")?.into_iter();
        Ok(markers
            .filter_map(|object| {
                let rest = object.key.as_str().strip_prefix("gc/sweep-")?;
                let list = rest.split_once('-').map_or(rest, |(list, _)| list);
                Some(Sweep {
                    list: list.to_owned(),
                    modified: object.modified,
                    key: object.key.clone(),
                })
            })
            .collect())
    }
}
