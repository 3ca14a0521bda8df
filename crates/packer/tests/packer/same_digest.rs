//! Same tree, same digest: whatever the source, the order, the threads and the store's state.

use std::path::Path;
use std::process::Command;

use layerpack_fixtures::trees::{NastyOptions, RandomOptions, nasty, random};
use layerpack_fixtures::{ScratchDir, find_tool, skip};
use layerpack_packer::Source;

use crate::support::{memory_store, options, try_dir, try_pack};

/// Archives `dir` with GNU tar.
pub fn gnu_tar(dir: &Path, archive: &Path, extra: &[&str]) {
    let output = Command::new("tar")
        .args([
            "--create",
            "--numeric-owner",
            "--xattrs",
            "--xattrs-include=*",
            "--acls",
        ])
        .args(extra)
        .arg("--file")
        .arg(archive)
        .arg("--directory")
        .arg(dir)
        .arg(".")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let real: Vec<_> = errors
        .lines()
        .filter(|line| !line.contains("socket ignored"))
        .collect();
    assert!(output.status.success() && real.is_empty(), "{real:?}");
}

/// GNU tar has no sockets, and takes hard links of devices and pipes apart.
pub fn remove_what_tar_lacks(dir: &Path) {
    for expression in [
        "-type s",
        "-links +1 -not -type f -not -type l -not -type d",
    ] {
        let status = Command::new("find")
            .arg(dir)
            .args(expression.split(' '))
            .arg("-delete")
            .status()
            .unwrap();
        assert!(status.success());
    }
}

fn every_way(dir: &Path, scratch: &ScratchDir) {
    let archive = scratch.join("archive");
    for reference in ["base/t:1", "workspace/t:1"] {
        let expected = try_dir(reference, dir).unwrap();
        for extra in [
            &["--format=posix"][..],
            &["--format=posix", "--sparse"],
            &[
                "--format=posix",
                "--sparse",
                "--sparse-version=0.0",
                "--sort=inode",
            ],
            &[
                "--format=posix",
                "--sparse",
                "--sparse-version=0.1",
                "--sort=none",
            ],
            &["--format=posix", "--sort=name", "--gzip"],
        ] {
            gnu_tar(dir, &archive, extra);
            let packed = try_pack(
                &memory_store(),
                &options(reference, Source::Tar(archive.clone())),
            )
            .unwrap();
            let (left, right) = (expected.tree(), packed.tree());
            for (path, node) in &left.nodes {
                let other = &right.nodes[path];
                let path = String::from_utf8_lossy(path);
                assert_eq!(
                    (
                        node.kind,
                        node.mode,
                        node.uid,
                        node.gid,
                        node.mtime,
                        &node.xattrs,
                        node.size,
                        node.nlink
                    ),
                    (
                        other.kind,
                        other.mode,
                        other.uid,
                        other.gid,
                        other.mtime,
                        &other.xattrs,
                        other.size,
                        other.nlink
                    ),
                    "{reference} {extra:?} {path}"
                );
            }
            assert_eq!(left.nodes.len(), right.nodes.len());
            assert_eq!(expected.map, packed.map, "{reference} {extra:?}");
            assert!(expected.meta == packed.meta, "{reference} {extra:?}");
            assert_eq!(expected.digest, packed.digest, "{reference} {extra:?}");
        }
    }
}

#[test]
fn a_directory_and_its_archives() {
    if find_tool("tar").is_none() {
        skip!("needs GNU tar");
    }
    for seed in layerpack_fixtures::trees::seeds() {
        let scratch = ScratchDir::new("same").unwrap();
        let dir = scratch.mkdir("tree").unwrap();
        random(
            &dir,
            &RandomOptions {
                entries: 150,
                max_file: 300_000,
                ..RandomOptions::new(seed)
            },
        )
        .unwrap();
        remove_what_tar_lacks(&dir);
        every_way(&dir, &scratch);
    }
}

#[test]
fn the_nasty_tree_and_its_archives() {
    if find_tool("tar").is_none() {
        skip!("needs GNU tar");
    }
    let scratch = ScratchDir::new("nasty").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    let options = NastyOptions {
        deep: false,
        huge: false,
        big_directory: 300,
        ..NastyOptions::default()
    };
    nasty(&dir, &options).unwrap();
    remove_what_tar_lacks(&dir);
    // GNU tar cannot write an attribute whose name has an equals sign.
    fs_err::remove_file(dir.join("xattrs/odd-name")).unwrap();
    every_way(&dir, &scratch);
}

#[test]
fn threads_levels_and_what_the_store_has_do_not_matter() {
    let scratch = ScratchDir::new("jobs").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    random(
        &dir,
        &RandomOptions {
            max_file: 3 << 20,
            ..RandomOptions::new(77)
        },
    )
    .unwrap();
    let expected = try_dir("base/t:1", &dir).unwrap();
    for (jobs, level) in [(1, 3), (2, 1), (5, 9)] {
        let mut with = options("base/t:1", Source::Dir(dir.clone()));
        (with.jobs, with.level) = (jobs, level);
        let packed = try_pack(&memory_store(), &with).unwrap();
        assert_eq!(packed.digest, expected.digest, "{jobs} {level}");
    }
    // A store that has other things, then the same things.
    let store = memory_store();
    let other = scratch.mkdir("other").unwrap();
    random(&other, &RandomOptions::new(78)).unwrap();
    try_pack(&store, &options("base/other:1", Source::Dir(other))).unwrap();
    for version in ["base/t:1", "base/t:1", "base/t:2"] {
        let packed = try_pack(&store, &options(version, Source::Dir(dir.clone()))).unwrap();
        assert_eq!(
            (packed.manifest.meta, packed.manifest.map),
            (expected.manifest.meta, expected.manifest.map)
        );
        assert_eq!(packed.manifest.layer_id(), expected.manifest.layer_id());
    }
}

#[test]
fn a_copy_with_other_inodes_and_orders_is_the_same() {
    let scratch = ScratchDir::new("copy").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    random(&dir, &RandomOptions::new(5)).unwrap();
    let copy = scratch.join("copy");
    let status = Command::new("cp")
        .arg("--archive")
        .arg("--sparse=always")
        .arg(&dir)
        .arg(&copy)
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(
        try_dir("base/t:1", &dir).unwrap().digest,
        try_dir("base/t:1", &copy).unwrap().digest
    );
}
