//! Garbage collection beside nodes: what one has mounted stays in its store, also when its daemon
//! was killed, and when the next one takes over.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::path::{Path, PathBuf};

use layerpack_fixtures::{MountGuard, is_root, rng::Rng, skip};
use support::{Node, mounts, processes};

const FILES: u64 = 6;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn content(layer: u64, file: u64) -> Vec<u8> {
    Rng::new(layer * 100 + file + 1).bytes(400_000)
}

/// Builds a layer; the path of its manifest in the store.
fn build(node: &Node, name: &str, layer: u64) -> PathBuf {
    let source = node.scratch.mkdir(format!("source-{name}")).unwrap();
    for file in 0..FILES {
        fs_err::write(source.join(format!("f{file}")), content(layer, file)).unwrap();
    }
    let digest = node.build(&format!("base/{name}:1"), &source, &[]);
    let hex = digest.strip_prefix("b3:").unwrap();
    node.store().join("manifests").join(hex)
}

/// What other machines do with the store: nothing waits.
fn collect(node: &Node) {
    node.ok(["gc"]);
    node.ok(["gc", "--grace", "0", "--wait"]);
}

#[track_caller]
fn reads(dir: &Path, layer: u64, files: std::ops::Range<u64>) {
    for file in files {
        let bytes = fs_err::read(dir.join(format!("f{file}"))).unwrap();
        assert!(bytes == content(layer, file), "f{file}: wrong bytes");
    }
}

#[test]
fn privileged_what_a_node_has_mounted_is_never_collected() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("leases");
    let (mounted, unused, other) = (
        build(&node, "mounted", 1),
        build(&node, "unused", 2),
        build(&node, "other", 3),
    );
    let point = node.scratch.mkdir("mnt").unwrap();
    node.ok(["mount", "base/mounted:1", text(&point)]);
    let guard = MountGuard::new(&point);
    node.ok(["rm", "base/mounted:1"]);
    node.ok(["rm", "base/unused:1"]);
    collect(&node);
    assert!(!unused.exists(), "what nobody uses is collected");
    assert!(mounted.exists());
    reads(&point, 1, 0..2);

    // The daemon and its holder die. Their lease does not.
    node.kill_all();
    collect(&node);
    assert!(mounted.exists());

    // The next one first mounts something else, and names both in its lease.
    let second = node.scratch.mkdir("second").unwrap();
    node.ok(["mount", "base/other:1", text(&second)]);
    let second_guard = MountGuard::new(&second);
    node.ok(["rm", "base/other:1"]);
    collect(&node);
    assert!(mounted.exists(), "{}", node.log());
    assert!(other.exists(), "{}", node.log());
    reads(&second, 3, 0..FILES);
    // What the lease of the first mount holds is served again, also what was never read.
    let layers = fs_err::read_dir(node.root().join("layers")).unwrap();
    let served: Vec<PathBuf> = layers
        .map(|entry| entry.unwrap().path())
        .filter(|path| fs_err::read(path.join("f0")).is_ok_and(|bytes| bytes == content(1, 0)))
        .collect();
    assert_eq!(served.len(), 1, "{}", node.log());
    reads(&served[0], 1, 0..FILES);

    // Without mounts nothing keeps them.
    node.ok(["umount", text(&second)]);
    node.ok(["umount", text(&point)]);
    drop((guard, second_guard));
    node.ok(["daemon", "stop"]);
    collect(&node);
    assert!(!mounted.exists() && !other.exists());
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
    assert_eq!(processes(&node), Vec::<String>::new());
}
