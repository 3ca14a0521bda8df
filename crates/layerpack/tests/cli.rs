//! The command line itself: usage, exit codes, output formats. Needs no privileges.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use support::{Node, describe};

#[test]
fn every_command_has_help() {
    let node = Node::new("help");
    for command in [
        &[][..],
        &["build"],
        &["merge"],
        &["export"],
        &["ls"],
        &["inspect"],
        &["verify"],
        &["key"],
        &["sign"],
        &["rm"],
        &["gc"],
        &["prune"],
        &["repair"],
        &["mount"],
        &["umount"],
        &["daemon"],
        &["daemon", "run"],
        &["daemon", "stop"],
        &["daemon", "status"],
        &["doctor"],
        &["run"],
        &["sandbox"],
        &["sandbox", "create"],
        &["sandbox", "exec"],
        &["sandbox", "ls"],
        &["sandbox", "rm"],
        &["pack-diff"],
        &["push"],
        &["pull"],
        &["copy"],
        &["tag"],
        &["untag"],
        &["diff"],
        &["du"],
        &["cat"],
        &["find"],
        &["seed"],
        &["profile"],
        &["profile", "record"],
        &["profile", "ls"],
        &["profile", "show"],
        &["profile", "merge"],
        &["profile", "rm"],
    ] {
        let help = node.ok(command.iter().copied().chain(["--help"]));
        assert!(help.contains("Usage: layerpack"), "{command:?}: {help}");
        assert!(!help.contains("todo"), "{command:?}");
    }
    assert!(node.ok(["--version"]).starts_with("layerpack "));
}

#[test]
fn wrong_usage_is_two() {
    let node = Node::new("usage");
    for arguments in [
        &["nonsense"][..],
        &["build"],
        &["build", "--kind", "base", "--name", "a", "--version", "1"],
        &["mount", "/mnt"],
        &["run", "base/a:1"],
        &["run", "--memory", "lots", "base/a:1", "--", "true"],
        &["run", "--cpus", "0", "base/a:1", "--", "true"],
        &["run", "--network", "bridge", "base/a:1", "--", "true"],
        &["sandbox", "exec", "x"],
        &["ls", "-o", "yaml"],
        &[
            "build",
            "--level",
            "99",
            "--kind",
            "base",
            "--name",
            "a",
            "--version",
            "1",
            "--from",
            "dir:/",
        ],
    ] {
        let output = node.run(arguments);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{arguments:?}: {}",
            describe(&output)
        );
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
    assert!(!node.root().exists(), "wrong usage must not touch the node");
}

#[test]
fn a_layer_is_built_listed_shown_verified_and_removed() {
    let node = Node::new("layer");
    let source = node.scratch.mkdir("source/sub").unwrap();
    node.scratch.write("source/a.txt", "hello").unwrap();
    node.scratch
        .write("source/sub/b.bin", vec![7u8; 300_000])
        .unwrap();
    let source = source.parent().unwrap();
    let digest = node.build("base/small:1", source, &["--label", "who=test"]);

    let list = node.json(["ls"]);
    assert_eq!(list.as_array().unwrap().len(), 1);
    assert_eq!(list[0]["reference"], "base/small:1");
    assert_eq!(list[0]["digest"], digest.as_str());
    assert_eq!(list[0]["size"], 300_005);
    assert_eq!(
        node.json(["ls", "--kind", "toolkit"])
            .as_array()
            .unwrap()
            .len(),
        0
    );
    let text = node.ok(["ls"]);
    assert!(
        text.starts_with("LAYER") && text.contains("base/small:1"),
        "{text}"
    );

    let shown = node.json(["inspect", "base/small:1"]);
    assert_eq!(shown[0]["manifest"]["counts"]["files"], 2);
    assert_eq!(shown[0]["manifest"]["labels"]["who"], "test");
    assert!(node.ok(["inspect", "base/small:1"]).contains("who=test"));

    let verified = node.json(["verify", "base/small:1"]);
    assert_eq!(verified[0]["damage"].as_array().unwrap().len(), 0);

    assert_eq!(node.ok(["rm", "base/small:1"]), "base/small:1\n");
    assert_eq!(node.json(["ls"]).as_array().unwrap().len(), 0);
}

#[test]
fn the_same_tree_has_the_same_digest_anywhere() {
    let one = Node::new("same-a");
    let two = Node::new("same-b");
    let source = one.scratch.mkdir("source").unwrap();
    for i in 0..50u32 {
        one.scratch
            .write(
                format!("source/{i}"),
                vec![u8::try_from(i).unwrap(); 1000 * i as usize],
            )
            .unwrap();
    }
    // Another store that holds something already, other threads, another level.
    let other = two.scratch.mkdir("other").unwrap();
    two.scratch.write("other/x", vec![9u8; 200_000]).unwrap();
    two.build("toolkit/other:1", &other, &[]);
    let a = one.build("base/same:1", &source, &["--jobs", "1"]);
    let b = two.build("base/same:1", &source, &["--jobs", "4", "--level", "7"]);
    assert_eq!(a, b);
    // A repetition is no error, and says the same.
    assert_eq!(one.build("base/same:1", &source, &[]), a);
    let again = one.json([
        "-q",
        "build",
        "--kind",
        "base",
        "--name",
        "same",
        "--version",
        "1",
        "--from",
        &format!("dir:{}", source.display()),
    ]);
    assert_eq!(again["created"], false);
}

#[test]
fn a_closed_pipe_is_no_panic() {
    let node = Node::new("pipe");
    let source = node.scratch.mkdir("source").unwrap();
    node.build("base/a:1", &source, &[]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = node.command().arg("ls").stdout(writer).output().unwrap();
    assert_eq!(output.status.code(), Some(141), "{}", describe(&output));
    assert!(output.stderr.is_empty(), "{}", describe(&output));
}

#[test]
fn conflicts_of_a_stack_are_listed() {
    let node = Node::new("conflicts");
    for (layer, files) in [
        (
            "base",
            &["bin/tool", "etc/conf", "lib/only-here", "swap/inner"][..],
        ),
        ("toolkit", &["bin/tool", "bin/extra", "swap", "other/x"]),
    ] {
        for file in files {
            let path = node.scratch.join(layer).join(file);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, layer).unwrap();
        }
        node.build(&format!("{layer}/l:1"), &node.scratch.join(layer), &[]);
    }
    let found = node.json(["inspect", "--stack", "base/l:1", "toolkit/l:1"]);
    let conflicts: Vec<(&str, &str)> = found["conflicts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| (c["path"].as_str().unwrap(), c["effect"].as_str().unwrap()))
        .collect();
    assert_eq!(conflicts, [("/bin/tool", "replaces"), ("/swap", "type")]);
    assert_eq!(
        found["conflicts"][0]["layers"],
        serde_json::json!(["base/l:1", "toolkit/l:1"])
    );
    assert!(
        node.ok(["inspect", "--stack", "base/l:1"])
            .starts_with("no conflicts")
    );
}
