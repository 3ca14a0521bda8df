//! What killed writers of this machine leave: it is not waited for, and it is removed.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use layerpack_fixtures::ChildGuard;
use layerpack_store::{FileStore, GcOptions, LayerStore, PutMode, Reason};

use crate::collecting::now;
use crate::support::{add, noise, options, publish, read_all, reference};

const DIR: &str = "LAYERPACK_TEST_ABANDONED_DIR";

fn open(dir: &Path) -> LayerStore {
    LayerStore::new(Arc::new(FileStore::new(dir).unwrap()))
}

/// A process of its own: a writer that never comes to its end.
#[test]
#[ignore = "a child process of another test"]
fn child_that_writes_for_ever() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let store = open(Path::new(&dir));
    let mut writer = store.writer(options()).unwrap();
    add(&mut writer, &[noise(1, 300_000), noise(2, 300_000)]).unwrap();
    let mut stream = store.blobs().put_stream().unwrap();
    stream.write(&noise(3, 100_000)).unwrap();
    eprintln!("\nat work");
    std::thread::sleep(Duration::from_secs(600));
}

fn writer(dir: &Path) -> ChildGuard {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--ignored", "--exact", "--nocapture"])
        .arg("abandoned::child_that_writes_for_ever")
        .env(DIR, dir)
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = ChildGuard::spawn(&mut command).unwrap();
    let lines = BufReader::new(child.child().stderr.take().unwrap()).lines();
    assert!(
        lines.map_while(Result::ok).any(|line| line == "at work"),
        "the child ended"
    );
    child
}

#[test]
fn killed_writers_hold_up_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let files = [noise(9, 70_000)];
    publish(&store, "base/stays:1", &files).unwrap();
    publish(&store, "base/goes:1", &[noise(8, 70_000)]).unwrap();
    store.remove(&reference("base/goes:1")).unwrap();
    let mut children: Vec<ChildGuard> = (0..3).map(|_| writer(dir.path())).collect();

    // At work: each is waited for, once, whatever the number of lists.
    let waiting = store.collect(now()).unwrap();
    assert_eq!(waiting.deleted.objects, 0, "{waiting:?}");
    assert_eq!(waiting.waiting.len(), 1, "{waiting:?}");
    store
        .blobs()
        .put(
            &layerpack_store::Key::manifest(&layerpack_store::Digest::of(b"x")),
            b"x",
            PutMode::IfAbsent,
        )
        .unwrap();
    let waiting = store.collect(now()).unwrap();
    assert_eq!(waiting.waiting.len(), 1, "{waiting:?}");
    assert_eq!(waiting.waiting[0].lists.len(), 2, "{waiting:?}");
    assert!(
        waiting.waiting[0].why.contains("began before them"),
        "{waiting:?}"
    );
    assert!(waiting.kept[&Reason::Waiting].objects >= 4, "{waiting:?}");
    assert!(!waiting.kept.contains_key(&Reason::Grace), "{waiting:?}");
    assert!(waiting.temporaries.files >= 3, "{waiting:?}");
    assert!(waiting.temporaries.oldest.is_some());
    assert_eq!(waiting.temporaries.removed_files, 0);

    for child in &mut children {
        child.child().kill().unwrap();
        child.child().wait().unwrap();
    }
    let dry = store
        .collect(GcOptions {
            dry_run: true,
            ..now()
        })
        .unwrap();
    assert!(dry.temporaries.bytes >= 300_000, "{dry:?}");
    let report = store.collect(now()).unwrap();
    assert!(report.waiting.is_empty(), "{report:?}");
    assert!(report.deleted.objects >= 5, "{report:?}");
    assert_eq!(report.temporaries.removed_bytes, dry.temporaries.bytes);
    assert_eq!(report.temporaries.files, 0);
    assert!(store.blobs().list("leases/").unwrap().is_empty());
    assert!(store.blobs().list("gc/").unwrap().is_empty());
    assert_eq!(fs_err::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
    assert_eq!(read_all(&store, "base/stays:1").unwrap().len(), 73_728);
}

/// What waits for its grace period is told from what waits for a writer.
#[test]
fn grace_is_not_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    publish(&store, "base/goes:1", &[noise(8, 70_000)]).unwrap();
    store.remove(&reference("base/goes:1")).unwrap();
    let hour = GcOptions {
        grace: Duration::from_secs(3600),
        ..now()
    };
    store.collect(hour).unwrap();
    let report = store.collect(hour).unwrap();
    assert!(report.kept[&Reason::Grace].objects >= 5, "{report:?}");
    assert!(!report.kept.contains_key(&Reason::Waiting), "{report:?}");
    assert!(
        report.waiting[0].why.starts_with("its grace period"),
        "{report:?}"
    );
}
