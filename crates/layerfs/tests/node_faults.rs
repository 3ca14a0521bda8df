//! Every call that a node makes to a store while it mounts a stack and reads it through the
//! kernel, failing once in every way: no wrong byte, no hang, an error that names the object, and
//! whoever asks again gets what is right.
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
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock};
use std::time::Duration;

use common::{Gauge, LONG, noise, publish};
use layerpack_fixtures::guards::mounts_below;
use layerpack_fixtures::{ScratchDir, is_root, skip};
use layerpack_layerfs::fetch::FetchConfig;
use layerpack_layerfs::fuse::SessionConfig;
use layerpack_layerfs::{LayerfsError, LeaseSpec, Node, NodeConfig};
use layerpack_store::{
    BlobStore, BlobWriter, Digest, Fault, FaultStore, Key, LayerStore, MemStore, ObjectInfo,
    PutMode, PutOutcome, Result as StoreResult,
};

/// A store whose place another one can take while it is in use.
#[derive(Debug)]
struct Switch(RwLock<Arc<dyn BlobStore>>);

impl Switch {
    fn new(store: Arc<dyn BlobStore>) -> Arc<Self> {
        Arc::new(Self(RwLock::new(store)))
    }

    fn now(&self) -> Arc<dyn BlobStore> {
        Arc::clone(&self.0.read().unwrap())
    }

    fn set(&self, store: Arc<dyn BlobStore>) {
        *self.0.write().unwrap() = store;
    }
}

impl BlobStore for Switch {
    fn get(&self, key: &Key, max_len: u64) -> StoreResult<Option<Vec<u8>>> {
        self.now().get(key, max_len)
    }
    fn get_range(&self, key: &Key, range: Range<u64>) -> StoreResult<Vec<u8>> {
        self.now().get_range(key, range)
    }
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> StoreResult<PutOutcome> {
        self.now().put(key, bytes, mode)
    }
    fn put_stream(&self) -> StoreResult<Box<dyn BlobWriter + '_>> {
        unreachable!("a node streams nothing into a store")
    }
    fn size(&self, key: &Key) -> StoreResult<Option<u64>> {
        self.now().size(key)
    }
    fn list(&self, prefix: &str) -> StoreResult<Vec<ObjectInfo>> {
        self.now().list(prefix)
    }
    fn delete(&self, key: &Key) -> StoreResult<bool> {
        self.now().delete(key)
    }
    fn url(&self) -> String {
        self.now().url()
    }
}

/// A store whose nth range request does not come back before it is let go.
#[derive(Debug)]
struct Hanging {
    inner: Arc<dyn BlobStore>,
    nth: u64,
    calls: AtomicU64,
    gate: (Mutex<bool>, Condvar),
}

impl Hanging {
    fn new(inner: Arc<dyn BlobStore>, nth: u64) -> Arc<Self> {
        Arc::new(Self {
            inner,
            nth,
            calls: AtomicU64::new(0),
            gate: (Mutex::new(true), Condvar::new()),
        })
    }

    fn hung(&self) -> bool {
        self.calls.load(Ordering::SeqCst) >= self.nth
    }

    fn let_go(&self) {
        *self.gate.0.lock().unwrap() = false;
        self.gate.1.notify_all();
    }
}

impl BlobStore for Hanging {
    fn get(&self, key: &Key, max_len: u64) -> StoreResult<Option<Vec<u8>>> {
        self.inner.get(key, max_len)
    }
    fn get_range(&self, key: &Key, range: Range<u64>) -> StoreResult<Vec<u8>> {
        if self.calls.fetch_add(1, Ordering::SeqCst) + 1 == self.nth {
            let mut shut = self.gate.0.lock().unwrap();
            while *shut {
                shut = self.gate.1.wait(shut).unwrap();
            }
        }
        self.inner.get_range(key, range)
    }
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> StoreResult<PutOutcome> {
        self.inner.put(key, bytes, mode)
    }
    fn put_stream(&self) -> StoreResult<Box<dyn BlobWriter + '_>> {
        unreachable!("a node streams nothing into a store")
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

/// Files of a stack by name, and its layers in a store, the bottom first.
struct Sample {
    inner: Arc<dyn BlobStore>,
    digests: Vec<Digest>,
    files: BTreeMap<String, Vec<u8>>,
}

/// Two layers: small files that share frames, and some of several frames.
fn sample(scratch: &ScratchDir) -> Sample {
    let inner: Arc<dyn BlobStore> = Arc::new(MemStore::new());
    let store = LayerStore::new(Arc::clone(&inner));
    let mut files = BTreeMap::new();
    let mut digests = Vec::new();
    for (layer, sizes) in [
        ("a", &[700_000, 3000, 5, 90_000][..]),
        ("b", &[400_000, 20][..]),
    ] {
        let source = scratch.mkdir(layer).unwrap();
        for (i, size) in sizes.iter().enumerate() {
            let name = format!("{layer}{i}");
            let bytes = noise(digests.len() as u64 * 100 + i as u64, *size);
            std::fs::write(source.join(&name), &bytes).unwrap();
            files.insert(name, bytes);
        }
        digests.push(publish(&store, &format!("base/{layer}:1"), &source, &[]).digest);
    }
    Sample {
        inner,
        digests,
        files,
    }
}

fn start(root: &Path, store: &Arc<Switch>, read_timeout: Duration) -> Arc<Node> {
    let opened: Arc<dyn BlobStore> = Arc::clone(store) as Arc<dyn BlobStore>;
    Node::start(NodeConfig {
        housekeeping: Duration::from_secs(3600),
        fetch: FetchConfig {
            // Many requests.
            batch_bytes: 128 << 10,
            read_timeout,
            ..FetchConfig::RECOMMENDED
        },
        open_store: Arc::new(move |_| Ok(LayerStore::new(Arc::clone(&opened)))),
        ..NodeConfig::recommended(root.to_owned())
    })
    .unwrap()
}

fn lease() -> LeaseSpec {
    LeaseSpec {
        id: "one".to_owned(),
        owner: "test".to_owned(),
        pid: None,
    }
}

/// Reads every file of the stack; the names of those that could not be read. What can be read is
/// right.
fn read_files(lowers: &[PathBuf], sample: &Sample, context: &str) -> Vec<String> {
    let mut failed = Vec::new();
    for (name, expected) in &sample.files {
        let path = lowers.iter().map(|lower| lower.join(name));
        let path = path.into_iter().find(|path| path.exists()).unwrap();
        match std::fs::read(&path) {
            Ok(bytes) => assert!(bytes == *expected, "{context}: {name}: wrong bytes"),
            Err(e) => {
                // EIO, or ETIMEDOUT.
                assert!(matches!(e.raw_os_error(), Some(5 | 110)), "{context}: {e}");
                failed.push(name.clone());
            }
        }
    }
    failed
}

fn names_an_object(error: &LayerfsError) -> bool {
    let text = error.to_string();
    let objects = [
        "layerpack.json",
        "manifests/",
        "meta/",
        "maps/",
        "locators/",
    ];
    objects.iter().any(|object| text.contains(object))
}

/// The reason why file-backed mounts or FUSE are not to be had.
fn capable(scratch: &ScratchDir, sample: &Sample) -> Result<(), String> {
    if !is_root() {
        return Err("needs root".to_owned());
    }
    if !Path::new("/dev/fuse").exists() {
        return Err("needs /dev/fuse".to_owned());
    }
    let store = Switch::new(Arc::clone(&sample.inner));
    let node = start(&scratch.join("capable"), &store, LONG);
    match node.layer_up(&LayerStore::new(store), &sample.digests[0]) {
        Err(e @ LayerfsError::Unsupported { .. }) => Err(e.to_string()),
        Err(e) => panic!("{e}"),
        Ok(_) => Ok(()),
    }
}

#[test]
fn privileged_any_call_may_fail() {
    let scratch = ScratchDir::new("nodefaults").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let sample = sample(&scratch);
    if let Err(reason) = capable(&scratch, &sample) {
        skip!("{reason}");
    }
    for fault in Fault::ALL {
        let (mut refused, mut noticed, mut errors, mut clean) = (0, 0, 0, 0);
        for nth in 1.. {
            let context = format!("{fault:?} in call {nth}");
            let faulty = Arc::new(FaultStore::fail_nth(Arc::clone(&sample.inner), nth, fault));
            let switch = Switch::new(faulty.clone());
            let root = scratch.join(format!("{fault:?}-{nth}"));
            let node = start(&root, &switch, LONG);
            let store = LayerStore::new(switch.clone());
            let stack = match node.stack_up(&store, &sample.digests, &lease()) {
                Ok(stack) => stack,
                Err(error) => {
                    refused += 1;
                    assert!(faulty.fired(), "{context}: {error}");
                    assert!(names_an_object(&error), "{context}: {error}");
                    assert_eq!(node.leases(), [], "{context}");
                    if fault == Fault::Crash {
                        switch.set(Arc::clone(&sample.inner));
                    }
                    node.stack_up(&store, &sample.digests, &lease())
                        .unwrap_or_else(|e| panic!("{context}: {e}"))
                }
            };
            let failed = read_files(&stack.lowers, &sample, &context);
            assert!(failed.is_empty() || faulty.fired(), "{context}: {failed:?}");
            errors += failed.len();
            if fault == Fault::Crash {
                switch.set(Arc::clone(&sample.inner));
            }
            // Whoever reads again gets the bytes.
            let again = read_files(&stack.lowers, &sample, &context);
            assert!(again.is_empty(), "{context}: {again:?} after the fault");
            let totals = node.status().totals;
            assert_eq!(totals.inflight_bytes, 0, "{context}");
            assert!(totals.errors > 0 || failed.is_empty(), "{context}");
            noticed += totals.errors;
            node.release("one").unwrap();
            node.stop(false)
                .unwrap_or_else(|e| panic!("{context}: {e}"));
            drop(node);
            assert_eq!(mounts_below(&root), Vec::<PathBuf>::new(), "{context}");
            common::remove(&root);
            if !faulty.fired() {
                clean += 1;
                // Faults that concern some calls only leave others as they are.
                if nth > faulty.calls() {
                    break;
                }
            }
            assert!(nth < 500, "{context}: no end");
        }
        assert!(clean > 0);
        match fault {
            Fault::NoSpace | Fault::Delay | Fault::Duplicate => {
                assert_eq!((refused, noticed, errors), (0, 0, 0), "{fault:?}");
            }
            // Wrong bytes are asked for again.
            Fault::Truncate | Fault::Corrupt => {
                assert_eq!((refused, errors), (0, 0), "{fault:?}");
            }
            // What fails once the kernel mostly asks for again before its reader sees it.
            _ => assert!(
                refused >= 6 && noticed > 3,
                "{fault:?}: {refused} {noticed}"
            ),
        }
        assert!(errors > 3 || fault != Fault::Crash, "{errors}");
    }
}

/// A request that hangs costs a read its time limit and no more: the read ends while the request still
/// hangs, and what is asked again, by the kernel or another reader, is asked anew.
#[test]
fn privileged_any_read_of_the_store_may_hang() {
    let scratch = ScratchDir::new("nodehangs").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let sample = sample(&scratch);
    if let Err(reason) = capable(&scratch, &sample) {
        skip!("{reason}");
    }
    let mut hung = 0;
    for nth in 1.. {
        let context = format!("call {nth} hangs");
        let hanging = Hanging::new(Arc::clone(&sample.inner), nth);
        let switch = Switch::new(hanging.clone());
        let root = scratch.join(format!("hang-{nth}"));
        let node = start(&root, &switch, Duration::from_millis(400));
        let store = LayerStore::new(switch);
        let stack = node.stack_up(&store, &sample.digests, &lease()).unwrap();
        let end = std::time::Instant::now() + LONG;
        while !read_files(&stack.lowers, &sample, &context).is_empty() {
            assert!(std::time::Instant::now() < end, "{context}: never recovers");
        }
        hung += u32::from(hanging.hung());
        hanging.let_go();
        node.release("one").unwrap();
        node.stop(false).unwrap();
        drop(node);
        assert_eq!(mounts_below(&root), Vec::<PathBuf>::new(), "{context}");
        if !hanging.hung() {
            break;
        }
        assert!(nth < 500, "{context}: no end");
    }
    assert!(hung > 3, "{hung}");
}

/// Lets readers go however a test ends.
struct Opened<'a>(&'a Gauge);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.set_shut(false);
    }
}

/// However many reads wait for a store that hangs, those of another store do not wait for them.
#[test]
fn privileged_a_store_that_hangs_holds_up_no_other() {
    let scratch = ScratchDir::new("nodefair").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let sample = sample(&scratch);
    if let Err(reason) = capable(&scratch, &sample) {
        skip!("{reason}");
    }
    let gauge = Gauge::new(Arc::clone(&sample.inner));
    let slow = LayerStore::new(gauge.clone() as Arc<dyn BlobStore>);
    let url = scratch.join("other").to_str().unwrap().to_owned();
    let other = LayerStore::new(layerpack_store::open_url(&url).unwrap());
    let source = scratch.mkdir("elsewhere").unwrap();
    let expected = noise(7, 900_000);
    std::fs::write(source.join("file"), &expected).unwrap();
    let published = publish(&other, "base/other:1", &source, &[]);
    let opened = slow.clone();
    let recommended = NodeConfig::recommended(scratch.join("node"));
    let node = Node::start(NodeConfig {
        housekeeping: Duration::from_secs(3600),
        session: SessionConfig {
            wait_threads: 2,
            ..recommended.session
        },
        fetch: FetchConfig {
            threads: 2,
            batch_bytes: 128 << 10,
            // A quarter is left for other stores: what the kernel asks for at once.
            inflight_bytes: 4 << 20,
            read_timeout: LONG,
            ..FetchConfig::RECOMMENDED
        },
        open_store: Arc::new(move |_| Ok(opened.clone())),
        ..recommended
    })
    .unwrap();
    let stack = node.stack_up(&slow, &sample.digests, &lease()).unwrap();
    let large = stack.lowers.iter().map(|lower| lower.join("a0"));
    let large = large.into_iter().find(|path| path.exists()).unwrap();
    gauge.set_shut(true);
    std::thread::scope(|scope| {
        let opened = Opened(&gauge);
        let readers: Vec<_> = (0..5_u64)
            .map(|part| {
                let (large, bytes) = (&large, &sample.files["a0"]);
                scope.spawn(move || {
                    let file = std::fs::File::open(large).unwrap();
                    let mut buf = [0; 4096];
                    let at = part * 135_000;
                    std::os::unix::fs::FileExt::read_exact_at(&file, &mut buf, at).unwrap();
                    let at = at as usize;
                    assert!(buf == bytes[at..at + buf.len()], "wrong bytes at {at}");
                })
            })
            .collect();
        let end = std::time::Instant::now() + LONG;
        while node.metrics().meter.waiting < 3 {
            assert!(std::time::Instant::now() < end, "{:?}", node.metrics());
            std::thread::sleep(Duration::from_millis(5));
        }
        let spec = LeaseSpec {
            id: "two".to_owned(),
            ..lease()
        };
        let stack = node.stack_up(&other, &[published.digest], &spec).unwrap();
        let bytes = std::fs::read(stack.lowers[0].join("file")).unwrap();
        assert!(bytes == expected, "wrong bytes");
        assert!(readers.iter().all(|reader| !reader.is_finished()));
        drop(opened);
    });
    for id in ["one", "two"] {
        node.release(id).unwrap();
    }
    node.stop(false).unwrap();
}
