//! Serves layers on a node: on-demand, verified reads, a disk cache, kernel mounts.
//!
//! See `SEMANTICS.md` beside this crate for what is promised to readers, in which states.
//!
//! * [`Node`]: layers and stacks mounted from one state directory.
//! * [`fuse`]: a small transport for a directory of read-only blobs.
//! * [`cache`]: what the node holds of a layer's data.
//! * [`fetch`]: what brings the rest, verified.
//! * [`peers`]: other nodes' caches, asked before the store.
//! * [`holder`]: a process that keeps the mounts' descriptors while the serving one is replaced.
//! * [`implicit`]: directories that a layer has but does not define.
//! * [`whole`]: a stack as one FUSE filesystem, for where no node may mount.

pub mod cache;
mod error;
pub mod fetch;
mod files;
pub mod fuse;
pub mod holder;
pub mod implicit;
mod learnt;
mod node;
pub mod peers;
mod pool;
mod record;
mod sync;
mod trace;
pub mod whole;

pub use error::{LayerfsError, Result};
pub use learnt::LEARNT;
pub use node::{
    CacheChecked, CacheStatus, CachedLayer, ErofsBacking, Evicted, GivenManifests, LayerHandle,
    LayerStatus, LearntProfile, LeaseInfo, LeaseSpec, Node, NodeConfig, NodeMetrics, NodeStatus,
    PrefetchMode, PrefetchSpec, PublishedProfile, Recorded, RecordingBegun, Stack, StoreOpener,
    Totals, is_lost,
};
pub use record::Touch;
pub use trace::{TraceBatch, TraceEvent, TraceKind};
