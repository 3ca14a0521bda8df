//! What layers take up and share.

use layerpack_store::query::{shared_with, usage};
use layerpack_store::{Key, Kind, PutMode};

use crate::support::{memory, noise, publish, reference};

#[test]
fn unique_and_shared_bytes_add_up() {
    let (_, store) = memory();
    let (a, b, c) = (noise(1, 50_000), noise(2, 40_000), noise(3, 30_000));
    // The same file twice in one layer counts once.
    publish(&store, "base/one:1", &[a.clone(), b.clone(), a.clone()]).unwrap();
    publish(&store, "base/two:1", &[b.clone(), c.clone()]).unwrap();
    publish(&store, "toolkit/t:1", std::slice::from_ref(&c)).unwrap();
    let usage = usage(&store).unwrap();
    let sizes: Vec<_> = usage
        .layers
        .iter()
        .map(|l| {
            (
                l.reference.to_string(),
                l.all.raw_bytes,
                l.unique.raw_bytes,
                l.all.chunks,
            )
        })
        .collect();
    assert_eq!(
        sizes,
        [
            ("base/one:1".to_owned(), 90_000, 50_000, 2),
            ("base/two:1".to_owned(), 70_000, 0, 2),
            ("toolkit/t:1".to_owned(), 30_000, 0, 1),
        ]
    );
    assert_eq!(usage.total.raw_bytes, 120_000);
    // Noise does not compress: stored is about raw.
    assert!(
        usage.total.stored_bytes.abs_diff(120_000) < 2_000,
        "{usage:?}"
    );
    assert!(usage.layers.iter().all(|l| l.metadata_bytes > 100));
    let kinds: Vec<_> = usage
        .kinds
        .iter()
        .map(|k| (k.kind, k.layers, k.all.raw_bytes, k.unique.raw_bytes))
        .collect();
    assert_eq!(
        kinds,
        [
            (Kind::Base, 2, 120_000, 90_000),
            (Kind::Toolkit, 1, 30_000, 0)
        ]
    );

    let name = reference("base/two:1");
    let (_, manifest) = store.load(&name).unwrap();
    let (all, shared) = shared_with(&store, &name, &manifest).unwrap();
    assert_eq!(all.raw_bytes, 70_000);
    let shared: Vec<_> = shared
        .iter()
        .map(|s| (s.reference.to_string(), s.amount.chunks, s.amount.raw_bytes))
        .collect();
    assert_eq!(
        shared,
        [
            ("base/one:1".to_owned(), 1, 40_000),
            ("toolkit/t:1".to_owned(), 1, 30_000)
        ]
    );
}

#[test]
fn damaged_layers_do_not_hide_the_others() {
    let (blobs, store) = memory();
    publish(&store, "base/a:1", &[noise(1, 1000)]).unwrap();
    publish(&store, "base/b:1", &[noise(2, 1000)]).unwrap();
    let (_, manifest) = store.load(&reference("base/a:1")).unwrap();
    blobs
        .put(&Key::map(&manifest.map.digest), b"x", PutMode::Overwrite)
        .unwrap();
    let usage = usage(&store).unwrap();
    assert_eq!(usage.layers.len(), 1);
    assert_eq!(usage.unreadable.len(), 1);
    let name = reference("base/b:1");
    let (_, manifest) = store.load(&name).unwrap();
    assert!(shared_with(&store, &name, &manifest).unwrap().1.is_empty());
}
