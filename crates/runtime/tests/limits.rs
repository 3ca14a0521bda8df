//! Limits by control groups.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod support;

use std::path::Path;

use layerpack_fixtures::skip;
use layerpack_runtime::Limits;
use support::{fixture, sh};

/// The first of these control files, as the sandbox sees them.
fn read_first(files: [&str; 2]) -> String {
    format!(
        "cat /sys/fs/cgroup/{} 2>/dev/null || cat /sys/fs/cgroup/{}",
        files[0], files[1]
    )
}

#[test]
fn privileged_memory_is_limited_and_the_kill_reported() {
    let fixture = fixture!("memory");
    let mut spec = fixture.spec();
    spec.limits = Limits {
        memory_bytes: Some(32 << 20),
        ..Limits::default()
    };
    let output = fixture.run_spec(
        &spec,
        &sh("dd if=/dev/zero of=/dev/null bs=100000000 count=1"),
    );
    assert_eq!(
        (output.exit.code, output.exit.oom_killed),
        (137, true),
        "{output:?}"
    );
    let mut spec = fixture.spec();
    spec.limits = Limits {
        memory_bytes: Some(64 << 20),
        ..Limits::default()
    };
    let script = read_first(["memory.max", "memory/memory.limit_in_bytes"]);
    let output = fixture.run_spec(&spec, &sh(&script));
    assert_eq!(output.ok(), (64 << 20).to_string());
    assert!(!output.exit.oom_killed);
    // /dev/shm counts too.
    let mut spec = fixture.spec();
    spec.limits = Limits {
        memory_bytes: Some(16 << 20),
        ..Limits::default()
    };
    let output = fixture.run_spec(
        &spec,
        &sh("dd if=/dev/zero of=/dev/shm/x bs=1000000 count=50"),
    );
    assert_ne!(output.exit.code, 0);
    assert!(output.exit.oom_killed, "{output:?}");
    fixture.assert_nothing_left();
}

#[test]
fn privileged_processes_are_limited() {
    let fixture = fixture!("pids");
    let mut spec = fixture.spec();
    spec.limits = Limits {
        pids: Some(10),
        ..Limits::default()
    };
    let script = "i=0; while [ $i -lt 50 ]; do sleep 100 & i=$((i+1)); done; wait";
    let output = fixture.run_spec(&spec, &sh(script));
    assert_ne!(output.exit.code, 0, "{output:?}");
    assert!(output.stderr.contains("fork"), "{output:?}");
    fixture.assert_nothing_left();
}

#[test]
fn privileged_processors_are_limited() {
    let fixture = fixture!("cpus");
    let mut spec = fixture.spec();
    spec.limits = Limits {
        cpus: Some(0.5),
        ..Limits::default()
    };
    let script = read_first(["cpu.max", "cpu/cpu.cfs_quota_us"]);
    let output = fixture.run_spec(&spec, &sh(&script));
    assert!(
        ["50000", "50000 100000"].contains(&output.ok()),
        "{output:?}"
    );
    fixture.assert_nothing_left();
}

#[test]
fn privileged_commands_in_a_lasting_sandbox_are_limited_with_it() {
    let fixture = fixture!("execlimit");
    let mut spec = fixture.spec();
    spec.limits = Limits {
        memory_bytes: Some(32 << 20),
        pids: Some(20),
        cpus: Some(1.0),
    };
    fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    let output = fixture.exec(
        id,
        "dd if=/dev/zero of=/dev/null bs=100000000 count=1; echo $?",
    );
    assert_eq!(output.ok(), "137");
    assert!(output.exit.oom_killed, "{output:?}");
    assert_eq!(fixture.exec(id, "echo alive").ok(), "alive");
    assert!(!fixture.groups().is_empty());
    fixture.sandboxes.remove(id, true).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_devices_are_limited_where_a_controller_is() {
    let fixture = fixture!("devgroup");
    let list = Path::new("/sys/fs/cgroup/devices")
        .join(&fixture.parent)
        .join("devices.list");
    fixture.run("true").ok();
    if !list.exists() {
        skip!("no v1 devices hierarchy");
    }
    let text = fs_err::read_to_string(list).unwrap();
    assert!(
        !text.contains("a *:* rwm") && text.contains("c 1:3 rwm"),
        "{text}"
    );
}
