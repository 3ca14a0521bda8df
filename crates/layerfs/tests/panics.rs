//! A store that panics, in whatever thread asks it: readers get an error and nobody hangs, the node
//! serves on, and who reads again gets what is right.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "tests; error numbers are compared, which fs_err hides"
)]

mod common;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{LONG, noise, publish};
use layerpack_fixtures::guards::mounts_below;
use layerpack_fixtures::{ScratchDir, is_root, skip};
use layerpack_layerfs::fetch::FetchConfig;
use layerpack_layerfs::{LayerfsError, LeaseSpec, Node, NodeConfig};
use layerpack_store::{
    BlobStore, BlobWriter, Key, LayerStore, MemStore, ObjectInfo, PutMode, PutOutcome,
    Result as StoreResult,
};

const FILES: u64 = 12;

/// A store with a bug: while it is armed, asking for a range panics, after a moment in which others
/// begin to wait for the same frame; and so does the call for an object that is counted down to.
#[derive(Debug)]
struct Buggy {
    inner: MemStore,
    armed: AtomicBool,
    /// Calls until one panics; 0: none does.
    gets: AtomicU64,
    panics: AtomicU64,
}

impl Buggy {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: MemStore::new(),
            armed: AtomicBool::new(false),
            gets: AtomicU64::new(0),
            panics: AtomicU64::new(0),
        })
    }

    fn count_down(&self, key: &Key) {
        let less = |left: u64| left.checked_sub(1);
        let before = self
            .gets
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        if before == Ok(1) {
            self.panics.fetch_add(1, Ordering::SeqCst);
            panic!("on purpose, for {}", key.as_str());
        }
    }
}

impl BlobStore for Buggy {
    fn get(&self, key: &Key, max_len: u64) -> StoreResult<Option<Vec<u8>>> {
        self.count_down(key);
        self.inner.get(key, max_len)
    }
    fn get_range(&self, key: &Key, range: Range<u64>) -> StoreResult<Vec<u8>> {
        self.count_down(key);
        if self.armed.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(10));
            self.panics.fetch_add(1, Ordering::SeqCst);
            panic!("on purpose, for {} at {}", key.as_str(), range.start);
        }
        self.inner.get_range(key, range)
    }
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> StoreResult<PutOutcome> {
        self.inner.put(key, bytes, mode)
    }
    fn put_stream(&self) -> StoreResult<Box<dyn BlobWriter + '_>> {
        self.inner.put_stream()
    }
    fn size(&self, key: &Key) -> StoreResult<Option<u64>> {
        self.inner.size(key)
    }
    fn list(&self, prefix: &str) -> StoreResult<Vec<ObjectInfo>> {
        self.inner.list(prefix)
    }
    fn delete(&self, key: &Key) -> StoreResult<bool> {
        self.inner.delete(key)
    }
    fn url(&self) -> String {
        self.inner.url()
    }
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

fn content(file: u64) -> Vec<u8> {
    noise(file + 1, 300_000)
}

fn read(dir: &Path, file: u64) -> Result<(), i32> {
    match std::fs::read(dir.join(format!("f{file}"))) {
        Ok(bytes) => {
            assert!(bytes == content(file), "f{file}: wrong bytes");
            Ok(())
        }
        Err(e) => Err(e.raw_os_error().unwrap()),
    }
}

#[test]
fn privileged_a_panic_while_fetching_costs_its_readers_an_error_and_nobody_else() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    let scratch = ScratchDir::new("panics").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let store = Buggy::new();
    let layers = LayerStore::new(Arc::clone(&store) as Arc<dyn BlobStore>);
    let source = scratch.mkdir("source").unwrap();
    for file in 0..FILES {
        std::fs::write(source.join(format!("f{file}")), content(file)).unwrap();
    }
    let layer = publish(&layers, "base/l:1", &source, &[]);
    let opened = layers.clone();
    let root = scratch.join("root");
    let node = Node::start(NodeConfig {
        housekeeping: Duration::from_secs(3600),
        fetch: FetchConfig {
            batch_bytes: 128 << 10,
            // Far longer than this test may take: nobody is freed by it.
            read_timeout: 2 * LONG,
            ..FetchConfig::RECOMMENDED
        },
        open_store: Arc::new(move |_| Ok(opened.clone())),
        ..NodeConfig::recommended(root.clone())
    })
    .unwrap();
    let lease = LeaseSpec {
        id: "one".to_owned(),
        owner: "test".to_owned(),
        pid: None,
    };
    let stack = match node.stack_up(&layers, &[layer.digest], &lease) {
        Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
        other => other.unwrap(),
    };
    let dir = stack.lowers[0].clone();
    read(&dir, 0).unwrap();

    store.armed.store(true, Ordering::SeqCst);
    let begun = Instant::now();
    // More readers than threads that fetch, several of each file.
    let outcomes: Vec<Result<(), i32>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..36)
            .map(|n| {
                let dir = &dir;
                scope.spawn(move || read(dir, 1 + n % (FILES - 1)))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(begun.elapsed() < LONG, "somebody waited for a timeout");
    // Readahead may have brought a file or two before.
    let failed = outcomes.iter().filter(|o| **o == Err(5)).count();
    assert!(failed > 0, "{outcomes:?}");
    assert!(
        outcomes.iter().all(|o| matches!(o, Ok(()) | Err(5))),
        "{outcomes:?}"
    );
    assert!(store.panics.load(Ordering::SeqCst) > 8, "of eight threads");
    // What is here is served all the while.
    read(&dir, 0).unwrap();

    store.armed.store(false, Ordering::SeqCst);
    for file in 0..FILES {
        assert_eq!(read(&dir, file), Ok(()), "f{file} after the panics");
    }
    let totals = node.status().totals;
    assert!(totals.errors > 0, "they are counted");
    assert_eq!(totals.inflight_bytes, 0);
    node.release("one").unwrap();
    node.stop(false).unwrap();
    drop(node);
    assert_eq!(mounts_below(&root), Vec::<PathBuf>::new());
}

#[test]
fn privileged_a_panic_of_a_mount_leaves_nothing_behind() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    let scratch = ScratchDir::new("panic-mount").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let store = Buggy::new();
    let layers = LayerStore::new(Arc::clone(&store) as Arc<dyn BlobStore>);
    let source = scratch.mkdir("source").unwrap();
    for file in 0..FILES {
        std::fs::write(source.join(format!("f{file}")), content(file)).unwrap();
    }
    let layer = publish(&layers, "base/l:1", &source, &[]);
    let opened = layers.clone();
    let root = scratch.join("root");
    let node = Node::start(NodeConfig {
        housekeeping: Duration::from_secs(3600),
        open_store: Arc::new(move |_| Ok(opened.clone())),
        ..NodeConfig::recommended(root.clone())
    })
    .unwrap();
    let lease = LeaseSpec {
        id: "one".to_owned(),
        owner: "test".to_owned(),
        pid: None,
    };
    // The first call of a mount panics, then the second, until one comes through. The panic comes back
    // here, as it comes to the daemon's request, or as an error from a thread that asked for it.
    let mut nth = 0;
    let stack = loop {
        nth += 1;
        assert!(nth < 100, "no end");
        store.gets.store(nth, Ordering::SeqCst);
        let up = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            node.stack_up(&layers, &[layer.digest], &lease)
        }));
        let hit = store.gets.swap(0, Ordering::SeqCst) == 0;
        match up {
            Ok(Err(e @ LayerfsError::Unsupported { .. })) => skip!("{e}"),
            Ok(Ok(stack)) => break stack,
            Ok(Err(_)) | Err(_) => {
                assert!(hit, "call {nth}: an error without a panic");
                assert_eq!(node.leases(), [], "a lease of a mount that failed");
            }
        }
    };
    assert!(store.panics.load(Ordering::SeqCst) >= 3, "{nth}");
    for file in 0..FILES {
        assert_eq!(read(&stack.lowers[0], file), Ok(()), "f{file}");
    }
    node.release("one").unwrap();
    node.stop(false).unwrap();
    drop(node);
    assert_eq!(mounts_below(&root), Vec::<PathBuf>::new());
}
