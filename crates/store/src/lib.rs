//! Where layers live: digests, references, manifests, the binary formats of FORMAT.md, storage
//! backends, and reading, writing and verifying layers.
//!
//! * [`BlobStore`] is a flat set of immutable objects; [`FileStore`] keeps them in a directory.
//! * [`LayerStore`] reads layers from one: every byte is verified against the manifest.
//! * [`LayerWriter`] publishes a layer: chunks are deduplicated against the store, compressed by
//!   a pool of threads and written to packs; the reference comes last.
//!
//! Nothing here prints, reads the environment or knows what a layer's metadata means.

pub mod blob;
mod buffers;
pub mod channel;
pub mod chunker;
mod codec;
mod digest;
mod error;
pub mod format;
mod gc;
mod holder;
pub mod index;
mod key;
mod layer;
mod manifest;
mod parallel;
pub mod peer;
pub mod profile;
pub mod query;
mod reference;
pub mod registry;
mod signature;
mod spill;
mod spool;
pub mod transfer;

pub use blob::{
    BlobStore, BlobWriter, CachedStore, Disagreement, Fault, FaultStore, FileStore, HttpStore,
    Leftovers, LimitedStore, MemStore, MirrorStore, ObjectInfo, OciStore, OpenOptions, Operation,
    PutMode, PutOutcome, RateLimits, ReadCacheOptions, RetryPolicy, RetryStore, S3Credentials,
    S3Store, Span, Timeouts, open, open_url,
};
pub use buffers::recycle;
pub use codec::Codec;
pub use digest::{Digest, Hasher};
pub use error::{FormatError, Result, StoreError};
pub use format::locator::{FrameLoc, Locator, PackLoc};
pub use format::map::{Extent, LayerMap, MapBuilder};
pub use gc::{
    Amount, AuditReport, AuditedLayer, GcOptions, GcReport, Lease, LeaseKind, Lost, NodeLease,
    Orphan, PruneOptions, PruneReport, Reason, RepairReport, Waiting,
};
pub use index::{ChunkIndex, CompactOptions, CompactReport, IndexStats, compact_index};
pub use key::Key;
pub use layer::{
    Damage, Delivery, Draft, FetchStats, FileChunks, FrameChunks, LayerStore, LayerWriter,
    MapImage, MapWriter, MetaImage, MetaWriter, Parts, PartsWanted, PublishOutcome, Published,
    ReadLimits, RefEntry, Sealed, SeedMarker, Staged, StoredFrame, VerifyReport, WriteStats,
    WriterOptions, publish_all,
};
pub use manifest::{
    Blob, Counts, Features, LayerId, MAX_MANIFEST_BYTES, MAX_META_BYTES, Manifest, ParentRef,
};
pub use parallel::at_once;
pub use reference::{Kind, LayerName, Reference, Version};
pub use signature::{PublicKey, SignatureEntry, SigningKey};
pub use spill::Spill;
pub use spool::Spool;
