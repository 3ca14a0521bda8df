//! Bad input to commands that need no privileges: one clear line that names the object and the
//! remedy, a code that is not zero, nothing half-published.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::path::{Path, PathBuf};

use support::Node;

fn build_arguments<'a>(reference: &'a str, from: &'a str) -> Vec<&'a str> {
    let (kind, rest) = reference.split_once('/').unwrap();
    let (name, version) = rest.split_once(':').unwrap();
    vec![
        "-q",
        "build",
        "--kind",
        kind,
        "--name",
        name,
        "--version",
        version,
        "--from",
        from,
    ]
}

/// All files of a store, by path below it.
fn objects(store: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![store.to_owned()];
    while let Some(dir) = pending.pop() {
        let Ok(entries) = fs_err::read_dir(&dir) else {
            continue;
        };
        for entry in entries.flatten() {
            if entry.file_type().unwrap().is_dir() {
                pending.push(entry.path());
            } else {
                found.push(entry.path().strip_prefix(store).unwrap().to_owned());
            }
        }
    }
    found.sort();
    found
}

fn published(node: &Node) -> Vec<PathBuf> {
    objects(&node.store().join("refs"))
}

#[test]
fn a_missing_source() {
    let node = Node::new("missing");
    for from in ["dir:/nowhere/at-all", "tar:/nowhere/at-all"] {
        let error = node.fails(1, build_arguments("base/a:1", from));
        assert!(error.contains("/nowhere/at-all"), "{error}");
    }
    for from in ["/tmp", "ftp:/tmp", "dir:"] {
        let error = node.fails(2, build_arguments("base/a:1", from));
        assert!(
            error.contains("dir:PATH") && error.contains("tar:PATH"),
            "{error}"
        );
    }
    assert!(published(&node).is_empty());
}

#[test]
fn a_source_of_the_wrong_type() {
    let node = Node::new("type");
    let directory = node.scratch.mkdir("directory").unwrap();
    let file = node
        .scratch
        .write("file", "this is no archive, however long one looks at it")
        .unwrap();
    for from in [
        format!("tar:{}", directory.display()),
        format!("dir:{}", file.display()),
        format!("tar:{}", file.display()),
    ] {
        let error = node.fails(1, build_arguments("base/a:1", &from));
        assert!(error.contains(from.split_once(':').unwrap().1), "{error}");
    }
    assert!(published(&node).is_empty());
}

#[test]
fn names_that_are_none() {
    let node = Node::new("names");
    let source = node.scratch.mkdir("source").unwrap();
    let from = format!("dir:{}", source.display());
    for (kind, name, version) in [
        ("image", "a", "1"),
        ("base", "../a", "1"),
        ("base", "a", "1/2"),
        ("base", "", "1"),
        ("diff", "a", "1"),
    ] {
        let error = node.fails(
            2,
            [
                "build",
                "--kind",
                kind,
                "--name",
                name,
                "--version",
                version,
                "--from",
                &from,
            ],
        );
        assert!(error.len() > 20, "{error}");
    }
    let error = node.fails(
        2,
        [
            "build",
            "--kind",
            "base",
            "--name",
            "a",
            "--version",
            "1",
            "--from",
            &from,
            "--label",
            "nokey",
        ],
    );
    assert!(error.contains("KEY=VALUE"), "{error}");
    assert!(published(&node).is_empty());
}

#[test]
fn an_unknown_reference() {
    let node = Node::new("unknown");
    let source = node.scratch.mkdir("source").unwrap();
    node.build("base/known:1", &source, &[]);
    for arguments in [
        &["inspect", "base/unknown:1"][..],
        &["inspect", "--stack", "base/known:1", "base/unknown:1"],
        &["verify", "base/unknown:1"],
        &["rm", "base/known:1", "base/unknown:1"],
    ] {
        let error = node.fails(1, arguments);
        assert!(error.contains("base/unknown:1"), "{error}");
    }
    let mut arguments = build_arguments("toolkit/t:1", "dir:/etc");
    arguments.extend(["--parent", "base/unknown:1"]);
    assert!(node.fails(1, arguments).contains("base/unknown:1"));
    for text in [
        "known",
        "base/known",
        "base:1",
        "nokind/known:1",
        "base/known:1:2/",
    ] {
        let error = node.fails(2, ["inspect", text]);
        assert!(
            error.contains("base/debian:12"),
            "the form of a reference is shown: {error}"
        );
    }
    assert_eq!(
        published(&node).len(),
        1,
        "nothing was removed, nothing was added"
    );
}

#[test]
fn a_version_never_changes() {
    let node = Node::new("version");
    let one = node.scratch.mkdir("one").unwrap();
    let two = node.scratch.mkdir("two").unwrap();
    node.scratch.write("one/file", "one").unwrap();
    node.scratch.write("two/file", "two").unwrap();
    let digest = node.build("workspace/w:1", &one, &[]);
    let error = node.fails(
        1,
        build_arguments("workspace/w:1", &format!("dir:{}", two.display())),
    );
    assert!(
        error.contains("workspace/w:1") && error.contains(&digest),
        "{error}"
    );
    assert_eq!(
        node.json(["inspect", "workspace/w:1"])[0]["digest"],
        digest.as_str()
    );
    assert_eq!(published(&node).len(), 1);
}

#[test]
fn a_damaged_object_is_found_and_named() {
    let node = Node::new("damage");
    let source = node.scratch.mkdir("source").unwrap();
    let noise: Vec<u8> = (0..400_000u32)
        .flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    node.scratch.write("source/noise", noise).unwrap();
    node.build("base/a:1", &source, &[]);
    let all = objects(&node.store());
    let mut tried = 0;
    for object in &all {
        let path = node.store().join(object);
        let name = object.to_str().unwrap();
        // The index only finds chunks to share; the marker has a test of its own in the store.
        let is_no_object = name.starts_with("tmp/") || name == ".reserve";
        if name.starts_with("index/") || is_no_object || name == "layerpack.json" {
            continue;
        }
        let good = fs_err::read(&path).unwrap();
        let mut bad = good.clone();
        let middle = bad.len() / 2;
        bad[middle] ^= 0x20;
        let mut short = good.clone();
        short.truncate(middle);
        for bytes in [bad, short] {
            fs_err::write(&path, bytes).unwrap();
            let output = node.run(["verify", "base/a:1"]);
            assert_eq!(
                output.status.code(),
                Some(1),
                "{name}: {}",
                support::describe(&output)
            );
            let text = String::from_utf8(output.stderr).unwrap()
                + &String::from_utf8(output.stdout).unwrap();
            let object = name.rsplit('/').next().unwrap();
            assert!(
                text.contains(object) || name.starts_with("refs/"),
                "{name} is not named: {text}"
            );
            tried += 1;
        }
        fs_err::write(&path, good).unwrap();
    }
    assert!(tried >= 10, "only {tried} kinds of damage: {all:?}");
    node.ok(["verify", "base/a:1"]);
}

#[test]
fn a_store_that_cannot_be_used() {
    let node = Node::new("store");
    let source = node.scratch.mkdir("source").unwrap();
    let from = format!("dir:{}", source.display());
    let file = node.scratch.write("file", "x").unwrap();
    for store in [
        format!("{}/store", file.display()),
        file.display().to_string(),
        "s3://bucket/x".to_owned(),
        "file://relative/x".to_owned(),
    ] {
        let mut arguments = vec!["--store", &store];
        arguments.extend(build_arguments("base/a:1", &from));
        let error = node.refuses(arguments);
        assert!(error.contains(store.trim_end_matches("/store")), "{error}");
    }
    let newer = node.scratch.mkdir("newer").unwrap();
    fs_err::write(
        newer.join("layerpack.json"),
        r#"{"format":1,"incompat":["time-travel"]}"#,
    )
    .unwrap();
    let newer = newer.display().to_string();
    let error = node.fails(1, ["--store", &newer, "ls"]);
    assert!(
        error.contains("time-travel") || error.contains("newer"),
        "{error}"
    );
}

#[test]
fn errors_can_be_json_too() {
    let node = Node::new("json");
    let output = node.run(["-o", "json", "inspect", "base/unknown:1"]);
    assert_eq!(output.status.code(), Some(1));
    let error: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(
        error["error"]["message"]
            .as_str()
            .unwrap()
            .contains("base/unknown:1")
    );
}

#[test]
fn a_bad_reference_is_explained_once() {
    let node = Node::new("once");
    for arguments in [
        &["inspect", "known-as-nothing"][..],
        &["verify", "known-as-nothing"],
        &["rm", "known-as-nothing"],
        &["export", "known-as-nothing", "--to", "tar:/nowhere/x"],
    ] {
        let error = node.fails(2, arguments);
        for part in ["known-as-nothing", "base/debian:12", "has no"] {
            let times = error.matches(part).count();
            assert!(times <= 1, "{times} times {part}: {error}");
        }
        assert!(
            error.contains("known-as-nothing") && error.contains("base/debian:12"),
            "{error}"
        );
    }
}

#[test]
fn a_mount_point_in_the_node_root_is_refused() {
    let node = Node::new("inside");
    let source = node.scratch.mkdir("source").unwrap();
    node.build("base/a:1", &source, &[]);
    let root = node.scratch.mkdir("node/layers").unwrap();
    let link = node.scratch.join("link");
    fs_err::os::unix::fs::symlink(node.root(), &link).unwrap();
    for (point, part) in [
        (root, "node root"),
        (node.root(), "node root"),
        (link, "elsewhere"),
        (node.scratch.path().to_owned(), "hide"),
    ] {
        let error = node.fails(1, ["mount", "base/a:1", point.to_str().unwrap()]);
        assert!(error.contains(part) && error.contains("node"), "{error}");
    }
    assert!(!node.root().join("daemon.sock").exists());
}

/// An archive whose warnings are two: one entry leaves the root, one has a foreign attribute.
fn warned(node: &Node, odd: bool) -> String {
    use layerpack_fixtures::tar::{Header, TarWriter, kind};
    let mut tar = TarWriter::new();
    tar.file("../up", "");
    tar.pax(&[("SCHILY.xattr.trusted.t", "1")]);
    tar.file("labelled", "");
    if odd {
        tar.entry(&Header::new(kind::FILE, "odd").owner(u32::MAX, 0), b"");
    }
    let path = node.scratch.write("warned.tar", tar.finish()).unwrap();
    format!("tar:{}", path.display())
}

#[test]
fn warnings_are_printed_once() {
    let node = Node::new("warnings");
    let from = warned(&node, false);
    let mut arguments = build_arguments("base/a:1", &from);
    arguments.remove(0);
    let output = node.run(&arguments);
    assert!(output.status.success(), "{}", support::describe(&output));
    let text = String::from_utf8(output.stderr).unwrap();
    for part in ["../up", "trusted.t of 1 entries"] {
        assert_eq!(text.matches(part).count(), 1, "{text}");
    }
    assert_eq!(text.matches("warning: ").count(), 2, "{text}");
    assert!(!text.contains("WARN"), "{text}");
    // Quiet: not a word. JSON: in the document only.
    let output = node.run(build_arguments("base/a:1", &from));
    assert!(output.status.success() && output.stderr.is_empty());
    for quiet in [true, false] {
        let mut json = vec!["-o", "json"];
        json.extend(&build_arguments("base/a:1", &from)[usize::from(!quiet)..]);
        let output = node.run(json);
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(document["warnings"].as_array().unwrap().len(), 2);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!text.contains("../up"), "{text}");
    }
    // What is asked for is kept, and no longer warned of.
    let mut keep = vec!["-o", "json"];
    keep.extend(build_arguments("base/b:1", &from));
    keep.extend(["--xattr", "trusted.*"]);
    let document: serde_json::Value = serde_json::from_slice(&node.run(keep).stdout).unwrap();
    assert_eq!(document["warnings"].as_array().unwrap().len(), 1);
}

#[test]
fn a_failed_build_is_one_error_line() {
    let node = Node::new("failed");
    let from = warned(&node, true);
    let error = node.fails(1, build_arguments("base/a:1", &from));
    for part in ["odd", "4294967295", "exclude it"] {
        assert!(error.contains(part), "{error}");
    }
    let output = node.run(build_arguments("base/a:1", &from));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "quiet is one line: {text}");
    let output = node.run(&build_arguments("base/a:1", &from)[1..]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.matches("../up").count(), 1, "{text}");
    assert_eq!(text.matches("error: ").count(), 1, "{text}");
    assert!(published(&node).is_empty());
}

#[test]
fn what_the_store_warns_of_is_reported() {
    let node = Node::new("store-warns");
    let source = node.scratch.mkdir("source").unwrap();
    node.scratch.write("source/file", "x").unwrap();
    node.build("base/a:1", &source, &[]);
    let from = format!("dir:{}", source.display());
    let damage = || {
        for object in objects(&node.store()) {
            if object.starts_with("meta") {
                fs_err::write(node.store().join(object), "no longer").unwrap();
            }
        }
    };
    damage();
    let mut json = vec!["-o", "json"];
    json.extend(build_arguments("base/b:1", &from));
    let document: serde_json::Value = serde_json::from_slice(&node.run(json).stdout).unwrap();
    let warnings = document["warnings"].to_string();
    assert!(warnings.contains("replaced"), "{warnings}");
    damage();
    let output = node.run(&build_arguments("base/c:1", &from)[1..]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.matches("replaced").count(), 1, "{text}");
    // What cannot be read beside the index that is needed.
    let stray = node.store().join("index").join("0".repeat(64));
    fs_err::write(stray, "no index").unwrap();
    let merge = ["merge", "base/a:1", "--name", "m", "--version", "1"];
    let document = node.json(merge);
    let warnings = document["warnings"].as_array().unwrap();
    assert!(
        warnings
            .iter()
            .any(|w| w.as_str().unwrap().contains("index")),
        "{document}"
    );
}

#[test]
fn a_cut_off_archive_says_what_to_do() {
    let node = Node::new("cut");
    let whole = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 0xec];
    let path = node.scratch.write("cut.tar.gz", whole).unwrap();
    let error = node.fails(
        1,
        build_arguments("base/a:1", &format!("tar:{}", path.display())),
    );
    assert!(
        error.contains("the archive is incomplete: fetch or make it again"),
        "{error}"
    );
}
