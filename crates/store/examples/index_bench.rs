//! Measures the chunk index: `index_bench [CHUNKS] [DIR]` (50 million; a temporary directory).
//!
//! The store is made up: segments of 100,000 chunks that are generated again whenever they are
//! read, so that only the local index takes disk. The chunks' digests are the outputs of a fast
//! generator, uniform as real ones are. The index is read into the page cache before each of the
//! first figures; then it is dropped from there before each, and fewer are looked up.
#![allow(clippy::print_stdout, reason = "a program that reports")]

use std::error::Error;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use layerpack_store::format::index::{IndexEntry, IndexPack, IndexSegment};
use layerpack_store::{
    BlobStore, BlobWriter, ChunkIndex, Digest, Key, LayerStore, ObjectInfo, PutMode, PutOutcome,
    Result, StoreError,
};

/// Chunks of a segment: a layer of about 5 GB.
const SEGMENT: u64 = 100_000;
/// Chunks of a pack.
const PACK: u64 = 5000;
/// Look-ups of one measurement.
const LOOKUPS: u64 = 500_000;

/// The file with the segments' names.
const SEGMENTS: &str = "segments.txt";
/// Third argument of the process that looks up: `index_bench CHUNKS DIR search` on a directory that
/// was kept.
const SEARCH: &str = "search";

/// A store that has index segments only, made when they are read.
#[derive(Debug)]
struct Synthetic {
    segments: Vec<(Key, u64)>,
    chunks: u64,
}

/// SplitMix64.
const fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn digest(n: u64) -> Digest {
    let mut bytes = [0; 32];
    for (i, part) in (0_u64..).zip(bytes.chunks_exact_mut(8)) {
        part.copy_from_slice(&mix(n.wrapping_mul(4).wrapping_add(i)).to_le_bytes());
    }
    Digest::from_bytes(bytes)
}

fn segment(number: u64, chunks: u64) -> Result<Vec<u8>> {
    let first = number * SEGMENT;
    let count = SEGMENT.min(chunks - first);
    let packs = (0..count.div_ceil(PACK))
        .map(|p| IndexPack {
            id: digest(u64::MAX / 2 + number * 1000 + p),
            size: 64 << 20,
            table_offset: 63 << 20,
        })
        .collect();
    let entries = (0..count)
        .map(|i| IndexEntry {
            digest: digest(first + i),
            pack: u32::try_from(i / PACK).unwrap_or(0),
            chunk: u32::try_from(i % PACK).unwrap_or(0),
        })
        .collect();
    Ok(IndexSegment::new(packs, entries)?.to_bytes()?)
}

impl Synthetic {
    fn new(chunks: u64) -> Result<Self> {
        let mut segments = Vec::new();
        for number in 0..chunks.div_ceil(SEGMENT) {
            let bytes = segment(number, chunks)?;
            segments.push((Key::index(&Digest::of(&bytes)), bytes.len() as u64));
        }
        Ok(Self { segments, chunks })
    }

    /// Notes the segments' names, which take a while to make.
    fn save(&self, dir: &Path) -> std::result::Result<(), Box<dyn Error>> {
        let line = |(key, size): &(Key, u64)| format!("{key} {size}\n");
        let lines: String = self.segments.iter().map(line).collect();
        Ok(fs_err::write(dir.join(SEGMENTS), lines)?)
    }

    fn load(chunks: u64, dir: &Path) -> std::result::Result<Self, Box<dyn Error>> {
        let mut segments = Vec::new();
        for line in fs_err::read_to_string(dir.join(SEGMENTS))?.lines() {
            let (key, size) = line.split_once(' ').ok_or("a segment has no size")?;
            segments.push((Key::new(key)?, size.parse()?));
        }
        Ok(Self { segments, chunks })
    }

    fn bytes(&self, key: &Key) -> Result<Option<Vec<u8>>> {
        let number = self.segments.iter().position(|(k, _)| k == key);
        number.map(|n| segment(n as u64, self.chunks)).transpose()
    }

    fn refuse<T>(&self, key: &str) -> Result<T> {
        Err(StoreError::InvalidUrl {
            url: self.url(),
            why: format!("{key} cannot be written"),
        })
    }
}

impl BlobStore for Synthetic {
    fn get(&self, key: &Key, _max_len: u64) -> Result<Option<Vec<u8>>> {
        self.bytes(key)
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        let bytes = self.bytes(key)?.unwrap_or_default();
        let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Ok(bytes
            .get(at(range.start)..at(range.end))
            .unwrap_or_default()
            .to_vec())
    }

    fn put(&self, key: &Key, _bytes: &[u8], _mode: PutMode) -> Result<PutOutcome> {
        self.refuse(key.as_str())
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        self.refuse("an object")
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        Ok(self.segments.iter().find(|(k, _)| k == key).map(|s| s.1))
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let mut listed: Vec<ObjectInfo> = self
            .segments
            .iter()
            .filter(|(key, _)| key.as_str().starts_with(prefix))
            .map(|(key, size)| ObjectInfo {
                key: key.clone(),
                size: *size,
                modified: None,
            })
            .collect();
        listed.sort_unstable();
        Ok(listed)
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        self.refuse(key.as_str())
    }

    fn url(&self) -> String {
        format!("synthetic://{}", self.chunks)
    }
}

/// Resident memory of this process now and at its peak, in MiB.
fn memory() -> (u64, u64) {
    let status = fs_err::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        status
            .lines()
            .find_map(|line| {
                line.strip_prefix(name)?
                    .split_whitespace()
                    .next()?
                    .parse()
                    .ok()
            })
            .unwrap_or(0_u64)
            / 1024
    };
    (field("VmRSS:"), field("VmHWM:"))
}

/// Drops the index from the page cache.
fn evict(dir: &Path) -> std::result::Result<(), Box<dyn Error>> {
    for entry in fs_err::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            evict(&path)?;
            continue;
        }
        let file = fs_err::File::open(&path)?;
        rustix::fs::fsync(file.file().as_fd())?;
        rustix::fs::fadvise(file.file().as_fd(), 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

/// Reads the index, so that it is in the page cache.
fn warm(dir: &Path) -> std::result::Result<(), Box<dyn Error>> {
    for entry in fs_err::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            warm(&path)?;
            continue;
        }
        std::io::copy(&mut fs_err::File::open(&path)?, &mut std::io::sink())?;
    }
    Ok(())
}

fn rate(n: u64, time: Duration) -> u64 {
    u64::try_from(u128::from(n) * 1_000_000_000 / time.as_nanos().max(1)).unwrap_or(u64::MAX)
}

/// Processor time of this process: what a look-up costs whatever else the machine does.
fn processor() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// One way to look chunks up.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// One by one.
    Alone,
    /// So many at a time, as a writer asks for a frame's or a piece of a file's.
    Together(usize),
    /// All, with so many threads.
    Threads(usize),
}

/// Looks all of `wanted` up in each way, after what `before` does.
fn look(
    what: &str,
    index: &mut ChunkIndex,
    wanted: &[Digest],
    expected: u64,
    before: &dyn Fn() -> std::result::Result<(), Box<dyn Error>>,
) -> std::result::Result<(), Box<dyn Error>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let ways = [
        Way::Alone,
        Way::Together(64),
        Way::Together(4096),
        Way::Threads(1),
        Way::Threads(threads),
    ];
    for way in ways {
        let mut known = vec![false; wanted.len()];
        let mut note = |number: usize| {
            if let Some(known) = known.get_mut(number) {
                *known = true;
            }
        };
        before()?;
        let (began, busy) = (Instant::now(), processor());
        match way {
            Way::Alone => {
                let mut places = Vec::new();
                for (number, digest) in wanted.iter().enumerate() {
                    places.clear();
                    index.find(digest, &mut places)?;
                    if !places.is_empty() {
                        note(number);
                    }
                }
            }
            Way::Together(count) => {
                for (part, digests) in wanted.chunks(count).enumerate() {
                    index.find_many(digests, 1, &mut |n, _| note(part * count + n))?;
                }
            }
            Way::Threads(threads) => index.find_many(wanted, threads, &mut |n, _| note(n))?,
        }
        let (wall, busy) = (began.elapsed(), processor().saturating_sub(busy));
        let found = known.iter().map(|known| u64::from(*known)).sum::<u64>();
        if found != expected {
            return Err(format!("{what}, {way:?}: {found} of {expected} chunks were found").into());
        }
        let count = wanted.len() as u64;
        println!(
            "{what}, {way:?}: {} look-ups/s, {} a second of processor time",
            rate(count, wall),
            rate(count, busy)
        );
    }
    Ok(())
}

/// What a process that builds a layer sees: the index is there already.
fn search(chunks: u64, dir: &Path) -> std::result::Result<(), Box<dyn Error>> {
    let store = LayerStore::new(Arc::new(Synthetic::load(chunks, dir)?));
    let began = Instant::now();
    let mut index = ChunkIndex::open(&store, Some(dir))?;
    println!(
        "opening again: {:.2} ms, {} bytes of tables in memory",
        began.elapsed().as_secs_f64() * 1000.0,
        index.stats().memory_bytes
    );
    let pick = |i: u64| mix(i ^ 0x5eed) % chunks;
    let hits: Vec<Digest> = (0..LOOKUPS).map(|i| digest(pick(i))).collect();
    let misses: Vec<Digest> = (0..LOOKUPS).map(|i| digest(chunks + pick(i))).collect();
    let before = memory().0;
    // What else runs on the machine may have emptied the page cache.
    let warm = || warm(dir);
    for round in 1..=3 {
        look(
            &format!("hits, warm, round {round}"),
            &mut index,
            &hits,
            LOOKUPS,
            &warm,
        )?;
        look(
            &format!("misses, warm, round {round}"),
            &mut index,
            &misses,
            0,
            &warm,
        )?;
    }
    let (now, peak) = memory();
    println!(
        "resident {now} MiB, {before} of them before the look-ups ({} for the digests looked up); peak {peak} MiB; tables {} MiB",
        (LOOKUPS * 64) >> 20,
        index.stats().memory_bytes >> 20
    );
    let cold = || evict(dir);
    let few = hits.get(..20_000).unwrap_or_default();
    let count = few.len() as u64;
    look(
        "hits, index not in the page cache",
        &mut index,
        few,
        count,
        &cold,
    )?;
    look(
        "misses, index not in the page cache",
        &mut index,
        &misses,
        0,
        &cold,
    )
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let chunks: u64 = arguments.next().map_or(Ok(50_000_000), |n| n.parse())?;
    let parent = arguments
        .next()
        .map_or_else(std::env::temp_dir, PathBuf::from);
    if arguments.next().as_deref() == Some(SEARCH) {
        return search(chunks, &parent);
    }
    let dir = tempfile::tempdir_in(parent)?;

    let began = Instant::now();
    let synthetic = Synthetic::new(chunks)?;
    synthetic.save(dir.path())?;
    let store = LayerStore::new(Arc::new(synthetic));
    println!(
        "{chunks} chunks in {} segments, made in {:.1} s",
        chunks.div_ceil(SEGMENT),
        began.elapsed().as_secs_f64()
    );

    let began = Instant::now();
    let index = ChunkIndex::open(&store, Some(dir.path()))?;
    let (stats, (now, peak)) = (index.stats(), memory());
    println!(
        "first opening: {:.1} s, making the segments anew included; {} runs, {:.2} bytes a chunk on disk; resident {now} MiB, peak {peak} MiB",
        began.elapsed().as_secs_f64(),
        stats.parts,
        stats.disk_bytes as f64 / chunks as f64,
    );
    drop(index);
    // Look-ups are another process's: what making the index left in memory is not theirs.
    let status = std::process::Command::new(std::env::current_exe()?)
        .arg(chunks.to_string())
        .arg(dir.path())
        .arg(SEARCH)
        .status()?;
    if status.success() {
        Ok(())
    } else {
        Err("the look-ups failed".into())
    }
}
