//! Frames that another layer of the node has are copied from its cache instead of fetched.
//!
//! Layers of one store share frames: what a layer has in common with an earlier one lies in that
//! one's packs. So before a frame is fetched, the layers that are served here, come from the same
//! store and name the same pack are looked at. If they, together with what the layer has of the
//! frame itself, have all extents of it that the layer uses, the frame is put together from their
//! cache files. From there it goes the way of a frame from the store: each extent is compared with
//! its digest before it is kept or handed on, and what is wrong is fetched.
//!
//! Only layers of the same store are looked at: a layer gets nothing by its digest alone that its
//! own store would not have given.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

use layerpack_store::{Digest, Extent, FrameLoc, Locator};

use super::blob::{Blob, Source};
use super::flight::Outcome;
use super::worker::{Batch, Origin, frame_of};
use crate::sync::{Mutex, Ordering};

/// Packs from which on those are looked for that no blob names any more.
const SWEEP: usize = 1024;

/// Blobs by the packs that their data lies in.
#[derive(Debug, Default)]
pub(super) struct Sharers(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    packs: HashMap<Digest, Vec<Weak<Blob>>>,
    /// Packs there were after the last sweep.
    swept: usize,
}

impl Sharers {
    /// A blob whose data lies in these packs. May be told again.
    pub(super) fn add(&self, blob: &Arc<Blob>, locator: &Locator) {
        let mut known = self.0.lock();
        let this = Arc::as_ptr(blob);
        for pack in locator.packs() {
            let blobs = known.packs.entry(pack.id).or_default();
            blobs.retain(|other| other.strong_count() > 0 && other.as_ptr() != this);
            blobs.push(Arc::downgrade(blob));
        }
        if known.packs.len() > SWEEP.max(known.swept.saturating_mul(2)) {
            known.packs.retain(|_, blobs| {
                blobs.retain(|blob| blob.strong_count() > 0);
                !blobs.is_empty()
            });
            known.swept = known.packs.len();
        }
    }

    fn of(&self, pack: &Digest) -> Vec<Arc<Blob>> {
        let known = self.0.lock();
        let blobs = known.packs.get(pack);
        blobs.map_or_else(Vec::new, |b| b.iter().filter_map(Weak::upgrade).collect())
    }
}

/// Another layer with data in a pack.
struct Sharer {
    blob: Arc<Blob>,
    source: Source,
    /// The pack's index in its locator.
    pack: u32,
}

impl Sharer {
    /// The number that a frame of the pack has there, if it is used there.
    fn number(&self, frame: &FrameLoc) -> Option<u32> {
        // They are in this order; one that is not is fetched.
        let frames = self.source.locator.frames();
        let place = |f: &FrameLoc| (f.pack, f.offset);
        let at = frames.partition_point(|f| place(f) < (self.pack, frame.offset));
        let found = frames.get(at)?;
        let same = place(found) == (self.pack, frame.offset)
            && found.digest == frame.digest
            && found.raw_len == frame.raw_len;
        same.then(|| u32::try_from(at).ok()).flatten()
    }
}

/// The layers that have data in a pack and are of the same store.
fn sharers(blob: &Arc<Blob>, pack: &Digest) -> Vec<Sharer> {
    let others = blob
        .fetcher
        .sharers
        .of(pack)
        .into_iter()
        .filter(|other| !Arc::ptr_eq(other, blob) && other.store_url == blob.store_url);
    others
        .filter_map(|other| {
            let source = other.source.read().clone();
            let packs = source.locator.packs();
            let at = packs.iter().position(|p| p.id == *pack)?;
            Some(Sharer {
                blob: other,
                pack: u32::try_from(at).ok()?,
                source,
            })
        })
        .collect()
}

/// Where an extent's bytes are on this node.
struct Copy<'a> {
    blob: &'a Blob,
    index: u64,
    extent: Extent,
    /// First byte in the frame.
    start: usize,
}

impl Copy<'_> {
    /// Reads it, if it is still there. What an earlier process left is compared with its digest first.
    fn read(&self, frame: &mut [u8]) -> bool {
        let range = self.extent.data_offset..self.extent.end();
        let target = usize::try_from(self.extent.len)
            .ok()
            .and_then(|len| frame.get_mut(self.start..self.start.checked_add(len)?));
        let Some(target) = target else { return false };
        let _held = self.blob.cache.hold(&range);
        self.blob.check_suspects(range.start, range.end);
        self.blob.cache.has(self.index) && self.blob.cache.read(range.start, target).is_ok()
    }
}

fn is_here(blob: &Blob, index: u64) -> bool {
    blob.cache.has(index) || blob.cache.suspect(index)
}

fn extent_of(blob: &Blob, index: u32) -> Option<Extent> {
    let at = usize::try_from(index).ok()?;
    blob.map.extents().get(at).copied()
}

/// Where the extents of a frame are that the layer uses; `None` if one is nowhere.
fn find<'a>(
    blob: &'a Blob,
    source: &Source,
    frame: u32,
    sharers: &'a [Sharer],
) -> Option<Vec<Copy<'a>>> {
    let at = frame_of(source, frame)?;
    let mut there: HashMap<u32, (&Blob, u32, Extent)> = HashMap::new();
    for sharer in sharers {
        let Some(number) = sharer.number(at) else {
            continue;
        };
        for index in sharer.source.locator.extents_of_frame(number) {
            if is_here(&sharer.blob, u64::from(*index)) {
                let place = usize::try_from(*index).ok();
                let (_, start) = place.and_then(|i| sharer.source.locator.extent(i))?;
                let extent = extent_of(&sharer.blob, *index)?;
                there
                    .entry(start)
                    .or_insert((sharer.blob.as_ref(), *index, extent));
            }
        }
    }
    if there.is_empty() {
        return None;
    }
    let mut copies = Vec::new();
    for index in source.locator.extents_of_frame(frame) {
        let extent = extent_of(blob, *index)?;
        let (_, start) = source.locator.extent(usize::try_from(*index).ok()?)?;
        let (from, index, extent) = if is_here(blob, u64::from(*index)) {
            (blob, *index, extent)
        } else {
            let found = there.get(&start)?;
            if (found.2.len, found.2.digest) != (extent.len, extent.digest) {
                return None;
            }
            *found
        };
        copies.push(Copy {
            blob: from,
            index: u64::from(index),
            extent,
            start: usize::try_from(start).ok()?,
        });
    }
    Some(copies)
}

/// Lands the flights of those frames that other layers of the node have.
pub(super) fn copy(batch: &mut Batch) {
    let blob = Arc::clone(&batch.blob);
    let source = batch.source.clone();
    let wanted: Vec<u32> = batch.frames.iter().map(|(frame, _)| *frame).collect();
    let mut by_pack: BTreeMap<u32, Vec<Sharer>> = BTreeMap::new();
    for frame in wanted {
        let Some(at) = frame_of(&source, frame) else {
            continue;
        };
        let pack = usize::try_from(at.pack).ok();
        let Some(pack) = pack.and_then(|p| source.locator.packs().get(p)) else {
            continue;
        };
        let sharers = by_pack
            .entry(at.pack)
            .or_insert_with(|| sharers(&blob, &pack.id));
        if sharers.is_empty() {
            continue;
        }
        let Some(copies) = find(&blob, &source, frame, sharers) else {
            continue;
        };
        let mut bytes = vec![0; usize::try_from(at.raw_len).unwrap_or(0)];
        if !copies.iter().all(|copy| copy.read(&mut bytes)) {
            continue;
        }
        let len: u64 = copies.iter().map(|copy| u64::from(copy.extent.len)).sum();
        match blob.keep(&source, frame, bytes, Origin::Layer) {
            // A cache file that somebody wrote to: the store has the right bytes.
            Outcome::Failed(error) => {
                tracing::warn!(layer = %blob.layer, frame, error = %error,
                    "what another layer's cache has of a frame is damaged; it is fetched");
            }
            outcome => {
                blob.counters.copied.fetch_add(len, Ordering::Relaxed);
                blob.fetcher.meter.copied(len);
                batch.copied(frame);
                batch.land(frame, outcome);
            }
        }
    }
}
