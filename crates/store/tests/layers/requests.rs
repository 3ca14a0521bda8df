//! What a writer asks of a store besides its data.

use std::sync::Arc;

use layerpack_store::{BlobStore, Fault, FaultStore, LayerStore, MemStore, Operation};

use crate::support::{noise, options, publish};

/// A store whose calls are counted, by operation.
struct Counted {
    layers: Vec<(Operation, Arc<FaultStore>)>,
    store: Arc<dyn BlobStore>,
}

impl Counted {
    fn new(inner: Arc<dyn BlobStore>) -> Self {
        let mut store = inner;
        let mut layers = Vec::new();
        for operation in Operation::ALL {
            let counting = FaultStore::fail_nth_of(store, operation, u64::MAX, Fault::Error);
            let counting = Arc::new(counting);
            layers.push((operation, Arc::clone(&counting)));
            store = counting;
        }
        Self { layers, store }
    }

    fn calls(&self) -> Vec<(Operation, u64)> {
        let counts = self.layers.iter().map(|(o, layer)| (*o, layer.calls()));
        counts.filter(|(_, calls)| *calls > 0).collect()
    }
}

/// Beginning to write is four requests at a store that this machine has written to: the session, the
/// condemned lists, the index's list, and the marker. Giving it up is one.
#[test]
fn a_session_is_few_requests() {
    let inner: Arc<dyn BlobStore> = Arc::new(MemStore::new());
    let cache = tempfile::tempdir().unwrap();
    let layers = LayerStore::new(Arc::clone(&inner)).with_index_cache(cache.path());
    for i in 0..5 {
        publish(&layers, &format!("base/a:{i}"), &[noise(i, 70_000)]).unwrap();
    }
    drop(layers.writer(options()).unwrap()); // the index is here now
    let counted = Counted::new(Arc::clone(&inner));
    let store = LayerStore::new(Arc::clone(&counted.store)).with_index_cache(cache.path());
    let writer = store.writer(options()).unwrap();
    let sum = |calls: Vec<(Operation, u64)>| calls.iter().map(|(_, n)| n).sum::<u64>();
    let opened = counted.calls();
    assert!(opened.contains(&(Operation::Put, 1)), "{opened:?}");
    assert!(opened.contains(&(Operation::List, 2)), "{opened:?}");
    assert!(sum(opened.clone()) <= 4, "{opened:?}");
    drop(writer);
    let closed = counted.calls();
    assert!(closed.contains(&(Operation::Delete, 1)), "{closed:?}");
    assert_eq!(sum(closed), sum(opened) + 1);
}
