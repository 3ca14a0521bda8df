//! Starting the daemon when a command needs it.
//!
//! One command at a time starts it (a lock file), in its own session, with its log in
//! `ROOT/daemon.log`. The command then waits until the socket answers; when the daemon ends
//! instead, its last `error:` line becomes the command's error.

use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fs_err::os::unix::fs::OpenOptionsExt as _;
use rustix::fs::FlockOperation;

use super::{Client, ClientError};
use crate::api;
use crate::holder::DETACHED;

/// How long a start may take: sweeping what a dead predecessor left can need many unmounts.
const LIMIT: Duration = Duration::from_secs(60);
/// Between two looks at the socket.
const STEP: Duration = Duration::from_millis(5);
/// A log that is longer, in bytes, makes way for a new one; one old log is kept.
const LOG_LIMIT: u64 = 4 << 20;
/// How much of the log's end is searched for an error.
const LOG_TAIL: u64 = 64 << 10;

/// A client of a running daemon of the node at `root`, started first if need be.
///
/// # Errors
/// When it cannot be started, speaks another version of the API, or lives in another mount
/// namespace, where its mounts are not visible to this process.
pub(crate) fn ensure(root: &Path) -> anyhow::Result<Client> {
    let client = Client::new(root)?;
    let info = match client.info() {
        Err(ClientError::NotRunning { .. }) => start(root, &client)?,
        other => other?,
    };
    if info.api != api::VERSION {
        bail!(
            "the daemon for {} speaks API version {}, this layerpack {} speaks {}: stop it (`layerpack daemon stop`) and retry",
            root.display(),
            info.api,
            env!("CARGO_PKG_VERSION"),
            api::VERSION
        );
    }
    let own = mount_namespace()?;
    if info.mount_namespace != own {
        bail!(
            "the daemon for {} runs in another mount namespace (process {}): its mounts cannot be seen here; use `nsenter -t {} -m`, or another --root",
            root.display(),
            info.pid,
            info.pid
        );
    }
    Ok(client)
}

/// Identifies the mount namespace of this process.
pub(crate) fn mount_namespace() -> anyhow::Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    Ok(fs_err::metadata("/proc/self/ns/mnt")?.ino())
}

fn start(root: &Path, client: &Client) -> anyhow::Result<api::Info> {
    let lock = fs_err::OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(root.join("daemon.start.lock"))
        .with_context(|| {
            format!(
                "cannot use {} for node state (run as root, or choose another --root)",
                root.display()
            )
        })?;
    rustix::fs::flock(lock.file(), FlockOperation::LockExclusive)
        .with_context(|| format!("cannot lock {}", lock.path().display()))?;
    // Another command may have started it meanwhile.
    match client.info() {
        Err(ClientError::NotRunning { .. }) => {}
        other => return Ok(other?),
    }
    let log = root.join(api::LOG_NAME);
    if fs_err::metadata(&log).is_ok_and(|file| file.len() > LOG_LIMIT) {
        fs_err::rename(&log, log.with_extension("log.old"))?;
    }
    let log = fs_err::OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(root.join(api::LOG_NAME))?;
    let from = log.metadata()?.len();
    let (log_file, log_path) = log.into_parts();
    let mut daemon = Command::new("/proc/self/exe")
        .arg0("layerpack")
        .arg("--root")
        .arg(root)
        .args(["daemon", "run", DETACHED])
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log_file.try_clone()?)
        .stderr(log_file)
        .spawn()
        .context("cannot start the daemon")?;
    let begun = Instant::now();
    while begun.elapsed() < LIMIT {
        match client.info() {
            Err(ClientError::NotRunning { .. }) => {}
            other => return Ok(other?),
        }
        if let Some(status) = daemon.try_wait().context("cannot watch the daemon")? {
            let said =
                last_error(&log_path, from).unwrap_or_else(|| format!("it ended with {status}"));
            bail!(
                "the daemon did not start: {said} (log: {})",
                log_path.display()
            );
        }
        std::thread::sleep(STEP);
    }
    // Not killed: it has a process of its own to end.
    if let Some(pid) = i32::try_from(daemon.id())
        .ok()
        .and_then(rustix::process::Pid::from_raw)
    {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    bail!(
        "the daemon did not answer within {} s (log: {})",
        LIMIT.as_secs(),
        log_path.display()
    );
}

/// The last `error:` line that the log gained since `from`.
pub(super) fn last_error(log: &Path, from: u64) -> Option<String> {
    let mut file = fs_err::File::open(log).ok()?;
    let end = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(from.max(end.saturating_sub(LOG_TAIL))))
        .ok()?;
    let mut bytes = Vec::new();
    file.take(LOG_TAIL).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    text.lines()
        .rev()
        .find_map(|line| line.strip_prefix("error: "))
        .map(str::to_owned)
}
