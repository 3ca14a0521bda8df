//! Other nodes' caches, asked before the store.
//!
//! Every part of a layer's data (2 MiB of it) has a **home** among the nodes that serve the layer,
//! the same for whoever works it out: the node whose identity, hashed with layer and part, comes out
//! highest. Who lacks a frame asks its home, and the home fetches it from the store if it lacks it
//! too, once for all that ask. So when many nodes begin to read a layer, the store is asked for each
//! frame about once. A home never passes a question on to another node.
//!
//! A peer is trusted for nothing but load. Its answers are compared with the layer's map like
//! anything from a store; one wrong byte, and it is put aside. Whatever a peer does, a read costs at
//! most two waits of `patience` more than without peers, and then the store is asked.

mod members;
mod serve;

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use layerpack_store::peer::{PeerAsk, PeerError, PeerServer, PeerService, PeerSource, PeerToken};
use serde::{Deserialize, Serialize};

use crate::error::{LayerfsError, Result};
use crate::fetch::Fetcher;
use crate::sync::{AtomicU64, Mutex, Ordering};

pub(crate) use members::{Member, PART, Peers};
pub(crate) use serve::MAX_ANSWER;

/// Which nodes help each other.
#[derive(Debug, Clone)]
pub struct PeersConfig {
    /// Where this node answers others; `None`: it does not.
    pub listen: Option<SocketAddr>,
    /// Nodes to ask.
    pub sources: Vec<PeerSource>,
    /// What they show to each other.
    pub token: Option<PeerToken>,
    /// How long one peer is waited for.
    pub patience: Duration,
}

impl Default for PeersConfig {
    fn default() -> Self {
        Self {
            listen: None,
            sources: Vec::new(),
            token: None,
            patience: Duration::from_secs(2),
        }
    }
}

/// Ways in which a peer did not help.
pub const PEER_FAILURES: [&str; 6] = ["absent", "busy", "refused", "timeout", "failed", "damaged"];

/// Index into [`PEER_FAILURES`].
fn kind(error: &PeerError) -> usize {
    match error {
        PeerError::Absent => 0,
        PeerError::Busy => 1,
        PeerError::Refused => 2,
        PeerError::TimedOut => 3,
        PeerError::Failed(_) => 4,
    }
}
const BUSY: usize = 1;
const REFUSED: usize = 2;
const DAMAGED: usize = 5;

/// Counters. Bytes, or plain numbers.
#[derive(Debug, Default)]
pub(crate) struct PeerMeter {
    pub(crate) asked: AtomicU64,
    pub(crate) received: AtomicU64,
    pub(crate) failures: [AtomicU64; PEER_FAILURES.len()],
    pub(crate) served_requests: AtomicU64,
    pub(crate) served: AtomicU64,
}

impl PeerMeter {
    fn fail(&self, kind: usize) {
        if let Some(counter) = self.failures.get(kind) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// What came of peers since the node started. Bytes are of extents, uncompressed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerStatus {
    /// Peers that are asked at present.
    pub members: u64,
    /// Requests to peers.
    pub requests: u64,
    /// Bytes of extents from peers that were right.
    pub received: u64,
    /// Requests that did not help, by [`PEER_FAILURES`].
    pub failures: [u64; PEER_FAILURES.len()],
    /// Requests of peers that were answered with something.
    pub served_requests: u64,
    /// Bytes given to peers.
    pub served: u64,
}

/// A peer as listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerInfo {
    /// Its address.
    pub address: SocketAddr,
    /// Its identity, once it answered.
    pub node: Option<String>,
    /// Whether it is asked at present.
    pub used: bool,
    /// Failures in a row.
    pub failures: u32,
    /// It does not take this node's token.
    #[serde(default)]
    pub refused: bool,
}

/// Both sides of it for one node; ends when it is dropped.
#[derive(Debug)]
pub struct PeerLink {
    peers: Arc<Peers>,
    service: Arc<serve::Service>,
    listen: Option<SocketAddr>,
    token: Option<PeerToken>,
    server: Mutex<Option<PeerServer>>,
    fetcher: Weak<Fetcher>,
}

impl PeerLink {
    /// Has `fetcher` ask the peers, and answers theirs. `own` is this node's identity: 1 to 64
    /// letters and digits. `None` if nothing is to be asked or answered.
    ///
    /// # Errors
    /// [`LayerfsError::Peers`] when layers could be read from other machines without a token. An
    /// address that is taken is none: [`PeerLink::listen`] can be called again.
    pub fn start(config: &PeersConfig, own: &str, fetcher: &Arc<Fetcher>) -> Result<Option<Self>> {
        if config.listen.is_none() && config.sources.is_empty() {
            return Ok(None);
        }
        let error = |what: String| LayerfsError::Peers { what };
        if let Some(listen) = config.listen
            && !listen.ip().is_loopback()
            && config.token.is_none()
        {
            return Err(error(format!(
                "layer data would be readable by anybody who reaches {listen}: give a token of peers, or listen on the loopback"
            )));
        }
        let mut config = config.clone();
        // A peer must leave the store its time.
        config.patience = config.patience.min(fetcher.read_timeout() / 4);
        let peers = Peers::start(&config, own)
            .map_err(|e| error(format!("no thread to watch peers: {e}")))?;
        let service = serve::Service::new(own, fetcher, &peers, config.patience);
        fetcher.set_peers(Some(Arc::clone(&peers)));
        let link = Self {
            peers,
            service: Arc::new(service),
            listen: config.listen,
            token: config.token,
            server: Mutex::new(None),
            fetcher: Arc::downgrade(fetcher),
        };
        link.listen();
        Ok(Some(link))
    }

    /// Answers peers from now on, if that is wanted and not done yet. An address that is taken, by a
    /// daemon that is about to end perhaps, is a warning in the log.
    pub fn listen(&self) {
        let mut server = self.server.lock();
        let Some(listen) = self.listen.filter(|_| server.is_none()) else {
            return;
        };
        let service: Arc<dyn PeerService> = Arc::clone(&self.service) as _;
        match PeerServer::start(listen, self.token.clone(), service) {
            Ok(started) => *server = Some(started),
            Err(error) => {
                tracing::warn!(%listen, %error, "peers are not answered yet; it is tried again");
            }
        }
    }

    /// Where peers are answered.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.server.lock().as_ref().map(PeerServer::address)
    }

    /// What came of it.
    #[must_use]
    pub fn status(&self) -> PeerStatus {
        self.peers.status()
    }

    /// The peers.
    #[must_use]
    pub fn list(&self) -> Vec<PeerInfo> {
        self.peers.list()
    }
}

impl Drop for PeerLink {
    fn drop(&mut self) {
        if let Some(fetcher) = self.fetcher.upgrade() {
            fetcher.set_peers(None);
        }
        drop(self.server.lock().take());
        self.peers.close();
    }
}

/// What one question to a peer came to.
pub(crate) enum Asked {
    /// Extents and their bytes, not verified.
    Got(layerpack_store::peer::PeerAnswer),
    /// Nothing.
    Nothing,
}

impl Peers {
    /// Asks a peer; what is wrong with it is remembered and counted.
    pub(crate) fn ask(&self, member: &Arc<Member>, ask: &PeerAsk, max_bytes: u64) -> Asked {
        let Some(_slot) = member.slot() else {
            self.meter.fail(BUSY);
            return Asked::Nothing;
        };
        self.meter.asked.fetch_add(1, Ordering::Relaxed);
        let begun = Instant::now();
        match member.client.extents(ask, max_bytes, self.patience) {
            Ok(answer) => Asked::Got(answer),
            Err(error) => {
                self.meter.fail(kind(&error));
                member.note_refused(matches!(error, PeerError::Refused));
                match &error {
                    PeerError::Absent => member.lacks(&ask.layer),
                    PeerError::Busy => {}
                    PeerError::Refused | PeerError::TimedOut | PeerError::Failed(_) => {
                        member.put_aside();
                        tracing::warn!(peer = %member.client.address(), layer = %ask.layer,
                            extents = ask.extents.len(), first = ask.extents.first(),
                            error = %error, waited_ms = begun.elapsed().as_millis(),
                            "a peer is put aside for a while");
                    }
                }
                Asked::Nothing
            }
        }
    }

    /// A peer gave wrong bytes.
    pub(crate) fn lied(&self, member: &Member, ask: &PeerAsk) {
        self.meter.fail(DAMAGED);
        member.put_aside();
        tracing::warn!(peer = %member.client.address(), layer = %ask.layer,
            extents = ask.extents.len(), first = ask.extents.first(),
            "a peer gave wrong bytes; it is put aside, and the store is asked");
    }

    /// A peer gave right bytes.
    pub(crate) fn helped(&self, member: &Member, bytes: u64) {
        member.is_good();
        self.meter.received.fetch_add(bytes, Ordering::Relaxed);
    }
}
