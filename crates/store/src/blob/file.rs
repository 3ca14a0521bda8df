//! Objects as files of a directory: the local store, and any shared POSIX filesystem.
//!
//! An object is written to a temporary, synced, then given its name by `link()`, which creates a
//! name or fails and does so on NFS too; its directory is synced last. No locks are taken and no
//! rename decides a race. Temporaries of processes that died are removed: of this machine's when it
//! is known that they are dead, of others' once they are a day old by the filesystem's own clock.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write as _};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use fs_err as fs;
use fs_err::os::unix::fs::FileExt;

use super::disk::{Disk, System};
use super::{BlobStore, BlobWriter, Leftovers, ObjectInfo, PutMode, PutOutcome};
use crate::buffers;
use crate::error::{Result, StoreError};
use crate::holder::Holder;
use crate::key::Key;

/// Age at which a temporary is taken for one of a dead process.
const STALE: Duration = Duration::from_secs(24 * 60 * 60);
const TEMPORARIES: &str = "tmp";
/// What is given up when the disk is full, so that garbage can be collected. No key begins so.
const RESERVE: &str = ".reserve";
/// Its size in bytes: a lease and a list of a few hundred objects.
const RESERVE_LEN: usize = 64 << 10;
/// A stream's bytes are synced so many at a time while more come, so that its end has not to wait
/// for all of them.
const AHEAD: u64 = 4 << 20;
/// Directories that are looked for beside one whose name is synced.
const MOST_FAMILIES: usize = 64;

/// A store in a directory.
#[derive(Debug)]
pub struct FileStore {
    root: PathBuf,
    disk: Arc<dyn Disk>,
    swept: AtomicBool,
    /// Directories known to exist durably.
    durable: Mutex<HashSet<PathBuf>>,
}

impl FileStore {
    /// A store in the directory `root`, which need not exist yet: the first write creates it.
    /// Nothing is read or created here.
    ///
    /// # Errors
    /// If a relative `root` cannot be made absolute.
    pub fn new(root: impl Into<PathBuf>) -> Result<Self> {
        Self::on(root.into(), Arc::new(System))
    }

    /// The same on a filesystem that records or fails.
    pub(crate) fn on(root: PathBuf, disk: Arc<dyn Disk>) -> Result<Self> {
        let absolute = std::path::absolute(&root).map_err(|e| StoreError::InvalidUrl {
            url: root.display().to_string(),
            why: format!("it cannot be made an absolute path: {e}"),
        })?;
        Ok(Self {
            root: absolute,
            disk,
            swept: AtomicBool::new(false),
            durable: Mutex::new(HashSet::new()),
        })
    }

    /// The store's directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.root.join(key.as_str())
    }

    fn fail(&self, operation: &'static str, key: &str, source: io::Error) -> StoreError {
        let (store, key) = (self.url(), key.to_owned());
        if matches!(
            source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        ) {
            StoreError::NoSpace { store, key, source }
        } else {
            StoreError::Io {
                operation,
                store,
                key,
                source,
            }
        }
    }

    /// True if the error means that there is no such object. A store whose root is not a
    /// directory has not been looked into: that stays an error.
    fn is_absent(&self, error: &io::Error) -> bool {
        match error.kind() {
            io::ErrorKind::NotFound => true,
            io::ErrorKind::NotADirectory => self.root.is_dir(),
            _ => false,
        }
    }

    fn durable(&self) -> MutexGuard<'_, HashSet<PathBuf>> {
        // A set of known facts: a panic elsewhere cannot leave it half changed.
        self.durable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates `dir` and what is missing above it, and syncs what holds their names.
    fn ensure_dir(&self, dir: &Path) -> io::Result<()> {
        if self.durable().contains(dir) {
            return Ok(());
        }
        let parent = dir.parent();
        let inside = dir != self.root && dir.starts_with(&self.root);
        if let Some(parent) = parent.filter(|_| inside) {
            self.ensure_dir(parent)?;
        }
        let created = match self.disk.create_dir(dir) {
            Ok(()) => true,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => false,
            Err(e) if e.kind() == io::ErrorKind::NotFound && !inside => {
                if let Some(parent) = parent {
                    self.ensure_dir(parent)?;
                }
                match self.disk.create_dir(dir) {
                    Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                    _ => true,
                }
            }
            Err(e) => return Err(e),
        };
        // Another process may have created it and not synced yet. What was above the store
        // before is not ours to sync.
        if let Some(parent) = parent.filter(|_| inside || created) {
            let others = match parent == self.root {
                true => self.families(),
                false => Vec::new(),
            };
            self.disk.sync_dir(parent)?;
            self.durable().extend(others);
        }
        self.durable().insert(dir.to_owned());
        Ok(())
    }

    /// Directories in the root: whoever made them, their names are durable after the next sync.
    fn families(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        entries
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| entry.path())
            .take(MOST_FAMILIES)
            .collect()
    }

    fn temporary(&self) -> io::Result<Temporary> {
        let dir = self.root.join(TEMPORARIES);
        self.ensure_dir(&dir)?;
        for _ in 0..16 {
            let path = dir.join(format!("{}-{:016x}", writer(), random()));
            match self.disk.create_new(&path) {
                Ok(file) => {
                    let disk = Arc::clone(&self.disk);
                    let temporary = Temporary { path, file, disk };
                    if !self.swept.swap(true, Ordering::Relaxed) {
                        sweep(&dir, &temporary);
                    }
                    return Ok(temporary);
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    // Someone removed the directory since.
                    self.durable().clear();
                    self.ensure_dir(&dir)?;
                }
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::other("no free name for a temporary"))
    }

    /// Gives a complete temporary its name.
    fn publish(&self, temporary: &Temporary, key: &Key, mode: PutMode) -> io::Result<PutOutcome> {
        self.disk.sync_file(&temporary.file)?;
        let path = self.path(key);
        let dir = path.parent().unwrap_or(&self.root);
        self.ensure_dir(dir)?;
        let outcome = match give_name(temporary, &path, mode) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // Someone removed the directory since it was known to exist.
                self.durable().clear();
                self.ensure_dir(dir)?;
                give_name(temporary, &path, mode)?
            }
            other => other?,
        };
        // Also when it existed: its writer may not have come this far.
        self.disk.sync_dir(dir)?;
        Ok(outcome)
    }

    fn walk(
        &self,
        dir: &Path,
        name: &str,
        prefix: &str,
        found: &mut Vec<ObjectInfo>,
    ) -> io::Result<()> {
        let entries = match fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(e) if self.is_absent(&e) => return Ok(()),
            Err(e) => return Err(e),
        };
        for entry in entries {
            let entry = entry?;
            let Some(segment) = entry.file_name().to_str().map(str::to_owned) else {
                continue;
            };
            let name = if name.is_empty() {
                segment
            } else {
                format!("{name}/{segment}")
            };
            // Files that cannot be objects (of editors, of NFS) are not ours to report.
            let Ok(key) = Key::new(&name) else { continue };
            let metadata = match fs::metadata(entry.path()) {
                Ok(metadata) => metadata,
                Err(e) if self.is_absent(&e) => continue, // deleted meanwhile
                Err(e) => return Err(e),
            };
            let possible = name.starts_with(prefix) || prefix.starts_with(&format!("{name}/"));
            if metadata.is_dir() && possible {
                self.walk(&entry.path(), &name, prefix, found)?;
            } else if metadata.is_file() && name.starts_with(prefix) {
                found.push(ObjectInfo {
                    key,
                    size: metadata.len(),
                    modified: metadata.modified().ok(),
                });
            }
        }
        Ok(())
    }
}

/// Links or renames the temporary to `path`. Does not sync the directory.
fn give_name(temporary: &Temporary, path: &Path, mode: PutMode) -> io::Result<PutOutcome> {
    match mode {
        PutMode::Overwrite => {
            temporary.disk.rename(&temporary.path, path)?;
            Ok(PutOutcome::Created)
        }
        PutMode::IfAbsent => match temporary.disk.hard_link(&temporary.path, path) {
            Ok(()) => Ok(PutOutcome::Created),
            // A link whose answer was lost and that was asked for again (NFS): the count tells.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                let ours = temporary.file.metadata()?.nlink() > 1;
                Ok(if ours {
                    PutOutcome::Created
                } else {
                    PutOutcome::Exists
                })
            }
            // A filesystem without hard links.
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::Unsupported
                        | io::ErrorKind::PermissionDenied
                        | io::ErrorKind::TooManyLinks
                ) =>
            {
                temporary.disk.rename_if_absent(&temporary.path, path, e)
            }
            Err(e) => Err(e),
        },
    }
}

/// What names of this process's temporaries begin with.
fn writer() -> String {
    Holder::own().map_or_else(
        || std::process::id().to_string(),
        |holder| holder.to_string(),
    )
}

/// Whether a temporary is of a process of this machine that is dead.
fn is_abandoned(name: &OsStr) -> bool {
    let holder = name.to_str().and_then(|name| name.rsplit_once('-'));
    holder.is_some_and(|(holder, _)| {
        holder
            .parse::<Holder>()
            .is_ok_and(|holder| holder.is_dead())
    })
}

/// 64 bits that no other process has: the standard library's random hash keys.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Removes stale temporaries, judged by the time that the filesystem gave `fresh`. Best effort:
/// what cannot be removed is another process's, or is found next time.
fn sweep(dir: &Path, fresh: &Temporary) {
    let Ok(now) = fresh.file.metadata().and_then(|m| m.modified()) else {
        return;
    };
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten() {
        let Ok(metadata) = fs::symlink_metadata(entry.path()) else {
            continue;
        };
        let age = metadata
            .modified()
            .ok()
            .and_then(|time| now.duration_since(time).ok());
        let is_stale = age.is_some_and(|age| age > STALE);
        if metadata.is_file() && (is_stale || is_abandoned(&entry.file_name())) {
            match fresh.disk.remove_file(&entry.path()) {
                Ok(()) => {
                    tracing::debug!(path = %entry.path().display(), "removed a stale temporary")
                }
                Err(error) => tracing::debug!(%error, "a stale temporary stays"),
            }
        }
    }
}

/// A file without a public name. Dropped: gone (unless it was renamed to its public name).
#[derive(Debug)]
struct Temporary {
    path: PathBuf,
    file: fs::File,
    disk: Arc<dyn Disk>,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Not there after a rename; else a sweep finds what stays.
        let _ = self.disk.remove_file(&self.path);
    }
}

impl BlobStore for FileStore {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        let fail = |e| self.fail("read", key.as_str(), e);
        let file = match fs::File::open(self.path(key)) {
            Ok(file) => file,
            Err(e) if self.is_absent(&e) => return Ok(None),
            Err(e) => return Err(fail(e)),
        };
        let metadata = file.metadata().map_err(fail)?;
        if metadata.is_dir() {
            return Ok(None);
        }
        let too_large = |size| StoreError::TooLarge {
            store: self.url(),
            key: key.to_string(),
            size,
            limit: max_len,
        };
        if metadata.len() > max_len {
            return Err(too_large(metadata.len()));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0));
        file.take(max_len.saturating_add(1))
            .read_to_end(&mut bytes)
            .map_err(fail)?;
        if bytes.len() as u64 > max_len {
            return Err(too_large(bytes.len() as u64)); // it grew: not an object of ours
        }
        Ok(Some(bytes))
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        let fail = |e| self.fail("read", key.as_str(), e);
        let missing = || StoreError::Missing {
            store: self.url(),
            key: key.to_string(),
        };
        let short = |size: u64| StoreError::Corrupt {
            store: self.url(),
            key: key.to_string(),
            range: Some(range.clone()),
            what: format!("it has only {size} bytes"),
        };
        let file = match fs::File::open(self.path(key)) {
            Ok(file) => file,
            Err(e) if self.is_absent(&e) => return Err(missing()),
            Err(e) => return Err(fail(e)),
        };
        let metadata = file.metadata().map_err(fail)?;
        if metadata.is_dir() {
            return Err(missing());
        }
        // Before allocating: the range may come from damaged bytes.
        if range.start > range.end || range.end > metadata.len() {
            return Err(short(metadata.len()));
        }
        let len = usize::try_from(range.end - range.start).map_err(|_| short(metadata.len()))?;
        let mut bytes = buffers::take(len);
        bytes.resize(len, 0);
        match file.read_exact_at(&mut bytes, range.start) {
            Ok(()) => Ok(bytes),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                Err(short(file.metadata().map_err(fail)?.len()))
            }
            Err(e) => Err(fail(e)),
        }
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        // Saves writing what is there; the name may still have to be made durable.
        if mode == PutMode::IfAbsent && self.settle(key, u64::MAX)? {
            return Ok(PutOutcome::Exists);
        }
        let mut temporary = self
            .temporary()
            .map_err(|e| self.fail("write", key.as_str(), e))?;
        self.disk
            .write(&mut temporary.file, bytes)
            .and_then(|()| self.publish(&temporary, key, mode))
            .map_err(|e| self.fail("write", key.as_str(), e))
    }

    fn settle(&self, key: &Key, _: u64) -> Result<bool> {
        if self.size(key)?.is_none() {
            return Ok(false);
        }
        let path = self.path(key);
        self.disk
            .sync_dir(path.parent().unwrap_or(&self.root))
            .map_err(|e| self.fail("write", key.as_str(), e))?;
        Ok(true)
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        let temporary = self
            .temporary()
            .map_err(|e| self.fail("write", "a new object", e))?;
        Ok(Box::new(FileWriter {
            store: self,
            temporary,
            unsynced: 0,
            ahead: None,
        }))
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        match fs::metadata(self.path(key)) {
            Ok(metadata) => Ok(metadata.is_file().then_some(metadata.len())),
            Err(e) if self.is_absent(&e) => Ok(None),
            Err(e) => Err(self.fail("read", key.as_str(), e)),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let mut found = Vec::new();
        // Begin as deep as the prefix allows. A directory that no key can have holds no object.
        let (dir, name) = match prefix.rsplit_once('/') {
            Some((dir, _)) if Key::new(dir).is_err() => return Ok(found),
            Some((dir, _)) => (self.root.join(dir), dir),
            None => (self.root.clone(), ""),
        };
        self.walk(&dir, name, prefix, &mut found)
            .map_err(|e| self.fail("list", prefix, e))?;
        found.sort_unstable();
        Ok(found)
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        let fail = |e| self.fail("delete", key.as_str(), e);
        let path = self.path(key);
        match self.disk.remove_file(&path) {
            Ok(()) => {}
            Err(e) if self.is_absent(&e) => return Ok(false),
            Err(e)
                if path.is_dir()
                    && matches!(
                        e.kind(),
                        io::ErrorKind::IsADirectory | io::ErrorKind::PermissionDenied
                    ) =>
            {
                return Ok(false);
            }
            Err(e) => return Err(fail(e)),
        }
        self.disk
            .sync_dir(path.parent().unwrap_or(&self.root))
            .map_err(fail)?;
        Ok(true)
    }

    fn put_volatile(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        let fail = |e| self.fail("write", key.as_str(), e);
        let mut temporary = self.temporary().map_err(fail)?;
        self.disk.write(&mut temporary.file, bytes).map_err(fail)?;
        let path = self.path(key);
        match self.disk.rename(&temporary.path, &path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                self.durable().clear();
                self.ensure_dir(path.parent().unwrap_or(&self.root))
                    .map_err(fail)?;
                self.disk.rename(&temporary.path, &path).map_err(fail)
            }
            other => other.map_err(fail),
        }
    }

    fn delete_volatile(&self, key: &Key) -> Result<bool> {
        match self.disk.remove_file(&self.path(key)) {
            Ok(()) => Ok(true),
            Err(e) if self.is_absent(&e) => Ok(false),
            Err(e) => Err(self.fail("delete", key.as_str(), e)),
        }
    }

    fn leftovers(&self, remove: bool) -> Result<Leftovers> {
        let mut found = Leftovers::default();
        let dir = self.root.join(TEMPORARIES);
        let fail = |e| self.fail("list", "tmp/", e);
        if remove && !dir.is_dir() {
            return Ok(found);
        }
        // It takes a file to tell the time by; on a full disk there may be none.
        let fresh = remove.then(|| self.temporary().ok()).flatten();
        let now = fresh.and_then(|fresh| fresh.file.metadata().ok()?.modified().ok());
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(e) if self.is_absent(&e) => return Ok(found),
            Err(e) => return Err(fail(e)),
        };
        for entry in entries {
            let entry = entry.map_err(fail)?;
            let Ok(metadata) = fs::symlink_metadata(entry.path()) else {
                continue; // it has its name by now
            };
            let modified = metadata.modified().ok();
            let age = now.zip(modified);
            let age = age.and_then(|(now, modified)| now.duration_since(modified).ok());
            let dead = age.is_some_and(|age| age > STALE) || is_abandoned(&entry.file_name());
            if remove && dead && self.disk.remove_file(&entry.path()).is_ok() {
                found.removed_files += 1;
                found.removed_bytes += metadata.len();
            } else {
                found.add(metadata.len(), modified);
            }
        }
        Ok(found)
    }

    fn reserve(&self, keep: bool) -> Result<bool> {
        let path = self.root.join(RESERVE);
        let fail = |e| self.fail("write", RESERVE, e);
        if !keep {
            return match fs::remove_file(&path) {
                Ok(()) => Ok(true),
                Err(e) if self.is_absent(&e) => Ok(false),
                Err(e) => Err(fail(e)),
            };
        }
        let mut file = match fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)
        {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
            Err(e) => return Err(fail(e)),
        };
        // Not zeros, which a filesystem may keep no room for.
        let bytes: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..))
            .take(RESERVE_LEN)
            .collect();
        if let Err(e) = file.write_all(&bytes) {
            let _ = fs::remove_file(&path); // there is no room to keep
            return Err(fail(e));
        }
        Ok(true)
    }

    fn url(&self) -> String {
        format!("file://{}", self.root.display())
    }

    fn is_away(&self) -> bool {
        let marker = crate::key::Key::marker();
        [marker.as_str(), "refs", "packs"]
            .iter()
            .all(|name| matches!(fs::symlink_metadata(self.root.join(name)), Err(e) if self.is_absent(&e)))
    }

    fn decides_races(&self) -> bool {
        true
    }
}

/// Syncs what was written of a file so far, beside whoever writes more.
struct Ahead {
    wake: SyncSender<()>,
    thread: JoinHandle<io::Result<()>>,
}

impl Ahead {
    fn start(file: &fs::File) -> io::Result<Self> {
        let file = file.try_clone()?;
        let (wake, woken) = sync_channel(1);
        let thread = std::thread::Builder::new().name("sync".to_owned());
        let thread =
            thread.spawn(move || woken.iter().try_for_each(|()| file.file().sync_data()))?;
        Ok(Self { wake, thread })
    }

    /// Ends it. An error is told here alone: the file's next sync may know nothing of it.
    fn end(self) -> io::Result<()> {
        drop(self.wake);
        (self.thread.join()).unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
    }
}

struct FileWriter<'a> {
    store: &'a FileStore,
    temporary: Temporary,
    /// Bytes that nobody was told to sync.
    unsynced: u64,
    ahead: Option<Ahead>,
}

impl BlobWriter for FileWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.store
            .disk
            .write(&mut self.temporary.file, bytes)
            .map_err(|e| self.store.fail("write", "a new object", e))?;
        self.unsynced += bytes.len() as u64;
        if self.unsynced >= AHEAD {
            self.unsynced = 0;
            if self.ahead.is_none() {
                // Without it the end takes longer, that is all.
                self.ahead = Ahead::start(&self.temporary.file).ok();
            }
            if let Some(ahead) = &self.ahead {
                // One that is busy goes on with this when it is done; one that failed says so.
                let _ = ahead.wake.try_send(());
            }
        }
        Ok(())
    }

    fn commit(mut self: Box<Self>, key: &Key, mode: PutMode) -> Result<PutOutcome> {
        let ahead = self.ahead.take().map_or(Ok(()), Ahead::end);
        ahead
            .and_then(|()| self.store.publish(&self.temporary, key, mode))
            .map_err(|e| self.store.fail("write", key.as_str(), e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn temporary(dir: &Path, name: &str, bytes: &[u8]) -> Temporary {
        let path = dir.join(name);
        fs::write(&path, bytes).unwrap();
        Temporary {
            file: fs::File::open(&path).unwrap(),
            path,
            disk: Arc::new(System),
        }
    }

    /// Filesystems without hard links: here the fallback is called directly.
    #[test]
    fn rename_is_as_exclusive_as_link() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("name");
        let refused = || io::Error::from(io::ErrorKind::Unsupported);
        let one = temporary(dir.path(), "1", b"one");
        let two = temporary(dir.path(), "2", b"two");
        assert_eq!(
            System
                .rename_if_absent(&one.path, &target, refused())
                .unwrap(),
            PutOutcome::Created
        );
        assert_eq!(
            System
                .rename_if_absent(&two.path, &target, refused())
                .unwrap(),
            PutOutcome::Exists
        );
        drop((one, two));
        assert_eq!(fs::read(&target).unwrap(), b"one");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// NFS: the server linked, its answer was lost, the client asked again and got EEXIST.
    #[test]
    fn a_link_with_a_lost_answer_is_a_success() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("name");
        let ours = temporary(dir.path(), "1", b"ours");
        fs::hard_link(&ours.path, &target).unwrap();
        assert_eq!(
            give_name(&ours, &target, PutMode::IfAbsent).unwrap(),
            PutOutcome::Created
        );
        let other = temporary(dir.path(), "2", b"other");
        assert_eq!(
            give_name(&other, &target, PutMode::IfAbsent).unwrap(),
            PutOutcome::Exists
        );
    }

    #[test]
    fn a_root_that_is_no_directory_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let store = FileStore::new(file.path()).unwrap();
        let key = Key::new("a/b").unwrap();
        let errors = [
            store.get(&key, 10).unwrap_err(),
            store.size(&key).unwrap_err(),
            store.list("").unwrap_err(),
            store.delete(&key).unwrap_err(),
            store.put(&key, b"", PutMode::IfAbsent).unwrap_err(),
            store.put(&key, b"", PutMode::Overwrite).unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, StoreError::Io { .. }), "{error:?}");
            assert!(error.to_string().contains(&store.url()), "{error}");
        }
    }

    /// A stream that is synced while it is written is what was written.
    #[test]
    fn long_streams_are_synced_ahead() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::new(dir.path()).unwrap();
        let key = Key::new("a/long").unwrap();
        let piece: Vec<u8> = (0..1 << 20)
            .map(|i: u32| (i % 251).to_le_bytes()[0])
            .collect();
        let mut writer = store.put_stream().unwrap();
        for _ in 0..11 {
            writer.write(&piece).unwrap();
        }
        writer.commit(&key, PutMode::IfAbsent).unwrap();
        assert_eq!(store.get(&key, 1 << 30).unwrap().unwrap(), piece.repeat(11));
        // One that is given up leaves nothing.
        let mut writer = store.put_stream().unwrap();
        writer.write(&piece.repeat(5)).unwrap();
        drop(writer);
        assert_eq!(fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
    }

    /// Someone removed directories that this handle knows to exist.
    #[test]
    fn removed_directories_are_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::new(dir.path().join("s")).unwrap();
        for (i, removed) in ["s/a", "s/tmp", "s"].into_iter().enumerate() {
            store
                .put(&Key::new("a/first").unwrap(), b"1", PutMode::Overwrite)
                .unwrap();
            fs::remove_dir_all(dir.path().join(removed)).unwrap();
            let key = Key::new(&format!("a/{i}")).unwrap();
            store.put(&key, b"2", PutMode::IfAbsent).unwrap();
            assert_eq!(store.get(&key, 1).unwrap().as_deref(), Some(&b"2"[..]));
        }
    }
}
