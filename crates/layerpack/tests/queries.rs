//! What is in layers, without mounting them, through the command line. Needs no privileges.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::ffi::OsStr;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use layerpack_fixtures::rng::Rng;
use serde_json::{Value, json};
use support::Node;

/// base/os:1 with links, a sparse file, odd names; workspace/w:1 above it; a toolkit that changes
/// some of it.
fn layers(label: &str) -> Node {
    let node = Node::new(label);
    let s = &node.scratch;
    let os = s.mkdir("os/usr/lib").unwrap();
    let os = os.parent().unwrap().parent().unwrap().to_owned();
    let noise = Rng::new(3).bytes(400_000);
    s.write("os/usr/lib/libbig.so", &noise).unwrap();
    s.write("os/usr/lib/note.txt", "os\n").unwrap();
    s.write("os/empty", "").unwrap();
    symlink("usr/lib", os.join("lib")).unwrap();
    symlink("/lib/libbig.so", os.join("usr/abs")).unwrap();
    symlink("../../../../../usr/lib/note.txt", os.join("usr/up")).unwrap();
    symlink("loop", os.join("loop")).unwrap();
    fs_err::write(os.join(OsStr::from_bytes(b"odd\xff\n")), "odd").unwrap();
    let mut sparse = fs_err::File::create(os.join("sparse")).unwrap();
    sparse.write_all(b"begin").unwrap();
    sparse.seek(SeekFrom::Start(5 << 20)).unwrap();
    sparse.write_all(b"end").unwrap();
    sparse.set_len(6 << 20).unwrap();
    drop(sparse);
    node.build("base/os:1", &os, &["--label", "tier=gold"]);

    let work = s.mkdir("work/usr/lib").unwrap();
    let work = work.parent().unwrap().parent().unwrap().to_owned();
    s.write("work/usr/lib/note.txt", "work\n").unwrap();
    s.write("work/copy.so", &noise).unwrap();
    node.build("workspace/w:1", &work, &[]);

    fs_err::set_permissions(os.join("empty"), std::fs::Permissions::from_mode(0o600)).unwrap();
    fs_err::write(os.join("usr/lib/note.txt"), "os, next\n").unwrap();
    fs_err::remove_file(os.join("loop")).unwrap();
    fs_err::write(os.join("new"), "new").unwrap();
    node.build("base/os:2", &os, &["--label", "tier=silver"]);
    node
}

#[test]
fn files_are_shown_through_links_with_their_holes() {
    let node = layers("cat");
    assert_eq!(node.ok(["cat", "base/os:1", "/lib/note.txt"]), "os\n");
    assert_eq!(node.ok(["cat", "base/os:1", "usr/up"]), "os\n");
    assert_eq!(
        node.ok(["cat", "base/os:1", "workspace/w:1", "lib/note.txt"]),
        "work\n"
    );
    assert_eq!(node.ok(["cat", "base/os:1", "empty"]), "");
    let big = node.run(["cat", "base/os:1", "usr/abs"]).stdout;
    assert!(big == fs_err::read(node.scratch.join("os/usr/lib/libbig.so")).unwrap());
    let sparse = node.run(["cat", "base/os:1", "sparse"]).stdout;
    assert!(sparse == fs_err::read(node.scratch.join("os/sparse")).unwrap());
    let odd = node
        .command()
        .args(["cat", "base/os:1"])
        .arg(OsStr::from_bytes(b"odd\xff\n"))
        .output()
        .unwrap();
    assert_eq!(odd.stdout, b"odd");
    for (path, part) in [
        ("none", "no such file"),
        ("usr", "directory, not a file"),
        ("loop", "symbolic links"),
        ("empty/x", "not a directory"),
    ] {
        let error = node.fails(1, ["cat", "base/os:1", path]);
        assert!(error.contains(part), "{path}: {error}");
    }
}

#[test]
fn no_damaged_byte_is_shown() {
    let node = layers("cat-damage");
    let packs = node.store().join("packs");
    for dir in fs_err::read_dir(packs).unwrap() {
        for pack in fs_err::read_dir(dir.unwrap().path()).unwrap() {
            let path = pack.unwrap().path();
            let mut bytes = fs_err::read(&path).unwrap();
            for byte in bytes.iter_mut().skip(32).step_by(1000) {
                *byte ^= 1;
            }
            let mut permissions = fs_err::metadata(&path).unwrap().permissions();
            permissions.set_mode(0o644);
            fs_err::set_permissions(&path, permissions).unwrap();
            fs_err::write(&path, bytes).unwrap();
        }
    }
    let error = node.fails(1, ["cat", "base/os:1", "usr/lib/libbig.so"]);
    assert!(error.contains("packs/"), "{error}");
}

#[test]
fn entries_are_found() {
    let node = layers("find");
    let find = |arguments: &[&str]| -> Vec<String> {
        let text = node.ok(["find", "base/os:1"].iter().chain(arguments));
        text.lines().map(str::to_owned).collect()
    };
    assert_eq!(find(&["*.so"]), ["/usr/lib/libbig.so"]);
    assert_eq!(find(&["usr/*", "--type", "l"]), ["/usr/abs", "/usr/up"]);
    assert_eq!(find(&["--type", "f", "--size", "+1m"]), ["/sparse"]);
    assert_eq!(
        find(&["**/lib/*", "--name", "note*"]),
        ["/usr/lib/note.txt"]
    );
    assert_eq!(find(&["odd*"]), ["/odd\\xff\\n"]);
    assert_eq!(find(&["nothing"]), [] as [&str; 0]);
    let all = node.json(["find", "base/os:1"]);
    assert_eq!(all.as_array().unwrap().len(), 12, "{all}");
    let odd = node.json(["find", "base/os:1", "odd*"]);
    assert_eq!(odd[0]["path_hex"], "2f6f6464ff0a");
    assert_eq!(odd[0]["size"], 3);
    let link = node.json(["find", "base/os:1", "lib", "--type", "l"]);
    assert_eq!(link[0]["target"], "usr/lib");
    // Through a stack: the upper layer's file.
    let stack = node.json(["find", "base/os:1", "workspace/w:1", "note.txt"]);
    assert_eq!(stack[0]["size"], 5);
    let error = node.fails(2, ["find", "base/os:1", "--type", "x"]);
    assert!(error.contains("fdlcbpsw"), "{error}");
    for pattern in [&["[a"][..], &["--name", "[a"]] {
        let error = node.fails(2, ["find", "base/os:1"].iter().chain(pattern));
        assert!(error.contains("[a"), "{error}");
    }
    assert_eq!(
        node.run(["find", "base/os:1", "--size", "big"])
            .status
            .code(),
        Some(2)
    );
}

#[test]
fn layers_are_compared_without_their_data() {
    let node = layers("diff");
    // No pack can be read: metadata and digests are enough.
    let packs = node.store().join("packs");
    fs_err::rename(&packs, node.store().join("gone")).unwrap();
    let text = node.ok(["diff", "base/os:1", "base/os:2"]);
    let mut lines: Vec<&str> = text.lines().collect();
    lines.retain(|line| !line.starts_with("C /  ") && !line.starts_with("C /usr"));
    assert_eq!(lines, ["C /empty  (mode)", "D /loop", "A /new"], "{text}");
    let changes = node.json(["diff", "base/os:1", "base/os:2"]);
    let note = changes
        .as_array()
        .unwrap()
        .iter()
        .find(|c| c["path"] == "/usr/lib/note.txt")
        .unwrap();
    assert_eq!(note["change"], "changed");
    assert_eq!(note["old_size"], 3);
    assert_eq!(note["new_size"], 9);
    assert_eq!(note["differences"][0], "content");
    assert_eq!(node.json(["diff", "base/os:1", "base/os:1"]), json!([]));
    // A stack against its base.
    let above = node.json(["diff", "base/os:1", "base/os:1,workspace/w:1"]);
    let paths: Vec<&str> = above
        .as_array()
        .unwrap()
        .iter()
        .filter(|c| c["type"] == "file")
        .map(|c| c["path"].as_str().unwrap())
        .collect();
    assert_eq!(paths, ["/copy.so", "/usr/lib/note.txt"]);
    node.fails(1, ["diff", "base/os:1", "base/none:1"]);
}

#[test]
fn sizes_and_sharing() {
    let node = layers("du");
    let du = node.json(["du"]);
    let layer = |name: &str| -> Value {
        let layers = du["layers"].as_array().unwrap();
        layers
            .iter()
            .find(|l| l["reference"] == name)
            .unwrap()
            .clone()
    };
    let work = layer("workspace/w:1");
    assert!(work["all"]["raw_bytes"].as_u64().unwrap() >= 400_000);
    assert_eq!(work["unique"]["raw_bytes"], 5);
    assert_eq!(layer("base/os:1")["unique"]["raw_bytes"], 3);
    assert_eq!(du["kinds"][0]["layers"], 2);
    assert_eq!(du["unreadable"], json!([]));
    let text = node.ok(["du"]);
    assert!(
        text.contains("all base (2)") && text.contains("UNIQUE"),
        "{text}"
    );
    let one = node.json(["du", "workspace/w:1"]);
    assert_eq!(one["layers"].as_array().unwrap().len(), 1);
    node.fails(1, ["du", "workspace/none:1"]);

    let shown = node.json(["inspect", "workspace/w:1"]);
    assert_eq!(shown[0]["sharing"]["with"].as_array().unwrap().len(), 2);
    assert_eq!(shown[0]["sharing"]["with"][0]["raw_bytes"], 400_000);
    let text = node.ok(["inspect", "workspace/w:1"]);
    assert!(text.contains("with base/os:1"), "{text}");
    let bare = node.json(["inspect", "--no-sharing", "workspace/w:1"]);
    assert!(bare[0].get("sharing").is_none());
}

#[test]
fn lists_are_filtered() {
    let node = layers("ls-filters");
    let names = |arguments: &[&str]| -> Vec<String> {
        let text = node.ok(["-o", "json", "ls"].iter().chain(arguments));
        let list: Value = serde_json::from_str(&text).unwrap();
        let list = list.as_array().unwrap().iter();
        list.map(|l| l["reference"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(names(&["--name", "o*"]), ["base/os:1", "base/os:2"]);
    assert_eq!(names(&["--label", "tier=gold"]), ["base/os:1"]);
    assert_eq!(names(&["--label", "tier"]), ["base/os:1", "base/os:2"]);
    assert_eq!(
        names(&["--kind", "workspace", "--name", "os"]),
        [] as [&str; 0]
    );
}
