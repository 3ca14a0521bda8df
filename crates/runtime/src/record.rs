//! What is on disk about sandboxes.
//!
//! ```text
//! ROOT/.lock               held shared while a directory is being made, alone while sweeping
//! ROOT/names/NAME          symbolic link, its text is the id
//! ROOT/ID/lock             held while a launcher works on the sandbox (one-shot: all its life)
//! ROOT/ID/freeze.lock      held while somebody keeps it frozen
//! ROOT/ID/pack.lock        held while somebody makes a snapshot of it
//! ROOT/ID/stopped          there while it is halted by signals
//! ROOT/ID/record.json      see [`Record`]
//! ROOT/ID/upper, work      of the overlay
//! ROOT/ID/channel          shown inside as /dev/layerpack, if the specification says so
//! ROOT/.deleting-ID        on its way out
//! ```
//!
//! All locks are `flock`s, so that they end with their holder. The directory
//! is made before the name, so a name without directory is stale. Nothing is
//! synced: a sandbox does not survive a crash of the machine.

use std::io::{ErrorKind, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use crate::error::{Result, RuntimeError};
use crate::mounts::Directories;
use crate::spec::{SandboxId, SandboxName, SandboxSpec};

const FORMAT: u32 = 1;
/// Largest record that is read, in bytes.
const RECORD_LIMIT: u64 = 4 << 20;
/// Where the launching program is shown in a channel's directory.
const PROGRAM: &str = "pack_diff";
/// Begin of the names of directories that are being deleted.
pub(crate) const DELETING: &str = ".deleting-";

/// PID 1 of a sandbox, so that it cannot be confused with a later process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InitProcess {
    pub(crate) pid: i32,
    /// Field 22 of `/proc/PID/stat`, in clock ticks since boot.
    pub(crate) start_time: u64,
    pub(crate) boot_id: String,
}

/// A sandbox on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    format: u32,
    pub(crate) spec: SandboxSpec,
    created_ms: u64,
    pub(crate) one_shot: bool,
    /// A one-shot sandbox whose files stay when it has ended, or its launcher has died.
    #[serde(default)]
    pub(crate) keep: bool,
    /// Absent while it is being made.
    pub(crate) init: Option<InitProcess>,
}

/// A lock that is held until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock(OwnedFd);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough: another thread's child may hold a copy of the
        // descriptor for a moment, and with it the lock.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl Record {
    pub(crate) fn new(spec: SandboxSpec, one_shot: bool, keep: bool) -> Self {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            format: FORMAT,
            spec,
            created_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            one_shot,
            keep,
            init: None,
        }
    }

    /// It goes away with its launcher, however that ends.
    pub(crate) fn goes_with_launcher(&self) -> bool {
        self.one_shot && !self.keep
    }

    pub(crate) fn created(&self) -> SystemTime {
        UNIX_EPOCH + std::time::Duration::from_millis(self.created_ms)
    }
}

impl InitProcess {
    /// Describes the live process `pid`.
    pub(crate) fn of(pid: Pid) -> Result<Self> {
        let raw = pid.as_raw_nonzero().get();
        Ok(Self {
            pid: raw,
            start_time: start_time(raw).unwrap_or(0),
            boot_id: boot_id()?,
        })
    }

    /// The process, if it still lives.
    pub(crate) fn alive(&self) -> Option<Pid> {
        (start_time(self.pid) == Some(self.start_time) && boot_id().ok()? == self.boot_id)
            .then(|| Pid::from_raw(self.pid))
            .flatten()
    }
}

/// When the process was started, unless it is gone or only waits to be reaped.
fn start_time(pid: i32) -> Option<u64> {
    let stat = fs_err::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain anything; what follows is plain.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    if matches!(fields.next()?, "Z" | "X" | "x") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

fn boot_id() -> Result<String> {
    Ok(fs_err::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

/// The directory of all sandboxes.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    root: PathBuf,
}

impl Layout {
    /// Makes the directories that all sandboxes share.
    pub(crate) fn open(root: &Path) -> Result<Self> {
        fs_err::create_dir_all(root.join("names"))?;
        rustix::fs::chmod(root, Mode::from_raw_mode(0o700))
            .map_err(|e| std::io::Error::other(format!("{}: {e}", root.display())))?;
        Ok(Self {
            root: root.to_path_buf(),
        })
    }

    pub(crate) fn dir(&self, id: &SandboxId) -> PathBuf {
        self.root.join(id.as_str())
    }

    pub(crate) fn directories(&self, id: &SandboxId) -> Directories {
        let dir = self.dir(id);
        Directories {
            upper: dir.join("upper"),
            work: dir.join("work"),
            channel: dir.join("channel"),
            scratch: dir.join("scratch"),
        }
    }

    fn name_link(&self, name: &SandboxName) -> PathBuf {
        self.root.join("names").join(name.as_str())
    }

    /// Makes a sandbox's directory and takes its lock, then its name.
    pub(crate) fn make(&self, spec: &SandboxSpec) -> Result<Lock> {
        let dir = self.dir(&spec.id);
        let lock = {
            let _shared = self.lock_all(FlockOperation::LockShared)?;
            match fs_err::create_dir(&dir) {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                    return Err(RuntimeError::IdTaken(spec.id.clone()));
                }
                Err(e) => return Err(e.into()),
            }
            self.lock(&spec.id)?.ok_or(RuntimeError::Busy {
                id: spec.id.clone(),
                by: "a sweep",
            })?
        };
        let rest = || -> Result<()> {
            if let Some(name) = &spec.name {
                self.take_name(name, &spec.id)?;
            }
            fs_err::create_dir(dir.join("upper"))?;
            fs_err::create_dir(dir.join("work"))?;
            if spec.channel {
                let channel = dir.join("channel");
                fs_err::create_dir(&channel)?;
                // Whatever the caller's umask is: every user of the sandbox comes here.
                rustix::fs::chmod(&channel, Mode::from_raw_mode(0o755))
                    .map_err(std::io::Error::from)?;
                fs_err::write(channel.join(PROGRAM), "")?;
            }
            Ok(())
        };
        match rest() {
            Ok(()) => Ok(lock),
            Err(e) => {
                let _ = self.delete(spec);
                Err(e)
            }
        }
    }

    fn take_name(&self, name: &SandboxName, id: &SandboxId) -> Result<()> {
        let link = self.name_link(name);
        for _ in 0..2 {
            match rustix::fs::symlink(id.as_str(), &link) {
                Ok(()) => return Ok(()),
                Err(Errno::EXIST) => {}
                Err(e) => return Err(std::io::Error::from(e).into()),
            }
            let owner = self.resolve_name(name.as_str()).unwrap_or_default();
            if owner.is_empty() || self.root.join(&owner).exists() {
                return Err(RuntimeError::NameTaken {
                    name: name.clone(),
                    owner,
                });
            }
            let _ = rustix::fs::unlink(&link);
        }
        Err(RuntimeError::NameTaken {
            name: name.clone(),
            owner: "another".to_owned(),
        })
    }

    fn resolve_name(&self, name: &str) -> Option<String> {
        let text = fs_err::read_link(self.root.join("names").join(name)).ok()?;
        text.to_str().map(str::to_owned)
    }

    /// The id that a user means by a name or an id.
    pub(crate) fn find(&self, name_or_id: &str) -> Result<SandboxId> {
        let not_found = || RuntimeError::NotFound(name_or_id.to_owned());
        let id: SandboxId = name_or_id.parse().map_err(|_| not_found())?;
        if let Some(owner) = self.resolve_name(name_or_id)
            && self.root.join(&owner).exists()
        {
            return owner.parse().map_err(|_| not_found());
        }
        if name_or_id != "names" && self.dir(&id).is_dir() {
            Ok(id)
        } else {
            Err(not_found())
        }
    }

    /// All ids that have a directory, sorted.
    pub(crate) fn ids(&self) -> Result<Vec<SandboxId>> {
        let mut ids = Vec::new();
        for entry in fs_err::read_dir(&self.root)? {
            let name = entry?.file_name();
            if let Some(name) = name.to_str().filter(|name| *name != "names")
                && let Ok(id) = name.parse()
            {
                ids.push(id);
            }
        }
        ids.sort();
        Ok(ids)
    }

    /// Left-overs of interrupted deletions.
    pub(crate) fn deleting(&self) -> Result<Vec<PathBuf>> {
        let mut paths = Vec::new();
        for entry in fs_err::read_dir(&self.root)? {
            let entry = entry?;
            if entry
                .file_name()
                .as_encoded_bytes()
                .starts_with(DELETING.as_bytes())
            {
                paths.push(entry.path());
            }
        }
        Ok(paths)
    }

    pub(crate) fn lock_all(&self, operation: FlockOperation) -> Result<Lock> {
        let fd = open_lock(&self.root.join(".lock"))?;
        rustix::io::retry_on_intr(|| flock(&fd, operation)).map_err(std::io::Error::from)?;
        Ok(Lock(fd))
    }

    /// Takes the lock of a sandbox; `None` if somebody holds it.
    pub(crate) fn lock(&self, id: &SandboxId) -> Result<Option<Lock>> {
        try_lock(&self.dir(id).join("lock"))
    }

    /// Takes the right to freeze a sandbox; `None` if somebody has it.
    pub(crate) fn freeze_lock(&self, id: &SandboxId) -> Result<Option<Lock>> {
        try_lock(&self.dir(id).join("freeze.lock"))
    }

    /// Takes the right to pack a sandbox; `None` if somebody has it, and still has after `limit`.
    pub(crate) fn pack_lock(&self, id: &SandboxId, limit: Duration) -> Result<Option<Lock>> {
        lock_within(&self.dir(id).join("pack.lock"), limit)
    }

    pub(crate) fn write(&self, record: &Record) -> Result<()> {
        let dir = self.dir(&record.spec.id);
        let (path, new) = (dir.join("record.json"), dir.join("record.json.new"));
        let bytes = serde_json::to_vec(record).map_err(|e| RuntimeError::Record {
            id: record.spec.id.clone(),
            path: path.clone(),
            problem: e.to_string(),
        })?;
        fs_err::write(&new, bytes)?;
        fs_err::rename(&new, &path)?;
        Ok(())
    }

    /// The record of a sandbox; `None` if it has none (yet).
    pub(crate) fn read(&self, id: &SandboxId) -> Result<Option<Record>> {
        let path = self.dir(id).join("record.json");
        let mut bytes = Vec::new();
        match fs_err::File::open(&path) {
            Ok(file) => file.take(RECORD_LIMIT).read_to_end(&mut bytes)?,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let damaged = |problem: String| RuntimeError::Record {
            id: id.clone(),
            path: path.clone(),
            problem,
        };
        let record: Record = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
        if record.format != FORMAT || record.spec.id != *id {
            return Err(damaged(
                "it is of another format or another sandbox".to_owned(),
            ));
        }
        Ok(Some(record))
    }

    /// Gives the name free and deletes the directory.
    pub(crate) fn delete(&self, spec: &SandboxSpec) -> Result<()> {
        if let Some(name) = &spec.name
            && self.resolve_name(name.as_str()).as_deref() == Some(spec.id.as_str())
        {
            let _ = rustix::fs::unlink(self.name_link(name));
        }
        self.delete_dir(&spec.id)
    }

    /// Gives every name of a sandbox free whose record does not tell it, and
    /// deletes the directory.
    pub(crate) fn delete_unknown(&self, id: &SandboxId) -> Result<()> {
        for entry in fs_err::read_dir(self.root.join("names"))? {
            let link = entry?.path();
            if fs_err::read_link(&link).is_ok_and(|owner| owner.as_os_str() == id.as_str()) {
                let _ = rustix::fs::unlink(&link);
            }
        }
        self.delete_dir(id)
    }

    /// Deletes the directory of a sandbox.
    fn delete_dir(&self, id: &SandboxId) -> Result<()> {
        let away = self.root.join(format!("{DELETING}{id}"));
        match rustix::fs::rename(self.dir(id), &away) {
            Ok(()) | Err(Errno::NOENT) => {}
            // An interrupted deletion of the same id is in the way.
            Err(Errno::NOTEMPTY | Errno::EXIST) => {
                crate::delete::tree(&away)?;
                rustix::fs::rename(self.dir(id), &away).map_err(std::io::Error::from)?;
            }
            Err(e) => return Err(std::io::Error::from(e).into()),
        }
        crate::delete::tree(&away)
    }
}

fn open_lock(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))
        .map_err(|e| std::io::Error::other(format!("locking {}: {e}", path.display())).into())
}

/// Tries again for a while. Whoever asks anew after each end (a loop inside a sandbox) has to start a
/// program for it, and comes too late.
fn lock_within(path: &Path, limit: Duration) -> Result<Option<Lock>> {
    let deadline = Instant::now() + limit;
    loop {
        match try_lock(path)? {
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
            taken => return Ok(taken),
        }
    }
}

fn try_lock(path: &Path) -> Result<Option<Lock>> {
    let fd = open_lock(path)?;
    match rustix::io::retry_on_intr(|| flock(&fd, FlockOperation::NonBlockingLockExclusive)) {
        Ok(()) => Ok(Some(Lock(fd))),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(std::io::Error::from(e).into()),
    }
}
