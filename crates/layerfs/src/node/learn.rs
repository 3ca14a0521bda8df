//! What the node learns by itself: which extents of a stack are read first, from the reads that
//! reach it in the first minute of a mount.
//!
//! It costs readers what a recording costs them, for that minute; nothing is opened or read
//! otherwise for it, so reads that the kernel answers from its caches stay as fast as they are, and
//! are not seen. A run over layers that were read before is therefore only part of the truth: it
//! adds what it saw and says nothing of what it did not see. Layers that several stacks share tell
//! all of them; runs level that out.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use layerpack_store::profile::{Profile, ProfileEntry, ProfileLayer};
use layerpack_store::{Digest, LayerId, LayerStore};
use serde::{Deserialize, Serialize};

use super::Node;
use super::stack::stack_digest;
use super::types::LeaseInfo;
use crate::error::Result;
use crate::learnt::{Given, LEARNT, Learnt, MAX_EXTENTS};
use crate::record::Recorder;
use crate::sync::Mutex;

/// A stack that is learnt from.
#[derive(Debug)]
struct Learning {
    stack: Digest,
    layers: Vec<ProfileLayer>,
    /// None of its layers was read before.
    whole: bool,
    /// Address of the store that the stack comes from.
    store: String,
}

/// What a node learns.
#[derive(Debug)]
pub(super) struct Learner {
    pub(super) learnt: Arc<Learnt>,
    running: Mutex<BTreeMap<String, Learning>>,
    /// Layers that were in use since the node started.
    used: Mutex<HashSet<LayerId>>,
}

/// What a node has learnt of a stack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearntProfile {
    /// Identity of the stack.
    pub stack: Digest,
    /// Its layers, bottom first.
    pub layers: Vec<LayerId>,
    /// Manifests that they were mounted by.
    pub manifests: Vec<Digest>,
    /// Runs that it was learnt from; old ones count less.
    pub recordings: u32,
    /// Extents.
    pub extents: u64,
    /// Their lengths together, in bytes.
    pub bytes: u64,
    /// Runs that no store has yet.
    pub unpublished: u32,
    /// When it changed last, in seconds since 1970.
    pub updated: u64,
}

/// A learnt profile that is in a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedProfile {
    /// Identity of the stack.
    pub stack: Digest,
    /// Digest of the profile; absent: the store had all of it.
    pub profile: Option<Digest>,
    /// Recordings in it, of all nodes.
    pub recordings: u32,
    /// Extents in it.
    pub extents: u64,
    /// Why it is not there.
    pub error: Option<String>,
}

impl Learner {
    pub(super) fn new(root: &std::path::Path) -> Self {
        Self {
            learnt: Arc::new(Learnt::new(root.join("profiles"))),
            running: Mutex::new(BTreeMap::new()),
            used: Mutex::new(HashSet::new()),
        }
    }

    /// Layers are used from now on. Whether none of them was before.
    pub(super) fn note(&self, layers: &[LayerId]) -> bool {
        let mut used = self.used.lock();
        let mut fresh = true;
        for layer in layers {
            fresh &= used.insert(*layer);
        }
        fresh
    }
}

impl Node {
    /// Begins to learn from a stack that has just come up.
    pub(super) fn learn_begin(&self, info: &LeaseInfo) {
        let mut layers: Vec<ProfileLayer> = Vec::with_capacity(info.manifests.len());
        for (layer, manifest) in info.stack.layers.iter().zip(&info.manifests) {
            // Of a layer that is there twice the upper one counts.
            layers.retain(|known| known.layer != *layer);
            layers.push(ProfileLayer {
                layer: *layer,
                manifest: *manifest,
            });
        }
        let ids: Vec<LayerId> = layers.iter().map(|l| l.layer).collect();
        let whole = self.learner.note(&ids);
        let Some(window) = self.config.learn else {
            return;
        };
        let stack = stack_digest(&ids);
        let lease = &info.spec.id;
        let mut running = self.learner.running.lock();
        if running.values().any(|other| other.stack == stack) {
            return;
        }
        let recorder = Recorder::bounded(MAX_EXTENTS, Some(window));
        if !self.recordings.learn(lease, ids.clone(), recorder) {
            return;
        }
        running.insert(
            lease.clone(),
            Learning {
                stack,
                layers,
                whole,
                store: info.store.clone(),
            },
        );
        drop(running);
        for layer in ids {
            self.registry.tap(layer, &self.recordings);
        }
    }

    /// Ends learning from a lease, if the node does, and keeps what it came to.
    pub(super) fn learn_end(&self, lease: &str) {
        let Some(learning) = self.learner.running.lock().remove(lease) else {
            return;
        };
        let Some((layers, recorder)) = self.recordings.learnt(lease) else {
            return;
        };
        for layer in layers {
            self.registry.tap(layer, &self.recordings);
        }
        let (touches, left_out) = recorder.end();
        if touches.is_empty() {
            return;
        }
        let run = Profile {
            name: LEARNT.to_owned(),
            layers: learning.layers,
            recordings: 1,
            entries: (0_u32..)
                .zip(touches)
                .map(|(rank, touch)| ProfileEntry {
                    layer: touch.layer,
                    extent: touch.extent,
                    len: touch.len,
                    count: 1,
                    rank,
                    time_ms: touch.time_ms,
                })
                .collect(),
        };
        let learnt = &self.learner.learnt;
        if let Err(e) = learnt.add(&learning.stack, &run, learning.whole) {
            self.problem(format!("what was learnt of lease {lease} is lost: {e}"));
            return;
        }
        tracing::info!(lease, stack = %learning.stack, extents = run.entries.len(), left_out,
            whole = learning.whole, "learnt from its first reads");
        if self.config.publish_profiles {
            self.publish_later(learning.stack, &run, learning.store);
        }
    }

    /// Ends learning from leases whose time is over, or from all.
    pub(super) fn learn_due(&self, all: bool) {
        for lease in self.recordings.learning(!all) {
            self.learn_end(&lease);
        }
    }

    /// Gives the stack's store what was learnt, off the path of whoever waits for us.
    fn publish_later(&self, stack: Digest, run: &Profile, url: String) {
        let (learnt, open) = (
            Arc::clone(&self.learner.learnt),
            Arc::clone(&self.config.open_store),
        );
        let layers = crate::learnt::ids(run);
        let job = Box::new(move || {
            let given = open(&url)
                .map_err(Into::into)
                .and_then(|store| learnt.publish(&store, &stack, &layers));
            match given {
                Ok(Given::Stored(digest, _)) => {
                    tracing::info!(stack = %stack, profile = %digest, store = %url,
                        "published what was learnt");
                }
                Ok(Given::NothingNew) => {}
                Err(error) => tracing::warn!(stack = %stack, store = %url, %error,
                    "what was learnt is not published yet"),
            }
        });
        // A pool that is full or closed drops it: the next run tries again.
        drop(self.prefetches.submit(job));
    }

    /// What the node has learnt, by stack.
    #[must_use]
    pub fn learnt(&self) -> Vec<LearntProfile> {
        let learnt = &self.learner.learnt;
        learnt
            .list()
            .into_iter()
            .map(|(stack, profile, updated)| LearntProfile {
                stack,
                layers: crate::learnt::ids(&profile),
                manifests: profile.layers.iter().map(|l| l.manifest).collect(),
                recordings: profile.recordings,
                extents: profile.entries.len() as u64,
                bytes: profile.bytes(),
                unpublished: learnt.unpublished(&stack),
                updated,
            })
            .collect()
    }

    /// Gives a store what the node has learnt of these stacks, or of all (`None`), merged with what
    /// other nodes gave it before. Stacks whose layers the store does not have are left out if all
    /// are wanted. What is being learnt right now is part of it.
    ///
    /// # Errors
    /// None for all together: each stack has its own.
    pub fn publish_learnt(
        &self,
        store: &LayerStore,
        stacks: Option<&[Digest]>,
    ) -> Result<Vec<PublishedProfile>> {
        self.check_running()?;
        self.learn_due(true);
        let mut published = Vec::new();
        for known in self.learnt() {
            match stacks {
                Some(stacks) if !stacks.contains(&known.stack) => continue,
                None if !known.manifests.iter().all(|m| store.manifest(m).is_ok()) => continue,
                _ => {}
            }
            let given = self
                .learner
                .learnt
                .publish(store, &known.stack, &known.layers);
            published.push(match given {
                Ok(Given::Stored(digest, profile)) => PublishedProfile {
                    stack: known.stack,
                    profile: Some(digest),
                    recordings: profile.recordings,
                    extents: profile.entries.len() as u64,
                    error: None,
                },
                Ok(Given::NothingNew) => PublishedProfile {
                    stack: known.stack,
                    profile: None,
                    recordings: known.recordings,
                    extents: known.extents,
                    error: None,
                },
                Err(error) => PublishedProfile {
                    stack: known.stack,
                    profile: None,
                    recordings: known.recordings,
                    extents: known.extents,
                    error: Some(error.to_string()),
                },
            });
        }
        Ok(published)
    }

    /// Identity of the stack of these layers, bottom first, as [`LearntProfile::stack`] has it.
    #[must_use]
    pub fn stack_of(layers: &[LayerId]) -> Digest {
        let mut unique: Vec<LayerId> = Vec::with_capacity(layers.len());
        for layer in layers {
            unique.retain(|known| known != layer);
            unique.push(*layer);
        }
        stack_digest(&unique)
    }
}
