//! Layers mounted by loop devices, as on kernels before 6.12: the same trees, and no device stays.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests; error numbers are compared, which fs_err hides"
)]

mod support;

use std::path::{Path, PathBuf};

use layerpack_fixtures::treecmp::{self, Options};
use layerpack_fixtures::{MountGuard, is_root, rng::Rng, skip};
use layerpack_sys::loopdev;
use support::{Node, mounts, processes, wait_until};

/// Files of this node that loop devices are attached to.
fn attached(node: &Node) -> Vec<PathBuf> {
    let all = loopdev::attached().unwrap();
    all.into_iter()
        .map(|(file, _)| file)
        .filter(|file| file.starts_with(node.scratch.path()))
        .collect()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A node that mounts by loop devices, or the reason why there can be none.
fn node(label: &str) -> Result<Node, String> {
    if !is_root() {
        return Err("needs root to mount".to_owned());
    }
    let mut node = Node::new(label);
    let file = node.scratch.join("trial");
    std::fs::write(&file, [0_u8; 4096]).unwrap();
    match loopdev::LoopDevice::attach(&file) {
        Ok(device) => drop(device),
        Err(e) if e.errno.raw_os_error() == 2 || e.errno.raw_os_error() == 6 => {
            return Err(format!("needs loop devices: {e}"));
        }
        Err(e) => panic!("{e}"),
    }
    node.environment
        .push(("LAYERPACK_EROFS".to_owned(), "loop".to_owned()));
    Ok(node)
}

#[test]
fn privileged_trees_by_loop_devices_are_the_same_and_none_stays() {
    let node = match node("loop") {
        Ok(node) => node,
        Err(why) => skip!("{why}"),
    };
    assert_eq!(
        attached(&node),
        Vec::<PathBuf>::new(),
        "a device goes with its last user"
    );
    let base = node.scratch.mkdir("base").unwrap();
    support::rootfs::make(&base);
    std::fs::write(base.join("var/data/big"), Rng::new(1).bytes(5 << 20)).unwrap();
    std::fs::hard_link(base.join("etc/passwd"), base.join("etc/passwd-link")).unwrap();
    node.build("base/b:1", &base, &[]);
    // Its directory is generated above, as an image of its own.
    let tool = node.scratch.mkdir("tool").unwrap();
    std::fs::write(tool.join("run"), Rng::new(2).bytes(70_000)).unwrap();
    node.build("toolkit/t:1", &tool, &["--at", "/var/data/tool"]);
    let want = treecmp::snapshot(&base, &Options::default()).unwrap();

    let (one, two) = (
        node.scratch.mkdir("one").unwrap(),
        node.scratch.mkdir("two").unwrap(),
    );
    node.ok(["mount", "base/b:1", text(&one)]);
    let guard = MountGuard::new(&one);
    let devices = attached(&node);
    assert_eq!(devices.len(), 2, "metadata and data: {devices:?}");
    for _ in 0..2 {
        let have = treecmp::snapshot(&one, &Options::default()).unwrap();
        treecmp::assert_same(&want, &have);
    }
    node.ok(["mount", "base/b:1", "toolkit/t:1", text(&two)]);
    let second = MountGuard::new(&two);
    assert_eq!(
        std::fs::read(two.join("var/data/tool/run")).unwrap(),
        Rng::new(2).bytes(70_000)
    );
    assert!(attached(&node).len() >= 4, "{:?}", attached(&node));

    // What is not there is an error, as ever.
    let packs = node.store().join("packs");
    node.ok(["umount", text(&one)]);
    node.ok(["umount", text(&two)]);
    drop((guard, second));
    node.ok(["daemon", "stop"]);
    assert!(
        wait_until(|| attached(&node).is_empty()),
        "{:?}",
        attached(&node)
    );
    std::fs::remove_dir_all(node.root().join("cache")).unwrap();
    node.ok(["mount", "base/b:1", text(&one)]);
    let guard = MountGuard::new(&one);
    std::fs::rename(&packs, node.store().join("away")).unwrap();
    let failed = std::fs::read(one.join("var/data/big")).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(5), "{failed}");
    std::fs::rename(node.store().join("away"), &packs).unwrap();
    assert_eq!(
        std::fs::read(one.join("var/data/big")).unwrap(),
        Rng::new(1).bytes(5 << 20)
    );
    node.ok(["umount", text(&one)]);
    drop(guard);
    node.ok(["daemon", "stop"]);
    assert!(wait_until(|| attached(&node).is_empty()));
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
}

#[test]
fn privileged_loop_devices_of_a_killed_daemon_go_with_its_mounts() {
    let node = match node("loop-kill") {
        Ok(node) => node,
        Err(why) => skip!("{why}"),
    };
    let base = node.scratch.mkdir("base").unwrap();
    std::fs::write(base.join("file"), Rng::new(3).bytes(1 << 20)).unwrap();
    node.build("base/b:1", &base, &[]);
    let point = node.scratch.mkdir("mnt").unwrap();
    node.ok(["mount", "base/b:1", text(&point)]);
    let guard = MountGuard::new(&point);
    std::fs::read(point.join("file")).unwrap();
    assert_eq!(attached(&node).len(), 2);
    node.kill_all();
    assert!(wait_until(|| processes(&node).is_empty()));
    node.ok(["umount", text(&point)]);
    drop(guard);
    // The next daemon takes away what the killed one left.
    node.ok(["mount", "base/b:1", text(&point)]);
    let guard = MountGuard::new(&point);
    assert_eq!(
        std::fs::read(point.join("file")).unwrap(),
        Rng::new(3).bytes(1 << 20)
    );
    node.ok(["umount", text(&point)]);
    drop(guard);
    node.ok(["daemon", "stop"]);
    assert!(
        wait_until(|| attached(&node).is_empty()),
        "{:?}",
        attached(&node)
    );
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
}
