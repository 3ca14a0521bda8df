//! What a sandbox cannot do or see.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod support;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use layerpack_fixtures::{find_tool, skip};
use layerpack_runtime::{ExecSpec, Network};
use rustix::fs::{CWD, FileType, Mode, makedev};
use support::{Fixture, command, fixture, sh};

/// Puts the probe into the fixture's tree, once plain and once set-id.
fn with_probe(fixture: &Fixture) -> bool {
    let Some(cc) = find_tool("cc") else {
        return false;
    };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/probe.c");
    let plain = fixture.lower().join("bin/probe");
    let built = Command::new(cc)
        .args(["-static", "-O1", "-o"])
        .arg(&plain)
        .arg(source)
        .output()
        .unwrap();
    if !built.status.success() {
        return false;
    }
    let suid = fixture.lower().join("bin/suid-probe");
    fs_err::copy(&plain, &suid).unwrap();
    fs_err::set_permissions(&suid, std::fs::Permissions::from_mode(0o4755)).unwrap();
    true
}

macro_rules! probe {
    ($label:literal) => {{
        let fixture = fixture!($label);
        if !with_probe(&fixture) {
            skip!("needs cc and a static C library");
        }
        fixture
    }};
}

#[test]
fn privileged_system_calls_are_filtered_as_docker_does() {
    let fixture = probe!("filter");
    let output = fixture.run("probe; grep ^Seccomp: /proc/self/status");
    let (results, mode) = output.ok().rsplit_once('\n').unwrap();
    assert_eq!(mode, "Seccomp:\t2");
    let results: BTreeMap<&str, i32> = results
        .lines()
        .map(|line| line.split_once('=').unwrap())
        .map(|(name, errno)| (name, errno.parse().unwrap()))
        .collect();
    for (name, errno) in &results {
        let expected = match *name {
            "inet" | "personality" | "fork" => 0,
            "clone3" | "future" => libc::ENOSYS,
            _ => libc::EPERM,
        };
        assert_eq!(*errno, expected, "{name}");
    }
    assert_eq!(results.len(), 31);
}

#[test]
fn privileged_capabilities_are_dockers() {
    let fixture = fixture!("caps");
    let caps = |user: &str| {
        let spec = ExecSpec {
            user: Some(user.to_owned()),
            ..sh("grep ^Cap /proc/self/status")
        };
        let output = fixture.run_spec(&fixture.spec(), &spec);
        let list: BTreeMap<String, u64> = output
            .ok()
            .lines()
            .map(|line| line.split_once(":\t").unwrap())
            .map(|(name, value)| (name.to_owned(), u64::from_str_radix(value, 16).unwrap()))
            .collect();
        ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"].map(|name| list[name])
    };
    let docker = 0xa804_25fb;
    assert_eq!(caps("root"), [0, docker, docker, docker, 0]);
    assert_eq!(caps("bob"), [0, 0, 0, docker, 0]);
}

#[test]
fn privileged_set_id_works_unless_new_privileges_are_given_up() {
    let fixture = probe!("suid");
    let bob = ExecSpec {
        user: Some("bob".to_owned()),
        ..sh("suid-probe ids")
    };
    assert_eq!(fixture.run_spec(&fixture.spec(), &bob).ok(), "1000 0");
    let mut spec = fixture.spec();
    spec.no_new_privileges = true;
    assert_eq!(fixture.run_spec(&spec, &bob).ok(), "1000 1000");
}

#[test]
fn privileged_kernel_files_are_hidden_or_write_protected() {
    let fixture = fixture!("masks");
    let script = "
        for f in kcore keys timer_list interrupts sched_debug latency_stats; do
            test -e /proc/$f && head -c 1 /proc/$f | wc -c
        done
        ls /sys/firmware /proc/acpi /proc/scsi 2>/dev/null | grep -v : | grep .
        for f in /proc/sysrq-trigger /proc/sys/kernel/core_pattern /proc/irq/default_smp_affinity /sys/kernel/profiling /sys/fs/cgroup/x; do
            test -e $f && ( echo x >$f ) 2>/dev/null && echo wrote $f
        done
        mkdir /sys/fs/cgroup/x 2>/dev/null && echo made a group
        echo end";
    let output = fixture.run(script);
    assert!(output.ok().ends_with("end"));
    for line in output.ok().lines() {
        assert!(line == "0" || line == "end", "{output:?}");
    }
}

#[test]
fn privileged_pid_1_cannot_be_looked_into_or_changed() {
    let fixture = fixture!("pid1");
    let program = env!("CARGO_BIN_EXE_layerpack-test-init");
    let before = fs_err::read(program).unwrap();
    let script = "
        readlink /proc/1/exe && echo readlink
        cat /proc/1/environ 2>/dev/null | grep -q . && echo environ
        readlink /proc/1/fd/* && echo fds
        ls /proc/1/root/ 2>/dev/null && echo root
        head -c 1 /proc/1/mem 2>/dev/null && echo mem
        ( echo x >/proc/1/exe ) 2>/dev/null && echo wrote
        kill -9 1; kill -STOP 1
        echo end";
    assert_eq!(fixture.run(script).ok(), "end");
    assert_eq!(fs_err::read(program).unwrap(), before);
    // The same while it does nothing but hold a lasting sandbox.
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    let id = spec.id.as_str();
    let script = format!("{script}; kill -TERM 1; kill -INT 1");
    assert_eq!(fixture.exec(id, &script).ok(), "end");
    assert_eq!(fixture.exec(id, "ps | grep -c layerpack-init").exit.code, 0);
    let status = format!(
        "/proc/{}/status",
        fixture
            .sandboxes
            .get(id)
            .unwrap()
            .pid
            .unwrap()
            .as_raw_nonzero()
    );
    let status = fs_err::read_to_string(status).unwrap();
    assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    assert!(
        status.contains(&format!("Uid:\t{0}\t{0}", 1 << 20)),
        "{status}"
    );
}

#[test]
fn privileged_the_host_is_out_of_sight() {
    let fixture = fixture!("sight");
    let output = fixture.run("cat /proc/self/mountinfo; echo; cat /proc/self/cgroup; ls -a /; ls /proc | grep '^[0-9]'; echo fds $(ls /proc/self/fd)");
    let text = output.ok();
    let mounts = text.split("\n\n").next().unwrap();
    for line in mounts.lines() {
        let fstype = line.split(" - ").nth(1).unwrap().split(' ').next().unwrap();
        assert!(
            [
                "overlay", "proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"
            ]
            .contains(&fstype),
            "{line}"
        );
    }
    // Groups are shown from the sandbox's own downwards.
    assert!(!text.contains(&fixture.parent), "{text}");
    // Only the sandbox's processes, and no descriptors but the standard ones and ls's own.
    assert!(!text.contains("/etc/hostname"), "{text}");
    assert!(text.ends_with("fds 0 1 2 3"), "{text}");
    // Secrets in the launcher's environment and memory are not in any process.
    let script = "cat /proc/*/environ /proc/*/cmdline 2>/dev/null | grep -c CARGO_MANIFEST_DIR";
    let dir = ExecSpec {
        argv: command(&["sh", "-c"]).argv,
        ..ExecSpec::default()
    };
    let mut argv = dir.argv.clone();
    argv.push(
        script
            .replace("CARGO_MANIFEST_DIR", "'CARGO_MANIFEST[_]DIR'")
            .into(),
    );
    let output = fixture.run_spec(&fixture.spec(), &ExecSpec { argv, ..dir });
    assert_eq!(output.stdout, "0\n");
}

#[test]
fn privileged_devices_of_the_host_are_out_of_reach() {
    let fixture = probe!("devices");
    // A layer that brings nodes of its own.
    for (name, kind, device) in [
        ("disk", FileType::BlockDevice, makedev(254, 0)),
        ("mem", FileType::CharacterDevice, makedev(1, 1)),
        ("kmsg", FileType::CharacterDevice, makedev(1, 11)),
    ] {
        let path = fixture.lower().join(name);
        rustix::fs::mknodat(CWD, &path, kind, Mode::from_raw_mode(0o666), device).unwrap();
        rustix::fs::chmod(&path, Mode::from_raw_mode(0o666)).unwrap();
    }
    let output = fixture.run("for d in /disk /mem /kmsg; do probe open $d; done; mknod /dev/n c 1 3 2>/dev/null || echo none; mknod /tmp/n b 254 0 2>/dev/null || echo none; ls /dev");
    let text = output.ok();
    let listed: Vec<&str> = text.lines().skip(5).collect();
    assert_eq!(
        text.lines().take(5).collect::<Vec<_>>(),
        ["open=13", "open=13", "open=13", "none", "none"]
    );
    let expected = [
        "fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin",
        "stdout", "tty", "urandom", "zero",
    ];
    assert_eq!(listed, expected);
    let script = "head -c 3 /dev/zero | wc -c; head -c 3 /dev/urandom | wc -c; echo x >/dev/null; ( echo x >/dev/full ) 2>&1 | grep -c space; stat -c %u:%g:%a /dev/null";
    assert_eq!(fixture.run(script).ok(), "3\n3\n1\n0:0:666");
}

#[test]
fn privileged_two_sandboxes_do_not_meet() {
    let fixture = fixture!("two");
    let (one, two) = (fixture.spec(), fixture.spec());
    fixture.sandboxes.create(&one).unwrap();
    fixture.sandboxes.create(&two).unwrap();
    let (one, two) = (one.id.as_str(), two.id.as_str());
    fixture.exec(
        one,
        "echo mine >/tmp/x; echo mine >/etc/passwd2; echo mine >/dev/shm/x; sleep 1234 & hostname",
    );
    let seen = fixture.exec(two, "ls /tmp /etc/passwd2 /dev/shm 2>/dev/null; ps | grep -c '[s]leep 1234'; ip link | grep -c mtu; ip -o addr | grep -c 127.0.0.1");
    assert_eq!(seen.stdout, "/dev/shm:\n\n/tmp:\n0\n1\n1\n", "{seen:?}");
    assert_eq!(
        fixture
            .exec(one, "cat /tmp/x; ps | grep -c '[s]leep 1234'")
            .ok(),
        "mine\n1"
    );
    assert!(!fixture.lower().join("tmp/x").exists());
}

#[test]
fn privileged_the_hosts_network_only_when_asked_for() {
    let fixture = fixture!("net");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let hex = format!(":{port:04X} ");
    let script = format!("grep -c '{hex}' /proc/net/tcp; ls /sys/class/net | wc -l");
    assert_eq!(fixture.run(&script).stdout, "0\n1\n");
    let mut spec = fixture.spec();
    spec.network = Network::Host;
    let output = fixture.run_spec(&spec, &sh(&format!("grep -c '{hex}' /proc/net/tcp; ls /sys/kernel | grep -c . ; ls /sys/fs/cgroup >/dev/null && echo ok; ( echo x >/sys/kernel/profiling ) 2>/dev/null || echo ro; hostname box2 2>/dev/null || echo no")));
    let lines: Vec<&str> = output.ok().lines().collect();
    assert_eq!(lines[0], "1");
    assert_eq!(lines[2..], ["ok", "ro", "no"]);
    fixture.assert_nothing_left();
}

#[test]
fn privileged_working_directories_cannot_lead_out() {
    let fixture = fixture!("cwd");
    let spec = fixture.spec();
    fixture.sandboxes.create(&spec).unwrap();
    for number in 3..40 {
        let command = ExecSpec {
            cwd: Some(format!("/proc/self/fd/{number}").into()),
            ..sh("pwd; ls")
        };
        for error in [
            fixture
                .try_exec(spec.id.as_str(), &command)
                .map(|_| ())
                .unwrap_err(),
            fixture
                .try_run(&fixture.spec(), &command)
                .map(|_| ())
                .unwrap_err(),
        ] {
            assert!(error.to_string().contains("directory"), "{error}");
        }
    }
    let command = ExecSpec {
        cwd: Some("/../../..".into()),
        ..sh("pwd; ls -d home")
    };
    assert_eq!(
        fixture.try_exec(spec.id.as_str(), &command).unwrap().ok(),
        "/\nhome"
    );
}

#[test]
fn privileged_hostile_user_tables_do_no_harm() {
    let fixture = fixture!("passwd");
    let etc = fixture.lower().join("etc");
    fs_err::remove_file(etc.join("passwd")).unwrap();
    fs_err::remove_file(etc.join("group")).unwrap();
    // A link to a file of the host that is not in the sandbox, and a pipe nobody writes to.
    std::os::unix::fs::symlink(
        "../../../../../../../../../../etc/passwd-host",
        etc.join("passwd"),
    )
    .unwrap();
    rustix::fs::mknodat(
        CWD,
        etc.join("group"),
        FileType::Fifo,
        Mode::from_raw_mode(0o666),
        0,
    )
    .unwrap();
    let output = fixture.run("id -u; echo $HOME");
    assert_eq!(output.ok(), "0\n/root");
    let bob = ExecSpec {
        user: Some("bob".to_owned()),
        ..sh("id")
    };
    assert!(fixture.try_run(&fixture.spec(), &bob).is_err());
}
