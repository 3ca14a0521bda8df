//! `mount --fuse`: the same trees as by the kernel's EROFS, for root and for a user without any
//! privilege, and the same errors when bytes cannot be had.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "tests; error numbers are compared, which fs_err hides"
)]

mod support;

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use layerpack_fixtures::guards::ChildGuard;
use layerpack_fixtures::treecmp::{self, Options, TreeSnapshot};
use layerpack_fixtures::{MountGuard, find_tool, is_root, rng::Rng, skip};
use support::{Node, describe, kill, processes, wait_until};

/// `nobody`, whom every system has: fusermount3 asks for a name.
const USER: u32 = 65534;
const EIO: i32 = 5;
const ENOTCONN: i32 = 107;

macro_rules! needs_fuse {
    () => {
        if !is_root() {
            skip!("needs root to mount");
        }
        if find_tool("fusermount3").is_none() {
            skip!("needs fusermount3: install fuse3");
        }
    };
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    Rng::new(seed).bytes(bytes)
}

fn set_mtime(path: &Path, sec: i64, nsec: i64) {
    let time = rustix::fs::Timespec {
        tv_sec: sec,
        tv_nsec: nsec,
    };
    let times = rustix::fs::Timestamps {
        last_access: time,
        last_modification: time,
    };
    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, flags).unwrap();
}

/// Every kind of entry with every kind of metadata.
fn tree(root: &Path) {
    support::rootfs::make(root);
    let data = root.join("var/data");
    std::fs::write(data.join("big"), noise(3 << 20, 1)).unwrap();
    std::fs::hard_link(root.join("etc/passwd"), root.join("etc/passwd-link")).unwrap();
    std::fs::write(data.join("secret"), noise(10_000, 2)).unwrap();
    std::fs::set_permissions(data.join("secret"), std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::write(data.join("set-id"), noise(100, 3)).unwrap();
    std::os::unix::fs::lchown(data.join("set-id"), Some(1000), Some(70_000)).unwrap();
    std::fs::set_permissions(data.join("set-id"), std::fs::Permissions::from_mode(0o6755)).unwrap();
    let sparse = std::fs::File::create(data.join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &noise(5000, 4), 3 << 20).unwrap();
    sparse.set_len((5 << 20) + 17).unwrap();
    drop(sparse);
    let many = root.join("many");
    std::fs::create_dir(&many).unwrap();
    for i in 0..3000 {
        std::fs::write(many.join(format!("file-{i}")), noise(i % 50, i as u64)).unwrap();
    }
    std::fs::write(root.join("empty"), "").unwrap();
    std::os::unix::fs::symlink("x".repeat(300), root.join("long-link")).unwrap();
    for (name, value) in [
        ("user.note", b"text".as_slice()),
        ("user.bytes", &[0, 255, 7]),
    ] {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(data.join("big"), name, value, flags).unwrap();
        rustix::fs::setxattr(&many, name, value, flags).unwrap();
    }
    let make = |name: &str, kind, major, minor| {
        rustix::fs::mknodat(
            rustix::fs::CWD,
            root.join(name),
            kind,
            rustix::fs::Mode::from_raw_mode(0o640),
            rustix::fs::makedev(major, minor),
        )
        .unwrap();
    };
    make("fifo", rustix::fs::FileType::Fifo, 0, 0);
    make("char", rustix::fs::FileType::CharacterDevice, 1, 3);
    make("block", rustix::fs::FileType::BlockDevice, 259, 70_000);
    set_mtime(&data.join("big"), -5, 250_000_000);
    set_mtime(&root.join("long-link"), 1_700_000_000, 123_456_789);
    set_mtime(&many, 4_000_000_000, 1);
}

/// A mounted tree that is unmounted, and whose server ends, whatever the test does.
fn mount(node: &Node, references: &[&str], name: &str) -> (PathBuf, MountGuard) {
    let point = node.scratch.mkdir(name).unwrap();
    let mut line = vec!["mount", "--fuse"];
    line.extend(references);
    line.push(text(&point));
    node.ok(line);
    (point.clone(), MountGuard::new(point))
}

/// Waits for the servers of a node's mounts to be gone.
fn none_left(node: &Node) {
    assert!(
        wait_until(|| processes(node).is_empty()),
        "{:?}",
        processes(node)
    );
}

#[test]
fn privileged_a_fuse_mount_equals_its_source() {
    needs_fuse!();
    let node = Node::new("fuse-equal");
    let source = node.scratch.mkdir("source").unwrap();
    tree(&source);
    node.build("base/tree:1", &source, &["--xattr", "user."]);
    let (point, guard) = mount(&node, &["base/tree:1"], "mnt");
    let before = treecmp::snapshot(&source, &Options::default()).unwrap();
    // Twice: from the store, then from what the kernel and the cache hold.
    for _ in 0..2 {
        let after = treecmp::snapshot(&point, &Options::default()).unwrap();
        treecmp::assert_same(&before, &after);
    }
    let (one, two) = (
        std::fs::metadata(point.join("etc/passwd")).unwrap(),
        std::fs::metadata(point.join("etc/passwd-link")).unwrap(),
    );
    assert_eq!((one.ino(), one.nlink()), (two.ino(), 2));
    let refused = std::fs::write(point.join("new"), "x").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(30), "read-only: {refused}");
    // A device can be looked at, and not opened.
    let refused = std::fs::File::open(point.join("char")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(13), "nodev: {refused}");
    let shown = rustix::fs::statvfs(&point).unwrap();
    assert!(shown.f_blocks > 0 && shown.f_bfree == 0 && shown.f_namemax == 255);
    assert!(shown.f_files > 3000);
    let mut value = [0_u8; 1];
    let short = rustix::fs::getxattr(point.join("many"), "user.note", &mut value);
    assert_eq!(short.unwrap_err(), rustix::io::Errno::RANGE);
    let none = rustix::fs::getxattr(point.join("many"), "user.none", &mut value);
    assert_eq!(none.unwrap_err(), rustix::io::Errno::NODATA);
    assert!(!point.join("nothing").exists());

    // A second mount of the same layer has a cache of its own and does not mind the first.
    let (second, second_guard) = mount(&node, &["base/tree:1"], "second");
    let after = treecmp::snapshot(&second, &Options::default()).unwrap();
    treecmp::assert_same(&before, &after);
    node.ok(["umount", text(&second)]);
    drop(second_guard);
    node.ok(["umount", text(&point)]);
    drop(guard);
    assert!(std::fs::read_dir(&point).unwrap().next().is_none());
    none_left(&node);
    // The store does not keep the layers for mounts that are gone.
    let leases = node.store().join("leases");
    let left = std::fs::read_dir(&leases).map_or(0, |dir| dir.count());
    assert_eq!(left, 0, "leases are given back");
}

#[test]
fn privileged_a_fuse_stack_equals_the_kernels() {
    needs_fuse!();
    let node = Node::new("fuse-stack");
    let base = node.scratch.mkdir("base").unwrap();
    tree(&base);
    node.build("base/b:1", &base, &["--xattr", "user."]);
    let tool = node.scratch.mkdir("tool").unwrap();
    std::fs::write(tool.join("run"), noise(70_000, 9)).unwrap();
    node.build("toolkit/t:1", &tool, &["--at", "/var/data/tool"]);
    // A diff with whiteouts, opaque directories, replaced types.
    let changed = node.scratch.mkdir("changed").unwrap();
    let copied = Command::new("cp")
        .arg("-a")
        .arg(base.join("."))
        .arg(&changed)
        .status()
        .unwrap();
    assert!(copied.success());
    std::fs::remove_file(changed.join("var/data/big")).unwrap();
    std::fs::remove_dir_all(changed.join("many")).unwrap();
    std::fs::create_dir(changed.join("many")).unwrap();
    std::fs::write(changed.join("many/only"), "now").unwrap();
    std::fs::remove_file(changed.join("empty")).unwrap();
    std::fs::create_dir(changed.join("empty")).unwrap();
    std::fs::write(changed.join("empty/in"), "directory").unwrap();
    std::fs::remove_file(changed.join("shell")).unwrap();
    let from = format!("dir:{}", changed.display());
    node.ok([
        "-q",
        "build",
        "--from",
        &from,
        "--diff-from",
        "base/b:1",
        "--name",
        "d",
        "--version",
        "1",
        "--xattr",
        "user.",
    ]);
    let stack = ["base/b:1", "toolkit/t:1", "diff/d:1"];
    let kernel = node.scratch.mkdir("kernel").unwrap();
    let mut line = vec!["mount"];
    line.extend(stack);
    line.push(text(&kernel));
    node.ok(line);
    let _kernel = MountGuard::new(&kernel);
    let (point, _guard) = mount(&node, &stack, "mnt");
    let want = treecmp::snapshot(&kernel, &Options::default()).unwrap();
    let have = treecmp::snapshot(&point, &Options::default()).unwrap();
    treecmp::assert_same(&want, &have);
    assert!(have.get("many/only").is_some() && have.get("many/file-1").is_none());
    assert!(have.get("shell").is_none() && have.get("var/data/tool/run").is_some());
    node.ok(["umount", text(&point)]);
    node.ok(["umount", text(&kernel)]);
}

/// The node's binary where a user without privileges can start it, and what it needs.
struct Nobody<'a> {
    node: &'a Node,
    program: PathBuf,
    home: PathBuf,
}

impl<'a> Nobody<'a> {
    fn new(node: &'a Node) -> Self {
        let program = node.scratch.join("layerpack");
        std::fs::copy(env!("CARGO_BIN_EXE_layerpack"), &program).unwrap();
        let home = node.scratch.mkdir("home").unwrap();
        std::os::unix::fs::chown(&home, Some(USER), Some(USER)).unwrap();
        Self {
            node,
            program,
            home,
        }
    }

    fn mkdir(&self, name: &str) -> PathBuf {
        let path = self.home.join(name);
        std::fs::create_dir(&path).unwrap();
        std::os::unix::fs::chown(&path, Some(USER), Some(USER)).unwrap();
        path
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&self.program)
            .args(arguments)
            .env("LAYERPACK_ROOT", self.node.root())
            .env("LAYERPACK_STORE", self.node.store())
            .env("HOME", &self.home)
            .env_remove("XDG_CACHE_HOME")
            .env_remove("LAYERPACK_CACHE")
            .env_remove("LAYERPACK_LOG")
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    fn ok(&self, arguments: &[&str]) {
        let output = self.run(arguments);
        assert!(output.status.success(), "{}", describe(&output));
    }
}

/// Lets everybody open /dev/fuse, as udev does on most machines, for as long as this lives.
struct OpenDevice(Option<u32>);

impl OpenDevice {
    const PATH: &str = "/dev/fuse";

    fn new() -> Self {
        let mode = std::fs::metadata(Self::PATH).unwrap().mode() & 0o7777;
        if mode & 0o006 == 0o006 {
            return Self(None);
        }
        std::fs::set_permissions(Self::PATH, std::fs::Permissions::from_mode(0o666)).unwrap();
        Self(Some(mode))
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        if let Some(mode) = self.0 {
            let _ = std::fs::set_permissions(Self::PATH, std::fs::Permissions::from_mode(mode));
        }
    }
}

/// Runs something as the user: who mounts by FUSE lets in nobody else, not even root.
fn as_user<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                // Of this thread alone, which ends with the work.
                let (uid, gid) = (
                    rustix::fs::Uid::from_raw(USER),
                    rustix::fs::Gid::from_raw(USER),
                );
                rustix::thread::set_thread_groups(&[]).unwrap();
                rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
                rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
                work()
            })
            .join()
            .unwrap()
    })
}

fn seen_by_user(point: &Path) -> TreeSnapshot {
    as_user(|| treecmp::snapshot(point, &Options::default()).unwrap())
}

#[test]
fn privileged_a_user_without_privileges_mounts_the_same_tree() {
    needs_fuse!();
    let node = Node::new("fuse-user");
    let source = node.scratch.mkdir("source").unwrap();
    tree(&source);
    node.build("base/tree:1", &source, &["--xattr", "user."]);
    let mut open_up = vec![node.store()];
    while let Some(path) = open_up.pop() {
        let readable = if path.is_dir() { 0o755 } else { 0o644 };
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(readable)).unwrap();
        if path.is_dir() {
            open_up.extend(std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
    }
    let user = Nobody::new(&node);
    let _device = OpenDevice::new();
    let point = user.mkdir("mnt");
    user.ok(&["mount", "--fuse", "base/tree:1", text(&point)]);
    let guard = MountGuard::new(&point);
    let before = treecmp::snapshot(&source, &Options::default()).unwrap();
    treecmp::assert_same(&before, &seen_by_user(&point));
    // The cache is the user's own, and nobody else's to read.
    let cache = user.home.join(".cache/layerpack/fuse");
    let found = std::fs::metadata(&cache).unwrap();
    assert_eq!((found.uid(), found.mode() & 0o777), (USER, 0o700));
    // Without being asked to, it lets in nobody else.
    let refused = std::fs::read_dir(&point).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(13), "{refused}");
    user.ok(&["umount", text(&point)]);
    drop(guard);
    assert!(std::fs::read_dir(&point).unwrap().next().is_none());
    none_left(&node);

    // Again, from the cache, in the foreground, ended by a signal.
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&user.program)
        .args([
            "-o",
            "json",
            "mount",
            "--fuse",
            "--foreground",
            "base/tree:1",
        ])
        .arg(&point)
        .env("LAYERPACK_ROOT", node.root())
        .env("LAYERPACK_STORE", node.store())
        .env("LAYERPACK_CACHE", user.home.join(".cache/layerpack"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut server = ChildGuard::spawn(&mut command).unwrap();
    let _guard = MountGuard::new(&point);
    let mut said = BufReader::new(server.child().stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "{\n");
    assert!(wait_until(|| as_user(|| point.join("etc/passwd").exists())));
    treecmp::assert_same(&before, &seen_by_user(&point));
    kill(i32::try_from(server.id()).unwrap(), "TERM");
    let status = server.child().wait().unwrap();
    assert!(status.success(), "{status}");
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("base/tree:1"), "{rest}");
    assert!(std::fs::read_dir(&point).unwrap().next().is_none());

    // Where nothing is mounted, that is what is said.
    let output = user.run(&["umount", text(&point)]);
    let error = support::one_error(1, &output);
    assert!(error.contains("nothing is mounted"), "{error}");

    // A directory that is not the user's.
    let foreign = node.scratch.mkdir("foreign").unwrap();
    let output = user.run(&["mount", "--fuse", "base/tree:1", text(&foreign)]);
    let error = support::one_error(1, &output);
    assert!(error.contains("fuse3"), "{error}");
    none_left(&node);
}

#[test]
fn privileged_a_fuse_mount_lets_others_in_by_modes_when_asked() {
    needs_fuse!();
    let node = Node::new("fuse-other");
    let source = node.scratch.mkdir("source").unwrap();
    std::fs::write(source.join("open"), "for all").unwrap();
    std::fs::write(source.join("closed"), "for root").unwrap();
    std::fs::set_permissions(
        source.join("closed"),
        std::fs::Permissions::from_mode(0o600),
    )
    .unwrap();
    node.build("base/o:1", &source, &[]);
    let point = node.scratch.mkdir("mnt").unwrap();
    node.ok(["mount", "--fuse", "--allow-other", "base/o:1", text(&point)]);
    let _guard = MountGuard::new(&point);
    as_user(|| {
        assert_eq!(
            std::fs::read_to_string(point.join("open")).unwrap(),
            "for all"
        );
        let refused = std::fs::read(point.join("closed")).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(13), "{refused}");
    });
    assert_eq!(
        std::fs::read_to_string(point.join("closed")).unwrap(),
        "for root"
    );
    node.ok(["umount", text(&point)]);
}

/// Packs of the node's store.
fn packs(node: &Node) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut todo = vec![node.store().join("packs")];
    while let Some(path) = todo.pop() {
        if path.is_dir() {
            todo.extend(std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        } else {
            found.push(path);
        }
    }
    assert!(!found.is_empty());
    found
}

#[test]
fn privileged_what_cannot_be_had_is_an_error_never_zeros() {
    needs_fuse!();
    let node = Node::new("fuse-gone");
    let source = node.scratch.mkdir("source").unwrap();
    for i in 0..4u64 {
        std::fs::write(source.join(format!("f{i}")), noise(2 << 20, i)).unwrap();
    }
    node.build("base/g:1", &source, &[]);
    let (point, _guard) = mount(&node, &["base/g:1"], "mnt");
    assert_eq!(std::fs::read(point.join("f0")).unwrap(), noise(2 << 20, 0));
    // The store is away.
    let (packs_dir, away) = (node.store().join("packs"), node.store().join("away"));
    std::fs::rename(&packs_dir, &away).unwrap();
    let failed = std::fs::read(point.join("f1")).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(EIO), "{failed}");
    assert_eq!(std::fs::read(point.join("f0")).unwrap(), noise(2 << 20, 0));
    std::fs::rename(&away, &packs_dir).unwrap();
    // A failure is not remembered.
    assert_eq!(std::fs::read(point.join("f1")).unwrap(), noise(2 << 20, 1));
    // What is in it is damaged.
    for pack in packs(&node) {
        let mut bytes = std::fs::read(&pack).unwrap();
        for byte in &mut bytes {
            *byte ^= 0x55;
        }
        std::fs::set_permissions(&pack, std::fs::Permissions::from_mode(0o644)).unwrap();
        std::fs::write(&pack, bytes).unwrap();
    }
    let failed = std::fs::read(point.join("f2")).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(EIO), "{failed}");
    // What was read before is served from the cache by the next mount, too.
    node.ok(["umount", text(&point)]);
    none_left(&node);
    node.ok(["mount", "--fuse", "base/g:1", text(&point)]);
    assert_eq!(std::fs::read(point.join("f0")).unwrap(), noise(2 << 20, 0));
    let failed = std::fs::read(point.join("f3")).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(EIO), "{failed}");
    node.ok(["umount", text(&point)]);
}

#[test]
fn privileged_a_killed_server_leaves_a_mount_that_can_be_taken_away() {
    needs_fuse!();
    let node = Node::new("fuse-kill");
    let source = node.scratch.mkdir("source").unwrap();
    std::fs::write(source.join("file"), noise(100_000, 1)).unwrap();
    node.build("base/k:1", &source, &[]);
    let (point, _guard) = mount(&node, &["base/k:1"], "mnt");
    std::fs::read(point.join("file")).unwrap();
    kill_server(&node);
    assert!(wait_until(|| is_cut_off(&point)));
    node.ok(["umount", text(&point)]);
    assert!(std::fs::read_dir(&point).unwrap().next().is_none());
    // And it mounts again, also over one that nobody took away.
    node.ok(["mount", "--fuse", "base/k:1", text(&point)]);
    kill_server(&node);
    assert!(wait_until(|| is_cut_off(&point)));
    let output = node.run(["mount", "--fuse", "base/k:1", text(&point)]);
    assert!(output.status.success(), "{}", describe(&output));
    // Nothing is said that is no news.
    assert!(output.stderr.is_empty(), "{}", describe(&output));
    assert_eq!(
        std::fs::read(point.join("file")).unwrap(),
        noise(100_000, 1)
    );
    node.ok(["umount", text(&point)]);
    none_left(&node);
    let error = node.fails(1, ["umount", text(&point)]);
    assert!(error.contains("nothing is mounted"), "{error}");
}

/// Whether a mount has lost its server. A question asked between the server's death and the end of
/// its connection is answered with another error (ECONNABORTED).
fn is_cut_off(point: &Path) -> bool {
    let answer = std::fs::metadata(point);
    answer.is_err_and(|error| error.raw_os_error() == Some(ENOTCONN))
}

/// Kills the one server of a node's mounts.
fn kill_server(node: &Node) {
    let servers = processes(node);
    assert_eq!(servers.len(), 1, "{servers:?}");
    let pid: i32 = servers[0].split(' ').next().unwrap().parse().unwrap();
    kill(pid, "KILL");
    assert!(wait_until(|| processes(node).is_empty()));
}

#[test]
fn privileged_a_fuse_mount_is_filled_ahead_when_asked() {
    needs_fuse!();
    let node = Node::new("fuse-ahead");
    let source = node.scratch.mkdir("source").unwrap();
    for i in 0..4_u64 {
        std::fs::write(source.join(format!("f{i}")), noise(1 << 20, i)).unwrap();
    }
    node.build("base/g:1", &source, &[]);
    let point = node.scratch.mkdir("mnt").unwrap();
    let line = ["mount", "--fuse", "--prefetch", "all", "base/g:1"];
    node.ok(line.into_iter().chain([text(&point)]));
    let _guard = MountGuard::new(&point);
    // Nobody reads; what is fetched is what is asked for ahead.
    let cache = node.scratch.join("cache/fuse");
    let stored = || {
        let mut blocks = 0;
        let mut todo = vec![cache.clone()];
        while let Some(path) = todo.pop() {
            for entry in std::fs::read_dir(&path).unwrap() {
                let entry = entry.unwrap();
                let found = entry.metadata().unwrap();
                if found.is_dir() {
                    todo.push(entry.path());
                } else if entry.file_name() == "data" {
                    blocks += found.blocks();
                }
            }
        }
        blocks * 512
    };
    assert!(wait_until(|| stored() >= 4 << 20), "{}", stored());
    // It does without the store then.
    std::fs::rename(node.store(), node.scratch.join("away")).unwrap();
    for i in 0..4_u64 {
        let path = point.join(format!("f{i}"));
        assert!(std::fs::read(path).unwrap() == noise(1 << 20, i), "{i}");
    }
    node.ok(["umount", text(&point)]);
    none_left(&node);
    // Closing files is nothing to speak of.
    let log = std::fs::read_to_string(cache.join("log")).unwrap();
    assert!(!log.contains("Not Implemented"), "{log}");
}

#[test]
fn privileged_bad_fuse_command_lines_are_refused() {
    needs_fuse!();
    let node = Node::new("fuse-args");
    let source = node.scratch.mkdir("source").unwrap();
    std::fs::write(source.join("file"), "1").unwrap();
    node.build("base/a:1", &source, &[]);
    let point = node.scratch.mkdir("mnt").unwrap();
    let dir = text(&point).to_owned();
    let output = node.run(["mount", "--fuse", "--rw", "base/a:1", &dir]);
    assert_eq!(output.status.code(), Some(2), "{}", describe(&output));
    let output = node.run(["mount", "--foreground", "base/a:1", &dir]);
    assert_eq!(output.status.code(), Some(2), "{}", describe(&output));
    let wrong = ["mount", "--fuse", "--profile", "none", "base/a:1", &dir];
    let error = node.fails(1, wrong);
    assert!(error.contains("none"), "{error}");
    let error = node.fails(1, ["mount", "--fuse", "base/none:1", &dir]);
    assert!(error.contains("base/none:1"), "{error}");
    let error = node.fails(1, ["mount", "--fuse", "base/a:1", "/no/such/place"]);
    assert!(error.contains("mkdir"), "{error}");
    let error = node.fails(1, ["--cache-dir=", "mount", "--fuse", "base/a:1", &dir]);
    assert!(error.contains("--cache-dir"), "{error}");
    none_left(&node);
}

#[test]
fn privileged_the_signature_policy_holds_without_a_daemon() {
    needs_fuse!();
    let node = Node::new("whole-policy");
    let source = node.scratch.mkdir("source").unwrap();
    std::fs::write(source.join("file"), "x").unwrap();
    node.build("base/b:1", &source, &[]);
    std::fs::create_dir_all(node.root()).unwrap();
    std::fs::write(node.root().join("policy.toml"), "mode = \"require\"\n").unwrap();
    let point = node.scratch.mkdir("mnt").unwrap();
    let said = node.fails(1, ["mount", "--fuse", "base/b:1", text(&point)]);
    assert!(said.contains("is not signed"), "{said}");
}
