//! Keys, signatures and the node's policy through the command line.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a failed test may say so by a panic"
)]

mod support;

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use support::Node;

/// A node, one layer `base/a:1`, and a key.
fn prepared(label: &str) -> (Node, PathBuf, String) {
    let node = Node::new(label);
    let source = node.scratch.join("source");
    fs_err::create_dir_all(source.join("etc")).unwrap();
    fs_err::write(source.join("etc/name"), "a\n").unwrap();
    node.build("base/a:1", &source, &[]);
    let (file, public) = key(&node, "key");
    (node, file, public)
}

fn key(node: &Node, name: &str) -> (PathBuf, String) {
    let file = node.scratch.join(name);
    let public = node.ok(["-q", "key", "generate", file.to_str().unwrap()]);
    (file, public.trim_end().to_owned())
}

#[test]
fn a_key_is_made_once_and_is_its_owners_alone() {
    let (node, file, public) = prepared("key");
    let mode =
        |path: &std::path::Path| fs_err::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&file), 0o600);
    let beside = node.scratch.join("key.pub");
    for path in [&file, &beside] {
        let shown = node.json(["key", "show", path.to_str().unwrap()]);
        assert_eq!(shown["public"], public.as_str());
    }
    let secret = fs_err::read(&file).unwrap();
    let error = node.fails(1, ["key", "generate", file.to_str().unwrap()]);
    assert!(error.contains("exists"), "{error}");
    assert_eq!(fs_err::read(&file).unwrap(), secret);

    fs_err::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
    let error = node.fails(1, ["sign", "base/a:1", "--key", file.to_str().unwrap()]);
    assert!(error.contains("chmod 600"), "{error}");
    // The public half, or what is no key at all, is not taken for a secret that leaked.
    let error = node.fails(2, ["sign", "base/a:1", "--key", beside.to_str().unwrap()]);
    assert!(
        error.contains("holds a public key") && !error.contains("chmod"),
        "{error}"
    );
    let text = node.scratch.write("text", "hello\n").unwrap();
    for command in [&["sign", "base/a:1", "--key"][..], &["key", "show"]] {
        let error = node.fails(1, command.iter().copied().chain([text.to_str().unwrap()]));
        assert!(
            error.contains("not a key") && !error.contains("chmod"),
            "{error}"
        );
    }
}

#[test]
fn what_is_signed_is_shown_and_can_be_asked_for() {
    let (node, file, public) = prepared("sign");
    let file = file.to_str().unwrap();
    let error = node.fails(1, ["verify", "--signed", "base/a:1"]);
    assert!(error.contains("base/a:1 has no good signature"), "{error}");
    let signed = node.json(["sign", "base/a:1", "--key", file]);
    assert_eq!(signed[0]["new"], true);
    assert_eq!(
        node.json(["sign", "base/a:1", "--key", file])[0]["new"],
        false
    );
    node.ok(["verify", "--signed", "base/a:1"]);
    node.ok(["verify", "--signed", "--key", &public, "base/a:1"]);
    node.ok(["verify", "--signed", "--key", file, "base/a:1"]);
    let (_, other) = key(&node, "other");
    let error = node.fails(1, ["verify", "--signed", "--key", &other, "base/a:1"]);
    assert!(error.contains("by the keys given"), "{error}");
    assert_eq!(
        node.json(["inspect", "base/a:1"])[0]["signers"][0],
        public.as_str()
    );

    // At publication, for each command that publishes.
    let source = node.scratch.join("source");
    node.build("toolkit/t:1", &source, &["--sign", file]);
    node.ok(["verify", "--signed", "--key", &public, "toolkit/t:1"]);
    node.ok([
        "-q",
        "merge",
        "base/a:1",
        "toolkit/t:1",
        "--name",
        "m",
        "--version",
        "1",
        "--sign",
        file,
    ]);
    node.ok(["verify", "--signed", "--key", &public, "base/m:1"]);

    // The key is read before anything is published.
    let from = format!("dir:{}", source.display());
    node.fails(
        1,
        [
            "build",
            "--kind",
            "base",
            "--name",
            "b",
            "--version",
            "1",
            "--from",
            &from,
            "--sign",
            "/nowhere",
        ],
    );
    node.fails(1, ["inspect", "base/b:1"]);
}

/// The whole store: every layer that it has is to be signed, and those that are not are named.
#[test]
fn a_whole_store_is_asked_for_signatures() {
    let (node, file, public) = prepared("sign-all");
    let file = file.to_str().unwrap();
    let source = node.scratch.join("source");
    node.build("toolkit/t:1", &source, &["--sign", file]);
    let (foreign, other) = key(&node, "foreign");
    let fails = |line: &[&str]| {
        let output = node.run(line);
        assert_eq!(output.status.code(), Some(1), "{line:?}");
        let told = String::from_utf8(output.stderr).unwrap();
        let shown = String::from_utf8(output.stdout).unwrap();
        assert!(shown.contains("toolkit/t:1 is whole"), "{shown}");
        told
    };
    let error = fails(&["verify", "--all", "--signed"]);
    assert!(
        error.contains("error: base/a:1 has no good signature:"),
        "{error}"
    );
    let output = node.run(["-o", "json", "verify", "--all", "--signed"]);
    assert_eq!(output.status.code(), Some(1));
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["unsigned"], serde_json::json!(["base/a:1"]));
    assert_eq!(document["layers"].as_array().unwrap().len(), 2);

    node.ok(["sign", "base/a:1", "--key", foreign.to_str().unwrap()]);
    node.ok(["verify", "--all", "--read-data", "--signed"]);
    let error = fails(&["verify", "--all", "--signed", "--key", &public]);
    assert!(
        error.contains("error: base/a:1 has no good signature by the keys given"),
        "{error}"
    );
    let document = node.json([
        "verify", "--all", "--signed", "--key", &public, "--key", &other,
    ]);
    assert_eq!(document["unsigned"], serde_json::json!([]));
    assert!(node.json(["verify", "--all"]).get("unsigned").is_none());
    let shown = node.json(["verify", "--signed", "--key", &other, "base/a:1"]);
    assert_eq!(shown[0]["signed"], true);

    // What is neither key nor file is wrong usage, and is not repeated: it may be a secret.
    let error = node.fails(2, ["verify", "--all", "--signed", "--key", "s3cret"]);
    assert!(
        error.contains("neither a public key") && !error.contains("s3cret"),
        "{error}"
    );
}

#[test]
fn privileged_a_node_mounts_only_what_its_policy_trusts() {
    let (node, file, public) = prepared("policy");
    let directory = node.scratch.join("mnt");
    fs_err::create_dir_all(&directory).unwrap();
    let directory = directory.to_str().unwrap();
    fs_err::create_dir_all(node.root()).unwrap();
    let policy = node.root().join("policy.toml");
    let rules = |mode: &str| format!("mode = \"{mode}\"\n[keys]\nci = \"{public}\"\n");

    fs_err::write(&policy, rules("require")).unwrap();
    let error = node.fails(1, ["mount", "base/a:1", directory]);
    assert!(
        error.contains("base/a:1") && error.contains("not signed by a key"),
        "{error}"
    );
    let error = node.fails(125, ["run", "--rm", "base/a:1", "--", "/x"]);
    assert!(error.contains("not signed by a key"), "{error}");

    // A signature by a key that the policy does not know is none.
    let (foreign, _) = key(&node, "foreign");
    node.ok(["sign", "base/a:1", "--key", foreign.to_str().unwrap()]);
    node.fails(1, ["mount", "base/a:1", directory]);

    // Warned of only: mounted, and said.
    fs_err::write(&policy, rules("warn")).unwrap();
    let output = node.run(["mount", "base/a:1", directory]);
    assert!(output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("warning: base/a:1"), "{said}");
    node.ok(["umount", directory]);

    // A policy that cannot be understood lets nothing through.
    fs_err::write(&policy, "mode = \"requier\"\n").unwrap();
    let error = node.fails(1, ["mount", "base/a:1", directory]);
    assert!(
        error.contains("policy.toml") && error.contains("line 1: "),
        "{error}"
    );
    assert!(!error.contains("\\n"), "{error}");

    fs_err::write(&policy, rules("require")).unwrap();
    node.ok(["sign", "base/a:1", "--key", file.to_str().unwrap()]);
    node.ok(["mount", "base/a:1", directory]);
    node.ok(["umount", directory]);
}
