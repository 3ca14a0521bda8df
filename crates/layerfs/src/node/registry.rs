//! The blob directory: what the kernel sees in `ROOT/blobs`.
//!
//! A blob's inode number is made of the first eight bytes of its layer's identity, so that it is
//! the same in every process that ever serves the mount and always stands for the same bytes.
//!
//! A blob leaves the directory only when its layer is unmounted **and** the kernel holds no open
//! file of it: a sandbox may hold a copy of the mount that nobody told us of.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use layerpack_store::LayerId;
use rustix::io::Errno;

use crate::fetch::Blob;
use crate::fuse::{BlobAttr, BlobSource, OpenMode, ReplyBuf};
use crate::record::Recordings;
use crate::sync::{AtomicBool, AtomicU64, Ordering, RwLock};

/// Bytes that may go into the pages of a blob's file before they are dropped: the filesystem above
/// keeps its own. More costs memory, less has the kernel drop what it read ahead and was not asked
/// for yet.
const KEEP_PAGES: u64 = 16 << 20;

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) ino: u64,
    pub(super) blob: Arc<Blob>,
    opens: AtomicU64,
    retired: AtomicBool,
    /// Bytes that went into the pages of its file since they were last dropped.
    passed: AtomicU64,
}

impl Entry {
    pub(super) fn opens(&self) -> u64 {
        self.opens.load(Ordering::Acquire)
    }

    /// Whether pages of its file may be there that were not dropped; they count as dropped now.
    pub(super) fn take_passed(&self) -> bool {
        self.passed.swap(0, Ordering::Relaxed) > 0
    }

    fn attr(&self) -> BlobAttr {
        BlobAttr {
            ino: self.ino,
            size: self.blob.map().data_size(),
            held: self.blob.cached_bytes(),
        }
    }
}

#[derive(Debug, Default)]
struct Tables {
    by_ino: HashMap<u64, Arc<Entry>>,
    by_name: BTreeMap<Vec<u8>, u64>,
}

#[derive(Debug)]
pub(super) struct Registry {
    mode: OpenMode,
    recordings: Arc<Recordings>,
    tables: RwLock<Tables>,
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
    pub(super) fn new(mode: OpenMode, recordings: Arc<Recordings>) -> Self {
        Self {
            mode,
            recordings,
            tables: RwLock::new(Tables::default()),
        }
    }

    fn entry(&self, ino: u64) -> Option<Arc<Entry>> {
        self.tables.read().by_ino.get(&ino).map(Arc::clone)
    }

    /// The blob of a layer, also if it is only still held by some mount.
    pub(super) fn get(&self, layer: LayerId) -> Option<Arc<Entry>> {
        self.entry(ino_of(layer))
            .filter(|entry| entry.blob.layer() == layer)
    }

    /// Adds a blob. `None` if another layer has its inode number.
    pub(super) fn add(&self, blob: Arc<Blob>) -> Option<Arc<Entry>> {
        let layer = blob.layer();
        let ino = ino_of(layer);
        let mut tables = self.tables.write();
        if let Some(entry) = tables.by_ino.get(&ino) {
            return (entry.blob.layer() == layer).then(|| Arc::clone(entry));
        }
        blob.taps.set(self.recordings.taps(layer));
        blob.taps.watch(self.recordings.traces.of(layer));
        let entry = Arc::new(Entry {
            ino,
            blob,
            opens: AtomicU64::new(0),
            retired: AtomicBool::new(false),
            passed: AtomicU64::new(0),
        });
        tables.by_ino.insert(ino, Arc::clone(&entry));
        tables.by_name.insert(layer.hex().into_bytes(), ino);
        Some(entry)
    }

    /// Has a layer's reads told to the recordings and traces of it that run now.
    pub(super) fn tap(&self, layer: LayerId, recordings: &Recordings) {
        if let Some(entry) = self.get(layer) {
            entry.blob.taps.set(recordings.taps(layer));
            entry.blob.taps.watch(recordings.traces.of(layer));
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
            tables.by_name.remove(entry.blob.layer().hex().as_bytes());
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
        let entry = tables.by_ino.get(&ino).ok_or(Errno::STALE)?;
        entry.opens.fetch_add(1, Ordering::AcqRel);
        // What the kernel has cached would not be seen by a recording.
        match self.mode {
            OpenMode::Cached if entry.blob.taps.loud() => Ok(OpenMode::Fresh),
            mode => Ok(mode),
        }
    }

    fn release(&self, ino: u64) {
        if let Some(entry) = self.entry(ino) {
            let _ = entry
                .opens
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1));
        }
    }

    fn lend(&self, ino: u64) -> Option<std::os::fd::OwnedFd> {
        self.entry(ino)?.blob.lend()
    }

    fn give_back(&self, ino: u64) {
        if let Some(entry) = self.entry(ino) {
            entry.blob.give_back();
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
            Some(entry) => entry
                .blob
                .try_read(offset, len, buf)
                .map(|result| result.map_err(|e| e.errno())),
            None => Some(Err(Errno::STALE)),
        }
    }

    fn read(&self, ino: u64, offset: u64, len: usize, buf: &mut ReplyBuf) -> Result<(), Errno> {
        self.entry(ino)
            .ok_or(Errno::STALE)?
            .blob
            .read(offset, len, buf)
            .map_err(|e| e.errno())
    }
}
