//! Fail call 1, then 2, until a run is clean: every fault, publishing and reading.

use std::sync::Arc;

use layerpack_store::{BlobStore, Fault, FaultStore, FileStore, LayerStore, MemStore, StoreError};

use crate::support::{data_of, noise, publish, read_all, reference, text};

/// Small, yet with a gathered frame, frames of their own and a repeated chunk.
fn files(seed: u64) -> Vec<Vec<u8>> {
    vec![
        text(seed, 3000),
        noise(seed, 70_000),
        text(seed + 1, 50_000),
        text(seed, 3000),
    ]
}

/// An error must tell where: an object, a published name, or at least the store.
pub(crate) fn names_something(error: &StoreError) -> bool {
    let text = error.to_string();
    error
        .key()
        .is_some_and(|key| !key.is_empty() && text.contains(key))
        || text.contains("base/")
        || text.starts_with("cannot list ") // of the whole store
}

/// Whatever happened, everything that is published is whole.
pub(crate) fn published_is_whole(inner: &Arc<dyn BlobStore>, context: &str) {
    let store = LayerStore::new(Arc::clone(inner));
    for (reference, _) in store.list().unwrap() {
        let report = store.verify(&reference).unwrap();
        assert!(
            report.is_ok(),
            "{context}: {reference}: {:?}",
            report.damaged
        );
    }
}

fn sweep_publish(
    fresh: &dyn Fn() -> Arc<dyn BlobStore>,
    before: &[(&str, u64)],
    name: &str,
    seed: u64,
) {
    for fault in Fault::ALL {
        for nth in 1.. {
            let context = format!("{fault:?} in call {nth}");
            let inner = fresh();
            let healthy = LayerStore::new(Arc::clone(&inner));
            for &(name, seed) in before {
                publish(&healthy, name, &files(seed)).unwrap();
            }
            let faulty = Arc::new(FaultStore::fail_nth(Arc::clone(&inner), nth, fault));
            let result = publish(
                &LayerStore::new(Arc::clone(&faulty) as Arc<dyn BlobStore>),
                name,
                &files(seed),
            );
            published_is_whole(&inner, &context);
            match &result {
                Ok(_) => assert_eq!(
                    read_all(&healthy, name).unwrap(),
                    data_of(&files(seed)),
                    "{context}"
                ),
                Err(error) => assert!(names_something(error), "{context}: {error:?}"),
            }
            // The same again without a fault is what a user does next.
            let again = publish(&healthy, name, &files(seed)).unwrap();
            if let Ok(first) = result {
                assert_eq!(first.digest, again.digest, "{context}");
            }
            assert_eq!(
                read_all(&healthy, name).unwrap(),
                data_of(&files(seed)),
                "{context}"
            );
            published_is_whole(&inner, &context);
            if !faulty.fired() && nth > faulty.calls() {
                break;
            }
            assert!(nth < 500, "{context}: no end");
        }
    }
}

fn memory() -> Arc<dyn BlobStore> {
    Arc::new(MemStore::new())
}

#[test]
fn publishing_into_an_empty_store() {
    sweep_publish(&memory, &[], "base/x:1", 1);
}

#[test]
fn publishing_beside_a_similar_layer() {
    sweep_publish(&memory, &[("base/a:1", 1), ("base/b:1", 5)], "base/x:1", 2);
}

#[test]
fn publishing_again() {
    sweep_publish(&memory, &[("base/x:1", 1)], "base/x:1", 1);
}

#[test]
fn publishing_into_files() {
    let dir = tempfile::tempdir().unwrap();
    let count = std::cell::Cell::new(0);
    let fresh = || -> Arc<dyn BlobStore> {
        count.set(count.get() + 1);
        Arc::new(FileStore::new(dir.path().join(count.get().to_string())).unwrap())
    };
    sweep_publish(&fresh, &[("base/a:1", 1)], "base/x:1", 2);
    for store in 1..=count.get() {
        let temporaries = fs_err::read_dir(dir.path().join(store.to_string()).join("tmp"))
            .unwrap()
            .count();
        assert_eq!(temporaries, 0, "temporaries stay behind in store {store}");
    }
}

#[test]
fn reading() {
    let inner = memory();
    let healthy = LayerStore::new(Arc::clone(&inner));
    publish(&healthy, "base/a:1", &files(1)).unwrap();
    publish(&healthy, "base/x:1", &files(2)).unwrap();
    for fault in Fault::ALL {
        let mut errors = 0;
        for nth in 1.. {
            let faulty = Arc::new(FaultStore::fail_nth(Arc::clone(&inner), nth, fault));
            let store = LayerStore::new(Arc::clone(&faulty) as Arc<dyn BlobStore>);
            match read_all(&store, "base/x:1") {
                Ok(data) => assert!(
                    data == data_of(&files(2)),
                    "{fault:?} in call {nth}: wrong bytes"
                ),
                Err(error) => {
                    errors += 1;
                    assert!(
                        names_something(&error),
                        "{fault:?} in call {nth}: {error:?}"
                    );
                }
            }
            if !faulty.fired() && nth > faulty.calls() {
                break;
            }
            assert!(nth < 500, "no end");
        }
        // A read that is late or made twice is right, one that is wrong is made again, and none
        // fills a store.
        let harmless = [
            Fault::NoSpace,
            Fault::Delay,
            Fault::Duplicate,
            Fault::Truncate,
            Fault::Corrupt,
        ]
        .contains(&fault);
        assert_eq!(errors > 0, !harmless, "{fault:?}: {errors} errors");
    }
}

#[test]
fn verifying() {
    let inner = memory();
    let healthy = LayerStore::new(Arc::clone(&inner));
    publish(&healthy, "base/x:1", &files(1)).unwrap();
    for fault in [Fault::Error, Fault::Missing] {
        let mut noticed = 0;
        for nth in 1.. {
            let faulty = Arc::new(FaultStore::fail_nth(Arc::clone(&inner), nth, fault));
            let store = LayerStore::new(Arc::clone(&faulty) as Arc<dyn BlobStore>);
            match store.verify(&reference("base/x:1")) {
                Ok(report) => noticed += u64::from(!report.is_ok()),
                Err(_) => noticed += 1,
            }
            if !faulty.fired() && nth > faulty.calls() {
                break;
            }
        }
        assert!(noticed >= 6, "{fault:?}: {noticed}");
    }
}
