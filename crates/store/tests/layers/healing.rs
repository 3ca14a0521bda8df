//! "Publish the layer again" is the remedy that messages name: it must be true.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use layerpack_store::{
    BlobStore, BlobWriter, Digest, Draft, Extent, Fault, FaultStore, FileStore, GcOptions, Key,
    LayerStore, MapBuilder, ObjectInfo, PruneOptions, PublishOutcome, PutMode, PutOutcome, Result,
    StoreError, WriterOptions,
};

use crate::support::{data_of, memory, noise, publish, read_all, reference, text};

const NAME: &str = "base/x:1";

fn flip(blobs: &dyn BlobStore, key: &Key, at: usize) {
    let mut bytes = blobs.get(key, u64::MAX).unwrap().unwrap();
    bytes[at] ^= 1 << (at % 8);
    blobs.put(key, &bytes, PutMode::Overwrite).unwrap();
}

/// The pack and the frame that hold the layer's first byte at or after `at`.
fn frame_of(store: &LayerStore, name: &str, at: u64) -> (Key, Range<u64>) {
    let (_, manifest) = store.load(&reference(name)).unwrap();
    let map = store.map(&manifest).unwrap();
    let locator = store.locator(&manifest, &map).unwrap();
    let extent = map.extents().iter().position(|e| e.data_offset >= at);
    let (frame, _) = locator.extent(extent.unwrap()).unwrap();
    let frame = locator.frames()[frame as usize];
    let key = Key::pack(&locator.packs()[frame.pack as usize].id);
    (
        key,
        frame.offset..frame.offset + u64::from(frame.stored_len),
    )
}

fn assert_good(store: &LayerStore, name: &str, files: &[Vec<u8>]) {
    let report = store.verify(&reference(name)).unwrap();
    assert!(report.is_ok(), "{name}: {:?}", report.damaged);
    assert!(report.warnings.is_empty(), "{name}: {:?}", report.warnings);
    assert!(read_all(store, name).unwrap() == data_of(files), "{name}");
}

fn many_files() -> Vec<Vec<u8>> {
    let mut files: Vec<_> = (0..6).map(|i| noise(i, 100_000)).collect();
    files.extend((10..40).map(|i| text(i, 3000)));
    files
}

#[test]
fn publishing_again_heals_a_damaged_frame() {
    let dir = tempfile::tempdir().unwrap();
    let blobs: Arc<dyn BlobStore> = Arc::new(FileStore::new(dir.path()).unwrap());
    let store = LayerStore::new(Arc::clone(&blobs));
    let files = many_files();
    let first = publish(&store, NAME, &files).unwrap();
    let (pack, range) = frame_of(&store, NAME, 200_000);
    flip(&*blobs, &pack, range.start as usize + 5);
    assert!(!store.verify(&reference(NAME)).unwrap().is_ok());

    let again = publish(&store, NAME, &files).unwrap();
    assert_eq!(
        (again.digest, again.outcome),
        (first.digest, PublishOutcome::Already)
    );
    assert_eq!(again.stats.new_packs, 1);
    assert!(again.stats.new_raw_bytes < 400_000, "{:?}", again.stats);
    let named = format!("{pack} (bytes {}..{})", range.start, range.end);
    assert!(
        again.warnings.len() == 1 && again.warnings[0].contains(&named),
        "{:?}",
        again.warnings
    );
    assert_good(&store, NAME, &files);

    // And now nothing is left to do.
    let third = publish(&store, NAME, &files).unwrap();
    assert_eq!((third.stats.new_bytes, third.stats.new_packs), (0, 0));
    assert_good(&store, NAME, &files);
}

/// Damage that a healed layer left behind is told apart, with what clears it.
#[test]
fn a_replaced_frame_is_no_damage_of_the_store() {
    let (blobs, store) = memory();
    let files = many_files();
    publish(&store, NAME, &files).unwrap();
    let (pack, range) = frame_of(&store, NAME, 200_000);
    flip(&*blobs, &pack, range.start as usize + 5);
    let damaged = store.audit(true).unwrap();
    assert_eq!(damaged.damaged.len(), 1, "{damaged:?}");
    assert_eq!(damaged.damaged[0].layers, [NAME]);
    assert!(damaged.superseded.is_empty(), "{damaged:?}");

    publish(&store, NAME, &files).unwrap();
    let healed = store.audit(true).unwrap();
    assert!(healed.damaged.is_empty(), "{healed:?}");
    assert!(healed.layers[0].sound);
    let [left] = healed.superseded.as_slice() else {
        panic!("{healed:?}");
    };
    assert_eq!(left.object, pack.as_str());
    assert!(left.what.contains("prune --min-live 100"), "{left:?}");

    // Not while it cannot be told what a layer uses.
    let (_, manifest) = store.load(&reference(NAME)).unwrap();
    let locator = Key::locator(&manifest.map.digest);
    let kept = blobs.get(&locator, u64::MAX).unwrap().unwrap();
    flip(&*blobs, &locator, kept.len() / 2);
    let unsure = store.audit(true).unwrap();
    assert!(unsure.superseded.is_empty(), "{unsure:?}");
    assert!(
        unsure
            .damaged
            .iter()
            .any(|lost| lost.object == pack.as_str())
    );
    blobs.put(&locator, &kept, PutMode::Overwrite).unwrap();

    let options = PruneOptions {
        min_live: 100,
        dry_run: false,
        grace: Duration::ZERO,
        wait: false,
    };
    store.prune(options).unwrap();
    let clean = store.audit(true).unwrap();
    assert!(
        clean.damaged.is_empty() && clean.superseded.is_empty(),
        "{clean:?}"
    );
    assert_good(&store, NAME, &files);
}

#[test]
fn a_damaged_pack_that_nothing_uses_is_left_to_gc() {
    let (blobs, store) = memory();
    publish(&store, NAME, &many_files()).unwrap();
    publish(&store, "base/other:1", &[noise(77, 90_000)]).unwrap();
    let (frames, range) = frame_of(&store, NAME, 0);
    let (table, _) = frame_of(&store, "base/other:1", 0);
    flip(&*blobs, &frames, range.start as usize);
    let size = blobs.size(&table).unwrap().unwrap();
    flip(&*blobs, &table, size as usize - 40);
    let used = store.audit(true).unwrap();
    assert_eq!(used.damaged.len(), 2, "{used:?}");
    assert!(used.damaged.iter().all(|lost| lost.layers.len() == 1));
    let repaired = store.repair(true).unwrap();
    assert!(repaired.unused.is_empty(), "{repaired:?}");
    assert!(
        repaired
            .lost
            .iter()
            .any(|lost| lost.object == table.as_str())
    );

    for name in [NAME, "base/other:1"] {
        store.remove(&reference(name)).unwrap();
    }
    let unused = store.audit(true).unwrap();
    assert!(unused.damaged.is_empty(), "{unused:?}");
    assert_eq!(unused.superseded.len(), 2, "{unused:?}");
    for lost in &unused.superseded {
        assert!(lost.what.contains("layerpack gc"), "{lost:?}");
    }
    for dry_run in [true, false] {
        let repaired = store.repair(dry_run).unwrap();
        assert!(repaired.is_ok(), "{repaired:?}");
        assert_eq!(repaired.unused.len(), 1, "{repaired:?}");
        assert_eq!(repaired.unused[0].object, table.as_str());
    }
    let options = GcOptions {
        grace: Duration::ZERO,
        dry_run: false,
        wait: false,
    };
    store.collect(options).unwrap();
    store.collect(options).unwrap();
    assert!(blobs.list("packs/").unwrap().is_empty());
    assert!(store.audit(true).unwrap().superseded.is_empty());
}

#[test]
fn a_new_layer_does_not_share_a_damaged_frame() {
    let (blobs, store) = memory();
    let files = many_files();
    publish(&store, NAME, &files).unwrap();
    let (pack, range) = frame_of(&store, NAME, 0);
    flip(&*blobs, &pack, range.end as usize - 1);
    let mut more = files.clone();
    more.push(noise(99, 5000));
    let other = publish(&store, "toolkit/y:1", &more).unwrap();
    assert_eq!(other.warnings.len(), 1, "{:?}", other.warnings);
    assert!(other.stats.reused_chunks > 10, "{:?}", other.stats);
    assert_good(&store, "toolkit/y:1", &more);
    // The old one is as it was, until it is published again: the chunks are there by now.
    assert!(!store.verify(&reference(NAME)).unwrap().is_ok());
    let healed = publish(&store, NAME, &files).unwrap();
    assert_eq!(healed.stats.new_packs, 0, "{:?}", healed.stats);
    assert_good(&store, NAME, &files);
}

/// One bit at each place of each object that publishing wrote, then the same layer again.
#[test]
fn publishing_again_heals_every_byte() {
    let files = vec![text(1, 900), noise(2, 700), text(3, 4500)];
    let objects = {
        let (blobs, store) = memory();
        publish(&store, NAME, &files).unwrap();
        blobs.list("").unwrap()
    };
    for object in objects {
        let own = [Key::marker(), Key::reference(&reference(NAME))];
        if own.contains(&object.key) {
            continue;
        }
        let step = if object.size > 1000 { 7 } else { 1 };
        for at in (0..object.size as usize).step_by(step) {
            let (blobs, store) = memory();
            publish(&store, NAME, &files).unwrap();
            flip(&*blobs, &object.key, at);
            let before = store.verify(&reference(NAME)).unwrap();
            let again = publish(&store, NAME, &files).unwrap();
            let context = format!("{} byte {at}: {:?}", object.key, again.warnings);
            let after = store.verify(&reference(NAME)).unwrap();
            assert!(after.is_ok(), "{context}: {:?}", after.damaged);
            assert!(after.warnings.is_empty(), "{context}: {:?}", after.warnings);
            assert!(
                read_all(&store, NAME).unwrap() == data_of(&files),
                "{context}"
            );
            if !before.is_ok() || !before.warnings.is_empty() {
                assert!(!again.warnings.is_empty(), "{context}: nothing was said");
            }
        }
    }
}

/// A locator that fits in itself but whose extents point elsewhere.
#[test]
fn publishing_again_replaces_a_forged_locator() {
    let (blobs, store) = memory();
    let files = vec![noise(2, 5000)];
    publish(&store, "base/a:1", &[noise(1, 5000)]).unwrap();
    publish(&store, NAME, &files).unwrap();
    let load = |name: &str| {
        let (_, manifest) = store.load(&reference(name)).unwrap();
        let map = store.map(&manifest).unwrap();
        let locator = store.locator(&manifest, &map).unwrap();
        (manifest, map, locator)
    };
    let ((_, _, other), (manifest, map, _)) = (load("base/a:1"), load(NAME));
    let (packs, frames) = (other.packs().to_vec(), other.frames().to_vec());
    let extents = vec![other.extent(0).unwrap()];
    let digest = manifest.map.digest;
    let forged = layerpack_store::Locator::new(digest, &map, packs, frames, extents).unwrap();
    blobs
        .put(
            &Key::locator(&digest),
            &forged.to_bytes(),
            PutMode::Overwrite,
        )
        .unwrap();
    assert!(!store.verify(&reference(NAME)).unwrap().is_ok());
    publish(&store, NAME, &files).unwrap();
    assert_good(&store, NAME, &files);
}

/// Chunks that a map names and that were not added cannot be written anew: that is an error, not
/// a layer that is born broken.
#[test]
fn a_damaged_chunk_that_is_not_at_hand_is_an_error() {
    let (blobs, store) = memory();
    let files = vec![noise(1, 2000)];
    publish(&store, NAME, &files).unwrap();
    let (pack, range) = frame_of(&store, NAME, 0);
    flip(&*blobs, &pack, range.start as usize);
    let mut builder = MapBuilder::new(4096);
    builder.push(Extent {
        data_offset: 0,
        len: 2000,
        digest: Digest::of(&files[0]),
    });
    let map = builder.build().unwrap();
    let writer = store.writer(WriterOptions::default()).unwrap();
    let draft = Draft::new(reference("diff/y:1"), Vec::new(), map);
    match writer.finish(draft).unwrap_err() {
        StoreError::Corrupt { key, range: at, .. } => {
            assert_eq!((key.as_str(), at), (pack.as_str(), Some(range)));
        }
        other => panic!("{other:?}"),
    }
    assert!(!store.has_reference(&reference("diff/y:1")).unwrap());
}

/// Frames are verified in few large reads, once each.
#[test]
fn an_unchanged_layer_costs_few_requests() {
    let (blobs, store) = memory();
    let files: Vec<_> = (0..160).map(|i| noise(i, 65_536)).collect();
    publish(&store, NAME, &files).unwrap();
    let count = |name: &str, files: &[Vec<u8>]| {
        let counting = Arc::new(FaultStore::fail_nth(
            Arc::clone(&blobs),
            u64::MAX,
            Fault::Error,
        ));
        let counted = LayerStore::new(Arc::clone(&counting) as Arc<dyn BlobStore>);
        let published = publish(&counted, name, files).unwrap();
        assert_eq!(published.stats.new_chunks, 0);
        counting.calls()
    };
    let nothing = count("base/empty:1", &[]);
    let (one, all) = (count("base/y:1", &files[80..81]), count(NAME, &files));
    assert!(one <= nothing + 8, "{one}, {nothing}");
    assert!(all <= nothing + 24, "{all}, {nothing}");
    // A late frame first, as where two layers came into one pack together, and two runs in turns.
    let late: Vec<_> = files[159..].iter().chain(&files).cloned().collect();
    let late = count("base/late:1", &late);
    assert!(late <= nothing + 30, "{late}, {nothing}");
    let (front, back) = files.split_at(80);
    let turns = front
        .iter()
        .zip(back)
        .flat_map(|(a, b)| [a.clone(), b.clone()]);
    let turns = count("base/turns:1", &turns.collect::<Vec<_>>());
    assert!(turns <= nothing + 40, "{turns}, {nothing}");
}

#[test]
fn a_damaged_reference_is_removed_and_published_again() {
    let (blobs, store) = memory();
    let files = many_files();
    let first = publish(&store, NAME, &files).unwrap();
    let key = Key::reference(&reference(NAME));
    let good = blobs.get(&key, 1000).unwrap().unwrap();
    let elsewhere = publish(&store, "base/z:1", &files).unwrap();
    let foreign = format!(r#"{{"format":1,"manifest":"{}"}}"#, elsewhere.digest);
    for bad in [
        b"".to_vec(),
        good[..good.len() - 3].to_vec(),
        vec![b' '; 70_000],
        String::from_utf8_lossy(&good)
            .replace("b3:", "b4:")
            .into_bytes(),
        foreign.into_bytes(),
    ] {
        blobs.put(&key, &bad, PutMode::Overwrite).unwrap();
        for error in [
            store.load(&reference(NAME)).unwrap_err(),
            publish(&store, NAME, &files).unwrap_err(),
        ] {
            let text = error.to_string();
            match error {
                StoreError::DamagedReference { .. } => {
                    assert!(text.contains(key.as_str()), "{text}");
                    assert!(text.contains("layerpack rm base/x:1"), "{text}");
                }
                // It names a version of another content.
                StoreError::Conflict { existing, .. } => assert_eq!(existing, elsewhere.digest),
                other => panic!("{other:?}"),
            }
        }
        assert!(!store.verify(&reference(NAME)).unwrap().is_ok());
        // Publishing has not touched it: what it says.
        assert_eq!(blobs.get(&key, 100_000).unwrap().unwrap(), bad);
        assert!(store.has_reference(&reference(NAME)).unwrap());
        store.remove(&reference(NAME)).unwrap();
        assert!(!store.has_reference(&reference(NAME)).unwrap());
        let again = publish(&store, NAME, &files).unwrap();
        assert_eq!(
            (again.digest, again.outcome, again.stats.new_packs),
            (first.digest, PublishOutcome::Created, 0)
        );
        assert_good(&store, NAME, &files);
    }
}

#[test]
fn a_lost_marker_is_warned_of_and_written_anew() {
    let (blobs, store) = memory();
    let files = many_files();
    assert!(publish(&store, NAME, &files).unwrap().warnings.is_empty());
    blobs.delete(&Key::marker()).unwrap();
    let store = LayerStore::new(Arc::clone(&blobs));
    let report = store.verify(&reference(NAME)).unwrap();
    assert!(report.is_ok(), "{:?}", report.damaged);
    assert!(
        report.warnings.len() == 1 && report.warnings[0].contains("layerpack.json"),
        "{:?}",
        report.warnings
    );
    let again = publish(&store, NAME, &files).unwrap();
    assert!(
        again.warnings.len() == 1 && again.warnings[0].contains("layerpack.json"),
        "{:?}",
        again.warnings
    );
    assert!(blobs.get(&Key::marker(), 1000).unwrap().is_some());
    assert_good(&store, NAME, &files);
}

/// A store with one byte of one object on a place of the disk that cannot be read.
#[derive(Debug)]
struct BadSector {
    inner: Arc<dyn BlobStore>,
    key: Key,
    at: u64,
}

impl BlobStore for BadSector {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        self.inner.get(key, max_len)
    }
    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        if key == &self.key && range.contains(&self.at) {
            return Err(StoreError::Io {
                operation: "read",
                store: self.url(),
                key: key.to_string(),
                source: std::io::Error::other("bad sector"),
            });
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

#[test]
fn an_unreadable_frame_is_not_reused() {
    let (blobs, store) = memory();
    let files = many_files();
    publish(&store, NAME, &files).unwrap();
    let (key, range) = frame_of(&store, NAME, 200_000);
    let store = LayerStore::new(Arc::new(BadSector {
        inner: blobs,
        key: key.clone(),
        at: range.start + 7,
    }));
    let again = publish(&store, NAME, &files).unwrap();
    assert_eq!(again.stats.new_packs, 1);
    assert!(again.stats.new_raw_bytes < 400_000, "{:?}", again.stats);
    let named = format!("{key} (bytes {}..{})", range.start, range.end);
    assert!(
        again.warnings.len() == 1
            && again.warnings[0].contains(&named)
            && again.warnings[0].contains("bad sector"),
        "{:?}",
        again.warnings
    );
    assert_good(&store, NAME, &files);
}
