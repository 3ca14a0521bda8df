//! Eviction: under pressure, on full disks, under readers, across kills.
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

use std::io::BufRead as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{BOOT, Fixture, Gauge, LONG, config, fixture, publish, read, sample_tree};
use layerpack_fixtures::guards::mounts_below;
use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::treecmp::{self, Options};
use layerpack_fixtures::{ChildGuard, MountGuard, ScratchDir, is_root, skip};
use layerpack_layerfs::cache::{BootId, RUN_BYTES};
use layerpack_layerfs::fetch::{Blob, FetchConfig};
use layerpack_layerfs::fuse::OpenMode;
use layerpack_layerfs::{LayerfsError, LeaseSpec, Node, NodeConfig};
use layerpack_store::{BlobStore, Digest, FileStore, LayerStore, MemStore};

const MIB: u64 = 1 << 20;

fn mem() -> Arc<dyn BlobStore> {
    Arc::new(MemStore::new())
}

fn limited(max: u64) -> FetchConfig {
    FetchConfig {
        cache_max: Some(max),
        ..config()
    }
}

/// Reads at random places, and compares every byte.
fn read_around(blob: &Arc<Blob>, data: &[u8], seed: u64, rounds: usize) {
    let mut rng = Rng::new(seed);
    for _ in 0..rounds {
        let at = rng.below(data.len() as u64);
        let len = 1 + rng.below(300_000) as usize;
        read(blob, data, at, len).unwrap();
    }
}

fn disk(blob: &Blob) -> u64 {
    blob.cache().disk_bytes().unwrap()
}

#[test]
fn every_byte_is_right_under_pressure() {
    let f = fixture(mem());
    for (name, max) in [("small", MIB), ("tiny", 200_000), ("none", 0)] {
        let dir = f.scratch.join(name);
        let blob = f.blob(f.blobs.clone(), &dir, limited(max));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..4_u64)
                .map(|thread| {
                    let (blob, data) = (&blob, &f.data);
                    scope.spawn(move || read_around(blob, data, thread, 150))
                })
                .collect();
            scope.spawn(|| {
                // And by hand, all of it, whatever is in use.
                while !stop.load(Ordering::Acquire) {
                    blob.fetcher().evict_blob(&blob);
                    let _ = blob.cache().checkpoint();
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            for reader in readers {
                reader.join().unwrap();
            }
            stop.store(true, Ordering::Release);
        });
        assert!(blob.evicted_bytes() > 0 || max == 0, "{name}");
        let used = blob.fetcher().measure();
        assert!(used <= max, "{name}: {used}");
        // Nobody is reading: the extents that are here are the bytes that are counted.
        // (A sweep that was due may still be at it.)
        let here = || -> u64 {
            let here = (0..).zip(blob.map().extents());
            here.filter(|(i, _)| blob.cache().has(*i) || blob.cache().suspect(*i))
                .map(|(_, e)| u64::from(e.len))
                .sum()
        };
        let agree = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            here() == blob.cached_bytes()
        });
        assert!(agree, "{name}: {} and {}", here(), blob.cached_bytes());
        read(&blob, &f.data, 0, f.data.len()).unwrap();
    }
}

#[test]
fn the_limit_holds_and_what_is_used_often_stays() {
    let f = fixture(mem());
    let blob = f.blob(f.blobs.clone(), &f.scratch.join("c"), limited(2 * MIB));
    let hot = 3 * RUN_BYTES;
    for _ in 0..6 {
        read(&blob, &f.data, hot, 1000).unwrap();
    }
    for _round in 0..3 {
        for (number, at) in (0..f.data.len()).step_by(RUN_BYTES as usize).enumerate() {
            read(&blob, &f.data, at as u64, RUN_BYTES as usize).unwrap();
            if number % 2 == 0 {
                let fetched = blob.fetcher().space();
                let misses = misses(&blob);
                read(&blob, &f.data, hot, 1000).unwrap();
                assert_eq!(
                    misses,
                    self::misses(&blob),
                    "evicted while in use: {fetched:?}"
                );
            }
            assert!(disk(&blob) <= 2 * MIB, "{}", disk(&blob));
        }
    }
    assert!(disk(&blob) <= 2 * MIB, "{}", disk(&blob));
    assert!(blob.evicted_bytes() > 4 * MIB);
    assert!(blob.cached_bytes() > MIB, "it is used as far as it goes");
}

/// Whether reads had to wait, told by what was written.
fn misses(blob: &Blob) -> u64 {
    blob.cache().written_bytes()
}

#[test]
fn pinned_blobs_stay_and_give_no_room() {
    let f = fixture(mem());
    let blob = f.blob(f.blobs.clone(), &f.scratch.join("c"), limited(MIB));
    blob.set_pinned(true);
    read(&blob, &f.data, 0, f.data.len()).unwrap();
    read(&blob, &f.data, 0, f.data.len()).unwrap();
    assert_eq!(blob.evicted_bytes(), 0);
    assert!(blob.cached_bytes() <= MIB);
    assert!(blob.fetcher().space().refused > 0);
    blob.set_pinned(false);
    assert!(blob.fetcher().evict_bytes(MIB / 2) >= MIB / 2);
}

#[test]
fn what_a_waiting_read_uses_is_not_evicted() {
    let f = fixture(mem());
    let gauge = Gauge::new(f.blobs.clone());
    let store: Arc<dyn BlobStore> = gauge.clone();
    let blob = f.blob(store, &f.scratch.join("c"), limited(100 * MIB));
    let len = 8 * RUN_BYTES as usize;
    read(&blob, &f.data, 0, RUN_BYTES as usize).unwrap();
    read(&blob, &f.data, 20 * RUN_BYTES, 1000).unwrap();
    let first = (0..).zip(blob.map().extents());
    let first: Vec<u64> = first
        .take_while(|(_, e)| e.data_offset + u64::from(e.len) <= RUN_BYTES)
        .map(|(i, _)| i)
        .collect();
    assert!(first.iter().all(|i| blob.cache().has(*i)));
    let ranges = gauge.ranges.load(Ordering::SeqCst);
    gauge.set_shut(true);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&blob, &f.data, 0, len).unwrap());
        while gauge.ranges.load(Ordering::SeqCst) == ranges {
            std::thread::sleep(Duration::from_millis(1));
        }
        let freed = blob.fetcher().evict_blob(&blob);
        let kept = first.iter().all(|i| blob.cache().has(*i));
        // Before anything can fail: the reader waits for it.
        gauge.set_shut(false);
        assert!(freed > 0, "what lies further on is not in use");
        assert!(kept);
        reader.join().unwrap();
    });
    blob.fetcher().evict_blob(&blob);
    // What was being read ahead may still have come in.
    let begun = Instant::now();
    while blob.cached_bytes() > 0 {
        assert!(begun.elapsed() < LONG, "{}", blob.cached_bytes());
        std::thread::sleep(Duration::from_millis(5));
        blob.fetcher().evict_blob(&blob);
    }
    // Blocks that two runs share may stay.
    assert!(disk(&blob) <= 40 * 4096, "{}", disk(&blob));
    read(&blob, &f.data, 0, f.data.len()).unwrap();
}

#[test]
fn a_check_finds_what_is_wrong() {
    let f = fixture(mem());
    let blob = f.blob(f.blobs.clone(), &f.scratch.join("c"), config());
    read(&blob, &f.data, 0, f.data.len()).unwrap();
    let good = blob.verify_cache().unwrap();
    assert_eq!((good.extents, good.damaged), (blob.cache().extents(), 0));
    let file = std::fs::File::options()
        .write(true)
        .open(f.scratch.join("c/data"))
        .unwrap();
    for at in [10, 2 * MIB] {
        file.write_all_at(&[!f.data[at as usize]], at).unwrap();
    }
    let bad = blob.verify_cache().unwrap();
    assert_eq!((bad.damaged, bad.stuck), (2, 0));
    read(&blob, &f.data, 0, f.data.len()).unwrap();
    assert_eq!(blob.verify_cache().unwrap(), good);
}

/// A full disk: older data makes room for newer, nothing fails.
#[test]
fn privileged_a_full_disk_evicts_before_it_reads_through() {
    if !is_root() {
        skip!("needs root to mount a small filesystem");
    }
    let f = fixture(mem());
    let small = f.scratch.mkdir("small-disk").unwrap();
    let guard = match MountGuard::tmpfs(2 << 20, &small) {
        Ok(guard) => guard,
        Err(e) => skip!("no tmpfs: {e}"),
    };
    let blob = f.blob(f.blobs.clone(), &small.join("c"), config());
    for _ in 0..2 {
        for at in (0..f.data.len()).step_by(100_000) {
            read(&blob, &f.data, at as u64, 100_000).unwrap();
        }
    }
    assert!(blob.evicted_bytes() > MIB, "{}", blob.evicted_bytes());
    assert!(blob.cached_bytes() > MIB / 4, "{}", blob.cached_bytes());
    read_around(&blob, &f.data, 1, 100);
    while Arc::strong_count(&blob) > 1 {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(blob);
    guard.unmount().unwrap();
}

const SCRATCH: &str = "LAYERPACK_TEST_EVICT_SCRATCH";
const MANIFEST: &str = "LAYERPACK_TEST_EVICT_MANIFEST";

fn known(scratch: &Path, manifest: &Digest) -> Fixture {
    let blobs: Arc<dyn BlobStore> = Arc::new(FileStore::new(scratch.join("store")).unwrap());
    let store = LayerStore::new(Arc::clone(&blobs));
    let manifest = store.manifest(manifest).unwrap();
    let data = common::data_of(&store, &manifest);
    Fixture {
        store,
        blobs,
        manifest,
        data,
        scratch: ScratchDir::new("evict-child").unwrap(),
    }
}

/// Not a test of its own: the process that is killed.
#[test]
#[ignore = "a child process of another test"]
fn child_that_evicts() {
    let Some(scratch) = std::env::var_os(SCRATCH).map(PathBuf::from) else {
        return;
    };
    let manifest: Digest = std::env::var(MANIFEST).unwrap().parse().unwrap();
    let f = known(&scratch, &manifest);
    // The parent's guard removes it all; this one would not be run.
    let _ = std::fs::remove_dir(f.scratch.path());
    let blob = f.blob(f.blobs.clone(), &scratch.join("cache"), limited(2 * MIB));
    println!("\nREADING");
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (blob, data) = (&blob, &f.data);
            scope.spawn(move || {
                let seed = u64::from(std::process::id()) * 8 + thread;
                read_around(blob, data, seed, usize::MAX);
            });
        }
        loop {
            blob.cache().checkpoint().unwrap();
            blob.fetcher().evict_bytes(MIB / 2);
        }
    });
}

/// The process is killed again and again while it evicts: whatever the next start believes, after
/// the kill or after a power cut in its place, is in the file.
#[test]
fn kills_leave_no_bit_over_a_hole() {
    let scratch = ScratchDir::new("evict-kill").unwrap();
    let source = scratch.join("source");
    sample_tree(&source);
    let store = LayerStore::new(Arc::new(FileStore::new(scratch.join("store")).unwrap()));
    let published = publish(&store, "base/sample:1", &source, &[]);
    let f = known(scratch.path(), &published.digest);
    let other = BootId::from_bytes([8; 16]);
    let mut rng = Rng::new(5);
    let (mut believed, mut checked) = (0, 0);
    for kill in 0..12 {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["child_that_evicts", "--exact", "--ignored", "--nocapture"])
            .env(SCRATCH, scratch.path())
            .env(MANIFEST, published.digest.to_string())
            .stdout(Stdio::piped());
        let mut child = ChildGuard::spawn(&mut command).unwrap();
        let out = child.child().stdout.take().unwrap();
        let mut lines = std::io::BufReader::new(out).lines();
        assert!(lines.any(|line| line.unwrap() == "READING"), "kill {kill}");
        std::thread::sleep(Duration::from_millis(20 + rng.below(150)));
        child.child().kill().unwrap();
        child.child().wait().unwrap();
        let cache = scratch.join("cache");
        let cut = scratch.join("cut");
        let _ = std::fs::remove_dir_all(&cut);
        std::fs::create_dir(&cut).unwrap();
        for name in ["data", "present", "present.synced"] {
            if cache.join(name).exists() {
                std::fs::hard_link(cache.join(name), cut.join(name)).unwrap();
            }
        }
        for (dir, boot) in [(&cut, other), (&cache, BOOT)] {
            let opened = f.cache(dir, boot);
            let map = f.map();
            for (index, extent) in (0..).zip(map.extents()) {
                if opened.suspect(index) {
                    let mut bytes = vec![0; extent.len as usize];
                    opened.read(extent.data_offset, &mut bytes).unwrap();
                    let start = extent.data_offset as usize;
                    let right = bytes == f.data[start..start + bytes.len()];
                    assert!(right, "kill {kill}: extent {index}, boot {boot:?}");
                    believed += 1;
                }
                checked += 1;
            }
            // As it was left, for the next child.
            std::mem::forget(opened);
        }
    }
    assert!(
        believed > 100 && believed < checked,
        "{believed} of {checked}"
    );
    let blob = f.blob(f.blobs.clone(), &scratch.join("cache"), limited(2 * MIB));
    read(&blob, &f.data, 0, f.data.len()).unwrap();
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

/// Has the kernel forget what it cached of a mount's files.
fn forget_pages(dir: &Path) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            forget_pages(&path);
        } else {
            let file = std::fs::File::open(&path).unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
    }
}

#[test]
fn privileged_a_mount_reads_right_while_its_cache_is_evicted() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    let scratch = ScratchDir::new("evict-node").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let store = LayerStore::new(Arc::new(FileStore::new(scratch.join("store")).unwrap()));
    let source = scratch.join("source");
    sample_tree(&source);
    let layer = publish(&store, "base/sample:1", &source, &[]);
    let other = scratch.mkdir("other").unwrap();
    std::fs::write(other.join("file"), common::noise(77, 3 << 20)).unwrap();
    let cold = publish(&store, "base/other:1", &other, &[]);
    let settings = |max| {
        let mut config = NodeConfig::recommended(scratch.join("root"));
        config.housekeeping = Duration::from_secs(3600);
        config.open_mode = OpenMode::Direct;
        config.idle_layers = 0;
        config.fetch.cache_max = Some(max);
        config.fetch.read_timeout = LONG;
        config
    };
    let lease = |id: &str| LeaseSpec {
        id: id.to_owned(),
        owner: "test".to_owned(),
        pid: None,
    };
    let node = match Node::start(settings(3 * MIB)) {
        Ok(node) => node,
        Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
        Err(e) => panic!("{e}"),
    };
    // A layer that is no longer mounted leaves its whole cache behind.
    let stack = node
        .stack_up(&store, &[cold.digest], &lease("cold"))
        .unwrap();
    let file = std::fs::read(stack.lowers[0].join("file")).unwrap();
    assert!(file == common::noise(77, 3 << 20));
    node.release("cold").unwrap();
    let cold_dir = scratch.join("root/cache").join(cold.layer_id.hex());
    assert!(cold_dir.join("data").exists());

    let stack = node
        .stack_up(&store, &[layer.digest], &lease("hot"))
        .unwrap();
    let mount = &stack.lowers[0];
    let options = Options::default();
    let left = treecmp::snapshot(&source, &options).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                node.cache_evict(None, None);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        for _ in 0..6 {
            forget_pages(mount);
            treecmp::assert_same(&left, &treecmp::snapshot(mount, &options).unwrap());
        }
        done.store(true, Ordering::Release);
    });
    // On a busy machine what was read ahead of the cold layer may have held it all the time.
    let begun = Instant::now();
    while cold_dir.exists() {
        assert!(begun.elapsed() < LONG, "cold caches go first");
        node.tidy();
        node.cache_evict(None, None);
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = node.status();
    assert_eq!(status.totals.errors, 0);
    assert!(status.layers[0].evicted_bytes > 0);
    for _ in 0..3 {
        forget_pages(mount);
        treecmp::assert_same(&left, &treecmp::snapshot(mount, &options).unwrap());
    }
    let cache = node.cache_status();
    assert!(cache.used_bytes <= 3 * MIB, "{cache:?}");
    assert_eq!(cache.max_bytes, Some(3 * MIB));
    assert!(cache.evictions > 0 && cache.layers[0].served);
    assert_eq!(cache.layers[0].reference.as_deref(), Some("base/sample:1"));

    // Pinned: it stays, also across a restart, and by name.
    node.cache_pin(&[layer.layer_id], true).unwrap();
    let evicted = node.cache_evict(None, None);
    assert_eq!(evicted.pinned, [layer.layer_id]);
    assert!(node.cache_status().layers[0].disk_bytes > MIB);
    let checked = node.cache_verify(None).unwrap();
    assert_eq!((checked[0].damaged, checked[0].stuck), (0, 0));
    assert!(checked[0].extents > 0);
    node.release("hot").unwrap();
    node.stop(false).unwrap();
    drop(node);
    let node = Node::start(settings(100_000)).unwrap();
    assert!(node.cache_status().layers[0].pinned);
    let kept = node.cache_status().layers[0].disk_bytes;
    assert!(kept > MIB, "more than the limit, but pinned: {kept}");
    let checked = node.cache_verify(Some(&[layer.layer_id])).unwrap();
    assert!(
        checked[0].extents > 0 && checked[0].unchecked.is_none(),
        "{checked:?}"
    );
    assert!(node.cache_verify(Some(&[cold.layer_id])).is_err());
    // The sweep of a start over the limit runs beside the check, which leaves what is pinned.
    assert_eq!(node.cache_status().layers[0].disk_bytes, kept);
    node.stop(false).unwrap();
    drop(node);
    let node = Node::start(settings(64 * MIB)).unwrap();
    node.cache_pin(&[layer.layer_id], false).unwrap();
    let before = node.cache_status();
    let evicted = node.cache_evict(Some(&[layer.layer_id]), None);
    assert!(evicted.freed_bytes > MIB, "{evicted:?} {before:?}");
    assert!(node.cache_status().layers.is_empty());
    let stack = node
        .stack_up(&store, &[layer.digest], &lease("again"))
        .unwrap();
    treecmp::assert_same(
        &left,
        &treecmp::snapshot(&stack.lowers[0], &options).unwrap(),
    );
    node.stop(true).unwrap();
    assert_eq!(mounts_below(scratch.path()), Vec::<PathBuf>::new());
}
