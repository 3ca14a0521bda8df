//! Commands in sandboxes, snapshots of them, sandboxes from snapshots.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::io::Write as _;
use std::process::Stdio;

use layerpack_fixtures::treecmp::{self, Options};
use layerpack_fixtures::{MountGuard, is_root, skip};
use support::{Node, assert_clean, describe, one_error};

/// A node with the layer `base/root:1` and, over it, `workspace/w:1` at /project.
fn node(label: &str) -> Node {
    let node = Node::new(label);
    let root = node.scratch.mkdir("rootfs").unwrap();
    support::rootfs::make(&root);
    node.build("base/root:1", &root, &[]);
    let work = node.scratch.mkdir("work").unwrap();
    fs_err::write(work.join("hello.txt"), "hello from the workspace\n").unwrap();
    fs_err::create_dir_all(work.join("gone")).unwrap();
    fs_err::write(work.join("gone/inner"), "to be deleted\n").unwrap();
    node.build("workspace/w:1", &work, &["--at", "/project"]);
    node
}

#[test]
fn privileged_run_passes_output_input_and_code() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("run");
    let stack = ["run", "--rm", "base/root:1", "workspace/w:1"];
    let run = |extra: &[&str], command: &[&str]| {
        let mut arguments = stack.to_vec();
        arguments.splice(2..2, extra.iter().copied());
        arguments.push("--");
        arguments.extend(command);
        node.run(arguments)
    };
    let output = run(&[], &["cat", "/project/hello.txt"]);
    assert!(output.status.success(), "{}", describe(&output));
    assert_eq!(output.stdout, b"hello from the workspace\n");
    assert!(output.stderr.is_empty(), "{}", describe(&output));

    for code in [0, 1, 7, 125, 255] {
        let output = run(&[], &["sh", "-c", &format!("exit {code}")]);
        assert_eq!(output.status.code(), Some(code), "{}", describe(&output));
    }
    assert_eq!(
        run(&[], &["sh", "-c", "kill -9 $$"]).status.code(),
        Some(137)
    );
    assert_eq!(run(&[], &["no-such-program"]).status.code(), Some(127));
    assert_eq!(run(&[], &["/etc/passwd"]).status.code(), Some(126));

    let output = run(
        &["-e", "ONE=1", "-e", "TWO=a b", "-w", "/tmp", "-u", "worker"],
        &["sh", "-c", "echo $ONE:$TWO:$PWD:$(id -u):$(id -g)"],
    );
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "1:a b:/tmp:1000:1000\n"
    );
    let output = run(&["-u", "12:34"], &["sh", "-c", "id -u; id -g"]);
    assert_eq!(output.stdout, b"12\n34\n");

    // Without -i stdin is empty, with it it is ours.
    assert_eq!(run(&[], &["cat"]).stdout, b"");
    let mut child = node
        .command()
        .args(["run", "--rm", "-i", "base/root:1", "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(b"through the sandbox")
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        output.stdout,
        b"through the sandbox",
        "{}",
        describe(&output)
    );

    // The host's environment stays outside.
    let output = run(&[], &["env"]);
    let environment = String::from_utf8(output.stdout).unwrap();
    assert!(
        !environment.contains("LAYERPACK") && !environment.contains("CARGO"),
        "{environment}"
    );
    assert_clean(&node);
}

#[test]
fn privileged_run_fetches_a_part_of_the_layers() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = Node::new("part");
    let root = node.scratch.mkdir("rootfs").unwrap();
    support::rootfs::make(&root);
    let bulk = node.scratch.mkdir("rootfs/usr/share").unwrap();
    for i in 0..24u64 {
        fs_err::write(
            bulk.join(format!("blob-{i}")),
            layerpack_fixtures::rng::Rng::new(i).bytes(1 << 20),
        )
        .unwrap();
    }
    node.build("base/root:1", &root, &[]);
    let size = node.json(["ls"])[0]["size"].as_u64().unwrap();
    let output = node.run(["run", "--rm", "base/root:1", "--", "cat", "/etc/group"]);
    assert!(output.status.success(), "{}", describe(&output));
    let status = node.json(["daemon", "status"]);
    let fetched = status["node"]["totals"]["fetched_bytes"].as_u64().unwrap();
    assert!(fetched > 0, "{status}");
    assert!(
        fetched * 4 < size,
        "{fetched} of {size} bytes were fetched to run one small command"
    );
    assert_clean(&node);
}

#[test]
fn privileged_a_change_survives_as_a_snapshot() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("snapshot");
    let created = node.json([
        "sandbox",
        "create",
        "--name",
        "lasting",
        "base/root:1",
        "workspace/w:1",
    ]);
    let id = created["id"].as_str().unwrap().to_owned();
    let list = node.json(["sandbox", "ls"]);
    assert_eq!(list[0]["id"], id.as_str());
    assert_eq!(list[0]["name"], "lasting");
    assert_eq!(list[0]["state"], "running");
    assert_eq!(
        list[0]["stack"],
        serde_json::json!(["base/root:1", "workspace/w:1"])
    );
    assert!(list[0]["pid"].as_u64().unwrap() > 1);

    let script = "set -e; cd /project; echo changed > hello.txt; rm -r gone; mkdir gone; echo new > gone/other; \
                  touch /root/mine; chmod 600 /root/mine; mkdir -p deep/er; ln -s ../hello.txt deep/link; rm /etc/group";
    let output = node.run(["sandbox", "exec", "lasting", "--", "sh", "-c", script]);
    assert!(output.status.success(), "{}", describe(&output));
    assert_eq!(
        node.run(["sandbox", "exec", &id, "sh", "-c", "exit 9"])
            .status
            .code(),
        Some(9)
    );

    let line = node.ok([
        "pack-diff",
        "lasting",
        "--name",
        "change",
        "--version",
        "1",
        "--label",
        "by=test",
    ]);
    assert!(line.starts_with("diff/change:1 b3:"), "{line}");
    // The sandbox goes on.
    let output = node.run([
        "sandbox",
        "exec",
        "lasting",
        "--",
        "cat",
        "/project/hello.txt",
    ]);
    assert_eq!(output.stdout, b"changed\n", "{}", describe(&output));
    // Nothing changed meanwhile: the same snapshot.
    assert_eq!(
        node.ok([
            "pack-diff",
            "lasting",
            "--name",
            "change",
            "--version",
            "1",
            "--label",
            "by=test"
        ]),
        line
    );
    node.run([
        "sandbox",
        "exec",
        "lasting",
        "--",
        "touch",
        "/project/later",
    ]);
    let error = node.fails(
        1,
        [
            "-q",
            "pack-diff",
            "lasting",
            "--name",
            "change",
            "--version",
            "1",
        ],
    );
    assert!(error.contains("diff/change:1"), "{error}");
    assert_eq!(
        node.json(["sandbox", "ls"])[0]["state"],
        "running",
        "thawed after the error too"
    );

    let shown = node.json(["inspect", "diff/change:1"]);
    assert_eq!(
        shown[0]["manifest"]["parents"].as_array().unwrap().len(),
        2,
        "{shown}"
    );
    assert_eq!(shown[0]["manifest"]["labels"]["by"], "test");

    // A new sandbox from the snapshot, by its name alone or with the stack spelt out.
    let check = "cat hello.txt gone/other; ls gone; stat -c %a%U /root/mine; cat deep/link; test ! -e /etc/group; test ! -e later";
    for stack in [
        &["diff/change:1"][..],
        &["base/root:1", "workspace/w:1", "diff/change:1"],
    ] {
        let mut arguments = vec!["run", "--rm", "-w", "/project"];
        arguments.extend(stack);
        arguments.extend(["--", "sh", "-c", check]);
        let output = node.run(arguments);
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "changed\nnew\nother\n600root\nchanged\n",
            "{}",
            describe(&output)
        );
        assert!(output.status.success(), "{}", describe(&output));
    }
    assert_eq!(
        node.ok(["sandbox", "rm", "--force", "lasting"]),
        format!("{id}\n")
    );
    assert_clean(&node);
}

#[test]
fn privileged_a_restored_tree_equals_the_sandbox() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("restored");
    let created = node.json(["sandbox", "create", "base/root:1", "workspace/w:1"]);
    let id = created["id"].as_str().unwrap();
    let script = "set -e; cd /project; mkdir -m 2770 deep; echo one > deep/file; chmod 4755 deep/file; \
                  ln deep/file deep/second; ln -s /etc/passwd link; mkfifo -m 600 pipe; rm -r gone; \
                  mkdir gone; touch -d @-5 gone/old; mv hello.txt moved.txt; chown 1000:1000 moved.txt; \
                  rm /shell; mkdir /shell; touch /shell/inner; chmod 700 /etc; rm -rf /var/data; \
                  dd if=/dev/zero of=/tmp/hole bs=1 count=1 seek=5000000 2>/dev/null";
    let output = node.run(["sandbox", "exec", id, "--", "sh", "-c", script]);
    assert!(output.status.success(), "{}", describe(&output));
    node.ok(["-q", "pack-diff", id, "--name", "tree", "--version", "1"]);
    // As the sandbox shows itself to its node: ids are shifted, and the kernel's own filesystems
    // are mounted.
    let pid = created["pid"].as_u64().unwrap();
    let plain = || {
        Options::default()
            .exclude("proc")
            .exclude("sys")
            .exclude("dev")
    };
    let shifted = Options {
        id_offset: 0u32.wrapping_sub(1 << 20),
        ..plain()
    };
    let before = treecmp::snapshot(format!("/proc/{pid}/root"), &shifted).unwrap();
    assert!(before.get("project/deep/second").is_some());
    let point = node.scratch.mkdir("restored").unwrap();
    node.ok(["mount", "diff/tree:1", point.to_str().unwrap()]);
    let guard = MountGuard::new(&point);
    let after = treecmp::snapshot(&point, &plain()).unwrap();
    treecmp::assert_same(&before, &after);
    node.ok(["umount", point.to_str().unwrap()]);
    drop(guard);
    node.ok(["sandbox", "rm", "-f", id]);
    assert_clean(&node);
}

#[test]
fn privileged_a_snapshot_of_a_snapshot() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("chain");
    let mut stack = vec!["base/root:1".to_owned(), "workspace/w:1".to_owned()];
    for round in 1..=3u32 {
        let mut arguments = vec![
            "-o".to_owned(),
            "json".to_owned(),
            "sandbox".to_owned(),
            "create".to_owned(),
        ];
        arguments.extend(stack.clone());
        let created: serde_json::Value = serde_json::from_str(&node.ok(&arguments)).unwrap();
        let id = created["id"].as_str().unwrap();
        node.ok([
            "sandbox",
            "exec",
            id,
            "--",
            "sh",
            "-c",
            &format!("echo {round} > /project/round-{round}"),
        ]);
        node.ok([
            "-q",
            "pack-diff",
            id,
            "--name",
            "chain",
            "--version",
            &round.to_string(),
        ]);
        node.ok(["sandbox", "rm", "-f", id]);
        stack = vec![format!("diff/chain:{round}")];
    }
    let output = node.run([
        "run",
        "--rm",
        "diff/chain:3",
        "--",
        "sh",
        "-c",
        "cat /project/round-*",
    ]);
    assert_eq!(output.stdout, b"1\n2\n3\n", "{}", describe(&output));
    assert_clean(&node);
}

#[test]
fn privileged_an_interrupted_pack_thaws_and_publishes_nothing() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("interrupt");
    let id = node.ok(["-q", "sandbox", "create", "base/root:1"]);
    let id = id.trim();
    node.ok([
        "sandbox",
        "exec",
        id,
        "--",
        "dd",
        "if=/dev/urandom",
        "of=/root/bulk",
        "bs=1M",
        "count=96",
    ]);
    let mut child = node
        .command()
        .args([
            "pack-diff",
            id,
            "--name",
            "cut",
            "--version",
            "1",
            "--jobs",
            "1",
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The first line comes when the sandbox is frozen and the scan begins.
    let mut stderr = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut stderr, &mut line).unwrap();
    assert!(line.starts_with("diff/cut:1"), "{line}");
    support::kill(i32::try_from(child.id()).unwrap(), "INT");
    let code = child.wait().unwrap().code();
    let published = node
        .json(["ls", "--kind", "diff"])
        .as_array()
        .unwrap()
        .len();
    // A pack that was quicker than the signal is done.
    assert!(
        (code, published) == (Some(130), 0) || (code, published) == (Some(0), 1),
        "{code:?} {published}"
    );
    assert_eq!(node.json(["sandbox", "ls"])[0]["state"], "running");
    node.ok(["sandbox", "exec", id, "--", "true"]);
    node.ok(["sandbox", "rm", "-f", id]);
    assert_clean(&node);
}

#[test]
fn privileged_a_kept_run_can_be_packed() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("kept");
    let output = node.run([
        "run",
        "--name",
        "once",
        "base/root:1",
        "--",
        "touch",
        "/root/left",
    ]);
    assert!(output.status.success(), "{}", describe(&output));
    let list = node.json(["sandbox", "ls"]);
    assert_eq!(list[0]["name"], "once");
    assert_ne!(list[0]["state"], "running");
    node.ok([
        "-q",
        "pack-diff",
        "once",
        "--name",
        "left",
        "--version",
        "1",
    ]);
    node.ok(["sandbox", "rm", "once"]);
    let output = node.run(["run", "--rm", "diff/left:1", "--", "ls", "/root"]);
    assert_eq!(output.stdout, b"left\n", "{}", describe(&output));
    assert_clean(&node);
}

#[test]
fn privileged_signals_and_terminals_pass_through() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("signals");
    let output = node.run([
        "run",
        "--rm",
        "-t",
        "base/root:1",
        "--",
        "sh",
        "-c",
        "tty; test -t 0 && test -t 1 && test -t 2",
    ]);
    assert!(output.status.success(), "{}", describe(&output));
    assert!(
        output.stdout.starts_with(b"/dev/pts/"),
        "{}",
        describe(&output)
    );
    let error = one_error(
        125,
        &node.run(["run", "--rm", "-it", "base/root:1", "--", "tty"]),
    );
    assert!(error.contains("terminal"), "{error}");

    let mut child = node
        .command()
        .args([
            "run",
            "--rm",
            "base/root:1",
            "--",
            "sh",
            "-c",
            "trap 'exit 42' TERM; echo ready; while :; do sleep 0.05; done",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0u8; 6];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready).unwrap();
    support::kill(i32::try_from(child.id()).unwrap(), "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(42));
    assert_clean(&node);
}

#[test]
fn privileged_a_killed_run_leaves_nothing_for_long() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("killed-run");
    // Without --rm its files were to be kept: it stays as a dead one.
    for rm in [&[][..], &["--rm"]] {
        let mut child = node
            .command()
            .args(["run", "--name", "killed"])
            .args(rm)
            .args(["base/root:1", "--", "sh", "-c", "echo ready; sleep 1000"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = [0u8; 6];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready).unwrap();
        let pid = node.json(["sandbox", "ls"])[0]["pid"].as_i64().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let gone = || {
            !std::path::Path::new(&format!("/proc/{pid}/root")).exists()
                || support::is_zombie(i32::try_from(pid).unwrap())
        };
        assert!(
            support::wait_until(gone),
            "the sandbox outlives its launcher"
        );
        if rm.is_empty() {
            // Its last process may be gone a moment before its group is empty.
            let dead = || node.json(["sandbox", "ls"])[0]["state"] == "dead";
            assert!(support::wait_until(dead), "it is never dead");
            node.ok(["sandbox", "rm", "killed"]);
        }
    }
    // Its lease and directory go at the next occasion.
    assert_clean(&node);
}

#[test]
fn privileged_limits_hold() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("limits");
    // More processes than allowed: the shell cannot fork them all.
    let output = node.run([
        "run",
        "--rm",
        "--pids-limit",
        "8",
        "base/root:1",
        "--",
        "sh",
        "-c",
        "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 5 & done; wait",
    ]);
    assert_ne!(output.status.code(), Some(0), "{}", describe(&output));
    // More memory than allowed: killed.
    let output = node.run([
        "run",
        "--rm",
        "--memory",
        "32m",
        "base/root:1",
        "--",
        "dd",
        "if=/dev/zero",
        "of=/dev/null",
        "bs=200M",
        "count=1",
    ]);
    assert_ne!(output.status.code(), Some(0), "{}", describe(&output));
    let output = node.run([
        "run",
        "--rm",
        "--memory",
        "512m",
        "base/root:1",
        "--",
        "dd",
        "if=/dev/zero",
        "of=/dev/null",
        "bs=1M",
        "count=1",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", describe(&output));
    assert_clean(&node);
}

#[test]
fn privileged_failures_of_run_are_125_and_leave_nothing() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = node("fail");
    for arguments in [
        &["run", "--rm", "base/unknown:1", "--", "true"][..],
        &["run", "--rm", "base/root:1", "base/root:1", "--", "true"],
        &[
            "run",
            "--rm",
            "-u",
            "nobody-here",
            "base/root:1",
            "--",
            "true",
        ],
        &["sandbox", "exec", "no-such-sandbox", "--", "true"],
    ] {
        one_error(125, &node.run(arguments));
    }
    let error = node.fails(1, ["sandbox", "rm", "no-such-sandbox"]);
    assert!(error.contains("no-such-sandbox"), "{error}");
    let error = node.fails(
        1,
        [
            "pack-diff",
            "no-such-sandbox",
            "--name",
            "x",
            "--version",
            "1",
        ],
    );
    assert!(error.contains("no-such-sandbox"), "{error}");
    node.ok(["sandbox", "create", "--name", "twin", "base/root:1"]);
    let error = node.fails(1, ["sandbox", "create", "--name", "twin", "base/root:1"]);
    assert!(error.contains("twin"), "{error}");
    let error = node.fails(1, ["sandbox", "rm", "twin"]);
    assert!(error.contains("--force"), "{error}");
    node.ok(["sandbox", "rm", "--force", "twin"]);
    assert_clean(&node);
}
