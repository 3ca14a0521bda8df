//! `build --git-index`: what the first `git status` on a mounted layer and in a sandbox reads.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "tests"
)]

mod support;

use std::path::Path;
use std::process::Command;

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::{MountGuard, find_tool, is_root, skip};
use support::{Node, describe};

const FILES: u64 = 200;
const FILE_BYTES: usize = 100 << 10;

fn git(dir: &Path) -> Command {
    let mut command = Command::new("git");
    command
        .current_dir(dir)
        .args([
            "-c",
            "safe.directory=*",
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
        ])
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_OPTIONAL_LOCKS", "0");
    command
}

#[track_caller]
fn ok(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", describe(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// A committed and packed repository of 20 MB that nothing compresses, moved once so that its
/// index knows no inode of it.
fn repository(dir: &Path) {
    let origin = dir.with_extension("origin");
    fs_err::create_dir_all(origin.join("src/deep")).unwrap();
    ok(git(&origin).args(["init", "-q", "-b", "main"]));
    for i in 0..FILES {
        let folder = ["", "src", "src/deep"][usize::try_from(i % 3).unwrap()];
        let bytes = Rng::new(i).bytes(FILE_BYTES);
        fs_err::write(origin.join(folder).join(format!("file-{i}")), bytes).unwrap();
    }
    std::os::unix::fs::symlink("file-0", origin.join("link")).unwrap();
    ok(git(&origin).args(["add", "."]));
    ok(git(&origin).args(["commit", "-q", "-m", "one"]));
    ok(git(&origin).args(["gc", "-q"]));
    let copied = Command::new("cp")
        .arg("-a")
        .args([&origin, &dir.to_owned()])
        .status()
        .unwrap();
    assert!(copied.success());
}

/// What a question about the node's layers has for an answer once readahead has ended.
fn settled<T: PartialEq>(node: &Node, ask: impl Fn(&[serde_json::Value]) -> T) -> T {
    let now = || {
        let status = node.json(["daemon", "status"]);
        ask(status["node"]["layers"].as_array().unwrap())
    };
    let mut last = now();
    loop {
        std::thread::sleep(std::time::Duration::from_millis(300));
        let next = now();
        if next == last {
            return next;
        }
        last = next;
    }
}

/// Bytes of a layer's data that the node fetched or copied from another layer.
fn had(layer: &serde_json::Value) -> u64 {
    let number = |key: &str| layer[key].as_u64().unwrap();
    number("fetched_raw_bytes") + number("copied_bytes")
}

/// Bytes of a layer's data that the node has got, and all there are.
fn fetched(node: &Node, reference: &str) -> (u64, u64) {
    settled(node, |layers| {
        let layer = layers.iter().find(|l| l["reference"] == reference).unwrap();
        (had(layer), layer["data_bytes"].as_u64().unwrap())
    })
}

/// Bytes that the node has got of all layers whose reference begins so.
fn fetched_of(node: &Node, begin: &str) -> u64 {
    settled(node, |layers| {
        let name = |layer: &serde_json::Value| layer["reference"].as_str().map(str::to_owned);
        let named = layers
            .iter()
            .filter(|layer| name(layer).unwrap_or_default().starts_with(begin));
        named.map(had).sum()
    })
}

/// Runs a script in a sandbox.
fn run(node: &Node, id: &str, script: &str) -> String {
    let script = format!("export HOME=/; {script}");
    node.ok(["sandbox", "exec", id, "--", "sh", "-c", &script])
}

/// A sandbox for which nothing is fetched that nobody reads.
fn create(node: &Node, reference: &str) -> String {
    node.ok(["sandbox", "create", "--prefetch", "none", reference])
}

const GIT: &str = "git -c safe.directory=* -C /ws";

/// Appends to files of the repository and stages that, a second after what was there before: git reads
/// files anew that are as young as the index, before a snapshot as after it.
fn change(node: &Node, id: &str, files: impl Iterator<Item = u64>) {
    let names: Vec<String> = files.map(|i| format!("file-{}", i * 3)).collect();
    let names = names.join(" ");
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let script = format!("cd /ws; for f in {names}; do echo more >> $f; done; {GIT} add -A");
    run(node, id, &script);
}

/// A node with the repository as `workspace/w:1` at /ws, over a root with git.
fn node(label: &str, extra: &[&str]) -> Node {
    let node = Node::new(label);
    let root = node.scratch.mkdir("rootfs").unwrap();
    support::rootfs::make(&root);
    support::rootfs::add(&root, "git");
    node.build("base/root:1", &root, &[]);
    let work = node.scratch.join("ws");
    repository(&work);
    let mut arguments = vec!["--at", "/ws"];
    arguments.extend(extra);
    node.build("workspace/w:1", &work, &arguments);
    node
}

fn unable() -> Option<&'static str> {
    if !is_root() {
        return Some("needs root to mount");
    }
    find_tool("git").is_none().then_some("needs git")
}

#[test]
fn privileged_status_on_a_mount_reads_no_file() {
    if let Some(why) = unable() {
        skip!("{why}");
    }
    let files = FILES * FILE_BYTES as u64;
    let mut figures = Vec::new();
    for extra in [&[][..], &["--git-index"]] {
        let node = node("git-mount", extra);
        let point = node.scratch.mkdir("mnt").unwrap();
        node.ok([
            "mount",
            "base/root:1",
            "workspace/w:1",
            point.to_str().unwrap(),
        ]);
        let _guard = MountGuard::new(&point);
        let status = ok(git(&point.join("ws")).args(["status", "--porcelain"]));
        assert_eq!(status, "");
        figures.push(fetched(&node, "workspace/w:1"));
        node.ok(["umount", point.to_str().unwrap()]);
    }
    let [(without, all), (with, _)] = figures[..] else {
        panic!("{figures:?}")
    };
    println!(
        "git status fetched {without} bytes of {all}, with --git-index {with}; files have {files}"
    );
    assert!(
        without > files * 9 / 10,
        "git reads files whose index is not refreshed: {figures:?}"
    );
    assert!(with < files / 20, "git still reads files: {figures:?}");
}

#[test]
fn privileged_status_in_a_sandbox_reads_no_file_and_sees_changes() {
    if let Some(why) = unable() {
        skip!("{why}");
    }
    let files = FILES * FILE_BYTES as u64;
    let node = node("git-sandbox", &["--git-index"]);
    let id = node.ok(["sandbox", "create", "base/root:1", "workspace/w:1"]);
    let run = |command: &str| {
        let command = format!("export HOME=/; {command}");
        node.ok(["sandbox", "exec", id.trim(), "--", "sh", "-c", &command])
    };
    let status = "git -c safe.directory=* -C /ws status --porcelain";
    assert_eq!(run(status), "");
    let (bytes, all) = fetched(&node, "workspace/w:1");
    println!("git status in a sandbox fetched {bytes} bytes of {all}; files have {files}");
    assert!(
        bytes < files / 20,
        "git still reads files: {bytes} of {files}"
    );
    // What changes is seen, also where the size stays.
    run(
        "cd /ws && mv file-3 src/moved && touch file-6 && printf x | dd of=file-9 conv=notrunc status=none",
    );
    assert_eq!(run(status), " D file-3\n M file-9\n?? src/moved\n");
    let (more, _) = fetched(&node, "workspace/w:1");
    assert!(
        more < files / 10,
        "git reads more than what changed: {more} of {files}"
    );
    node.ok(["sandbox", "rm", "--force", id.trim()]);
}

#[test]
fn privileged_status_after_a_restore_reads_no_more_than_before() {
    if let Some(why) = unable() {
        skip!("{why}");
    }
    let node = node("git-restore", &["--git-index"]);
    let git = "git -c safe.directory=* -C /ws";
    let run = |id: &str, command: &str| {
        let command = format!("export HOME=/; {command}");
        node.ok(["sandbox", "exec", id, "--", "sh", "-c", &command])
    };
    let id = node.ok(["sandbox", "create", "base/root:1", "workspace/w:1"]);
    let id = id.trim();
    // Twenty files of 100 KiB change and are staged, so git has read them all.
    let names: Vec<String> = (0..20).map(|i| format!("file-{}", i * 3)).collect();
    let change = format!(
        "cd /ws; for f in {}; do echo more >> $f; done",
        names.join(" ")
    );
    run(id, &format!("{change}; {git} add -A"));
    let status = format!("{git} status --porcelain");
    let before = run(id, &status);
    assert_eq!(before.lines().count(), 20, "{before}");
    let changed = 20 * FILE_BYTES as u64;
    let mut figures = Vec::new();
    for (reference, extra) in [("plain", &["--no-git-index"][..]), ("fresh", &[])] {
        let mut arguments = vec!["-o", "json", "pack-diff", id, "--name", reference];
        arguments.extend(["--version", "1"]);
        arguments.extend(extra);
        let packed: serde_json::Value = serde_json::from_str(&node.ok(arguments)).unwrap();
        if extra.is_empty() {
            assert_eq!(packed["git"][0]["refreshed"], 20, "{packed}");
        }
        let reference = format!("diff/{reference}:1");
        let restored = node.ok(["sandbox", "create", "--from", &reference]);
        assert_eq!(run(restored.trim(), &status), before);
        figures.push(fetched(&node, &reference).0);
        node.ok(["sandbox", "rm", "-f", restored.trim()]);
    }
    println!("git status after a restore fetched {figures:?} bytes; {changed} changed");
    assert!(
        figures[0] > changed * 9 / 10,
        "git reads what it has not seen: {figures:?}"
    );
    assert!(
        figures[1] < changed / 3,
        "git reads files again: {figures:?}"
    );
    node.ok(["sandbox", "rm", "-f", id]);
}

#[test]
fn privileged_status_after_squash_and_rebase_reads_no_more_than_before() {
    if let Some(why) = unable() {
        skip!("{why}");
    }
    let node = node("git-squash", &["--git-index"]);
    let status = format!("{GIT} status --porcelain");
    let publish = |arguments: &[&str], name: &str| {
        let mut all = arguments.to_vec();
        all.extend(["--name", name, "--version", "1"]);
        node.ok(all);
    };
    let one = node.ok(["sandbox", "create", "base/root:1", "workspace/w:1"]);
    let one = one.trim();
    change(&node, one, 0..20);
    // The next base has this too: a rebase drops it from the snapshot, whose numbers move.
    run(
        &node,
        one,
        "echo hello > /etc/aaa; touch -d @1700000000 /etc/aaa",
    );
    publish(&["pack-diff", one], "one");
    let two = node.ok(["sandbox", "create", "--from", "diff/one:1"]);
    let two = two.trim();
    run(&node, two, "echo x > /aaa; echo x > /ws/.aaa");
    change(&node, two, 20..25);
    let before = run(&node, two, &status);
    assert_eq!(before.lines().count(), 26, "{before}");
    publish(&["pack-diff", two, "--squash"], "taken");
    publish(&["pack-diff", two], "two");
    publish(&["snapshot", "squash", "diff/two:1"], "squashed");
    publish(&["snapshot", "squash", "diff/two:1", "--all"], "all");
    let root = node.scratch.join("rootfs");
    fs_err::write(root.join("etc/aaa"), "hello\n").unwrap();
    let file = fs_err::File::options()
        .write(true)
        .open(root.join("etc/aaa"))
        .unwrap();
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
    file.set_modified(time).unwrap();
    node.build("base/root:2", &root, &[]);
    let onto = ["--onto", "base/root:2", "--onto", "workspace/w:1"];
    let rebase = [&["snapshot", "rebase", "diff/squashed:1"][..], &onto].concat();
    publish(&rebase, "rebased");
    let plain = ["snapshot", "squash", "diff/two:1", "--no-git-index"];
    publish(&plain, "plain");
    let changed = 25 * FILE_BYTES as u64;
    for reference in [
        "diff/taken:1",
        "diff/squashed:1",
        "base/all:1",
        "diff/rebased:1",
        "diff/plain:1",
    ] {
        let id = create(&node, reference);
        let id = id.trim();
        // What git itself is made of.
        run(&node, id, &format!("{GIT} rev-parse HEAD"));
        let start = fetched_of(&node, "");
        assert_eq!(run(&node, id, &status), before, "{reference}");
        let bytes = fetched_of(&node, "") - start;
        println!("git status on {reference} fetched {bytes} bytes");
        let reads = match reference {
            "diff/plain:1" => bytes > changed * 9 / 10,
            // All files of the repository are in this one.
            "base/all:1" => bytes < FILES * FILE_BYTES as u64 / 10,
            _ => bytes < changed / 3,
        };
        assert!(reads, "{reference}: git read {bytes} of {changed} bytes");
        node.ok(["sandbox", "rm", "-f", id]);
    }
    node.ok(["sandbox", "rm", "-f", one, two]);
}

#[test]
fn privileged_status_after_a_long_row_of_snapshots_reads_no_more_than_before() {
    if let Some(why) = unable() {
        skip!("{why}");
    }
    let node = node("git-row", &["--git-index"]);
    let status = format!("{GIT} status --porcelain");
    let mut id = node.ok(["sandbox", "create", "base/root:1", "workspace/w:1"]);
    let pack = |id: &str, name: &str, number: u64, extra: &[&str]| {
        let version = number.to_string();
        let arguments = ["pack-diff", id, "--name", name, "--version", &version];
        node.ok(arguments.iter().chain(extra));
    };
    // The ninth snapshot is the first whose restore mounts those before it as one layer.
    for number in 1..=9 {
        change(&node, id.trim(), number * 2..number * 2 + 2);
        pack(id.trim(), "row", number, &[]);
        if number == 9 {
            pack(id.trim(), "plain", number, &["--no-git-index"]);
        }
        node.ok(["sandbox", "rm", "-f", id.trim()]);
        let reference = format!("diff/row:{number}");
        id = create(&node, &reference);
    }
    let merged = "diff/layerpack-merged:";
    let shown = run(&node, id.trim(), &status);
    assert_eq!(shown.lines().count(), 18, "{shown}");
    let bytes = fetched_of(&node, merged);
    let plain = create(&node, "diff/plain:9");
    assert_eq!(run(&node, plain.trim(), &status), shown);
    let without = fetched_of(&node, merged) - bytes;
    println!(
        "git status fetched {bytes} bytes of the merged snapshots, {without} with a stale index"
    );
    let changed = 16 * FILE_BYTES as u64;
    assert!(bytes < changed / 3, "git reads files again: {bytes}");
    assert!(
        without > changed / 2,
        "git reads what it does not know: {without}"
    );
    node.ok(["sandbox", "rm", "-f", id.trim(), plain.trim()]);
}
