//! Every fault in every call of collecting, compacting, repairing, proving, moving channels and signing: no wrong byte, no lost layer,
//! no hang, and an error that names the object.

use std::sync::Arc;
use std::time::Duration;

use layerpack_store::channel::ChannelName;
use layerpack_store::{
    BlobStore, Fault, FaultStore, GcOptions, LayerStore, MemStore, PruneOptions, Result, SigningKey,
};

use crate::faults::{names_something, published_is_whole};
use crate::support::{data_of, noise, publish, read_all, reference, text};

fn files(seed: u64) -> Vec<Vec<u8>> {
    vec![noise(seed, 66_000), text(seed + 1, 3000)]
}

/// `a` alone uses its pack, `b` a part of one whose rest is garbage, `c` is garbage.
fn prepared() -> Arc<dyn BlobStore> {
    let blobs: Arc<dyn BlobStore> = Arc::new(MemStore::new());
    let store = LayerStore::new(Arc::clone(&blobs));
    publish(&store, "base/a:1", &files(1)).unwrap();
    let mut large = files(10);
    large.extend(files(20));
    large.extend(files(30));
    publish(&store, "base/c:1", &large).unwrap();
    publish(&store, "base/b:1", &files(10)).unwrap();
    store.remove(&reference("base/c:1")).unwrap();
    blobs
}

/// What ten minutes and more do: leases and marks of the dead lapse.
fn time_passes(blobs: &dyn BlobStore) {
    for family in ["leases/", "gc/sweep-"] {
        for object in blobs.list(family).unwrap() {
            blobs.delete(&object.key).unwrap();
        }
    }
}

fn sweep(operation: &dyn Fn(&LayerStore) -> Result<()>, damage: &dyn Fn(&dyn BlobStore)) {
    for fault in Fault::ALL {
        let mut errors = 0;
        for nth in 1.. {
            let context = format!("{fault:?} in call {nth}");
            let inner = prepared();
            damage(&*inner);
            let faulty = Arc::new(FaultStore::fail_nth(Arc::clone(&inner), nth, fault));
            let store = LayerStore::new(Arc::clone(&faulty) as Arc<dyn BlobStore>);
            if let Err(error) = operation(&store) {
                errors += 1;
                assert!(names_something(&error), "{context}: {error:?}");
            }
            let healthy = LayerStore::new(Arc::clone(&inner));
            time_passes(&*inner);
            operation(&healthy).unwrap_or_else(|e| panic!("{context}: {e:?}"));
            let names: Vec<_> = healthy
                .list()
                .unwrap()
                .into_iter()
                .map(|(r, _)| r)
                .collect();
            assert_eq!(
                names,
                [reference("base/a:1"), reference("base/b:1")],
                "{context}"
            );
            published_is_whole(&inner, &context);
            // Building goes on, of what was garbage and of what was not.
            for (name, files) in [
                ("base/a:1", files(1)),
                ("base/b:1", files(10)),
                ("base/d:1", files(20)),
            ] {
                publish(&healthy, name, &files).unwrap_or_else(|e| panic!("{context}: {e:?}"));
                assert!(
                    read_all(&healthy, name).unwrap() == data_of(&files),
                    "{context}"
                );
            }
            published_is_whole(&inner, &context);
            if !faulty.fired() && nth > faulty.calls() {
                break;
            }
            assert!(nth < 1000, "{context}: no end");
        }
        if fault == Fault::Crash {
            assert!(errors > 5, "{errors} calls");
        }
    }
}

#[test]
fn collecting() {
    let now = GcOptions {
        grace: Duration::ZERO,
        dry_run: false,
        wait: false,
    };
    sweep(&|store| store.collect(now).map(|_| ()), &|_| {});
}

#[test]
fn compacting() {
    let now = PruneOptions {
        min_live: 60,
        dry_run: false,
        grace: Duration::ZERO,
        wait: false,
    };
    sweep(&|store| store.prune(now).map(|_| ()), &|_| {});
}

#[test]
fn repairing() {
    let damage = |blobs: &dyn BlobStore| {
        for family in ["index/", "locators/"] {
            let first = blobs.list(family).unwrap().swap_remove(0);
            blobs.delete(&first.key).unwrap();
        }
    };
    sweep(&|store| store.repair(false).map(|_| ()), &damage);
}

#[test]
fn proving() {
    sweep(&|store| store.audit(true).map(|_| ()), &|_| {});
}

#[test]
fn channels_and_signatures() {
    let key = SigningKey::from_text(&format!("ed25519-secret:{}", "07".repeat(32))).unwrap();
    let operation = |store: &LayerStore| {
        for layer in ["base/a:1", "base/b:1"] {
            let reference = reference(layer);
            let channel: ChannelName = layer.replace(":1", "@latest").parse().unwrap();
            store.move_channel(&channel, &reference.version, 1_800_000_000)?;
            // What it says is right, or it says nothing.
            assert_eq!(store.resolve_channel(&channel)?, reference);
            let manifest = store.resolve(&reference)?;
            store.sign(&manifest, &key)?;
            store.is_signed_by(&manifest, &key.public())?;
        }
        Ok(())
    };
    sweep(&operation, &|_| {});
    // Without a fault it is so.
    let blobs = prepared();
    let store = LayerStore::new(blobs);
    operation(&store).unwrap();
    let manifest = store.resolve(&reference("base/b:1")).unwrap();
    assert!(store.is_signed_by(&manifest, &key.public()).unwrap());
}
