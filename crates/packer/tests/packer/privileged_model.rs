//! Random operations in an overlay, beside a model that knows what its upper must hold: what was
//! changed is in the snapshot, what was not is not, and stacked it is what it was.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::treecmp::Options;
use layerpack_fixtures::{ScratchDir, skip};

use crate::privileged_kernel::{assert_same_trees, snapshot_upper, stack, unable};
use crate::support::{Packed, memory_store, try_dir};

/// What the model knows of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Known {
    directory: bool,
    /// It is the layer's below, not something new under the name.
    below: bool,
    /// A file that was changed, in whatever way.
    changed: bool,
}

/// Paths, without the root.
#[derive(Debug, Clone, Default)]
struct Model {
    now: BTreeMap<String, Known>,
    below: BTreeMap<String, bool>,
}

const NEW: Known = Known {
    directory: false,
    below: false,
    changed: true,
};

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

impl Model {
    fn new(below: BTreeMap<String, bool>) -> Self {
        let now = below.iter().map(|(path, directory)| {
            let known = Known {
                directory: *directory,
                below: true,
                changed: false,
            };
            (path.clone(), known)
        });
        Self {
            now: now.collect(),
            below,
        }
    }

    fn paths(&self, wanted: impl Fn(&Known) -> bool) -> Vec<String> {
        let found = self.now.iter().filter(|(_, known)| wanted(known));
        found.map(|(path, _)| path.clone()).collect()
    }

    /// Everything in a directory.
    fn inside(&self, directory: &str) -> Vec<String> {
        let prefix = format!("{directory}/");
        let paths = self.now.keys().filter(|path| path.starts_with(&prefix));
        paths.cloned().collect()
    }

    fn remove(&mut self, path: &str) {
        for inner in self.inside(path) {
            self.now.remove(&inner);
        }
        self.now.remove(path);
    }

    fn put(&mut self, path: &str, known: Known) {
        self.now.insert(path.to_owned(), known);
    }

    /// Whether a directory is merged with the one below it.
    fn is_merged(&self, directory: &str) -> bool {
        directory.is_empty()
            || self
                .now
                .get(directory)
                .is_some_and(|known| known.directory && known.below)
    }

    /// Whether something of the layers below would show under a new name.
    fn hides(&self, path: &str) -> bool {
        self.below.contains_key(path) && self.is_merged(parent(path))
    }

    /// Compares a layer with what it must be.
    fn check(&self, packed: &Packed, seed: u64) {
        let tree = packed.tree();
        let mut files = BTreeSet::new();
        let mut whiteouts = BTreeSet::new();
        let mut directories = BTreeSet::new();
        for path in tree.paths().into_iter().filter(|path| !path.is_empty()) {
            let kind = tree.get(&path).kind;
            if tree.is_whiteout(&path) {
                whiteouts.insert(path);
            } else if kind == layerpack_erofs::FileType::Directory {
                directories.insert(path);
            } else {
                files.insert(path);
            }
        }
        let changed = self.paths(|known| !known.directory && known.changed);
        assert_eq!(files, changed.into_iter().collect(), "seed {seed}: files");
        let removed = self
            .below
            .keys()
            .filter(|path| !self.now.contains_key(*path) && self.is_merged(parent(path)));
        let removed: BTreeSet<String> = removed.cloned().collect();
        assert_eq!(whiteouts, removed, "seed {seed}: whiteouts");
        for (path, known) in self.now.iter().filter(|(_, known)| known.directory) {
            if !known.below {
                assert!(directories.contains(path), "seed {seed}: {path}");
                assert!(
                    !self.hides(path) || tree.is_opaque(path),
                    "seed {seed}: {path} lets through what is below"
                );
            }
        }
        for path in &directories {
            let known = self.now.get(path);
            assert!(
                known.is_some_and(|known| known.directory),
                "seed {seed}: {path} is no directory of the sandbox"
            );
        }
    }
}

/// A tree of directories and files; what is in it.
fn base(dir: &Path, rng: &mut Rng) -> BTreeMap<String, bool> {
    let mut found = BTreeMap::new();
    let mut directories = vec![String::new()];
    for number in 0..40 {
        let at = rng.pick(&directories).cloned().unwrap();
        let path = match at.is_empty() {
            true => format!("b{number}"),
            false => format!("{at}/b{number}"),
        };
        let directory = rng.one_in(3);
        if directory {
            fs_err::create_dir(dir.join(&path)).unwrap();
            directories.push(path.clone());
        } else {
            let len = rng.below_usize(9000);
            fs_err::write(dir.join(&path), rng.bytes(len)).unwrap();
        }
        found.insert(path, directory);
    }
    found
}

/// One operation, in the overlay and in the model.
fn operate(root: &Path, model: &mut Model, rng: &mut Rng, number: usize) {
    let files = model.paths(|known| !known.directory);
    let directories = model.paths(|known| known.directory);
    let at = |path: &str| -> PathBuf { root.join(path) };
    let place = match rng.one_in(4) {
        true => String::new(),
        false => rng.pick(&directories).cloned().unwrap_or_default(),
    };
    let fresh = match place.is_empty() {
        true => format!("n{number}"),
        false => format!("{place}/n{number}"),
    };
    let file = rng.pick(&files).cloned();
    let directory = rng.pick(&directories).cloned();
    let changed = |model: &mut Model, path: &str| {
        model.now.get_mut(path).unwrap().changed = true;
    };
    match (rng.below(14), file, directory) {
        (0 | 1, _, _) => {
            let len = rng.below_usize(9000);
            fs_err::write(at(&fresh), rng.bytes(len)).unwrap();
            model.put(&fresh, NEW);
        }
        (2, _, _) => {
            fs_err::create_dir(at(&fresh)).unwrap();
            model.put(
                &fresh,
                Known {
                    directory: true,
                    ..NEW
                },
            );
        }
        (3, Some(file), _) => {
            fs_err::remove_file(at(&file)).unwrap();
            model.remove(&file);
        }
        (4, _, Some(directory)) => {
            fs_err::remove_dir_all(at(&directory)).unwrap();
            model.remove(&directory);
        }
        (5, Some(file), _) => {
            fs_err::rename(at(&file), at(&fresh)).unwrap();
            model.remove(&file);
            model.put(&fresh, NEW);
        }
        (6, Some(file), _) => {
            let target = rng.pick(&files).cloned().unwrap();
            fs_err::rename(at(&file), at(&target)).unwrap();
            if file != target {
                model.remove(&file);
                model.put(&target, NEW);
            }
        }
        (7, _, Some(directory)) if !fresh.starts_with(&format!("{directory}/")) => {
            let inner = model.inside(&directory);
            match fs_err::rename(at(&directory), at(&fresh)) {
                Ok(()) => {
                    assert!(!model.now[&directory].below, "a merged directory moved");
                    let moved: Vec<(String, Known)> = inner
                        .iter()
                        .chain([&directory])
                        .map(|path| (path.replacen(&directory, &fresh, 1), model.now[path]))
                        .collect();
                    model.remove(&directory);
                    for (path, known) in moved {
                        model.put(&path, known);
                    }
                }
                // What lies below too is copied by whoever moves it.
                Err(_) => assert!(model.now[&directory].below),
            }
        }
        (8, Some(file), _) => {
            let mut open = fs_err::OpenOptions::new()
                .append(true)
                .open(at(&file))
                .unwrap();
            open.write_all(b"more").unwrap();
            changed(model, &file);
        }
        (9, Some(file), _) => {
            let mode = 0o600 + u32::from(rng.one_in(2)) * 0o44;
            fs_err::set_permissions(at(&file), std::fs::Permissions::from_mode(mode)).unwrap();
            changed(model, &file);
        }
        (10, Some(file), _) => {
            // Other bytes of the same number, at the same time.
            let before = fs_err::metadata(at(&file)).unwrap();
            let len = usize::try_from(before.len()).unwrap();
            fs_err::write(at(&file), rng.bytes(len)).unwrap();
            let open = std::fs::File::options()
                .write(true)
                .open(at(&file))
                .unwrap();
            open.set_modified(before.modified().unwrap()).unwrap();
            changed(model, &file);
        }
        (11, Some(file), _) => {
            fs_err::remove_file(at(&file)).unwrap();
            fs_err::create_dir(at(&file)).unwrap();
            model.remove(&file);
            model.put(
                &file,
                Known {
                    directory: true,
                    ..NEW
                },
            );
        }
        (12, _, Some(directory)) => {
            fs_err::remove_dir_all(at(&directory)).unwrap();
            model.remove(&directory);
            if rng.one_in(2) {
                fs_err::create_dir(at(&directory)).unwrap();
                model.put(
                    &directory,
                    Known {
                        directory: true,
                        ..NEW
                    },
                );
            } else {
                fs_err::write(at(&directory), "now a file").unwrap();
                model.put(&directory, NEW);
            }
        }
        // Looking at something changes nothing.
        (_, Some(file), _) => drop(fs_err::read(at(&file)).unwrap()),
        _ => {}
    }
}

/// Sequences at once: most of the time is spent waiting for mounts to come and go.
const AT_ONCE: usize = 4;

#[test]
fn privileged_the_upper_holds_what_was_changed_and_nothing_else() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let sequences: u64 = match std::env::var_os("LAYERPACK_TEST_FULL") {
        Some(_) => 2000,
        None => 25,
    };
    std::thread::scope(|scope| {
        for first in 0..AT_ONCE as u64 {
            scope.spawn(move || {
                for seed in (first..sequences).step_by(AT_ONCE) {
                    sequence(seed);
                }
            });
        }
    });
}

/// Sixty operations in an overlay, their snapshot, and what a sandbox of that shows.
fn sequence(seed: u64) {
    let mut rng = Rng::new(0x5eed + seed);
    let scratch = ScratchDir::new("model").unwrap();
    let dir = scratch.mkdir("base").unwrap();
    let mut model = Model::new(base(&dir, &mut rng));
    let store = memory_store();
    let base = try_dir("base/b:1", &dir).unwrap();
    let before = stack(&[&base], &scratch, "before", Some("rw"));
    for number in 0..60 {
        operate(&before.merged, &mut model, &mut rng, number);
    }
    let packed = snapshot_upper(&store, &scratch.join("rw/upper"), 1);
    model.check(&packed, seed);
    let after = stack(&[&base, &packed], &scratch, "after", None);
    assert_same_trees(&before.merged, &after.merged, &Options::default());
}
