//! The channel by which processes inside a sandbox ask for snapshots of it.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::io::{BufRead as _, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use layerpack_fixtures::{is_root, skip};
use layerpack_runtime::{Sandboxes, SandboxesOptions};
use serde_json::Value;
use support::{Node, assert_clean, describe};

/// A node with the layer `base/root:1`, which can run our own binary.
fn node(label: &str) -> Node {
    let node = Node::new(label);
    let root = node.scratch.mkdir("rootfs").unwrap();
    support::rootfs::make(&root);
    support::rootfs::add_libraries(&root, Path::new(env!("CARGO_BIN_EXE_layerpack")));
    node.build("base/root:1", &root, &[]);
    node
}

#[track_caller]
fn exec(node: &Node, sandbox: &str, script: &str) -> String {
    let output = node.run(["sandbox", "exec", sandbox, "--", "sh", "-c", script]);
    assert!(output.status.success(), "{}", describe(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn sandboxes(node: &Node) -> Sandboxes {
    Sandboxes::open(SandboxesOptions {
        root: node.root().join("sandboxes"),
        init: None,
        agent: None,
        cgroup_parent: "layerpack".to_owned(),
        stop_by_signals: false,
    })
    .unwrap()
}

fn state(node: &Node) -> String {
    node.json(["sandbox", "ls"])[0]["state"]
        .as_str()
        .unwrap()
        .to_owned()
}

/// One request to a socket; status and body.
fn post(socket: &Path, path: &str, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(socket).unwrap();
    // It may be closed unread.
    let _ = write!(
        stream,
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    let mut reply = String::new();
    let _ = stream.read_to_string(&mut reply);
    let status = reply.split(' ').nth(1).and_then(|s| s.parse().ok());
    let body = reply.split("\r\n\r\n").nth(1).unwrap_or_default();
    (status.unwrap_or(0), body.to_owned())
}

#[test]
fn privileged_processes_inside_ask_for_snapshots() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("inside");
    let rules = node
        .scratch
        .write("rules.toml", "sets = [\"shell-history\"]\n")
        .unwrap();
    let id = node.ok([
        "sandbox",
        "create",
        "--allow-pack-diff",
        "agent-*",
        "--pack-diff-rules",
        rules.to_str().unwrap(),
        "base/root:1",
    ]);
    let id = id.trim();
    exec(
        &node,
        id,
        "echo work > /root/job; echo h > /root/.bash_history",
    );
    let ask = "/dev/layerpack/pack_diff --version 1 --name";
    let line = exec(&node, id, &format!("{ask} agent-a --label k=v"));
    assert!(line.starts_with("diff/agent-a:1 b3:"), "{line}");
    let shown = node.json(["snapshot", "inspect", "diff/agent-a:1"]);
    assert_eq!(shown["labels"]["layerpack.by"], "sandbox");
    assert_eq!(shown["labels"]["k"], "v");
    assert_eq!(shown["stack"][0]["reference"], "base/root:1");
    let found = node.ok(["find", "--alone", "diff/agent-a:1"]);
    assert!(
        found.contains("/root/job") && !found.contains("history"),
        "{found}"
    );
    // Any user, by its plain name, with the report.
    let output = node.run([
        "sandbox",
        "exec",
        "-u",
        "worker",
        id,
        "--",
        "sh",
        "-c",
        "pack_diff --name agent-b --version 1 -o json",
    ]);
    assert!(output.status.success(), "{}", describe(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["reference"], "diff/agent-b:1");
    assert_eq!(report["report"]["scrubbed"]["total"]["entries"], 1);
    assert!(report["store"]["new_bytes"].as_u64().is_some());
    // As text it names what it left out.
    let output = node.run([
        "sandbox",
        "exec",
        id,
        "--",
        "sh",
        "-c",
        &format!("{ask} agent-c"),
    ]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("/root/.bash_history (shell-history)"),
        "{said}"
    );
    // What the setting does not allow, and what makes no sense.
    for (arguments, said) in [
        ("other", "agent-*"),
        ("agent-a", "diff/agent-a:1"),
        ("agent-x --label =", "label"),
        ("agent-y --exclude [", "exclude"),
        ("'agent-/../x'", "name"),
    ] {
        exec(&node, id, "echo more >> /root/job");
        let output = node.run([
            "sandbox",
            "exec",
            id,
            "--",
            "sh",
            "-c",
            &format!("{ask} {arguments}"),
        ]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments}: {error}");
        assert!(error.contains(said), "{arguments}: {error}");
    }
    assert_eq!(state(&node), "running");
    // Nobody else speaks through it, not even root of the node.
    let socket = sandboxes(&node).get(id).unwrap().channel.join("socket");
    let asked = "{\"name\":\"agent-z\",\"version\":\"1\"}";
    assert_eq!(post(&socket, "/v1/pack-diff", asked).0, 0);
    node.fails(1, ["inspect", "diff/agent-z:1"]);
    // Without the setting there is no channel.
    let plain = node.ok(["sandbox", "create", "base/root:1"]);
    let output = node.run([
        "sandbox",
        "exec",
        plain.trim(),
        "--",
        "ls",
        "/dev/layerpack",
    ]);
    assert!(!output.status.success());
    node.ok(["sandbox", "rm", "-f", id, plain.trim()]);
    assert_clean(&node);
}

/// A process of a sandbox that holds connections to its channel and asks for nothing.
#[test]
#[ignore = "a child process of another test"]
fn idler() {
    let socket = PathBuf::from(std::env::var("LAYERPACK_TEST_IDLE").unwrap());
    let held: Vec<UnixStream> = (0..50)
        .map(|number| {
            let mut stream = UnixStream::connect(&socket).unwrap();
            if number % 2 == 0 {
                // It may be closed by now.
                let _ = stream.write_all(b"POST /v1/pack-diff HTTP/1.1\r\nhost: x\r\n");
            }
            stream
        })
        .collect();
    std::io::stderr().write_all(b"\nidle\n").unwrap();
    std::thread::sleep(Duration::from_secs(1000));
    drop(held);
}

#[test]
fn privileged_idle_connections_shut_nobody_out() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let Some(nsenter) = layerpack_fixtures::find_tool("nsenter") else {
        skip!("needs nsenter");
    };
    let node = node("idle");
    let create = ["sandbox", "create", "--allow-pack-diff", "*", "base/root:1"];
    let id = node.ok(create);
    let id = id.trim();
    let sandbox = sandboxes(&node).get(id).unwrap();
    let pid = sandbox.pid.unwrap().as_raw_nonzero().to_string();
    // A process of the sandbox's pid namespace, which ends with it.
    let mut child = Command::new(nsenter)
        .args(["--target", &pid, "--pid", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "idler", "--ignored", "--nocapture"])
        .env("LAYERPACK_TEST_IDLE", sandbox.channel.join("socket"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
    let idle = lines.any(|line| line.unwrap() == "idle");
    let ask = "/dev/layerpack/pack_diff --version 1 --name";
    let line = exec(&node, id, &format!("{ask} beside"));
    assert!(idle && line.starts_with("diff/beside:1 b3:"), "{line}");
    node.ok(["sandbox", "rm", "-f", id]);
    child.wait().unwrap();
    assert_clean(&node);
}

#[test]
fn privileged_channels_outlive_the_daemon() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("outlive");
    let create = ["sandbox", "create", "--allow-pack-diff", "*", "base/root:1"];
    let id = node.ok(create);
    let id = id.trim();
    let ask = "/dev/layerpack/pack_diff --version 1 --name";
    exec(&node, id, &format!("{ask} agent-b"));
    node.kill_daemon();
    let line = exec(&node, id, &format!("{ask} agent-c"));
    assert!(line.starts_with("diff/agent-c:1 b3:"), "{line}");
    node.ok(["sandbox", "rm", "-f", id]);
    assert_clean(&node);
}
