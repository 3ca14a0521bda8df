//! The node's copy of one layer's data: a sparse file and a presence bit for each extent.
//!
//! Invariants, in the order in which they are kept:
//!
//! 1. A bit is set only after all bytes of its extent are in the file. So whoever sees the bit
//!    reads the extent's verified bytes, never a hole.
//! 2. A bit reaches the file `present` after the extent's bytes were handed to the same
//!    kernel's page cache, so the file is right whenever this process dies. It says under which
//!    boot it was written, and is believed under that boot only.
//! 3. `present.synced` is replaced, atomically, by what was set before an `fdatasync` of the
//!    data; it is believed after any crash.
//! 4. What an earlier process left is a **suspect**: its bits say that the bytes should be here,
//!    and nobody sees them before they were read once more and compared with their digest
//!    ([`BlobCache::promote`]); bytes that do not pass are fetched again
//!    ([`BlobCache::distrust`]). So a cache file that was damaged, or lost its blocks, while no
//!    daemon ran costs a fetch, never a wrong byte.
//! 5. When the kernel reports that it lost data (`fdatasync` fails), every bit set since the
//!    last checkpoint is taken back.
//! 6. What is evicted loses its bit in memory, in `present`, and durably in `present.synced`, in
//!    this order, and only then its bytes. A run of extents is evicted while nobody reads or writes
//!    in it ([`BlobCache::hold`]).
//!
//! The file is never mapped: on a full disk a mapped write kills the process, a written one
//! returns an error, and then the bytes are handed through without being kept.

mod bits;
mod evict;
mod hold;
mod pages;
mod whole;

use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::error::{IoContext, LayerfsError, Result};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};

pub use bits::BootId;
use bits::{Identity, PresenceFile};
use evict::Live;
pub(crate) use hold::Exclusive;
use hold::Stripes;
pub use hold::{Held, RUN_BYTES};
use pages::Waiting;
pub use whole::ConnectionId;

/// Name of the sparse file in a layer's cache directory.
pub(crate) const DATA: &str = "data";
const PRESENT: &str = "present";
const SYNCED: &str = "present.synced";
const BITS: usize = 64;
/// Bytes that may go through the page cache of the data file before its pages are dropped: whoever
/// reads them keeps a copy of its own.
const KEEP_PAGES: u64 = 8 << 20;

/// The cached bytes of one layer. Safe to use from many threads; only one instance may exist
/// for a directory (the node's lock sees to that).
#[derive(Debug)]
pub struct BlobCache {
    dir: PathBuf,
    data: fs_err::File,
    size: u64,
    identity: Identity,
    /// Verified by this process.
    words: Vec<AtomicU64>,
    /// Left by an earlier process and not verified since. No bit is in both.
    suspects: Vec<AtomicU64>,
    extents: u64,
    /// The live presence file.
    live: Mutex<Live>,
    /// Who reads and writes where.
    stripes: Stripes,
    /// Bits of the last checkpoint.
    synced: Mutex<Vec<u64>>,
    dirty: AtomicBool,
    written: AtomicU64,
    /// Bytes read and written since the file's pages were last dropped.
    passed: AtomicU64,
    /// What was fetched ahead and keeps its pages.
    waiting: Waiting,
    /// The file `whole` may be there.
    whole: AtomicBool,
    /// Nothing may be punched out of the data file: the kernel may be reading it.
    frozen: AtomicBool,
    /// How an earlier process had it frozen.
    inherited: Mutex<whole::Lent>,
}

impl BlobCache {
    /// Opens or creates the cache in `dir` for a blob of `size` bytes in `extents` extents.
    /// `content` names the blob (the digest of its map); bits of any other content are dropped.
    ///
    /// # Errors
    /// When the files cannot be created or read. Damaged presence files are no error: they are
    /// dropped, and what they said is fetched again.
    pub fn open(
        dir: &Path,
        content: &[u8; 32],
        size: u64,
        extents: u64,
        boot: BootId,
    ) -> Result<Self> {
        let path = dir.join(DATA);
        let data = fs_err::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .at("open the cache file", &path)?;
        let found = data.metadata().at("stat", &path)?;
        let whole = found.len() == size;
        if !whole {
            // Cut to nothing first, so that no byte of another content stays.
            data.set_len(0)
                .and_then(|()| data.set_len(size))
                .at("size the cache file", &path)?;
        }
        let identity = Identity {
            content: *content,
            extents,
            data_inode: found.ino(),
            boot,
        };
        let word_count =
            usize::try_from(extents.div_ceil(BITS as u64)).map_err(|_| LayerfsError::Unusable {
                path: path.clone(),
                what: format!("{extents} extents are more than this machine can address"),
            })?;
        let synced_path = dir.join(SYNCED);
        let live_path = dir.join(PRESENT);
        let empty = vec![0_u64; word_count];
        let (synced, bits) = if whole {
            let synced = bits::load_synced(&synced_path, &identity, word_count);
            let live = bits::load_live(&live_path, &identity, word_count);
            let synced = synced.unwrap_or_else(|| empty.clone());
            let bits = live.unwrap_or_else(|| synced.clone());
            (synced, bits)
        } else {
            // Both files speak of data that is gone.
            bits::remove(&live_path)?;
            bits::remove(&synced_path)?;
            (empty.clone(), empty)
        };
        let dirty = bits != synced;
        let live = match PresenceFile::create(dir, &live_path, &identity, &bits) {
            Ok(file) => Live::Kept(file),
            Err(e) => {
                // The old file may still be there and would be believed later although bits
                // may be taken back meanwhile.
                bits::remove(&live_path)?;
                tracing::warn!(path = %live_path.display(), error = %e,
                    "presence cannot be recorded; this layer's cache lasts only until restart");
                Live::Gone
            }
        };
        let lent = whole::was_lent(dir, boot)?;
        let cache = Self {
            dir: dir.to_path_buf(),
            data,
            size,
            identity,
            words: empty_words(word_count),
            suspects: bits.into_iter().map(AtomicU64::new).collect(),
            extents,
            live: Mutex::new(live),
            stripes: Stripes::new(size),
            synced: Mutex::new(synced),
            dirty: AtomicBool::new(dirty),
            written: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            waiting: Waiting::default(),
            whole: AtomicBool::new(false),
            frozen: AtomicBool::new(lent != whole::Lent::Not),
            inherited: Mutex::new(lent),
        };
        cache.recall_whole();
        Ok(cache)
    }

    /// Size of the blob in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Number of extents.
    #[must_use]
    pub fn extents(&self) -> u64 {
        self.extents
    }

    /// Bytes written to the cache file since it was opened.
    #[must_use]
    pub fn written_bytes(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Whether extent `index` is here. Numbers beyond the last extent are not.
    #[must_use]
    pub fn has(&self, index: u64) -> bool {
        // Pairs with the release in `mark`: the extent's bytes are in the file.
        bit_of(&self.words, index)
    }

    /// Whether extent `index` was left by an earlier process and waits for its check.
    #[must_use]
    pub fn suspect(&self, index: u64) -> bool {
        bit_of(&self.suspects, index)
    }

    /// A suspect extent's bytes were read and have the right digest: it is present from now on.
    pub fn promote(&self, index: u64) {
        if let Some((word, bit)) = self.slot(index) {
            if let Some(w) = self.words.get(word) {
                w.fetch_or(bit, Ordering::AcqRel);
            }
            if let Some(w) = self.suspects.get(word) {
                w.fetch_and(!bit, Ordering::AcqRel);
            }
        }
    }

    /// A suspect extent's bytes are wrong: it is not here. Returns whether it was a suspect
    /// until now.
    pub fn distrust(&self, index: u64) -> bool {
        let Some((word, bit)) = self.slot(index) else {
            return false;
        };
        let was = self
            .suspects
            .get(word)
            .is_some_and(|w| w.fetch_and(!bit, Ordering::AcqRel) & bit != 0);
        if was {
            self.dirty.store(true, Ordering::Release);
            let _ = self.record(&[word]);
        }
        was
    }

    /// Word and bit of an extent; `None` beyond the last one.
    fn slot(&self, index: u64) -> Option<(usize, u64)> {
        let word = usize::try_from(index / BITS as u64).ok()?;
        (index < self.extents).then_some((word, 1 << (index % BITS as u64)))
    }

    /// What the presence files are to say of a word.
    fn recorded(&self, word: usize) -> u64 {
        let of = |words: &[AtomicU64]| words.get(word).map_or(0, |w| w.load(Ordering::Acquire));
        // Promotion sets before it clears, so this order misses nothing.
        of(&self.suspects) | of(&self.words)
    }

    /// Stores bytes that were verified. Their extents are not present before [`BlobCache::mark`].
    ///
    /// # Errors
    /// What the write gives, `ENOSPC` first of all. Part of the bytes may then be in the file,
    /// which does no harm.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.put(offset, bytes)?;
        self.pass(bytes.len() as u64);
        Ok(())
    }

    /// As [`BlobCache::write`], for a reader who is yet to come: the kernel is not told to let go of
    /// these bytes' pages before they were read, or for some seconds.
    ///
    /// # Errors
    /// As [`BlobCache::write`].
    pub fn write_ahead(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.put(offset, bytes)?;
        let end = offset.saturating_add(bytes.len() as u64);
        self.waiting.wrote(self.size, offset..end);
        Ok(())
    }

    fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.size) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{} bytes at {offset} reach beyond the blob", bytes.len()),
            ));
        }
        self.data.file().write_all_at(bytes, offset)?;
        self.written
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Declares extents present whose bytes were all written before. `each` is called with those
    /// that were neither present nor suspect until now.
    pub fn mark(&self, indices: impl IntoIterator<Item = u64>, mut each: impl FnMut(u64)) {
        let mut changed: Vec<usize> = Vec::new();
        for index in indices {
            let Some((word, bit)) = self.slot(index) else {
                continue;
            };
            let (Some(slot), Some(suspect)) = (self.words.get(word), self.suspects.get(word))
            else {
                continue;
            };
            if slot.fetch_or(bit, Ordering::AcqRel) & bit == 0 {
                if suspect.fetch_and(!bit, Ordering::AcqRel) & bit == 0 {
                    each(index);
                }
                if changed.last() != Some(&word) {
                    changed.push(word);
                }
            }
        }
        if changed.is_empty() {
            return;
        }
        self.dirty.store(true, Ordering::Release);
        let _ = self.record(&changed);
    }

    /// Reads bytes whose extents are all present (gaps between extents read as zeros).
    ///
    /// # Errors
    /// What the read gives; a file shorter than the blob is an error, never zeros.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.data.file().read_exact_at(buf, offset)?;
        let len = buf.len() as u64;
        self.waiting.read(offset..offset.saturating_add(len));
        self.pass(len);
        Ok(())
    }

    /// Counts bytes that went through the page cache.
    fn pass(&self, bytes: u64) {
        if self.passed.fetch_add(bytes, Ordering::Relaxed) + bytes >= KEEP_PAGES
            && self.passed.swap(0, Ordering::Relaxed) > 0
        {
            match self.waiting.may_go(self.size) {
                None => self.advise_away(0..0),
                Some(ranges) => ranges.into_iter().for_each(|range| self.advise_away(range)),
            }
        }
    }

    /// Has the kernel let go of the data file's pages: those who read through us cache what they
    /// read themselves. What is not written to disk yet stays until it is.
    pub fn drop_pages(&self) {
        let waited = self.waiting.forget();
        if self.passed.swap(0, Ordering::Relaxed) > 0 || waited {
            self.advise_away(0..0);
        }
    }

    /// Lets go of the pages of a range; of all if it is empty.
    fn advise_away(&self, range: Range<u64>) {
        let advice = rustix::fs::Advice::DontNeed;
        let len = NonZeroU64::new(range.end.saturating_sub(range.start));
        if let Err(e) = rustix::fs::fadvise(self.data.file(), range.start, len, advice) {
            // Only more memory.
            tracing::debug!(dir = %self.dir.display(), error = %e, "pages cannot be dropped");
        }
    }

    /// Makes everything present survive a crash of the machine, if anything changed since the
    /// last time.
    ///
    /// # Errors
    /// When syncing fails. If it was the data that could not be synced, every extent that came
    /// since the last checkpoint is no longer present.
    pub fn checkpoint(&self) -> Result<()> {
        let mut synced = self.synced.lock();
        if !self.dirty.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let bits: Vec<u64> = (0..self.words.len()).map(|w| self.recorded(w)).collect();
        let path = self.dir.join(DATA);
        if let Err(e) = rustix::fs::fdatasync(self.data.file()) {
            self.take_back(&synced);
            return Err(e).at("sync", &path);
        }
        let stored = bits::store_synced(&self.dir, &self.dir.join(SYNCED), &self.identity, &bits);
        if stored.is_err() {
            self.dirty.store(true, Ordering::Release);
            // Either of the two may be in the file; all of both was synced.
            for (word, new) in synced.iter_mut().zip(&bits) {
                *word |= new;
            }
        }
        stored?;
        *synced = bits;
        drop(synced);
        // All of it is on disk now, so all of it can go.
        self.waiting.forget();
        self.advise_away(0..0);
        Ok(())
    }

    /// The kernel lost written data: believe only what was synced before.
    fn take_back(&self, synced: &[u64]) {
        if let Err(e) = self.forget_whole() {
            tracing::warn!(error = %e, "the cache's record of being whole stays");
        }
        let mut live = self.live.lock();
        for words in [&self.words, &self.suspects] {
            for (word, keep) in words.iter().zip(synced) {
                word.fetch_and(*keep, Ordering::AcqRel);
            }
        }
        // Not what was synced: some of that may have been evicted since.
        let bits: Vec<u64> = (0..self.words.len()).map(|w| self.recorded(w)).collect();
        let path = self.dir.join(PRESENT);
        *live = match PresenceFile::create(&self.dir, &path, &self.identity, &bits) {
            Ok(file) => Live::Kept(file),
            Err(e) => {
                tracing::error!(error = %e, "presence cannot be taken back on disk");
                Live::Stale
            }
        };
        if matches!(*live, Live::Stale) && bits::remove(&path).is_ok() {
            *live = Live::Gone;
        }
        tracing::error!(dir = %self.dir.display(), "the kernel lost cached data; it is fetched again");
    }
}

fn empty_words(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

fn bit_of(words: &[AtomicU64], index: u64) -> bool {
    usize::try_from(index / BITS as u64)
        .ok()
        .and_then(|word| words.get(word))
        .is_some_and(|w| w.load(Ordering::Acquire) & (1 << (index % BITS as u64)) != 0)
}

impl Drop for BlobCache {
    fn drop(&mut self) {
        if let Err(e) = self.checkpoint() {
            tracing::warn!(dir = %self.dir.display(), error = %e, "cache was not synced at its end");
        }
    }
}
