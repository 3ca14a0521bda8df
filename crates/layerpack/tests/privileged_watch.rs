//! What `top` and `trace` show.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Stdio};

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::{is_root, skip};
use serde_json::Value;
use support::{Node, describe};

/// A process that does not outlive a failed test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(node: &Node, arguments: &[&str]) -> Running {
    let mut command = node.command();
    command.args(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    Running(command.spawn().unwrap())
}

/// A node with a mounted layer of many files, none of which was read.
fn mounted(label: &str) -> (Node, String) {
    let node = Node::new(label);
    let tree = node.scratch.mkdir("tree/some").unwrap();
    let mut rng = Rng::new(3);
    for i in 0..200 {
        fs_err::write(tree.join(format!("{i}")), rng.bytes(150_000)).unwrap();
    }
    node.build("base/many:1", tree.parent().unwrap(), &[]);
    let dir = node.scratch.mkdir("mnt").unwrap().display().to_string();
    node.ok(["mount", "--prefetch", "none", "base/many:1", &dir]);
    (node, dir)
}

#[test]
fn privileged_trace_names_files_and_what_was_fetched() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let (node, dir) = mounted("trace");
    let mut trace = start(&node, &["trace", &dir]);
    let mut said = BufReader::new(trace.0.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("watching 1 layers"), "{line}");
    fs_err::read(format!("{dir}/some/7")).unwrap();
    let mut out = BufReader::new(trace.0.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert!(line.contains("base/many:1"), "{line}");
    assert!(line.contains("/some/"), "{line}");
    assert!(
        line.contains("waited") && line.contains("fetched"),
        "{line}"
    );
    // It ends with the mount.
    node.ok(["umount", &dir]);
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert!(trace.0.wait().unwrap().success());
    assert!(
        line.contains("/some/7") || rest.contains("/some/7"),
        "{line}{rest}"
    );

    // The same for programs, for a time.
    node.ok(["mount", "--prefetch", "none", "base/many:1", &dir]);
    let mut trace = start(&node, &["-o", "json", "trace", "--for", "2s", &dir]);
    let mut said = BufReader::new(trace.0.stderr.take().unwrap());
    said.read_line(&mut String::new()).unwrap();
    fs_err::read(format!("{dir}/some/150")).unwrap();
    let mut text = String::new();
    trace
        .0
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert!(trace.0.wait().unwrap().success());
    let events: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let miss = events
        .iter()
        .find(|e| e["kind"] == "miss" && e["fetched_bytes"].as_u64() > Some(0));
    let miss = miss.unwrap_or_else(|| panic!("{text}"));
    assert_eq!(miss["reference"], "base/many:1");
    let read: u64 = events
        .iter()
        .flat_map(|event| event["files"].as_array().unwrap())
        .filter(|file| file["path"] == "/some/150")
        .map(|file| file["len"].as_u64().unwrap())
        .sum();
    assert!(read >= 150_000, "{read}: {text}");
    let error = node.fails(1, ["trace", "/tmp"]);
    assert!(error.contains("/tmp is neither"), "{error}");
    node.ok(["umount", &dir]);
}

#[test]
fn privileged_a_trace_goes_on_with_the_next_daemon() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let (node, dir) = mounted("trace-on");
    let report = node.run(["-o", "json", "doctor"]);
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    let mut findings = report["findings"].as_array().unwrap().iter();
    let restarts = findings.find(|f| f["name"] == "restarts").unwrap();
    if !restarts["detail"].as_str().unwrap().contains("go on") {
        skip!("this kernel does not send requests again");
    }
    let mut trace = start(&node, &["trace", &dir]);
    let mut said = BufReader::new(trace.0.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("watching 1 layers"), "{line}");
    node.kill_daemon();
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("restarted"), "{line}");
    // From here on it watches the next one.
    fs_err::read(format!("{dir}/some/9")).unwrap();
    let mut out = BufReader::new(trace.0.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert!(line.contains("base/many:1"), "{line}");
    node.ok(["umount", &dir]);
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert!(trace.0.wait().unwrap().success());
    assert!(
        line.contains("/some/9") || rest.contains("/some/9"),
        "{line}{rest}"
    );
}

#[test]
fn privileged_top_shows_rates_of_mounts() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let (node, dir) = mounted("top");
    let mut top = start(&node, &["-o", "json", "top", "--once", "--interval", "2s"]);
    // Reads go on for as long as it looks.
    let mut files = 0..200;
    while top.0.try_wait().unwrap().is_none() {
        if let Some(i) = files.next() {
            fs_err::read(format!("{dir}/some/{i}")).unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(top.0.wait().unwrap().success());
    let mut text = String::new();
    top.0
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    let seen: Value = serde_json::from_str(&text).unwrap();
    assert!(seen["rss_bytes"].as_u64().unwrap() > 1 << 20, "{seen}");
    let mounts = seen["mounts"].as_array().unwrap();
    assert_eq!(mounts.len(), 1);
    let row = &mounts[0];
    assert_eq!(
        (row["on"].as_str(), &row["owner"]),
        (Some(dir.as_str()), &"mount".into())
    );
    for rate in [
        "reads_per_second",
        "read_bytes_per_second",
        "fetched_bytes_per_second",
    ] {
        assert!(row[rate].as_u64().unwrap() > 0, "{rate}: {seen}");
        assert_eq!(row[rate], seen["total"][rate]);
    }
    assert!(row["hit_percent"].as_u64().unwrap() <= 100);
    let output = node.run(["top", "--interval", "1s"]);
    assert!(output.status.success(), "{}", describe(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("resident") && text.contains("MOUNT"),
        "{text}"
    );
    assert!(text.contains(&dir) && !text.contains('\u{1b}'), "{text}");
    node.ok(["umount", &dir]);
    node.ok(["daemon", "stop"]);
    assert!(
        node.fails(1, ["top", "--once"])
            .contains("no layerpack daemon")
    );
}

#[test]
fn privileged_top_tells_what_is_copied_from_what_is_fetched() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("top-copies");
    let tree = node.scratch.mkdir("tree").unwrap();
    let mut rng = Rng::new(5);
    for i in 0..300 {
        fs_err::write(tree.join(format!("{i:03}")), rng.bytes(30_000)).unwrap();
    }
    node.build("base/row:1", &tree, &[]);
    fs_err::write(tree.join("new"), "only here").unwrap();
    node.build("base/row:2", &tree, &[]);
    let dirs = ["old", "new"].map(|name| {
        let dir = node.scratch.mkdir(name).unwrap().display().to_string();
        let reference = format!("base/row:{}", if name == "old" { 1 } else { 2 });
        node.ok(["mount", "--prefetch", "none", &reference, &dir]);
        dir
    });
    for i in 0..300 {
        fs_err::read(format!("{}/{i:03}", dirs[0])).unwrap();
    }
    let arguments = ["-o", "json", "top", "--once", "--interval", "4s"];
    let mut top = start(&node, &arguments);
    // Reads go on for as long as it looks.
    let mut files = 0..300;
    while top.0.try_wait().unwrap().is_none() {
        if let Some(i) = files.next() {
            fs_err::read(format!("{}/{i:03}", dirs[1])).unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(40));
    }
    let mut text = String::new();
    let mut out = top.0.stdout.take().unwrap();
    out.read_to_string(&mut text).unwrap();
    assert!(top.0.wait().unwrap().success(), "{text}");
    let seen: Value = serde_json::from_str(&text).unwrap();
    let copied = |row: &Value| row["copied_bytes_per_second"].as_u64().unwrap();
    let row = |dir: &String| {
        let mut rows = seen["mounts"].as_array().unwrap().iter();
        rows.find(|row| row["on"] == dir.as_str()).unwrap()
    };
    assert!(copied(row(&dirs[1])) > 0, "{seen}");
    assert_eq!(copied(row(&dirs[0])), 0, "{seen}");
    assert_eq!(copied(&seen["total"]), copied(row(&dirs[1])), "{seen}");
    assert_eq!(seen["total"]["peer_bytes_per_second"], 0, "{seen}");
    // At most the frame of the new file, whose neighbours come with it.
    let fetched = row(&dirs[1])["fetched_bytes_per_second"].as_u64().unwrap();
    assert!(fetched < copied(row(&dirs[1])), "{seen}");
    let table = node.ok(["top", "--once", "--interval", "1s"]);
    assert!(table.contains("COPIED/S"), "{table}");
    for dir in &dirs {
        node.ok(["umount", dir]);
    }
    support::assert_clean(&node);
}
