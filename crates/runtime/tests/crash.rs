//! Launchers that are killed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod support;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use layerpack_fixtures::ChildGuard;
use layerpack_runtime::SandboxState;
use support::{Fixture, fixture, wait_for};

fn launcher(fixture: &Fixture, what: &str, target: &str, script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_layerpack-test-init"));
    command
        .arg(what)
        .arg(fixture.dir.path().join("sandboxes"))
        .arg(&fixture.parent)
        .arg(fixture.lower())
        .args([target, script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Kills the launcher once it has printed a line.
fn kill_after_a_line(mut child: Child) -> String {
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    line
}

/// Whether any process has `marker` in its command line.
fn running(marker: &str) -> bool {
    fs_err::read_dir("/proc").unwrap().flatten().any(|entry| {
        let path = entry.path().join("cmdline");
        fs_err::read(path).is_ok_and(|text| {
            String::from_utf8_lossy(&text)
                .replace('\0', " ")
                .contains(marker)
        })
    })
}

#[track_caller]
fn wait_gone(marker: &str) {
    wait_for(&format!("{marker} still runs"), || !running(marker));
}

#[test]
fn privileged_a_killed_launcher_takes_its_sandbox_along() {
    let fixture = fixture!("killrun");
    let marker = format!("987{}", std::process::id());
    let script = format!("setsid sleep {marker} & sleep {marker} & echo up; sleep {marker}");
    let line = kill_after_a_line(
        launcher(&fixture, "run", "victim", &script)
            .spawn()
            .unwrap(),
    );
    assert_eq!(line, "up\n");
    wait_gone(&format!("sleep {marker}"));
    let report = fixture.sandboxes.sweep().unwrap();
    assert_eq!(
        (report.removed.as_slice(), report.failed.len()),
        (&["victim".to_owned()][..], 0)
    );
    fixture.assert_nothing_left();
}

#[test]
fn privileged_a_killed_exec_takes_its_command_along_but_not_the_sandbox() {
    let fixture = fixture!("killexec");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    let marker = format!("986{}", std::process::id());
    let script = format!("echo up; exec sleep {marker}");
    kill_after_a_line(launcher(&fixture, "exec", id, &script).spawn().unwrap());
    wait_gone(&format!("sleep {marker}"));
    assert_eq!(fixture.exec(id, "echo alive").ok(), "alive");
}

#[test]
fn privileged_a_killed_freezer_does_not_freeze_for_ever() {
    let fixture = fixture!("killfreeze");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    let line = kill_after_a_line(launcher(&fixture, "freeze", id, "").spawn().unwrap());
    assert_eq!(line, "frozen\n");
    assert_eq!(
        fixture.sandboxes.get(id).unwrap().state,
        SandboxState::Frozen
    );
    assert_eq!(fixture.exec(id, "echo thawed").ok(), "thawed");
    // Frozen and abandoned again, it can be removed.
    kill_after_a_line(launcher(&fixture, "freeze", id, "").spawn().unwrap());
    fixture.sandboxes.remove(id, true).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_signals_reach_the_command() {
    let fixture = fixture!("signals");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    for (what, target) in [("run", "signalled"), ("exec", spec.id.as_str())] {
        let script = "trap 'echo got TERM; exit 42' TERM; echo up; while true; do sleep 0.05; done";
        let mut child = ChildGuard::spawn(&mut launcher(&fixture, what, target, script)).unwrap();
        let mut out = BufReader::new(child.child().stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        let pid = rustix::process::Pid::from_child(child.child());
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        line.clear();
        out.read_line(&mut line).unwrap();
        assert_eq!(line, "got TERM\n");
        assert_eq!(child.child().wait().unwrap().code(), Some(42));
    }
}

#[test]
fn privileged_launchers_killed_at_any_moment_leave_what_sweeping_removes() {
    let fixture = fixture!("killany");
    let marker = format!("985{}", std::process::id());
    for n in 0..40u64 {
        let what = if n % 2 == 0 { "run" } else { "create" };
        let target = format!("victim-{n}");
        let script = format!("sleep {marker}");
        let mut child = launcher(&fixture, what, &target, &script).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(n * 700));
        child.kill().unwrap();
        child.wait().unwrap();
        if what == "run" {
            wait_gone(&format!("sleep {marker}"));
        }
    }
    let report = fixture.sandboxes.sweep().unwrap();
    assert!(report.failed.is_empty(), "{report:?}");
    // What is left now are lasting sandboxes that were finished.
    for sandbox in fixture.sandboxes.list().unwrap() {
        assert_eq!(sandbox.state, SandboxState::Running);
        fixture
            .sandboxes
            .remove(sandbox.spec.id.as_str(), false)
            .unwrap_err();
        fixture
            .sandboxes
            .remove(sandbox.spec.id.as_str(), true)
            .unwrap();
    }
    fixture.assert_nothing_left();
}
