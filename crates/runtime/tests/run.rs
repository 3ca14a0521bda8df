//! One-shot sandboxes: what a command sees, its streams and its end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod support;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use layerpack_fixtures::skip;
use layerpack_runtime::{ExecSpec, RuntimeError, SandboxState};
use support::{capture_with, command, fixture, sh};

#[test]
fn privileged_a_command_runs_and_nothing_is_left() {
    let fixture = fixture!("run");
    let output = fixture.run("echo hello; id -u; id -g; hostname; pwd; echo oops >&2");
    assert_eq!(output.ok(), "hello\n0\n0\nbox\n/");
    assert_eq!(output.stderr, "oops\n");
    fixture.assert_nothing_left();
}

#[test]
fn privileged_every_exit_code_passes() {
    let fixture = fixture!("codes");
    for code in [
        0, 1, 2, 77, 124, 125, 126, 127, 128, 130, 137, 200, 254, 255,
    ] {
        assert_eq!(fixture.run(&format!("exit {code}")).exit.code, code);
    }
    for (signal, code) in [(1, 129), (2, 130), (6, 134), (9, 137), (11, 139), (15, 143)] {
        assert_eq!(
            fixture.run(&format!("kill -{signal} $$")).exit.code,
            code,
            "signal {signal}"
        );
    }
    fixture.assert_nothing_left();
}

#[test]
fn privileged_commands_that_cannot_start_say_why() {
    let fixture = fixture!("nostart");
    let cases: [(&[&str], u8, &str); 6] = [
        (&["no-such-program"], 127, "not found"),
        (&["/no/such"], 127, "not found"),
        (&["/etc/notexec"], 126, "permission denied"),
        (&["/etc"], 126, "permission denied"),
        (&["badformat"], 126, "neither a program"),
        (&[""], 125, "give a program"),
    ];
    for (argv, code, text) in cases {
        let error = fixture
            .try_run(&fixture.spec(), &command(argv))
            .unwrap_err();
        assert_eq!(error.exit_code(), code, "{argv:?}: {error}");
        assert!(error.to_string().contains(text), "{argv:?}: {error}");
        fixture.assert_nothing_left();
    }
    let absent = ExecSpec {
        cwd: Some("/absent".into()),
        ..sh("pwd")
    };
    let error = fixture.try_run(&fixture.spec(), &absent).unwrap_err();
    assert!(error.to_string().contains("working directory"), "{error}");
    let unknown = ExecSpec {
        user: Some("nobody-here".to_owned()),
        ..sh("id")
    };
    let error = fixture.try_run(&fixture.spec(), &unknown).unwrap_err();
    assert!(error.to_string().contains("nobody-here"), "{error}");
    fixture.assert_nothing_left();
}

#[test]
fn privileged_bad_specs_and_layers_are_refused_and_leave_nothing() {
    let fixture = fixture!("badspec");
    let mut spec = fixture.spec();
    spec.lowers = vec![fixture.dir.path().join("absent")];
    let error = fixture.try_run(&spec, &sh("true")).unwrap_err();
    assert!(error.to_string().contains("absent"), "{error}");
    spec.lowers = vec![fixture.lower().join("etc/passwd")];
    assert!(fixture.try_run(&spec, &sh("true")).is_err());
    spec.lowers = Vec::new();
    assert!(matches!(
        fixture.try_run(&spec, &sh("true")),
        Err(RuntimeError::InvalidSpec { .. })
    ));
    let mut spec = fixture.spec();
    spec.id_map.base = 0;
    assert!(matches!(
        fixture.try_run(&spec, &sh("true")),
        Err(RuntimeError::InvalidSpec { .. })
    ));
    // A file or a link where a mount point must be.
    let odd = fixture.dir.path().join("odd");
    support::small_system(&odd);
    fs_err::remove_dir(odd.join("proc")).unwrap();
    std::os::unix::fs::symlink("/etc", odd.join("proc")).unwrap();
    let mut spec = fixture.spec();
    spec.lowers = vec![odd];
    let error = fixture.try_run(&spec, &sh("true")).unwrap_err();
    assert!(error.to_string().contains("/proc"), "{error}");
    fixture.assert_nothing_left();
}

#[test]
fn privileged_environment_is_not_the_hosts() {
    let fixture = fixture!("env");
    // PATH and so on of the test itself count as the host's.
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    let mut spec = fixture.spec();
    spec.env = vec![
        ("A".to_owned(), "spec".to_owned()),
        ("B".to_owned(), "spec".to_owned()),
    ];
    let own = ExecSpec {
        env: vec![("B".into(), "own".into())],
        ..command(&["env"])
    };
    let output = fixture.run_spec(&spec, &own);
    let seen: BTreeMap<&str, &str> = output
        .ok()
        .lines()
        .map(|line| line.split_once('=').unwrap())
        .collect();
    let expected = BTreeMap::from([
        (
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        ),
        ("HOME", "/root"),
        ("HOSTNAME", "box"),
        ("A", "spec"),
        ("B", "own"),
    ]);
    assert_eq!(seen, expected);
}

#[test]
fn privileged_users_groups_and_directories() {
    let fixture = fixture!("user");
    let as_user = |user: &str| {
        let spec = ExecSpec {
            user: Some(user.to_owned()),
            cwd: Some("/tmp".into()),
            ..sh("id -u; id -g; id -G; echo $HOME; pwd; umask")
        };
        fixture
            .run_spec(&fixture.spec(), &spec)
            .ok()
            .replace('\n', " ")
    };
    assert_eq!(as_user("bob"), "1000 1000 1000 10 /home/bob /tmp 0022");
    assert_eq!(as_user("1000"), "1000 1000 1000 10 /home/bob /tmp 0022");
    assert_eq!(as_user("bob:wheel"), "1000 10 10 /home/bob /tmp 0022");
    assert_eq!(as_user("4000:5000"), "4000 5000 5000 / /tmp 0022");
    // Only root's directory is closed to bob.
    let spec = ExecSpec {
        user: Some("bob".to_owned()),
        ..sh("ls /root 2>&1; touch /tmp/x /home/bob/y && stat -c %u:%g /tmp/x /home/bob/y")
    };
    let output = fixture.run_spec(&fixture.spec(), &spec);
    assert!(output.ok().contains("Permission denied"), "{output:?}");
    assert!(output.ok().ends_with("1000:1000\n1000:1000"), "{output:?}");
}

#[test]
fn privileged_ids_are_shifted_on_disk() {
    let fixture = fixture!("ids");
    let spec = fixture.spec();
    let script = "stat -c %u:%g /home/bob /etc/passwd; touch /tmp/new; chown 7:8 /tmp/new; mkdir /a; touch /etc/passwd";
    let keep = |streams| fixture.sandboxes.run(&spec, &sh(script), streams, true);
    let output = support::capture(keep).unwrap();
    assert_eq!(output.ok(), "1000:1000\n0:0");
    let sandbox = fixture.sandboxes.get(spec.id.as_str()).unwrap();
    assert_eq!(
        (sandbox.state, sandbox.pid, sandbox.one_shot),
        (SandboxState::Dead, None, false)
    );
    let base = spec.id_map.base;
    let owner = |path: &str| {
        let meta = fs_err::metadata(sandbox.upper.join(path)).unwrap();
        (meta.uid(), meta.gid())
    };
    assert_eq!(owner("tmp/new"), (base + 7, base + 8));
    assert_eq!(owner("a"), (base, base));
    assert_eq!(owner("etc/passwd"), (base, base));
    assert_eq!(owner(""), (base, base));
    // Merely entering the root filesystem changes nothing in it.
    let lower = fs_err::metadata(fixture.lower()).unwrap();
    let upper = fs_err::metadata(&sandbox.upper).unwrap();
    assert_eq!(upper.mode(), lower.mode());
    let mut names: Vec<_> = fs_err::read_dir(&sandbox.upper)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["a", "etc", "tmp"]);
    assert!(fixture.groups().is_empty());
    fixture.sandboxes.remove(spec.id.as_str(), false).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn privileged_untouched_sandbox_leaves_its_upper_empty() {
    let fixture = fixture!("untouched");
    let spec = fixture.spec();
    let command = ExecSpec {
        terminal: None,
        ..sh("true")
    };
    fixture
        .sandboxes
        .run(&spec, &command, layerpack_runtime::Streams::default(), true)
        .unwrap();
    let upper = fixture.sandboxes.get(spec.id.as_str()).unwrap().upper;
    assert_eq!(fs_err::read_dir(&upper).unwrap().count(), 0);
    let (lower, upper) = (
        fs_err::metadata(fixture.lower()).unwrap(),
        fs_err::metadata(upper).unwrap(),
    );
    assert_eq!(
        (upper.mtime(), upper.mtime_nsec()),
        (lower.mtime(), lower.mtime_nsec())
    );
}

#[test]
fn privileged_missing_mount_points_are_made_for_the_sandboxs_root() {
    let fixture = fixture!("points");
    for name in ["proc", "sys", "dev"] {
        fs_err::remove_dir(fixture.lower().join(name)).unwrap();
    }
    let output = fixture.run("stat -c %u:%a / /proc /sys/kernel /dev/null; ls -d /proc/1");
    assert!(output.ok().ends_with("/proc/1"), "{output:?}");
}

#[test]
fn privileged_standard_input_is_closed_unless_given() {
    let fixture = fixture!("stdin");
    assert_eq!(fixture.run("cat; echo done").ok(), "done");
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let big = "0123456789abcdef".repeat(40_000);
    let sent = big.clone();
    let writer = std::thread::spawn(move || {
        std::fs::File::from(write)
            .write_all(sent.as_bytes())
            .unwrap();
    });
    let spec = fixture.spec();
    let output = capture_with(Some(read), |streams| {
        fixture.sandboxes.run(&spec, &sh("cat"), streams, false)
    })
    .unwrap();
    writer.join().unwrap();
    assert_eq!(output.ok().len(), big.len());
    assert_eq!(output.stdout, big);
    // A command that does not read its input ends all the same.
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let spec = fixture.spec();
    let output = capture_with(Some(read), |streams| {
        fixture.sandboxes.run(&spec, &sh("exit 3"), streams, false)
    })
    .unwrap();
    assert_eq!(output.exit.code, 3);
    drop(write);
}

#[test]
fn privileged_output_is_complete_and_a_closed_reader_ends_the_writer() {
    let fixture = fixture!("stdout");
    let output = fixture.run("dd if=/dev/zero bs=1000000 count=5 2>/dev/null; echo end >&2");
    assert_eq!(
        (output.stdout.len(), output.stderr.as_str()),
        (5_000_000, "end\n")
    );
    // Nobody reads: the command gets SIGPIPE instead of running for ever.
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    drop(read);
    let streams = layerpack_runtime::Streams {
        stdout: Some(write),
        ..Default::default()
    };
    let command = sh("while true; do echo y || exit 9; done");
    let exit = fixture
        .sandboxes
        .run(&fixture.spec(), &command, streams, false)
        .unwrap();
    assert!([141, 9].contains(&exit.code), "{exit:?}");
    // /dev/stdout can be opened again, by root and by others.
    for user in ["root", "bob"] {
        let spec = ExecSpec {
            user: Some(user.to_owned()),
            ..sh("echo again >/dev/stdout")
        };
        assert_eq!(fixture.run_spec(&fixture.spec(), &spec).ok(), "again");
    }
}

#[test]
fn privileged_background_processes_end_with_the_sandbox() {
    let fixture = fixture!("background");
    let started = Instant::now();
    let output = fixture.run("sleep 1000 & setsid sleep 1000 & echo up");
    assert_eq!(output.ok(), "up");
    assert!(started.elapsed() < Duration::from_secs(100));
    fixture.assert_nothing_left();
}

#[test]
fn privileged_timeouts_kill_and_keep_what_was_printed() {
    let fixture = fixture!("timeout");
    let command = ExecSpec {
        timeout: Some(Duration::from_secs(3)),
        ..sh("echo early; sleep 1000")
    };
    let output = fixture.run_spec(&fixture.spec(), &command);
    assert_eq!((output.exit.code, output.exit.timed_out), (124, true));
    assert_eq!(output.stdout, "early\n");
    fixture.assert_nothing_left();
}

#[test]
fn privileged_a_terminal_is_one() {
    let fixture = fixture!("tty");
    let terminal = Some(layerpack_runtime::Terminal {
        rows: 33,
        columns: 123,
    });
    let script = "tty; stty size; test -t 0 && test -t 1 && test -t 2 && echo three; stat -c %t:%T /dev/console; echo $TERM; echo x >/dev/tty";
    let spec = ExecSpec {
        terminal,
        ..sh(script)
    };
    let output = fixture.run_spec(&fixture.spec(), &spec);
    assert_eq!(
        output.stdout, "/dev/pts/0\r\n33 123\r\nthree\r\n88:0\r\nxterm\r\nx\r\n",
        "{output:?}"
    );
    let as_bob = ExecSpec {
        terminal,
        user: Some("bob".to_owned()),
        ..sh("echo me >/dev/tty; stat -c %u:%g:%a /dev/pts/0")
    };
    assert_eq!(
        fixture.run_spec(&fixture.spec(), &as_bob).stdout,
        "me\r\n1000:5:620\r\n"
    );
    // Input arrives, and its end is an end of file.
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    rustix::io::write(&write, b"typed\n").unwrap();
    drop(write);
    let spec = fixture.spec();
    let typed = ExecSpec {
        terminal,
        ..sh("cat; exit 5")
    };
    let output = capture_with(Some(read), |streams| {
        fixture.sandboxes.run(&spec, &typed, streams, false)
    })
    .unwrap();
    assert_eq!(output.exit.code, 5);
    assert_eq!(output.stdout, "typed\r\ntyped\r\n");
    fixture.assert_nothing_left();
}

#[test]
fn privileged_a_callers_terminal_is_raw_meanwhile_and_restored() {
    let fixture = fixture!("raw");
    use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = openpt(flags).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let own: OwnedFd = ioctl_tiocgptpeer(&master, flags).unwrap();
    let before = rustix::termios::tcgetattr(&own).unwrap();
    let terminal = Some(layerpack_runtime::Terminal {
        rows: 24,
        columns: 80,
    });
    // Ctrl-C must reach the sandbox's terminal as a character.
    rustix::io::write(&master, b"\x03").unwrap();
    let stdin = own.try_clone().unwrap();
    let spec = fixture.spec();
    let script = "trap 'echo interrupted; exit 7' INT; echo up; while true; do sleep 0.05; done";
    let command = ExecSpec {
        terminal,
        timeout: Some(Duration::from_secs(60)),
        ..sh(script)
    };
    let writer = {
        let master = master.try_clone().unwrap();
        std::thread::spawn(move || {
            for _ in 0..100 {
                std::thread::sleep(Duration::from_millis(100));
                if rustix::io::write(&master, b"\x03").is_err() {
                    break;
                }
            }
        })
    };
    let output = capture_with(Some(stdin), |streams| {
        fixture.sandboxes.run(&spec, &command, streams, false)
    })
    .unwrap();
    assert_eq!(output.exit.code, 7, "{output:?}");
    assert!(output.stdout.contains("interrupted"), "{output:?}");
    let after = rustix::termios::tcgetattr(&own).unwrap();
    assert_eq!(
        format!("{:?}", before.local_modes),
        format!("{:?}", after.local_modes)
    );
    drop(writer);
}

#[test]
fn privileged_a_read_only_root_refuses_writes() {
    let fixture = fixture!("readonly");
    let mut spec = fixture.spec();
    spec.read_only = true;
    let script = "touch /tmp/x 2>&1; touch /dev/shm/x && echo shm";
    let output = fixture.run_spec(&spec, &sh(script));
    assert!(output.ok().contains("Read-only file system"), "{output:?}");
    assert!(output.ok().ends_with("shm"));
}

#[test]
fn privileged_hundreds_of_lowers() {
    let fixture = fixture!("lowers");
    let mut spec = fixture.spec();
    let mut lowers = Vec::new();
    for n in 0..300 {
        let dir = fixture.dir.path().join(format!("l{n}"));
        fs_err::create_dir_all(dir.join("layers")).unwrap();
        fs_err::write(dir.join(format!("layers/f{n}")), "x").unwrap();
        lowers.push(dir);
    }
    lowers.push(fixture.lower());
    spec.lowers = lowers;
    let output = fixture.run_spec(&spec, &sh("ls /layers | wc -l"));
    assert_eq!(output.ok(), "300");
    fixture.assert_nothing_left();
}

#[test]
fn privileged_erofs_layers_show_the_sandboxs_ids() {
    use layerpack_sys::mount::{self, ErofsOptions};
    use std::os::fd::AsFd as _;
    let fixture = fixture!("erofs");
    let Some(mkfs) = layerpack_fixtures::find_tool("mkfs.erofs") else {
        skip!("needs mkfs.erofs")
    };
    let image = fixture.dir.path().join("image");
    let made = std::process::Command::new(mkfs)
        .arg(&image)
        .arg(fixture.lower())
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let target = fixture.dir.path().join("mnt");
    fs_err::create_dir(&target).unwrap();
    let mounted = match mount::erofs(&image, &[], &ErofsOptions::default()) {
        Ok(mounted) => mounted,
        Err(error) => skip!("{error}"),
    };
    mount::attach(mounted.as_fd(), &target).unwrap();
    let guard = layerpack_fixtures::MountGuard::new(&target);
    let mut spec = fixture.spec();
    spec.lowers = vec![target.clone()];
    let bob = ExecSpec {
        user: Some("bob".to_owned()),
        ..sh(
            "stat -c %u:%g /home/bob /etc/passwd; echo x >/home/bob/x && cat /home/bob/x; head -c 4 /bin/busybox | wc -c",
        )
    };
    assert_eq!(fixture.run_spec(&spec, &bob).ok(), "1000:1000\n0:0\nx\n4");
    drop(mounted);
    // Not busy: the sandbox has let go of it.
    guard.unmount().unwrap();
    assert!(!mount::is_mounted(&target).unwrap());
}
