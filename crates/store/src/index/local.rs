//! The node's copy of a store's index: runs in a directory named after the store's address.
//!
//! Opening lists the store's segments, opens the runs, reads the segments that no run has, and
//! merges runs of similar size. Names of runs come from the segments in them and files get their
//! names when they are complete, so processes that share the directory cannot disturb each other: at
//! worst two do the same work, which a lock avoids where it can. A run that is damaged is removed
//! with a warning and its segments are read again; a run whose segments the store no longer has is
//! not used and goes later.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use zerocopy::little_endian::U32;

use super::many::{self, Hit};
use super::merge::merge;
use super::run::{Run, RunPack, block_of, to_usize};
use super::run_writer::{RunWriter, SUFFIX, TEMPORARY};
use super::stream::{SegmentStream, segments, settled_segments};
use super::{IndexStats, Place};
use crate::digest::Digest;
use crate::error::StoreError;
use crate::format::index::{IndexSegment, WireChunk};
use crate::key::Key;
use crate::layer::LayerStore;
use crate::layer::again::is_wrong;
use crate::parallel::{Bounds, Order, for_each};

/// Bytes of segments that become one run when they are read.
const BATCH: u64 = 8 << 20;
/// Segments from this size on become a run of their own without being in memory.
const LARGE: u64 = 8 << 20;
/// Reading segments: requests at once, and bytes in memory.
const READ: Bounds = Bounds {
    threads: 8,
    bytes: 12 << 20,
};
/// A run is merged with those up to this many times its size.
const RATIO: u64 = 4;
/// Runs merged at once, at most.
const FAN_IN: usize = 64;
/// Runs beyond which the smallest are merged whatever their sizes.
const MAX_RUNS: usize = 12;
/// Age at which a temporary is taken for one of a dead process, and a run without a segment of the
/// store for one that nobody is about to use.
const STALE: Duration = Duration::from_secs(60 * 60);
/// How long to wait for another process that reads the same segments.
const PATIENCE: Duration = Duration::from_secs(60);
/// Digests that a thread looks up together: fewer are not worth one, more need more memory (64 bytes
/// each).
const MIN_SHARE: usize = 1 << 12;
const MAX_SHARE: usize = 1 << 18;
/// Bytes of such shares in memory.
const SHARES: u64 = 64 << 20;
/// Looks at store and directory before going on with what there is.
const ATTEMPTS: usize = 4;

/// For keys that are no segment's: reading them says so.
const NOT_A_SEGMENT: Digest = Digest::from_bytes([0; Digest::LEN]);

/// Why the local index cannot be used.
#[derive(Debug)]
pub(super) enum Failure {
    /// The directory: do without it.
    Cache(io::Error),
    /// The store.
    Store(StoreError),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Cache(error)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

#[derive(Debug)]
pub(super) struct LocalIndex {
    store: LayerStore,
    dir: PathBuf,
    runs: Vec<Run>,
    /// Segments that are damaged in the store: not read again.
    bad: HashSet<Key>,
    buffer: Vec<u8>,
    found: Vec<(u32, u32)>,
}

impl LocalIndex {
    pub(super) fn open(
        store: &LayerStore,
        cache: &Path,
        warnings: &mut Vec<String>,
    ) -> Result<Self, Failure> {
        let id: String = Digest::of(store.url().as_bytes())
            .hex()
            .chars()
            .take(32)
            .collect();
        let mut index = Self {
            store: store.clone(),
            dir: cache.join(id),
            runs: Vec::new(),
            bad: HashSet::new(),
            buffer: Vec::new(),
            found: Vec::new(),
        };
        fs_err::create_dir_all(&index.dir)?;
        sweep(&index.dir);
        index.refresh(warnings)?;
        Ok(index)
    }

    /// Brings the runs to what the store has now.
    fn refresh(&mut self, warnings: &mut Vec<String>) -> Result<(), Failure> {
        let mut lock = None;
        for _ in 0..ATTEMPTS {
            let mut listed = segments(&self.store)?;
            let mut live = digests(&listed);
            self.runs = scan(&self.dir, &live, warnings)?;
            if self.runs.iter().any(|run| run.live.contains(&false)) {
                // Gone, or compacted just now: then what replaced it may be listed only now.
                listed = settled_segments(&self.store)?;
                live = digests(&listed);
                for run in &mut self.runs {
                    set_live(run, &live);
                }
            }
            let covered: HashSet<&Digest> =
                self.runs.iter().flat_map(|run| run.segments()).collect();
            let missing: Vec<(Key, Option<Digest>, u64)> = listed
                .into_iter()
                .filter(|(key, digest, _)| {
                    !self.bad.contains(key) && !digest.is_some_and(|d| covered.contains(&d))
                })
                .collect();
            if missing.is_empty() {
                if self.tidy(&live, &mut lock, warnings)? {
                    return Ok(());
                }
                continue;
            }
            if lock.is_none() {
                let began = Instant::now();
                lock = Some(Lock::take(&self.dir, PATIENCE)?);
                // Whoever had it may have read them meanwhile.
                if began.elapsed() > Lock::PAUSE / 2 {
                    continue;
                }
            }
            self.mirror(&missing, warnings)?;
        }
        // Segments come and go, or runs break, faster than they are read: what is missing now costs
        // chunks their sharing.
        Ok(())
    }

    /// Reads segments into new runs.
    fn mirror(
        &mut self,
        missing: &[(Key, Option<Digest>, u64)],
        warnings: &mut Vec<String>,
    ) -> Result<(), Failure> {
        let (large, small): (Vec<_>, Vec<_>) =
            missing.iter().partition(|(_, _, size)| *size >= LARGE);
        let mut batch = Batch::default();
        let (store, dir, bad) = (&self.store, &self.dir, &mut self.bad);
        let mut refuse = |key: &Key, error: StoreError| {
            if !error.is_damage() {
                return Err(Failure::Store(error));
            }
            warnings.push(format!("not used: {error}"));
            bad.insert(key.clone());
            Ok(())
        };
        for_each(
            &small,
            READ,
            Order::Kept,
            |(_, _, size)| size.saturating_mul(3),
            |(key, _, _)| store.index_segment(key),
            |number, result| {
                let Some((key, digest, _)) = small.get(number) else {
                    return Ok(());
                };
                match result {
                    // `index_segment` has found that the key is the digest.
                    Ok(Some(segment)) => batch.add(digest.unwrap_or(NOT_A_SEGMENT), &segment),
                    Ok(None) => {} // deleted meanwhile: the next look tells
                    Err(error) => refuse(key, error)?,
                }
                if batch.chunks.len() as u64 * 40 >= BATCH {
                    std::mem::take(&mut batch).write(dir)?;
                }
                Ok::<(), Failure>(())
            },
        )?;
        if !batch.segments.is_empty() {
            batch.write(dir)?;
        }
        for (key, digest, _) in large {
            let id = digest.unwrap_or(NOT_A_SEGMENT);
            let copied = match copy(store, dir, key, id) {
                // Perhaps on the way.
                Err(Failure::Store(error)) if is_wrong(&error) => copy(store, dir, key, id),
                copied => copied,
            };
            match copied {
                Ok(()) => {}
                Err(Failure::Store(StoreError::Missing { .. })) => {}
                Err(Failure::Store(error)) => refuse(key, error)?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Merges runs of similar size, and those that are mostly of segments that are gone. False: a
    /// run was found damaged and removed.
    fn tidy(
        &mut self,
        live: &HashSet<Digest>,
        lock: &mut Option<Lock>,
        warnings: &mut Vec<String>,
    ) -> Result<bool, Failure> {
        while let Some(count) = self.pick_merge() {
            if lock.is_none() {
                *lock = Some(Lock::take(&self.dir, Duration::ZERO)?);
            }
            if !lock.as_ref().is_some_and(Lock::is_held) {
                return Ok(true); // another process is at it
            }
            let (inputs, _) = self.runs.split_at(count.min(self.runs.len()));
            let merged = merge(&self.dir, &inputs.iter().collect::<Vec<_>>(), live);
            let path = match merged {
                Ok(path) => path,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    let before = self.runs.len();
                    self.runs.retain(|run| match run.check_all() {
                        Ok(()) => true,
                        Err(error) => {
                            discard(run, &error, warnings);
                            false
                        }
                    });
                    return Ok(self.runs.len() == before);
                }
                Err(error) => return Err(error.into()),
            };
            for run in self.runs.drain(..count) {
                if run.path() != path {
                    let _ = fs_err::remove_file(run.path()); // gone already, or later found redundant
                }
            }
            let mut run = Run::open(&path)?;
            set_live(&mut run, live);
            self.runs.push(run);
        }
        Ok(true)
    }

    /// Sorts the runs by size and says how many of the smallest should be one.
    fn pick_merge(&mut self) -> Option<usize> {
        self.runs.sort_by_key(Run::chunks);
        // Up to the last that is not much larger than all smaller ones together: what stays then
        // grows by a factor from each to the next, and a merge rewrites a bounded multiple of what
        // was new.
        let mut sum = 0_u64;
        let mut count = 0;
        for (number, run) in self.runs.iter().take(FAN_IN).enumerate() {
            if run.chunks() <= sum.saturating_mul(RATIO) {
                count = number + 1;
            }
            sum += run.chunks();
        }
        if count < 2 && self.runs.len() > MAX_RUNS {
            count = self.runs.len() - MAX_RUNS + 1;
        }
        if count >= 2 {
            return Some(count);
        }
        // Mostly dead: brought to the front, alone.
        let dead = self.runs.iter().position(|run| {
            let dead = run.live.iter().filter(|live| !**live).count();
            dead * 2 > run.live.len()
        })?;
        self.runs.swap(0, dead);
        Some(1)
    }

    /// The places of a chunk in all runs. A damaged run is removed and made again on the way.
    pub(super) fn find(
        &mut self,
        digest: &Digest,
        places: &mut Vec<Place>,
        warnings: &mut Vec<String>,
    ) -> Result<(), StoreError> {
        let before = places.len();
        for _ in 0..ATTEMPTS {
            places.truncate(before);
            let Err((number, error)) = self.try_find(digest, places) else {
                return Ok(());
            };
            self.make_again(number, &error, warnings)?;
        }
        places.truncate(before);
        Ok(())
    }

    /// Removes a damaged run and reads its segments again.
    fn make_again(
        &mut self,
        number: usize,
        error: &io::Error,
        warnings: &mut Vec<String>,
    ) -> Result<(), StoreError> {
        let run = self.runs.remove(number);
        discard(&run, error, warnings);
        match self.refresh(warnings) {
            Ok(()) => Ok(()),
            Err(Failure::Store(error)) => Err(error),
            Err(Failure::Cache(error)) => {
                warnings.push(format!(
                    "the index cache {} cannot be used: {error}; chunks may be stored twice",
                    self.dir.display()
                ));
                Ok(())
            }
        }
    }

    /// An error with the number of the run that has it.
    fn try_find(
        &mut self,
        digest: &Digest,
        places: &mut Vec<Place>,
    ) -> Result<(), (usize, io::Error)> {
        for (number, run) in self.runs.iter().enumerate() {
            self.found.clear();
            run.find(digest, &mut self.buffer, &mut self.found)
                .map_err(|e| (number, e))?;
            for &(pack, chunk) in &self.found {
                let record = run.pack(pack).map_err(|e| (number, e))?;
                let place = Place {
                    pack: record.pack(),
                    chunk,
                };
                // Another run may have the same segment.
                if run.is_live(&record) && !places.contains(&place) {
                    places.push(place);
                }
            }
        }
        Ok(())
    }

    /// The places of many chunks, as [`LocalIndex::find`] tells those of one. A place may be told
    /// twice.
    pub(super) fn find_many(
        &mut self,
        digests: &[Digest],
        threads: usize,
        each: &mut dyn FnMut(usize, Place),
        warnings: &mut Vec<String>,
    ) -> Result<(), StoreError> {
        for _ in 0..ATTEMPTS {
            match self.try_find_many(digests, threads, each) {
                Ok(()) => break,
                Err((number, error)) => self.make_again(number, &error, warnings)?,
            }
        }
        Ok(())
    }

    /// An error with the number of the run that has it.
    fn try_find_many(
        &self,
        digests: &[Digest],
        threads: usize,
        each: &mut dyn FnMut(usize, Place),
    ) -> Result<(), (usize, io::Error)> {
        let share = digests.len().div_ceil(threads.max(1));
        let share = share.clamp(MIN_SHARE, MAX_SHARE);
        let parts: Vec<&[Digest]> = digests.chunks(share).collect();
        let bounds = Bounds {
            threads,
            bytes: SHARES,
        };
        let look_up = |part: &&[Digest]| -> Result<Vec<(usize, Hit)>, (usize, io::Error)> {
            let mut wanted: Vec<(Digest, u32)> = part.iter().copied().zip(0..).collect();
            // By what tells them apart in all but a few of 2^64.
            wanted.sort_unstable_by_key(|(digest, _)| block_of(digest, 64));
            let (mut hits, mut all) = (Vec::with_capacity(part.len()), Vec::new());
            for (number, run) in self.runs.iter().enumerate() {
                hits.clear();
                many::find_many(run, &wanted, &mut hits).map_err(|e| (number, e))?;
                all.extend(hits.iter().map(|hit| (number, *hit)));
            }
            Ok(all)
        };
        for_each(
            &parts,
            bounds,
            Order::Free,
            |part| part.len() as u64 * 64,
            look_up,
            |part, hits| {
                for (number, hit) in hits? {
                    let Some(run) = self.runs.get(number) else {
                        continue;
                    };
                    let record = run.pack(hit.pack).map_err(|e| (number, e))?;
                    if run.is_live(&record) {
                        let place = Place {
                            pack: record.pack(),
                            chunk: hit.chunk,
                        };
                        each(part * share + to_usize(hit.wanted.into()), place);
                    }
                }
                Ok(())
            },
        )
    }

    pub(super) fn stats(&self) -> IndexStats {
        IndexStats {
            chunks: self.runs.iter().map(Run::chunks).sum(),
            parts: self.runs.len() as u64,
            disk_bytes: self.runs.iter().map(Run::file_len).sum(),
            memory_bytes: self.runs.iter().map(Run::memory).sum(),
        }
    }
}

/// Segments that become one run.
#[derive(Debug, Default)]
struct Batch {
    segments: Vec<Digest>,
    packs: Vec<RunPack>,
    chunks: Vec<WireChunk>,
}

impl Batch {
    fn add(&mut self, id: Digest, segment: &IndexSegment) {
        let number = u32::try_from(self.segments.len()).unwrap_or(u32::MAX); // a batch is 16 MiB
        self.segments.push(id);
        let first = u32::try_from(self.packs.len()).unwrap_or(u32::MAX);
        self.packs
            .extend(segment.packs().iter().map(|p| RunPack::new(p, number)));
        self.chunks
            .extend(segment.entries().iter().map(|e| WireChunk {
                digest: e.digest,
                pack: U32::new(e.pack.saturating_add(first)),
                chunk: U32::new(e.chunk),
            }));
    }

    fn write(mut self, dir: &Path) -> io::Result<()> {
        // Stable: made for runs that are sorted already.
        self.chunks.sort_by_key(|c| c.digest);
        let mut writer = RunWriter::create(dir, self.chunks.len() as u64)?;
        for chunk in self.chunks {
            writer.push(chunk)?;
        }
        writer.finish(&self.packs, &self.segments).map(|_| ())
    }
}

/// A large segment becomes a run of its own.
fn copy(store: &LayerStore, dir: &Path, key: &Key, id: Digest) -> Result<(), Failure> {
    let Some(mut stream) = SegmentStream::open(store, key)? else {
        return Ok(()); // deleted meanwhile
    };
    let packs: Vec<RunPack> = stream.packs().iter().map(|p| RunPack::new(p, 0)).collect();
    let mut writer = RunWriter::create(dir, stream.left())?;
    while let Some(chunks) = stream.next()? {
        for chunk in chunks {
            writer.push(*chunk)?;
        }
    }
    writer.finish(&packs, &[id])?;
    Ok(())
}

/// Opens the directory's runs that are of use.
fn scan(dir: &Path, live: &HashSet<Digest>, warnings: &mut Vec<String>) -> io::Result<Vec<Run>> {
    let mut runs = Vec::new();
    for entry in fs_err::read_dir(dir)? {
        let path = entry?.path();
        if !path.to_string_lossy().ends_with(SUFFIX) {
            continue;
        }
        match Run::open(&path) {
            Ok(mut run) => {
                set_live(&mut run, live);
                if run.live.contains(&true) {
                    runs.push(run);
                } else if age(&path).is_some_and(|age| age > STALE) {
                    let _ = fs_err::remove_file(&path);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {} // merged meanwhile
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                tracing::debug!(path = %path.display(), "made again: it is of an older version");
                let _ = fs_err::remove_file(&path);
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                removed(&path, &error, warnings);
            }
            Err(error) => return Err(error),
        }
    }
    // Those whose segments larger runs have were merged, by a process that ended before it removed
    // them.
    runs.sort_by_key(|run| std::cmp::Reverse(run.segments().len()));
    let mut seen: HashSet<Digest> = HashSet::new();
    runs.retain(|run| {
        let used = run
            .segments()
            .iter()
            .zip(&run.live)
            .any(|(segment, live)| *live && !seen.contains(segment));
        if used {
            seen.extend(run.segments());
        } else {
            let _ = fs_err::remove_file(run.path());
        }
        used
    });
    Ok(runs)
}

fn digests(listed: &[(Key, Option<Digest>, u64)]) -> HashSet<Digest> {
    listed.iter().filter_map(|(_, digest, _)| *digest).collect()
}

fn set_live(run: &mut Run, live: &HashSet<Digest>) {
    run.live = run.segments().iter().map(|s| live.contains(s)).collect();
}

fn discard(run: &Run, error: &io::Error, warnings: &mut Vec<String>) {
    removed(run.path(), error, warnings);
}

fn removed(path: &Path, error: &io::Error, warnings: &mut Vec<String>) {
    let text = format!(
        "the index cache file {} is damaged and is made again: {error}",
        path.display()
    );
    tracing::warn!("{text}");
    warnings.push(text);
    let _ = fs_err::remove_file(path); // else it is found damaged again
}

fn age(path: &Path) -> Option<Duration> {
    let modified = fs_err::symlink_metadata(path).ok()?.modified().ok()?;
    modified.elapsed().ok()
}

/// Removes what killed processes left. Best effort.
fn sweep(dir: &Path) {
    let Ok(entries) = fs_err::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten() {
        let temporary = entry.file_name().to_string_lossy().starts_with(TEMPORARY);
        if temporary && age(&entry.path()).is_some_and(|age| age > STALE) {
            let _ = fs_err::remove_file(entry.path());
        }
    }
}

/// Keeps processes from doing the same work; nothing is wrong without it. The system frees it when
/// its process ends.
#[derive(Debug)]
struct Lock {
    _file: File,
    held: bool,
}

impl Lock {
    const PAUSE: Duration = Duration::from_millis(50);

    /// Waits at most `patience`, then goes on without.
    fn take(dir: &Path, patience: Duration) -> io::Result<Self> {
        let file = fs_err::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(dir.join("lock"))?
            .into_parts()
            .0;
        let until = Instant::now() + patience;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    return Ok(Self {
                        _file: file,
                        held: true,
                    });
                }
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                    std::thread::sleep(Self::PAUSE);
                }
                // Also a filesystem without locks.
                Err(_) => {
                    return Ok(Self {
                        _file: file,
                        held: false,
                    });
                }
            }
        }
    }

    const fn is_held(&self) -> bool {
        self.held
    }
}
