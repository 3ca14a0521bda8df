//! Caches that hold all of a blob: remembered over restarts of the daemon, and lent to the kernel.
//!
//! **Remembered.** When every extent is there, verified and synced, the file `whole` says so,
//! with the boot and with the data file's inode, size, blocks and time of change. As long as all
//! of that is as it was, nobody wrote to the file or made a hole in it since, and the next process
//! need not read it all again before it believes it. Taking anything out of the cache removes
//! `whole` first.
//!
//! **Lent.** The kernel may read the data file itself (FUSE passthrough), and goes on doing so when
//! this process is gone. From then on nothing may be punched out of it, by whatever process:
//! a hole would be read as zeros. So the file `lent` is written before the kernel gets the
//! descriptor, holds the boot's identity, and freezes the cache for whoever opens it during that
//! boot. It goes when the kernel has closed the blob: as the process knows that lent it, or one
//! that serves the same connection to the kernel, whose identity is in the file, too. What was
//! lent over another connection stays frozen, since its mounts may live on unserved. A frozen cache
//! can only be removed as a whole, once nothing serves it: the kernel then keeps the file without a
//! name.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::bits::{self, BootId};
use super::{BITS, BlobCache};
use crate::error::{IoContext, Result};
use crate::files;
use crate::sync::Ordering;

const WHOLE: &str = "whole";
const LENT: &str = "lent";
const FORMAT: u32 = 1;
/// A file that changed less than this ago may change again without its time showing it.
const QUIET: Duration = Duration::from_secs(1);

/// What a file was like when all of it had been verified.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    format: u32,
    boot: [u8; 16],
    content: [u8; 32],
    extents: u64,
    inode: u64,
    size: u64,
    blocks: u64,
    changed: (i64, i64),
}

/// Names a connection to the kernel, for as long as it lives and whoever serves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionId([u8; 16]);

impl ConnectionId {
    /// Another one than all others.
    ///
    /// # Errors
    /// When the kernel gives no random number.
    pub fn random() -> Result<Self> {
        let path = Path::new("/proc/sys/kernel/random/uuid");
        let text = fs_err::read(path).at("read", path)?;
        let digest = layerpack_store::Digest::of(&text);
        let mut id = [0; 16];
        id.iter_mut()
            .zip(digest.as_bytes())
            .for_each(|(to, from)| *to = *from);
        Ok(Self(id))
    }
}

/// What the file `lent` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lent {
    /// Not in this boot.
    Not,
    /// Over this connection; `None`: over any.
    Over(Option<ConnectionId>),
}

/// Whether this boot's kernel may hold the data file of the cache in `dir`.
pub(super) fn was_lent(dir: &Path, boot: BootId) -> Result<Lent> {
    let path = dir.join(LENT);
    let bytes = match fs_err::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Lent::Not),
        Err(e) => return Err(e).at("read", &path),
    };
    match bytes.strip_prefix(boot.bytes().as_slice()) {
        Some(rest) => Ok(Lent::Over(rest.try_into().ok().map(ConnectionId))),
        // Of another boot, or cut short by its end.
        None => {
            bits::remove(&path)?;
            Ok(Lent::Not)
        }
    }
}

impl BlobCache {
    /// Whether every extent is here, verified by this process or remembered, and synced.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        if self.extents == 0 || self.dirty.load(Ordering::Acquire) {
            return false;
        }
        let bits = BITS as u64;
        let mut left = self.extents;
        self.words.iter().all(|word| {
            let want = if left >= bits {
                u64::MAX
            } else {
                (1 << left) - 1
            };
            left = left.saturating_sub(bits);
            word.load(Ordering::Acquire) == want
        })
    }

    fn state(&self) -> std::io::Result<(Mark, SystemTime)> {
        let found = self.data.metadata()?;
        let seconds = u64::try_from(found.ctime()).unwrap_or(0);
        let mark = Mark {
            format: FORMAT,
            boot: self.identity.boot.bytes(),
            content: self.identity.content,
            extents: self.extents,
            inode: found.ino(),
            size: found.len(),
            blocks: found.blocks(),
            changed: (found.ctime(), found.ctime_nsec()),
        };
        Ok((mark, UNIX_EPOCH + Duration::from_secs(seconds + 1)))
    }

    /// Writes down that all is here, if it is so. Called from time to time.
    ///
    /// # Errors
    /// When it cannot be written, which costs the next process a check.
    pub(crate) fn remember_whole(&self) -> Result<()> {
        let path = self.dir.join(WHOLE);
        // With the whole file to oneself against who evicts.
        let Some(_held) = self.try_hold(&(0..self.size)) else {
            return Ok(());
        };
        if self.whole.load(Ordering::Acquire) || !self.is_whole() {
            return Ok(());
        }
        let (mark, changed) = self.state().at("stat", &path)?;
        if SystemTime::now() < changed + QUIET {
            return Ok(());
        }
        let bytes = serde_json::to_vec(&mark)
            .map_err(std::io::Error::other)
            .at("write", &path)?;
        self.whole.store(true, Ordering::Release);
        files::replace(&self.dir, &path, &[&bytes], false)
    }

    /// Takes what an earlier process verified for verified, if the file is as it was then.
    pub(super) fn recall_whole(&self) {
        let Ok(bytes) = fs_err::read(self.dir.join(WHOLE)) else {
            return;
        };
        self.whole.store(true, Ordering::Release);
        let (Ok(then), Ok((now, _))) = (serde_json::from_slice::<Mark>(&bytes), self.state())
        else {
            return;
        };
        let all = (0..self.extents).all(|index| self.suspect(index));
        if then == now && all {
            (0..self.extents).for_each(|index| self.promote(index));
        }
    }

    /// Before anything is taken out.
    pub(super) fn forget_whole(&self) -> Result<()> {
        if self.whole.load(Ordering::Acquire) {
            bits::remove(&self.dir.join(WHOLE))?;
            self.whole.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// Whether nothing may be punched out of the data file.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Acquire)
    }

    /// Gives the kernel the data file to read by itself, if all of it is here. Nothing is taken
    /// out of it until [`BlobCache::give_back`] or, in a later process that serves the same
    /// `connection`, [`BlobCache::thaw`].
    pub(crate) fn lend(&self, connection: Option<ConnectionId>) -> Option<OwnedFd> {
        // Who evicts looks at `frozen` with a run to itself: either it is done by now and has
        // taken a bit away, or it will see that the file is frozen.
        let _held = self.try_hold(&(0..self.size))?;
        if !self.is_whole() {
            return None;
        }
        let mut bytes = self.identity.boot.bytes().to_vec();
        // What another connection may hold besides must not be taken back with this one's.
        let alone = match self.inherited() {
            Lent::Not => true,
            Lent::Over(before) => before == connection,
        };
        if let Some(ConnectionId(id)) = connection.filter(|_| alone) {
            bytes.extend(id);
        }
        let lent = self.dir.join(LENT);
        if let Err(e) = files::replace(&self.dir, &lent, &[&bytes], false) {
            tracing::debug!(dir = %self.dir.display(), error = %e, "the cache file is not lent");
            return None;
        }
        self.frozen.store(true, Ordering::Release);
        match self.data.file().try_clone() {
            Ok(file) => Some(file.into()),
            Err(e) => {
                tracing::debug!(dir = %self.dir.display(), error = %e, "the cache file is not lent");
                self.give_back();
                None
            }
        }
    }

    /// The kernel has closed what this process lent it.
    pub(crate) fn give_back(&self) {
        if self.inherited() != Lent::Not {
            // A mount that an earlier process served may still have the file.
            return;
        }
        if bits::remove(&self.dir.join(LENT)).is_ok() {
            self.frozen.store(false, Ordering::Release);
        }
    }

    /// Nobody has open any more what was lent over this connection, by this process or earlier
    /// ones. Must not run beside [`BlobCache::lend`].
    pub(crate) fn thaw(&self, connection: ConnectionId) {
        let mut inherited = self.inherited.lock();
        if *inherited == Lent::Over(Some(connection)) && bits::remove(&self.dir.join(LENT)).is_ok()
        {
            *inherited = Lent::Not;
            self.frozen.store(false, Ordering::Release);
        }
    }

    fn inherited(&self) -> Lent {
        *self.inherited.lock()
    }

    /// Drops the data file's pages, also those that the kernel read by itself.
    pub(crate) fn drop_all_pages(&self) {
        self.advise_away(0..0);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use layerpack_fixtures::ScratchDir;

    use super::*;

    const BOOT: BootId = BootId::from_bytes([1; 16]);

    fn open(dir: &Path, boot: BootId) -> BlobCache {
        BlobCache::open(dir, &[2; 32], 100 * 4096, 100, boot).unwrap()
    }

    fn fill(cache: &BlobCache, count: u64) {
        cache.write(0, &vec![7; 4096 * 100]).unwrap();
        cache.mark(0..count, |_| {});
    }

    fn remember(cache: &BlobCache) -> bool {
        for _ in 0..500 {
            cache.remember_whole().unwrap();
            if cache.whole.load(Ordering::Acquire) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    #[test]
    fn a_whole_cache_is_believed_while_its_file_is_as_it_was() {
        let dir = ScratchDir::new("whole").unwrap();
        let cache = open(dir.path(), BOOT);
        fill(&cache, 99);
        cache.checkpoint().unwrap();
        assert!(!cache.is_whole(), "one is missing");
        cache.mark([99], |_| {});
        assert!(!cache.is_whole(), "not synced");
        cache.checkpoint().unwrap();
        assert!(cache.is_whole());
        assert!(remember(&cache));
        drop(cache);
        let cache = open(dir.path(), BOOT);
        assert!(cache.is_whole());
        drop(cache);
        // In another boot all of it is checked again.
        let cache = open(dir.path(), BootId::from_bytes([3; 16]));
        assert!(!cache.is_whole() && cache.suspect(0) && !cache.has(0));
    }

    #[test]
    fn a_file_that_was_changed_is_checked_again() {
        let dir = ScratchDir::new("whole").unwrap();
        let cache = open(dir.path(), BOOT);
        fill(&cache, 100);
        cache.checkpoint().unwrap();
        assert!(remember(&cache));
        drop(cache);
        let data = fs_err::OpenOptions::new()
            .write(true)
            .open(dir.path().join("data"))
            .unwrap();
        std::os::unix::fs::FileExt::write_all_at(data.file(), b"x", 5000).unwrap();
        let cache = open(dir.path(), BOOT);
        assert!(!cache.is_whole() && cache.suspect(1) && !cache.has(1));
    }

    #[test]
    fn what_is_taken_out_is_not_remembered() {
        let dir = ScratchDir::new("whole").unwrap();
        let cache = open(dir.path(), BOOT);
        fill(&cache, 100);
        cache.checkpoint().unwrap();
        assert!(remember(&cache));
        assert!(dir.path().join(WHOLE).exists());
        let alone = cache.try_alone(0).unwrap();
        assert_eq!(cache.withdraw(&alone, [3]).unwrap(), [3]);
        drop(alone);
        assert!(!dir.path().join(WHOLE).exists() && !cache.is_whole());
    }

    #[test]
    fn what_is_lent_stays_frozen_for_every_process_of_the_boot() {
        let dir = ScratchDir::new("whole").unwrap();
        let cache = open(dir.path(), BOOT);
        fill(&cache, 50);
        cache.checkpoint().unwrap();
        assert!(cache.lend(None).is_none() && !cache.is_frozen());
        fill(&cache, 100);
        assert!(cache.lend(None).is_none(), "not synced");
        cache.checkpoint().unwrap();
        let lent = cache.lend(None).unwrap();
        assert!(cache.is_frozen());
        drop(lent);
        cache.give_back();
        assert!(!cache.is_frozen() && !dir.path().join(LENT).exists());
        let _lent = cache.lend(None).unwrap();
        // The process dies here.
        drop(cache);
        let cache = open(dir.path(), BOOT);
        assert!(cache.is_frozen());
        cache.give_back();
        assert!(cache.is_frozen(), "the earlier process's mount may live");
        drop(cache);
        let cache = open(dir.path(), BootId::from_bytes([9; 16]));
        assert!(!cache.is_frozen() && !dir.path().join(LENT).exists());
    }
    #[test]
    fn what_is_lent_is_taken_back_over_the_same_connection_only() {
        let dir = ScratchDir::new("lent").unwrap();
        let (own, other) = (ConnectionId([1; 16]), ConnectionId([2; 16]));
        let cache = open(dir.path(), BOOT);
        fill(&cache, 100);
        cache.checkpoint().unwrap();
        assert!(remember(&cache));
        let _lent = cache.lend(Some(own)).unwrap();
        cache.thaw(own);
        assert!(cache.is_frozen(), "it is this process's to give back");
        // The process dies here, and the next one serves the same connection.
        drop(cache);
        let cache = open(dir.path(), BOOT);
        cache.thaw(other);
        assert!(cache.is_frozen());
        cache.thaw(own);
        assert!(!cache.is_frozen() && !dir.path().join(LENT).exists());
        // What is lent from then on is its own.
        let _lent = cache.lend(Some(own)).unwrap();
        assert!(cache.is_frozen());
        cache.give_back();
        assert!(!cache.is_frozen());

        // Two connections, the first of them dead: nobody can tell when its mounts end.
        let _lent = cache.lend(Some(own)).unwrap();
        drop(cache);
        let cache = open(dir.path(), BOOT);
        let _lent = cache.lend(Some(other)).unwrap();
        drop(cache);
        let cache = open(dir.path(), BOOT);
        for connection in [own, other] {
            cache.thaw(connection);
            assert!(cache.is_frozen());
        }
    }
}
