//! Frames that this machine verified before are shared without being read, and never when
//! something about their pack is different.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use layerpack_store::{
    BlobStore, BlobWriter, FileStore, Key, LayerStore, ObjectInfo, Published, PutMode, PutOutcome,
    Result, WriterOptions,
};

use crate::support::{data_of, noise, options, publish_with, read_all, reference, text};

const NAME: &str = "base/x:1";

/// Counts bytes that are read from packs.
#[derive(Debug)]
struct Counting {
    inner: FileStore,
    read: AtomicU64,
}

impl BlobStore for Counting {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        self.inner.get(key, max_len)
    }
    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        if key.as_str().starts_with("packs/") {
            self.read
                .fetch_add(range.end - range.start, Ordering::Relaxed);
        }
        self.inner.get_range(key, range)
    }
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        self.inner.put(key, bytes, mode)
    }
    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        self.inner.put_stream()
    }
    fn size(&self, key: &Key) -> Result<Option<u64>> {
        self.inner.size(key)
    }
    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.inner.list(prefix)
    }
    fn delete(&self, key: &Key) -> Result<bool> {
        self.inner.delete(key)
    }
    fn url(&self) -> String {
        self.inner.url()
    }
}

struct Fixture {
    dir: tempfile::TempDir,
    blobs: Arc<Counting>,
    store: LayerStore,
    files: Vec<Vec<u8>>,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Arc::new(Counting {
            inner: FileStore::new(dir.path().join("store")).unwrap(),
            read: AtomicU64::new(0),
        });
        let mut files: Vec<_> = (0..40).map(|i| noise(i, 200_000)).collect();
        files.extend((100..140).map(|i| text(i, 3000)));
        Self {
            store: LayerStore::new(Arc::clone(&blobs) as Arc<dyn BlobStore>),
            dir,
            blobs,
            files,
        }
    }

    /// Publishes and says how many bytes of packs that read.
    fn publish(&self, verify_all: bool) -> (Published, u64) {
        let options = WriterOptions {
            verified_cache: Some(self.dir.path().join("cache")),
            verify_all,
            ..options()
        };
        self.blobs.read.store(0, Ordering::Relaxed);
        let published = publish_with(&self.store, NAME, &self.files, options).unwrap();
        (published, self.blobs.read.load(Ordering::Relaxed))
    }

    fn pack(&self) -> Key {
        self.blobs.list("packs/").unwrap()[0].key.clone()
    }

    fn pack_path(&self) -> std::path::PathBuf {
        self.dir.path().join("store").join(self.pack().as_str())
    }

    fn memory(&self) -> std::path::PathBuf {
        let entries = fs_err::read_dir(self.dir.path().join("cache")).unwrap();
        let paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        assert_eq!(paths.len(), 1, "{paths:?}");
        paths[0].clone()
    }

    fn assert_good(&self) {
        let report = self.store.verify(&reference(NAME)).unwrap();
        assert!(report.is_ok(), "{:?}", report.damaged);
        assert!(read_all(&self.store, NAME).unwrap() == data_of(&self.files));
    }
}

fn flip_in_place(path: &Path, at: u64) {
    use std::os::unix::fs::FileExt as _;
    let file = fs_err::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut byte = [0];
    file.file().read_exact_at(&mut byte, at).unwrap();
    file.file().write_all_at(&[byte[0] ^ 4], at).unwrap();
}

#[test]
fn what_was_written_or_verified_is_not_read_again() {
    let fixture = Fixture::new();
    let all = 40 * 200_000;
    fixture.publish(false);
    // Only the table and the sample.
    let (again, read) = fixture.publish(false);
    assert_eq!((again.stats.new_bytes, again.stats.new_packs), (0, 0));
    assert!(read < all / 4, "{read} bytes");
    let (_, read) = fixture.publish(true);
    assert!(read >= all, "{read} bytes");
    // Verified once by a machine that did not write it.
    fs_err::remove_file(fixture.memory()).unwrap();
    let (_, read) = fixture.publish(false);
    assert!(read >= all, "{read} bytes");
    let (_, read) = fixture.publish(false);
    assert!(read < all / 4, "{read} bytes");
    fixture.assert_good();
}

#[test]
fn a_pack_that_was_written_to_is_verified_again() {
    let fixture = Fixture::new();
    fixture.publish(false);
    std::thread::sleep(std::time::Duration::from_millis(20));
    flip_in_place(&fixture.pack_path(), 100_000);
    let (again, _) = fixture.publish(false);
    assert_eq!(again.stats.new_packs, 1, "{:?}", again.stats);
    assert_eq!(again.warnings.len(), 1, "{:?}", again.warnings);
    fixture.assert_good();
    // And the damaged frame is not remembered as a good one.
    let (third, _) = fixture.publish(false);
    assert_eq!(third.stats.new_packs, 0);
    fixture.assert_good();
}

#[test]
fn damage_that_left_no_trace_is_healed_by_verifying_all() {
    let fixture = Fixture::new();
    fixture.publish(false);
    let path = fixture.pack_path();
    let modified = fs_err::metadata(&path).unwrap().modified().unwrap();
    flip_in_place(&path, 100_000);
    let file = fs_err::OpenOptions::new().write(true).open(&path).unwrap();
    file.file().set_modified(modified).unwrap();
    assert!(!fixture.store.verify(&reference(NAME)).unwrap().is_ok());
    let (healed, _) = fixture.publish(true);
    assert_eq!(healed.stats.new_packs, 1, "{:?}", healed.stats);
    fixture.assert_good();
    let (third, _) = fixture.publish(false);
    assert_eq!(third.stats.new_packs, 0);
    fixture.assert_good();
}

#[test]
fn a_damaged_memory_is_no_memory() {
    let fixture = Fixture::new();
    fixture.publish(false);
    let memory = fixture.memory();
    let mut bytes = fs_err::read(&memory).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs_err::write(&memory, &bytes).unwrap();
    let (again, read) = fixture.publish(false);
    assert_eq!(again.stats.new_packs, 0);
    assert!(read >= 40 * 200_000, "{read} bytes");
    let (_, read) = fixture.publish(false);
    assert!(read < 40 * 200_000 / 4, "{read} bytes");
}

#[test]
fn a_pack_that_is_gone_is_written_again() {
    let fixture = Fixture::new();
    fixture.publish(false);
    fixture.blobs.delete(&fixture.pack()).unwrap();
    let (again, _) = fixture.publish(false);
    assert_eq!(again.stats.new_packs, 1, "{:?}", again.stats);
    fixture.assert_good();
}
