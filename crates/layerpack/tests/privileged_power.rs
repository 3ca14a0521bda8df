//! The power goes while a node serves, and while a store is written: on a real filesystem, which drops
//! what was not durable. What is found afterwards is right, or is not there.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "tests; what was seen is printed"
)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::{ScratchDir, is_root, skip};
use support::load::{build, mount, read, status, try_read};
use support::power::{Machine, apart, capable, is_apart};
use support::{Node, describe, mounts, processes};

const LAYERS: u64 = 3;
const FILES: u64 = 24;

fn rounds(usual: u64, full: u64) -> u64 {
    match std::env::var_os("LAYERPACK_TEST_FULL") {
        Some(_) => full,
        None => usual,
    }
}

/// Why this machine cannot show it.
fn able() -> Result<(), String> {
    if !is_root() {
        return Err("needs root to mount".to_owned());
    }
    let scratch = ScratchDir::new("power-trial").unwrap();
    capable(scratch.path())
}

#[test]
fn privileged_a_node_serves_right_bytes_after_any_power_cut() {
    if let Err(reason) = able() {
        skip!("{reason}");
    }
    apart("child_whose_node_loses_power");
}

#[test]
fn privileged_a_store_loses_nothing_that_was_reported_in_a_power_cut() {
    if let Err(reason) = able() {
        skip!("{reason}");
    }
    apart("child_whose_store_loses_power");
}

/// Nothing is left but the disk.
fn finish(node: &Node) {
    node.ok(["daemon", "stop"]);
    assert_eq!(processes(node), Vec::<String>::new());
    assert_eq!(mounts(node).len(), 1, "{:?}", mounts(node));
}

/// Ends threads however the closure ends that they work beside.
struct Set<'a>(&'a AtomicBool);

impl Drop for Set<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Files of that name anywhere in a directory.
fn find(directory: &Path, name: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.symlink_metadata().is_ok_and(|m| m.is_dir()) {
            found.extend(find(&path, name));
        } else if entry.file_name() == name {
            found.push(path);
        }
    }
    found
}

#[test]
#[ignore = "a child process of another test"]
fn child_whose_node_loses_power() {
    if !is_apart() {
        return;
    }
    let rounds = rounds(5, 60);
    let mut node = Node::new("power-node");
    // For those that wait for a daemon that cannot start on a disk that is gone.
    let limit = ("LAYERPACK_READ_TIMEOUT".to_owned(), "3s".to_owned());
    node.environment.push(limit);
    let mut machine = Machine::new(&node, node.root(), 256);
    for layer in 0..LAYERS {
        build(&node, layer, FILES);
    }
    let rootfs = node.scratch.mkdir("rootfs").unwrap();
    support::rootfs::make(&rootfs);
    node.build("base/root:1", &rootfs, &[]);
    let store = format!("file://{}", node.store().display());
    // What must be there after every cut: a sandbox that lasts, and what it wrote.
    node.ok(["sandbox", "create", "--name", "lasting", "base/root:1"]);
    let write = "echo written before the cut > /root/kept-file";
    node.ok(["sandbox", "exec", "lasting", "--", "sh", "-c", write]);
    machine.sync();
    let mut rng = Rng::new(11);
    let (reads, failed, swept) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    for round in 0..rounds {
        let points: Vec<_> = (0..LAYERS).map(|l| mount(&node, &store, l)).collect();
        // One that nobody is to keep.
        let mut passing = node
            .command()
            .args(["run", "--rm", "base/root:1", "--", "sh", "-c"])
            .arg("echo x > /tmp/passing-file; echo ready; sleep 1000")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut ready = [0u8; 6];
        std::io::Read::read_exact(passing.stdout.as_mut().unwrap(), &mut ready).unwrap();
        let (cut, end) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let _end = Set(&end);
            let (node, points, cut, end) = (&node, &points, &cut, &end);
            let (reads, failed) = (&reads, &failed);
            for thread in 0..3 {
                scope.spawn(move || {
                    let mut rng = Rng::new(round * 10 + thread);
                    while !end.load(Ordering::SeqCst) {
                        let layer = rng.below(LAYERS);
                        let dir = &points[usize::try_from(layer).unwrap()].0;
                        // Wrong bytes end the test, with power or without.
                        match try_read(node, dir, layer, rng.below(FILES)) {
                            Ok(()) => reads.fetch_add(1, Ordering::SeqCst),
                            Err(e) => {
                                assert!(cut.load(Ordering::SeqCst), "{e}: {}", node.log());
                                failed.fetch_add(1, Ordering::SeqCst)
                            }
                        };
                    }
                });
            }
            scope.spawn(move || {
                let mut turn = 0_u64;
                while !end.load(Ordering::SeqCst) {
                    let layer = format!("base/l{}:1", turn % LAYERS);
                    match turn % 4 {
                        0 => node.run(["cache", "evict", "--all"]),
                        1 => node.run(["cache", "pin", &layer]),
                        2 => node.run(["cache", "evict", &layer]),
                        _ => node.run(["cache", "unpin", &layer]),
                    };
                    turn += 1;
                }
            });
            std::thread::sleep(Duration::from_millis(rng.below(700)));
            cut.store(true, Ordering::SeqCst);
            machine.cut();
            std::thread::sleep(Duration::from_millis(30));
        });
        drop(points);
        machine.restart();
        passing.wait().unwrap();

        let points: Vec<_> = (0..LAYERS).map(|l| mount(&node, &store, l)).collect();
        for (layer, (point, _)) in (0..).zip(&points) {
            for file in 0..FILES {
                read(&node, point, layer, file);
            }
        }
        // Sandboxes of the former boot are over; who was to last is listed, with all of its files.
        let sandboxes = node.json(["sandbox", "ls"]);
        let names: Vec<_> = sandboxes.as_array().unwrap().iter().collect();
        assert_eq!(names.len(), 1, "{sandboxes}");
        assert_eq!(sandboxes[0]["name"], "lasting");
        assert_eq!(sandboxes[0]["state"], "dead");
        let kept = find(&node.root().join("sandboxes"), "kept-file");
        assert_eq!(kept.len(), 1, "{kept:?}");
        let text = fs_err::read_to_string(&kept[0]).unwrap();
        assert_eq!(text, "written before the cut\n");
        let passing = find(&node.root().join("sandboxes"), "passing-file");
        assert_eq!(
            passing,
            Vec::<PathBuf>::new(),
            "its upper was to be removed"
        );
        let status = status(&node);
        assert_eq!(status["leases"].as_array().unwrap().len(), 3, "{status}");
        swept.fetch_add(
            u64::try_from(status["node"]["swept"].as_array().unwrap().len()).unwrap(),
            Ordering::SeqCst,
        );
        for (point, guard) in points {
            node.ok(["umount", point.to_str().unwrap()]);
            drop(guard);
        }
        if round % 2 == 0 {
            node.ok(["daemon", "stop"]);
        }
    }
    println!(
        "{rounds} cuts of a node's disk: {} reads right, {} failed after a cut, none wrong; {} left-overs swept",
        reads.load(Ordering::SeqCst),
        failed.load(Ordering::SeqCst),
        swept.load(Ordering::SeqCst)
    );
    node.ok(["sandbox", "rm", "--force", "lasting"]);
    finish(&node);
}

/// What commands said that the store has.
#[derive(Default)]
struct Reported {
    /// Digests by references.
    layers: BTreeMap<String, String>,
    /// Those that somebody began to remove.
    removed: BTreeSet<String>,
}

/// One layer: the digest that was printed.
fn try_build(node: &Node, reference: &str, seed: u64) -> Option<String> {
    let source = node.scratch.mkdir(format!("s-{seed}")).unwrap();
    for file in 0..4 {
        let bytes = Rng::new(seed * 10 + file).bytes(30_000 + usize::try_from(file).unwrap() * 7);
        fs_err::write(source.join(format!("f{file}")), bytes).unwrap();
    }
    let from = format!("dir:{}", source.display());
    let mut line = vec!["-q"];
    line.extend(support::build_line(reference, &from, &[]));
    let output = node.run(line);
    fs_err::remove_dir_all(&source).unwrap();
    output.status.success().then(|| {
        let said = String::from_utf8(output.stdout).unwrap();
        let (_, digest) = said.trim_end().split_once(' ').unwrap();
        digest.to_owned()
    })
}

/// Reads all of the store, past what this machine keeps of it, and looks for what was reported. Gives
/// how much of that is not there.
fn check(node: &Node, cache: &Path, reported: &Reported) -> u64 {
    let fresh = |arguments: &[&str]| {
        let mut command = node.command();
        command.env("LAYERPACK_CACHE", cache).args(arguments);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", describe(&output));
        output
    };
    fresh(&["verify", "--all", "--read-data"]);
    let listed = fresh(&["-o", "json", "ls"]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let there: BTreeMap<&str, &str> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| {
            let text = |field: &str| layer[field].as_str().unwrap();
            (text("reference"), text("digest"))
        })
        .collect();
    let mut lost = 0;
    for (reference, digest) in &reported.layers {
        match there.get(reference.as_str()) {
            Some(found) => assert_eq!(found, digest, "{reference}"),
            None if reported.removed.contains(reference) => {}
            None => {
                println!("{reference} was reported and is lost");
                lost += 1;
            }
        }
    }
    lost
}

#[test]
#[ignore = "a child process of another test"]
fn child_whose_store_loses_power() {
    if !is_apart() {
        return;
    }
    let rounds = rounds(6, 60);
    let node = Node::new("power-store");
    let caches = node.scratch.join("caches");
    let rootfs = node.scratch.mkdir("rootfs").unwrap();
    support::rootfs::make(&rootfs);
    let mut machine = Machine::new(&node, node.store(), 256);
    let reported = Mutex::new(Reported::default());
    let digest = node.build("base/root:1", &rootfs, &[]);
    let base = ("base/root:1".to_owned(), digest);
    let _ = reported.lock().unwrap().layers.insert(base.0, base.1);
    let mut rng = Rng::new(3);
    let (mut done, mut lost) = (0_u64, 0_u64);
    for round in 0..rounds {
        let cut = AtomicBool::new(false);
        let sandbox = format!("s{round}");
        if round % 3 == 1 {
            node.ok(["sandbox", "create", "--name", &sandbox, "base/root:1"]);
        }
        let before = reported.lock().unwrap().layers.len();
        std::thread::scope(|scope| {
            let _cut = Set(&cut);
            let (node, reported, cut, sandbox) = (&node, &reported, &cut, &sandbox);
            let note = move |reference: String, digest: String| {
                reported.lock().unwrap().layers.insert(reference, digest);
            };
            scope.spawn(move || {
                for turn in 0.. {
                    let reference = format!("workspace/r{round}:{turn}");
                    match try_build(node, &reference, round * 1000 + turn + 1) {
                        Some(digest) => note(reference, digest),
                        None => assert!(cut.load(Ordering::SeqCst), "{reference} failed"),
                    }
                    if cut.load(Ordering::SeqCst) {
                        return;
                    }
                }
            });
            match round % 3 {
                1 => {
                    scope.spawn(move || {
                        for turn in 0.. {
                            let script = format!("echo {turn} > /root/f; mkdir /root/{turn}");
                            node.run(["sandbox", "exec", sandbox, "--", "sh", "-c", &script]);
                            let version = turn.to_string();
                            let name = format!("r{round}");
                            let output = node.run([
                                "-o",
                                "json",
                                "pack-diff",
                                sandbox,
                                "--name",
                                &name,
                                "--version",
                                &version,
                            ]);
                            if output.status.success() {
                                let said: serde_json::Value =
                                    serde_json::from_slice(&output.stdout).unwrap();
                                let digest = said["digest"].as_str().unwrap().to_owned();
                                note(format!("diff/{name}:{version}"), digest);
                            } else {
                                assert!(cut.load(Ordering::SeqCst), "{}", describe(&output));
                            }
                            if cut.load(Ordering::SeqCst) {
                                return;
                            }
                        }
                    });
                }
                2 => {
                    scope.spawn(move || {
                        while !cut.load(Ordering::SeqCst) {
                            let victim = {
                                let mut all = reported.lock().unwrap();
                                let old = format!("workspace/r{}", round - 1);
                                let there = all.layers.keys().find(|reference| {
                                    reference.starts_with(&old) && !all.removed.contains(*reference)
                                });
                                let there = there.cloned();
                                all.removed.extend(there.clone());
                                there
                            };
                            if let Some(victim) = victim {
                                node.run(["rm", &victim]);
                            }
                            node.run(["gc", "--grace", "0", "--wait"]);
                        }
                    });
                }
                _ => {}
            }
            std::thread::sleep(Duration::from_millis(100 + rng.below(900)));
            cut.store(true, Ordering::SeqCst);
            machine.cut();
        });
        machine.restart();
        let place = caches.join(round.to_string());
        done += u64::try_from(reported.lock().unwrap().layers.len() - before).unwrap();
        lost += check(&node, &place, &reported.lock().unwrap());
        if round % 3 == 1 {
            node.run(["sandbox", "rm", "--force", &sandbox]);
        }
    }
    println!(
        "{rounds} cuts of a store's disk: {done} layers reported, {lost} lost, {} removed",
        reported.lock().unwrap().removed.len()
    );
    assert_eq!(lost, 0);
    // And it is a store like any other.
    assert!(try_build(&node, "base/last:1", 1).is_some());
    node.ok(["gc", "--grace", "0", "--wait"]);
    node.ok(["verify", "--all", "--read-data"]);
    finish(&node);
}
