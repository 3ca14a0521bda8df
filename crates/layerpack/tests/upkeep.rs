//! Keeping a store in order from the command line: gc, prune, repair, verify --all.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::path::{Path, PathBuf};

use serde_json::Value;
use support::Node;

fn source(node: &Node, name: &str, seed: u8, files: usize) -> PathBuf {
    let dir = node.scratch.join(name);
    fs_err::create_dir_all(&dir).unwrap();
    for i in 0..files {
        let mut state = u32::from(seed) * 1000 + u32::try_from(i).unwrap() + 1;
        let bytes: Vec<u8> = (0..70_000)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                state.to_le_bytes()[1]
            })
            .collect();
        fs_err::write(dir.join(format!("f{i}")), bytes).unwrap();
    }
    dir
}

fn bytes_below(dir: &Path) -> u64 {
    let mut sum = 0;
    for entry in fs_err::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let metadata = entry.metadata().unwrap();
        sum += if metadata.is_dir() {
            bytes_below(&entry.path())
        } else {
            metadata.len()
        };
    }
    sum
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(files_below(&path)),
            false => found.push(path),
        }
    }
    found
}

fn number(value: &Value, pointer: &str) -> u64 {
    value.pointer(pointer).and_then(Value::as_u64).unwrap()
}

#[test]
fn removed_layers_leave_the_store() {
    let node = Node::new("gc");
    node.build("base/a:1", &source(&node, "a", 1, 3), &[]);
    let before = bytes_below(&node.store());
    node.build("base/b:1", &source(&node, "b", 2, 3), &[]);
    node.ok(["rm", "base/b:1"]);
    let dry = node.json(["gc", "--dry-run"]);
    assert!(number(&dry, "/condemned/objects") >= 5, "{dry}");
    let first = node.json(["gc"]);
    assert_eq!(number(&first, "/deleted/objects"), 0, "{first}");
    assert!(number(&first, "/waiting/0/amount/objects") >= 5, "{first}");
    let text = node.ok(["gc", "--grace", "0"]);
    assert!(text.starts_with("deleted "), "{text}");
    assert_eq!(bytes_below(&node.store()), before);
    let again = node.json(["gc", "--grace", "0", "--wait"]);
    assert_eq!(number(&again, "/deleted/objects"), 0, "{again}");
    assert!(number(&again, "/kept/reference/objects") >= 5, "{again}");
    node.ok(["verify", "base/a:1"]);
    let output = node.run(["gc", "--grace", "soon"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("24h"));
}

#[test]
fn prune_frees_what_little_used_packs_hold() {
    let node = Node::new("prune");
    let all = source(&node, "all", 3, 12);
    node.build("base/all:1", &all, &[]);
    let few = node.scratch.join("few");
    fs_err::create_dir(&few).unwrap();
    fs_err::copy(all.join("f4"), few.join("f4")).unwrap();
    let digest = node.build("base/few:1", &few, &[]);
    node.ok(["rm", "base/all:1"]);
    let report = node.json(["prune", "--min-live", "40", "--grace", "0"]);
    assert_eq!(number(&report, "/rewritten_packs"), 1, "{report}");
    assert_eq!(report["layers"][0], "base/few:1");
    // The 64 KiB that are kept for a full disk included.
    assert!(bytes_below(&node.store()) < 220_000, "{report}");
    assert!(node.ok(["ls"]).contains(&digest[..15]));
    node.ok(["verify", "base/few:1"]);
}

#[test]
fn a_damaged_store_is_told_and_repaired() {
    let node = Node::new("repair");
    node.build("base/a:1", &source(&node, "a", 1, 2), &[]);
    node.build("base/b:1", &source(&node, "b", 2, 2), &[]);
    node.ok(["verify", "--all"]);
    let report = node.json(["verify", "--all", "--read-data"]);
    assert_eq!(report["layers"].as_array().unwrap().len(), 2, "{report}");
    for family in ["index", "locators"] {
        fs_err::remove_dir_all(node.store().join(family)).unwrap();
    }
    let output = node.run(["verify", "--all"]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(
        told.contains("locators/") && told.contains("base/a:1"),
        "{told}"
    );
    node.ok(["repair", "--dry-run"]);
    assert!(!node.store().join("locators").exists());
    let report = node.json(["repair"]);
    assert_eq!(report["relocated"].as_array().unwrap().len(), 2, "{report}");
    node.ok(["verify", "base/a:1", "base/b:1"]);
    let sound = node.json(["verify", "--all", "--read-data"]);
    assert_eq!(sound["warnings"].as_array().unwrap().len(), 0, "{sound}");

    // The marker, also of a store that is named; what is none is not made one.
    let marker = node.store().join("layerpack.json");
    let sound = fs_err::read(&marker).unwrap();
    let named = node.store().display().to_string();
    for damaged in ["{", "", "\0\u{1}x"] {
        fs_err::remove_file(&marker).unwrap();
        fs_err::write(&marker, damaged).unwrap();
        node.fails(1, ["--store", &named, "ls"]);
        node.ok(["--store", &named, "repair", "--dry-run"]);
        assert_eq!(fs_err::read(&marker).unwrap(), damaged.as_bytes());
        let told = node.ok(["--store", &named, "repair"]);
        assert!(told.contains("layerpack.json written anew"), "{told}");
        assert_eq!(fs_err::read(&marker).unwrap(), sound);
    }
    let empty = node.scratch.mkdir("none").unwrap().display().to_string();
    let told = node.fails(1, ["--store", &empty, "repair"]);
    assert!(told.contains("there is no store"), "{told}");

    // A pack that is gone cannot be made again.
    let packs = node.store().join("packs");
    let one = fs_err::read_dir(&packs)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    fs_err::remove_dir_all(one).unwrap();
    let output = node.run(["repair"]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(
        told.contains("error: ") && told.contains("cannot be repaired"),
        "{told}"
    );
    assert!(
        told.contains("base/a:1") || told.contains("base/b:1"),
        "{told}"
    );
}

#[test]
fn what_a_healed_layer_left_behind_is_a_warning() {
    let node = Node::new("superseded");
    let tree = source(&node, "a", 1, 6);
    node.build("base/a:1", &tree, &[]);
    let pack = files_below(&node.store().join("packs")).pop().unwrap();
    let mut bytes = fs_err::read(&pack).unwrap();
    bytes[5000] ^= 1;
    fs_err::write(&pack, bytes).unwrap();
    let output = node.run(["verify", "--all", "--read-data"]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("(touches base/a:1)"), "{told}");

    node.build("base/a:1", &tree, &["--no-cache"]);
    let output = node.run(["verify", "--all", "--read-data"]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(
        told.contains("warning: ") && told.contains("`layerpack prune --min-live 100`"),
        "{told}"
    );
    let report = node.json(["verify", "--all", "--read-data"]);
    assert_eq!(report["damaged"].as_array().unwrap().len(), 0, "{report}");
    assert_eq!(report["superseded"].as_array().unwrap().len(), 1);
    node.ok(["prune", "--min-live", "100", "--grace", "0"]);
    let report = node.json(["verify", "--all", "--read-data"]);
    assert_eq!(report["superseded"].as_array().unwrap().len(), 0);
}

/// `a,b` is two directories, as `file:///.../a,file:///.../b` is.
#[test]
fn relative_directories_are_mirrors_too() {
    let node = Node::new("comma");
    node.build("base/a:1", &source(&node, "a", 1, 2), &[]);
    let run = |arguments: &[&str]| {
        let mut command = node.command();
        command.current_dir(node.scratch.path()).args(arguments);
        command.output().unwrap()
    };
    for to in ["mA", "mB"] {
        let output = run(&["push", "base/a:1", "--to", to]);
        assert!(output.status.success(), "{output:?}");
    }
    let output = run(&["--store", "mA,mB", "ls"]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("base/a"));
    // What is lost in the first comes from the second.
    fs_err::remove_dir_all(node.scratch.join("mA/packs")).unwrap();
    let output = run(&["--store", "mA,mB", "cat", "base/a:1", "/f0"]);
    assert!(output.status.success(), "{output:?}");
    assert!(output.stdout == fs_err::read(node.scratch.join("a/f0")).unwrap());
    assert!(!node.scratch.join("mA,mB").exists());
    let output = run(&["--store", "mA,", "ls"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
