//! Several writers at once, in threads and in processes, and writers that are killed.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use layerpack_fixtures::ChildGuard;
use layerpack_store::{FileStore, LayerStore, PublishOutcome, StoreError};

use crate::support::{data_of, noise, publish, read_all, reference, sample, text};

const STORE: &str = "LAYERPACK_STORE_TEST_DIRECTORY";
const SEED: &str = "LAYERPACK_STORE_TEST_SEED";
const LOOP: &str = "LAYERPACK_STORE_TEST_LOOP";

fn open(root: &std::path::Path) -> LayerStore {
    LayerStore::new(Arc::new(FileStore::new(root).unwrap()))
}

/// One line per publication: what a process saw. Does nothing unless a test below started it.
#[test]
fn child_process() {
    let Some(root) = std::env::var_os(STORE) else {
        return;
    };
    let store = open(root.as_ref());
    if std::env::var_os(LOOP).is_some() {
        for i in 0.. {
            publish(
                &store,
                &format!("base/n{i}:1"),
                &[noise(i, 80_000), text(i, 3000)],
            )
            .unwrap();
        }
    }
    let seed: u64 = std::env::var(SEED).unwrap().parse().unwrap();
    match publish(&store, "base/x:1", &sample(seed)) {
        Ok(published) => eprintln!("published {:?} {}", published.outcome, published.digest),
        Err(StoreError::Conflict { existing, .. }) => eprintln!("conflict {existing}"),
        Err(other) => panic!("{other:?}"),
    }
}

fn child(root: &std::path::Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "writers::child_process", "--nocapture"])
        .env(STORE, root);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

#[test]
fn threads_with_other_content_conflict() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..4 {
        let root = dir.path().join(round.to_string());
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|i| {
                    let root = &root;
                    scope.spawn(move || publish(&open(root), "base/x:1", &sample(i * 10)))
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let winners: Vec<_> = results
            .iter()
            .enumerate()
            .filter(|(_, r)| r.is_ok())
            .collect();
        assert_eq!(winners.len(), 1, "{results:?}");
        let (winner, published) = (winners[0].0 as u64, winners[0].1.as_ref().unwrap());
        for result in &results {
            match result {
                Ok(_) => {}
                Err(StoreError::Conflict { existing, new, .. }) => {
                    assert_eq!(*existing, published.digest);
                    assert_ne!(*new, published.digest);
                }
                Err(other) => panic!("{other:?}"),
            }
        }
        let store = open(&root);
        assert_eq!(
            read_all(&store, "base/x:1").unwrap(),
            data_of(&sample(winner * 10))
        );
        assert!(store.verify(&reference("base/x:1")).unwrap().is_ok());
        assert!(store.verify_index().unwrap().is_empty());
    }
}

#[test]
fn threads_with_the_same_content_agree() {
    let dir = tempfile::tempdir().unwrap();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    publish(&open(dir.path()), "base/x:1", &sample(1))
                        .unwrap()
                        .outcome
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(
        outcomes
            .iter()
            .filter(|o| **o == PublishOutcome::Created)
            .count(),
        1,
        "{outcomes:?}"
    );
    assert!(
        open(dir.path())
            .verify(&reference("base/x:1"))
            .unwrap()
            .is_ok()
    );
}

#[test]
fn processes_conflict() {
    let dir = tempfile::tempdir().unwrap();
    let children: Vec<_> = (0..3)
        .map(|i| {
            child(dir.path())
                .env(SEED, (i * 10).to_string())
                .spawn()
                .unwrap()
        })
        .collect();
    let outputs: Vec<String> = children
        .into_iter()
        .map(|child| {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success());
            String::from_utf8_lossy(&output.stderr).into_owned()
        })
        .collect();
    let created = outputs
        .iter()
        .filter(|o| o.contains("published Created"))
        .count();
    let conflicts = outputs
        .iter()
        .filter(|o| o.contains("conflict b3:"))
        .count();
    assert_eq!((created, conflicts), (1, 2), "{outputs:?}");
    let store = open(dir.path());
    let digest = store.resolve(&reference("base/x:1")).unwrap().to_string();
    assert!(outputs.iter().all(|o| o.contains(&digest)), "{outputs:?}");
    assert!(store.verify(&reference("base/x:1")).unwrap().is_ok());
}

/// Killed at many points: what is listed is whole, and the store can be written to again.
#[test]
fn killed_writers_leave_nothing_half_published() {
    let dir = tempfile::tempdir().unwrap();
    let mut published = 0;
    // More rounds, and longer ones, where the machine is too busy for the first to come anywhere.
    for round in 0..100_u64 {
        if round >= 12 && published > 0 {
            break;
        }
        let mut child =
            ChildGuard::spawn(child(dir.path()).env(LOOP, "1").stderr(Stdio::null())).unwrap();
        std::thread::sleep(Duration::from_millis(40 + 17 * round));
        child.child().kill().unwrap();
        child.child().wait().unwrap();
        let store = open(dir.path());
        for (reference, _) in store.list().unwrap() {
            let report = store.verify(&reference).unwrap();
            assert!(
                report.is_ok(),
                "round {round}: {reference}: {:?}",
                report.damaged
            );
        }
        assert!(store.verify_index().unwrap().is_empty());
        published = store.list().unwrap().len();
    }
    assert!(published > 0, "no child came as far as publishing");
    publish(&open(dir.path()), "base/after:1", &sample(1)).unwrap();
}

#[test]
fn stale_temporaries_are_swept() {
    let dir = tempfile::tempdir().unwrap();
    let temporaries = dir.path().join("tmp");
    fs_err::create_dir_all(&temporaries).unwrap();
    for (name, hours) in [("1-old", 25), ("2-young", 23), ("3-future", -30)] {
        let path = temporaries.join(name);
        fs_err::write(&path, b"left over").unwrap();
        let now = std::time::SystemTime::now();
        let shift = Duration::from_secs(3600 * i64::unsigned_abs(hours));
        let time = if hours > 0 { now - shift } else { now + shift };
        fs_err::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .file()
            .set_modified(time)
            .unwrap();
    }
    publish(&open(dir.path()), "base/x:1", &sample(1)).unwrap();
    let mut left: Vec<_> = fs_err::read_dir(&temporaries)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["2-young", "3-future"]);
}
