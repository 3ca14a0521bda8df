//! One layer's data: which extents a read needs, where they are, and putting the answer
//! together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use layerpack_store::{LayerId, LayerMap, LayerStore, Locator, Manifest, StoreError};

use super::ahead::Unread;
use super::evict::Heat;
use super::flight::{Flight, Flights, Outcome};
use super::patience::Patience;
use super::stores::Lane;
use super::stream::Streams;
use super::{Fetcher, ReadError, worker};
use crate::cache::{BlobCache, Held};
use crate::fuse::ReplyBuf;
use crate::pool;
use crate::record::Taps;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, RwLock};
use crate::trace::{Cost, TraceEvent, TraceKind};

/// Opens the store of a layer when its data is first needed.
pub type OpenStore = Arc<dyn Fn() -> Result<LayerStore, StoreError> + Send + Sync>;

/// Where a blob's frames come from: a store, and the locator that says where in it.
#[derive(Clone)]
pub(crate) struct Source {
    /// Counts changes of the locator: frame numbers mean something within one generation.
    pub(crate) generation: u64,
    pub(crate) locator: Arc<Locator>,
}

/// How often a read asks again for what was evicted between its fetch and its reader's hold.
const MAX_AGAIN: u32 = 4;
/// A read that has waited for so long for its store may wait longer.
const PATIENCE: Duration = Duration::from_millis(250);
/// Pause of a read between two attempts with a store that cannot be reached.
const STORE_AGAIN: Duration = Duration::from_millis(200);

/// How the flights of one piece ended.
#[derive(Default)]
struct Landed {
    /// Frames that are in memory only.
    passed: Vec<(u32, Arc<Vec<u8>>)>,
    /// One frame's failure.
    failed: Option<Arc<ReadError>>,
    /// The locator was replaced.
    moved: bool,
}

/// Counters of one blob since the node started. All in bytes or plain numbers.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) cached: AtomicU64,
    pub(crate) fetched_stored: AtomicU64,
    pub(crate) fetched_raw: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) frames: AtomicU64,
    /// Bytes of extents that peers gave.
    pub(crate) from_peers: AtomicU64,
    /// Bytes of extents that were copied from other layers.
    pub(crate) copied: AtomicU64,
    pub(crate) served: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) passed_through: AtomicU64,
}

/// The data of one layer, as readers see it.
pub struct Blob {
    pub(super) layer: LayerId,
    pub(super) manifest: Manifest,
    pub(super) map: LayerMap,
    pub(super) cache: BlobCache,
    pub(super) fetcher: Arc<Fetcher>,
    pub(super) open_store: OpenStore,
    pub(super) store_url: String,
    /// Who fetches from that store.
    pub(super) lane: Lane,
    pub(super) store: Mutex<Option<LayerStore>>,
    pub(super) source: RwLock<Source>,
    pub(super) refreshed: Mutex<Option<Instant>>,
    pub(super) flights: Flights,
    pub(crate) counters: Counters,
    pub(super) cache_full: AtomicBool,
    pub(super) heat: Heat,
    pub(super) unread: Unread,
    pub(super) streams: Streams,
    patience: Patience,
    /// Bytes of all extents.
    pub(super) whole: u64,
    pub(crate) taps: Taps,
}

impl std::fmt::Debug for Blob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Blob")
            .field("layer", &self.layer)
            .field("store", &self.store_url)
            .field("size", &self.map.data_size())
            .finish_non_exhaustive()
    }
}

/// What a [`Blob`] is made of.
pub struct BlobParts {
    /// The layer's manifest.
    pub manifest: Manifest,
    /// Its map, already verified.
    pub map: LayerMap,
    /// Where the store has the frames: a hint, checked with each frame.
    pub locator: Locator,
    /// The node's copy, opened for exactly this map.
    pub cache: BlobCache,
    /// Address of the store, for messages.
    pub store_url: String,
    /// The store, if it is open already.
    pub store: Option<LayerStore>,
    /// Opens it otherwise.
    pub open_store: OpenStore,
}

impl std::fmt::Debug for BlobParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlobParts")
            .field("store_url", &self.store_url)
            .finish_non_exhaustive()
    }
}

impl Blob {
    /// Joins the parts.
    #[must_use]
    pub fn new(parts: BlobParts, fetcher: Arc<Fetcher>) -> Arc<Self> {
        let heat = Heat::new(parts.map.data_size());
        let whole = parts.map.extents().iter().map(|e| u64::from(e.len)).sum();
        let lane = fetcher.stores.lane(&parts.store_url);
        let blob = Self {
            lane,
            layer: parts.manifest.layer_id(),
            manifest: parts.manifest,
            map: parts.map,
            cache: parts.cache,
            fetcher,
            open_store: parts.open_store,
            store_url: parts.store_url,
            store: Mutex::new(parts.store),
            source: RwLock::new(Source {
                generation: 0,
                locator: Arc::new(parts.locator),
            }),
            refreshed: Mutex::new(None),
            flights: Flights::default(),
            counters: Counters::default(),
            cache_full: AtomicBool::new(false),
            heat,
            unread: Unread::default(),
            streams: Streams::default(),
            patience: Patience::default(),
            whole,
            taps: Taps::default(),
        };
        let cached = blob
            .map
            .extents()
            .iter()
            .zip(0_u64..)
            .filter(|(_, index)| blob.cache.suspect(*index) || blob.cache.has(*index))
            .map(|(extent, _)| u64::from(extent.len))
            .sum();
        blob.counters.cached.store(cached, Ordering::Relaxed);
        let blob = Arc::new(blob);
        blob.fetcher.know(&blob);
        let locator = Arc::clone(&blob.source.read().locator);
        blob.fetcher.sharers.add(&blob, &locator);
        blob
    }

    /// The layer this is the data of.
    #[must_use]
    pub fn layer(&self) -> LayerId {
        self.layer
    }

    /// The layer's manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The layer's map.
    #[must_use]
    pub fn map(&self) -> &LayerMap {
        &self.map
    }

    /// The node's copy.
    #[must_use]
    pub fn cache(&self) -> &BlobCache {
        &self.cache
    }

    /// What fetches it.
    #[must_use]
    pub fn fetcher(&self) -> &Arc<Fetcher> {
        &self.fetcher
    }

    /// Address of the store the data comes from.
    #[must_use]
    pub fn store_url(&self) -> &str {
        &self.store_url
    }

    /// Bytes of extents in the node's cache.
    #[must_use]
    pub fn cached_bytes(&self) -> u64 {
        self.counters.cached.load(Ordering::Relaxed)
    }

    /// Whether the cache refused bytes the last time it was to take some.
    #[must_use]
    pub fn cache_full(&self) -> bool {
        self.cache_full.load(Ordering::Relaxed)
    }

    /// Numbers of the extents that overlap `offset..end`.
    pub(super) fn extents(&self, offset: u64, end: u64) -> std::ops::Range<usize> {
        let all = self.map.extents();
        let first = all.partition_point(|e| e.data_offset + u64::from(e.len) <= offset);
        let last = all.partition_point(|e| e.data_offset < end);
        first..last.max(first)
    }

    /// Where the extents that overlap `offset..end` begin.
    fn starts(&self, offset: u64, end: u64) -> std::ops::Range<u64> {
        let first = self.map.extents().get(self.extents(offset, end).start);
        first.map_or(offset, |e| e.data_offset.min(offset))..end
    }

    /// Keeps what a read needs from being evicted.
    fn hold(&self, offset: u64, end: u64) -> Held<'_> {
        self.cache.hold(&self.starts(offset, end))
    }

    /// Tells recordings, and who evicts, of a read.
    fn touch(&self, offset: u64, end: u64) {
        self.heat.touch(&self.starts(offset, end));
        self.count_used(self.extents(offset, end));
        if self.taps.any() {
            self.taps.touch(self.extents(offset, end), |i| {
                self.map.extents().get(i).map_or(0, |e| e.len)
            });
        }
    }

    /// End of a read of `len` bytes, cut at the end of the blob.
    fn end(&self, offset: u64, len: usize) -> u64 {
        offset
            .saturating_add(len as u64)
            .min(self.map.data_size())
            .max(offset.min(self.map.data_size()))
    }

    /// Gives the bytes if they are all in the cache; `None` if something must be fetched.
    /// Short only at the end of the blob.
    pub fn try_read(
        self: &Arc<Self>,
        offset: u64,
        len: usize,
        buf: &mut ReplyBuf,
    ) -> Option<Result<(), ReadError>> {
        let end = self.end(offset, len);
        if end <= offset {
            buf.clear();
            return Some(Ok(()));
        }
        let _told = PanicTold {
            blob: self,
            offset,
            end,
        };
        // While something is evicted there, the read waits elsewhere.
        let held = self.cache.try_hold(&self.starts(offset, end))?;
        let result = self.read_present(offset, end, buf)?;
        drop(held);
        self.read_on(offset, end);
        Some(result)
    }

    /// Gives the bytes if they are all in the cache, where the caller holds them.
    fn read_present(
        &self,
        offset: u64,
        end: u64,
        buf: &mut ReplyBuf,
    ) -> Option<Result<(), ReadError>> {
        if !self.extents(offset, end).all(|i| self.cache.has(i as u64)) {
            return None;
        }
        self.touch(offset, end);
        let wanted = usize::try_from(end - offset).unwrap_or(0);
        let result = self
            .cache
            .read(offset, buf.fill(wanted))
            .map_err(ReadError::Cache);
        match &result {
            Ok(()) => {
                self.counters.reads.fetch_add(1, Ordering::Relaxed);
                self.counters
                    .served
                    .fetch_add(end - offset, Ordering::Relaxed);
                self.fetcher.meter.hit(end - offset);
                if self.taps.watched() {
                    self.taps
                        .tell(&TraceEvent::new(TraceKind::Hit, offset, end));
                }
            }
            Err(e) => {
                self.fetcher.meter.failed(e);
                buf.clear();
                self.report(offset, end, e);
            }
        }
        Some(result)
    }

    /// Gives the bytes, fetching what is missing. Ends within the read timeout (and the time
    /// it takes to copy). Short only at the end of the blob.
    ///
    /// # Errors
    /// See [`ReadError`]. `buf` then holds nothing.
    pub fn read(
        self: &Arc<Self>,
        offset: u64,
        len: usize,
        buf: &mut ReplyBuf,
    ) -> Result<(), ReadError> {
        let end = self.end(offset, len);
        if end <= offset {
            buf.clear();
            return Ok(());
        }
        let _told = PanicTold {
            blob: self,
            offset,
            end,
        };
        // From here to the answer nothing of this is evicted: neither what is there, nor what is
        // fetched for this read.
        let _held = self.hold(offset, end);
        self.check_suspects(offset, end);
        if let Some(result) = self.read_present(offset, end, buf) {
            self.read_on(offset, end);
            return result;
        }
        self.touch(offset, end);
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        self.counters.misses.fetch_add(1, Ordering::Relaxed);
        let begun = Instant::now();
        let limit = self.patience.limit(begun, self.fetcher.config.read_timeout);
        let deadline = begun + limit;
        if limit < self.fetcher.config.read_timeout {
            // Who has little time does not wait for what has had as much already: the store may be
            // well again, and a request that hangs does not notice.
            self.give_up(offset, end, begun.checked_sub(limit));
        }
        let waiting = self.fetcher.waiting.enter(self.layer);
        let mut cost = Cost::default();
        let mut result = self.read_pieces(offset, end, deadline, buf, &mut cost);
        if self.fetcher.config.wait_for_store {
            while result.as_ref().is_err_and(ReadError::may_pass) && Instant::now() < deadline {
                pool::parked(|| std::thread::sleep(STORE_AGAIN));
                result = self.read_pieces(offset, end, deadline, buf, &mut cost);
            }
        }
        drop(waiting);
        self.patience.ended(begun, Instant::now(), result.is_ok());
        if let Err(ReadError::TimedOut { limit: waited }) = &mut result {
            *waited = limit;
            // Who had less than the whole time says nothing about the request.
            if limit == self.fetcher.config.read_timeout {
                self.give_up(offset, end, Some(Instant::now()));
            }
        }
        let outcome = result.as_ref().map(|()| end - offset);
        let waited = begun.elapsed();
        self.fetcher.meter.waited(waited, outcome);
        if self.taps.watched() {
            let kind = match &result {
                Ok(()) => TraceKind::Miss,
                Err(_) => TraceKind::Failed,
            };
            let mut event = TraceEvent::new(kind, offset, end).with(cost, waited);
            event.error = result.as_ref().err().map(ToString::to_string);
            self.taps.tell(&event);
        }
        match &result {
            Ok(()) => {
                self.counters
                    .served
                    .fetch_add(end - offset, Ordering::Relaxed);
                // Behind what this read waited for.
                self.read_on(offset, end);
            }
            Err(e) => {
                buf.clear();
                self.report(offset, end, e);
            }
        }
        result
    }

    /// Compares what an earlier process left of `offset..end` with its digests. Extents that
    /// pass are present afterwards, the others are missing.
    pub(super) fn check_suspects(&self, offset: u64, end: u64) {
        let mut bytes = Vec::new();
        for index in self.extents(offset, end) {
            let Some(extent) = self.map.extents().get(index) else {
                continue;
            };
            let number = index as u64;
            if self.cache.has(number) || !self.cache.suspect(number) {
                continue;
            }
            bytes.resize(usize::try_from(extent.len).unwrap_or(0), 0);
            let read = self.cache.read(extent.data_offset, &mut bytes);
            if read.is_ok() && layerpack_store::Digest::of(&bytes) == extent.digest {
                self.cache.promote(number);
            } else if self.cache.distrust(number) {
                self.counters
                    .cached
                    .fetch_sub(u64::from(extent.len), Ordering::Relaxed);
                tracing::warn!(layer = %self.layer, extent = number, offset = extent.data_offset,
                    "the node's copy was damaged since it was written; it is fetched again");
            }
        }
    }

    fn report(&self, offset: u64, end: u64, error: &ReadError) {
        self.counters.errors.fetch_add(1, Ordering::Relaxed);
        let mut cause = String::new();
        let mut source = std::error::Error::source(error);
        while let Some(e) = source {
            if !cause.is_empty() {
                cause.push_str(": ");
            }
            cause.push_str(&e.to_string());
            source = e.source();
        }
        tracing::error!(layer = %self.layer, offset, end, error = %error, cause = %cause,
            "read failed");
    }

    /// Reads `offset..end` in pieces whose missing frames fit into the budget.
    fn read_pieces(
        self: &Arc<Self>,
        offset: u64,
        end: u64,
        deadline: Instant,
        buf: &mut ReplyBuf,
        cost_sum: &mut Cost,
    ) -> Result<(), ReadError> {
        let cap = self.fetcher.budget.piece();
        let mut at = offset;
        let mut again = 0;
        while at < end {
            let source = self.source.read().clone();
            let (piece_end, frames, cost) = self.plan(&source, at, end, cap)?;
            let (budget, store) = (&self.fetcher.budget, self.lane.number);
            let permit = budget
                .take_now(store, cost)
                .or_else(|| pool::parked(|| budget.take(store, cost, deadline)))
                .ok_or(ReadError::TimedOut {
                    limit: self.fetcher.config.read_timeout,
                })?;
            let landed = self.fetch(&source, &frames, deadline, cost_sum)?;
            if landed.moved {
                // The locator changed under way: plan again with the new one.
                continue;
            }
            let assembled = self.assemble(&source, at, piece_end, offset, end, &landed.passed, buf);
            // A damaged frame only matters to those who need its damaged part.
            match (assembled, landed.failed) {
                (Ok(()), _) => {}
                (Err(_), Some(error)) => return Err(ReadError::Shared(error)),
                // Fetched by another reader, and evicted before this one held it.
                (Err(ReadError::Damaged { .. }), None) if again < MAX_AGAIN => {
                    again += 1;
                    continue;
                }
                (Err(error), None) => return Err(error),
            }
            drop(permit);
            at = piece_end;
        }
        Ok(())
    }

    /// The longest piece from `at` whose missing frames cost at most `cap` (but at least one
    /// extent), with those frames and their cost.
    fn plan(
        &self,
        source: &Source,
        at: u64,
        end: u64,
        cap: u64,
    ) -> Result<(u64, Vec<u32>, u64), ReadError> {
        let mut frames: Vec<u32> = Vec::new();
        let mut cost = 0_u64;
        for index in self.extents(at, end) {
            if self.cache.has(index as u64) {
                continue;
            }
            let (extent, (frame, _)) = self.place(source, index)?;
            if frames.contains(&frame) {
                continue;
            }
            let size = source
                .locator
                .frames()
                .get(usize::try_from(frame).unwrap_or(usize::MAX))
                .map_or(0, |f| u64::from(f.raw_len) + u64::from(f.stored_len));
            if !frames.is_empty() && cost + size > cap {
                return Ok((extent.data_offset.max(at), frames, cost));
            }
            cost += size;
            frames.push(frame);
        }
        Ok((end, frames, cost))
    }

    /// The extent of that number, and where the locator has it.
    fn place(
        &self,
        source: &Source,
        index: usize,
    ) -> Result<(&layerpack_store::Extent, (u32, u32)), ReadError> {
        let damaged = |offset| ReadError::Damaged {
            extent: index as u64,
            offset,
        };
        let extent = self.map.extents().get(index).ok_or_else(|| damaged(0))?;
        let place = source
            .locator
            .extent(index)
            .ok_or_else(|| damaged(extent.data_offset))?;
        Ok((extent, place))
    }

    /// What has been under way for a range since `until` had its time: whoever comes next asks the
    /// store anew.
    fn give_up(&self, offset: u64, end: u64, until: Option<Instant>) {
        let source = self.source.read().clone();
        for index in self.extents(offset, end) {
            if let Some((frame, _)) = source.locator.extent(index)
                && let Some(flight) = self.flights.under_way(source.generation, frame)
                && until.is_some_and(|until| flight.begun() <= until)
            {
                flight.give_up();
            }
        }
    }

    /// Has the frames fetched (those that no other reader has under way) and waits for all.
    fn fetch(
        self: &Arc<Self>,
        source: &Source,
        frames: &[u32],
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<Landed, ReadError> {
        let claim = self.flights.claim(source.generation, frames, |frame| {
            source
                .locator
                .extents_of_frame(frame)
                .iter()
                .all(|index| self.cache.has(u64::from(*index)))
        });
        let own = |frame: u32| claim.ours.iter().any(|(own, _)| *own == frame);
        let owned: Vec<bool> = claim.all.iter().map(|(frame, _)| own(*frame)).collect();
        worker::submit(self, source, claim.ours);
        let mut landed = Landed::default();
        for ((frame, flight), own) in claim.all.into_iter().zip(owned) {
            let outcome = wait(&flight, deadline);
            if own && flight.was_copied() {
                cost.copied += 1;
            } else if own {
                cost.frames += 1;
                cost.peer_frames += u32::from(!flight.is_direct());
                cost.bytes += usize::try_from(frame)
                    .ok()
                    .and_then(|at| source.locator.frames().get(at))
                    .map_or(0, |f| u64::from(f.stored_len));
            } else {
                cost.joined += 1;
            }
            match outcome {
                Some(Outcome::Stored) => {}
                Some(Outcome::Passed(bytes)) => landed.passed.push((frame, bytes)),
                Some(Outcome::Moved) => landed.moved = true,
                Some(Outcome::Failed(error)) => landed.failed = Some(error),
                None => {
                    return Err(ReadError::TimedOut {
                        limit: self.fetcher.config.read_timeout,
                    });
                }
            }
        }
        Ok(landed)
    }

    /// Copies `at..piece_end` into the answer for `offset..end`.
    #[expect(clippy::too_many_arguments, reason = "three ranges and their parts")]
    fn assemble(
        &self,
        source: &Source,
        at: u64,
        piece_end: u64,
        offset: u64,
        end: u64,
        passed: &[(u32, Arc<Vec<u8>>)],
        buf: &mut ReplyBuf,
    ) -> Result<(), ReadError> {
        let whole = buf.fill(usize::try_from(end - offset).unwrap_or(0));
        let piece = slice_of(whole, at - offset, piece_end - offset);
        if passed.is_empty() {
            self.check_present(source, at, piece_end)?;
            return self.cache.read(at, piece).map_err(ReadError::Cache);
        }
        // Some extents are in the cache, some only in memory; between extents there are zeros.
        piece.fill(0);
        for index in self.extents(at, piece_end) {
            let (extent, (frame, start)) = self.place(source, index)?;
            let from = extent.data_offset.max(at);
            let to = (extent.data_offset + u64::from(extent.len)).min(piece_end);
            let target = slice_of(piece, from - at, to - at);
            if self.cache.has(index as u64) {
                self.cache.read(from, target).map_err(ReadError::Cache)?;
                continue;
            }
            let missing = ReadError::Damaged {
                extent: index as u64,
                offset: extent.data_offset,
            };
            let skip = u64::from(start) + (from - extent.data_offset);
            let bytes =
                passed
                    .iter()
                    .find(|(number, _)| *number == frame)
                    .and_then(|(_, bytes)| {
                        let skip = usize::try_from(skip).ok()?;
                        // The worker found the extent whole and right before it passed the frame.
                        bytes.get(skip..skip.checked_add(target.len())?)
                    });
            match bytes {
                Some(bytes) => target.copy_from_slice(bytes),
                None => return Err(missing),
            }
            self.counters
                .passed_through
                .fetch_add(target.len() as u64, Ordering::Relaxed);
            self.fetcher.meter.passed(target.len() as u64);
        }
        Ok(())
    }

    /// The last check before bytes leave the cache file: a hole there must never be served.
    fn check_present(&self, source: &Source, at: u64, end: u64) -> Result<(), ReadError> {
        for index in self.extents(at, end) {
            if !self.cache.has(index as u64) {
                let (extent, _) = self.place(source, index)?;
                return Err(ReadError::Damaged {
                    extent: index as u64,
                    offset: extent.data_offset,
                });
            }
        }
        Ok(())
    }
}

/// Waits for a flight. If it takes long, others do not wait for this thread.
fn wait(flight: &Flight, deadline: Instant) -> Option<Outcome> {
    let soon = Instant::now() + PATIENCE;
    flight
        .wait(soon.min(deadline))
        .or_else(|| pool::parked(|| flight.wait(deadline)))
}

/// Part of a buffer; empty if the range is not in it (which the callers' arithmetic excludes).
fn slice_of(bytes: &mut [u8], from: u64, to: u64) -> &mut [u8] {
    let range = usize::try_from(from)
        .ok()
        .zip(usize::try_from(to).ok())
        .map(|(from, to)| from..to);
    range
        .and_then(|range| bytes.get_mut(range))
        .unwrap_or_default()
}

/// Says in the log which read a panic took along; dropping its reply answers it with EIO.
struct PanicTold<'a> {
    blob: &'a Blob,
    offset: u64,
    end: u64,
}

impl Drop for PanicTold<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.blob.counters.errors.fetch_add(1, Ordering::Relaxed);
            tracing::error!(layer = %self.blob.layer, offset = self.offset, end = self.end,
                "a read panicked: its reader gets an error");
        }
    }
}
