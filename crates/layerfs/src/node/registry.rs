//! The blob directory: what the kernel sees in `ROOT/blobs`.
//!
//! A blob's inode number is made of the first eight bytes of its layer's identity, so that it is
//! the same in every process that ever serves the mount and always stands for the same bytes.
//!
//! A blob leaves the directory only when its layer is unmounted **and** the kernel holds no open
//! file of it: a sandbox may hold a copy of the mount that nobody told us of.
//!
//! An entry that was taken over from another process has its place and its size at once, and is
//! opened when it is first read, or later at the node's leisure: so serving goes on before anything
//! else is looked at, and a blob that cannot be opened is the trouble of its own readers only.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use layerpack_store::LayerId;
use rustix::fs::{Advice, Mode, OFlags, fadvise};
use rustix::io::Errno;

use super::served::{Record, Served};
use crate::cache::ConnectionId;
use crate::error::Result as NodeResult;
use crate::fetch::Blob;
use crate::fuse::{BlobAttr, BlobSource, OpenMode, ReplyBuf};
use crate::record::Recordings;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, RwLock};

/// How long a blob that could not be opened is not tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// Bytes that may go into the pages of a blob's file before they are dropped: the filesystem above
/// keeps its own. More costs memory, less has the kernel drop what it read ahead and was not asked
/// for yet.
const KEEP_PAGES: u64 = 8 << 20;

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) ino: u64,
    pub(super) layer: LayerId,
    size: u64,
    blob: OnceLock<Arc<Blob>>,
    /// Held while the blob is being opened; when that failed last.
    opening: Mutex<Option<Instant>>,
    opens: AtomicU64,
    retired: AtomicBool,
    /// Bytes that went into the pages of its file since they were last dropped.
    passed: AtomicU64,
}

impl Entry {
    fn new(layer: LayerId, size: u64, opens: u64, retired: bool) -> Self {
        Self {
            ino: ino_of(layer),
            layer,
            size,
            blob: OnceLock::new(),
            opening: Mutex::new(None),
            opens: AtomicU64::new(opens),
            retired: AtomicBool::new(retired),
            passed: AtomicU64::new(0),
        }
    }

    pub(super) fn opens(&self) -> u64 {
        self.opens.load(Ordering::Acquire)
    }

    /// Whether pages of its file may be there that were not dropped; they count as dropped now.
    pub(super) fn take_passed(&self) -> bool {
        self.passed.swap(0, Ordering::Relaxed) > 0
    }

    /// The count itself.
    pub(super) fn open_count(&self) -> &AtomicU64 {
        &self.opens
    }

    /// The blob, unless it is still to be opened.
    pub(super) fn blob(&self) -> Option<&Arc<Blob>> {
        self.blob.get()
    }

    /// The blob, opened by `open` if it is not open yet. One opens it at a time.
    pub(super) fn opened(
        &self,
        recordings: &Recordings,
        open: impl FnOnce() -> NodeResult<Arc<Blob>>,
    ) -> NodeResult<Arc<Blob>> {
        let mut failed = self.opening.lock();
        if let Some(blob) = self.blob.get() {
            return Ok(Arc::clone(blob));
        }
        match open() {
            Ok(blob) => {
                blob.taps.set(recordings.taps(self.layer));
                blob.taps.watch(recordings.traces.of(self.layer));
                *failed = None;
                Ok(Arc::clone(self.blob.get_or_init(|| blob)))
            }
            Err(e) => {
                *failed = Some(Instant::now());
                Err(e)
            }
        }
    }

    fn failed_lately(&self) -> bool {
        self.opening.lock().is_some_and(|at| at.elapsed() < AGAIN)
    }

    fn attr(&self) -> BlobAttr {
        BlobAttr {
            ino: self.ino,
            size: self.size,
            held: self.blob().map_or(0, |blob| blob.cached_bytes()),
        }
    }
}

/// Opens the blob of a layer that was taken over.
pub(super) type Opener = Box<dyn Fn(LayerId) -> NodeResult<Arc<Blob>> + Send + Sync>;

#[derive(Debug, Default)]
struct Tables {
    by_ino: HashMap<u64, Arc<Entry>>,
    by_name: BTreeMap<Vec<u8>, u64>,
}

pub(super) struct Registry {
    /// Where it is mounted.
    dir: PathBuf,
    mode: OpenMode,
    recordings: Arc<Recordings>,
    served: Arc<Served>,
    tables: RwLock<Tables>,
    opener: OnceLock<Opener>,
    /// The connection that all of this is served over, if it is one that outlives the process.
    connection: OnceLock<ConnectionId>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry")
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

/// Inode number of a layer's blob. 0 and 1 have a meaning of their own.
fn ino_of(layer: LayerId) -> u64 {
    let bytes = layer.digest().as_bytes();
    let first = bytes
        .first_chunk::<8>()
        .map_or(0, |b| u64::from_le_bytes(*b));
    first.max(2)
}

impl Registry {
    pub(super) fn new(
        dir: PathBuf,
        mode: OpenMode,
        recordings: Arc<Recordings>,
        served: Arc<Served>,
    ) -> Self {
        Self {
            dir,
            mode,
            recordings,
            served,
            tables: RwLock::new(Tables::default()),
            opener: OnceLock::new(),
            connection: OnceLock::new(),
        }
    }

    /// Which connection it is served over. Set once, before anything is lent.
    pub(super) fn set_connection(&self, id: ConnectionId) {
        let _ = self.connection.set(id);
    }

    /// The connection has ended with all its files: what was lent over it is the caches' own again.
    pub(super) fn all_closed(&self) {
        for entry in self.entries() {
            if let Some(blob) = entry.blob()
                && blob.cache().is_frozen()
            {
                blob.give_back();
                if let Some(connection) = self.connection.get() {
                    blob.thaw(*connection);
                }
            }
        }
    }

    /// What opens the blobs of entries that are adopted. Set once, before that.
    pub(super) fn set_opener(&self, opener: Opener) {
        let _ = self.opener.set(opener);
    }

    /// Puts a blob back in its place that another process served. `false` if a layer with the same
    /// inode number is there.
    pub(super) fn adopt(&self, record: &Record, retired: bool) -> bool {
        let entry = Entry::new(record.layer, record.size, record.opens, retired);
        let mut tables = self.tables.write();
        if tables.by_ino.contains_key(&entry.ino) {
            return false;
        }
        tables
            .by_name
            .insert(record.layer.hex().into_bytes(), entry.ino);
        tables.by_ino.insert(entry.ino, Arc::new(entry));
        true
    }

    /// The blob of an entry, for a reader.
    fn blob_of(&self, entry: &Entry) -> Result<Arc<Blob>, Errno> {
        if let Some(blob) = entry.blob() {
            return Ok(Arc::clone(blob));
        }
        let opener = self.opener.get().ok_or(Errno::IO)?;
        if entry.failed_lately() {
            return Err(Errno::IO);
        }
        entry
            .opened(&self.recordings, || opener(entry.layer))
            .map_err(|_| Errno::IO)
    }

    fn entry(&self, ino: u64) -> Option<Arc<Entry>> {
        self.tables.read().by_ino.get(&ino).map(Arc::clone)
    }

    /// The blob of a layer, also if it is only still held by some mount.
    pub(super) fn get(&self, layer: LayerId) -> Option<Arc<Entry>> {
        self.entry(ino_of(layer))
            .filter(|entry| entry.layer == layer)
    }

    /// Adds a blob. `None` if another layer has its inode number.
    pub(super) fn add(&self, blob: Arc<Blob>) -> Option<Arc<Entry>> {
        let layer = blob.layer();
        let ino = ino_of(layer);
        let mut tables = self.tables.write();
        if let Some(entry) = tables.by_ino.get(&ino) {
            return (entry.layer == layer).then(|| Arc::clone(entry));
        }
        blob.taps.set(self.recordings.taps(layer));
        blob.taps.watch(self.recordings.traces.of(layer));
        let entry = Entry::new(layer, blob.map().data_size(), 0, false);
        let _ = entry.blob.set(blob);
        let entry = Arc::new(entry);
        tables.by_ino.insert(ino, Arc::clone(&entry));
        tables.by_name.insert(layer.hex().into_bytes(), ino);
        Some(entry)
    }

    /// Has a layer's reads told to the recordings and traces of it that run now.
    pub(super) fn tap(&self, layer: LayerId, recordings: &Recordings) {
        if let Some(entry) = self.get(layer)
            && let Some(blob) = entry.blob()
        {
            blob.taps.set(recordings.taps(layer));
            blob.taps.watch(recordings.traces.of(layer));
        }
    }

    /// The layer is mounted (again).
    pub(super) fn revive(&self, layer: LayerId) {
        if let Some(entry) = self.get(layer) {
            entry.retired.store(false, Ordering::Release);
        }
    }

    /// The layer is no longer mounted: its blob goes once nothing holds it open.
    pub(super) fn retire(&self, layer: LayerId) {
        if let Some(entry) = self.get(layer) {
            entry.retired.store(true, Ordering::Release);
        }
    }

    /// Takes out retired blobs that nothing holds open.
    pub(super) fn reap(&self) -> Vec<Arc<Entry>> {
        let mut tables = self.tables.write();
        let gone: Vec<Arc<Entry>> = tables
            .by_ino
            .values()
            .filter(|e| e.retired.load(Ordering::Acquire) && e.opens() == 0)
            .map(Arc::clone)
            .collect();
        for entry in &gone {
            tables.by_ino.remove(&entry.ino);
            tables.by_name.remove(entry.layer.hex().as_bytes());
        }
        drop(tables);
        for entry in &gone {
            self.served.remove(entry.layer);
        }
        gone
    }

    /// All entries, in order of their names.
    pub(super) fn entries(&self) -> Vec<Arc<Entry>> {
        let tables = self.tables.read();
        tables
            .by_name
            .values()
            .filter_map(|ino| tables.by_ino.get(ino).map(Arc::clone))
            .collect()
    }
}

impl BlobSource for Registry {
    fn lookup(&self, name: &[u8]) -> Option<BlobAttr> {
        let tables = self.tables.read();
        let ino = tables.by_name.get(name)?;
        tables.by_ino.get(ino).map(|e| e.attr())
    }

    fn attr(&self, ino: u64) -> Option<BlobAttr> {
        self.entry(ino).map(|e| e.attr())
    }

    fn list(&self) -> Vec<(Vec<u8>, BlobAttr)> {
        let tables = self.tables.read();
        tables
            .by_name
            .iter()
            .filter_map(|(name, ino)| Some((name.clone(), tables.by_ino.get(ino)?.attr())))
            .collect()
    }

    fn open(&self, ino: u64) -> Result<OpenMode, Errno> {
        // Counted with the table locked, so that `reap` sees the open or the open finds nothing.
        let tables = self.tables.read();
        let entry = Arc::clone(tables.by_ino.get(&ino).ok_or(Errno::STALE)?);
        entry.opens.fetch_add(1, Ordering::AcqRel);
        drop(tables);
        // On disk before the kernel is answered: who takes over must not count less than there are.
        if let Err(e) = self.served.note_opens(entry.layer, &entry.opens) {
            tracing::error!(layer = %entry.layer, error = %e, "an open cannot be recorded");
            entry.opens.fetch_sub(1, Ordering::AcqRel);
            return Err(Errno::IO);
        }
        // What the kernel has cached would not be seen by a recording.
        match self.mode {
            OpenMode::Cached if entry.blob().is_some_and(|b| b.taps.loud()) => Ok(OpenMode::Fresh),
            mode => Ok(mode),
        }
    }

    fn release(&self, ino: u64) {
        if let Some(entry) = self.entry(ino) {
            let _ = entry
                .opens
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1));
            if let Err(e) = self.served.note_opens(entry.layer, &entry.opens) {
                // Too many on record: whoever takes over keeps the blob longer than it must.
                tracing::warn!(layer = %entry.layer, error = %e, "a close is not recorded");
            }
        }
    }

    fn lend(&self, ino: u64) -> Option<std::os::fd::OwnedFd> {
        let entry = self.entry(ino)?;
        // Opens of another process, that was taken over from: they are of one kind or the other, and
        // the kernel takes no other kind beside them. Most likely they are read through us.
        if entry.opens() > 1 {
            return None;
        }
        entry.blob()?.lend(self.connection.get().copied())
    }

    fn give_back(&self, ino: u64) {
        if let Some(entry) = self.entry(ino)
            && let Some(blob) = entry.blob()
        {
            blob.give_back();
        }
    }

    fn closed(&self, ino: u64) {
        let (Some(entry), Some(connection)) = (self.entry(ino), self.connection.get()) else {
            return;
        };
        // Opens of all processes that served this connection are counted, and the one that ends is
        // the last of them. One that begins now is lent nothing before this is done.
        if entry.opens() <= 1
            && let Some(blob) = entry.blob()
        {
            blob.thaw(*connection);
        }
    }

    fn drop_pages(&self, ino: u64) {
        let Some(entry) = self.entry(ino).filter(|entry| entry.opens() > 0) else {
            return;
        };
        // While somebody records, an open has the kernel drop everything itself, and waits for it.
        if entry.blob().is_some_and(|blob| blob.taps.loud()) {
            return;
        }
        let path = self.dir.join(entry.layer.hex());
        // Pages that somebody waits for stay: waiting for them here would be waiting for answers of
        // this very process, and outlast it when it is killed.
        let dropped = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .and_then(|file| fadvise(&file, 0, None, Advice::DontNeed));
        if let Err(errno) = dropped {
            tracing::debug!(layer = %entry.layer, %errno, "pages of a blob were not dropped");
        }
    }

    fn pages_due(&self, ino: u64, bytes: u64) -> bool {
        if self.mode == OpenMode::Direct {
            return false;
        }
        self.entry(ino).is_some_and(|entry| {
            let passed = entry.passed.fetch_add(bytes, Ordering::Relaxed) + bytes;
            passed >= KEEP_PAGES && entry.take_passed()
        })
    }

    fn try_read(
        &self,
        ino: u64,
        offset: u64,
        len: usize,
        buf: &mut ReplyBuf,
    ) -> Option<Result<(), Errno>> {
        match self.entry(ino) {
            // One that is still to be opened is opened by who may wait.
            Some(entry) => entry
                .blob()?
                .try_read(offset, len, buf)
                .map(|result| result.map_err(|e| e.errno())),
            None => Some(Err(Errno::STALE)),
        }
    }

    fn read(&self, ino: u64, offset: u64, len: usize, buf: &mut ReplyBuf) -> Result<(), Errno> {
        let entry = self.entry(ino).ok_or(Errno::STALE)?;
        self.blob_of(&entry)?
            .read(offset, len, buf)
            .map_err(|e| e.errno())
    }
}
