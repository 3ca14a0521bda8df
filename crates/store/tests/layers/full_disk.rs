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
