//! The daemon's unix socket: who may connect, and names that are too long for the kernel.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::fs::{Mode, OFlags};
use tokio::net::{UnixListener, UnixStream, unix::SocketAddr};

use crate::api;

/// Socket names are at most 107 bytes and a final zero (`sockaddr_un`).
const MAX_NAME: usize = 107;

/// A name for the socket that the kernel takes, whatever the length of the root's path.
#[derive(Debug)]
pub(crate) struct Address {
    path: PathBuf,
    /// Keeps the short name valid.
    _directory: Option<OwnedFd>,
}

impl Address {
    /// The socket of the node at `root`.
    ///
    /// # Errors
    /// When the path is long and `root` cannot be opened.
    pub(crate) fn of(root: &Path) -> io::Result<Self> {
        let path = api::socket_path(root);
        if path.as_os_str().len() <= MAX_NAME {
            return Ok(Self {
                path,
                _directory: None,
            });
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(root, flags, Mode::empty())?;
        let short = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
        Ok(Self {
            path: api::socket_path(&short),
            _directory: Some(directory),
        })
    }

    /// The name to bind or connect to, valid while `self` lives.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Accepts connections of root and of the daemon's own user, drops all others.
#[derive(Debug)]
pub(crate) struct OwnerOnly {
    inner: UnixListener,
    owner: u32,
}

/// The socket that a service manager opened for us and passed on (`LISTEN_FDS`), if it did.
///
/// Call it once, at the start: later its number may be somebody else's.
///
/// # Errors
/// When what was passed on is not the node's socket: clients would look for it elsewhere.
pub(crate) fn passed_on(root: &Path) -> anyhow::Result<Option<std::os::unix::net::UnixListener>> {
    let mut passed = sd_notify::listen_fds().context("cannot use LISTEN_FDS")?;
    let count = passed.len();
    let Some(number) = passed.next() else {
        return Ok(None);
    };
    if count > 1 {
        bail!(
            "{count} sockets were passed on by the service manager: one is needed, ListenStream={}",
            api::socket_path(root).display()
        );
    }
    let fd = layerpack_sys::fdpass::inherited(number).with_context(|| {
        format!("LISTEN_FDS says that descriptor {number} is open, and it is not")
    })?;
    let listener = std::os::unix::net::UnixListener::from(fd);
    let address = listener
        .local_addr()
        .context("what the service manager passed on is no unix socket")?;
    let wanted = api::socket_path(root);
    let is_ours = address.as_pathname().is_some_and(|path| {
        // By the file, since there may be symbolic links on the way.
        match (fs_err::metadata(path), fs_err::metadata(&wanted)) {
            (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
            _ => false,
        }
    });
    if !is_ours {
        bail!(
            "the service manager passed on the socket {}, where clients do not look for it: set ListenStream={}, or LAYERPACK_ROOT to the directory of the socket",
            address.as_pathname().map_or_else(
                || "without a name".to_owned(),
                |path| path.display().to_string()
            ),
            wanted.display()
        );
    }
    listener
        .set_nonblocking(true)
        .context("cannot use the socket that was passed on")?;
    Ok(Some(listener))
}

impl OwnerOnly {
    /// Binds the socket of the node at `root`, mode 0600. The caller holds the node's lock: a
    /// socket that is there already belongs to a dead daemon and is replaced.
    ///
    /// # Errors
    /// What the kernel says; the name is added by the caller.
    pub(crate) fn bind(root: &Path) -> io::Result<Self> {
        let address = Address::of(root)?;
        match fs_err::remove_file(address.path()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let inner = UnixListener::bind(address.path())?;
        fs_err::set_permissions(address.path(), std::fs::Permissions::from_mode(0o600))?;
        Ok(Self {
            inner,
            owner: rustix::process::geteuid().as_raw(),
        })
    }

    /// Listens on a socket that another process bound.
    ///
    /// # Errors
    /// When it is no such socket.
    pub(crate) fn inherit(fd: OwnedFd) -> io::Result<Self> {
        let listener = std::os::unix::net::UnixListener::from(fd);
        listener.set_nonblocking(true)?;
        Ok(Self {
            inner: UnixListener::from_std(listener)?,
            owner: rustix::process::geteuid().as_raw(),
        })
    }

    fn may_connect(&self, stream: &UnixStream) -> bool {
        stream
            .peer_cred()
            .is_ok_and(|peer| peer.uid() == 0 || peer.uid() == self.owner)
    }
}

impl AsFd for OwnerOnly {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl axum::serve::Listener for OwnerOnly {
    type Io = UnixStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (UnixStream, SocketAddr) {
        loop {
            match self.inner.accept().await {
                Ok((stream, peer)) if self.may_connect(&stream) => return (stream, peer),
                Ok(_) => tracing::warn!("dropped a connection of another user"),
                Err(error) => {
                    // Out of descriptors, most likely: wait for some to be closed.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_files_fit_the_program() {
        let root = Path::new(crate::args::DEFAULT_ROOT);
        let socket = include_str!("../../../../contrib/systemd/layerpack.socket");
        let listen = format!("\nListenStream={}\n", api::socket_path(root).display());
        assert!(socket.contains(&listen), "{listen}");
        let service = include_str!("../../../../contrib/systemd/layerpack.service");
        let told = format!("\nEnvironment=LAYERPACK_ROOT={}\n", root.display());
        assert!(service.contains(&told), "{told}");
        let start = service
            .lines()
            .find_map(|line| line.strip_prefix("ExecStart="))
            .unwrap();
        use clap::Parser as _;
        let parsed = crate::args::Cli::try_parse_from(start.split(' ')).unwrap();
        assert!(matches!(parsed.command, crate::args::Command::Daemon(_)));
    }

    #[test]
    fn a_long_root_still_has_a_socket_name() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("x".repeat(120));
        fs_err::create_dir(&root).unwrap();
        let address = Address::of(&root).unwrap();
        assert!(address.path().as_os_str().len() <= MAX_NAME);
        let _listener = std::os::unix::net::UnixListener::bind(address.path()).unwrap();
        assert!(api::socket_path(&root).exists());
    }
}
