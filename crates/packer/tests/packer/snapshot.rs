//! Snapshots of what goes on while they are taken.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::rng::Rng;
use layerpack_packer::{Halt, HaltError, PackDiffOptions, PackError, Silent, pack_diff, snapshot};
use layerpack_store::{Fault, FaultStore, LayerStore, MemStore};
use std::sync::Arc;

use crate::support::{Packed, memory_store, options, try_pack};
use layerpack_packer::Source;

/// Runs something each time that it lets go, as a sandbox would, and counts.
struct Sandbox<F: Fn(u32) + Sync> {
    halted: AtomicBool,
    times: AtomicU32,
    goes_on: F,
}

impl<F: Fn(u32) + Sync> Sandbox<F> {
    fn new(goes_on: F) -> Self {
        Self {
            halted: AtomicBool::new(false),
            times: AtomicU32::new(0),
            goes_on,
        }
    }

    fn times(&self) -> u32 {
        assert!(!self.halted.load(Ordering::SeqCst), "left halted");
        self.times.load(Ordering::SeqCst)
    }
}

impl<F: Fn(u32) + Sync> Halt for Sandbox<F> {
    fn halt(&self) -> Result<(), HaltError> {
        assert!(!self.halted.swap(true, Ordering::SeqCst), "halted twice");
        self.times.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn resume(&self) -> Result<(), HaltError> {
        assert!(self.halted.swap(false, Ordering::SeqCst), "not halted");
        (self.goes_on)(self.times.load(Ordering::SeqCst));
        Ok(())
    }
}

fn with(upper: &Path) -> PackDiffOptions {
    let mut with = PackDiffOptions::new("diff/d:1".parse().unwrap(), upper.to_owned());
    with.scratch = upper.parent().map(PathBuf::from);
    with
}

#[test]
fn a_sandbox_at_rest_is_halted_once() {
    let scratch = ScratchDir::new("once").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    scratch.write("upper/a", "x").unwrap();
    scratch.write("upper/b", vec![1; 1 << 20]).unwrap();
    let sandbox = Sandbox::new(|_| {});
    let report = snapshot(&memory_store(), &with(&upper), &sandbox, &Silent).unwrap();
    assert_eq!((sandbox.times(), report.frozen.len()), (1, 1));
    assert!(report.warnings.is_empty(), "{:?}", report.warnings);
}

#[test]
fn deep_and_wide_uppers_are_whole() {
    for depth in [3_u64, 200] {
        let scratch = ScratchDir::new("deep").unwrap();
        let upper = scratch.mkdir("upper").unwrap();
        let mut expected = vec![(String::new(), None)];
        let mut here = String::new();
        for level in 0..depth {
            for (name, content) in [("a", "1"), ("z", "22")] {
                let path = format!("{here}{name}");
                fs_err::write(upper.join(&path), content).unwrap();
                expected.push((path, Some(content.to_owned())));
            }
            let directory = format!("{here}d{level}");
            fs_err::create_dir(upper.join(&directory)).unwrap();
            expected.push((directory.clone(), None));
            here = format!("{directory}/");
        }
        for file in 0..1500 {
            let path = format!("{here}file-{file}");
            fs_err::write(upper.join(&path), format!("{file}")).unwrap();
            expected.push((path, Some(format!("{file}"))));
        }
        expected.sort();
        let store = memory_store();
        let sandbox = Sandbox::new(|_| {});
        let report = snapshot(&store, &with(&upper), &sandbox, &Silent).unwrap();
        let tree = Packed::load(&store, report.published.unwrap().digest, Vec::new()).tree();
        assert_eq!(tree.paths().len(), expected.len(), "{depth}");
        for (path, content) in &expected {
            if let Some(content) = content {
                assert_eq!(tree.get(path).content(), content.as_bytes(), "{path}");
            }
        }
        // What is left out is not looked into, and does not count.
        let mut some = with(&upper);
        some.excludes = vec!["file-*".to_owned()];
        some.limits.max_entries = 3 * depth;
        let report = snapshot(&memory_store(), &some, &sandbox, &Silent).unwrap();
        assert_eq!(report.counts.files, 2 * depth);
        some.limits.max_entries -= 1;
        let error = snapshot(&memory_store(), &some, &sandbox, &Silent).unwrap_err();
        assert!(
            matches!(
                error,
                PackError::Limit {
                    name: "max_entries",
                    ..
                }
            ),
            "{error}"
        );
        // Each let it go on.
        assert_eq!(sandbox.times(), 3);
    }
}

#[test]
fn what_changes_afterwards_is_taken_as_of_one_moment() {
    let scratch = ScratchDir::new("moment").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    let at = |path: &str| upper.join(path);
    for file in ["one", "two", "gone", "moved"] {
        fs_err::write(at(file), "before").unwrap();
    }
    fs_err::write(at("large"), vec![1; 3 << 20]).unwrap();
    // Everything changes together, so a layer with some of it old is one that never was.
    let sandbox = Sandbox::new(|times| {
        if times > 1 {
            return;
        }
        for file in ["one", "two"] {
            fs_err::write(at(file), format!("after {times}")).unwrap();
        }
        fs_err::write(at("large"), vec![2; 2 << 20]).unwrap();
        fs_err::remove_file(at("gone")).unwrap();
        fs_err::rename(at("moved"), at("elsewhere")).unwrap();
        fs_err::write(at("new"), "new").unwrap();
    });
    let store = memory_store();
    let report = snapshot(&store, &with(&upper), &sandbox, &Silent).unwrap();
    assert_eq!((sandbox.times(), report.frozen.len()), (2, 2));
    let tree = Packed::load(&store, report.published.unwrap().digest, Vec::new()).tree();
    assert_eq!(
        tree.paths(),
        ["", "elsewhere", "large", "new", "one", "two"]
    );
    assert_eq!(tree.get("one").content(), b"after 1");
    assert_eq!(tree.get("two").content(), b"after 1");
    assert_eq!(tree.get("elsewhere").content(), b"before");
    assert!(tree.get("large").content() == vec![2; 2 << 20]);
    assert!(
        report
            .warnings
            .iter()
            .any(|line| line.starts_with("large changed after the sandbox went on")),
        "{:?}",
        report.warnings
    );
}

#[test]
fn a_file_that_never_rests_is_read_while_it_must() {
    let scratch = ScratchDir::new("never").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    let log = upper.join("log");
    fs_err::write(&log, "line 0\n").unwrap();
    fs_err::write(upper.join("rest"), vec![3; 1 << 20]).unwrap();
    let sandbox = Sandbox::new(|times| fs_err::write(&log, format!("line {times}\n")).unwrap());
    let store = memory_store();
    let report = snapshot(&store, &with(&upper), &sandbox, &Silent).unwrap();
    assert_eq!(sandbox.times(), 2);
    let stats = report.published.as_ref().unwrap().stats;
    // What did not change was not read again.
    assert_eq!(stats.raw_bytes, (1 << 20) + 7);
    let tree = Packed::load(&store, report.published.unwrap().digest, Vec::new()).tree();
    assert_eq!(tree.get("log").content(), b"line 1\n");
}

#[test]
fn whatever_fails_the_sandbox_goes_on() {
    let scratch = ScratchDir::new("fails").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    fs_err::write(upper.join("a"), vec![1; 100_000]).unwrap();
    // A store that fails at any of its calls.
    for nth in 1..60 {
        let inner = Arc::new(MemStore::new());
        let faulty = Arc::new(FaultStore::fail_nth(inner.clone(), nth, Fault::Error));
        let sandbox = Sandbox::new(|_| {});
        let result = snapshot(
            &LayerStore::new(faulty.clone()),
            &with(&upper),
            &sandbox,
            &Silent,
        );
        assert!(sandbox.times() <= 1);
        if !faulty.fired() {
            result.unwrap();
            break;
        }
    }
    // An upper that cannot be packed.
    rustix::fs::setxattr(
        upper.join("a"),
        "user.overlay.metacopy",
        b"",
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
    let mut damaged = with(&upper);
    damaged.overlay_xattrs = layerpack_packer::OverlayXattrs::User;
    let sandbox = Sandbox::new(|_| {});
    let store = memory_store();
    let error = snapshot(&store, &damaged, &sandbox, &Silent).unwrap_err();
    assert!(error.to_string().contains("metacopy"), "{error}");
    assert_eq!(sandbox.times(), 1);
    assert!(store.entries().unwrap().is_empty());
    // A sandbox that cannot be halted.
    struct Stuck;
    impl Halt for Stuck {
        fn halt(&self) -> Result<(), HaltError> {
            Err("a process is stuck".into())
        }
        fn resume(&self) -> Result<(), HaltError> {
            panic!("was not halted")
        }
    }
    let error = snapshot(&store, &with(&upper), &Stuck, &Silent).unwrap_err();
    assert!(matches!(error, PackError::Halt { .. }), "{error}");
    assert!(store.entries().unwrap().is_empty());
}

#[test]
fn touched_changed_and_longer_files_cost_what_is_new_of_them() {
    let scratch = ScratchDir::new("cheap").unwrap();
    let dir = scratch.mkdir("base").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    let bytes = Rng::new(1).bytes(24 << 20);
    let store = memory_store();
    fs_err::write(dir.join("large"), &bytes).unwrap();
    try_pack(&store, &options("base/b:1", Source::Dir(dir))).unwrap();
    let mut changed = bytes.clone();
    changed[10 << 20..(10 << 20) + 4096].fill(7);
    let longer = [&bytes[..], b"and one more line\n"].concat();
    let shorter = &bytes[..20 << 20];
    for (name, bytes, most) in [
        ("touched", &bytes[..], 64 << 10),
        ("changed", &changed, 700 << 10),
        ("longer", &longer, 400 << 10),
        ("shorter", shorter, 400 << 10),
    ] {
        let file = upper.join("large");
        fs_err::write(&file, bytes).unwrap();
        let reference = format!("diff/{name}:1").parse().unwrap();
        let report = pack_diff(
            &store,
            &PackDiffOptions::new(reference, upper.clone()),
            &Silent,
        )
        .unwrap();
        let stats = report.published.unwrap().stats;
        assert_eq!(stats.raw_bytes, bytes.len() as u64, "{name}");
        assert!(stats.new_bytes < most, "{name}: {}", stats.new_bytes);
    }
}
