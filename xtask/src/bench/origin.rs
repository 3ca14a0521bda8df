//! What layers are fetched from: nginx over the store's directory, and before it a relay that
//! delays each request, counts, and has faults when it is told to.
//!
//! The relay copies bytes through this process. That costs some processor time beside nginx, which
//! all candidates pay that go through it; making a connection is not delayed.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use layerpack_fixtures::servers::Nginx;

/// Bytes that the relay moves at a time.
const PIECE: usize = 256 << 10;

/// What the relay does to whoever fetches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Fault {
    /// Nothing: all is well.
    None = 0,
    /// Hangs up on every connection, old and new.
    Refuse = 1,
    /// Hangs up in the middle of each reply.
    Cut = 2,
    /// Turns a bit in each reply.
    Corrupt = 3,
    /// Sends nothing on.
    Hang = 4,
}

#[derive(Debug)]
struct Shared {
    upstream: SocketAddr,
    delay_us: AtomicU64,
    fault: AtomicU8,
    stopped: AtomicBool,
    requests: AtomicU64,
    bytes: AtomicU64,
}

impl Shared {
    fn fault_is(&self, fault: Fault) -> bool {
        self.fault.load(Ordering::Relaxed) == fault as u8
    }

    fn over(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

/// A relay between clients that only ask (GET, HEAD) and a server.
#[derive(Debug)]
pub(super) struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<std::thread::JoinHandle<()>>,
}

impl Relay {
    /// Starts to listen on a free port of this machine.
    ///
    /// # Errors
    /// When it cannot listen.
    pub(super) fn start(upstream: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            upstream,
            delay_us: AtomicU64::new(0),
            fault: AtomicU8::new(0),
            stopped: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        });
        let own = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if own.over() {
                    return;
                }
                let shared = Arc::clone(&own);
                // Ends with its connection.
                std::thread::spawn(move || serve(&client, &shared));
            }
        });
        Ok(Self {
            address,
            shared,
            acceptor: Some(acceptor),
        })
    }

    /// `HOST:PORT`.
    pub(super) fn host(&self) -> String {
        self.address.to_string()
    }

    /// How long each request waits before it is passed on.
    pub(super) fn delay(&self, milliseconds: u64) {
        self.shared
            .delay_us
            .store(milliseconds * 1000, Ordering::Relaxed);
    }

    /// From now on.
    pub(super) fn fault(&self, fault: Fault) {
        self.shared.fault.store(fault as u8, Ordering::Relaxed);
    }

    /// Requests and bytes of replies, heads included, since the last call.
    pub(super) fn counted(&self) -> (u64, u64) {
        (
            self.shared.requests.swap(0, Ordering::Relaxed),
            self.shared.bytes.swap(0, Ordering::Relaxed),
        )
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn serve(client: &TcpStream, shared: &Shared) {
    let Ok(server) = TcpStream::connect(shared.upstream) else {
        return;
    };
    for stream in [client, &server] {
        let _ = stream.set_nodelay(true);
        // So that a connection that nobody uses notices the relay's end.
        let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = requests(client, &server, shared);
            let _ = server.shutdown(Shutdown::Both);
            let _ = client.shutdown(Shutdown::Both);
        });
        let _ = replies(&server, client, shared);
        let _ = client.shutdown(Shutdown::Both);
        let _ = server.shutdown(Shutdown::Both);
    });
}

/// Reads once more after a time without anything, until the relay ends.
fn read(mut from: &TcpStream, buffer: &mut [u8], shared: &Shared) -> std::io::Result<usize> {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    loop {
        match from.read(buffer) {
            Err(error) if matches!(error.kind(), WouldBlock | TimedOut | Interrupted) => {
                if shared.over() || shared.fault_is(Fault::Refuse) {
                    return Ok(0);
                }
            }
            outcome => return outcome,
        }
    }
}

/// Passes requests on, each head after its delay. What is asked has no body.
fn requests(client: &TcpStream, mut server: &TcpStream, shared: &Shared) -> std::io::Result<()> {
    let mut pending = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let end = pending.windows(4).position(|four| four == b"\r\n\r\n");
        let Some(end) = end else {
            let count = read(client, &mut buffer, shared)?;
            if count == 0 {
                return Ok(());
            }
            pending.extend_from_slice(buffer.get(..count).unwrap_or_default());
            continue;
        };
        shared.requests.fetch_add(1, Ordering::Relaxed);
        if shared.fault_is(Fault::Refuse) {
            return Ok(());
        }
        let delay = shared.delay_us.load(Ordering::Relaxed);
        if delay > 0 {
            std::thread::sleep(Duration::from_micros(delay));
        }
        let head: Vec<u8> = pending.drain(..end + 4).collect();
        server.write_all(&head)?;
    }
}

/// Passes replies on, and does to them what it is told to.
fn replies(server: &TcpStream, mut client: &TcpStream, shared: &Shared) -> std::io::Result<()> {
    let mut buffer = vec![0; PIECE];
    loop {
        let count = read(server, &mut buffer, shared)?;
        let Some(piece) = buffer.get_mut(..count).filter(|piece| !piece.is_empty()) else {
            return Ok(());
        };
        while shared.fault_is(Fault::Hang) && !shared.over() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let half = count / 2;
        if shared.fault_is(Fault::Refuse) {
            return Ok(());
        }
        if shared.fault_is(Fault::Cut) {
            return client.write_all(piece.get(..half).unwrap_or_default());
        }
        if shared.fault_is(Fault::Corrupt)
            && let Some(byte) = piece.get_mut(half)
        {
            *byte ^= 0x10;
        }
        shared
            .bytes
            .fetch_add(u64::try_from(count).unwrap_or_default(), Ordering::Relaxed);
        client.write_all(piece)?;
    }
}

/// A store's directory behind nginx and a relay.
#[derive(Debug)]
pub(super) struct Origin {
    relay: Relay,
    _nginx: Nginx,
}

impl Origin {
    /// Serves `directory`.
    ///
    /// # Errors
    /// When nginx is missing or does not start.
    pub(super) fn start(directory: &Path) -> Result<Self> {
        let nginx = Nginx::start(directory)?;
        Ok(Self {
            relay: Relay::start(nginx.address())?,
            _nginx: nginx,
        })
    }

    /// The store's address.
    pub(super) fn url(&self) -> String {
        format!("http://{}/", self.relay.host())
    }

    /// What is in between.
    pub(super) fn relay(&self) -> &Relay {
        &self.relay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that answers each head with ten bytes.
    fn ten_bytes() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                std::thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while stream.read(&mut buffer).is_ok_and(|count| count > 0) {
                        if stream.write_all(b"0123456789").is_err() {
                            return;
                        }
                    }
                });
            }
        });
        address
    }

    fn ask(relay: &Relay) -> std::io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect(relay.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n")?;
        let mut reply = vec![0; 10];
        stream.read_exact(&mut reply)?;
        Ok(reply)
    }

    #[test]
    fn the_relay_counts_passes_on_and_spoils_what_it_is_told_to() {
        let relay = Relay::start(ten_bytes()).unwrap();
        relay.delay(1);
        assert_eq!(ask(&relay).unwrap(), b"0123456789");
        assert_eq!(relay.counted(), (1, 10));
        relay.fault(Fault::Corrupt);
        let spoilt = ask(&relay).unwrap();
        assert_eq!(
            spoilt
                .iter()
                .zip(b"0123456789")
                .filter(|(a, b)| a != b)
                .count(),
            1
        );
        for fault in [Fault::Cut, Fault::Refuse] {
            relay.fault(fault);
            assert!(ask(&relay).is_err());
        }
        relay.fault(Fault::None);
        assert_eq!(ask(&relay).unwrap(), b"0123456789");
    }
}
