//! Reading frames and ranges of the data address space. Frames that lie near each other in one
//! pack are fetched in one request; several requests are under way at once, within a budget of
//! memory. Nothing is handed out before its digest was checked.

use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};

use super::LayerStore;
use crate::buffers::{Reading, recycle};
use crate::codec::decompress_frame;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::{FrameLoc, Locator};
use crate::format::map::{Extent, LayerMap};
use crate::key::Key;
use crate::parallel::{Bounds, Order, for_each};

/// Bytes between two frames that are fetched rather than split into two requests.
pub(super) const MAX_GAP: u64 = 64 << 10;
/// Longest request in bytes, unless one frame is longer.
pub(super) const MAX_REQUEST: u64 = 4 << 20;
/// Raw bytes of the frames of one request, unless one frame has more: what its answer takes in
/// memory, whatever the frames compress to.
const MAX_REQUEST_RAW: u64 = 16 << 20;

/// Threads beyond those of requests that verify and decompress, at most.
const MAX_DECODERS: usize = 4;

/// What a read cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FetchStats {
    /// Range requests made.
    pub requests: u64,
    /// Bytes received, those of gaps between frames included.
    pub bytes: u64,
    /// Frames verified and handed out.
    pub frames: u64,
}

impl FetchStats {
    /// Requests for each GiB received.
    #[must_use]
    pub fn requests_per_gib(&self) -> u64 {
        let per_gib = (u128::from(self.requests) << 30).div_ceil(u128::from(self.bytes.max(1)));
        u64::try_from(per_gib).unwrap_or(u64::MAX)
    }
}

/// How much of a read is under way at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadLimits {
    /// Requests at once. While their answers are verified and decompressed, others take their
    /// place: there are up to as many threads more as the machine has processors, at most
    /// four, and all live as long as the call. 0 and 1: all on the caller's thread.
    pub requests: usize,
    /// Bytes of requests under way and of frames not yet handed out, stored and raw. A request
    /// that needs more runs alone.
    pub bytes: u64,
}

impl ReadLimits {
    /// Hides the latency of a remote store and keeps a few cores busy, in 96 MiB: six requests of
    /// 4 MiB on their way and two being decompressed.
    pub const RECOMMENDED: Self = Self {
        requests: 6,
        bytes: 96 << 20,
    };
    /// One request after the other on the caller's thread.
    pub const SEQUENTIAL: Self = Self {
        requests: 1,
        bytes: 0,
    };

    pub(super) fn bounds(self) -> Bounds {
        let decoders = || std::thread::available_parallelism().map_or(1, usize::from);
        Bounds {
            threads: match self.requests {
                0 | 1 => 1,
                requests => requests + decoders().min(MAX_DECODERS),
            },
            bytes: self.bytes,
        }
    }
}

/// Lets so many threads through at once.
#[derive(Debug)]
struct Gate {
    free: Mutex<usize>,
    freed: Condvar,
}

impl Gate {
    fn new(places: usize) -> Self {
        Self {
            free: Mutex::new(places.max(1)),
            freed: Condvar::new(),
        }
    }

    fn pass(&self) -> Passing<'_> {
        // A number: never left half changed.
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free == 0 {
            free = self
                .freed
                .wait(free)
                .unwrap_or_else(PoisonError::into_inner);
        }
        *free -= 1;
        Passing(self)
    }
}

/// A place behind a [`Gate`], free again when it is dropped.
struct Passing<'a>(&'a Gate);

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.freed.notify_one();
    }
}

/// The order in which frames are handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// By pack and offset.
    InOrder,
    /// Whatever arrives first: no frame waits for another's request.
    AsFetched,
}

/// One request: a range of a pack and the frames in it.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) pack: Digest,
    pub(super) range: Range<u64>,
    pub(super) frames: Vec<u32>,
    /// Raw bytes of the frames.
    pub(super) raw: u64,
}

impl Request {
    /// Bytes that it takes in memory when all is decompressed.
    pub(super) fn weight(&self) -> u64 {
        (self.range.end - self.range.start).saturating_add(self.raw)
    }
}

/// A frame of a locator by its number.
pub(super) fn frame_at(locator: &Locator, frame: u32) -> Result<&FrameLoc> {
    usize::try_from(frame)
        .ok()
        .and_then(|f| locator.frames().get(f))
        .ok_or_else(|| StoreError::InvalidInput {
            object: format!("frame {frame}"),
            what: format!("the locator has {} frames", locator.frames().len()),
        })
}

fn end_of(frame: &FrameLoc) -> u64 {
    frame.offset.saturating_add(u64::from(frame.stored_len))
}

/// Where its stored bytes are in the pack.
pub(super) fn range_of(frame: &FrameLoc) -> Range<u64> {
    frame.offset..end_of(frame)
}

/// Requests that cover `frames`: each frame once, in the order of packs and offsets.
pub(super) fn plan(locator: &Locator, frames: &[u32]) -> Result<Vec<Request>> {
    let mut wanted = frames
        .iter()
        .map(|&number| {
            frame_at(locator, number).map(|frame| (frame.pack, frame.offset, number, frame))
        })
        .collect::<Result<Vec<_>>>()?;
    wanted.sort_unstable_by_key(|&(pack, offset, number, _)| (pack, offset, number));
    wanted.dedup_by_key(|&mut (_, _, number, _)| number);
    let mut requests: Vec<Request> = Vec::new();
    let mut last_pack = None;
    for (pack, offset, number, frame) in wanted {
        let end = end_of(frame);
        if let Some(request) = requests.last_mut().filter(|_| last_pack == Some(pack)) {
            let joined = request.range.end.max(end);
            let near = offset <= request.range.end.saturating_add(MAX_GAP);
            let raw = request.raw.saturating_add(frame.raw_len.into());
            if near && joined - request.range.start <= MAX_REQUEST && raw <= MAX_REQUEST_RAW {
                request.range.end = joined;
                request.frames.push(number);
                request.raw = raw;
                continue;
            }
        }
        last_pack = Some(pack);
        let id = usize::try_from(pack)
            .ok()
            .and_then(|p| locator.packs().get(p))
            .map(|p| p.id);
        let id = id.ok_or_else(|| StoreError::InvalidInput {
            object: format!("frame {number}"),
            what: format!("the locator has {} packs", locator.packs().len()),
        })?;
        requests.push(Request {
            pack: id,
            range: offset..end,
            frames: vec![number],
            raw: frame.raw_len.into(),
        });
    }
    Ok(requests)
}

type Answer = (u64, Vec<(u32, Vec<u8>)>, Option<StoreError>);

impl LayerStore {
    /// A request's bytes.
    pub(crate) fn fetch(&self, pack: &Digest, range: Range<u64>) -> Result<Vec<u8>> {
        self.range_whole(&Key::pack(pack), range)
    }

    fn corrupt_range(&self, key: &Key, range: Range<u64>, what: impl Into<String>) -> StoreError {
        StoreError::Corrupt {
            store: self.url().to_owned(),
            key: key.as_str().to_owned(),
            range: Some(range),
            what: what.into(),
        }
    }

    /// Verifies and decompresses a frame's stored bytes.
    pub(super) fn open_frame(
        &self,
        pack: &Digest,
        frame: &FrameLoc,
        stored: &[u8],
    ) -> Result<Vec<u8>> {
        let bad =
            |what: String| self.corrupt_range(&Key::pack(pack), frame.offset..end_of(frame), what);
        let digest = Digest::of(stored);
        if digest != frame.digest {
            return Err(bad(format!(
                "the digest of this frame is {digest}, not {}",
                frame.digest
            )));
        }
        let raw_len = usize::try_from(frame.raw_len)
            .map_err(|_| bad("this frame does not fit into memory".to_owned()))?;
        decompress_frame(frame.codec, stored, raw_len).map_err(|e| bad(e.to_string()))
    }

    /// Checks a chunk's bytes against its extent of the map.
    pub(super) fn check_chunk(
        &self,
        pack: &Digest,
        frame: &FrameLoc,
        extent: &Extent,
        bytes: &[u8],
    ) -> Result<()> {
        let digest = Digest::of(bytes);
        if bytes.len() as u64 == u64::from(extent.len) && digest == extent.digest {
            return Ok(());
        }
        let what = format!(
            "the chunk at {} of the layer's data has the digest {digest}, not {}",
            extent.data_offset, extent.digest
        );
        Err(self.corrupt_range(&Key::pack(pack), frame.offset..end_of(frame), what))
    }

    /// Fetches one frame: its raw bytes, verified against the locator. The locator is a hint:
    /// check each chunk against the map before using it, or call [`LayerStore::read_chunks`].
    ///
    /// # Errors
    /// [`StoreError::Missing`] or [`StoreError::Corrupt`] naming the pack and the range.
    pub fn read_frame(&self, locator: &Locator, frame: u32) -> Result<Vec<u8>> {
        let location = frame_at(locator, frame)?;
        let mut requests = plan(locator, &[frame])?;
        let request = requests.pop().ok_or_else(|| StoreError::InvalidInput {
            object: format!("frame {frame}"),
            what: "no request was planned".to_owned(),
        })?;
        let key = Key::pack(&request.pack);
        self.range_checked(&key, request.range, &mut |stored| {
            self.open_frame(&request.pack, location, stored)
        })
        .map_err(|error| self.not_seeded(error, locator))
    }

    /// Fetches frames, each once, in the order of packs and offsets, within
    /// [`ReadLimits::RECOMMENDED`]: [`LayerStore::read_frames_with`].
    ///
    /// # Errors
    /// As [`LayerStore::read_frame`], and what `sink` answers.
    pub fn read_frames(
        &self,
        locator: &Locator,
        frames: &[u32],
        sink: &mut dyn FnMut(u32, Vec<u8>) -> Result<()>,
    ) -> Result<FetchStats> {
        let limits = ReadLimits::RECOMMENDED;
        self.read_frames_with(locator, frames, limits, Delivery::InOrder, sink)
    }

    /// Fetches frames, each once. Frames of one pack that are at most 64 KiB apart are fetched in
    /// one request of up to 4 MiB (stored; 16 MiB raw). `sink` gets a frame's number and its raw
    /// bytes, verified as by [`LayerStore::read_frame`], on the caller's thread; its error ends the
    /// call. What it needs no longer it should give to [`recycle`]. The frames of one request are handed out one after the other.
    ///
    /// # Errors
    /// As [`LayerStore::read_frame`], and what `sink` answers. In order, all frames before the one
    /// that failed were handed out.
    pub fn read_frames_with(
        &self,
        locator: &Locator,
        frames: &[u32],
        limits: ReadLimits,
        delivery: Delivery,
        sink: &mut dyn FnMut(u32, Vec<u8>) -> Result<()>,
    ) -> Result<FetchStats> {
        let requests = plan(locator, frames)?;
        let order = match delivery {
            Delivery::InOrder => Order::Kept,
            Delivery::AsFetched => Order::Free,
        };
        let mut stats = FetchStats::default();
        let _reading = Reading::begin();
        let gate = Gate::new(limits.requests);
        for_each(
            &requests,
            limits.bounds(),
            order,
            Request::weight,
            |request| self.run_request(locator, request, &gate),
            |_, (bytes, opened, error)| {
                stats.requests += 1;
                stats.bytes += bytes;
                for (number, raw) in opened {
                    stats.frames += 1;
                    sink(number, raw)?;
                }
                error.map_or(Ok(()), Err)
            },
        )?;
        Ok(stats)
    }

    /// Bytes received, the frames before the first bad one, and what is wrong with that.
    fn run_request(&self, locator: &Locator, request: &Request, gate: &Gate) -> Answer {
        let passing = gate.pass();
        let bytes = self.fetch(&request.pack, request.range.clone());
        drop(passing);
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(error) => return (0, Vec::new(), Some(self.not_seeded(error, locator))),
        };
        let mut opened = Vec::with_capacity(request.frames.len());
        let mut wrong = None;
        let raw = self.open_frames(locator, request, &bytes, &mut |frame, stored| {
            self.open_frame(&request.pack, frame, stored)
        });
        for (&number, raw) in request.frames.iter().zip(raw) {
            match raw {
                Ok(raw) => opened.push((number, raw)),
                Err(error) => {
                    wrong = Some(error);
                    break;
                }
            }
        }
        let received = bytes.len() as u64;
        recycle(bytes);
        (received, opened, wrong)
    }

    /// What `open` makes of the stored bytes of each frame of a request, which were read; frames
    /// that it finds wrong are read again.
    pub(super) fn open_frames<T>(
        &self,
        locator: &Locator,
        request: &Request,
        bytes: &[u8],
        open: &mut dyn FnMut(&FrameLoc, &[u8]) -> Result<T>,
    ) -> Vec<Result<T>> {
        let found: Result<Vec<&FrameLoc>> = (request.frames.iter())
            .map(|&number| frame_at(locator, number))
            .collect();
        let frames = match found {
            Ok(frames) => frames,
            Err(error) => return vec![Err(error)],
        };
        let parts: Vec<Range<u64>> = frames.iter().copied().map(range_of).collect();
        let key = Key::pack(&request.pack);
        let start = request.range.start;
        self.parts_checked(&key, start, bytes, &parts, &mut |at, stored| {
            match frames.get(at) {
                Some(frame) => open(frame, stored),
                None => Err(self.missing(&key)), // there is a part for each frame
            }
        })
    }

    /// Fetches the chunks of these extents (indexes into the map), each extent once, verified
    /// against the map. `sink` gets the extent's index and its bytes.
    ///
    /// # Errors
    /// As [`LayerStore::read_frames`]; a chunk with another digest is [`StoreError::Corrupt`].
    pub fn read_chunks(
        &self,
        map: &LayerMap,
        locator: &Locator,
        extents: &[usize],
        sink: &mut dyn FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<FetchStats> {
        let mut wanted = extents
            .iter()
            .map(|&i| {
                locator
                    .extent(i)
                    .map(|(frame, offset)| (frame, offset, i))
                    .ok_or_else(|| StoreError::InvalidInput {
                        object: format!("extent {i}"),
                        what: format!("the map has {} extents", map.extents().len()),
                    })
            })
            .collect::<Result<Vec<_>>>()?;
        wanted.sort_unstable();
        wanted.dedup();
        let mut frames: Vec<u32> = wanted.iter().map(|&(frame, _, _)| frame).collect();
        frames.dedup();
        self.read_frames(locator, &frames, &mut |number, raw| {
            let frame = frame_at(locator, number)?;
            let pack = usize::try_from(frame.pack)
                .ok()
                .and_then(|p| locator.packs().get(p))
                .map(|p| p.id);
            let pack = pack.unwrap_or(Digest::from_bytes([0; 32])); // `plan` has found it
            let mut checked: Option<(u32, Digest)> = None;
            let first = wanted.partition_point(|&(f, _, _)| f < number);
            let mine = wanted
                .get(first..)
                .unwrap_or_default()
                .iter()
                .take_while(|&&(f, _, _)| f == number);
            for &(_, offset, i) in mine {
                let Some(extent) = map.extents().get(i) else {
                    continue;
                };
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let len = usize::try_from(extent.len).unwrap_or(usize::MAX);
                let bytes = raw
                    .get(start..start.saturating_add(len))
                    .unwrap_or_default();
                // Extents with one chunk follow each other here: hash it once.
                if checked != Some((offset, extent.digest)) || bytes.len() != len {
                    self.check_chunk(&pack, frame, extent, bytes)?;
                    checked = Some((offset, extent.digest));
                }
                sink(i, bytes)?;
            }
            recycle(raw);
            Ok(())
        })
    }

    /// Bytes of the data address space, every chunk verified against the map; what no extent
    /// covers is zero.
    ///
    /// # Errors
    /// [`StoreError::InvalidInput`] if the range is not within the data; else as
    /// [`LayerStore::read_chunks`].
    pub fn read_data(
        &self,
        map: &LayerMap,
        locator: &Locator,
        range: Range<u64>,
    ) -> Result<Vec<u8>> {
        let outside = || StoreError::InvalidInput {
            object: format!("range {}..{}", range.start, range.end),
            what: format!("the layer's data has {} bytes", map.data_size()),
        };
        if range.start > range.end || range.end > map.data_size() {
            return Err(outside());
        }
        let mut out = vec![0; usize::try_from(range.end - range.start).map_err(|_| outside())?];
        let extents: Vec<usize> = map.extents_in(range.clone()).collect();
        self.read_chunks(map, locator, &extents, &mut |i, bytes| {
            let Some(extent) = map.extents().get(i) else {
                return Ok(());
            };
            let (from, to) = (
                extent.data_offset.max(range.start),
                extent.end().min(range.end),
            );
            let at = |position: u64, base: u64| {
                usize::try_from(position.saturating_sub(base)).unwrap_or(usize::MAX)
            };
            let source = bytes.get(at(from, extent.data_offset)..at(to, extent.data_offset));
            let target = out.get_mut(at(from, range.start)..at(to, range.start));
            if let (Some(source), Some(target)) = (source, target) {
                target.copy_from_slice(source);
            }
            Ok(())
        })?;
        Ok(out)
    }
}
