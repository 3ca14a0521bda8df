//! The launcher's share of a sandbox's mounts.
//!
//! Everything that the host's root must do (idmapped lowers, the overlay with
//! its `trusted.` marks, device nodes) is made here, detached, and handed to
//! PID 1 as descriptors. Nothing is attached anywhere on the host, so nothing
//! is left there whatever happens.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use layerpack_sys::SysError;
use layerpack_sys::mount::{self, Layer, MountFlags, OverlaySpec};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid, makedev};
use rustix::io::Errno;

use crate::error::{Result, RuntimeError};
use crate::spec::{IdMap, Network, SandboxSpec};

/// Size limit of `/dev`, in bytes.
const DEV_SIZE: u64 = 64 << 20;
/// Size limit of `/dev/shm`, in bytes.
const SHM_SIZE: u64 = 64 << 20;

/// Device nodes: name, major, minor.
const NODES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

/// Links in `/dev`.
const LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// The group that owns terminals, by custom.
pub(crate) const TTY_GROUP: u32 = 5;

/// Where upper and work directory of a sandbox are.
#[derive(Debug, Clone)]
pub(crate) struct Directories {
    pub(crate) upper: PathBuf,
    pub(crate) work: PathBuf,
    /// Shown inside as `/dev/layerpack`, if the specification says so.
    pub(crate) channel: PathBuf,
    /// Used on old kernels only; made when needed.
    pub(crate) scratch: PathBuf,
}

/// The detached mounts of a sandbox.
#[derive(Debug)]
pub(crate) struct Mounts {
    pub(crate) root: OwnedFd,
    pub(crate) dev: OwnedFd,
    pub(crate) pts: OwnedFd,
    pub(crate) shm: OwnedFd,
    /// The host's `/sys`, if the sandbox shares its network.
    pub(crate) sys: Option<OwnedFd>,
    /// The channel's directory, and the program in it.
    pub(crate) channel: Option<(OwnedFd, OwnedFd)>,
    /// The layers below `root`, which has references of its own. Taking a mount down waits for all
    /// processors, so it is left for when PID 1 has all it needs.
    _lowers: Vec<OwnedFd>,
}

fn setup(step: &str) -> impl FnOnce(Errno) -> RuntimeError {
    let step = step.to_owned();
    move |errno| RuntimeError::Setup {
        step,
        problem: std::io::Error::from(errno).to_string(),
    }
}

fn ids(map: IdMap, id: u32) -> (Option<Uid>, Option<Gid>) {
    let id = map.base.saturating_add(id);
    (Some(Uid::from_raw(id)), Some(Gid::from_raw(id)))
}

/// Makes all mounts that need no look into the sandbox's namespaces.
pub(crate) fn make(
    spec: &SandboxSpec,
    dirs: &Directories,
    userns: BorrowedFd<'_>,
    console: bool,
    agent: Option<&Path>,
) -> Result<Mounts> {
    let map = spec.id_map;
    let (root, lowers) = root(spec, dirs, userns)?;
    let (base, group) = (
        map.base.to_string(),
        map.base.saturating_add(TTY_GROUP).to_string(),
    );
    Ok(Mounts {
        root,
        _lowers: lowers,
        dev: dev(map, console, spec.channel)?,
        pts: mount::simple(
            "devpts",
            &[("gid", &group), ("mode", "0620"), ("ptmxmode", "0666")],
            MountFlags::MOUNT_ATTR_NOSUID | MountFlags::MOUNT_ATTR_NOEXEC,
        )?,
        shm: mount::simple(
            "tmpfs",
            &[
                ("size", &SHM_SIZE.to_string()),
                ("mode", "1777"),
                ("uid", &base),
                ("gid", &base),
            ],
            MountFlags::MOUNT_ATTR_NOSUID
                | MountFlags::MOUNT_ATTR_NODEV
                | MountFlags::MOUNT_ATTR_NOEXEC,
        )?,
        sys: match spec.network {
            Network::None => None,
            Network::Host => Some(host_sys()?),
        },
        channel: match spec.channel {
            false => None,
            true => Some(channel(dirs, agent)?),
        },
    })
}

/// The channel's directory and the program that speaks through it, neither to be written.
fn channel(dirs: &Directories, agent: Option<&Path>) -> Result<(OwnedFd, OwnedFd)> {
    let flags = MountFlags::MOUNT_ATTR_RDONLY
        | MountFlags::MOUNT_ATTR_NOSUID
        | MountFlags::MOUNT_ATTR_NODEV;
    let program = mount::bind(agent.unwrap_or(Path::new("/proc/self/exe")))?;
    let mode = rustix::fs::fstat(&program)
        .map_err(setup("looking at the program for the channel"))?
        .st_mode;
    if mode & 0o005 != 0o005 {
        return Err(RuntimeError::Setup {
            step: "showing the program of the channel".to_owned(),
            problem: "not everybody may execute it: chmod a+rx the layerpack binary".to_owned(),
        });
    }
    let directory = mount::bind(&dirs.channel)?;
    for mount in [&directory, &program] {
        mount::set_attr(mount.as_fd(), flags, MountFlags::empty(), false)?;
    }
    Ok((directory, program))
}

fn host_sys() -> Result<OwnedFd> {
    let fd = mount::bind(Path::new("/sys"))?;
    let flags = MountFlags::MOUNT_ATTR_RDONLY
        | MountFlags::MOUNT_ATTR_NOSUID
        | MountFlags::MOUNT_ATTR_NODEV
        | MountFlags::MOUNT_ATTR_NOEXEC;
    mount::set_attr(fd.as_fd(), flags, MountFlags::empty(), false)?;
    Ok(fd)
}

/// The first kernel whose overlayfs takes layers on detached mounts.
const DETACHED_LAYERS: (u32, u32) = (6, 15);

/// The overlay, and mounts that are of no more use.
fn root(
    spec: &SandboxSpec,
    dirs: &Directories,
    userns: BorrowedFd<'_>,
) -> Result<(OwnedFd, Vec<OwnedFd>)> {
    let none = || RuntimeError::InvalidSpec {
        what: "layers",
        problem: "a sandbox needs at least one".to_owned(),
    };
    let detached = layerpack_sys::probe::kernel_version() >= DETACHED_LAYERS;
    let wanted = if detached { spec.lowers.len() } else { 1 };
    let lowers: Vec<OwnedFd> = (spec.lowers.iter().take(wanted))
        .map(|path| lower(path, userns))
        .collect::<Result<_>>()?;
    like_top(lowers.first().ok_or_else(none)?.as_fd(), &dirs.upper)?;
    let overlay = if detached {
        let layers = (lowers.iter())
            .map(|fd| fd.try_clone().map(Layer::Fd))
            .collect::<std::io::Result<_>>()?;
        overlay(spec, dirs, layers)?
    } else {
        overlay_of_attached(spec, dirs, userns)?
    };
    mount_points(&overlay, spec.id_map)?;
    if spec.read_only {
        let flags = MountFlags::MOUNT_ATTR_RDONLY;
        mount::set_attr(overlay.as_fd(), flags, MountFlags::empty(), false)?;
    }
    Ok((overlay, lowers))
}

fn lower(path: &Path, userns: BorrowedFd<'_>) -> Result<OwnedFd> {
    let fd = mount::bind(path)?;
    mount::set_idmap(fd.as_fd(), userns)?;
    Ok(fd)
}

fn overlay(
    spec: &SandboxSpec,
    dirs: &Directories,
    lowers: Vec<Layer>,
) -> Result<OwnedFd, SysError> {
    mount::overlay(&OverlaySpec {
        lowers,
        upper: Some((dirs.upper.clone(), dirs.work.clone())),
        volatile: true,
        xino: true,
        source: format!("layerpack-{}", spec.id),
    })
}

/// The same on kernels that want attached layers: they are attached in a mount
/// namespace which only a thread has, and which ends with it; the overlay
/// keeps its own references to them.
fn overlay_of_attached(
    spec: &SandboxSpec,
    dirs: &Directories,
    userns: BorrowedFd<'_>,
) -> Result<OwnedFd> {
    let inside = || -> Result<OwnedFd> {
        layerpack_sys::ns::unshare_mounts()?;
        let slash = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(setup("opening the root directory"))?;
        mount::set_private(slash.as_fd(), true)?;
        fs_err::create_dir_all(&dirs.scratch)?;
        let scratch = mount::tmpfs(1 << 20, 0o700, MountFlags::empty())?;
        mount::attach(scratch.as_fd(), &dirs.scratch)?;
        let mut layers = Vec::new();
        for (index, path) in spec.lowers.iter().enumerate() {
            let target = dirs.scratch.join(index.to_string());
            fs_err::create_dir(&target)?;
            mount::attach(lower(path, userns)?.as_fd(), &target)?;
            layers.push(Layer::Path(target));
        }
        Ok(overlay(spec, dirs, layers)?)
    };
    std::thread::scope(|scope| {
        scope.spawn(inside).join().unwrap_or_else(|_| {
            Err(RuntimeError::Setup {
                step: "mounting the overlay".to_owned(),
                problem: "a thread failed".to_owned(),
            })
        })
    })
}

/// Gives the upper's root what the topmost layer's root has: overlayfs takes
/// the merged root's mode, owner, times and xattrs from the upper.
///
/// # Errors
/// [`RuntimeError::Setup`] when the one cannot be looked at or the other not changed.
pub fn like_top(top: BorrowedFd<'_>, upper: &Path) -> Result<()> {
    let stat = rustix::fs::fstat(top).map_err(setup("looking at the top layer"))?;
    let step = "giving the upper directory its owner and mode";
    rustix::fs::chown(
        upper,
        Some(Uid::from_raw(stat.st_uid)),
        Some(Gid::from_raw(stat.st_gid)),
    )
    .map_err(setup(step))?;
    rustix::fs::chmod(upper, Mode::from_raw_mode(stat.st_mode & 0o7777)).map_err(setup(step))?;
    copy_xattrs(top, upper)?;
    let times = rustix::fs::Timestamps {
        last_access: rustix::fs::Timespec {
            tv_sec: 0,
            tv_nsec: rustix::fs::UTIME_OMIT,
        },
        last_modification: rustix::fs::Timespec {
            tv_sec: stat.st_mtime,
            tv_nsec: i64::try_from(stat.st_mtime_nsec).unwrap_or(0),
        },
    };
    rustix::fs::utimensat(rustix::fs::CWD, upper, &times, AtFlags::empty()).map_err(setup(step))
}

fn copy_xattrs(top: BorrowedFd<'_>, upper: &Path) -> Result<()> {
    let step = "copying the extended attributes of the root directory";
    let own = rustix::fs::openat(
        top,
        ".",
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(setup(step))?;
    let mut names = vec![0u8; 64 << 10];
    let n = match rustix::fs::flistxattr(&own, &mut names) {
        Ok(n) => n,
        Err(Errno::NOTSUP) => return Ok(()),
        Err(e) => return Err(setup(step)(e)),
    };
    let mut value = Vec::new();
    for name in names.get(..n).unwrap_or_default().split(|&b| b == 0) {
        let copied = name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_");
        if !copied || name.starts_with(b"user.overlay.") {
            continue;
        }
        value.resize(64 << 10, 0);
        let n = rustix::fs::fgetxattr(&own, name, &mut value[..]).map_err(setup(step))?;
        let bytes = value.get(..n).unwrap_or_default();
        match rustix::fs::setxattr(upper, name, bytes, rustix::fs::XattrFlags::empty()) {
            Ok(()) | Err(Errno::NOTSUP) => {}
            Err(e) => return Err(setup(step)(e)),
        }
    }
    Ok(())
}

/// Makes the mount points that every sandbox needs, where an image has none.
fn mount_points(root: &OwnedFd, map: IdMap) -> Result<()> {
    for name in ["proc", "sys", "dev"] {
        match rustix::fs::statat(root, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {}
            Ok(_) => {
                return Err(RuntimeError::Setup {
                    step: format!("mounting /{name}"),
                    problem: "it is not a directory in these layers".to_owned(),
                });
            }
            Err(Errno::NOENT) => {
                let step = format!("making /{name}");
                rustix::fs::mkdirat(root, name, Mode::from_raw_mode(0o755))
                    .map_err(setup(&step))?;
                let (uid, gid) = ids(map, 0);
                rustix::fs::chownat(root, name, uid, gid, AtFlags::empty())
                    .map_err(setup(&step))?;
            }
            Err(e) => return Err(setup(&format!("looking at /{name}"))(e)),
        }
    }
    Ok(())
}

fn dev(map: IdMap, console: bool, channel: bool) -> Result<OwnedFd> {
    let base = map.base.to_string();
    let fd = mount::simple(
        "tmpfs",
        &[
            ("size", &DEV_SIZE.to_string()),
            ("mode", "0755"),
            ("uid", &base),
            ("gid", &base),
        ],
        MountFlags::MOUNT_ATTR_NOSUID,
    )?;
    let (uid, gid) = ids(map, 0);
    let own = |name: &str, mode: u32| -> rustix::io::Result<()> {
        rustix::fs::chmodat(&fd, name, Mode::from_raw_mode(mode), AtFlags::empty())?;
        rustix::fs::chownat(&fd, name, uid, gid, AtFlags::empty())
    };
    for (name, major, minor) in NODES {
        rustix::fs::mknodat(
            &fd,
            name,
            FileType::CharacterDevice,
            Mode::from_raw_mode(0o666),
            makedev(major, minor),
        )
        .and_then(|()| own(name, 0o666))
        .map_err(setup("making device nodes (is CAP_MKNOD missing?)"))?;
    }
    for name in ["pts", "shm", "mqueue"] {
        rustix::fs::mkdirat(&fd, name, Mode::from_raw_mode(0o755))
            .and_then(|()| own(name, 0o755))
            .map_err(setup("filling /dev"))?;
    }
    if channel {
        rustix::fs::mkdirat(&fd, "layerpack", Mode::from_raw_mode(0o755))
            .and_then(|()| own("layerpack", 0o755))
            .map_err(setup("filling /dev"))?;
    }
    if console {
        rustix::fs::mknodat(
            &fd,
            "console",
            FileType::RegularFile,
            Mode::from_raw_mode(0o620),
            0,
        )
        .and_then(|()| own("console", 0o620))
        .map_err(setup("filling /dev"))?;
    }
    for (name, target) in LINKS {
        rustix::fs::symlinkat(target, &fd, name)
            .and_then(|()| rustix::fs::chownat(&fd, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW))
            .map_err(setup("filling /dev"))?;
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    use layerpack_fixtures::{ScratchDir, is_root, skip};
    use layerpack_sys::ns::{IdRange, userns_fd};

    /// The way for kernels before 6.15, which this kernel may not need.
    #[test]
    fn privileged_layers_attached_in_a_threads_namespace_make_the_same_overlay() {
        if !is_root() {
            skip!("needs root");
        }
        let scratch = ScratchDir::new("attached").unwrap();
        let path = |name: &str| scratch.path().join(name);
        for name in ["one", "two", "upper", "work"] {
            fs_err::create_dir(path(name)).unwrap();
        }
        fs_err::write(path("one/a"), "top").unwrap();
        fs_err::write(path("two/a"), "bottom").unwrap();
        fs_err::write(path("two/b"), "below").unwrap();
        let map = IdMap {
            base: 1 << 20,
            count: 1 << 16,
        };
        let range = [IdRange {
            inside: 0,
            outside: map.base,
            count: map.count,
        }];
        let userns = userns_fd(&range, &range).unwrap();
        let spec = SandboxSpec {
            id: "attached".parse().unwrap(),
            name: None,
            stack: Vec::new(),
            lowers: vec![path("one"), path("two")],
            hostname: None,
            limits: crate::spec::Limits::default(),
            network: Network::None,
            id_map: map,
            read_only: false,
            no_new_privileges: false,
            env: Vec::new(),
            channel: false,
            lease: None,
            labels: BTreeMap::new(),
        };
        let dirs = Directories {
            upper: path("upper"),
            work: path("work"),
            channel: path("channel"),
            scratch: path("scratch"),
        };
        let root = overlay_of_attached(&spec, &dirs, userns.as_fd()).unwrap();
        let read = |name: &str| {
            let fd = rustix::fs::openat(&root, name, OFlags::RDONLY, Mode::empty()).unwrap();
            assert_eq!(rustix::fs::fstat(&fd).unwrap().st_uid, map.base);
            let mut buffer = [0; 16];
            let n = rustix::io::read(&fd, &mut buffer).unwrap();
            String::from_utf8_lossy(&buffer[..n]).into_owned()
        };
        assert_eq!(
            (read("a"), read("b")),
            ("top".to_owned(), "below".to_owned())
        );
        // The host saw nothing of it.
        let table = fs_err::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!table.contains(scratch.path().to_str().unwrap()), "{table}");
        assert_eq!(fs_err::read_dir(path("scratch")).unwrap().count(), 0);
    }
}
