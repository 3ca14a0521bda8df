//! A mount namespace with next to nothing of the host in it.
//!
//! A process that is cloned into new user and mount namespaces gets a copy of all of the host's
//! mounts, each locked to its parent. While anything pins the copy's root (a mapped library does),
//! letting go of the tree lets go of no mount in it, and filesystems that the host has unmounted
//! live on in the copy. So such processes are cloned from here, where there is nothing to copy
//! but what they need to be executed: the root filesystem, `/proc` and `/sys` (a new one of
//! which wants to see one), and what the shared libraries lie on.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

use crate::error::{Context, Result, SysError};
use crate::{mount, mountinfo, ns};

/// The namespace; gone with the last process in it and this value.
#[derive(Debug)]
pub struct BareMounts {
    namespace: OwnedFd,
}

impl BareMounts {
    /// Makes the namespace, on a thread of its own.
    ///
    /// # Errors
    /// `EPERM` without privileges; `EAGAIN` if there can be no thread; those of the mounts.
    pub fn new() -> Result<Self> {
        let thread = std::thread::Builder::new()
            .name("bare-mounts".to_owned())
            .spawn(make)
            .map_err(|e| {
                let errno = e.raw_os_error().unwrap_or(libc::EAGAIN);
                let errno = rustix::io::Errno::from_raw_os_error(errno);
                SysError::new("clone", "a thread", errno)
            })?;
        let made = thread.join().unwrap_or_else(|_| {
            let errno = rustix::io::Errno::CANCELED;
            Err(SysError::new("join", "a thread", errno))
        });
        made.map(|namespace| Self { namespace })
    }

    /// Calls `f` with the calling thread in the namespace, and comes back. From the first call
    /// on, the thread's working directory and umask are its own.
    ///
    /// Ends the process if the way back fails: nothing may go on in the wrong place.
    ///
    /// # Errors
    /// If the namespace cannot be entered; `f` is not called then.
    pub fn within<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        let own = open_own()?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, ".", flags, Mode::empty()).ok();
        // SAFETY: FS does not touch descriptors; only the root, the working directory and the
        // umask stop being shared with other threads.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }
            .context("unshare", || "working directory")?;
        enter(&self.namespace)?;
        let way_back = WayBack { own, directory };
        let result = f();
        drop(way_back);
        Ok(result)
    }
}

/// Takes the thread back, also when the work panics.
struct WayBack {
    own: OwnedFd,
    directory: Option<OwnedFd>,
}

impl Drop for WayBack {
    fn drop(&mut self) {
        if enter(&self.own).is_err() {
            std::process::abort();
        }
        // A directory that was removed is no reason to fail: the root will do.
        if let Some(directory) = &self.directory {
            let _ = rustix::process::fchdir(directory);
        }
    }
}

fn open_own() -> Result<OwnedFd> {
    let path = "/proc/thread-self/ns/mnt";
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).context("open", || path)
}

fn enter(namespace: &OwnedFd) -> Result<()> {
    rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))
        .context("setns", || "mount namespace")
}

fn make() -> Result<OwnedFd> {
    let points = wanted(&mountinfo::read()?, &mapped()?);
    ns::unshare_mounts()?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let host = rustix::fs::open("/", flags, Mode::empty()).context("open", || "/")?;
    mount::set_private(host.as_fd(), true)?;
    let root = mount::bind(Path::new("/"))?;
    let mut others = Vec::with_capacity(points.len());
    for point in points {
        others.push((mount::bind(&point)?, point));
    }
    mount::attach(root.as_fd(), Path::new("/"))?;
    rustix::process::fchdir(&root).context("fchdir", || "/")?;
    ns::pivot_root(Path::new("."), Path::new("."))?;
    rustix::process::fchdir(&host).context("fchdir", || "/")?;
    mount::unmount(Path::new("."), true)?;
    rustix::process::chdir("/").context("chdir", || "/")?;
    for (mount, point) in &others {
        mount::attach(mount.as_fd(), point)?;
    }
    open_own()
}

/// The mount points other than `/` that `files`, `/proc` and `/sys` are seen through, parents
/// first.
fn wanted(mounts: &[mountinfo::MountEntry], files: &BTreeSet<PathBuf>) -> BTreeSet<PathBuf> {
    let targets = mounts.iter().map(|entry| entry.target.as_path());
    targets
        .filter(|target| *target != Path::new("/"))
        .filter(|target| {
            *target == Path::new("/proc")
                || *target == Path::new("/sys")
                || files.iter().any(|file| file.starts_with(target))
        })
        .map(Path::to_owned)
        .collect()
}

/// The files that this program has mapped, and what its loader reads.
fn mapped() -> Result<BTreeSet<PathBuf>> {
    let path = "/proc/self/maps";
    let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .context("open", || path)?;
    let mut text = Vec::new();
    let mut buffer = [0u8; 16 << 10];
    loop {
        let n = rustix::io::retry_on_intr(|| rustix::io::read(&fd, &mut buffer))
            .context("read", || path)?;
        if n == 0 {
            break;
        }
        text.extend_from_slice(buffer.get(..n).unwrap_or_default());
    }
    let mut files: BTreeSet<PathBuf> = String::from_utf8_lossy(&text)
        .lines()
        .filter_map(|line| line.find('/').and_then(|at| line.get(at..)))
        .map(PathBuf::from)
        .collect();
    files.insert(PathBuf::from("/etc/ld.so.cache"));
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(target: &str) -> mountinfo::MountEntry {
        let line = format!("1 2 0:3 / {target} rw - ext4 none rw\n");
        mountinfo::parse(line.as_bytes()).remove(0)
    }

    #[test]
    fn only_what_is_needed_is_kept() {
        let mounts = [
            "/",
            "/proc",
            "/proc/sys/fs/binfmt_misc",
            "/sys",
            "/usr",
            "/usr/lib",
            "/home",
            "/us",
        ]
        .map(entry);
        let files = [PathBuf::from("/usr/lib/libc.so.6")].into();
        let kept: Vec<PathBuf> = wanted(&mounts, &files).into_iter().collect();
        assert_eq!(
            kept,
            ["/proc", "/sys", "/usr", "/usr/lib"].map(PathBuf::from)
        );
    }
}
