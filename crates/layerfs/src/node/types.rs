//! What callers of a [`super::Node`] give and get.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use layerpack_store::{Digest, LayerId, LayerStore, StoreError};
use serde::{Deserialize, Serialize};

use super::backing::ErofsBacking;
use crate::fetch::FetchConfig;
use crate::fuse::{OpenMode, SessionConfig};
use crate::peers::{PeerInfo, PeersConfig};

/// Opens a store by the address that its [`LayerStore::url`] gave: after a restart the node
/// knows stores only by it.
pub type StoreOpener = Arc<dyn Fn(&str) -> Result<LayerStore, StoreError> + Send + Sync>;

/// Settings of a node.
#[derive(Clone)]
pub struct NodeConfig {
    /// Directory of the node's state: cache, mount points, leases. On a local disk that is
    /// neither overlayfs nor EROFS.
    pub root: PathBuf,
    /// Descriptors of `/dev/fuse`, each with a thread that answers cached reads.
    pub channels: usize,
    /// Limits of the FUSE connection.
    pub session: SessionConfig,
    /// Limits of fetching.
    pub fetch: FetchConfig,
    /// How the kernel reads data files: through their own page cache or past it.
    pub open_mode: OpenMode,
    /// How layers are mounted.
    pub erofs: ErofsBacking,
    /// Readahead of the kernel in data files, in KiB, beside its own in the files that lie in them.
    pub read_ahead_kb: u32,
    /// Layers without a lease that stay mounted, so that their next user finds them warm.
    pub idle_layers: usize,
    /// Bytes a second that a fill of whole layers fetches, at most.
    pub fill_bytes_per_second: Option<u64>,
    /// How long after a mount the node learns from its reads; `None`: it learns nothing.
    pub learn: Option<Duration>,
    /// Give what is learnt to the stack's store.
    pub publish_profiles: bool,
    /// Nodes that help each other with what they have.
    pub peers: PeersConfig,
    /// Time between two rounds of housekeeping: cache checkpoints, leases of dead processes.
    pub housekeeping: Duration,
    /// Opens stores by address.
    pub open_store: StoreOpener,
}

impl std::fmt::Debug for NodeConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeConfig")
            .field("root", &self.root)
            .field("channels", &self.channels)
            .field("open_mode", &self.open_mode)
            .finish_non_exhaustive()
    }
}

impl NodeConfig {
    /// Settings that suit a node of a few cores with local or network stores.
    #[must_use]
    pub fn recommended(root: PathBuf) -> Self {
        Self {
            root,
            channels: 4,
            session: SessionConfig::RECOMMENDED,
            fetch: FetchConfig::RECOMMENDED,
            open_mode: OpenMode::Cached,
            erofs: ErofsBacking::Auto,
            read_ahead_kb: 128,
            idle_layers: 64,
            fill_bytes_per_second: Some(64 << 20),
            learn: Some(Duration::from_secs(60)),
            publish_profiles: false,
            peers: PeersConfig::default(),
            housekeeping: Duration::from_secs(15),
            open_store: Arc::new(|url| layerpack_store::open_url(url).map(LayerStore::new)),
        }
    }
}

/// A layer that is mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerHandle {
    /// Identity of the layer's content.
    pub layer_id: LayerId,
    /// Where its EROFS is mounted, read-only.
    pub mountpoint: PathBuf,
}

/// Who wants a stack, and for how long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseSpec {
    /// Name of the lease, chosen by its owner: 1 to 128 of `a-z A-Z 0-9 . _ -`.
    pub id: String,
    /// What the owner is, for listings: `run`, `sandbox`, `mount`.
    pub owner: String,
    /// Process whose end ends the lease; without it the lease lasts until it is released or
    /// the machine restarts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// A stack that is ready to be mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stack {
    /// Directories for overlayfs, the top first. Includes a generated layer of directories
    /// where the stack needs one.
    pub lowers: Vec<PathBuf>,
    /// The lease that keeps them mounted.
    pub lease: String,
    /// Identities of the layers, the bottom first.
    pub layers: Vec<LayerId>,
}

/// A lease as listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseInfo {
    /// As the owner gave it.
    #[serde(flatten)]
    pub spec: LeaseSpec,
    /// Manifest digests of the stack, the bottom first.
    pub manifests: Vec<Digest>,
    /// Address of the store they come from.
    pub store: String,
    /// What was given out for it.
    pub stack: Stack,
    /// What was mounted of it was served by a process that died with its holder: reads of what the
    /// kernel had not cached then fail. Until it is released, or asked for again.
    #[serde(default)]
    pub lost: bool,
}

/// State of one layer on the node. Counters start with the node; sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerStatus {
    /// Identity of the layer's content.
    pub layer_id: LayerId,
    /// `kind/name:version` it was published as.
    pub reference: String,
    /// Digest of that manifest.
    pub manifest: Digest,
    /// Whether it is mounted now.
    pub mounted: bool,
    /// Leases that use it.
    pub leases: usize,
    /// Opens of its data file by mounts, including copies of mounts in sandboxes.
    pub opens: u64,
    /// Size of its metadata.
    pub meta_bytes: u64,
    /// Size of its data, padding included.
    pub data_bytes: u64,
    /// Bytes of data in the node's cache.
    pub cached_bytes: u64,
    /// All of its data is in the cache: the kernel may read it there by itself, and such reads are
    /// counted nowhere.
    #[serde(default)]
    pub whole: bool,
    /// Bytes fetched from the store for data, as stored (compressed).
    pub fetched_bytes: u64,
    /// The same, after decompression.
    pub fetched_raw_bytes: u64,
    /// Range requests to the store for data.
    pub requests: u64,
    /// Frames fetched.
    pub frames: u64,
    /// Reads that wait for a fetch now.
    #[serde(default)]
    pub waiting: u64,
    /// How long the oldest of them has waited, in milliseconds.
    #[serde(default)]
    pub oldest_wait_ms: u64,
    /// Bytes of data that peers gave, uncompressed.
    #[serde(default)]
    pub from_peers_bytes: u64,
    /// Bytes of data that other layers of the node had, uncompressed.
    #[serde(default)]
    pub copied_bytes: u64,
    /// Bytes written to the cache.
    pub written_bytes: u64,
    /// Bytes given to the kernel.
    pub served_bytes: u64,
    /// Reads answered.
    pub reads: u64,
    /// Of these, reads that had to wait for the store.
    pub misses: u64,
    /// Reads that failed.
    pub errors: u64,
    /// Bytes given to the kernel that the cache could not take.
    pub passed_through_bytes: u64,
    /// Bytes of data evicted from the cache.
    #[serde(default)]
    pub evicted_bytes: u64,
    /// Bytes fetched before they were asked for.
    #[serde(default)]
    pub prefetched_bytes: u64,
    /// Of these, bytes that were read afterwards.
    #[serde(default)]
    pub prefetch_used_bytes: u64,
    /// Of these, bytes that were evicted unread.
    #[serde(default)]
    pub prefetch_wasted_bytes: u64,
}

/// Sums over the layers listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Totals {
    /// Layers mounted.
    pub layers: usize,
    /// Leases held.
    pub leases: usize,
    /// Size of metadata and data of the layers mounted.
    pub layer_bytes: u64,
    /// Bytes of data in the cache.
    pub cached_bytes: u64,
    /// Metadata fetched since the node started (metadata, maps, locators), uncompressed.
    pub meta_fetched_bytes: u64,
    /// Data fetched since the node started, as stored.
    pub fetched_bytes: u64,
    /// The same, after decompression.
    pub fetched_raw_bytes: u64,
    /// Range requests for data.
    pub requests: u64,
    /// Bytes written to the cache, metadata included.
    pub written_bytes: u64,
    /// Frames fetched.
    #[serde(default)]
    pub frames: u64,
    /// Bytes of data that peers gave, uncompressed.
    #[serde(default)]
    pub from_peers_bytes: u64,
    /// Bytes of data that other layers of the node had, uncompressed.
    #[serde(default)]
    pub copied_bytes: u64,
    /// Reads answered.
    #[serde(default)]
    pub reads: u64,
    /// Of these, reads that had to wait for the store.
    #[serde(default)]
    pub misses: u64,
    /// Reads that wait for a fetch now.
    #[serde(default)]
    pub waiting: u64,
    /// Bytes given to the kernel that the cache could not take.
    #[serde(default)]
    pub passed_through_bytes: u64,
    /// Bytes of data evicted from the cache.
    #[serde(default)]
    pub evicted_bytes: u64,
    /// Bytes fetched before they were asked for.
    #[serde(default)]
    pub prefetched_bytes: u64,
    /// Of these, bytes that were read afterwards.
    #[serde(default)]
    pub prefetch_used_bytes: u64,
    /// Of these, bytes that were evicted unread.
    #[serde(default)]
    pub prefetch_wasted_bytes: u64,
    /// Bytes given to the kernel.
    pub served_bytes: u64,
    /// Reads that failed.
    pub errors: u64,
    /// Bytes of frames that readers wait for right now.
    pub inflight_bytes: u64,
    /// Memory that the serving process takes up.
    #[serde(default)]
    pub rss_bytes: u64,
    /// Requests of the kernel so far.
    pub fuse_requests: u64,
    /// What all caches take up on disk: as measured last, and what was written since.
    #[serde(default)]
    pub cache_used_bytes: u64,
    /// Their limit; 0: none.
    #[serde(default)]
    pub cache_max_bytes: u64,
    /// Runs of extents and whole caches evicted.
    #[serde(default)]
    pub evictions: u64,
}

/// State of a node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NodeStatus {
    /// The node's directory.
    pub root: PathBuf,
    /// Layers that are mounted or still held by a mount, in order of identity.
    pub layers: Vec<LayerStatus>,
    /// Sums.
    pub totals: Totals,
    /// What went wrong without stopping the node, newest last.
    pub problems: Vec<String>,
    /// Nodes that this one asks for what they have.
    #[serde(default)]
    pub peers: Vec<PeerInfo>,
    /// What was found of former lives when the node began, and what became of it.
    #[serde(default)]
    pub swept: Vec<String>,
}
