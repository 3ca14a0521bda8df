//! The serving process is killed with -9 while the kernel reads from it.
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

use std::collections::BTreeMap;
use std::io::BufRead as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{LONG, publish, sample_tree};
use layerpack_fixtures::guards::mounts_below;
use layerpack_fixtures::{ChildGuard, ScratchDir, is_root, skip};
use layerpack_layerfs::{LayerfsError, LeaseSpec, Node, NodeConfig};
use layerpack_store::{
    BlobStore, BlobWriter, Digest, FileStore, Key, LayerStore, ObjectInfo, PutMode, PutOutcome,
    Result as StoreResult,
};

const SCRATCH: &str = "LAYERPACK_TEST_CRASH_SCRATCH";
const MANIFEST: &str = "LAYERPACK_TEST_CRASH_MANIFEST";

/// A store that takes its time, so that reads are under way when the kill comes.
#[derive(Debug)]
struct Slow(FileStore);

impl BlobStore for Slow {
    fn get(&self, key: &Key, max_len: u64) -> StoreResult<Option<Vec<u8>>> {
        self.0.get(key, max_len)
    }
    fn get_range(&self, key: &Key, range: Range<u64>) -> StoreResult<Vec<u8>> {
        std::thread::sleep(Duration::from_millis(8));
        self.0.get_range(key, range)
    }
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> StoreResult<PutOutcome> {
        self.0.put(key, bytes, mode)
    }
    fn put_stream(&self) -> StoreResult<Box<dyn BlobWriter + '_>> {
        self.0.put_stream()
    }
    fn size(&self, key: &Key) -> StoreResult<Option<u64>> {
        self.0.size(key)
    }
    fn list(&self, prefix: &str) -> StoreResult<Vec<ObjectInfo>> {
        self.0.list(prefix)
    }
    fn delete(&self, key: &Key) -> StoreResult<bool> {
        self.0.delete(key)
    }
    fn url(&self) -> String {
        self.0.url()
    }
}

fn config(root: &Path) -> NodeConfig {
    let mut config = NodeConfig::recommended(root.to_owned());
    config.fetch.batch_bytes = 32 << 10;
    config.housekeeping = Duration::from_secs(3600);
    config
}

fn lease() -> LeaseSpec {
    LeaseSpec {
        id: "sandbox".to_owned(),
        owner: "test".to_owned(),
        pid: None,
    }
}

/// Not a test of its own: the process that is killed.
#[test]
#[ignore = "a child process of another test"]
fn child_that_serves_a_layer() {
    let Some(scratch) = std::env::var_os(SCRATCH).map(PathBuf::from) else {
        return;
    };
    let manifest: Digest = std::env::var(MANIFEST).unwrap().parse().unwrap();
    let store = Slow(FileStore::new(scratch.join("store")).unwrap());
    let store = LayerStore::new(Arc::new(store));
    let node = Node::start(config(&scratch.join("root"))).unwrap();
    let stack = node.stack_up(&store, &[manifest], &lease()).unwrap();
    println!("\nSERVING {}", stack.lowers[0].display());
    std::thread::sleep(Duration::from_secs(600));
}

/// Detaches what a failed test leaves.
struct Cleanup(PathBuf);

impl Drop for Cleanup {
    fn drop(&mut self) {
        for mount in mounts_below(&self.0).into_iter().rev() {
            let _ = layerpack_sys::mount::unmount(&mount, true);
        }
    }
}

fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut directories = vec![dir.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else {
                let bytes = std::fs::read(&path).unwrap();
                found.insert(path.strip_prefix(dir).unwrap().to_owned(), bytes);
            }
        }
    }
    found
}

#[test]
fn privileged_a_killed_server_gives_errors_and_never_zeros() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    let scratch = ScratchDir::new("crash").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let source = scratch.join("source");
    sample_tree(&source);
    let expected = files(&source);
    let store = LayerStore::new(Arc::new(FileStore::new(scratch.join("store")).unwrap()));
    let layer = publish(&store, "base/sample:1", &source, &[]);
    let root = scratch.join("root");
    {
        let node = Node::start(config(&root)).unwrap();
        match node.layer_up(&store, &layer.digest) {
            Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
            other => drop(other.unwrap()),
        }
    }
    let mut seen_errors = 0;
    for round in 0..4_u64 {
        // Each round starts with nothing cached but what earlier rounds left in the first
        // half of them, and with everything to fetch in the others.
        if round >= 2 {
            std::fs::remove_dir_all(root.join("cache")).unwrap();
        }
        let mut child = Command::new(std::env::current_exe().unwrap());
        child
            .args([
                "--ignored",
                "--exact",
                "--nocapture",
                "child_that_serves_a_layer",
            ])
            .env(SCRATCH, scratch.path())
            .env(MANIFEST, layer.digest.to_string())
            .stdout(Stdio::piped());
        let mut child = ChildGuard::spawn(&mut child).unwrap();
        let lines = std::io::BufReader::new(child.child().stdout.take().unwrap()).lines();
        let mountpoint = lines
            .map(Result::unwrap)
            .find_map(|line| line.strip_prefix("SERVING ").map(PathBuf::from))
            .expect("the child ended early");

        let (right, errors) = (AtomicU64::new(0), AtomicU64::new(0));
        let killed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..6_usize {
                let (expected, mountpoint) = (&expected, &mountpoint);
                let (right, errors, killed) = (&right, &errors, &killed);
                scope.spawn(move || {
                    // Each in another order; on until everything was tried after the kill.
                    let mut order: Vec<_> = expected.iter().collect();
                    order.rotate_left(thread * 11);
                    loop {
                        let last = killed.load(Ordering::SeqCst);
                        for (path, bytes) in &order {
                            match std::fs::read(mountpoint.join(path)) {
                                Ok(got) => {
                                    assert!(&got == *bytes, "wrong bytes of {}", path.display());
                                    right.fetch_add(1, Ordering::SeqCst);
                                }
                                Err(e) => {
                                    // EIO; ENOTCONN or ECONNABORTED from an open of the blob.
                                    let number = e.raw_os_error();
                                    assert!(matches!(number, Some(5 | 103 | 107)), "{e}");
                                    assert!(
                                        child_is_gone(killed),
                                        "{} failed under a living server: {e}",
                                        path.display()
                                    );
                                    errors.fetch_add(1, Ordering::SeqCst);
                                }
                            }
                        }
                        if last {
                            break;
                        }
                    }
                });
            }
            while right.load(Ordering::SeqCst) < 5 + round * 9 {
                std::thread::sleep(Duration::from_millis(1));
            }
            // Set first: a read may fail before kill(2) has returned.
            killed.store(true, Ordering::SeqCst);
            child.child().kill().unwrap();
            child.child().wait().unwrap();
        });
        seen_errors += errors.load(Ordering::SeqCst);

        // Alternate: unmount by hand, as an administrator would, and leave it to the next node.
        if round % 2 == 0 {
            for mount in mounts_below(&root).into_iter().rev() {
                unmount(&mount);
            }
        } else {
            assert_eq!(mounts_below(&root).len(), 2);
        }
        let node = Node::start(config(&root)).unwrap();
        assert_eq!(node.leases().len(), 1, "the lease outlived its server");
        assert_eq!(node.status().problems, Vec::<String>::new());
        // What the dead server had cached is there: bytes written before it died are not
        // fetched again.
        for (path, bytes) in &expected {
            let got = std::fs::read(mountpoint.join(path)).unwrap();
            assert!(&got == bytes, "{}", path.display());
        }
        let status = node.status();
        assert_eq!(status.totals.errors, 0);
        node.stop(true).unwrap();
        drop(node);
        assert_eq!(mounts_below(scratch.path()), Vec::<PathBuf>::new());
        std::fs::remove_file(root.join("leases/sandbox.json")).unwrap();
    }
    assert!(seen_errors > 0, "every kill came too late to matter");
}

/// Unmounts without force; patient, since a mount namespace that some other test makes copies
/// every mount of the machine for a moment.
fn unmount(target: &Path) {
    let end = Instant::now() + LONG;
    while let Err(e) = layerpack_sys::mount::unmount(target, false) {
        assert!(Instant::now() < end, "{e}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn child_is_gone(killed: &AtomicBool) -> bool {
    killed.load(Ordering::SeqCst)
}
