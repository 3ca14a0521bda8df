//! `build --split`, mounted: the stack of the parts shows the source tree.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::process::Command;

use layerpack_fixtures::treecmp::{self, Options};
use layerpack_fixtures::trees::TreeMaker;
use layerpack_fixtures::{MountGuard, is_root, skip};
use support::Node;

const RULES: &str = r#"
[[part]]
kind = "base"
name = "os"
version = "1"
at = ["/"]
[[part]]
kind = "workspace"
name = "repo"
version = "1"
at = ["/ws"]
except = ["*.tool"]
[[part]]
kind = "toolkit"
name = "tools"
version = "1"
globs = ["**/*.tool", "bin/s*", "deep/**/toolkit/"]
"#;

#[test]
fn privileged_a_stack_of_parts_is_the_source_tree() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("split-mount");
    let source = node.scratch.mkdir("source").unwrap();
    support::rootfs::make(&source);
    let mut tree = TreeMaker::new(&source);
    for (at, path) in [
        "ws",
        "ws/a",
        "ws/a/b",
        "deep",
        "deep/x",
        "deep/x/toolkit",
        "deep/x/y",
    ]
    .iter()
    .enumerate()
    {
        tree.dir(path, 0o700 + u32::try_from(at).unwrap()).unwrap();
        tree.owner(path, 1000 + u32::try_from(at).unwrap(), 7)
            .unwrap();
        tree.xattr(path, "user.where", path).unwrap();
    }
    for path in [
        "ws/a/1",
        "ws/a/b/2.tool",
        "ws/3.tool",
        "deep/x/toolkit/t",
        "deep/x/y/u",
        "deep/x.tool",
    ] {
        tree.file(path, path.repeat(500)).unwrap();
        tree.owner(path, 5, 6).unwrap();
        tree.mtime(path, 123_456, 789).unwrap();
    }
    tree.symlink("ws/a/link", "../../bin/sh").unwrap();
    tree.hard_link("ws/a/one", "etc/passwd").unwrap();
    tree.hard_link("deep/x/two.tool", "etc/passwd").unwrap();
    tree.sparse("ws/sparse", 1 << 20, &[(300_000, &b"data"[..])])
        .unwrap();
    tree.finish().unwrap();
    let before = treecmp::snapshot(&source, &Options::default()).unwrap();

    let rules = node.scratch.write("split.toml", RULES).unwrap();
    let archive = node.scratch.join("source.tar");
    let done = Command::new("tar")
        .args([
            "--format=pax",
            "--xattrs",
            "--xattrs-include=*",
            "--numeric-owner",
            "-S",
            "-cf",
        ])
        .args([
            archive.as_os_str(),
            "-C".as_ref(),
            source.as_os_str(),
            ".".as_ref(),
        ])
        .status()
        .unwrap();
    assert!(done.success());
    let from = format!("tar:{}", archive.display());
    let split = |from: &str| {
        let json = node.json([
            "build",
            "--from",
            from,
            "--split",
            rules.to_str().unwrap(),
            "--strict",
        ]);
        let layers = json["layers"].as_array().unwrap().clone();
        layers
            .into_iter()
            .map(|layer| layer["digest"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let digests = split(&format!("dir:{}", source.display()));
    assert_eq!(digests, split(&from));

    let point = node.scratch.mkdir("mnt").unwrap();
    let parts = ["base/os:1", "workspace/repo:1", "toolkit/tools:1"];
    node.ok(["mount"]
        .into_iter()
        .chain(parts)
        .chain([point.to_str().unwrap()]));
    let guard = MountGuard::new(&point);
    let after = treecmp::snapshot(&point, &Options::default()).unwrap();
    treecmp::assert_same(&before, &after);
    node.ok(["umount", point.to_str().unwrap()]);
    drop(guard);
    node.ok(["daemon", "stop"]);
}
