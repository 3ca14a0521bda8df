//! Flattened stacks: one file that the kernel mounts without anything of ours, and that other
//! readers of the format take.

use std::path::Path;
use std::process::Command;

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::tar::{Header, TarWriter, kind};
use layerpack_fixtures::treecmp::Options;
use layerpack_fixtures::trees::{NastyOptions, nasty};
use layerpack_fixtures::{MountGuard, ScratchDir, find_tool, skip};
use layerpack_packer::{FlattenOptions, FlattenReport, PackError, Silent, Source, flatten};
use layerpack_store::LayerStore;

use crate::merge::{pack, random_layer};
use crate::parents::pack_on;
use crate::peer::assert_same_as_mounted;
use crate::privileged_kernel::{assert_same_trees, stack, unable};
use crate::support::{chain, memory_store, options, try_pack};

pub fn try_flatten(
    store: &LayerStore,
    layers: &[&str],
    file: &Path,
) -> Result<FlattenReport, PackError> {
    let resolve = |text: &&str| store.resolve(&text.parse().unwrap()).unwrap();
    let layers = layers.iter().map(resolve).collect();
    flatten(
        store,
        &FlattenOptions::new(layers, file.to_owned()),
        &Silent,
    )
}

/// Flattens a stack twice, checks the file with `fsck.erofs` and an independent reader, and mounts
/// it without any device.
fn flattened(
    store: &LayerStore,
    layers: &[&str],
    scratch: &ScratchDir,
    name: &str,
) -> (MountGuard, FlattenReport) {
    let file = scratch.join(format!("{name}.erofs"));
    let report = try_flatten(store, layers, &file).unwrap_or_else(|e| panic!("{}", chain(&e)));
    let bytes = fs_err::read(&file).unwrap();
    assert_eq!(report.bytes, bytes.len() as u64);
    let again = scratch.join(format!("{name}.again"));
    try_flatten(store, layers, &again).unwrap();
    assert!(bytes == fs_err::read(&again).unwrap(), "not the same twice");
    if let Some(fsck) = find_tool("fsck.erofs") {
        let output = Command::new(fsck).arg(&file).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
    }
    let target = scratch.mkdir(format!("{name}.mnt")).unwrap();
    let mounted = MountGuard::erofs(&file, &[], &target).unwrap();
    assert_same_as_mounted(&bytes, &[], &target);
    (mounted, report)
}

#[test]
fn privileged_a_flattened_stack_is_what_the_overlay_shows() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    for seed in 0..6 {
        let mut rng = Rng::new(5000 + seed);
        let store = memory_store();
        let names = ["base/l:0", "toolkit/l:1", "toolkit/l:2", "toolkit/l:3"];
        let mut layers = Vec::new();
        for number in 0..names.len() {
            let mut tar = random_layer(&mut rng, number as u64, number > 0);
            let big: Vec<u8> = (0..50_000u32).flat_map(|i| (i * i).to_le_bytes()).collect();
            tar.file("big", &big[number..])
                .file(format!("big-{number}"), &big);
            tar.sparse_pax_1_0("s", &[(0, 4096), (1 << 20, 512)], 2 << 20, &[7; 4608]);
            layers.push(pack_on(&store, names[number], &tar, &names[..number]));
        }
        let scratch = ScratchDir::new("flatten").unwrap();
        let overlay = stack(
            &layers.iter().collect::<Vec<_>>(),
            &scratch,
            "overlay",
            None,
        );
        let (flat, report) = flattened(&store, &names, &scratch, "flat");
        assert_same_trees(&overlay.merged, flat.path(), &Options::default());
        assert_eq!((report.counts.whiteouts, report.counts.implicit), (0, 0));
    }
}

#[test]
fn privileged_the_nasty_tree_flattened() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let scratch = ScratchDir::new("flatten-nasty").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    let options_of_tree = NastyOptions {
        huge: false,
        ..NastyOptions::default()
    };
    nasty(&dir, &options_of_tree).unwrap();
    let store = memory_store();
    try_pack(&store, &options("base/n:1", Source::Dir(dir.clone()))).unwrap();
    let (flat, _) = flattened(&store, &["base/n:1"], &scratch, "flat");
    assert_same_trees(&dir, flat.path(), &Options::default());
}

#[test]
fn privileged_a_flattened_layer_without_contents() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755)
        .dir("empty/", 0o700)
        .symlink("link", "nowhere");
    tar.entry(&Header::new(kind::FIFO, "pipe"), b"");
    tar.file("nothing", "");
    let store = memory_store();
    let packed = pack(&store, "base/e:1", tar);
    let scratch = ScratchDir::new("flatten-empty").unwrap();
    let layered = stack(&[&packed], &scratch, "layered", None);
    let (flat, report) = flattened(&store, &["base/e:1"], &scratch, "flat");
    assert_same_trees(&layered.merged, flat.path(), &Options::default());
    assert_eq!(report.bytes, report.meta_bytes);
}

#[test]
fn a_failed_flattening_leaves_what_was_there() {
    let scratch = ScratchDir::new("flatten-bad").unwrap();
    let root = scratch.join("store");
    let store =
        LayerStore::new(layerpack_store::open_url(&format!("file://{}", root.display())).unwrap());
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755).file("f", vec![3; 100_000]);
    pack(&store, "base/b:1", tar);
    let file = scratch.write("image", "before").unwrap();
    let none = flatten(
        &store,
        &FlattenOptions::new(Vec::new(), file.clone()),
        &Silent,
    );
    assert!(chain(&none.unwrap_err()).contains("nothing to flatten"));
    damage_packs(&root);
    let error = try_flatten(&store, &["base/b:1"], &file).unwrap_err();
    assert!(!chain(&error).is_empty());
    assert_eq!(fs_err::read(&file).unwrap(), b"before");
    let left: Vec<_> = fs_err::read_dir(scratch.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name != "store" && name != "image")
        .collect();
    assert_eq!(left, Vec::<std::ffi::OsString>::new());
    let missing = scratch.join("no/such/image");
    let error = try_flatten(&store, &["base/b:1"], &missing).unwrap_err();
    assert!(chain(&error).contains("no/such"), "{}", chain(&error));
}

/// Changes a byte in the middle of every pack.
fn damage_packs(root: &Path) {
    let mut todo = vec![root.join("packs")];
    let mut changed = 0;
    while let Some(path) = todo.pop() {
        for entry in fs_err::read_dir(&path).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                todo.push(entry.path());
                continue;
            }
            let mut bytes = fs_err::read(entry.path()).unwrap();
            let middle = bytes.len() / 2;
            for byte in &mut bytes[..middle] {
                *byte ^= 0x55;
            }
            let temporary = entry.path().with_extension("damaged");
            fs_err::write(&temporary, bytes).unwrap();
            fs_err::rename(&temporary, entry.path()).unwrap();
            changed += 1;
        }
    }
    assert!(changed > 0);
}
