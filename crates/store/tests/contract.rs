//! Every backend and wrapper against the one contract suite.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::sync::Arc;

use layerpack_store::blob::contract;
use layerpack_store::{BlobStore, Fault, FaultStore, FileStore, MemStore};

#[test]
fn memory() {
    let store = MemStore::new();
    contract::run(&|| Arc::new(store.clone())).unwrap();
}

#[test]
fn file() {
    let dir = tempfile::tempdir().unwrap();
    // Not there yet, and more than one level down.
    let root = dir.path().join("some/where/store");
    contract::run(&|| Arc::new(FileStore::new(&root).unwrap())).unwrap();
    assert_eq!(
        fs_err::read_dir(root.join("tmp")).unwrap().count(),
        0,
        "temporaries stay behind"
    );
}

/// A wrapper whose fault never fires is the store itself.
#[test]
fn fault_wrapper() {
    for fault in Fault::ALL {
        let inner: Arc<dyn BlobStore> = Arc::new(MemStore::new());
        contract::run(&|| Arc::new(FaultStore::fail_nth(Arc::clone(&inner), u64::MAX, fault)))
            .unwrap();
    }
}

/// The suite itself finds each kind of fault: it is no test that cannot fail.
#[test]
fn suite_notices_faults() {
    for fault in Fault::ALL {
        let mut noticed = 0;
        for nth in 1..=20 {
            let inner: Arc<dyn BlobStore> = Arc::new(MemStore::new());
            let store = Arc::new(FaultStore::fail_nth(inner, nth, fault));
            let result = contract::run(&|| Arc::clone(&store) as Arc<dyn BlobStore>);
            if store.fired() && result.is_err() {
                noticed += 1;
            }
        }
        // Slow is not wrong.
        assert_eq!(
            noticed > 0,
            fault != Fault::Delay,
            "{fault:?} noticed {noticed} times"
        );
    }
}
