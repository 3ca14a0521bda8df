//! Ranges, frames and requests.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use layerpack_store::{
    BlobStore, BlobWriter, Delivery, Key, LayerMap, LayerStore, Locator, ObjectInfo, PutMode,
    PutOutcome, ReadLimits, Result, StoreError,
};

use crate::support::{data_of, memory, noise, publish, reference, sample, text};

fn open(files: &[Vec<u8>]) -> (LayerStore, LayerMap, Locator) {
    let (_, store) = memory();
    publish(&store, "base/x:1", files).unwrap();
    let (_, manifest) = store.load(&reference("base/x:1")).unwrap();
    let map = store.map(&manifest).unwrap();
    let locator = store.locator(&manifest, &map).unwrap();
    (store, map, locator)
}

#[test]
fn any_range_is_right() {
    let files = sample(1);
    let (store, map, locator) = open(&files);
    let data = data_of(&files);
    assert_eq!(map.data_size(), data.len() as u64);
    let noise = noise(1, 1600);
    let points: Vec<u64> = noise
        .chunks_exact(8)
        .map(|b| u64::from_le_bytes(b.try_into().unwrap()) % (data.len() as u64 + 1))
        .collect();
    for pair in points.chunks_exact(2) {
        let range = pair[0].min(pair[1])..pair[0].max(pair[1]);
        let seen = store.read_data(&map, &locator, range.clone()).unwrap();
        assert!(
            seen == data[range.start as usize..range.end as usize],
            "{range:?}"
        );
    }
    for range in [0..map.data_size() + 1, u64::MAX - 1..u64::MAX] {
        assert!(matches!(
            store.read_data(&map, &locator, range),
            Err(StoreError::InvalidInput { .. })
        ));
    }
}

#[test]
fn neighbours_share_requests() {
    // 200 frames of about 100 KiB, stored raw: 20 MiB in one pack.
    let files: Vec<_> = (0..200).map(|i| noise(i, 65_536)).collect();
    let (store, _, locator) = open(&files);
    let all: Vec<u32> = (0..locator.frames().len() as u32).collect();
    let mut seen = Vec::new();
    let mut total = 0;
    let stats = store
        .read_frames(&locator, &all, &mut |frame, raw| {
            seen.push(frame);
            total += raw.len();
            Ok(())
        })
        .unwrap();
    assert_eq!(seen, all);
    assert_eq!(total, 200 * 65_536);
    assert_eq!(stats.bytes, locator.stored_bytes());
    assert_eq!(
        stats.requests,
        stats.bytes.div_ceil(64 * 65_536),
        "requests of 4 MiB"
    );

    // Repeats and disorder cost nothing; a gap of one frame is read through, of two is not.
    let frames = [6, 0, 2, 0, 2];
    let mut seen = Vec::new();
    let stats = store
        .read_frames(&locator, &frames, &mut |frame, _| {
            seen.push(frame);
            Ok(())
        })
        .unwrap();
    assert_eq!(seen, [0, 2, 6]);
    assert_eq!((stats.requests, stats.bytes), (2, 4 * 65_536));

    assert!(matches!(
        store.read_frame(&locator, u32::MAX),
        Err(StoreError::InvalidInput { .. })
    ));
    assert!(store.read_frame(&locator, 7).unwrap() == files[7]);
}

#[test]
fn a_sink_may_end_the_read() {
    let (store, _, locator) = open(&sample(1));
    let all: Vec<u32> = (0..locator.frames().len() as u32).collect();
    let mut calls = 0;
    let result = store.read_frames(&locator, &all, &mut |_, _| {
        calls += 1;
        Err(StoreError::WriterFailed {
            store: "sink".to_owned(),
        })
    });
    assert!(matches!(result, Err(StoreError::WriterFailed { .. })));
    assert_eq!(calls, 1);
}

#[test]
fn frames_know_their_extents() {
    let files = vec![
        text(1, 2000),
        text(2, 3000),
        text(1, 2000),
        noise(3, 80_000),
    ];
    let (store, map, locator) = open(&files);
    let mut by_frame = 0;
    for frame in 0..locator.frames().len() as u32 {
        let extents = locator.extents_of_frame(frame);
        assert!(extents.is_sorted());
        assert!(
            extents
                .iter()
                .all(|&i| locator.extent(i as usize).unwrap().0 == frame)
        );
        by_frame += extents.len();
    }
    assert_eq!(by_frame, map.extents().len());
    assert!(locator.extents_of_frame(u32::MAX).is_empty());
    assert_eq!(locator.extent(map.extents().len()), None);

    let mut got = Vec::new();
    store
        .read_chunks(&map, &locator, &[2, 0, 3, 2], &mut |i, bytes| {
            got.push((i, bytes.len()));
            Ok(())
        })
        .unwrap();
    got.sort_unstable();
    assert_eq!(
        got,
        [(0, 2000), (2, 2000), (3, map.extents()[3].len as usize)]
    );
    assert!(
        store
            .read_chunks(&map, &locator, &[99], &mut |_, _| Ok(()))
            .is_err()
    );
}

#[test]
fn extents_are_found_by_range() {
    let (_, map, _) = open(&[noise(1, 10), noise(2, 4096), noise(3, 5000)]);
    for (range, expected) in [
        (0..1, 0..1),
        (9..10, 0..1),
        (10..4096, 1..1),
        (10..4097, 1..2),
        (0..map.data_size(), 0..3),
        (8192 + 5000..map.data_size(), 3..3),
        (5..5, 0..1),
    ] {
        assert_eq!(map.extents_in(range.clone()), expected, "{range:?}");
    }
}

/// Frames by number, requests and bytes, however the read is done.
#[test]
fn limits_and_delivery_change_only_the_order() {
    // Far enough apart for many requests: every third of 200 frames.
    let files: Vec<_> = (0..200).map(|i| noise(i, 65_536)).collect();
    let (store, _, locator) = open(&files);
    let wanted: Vec<u32> = (0..200).step_by(3).collect();
    let small = ReadLimits {
        requests: 3,
        bytes: 1, // less than any request: one at a time
    };
    let mut all = Vec::new();
    for limits in [ReadLimits::SEQUENTIAL, ReadLimits::RECOMMENDED, small] {
        for delivery in [Delivery::InOrder, Delivery::AsFetched] {
            let mut seen = Vec::new();
            let stats = store
                .read_frames_with(&locator, &wanted, limits, delivery, &mut |frame, raw| {
                    assert!(raw == files[frame as usize], "frame {frame}");
                    seen.push(frame);
                    Ok(())
                })
                .unwrap();
            if delivery == Delivery::InOrder {
                assert_eq!(seen, wanted);
            }
            seen.sort_unstable();
            assert_eq!(seen, wanted);
            all.push(stats);
        }
    }
    assert_eq!((all[0].requests, all[0].frames), (67, 67));
    assert_eq!(all[0].requests_per_gib(), 16_384);
    assert!(all.iter().all(|stats| stats == &all[0]), "{all:?}");
}

/// Counts range requests that are under way at once.
#[derive(Debug)]
struct Watched {
    inner: Arc<dyn BlobStore>,
    now: AtomicUsize,
    most: AtomicUsize,
}

impl BlobStore for Watched {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        self.inner.get(key, max_len)
    }
    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        std::thread::sleep(std::time::Duration::from_millis(1));
        let bytes = self.inner.get_range(key, range);
        self.now.fetch_sub(1, Ordering::SeqCst);
        bytes
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

/// Threads that decompress are no further requests.
#[test]
fn no_more_requests_at_once_than_allowed() {
    let (blobs, store) = memory();
    let files: Vec<_> = (0..200).map(|i| noise(i, 65_536)).collect();
    publish(&store, "base/x:1", &files).unwrap();
    let (_, manifest) = store.load(&reference("base/x:1")).unwrap();
    let map = store.map(&manifest).unwrap();
    let locator = store.locator(&manifest, &map).unwrap();
    let wanted: Vec<u32> = (0..200).step_by(3).collect();
    for requests in [1, 2, 5] {
        let watched = Arc::new(Watched {
            inner: Arc::clone(&blobs),
            now: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
        });
        let store = LayerStore::new(Arc::clone(&watched) as Arc<dyn BlobStore>);
        let limits = ReadLimits {
            requests,
            bytes: 64 << 20,
        };
        let mut frames = 0;
        store
            .read_frames_with(
                &locator,
                &wanted,
                limits,
                Delivery::AsFetched,
                &mut |_, _| {
                    frames += 1;
                    Ok(())
                },
            )
            .unwrap();
        assert_eq!(frames, wanted.len());
        let most = watched.most.load(Ordering::SeqCst);
        assert!(most <= requests, "{most} requests at once");
    }
}

/// In order, everything before a damaged frame is handed out, and nothing after it.
#[test]
fn a_damaged_frame_ends_the_read_at_its_place() {
    let files: Vec<_> = (0..100).map(|i| noise(i, 65_536)).collect();
    let (blobs, store) = memory();
    publish(&store, "base/x:1", &files).unwrap();
    let (_, manifest) = store.load(&reference("base/x:1")).unwrap();
    let map = store.map(&manifest).unwrap();
    let locator = store.locator(&manifest, &map).unwrap();
    for bad in [0_u32, 41, 99] {
        let frame = locator.frames()[bad as usize];
        let key = Key::pack(&locator.packs()[0].id);
        let good = blobs.get(&key, u64::MAX).unwrap().unwrap();
        let mut bytes = good.clone();
        bytes[frame.offset as usize] ^= 1;
        blobs.put(&key, &bytes, PutMode::Overwrite).unwrap();
        for step in [1, 3] {
            let wanted: Vec<u32> = (0..100).filter(|f| f % step == bad % step).collect();
            let mut seen = Vec::new();
            let error = store
                .read_frames(&locator, &wanted, &mut |frame, _| {
                    seen.push(frame);
                    Ok(())
                })
                .unwrap_err();
            assert!(matches!(error, StoreError::Corrupt { .. }), "{error:?}");
            let before: Vec<u32> = wanted.iter().copied().filter(|f| *f < bad).collect();
            assert_eq!(seen, before, "frame {bad}, step {step}");
        }
        blobs.put(&key, &good, PutMode::Overwrite).unwrap();
    }
}

/// The report of several threads is one and the same, in the order of packs and frames.
#[test]
fn verifying_tells_the_same_every_time() {
    let (blobs, store) = memory();
    let mut files: Vec<Vec<u8>> = Vec::new();
    // Each publication adds packs; the last layer uses all.
    for part in 0..5_u64 {
        files.extend((0..40).map(|i| noise(part * 100 + i, 65_536)));
        publish(&store, &format!("base/p:{part}"), &files).unwrap();
    }
    publish(&store, "base/x:1", &files).unwrap();
    let (_, manifest) = store.load(&reference("base/x:1")).unwrap();
    let map = store.map(&manifest).unwrap();
    let locator = store.locator(&manifest, &map).unwrap();
    assert_eq!(locator.packs().len(), 5);
    let mut expected = Vec::new();
    for bad in (3..200).step_by(17) {
        let frame = locator.frames()[bad];
        let key = Key::pack(&locator.packs()[frame.pack as usize].id);
        let mut bytes = blobs.get(&key, u64::MAX).unwrap().unwrap();
        bytes[frame.offset as usize + 9] ^= 4;
        blobs.put(&key, &bytes, PutMode::Overwrite).unwrap();
        let end = frame.offset + u64::from(frame.stored_len);
        expected.push((key.to_string(), Some(frame.offset..end)));
    }
    let first = store.verify(&reference("base/x:1")).unwrap();
    let found: Vec<_> = first
        .damaged
        .iter()
        .map(|d| (d.key.clone(), d.range.clone()))
        .collect();
    assert_eq!(found, expected);
    assert_eq!((first.frames, first.chunks), (200, 200));
    for _ in 0..5 {
        assert_eq!(store.verify(&reference("base/x:1")).unwrap(), first);
    }
}
