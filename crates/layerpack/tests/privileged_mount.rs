//! Mounting on a real kernel: trees come back as they were, the daemon may die, nothing stays.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use layerpack_fixtures::treecmp::{self, Options};
use layerpack_fixtures::{MountGuard, is_root, skip};
use support::{Node, kill, mounts, processes};

/// Incompressible bytes that differ at every offset, so that a hole read as zeros, or the wrong
/// block, cannot pass for them.
fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    layerpack_fixtures::rng::Rng::new(seed).bytes(bytes)
}

fn mount_point(node: &Node, name: &str) -> PathBuf {
    node.scratch.mkdir(name).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn privileged_a_mount_equals_its_source() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("equal");
    let source = node.scratch.mkdir("source").unwrap();
    support::rootfs::make(&source);
    fs_err::write(source.join("var/data/big"), noise(3 << 20, 1)).unwrap();
    fs_err::hard_link(source.join("etc/passwd"), source.join("etc/passwd-link")).unwrap();
    node.build("base/tree:1", &source, &[]);
    let point = mount_point(&node, "mnt");
    node.ok(["mount", "base/tree:1", text(&point)]);
    let guard = MountGuard::new(&point);
    let before = treecmp::snapshot(&source, &Options::default()).unwrap();
    let after = treecmp::snapshot(&point, &Options::default()).unwrap();
    treecmp::assert_same(&before, &after);
    assert!(
        fs_err::write(point.join("new"), "x").is_err(),
        "read-only unless asked otherwise"
    );

    let status = node.json(["daemon", "status"]);
    assert_eq!(
        status["node"]["layers"].as_array().unwrap().len(),
        1,
        "{status}"
    );
    node.ok(["umount", text(&point)]);
    drop(guard);
    assert!(fs_err::read_dir(&point).unwrap().next().is_none());
    // What cannot be written into records is refused for that reason.
    let odd = node
        .scratch
        .join("mnt")
        .join(std::ffi::OsStr::from_bytes(b"\xff"));
    fs_err::create_dir(&odd).unwrap();
    let arguments = ["mount", "base/tree:1"].map(std::ffi::OsStr::new);
    let error = node.fails(1, arguments.into_iter().chain([odd.as_os_str()]));
    assert!(error.contains("is not UTF-8"), "{error}");
    node.ok(["daemon", "stop"]);
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
    assert_eq!(processes(&node), Vec::<String>::new());
}

#[test]
fn privileged_implicit_directories_keep_what_lies_below() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("implicit");
    let base = node.scratch.mkdir("base").unwrap();
    for (dir, mode) in [("tmp", 0o1777), ("root", 0o700), ("opt", 0o711)] {
        fs_err::create_dir(base.join(dir)).unwrap();
        fs_err::set_permissions(base.join(dir), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    std::os::unix::fs::chown(base.join("opt"), Some(12), Some(34)).unwrap();
    let tool = node.scratch.mkdir("tool/bin").unwrap();
    fs_err::write(tool.join("run"), "#!/bin/sh\n").unwrap();
    node.build("base/b:1", &base, &[]);
    node.build(
        "toolkit/t:1",
        &node.scratch.join("tool"),
        &["--at", "/opt/tool"],
    );
    let work = node.scratch.mkdir("work").unwrap();
    fs_err::write(work.join("note"), "in root's home").unwrap();
    node.build("workspace/w:1", &work, &["--at", "root"]);
    let point = mount_point(&node, "mnt");
    node.ok([
        "mount",
        "base/b:1",
        "workspace/w:1",
        "toolkit/t:1",
        text(&point),
    ]);
    let _guard = MountGuard::new(&point);
    let of = |path: &str| {
        let metadata = fs_err::metadata(point.join(path)).unwrap();
        (metadata.mode() & 0o7777, metadata.uid(), metadata.gid())
    };
    assert_eq!(of("tmp"), (0o1777, 0, 0));
    assert_eq!(of("root"), (0o700, 0, 0));
    assert_eq!(of("opt"), (0o711, 12, 34));
    assert_eq!(
        fs_err::read_to_string(point.join("root/note")).unwrap(),
        "in root's home"
    );
    assert_eq!(
        fs_err::read_to_string(point.join("opt/tool/bin/run")).unwrap(),
        "#!/bin/sh\n"
    );
    // The same directories in the base itself.
    let own = |path: &str| fs_err::metadata(base.join(path)).unwrap().mtime();
    for path in ["tmp", "root", "opt"] {
        assert_eq!(
            fs_err::metadata(point.join(path)).unwrap().mtime(),
            own(path),
            "{path}"
        );
    }
    node.ok(["umount", text(&point)]);
}

#[test]
fn privileged_a_writable_mount_forgets() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("writable");
    let source = node.scratch.mkdir("source").unwrap();
    fs_err::write(source.join("file"), "as built").unwrap();
    node.build("base/w:1", &source, &[]);
    let point = mount_point(&node, "mnt");
    for _ in 0..2 {
        node.ok(["mount", "--rw", "base/w:1", text(&point)]);
        let guard = MountGuard::new(&point);
        assert_eq!(
            fs_err::read_to_string(point.join("file")).unwrap(),
            "as built"
        );
        fs_err::write(point.join("file"), "changed").unwrap();
        fs_err::write(point.join("new"), "new").unwrap();
        assert_eq!(
            fs_err::read_to_string(point.join("file")).unwrap(),
            "changed"
        );
        node.ok(["umount", text(&point)]);
        drop(guard);
    }
    assert!(
        fs_err::read_dir(node.root().join("mounts"))
            .unwrap()
            .next()
            .is_none(),
        "uppers are deleted"
    );
}

#[test]
fn privileged_owners_are_shown_through_maps() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("owners");
    let source = node.scratch.mkdir("source/dir").unwrap();
    let root = node.scratch.join("source");
    for (name, owner) in [("a", 0), ("b", 1000), ("c", 70_000)] {
        fs_err::write(source.join(name), name).unwrap();
        std::os::unix::fs::chown(source.join(name), Some(owner), Some(owner + 1)).unwrap();
    }
    fs_err::set_permissions(&root, std::fs::Permissions::from_mode(0o711)).unwrap();
    node.build("base/o:1", &root, &[]);
    let over = node.scratch.mkdir("over").unwrap();
    fs_err::write(over.join("top"), "top").unwrap();
    node.build("workspace/o:1", &over, &[]);
    let point = mount_point(&node, "mnt");
    let owner = |path: &str| {
        let metadata = fs_err::symlink_metadata(point.join(path)).unwrap();
        (metadata.uid(), metadata.gid())
    };
    let maps = ["--uid-map", "0:100000:65536", "--gid-map", "0:200000:65536"];
    // One layer, and several with changes above them.
    let lines: [&[&str]; 3] = [
        &["base/o:1"],
        &["base/o:1", "workspace/o:1"],
        &["--rw", "base/o:1", "workspace/o:1"],
    ];
    for line in lines {
        let mut arguments = vec!["mount"];
        arguments.extend(maps);
        arguments.extend(line);
        arguments.push(text(&point));
        node.ok(&arguments);
        let guard = MountGuard::new(&point);
        assert_eq!(owner("dir/a"), (100_000, 200_001), "{line:?}");
        assert_eq!(owner("dir/b"), (101_000, 201_001), "{line:?}");
        // Ids that the map does not have.
        assert_eq!(owner("dir/c"), (65_534, 65_534), "{line:?}");
        assert_eq!(owner("."), (100_000, 200_000), "{line:?}");
        assert_eq!(
            fs_err::read_to_string(point.join("dir/b")).unwrap(),
            "b",
            "{line:?}"
        );
        let mode = fs_err::metadata(&point).unwrap().mode() & 0o7777;
        // That of the base: a workspace says nothing of it.
        assert_eq!(mode, 0o711, "{line:?}");
        if line.contains(&"--rw") {
            fs_err::write(point.join("dir/b"), "changed").unwrap();
            assert_eq!(owner("dir/b"), (101_000, 201_001));
        }
        node.ok(["umount", text(&point)]);
        drop(guard);
    }
    // Without maps, as they are; with one map, the other ids as they are.
    node.ok(["mount", "--gid-map", "0:5:70002", "base/o:1", text(&point)]);
    let guard = MountGuard::new(&point);
    assert_eq!(owner("dir/c"), (70_000, 70_006));
    node.ok(["umount", text(&point)]);
    drop(guard);
    let overlap = ["--uid-map", "0:0:10", "--uid-map", "5:50:10"];
    let mut bad = vec!["mount"];
    bad.extend(overlap);
    bad.extend(["base/o:1", text(&point)]);
    let error = node.fails(1, &bad);
    assert!(error.contains("--uid-map"), "{error}");
    let fuse = ["mount", "--fuse", "--uid-map", "0:0:1", "base/o:1"];
    let refused = node.run(fuse.into_iter().chain([text(&point)]));
    assert_eq!(refused.status.code(), Some(2));
    support::assert_clean(&node);
}

#[test]
fn privileged_only_what_is_read_is_fetched() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("lazy");
    let source = node.scratch.mkdir("source").unwrap();
    for i in 0..32u64 {
        fs_err::write(source.join(format!("file-{i}")), noise(1 << 20, i)).unwrap();
    }
    node.build("base/lazy:1", &source, &[]);
    let point = mount_point(&node, "mnt");
    node.ok(["mount", "base/lazy:1", text(&point)]);
    let _guard = MountGuard::new(&point);
    let counter = || {
        let status = node.json(["daemon", "status"]);
        status["node"]["totals"]["fetched_bytes"].as_u64().unwrap()
    };
    // Readahead goes on behind a read: wait until it has ended.
    let fetched = || {
        let mut last = counter();
        loop {
            std::thread::sleep(std::time::Duration::from_millis(200));
            let now = counter();
            if now == last {
                return now;
            }
            last = now;
        }
    };
    // Names and sizes are metadata, which is here already.
    for entry in fs_err::read_dir(&point).unwrap() {
        assert_eq!(entry.unwrap().metadata().unwrap().len(), 1 << 20);
    }
    let idle = fetched();
    assert!(idle < 1 << 20, "{idle} bytes were fetched for a listing");
    assert_eq!(
        fs_err::read(point.join("file-7")).unwrap(),
        noise(1 << 20, 7)
    );
    let one = fetched();
    assert!(one >= 1 << 20, "what was read was fetched: {one}");
    assert!(
        one < 8 << 20,
        "{one} bytes of a 32 MiB layer were fetched for a file of 1 MiB"
    );
    assert_eq!(
        fs_err::read(point.join("file-7")).unwrap(),
        noise(1 << 20, 7)
    );
    let more = fetched() - one;
    assert!(
        more < 1 << 20,
        "the second read comes from the cache, but for some readahead: {more}"
    );
    node.ok(["umount", text(&point)]);
}

/// The kernel's own state allows no more where the holder is killed too: then what was never read
/// gives errors.
#[test]
fn privileged_a_killed_daemon_costs_nothing_and_without_holder_errors_never_zeros() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("killed");
    let source = node.scratch.mkdir("source").unwrap();
    let contents: Vec<Vec<u8>> = (0..48u64).map(|i| noise(1 << 20, 100 + i)).collect();
    for (i, bytes) in contents.iter().enumerate() {
        fs_err::write(source.join(format!("file-{i:02}")), bytes).unwrap();
    }
    node.build("base/killed:1", &source, &[]);
    let point = mount_point(&node, "mnt");
    node.ok(["mount", "base/killed:1", text(&point)]);
    let guard = MountGuard::new(&point);
    assert_eq!(fs_err::read(point.join("file-00")).unwrap(), contents[0]);
    let pid = node.daemon_pid().unwrap();

    // Readers go through a part of the files while the daemon dies under them, and see nothing of it.
    std::thread::scope(|scope| {
        for reader in 0..2usize {
            let (point, contents) = (&point, &contents);
            scope.spawn(move || {
                for i in (0..24).skip(reader).step_by(2) {
                    let bytes = fs_err::read(point.join(format!("file-{i:02}"))).unwrap();
                    assert!(bytes == contents[i], "file-{i:02}: wrong bytes");
                }
            });
        }
        kill(pid, "KILL");
    });

    // Both gone: what was never read cannot be read now.
    node.kill_all();
    let unread: Vec<_> = (0..contents.len())
        .filter(|i| match fs_err::read(point.join(format!("file-{i:02}"))) {
            Ok(bytes) => {
                assert!(bytes == contents[*i], "file-{i:02}: wrong bytes");
                false
            }
            Err(_) => true,
        })
        .collect();
    assert!(!unread.is_empty());

    // The next daemon says which mount that is, whatever becomes of that daemon.
    let other = mount_point(&node, "other");
    node.ok(["mount", "base/killed:1", text(&other)]);
    let served = MountGuard::new(&other);
    let lost = |on: &Path| -> (bool, bool) {
        let text = node.ok(["-o", "json", "daemon", "status"]);
        let status: serde_json::Value = serde_json::from_str(&text).unwrap();
        let problems = status["node"]["problems"].as_array().unwrap();
        let problem = format!("the mount on {} is on layers", on.display());
        let listed = problems
            .iter()
            .any(|line| line.as_str().unwrap().starts_with(&problem));
        let top = node.ok(["-o", "json", "top", "--once", "--interval", "1s"]);
        let top: serde_json::Value = serde_json::from_str(&top).unwrap();
        let mounts = top["mounts"].as_array().unwrap();
        let row = mounts.iter().find(|row| row["on"] == on.to_str().unwrap());
        (listed, row.unwrap()["lost"] == true)
    };
    assert_eq!(lost(&point), (true, true));
    assert_eq!(lost(&other), (false, false));
    kill(node.daemon_pid().unwrap(), "KILL");
    assert_eq!(lost(&point), (true, true));
    assert!(node.ok(["daemon", "status"]).contains(" lost"));
    node.ok(["umount", text(&other)]);
    drop(served);
    node.ok(["umount", text(&point)]);
    drop(guard);
    let status = node.ok(["-o", "json", "daemon", "status"]);
    assert!(!status.contains("is on layers"), "{status}");
    node.ok(["mount", "base/killed:1", text(&point)]);
    let guard = MountGuard::new(&point);
    assert_eq!(lost(&point), (false, false));
    node.kill_all();

    // Without the daemon: unmount works and leaves no record.
    node.ok(["umount", text(&point)]);
    drop(guard);
    assert!(!mounts(&node).contains(&point));
    assert!(
        fs_err::read_dir(node.root().join("mounts"))
            .unwrap()
            .next()
            .is_none()
    );

    // The next one cleans up after the dead one and serves again.
    node.ok(["mount", "base/killed:1", text(&point)]);
    let guard = MountGuard::new(&point);
    for (i, bytes) in contents.iter().enumerate() {
        assert!(
            &fs_err::read(point.join(format!("file-{i:02}"))).unwrap() == bytes,
            "file-{i:02}"
        );
    }
    // What cannot be unmounted keeps nothing else mounted.
    let error = node.fails(1, ["umount", "/no/such/place", text(&point)]);
    assert!(error.contains("/no/such/place"), "{error}");
    drop(guard);
    assert!(!mounts(&node).contains(&point));
    node.ok(["daemon", "stop"]);
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
}

#[test]
fn privileged_a_file_that_cannot_be_read_fails_a_build() {
    if !is_root() {
        skip!("needs root to mount");
    }
    // Root may read anything but what the kernel itself cannot give: data of a layer whose daemon
    // is dead, and its holder.
    let node = Node::new("unreadable");
    let source = node.scratch.mkdir("source").unwrap();
    fs_err::write(source.join("readable"), "x").unwrap();
    fs_err::write(source.join("unreadable"), noise(4 << 20, 3)).unwrap();
    node.build("base/victim:1", &source, &[]);
    let point = mount_point(&node, "mnt");
    node.ok(["mount", "base/victim:1", text(&point)]);
    let _guard = MountGuard::new(&point);
    node.kill_all();
    let from = format!("dir:{}", point.display());
    let error = node.fails(
        1,
        [
            "-q",
            "build",
            "--kind",
            "base",
            "--name",
            "copy",
            "--version",
            "1",
            "--from",
            &from,
        ],
    );
    assert!(error.contains("readable"), "{error}");
    assert_eq!(
        node.json(["ls"]).as_array().unwrap().len(),
        1,
        "nothing was published"
    );
    node.ok(["umount", text(&point)]);
}

#[test]
fn privileged_a_daemon_in_use_does_not_stop() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("busy");
    let source = node.scratch.mkdir("source").unwrap();
    fs_err::write(source.join("file"), "x").unwrap();
    node.build("base/b:1", &source, &[]);
    let point = mount_point(&node, "mnt");
    node.ok(["mount", "base/b:1", text(&point)]);
    let _guard = MountGuard::new(&point);
    let error = node.fails(1, ["daemon", "stop"]);
    assert!(error.contains("layerpack daemon stop --force"), "{error}");
    assert!(error.contains("in use"), "{error}");
    assert_eq!(fs_err::read_to_string(point.join("file")).unwrap(), "x");
    // Mounting over it again is refused, and harms nothing.
    let error = node.fails(1, ["mount", "base/b:1", text(&point)]);
    assert!(error.contains("already"), "{error}");
    assert_eq!(fs_err::read_to_string(point.join("file")).unwrap(), "x");
    node.ok(["umount", text(&point)]);
    node.ok(["daemon", "stop"]);
    assert_eq!(
        node.ok(["daemon", "stop"]),
        format!("no daemon runs for {}\n", node.root().display())
    );
    let error = node.fails(1, ["umount", text(&point)]);
    assert!(error.contains("nothing is mounted"), "{error}");
}

#[test]
fn privileged_two_mounts_of_one_directory_are_one() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("twice");
    let source = node.scratch.mkdir("tree").unwrap();
    fs_err::write(source.join("file"), "x").unwrap();
    node.build("base/b:1", &source, &[]);
    let point = mount_point(&node, "mnt");
    let times = || {
        let mounts = layerpack_sys::mountinfo::read().unwrap();
        mounts.iter().filter(|entry| entry.target == point).count()
    };
    for round in 0..6 {
        let good = std::thread::scope(|scope| {
            let mount = || scope.spawn(|| node.run(["mount", "base/b:1", text(&point)]));
            let both = [mount(), mount()];
            let good = both.map(|one| one.join().unwrap().status.success());
            good.iter().filter(|good| **good).count()
        });
        let _guard = MountGuard::new(&point);
        assert_eq!((good, times()), (1, 1), "round {round}");
        node.ok(["umount", text(&point)]);
        assert_eq!(times(), 0, "round {round}");
    }
    node.ok(["daemon", "stop"]);
}

#[test]
fn privileged_many_commands_start_one_daemon() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("start");
    let source = node.scratch.mkdir("source").unwrap();
    fs_err::write(source.join("file"), "x").unwrap();
    node.build("base/b:1", &source, &[]);
    let points: Vec<PathBuf> = (0..6)
        .map(|i| mount_point(&node, &format!("mnt{i}")))
        .collect();
    let _guards: Vec<MountGuard> = points.iter().map(MountGuard::new).collect();
    let children: Vec<_> = points
        .iter()
        .map(|point| {
            node.command()
                .args(["mount", "base/b:1", text(point)])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", support::describe(&output));
    }
    let daemons: Vec<String> = processes(&node)
        .into_iter()
        .filter(|line| line.contains("daemon"))
        .collect();
    let (holders, workers): (Vec<_>, Vec<_>) = daemons
        .into_iter()
        .partition(|line| line.contains("layerpack-holder"));
    assert_eq!(holders.len(), 1, "{holders:?}");
    assert_eq!(workers.len(), 1, "{workers:?}");
    for point in &points {
        assert_eq!(fs_err::read_to_string(point.join("file")).unwrap(), "x");
        node.ok(["umount", text(point)]);
    }
    node.ok(["daemon", "stop"]);
}

#[test]
fn privileged_stop_cleans_up_after_a_killed_daemon() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("aftermath");
    let source = node.scratch.mkdir("source").unwrap();
    fs_err::write(source.join("file"), noise(1 << 20, 9)).unwrap();
    node.build("base/b:1", &source, &[]);
    let point = mount_point(&node, "mnt");
    node.ok(["mount", "base/b:1", text(&point)]);
    let guard = MountGuard::new(&point);
    node.kill_all();
    assert!(mounts(&node).len() > 1, "a killed daemon leaves its mounts");
    node.ok(["umount", text(&point)]);
    drop(guard);
    node.ok(["daemon", "stop"]);
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
    assert_eq!(processes(&node), Vec::<String>::new());
}
