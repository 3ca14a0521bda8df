//! A holder that does not answer: commands say so, and what can end without it ends.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use layerpack_fixtures::{MountGuard, is_root, skip};
use support::times::time_of;
use support::{Node, kill, mounts, processes, wait_until};

/// Lets a stopped process go on, whatever the test does.
struct GoesOn(i32);

impl Drop for GoesOn {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.0).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::CONT);
    }
}

/// A node with a mounted layer.
fn mounted(label: &str) -> (Node, PathBuf, MountGuard) {
    let node = Node::new(label);
    let source = node.scratch.mkdir("source").unwrap();
    fs_err::write(source.join("file"), "content").unwrap();
    node.build("base/a:1", &source, &[]);
    let point = node.scratch.mkdir("mnt").unwrap();
    node.ok(["mount", "base/a:1", point.to_str().unwrap()]);
    let guard = MountGuard::new(&point);
    (node, point, guard)
}

#[test]
fn privileged_a_stopped_holder_is_named_and_keeps_nothing_from_ending() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let (node, point, guard) = mounted("stopped-holder");
    let holder = node.holder_pid();
    kill(holder, "STOP");
    let goes_on = GoesOn(holder);
    let error = node.fails(1, ["daemon", "upgrade"]);
    for part in [format!("process {holder}"), format!("kill -CONT {holder}")] {
        assert!(error.contains(&part), "{error}");
    }
    // Everything else goes on.
    assert_eq!(fs_err::read(point.join("file")).unwrap(), b"content");
    node.ok(["daemon", "stop", "--force"]);
    drop(goes_on);
    drop(guard);
    assert!(wait_until(|| processes(&node).is_empty()));
    assert_eq!(mounts(&node), Vec::<PathBuf>::new());
    // It starts anew.
    node.ok(["mount", "base/a:1", point.to_str().unwrap()]);
    let _guard = MountGuard::new(&point);
    assert_ne!(node.holder_pid(), holder);
    assert_eq!(fs_err::read(point.join("file")).unwrap(), b"content");
    node.ok(["umount", point.to_str().unwrap()]);
    support::assert_clean(&node);
}

#[test]
fn times_of_the_log_are_read() {
    let seconds = |text| {
        let time: Option<SystemTime> = time_of(text);
        time?.duration_since(SystemTime::UNIX_EPOCH).ok()
    };
    let expected = Duration::new(1_709_251_199, 123_456_000);
    assert_eq!(seconds("2024-02-29T23:59:59.123456Z"), Some(expected));
    assert_eq!(seconds("1970-01-01T00:00:00.000000Z"), Some(Duration::ZERO));
    assert_eq!(seconds("no time"), None);
}
