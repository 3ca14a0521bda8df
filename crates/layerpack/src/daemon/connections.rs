//! Connections of one sandbox's processes to its channel: so many at a time, and none that holds its
//! place without asking for anything.

use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::SocketAddr;
use tokio::net::{UnixListener, UnixStream};

/// Connections of one sandbox at a time; for more, the one that has been idle for longest is closed.
const MOST_CONNECTIONS: usize = 32;
/// How long a connection may take for its request, or to take its answer.
const IDLE: Duration = Duration::from_secs(5);
/// How often that is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// Accepts connections of one sandbox's processes.
#[derive(Debug)]
pub(super) struct OfSandbox {
    inner: UnixListener,
    /// Of the sandbox's first process.
    namespace: PathBuf,
    most: usize,
    open: Vec<Weak<Connection>>,
}

/// One connection, as the listener and its request know it.
#[derive(Debug)]
pub(super) struct Connection {
    /// The same socket once more.
    socket: std::os::unix::net::UnixStream,
    /// Since when nothing has been done for it; nothing: its request is being answered.
    idle: Mutex<Option<Instant>>,
}

impl Connection {
    fn idle_since(&self) -> Option<Instant> {
        *self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, idle: Option<Instant>) {
        *self.idle.lock().unwrap_or_else(PoisonError::into_inner) = idle;
    }

    /// Whoever reads from it sees its end.
    fn end(&self) {
        // One that is gone already is as good.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// A request's own connection.
#[derive(Debug, Clone)]
pub(super) struct Peer(Arc<Connection>);

impl Peer {
    /// The request is whole: the connection is not idle until this is dropped.
    pub(super) fn busy(self) -> Busy {
        self.0.set(None);
        Busy(self.0)
    }
}

impl Connected<IncomingStream<'_, OfSandbox>> for Peer {
    fn connect_info(stream: IncomingStream<'_, OfSandbox>) -> Self {
        Self(Arc::clone(&stream.io().connection))
    }
}

/// See [`Peer::busy`].
#[derive(Debug)]
pub(super) struct Busy(Arc<Connection>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.set(Some(Instant::now()));
    }
}

impl OfSandbox {
    /// Accepts only processes of this pid namespace.
    pub(super) fn new(inner: UnixListener, namespace: PathBuf) -> Self {
        Self {
            inner,
            namespace,
            most: MOST_CONNECTIONS,
            open: Vec::new(),
        }
    }

    fn is_inside(&self, stream: &UnixStream) -> bool {
        stream
            .peer_cred()
            .ok()
            .and_then(|peer| peer.pid())
            .and_then(pid_namespace)
            .is_some_and(|namespace| namespace == self.namespace)
    }

    /// Takes a connection in, in place of an idle one if there are too many. `false`: all are busy.
    fn make_room(&mut self) -> bool {
        self.open.retain(|open| open.strong_count() > 0);
        if self.open.len() < self.most {
            return true;
        }
        let oldest = (self.open.iter().enumerate())
            .filter_map(|(at, open)| Some((open.upgrade()?.idle_since()?, at)))
            .min();
        let Some((_, at)) = oldest else {
            return false;
        };
        if let Some(connection) = self.open.swap_remove(at).upgrade() {
            tracing::debug!("an idle connection of a sandbox gives way");
            connection.end();
        }
        true
    }

    fn taken(&mut self, stream: UnixStream) -> std::io::Result<Counted> {
        let socket = std::os::unix::net::UnixStream::from(stream.as_fd().try_clone_to_owned()?);
        let connection = Arc::new(Connection {
            socket,
            idle: Mutex::new(Some(Instant::now())),
        });
        self.open.push(Arc::downgrade(&connection));
        tokio::spawn(watch(Arc::downgrade(&connection)));
        Ok(Counted { stream, connection })
    }
}

/// The pid namespace of a process.
pub(super) fn pid_namespace(pid: i32) -> Option<PathBuf> {
    fs_err::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

/// Ends a connection that has been idle for too long.
async fn watch(connection: Weak<Connection>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(connection) = connection.upgrade() else {
            return;
        };
        if connection
            .idle_since()
            .is_some_and(|since| since.elapsed() > IDLE)
        {
            connection.end();
            return;
        }
    }
}

impl axum::serve::Listener for OfSandbox {
    type Io = Counted;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Counted, SocketAddr) {
        loop {
            match self.inner.accept().await {
                Ok((stream, _)) if !self.is_inside(&stream) => {
                    tracing::warn!("dropped a connection to a sandbox's channel from elsewhere");
                }
                Ok((stream, peer)) => {
                    if !self.make_room() {
                        tracing::warn!("a sandbox has too many connections");
                        continue;
                    }
                    match self.taken(stream) {
                        Ok(counted) => return (counted, peer),
                        Err(error) => tracing::warn!(%error, "cannot watch a connection"),
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a sandbox's connection");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// A connection, counted while it lasts.
#[derive(Debug)]
pub(super) struct Counted {
    stream: UnixStream,
    connection: Arc<Connection>,
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use axum::serve::Listener as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[test]
    fn an_idle_connection_gives_way_and_a_busy_one_does_not() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("s");
            let inner = UnixListener::bind(&path).unwrap();
            let own = i32::try_from(std::process::id()).unwrap();
            let mut listener = OfSandbox::new(inner, pid_namespace(own).unwrap());
            listener.most = 2;
            let mut first = UnixStream::connect(&path).await.unwrap();
            let (one, _) = listener.accept().await;
            let mut second = UnixStream::connect(&path).await.unwrap();
            let (mut two, _) = listener.accept().await;
            // The older one works, so the younger one goes.
            let busy = Peer(Arc::clone(&one.connection)).busy();
            let mut third = UnixStream::connect(&path).await.unwrap();
            let (three, _) = listener.accept().await;
            assert_eq!(second.read(&mut [0]).await.unwrap(), 0);
            assert_eq!(two.read(&mut [0]).await.unwrap(), 0);
            drop(two);
            // Both are busy: the next one is refused, and they go on.
            let also = Peer(Arc::clone(&three.connection)).busy();
            assert!(!listener.make_room());
            for (end, mut mine) in [(&mut first, one), (&mut third, three)] {
                mine.write_all(b"x").await.unwrap();
                assert_eq!(end.read(&mut [0]).await.unwrap(), 1);
            }
            // What has ended makes room.
            drop((busy, also));
            assert!(listener.make_room());
        });
    }
}
