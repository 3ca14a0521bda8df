//! A workspace put at a path, on bases that disagree about the directories on the way to it.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use layerpack_fixtures::{MountGuard, is_root, skip};
use support::Node;

/// Mode, owner, group, time and one attribute.
type Look = (u32, u32, u32, i64, Option<Vec<u8>>);

fn look(path: &Path) -> Look {
    let metadata = fs_err::symlink_metadata(path).unwrap();
    let mut value = vec![0; 64];
    let attribute = rustix::fs::lgetxattr(path, "user.of", &mut value).ok();
    (
        metadata.mode() & 0o7777,
        metadata.uid(),
        metadata.gid(),
        metadata.mtime(),
        attribute.map(|len| value[..len].to_vec()),
    )
}

fn shape(path: &Path, mode: u32, owner: u32, time: i64, attribute: &str) {
    std::os::unix::fs::chown(path, Some(owner), Some(owner + 1)).unwrap();
    fs_err::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::lsetxattr(path, "user.of", attribute.as_bytes(), flags).unwrap();
    let at = rustix::fs::Timespec {
        tv_sec: time,
        tv_nsec: 0,
    };
    let times = rustix::fs::Timestamps {
        last_access: at,
        last_modification: at,
    };
    let no_follow = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, no_follow).unwrap();
}

#[test]
fn privileged_a_workspace_shows_the_directories_of_each_base() {
    if !is_root() {
        skip!("needs root to mount");
    }
    let node = Node::new("at");
    let work = node.scratch.mkdir("work").unwrap();
    fs_err::create_dir(work.join("src")).unwrap();
    fs_err::write(work.join("src/main"), "code").unwrap();
    shape(&work.join("src"), 0o750, 77, 700_000_000, "workspace");
    shape(&work, 0o702, 55, 500_000_000, "root of the source");
    node.build("workspace/w:1", &work, &["--at", "/srv/team/project"]);
    // What each base has of the way: all of it, a part, nothing.
    let bases = [
        ("all", &["", "srv", "srv/team", "srv/team/project"][..]),
        ("part", &["", "srv"]),
        ("none", &[""]),
    ];
    for (index, (name, directories)) in (0u32..).zip(bases) {
        let base = node.scratch.mkdir(format!("base-{name}")).unwrap();
        for dir in directories {
            fs_err::create_dir_all(base.join(dir)).unwrap();
        }
        for (depth, dir) in directories.iter().enumerate().rev() {
            let depth = u32::try_from(depth).unwrap();
            let mode = 0o711 + 0o10 * index + depth % 2 * 0o1000;
            shape(
                &base.join(dir),
                mode,
                100 * (index + 1) + depth,
                i64::from(1000 + depth),
                name,
            );
        }
        node.build(&format!("base/{name}:1"), &base, &[]);
        let point = node.scratch.mkdir(format!("mnt-{name}")).unwrap();
        let reference = format!("base/{name}:1");
        node.ok([
            "mount",
            &reference,
            "workspace/w:1",
            point.to_str().unwrap(),
        ]);
        let guard = MountGuard::new(&point);
        for dir in directories {
            assert_eq!(
                look(&point.join(dir)),
                look(&base.join(dir)),
                "{name}: {dir:?}"
            );
        }
        // Beyond what the base has, nobody defines a directory: plain ones, the last one as the
        // source's root was.
        if directories.len() < 4 {
            assert_eq!(
                look(&point.join("srv/team")),
                (0o755, 0, 0, 0, None),
                "{name}"
            );
            let shown = look(&point.join("srv/team/project"));
            assert_eq!(shown, look(&work), "{name}");
        }
        assert_eq!(
            look(&point.join("srv/team/project/src")),
            look(&work.join("src"))
        );
        let main = point.join("srv/team/project/src/main");
        assert_eq!(fs_err::read_to_string(main).unwrap(), "code");
        node.ok(["umount", point.to_str().unwrap()]);
        drop(guard);
    }
    node.ok(["daemon", "stop"]);
}
