//! Snapshots of real overlay uppers: what was there before is there after.

use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::treecmp::{Options, diff, snapshot};
use layerpack_fixtures::trees::{NastyOptions, RandomOptions, nasty, random};
use layerpack_fixtures::{ScratchDir, is_root, skip};
use layerpack_packer::{IdMapRange, OverlayXattrs, PackDiffOptions, Silent, pack_diff};
use rustix::fs::{CWD, FileType, Mode, XattrFlags, mknodat, setxattr};

use crate::privileged_kernel::{assert_same_trees, snapshot_upper, stack, unable};
use crate::support::{Packed, chain, memory_store, try_dir};

/// Runs `change` in an overlay on `base`, packs its upper, stacks that on the base and compares
/// the two merged trees.
fn round_trip(name: &str, base: impl FnOnce(&Path), change: impl FnOnce(&Path)) -> Packed {
    let scratch = ScratchDir::new(name).unwrap();
    let dir = scratch.mkdir("base").unwrap();
    base(&dir);
    let store = memory_store();
    let base = try_dir("base/b:1", &dir).unwrap();
    let before = stack(&[&base], &scratch, "before", Some("rw"));
    change(&before.merged);
    let packed = snapshot_upper(&store, &scratch.join("rw/upper"), 1);
    let after = stack(&[&base, &packed], &scratch, "after", None);
    assert_same_trees(&before.merged, &after.merged, &Options::default());
    packed
}

fn simple_base(dir: &Path) {
    for sub in ["a", "b", "c", "c/d"] {
        fs_err::create_dir(dir.join(sub)).unwrap();
        for file in ["1", "2", "3"] {
            fs_err::write(dir.join(sub).join(file), format!("{sub}/{file}")).unwrap();
        }
    }
    fs_err::hard_link(dir.join("a/1"), dir.join("a/1-link")).unwrap();
    symlink("a/1", dir.join("symlink")).unwrap();
    fs_err::write(dir.join("big"), vec![b'x'; 1 << 20]).unwrap();
}

#[test]
fn privileged_every_kind_of_change() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let packed = round_trip("kinds", simple_base, |root| {
        let at = |path: &str| root.join(path);
        // Removed; made again; emptied.
        fs_err::remove_file(at("a/2")).unwrap();
        fs_err::remove_dir_all(at("b")).unwrap();
        fs_err::create_dir(at("b")).unwrap();
        fs_err::write(at("b/new"), "fresh").unwrap();
        fs_err::remove_dir_all(at("c/d")).unwrap();
        // Type changes both ways.
        fs_err::remove_file(at("a/3")).unwrap();
        fs_err::create_dir(at("a/3")).unwrap();
        fs_err::write(at("a/3/in"), "x").unwrap();
        fs_err::create_dir(at("tmp")).unwrap();
        fs_err::write(at("tmp/f"), "x").unwrap();
        fs_err::remove_dir_all(at("tmp")).unwrap();
        fs_err::write(at("c/d"), "now a file").unwrap();
        // Same size, same time, other bytes.
        let time = fs_err::metadata(at("c/1")).unwrap().modified().unwrap();
        fs_err::write(at("c/1"), "C/1").unwrap();
        std::fs::File::options()
            .write(true)
            .open(at("c/1"))
            .unwrap()
            .set_modified(time)
            .unwrap();
        // Only metadata.
        fs_err::set_permissions(at("c/2"), PermissionsExt::from_mode(0o4711)).unwrap();
        setxattr(at("c/3"), "user.mark", b"1", XattrFlags::empty()).unwrap();
        // Links, sparse, sockets, pipes, devices.
        fs_err::write(at("l1"), "links").unwrap();
        fs_err::hard_link(at("l1"), at("a/l2")).unwrap();
        let sparse = fs_err::File::create(at("sparse")).unwrap();
        sparse.set_len(1 << 30).unwrap();
        std::os::unix::fs::FileExt::write_at(sparse.file(), b"middle", 500 << 20).unwrap();
        for (name, kind, device) in [
            ("fifo", FileType::Fifo, 0),
            ("socket", FileType::Socket, 0),
            ("null", FileType::CharacterDevice, rustix::fs::makedev(1, 3)),
            ("block", FileType::BlockDevice, rustix::fs::makedev(7, 300)),
        ] {
            mknodat(CWD, at(name), kind, Mode::from_raw_mode(0o640), device).unwrap();
        }
        std::os::unix::fs::chown(at("fifo"), Some(70_000), Some(3_000_000_000)).unwrap();
        fs_err::write(
            root.join(std::ffi::OsStr::from_bytes(b"not-utf8-\xff")),
            "x",
        )
        .unwrap();
        fs_err::remove_file(at("symlink")).unwrap();
        symlink("/elsewhere", at("symlink")).unwrap();
        // Appended to.
        use std::io::Write as _;
        let mut big = fs_err::OpenOptions::new()
            .append(true)
            .open(at("big"))
            .unwrap();
        big.write_all(b"tail").unwrap();
        // A directory of the lower moved: EXDEV, so it is copied.
        assert!(fs_err::rename(at("c"), at("moved")).is_err());
    });
    let tree = packed.tree();
    assert!(tree.is_whiteout("a/2") && tree.is_opaque("b"));
    assert_eq!(tree.links("l1"), ["a/l2", "l1"]);
    assert!(tree.get("sparse").stored() < 1 << 17);
    for node in tree.nodes.values() {
        let marks = node
            .xattrs
            .iter()
            .filter(|(name, _)| name.starts_with(b"trusted.overlay."));
        assert!(
            marks
                .clone()
                .all(|(name, value)| name == b"trusted.overlay.opaque"
                    || (name == b"trusted.overlay.origin" && value.is_empty())),
            "{:?}",
            marks.collect::<Vec<_>>()
        );
    }
    assert!(tree.implicit.is_empty());
}

#[test]
fn privileged_unlinked_open_files_are_not_packed() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let mut open = Vec::new();
    let packed = round_trip("unlinked", simple_base, |root| {
        let path = root.join("open");
        open.push(fs_err::File::create(&path).unwrap());
        fs_err::write(&path, "still open").unwrap();
        open.push(
            fs_err::OpenOptions::new()
                .append(true)
                .open(root.join("a/1"))
                .unwrap(),
        );
        fs_err::remove_file(root.join("a/1")).unwrap();
        fs_err::remove_file(path).unwrap();
    });
    assert_eq!(packed.tree().paths(), ["", "a", "a/1"]);
    drop(open);
}

#[test]
fn privileged_the_nasty_tree_made_in_a_sandbox() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    round_trip(
        "nasty-upper",
        |_| {},
        |root| {
            nasty(
                root,
                &NastyOptions {
                    big_directory: 200,
                    ..NastyOptions::default()
                },
            )
            .unwrap();
        },
    );
}

/// All paths below a directory, in order.
fn paths(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut todo = vec![root.to_owned()];
    while let Some(dir) = todo.pop() {
        let mut below: Vec<_> = fs_err::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        below.sort();
        for path in below {
            if path.symlink_metadata().unwrap().is_dir() {
                todo.push(path.clone());
            }
            found.push(path);
        }
    }
    found
}

/// One random operation; what the filesystem refuses is fine.
fn operate(rng: &mut Rng, root: &Path, number: usize) {
    let all = paths(root);
    let some = |rng: &mut Rng| rng.pick(&all).cloned().unwrap_or_else(|| root.join("none"));
    let directory = |rng: &mut Rng| {
        let dirs: Vec<_> = all
            .iter()
            .filter(|path| path.symlink_metadata().unwrap().is_dir())
            .collect();
        rng.pick(&dirs)
            .map_or_else(|| root.to_owned(), |path| (*path).clone())
    };
    let fresh = directory(rng).join(format!("new-{number}"));
    let victim = some(rng);
    let meta = victim.symlink_metadata();
    let is_dir = meta.as_ref().is_ok_and(std::fs::Metadata::is_dir);
    let is_file = meta.as_ref().is_ok_and(|meta| meta.is_file());
    let _ = match rng.below(16) {
        0 | 1 => {
            let len = rng.below_usize(20_000);
            fs_err::write(&fresh, rng.bytes(len))
        }
        2 => fs_err::create_dir(&fresh),
        3 if is_dir => fs_err::remove_dir_all(&victim),
        3 | 4 => fs_err::remove_file(&victim),
        5 => {
            let target = some(rng);
            // Never a directory onto its own inside.
            fs_err::rename(&victim, if rng.one_in(2) { &target } else { &fresh })
        }
        6 => fs_err::hard_link(&victim, &fresh),
        7 if !victim.is_symlink() => fs_err::set_permissions(
            &victim,
            PermissionsExt::from_mode(0o600 + rng.below(128) as u32 + u32::from(is_dir) * 0o100),
        ),
        8 if is_file => {
            use std::io::Write as _;
            fs_err::OpenOptions::new()
                .append(true)
                .open(&victim)
                .and_then(|mut file| file.write_all(b"appended"))
        }
        9 if is_file => fs_err::OpenOptions::new()
            .write(true)
            .open(&victim)
            .and_then(|file| file.set_len(rng.below(200_000))),
        10 => symlink("some/where", &fresh),
        11 => std::os::unix::fs::lchown(&victim, Some(rng.below(5) as u32 * 1000), Some(7)),
        12 if is_dir => {
            // Removed and made again.
            fs_err::remove_dir_all(&victim).and_then(|()| fs_err::create_dir(&victim))
        }
        13 if is_file => {
            // Replaced by a directory.
            fs_err::remove_file(&victim).and_then(|()| fs_err::create_dir(&victim))
        }
        14 if !victim.is_symlink() => {
            let name = format!("user.n{}", rng.below(3));
            setxattr(&victim, name, b"value", XattrFlags::empty()).map_err(Into::into)
        }
        _ => {
            mknodat(CWD, &fresh, FileType::Fifo, Mode::from_raw_mode(0o644), 0).map_err(Into::into)
        }
    };
}

#[test]
fn privileged_random_operations_come_back() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    for seed in layerpack_fixtures::trees::seeds() {
        round_trip(
            "operations",
            |dir| {
                random(
                    dir,
                    &RandomOptions {
                        entries: 80,
                        max_file: 50_000,
                        ..RandomOptions::new(seed)
                    },
                )
                .unwrap()
            },
            |root| {
                let mut rng = Rng::new(1000 + seed);
                for number in 0..120 {
                    operate(&mut rng, root, number);
                }
            },
        );
    }
}

/// A snapshot of a sandbox that was made from a snapshot holds only what is new, and chains of
/// them come back whole.
#[test]
fn privileged_chains_of_snapshots() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let scratch = ScratchDir::new("chain").unwrap();
    let dir = scratch.mkdir("base").unwrap();
    random(
        &dir,
        &RandomOptions {
            entries: 60,
            max_file: 20_000,
            ..RandomOptions::new(9)
        },
    )
    .unwrap();
    let store = memory_store();
    let mut layers = vec![try_dir("base/b:1", &dir).unwrap()];
    let mut rng = Rng::new(4242);
    for round in 0..5 {
        let name = format!("round-{round}");
        let before = stack(
            &layers.iter().collect::<Vec<_>>(),
            &scratch,
            &name,
            Some(&name),
        );
        for number in 0..30 {
            operate(&mut rng, &before.merged, round * 100 + number);
        }
        let packed = snapshot_upper(&store, &scratch.join(&name).join("upper"), round as u32);
        layers.push(packed);
        let after = stack(
            &layers.iter().collect::<Vec<_>>(),
            &scratch,
            &format!("{name}-after"),
            None,
        );
        assert_same_trees(&before.merged, &after.merged, &Options::default());
    }
}

fn mark(path: &Path, name: &str, value: &[u8]) {
    setxattr(path, name, value, XattrFlags::empty()).unwrap();
}

fn pack(upper: &Path, change: impl FnOnce(&mut PackDiffOptions)) -> Result<Packed, String> {
    let store = memory_store();
    let mut options = PackDiffOptions::new("diff/d:1".parse().unwrap(), upper.to_owned());
    change(&mut options);
    let report = pack_diff(&store, &options, &Silent).map_err(|error| chain(&error))?;
    Ok(Packed::load(
        &store,
        report.published.unwrap().digest,
        report.warnings,
    ))
}

#[test]
fn privileged_marks_of_both_kinds() {
    if !is_root() {
        skip!("needs root to set trusted attributes");
    }
    for (kind, prefix, other) in [
        (OverlayXattrs::Trusted, "trusted.overlay.", "user.overlay."),
        (OverlayXattrs::User, "user.overlay.", "trusted.overlay."),
    ] {
        let scratch = ScratchDir::new("marks").unwrap();
        let upper = scratch.mkdir("upper").unwrap();
        let dir = |name: &str| scratch.mkdir(format!("upper/{name}")).unwrap();
        let file =
            |name: &str, content: &str| scratch.write(format!("upper/{name}"), content).unwrap();
        let own = |name: &str| format!("{prefix}{name}");
        mark(&dir("opaque"), &own("opaque"), b"y");
        let holder = dir("holder");
        mark(&holder, &own("opaque"), b"x");
        mark(&file("holder/gone", ""), &own("whiteout"), b"y");
        // Not empty, so no whiteout.
        mark(&file("holder/full", "x"), &own("whiteout"), b"y");
        mknodat(
            CWD,
            upper.join("device"),
            FileType::CharacterDevice,
            Mode::empty(),
            0,
        )
        .unwrap();
        std::os::unix::fs::chown(upper.join("device"), Some(5), Some(5)).unwrap();
        let noted = file("noted", "x");
        for note in [
            "origin", "impure", "nlink", "uuid", "upper", "protattr", "verity",
        ] {
            mark(&noted, &own(note), b"\0note");
        }
        // Of the other kind of mount: means nothing here, and must not come to mean something.
        mark(&dir("foreign"), &format!("{other}opaque"), b"y");
        let packed = pack(&upper, |options| options.overlay_xattrs = kind).unwrap();
        let tree = packed.tree();
        assert!(
            tree.is_opaque("opaque") && !tree.is_opaque("holder") && !tree.is_opaque("foreign")
        );
        assert!(
            tree.is_whiteout("holder/gone")
                && !tree.is_whiteout("holder/full")
                && tree.is_whiteout("device")
        );
        assert_eq!((tree.get("device").uid, tree.get("device").mode), (0, 0));
        for path in [
            "noted",
            "holder",
            "holder/full",
            "holder/gone",
            "device",
            "foreign",
        ] {
            // Only what says that a directory has whiteouts.
            let mut xattrs = tree.get(path).xattrs.clone();
            let mark = xattrs.remove(&b"trusted.overlay.origin"[..]);
            assert_eq!(mark.is_some(), path == "holder", "{path}");
            assert!(mark.is_none_or(|value| value.is_empty()));
            assert!(xattrs.is_empty(), "{path}: {xattrs:?}");
        }
        assert_eq!(packed.warnings.len(), 1, "{:?}", packed.warnings);
        assert!(packed.warnings[0].contains("foreign"));

        // Whose contents are somewhere else.
        mark(&noted, &own("metacopy"), b"");
        let message = pack(&upper, |options| options.overlay_xattrs = kind)
            .err()
            .unwrap();
        assert!(
            message.contains("noted") && message.contains("metacopy=off"),
            "{message}"
        );
        fs_err::remove_file(&noted).unwrap();
        mark(&dir("redirected"), &own("redirect"), b"/old");
        let message = pack(&upper, |options| options.overlay_xattrs = kind)
            .err()
            .unwrap();
        assert!(
            message.contains("redirected") && message.contains("redirect_dir=nofollow"),
            "{message}"
        );
    }
}

#[test]
fn privileged_ids_are_mapped_back_everywhere() {
    if !is_root() {
        skip!("needs root to give files away");
    }
    let scratch = ScratchDir::new("ids").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    let give =
        |path: &Path, uid, gid| std::os::unix::fs::lchown(path, Some(uid), Some(gid)).unwrap();
    give(&upper, 1 << 20, 1 << 20);
    let file = scratch.write("upper/file", "x").unwrap();
    give(&file, (1 << 20) + 1000, (1 << 20) + 100);
    let acl =
        |user, group| layerpack_fixtures::trees::acl_xattr(6, &[(user, 4)], 4, &[(group, 4)], 4);
    mark(
        &file,
        "system.posix_acl_access",
        &acl((1 << 20) + 7, (1 << 20) + 8),
    );
    let mut capability = layerpack_fixtures::trees::capability_xattr(1 << 10, 0, true);
    let plain = capability.clone();
    // Revision 3 with the sandbox's root.
    capability[3] = 3;
    capability.extend_from_slice(&(1u32 << 20).to_le_bytes());
    mark(&file, "security.capability", &capability);
    symlink("x", upper.join("link")).unwrap();
    give(&upper.join("link"), (1 << 20) + 65_535, 1 << 20);
    // Whiteouts are nobody's.
    mknodat(
        CWD,
        upper.join("gone"),
        FileType::CharacterDevice,
        Mode::empty(),
        0,
    )
    .unwrap();
    let range = IdMapRange {
        inside: 0,
        outside: 1 << 20,
        count: 65_536,
    };
    let map = |options: &mut PackDiffOptions| {
        options.uid_map = vec![range];
        options.gid_map = vec![range];
    };
    let tree = pack(&upper, map).unwrap().tree();
    assert_eq!(
        (tree.get("").uid, tree.get("file").uid, tree.get("file").gid),
        (0, 1000, 100)
    );
    assert_eq!(tree.get("link").uid, 65_535);
    assert_eq!(
        tree.get("file").xattrs[&b"system.posix_acl_access"[..]],
        acl(7, 8)
    );
    assert_eq!(tree.get("file").xattrs[&b"security.capability"[..]], plain);
    assert!(tree.is_whiteout("gone"));
    // Outside of the map.
    give(&upper.join("link"), 12, 1 << 20);
    let message = pack(&upper, map).err().unwrap();
    assert!(
        message.contains("link") && message.contains("12"),
        "{message}"
    );
}

/// The real thing: an id-mapped lower, an upper of shifted ids, a map to get back.
#[test]
fn privileged_an_idmapped_sandbox_comes_back() {
    if let Some(reason) = unable() {
        skip!("{reason}");
    }
    let shift = 1 << 20;
    let scratch = ScratchDir::new("idmapped").unwrap();
    let dir = scratch.mkdir("base").unwrap();
    simple_base(&dir);
    std::os::unix::fs::chown(dir.join("a/1"), Some(33), Some(44)).unwrap();
    let base = try_dir("base/b:1", &dir).unwrap();
    let lower = stack(&[&base], &scratch, "lower", None);
    let map = layerpack_sys::ns::IdRange {
        inside: 0,
        outside: shift,
        count: 65_536,
    };
    let userns = match layerpack_sys::ns::userns_fd(&[map], &[map]) {
        Ok(userns) => userns,
        Err(error) => skip!("no user namespaces: {error}"),
    };
    let clone = layerpack_sys::mount::bind(&lower.merged).unwrap();
    if let Err(error) = layerpack_sys::mount::set_idmap(
        std::os::fd::AsFd::as_fd(&clone),
        std::os::fd::AsFd::as_fd(&userns),
    ) {
        skip!("no id-mapped EROFS: {error}");
    }
    let mapped = scratch.mkdir("mapped").unwrap();
    layerpack_sys::mount::attach(std::os::fd::AsFd::as_fd(&clone), &mapped).unwrap();
    let _mapped = layerpack_fixtures::MountGuard::new(&mapped);
    let (upper, work) = (
        scratch.mkdir("rw/upper").unwrap(),
        scratch.mkdir("rw/work").unwrap(),
    );
    std::os::unix::fs::chown(&upper, Some(shift), Some(shift)).unwrap();
    let merged = scratch.mkdir("merged").unwrap();
    let _overlay =
        layerpack_fixtures::MountGuard::overlay(&[&mapped], Some((&upper, &work)), &merged)
            .unwrap();
    assert_eq!(
        fs_err::metadata(merged.join("a/1")).unwrap().uid(),
        shift + 33
    );
    // As the sandbox's root would leave it.
    fs_err::write(merged.join("a/1"), "changed").unwrap();
    fs_err::remove_file(merged.join("a/2")).unwrap();
    fs_err::remove_dir_all(merged.join("b")).unwrap();
    fs_err::create_dir(merged.join("b")).unwrap();
    fs_err::write(merged.join("b/own"), "mine").unwrap();
    for path in ["b", "b/own"] {
        std::os::unix::fs::chown(merged.join(path), Some(shift + 1000), Some(shift + 1000))
            .unwrap();
    }
    let range = IdMapRange {
        inside: 0,
        outside: shift,
        count: 65_536,
    };
    let packed = pack(&upper, |options| {
        options.uid_map = vec![range];
        options.gid_map = vec![range];
    })
    .unwrap();
    assert_eq!(
        (packed.tree().get("a/1").uid, packed.tree().get("b/own").uid),
        (33, 1000)
    );
    let after = stack(&[&base, &packed], &scratch, "after", None);
    let shifted = Options {
        id_offset: 0u32.wrapping_sub(shift),
        ..Options::default()
    };
    let found = diff(
        &snapshot(&merged, &shifted).unwrap(),
        &snapshot(&after.merged, &Options::default()).unwrap(),
    );
    assert!(found.is_empty(), "{found:#?}");
}
