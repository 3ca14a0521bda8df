//! Ten builders and collectors at once, threads and processes: every published layer is whole.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use layerpack_fixtures::ChildGuard;
use layerpack_store::{FileStore, GcOptions, LayerStore, PruneOptions, StoreError};

use crate::support::{data_of, noise, publish, read_all, reference, text};

const STORE: &str = "LAYERPACK_STORE_TEST_BUILDERS";
/// Seconds to run; minutes in a full test.
const SECONDS: &str = "LAYERPACK_STORE_TEST_SECONDS";
const NAMES: u64 = 6;

fn open(root: &std::path::Path) -> LayerStore {
    LayerStore::new(Arc::new(FileStore::new(root).unwrap()))
}

/// Few names and contents, so that builders meet each other's chunks, and garbage comes back.
fn files(content: u64) -> Vec<Vec<u8>> {
    vec![
        noise(content % 3, 66_000),
        text(content, 20_000),
        noise(content + 50, 9000),
    ]
}

fn name(content: u64) -> String {
    format!("base/n{content}:1")
}

/// Publishes and removes, and reads what it published, until it is told to end.
fn build(store: &LayerStore, seed: u64, end: &dyn Fn() -> bool) -> u64 {
    let mut state = seed;
    let mut built = 0;
    while !end() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let content = (state >> 33) % NAMES;
        match publish(store, &name(content), &files(content)) {
            Ok(_) => built += 1,
            // Removed by another between two looks, or held up by a collector: run again.
            Err(StoreError::Missing { key, .. }) if key.starts_with("refs/") => {}
            Err(StoreError::Collecting { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
        if (state >> 50).is_multiple_of(3) {
            match store.remove(&reference(&name(content))) {
                Ok(()) | Err(StoreError::UnknownReference { .. } | StoreError::NoStore { .. }) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
    }
    built
}

/// Does nothing unless the test below started it.
#[test]
fn builder_process() {
    let Some(root) = std::env::var_os(STORE) else {
        return;
    };
    build(&open(root.as_ref()), std::process::id().into(), &|| false);
}

#[test]
fn ten_builders_and_collectors() {
    let seconds = std::env::var(SECONDS).map_or(2, |text| text.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let children: Vec<ChildGuard> = (0..3)
        .map(|_| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command
                .args(["--exact", "builders::builder_process", "--nocapture"])
                .env(STORE, &root)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            ChildGuard::spawn(&mut command).unwrap()
        })
        .collect();
    let over = AtomicBool::new(false);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let builders: Vec<_> = (0..7)
            .map(|seed| {
                let (over, root) = (&over, &root);
                scope.spawn(move || build(&open(root), seed, &|| over.load(Ordering::Relaxed)))
            })
            .collect();
        let collector = scope.spawn(|| {
            let store = open(&root);
            let (mut deleted, mut rounds) = (0, 0);
            // Until something was collected, however slow the machine is.
            while begun.elapsed() < Duration::from_secs(seconds)
                || (deleted == 0 && begun.elapsed() < Duration::from_secs(60))
            {
                let grace = Duration::from_millis(30);
                let report = if rounds % 4 == 3 {
                    let options = PruneOptions {
                        min_live: 90,
                        dry_run: false,
                        grace,
                        wait: false,
                    };
                    store.prune(options).map(|report| report.gc)
                } else {
                    store.collect(GcOptions {
                        grace,
                        dry_run: false,
                        wait: false,
                    })
                };
                let report = report.unwrap();
                // What others remove or write under its hands is no damage.
                deleted += report.deleted.objects;
                rounds += 1;
                std::thread::sleep(Duration::from_millis(20));
            }
            deleted
        });
        let deleted = collector.join();
        over.store(true, Ordering::Relaxed);
        let built: u64 = builders.into_iter().map(|b| b.join().unwrap()).sum();
        assert!(built > 0);
        assert!(deleted.unwrap() > 0, "nothing was collected");
    });
    drop(children); // killed in the middle of their work
    let store = open(&root);
    let mut whole = 0;
    for content in 0..NAMES {
        if store.has_reference(&reference(&name(content))).unwrap() {
            let report = store.verify(&reference(&name(content))).unwrap();
            assert!(report.is_ok(), "{:?}", report.damaged);
            assert!(read_all(&store, &name(content)).unwrap() == data_of(&files(content)));
            whole += 1;
        }
    }
    let audit = store.audit(true).unwrap();
    assert!(audit.damaged.is_empty(), "{:?}", audit.damaged);
    for content in 0..NAMES {
        publish(&store, &name(content), &files(content)).unwrap();
    }
    assert!(whole <= NAMES);
}
