//! The daemon on a socket that a service manager opened.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use layerpack_fixtures::guards::ChildGuard;
use layerpack_fixtures::{is_root, skip};
use support::{Node, describe, kill, processes, wait_until};

/// A daemon that is started as systemd does it: `fds` sockets from descriptor 3 on.
fn activated(node: &Node, socket: &UnixListener, fds: u32) -> Command {
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            &format!(
                "exec 3<&0 4<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS={fds}; exec \"$0\" daemon run"
            ),
            env!("CARGO_BIN_EXE_layerpack"),
        ])
        .env("LAYERPACK_ROOT", node.root())
        .env("LAYERPACK_STORE", node.store())
        .env("LAYERPACK_CACHE", node.scratch.join("cache"))
        .env_remove("NOTIFY_SOCKET")
        .stdin(OwnedFd::from(socket.try_clone().unwrap()))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

fn ended(command: &mut Command) -> Output {
    command.spawn().unwrap().wait_with_output().unwrap()
}

fn inode(path: &Path) -> u64 {
    fs_err::metadata(path).unwrap().ino()
}

#[test]
fn privileged_the_daemon_serves_on_a_socket_that_was_passed_on() {
    if !is_root() {
        skip!("needs root to serve");
    }
    let node = Node::new("activation");
    fs_err::create_dir(node.root()).unwrap();
    let path = node.root().join("daemon.sock");
    let socket = UnixListener::bind(&path).unwrap();
    let before = inode(&path);
    // Twice: the socket outlives the daemon, and whoever connects meanwhile waits in it.
    for _ in 0..2 {
        let mut daemon = ChildGuard::spawn(&mut activated(&node, &socket, 1)).unwrap();
        let pid = i32::try_from(daemon.id()).unwrap();
        assert_eq!(node.holder_pid(), pid, "{}", node.log());
        // The process that takes over has it too.
        let worker = node.daemon_pid().unwrap();
        kill(worker, "KILL");
        assert!(wait_until(|| node
            .daemon_pid()
            .is_some_and(|new| new != worker)));
        assert_eq!(inode(&path), before);
        node.ok(["daemon", "stop"]);
        assert!(daemon.child().wait().unwrap().success());
        assert_eq!(inode(&path), before);
    }

    // Another socket than the one that clients look for.
    let elsewhere = node.scratch.join("elsewhere.sock");
    let wrong = UnixListener::bind(&elsewhere).unwrap();
    let output = ended(&mut activated(&node, &wrong, 1));
    let said = describe(&output);
    assert!(!output.status.success(), "{said}");
    assert!(
        said.contains("elsewhere.sock") && said.contains("ListenStream="),
        "{said}"
    );
    let output = ended(&mut activated(&node, &socket, 2));
    let said = describe(&output);
    assert!(
        !output.status.success() && said.contains("2 sockets"),
        "{said}"
    );
    drop((socket, wrong));
    assert!(wait_until(|| processes(&node).is_empty()));
}

/// As with `KillMode=process`: the holder is the service's main process, and only it dies.
#[test]
fn privileged_a_service_manager_is_told_of_the_daemon_that_outlived_its_holder() {
    if !is_root() {
        skip!("needs root to serve");
    }
    let node = Node::new("outlived");
    fs_err::create_dir(node.root()).unwrap();
    let path = node.root().join("daemon.sock");
    let socket = UnixListener::bind(&path).unwrap();
    let manager = node.scratch.join("manager.sock");
    let heard = std::os::unix::net::UnixDatagram::bind(&manager).unwrap();
    heard
        .set_read_timeout(Some(std::time::Duration::from_secs(60)))
        .unwrap();
    // Others of the service's processes speak, too; a manager hears its main process alone.
    let hear = |what: &str| loop {
        let mut text = [0; 1000];
        let len = heard.recv(&mut text).unwrap();
        let said = String::from_utf8_lossy(&text[..len]).into_owned();
        if said.contains(what) {
            break said;
        }
    };
    let service = || {
        let mut command = activated(&node, &socket, 1);
        command.env("NOTIFY_SOCKET", &manager);
        command
    };
    let mut first = ChildGuard::spawn(&mut service()).unwrap();
    let holder = i32::try_from(first.id()).unwrap();
    hear("READY=1");
    let worker = node.daemon_pid().unwrap();
    kill(holder, "KILL");
    first.child().wait().unwrap();
    // What the manager does next.
    let output = ended(&mut service());
    assert!(output.status.success(), "{}", describe(&output));
    let second = node.holder_pid();
    assert_ne!(second, holder);
    assert_eq!(node.daemon_pid(), Some(worker), "the daemon served on");
    let main = format!("MAINPID={second}");
    let said = hear("STATUS=taken over");
    assert!(said.contains(&main) && said.contains("READY=1"), "{said}");
    // Without a manager it is an error, as ever.
    let output = ended(&mut activated(&node, &socket, 1));
    assert!(!output.status.success(), "{}", describe(&output));
    node.ok(["daemon", "stop"]);
    assert!(wait_until(|| processes(&node).is_empty()));
}
