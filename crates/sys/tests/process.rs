//! Starting programs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::ffi::CString;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd, OwnedFd};

use layerpack_fixtures::{is_root, skip};
use layerpack_sys::ns::{IdRange, Namespaces, write_id_maps};
use layerpack_sys::process::{
    BpfInstruction, Credentials, Ended, Join, Launch, Program, Stage, spawn,
};
use rustix::io::Errno;
use rustix::process::Signal;

fn c(text: &str) -> CString {
    CString::new(text).unwrap()
}

struct Streams {
    null: OwnedFd,
    read: File,
    write: OwnedFd,
}

impl Streams {
    fn new() -> Self {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let null = File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .unwrap();
        Self {
            null: null.into(),
            read: read.into(),
            write,
        }
    }

    fn launch<'a>(&'a self, argv: &[&str]) -> Launch<'a> {
        let fds = [self.null.as_fd(), self.write.as_fd(), self.null.as_fd()];
        Launch {
            argv: argv.iter().map(|arg| c(arg)).collect(),
            env: vec![c("PATH=/usr/bin:/bin")],
            ..Launch::new(Program::Paths(vec![c("/bin/sh")]), fds)
        }
    }

    fn output(mut self) -> String {
        drop(self.write);
        let mut text = String::new();
        self.read.read_to_string(&mut text).unwrap();
        text
    }
}

#[test]
fn a_program_runs_with_what_it_was_given() {
    let streams = Streams::new();
    let mut launch = streams.launch(&[
        "sh",
        "-c",
        "pwd; umask; echo $0 $1; ls /proc/self/fd | wc -l; trap",
        "zero",
        "one two",
    ]);
    launch.cwd = Some(c("/usr"));
    launch.umask = Some(0o27);
    let child = spawn(&launch).unwrap().unwrap();
    child.wait_exec().unwrap().unwrap();
    assert_eq!(child.wait().unwrap(), Ended::Code(0));
    // Three streams, and ls's own directory.
    assert_eq!(streams.output(), "/usr\n0027\nzero one two\n4\n");
}

#[test]
fn failures_come_back_with_their_step() {
    let streams = Streams::new();
    let cases = [
        (
            Program::Paths(vec![c("/no/such"), c("/no/such/either")]),
            None,
            Stage::Exec,
            Errno::NOENT,
        ),
        (
            Program::Paths(vec![c("/etc/passwd"), c("/no/such")]),
            None,
            Stage::Exec,
            Errno::ACCESS,
        ),
        (
            Program::Paths(vec![c("/bin/sh")]),
            Some(c("/no/such")),
            Stage::Directory,
            Errno::NOENT,
        ),
        (Program::Paths(Vec::new()), None, Stage::Exec, Errno::NOENT),
    ];
    for (program, cwd, stage, errno) in cases {
        let launch = Launch {
            program,
            cwd,
            ..streams.launch(&["sh"])
        };
        let failure = spawn(&launch)
            .unwrap()
            .unwrap()
            .wait_exec()
            .unwrap()
            .unwrap_err();
        assert_eq!((failure.stage, failure.errno), (stage, errno));
        assert!(failure.to_string().contains(stage.describe()));
    }
    assert_eq!(
        rustix::process::wait(rustix::process::WaitOptions::NOHANG).unwrap_err(),
        Errno::CHILD
    );
}

#[test]
fn a_gate_holds_until_it_is_opened_or_its_keeper_goes() {
    let streams = Streams::new();
    let mut launch = streams.launch(&["sh", "-c", "echo through"]);
    launch.gate = true;
    let child = spawn(&launch).unwrap().unwrap();
    let pidfd = child.pidfd.try_clone().unwrap();
    child.open_gate().unwrap();
    child.wait_exec().unwrap().unwrap();
    assert_eq!(child.wait().unwrap(), Ended::Code(0));
    drop(pidfd);
    // Abandoned: it ends by itself, although this process lives on.
    let child = spawn(&launch).unwrap().unwrap();
    let pidfd = child.pidfd.try_clone().unwrap();
    drop(child);
    assert_eq!(
        layerpack_sys::process::wait_pidfd(pidfd.as_fd()).unwrap(),
        Ended::Code(125)
    );
    assert_eq!(streams.output(), "through\n");
}

#[test]
fn signals_end_as_such() {
    let streams = Streams::new();
    let child = spawn(&streams.launch(&["sh", "-c", "sleep 1000"]))
        .unwrap()
        .unwrap();
    child.wait_exec().unwrap().unwrap();
    child.kill(Signal::TERM).unwrap();
    let ended = child.wait().unwrap();
    assert_eq!((ended, ended.shell_code()), (Ended::Signal(15), 143));
}

#[test]
fn a_filter_and_no_new_privileges_hold() {
    // Allow everything but uname (63 on x86-64, 160 elsewhere), which fails with EXDEV.
    let uname = u32::try_from(libc::SYS_uname).unwrap();
    let op = |code, k, jt, jf| BpfInstruction { code, jt, jf, k };
    let filter = [
        op(0x20, 0, 0, 0),
        op(0x15, uname, 0, 1),
        op(0x06, 0x0005_0000 | 18, 0, 0),
        op(0x06, 0x7fff_0000, 0, 0),
    ];
    let streams = Streams::new();
    let mut launch = streams.launch(&[
        "sh",
        "-c",
        "uname || echo refused; grep NoNewPrivs /proc/self/status",
    ]);
    launch.filter = Some(&filter);
    launch.no_new_privs = true;
    let child = spawn(&launch).unwrap().unwrap();
    child.wait_exec().unwrap().unwrap();
    child.wait().unwrap();
    assert_eq!(streams.output(), "refused\nNoNewPrivs:\t1\n");
}

#[test]
fn privileged_new_namespaces_can_be_joined_many_times() {
    if !is_root() {
        skip!("needs root");
    }
    let streams = Streams::new();
    let credentials = Credentials {
        uid: 0,
        gid: 0,
        groups: vec![7],
        capabilities: 1 << 5,
    };
    let mut init = streams.launch(&["sh", "-c", "sleep 1000 & wait"]);
    init.namespaces = Namespaces::USER | Namespaces::PROCESS_ID | Namespaces::MOUNT;
    init.gate = true;
    init.die_with_parent = true;
    init.credentials = Some(Credentials {
        capabilities: u64::MAX,
        ..credentials.clone()
    });
    let init = spawn(&init).unwrap().unwrap();
    let map = [IdRange {
        inside: 0,
        outside: 1 << 20,
        count: 65536,
    }];
    write_id_maps(init.pid, &map, &map).unwrap();
    init.open_gate().unwrap();
    init.wait_exec().unwrap().unwrap();
    let join = Some(Join {
        pidfd: init.pidfd.as_fd(),
        namespaces: Namespaces::USER | Namespaces::PROCESS_ID | Namespaces::MOUNT,
    });
    for n in 0..100 {
        // Every other one fails late, perhaps before its pid is known.
        let late = n % 2 == 1;
        let launch = Launch {
            join,
            cwd: late.then(|| c("/no/such")),
            credentials: Some(credentials.clone()),
            ..streams.launch(&["sh", "-c", "test $$ != 1 && test $(id -u) = 0 && exit 9"])
        };
        let child = spawn(&launch).unwrap().unwrap();
        match child.wait_exec().unwrap() {
            Ok(()) => assert_eq!(child.wait().unwrap(), Ended::Code(9)),
            Err(failure) => assert_eq!((late, failure.stage), (true, Stage::Directory)),
        }
    }
    let launch = Launch {
        join,
        credentials: Some(credentials),
        ..streams.launch(&[
            "sh",
            "-c",
            "id -G; grep -E 'Cap(Eff|Bnd|Inh)' /proc/self/status",
        ])
    };
    let child = spawn(&launch).unwrap().unwrap();
    child.wait_exec().unwrap().unwrap();
    child.wait().unwrap();
    // No child is left to be reaped but PID 1, whose end waits for them all.
    init.kill(Signal::KILL).unwrap();
    assert_eq!(init.wait().unwrap(), Ended::Signal(9));
    assert_eq!(
        rustix::process::wait(rustix::process::WaitOptions::NOHANG).unwrap_err(),
        Errno::CHILD
    );
    assert_eq!(
        streams.output(),
        "0 7\nCapInh:\t0000000000000000\nCapEff:\t0000000000000020\nCapBnd:\t0000000000000020\n"
    );
}
