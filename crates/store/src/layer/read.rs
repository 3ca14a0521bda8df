//! Reading frames and ranges of the data address space.
use super::LayerStore;
use crate::error::Result;
use crate::format::locator::Locator;
use crate::format::map::LayerMap;
use std::ops::Range;

/// What a read cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FetchStats {
    /// Range requests made.
    pub requests: u64,
    /// Bytes received, those of gaps between frames included.
    pub bytes: u64,
}

impl LayerStore {
    /// Fetches, verifies and decompresses one frame.
    ///
    /// # Errors
    /// TODO
    pub fn read_frame(&self, _locator: &Locator, _frame: u32) -> Result<Vec<u8>> {
        todo!()
    }
    /// Fetches, verifies and decompresses frames.
    ///
    /// # Errors
    /// TODO
    pub fn read_frames(
        &self,
        _locator: &Locator,
        _frames: &[u32],
        _sink: &mut dyn FnMut(u32, Vec<u8>) -> Result<()>,
    ) -> Result<FetchStats> {
        todo!()
    }
    /// Verified bytes of the data address space.
    ///
    /// # Errors
    /// TODO
    pub fn read_data(
        &self,
        _map: &LayerMap,
        _locator: &Locator,
        _range: Range<u64>,
    ) -> Result<Vec<u8>> {
        todo!()
    }
}
