//! Damage at rest: every kind of object, every byte of it.

use std::sync::Arc;

use layerpack_store::{BlobStore, Key, LayerStore, MemStore, PutMode, StoreError};

use crate::support::{data_of, memory, noise, publish, read_all, reference, text};

const NAME: &str = "base/x:1";

fn files() -> Vec<Vec<u8>> {
    vec![text(1, 900), noise(2, 700), text(3, 4500)]
}

fn copy(blobs: &dyn BlobStore) -> Arc<dyn BlobStore> {
    let copy = MemStore::new();
    for object in blobs.list("").unwrap() {
        let bytes = blobs.get(&object.key, u64::MAX).unwrap().unwrap();
        copy.put(&object.key, &bytes, PutMode::IfAbsent).unwrap();
    }
    Arc::new(copy)
}

/// What verify says of a damaged copy; `None`: it finds nothing wrong.
fn finding(store: &LayerStore) -> Option<String> {
    match store.verify(&reference(NAME)) {
        Ok(report) if report.is_ok() => store.verify_index().map_or_else(
            |e| Some(e.to_string()),
            |damaged| damaged.first().map(ToString::to_string),
        ),
        Ok(report) => Some(report.damaged[0].what.clone()),
        Err(error) => Some(error.to_string()),
    }
}

#[test]
fn every_object_kind_is_there() {
    let (blobs, store) = memory();
    publish(&store, NAME, &files()).unwrap();
    let kinds: std::collections::BTreeSet<String> = blobs
        .list("")
        .unwrap()
        .iter()
        .map(|o| o.key.as_str().split('/').next().unwrap().to_owned())
        .collect();
    let expected = [
        "index",
        "layerpack.json",
        "locators",
        "manifests",
        "maps",
        "meta",
        "packs",
        "refs",
    ];
    assert!(kinds.iter().eq(expected), "{kinds:?}");
}

/// One bit at each place: never a wrong byte from a read, never a panic, and verify notices unless
/// the object still means exactly the same (spare bits of a compressed object).
#[test]
fn every_byte_of_every_object() {
    let (original, store) = memory();
    publish(&store, NAME, &files()).unwrap();
    let expected = data_of(&files());
    let mut unnoticed = Vec::new();
    for object in original.list("").unwrap() {
        let good = original.get(&object.key, u64::MAX).unwrap().unwrap();
        let blobs = copy(&*original);
        for i in 0..good.len() {
            let mut bad = good.clone();
            bad[i] ^= 1 << (i % 8);
            blobs.put(&object.key, &bad, PutMode::Overwrite).unwrap();
            let store = LayerStore::new(Arc::clone(&blobs));
            if let Ok(data) = read_all(&store, NAME) {
                assert!(data == expected, "{} byte {i}: wrong bytes", object.key);
            }
            match finding(&store) {
                Some(text) if object.key == Key::marker() => {
                    assert!(text.contains("layerpack.json"), "{text}")
                }
                Some(text) => assert!(!text.is_empty()),
                None => unnoticed.push(format!("{} byte {i}", object.key)),
            }
        }
    }
    // Only bits that change nothing: of zstd's frame headers, and of the name of the field that
    // references need not have.
    assert!(
        unnoticed.iter().all(|place| place.starts_with("meta/")
            || place.starts_with("maps/")
            || place.starts_with("refs/"))
            && unnoticed.iter().filter(|p| p.starts_with("refs/")).count() <= 4
            && unnoticed.len() < 20,
        "{unnoticed:?}"
    );
}

#[test]
fn missing_empty_short_and_long_objects() {
    let (original, store) = memory();
    publish(&store, NAME, &files()).unwrap();
    for object in original.list("").unwrap() {
        if object.key == Key::marker() {
            continue;
        }
        let good = original.get(&object.key, u64::MAX).unwrap().unwrap();
        let variants: [Option<Vec<u8>>; 5] = [
            None,
            Some(Vec::new()),
            Some(good[..good.len() - 1].to_vec()),
            Some(good[..good.len() / 2].to_vec()),
            Some([&good[..], b"\0"].concat()),
        ];
        for (which, variant) in variants.iter().enumerate() {
            let blobs = copy(&*original);
            match variant {
                None => assert!(blobs.delete(&object.key).unwrap()),
                Some(bytes) => {
                    blobs.put(&object.key, bytes, PutMode::Overwrite).unwrap();
                }
            }
            let store = LayerStore::new(blobs);
            let is_index = object.key.as_str().starts_with("index/");
            // Without an index a layer is whole: it is only what new layers share by. Verifying
            // the layer warns of it.
            let warnings = store
                .verify(&reference(NAME))
                .map_or_else(|_| Vec::new(), |report| report.warnings);
            assert_eq!(
                warnings.iter().any(|w| w.contains("packs/")),
                is_index,
                "{} variant {which}: {warnings:?}",
                object.key
            );
            match finding(&store) {
                None => assert!(
                    is_index && variant.is_none(),
                    "{} variant {which}",
                    object.key
                ),
                Some(text) => {
                    let named = object.key.as_str().starts_with("refs/")
                        || text.contains(object.key.as_str());
                    assert!(named, "{} variant {which}: {text}", object.key);
                }
            }
            if let Ok(data) = read_all(&store, NAME) {
                assert!(
                    data == data_of(&files()),
                    "{} variant {which}: wrong bytes",
                    object.key
                );
            }
        }
    }
}

/// One bad frame of many: the report tells which bytes of the layer are lost, and all others can
/// still be read.
#[test]
fn damage_is_located() {
    let (blobs, store) = memory();
    let files: Vec<_> = (0..6).map(|i| noise(i, 100_000)).collect();
    publish(&store, NAME, &files).unwrap();
    let (_, manifest) = store.load(&reference(NAME)).unwrap();
    let map = store.map(&manifest).unwrap();
    let locator = store.locator(&manifest, &map).unwrap();
    let hit = map
        .extents()
        .iter()
        .position(|e| e.data_offset >= 200_000)
        .unwrap();
    let (frame, _) = locator.extent(hit).unwrap();
    let location = locator.frames()[frame as usize];
    let pack = Key::pack(&locator.packs()[location.pack as usize].id);
    let mut bytes = blobs.get(&pack, u64::MAX).unwrap().unwrap();
    bytes[location.offset as usize + 5] ^= 1;
    blobs.put(&pack, &bytes, PutMode::Overwrite).unwrap();

    let report = store.verify(&reference(NAME)).unwrap();
    assert_eq!(report.damaged.len(), 1, "{:?}", report.damaged);
    let damage = &report.damaged[0];
    let end = location.offset + u64::from(location.stored_len);
    assert_eq!(
        (damage.key.as_str(), damage.range.clone()),
        (pack.as_str(), Some(location.offset..end))
    );
    let extent = map.extents()[hit];
    assert!(
        damage.data.iter().any(|r| r.contains(&extent.data_offset)),
        "{damage:?}"
    );

    let lost = |at: u64| damage.data.iter().any(|r| r.contains(&at));
    let expected = data_of(&files);
    for extent in map.extents() {
        let range = extent.data_offset..extent.data_offset + u64::from(extent.len);
        match store.read_data(&map, &locator, range.clone()) {
            Ok(data) => {
                assert!(!lost(range.start));
                assert!(data == expected[range.start as usize..range.end as usize]);
            }
            Err(StoreError::Corrupt {
                key,
                range: Some(at),
                ..
            }) => {
                assert!(lost(range.start));
                assert_eq!((key.as_str(), at), (pack.as_str(), location.offset..end));
            }
            Err(other) => panic!("{other:?}"),
        }
    }
}

/// A locator that is sound in itself but points at other content: the map's digests decide.
#[test]
fn a_forged_locator_shows_no_wrong_byte() {
    let (blobs, store) = memory();
    publish(&store, "base/a:1", &[noise(1, 5000)]).unwrap();
    publish(&store, NAME, &[noise(2, 5000)]).unwrap();
    let load = |name: &str| {
        let (_, manifest) = store.load(&reference(name)).unwrap();
        let map = store.map(&manifest).unwrap();
        let locator = store.locator(&manifest, &map).unwrap();
        (manifest, map, locator)
    };
    let (_, _, other) = load("base/a:1");
    let (manifest, map, _) = load(NAME);
    let forged = layerpack_store::Locator::new(
        manifest.map.digest,
        &map,
        other.packs().to_vec(),
        other.frames().to_vec(),
        vec![other.extent(0).unwrap()],
    )
    .unwrap();
    blobs
        .put(
            &Key::locator(&manifest.map.digest),
            &forged.to_bytes(),
            PutMode::Overwrite,
        )
        .unwrap();
    assert!(matches!(
        read_all(&store, NAME),
        Err(StoreError::Corrupt { .. })
    ));
    let report = store.verify(&reference(NAME)).unwrap();
    assert_eq!(report.damaged.len(), 1, "{:?}", report.damaged);
}
