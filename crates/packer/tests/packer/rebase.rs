//! Snapshots put on other layers, and trees written to directories.

use std::path::Path;

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::treecmp::{Options, assert_same, snapshot as tree_of};
use layerpack_packer::{
    ConflictKind, RebaseOptions, RebaseReport, Silent, Source, Strategy, build, checkout, rebase,
};
use layerpack_store::{Digest, LayerStore, ParentRef};

use crate::support::{chain, memory_store, options};

fn write(dir: &Path, path: &str, bytes: &str) {
    let path = dir.join(path);
    fs_err::create_dir_all(path.parent().unwrap()).unwrap();
    fs_err::write(path, bytes).unwrap();
}

fn parent(reference: &str, manifest: Digest) -> ParentRef {
    ParentRef {
        reference: reference.parse().ok(),
        manifest,
    }
}

/// A tree as a base; its times are all the same, so that what differs was meant to.
fn base(store: &LayerStore, reference: &str, dir: &Path) -> ParentRef {
    let mut with = options(reference, Source::Dir(dir.to_owned()));
    with.source_date_epoch = Some(1_000_000);
    let report = build(store, &with, &Silent).unwrap_or_else(|e| panic!("{}", chain(&e)));
    parent(reference, report.published.digest)
}

/// What makes `dir` of the base `on`.
fn diff(store: &LayerStore, reference: &str, dir: &Path, on: &ParentRef) -> Digest {
    let mut with = options(reference, Source::Dir(dir.to_owned()));
    with.source_date_epoch = Some(1_000_000);
    with.parents = vec![on.clone()];
    with.difference = true;
    let report = build(store, &with, &Silent).unwrap_or_else(|e| panic!("{}", chain(&e)));
    report.published.digest
}

fn files(dir: &Path, list: &[(&str, &str)]) {
    for (path, bytes) in list {
        write(dir, path, bytes);
    }
}

struct Case {
    scratch: ScratchDir,
    store: LayerStore,
    new: ParentRef,
    snapshot: Digest,
}

/// An old base, a new one, and a snapshot on the old one.
fn case(old: &[(&str, &str)], new: &[(&str, &str)], snapshot: &[(&str, &str)]) -> Case {
    let scratch = ScratchDir::new("rebase").unwrap();
    let store = memory_store();
    let dirs = ["old", "new", "snapshot"].map(|name| scratch.mkdir(name).unwrap());
    for (dir, list) in dirs.iter().zip([old, new, snapshot]) {
        files(dir, list);
    }
    let old = base(&store, "base/b:1", &dirs[0]);
    let new = base(&store, "base/b:2", &dirs[1]);
    let snapshot = diff(&store, "diff/d:1", &dirs[2], &old);
    Case {
        scratch,
        store,
        new,
        snapshot,
    }
}

impl Case {
    fn rebase(&self, version: u32, strategy: Strategy) -> RebaseReport {
        let reference = format!("diff/rebased:{version}").parse().unwrap();
        let mut with = RebaseOptions::new(reference, self.snapshot, vec![self.new.clone()]);
        with.strategy = strategy;
        rebase(&self.store, &with, &Silent).unwrap_or_else(|e| panic!("{}", chain(&e)))
    }

    /// Compares the result on the new base with a directory of these files.
    #[track_caller]
    fn shows(&self, report: &RebaseReport, expected: &[(&str, &str)]) {
        let name = report
            .made
            .as_ref()
            .unwrap()
            .published
            .reference
            .version
            .to_string();
        let layers = [
            self.new.manifest,
            report.made.as_ref().unwrap().published.digest,
        ];
        let out = self.scratch.join(format!("out-{name}"));
        checkout(&self.store, &layers, &out, &Silent).unwrap();
        let mut found: Vec<(String, String)> = Vec::new();
        let mut todo = vec![out.clone()];
        while let Some(dir) = todo.pop() {
            for entry in fs_err::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    todo.push(path);
                } else {
                    let name = path.strip_prefix(&out).unwrap().display().to_string();
                    found.push((name, fs_err::read_to_string(path).unwrap()));
                }
            }
        }
        found.sort();
        let mut expected: Vec<(String, String)> = expected
            .iter()
            .map(|(a, b)| ((*a).to_owned(), (*b).to_owned()))
            .collect();
        expected.sort();
        assert_eq!(found, expected);
    }
}

#[test]
fn what_both_left_alone_comes_together() {
    let case = case(
        &[
            ("a", "1"),
            ("b", "1"),
            ("c", "1"),
            ("d/x", "1"),
            ("d/y", "1"),
        ],
        &[
            ("a", "1"),
            ("b", "2"),
            ("d/x", "1"),
            ("d/y", "2"),
            ("e", "2"),
        ],
        &[
            ("a", "3"),
            ("b", "1"),
            ("c", "1"),
            ("d/y", "1"),
            ("f/g", "3"),
        ],
    );
    let report = case.rebase(1, Strategy::Fail);
    assert_eq!(report.conflicts, []);
    case.shows(
        &report,
        &[
            ("a", "3"),
            ("b", "2"),
            ("d/y", "2"),
            ("e", "2"),
            ("f/g", "3"),
        ],
    );
}

#[test]
fn conflicts_are_told_and_settled_as_asked() {
    let case = case(
        &[
            ("both", "1"),
            ("gone", "1"),
            ("kept", "1"),
            ("tree/in", "1"),
        ],
        &[
            ("both", "2"),
            ("kept", "2"),
            ("new", "2"),
            ("tree/in", "1"),
            ("tree/more", "2"),
        ],
        &[("both", "3"), ("gone", "3"), ("new", "3"), ("same", "s")],
    );
    let report = case.rebase(1, Strategy::Fail);
    assert!(report.made.is_none());
    let found: Vec<(&str, ConflictKind)> = report
        .conflicts
        .iter()
        .map(|c| (c.path.as_str(), c.kind))
        .collect();
    assert_eq!(
        found,
        [
            ("/both", ConflictKind::BothChanged),
            ("/gone", ConflictKind::ChangedAndRemoved),
            ("/kept", ConflictKind::RemovedAndChanged),
            ("/new", ConflictKind::BothAdded),
            ("/tree", ConflictKind::RemovedAndChanged),
        ]
    );
    assert_eq!(report.conflicts[0].before, "file of 1 bytes");
    case.shows(
        &case.rebase(2, Strategy::Snapshot),
        &[("both", "3"), ("gone", "3"), ("new", "3"), ("same", "s")],
    );
    case.shows(
        &case.rebase(3, Strategy::Base),
        &[
            ("both", "2"),
            ("kept", "2"),
            ("new", "2"),
            ("same", "s"),
            ("tree/in", "1"),
            ("tree/more", "2"),
        ],
    );
}

#[test]
fn what_both_did_is_no_conflict() {
    let case = case(
        &[("a", "1"), ("b", "1"), ("t", "file")],
        &[("a", "2"), ("n", "2"), ("t/dir", "2")],
        &[("a", "2"), ("n", "2"), ("t/dir", "2")],
    );
    let report = case.rebase(1, Strategy::Fail);
    // The directory in place of a file is the snapshot's and the base's: told, since it hides.
    let told: Vec<&str> = report.conflicts.iter().map(|c| c.path.as_str()).collect();
    assert!(told.is_empty() || told == ["/t"], "{told:?}");
    let report = case.rebase(2, Strategy::Snapshot);
    assert!(report.dropped >= 3, "{}", report.dropped);
    case.shows(&report, &[("a", "2"), ("n", "2"), ("t/dir", "2")]);
}

#[test]
fn a_checkout_is_the_tree() {
    let scratch = ScratchDir::new("checkout").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    let shape = layerpack_fixtures::trees::RandomOptions {
        entries: 200,
        max_file: 300_000,
        ..layerpack_fixtures::trees::RandomOptions::new(77)
    };
    layerpack_fixtures::trees::random(&dir, &shape).unwrap();
    let store = memory_store();
    let report = build(
        &store,
        &options("base/b:1", Source::Dir(dir.clone())),
        &Silent,
    )
    .unwrap();
    let out = scratch.join("out");
    let done = checkout(&store, &[report.published.digest], &out, &Silent).unwrap();
    let plain = Options::default();
    assert_same(
        &tree_of(&dir, &plain).unwrap(),
        &tree_of(&out, &plain).unwrap(),
    );
    assert!(done.entries > 200 && done.bytes > 0);
    // What is there stays there.
    let error = checkout(&store, &[report.published.digest], &out, &Silent).unwrap_err();
    assert!(chain(&error).contains("not empty"), "{}", chain(&error));
    // An empty directory is as good as none, and nothing is left beside it.
    let empty = scratch.mkdir("beside/empty").unwrap();
    checkout(&store, &[report.published.digest], &empty, &Silent).unwrap();
    let names: Vec<_> = fs_err::read_dir(scratch.join("beside"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["empty"]);
}
