//! Exported images unpacked by another tool, against the kernel's view of the layers.

use std::process::Command;

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::treecmp::Options;
use layerpack_fixtures::trees::{NastyOptions, TreeMaker, acl_xattr, nasty};
use layerpack_fixtures::{ScratchDir, find_tool, skip};
use layerpack_packer::{Compression, Source};

use crate::export::try_export;
use crate::merge::{pack, random_layer, try_merge};
use crate::privileged_kernel::{assert_same_trees, stack, unable};
use crate::same_digest::remove_what_tar_lacks;
use crate::support::{memory_store, options, try_pack};

#[test]
fn privileged_umoci_unpacks_what_the_overlay_shows() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let Some(umoci) = find_tool("umoci") else {
        skip!("umoci is not installed");
    };
    let unpack = |layout: &std::path::Path, bundle: &std::path::Path| {
        let output = Command::new(&umoci)
            .args(["unpack", "--image"])
            .arg(format!("{}:image", layout.display()))
            .arg(bundle)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        bundle.join("rootfs")
    };
    // The root is made by umoci when no layer defines it.
    let compare = Options::default().without_root();
    for seed in 0..10 {
        let mut rng = Rng::new(3000 + seed);
        let store = memory_store();
        let names = ["base/l:0", "toolkit/l:1", "toolkit/l:2", "toolkit/l:3"];
        for (number, name) in (0u64..).zip(names) {
            pack(&store, name, random_layer(&mut rng, number, number > 0));
        }
        let scratch = ScratchDir::new("umoci").unwrap();
        let layout = scratch.join("layout");
        try_export(
            &store,
            &names,
            &format!("oci:{}", layout.display()),
            |options| {
                options.name = Some("image".to_owned());
            },
        )
        .unwrap();
        let rootfs = unpack(&layout, &scratch.join("bundle"));
        let merged = try_merge(&store, "base/m:1", &names).unwrap();
        let merged = stack(&[&merged], &scratch, "merged", None);
        assert_same_trees(&merged.merged, &rootfs, &compare);
    }

    // Everything that a filesystem can hold and umoci's whole paths reach, in one layer.
    let scratch = ScratchDir::new("umoci").unwrap();
    let source = scratch.mkdir("source").unwrap();
    nasty(
        &source,
        &NastyOptions {
            deep: false,
            huge: false,
            ..NastyOptions::default()
        },
    )
    .unwrap();
    remove_what_tar_lacks(&source);
    let store = memory_store();
    let packed = try_pack(&store, &options("base/nasty:1", Source::Dir(source))).unwrap();
    let layout = scratch.join("layout");
    try_export(
        &store,
        &["base/nasty:1"],
        &format!("oci:{}", layout.display()),
        |options| {
            options.name = Some("image".to_owned());
            options.compression = Compression::None;
        },
    )
    .unwrap();
    let rootfs = unpack(&layout, &scratch.join("bundle"));
    let mounted = stack(&[&packed], &scratch, "mounted", None);
    // What umoci cannot take: libarchive's form of an attribute, the only one that holds this
    // one's name; an empty value, which Go's reader drops; a year of 2446.
    let compare = compare
        .exclude("xattrs/odd-name")
        .exclude("xattrs/empty-value")
        .exclude("times/15032385535.0");
    assert_same_trees(&mounted.merged, &rootfs, &compare);
}

/// GNU tar restores ACLs from their text alone once it is asked for ACLs.
#[test]
fn privileged_gnu_tar_restores_acls() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let scratch = ScratchDir::new("acls").unwrap();
    let source = scratch.mkdir("source").unwrap();
    let mut tree = TreeMaker::new(&source);
    let (access, default) = ("system.posix_acl_access", "system.posix_acl_default");
    let acl = acl_xattr(6, &[(1000, 4)], 4, &[(1001, 6)], 0);
    let set = (tree.dir("d", 0o755).unwrap().file("d/f", "1").unwrap())
        .xattr("d/f", access, &acl)
        .and_then(|tree| tree.xattr("d", default, &acl))
        .is_ok();
    if !set {
        skip!("the filesystem of the scratch directory has no ACLs");
    }
    tree.finish().unwrap();
    let store = memory_store();
    try_pack(&store, &options("base/a:1", Source::Dir(source))).unwrap();
    let archive = scratch.join("a.tar");
    let target = format!("tar:{}", archive.display());
    try_export(&store, &["base/a:1"], &target, |_| {}).unwrap();
    for options in [&["--acls"][..], &["--acls", "--xattrs"]] {
        let to = scratch.mkdir(format!("to-{}", options.len())).unwrap();
        let done = Command::new("tar")
            .args(options)
            .args(["-xpf"])
            .arg(&archive)
            .arg("-C")
            .arg(&to)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{said}");
        for (path, name) in [("d/f", access), ("d", default)] {
            let mut value = vec![0; 1024];
            let len = rustix::fs::getxattr(to.join(path), name, &mut value[..]).unwrap();
            assert_eq!(value[..len], acl[..], "{options:?} {path}");
        }
    }
}
