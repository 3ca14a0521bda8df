//! Writers that publish one version at once, where the store does not decide between them.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Barrier};

use layerpack_fixtures::servers::{S3Behaviour, S3Server};
use layerpack_store::{
    BlobStore, BlobWriter, Digest, Fault, FaultStore, Key, LayerStore, MemStore, ObjectInfo,
    PublishOutcome, PutMode, PutOutcome, Result, StoreError,
};

use crate::layers::{data_of, publish, read_all, sample};
use crate::support::bucket;

/// A store that has no notion of "if absent", and takes its time for everything.
#[derive(Debug)]
struct Careless(MemStore);

impl Careless {
    fn dawdle() {
        std::thread::sleep(std::time::Duration::from_micros(fastrand::u64(..300)));
    }
}

impl BlobStore for Careless {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        Self::dawdle();
        self.0.get(key, max_len)
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        self.0.get_range(key, range)
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        Self::dawdle();
        if mode == PutMode::IfAbsent && self.0.size(key)?.is_some() {
            return Ok(PutOutcome::Exists);
        }
        Self::dawdle(); // here another writer may come
        self.0.put(key, bytes, PutMode::Overwrite)
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        self.0.put_stream()
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        Self::dawdle();
        self.0.size(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        Self::dawdle();
        self.0.list(prefix)
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        Self::dawdle();
        self.0.delete(key)
    }

    fn url(&self) -> String {
        "careless:".to_owned()
    }
}

/// `writers` bring one version at once, some of them the same content.
fn race(opened: &(dyn Fn() -> Arc<dyn BlobStore> + Sync), writers: u64, name: &str) {
    let barrier = Barrier::new(usize::try_from(writers).unwrap());
    let results: Vec<Result<(Digest, PublishOutcome)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..writers)
            .map(|i| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let store = LayerStore::new(opened());
                    barrier.wait();
                    let done = publish(&store, name, &sample(i / 2 * 100))?;
                    // What a writer was told is so from then on.
                    let now = store.load(&done.reference)?.0;
                    assert_eq!(now, done.digest);
                    Ok((done.digest, done.outcome))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let store = LayerStore::new(opened());
    let (winner, _) = store.load(&name.parse().unwrap()).unwrap();
    let mut told = HashSet::new();
    for result in results {
        match result {
            Ok((digest, _)) => {
                told.insert(digest);
            }
            Err(StoreError::Conflict { existing, new, .. }) => {
                assert_eq!(existing, winner);
                assert_ne!(new, winner);
            }
            Err(other) => panic!("neither success nor conflict: {other:?}"),
        }
    }
    assert_eq!(told, HashSet::from([winner]), "one content was published");
    let report = store.verify(&name.parse().unwrap()).unwrap();
    assert!(report.is_ok(), "{:?}", report.damaged);
    let read = read_all(&store, name).unwrap();
    assert!((0..writers).any(|i| read == data_of(&sample(i / 2 * 100))));
    assert!(store.blobs().list("claims/").unwrap().is_empty());
}

#[test]
fn one_of_many_writers_wins() {
    for round in 0..25 {
        let inner = MemStore::new();
        race(
            &|| Arc::new(Careless(inner.clone())),
            6,
            &format!("base/x:{round}"),
        );
    }
}

#[test]
fn one_of_many_writers_wins_in_a_bucket_that_ignores_conditions() {
    let server = S3Server::start(S3Behaviour {
        ignores_conditions: true,
        ..S3Behaviour::default()
    })
    .unwrap();
    for round in 0..4 {
        race(&|| bucket(&server, "store"), 4, &format!("base/x:{round}"));
    }
}

/// A writer that dies at any call keeps nobody from publishing once its claim is stale; until then
/// the others are told, or the version is there.
#[test]
fn a_dead_writer_never_makes_two_winners() {
    for nth in 1.. {
        let inner = MemStore::new();
        let careless: Arc<dyn BlobStore> = Arc::new(Careless(inner.clone()));
        let dying = Arc::new(FaultStore::fail_nth(
            Arc::clone(&careless),
            nth,
            Fault::Crash,
        ));
        let first = publish(
            &LayerStore::new(dying.clone() as Arc<dyn BlobStore>),
            "base/x:1",
            &sample(1),
        );
        // The same content again is never held up by the dead writer's claim.
        let store = LayerStore::new(Arc::clone(&careless));
        let second = publish(&store, "base/x:1", &sample(1)).unwrap();
        if let Ok(first) = first {
            assert_eq!(first.digest, second.digest);
        }
        let error = publish(&store, "base/x:1", &sample(2)).unwrap_err();
        assert!(matches!(error, StoreError::Conflict { .. }), "{error:?}");
        if !dying.fired() {
            break;
        }
        assert!(nth < 500, "no end");
    }
}
