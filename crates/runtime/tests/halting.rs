//! Halting sandboxes, by either way, and what happens when who halts them dies or races.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod support;

use std::time::Duration;

use layerpack_runtime::{HaltedBy, RuntimeError, SandboxState, Sandboxes, SandboxesOptions};
use support::{Fixture, fixture, wait_for};

/// The same sandboxes for one who has no freezer.
fn without_freezer(fixture: &Fixture) -> Sandboxes {
    Sandboxes::open(SandboxesOptions {
        stop_by_signals: true,
        ..Fixture::options(fixture.dir.path(), &fixture.parent)
    })
    .unwrap()
}

/// How far the counting processes of a sandbox have come.
fn count(upper: &std::path::Path, name: &str) -> u64 {
    let text = fs_err::read_to_string(upper.join("tmp").join(name)).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// Starts two processes that count, one of which makes new ones all the time.
fn start_counting(fixture: &Fixture, id: &str) {
    let script = "(i=0; while :; do i=$((i+1)); echo $i >/tmp/.a; mv /tmp/.a /tmp/a; done) >/dev/null 2>&1 & \
                  (i=0; while :; do i=$((i+1)); sh -c \"echo $i >/tmp/.b; mv /tmp/.b /tmp/b\"; done) >/dev/null 2>&1 &";
    fixture.exec(id, script);
}

#[track_caller]
fn goes_on(upper: &std::path::Path) {
    let before = (count(upper, "a"), count(upper, "b"));
    wait_for("it does not go on", || {
        count(upper, "a") > before.0 && count(upper, "b") > before.1
    });
}

#[track_caller]
fn halts(upper: &std::path::Path) {
    let before = (count(upper, "a"), count(upper, "b"));
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!((count(upper, "a"), count(upper, "b")), before);
}

#[test]
fn privileged_without_a_freezer_signals_halt_all_processes() {
    let fixture = fixture!("signals");
    let spec = fixture.spec();
    let made = fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    start_counting(&fixture, id);
    // One that its user stopped stays so.
    fixture.exec(
        id,
        "sleep 1000 >/dev/null 2>&1 & echo $! >/tmp/stopped; kill -STOP $!",
    );
    goes_on(&made.upper);
    let others = without_freezer(&fixture);
    for _ in 0..5 {
        let guard = others.freeze(id, Duration::from_secs(20)).unwrap();
        assert_eq!(guard.by(), HaltedBy::Signals);
        halts(&made.upper);
        let busy = others.freeze(id, Duration::from_secs(1)).unwrap_err();
        assert!(matches!(busy, RuntimeError::Busy { .. }), "{busy}");
        guard.thaw().unwrap();
        goes_on(&made.upper);
    }
    let script = "read p </tmp/stopped; read a b s rest </proc/$p/stat; echo $s";
    let output = fixture.exec(id, script);
    let state = output.ok();
    assert_eq!(state, "T");
    // By the freezer it says so.
    let guard = fixture
        .sandboxes
        .freeze(id, Duration::from_secs(20))
        .unwrap();
    assert_eq!(guard.by(), HaltedBy::Freezer);
    halts(&made.upper);
    drop(guard);
    goes_on(&made.upper);
    fixture.sandboxes.remove(id, true).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_what_dead_holders_leave_goes_on() {
    let fixture = fixture!("abandoned");
    let spec = fixture.spec();
    let made = fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    start_counting(&fixture, id);
    goes_on(&made.upper);
    assert!(!fixture.sandboxes.thaw_abandoned(id).unwrap());
    let others = without_freezer(&fixture);
    for sandboxes in [&fixture.sandboxes, &others] {
        // While somebody holds it nobody else lets it go.
        let guard = sandboxes.freeze(id, Duration::from_secs(20)).unwrap();
        assert!(!sandboxes.thaw_abandoned(id).unwrap());
        halts(&made.upper);
        guard.abandon();
        halts(&made.upper);
        assert!(sandboxes.thaw_abandoned(id).unwrap());
        goes_on(&made.upper);
    }
    fixture.sandboxes.remove(id, true).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_a_sandbox_that_is_packed_stays_and_has_one_packer() {
    let fixture = fixture!("hold");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    let hold = fixture.sandboxes.hold(id, Duration::ZERO).unwrap();
    let other = Fixture::open(fixture.dir.path(), &fixture.parent);
    let error = other.hold(id, Duration::from_millis(20)).unwrap_err();
    assert!(error.to_string().contains("another snapshot"), "{error}");
    let error = other.remove(id, false).unwrap_err();
    assert!(matches!(error, RuntimeError::Running(_)), "{error}");
    assert_eq!(fixture.exec(id, "echo lives").ok(), "lives");

    // Whoever wants to pack it next waits for its turn.
    let waiting = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| other.hold(id, Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(50));
        drop(hold);
        waiting.join().unwrap().unwrap()
    });
    // Whoever removes it ends its processes at once, so that they cannot ask for more, and deletes
    // nothing that is still packed.
    let upper = fixture.sandboxes.get(id).unwrap().upper;
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| other.remove(id, true));
        wait_for("its processes live on", || {
            fixture.sandboxes.get(id).unwrap().state == SandboxState::Dead
        });
        assert!(upper.exists() && !removing.is_finished());
        drop(waiting);
        removing.join().unwrap().unwrap();
    });
    assert!(!upper.exists());
    fixture.assert_nothing_left();
}

#[test]
fn privileged_the_channel_is_there_for_all_and_nobody_can_change_it() {
    let fixture = fixture!("channel");
    let mut spec = fixture.spec();
    spec.channel = true;
    let made = fixture.sandboxes.create(&spec).unwrap();
    fs_err::write(made.channel.join("from-outside"), "hello\n").unwrap();
    let id = spec.id.as_str();
    assert_eq!(
        fixture.exec(id, "cat /dev/layerpack/from-outside").ok(),
        "hello"
    );
    assert_eq!(
        fixture.exec(id, "echo $PATH").ok().rsplit(':').next(),
        Some("/dev/layerpack")
    );
    for attempt in [
        "echo x >/dev/layerpack/new",
        "echo x >/dev/layerpack/pack_diff",
        "echo x >>/dev/layerpack/from-outside",
        "rm -f /dev/layerpack/from-outside",
        "rm -f /dev/layerpack/pack_diff",
        "mv /dev/layerpack /dev/elsewhere",
        "chmod 777 /dev/layerpack",
        "ln -s /bin/sh /dev/layerpack/pack_diff2",
        "mount -o remount,rw /dev/layerpack",
        "umount /dev/layerpack",
    ] {
        assert_ne!(fixture.exec(id, attempt).exit.code, 0, "{attempt}");
    }
    // Any user may execute it.
    let mut command = support::command(&["test", "-x", "/dev/layerpack/pack_diff"]);
    command.user = Some("bob".to_owned());
    assert_eq!(fixture.try_exec(id, &command).unwrap().exit.code, 0);
    fixture.sandboxes.remove(id, true).unwrap();
    // Without one there is nothing of it.
    let plain = fixture.spec();
    fixture.sandboxes.create(&plain).unwrap();
    assert_ne!(
        fixture
            .exec(plain.id.as_str(), "ls /dev/layerpack")
            .exit
            .code,
        0
    );
    fixture.sandboxes.remove(plain.id.as_str(), true).unwrap();
    fixture.assert_nothing_left();
}
