//! Images mounted by the kernel and compared with what they were made from.

use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use layerpack_erofs::NodeKind;
use layerpack_fixtures::treecmp::{self, Options};
use layerpack_fixtures::{MountGuard, ScratchDir, is_root, skip};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::common::{Sample, assert_same, content, files, meta, of_tree, probes};
use crate::tools::fsck;
use crate::trees::{build, limits, steps};

/// Writes image and (sparse) data file.
pub(crate) fn store(sample: &Sample, dir: &Path) {
    fs_err::write(dir.join("meta"), sample.image()).unwrap();
    write_data(sample, &dir.join("data"), 0, sample.data_blocks * 4096);
}

fn write_data(sample: &Sample, path: &Path, at: u64, size: u64) {
    let file = fs_err::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path);
    let file = file.unwrap();
    file.set_len(at + size).unwrap();
    for (offset, bytes) in &sample.pieces {
        file.file().write_all_at(bytes, at + offset).unwrap();
    }
}

/// Why image files cannot be mounted here: tried with the smallest image, whose bytes the golden
/// tests pin, so that a fault of the writer is not taken for a lack of the machine.
fn cannot_mount() -> Option<String> {
    if !is_root() {
        return Some("mounting needs root".to_owned());
    }
    let dir = ScratchDir::new("erofs-probe").unwrap();
    let sample = Sample::new(meta(0o755));
    store(&sample, dir.path());
    let target = dir.mkdir("mnt").unwrap();
    let error = MountGuard::erofs(&dir.join("meta"), &[], &target).err()?;
    Some(format!("EROFS image files need Linux 6.12: {error}"))
}

fn mount(sample: &Sample, dir: &ScratchDir) -> MountGuard {
    let data = dir.join("data");
    let devices: &[&Path] = if sample.data_blocks > 0 {
        &[&data]
    } else {
        &[]
    };
    let target = dir.mkdir("mnt").unwrap();
    MountGuard::erofs(&dir.join("meta"), devices, &target).unwrap()
}

/// Compares a mounted tree with the sample: everything `stat`, `readdir`, `readlink` and the
/// xattr calls say, contents, and link counts of directories.
fn compare(sample: &Sample, root: &Path) {
    let options = Options {
        contents: false,
        ..Options::default()
    };
    assert_same(
        &of_tree(&sample.tree),
        &treecmp::snapshot(root, &options).unwrap(),
    );
    let path_of = |path: &[u8]| root.join(std::ffi::OsStr::from_bytes(path));
    for (path, data) in files(&sample.tree) {
        // Longer ones cannot be named in one piece; there is one, and its siblings are read.
        if path.len() > 4000 {
            continue;
        }
        let file = fs_err::File::open(path_of(&path)).unwrap();
        for (offset, len) in probes(&data) {
            let mut found = vec![0; len];
            file.file().read_exact_at(&mut found, offset).unwrap();
            assert!(
                found == content(sample, &data, offset, len),
                "{path:?} at {offset}"
            );
        }
    }
    for item in sample.tree.walk().filter(|item| item.path.len() < 4000) {
        let node = sample.tree.node(item.id);
        if let NodeKind::Directory = node.kind {
            let stat = fs_err::symlink_metadata(path_of(&item.path)).unwrap();
            assert_eq!(stat.nlink(), u64::from(node.nlink()), "{:?}", item.path);
        }
    }
}

#[test]
fn privileged_kernel_agrees_on_limits() {
    if let Some(reason) = cannot_mount() {
        skip!("{reason}");
    }
    let sample = limits(true);
    let dir = ScratchDir::new("erofs-limits").unwrap();
    store(&sample, dir.path());
    let mount = mount(&sample, &dir);
    compare(&sample, mount.path());
    mount.unmount().unwrap();
}

#[test]
fn privileged_kernel_and_fsck_agree_on_random_trees() {
    if let Some(reason) = cannot_mount() {
        skip!("{reason}");
    }
    let config = Config {
        cases: 32,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let result = runner.run(&steps(), |(root, steps)| {
        let sample = build(&root, &steps);
        let dir = ScratchDir::new("erofs-random").unwrap();
        store(&sample, dir.path());
        let mount = mount(&sample, &dir);
        compare(&sample, mount.path());
        mount.unmount().unwrap();
        fsck(&sample, dir.path());
        Ok(())
    });
    result.unwrap();
}

/// Image and data file joined into one file mount without a `device` option.
#[test]
fn privileged_kernel_mounts_the_joined_form() {
    if let Some(reason) = cannot_mount() {
        skip!("{reason}");
    }
    let mut sample = Sample::new(meta(0o755));
    for number in 0..300_usize {
        let bytes = crate::trees::bytes(number, number * 61);
        sample.file(
            layerpack_erofs::NodeId::ROOT,
            format!("{number}").as_bytes(),
            &bytes,
        );
    }
    let dir = ScratchDir::new("erofs-joined").unwrap();
    let image = sample.image();
    let joined = dir.join("joined");
    fs_err::write(&joined, &image).unwrap();
    write_data(
        &sample,
        &joined,
        image.len() as u64,
        sample.data_blocks * 4096,
    );
    let target = dir.mkdir("mnt").unwrap();
    let mount = MountGuard::erofs(&joined, &[], &target).unwrap();
    compare(&sample, mount.path());
    mount.unmount().unwrap();
}
