//! Layers of which a store has only a part: their locators name packs that are elsewhere, and a
//! marker says so. FORMAT.md, section "Parts of layers".

use serde::{Deserialize, Serialize};

use super::LayerStore;
use crate::blob::PutMode;
use crate::digest::Digest;
use crate::error::{FormatError, Result, StoreError};
use crate::format::locator::Locator;
use crate::key::Key;

/// Largest marker in bytes.
const MAX_MARKER: u64 = 64 << 10;

/// What a store says about a layer of which it has only a part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeedMarker {
    format: u32,
    /// Address of the store that it was seeded from, as the seeder knew it. For people.
    pub origin: String,
    /// Frames that the locator named when it was written.
    pub frames: u64,
    /// Of these, frames that the store had.
    pub present_frames: u64,
}

impl LayerStore {
    /// The marker of a map of which this store has only a part; `None` if it has all of it.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if the marker cannot be read.
    pub fn seed_marker(&self, map: &Digest) -> Result<Option<SeedMarker>> {
        let key = Key::seed(map);
        self.get_checked(&key, MAX_MARKER, &mut |bytes| {
            let marker: SeedMarker = serde_json::from_slice(bytes)
                .map_err(|e| self.bad(&key, &FormatError::new("seed marker", e.to_string())))?;
            if marker.format != 1 {
                let what = format!("its format is {}, known is 1", marker.format);
                return Err(self.bad(&key, &FormatError::newer("seed marker", what)));
            }
            Ok(marker)
        })
    }

    /// Says that only a part of a map's chunks is here.
    pub(crate) fn put_seed_marker(
        &self,
        map: &Digest,
        origin: &str,
        frames: u64,
        present_frames: u64,
    ) -> Result<u64> {
        let marker = SeedMarker {
            format: 1,
            origin: origin.to_owned(),
            frames,
            present_frames,
        };
        let bytes = serde_json::to_vec(&marker)
            .map_err(|e| FormatError::new("seed marker", e.to_string()))?;
        self.blobs()
            .put(&Key::seed(map), &bytes, PutMode::Overwrite)?;
        Ok(bytes.len() as u64)
    }

    /// Tells a pack that is elsewhere by purpose from one that is lost.
    pub(super) fn not_seeded(&self, error: StoreError, locator: &Locator) -> StoreError {
        let StoreError::Missing { store, key } = &error else {
            return error;
        };
        match self.seed_marker(locator.map_digest()) {
            Ok(Some(marker)) => StoreError::NotSeeded {
                store: store.clone(),
                key: key.clone(),
                origin: marker.origin,
            },
            _ => error,
        }
    }
}
