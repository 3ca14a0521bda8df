//! Mounts that the other crates build on, tried on the running kernel.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use layerpack_fixtures::{ScratchDir, find_tool, is_root, skip};
use layerpack_sys::mount::{self, ErofsOptions, Layer, MountFlags, OverlaySpec};
use layerpack_sys::ns::{IdRange, userns_fd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

const BASE: u32 = 1 << 20;

fn idmap() -> OwnedFd {
    let map = [IdRange {
        inside: 0,
        outside: BASE,
        count: 65536,
    }];
    userns_fd(&map, &map).unwrap()
}

/// Opens a path below a (detached) mount.
fn open_in(mount: &OwnedFd, path: &str) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(mount, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

fn read_in(mount: &OwnedFd, path: &str) -> Vec<u8> {
    let fd = open_in(mount, path).unwrap();
    let mut buffer = vec![0; 4096];
    let n = rustix::io::read(&fd, &mut buffer).unwrap();
    buffer.truncate(n);
    buffer
}

/// Unmounts when dropped.
struct Attached<'a>(&'a Path);

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        let _ = mount::unmount(self.0, true);
    }
}

fn image(dir: &Path) -> bool {
    let Some(mkfs) = find_tool("mkfs.erofs") else {
        return false;
    };
    let tree = dir.join("tree");
    fs_err::create_dir_all(tree.join("sub")).unwrap();
    fs_err::write(tree.join("sub/file"), b"from erofs").unwrap();
    let done = Command::new(mkfs)
        .arg(dir.join("img"))
        .arg(&tree)
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    true
}

#[test]
fn privileged_erofs_is_mounted_from_a_file_and_leaves_nothing() {
    if !is_root() {
        skip!("needs root");
    }
    let dir = ScratchDir::new("sys-erofs").unwrap();
    if !image(dir.path()) {
        skip!("needs mkfs.erofs");
    }
    let fd = match mount::erofs(&dir.path().join("img"), &[], &ErofsOptions::default()) {
        Ok(fd) => fd,
        Err(e) if matches!(e.errno, Errno::NOTBLK | Errno::NODEV) => skip!("{e}"),
        Err(e) => panic!("{e}"),
    };
    assert_eq!(read_in(&fd, "sub/file"), b"from erofs");

    let target = dir.path().join("mnt");
    fs_err::create_dir(&target).unwrap();
    assert!(!mount::is_mounted(&target).unwrap());
    mount::attach(fd.as_fd(), &target).unwrap();
    let attached = Attached(&target);
    assert!(mount::is_mounted(&target).unwrap());
    assert_eq!(
        fs_err::read(target.join("sub/file")).unwrap(),
        b"from erofs"
    );
    assert_eq!(
        fs_err::write(target.join("x"), b"").unwrap_err().kind(),
        std::io::ErrorKind::ReadOnlyFilesystem
    );
    let table = layerpack_sys::mountinfo::read().unwrap();
    let entry = table.iter().find(|m| m.target == target).unwrap();
    assert_eq!(entry.fstype, "erofs");
    assert_eq!(entry.id, mount::mount_id(&target).unwrap());
    assert!(entry.options.contains("nodev") && !entry.options.contains("nosuid"));
    let held = open_in(&fd, "sub/file").unwrap();
    assert_eq!(
        mount::unmount(&target, false).unwrap_err().errno,
        Errno::BUSY
    );
    drop((held, fd));
    mount::unmount(&target, false).unwrap();
    assert!(!mount::is_mounted(&target).unwrap());
    drop(attached);
}

#[test]
fn privileged_a_damaged_image_is_refused_by_name() {
    if !is_root() {
        skip!("needs root");
    }
    let dir = ScratchDir::new("sys-bad").unwrap();
    let path = dir.path().join("img");
    fs_err::write(&path, vec![7u8; 8192]).unwrap();
    let error = mount::erofs(&path, &[], &ErofsOptions::default()).unwrap_err();
    if matches!(error.errno, Errno::NOTBLK | Errno::NODEV) {
        skip!("{error}");
    }
    let text = error.to_string();
    assert_eq!(error.errno, Errno::INVAL, "{text}");
    assert!(text.contains("/img") && text.contains("erofs"), "{text}");
}

#[test]
fn privileged_idmapped_lowers_by_descriptor_under_an_overlay() {
    if !is_root() {
        skip!("needs root");
    }
    let dir = ScratchDir::new("sys-overlay").unwrap();
    let (lower, upper, work) = (
        dir.path().join("lower"),
        dir.path().join("upper"),
        dir.path().join("work"),
    );
    for path in [&lower, &upper, &work] {
        fs_err::create_dir(path).unwrap();
    }
    fs_err::write(lower.join("a"), b"below").unwrap();
    rustix::fs::chown(
        lower.join("a").as_path(),
        Some(rustix::fs::Uid::from_raw(7)),
        Some(rustix::fs::Gid::from_raw(8)),
    )
    .unwrap();

    let map = idmap();
    let clone = mount::bind(&lower).unwrap();
    mount::set_idmap(clone.as_fd(), map.as_fd()).unwrap();
    let spec = OverlaySpec {
        lowers: vec![Layer::Fd(clone)],
        upper: Some((upper.clone(), work)),
        volatile: true,
        ..OverlaySpec::default()
    };
    let overlay = match mount::overlay(&spec) {
        Ok(fd) => fd,
        Err(e) if e.errno == Errno::INVAL => skip!("layers on detached mounts need 6.15: {e}"),
        Err(e) => panic!("{e}"),
    };
    let stat = rustix::fs::statat(&overlay, "a", rustix::fs::AtFlags::empty()).unwrap();
    assert_eq!((stat.st_uid, stat.st_gid), (BASE + 7, BASE + 8));
    // A copy-up stores the shifted ids.
    let fd = rustix::fs::openat(
        &overlay,
        "a",
        OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .unwrap();
    rustix::io::write(&fd, b" above").unwrap();
    let up = fs_err::metadata(upper.join("a")).unwrap();
    assert_eq!((up.uid(), up.gid()), (BASE + 7, BASE + 8));
    assert_eq!(fs_err::read(upper.join("a")).unwrap(), b"below above");
    assert_eq!(fs_err::read(lower.join("a")).unwrap(), b"below");
}

#[test]
fn privileged_hundreds_of_lowers_and_long_paths() {
    if !is_root() {
        skip!("needs root");
    }
    let dir = ScratchDir::new("sys-many").unwrap();
    let deep = dir.path().join("x".repeat(200)).join("y".repeat(200));
    let mut lowers = Vec::new();
    for n in 0..300 {
        let lower = deep.join(format!("l{n}"));
        fs_err::create_dir_all(&lower).unwrap();
        fs_err::write(lower.join(format!("f{n}")), n.to_string()).unwrap();
        lowers.push(Layer::Path(lower));
    }
    let overlay = mount::overlay(&OverlaySpec {
        lowers,
        ..OverlaySpec::default()
    })
    .unwrap();
    assert_eq!(read_in(&overlay, "f0"), b"0");
    assert_eq!(read_in(&overlay, "f299"), b"299");
}

#[test]
fn privileged_flags_and_tmpfs() {
    if !is_root() {
        skip!("needs root");
    }
    let fd = mount::tmpfs(1 << 20, 0o751, MountFlags::MOUNT_ATTR_NOSUID).unwrap();
    let stat = rustix::fs::fstat(&fd).unwrap();
    assert_eq!(stat.st_mode & 0o7777, 0o751);
    rustix::fs::mkdirat(&fd, "d", Mode::RWXU).unwrap();
    mount::set_attr(
        fd.as_fd(),
        MountFlags::MOUNT_ATTR_RDONLY,
        MountFlags::empty(),
        false,
    )
    .unwrap();
    assert_eq!(
        rustix::fs::mkdirat(&fd, "e", Mode::RWXU).unwrap_err(),
        Errno::ROFS
    );
    mount::set_attr(
        fd.as_fd(),
        MountFlags::empty(),
        MountFlags::MOUNT_ATTR_RDONLY,
        false,
    )
    .unwrap();
    rustix::fs::mkdirat(&fd, "e", Mode::RWXU).unwrap();
}

#[test]
fn privileged_fuse_mount_without_a_server_fails_closed() {
    if !is_root() {
        skip!("needs root");
    }
    let Ok(dev) = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
    else {
        skip!("no /dev/fuse");
    };
    let fd = mount::fuse(dev.as_fd(), true, 131_072, "test").unwrap();
    // The first request is INIT, 40 bytes of header and its body.
    let mut request = vec![0u8; 65_536];
    let n = rustix::io::read(&dev, &mut request).unwrap();
    assert!(n >= 40 + 16, "{n}");
    assert_eq!(request[4..8], 26u32.to_le_bytes());
    drop(dev);
    assert_eq!(open_in(&fd, "x").unwrap_err(), Errno::NOTCONN);
}
