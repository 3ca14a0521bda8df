//! What entries mean together: OCI whiteouts, opaque marks, implicit directories, links, repeats.

use layerpack_erofs::FileType;
use layerpack_fixtures::tar::{Header, TarWriter, kind};
use layerpack_packer::PackError;

use crate::support::{ArchiveFile, base, memory_store, options, refused, try_pack, try_tar, upper};

#[test]
fn implied_directories_are_implicit_and_defined_ones_are_not() {
    let mut tar = TarWriter::new();
    tar.file("a/b/c", "1");
    tar.dir("x/", 0o700);
    tar.file("x/y/z", "2");
    // Defined after it was implied.
    tar.file("late/f", "3");
    tar.dir("late", 0o711);
    let tree = upper(tar.finish()).tree();
    assert_eq!(tree.implicit, [&b""[..], b"a", b"a/b", b"x/y"]);
    assert_eq!((tree.get("x").mode, tree.get("late").mode), (0o700, 0o711));
    assert_eq!(
        (
            tree.get("a/b").mode,
            tree.get("a/b").uid,
            tree.get("a/b").mtime
        ),
        (0o755, 0, (0, 0))
    );
}

#[test]
fn the_root_is_the_bases_own_and_nobody_elses() {
    let mut tar = TarWriter::new();
    tar.entry(
        &Header::new(kind::DIR, "./")
            .mode(0o1711)
            .owner(5, 6)
            .mtime(99),
        b"",
    );
    let bytes = tar.finish();
    let tree = base(&bytes).tree();
    assert_eq!(
        (tree.get("").mode, tree.get("").uid, tree.get("").mtime),
        (0o1711, 5, (99, 0))
    );
    assert!(tree.implicit.is_empty());
    let tree = upper(&bytes).tree();
    assert_eq!(
        (tree.get("").mode, tree.get("").uid, tree.get("").mtime),
        (0o755, 0, (0, 0))
    );
    assert!(tree.is_implicit(""));
}

#[test]
fn a_source_below_a_prefix() {
    let mut tar = TarWriter::new();
    tar.entry(
        &Header::new(kind::DIR, "./").mode(0o750).owner(1000, 1000),
        b"",
    );
    tar.file("./f", "1");
    tar.symlink("abs", "/dir");
    tar.file("abs/below", "2");
    let file = ArchiveFile::new(tar.finish());
    let mut with = options("workspace/w:1", file.source());
    with.at = Some(b"/srv/work/".to_vec());
    let tree = try_pack(&memory_store(), &with).unwrap().tree();
    assert_eq!(
        tree.implicit,
        [&b""[..], b"srv", b"srv/work", b"srv/work/dir"]
    );
    // What one sees where the layers below have no such directory.
    assert_eq!(
        (tree.get("srv/work").mode, tree.get("srv/work").uid),
        (0o750, 1000)
    );
    assert_eq!(tree.get("srv/work/f").content(), b"1");
    // A link of the source leads within the source.
    assert_eq!(tree.get("srv/work/dir/below").content(), b"2");
    let long = format!("a/{}/b", "n".repeat(256));
    let deep = "a/".repeat(40_000);
    for bad in ["../x", "a/../../b", "a\0b", long.as_str(), &deep] {
        let mut with = options("workspace/w:1", file.source());
        with.at = Some(bad.as_bytes().to_vec());
        let error = try_pack(&memory_store(), &with).err().unwrap();
        assert!(matches!(error, PackError::InvalidOption { .. }), "{error}");
        assert!(error.to_string().contains("at "));
    }
}

#[test]
fn whiteouts_hide_what_is_below_and_only_that() {
    let mut tar = TarWriter::new();
    tar.whiteout("", "gone");
    tar.whiteout("dir/sub", "gone");
    // In either order, a file of the same layer stays.
    tar.file("before", "1");
    tar.whiteout("", "before");
    tar.whiteout("", "after");
    tar.file("after", "2");
    tar.whiteout("", "gone"); // twice
    let tree = upper(tar.finish()).tree();
    assert!(tree.is_whiteout("gone") && tree.is_whiteout("dir/sub/gone"));
    assert!(tree.is_implicit("dir") && tree.is_implicit("dir/sub"));
    assert_eq!(
        (tree.get("before").content(), tree.get("after").content()),
        (b"1".to_vec(), b"2".to_vec())
    );
    let whiteout = tree.get("gone");
    assert_eq!(
        (
            whiteout.uid,
            whiteout.mode,
            whiteout.xattrs.len(),
            whiteout.mtime
        ),
        (0, 0, 0, (0, 0))
    );
    assert!(!tree.paths().iter().any(|path| path.contains(".wh.")));
}

/// As `umoci repack` writes a file in a directory's place.
#[test]
fn a_whiteout_behind_a_file_has_nothing_to_hide() {
    for file_first in [true, false] {
        let mut tar = TarWriter::new();
        if file_first {
            tar.file("d", "now a file");
        }
        tar.whiteout("d", "y");
        tar.whiteout("d/deeper", "z");
        tar.whiteout("d", ".wh..opq");
        if !file_first {
            tar.file("d", "now a file");
        }
        let tree = upper(tar.finish()).tree();
        assert_eq!(tree.get("d").content(), b"now a file");
        assert_eq!(
            tree.paths().iter().filter(|path| !path.is_empty()).count(),
            1
        );
    }
}

#[test]
fn a_directory_in_place_of_a_removed_one_is_opaque() {
    for order in 0..3 {
        let mut tar = TarWriter::new();
        match order {
            0 => {
                tar.whiteout("", "d");
                tar.dir("d/", 0o700);
                tar.file("d/new", "1");
            }
            1 => {
                tar.dir("d/", 0o700);
                tar.file("d/new", "1");
                tar.whiteout("", "d");
            }
            _ => {
                // Only implied: then it is new all the same, and inherits nothing.
                tar.whiteout("", "d");
                tar.file("d/new", "1");
            }
        }
        let tree = upper(tar.finish()).tree();
        assert!(tree.is_opaque("d"), "{order}");
        assert!(!tree.is_implicit("d"), "{order}");
        assert_eq!(tree.get("d").mode, if order == 2 { 0o755 } else { 0o700 });
        assert_eq!(tree.get("d/new").content(), b"1");
    }
}

#[test]
fn opaque_marks_wherever_they_stand() {
    let mut tar = TarWriter::new();
    tar.file("a/first", "1");
    tar.opaque("a");
    tar.opaque("b");
    tar.dir("b/", 0o700);
    tar.file("b/sub/deep", "2");
    tar.opaque("");
    let tree = upper(tar.finish()).tree();
    assert!(tree.is_opaque("a") && tree.is_opaque("b") && tree.is_opaque(""));
    assert_eq!(tree.get("a/first").content(), b"1");
    // Below an opaque directory nothing can be inherited.
    assert_eq!(tree.implicit, [b""]);

    let mut tar = TarWriter::new();
    tar.file("a/b/c", "1");
    tar.opaque("a");
    let tree = upper(tar.finish()).tree();
    // The marked directory itself still is what the layers below say.
    assert!(tree.is_implicit("a") && tree.is_implicit("") && !tree.is_implicit("a/b"));
}

#[test]
fn nothing_lies_below_a_base() {
    let mut tar = TarWriter::new();
    tar.file("f", "1");
    tar.whiteout("", "f");
    tar.whiteout("", "never-there");
    tar.opaque("d");
    tar.file("g", "2");
    tar.dir("g/", 0o755);
    let packed = base(tar.finish());
    let tree = packed.tree();
    assert_eq!(tree.paths(), ["", "d", "f", "g"]);
    assert!(tree.get("d").xattrs.is_empty() && tree.get("g").xattrs.is_empty());
    assert!(
        packed
            .warnings
            .iter()
            .any(|line| line.contains("whiteouts")),
        "{:?}",
        packed.warnings
    );
}

#[test]
fn whiteouts_of_impossible_names_are_refused_and_aufs_left_out() {
    for name in ["", ".", ".."] {
        let mut tar = TarWriter::new();
        tar.whiteout("d", name);
        let message = try_tar("toolkit/a:1", tar.finish())
            .err()
            .unwrap()
            .to_string();
        assert!(message.contains(".wh."), "{message}");
    }
    let mut tar = TarWriter::new();
    tar.file(".wh..wh.aufs", "");
    tar.dir(".wh..wh.plnk/", 0o700);
    tar.file("f", "");
    let packed = upper(tar.finish());
    assert_eq!(packed.tree().paths(), ["", "f"]);
    assert_eq!(packed.warnings.len(), 2);
}

#[test]
fn the_overlays_own_device_is_not_taken_from_outside() {
    let mut tar = TarWriter::new();
    tar.file("etc/passwd", "1");
    tar.entry(&Header::new(kind::CHAR, "etc/shadow").device(0, 0), b"");
    tar.entry(&Header::new(kind::CHAR, "etc/passwd").device(0, 0), b"");
    tar.entry(&Header::new(kind::BLOCK, "etc/block").device(0, 0), b"");
    let packed = upper(tar.finish());
    assert_eq!(packed.tree().paths(), ["", "etc", "etc/block"]);
    assert_eq!(packed.warnings.len(), 2);
}

#[test]
fn later_entries_win() {
    let mut tar = TarWriter::new();
    tar.file("f", "first");
    tar.hard_link("old", "f");
    tar.entry(&Header::new(kind::FILE, "./f").mode(0o600), b"second");
    tar.dir("d/", 0o700);
    tar.file("d/kept", "1");
    tar.dir("d/", 0o711);
    tar.dir("becomes-file/", 0o755);
    tar.file("becomes-file/lost", "1");
    tar.file("becomes-file", "2");
    tar.file("becomes-dir", "1");
    tar.dir("becomes-dir/", 0o755);
    tar.symlink("link", "one");
    tar.symlink("link", "two");
    let bytes = tar.finish();
    let tree = upper(&bytes).tree();
    assert_eq!(
        (tree.get("f").content(), tree.get("f").mode),
        (b"second".to_vec(), 0o600)
    );
    assert_eq!(
        (tree.get("old").content(), tree.get("old").nlink),
        (b"first".to_vec(), 1)
    );
    assert_eq!(
        (tree.get("d").mode, tree.get("d/kept").content()),
        (0o711, b"1".to_vec())
    );
    assert_eq!(tree.get("becomes-file").content(), b"2");
    assert!(!tree.has("becomes-file/lost"));
    // The file hid a directory of the layers below; what replaced it must too.
    assert!(tree.is_opaque("becomes-dir") && !tree.is_opaque("d"));
    assert_eq!(tree.get("link").target, b"two");
    assert!(!base(&bytes).tree().is_opaque("becomes-dir"));
}

#[test]
fn hard_links_of_every_type() {
    let mut tar = TarWriter::new();
    tar.entry(&Header::new(kind::FILE, "file").mode(0o640), b"data");
    tar.symlink("symlink", "file");
    tar.entry(&Header::new(kind::FIFO, "fifo"), b"");
    tar.entry(&Header::new(kind::CHAR, "device").device(1, 3), b"");
    for name in ["file", "symlink", "fifo", "device"] {
        tar.hard_link(format!("d/{name}-2"), name);
        tar.hard_link(format!("./{name}-3"), format!("/d/../d/{name}-2"));
        tar.hard_link(name, format!("{name}-3")); // itself
    }
    tar.whiteout("", "file-4");
    let tree = upper(tar.finish()).tree();
    for name in ["file", "symlink", "fifo", "device"] {
        assert_eq!(
            tree.links(name),
            [format!("d/{name}-2"), name.to_owned(), format!("{name}-3")]
        );
        assert_eq!(tree.get(name).nlink, 3);
    }
    assert_eq!(tree.get("symlink-3").kind, FileType::Symlink);
    assert_eq!(tree.get("d/file-2").content(), b"data");
}

#[test]
fn hard_links_to_nothing_are_refused_by_name() {
    let mut tar = TarWriter::new();
    tar.hard_link("link", "lower/target");
    let message = refused(tar.finish());
    assert!(
        message.contains("link") && message.contains("lower/target"),
        "{message}"
    );
    let mut tar = TarWriter::new();
    tar.dir("d/", 0o755);
    tar.hard_link("link", "d");
    assert!(refused(tar.finish()).contains("directory"));
    // What a link replaces cannot be its target.
    let mut tar = TarWriter::new();
    tar.file("d/f", "1");
    tar.hard_link("d", "d/f");
    assert!(refused(tar.finish()).contains('d'));
}

#[test]
fn names_stay_within_the_root() {
    let mut tar = TarWriter::new();
    tar.file("/absolute", "1");
    tar.file("../../escape", "2");
    tar.file("a/../../b", "3");
    tar.symlink("up", "../../..");
    tar.file("up/through-link", "4");
    tar.symlink("root", "/");
    tar.file("root/etc/x", "5");
    tar.symlink("outside", "/etc/passwd");
    tar.symlink("dangling", "not/there");
    tar.file("dangling/file", "6");
    let packed = base(tar.finish());
    let tree = packed.tree();
    for (path, content) in [
        ("absolute", "1"),
        ("escape", "2"),
        ("b", "3"),
        ("through-link", "4"),
        ("etc/x", "5"),
        ("not/there/file", "6"),
    ] {
        assert_eq!(tree.get(path).content(), content.as_bytes(), "{path}");
    }
    assert_eq!(tree.get("outside").target, b"/etc/passwd");
    assert_eq!(tree.get("up").target, b"../../..");
    assert_eq!(packed.warnings.len(), 2, "{:?}", packed.warnings);
}

#[test]
fn symbolic_links_on_the_way_are_followed_and_last_ones_replaced() {
    let mut tar = TarWriter::new();
    tar.dir("usr/lib/", 0o755);
    tar.symlink("lib", "usr/lib");
    tar.file("lib/libc.so", "1");
    tar.hard_link("copy", "lib/libc.so");
    tar.symlink("file", "usr");
    tar.file("file", "not a link any more");
    tar.dir("lib64/", 0o755);
    let tree = base(tar.finish()).tree();
    assert_eq!(tree.get("usr/lib/libc.so").content(), b"1");
    assert_eq!(tree.links("copy"), ["copy", "usr/lib/libc.so"]);
    assert_eq!(tree.get("file").content(), b"not a link any more");
    assert!(!tree.has("lib/libc.so"));
    // A directory entry on a symbolic link replaces it, as container runtimes do.
    let mut tar = TarWriter::new();
    tar.symlink("a", "b");
    tar.symlink("b", "a");
    tar.file("a/x", "");
    let message = refused(tar.finish());
    assert!(message.contains("loop"), "{message}");
    let mut tar = TarWriter::new();
    tar.file("f", "");
    tar.file("f/x", "");
    assert!(refused(tar.finish()).contains("not a directory"));
}

#[test]
fn excludes_and_times() {
    let mut tar = TarWriter::new();
    tar.entry(&Header::new(kind::FILE, "keep").mtime(50), b"1");
    tar.entry(&Header::new(kind::FILE, "new").mtime(200), b"1");
    tar.file("cache/x", "2");
    tar.file("a/b.pyc", "3");
    tar.dir("a/only-dir/", 0o755);
    let file = ArchiveFile::new(tar.finish());
    let mut with = options("base/a:1", file.source());
    with.excludes = vec![
        "/cache".to_owned(),
        "*.pyc".to_owned(),
        "only-dir/".to_owned(),
    ];
    with.source_date_epoch = Some(100);
    let tree = try_pack(&memory_store(), &with).unwrap().tree();
    assert_eq!(tree.paths(), ["", "keep", "new"]);
    assert_eq!(
        (tree.get("keep").mtime, tree.get("new").mtime),
        ((50, 0), (100, 0))
    );
    with.excludes = vec!["[".to_owned()];
    assert!(
        try_pack(&memory_store(), &with)
            .err()
            .unwrap()
            .to_string()
            .contains("exclude")
    );
}

/// Patterns speak of where an entry comes to lie, and of its spelling.
#[test]
fn excludes_follow_links_on_the_way() {
    let mut tar = TarWriter::new();
    tar.dir("secret/", 0o755).dir("usr/lib/", 0o755);
    tar.symlink("l", "secret").symlink("lib", "/usr/../usr/lib");
    tar.file("l/key", "k").file("l/other", "o");
    tar.file("lib/new", "n").file("lib/old", "m");
    let file = ArchiveFile::new(tar.finish());
    let paths = |exclude: &[&str]| {
        let mut with = options("base/a:1", file.source());
        with.excludes = exclude.iter().map(|text| (*text).to_owned()).collect();
        let tree = try_pack(&memory_store(), &with).unwrap().tree();
        let paths: Vec<String> = tree.paths().iter().map(|path| (*path).to_owned()).collect();
        paths
    };
    let all = paths(&[]);
    assert!(all.iter().any(|path| path == "secret/key"), "{all:?}");
    for (pattern, gone) in [
        ("/secret/key", "secret/key"),
        ("/l/key", "secret/key"),
        ("/usr/lib/new", "usr/lib/new"),
        ("/lib/new", "usr/lib/new"),
    ] {
        let mut expected = all.clone();
        expected.retain(|path| path != gone);
        assert_eq!(paths(&[pattern]), expected, "{pattern}");
    }
}

#[test]
fn addresses_put_small_files_first_and_share_equal_contents() {
    let mut tar = TarWriter::new();
    tar.file("big", vec![1; 10_000]);
    tar.file("z/small", "s");
    tar.file("a/same", vec![1; 10_000]);
    tar.file("a/tiny", "t");
    tar.file("z/again", "s");
    let packed = base(tar.finish());
    // tiny, small (shared), big (shared).
    assert_eq!(packed.map.data_size(), 4096 * (1 + 1 + 3));
    let offsets: Vec<_> = packed
        .map
        .extents()
        .iter()
        .map(|extent| (extent.data_offset, extent.len))
        .collect();
    assert_eq!(offsets, [(0, 1), (4096, 1), (8192, 10_000)]);
    let tree = packed.tree();
    assert_eq!(tree.get("a/same").content(), vec![1; 10_000]);
    assert_eq!(tree.get("z/again").content(), b"s");
    assert_eq!(packed.manifest.counts.files, 5);
    assert_eq!(packed.manifest.counts.bytes, 20_003);
}
