//! Records of what `mount` mounted, so that `umount` finds the lease and the scratch directory
//! also after the daemon or the machine went down.
//!
//! `ROOT/mounts/<lease>/` holds `record.json` and, for `--rw`, the overlay's `upper` and `work`.
//! The directory's creation is the claim on a mount point: two `mount` of one place cannot both
//! get it. Who works on a place holds a lock on its directory, so that a record without a mount is
//! known for one that was left behind, or for one whose mount is on its way. It is removed last of all.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use layerpack_store::Digest;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Version of `record.json`.
const FORMAT: u32 = 1;

/// Much longer than it takes to write a record.
const MOMENT: Duration = Duration::from_secs(2);

/// What was mounted where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    format: u32,
    /// The mount point, absolute, without symbolic links.
    pub(crate) directory: PathBuf,
    /// Names of the layers, bottom first.
    pub(crate) layers: Vec<String>,
    /// Whether changes are possible.
    pub(crate) writable: bool,
}

/// Says that somebody works on a place; ends with its process at the latest.
#[derive(Debug)]
pub(crate) struct Busy {
    _lock: OwnedFd,
}

/// The node's directory for one mount point.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    path: PathBuf,
    lease: String,
}

impl Place {
    /// The place for a mount point, whose path must be absolute and free of symbolic links.
    pub(crate) fn of(root: &Path, directory: &Path) -> Self {
        let digest = Digest::of(directory.as_os_str().as_bytes()).hex();
        let lease = format!("mount-{}", digest.get(..16).unwrap_or(&digest));
        Self {
            path: root.join("mounts").join(&lease),
            lease,
        }
    }

    /// The place that a lease belongs to, by the lease's id.
    pub(crate) fn of_lease(root: &Path, lease: &str) -> Self {
        Self {
            path: root.join("mounts").join(lease),
            lease: lease.to_owned(),
        }
    }

    /// How long ago it was claimed; `None` when it is not, or its clock cannot be read.
    pub(crate) fn age(&self) -> Option<Duration> {
        fs_err::metadata(&self.path)
            .ok()?
            .modified()
            .ok()?
            .elapsed()
            .ok()
    }

    /// Whether it was claimed and its record lost, when the machine stopped or a command was killed: it is
    /// written at once otherwise, which is waited for.
    pub(crate) fn is_lost(&self) -> bool {
        let record = self.path.join("record.json");
        loop {
            if fs_err::metadata(&record).is_ok_and(|record| record.len() > 0) {
                return false;
            }
            match self.age() {
                None => return false,
                Some(age) if age >= MOMENT => return true,
                Some(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Id of the lease that the mount holds.
    pub(crate) fn lease(&self) -> &str {
        &self.lease
    }

    /// The overlay's upper and work directories.
    pub(crate) fn upper_and_work(&self) -> (PathBuf, PathBuf) {
        (self.path.join("upper"), self.path.join("work"))
    }

    /// Claims the place and writes its record.
    ///
    /// # Errors
    /// `AlreadyExists` in the chain when it is claimed already.
    pub(crate) fn claim(
        &self,
        directory: &Path,
        layers: Vec<String>,
        writable: bool,
    ) -> anyhow::Result<Busy> {
        if let Some(parent) = self.path.parent() {
            fs_err::create_dir_all(parent)?;
        }
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&self.path)
            .with_context(|| format!("cannot create {}", self.path.display()))?;
        // Before the record: who finds one without a lock, and no mount, may take the place.
        let busy = self.lock()?.context("another process took it")?;
        let record = Record {
            format: FORMAT,
            directory: directory.to_owned(),
            layers,
            writable,
        };
        let written = self.fill(&record);
        if written.is_err() {
            let _ = self.remove();
        }
        written.map(|()| busy)
    }

    /// Takes the lock of a place that is claimed; `None` if somebody works on it, or has just removed
    /// it.
    ///
    /// # Errors
    /// If its directory cannot be opened or locked.
    pub(crate) fn lock(&self) -> anyhow::Result<Option<Busy>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let what = || format!("cannot lock {}", self.path.display());
        let lock = match rustix::fs::open(&self.path, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened.with_context(what)?,
        };
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Ok(None),
            locked => locked.with_context(what)?,
        }
        // Who had the lock before may have removed the directory.
        let ours = rustix::fs::fstat(&lock).with_context(what)?;
        let there = rustix::fs::stat(&self.path).ok();
        let same =
            there.is_some_and(|there| (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino));
        Ok(same.then_some(Busy { _lock: lock }))
    }

    fn fill(&self, record: &Record) -> anyhow::Result<()> {
        fs_err::write(
            self.path.join("record.json"),
            serde_json::to_vec_pretty(record)?,
        )?;
        if record.writable {
            let (upper, work) = self.upper_and_work();
            fs_err::create_dir(upper)?;
            fs_err::create_dir(work)?;
        }
        Ok(())
    }

    /// The record, if the place is claimed.
    pub(crate) fn record(&self) -> anyhow::Result<Option<Record>> {
        let path = self.path.join("record.json");
        let bytes = match fs_err::read(&path) {
            Ok(bytes) => bytes,
            // Claimed by a `mount` that died before it wrote the record.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        // The machine stopped before it reached the disk.
        if bytes.is_empty() {
            return Ok(None);
        }
        let record: Record = serde_json::from_slice(&bytes).with_context(|| {
            format!(
                "{} is damaged: delete its directory after `umount`",
                path.display()
            )
        })?;
        if record.format != FORMAT {
            bail!(
                "{} was written by another version of layerpack (format {})",
                path.display(),
                record.format
            );
        }
        Ok(Some(record))
    }

    /// Gives the place up, with all that was written through the mount.
    pub(crate) fn remove(&self) -> anyhow::Result<()> {
        match fs_err::remove_dir_all(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e.into()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_claimed_once() {
        let root = tempfile::tempdir().unwrap();
        let directory = Path::new("/mnt/x");
        let place = Place::of(root.path(), directory);
        assert!(crate::api::valid_lease(place.lease()));
        assert_eq!(place.record().unwrap(), None);
        assert!(place.lock().unwrap().is_none());
        let busy = place
            .claim(directory, vec!["base/a:1".into()], true)
            .unwrap();
        assert!(place.lock().unwrap().is_none(), "a mount is on its way");
        let again = place
            .claim(directory, vec!["base/b:1".into()], true)
            .unwrap_err();
        assert!(format!("{again:#}").contains("mounts"), "{again:#}");
        let record = place.record().unwrap().unwrap();
        assert_eq!(record.layers, ["base/a:1"]);
        assert!(place.upper_and_work().0.is_dir());
        drop(busy);
        let left = place.lock().unwrap().unwrap();
        place.remove().unwrap();
        // A directory that is not that of the lock any more.
        place
            .claim(directory, vec!["base/a:1".into()], false)
            .unwrap();
        drop(left);
        assert!(place.lock().unwrap().is_some());
        place.remove().unwrap();
        place.remove().unwrap();
        assert_eq!(place.record().unwrap(), None);
    }

    #[test]
    fn places_differ_by_directory() {
        let root = Path::new("/r");
        assert_ne!(
            Place::of(root, Path::new("/a")).lease(),
            Place::of(root, Path::new("/b")).lease()
        );
    }
}
