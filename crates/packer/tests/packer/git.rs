//! Git's index in a layer: read back by git itself and compared with what the layer shows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use layerpack_fixtures::{ScratchDir, find_tool, skip};
use layerpack_packer::{
    BuildReport, GitIndex, ImageSource, ImportOptions, MergeOptions, RebaseOptions, Silent, Source,
    Split, Strategy, build, build_split, import, merge, rebase,
};
use layerpack_store::{LayerStore, ParentRef};

use crate::image::Layout;
use crate::support::{Packed, memory_store, options};

/// Runs git without the caller's configuration.
#[track_caller]
fn git(dir: &Path, arguments: &[&str]) -> String {
    let output = Command::new("git")
        .current_dir(dir)
        .args(["-c", "protocol.file.allow=always", "-c", "safe.directory=*"])
        .args(arguments)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .envs(["GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"].map(|name| (name, "a")))
        .envs(["GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"].map(|name| (name, "a@b")))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "git {arguments:?}: {text}{errors}");
    text
}

/// A repository with a commit: files of several sizes, an executable, links, empty ones.
fn repository(dir: &Path, init: &[&str]) {
    fs_err::create_dir_all(dir.join("src/deep")).unwrap();
    git(dir, &[&["init", "-q", "-b", "main"], init].concat());
    for (name, size) in [
        ("README", 10),
        ("src/big", 700_000),
        ("src/deep/a", 5000),
        ("src/empty", 0),
        ("src/z", 4096),
    ] {
        fs_err::write(
            dir.join(name),
            name.repeat(size / name.len() + 1).get(..size).unwrap(),
        )
        .unwrap();
    }
    fs_err::write(dir.join("src/run"), "#!/bin/sh\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs_err::set_permissions(dir.join("src/run"), mode).unwrap();
    std::os::unix::fs::symlink("deep/a", dir.join("src/link")).unwrap();
    git(dir, &["add", "."]);
    git(dir, &["commit", "-q", "-m", "one"]);
}

/// What an index remembers, by path.
fn remembered(dir: &Path, index: &[u8], at: &Path) -> BTreeMap<String, BTreeMap<String, String>> {
    fs_err::write(at, index).unwrap();
    let output = Command::new("git")
        .current_dir(dir)
        .args(["-c", "safe.directory=*", "ls-files", "--debug"])
        .env("GIT_INDEX_FILE", at)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mut found: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    let mut path = String::new();
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        match line.strip_prefix("  ") {
            None => path = line.to_owned(),
            Some(fields) => {
                for field in fields.split('\t') {
                    let (key, value) = field.split_once(": ").unwrap();
                    let entry = found.entry(path.clone()).or_default();
                    entry.insert(key.trim().to_owned(), value.trim().to_owned());
                }
            }
        }
    }
    found
}

fn pack(dir: &Path) -> (Packed, Vec<GitIndex>) {
    let mut with = options("base/t:1", Source::Dir(dir.to_owned()));
    with.git_index = true;
    let store = memory_store();
    loaded(&store, build(&store, &with, &Silent).unwrap())
}

fn loaded(store: &LayerStore, report: BuildReport) -> (Packed, Vec<GitIndex>) {
    let packed = Packed::load(store, report.published.digest, report.warnings);
    (packed, report.git)
}

/// Checks that git's index at `index` agrees with the layer for all but `stale`.
#[track_caller]
fn agrees(
    scratch: &ScratchDir,
    packed: &Packed,
    repository: &Path,
    prefix: &str,
    index: &str,
    stale: &[&str],
) {
    let tree = packed.tree();
    let bytes = tree.get(index).content();
    let known = remembered(repository, &bytes, &scratch.join("index-read"));
    assert!(!known.is_empty());
    let mut youngest = 0;
    for (path, fields) in &known {
        let Some(node) = tree.nodes.get(format!("{prefix}{path}").as_bytes()) else {
            assert!(stale.contains(&path.as_str()), "{path} is not in the layer");
            continue;
        };
        let time = format!("{}:{}", node.mtime.0, node.mtime.1);
        let size = node.size.max(node.target.len() as u64);
        let expected = [
            ("ctime", time.clone()),
            ("mtime", time),
            ("ino", node.nid.to_string()),
            ("uid", node.uid.to_string()),
            ("gid", node.gid.to_string()),
            ("size", size.to_string()),
        ];
        let same = expected
            .iter()
            .all(|(key, value)| fields.get(*key) == Some(value));
        assert_eq!(
            same,
            !stale.contains(&path.as_str()),
            "{path}: {fields:?} {expected:?}"
        );
        if same {
            youngest = youngest.max(node.mtime.0);
        }
    }
    assert!(
        tree.get(index).mtime.0 > youngest,
        "git would take files for racy"
    );
}

fn unable() -> bool {
    find_tool("git").is_none()
}

#[test]
fn the_index_agrees_with_the_layer_in_every_version_and_hash() {
    if unable() {
        skip!("needs git");
    }
    for (init, config) in [
        (&[][..], &[][..]),
        (&[], &["index.version=4"]),
        (&[], &["index.skipHash=true"]),
        (&["--object-format=sha256"], &[]),
        (
            &["--object-format=sha256"],
            &["index.version=4", "index.skipHash=true"],
        ),
    ] {
        let scratch = ScratchDir::new("git-versions").unwrap();
        let dir = scratch.mkdir("repo").unwrap();
        repository(&dir, init);
        for setting in config {
            if let Some(version) = setting.strip_prefix("index.version=") {
                git(&dir, &["update-index", "--index-version", version]);
            } else if let Some((key, value)) = setting.split_once('=') {
                git(&dir, &["config", key, value]);
            }
        }
        // Written anew by these rules.
        fs_err::write(dir.join("README"), "changed").unwrap();
        git(&dir, &["add", "README"]);
        let before = fs_err::read(dir.join(".git/index")).unwrap();
        let (packed, reports) = pack(&dir);
        agrees(&scratch, &packed, &dir, "", ".git/index", &[]);
        let [report] = reports.as_slice() else {
            panic!("{reports:?}")
        };
        assert_eq!(
            (
                report.entries,
                report.refreshed,
                report.differing,
                report.missing
            ),
            (7, 7, 0, 0),
            "{report:?}"
        );
        assert_eq!(report.path, ".git/index");
        let after = packed.tree().get(".git/index").content();
        assert_eq!(before.len(), after.len());
        let zero = |bytes: &[u8]| bytes.ends_with(&[0; 20]);
        assert_eq!(zero(&before), zero(&after));
        // git's own check of the hash at the end.
        fs_err::write(dir.join(".git/index"), &after).unwrap();
        git(&dir, &["fsck", "--strict"]);
        // Twice the same, and from an archive too.
        assert_eq!(pack(&dir).0.tree().get(".git/index").content(), after);
    }
}

#[test]
fn only_what_is_known_to_be_the_same_is_refreshed() {
    if unable() {
        skip!("needs git");
    }
    let scratch = ScratchDir::new("git-differs").unwrap();
    let dir = scratch.mkdir("repo").unwrap();
    repository(&dir, &[]);
    for name in ["skipped", "assumed", "announced", "gone", "staged"] {
        fs_err::write(dir.join(name), name).unwrap();
    }
    git(&dir, &["add", "skipped", "assumed", "gone", "staged"]);
    git(&dir, &["commit", "-q", "-m", "two"]);
    git(&dir, &["update-index", "--skip-worktree", "skipped"]);
    git(&dir, &["update-index", "--assume-unchanged", "assumed"]);
    git(&dir, &["add", "-N", "announced"]);
    fs_err::write(dir.join("staged"), "new").unwrap();
    git(&dir, &["add", "staged"]);
    fs_err::remove_file(dir.join("gone")).unwrap();
    // The same size, other bytes; and a file in place of a link.
    fs_err::write(dir.join("src/z"), [b'?'; 4096]).unwrap();
    fs_err::remove_file(dir.join("src/link")).unwrap();
    fs_err::write(dir.join("src/link"), "deep/a").unwrap();
    let status = git(&dir, &["status", "--porcelain"]);
    let (packed, reports) = pack(&dir);
    let stale = [
        "skipped",
        "assumed",
        "announced",
        "gone",
        "src/z",
        "src/link",
    ];
    agrees(&scratch, &packed, &dir, "", ".git/index", &stale);
    let report = &reports[0];
    assert_eq!(
        (
            report.entries,
            report.refreshed,
            report.differing,
            report.missing
        ),
        (12, 6, 2, 1),
        "{report:?}"
    );
    // With that index git says the same as before.
    fs_err::write(
        dir.join(".git/index"),
        packed.tree().get(".git/index").content(),
    )
    .unwrap();
    assert_eq!(git(&dir, &["status", "--porcelain"]), status);
}

#[test]
fn submodules_and_further_working_trees_have_indexes_elsewhere() {
    if unable() {
        skip!("needs git");
    }
    let scratch = ScratchDir::new("git-modules").unwrap();
    let other = scratch.mkdir("other").unwrap();
    repository(&other, &[]);
    let dir = scratch.mkdir("tree/repo").unwrap();
    repository(&dir, &[]);
    git(&dir, &["submodule", "--quiet", "add", "../../other", "sub"]);
    git(&dir, &["commit", "-q", "-m", "sub"]);
    git(&dir, &["worktree", "add", "-q", "../second"]);
    // As newer gits write it when asked to.
    fs_err::write(
        scratch.join("tree/second/.git"),
        "gitdir: ../repo/.git/worktrees/second\n",
    )
    .unwrap();
    let (packed, mut reports) = pack(&scratch.join("tree"));
    reports.sort_by(|a, b| a.path.cmp(&b.path));
    let paths: Vec<&str> = reports.iter().map(|report| report.path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "repo/.git/index",
            "repo/.git/modules/sub/index",
            "repo/.git/worktrees/second/index"
        ]
    );
    assert!(
        reports
            .iter()
            .all(|report| report.refreshed >= 7 && report.differing == 0),
        "{reports:?}"
    );
    agrees(&scratch, &packed, &dir, "repo/", paths[0], &["sub"]);
    agrees(
        &scratch,
        &packed,
        &dir.join("sub"),
        "repo/sub/",
        paths[1],
        &[],
    );
    agrees(
        &scratch,
        &packed,
        &scratch.join("tree/second"),
        "second/",
        paths[2],
        &["sub"],
    );
}

#[test]
fn what_cannot_be_refreshed_is_left_as_it_is() {
    if unable() {
        skip!("needs git");
    }
    let scratch = ScratchDir::new("git-odd").unwrap();
    let dir = scratch.mkdir("tree/split").unwrap();
    repository(&dir, &[]);
    git(&dir, &["update-index", "--split-index"]);
    let broken = scratch.mkdir("tree/broken").unwrap();
    repository(&broken, &[]);
    let mut bytes = fs_err::read(broken.join(".git/index")).unwrap();
    bytes[60] ^= 1;
    fs_err::write(broken.join(".git/index"), &bytes).unwrap();
    // Not indexes at all, though they are called so.
    let plain = scratch.mkdir("tree/plain/.git").unwrap();
    fs_err::write(plain.join("index"), "DIRC and nothing more").unwrap();
    fs_err::write(scratch.join("tree/index"), "DIRC").unwrap();
    let (packed, reports) = pack(&scratch.join("tree"));
    let tree = packed.tree();
    for report in &reports {
        assert!(
            report.left_alone.is_some() && report.refreshed == 0,
            "{report:?}"
        );
        let own = fs_err::read(scratch.join("tree").join(&report.path)).unwrap();
        assert_eq!(tree.get(&report.path).content(), own);
    }
    assert_eq!(reports.len(), 3);
    assert!(
        reports
            .iter()
            .any(|report| report.left_alone.as_ref().unwrap().contains("split"))
    );
    assert_eq!(tree.get("index").content(), b"DIRC");
}

#[test]
fn archives_images_and_parts_are_refreshed_alike() {
    if unable() {
        skip!("needs git");
    }
    let scratch = ScratchDir::new("git-ways").unwrap();
    let dir = scratch.mkdir("tree/ws").unwrap();
    repository(&dir, &[]);
    fs_err::write(scratch.join("tree/other"), "1").unwrap();
    let source = scratch.join("tree");
    let archive: PathBuf = scratch.join("tree.tar");
    let done = Command::new("tar")
        .args(["--format=pax", "--numeric-owner", "-cf"])
        .args([
            archive.as_os_str(),
            "-C".as_ref(),
            source.as_os_str(),
            ".".as_ref(),
        ])
        .status()
        .unwrap();
    assert!(done.success());
    let (from_dir, _) = pack(&source);
    agrees(&scratch, &from_dir, &dir, "ws/", "ws/.git/index", &[]);

    let store = memory_store();
    let mut with = options("base/t:1", Source::Tar(archive.clone()));
    with.git_index = true;
    let (from_tar, _) = loaded(&store, build(&store, &with, &Silent).unwrap());
    assert_eq!(from_tar.manifest.meta, from_dir.manifest.meta);
    assert_eq!(from_tar.manifest.map, from_dir.manifest.map);

    // The upper layer brings a file of the repository along.
    let mut upper = layerpack_fixtures::tar::TarWriter::new();
    upper.file("top", "2");
    let layout = scratch.mkdir("image").unwrap();
    Layout::new(&layout).image(
        "t",
        "amd64",
        &[fs_err::read(&archive).unwrap(), upper.finish()],
    );
    let image = ImageSource::Oci {
        dir: layout,
        tag: None,
    };
    let mut with = ImportOptions::new("base/t:1".parse().unwrap(), image);
    with.git_index = true;
    for per_layer in [false, true] {
        with.per_layer = per_layer;
        let store = memory_store();
        let report = import(&store, &with, &Silent).unwrap().layers.remove(0);
        let (packed, reports) = loaded(&store, report);
        assert_eq!(reports[0].refreshed, 7);
        agrees(&scratch, &packed, &dir, "ws/", "ws/.git/index", &[]);
    }

    let rules = "[[part]]\nkind='base'\nname='b'\nversion='1'\nat=['/']\n[[part]]\nkind='workspace'\nname='w'\nversion='1'\nat=['/ws']";
    let mut with = options("base/t:1", Source::Tar(archive));
    with.git_index = true;
    let store = memory_store();
    let split = Split::parse(rules, None, None).unwrap();
    let mut report = build_split(&store, &with, &split, &Silent).unwrap();
    let (packed, reports) = loaded(&store, report.parts.remove(1));
    assert_eq!(reports[0].refreshed, 7);
    agrees(&scratch, &packed, &dir, "ws/", "ws/.git/index", &[]);
}

/// A layer in a store, with or without its index refreshed.
fn publish(store: &LayerStore, reference: &str, dir: &Path, git_index: bool) {
    let mut with = options(reference, Source::Dir(dir.to_owned()));
    with.git_index = git_index;
    build(store, &with, &Silent).unwrap();
}

fn merged(store: &LayerStore, reference: &str, layers: &[&str]) -> (Packed, Vec<GitIndex>) {
    let layers = layers.iter().map(|text| text.parse().unwrap()).collect();
    let options = MergeOptions::new(reference.parse().unwrap(), layers);
    loaded(store, merge(store, &options, &Silent).unwrap())
}

#[test]
fn a_merge_refreshes_what_its_layers_showed() {
    if unable() {
        skip!("needs git");
    }
    let scratch = ScratchDir::new("git-merge").unwrap();
    let repo = scratch.mkdir("low/repo").unwrap();
    repository(&repo, &[]);
    let store = memory_store();
    publish(&store, "base/r:1", &scratch.join("low"), true);
    // Names in front of all others move their numbers; one file becomes another.
    for name in ["aaa", "repo/aaa", "repo/src/z"] {
        let path = scratch.join("high").join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, "new").unwrap();
    }
    publish(&store, "workspace/h:1", &scratch.join("high"), false);
    let index = "repo/.git/index";
    let (packed, reports) = merged(&store, "base/m:1", &["base/r:1", "workspace/h:1"]);
    agrees(&scratch, &packed, &repo, "repo/", index, &["src/z"]);
    let [report] = reports.as_slice() else {
        panic!("{reports:?}")
    };
    assert_eq!((report.refreshed, report.differing), (6, 1), "{report:?}");
    // In steps as at once.
    publish(
        &store,
        "workspace/n:1",
        &scratch.mkdir("none").unwrap(),
        false,
    );
    merged(
        &store,
        "workspace/hn:1",
        &["workspace/h:1", "workspace/n:1"],
    );
    let (steps, _) = merged(&store, "base/s:1", &["base/r:1", "workspace/hn:1"]);
    assert_eq!(steps.manifest.layer_id(), packed.manifest.layer_id());
    // Unless it is told not to.
    let layers = ["base/r:1", "workspace/h:1"].map(|text| text.parse().unwrap());
    let mut options = MergeOptions::new("base/plain:1".parse().unwrap(), layers.into());
    options.git_index = false;
    let (plain, reports) = loaded(&store, merge(&store, &options, &Silent).unwrap());
    assert!(reports.is_empty());
    let before = store.load(&"base/r:1".parse().unwrap()).unwrap().0;
    let before = Packed::load(&store, before, Vec::new()).tree();
    let bytes = |tree: &crate::support::Tree| tree.get(index).content();
    assert_eq!(bytes(&plain.tree()), bytes(&before));
}

#[test]
fn an_index_that_is_not_younger_than_its_files_is_not_believed() {
    if unable() {
        skip!("needs git");
    }
    let scratch = ScratchDir::new("git-racy").unwrap();
    let repo = scratch.mkdir("repo").unwrap();
    repository(&repo, &[]);
    let store = memory_store();
    publish(&store, "base/r:1", &repo, true);
    let before = store.load(&"base/r:1".parse().unwrap()).unwrap().0;
    let index = Packed::load(&store, before, Vec::new()).tree();
    let index = index.get(".git/index").content();
    // The same index with an early time: its files may have changed after git looked.
    let path = scratch.mkdir("high/.git").unwrap().join("index");
    fs_err::write(&path, &index).unwrap();
    let file = fs_err::File::options().write(true).open(&path).unwrap();
    let early = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
    file.set_modified(early).unwrap();
    publish(&store, "workspace/h:1", &scratch.join("high"), false);
    let (packed, reports) = merged(&store, "base/m:1", &["base/r:1", "workspace/h:1"]);
    // Of a link and an empty file all is known. The index is younger than those now, and must not be
    // believed about the others, whose numbers are what they were.
    let unknown = ["README", "src/big", "src/deep/a", "src/run", "src/z"];
    agrees(&scratch, &packed, &repo, "", ".git/index", &unknown);
    assert_eq!((reports[0].refreshed, reports[0].differing), (2, 5));
}

#[test]
fn what_became_another_file_with_the_same_numbers_is_not_believed() {
    if unable() {
        skip!("needs git");
    }
    let scratch = ScratchDir::new("git-same").unwrap();
    let repo = scratch.mkdir("repo").unwrap();
    git(&repo, &["init", "-q", "-b", "main"]);
    let names = ["f1", "d0/g3"];
    fs_err::create_dir_all(repo.join("d0")).unwrap();
    for name in names {
        fs_err::write(repo.join(name), "before\n").unwrap();
    }
    git(&repo, &["add", "."]);
    let store = memory_store();
    publish(&store, "base/r:1", &repo, true);
    // Sizes and times stay, and in the merge the numbers do, since nothing else is there.
    fs_err::create_dir_all(scratch.join("high/d0")).unwrap();
    for name in names {
        let path = scratch.join("high").join(name);
        fs_err::write(&path, "behind\n").unwrap();
        let time = fs_err::metadata(repo.join(name))
            .unwrap()
            .modified()
            .unwrap();
        let file = fs_err::File::options().write(true).open(&path).unwrap();
        file.set_modified(time).unwrap();
    }
    publish(&store, "workspace/h:1", &scratch.join("high"), false);
    let (packed, reports) = merged(&store, "base/m:1", &["base/r:1", "workspace/h:1"]);
    assert_eq!(packed.tree().get("f1").content(), b"behind\n");
    agrees(&scratch, &packed, &repo, "", ".git/index", &names);
    assert_eq!((reports[0].refreshed, reports[0].differing), (0, 2));
}

#[test]
fn what_other_layers_have_another_file_of_is_not_believed_after_a_rebase() {
    if unable() {
        skip!("needs git");
    }
    let scratch = ScratchDir::new("git-onto").unwrap();
    let repo = scratch.mkdir("repo").unwrap();
    git(&repo, &["init", "-q", "-b", "main"]);
    for name in ["f0", "f1"] {
        fs_err::write(repo.join(name), "before\n").unwrap();
    }
    git(&repo, &["add", "."]);
    let store = memory_store();
    // Two versions whose files have one size, one time, and one place.
    let version = |reference: &str| {
        let mut with = options(reference, Source::Dir(repo.clone()));
        with.git_index = true;
        with.source_date_epoch = Some(1_000_000);
        let digest = build(&store, &with, &Silent).unwrap().published.digest;
        ParentRef {
            reference: reference.parse().ok(),
            manifest: digest,
        }
    };
    let old = version("workspace/e:1");
    fs_err::write(repo.join("f0"), "behind\n").unwrap();
    let new = version("workspace/e:2");
    let shown = |parent: &ParentRef| Packed::load(&store, parent.manifest, Vec::new()).tree();
    let (was, will) = (shown(&old), shown(&new));
    assert_eq!(was.get("f0").nid, will.get("f0").nid);
    // A snapshot on the old one with an index of its own.
    let up = scratch.mkdir("up/.git").unwrap();
    fs_err::write(up.join("index"), was.get(".git/index").content()).unwrap();
    let mut with = options("diff/s:1", Source::Dir(scratch.join("up")));
    with.parents = vec![old];
    let snapshot = build(&store, &with, &Silent).unwrap().published.digest;
    let mut with = RebaseOptions::new("diff/r:1".parse().unwrap(), snapshot, vec![new]);
    with.strategy = Strategy::Snapshot;
    let made = rebase(&store, &with, &Silent).unwrap().made.unwrap();
    let packed = Packed::load(&store, made.published.digest, Vec::new());
    let bytes = packed.tree().get(".git/index").content();
    let known = remembered(&repo, &bytes, &scratch.join("index-read"));
    assert_eq!(
        (known["f0"]["size"].as_str(), known["f1"]["size"].as_str()),
        ("0", "7")
    );
}
