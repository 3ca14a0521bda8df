//! The daemon's process dies, or gives way to another, while the kernel reads: mounts go on, and no
//! read fails. Readers know what they must see, and what they read is not left in the kernel's
//! caches.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "tests; how long restarts took is printed"
)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::{MountGuard, is_root, skip};
use serde_json::Value;
use support::load::{
    Ender, LONG, build, capable, children, end, is_gone, mount, name, next_worker, number, pids,
    read, slow_store, status, take_store, text, try_read, under_load,
};
use support::times::restarts;
use support::{Node, kill, processes, wait_until};

#[test]
fn privileged_no_read_fails_while_the_daemon_is_killed() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let kills = match std::env::var_os("LAYERPACK_TEST_FULL") {
        Some(_) => 1000,
        None => 30,
    };
    let node = Node::new("kills");
    if !capable(&node) {
        skip!("this kernel does not send requests again");
    }
    for layer in 0..3 {
        build(&node, layer, 24);
    }
    let server = slow_store(&node);
    let points: Vec<_> = (0..3).map(|l| mount(&node, &server.url(), l)).collect();
    let dirs: Vec<(u64, PathBuf)> = (0..)
        .zip(points.iter().map(|(point, _)| point.clone()))
        .collect();
    let (holder, _) = pids(&node);
    let mut killed = Vec::new();
    let reads = under_load(&node, &dirs, 24, || {
        let mut rng = Rng::new(5);
        let mut last = 0;
        for round in 0..kills {
            let begun = Instant::now();
            let victim = loop {
                assert!(begun.elapsed() < LONG, "no worker: {}", node.log());
                match children(holder).first() {
                    Some(pid) if *pid != last => break *pid,
                    _ => std::thread::sleep(Duration::from_millis(1)),
                }
            };
            // Some die while they start, most while they serve.
            if round % 5 != 4 {
                node.daemon_pid();
            }
            std::thread::sleep(Duration::from_millis(rng.below(250)));
            killed.push(SystemTime::now());
            kill(victim, "KILL");
            last = victim;
        }
    });
    let status = status(&node);
    println!(
        "{reads} reads, none failed or wrong; {}",
        restarts(&node, &killed)
    );
    assert!(number(&status, "/daemon/holder/restarts") >= kills);
    assert_eq!(
        number(&status, "/daemon/holder/pid"),
        u64::try_from(holder).unwrap()
    );
    assert_eq!(
        status["node"]["problems"],
        Value::Array(vec![]),
        "{}",
        node.log()
    );
    assert_eq!(status["leases"].as_array().unwrap().len(), 3);
    assert!(reads > kills, "{reads} reads");
    let page = fs_err::read(node.root().join("daemon.log")).unwrap();
    assert!(!String::from_utf8_lossy(&page).contains("panicked"));
    end(&node, points);
}

#[test]
fn privileged_an_upgrade_under_load_costs_no_read() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("upgrade");
    if !capable(&node) {
        skip!("this kernel does not send requests again");
    }
    let error = node.fails(1, ["daemon", "upgrade"]);
    assert!(error.contains("no layerpack daemon runs"), "{error}");
    for layer in 0..2 {
        build(&node, layer, 16);
    }
    let server = slow_store(&node);
    let points: Vec<_> = (0..2).map(|l| mount(&node, &server.url(), l)).collect();
    let dirs: Vec<(u64, PathBuf)> = (0..)
        .zip(points.iter().map(|(point, _)| point.clone()))
        .collect();
    let (holder, first) = pids(&node);
    let reads = under_load(&node, &dirs, 16, || {
        let mut before = u64::try_from(first).unwrap();
        let mut kept = u64::try_from(holder).unwrap();
        for _ in 0..6 {
            let upgraded = node.json(["daemon", "upgrade"]);
            assert_eq!(number(&upgraded, "/old/pid"), before, "{upgraded}");
            before = number(&upgraded, "/new/pid");
            assert!(upgraded["new"]["version"].is_string());
            // The holder gave way as well.
            let next = number(&upgraded, "/holder/pid");
            assert_ne!(next, kept);
            kept = next;
            std::thread::sleep(Duration::from_millis(150));
        }
    });
    assert!(reads > 6);
    let status = status(&node);
    assert_eq!(number(&status, "/daemon/holder/upgrades"), 6);
    assert_eq!(number(&status, "/daemon/holder/restarts"), 0);
    assert_eq!(status["node"]["problems"], Value::Array(vec![]));
    // The one that serves is what was upgraded to, and no other is left; nor is another holder.
    assert!(wait_until(|| processes(&node).len() == 2));
    let (holder, worker) = pids(&node);
    assert!(is_gone(first) && worker != first);
    // What the last holder got is enough to go on with.
    kill(worker, "KILL");
    next_worker(&node, worker);
    read(&node, &dirs[0].1, 0, 0);
    assert_eq!(pids(&node).0, holder);
    end(&node, points);
}

#[test]
fn privileged_mounts_come_up_while_the_daemon_is_killed() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("mounting");
    if !capable(&node) {
        skip!("this kernel does not send requests again");
    }
    for layer in 0..4 {
        build(&node, layer, 4);
    }
    let server = slow_store(&node);
    let store = server.url();
    let point = mount(&node, &store, 3);
    let (holder, _) = pids(&node);
    let end_kills = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (node, end_kills) = (&node, &end_kills);
        let killer = scope.spawn(move || {
            let mut rng = Rng::new(9);
            let mut kills = 0_u64;
            while !end_kills.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(60 + rng.below(500)));
                for pid in children(holder) {
                    let pid = rustix::process::Pid::from_raw(pid).unwrap();
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                    kills += 1;
                }
            }
            kills
        });
        let mut ender = Ender::new(node, end_kills);
        for round in 0..6_u64 {
            let layer = round % 3;
            let (point, guard) = mount(node, &store, layer);
            read(node, &point, layer, round % 4);
            node.ok(["umount", text(&point)]);
            drop(guard);
        }
        ender.armed = false;
        end_kills.store(true, Ordering::SeqCst);
        assert!(killer.join().unwrap() > 0);
    });
    read(&node, &point.0, 3, 1);
    assert_eq!(status(&node)["leases"].as_array().unwrap().len(), 1);
    end(&node, vec![point]);
}

#[test]
fn privileged_a_daemon_that_cannot_start_is_waited_for() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("crashloop");
    if !capable(&node) {
        skip!("this kernel does not send requests again");
    }
    build(&node, 0, 12);
    let server = slow_store(&node);
    let point = mount(&node, &server.url(), 0);
    read(&node, &point.0, 0, 0);
    let (holder, worker) = pids(&node);
    // No process can start that way.
    let (served, away) = (node.root().join("served"), node.root().join("served.away"));
    fs_err::rename(&served, &away).unwrap();
    fs_err::write(&served, "in the way").unwrap();
    kill(worker, "KILL");
    let starts = || node.log().matches("was started").count();
    assert!(wait_until(|| starts() >= 4), "{}", node.log());
    assert!(!is_gone(holder));
    let end_readers = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (node, dir) = (&node, &point.0);
        let mut ender = Ender::new(node, &end_readers);
        // These wait, and see nothing of all that but the time.
        let readers: Vec<_> = (1..5)
            .map(|file| scope.spawn(move || read(node, dir, 0, file)))
            .collect();
        std::thread::sleep(Duration::from_millis(300));
        fs_err::remove_file(&served).unwrap();
        fs_err::rename(&away, &served).unwrap();
        let begun = Instant::now();
        while !readers
            .iter()
            .all(std::thread::ScopedJoinHandle::is_finished)
        {
            assert!(begun.elapsed() < LONG, "a read hangs: {}", node.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        ender.armed = false;
    });
    let status = status(&node);
    assert!(number(&status, "/daemon/holder/restarts") >= 4);
    assert_eq!(
        number(&status, "/daemon/holder/pid"),
        u64::try_from(holder).unwrap()
    );
    end(&node, vec![point]);
}

#[test]
fn privileged_a_killed_holder_is_replaced() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("holder");
    if !capable(&node) {
        skip!("this kernel does not send requests again");
    }
    build(&node, 0, 12);
    let server = slow_store(&node);
    let point = mount(&node, &server.url(), 0);
    read(&node, &point.0, 0, 0);
    let (holder, worker) = pids(&node);
    let score = |pid: i32| {
        let text = fs_err::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        text.trim().parse::<i32>().unwrap()
    };
    // Where that may be lowered at all.
    let may = std::process::Command::new("sh")
        .args(["-c", "echo -900 > /proc/self/oom_score_adj"])
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    if may.success() {
        assert!(score(holder) <= -900, "the holder is spared");
    }
    assert!(score(holder) <= score(worker));

    kill(holder, "KILL");
    assert!(wait_until(|| is_gone(holder)));
    let replaced = || {
        let seen = status(&node);
        let pid = seen.pointer("/daemon/holder/pid").and_then(Value::as_u64);
        pid.is_some_and(|pid| pid != u64::try_from(holder).unwrap())
    };
    assert!(wait_until(replaced), "{}", node.log());
    let (second, same) = pids(&node);
    assert_eq!(same, worker, "the daemon served on");
    read(&node, &point.0, 0, 1);

    // What the new holder got is enough to go on with.
    kill(worker, "KILL");
    let third = next_worker(&node, worker);
    read(&node, &point.0, 0, 2);
    assert_eq!(pids(&node), (second, third));
    let upgraded = node.json(["daemon", "upgrade"]);
    assert_eq!(number(&upgraded, "/old/pid"), u64::try_from(third).unwrap());
    read(&node, &point.0, 0, 3);

    // Nor does that depend on who kept it first: this worker has everything from a holder.
    let (holder, worker) = pids(&node);
    kill(holder, "KILL");
    let another = || {
        let seen = status(&node);
        let pid = seen.pointer("/daemon/holder/pid").and_then(Value::as_u64);
        pid.is_some_and(|pid| pid != u64::try_from(holder).unwrap())
    };
    assert!(wait_until(another), "{}", node.log());
    kill(worker, "KILL");
    next_worker(&node, worker);
    read(&node, &point.0, 0, 4);

    // With both gone there is nothing to go on with. The next daemon cleans up and mounts anew, at
    // the same places; what held the old mounts has lost them.
    let (holder, worker) = pids(&node);
    kill(holder, "STOP");
    kill(worker, "KILL");
    kill(holder, "KILL");
    assert!(wait_until(|| is_gone(holder) && is_gone(worker)));
    let error = try_read(&node, &point.0, 0, 7);
    assert!(error.is_err(), "never zeros");
    node.ok(["umount", text(&point.0)]);
    drop(point.1);
    let point = mount(&node, &server.url(), 0);
    for file in 0..12 {
        read(&node, &point.0, 0, file);
    }
    end(&node, vec![point]);
}

#[test]
fn privileged_a_restart_without_the_store_serves_what_is_cached() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("away");
    if !capable(&node) {
        skip!("this kernel does not send requests again");
    }
    for layer in 0..3 {
        build(&node, layer, 4);
    }
    let store = format!("file://{}", node.store().display());
    let points: Vec<_> = (0..3).map(|l| mount(&node, &store, l)).collect();
    // All of the first, of the others one file; the third is not mounted any more.
    for file in 0..4 {
        read(&node, &points[0].0, 0, file);
    }
    read(&node, &points[1].0, 1, 3);
    read(&node, &points[2].0, 2, 3);
    let mut points = points;
    let (third, guard) = points.pop().unwrap();
    node.ok(["umount", text(&third)]);
    drop(guard);

    let back = take_store(&node);
    let worker = node.daemon_pid().unwrap();
    kill(worker, "KILL");
    next_worker(&node, worker);
    for file in 0..4 {
        read(&node, &points[0].0, 0, file);
    }
    read(&node, &points[1].0, 1, 3);
    let error = try_read(&node, &points[1].0, 1, 2).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    assert_eq!(status(&node)["leases"].as_array().unwrap().len(), 2);

    // Back again: nothing has to be done for that.
    back();
    for (layer, (point, _)) in (0..).zip(&points) {
        for file in 0..4 {
            read(&node, point, layer, file);
        }
    }
    points.push(mount(&node, &store, 2));
    read(&node, &points[2].0, 2, 1);
    end(&node, points);
}

#[test]
fn privileged_a_layer_that_cannot_be_adopted_stops_no_other() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("broken");
    if !capable(&node) {
        skip!("this kernel does not send requests again");
    }
    for layer in 0..2 {
        build(&node, layer, 4);
    }
    let store = format!("file://{}", node.store().display());
    let points: Vec<_> = (0..2).map(|l| mount(&node, &store, l)).collect();
    for (layer, (point, _)) in (0..).zip(&points) {
        read(&node, point, layer, 0);
    }
    let id = node.json(["inspect", "base/l0:1"])[0]["layer_id"]
        .as_str()
        .unwrap()
        .trim_start_matches("b3:")
        .to_owned();
    let (holder, worker) = pids(&node);
    // Nobody looks while it is broken: its map is gone, and so is the store's.
    kill(holder, "STOP");
    kill(worker, "KILL");
    let dir = node.root().join("cache").join(&id);
    fs_err::remove_file(dir.join("map")).unwrap();
    let back = take_store(&node);
    kill(holder, "CONT");
    next_worker(&node, worker);
    let error = try_read(&node, &points[0].0, 0, 1).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    read(&node, &points[1].0, 1, 0);
    let seen = status(&node);
    let problems = seen["node"]["problems"].to_string();
    assert!(problems.contains(&id), "{problems}");
    back();
    read(&node, &points[1].0, 1, 1);
    // The store has what is missing: after a moment the layer heals by itself.
    assert!(
        wait_until(|| try_read(&node, &points[0].0, 0, 1).is_ok()),
        "{}",
        node.log()
    );
    for file in 0..4 {
        read(&node, &points[0].0, 0, file);
    }
    end(&node, points);
}

#[test]
fn privileged_one_daemon_to_a_directory() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("second");
    build(&node, 0, 2);
    let store = format!("file://{}", node.store().display());
    let point = mount(&node, &store, 0);
    let before = pids(&node);
    let error = node.fails(1, ["daemon", "run"]);
    assert!(
        error.contains("in use by another layerpack daemon"),
        "{error}"
    );
    let error = node.fails(1, ["daemon", "run", "--no-holder"]);
    assert!(
        error.contains("in use by another layerpack daemon"),
        "{error}"
    );
    assert_eq!(pids(&node), before);
    read(&node, &point.0, 0, 1);
    // The second one took nothing of the first.
    let upgraded = node.json(["daemon", "upgrade"]);
    assert_eq!(
        number(&upgraded, "/old/pid"),
        u64::try_from(before.1).unwrap()
    );
    end(&node, vec![point]);
}

/// What commands of a former life left is found when a daemon starts, removed by rule, and listed.
#[test]
fn privileged_orphans_are_removed_and_listed() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("orphans");
    build(&node, 0, 1);
    let root = node.root();
    let old = |path: &Path| {
        let long_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
        let directory = fs_err::File::open(path).unwrap();
        directory.file().set_modified(long_ago).unwrap();
    };
    let record = |directory: &Path| {
        format!(
            r#"{{"format":1,"directory":"{}","layers":["base/l0:1"],"writable":true}}"#,
            directory.display()
        )
    };
    // The upper of a mount that a reboot took away, one that a command is about to mount, and one of
    // which only the claim was made.
    let unmounted = node.scratch.mkdir("unmounted").unwrap();
    let make = |name: &str, body: Option<String>| {
        let place = root.join("mounts").join(name);
        fs_err::create_dir_all(place.join("upper")).unwrap();
        fs_err::write(place.join("upper/file"), "x").unwrap();
        if let Some(body) = body {
            fs_err::write(place.join("record.json"), body).unwrap();
        }
        place
    };
    let gone = make("mount-0000000000000001", Some(record(&unmounted)));
    let young = make("mount-0000000000000002", Some(record(&unmounted)));
    let claimed = make("mount-0000000000000003", None);
    let damaged = make("mount-0000000000000004", Some("{".to_owned()));
    for path in [&gone, &claimed, &damaged] {
        old(path);
    }
    // A killed trial, with a mount in it, and one that is under way.
    let trial = root.join("doctor-4194399/node/layers/x");
    fs_err::create_dir_all(&trial).unwrap();
    let _guard = MountGuard::tmpfs(1 << 20, &trial).unwrap();
    let running = root.join(format!("doctor-{}", std::process::id()));
    fs_err::create_dir(&running).unwrap();
    // A cache of a layer that nobody knows.
    let unknown = root.join("cache").join("ab".repeat(32));
    fs_err::create_dir_all(&unknown).unwrap();
    fs_err::write(unknown.join("data"), vec![1; 9000]).unwrap();

    let store = format!("file://{}", node.store().display());
    let point = mount(&node, &store, 0);
    let listed = || status(&node)["node"]["swept"].to_string();
    let trial = root.join("doctor-4194399");
    assert!(
        wait_until(|| !gone.exists() && !claimed.exists() && !trial.exists()),
        "{}",
        listed()
    );
    assert!(
        wait_until(|| listed().contains("doctor-4194399")),
        "{}",
        listed()
    );
    let listed = listed();
    for words in [
        text(&unmounted),
        "a mount that was never made",
        "caches of 1 layers without a manifest here",
    ] {
        assert!(listed.contains(words), "{words}: {listed}");
    }
    for kept in [&young, &damaged, &running, &unknown] {
        assert!(kept.exists(), "{}", kept.display());
    }
    assert!(point.0.join(name(0)).exists());
    end(&node, vec![point]);
}
