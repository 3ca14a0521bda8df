//! `merge`, `export` and `build --from oci:…`: the way out to images and back. Needs no privileges.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use support::{Node, build_line};

/// A base and a workspace on it, in the node's store.
fn stack(label: &str) -> Node {
    let node = Node::new(label);
    node.build_stack();
    node
}

#[test]
fn a_stack_goes_out_as_an_image_and_comes_back() {
    let node = stack("images");
    let merged = node.json([
        "merge",
        "base/a:1",
        "workspace/a:1",
        "--name",
        "a",
        "--version",
        "merged",
    ]);
    assert_eq!(merged["reference"], "base/a:merged");
    assert_eq!(merged["store"]["raw_bytes"], 0);
    for (scheme, name, tag) in [
        ("oci", "layout", "1"),
        ("docker-archive", "saved.tar", "a:1"),
        ("tar", "plain.tar", ""),
    ] {
        let target = format!("{scheme}:{}", node.root().with_file_name(name).display());
        let exported = node.json(["export", "base/a:1", "workspace/a:1", "--to", &target]);
        assert_eq!(exported["layers"], 2);
        assert_eq!(exported["name"].as_str().unwrap_or_default(), tag);
        let back = node.json([
            "build",
            "--kind",
            "base",
            "--name",
            "back",
            "--version",
            scheme,
            "--from",
            &target,
        ]);
        assert_eq!(back["layer_id"], merged["layer_id"], "{target}");
    }
    let target = format!("oci:{}", node.root().with_file_name("layout").display());
    let lines = node.ok([
        "build",
        "--kind",
        "base",
        "--name",
        "each",
        "--version",
        "1",
        "--per-layer",
        "--from",
        &target,
    ]);
    let names: Vec<&str> = lines
        .lines()
        .map(|line| line.split(' ').next().unwrap())
        .collect();
    assert_eq!(names, ["base/each:1", "diff/each:1"]);
    // As JSON they are listed as the parts of a split are.
    let line = build_line("base/each:1", &target, &["--per-layer"]);
    let each = node.ok(["-o", "json"].into_iter().chain(line));
    let each: serde_json::Value = serde_json::from_str(&each).unwrap();
    let listed = |at: usize| &each["layers"][at]["reference"];
    assert_eq!(
        (listed(0), listed(1)),
        (&"base/each:1".into(), &"diff/each:1".into())
    );
    let wrong = build_line("workspace/sub:1", &target, &["--at", "../x"]);
    assert!(node.fails(2, wrong).contains("../x"));
    // Below a path it shows the same there.
    node.ok(build_line("workspace/sub:1", &target, &["--at", "/sub"]));
    let below = node.ok(["find", "workspace/sub:1", "sub/**"]);
    let whole = node.ok(["find", "base/a:merged"]);
    let names = |text: &str, prefix: &str| -> Vec<String> {
        let strip = |line: &str| line.strip_prefix(prefix).map(str::to_owned);
        text.lines()
            .filter_map(strip)
            .filter(|name| !name.is_empty())
            .collect()
    };
    assert_eq!(names(&below, "/sub/"), names(&whole, "/"));
    // On standard output the archive alone.
    let output = node.run(["export", "base/each:1", "diff/each:1", "--to", "tar:-"]);
    assert!(output.status.success());
    let plain = fs_err::read(node.root().with_file_name("plain.tar")).unwrap();
    assert!(output.stdout == plain, "{} bytes", output.stdout.len());
    let both = ["-o", "json", "export", "base/each:1", "--to", "tar:-"];
    let output = node.run(both);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
    assert!(String::from_utf8_lossy(&output.stderr).contains("standard output"));
    // A diff in front brings what it lies on.
    let target = format!("tar:{}", node.root().with_file_name("again.tar").display());
    let exported = node.json(["export", "diff/each:1", "--to", &target]);
    assert_eq!(exported["layers"], 2);
    assert_eq!(
        fs_err::read(node.root().with_file_name("again.tar")).unwrap(),
        fs_err::read(node.root().with_file_name("plain.tar")).unwrap()
    );
}

#[test]
fn failures_are_one_line_and_publish_nothing() {
    let node = stack("images-bad");
    let merge = |refs: &[&str]| {
        let tail = ["--name", "m", "--version", "1"];
        node.refuses(["merge"].iter().chain(refs).chain(&tail))
    };
    assert!(merge(&["workspace/a:1", "base/a:1"]).contains("at the bottom"));
    assert!(merge(&["base/a:1", "toolkit/none:1"]).contains("toolkit/none:1"));
    let build = |from: &str, extra: &[&str]| node.refuses(build_line("base/m:1", from, extra));
    assert!(build("oci:/no/such/layout", &[]).contains("/no/such/layout"));
    assert!(build("docker-archive:/no/such.tar", &[]).contains("/no/such.tar"));
    let wrong = build_line("base/m:1", "oci:/tmp", &["--parent", "base/a:1"]);
    assert!(node.fails(2, wrong).contains("--parent"));
    assert!(build("dir:/tmp", &["--per-layer"]).contains("--per-layer"));
    assert!(
        node.refuses(["export", "base/a:1", "--to", "zip:x"])
            .contains("zip")
    );
    assert!(
        node.fails(1, ["export", "base/a:1", "--to", "tar:/no/dir/x"])
            .contains("/no/dir/x")
    );
    assert!(!node.ok(["ls"]).contains("/m:1"));
}
