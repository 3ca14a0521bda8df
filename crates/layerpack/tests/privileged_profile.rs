//! Profiles of what sandboxes and mounts read, and stores that are seeded with it.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::{MountGuard, is_root, skip};
use serde_json::Value;
use support::{Node, describe};

/// A system and, above it, a workspace of which only a small part is read.
fn layers(label: &str) -> Node {
    let node = Node::new(label);
    let system = node.scratch.mkdir("system").unwrap();
    support::rootfs::make(&system);
    node.build("base/system:1", &system, &[]);
    let work = node.scratch.mkdir("work/srv").unwrap();
    for name in ["used", "unused"] {
        let bytes = Rng::new(name.len() as u64).bytes(3 << 20);
        node.scratch
            .write(format!("work/srv/{name}"), bytes)
            .unwrap();
    }
    node.build("workspace/w:1", work.parent().unwrap(), &[]);
    node
}

const STACK: [&str; 2] = ["base/system:1", "workspace/w:1"];

fn record(node: &Node, name: &str, file: &str) -> Value {
    let path = format!("/srv/{file}");
    let mut command = node.command();
    command.args(["-o", "json", "profile", "record", "--store-as", name]);
    let output = command
        .args(STACK)
        .args(["--", "cat", &path])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", describe(&output));
    assert!(output.stdout == fs_err::read(node.scratch.join(format!("work{path}"))).unwrap());
    let line = String::from_utf8(output.stderr).unwrap();
    serde_json::from_str(line.lines().last().unwrap()).unwrap()
}

#[test]
fn privileged_what_a_command_reads_is_recorded_and_seeded() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = layers("profile");
    let first = record(&node, "first", "used");
    let workspace = &first["layers"][1];
    assert_eq!(workspace["reference"], "workspace/w:1");
    let read = workspace["bytes"].as_u64().unwrap();
    assert!((3 << 20..5 << 20).contains(&read), "{first}");
    assert!(first["layers"][0]["bytes"].as_u64().unwrap() > 0, "{first}");
    // A second recording finds the same although the node has it all cached by now.
    let second = record(&node, "second", "used");
    assert!(
        second["layers"][1]["bytes"].as_u64().unwrap() >= 3 << 20,
        "{second}"
    );
    let merged = node.json(["profile", "merge", "first", "second", "--store-as", "both"]);
    assert_eq!(merged["recordings"], 2);
    assert_eq!(node.json(["profile", "ls"]).as_array().unwrap().len(), 3);
    // A command that cannot be started leaves no profile, and a name is not taken for another's.
    let mut nothing = vec!["profile", "record"];
    nothing.extend(STACK);
    nothing.extend(["--", "/no/such/program"]);
    let output = node.run(&nothing);
    assert_eq!(output.status.code(), Some(127), "{}", describe(&output));
    nothing.splice(2..2, ["--name", "p"]);
    let error = node.fails(2, &nothing);
    assert!(error.contains("--store-as"), "{error}");
    assert_eq!(node.json(["profile", "ls"]).as_array().unwrap().len(), 3);
    let shown = node.json(["profile", "show", "both"]);
    let entries = shown[0]["entries"].as_array().unwrap();
    assert_eq!(entries.len() as u64, shown[0]["extents"].as_u64().unwrap());
    node.ok(["profile", "rm", "second"]);
    assert!(
        node.fails(1, ["profile", "show", "second"])
            .contains("second")
    );

    // Another site, with what was read; the sandbox works there.
    let site = node.scratch.join("site").display().to_string();
    let arguments = [
        "seed",
        "--profile",
        "both",
        "--max-bytes",
        "1g",
        "--to",
        &site,
    ];
    let [seed, flag, profile, limit, bytes, to, url] = arguments;
    let dry = node.json([seed, flag, profile, limit, bytes, to, url, "--dry-run"]);
    assert_eq!(dry["covered_environments"], 1);
    assert!(!std::path::Path::new(&site).join("refs").exists());
    let seeded = node.json(arguments);
    assert_eq!(seeded["layers"], dry["layers"]);
    assert!(
        seeded["layers"][1]["bytes"].as_u64().unwrap() + (2 << 20)
            < seeded["layers"][1]["all_bytes"].as_u64().unwrap(),
        "{seeded}"
    );
    let other = Node::new("profile-site");
    let run = |store: &str, file: &str| {
        let mut command = other.command();
        command.args(["--store", store, "run", "--rm"]).args(STACK);
        command.args(["--", "cat", &format!("/srv/{file}")]);
        command.output().unwrap()
    };
    let used = run(&site, "used");
    assert!(used.status.success(), "{}", describe(&used));
    assert!(used.stdout == fs_err::read(node.scratch.join("work/srv/used")).unwrap());
    // What was not seeded is an error, not zeros; with the origin as a mirror it is there.
    let unused = run(&site, "unused");
    assert!(!unused.status.success());
    let text = other.ok(["--store", &site, "verify", "workspace/w:1"]);
    assert!(text.contains("only a part"), "{text}");
    let text = other.ok(["--store", &site, "inspect", "workspace/w:1"]);
    let line = text.lines().find(|line| line.starts_with("part "));
    assert!(line.is_some_and(|l| l.contains("in this store")), "{text}");
    let error = one_line(
        &other,
        &["--store", &site, "cat", "workspace/w:1", "srv/unused"],
    );
    assert!(error.contains("has only a part"), "{error}");
    other.ok(["daemon", "stop", "--force"]);
    let both = format!("file://{site},file://{}", node.store().display());
    other.ok(["--store", &both, "verify", "--all", "--read-data"]);
    let unused = run(&both, "unused");
    assert!(unused.status.success(), "{}", describe(&unused));
    assert!(unused.stdout == fs_err::read(node.scratch.join("work/srv/unused")).unwrap());
}

fn one_line(node: &Node, arguments: &[&str]) -> String {
    let output = node.run(arguments);
    assert_eq!(output.status.code(), Some(1), "{}", describe(&output));
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn privileged_a_mount_is_recorded() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = layers("profile-mount");
    let point = node.scratch.mkdir("mnt").unwrap();
    let at = point.display().to_string();
    let error = node.fails(1, ["profile", "record", "--start", &at]);
    assert!(error.contains("mounted"), "{error}");
    node.ok(["mount", "base/system:1", "workspace/w:1", &at]);
    let guard = MountGuard::new(&point);
    let output = node.run(["profile", "record", "--start", &at]);
    assert!(output.status.success(), "{}", describe(&output));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("in use"),
        "{}",
        describe(&output)
    );
    node.fails(1, ["profile", "record", "--start", &at]);
    assert_eq!(fs_err::read(point.join("srv/used")).unwrap().len(), 3 << 20);
    node.ok(["profile", "record", "--stop", &at, "--store-as", "m"]);
    node.fails(1, ["profile", "record", "--stop", &at]);
    let shown = node.json(["profile", "show", "m"]);
    assert!(shown[0]["layers"][1]["bytes"].as_u64().unwrap() >= 3 << 20);
    node.ok(["umount", &at]);
    drop(guard);
}

/// What the daemon answers to a plain request on its socket.
fn metrics(node: &Node) -> String {
    use std::io::{Read as _, Write as _};
    let socket = node.root().join("daemon.sock");
    let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
    let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    answer
}

fn metric(page: &str, name: &str) -> u64 {
    let line = page
        .lines()
        .find(|line| line.starts_with(&format!("{name} ")));
    let value = line.and_then(|line| line.rsplit(' ').next());
    value
        .unwrap_or_else(|| panic!("{name}: {page}"))
        .parse()
        .unwrap()
}

#[test]
fn privileged_a_recorded_profile_is_fetched_ahead() {
    if !is_root() {
        skip!("needs root for sandboxes");
    }
    let node = layers("profile-ahead");
    record(&node, "first", "used");
    // With the mounts goes what the kernel has cached.
    node.ok(["daemon", "stop"]);
    node.ok(["cache", "evict", "--all"]);
    let dir = node.scratch.mkdir("mnt").unwrap().display().to_string();
    let before = metric(&metrics(&node), "layerpack_prefetched_bytes_total");
    let mount = |extra: &[&str]| {
        let mut arguments = vec!["mount"];
        arguments.extend(extra);
        arguments.extend(STACK);
        arguments.push(&dir);
        node.ok(arguments);
    };
    mount(&["--prefetch", "none"]);
    node.ok(["umount", &dir]);
    // By the stack's own profile.
    mount(&[]);
    let ahead = || metric(&metrics(&node), "layerpack_prefetched_bytes_total") - before;
    assert!(support::wait_until(|| ahead() >= 3 << 20), "{}", node.log());
    let read = fs_err::read(format!("{dir}/srv/used")).unwrap();
    assert!(read == fs_err::read(node.scratch.join("work/srv/used")).unwrap());
    let page = metrics(&node);
    assert!(
        metric(&page, "layerpack_prefetch_used_bytes_total") >= 3 << 20,
        "{page}"
    );
    assert!(metric(&page, "layerpack_served_bytes_total") >= 3 << 20);
    assert!(page.contains("layerpack_fetch_seconds_bucket{le=\"+Inf\"}"));
    let status = node.json(["daemon", "status"]);
    let layers = status["node"]["layers"].as_array().unwrap();
    let work = layers
        .iter()
        .find(|l| l["reference"] == "workspace/w:1")
        .unwrap();
    assert!(
        work["cached_bytes"].as_u64().unwrap() < 5 << 20,
        "only what is named: {work}"
    );
    node.ok(["umount", &dir]);
    mount(&["--prefetch", "all", "--profile", "first"]);
    let whole = || {
        let listed = node.json(["cache", "ls"]);
        let work = listed.as_array().unwrap().iter();
        let mut work = work.filter(|l| l["reference"] == "workspace/w:1");
        work.next().unwrap()["cached_bytes"].as_u64() >= Some(6 << 20)
    };
    assert!(support::wait_until(whole), "{}", node.log());
    node.ok(["umount", &dir]);
    let wrong = ["mount", "--profile", "none-such", STACK[0], &dir];
    assert!(node.fails(1, wrong).contains("none-such"));
    let wrong = [
        "mount",
        "--prefetch",
        "none",
        "--profile",
        "first",
        STACK[0],
        &dir,
    ];
    assert!(node.fails(1, wrong).contains("--prefetch"));
}

#[test]
fn privileged_nodes_learn_by_themselves_and_share_it() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = layers("profile-learnt");
    let dir = node.scratch.mkdir("mnt").unwrap().display().to_string();
    node.ok(["mount", STACK[0], STACK[1], &dir]);
    let read = fs_err::read(format!("{dir}/srv/used")).unwrap();
    assert!(read == fs_err::read(node.scratch.join("work/srv/used")).unwrap());
    assert_eq!(
        node.json(["profile", "learned"]).as_array().unwrap().len(),
        0,
        "it still learns"
    );
    node.ok(["umount", &dir]);
    let learnt = node.json(["profile", "learned"]);
    assert_eq!(learnt.as_array().unwrap().len(), 1, "{learnt}");
    assert_eq!(learnt[0]["recordings"], 1);
    assert!(learnt[0]["bytes"].as_u64().unwrap() >= 3 << 20, "{learnt}");
    assert!(node.ok(["profile", "learned"]).contains("workspace/w:1"));
    let error = node.fails(1, ["profile", "publish", STACK[0]]);
    assert!(error.contains("has learnt nothing"), "{error}");
    let published = node.json(["profile", "publish"]);
    let digest = published[0]["profile"].as_str().unwrap().to_owned();
    assert_eq!(published[0]["top"], "workspace/w:1");
    let again = node.json(["profile", "publish", STACK[0], STACK[1]]);
    assert!(again[0]["profile"].is_null(), "{again}");
    assert_eq!(node.json(["profile", "ls"])[0]["digest"], digest.as_str());
    // It is the layer's, for those who check, collect and copy.
    node.ok(["verify", "--all"]);
    node.ok(["gc", "--grace", "0s"]);
    let copy = node.scratch.join("copy").display().to_string();
    node.ok(["push", STACK[0], STACK[1], "--to", &copy]);
    let copied = node.json(["--store", &copy, "profile", "ls"]);
    assert_eq!(copied[0]["digest"], digest.as_str(), "{copied}");

    // Another node that has never seen the stack.
    let other = Node::new("profile-learnt-other");
    let there = other.scratch.mkdir("mnt").unwrap().display().to_string();
    other.ok(["--store", &copy, "mount", STACK[0], STACK[1], &there]);
    let ahead = || metric(&metrics(&other), "layerpack_prefetched_bytes_total");
    assert!(
        support::wait_until(|| ahead() >= 3 << 20),
        "{}",
        other.log()
    );
    other.ok(["umount", &there]);
    other.ok(["daemon", "stop"]);

    // A profile of another version of a layer is said to be that.
    fs_err::write(node.scratch.join("work/srv/used"), b"another version").unwrap();
    node.build("workspace/w:2", &node.scratch.join("work"), &[]);
    let line = [
        "mount",
        "--profile",
        &digest,
        STACK[0],
        "workspace/w:2",
        &dir,
    ];
    let output = node.run(line);
    assert!(output.status.success(), "{}", describe(&output));
    let warned = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        warned.contains("workspace/w:1 as it is not in this stack"),
        "{warned}"
    );
    node.ok(["umount", &dir]);
}
