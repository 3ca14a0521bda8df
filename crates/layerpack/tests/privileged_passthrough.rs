//! Layers that are here as a whole are read by the kernel itself, and stay right whatever becomes
//! of the daemon.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use layerpack_fixtures::{MountGuard, is_root, rng::Rng, skip};
use support::{Node, mounts, processes, wait_until};

const FILES: u64 = 8;

fn noise(seed: u64) -> Vec<u8> {
    Rng::new(seed).bytes(1 << 20)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn file(point: &Path, number: u64) -> PathBuf {
    point.join(format!("f{number}"))
}

/// A node whose cache holds all of `base/w:1`, and knows it; that cache.
fn node_with_whole_layer(label: &str) -> (Node, PathBuf, PathBuf) {
    let node = Node::new(label);
    let source = node.scratch.mkdir("source").unwrap();
    for i in 0..FILES {
        fs_err::write(file(&source, i), noise(i)).unwrap();
    }
    node.build("base/w:1", &source, &[]);
    let point = node.scratch.mkdir("mnt").unwrap();
    node.ok(["mount", "base/w:1", text(&point)]);
    let guard = MountGuard::new(&point);
    for i in 0..FILES {
        assert_eq!(fs_err::read(file(&point, i)).unwrap(), noise(i));
    }
    node.ok(["umount", text(&point)]);
    drop(guard);
    // A cache is remembered as whole when its file was quiet for a while.
    std::thread::sleep(Duration::from_millis(2500));
    node.ok(["daemon", "stop"]);
    let cache = fs_err::read_dir(node.root().join("cache"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    assert!(cache.join("whole").exists(), "{}", node.log());
    (node, point, cache)
}

#[test]
fn privileged_what_an_earlier_daemon_lent_is_given_back() {
    if !is_root() {
        skip!("needs root to mount");
    }
    if layerpack_sys::probe::kernel_version() < (6, 9) {
        skip!("needs FUSE passthrough, from Linux 6.9 on");
    }
    let (node, point, cache) = node_with_whole_layer("lent-back");
    node.ok(["mount", "base/w:1", text(&point)]);
    let guard = MountGuard::new(&point);
    assert_eq!(fs_err::read(file(&point, 0)).unwrap(), noise(0));
    let lent = cache.join("lent");
    assert!(lent.exists(), "{}", node.log());
    let before = node.daemon_pid();
    node.kill_daemon();
    assert_ne!(node.daemon_pid(), before);
    // It is frozen while somebody may read it.
    node.ok(["cache", "evict", "--all"]);
    assert!(lent.exists(), "{}", node.log());
    assert_eq!(fs_err::read(file(&point, 1)).unwrap(), noise(1));
    node.ok(["umount", text(&point)]);
    drop(guard);
    // The layer goes with the daemon, and with it the last open of its data.
    node.ok(["daemon", "stop"]);
    assert!(!lent.exists(), "{}", node.log());
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
}

#[test]
fn privileged_a_whole_layer_outlives_its_daemon_and_is_never_punched() {
    if !is_root() {
        skip!("needs root to mount");
    }
    if layerpack_sys::probe::kernel_version() < (6, 9) {
        skip!("needs FUSE passthrough, from Linux 6.9 on");
    }
    let (node, point, cache) = node_with_whole_layer("whole");
    let other = node.scratch.mkdir("other").unwrap();
    fs_err::write(other.join("x"), "x").unwrap();
    node.build("base/x:1", &other, &[]);

    // The store is not needed, and from the open on neither is the daemon.
    let packs = node.store().join("packs");
    node.ok(["mount", "base/w:1", text(&point)]);
    let guard = MountGuard::new(&point);
    fs_err::rename(&packs, node.store().join("away")).unwrap();
    assert_eq!(fs_err::read(file(&point, 0)).unwrap(), noise(0));
    assert!(cache.join("lent").exists(), "{}", node.log());
    node.ok(["cache", "evict", "--all"]);
    assert_eq!(fs_err::read(file(&point, 1)).unwrap(), noise(1));
    node.kill_all();
    assert!(wait_until(|| processes(&node).is_empty()));
    assert_eq!(fs_err::read(file(&point, 2)).unwrap(), noise(2));

    // The next daemon knows that somebody may still read the file.
    fs_err::rename(node.store().join("away"), &packs).unwrap();
    let second = node.scratch.mkdir("second").unwrap();
    node.ok(["mount", "base/w:1", "base/x:1", text(&second)]);
    let second_guard = MountGuard::new(&second);
    assert_eq!(fs_err::read(file(&second, 3)).unwrap(), noise(3));
    node.ok(["cache", "evict", "--all"]);
    for i in 3..6 {
        assert_eq!(fs_err::read(file(&point, i)).unwrap(), noise(i));
    }
    node.ok(["umount", text(&second)]);
    drop(second_guard);
    node.ok(["daemon", "stop", "--force"]);
    // Even where the cache is removed while nothing serves it, an old mount keeps the file.
    fs_err::remove_dir_all(&cache).unwrap();
    for i in 6..FILES {
        assert_eq!(fs_err::read(file(&point, i)).unwrap(), noise(i));
    }
    node.ok(["umount", text(&point)]);
    drop(guard);
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
}
