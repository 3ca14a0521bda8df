//! Data is cached once: what the page cache holds of a layer that was read, file by file.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    reason = "tests"
)]

mod common;

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{noise, publish};
use layerpack_fixtures::guards::mounts_below;
use layerpack_fixtures::{ScratchDir, is_root, skip};
use layerpack_layerfs::{LayerHandle, LayerfsError, Node, NodeConfig};
use layerpack_store::{LayerStore, Published};
use layerpack_sys::pagecache;

const MIB: u64 = 1 << 20;

/// Unmounts what a failed test leaves.
struct Cleanup(PathBuf);

impl Drop for Cleanup {
    fn drop(&mut self) {
        for mount in mounts_below(&self.0).into_iter().rev() {
            let _ = layerpack_sys::mount::unmount(&mount, true);
        }
    }
}

/// Bytes in the page cache, by who holds them.
#[derive(Debug)]
struct Pages {
    mounted: u64,
    blob: u64,
    cache: u64,
}

impl Pages {
    fn total(&self) -> u64 {
        self.mounted + self.blob + self.cache
    }
}

fn cached(path: &Path) -> u64 {
    let file = std::fs::File::open(path).unwrap();
    pagecache::cached_bytes(file.as_fd()).unwrap()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect()
}

struct Fixture {
    root: PathBuf,
    store: LayerStore,
    layer: Published,
    bytes: u64,
    _cleanup: Cleanup,
    _scratch: ScratchDir,
}

impl Fixture {
    fn new() -> Self {
        let scratch = ScratchDir::new("pages").unwrap();
        let cleanup = Cleanup(scratch.path().to_owned());
        let source = scratch.mkdir("source").unwrap();
        let mut bytes = 0;
        // Sizes are whole pages, so that every byte in the page cache is one that was read.
        for i in 0..100_u64 {
            std::fs::write(source.join(format!("large-{i}")), noise(i, 1 << 20)).unwrap();
            std::fs::write(source.join(format!("small-{i}")), noise(1000 + i, 8192)).unwrap();
            bytes += MIB + 8192;
        }
        let store = scratch.join("store");
        let store = LayerStore::new(layerpack_store::open_url(store.to_str().unwrap()).unwrap());
        let layer = publish(&store, "base/pages:1", &source, &[]);
        std::fs::remove_dir_all(&source).unwrap();
        Self {
            root: scratch.join("root"),
            store,
            layer,
            bytes,
            _cleanup: cleanup,
            _scratch: scratch,
        }
    }

    fn start(&self) -> std::sync::Arc<Node> {
        Node::start(NodeConfig {
            // Only when the test says so.
            housekeeping: Duration::from_secs(3600),
            ..NodeConfig::recommended(self.root.clone())
        })
        .unwrap()
    }

    fn read_all(&self, up: &LayerHandle) {
        let mut bytes = 0;
        for file in files(&up.mountpoint) {
            bytes += std::fs::read(file).unwrap().len() as u64;
        }
        assert_eq!(bytes, self.bytes);
    }

    fn pages(&self, up: &LayerHandle) -> Pages {
        let layer = up.layer_id.hex();
        Pages {
            mounted: files(&up.mountpoint).iter().map(|f| cached(f)).sum(),
            blob: cached(&self.root.join("blobs").join(&layer)),
            cache: cached(&self.root.join("cache").join(&layer).join("data")),
        }
    }

    /// Waits for what is dropped in the background; fails with what is there if it stays.
    fn settle(&self, up: &LayerHandle, what: &str, good: impl Fn(&Pages) -> bool) {
        let begun = Instant::now();
        loop {
            let pages = self.pages(up);
            if good(&pages) {
                return;
            }
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "{what}: {pages:?} for {} bytes read",
                self.bytes
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What is true after a read, at once and after a round of housekeeping.
    fn check(&self, node: &Node, up: &LayerHandle, what: &str) {
        // At once: what lies below the mount is bounded, however much was read.
        self.settle(up, what, |pages| pages.blob <= 20 * MIB);
        let pages = self.pages(up);
        assert!(pages.mounted >= self.bytes * 95 / 100, "{what}: {pages:?}");
        node.tidy();
        self.settle(up, what, |pages| pages.total() <= self.bytes * 11 / 10);
    }
}

#[test]
fn privileged_data_is_in_the_page_cache_once() {
    if !is_root() {
        skip!("needs root");
    }
    let fixture = Fixture::new();
    let node = fixture.start();
    let up = match node.layer_up(&fixture.store, &fixture.layer.digest) {
        Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
        other => other.unwrap(),
    };
    {
        let file = std::fs::File::open(&up.mountpoint).unwrap();
        if let Err(e) = pagecache::cached_bytes(file.as_fd()) {
            skip!("needs cachestat: {e}");
        }
    }
    // From the store.
    fixture.read_all(&up);
    fixture.check(&node, &up, "lazy, cold");
    // From the kernel's own cache.
    fixture.read_all(&up);
    fixture.check(&node, &up, "lazy, warm");
    let fetched = node.status().totals.fetched_bytes;
    node.stop(false).unwrap();
    drop(node);

    // From the node's cache, by another process in effect.
    let node = fixture.start();
    let up = node
        .layer_up(&fixture.store, &fixture.layer.digest)
        .unwrap();
    fixture.read_all(&up);
    fixture.check(&node, &up, "complete, cold");
    fixture.read_all(&up);
    fixture.check(&node, &up, "complete, warm");
    let status = node.status();
    assert!(fetched >= fixture.bytes / 2);
    assert_eq!(status.totals.fetched_bytes, 0, "all of it was here");
    node.stop(false).unwrap();
}
