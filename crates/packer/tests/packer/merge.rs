//! Merging layers: overlay semantics as one layer, without copying contents.

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::tar::{Header, TarWriter, kind};
use layerpack_packer::{MergeOptions, PackError, Silent, merge};
use layerpack_store::LayerStore;

use crate::support::{ArchiveFile, Packed, chain, memory_store, options, try_pack};

/// Packs an archive into `store`.
#[track_caller]
pub fn pack(store: &LayerStore, reference: &str, tar: TarWriter) -> Packed {
    let file = ArchiveFile::new(tar.finish());
    try_pack(store, &options(reference, file.source()))
        .unwrap_or_else(|error| panic!("{}", chain(&error)))
}

pub fn try_merge(
    store: &LayerStore,
    reference: &str,
    layers: &[&str],
) -> Result<Packed, PackError> {
    let layers = layers.iter().map(|text| text.parse().unwrap()).collect();
    let options = MergeOptions::new(reference.parse().unwrap(), layers);
    let report = merge(store, &options, &Silent)?;
    assert_eq!(report.published.stats.raw_bytes, 0, "contents were read");
    assert_eq!(report.published.stats.new_packs, 0, "contents were written");
    Ok(Packed::load(
        store,
        report.published.digest,
        report.warnings,
    ))
}

#[test]
fn a_base_and_what_lies_on_it_merge_into_the_base_one_would_have_built() {
    let store = memory_store();
    let big: Vec<u8> = (0..300_000u32)
        .flat_map(|i| i.wrapping_mul(i).to_le_bytes())
        .collect();
    let sparse = |tar: &mut TarWriter, name: &str| {
        tar.sparse_pax_1_0(name, &[(0, 4096), (1 << 20, 512)], 2 << 20, &[7; 4608]);
    };
    let mut lower = TarWriter::new();
    lower.dir("./", 0o755);
    lower.dir("etc", 0o751);
    lower.file("etc/passwd", "root").file("etc/gone", "x");
    lower.file("big", &big);
    sparse(&mut lower, "sparse");
    lower.dir("d", 0o700).file("d/old", "old");
    pack(&store, "base/a:1", lower);
    let mut middle = TarWriter::new();
    // etc is implied: it keeps its mode.
    middle.file("etc/new", "new").whiteout("etc", "gone");
    middle.whiteout("", "d").dir("d", 0o711).file("d/new", "n");
    pack(&store, "workspace/w:1", middle);
    let mut upper = TarWriter::new();
    upper.file("etc/passwd", "changed").file("copy", &big);
    pack(&store, "toolkit/t:1", upper);

    let merged = try_merge(
        &store,
        "base/a:2",
        &["base/a:1", "workspace/w:1", "toolkit/t:1"],
    )
    .unwrap();
    let mut whole = TarWriter::new();
    whole.dir("./", 0o755);
    whole.dir("etc", 0o751);
    whole.file("etc/passwd", "changed").file("etc/new", "new");
    whole.file("big", &big).file("copy", &big);
    sparse(&mut whole, "sparse");
    whole.dir("d", 0o711).file("d/new", "n");
    let whole = pack(&store, "base/a:3", whole);
    assert_eq!(merged.manifest.layer_id(), whole.manifest.layer_id());
    assert!(merged.manifest.parents.is_empty());
}

#[test]
fn in_the_middle_of_a_stack_whiteouts_and_marks_stay() {
    let store = memory_store();
    let mut lower = TarWriter::new();
    lower
        .whiteout("", "both")
        .whiteout("", "back")
        .file("dir/a", "a");
    lower
        .file("file", "f")
        .dir("op", 0o755)
        .opaque("op")
        .file("op/1", "1");
    pack(&store, "workspace/w:1", lower);
    let mut upper = TarWriter::new();
    upper
        .dir("back", 0o750)
        .file("back/x", "x")
        .whiteout("dir", "a");
    upper
        .file("file/inside", "i")
        .dir("op", 0o711)
        .file("op/2", "2");
    upper.whiteout("", "never");
    pack(&store, "toolkit/t:1", upper);
    let merged = try_merge(&store, "workspace/m:1", &["workspace/w:1", "toolkit/t:1"]).unwrap();
    let tree = merged.tree();
    for path in ["both", "never", "dir/a"] {
        assert!(tree.is_whiteout(path), "{path}");
    }
    // What overlayfs would not look beneath.
    assert!(tree.is_opaque("back") && tree.is_opaque("op") && tree.is_opaque("file"));
    assert_eq!((tree.get("back").mode, tree.get("op").mode), (0o750, 0o711));
    assert!(tree.has("op/1") && tree.has("op/2") && tree.has("file/inside"));
    assert!(tree.is_implicit("dir") && tree.is_implicit(""));
    // In place of a file there is nothing to inherit.
    assert!(!tree.is_implicit("file") && !tree.is_implicit("back"));
}

/// A merge without the bottom keeps what it says of layers below, which then apply it.
#[test]
fn an_opaque_root_hides_what_will_lie_below_the_merge() {
    let store = memory_store();
    let mut base = TarWriter::new();
    base.dir("./", 0o711)
        .dir("d/", 0o700)
        .file("d/a", "1")
        .file("e", "1");
    pack(&store, "base/b:1", base);
    let mut first = TarWriter::new();
    first.opaque("").file("d/b", "2").file("gone", "2");
    pack(&store, "workspace/w:1", first);
    let mut second = TarWriter::new();
    second
        .whiteout("", "gone")
        .whiteout("", "e")
        .file("d/c", "3");
    pack(&store, "toolkit/t:1", second);
    let middle = try_merge(&store, "workspace/m:1", &["workspace/w:1", "toolkit/t:1"]).unwrap();
    let tree = middle.tree();
    assert!(tree.is_opaque(""));
    // Nothing lies below that they could hide.
    assert_eq!(tree.paths(), ["", "d", "d/b", "d/c"]);
    let stacks: [&[&str]; 2] = [
        &["base/b:1", "workspace/m:1"],
        &["base/b:1", "workspace/w:1", "toolkit/t:1"],
    ];
    for (index, stack) in stacks.into_iter().enumerate() {
        let tree = try_merge(&store, &format!("base/m:{index}"), stack)
            .unwrap()
            .tree();
        assert_eq!(tree.paths(), ["", "d", "d/b", "d/c"]);
        assert_eq!((tree.get("").mode, tree.get("d").mode), (0o711, 0o755));
        assert!(tree.nodes.values().all(|node| node.xattrs.is_empty()));
    }
}

#[test]
fn hard_links_stay_one_file_as_far_as_their_names_remain() {
    let store = memory_store();
    let mut lower = TarWriter::new();
    lower.file("a", "1").hard_link("b", "a").hard_link("c", "a");
    lower.entry(&Header::new(kind::FIFO, "p"), b"");
    lower.hard_link("q", "p");
    pack(&store, "base/a:1", lower);
    let mut upper = TarWriter::new();
    upper.whiteout("", "b").file("x", "2").hard_link("c", "x");
    pack(&store, "toolkit/t:1", upper);
    let tree = try_merge(&store, "base/m:1", &["base/a:1", "toolkit/t:1"])
        .unwrap()
        .tree();
    assert_eq!(tree.get("a").nlink, 1);
    assert_eq!(tree.links("c"), ["c", "x"]);
    assert_eq!(tree.get("c").content(), b"2");
    assert_eq!(tree.links("p"), ["p", "q"]);
}

#[test]
fn what_cannot_be_merged_is_refused() {
    let store = memory_store();
    for reference in ["base/a:1", "toolkit/t:1"] {
        let mut tar = TarWriter::new();
        tar.file(reference.split('/').next().unwrap(), "1");
        pack(&store, reference, tar);
    }
    let refused = |reference, layers: &[&str]| match try_merge(&store, reference, layers) {
        Err(error) => chain(&error),
        Ok(_) => panic!("merged"),
    };
    assert!(refused("base/m:1", &["toolkit/t:1"]).contains("only a base makes a base"));
    assert!(refused("toolkit/m:1", &["base/a:1"]).contains("only a base"));
    assert!(refused("toolkit/m:1", &["toolkit/t:1", "base/a:1"]).contains("at the bottom"));
    assert!(refused("base/m:1", &[]).contains("nothing to merge"));
    assert!(refused("base/m:1", &["base/nix:1"]).contains("base/nix:1"));
    assert!(store.resolve(&"base/m:1".parse().unwrap()).is_err());
}

/// An archive of a few names, so that layers meet: every directory has its own entry, and there
/// are whiteouts of what does not exist, also in new and in opaque directories.
pub fn random_layer(rng: &mut Rng, number: u64, marks: bool) -> TarWriter {
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755);
    for outer in ["a", "b", "c"] {
        match rng.below(if marks { 6 } else { 4 }) {
            0 => {
                tar.file(outer, format!("{number}{outer}"));
            }
            1 => {}
            4 => {
                tar.whiteout("", outer);
            }
            more => {
                if more == 5 {
                    tar.whiteout("", outer);
                }
                tar.entry(
                    &Header::new(kind::DIR, outer)
                        .mode(0o700 + number as u32)
                        .mtime(number as i64),
                    b"",
                );
                if marks && rng.below(4) == 0 {
                    tar.opaque(outer);
                }
                for inner in ["x", "y", "z"] {
                    let path = format!("{outer}/{inner}");
                    match rng.below(if marks { 7 } else { 5 }) {
                        0 => {
                            tar.file(&path, format!("{number}{path}"));
                        }
                        1 => {
                            tar.symlink(&path, format!("to{number}"));
                        }
                        2 | 3 => {
                            tar.dir(&path, 0o750 + number as u32 % 8);
                            tar.file(format!("{path}/{}", rng.below(3)), format!("{number}"));
                        }
                        5 | 6 => {
                            tar.whiteout(outer, inner);
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    tar
}

/// However a stack is merged, in one step or in several, the same comes out.
#[test]
fn the_order_of_merging_does_not_matter() {
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let store = memory_store();
        let names = ["base/l:0", "toolkit/l:1", "toolkit/l:2", "toolkit/l:3"];
        for (number, name) in names.iter().enumerate() {
            let tar = random_layer(&mut rng, number as u64, number > 0);
            pack(&store, name, tar);
        }
        let once = try_merge(&store, "base/m:once", &names).unwrap();
        try_merge(&store, "toolkit/m:12", &names[1..3]).unwrap();
        try_merge(&store, "toolkit/m:123", &["toolkit/m:12", names[3]]).unwrap();
        let top = try_merge(&store, "base/m:top", &["base/l:0", "toolkit/m:123"]).unwrap();
        try_merge(&store, "base/m:01", &names[..2]).unwrap();
        try_merge(&store, "toolkit/m:23", &names[2..]).unwrap();
        let halves = try_merge(&store, "base/m:halves", &["base/m:01", "toolkit/m:23"]).unwrap();
        assert_eq!(
            once.manifest.layer_id(),
            top.manifest.layer_id(),
            "seed {seed}"
        );
        assert_eq!(
            once.manifest.layer_id(),
            halves.manifest.layer_id(),
            "seed {seed}"
        );
    }
}
