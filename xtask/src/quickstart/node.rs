//! The quickstart's own node: its root directory, its store, and taking all of it down.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal};
use serde_json::Value;

use super::Places;
use crate::process;
use crate::steps::say;

/// How long processes of ours get to be gone once they were told to.
const GONE: Duration = Duration::from_secs(10);

/// The release binary with the quickstart's root and store.
#[derive(Debug)]
pub(super) struct Node {
    binary: PathBuf,
    root: PathBuf,
    store: PathBuf,
    places: Places,
}

impl Node {
    pub(super) fn new(binary: PathBuf, places: &Places) -> Self {
        Self {
            binary,
            root: places.node(),
            store: places.store(),
            places: places.clone(),
        }
    }

    /// `layerpack` with these arguments, and nothing of the caller's own settings.
    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command
            .env("LAYERPACK_ROOT", &self.root)
            .env("LAYERPACK_STORE", &self.store)
            .env("LAYERPACK_CACHE", "")
            .env_remove("SOURCE_DATE_EPOCH");
        // Progress redraws a line; in a log it would be noise.
        if !std::io::stderr().is_terminal() {
            command.arg("--quiet");
        }
        command.args(arguments);
        command
    }

    /// Runs a command that prints JSON; its progress is shown.
    pub(super) fn json(&self, arguments: &[&str]) -> Result<Value> {
        parse(&mut self.command(arguments))
    }

    /// The same against another store.
    pub(super) fn json_in(&self, store: &Path, arguments: &[&str]) -> Result<Value> {
        parse(self.command(arguments).env("LAYERPACK_STORE", store))
    }

    /// Runs a command whose output is the user's to see.
    pub(super) fn show(&self, arguments: &[&str]) -> Result<()> {
        process::run(self.command(arguments).stdin(Stdio::null()))
    }

    /// Runs a command and hands out what it prints.
    pub(super) fn output(&self, arguments: &[&str]) -> Result<String> {
        process::output(&mut self.command(arguments))
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Makes the node as new: no cache, no state. Nothing may be up.
    pub(super) fn reset(&self) -> Result<()> {
        for path in [
            self.root.clone(),
            self.places.mounts(),
            self.places.second_store(),
        ] {
            if path.exists() {
                fs_err::remove_dir_all(&path)?;
            }
        }
        fs_err::create_dir_all(self.places.mounts())?;
        Ok(())
    }

    /// Ends sandboxes, unmounts, stops the daemon; then makes sure of it, by the mount table and
    /// the process list, so that it also works on what a killed run left.
    pub(super) fn teardown(&self) -> Result<()> {
        if self.binary.is_file() && self.root.is_dir() {
            self.ask();
        }
        for process in self.processes()? {
            say(format!("ending process {process} of an earlier run"));
            let pid = Pid::from_raw(process).context("0 is no process")?;
            // Gone already is as good.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        let started = Instant::now();
        while !self.processes()?.is_empty() {
            if started.elapsed() > GONE {
                bail!(
                    "processes of {} do not end: {:?}",
                    self.root.display(),
                    self.processes()?
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        unmount_below(&self.places.work)
    }

    /// The polite part: each command may fail, since what is up is not known.
    fn ask(&self) {
        let quiet = |arguments: &[&str]| {
            process::succeeds(&mut self.command(arguments));
        };
        let listing = self
            .command(&["sandbox", "ls", "-o", "json"])
            .stderr(Stdio::null())
            .output()
            .ok()
            .and_then(|output| serde_json::from_slice::<Value>(&output.stdout).ok());
        let sandboxes = listing.as_ref().and_then(Value::as_array);
        for sandbox in sandboxes.into_iter().flatten() {
            if let Some(id) = sandbox.pointer("/id").and_then(Value::as_str) {
                quiet(&["sandbox", "rm", "--force", id]);
            }
        }
        for mounted in layerpack_fixtures::guards::mounts_below(&self.places.mounts()) {
            if let Some(mounted) = mounted.to_str() {
                quiet(&["umount", "--lazy", mounted]);
            }
        }
        if self.root.join("daemon.sock").exists() {
            quiet(&["daemon", "stop", "--force"]);
        }
    }

    /// Ids of `layerpack` processes that work for this node: by their environment or arguments.
    fn processes(&self) -> Result<Vec<i32>> {
        let root = self.root.as_os_str().as_encoded_bytes();
        let variable = [b"LAYERPACK_ROOT=", root].concat();
        let mut found = Vec::new();
        for entry in fs_err::read_dir("/proc")?.filter_map(Result::ok) {
            let Some(pid) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            let name = fs_err::read(entry.path().join("comm")).unwrap_or_default();
            if !name.starts_with(b"layerpack") {
                continue;
            }
            let has = |file: &str, wanted: &[u8]| {
                let bytes = fs_err::read(entry.path().join(file)).unwrap_or_default();
                bytes.split(|&byte| byte == 0).any(|part| part == wanted)
            };
            if has("environ", &variable) || has("cmdline", root) {
                found.push(pid);
            }
        }
        Ok(found)
    }
}

/// Takes down every mount at or below `path`, innermost first.
pub(super) fn unmount_below(path: &Path) -> Result<()> {
    for mounted in layerpack_fixtures::guards::mounts_below(path).iter().rev() {
        let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
        rustix::mount::unmount(mounted, flags)
            .with_context(|| format!("cannot unmount {}", mounted.display()))?;
        say(format!("taken down: the mount on {}", mounted.display()));
    }
    Ok(())
}

/// Removes the control groups called `layerpack` if no sandbox is in them.
pub(super) fn remove_empty_cgroups() -> Result<()> {
    let table = fs_err::read("/proc/self/mountinfo")?;
    for line in String::from_utf8_lossy(&table).lines() {
        let Some((front, back)) = line.split_once(" - ") else {
            continue;
        };
        if back.starts_with("cgroup") {
            let mountpoint = front.split(' ').nth(4).unwrap_or_default();
            // Fails where it is in use or was never made: both are as they should be.
            let _ = fs_err::remove_dir(Path::new(mountpoint).join("layerpack"));
        }
    }
    Ok(())
}

fn parse(command: &mut Command) -> Result<Value> {
    let text = process::output(command)?;
    serde_json::from_str(&text)
        .with_context(|| format!("`{}` printed no JSON", process::line(command)))
}

/// A number in a command's JSON.
pub(super) fn number(value: &Value, pointer: &str) -> Result<u64> {
    value
        .pointer(pointer)
        .and_then(Value::as_u64)
        .with_context(|| format!("no number at {pointer} in {value}"))
}

/// A text in a command's JSON.
pub(super) fn text<'a>(value: &'a Value, pointer: &str) -> Result<&'a str> {
    value
        .pointer(pointer)
        .and_then(Value::as_str)
        .with_context(|| format!("no text at {pointer} in {value}"))
}
