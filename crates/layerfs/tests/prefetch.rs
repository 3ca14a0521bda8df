//! Fetching ahead of demand.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "tests"
)]

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{Fixture, Gauge, LONG, config, fixture, noise, publish, read, sample_tree};
use layerpack_fixtures::guards::mounts_below;
use layerpack_fixtures::{ScratchDir, is_root, skip};
use layerpack_layerfs::fetch::{AheadEnd, AheadOptions, Blob, Cancel, FetchConfig, fetch_ahead};
use layerpack_layerfs::{LayerfsError, LeaseSpec, Node, NodeConfig, PrefetchMode, PrefetchSpec};
use layerpack_store::profile::{Profile, ProfileEntry, ProfileLayer};
use layerpack_store::{BlobStore, FileStore, LayerStore, MemStore};

const MIB: u64 = 1 << 20;

fn gauged(config: FetchConfig) -> (Fixture, Arc<Gauge>, Arc<Blob>) {
    let f = fixture(Arc::new(MemStore::new()));
    let gauge = Gauge::new(f.blobs.clone());
    let store: Arc<dyn BlobStore> = gauge.clone();
    let blob = f.blob(store, &f.scratch.join("c"), config);
    (f, gauge, blob)
}

fn list(blob: &Arc<Blob>, extents: &[u64]) -> Vec<(Arc<Blob>, u64)> {
    extents.iter().map(|i| (Arc::clone(blob), *i)).collect()
}

fn ahead(blob: &Arc<Blob>, extents: &[u64], options: AheadOptions) -> (AheadEnd, u64, u64) {
    let report = fetch_ahead(list(blob, extents), options, &Cancel::default());
    (report.end, report.fetched, report.present)
}

fn sum(blob: &Blob, extents: &[u64]) -> u64 {
    let all = blob.map().extents();
    extents
        .iter()
        .map(|i| u64::from(all[*i as usize].len))
        .sum()
}

fn read_extents(blob: &Arc<Blob>, data: &[u8], extents: &[u64]) {
    for index in extents {
        let extent = blob.map().extents()[*index as usize];
        read(blob, data, extent.data_offset, extent.len as usize).unwrap();
    }
}

/// Extents of the data before, or from, an offset.
fn part(blob: &Blob, before: bool, offset: u64) -> Vec<u64> {
    let all = (0..).zip(blob.map().extents());
    all.filter(|(_, e)| (e.data_offset < offset) == before)
        .map(|(i, _)| i)
        .collect()
}

#[test]
fn a_list_is_fetched_in_its_order_and_counted_when_it_is_read() {
    let (f, gauge, blob) = gauged(FetchConfig {
        threads: 1,
        ..config()
    });
    // The end first, then the beginning.
    let late = part(&blob, false, 3 * MIB / 2);
    let early = part(&blob, true, MIB / 4);
    let both: Vec<u64> = late.iter().chain(&early).copied().collect();
    let (end, fetched, _) = ahead(&blob, &both, AheadOptions::default());
    assert_eq!(end, AheadEnd::Done);
    assert!(fetched >= sum(&blob, &both));
    assert!(both.iter().all(|i| blob.cache().has(*i)));
    let frame = |index: u64| {
        let locator = f.locator();
        let (frame, _) = locator.extent(index as usize).unwrap();
        locator.frames()[frame as usize].offset
    };
    let seen = gauge.seen.lock().unwrap().clone();
    let has = |range: &std::ops::Range<u64>, of: &[u64]| {
        of.iter().any(|index| range.contains(&frame(*index)))
    };
    assert!(has(&seen[0].1, &late), "{seen:?}");
    assert!(!has(&seen[0].1, &early), "{seen:?}");
    assert!(seen.iter().any(|(_, range)| has(range, &early)), "{seen:?}");
    let requests = gauge.ranges.load(Ordering::SeqCst);
    assert!(requests < 20, "large requests: {requests}");
    assert_eq!(blob.ahead(), (fetched, 0, 0));

    // Again: all of it is there.
    let again = ahead(&blob, &both, AheadOptions::default());
    assert_eq!(again, (AheadEnd::Done, 0, sum(&blob, &both)));
    read_extents(&blob, &f.data, &late);
    let (_, used, _) = blob.ahead();
    assert!(used >= sum(&blob, &late) && used < fetched, "{used}");
    read_extents(&blob, &f.data, &late);
    assert_eq!(blob.ahead().1, used, "counted once");
    assert_eq!(requests, gauge.ranges.load(Ordering::SeqCst));
    blob.fetcher().evict_blob(&blob);
    assert_eq!(blob.ahead(), (fetched, used, fetched - used));
}

#[test]
fn nothing_is_evicted_for_it() {
    let (f, _gauge, blob) = gauged(FetchConfig {
        cache_max: Some(MIB),
        ..config()
    });
    let all = part(&blob, false, 0);
    let (end, fetched, _) = ahead(&blob, &all, AheadOptions::default());
    assert_eq!(end, AheadEnd::NoRoom);
    assert!(fetched <= MIB);
    assert_eq!(blob.evicted_bytes(), 0);
    read(&blob, &f.data, 0, f.data.len()).unwrap();
}

#[test]
fn readers_join_what_is_on_its_way() {
    let (f, gauge, blob) = gauged(config());
    let all = part(&blob, false, 0);
    gauge.set_shut(true);
    std::thread::scope(|scope| {
        let fetching = scope.spawn(|| ahead(&blob, &all, AheadOptions::default()));
        while gauge.ranges.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let reader = scope.spawn(|| read(&blob, &f.data, 0, 10_000).unwrap());
        while blob.fetcher().readers_waiting() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(blob.fetcher().meter().waiting, 1);
        gauge.set_shut(false);
        reader.join().unwrap();
        assert_eq!(fetching.join().unwrap().0, AheadEnd::Done);
    });
    let raw: u64 = f
        .locator()
        .frames()
        .iter()
        .map(|x| u64::from(x.raw_len))
        .sum();
    let meter = blob.fetcher().meter();
    assert_eq!(meter.fetched_raw, raw, "each frame once");
    assert_eq!((meter.waiting, meter.misses), (0, 1));
    assert!(meter.verified >= f.data.len() as u64 / 2 && meter.written > 0);
    assert_eq!(
        meter.fetches.counts.iter().sum::<u64>() > 0,
        meter.requests > 0
    );
    assert!(blob.ahead().1 > 0, "the reader used some of it");
}

#[test]
fn a_fill_yields_keeps_its_rate_and_ends_when_told() {
    let (f, gauge, blob) = gauged(config());
    let all = part(&blob, false, 0);
    let fill = AheadOptions {
        bytes_per_second: None,
        yields: true,
    };
    gauge.set_shut(true);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&blob, &f.data, 0, 1000).unwrap());
        while gauge.ranges.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let filling = scope.spawn(|| ahead(&blob, &all, fill));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(gauge.ranges.load(Ordering::SeqCst), 1, "the reader's");
        gauge.set_shut(false);
        reader.join().unwrap();
        assert_eq!(filling.join().unwrap().0, AheadEnd::Done);
    });
    assert!(all.iter().all(|i| blob.cache().has(*i)));

    blob.fetcher().evict_blob(&blob);
    let slow = AheadOptions {
        bytes_per_second: Some(1),
        yields: true,
    };
    let cancel = Cancel::default();
    let before = blob.ahead().0;
    std::thread::scope(|scope| {
        let filling = scope.spawn(|| fetch_ahead(list(&blob, &all), slow, &cancel));
        while blob.ahead().0 == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        cancel.cancel();
        let report = filling.join().unwrap();
        assert_eq!(report.end, AheadEnd::Cancelled);
        assert!(report.fetched < f.data.len() as u64 / 2, "{report:?}");
    });
}

#[test]
fn a_store_that_fails_ends_it() {
    let f = fixture(Arc::new(MemStore::new()));
    let empty: Arc<dyn BlobStore> = Arc::new(MemStore::new());
    let blob = f.blob(empty, &f.scratch.join("c"), config());
    let all = part(&blob, false, 0);
    let (end, fetched, _) = ahead(&blob, &all, AheadOptions::default());
    assert!(matches!(end, AheadEnd::Failed | AheadEnd::Done), "{end:?}");
    assert_eq!((fetched, blob.ahead()), (0, (0, 0, 0)));
}

/// Unmounts what a failed test leaves.
struct Cleanup(PathBuf);

impl Drop for Cleanup {
    fn drop(&mut self) {
        for mount in mounts_below(&self.0).into_iter().rev() {
            let _ = layerpack_sys::mount::unmount(&mount, true);
        }
    }
}

fn wait_until(done: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < LONG {
        if done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    false
}

#[test]
fn privileged_a_stack_finds_what_its_profile_names() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    let scratch = ScratchDir::new("ahead-node").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let store = LayerStore::new(Arc::new(FileStore::new(scratch.join("store")).unwrap()));
    let source = scratch.join("source");
    sample_tree(&source);
    let layer = publish(&store, "base/sample:1", &source, &[]);
    let above = scratch.mkdir("above").unwrap();
    std::fs::write(above.join("new"), noise(5, 10_000)).unwrap();
    let top = publish(&store, "diff/above:1", &above, &[]);
    let manifest = store.manifest(&layer.digest).unwrap();
    let map = store.map(&manifest).unwrap();
    // The end of the data, backwards.
    let entries: Vec<ProfileEntry> = (0_u32..)
        .zip(map.extents())
        .filter(|(_, e)| e.data_offset > 3 * MIB)
        .map(|(extent, e)| (extent, e.len))
        .collect::<Vec<_>>()
        .into_iter()
        .rev()
        .zip(0..)
        .map(|((extent, len), rank)| ProfileEntry {
            layer: 0,
            extent,
            len,
            count: 1,
            rank,
            time_ms: rank,
        })
        .collect();
    let wanted: u64 = entries.iter().map(|e| u64::from(e.len)).sum();
    let profile = Profile {
        name: "end".to_owned(),
        layers: vec![ProfileLayer {
            layer: layer.layer_id,
            manifest: layer.digest,
        }],
        recordings: 1,
        entries,
    };
    store.put_profile(&profile).unwrap();
    let mut settings = NodeConfig::recommended(scratch.join("root"));
    settings.housekeeping = Duration::from_secs(3600);
    let node = match Node::start(settings) {
        Ok(node) => node,
        Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
        Err(e) => panic!("{e}"),
    };
    let lease = LeaseSpec {
        id: "one".to_owned(),
        owner: "test".to_owned(),
        pid: None,
    };
    // A stack with something on top still goes by the profile of what is below.
    let stack = node
        .stack_up(&store, &[layer.digest, top.digest], &lease)
        .unwrap();
    let of_layer = || {
        let layers = node.status().layers;
        layers
            .into_iter()
            .find(|l| l.layer_id == layer.layer_id)
            .unwrap()
    };
    let spec = |mode| PrefetchSpec {
        mode,
        profile: None,
    };
    for mode in [PrefetchMode::None, PrefetchMode::Meta] {
        node.prefetch(&store, "one", &spec(mode)).unwrap();
    }
    assert_eq!(of_layer().fetched_bytes, 0);
    assert!(
        node.prefetch(&store, "two", &spec(PrefetchMode::All))
            .is_err()
    );
    node.prefetch(&store, "one", &spec(PrefetchMode::Profile))
        .unwrap();
    assert!(
        wait_until(|| of_layer().prefetched_bytes >= wanted),
        "{:?}",
        of_layer()
    );
    let mount = stack
        .lowers
        .iter()
        .find(|dir| dir.join("small").exists())
        .unwrap();
    for i in 0..60_usize {
        let bytes = std::fs::read(mount.join(format!("small/{i}"))).unwrap();
        assert!(bytes == noise((i % 50) as u64, 100 + i * 97));
    }
    let status = of_layer();
    assert!(status.prefetch_used_bytes > 0, "{status:?}");
    assert!(
        status.prefetched_bytes < status.data_bytes / 2,
        "{status:?}"
    );
    assert_eq!(node.metrics().meter.ahead[0], status.prefetched_bytes);
    node.prefetch(&store, "one", &spec(PrefetchMode::All))
        .unwrap();
    let all: u64 = map.extents().iter().map(|e| u64::from(e.len)).sum();
    assert!(
        wait_until(|| of_layer().cached_bytes == all),
        "{:?}",
        of_layer()
    );
    node.release("one").unwrap();
    node.stop(false).unwrap();
    assert_eq!(mounts_below(scratch.path()), Vec::<PathBuf>::new());
}
