//! The build cache: what it saves, and that it never changes what is published.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use layerpack_fixtures::ScratchDir;
use layerpack_packer::{BuildOptions, BuildReport, Progress, Source, build};
use layerpack_store::LayerStore;

use crate::support::{Packed, memory_store, options};

/// Counts bytes of file contents that are read.
#[derive(Default)]
struct Reads(AtomicU64);

impl Progress for Reads {
    fn bytes(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
}

struct Fixture {
    scratch: ScratchDir,
    store: LayerStore,
}

impl Fixture {
    /// A tree whose files were written long enough ago to be remembered.
    fn new() -> Self {
        let scratch = ScratchDir::new("cache").unwrap();
        for i in 0..30_u8 {
            let dir = format!("tree/dir-{}/sub", i % 4);
            scratch.mkdir(&dir).unwrap();
            scratch
                .write(format!("{dir}/file-{i}"), vec![i; usize::from(i) * 40])
                .unwrap();
            scratch
                .write(
                    format!("tree/large-{i}"),
                    noise(i, 20_000 + 7 * usize::from(i)),
                )
                .unwrap();
        }
        scratch
            .write("tree/very-large", noise(99, 900_000))
            .unwrap();
        fs_err::hard_link(scratch.join("tree/large-3"), scratch.join("tree/link")).unwrap();
        std::thread::sleep(Duration::from_millis(150));
        if looks_coarse(&scratch.join("tree")) {
            // By chance, one in a thousand for each tick of the clock: such times count as those of
            // a clock of two seconds.
            std::thread::sleep(Duration::from_millis(2100));
        }
        Self {
            scratch,
            store: memory_store(),
        }
    }

    fn options(&self) -> BuildOptions {
        let mut options = options("base/t:1", Source::Dir(self.scratch.join("tree")));
        options.cache = Some(self.scratch.join("cache"));
        options
    }

    fn build_with(&self, store: &LayerStore, options: &BuildOptions) -> (BuildReport, u64) {
        let reads = Reads::default();
        let report = build(store, options, &reads).unwrap();
        (report, reads.0.into_inner())
    }

    fn build(&self) -> (BuildReport, u64) {
        self.build_with(&self.store, &self.options())
    }

    /// What a build without a cache publishes.
    fn truth(&self) -> layerpack_store::Digest {
        let mut options = self.options();
        options.cache = None;
        let (report, _) = self.build_with(&memory_store(), &options);
        report.published.digest
    }
}

/// Whether the change time of a file below is one of whole microseconds.
fn looks_coarse(dir: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    fs_err::read_dir(dir).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        let metadata = fs_err::symlink_metadata(&path).unwrap();
        match metadata.is_dir() {
            true => looks_coarse(&path),
            false => metadata.ctime_nsec() % 1000 == 0,
        }
    })
}

fn noise(seed: u8, len: usize) -> Vec<u8> {
    let mut state = u64::from(seed) + 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .collect()
}

/// Writes other bytes of the same length, and puts the modification time back.
fn rewrite(path: &Path) {
    let modified = fs_err::metadata(path).unwrap().modified().unwrap();
    let mut bytes = fs_err::read(path).unwrap();
    bytes
        .iter_mut()
        .for_each(|byte| *byte = byte.wrapping_add(1));
    fs_err::write(path, bytes).unwrap();
    let file = fs_err::OpenOptions::new().write(true).open(path).unwrap();
    file.file().set_modified(modified).unwrap();
}

#[test]
fn a_rebuild_reads_and_writes_nothing() {
    let fixture = Fixture::new();
    let (first, read) = fixture.build();
    assert!(read > 1_400_000, "{read}");
    let (again, read) = fixture.build();
    assert_eq!(read, 0);
    assert_eq!(again.published.digest, first.published.digest);
    assert_eq!(again.published.stats.new_bytes, 0);
    assert_eq!(
        again.published.stats.raw_bytes,
        first.published.stats.raw_bytes
    );
    assert_eq!(first.published.digest, fixture.truth());
}

#[test]
fn a_changed_file_costs_its_own_bytes() {
    let fixture = Fixture::new();
    fixture.build();
    // Same size, same modification time: the change time tells.
    rewrite(&fixture.scratch.join("tree/large-7"));
    fixture.scratch.write("tree/dir-1/new", "new").unwrap();
    fs_err::remove_file(fixture.scratch.join("tree/large-9")).unwrap();
    let mut options = fixture.options();
    options.reference = "base/t:2".parse().unwrap();
    let (report, read) = fixture.build_with(&fixture.store, &options);
    assert_eq!(read, 20_049 + 3);
    assert_eq!(report.published.stats.new_raw_bytes, 20_049 + 3);
    let packed = Packed::load(&fixture.store, report.published.digest, Vec::new());
    let tree = packed.tree();
    let disk = fs_err::read(fixture.scratch.join("tree/large-7")).unwrap();
    assert!(tree.get("large-7").content() == disk);
    assert!(!tree.has("large-9") && tree.has("dir-1/new"));
}

/// Edits that follow at once on the reading, in the same tick of the clock or not.
#[test]
fn an_edit_right_after_the_build_is_seen() {
    let fixture = Fixture::new();
    let path = fixture.scratch.join("tree/racy");
    for round in 0..20_u8 {
        fs_err::write(&path, vec![round; 5000]).unwrap();
        let mut options = fixture.options();
        options.reference = format!("base/racy:{round}").parse().unwrap();
        fixture.build_with(&fixture.store, &options);
        rewrite(&path);
        options.reference = format!("base/racy:{round}-edited").parse().unwrap();
        let (report, _) = fixture.build_with(&fixture.store, &options);
        let packed = Packed::load(&fixture.store, report.published.digest, Vec::new());
        let disk = fs_err::read(&path).unwrap();
        assert!(packed.tree().get("racy").content() == disk, "round {round}");
    }
}

#[test]
fn a_damaged_cache_costs_time_only() {
    let fixture = Fixture::new();
    let (first, _) = fixture.build();
    let files: Vec<_> = fs_err::read_dir(fixture.scratch.join("cache"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert!(!files.is_empty());
    for at in [0, 20, 60, 500, 2000] {
        for file in &files {
            let mut bytes = fs_err::read(file).unwrap();
            let at = at % bytes.len();
            bytes[at] ^= 0x20;
            fs_err::write(file, bytes).unwrap();
        }
        let (again, _) = fixture.build();
        assert_eq!(again.published.digest, first.published.digest, "byte {at}");
        assert_eq!(again.published.stats.new_bytes, 0);
        let (_, read) = fixture.build();
        assert_eq!(read, 0, "rebuilt after byte {at}");
    }
}

#[test]
fn another_store_gets_what_it_lacks() {
    let fixture = Fixture::new();
    let (first, all) = fixture.build();
    let other = memory_store();
    let (report, read) = fixture.build_with(&other, &fixture.options());
    assert_eq!(read, all);
    assert_eq!(report.published.digest, first.published.digest);
    let tree = Packed::load(&other, report.published.digest, Vec::new()).tree();
    let disk = fs_err::read(fixture.scratch.join("tree/very-large")).unwrap();
    assert!(tree.get("very-large").content() == disk);
    // And the cache is as good as before, for both.
    assert_eq!(fixture.build().1, 0);
    assert_eq!(fixture.build_with(&other, &fixture.options()).1, 0);
}

#[test]
fn fresh_means_that_all_is_read_and_remembered_again() {
    let fixture = Fixture::new();
    let (first, all) = fixture.build();
    let mut options = fixture.options();
    options.fresh = true;
    let (report, read) = fixture.build_with(&fixture.store, &options);
    assert_eq!(read, all);
    assert_eq!(report.published.digest, first.published.digest);
    assert_eq!(fixture.build().1, 0);
}

#[test]
fn a_cache_that_cannot_be_written_is_done_without() {
    let fixture = Fixture::new();
    let mut options = fixture.options();
    options.cache = Some(fixture.scratch.write("no-directory", "").unwrap());
    let (report, _) = fixture.build_with(&fixture.store, &options);
    assert_eq!(report.published.digest, fixture.truth());
}

#[test]
fn builds_at_once_share_a_cache() {
    let fixture = Fixture::new();
    let truth = fixture.truth();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..3 {
                    assert_eq!(fixture.build().0.published.digest, truth);
                }
            });
        }
    });
    assert_eq!(fixture.build().1, 0);
}

/// Enough files that what has to be known of them lies in temporary files.
#[test]
fn a_layer_of_many_files_is_the_same_with_temporary_files() {
    let scratch = ScratchDir::new("many-files").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    for i in 0..45_000_u32 {
        if i.is_multiple_of(500) {
            fs_err::create_dir(dir.join((i / 500).to_string())).unwrap();
        }
        let text = format!("{} contents of file", i / 3 * 3);
        fs_err::write(dir.join(format!("{}/{i}", i / 500)), text).unwrap();
    }
    let cache = scratch.join("cache");
    let store = memory_store();
    let mut digests = Vec::new();
    // Without, with, and with what the build before remembered.
    for cache in [None, Some(cache.clone()), Some(cache.clone())] {
        let mut options = options("base/many:1", Source::Dir(dir.clone()));
        options.cache = cache;
        let report = build(&store, &options, &Reads::default()).unwrap();
        assert_eq!(report.counts.files, 45_000);
        digests.push(report.published.digest);
    }
    assert_eq!(digests[0], digests[1]);
    assert_eq!(digests[0], digests[2]);
    let packed = Packed::load(&store, digests[0], Vec::new());
    let tree = packed.tree();
    assert_eq!(tree.get("89/44999").content(), b"44997 contents of file");
}
