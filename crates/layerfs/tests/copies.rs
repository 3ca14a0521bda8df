//! What one layer of a node has of a frame, another one copies instead of fetching it. Needs no
//! kernel feature.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    reason = "tests"
)]

mod common;

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{BOOT, Gauge, config, data_of, noise, publish, read, sample_tree};
use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::rng::Rng;
use layerpack_layerfs::cache::BlobCache;
use layerpack_layerfs::fetch::{Blob, BlobParts, FetchConfig, Fetcher};
use layerpack_store::{BlobStore, LayerStore, Manifest, MemStore};

/// A layer of the store, and what its data is.
struct Layer {
    manifest: Manifest,
    data: Vec<u8>,
}

/// The sample, the sample without its largest file, and the sample with a file more: all chunks of the
/// second are in the first one's frames, those of the third but for one file.
struct Family {
    gauge: Arc<Gauge>,
    store: LayerStore,
    layers: Vec<Layer>,
    scratch: ScratchDir,
}

fn family() -> Family {
    let scratch = ScratchDir::new("copies").unwrap();
    let gauge = Gauge::new(Arc::new(MemStore::new()));
    let store = LayerStore::new(gauge.clone() as Arc<dyn BlobStore>);
    let source = scratch.join("source");
    sample_tree(&source);
    let mut layers = Vec::new();
    for name in ["first", "less", "more"] {
        match name {
            "less" => std::fs::remove_file(source.join("larger")).unwrap(),
            "more" => std::fs::write(source.join("new"), noise(4000, 400_000)).unwrap(),
            _ => {}
        }
        let published = publish(&store, &format!("base/{name}:1"), &source, &[]);
        let manifest = store.manifest(&published.digest).unwrap();
        let data = data_of(&store, &manifest);
        layers.push(Layer { manifest, data });
    }
    gauge.bytes.store(0, Ordering::SeqCst);
    gauge.ranges.store(0, Ordering::SeqCst);
    Family {
        gauge,
        store,
        layers,
        scratch,
    }
}

impl Family {
    fn dir(&self, layer: usize) -> std::path::PathBuf {
        self.scratch.join(format!("cache-{layer}"))
    }

    fn blob_at(&self, layer: usize, dir: &Path, url: &str, fetcher: &Arc<Fetcher>) -> Arc<Blob> {
        std::fs::create_dir_all(dir).unwrap();
        let manifest = self.layers[layer].manifest.clone();
        let map = self.store.map(&manifest).unwrap();
        let locator = self.store.locator(&manifest, &map).unwrap();
        let content = manifest.map.digest;
        let extents = map.extents().len() as u64;
        let cache =
            BlobCache::open(dir, content.as_bytes(), map.data_size(), extents, BOOT).unwrap();
        let parts = BlobParts {
            manifest,
            map,
            locator,
            cache,
            store_url: url.to_owned(),
            store: Some(self.store.clone()),
            open_store: Arc::new(|| unreachable!("the store is open")),
        };
        Blob::new(parts, Arc::clone(fetcher))
    }

    fn blob(&self, layer: usize, fetcher: &Arc<Fetcher>) -> Arc<Blob> {
        self.blob_at(layer, &self.dir(layer), "memory:", fetcher)
    }

    fn data(&self, layer: usize) -> &[u8] {
        &self.layers[layer].data
    }

    fn fetched(&self) -> u64 {
        self.gauge.bytes.load(Ordering::SeqCst)
    }
}

/// Bytes of all extents of a blob.
fn whole(blob: &Blob) -> u64 {
    blob.map().extents().iter().map(|e| u64::from(e.len)).sum()
}

#[test]
fn what_another_layer_has_is_not_fetched() {
    let family = family();
    let fetcher = Fetcher::new(config());
    let first = family.blob(0, &fetcher);
    read(&first, family.data(0), 0, family.data(0).len()).unwrap();
    let meter = fetcher.meter();
    assert!(meter.copied == 0 && family.fetched() > 0);

    // All of it is in the first one's frames: even a store that is gone is not missed.
    family.gauge.away.store(true, Ordering::SeqCst);
    let less = family.blob(1, &fetcher);
    let (before, verified) = (family.fetched(), fetcher.meter().verified);
    read(&less, family.data(1), 0, family.data(1).len()).unwrap();
    assert_eq!(family.fetched(), before);
    assert_eq!(fetcher.meter().copied, whole(&less));
    assert_eq!(less.cached_bytes(), whole(&less));
    // Nothing of it counts as fetched.
    assert_eq!(fetcher.meter().verified, verified);
    family.gauge.away.store(false, Ordering::SeqCst);

    // Of the other one only the new file is.
    let more = family.blob(2, &fetcher);
    let mut at = 0;
    while at < family.data(2).len() as u64 {
        read(&more, family.data(2), at, 70_000).unwrap();
        at += 70_000;
    }
    let fetched = family.fetched() - before;
    assert!((1..600_000).contains(&fetched), "{fetched}");
    // And it stays when the others are gone.
    drop((first, less));
    let after = family.fetched();
    read(&more, family.data(2), 0, family.data(2).len()).unwrap();
    assert_eq!(family.fetched(), after);
}

#[test]
fn what_an_earlier_process_left_and_what_is_partly_there_is_copied_too() {
    let family = family();
    let fetcher = Fetcher::new(config());
    let first = family.blob(0, &fetcher);
    read(&first, family.data(0), 0, family.data(0).len()).unwrap();
    drop(first);
    drop(fetcher);
    // Another process: nothing of it was compared with its digests yet.
    let fetcher = Fetcher::new(config());
    let first = family.blob(0, &fetcher);
    assert!(first.cache().suspect(0) && !first.cache().has(0));
    family.gauge.away.store(true, Ordering::SeqCst);
    let less = family.blob(1, &fetcher);
    read(&less, family.data(1), 200_000, 300_000).unwrap();
    let copied = fetcher.meter().copied;
    assert!(copied >= 300_000 && copied < whole(&less), "{copied}");
    // The way back: what the second has, the first gets from it; what it lacks is an error while the
    // store is away.
    fetcher.evict_blob(&first);
    assert_eq!(first.cached_bytes(), 0);
    read(&first, family.data(0), 300_000, 1000).unwrap();
    let end = family.data(0).len() as u64;
    read(&first, family.data(0), end - 5000, 1000).unwrap_err();
    family.gauge.away.store(false, Ordering::SeqCst);
    read(&first, family.data(0), 0, family.data(0).len()).unwrap();
}

#[test]
fn what_another_layer_is_fetching_is_waited_for() {
    let family = family();
    let fetcher = Fetcher::new(config());
    let (first, less) = (family.blob(0, &fetcher), family.blob(1, &fetcher));
    family.gauge.set_shut(true);
    std::thread::scope(|scope| {
        scope.spawn(|| read(&first, family.data(0), 300_000, 1000).unwrap());
        let end = std::time::Instant::now() + common::LONG;
        while family.gauge.ranges.load(Ordering::SeqCst) == 0 && std::time::Instant::now() < end {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        scope.spawn(|| read(&less, family.data(1), 300_000, 1000).unwrap());
        while fetcher.meter().waiting < 2 && std::time::Instant::now() < end {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        family.gauge.set_shut(false);
    });
    assert_eq!(family.gauge.ranges.load(Ordering::SeqCst), 1);
    assert!(fetcher.meter().copied >= 1000);
}

/// Three layers of the same data, which differ in their metadata only.
fn twins() -> Family {
    let scratch = ScratchDir::new("twins").unwrap();
    let gauge = Gauge::new(Arc::new(MemStore::new()));
    let store = LayerStore::new(gauge.clone() as Arc<dyn BlobStore>);
    let source = scratch.join("source");
    sample_tree(&source);
    let mut layers = Vec::new();
    for name in ["one", "two", "three"] {
        std::fs::create_dir(source.join(name)).unwrap();
        let published = publish(&store, &format!("base/{name}:1"), &source, &[]);
        let manifest = store.manifest(&published.digest).unwrap();
        let data = data_of(&store, &manifest);
        layers.push(Layer { manifest, data });
    }
    Family {
        gauge,
        store,
        layers,
        scratch,
    }
}

/// Layers with the same frames, read at the same moment: each frame is asked for by one of them.
#[test]
fn frames_that_layers_want_at_once_are_fetched_once() {
    let family = twins();
    let manifest = &family.layers[0].manifest;
    let map = family.store.map(manifest).unwrap();
    let locator = family.store.locator(manifest, &map).unwrap();
    let raw: u64 = locator.frames().iter().map(|f| u64::from(f.raw_len)).sum();
    for round in 0..10 {
        let fetcher = Fetcher::new(config());
        let blobs: Vec<Arc<Blob>> = (0..3)
            .map(|layer| {
                let dir = family.scratch.join(format!("at-once-{round}-{layer}"));
                family.blob_at(layer, &dir, "memory:", &fetcher)
            })
            .collect();
        let start = std::sync::Barrier::new(blobs.len());
        std::thread::scope(|scope| {
            for (layer, blob) in blobs.iter().enumerate() {
                let (family, start) = (&family, &start);
                scope.spawn(move || {
                    start.wait();
                    let data = family.data(layer);
                    // Each begins elsewhere.
                    let middle = data.len() / 3 * layer;
                    read(blob, data, middle as u64, data.len()).unwrap();
                    read(blob, data, 0, data.len()).unwrap();
                });
            }
        });
        let meter = fetcher.meter();
        assert_eq!(meter.fetched_raw, raw, "round {round}");
        assert_eq!(meter.copied, 2 * whole(&blobs[0]), "round {round}");
        assert_eq!(meter.inflight, 0);
    }
}

/// If the one that asks the store fails, those that waited for it ask by themselves.
#[test]
fn who_waited_for_a_fetch_that_failed_fetches() {
    let family = family();
    let fetcher = Fetcher::new(config());
    let (first, less) = (family.blob(0, &fetcher), family.blob(1, &fetcher));
    family.gauge.set_shut(true);
    family.gauge.away.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let failing = scope.spawn(|| read(&first, family.data(0), 300_000, 1000));
        let end = std::time::Instant::now() + common::LONG;
        while family.gauge.ranges.load(Ordering::SeqCst) == 0 && std::time::Instant::now() < end {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let waiting = scope.spawn(|| read(&less, family.data(1), 300_000, 1000));
        while fetcher.meter().waiting < 2 && std::time::Instant::now() < end {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        family.gauge.set_shut(false);
        failing.join().unwrap().unwrap_err();
        // Its own request came after the first one's.
        waiting.join().unwrap().unwrap_err();
    });
    assert!(family.gauge.ranges.load(Ordering::SeqCst) >= 2);
    family.gauge.away.store(false, Ordering::SeqCst);
    read(&less, family.data(1), 0, family.data(1).len()).unwrap();
    read(&first, family.data(0), 0, family.data(0).len()).unwrap();
    assert_eq!(fetcher.meter().inflight, 0);
}

#[test]
fn a_damaged_copy_is_fetched_and_other_stores_are_not_looked_at() {
    let family = family();
    let fetcher = Fetcher::new(config());
    let first = family.blob(0, &fetcher);
    read(&first, family.data(0), 0, family.data(0).len()).unwrap();
    // Somebody writes into the first one's cache, behind our back.
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(family.dir(0).join("data"))
        .unwrap();
    for extent in first.map().extents() {
        file.write_all_at(b"wrong", extent.data_offset).unwrap();
    }
    let less = family.blob(1, &fetcher);
    let before = family.fetched();
    read(&less, family.data(1), 0, family.data(1).len()).unwrap();
    assert!(family.fetched() > before);
    assert_eq!(fetcher.meter().copied, 0);
    assert_eq!(less.cached_bytes(), whole(&less));

    // A layer of another store gets nothing of these.
    let fetcher = Fetcher::new(config());
    let here = family.scratch.join("here");
    let less = family.blob_at(1, &here, "memory:", &fetcher);
    let elsewhere = family.scratch.join("elsewhere");
    let more = family.blob_at(2, &elsewhere, "file:///other", &fetcher);
    read(&less, family.data(1), 0, family.data(1).len()).unwrap();
    read(&more, family.data(2), 0, family.data(2).len()).unwrap();
    assert_eq!(fetcher.meter().copied, 0);
}

#[test]
fn every_byte_is_right_while_layers_copy_from_each_other_under_pressure() {
    let family = family();
    let size: u64 = family.layers.iter().map(|l| l.data.len() as u64).sum();
    let limits = FetchConfig {
        cache_max: Some(size / 3),
        ..config()
    };
    let fetcher = Fetcher::new(limits);
    let blobs: Vec<Arc<Blob>> = (0..3).map(|layer| family.blob(layer, &fetcher)).collect();
    std::thread::scope(|scope| {
        for thread in 0..6_u64 {
            let (family, blobs) = (&family, &blobs);
            scope.spawn(move || {
                let mut rng = Rng::new(thread + 1);
                for _ in 0..150 {
                    let layer = rng.below(3) as usize;
                    let data = family.data(layer);
                    let at = rng.below(data.len() as u64);
                    let len = 1 + rng.below(150_000) as usize;
                    read(&blobs[layer], data, at, len).unwrap();
                }
            });
        }
    });
    let meter = fetcher.meter();
    assert!(meter.copied > 0);
    assert_eq!(meter.inflight, 0);
}
