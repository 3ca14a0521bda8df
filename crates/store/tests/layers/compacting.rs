//! Compacting packs, repairing indexes and locators, and proving a whole store.

use std::collections::BTreeSet;
use std::time::Duration;

use layerpack_store::{BlobStore, Key, LayerStore, PruneOptions, PutMode, StoreError};

use crate::support::{data_of, memory, noise, publish, read_all, reference, text};

fn now() -> PruneOptions {
    PruneOptions {
        min_live: 50,
        dry_run: false,
        grace: Duration::ZERO,
        wait: false,
    }
}

fn later() -> PruneOptions {
    PruneOptions {
        grace: Duration::from_secs(3600),
        ..now()
    }
}

fn assert_good(store: &LayerStore, name: &str, files: &[Vec<u8>]) {
    let report = store.verify(&reference(name)).unwrap();
    assert!(report.is_ok(), "{name}: {:?}", report.damaged);
    assert!(report.warnings.is_empty(), "{name}: {:?}", report.warnings);
    assert!(read_all(store, name).unwrap() == data_of(files), "{name}");
}

/// Two layers of which the second uses little of the first one's pack, and more of its own.
fn little_used() -> (std::sync::Arc<dyn BlobStore>, LayerStore, Vec<Vec<u8>>) {
    let (blobs, store) = memory();
    let large: Vec<_> = (0..20).map(|i| noise(i, 70_000)).collect();
    publish(&store, "base/large:1", &large).unwrap();
    let small = vec![
        large[3].clone(),
        noise(100, 3000),
        text(101, 3000),
        large[17].clone(),
    ];
    publish(&store, "base/small:1", &small).unwrap();
    (blobs, store, small)
}

fn pack_bytes(blobs: &dyn BlobStore) -> u64 {
    blobs.list("packs/").unwrap().iter().map(|o| o.size).sum()
}

#[test]
fn little_used_packs_shrink_and_layers_keep_their_digests() {
    let (blobs, store, small) = little_used();
    let before = store.load(&reference("base/small:1")).unwrap();
    // While all of it is used nothing is to do.
    let report = store.prune(now()).unwrap();
    assert_eq!(
        (report.rewritten_packs, report.layers.len()),
        (0, 0),
        "{report:?}"
    );
    store.remove(&reference("base/large:1")).unwrap();
    let dry = store
        .prune(PruneOptions {
            dry_run: true,
            ..now()
        })
        .unwrap();
    assert_eq!(dry.rewritten_packs, 1, "{dry:?}");
    assert_eq!(dry.layers, ["base/small:1"]);
    assert!(pack_bytes(&*blobs) > 1_400_000);

    // What an older locator says stays true for a while.
    let (_, manifest) = store.load(&reference("base/small:1")).unwrap();
    let map = store.map(&manifest).unwrap();
    let old = store.locator(&manifest, &map).unwrap();
    let report = store.prune(later()).unwrap();
    assert_eq!(
        (report.rewritten_packs, report.gc.deleted.objects),
        (1, 0),
        "{report:?}"
    );
    assert!(report.problems.is_empty(), "{report:?}");
    let new = store.locator(&manifest, &map).unwrap();
    assert_ne!(old, new);
    for locator in [&old, &new] {
        let data = store.read_data(&map, locator, 0..map.data_size()).unwrap();
        assert!(data == data_of(&small));
    }
    let report = store.prune(now()).unwrap();
    assert!(report.gc.deleted.objects >= 5, "{report:?}");
    assert!(pack_bytes(&*blobs) < 160_000, "{}", pack_bytes(&*blobs));
    assert_eq!(store.load(&reference("base/small:1")).unwrap(), before);
    assert_good(&store, "base/small:1", &small);
    match store.read_data(&map, &old, 0..map.data_size()).unwrap_err() {
        StoreError::Missing { key, .. } => assert!(key.starts_with("packs/"), "{key}"),
        other => panic!("{other:?}"),
    }
    // Its chunks can be shared from where they are now.
    let again = publish(&store, "base/other:1", &small).unwrap();
    assert_eq!(again.stats.new_packs, 0, "{:?}", again.warnings);
    let report = store.prune(now()).unwrap();
    assert_eq!(
        (report.rewritten_packs, report.gc.deleted.objects),
        (0, 0),
        "{report:?}"
    );
    let audit = store.audit(true).unwrap();
    assert!(
        audit.damaged.is_empty() && audit.warnings.is_empty(),
        "{audit:?}"
    );
}

#[test]
fn a_damaged_pack_is_not_compacted_and_not_lost() {
    let (blobs, store, small) = little_used();
    store.remove(&reference("base/large:1")).unwrap();
    let pack = blobs
        .list("packs/")
        .unwrap()
        .into_iter()
        .max_by_key(|o| o.size)
        .unwrap()
        .key;
    let (_, manifest) = store.load(&reference("base/small:1")).unwrap();
    let map = store.map(&manifest).unwrap();
    let locator = store.locator(&manifest, &map).unwrap();
    let (number, _) = locator.extent(0).unwrap();
    let mut bytes = blobs.get(&pack, u64::MAX).unwrap().unwrap();
    bytes[locator.frames()[number as usize].offset as usize + 9] ^= 1;
    blobs.put(&pack, &bytes, PutMode::Overwrite).unwrap();
    let report = store.prune(now()).unwrap();
    assert_eq!(report.rewritten_packs, 0, "{report:?}");
    assert!(report.problems[0].contains(pack.as_str()), "{report:?}");
    assert!(blobs.size(&pack).unwrap().is_some());
    publish(&store, "base/small:1", &small).unwrap();
    assert_good(&store, "base/small:1", &small);
}

#[test]
fn indexes_and_locators_are_made_again() {
    let (blobs, store, small) = little_used();
    let large: Vec<_> = (0..20).map(|i| noise(i, 70_000)).collect();
    assert_eq!(store.repair(false).unwrap().indexed.len(), 0);
    let indexes = blobs.list("index/").unwrap();
    blobs.delete(&indexes[0].key).unwrap();
    blobs
        .put(&indexes[1].key, b"rotten", PutMode::Overwrite)
        .unwrap();
    for locator in blobs.list("locators/").unwrap() {
        blobs.delete(&locator.key).unwrap();
    }
    blobs.delete(&Key::marker()).unwrap();
    let store = LayerStore::new(std::sync::Arc::clone(&blobs));
    let dry = store.repair(true).unwrap();
    assert_eq!(
        (dry.indexed.len(), dry.removed.len(), dry.relocated.len()),
        (2, 1, 2),
        "{dry:?}"
    );
    assert!(blobs.list("locators/").unwrap().is_empty());
    let report = store.repair(false).unwrap();
    assert!(report.is_ok(), "{report:?}");
    assert_eq!(report.relocated, ["base/large:1", "base/small:1"]);
    assert_eq!(report.removed, [indexes[1].key.as_str()]);
    assert_eq!(report.mended.len(), 1);
    assert_good(&store, "base/small:1", &small);
    assert_good(&store, "base/large:1", &large);
    let again = publish(&store, "base/other:1", &large).unwrap();
    assert_eq!(again.stats.new_packs, 0);
    let nothing = store.repair(false).unwrap();
    assert!(
        nothing.indexed.is_empty() && nothing.relocated.is_empty(),
        "{nothing:?}"
    );
}

#[test]
fn a_damaged_marker_is_written_anew_and_that_of_a_newer_store_is_left_alone() {
    let (blobs, _, small) = little_used();
    let put = |bytes: &[u8]| {
        blobs
            .put(&Key::marker(), bytes, PutMode::Overwrite)
            .unwrap()
    };
    let marker = || blobs.get(&Key::marker(), 1000).unwrap().unwrap();
    let good = marker();
    for newer in [
        r#"{"format":2}"#,
        r#"{"format":2,"incompat":[]}"#,
        r#"{"format":1,"incompat":["x"]}"#,
    ] {
        put(newer.as_bytes());
        let store = LayerStore::new(std::sync::Arc::clone(&blobs));
        assert!(store.repair(false).is_err(), "{newer}");
        assert_eq!(marker(), newer.as_bytes());
    }
    for bad in [&b"{"[..], b"", b"[1]"] {
        put(bad);
        let store = LayerStore::new(std::sync::Arc::clone(&blobs));
        assert!(store.resolve(&reference("base/small:1")).is_err());
        let dry = store.repair(true).unwrap();
        assert_eq!((dry.mended.len(), marker()), (1, bad.to_vec()));
        let report = store.repair(false).unwrap();
        assert!(report.is_ok() && report.mended.len() == 1, "{report:?}");
        assert_eq!(marker(), good);
        assert_good(&store, "base/small:1", &small);
    }
}

#[test]
fn what_cannot_be_repaired_is_named_with_its_layers() {
    let (blobs, store, _) = little_used();
    let pack = blobs
        .list("packs/")
        .unwrap()
        .into_iter()
        .max_by_key(|o| o.size)
        .unwrap()
        .key;
    blobs.delete(&pack).unwrap();
    let report = store.repair(false).unwrap();
    assert_eq!(report.lost.len(), 2, "{report:?}");
    let named: BTreeSet<_> = report
        .lost
        .iter()
        .flat_map(|lost| lost.layers.clone())
        .collect();
    assert_eq!(
        named,
        BTreeSet::from(["base/large:1".to_owned(), "base/small:1".to_owned()])
    );
    assert!(
        report.lost.iter().all(|lost| lost.object == pack.as_str()),
        "{report:?}"
    );

    let (blobs, store, _) = little_used();
    let (_, manifest) = store.load(&reference("base/small:1")).unwrap();
    let map = Key::map(&manifest.map.digest);
    blobs.put(&map, b"x", PutMode::Overwrite).unwrap();
    blobs
        .put(
            &Key::reference(&reference("base/large:1")),
            b"x",
            PutMode::Overwrite,
        )
        .unwrap();
    let report = store.repair(false).unwrap();
    let lost: Vec<_> = report
        .lost
        .iter()
        .map(|l| (l.object.as_str(), l.layers.concat()))
        .collect();
    let expected = [
        (map.as_str(), "base/small:1".to_owned()),
        ("refs/base/large/_1", "base/large:1".to_owned()),
    ];
    assert_eq!(lost, expected, "{report:?}");
}

/// Chunks that are also elsewhere: a layer whose pack is gone can be saved.
#[test]
fn a_layer_moves_to_other_copies_of_its_chunks() {
    let (blobs, store) = memory();
    let files = vec![noise(1, 70_000), text(2, 3000)];
    publish(&store, "base/a:1", &files).unwrap();
    let first = blobs.list("packs/").unwrap()[0].key.clone();
    let index = blobs.list("index/").unwrap()[0].key.clone();
    let kept = blobs.get(&index, u64::MAX).unwrap().unwrap();
    blobs.delete(&index).unwrap();
    let mut more = files.clone();
    more.push(noise(3, 500));
    publish(&store, "base/b:1", &more).unwrap();
    blobs.put(&index, &kept, PutMode::Overwrite).unwrap();
    blobs.delete(&first).unwrap();
    assert!(!store.verify(&reference("base/a:1")).unwrap().is_ok());
    let report = store.repair(false).unwrap();
    assert!(report.is_ok(), "{report:?}");
    assert_eq!(report.relocated, ["base/a:1"]);
    assert_good(&store, "base/a:1", &files);
}

/// One bit in each object, at several places, and each object gone: the audit names it, and the
/// layers that it touches, and no others.
#[test]
fn an_audit_names_what_is_damaged_and_whom_it_touches() {
    let (blobs, store) = memory();
    publish(&store, "base/a:1", &[noise(1, 70_000), text(2, 3000)]).unwrap();
    let only_a: BTreeSet<Key> = blobs.list("").unwrap().into_iter().map(|o| o.key).collect();
    publish(&store, "base/b:1", &[noise(5, 70_000), text(6, 3000)]).unwrap();
    publish(&store, "base/gone:1", &[noise(9, 2000)]).unwrap();
    store.remove(&reference("base/gone:1")).unwrap();
    let clean = store.audit(true).unwrap();
    assert!(
        clean.damaged.is_empty() && clean.warnings.is_empty(),
        "{clean:?}"
    );
    assert_eq!(clean.layers.len(), 2);
    assert_eq!(clean.packs, 3);
    let orphans: Vec<_> = clean
        .orphans
        .iter()
        .map(|o| o.object.split('/').next().unwrap())
        .collect();
    assert_eq!(orphans, ["locators", "manifests", "maps", "packs"]);
    let orphans: BTreeSet<_> = clean.orphans.iter().map(|o| o.object.clone()).collect();
    for object in blobs.list("").unwrap() {
        let good = blobs.get(&object.key, u64::MAX).unwrap().unwrap();
        let name = object.key.as_str();
        if name == "layerpack.json" {
            continue; // damaged, it is an error of every operation
        }
        let len = good.len();
        let mut places: Vec<Option<usize>> = (0..len).step_by(len / 23 + 1).map(Some).collect();
        places.extend([Some(len - 1), None]);
        // A field that references need not have, and whose name is bent, is no field.
        let name_of_copy = good.windows(6).position(|bytes| bytes == b"\"text\"");
        places.retain(|place| {
            !(place.zip(name_of_copy)).is_some_and(|(at, name)| (name + 1..name + 5).contains(&at))
        });
        for place in places {
            match place {
                Some(at) => {
                    let mut bent = good.clone();
                    bent[at] ^= 1 << (at % 8);
                    blobs.put(&object.key, &bent, PutMode::Overwrite).unwrap();
                }
                None => {
                    blobs.delete(&object.key).unwrap();
                }
            }
            let report = store.audit(true).unwrap();
            let context = format!("{name} {place:?}: {report:?}");
            let named: BTreeSet<&str> = report
                .damaged
                .iter()
                .flat_map(|d| d.layers.iter().map(String::as_str))
                .collect();
            let expected: BTreeSet<&str> = match name {
                _ if orphans.contains(name) || name.starts_with("index/") => BTreeSet::new(),
                _ if name.starts_with("meta/") => BTreeSet::from(["base/a:1", "base/b:1"]),
                _ if name.starts_with("refs/") && place.is_none() => BTreeSet::new(),
                _ if only_a.contains(&object.key) => BTreeSet::from(["base/a:1"]),
                _ => BTreeSet::from(["base/b:1"]),
            };
            let quiet = place.is_none()
                && (orphans.contains(name)
                    || name.starts_with("index/")
                    || name.starts_with("refs/"));
            // What says what an orphan's bytes must be went with its manifest.
            let unknown = orphans.contains(name)
                && (name.starts_with("maps/") || name.starts_with("locators/"));
            assert_eq!(named, expected, "{context}");
            if !quiet && !unknown {
                // A reference whose digest is bent names a manifest that does not exist.
                let at = |d: &&layerpack_store::Lost| {
                    d.object == name
                        || (name.starts_with("refs/") && d.object.starts_with("manifests/"))
                };
                // A pack that nothing uses harms nobody.
                let unused = orphans.contains(name) && name.starts_with("packs/");
                let (named, other) = match unused {
                    true => (&report.superseded, &report.damaged),
                    false => (&report.damaged, &report.superseded),
                };
                assert!(named.iter().any(|d| at(&d)), "{context}");
                assert!(other.is_empty(), "{context}");
            }
            blobs.put(&object.key, &good, PutMode::Overwrite).unwrap();
        }
    }
    assert_eq!(store.audit(true).unwrap(), clean);
}
