//! What of a source is packed and whose it becomes: the same for directories, archives, images.

use std::path::Path;

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::tar::{Header, TarWriter, kind};
use layerpack_fixtures::trees::{TreeMaker, acl_xattr, capability_xattr};
use layerpack_fixtures::{is_root, skip};
use layerpack_packer::{
    BuildOptions, IdMapRange, ImageSource, ImportOptions, Limits, Owners, PackError, Silent,
    Source, build, import,
};

use crate::image::Layout;
use crate::support::{Packed, Tree, chain, memory_store, options};

/// What is asked of all three.
#[derive(Default, Clone)]
struct Wanted<'a> {
    include: &'a [&'a str],
    exclude: &'a [&'a str],
    owners: Owners,
    limits: Limits,
    epoch: Option<i64>,
}

fn strings(list: &[&str]) -> Vec<String> {
    list.iter().map(|text| (*text).to_owned()).collect()
}

impl Wanted<'_> {
    fn build(&self, source: Source) -> Result<Packed, PackError> {
        let mut with: BuildOptions = options("base/t:1", source);
        with.includes = strings(self.include);
        with.excludes = strings(self.exclude);
        with.owners = self.owners.clone();
        with.limits = self.limits;
        with.source_date_epoch = self.epoch;
        let store = memory_store();
        let report = build(&store, &with, &Silent)?;
        Ok(Packed::load(
            &store,
            report.published.digest,
            report.warnings,
        ))
    }

    fn image(&self, scratch: &ScratchDir, layers: &[Vec<u8>]) -> Result<Packed, PackError> {
        let dir = scratch.join(format!("image-{}", layers.len()));
        if !dir.exists() {
            Layout::new(&dir).image("t", "amd64", layers);
        }
        let source = ImageSource::Oci { dir, tag: None };
        let mut with = ImportOptions::new("base/t:1".parse().unwrap(), source);
        with.includes = strings(self.include);
        with.excludes = strings(self.exclude);
        with.owners = self.owners.clone();
        with.limits = self.limits;
        with.source_date_epoch = self.epoch;
        let store = memory_store();
        let report = import(&store, &with, &Silent)?.layers.remove(0);
        Ok(Packed::load(
            &store,
            report.published.digest,
            report.warnings,
        ))
    }

    /// Packs a directory, an archive of it and an image of that, which must come to the same.
    #[track_caller]
    fn all(&self, scratch: &ScratchDir, dir: &Path) -> Packed {
        let tar = archive(scratch, dir);
        let from_dir = self.build(Source::Dir(dir.to_owned()));
        let from_dir = from_dir.unwrap_or_else(|error| panic!("{}", chain(&error)));
        let from_tar = self.build(Source::Tar(tar.clone()));
        let from_tar = from_tar.unwrap_or_else(|error| panic!("{}", chain(&error)));
        let from_image = self.image(scratch, &[fs_err::read(&tar).unwrap()]);
        let from_image = from_image.unwrap_or_else(|error| panic!("{}", chain(&error)));
        assert_eq!(from_dir.manifest.meta, from_tar.manifest.meta);
        assert_eq!(from_dir.manifest.meta, from_image.manifest.meta);
        from_dir
    }

    /// The three errors, each of which must have all of `parts`.
    #[track_caller]
    fn refused(&self, scratch: &ScratchDir, dir: &Path, parts: &[&str]) {
        let tar = archive(scratch, dir);
        let bytes = fs_err::read(&tar).unwrap();
        let results = [
            self.build(Source::Dir(dir.to_owned())),
            self.build(Source::Tar(tar)),
            self.image(scratch, &[bytes]),
        ];
        for (way, result) in ["dir", "tar", "image"].iter().zip(results) {
            let Err(error) = result else {
                panic!("{way}: accepted")
            };
            let error = chain(&error);
            for part in parts {
                assert!(error.contains(part), "{way}: {part} not in {error}");
            }
        }
    }
}

/// GNU tar's archive of a directory.
fn archive(scratch: &ScratchDir, dir: &Path) -> std::path::PathBuf {
    let path = scratch.join("archive.tar");
    let done = std::process::Command::new("tar")
        .args([
            "--format=pax",
            "--xattrs",
            "--xattrs-include=*",
            "--numeric-owner",
        ])
        .args(["--sort=name", "-cf"])
        .arg(&path)
        .arg("-C")
        .arg(dir)
        .arg(".")
        .status()
        .unwrap();
    assert!(done.success());
    path
}

fn tree(scratch: &ScratchDir) -> std::path::PathBuf {
    let dir = scratch.mkdir("tree").unwrap();
    let mut tree = TreeMaker::new(&dir);
    for path in [
        "usr",
        "usr/bin",
        "usr/lib",
        "usr/lib/py",
        "etc",
        "empty",
        "var",
        "var/empty",
    ] {
        tree.dir(path, 0o711).unwrap();
    }
    for path in [
        "usr/bin/sh",
        "usr/lib/py/a.py",
        "usr/lib/py/a.pyc",
        "usr/lib/x.so",
        "etc/passwd",
        "top",
    ] {
        tree.file(path, path).unwrap();
    }
    tree.symlink("usr/lib/py/link", "a.py").unwrap();
    tree.hard_link("usr/lib/py/hard", "usr/lib/py/a.py")
        .unwrap();
    tree.finish().unwrap();
    dir
}

fn paths(tree: &Tree) -> Vec<String> {
    let mut paths = tree.paths();
    paths.retain(|path| !path.is_empty());
    paths
}

#[test]
fn includes_take_what_matches_and_the_way_there() {
    let scratch = ScratchDir::new("include").unwrap();
    let dir = tree(&scratch);
    let cases: [(&[&str], &[&str], &[&str]); 7] = [
        (&["usr/bin"], &[], &["usr", "usr/bin", "usr/bin/sh"]),
        (
            &["*.py"],
            &[],
            &["usr", "usr/lib", "usr/lib/py", "usr/lib/py/a.py"],
        ),
        // Directories that match stay though they are empty, others do not.
        (&["empty/"], &[], &["empty", "var", "var/empty"]),
        (&["/empty"], &[], &["empty"]),
        // Excludes win, wherever they stand.
        (
            &["usr/lib"],
            &["*.pyc", "hard"],
            &[
                "usr",
                "usr/lib",
                "usr/lib/py",
                "usr/lib/py/a.py",
                "usr/lib/py/link",
                "usr/lib/x.so",
            ],
        ),
        (&["usr/lib/py"], &["usr/lib"], &[]),
        (&["nothing"], &[], &[]),
    ];
    for (include, exclude, expected) in cases {
        let wanted = Wanted {
            include,
            exclude,
            ..Wanted::default()
        };
        let tree = wanted.all(&scratch, &dir).tree();
        assert_eq!(paths(&tree), expected, "{include:?} {exclude:?}");
        if let Some(usr) = expected.first().filter(|path| **path == "usr") {
            assert_eq!(tree.get(usr).mode, 0o711, "the way keeps its metadata");
            assert!(!tree.is_implicit(usr));
        }
    }
    let bad = Wanted {
        include: &["[a"],
        ..Wanted::default()
    };
    bad.refused(&scratch, &dir, &["include", "[a"]);
}

#[test]
fn a_link_to_what_was_left_out_of_a_layer_below_names_both() {
    let scratch = ScratchDir::new("left-out-below").unwrap();
    let (mut below, mut above) = (TarWriter::new(), TarWriter::new());
    below.file("a/file", "1").file("b/file", "2");
    above.hard_link("b/link", "a/file");
    let wanted = Wanted {
        include: &["b"],
        ..Wanted::default()
    };
    let Err(error) = wanted.image(&scratch, &[below.finish(), above.finish()]) else {
        panic!("accepted")
    };
    let error = chain(&error);
    for part in ["b/link", "a/file", "left out of a layer below"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn whiteouts_are_wanted_if_what_they_hide_is() {
    let scratch = ScratchDir::new("include-whiteout").unwrap();
    let mut lower = TarWriter::new();
    lower
        .dir("a", 0o755)
        .file("a/x", "1")
        .file("a/y", "2")
        .file("b/x", "3");
    let mut upper = TarWriter::new();
    upper
        .whiteout("a", "x")
        .whiteout("b", "x")
        .opaque("c")
        .file("c/z", "4");
    let layers = [lower.finish(), upper.finish()];
    let wanted = Wanted {
        include: &["a", "c/z"],
        ..Wanted::default()
    };
    let tree = wanted.image(&scratch, &layers).unwrap().tree();
    assert_eq!(paths(&tree), ["a", "a/y", "c", "c/z"]);

    // In a layer by itself: a whiteout that is not wanted makes no directory either.
    let archive = crate::support::ArchiveFile::new(layers[1].clone());
    let mut with = options("toolkit/t:1", archive.source());
    with.includes = strings(&["a"]);
    let packed = crate::support::try_pack(&memory_store(), &with).unwrap();
    let tree = packed.tree();
    assert_eq!(paths(&tree), ["a", "a/x"]);
    assert!(tree.is_whiteout("a/x"));
}

fn map(text: &str) -> Vec<IdMapRange> {
    text.split_whitespace()
        .map(|range| range.parse().unwrap())
        .collect()
}

#[test]
fn owners_are_mapped_from_outside_to_inside() {
    let mut tar = TarWriter::new();
    for (name, uid, gid) in [
        ("root", 100_000, 200_000),
        ("user", 101_000, 200_007),
        ("edge", 165_535, 265_535),
    ] {
        tar.entry(&Header::new(kind::FILE, name).owner(uid, gid), b"");
    }
    let bytes = tar.finish();
    let wanted = Wanted {
        owners: Owners {
            uid_map: map("0:100000:65536"),
            gid_map: map("0:200000:1 1007:200007:1 65535:265535:1"),
            all_root: false,
        },
        ..Wanted::default()
    };
    let scratch = ScratchDir::new("map").unwrap();
    let archive = crate::support::ArchiveFile::new(&bytes);
    for packed in [
        wanted.build(archive.source()).unwrap(),
        wanted
            .image(&scratch, std::slice::from_ref(&bytes))
            .unwrap(),
    ] {
        let tree = packed.tree();
        let owner = |path: &str| (tree.get(path).uid, tree.get(path).gid);
        assert_eq!(owner("root"), (0, 0));
        assert_eq!(owner("user"), (1000, 1007));
        assert_eq!(owner("edge"), (65535, 65535));
    }
    let narrow = Wanted {
        owners: Owners {
            uid_map: map("0:100000:10"),
            ..Owners::default()
        },
        ..Wanted::default()
    };
    let Err(error) = narrow.build(archive.source()) else {
        panic!("accepted")
    };
    let error = chain(&error);
    assert!(
        error.contains("user") && error.contains("101000"),
        "{error}"
    );
}

#[test]
fn maps_reach_acls_and_capabilities_and_root_takes_all() {
    if !is_root() {
        skip!("needs root to make files of others");
    }
    let scratch = ScratchDir::new("map-attributes").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    let mut tree = TreeMaker::new(&dir);
    tree.file("acl", "1")
        .unwrap()
        .owner("acl", 100_005, 100_006)
        .unwrap();
    let acl = |user: u32, group: u32| acl_xattr(6, &[(user, 4)], 4, &[(group, 2)], 0);
    tree.xattr("acl", "system.posix_acl_access", acl(100_007, 100_008))
        .unwrap();
    // Revision 3 with the namespace's root user at the end.
    let mut capability = capability_xattr(1 << 10, 0, true);
    capability[3] = 3;
    capability.extend_from_slice(&100_000u32.to_le_bytes());
    tree.file("cap", "2")
        .unwrap()
        .owner("cap", 100_000, 100_000)
        .unwrap();
    tree.xattr("cap", "security.capability", &capability)
        .unwrap();
    tree.owner("", 100_000, 100_000).unwrap();
    tree.finish().unwrap();

    let mapped = Wanted {
        owners: Owners {
            uid_map: map("0:100000:65536"),
            gid_map: map("0:100000:65536"),
            all_root: false,
        },
        ..Wanted::default()
    };
    let own = mapped.build(Source::Dir(dir.clone())).unwrap().tree();
    let value =
        |tree: &Tree, path: &str, name: &str| tree.get(path).xattrs.get(name.as_bytes()).cloned();
    assert_eq!((own.get("acl").uid, own.get("acl").gid), (5, 6));
    assert_eq!(
        value(&own, "acl", "system.posix_acl_access"),
        Some(acl(7, 8))
    );
    let plain = Some(capability_xattr(1 << 10, 0, true));
    assert_eq!(value(&own, "cap", "security.capability"), plain);

    let rooted = Wanted {
        owners: Owners {
            all_root: true,
            ..Owners::default()
        },
        ..Wanted::default()
    };
    let packed = rooted.build(Source::Dir(dir)).unwrap();
    let own = packed.tree();
    assert!(
        own.nodes
            .values()
            .all(|node| (node.uid, node.gid) == (0, 0))
    );
    assert_eq!(value(&own, "acl", "system.posix_acl_access"), None);
    assert_eq!(value(&own, "cap", "security.capability"), plain);
    assert!(
        packed
            .warnings
            .iter()
            .any(|line| line.contains("ACL of acl")),
        "{:?}",
        packed.warnings
    );
}

#[test]
fn all_root_and_the_epoch_are_the_same_for_every_source() {
    let scratch = ScratchDir::new("rooted").unwrap();
    let dir = tree(&scratch);
    let wanted = Wanted {
        owners: Owners {
            all_root: true,
            ..Owners::default()
        },
        epoch: Some(1_000),
        ..Wanted::default()
    };
    let tree = wanted.all(&scratch, &dir).tree();
    assert!(
        tree.nodes
            .values()
            .all(|node| (node.uid, node.gid) == (0, 0) && node.mtime <= (1_000, 0))
    );
}

#[test]
fn every_limit_holds_for_every_source() {
    let scratch = ScratchDir::new("limits").unwrap();
    let dir = scratch.mkdir("tree/a/b/c/d/e/f/g/h").unwrap();
    fs_err::write(dir.join("file"), vec![b'x'; 100_000]).unwrap();
    let dir = scratch.join("tree");
    let limited = |limits: Limits| Wanted {
        limits,
        ..Wanted::default()
    };
    let all = Limits::default();
    limited(all).all(&scratch, &dir);
    for (limits, parts) in [
        (
            Limits {
                max_entries: 5,
                ..all
            },
            ["--max-entries", "5"],
        ),
        (
            Limits {
                max_bytes: 50_000,
                ..all
            },
            ["--max-bytes", "50000"],
        ),
        (
            Limits {
                max_path: 10,
                ..all
            },
            ["--max-path", "10"],
        ),
        (
            Limits {
                max_depth: 4,
                ..all
            },
            ["--max-depth", "4"],
        ),
    ] {
        limited(limits).refused(&scratch, &dir, &parts);
    }
    let set = |path: &Path, value: &[u8]| {
        rustix::fs::setxattr(path, "user.big", value, rustix::fs::XattrFlags::empty())
    };
    if set(&dir.join("a"), &[7; 300]).is_err() {
        skip!("the filesystem of the scratch directory has no attributes");
    }
    // The image's layout was made without the attribute.
    fs_err::remove_dir_all(scratch.join("image-1")).unwrap();
    limited(Limits {
        max_xattr_value: 300,
        ..all
    })
    .all(&scratch, &dir);
    limited(Limits {
        max_xattr_value: 299,
        ..all
    })
    .refused(&scratch, &dir, &["user.big", "299"]);
}

/// What who knows nothing of holes would get is bounded too.
#[test]
fn holes_count_where_apparent_bytes_are_bounded() {
    let scratch = ScratchDir::new("apparent").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    let sparse = fs_err::File::create(dir.join("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    fs_err::write(dir.join("dense"), b"1234").unwrap();
    let archive = scratch.join("sparse.tar");
    let made = std::process::Command::new("tar")
        .args(["--sparse", "-cf"])
        .arg(&archive)
        .arg("-C")
        .arg(&dir)
        .arg(".")
        .status();
    assert!(made.unwrap().success());
    for source in [
        layerpack_packer::Source::Dir(dir.clone()),
        layerpack_packer::Source::Tar(archive.clone()),
    ] {
        let mut options = crate::support::options("base/x:1", source);
        options.limits.max_apparent = (1 << 40) + 4;
        crate::support::try_pack(&crate::support::memory_store(), &options).unwrap();
        options.limits.max_apparent -= 1;
        let error = crate::support::try_pack(&crate::support::memory_store(), &options);
        let error = error.err().unwrap().to_string();
        assert!(
            error.contains("holes included") && error.contains("--max-bytes"),
            "{error}"
        );
    }
}

#[test]
fn including_what_is_not_there_is_told() {
    let scratch = ScratchDir::new("include-nothing").unwrap();
    let dir = scratch.mkdir("tree/etc").unwrap();
    fs_err::write(dir.join("passwd"), b"1").unwrap();
    for (include, warns) in [("nothing", true), ("etc/passwd", false)] {
        let source = layerpack_packer::Source::Dir(scratch.join("tree"));
        let mut options = crate::support::options("base/x:1", source);
        options.includes = vec![include.to_owned()];
        let packed = crate::support::try_pack(&crate::support::memory_store(), &options).unwrap();
        let told = packed
            .warnings
            .iter()
            .any(|line| line.contains("--include"));
        assert_eq!(told, warns, "{:?}", packed.warnings);
    }
}

/// What is left out may be the name of a file that the archive has the contents under.
#[test]
fn files_whose_first_names_are_left_out_are_packed_under_the_others() {
    let scratch = ScratchDir::new("other-names").unwrap();
    let dir = scratch.mkdir("tree/d").unwrap();
    let large: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    for (name, bytes) in [("a", &b"small"[..]), ("b", &large)] {
        fs_err::write(dir.join(name), bytes).unwrap();
        for other in ["x", "y"] {
            fs_err::hard_link(dir.join(name), dir.join(format!("{name}-{other}"))).unwrap();
        }
    }
    std::os::unix::fs::symlink("a", dir.join("l")).unwrap();
    fs_err::hard_link(dir.join("l"), dir.join("l-x")).unwrap();
    let dir = scratch.join("tree");
    for (exclude, names) in [
        (&["a", "b", "l"][..], vec!["d/a-x", "d/a-y"]),
        (&["a", "a-x", "b"], vec!["d/a-y"]),
        (&["b-*"], vec!["d/a", "d/a-x", "d/a-y"]),
    ] {
        let wanted = Wanted {
            exclude,
            ..Wanted::default()
        };
        let packed = wanted.all(&scratch, &dir);
        let tree = packed.tree();
        assert_eq!(tree.links(names[0]), names, "{exclude:?}");
        let node = tree.get(names[0]);
        assert_eq!(node.content(), b"small");
        assert_eq!(node.nlink as usize, names.len());
        if exclude.contains(&"b") {
            assert!(tree.get("d/b-x").content() == large);
            assert!(!tree.has("d/b") && tree.get("d/b-x").nlink == 2);
        }
        assert_eq!(tree.get("d/l-x").target, b"a");
    }
    // Only what is asked for, by one name of each.
    let wanted = Wanted {
        include: &["d/a-y", "d/l-x"],
        ..Wanted::default()
    };
    let tree = wanted.all(&scratch, &dir).tree();
    assert_eq!(tree.paths(), ["", "d", "d/a-y", "d/l-x"]);
    assert_eq!(tree.get("d/a-y").content(), b"small");
}

#[test]
fn of_names_that_are_left_out_the_last_entry_counts() {
    let scratch = ScratchDir::new("left-out").unwrap();
    let mut tar = TarWriter::new();
    tar.file("a", "first").file("a", "second");
    tar.hard_link("a2", "a").hard_link("k", "a2");
    // In between `a2`, which is left out too, is another file.
    tar.file("a2", "third").hard_link("k3", "./a2");
    // What is replaced afterwards is not read again for nothing.
    tar.file("b", "old").hard_link("kb", "b").file("kb", "new");
    // A device that overlayfs would take for its own.
    tar.entry(&Header::new(kind::CHAR, "c").device(0, 0), b"");
    tar.hard_link("kc", "c");
    let bytes = tar.finish();
    let wanted = Wanted {
        exclude: &["a*", "b", "c"],
        ..Wanted::default()
    };
    let file = scratch.write("odd.tar", &bytes).unwrap();
    for packed in [
        wanted.build(Source::Tar(file)),
        wanted.image(&scratch, std::slice::from_ref(&bytes)),
    ] {
        let packed = packed.unwrap_or_else(|error| panic!("{}", chain(&error)));
        let tree = packed.tree();
        assert_eq!(tree.paths(), ["", "k", "k3", "kb"]);
        for (name, content) in [("k", "second"), ("k3", "third"), ("kb", "new")] {
            assert_eq!(tree.get(name).content(), content.as_bytes(), "{name}");
        }
        let warnings = packed.warnings.join("\n");
        assert!(
            warnings.contains("dropped c: a character device"),
            "{warnings}"
        );
    }
    // What can be read but once.
    let pipe = scratch.join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let to = pipe.clone();
    let writer = std::thread::spawn(move || {
        // Whoever reads may stop before the end.
        let _ = fs_err::write(to, bytes);
    });
    let Err(error) = wanted.build(Source::Tar(pipe)) else {
        panic!("accepted")
    };
    let error = chain(&error);
    assert!(
        error.contains("k: it is a hard link to a2") && error.contains("twice"),
        "{error}"
    );
    writer.join().unwrap();
}

/// A link on the way need not be wanted itself.
#[test]
fn includes_see_where_entries_land_behind_links_that_are_not_wanted() {
    let scratch = ScratchDir::new("behind-links").unwrap();
    let mut below = TarWriter::new();
    below.dir("usr/lib", 0o711).symlink("lib", "usr/lib");
    below.symlink("gone", "usr").symlink("usr/opt", "/srv");
    let mut above = TarWriter::new();
    above.file("lib/x", "1").hard_link("lib/y", "lib/x");
    above.whiteout("", "gone").file("gone/z", "2");
    above.file("usr/opt/f", "3").file("lib/other", "4");
    let (below, above) = (below.into_unfinished(), above.finish());
    let one = [below.clone(), above.clone()].concat();
    let file = scratch.write("links.tar", &one).unwrap();
    let wanted = Wanted {
        include: &["usr/lib/[xy]", "gone/z", "usr/z", "srv/f"],
        ..Wanted::default()
    };
    let two = [[below, vec![0; 1024]].concat(), above];
    for (packed, z) in [
        // A mark hides nothing of its own layer.
        (wanted.build(Source::Tar(file)), "usr/z"),
        (wanted.image(&scratch, &two), "gone/z"),
    ] {
        let packed = packed.unwrap_or_else(|error| panic!("{}", chain(&error)));
        let tree = packed.tree();
        let mut paths = vec![
            "",
            "srv",
            "srv/f",
            "usr",
            "usr/lib",
            "usr/lib/x",
            "usr/lib/y",
            z,
        ];
        if z.starts_with("gone") {
            paths.push("gone");
        }
        paths.sort_unstable();
        assert_eq!(tree.paths(), paths);
        assert_eq!(tree.get(z).content(), b"2");
        assert_eq!(tree.links("usr/lib/x"), ["usr/lib/x", "usr/lib/y"]);
        if z == "usr/z" {
            // In an image nothing of the layer that defines it is wanted.
            assert_eq!(tree.get("usr/lib").mode, 0o711);
        }
    }
}

#[test]
fn stars_of_attributes_stand_at_the_end() {
    let scratch = ScratchDir::new("stars").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    for name in ["us*r", "*.x", "a**", ""] {
        let mut with = options("base/t:1", Source::Dir(dir.clone()));
        with.xattrs.push(name.to_owned());
        let error = build(&memory_store(), &with, &Silent).err().unwrap();
        let invalid = matches!(error, PackError::InvalidOption { .. });
        assert!(invalid, "{name}: {error}");
    }
    let mut with = options("base/t:1", Source::Dir(dir));
    with.xattrs.push("*".to_owned());
    build(&memory_store(), &with, &Silent).unwrap();
}
