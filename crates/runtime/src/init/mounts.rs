//! PID 1's share of the sandbox's mounts.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use layerpack_sys::SysError;
use layerpack_sys::mount::{self, MountFlags};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::error::{Result, RuntimeError};
use crate::protocol::Head;

/// Hidden from sandboxes: facts about the host, and kernel interfaces that OCI
/// runtimes hide.
const MASKED: [&str; 11] = [
    "proc/acpi",
    "proc/asound",
    "proc/interrupts",
    "proc/kcore",
    "proc/keys",
    "proc/latency_stats",
    "proc/sched_debug",
    "proc/scsi",
    "proc/timer_list",
    "sys/devices/virtual/powercap",
    "sys/firmware",
];

/// Shown, but not to be written.
const READ_ONLY: [&str; 5] = [
    "proc/bus",
    "proc/fs",
    "proc/irq",
    "proc/sys",
    "proc/sysrq-trigger",
];

const PLAIN: MountFlags = MountFlags::MOUNT_ATTR_NOSUID
    .union(MountFlags::MOUNT_ATTR_NODEV)
    .union(MountFlags::MOUNT_ATTR_NOEXEC);

fn step<E: std::fmt::Display>(step: &str) -> impl FnOnce(E) -> RuntimeError {
    let step = step.to_owned();
    move |e| RuntimeError::Setup {
        step,
        problem: e.to_string(),
    }
}

/// Sets up everything of the sandbox that is not its command, and makes the
/// overlay the root.
pub(super) fn attach_all(head: &Head, fds: &mut impl Iterator<Item = OwnedFd>) -> Result<()> {
    let mut next = |what: &str| {
        fds.next()
            .ok_or_else(|| step("receiving the sandbox's mounts")(format!("{what} is missing")))
    };
    let root = next("root")?;
    let (dev, pts, shm) = (next("dev")?, next("pts")?, next("shm")?);
    let sys = if head.own_network {
        None
    } else {
        Some(next("sys")?)
    };
    let channel = match head.channel {
        false => None,
        true => Some((next("channel")?, next("the channel's program")?)),
    };

    rustix::system::sethostname(head.hostname.as_bytes()).map_err(step("setting the host name"))?;
    if head.own_network {
        layerpack_sys::net::loopback_up().map_err(step("bringing the loopback device up"))?;
    }
    let host_root = rustix::fs::open(
        "/",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(step("opening the host's root"))?;
    mount::attach(root.as_fd(), Path::new("/")).map_err(step("attaching the overlay"))?;

    let proc = mount::simple("proc", &[], PLAIN).map_err(step(
        "mounting proc (is the host's /proc itself masked, as in a container?)",
    ))?;
    attach(&root, &proc, "proc")?;
    let sys = match sys {
        Some(sys) => sys,
        None => mount::simple("sysfs", &[], PLAIN | MountFlags::MOUNT_ATTR_RDONLY)
            .map_err(step("mounting sysfs"))?,
    };
    attach(&root, &sys, "sys")?;
    control_groups(&root, head)?;
    attach(&root, &dev, "dev")?;
    attach(&root, &pts, "dev/pts")?;
    attach(&root, &shm, "dev/shm")?;
    if let Some((directory, program)) = channel {
        attach(&root, &directory, "dev/layerpack")?;
        attach(&root, &program, "dev/layerpack/pack_diff")?;
    }
    let mqueue = mount::simple("mqueue", &[], PLAIN).map_err(step("mounting mqueue"))?;
    attach(&root, &mqueue, "dev/mqueue")?;
    if let Some(number) = head.console {
        let slave = target(&root, &format!("dev/pts/{number}"))?;
        let console = mount::bind_fd(slave.as_fd(), false).map_err(step("cloning the terminal"))?;
        attach(&root, &console, "dev/console")?;
    }
    mask(&root)?;
    protect(&root)?;
    enter(&root, &host_root)
}

/// Opens a place in the sandbox's tree that no link can have moved.
fn target(root: &OwnedFd, path: &str) -> Result<OwnedFd> {
    rustix::fs::openat2(
        root,
        path,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )
    .map_err(step(&format!("opening /{path}")))
}

/// The same, `None` if there is nothing.
fn target_if_any(root: &OwnedFd, path: &str) -> Result<Option<OwnedFd>> {
    let opened = rustix::fs::openat2(
        root,
        path,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    );
    match opened {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(e) => Err(step(&format!("opening /{path}"))(e)),
    }
}

fn attach(root: &OwnedFd, what: &OwnedFd, path: &str) -> Result<()> {
    let place = target(root, path)?;
    mount::attach_fd(what.as_fd(), place.as_fd()).map_err(step(&format!("mounting /{path}")))
}

/// Shows the sandbox its own control groups, read-only.
fn control_groups(root: &OwnedFd, head: &Head) -> Result<()> {
    let Some(place) = target_if_any(root, "sys/fs/cgroup")? else {
        return Ok(());
    };
    let flags = PLAIN | MountFlags::MOUNT_ATTR_RDONLY;
    let what = "mounting /sys/fs/cgroup";
    let Some(controllers) = &head.v1_controllers else {
        let group = mount::simple("cgroup2", &[], flags).map_err(step(what))?;
        return mount::attach_fd(group.as_fd(), place.as_fd()).map_err(step(what));
    };
    let directory = mount::tmpfs(64 << 10, 0o755, PLAIN).map_err(step(what))?;
    mount::attach_fd(directory.as_fd(), place.as_fd()).map_err(step(what))?;
    for name in controllers {
        let what = format!("mounting /sys/fs/cgroup/{name}");
        rustix::fs::mkdirat(&directory, name.as_str(), Mode::from_raw_mode(0o755))
            .map_err(step(&what))?;
        let group = mount::simple("cgroup", &[(name.as_str(), "")], flags).map_err(step(&what))?;
        let place = target(&directory, name)?;
        mount::attach_fd(group.as_fd(), place.as_fd()).map_err(step(&what))?;
    }
    let read_only = MountFlags::MOUNT_ATTR_RDONLY;
    mount::set_attr(directory.as_fd(), read_only, MountFlags::empty(), false).map_err(step(what))
}

/// Covers what is hidden: files by the null device, directories by an empty one.
fn mask(root: &OwnedFd) -> Result<()> {
    let null = target(root, "dev/null")?;
    let mut empty: Option<OwnedFd> = None;
    for path in MASKED {
        let Some(place) = target_if_any(root, path)? else {
            continue;
        };
        let what = format!("hiding /{path}");
        let stat = rustix::fs::fstat(&place).map_err(step(&what))?;
        let cover = if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            cover_directory(&mut empty).map_err(step(&what))?
        } else {
            mount::bind_fd(null.as_fd(), false).map_err(step(&what))?
        };
        mount::attach_fd(cover.as_fd(), place.as_fd()).map_err(step(&what))?;
        if empty.is_none() && FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            empty = Some(cover);
        }
    }
    Ok(())
}

/// A mount of the one empty directory that covers all.
fn cover_directory(empty: &mut Option<OwnedFd>) -> Result<OwnedFd, SysError> {
    match empty {
        Some(attached) => mount::bind_fd(attached.as_fd(), false),
        None => mount::tmpfs(4096, 0o755, PLAIN | MountFlags::MOUNT_ATTR_RDONLY),
    }
}

/// Write-protects parts of `/proc`.
fn protect(root: &OwnedFd) -> Result<()> {
    for path in READ_ONLY {
        let Some(place) = target_if_any(root, path)? else {
            continue;
        };
        let what = format!("write-protecting /{path}");
        let copy = mount::bind_fd(place.as_fd(), true).map_err(step(&what))?;
        let flags = PLAIN | MountFlags::MOUNT_ATTR_RDONLY;
        mount::set_attr(copy.as_fd(), flags, MountFlags::empty(), true).map_err(step(&what))?;
        mount::attach_fd(copy.as_fd(), place.as_fd()).map_err(step(&what))?;
    }
    Ok(())
}

/// Makes `root` the root directory and lets the host's tree go.
fn enter(root: &OwnedFd, host_root: &OwnedFd) -> Result<()> {
    let what = step::<SysError>;
    change_to(root.as_fd())?;
    // Both in one place: the old root ends up on top of the new one, where it
    // can be detached without a directory to put it.
    layerpack_sys::ns::pivot_root(Path::new("."), Path::new("."))
        .map_err(what("making the overlay the root"))?;
    change_to(host_root.as_fd())?;
    mount::unmount(Path::new("."), true).map_err(what("letting the host's tree go"))?;
    rustix::process::chdir("/").map_err(step("changing to the root"))
}

fn change_to(fd: BorrowedFd<'_>) -> Result<()> {
    rustix::process::fchdir(fd).map_err(step("changing directory"))
}
