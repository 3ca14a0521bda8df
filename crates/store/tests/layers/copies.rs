//! Copies of manifests in references.

use std::sync::Arc;

use layerpack_store::transfer::{Selection, TransferOptions, select, transfer};
use layerpack_store::{
    BlobStore, Fault, FaultStore, Key, LayerStore, Operation, PublishOutcome, PutMode, StoreError,
};

use crate::support::{data_of, memory, noise, publish, read_all, reference};

const NAME: &str = "base/x:1";

fn object(blobs: &dyn BlobStore, name: &str) -> (Key, String) {
    let key = Key::reference(&reference(name));
    let bytes = blobs.get(&key, 1 << 20).unwrap().unwrap();
    (key, String::from_utf8(bytes).unwrap())
}

/// A reference as versions without copies wrote it.
fn plain(digest: &layerpack_store::Digest) -> String {
    format!(r#"{{"format":1,"manifest":"{digest}"}}"#)
}

/// How often objects are read whole in `work`.
fn gets(blobs: &Arc<dyn BlobStore>, work: impl FnOnce(&LayerStore)) -> u64 {
    let counting =
        FaultStore::fail_nth_of(Arc::clone(blobs), Operation::Get, u64::MAX, Fault::Error);
    let counting = Arc::new(counting);
    work(&LayerStore::new(Arc::clone(&counting) as Arc<dyn BlobStore>));
    counting.calls()
}

/// The bytes of a reference, to the letter, and that they are all that a name needs.
#[test]
fn a_reference_has_its_manifest_with_it() {
    let (blobs, store) = memory();
    let files = [noise(1, 40)];
    let published = publish(&store, NAME, &files).unwrap();
    let manifest = blobs
        .get(&Key::manifest(&published.digest), 1 << 20)
        .unwrap()
        .unwrap();
    let manifest = String::from_utf8(manifest).unwrap();
    let escaped = manifest.replace('\\', "\\\\").replace('"', "\\\"");
    let (key, text) = object(&*blobs, NAME);
    assert_eq!(
        text,
        format!(
            r#"{{"format":1,"manifest":"{}","text":"{escaped}"}}"#,
            published.digest
        )
    );
    assert_eq!(published.stats.new_bytes, {
        let listed = blobs.list("").unwrap();
        let counted = listed.iter().filter(|o| o.key != Key::marker());
        counted.map(|o| o.size).sum::<u64>()
    });
    // Marker and reference.
    let reads = gets(&blobs, |store| {
        let (digest, loaded) = store.load(&reference(NAME)).unwrap();
        assert_eq!(digest, published.digest);
        assert_eq!(loaded.to_bytes().unwrap(), manifest.as_bytes());
    });
    assert_eq!(reads, 2);

    // As it was written before there were copies: read for ever, one object more.
    let old = plain(&published.digest);
    blobs.put(&key, old.as_bytes(), PutMode::Overwrite).unwrap();
    let reads = gets(&blobs, |store| {
        assert_eq!(store.load(&reference(NAME)).unwrap().0, published.digest);
    });
    assert_eq!(reads, 3);
    let store = LayerStore::new(Arc::clone(&blobs));
    assert_eq!(read_all(&store, NAME).unwrap(), data_of(&files));
    assert!(store.verify(&reference(NAME)).unwrap().is_ok());
    let audit = store.audit(true).unwrap();
    assert!(audit.damaged.is_empty() && audit.layers[0].sound);
    // It is the same reference: published again it stays as it is.
    let again = publish(&store, NAME, &files).unwrap();
    assert_eq!(again.outcome, PublishOutcome::Already);
    assert_eq!(object(&*blobs, NAME).1, old);
}

/// What a copy says counts only if it is the manifest: a forged one changes nothing for readers, and
/// is damage for who verifies.
#[test]
fn a_copy_that_is_something_else_is_not_believed() {
    let (blobs, store) = memory();
    let files = [noise(1, 70_000)];
    let mine = publish(&store, NAME, &files).unwrap();
    let other = publish(&store, "base/y:1", &[noise(2, 70_000)]).unwrap();
    let (key, good) = object(&*blobs, NAME);
    let (_, foreign) = object(&*blobs, "base/y:1");
    let foreign = foreign.replace(&other.digest.to_string(), &mine.digest.to_string());
    let renamed = good.replace(r#"\"version\":\"1\""#, r#"\"version\":\"2\""#);
    let resized = good.replace(r#"\"data_size\":"#, r#"\"data_size\":4"#);
    let empty = format!(r#"{{"format":1,"manifest":"{}","text":""}}"#, mine.digest);
    for forged in [foreign, renamed, resized, empty] {
        assert_ne!(forged, good);
        blobs
            .put(&key, forged.as_bytes(), PutMode::Overwrite)
            .unwrap();
        let store = LayerStore::new(Arc::clone(&blobs));
        let (digest, manifest) = store.load(&reference(NAME)).unwrap();
        assert_eq!(digest, mine.digest);
        assert_eq!(manifest.digest().unwrap(), mine.digest);
        let both = [reference(NAME), reference("base/y:1")];
        let loaded = store.load_all(&both).unwrap();
        assert_eq!([loaded[0].0, loaded[1].0], [mine.digest, other.digest]);
        assert_eq!(loaded[0].1, manifest);
        assert_eq!(read_all(&store, NAME).unwrap(), data_of(&files));
        let report = store.verify(&reference(NAME)).unwrap();
        assert_eq!(report.damaged.len(), 1, "{:?}", report.damaged);
        assert_eq!(report.damaged[0].key, key.as_str());
        assert!(report.damaged[0].what.contains("layerpack rm base/x:1"));
        assert!(report.damaged[0].data.is_empty());
        let audit = store.audit(true).unwrap();
        assert_eq!(audit.damaged.len(), 1, "{:?}", audit.damaged);
        assert_eq!(audit.damaged[0].object, key.as_str());
        assert_eq!(audit.damaged[0].layers, [NAME]);
        // Publishing does not touch a reference that is there.
        let again = publish(&store, NAME, &files).unwrap();
        assert_eq!(again.outcome, PublishOutcome::Already);
        assert_eq!(object(&*blobs, NAME).1, forged);
    }
    // Removed and published, it is whole again.
    store.remove(&reference(NAME)).unwrap();
    publish(&store, NAME, &files).unwrap();
    assert_eq!(object(&*blobs, NAME).1, good);
    assert!(store.verify(&reference(NAME)).unwrap().is_ok());

    // A reference that names the manifest of another stays damaged, with a right copy too.
    let stolen = object(&*blobs, "base/y:1").1;
    blobs
        .put(&key, stolen.as_bytes(), PutMode::Overwrite)
        .unwrap();
    let error = store.load(&reference(NAME)).unwrap_err();
    assert!(
        matches!(error, StoreError::DamagedReference { .. }),
        "{error}"
    );
}

/// A manifest that is gone is damage, though its copies let the layer be read; copying the layer
/// writes both anew.
#[test]
fn a_manifest_that_is_gone_is_found() {
    let (blobs, store) = memory();
    let files = [noise(1, 70_000)];
    let published = publish(&store, NAME, &files).unwrap();
    let manifest = Key::manifest(&published.digest);
    assert!(blobs.delete(&manifest).unwrap());
    let store = LayerStore::new(Arc::clone(&blobs));
    assert_eq!(read_all(&store, NAME).unwrap(), data_of(&files));
    let report = store.verify(&reference(NAME)).unwrap();
    assert_eq!(report.damaged[0].key, manifest.as_str());
    assert_eq!(store.audit(true).unwrap().damaged.len(), 1);
    let (there, target) = memory();
    let all = Selection {
        all: true,
        ..Selection::default()
    };
    let layers = select(&store, &all).unwrap();
    let options = TransferOptions::default();
    transfer(&store, &target, &layers, &options, &mut |_| {}).unwrap();
    assert_eq!(object(&*there, NAME).1, object(&*blobs, NAME).1);
    assert!(target.verify(&reference(NAME)).unwrap().is_ok());
    // Repairing writes it anew, also where it is there and damaged.
    for bad in [None, Some(&b"x"[..])] {
        if let Some(bad) = bad {
            blobs.put(&manifest, bad, PutMode::Overwrite).unwrap();
        }
        for dry_run in [true, false] {
            let repaired = store.repair(dry_run).unwrap();
            assert!(repaired.is_ok(), "{repaired:?}");
            assert_eq!(repaired.mended.len(), 1, "{repaired:?}");
            assert!(repaired.mended[0].contains(manifest.as_str()));
        }
        assert!(store.verify(&reference(NAME)).unwrap().is_ok());
    }
    // So does publishing the layer.
    assert!(blobs.delete(&manifest).unwrap());
    publish(&store, NAME, &files).unwrap();
    assert!(store.verify(&reference(NAME)).unwrap().is_ok());
    // Where the reference has no copy, it is lost.
    let (key, _) = object(&*blobs, NAME);
    let old = plain(&published.digest);
    blobs.put(&key, old.as_bytes(), PutMode::Overwrite).unwrap();
    assert!(blobs.delete(&manifest).unwrap());
    let repaired = store.repair(false).unwrap();
    assert_eq!(repaired.lost[0].object, manifest.as_str(), "{repaired:?}");
}

/// A manifest with much in it is named only.
#[test]
fn a_large_manifest_is_not_copied() {
    let (blobs, store) = memory();
    let mut writer = store.writer(crate::support::options()).unwrap();
    let files = crate::support::add(&mut writer, &[noise(1, 5000)]).unwrap();
    let map = crate::support::lay_out(&files);
    let mut draft = layerpack_store::Draft::new(reference(NAME), Vec::new(), map);
    draft.labels.insert("note".to_owned(), "x".repeat(16 << 10));
    let published = writer.finish(draft).unwrap();
    assert_eq!(object(&*blobs, NAME).1, plain(&published.digest));
    let (digest, manifest) = store.load(&reference(NAME)).unwrap();
    assert_eq!(digest, published.digest);
    assert_eq!(manifest.labels["note"].len(), 16 << 10);
    assert!(store.verify(&reference(NAME)).unwrap().is_ok());
}
