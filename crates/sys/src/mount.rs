//! Mounts through the new mount API (`fsopen`, `fsconfig`, `fsmount`,
//! `open_tree`, `mount_setattr`, `move_mount`); `mount(8)` and the old
//! `mount(2)` are never used.
//!
//! A new mount comes back **detached**, as a descriptor: nobody sees it until
//! it is attached, and it is gone when the descriptor is closed. So a caller
//! that fails half-way leaves nothing behind.
//!
//! What the kernel needs (checked on 6.18): file-backed EROFS 6.12, overlay
//! `lowerdir+` 6.5, overlay layers by descriptor 6.13, overlay layers on
//! detached mounts 6.15, idmapped overlay layers 5.19, idmapped EROFS 5.19.
//! [`overlay`] takes paths for older kernels.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_fd, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount,
    open_tree,
};

use crate::error::{Context, Result, SysError};

pub use rustix::mount::MountAttrFlags as MountFlags;

/// `fsconfig` copies at most this many bytes of a string value, terminator included.
const STRING_LIMIT: usize = 256;

/// Cap on what is read of a mount context's message log, in messages.
const LOG_MESSAGES: usize = 16;

/// A configuration context of one filesystem that is being mounted.
struct FsContext {
    fd: OwnedFd,
    fstype: &'static str,
}

impl FsContext {
    fn open(fstype: &'static str) -> Result<Self> {
        let fd = fsopen(fstype, FsOpenFlags::FSOPEN_CLOEXEC).context("fsopen", || fstype)?;
        Ok(Self { fd, fstype })
    }

    /// Turns an error of this context into ours, with the kernel's own messages.
    fn error(&self, call: &'static str, what: String, errno: Errno) -> SysError {
        let mut error = SysError::new(call, format!("{} {what}", self.fstype), errno);
        let mut messages = Vec::new();
        let mut buffer = [0u8; 1024];
        for _ in 0..LOG_MESSAGES {
            // Each read gives one message, "e text"; ENODATA ends the log.
            match rustix::io::read(&self.fd, &mut buffer) {
                Ok(n) if n > 0 => {
                    let text = String::from_utf8_lossy(buffer.get(..n).unwrap_or_default());
                    let text = text.trim();
                    messages.push(
                        text.split_once(' ')
                            .map_or(text, |(_, rest)| rest)
                            .trim()
                            .to_owned(),
                    );
                }
                _ => break,
            }
        }
        error.log = messages.join("; ");
        error
    }

    fn flag(&self, key: &str) -> Result<()> {
        fsconfig_set_flag(&self.fd, key).map_err(|e| self.error("fsconfig", key.to_owned(), e))
    }

    fn string(&self, key: &str, value: impl AsRef<OsStr>) -> Result<()> {
        let value = value.as_ref();
        if value.len() >= STRING_LIMIT {
            let what = format!("{key}={}", value.display());
            return Err(self.error("fsconfig", what, Errno::NAMETOOLONG));
        }
        fsconfig_set_string(&self.fd, key, value)
            .map_err(|e| self.error("fsconfig", format!("{key}={}", value.display()), e))
    }

    /// Names a file: by its path if that fits, else through a descriptor's link.
    fn file(&self, key: &str, path: &Path) -> Result<()> {
        if path.as_os_str().len() < STRING_LIMIT {
            return self.string(key, path);
        }
        let fd = open_path(path)?;
        self.string(key, format!("/proc/self/fd/{}", fd.as_raw_fd()))
    }

    /// Names an overlay layer: by descriptor, which every mount reachable or
    /// not can be given by and whose path needs no escaping; by the
    /// descriptor's link on kernels before 6.13.
    fn directory(&self, key: &str, fd: BorrowedFd<'_>, what: &dyn Fn() -> String) -> Result<()> {
        match fsconfig_set_fd(&self.fd, key, fd) {
            Ok(()) => Ok(()),
            Err(first) => {
                let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
                fsconfig_set_string(&self.fd, key, link.as_str())
                    .map_err(|_| self.error("fsconfig", format!("{key}={}", what()), first))
            }
        }
    }

    fn mount(self, flags: MountFlags, what: impl Fn() -> String) -> Result<OwnedFd> {
        fsconfig_create(&self.fd).map_err(|e| self.error("fsconfig create", what(), e))?;
        fsmount(&self.fd, FsMountFlags::FSMOUNT_CLOEXEC, flags)
            .map_err(|e| self.error("fsmount", what(), e))
    }
}

fn open_path(path: &Path) -> Result<OwnedFd> {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .context("open", || path.display())
}

/// How an EROFS image is mounted.
#[derive(Debug, Clone, Default)]
pub struct ErofsOptions {
    /// Read the data devices with direct I/O, so that their pages are cached once (6.15).
    pub directio: bool,
}

/// Mounts the EROFS image `meta` with its extra `devices` (in the order of the
/// image's device table), read-only and without device nodes, detached.
///
/// Set-id bits stay in force: sandboxes on top rely on them.
///
/// # Errors
/// `ENOTBLK` means that this kernel has no file-backed EROFS (before 6.12);
/// `EINVAL` with a kernel message that the image is damaged or uses a feature
/// which the kernel does not know.
pub fn erofs(meta: &Path, devices: &[&Path], options: &ErofsOptions) -> Result<OwnedFd> {
    let fs = FsContext::open("erofs")?;
    fs.flag("ro")?;
    fs.file("source", meta)?;
    for device in devices {
        fs.file("device", device)?;
    }
    if options.directio {
        fs.flag("directio")?;
    }
    fs.mount(
        MountFlags::MOUNT_ATTR_RDONLY | MountFlags::MOUNT_ATTR_NODEV,
        || meta.display().to_string(),
    )
}

/// How a FUSE filesystem is mounted.
#[derive(Debug, Clone)]
pub struct FuseOptions<'a> {
    /// What the mount table shows as the source.
    pub source: &'a str,
    /// What the mount table shows after `fuse.`.
    pub subtype: &'a str,
    /// Let other users than the mounting one in.
    pub allow_other: bool,
    /// Have the kernel check modes and owners.
    pub default_permissions: bool,
    /// Largest read request, in bytes; 0 leaves the kernel's default.
    pub max_read: u32,
    /// Mount read-only.
    pub read_only: bool,
}

/// Mounts a FUSE filesystem that is served on `dev` (an open `/dev/fuse`),
/// detached; its root is a directory.
///
/// # Errors
/// Those of the mount API; `ENODEV` if the kernel has no FUSE.
pub fn fuse_with(dev: BorrowedFd<'_>, options: &FuseOptions<'_>) -> Result<OwnedFd> {
    let fs = FsContext::open("fuse")?;
    fs.string("source", options.source)?;
    fs.string("subtype", options.subtype)?;
    fs.string("fd", dev.as_raw_fd().to_string())?;
    fs.string("rootmode", "40000")?;
    fs.string("user_id", rustix::process::getuid().as_raw().to_string())?;
    fs.string("group_id", rustix::process::getgid().as_raw().to_string())?;
    if options.allow_other {
        fs.flag("allow_other")?;
    }
    if options.default_permissions {
        fs.flag("default_permissions")?;
    }
    if options.max_read != 0 {
        fs.string("max_read", options.max_read.to_string())?;
    }
    let mut flags = MountFlags::MOUNT_ATTR_NOSUID | MountFlags::MOUNT_ATTR_NODEV;
    if options.read_only {
        fs.flag("ro")?;
        flags |= MountFlags::MOUNT_ATTR_RDONLY;
    }
    fs.mount(flags, || options.source.to_owned())
}

/// Mounts a read-only FUSE filesystem served on `dev`, detached. `max_read` is
/// in bytes, 0 for the kernel's default.
///
/// # Errors
/// As for [`fuse_with`].
pub fn fuse(
    dev: BorrowedFd<'_>,
    allow_other: bool,
    max_read: u32,
    source: &str,
) -> Result<OwnedFd> {
    fuse_with(
        dev,
        &FuseOptions {
            source,
            subtype: "layerpack",
            allow_other,
            default_permissions: true,
            max_read,
            read_only: true,
        },
    )
}

/// One layer of an overlay.
#[derive(Debug)]
pub enum Layer {
    /// A directory by its path.
    Path(PathBuf),
    /// A directory by a descriptor, of a detached mount for instance.
    Fd(OwnedFd),
}

impl From<PathBuf> for Layer {
    fn from(path: PathBuf) -> Self {
        Self::Path(path)
    }
}

impl From<OwnedFd> for Layer {
    fn from(fd: OwnedFd) -> Self {
        Self::Fd(fd)
    }
}

/// An overlay to mount.
///
/// Always set: `redirect_dir=nofollow` (a layer that says otherwise gets
/// `EPERM` there), `metacopy=off`, `index=off`, `nfs_export=off`, so that an upper holds whole files and directories that
/// are read without the layers below it. Marks are `trusted.overlay.*`.
#[derive(Debug, Default)]
pub struct OverlaySpec {
    /// Lower layers, top first; at least one, and two if there is no upper.
    pub lowers: Vec<Layer>,
    /// Upper and work directory, on one filesystem. `None`: read-only.
    pub upper: Option<(PathBuf, PathBuf)>,
    /// Skip every sync of the upper filesystem; the upper must then be thrown
    /// away after a crash of the machine.
    pub volatile: bool,
    /// Make inode numbers unique across the layers where that costs nothing (`xino=auto`).
    pub xino: bool,
    /// Shown as the mount's source.
    pub source: String,
}

/// Mounts an overlay, detached, without device nodes.
///
/// # Errors
/// `EINVAL` mostly means an unsuitable layer (the kernel's message says
/// which); `ELOOP` that an upper or work directory is used by another overlay.
pub fn overlay(spec: &OverlaySpec) -> Result<OwnedFd> {
    let fs = FsContext::open("overlay")?;
    fs.string(
        "source",
        if spec.source.is_empty() {
            "overlay"
        } else {
            &spec.source
        },
    )?;
    for layer in &spec.lowers {
        match layer {
            Layer::Path(path) => {
                let fd = open_path(path)?;
                fs.directory("lowerdir+", fd.as_fd(), &|| path.display().to_string())?;
            }
            Layer::Fd(fd) => {
                fs.directory("lowerdir+", fd.as_fd(), &|| {
                    format!("descriptor {}", fd.as_raw_fd())
                })?;
            }
        }
    }
    if let Some((upper, work)) = &spec.upper {
        for (key, path) in [("upperdir", upper), ("workdir", work)] {
            let fd = open_path(path)?;
            fs.directory(key, fd.as_fd(), &|| path.display().to_string())?;
        }
    }
    // "off" would follow what is there, by the module's default.
    fs.string("redirect_dir", "nofollow")?;
    for key in ["metacopy", "index", "nfs_export"] {
        fs.string(key, "off")?;
    }
    // Else the upper gets an xattr with an identity of this mount; from 6.6.
    let _ = fs.string("uuid", "null");
    fs.string("xino", if spec.xino { "auto" } else { "off" })?;
    let mut flags = MountFlags::MOUNT_ATTR_NODEV;
    if spec.upper.is_none() {
        flags |= MountFlags::MOUNT_ATTR_RDONLY;
    } else if spec.volatile {
        fs.flag("volatile")?;
    }
    fs.mount(flags, || match &spec.upper {
        Some((upper, _)) => format!("on {}", upper.display()),
        None => format!("of {} layers", spec.lowers.len()),
    })
}

/// Mounts a filesystem that needs no more than string options, detached:
/// `proc`, `sysfs`, `devpts`, `mqueue`, `tmpfs`, `cgroup2`. An option with an
/// empty value is set as a flag.
///
/// # Errors
/// Those of the mount API.
pub fn simple(
    fstype: &'static str,
    options: &[(&str, &str)],
    flags: MountFlags,
) -> Result<OwnedFd> {
    let fs = FsContext::open(fstype)?;
    fs.string("source", fstype)?;
    for (key, value) in options {
        if value.is_empty() {
            fs.flag(key)?;
        } else {
            fs.string(key, value)?;
        }
    }
    fs.mount(flags, || "mount".to_owned())
}

/// Mounts a tmpfs of at most `size` bytes whose root has `mode`, detached.
///
/// # Errors
/// Those of the mount API.
pub fn tmpfs(size: u64, mode: u32, flags: MountFlags) -> Result<OwnedFd> {
    simple(
        "tmpfs",
        &[("size", &size.to_string()), ("mode", &format!("{mode:o}"))],
        flags,
    )
}

/// Clones the mount at `path` (a subtree of it if `path` is not its root),
/// without the mounts below, detached.
///
/// # Errors
/// Those of `open_tree`.
pub fn bind(path: &Path) -> Result<OwnedFd> {
    open_tree(
        CWD,
        path,
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
    )
    .context("open_tree", || path.display())
}

/// As [`bind`], of the object that `fd` refers to, with the mounts below it if `recursive`.
///
/// # Errors
/// Those of `open_tree`.
pub fn bind_fd(fd: BorrowedFd<'_>, recursive: bool) -> Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    open_tree(fd, "", flags).context("open_tree", || format!("descriptor {}", fd.as_raw_fd()))
}

/// `struct mount_attr` of `mount_setattr(2)`, version 0.
#[repr(C)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

const _: () = assert!(size_of::<MountAttr>() == 32);

fn setattr(fd: BorrowedFd<'_>, attr: &MountAttr, recursive: bool) -> Result<()> {
    let mut flags = libc::AT_EMPTY_PATH;
    if recursive {
        flags |= libc::AT_RECURSIVE;
    }
    // SAFETY: mount_setattr only reads `size_of::<MountAttr>()` bytes behind
    // the pointer, which is a live repr(C) value; the path is a C string.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd.as_raw_fd(),
            c"".as_ptr(),
            flags,
            std::ptr::from_ref(attr),
            size_of::<MountAttr>(),
        )
    };
    if rc < 0 {
        return Err(SysError::last(
            "mount_setattr",
            format!("descriptor {}", fd.as_raw_fd()),
        ));
    }
    Ok(())
}

/// Makes the detached mount `fd` show ids through the map of the user
/// namespace `userns`: id 0 on disk is seen as the host id that the
/// namespace's id 0 maps to.
///
/// # Errors
/// `EINVAL` if the filesystem does not support it or the mount is attached
/// already; `EPERM` without privileges over the filesystem.
pub fn set_idmap(fd: BorrowedFd<'_>, userns: BorrowedFd<'_>) -> Result<()> {
    let attr = MountAttr {
        attr_set: u64::from(MountFlags::MOUNT_ATTR_IDMAP.bits()),
        attr_clr: 0,
        propagation: 0,
        userns_fd: u64::try_from(userns.as_raw_fd()).unwrap_or(u64::MAX),
    };
    setattr(fd, &attr, false)
}

/// Sets and clears flags of the mount at `fd`, and of those below it if `recursive`.
///
/// # Errors
/// Those of `mount_setattr`; `EPERM` for flags that are locked.
pub fn set_attr(
    fd: BorrowedFd<'_>,
    set: MountFlags,
    clear: MountFlags,
    recursive: bool,
) -> Result<()> {
    let attr = MountAttr {
        attr_set: u64::from(set.bits()),
        attr_clr: u64::from(clear.bits()),
        propagation: 0,
        userns_fd: 0,
    };
    setattr(fd, &attr, recursive)
}

/// Makes the mount at `fd` (and those below it if `recursive`) private: no
/// mount event passes it in either direction.
///
/// # Errors
/// Those of `mount_setattr`.
pub fn set_private(fd: BorrowedFd<'_>, recursive: bool) -> Result<()> {
    let attr = MountAttr {
        attr_set: 0,
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    setattr(fd, &attr, recursive)
}

/// Attaches the detached mount `fd` at `target`, following symbolic links in its path.
///
/// # Errors
/// Those of `move_mount`.
pub fn attach(fd: BorrowedFd<'_>, target: &Path) -> Result<()> {
    move_mount(
        fd,
        "",
        CWD,
        target,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS,
    )
    .context("move_mount", || target.display())
}

/// Attaches the detached mount `fd` on the object that `target` refers to.
///
/// # Errors
/// Those of `move_mount`.
pub fn attach_fd(fd: BorrowedFd<'_>, target: BorrowedFd<'_>) -> Result<()> {
    move_mount(
        fd,
        "",
        target,
        "",
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH,
    )
    .context("move_mount", || {
        format!("descriptor {}", target.as_raw_fd())
    })
}

/// Unmounts the topmost mount at `target`, which must not be a symbolic link;
/// `detach` takes it out of the tree even while it is busy.
///
/// # Errors
/// `EBUSY` if it is in use and `detach` is not set; `EINVAL` if it is no mount point.
pub fn unmount(target: &Path, detach: bool) -> Result<()> {
    let mut flags = UnmountFlags::NOFOLLOW;
    if detach {
        flags |= UnmountFlags::DETACH;
    }
    rustix::mount::unmount(target, flags).context("umount2", || target.display())
}

/// The id of the mount that `path` lies on, as in `/proc/self/mountinfo`.
///
/// # Errors
/// Those of `statx`.
pub fn mount_id(path: &Path) -> Result<u64> {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    let stat = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::MNT_ID)
        .context("statx", || path.display())?;
    Ok(stat.stx_mnt_id)
}

/// Whether `path` is the root of a mount.
///
/// # Errors
/// Those of `statx`; a missing path is `ENOENT`.
pub fn is_mounted(path: &Path) -> Result<bool> {
    use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, statx};
    let stat = statx(
        CWD,
        path,
        AtFlags::SYMLINK_NOFOLLOW,
        StatxFlags::BASIC_STATS,
    )
    .context("statx", || path.display())?;
    Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}
