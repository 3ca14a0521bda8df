//! A segment of the store read in pieces: any size in bounded memory, checked as a whole.

use crate::digest::{Digest, Hasher};
use crate::error::Result;
use crate::format::index::{IndexPack, SegmentScan, WireChunk};
use crate::key::Key;
use crate::layer::LayerStore;
use crate::layer::again::is_wrong;

/// Bytes of one request, a whole number of chunks.
const PIECE: u64 = (4 << 20) / SegmentScan::CHUNK * SegmentScan::CHUNK;

/// A segment being read.
#[derive(Debug)]
pub(crate) struct SegmentStream<'a> {
    store: &'a LayerStore,
    key: Key,
    scan: SegmentScan,
    at: u64,
    size: u64,
    hasher: Hasher,
    piece: Vec<u8>,
}

impl<'a> SegmentStream<'a> {
    /// Reads header and packs of the segment. `None`: it is gone.
    pub(crate) fn open(store: &'a LayerStore, key: &Key) -> Result<Option<Self>> {
        let Some(size) = store.blobs().size(key)? else {
            return Ok(None);
        };
        // A segment of a few packs begins with all of them: one request.
        let first = size.min(SegmentScan::HEADER + (4 << 10));
        let mut start = store.blobs().get_range(key, 0..first)?;
        let packs = SegmentScan::packs_len(&start, size).map_err(|e| store.bad(key, &e))?;
        let body = SegmentScan::HEADER + packs;
        if body > first {
            start.extend(store.blobs().get_range(key, first..body)?);
        }
        start.truncate(usize::try_from(body).unwrap_or(usize::MAX));
        let scan = SegmentScan::new(&start).map_err(|e| store.bad(key, &e))?;
        let mut hasher = Hasher::default();
        hasher.update(&start);
        Ok(Some(Self {
            store,
            key: key.clone(),
            scan,
            at: body,
            size,
            hasher,
            piece: Vec::new(),
        }))
    }

    /// The packs that it names: known to be sound only once all was read.
    pub(crate) fn packs(&self) -> &[IndexPack] {
        self.scan.packs()
    }

    /// Chunks not yet read.
    pub(crate) const fn left(&self) -> u64 {
        self.scan.left()
    }

    /// Where the next piece begins, in bytes.
    pub(crate) const fn at(&self) -> u64 {
        self.at
    }

    /// The next chunks; `None` at the end, when the segment is known to be sound.
    pub(crate) fn next(&mut self) -> Result<Option<&[WireChunk]>> {
        if self.at >= self.size {
            self.scan
                .finish()
                .map_err(|e| self.store.bad(&self.key, &e))?;
            let digest = self.hasher.finish();
            if self.key.digest() != Some(digest) {
                return Err(self
                    .store
                    .corrupt(&self.key, format!("its digest is {digest}")));
            }
            return Ok(None);
        }
        let end = self.size.min(self.at + PIECE);
        self.piece = self.store.blobs().get_range(&self.key, self.at..end)?;
        if self.piece.len() as u64 != end - self.at {
            let what = "the store answered with too few bytes";
            return Err(self.store.corrupt(&self.key, what));
        }
        self.hasher.update(&self.piece);
        self.at = end;
        self.scan
            .next(&self.piece)
            .map(Some)
            .map_err(|e| self.store.bad(&self.key, &e))
    }

    /// Reads to the end; an error if the segment is not sound.
    pub(crate) fn check(mut self) -> Result<()> {
        while self.next()?.is_some() {}
        Ok(())
    }
}

/// Does it once more if what was streamed is damaged: a transfer may have done that, and pieces
/// that were used already cannot be asked for again one by one.
pub(crate) fn twice<T>(act: impl Fn() -> Result<T>) -> Result<T> {
    match act() {
        Err(error) if is_wrong(&error) => {
            tracing::debug!("reading again: {error}");
            act()
        }
        done => done,
    }
}

/// Keys under `index/` that name a segment, with their digests, and their sizes in bytes.
pub(crate) fn segments(store: &LayerStore) -> Result<Vec<(Key, Option<Digest>, u64)>> {
    let listed = store.blobs().list("index/")?;
    Ok(listed
        .into_iter()
        .map(|object| {
            let digest = object.key.digest();
            (object.key, digest, object.size)
        })
        .collect())
}

/// Keys that every backend lists in one answer: what it says was so at one moment.
const ONE_ANSWER: usize = 1000;

/// As [`segments`], listed until two lists agree: while a compaction writes and deletes, a list that
/// is read in several steps may have neither a segment nor its replacement. A store that never rests
/// is taken as it is. A directory is always read in steps.
pub(crate) fn settled_segments(store: &LayerStore) -> Result<Vec<(Key, Option<Digest>, u64)>> {
    let mut listed = segments(store)?;
    if listed.len() < ONE_ANSWER && !store.blobs().decides_races() {
        return Ok(listed);
    }
    for _ in 0..4 {
        let again = segments(store)?;
        if again == listed {
            break;
        }
        listed = again;
    }
    Ok(listed)
}
