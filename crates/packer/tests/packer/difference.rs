//! Differences of two trees: what lies below and the difference are the new tree.

use std::path::{Path, PathBuf};

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::tar::{Header, TarWriter, kind};
use layerpack_fixtures::trees::{RandomOptions, TreeMaker, random};
use layerpack_packer::{BuildOptions, Source};
use layerpack_store::LayerStore;

use crate::merge::{pack, random_layer, try_merge};
use crate::parents::{on, pack_on};
use crate::support::{ArchiveFile, Packed, Tree, chain, memory_store, options, try_pack};

pub fn difference_options(
    store: &LayerStore,
    reference: &str,
    source: Source,
    below: &[&str],
) -> BuildOptions {
    let mut with = on(store, reference, source, below);
    with.difference = true;
    with
}

#[track_caller]
pub fn difference(store: &LayerStore, reference: &str, source: Source, below: &[&str]) -> Packed {
    try_pack(store, &difference_options(store, reference, source, below))
        .unwrap_or_else(|error| panic!("{}", chain(&error)))
}

/// Packs the difference from `below` to a directory and checks that both together are that
/// directory's own layer.
#[track_caller]
fn check(store: &LayerStore, version: &str, new: &Path, below: &[&str]) -> Packed {
    let reference = format!("diff/d:{version}");
    let source = Source::Dir(new.to_owned());
    let packed = difference(store, &reference, source.clone(), below);
    let mut stack = below.to_vec();
    stack.push(&reference);
    let merged = try_merge(store, &format!("base/merged:{version}"), &stack).unwrap();
    let whole = options(&format!("base/whole:{version}"), source);
    let whole = try_pack(store, &whole).unwrap();
    assert_eq!(merged.manifest.layer_id(), whole.manifest.layer_id());
    packed
}

/// A directory packed as `base/old:1`, and a copy of it to change.
fn old_and_new(make: impl Fn(&Path)) -> (LayerStore, ScratchDir, PathBuf) {
    let scratch = ScratchDir::new("difference").unwrap();
    let old = scratch.mkdir("old").unwrap();
    make(&old);
    let new = scratch.join("new");
    let copied = std::process::Command::new("cp")
        .arg("-a")
        .arg(&old)
        .arg(&new)
        .status()
        .unwrap();
    assert!(copied.success());
    let store = memory_store();
    try_pack(&store, &options("base/old:1", Source::Dir(old))).unwrap();
    (store, scratch, new)
}

fn sample(root: &Path) {
    let mut maker = TreeMaker::new(root);
    for dir in ["a", "a/deep", "a/deep/er", "b", "gone", "to-file"] {
        maker.dir(dir, 0o755).unwrap();
    }
    maker.file("a/deep/er/file", "content").unwrap();
    maker.file("a/deep/other", "other").unwrap();
    maker.file("gone/x", "x").unwrap();
    maker.file("to-file/y", "y").unwrap();
    maker.file("to-dir", "z").unwrap();
    maker.file("big", vec![1; 1 << 20]).unwrap();
    maker.symlink("link", "a").unwrap();
    maker.file("one", "linked").unwrap();
    maker.hard_link("b/two", "one").unwrap();
    maker.hard_link("b/three", "one").unwrap();
    maker.finish().unwrap();
}

fn names(tree: &Tree) -> Vec<String> {
    tree.paths()
        .into_iter()
        .filter(|path| !path.is_empty())
        .collect()
}

#[test]
fn nothing_changed_is_nothing() {
    let (store, _scratch, new) = old_and_new(sample);
    let packed = check(&store, "1", &new, &["base/old:1"]);
    let tree = packed.tree();
    assert_eq!(names(&tree), Vec::<String>::new());
    assert!(tree.is_implicit(""));
    assert_eq!(packed.map.data_size(), 0);
    assert_eq!(packed.manifest.parents.len(), 1);
}

#[test]
fn a_change_leaves_itself_and_the_way_to_it() {
    let (store, _scratch, new) = old_and_new(sample);
    let file = new.join("a/deep/er/file");
    // Equal size and time: only the bytes tell.
    let stat = rustix::fs::stat(&file).unwrap();
    fs_err::write(&file, "CONTENT").unwrap();
    set_times(&file, &stat);
    let packed = check(&store, "1", &new, &["base/old:1"]);
    let tree = packed.tree();
    assert_eq!(names(&tree), ["a", "a/deep", "a/deep/er", "a/deep/er/file"]);
    for dir in ["", "a", "a/deep", "a/deep/er"] {
        assert!(tree.is_implicit(dir), "{dir}");
    }
    // The way looks as it does below even where nobody resolves it.
    assert_eq!(
        tree.get("a").mtime.0,
        rustix::fs::stat(new.join("a")).unwrap().st_mtime
    );
}

fn set_times(path: &Path, stat: &rustix::fs::Stat) {
    let time = |sec, nsec: u64| rustix::fs::Timespec {
        tv_sec: sec,
        tv_nsec: nsec as i64,
    };
    let times = rustix::fs::Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    };
    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, flags).unwrap();
}

#[test]
fn metadata_of_a_directory_is_only_that_directory() {
    let (store, _scratch, new) = old_and_new(sample);
    let mut maker = TreeMaker::new(&new);
    maker.mode("a/deep", 0o700).unwrap();
    maker.finish().unwrap();
    let tree = check(&store, "1", &new, &["base/old:1"]).tree();
    assert_eq!(names(&tree), ["a", "a/deep"]);
    assert!(tree.is_implicit("a") && !tree.is_implicit("a/deep"));
    assert_eq!(tree.get("a/deep").mode, 0o700);
    // The root's own counts in a diff, and in nothing else.
    let mut maker = TreeMaker::new(&new);
    maker
        .mode("a/deep", 0o755)
        .unwrap()
        .mode(".", 0o711)
        .unwrap();
    maker.finish().unwrap();
    let tree = check(&store, "2", &new, &["base/old:1"]).tree();
    assert!(!tree.is_implicit("") && tree.get("").mode == 0o711);
    let source = Source::Dir(new);
    let tree = difference(&store, "toolkit/t:1", source, &["base/old:1"]).tree();
    assert!(tree.is_implicit("") && tree.get("").mode != 0o711);
}

#[test]
fn what_is_removed_renamed_or_becomes_something_else() {
    let (store, _scratch, new) = old_and_new(sample);
    fs_err::remove_dir_all(new.join("gone")).unwrap();
    fs_err::remove_dir_all(new.join("to-file")).unwrap();
    fs_err::write(new.join("to-file"), "now a file").unwrap();
    fs_err::remove_file(new.join("to-dir")).unwrap();
    fs_err::create_dir(new.join("to-dir")).unwrap();
    fs_err::write(new.join("to-dir/in"), "in").unwrap();
    fs_err::rename(new.join("a/deep"), new.join("renamed")).unwrap();
    fs_err::rename(new.join("big"), new.join("b/big")).unwrap();
    let packed = check(&store, "1", &new, &["base/old:1"]);
    let tree = packed.tree();
    for path in ["gone", "a/deep", "big"] {
        assert!(tree.is_whiteout(path), "{path}");
    }
    assert!(tree.is_opaque("to-dir") && !tree.is_implicit("to-dir"));
    assert!(!tree.is_opaque("renamed") && !tree.is_implicit("renamed"));
    assert_eq!(tree.get("to-file").content(), b"now a file");
    assert!(tree.has("b/big") && tree.has("renamed/er/file"));
    assert!(!tree.has("one") && !tree.has("b/two"));
}

#[test]
fn contents_below_are_named_not_stored_again() {
    let (store, _scratch, new) = old_and_new(sample);
    fs_err::rename(new.join("big"), new.join("b/big")).unwrap();
    let source = Source::Dir(new);
    let with = difference_options(&store, "diff/d:1", source, &["base/old:1"]);
    let report = layerpack_packer::build(&store, &with, &layerpack_packer::Silent).unwrap();
    assert_eq!(report.published.stats.new_chunks, 0);
    assert_eq!(report.counts.bytes, 1 << 20);
}

#[test]
fn link_counts_follow_the_new_tree() {
    // A name less, a name more, a link cut, two files made one.
    let changes: [fn(&Path); 4] = [
        |new| fs_err::remove_file(new.join("b/two")).unwrap(),
        |new| fs_err::hard_link(new.join("one"), new.join("four")).unwrap(),
        |new| {
            fs_err::remove_file(new.join("b/two")).unwrap();
            fs_err::copy(new.join("one"), new.join("b/two")).unwrap();
            set_times(
                &new.join("b/two"),
                &rustix::fs::stat(new.join("one")).unwrap(),
            );
        },
        |new| {
            fs_err::remove_file(new.join("to-dir")).unwrap();
            fs_err::hard_link(new.join("one"), new.join("to-dir")).unwrap();
        },
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let (store, _scratch, new) = old_and_new(sample);
        change(&new);
        let tree = check(&store, "1", &new, &["base/old:1"]).tree();
        assert!(tree.has("one") && tree.has("b/three"), "{index}");
        assert_eq!(tree.get("one").nid, tree.get("b/three").nid, "{index}");
    }
}

#[test]
fn what_is_excluded_stays_as_it_is_below() {
    let (store, _scratch, new) = old_and_new(sample);
    fs_err::remove_dir_all(new.join("gone")).unwrap();
    fs_err::write(new.join("a/deep/other"), "changed").unwrap();
    fs_err::remove_file(new.join("link")).unwrap();
    let source = Source::Dir(new);
    let mut with = difference_options(&store, "toolkit/d:1", source, &["base/old:1"]);
    with.excludes = vec!["/gone".to_owned(), "other".to_owned()];
    let tree = try_pack(&store, &with).unwrap().tree();
    assert!(tree.is_whiteout("link"));
    assert!(!tree.has("gone") && !tree.has("a/deep/other"));
}

#[test]
fn an_archive_is_a_tree_too() {
    let store = memory_store();
    let mut old = TarWriter::new();
    old.dir("./", 0o755)
        .dir("d/", 0o755)
        .file("d/a", "1")
        .file("d/b", "2");
    pack(&store, "base/old:1", old);
    let mut new = TarWriter::new();
    new.dir("./", 0o755).dir("d/", 0o755).file("d/b", "2");
    new.entry(&Header::new(kind::FIFO, "p"), b"");
    let file = ArchiveFile::new(new.finish());
    let tree = difference(&store, "diff/d:1", file.source(), &["base/old:1"]).tree();
    assert_eq!(names(&tree), ["d", "d/a", "p"]);
    assert!(tree.is_whiteout("d/a"));
}

#[test]
fn differences_that_cannot_be_are_refused() {
    let (store, _scratch, new) = old_and_new(sample);
    let source = Source::Dir(new);
    let refused = |change: fn(&mut BuildOptions)| {
        let mut with = difference_options(&store, "diff/x:1", source.clone(), &["base/old:1"]);
        change(&mut with);
        chain(&try_pack(&store, &with).err().unwrap())
    };
    assert!(refused(|with| with.parents.clear()).contains("name the layers"));
    assert!(refused(|with| with.at = Some(b"x".to_vec())).contains("whole trees"));
    assert!(refused(|with| with.reference = "base/x:1".parse().unwrap()).contains("base"));
}

#[test]
fn between_random_trees() {
    for seed in layerpack_fixtures::trees::seeds() {
        let scratch = ScratchDir::new("random").unwrap();
        let store = memory_store();
        let mut dirs = Vec::new();
        for (index, seed) in [seed, seed + 1000].into_iter().enumerate() {
            let dir = scratch.mkdir(format!("tree-{index}")).unwrap();
            random(&dir, &RandomOptions::new(seed)).unwrap();
            let with = options(&format!("base/t:{index}"), Source::Dir(dir.clone()));
            try_pack(&store, &with).unwrap();
            dirs.push(dir);
        }
        check(&store, "up", &dirs[1], &["base/t:0"]);
        check(&store, "down", &dirs[0], &["base/t:1"]);
        // On a stack, and back to where it began.
        check(&store, "back", &dirs[0], &["base/t:0", "diff/d:up"]);
        let tree = check(&store, "same", &dirs[1], &["base/t:0", "diff/d:up"]).tree();
        assert_eq!(names(&tree), Vec::<String>::new());
    }
}

/// The same over layers with whiteouts and marks, whose merge is the new tree.
#[test]
fn between_random_stacks() {
    for seed in 0..40 {
        let mut rng = Rng::new(9000 + seed);
        let store = memory_store();
        let names = ["base/l:0", "toolkit/l:1", "toolkit/l:2"];
        for number in 0..names.len() {
            let tar = random_layer(&mut rng, number as u64, number > 0);
            pack_on(&store, names[number], &tar, &names[..number]);
        }
        let shown = try_merge(&store, "base/m:1", &names).unwrap();
        let scratch = ScratchDir::new("stacks").unwrap();
        let archive = scratch.join("archive");
        let target = format!("tar:{}", archive.display());
        crate::export::try_export(&store, &names, &target, |_| {}).unwrap();
        let source = Source::Tar(archive);
        difference(&store, "diff/d:1", source, &["base/l:0"]);
        let merged = try_merge(&store, "base/m:2", &["base/l:0", "diff/d:1"]).unwrap();
        assert_eq!(
            merged.manifest.layer_id(),
            shown.manifest.layer_id(),
            "seed {seed}"
        );
    }
}
