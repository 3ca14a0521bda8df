//! Which frames of a layer move, and in which requests: neighbours in one pack together, but no
//! more stored or decompressed bytes than fit the memory of a transfer.

use std::collections::HashSet;
use std::ops::Range;

use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::{FrameLoc, Locator};
use crate::format::map::LayerMap;
use crate::key::Key;
use crate::layer::{FrameChunks, LayerStore, LayerWriter, StoredFrame, Tables};

/// Bytes between two frames that are fetched rather than split into two requests.
const MAX_GAP: u64 = 64 << 10;
/// Longest request, unless one frame is longer.
const MAX_REQUEST: u64 = 2 << 20;
/// Decompressed bytes of one request's frames, unless one frame has more.
const MAX_RAW: u64 = 8 << 20;

/// A frame to fetch.
#[derive(Debug)]
struct Wanted {
    number: u32,
    chunks: FrameChunks,
    /// It will be passed on as it is.
    whole: bool,
    /// It holds more than the layer uses, and only the layer's chunks are to go.
    apart: bool,
}

/// A range of a pack, and the frames in it that move.
#[derive(Debug)]
pub(super) struct Request {
    pack: Digest,
    range: Range<u64>,
    raw: u64,
    frames: Vec<Wanted>,
}

/// What is to be done for a layer.
#[derive(Debug, Default)]
pub(super) struct Planned {
    pub(super) requests: Vec<Request>,
    pub(super) moved_bytes: u64,
    pub(super) reused_frames: u64,
    pub(super) reused_bytes: u64,
    pub(super) table_requests: u64,
    pub(super) table_bytes: u64,
}

fn frame_of(locator: &Locator, number: u32) -> Result<(&FrameLoc, Digest)> {
    let frame = usize::try_from(number)
        .ok()
        .and_then(|n| locator.frames().get(n));
    let pack = frame
        .and_then(|f| usize::try_from(f.pack).ok())
        .and_then(|p| locator.packs().get(p));
    match (frame, pack) {
        (Some(frame), Some(pack)) => Ok((frame, pack.id)),
        _ => Err(StoreError::InvalidInput {
            object: format!("frame {number}"),
            what: "it is not in the locator".to_owned(),
        }),
    }
}

impl Planned {
    /// Asks the writer for every chunk of the layer, or of these frames of it. `reframe`: of frames
    /// that hold more than the layer uses only its chunks are to go.
    pub(super) fn new(
        source: &LayerStore,
        writer: &mut LayerWriter,
        map: &LayerMap,
        locator: &Locator,
        only: Option<&HashSet<u32>>,
        reframe: bool,
    ) -> Result<Self> {
        let mut plan = Self::default();
        let mut tables = Tables::default();
        let mut order: Vec<u32> = (0_u32..)
            .zip(locator.frames())
            .map(|(number, _)| number)
            .filter(|number| only.is_none_or(|only| only.contains(number)))
            .collect();
        let place = |number: &u32| {
            usize::try_from(*number)
                .ok()
                .and_then(|n| locator.frames().get(n))
                .map_or((u32::MAX, 0), |f| (f.pack, f.offset))
        };
        order.sort_by_key(place);
        for number in order {
            let (frame, pack) = frame_of(locator, number)?;
            let mut missing = 0;
            for &i in locator.extents_of_frame(number) {
                let extent = usize::try_from(i).ok().and_then(|i| map.extents().get(i));
                if let Some(extent) = extent
                    && !writer.has_chunk(&extent.digest, extent.len)?
                {
                    missing += u64::from(extent.len);
                }
            }
            if missing == 0 {
                plan.reused_frames += 1;
                plan.reused_bytes += u64::from(frame.stored_len);
                continue;
            }
            plan.moved_bytes += u64::from(frame.stored_len);
            let mut chunks = tables.chunks(source, map, locator, number)?;
            let own: u64 = chunks.needed.iter().map(|chunk| u64::from(chunk.2)).sum();
            let apart = reframe && own < u64::from(frame.raw_len);
            if apart {
                chunks.others.clear();
            }
            let wanted = Wanted {
                number,
                chunks,
                whole: !apart && missing.saturating_mul(2) >= u64::from(frame.raw_len),
                apart,
            };
            plan.push(frame, pack, wanted);
        }
        plan.table_requests = tables.requests;
        plan.table_bytes = tables.bytes;
        Ok(plan)
    }

    fn push(&mut self, frame: &FrameLoc, pack: Digest, wanted: Wanted) {
        let end = frame.offset.saturating_add(frame.stored_len.into());
        let raw = u64::from(frame.raw_len);
        if let Some(last) = self.requests.last_mut()
            && last.pack == pack
            && frame.offset <= last.range.end.saturating_add(MAX_GAP)
            && last.range.end.max(end).saturating_sub(last.range.start) <= MAX_REQUEST
            && last.raw + raw <= MAX_RAW
        {
            last.range.end = last.range.end.max(end);
            last.raw += raw;
            last.frames.push(wanted);
            return;
        }
        self.requests.push(Request {
            pack,
            range: frame.offset..end,
            raw,
            frames: vec![wanted],
        });
    }
}

impl Request {
    /// Bytes to read.
    pub(super) const fn bytes(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start)
    }

    /// Bytes of memory that it needs: as read, as frames, and raw.
    pub(super) const fn weight(&self) -> u64 {
        self.bytes().saturating_mul(2).saturating_add(self.raw)
    }

    /// Reads and verifies its frames.
    pub(super) fn fetch(&self, source: &LayerStore, locator: &Locator) -> Result<Vec<StoredFrame>> {
        let bytes = source.fetch(&self.pack, self.range.clone())?;
        let mut frames = Vec::with_capacity(self.frames.len());
        for wanted in &self.frames {
            frames.push((frame_of(locator, wanted.number)?.0, wanted));
        }
        let end = |frame: &FrameLoc| frame.offset.saturating_add(frame.stored_len.into());
        let parts: Vec<_> = (frames.iter())
            .map(|(frame, _)| frame.offset..end(frame))
            .collect();
        let key = Key::pack(&self.pack);
        let start = self.range.start;
        source
            .parts_checked(&key, start, &bytes, &parts, &mut |at, stored| {
                match frames.get(at) {
                    Some((frame, wanted)) => {
                        let (chunks, whole) = (&wanted.chunks, wanted.whole);
                        let frame =
                            source.stored_frame(&self.pack, frame, stored, chunks, whole)?;
                        Ok(if wanted.apart { frame.apart() } else { frame })
                    }
                    None => Err(source.missing(&key)), // there is a part for each frame
                }
            })
            .into_iter()
            .collect()
    }
}
