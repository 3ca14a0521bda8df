//! What ends the daemon's process, one after another: signals as faults send them, the kernel out of
//! memory, a state that it cannot start with. Mounts and sandboxes go on.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "tests; what was seen is printed"
)]

mod support;

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use layerpack_fixtures::{MountGuard, is_root, skip};
use rustix::process::{Resource, Rlimit, setrlimit};
use support::load::{
    Ender, LONG, build, capable, children, content, end, is_gone, mount, name, next_worker, number,
    pids, read, slow_store, status, under_load,
};
use support::memory::{Group, Lifted, take_memory};
use support::{Node, kill, wait_until};

/// How a process ends by a fault of its own, or by a panic in a thread that it needs.
const FAULTS: [&str; 8] = ["ABRT", "SEGV", "BUS", "ILL", "FPE", "TRAP", "SYS", "QUIT"];

/// Not a test of its own: takes the memory of a control group.
#[test]
#[ignore = "a child process of another test"]
fn child_that_takes_memory() {
    take_memory();
}

/// Mount points with what takes them down.
type Points = Vec<(PathBuf, MountGuard)>;

/// Layers of 24 files, mounted from a store that takes its time.
fn mounted(node: &Node, layers: u64, store: &str) -> (Points, Vec<(u64, PathBuf)>) {
    let points: Vec<_> = (0..layers).map(|l| mount(node, store, l)).collect();
    let dirs = points.iter().map(|(point, _)| point.clone());
    let dirs = (0..).zip(dirs).collect();
    (points, dirs)
}

/// A sandbox whose process reads its files again and again; told to end by a file.
struct Sandbox {
    child: Child,
}

impl Sandbox {
    fn start(node: &Node) -> Self {
        let root = node.scratch.mkdir("rootfs").unwrap();
        support::rootfs::make(&root);
        node.build("base/root:1", &root, &[]);
        node.ok(["sandbox", "create", "--name", "lives", "base/root:1"]);
        let script = "while [ ! -e /tmp/end ]; do cat /bin/cat /etc/passwd > /dev/null || exit 3; touch /tmp/seen; sleep 0.02; done; exit 42";
        let child = node
            .command()
            .args(["sandbox", "exec", "lives", "--", "sh", "-c", script])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let seen = || node.run(["sandbox", "exec", "lives", "--", "ls", "/tmp/seen"]);
        assert!(wait_until(|| seen().status.success()));
        Self { child }
    }

    /// It ran all the while, and its layers are there.
    fn end(mut self, node: &Node) {
        assert!(self.child.try_wait().unwrap().is_none(), "it has ended");
        let passwd = node.ok(["sandbox", "exec", "lives", "--", "cat", "/etc/passwd"]);
        assert!(passwd.starts_with("root:x:0:0"), "{passwd}");
        node.ok(["sandbox", "exec", "lives", "--", "touch", "/tmp/end"]);
        assert_eq!(self.child.wait().unwrap().code(), Some(42));
        node.ok(["sandbox", "rm", "--force", "lives"]);
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The worker of a holder, once there is another one than `last`.
fn worker(node: &Node, holder: i32, last: i32) -> i32 {
    let begun = Instant::now();
    loop {
        match children(holder).first() {
            Some(pid) if *pid != last => return *pid,
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
        assert!(begun.elapsed() < LONG, "no worker: {}", node.log());
    }
}

#[test]
fn privileged_no_read_fails_whatever_fault_ends_the_daemon() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let rounds = match std::env::var_os("LAYERPACK_TEST_FULL") {
        Some(_) => 12,
        None => 1,
    };
    // Inherited by the daemon: faults are on purpose here.
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none).unwrap();
    let node = Node::new("faults");
    if !capable(&node) {
        skip!("this kernel does not send requests again");
    }
    for layer in 0..2 {
        build(&node, layer, 24);
    }
    let server = slow_store(&node);
    let (points, dirs) = mounted(&node, 2, &server.url());
    let (holder, _) = pids(&node);
    let reads = under_load(&node, &dirs, 24, || {
        let mut last = 0;
        for signal in FAULTS.iter().cycle().take(FAULTS.len() * rounds) {
            let victim = worker(&node, holder, last);
            // One that serves, mostly.
            node.daemon_pid();
            std::thread::sleep(Duration::from_millis(60));
            let begun = Instant::now();
            while !is_gone(victim) {
                // The first one that no fault has caused is passed over by who looks for stacks that
                // have overflowed.
                let _ = std::process::Command::new("kill")
                    .args([&format!("-{signal}"), &victim.to_string()])
                    .stderr(Stdio::null())
                    .status();
                std::thread::sleep(Duration::from_millis(2));
                assert!(begun.elapsed() < LONG, "{signal} does not end it");
            }
            last = victim;
        }
    });
    let deaths = u64::try_from(FAULTS.len() * rounds).unwrap();
    let status = status(&node);
    println!("{reads} reads, {deaths} faults: none failed or wrong");
    assert!(number(&status, "/daemon/holder/restarts") >= deaths);
    assert_eq!(pids(&node).0, holder);
    assert_eq!(status["node"]["problems"], serde_json::json!([]));
    let log = node.log();
    for (signal, number) in [("ABRT", 6), ("SEGV", 11), ("BUS", 7), ("ILL", 4)] {
        let line = format!("ended by signal {number}");
        assert!(log.contains(&line), "{signal}: {log}");
    }
    end(&node, points);
}

#[test]
fn privileged_the_kernel_out_of_memory_costs_no_read() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let rounds = match std::env::var_os("LAYERPACK_TEST_FULL") {
        Some(_) => 30,
        None => 3,
    };
    let group = match Group::new("oom") {
        Ok(group) => group,
        Err(reason) => skip!("{reason}"),
    };
    let node = Node::new("oom");
    if !capable(&node) {
        skip!("this kernel does not send requests again");
    }
    for layer in 0..2 {
        build(&node, layer, 24);
    }
    let server = slow_store(&node);
    let (points, dirs) = mounted(&node, 2, &server.url());
    let sandbox = Sandbox::start(&node);
    let (holder, first) = pids(&node);
    let score = |pid: i32| {
        let text = fs_err::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        text.trim().parse::<i32>().unwrap()
    };
    assert!(score(holder) < score(first), "the holder is spared");
    let mark_workers = || children(holder).into_iter().for_each(mark);
    let _lifted = Lifted(&group);
    group.add(holder);
    group.add(first);
    // What the next one takes up counts for the group, all of it.
    kill(first, "KILL");
    let mut last = next_worker(&node, first);
    let mut victims = 0;
    let reads = under_load(&node, &dirs, 24, || {
        for _ in 0..rounds {
            // What takes the memory may be the first to go: then once more.
            for _ in 0..10 {
                assert!(group.set_limit(group.usage() + (24 << 20)));
                group.exhaust("child_that_takes_memory", mark_workers);
                group.lift();
                if is_gone(last) {
                    break;
                }
            }
            last = next_worker(&node, last);
            victims += 1;
        }
    });
    let killed = group.kills();
    println!("{reads} reads, {killed} processes killed for want of memory: none failed or wrong");
    assert!(killed >= rounds && victims == rounds);
    assert_eq!(pids(&node).0, holder);
    assert!(node.log().contains("ended by signal 9"));
    assert_eq!(status(&node)["node"]["problems"], serde_json::json!([]));

    sandbox.end(&node);
    end(&node, points);
}

/// Has the kernel end this process before any other of its group, however little it has of the memory.
fn mark(pid: i32) {
    // It may be gone.
    let _ = fs_err::write(format!("/proc/{pid}/oom_score_adj"), "1000");
}

/// A file that stands in the way of any start while this lives.
struct InTheWay {
    served: PathBuf,
    away: PathBuf,
}

impl InTheWay {
    fn put(node: &Node) -> Self {
        let (served, away) = (node.root().join("served"), node.root().join("served.away"));
        fs_err::rename(&served, &away).unwrap();
        fs_err::write(&served, "in the way").unwrap();
        Self { served, away }
    }
}

impl Drop for InTheWay {
    fn drop(&mut self) {
        let _ = fs_err::remove_file(&self.served);
        let _ = fs_err::rename(&self.away, &self.served);
    }
}

/// The error number of a read of a whole file, which is not cached.
fn errno_of(dir: &Path, file: u64) -> Option<i32> {
    let (mut open, _) = fs_err::File::open(dir.join(name(file)))
        .unwrap()
        .into_parts();
    let mut bytes = Vec::new();
    match std::io::Read::read_to_end(&mut open, &mut bytes) {
        Ok(_) => {
            assert!(bytes == content(0, file), "wrong bytes");
            None
        }
        Err(e) => e.raw_os_error(),
    }
}

#[test]
fn privileged_reads_of_a_daemon_that_never_starts_fail_in_time_and_it_says_so() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let mut node = Node::new("neverstarts");
    node.environment
        .push(("LAYERPACK_READ_TIMEOUT".to_owned(), "2s".to_owned()));
    if !capable(&node) {
        skip!("this kernel does not send requests again");
    }
    build(&node, 0, 12);
    let server = slow_store(&node);
    let point = mount(&node, &server.url(), 0);
    read(&node, &point.0, 0, 0);
    let (holder, worker) = pids(&node);
    let way = InTheWay::put(&node);
    kill(worker, "KILL");
    let end_readers = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (node, dir) = (&node, &point.0);
        let mut ender = Ender::new(node, &end_readers);
        // More than one of a kind: those that wait, and those that come when it is hopeless.
        let readers: Vec<_> = [3, 7, 11]
            .map(|file| scope.spawn(move || errno_of(dir, file)))
            .into();
        let begun = Instant::now();
        while !readers
            .iter()
            .all(std::thread::ScopedJoinHandle::is_finished)
        {
            assert!(begun.elapsed() < LONG, "a read hangs: {}", node.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        ender.armed = false;
        for reader in readers {
            assert_eq!(reader.join().unwrap(), Some(5), "{}", node.log());
        }
        assert_eq!(errno_of(dir, 6), Some(5), "{}", node.log());
    });
    assert!(!is_gone(holder));

    // Commands tell what is the matter, what was said last, and what helps.
    let error = node.fails(1, ["daemon", "status"]);
    for part in [
        text_of(&node).as_str(),
        "does not stay up",
        "the last one with code 1",
        "served",
        "then fail",
        "daemon.log",
        "`layerpack daemon stop --force`",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let report = node.run(["-o", "json", "doctor"]);
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    let finding = report["findings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|f| f["name"] == "daemon")
        .unwrap();
    assert_eq!(finding["ok"], false, "{finding}");
    assert!(
        finding["detail"]
            .as_str()
            .unwrap()
            .contains("does not stay up"),
        "{finding}"
    );
    let error = node.fails(1, ["cache", "ls"]);
    assert!(error.contains("does not stay up"), "{error}");

    // The cause goes, and with it all that came of it.
    drop(way);
    assert!(
        wait_until(|| errno_of(&point.0, 7).is_none()),
        "{}",
        node.log()
    );
    for file in 0..12 {
        read(&node, &point.0, 0, file);
    }
    let status = status(&node);
    assert!(number(&status, "/daemon/holder/restarts") >= 4);
    assert_eq!(pids(&node).0, holder);
    end(&node, vec![point]);
}

fn text_of(node: &Node) -> String {
    node.root().display().to_string()
}

#[test]
fn privileged_a_daemon_that_never_starts_can_be_ended() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("neverends");
    if !capable(&node) {
        skip!("this kernel does not send requests again");
    }
    build(&node, 0, 4);
    let server = slow_store(&node);
    let point = mount(&node, &server.url(), 0);
    let (holder, worker) = pids(&node);
    let way = InTheWay::put(&node);
    kill(worker, "KILL");
    assert!(wait_until(|| node.log().matches("was started").count() >= 4));
    // No process of it can unmount anything: the holder ends all the same.
    node.run(["daemon", "stop", "--force"]);
    assert!(wait_until(|| is_gone(holder)), "{}", node.log());
    drop(way);
    // What it left is found by the next one.
    node.ok(["umount", point.0.to_str().unwrap()]);
    drop(point.1);
    let point = mount(&node, &server.url(), 0);
    for file in 0..4 {
        read(&node, &point.0, 0, file);
    }
    end(&node, vec![point]);
}
