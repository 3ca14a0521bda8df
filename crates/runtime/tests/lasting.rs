//! Lasting sandboxes: exec, freeze, names, removal, sweeping.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod support;

use std::time::{Duration, Instant};

use layerpack_runtime::{ExecSpec, RuntimeError, SandboxId, SandboxState, Streams, Terminal};
use support::{Fixture, command, fixture, sh, wait_for};

#[test]
fn privileged_a_sandbox_lasts_until_it_is_removed() {
    let fixture = fixture!("lasting");
    let mut spec = fixture.spec();
    spec.name = Some("work".parse().unwrap());
    spec.lease = Some("lease-7".to_owned());
    let made = fixture.sandboxes.create(&spec).unwrap();
    assert_eq!((made.state, made.one_shot), (SandboxState::Running, false));
    // Another process sees the same.
    let other = Fixture::open(fixture.dir.path(), &fixture.parent);
    for name in ["work", spec.id.as_str()] {
        let found = other.get(name).unwrap();
        assert_eq!((found.pid, found.state), (made.pid, SandboxState::Running));
        assert_eq!(found.spec.lease.as_deref(), Some("lease-7"));
    }
    assert_eq!(other.list().unwrap().len(), 1);
    assert_eq!(
        fixture.exec("work", "echo kept >/tmp/x; hostname").ok(),
        "box"
    );
    assert_eq!(fixture.exec("work", "cat /tmp/x").ok(), "kept");
    let error = fixture.sandboxes.remove("work", false).unwrap_err();
    assert!(matches!(error, RuntimeError::Running(_)), "{error}");
    let removed = fixture.sandboxes.remove("work", true).unwrap();
    assert_eq!(removed.spec.lease.as_deref(), Some("lease-7"));
    assert!(matches!(
        fixture.sandboxes.get("work"),
        Err(RuntimeError::NotFound(_))
    ));
    fixture.assert_nothing_left();
}

#[test]
fn privileged_commands_end_as_in_a_shell() {
    let fixture = fixture!("execend");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    for code in [0, 1, 125, 126, 127, 128, 255] {
        assert_eq!(fixture.exec(id, &format!("exit {code}")).exit.code, code);
    }
    assert_eq!(fixture.exec(id, "kill -9 $$").exit.code, 137);
    let code = |argv: &[&str]| {
        fixture
            .try_exec(id, &command(argv))
            .unwrap_err()
            .exit_code()
    };
    assert_eq!(code(&["no-such"]), 127);
    assert_eq!(code(&["/etc/notexec"]), 126);
    assert_eq!(code(&["badformat"]), 126);
    let bob = ExecSpec {
        user: Some("bob".to_owned()),
        cwd: Some("/home/bob".into()),
        env: vec![("X".into(), "y z".into())],
        ..sh("id -u; id -G; pwd; echo $X; grep -E '^(CapEff|CapBnd|Seccomp):' /proc/self/status")
    };
    let output = fixture.try_exec(id, &bob).unwrap();
    assert_eq!(
        output.ok(),
        "1000\n1000 10\n/home/bob\ny z\nCapEff:\t0000000000000000\nCapBnd:\t00000000a80425fb\nSeccomp:\t2"
    );
    // It is in every namespace of the sandbox.
    let namespaces = "for n in user mnt pid net ipc uts cgroup; do readlink /proc/self/ns/$n; done";
    let inside = fixture.exec(id, namespaces);
    let pid = fixture
        .sandboxes
        .get(id)
        .unwrap()
        .pid
        .unwrap()
        .as_raw_nonzero();
    for (name, link) in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"]
        .iter()
        .zip(inside.ok().lines())
    {
        let of_init = fs_err::read_link(format!("/proc/{pid}/ns/{name}")).unwrap();
        assert_eq!(of_init.to_str(), Some(link));
        let own = fs_err::read_link(format!("/proc/self/ns/{name}")).unwrap();
        assert_ne!(own.to_str(), Some(link), "{name}");
    }
}

#[test]
fn privileged_a_background_child_does_not_hold_exec_and_lives_on() {
    let fixture = fixture!("bgexec");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    let started = Instant::now();
    assert_eq!(
        fixture.exec(id, "sleep 4321 & echo started").ok(),
        "started"
    );
    assert!(started.elapsed() < Duration::from_secs(1000));
    assert_eq!(fixture.exec(id, "ps | grep -c '[s]leep 4321'").ok(), "1");
    // A timeout kills the command.
    let command = ExecSpec {
        timeout: Some(Duration::from_secs(3)),
        ..sh("echo a; sleep 5678")
    };
    let output = fixture.try_exec(id, &command).unwrap();
    assert_eq!(
        (
            output.exit.code,
            output.exit.timed_out,
            output.stdout.as_str()
        ),
        (124, true, "a\n")
    );
    wait_for("the command to be gone", || {
        fixture.exec(id, "ps | grep -c '[s]leep 5678'").stdout == "0\n"
    });
}

#[test]
fn privileged_orphans_are_reaped() {
    let fixture = fixture!("zombies");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    fixture.exec(
        id,
        "i=0; while [ $i -lt 30 ]; do (sleep 0.05 &); i=$((i+1)); done",
    );
    wait_for("no process but PID 1 and this command's", || {
        fixture
            .exec(id, "ls -d /proc/[0-9]* | wc -l")
            .stdout
            .trim()
            .parse::<u32>()
            .unwrap()
            <= 4
    });
    let states = fixture.exec(id, "cat /proc/[0-9]*/stat | grep -c ') Z '");
    assert_eq!(states.stdout, "0\n");
    // The same under a one-shot sandbox's PID 1.
    let output = fixture.run("i=0; while [ $i -lt 30 ]; do (sleep 0.01 &); i=$((i+1)); done; sleep 0.5; cat /proc/[0-9]*/stat | grep -c ') Z '");
    assert_eq!(output.stdout, "0\n");
}

#[test]
fn privileged_terminals_in_a_lasting_sandbox() {
    let fixture = fixture!("exectty");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    let terminal = Some(Terminal {
        rows: 10,
        columns: 20,
    });
    let tty = |user: &str| ExecSpec {
        terminal,
        user: Some(user.to_owned()),
        ..sh("tty; stty size; echo hi >/dev/tty; stat -c %u:%g:%a $(tty)")
    };
    assert_eq!(
        fixture.try_exec(id, &tty("root")).unwrap().stdout,
        "/dev/pts/0\r\n10 20\r\nhi\r\n0:5:620\r\n"
    );
    assert_eq!(
        fixture.try_exec(id, &tty("bob")).unwrap().stdout,
        "/dev/pts/0\r\n10 20\r\nhi\r\n1000:5:620\r\n"
    );
    // The sandbox's root puts something else in the way: refused, not followed.
    fixture.exec(
        id,
        "rm -f /dev/ptmx; ln -s /dev/null /dev/ptmx; chmod 0 /dev/pts/ptmx",
    );
    assert_eq!(fixture.try_exec(id, &tty("root")).unwrap().exit.code, 0);
}

#[test]
fn privileged_names_and_ids_are_unique() {
    let fixture = fixture!("names");
    let mut one = fixture.spec();
    one.name = Some("same".parse().unwrap());
    fixture.sandboxes.create(&one).unwrap();
    let mut two = fixture.spec();
    two.name = one.name.clone();
    let error = fixture.sandboxes.create(&two).unwrap_err();
    assert!(
        matches!(&error, RuntimeError::NameTaken { owner, .. } if owner == one.id.as_str()),
        "{error}"
    );
    let mut three = fixture.spec();
    three.id = one.id.clone();
    let error = fixture.sandboxes.create(&three).unwrap_err();
    assert!(matches!(error, RuntimeError::IdTaken(_)), "{error}");
    // The first is unharmed, and nothing of the others is left.
    assert_eq!(fixture.exec("same", "echo here").ok(), "here");
    assert_eq!(fixture.left(), [one.id.as_str()]);
    fixture.sandboxes.remove("same", true).unwrap();
    fixture.sandboxes.create(&two).unwrap();
    assert_eq!(fixture.sandboxes.get("same").unwrap().spec.id, two.id);
    for bad in ["", "-x", "A", "a/b", "..", ".x", &"x".repeat(64)] {
        assert!(bad.parse::<SandboxId>().is_err(), "{bad}");
        assert!(fixture.sandboxes.get(bad).is_err(), "{bad}");
    }
    assert!(fixture.sandboxes.get("names").is_err());
}

#[test]
fn privileged_freezing_halts_everything_until_the_guard_goes() {
    let fixture = fixture!("freeze");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    fixture.exec(
        id,
        "(while true; do echo x >>/tmp/count; done) >/dev/null 2>&1 &",
    );
    let file = fixture.sandboxes.get(id).unwrap().upper.join("tmp/count");
    let size = || fs_err::metadata(&file).map_or(0, |m| m.len());
    wait_for("the counter to run", || size() > 0);
    let guard = fixture
        .sandboxes
        .freeze(id, Duration::from_secs(10))
        .unwrap();
    assert_eq!(
        fixture.sandboxes.get(id).unwrap().state,
        SandboxState::Frozen
    );
    let before = size();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(size(), before);
    let error = fixture
        .sandboxes
        .freeze(id, Duration::from_secs(1))
        .unwrap_err();
    assert!(matches!(error, RuntimeError::Busy { .. }), "{error}");
    let error = fixture.sandboxes.remove(id, true).unwrap_err();
    assert!(matches!(error, RuntimeError::Busy { .. }), "{error}");
    guard.thaw().unwrap();
    assert_eq!(
        fixture.sandboxes.get(id).unwrap().state,
        SandboxState::Running
    );
    wait_for("the counter to go on", || size() > before);
    // Dropping thaws too, and a frozen sandbox whose freezer is gone goes on.
    drop(
        fixture
            .sandboxes
            .freeze(id, Duration::from_secs(10))
            .unwrap(),
    );
    let before = size();
    wait_for("the counter to go on", || size() > before);
    fixture.sandboxes.remove(id, true).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_a_dead_sandbox_keeps_its_files_until_removed() {
    let fixture = fixture!("dead");
    let spec = fixture.spec();
    let made = fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    fixture.exec(id, "echo precious >/tmp/x");
    let pid = made.pid.unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    wait_for("its end", || {
        fixture.sandboxes.get(id).unwrap().state == SandboxState::Dead
    });
    let error = fixture.try_exec(id, &sh("true")).unwrap_err();
    assert!(matches!(error, RuntimeError::Dead(_)), "{error}");
    let report = fixture.sandboxes.sweep().unwrap();
    assert_eq!(report.dead, std::slice::from_ref(&spec.id));
    assert!(
        report.removed.is_empty() && report.failed.is_empty(),
        "{report:?}"
    );
    assert!(fixture.groups().is_empty());
    assert_eq!(
        fs_err::read(made.upper.join("tmp/x")).unwrap(),
        b"precious\n"
    );
    let guard = fixture
        .sandboxes
        .freeze(id, Duration::from_secs(1))
        .unwrap();
    drop(guard);
    fixture.sandboxes.remove(id, false).unwrap();
    fixture.assert_nothing_left();
    // Reap it: this process made it.
    let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
}

#[test]
fn privileged_removal_copes_with_what_a_sandbox_can_leave() {
    let fixture = fixture!("hostile");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    let script = "
        mkdir /tmp/d; cd /tmp/d
        i=0; while [ $i -lt 400 ]; do mkdir directory-with-a-long-name && cd directory-with-a-long-name; i=$((i+1)); done
        cd /tmp; ln -s / root; ln -s ../../.. up; mkdir closed; touch closed/x; chmod 0 closed
        touch \"$(printf 'new\\nline')\" \"$(printf '\\377')\" ' ' -- -rf
        rm -rf /etc; mkdir /etc; rm /bin/ls; mknod /tmp/fifo p
        ( while true; do sleep 100; done ) >/dev/null 2>&1 &
        setsid sleep 1000 >/dev/null 2>&1 &
        echo done";
    assert_eq!(fixture.exec(id, script).ok(), "done");
    fixture.sandboxes.remove(id, true).unwrap();
    fixture.assert_nothing_left();
    assert!(fixture.lower().join("etc/passwd").exists());
}

#[test]
fn privileged_sweeping_removes_what_dead_launchers_leave() {
    let fixture = fixture!("sweep");
    let root = fixture.dir.path().join("sandboxes");
    // Half-made, no record; an interrupted deletion; a name without a sandbox.
    fs_err::create_dir_all(root.join("halfmade/upper/x")).unwrap();
    fs_err::create_dir_all(root.join(".deleting-old/upper")).unwrap();
    std::os::unix::fs::symlink("gone", root.join("names/stale")).unwrap();
    let mut spec = fixture.spec();
    spec.name = Some("stale".parse().unwrap());
    fixture.sandboxes.create(&spec).unwrap();
    let report = fixture.sandboxes.sweep().unwrap();
    assert_eq!(report.removed.len(), 2, "{report:?}");
    assert!(
        report.failed.is_empty() && report.dead.is_empty(),
        "{report:?}"
    );
    assert_eq!(fixture.left(), [spec.id.as_str()]);
    assert_eq!(fixture.exec("stale", "echo on").ok(), "on");
    fixture.sandboxes.remove("stale", true).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_a_damaged_record_harms_no_other() {
    let fixture = fixture!("damaged");
    let (one, two) = (fixture.spec(), fixture.spec());
    fixture.sandboxes.create(&one).unwrap();
    let dir = fixture.dir.path().join("sandboxes").join(two.id.as_str());
    fs_err::create_dir(&dir).unwrap();
    for bytes in [&b""[..], b"{", b"{\"format\":99}", b"\xff\xfe"] {
        fs_err::write(dir.join("record.json"), bytes).unwrap();
        assert_eq!(fixture.sandboxes.list().unwrap().len(), 1);
        let error = fixture.sandboxes.get(two.id.as_str()).unwrap_err();
        assert!(error.to_string().contains("record.json"), "{error}");
        assert_eq!(fixture.sandboxes.sweep().unwrap().failed.len(), 1);
    }
    assert_eq!(fixture.exec(one.id.as_str(), "echo fine").ok(), "fine");
    fs_err::remove_dir_all(dir).unwrap();
}

#[test]
fn privileged_many_at_once() {
    let fixture = fixture!("many");
    std::thread::scope(|scope| {
        for n in 0..8 {
            let fixture = &fixture;
            scope.spawn(move || {
                for _ in 0..3 {
                    let output = fixture.run(&format!("echo {n}; exit {n}"));
                    assert_eq!((output.exit.code, output.stdout), (n, format!("{n}\n")));
                }
                let spec = fixture.spec();
                fixture.sandboxes.create(&spec).unwrap();
                let streams = Streams::default();
                let exit = fixture
                    .sandboxes
                    .exec(spec.id.as_str(), &sh("exit 4"), streams)
                    .unwrap();
                assert_eq!(exit.code, 4);
                fixture.sandboxes.remove(spec.id.as_str(), true).unwrap();
            });
        }
    });
    fixture.assert_nothing_left();
}
