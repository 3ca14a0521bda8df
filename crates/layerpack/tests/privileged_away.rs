//! What a mount asks the store for, and a store that cannot be asked: what is on the node is mounted
//! and read all the same.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests; error numbers are compared, which fs_err hides"
)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::servers::{Reply, Scripted};
use layerpack_fixtures::{MountGuard, is_root, skip};
use support::{Node, describe, wait_until};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Of the second file more than what is fetched along with the first one.
fn content(file: u64) -> Vec<u8> {
    Rng::new(file + 1).bytes(if file == 0 { 64 << 10 } else { 24 << 20 })
}

fn file(point: &Path, number: u64) -> PathBuf {
    point.join(format!("f{number}"))
}

/// A node with a layer of two files in its store.
fn node(label: &str) -> (Node, PathBuf) {
    let node = Node::new(label);
    let source = node.scratch.mkdir("source").unwrap();
    for number in 0..2 {
        std::fs::write(file(&source, number), content(number)).unwrap();
    }
    node.build("base/a:1", &source, &[]);
    let point = node.scratch.mkdir("mnt").unwrap();
    (node, point)
}

/// Mounts the layer, reads its first file, and takes everything down.
fn use_once(node: &Node, point: &Path) {
    node.ok(["mount", "--prefetch", "none", "base/a:1", text(point)]);
    let guard = MountGuard::new(point);
    assert!(std::fs::read(file(point, 0)).unwrap() == content(0));
    node.ok(["umount", text(point)]);
    drop(guard);
    node.ok(["daemon", "stop"]);
}

/// Mounts it while the store is away: what is here is read, the rest is an error.
fn use_without(node: &Node, point: &Path) -> MountGuard {
    let output = node.run(["mount", "--prefetch", "none", "base/a:1", text(point)]);
    assert!(output.status.success(), "{}", describe(&output));
    let guard = MountGuard::new(point);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("cannot be asked"), "{said}");
    assert!(std::fs::read(file(point, 0)).unwrap() == content(0));
    let failed = std::fs::read(file(point, 1)).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(5), "{failed}");
    // What this node never had is as unknown as ever.
    let error = node.fails(1, ["mount", "base/b:1", text(point)]);
    assert!(!error.contains("as this node"), "{error}");
    guard
}

#[test]
fn privileged_what_was_mounted_is_mounted_without_its_directory() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let (node, point) = node("away");
    use_once(&node, &point);
    let away = node.scratch.join("away");
    std::fs::rename(node.store(), &away).unwrap();
    let guard = use_without(&node, &point);
    // It comes back, and nothing is remembered of its absence.
    let back = || {
        // The daemon may have begun a new one for its lease.
        let _ = std::fs::remove_dir_all(node.store());
        std::fs::rename(&away, node.store()).is_ok()
    };
    assert!(wait_until(back));
    assert!(std::fs::read(file(&point, 1)).unwrap() == content(1));
    // A store that answers is believed: this version is gone.
    node.ok(["umount", text(&point)]);
    drop(guard);
    node.ok(["rm", "base/a:1"]);
    let error = node.fails(1, ["mount", "base/a:1", text(&point)]);
    assert!(error.contains("base/a:1 is not in store"), "{error}");
    support::assert_clean(&node);
}

#[test]
fn privileged_what_was_mounted_is_mounted_without_its_server() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let (mut node, point) = node("away-http");
    let store = node.store();
    let server = Scripted::start(move |request| {
        let path = request.target.split('?').next().unwrap_or_default();
        match fs_err::read(store.join(path.trim_start_matches('/'))) {
            Ok(bytes) => Reply::of(&bytes, request),
            Err(_) => Reply::new(404, ""),
        }
    })
    .unwrap();
    let settings = [
        ("LAYERPACK_STORE", server.url()),
        ("LAYERPACK_STORE_OPTIONS", "retries=0".to_owned()),
    ];
    node.environment = settings
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec();
    use_once(&node, &point);
    drop(server);
    let guard = use_without(&node, &point);
    node.ok(["umount", text(&point)]);
    drop(guard);
    support::assert_clean(&node);
}

#[test]
fn privileged_a_first_mount_asks_for_each_object_once() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let (mut node, point) = node("asked");
    let (store, asked) = (node.store(), Arc::new(Mutex::new(Vec::new())));
    let seen = Arc::clone(&asked);
    let server = Scripted::start(move |request| {
        let path = request.target.split('?').next().unwrap_or_default();
        let path = path.trim_start_matches('/');
        seen.lock().unwrap().push(path.to_owned());
        match fs_err::read(store.join(path)) {
            Ok(bytes) => Reply::of(&bytes, request),
            Err(_) => Reply::new(404, ""),
        }
    })
    .unwrap();
    node.environment = vec![("LAYERPACK_STORE".to_owned(), server.url())];
    let line = ["mount", "--prefetch", "none", "base/a:1", text(&point)];
    node.ok(line);
    let guard = MountGuard::new(&point);
    let families = || {
        let asked = std::mem::take(&mut *asked.lock().unwrap());
        let family = |path: &String| path.split('/').next().unwrap().to_owned();
        let mut families: Vec<String> = asked.iter().map(family).collect();
        families.sort();
        families
    };
    // The command and the daemon each make sure that they understand the store. The reference has
    // its manifest with it.
    let all = [
        "layerpack.json",
        "layerpack.json",
        "locators",
        "maps",
        "meta",
        "refs",
    ];
    assert_eq!(families(), all);
    // The next time only what the name stands for, by the next command.
    node.ok(["umount", text(&point)]);
    drop(guard);
    node.ok(line);
    let guard = MountGuard::new(&point);
    assert_eq!(families(), ["layerpack.json", "refs"]);
    assert!(std::fs::read(file(&point, 0)).unwrap() == content(0));
    node.ok(["umount", text(&point)]);
    drop(guard);
    support::assert_clean(&node);
}
