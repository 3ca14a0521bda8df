//! Output that nobody takes, and sandboxes that nobody answers for.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod support;

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use layerpack_fixtures::ChildGuard;
use layerpack_runtime::{ExecSpec, Limits, RuntimeError, SandboxState, Streams, Terminal};
use layerpack_sys::mount::MountFlags;
use support::{Fixture, fixture, sh, wait_for};

fn full() -> OwnedFd {
    let file = fs_err::OpenOptions::new().write(true).open("/dev/full");
    OwnedFd::from(file.unwrap().into_file())
}

fn to_full(stdout: bool) -> Streams {
    Streams {
        stdin: None,
        stdout: stdout.then(full),
        stderr: (!stdout).then(full),
    }
}

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

/// Kills a launcher once its command has printed a line.
fn kill_when_up(fixture: &Fixture, what: &str, target: &str) {
    let script = "echo kept >/tmp/x; echo up; sleep 1000";
    let mut child = launcher(fixture, what, target, script).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(line, "up\n");
}

fn record(fixture: &Fixture, id: &str) -> PathBuf {
    fixture
        .dir
        .path()
        .join("sandboxes")
        .join(id)
        .join("record.json")
}

/// Waits until the process has ended, reaping it if it is ours.
#[track_caller]
fn wait_dead(pid: rustix::process::Pid) {
    let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
    wait_for(&format!("{stat} is still there"), || {
        !fs_err::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "))
    });
}

#[test]
fn privileged_output_that_cannot_be_written_is_an_error() {
    let fixture = fixture!("full");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    for (stdout, name) in [(true, "standard output"), (false, "standard error")] {
        let command = sh(if stdout { "echo lost" } else { "echo lost >&2" });
        let errors = [
            fixture
                .sandboxes
                .run(&fixture.spec(), &command, to_full(stdout), false),
            fixture
                .sandboxes
                .exec(spec.id.as_str(), &command, to_full(stdout)),
        ]
        .map(Result::unwrap_err);
        for error in errors {
            assert_eq!(error.exit_code(), 125);
            assert!(matches!(error, RuntimeError::Output { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(name) && text.contains("No space"), "{text}");
        }
    }
    // What is thrown away on purpose, or not written at all, is no error.
    let silent = fixture
        .sandboxes
        .run(&fixture.spec(), &sh("exit 3"), to_full(true), false);
    assert_eq!(silent.unwrap().code, 3);
    // The files of a kept sandbox are not lost with the output.
    let kept = fixture.spec();
    let command = sh("echo kept >/tmp/x; echo lost");
    let error = fixture
        .sandboxes
        .run(&kept, &command, to_full(true), true)
        .unwrap_err();
    assert!(matches!(error, RuntimeError::Output { .. }), "{error}");
    let found = fixture.sandboxes.get(kept.id.as_str()).unwrap();
    assert_eq!(
        fs_err::read_to_string(found.upper.join("tmp/x")).unwrap(),
        "kept\n"
    );
    fixture.sandboxes.remove(kept.id.as_str(), false).unwrap();
    fixture.sandboxes.remove(spec.id.as_str(), true).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_a_command_that_goes_on_writing_ends() {
    let fixture = fixture!("fullmore");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    for terminal in [
        None,
        Some(Terminal {
            rows: 24,
            columns: 80,
        }),
    ] {
        let command = ExecSpec {
            terminal,
            ..sh("while true; do echo lost; done")
        };
        let run = fixture
            .sandboxes
            .run(&fixture.spec(), &command, to_full(true), false);
        let exec = fixture
            .sandboxes
            .exec(spec.id.as_str(), &command, to_full(true));
        for error in [run, exec].map(Result::unwrap_err) {
            assert!(matches!(error, RuntimeError::Output { .. }), "{error}");
        }
    }
    fixture.sandboxes.remove(spec.id.as_str(), true).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_a_closed_pipe_ends_the_writer_and_is_no_error() {
    let fixture = fixture!("epipe");
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    drop(read);
    let streams = Streams {
        stdin: None,
        stdout: Some(write),
        stderr: None,
    };
    let command = sh("while true; do echo lost; done");
    let exit = fixture
        .sandboxes
        .run(&fixture.spec(), &command, streams, false)
        .unwrap();
    assert_eq!(exit.code, 141);
    fixture.assert_nothing_left();
}

#[test]
fn privileged_a_launcher_reports_lost_output() {
    let fixture = fixture!("fullcli");
    let mut child = launcher(&fixture, "run", "lost", "echo lost")
        .stdout(Stdio::from(full()))
        .spawn()
        .unwrap();
    let mut text = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(125), "{text}");
    assert!(text.contains("No space left on device"), "{text}");
    fixture.assert_nothing_left();
}

#[test]
fn privileged_the_name_of_a_killed_run_is_free_at_once() {
    let fixture = fixture!("reclaim");
    kill_when_up(&fixture, "run", "first=kk");
    assert_eq!(fixture.left(), ["first"]);
    // The next launcher of the same name, at once and without a sweep.
    kill_when_up(&fixture, "run", "second=kk");
    assert_eq!(fixture.left(), ["second"]);
    let mut spec = fixture.spec();
    spec.name = Some("kk".parse().unwrap());
    fixture.sandboxes.create(&spec).unwrap();
    assert_eq!(fixture.left(), [spec.id.as_str()]);
    assert_eq!(fixture.exec("kk", "echo new").ok(), "new");
    fixture.sandboxes.remove("kk", true).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_listing_removes_what_a_killed_run_left() {
    let fixture = fixture!("listed");
    kill_when_up(&fixture, "run", "first=kk");
    assert!(fixture.sandboxes.list().unwrap().is_empty());
    fixture.assert_nothing_left();
    kill_when_up(&fixture, "run", "second=kk");
    fixture.sandboxes.remove("kk", true).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_a_name_in_use_is_not_taken_away() {
    let fixture = fixture!("inuse");
    let script = "echo up; read line";
    let mut child =
        ChildGuard::spawn(launcher(&fixture, "run", "live=kk", script).stdin(Stdio::piped()))
            .unwrap();
    let mut out = BufReader::new(child.child().stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    let mut spec = fixture.spec();
    spec.name = Some("kk".parse().unwrap());
    let error = fixture.sandboxes.create(&spec).unwrap_err();
    assert!(matches!(error, RuntimeError::NameTaken { .. }), "{error}");
    let listed = fixture.sandboxes.list().unwrap();
    assert_eq!((listed.len(), listed[0].one_shot), (1, true));
    drop(child.child().stdin.take());
    child.child().wait().unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_files_to_be_kept_survive_a_killed_launcher() {
    let fixture = fixture!("keptkill");
    kill_when_up(&fixture, "keep", "kept=kk");
    let listed = fixture.sandboxes.list().unwrap();
    assert_eq!(listed.len(), 1);
    let mut spec = fixture.spec();
    spec.name = Some("kk".parse().unwrap());
    let error = fixture.sandboxes.create(&spec).unwrap_err();
    assert!(matches!(error, RuntimeError::NameTaken { .. }), "{error}");
    let report = fixture.sandboxes.sweep().unwrap();
    assert!(
        report.failed.is_empty() && report.removed.is_empty(),
        "{report:?}"
    );
    assert_eq!(report.dead.len(), 1);
    assert!(fixture.groups().is_empty());
    let found = fixture.sandboxes.get("kk").unwrap();
    assert_eq!((found.state, found.one_shot), (SandboxState::Dead, false));
    let text = fs_err::read_to_string(found.upper.join("tmp/x")).unwrap();
    assert_eq!(text, "kept\n");
    fixture.sandboxes.remove("kk", false).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_a_running_sandbox_with_a_damaged_record_can_be_removed() {
    let fixture = fixture!("damagedrun");
    let limited = Limits {
        pids: Some(64),
        ..Limits::default()
    };
    for (limits, bytes) in [
        (Limits::default(), &b"{"[..]),
        (limited, b""),
        (Limits::default(), b"{\"format\":99}"),
    ] {
        let mut spec = fixture.spec();
        spec.name = Some("hurt".parse().unwrap());
        spec.limits = limits;
        let pid = fixture.sandboxes.create(&spec).unwrap().pid.unwrap();
        assert_eq!(
            fixture
                .exec("hurt", "setsid sleep 1000 >/dev/null & echo on")
                .ok(),
            "on"
        );
        let id = spec.id.as_str();
        fs_err::write(record(&fixture, id), bytes).unwrap();
        let remedy = format!("layerpack sandbox rm -f {id}");
        let errors = [
            fixture.sandboxes.get("hurt").unwrap_err(),
            fixture.try_exec(id, &sh("true")).unwrap_err(),
            fixture
                .sandboxes
                .freeze(id, Duration::from_secs(1))
                .unwrap_err(),
            fixture.sandboxes.remove(id, false).unwrap_err(),
        ];
        for error in errors {
            assert!(error.to_string().contains(&remedy), "{error}");
        }
        assert!(fixture.sandboxes.list().unwrap().is_empty());
        assert_eq!(fixture.sandboxes.find("hurt").unwrap(), spec.id);
        let removed = fixture.sandboxes.remove(id, true).unwrap();
        assert_eq!(removed.spec.id, spec.id);
        assert_eq!(removed.spec.lease.as_deref(), Some(id));
        wait_dead(pid);
        fixture.assert_nothing_left();
    }
}

#[test]
fn privileged_a_running_sandbox_without_a_readable_record_can_be_removed() {
    let fixture = fixture!("lostrecord");
    for directory in [false, true] {
        let spec = fixture.spec();
        let pid = fixture.sandboxes.create(&spec).unwrap().pid.unwrap();
        let id = spec.id.as_str();
        fs_err::remove_file(record(&fixture, id)).unwrap();
        if directory {
            fs_err::create_dir(record(&fixture, id)).unwrap();
        }
        assert!(fixture.sandboxes.get(id).is_err());
        assert!(fixture.sandboxes.remove(id, false).is_err());
        fixture.sandboxes.remove(id, true).unwrap();
        wait_dead(pid);
        fixture.assert_nothing_left();
    }
}

#[test]
fn privileged_a_run_with_a_damaged_record_can_be_removed() {
    let fixture = fixture!("damagedone");
    let script = "echo up; sleep 1000";
    let mut child = ChildGuard::spawn(&mut launcher(&fixture, "run", "hurt=kk", script)).unwrap();
    let mut out = BufReader::new(child.child().stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    fs_err::write(record(&fixture, "hurt"), b"{").unwrap();
    fixture.sandboxes.remove("kk", true).unwrap();
    assert_eq!(child.child().wait().unwrap().code(), Some(137));
    fixture.assert_nothing_left();
}

/// A filesystem that the host unmounts, while a sandbox lives that was made when it was mounted.
#[test]
fn privileged_a_sandbox_keeps_no_filesystem_of_the_host() {
    use rustix::fs::inotify;

    let fixture = fixture!("hostmounts");
    let point = fixture.dir.path().join("disk");
    fs_err::create_dir(&point).unwrap();
    let disk = layerpack_sys::mount::tmpfs(1 << 20, 0o755, MountFlags::empty()).unwrap();
    layerpack_sys::mount::attach(disk.as_fd(), &point).unwrap();
    let guard = Unmount(point.clone());
    drop(disk);
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
    inotify::add_watch(&watch, &point, inotify::WatchFlags::DELETE_SELF).unwrap();

    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    // The launcher is back where it was.
    assert!(layerpack_sys::mount::is_mounted(&point).unwrap());
    drop(guard);
    assert!(!layerpack_sys::mount::is_mounted(&point).unwrap());
    // The kernel tells watchers when it ends a filesystem, not when one mount of it goes.
    let mut ready = [rustix::event::PollFd::new(
        &watch,
        rustix::event::PollFlags::IN,
    )];
    let limit = rustix::event::Timespec {
        tv_sec: 30,
        tv_nsec: 0,
    };
    let ended = rustix::event::poll(&mut ready, Some(&limit)).unwrap();
    fixture.sandboxes.remove(spec.id.as_str(), true).unwrap();
    assert_eq!(ended, 1, "the sandbox keeps an unmounted filesystem alive");
    fixture.assert_nothing_left();
}

struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        layerpack_sys::mount::unmount(&self.0, false).unwrap();
    }
}
