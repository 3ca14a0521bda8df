//! Asking a peer.

use std::io::{self, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::wire::{EXTENTS, Head, NODE, Timed, numbers, ranges, wrong};
use super::{PeerAnswer, PeerAsk, PeerToken};

/// Connections that are kept for the next request.
const MAX_IDLE: usize = 8;
/// How long they are kept; less than the other side keeps them.
const IDLE: Duration = Duration::from_secs(15);
/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_millis(1000);

/// Why a peer gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// It does not serve the layer.
    #[error("the peer does not serve this layer")]
    Absent,
    /// It has too much to do.
    #[error("the peer has too much to do")]
    Busy,
    /// It asks for another token.
    #[error("the peer refuses this node's token")]
    Refused,
    /// It did not answer in time.
    #[error("the peer did not answer in time")]
    TimedOut,
    /// It cannot be reached, hung up, or says what no peer says.
    #[error("the peer cannot be used")]
    Failed(#[source] io::Error),
}

impl From<io::Error> for PeerError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Self::TimedOut,
            _ => Self::Failed(error),
        }
    }
}

/// Asks one peer, over connections that it keeps.
#[derive(Debug)]
pub struct PeerClient {
    address: SocketAddr,
    token: Option<PeerToken>,
    idle: Mutex<Vec<(TcpStream, Instant)>>,
}

/// A reply: status, head, body.
type Reply = (u16, Head, Vec<u8>);

impl PeerClient {
    /// A client of the peer at this address; connects on each call only.
    #[must_use]
    pub fn new(address: SocketAddr, token: Option<PeerToken>) -> Self {
        Self {
            address,
            token,
            idle: Mutex::new(Vec::new()),
        }
    }

    /// The peer's address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The peer's identity: 1 to 64 letters and digits.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn node(&self, limit: Duration) -> Result<String, PeerError> {
        let (status, head, _) = self.call("/v1/node", 0, Instant::now() + limit)?;
        check(status)?;
        head.get(NODE)
            .filter(|id| (1..=64).contains(&id.len()))
            .filter(|id| id.bytes().all(|b| b.is_ascii_alphanumeric()))
            .map(str::to_owned)
            .ok_or_else(|| PeerError::Failed(wrong("the peer does not say who it is")))
    }

    /// Extents of a layer, as the peer has them: some, all or none of what was asked for, at most
    /// `max_bytes`. Nothing of it is verified.
    ///
    /// # Errors
    /// [`PeerError`]; also if the answer names what was not asked for.
    pub fn extents(
        &self,
        ask: &PeerAsk,
        max_bytes: u64,
        limit: Duration,
    ) -> Result<PeerAnswer, PeerError> {
        let target = format!(
            "/v1/extents/{}?of={}&fill={}",
            ask.layer.hex(),
            ranges(&ask.extents),
            u8::from(ask.fill)
        );
        let (status, head, bytes) = self.call(&target, max_bytes, Instant::now() + limit)?;
        check(status)?;
        let extents = numbers(head.get(EXTENTS).unwrap_or_default())?;
        if extents
            .iter()
            .any(|extent| ask.extents.binary_search(extent).is_err())
        {
            return Err(PeerError::Failed(wrong(
                "the peer names extents that were not asked for",
            )));
        }
        Ok(PeerAnswer { extents, bytes })
    }

    fn call(&self, target: &str, max_bytes: u64, end: Instant) -> Result<Reply, PeerError> {
        // One that was kept may be closed on the other side by now: then once more, with a new one.
        while let Some(stream) = self.kept() {
            match self.exchange(stream, target, max_bytes, end) {
                Err(error) if is_stale(&error) => {}
                done => return Ok(done?),
            }
        }
        let left = end.saturating_duration_since(Instant::now()).min(CONNECT);
        if left.is_zero() {
            return Err(PeerError::TimedOut);
        }
        let stream = TcpStream::connect_timeout(&self.address, left)?;
        let _ = stream.set_nodelay(true);
        Ok(self.exchange(stream, target, max_bytes, end)?)
    }

    fn kept(&self) -> Option<TcpStream> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|(_, since)| since.elapsed() < IDLE);
        idle.pop().map(|(stream, _)| stream)
    }

    fn exchange(
        &self,
        stream: TcpStream,
        target: &str,
        max_bytes: u64,
        end: Instant,
    ) -> io::Result<Reply> {
        let mut request = format!("GET {target} HTTP/1.1\r\nhost: {}\r\n", self.address);
        if let Some(token) = &self.token {
            request.push_str(&format!("authorization: Bearer {}\r\n", token.0));
        }
        request.push_str("\r\n");
        let mut stream = Timed { stream, end };
        stream.write_all(request.as_bytes())?;
        let mut reader = BufReader::new(stream);
        let head = Head::read(&mut reader)?.ok_or(io::ErrorKind::ConnectionReset)?;
        let status = head
            .start
            .strip_prefix("HTTP/1.")
            .and_then(|rest| rest.split(' ').nth(1)?.parse::<u16>().ok())
            .ok_or_else(|| wrong("the peer does not speak HTTP"))?;
        let len = head.body_len()?;
        if status != 200 {
            // What it says besides does not matter, and neither does the connection.
            return Ok((status, head, Vec::new()));
        }
        if len > max_bytes {
            return Err(wrong("the peer's answer is longer than what was asked for"));
        }
        let mut body = vec![0; usize::try_from(len).map_err(|_| wrong("a body is too long"))?];
        reader.read_exact(&mut body)?;
        if !head.closes() && reader.buffer().is_empty() {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            if idle.len() < MAX_IDLE {
                idle.push((reader.into_inner().stream, Instant::now()));
            }
        }
        Ok((status, head, body))
    }
}

/// Whether a kept connection was closed before it was used again.
fn is_stale(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
    )
}

fn check(status: u16) -> Result<(), PeerError> {
    match status {
        200 => Ok(()),
        401 | 403 => Err(PeerError::Refused),
        404 => Err(PeerError::Absent),
        429 | 503 => Err(PeerError::Busy),
        other => Err(PeerError::Failed(wrong(&format!(
            "the peer answered with status {other}"
        )))),
    }
}
