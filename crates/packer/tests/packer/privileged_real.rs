//! A real root filesystem against every referee. It is not part of the repository: the one that
//! `cargo xtask bench build` made, or the directory that `LAYERPACK_REAL_ROOT` names.

use std::path::{Path, PathBuf};
use std::process::Command;

use layerpack_fixtures::treecmp::Options;
use layerpack_fixtures::{ScratchDir, find_tool, skip};
use layerpack_packer::{Compression, Source};

use crate::export::try_export;
use crate::peer::assert_same_as_mounted;
use crate::privileged_kernel::{assert_same_trees, fsck, stack, unable};
use crate::same_digest::gnu_tar;
use crate::support::{memory_store, options, try_pack};

fn root() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("LAYERPACK_REAL_ROOT") {
        return Some(named.into());
    }
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../bench/inputs/debian");
    (std::env::var_os("LAYERPACK_TEST_FULL").is_some() && made.is_dir()).then_some(made)
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
}

#[test]
fn privileged_a_real_root_is_what_every_referee_reads() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let Some(root) = root() else {
        skip!("a full run after `cargo xtask bench build`, or LAYERPACK_REAL_ROOT, is needed");
    };
    let scratch = ScratchDir::new("real").unwrap();
    let store = memory_store();
    let packed = try_pack(&store, &options("base/real:1", Source::Dir(root.clone()))).unwrap();
    assert_eq!(packed.warnings, Vec::<String>::new());

    // The kernel, fsck.erofs and an independent reader.
    let mounted = stack(&[&packed], &scratch, "real", None);
    assert_same_trees(&root, &mounted.merged, &Options::default());
    fsck(&scratch, "real-0");
    let data = fs_err::read(scratch.join("real-0.data")).unwrap();
    assert_same_as_mounted(&packed.meta, &[&data], &mounted.merged);
    drop(data);

    // GNU tar: its archive is the same layer, and what it extracts of ours is the same tree.
    let archive = scratch.join("archive.tar");
    gnu_tar(&root, &archive, &["--format=posix", "--sparse"]);
    let again = options("base/real:1", Source::Tar(archive.clone()));
    let again = try_pack(&memory_store(), &again).unwrap();
    assert_eq!(again.digest, packed.digest);
    fs_err::remove_file(&archive).unwrap();
    let target = format!("tar:{}", archive.display());
    try_export(&store, &["base/real:1"], &target, |_| {}).unwrap();
    let extracted = scratch.mkdir("extracted").unwrap();
    let flags = [
        "--extract",
        "--numeric-owner",
        "--xattrs",
        "--xattrs-include=*",
    ];
    let mut tar = Command::new("tar");
    tar.args(flags)
        .args(["--same-permissions", "--same-owner", "--file"]);
    run(tar.arg(&archive).arg("--directory").arg(&extracted));
    assert_same_trees(&root, &extracted, &Options::default());

    // umoci, from an image.
    let Some(umoci) = find_tool("umoci") else {
        skip!("the rest needs umoci");
    };
    let layout = scratch.join("layout");
    let target = format!("oci:{}", layout.display());
    try_export(&store, &["base/real:1"], &target, |options| {
        options.name = Some("image".to_owned());
        options.compression = Compression::None;
    })
    .unwrap();
    let mut unpack = Command::new(umoci);
    unpack.args(["unpack", "--image"]);
    unpack.arg(format!("{}:image", layout.display()));
    run(unpack.arg(scratch.join("bundle")));
    assert_same_trees(&root, &scratch.join("bundle/rootfs"), &Options::default());
}
