//! Fetching ahead of demand, and what came of it.
//!
//! Extents are taken in the order that is given; those that are there already are skipped. Frames
//! go through the same flights as those that readers ask for, so nobody fetches twice, and a reader
//! that comes while a frame is on its way waits for that one. Demand comes first: what is fetched
//! ahead takes nothing out of the readers' budget of memory but has a small one of its own, so that
//! most of the fetching threads stay free for readers; a fill also waits while any reader does.
//!
//! It ends early when the cache has no room (what is fetched ahead evicts nothing), when it is
//! cancelled, or when the store fails several times in a row.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use layerpack_store::LayerId;

use super::blob::{Blob, Source};
use super::flight::{Flight, Outcome};
use super::worker;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::trace::{TraceEvent, TraceKind};

/// Bytes of frames, stored and raw, that one list has under way at once.
const WINDOW: u64 = 12 << 20;
/// The same for what is sorted by its place in the store and asked for together, to begin with: who
/// waits for the first of it is not to wait for much else.
const FIRST_BATCH: u64 = 1 << 20;
/// The same later on.
const BATCH: u64 = 6 << 20;
/// Failures in a row that end it.
const MAX_FAILURES: u32 = 3;
/// Time between two looks whether a reader still waits.
const LOOK: Duration = Duration::from_millis(2);

/// How a list is fetched.
#[derive(Debug, Clone, Copy, Default)]
pub struct AheadOptions {
    /// Bytes a second, after decompression, at most.
    pub bytes_per_second: Option<u64>,
    /// Wait while any reader waits for a fetch.
    pub yields: bool,
}

/// Why a list ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AheadEnd {
    /// All of it is there, or was tried.
    Done,
    /// The cache takes no more.
    NoRoom,
    /// It was told to.
    Cancelled,
    /// The store failed again and again.
    Failed,
}

/// What a list came to. Sizes are of extents, after decompression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AheadReport {
    /// Why it ended.
    pub end: AheadEnd,
    /// Bytes that it had fetched.
    pub fetched: u64,
    /// Bytes that were there already, or on their way.
    pub present: u64,
}

/// Which extents of a blob were fetched ahead and not read since.
#[derive(Debug, Default)]
pub(super) struct Unread {
    any: AtomicBool,
    bits: OnceLock<Box<[AtomicU64]>>,
    /// Bytes fetched ahead.
    pub(super) fetched: AtomicU64,
    /// Of these, bytes that were read afterwards.
    pub(super) used: AtomicU64,
    /// Bytes that were evicted unread.
    pub(super) wasted: AtomicU64,
}

impl Unread {
    fn set(&self, index: u64, extents: u64) {
        let words = usize::try_from(extents.div_ceil(64)).unwrap_or(0);
        let bits = self
            .bits
            .get_or_init(|| (0..words).map(|_| AtomicU64::new(0)).collect());
        if let Some(word) = usize::try_from(index / 64).ok().and_then(|at| bits.get(at)) {
            word.fetch_or(1 << (index % 64), Ordering::Relaxed);
            self.any.store(true, Ordering::Relaxed);
        }
    }

    /// Whether an extent is in.
    pub(super) fn has(&self, index: u64) -> bool {
        if !self.any.load(Ordering::Relaxed) {
            return false;
        }
        let word = usize::try_from(index / 64).ok();
        word.and_then(|at| self.bits.get()?.get(at))
            .is_some_and(|w| w.load(Ordering::Relaxed) & (1 << (index % 64)) != 0)
    }

    /// Takes an extent out; whether it was in.
    fn take(&self, index: u64) -> bool {
        if !self.has(index) {
            return false;
        }
        let word = usize::try_from(index / 64).ok();
        let bit = 1 << (index % 64);
        word.and_then(|at| self.bits.get()?.get(at))
            .is_some_and(|w| w.fetch_and(!bit, Ordering::Relaxed) & bit != 0)
    }
}

impl Blob {
    /// Extents are read: those that were fetched ahead were worth it.
    pub(super) fn count_used(&self, extents: std::ops::Range<usize>) {
        if !self.unread.any.load(Ordering::Relaxed) {
            return;
        }
        for index in extents {
            if self.unread.take(index as u64) {
                let len = self.len_of(index as u64);
                self.unread.used.fetch_add(len, Ordering::Relaxed);
                self.fetcher.meter.ahead(1, len);
            }
        }
    }

    /// Extents go: those that were fetched ahead and never read were not.
    pub(super) fn count_wasted(&self, extents: &[u64]) {
        for index in extents {
            if self.unread.take(*index) {
                let len = self.len_of(*index);
                self.unread.wasted.fetch_add(len, Ordering::Relaxed);
                self.fetcher.meter.ahead(2, len);
            }
        }
    }

    /// Bytes fetched ahead, and of these those that were read since and those that were evicted
    /// unread.
    #[must_use]
    pub fn ahead(&self) -> (u64, u64, u64) {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let unread = &self.unread;
        (of(&unread.fetched), of(&unread.used), of(&unread.wasted))
    }
}

/// Frames of one blob on their way.
struct Batch {
    blob: Arc<Blob>,
    flights: Vec<Arc<Flight>>,
    /// Extents that count as fetched ahead when they are there.
    extents: Vec<u64>,
    cost: u64,
}

impl Batch {
    /// Tells who watches what was fetched, by parts of the data that follow each other.
    fn tell(&self) {
        let mut indexes: Vec<u64> = self.extents.clone();
        indexes.retain(|index| self.blob.cache.has(*index));
        indexes.sort_unstable();
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let extents = self.blob.map.extents();
        for index in indexes {
            let extent = usize::try_from(index).ok().and_then(|i| extents.get(i));
            let Some(extent) = extent else { continue };
            match runs.last_mut() {
                Some((_, end)) if end.next_multiple_of(4096) >= extent.data_offset => {
                    *end = extent.end();
                }
                _ => runs.push((extent.data_offset, extent.end())),
            }
        }
        for (offset, end) in runs {
            let event = TraceEvent::new(TraceKind::Ahead, offset, end);
            self.blob.taps.tell(&event);
        }
    }
}

/// Frames that are to be asked for together.
struct Gathered {
    blob: Arc<Blob>,
    source: Source,
    frames: Vec<u32>,
    cost: u64,
}

struct Run<'a> {
    cancel: &'a AtomicBool,
    options: AheadOptions,
    begun: Instant,
    under_way: VecDeque<Batch>,
    cost: u64,
    /// How large the next batch may be.
    batch: u64,
    failures: u32,
    report: AheadReport,
}

/// Fetches extents (blob and number) in their order. Returns when they are there, or it ended early.
#[must_use]
pub fn fetch_ahead(
    extents: impl IntoIterator<Item = (Arc<Blob>, u64)>,
    options: AheadOptions,
    cancel: &Cancel,
) -> AheadReport {
    let mut run = Run {
        cancel: &cancel.0,
        options,
        begun: Instant::now(),
        under_way: VecDeque::new(),
        cost: 0,
        batch: FIRST_BATCH,
        failures: 0,
        report: AheadReport {
            end: AheadEnd::Done,
            fetched: 0,
            present: 0,
        },
    };
    if let Err(end) = run.all(extents) {
        run.report.end = end;
    }
    // What is on its way belongs to the report, unless nobody wants to wait for it.
    while run.report.end != AheadEnd::Cancelled {
        match run.land() {
            Ok(true) => {}
            Ok(false) => break,
            Err(end) => run.report.end = end,
        }
    }
    run.report
}

/// Ends a [`fetch_ahead`] from another thread.
#[derive(Debug, Default)]
pub struct Cancel(AtomicBool);

impl Cancel {
    /// Ends it soon.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Run<'_> {
    fn all(&mut self, extents: impl IntoIterator<Item = (Arc<Blob>, u64)>) -> Result<(), AheadEnd> {
        let mut gathered: Option<Gathered> = None;
        for (blob, index) in extents {
            if self.cancel.load(Ordering::Acquire) {
                return Err(AheadEnd::Cancelled);
            }
            if blob.cache.has(index) || blob.cache.suspect(index) {
                self.report.present += blob.len_of(index);
                continue;
            }
            if gathered
                .as_ref()
                .is_some_and(|g| !Arc::ptr_eq(&g.blob, &blob) || g.cost >= self.batch)
                && let Some(full) = gathered.take()
            {
                self.send(full)?;
                self.batch = (self.batch * 2).min(BATCH);
            }
            let gathered = gathered.get_or_insert_with(|| Gathered {
                source: blob.source.read().clone(),
                blob: Arc::clone(&blob),
                frames: Vec::new(),
                cost: 0,
            });
            let place = usize::try_from(index)
                .ok()
                .and_then(|at| gathered.source.locator.extent(at));
            let Some((frame, _)) = place else { continue };
            if gathered.frames.contains(&frame) {
                continue;
            }
            let size = usize::try_from(frame)
                .ok()
                .and_then(|at| gathered.source.locator.frames().get(at))
                .map_or(0, |f| u64::from(f.raw_len) + u64::from(f.stored_len));
            gathered.cost += size;
            gathered.frames.push(frame);
        }
        gathered.map_or(Ok(()), |rest| self.send(rest))
    }

    /// Has a batch fetched, once the window, the rate and the readers allow it.
    fn send(&mut self, gathered: Gathered) -> Result<(), AheadEnd> {
        // What is limited, or yields, has one batch under way at a time.
        let window = if self.options.yields || self.options.bytes_per_second.is_some() {
            0
        } else {
            WINDOW
        };
        while self.cost + gathered.cost > window && self.land()? {}
        self.wait_for_turn(&gathered.blob)?;
        let Gathered {
            blob,
            source,
            frames,
            cost,
        } = gathered;
        if !blob.fetcher.has_room(self.cost + cost) {
            return Err(AheadEnd::NoRoom);
        }
        let claim = blob.flights.claim(source.generation, &frames, |frame| {
            source
                .locator
                .extents_of_frame(frame)
                .iter()
                .all(|index| blob.cache.has(u64::from(*index)))
        });
        let mut extents = Vec::new();
        for (frame, _) in &claim.ours {
            for index in source.locator.extents_of_frame(*frame) {
                let index = u64::from(*index);
                if !blob.cache.has(index) {
                    blob.unread.set(index, blob.cache.extents());
                    extents.push(index);
                }
            }
        }
        let flights = claim.ours.iter().map(|(_, f)| Arc::clone(f)).collect();
        worker::submit(&blob, &source, claim.ours);
        self.cost += cost;
        self.under_way.push_back(Batch {
            blob,
            flights,
            extents,
            cost,
        });
        Ok(())
    }

    fn wait_for_turn(&self, blob: &Blob) -> Result<(), AheadEnd> {
        loop {
            if self.cancel.load(Ordering::Acquire) {
                return Err(AheadEnd::Cancelled);
            }
            let due = self.options.bytes_per_second.map_or(0, |rate| {
                // Milliseconds that what was fetched should have taken.
                self.report.fetched.saturating_mul(1000) / rate.max(1)
            });
            let early = u128::from(due) > self.begun.elapsed().as_millis();
            let others = self.options.yields && blob.fetcher.readers_waiting() > 0;
            if !early && !others {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Waits for the oldest batch under way; `false` if there is none.
    fn land(&mut self) -> Result<bool, AheadEnd> {
        let Some(batch) = self.under_way.pop_front() else {
            return Ok(false);
        };
        self.cost = self.cost.saturating_sub(batch.cost);
        let deadline = Instant::now() + batch.blob.fetcher.config.read_timeout;
        let (mut failed, mut full) = (false, false);
        for flight in &batch.flights {
            match flight.wait(deadline) {
                Some(Outcome::Stored) => {}
                Some(Outcome::Passed(_)) => full = true,
                // The store has it elsewhere by now; whoever reads it asks again.
                Some(Outcome::Moved | Outcome::Failed(_)) | None => failed = true,
            }
        }
        let here = |index: &u64| batch.blob.cache.has(*index);
        let fetched: u64 = batch
            .extents
            .iter()
            .filter(|index| here(index))
            .map(|index| batch.blob.len_of(*index))
            .sum();
        for index in batch.extents.iter().filter(|index| !here(index)) {
            let _ = batch.blob.unread.take(*index);
        }
        let unread = &batch.blob.unread;
        unread.fetched.fetch_add(fetched, Ordering::Relaxed);
        batch.blob.fetcher.meter.ahead(0, fetched);
        if batch.blob.taps.watched() {
            batch.tell();
        }
        self.report.fetched += fetched;
        self.failures = if failed { self.failures + 1 } else { 0 };
        if full {
            return Err(AheadEnd::NoRoom);
        }
        if self.failures >= MAX_FAILURES {
            return Err(AheadEnd::Failed);
        }
        Ok(true)
    }
}

/// Readers that wait for a fetch right now, and since when.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    count: AtomicU64,
    since: Mutex<BTreeMap<u64, (Instant, LayerId)>>,
    next: AtomicU64,
}

/// One of them; ends on drop.
#[derive(Debug)]
pub(super) struct WaitingReader<'a> {
    waiting: &'a Waiting,
    number: u64,
}

impl Waiting {
    /// A reader of a layer waits.
    pub(super) fn enter(&self, layer: LayerId) -> WaitingReader<'_> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::AcqRel);
        self.since.lock().insert(number, (Instant::now(), layer));
        WaitingReader {
            waiting: self,
            number,
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// How long the one that waits longest has waited.
    pub(super) fn oldest(&self) -> Option<Duration> {
        let since = self.since.lock();
        since.values().map(|(at, _)| at.elapsed()).max()
    }

    /// Readers that wait, and how long the one that waits longest has, by layer.
    pub(super) fn by_layer(&self) -> BTreeMap<LayerId, (u64, Duration)> {
        let mut layers: BTreeMap<LayerId, (u64, Duration)> = BTreeMap::new();
        for (at, layer) in self.since.lock().values() {
            let (count, oldest) = layers.entry(*layer).or_default();
            *count += 1;
            *oldest = (*oldest).max(at.elapsed());
        }
        layers
    }
}

impl Drop for WaitingReader<'_> {
    fn drop(&mut self) {
        self.waiting.count.fetch_sub(1, Ordering::AcqRel);
        self.waiting.since.lock().remove(&self.number);
    }
}
