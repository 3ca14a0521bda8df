//! Layers and stacks on a node, through the kernel.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "tests; error numbers are compared, which fs_err hides"
)]

mod common;

use std::collections::HashMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{noise, publish, sample_tree};
use layerpack_fixtures::guards::mounts_below;
use layerpack_fixtures::treecmp::{self, Options};
use layerpack_fixtures::{MountGuard, ScratchDir, is_root, skip, trees};
use layerpack_layerfs::{LayerfsError, LeaseSpec, Node, NodeConfig, is_lost};
use layerpack_store::{BlobStore, FileStore, LayerStore, StoreError};

/// Whether file-backed EROFS and FUSE are to be had.
fn capable() -> Result<(), String> {
    if !is_root() {
        return Err("needs root".to_owned());
    }
    if !Path::new("/dev/fuse").exists() {
        return Err("needs /dev/fuse".to_owned());
    }
    let scratch = ScratchDir::new("capable").map_err(|e| e.to_string())?;
    let config = config(&scratch.join("root"));
    let node = Node::start(config).map_err(|e| e.to_string())?;
    std::fs::write(scratch.join("x"), b"x").unwrap();
    let store = file_store(&scratch.join("store"));
    let source = scratch.mkdir("source").unwrap();
    let layer = publish(&store, "base/x:1", &source, &[]);
    match node.layer_up(&store, &layer.digest) {
        Err(e @ LayerfsError::Unsupported { .. }) => Err(e.to_string()),
        Err(e) => panic!("{e}"),
        Ok(_) => Ok(()),
    }
}

fn config(root: &Path) -> NodeConfig {
    NodeConfig {
        housekeeping: Duration::from_secs(3600),
        ..NodeConfig::recommended(root.to_owned())
    }
}

fn file_store(dir: &Path) -> LayerStore {
    LayerStore::new(layerpack_store::open_url(dir.to_str().unwrap()).unwrap())
}

fn lease(id: &str) -> LeaseSpec {
    LeaseSpec {
        id: id.to_owned(),
        owner: "test".to_owned(),
        pid: None,
    }
}

/// Unmounts what a failed test leaves.
struct Cleanup(PathBuf);

impl Drop for Cleanup {
    fn drop(&mut self) {
        for mount in mounts_below(&self.0).into_iter().rev() {
            let _ = layerpack_sys::mount::unmount(&mount, true);
        }
    }
}

#[test]
fn privileged_a_layer_shows_its_source_and_fetches_little() {
    if let Err(reason) = capable() {
        skip!("{reason}");
    }
    let scratch = ScratchDir::new("node").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let source = scratch.join("source");
    sample_tree(&source);
    std::os::unix::fs::symlink("../small/1", source.join("small/link")).unwrap();
    std::fs::hard_link(source.join("small/2"), source.join("hard")).unwrap();
    std::fs::set_permissions(source.join("middle"), PermissionsExt::from_mode(0o4755)).unwrap();
    rustix::fs::lsetxattr(
        source.join("middle"),
        "user.note",
        b"value",
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
    let store = file_store(&scratch.join("store"));
    let layer = publish(&store, "base/sample:1", &source, &[]);
    let node = Node::start(config(&scratch.join("root"))).unwrap();
    let up = node.layer_up(&store, &layer.digest).unwrap();
    assert_eq!(up.layer_id, layer.layer_id);
    assert_eq!(node.layer_up(&store, &layer.digest).unwrap(), up);

    // Mounting and walking touch no data.
    let listed = treecmp::snapshot(
        &up.mountpoint,
        &Options {
            contents: false,
            ..Options::default()
        },
    )
    .unwrap();
    assert!(listed.get("large").is_some());
    let status = node.status();
    assert_eq!(
        (status.totals.fetched_bytes, status.totals.served_bytes),
        (0, 0)
    );

    // One small file: a few frames.
    let small = std::fs::read(up.mountpoint.join("small/7")).unwrap();
    assert!(small == noise(7, 100 + 7 * 97));
    let status = node.status();
    let size = status.totals.layer_bytes;
    assert!(status.totals.fetched_raw_bytes > 0);
    assert!(
        status.totals.fetched_raw_bytes * 4 < size,
        "{} of {size}",
        status.totals.fetched_raw_bytes
    );
    assert!(status.totals.served_bytes > 0);

    let options = Options::default();
    let left = treecmp::snapshot(&source, &options).unwrap();
    let right = treecmp::snapshot(&up.mountpoint, &options).unwrap();
    treecmp::assert_same(&left, &right);
    let before = node.status().totals;
    let again = treecmp::snapshot(&up.mountpoint, &options).unwrap();
    treecmp::assert_same(&left, &again);
    let after = node.status().totals;
    assert_eq!(after.fetched_raw_bytes, before.fetched_raw_bytes);
    assert_eq!((after.errors, after.inflight_bytes), (0, 0));

    node.stop(false).unwrap();
    assert_eq!(mounts_below(scratch.path()), Vec::<PathBuf>::new());
    drop(node);

    // The next life of the node fetches nothing again, and needs no store for it.
    let node = Node::start(config(&scratch.join("root"))).unwrap();
    let up = node.layer_up(&store, &layer.digest).unwrap();
    std::fs::rename(scratch.join("store/packs"), scratch.join("packs")).unwrap();
    let right = treecmp::snapshot(&up.mountpoint, &options).unwrap();
    treecmp::assert_same(&left, &right);
    assert_eq!(node.status().totals.fetched_bytes, 0);
    drop(node);
    assert_eq!(mounts_below(scratch.path()), Vec::<PathBuf>::new());
}

#[test]
fn privileged_awkward_trees_survive_the_way() {
    if let Err(reason) = capable() {
        skip!("{reason}");
    }
    let scratch = ScratchDir::new("node").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let store = file_store(&scratch.join("store"));
    let node = Node::start(config(&scratch.join("root"))).unwrap();
    let source = scratch.mkdir("nasty").unwrap();
    trees::nasty(
        &source,
        &trees::NastyOptions {
            // The tests' way of packing stores holes as zeros, and goes by whole paths.
            huge: false,
            deep: false,
            ..trees::NastyOptions::default()
        },
    )
    .unwrap();
    let layer = publish(&store, "base/nasty:1", &source, &[]);
    let up = node.layer_up(&store, &layer.digest).unwrap();
    let options = Options::default();
    treecmp::assert_same(
        &treecmp::snapshot(&source, &options).unwrap(),
        &treecmp::snapshot(&up.mountpoint, &options).unwrap(),
    );
    node.stop(false).unwrap();
}

#[test]
fn privileged_leases_and_stop() {
    if let Err(reason) = capable() {
        skip!("{reason}");
    }
    let scratch = ScratchDir::new("node").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let root = scratch.join("root");
    let store = file_store(&scratch.join("store"));
    let mut digests = Vec::new();
    for name in ["a", "b", "c"] {
        let source = scratch.mkdir(name).unwrap();
        std::fs::write(source.join(name), noise(9, 10_000)).unwrap();
        let layer = publish(&store, &format!("base/{name}:1"), &source, &[]);
        digests.push(layer.digest);
    }
    let node = Node::start(NodeConfig {
        idle_layers: 1,
        ..config(&root)
    })
    .unwrap();
    let error = Node::start(config(&root)).unwrap_err();
    assert!(matches!(error, LayerfsError::Owned { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains(&format!("process {}", std::process::id()))
    );

    let first = node.stack_up(&store, &digests, &lease("one")).unwrap();
    assert_eq!(first.lowers.len(), 3);
    assert!(first.lowers[0].join("c").exists() && first.lowers[2].join("a").exists());
    assert_eq!(
        node.stack_up(&store, &digests, &lease("one")).unwrap(),
        first
    );
    let other = node
        .stack_up(&store, &digests[..1], &lease("one"))
        .unwrap_err();
    assert!(matches!(other, LayerfsError::LeaseTaken { .. }));
    for bad in ["", "../x", "a/b", ".hidden", &"x".repeat(129)] {
        let error = node.stack_up(&store, &digests, &lease(bad)).unwrap_err();
        assert!(matches!(error, LayerfsError::InvalidLease { .. }));
    }
    // The same layer twice in a stack: once is enough.
    let twice = [digests[0], digests[1], digests[0]];
    let second = node.stack_up(&store, &twice, &lease("two")).unwrap();
    assert_eq!(second.lowers.len(), 2);
    assert!(second.lowers[0].join("a").exists());

    let error = node.stop(false).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("lease one") && text.contains("lease two"),
        "{text}"
    );
    assert!(first.lowers[0].join("c").exists(), "still serving");

    node.release("one").unwrap();
    let error = node.release("one").unwrap_err();
    assert!(matches!(error, LayerfsError::UnknownLease { .. }));
    // "c" is idle now and the only one; a and b are leased.
    assert_eq!(node.status().totals.layers, 3);
    node.release("two").unwrap();
    assert_eq!(node.status().totals.layers, 1, "one idle layer stays");
    assert_eq!(node.leases(), []);

    // A process that ends takes its lease with it.
    let mut child = std::process::Command::new("sleep")
        .arg("600")
        .spawn()
        .unwrap();
    let spec = LeaseSpec {
        pid: Some(child.id()),
        ..lease("three")
    };
    node.stack_up(&store, &digests, &spec).unwrap();
    node.tidy();
    assert_eq!(node.leases().len(), 1);
    child.kill().unwrap();
    child.wait().unwrap();
    node.tidy();
    assert_eq!(node.leases(), []);

    // In use, though without a lease.
    let up = node.layer_up(&store, &digests[0]).unwrap();
    let open = std::fs::File::open(up.mountpoint.join("a")).unwrap();
    assert!(matches!(
        node.stop(false).unwrap_err(),
        LayerfsError::InUse { .. }
    ));
    drop(open);
    node.stop(false).unwrap();
    assert!(matches!(
        node.layer_up(&store, &digests[0]).unwrap_err(),
        LayerfsError::Stopped { .. }
    ));
    assert_eq!(mounts_below(scratch.path()), Vec::<PathBuf>::new());
}

/// A sandbox keeps a copy of a mount that the node knows nothing of: the data stays served
/// after release, and a forced stop ends it with errors.
#[test]
fn privileged_copies_of_mounts_outlive_release() {
    if let Err(reason) = capable() {
        skip!("{reason}");
    }
    let scratch = ScratchDir::new("node").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let store = file_store(&scratch.join("store"));
    let source = scratch.join("source");
    sample_tree(&source);
    let layer = publish(&store, "base/sample:1", &source, &[]);
    let node = Node::start(NodeConfig {
        idle_layers: 0,
        ..config(&scratch.join("root"))
    })
    .unwrap();
    let stack = node
        .stack_up(&store, &[layer.digest], &lease("one"))
        .unwrap();
    let copy = scratch.mkdir("copy").unwrap();
    let fd = layerpack_sys::mount::bind(&stack.lowers[0]).unwrap();
    layerpack_sys::mount::attach(std::os::fd::AsFd::as_fd(&fd), &copy).unwrap();
    drop(fd);
    let guard = MountGuard::new(&copy);
    node.release("one").unwrap();
    assert!(!stack.lowers[0].join("large").exists(), "unmounted");
    let status = node.status();
    assert_eq!((status.layers.len(), status.layers[0].mounted), (1, false));
    assert_eq!(status.layers[0].opens, 1);
    assert!(std::fs::read(copy.join("larger")).unwrap() == noise(3000, 2_500_001));
    // Up again: the same blob, one cache.
    let up = node.layer_up(&store, &layer.digest).unwrap();
    assert!(std::fs::read(up.mountpoint.join("larger")).unwrap() == noise(3000, 2_500_001));
    assert_eq!(node.status().layers[0].opens, 2);
    let fetched = node.status().totals.fetched_raw_bytes;
    assert!(fetched < 3_500_000, "{fetched}");

    node.stop(true).unwrap();
    let error = std::fs::read(copy.join("large")).unwrap_err();
    assert!(error.raw_os_error().is_some());
    guard.unmount().unwrap();
    assert_eq!(mounts_below(scratch.path()), Vec::<PathBuf>::new());
}

fn overlay_of(lowers: &[PathBuf], scratch: &ScratchDir, name: &str) -> MountGuard {
    let target = scratch.mkdir(format!("{name}-merged")).unwrap();
    let lowers: Vec<&Path> = lowers.iter().map(PathBuf::as_path).collect();
    // Without an upper: that would bring a root directory of its own.
    MountGuard::overlay(&lowers, None, &target).unwrap()
}

/// `/tmp` stays 1777 whatever is stacked.
#[test]
fn privileged_implicit_directories_follow_the_stack() {
    if let Err(reason) = capable() {
        skip!("{reason}");
    }
    let scratch = ScratchDir::new("node").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let store = file_store(&scratch.join("store"));
    let set = |path: &Path, mode: u32, uid: u32| {
        std::fs::create_dir_all(path).unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        std::os::unix::fs::chown(path, Some(uid), Some(uid + 1)).unwrap();
    };
    let base = scratch.mkdir("base").unwrap();
    set(&base.join("tmp"), 0o1777, 0);
    set(&base.join("root"), 0o700, 0);
    set(&base.join("usr/local/lib"), 0o2775, 50);
    set(&base.join("opt"), 0o711, 7);
    std::fs::set_permissions(&base, PermissionsExt::from_mode(0o751)).unwrap();
    let xattr = rustix::fs::XattrFlags::empty();
    rustix::fs::lsetxattr(base.join("opt"), "user.kept", b"yes", xattr).unwrap();

    let tools = scratch.mkdir("tools").unwrap();
    for dir in ["tmp/cache", "root", "usr/local/lib", "opt", "new/deep"] {
        std::fs::create_dir_all(tools.join(dir)).unwrap();
    }
    set(&tools.join("opt"), 0o755, 0);
    std::fs::write(tools.join("usr/local/lib/tool"), b"tool").unwrap();
    std::fs::write(tools.join("new/deep/file"), b"file").unwrap();
    let implicit = [
        "",
        "new",
        "opt",
        "root",
        "tmp",
        "usr",
        "usr/local",
        "usr/local/lib",
    ];

    let base = publish(&store, "base/b:1", &base, &[]);
    let tools = publish(&store, "toolkit/t:1", &tools, &implicit);
    let node = Node::start(config(&scratch.join("root-dir"))).unwrap();
    let digests = [base.digest, tools.digest];
    let stack = node.stack_up(&store, &digests, &lease("one")).unwrap();
    assert_eq!(stack.lowers.len(), 3, "one generated layer");
    assert_eq!(stack.layers.len(), 2);
    {
        let merged = overlay_of(&stack.lowers, &scratch, "one");
        let look = |path: &str| {
            let stat = std::fs::metadata(merged.path().join(path)).unwrap();
            (stat.mode() & 0o7777, stat.uid(), stat.gid())
        };
        assert_eq!(look(""), (0o751, 0, 0));
        assert_eq!(look("tmp"), (0o1777, 0, 1));
        assert_eq!(look("root"), (0o700, 0, 1));
        assert_eq!(look("usr/local/lib"), (0o2775, 50, 51));
        assert_eq!(look("opt"), (0o711, 7, 8));
        assert_eq!(look("new"), (0o755, 0, 0));
        let mut value = [0; 10];
        let opt = merged.path().join("opt");
        assert_eq!(
            rustix::fs::lgetxattr(&opt, "user.kept", &mut value).unwrap(),
            3
        );
        for (path, bytes) in [("usr/local/lib/tool", b"tool"), ("new/deep/file", b"file")] {
            assert_eq!(std::fs::read(merged.path().join(path)).unwrap(), bytes);
        }
        merged.unmount().unwrap();
    }
    // The same stack for another lease: the same generated layer, kept while either lives.
    let other = node.stack_up(&store, &digests, &lease("two")).unwrap();
    assert_eq!(other.lowers, stack.lowers);
    node.release("one").unwrap();
    assert!(other.lowers[0].join("tmp").exists());
    node.release("two").unwrap();
    assert!(!other.lowers[0].join("tmp").exists());
    // The base alone needs none.
    let alone = node
        .stack_up(&store, &digests[..1], &lease("three"))
        .unwrap();
    assert_eq!(alone.lowers.len(), 1);
    node.release("three").unwrap();
    node.stop(false).unwrap();
    assert_eq!(mounts_below(scratch.path()), Vec::<PathBuf>::new());
}

/// Stores that a node can be cut off from.
type Stores = Arc<Mutex<HashMap<String, Arc<dyn BlobStore>>>>;

fn with_stores(root: &Path, stores: &Stores) -> NodeConfig {
    let stores = Arc::clone(stores);
    NodeConfig {
        open_store: Arc::new(move |url| {
            let stores = stores.lock().unwrap();
            let store = stores.get(url).ok_or_else(|| StoreError::InvalidUrl {
                url: url.to_owned(),
                why: "out of reach".to_owned(),
            })?;
            Ok(LayerStore::new(Arc::clone(store)))
        }),
        ..config(root)
    }
}

/// A daemon that dies leaves mounts and leases; the next one sweeps the mounts, serves the
/// leases again even while their store is away, and one broken lease stops nothing.
#[test]
fn privileged_a_restart_sweeps_and_restores() {
    if let Err(reason) = capable() {
        skip!("{reason}");
    }
    let scratch = ScratchDir::new("node").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let root = scratch.join("root");
    let source = scratch.join("source");
    sample_tree(&source);
    let blobs: Arc<dyn BlobStore> = Arc::new(FileStore::new(scratch.join("store")).unwrap());
    let store = LayerStore::new(Arc::clone(&blobs));
    let layer = publish(&store, "base/sample:1", &source, &[]);
    let stores: Stores = Arc::default();
    stores
        .lock()
        .unwrap()
        .insert(blobs.url(), Arc::clone(&blobs));

    let node = Node::start(with_stores(&root, &stores)).unwrap();
    let mut child = std::process::Command::new("sleep")
        .arg("600")
        .spawn()
        .unwrap();
    let dead = LeaseSpec {
        pid: Some(child.id()),
        ..lease("dead")
    };
    let stack = node
        .stack_up(&store, &[layer.digest], &lease("live"))
        .unwrap();
    node.stack_up(&store, &[layer.digest], &dead).unwrap();
    let large = stack.lowers[0].join("large");
    assert!(std::fs::read(&large).unwrap() == noise(2000, 1_500_000));
    // A forced stop keeps the records, as a crash does.
    node.stop(true).unwrap();
    drop(node);
    child.kill().unwrap();
    child.wait().unwrap();
    std::fs::write(root.join("leases/broken.json"), b"{").unwrap();
    // Things in the way, as a dead daemon leaves them: two mounts on top of each other.
    let stale = stack.lowers[0].clone();
    std::fs::create_dir_all(&stale).unwrap();
    for _ in 0..2 {
        std::mem::forget(MountGuard::tmpfs(1 << 20, &stale).unwrap());
    }

    stores.lock().unwrap().clear();
    let node = Node::start(with_stores(&root, &stores)).unwrap();
    let leases = node.leases();
    assert_eq!(leases.len(), 1);
    assert_eq!(leases[0].spec.id, "live");
    assert_eq!(leases[0].stack, stack);
    // Copies of the mounts that were there are served by nobody, until they are made anew.
    assert!(leases[0].lost && is_lost(&root, "live"));
    let again = node.stack_up(&store, &[layer.digest], &lease("live"));
    assert_eq!(again.unwrap(), stack);
    assert!(!node.leases()[0].lost && !is_lost(&root, "live"));
    let problems = node.status().problems;
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].contains("broken.json"));
    // What is cached serves on; what is not fails until the store is back.
    assert!(std::fs::read(&large).unwrap() == noise(2000, 1_500_000));
    let larger = stack.lowers[0].join("larger");
    let error = std::fs::read(&larger).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    stores.lock().unwrap().insert(blobs.url(), blobs);
    assert!(std::fs::read(&larger).unwrap() == noise(3000, 2_500_001));
    node.release("live").unwrap();
    node.stop(false).unwrap();
    assert_eq!(mounts_below(scratch.path()), Vec::<PathBuf>::new());
}

/// Damage in the store: an error that names the object, and nothing half mounted.
#[test]
fn privileged_damaged_layers_do_not_come_up() {
    if let Err(reason) = capable() {
        skip!("{reason}");
    }
    let scratch = ScratchDir::new("node").unwrap();
    let _cleanup = Cleanup(scratch.path().to_owned());
    let source = scratch.join("source");
    sample_tree(&source);
    let store_dir = scratch.join("store");
    let store = file_store(&store_dir);
    let layer = publish(&store, "base/sample:1", &source, &[]);
    for kind in ["manifests", "meta", "maps", "locators"] {
        let root = scratch.join(format!("root-{kind}"));
        let node = Node::start(config(&root)).unwrap();
        let dir = store_dir.join(kind);
        let path = std::fs::read_dir(&dir)
            .unwrap()
            .next()
            .unwrap()
            .unwrap()
            .path();
        let good = std::fs::read(&path).unwrap();
        let mut bad = good.clone();
        let middle = bad.len() / 2;
        bad[middle] ^= 0x40;
        std::fs::write(&path, &bad).unwrap();
        let error = node
            .stack_up(&store, &[layer.digest], &lease("x"))
            .unwrap_err();
        assert!(error.to_string().contains(kind), "{kind}: {error}");
        assert_eq!(node.leases(), []);
        std::fs::remove_file(&path).unwrap();
        let error = node
            .stack_up(&store, &[layer.digest], &lease("x"))
            .unwrap_err();
        assert!(error.to_string().contains(kind), "{kind}: {error}");
        assert_eq!(mounts_below(&root).len(), 1, "only the blob directory");
        std::fs::write(&path, &good).unwrap();
        let stack = node.stack_up(&store, &[layer.digest], &lease("x")).unwrap();
        assert!(std::fs::read(stack.lowers[0].join("middle")).unwrap() == noise(1000, 60_000));
        node.release("x").unwrap();
        node.stop(false).unwrap();
    }
}
