//! Taking extents out of the file again, so that neither a reader nor a restart after any crash
//! meets a hole where a bit says that there is something.
//!
//! Three steps, for a batch of runs; each may be the last one that happens:
//!
//! 1. [`BlobCache::withdraw`], with the run to oneself: the bits go from memory and then from
//!    `present`. If `present` cannot be written, the file is removed; if that fails too, nothing
//!    is evicted.
//! 2. [`BlobCache::forget`]: the bits go from `present.synced`, durably. Bits that never reached
//!    it cost nothing here.
//! 3. [`BlobCache::punch`], with the run to oneself again, and only what is still absent: somebody
//!    may have fetched it anew meanwhile.

use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use rustix::fs::FallocateFlags;

use super::bits::{self, PresenceFile};
use super::{BlobCache, DATA, Exclusive, PRESENT, SYNCED};
use crate::error::{IoContext, Result};
use crate::sync::Ordering;

/// The live presence file's state.
#[derive(Debug)]
pub(super) enum Live {
    /// It is written as bits change.
    Kept(PresenceFile),
    /// There is none: bits since the last checkpoint last until this process ends.
    Gone,
    /// It could be neither written nor removed: it may say too much.
    Stale,
}

impl BlobCache {
    /// Writes words of bits to the live presence file; removes it if that fails.
    ///
    /// # Errors
    /// When the file can be neither written nor removed. It may then claim what is no longer there,
    /// which matters to who takes bits back.
    pub(super) fn record(&self, changed: &[usize]) -> Result<()> {
        let mut live = self.live.lock();
        if let Live::Kept(file) = &*live {
            // Loaded under the lock, so that a word in the file never goes back in time.
            let result = changed
                .iter()
                .try_for_each(|word| file.set_word(*word, self.recorded(*word)));
            if let Err(e) = result {
                tracing::warn!(dir = %self.dir.display(), error = %e,
                    "presence cannot be recorded; what is fetched now is fetched again after a restart");
                *live = Live::Stale;
            }
        }
        if let Live::Stale = *live {
            bits::remove(&self.dir.join(PRESENT))?;
            *live = Live::Gone;
        }
        Ok(())
    }

    /// Declares the extents of a run (`indices`) absent. Returns those that were there, whether
    /// verified or suspect.
    ///
    /// # Errors
    /// When that cannot be recorded; nothing has changed then.
    pub(crate) fn withdraw(
        &self,
        _run: &Exclusive<'_>,
        indices: impl IntoIterator<Item = u64>,
    ) -> Result<Vec<u64>> {
        self.forget_whole()?;
        let mut gone = Vec::new();
        let mut changed: Vec<usize> = Vec::new();
        for index in indices {
            let Some((word, bit)) = self.slot(index) else {
                continue;
            };
            let mut was = false;
            for words in [&self.words, &self.suspects] {
                was |= words
                    .get(word)
                    .is_some_and(|w| w.fetch_and(!bit, Ordering::AcqRel) & bit != 0);
            }
            if was {
                gone.push(index);
                if changed.last() != Some(&word) {
                    changed.push(word);
                }
            }
        }
        if gone.is_empty() {
            return Ok(gone);
        }
        self.dirty.store(true, Ordering::Release);
        match self.record(&changed) {
            Ok(()) => Ok(gone),
            Err(e) => {
                // Alone here, so all of them are as they were.
                let _ = self.put_back(&gone);
                Err(e)
            }
        }
    }

    /// Has the next start know nothing of these extents, whatever happens before it.
    ///
    /// # Errors
    /// When neither the checkpoint can be replaced nor removed; it may then still name them.
    pub(crate) fn forget(&self, gone: &[u64]) -> Result<()> {
        let mut synced = self.synced.lock();
        let mut left = synced.clone();
        for index in gone {
            if let Some((word, bit)) = self.slot(*index)
                && let Some(word) = left.get_mut(word)
            {
                *word &= !bit;
            }
        }
        if left == *synced {
            return Ok(());
        }
        let path = self.dir.join(SYNCED);
        if let Err(e) = bits::store_synced(&self.dir, &path, &self.identity, &left) {
            // The disk is full, most likely, and evicting is what helps against that.
            tracing::warn!(dir = %self.dir.display(), error = %e,
                "the cache's checkpoint cannot be written; going on without one");
            bits::remove(&path)?;
            fs_err::File::open(&self.dir)
                .and_then(|dir| dir.sync_all())
                .at("sync", &self.dir)?;
            left.fill(0);
        }
        *synced = left;
        // A checkpoint that is due says again what is there.
        self.dirty.store(true, Ordering::Release);
        Ok(())
    }

    /// Gives the bytes of `range` back to the filesystem; all its extents are absent.
    ///
    /// # Errors
    /// What the filesystem says; nothing depends on the bytes being gone.
    pub(crate) fn punch(&self, _run: &Exclusive<'_>, range: Range<u64>) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let len = range.end.saturating_sub(range.start);
        if len > 0 {
            rustix::fs::fallocate(self.data.file(), flags, range.start, len)?;
        }
        Ok(())
    }

    /// Takes a withdrawal back, for extents whose bytes were not punched: they are suspects now,
    /// checked before they are served. Returns those that nobody fetched meanwhile.
    pub(crate) fn put_back(&self, indices: &[u64]) -> Vec<u64> {
        let mut back = Vec::new();
        let mut changed: Vec<usize> = Vec::new();
        for index in indices {
            let Some((word, bit)) = self.slot(*index) else {
                continue;
            };
            let Some(suspects) = self.suspects.get(word) else {
                continue;
            };
            if self.has(*index) {
                continue;
            }
            suspects.fetch_or(bit, Ordering::AcqRel);
            // Fetched and marked in between: then it counts there, unless `mark` saw the suspect.
            if self.has(*index) && suspects.fetch_and(!bit, Ordering::AcqRel) & bit != 0 {
                continue;
            }
            back.push(*index);
            changed.push(word);
        }
        self.dirty.store(true, Ordering::Release);
        let _ = self.record(&changed);
        back
    }

    /// Bytes that the data file takes up on disk.
    ///
    /// # Errors
    /// When the file cannot be looked at.
    pub fn disk_bytes(&self) -> Result<u64> {
        let path = self.dir.join(DATA);
        let found = self.data.file().metadata().at("stat", &path)?;
        Ok(found.blocks().saturating_mul(512))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use layerpack_fixtures::ScratchDir;

    use super::*;
    use crate::cache::BootId;

    const LEN: usize = 8192;
    const EXTENT: u64 = LEN as u64;
    const EXTENTS: u64 = 80;
    const BOOT: BootId = BootId::from_bytes([1; 16]);
    const NEXT_BOOT: BootId = BootId::from_bytes([2; 16]);

    fn open(dir: &Path, boot: BootId) -> BlobCache {
        BlobCache::open(dir, &[9; 32], EXTENT * EXTENTS, EXTENTS, boot).unwrap()
    }

    fn fill(cache: &BlobCache) {
        for index in 0..EXTENTS {
            write(cache, index);
        }
    }

    fn write(cache: &BlobCache, index: u64) {
        let byte = u8::try_from(index + 1).unwrap();
        cache.write(index * EXTENT, &vec![byte; LEN]).unwrap();
        cache.mark([index], |_| {});
    }

    /// What a start after a crash at this moment believes, and whether the bytes bear it out.
    fn believed(scratch: &ScratchDir, dir: &Path, boot: BootId) -> Vec<u64> {
        let copy = scratch.join("copy");
        let _ = fs_err::remove_dir_all(&copy);
        fs_err::create_dir(&copy).unwrap();
        for name in [DATA, PRESENT, SYNCED] {
            // One that is not there is believed to say nothing.
            let _ = fs_err::hard_link(dir.join(name), copy.join(name));
        }
        let cache = open(&copy, boot);
        let there: Vec<u64> = (0..EXTENTS).filter(|i| cache.suspect(*i)).collect();
        let mut bytes = vec![0; LEN];
        for index in &there {
            let expected = u8::try_from(index + 1).unwrap();
            cache
                .data
                .file()
                .read_exact_at(&mut bytes, index * EXTENT)
                .unwrap();
            assert!(bytes.iter().all(|b| *b == expected), "extent {index}");
        }
        // It is no node's: nothing of it is written at its end.
        cache.dirty.store(false, Ordering::Release);
        there
    }

    fn all_but(gone: Range<u64>) -> Vec<u64> {
        (0..EXTENTS).filter(|i| !gone.contains(i)).collect()
    }

    #[test]
    fn a_cut_at_each_step_leaves_no_bit_over_a_hole() {
        let scratch = ScratchDir::new("evict-cut").unwrap();
        let dir = scratch.mkdir("cache").unwrap();
        let cache = open(&dir, BOOT);
        fill(&cache);
        cache.checkpoint().unwrap();
        let before = cache.disk_bytes().unwrap();
        let all = all_but(0..0);
        let gone = 16..32;
        let rest = all_but(gone.clone());

        let alone = cache.try_alone(1).unwrap();
        let withdrawn = cache.withdraw(&alone, gone.clone()).unwrap();
        assert_eq!(withdrawn, gone.clone().collect::<Vec<_>>());
        drop(alone);
        assert_eq!(believed(&scratch, &dir, BOOT), rest);
        assert_eq!(believed(&scratch, &dir, NEXT_BOOT), all);

        cache.forget(&withdrawn).unwrap();
        assert_eq!(believed(&scratch, &dir, BOOT), rest);
        assert_eq!(believed(&scratch, &dir, NEXT_BOOT), rest);

        let alone = cache.try_alone(1).unwrap();
        cache.punch(&alone, 16 * EXTENT..32 * EXTENT).unwrap();
        drop(alone);
        assert_eq!(believed(&scratch, &dir, BOOT), rest);
        assert_eq!(believed(&scratch, &dir, NEXT_BOOT), rest);
        assert_eq!(before - cache.disk_bytes().unwrap(), 16 * EXTENT);

        // Fetched anew: there at once, and after a crash of the machine once it was synced.
        write(&cache, 20);
        assert_eq!(believed(&scratch, &dir, NEXT_BOOT), rest);
        cache.checkpoint().unwrap();
        assert!(believed(&scratch, &dir, NEXT_BOOT).contains(&20));
        assert!(believed(&scratch, &dir, BOOT).contains(&20));
    }

    #[test]
    fn what_was_never_synced_needs_no_sync_to_go() {
        let scratch = ScratchDir::new("evict-young").unwrap();
        let dir = scratch.mkdir("cache").unwrap();
        let cache = open(&dir, BOOT);
        fill(&cache);
        let alone = cache.try_alone(0).unwrap();
        let gone = cache.withdraw(&alone, 0..4).unwrap();
        cache.forget(&gone).unwrap();
        assert!(!dir.join(SYNCED).exists());
        drop(alone);
        // A run that somebody uses is not to be had alone, and one that is, not by anybody else.
        let held = cache.hold(&(0..EXTENT));
        assert!(cache.try_alone(0).is_none());
        assert!(cache.try_alone(1).is_some());
        drop(held);
        let alone = cache.try_alone(0);
        assert!(cache.try_hold(&(0..EXTENT)).is_none());
        drop(alone);
        assert!(cache.try_hold(&(0..EXTENT)).is_some());
    }

    #[test]
    fn without_a_durable_record_nothing_goes() {
        let scratch = ScratchDir::new("evict-refused").unwrap();
        let dir = scratch.mkdir("cache").unwrap();
        let cache = open(&dir, BOOT);
        fill(&cache);
        cache.checkpoint().unwrap();
        // Neither to be replaced nor to be removed.
        fs_err::remove_file(dir.join(SYNCED)).unwrap();
        fs_err::create_dir_all(dir.join(SYNCED).join("x")).unwrap();
        let alone = cache.try_alone(0).unwrap();
        let gone = cache.withdraw(&alone, 0..4).unwrap();
        drop(alone);
        assert!(cache.forget(&gone).is_err());
        assert_eq!(cache.put_back(&gone), gone);
        assert!((0..4).all(|i| cache.suspect(i) && !cache.has(i)));
        fs_err::remove_dir_all(dir.join(SYNCED)).unwrap();
        assert_eq!(believed(&scratch, &dir, BOOT), all_but(0..0));
        // Somebody fetched one of them meanwhile: that one is not put back.
        let alone = cache.try_alone(0).unwrap();
        let gone = cache.withdraw(&alone, 0..4).unwrap();
        drop(alone);
        write(&cache, 2);
        assert_eq!(cache.put_back(&gone), [0, 1, 3]);
        assert!(cache.has(2) && !cache.suspect(2));
    }
}
