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
fn a_link_whose_file_is_not_wanted_names_both() {
    let mut tar = TarWriter::new();
    tar.file("a/file", "1").hard_link("b/link", "a/file");
    let archive = crate::support::ArchiveFile::new(tar.finish());
    let wanted = Wanted {
        include: &["b"],
        ..Wanted::default()
    };
    let Err(error) = wanted.build(archive.source()) else {
        panic!("accepted")
    };
    let error = chain(&error);
    assert!(
        error.contains("b/link") && error.contains("a/file"),
        "{error}"
    );
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
