//! What a crash may leave of a directory store. Every system call that changes the store is recorded;
//! for a crash after each of them, several states that a filesystem may come up with are made and
//! looked at: all was written; nothing but what was synced; names without the data that they were
//! given before it was synced; any part of the names, in any order of the directories.
//!
//! In each state every version that was published before, and that nobody removed, is there and
//! whole; every visible version is whole; collecting garbage and building go on.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fs_err as fs;

use super::disk::{Disk, System};
use super::{FileStore, MemStore, PutOutcome};
use crate::format::map::{Extent, MapBuilder};
use crate::gc::{GcOptions, PruneOptions};
use crate::layer::{Draft, LayerStore, WriterOptions};
use crate::reference::Reference;
use crate::transfer::{TransferOptions, transfer};

#[derive(Debug, Clone)]
enum Call {
    Mkdir(PathBuf),
    /// A new file, by a number of its own.
    Create(PathBuf, usize),
    Write(usize, Vec<u8>),
    SyncFile(usize),
    SyncDir(PathBuf),
    Link(PathBuf, PathBuf),
    Rename(PathBuf, PathBuf),
    Unlink(PathBuf),
    /// Not a call: this version was published, or is about to be removed.
    Published(String),
    Removing(String),
}

/// Does what it is told and writes it down.
#[derive(Debug, Default)]
struct Recorder {
    log: Mutex<(Vec<Call>, BTreeMap<i32, usize>, usize)>,
}

impl Recorder {
    fn note(&self, call: Call) {
        self.log.lock().unwrap().0.push(call);
    }

    fn number(&self, file: &fs::File) -> usize {
        self.log.lock().unwrap().1[&file.file().as_raw_fd()]
    }

    fn calls(&self) -> Vec<Call> {
        self.log.lock().unwrap().0.clone()
    }
}

impl Disk for Recorder {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        System.create_dir(path)?;
        self.note(Call::Mkdir(path.to_owned()));
        Ok(())
    }
    fn create_new(&self, path: &Path) -> io::Result<fs::File> {
        let file = System.create_new(path)?;
        let mut log = self.log.lock().unwrap();
        log.2 += 1;
        let number = log.2;
        log.1.insert(file.file().as_raw_fd(), number);
        log.0.push(Call::Create(path.to_owned(), number));
        Ok(file)
    }
    fn write(&self, file: &mut fs::File, bytes: &[u8]) -> io::Result<()> {
        System.write(file, bytes)?;
        self.note(Call::Write(self.number(file), bytes.to_vec()));
        Ok(())
    }
    fn sync_file(&self, file: &fs::File) -> io::Result<()> {
        self.note(Call::SyncFile(self.number(file)));
        Ok(())
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.note(Call::SyncDir(path.to_owned()));
        Ok(())
    }
    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        System.hard_link(from, to)?;
        self.note(Call::Link(from.to_owned(), to.to_owned()));
        Ok(())
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        System.rename(from, to)?;
        self.note(Call::Rename(from.to_owned(), to.to_owned()));
        Ok(())
    }
    fn rename_if_absent(&self, _: &Path, _: &Path, e: io::Error) -> io::Result<PutOutcome> {
        Err(e) // the filesystem of this test has hard links
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        System.remove_file(path)?;
        self.note(Call::Unlink(path.to_owned()));
        Ok(())
    }
}

/// What a name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Node {
    Directory,
    File(usize),
}

/// The filesystem after some calls: what is certain, and what may be.
#[derive(Debug, Default, Clone)]
struct Model {
    /// Names that were synced.
    durable: BTreeMap<PathBuf, Node>,
    /// Names as they are.
    current: BTreeMap<PathBuf, Node>,
    /// Changes of names that were not synced yet, in order.
    pending: Vec<(PathBuf, Option<Node>)>,
    /// Bytes of each file, and how many of them were synced.
    files: BTreeMap<usize, (Vec<u8>, usize)>,
}

impl Model {
    fn set(&mut self, path: &Path, node: Option<Node>) {
        match &node {
            Some(node) => self.current.insert(path.to_owned(), node.clone()),
            None => self.current.remove(path),
        };
        self.pending.push((path.to_owned(), node));
    }

    fn apply(&mut self, call: &Call) {
        match call {
            Call::Mkdir(path) => self.set(path, Some(Node::Directory)),
            Call::Create(path, number) => {
                self.files.insert(*number, (Vec::new(), 0));
                self.set(path, Some(Node::File(*number)));
            }
            Call::Write(number, bytes) => {
                self.files
                    .get_mut(number)
                    .unwrap()
                    .0
                    .extend_from_slice(bytes);
            }
            Call::SyncFile(number) => {
                let file = self.files.get_mut(number).unwrap();
                file.1 = file.0.len();
            }
            Call::SyncDir(dir) => {
                for (path, node) in std::mem::take(&mut self.pending) {
                    if path.parent() == Some(dir) {
                        change(&mut self.durable, &path, node);
                    } else {
                        self.pending.push((path, node));
                    }
                }
            }
            Call::Link(from, to) => {
                let node = self.current[from].clone();
                self.set(to, Some(node));
            }
            Call::Rename(from, to) => {
                let node = self.current[from].clone();
                self.set(to, Some(node));
                self.set(from, None);
            }
            Call::Unlink(path) => self.set(path, None),
            Call::Published(_) | Call::Removing(_) => {}
        }
    }

    /// Makes one of the possible states in `root`: which pending names came through, and whether
    /// bytes that were not synced did.
    fn make(&self, store: &Path, root: &Path, mut through: impl FnMut(usize) -> bool, data: Data) {
        let mut names = self.durable.clone();
        for (at, (path, node)) in self.pending.iter().enumerate() {
            if through(at) {
                change(&mut names, path, node.clone());
            }
        }
        fs::create_dir_all(root).unwrap();
        for (path, node) in &names {
            let place = root.join(path.strip_prefix(store).unwrap());
            // In the order of the names a directory comes before what is in it; what is in one
            // that was lost is lost.
            if !place.parent().unwrap().is_dir() {
                continue;
            }
            match node {
                Node::Directory => {
                    let _ = fs::create_dir(&place);
                }
                Node::File(number) => {
                    let (bytes, synced) = &self.files[number];
                    let bytes = match data {
                        Data::Whole => bytes.clone(),
                        Data::Cut => bytes[..*synced].to_vec(),
                        Data::Zeros => {
                            let mut zeros = vec![0; bytes.len()];
                            zeros[..*synced].copy_from_slice(&bytes[..*synced]);
                            zeros
                        }
                    };
                    fs::write(&place, bytes).unwrap();
                }
            }
        }
    }
}

fn change(names: &mut BTreeMap<PathBuf, Node>, path: &Path, node: Option<Node>) {
    match node {
        Some(node) => names.insert(path.to_owned(), node),
        None => names.remove(path),
    };
}

/// Which of the pending names came through.
type Through = Box<dyn FnMut(usize) -> bool>;

/// What became of bytes that were not synced.
#[derive(Debug, Clone, Copy)]
enum Data {
    Whole,
    Cut,
    Zeros,
}

fn publish(store: &LayerStore, name: &str, seed: u8) -> crate::error::Result<()> {
    let options = WriterOptions {
        level: 1,
        jobs: 1,
        ..WriterOptions::default()
    };
    let mut writer = store.writer(options)?;
    let mut builder = MapBuilder::new(8192);
    let pieces = [
        vec![seed; 3000],
        (0..=255).cycle().take(2000).map(|i| i ^ seed).collect(),
    ];
    for (piece, data_offset) in pieces.iter().zip([0, 4096]) {
        let digest = writer.add_chunk(piece)?;
        builder.push(Extent {
            data_offset,
            len: u32::try_from(piece.len()).unwrap(),
            digest,
        });
    }
    let reference: Reference = name.parse().unwrap();
    let draft = Draft::new(reference, vec![seed; 100], builder.build().unwrap());
    writer.finish(draft).map(|_| ())
}

const NOW: GcOptions = GcOptions {
    grace: Duration::ZERO,
    dry_run: false,
    wait: false,
};

/// Records `work`, then looks at the states after each of its calls.
fn crash_everywhere(work: impl Fn(&LayerStore, &Recorder)) {
    let fast = Path::new("/dev/shm");
    let scratch = if fast.is_dir() {
        tempfile::tempdir_in(fast).unwrap()
    } else {
        tempfile::tempdir().unwrap()
    };
    let store = scratch.path().join("store");
    let recorder = Arc::new(Recorder::default());
    let disk: Arc<dyn Disk> = Arc::clone(&recorder) as _;
    let blobs = Arc::new(FileStore::on(store.clone(), disk).unwrap());
    work(&LayerStore::new(blobs), &recorder);
    let calls = recorder.calls();
    assert!(calls.len() > 60, "{} calls", calls.len());

    let mut model = Model::default();
    let mut expected: BTreeSet<String> = BTreeSet::new();
    let mut state = 7_u64;
    let mut states = 0;
    for (at, call) in std::iter::once(None)
        .chain(calls.iter().map(Some))
        .enumerate()
    {
        match call {
            Some(Call::Published(name)) => {
                expected.insert(name.clone());
            }
            Some(Call::Removing(name)) => {
                expected.remove(name);
            }
            Some(call) => model.apply(call),
            None => {}
        }
        let mut variants: Vec<(Through, Data)> = vec![
            (Box::new(|_| true), Data::Whole),
            (Box::new(|_| true), Data::Cut),
            (Box::new(|_| true), Data::Zeros),
            (Box::new(|_| false), Data::Cut),
        ];
        for data in [Data::Whole, Data::Cut, Data::Zeros] {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let bits = state >> 20;
            variants.push((Box::new(move |i| bits >> (i % 40) & 1 == 1), data));
        }
        // The last name alone, and all but the last.
        let last = model.pending.len().saturating_sub(1);
        variants.push((Box::new(move |i| i == last), Data::Cut));
        variants.push((Box::new(move |i| i != last), Data::Cut));
        for (number, (through, data)) in variants.into_iter().enumerate() {
            let root = scratch.path().join(format!("{at}-{number}"));
            model.make(&store, &root, through, data);
            check(
                &root,
                &expected,
                &format!("after call {at} ({call:?}), state {number}, {data:?}"),
            );
            fs::remove_dir_all(&root).unwrap();
            states += 1;
        }
    }
    assert!(states > 500, "{states} states");
}

/// That the store which a crash left is sound.
fn check(root: &Path, expected: &BTreeSet<String>, context: &str) {
    let open = || LayerStore::new(Arc::new(FileStore::new(root).unwrap()));
    let whole = |store: &LayerStore| {
        let mut there = BTreeSet::new();
        for entry in store.entries().unwrap() {
            let report = store.verify(&entry.reference).unwrap();
            assert!(
                report.is_ok(),
                "{context}: {}: {:?}",
                entry.reference,
                report.damaged
            );
            there.insert(entry.reference.to_string());
        }
        for name in expected {
            assert!(there.contains(name), "{context}: {name} is lost");
        }
        there
    };
    let store = open();
    let there = whole(&store);
    // Sessions of the dead lapse; these do so at once.
    for lease in store.blobs().list("leases/").unwrap() {
        store.blobs().delete(&lease.key).unwrap();
    }
    for marker in store.blobs().list("gc/sweep-").unwrap() {
        store.blobs().delete(&marker.key).unwrap();
    }
    let report = store
        .collect(NOW)
        .unwrap_or_else(|e| panic!("{context}: {e:?}"));
    assert!(report.waiting.is_empty(), "{context}: {report:?}");
    assert_eq!(whole(&store), there, "{context}");
    for (name, seed) in [("base/a:1", 1), ("base/new:1", 9)] {
        publish(&store, name, seed).unwrap_or_else(|e| panic!("{context}: {e:?}"));
    }
    assert!(whole(&store).len() >= 2);
}

#[test]
fn publishing() {
    crash_everywhere(|store, recorder| {
        for (name, seed) in [("base/a:1", 1), ("base/b:1", 2)] {
            publish(store, name, seed).unwrap();
            recorder.note(Call::Published(name.to_owned()));
        }
    });
}

#[test]
fn collecting_and_compacting() {
    crash_everywhere(|store, recorder| {
        publish(store, "base/b:1", 2).unwrap();
        recorder.note(Call::Published("base/b:1".to_owned()));
        publish(store, "base/c:1", 3).unwrap();
        recorder.note(Call::Published("base/c:1".to_owned()));
        recorder.note(Call::Removing("base/c:1".to_owned()));
        store.remove(&"base/c:1".parse().unwrap()).unwrap();
        store
            .prune(PruneOptions {
                min_live: 100,
                dry_run: false,
                grace: Duration::ZERO,
                wait: false,
            })
            .unwrap();
    });
}

/// An index is made anew: the layer is whole all the while.
#[test]
fn repairing() {
    crash_everywhere(|store, recorder| {
        publish(store, "base/b:1", 2).unwrap();
        recorder.note(Call::Published("base/b:1".to_owned()));
        for index in store.blobs().list("index/").unwrap() {
            store.blobs().delete(&index.key).unwrap();
        }
        let report = store.repair(false).unwrap();
        assert_eq!(report.indexed.len(), 1, "{report:?}");
    });
}

/// Layers come from another store.
#[test]
fn copying() {
    crash_everywhere(|store, recorder| {
        let from = LayerStore::new(Arc::new(MemStore::new()));
        for (name, seed) in [("base/a:1", 1), ("base/b:1", 2)] {
            publish(&from, name, seed).unwrap();
            let layer = from.load(&name.parse().unwrap()).unwrap();
            let options = TransferOptions::default();
            transfer(&from, store, &[layer], &options, &mut |_| {}).unwrap();
            recorder.note(Call::Published(name.to_owned()));
        }
    });
}
