//! The daemon's HTTP API: paths and JSON bodies, described for other clients in `API.md`.
//!
//! Both sides of this crate use these types, so server and client cannot drift apart. Fields may
//! be added within an API version and readers ignore what they do not know; anything else raises
//! [`VERSION`].

use std::path::{Path, PathBuf};

use layerpack_layerfs::{
    CacheChecked, LeaseInfo, LeaseSpec, NodeStatus, PrefetchSpec, PublishedProfile,
};
use layerpack_store::{Digest, LayerId};
use serde::{Deserialize, Serialize};

/// Version of the API, the `1` of `/v1/…`.
pub(crate) const VERSION: u32 = 1;

/// Name of the socket in the node's root directory.
pub(crate) const SOCKET_NAME: &str = "daemon.sock";
/// Name of the daemon's log in the node's root directory, when a command started it.
pub(crate) const LOG_NAME: &str = "daemon.log";

/// `GET`: [`Info`].
pub(crate) const INFO: &str = "/v1/info";
/// `GET`: [`Status`].
pub(crate) const STATUS: &str = "/v1/status";
/// `GET`: counters for monitoring, as text.
pub(crate) const METRICS: &str = "/metrics";
/// `POST` [`StackRequest`]: [`StackReply`].
pub(crate) const STACKS: &str = "/v1/stacks";
/// `POST` [`StopRequest`]: [`Stopping`].
pub(crate) const STOP: &str = "/v1/stop";

/// `GET`: [`layerpack_layerfs::CacheStatus`].
pub(crate) const CACHE: &str = "/v1/cache";
/// `POST` [`CachePin`]: [`CachePinned`].
pub(crate) const CACHE_PINS: &str = "/v1/cache/pins";
/// `POST` [`CacheEvict`]: [`layerpack_layerfs::Evicted`].
pub(crate) const CACHE_EVICT: &str = "/v1/cache/evict";
/// `POST` [`CacheLayers`]: [`CacheVerified`].
pub(crate) const CACHE_VERIFY: &str = "/v1/cache/verify";

/// `GET`: a list of [`layerpack_layerfs::LearntProfile`]. `POST` [`PublishRequest`]: [`Published`].
pub(crate) const PROFILES: &str = "/v1/profiles";

/// `POST` [`TraceRequest`]: [`TraceBegun`].
pub(crate) const TRACES: &str = "/v1/traces";

/// The path of one trace. `GET`: [`layerpack_layerfs::TraceBatch`]. `DELETE`: [`TraceEnded`].
pub(crate) fn trace_path(id: &str) -> String {
    format!("{TRACES}/{id}")
}

/// `POST` [`RecordRequest`]: [`RecordBegun`].
pub(crate) const RECORDINGS: &str = "/v1/recordings";

/// `POST` `{"sandbox":…}`, the same as [`ChannelRequest`]: [`ChannelOpen`].
pub(crate) const CHANNELS: &str = "/v1/channels";

/// Where a sandbox sees its channel.
pub(crate) const INSIDE_DIRECTORY: &str = "/dev/layerpack";
/// Name of the socket in a channel's directory.
pub(crate) const INSIDE_SOCKET: &str = "socket";
/// On a sandbox's own socket. `POST` [`InsideRequest`]: what `layerpack -o json pack-diff` prints.
pub(crate) const INSIDE: &str = "/v1/pack-diff";

/// `POST` [`PackRequest`]: what `layerpack -o json pack-diff` prints.
pub(crate) const PACK_DIFF: &str = "/v1/pack-diff";

/// `POST` [`GuardRequest`]: [`Guarding`].
pub(crate) const GUARDS: &str = "/v1/guards";

/// `POST`, without a body: has another holder take the place of this one. [`Holder`].
pub(crate) const HOLDER: &str = "/v1/holder";

/// The path of one recording; `DELETE`: [`Recording`].
pub(crate) fn recording_path(id: &str) -> String {
    format!("{RECORDINGS}/{id}")
}

/// Largest request body, in bytes.
pub(crate) const MAX_REQUEST: usize = 1 << 20;
/// Largest reply that the client takes, in bytes.
pub(crate) const MAX_REPLY: usize = 64 << 20;

/// The path of one lease's stack; `DELETE`: [`Released`].
pub(crate) fn stack_path(lease: &str) -> String {
    format!("{STACKS}/{lease}")
}

/// Whether a lease's id can stand in a path as it is: 1 to 64 letters, digits, `-`, `_` and `.`.
pub(crate) fn valid_lease(id: &str) -> bool {
    (1..=64).contains(&id.len())
        && id
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && !id.starts_with('.')
}

/// Path of the socket of the node at `root`.
pub(crate) fn socket_path(root: &Path) -> PathBuf {
    root.join(SOCKET_NAME)
}

/// Who answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Info {
    /// [`VERSION`] of the daemon.
    pub(crate) api: u32,
    /// Version of its program.
    pub(crate) version: String,
    /// Its process id, in its own pid namespace.
    pub(crate) pid: u32,
    /// The node's root directory.
    pub(crate) root: PathBuf,
    /// When it started, in seconds since 1970.
    pub(crate) started: u64,
    /// Inode number of its mount namespace: layers are visible there only.
    pub(crate) mount_namespace: u64,
    /// What keeps its mounts if it dies; absent: nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) holder: Option<Holder>,
}

/// The process that keeps the daemon's mounts and starts it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holder {
    /// Its process id, in the daemon's pid namespace.
    pub(crate) pid: u32,
    /// Version of its program.
    pub(crate) version: String,
    /// How often the daemon's process died and was started again.
    pub(crate) restarts: u64,
    /// How often it gave way to another program.
    pub(crate) upgrades: u64,
}

/// What the node holds and did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Who answers.
    pub(crate) daemon: Info,
    /// Layers and counters.
    pub(crate) node: NodeStatus,
    /// Who holds what.
    pub(crate) leases: Vec<LeaseInfo>,
}

/// Asks for a stack of layers to be mounted and kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StackRequest {
    /// URL of the store, absolute.
    pub(crate) store: String,
    /// Manifest digests (`b3:…`), bottom first.
    pub(crate) layers: Vec<String>,
    /// Who needs it, until when.
    pub(crate) lease: LeaseSpec,
    /// What to fetch before it is read.
    #[serde(default)]
    pub(crate) prefetch: PrefetchSpec,
    /// Manifests of these layers that the caller has read, as they are stored, in any order: they
    /// need not be fetched again. Each counts for the digest of its bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) manifests: Vec<String>,
}

/// A stack that is up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StackReply {
    /// The lease's id.
    pub(crate) lease: String,
    /// Directories to use as overlay lowers, topmost first. The first may be one more than was
    /// asked for: the stack's implicit directories.
    pub(crate) lowers: Vec<PathBuf>,
    /// Layers that the signature policy warns of, one line each.
    #[serde(default)]
    pub(crate) warnings: Vec<String>,
}

/// Asks for a recording of what is read of some layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordRequest {
    /// Name of the recording; the rules of a lease's id.
    pub(crate) id: String,
    /// URL of the store, absolute.
    pub(crate) store: String,
    /// Manifest digests (`b3:…`), bottom first.
    pub(crate) layers: Vec<String>,
}

/// A recording has begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordBegun {
    /// Layer ids of layers that were in use: what the kernel has cached of them is not seen.
    pub(crate) warm: Vec<String>,
}

/// A recording that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Recording {
    /// Layer ids, as they were given.
    pub(crate) layers: Vec<String>,
    /// Extents in the order of their first use: index into the layers, index into that layer's
    /// extents, length in bytes, milliseconds since the beginning.
    pub(crate) touches: Vec<(u32, u32, u32, u32)>,
    /// Extents that no longer fitted.
    pub(crate) left_out: u64,
}

/// Asks for the reads of a lease's layers as they happen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TraceRequest {
    /// The lease.
    pub(crate) lease: String,
}

/// A trace has begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TraceBegun {
    /// Its number.
    pub(crate) trace: u64,
    /// The layers, bottom first.
    pub(crate) layers: Vec<LayerId>,
}

/// A trace has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TraceEnded {
    /// False when no such trace ran, which is no error.
    pub(crate) ended: bool,
}

/// Asks for what the node has learnt to be stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PublishRequest {
    /// URL of the store, absolute.
    pub(crate) store: String,
    /// Identities of stacks; absent: all whose layers the store has.
    #[serde(default)]
    pub(crate) stacks: Option<Vec<Digest>>,
}

/// What was stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Published {
    /// One entry per stack.
    pub(crate) published: Vec<PublishedProfile>,
}

/// Has layers kept from eviction, or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CachePin {
    /// Layer ids.
    pub(crate) layers: Vec<String>,
    /// Whether they are to be pinned.
    pub(crate) pinned: bool,
}

/// What is pinned now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CachePinned {
    /// Layer ids.
    pub(crate) pinned: Vec<String>,
}

/// Asks for an eviction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CacheEvict {
    /// Layer ids; absent: all.
    #[serde(default)]
    pub(crate) layers: Option<Vec<String>>,
    /// Instead: until so many bytes of disk are free.
    #[serde(default)]
    pub(crate) bytes: Option<u64>,
}

/// Names layers of the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CacheLayers {
    /// Layer ids; absent: all.
    #[serde(default)]
    pub(crate) layers: Option<Vec<String>>,
}

/// What a check of the cache found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CacheVerified {
    /// One entry per layer.
    pub(crate) layers: Vec<CacheChecked>,
}

/// Answer to the end of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Released {
    /// False when no such lease was known, which is no error.
    pub(crate) released: bool,
}

/// Asks the daemon to let a sandbox go on if the process that freezes it dies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GuardRequest {
    /// Id or name of the sandbox.
    pub(crate) sandbox: String,
    /// The process, of the daemon's pid namespace.
    pub(crate) pid: u32,
}

/// The process is watched until it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Guarding {
    /// Always true.
    pub(crate) guarding: bool,
}

/// Asks the daemon to serve the channel of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChannelRequest {
    /// Id or name of the sandbox.
    pub(crate) sandbox: String,
}

/// The channel is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChannelOpen {
    /// Always true.
    pub(crate) open: bool,
}

/// A process inside a sandbox asks for a snapshot of it. A field that is not known is an error: a
/// word for `dry_run` that was mistyped would publish.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct InsideRequest {
    /// Name of the snapshot.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    /// Labels, `KEY=VALUE`.
    #[serde(default)]
    pub(crate) labels: Vec<String>,
    /// Paths to leave as the layers below have them.
    #[serde(default)]
    pub(crate) excludes: Vec<String>,
    /// Do everything but publish.
    #[serde(default)]
    pub(crate) dry_run: bool,
    /// Take the diffs below into the snapshot.
    #[serde(default)]
    pub(crate) squash: bool,
    /// Leave git's indexes as they are.
    #[serde(default)]
    pub(crate) no_git_index: bool,
}

/// Asks for a snapshot of a sandbox, from the host. A field that is not known is an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PackRequest {
    /// Id or name of the sandbox.
    pub(crate) sandbox: String,
    /// Name of the snapshot.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    /// Address of the store; absent: the one that the sandbox's layers came from.
    #[serde(default)]
    pub(crate) store: Option<String>,
    /// File of rules, or `standard`; absent: the node's, if it has any.
    #[serde(default)]
    pub(crate) rules: Option<PathBuf>,
    /// Use no rules, whatever the node has.
    #[serde(default)]
    pub(crate) no_rules: bool,
    /// File of the secret key to sign with.
    #[serde(default)]
    pub(crate) sign: Option<PathBuf>,
    /// Labels, `KEY=VALUE`.
    #[serde(default)]
    pub(crate) labels: Vec<String>,
    /// Paths to leave as the layers below have them.
    #[serde(default)]
    pub(crate) excludes: Vec<String>,
    /// Do everything but publish.
    #[serde(default)]
    pub(crate) dry_run: bool,
    /// Take the diffs below into the snapshot.
    #[serde(default)]
    pub(crate) squash: bool,
    /// Leave git's indexes as they are.
    #[serde(default)]
    pub(crate) no_git_index: bool,
}

/// Asks the daemon to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StopRequest {
    /// Also while leases are held.
    #[serde(default)]
    pub(crate) force: bool,
}

/// The daemon has unmounted everything and ends after this reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stopping {
    /// Always true.
    pub(crate) stopping: bool,
}

/// Body of every reply whose status is not 200.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ErrorReply {
    /// What went wrong.
    pub(crate) error: ErrorBody,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ErrorBody {
    /// One line, fit to be shown as it is.
    pub(crate) message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_ids_cannot_leave_their_path() {
        assert!(valid_lease("mount-0a1b"));
        for id in ["", "a/b", "..", ".x", "a b", "ä", &"x".repeat(65)] {
            assert!(!valid_lease(id), "{id}");
        }
    }
}
