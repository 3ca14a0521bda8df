//! Directories as sources: errors, changes under way, links that lead out.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use layerpack_fixtures::{ScratchDir, is_root};
use layerpack_packer::{PackDiffOptions, PackError, Progress, Silent, Source, build, pack_diff};

use crate::support::{Packed, chain, memory_store, options, try_dir, try_pack};

/// Calls back at the start of a phase, and at every report of bytes.
struct Hook<F: Fn(&str) + Sync>(F);

impl<F: Fn(&str) + Sync> Progress for Hook<F> {
    fn phase(&self, name: &str) {
        (self.0)(name);
    }

    fn bytes(&self, _n: u64) {
        (self.0)("bytes");
    }
}

fn change(dir: &Path, hook: impl Fn(&str) + Sync) -> PackError {
    let store = memory_store();
    let with = options("base/t:1", Source::Dir(dir.to_owned()));
    let error = build(&store, &with, &Hook(hook)).unwrap_err();
    assert!(store.list().unwrap().is_empty(), "published");
    error
}

#[test]
fn what_changes_between_scan_and_reading_is_an_error() {
    let scratch = ScratchDir::new("change").unwrap();
    let dir = scratch.mkdir("tree/sub").unwrap();
    let outside = scratch.write("outside", "secret").unwrap();
    scratch.mkdir("elsewhere").unwrap();
    scratch.write("elsewhere/victim", "secret").unwrap();
    let victim = dir.join("victim");
    let changes: [(&str, &(dyn Fn() + Sync)); 5] = [
        ("size", &|| {
            fs_err::write(&victim, "longer than it was").unwrap()
        }),
        ("time", &|| fs_err::write(&victim, "short").unwrap()),
        ("removed", &|| fs_err::remove_file(&victim).unwrap()),
        ("another", &|| {
            fs_err::remove_file(&victim).unwrap();
            std::os::unix::fs::symlink(&outside, &victim).unwrap();
        }),
        ("directory", &|| {
            fs_err::remove_dir_all(&dir).unwrap();
            std::os::unix::fs::symlink(scratch.join("elsewhere"), &dir).unwrap();
        }),
    ];
    for (part, change_it) in changes {
        // Whatever the last round left.
        let _ = fs_err::remove_file(&dir);
        fs_err::create_dir_all(&dir).unwrap();
        let _ = fs_err::remove_file(&victim);
        fs_err::write(&victim, "short").unwrap();
        // Past the resolution of change times.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let error = change(&scratch.join("tree"), |phase| {
            if phase == "read" {
                change_it();
            }
        });
        let text = error.to_string();
        assert!(matches!(error, PackError::Changed { .. }), "{part}: {text}");
        assert!(
            text.contains("sub") && text.contains(part),
            "{part}: {text}"
        );
    }
}

#[test]
fn what_changes_while_it_is_read_is_an_error() {
    let scratch = ScratchDir::new("during").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    let file = scratch.write("tree/big", vec![7; 4 << 20]).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    let reports = AtomicU32::new(0);
    let error = change(&dir, |event| {
        if event == "bytes" && reports.fetch_add(1, Ordering::Relaxed) == 1 {
            // Same size, and the time put back: the change time tells.
            let time = fs_err::metadata(&file).unwrap().modified().unwrap();
            let mut data = vec![7; 4 << 20];
            data[3 << 20] = 8;
            fs_err::write(&file, data).unwrap();
            std::fs::OpenOptions::new()
                .write(true)
                .open(&file)
                .unwrap()
                .set_modified(time)
                .unwrap();
        }
    });
    assert!(matches!(error, PackError::Changed { .. }), "{error}");
    assert!(error.to_string().contains("big"));
}

#[test]
fn unreadable_things_are_named() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = ScratchDir::new("unreadable").unwrap();
    let mut cases: Vec<(&str, PathBuf)> = Vec::new();
    for name in ["file", "dir"] {
        let tree = scratch.mkdir(format!("{name}-tree")).unwrap();
        let victim = tree.join(format!("{name}-closed"));
        match name {
            "file" => fs_err::write(&victim, "x").unwrap(),
            _ => fs_err::create_dir(&victim).unwrap(),
        }
        fs_err::set_permissions(&victim, PermissionsExt::from_mode(0o000)).unwrap();
        cases.push((name, tree));
    }
    // Root reads everything; a thread can be somebody else.
    let results = std::thread::spawn(move || {
        if is_root() {
            let nobody = rustix::process::Uid::from_raw(65_534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        }
        // What is left out is not even opened.
        for (_, tree) in &cases {
            let mut with = options("base/t:1", Source::Dir(tree.clone()));
            with.excludes = vec!["*-closed".to_owned()];
            let tree = try_pack(&memory_store(), &with).unwrap().tree();
            assert_eq!(tree.paths(), [""]);
        }
        let results = cases
            .iter()
            .map(|(name, tree)| (*name, try_dir("base/t:1", tree).err().unwrap()));
        results
            .map(|(name, error)| (name, chain(&error)))
            .collect::<Vec<_>>()
    })
    .join()
    .unwrap();
    for (name, message) in results {
        assert!(
            message.contains(&format!("{name}-closed")) && message.contains("denied"),
            "{message}"
        );
    }
}

#[test]
fn sources_that_are_not_there_or_not_directories() {
    let scratch = ScratchDir::new("source").unwrap();
    let file = scratch.write("file", "x").unwrap();
    for (path, part) in [
        (scratch.join("missing"), "No such file"),
        (file, "not a directory"),
    ] {
        let message = chain(&try_dir("base/t:1", &path).err().unwrap());
        assert!(
            message.contains(&path.display().to_string()) && message.contains(part),
            "{message}"
        );
    }
    for bad in ["", "dir:", "/plain", "ftp:x", "dir"] {
        let message = bad.parse::<Source>().unwrap_err().to_string();
        assert!(message.contains("dir:PATH"), "{message}");
    }
    assert_eq!(
        "dir:a:b".parse::<Source>().unwrap(),
        Source::Dir("a:b".into())
    );
    assert_eq!(
        "tar:/x".parse::<Source>().unwrap(),
        Source::Tar("/x".into())
    );
}

#[test]
fn links_are_kept_as_text_and_the_root_may_be_one() {
    let scratch = ScratchDir::new("links").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    let secret = scratch.write("secret", "do not pack").unwrap();
    std::os::unix::fs::symlink(&secret, dir.join("out")).unwrap();
    std::os::unix::fs::symlink("..", dir.join("up")).unwrap();
    std::os::unix::fs::symlink("loop", dir.join("loop")).unwrap();
    std::os::unix::fs::symlink(&dir, scratch.join("entry")).unwrap();
    let tree = try_dir("base/t:1", &scratch.join("entry")).unwrap().tree();
    assert_eq!(tree.paths(), ["", "loop", "out", "up"]);
    assert_eq!(tree.get("up").target, b"..");
}

#[test]
fn implicit_and_own_roots() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = ScratchDir::new("roots").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    scratch.mkdir("tree/sub").unwrap();
    fs_err::set_permissions(&dir, PermissionsExt::from_mode(0o2750)).unwrap();
    let tree = try_dir("base/t:1", &dir).unwrap().tree();
    assert_eq!((tree.get("").mode, tree.implicit.len()), (0o2750, 0));
    let tree = try_dir("workspace/t:1", &dir).unwrap().tree();
    assert_eq!(
        (tree.get("").mode, tree.implicit.as_slice()),
        (0o755, &[b"".to_vec()][..])
    );
    let mut with = options("workspace/t:1", Source::Dir(dir));
    with.at = Some(b"srv/w".to_vec());
    let tree = try_pack(&memory_store(), &with).unwrap().tree();
    assert_eq!(tree.implicit, [&b""[..], b"srv", b"srv/w"]);
    assert_eq!(tree.get("srv/w").mode, 0o2750);
    assert!(!tree.is_implicit("srv/w/sub"));
}

#[test]
fn attributes_follow_the_allow_list() {
    let scratch = ScratchDir::new("xattr").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    let file = scratch.write("tree/f", "x").unwrap();
    for name in ["user.keep", "user.overlay.opaque", "user.drop"] {
        rustix::fs::setxattr(&file, name, b"1", rustix::fs::XattrFlags::empty()).unwrap();
    }
    let mut with = options("base/t:1", Source::Dir(dir));
    with.xattrs = vec!["user.k*".to_owned(), "user.overlay.*".to_owned()];
    let packed = try_pack(&memory_store(), &with).unwrap();
    let tree = packed.tree();
    let names: Vec<_> = tree.get("f").xattrs.keys().collect();
    assert_eq!(names, [b"user.keep"]);
    assert!(packed.warnings[0].contains("user.overlay.opaque"));
    assert_eq!(
        packed.warnings[1],
        "dropped attribute user.drop of 1 entries; to keep it, build with --xattr user.drop"
    );
    assert_eq!(packed.warnings.len(), 2, "{:?}", packed.warnings);
}

#[test]
fn what_is_not_kept_is_told_once_for_each_name() {
    let scratch = ScratchDir::new("xattr-count").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    for index in 0..150 {
        let file = scratch.write(format!("tree/f{index}"), "x").unwrap();
        rustix::fs::setxattr(&file, "user.t", b"1", rustix::fs::XattrFlags::empty()).unwrap();
    }
    let mut with = options("base/t:1", Source::Dir(dir));
    with.xattrs = vec!["security.capability".to_owned()];
    with.excludes = vec!["f149".to_owned()];
    let packed = try_pack(&memory_store(), &with).unwrap();
    assert_eq!(
        packed.warnings,
        ["dropped attribute user.t of 149 entries; to keep it, build with --xattr user.t"]
    );
}

#[test]
fn excludes_leave_out_whole_directories_unread() {
    let scratch = ScratchDir::new("exclude").unwrap();
    let dir = scratch.mkdir("tree").unwrap();
    for path in ["tree/.git/objects", "tree/src/.git", "tree/target/debug"] {
        scratch.mkdir(path).unwrap();
        scratch.write(format!("{path}/f"), "x").unwrap();
    }
    scratch.write("tree/src/a.o", "x").unwrap();
    let mut with = options("base/t:1", Source::Dir(dir));
    with.excludes = vec![
        "/.git".to_owned(),
        "target/".to_owned(),
        "src/*.o".to_owned(),
    ];
    assert_eq!(
        try_pack(&memory_store(), &with).unwrap().tree().paths(),
        ["", "src", "src/.git", "src/.git/f"]
    );
}

fn diff(dir: &Path, progress: &dyn Progress) -> Result<Packed, PackError> {
    let store = memory_store();
    let with = PackDiffOptions::new("diff/d:1".parse().unwrap(), dir.to_owned());
    let report = pack_diff(&store, &with, progress)?;
    Ok(Packed::load(
        &store,
        report.published.unwrap().digest,
        report.warnings,
    ))
}

#[test]
fn a_snapshot_takes_a_changed_file_as_it_is_now() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = ScratchDir::new("retry").unwrap();
    let dir = scratch.mkdir("upper").unwrap();
    let small = scratch.write("upper/small", "before").unwrap();
    let big = scratch.write("upper/big", vec![1; 2 << 20]).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    let hook = Hook(|event: &str| {
        if event == "read" {
            fs_err::write(&small, "after, and longer").unwrap();
            fs_err::set_permissions(&small, PermissionsExt::from_mode(0o600)).unwrap();
            fs_err::write(&big, vec![2; 1 << 20]).unwrap();
        }
    });
    let tree = diff(&dir, &hook).unwrap().tree();
    assert_eq!(
        (tree.get("small").content(), tree.get("small").mode),
        (b"after, and longer".to_vec(), 0o600)
    );
    assert!(tree.get("big").content() == vec![2; 1 << 20]);
}

#[test]
fn a_snapshot_of_a_file_that_never_rests_is_an_error() {
    let scratch = ScratchDir::new("restless").unwrap();
    let dir = scratch.mkdir("upper").unwrap();
    let file = scratch.write("upper/log", vec![1; 2 << 20]).unwrap();
    let hook = Hook(|event: &str| {
        if event == "bytes" {
            use std::io::Write as _;
            let mut open = fs_err::OpenOptions::new().append(true).open(&file).unwrap();
            open.write_all(b"line\n").unwrap();
        }
    });
    let error = diff(&dir, &hook).err().unwrap();
    assert!(
        matches!(error, PackError::Changed { .. }) && error.to_string().contains("log"),
        "{error}"
    );
    // And gone is gone.
    let hook = Hook(|event: &str| {
        if event == "read" {
            fs_err::remove_file(&file).unwrap();
        }
    });
    assert_eq!(diff(&dir, &hook).unwrap().tree().paths(), [""]);
}

#[test]
fn an_empty_upper_is_a_layer() {
    let scratch = ScratchDir::new("empty").unwrap();
    let tree = diff(&scratch.mkdir("upper").unwrap(), &Silent)
        .unwrap()
        .tree();
    assert_eq!(tree.paths(), [""]);
    assert!(tree.implicit.is_empty());
    let with = PackDiffOptions::new("base/d:1".parse().unwrap(), scratch.join("upper"));
    let message = pack_diff(&memory_store(), &with, &Silent)
        .unwrap_err()
        .to_string();
    assert!(message.contains("diff"), "{message}");
}
