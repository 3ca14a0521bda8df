//! A local directory in front of a remote store, for objects that never change: manifests,
//! metadata, maps and index segments, read whole. References, locators and whatever else may
//! change always come from the store, and so does every size and list.
//!
//! An object enters the cache only if its bytes have the digest that its key spells, so that what
//! was damaged on the way is not kept. A file of the cache begins with the digest of the rest, and
//! is dropped if it does not have it. The oldest files make way when the cache is full. Processes
//! may share it: a file gets its name when it is complete.

use std::io::{self, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use fs_err as fs;

use super::open::ReadCacheOptions;
use super::{
    BlobStore, BlobWriter, Disagreement, Leftovers, ObjectInfo, PutMode, PutOutcome, Span,
};
use crate::codec;
use crate::digest::Digest;
use crate::error::Result;
use crate::key::Key;
use crate::manifest::MAX_META_BYTES;

const MAGIC: &[u8; 8] = b"LPCACHE\n";
/// Magic and digest before the object's bytes.
const HEADER: usize = 8 + Digest::LEN;
/// The cache is tidied after writes of this part of its limit.
const SLACK: u64 = 16;

/// A store whose immutable small objects are kept in a local directory.
///
/// For readers: it may show an object that was deleted from the store since.
#[derive(Debug)]
pub struct CachedStore {
    inner: Arc<dyn BlobStore>,
    options: ReadCacheOptions,
    /// Bytes written since the directory was tidied last.
    written: AtomicU64,
}

impl CachedStore {
    /// Keeps objects of `inner` below the directory of `options`.
    #[must_use]
    pub fn new(inner: Arc<dyn BlobStore>, options: ReadCacheOptions) -> Self {
        Self {
            inner,
            options,
            written: AtomicU64::new(u64::MAX / 2), // the first write looks
        }
    }

    /// Where a kept object lies. Content is what names it, so stores may share a directory.
    fn path(&self, key: &Key) -> Option<PathBuf> {
        let (family, _) = key.as_str().split_once('/')?;
        let kept = matches!(family, "manifests" | "meta" | "maps" | "index");
        let digest = key.digest().filter(|_| kept)?;
        // Not the digest itself: the raw bytes of a map may be stored compressed in two ways.
        Some(self.options.dir.join(format!("{family}-{}", digest.hex())))
    }

    fn load(&self, path: &Path, max_len: u64) -> Option<Vec<u8>> {
        // Whatever lies there: not more than the caller would take from the store.
        let size = fs::metadata(path).ok()?.len();
        if size > max_len.saturating_add(HEADER as u64) {
            return None;
        }
        let mut bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::debug!("cannot use the cache: {error}");
                }
                return None;
            }
        };
        let (header, object) = bytes.split_at_checked(HEADER)?;
        if header.strip_prefix(MAGIC) != Some(Digest::of(object).as_bytes()) {
            tracing::debug!(path = %path.display(), "dropped a damaged file of the cache");
            let _ = fs::remove_file(path); // else it is found damaged again
            return None;
        }
        bytes.drain(..HEADER);
        // For the choice of what makes way; without it the file counts as older than it is.
        if let Ok(file) = fs::File::open(path) {
            let _ = file.file().set_modified(SystemTime::now());
        }
        Some(bytes)
    }

    /// Keeps an object, if it is what its key says. What cannot be kept is read again next time.
    fn keep(&self, key: &Key, path: &Path, bytes: &[u8]) {
        let size = (HEADER + bytes.len()) as u64;
        if size > self.options.max_bytes / 2 || !is_sound(key, bytes) {
            return;
        }
        if let Err(error) = self.write(path, bytes) {
            tracing::debug!("cannot write to the cache: {error}");
            return;
        }
        let written = self.written.fetch_add(size, Ordering::Relaxed);
        if written.saturating_add(size) > self.options.max_bytes / SLACK {
            self.written.store(0, Ordering::Relaxed);
            if let Err(error) = self.tidy() {
                tracing::debug!("cannot tidy the cache: {error}");
            }
        }
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.options.dir)?;
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!(
            ".{}-{:016x}",
            std::process::id(),
            fastrand::u64(..)
        ));
        let temporary = PathBuf::from(temporary);
        let written = (|| {
            let mut file = fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .open(&temporary)?;
            file.write_all(MAGIC)?;
            file.write_all(Digest::of(bytes).as_bytes())?;
            file.write_all(bytes)?;
            // Not synced: a file that a crash cut off does not have its digest.
            fs::rename(&temporary, path)
        })();
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// Removes the oldest files until the rest fits.
    fn tidy(&self) -> io::Result<()> {
        let mut files = Vec::new();
        let mut total = 0_u64;
        for entry in fs::read_dir(&self.options.dir)? {
            let entry = entry?;
            // Another process may have removed it.
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            if metadata.is_file() {
                total += metadata.len();
                let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                files.push((modified, metadata.len(), entry.path()));
            }
        }
        // A little more than needed, so that the next writes need not look.
        let goal = self.options.max_bytes - self.options.max_bytes / SLACK;
        if total <= goal {
            return Ok(());
        }
        files.sort_unstable();
        for (_, size, path) in files {
            if total <= goal {
                break;
            }
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => total = total.saturating_sub(size),
            }
        }
        Ok(())
    }

    fn forget(&self, key: &Key) {
        if let Some(path) = self.path(key) {
            let _ = fs::remove_file(path); // most often it is not there
        }
    }
}

/// Whether an object is what its key names: its own digest, or that of what it decompresses to.
fn is_sound(key: &Key, bytes: &[u8]) -> bool {
    let Some(digest) = key.digest() else {
        return false;
    };
    let compressed = ["meta/", "maps/"]
        .iter()
        .any(|family| key.as_str().starts_with(family));
    if compressed {
        codec::digest_of_raw(bytes, MAX_META_BYTES).is_ok_and(|raw| raw == digest)
    } else {
        Digest::of(bytes) == digest
    }
}

impl BlobStore for CachedStore {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        let Some(path) = self.path(key) else {
            return self.inner.get(key, max_len);
        };
        if let Some(bytes) = self.load(&path, max_len) {
            return Ok(Some(bytes));
        }
        let found = self.inner.get(key, max_len)?;
        if let Some(bytes) = &found {
            self.keep(key, &path, bytes);
        }
        Ok(found)
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        self.inner.get_range(key, range)
    }

    /// Past the copy here, which is replaced by what is accepted.
    fn reread(
        &self,
        key: &Key,
        span: &Span,
        accept: &mut dyn FnMut(&[u8], &str) -> bool,
    ) -> Result<bool> {
        let path = self.path(key).filter(|_| span.range().is_none());
        if path.is_some() {
            self.forget(key);
        }
        self.inner.reread(key, span, &mut |bytes, from| {
            let accepted = accept(bytes, from);
            if let Some(path) = path.as_ref().filter(|_| accepted) {
                self.keep(key, path, bytes);
            }
            accepted
        })
    }

    fn take_disagreements(&self) -> Vec<Disagreement> {
        self.inner.take_disagreements()
    }

    fn passed_over(&self) -> Vec<String> {
        self.inner.passed_over()
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        self.forget(key);
        self.inner.put(key, bytes, mode)
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        let inner = self.inner.put_stream()?;
        Ok(Box::new(CachedWriter { store: self, inner }))
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        self.inner.size(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.inner.list(prefix)
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        self.forget(key);
        self.inner.delete(key)
    }

    fn put_volatile(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        self.forget(key);
        self.inner.put_volatile(key, bytes)
    }

    fn delete_volatile(&self, key: &Key) -> Result<bool> {
        self.forget(key);
        self.inner.delete_volatile(key)
    }

    fn leftovers(&self, remove: bool) -> Result<Leftovers> {
        self.inner.leftovers(remove)
    }

    fn reserve(&self, keep: bool) -> Result<bool> {
        self.inner.reserve(keep)
    }

    fn url(&self) -> String {
        self.inner.url()
    }

    fn first_url(&self) -> String {
        self.inner.first_url()
    }

    fn is_away(&self) -> bool {
        self.inner.is_away()
    }

    fn decides_races(&self) -> bool {
        self.inner.decides_races()
    }
}

struct CachedWriter<'a> {
    store: &'a CachedStore,
    inner: Box<dyn BlobWriter + 'a>,
}

impl BlobWriter for CachedWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.inner.write(bytes)
    }

    fn commit(self: Box<Self>, key: &Key, mode: PutMode) -> Result<PutOutcome> {
        let Self { store, inner } = *self;
        store.forget(key);
        inner.commit(key, mode)
    }
}
