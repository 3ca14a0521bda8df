//! Layers between stores, and channels, through the command line. Needs no privileges.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use layerpack_fixtures::rng::Rng;
use serde_json::Value;
use support::Node;

/// A node with two versions of a layer that share most of their bytes, and another store's path.
fn two_versions(label: &str) -> (Node, String) {
    let node = Node::new(label);
    let bytes = Rng::new(7).bytes(900_000);
    for version in ["1", "2"] {
        let source = node.scratch.mkdir(format!("v{version}")).unwrap();
        node.scratch
            .write(format!("v{version}/same.bin"), &bytes)
            .unwrap();
        node.scratch
            .write(format!("v{version}/version"), version)
            .unwrap();
        let name = format!("workspace/w:{version}");
        node.build(&name, &source, &["--label", &format!("v={version}")]);
    }
    let other = node.scratch.join("other").display().to_string();
    (node, other)
}

fn moved(report: &Value) -> u64 {
    report["moved_bytes"].as_u64().unwrap()
}

#[test]
fn layers_are_pushed_pulled_and_copied() {
    let (node, other) = two_versions("transfer");
    let digest = node.json(["ls"])[0]["digest"].clone();
    let first = node.json(["push", "workspace/w:1", "--to", &other]);
    assert_eq!(first["layers"][0]["reference"], "workspace/w:1");
    assert_eq!(first["layers"][0]["outcome"], "created");
    assert!(moved(&first) > 800_000, "{first}");
    // Of the second version only what is new moves, of both together nothing.
    let second = node.json(["push", "workspace/*:*", "--to", &other]);
    assert!((1..50_000).contains(&moved(&second)), "{second}");
    let again = node.json(["push", "--all", "--to", &other]);
    assert_eq!(moved(&again), 0);
    assert_eq!(again["layers"][1]["outcome"], "already");
    let listed: Value =
        serde_json::from_str(&node.ok(["--store", &other, "-o", "json", "ls"])).unwrap();
    assert_eq!(listed[0]["digest"], digest);
    node.ok([
        "--store",
        &other,
        "verify",
        "workspace/w:1",
        "workspace/w:2",
    ]);

    let third = node.scratch.join("third").display().to_string();
    let text = node.ok(["copy", "workspace/w:2", "--from", &other, "--to", &third]);
    assert!(
        text.contains("workspace/w:2") && text.contains("written to"),
        "{text}"
    );
    node.ok(["--store", &third, "pull", "workspace/w:1", "--from", &other]);
    node.ok(["--store", &third, "verify", "workspace/w:1"]);
}

#[test]
fn what_cannot_be_copied_is_told() {
    let (node, other) = two_versions("transfer-bad");
    let error = node.fails(1, ["push", "workspace/none:1", "--to", &other]);
    assert!(error.contains("workspace/none:1"), "{error}");
    let error = node.refuses(["push", "base/*:*", "--to", &other]);
    assert!(error.contains("no layer"), "{error}");
    let store = node.store().display().to_string();
    let error = node.fails(2, ["push", "--all", "--to", &store]);
    assert!(error.contains("two stores"), "{error}");
    let error = node.refuses(["pull", "--all", "--from", &other]);
    assert!(error.contains("no layer"), "{error}");
    for usage in [
        &["push", "--to", "x"][..],
        &["push", "base/a:1"],
        &["copy", "base/a:1", "--to", "x"],
        &["push", "--all", "base/a:1", "--to", "x"],
    ] {
        assert_eq!(node.run(usage).status.code(), Some(2), "{usage:?}");
    }
    // Another content under the same version.
    let source = node.scratch.join("v2");
    let from = format!("dir:{}", source.display());
    node.ok([
        "--store",
        &other,
        "build",
        "--kind",
        "workspace",
        "--name",
        "w",
        "--version",
        "1",
        "--from",
        &from,
    ]);
    let error = node.fails(1, ["push", "workspace/w:1", "--to", &other]);
    assert!(error.contains("already published"), "{error}");
}

#[test]
fn channels_move_and_stand_for_versions() {
    let (node, other) = two_versions("channels");
    let set = node.json(["tag", "workspace/w:1", "latest"]);
    assert_eq!(set["channel"], "workspace/w@latest");
    assert_eq!(set["history"], serde_json::json!([]));
    assert_eq!(node.ok(["cat", "workspace/w@latest", "version"]), "1");
    let text = node.ok(["tag", "workspace/w:2", "latest"]);
    assert_eq!(
        text,
        "workspace/w@latest is workspace/w:2 (was workspace/w:1)\n"
    );
    let output = node.run(["cat", "workspace/w@latest", "version"]);
    assert_eq!(output.stdout, b"2");
    assert_eq!(output.stderr, b"workspace/w@latest is workspace/w:2\n");
    let list = node.json(["tag"]);
    assert_eq!(list[0]["reference"], "workspace/w:2");
    assert_eq!(list[0]["history"][0]["reference"], "workspace/w:1");
    assert!(node.ok(["tag"]).contains("workspace/w@latest"));
    node.ok(["push", "workspace/w@latest", "--to", &other]);
    let there: Value =
        serde_json::from_str(&node.ok(["--store", &other, "-o", "json", "ls"])).unwrap();
    assert_eq!(there[0]["reference"], "workspace/w:2");
    assert_eq!(
        node.json(["inspect", "workspace/w@latest"])[0]["reference"],
        "workspace/w:2"
    );

    for (arguments, part) in [
        (
            &["cat", "workspace/w@none", "version"][..],
            "no such channel",
        ),
        (&["tag", "workspace/w:9", "latest"], "workspace/w:9"),
        (&["tag", "workspace/w:1", "../x"], "version"),
        (&["untag", "workspace/w@none"], "no such channel"),
        (&["rm", "workspace/w@latest"], "invalid reference"),
    ] {
        let error = node.refuses(arguments);
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
    assert_eq!(node.run(["tag", "workspace/w:1"]).status.code(), Some(2));
    node.ok(["rm", "workspace/w:2"]);
    let error = node.fails(1, ["verify", "workspace/w@latest"]);
    assert!(error.contains("no longer published"), "{error}");
    assert_eq!(
        node.ok(["untag", "workspace/w@latest"]),
        "workspace/w@latest\n"
    );
    assert_eq!(node.json(["tag"]), serde_json::json!([]));
}
