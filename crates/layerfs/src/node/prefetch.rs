//! Fetching what a stack will be asked for before somebody asks.
//!
//! Off the path of mounting: `Node::prefetch` only queues. What is fetched is what the
//! environment's access profile names, in the order of first use; with [`PrefetchMode::All`], the
//! rest after that. It ends with its lease.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use layerpack_store::profile::{Profile, ProfileEntry};
use layerpack_store::{Digest, LayerId, LayerStore, StoreError};
use serde::{Deserialize, Serialize};

use super::Node;
use super::stack::stack_digest;
use crate::error::{LayerfsError, Result};
use crate::fetch::{AheadOptions, Blob, Cancel, fetch_ahead};
use crate::learnt::{Learnt, is_worth};
use crate::pool::{Job, Pool};
use crate::sync::Mutex;

/// Stacks that are fetched for at once.
const AT_ONCE: usize = 2;
/// Stacks that may wait for that; more do without.
const QUEUE: usize = 256;
/// Layers from the top whose profiles are looked for: a snapshot has those of what it was made on.
const TOPS: usize = 4;

/// What is fetched before it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefetchMode {
    /// Nothing.
    #[default]
    None,
    /// Metadata: always there when a mount begins, so this is the same.
    Meta,
    /// What the environment's access profile names.
    Profile,
    /// That, then everything else.
    All,
}

/// What to fetch ahead for a stack.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefetchSpec {
    /// How much.
    #[serde(default)]
    pub mode: PrefetchMode,
    /// The profile, by name or digest; absent: the one that the store has for the stack.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
}

type Running = Arc<Mutex<BTreeMap<String, Arc<Cancel>>>>;

/// What is fetched ahead right now.
#[derive(Debug)]
pub(super) struct Prefetches {
    pool: Pool,
    /// By lease.
    running: Running,
}

impl Prefetches {
    pub(super) fn new() -> Self {
        Self {
            pool: Pool::new("prefetch", AT_ONCE, QUEUE),
            running: Running::default(),
        }
    }

    /// Has something done in the background. Gives it back if there is too much of that.
    pub(super) fn submit(&self, job: Job) -> Result<(), Job> {
        self.pool.submit(job)
    }

    /// Ends what is fetched for a lease.
    pub(super) fn cancel(&self, lease: &str) {
        if let Some(cancel) = self.running.lock().remove(lease) {
            cancel.cancel();
        }
    }

    /// Ends everything soon.
    pub(super) fn cancel_all(&self) {
        for cancel in std::mem::take(&mut *self.running.lock()).into_values() {
            cancel.cancel();
        }
    }

    /// Takes nothing more and waits for what runs, at most `limit`.
    pub(super) fn close(&self, limit: Duration) {
        self.pool.close(limit);
    }
}

impl Node {
    /// Begins to fetch ahead for the stack of a lease. Whatever fails then is logged only.
    ///
    /// # Errors
    /// [`LayerfsError::UnknownLease`].
    pub fn prefetch(&self, store: &LayerStore, lease: &str, spec: &PrefetchSpec) -> Result<()> {
        if matches!(spec.mode, PrefetchMode::None | PrefetchMode::Meta) {
            return Ok(());
        }
        let layers = self
            .leases
            .lock()
            .get(lease)
            .map(|info| info.stack.layers)
            .ok_or_else(|| LayerfsError::UnknownLease {
                id: lease.to_owned(),
            })?;
        let cancel = Arc::new(Cancel::default());
        let before = self
            .prefetches
            .running
            .lock()
            .insert(lease.to_owned(), Arc::clone(&cancel));
        if let Some(before) = before {
            before.cancel();
        }
        let blobs = layers
            .iter()
            .filter_map(|layer| Some((*layer, Arc::clone(self.registry.get(*layer)?.blob()?))))
            .collect();
        let task = Task {
            store: store.clone(),
            lease: lease.to_owned(),
            spec: spec.clone(),
            layers,
            blobs,
            rate: self.config.fill_bytes_per_second,
            learnt: Some(Arc::clone(&self.learner.learnt)),
            cancel,
        };
        let running = Arc::clone(&self.prefetches.running);
        let job = Box::new(move || {
            task.run();
            let mut running = running.lock();
            let own = running.get(&task.lease);
            if own.is_some_and(|cancel| Arc::ptr_eq(cancel, &task.cancel)) {
                running.remove(&task.lease);
            }
        });
        if self.prefetches.pool.submit(job).is_err() {
            tracing::warn!(lease, "too many stacks are fetched ahead; this one is not");
        }
        Ok(())
    }
}

/// What is to be fetched ahead for one stack.
pub(crate) struct Task {
    pub(crate) store: LayerStore,
    /// Who it is for, in the log.
    pub(crate) lease: String,
    pub(crate) spec: PrefetchSpec,
    /// Bottom first.
    pub(crate) layers: Vec<LayerId>,
    pub(crate) blobs: BTreeMap<LayerId, Arc<Blob>>,
    /// Bytes a second of a fill, at most.
    pub(crate) rate: Option<u64>,
    /// What the node has learnt, where there is one.
    pub(crate) learnt: Option<Arc<Learnt>>,
    pub(crate) cancel: Arc<Cancel>,
}

impl Task {
    /// Fetches, until all is there or it is cancelled. What fails is logged.
    pub(crate) fn run(&self) {
        match self.choose() {
            Ok(Some((name, profile))) => self.follow(&name, &profile),
            Ok(None) => {
                tracing::debug!(lease = %self.lease, "there is no profile of this stack")
            }
            Err(error) => {
                tracing::warn!(lease = %self.lease, error = %error, "no profile can be had");
            }
        }
        if self.spec.mode == PrefetchMode::All && !self.cancel.is_cancelled() {
            self.fill();
        }
    }

    /// What the profile names, ahead of whoever reads.
    fn follow(&self, name: &str, profile: &Profile) {
        if let Err(why) = self.fits(profile) {
            tracing::warn!(lease = %self.lease, profile = name, "the profile is ignored: {why}");
            return;
        }
        let worth = |entry: &&ProfileEntry| is_worth(profile, entry.count);
        let extents = profile.entries.iter().filter(worth).filter_map(|entry| {
            let layer = profile.layers.get(usize::try_from(entry.layer).ok()?)?;
            let blob = self.blobs.get(&layer.layer)?;
            let index = u64::from(entry.extent);
            (index < blob.cache().extents()).then(|| (Arc::clone(blob), index))
        });
        let report = fetch_ahead(extents, AheadOptions::default(), &self.cancel);
        tracing::info!(lease = %self.lease, profile = name, fetched = report.fetched,
            present = report.present, end = ?report.end, "fetched ahead");
    }

    /// The profile that is named, else what the node has learnt of the stack or, going down, of
    /// what it is made on, else the best that the store has.
    fn choose(&self) -> Result<Option<(String, Profile)>, StoreError> {
        if let (None, Some(learnt)) = (&self.spec.profile, &self.learnt) {
            let mut unique: Vec<LayerId> = Vec::with_capacity(self.layers.len());
            for layer in &self.layers {
                unique.retain(|known| known != layer);
                unique.push(*layer);
            }
            for height in (1..=unique.len()).rev().take(TOPS) {
                let layers = unique.get(..height).unwrap_or_default();
                if let Some(profile) = learnt.get(&stack_digest(layers), layers) {
                    return Ok(Some(("learnt by this node".to_owned(), profile)));
                }
            }
        }
        let found = choose(&self.store, &self.layers, self.spec.profile.as_deref())?;
        Ok(found.map(|(digest, profile)| (digest.to_string(), profile)))
    }

    /// Whether a profile speaks of the layers as they are: one of a version with other contents
    /// says nothing.
    fn fits(&self, profile: &Profile) -> std::result::Result<(), String> {
        let known = profile
            .layers
            .iter()
            .filter(|l| self.layers.contains(&l.layer));
        if known.count() == 0 {
            return Err("it is of other layers, or of other versions of them".to_owned());
        }
        for entry in &profile.entries {
            let layer = usize::try_from(entry.layer)
                .ok()
                .and_then(|at| profile.layers.get(at));
            let Some(blob) = layer.and_then(|layer| self.blobs.get(&layer.layer)) else {
                continue;
            };
            let extent = usize::try_from(entry.extent)
                .ok()
                .and_then(|at| blob.map().extents().get(at));
            if extent.is_none_or(|extent| extent.len != entry.len) {
                return Err(format!(
                    "layer {} has no extent {} of {} bytes",
                    blob.layer(),
                    entry.extent,
                    entry.len
                ));
            }
        }
        Ok(())
    }

    /// Everything, behind whoever reads; the top layer first.
    fn fill(&self) {
        let blobs = self.layers.iter().rev().filter_map(|l| self.blobs.get(l));
        let extents = blobs.flat_map(|blob| {
            (0..blob.cache().extents()).map(move |index| (Arc::clone(blob), index))
        });
        let options = AheadOptions {
            bytes_per_second: self.rate,
            yields: true,
        };
        let report = fetch_ahead(extents, options, &self.cancel);
        tracing::info!(lease = %self.lease, fetched = report.fetched, present = report.present,
            end = ?report.end, "filled");
    }
}

/// The profile that is named, else the best that the store has for the stack: of as many of its
/// layers as possible and no others, from as many recordings as possible.
fn choose(
    store: &LayerStore,
    layers: &[LayerId],
    named: Option<&str>,
) -> Result<Option<(Digest, Profile)>, StoreError> {
    if let Some(name) = named {
        return store.find_profile_of(name, layers).map(Some);
    }
    for top in layers.iter().rev().take(TOPS) {
        let fitting = store.profiles(Some(top))?.into_iter().filter_map(|stored| {
            let profile = stored.profile.ok()?;
            let fits = profile.layers.iter().all(|l| layers.contains(&l.layer));
            fits.then_some((stored.digest, profile))
        });
        let best = fitting.max_by_key(|(_, p)| (p.layers.len(), p.recordings, p.entries.len()));
        if best.is_some() {
            return Ok(best);
        }
    }
    Ok(None)
}
