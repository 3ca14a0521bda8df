//! Layers packed on top of others: what these show decides what the entries mean.

use layerpack_erofs::FileType;
use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::tar::{Header, TarWriter, kind};
use layerpack_packer::{BuildOptions, PackError, Source};
use layerpack_store::{LayerStore, ParentRef, Reference};

use crate::merge::{pack, random_layer, try_merge};
use crate::support::{ArchiveFile, Packed, chain, memory_store, options, try_pack};

/// References of layers as parents.
pub fn parents(store: &LayerStore, layers: &[&str]) -> Vec<ParentRef> {
    let parent = |text: &&str| {
        let reference: Reference = text.parse().unwrap();
        ParentRef {
            manifest: store.resolve(&reference).unwrap(),
            reference: Some(reference),
        }
    };
    layers.iter().map(parent).collect()
}

pub fn on(store: &LayerStore, reference: &str, source: Source, below: &[&str]) -> BuildOptions {
    let mut with = options(reference, source);
    with.parents = parents(store, below);
    with
}

pub fn try_pack_on(
    store: &LayerStore,
    reference: &str,
    tar: &TarWriter,
    below: &[&str],
) -> Result<Packed, PackError> {
    let file = ArchiveFile::new(tar.clone().finish());
    try_pack(store, &on(store, reference, file.source(), below))
}

#[track_caller]
pub fn pack_on(store: &LayerStore, reference: &str, tar: &TarWriter, below: &[&str]) -> Packed {
    try_pack_on(store, reference, tar, below).unwrap_or_else(|error| panic!("{}", chain(&error)))
}

fn tar(fill: impl FnOnce(&mut TarWriter)) -> TarWriter {
    let mut tar = TarWriter::new();
    fill(&mut tar);
    tar
}

#[test]
fn excludes_follow_links_of_the_layers_below() {
    let store = memory_store();
    let below = tar(|tar| {
        tar.dir("usr/lib/", 0o755).symlink("lib", "usr/lib");
    });
    pack(&store, "base/b:1", below);
    let upper = tar(|tar| {
        tar.file("lib/new", "1").file("lib/kept", "2");
    });
    let file = ArchiveFile::new(upper.finish());
    let mut with = on(&store, "toolkit/u:1", file.source(), &["base/b:1"]);
    with.excludes = vec!["/usr/lib/new".to_owned()];
    let tree = try_pack(&store, &with).unwrap().tree();
    let paths = tree.paths();
    let files = ["usr/lib/new", "usr/lib/kept"].map(|name| paths.iter().any(|path| path == name));
    assert_eq!(files, [false, true], "{:?}", tree.paths());
}

#[test]
fn directories_that_are_passed_through_look_as_below() {
    let store = memory_store();
    let base = tar(|tar| {
        tar.dir("./", 0o711);
        tar.pax(&[("SCHILY.xattr.user.x", "kept")]);
        tar.entry(
            &Header::new(kind::DIR, "tmp")
                .mode(0o1777)
                .owner(7, 8)
                .mtime(9),
            b"",
        );
        tar.dir("gone", 0o700).dir("gone/in", 0o700);
    });
    pack(&store, "base/b:1", base);
    let upper = tar(|tar| {
        tar.file("tmp/a/b", "1").file("new/c", "2");
        tar.whiteout("", "gone").file("gone/in/d", "3");
    });
    let packed = pack_on(&store, "toolkit/t:1", &upper, &["base/b:1"]);
    let tree = packed.tree();
    let tmp = tree.get("tmp");
    assert_eq!(
        (tmp.mode, tmp.uid, tmp.gid, tmp.mtime),
        (0o1777, 7, 8, (9, 0))
    );
    assert_eq!(tmp.xattrs.get(&b"user.x"[..]).unwrap(), b"kept");
    assert_eq!((tree.get("").mode, tree.get("new").mode), (0o711, 0o755));
    // On other layers they look as those say; what was removed is new and nobody's but its own.
    for path in ["", "tmp", "tmp/a", "new"] {
        assert!(tree.is_implicit(path), "{path}");
    }
    assert_eq!(
        (tree.get("gone").mode, tree.get("gone/in").mode),
        (0o755, 0o755)
    );
    assert!(tree.is_opaque("gone") && !tree.is_implicit("gone/in"));
    assert_eq!(packed.manifest.parents.len(), 1);
}

#[test]
fn paths_lead_through_the_links_below() {
    let store = memory_store();
    let base = tar(|tar| {
        tar.dir("./", 0o755)
            .dir("usr/", 0o755)
            .dir("usr/lib", 0o751)
            .symlink("lib", "usr/lib")
            .symlink("srv", "/usr/lib");
    });
    pack(&store, "base/b:1", base);
    let middle = tar(|tar| {
        tar.symlink("gone", "usr").whiteout("", "srv");
    });
    pack_on(&store, "workspace/w:1", &middle, &["base/b:1"]);
    let below = ["base/b:1", "workspace/w:1"];
    let upper = tar(|tar| {
        tar.file("lib/a", "1").file("gone/b", "2");
        // Removed below, so that it is a directory of the layer's own.
        tar.file("srv/c", "3");
    });
    let tree = pack_on(&store, "toolkit/t:1", &upper, &below).tree();
    assert!(tree.has("usr/lib/a") && tree.has("usr/b") && tree.has("srv/c"));
    assert!(!tree.has("lib") && !tree.has("gone") && !tree.has("usr/lib/c"));
    assert_eq!(tree.get("usr/lib").mode, 0o751);

    // So does the path that a source is put at.
    let scratch = ScratchDir::new("at").unwrap();
    scratch.write("f", "1").unwrap();
    let source = Source::Dir(scratch.path().to_owned());
    let mut with = on(&store, "toolkit/at:1", source, &["base/b:1"]);
    with.at = Some(b"lib/x".to_vec());
    let tree = try_pack(&store, &with).unwrap().tree();
    assert_eq!(
        tree.paths(),
        ["", "usr", "usr/lib", "usr/lib/x", "usr/lib/x/f"]
    );
}

/// A file, a symbolic link, a pipe and two devices with three names each.
fn linked() -> TarWriter {
    tar(|tar| {
        tar.dir("./", 0o755).dir("d/", 0o750);
        tar.file("file", "content");
        tar.symlink("symlink", "file");
        tar.entry(&Header::new(kind::FIFO, "fifo"), b"");
        tar.entry(&Header::new(kind::CHAR, "char").device(1, 3), b"");
        tar.entry(&Header::new(kind::BLOCK, "block").device(7, 300), b"");
        for name in KINDS {
            tar.hard_link(format!("d/{name}-2"), name);
            tar.hard_link(format!("{name}-3"), name);
        }
    })
}

const KINDS: [&str; 5] = ["file", "symlink", "fifo", "char", "block"];

#[test]
fn link_counts_are_right_when_names_are_removed() {
    let store = memory_store();
    pack(&store, "base/b:1", linked());
    let cases: [(&str, TarWriter); 5] = [
        (
            "whiteout",
            tar(|tar| {
                for name in KINDS {
                    tar.whiteout("", name);
                }
            }),
        ),
        (
            "replaced",
            tar(|tar| {
                for name in KINDS {
                    tar.file(name, "other");
                }
            }),
        ),
        (
            "directory in its place",
            tar(|tar| {
                for name in KINDS {
                    tar.dir(name, 0o700);
                }
            }),
        ),
        (
            "directory removed",
            tar(|tar| {
                tar.whiteout("", "d");
            }),
        ),
        (
            "directory opaque",
            tar(|tar| {
                tar.opaque("d").file("d/new", "");
            }),
        ),
    ];
    for (index, (what, upper)) in cases.into_iter().enumerate() {
        let reference = format!("toolkit/t:{index}");
        let tree = pack_on(&store, &reference, &upper, &["base/b:1"]).tree();
        for name in KINDS {
            let mut kept = if index < 3 {
                [format!("d/{name}-2"), format!("{name}-3")]
            } else {
                [name.to_owned(), format!("{name}-3")]
            };
            kept.sort();
            assert_eq!(tree.links(&kept[0]), kept, "{what}");
            assert_eq!(tree.get(&kept[0]).nlink, 2, "{what}");
        }
        assert_eq!(tree.get("file-3").content(), b"content");
        assert_eq!(tree.get("symlink-3").kind, FileType::Symlink);
        // Merged, it is the tree that it shows.
        let merged = try_merge(
            &store,
            &format!("base/m:{index}"),
            &["base/b:1", &reference],
        );
        assert_eq!(merged.unwrap().tree().get("block-3").nlink, 2, "{what}");
    }
    // What keeps all its names is left alone.
    let upper = tar(|tar| {
        tar.file("else", "");
    });
    let tree = pack_on(&store, "toolkit/none:1", &upper, &["base/b:1"]).tree();
    assert_eq!(tree.paths(), ["", "else"]);
}

#[test]
fn hard_links_name_files_below() {
    let store = memory_store();
    pack(&store, "base/b:1", linked());
    let upper = tar(|tar| {
        for name in KINDS {
            tar.hard_link(format!("new/{name}-4"), format!("d/{name}-2"));
        }
    });
    let packed = pack_on(&store, "toolkit/t:1", &upper, &["base/b:1"]);
    let tree = packed.tree();
    for name in KINDS {
        let names = tree.links(&format!("new/{name}-4"));
        assert_eq!(names.len(), 4, "{names:?}");
        assert_eq!(tree.get(name).nlink, 4);
    }
    assert_eq!(tree.get("new/file-4").content(), b"content");
    // Its metadata is all that was written.
    assert_eq!(packed.manifest.counts.bytes, 7);

    let refused = |upper: &TarWriter, below: &[&str]| {
        chain(
            &try_pack_on(&store, "toolkit/no:1", upper, below)
                .err()
                .unwrap(),
        )
    };
    let link = tar(|tar| {
        tar.hard_link("new", "file-3");
    });
    let removed = tar(|tar| {
        tar.whiteout("", "file-3");
    });
    pack_on(&store, "workspace/w:1", &removed, &["base/b:1"]);
    let message = refused(&link, &["base/b:1", "workspace/w:1"]);
    assert!(message.contains("file-3"), "{message}");
    let link = tar(|tar| {
        tar.hard_link("new", "d");
    });
    assert!(refused(&link, &["base/b:1"]).contains('d'));
}

#[test]
fn types_change_and_marks_hide_as_in_an_image() {
    let store = memory_store();
    let base = tar(|tar| {
        tar.dir("./", 0o755);
        for dir in ["becomes-file", "recreated", "opaque", "kept"] {
            tar.dir(dir, 0o750).file(format!("{dir}/old"), "1");
        }
        tar.file("becomes-dir", "1")
            .file("twice", "old")
            .symlink("link", "kept");
    });
    pack(&store, "base/b:1", base);
    let upper = tar(|tar| {
        tar.file("becomes-file", "2");
        tar.dir("becomes-dir", 0o700).file("becomes-dir/new", "2");
        tar.dir("recreated", 0o711)
            .file("recreated/new", "2")
            .whiteout("", "recreated");
        tar.file("opaque/new", "2").opaque("opaque");
        tar.file("twice", "new").whiteout("", "twice");
        tar.whiteout("", "never").whiteout("kept", "never");
        tar.dir("link", 0o700).file("link/new", "2");
    });
    pack_on(&store, "toolkit/t:1", &upper, &["base/b:1"]);
    let tree = try_merge(&store, "base/m:1", &["base/b:1", "toolkit/t:1"])
        .unwrap()
        .tree();
    assert_eq!(tree.get("becomes-file").content(), b"2");
    assert_eq!(tree.get("twice").content(), b"new");
    assert_eq!(
        tree.paths(),
        [
            "",
            "becomes-dir",
            "becomes-dir/new",
            "becomes-file",
            "kept",
            "kept/old",
            "link",
            "link/new",
            "opaque",
            "opaque/new",
            "recreated",
            "recreated/new",
            "twice",
        ]
    );
    assert_eq!(
        (tree.get("opaque").mode, tree.get("recreated").mode),
        (0o750, 0o711)
    );
    let root = tar(|tar| {
        tar.opaque("").file("alone", "");
    });
    pack_on(
        &store,
        "toolkit/root:1",
        &root,
        &["base/b:1", "toolkit/t:1"],
    );
    let stack = ["base/b:1", "toolkit/t:1", "toolkit/root:1"];
    let tree = try_merge(&store, "base/m:2", &stack).unwrap().tree();
    assert_eq!(tree.paths(), ["", "alone"]);
}

/// Packed on its chain or by itself, a layer of entries that all stand for themselves shows the
/// same; and however a chain is merged, with layers packed on it the same comes out.
#[test]
fn random_chains_merge_into_what_they_show() {
    for seed in 0..40 {
        let mut rng = Rng::new(7000 + seed);
        let store = memory_store();
        let names = ["base/l:0", "toolkit/l:1", "toolkit/l:2", "toolkit/l:3"];
        let alone = ["base/l:0", "toolkit/a:1", "toolkit/a:2", "toolkit/a:3"];
        for number in 0..names.len() {
            let tar = random_layer(&mut rng, number as u64, number > 0);
            pack_on(&store, names[number], &tar, &names[..number]);
            if number > 0 {
                pack(&store, alone[number], tar);
            }
        }
        let once = try_merge(&store, "base/m:once", &names).unwrap();
        let alone = try_merge(&store, "base/m:alone", &alone).unwrap();
        assert_eq!(
            once.manifest.layer_id(),
            alone.manifest.layer_id(),
            "seed {seed}"
        );
        try_merge(&store, "toolkit/m:12", &names[1..3]).unwrap();
        let parts = ["base/l:0", "toolkit/m:12", "toolkit/l:3"];
        let parts = try_merge(&store, "base/m:parts", &parts).unwrap();
        assert_eq!(
            once.manifest.layer_id(),
            parts.manifest.layer_id(),
            "seed {seed}"
        );
    }
}

/// Entries that only pass through their directories, whiteouts first.
pub fn passing_layer(rng: &mut Rng, number: u64) -> TarWriter {
    let mut tar = TarWriter::new();
    let mut files = TarWriter::new();
    for _ in 0..7 {
        let outer = *rng.pick(&["a", "b", "c"]).unwrap();
        match rng.below(7) {
            0 => tar.whiteout(outer, rng.pick(&["x", "y", "z"]).unwrap()),
            // umoci makes no directory for a mark in it, others do: so there always is one.
            1 => {
                files.file(format!("{outer}/back"), number.to_string());
                tar.whiteout("", outer)
            }
            2 => tar.opaque(outer),
            3 => files.file(
                format!("{outer}/z/leaf-{}", rng.below(3)),
                number.to_string(),
            ),
            4 => files.file(format!("{outer}/new-{number}/f"), number.to_string()),
            _ => files.file(
                format!("{outer}/{}", rng.pick(&["x", "y"]).unwrap()),
                number.to_string(),
            ),
        };
    }
    tar.raw(&files.into_unfinished());
    tar
}

/// A base for them, with directories that look like no others and files of several names.
pub fn base_to_pass() -> TarWriter {
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755);
    for (index, outer) in ["a", "b", "c"].into_iter().enumerate() {
        let index = u32::try_from(index).unwrap();
        let look = |name: String| {
            Header::new(kind::DIR, name)
                .mode(0o1701 + index)
                .owner(index + 1, 9)
        };
        tar.entry(&look(format!("{outer}/")), b"");
        tar.entry(&look(format!("{outer}/z/")), b"");
        tar.file(format!("{outer}/x"), outer);
        for other in ["y", "z/leaf-0", "z/leaf-1"] {
            tar.hard_link(format!("{outer}/{other}"), format!("{outer}/x"));
        }
        tar.hard_link(format!("from-{outer}"), format!("{outer}/x"));
    }
    tar
}

/// The same chain as an image: layer by layer and in one, it is what packing on parents makes.
#[test]
fn chains_and_images_are_the_same() {
    for seed in 0..30 {
        let mut rng = Rng::new(13_000 + seed);
        let mut layers = vec![base_to_pass()];
        layers.extend((1..4).map(|number| passing_layer(&mut rng, number)));
        let store = memory_store();
        let names = ["base/l:0", "toolkit/l:1", "toolkit/l:2", "toolkit/l:3"];
        for (number, tar) in layers.iter().enumerate() {
            pack_on(&store, names[number], tar, &names[..number]);
        }
        let chain = try_merge(&store, "base/m:chain", &names).unwrap();
        let scratch = ScratchDir::new("same").unwrap();
        let raw: Vec<Vec<u8>> = layers.into_iter().map(TarWriter::finish).collect();
        crate::image::Layout::new(scratch.path()).image("t", "amd64", &raw);
        let mut with = crate::image::options(&scratch, "");
        let silent = layerpack_packer::Silent;
        let whole = layerpack_packer::import(&store, &with, &silent).unwrap();
        let whole = store.manifest(&whole.layers[0].published.digest).unwrap();
        assert_eq!(chain.manifest.layer_id(), whole.layer_id(), "seed {seed}");
        with.reference = "base/each:1".parse().unwrap();
        with.per_layer = true;
        layerpack_packer::import(&store, &with, &silent).unwrap();
        let names = [
            "base/each:1",
            "diff/each:1-layer-2",
            "diff/each:1-layer-3",
            "diff/each:1",
        ];
        let each = try_merge(&store, "base/m:each", &names).unwrap();
        assert_eq!(
            chain.manifest.layer_id(),
            each.manifest.layer_id(),
            "seed {seed}"
        );
    }
}

#[test]
fn a_directory_and_its_archive_are_the_same_on_a_chain_too() {
    let store = memory_store();
    pack(&store, "base/b:1", linked());
    let scratch = ScratchDir::new("same").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    fs_err::create_dir_all(dir.join("d/e")).unwrap();
    fs_err::write(dir.join("d/file-2"), "replaced").unwrap();
    fs_err::write(dir.join("d/e/.wh.name"), "not a whiteout in a directory").unwrap();
    fs_err::remove_file(dir.join("d/e/.wh.name")).unwrap();
    let archive = scratch.join("archive");
    crate::same_digest::gnu_tar(&dir, &archive, &["--format=posix"]);
    let pack = |store: &LayerStore, source| {
        try_pack(store, &on(store, "toolkit/t:1", source, &["base/b:1"])).unwrap()
    };
    let from_dir = pack(&store, Source::Dir(dir));
    let other = memory_store();
    crate::merge::pack(&other, "base/b:1", linked());
    let from_tar = pack(&other, Source::Tar(archive));
    assert_eq!(from_dir.digest, from_tar.digest);
    assert_eq!(from_dir.tree().get("file").nlink, 2);
}

#[test]
fn chains_that_cannot_be_are_refused() {
    let store = memory_store();
    pack(&store, "base/b:1", linked());
    pack(&store, "base/c:1", linked());
    let one = tar(|tar| {
        tar.file("f", "1");
    });
    pack(&store, "workspace/w:1", one.clone());
    let refused = |reference: &str, below: &[&str]| {
        chain(&try_pack_on(&store, reference, &one, below).err().unwrap())
    };
    assert!(refused("base/x:1", &["base/b:1"]).contains("a base lies at the bottom"));
    let message = refused("toolkit/x:1", &["workspace/w:1", "base/b:1"]);
    assert!(message.contains("base/b:1"), "{message}");
    let message = refused("toolkit/x:1", &["base/b:1", "base/c:1"]);
    assert!(message.contains("base/c:1"), "{message}");
    assert!(store.resolve(&"toolkit/x:1".parse().unwrap()).is_err());
}
