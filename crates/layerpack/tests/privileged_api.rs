//! Snapshots by the daemon's API.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;

use layerpack_fixtures::{is_root, skip};
use serde_json::Value;
use support::{Node, assert_clean};

/// One request to a socket; status and body.
fn post(socket: &Path, path: &str, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(socket).unwrap();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let status = reply.split(' ').nth(1).unwrap().parse().unwrap();
    (status, reply.split("\r\n\r\n").nth(1).unwrap().to_owned())
}

#[test]
fn privileged_the_api_makes_snapshots() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = Node::new("api");
    let root = node.scratch.mkdir("rootfs").unwrap();
    support::rootfs::make(&root);
    node.build("base/root:1", &root, &[]);
    let inside = |script: &str| node.ok(["sandbox", "exec", "a", "--", "sh", "-c", script]);
    node.ok(["sandbox", "create", "--name", "a", "base/root:1"]);
    inside("echo work > /root/job; echo h > /root/x.log");
    let socket = node.root().join("daemon.sock");
    let ask = |body: &str| post(&socket, "/v1/pack-diff", body);
    let asked = r#"{"sandbox":"a","name":"s","version":"1","labels":["k=v"],"excludes":["*.log"]}"#;
    let (status, said) = ask(asked);
    assert_eq!(status, 200, "{said}");
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(report["reference"], "diff/s:1");
    let shown = node.json(["snapshot", "inspect", "diff/s:1"]);
    assert_eq!(shown["labels"]["k"], "v");
    let found = node.ok(["find", "--alone", "diff/s:1"]);
    assert!(found.contains("/root/job") && !found.contains("x.log"));
    inside("echo more >> /root/job");
    for (body, code, word) in [
        (asked, 409, "diff/s:1"),
        (
            r#"{"sandbox":"none","name":"s","version":"2"}"#,
            404,
            "none",
        ),
        (r#"{"sandbox":"a","name":"s"}"#, 400, "version"),
        (
            r#"{"sandbox":"a","name":"s","version":"2","dryrun":true}"#,
            400,
            "dryrun",
        ),
        (
            r#"{"sandbox":"a","name":"s\u0000","version":"2"}"#,
            400,
            "zero byte",
        ),
    ] {
        let (status, said) = ask(body);
        assert!(
            status == code && said.contains(word),
            "{body}: {status} {said}"
        );
    }
    assert_eq!(node.json(["snapshot", "ls"]).as_array().unwrap().len(), 1);
    assert_eq!(node.json(["sandbox", "ls"])[0]["state"], "running");
    node.ok(["sandbox", "rm", "-f", "a"]);
    assert_clean(&node);
}
