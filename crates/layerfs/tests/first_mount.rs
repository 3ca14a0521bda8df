//! What the first mount of layers asks the store for: how many objects, and how many round trips one
//! after the other. Round trips are counted, not timed: a store lets requests through in rounds, and
//! each waits until all of its round are there. What asked for them one by one would wait for ever.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "tests"
)]

mod common;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use common::{noise, publish};
use layerpack_fixtures::guards::mounts_below;
use layerpack_fixtures::{ScratchDir, is_root, skip};
use layerpack_layerfs::whole::{Whole, WholeConfig};
use layerpack_layerfs::{GivenManifests, LayerfsError, LeaseSpec, Node, NodeConfig};
use layerpack_store::{
    BlobStore, BlobWriter, Digest, Fault, FaultStore, Key, LayerStore, Manifest, MemStore,
    ObjectInfo, Operation, PartsWanted, PutMode, PutOutcome, Reference, Result as StoreResult,
    StoreError,
};

/// How long a request waits for the others of its round before the test fails.
const STUCK: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct State {
    /// Beginnings of the keys that are still to come in this round and in those after it.
    rounds: Vec<Vec<&'static str>>,
    at: usize,
    /// Requests that were in no round, and what a round lacked that never got full.
    wrong: Vec<String>,
    requests: usize,
}

/// A store that lets reads through in rounds.
#[derive(Debug)]
struct Rounds {
    inner: Arc<dyn BlobStore>,
    /// Whether it takes leases.
    writable: bool,
    state: Mutex<State>,
    full: Condvar,
}

impl Rounds {
    fn new(inner: Arc<dyn BlobStore>, writable: bool, rounds: &[&[&'static str]]) -> Arc<Self> {
        Arc::new(Self {
            inner,
            writable,
            state: Mutex::new(State {
                rounds: rounds.iter().map(|round| round.to_vec()).collect(),
                ..State::default()
            }),
            full: Condvar::new(),
        })
    }

    fn pass(&self, operation: &str, key: &str) {
        let mut state = self.state.lock().unwrap();
        state.requests += 1;
        let at = state.at;
        let found = state
            .rounds
            .get(at)
            .and_then(|round| round.iter().position(|begin| key.starts_with(begin)));
        let Some(found) = found else {
            state.wrong.push(format!("{operation} {key} in round {at}"));
            return;
        };
        state.rounds[at].remove(found);
        if state.rounds[at].is_empty() {
            state.at += 1;
            self.full.notify_all();
            return;
        }
        let begun = Instant::now();
        while state.at == at {
            let left = STUCK.saturating_sub(begun.elapsed());
            if left.is_zero() {
                let lacking = format!("round {at} lacks {:?}", state.rounds[at]);
                state.wrong.push(lacking);
                state.at += 1;
                self.full.notify_all();
                return;
            }
            state = self.full.wait_timeout(state, left).unwrap().0;
        }
    }

    /// All rounds came, and nothing else.
    fn assert_done(&self, requests: usize) {
        let state = self.state.lock().unwrap();
        assert!(state.wrong.is_empty(), "{:?}", state.wrong);
        assert_eq!(state.at, state.rounds.len(), "{:?}", state.rounds);
        assert_eq!(state.requests, requests);
    }

    fn refused<T>(&self) -> StoreResult<T> {
        Err(StoreError::NotSupported {
            operation: "writing",
            store: self.url(),
            why: "it is for reading",
        })
    }
}

impl BlobStore for Rounds {
    fn get(&self, key: &Key, max_len: u64) -> StoreResult<Option<Vec<u8>>> {
        self.pass("get", key.as_str());
        self.inner.get(key, max_len)
    }
    fn get_range(&self, key: &Key, range: Range<u64>) -> StoreResult<Vec<u8>> {
        self.pass("range", key.as_str());
        self.inner.get_range(key, range)
    }
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> StoreResult<PutOutcome> {
        if !self.writable {
            return self.refused();
        }
        self.pass("put", key.as_str());
        self.inner.put(key, bytes, mode)
    }
    fn put_stream(&self) -> StoreResult<Box<dyn BlobWriter + '_>> {
        self.refused()
    }
    fn size(&self, key: &Key) -> StoreResult<Option<u64>> {
        self.pass("size", key.as_str());
        self.inner.size(key)
    }
    fn list(&self, prefix: &str) -> StoreResult<Vec<ObjectInfo>> {
        self.pass("list", prefix);
        self.inner.list(prefix)
    }
    fn delete(&self, key: &Key) -> StoreResult<bool> {
        if !self.writable {
            return self.refused();
        }
        self.inner.delete(key)
    }
    fn url(&self) -> String {
        self.inner.url()
    }
}

/// Three layers, their names, digests and manifests.
struct Sample {
    blobs: Arc<dyn BlobStore>,
    references: Vec<Reference>,
    digests: Vec<Digest>,
    manifests: Vec<Manifest>,
    scratch: ScratchDir,
}

impl Sample {
    fn new() -> Self {
        let scratch = ScratchDir::new("first-mount").unwrap();
        let blobs: Arc<dyn BlobStore> = Arc::new(MemStore::new());
        let store = LayerStore::new(Arc::clone(&blobs));
        let mut sample = Self {
            blobs,
            references: Vec::new(),
            digests: Vec::new(),
            manifests: Vec::new(),
            scratch,
        };
        for number in 0..3_u64 {
            let source = sample.scratch.mkdir(format!("source{number}")).unwrap();
            let name = source.join(format!("file{number}"));
            std::fs::write(name, noise(number, 20_000)).unwrap();
            let reference = format!("base/l{number}:1");
            let published = publish(&store, &reference, &source, &[]);
            sample.references.push(reference.parse().unwrap());
            sample.digests.push(published.digest);
            let manifest = store.manifest(&published.digest).unwrap();
            sample.manifests.push(manifest);
        }
        sample
    }

    fn given(&self) -> GivenManifests {
        GivenManifests::of(self.manifests.iter().map(|m| m.to_bytes().unwrap()))
    }

    fn store(&self, writable: bool, rounds: &[&[&'static str]]) -> (Arc<Rounds>, LayerStore) {
        let rounds = Rounds::new(Arc::clone(&self.blobs), writable, rounds);
        let store = LayerStore::new(Arc::clone(&rounds) as Arc<dyn BlobStore>);
        (rounds, store)
    }
}

/// Marker, metadata, maps and locators of three layers.
const PARTS: &[&str] = &[
    "layerpack.json",
    "meta/",
    "meta/",
    "meta/",
    "maps/",
    "maps/",
    "maps/",
    "locators/",
    "locators/",
    "locators/",
];

#[test]
fn names_are_resolved_in_one_round() {
    let sample = Sample::new();
    let (rounds, store) = sample.store(
        false,
        &[
            &["layerpack.json", "refs/", "refs/", "refs/"],
            &["manifests/", "manifests/", "manifests/"],
            &["refs/"],
        ],
    );
    let loaded = store.load_all(&sample.references).unwrap();
    let digests: Vec<Digest> = loaded.iter().map(|(digest, _)| *digest).collect();
    assert_eq!(digests, sample.digests);
    // The marker is known from then on.
    assert_eq!(store.manifests(&digests).unwrap(), sample.manifests);
    assert_eq!(store.load(&sample.references[1]).unwrap().0, digests[1]);
    rounds.assert_done(8);

    // References without a copy of their manifest, or with another one, cost a second round.
    let forged = |manifest: &Digest, copy: &str| {
        format!(r#"{{"format":1,"manifest":"{manifest}"{copy}}}"#).into_bytes()
    };
    for (number, copy) in [(0, ""), (2, r#","text":"{}""#)] {
        let key = Key::reference(&sample.references[number]);
        let bytes = forged(&digests[number], copy);
        sample.blobs.put(&key, &bytes, PutMode::Overwrite).unwrap();
    }
    let (rounds, store) = sample.store(
        false,
        &[
            &["layerpack.json", "refs/", "refs/", "refs/"],
            &["manifests/", "manifests/"],
        ],
    );
    let again = store.load_all(&sample.references).unwrap();
    assert_eq!(again, loaded);
    rounds.assert_done(6);
}

#[test]
fn what_is_missing_of_a_layer_comes_at_once_and_is_verified() {
    let sample = Sample::new();
    let manifest = &sample.manifests[0];
    let all = PartsWanted {
        meta: true,
        map: true,
        locator: true,
        known_map: None,
    };
    let (rounds, store) = sample.store(
        false,
        &[
            &["layerpack.json", "meta/", "maps/", "locators/"],
            &["locators/"],
        ],
    );
    let parts = store.parts(manifest, all).unwrap();
    let good = LayerStore::new(Arc::clone(&sample.blobs));
    let map = parts.map.unwrap().unwrap();
    assert_eq!(parts.meta.unwrap().unwrap(), good.meta(manifest).unwrap());
    assert_eq!(map.to_bytes(), good.map(manifest).unwrap().to_bytes());
    let located = good.locator(manifest, &map).unwrap().to_bytes();
    assert_eq!(parts.locator.unwrap().unwrap().to_bytes(), located);
    // The locator alone, against a map that is at hand.
    let wanted = PartsWanted {
        locator: true,
        known_map: Some(&map),
        ..PartsWanted::default()
    };
    let parts = store.parts(manifest, wanted).unwrap();
    assert_eq!(parts.locator.unwrap().unwrap().to_bytes(), located);
    assert!(parts.meta.is_none() && parts.map.is_none());
    rounds.assert_done(5);

    // Each is an error of its own, and a locator without a map is none.
    let damage = |key: Key, bytes: &[u8]| {
        sample.blobs.put(&key, bytes, PutMode::Overwrite).unwrap();
    };
    damage(Key::meta(&manifest.meta.digest), b"no image");
    let parts = good.parts(manifest, all).unwrap();
    assert!(parts.meta.unwrap().unwrap_err().is_damage());
    assert!(parts.map.unwrap().is_ok() && parts.locator.unwrap().is_ok());
    damage(Key::locator(&manifest.map.digest), b"no locator");
    let parts = good.parts(manifest, all).unwrap();
    assert!(parts.locator.unwrap().unwrap_err().is_damage());
    assert!(
        sample
            .blobs
            .delete(&Key::map(&manifest.map.digest))
            .unwrap()
    );
    let parts = good.parts(manifest, all).unwrap();
    let error = parts.map.unwrap().unwrap_err();
    assert!(matches!(error, StoreError::Missing { .. }), "{error}");
    assert!(parts.locator.is_none());
    // What the marker does not allow is not given out.
    damage(Key::marker(), b"{\"format\":2,\"incompat\":[]}");
    let fresh = LayerStore::new(Arc::clone(&sample.blobs));
    fresh.parts(manifest, all).unwrap_err();
    fresh.load_all(&sample.references).unwrap_err();
    fresh.manifest(&sample.digests[1]).unwrap_err();
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

fn lease(id: &str) -> LeaseSpec {
    LeaseSpec {
        id: id.to_owned(),
        owner: "test".to_owned(),
        pid: None,
    }
}

fn node(root: &Path) -> Result<Arc<Node>, String> {
    if !is_root() {
        return Err("needs root".to_owned());
    }
    let config = NodeConfig {
        housekeeping: Duration::from_secs(3600),
        ..NodeConfig::recommended(root.to_owned())
    };
    Node::start(config).map_err(|e| e.to_string())
}

#[test]
fn privileged_a_stack_comes_up_in_one_round() {
    let sample = Sample::new();
    let root = sample.scratch.join("root");
    let _cleanup = Cleanup(root.clone());
    let node = match node(&root) {
        Ok(node) => node,
        Err(reason) => skip!("{reason}"),
    };
    let given = sample.given();
    let (rounds, store) = sample.store(false, &[PARTS]);
    let stack = match node.stack_up_with(&store, &sample.digests, &given, &lease("a")) {
        Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
        stack => stack.unwrap(),
    };
    rounds.assert_done(PARTS.len());
    for (number, lower) in stack.lowers.iter().rev().enumerate() {
        assert!(lower.join(format!("file{number}")).is_file());
    }
    // Mounted again, and mounted in part: nothing is asked for what is up.
    let (rounds, store) = sample.store(false, &[]);
    node.stack_up_with(&store, &sample.digests, &given, &lease("b"))
        .unwrap();
    rounds.assert_done(0);
    node.release("a").unwrap();
    node.release("b").unwrap();
    node.stop(true).unwrap();
}

#[test]
fn privileged_manifests_that_nobody_gave_are_read_at_once() {
    let sample = Sample::new();
    let root = sample.scratch.join("root");
    let _cleanup = Cleanup(root.clone());
    let node = match node(&root) {
        Ok(node) => node,
        Err(reason) => skip!("{reason}"),
    };
    let (rounds, store) = sample.store(
        false,
        &[
            &["layerpack.json", "manifests/", "manifests/", "manifests/"],
            &PARTS[1..],
        ],
    );
    match node.stack_up(&store, &sample.digests, &lease("a")) {
        Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
        stack => drop(stack.unwrap()),
    }
    rounds.assert_done(PARTS.len() + 3);
    node.stop(true).unwrap();
}

/// Names to a mounted stack, from a store that takes no lease: two round trips.
#[test]
fn privileged_names_are_mounted_in_two_rounds() {
    let sample = Sample::new();
    let root = sample.scratch.join("root");
    let _cleanup = Cleanup(root.clone());
    let node = match node(&root) {
        Ok(node) => node,
        Err(reason) => skip!("{reason}"),
    };
    let names: &[&str] = &["layerpack.json", "refs/", "refs/", "refs/"];
    let (rounds, store) = sample.store(false, &[names, &PARTS[1..]]);
    let loaded = store.load_all(&sample.references).unwrap();
    let given = GivenManifests::of(loaded.iter().map(|(_, m)| m.to_bytes().unwrap()));
    match node.stack_up_with(&store, &sample.digests, &given, &lease("a")) {
        Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
        stack => drop(stack.unwrap()),
    }
    rounds.assert_done(names.len() + PARTS.len() - 1);
    node.stop(true).unwrap();
}

#[test]
fn privileged_a_lease_is_got_beside_the_layers() {
    let sample = Sample::new();
    let root = sample.scratch.join("root");
    let _cleanup = Cleanup(root.clone());
    let node = match node(&root) {
        Ok(node) => node,
        Err(reason) => skip!("{reason}"),
    };
    // The lease, then a look for collectors, then the manifests, which were read before.
    let mut first = PARTS.to_vec();
    first.push("leases/node-");
    let rest: [&[&str]; 2] = [&["gc/sweep-"], &["manifests/"; 3]];
    let (rounds, store) = sample.store(true, &[&first, rest[0], rest[1]]);
    match node.stack_up_with(&store, &sample.digests, &sample.given(), &lease("a")) {
        Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
        stack => drop(stack.unwrap()),
    }
    rounds.assert_done(first.len() + 4);
    // The same again costs nothing.
    let (rounds, store) = sample.store(true, &[]);
    node.stack_up_with(&store, &sample.digests, &sample.given(), &lease("b"))
        .unwrap();
    rounds.assert_done(0);
    node.release("a").unwrap();
    node.release("b").unwrap();
    node.stop(true).unwrap();
    drop(node);

    // One that was collected meanwhile cannot be mounted, whatever the caller has read.
    let gone = &sample.digests[1];
    assert!(sample.blobs.delete(&Key::manifest(gone)).unwrap());
    let other = sample.scratch.join("other");
    let _cleanup = Cleanup(other.clone());
    let node = self::node(&other).unwrap();
    let store = LayerStore::new(Arc::clone(&sample.blobs));
    let error = node
        .stack_up_with(&store, &sample.digests, &sample.given(), &lease("a"))
        .unwrap_err();
    let LayerfsError::Store(StoreError::Missing { key, .. }) = &error else {
        panic!("{error}");
    };
    assert_eq!(*key, Key::manifest(gone).to_string());
    assert!(node.leases().is_empty());
    // It left no copy behind that would be believed.
    node.stack_up(&store, &[*gone], &lease("b")).unwrap_err();
    node.stop(true).unwrap();
}

/// A store that lets through what is asked of it, but for a lease, which it refuses.
#[test]
fn privileged_a_lease_that_is_refused_keeps_nobody() {
    let sample = Sample::new();
    let root = sample.scratch.join("root");
    let _cleanup = Cleanup(root.clone());
    let node = match node(&root) {
        Ok(node) => node,
        Err(reason) => skip!("{reason}"),
    };
    let failing = |fault| {
        let blobs = Arc::clone(&sample.blobs);
        let blobs = FaultStore::fail_nth_of(blobs, Operation::Put, 1, fault);
        LayerStore::new(Arc::new(blobs) as Arc<dyn BlobStore>)
    };
    match node.stack_up_with(
        &failing(Fault::Error),
        &sample.digests,
        &sample.given(),
        &lease("a"),
    ) {
        Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
        stack => assert_eq!(stack.unwrap().lowers.len(), 3),
    }
    assert!(sample.blobs.list("leases/").unwrap().is_empty());
    node.stop(true).unwrap();
}

/// While a collector deletes a layer, nothing is mounted of it, though all was fetched; when it has
/// given up, and the layer is there, the same call mounts it.
#[test]
fn privileged_what_is_being_deleted_is_not_mounted() {
    let sample = Sample::new();
    let root = sample.scratch.join("root");
    let _cleanup = Cleanup(root.clone());
    let node = match node(&root) {
        Ok(node) => node,
        Err(reason) => skip!("{reason}"),
    };
    let store = LayerStore::new(Arc::clone(&sample.blobs));
    // A marker whose list is not to be had stands for everything.
    let marker = Key::new("gc/sweep-0123-4567").unwrap();
    sample.blobs.put(&marker, b"x", PutMode::Overwrite).unwrap();
    let mount = || node.stack_up_with(&store, &sample.digests, &sample.given(), &lease("a"));
    match mount() {
        Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
        Err(LayerfsError::Store(StoreError::Collecting { .. })) => {}
        other => panic!("{other:?}"),
    }
    assert!(mounts_below(&root.join("layers")).is_empty());
    assert!(node.leases().is_empty());
    assert!(sample.blobs.delete(&marker).unwrap());
    assert_eq!(mount().unwrap().lowers.len(), 3);
    node.stop(true).unwrap();
}

/// An object that was not there when it was asked for, before the lease was: the layer was collected
/// and published anew in between.
#[test]
fn privileged_what_comes_back_before_the_lease_is_asked_for_again() {
    let sample = Sample::new();
    let root = sample.scratch.join("root");
    let _cleanup = Cleanup(root.clone());
    let node = match node(&root) {
        Ok(node) => node,
        Err(reason) => skip!("{reason}"),
    };
    let meta = Key::meta(&sample.manifests[0].meta.digest);
    let bytes = sample.blobs.get(&meta, 1 << 20).unwrap().unwrap();
    assert!(sample.blobs.delete(&meta).unwrap());
    let store = LayerStore::new(Arc::new(ComesBack {
        inner: Arc::clone(&sample.blobs),
        key: meta.clone(),
        bytes,
        asked: Mutex::new(false),
        was: Condvar::new(),
    }) as Arc<dyn BlobStore>);
    let digests = &sample.digests[..1];
    match node.stack_up_with(&store, digests, &sample.given(), &lease("a")) {
        Err(e @ LayerfsError::Unsupported { .. }) => skip!("{e}"),
        stack => assert_eq!(stack.unwrap().lowers.len(), 1),
    }
    // Gone for good, it is an error that names it.
    node.release("a").unwrap();
    node.stop(true).unwrap();
    drop(node);
    assert!(sample.blobs.delete(&meta).unwrap());
    let node = self::node(&sample.scratch.join("other")).unwrap();
    let _cleanup = Cleanup(sample.scratch.join("other"));
    let store = LayerStore::new(Arc::clone(&sample.blobs));
    let error = node
        .stack_up_with(&store, digests, &sample.given(), &lease("a"))
        .unwrap_err();
    assert!(error.to_string().contains(meta.as_str()), "{error}");
    node.stop(true).unwrap();
}

/// A store in which an object is missing until the lease is written, which waits until somebody has
/// missed it.
#[derive(Debug)]
struct ComesBack {
    inner: Arc<dyn BlobStore>,
    key: Key,
    bytes: Vec<u8>,
    asked: Mutex<bool>,
    was: Condvar,
}

impl BlobStore for ComesBack {
    fn get(&self, key: &Key, max_len: u64) -> StoreResult<Option<Vec<u8>>> {
        let got = self.inner.get(key, max_len);
        if *key == self.key {
            *self.asked.lock().unwrap() = true;
            self.was.notify_all();
        }
        got
    }
    fn get_range(&self, key: &Key, range: Range<u64>) -> StoreResult<Vec<u8>> {
        self.inner.get_range(key, range)
    }
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> StoreResult<PutOutcome> {
        if key.as_str().starts_with("leases/") {
            let asked = self.asked.lock().unwrap();
            let waited = self.was.wait_timeout_while(asked, STUCK, |asked| !*asked);
            assert!(
                *waited.unwrap().0,
                "the object was not asked for before the lease"
            );
            self.inner.put(&self.key, &self.bytes, PutMode::IfAbsent)?;
        }
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

#[test]
fn a_tree_without_a_node_opens_in_one_round() {
    let sample = Sample::new();
    let (rounds, store) = sample.store(false, &[PARTS]);
    let layers: Vec<(Digest, Manifest)> = sample
        .digests
        .iter()
        .copied()
        .zip(sample.manifests.iter().cloned())
        .collect();
    let config = WholeConfig::recommended(sample.scratch.join("cache"));
    drop(Whole::open(&store, &layers, config.clone()).unwrap());
    rounds.assert_done(PARTS.len());
    // What is kept does without the store, but for where its frames are.
    let again = ["layerpack.json", "locators/", "locators/", "locators/"];
    let (rounds, store) = sample.store(false, &[&again]);
    drop(Whole::open(&store, &layers, config).unwrap());
    rounds.assert_done(again.len());
}
