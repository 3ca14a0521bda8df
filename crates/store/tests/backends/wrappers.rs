//! Every wrapper passes the contract, and does what it is for.

use std::sync::Arc;
use std::time::Duration;

use layerpack_fixtures::ScratchDir;
use layerpack_store::blob::contract;
use layerpack_store::{
    BlobStore, CachedStore, Digest, Fault, FaultStore, LayerStore, LimitedStore, MemStore,
    MirrorStore, Operation, PutMode, RateLimits, ReadCacheOptions, RetryPolicy, RetryStore, Span,
    StoreError,
};

use crate::layers::{data_of, publish, read_all, sample};
use crate::support::key;

fn memory() -> Arc<dyn BlobStore> {
    Arc::new(MemStore::new())
}

#[test]
fn retries_pass_the_contract() {
    let inner = memory();
    contract::run(&|| Arc::new(RetryStore::new(Arc::clone(&inner), RetryPolicy::default())))
        .unwrap();
}

#[test]
fn limits_pass_the_contract() {
    let inner = memory();
    let limits = RateLimits {
        bytes_per_second: Some(1 << 40),
        requests_per_second: Some(1_000_000),
    };
    contract::run(&|| Arc::new(LimitedStore::new(Arc::clone(&inner), limits))).unwrap();
}

#[test]
fn mirrors_pass_the_contract() {
    let (first, copy) = (memory(), memory());
    contract::run(&|| {
        Arc::new(MirrorStore::new(
            Arc::clone(&first),
            vec![Arc::clone(&copy)],
        ))
    })
    .unwrap();
    assert!(
        copy.list("").unwrap().is_empty(),
        "only the first is written"
    );
}

#[test]
fn a_cache_passes_the_contract() {
    let dir = ScratchDir::new("cache").unwrap();
    let inner = memory();
    contract::run(&|| cached(&inner, &dir, 1 << 30)).unwrap();
}

#[test]
fn mem_addresses_pass_the_contract() {
    contract::run(&|| layerpack_store::open_url("mem://contract").unwrap()).unwrap();
}

fn cached(inner: &Arc<dyn BlobStore>, dir: &ScratchDir, max_bytes: u64) -> Arc<dyn BlobStore> {
    Arc::new(CachedStore::new(
        Arc::clone(inner),
        ReadCacheOptions {
            dir: dir.join("cache"),
            max_bytes,
        },
    ))
}

/// A store whose reads are counted.
fn counted(inner: &Arc<dyn BlobStore>) -> Arc<FaultStore> {
    Arc::new(FaultStore::fail_nth_of(
        Arc::clone(inner),
        Operation::Get,
        u64::MAX,
        Fault::Error,
    ))
}

#[test]
fn a_cache_keeps_what_never_changes() {
    let dir = ScratchDir::new("cache").unwrap();
    let inner = memory();
    let files = sample(1);
    let published = publish(&LayerStore::new(Arc::clone(&inner)), "base/x:1", &files).unwrap();
    let counter = counted(&inner);
    let store = |max| {
        let counted: Arc<dyn BlobStore> = counter.clone();
        LayerStore::new(cached(&counted, &dir, max))
    };
    for round in 0..3 {
        let before = counter.calls();
        assert_eq!(
            read_all(&store(1 << 30), "base/x:1").unwrap(),
            data_of(&files)
        );
        let reads = counter.calls() - before;
        // Marker, reference, locator; at first also metadata and map.
        assert_eq!(reads, if round == 0 { 5 } else { 3 }, "round {round}");
    }
    // References are never kept.
    let reference = key("refs/base/x/_1");
    inner.delete(&reference).unwrap();
    let gone = store(1 << 30).load(&"base/x:1".parse().unwrap());
    assert!(matches!(gone, Err(StoreError::UnknownReference { .. })));

    // A file that rotted, or that something cut off, is read from the store again.
    let manifest = key(&format!("manifests/{}", published.digest.hex()));
    let good = inner.get(&manifest, 1 << 20).unwrap().unwrap();
    store(1 << 30).manifest(&published.digest).unwrap();
    let file = dir.join(format!("cache/manifests-{}", published.digest.hex()));
    let sound = fs_err::read(&file).unwrap();
    let mut rotten = sound.clone();
    *rotten.last_mut().unwrap() ^= 1;
    for bad in [&rotten[..], &sound[..sound.len() - 1], &sound[..10], b""] {
        fs_err::write(&file, bad).unwrap();
        let read = store(1 << 30).blobs().get(&manifest, 1 << 20).unwrap();
        assert_eq!(read.as_ref(), Some(&good));
        assert_eq!(fs_err::read(&file).unwrap(), sound, "it was mended");
    }
}

#[test]
fn a_cache_keeps_nothing_damaged() {
    let dir = ScratchDir::new("cache").unwrap();
    let inner = memory();
    for (family, stored, named) in [
        ("manifests", &b"other"[..], &b"these"[..]),
        ("meta", b"no zstd at all", b"raw"),
        ("maps", b"", b"raw"),
    ] {
        let key = key(&format!("{family}/{}", Digest::of(named).hex()));
        inner.put(&key, stored, PutMode::IfAbsent).unwrap();
        let store = cached(&inner, &dir, 1 << 30);
        assert_eq!(store.get(&key, 99).unwrap().unwrap(), stored);
        inner.put(&key, b"mended", PutMode::Overwrite).unwrap();
        assert_eq!(store.get(&key, 99).unwrap().unwrap(), b"mended");
    }
    assert!(!dir.join("cache").exists());
}

#[test]
fn a_cache_stays_within_its_limit() {
    let dir = ScratchDir::new("cache").unwrap();
    let inner = memory();
    let store = cached(&inner, &dir, 100_000);
    for i in 0..40_u8 {
        let bytes = vec![i; 10_000];
        let key = key(&format!("index/{}", Digest::of(&bytes).hex()));
        inner.put(&key, &bytes, PutMode::IfAbsent).unwrap();
        assert_eq!(store.get(&key, 10_000).unwrap().unwrap(), bytes);
        let held: u64 = fs_err::read_dir(dir.join("cache"))
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().len())
            .sum();
        assert!(held <= 110_000, "{held} bytes after {i}");
    }
}

fn impatient() -> RetryPolicy {
    RetryPolicy {
        attempts: 3,
        first_wait: Duration::from_millis(1),
        ..RetryPolicy::default()
    }
}

/// An answer of the wrong length is asked for again; one that its reader finds wrong twice at most.
#[test]
fn wrong_answers_are_asked_for_again() {
    let bytes = vec![7; 1000];
    for fault in [Fault::Truncate, Fault::Corrupt] {
        let inner = memory();
        inner
            .put(&key("maps/x"), &bytes, PutMode::IfAbsent)
            .unwrap();
        let faulty = Arc::new(FaultStore::fail_nth(inner, 1, fault));
        let store = RetryStore::new(faulty.clone(), impatient());
        let whole = Span::Whole { max_len: 1000 };
        let mut seen = Vec::new();
        let found = store.reread(&key("maps/x"), &whole, &mut |answer, from| {
            assert_eq!(from, store.url());
            seen.push(answer == bytes);
            answer == bytes
        });
        assert!(found.unwrap());
        assert_eq!(seen, [false, true]);

        let mut asked = 0;
        let found = store.reread(&key("maps/x"), &Span::Range(5..9), &mut |answer, _| {
            assert_eq!(answer, &bytes[5..9]);
            asked += 1;
            false
        });
        assert!(!found.unwrap());
        assert_eq!((asked, faulty.calls()), (2, 4));
    }
    let inner = memory();
    inner
        .put(&key("packs/aa/x"), &bytes, PutMode::IfAbsent)
        .unwrap();
    let faulty = Arc::new(FaultStore::fail_nth_of(
        inner,
        Operation::GetRange,
        1,
        Fault::Truncate,
    ));
    let store = RetryStore::new(faulty.clone(), impatient());
    assert_eq!(
        store.get_range(&key("packs/aa/x"), 10..20).unwrap(),
        vec![7; 10]
    );
    assert_eq!(faulty.calls(), 2);
}

/// Faults of one operation alone: the nth counts its own calls.
#[test]
fn faults_of_one_operation() {
    let store = FaultStore::fail_nth_of(memory(), Operation::Put, 2, Fault::Error);
    for i in 1..=3 {
        store.size(&key("a/b")).unwrap();
        let put = store.put(&key(&format!("a/{i}")), b"x", PutMode::IfAbsent);
        assert_eq!(put.is_err(), i == 2);
    }
    assert_eq!((store.calls(), store.fired()), (3, true));

    let store = FaultStore::fail_nth_of(memory(), Operation::Put, 1, Fault::Crash);
    store.size(&key("a/b")).unwrap();
    store.put(&key("a/b"), b"x", PutMode::IfAbsent).unwrap_err();
    store.size(&key("a/b")).unwrap_err();
    store.list("").unwrap_err();
}

#[test]
fn a_request_that_arrives_twice() {
    let inner = memory();
    let store = FaultStore::fail_nth(Arc::clone(&inner), 1, Fault::Duplicate);
    let outcome = store.put(&key("a/b"), b"x", PutMode::IfAbsent).unwrap();
    assert_eq!(outcome, layerpack_store::PutOutcome::Exists);
    assert_eq!(inner.get(&key("a/b"), 9).unwrap().unwrap(), b"x");
}

/// What a cache holds is not what its reader wants when it finds that wrong.
#[test]
fn a_cache_is_passed_over_when_its_answer_is_wrong() {
    let dir = ScratchDir::new("cache").unwrap();
    let inner = memory();
    let bytes = b"{}".to_vec();
    let manifest = key(&format!("manifests/{}", Digest::of(&bytes).hex()));
    inner.put(&manifest, &bytes, PutMode::IfAbsent).unwrap();
    let counter = counted(&inner);
    let shared: Arc<dyn BlobStore> = counter.clone();
    let store = cached(&shared, &dir, 1 << 30);
    store.get(&manifest, 9).unwrap();
    store.get(&manifest, 9).unwrap();
    assert_eq!(counter.calls(), 1);
    let whole = Span::Whole { max_len: 9 };
    let accepted = store.reread(&manifest, &whole, &mut |answer, _| answer == bytes);
    assert!(accepted.unwrap());
    assert_eq!(counter.calls(), 2);
    store.get(&manifest, 9).unwrap();
    assert_eq!(counter.calls(), 2, "it is kept again");
}
