//! What a node learns by itself from the first reads of its mounts.
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
use std::time::{Duration, Instant};

use common::{LONG, noise, publish, sample_tree};
use layerpack_fixtures::guards::mounts_below;
use layerpack_fixtures::{ScratchDir, is_root, skip};
use layerpack_layerfs::{
    LEARNT, LayerStatus, LayerfsError, LeaseSpec, Node, NodeConfig, PrefetchMode, PrefetchSpec,
    Stack,
};
use layerpack_store::profile::{Profile, ProfileEntry, ProfileLayer};
use layerpack_store::{Digest, FileStore, LayerId, LayerStore, Published};

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

struct Site {
    store: LayerStore,
    layer: Published,
    scratch: ScratchDir,
    _cleanup: Cleanup,
}

fn site(label: &str) -> Site {
    let scratch = ScratchDir::new(label).unwrap();
    let store = LayerStore::new(Arc::new(FileStore::new(scratch.join("store")).unwrap()));
    let source = scratch.join("source");
    sample_tree(&source);
    let layer = publish(&store, "base/sample:1", &source, &[]);
    Site {
        store,
        layer,
        _cleanup: Cleanup(scratch.path().to_owned()),
        scratch,
    }
}

fn unable() -> bool {
    !is_root() || !Path::new("/dev/fuse").exists()
}

impl Site {
    fn node(&self, name: &str, change: impl FnOnce(&mut NodeConfig)) -> Option<Arc<Node>> {
        let mut config = NodeConfig::recommended(self.scratch.join(name));
        config.housekeeping = Duration::from_secs(3600);
        // Reads of one small file are to stay small.
        config.read_ahead_kb = 0;
        change(&mut config);
        match Node::start(config) {
            Ok(node) => Some(node),
            Err(LayerfsError::Unsupported { .. }) => None,
            Err(e) => panic!("{e}"),
        }
    }

    fn up(&self, node: &Node, lease: &str) -> (Stack, PathBuf) {
        let lease = LeaseSpec {
            id: lease.to_owned(),
            owner: "test".to_owned(),
            pid: None,
        };
        let stack = node
            .stack_up(&self.store, &[self.layer.digest], &lease)
            .unwrap();
        let dir = stack.lowers.last().unwrap().clone();
        (stack, dir)
    }
}

fn layer_of(node: &Node, layer: LayerId) -> LayerStatus {
    let layers = node.status().layers;
    layers.into_iter().find(|l| l.layer_id == layer).unwrap()
}

fn read_some(dir: &Path) {
    for i in [50_usize, 3, 17] {
        let bytes = std::fs::read(dir.join(format!("small/{i}"))).unwrap();
        assert!(bytes == noise((i % 50) as u64, 100 + i * 97));
    }
    assert!(std::fs::read(dir.join("middle")).unwrap() == noise(1000, 60_000));
}

fn by_profile() -> PrefetchSpec {
    PrefetchSpec {
        mode: PrefetchMode::Profile,
        profile: None,
    }
}

#[test]
fn privileged_the_second_mount_fetches_what_the_first_touched() {
    if unable() {
        skip!("needs root and /dev/fuse");
    }
    let site = site("learn");
    let layer = site.layer.layer_id;
    let stack = Node::stack_of(&[layer]);
    let Some(node) = site.node("root", |_| {}) else {
        skip!("this kernel mounts no layers");
    };
    // Nothing is known yet: nothing is fetched.
    let (_, dir) = site.up(&node, "one");
    node.prefetch(&site.store, "one", &by_profile()).unwrap();
    read_some(&dir);
    let touched = layer_of(&node, layer);
    assert!(touched.misses > 0 && touched.prefetched_bytes == 0);
    assert!(node.learnt().is_empty(), "it still learns");
    node.release("one").unwrap();
    let learnt = node.learnt();
    assert_eq!(learnt.len(), 1);
    assert_eq!((learnt[0].stack, learnt[0].recordings), (stack, 1));
    assert_eq!(learnt[0].layers, [layer]);
    assert!(learnt[0].extents > 0 && learnt[0].bytes > 60_000);
    assert!(learnt[0].bytes < touched.data_bytes / 4, "{learnt:?}");
    node.stop(false).unwrap();
    drop(node);

    // A new life of the node, with nothing cached.
    let node = site.node("root", |_| {}).unwrap();
    node.cache_evict(None, None);
    assert_eq!(node.learnt()[0].recordings, 1, "it is remembered");
    let (_, dir) = site.up(&node, "two");
    node.prefetch(&site.store, "two", &by_profile()).unwrap();
    let wanted = node.learnt()[0].bytes;
    assert!(
        wait_until(|| layer_of(&node, layer).prefetched_bytes >= wanted),
        "{:?}",
        layer_of(&node, layer)
    );
    let before = layer_of(&node, layer);
    assert!(before.prefetched_bytes < before.data_bytes / 2);
    assert_eq!(before.reads, 0, "before anybody read");
    read_some(&dir);
    let after = layer_of(&node, layer);
    assert_eq!(after.misses, 0, "{after:?}");
    assert!(after.prefetch_used_bytes > 60_000);
    node.release("two").unwrap();
    let learnt = node.learnt();
    assert_eq!(learnt[0].recordings, 2, "a whole run");
    // A third run finds everything warm in the kernel: it takes nothing away.
    let (_, dir) = site.up(&node, "three");
    read_some(&dir);
    node.release("three").unwrap();
    assert_eq!(node.learnt()[0].recordings, 2);
    assert_eq!(node.learnt()[0].extents, learnt[0].extents);
    node.stop(false).unwrap();
    drop(node);
    assert_eq!(mounts_below(site.scratch.path()), Vec::<PathBuf>::new());
}

#[test]
fn privileged_nodes_merge_what_they_learnt_and_a_new_one_uses_it() {
    if unable() {
        skip!("needs root and /dev/fuse");
    }
    let site = site("learn-share");
    let layer = site.layer.layer_id;
    let Some(first) = site.node("first", |config| config.publish_profiles = true) else {
        skip!("this kernel mounts no layers");
    };
    let (_, dir) = site.up(&first, "one");
    read_some(&dir);
    first.release("one").unwrap();
    let published = || site.store.profiles(None).unwrap();
    assert!(wait_until(|| published().len() == 1), "by itself");
    first.stop(false).unwrap();
    let second = site.node("second", |_| {}).unwrap();
    let (_, dir) = site.up(&second, "one");
    read_some(&dir);
    assert!(std::fs::read(dir.join("large")).unwrap() == noise(2000, 1_500_000));
    // What is being learnt right now is published too.
    let given = second.publish_learnt(&site.store, None).unwrap();
    assert_eq!(given.len(), 1);
    assert_eq!((given[0].recordings, &given[0].error), (2, &None));
    let again = second.publish_learnt(&site.store, None).unwrap();
    assert_eq!(again[0].profile, None, "nothing new");
    second.release("one").unwrap();
    second.stop(false).unwrap();
    let stored = published();
    assert_eq!(stored.len(), 1);
    let merged = stored[0].profile.as_ref().unwrap();
    assert_eq!((merged.name.as_str(), merged.recordings), (LEARNT, 2));
    assert!(merged.entries.iter().any(|e| e.count == 2));
    assert!(merged.entries.iter().any(|e| e.count == 1));
    assert!(merged.bytes() > 1_500_000);

    let third = site.node("third", |config| config.learn = None).unwrap();
    let _ = site.up(&third, "one");
    third.prefetch(&site.store, "one", &by_profile()).unwrap();
    let wanted = merged.bytes();
    assert!(wait_until(
        || layer_of(&third, layer).prefetched_bytes >= wanted
    ));
    third.release("one").unwrap();
    assert!(third.learnt().is_empty(), "it was told not to learn");
    third.stop(false).unwrap();
}

#[test]
fn privileged_a_profile_of_another_version_is_ignored() {
    if unable() {
        skip!("needs root and /dev/fuse");
    }
    let site = site("learn-other");
    let layer = site.layer.layer_id;
    let manifest = site.layer.digest;
    let Some(node) = site.node("root", |_| {}) else {
        skip!("this kernel mounts no layers");
    };
    let entry = ProfileEntry {
        layer: 0,
        extent: 0,
        len: 4096,
        count: 1,
        rank: 0,
        time_ms: 0,
    };
    let profile = |name: &str, layer, len| Profile {
        name: name.to_owned(),
        layers: vec![ProfileLayer { layer, manifest }],
        recordings: 1,
        entries: vec![ProfileEntry { len, ..entry }],
    };
    let first = {
        let manifest = site.store.manifest(&manifest).unwrap();
        site.store.map(&manifest).unwrap().extents()[0].len
    };
    let other = LayerId::from_digest(Digest::of(b"another version"));
    // One of other contents under this layer's name, one of another layer, one that fits.
    for (name, profile) in [
        ("wrong", profile("wrong", layer, first + 1)),
        ("other", profile("other", other, first)),
        ("right", profile("right", layer, first)),
    ] {
        assert_eq!(profile.name, name);
        site.store.put_profile(&profile).unwrap();
    }
    let (_, dir) = site.up(&node, "one");
    for name in ["wrong", "other", "right"] {
        let spec = PrefetchSpec {
            mode: PrefetchMode::Profile,
            profile: Some(name.to_owned()),
        };
        let before = layer_of(&node, layer).prefetched_bytes;
        node.prefetch(&site.store, "one", &spec).unwrap();
        if name == "right" {
            assert!(wait_until(
                || layer_of(&node, layer).prefetched_bytes > before
            ));
        } else {
            // Runs are in order of their beginning; the next one would show it.
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(layer_of(&node, layer).prefetched_bytes, before, "{name}");
        }
    }
    read_some(&dir);
    node.release("one").unwrap();
    node.stop(false).unwrap();
}
