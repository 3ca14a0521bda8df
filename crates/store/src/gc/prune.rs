//! Compacting: frames that are still used leave packs that hold little else, and what describes the
//! layers follows them. Layers keep their digests; only their locators change.
//!
//! It works as a writer with a session. The old packs are not deleted here: nothing names them any
//! more, so that collecting condemns them. Until they go, nodes that hold an older locator read on;
//! afterwards those look for the newer one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Serialize;

use super::collect::{GcOptions, GcReport};
use super::lease::Leases;
use super::mark::{Marks, Unknown, UsedLayer, mark, places_of};
use super::parallel;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::index::{CompactOptions, compact_index};
use crate::key::Key;
use crate::layer::LayerStore;
use crate::layer::repack::{FramesOfPacks, relocated};

/// How to compact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PruneOptions {
    /// Packs are rewritten of which less than this share of the bytes is used, in percent.
    pub min_live: u8,
    /// Write and delete nothing; say what would happen.
    pub dry_run: bool,
    /// See [`GcOptions::grace`]; for the collection that ends it.
    pub grace: Duration,
    /// See [`GcOptions::wait`].
    pub wait: bool,
}

/// What compacting did, or would do. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct PruneReport {
    /// Packs that layers use.
    pub packs: u64,
    /// Their size.
    pub pack_bytes: u64,
    /// The part of it that layers use.
    pub live_bytes: u64,
    /// Packs whose used frames were copied to new ones.
    pub rewritten_packs: u64,
    /// Their size.
    pub rewritten_bytes: u64,
    /// What was written in their place; in a dry run, what would be at least.
    pub written_bytes: u64,
    /// Index segments that were replaced: small ones, and those that name packs which are gone.
    pub index_replaced: u64,
    /// Index segments that were written for them.
    pub index_written: u64,
    /// Layers whose locator was replaced.
    pub layers: Vec<String>,
    /// What was left as it is because it is damaged or cannot be read; one line each.
    pub problems: Vec<String>,
    /// What collecting garbage did afterwards.
    pub gc: GcReport,
}

/// A pack as layers use it.
#[derive(Debug, Default)]
struct PackUse {
    size: u64,
    /// Offsets and stored lengths of the frames that are used.
    frames: BTreeMap<u64, u32>,
}

impl PackUse {
    fn live(&self) -> u64 {
        self.frames.values().map(|len| u64::from(*len)).sum()
    }

    fn is_wasteful(&self, min_live: u8) -> bool {
        self.live().saturating_mul(100) < self.size.saturating_mul(min_live.into())
    }
}

impl LayerStore {
    /// Copies what is used of packs that are little used to new packs, then collects garbage.
    ///
    /// # Errors
    /// If the store cannot be read or written. Layers are then as they were, or moved as a whole.
    pub fn prune(&self, options: PruneOptions) -> Result<PruneReport> {
        let mut report = PruneReport::default();
        if self.check_marker()? {
            if options.dry_run {
                self.compact(&options, &mut report)?;
                self.tidy_index(true, &mut report)?;
            } else {
                let compacted = self.guarded().and_then(|store| {
                    store.compact(&options, &mut report)?;
                    store.tidy_index(false, &mut report)
                });
                match compacted {
                    // What can be collected makes room for the next time.
                    Err(error @ StoreError::NoSpace { .. }) => {
                        report.problems.push(format!("not compacted: {error}"));
                    }
                    done => done?,
                }
            }
        }
        report.gc = self.collect(GcOptions {
            grace: options.grace,
            dry_run: options.dry_run,
            wait: options.wait,
        })?;
        Ok(report)
    }

    /// Merges small index segments and drops packs that are gone from the index.
    fn tidy_index(&self, dry_run: bool, report: &mut PruneReport) -> Result<()> {
        let segments = self.blobs().list("index/")?;
        let named = parallel::map(&segments, |object| self.packs_of_index(object));
        // Listed after the segments: a pack is there before an index names it.
        let there: BTreeSet<Key> = self
            .blobs()
            .list("packs/")?
            .into_iter()
            .map(|object| object.key)
            .collect();
        // What cannot be read is for `repair`.
        let drop_packs = named
            .into_iter()
            .flat_map(|packs| packs.unwrap_or_default())
            .map(|pack| pack.id)
            .filter(|id| !there.contains(&Key::pack(id)))
            .collect();
        let compacted = compact_index(
            self,
            &CompactOptions {
                drop_packs,
                dry_run,
                ..CompactOptions::recommended()
            },
        )?;
        report.index_replaced = compacted.replaced;
        report.index_written = compacted.written;
        report.problems.extend(compacted.warnings);
        Ok(())
    }

    fn compact(&self, options: &PruneOptions, report: &mut PruneReport) -> Result<()> {
        let leases = Leases::read(&**self.blobs(), None)?;
        let marks = mark(self, &leases)?;
        report.problems.extend(marks.problems.iter().cloned());
        if marks.unknown != Unknown::Nothing {
            // A layer whose frames are not known may use any pack.
            report
                .problems
                .push("nothing is compacted until the above is mended".to_owned());
            return Ok(());
        }
        let (mut packs, users) = self.use_of_packs(&marks)?;
        // Packs of a part of a layer may be in another store.
        let listed = self.blobs().list("packs/")?.into_iter();
        let there: BTreeSet<Key> = listed.map(|object| object.key).collect();
        packs.retain(|id, _| there.contains(&Key::pack(id)));
        let mut wanted = FramesOfPacks::new();
        for (id, used) in &packs {
            report.packs += 1;
            report.pack_bytes += used.size;
            report.live_bytes += used.live();
            if used.is_wasteful(options.min_live) {
                report.rewritten_packs += 1;
                report.rewritten_bytes += used.size;
                report.written_bytes += used.live();
                wanted.insert(*id, (used.size, used.frames.keys().copied().collect()));
            }
        }
        let concerned: BTreeSet<Digest> = wanted
            .keys()
            .filter_map(|id| users.get(id))
            .flatten()
            .copied()
            .collect();
        if options.dry_run {
            let names = concerned.iter().filter_map(|d| marks.layers.get(d));
            report.layers.extend(names.map(|layer| layer.name.clone()));
            return Ok(());
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let moved = self.move_frames(&wanted)?;
        report.written_bytes = moved.written;
        for id in moved.damaged.keys().chain(&moved.full) {
            report.rewritten_packs -= 1;
            report.rewritten_bytes -= packs.get(id).map_or(0, |used| used.size);
        }
        for error in moved.damaged.values() {
            report.problems.push(format!("not compacted: {error}"));
        }
        let mut done = BTreeSet::new();
        for layer in concerned.iter().filter_map(|d| marks.layers.get(d)) {
            // Several names may share one map, and with it one locator.
            if !done.insert(layer.manifest.map.digest) {
                report.layers.push(layer.name.clone());
                continue;
            }
            match self.move_layer(layer, &moved) {
                Ok(true) => report.layers.push(layer.name.clone()),
                Ok(false) => {}
                Err(error) if error.is_damage() => {
                    report
                        .problems
                        .push(format!("{} stays where it is: {error}", layer.name));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// What layers use of each pack, and which layers those are.
    #[expect(clippy::type_complexity, reason = "two maps by pack")]
    fn use_of_packs(
        &self,
        marks: &Marks,
    ) -> Result<(
        BTreeMap<Digest, PackUse>,
        BTreeMap<Digest, BTreeSet<Digest>>,
    )> {
        let mut packs: BTreeMap<Digest, PackUse> = BTreeMap::new();
        let mut users: BTreeMap<Digest, BTreeSet<Digest>> = BTreeMap::new();
        let layers: Vec<(&Digest, &UsedLayer)> = marks.layers.iter().collect();
        // A few layers at a time: their locators together can be large.
        for part in layers.chunks(64) {
            let places = parallel::map(part, |(_, layer)| places_of(self, &layer.manifest));
            for ((digest, _), places) in part.iter().zip(places) {
                let places = places?;
                for frame in &places.frames {
                    let pack = usize::try_from(frame.pack)
                        .ok()
                        .and_then(|p| places.packs.get(p));
                    let Some(pack) = pack else { continue };
                    let used = packs.entry(pack.id).or_default();
                    used.size = used.size.max(pack.size);
                    used.frames.insert(frame.offset, frame.stored_len);
                    users.entry(pack.id).or_default().insert(**digest);
                }
            }
        }
        Ok((packs, users))
    }

    fn move_layer(&self, layer: &UsedLayer, moved: &crate::layer::repack::Moved) -> Result<bool> {
        let map = self.map(&layer.manifest)?;
        // As it is now: another writer may have replaced it.
        let old = self.locator(&layer.manifest, &map)?;
        let digest = layer.manifest.map.digest;
        let Some(new) = relocated(digest, &map, &old, moved)? else {
            return Ok(false);
        };
        let mut warnings = Vec::new();
        self.put_locator(&digest, &map, &new, &mut warnings)?;
        let key = Key::locator(&digest);
        match self.blobs().size(&key)? {
            Some(_) => Ok(true),
            None => Err(StoreError::Missing {
                store: self.url().to_owned(),
                key: key.to_string(),
            }),
        }
    }
}
