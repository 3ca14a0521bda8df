//! What the integration tests share: a node of their own that leaves nothing behind.

#![allow(dead_code, reason = "each test file uses a part of it")]

pub(crate) mod load;
pub(crate) mod memory;
pub(crate) mod power;
pub(crate) mod rootfs;
pub(crate) mod times;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::guards::mounts_below;
use layerpack_fixtures::tar::TarWriter;
use serde_json::Value;

/// A node root and a store in a scratch directory. On drop its sandboxes end, its daemon stops,
/// and what is still mounted is taken down.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) scratch: ScratchDir,
    /// Further variables of its commands.
    pub(crate) environment: Vec<(String, String)>,
}

impl Node {
    pub(crate) fn new(label: &str) -> Self {
        Self {
            scratch: ScratchDir::new(label).unwrap(),
            environment: Vec::new(),
        }
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.scratch.join("node")
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.scratch.join("store")
    }

    /// The binary with this node's surroundings and none of the caller's.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_layerpack"));
        command
            .env("LAYERPACK_ROOT", self.root())
            .env("LAYERPACK_STORE", self.store())
            .env("LAYERPACK_CACHE", self.scratch.join("cache"))
            .env_remove("LAYERPACK_LOG")
            .env_remove("LAYERPACK_STORE_OPTIONS")
            .env_remove("SOURCE_DATE_EPOCH")
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null())
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs a command line to its end.
    #[track_caller]
    pub(crate) fn run<I, S>(&self, arguments: I) -> Output
    where
        I: IntoIterator<Item = S>,
        S: AsRef<std::ffi::OsStr>,
    {
        self.command().args(arguments).output().unwrap()
    }

    /// Runs a command line that must succeed; gives its stdout.
    #[track_caller]
    pub(crate) fn ok<I, S>(&self, arguments: I) -> String
    where
        I: IntoIterator<Item = S>,
        S: AsRef<std::ffi::OsStr>,
    {
        let output = self.run(arguments);
        assert!(output.status.success(), "{}", describe(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The same with `-o json`, parsed.
    #[track_caller]
    pub(crate) fn json<const N: usize>(&self, arguments: [&str; N]) -> Value {
        let text = self.ok(["-o", "json"].into_iter().chain(arguments));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    }

    /// Runs a command line that must fail with `code` and exactly one `error:` line; gives it.
    #[track_caller]
    pub(crate) fn fails<I, S>(&self, code: i32, arguments: I) -> String
    where
        I: IntoIterator<Item = S>,
        S: AsRef<std::ffi::OsStr>,
    {
        one_error(code, &self.run(arguments))
    }

    /// The same where it does not matter whether the command line or something else is to blame.
    #[track_caller]
    pub(crate) fn refuses<I, S>(&self, arguments: I) -> String
    where
        I: IntoIterator<Item = S>,
        S: AsRef<std::ffi::OsStr>,
    {
        let output = self.run(arguments);
        let code = match output.status.code() {
            Some(2) => 2,
            _ => 1,
        };
        one_error(code, &output)
    }

    /// Builds a layer from a directory; gives its digest.
    #[track_caller]
    pub(crate) fn build(&self, reference: &str, source: &Path, extra: &[&str]) -> String {
        let from = format!("dir:{}", source.display());
        let mut arguments = vec!["-q"];
        arguments.extend(build_line(reference, &from, extra));
        let line = self.ok(arguments);
        let (printed, digest) = line.trim_end().split_once(' ').unwrap();
        assert_eq!(printed, reference);
        assert!(digest.starts_with("b3:") && digest.len() == 67, "{digest}");
        digest.to_owned()
    }

    /// Publishes `base/a:1`, and `workspace/a:1` that adds a file to it and removes one. Gives the
    /// archive of the base.
    pub(crate) fn build_stack(&self) -> PathBuf {
        let mut base = TarWriter::new();
        base.dir("./", 0o755)
            .dir("etc", 0o755)
            .file("etc/os", "1")
            .file("gone", "1");
        let mut work = TarWriter::new();
        work.file("etc/new", "2").whiteout("", "gone");
        let path = |kind: &str| self.root().with_extension(kind);
        for (kind, tar) in [("base", base), ("workspace", work)] {
            fs_err::write(path(kind), tar.finish()).unwrap();
            let from = format!("tar:{}", path(kind).display());
            self.ok(build_line(&format!("{kind}/a:1"), &from, &[]));
        }
        path("base")
    }

    /// What the daemon logged, for messages of tests.
    pub(crate) fn log(&self) -> String {
        fs_err::read_to_string(self.root().join("daemon.log")).unwrap_or_default()
    }

    /// Process id of the node's daemon, if one runs.
    pub(crate) fn daemon_pid(&self) -> Option<i32> {
        let output = self.run(["-o", "json", "daemon", "status"]);
        let status: Value = serde_json::from_slice(&output.stdout).ok()?;
        i32::try_from(status.pointer("/daemon/pid")?.as_i64()?).ok()
    }
}

impl Node {
    /// Process id of the daemon's holder.
    pub(crate) fn holder_pid(&self) -> i32 {
        let status = self.json(["daemon", "status"]);
        let pid = status.pointer("/daemon/holder/pid").unwrap();
        i32::try_from(pid.as_i64().unwrap()).unwrap()
    }

    /// Kills the daemon and what would start it again.
    pub(crate) fn kill_all(&self) {
        let (holder, daemon) = (self.holder_pid(), self.daemon_pid().unwrap());
        // Stopped first, so that it sees nothing of the other's end.
        kill(holder, "STOP");
        kill(daemon, "KILL");
        kill(holder, "KILL");
        let gone = |pid| !Path::new(&format!("/proc/{pid}/root")).exists() || is_zombie(pid);
        assert!(wait_until(|| gone(holder) && gone(daemon)));
    }

    /// Kills the daemon and waits until another process serves in its place.
    #[track_caller]
    pub(crate) fn kill_daemon(&self) {
        let before = self.daemon_pid().unwrap();
        kill(before, "KILL");
        let another = || self.daemon_pid().is_some_and(|pid| pid != before);
        assert!(wait_until(another), "{}", self.log());
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        end(self);
    }
}

/// The arguments that build a layer from a source.
pub(crate) fn build_line<'a>(reference: &'a str, from: &'a str, extra: &[&'a str]) -> Vec<&'a str> {
    let (kind, rest) = reference.split_once('/').unwrap();
    let (name, version) = rest.split_once(':').unwrap();
    let mut line = vec!["build", "--kind", kind, "--name", name];
    line.extend(["--version", version, "--from", from]);
    line.extend(extra);
    line
}

/// Ends a node's sandboxes and its daemon when dropped: for tests whose node lies on a disk of
/// its own, which goes before the [`Node`] does.
#[derive(Debug)]
pub(crate) struct Ender<'a>(pub(crate) &'a Node);

impl Drop for Ender<'_> {
    fn drop(&mut self) {
        end(self.0);
    }
}

fn end(node: &Node) {
    if !layerpack_fixtures::is_root() || !node.root().exists() {
        return;
    }
    if let Ok(list) =
        serde_json::from_slice::<Value>(&node.run(["-o", "json", "sandbox", "ls"]).stdout)
    {
        for sandbox in list.as_array().into_iter().flatten() {
            if let Some(id) = sandbox.get("id").and_then(Value::as_str) {
                node.run(["sandbox", "rm", "--force", id]);
            }
        }
    }
    node.run(["daemon", "stop", "--force"]);
}

/// Nothing of the node is mounted, no process of it is there, no sandbox's directory.
#[track_caller]
pub(crate) fn assert_clean(node: &Node) {
    node.ok(["daemon", "stop"]);
    assert_eq!(mounts(node), Vec::<PathBuf>::new());
    assert_eq!(processes(node), Vec::<String>::new());
    assert_eq!(node.json(["sandbox", "ls"]).as_array().unwrap().len(), 0);
}

/// Mount points that exist below a node's scratch directory.
pub(crate) fn mounts(node: &Node) -> Vec<PathBuf> {
    mounts_below(node.scratch.path())
}

/// Processes whose command line or environment names the node's root.
pub(crate) fn processes(node: &Node) -> Vec<String> {
    let needle = node.root();
    let needle = needle.as_os_str().as_encoded_bytes();
    let own = std::process::id().to_string();
    let mut found = Vec::new();
    for entry in fs_err::read_dir("/proc").unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.bytes().all(|b| b.is_ascii_digit()) || name == own {
            continue;
        }
        for file in ["cmdline", "environ"] {
            let bytes = fs_err::read(entry.path().join(file)).unwrap_or_default();
            if bytes.windows(needle.len()).any(|w| w == needle) {
                let line = fs_err::read(entry.path().join("cmdline")).unwrap_or_default();
                found.push(format!(
                    "{name} {}",
                    String::from_utf8_lossy(&line).replace('\0', " ")
                ));
                break;
            }
        }
    }
    found
}

/// Asserts that a command failed as all must: this code, nothing on stdout, one `error:` line.
#[track_caller]
pub(crate) fn one_error(code: i32, output: &Output) -> String {
    assert_eq!(output.status.code(), Some(code), "{}", describe(output));
    assert!(output.stdout.is_empty(), "{}", describe(output));
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    let errors: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("error: "))
        .collect();
    assert_eq!(errors.len(), 1, "{text}");
    assert_eq!(
        text.lines().last(),
        errors.first().copied(),
        "the error comes last: {text}"
    );
    errors.concat()
}

/// A finished command for a panic message.
pub(crate) fn describe(output: &Output) -> String {
    format!(
        "{}\nstdout: {}\nstderr: {}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Sends a signal.
pub(crate) fn kill(pid: i32, signal: &str) {
    let status = Command::new("kill")
        .args([&format!("-{signal}"), &pid.to_string()])
        .status()
        .unwrap();
    assert!(status.success());
}

/// Whether a process has ended and waits to be reaped.
pub(crate) fn is_zombie(pid: i32) -> bool {
    fs_err::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit(')')
            .next()
            .is_some_and(|rest| rest.trim_start().starts_with('Z'))
    })
}

/// Waits for a condition, for long enough.
pub(crate) fn wait_until(done: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(20) {
        if done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}
