//! Getting a FUSE connection mounted on a directory and taking it away: by the kernel's own calls
//! where the caller may, else by `fusermount3`, which is there for everybody else.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use layerpack_sys::mount::{self, FuseOptions};
use layerpack_sys::{SysError, fdpass, fusedev};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::SUBTYPE;
use crate::error::{IoContext, LayerfsError, Result};

const SOURCE: &str = "layerpack";
const HELPER: &str = "fusermount3";
/// Variable that tells the helper on which descriptor to hand the connection over.
const HANDOVER: &str = "_FUSE_COMMFD";

/// A connection that has been mounted.
pub(super) struct Connection {
    /// Where requests come from.
    pub(super) device: OwnedFd,
    /// The mount, if it has still to be attached to the directory.
    tree: Option<OwnedFd>,
}

impl Connection {
    /// Mounts a connection for `directory`.
    pub(super) fn mount(directory: &Path, allow_other: bool) -> Result<Self> {
        match by_kernel(allow_other) {
            Ok(connection) => Ok(connection),
            Err(e) if matches!(e.errno, Errno::PERM | Errno::ACCESS) => {
                by_helper(directory, allow_other)
            }
            Err(e) => Err(refused(directory, &e.to_string())),
        }
    }

    /// Makes the mount appear, once it is served.
    pub(super) fn attach(&mut self, directory: &Path) -> Result<()> {
        if let Some(tree) = self.tree.take() {
            mount::attach(tree.as_fd(), directory)?;
        }
        Ok(())
    }
}

impl Connection {
    /// Takes the mount away again, if it appeared.
    pub(super) fn abandon(self, directory: &Path) {
        if self.tree.is_none()
            && let Err(e) = unmount(directory, true)
        {
            tracing::warn!(error = %e, "a mount that is not served stays");
        }
    }
}

fn refused(directory: &Path, reason: &str) -> LayerfsError {
    LayerfsError::Unsupported {
        feature: "mounting by FUSE",
        reason: format!("{}: {reason}", directory.display()),
        remedy: "install fuse3 (for fusermount3), load the kernel's fuse module, let everybody open /dev/fuse (mode 666, as udev sets it), and mount on a directory of your own; other users are let in only where /etc/fuse.conf has user_allow_other",
    }
}

fn by_kernel(allow_other: bool) -> Result<Connection, SysError> {
    let device = fusedev::open()?;
    let tree = mount::fuse_with(
        device.as_fd(),
        &FuseOptions {
            source: SOURCE,
            subtype: SUBTYPE,
            allow_other,
            default_permissions: allow_other,
            max_read: 0,
            read_only: true,
        },
    )?;
    Ok(Connection {
        device,
        tree: Some(tree),
    })
}

fn by_helper(directory: &Path, allow_other: bool) -> Result<Connection> {
    let mut options = format!("ro,nosuid,nodev,fsname={SOURCE},subtype={SUBTYPE}");
    if allow_other {
        options.push_str(",allow_other,default_permissions");
    }
    let (ours, theirs) = UnixStream::pair().at("make a socket for", Path::new(HELPER))?;
    let child = Command::new(HELPER)
        .args(["-o", &options, "--"])
        .arg(directory)
        // Its standard input is the socket: no other descriptor has to be passed on.
        .env(HANDOVER, "0")
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| refused(directory, &format!("{HELPER} cannot be started: {e}")))?;
    let mut byte = [0_u8; 1];
    let received = fdpass::recv_fds(ours.as_fd(), &mut byte);
    let output = child.wait_with_output().at("wait for", Path::new(HELPER))?;
    let device = received.ok().and_then(|(_, fds)| fds.into_iter().next());
    match device {
        Some(device) if output.status.success() => Ok(Connection { device, tree: None }),
        _ => Err(refused(directory, &said(&output.stderr))),
    }
}

fn said(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    match text.trim() {
        "" => format!("{HELPER} refused"),
        text => text.replace('\n', "; "),
    }
}

/// Unmounts a directory, with `fusermount3` where the kernel wants more privilege. With `lazy` it
/// disappears at once, and ends when its last user does.
///
/// # Errors
/// When it is busy (without `lazy`), not mounted, or another user's.
pub fn unmount(directory: &Path, lazy: bool) -> Result<()> {
    let flags = if lazy {
        UnmountFlags::NOFOLLOW | UnmountFlags::DETACH
    } else {
        UnmountFlags::NOFOLLOW
    };
    match rustix::mount::unmount(directory, flags) {
        Ok(()) => return Ok(()),
        Err(Errno::PERM) => {}
        Err(e) => return Err(e).at("unmount", directory),
    }
    let done = Command::new(HELPER)
        .args(["-u", "-q"])
        .args(lazy.then_some("-z"))
        .arg("--")
        .arg(directory)
        .stdin(Stdio::null())
        .output();
    let output = done.map_err(|e| LayerfsError::Unsupported {
        feature: "unmounting as this user",
        reason: format!("{HELPER} cannot be started: {e}"),
        remedy: "install fuse3, or unmount as root",
    })?;
    if output.status.success() {
        return Ok(());
    }
    Err(std::io::Error::other(format!(
        "{}: the mount is busy, or not yours",
        said(&output.stderr)
    )))
    .at("unmount", directory)
}
