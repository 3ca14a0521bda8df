//! Readers that know what they must see, and read past the kernel's caches, while something happens
//! to the daemon that serves them.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use layerpack_fixtures::MountGuard;
use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::servers::{Reply, Scripted};
use rustix::fs::{Advice, fadvise};
use serde_json::Value;

use super::{Node, is_zombie, mounts, processes, wait_until};

/// Longer than anything here may take.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Contents of file `file` of layer `layer`.
pub(crate) fn content(layer: u64, file: u64) -> Vec<u8> {
    let len = [9_000, 70_000, 300_000, 1_000_000][usize::try_from(file % 4).unwrap()];
    Rng::new(layer * 1000 + file + 1).bytes(len)
}

pub(crate) fn name(file: u64) -> String {
    format!("f{file:02}")
}

/// Publishes a layer of so many files.
pub(crate) fn build(node: &Node, layer: u64, files: u64) {
    let source = node.scratch.mkdir(format!("source-{layer}")).unwrap();
    for file in 0..files {
        fs_err::write(source.join(name(file)), content(layer, file)).unwrap();
    }
    node.build(&format!("base/l{layer}:1"), &source, &[]);
}

/// The node's store behind a server that takes its time over ranges, which is what data comes by.
pub(crate) fn slow_store(node: &Node) -> Scripted {
    let store = node.store();
    Scripted::start(move |request| {
        let path = request.target.split('?').next().unwrap_or_default();
        let Ok(bytes) = fs_err::read(store.join(path.trim_start_matches('/'))) else {
            return Reply::new(404, "");
        };
        if request.range().is_some() {
            std::thread::sleep(Duration::from_millis(3 + request.number % 12));
        }
        if request.method == "HEAD" {
            return Reply::new(200, "").header("Content-Length", bytes.len().to_string());
        }
        Reply::of(&bytes, request)
    })
    .unwrap()
}

/// Drops what the kernel has of a file, and of the blobs below all layers.
pub(crate) fn forget(node: &Node, file: &std::fs::File) -> std::io::Result<()> {
    let _ = fadvise(file, 0, None, Advice::DontNeed);
    for blob in fs_err::read_dir(node.root().join("blobs"))? {
        let blob = fs_err::File::open(blob?.path())?;
        let _ = fadvise(blob.file(), 0, None, Advice::DontNeed);
    }
    Ok(())
}

/// Reads a file of a layer past the kernel's caches and compares it.
pub(crate) fn read(node: &Node, dir: &Path, layer: u64, file: u64) {
    try_read(node, dir, layer, file).unwrap_or_else(|e| {
        let log = node.log();
        let tail = log.len().saturating_sub(6000);
        panic!("layer {layer} file {file}: {e}\n{}", &log[tail..])
    });
}

pub(crate) fn try_read(node: &Node, dir: &Path, layer: u64, file: u64) -> std::io::Result<()> {
    // Error numbers are looked at, which fs_err hides.
    let (mut open, _) = fs_err::File::open(dir.join(name(file)))?.into_parts();
    forget(node, &open)?;
    let mut bytes = Vec::new();
    open.read_to_end(&mut bytes)?;
    assert!(
        bytes == content(layer, file),
        "layer {layer} file {file}: wrong bytes"
    );
    Ok(())
}

pub(crate) fn status(node: &Node) -> Value {
    node.json(["daemon", "status"])
}

pub(crate) fn number(value: &Value, at: &str) -> u64 {
    value.pointer(at).and_then(Value::as_u64).unwrap()
}

pub(crate) fn pids(node: &Node) -> (i32, i32) {
    let status = status(node);
    let of = |at| i32::try_from(number(&status, at)).unwrap();
    (of("/daemon/holder/pid"), of("/daemon/pid"))
}

/// Children of a process, by the process table.
pub(crate) fn children(parent: i32) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        let stat = fs_err::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let rest = stat.rsplit(')').next().unwrap_or_default();
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next();
        let of = fields.next().and_then(|n| n.parse::<i32>().ok());
        if of == Some(parent) && state != Some("Z") {
            found.push(pid);
        }
    }
    found
}

pub(crate) fn is_gone(pid: i32) -> bool {
    !Path::new(&format!("/proc/{pid}/root")).exists() || is_zombie(pid)
}

/// Ends what serves a node when a test has failed, so that no thread of it waits for ever.
pub(crate) struct Ender<'a> {
    node: &'a Node,
    pub(crate) armed: bool,
    /// Told to the threads.
    end: &'a AtomicBool,
}

impl<'a> Ender<'a> {
    pub(crate) fn new(node: &'a Node, end: &'a AtomicBool) -> Self {
        Self {
            node,
            armed: true,
            end,
        }
    }
}

impl Drop for Ender<'_> {
    fn drop(&mut self) {
        self.end.store(true, Ordering::SeqCst);
        if self.armed {
            for line in processes(self.node) {
                if line.contains("daemon")
                    && let Some(pid) = line.split(' ').next().and_then(|n| n.parse().ok())
                {
                    let pid = rustix::process::Pid::from_raw(pid).unwrap();
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
        }
    }
}

/// Threads that read without end while `work` goes on; every read must succeed. Gives how many did.
pub(crate) fn under_load(
    node: &Node,
    dirs: &[(u64, PathBuf)],
    files: u64,
    work: impl FnOnce(),
) -> u64 {
    let (end, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let (end, reads, done) = (&end, &reads, &done);
        for thread in 0..4_u64 {
            scope.spawn(move || {
                // Counted out also when a read failed.
                struct Done<'a>(&'a AtomicU64);
                impl Drop for Done<'_> {
                    fn drop(&mut self) {
                        self.0.fetch_add(1, Ordering::SeqCst);
                    }
                }
                let _done = Done(done);
                let mut rng = Rng::new(thread + 77);
                while !end.load(Ordering::SeqCst) {
                    let (layer, dir) = rng.pick(dirs).unwrap();
                    read(node, dir, *layer, rng.below(files));
                    reads.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        // What is fetched does not stay, so that reads go on waiting for the store.
        scope.spawn(move || {
            while !end.load(Ordering::SeqCst) {
                node.run(["cache", "evict", "--all"]);
                std::thread::sleep(Duration::from_millis(400));
            }
        });
        let mut ender = Ender::new(node, end);
        // Armed while it panics, or while somebody does not come back.
        work();
        end.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        while done.load(Ordering::SeqCst) < 4 {
            assert!(begun.elapsed() < LONG, "a read hangs: {}", node.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        ender.armed = false;
    });
    reads.load(Ordering::SeqCst)
}

/// Everything is as it was, and goes away.
pub(crate) fn end(node: &Node, points: Vec<(PathBuf, MountGuard)>) {
    for (point, guard) in points {
        node.ok(["umount", text(&point)]);
        drop(guard);
    }
    node.ok(["daemon", "stop"]);
    assert_eq!(mounts(node), Vec::<PathBuf>::new());
    assert_eq!(processes(node), Vec::<String>::new());
    for left in ["daemon.sock", "holder.sock"] {
        assert!(!node.root().join(left).exists(), "{left}");
    }
}

pub(crate) fn mount(node: &Node, store: &str, layer: u64) -> (PathBuf, MountGuard) {
    let point = node.scratch.mkdir(format!("mnt-{layer}")).unwrap();
    let reference = format!("base/l{layer}:1");
    let arguments = [
        "--store",
        store,
        "mount",
        "--prefetch",
        "none",
        &reference,
        text(&point),
    ];
    node.ok(arguments);
    let guard = MountGuard::new(&point);
    (point, guard)
}

pub(crate) fn capable(node: &Node) -> bool {
    let report = node.run(["-o", "json", "doctor"]);
    let report: Value = serde_json::from_slice(&report.stdout).unwrap_or_default();
    report["findings"]
        .as_array()
        .into_iter()
        .flatten()
        .any(|f| f["name"] == "restarts" && f["detail"].as_str().unwrap().contains("go on"))
}

/// Takes the store away, until the result is called.
pub(crate) fn take_store(node: &Node) -> impl FnOnce() {
    let (store, away) = (node.store(), node.scratch.join("store.away"));
    fs_err::rename(&store, &away).unwrap();
    // So that nobody makes an empty one.
    fs_err::write(&store, "away").unwrap();
    move || {
        fs_err::remove_file(&store).unwrap();
        fs_err::rename(&away, &store).unwrap();
    }
}

/// Waits until the holder has another worker than `before`.
pub(crate) fn next_worker(node: &Node, before: i32) -> i32 {
    assert!(
        wait_until(|| node.daemon_pid().is_some_and(|pid| pid != before)),
        "{}",
        node.log()
    );
    node.daemon_pid().unwrap()
}
