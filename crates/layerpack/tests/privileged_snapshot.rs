//! Snapshots that agents can trust: rules, halting, the command inside, chains, other bases.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::io::{BufRead as _, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use layerpack_fixtures::treecmp::{self, Options};
use layerpack_fixtures::{MountGuard, is_root, skip};
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

#[track_caller]
fn pack(node: &Node, sandbox: &str, reference: &str, extra: &[&str]) -> Value {
    let (name, version) = reference.split_once(':').unwrap();
    let mut arguments = vec!["-o", "json", "pack-diff", sandbox];
    arguments.extend(["--name", name, "--version", version]);
    arguments.extend(extra);
    serde_json::from_str(&node.ok(arguments)).unwrap()
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

#[test]
fn privileged_rules_decide_what_leaves() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("rules");
    let id = node.ok(["sandbox", "create", "base/root:1"]);
    let id = id.trim();
    exec(
        &node,
        id,
        "mkdir -p /root/.ssh /job; echo k > /root/.ssh/id_rsa; echo h > /root/.bash_history; \
         echo x > /tmp/t; echo good > /job/result; echo 42 > /job/answer.key",
    );
    // Without rules everything is packed.
    let all = pack(&node, id, "all:1", &[]);
    assert!(all["report"]["rules"].is_null());
    assert_eq!(all["halted_by"], "freezer");
    assert_eq!(all["frozen_ms"].as_array().unwrap().len(), 1);
    let names = |reference: &str| node.ok(["find", reference, "--alone"]);
    assert!(names("diff/all:1").contains("/root/.ssh/id_rsa"));

    let dry = pack(&node, id, "dry:1", &["--rules", "standard", "--dry-run"]);
    assert_eq!(dry["dry_run"], true);
    assert!(dry["digest"].is_null());
    assert_eq!(dry["report"]["scrubbed"]["total"]["entries"], 3);
    node.fails(1, ["inspect", "diff/dry:1"]);

    let clean = pack(&node, id, "clean:1", &["--rules", "standard"]);
    let scrubbed: Vec<&str> = clean["report"]["scrubbed"]["named"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| f["path"].as_str().unwrap())
        .collect();
    assert_eq!(scrubbed, ["/root/.bash_history", "/root/.ssh/", "/tmp/t"]);
    let shown = names("diff/clean:1");
    assert!(
        shown.contains("/job/result") && !shown.contains(".ssh"),
        "{shown}"
    );

    // The node's own rules count where nothing else is said, and forbid.
    fs_err::write(
        node.root().join("scrub.toml"),
        "[[rule]]\nname = \"answers\"\naction = \"forbid\"\nglobs = [\"*.key\"]\n",
    )
    .unwrap();
    let pack_args = ["-q", "pack-diff", id, "--name", "no", "--version", "1"];
    let error = node.fails(1, pack_args);
    assert!(
        error.contains("/job/answer.key") && error.contains("answers"),
        "{error}"
    );
    node.fails(1, ["inspect", "diff/no:1"]);
    pack(&node, id, "no-rules:1", &["--no-rules"]);
    pack(&node, id, "excluded:1", &["--exclude", "*.key"]);
    // What is wrong is said before anything is halted.
    let bad = node
        .scratch
        .write("bad.toml", "[[rule]]\nglob = [\"x\"]\n")
        .unwrap();
    let mut with_bad = pack_args.to_vec();
    let bad = bad.to_str().unwrap();
    with_bad.extend(["--rules", bad]);
    let error = node.fails(1, &with_bad);
    assert!(
        error.contains("bad.toml") && error.contains("line 2"),
        "{error}"
    );
    let binary = node.scratch.join("binary.toml");
    fs_err::write(&binary, b"sets = []\n\xff").unwrap();
    let mut with_binary = pack_args.to_vec();
    with_binary.extend(["--rules", binary.to_str().unwrap()]);
    let error = node.fails(1, &with_binary);
    assert!(
        error.contains("binary.toml") && error.contains("byte 10"),
        "{error}"
    );
    assert_eq!(state(&node), "running");

    // What a lower layer holds is said, whether it was changed or removed above.
    fs_err::remove_file(node.root().join("scrub.toml")).unwrap();
    let restored = node.ok(["sandbox", "create", "--from", "diff/all:1"]);
    let restored = restored.trim();
    exec(
        &node,
        restored,
        "rm /root/.ssh/id_rsa; echo more >> /root/.bash_history",
    );
    let report = pack(&node, restored, "below:1", &["--rules", "standard"]);
    let below: Vec<(&str, &str, bool)> = report["report"]["still_below"]
        .as_array()
        .unwrap()
        .iter()
        .map(|b| {
            let text = |key: &str| b[key].as_str().unwrap();
            let layer = b["layers"][0].as_str().unwrap();
            (text("path"), layer, b["visible"].as_bool().unwrap())
        })
        .collect();
    assert_eq!(
        below,
        [
            ("/root/.bash_history", "diff/all:1", true),
            ("/root/.ssh/id_rsa", "diff/all:1", false),
        ]
    );
    // A squash of layers of the store is held to rules too: those named, or the node's.
    let squash = ["snapshot", "squash", "diff/all:1", "--name", "sq"];
    let mut arguments = vec!["-o", "json"];
    arguments.extend(squash);
    arguments.extend(["--version", "1", "--rules", "standard"]);
    let squashed: Value = serde_json::from_str(&node.ok(arguments)).unwrap();
    assert_eq!(squashed["reference"], "diff/sq:1");
    assert_eq!(squashed["report"]["scrubbed"]["total"]["entries"], 3);
    assert_eq!(names("diff/sq:1"), names("diff/clean:1"));
    let mut arguments = squash.to_vec();
    arguments.extend(["--version", "2"]);
    fs_err::write(
        node.root().join("scrub.toml"),
        "[[rule]]\nname = \"answers\"\naction = \"forbid\"\nglobs = [\"*.key\"]\n",
    )
    .unwrap();
    let error = node.fails(1, &arguments);
    assert!(error.contains("/job/answer.key"), "{error}");
    node.fails(1, ["inspect", "diff/sq:2"]);
    arguments.push("--no-rules");
    node.ok(&arguments);
    assert!(names("diff/sq:2").contains("/root/.ssh/id_rsa"));
    node.ok(["sandbox", "rm", "-f", id, restored]);
    assert_clean(&node);
}

/// A process that freezes a sandbox and never lets it go.
#[test]
#[ignore = "a child process of another test"]
fn holder() {
    let what = std::env::var("LAYERPACK_TEST_HOLD").unwrap();
    let (root, id) = what.split_once('|').unwrap();
    let all = Sandboxes::open(SandboxesOptions {
        root: PathBuf::from(root),
        init: None,
        agent: None,
        cgroup_parent: "layerpack".to_owned(),
        stop_by_signals: false,
    })
    .unwrap();
    let _guard = all.freeze(id, Duration::from_secs(20)).unwrap();
    std::io::stderr().write_all(b"\nfrozen\n").unwrap();
    std::thread::sleep(Duration::from_secs(1000));
}

/// A process that keeps a sandbox frozen.
fn hold(node: &Node, id: &str) -> std::process::Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "holder", "--ignored", "--nocapture"])
        .env(
            "LAYERPACK_TEST_HOLD",
            format!("{}|{id}", node.root().join("sandboxes").display()),
        )
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
    for line in lines {
        if line.unwrap() == "frozen" {
            break;
        }
    }
    child
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
fn privileged_a_killed_packer_leaves_no_frozen_sandbox() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("guard");
    let id = node.ok(["sandbox", "create", "base/root:1"]);
    let id = id.trim();
    let socket = node.root().join("daemon.sock");
    // The daemon watches who freezes.
    let mut child = hold(&node, id);
    assert_eq!(state(&node), "frozen");
    let body = format!("{{\"sandbox\":\"{id}\",\"pid\":{}}}", child.id());
    assert_eq!(post(&socket, "/v1/guards", &body).0, 200);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        support::wait_until(|| state(&node) == "running"),
        "{}",
        node.log()
    );
    // What is not there cannot be watched.
    assert_eq!(
        post(&socket, "/v1/guards", "{\"sandbox\":\"none\",\"pid\":1}").0,
        404
    );
    let body = format!("{{\"sandbox\":\"{id}\",\"pid\":0}}");
    assert_eq!(post(&socket, "/v1/guards", &body).0, 404);
    node.ok(["sandbox", "rm", "-f", id]);
    assert_clean(&node);
}

#[test]
fn privileged_a_daemon_that_starts_looks_after_frozen_sandboxes() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("guard-start");
    let id = node.ok(["sandbox", "create", "base/root:1"]);
    let id = id.trim();
    let mut child = hold(&node, id);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(state(&node), "frozen");
    node.kill_daemon();
    node.ok(["sandbox", "create", "--name", "other", "base/root:1"]);
    assert!(
        support::wait_until(|| {
            let list = node.json(["sandbox", "ls"]);
            list.as_array()
                .unwrap()
                .iter()
                .all(|s| s["state"] == "running")
        }),
        "{}",
        node.log()
    );
    node.ok(["sandbox", "rm", "-f", id, "other"]);
    assert_clean(&node);
}

#[test]
fn privileged_what_goes_wrong_harms_neither_sandbox_nor_store() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("wrong");
    let id = node.ok(["sandbox", "create", "base/root:1"]);
    let id = id.trim();
    exec(&node, id, "echo one > /root/one");
    let published = || node.json(["snapshot", "ls"]).as_array().unwrap().len();
    let pack_as = |name: &str| node.run(["-q", "pack-diff", id, "--name", name, "--version", "1"]);
    // Two at once.
    let held = sandboxes(&node).hold(id, Duration::ZERO).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| pack_as("two"));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!second.is_finished() && published() == 0);
        drop(held);
        assert!(second.join().unwrap().status.success());
    });
    // A name that is taken by something else.
    assert!(pack_as("taken").status.success());
    exec(&node, id, "echo two > /root/two");
    let error = support::one_error(1, &pack_as("taken"));
    assert!(error.contains("diff/taken:1"), "{error}");
    // A store that is away.
    let away = [
        "-q",
        "--store",
        "http://127.0.0.1:9/none?retries=0",
        "pack-diff",
        id,
    ];
    let error = node.fails(1, away.iter().chain(&["--name", "x", "--version", "1"]));
    assert!(error.contains("127.0.0.1"), "{error}");
    // The sandbox's own store, moved away: none is made in its place.
    let elsewhere = node.scratch.join("moved-store");
    fs_err::rename(node.store(), &elsewhere).unwrap();
    let error = support::one_error(1, &pack_as("gone"));
    assert!(
        error.contains("away") && error.contains(node.store().to_str().unwrap()),
        "{error}"
    );
    assert!(!node.store().exists());
    assert_eq!(state(&node), "running");
    fs_err::rename(&elsewhere, node.store()).unwrap();
    assert_eq!(published(), 2);
    // An upper that no overlay made: a moved directory whose contents are below.
    let upper = sandboxes(&node).get(id).unwrap().upper;
    let damaged = upper.join("root/damaged");
    fs_err::create_dir(&damaged).unwrap();
    rustix::fs::setxattr(
        &damaged,
        "trusted.overlay.redirect",
        b"/etc",
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
    let error = support::one_error(1, &pack_as("damaged"));
    assert!(error.contains("root/damaged"), "{error}");
    fs_err::remove_dir(&damaged).unwrap();
    assert_eq!((published(), state(&node).as_str()), (2, "running"));
    exec(&node, id, "cat /root/one /root/two");
    // One that dies can still be packed, whole.
    let pid = node.json(["sandbox", "ls"])[0]["pid"].as_i64().unwrap();
    support::kill(i32::try_from(pid).unwrap(), "KILL");
    assert!(support::wait_until(|| state(&node) == "dead"));
    let dead = pack(&node, id, "dead:1", &[]);
    assert_eq!(dead["halted_by"], "nothing");
    let found = node.ok(["find", "--alone", "diff/dead:1"]);
    assert!(found.contains("/root/one") && found.contains("/root/two"));
    node.ok(["sandbox", "rm", id]);
    assert_clean(&node);
}

#[test]
fn privileged_a_full_store_harms_neither_sandbox_nor_store() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("full");
    let id = node.ok(["sandbox", "create", "base/root:1"]);
    let id = id.trim();
    let write = "cd /root; mkdir many; for i in 0 1 2 3 4 5 6 7 8 9; do \
                 for j in 0 1 2 3 4 5 6 7 8 9; do echo $i$j > many/$i$j; done; done; \
                 dd if=/dev/urandom of=large bs=1048576 count=8 2>/dev/null";
    exec(&node, id, write);
    let (mut refused, mut published) = (0, 0);
    // Full before the first pack, within it, at what describes it; the last has room.
    for kib in [0, 64, 2 << 10, 6 << 10, 8200, 8216, 8240, 16 << 10] {
        let place = node.scratch.mkdir(format!("disk-{kib}")).unwrap();
        let disk = MountGuard::tmpfs((kib << 10) + 4096, &place).unwrap();
        let store = disk.path().join("store");
        let store = store.to_str().unwrap();
        let arguments = ["-q", "--store", store, "pack-diff", id];
        let output = node.run(arguments.iter().chain(&["--name", "s", "--version", "1"]));
        let listed = node.run(["-o", "json", "--store", store, "snapshot", "ls"]);
        if output.status.success() {
            published += 1;
            node.ok(["--store", store, "verify", "diff/s:1"]);
        } else {
            refused += 1;
            let error = support::one_error(1, &output);
            assert!(
                error.contains(store) && error.to_lowercase().contains("space"),
                "{error}"
            );
            // Full before there was a store, or after that.
            match listed.status.success() {
                true => assert_eq!(listed.stdout.trim_ascii(), b"[]", "{kib} KiB"),
                false => assert!(String::from_utf8_lossy(&listed.stderr).contains("no store")),
            }
            let left = fs_err::read_dir(disk.path().join("store/tmp"));
            assert_eq!(left.into_iter().flatten().count(), 0, "{kib} KiB");
        }
        assert_eq!(state(&node), "running");
        assert_eq!(exec(&node, id, "cat /root/many/42"), "42\n");
        disk.unmount().unwrap();
    }
    assert!(refused >= 4 && published >= 1, "{refused} {published}");
    node.ok(["sandbox", "rm", "-f", id]);
    assert_clean(&node);
}

#[test]
fn privileged_a_sandbox_that_dies_while_it_is_packed_is_packed_whole_or_not() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("dies");
    for (round, delay) in [0, 3, 6, 9, 12, 15, 20, 30, 45, 70, 120]
        .into_iter()
        .enumerate()
    {
        let made = node.json(["sandbox", "create", "base/root:1"]);
        let id = made["id"].as_str().unwrap();
        let pid = i32::try_from(made["pid"].as_i64().unwrap()).unwrap();
        let write = "cd /root; for i in 0 1 2 3 4 5 6 7 8 9; do \
                     for j in 0 1 2 3 4 5 6 7 8 9; do echo $i$j > f$i$j; done; done; \
                     dd if=/dev/urandom of=large bs=1048576 count=4 2>/dev/null; \
                     while :; do echo more >> log; done >/dev/null 2>&1 &";
        exec(&node, id, write);
        let (name, version) = (format!("s{round}"), "1");
        let mut command = node.command();
        command.args(["-q", "pack-diff", id, "--name", &name, "--version", version]);
        let packer = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        support::kill(pid, "KILL");
        let output = packer.wait_with_output().unwrap();
        let reference = format!("diff/{name}:1");
        if output.status.success() {
            let found = node.ok(["find", "--alone", &reference]);
            let files = found.lines().filter(|line| line.contains("/root/f"));
            assert_eq!(files.count(), 100, "{found}");
            assert!(found.contains("/root/large"), "{found}");
            node.ok(["verify", &reference]);
        } else {
            support::one_error(1, &output);
            node.fails(1, ["inspect", &reference]);
        }
        // What it wrote is still there, for the next attempt.
        assert!(support::wait_until(|| state(&node) == "dead"));
        pack(&node, id, &format!("again{round}:1"), &[]);
        node.ok(["sandbox", "rm", id]);
    }
    assert_clean(&node);
}

#[test]
fn privileged_fifty_snapshots_in_a_row() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("fifty");
    let mut stack = "base/root:1".to_owned();
    for round in 1..=50u32 {
        let id = node.ok(["-q", "sandbox", "create", &stack]);
        let id = id.trim();
        let old = round.saturating_sub(3);
        exec(
            &node,
            id,
            &format!("cd /root; echo {round} > f{round}; rm -f f{old}; echo {round} >> log"),
        );
        let packed = pack(&node, id, &format!("chain:{round}"), &[]);
        // Only what is new: a file, the log, a whiteout.
        assert!(packed["counts"]["files"].as_u64().unwrap() <= 2, "{packed}");
        node.ok(["sandbox", "rm", "-f", id]);
        stack = format!("diff/chain:{round}");
    }
    let shown = node.json(["snapshot", "inspect", &stack]);
    assert_eq!(shown["stack"].as_array().unwrap().len(), 50);
    let created = node.json(["sandbox", "create", "--from", &stack]);
    let id = created["id"].as_str().unwrap();
    assert_eq!(created["stack"].as_array().unwrap().len(), 51);
    let log: String = (1..=50).map(|n| format!("{n}\n")).collect();
    assert_eq!(exec(&node, id, "cat /root/log"), log);
    assert_eq!(exec(&node, id, "cd /root; echo f*"), "f48 f49 f50\n");
    let depth = sandboxes(&node).get(id).unwrap().spec.lowers.len();
    assert!(depth <= 20, "{depth} layers are mounted");
    // One layer of all fifty, which shows the same.
    node.ok([
        "-q",
        "snapshot",
        "squash",
        &stack,
        "--name",
        "one",
        "--version",
        "1",
    ]);
    let shown = node.json(["snapshot", "inspect", "diff/one:1"]);
    assert_eq!(shown["stack"].as_array().unwrap().len(), 1);
    let changes = node.json(["snapshot", "diff", &stack, "diff/one:1"]);
    assert_eq!(changes, serde_json::json!([]));
    // The next snapshot can take them all in.
    exec(&node, id, "echo last > /root/last");
    pack(&node, id, "squashed:1", &["--squash"]);
    let shown = node.json(["snapshot", "inspect", "diff/squashed:1"]);
    assert_eq!(shown["stack"].as_array().unwrap().len(), 1);
    let output = node.run([
        "run",
        "--rm",
        "diff/squashed:1",
        "--",
        "sh",
        "-c",
        "cd /root; echo f* last; cat log",
    ]);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        format!("f48 f49 f50 last\n{log}"),
        "{}",
        describe(&output)
    );
    node.ok(["sandbox", "rm", "-f", id]);
    assert_clean(&node);
}

#[test]
fn privileged_a_snapshot_goes_elsewhere() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("elsewhere");
    let id = node.ok(["sandbox", "create", "base/root:1"]);
    let id = id.trim();
    exec(
        &node,
        id,
        "mkdir /job; echo one > /job/one; rm -r /var/data; rm /etc/group; echo x > /shell2",
    );
    pack(&node, id, "s:1", &["--label", "by=test"]);
    let origin = node.store();
    // Another store has nothing: the snapshot brings what it is made on.
    let mut other = Node::new("elsewhere-2");
    let create = ["sandbox", "create", "--from", "diff/s:1"];
    let error = other.fails(1, create);
    assert!(error.contains("diff/s:1"), "{error}");
    let created = other.ok(create
        .iter()
        .chain(&["--fetch-from", origin.to_str().unwrap()]));
    let restored = created.trim();
    assert_eq!(
        exec(&other, restored, "cat /job/one /shell2; ls /etc"),
        "one\nx\npasswd\n"
    );
    other.ok(["sandbox", "rm", "-f", restored]);
    other.environment.clear();
    assert_clean(&other);

    let list = node.json(["snapshot", "ls", "--on", "base/root:1"]);
    assert_eq!(list[0]["reference"], "diff/s:1");
    assert_eq!(list[0]["labels"]["by"], "test");
    let changes = node.ok(["snapshot", "diff", "diff/s:1"]);
    for line in ["A /job/one", "D /etc/group", "D /var/data", "A /shell2"] {
        assert!(changes.contains(line), "{changes}");
    }
    // As a directory it is what the sandbox shows, and as a layer it has whiteouts.
    let out = node.scratch.join("out");
    node.ok(["-q", "checkout", "diff/s:1", out.to_str().unwrap()]);
    let point = node.scratch.mkdir("mnt").unwrap();
    node.ok(["mount", "diff/s:1", point.to_str().unwrap()]);
    let plain = Options::default();
    let (mounted, written) = (
        treecmp::snapshot(&point, &plain).unwrap(),
        treecmp::snapshot(&out, &plain).unwrap(),
    );
    node.ok(["umount", point.to_str().unwrap()]);
    treecmp::assert_same(&mounted, &written);
    let archive = node.scratch.join("layer.tar");
    node.ok([
        "-q",
        "snapshot",
        "export",
        "diff/s:1",
        "--to",
        archive.to_str().unwrap(),
    ]);
    let listed = Command::new("tar")
        .arg("-tf")
        .arg(&archive)
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    for name in ["job/one", "etc/.wh.group", "var/.wh.data", "shell2"] {
        assert!(
            listed
                .lines()
                .any(|line| line.trim_start_matches("./") == name),
            "{listed}"
        );
    }

    // As an image, with what is below.
    let target = format!("oci:{}", node.scratch.join("image").to_str().unwrap());
    let image = node.json(["snapshot", "export", "diff/s:1", "--to", &target]);
    assert_eq!(image["layers"], 2);
    assert!(node.scratch.join("image/oci-layout").is_file());
    let tar = format!("tar:{}", node.scratch.join("second.tar").to_str().unwrap());
    node.ok(["-q", "snapshot", "export", "diff/s:1", "--to", &tar]);
    assert_eq!(
        fs_err::read(node.scratch.join("second.tar")).unwrap(),
        fs_err::read(&archive).unwrap()
    );

    // A newer base: what both changed is told, and settled as asked.
    let newer = node.scratch.join("rootfs");
    fs_err::write(
        newer.join("etc/group"),
        "root:x:0:\nworker:x:1000:\nnew:x:7:\n",
    )
    .unwrap();
    fs_err::write(newer.join("etc/motd"), "welcome\n").unwrap();
    node.build("base/root:2", &newer, &[]);
    let onto = [
        "snapshot",
        "rebase",
        "diff/s:1",
        "--onto",
        "base/root:2",
        "--name",
        "r",
    ];
    let output = node.run(onto.iter().chain(&["--version", "1"]));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("conflict /etc/group: removed-and-changed"),
        "{said}"
    );
    for (version, strategy, group) in [("2", "snapshot", false), ("3", "base", true)] {
        let more = ["--version", version, "--strategy", strategy];
        node.ok(["-q"].iter().chain(&onto).chain(&more));
        let script =
            "cat /etc/motd /job/one; test -e /etc/group && echo group; test ! -e /var/data";
        let reference = format!("diff/r:{version}");
        let output = node.run(["run", "--rm", &reference, "--", "sh", "-c", script]);
        let expected = if group {
            "welcome\none\ngroup\n"
        } else {
            "welcome\none\n"
        };
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            expected,
            "{}",
            describe(&output)
        );
        assert!(output.status.success(), "{}", describe(&output));
    }
    // What was made on another snapshot does not go without it.
    let id2 = node.ok(["sandbox", "create", "--from", "diff/s:1"]);
    exec(&node, id2.trim(), "echo two >/job/two");
    node.ok(["pack-diff", id2.trim(), "--name", "t", "--version", "1"]);
    node.ok(["sandbox", "rm", "-f", id2.trim()]);
    let onto = ["--onto", "base/root:2", "--name", "u", "--version", "1"];
    let keep = ["--strategy", "snapshot"];
    let rebase = ["snapshot", "rebase", "diff/t:1"];
    let said = node.fails(1, rebase.iter().chain(&onto).chain(&keep));
    assert!(
        said.contains("diff/s:1") && said.contains("snapshot squash"),
        "{said}"
    );
    let squash = ["snapshot", "squash", "diff/t:1", "--name", "st"];
    node.ok(squash.iter().chain(&["--version", "1"]));
    let rebase = ["snapshot", "rebase", "diff/st:1"];
    node.ok(["-q"].iter().chain(&rebase).chain(&onto).chain(&keep));
    let shown = [
        "run", "--rm", "diff/u:1", "--", "cat", "/job/one", "/job/two",
    ];
    assert_eq!(node.ok(shown), "one\ntwo\n");
    node.ok(["snapshot", "rm", "diff/r:2"]);
    node.fails(1, ["snapshot", "inspect", "diff/r:2"]);
    node.fails(2, ["snapshot", "rm", "base/root:1"]);
    node.ok(["sandbox", "rm", "-f", id]);
    assert_clean(&node);
}
