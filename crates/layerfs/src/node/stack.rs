//! Stacks and leases: which layers are wanted, by whom, and the generated layer of resolved
//! directories on top.

use std::path::PathBuf;
use std::time::Instant;

use layerpack_erofs::{Image, WriteOptions, write_image};
use layerpack_store::{Digest, Hasher, LayerId, LayerMap, LayerStore, Manifest, at_once};

use super::given::{Candidate, GivenManifests};
use super::layer::{META, StoreRef, read_verified};
use super::lease::{Record, check_id};
use super::promise::Promise;
use super::types::{LeaseInfo, LeaseSpec, Stack};
use super::{Node, unmount_busy};
use crate::error::{IoContext, LayerfsError, Result};
use crate::{files, implicit};

/// What is known of a stack once it was looked at: written beside its generated layer.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
struct Plan {
    format: u32,
    /// Layers at the bottom that an opaque root hides.
    hidden: usize,
    /// Digest and size of the generated layer's metadata, if there is one.
    generated: Option<(Digest, u64)>,
}

const PLAN_FORMAT: u32 = 1;

/// Layers of a stack that come up at once. Each asks the store for up to five objects at a time.
const LAYERS_AT_ONCE: usize = 8;

/// Identity of a stack: of what its layers hold, in order.
pub(super) fn stack_digest(layers: &[LayerId]) -> Digest {
    let mut hasher = Hasher::new();
    hasher.update(b"layerpack stack v1\0");
    for layer in layers {
        hasher.update(layer.digest().as_bytes());
    }
    hasher.finish()
}

/// A lease that is taken back unless it is kept: also by a panic on the way.
struct Tentative<'a> {
    node: &'a Node,
    id: Option<&'a str>,
}

impl Tentative<'_> {
    fn keep(mut self) {
        self.id = None;
    }
}

impl Drop for Tentative<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.node.leases.lock().remove(id);
        }
    }
}

impl Node {
    /// Brings the layers of a stack up (`manifests` from the bottom to the top) and keeps them
    /// for the lease. Asked again for the same lease and stack, it answers the same.
    ///
    /// # Errors
    /// When a layer cannot be had or mounted; nothing is then held. [`LayerfsError::LeaseTaken`]
    /// if the lease holds another stack.
    pub fn stack_up(
        &self,
        store: &LayerStore,
        manifests: &[Digest],
        lease: &LeaseSpec,
    ) -> Result<Stack> {
        self.stack_up_with(store, manifests, &GivenManifests::default(), lease)
    }

    /// As [`Node::stack_up`], by a caller who has read manifests already: those need no fetching.
    ///
    /// # Errors
    /// As [`Node::stack_up`].
    pub fn stack_up_with(
        &self,
        store: &LayerStore,
        manifests: &[Digest],
        given: &GivenManifests,
        lease: &LeaseSpec,
    ) -> Result<Stack> {
        self.check_running()?;
        check_id(&lease.id)?;
        // Keeps `trim_idle` from unmounting a generated layer that no lease names yet.
        let stacking = self.stacking.read();
        if manifests.is_empty() {
            return Err(LayerfsError::Stack {
                what: "a stack needs at least one layer".to_owned(),
            });
        }
        let known = self.leases.lock().get(&lease.id);
        if let Some(info) = known {
            if info.manifests != manifests {
                return Err(LayerfsError::LeaseTaken {
                    id: lease.id.clone(),
                });
            }
            if !info.stack.lowers.is_empty() {
                self.unmark_lost(&lease.id)?;
                return Ok(info.stack);
            }
        }
        let store = StoreRef::Open(store.clone());
        let candidates = self.candidates(&store, manifests, given, true)?;
        let info = LeaseInfo {
            spec: lease.clone(),
            manifests: manifests.to_vec(),
            store: store.url().to_owned(),
            stack: Stack {
                lowers: Vec::new(),
                lease: lease.id.clone(),
                layers: candidates.iter().map(Candidate::layer).collect(),
            },
            lost: false,
        };
        // Held before the layers come up, so that nobody takes them down in between.
        self.leases
            .lock()
            .insert(Record::new(info, &self.boot_text));
        let tentative = Tentative {
            node: self,
            id: Some(&lease.id),
        };
        let bring = |promise: &Promise| self.bring_stack_up(&store, &candidates, promise);
        let brought = self.with_promise(&store, &candidates, &bring);
        let result = brought.and_then(|lowers| {
            let record = {
                let mut leases = self.leases.lock();
                let Some(mut record) = leases.record(&lease.id) else {
                    return Err(LayerfsError::UnknownLease {
                        id: lease.id.clone(),
                    });
                };
                record.info.stack.lowers = lowers;
                leases.insert(record.clone());
                record
            };
            record.save(&self.root.join("leases"))?;
            self.learn_begin(&record.info);
            Ok(record.info.stack)
        });
        if result.is_ok() {
            tentative.keep();
        } else {
            drop(tentative);
            drop(stacking);
            self.trim_idle();
        }
        result
    }

    /// Brings up again what a lease of a former life of the node held.
    pub(super) fn restore_lease(&self, record: &Record) -> Result<()> {
        let store = StoreRef::Address(record.info.store.clone());
        let none = GivenManifests::default();
        let candidates = self.candidates(&store, &record.info.manifests, &none, false)?;
        self.bring_stack_up(&store, &candidates, &Promise::given())?;
        self.learner.note(&record.info.stack.layers);
        Ok(())
    }

    /// Mounts everything and returns the directories for overlayfs, the top first.
    fn bring_stack_up(
        &self,
        store: &StoreRef,
        candidates: &[Candidate],
        promise: &Promise,
    ) -> Result<Vec<PathBuf>> {
        let down = candidates.iter().filter(|c| !self.is_up(c.layer()));
        // What is up already is not worth a thread.
        let most = if down.count() > 1 { LAYERS_AT_ONCE } else { 1 };
        let handles = at_once(candidates, most, |c| self.bring_up(store, c, promise))?;
        let mut layers: Vec<(LayerId, PathBuf, &Manifest)> = Vec::with_capacity(candidates.len());
        for (handle, Candidate { manifest, .. }) in handles.into_iter().zip(candidates) {
            // overlayfs refuses the same layer twice. The upper of the two shows the same
            // names, and all that lies between it and the lower one.
            layers.retain(|(id, _, _)| *id != handle.layer_id);
            layers.push((handle.layer_id, handle.mountpoint, &**manifest));
        }
        let ids: Vec<LayerId> = layers.iter().map(|(id, _, _)| *id).collect();
        let digest = stack_digest(&ids);
        let plan = self.plan(&digest, &layers)?;
        let mut lowers: Vec<PathBuf> = layers
            .iter()
            .skip(plan.hidden)
            .map(|(_, path, _)| path.clone())
            .collect();
        if let Some((meta, size)) = plan.generated {
            lowers.push(self.generated_up(&digest, meta, size, &layers)?);
        }
        lowers.reverse();
        Ok(lowers)
    }

    /// Whether a layer is mounted; `false` also while it is on its way up or down.
    fn is_up(&self, layer: LayerId) -> bool {
        let slot = self.slot(layer);
        slot.try_lock().is_some_and(|slot| slot.up.is_some())
    }

    /// What to do about a stack: by what is known of its layers, else from its plan on disk, else
    /// worked out now.
    fn plan(&self, digest: &Digest, layers: &[(LayerId, PathBuf, &Manifest)]) -> Result<Plan> {
        if let Some(hidden) = self.hidden_in(layers)? {
            return Ok(Plan {
                format: PLAN_FORMAT,
                hidden,
                generated: None,
            });
        }
        let path = self.stack_dir(digest).join("plan.json");
        if let Ok(bytes) = fs_err::read(&path)
            && let Ok(plan) = serde_json::from_slice::<Plan>(&bytes)
            && plan.format == PLAN_FORMAT
            && plan.hidden < layers.len()
        {
            return Ok(plan);
        }
        self.make_plan(digest, layers)
    }

    /// Looks at the layers' metadata; writes the generated layer, if any, and then the plan.
    fn make_plan(&self, digest: &Digest, layers: &[(LayerId, PathBuf, &Manifest)]) -> Result<Plan> {
        let damaged = |layer: &LayerId, e: layerpack_erofs::Error| LayerfsError::Damaged {
            layer: *layer.digest(),
            what: e.to_string(),
        };
        let mut metas = Vec::with_capacity(layers.len());
        for (id, _, manifest) in layers {
            let bytes = self.metadata_of(*id, manifest)?;
            metas.push((bytes, self.implicit_of(*id, manifest)?));
        }
        let mut images = Vec::with_capacity(layers.len());
        for ((bytes, _), (id, _, _)) in metas.iter().zip(layers) {
            images.push(Image::open(bytes).map_err(|e| damaged(id, e))?);
        }
        let any = LayerfsError::Stack {
            what: "a layer's metadata is damaged".to_owned(),
        };
        let refs: Vec<&Image<'_>> = images.iter().collect();
        let hidden = implicit::hidden_below(&refs).map_err(|e| LayerfsError::Stack {
            what: format!("{any}: {e}"),
        })?;
        let members: Vec<implicit::Member<'_>> = images
            .iter()
            .zip(&metas)
            .map(|(image, (_, implicit))| implicit::Member { image, implicit })
            .collect();
        let tree = implicit::resolve(&members).map_err(|e| LayerfsError::Stack {
            what: format!("{any}: {e}"),
        })?;
        let dir = self.stack_dir(digest);
        fs_err::create_dir_all(&dir).at("create", &dir)?;
        let generated = match tree {
            None => None,
            Some(tree) => {
                let mut image = Vec::new();
                write_image(&tree, &WriteOptions::default(), &mut image).map_err(|e| {
                    LayerfsError::Stack {
                        what: format!("the layer of resolved directories cannot be written: {e}"),
                    }
                })?;
                files::replace(&dir, &dir.join(META), &[&image], false)?;
                Some((Digest::of(&image), image.len() as u64))
            }
        };
        let plan = Plan {
            format: PLAN_FORMAT,
            hidden,
            generated,
        };
        let path = dir.join("plan.json");
        let bytes = serde_json::to_vec(&plan)
            .map_err(std::io::Error::other)
            .at("write", &path)?;
        files::replace(&dir, &path, &[&bytes], false)?;
        Ok(plan)
    }

    pub(super) fn implicit_of(&self, id: LayerId, manifest: &Manifest) -> Result<Vec<Vec<u8>>> {
        if let Some(entry) = self.registry.get(id)
            && let Some(blob) = entry.blob()
        {
            return Ok(blob.map().implicit_dirs().to_vec());
        }
        let path = self.root.join("cache").join(id.hex()).join("map");
        let map = read_verified(&path, &manifest.map)
            .and_then(|bytes| LayerMap::parse(&bytes).ok())
            .ok_or_else(|| LayerfsError::Unusable {
                path: path.clone(),
                what: "it is missing or damaged; remove the layer's cache directory".to_owned(),
            })?;
        Ok(map.implicit_dirs().to_vec())
    }

    /// Mounts a stack's generated layer, or finds it mounted.
    fn generated_up(
        &self,
        digest: &Digest,
        meta: Digest,
        size: u64,
        layers: &[(LayerId, PathBuf, &Manifest)],
    ) -> Result<PathBuf> {
        let mountpoint = self.stack_dir(digest).join("mnt");
        let mut generated = self.generated.lock();
        if generated.contains_key(digest) {
            return Ok(mountpoint);
        }
        let path = self.stack_dir(digest).join(META);
        let expected = layerpack_store::Blob { digest: meta, size };
        if read_verified(&path, &expected).is_none() {
            let plan = self.make_plan(digest, layers)?;
            if plan.generated != Some((meta, size)) {
                return Err(LayerfsError::Unusable {
                    path,
                    what: "it does not fit the stack's plan; remove its directory".to_owned(),
                });
            }
        }
        self.mount_layer(&path, None, &mountpoint)?;
        generated.insert(*digest, mountpoint.clone());
        Ok(mountpoint)
    }

    pub(super) fn stack_dir(&self, digest: &Digest) -> PathBuf {
        self.root.join("stacks").join(digest.hex())
    }

    /// Ends a lease. Its layers stay mounted for the next user, up to the configured number.
    ///
    /// # Errors
    /// [`LayerfsError::UnknownLease`], or when the record cannot be removed.
    pub fn release(&self, id: &str) -> Result<()> {
        check_id(id)?;
        self.prefetches.cancel(id);
        self.learn_end(id);
        let known = self.leases.lock().contains(id);
        if !known {
            return Err(LayerfsError::UnknownLease { id: id.to_owned() });
        }
        // First on disk: a lease that is gone must not come back after a crash.
        Record::remove(&self.root.join("leases"), id)?;
        let Some(free) = self.leases.lock().remove(id) else {
            return Ok(());
        };
        let now = Instant::now();
        for layer in free {
            let slot = self.slot(layer);
            // Not waited for: whoever has it locked brings it up for another lease.
            if let Some(mut slot) = slot.try_lock()
                && let Some(up) = slot.up.as_mut()
            {
                up.idle_since = now;
            }
        }
        self.trim_idle();
        Ok(())
    }

    /// Leases held now, in order of their names.
    #[must_use]
    pub fn leases(&self) -> Vec<LeaseInfo> {
        self.leases.lock().infos()
    }

    pub(super) fn is_leased(&self, layer: LayerId) -> bool {
        self.leases.lock().count(layer) > 0
    }

    /// Unmounts idle layers beyond the configured number, those first that were idle longest,
    /// and generated layers that no lease has. Does nothing while a stack is being brought up;
    /// housekeeping comes back to it.
    pub(super) fn trim_idle(&self) {
        let Some(_alone) = self.stacking.try_write() else {
            return;
        };
        self.generated.lock().retain(|_, mountpoint| {
            let held = self.leases.lock().holds(mountpoint);
            held || !matches!(unmount_busy(mountpoint, false), Ok(true))
        });
        let slots: Vec<_> = {
            let slots = self.slots.lock();
            let leases = self.leases.lock();
            slots
                .iter()
                .filter(|(id, _)| leases.count(**id) == 0)
                .map(|(id, slot)| (*id, std::sync::Arc::clone(slot)))
                .collect()
        };
        let mut idle: Vec<(Instant, LayerId)> = slots
            .into_iter()
            .filter_map(|(id, slot)| Some((slot.lock().up.as_ref()?.idle_since, id)))
            .collect();
        idle.sort();
        let excess = idle.len().saturating_sub(self.config.idle_layers);
        for (_, layer) in idle.into_iter().take(excess) {
            if let Err(e) = self.take_down(layer, false) {
                tracing::warn!(layer = %layer, error = %e, "idle layer cannot be unmounted");
            }
        }
        for entry in self.registry.reap() {
            // A fetch that outlives its readers may hold the blob a while longer, so its state
            // is not left to the last drop.
            if let Some(blob) = entry.blob()
                && let Err(e) = blob.cache().checkpoint()
            {
                self.problem(format!("cache of layer {}: {e}", entry.layer));
            }
        }
    }
}
