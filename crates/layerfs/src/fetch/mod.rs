//! Reads of a layer's data: from the node's cache, else from the store, verified.
//!
//! A read looks up the extents it touches. What is missing is fetched by **frame**, one flight
//! per frame however many readers ask: the first reader to claim a frame queues its fetch,
//! everybody (the first reader too) waits for the flight, with a deadline. So
//! a store that hangs costs a reader its timeout, never its life, and a leader that gives up
//! strands nobody.
//!
//! What another layer of the node has of a frame is copied (`copies`); what one is fetching just then
//! is waited for (`joint`).
//!
//! A fetched frame is checked twice before one byte of it is visible: the store checks the
//! frame's own digest before decompressing, and here each extent is checked against the
//! layer's map, which the manifest's digest covers. Extents that pass are written to the cache
//! and marked; if the cache cannot take them (full disk), the flight hands the verified bytes to
//! its readers instead.
//!
//! A read holds what it needs against eviction from its start to its answer (`space` has what is
//! evicted when).
//!
//! Memory: before a reader claims frames it takes their size (raw and stored) out of a
//! node-wide budget, and puts it back when it has its bytes; large reads go piece by piece.

mod ahead;
mod blob;
mod budget;
mod copies;
mod evict;
mod flight;
mod give;
mod joint;
mod lend;
mod meter;
mod patience;
mod space;
mod stores;
mod stream;
mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use layerpack_store::{LayerId, StoreError};
use rustix::io::Errno;

use crate::peers::Peers;
use crate::pool::Pool;
use crate::sync::RwLock;

use ahead::Waiting;
pub use ahead::{AheadEnd, AheadOptions, AheadReport, Cancel, fetch_ahead};
pub use blob::{Blob, BlobParts, OpenStore};
use budget::Budget;
use copies::Sharers;
pub use evict::Checked;
use joint::Joint;
use meter::Meter;
pub use meter::{BUCKETS_MS, ERROR_KINDS, Latencies, MeterStatus, STALL};
use space::Space;
pub use space::{ColdCache, SpaceStatus};
use stores::{Lane, Stores};

/// Limits of a [`Fetcher`].
#[derive(Debug, Clone, Copy)]
pub struct FetchConfig {
    /// Fetches under way at once from one store, at most; their threads exist only while there is work.
    pub threads: usize,
    /// Bytes of frames, stored and raw, that readers may be waiting for at once.
    pub inflight_bytes: u64,
    /// Stored bytes that one fetch asks the store for, at most (a single larger frame is
    /// fetched whole).
    pub batch_bytes: u64,
    /// How long a read waits for its bytes before it fails with `ETIMEDOUT`; no more than
    /// [`FetchConfig::LONGEST`].
    pub read_timeout: Duration,
    /// A read whose store cannot be reached tries again until then, instead of failing at once.
    pub wait_for_store: bool,
    /// Bytes of disk that the caches may take up together; `None`: as much as there is.
    pub cache_max: Option<u64>,
}

impl FetchConfig {
    /// As good as no time limit at all.
    pub const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

    /// Limits that suit a node of a few cores.
    pub const RECOMMENDED: Self = Self {
        threads: 8,
        inflight_bytes: 32 << 20,
        batch_bytes: 4 << 20,
        read_timeout: Duration::from_secs(60),
        wait_for_store: false,
        cache_max: None,
    };
}

/// Why a read failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The store could not give the frame, or gave a wrong one.
    #[error("frame cannot be had from the store")]
    Store(#[source] Box<StoreError>),
    /// The store's bytes are not what the layer's map says.
    #[error(
        "extent {extent} at byte {offset} of the layer's data is not what its digest says; verify the layer in its store"
    )]
    Damaged {
        /// Number of the extent in the layer's map.
        extent: u64,
        /// Its first byte in the layer's data.
        offset: u64,
    },
    /// The node's own copy cannot be read.
    #[error("the node's cache file cannot be read")]
    Cache(#[source] std::io::Error),
    /// The bytes did not come in time.
    #[error("no answer within {} ms", limit.as_millis())]
    TimedOut {
        /// The limit.
        limit: Duration,
    },
    /// The node is stopping, or a fetch ended without result.
    #[error("the fetch was given up")]
    Abandoned,
    /// Another reader's fetch of the same frame failed with this.
    #[error(transparent)]
    Shared(Arc<ReadError>),
    /// No store is known to have the layer's data, or it cannot be opened.
    #[error("the layer's store {url} cannot be opened")]
    NoStore {
        /// Address of the store.
        url: String,
        /// Why.
        #[source]
        source: Box<StoreError>,
    },
}

impl ReadError {
    /// Whether the store could not be reached, and may be later.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Store(error) => error.is_transient(),
            Self::Shared(error) => error.may_pass(),
            Self::NoStore { source, .. } => source.is_transient(),
            Self::Damaged { .. } | Self::Cache(_) | Self::TimedOut { .. } | Self::Abandoned => {
                false
            }
        }
    }

    /// What read(2) is to return.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            Self::TimedOut { .. } => Errno::TIMEDOUT,
            Self::Store(error) if matches!(**error, StoreError::TimedOut { .. }) => Errno::TIMEDOUT,
            Self::Shared(error) => error.errno(),
            Self::Store(_)
            | Self::Damaged { .. }
            | Self::Cache(_)
            | Self::Abandoned
            | Self::NoStore { .. } => Errno::IO,
        }
    }
}

/// Fetches for all blobs of a node: threads and limits.
#[derive(Debug)]
pub struct Fetcher {
    config: FetchConfig,
    stores: Stores,
    /// Makes room.
    upkeep: Pool,
    budget: Budget,
    space: Space,
    sharers: Sharers,
    joint: Joint,
    waiting: Waiting,
    meter: Meter,
    peers: RwLock<Option<Arc<Peers>>>,
    /// Waits for peers, which may be waiting for the threads that fetch.
    asking: Pool,
}

impl Fetcher {
    /// A fetcher with these limits.
    #[must_use]
    pub fn new(config: FetchConfig) -> Arc<Self> {
        let config = FetchConfig {
            read_timeout: config.read_timeout.min(FetchConfig::LONGEST),
            ..config
        };
        Arc::new(Self {
            config,
            stores: Stores::new(config.threads),
            upkeep: Pool::new("evict", 1, usize::MAX),
            budget: Budget::new(config.inflight_bytes),
            space: Space::new(config.cache_max),
            sharers: Sharers::default(),
            joint: Joint::default(),
            waiting: Waiting::default(),
            meter: Meter::default(),
            peers: RwLock::new(None),
            asking: Pool::new("ask", config.threads, usize::MAX),
        })
    }

    /// Whether more can be fetched from a store without anybody else waiting for it.
    fn has_spare_threads(&self, lane: &Lane) -> bool {
        lane.pool.load() < self.config.threads.div_ceil(2)
            && self.asking.load() < self.config.threads.div_ceil(2)
    }

    /// How long a read waits for its bytes.
    #[must_use]
    pub fn read_timeout(&self) -> Duration {
        self.config.read_timeout
    }

    /// Has these peers asked before stores.
    pub(crate) fn set_peers(&self, peers: Option<Arc<Peers>>) {
        *self.peers.write() = peers;
    }

    /// The peers that are asked, if any.
    fn peers(&self) -> Option<Arc<Peers>> {
        self.peers.read().as_ref().map(Arc::clone)
    }

    /// The blob of a layer that this fetcher serves, for peers.
    pub(crate) fn shared(&self, layer: LayerId) -> Option<Arc<Blob>> {
        self.find(layer).filter(|blob| !blob.store_url().is_empty())
    }

    /// Bytes of frames that readers are waiting for now. Returns to zero when nobody reads.
    #[must_use]
    pub fn inflight_bytes(&self) -> u64 {
        self.budget.used()
    }

    /// Readers that wait for a fetch right now.
    #[must_use]
    pub fn readers_waiting(&self) -> u64 {
        self.waiting.count()
    }

    /// Readers that wait for a fetch, and how long the one that waits longest has, by layer.
    #[must_use]
    pub fn waiting_by_layer(&self) -> BTreeMap<LayerId, (u64, Duration)> {
        self.waiting.by_layer()
    }

    /// What the fetcher did since it began.
    #[must_use]
    pub fn meter(&self) -> MeterStatus {
        let oldest = self.waiting.oldest().unwrap_or_default();
        MeterStatus {
            waiting: self.waiting.count(),
            oldest_wait_ms: u64::try_from(oldest.as_millis()).unwrap_or(u64::MAX),
            inflight: self.inflight_bytes(),
            ..self.meter.read()
        }
    }

    /// Gives up everything queued (its readers get EIO), starts nothing more, and waits at most
    /// `limit` for fetches under way. Returns whether all ended.
    pub fn close(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let asked = self.asking.close(limit);
        let left = || end.saturating_duration_since(Instant::now());
        let fetched = self.stores.close(left());
        self.upkeep.close(left()) && fetched && asked
    }
}
