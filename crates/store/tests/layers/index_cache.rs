//! The node's copy of the index: what it finds, what damages it, who shares it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use fs_err as fs;
use layerpack_store::format::index::{IndexEntry, IndexPack, IndexSegment};
use layerpack_store::index::Place;
use layerpack_store::{
    BlobStore, ChunkIndex, CompactOptions, Digest, Fault, FaultStore, FileStore, Key, LayerStore,
    MemStore, PutMode, compact_index,
};
use proptest::prelude::*;

use crate::support::{data_of, publish, read_all, reference, sample};

/// A segment of one pack, whose chunks are numbers hashed.
fn segment(pack: u64, chunks: impl IntoIterator<Item = u64>) -> IndexSegment {
    let entries = chunks
        .into_iter()
        .zip(0_u32..)
        .map(|(n, chunk)| IndexEntry {
            digest: digest(n),
            pack: 0,
            chunk,
        })
        .collect();
    IndexSegment::new(vec![index_pack(pack)], entries).unwrap()
}

fn digest(n: u64) -> Digest {
    Digest::of(&n.to_le_bytes())
}

fn index_pack(n: u64) -> IndexPack {
    IndexPack {
        id: Digest::of(format!("pack {n}").as_bytes()),
        size: 100_000 + n,
        table_offset: 50_000 + n,
    }
}

fn put(blobs: &dyn BlobStore, segment: &IndexSegment) -> Key {
    let bytes = segment.to_bytes().unwrap();
    let key = Key::index(&Digest::of(&bytes));
    blobs.put(&key, &bytes, PutMode::Overwrite).unwrap();
    key
}

fn find(index: &mut ChunkIndex, n: u64) -> Vec<Place> {
    let mut places = Vec::new();
    index.find(&digest(n), &mut places).unwrap();
    places.sort_by_key(|p| (p.pack.id, p.chunk));
    places
}

/// The places of each digest, looked up together.
fn find_many(index: &mut ChunkIndex, digests: &[Digest], threads: usize) -> Vec<Vec<Place>> {
    let mut found = vec![Vec::new(); digests.len()];
    let mut add = |number: usize, place| found[number].push(place);
    index.find_many(digests, threads, &mut add).unwrap();
    for places in &mut found {
        places.sort_by_key(|p: &Place| (p.pack.id, p.chunk));
        places.dedup();
    }
    found
}

fn memory() -> (Arc<dyn BlobStore>, LayerStore) {
    crate::support::memory()
}

fn runs(cache: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for store in fs::read_dir(cache).unwrap() {
        for entry in fs::read_dir(store.unwrap().path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "run") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

#[derive(Debug, Clone)]
enum Step {
    /// A segment of these chunks.
    Add(Vec<u64>),
    /// The segment with this number (modulo how many there are) is deleted.
    Delete(usize),
    Compact,
    /// Everything is looked up, by a fresh index.
    Look,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let chunks = proptest::collection::vec(0..400_u64, 0..60);
    let step = prop_oneof![
        5 => chunks.prop_map(Step::Add),
        1 => (0..100_usize).prop_map(Step::Delete),
        1 => Just(Step::Compact),
        2 => Just(Step::Look),
    ];
    proptest::collection::vec(step, 1..30)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// With a cache and without, after whatever happened to the segments: the same as a map.
    #[test]
    fn it_is_a_map_from_digests_to_places(steps in steps()) {
        let (blobs, store) = memory();
        let dir = tempfile::tempdir().unwrap();
        // By pack: its chunks. A pack is named as long as a segment names it.
        let mut packs: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        let mut next = 0;
        for step in steps.into_iter().chain([Step::Look]) {
            match step {
                Step::Add(mut chunks) => {
                    chunks.sort_unstable();
                    chunks.dedup();
                    put(&*blobs, &segment(next, chunks.iter().copied()));
                    packs.insert(next, chunks);
                    next += 1;
                }
                Step::Delete(n) => {
                    // All segments that name one pack.
                    if let Some(&pack) = packs.keys().nth(n % packs.len().max(1)) {
                        let options = CompactOptions {
                            drop_packs: [index_pack(pack).id].into(),
                            min_segments: usize::MAX,
                            ..CompactOptions::recommended()
                        };
                        compact_index(&store, &options).unwrap();
                        packs.remove(&pack);
                    }
                }
                Step::Compact => {
                    let options = CompactOptions { min_segments: 2, target_bytes: 64 << 10, ..CompactOptions::recommended() };
                    let report = compact_index(&store, &options).unwrap();
                    prop_assert!(report.warnings.is_empty());
                }
                Step::Look => {
                    for cache in [None, Some(dir.path())] {
                        let mut index = ChunkIndex::open(&store, cache).unwrap();
                        for n in 0..400 {
                            let mut expected: Vec<Place> = packs
                                .iter()
                                .filter_map(|(pack, chunks)| {
                                    let chunk = chunks.iter().position(|c| *c == n)?;
                                    Some(Place { pack: index_pack(*pack), chunk: chunk as u32 })
                                })
                                .collect();
                            expected.sort_by_key(|p| (p.pack.id, p.chunk));
                            prop_assert_eq!(find(&mut index, n), expected, "chunk {} cache {:?}", n, cache);
                        }
                        prop_assert!(index.take_warnings().is_empty());
                    }
                }
            }
        }
    }
}

/// Enough chunks for many blocks, from segments of very different sizes.
fn large(blobs: &dyn BlobStore) -> u64 {
    let sizes = [40_000, 1, 3, 20_000, 700, 5000, 2, 9000];
    let mut first = 0;
    for (pack, size) in sizes.into_iter().enumerate() {
        put(blobs, &segment(pack as u64, first..first + size));
        first += size;
    }
    first
}

#[test]
fn many_chunks_are_found_and_others_are_not() {
    let (blobs, store) = memory();
    let count = large(&*blobs);
    let dir = tempfile::tempdir().unwrap();
    let mut index = ChunkIndex::open(&store, Some(dir.path())).unwrap();
    for n in 0..count {
        assert_eq!(find(&mut index, n).len(), 1, "chunk {n}");
    }
    for n in count..2 * count {
        assert_eq!(find(&mut index, n), [], "chunk {n}");
    }
    let all: Vec<Digest> = (0..2 * count).map(digest).collect();
    for threads in [1, 3] {
        let found = find_many(&mut index, &all, threads);
        for (n, places) in (0..).zip(&found) {
            assert_eq!(*places, find(&mut index, n), "chunk {n}");
        }
    }
    let stats = index.stats();
    assert_eq!(stats.chunks, count);
    assert!(stats.disk_bytes < count * 47, "{stats:?}");
    assert!(stats.memory_bytes < count * 2, "{stats:?}");
}

/// A build that comes next reads the new segment and nothing else.
#[test]
fn a_segment_is_read_once() {
    let inner: Arc<dyn BlobStore> = Arc::new(MemStore::new());
    large(&*inner);
    let dir = tempfile::tempdir().unwrap();
    let calls = || {
        let counting = Arc::new(FaultStore::fail_nth(
            Arc::clone(&inner),
            u64::MAX,
            Fault::Error,
        ));
        let store = LayerStore::new(Arc::clone(&counting) as Arc<dyn BlobStore>);
        let mut index = ChunkIndex::open(&store, Some(dir.path())).unwrap();
        assert_eq!(find(&mut index, 1).len(), 1);
        counting.calls()
    };
    assert!(calls() >= 9);
    assert_eq!(calls(), 1, "one list");
    put(&*inner, &segment(100, [1_000_000]));
    assert!(calls() <= 3);
    assert_eq!(calls(), 1);
    assert_eq!(
        runs(dir.path()).len(),
        2,
        "a large run, and what came since"
    );
}

/// Whatever bit changes in a run: it is noticed where it matters, and made again.
#[test]
fn a_damaged_run_is_made_again() {
    let (blobs, store) = memory();
    for pack in 0..4 {
        put(&*blobs, &segment(pack, pack * 40..pack * 40 + 40));
    }
    let dir = tempfile::tempdir().unwrap();
    let expected: Vec<_> = {
        let mut index = ChunkIndex::open(&store, Some(dir.path())).unwrap();
        (0..200).map(|n| find(&mut index, n)).collect()
    };
    let all: Vec<Digest> = (0..200).map(digest).collect();
    let path = runs(dir.path()).pop().unwrap();
    let good = fs::read(&path).unwrap();
    for at in (0..good.len()).step_by(3).chain(0..64) {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(&path, &bad).unwrap();
        let mut index = ChunkIndex::open(&store, Some(dir.path())).unwrap();
        let mut warned = false;
        // Often enough for the filter to be read.
        for _ in 0..4 {
            for (n, places) in expected.iter().enumerate() {
                assert_eq!(&find(&mut index, n as u64), places, "byte {at}, chunk {n}");
            }
        }
        for warning in index.take_warnings() {
            assert!(warning.contains("index cache file"), "{warning}");
            warned = true;
        }
        fs::write(&path, &bad).unwrap();
        let mut index = ChunkIndex::open(&store, Some(dir.path())).unwrap();
        for _ in 0..4 {
            assert_eq!(find_many(&mut index, &all, 2), expected, "byte {at}");
        }
        // Bits that nobody needs to believe: reserved, compatible features.
        let harmless = (12..20).contains(&at);
        assert_eq!(
            warned || harmless,
            fs::read(&path).map_or(true, |now| now == good) || harmless,
            "byte {at}"
        );
        assert!(warned || harmless, "byte {at} was not noticed");
    }
    for cut in [0, 1, 63, 64, 65, good.len() / 2, good.len() - 1] {
        fs::write(&path, &good[..cut]).unwrap();
        let mut index = ChunkIndex::open(&store, Some(dir.path())).unwrap();
        assert_eq!(find(&mut index, 7), expected[7]);
        assert_eq!(index.take_warnings().len(), 1, "cut at {cut}");
        assert_eq!(fs::read(&path).unwrap(), good);
    }
}

/// A run that is damaged is found out in a merge too, also where no look-up came by.
#[test]
fn damage_does_not_pass_through_a_merge() {
    let (blobs, store) = memory();
    put(&*blobs, &segment(0, 0..500));
    let dir = tempfile::tempdir().unwrap();
    ChunkIndex::open(&store, Some(dir.path())).unwrap();
    let path = runs(dir.path()).pop().unwrap();
    let good = fs::read(&path).unwrap();
    for at in [100, good.len() / 3, good.len() / 2, good.len() - 40] {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        fs::write(&path, &bad).unwrap();
        // Of like size: merged when it is opened.
        put(&*blobs, &segment(at as u64, 1000..1400));
        let mut index = ChunkIndex::open(&store, Some(dir.path())).unwrap();
        for n in (0..500).chain(1000..1400) {
            assert!(!find(&mut index, n).is_empty(), "byte {at}, chunk {n}");
        }
        assert_eq!(index.take_warnings().len(), 1, "byte {at}");
        for run in runs(dir.path()) {
            fs::remove_file(run).unwrap();
        }
        for object in blobs.list("index/").unwrap() {
            blobs.delete(&object.key).unwrap();
        }
        put(&*blobs, &segment(0, 0..500));
        ChunkIndex::open(&store, Some(dir.path())).unwrap();
    }
}

/// Files in the cache that are not ours, and what a killed process leaves.
#[test]
fn strange_files_in_the_cache_do_no_harm() {
    let (blobs, store) = memory();
    put(&*blobs, &segment(0, 0..10));
    let dir = tempfile::tempdir().unwrap();
    ChunkIndex::open(&store, Some(dir.path())).unwrap();
    let home = runs(dir.path())[0].parent().unwrap().to_owned();
    fs::write(home.join("tmp-1-1"), b"half a run").unwrap();
    fs::write(home.join("notes.txt"), b"?").unwrap();
    fs::create_dir(home.join("x")).unwrap();
    let mut index = ChunkIndex::open(&store, Some(dir.path())).unwrap();
    assert_eq!(find(&mut index, 3).len(), 1);
    assert!(index.take_warnings().is_empty());

    // A cache that cannot be: the store's index is read, and one warning tells.
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let mut index = ChunkIndex::open(&store, Some(&file)).unwrap();
    assert_eq!(find(&mut index, 3).len(), 1);
    let warnings = index.take_warnings();
    assert!(
        warnings.len() == 1 && warnings[0].contains("cannot be used"),
        "{warnings:?}"
    );
}

/// A run of the version before is made again without a word.
#[test]
fn a_run_of_an_older_version_is_made_again() {
    let (blobs, store) = memory();
    put(&*blobs, &segment(0, 0..500));
    let dir = tempfile::tempdir().unwrap();
    ChunkIndex::open(&store, Some(dir.path())).unwrap();
    let path = runs(dir.path()).pop().unwrap();
    let good = fs::read(&path).unwrap();
    let mut old = good.clone();
    old[..8].copy_from_slice(b"LPRUN\0\r\n");
    fs::write(&path, &old).unwrap();
    let mut index = ChunkIndex::open(&store, Some(dir.path())).unwrap();
    assert_eq!(find(&mut index, 3).len(), 1);
    assert!(index.take_warnings().is_empty());
    assert!(fs::read(&path).unwrap() == good);
}

/// A chunk with places in one run side by side and in several runs; what is like it in the byte that
/// the filter has; counted once however it is looked up.
#[test]
fn all_places_are_found_with_the_filter_and_without() {
    let (blobs, store) = memory();
    for pack in 0..5 {
        put(&*blobs, &segment(pack, 0..3000));
    }
    let dir = tempfile::tempdir().unwrap();
    ChunkIndex::open(&store, Some(dir.path())).unwrap();
    put(&*blobs, &segment(9, 0..10));
    let mut index = ChunkIndex::open(&store, Some(dir.path())).unwrap();
    assert_eq!(index.stats().parts, 2);
    for round in 0..2 {
        for n in 0..3000 {
            let places = find(&mut index, n);
            let packs: Vec<_> = places.iter().map(|p| p.pack).collect();
            assert_eq!(places.len(), if n < 10 { 6 } else { 5 }, "{round}: {n}");
            assert!(packs.contains(&index_pack(4)), "{round}: {n}");
            assert_eq!(packs.contains(&index_pack(9)), n < 10, "{round}: {n}");
            assert_eq!(find(&mut index, 3000 + n), [], "{round}: {n}");
        }
    }
    let both: Vec<Digest> = (0..6000).chain(0..10).map(digest).collect();
    let found = find_many(&mut index, &both, 2);
    for (n, places) in (0..6000).chain(0..10).zip(&found) {
        assert_eq!(*places, find(&mut index, n), "chunk {n}");
    }
    // Also before the filter is read, and without a copy on the node.
    for cache in [Some(dir.path()), None] {
        let mut index = ChunkIndex::open(&store, cache).unwrap();
        for few in both.chunks(7).take(20) {
            let together = find_many(&mut index, few, 1);
            let mut other = ChunkIndex::open(&store, None).unwrap();
            for (digest, places) in few.iter().zip(together) {
                let mut alone = Vec::new();
                other.find(digest, &mut alone).unwrap();
                alone.sort_by_key(|p| (p.pack.id, p.chunk));
                assert_eq!(places, alone);
            }
        }
    }
}

#[test]
fn damaged_segments_are_warnings() {
    let (blobs, store) = memory();
    let bad = put(&*blobs, &segment(0, 0..500));
    put(&*blobs, &segment(1, 400..900));
    let mut bytes = blobs.get(&bad, u64::MAX).unwrap().unwrap();
    let last = bytes.len() - 7;
    bytes[last] ^= 1;
    blobs.put(&bad, &bytes, PutMode::Overwrite).unwrap();
    let stray = Key::new("index/readme").unwrap();
    blobs.put(&stray, b"hello", PutMode::Overwrite).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for cache in [None, Some(dir.path())] {
        let mut index = ChunkIndex::open(&store, cache).unwrap();
        assert_eq!(find(&mut index, 3), []);
        assert_eq!(find(&mut index, 450).len(), 1);
        let warnings = index.take_warnings();
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        for key in [&bad, &stray] {
            assert!(warnings.iter().any(|w| w.contains(key.as_str())));
        }
    }
    let report = compact_index(
        &store,
        &CompactOptions {
            min_segments: 2,
            ..CompactOptions::recommended()
        },
    )
    .unwrap();
    assert_eq!((report.written, report.replaced), (0, 0));
    assert_eq!(report.warnings.len(), 1, "{report:?}");
    assert!(blobs.size(&bad).unwrap().is_some(), "left alone");
}

/// Segments that the store no longer has count no more, whatever the cache knows.
#[test]
fn vanished_segments_are_forgotten() {
    let (blobs, store) = memory();
    let gone = put(&*blobs, &segment(0, 0..50));
    put(&*blobs, &segment(1, 40..90));
    let dir = tempfile::tempdir().unwrap();
    let mut before = ChunkIndex::open(&store, Some(dir.path())).unwrap();
    assert_eq!(find(&mut before, 45).len(), 2);
    blobs.delete(&gone).unwrap();
    let mut after = ChunkIndex::open(&store, Some(dir.path())).unwrap();
    assert_eq!(find(&mut after, 3), []);
    assert_eq!(find(&mut after, 45).len(), 1);
    assert!(after.take_warnings().is_empty());
    // Who opened it before is not disturbed.
    assert_eq!(find(&mut before, 3).len(), 1);
}

/// Compaction while another process reads: nothing is missed at any moment.
#[test]
fn compaction_beside_readers_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let blobs: Arc<dyn BlobStore> = Arc::new(FileStore::new(dir.path().join("store")).unwrap());
    let store = LayerStore::new(Arc::clone(&blobs));
    for pack in 0..30 {
        put(&*blobs, &segment(pack, pack * 100..pack * 100 + 100));
    }
    let options = CompactOptions {
        min_segments: 2,
        target_bytes: 64 << 10,
        ..CompactOptions::recommended()
    };
    std::thread::scope(|scope| {
        for reader in 0..3 {
            let (store, cache) = (&store, dir.path().join("cache"));
            scope.spawn(move || {
                for _ in 0..6 {
                    let cache = (reader > 0).then_some(cache.as_path());
                    let mut index = ChunkIndex::open(store, cache).unwrap();
                    for n in (0..3000).step_by(37) {
                        assert!(
                            !find(&mut index, n).is_empty(),
                            "reader {reader}, chunk {n}"
                        );
                    }
                    let warnings = index.take_warnings();
                    assert!(warnings.is_empty(), "{warnings:?}");
                }
            });
        }
        for _ in 0..2 {
            let (store, options) = (&store, &options);
            scope.spawn(move || {
                for _ in 0..3 {
                    let report = compact_index(store, options).unwrap();
                    assert!(report.warnings.is_empty(), "{report:?}");
                }
            });
        }
    });
    assert!(blobs.list("index/").unwrap().len() < 6);
    assert!(
        store.verify_index().unwrap().len() >= 30,
        "packs are made up"
    );
}

/// Every call of a compaction fails once: at any moment all chunks are named.
#[test]
fn a_compaction_that_fails_loses_nothing() {
    for fault in Fault::ALL {
        for nth in 1.. {
            let (blobs, healthy) = memory();
            for pack in 0..5 {
                put(&*blobs, &segment(pack, pack * 8..pack * 8 + 10));
            }
            let faulty = Arc::new(FaultStore::fail_nth(Arc::clone(&blobs), nth, fault));
            let store = LayerStore::new(Arc::clone(&faulty) as Arc<dyn BlobStore>);
            let options = CompactOptions {
                min_segments: 2,
                drop_packs: [index_pack(4).id].into(),
                ..CompactOptions::recommended()
            };
            let result = compact_index(&store, &options);
            let mut index = ChunkIndex::open(&healthy, None).unwrap();
            for n in 0..32 {
                assert!(
                    !find(&mut index, n).is_empty(),
                    "{fault:?} in call {nth}, chunk {n}"
                );
            }
            assert!(index.take_warnings().is_empty());
            if let Err(error) = result {
                assert!(error.key().is_some(), "{error:?}");
            }
            if !faulty.fired() && nth > faulty.calls() {
                break;
            }
            assert!(nth < 100, "no end");
        }
    }
}

#[test]
fn a_dry_run_changes_nothing() {
    let (blobs, store) = memory();
    for pack in 0..5 {
        put(&*blobs, &segment(pack, pack * 8..pack * 8 + 10));
    }
    let before = blobs.list("").unwrap();
    let mut options = CompactOptions {
        min_segments: 2,
        dry_run: true,
        ..CompactOptions::recommended()
    };
    let told = compact_index(&store, &options).unwrap();
    assert_eq!(blobs.list("").unwrap(), before);
    options.dry_run = false;
    assert_eq!(compact_index(&store, &options).unwrap(), told);
    // Chunks 8, 9, 16, ... have two places each: a second segment.
    assert_eq!(
        (told.replaced, told.written, told.segments_before),
        (5, 2, 5)
    );
    assert_eq!(blobs.list("index/").unwrap().len(), 2);
}

/// Layers through a cache are the same layers, and a second build writes nothing.
#[test]
fn writers_share_chunks_through_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let (blobs, plain) = memory();
    let store = LayerStore::new(Arc::clone(&blobs)).with_index_cache(dir.path());
    let mut layers = Vec::new();
    for seed in 0..4 {
        let files = sample(seed * 2);
        let name = format!("base/x:{seed}");
        publish(&store, &name, &files).unwrap();
        layers.push((name, files));
    }
    for (name, files) in &layers {
        let again = publish(&store, name, files).unwrap();
        assert_eq!((again.stats.new_bytes, again.stats.new_packs), (0, 0));
        assert!(again.warnings.is_empty(), "{:?}", again.warnings);
        assert!(read_all(&plain, name).unwrap() == data_of(files));
        assert!(plain.verify(&reference(name)).unwrap().is_ok());
    }
}

const CHILD: &str = "LAYERPACK_TEST_INDEX_CHILD";

/// A process of its own: opens the index again and again.
#[test]
#[ignore = "a child process of another test"]
fn child_that_opens_the_index() {
    let Ok(dir) = std::env::var(CHILD) else {
        return;
    };
    let dir = PathBuf::from(dir);
    let blobs: Arc<dyn BlobStore> = Arc::new(FileStore::new(dir.join("store")).unwrap());
    let store = LayerStore::new(blobs);
    for round in 0..10 {
        let mut index = ChunkIndex::open(&store, Some(&dir.join("cache"))).unwrap();
        for n in (0..20_000).step_by(91) {
            assert!(!find(&mut index, n).is_empty(), "round {round}, chunk {n}");
        }
        assert!(index.take_warnings().is_empty());
    }
}

fn child(dir: &Path) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "index_cache::child_that_opens_the_index",
        ])
        .env(CHILD, dir)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn filled(dir: &Path) -> (Arc<dyn BlobStore>, LayerStore) {
    let blobs: Arc<dyn BlobStore> = Arc::new(FileStore::new(dir.join("store")).unwrap());
    for pack in 0..20 {
        put(&*blobs, &segment(pack, pack * 1000..pack * 1000 + 1000));
    }
    (Arc::clone(&blobs), LayerStore::new(blobs))
}

#[test]
fn processes_share_a_cache() {
    let dir = tempfile::tempdir().unwrap();
    let (blobs, store) = filled(dir.path());
    let mut children: Vec<_> = (0..4).map(|_| child(dir.path())).collect();
    for pack in 20..40 {
        put(&*blobs, &segment(pack, pack * 1000..pack * 1000 + 1000));
    }
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    let mut index = ChunkIndex::open(&store, Some(&dir.path().join("cache"))).unwrap();
    for n in (0..40_000).step_by(17) {
        assert_eq!(find(&mut index, n).len(), 1, "chunk {n}");
    }
    assert!(index.take_warnings().is_empty());
    assert!(index.stats().parts <= 3, "{:?}", index.stats());
}

/// A small run between does not keep larger ones of similar size apart.
#[test]
fn runs_of_similar_size_become_one_whatever_is_smaller() {
    let dir = tempfile::tempdir().unwrap();
    let blobs: Arc<dyn BlobStore> = Arc::new(FileStore::new(dir.path().join("store")).unwrap());
    let store = LayerStore::new(Arc::clone(&blobs));
    let mut parts = Vec::new();
    for (first, packs) in [(0, 6), (6, 1), (7, 5)] {
        for pack in first..first + packs {
            put(&*blobs, &segment(pack, pack * 1000..pack * 1000 + 1000));
        }
        let index = ChunkIndex::open(&store, Some(&dir.path().join("cache"))).unwrap();
        parts.push(index.stats().parts);
    }
    assert_eq!(parts, [1, 2, 1]);
}

#[test]
fn killed_processes_leave_a_cache_that_works() {
    let dir = tempfile::tempdir().unwrap();
    let (blobs, store) = filled(dir.path());
    for round in 0..12_u64 {
        let mut victim = child(dir.path());
        std::thread::sleep(std::time::Duration::from_millis(3 + round * 7));
        victim.kill().unwrap();
        victim.wait().unwrap();
        put(&*blobs, &segment(100 + round, [1_000_000 + round]));
    }
    let mut index = ChunkIndex::open(&store, Some(&dir.path().join("cache"))).unwrap();
    for n in (0..20_000).step_by(17).chain(1_000_000..1_000_012) {
        assert!(!find(&mut index, n).is_empty(), "chunk {n}");
    }
    assert!(index.take_warnings().is_empty());
}
