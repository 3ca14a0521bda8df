//! How much is fetched for what is read, and in how large requests.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "tests"
)]

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{Fixture, Gauge, config, data_of, noise, publish, read};
use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::rng::Rng;
use layerpack_layerfs::fetch::Blob;
use layerpack_store::{BlobStore, LayerStore, MemStore};

const MIB: u64 = 1 << 20;
const LARGE: u64 = 48 * MIB;

/// A large file, and many of all sizes.
fn large() -> Fixture {
    let scratch = ScratchDir::new("sizing").unwrap();
    let source = scratch.join("source");
    std::fs::create_dir_all(source.join("small")).unwrap();
    for i in 0..300_usize {
        let bytes = noise(i as u64 + 10, 200 + (i * i) % 90_000);
        std::fs::write(source.join(format!("small/{i}")), bytes).unwrap();
    }
    // Not a whole number of blocks: the next file is not adjacent.
    std::fs::write(source.join("large"), noise(1, LARGE as usize + 100)).unwrap();
    let blobs: Arc<dyn BlobStore> = Arc::new(MemStore::new());
    let store = LayerStore::new(blobs.clone());
    let published = publish(&store, "base/sizes:1", &source, &[]);
    let manifest = store.manifest(&published.digest).unwrap();
    let data = data_of(&store, &manifest);
    Fixture {
        store,
        blobs,
        manifest,
        data,
        scratch,
    }
}

/// Counts the frames that reads touch, as the store has them.
struct Touched<'a> {
    f: &'a Fixture,
    frames: BTreeSet<u32>,
}

impl Touched<'_> {
    fn read(&mut self, blob: &Arc<Blob>, offset: u64, len: usize) {
        read(blob, &self.f.data, offset, len).unwrap();
        let map = blob.map();
        let end = (offset + len as u64).min(map.data_size());
        let locator = self.f.locator();
        for index in map.extents_in(offset..end) {
            self.frames.insert(locator.extent(index).unwrap().0);
        }
    }

    fn bytes(&self) -> u64 {
        let locator = self.f.locator();
        let frames = self.frames.iter();
        frames
            .map(|frame| u64::from(locator.frames()[*frame as usize].stored_len))
            .sum()
    }
}

fn fresh(f: &Fixture, name: &str) -> (Arc<Gauge>, Arc<Blob>) {
    let gauge = Gauge::new(f.blobs.clone());
    let store: Arc<dyn BlobStore> = gauge.clone();
    let blob = f.blob(store, &f.scratch.join(name), config());
    (gauge, blob)
}

fn touched(f: &Fixture) -> Touched<'_> {
    Touched {
        f,
        frames: BTreeSet::new(),
    }
}

/// Waits until nothing is on its way, then says what was fetched.
fn fetched(gauge: &Gauge, blob: &Arc<Blob>) -> u64 {
    blob.fetcher().close(common::LONG);
    gauge.bytes.load(Ordering::SeqCst)
}

#[test]
fn little_more_is_fetched_than_what_reads_touch() {
    let f = large();
    // Random reads of pages.
    let (gauge, blob) = fresh(&f, "random");
    let mut seen = touched(&f);
    let mut rng = Rng::new(5);
    for _ in 0..300 {
        let page = rng.next_u64() % (f.data.len() as u64 / 4096);
        seen.read(&blob, page * 4096, 4096);
    }
    let bytes = fetched(&gauge, &blob);
    println!("random: {bytes} for {}", seen.bytes());
    assert!(
        bytes * 5 <= seen.bytes() * 6,
        "{bytes} for {}",
        seen.bytes()
    );

    // Small files from beginning to end, in another order than they lie in.
    let (gauge, blob) = fresh(&f, "small");
    let mut seen = touched(&f);
    let extents = blob.map().extents().to_vec();
    let small: Vec<_> = extents
        .iter()
        .filter(|e| e.data_offset > LARGE + 4096)
        .collect();
    for i in 0..small.len() {
        let extent = small[i * 7919 % small.len()];
        seen.read(&blob, extent.data_offset, extent.len as usize);
        if i > small.len() / 3 {
            break;
        }
    }
    let bytes = fetched(&gauge, &blob);
    println!("small files: {bytes} for {}", seen.bytes());
    assert!(
        bytes * 5 <= seen.bytes() * 6,
        "{bytes} for {}",
        seen.bytes()
    );

    // In order, and then no further: at any point.
    for stop in [MIB / 2, 3 * MIB, 11 * MIB, 30 * MIB] {
        let (gauge, blob) = fresh(&f, &format!("stop{stop}"));
        let mut seen = touched(&f);
        for offset in (0..stop).step_by(64 << 10) {
            seen.read(&blob, offset, 64 << 10);
        }
        let bytes = fetched(&gauge, &blob);
        println!("stopped at {stop}: {bytes} for {}", seen.bytes());
        assert!(
            bytes * 5 <= seen.bytes() * 6 + MIB,
            "{stop}: {bytes} for {}",
            seen.bytes()
        );
    }
}

#[test]
fn requests_grow_with_what_is_read_in_order() {
    let f = large();
    let (gauge, blob) = fresh(&f, "order");
    let piece = 128 << 10;
    for offset in (0..LARGE).step_by(piece) {
        read(&blob, &f.data, offset, piece).unwrap();
    }
    let seen = gauge.seen.lock().unwrap().clone();
    let lens: Vec<u64> = seen
        .iter()
        .map(|(_, range)| range.end - range.start)
        .collect();
    println!("{} requests: {lens:?}", lens.len());
    assert!(lens[0] <= 512 << 10, "the first is small: {}", lens[0]);
    let longest = *lens.iter().max().unwrap();
    assert!(longest >= 2 * MIB, "{longest}");
    let (first, last) = lens.split_at(lens.len() / 2);
    let mean = |of: &[u64]| of.iter().sum::<u64>() / of.len() as u64;
    assert!(mean(last) > 2 * mean(first), "{lens:?}");
    let bytes = fetched(&gauge, &blob);
    assert!(bytes * 5 <= f.locator().stored_bytes() * 6);
}

#[test]
fn small_files_in_their_order_come_in_few_requests() {
    let scratch = ScratchDir::new("sizing-small").unwrap();
    let source = scratch.join("source");
    std::fs::create_dir_all(&source).unwrap();
    for i in 0..1500_usize {
        let bytes = noise(i as u64 + 10, 1000 + (i * 7919) % 40_000);
        std::fs::write(source.join(format!("{i:05}")), bytes).unwrap();
    }
    let blobs: Arc<dyn BlobStore> = Arc::new(MemStore::new());
    let store = LayerStore::new(blobs.clone());
    let published = publish(&store, "base/small:1", &source, &[]);
    let manifest = store.manifest(&published.digest).unwrap();
    let data = data_of(&store, &manifest);
    let f = Fixture {
        store,
        blobs,
        manifest,
        data,
        scratch,
    };
    let frames = f.locator().frames().len();
    // File by file, as `tar` reads a directory: to the end, and no further than some file.
    for part in [1, 3, 8] {
        let (gauge, blob) = fresh(&f, &format!("part{part}"));
        let mut seen = touched(&f);
        let extents = blob.map().extents().to_vec();
        for extent in &extents[..extents.len() / part] {
            seen.read(&blob, extent.data_offset, extent.len as usize);
        }
        let bytes = fetched(&gauge, &blob);
        let requests = gauge.seen.lock().unwrap().len();
        println!(
            "1/{part}: {requests} requests, {bytes} bytes for {} of {frames} frames",
            seen.frames.len()
        );
        assert!(bytes * 5 <= seen.bytes() * 6 + MIB, "1/{part}: {bytes}");
        if part == 1 {
            assert!(
                requests * 4 <= frames,
                "{requests} requests for {frames} frames"
            );
        }
    }
}
