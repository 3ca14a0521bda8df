//! Which parts of a blob's cached bytes go first, and letting them go.
//!
//! Extents go by runs of [`RUN_BYTES`]. Each run has a heat: a read that reaches us warms it by one,
//! up to a limit, the hand that looks for room cools it by one as it passes, and a run that is cold
//! when the hand comes goes. So what is read often survives many rounds of the hand, what was read
//! once survives one, and a scan of a large layer does not push out what is in use. A run that
//! is fetched again after it went starts hotter than one that is fetched first.

use std::io;
use std::ops::Range;

use layerpack_store::Digest;

use super::blob::Blob;
use crate::cache::RUN_BYTES;
use crate::error::Result;
use crate::sync::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// Most that a run's heat can be.
pub(super) const MAX_HEAT: u8 = 7;
/// Set in the heat of a run that was evicted and not touched since.
const GHOST: u8 = 0x80;
/// Heat of a run that had gone and is wanted again.
const RETURN_HEAT: u8 = 3;
/// Runs that are evicted with one write of the checkpoint.
const BATCH: usize = 256;

/// Heats of a blob's runs, and how far the hand has come.
#[derive(Debug)]
pub(super) struct Heat {
    runs: Box<[AtomicU8]>,
    hand: AtomicU64,
    pinned: AtomicBool,
    /// Extents' bytes that were evicted since the blob was opened.
    pub(super) evicted: AtomicU64,
}

impl Heat {
    pub(super) fn new(size: u64) -> Self {
        let runs = size.div_ceil(RUN_BYTES);
        Self {
            runs: (0..runs).map(|_| AtomicU8::new(0)).collect(),
            hand: AtomicU64::new(0),
            pinned: AtomicBool::new(false),
            evicted: AtomicU64::new(0),
        }
    }

    fn of(&self, run: u64) -> Option<&AtomicU8> {
        self.runs.get(usize::try_from(run).ok()?)
    }

    /// A read of `range`. Counts of reads at the same time may be lost: it is a hint.
    pub(super) fn touch(&self, range: &Range<u64>) {
        for run in range.start / RUN_BYTES..range.end.div_ceil(RUN_BYTES) {
            if let Some(heat) = self.of(run) {
                let now = heat.load(Ordering::Relaxed);
                let next = if now & GHOST != 0 {
                    RETURN_HEAT
                } else {
                    (now + 1).min(MAX_HEAT)
                };
                if next != now {
                    heat.store(next, Ordering::Relaxed);
                }
            }
        }
    }

    /// Cools a run. Whether it was cold.
    fn cool(&self, run: u64) -> bool {
        let Some(heat) = self.of(run) else {
            return false;
        };
        let now = heat.load(Ordering::Relaxed) & !GHOST;
        if now == 0 {
            return true;
        }
        heat.store(now - 1, Ordering::Relaxed);
        false
    }

    fn gone(&self, run: u64) {
        if let Some(heat) = self.of(run) {
            heat.store(GHOST, Ordering::Relaxed);
        }
    }
}

/// Extents of one run that are no longer present and not yet punched.
struct Withdrawn {
    run: u64,
    extents: Vec<u64>,
}

/// What [`Blob::verify_cache`] found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Checked {
    /// Extents read and compared with their digests.
    pub extents: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Extents that were wrong; they are no longer present.
    pub damaged: u64,
    /// Extents that were wrong and in use: they are still there. None but a damaged disk or another
    /// program makes these.
    pub stuck: u64,
}

impl Blob {
    /// Whether eviction leaves the blob alone: it was told to, or the kernel reads the cache file by
    /// itself.
    #[must_use]
    pub fn pinned(&self) -> bool {
        self.heat.pinned.load(Ordering::Relaxed) || self.cache.is_frozen()
    }

    /// Has eviction leave the blob alone, or not.
    pub fn set_pinned(&self, pinned: bool) {
        self.heat.pinned.store(pinned, Ordering::Relaxed);
    }

    /// Bytes of extents evicted since the blob was opened.
    #[must_use]
    pub fn evicted_bytes(&self) -> u64 {
        self.heat.evicted.load(Ordering::Relaxed)
    }

    fn run_count(&self) -> u64 {
        self.map.data_size().div_ceil(RUN_BYTES)
    }

    /// Numbers of the extents that begin in a run.
    fn run_extents(&self, run: u64) -> Range<u64> {
        let all = self.map.extents();
        let below = |end: u64| all.partition_point(|e| e.data_offset < end) as u64;
        below(run.saturating_mul(RUN_BYTES))..below((run + 1).saturating_mul(RUN_BYTES))
    }

    pub(super) fn len_of(&self, index: u64) -> u64 {
        usize::try_from(index)
            .ok()
            .and_then(|at| self.map.extents().get(at))
            .map_or(0, |e| u64::from(e.len))
    }

    fn any_here(&self, run: u64) -> bool {
        self.run_extents(run)
            .any(|i| self.cache.has(i) || self.cache.suspect(i))
    }

    /// Moves the hand on until it has found `want` cold runs or reached the end, cooling what it
    /// passes. Returns the cold runs, and whether the end was reached (the next call begins anew).
    pub(super) fn victims(&self, want: u64) -> (Vec<u64>, bool) {
        let count = self.run_count();
        let mut run = self.heat.hand.load(Ordering::Relaxed);
        let mut found = Vec::new();
        while run < count {
            if found.len() as u64 >= want || found.len() >= BATCH {
                self.heat.hand.store(run, Ordering::Relaxed);
                return (found, false);
            }
            if self.any_here(run) && self.heat.cool(run) {
                found.push(run);
            }
            run += 1;
        }
        self.heat.hand.store(0, Ordering::Relaxed);
        (found, true)
    }

    /// All runs of which something is cached.
    pub(crate) fn cached_runs(&self) -> Vec<u64> {
        (0..self.run_count())
            .filter(|run| self.any_here(*run))
            .collect()
    }

    /// Evicts runs, as many as are not in use. Returns how many went. One thread of the process
    /// at a time.
    ///
    /// # Errors
    /// When presence cannot be taken back durably, or the filesystem has no holes; what was not
    /// punched then is still there.
    pub(crate) fn evict_runs(&self, runs: &[u64]) -> Result<u64> {
        let mut went = 0;
        for batch in runs.chunks(BATCH) {
            went += self.evict_batch(batch)?;
        }
        Ok(went)
    }

    fn evict_batch(&self, runs: &[u64]) -> Result<u64> {
        let mut withdrawn: Vec<Withdrawn> = Vec::with_capacity(runs.len());
        let mut failed = None;
        for run in runs {
            let Some(alone) = self.cache.try_alone(*run) else {
                continue;
            };
            // Looked at with the run to oneself, as `BlobCache::lend` wants it.
            if self.cache.is_frozen() {
                continue;
            }
            match self.cache.withdraw(&alone, self.run_extents(*run)) {
                Ok(extents) => withdrawn.push(Withdrawn { run: *run, extents }),
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
        }
        self.count_gone(&withdrawn);
        let all: Vec<u64> = withdrawn
            .iter()
            .flat_map(|w| w.extents.iter().copied())
            .collect();
        if let Err(e) = self.cache.forget(&all) {
            self.restore(&all);
            return Err(e);
        }
        let mut went = 0;
        for Withdrawn { run, extents } in withdrawn {
            // All that is absent of it, also what went another way.
            let whole: Vec<u64> = self.run_extents(run).collect();
            match self.punch(run, &whole) {
                Ok(true) => {
                    went += 1;
                    self.count_wasted(&extents);
                    self.heat.gone(run);
                }
                Ok(false) => self.restore(&extents),
                Err(e) => {
                    self.restore(&extents);
                    failed = failed.or(Some(crate::error::LayerfsError::Io {
                        action: "make a hole in the cache file of",
                        path: self.layer.hex().into(),
                        source: e,
                    }));
                }
            }
        }
        failed.map_or(Ok(went), Err)
    }

    /// Punches what is still absent of the extents; `false` if the run is in use again.
    fn punch(&self, run: u64, extents: &[u64]) -> io::Result<bool> {
        let Some(alone) = self.cache.try_alone(run) else {
            return Ok(false);
        };
        if self.cache.is_frozen() {
            return Ok(false);
        }
        let mut hole: Option<Range<u64>> = None;
        for index in extents {
            if self.cache.has(*index) || self.cache.suspect(*index) {
                continue;
            }
            let Some(range) = self.room_of(*index) else {
                continue;
            };
            match &mut hole {
                Some(hole) if hole.end == range.start => hole.end = range.end,
                _ => {
                    if let Some(done) = hole.replace(range) {
                        self.cache.punch(&alone, done)?;
                    }
                }
            }
        }
        if let Some(last) = hole {
            self.cache.punch(&alone, last)?;
        }
        Ok(true)
    }

    /// The bytes of an extent and the padding behind it, which belongs to nobody else.
    fn room_of(&self, index: u64) -> Option<Range<u64>> {
        let at = usize::try_from(index).ok()?;
        let extents = self.map.extents();
        let extent = extents.get(at)?;
        let end = extent.data_offset + u64::from(extent.len);
        let next = extents
            .get(at + 1)
            .map_or(self.map.data_size(), |e| e.data_offset);
        Some(extent.data_offset..end.next_multiple_of(4096).min(next.max(end)))
    }

    fn count_gone(&self, withdrawn: &[Withdrawn]) {
        let bytes: u64 = withdrawn
            .iter()
            .flat_map(|w| &w.extents)
            .map(|i| self.len_of(*i))
            .sum();
        self.counters.cached.fetch_sub(bytes, Ordering::Relaxed);
        self.heat.evicted.fetch_add(bytes, Ordering::Relaxed);
    }

    fn restore(&self, extents: &[u64]) {
        let back = self.cache.put_back(extents);
        let bytes: u64 = back.iter().map(|i| self.len_of(*i)).sum();
        self.counters.cached.fetch_add(bytes, Ordering::Relaxed);
        self.heat.evicted.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Gives back what lies in the file without being present: parts of writes that a full disk cut
    /// short, runs whose eviction a crash cut short.
    pub(crate) fn punch_absent(&self) {
        for run in 0..self.run_count() {
            let extents: Vec<u64> = self.run_extents(run).collect();
            if self.punch(run, &extents).is_err() {
                return;
            }
        }
    }

    /// Reads everything that is cached and compares it with its digests. What is wrong is no
    /// longer present afterwards.
    ///
    /// # Errors
    /// When presence cannot be taken back.
    pub fn verify_cache(&self) -> Result<Checked> {
        let mut checked = Checked::default();
        for run in 0..self.run_count() {
            let extents = self.run_extents(run);
            let range = run * RUN_BYTES..(run + 1) * RUN_BYTES;
            let held = self.cache.hold(&range);
            let here: Vec<u64> = extents
                .clone()
                .filter(|i| self.cache.has(*i) || self.cache.suspect(*i))
                .collect();
            let wrong: Vec<u64> = here.iter().copied().filter(|i| !self.right(*i)).collect();
            for index in here.iter().filter(|i| !wrong.contains(i)) {
                if self.cache.suspect(*index) {
                    self.cache.promote(*index);
                }
            }
            checked.extents += here.len() as u64;
            checked.bytes += here.iter().map(|i| self.len_of(*i)).sum::<u64>();
            drop(held);
            if !wrong.is_empty() {
                self.drop_wrong(run, &wrong, &mut checked)?;
            }
        }
        Ok(checked)
    }

    /// Whether the file has the extent's bytes. The caller holds its run.
    fn right(&self, index: u64) -> bool {
        let Some(extent) = usize::try_from(index)
            .ok()
            .and_then(|at| self.map.extents().get(at))
        else {
            return false;
        };
        let mut bytes = vec![0; usize::try_from(extent.len).unwrap_or(0)];
        self.cache.read(extent.data_offset, &mut bytes).is_ok()
            && Digest::of(&bytes) == extent.digest
    }

    fn drop_wrong(&self, run: u64, wrong: &[u64], checked: &mut Checked) -> Result<()> {
        if self.cache.is_frozen() {
            // The kernel goes on reading them whatever the bits say.
            checked.stuck += wrong.len() as u64;
            return Ok(());
        }
        // Readers of the run hold it for as long as they take.
        for _ in 0..100 {
            let Some(alone) = self.cache.try_alone(run) else {
                std::thread::sleep(std::time::Duration::from_millis(5));
                continue;
            };
            let still: Vec<u64> = wrong.iter().copied().filter(|i| !self.right(*i)).collect();
            let extents = self.cache.withdraw(&alone, still)?;
            drop(alone);
            checked.damaged += extents.len() as u64;
            self.count_gone(&[Withdrawn { run, extents }]);
            return Ok(());
        }
        checked.stuck += wrong.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_often_outlives_what_is_read_once() {
        let heat = Heat::new(4 * RUN_BYTES + 1);
        assert_eq!(heat.runs.len(), 5);
        for _ in 0..20 {
            heat.touch(&(0..1));
        }
        heat.touch(&(RUN_BYTES - 1..RUN_BYTES + 1));
        assert!(heat.cool(4), "never read");
        assert!(!heat.cool(1));
        assert!(heat.cool(1), "read once: one round");
        for _ in 0..MAX_HEAT {
            assert!(!heat.cool(0));
        }
        assert!(heat.cool(0));
        // What comes back is worth more than what comes first.
        heat.gone(0);
        assert!(heat.cool(0));
        heat.touch(&(0..1));
        for _ in 0..RETURN_HEAT {
            assert!(!heat.cool(0));
        }
        assert!(heat.cool(0));
    }
}
