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

/// What is found out of a command line after it was parsed is wrong usage too; what is not there is
/// a failure.
#[test]
fn what_cannot_be_meant_is_two_and_what_is_not_there_is_one() {
    let node = Node::new("meant");
    let source = node.scratch.mkdir("source").unwrap();
    node.scratch.write("source/a.txt", "hello").unwrap();
    node.build("base/a:1", &source, &[]);
    let file = |name: &str| node.scratch.path().join(name).display().to_string();
    let (from, out, absent) = (
        format!("dir:{}", source.display()),
        file("out"),
        format!("dir:{}", file("absent")),
    );
    let (tar, tagged, layout) = (
        format!("tar:{out}"),
        format!("oci:{out}:1"),
        format!("oci:{out}"),
    );
    let build = |from: &str, more: &[&str]| {
        let named = ["build", "--kind", "base", "--name", "b", "--version", "1"];
        let all = named.iter().copied().chain(["--from", from]);
        let all = all.chain(more.iter().copied()).map(str::to_owned);
        (all.collect::<Vec<_>>(), more.to_vec().join(" "))
    };
    let other = |words: &[&str]| {
        let all = words.iter().map(|word| (*word).to_owned());
        (all.collect::<Vec<_>>(), words.join(" "))
    };
    for (arguments, what) in [
        build("elsewhere", &[]),
        build(&from, &["--exclude", "["]),
        build(&from, &["--at", "../x"]),
        build(&from, &["--at", &"n".repeat(300)]),
        build(&from, &["--at", &"n/".repeat(40_000)]),
        build(&layout, &["--parent", "base/a:1"]),
        build(&from, &["--parent", "nothing"]),
        build(&from, &["--parent", "base/a:1"]),
        other(&["export", "base/a:1", "--to", "nowhere"]),
        other(&["export", "base/a:1", "--to", "tar:"]),
        other(&["export", "nothing", "--to", &tar]),
        other(&["export", "base/a:1", "--to", &tagged, "--tag", "2"]),
        other(&["export", "base/a:1", "--to", "tar:-", "-o", "json"]),
        other(&["export", "base/a:1", "base/a:1", "--to", &tar]),
        other(&["flatten", "base/a:1", "--to", "-"]),
        other(&["flatten", "a:1", "--to", &out]),
        other(&["merge", "base/a:1", "--name", "A B", "--version", "1"]),
        other(&["merge", "base/a", "--name", "b", "--version", "1"]),
        // The name of layers that are made of long rows of diffs.
        other(&[
            "merge",
            "base/a:1",
            "--name",
            "layerpack-merged",
            "--version",
            "1",
        ]),
        other(&["snapshot", "inspect", "base/a:1"]),
    ] {
        let output = node.run(&arguments);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{what}: {}",
            describe(&output)
        );
    }
    for (arguments, what) in [
        build(&absent, &[]),
        build(&from, &["--max-bytes", "1", "--no-cache"]),
        other(&["export", "base/absent:1", "--to", &tar]),
        other(&["flatten", "base/absent:1", "--to", &out]),
        other(&[
            "merge",
            "base/a:1",
            "base/absent:1",
            "--name",
            "b",
            "--version",
            "1",
        ]),
    ] {
        let output = node.run(&arguments);
        assert_eq!(
            output.status.code(),
            Some(1),
            "{what}: {}",
            describe(&output)
        );
    }
    assert!(!std::path::Path::new(&out).exists());
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

/// A typing error in a store's address is not an empty store.
#[test]
fn a_store_that_is_not_there_is_not_empty() {
    let node = Node::new("no-store");
    let empty = node.scratch.mkdir("empty").unwrap();
    let nowhere = node.scratch.join("nowhere");
    for store in [&empty, &nowhere] {
        for command in [
            &["ls"][..],
            &["du"],
            &["gc"],
            &["prune"],
            &["verify", "--all"],
            &["verify", "base/a:1"],
            &["inspect", "base/a:1"],
            &["find", "base/a:1"],
            &["inspect", "base/a@latest"],
            &["rm", "base/a:1"],
            &["tag"],
            &["untag", "base/a@latest"],
            &["profile", "ls"],
            &["profile", "show", "x"],
            &["snapshot", "ls"],
        ] {
            let mut arguments = vec!["--store", store.to_str().unwrap()];
            arguments.extend(command);
            let error = node.fails(1, arguments);
            assert!(error.contains("there is no store at file://"), "{error}");
            // What was asked for is named.
            if let Some(name) = command.iter().find(|word| word.starts_with("base/")) {
                assert!(error.contains(name), "{error}");
            }
        }
    }
    assert!(!nowhere.exists(), "nothing is made by looking");
    // The node's own store comes with its first layer.
    let output = node
        .command()
        .env_remove("LAYERPACK_STORE")
        .arg("ls")
        .output();
    assert!(output.unwrap().status.success());
    let output = node.command().env("LAYERPACK_STORE", "").arg("ls").output();
    assert!(output.unwrap().status.success());
    let error = node.fails(2, ["--store", "", "ls"]);
    assert!(error.contains("--store is empty"), "{error}");
    let error = node.fails(2, ["ls", "--kind", "image"]);
    assert!(error.contains("is no kind of layer") && !error.contains("invalid reference"));
}

/// Nothing but zeros is an archive without entries, and most likely a mistake.
#[test]
fn an_archive_of_nothing_is_an_error() {
    let node = Node::new("nothing");
    let zeros = node.scratch.write("zeros.tar", vec![0_u8; 20_480]).unwrap();
    let from = format!("tar:{}", zeros.display());
    let build = |extra: &[&str]| {
        let mut line = vec![
            "-q",
            "build",
            "--kind",
            "base",
            "--name",
            "a",
            "--version",
            "1",
        ];
        line.extend(["--from", &from]);
        line.extend(extra);
        line.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let error = node.fails(1, build(&[]));
    assert!(
        error.contains("no entries") && error.contains("--allow-empty"),
        "{error}"
    );
    node.ok(build(&["--allow-empty"]));
    assert_eq!(node.json(["ls"]).as_array().unwrap().len(), 1);
}

/// A variable that is empty is as good as unset.
#[test]
fn an_empty_epoch_is_none() {
    let node = Node::new("epoch");
    let source = node.scratch.mkdir("source").unwrap();
    node.scratch.write("source/file", "x").unwrap();
    let from = format!("dir:{}", source.display());
    let line = |version| {
        let mut line = vec!["-q", "build", "--kind", "base", "--name", "a", "--version"];
        line.extend([version, "--from", &from]);
        line.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    node.ok(line("1"));
    let run = |value: &str, version| {
        let mut command = node.command();
        command.env("SOURCE_DATE_EPOCH", value).args(line(version));
        command.output().unwrap()
    };
    let output = run("", "2");
    assert!(output.status.success(), "{}", describe(&output));
    let digests: Vec<_> = ["base/a:1", "base/a:2"]
        .map(|layer| node.json(["inspect", layer])[0]["layer_id"].clone())
        .into();
    assert_eq!(digests[0], digests[1]);
    assert_eq!(run("soon", "3").status.code(), Some(2));
}
