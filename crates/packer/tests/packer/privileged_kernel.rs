//! Layers through the kernel: mounted, and stacked by overlayfs, against what they were made of.

use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use layerpack_fixtures::tar::{Header, TarWriter, kind};
use layerpack_fixtures::treecmp::{Options, diff, snapshot};
use layerpack_fixtures::trees::{NastyOptions, RandomOptions, nasty, random};
use layerpack_fixtures::{MountGuard, ScratchDir, find_tool, is_root, skip};
use layerpack_packer::{PackDiffOptions, Silent, Source, pack_diff};
use layerpack_store::LayerStore;

use crate::same_digest::{gnu_tar, remove_what_tar_lacks};
use crate::support::{ArchiveFile, Packed, memory_store, options, try_dir, try_pack};

/// Why no layer can be mounted here, if so.
pub fn unable() -> Option<String> {
    if !is_root() {
        return Some("needs root to mount".to_owned());
    }
    let scratch = ScratchDir::new("probe").unwrap();
    let empty = scratch.mkdir("empty").unwrap();
    let packed = try_dir("base/probe:1", &empty).unwrap();
    mount(&packed, &scratch, "probe").err()
}

/// A layer mounted by the kernel: metadata as it is, the data file filled from the store.
fn mount(packed: &Packed, scratch: &ScratchDir, name: &str) -> Result<MountGuard, String> {
    let meta = scratch.write(format!("{name}.meta"), &packed.meta).unwrap();
    let data = scratch.join(format!("{name}.data"));
    materialise(packed, &data);
    let target = scratch.mkdir(format!("{name}.mnt")).unwrap();
    let devices: &[&Path] = if packed.map.data_size() > 0 {
        &[&data]
    } else {
        &[]
    };
    MountGuard::erofs(&meta, devices, &target).map_err(|error| error.to_string())
}

fn materialise(packed: &Packed, path: &Path) {
    let mut file = fs_err::File::create(path).unwrap();
    file.set_len(packed.map.data_size()).unwrap();
    // Runs of neighbouring extents in one request each.
    let mut extents = packed.map.extents().iter().peekable();
    while let Some(first) = extents.next() {
        let mut end = first.end();
        while let Some(next) = extents.next_if(|next| {
            next.data_offset < end + 4096 && next.end() - first.data_offset < 4 << 20
        }) {
            end = next.end();
        }
        let bytes = packed
            .store
            .read_data(&packed.map, &packed.locator, first.data_offset..end)
            .unwrap();
        file.seek(SeekFrom::Start(first.data_offset)).unwrap();
        file.write_all(&bytes).unwrap();
    }
}

/// Layers mounted and stacked.
pub struct Stack {
    pub merged: PathBuf,
    _overlay: Option<MountGuard>,
    _layers: Vec<MountGuard>,
}

/// Mounts layers, the bottom one first, and an overlay of them with or without a writable upper
/// (`upper` and `work` below the given directory).
pub fn stack(layers: &[&Packed], scratch: &ScratchDir, name: &str, upper: Option<&str>) -> Stack {
    let layers: Vec<_> = layers
        .iter()
        .enumerate()
        .map(|(index, packed)| mount(packed, scratch, &format!("{name}-{index}")).unwrap())
        .collect();
    let lowers: Vec<&Path> = layers.iter().rev().map(MountGuard::path).collect();
    if upper.is_none() && lowers.len() == 1 {
        return Stack {
            merged: lowers[0].to_owned(),
            _overlay: None,
            _layers: layers,
        };
    }
    let merged = scratch.mkdir(format!("{name}.merged")).unwrap();
    let upper = upper.map(|dir| {
        (
            scratch.mkdir(format!("{dir}/upper")).unwrap(),
            scratch.mkdir(format!("{dir}/work")).unwrap(),
        )
    });
    let upper = upper
        .as_ref()
        .map(|(upper, work)| (upper.as_path(), work.as_path()));
    let overlay = MountGuard::overlay(&lowers, upper, &merged).unwrap();
    Stack {
        merged,
        _overlay: Some(overlay),
        _layers: layers,
    }
}

/// What a layer keeps of a tree.
fn kept() -> Options {
    Options::default()
}

#[track_caller]
pub fn assert_same_trees(left: &Path, right: &Path, options: &Options) {
    let found = diff(
        &snapshot(left, options).unwrap(),
        &snapshot(right, options).unwrap(),
    );
    assert!(
        found.is_empty(),
        "{} differences: {:#?}",
        found.len(),
        &found[..found.len().min(12)]
    );
}

#[test]
fn privileged_the_nasty_tree_mounted() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let scratch = ScratchDir::new("nasty-mount").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    nasty(&dir, &NastyOptions::default()).unwrap();
    let packed = try_dir("base/nasty:1", &dir).unwrap();
    assert!(packed.warnings.is_empty(), "{:?}", packed.warnings);
    let stack = stack(&[&packed], &scratch, "nasty", None);
    assert_same_trees(&dir, &stack.merged, &kept());
    fsck(&scratch, "nasty-0");
}

pub fn fsck(scratch: &ScratchDir, name: &str) {
    let Some(fsck) = find_tool("fsck.erofs") else {
        return;
    };
    let output = Command::new(fsck)
        .arg(format!(
            "--device={}",
            scratch.join(format!("{name}.data")).display()
        ))
        .arg(scratch.join(format!("{name}.meta")))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn privileged_random_trees_from_directory_and_archive_mounted() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    for seed in layerpack_fixtures::trees::seeds() {
        let scratch = ScratchDir::new("random-mount").unwrap();
        let dir = scratch.mkdir("tree").unwrap();
        random(&dir, &RandomOptions::new(seed)).unwrap();
        let packed = try_dir("base/r:1", &dir).unwrap();
        {
            let stack = stack(&[&packed], &scratch, "dir", None);
            assert_same_trees(&dir, &stack.merged, &kept());
            fsck(&scratch, "dir-0");
        }
        remove_what_tar_lacks(&dir);
        let archive = scratch.join("archive");
        gnu_tar(&dir, &archive, &["--format=posix", "--sparse"]);
        let packed = try_pack(&memory_store(), &options("base/r:1", Source::Tar(archive))).unwrap();
        let stack = stack(&[&packed], &scratch, "tar", None);
        assert_same_trees(&dir, &stack.merged, &kept());
    }
}

/// Layers of archives, each on top of the one before, as OCI layers.
fn oci_layers() -> Vec<Vec<u8>> {
    let mut base = TarWriter::new();
    base.dir("./", 0o755);
    for dir in [
        "kept",
        "emptied",
        "replaced",
        "recreated",
        "marked",
        "becomes-file",
        "nested",
        "nested/deep",
    ] {
        base.entry(
            &Header::new(kind::DIR, format!("{dir}/"))
                .mode(0o750)
                .owner(1, 2),
            b"",
        );
        base.file(format!("{dir}/old-1"), format!("{dir} 1"));
        base.file(format!("{dir}/old-2"), format!("{dir} 2"));
    }
    base.file("becomes-dir", "a file");
    base.file("gone", "a file");
    base.symlink("link", "kept");
    base.file("hard-1", "linked");
    base.hard_link("hard-2", "hard-1");
    let mut middle = TarWriter::new();
    middle.dir("./", 0o755);
    middle.whiteout("", "gone");
    middle.whiteout("", "never-there");
    middle.whiteout("", "hard-2");
    middle.dir("emptied/", 0o711);
    middle.whiteout("emptied", "old-1");
    middle.whiteout("emptied", "old-2");
    middle.whiteout("", "recreated");
    middle.dir("recreated/", 0o700);
    middle.file("recreated/new", "fresh");
    middle.dir("marked/", 0o755);
    middle.opaque("marked");
    middle.file("marked/new", "fresh");
    middle.file("becomes-file", "now a file");
    middle.dir("becomes-dir/", 0o755);
    middle.file("becomes-dir/f", "now in a directory");
    middle.dir("nested/", 0o750);
    middle.dir("nested/deep/", 0o750);
    middle.whiteout("nested/deep", "old-1");
    middle.symlink("link", "elsewhere");
    let mut top = TarWriter::new();
    top.dir("./", 0o755);
    top.file("gone", "back again");
    top.dir("recreated/", 0o755);
    top.file("recreated/old-1", "not the old one");
    top.dir("becomes-file/", 0o755);
    top.file("becomes-file/g", "a directory again");
    top.whiteout("", "becomes-dir");
    top.dir("nested/", 0o750);
    top.whiteout("nested", "deep");
    [base, middle, top].map(TarWriter::finish).to_vec()
}

fn pack_layers(store: &LayerStore, layers: &[Vec<u8>]) -> Vec<Packed> {
    let packed = layers.iter().enumerate().map(|(index, bytes)| {
        let kind = if index == 0 { "base" } else { "toolkit" };
        let file = ArchiveFile::new(bytes);
        try_pack(
            store,
            &options(&format!("{kind}/l{index}:1"), file.source()),
        )
        .unwrap()
    });
    packed.collect()
}

#[test]
fn privileged_stacked_archives_are_what_umoci_unpacks() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let Some(umoci) = find_tool("umoci") else {
        skip!("needs umoci")
    };
    let scratch = ScratchDir::new("umoci").unwrap();
    let layers = oci_layers();
    let image = format!("{}:t", scratch.join("image").display());
    let umoci = |args: &[&str]| {
        let output = Command::new(&umoci).args(args).output().unwrap();
        assert!(
            output.status.success(),
            "{args:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    umoci(&[
        "init",
        "--layout",
        &scratch.join("image").display().to_string(),
    ]);
    umoci(&["new", "--image", &image]);
    for (index, bytes) in layers.iter().enumerate() {
        let file = scratch.write(format!("layer-{index}.tar"), bytes).unwrap();
        umoci(&[
            "raw",
            "add-layer",
            "--image",
            &image,
            &file.display().to_string(),
        ]);
    }
    let bundle = scratch.join("bundle");
    umoci(&["unpack", "--image", &image, &bundle.display().to_string()]);
    let packed = pack_layers(&memory_store(), &layers);
    let stack = stack(&packed.iter().collect::<Vec<_>>(), &scratch, "stack", None);
    // umoci leaves the times of directories that it changed later. Link counts: umoci removed one
    // of two names, the overlay only hides it, and shows the count of the layer below.
    let options = Options {
        directory_times: false,
        links: false,
        ..kept()
    }
    .without_root();
    assert_same_trees(&bundle.join("rootfs"), &stack.merged, &options);
}

#[test]
fn privileged_marks_from_outside_do_nothing() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let mut base = TarWriter::new();
    base.dir("./", 0o755);
    base.dir("etc/", 0o755);
    base.file("etc/passwd", "root");
    base.file("etc/shadow", "secret");
    let mut evil = TarWriter::new();
    evil.dir("./", 0o755);
    for (name, value) in [
        ("trusted.overlay.opaque", "y"),
        ("user.overlay.opaque", "y"),
        ("trusted.overlay.redirect", "/other"),
    ] {
        evil.pax(&[(format!("SCHILY.xattr.{name}"), value)]);
        evil.dir("etc/", 0o755);
    }
    evil.entry(&Header::new(kind::CHAR, "etc/shadow").device(0, 0), b"");
    evil.pax(&[("SCHILY.xattr.trusted.overlay.metacopy", "")]);
    evil.file("etc/passwd", "mine");
    evil.pax(&[("SCHILY.xattr.trusted.overlay.whiteout", "y")]);
    evil.file("etc/empty", "");
    let scratch = ScratchDir::new("evil").unwrap();
    let packed = pack_layers(&memory_store(), &[base.finish(), evil.finish()]);
    let stack = stack(&packed.iter().collect::<Vec<_>>(), &scratch, "stack", None);
    let read = |name: &str| fs_err::read_to_string(stack.merged.join("etc").join(name)).unwrap();
    assert_eq!(
        (read("passwd"), read("shadow"), read("empty")),
        ("mine".into(), "secret".into(), String::new())
    );
    assert!(packed[1].warnings.len() >= 6, "{:?}", packed[1].warnings);
}

#[test]
fn privileged_a_hundred_layers_mount() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let store = memory_store();
    let layers: Vec<Vec<u8>> = (0..110)
        .map(|index| {
            let mut tar = TarWriter::new();
            tar.dir("./", 0o755);
            tar.dir("d/", 0o755);
            tar.file("d/last", index.to_string());
            tar.file(format!("d/f{index}"), "x");
            tar.whiteout("d", &format!("f{}", index - 1));
            tar.finish()
        })
        .collect();
    let packed = pack_layers(&store, &layers);
    let scratch = ScratchDir::new("hundred").unwrap();
    let stack = stack(&packed.iter().collect::<Vec<_>>(), &scratch, "stack", None);
    let mut names: Vec<_> = fs_err::read_dir(stack.merged.join("d"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["f109", "last"]);
    assert_eq!(
        fs_err::read_to_string(stack.merged.join("d/last")).unwrap(),
        "109"
    );
}

/// Packs an upper directory.
pub fn snapshot_upper(store: &LayerStore, upper: &Path, version: u32) -> Packed {
    let reference = format!("diff/d:{version}").parse().unwrap();
    let report = pack_diff(
        store,
        &PackDiffOptions::new(reference, upper.to_owned()),
        &Silent,
    )
    .unwrap();
    Packed::load(store, report.published.unwrap().digest, report.warnings)
}
