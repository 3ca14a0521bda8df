//! A node directory with a tree to run, and short ways to run things in it.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing
)]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use layerpack_fixtures::{ScratchDir, find_tool, is_root};
use layerpack_runtime::{
    ExecSpec, Exit, IdMap, Limits, Network, Result, SandboxId, SandboxSpec, Sandboxes,
    SandboxesOptions, Streams,
};

/// Busybox programs that the tests use.
const PROGRAMS: [&str; 40] = [
    "sh", "cat", "id", "ls", "echo", "true", "false", "sleep", "mount", "umount", "ps", "kill",
    "hostname", "ip", "stat", "touch", "mkdir", "rm", "mv", "dd", "grep", "env", "tty", "stty",
    "readlink", "mknod", "chmod", "chown", "ln", "wc", "tail", "head", "test", "setsid", "chroot",
    "unshare", "ifconfig", "su", "find", "dmesg",
];

/// A fixture for the test with this label, which is skipped where sandboxes cannot run.
macro_rules! fixture {
    ($label:literal) => {{
        if let Some(reason) = $crate::support::missing() {
            layerpack_fixtures::skip!("{reason}");
        }
        $crate::support::Fixture::new($label)
    }};
}
pub(crate) use fixture;

/// Waits until `done` holds, for at most a minute.
#[track_caller]
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) struct Fixture {
    pub(crate) sandboxes: Sandboxes,
    pub(crate) dir: ScratchDir,
    pub(crate) parent: String,
}

/// What is missing to run sandboxes here, if anything.
pub(crate) fn missing() -> Option<&'static str> {
    if !is_root() {
        return Some("needs root");
    }
    if busybox().is_none() {
        return Some("needs a static busybox (Debian: busybox-static)");
    }
    None
}

fn busybox() -> Option<PathBuf> {
    find_tool("busybox")
}

/// Fills `root` with a small system.
pub(crate) fn small_system(root: &Path) {
    for dir in [
        "bin", "etc", "tmp", "root", "home/bob", "usr/bin", "proc", "sys", "dev",
    ] {
        fs_err::create_dir_all(root.join(dir)).unwrap();
    }
    let mode = |path: &str, mode| {
        fs_err::set_permissions(root.join(path), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode("tmp", 0o1777);
    mode("root", 0o700);
    fs_err::copy(busybox().unwrap(), root.join("bin/busybox")).unwrap();
    for program in PROGRAMS {
        symlink("busybox", root.join("bin").join(program)).unwrap();
    }
    let passwd = "root:x:0:0:root:/root:/bin/sh\nbob:x:1000:1000:Bob:/home/bob:/bin/sh\n";
    fs_err::write(root.join("etc/passwd"), passwd).unwrap();
    let group = "root:x:0:\ntty:x:5:\nbob:x:1000:\nwheel:x:10:bob\n";
    fs_err::write(root.join("etc/group"), group).unwrap();
    // A set-id program: busybox drops set-id rights of most applets, so this
    // copy is only used by tests that look at ids.
    fs_err::copy(busybox().unwrap(), root.join("bin/suid-busybox")).unwrap();
    mode("bin/suid-busybox", 0o4755);
    fs_err::write(root.join("etc/notexec"), "x").unwrap();
    fs_err::write(root.join("bin/badformat"), "\x01\x02").unwrap();
    mode("bin/badformat", 0o755);
    chown(&root.join("home/bob"), 1000, 1000);
}

pub(crate) fn chown(path: &Path, uid: u32, gid: u32) {
    rustix::fs::chown(
        path,
        Some(rustix::fs::Uid::from_raw(uid)),
        Some(rustix::fs::Gid::from_raw(gid)),
    )
    .unwrap();
}

impl Fixture {
    pub(crate) fn new(label: &str) -> Self {
        let dir = ScratchDir::new(label).unwrap();
        small_system(&dir.path().join("lower"));
        let parent = format!("layerpack-test-{}-{label}", std::process::id());
        let sandboxes = Self::open(dir.path(), &parent);
        Self {
            sandboxes,
            dir,
            parent,
        }
    }

    pub(crate) fn open(dir: &Path, parent: &str) -> Sandboxes {
        Sandboxes::open(Self::options(dir, parent)).unwrap()
    }

    /// What [`Fixture::open`] opens.
    pub(crate) fn options(dir: &Path, parent: &str) -> SandboxesOptions {
        let program = PathBuf::from(env!("CARGO_BIN_EXE_layerpack-test-init"));
        SandboxesOptions {
            root: dir.join("sandboxes"),
            init: Some(program.clone()),
            agent: Some(program),
            cgroup_parent: parent.to_owned(),
            stop_by_signals: false,
        }
    }

    pub(crate) fn lower(&self) -> PathBuf {
        self.dir.path().join("lower")
    }

    pub(crate) fn spec(&self) -> SandboxSpec {
        SandboxSpec {
            id: SandboxId::random().unwrap(),
            name: None,
            stack: Vec::new(),
            lowers: vec![self.lower()],
            hostname: Some("box".to_owned()),
            limits: Limits::default(),
            network: Network::None,
            id_map: IdMap {
                base: 1 << 20,
                count: 1 << 16,
            },
            read_only: false,
            no_new_privileges: false,
            env: Vec::new(),
            channel: false,
            lease: None,
            labels: BTreeMap::new(),
        }
    }

    /// Runs a shell script in a sandbox of its own.
    pub(crate) fn run(&self, script: &str) -> Output {
        self.run_spec(&self.spec(), &sh(script))
    }

    pub(crate) fn run_spec(&self, spec: &SandboxSpec, command: &ExecSpec) -> Output {
        self.try_run(spec, command).unwrap()
    }

    pub(crate) fn try_run(&self, spec: &SandboxSpec, command: &ExecSpec) -> Result<Output> {
        capture(|streams| self.sandboxes.run(spec, command, streams, false))
    }

    /// Runs a shell script in a lasting sandbox.
    pub(crate) fn exec(&self, sandbox: &str, script: &str) -> Output {
        self.try_exec(sandbox, &sh(script)).unwrap()
    }

    pub(crate) fn try_exec(&self, sandbox: &str, command: &ExecSpec) -> Result<Output> {
        capture(|streams| self.sandboxes.exec(sandbox, command, streams))
    }

    /// Control group directories of this fixture that exist.
    pub(crate) fn groups(&self) -> Vec<PathBuf> {
        let root = Path::new("/sys/fs/cgroup");
        let mut found = Vec::new();
        let hierarchies = fs_err::read_dir(root).unwrap().map(|e| e.unwrap().path());
        for dir in hierarchies.chain([root.to_path_buf()]) {
            let parent = dir.join(&self.parent);
            if let Ok(entries) = fs_err::read_dir(&parent) {
                found.extend(entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()));
            }
        }
        found
    }

    /// What is left in the state directory but the shared files.
    pub(crate) fn left(&self) -> Vec<String> {
        fs_err::read_dir(self.dir.path().join("sandboxes"))
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "names" && name != ".lock")
            .collect()
    }

    pub(crate) fn assert_nothing_left(&self) {
        assert_eq!(self.left(), Vec::<String>::new());
        assert_eq!(self.groups(), Vec::<PathBuf>::new());
        let names = fs_err::read_dir(self.dir.path().join("sandboxes/names"))
            .unwrap()
            .count();
        assert_eq!(names, 0);
        let mounts = fs_err::read_to_string("/proc/self/mountinfo").unwrap();
        let here = self.dir.path().to_str().unwrap();
        assert!(!mounts.contains(here), "{mounts}");
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let all = self.sandboxes.list().unwrap_or_default();
        let removed: Vec<_> = all
            .iter()
            .map(|sandbox| self.sandboxes.remove(sandbox.spec.id.as_str(), true))
            .collect();
        let _ = self.sandboxes.sweep();
        let left = self.groups();
        let root = Path::new("/sys/fs/cgroup");
        let _ = rustix::fs::rmdir(root.join(&self.parent));
        for entry in fs_err::read_dir(root).into_iter().flatten().flatten() {
            let _ = rustix::fs::rmdir(entry.path().join(&self.parent));
        }
        if !std::thread::panicking() {
            for result in removed {
                result.unwrap();
            }
            assert_eq!(left, Vec::<PathBuf>::new());
        }
    }
}

/// A command's output and end.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) exit: Exit,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Output {
    #[track_caller]
    pub(crate) fn ok(&self) -> &str {
        assert_eq!(self.exit.code, 0, "{self:?}");
        self.stdout.trim_end()
    }
}

pub(crate) fn sh(script: &str) -> ExecSpec {
    command(&["sh", "-c", script])
}

pub(crate) fn command(argv: &[&str]) -> ExecSpec {
    ExecSpec {
        argv: argv.iter().map(OsString::from).collect(),
        ..ExecSpec::default()
    }
}

fn collect(mut from: std::fs::File) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Gives `run` streams and collects what is written to them.
pub(crate) fn capture(run: impl FnOnce(Streams) -> Result<Exit>) -> Result<Output> {
    capture_with(None, run)
}

pub(crate) fn capture_with(
    stdin: Option<OwnedFd>,
    run: impl FnOnce(Streams) -> Result<Exit>,
) -> Result<Output> {
    let pipe = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let ((out_read, out_write), (err_read, err_write)) = (pipe(), pipe());
    let (out, err) = (collect(out_read.into()), collect(err_read.into()));
    let streams = Streams {
        stdin,
        stdout: Some(out_write),
        stderr: Some(err_write),
    };
    let exit = run(streams);
    let (stdout, stderr) = (out.join().unwrap(), err.join().unwrap());
    Ok(Output {
        exit: exit?,
        stdout,
        stderr,
    })
}
