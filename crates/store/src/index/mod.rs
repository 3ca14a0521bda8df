//! The chunk index as writers and the collector use it: from a chunk's digest to its places in
//! packs.
//!
//! A store keeps the index as immutable segments (LPIDX, FORMAT.md), one for each build. How they
//! are searched depends on what there is:
//!
//! * `local`: with a directory of the node's own, every segment is read once in its life there and
//!   kept in **runs** (`run`): files sorted by digest with a small table of bucket starts, so that
//!   a look-up costs one short read, and many together cost less (`many`). Runs are merged by size, so few exist. Memory: about 1.4
//!   bytes a chunk, opening reads headers only.
//! * `direct`: without one, small indexes are read into memory, large ones are verified once and
//!   searched where they lie.
//! * `compact`: many small segments of the store become few.
//!
//! An index is a hint: whoever finds a chunk through it checks the pack's table and the frame.

mod compact;
mod direct;
mod local;
mod many;
mod merge;
mod run;
mod run_writer;
mod stream;

use std::path::Path;

pub use compact::{CompactOptions, CompactReport, compact_index};
pub(crate) use stream::{SegmentStream, segments, twice};

use crate::digest::Digest;
use crate::error::Result;
use crate::format::index::IndexPack;
use crate::layer::LayerStore;

/// Where a chunk may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The pack.
    pub pack: IndexPack,
    /// Index into the chunks of that pack's table.
    pub chunk: u32,
}

/// The chunk index of a store as it was when it was opened.
#[derive(Debug)]
pub struct ChunkIndex {
    engine: Engine,
    warnings: Vec<String>,
}

#[derive(Debug)]
enum Engine {
    Local(Box<local::LocalIndex>),
    Memory(direct::MemoryIndex),
    Direct(direct::DirectIndex),
}

/// What an index is made of. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexStats {
    /// Chunks, those of several places counted once for each.
    pub chunks: u64,
    /// Files or segments that a look-up may have to search.
    pub parts: u64,
    /// Bytes on the node's disk.
    pub disk_bytes: u64,
    /// Bytes of tables in memory.
    pub memory_bytes: u64,
}

impl ChunkIndex {
    /// Opens the index of `store`. With `cache`, a directory for the indexes of any number of
    /// stores, segments that are not in it yet are read from the store and kept there; a cache that
    /// cannot be used costs a warning and time. Without, see [the module](self).
    ///
    /// # Errors
    /// If the backend fails. Damaged segments are warnings.
    pub fn open(store: &LayerStore, cache: Option<&Path>) -> Result<Self> {
        let mut warnings = Vec::new();
        if let Some(cache) = cache {
            match local::LocalIndex::open(store, cache, &mut warnings) {
                Ok(local) => {
                    return Ok(Self {
                        engine: Engine::Local(Box::new(local)),
                        warnings,
                    });
                }
                Err(local::Failure::Store(error)) => return Err(error),
                Err(local::Failure::Cache(error)) => warnings.push(format!(
                    "the index cache {} cannot be used, the store's index is read instead: {error}",
                    cache.display()
                )),
            }
        }
        let engine = direct::open(store, &mut warnings)?;
        Ok(Self { engine, warnings })
    }

    /// Adds the places of the chunk with this digest to `places`. They are an index's word.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn find(&mut self, digest: &Digest, places: &mut Vec<Place>) -> Result<()> {
        match &mut self.engine {
            Engine::Local(index) => index.find(digest, places, &mut self.warnings),
            Engine::Memory(index) => {
                index.find(digest, places);
                Ok(())
            }
            Engine::Direct(index) => index.find(digest, places),
        }
    }

    /// Looks up many chunks together, with several threads where they are thousands: `each` gets the
    /// index of a digest and a place of it, in any order, and may get a place twice. On a node's copy
    /// of the index this takes a fraction of the time of as many [`ChunkIndex::find`].
    ///
    /// # Errors
    /// If the backend fails.
    pub fn find_many(
        &mut self,
        digests: &[Digest],
        threads: usize,
        each: &mut dyn FnMut(usize, Place),
    ) -> Result<()> {
        if let Engine::Local(index) = &mut self.engine {
            return index.find_many(digests, threads, each, &mut self.warnings);
        }
        let mut places = Vec::new();
        for (number, digest) in digests.iter().enumerate() {
            places.clear();
            self.find(digest, &mut places)?;
            places.iter().for_each(|place| each(number, *place));
        }
        Ok(())
    }

    /// Whether a look-up asks nothing of the store, so that one which may turn out to be of no use
    /// does no harm.
    pub(crate) const fn is_at_hand(&self) -> bool {
        !matches!(self.engine, Engine::Direct(_))
    }

    /// What was passed over so far, one line each: damaged segments, a damaged cache.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// What it is made of now.
    #[must_use]
    pub fn stats(&self) -> IndexStats {
        match &self.engine {
            Engine::Local(index) => index.stats(),
            Engine::Memory(index) => index.stats(),
            Engine::Direct(index) => index.stats(),
        }
    }
}
