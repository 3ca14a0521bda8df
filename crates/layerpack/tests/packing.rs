//! `build --parent`, `build --diff-from`, standard input and `flatten` on the command line. Needs
//! no privileges.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::process::Stdio;

use layerpack_fixtures::tar::TarWriter;
use support::Node;

/// A node whose store has `base/b:1`, made of the directory `base`.
fn node(label: &str) -> Node {
    let node = Node::new(label);
    let base = node.scratch.mkdir("base").unwrap();
    for dir in ["usr/lib", "etc"] {
        fs_err::create_dir_all(base.join(dir)).unwrap();
    }
    std::os::unix::fs::symlink("usr/lib", base.join("lib")).unwrap();
    fs_err::write(base.join("etc/os"), "1").unwrap();
    fs_err::write(base.join("etc/old"), "1").unwrap();
    node.build("base/b:1", &base, &[]);
    node
}

fn named<'a>(kind: &'a str, version: &'a str, from: &'a str) -> Vec<&'a str> {
    let mut arguments = vec!["build", "--name", "x", "--version", version, "--from", from];
    if !kind.is_empty() {
        arguments.extend(["--kind", kind]);
    }
    arguments
}

#[track_caller]
fn wrong_usage(node: &Node, arguments: Vec<&str>) {
    assert_eq!(node.run(arguments).status.code(), Some(2));
}

fn write(node: &Node, name: &str, tar: &TarWriter) -> String {
    let path = node.scratch.write(name, tar.clone().finish()).unwrap();
    format!("tar:{}", path.display())
}

#[test]
fn a_layer_is_packed_against_its_parents() {
    let node = node("parents");
    let mut tar = TarWriter::new();
    tar.file("lib/tool", "2").hard_link("etc/linked", "etc/os");
    let from = write(&node, "upper.tar", &tar);
    let alone = node.fails(1, named("toolkit", "1", &from));
    assert!(alone.contains("etc/os"), "{alone}");
    let mut with = named("toolkit", "1", &from);
    with.extend(["--parent", "base/b:1"]);
    node.ok(&with);
    let shown = node.json(["inspect", "toolkit/x:1"]);
    assert_eq!(shown[0]["manifest"]["parents"][0]["reference"], "base/b:1");
    let merged = node.json([
        "merge",
        "base/b:1",
        "toolkit/x:1",
        "--name",
        "m",
        "--version",
        "1",
    ]);
    assert_eq!(merged["reference"], "base/m:1");
    let target = node.scratch.join("shown.tar");
    let to = format!("tar:{}", target.display());
    node.ok(["export", "base/m:1", "--to", &to]);
    let names = tar_names(&target);
    assert!(names.contains(&"usr/lib/tool".to_owned()), "{names:?}");
    assert!(names.contains(&"etc/linked".to_owned()), "{names:?}");

    let mut base = named("base", "2", &from);
    base.extend(["--parent", "base/b:1"]);
    assert!(node.fails(2, base).contains("lies at the bottom"));
    let mut unknown = named("toolkit", "2", &from);
    unknown.extend(["--parent", "base/none:1"]);
    assert!(node.fails(1, unknown).contains("base/none:1"));
}

fn tar_names(path: &Path) -> Vec<String> {
    let output = std::process::Command::new("tar")
        .arg("-tf")
        .arg(path)
        .output()
        .unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_difference_is_a_diff_that_brings_its_stack() {
    let node = node("difference");
    let new = node.scratch.join("base");
    fs_err::remove_file(new.join("etc/old")).unwrap();
    fs_err::write(new.join("etc/new"), "2").unwrap();
    let from = format!("dir:{}", new.display());
    let mut with = named("", "1", &from);
    with.extend(["--diff-from", "base/b:1"]);
    let line = node.ok(&with);
    assert!(line.starts_with("diff/x:1 "), "{line}");
    let counts = &node.json(["inspect", "diff/x:1"])[0]["manifest"]["counts"];
    // A whiteout is one of the others, whoever counts.
    let built = node.ok(["-o", "json"].iter().chain(&with));
    let built: serde_json::Value = serde_json::from_str(&built).unwrap();
    let built = &built["counts"];
    assert_eq!(
        (&built["others"], &built["whiteouts"]),
        (&counts["others"], &1.into())
    );
    assert_eq!(
        (&counts["files"], &counts["others"]),
        (&1.into(), &1.into())
    );
    // Named alone it brings the base along, and shows the directory as it is now.
    let first = node.scratch.join("first.erofs");
    let second = node.scratch.join("second.erofs");
    node.build("base/whole:1", &new, &[]);
    node.ok(["flatten", "diff/x:1", "--to", first.to_str().unwrap()]);
    node.ok(["flatten", "base/whole:1", "--to", second.to_str().unwrap()]);
    assert!(fs_err::read(&first).unwrap() == fs_err::read(&second).unwrap());

    let mut base = named("base", "2", &from);
    base.extend(["--diff-from", "base/b:1"]);
    assert!(node.fails(2, base).contains("a base lies on none"));
    let mut both = named("", "2", &from);
    both.extend(["--diff-from", "base/b:1", "--parent", "base/b:1"]);
    wrong_usage(&node, both);
    assert!(
        node.fails(2, named("diff", "2", &from))
            .contains("--diff-from")
    );
    wrong_usage(&node, named("", "2", &from));
}

#[test]
fn an_archive_comes_through_standard_input() {
    let node = Node::new("stdin");
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755).file("f", "content");
    let bytes = tar.clone().finish();
    let build = |version: &str, input: &[u8]| {
        let mut child = node
            .command()
            .args(["-q"])
            .args(named("base", version, "tar:-"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // It may end before it has read everything.
        let _ = stdin.write_all(input);
        drop(stdin);
        child.wait_with_output().unwrap()
    };
    let output = build("1", &bytes);
    assert!(output.status.success());
    let line = String::from_utf8(output.stdout).unwrap();
    let from = write(&node, "file.tar", &tar);
    let file = node.ok([
        "--store",
        node.scratch.join("other").to_str().unwrap(),
        "-q",
    ]
    .into_iter()
    .chain(named("base", "1", &from)));
    assert_eq!(line, file);
    for bad in [&b""[..], &bytes[..700], b"#!/bin/sh"] {
        let output = build("2", bad);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(
            message.starts_with("error: ") && message.lines().count() == 1,
            "{message}"
        );
        assert!(
            message.contains("standard input") || message.contains("archive -"),
            "{message}"
        );
    }
}

/// What is left out may have another name that is not: then the archive has to be read again, which
/// standard input can be if it is a file, from where it stood.
#[test]
fn standard_input_is_read_twice_if_it_is_a_file() {
    let node = Node::new("twice");
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755).file("out", "content");
    tar.hard_link("in", "out");
    let bytes = tar.clone().finish();
    let path = node.scratch.join("behind");
    fs_err::write(&path, [b"before the archive", bytes.as_slice()].concat()).unwrap();
    let build = |version: &str, input: Stdio| {
        let mut command = node.command();
        command.arg("-q").args(named("base", version, "tar:-"));
        command.args(["--exclude", "out"]).stdin(input);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut file = fs_err::File::open(&path).unwrap().into_parts().0;
    file.seek(SeekFrom::Start(18)).unwrap();
    let output = build("1", file.into()).wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{message}");
    let from = write(&node, "file.tar", &tar);
    let other = node.scratch.join("other");
    let mut same = vec!["--store", other.to_str().unwrap(), "-q"];
    same.extend(named("base", "1", &from));
    same.extend(["--exclude", "out"]);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), node.ok(same));

    let mut child = build("2", Stdio::piped());
    let mut stdin = child.stdin.take().unwrap();
    // It may end before it has read everything.
    let _ = stdin.write_all(&bytes);
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("instead of a pipe"), "{message}");
}

#[test]
fn a_flattened_stack_is_one_file() {
    let node = node("flatten");
    let file = node.scratch.join("image.erofs");
    let report = node.json(["flatten", "base/b:1", "--to", file.to_str().unwrap()]);
    let bytes = fs_err::metadata(&file).unwrap().len();
    assert_eq!(report["bytes"], bytes);
    assert_eq!(report["counts"]["files"], 2);
    let message = node.fails(
        1,
        ["flatten", "base/none:1", "--to", file.to_str().unwrap()],
    );
    assert!(message.contains("base/none:1"));
    let nowhere = node.scratch.join("no/dir/image");
    let message = node.fails(
        1,
        ["flatten", "base/b:1", "--to", nowhere.to_str().unwrap()],
    );
    assert!(message.contains("no/dir"), "{message}");
    assert_eq!(fs_err::metadata(&file).unwrap().len(), bytes);
}
