//! Nodes that read from each other's caches, by their command line.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::{ScratchDir, is_root, skip};
use support::{Node, describe};

/// Ports that are free now, for daemons that must know each other before they start.
fn ports(count: usize) -> Vec<SocketAddr> {
    let held: Vec<TcpListener> = (0..count)
        .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    held.iter().map(|l| l.local_addr().unwrap()).collect()
}

/// A counter's value on the daemon's page.
fn metric(node: &Node, name: &str) -> u64 {
    use std::io::{Read as _, Write as _};
    let socket = node.root().join("daemon.sock");
    let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
    let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    stream.write_all(request).unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    let line = page.lines().find(|l| l.starts_with(&format!("{name} ")));
    line.and_then(|l| l.rsplit(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("{name}: {page}"))
}

#[test]
fn privileged_daemons_read_from_each_other() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let site = ScratchDir::new("peers-site").unwrap();
    let store = site.join("store");
    let token = site.join("token");
    fs_err::write(&token, "a-token-that-all-peers-know").unwrap();
    fs_err::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    let all = ports(3);
    let list: Vec<String> = all.iter().map(|a| format!("http://{a}")).collect();
    let nodes: Vec<Node> = all
        .iter()
        .enumerate()
        .map(|(i, own)| {
            let mut node = Node::new(&format!("peers-{i}"));
            for (name, value) in [
                ("LAYERPACK_STORE", store.display().to_string()),
                ("LAYERPACK_PEER_LISTEN", own.to_string()),
                ("LAYERPACK_PEERS", list.join(",")),
                ("LAYERPACK_PEER_TOKEN_FILE", token.display().to_string()),
            ] {
                node.environment.push((name.to_owned(), value));
            }
            node
        })
        .collect();
    let data: Vec<Vec<u8>> = (0..4).map(|i| Rng::new(i).bytes(2 << 20)).collect();
    let tree = site.mkdir("tree").unwrap();
    for (i, bytes) in data.iter().enumerate() {
        fs_err::write(tree.join(format!("{i}")), bytes).unwrap();
    }
    nodes[0].build("base/data:1", &tree, &[]);
    let dirs: Vec<String> = nodes
        .iter()
        .map(|node| {
            let dir = node.scratch.mkdir("mnt").unwrap().display().to_string();
            node.ok(["mount", "--prefetch", "none", "base/data:1", &dir]);
            dir
        })
        .collect();
    for node in &nodes {
        assert!(
            support::wait_until(|| metric(node, "layerpack_peers") == 2),
            "{}",
            node.log()
        );
    }
    std::thread::scope(|scope| {
        for dir in &dirs {
            let data = &data;
            scope.spawn(move || {
                for (i, bytes) in data.iter().enumerate() {
                    assert!(fs_err::read(format!("{dir}/{i}")).unwrap() == *bytes);
                }
            });
        }
    });
    let sum = |name: &str| -> u64 { nodes.iter().map(|node| metric(node, name)).sum() };
    let whole = 8 << 20;
    let fetched = sum("layerpack_fetched_raw_bytes_total");
    assert!(
        (whole..whole * 13 / 10).contains(&fetched),
        "{fetched} bytes came from the store for {whole}"
    );
    let served = sum("layerpack_peer_served_bytes_total");
    assert!(served >= whole, "{served}");
    // What was read ahead may still be on its way.
    let all_came =
        || sum("layerpack_peer_received_bytes_total") == sum("layerpack_peer_served_bytes_total");
    assert!(support::wait_until(all_came));
    let status = nodes[0].json(["daemon", "status"]);
    assert_eq!(status["node"]["peers"].as_array().unwrap().len(), 3);
    let text = nodes[0].ok(["daemon", "status"]);
    assert!(text.contains("2 of 3 peers"), "{text}");

    // With the others gone everything is still there.
    for node in nodes.iter().skip(1) {
        node.ok(["daemon", "stop", "--force"]);
    }
    nodes[0].ok(["cache", "evict", "--all"]);
    nodes[0].ok(["umount", &dirs[0]]);
    nodes[0].ok(["daemon", "stop"]);
    nodes[0].ok(["mount", "--prefetch", "none", "base/data:1", &dirs[0]]);
    assert!(fs_err::read(format!("{}/3", dirs[0])).unwrap() == data[3]);
    nodes[0].ok(["umount", &dirs[0]]);
    nodes[0].ok(["daemon", "stop"]);

    // A token that others can read, and an open door, are refused.
    fs_err::set_permissions(&token, std::fs::Permissions::from_mode(0o644)).unwrap();
    let output = nodes[0].run(["daemon", "run"]);
    let error = support::one_error(1, &output);
    assert!(error.contains("chmod 600"), "{error}");
    let mut command = nodes[0].command();
    command.env_remove("LAYERPACK_PEER_TOKEN_FILE").args([
        "daemon",
        "run",
        "--peer-listen",
        "0.0.0.0:0",
    ]);
    let output = command.output().unwrap();
    assert!(!output.status.success(), "{}", describe(&output));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("give a token of peers"),
        "{}",
        describe(&output)
    );
}
