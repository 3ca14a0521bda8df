//! Stores that fail: an error or the right layer, nothing half-published, and a second run that
//! goes through.

use std::path::Path;
use std::sync::Arc;

use layerpack_fixtures::trees::{RandomOptions, random};
use layerpack_fixtures::{MountGuard, ScratchDir, is_root, skip};
use layerpack_packer::{PackDiffOptions, PackError, Silent, Source, build, pack_diff};
use layerpack_store::{Digest, Fault, FaultStore, LayerStore, MemStore, open_url};

use crate::support::{Packed, chain, options};

fn pack(store: &LayerStore, dir: &Path, snapshot: bool) -> Result<Digest, PackError> {
    if snapshot {
        let with = PackDiffOptions::new("diff/f:1".parse().unwrap(), dir.to_owned());
        pack_diff(store, &with, &Silent).map(|report| report.published.unwrap().digest)
    } else {
        let with = options("base/f:1", Source::Dir(dir.to_owned()));
        build(store, &with, &Silent).map(|report| report.published.digest)
    }
}

#[test]
fn every_call_that_fails() {
    let scratch = ScratchDir::new("faults").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    let shape = RandomOptions {
        entries: 30,
        max_file: 100_000,
        ..RandomOptions::new(31)
    };
    random(&dir, &shape).unwrap();
    for snapshot in [false, true] {
        let reference = if snapshot { "diff/f:1" } else { "base/f:1" };
        let reference = reference.parse().unwrap();
        let clean = LayerStore::new(Arc::new(MemStore::new()));
        let expected = pack(&clean, &dir, snapshot).unwrap();
        for fault in Fault::ALL {
            let mut reached = 0;
            for nth in 1.. {
                let inner = Arc::new(MemStore::new());
                let faulty = Arc::new(FaultStore::fail_nth(inner.clone(), nth, fault));
                let result = pack(&LayerStore::new(faulty.clone()), &dir, snapshot);
                let fired = faulty.fired();
                let whole = LayerStore::new(inner);
                match &result {
                    Ok(digest) => assert_eq!(*digest, expected, "{fault:?} {nth}"),
                    Err(error) => assert!(fired, "{fault:?} {nth}: {}", chain(error)),
                }
                // What is published is all there, whatever the caller was told.
                match whole.resolve(&reference) {
                    Ok(digest) => {
                        assert_eq!(digest, expected, "{fault:?} {nth}");
                        Packed::load(&whole, digest, Vec::new()).tree();
                    }
                    Err(_) => assert!(result.is_err(), "{fault:?} {nth}: nothing published"),
                }
                // The next run finds what this one left and goes through.
                assert_eq!(
                    pack(&whole, &dir, snapshot).unwrap(),
                    expected,
                    "{fault:?} {nth}"
                );
                if !fired && faulty.calls() < nth {
                    break;
                }
                reached = nth;
            }
            assert!(reached > 4, "{fault:?}: only {reached} calls");
        }
    }
}

#[test]
fn privileged_a_full_disk_is_one_clear_error() {
    if !is_root() {
        skip!("needs root to mount a small filesystem");
    }
    let scratch = ScratchDir::new("full").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    let noise = layerpack_fixtures::rng::Rng::new(8).bytes(6 << 20);
    fs_err::write(dir.join("noise"), noise).unwrap();
    let small = scratch.mkdir("small").unwrap();
    let _mount = match MountGuard::tmpfs(2 << 20, &small) {
        Ok(mount) => mount,
        Err(error) => skip!("no tmpfs: {error}"),
    };
    let blobs = open_url(&small.join("store").display().to_string()).unwrap();
    let store = LayerStore::new(blobs);
    let message = chain(&pack(&store, &dir, false).unwrap_err());
    assert!(message.contains("no space left"), "{message}");
    assert!(message.contains("small/store"), "{message}");
    assert!(store.list().unwrap().is_empty());
    // Once there is room, the same store takes the layer.
    fs_err::remove_file(dir.join("noise")).unwrap();
    fs_err::write(dir.join("little"), "x").unwrap();
    pack(&store, &dir, false).unwrap();
}

#[test]
fn a_version_is_published_once() {
    let scratch = ScratchDir::new("conflict").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    fs_err::write(dir.join("f"), "one").unwrap();
    let store = LayerStore::new(Arc::new(MemStore::new()));
    let first = pack(&store, &dir, false).unwrap();
    assert_eq!(pack(&store, &dir, false).unwrap(), first);
    fs_err::write(dir.join("f"), "two").unwrap();
    let message = chain(&pack(&store, &dir, false).unwrap_err());
    assert!(
        message.contains("base/f:1") && message.contains(&first.to_string()),
        "{message}"
    );
    assert_eq!(store.resolve(&"base/f:1".parse().unwrap()).unwrap(), first);
}
