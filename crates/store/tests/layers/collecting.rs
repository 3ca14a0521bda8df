//! Collecting garbage beside writers, nodes, other collectors, and after crashes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use layerpack_store::{
    BlobStore, Digest, Draft, FileStore, GcOptions, GcReport, Key, LayerStore, MemStore, NodeLease,
    ParentRef, PutMode, Reason, StoreError,
};

use crate::support::{
    add, data_of, lay_out, memory, noise, options, publish, read_all, reference, text,
};

pub(crate) fn now() -> GcOptions {
    GcOptions {
        grace: Duration::ZERO,
        dry_run: false,
        wait: false,
    }
}

fn later() -> GcOptions {
    GcOptions {
        grace: Duration::from_secs(3600),
        ..now()
    }
}

fn files(seed: u64) -> Vec<Vec<u8>> {
    vec![
        noise(seed, 70_000),
        text(seed + 1, 20_000),
        noise(seed + 2, 900),
    ]
}

fn keys(blobs: &dyn BlobStore) -> Vec<String> {
    let objects = blobs.list("").unwrap().into_iter();
    objects.map(|object| object.key.to_string()).collect()
}

fn assert_good(store: &LayerStore, name: &str, files: &[Vec<u8>]) {
    let report = store.verify(&reference(name)).unwrap();
    assert!(report.is_ok(), "{name}: {:?}", report.damaged);
    assert!(report.warnings.is_empty(), "{name}: {:?}", report.warnings);
    assert!(read_all(store, name).unwrap() == data_of(files), "{name}");
}

fn sum(report: &GcReport) -> u64 {
    report
        .kept
        .values()
        .map(|amount| amount.objects)
        .sum::<u64>()
        + report.condemned.objects
        + report.deleted.objects
}

#[test]
fn what_nothing_uses_goes_and_all_else_stays() {
    let (blobs, store) = memory();
    publish(&store, "base/a:1", &files(1)).unwrap();
    let only_a = keys(&*blobs);
    publish(&store, "base/b:1", &files(10)).unwrap();
    let both = keys(&*blobs);
    let report = store.collect(now()).unwrap();
    assert_eq!(
        (report.deleted.objects, report.condemned.objects),
        (0, 0),
        "{report:?}"
    );
    assert_eq!(sum(&report), report.total.objects);
    assert_eq!(keys(&*blobs), both);

    store.remove(&reference("base/b:1")).unwrap();
    let dry = store
        .collect(GcOptions {
            dry_run: true,
            ..now()
        })
        .unwrap();
    assert!(dry.dry_run && dry.condemned.objects >= 5, "{dry:?}");
    let report = store.collect(now()).unwrap();
    assert_eq!(report.deleted, dry.condemned);
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    assert_eq!(keys(&*blobs), only_a);
    assert_good(&store, "base/a:1", &files(1));
    publish(&store, "base/b:1", &files(10)).unwrap();
    assert_eq!(keys(&*blobs), both);
    assert_good(&store, "base/b:1", &files(10));
}

#[test]
fn shared_packs_stay() {
    let (_, store) = memory();
    publish(&store, "base/a:1", &files(1)).unwrap();
    let mut more = files(1);
    more.push(noise(50, 3000));
    publish(&store, "base/b:1", &more).unwrap();
    store.remove(&reference("base/a:1")).unwrap();
    let report = store.collect(now()).unwrap();
    assert!(report.deleted.objects >= 2, "{report:?}");
    assert_good(&store, "base/b:1", &more);
}

#[test]
fn the_grace_period_is_kept_and_use_in_between_saves() {
    let (blobs, store) = memory();
    publish(&store, "base/a:1", &files(1)).unwrap();
    publish(&store, "base/b:1", &files(10)).unwrap();
    store.remove(&reference("base/a:1")).unwrap();
    store.remove(&reference("base/b:1")).unwrap();
    let first = store.collect(later()).unwrap();
    assert!(
        first.condemned.objects >= 10 && first.deleted.objects == 0,
        "{first:?}"
    );
    assert_eq!(first.waiting.len(), 1);
    let second = store.collect(later()).unwrap();
    assert_eq!(second.condemned.objects, 0, "condemned once");
    assert_eq!(second.waiting[0].amount, first.condemned);
    // Published again while it is condemned: what was there is used, and stays.
    let again = publish(&store, "base/a:1", &files(1)).unwrap();
    assert_eq!(again.stats.new_packs, 0, "{:?}", again.stats);
    let third = store.collect(now()).unwrap();
    assert!(third.deleted.objects >= 5, "{third:?}");
    assert_good(&store, "base/a:1", &files(1));
    assert!(
        keys(&*blobs).iter().all(|key| !key.starts_with("gc/")),
        "{:?}",
        keys(&*blobs)
    );
    assert!(!store.has_reference(&reference("base/b:1")).unwrap());
    assert_eq!(store.collect(now()).unwrap().deleted.objects, 0);
}

/// A writer that began before the list was written holds up its deletion; what it relies on stays.
#[test]
fn a_writer_holds_up_lists_that_it_does_not_know() {
    let (blobs, store) = memory();
    publish(&store, "base/a:1", &files(1)).unwrap();
    store.remove(&reference("base/a:1")).unwrap();
    let mut writer = store.writer(options()).unwrap();
    let chunks = add(&mut writer, &files(1)).unwrap();
    assert_eq!(writer.stats().new_chunks, 0);
    let report = store.collect(now()).unwrap();
    assert_eq!(report.deleted.objects, 0, "{report:?}");
    assert!(report.waiting[0].why.contains("writer"), "{report:?}");
    assert!(blobs.list("gc/sweep-").unwrap().is_empty());
    // A writer that came after the list is no hindrance, and may use what is in it.
    let other = publish(&store, "base/c:1", &files(1)).unwrap();
    assert_eq!(other.stats.new_packs, 0);
    writer
        .finish(Draft::new(
            reference("base/b:1"),
            text(7, 3000),
            lay_out(&chunks),
        ))
        .unwrap();
    let report = store.collect(now()).unwrap();
    assert!(report.waiting.is_empty(), "{report:?}");
    assert!(
        report.deleted.objects >= 1,
        "the manifest of base/a:1: {report:?}"
    );
    assert_good(&store, "base/b:1", &files(1));
    assert_good(&store, "base/c:1", &files(1));
    assert!(blobs.list("leases/").unwrap().is_empty());
}

/// A claim of a writer that is still at work counts, though nothing that is published uses it.
#[test]
fn claims_count() {
    let (_, store) = memory();
    publish(&store, "base/a:1", &files(1)).unwrap();
    store.remove(&reference("base/a:1")).unwrap();
    store.collect(later()).unwrap();
    let mut writer = store.writer(options()).unwrap();
    let chunks = add(&mut writer, &files(1)).unwrap();
    assert_eq!(writer.stats().new_chunks, 0);
    let report = store.collect(now()).unwrap();
    assert!(
        report.waiting.is_empty(),
        "the writer knows the list: {report:?}"
    );
    assert!(report.deleted.objects >= 1, "{report:?}");
    let draft = Draft::new(reference("base/b:1"), text(7, 3000), lay_out(&chunks));
    writer.finish(draft).unwrap();
    assert_good(&store, "base/b:1", &files(1));
}

#[test]
fn a_writer_waits_for_a_sweep_of_what_it_needs() {
    let (blobs, store) = memory();
    publish(&store, "base/a:1", &files(1)).unwrap();
    store.remove(&reference("base/a:1")).unwrap();
    store.collect(later()).unwrap();
    let list = keys(&*blobs)
        .into_iter()
        .find_map(|key| key.strip_prefix("gc/list-").map(str::to_owned))
        .unwrap();
    let marker = Key::new(&format!("gc/sweep-{list}-0123")).unwrap();
    blobs.put(&marker, b"somebody", PutMode::Overwrite).unwrap();
    std::thread::scope(|scope| {
        let publishing = scope.spawn(|| publish(&store, "base/a:1", &files(1)).unwrap());
        // Another content does not need what is condemned: it goes through meanwhile.
        let mut writer = store.writer(options()).unwrap();
        let chunks = add(&mut writer, &files(77)).unwrap();
        let draft = Draft::new(reference("base/z:1"), text(8, 3000), lay_out(&chunks));
        writer.finish(draft).unwrap();
        assert!(!publishing.is_finished());
        // What the collector deletes, and its end.
        let pack = blobs.list("packs/").unwrap()[0].key.clone();
        blobs.delete(&pack).unwrap();
        blobs
            .delete(&Key::new(&format!("gc/list-{list}")).unwrap())
            .unwrap();
        blobs.delete(&marker).unwrap();
        publishing.join().unwrap();
    });
    assert_good(&store, "base/a:1", &files(1));
    assert!(store.verify(&reference("base/z:1")).unwrap().is_ok());
}

#[test]
fn leases_of_nodes_keep_what_they_name() {
    let (blobs, store) = memory();
    let published = publish(&store, "base/a:1", &files(1)).unwrap();
    let (_, manifest) = store.load(&reference("base/a:1")).unwrap();
    let (hour, no) = (Duration::from_secs(3600), Duration::ZERO);
    let lease = NodeLease::new(&store, "n1", "a test".to_owned(), hour, no).unwrap();
    lease.hold(&[published.digest]).unwrap();
    store.remove(&reference("base/a:1")).unwrap();
    let report = store.collect(now()).unwrap();
    assert_eq!(report.deleted.objects, 0, "{report:?}");
    assert!(report.kept[&Reason::Lease].objects >= 5, "{report:?}");
    let map = store.map(&manifest).unwrap();
    let locator = store.locator(&manifest, &map).unwrap();
    let data = store.read_data(&map, &locator, 0..map.data_size()).unwrap();
    assert!(data == data_of(&files(1)));
    // Another process of the node knows nothing of it and replaces it.
    let lease = NodeLease::new(&store, "n1", "a test".to_owned(), hour, no).unwrap();
    lease.update(BTreeSet::from([published.digest])).unwrap();
    assert_eq!(store.collect(now()).unwrap().deleted.objects, 0);
    // One that was told of it keeps it when it first takes something else.
    let lease = NodeLease::new(&store, "n1", "a test".to_owned(), hour, no).unwrap();
    lease.adopt([published.digest]);
    lease.hold(&[Digest::of(b"another")]).unwrap();
    assert_eq!(store.collect(now()).unwrap().deleted.objects, 0);
    lease.update(BTreeSet::new()).unwrap();
    assert!(blobs.list("leases/").unwrap().is_empty());
    assert!(store.collect(now()).unwrap().deleted.objects >= 5);
    assert!(blobs.list("packs/").unwrap().is_empty());
}

/// A directory that was moved away, or is not mounted: a lease there would be another store.
#[test]
fn a_store_that_is_gone_gets_no_lease() {
    let dir = layerpack_fixtures::ScratchDir::new("gone").unwrap();
    let (place, away) = (dir.join("store"), dir.join("away"));
    let blobs: Arc<dyn BlobStore> = Arc::new(FileStore::new(&place).unwrap());
    let store = LayerStore::new(blobs);
    let first = publish(&store, "base/a:1", &files(1)).unwrap();
    let second = publish(&store, "base/b:1", &files(10)).unwrap();
    let (hour, no) = (Duration::from_secs(3600), Duration::ZERO);
    let lease = NodeLease::new(&store, "n1", "a test".to_owned(), hour, no).unwrap();
    lease.hold(&[first.digest]).unwrap();
    fs_err::rename(&place, &away).unwrap();
    let gone = |result: Result<(), StoreError>| {
        let error = result.unwrap_err();
        assert!(matches!(error, StoreError::NoStore { .. }), "{error}");
        assert!(!place.exists());
    };
    gone(lease.hold(&[second.digest]));
    gone(lease.update(BTreeSet::from([second.digest])));
    lease.update(BTreeSet::new()).unwrap();
    assert!(!place.exists());
    // An empty directory in its place, as below a filesystem that is not mounted.
    fs_err::create_dir(&place).unwrap();
    lease.hold(&[second.digest]).unwrap_err();
    assert_eq!(fs_err::read_dir(&place).unwrap().count(), 0);
    fs_err::remove_dir(&place).unwrap();
    fs_err::rename(&away, &place).unwrap();
    lease.hold(&[second.digest]).unwrap();
    store.remove(&reference("base/b:1")).unwrap();
    assert_eq!(store.collect(now()).unwrap().deleted.objects, 0);
}

/// A node that wants a layer which is being deleted waits, then is told.
#[test]
fn a_node_does_not_take_what_is_being_deleted() {
    let (blobs, store) = memory();
    let published = publish(&store, "base/a:1", &files(1)).unwrap();
    store.remove(&reference("base/a:1")).unwrap();
    store.collect(later()).unwrap();
    let list = keys(&*blobs)
        .into_iter()
        .find_map(|key| key.strip_prefix("gc/list-").map(str::to_owned))
        .unwrap();
    let marker = Key::new(&format!("gc/sweep-{list}-0123")).unwrap();
    blobs.put(&marker, b"somebody", PutMode::Overwrite).unwrap();
    let (hour, no) = (Duration::from_secs(3600), Duration::ZERO);
    let lease = NodeLease::new(&store, "n1", "a test".to_owned(), hour, no).unwrap();
    // Also who comes when the lease names it already.
    for _ in 0..2 {
        match lease.hold(&[published.digest]).unwrap_err() {
            StoreError::Collecting { key, .. } => {
                assert_eq!(key, Key::manifest(&published.digest).to_string());
            }
            other => panic!("{other:?}"),
        }
        assert!(!lease.holds(&[published.digest]));
    }
    let another = Digest::of(b"another");
    lease.hold(&[another]).unwrap();
    assert!(lease.holds(&[another]) && !lease.holds(&[another, published.digest]));
    blobs.delete(&marker).unwrap();
    lease.hold(&[published.digest]).unwrap();
    assert!(lease.holds(&[another, published.digest]));
    // What leaves the lease is not protected when it is named again, until that was asked for.
    lease.update(BTreeSet::from([another])).unwrap();
    assert!(lease.holds(&[another]) && !lease.holds(&[published.digest]));
    lease
        .update(BTreeSet::from([another, published.digest]))
        .unwrap();
    assert!(!lease.holds(&[published.digest]));
    blobs.put(&marker, b"somebody", PutMode::Overwrite).unwrap();
    lease.hold(&[published.digest]).unwrap_err();
    lease.update(BTreeSet::new()).unwrap();
    assert!(!lease.holds(&[another]));
}

#[test]
fn parents_stay_with_their_children() {
    let (_, store) = memory();
    let parent = publish(&store, "base/a:1", &files(1)).unwrap();
    let child = |name: &str, seed: u64| {
        let mut writer = store.writer(options()).unwrap();
        let chunks = add(&mut writer, &files(seed)).unwrap();
        let mut draft = Draft::new(reference(name), text(7, 3000), lay_out(&chunks));
        draft.parents.push(ParentRef {
            reference: None,
            manifest: parent.digest,
        });
        writer.finish(draft).unwrap()
    };
    child("diff/x:1", 20);
    store.remove(&reference("base/a:1")).unwrap();
    let report = store.collect(now()).unwrap();
    assert_eq!(report.deleted.objects, 0, "{report:?}");
    assert!(report.kept[&Reason::Parent].objects >= 4, "{report:?}");
    // The last child goes, all is condemned, and then there is a new one.
    store.remove(&reference("diff/x:1")).unwrap();
    assert!(store.collect(later()).unwrap().condemned.objects >= 10);
    child("diff/y:1", 30);
    let report = store.collect(now()).unwrap();
    assert!(report.deleted.objects >= 4, "{report:?}");
    let manifest = store.manifest(&parent.digest).unwrap();
    let map = store.map(&manifest).unwrap();
    let locator = store.locator(&manifest, &map).unwrap();
    let data = store.read_data(&map, &locator, 0..map.data_size()).unwrap();
    assert!(data == data_of(&files(1)));
}

/// Signatures, profiles and markers of parts stay and go with what they are about.
#[test]
fn what_is_about_a_layer_goes_with_it() {
    let (blobs, store) = memory();
    let a = publish(&store, "base/a:1", &files(1)).unwrap();
    let b = publish(&store, "base/b:1", &files(10)).unwrap();
    let about = |published: &layerpack_store::Published| {
        let manifest = store.manifest(&published.digest).unwrap();
        let other = Digest::of(b"other").hex();
        [
            format!("signatures/{}/{other}", published.digest.hex()),
            format!("profiles/{}/{other}", published.layer_id.digest().hex()),
            format!("seeds/{}", manifest.map.digest.hex()),
        ]
    };
    let (of_a, of_b) = (about(&a), about(&b));
    for key in of_a.iter().chain(&of_b) {
        blobs
            .put(&Key::new(key).unwrap(), b"x", PutMode::IfAbsent)
            .unwrap();
    }
    assert_eq!(store.collect(now()).unwrap().deleted.objects, 0);
    store.remove(&reference("base/b:1")).unwrap();
    store.collect(now()).unwrap();
    let left = keys(&*blobs);
    assert!(of_a.iter().all(|key| left.contains(key)), "{left:?}");
    assert!(of_b.iter().all(|key| !left.contains(key)), "{left:?}");
}

/// A channel keeps what it is at, also without a reference.
#[test]
fn channels_keep_what_they_are_at() {
    let (blobs, store) = memory();
    let published = publish(&store, "base/a:1", &files(1)).unwrap();
    let channel = Key::new("channels/base/a/_latest").unwrap();
    let object = format!(
        r#"{{"format":1,"version":"1","manifest":"{}"}}"#,
        published.digest
    );
    blobs
        .put(&channel, object.as_bytes(), PutMode::Overwrite)
        .unwrap();
    store.remove(&reference("base/a:1")).unwrap();
    let report = store.collect(now()).unwrap();
    assert_eq!(report.deleted.objects, 0, "{report:?}");
    assert!(report.kept[&Reason::Channel].objects >= 5, "{report:?}");
    blobs.delete(&channel).unwrap();
    assert!(store.collect(now()).unwrap().deleted.objects >= 5);
}

#[test]
fn what_cannot_be_read_counts_as_used() {
    type Harm<'a> = &'a dyn Fn(&dyn BlobStore, &LayerStore);
    let damages: [(&str, Harm<'_>); 5] = [
        ("refs/", &|blobs, _| {
            let key = Key::reference(&reference("base/a:1"));
            blobs.put(&key, b"{}", PutMode::Overwrite).unwrap();
        }),
        ("manifests/", &|blobs, store| {
            let digest = store.resolve(&reference("base/a:1")).unwrap();
            blobs
                .put(&Key::manifest(&digest), b"x", PutMode::Overwrite)
                .unwrap();
        }),
        ("manifests/", &|blobs, store| {
            let digest = store.resolve(&reference("base/a:1")).unwrap();
            blobs.delete(&Key::manifest(&digest)).unwrap();
        }),
        ("leases/node-x", &|blobs, _| {
            blobs
                .put(
                    &Key::new("leases/node-x").unwrap(),
                    b"x",
                    PutMode::Overwrite,
                )
                .unwrap();
        }),
        ("channels/base/a/_latest", &|blobs, _| {
            let key = Key::new("channels/base/a/_latest").unwrap();
            blobs.put(&key, b"x", PutMode::Overwrite).unwrap();
        }),
    ];
    for (named, damage) in damages {
        let (blobs, store) = memory();
        publish(&store, "base/a:1", &files(1)).unwrap();
        publish(&store, "base/b:1", &files(10)).unwrap();
        store.remove(&reference("base/b:1")).unwrap();
        damage(&*blobs, &store);
        let before = keys(&*blobs);
        let report = store.collect(now()).unwrap();
        assert_eq!(
            (report.condemned.objects, report.deleted.objects),
            (0, 0),
            "{report:?}"
        );
        assert!(
            report.problems.iter().any(|line| line.contains(named)),
            "{report:?}"
        );
        assert!(report.kept[&Reason::Unknown].objects >= 4, "{report:?}");
        assert_eq!(keys(&*blobs), before);
    }
    // Without its locator a layer's packs are not known; the rest of what is unused can go.
    let (blobs, store) = memory();
    publish(&store, "base/a:1", &files(1)).unwrap();
    let (_, manifest) = store.load(&reference("base/a:1")).unwrap();
    publish(&store, "base/b:1", &files(10)).unwrap();
    store.remove(&reference("base/b:1")).unwrap();
    blobs.delete(&Key::locator(&manifest.map.digest)).unwrap();
    let packs = blobs.list("packs/").unwrap();
    let report = store.collect(now()).unwrap();
    assert!(report.deleted.objects >= 2, "{report:?}");
    assert_eq!(blobs.list("packs/").unwrap(), packs);
    publish(&store, "base/a:1", &files(1)).unwrap();
    assert_good(&store, "base/a:1", &files(1));
}

/// Leases are judged by the store's clock: here, the times of files.
#[test]
fn dead_writers_are_forgotten_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let blobs: Arc<dyn BlobStore> = Arc::new(FileStore::new(dir.path()).unwrap());
    let store = LayerStore::new(Arc::clone(&blobs));
    publish(&store, "base/a:1", &files(1)).unwrap();
    publish(&store, "base/b:1", &files(10)).unwrap();
    store.remove(&reference("base/b:1")).unwrap();
    let age = |key: &str, seconds: u64| {
        let file = fs_err::OpenOptions::new()
            .write(true)
            .open(dir.path().join(key))
            .unwrap();
        let time = std::time::SystemTime::now() - Duration::from_secs(seconds);
        file.file().set_modified(time).unwrap();
    };
    let writer = store.writer(options()).unwrap();
    let session = blobs.list("leases/").unwrap()[0].key.clone();
    assert_eq!(store.collect(now()).unwrap().deleted.objects, 0);
    age(session.as_str(), 29 * 60);
    assert_eq!(store.collect(now()).unwrap().deleted.objects, 0);
    age(session.as_str(), 31 * 60);
    let report = store.collect(now()).unwrap();
    assert!(report.deleted.objects >= 5, "{report:?}");
    // It was not dead after all: it must not publish what may be gone.
    let draft = Draft::new(reference("base/c:1"), text(7, 3000), lay_out(&[]));
    match writer.finish(draft).unwrap_err() {
        StoreError::LeaseLost { key, .. } => assert_eq!(key, session.to_string()),
        other => panic!("{other:?}"),
    }
    assert!(!store.has_reference(&reference("base/c:1")).unwrap());
    assert_good(&store, "base/a:1", &files(1));
    // What a crash made of a session counts as used until its time is over.
    let torn = Key::new("leases/session-torn").unwrap();
    blobs.put(&torn, b"", PutMode::Overwrite).unwrap();
    publish(&store, "base/d:1", &files(40)).unwrap();
    store.remove(&reference("base/d:1")).unwrap();
    assert_eq!(store.collect(now()).unwrap().deleted.objects, 0);
    age(torn.as_str(), 31 * 60);
    assert!(store.collect(now()).unwrap().deleted.objects >= 5);
    assert!(blobs.list("leases/").unwrap().is_empty());
}

#[test]
fn several_collectors_at_once() {
    for _ in 0..8 {
        let blobs: Arc<dyn BlobStore> = Arc::new(MemStore::new());
        let store = LayerStore::new(Arc::clone(&blobs));
        for i in 0..6 {
            publish(&store, &format!("base/n{i}:1"), &files(10 * i)).unwrap();
        }
        for i in 0..3 {
            store.remove(&reference(&format!("base/n{i}:1"))).unwrap();
        }
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| store.collect(now()).unwrap());
            }
        });
        let last = store.collect(now()).unwrap();
        assert!(last.waiting.is_empty(), "{last:?}");
        assert_eq!(blobs.list("packs/").unwrap().len(), 3);
        assert!(blobs.list("gc/").unwrap().is_empty());
        for i in 3..6 {
            assert_good(&store, &format!("base/n{i}:1"), &files(10 * i));
        }
    }
}
