//! Without a directory of the node's own: a small index is read into memory. Of a large one every
//! segment is read once, to check it and to note every 32nd chunk; a look-up then reads one range of
//! each segment. That is right and bounded in memory, not fast: a cache or compaction is.

use zerocopy::FromBytes;

use super::stream::{SegmentStream, settled_segments, twice};
use super::{Engine, IndexStats, Place};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::index::{IndexEntry, IndexPack, SegmentScan, WireChunk};
use crate::key::Key;
use crate::layer::LayerStore;
use crate::parallel::{Bounds, Order, for_each};

/// Bytes of segments up to which the index is kept in memory.
const MEMORY: u64 = 64 << 20;
/// Reading segments: requests at once, and bytes in memory.
const READ: Bounds = Bounds {
    threads: 8,
    bytes: 48 << 20,
};
/// Chunks between two that are noted.
const STEP: u64 = 32;
/// Noted chunks that one look-up reads across, at most: digests are uniform.
const MAX_STEPS: usize = 64;
/// Looks at the store while segments vanish.
const ATTEMPTS: usize = 3;

/// Opens the index of the store in memory or where it lies.
pub(super) fn open(store: &LayerStore, warnings: &mut Vec<String>) -> Result<Engine> {
    let mut opened = open_listed(store)?;
    for _ in 1..ATTEMPTS {
        if !opened.vanished {
            break;
        }
        opened = open_listed(store)?; // compacted meanwhile: its chunks are elsewhere now
    }
    warnings.extend(opened.warnings);
    Ok(opened.engine)
}

struct Opened {
    engine: Engine,
    warnings: Vec<String>,
    /// A segment that was listed is gone.
    vanished: bool,
}

fn open_listed(store: &LayerStore) -> Result<Opened> {
    let listed = settled_segments(store)?;
    let mut warnings = Vec::new();
    let mut vanished = false;
    // `None`: the segment is not to be used.
    let mut judge = |error: StoreError| match error {
        StoreError::Missing { .. } => {
            vanished = true;
            Ok(())
        }
        error if error.is_damage() => {
            tracing::warn!("not used: {error}");
            warnings.push(format!("not used: {error}"));
            Ok(())
        }
        error => Err(error),
    };
    let gone = |key: &Key| store.missing(key);
    let engine = if listed.iter().map(|(_, _, size)| *size).sum::<u64>() <= MEMORY {
        let mut index = MemoryIndex::default();
        for_each(
            &listed,
            READ,
            Order::Kept,
            |(_, _, size)| size.saturating_mul(2),
            |(key, _, _)| store.index_segment(key)?.ok_or_else(|| gone(key)),
            |_, result| match result {
                Ok(segment) => {
                    index.add(segment.packs(), segment.entries());
                    Ok(())
                }
                Err(error) => judge(error),
            },
        )?;
        index.entries.sort_by_key(|e| e.digest); // stable: made for sorted runs
        Engine::Memory(index)
    } else {
        let mut index = DirectIndex {
            store: store.clone(),
            segments: Vec::new(),
        };
        for_each(
            &listed,
            READ,
            Order::Kept,
            |(_, _, size)| (*size).min(6 << 20),
            |(key, _, _)| twice(|| Segment::read(store, key))?.ok_or_else(|| gone(key)),
            |_, result| match result {
                Ok(segment) => {
                    index.segments.push(segment);
                    Ok(())
                }
                Err(error) => judge(error),
            },
        )?;
        Engine::Direct(index)
    };
    Ok(Opened {
        engine,
        warnings,
        vanished,
    })
}

/// All chunks in memory: 40 bytes each.
#[derive(Debug, Default)]
pub(super) struct MemoryIndex {
    packs: Vec<IndexPack>,
    /// Sorted by digest; a digest may have several places.
    entries: Vec<IndexEntry>,
}

impl MemoryIndex {
    fn add(&mut self, packs: &[IndexPack], entries: &[IndexEntry]) {
        // At most 64 MiB of packs and chunks: numbers are far below 2^32.
        let first = u32::try_from(self.packs.len()).unwrap_or(u32::MAX);
        self.packs.extend(packs);
        self.entries.extend(entries.iter().map(|e| IndexEntry {
            pack: e.pack.saturating_add(first),
            ..*e
        }));
    }

    pub(super) fn find(&self, digest: &Digest, places: &mut Vec<Place>) {
        let first = self.entries.partition_point(|e| &e.digest < digest);
        let found = self.entries.get(first..).unwrap_or_default().iter();
        for entry in found.take_while(|e| &e.digest == digest) {
            let pack = usize::try_from(entry.pack).ok();
            if let Some(pack) = pack.and_then(|p| self.packs.get(p)) {
                let place = Place {
                    pack: *pack,
                    chunk: entry.chunk,
                };
                // Two segments may name one pack.
                if !places.contains(&place) {
                    places.push(place);
                }
            }
        }
    }

    pub(super) fn stats(&self) -> IndexStats {
        IndexStats {
            chunks: self.entries.len() as u64,
            parts: 1,
            disk_bytes: 0,
            memory_bytes: self.entries.len() as u64 * 40 + self.packs.len() as u64 * 48,
        }
    }
}

/// Segments that are searched in the store.
#[derive(Debug)]
pub(super) struct DirectIndex {
    store: LayerStore,
    segments: Vec<Segment>,
}

#[derive(Debug)]
struct Segment {
    key: Key,
    packs: Vec<IndexPack>,
    /// Where its chunks begin, in bytes.
    start: u64,
    chunks: u64,
    /// The first eight bytes of every 32nd digest.
    fences: Vec<u64>,
}

impl Segment {
    /// Reads and checks a whole segment. `None`: it is gone.
    fn read(store: &LayerStore, key: &Key) -> Result<Option<Self>> {
        let Some(mut stream) = SegmentStream::open(store, key)? else {
            return Ok(None);
        };
        let mut segment = Self {
            key: key.clone(),
            packs: stream.packs().to_vec(),
            start: stream.at(),
            chunks: stream.left(),
            fences: Vec::new(),
        };
        let mut number = 0;
        while let Some(chunks) = stream.next()? {
            for chunk in chunks {
                if number % STEP == 0 {
                    segment.fences.push(first_bytes(&chunk.digest));
                }
                number += 1;
            }
        }
        Ok(Some(segment))
    }

    fn find(&self, store: &LayerStore, digest: &Digest, places: &mut Vec<Place>) -> Result<()> {
        let wanted = first_bytes(digest);
        let from = self
            .fences
            .partition_point(|f| *f < wanted)
            .saturating_sub(1);
        let to = self.fences.partition_point(|f| *f <= wanted);
        if to <= from || to - from > MAX_STEPS {
            return Ok(());
        }
        let from = from as u64 * STEP;
        let to = (to as u64 * STEP).min(self.chunks);
        let at = |number: u64| self.start + number * SegmentScan::CHUNK;
        let bytes = match store.blobs().get_range(&self.key, at(from)..at(to)) {
            Ok(bytes) => bytes,
            // Compacted since it was opened.
            Err(StoreError::Missing { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let Ok(chunks) = <[WireChunk]>::ref_from_bytes(&bytes) else {
            return Ok(());
        };
        for chunk in chunks.iter().filter(|c| &c.digest == digest) {
            let pack = usize::try_from(chunk.pack.get()).ok();
            if let Some(pack) = pack.and_then(|p| self.packs.get(p)) {
                places.push(Place {
                    pack: *pack,
                    chunk: chunk.chunk.get(),
                });
            }
        }
        Ok(())
    }
}

fn first_bytes(digest: &Digest) -> u64 {
    let first = digest.as_bytes().first_chunk::<8>().copied();
    u64::from_be_bytes(first.unwrap_or_default())
}

impl DirectIndex {
    pub(super) fn find(&self, digest: &Digest, places: &mut Vec<Place>) -> Result<()> {
        for segment in &self.segments {
            segment.find(&self.store, digest, places)?;
        }
        Ok(())
    }

    pub(super) fn stats(&self) -> IndexStats {
        let memory = |s: &Segment| s.fences.len() as u64 * 8 + s.packs.len() as u64 * 48;
        IndexStats {
            chunks: self.segments.iter().map(|s| s.chunks).sum(),
            parts: self.segments.len() as u64,
            disk_bytes: 0,
            memory_bytes: self.segments.iter().map(memory).sum(),
        }
    }
}
