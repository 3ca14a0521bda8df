//! `layerpack build`: its options, its progress, and what it says it did. Needs no privileges.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::path::PathBuf;
use std::process::Command;

use layerpack_fixtures::{find_tool, skip};
use serde_json::Value;
use support::{Node, describe};

const RULES: &str = r#"
[[part]]
kind = "base"
name = "os"
version = "1"
at = ["/etc"]
[[part]]
kind = "workspace"
name = "repo"
at = ["/ws"]
"#;

/// A source with 3 files of 3,000 bytes, two of them alike.
fn source(node: &Node) -> PathBuf {
    let dir = node.scratch.mkdir("source").unwrap();
    for (name, byte) in [("etc/a", b'a'), ("ws/b", b'b'), ("left", b'b')] {
        let path = dir.join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, vec![byte; 3000]).unwrap();
    }
    dir
}

fn arguments<'a>(from: &'a str, extra: &[&'a str]) -> Vec<&'a str> {
    let mut all = vec![
        "build",
        "--kind",
        "base",
        "--name",
        "a",
        "--version",
        "1",
        "--from",
        from,
    ];
    all.extend(extra);
    all
}

fn from(node: &Node) -> String {
    format!("dir:{}", source(node).display())
}

#[test]
fn json_counts_files_bytes_chunks_and_processor_time() {
    let node = Node::new("json");
    let from = from(&node);
    let json = |extra: &[&str]| -> Value {
        let text = node.ok(["-o", "json"].into_iter().chain(arguments(&from, extra)));
        serde_json::from_str(&text).unwrap()
    };
    let first = json(&[]);
    assert_eq!(first["reference"], "base/a:1");
    assert_eq!(
        (&first["counts"]["files"], &first["counts"]["directories"]),
        (&3.into(), &3.into())
    );
    assert_eq!(first["counts"]["bytes"], 9000);
    assert_eq!(
        (
            &first["store"]["new_chunks"],
            &first["store"]["reused_chunks"]
        ),
        (&2.into(), &1.into())
    );
    assert_eq!(first["store"]["raw_bytes"], 9000);
    assert!(first["store"]["new_bytes"].as_u64().unwrap() > 0);
    assert!(first["cpu_seconds"].as_f64().unwrap() > 0.0);
    assert!(first["meta_bytes"].as_u64().unwrap() > 0);
    assert_eq!(first["warnings"], Value::Array(Vec::new()));
    let second = json(&[]);
    assert_eq!(second["created"], false);
    assert_eq!(second["digest"], first["digest"]);
    assert_eq!(second["store"]["new_chunks"], 0);
}

#[test]
fn options_reach_the_layer() {
    let node = Node::new("options");
    let from = from(&node);
    let build = |extra: &[&str]| {
        let text = node.ok(["-o", "json"].into_iter().chain(arguments(&from, extra)));
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let built = build(&[
        "--include",
        "etc",
        "--include",
        "left",
        "--exclude",
        "left",
        "--all-root",
        "--source-date-epoch",
        "7",
        "--annotation",
        "who=me",
        "--label",
        "team=x",
        "--jobs",
        "1",
    ]);
    assert_eq!(built["counts"]["files"], 1);
    let shown = node.json(["inspect", "base/a:1"]);
    let text = shown.to_string();
    assert!(
        text.contains("\"who\":\"me\"") && text.contains("\"team\":\"x\""),
        "{text}"
    );

    let fails = |code: i32, extra: &[&str], part: &str| {
        let error = node.fails(code, arguments(&from, extra));
        assert!(error.contains(part), "{extra:?}: {error}");
    };
    fails(1, &["--max-entries", "2"], "--max-entries");
    fails(1, &["--max-bytes", "1k"], "--max-bytes");
    fails(1, &["--max-path", "3"], "--max-path");
    fails(1, &["--max-depth", "1"], "--max-depth");
    fails(2, &["--annotation", "x"], "annotation");
    fails(2, &["--strict"], "--split");
    fails(2, &["--plain-http"], "registry:");
    let sparse = fs_err::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(node.scratch.join("source/sparse"))
        .unwrap();
    sparse.set_len(1 << 40).unwrap();
    fails(1, &["--max-bytes", "1g"], "holes included");
    fs_err::remove_file(node.scratch.join("source/sparse")).unwrap();
    fails(1, &["--uid-map", "0:4000000000:1"], "id map");
    for wrong in [
        &["--uid-map", "0:1"][..],
        &["--uid-map", "0:0:1", "--all-root"],
        &["--max-bytes", "many"],
    ] {
        let output = node.run(arguments(&from, wrong));
        assert_eq!(
            output.status.code(),
            Some(2),
            "{wrong:?}: {}",
            describe(&output)
        );
    }
    // The environment's epoch, as the reproducible builds convention has it.
    let epoch = |seconds: &str| {
        let version = format!("1{seconds}");
        let mut command = node.command();
        let output = command
            .env("SOURCE_DATE_EPOCH", seconds)
            .args(["-o", "json", "build", "--kind", "base", "--name", "e"]);
        let output = output
            .args(["--version", &version, "--from", &from])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", describe(&output));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["layer_id"].clone()
    };
    assert_ne!(epoch("5"), epoch("6"));
    assert_ne!(epoch(""), epoch("5"), "an empty one is none");
}

#[test]
fn a_split_makes_layers_and_tells_what_was_left() {
    let node = Node::new("split");
    let from = from(&node);
    let rules = node.scratch.write("split.toml", RULES).unwrap();
    let rules = rules.to_str().unwrap();
    let with = |extra: &[&str]| {
        let mut all = vec!["build", "--from", &from, "--split", rules];
        all.extend(extra);
        node.run(all)
    };
    let output = with(&["--version", "7"]);
    assert!(output.status.success(), "{}", describe(&output));
    let lines = String::from_utf8(output.stdout).unwrap();
    let names: Vec<&str> = lines
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    assert_eq!(names, ["base/os:1", "workspace/repo:7"]);
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(
        notes.contains("no rule names 1 entries")
            && notes.contains("/left")
            && notes.contains("base/os:1"),
        "{notes}"
    );

    let json = node.json(["build", "--from", &from, "--split", rules, "--version", "7"]);
    assert_eq!(json["layers"][1]["counts"]["files"], 1);
    assert_eq!(json["left_over"]["paths"][0], "/left");
    assert_eq!(json["left_over"]["went_to"], "base/os:1");

    for (extra, part) in [
        (&["--version", "8", "--strict"][..], "/left"),
        (&[], "--version"),
        (
            &["--version", "7", "--at", "/elsewhere", "--strict"],
            "/elsewhere",
        ),
    ] {
        let error = support::one_error(1, &with(extra));
        assert!(error.contains(part), "{extra:?}: {error}");
    }
    let usage = with(&["--version", "7", "--kind", "base"]);
    assert_eq!(usage.status.code(), Some(2), "{}", describe(&usage));
}

#[test]
fn without_a_terminal_progress_is_plain_lines() {
    let node = Node::new("plain");
    let from = from(&node);
    let output = node.run(arguments(&from, &[]));
    let notes = String::from_utf8(output.stderr).unwrap();
    for phase in ["base/a:1: scan", "base/a:1: read", "base/a:1: publish"] {
        assert_eq!(
            notes.lines().filter(|line| line.contains(phase)).count(),
            1,
            "{notes}"
        );
    }
    assert!(
        !notes.contains('\r') && !notes.contains('\u{1b}'),
        "{notes:?}"
    );
    let quiet = node.run(["-q"].into_iter().chain(arguments(&from, &[])));
    assert!(
        quiet.status.success() && quiet.stderr.is_empty(),
        "{}",
        describe(&quiet)
    );
}

#[test]
fn on_a_terminal_progress_is_one_live_line() {
    let Some(script) = find_tool("script") else {
        skip!("needs script(1) for a terminal");
    };
    let node = Node::new("terminal");
    let from = from(&node);
    let program = node.command().get_program().to_str().unwrap().to_owned();
    let line = format!("{program} {}", arguments(&from, &[]).join(" "));
    // Its output is the terminal's: stdout and stderr.
    let output = Command::new(script)
        .args(["-qec", &line, "/dev/null"])
        .env("LAYERPACK_ROOT", node.root())
        .env("LAYERPACK_STORE", node.store())
        .env("TERM", "xterm")
        .env_remove("SOURCE_DATE_EPOCH")
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", describe(&output));
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.contains('\u{1b}'), "no live line: {shown:?}");
    assert!(shown.contains("base/a:1 b3:"), "{shown:?}");
    assert!(
        !shown.contains("base/a:1: scan\r\n"),
        "plain lines on a terminal: {shown:?}"
    );
}
