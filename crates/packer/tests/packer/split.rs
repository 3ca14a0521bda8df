//! One tree as several layers: what goes where, what is left over, and what stays the same.

use std::collections::BTreeMap;
use std::path::Path;

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::tar::TarWriter;
use layerpack_fixtures::trees::TreeMaker;
use layerpack_packer::{
    ImageSource, ImportOptions, PackError, Silent, Source, Split, SplitReport, build_split,
    import_split,
};
use layerpack_store::LayerStore;

use crate::image::Layout;
use crate::support::{ArchiveFile, Packed, chain, memory_store, options};

pub const RULES: &str = r#"
    [[part]]
    kind = "base"
    name = "os"
    version = "1"
    at = ["/etc", "/usr"]

    [[part]]
    kind = "workspace"
    name = "repo"
    version = "1"
    at = ["/ws/repo"]
    except = ["*.o"]

    [[part]]
    kind = "toolkit"
    name = "go"
    version = "1"
    globs = ["usr/local/go*", "**/*.go"]
"#;

pub fn sample(dir: &Path) {
    let mut tree = TreeMaker::new(dir);
    for path in [
        "etc",
        "usr",
        "usr/bin",
        "usr/local",
        "usr/local/go1",
        "ws",
        "ws/repo",
        "ws/repo/sub",
        "var",
        "var/log",
        "lone",
    ] {
        tree.dir(path, 0o751).unwrap();
        tree.mtime(path, 1000, 5).unwrap();
    }
    for path in [
        "etc/passwd",
        "usr/bin/sh",
        "usr/local/go1/go",
        "ws/repo/main.c",
        "ws/repo/main.o",
        "ws/repo/sub/x.go",
        "var/log/a.log",
    ] {
        tree.file(path, path).unwrap();
        tree.mtime(path, 2000, 7).unwrap();
    }
    tree.symlink("usr/bin/go", "../local/go1/go").unwrap();
    tree.hard_link("ws/repo/passwd", "etc/passwd").unwrap();
    tree.hard_link("usr/bin/passwd", "etc/passwd").unwrap();
    tree.finish().unwrap();
}

fn split(text: &str) -> Split {
    Split::parse(text, None, None).unwrap()
}

fn packed(store: &LayerStore, report: &SplitReport) -> BTreeMap<String, Packed> {
    let load = |part: &layerpack_packer::BuildReport| {
        let published = &part.published;
        let packed = Packed::load(store, published.digest, part.warnings.clone());
        (published.reference.kind.to_string(), packed)
    };
    report.parts.iter().map(load).collect()
}

fn try_split(
    source: Source,
    rules: &Split,
) -> Result<(SplitReport, BTreeMap<String, Packed>), PackError> {
    let store = memory_store();
    let report = build_split(&store, &options("base/any:1", source), rules, &Silent)?;
    let parts = packed(&store, &report);
    Ok((report, parts))
}

fn names(packed: &Packed) -> Vec<String> {
    let tree = packed.tree();
    let mut paths = tree.paths();
    paths.retain(|path| !path.is_empty() && !tree.is_implicit(path));
    paths
}

#[test]
fn every_entry_goes_to_the_last_part_that_names_it() {
    let scratch = ScratchDir::new("split").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    sample(&dir);
    let (report, parts) = try_split(Source::Dir(dir), &split(RULES)).unwrap();
    assert_eq!(
        names(&parts["base"]),
        [
            "etc",
            "etc/passwd",
            "lone",
            "usr",
            "usr/bin",
            "usr/bin/go",
            "usr/bin/passwd",
            "usr/bin/sh",
            "usr/local",
            "var",
            "var/log",
            "var/log/a.log",
            "ws",
            "ws/repo/main.o",
            // Hard links stay one file.
            "ws/repo/passwd",
        ]
    );
    assert_eq!(
        names(&parts["workspace"]),
        ["ws/repo", "ws/repo/main.c", "ws/repo/sub"]
    );
    assert_eq!(
        names(&parts["toolkit"]),
        ["usr/local/go1", "usr/local/go1/go", "ws/repo/sub/x.go"]
    );
    // Directories on the way are the others' to define; the root is the base's.
    let toolkit = parts["toolkit"].tree();
    assert_eq!(
        toolkit.implicit,
        [
            &b""[..],
            b"usr",
            b"usr/local",
            b"ws",
            b"ws/repo",
            b"ws/repo/sub"
        ]
    );
    assert_eq!(
        (toolkit.get("ws/repo").mode, toolkit.get("ws/repo").mtime),
        (0o755, (0, 0))
    );
    assert!(!parts["base"].tree().is_implicit(""));
    let base = parts["base"].tree();
    assert_eq!(
        base.links("etc/passwd"),
        ["etc/passwd", "usr/bin/passwd", "ws/repo/passwd"]
    );
    assert_eq!(base.get("etc/passwd").nlink, 3);
    let warned = report.parts[0]
        .warnings
        .iter()
        .any(|line| line.contains("1 names of hard linked"));
    assert!(warned, "{:?}", report.parts[0].warnings);

    let left = &report.left_over;
    assert_eq!(left.paths, ["/lone", "/var", "/ws/repo/main.o"]);
    assert_eq!(left.entries, 5);
    assert_eq!(left.went_to.as_deref(), Some("base/os:1"));
    assert_eq!(
        left.bytes,
        ("var/log/a.log".len() + "ws/repo/main.o".len()) as u64
    );
}

#[test]
fn directories_archives_and_images_are_split_alike() {
    let scratch = ScratchDir::new("split-ways").unwrap();
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755)
        .dir("etc", 0o755)
        .file("etc/passwd", "1")
        .dir("ws", 0o700);
    tar.dir("ws/repo", 0o755)
        .file("ws/repo/a.go", "2")
        .file("ws/repo/b", "3")
        .file("c", "4");
    let bytes = tar.finish();
    let archive = ArchiveFile::new(&bytes);
    let dir = scratch.mkdir("tree").unwrap();
    let done = std::process::Command::new("tar")
        .args([
            "-xpf".as_ref(),
            archive.path.as_os_str(),
            "-C".as_ref(),
            dir.as_os_str(),
        ])
        .status()
        .unwrap();
    assert!(done.success());
    let (from_tar, _) = try_split(archive.source(), &split(RULES)).unwrap();
    let layout = scratch.mkdir("image").unwrap();
    Layout::new(&layout).image("t", "amd64", &[bytes]);
    let source = ImageSource::Oci {
        dir: layout,
        tag: None,
    };
    let with = ImportOptions::new("base/any:1".parse().unwrap(), source);
    let store = memory_store();
    let from_image = import_split(&store, &with, &split(RULES), &Silent).unwrap();
    let ids = |report: &SplitReport| -> Vec<_> {
        let parts = report.parts.iter();
        parts
            .map(|part| {
                (
                    part.published.reference.to_string(),
                    part.published.layer_id,
                )
            })
            .collect()
    };
    assert_eq!(ids(&from_tar), ids(&from_image));
    assert_eq!(from_tar.left_over, from_image.left_over);
    if layerpack_fixtures::is_root() {
        let (from_dir, _) = try_split(Source::Dir(dir), &split(RULES)).unwrap();
        assert_eq!(ids(&from_tar), ids(&from_dir));
    }
}

#[test]
fn a_change_of_one_part_changes_no_other() {
    let scratch = ScratchDir::new("split-change").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    sample(&dir);
    fs_err::remove_file(dir.join("ws/repo/passwd")).unwrap();
    let digests = || -> Vec<_> {
        let (report, _) = try_split(Source::Dir(dir.clone()), &split(RULES)).unwrap();
        report
            .parts
            .iter()
            .map(|part| part.published.digest)
            .collect()
    };
    let before = digests();
    assert_eq!(before, digests(), "the same twice");
    let changes: [(usize, &dyn Fn()); 4] = [
        (1, &|| {
            fs_err::write(dir.join("ws/repo/main.c"), "changed").unwrap()
        }),
        (1, &|| fs_err::create_dir(dir.join("ws/repo/new")).unwrap()),
        (2, &|| {
            fs_err::write(dir.join("ws/repo/sub/y.go"), "new").unwrap()
        }),
        (0, &|| fs_err::remove_file(dir.join("etc/passwd")).unwrap()),
    ];
    let mut last = before;
    for (part, change) in changes {
        let touched = if part == 2 { "ws/repo/sub" } else { "ws/repo" };
        let times = fs_err::metadata(dir.join(touched))
            .unwrap()
            .modified()
            .unwrap();
        change();
        if part == 2 {
            // The new name is the toolkit's, its directory's time is the workspace's.
            fs_err::File::open(dir.join(touched))
                .unwrap()
                .into_file()
                .set_modified(times)
                .unwrap();
        }
        let now = digests();
        for index in 0..3 {
            assert_eq!(
                now[index] != last[index],
                index == part,
                "part {part}, layer {index}"
            );
        }
        last = now;
    }
}

#[test]
fn what_is_left_over_goes_where_the_file_says() {
    let scratch = ScratchDir::new("left-over").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    sample(&dir);
    let with = |leftover: &str| split(&format!("leftover = {leftover:?}\n{RULES}"));
    let source = || Source::Dir(dir.clone());
    let (report, parts) = try_split(source(), &with("toolkit/go")).unwrap();
    assert_eq!(report.left_over.went_to.as_deref(), Some("toolkit/go:1"));
    assert!(names(&parts["toolkit"]).contains(&"var/log/a.log".to_owned()));
    assert!(!names(&parts["base"]).contains(&"var".to_owned()));
    let (report, parts) = try_split(source(), &with("drop")).unwrap();
    assert_eq!(
        (report.left_over.went_to, report.left_over.entries),
        (None, 5)
    );
    assert!(
        parts
            .values()
            .all(|part| !part.tree().has("var") && !part.tree().has("lone"))
    );
    assert!(
        names(&parts["base"]).contains(&"ws".to_owned()),
        "it leads to the workspace"
    );
    for rules in [with("error"), split(RULES).strict()] {
        let store = memory_store();
        let error =
            build_split(&store, &options("base/any:1", source()), &rules, &Silent).unwrap_err();
        let error = chain(&error);
        assert!(error.contains("/lone and 2 more"), "{error}");
        assert!(store.list().unwrap().is_empty(), "published");
    }
    let all = RULES.replace(r#"at = ["/etc", "/usr"]"#, r#"at = ["/"]"#);
    let (report, _) = try_split(source(), &split(&all).strict()).unwrap();
    assert_eq!(report.left_over.entries, 0);
}

#[test]
fn hard_links_across_parts_may_become_files_of_their_own() {
    let scratch = ScratchDir::new("split-links").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    sample(&dir);
    let rules = split(&format!("hard-links = \"copy\"\n{RULES}"));
    let (report, parts) = try_split(Source::Dir(dir), &rules).unwrap();
    let workspace = parts["workspace"].tree();
    assert_eq!(workspace.get("ws/repo/passwd").nlink, 1);
    assert_eq!(workspace.get("ws/repo/passwd").content(), b"etc/passwd");
    assert_eq!(parts["base"].tree().get("etc/passwd").nlink, 2);
    assert!(
        report.parts[0].warnings.is_empty(),
        "{:?}",
        report.parts[0].warnings
    );
}

#[test]
fn whiteouts_of_an_archive_hide_nothing_and_empty_parts_are_told() {
    let mut tar = TarWriter::new();
    tar.file("etc/a", "1")
        .whiteout("etc", "b")
        .opaque("ws/repo")
        .file("ws/repo/x.o", "2");
    let archive = ArchiveFile::new(tar.finish());
    let (report, parts) = try_split(archive.source(), &split(RULES)).unwrap();
    assert!(!parts["base"].tree().has("etc/b"));
    let warnings = report.parts[0].warnings.join("\n");
    assert!(warnings.contains("toolkit/go:1 is empty"), "{warnings}");
    assert!(warnings.contains("whiteouts left out"), "{warnings}");
    let mut wrong = options("toolkit/any:1", archive.source());
    wrong.parents = Vec::new();
    let error = build_split(&memory_store(), &wrong, &split(RULES), &Silent).unwrap_err();
    assert!(error.to_string().contains("base"), "{error}");
}

#[test]
fn a_part_whose_version_is_taken_keeps_all_back() {
    let scratch = ScratchDir::new("split-taken").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    sample(&dir);
    let store = memory_store();
    let options = options("base/any:1", Source::Dir(dir.clone()));
    // The last part's version has other contents already.
    let other = scratch.mkdir("other").unwrap();
    let taken = crate::support::options("toolkit/go:1", Source::Dir(other));
    layerpack_packer::build(&store, &taken, &Silent).unwrap();
    let error = build_split(&store, &options, &split(RULES), &Silent).unwrap_err();
    assert!(chain(&error).contains("toolkit/go:1"), "{}", chain(&error));
    let names: Vec<String> = (store.list().unwrap().iter())
        .map(|(name, _)| name.to_string())
        .collect();
    assert_eq!(names, ["toolkit/go:1"]);
    // Without the obstacle everything is published, each part with what it cost.
    store.remove(&"toolkit/go:1".parse().unwrap()).unwrap();
    let report = build_split(&store, &options, &split(RULES), &Silent).unwrap();
    assert_eq!(store.list().unwrap().len(), 3);
    let raw: Vec<u64> = (report.parts.iter())
        .map(|part| part.published.stats.raw_bytes)
        .collect();
    assert!(raw[0] > 0 && raw[1..] == [0, 0], "{raw:?}");
}
