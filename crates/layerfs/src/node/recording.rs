//! Recordings of what is read of a stack's layers.
//!
//! Reads that the kernel answers from its own caches are not seen. So a layer that nobody uses is
//! unmounted when a recording of it begins, and while one runs, its blob's pages are dropped when
//! it is opened again. A layer that is in use stays as it is; it is named as warm, since what
//! others have read of it may be missing.

use layerpack_store::{Digest, LayerId, LayerStore};

use super::Node;
use super::layer::StoreRef;
use crate::error::{LayerfsError, Result};
use crate::record::Touch;

/// A recording that has begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordingBegun {
    /// Layers that were in use: what the kernel has cached of them is not seen.
    pub warm: Vec<LayerId>,
}

/// A recording that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// The layers, as they were given.
    pub layers: Vec<LayerId>,
    /// Extents in the order of their first use.
    pub touches: Vec<Touch>,
    /// Extents that no longer fitted.
    pub left_out: u64,
}

impl Node {
    /// Begins to record what is read of these layers (`manifests`, bottom first), whether they
    /// are up already or come up later.
    ///
    /// # Errors
    /// [`LayerfsError::Recording`] if a recording of that name runs or too many do; when a
    /// manifest cannot be had.
    pub fn record_begin(
        &self,
        id: &str,
        store: &LayerStore,
        manifests: &[Digest],
    ) -> Result<RecordingBegun> {
        self.check_running()?;
        let store = StoreRef::Open(store.clone());
        let mut layers = Vec::with_capacity(manifests.len());
        for digest in manifests {
            layers.push(self.manifest(&store, digest)?.layer_id());
        }
        let mut warm = Vec::new();
        {
            // No stack comes up while layers go down.
            let _alone = self.stacking.write();
            for &layer in &layers {
                if !self.take_down(layer, false)? {
                    warm.push(layer);
                }
            }
            self.recordings
                .add(id, layers.clone())
                .ok_or_else(|| LayerfsError::Recording {
                    id: id.to_owned(),
                    what: "it runs already, or too many others do".to_owned(),
                })?;
            for &layer in &layers {
                self.registry.tap(layer, &self.recordings);
            }
        }
        Ok(RecordingBegun { warm })
    }

    /// Ends a recording.
    ///
    /// # Errors
    /// [`LayerfsError::Recording`] if there is none of that name.
    pub fn record_end(&self, id: &str) -> Result<Recorded> {
        let (layers, recorder) =
            self.recordings
                .remove(id)
                .ok_or_else(|| LayerfsError::Recording {
                    id: id.to_owned(),
                    what: "no such recording runs".to_owned(),
                })?;
        for &layer in &layers {
            self.registry.tap(layer, &self.recordings);
        }
        let (touches, left_out) = recorder.end();
        Ok(Recorded {
            layers,
            touches,
            left_out,
        })
    }
}
