//! Answers that are wrong: they are asked for again, from the next address of a store with several.
//! And addresses that are no store: they are passed over.

use std::sync::Arc;
use std::time::Duration;

use layerpack_fixtures::ScratchDir;
use layerpack_store::{
    BlobStore, Fault, FaultStore, FileStore, GcOptions, Key, LayerStore, MemStore, MirrorStore,
    Operation, PutMode, StoreError,
};

use crate::support::{data_of, noise, publish, read_all, reference, text};

const NAME: &str = "base/x:1";

fn files() -> Vec<Vec<u8>> {
    vec![
        text(1, 900),
        noise(2, 70_000),
        text(3, 40_000),
        noise(4, 200_000),
    ]
}

/// A store with a layer, and a copy of it.
fn pair(test: &str) -> (Arc<dyn BlobStore>, Arc<dyn BlobStore>) {
    let first = MemStore::named(&format!("mirrors-{test}-first"));
    let copy = MemStore::named(&format!("mirrors-{test}-copy"));
    let first: Arc<dyn BlobStore> = Arc::new(first);
    publish(&LayerStore::new(Arc::clone(&first)), NAME, &files()).unwrap();
    for object in first.list("").unwrap() {
        let bytes = first.get(&object.key, u64::MAX).unwrap().unwrap();
        copy.put(&object.key, &bytes, PutMode::IfAbsent).unwrap();
    }
    (first, Arc::new(copy))
}

fn mirrored(first: &Arc<dyn BlobStore>, copy: &Arc<dyn BlobStore>) -> LayerStore {
    LayerStore::new(Arc::new(MirrorStore::new(
        Arc::clone(first),
        vec![Arc::clone(copy)],
    )))
}

/// Changes a byte of an object at each of these places.
fn bend(blobs: &Arc<dyn BlobStore>, key: &Key, places: &[usize]) {
    let mut bytes = blobs.get(key, u64::MAX).unwrap().unwrap();
    for &at in places {
        bytes[at] ^= 0x40;
    }
    blobs.put(key, &bytes, PutMode::Overwrite).unwrap();
}

fn content(blobs: &Arc<dyn BlobStore>) -> Vec<(Key, u64)> {
    let families = ["manifests/", "meta/", "maps/", "locators/", "packs/"];
    let objects = families.iter().flat_map(|f| blobs.list(f).unwrap());
    objects.map(|object| (object.key, object.size)).collect()
}

/// Whatever is wrong at the first address: damaged, cut, or gone. The layer reads right, and
/// verifying says which address has it wrong.
#[test]
fn what_one_address_has_wrong_comes_from_the_next() {
    let (first, copy) = pair("wrong");
    for (key, size) in content(&first) {
        let good = first.get(&key, u64::MAX).unwrap().unwrap();
        for how in ["bent", "cut", "gone"] {
            match how {
                "bent" => bend(&first, &key, &[size as usize / 2]),
                "cut" => {
                    let cut = &good[..good.len() - 9];
                    first.put(&key, cut, PutMode::Overwrite).unwrap();
                }
                _ => assert!(first.delete(&key).unwrap()),
            }
            let store = mirrored(&first, &copy);
            let data = read_all(&store, NAME).unwrap_or_else(|e| panic!("{key} {how}: {e:?}"));
            assert!(data == data_of(&files()), "{key} {how}: wrong bytes");
            let report = store.verify(&reference(NAME)).unwrap();
            assert!(!report.is_ok(), "{key} {how}: not noticed");
            for damage in &report.damaged {
                assert_eq!(damage.key, key.as_str(), "{how}: {damage:?}");
                assert!(damage.data.is_empty(), "{key} {how}: {damage:?}");
            }
            let named = |address: &str| report.damaged.iter().any(|d| d.what.contains(address));
            assert!(
                named("in store mem://mirrors-wrong-first is damaged"),
                "{key} {how}: {:?}",
                report.damaged
            );
            assert!(!named("in store mem://mirrors-wrong-copy is damaged"));
            first.put(&key, &good, PutMode::Overwrite).unwrap();
        }
    }
    let store = mirrored(&first, &copy);
    assert!(store.verify(&reference(NAME)).unwrap().is_ok());
    assert!(store.audit(true).unwrap().damaged.is_empty());
}

/// Proving the whole store names the address too.
#[test]
fn an_audit_names_the_address() {
    let (first, copy) = pair("audit");
    let (pack, size) = content(&first).pop().unwrap();
    bend(&first, &pack, &[size as usize / 3]);
    let report = mirrored(&first, &copy).audit(true).unwrap();
    assert_eq!(report.damaged.len(), 1, "{:?}", report.damaged);
    let damaged = &report.damaged[0];
    assert_eq!(damaged.object, pack.as_str());
    assert!(
        damaged.what.contains("mem://mirrors-audit-first"),
        "{}",
        damaged.what
    );
    assert!(report.layers.iter().all(|layer| layer.sound));
}

/// A pack that the first address lacks: proving the whole store names that address and the one
/// that has the pack, and no layer is the worse for it. Lost at both it is lost.
#[test]
fn an_audit_finds_a_pack_at_another_address() {
    let (first, copy) = pair("lacks");
    let (pack, _) = content(&first).pop().unwrap();
    assert!(pack.as_str().starts_with("packs/"), "{pack}");
    first.delete(&pack).unwrap();
    let store = mirrored(&first, &copy);
    for read_data in [false, true] {
        let report = store.audit(read_data).unwrap();
        assert_eq!(report.damaged.len(), 1, "{:?}", report.damaged);
        let damaged = &report.damaged[0];
        assert_eq!(damaged.object, pack.as_str());
        let first = damaged.what.find("mem://mirrors-lacks-first");
        let copy = damaged.what.find("while mem://mirrors-lacks-copy");
        assert!(first.is_some() && first < copy, "{}", damaged.what);
        assert_eq!(damaged.good.as_deref(), Some("mem://mirrors-lacks-copy"));
        assert!(report.layers.iter().all(|layer| layer.sound));
        assert!(report.warnings.is_empty(), "{:?}", report.warnings);
        assert_eq!(report.frames > 0, read_data);
    }
    // A byte that is wrong there is found, too.
    let good = copy.get(&pack, u64::MAX).unwrap().unwrap();
    bend(&copy, &pack, &[100]);
    let report = store.audit(true).unwrap();
    assert_eq!(report.damaged[0].layers, [NAME], "{:?}", report.damaged);
    assert_eq!(report.damaged[0].good, None);
    assert!(report.layers.iter().all(|layer| !layer.sound));
    copy.put(&pack, &good, PutMode::Overwrite).unwrap();
    assert!(store.audit(true).unwrap().layers[0].sound);

    copy.delete(&pack).unwrap();
    let report = store.audit(false).unwrap();
    assert_eq!(report.damaged.len(), 1, "{:?}", report.damaged);
    assert_eq!(report.damaged[0].layers, [NAME]);
    assert!(report.damaged[0].what.contains("is missing from store"));
}

/// A directory that is not there, or an empty one, is no store: it is not believed, nor made one.
#[test]
fn an_address_that_is_no_store_hides_nothing() {
    let dir = ScratchDir::new("no-store").unwrap();
    let good: Arc<dyn BlobStore> = Arc::new(FileStore::new(dir.join("good")).unwrap());
    publish(&LayerStore::new(Arc::clone(&good)), NAME, &files()).unwrap();
    let before = good.list("").unwrap();
    let empty = dir.mkdir("empty").unwrap();
    let collection = GcOptions {
        grace: Duration::ZERO,
        dry_run: false,
        wait: false,
    };
    for name in ["empty", "nowhere"] {
        let none: Arc<dyn BlobStore> = Arc::new(FileStore::new(dir.join(name)).unwrap());
        let store = mirrored(&none, &good);
        assert!(store.exists().unwrap(), "{name}");
        assert_eq!(store.list().unwrap().len(), 1, "{name}");
        assert!(read_all(&store, NAME).unwrap() == data_of(&files()));
        assert!(store.verify(&reference(NAME)).unwrap().is_ok());
        assert!(store.audit(true).unwrap().damaged.is_empty());
        let passed = store.blobs().passed_over();
        assert_eq!(passed.len(), 1, "{passed:?}");
        assert!(passed[0].contains(&format!("/{name} ")), "{passed:?}");

        for error in [
            publish(&store, "base/y:1", &files()).map(drop).unwrap_err(),
            store.remove(&reference(NAME)).unwrap_err(),
            store.collect(collection).map(drop).unwrap_err(),
        ] {
            assert!(
                matches!(error, StoreError::InvalidUrl { .. }),
                "{name}: {error:?}"
            );
            assert!(error.to_string().contains("is no store"), "{error}");
        }
        let unknown = store.resolve(&reference("base/y:1")).unwrap_err();
        assert!(matches!(unknown, StoreError::UnknownReference { .. }));
    }
    assert!(!dir.join("nowhere").exists(), "nothing was made there");
    assert_eq!(fs_err::read_dir(&empty).unwrap().count(), 0);
    assert_eq!(good.list("").unwrap(), before);

    // The other way round: the first is a store, and what is no copy of it does no harm.
    let none: Arc<dyn BlobStore> = Arc::new(FileStore::new(&empty).unwrap());
    let store = mirrored(&good, &none);
    publish(&store, "base/y:1", &files()).unwrap();
    assert!(store.blobs().passed_over().is_empty());
    assert_eq!(fs_err::read_dir(&empty).unwrap().count(), 0);

    // None of them is one: that is said, until the first write makes the first one a store.
    let nowhere: Arc<dyn BlobStore> = Arc::new(FileStore::new(dir.join("nowhere")).unwrap());
    let store = mirrored(&nowhere, &none);
    let error = store.resolve(&reference(NAME)).unwrap_err();
    assert!(matches!(error, StoreError::NoStore { .. }), "{error:?}");
    publish(&store, NAME, &files()).unwrap();
    assert!(dir.join("nowhere/layerpack.json").exists());
    assert_eq!(fs_err::read_dir(&empty).unwrap().count(), 0);
}

/// Each address has another frame of one request wrong: together they have all.
#[test]
fn addresses_complete_each_other() {
    let (first, copy) = pair("complete");
    let (pack, size) = content(&first).pop().unwrap();
    assert!(pack.as_str().starts_with("packs/"), "{pack}");
    let near_the_end = size as usize * 2 / 3;
    bend(&first, &pack, &[100]);
    bend(&copy, &pack, &[near_the_end]);
    let store = mirrored(&first, &copy);
    assert!(read_all(&store, NAME).unwrap() == data_of(&files()));
    // The same frame wrong at both: an error that names it, and what can be read stays readable.
    bend(&copy, &pack, &[101]);
    match read_all(&store, NAME) {
        Err(StoreError::Corrupt {
            key,
            range: Some(range),
            ..
        }) => {
            assert_eq!(key, pack.as_str());
            assert!(range.contains(&100), "{range:?}");
        }
        other => panic!("{other:?}"),
    }
    let report = store.verify(&reference(NAME)).unwrap();
    assert!(report.damaged.iter().any(|d| !d.data.is_empty()));
}

/// A copy that cannot be reached does not keep the first from being asked again.
#[test]
fn an_address_that_is_down_is_passed_over() {
    let (first, copy) = pair("down");
    let down: Arc<dyn BlobStore> =
        Arc::new(FaultStore::fail_nth(Arc::clone(&copy), 1, Fault::Crash));
    // A wrong answer on the way.
    let once: Arc<dyn BlobStore> = Arc::new(FaultStore::fail_nth_of(
        Arc::clone(&first),
        Operation::GetRange,
        1,
        Fault::Corrupt,
    ));
    let store = LayerStore::new(Arc::new(MirrorStore::new(
        Arc::clone(&once),
        vec![Arc::clone(&down), Arc::clone(&copy)],
    )));
    assert!(read_all(&store, NAME).unwrap() == data_of(&files()));
    let (pack, _) = content(&first).pop().unwrap();
    bend(&first, &pack, &[100]);
    let store = LayerStore::new(Arc::new(MirrorStore::new(first, vec![down, copy])));
    assert!(read_all(&store, NAME).unwrap() == data_of(&files()));
}

/// The nth answer is wrong, for every n: the right bytes come all the same, of one address and of
/// two, and nothing is said to be damaged.
#[test]
fn a_wrong_answer_is_asked_for_again() {
    let (first, copy) = pair("sweep");
    for fault in [Fault::Corrupt, Fault::Truncate] {
        for operation in [Operation::Get, Operation::GetRange] {
            for alone in [true, false] {
                let mut fired = 0;
                for nth in 1.. {
                    let context = format!("{fault:?} of {operation:?} {nth}, alone: {alone}");
                    let faulty = Arc::new(FaultStore::fail_nth_of(
                        Arc::clone(&first),
                        operation,
                        nth,
                        fault,
                    ));
                    let shared: Arc<dyn BlobStore> = faulty.clone();
                    let store = if alone {
                        LayerStore::new(shared)
                    } else {
                        mirrored(&shared, &copy)
                    };
                    let data =
                        read_all(&store, NAME).unwrap_or_else(|e| panic!("{context}: {e:?}"));
                    assert!(data == data_of(&files()), "{context}: wrong bytes");
                    let report = store.verify(&reference(NAME)).unwrap();
                    assert!(report.is_ok(), "{context}: {:?}", report.damaged);
                    if !faulty.fired() {
                        break;
                    }
                    fired += 1;
                    assert!(nth < 500, "{context}: no end");
                }
                assert!(fired >= 3, "{fault:?} of {operation:?}: {fired}");
            }
        }
    }
}

/// A writer's own check reads what the address has that it writes to: a good copy elsewhere must
/// not keep it from healing that.
#[test]
fn publishing_again_heals_the_first_address() {
    let (first, copy) = pair("heal");
    for (key, size) in content(&first) {
        bend(&first, &key, &[size as usize / 2]);
    }
    publish(&mirrored(&first, &copy), NAME, &files()).unwrap();
    let alone = LayerStore::new(first);
    assert!(alone.verify(&reference(NAME)).unwrap().is_ok());
    assert!(read_all(&alone, NAME).unwrap() == data_of(&files()));
}
