//! Reads of a layer's data: cache, single flight, faults. Needs no kernel feature.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "tests; error numbers are compared, which fs_err hides"
)]

mod common;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{BOOT, Gauge, LONG, config, fixture, noise, publish, publish_with, read};
use layerpack_fixtures::{MountGuard, is_root, skip};
use layerpack_layerfs::cache::{BlobCache, BootId};
use layerpack_layerfs::fetch::FetchConfig;
use layerpack_layerfs::fuse::{Errno, ReplyBuf};
use layerpack_store::{
    BlobStore, Fault, FaultStore, FrameLoc, Key, LayerStore, Locator, MemStore, PruneOptions,
    WriterOptions,
};

fn mem() -> Arc<dyn BlobStore> {
    Arc::new(MemStore::new())
}

/// An error and what caused it, as the node's log shows it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[test]
fn every_range_reads_right_cold_and_warm() {
    let f = fixture(mem());
    let size = f.data.len() as u64;
    for round in 0..2 {
        let blob = f.blob(
            f.blobs.clone(),
            &f.scratch.join(format!("c{round}")),
            config(),
        );
        for (offset, len) in [
            (0, 1),
            (1, 5000),
            (4000, 200),
            (size - 10, 10),
            (size - 10, 100),
            (size, 10),
            (size + 5, 10),
            (u64::MAX, 10),
            (100_000, 1_000_000),
            (12_288, 0),
        ] {
            read(&blob, &f.data, offset, len).unwrap();
            read(&blob, &f.data, offset, len).unwrap();
        }
        let mut at = 0;
        while at < size {
            let len = 1 + (at as usize * 7) % 150_000;
            read(&blob, &f.data, at, len).unwrap();
            at += len as u64;
        }
        let covered: u64 = f.map().extents().iter().map(|e| u64::from(e.len)).sum();
        assert_eq!(blob.cached_bytes(), covered);
        // All of it is here now: nothing may be asked of the store.
        let mut buf = ReplyBuf::new();
        blob.try_read(0, 1 << 20, &mut buf).unwrap().unwrap();
    }
}

#[test]
fn little_is_fetched_when_little_is_read() {
    let f = fixture(mem());
    let gauge = Gauge::new(f.blobs.clone());
    let blob = f.blob(gauge.clone(), &f.scratch.join("c"), config());
    read(&blob, &f.data, f.data.len() as u64 - 5000, 4000).unwrap();
    let fetched = gauge.bytes.load(Ordering::SeqCst);
    assert!(
        fetched > 0 && fetched * 8 < f.data.len() as u64,
        "{fetched} of {}",
        f.data.len()
    );
    assert_eq!(gauge.ranges.load(Ordering::SeqCst), 1);
    read(&blob, &f.data, f.data.len() as u64 - 5000, 4000).unwrap();
    assert_eq!(
        gauge.ranges.load(Ordering::SeqCst),
        1,
        "read again from the cache"
    );
    // Neighbours come together: far fewer requests than frames.
    read(&blob, &f.data, 0, f.data.len()).unwrap();
    let frames = f.locator().frames().len() as u64;
    assert!(gauge.ranges.load(Ordering::SeqCst) < frames / 2);
}

#[test]
fn one_fetch_per_frame_however_many_readers() {
    let f = fixture(mem());
    for round in 0..5_u64 {
        let gauge = Gauge::new(f.blobs.clone());
        gauge.set_shut(true);
        // Every frame its own request, so that requests can be told apart.
        let limits = FetchConfig {
            batch_bytes: 1,
            inflight_bytes: 1 << 30,
            ..config()
        };
        let blob = f.blob(gauge.clone(), &f.scratch.join(format!("c{round}")), limits);
        std::thread::scope(|scope| {
            for thread in 0..24_u64 {
                let (blob, data) = (&blob, &f.data);
                scope.spawn(move || {
                    if thread % 2 == 0 {
                        read(blob, data, 0, data.len()).unwrap();
                    } else {
                        for step in 0..data.len() as u64 / 90_000 {
                            read(blob, data, step * 90_000 + thread, 90_000).unwrap();
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(20 * round));
            gauge.set_shut(false);
        });
        let seen = gauge.seen.lock().unwrap().clone();
        let distinct: HashSet<_> = seen.iter().map(|(k, r)| (k, r.start, r.end)).collect();
        assert_eq!(seen.len(), distinct.len(), "a frame was fetched twice");
        let locator = f.locator();
        let used = (0..locator.frames().len() as u32)
            .filter(|i| !locator.extents_of_frame(*i).is_empty())
            .count();
        assert_eq!(seen.len(), used);
    }
}

/// Fail call 1, then 2, until a run ends without the fault: no wrong byte, no hang, and whoever
/// reads again gets the bytes.
#[test]
fn fault_sweep_never_gives_a_wrong_byte() {
    let f = fixture(mem());
    let limits = FetchConfig {
        batch_bytes: 128 << 10,
        ..config()
    };
    for fault in Fault::ALL {
        let mut fired = 0;
        for nth in 1.. {
            let store = Arc::new(FaultStore::fail_nth(f.blobs.clone(), nth, fault));
            let dir = f.scratch.join(format!("{fault:?}-{nth}"));
            let blob = f.blob(store.clone(), &dir, limits);
            let failed: u64 = std::thread::scope(|scope| {
                let readers: Vec<_> = (0..4_u64)
                    .map(|thread| {
                        let (blob, data) = (&blob, &f.data);
                        scope.spawn(move || {
                            let mut failed = 0;
                            let mut at = thread * 1000;
                            while at < data.len() as u64 {
                                if let Err(e) = read(blob, data, at, 300_000) {
                                    assert_eq!(e.errno(), Errno::IO, "{e}");
                                    assert!(chain(&e).contains("packs/"), "{}", chain(&e));
                                    failed += 1;
                                }
                                at += 250_000;
                            }
                            failed
                        })
                    })
                    .collect();
                readers.into_iter().map(|r| r.join().unwrap()).sum()
            });
            // What came wrong is asked for again.
            let mended = [Fault::Corrupt, Fault::Truncate].contains(&fault);
            assert!(
                failed == 0 || !mended,
                "{fault:?} {nth}: {failed} reads failed"
            );
            if store.fired() {
                fired += 1;
                if fault != Fault::Crash {
                    read(&blob, &f.data, 0, f.data.len()).unwrap();
                }
            } else {
                assert_eq!(failed, 0, "{fault:?} {nth}");
            }
            // What the cache says it has after the fault is right as well.
            drop(blob);
            let blob = f.blob(mem(), &dir, limits);
            let mut at = 0;
            while at < f.data.len() as u64 {
                let mut buf = ReplyBuf::new();
                if let Some(result) = blob.try_read(at, 4096, &mut buf) {
                    result.unwrap();
                    let end = (at as usize + 4096).min(f.data.len());
                    assert!(buf.as_slice() == &f.data[at as usize..end]);
                }
                at += 4096;
            }
            drop(blob);
            common::remove(&dir);
            if !store.fired() {
                break;
            }
        }
        if fault != Fault::NoSpace {
            assert!(fired > 5, "{fault:?} fired {fired} times");
        }
    }
}

#[test]
fn a_hanging_store_costs_readers_their_timeout_only() {
    let f = fixture(mem());
    let gauge = Gauge::new(f.blobs.clone());
    gauge.set_shut(true);
    let limits = FetchConfig {
        read_timeout: Duration::from_millis(100),
        threads: 2,
        inflight_bytes: 1 << 20,
        ..config()
    };
    let blob = f.blob(gauge.clone(), &f.scratch.join("c"), limits);
    std::thread::scope(|scope| {
        for thread in 0..16_u64 {
            let (blob, data) = (&blob, &f.data);
            scope.spawn(move || {
                let error = read(blob, data, thread * 200_000, 150_000).unwrap_err();
                assert_eq!(error.errno(), Errno::TIMEDOUT);
            });
        }
    });
    gauge.set_shut(false);
    let end = std::time::Instant::now() + LONG;
    while read(&blob, &f.data, 0, f.data.len()).is_err() {
        assert!(std::time::Instant::now() < end, "never recovers");
    }
}

#[test]
fn a_request_that_hangs_for_ever_is_asked_anew() {
    let f = fixture(mem());
    let gauge = Gauge::new(f.blobs.clone());
    gauge.set_shut(true);
    let limits = FetchConfig {
        read_timeout: Duration::from_millis(100),
        threads: 2,
        ..config()
    };
    let blob = f.blob(gauge.clone(), &f.scratch.join("c"), limits);
    let error = read(&blob, &f.data, 0, 100).unwrap_err();
    assert_eq!(error.errno(), Errno::TIMEDOUT);
    // The store is well again, but what hangs goes on hanging: nobody tells it.
    gauge.shut.store(false, Ordering::SeqCst);
    let end = std::time::Instant::now() + LONG;
    while read(&blob, &f.data, 0, 100).is_err() {
        assert!(std::time::Instant::now() < end, "never recovers");
    }
    assert!(gauge.ranges.load(Ordering::SeqCst) > 1);
    gauge.set_shut(false);
}

#[test]
fn a_store_that_is_away_fails_reads_or_is_waited_for() {
    let f = fixture(mem());
    let gauge = Gauge::new(f.blobs.clone());
    gauge.away.store(true, Ordering::SeqCst);
    let blob = f.blob(gauge.clone(), &f.scratch.join("fails"), config());
    let error = read(&blob, &f.data, 0, 5000).unwrap_err();
    assert!(error.may_pass() && error.errno() == Errno::IO, "{error}");
    // What is no matter of reaching it is not waited for.
    let waits = FetchConfig {
        wait_for_store: true,
        ..config()
    };
    let emptied = fixture(mem());
    for pack in emptied.blobs.list("packs/").unwrap() {
        assert!(emptied.blobs.delete(&pack.key).unwrap());
    }
    let dir = emptied.scratch.join("missing");
    let blob = emptied.blob(emptied.blobs.clone(), &dir, waits);
    let error = read(&blob, &emptied.data, 0, 5000).unwrap_err();
    assert!(!error.may_pass(), "{error}");

    let blob = f.blob(gauge.clone(), &f.scratch.join("waits"), waits);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&blob, &f.data, 0, 5000));
        let before = gauge.ranges.load(Ordering::SeqCst);
        let end = std::time::Instant::now() + LONG;
        while gauge.ranges.load(Ordering::SeqCst) < before + 3 {
            assert!(std::time::Instant::now() < end && !reader.is_finished());
            std::thread::sleep(Duration::from_millis(5));
        }
        gauge.away.store(false, Ordering::SeqCst);
        reader.join().unwrap().unwrap();
    });
    // No longer than it is told to.
    gauge.away.store(true, Ordering::SeqCst);
    let short = FetchConfig {
        read_timeout: Duration::from_millis(300),
        ..waits
    };
    let blob = f.blob(gauge, &f.scratch.join("short"), short);
    read(&blob, &f.data, 0, 5000).unwrap_err();
}

#[test]
fn closing_wakes_those_who_wait() {
    let f = fixture(mem());
    let gauge = Gauge::new(f.blobs.clone());
    gauge.set_shut(true);
    let fetcher = layerpack_layerfs::fetch::Fetcher::new(FetchConfig {
        threads: 1,
        batch_bytes: 1,
        ..config()
    });
    let parts = layerpack_layerfs::fetch::BlobParts {
        manifest: f.manifest.clone(),
        map: f.map(),
        locator: f.locator(),
        cache: f.cache(&f.scratch.join("c"), BOOT),
        store_url: gauge.url(),
        store: Some(LayerStore::new(gauge.clone())),
        open_store: Arc::new(|| unreachable!("the store is open")),
    };
    let blob = layerpack_layerfs::fetch::Blob::new(parts, Arc::clone(&fetcher));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| read(&blob, &f.data, 0, 1_000_000));
        while gauge.ranges.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // One fetch hangs in the store, the others are queued behind it.
        assert!(!fetcher.close(Duration::from_millis(50)));
        gauge.set_shut(false);
        assert_eq!(first.join().unwrap().unwrap_err().errno(), Errno::IO);
    });
    assert!(fetcher.close(LONG));
    assert_eq!(fetcher.inflight_bytes(), 0);
    assert_eq!(
        read(&blob, &f.data, 3_000_000, 100_000)
            .unwrap_err()
            .errno(),
        Errno::IO
    );
}

/// A locator is a hint of the store: whatever it says, bytes are those of the map.
#[test]
fn a_lying_locator_gives_errors() {
    let f = fixture(mem());
    let map = f.map();
    let good = f.locator();
    let count = map.extents().len();
    let places: Vec<(u32, u32)> = (0..count).map(|i| good.extent(i).unwrap()).collect();
    // Swap the places of two extents of the same length class, and of the first and last.
    let mut refused = 0;
    for (a, b) in [(0, count - 1), (1, 2), (count - 1, count - 2), (3, 40)] {
        let mut lie = places.clone();
        lie.swap(a, b);
        let frames: Vec<FrameLoc> = good.frames().to_vec();
        let Ok(locator) = Locator::new(
            f.manifest.map.digest,
            &map,
            good.packs().to_vec(),
            frames,
            lie,
        ) else {
            refused += 1;
            continue;
        };
        let cache = f.cache(&f.scratch.join(format!("lie-{a}-{b}")), BOOT);
        let blob = f.blob_with(f.blobs.clone(), locator, cache, config());
        for index in 0..count {
            let extent = &map.extents()[index];
            let result = read(&blob, &f.data, extent.data_offset, extent.len as usize);
            if index == a || index == b {
                let same = map.extents()[a].digest == map.extents()[b].digest;
                assert!(result.is_err() || same, "{index}");
            }
        }
    }
    assert!(refused < 4, "no lie got as far as a read");
}

/// The store was cleaned and the layer published again: the frames lie elsewhere now.
#[test]
fn a_moved_layer_is_found_again() {
    let f = fixture(mem());
    let dir = f.scratch.join("c");
    let blob = f.blob(f.blobs.clone(), &dir, config());
    read(&blob, &f.data, 0, 100_000).unwrap();
    for object in f.blobs.list("").unwrap() {
        f.blobs.delete(&object.key).unwrap();
    }
    let again = publish_with(
        &f.store,
        "base/sample:1",
        &f.scratch.join("source"),
        &[],
        WriterOptions {
            level: 9,
            ..WriterOptions::default()
        },
    );
    assert_eq!(f.store.manifest(&again.digest).unwrap(), f.manifest);
    read(&blob, &f.data, 0, f.data.len()).unwrap();
}

/// The store was compacted under a mounted layer, and the packs that its locator names are gone.
#[test]
fn a_compacted_layer_is_found_again() {
    let f = fixture(mem());
    let source = f.scratch.join("source");
    // The same layer in the pack of a larger one, which is then removed.
    for object in f.blobs.list("").unwrap() {
        f.blobs.delete(&object.key).unwrap();
    }
    let large = f.scratch.join("larger");
    let copied = std::process::Command::new("cp")
        .arg("-a")
        .args([&source, &large])
        .status();
    assert!(copied.unwrap().success());
    for i in 0..40 {
        fs_err::write(large.join(format!("garbage-{i}")), noise(900 + i, 300_000)).unwrap();
    }
    publish(&f.store, "base/larger:1", &large, &[]);
    publish(&f.store, "base/sample:1", &source, &[]);
    let blob = f.blob(f.blobs.clone(), &f.scratch.join("c"), config());
    read(&blob, &f.data, 0, 100_000).unwrap();
    let old = f.locator();
    f.store.remove(&"base/larger:1".parse().unwrap()).unwrap();
    let report = f.store.prune(PruneOptions {
        min_live: 95,
        dry_run: false,
        grace: Duration::ZERO,
        wait: false,
    });
    let report = report.unwrap();
    assert!(report.rewritten_packs > 0, "{report:?}");
    let gone = |id| f.blobs.size(&Key::pack(id)).unwrap().is_none();
    assert!(old.packs().iter().any(|pack| gone(&pack.id)), "{report:?}");
    read(&blob, &f.data, 0, f.data.len()).unwrap();
}

/// Whether a reopened cache still has an extent, to be checked or checked already.
fn kept(cache: &BlobCache, index: u64) -> bool {
    cache.has(index) || cache.suspect(index)
}

/// A cache file that was damaged, or lost its blocks, while no daemon ran: never a wrong byte,
/// and only what is damaged is fetched again.
#[test]
fn what_an_earlier_process_left_is_checked_before_it_is_served() {
    use std::os::unix::fs::FileExt;
    let f = fixture(mem());
    let whole = f.data.len();
    for damage in ["none", "byte", "hole"] {
        let dir = f.scratch.join(damage);
        let blob = f.blob(f.blobs.clone(), &dir, config());
        read(&blob, &f.data, 0, whole).unwrap();
        drop(blob);
        let file = std::fs::File::options()
            .write(true)
            .open(dir.join("data"))
            .unwrap();
        match damage {
            "byte" => file.write_all_at(&[f.data[5000] ^ 1], 5000).unwrap(),
            "hole" => {
                file.set_len(0).unwrap();
                file.set_len(whole as u64).unwrap();
            }
            _ => {}
        }
        let cache = f.cache(&dir, BOOT);
        let extents = cache.extents();
        assert!((0..extents).all(|i| cache.suspect(i) && !cache.has(i)));
        let blob = f.blob_with(f.blobs.clone(), f.locator(), cache, config());
        let before = blob.cached_bytes();
        for _ in 0..2 {
            read(&blob, &f.data, 0, whole).unwrap();
        }
        assert!((0..extents).all(|i| blob.cache().has(i) && !blob.cache().suspect(i)));
        assert_eq!(blob.cached_bytes(), before, "{damage}");
        let written = blob.cache().written_bytes();
        match damage {
            "none" => assert_eq!(written, 0),
            "byte" => assert!(written > 0 && written < before / 2, "{written} of {before}"),
            _ => assert!(written >= before, "{written} of {before}"),
        }
        drop(blob);
        // What was found right or mended is recorded as such.
        let cache = f.cache(&dir, BOOT);
        assert!((0..extents).all(|i| cache.suspect(i)), "{damage}");
    }
    // With the store away, damage is an error and the rest goes on being served.
    let dir = f.scratch.join("away");
    let blob = f.blob(f.blobs.clone(), &dir, config());
    read(&blob, &f.data, 0, whole).unwrap();
    drop(blob);
    let file = std::fs::File::options()
        .write(true)
        .open(dir.join("data"))
        .unwrap();
    file.write_all_at(&[f.data[5000] ^ 1], 5000).unwrap();
    let blob = f.blob_with(mem(), f.locator(), f.cache(&dir, BOOT), config());
    assert!(read(&blob, &f.data, 5000, 1).is_err());
    read(&blob, &f.data, whole as u64 - 4096, 4096).unwrap();
}

#[test]
fn presence_survives_what_it_may_and_nothing_else() {
    let f = fixture(mem());
    let dir = f.scratch.join("c");
    let other = BootId::from_bytes([8; 16]);
    let present = |boot| {
        let cache = f.cache(&dir, boot);
        (0..cache.extents()).filter(|i| kept(&cache, *i)).count()
    };
    let blob = f.blob(f.blobs.clone(), &dir, config());
    read(&blob, &f.data, 0, 500_000).unwrap();
    let first = (0..blob.cache().extents())
        .filter(|i| blob.cache().has(*i))
        .count();
    assert!(first > 5);
    blob.cache().checkpoint().unwrap();
    read(&blob, &f.data, 2_000_000, 900_000).unwrap();
    let both = (0..blob.cache().extents())
        .filter(|i| blob.cache().has(*i))
        .count();
    assert!(both > first);
    // As kill -9 leaves it: nothing is synced at the end.
    std::mem::forget(blob);

    // Another boot: what was synced before is there, what came later is not, and what is there
    // reads right.
    let copy = f.scratch.join("power-cut");
    std::fs::create_dir(&copy).unwrap();
    for name in ["data", "present", "present.synced"] {
        std::fs::hard_link(dir.join(name), copy.join(name)).unwrap();
    }
    {
        let cache = f.cache(&copy, other);
        let there = (0..cache.extents()).filter(|i| kept(&cache, *i)).count();
        assert_eq!(there, first);
    }
    // The same boot: everything is there.
    assert_eq!(present(BOOT), both);
    let blob = f.blob_with(mem(), f.locator(), f.cache(&dir, BOOT), config());
    read(&blob, &f.data, 0, 500_000).unwrap();
    read(&blob, &f.data, 2_000_000, 900_000).unwrap();
    blob.cache().checkpoint().unwrap();
    drop(blob);
    // All of it was synced now, so another boot has it too.
    assert_eq!(present(other), both);

    // A data file that is gone, cut, or of another content: nothing is there.
    for damage in ["gone", "cut", "replaced", "content"] {
        let copy = f.scratch.join(damage);
        std::fs::create_dir(&copy).unwrap();
        for name in ["present", "present.synced"] {
            std::fs::copy(dir.join(name), copy.join(name)).unwrap();
        }
        match damage {
            "gone" => {}
            "cut" => {
                std::fs::hard_link(dir.join("data"), copy.join("data")).unwrap();
                let file = std::fs::File::options().write(true).open(copy.join("data"));
                file.unwrap().set_len(f.data.len() as u64 - 4096).unwrap();
            }
            "replaced" => {
                let file = std::fs::File::create(copy.join("data")).unwrap();
                file.set_len(f.data.len() as u64).unwrap();
            }
            _ => {
                for name in ["present", "present.synced"] {
                    let mut bytes = std::fs::read(copy.join(name)).unwrap();
                    bytes[30] ^= 1;
                    std::fs::write(copy.join(name), bytes).unwrap();
                }
            }
        }
        let cache = f.cache(&copy, BOOT);
        assert_eq!(
            (0..cache.extents()).filter(|i| kept(&cache, *i)).count(),
            0,
            "{damage}"
        );
    }
}

/// Every byte of a presence file flipped, and every length: never a bit that was not set, if
/// the header or a checkpoint is damaged; never a panic.
#[test]
fn damaged_presence_files_are_dropped() {
    let f = fixture(mem());
    let dir = f.scratch.join("c");
    let blob = f.blob(f.blobs.clone(), &dir, config());
    read(&blob, &f.data, 0, 500_000).unwrap();
    let set: Vec<u64> = (0..blob.cache().extents())
        .filter(|i| blob.cache().has(*i))
        .collect();
    blob.cache().checkpoint().unwrap();
    drop(blob);
    std::fs::remove_file(dir.join("present")).unwrap();
    let good = std::fs::read(dir.join("present.synced")).unwrap();
    let other = BootId::from_bytes([9; 16]);
    let check = |bytes: &[u8], what: &str| {
        std::fs::write(dir.join("present.synced"), bytes).unwrap();
        let _ = std::fs::remove_file(dir.join("present"));
        let cache = f.cache(&dir, other);
        let there: Vec<u64> = (0..cache.extents()).filter(|i| kept(&cache, *i)).collect();
        assert!(there.is_empty() || there == set, "{what}");
        there.len()
    };
    for at in 0..good.len() {
        let mut bytes = good.clone();
        bytes[at] ^= 0x10;
        // The boot a checkpoint was written under does not matter, but its checksum does.
        assert_eq!(check(&bytes, &format!("byte {at}")), 0, "byte {at}");
    }
    for len in [0, 1, 127, 128, good.len() - 1] {
        assert_eq!(check(&good[..len], &format!("length {len}")), 0);
    }
    assert_eq!(check(&good, "intact"), set.len());
}

/// A full disk: everything reads right, nothing is kept, and once there is space, things are kept
/// again.
#[test]
fn privileged_a_full_cache_reads_through() {
    if !is_root() {
        skip!("needs root to mount a small filesystem");
    }
    let f = fixture(mem());
    let small = f.scratch.mkdir("small-disk").unwrap();
    let guard = match MountGuard::tmpfs(1 << 20, &small) {
        Ok(guard) => guard,
        Err(e) => skip!("no tmpfs: {e}"),
    };
    let filler = small.join("filler");
    let blob = f.blob(f.blobs.clone(), &small.join("c"), config());
    let mut file = std::fs::File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
    for round in 0..2 {
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (blob, data) = (&blob, &f.data);
                scope.spawn(move || {
                    let mut at = thread * 77_777;
                    while at < data.len() as u64 {
                        read(blob, data, at, 200_000).unwrap();
                        at += 150_000;
                    }
                });
            }
        });
        assert!(blob.cache_full(), "round {round}");
    }
    assert!(blob.cached_bytes() < 100_000, "{}", blob.cached_bytes());
    drop(file);
    std::fs::remove_file(&filler).unwrap();
    read(&blob, &f.data, 0, 300_000).unwrap();
    assert!(!blob.cache_full());
    assert!(blob.cached_bytes() > 100_000);
    // The last fetch has woken its readers and may still be on its way out.
    while Arc::strong_count(&blob) > 1 {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(blob);
    guard.unmount().unwrap();
}
