//! Garbage, and what must not be taken for it: leases, writers' sessions, collecting, compacting,
//! repairing, and proving a whole store.
//!
//! Nothing here rests on conditional writes or on clocks of several machines; what it does rest on is
//! that a write is visible to every later read and list, and that no request takes effect minutes
//! after its caller gave it up. The protocol is in FORMAT.md, section "Collecting garbage".

mod audit;
mod collect;
mod condemned;
mod guard;
mod lease;
mod mark;
mod node;
mod parallel;
mod prune;
mod repair;
mod sealed;
mod session;

use std::sync::Arc;

pub use audit::{AuditReport, AuditedLayer, Orphan};
pub use collect::{Amount, GcOptions, GcReport, Waiting};
pub use lease::{Lease, LeaseKind};
pub use mark::Reason;
pub use node::NodeLease;
pub use prune::{PruneOptions, PruneReport};
pub use repair::{Lost, RepairReport};

use crate::blob::BlobStore;
use crate::error::Result;
use crate::layer::LayerStore;

impl LayerStore {
    /// This store as a writer sees it that collectors respect: with a session, which ends when the
    /// last clone is dropped.
    pub(crate) fn guarded(&self) -> Result<Self> {
        let guarded = guard::Guarded::begin(Arc::clone(self.blobs()))?;
        Ok(self.over(Arc::new(guarded) as Arc<dyn BlobStore>))
    }
}
