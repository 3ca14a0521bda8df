//! A full disk, on a real small filesystem.

use std::sync::Arc;

use layerpack_fixtures::{MountGuard, ScratchDir};
use layerpack_store::{FileStore, LayerStore, StoreError};

use crate::support::{data_of, noise, publish, read_all, reference};

#[test]
fn privileged_full_disk_publishes_nothing() {
    if !layerpack_fixtures::is_root() {
        layerpack_fixtures::skip!("mounting a small filesystem needs root");
    }
    let scratch = ScratchDir::new("store-full").unwrap();
    let target = scratch.mkdir("mnt").unwrap();
    let mount = match MountGuard::tmpfs(2 << 20, &target) {
        Ok(mount) => mount,
        Err(error) => layerpack_fixtures::skip!("tmpfs cannot be mounted: {error}"),
    };
    let store = LayerStore::new(Arc::new(FileStore::new(target.join("store")).unwrap()));
    let small = vec![noise(1, 100_000)];
    publish(&store, "base/small:1", &small).unwrap();

    let error = publish(&store, "base/big:1", &[noise(2, 5 << 20)]).unwrap_err();
    assert!(matches!(error, StoreError::NoSpace { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains(store.url()) && text.contains("free space"),
        "{text}"
    );

    assert_eq!(store.list().unwrap().len(), 1);
    assert_eq!(
        fs_err::read_dir(target.join("store/tmp")).unwrap().count(),
        0,
        "temporaries stay behind"
    );
    assert_eq!(read_all(&store, "base/small:1").unwrap(), data_of(&small));

    // Nothing of the failure is in the way once there is space.
    publish(&store, "base/fits:1", &[noise(3, 500_000)]).unwrap();
    assert!(store.verify(&reference("base/fits:1")).unwrap().is_ok());
    mount.unmount().unwrap();
}

/// Fills what is left of a filesystem, to the last byte.
fn fill(path: &std::path::Path) {
    use std::io::Write as _;
    let mut file = fs_err::File::create(path).unwrap();
    let mut size = 1 << 20;
    while size > 0 {
        match file.write(&vec![1; size]) {
            Ok(n) if n > 0 => {}
            _ => size /= 2,
        }
    }
}

/// Garbage is collected where there is no room at all: with the room that is kept for it, and
/// without that with what removing a version frees.
#[test]
fn privileged_a_full_store_is_collected() {
    if !layerpack_fixtures::is_root() {
        layerpack_fixtures::skip!("mounting a small filesystem needs root");
    }
    let scratch = ScratchDir::new("store-full-gc").unwrap();
    for reserved in [true, false] {
        let target = scratch.mkdir(format!("mnt-{reserved}")).unwrap();
        let mount = match MountGuard::tmpfs(8 << 20, &target) {
            Ok(mount) => mount,
            Err(error) => layerpack_fixtures::skip!("tmpfs cannot be mounted: {error}"),
        };
        let dir = target.join("store");
        let store = LayerStore::new(Arc::new(FileStore::new(&dir).unwrap()));
        let files = [noise(1, 100_000)];
        publish(&store, "base/stays:1", &files).unwrap();
        for i in 0..30 {
            publish(&store, &format!("base/goes:{i}"), &[noise(100 + i, 90_000)]).unwrap();
        }
        assert!(dir.join(".reserve").exists(), "room is kept");
        if reserved {
            for i in 0..30 {
                store.remove(&reference(&format!("base/goes:{i}"))).unwrap();
            }
        } else {
            fs_err::remove_file(dir.join(".reserve")).unwrap();
        }
        fill(&target.join("other"));
        if !reserved {
            // Nothing is unused and nothing is free: this much can be told.
            let report = store.collect(crate::collecting::now()).unwrap();
            assert_eq!(report.deleted.objects, 0, "{report:?}");
            fill(&target.join("another"));
            for i in 0..30 {
                store.remove(&reference(&format!("base/goes:{i}"))).unwrap();
            }
        }
        let before = store.blobs().list("").unwrap().len();
        let report = store.collect(crate::collecting::now()).unwrap();
        assert!(
            report.deleted.objects >= 100 && report.problems.is_empty(),
            "{report:?}"
        );
        assert!(store.blobs().list("").unwrap().len() <= before - 100);
        assert!(store.blobs().list("gc/").unwrap().is_empty());
        assert!(store.verify(&reference("base/stays:1")).unwrap().is_ok());
        assert_eq!(read_all(&store, "base/stays:1").unwrap(), data_of(&files));
        assert!(dir.join(".reserve").exists(), "room is kept again");
        publish(&store, "base/after:1", &[noise(7, 100_000)]).unwrap();
        mount.unmount().unwrap();
    }
}

/// Compacting needs room; what it cannot do does not keep it from collecting.
#[test]
fn privileged_a_full_store_is_pruned() {
    if !layerpack_fixtures::is_root() {
        layerpack_fixtures::skip!("mounting a small filesystem needs root");
    }
    let scratch = ScratchDir::new("store-full-prune").unwrap();
    let target = scratch.mkdir("mnt").unwrap();
    let mount = match MountGuard::tmpfs(4 << 20, &target) {
        Ok(mount) => mount,
        Err(error) => layerpack_fixtures::skip!("tmpfs cannot be mounted: {error}"),
    };
    let store = LayerStore::new(Arc::new(FileStore::new(target.join("store")).unwrap()));
    publish(&store, "base/stays:1", &[noise(1, 100_000)]).unwrap();
    publish(&store, "base/goes:1", &[noise(2, 900_000)]).unwrap();
    store.remove(&reference("base/goes:1")).unwrap();
    fill(&target.join("other"));
    let report = store
        .prune(layerpack_store::PruneOptions {
            min_live: 50,
            dry_run: false,
            grace: std::time::Duration::ZERO,
            wait: false,
        })
        .unwrap();
    assert!(report.problems[0].contains("not compacted"), "{report:?}");
    assert!(report.gc.deleted.bytes >= 900_000, "{report:?}");
    assert!(store.verify(&reference("base/stays:1")).unwrap().is_ok());
    mount.unmount().unwrap();
}
