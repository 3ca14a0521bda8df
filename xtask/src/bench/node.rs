//! A node of a scenario's own: a directory, a daemon, mounts, and what the daemon counts.
//!
//! All goes through the command line and the daemon's socket, as a user's own programs would.
//! Whatever becomes of the scenario, dropping the node ends its sandboxes, mounts and daemon.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use layerpack_fixtures::guards::{ChildGuard, mounts_below};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal};
use serde_json::Value;

use super::measure::float;
use super::{Bench, remove};
use crate::process;

/// How long a daemon may take to answer for the first time.
const START_LIMIT: Duration = Duration::from_secs(20);
/// How long one call of the daemon's API may take.
const CALL_LIMIT: Duration = Duration::from_secs(90);

/// See the module's documentation.
pub(super) struct Node {
    binary: PathBuf,
    root: PathBuf,
    store: String,
    settings: Vec<(&'static str, String)>,
    daemon: Option<ChildGuard>,
}

impl Node {
    /// A node in `directory`, which is emptied; nothing runs yet.
    ///
    /// # Errors
    /// When the directory cannot be made anew.
    pub(super) fn new(bench: &Bench, directory: &Path, store: &str) -> Result<Self> {
        let node = Self {
            binary: bench.binary.clone(),
            root: directory.to_owned(),
            store: store.to_owned(),
            settings: Vec::new(),
            daemon: None,
        };
        node.unmount_all();
        remove(directory)?;
        remove(&node.places())?;
        fs_err::create_dir_all(directory)?;
        Ok(node)
    }

    /// A directory to mount something on, which this node takes care of.
    pub(super) fn place(&self, name: &str) -> PathBuf {
        self.places().join(name)
    }

    /// Beside the node's own directory, in which nothing else may be mounted.
    fn places(&self) -> PathBuf {
        let mut name = self.root.file_name().unwrap_or_default().to_owned();
        name.push("-mounts");
        self.root.with_file_name(name)
    }

    /// Takes down whatever is mounted, innermost first.
    fn unmount_all(&self) {
        for directory in [self.places(), self.root.clone()] {
            for mounted in mounts_below(&directory).iter().rev() {
                let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
                // Removing the directory says if one is left.
                let _ = rustix::mount::unmount(mounted, flags);
            }
        }
    }

    /// Sets a variable of the environment, for the daemon too.
    pub(super) fn set(&mut self, name: &'static str, value: impl Into<String>) {
        self.settings.push((name, value.into()));
    }

    /// The node's directory.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// `layerpack` for this node and its store.
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.binary);
        command
            .env("LAYERPACK_ROOT", &self.root)
            .env("LAYERPACK_STORE", &self.store)
            // What a client remembers would make a second cold start warmer than the first.
            .env("LAYERPACK_CACHE", "")
            .env_remove("LAYERPACK_STORE_OPTIONS")
            .env_remove("SOURCE_DATE_EPOCH");
        for (name, value) in &self.settings {
            command.env(name, value);
        }
        command.arg("--quiet");
        command
    }

    /// Runs a command and hands out what it prints.
    ///
    /// # Errors
    /// When it fails.
    pub(super) fn output(&self, arguments: &[&str]) -> Result<String> {
        process::output(self.command().args(arguments))
    }

    /// Runs a command that prints JSON.
    ///
    /// # Errors
    /// When it fails or prints something else.
    pub(super) fn json(&self, arguments: &[&str]) -> Result<Value> {
        let text = process::output(self.command().args(["-o", "json"]).args(arguments))?;
        serde_json::from_str(&text).with_context(|| format!("{arguments:?} printed {text:?}"))
    }

    /// Packs a directory as `KIND/NAME:1`.
    ///
    /// # Errors
    /// When that fails.
    pub(super) fn build(
        &self,
        kind: &str,
        name: &str,
        source: &Path,
        extra: &[&str],
    ) -> Result<Value> {
        let from = format!("dir:{}", source.display());
        let mut arguments = vec!["build", "--kind", kind, "--name", name];
        arguments.extend(["--version", "1", "--from", &from]);
        arguments.extend(extra);
        self.json(&arguments)
    }

    /// Starts the daemon as a child of this process and waits until it answers.
    ///
    /// # Errors
    /// When it does not; its log is then named.
    pub(super) fn start(&mut self) -> Result<()> {
        // One that was killed has to be gone first: it holds the directory until then.
        self.daemon = None;
        let log = self.root.join("bench-daemon.log");
        let file = || -> Result<std::fs::File> {
            let mut options = fs_err::OpenOptions::new();
            Ok(options.create(true).append(true).open(&log)?.into_parts().0)
        };
        let mut command = self.command();
        command
            .args(["daemon", "run"])
            .stdin(Stdio::null())
            .stdout(file()?)
            .stderr(file()?);
        self.daemon = Some(ChildGuard::spawn(&mut command)?);
        let begun = Instant::now();
        loop {
            if self.get("/v1/info").is_ok() {
                return Ok(());
            }
            let ended = self
                .daemon
                .as_mut()
                .is_some_and(|daemon| matches!(daemon.child().try_wait(), Ok(Some(_))));
            if ended || begun.elapsed() > START_LIMIT {
                bail!("the daemon does not start: {}", tail(&log));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops the daemon, by force if need be, and waits for its end.
    ///
    /// # Errors
    /// When it does not end.
    pub(super) fn stop(&mut self) -> Result<()> {
        if self.daemon.is_none() && !self.root.join("daemon.sock").exists() {
            return Ok(());
        }
        self.output(&["daemon", "stop", "--force"])?;
        if let Some(mut daemon) = self.daemon.take() {
            let begun = Instant::now();
            while matches!(daemon.child().try_wait(), Ok(None)) {
                if begun.elapsed() > START_LIMIT {
                    bail!("the daemon of {} does not end", self.root.display());
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(())
    }

    /// Kills the process that serves, as the kernel does when memory runs out, and waits until
    /// another one does: one that is started by what outlives it, or else by this.
    ///
    /// # Errors
    /// When none answers.
    pub(super) fn kill(&mut self) -> Result<()> {
        let old = self.pid()?;
        let pid = Pid::from_raw(old).context("the daemon says process 0")?;
        rustix::process::kill_process(pid, Signal::KILL)?;
        let begun = Instant::now();
        while begun.elapsed() < START_LIMIT {
            let ended = self
                .daemon
                .as_mut()
                .is_none_or(|daemon| matches!(daemon.child().try_wait(), Ok(Some(_))));
            if ended {
                return self.start();
            }
            if self.pid().is_ok_and(|new| new != old) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        bail!("nobody serves after process {old} was killed")
    }

    /// Mounts a stack on a directory, which is made if need be.
    ///
    /// # Errors
    /// When that fails.
    pub(super) fn mount(&self, layers: &[&str], target: &Path, options: &[&str]) -> Result<()> {
        fs_err::create_dir_all(target)?;
        let mut command = self.command();
        command.arg("mount").args(options).args(layers).arg(target);
        process::quietly(&mut command)
    }

    /// Takes a mount down.
    ///
    /// # Errors
    /// When it is in use.
    pub(super) fn umount(&self, target: &Path) -> Result<()> {
        process::quietly(self.command().arg("umount").arg(target))
    }

    /// The daemon's process, as it says itself.
    ///
    /// # Errors
    /// When it does not answer.
    pub(super) fn pid(&self) -> Result<i32> {
        let info: Value = serde_json::from_str(&self.get("/v1/info")?)?;
        let pid = info.get("pid").and_then(Value::as_i64);
        Ok(i32::try_from(pid.context("the daemon names no process")?)?)
    }

    /// What the daemon has used so far, as the kernel counts it.
    ///
    /// # Errors
    /// When it does not run.
    pub(super) fn usage(&self) -> Result<Usage> {
        let pid = self.pid()?;
        let mut usage = Usage::of(pid)?;
        // What was started may be another process than the one that serves, and stay beside it.
        let first = self.daemon.as_ref().map(ChildGuard::id);
        if let Some(first) = first.and_then(|first| i32::try_from(first).ok())
            && first != pid
            && let Ok(other) = Usage::of(first)
        {
            usage.cpu += other.cpu;
            usage.rss += other.rss;
            usage.peak += other.peak;
            usage.written += other.written;
        }
        Ok(usage)
    }

    /// The daemon's own counters.
    ///
    /// # Errors
    /// When it does not answer.
    pub(super) fn metrics(&self) -> Result<Metrics> {
        Ok(Metrics::parse(&self.get("/metrics")?))
    }

    /// Waits until the daemon knows that it has all of each layer, so that the kernel reads by itself.
    pub(super) fn wait_until_whole(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let mut whole = true;
            for entry in fs_err::read_dir(self.root.join("cache"))? {
                whole &= entry?.path().join("whole").exists();
            }
            if whole {
                return Ok(());
            }
            if begun.elapsed() > Duration::from_secs(60) {
                bail!("{} does not get whole", self.root.display());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The directory in which the node caches one layer; there must be just one.
    ///
    /// # Errors
    /// When there is none or more.
    pub(super) fn cached_layer(&self) -> Result<PathBuf> {
        let mut found = Vec::new();
        for entry in fs_err::read_dir(self.root.join("cache"))? {
            let path = entry?.path();
            if path.join("meta.erofs").is_file() {
                found.push(path);
            }
        }
        match (found.pop(), found.len()) {
            (Some(one), 0) => Ok(one),
            (_, others) => bail!("the node has {others} layers beside the one looked for"),
        }
    }

    /// Body of a reply to `GET`.
    ///
    /// # Errors
    /// When there is none, or it is an error.
    pub(super) fn get(&self, path: &str) -> Result<String> {
        self.call("GET", path, "")
    }

    /// Body of a reply to a request with a JSON body.
    ///
    /// # Errors
    /// When there is none, or it is an error.
    pub(super) fn call(&self, method: &str, path: &str, body: &str) -> Result<String> {
        let mut stream = UnixStream::connect(self.root.join("daemon.sock"))?;
        stream.set_read_timeout(Some(CALL_LIMIT))?;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply)?;
        let reply = String::from_utf8(reply)?;
        let (head, body) = reply
            .split_once("\r\n\r\n")
            .context("the daemon hung up without a reply")?;
        if !head.starts_with("HTTP/1.1 200") {
            bail!("{method} {path}: {body}");
        }
        if head
            .to_ascii_lowercase()
            .contains("transfer-encoding: chunked")
        {
            bail!("{path} is sent in chunks, which this client does not read");
        }
        Ok(body.to_owned())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Each may fail, since what is up is not known; the guard and the mount table have the
        // last word.
        if self.root.join("daemon.sock").exists() {
            let list = self.json(&["sandbox", "ls"]).unwrap_or_default();
            for sandbox in list.as_array().into_iter().flatten() {
                if let Some(id) = sandbox.get("id").and_then(Value::as_str) {
                    let _ = self.output(&["sandbox", "rm", "--force", id]);
                }
            }
            let _ = self.stop();
        }
        self.daemon = None;
        self.unmount_all();
    }
}

/// The last lines of a file.
fn tail(path: &Path) -> String {
    let text = fs_err::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().rev().take(5).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}

/// What a process has used since it started.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Usage {
    /// Processor seconds.
    pub(super) cpu: f64,
    /// Resident memory now, in bytes.
    pub(super) rss: u64,
    /// The largest it ever was.
    pub(super) peak: u64,
    /// Bytes that it caused to be written to disk.
    pub(super) written: u64,
}

impl Usage {
    /// Of the process `pid`.
    ///
    /// # Errors
    /// When it is gone.
    pub(super) fn of(pid: i32) -> Result<Self> {
        let read = |file: &str| fs_err::read_to_string(format!("/proc/{pid}/{file}"));
        let field = |text: &str, name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        };
        let status = read("status")?;
        // Of the fields after the name in brackets, the 12th and 13th are ticks of user and system.
        let stat = read("stat")?;
        let ticks: u64 = stat
            .rsplit_once(')')
            .into_iter()
            .flat_map(|(_, rest)| rest.split_whitespace().skip(11).take(2))
            .filter_map(|field| field.parse::<u64>().ok())
            .sum();
        let io = read("io")?;
        Ok(Self {
            cpu: float(ticks) / float(rustix::param::clock_ticks_per_second()),
            rss: field(&status, "VmRSS").unwrap_or_default() * 1024,
            peak: field(&status, "VmHWM").unwrap_or_default() * 1024,
            written: field(&io, "write_bytes").context("no write_bytes")?,
        })
    }
}

/// The page that the daemon gives to Prometheus.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    values: BTreeMap<String, f64>,
}

impl Metrics {
    fn parse(text: &str) -> Self {
        let values = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| {
                let (name, value) = line.rsplit_once(' ')?;
                Some((name.to_owned(), value.parse().ok()?))
            })
            .collect();
        Self { values }
    }

    /// A counter without labels; 0 if it is not there.
    pub(super) fn get(&self, name: &str) -> f64 {
        self.values.get(name).copied().unwrap_or_default()
    }

    /// The sum over all labels of a counter.
    pub(super) fn sum(&self, name: &str) -> f64 {
        let labelled = format!("{name}{{");
        self.values
            .iter()
            .filter(|(key, _)| *key == name || key.starts_with(&labelled))
            .map(|(_, value)| value)
            .sum()
    }

    /// The bound below which the share `part` of a histogram's observations lies; `None` without
    /// observations, infinite if it lies beyond the last bound.
    pub(super) fn quantile(&self, name: &str, part: f64) -> Option<f64> {
        let prefix = format!("{name}_bucket{{le=\"");
        let mut buckets: Vec<(f64, f64)> = self
            .values
            .iter()
            .filter_map(|(key, count)| {
                let bound = key.strip_prefix(&prefix)?.strip_suffix("\"}")?;
                let bound = match bound {
                    "+Inf" => f64::INFINITY,
                    bound => bound.parse().ok()?,
                };
                Some((bound, *count))
            })
            .collect();
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let all = buckets
            .last()
            .map(|bucket| bucket.1)
            .filter(|all| *all > 0.0)?;
        buckets
            .iter()
            .find(|bucket| bucket.1 >= all * part)
            .map(|bucket| bucket.0)
    }
}

/// Drops what the kernel has cached of files, directories and inodes.
///
/// # Errors
/// When this is not root.
pub(super) fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    fs_err::write("/proc/sys/vm/drop_caches", "3")?;
    Ok(())
}

/// A figure of `/proc/meminfo`, in bytes.
///
/// # Errors
/// When the kernel does not have it.
pub(super) fn memory(field: &str) -> Result<u64> {
    let text = fs_err::read_to_string("/proc/meminfo")?;
    let kib: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .with_context(|| format!("/proc/meminfo has no {field}"))?;
    Ok(kib * 1024)
}

/// Bails unless this is root.
///
/// # Errors
/// When it is not.
pub(super) fn need_root(what: &str) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("{what} needs root");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_bounds_of_buckets() {
        let metrics = Metrics::parse(
            "# TYPE w histogram\nw_bucket{le=\"0.1\"} 90\nw_bucket{le=\"1\"} 99\n\
             w_bucket{le=\"+Inf\"} 100\nw_count 100\ne{kind=\"a\"} 1\ne{kind=\"b\"} 2\n",
        );
        assert_eq!(metrics.quantile("w", 0.5), Some(0.1));
        assert_eq!(metrics.quantile("w", 0.99), Some(1.0));
        assert_eq!(metrics.quantile("w", 0.999), Some(f64::INFINITY));
        assert_eq!(metrics.quantile("other", 0.5), None);
        assert!((metrics.sum("e") - 3.0).abs() < f64::EPSILON);
    }

    #[test]
    fn this_process_has_used_something() {
        let own = i32::try_from(std::process::id()).unwrap();
        let usage = Usage::of(own).unwrap();
        assert!(usage.rss > 0 && usage.peak >= usage.rss);
    }
}
