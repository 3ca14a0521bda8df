//! Makes layers out of directories with the project's own writers, and stores that count, hang
//! and so on.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "shared by test binaries that each use a part"
)]

use std::collections::HashMap;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use layerpack_erofs::{
    BlockIndex, FileData, FileLayout, Metadata, NodeId, NodeKind, Rdev, Timestamp, Tree,
    WriteOptions, write_image,
};
use layerpack_fixtures::ScratchDir;
use layerpack_layerfs::cache::{BlobCache, BootId};
use layerpack_layerfs::fetch::{Blob, BlobParts, FetchConfig, Fetcher};
use layerpack_layerfs::fuse::ReplyBuf;
use layerpack_store::{
    BlobStore, BlobWriter, Draft, Extent, Key, LayerMap, LayerStore, Locator, Manifest, MapBuilder,
    ObjectInfo, Published, PutMode, PutOutcome, Result as StoreResult, StoreError, WriterOptions,
};

pub const LONG: Duration = Duration::from_secs(60);

/// Bytes that do not compress to nothing and differ everywhere.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&(state & 0x3f3f_3f3f_3f3f_3f3f).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

struct Builder<'a> {
    tree: Tree,
    map: Vec<Extent>,
    next: u64,
    links: HashMap<u64, NodeId>,
    writer: &'a mut layerpack_store::LayerWriter,
}

fn metadata(path: &Path) -> Metadata {
    let stat = std::fs::symlink_metadata(path).unwrap();
    let mut xattrs = std::collections::BTreeMap::new();
    let mut names = vec![0_u8; 65536];
    let len = rustix::fs::llistxattr(path, names.as_mut_slice()).unwrap_or(0);
    for name in names[..len].split(|b| *b == 0).filter(|n| !n.is_empty()) {
        let mut value = vec![0_u8; 65536];
        let len = rustix::fs::lgetxattr(path, name, value.as_mut_slice()).unwrap();
        value.truncate(len);
        xattrs.insert(name.to_vec(), value);
    }
    Metadata {
        mode: (stat.mode() & 0o7777) as u16,
        uid: stat.uid(),
        gid: stat.gid(),
        mtime: Timestamp {
            sec: stat.mtime(),
            nsec: u32::try_from(stat.mtime_nsec()).unwrap(),
        },
        xattrs,
    }
}

impl Builder<'_> {
    fn directory(&mut self, path: &Path, at: NodeId) {
        let mut entries: Vec<_> = std::fs::read_dir(path)
            .unwrap()
            .map(|e| e.unwrap())
            .collect();
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            let stat = std::fs::symlink_metadata(&path).unwrap();
            let kind = stat.file_type();
            let file_name = entry.file_name();
            let name = file_name.as_bytes();
            if !kind.is_dir()
                && stat.nlink() > 1
                && let Some(known) = self.links.get(&stat.ino())
            {
                self.tree.link(at, name, *known).unwrap();
                continue;
            }
            let rdev = Rdev {
                major: rustix::fs::major(stat.rdev()),
                minor: rustix::fs::minor(stat.rdev()),
            };
            let node = if kind.is_dir() {
                NodeKind::Directory
            } else if kind.is_symlink() {
                let target = std::fs::read_link(&path).unwrap();
                NodeKind::Symlink(target.as_os_str().as_bytes().to_vec())
            } else if kind.is_file() {
                NodeKind::File(self.file(&path))
            } else if kind.is_char_device() {
                NodeKind::CharDevice(rdev)
            } else if kind.is_block_device() {
                NodeKind::BlockDevice(rdev)
            } else if kind.is_fifo() {
                NodeKind::Fifo
            } else {
                NodeKind::Socket
            };
            let id = self.tree.insert(at, name, metadata(&path), node).unwrap();
            self.links.insert(stat.ino(), id);
            if kind.is_dir() {
                self.directory(&path, id);
            }
        }
    }

    fn file(&mut self, path: &Path) -> FileData {
        let mut file = std::fs::File::open(path).unwrap();
        let size = file.metadata().unwrap().len();
        if size == 0 {
            return FileData::empty();
        }
        let chunks = self.writer.add_file(&mut file, size).unwrap();
        let start = BlockIndex::new(self.next / 4096).unwrap();
        let mut offset = self.next;
        for (digest, len) in chunks.chunks {
            self.map.push(Extent {
                data_offset: offset,
                len,
                digest,
            });
            offset += u64::from(len);
        }
        self.next = offset.next_multiple_of(4096);
        FileData {
            size,
            layout: FileLayout::Contiguous { start },
        }
    }
}

/// Publishes a directory as a layer, with `implicit` directories.
pub fn publish(store: &LayerStore, reference: &str, dir: &Path, implicit: &[&str]) -> Published {
    publish_with(store, reference, dir, implicit, WriterOptions::default())
}

pub fn publish_with(
    store: &LayerStore,
    reference: &str,
    dir: &Path,
    implicit: &[&str],
    options: WriterOptions,
) -> Published {
    let mut writer = store.writer(options).unwrap();
    let mut builder = Builder {
        tree: Tree::new(metadata(dir)),
        map: Vec::new(),
        next: 0,
        links: HashMap::new(),
        writer: &mut writer,
    };
    let root = builder.tree.root();
    builder.directory(dir, root);
    let (tree, extents, size) = (builder.tree, builder.map, builder.next);
    let mut map = MapBuilder::new(size);
    for extent in extents {
        map.push(extent);
    }
    for path in implicit {
        map.implicit(path.as_bytes());
    }
    let mut meta = Vec::new();
    let options = WriteOptions {
        data_blocks: size / 4096,
        device_tag: [b'd'; 64],
        ..WriteOptions::default()
    };
    write_image(&tree, &options, &mut meta).unwrap();
    let draft = Draft::new(reference.parse().unwrap(), meta, map.build().unwrap());
    writer.finish(draft).unwrap()
}

/// A layer's data as it should read, from a good store.
pub fn data_of(store: &LayerStore, manifest: &Manifest) -> Vec<u8> {
    let map = store.map(manifest).unwrap();
    let locator = store.locator(manifest, &map).unwrap();
    store.read_data(&map, &locator, 0..map.data_size()).unwrap()
}

/// One layer in one store, and what its data is.
pub struct Fixture {
    pub store: LayerStore,
    pub blobs: Arc<dyn BlobStore>,
    pub manifest: Manifest,
    pub data: Vec<u8>,
    pub scratch: ScratchDir,
}

/// Small files (many to a frame, some equal), files of several chunks, an empty one.
/// Removes a cache's directory, in which a thread that fetched may be writing its last file.
pub fn remove(dir: &Path) {
    while let Err(error) = std::fs::remove_dir_all(dir) {
        assert_eq!(error.kind(), std::io::ErrorKind::DirectoryNotEmpty);
    }
}

pub fn sample_tree(dir: &Path) {
    std::fs::create_dir_all(dir.join("small")).unwrap();
    for i in 0..60_usize {
        let seed = (i % 50) as u64;
        std::fs::write(dir.join(format!("small/{i}")), noise(seed, 100 + i * 97)).unwrap();
    }
    std::fs::write(dir.join("empty"), b"").unwrap();
    std::fs::write(dir.join("middle"), noise(1000, 60_000)).unwrap();
    std::fs::write(dir.join("large"), noise(2000, 1_500_000)).unwrap();
    std::fs::write(dir.join("larger"), noise(3000, 2_500_001)).unwrap();
}

pub fn fixture(blobs: Arc<dyn BlobStore>) -> Fixture {
    let scratch = ScratchDir::new("layerfs").unwrap();
    let source = scratch.join("source");
    sample_tree(&source);
    let store = LayerStore::new(Arc::clone(&blobs));
    let published = publish(&store, "base/sample:1", &source, &[]);
    let manifest = store.manifest(&published.digest).unwrap();
    let data = data_of(&store, &manifest);
    Fixture {
        store,
        blobs,
        manifest,
        data,
        scratch,
    }
}

pub fn config() -> FetchConfig {
    FetchConfig {
        read_timeout: LONG,
        ..FetchConfig::RECOMMENDED
    }
}

pub const BOOT: BootId = BootId::from_bytes([7; 16]);

impl Fixture {
    pub fn map(&self) -> LayerMap {
        self.store.map(&self.manifest).unwrap()
    }

    pub fn locator(&self) -> Locator {
        self.store.locator(&self.manifest, &self.map()).unwrap()
    }

    pub fn cache(&self, dir: &Path, boot: BootId) -> BlobCache {
        std::fs::create_dir_all(dir).unwrap();
        let map = self.map();
        BlobCache::open(
            dir,
            self.manifest.map.digest.as_bytes(),
            map.data_size(),
            map.extents().len() as u64,
            boot,
        )
        .unwrap()
    }

    /// The layer's data, read from `blobs` into a cache in `dir`.
    pub fn blob(&self, blobs: Arc<dyn BlobStore>, dir: &Path, config: FetchConfig) -> Arc<Blob> {
        self.blob_with(blobs, self.locator(), self.cache(dir, BOOT), config)
    }

    pub fn blob_with(
        &self,
        blobs: Arc<dyn BlobStore>,
        locator: Locator,
        cache: BlobCache,
        config: FetchConfig,
    ) -> Arc<Blob> {
        let url = blobs.url();
        let parts = BlobParts {
            manifest: self.manifest.clone(),
            map: self.map(),
            locator,
            cache,
            store_url: url.clone(),
            store: Some(LayerStore::new(blobs)),
            open_store: Arc::new(move || {
                Err(StoreError::InvalidUrl {
                    url: url.clone(),
                    why: "a test's store".to_owned(),
                })
            }),
        };
        Blob::new(parts, Fetcher::new(config))
    }
}

/// Reads and compares; the error if there was one.
pub fn read(
    blob: &Arc<Blob>,
    data: &[u8],
    offset: u64,
    len: usize,
) -> Result<(), layerpack_layerfs::fetch::ReadError> {
    let mut buf = ReplyBuf::new();
    let result = blob.read(offset, len, &mut buf);
    if result.is_ok() {
        let start = (offset as usize).min(data.len());
        let end = (start + len).min(data.len());
        assert!(
            buf.as_slice() == &data[start..end],
            "wrong bytes at {offset}+{len}"
        );
    } else {
        assert!(buf.as_slice().is_empty(), "bytes beside an error");
    }
    result
}

/// Counts range requests and can make them wait.
#[derive(Debug)]
pub struct Gauge {
    pub inner: Arc<dyn BlobStore>,
    pub ranges: AtomicU64,
    pub bytes: AtomicU64,
    pub seen: Mutex<Vec<(String, Range<u64>)>>,
    pub shut: AtomicBool,
    /// It refuses connections.
    pub away: AtomicBool,
    gate: (Mutex<()>, Condvar),
}

impl Gauge {
    pub fn new(inner: Arc<dyn BlobStore>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            ranges: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            seen: Mutex::new(Vec::new()),
            shut: AtomicBool::new(false),
            away: AtomicBool::new(false),
            gate: (Mutex::new(()), Condvar::new()),
        })
    }

    pub fn set_shut(&self, shut: bool) {
        let _guard = self.gate.0.lock().unwrap();
        self.shut.store(shut, Ordering::SeqCst);
        self.gate.1.notify_all();
    }
}

impl BlobStore for Gauge {
    fn get(&self, key: &Key, max_len: u64) -> StoreResult<Option<Vec<u8>>> {
        self.inner.get(key, max_len)
    }
    fn get_range(&self, key: &Key, range: Range<u64>) -> StoreResult<Vec<u8>> {
        self.ranges.fetch_add(1, Ordering::SeqCst);
        self.bytes
            .fetch_add(range.end - range.start, Ordering::SeqCst);
        self.seen
            .lock()
            .unwrap()
            .push((key.to_string(), range.clone()));
        let mut guard = self.gate.0.lock().unwrap();
        while self.shut.load(Ordering::SeqCst) {
            guard = self.gate.1.wait(guard).unwrap();
        }
        drop(guard);
        if self.away.load(Ordering::SeqCst) {
            return Err(StoreError::Io {
                operation: "read",
                store: self.url(),
                key: key.to_string(),
                source: std::io::ErrorKind::ConnectionRefused.into(),
            });
        }
        self.inner.get_range(key, range)
    }
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> StoreResult<PutOutcome> {
        self.inner.put(key, bytes, mode)
    }
    fn put_stream(&self) -> StoreResult<Box<dyn BlobWriter + '_>> {
        self.inner.put_stream()
    }
    fn size(&self, key: &Key) -> StoreResult<Option<u64>> {
        self.inner.size(key)
    }
    fn list(&self, prefix: &str) -> StoreResult<Vec<ObjectInfo>> {
        self.inner.list(prefix)
    }
    fn delete(&self, key: &Key) -> StoreResult<bool> {
        self.inner.delete(key)
    }
    fn url(&self) -> String {
        self.inner.url()
    }
}
