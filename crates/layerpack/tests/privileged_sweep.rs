//! What a daemon finds of former lives when it starts: mounts, processes, uppers, leases and cache files,
//! each dealt with by rule and listed. What somebody still has stays.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use layerpack_fixtures::{ChildGuard, MountGuard, is_root, skip};
use support::{Node, assert_clean, is_zombie, kill, mounts, wait_until};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// What `daemon status` lists as swept, in both forms.
fn swept(node: &Node) -> String {
    let json = node.json(["daemon", "status"]);
    let lines: Vec<&str> = json["node"]["swept"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line.as_str().unwrap())
        .collect();
    let shown = node.ok(["daemon", "status"]);
    for line in &lines {
        assert!(
            shown.contains(&format!("swept: {line}\n")),
            "{line}: {shown}"
        );
    }
    lines.join("\n")
}

#[test]
fn privileged_a_start_finds_what_was_left_and_lists_it() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = Node::new("sweep");
    let root = node.scratch.mkdir("rootfs").unwrap();
    support::rootfs::make(&root);
    node.build("base/root:1", &root, &[]);
    let point = node.scratch.mkdir("mnt").unwrap();
    node.ok(["mount", "base/root:1", text(&point)]);
    let guard = MountGuard::new(&point);
    node.ok(["sandbox", "create", "--name", "lasting", "base/root:1"]);
    let write = "echo kept > /root/kept";
    node.ok(["sandbox", "exec", "lasting", "--", "sh", "-c", write]);

    // A command whose launcher is killed while no daemon looks.
    let mut run = node.command();
    run.args([
        "run",
        "--rm",
        "--name",
        "passing",
        "base/root:1",
        "--",
        "sh",
        "-c",
    ])
    .arg("echo x > /tmp/x; echo ready; sleep 1000")
    .stdout(Stdio::piped());
    let mut run = ChildGuard::spawn(&mut run).unwrap();
    let mut ready = [0u8; 6];
    let mut stdout = run.child().stdout.take().unwrap();
    stdout.read_exact(&mut ready).unwrap();
    let list = node.json(["sandbox", "ls"]);
    let of = |name: &str| {
        let all = list.as_array().unwrap().iter();
        all.clone().find(|s| s["name"] == name).unwrap().clone()
    };
    let (passing, lasting) = (of("passing"), of("lasting"));
    let pid = i32::try_from(passing["pid"].as_i64().unwrap()).unwrap();
    let directory = |sandbox: &serde_json::Value| {
        let id = sandbox["id"].as_str().unwrap();
        node.root().join("sandboxes").join(id)
    };
    assert!(directory(&passing).exists() && directory(&lasting).exists());
    // A cache of a layer that nobody knows.
    let unknown = node.root().join("cache").join("cd".repeat(32));
    fs_err::create_dir_all(&unknown).unwrap();
    fs_err::write(unknown.join("data"), vec![1; 9000]).unwrap();

    node.kill_all();
    kill(i32::try_from(run.child().id()).unwrap(), "KILL");
    run.child().wait().unwrap();
    // A mount that is gone when the next daemon starts, with its upper kept for nobody.
    let before = mounts(&node);
    assert!(
        before
            .iter()
            .any(|m| m.starts_with(node.root().join("layers")))
    );
    let other = node.scratch.mkdir("other").unwrap();
    node.ok(["mount", "base/root:1", text(&other)]);
    let _other = MountGuard::new(&other);

    let gone = || !Path::new(&format!("/proc/{pid}/root")).exists() || is_zombie(pid);
    assert!(wait_until(gone), "the process of a dead launcher");
    assert!(wait_until(|| !directory(&passing).exists()), "its upper");
    let layers = node.root().join("layers");
    let blobs = node.root().join("blobs");
    let words = [
        format!("unmounted {}", layers.display()),
        format!("unmounted {} (fuse", blobs.display()),
        "removed what a dead launcher left".to_owned(),
        "caches of 1 layers without a manifest here".to_owned(),
    ];
    for words in &words {
        assert!(
            wait_until(|| swept(&node).contains(words)),
            "{words}: {}",
            swept(&node)
        );
    }
    assert!(unknown.exists(), "its layer may come back");
    let report = node.run(["-o", "json", "doctor"]);
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let daemon = findings.iter().find(|f| f["name"] == "daemon").unwrap();
    let detail = daemon["detail"].as_str().unwrap();
    assert!(detail.contains("left-overs of former lives"), "{detail}");

    // What somebody has: the lasting sandbox and its files. Its own copies of the old mounts are dead,
    // and its files are not.
    let list = node.json(["sandbox", "ls"]);
    assert_eq!(list.as_array().unwrap().len(), 1, "{list}");
    assert_eq!(list[0]["name"], "lasting");
    let kept = directory(&lasting);
    assert!(kept.exists());
    node.ok(["umount", text(&point)]);
    drop(guard);
    node.ok(["umount", text(&other)]);
    node.ok(["sandbox", "rm", "--force", "lasting"]);
    assert!(!kept.exists());
    assert_clean(&node);
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
}
