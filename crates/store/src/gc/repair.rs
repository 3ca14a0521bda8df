//! Repairing what describes a store's packs: indexes from the packs' tables, locators from indexes.
//! Manifests are written anew from the copies in references, where there are such. What else holds the
//! data itself (packs, maps, metadata, references) cannot be made again from the rest: that is named,
//! with the layers that it concerns.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::lease::Leases;
use super::mark::{Marks, UsedLayer, mark};
use super::parallel;
use crate::blob::PutMode;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::PackLoc;
use crate::key::Key;
use crate::layer::{LayerStore, WriterOptions};

/// Chunks in one new index segment, at most (unless one pack has more).
const SEGMENT_CHUNKS: usize = 4 << 20;

/// Something that cannot be repaired.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Lost {
    /// The object's key.
    pub object: String,
    /// What is wrong with it.
    pub what: String,
    /// Layers that need it, if that can be told.
    pub layers: Vec<String>,
    /// Of a store with several addresses: one that has it right, so that no layer is the worse for
    /// it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub good: Option<String>,
}

/// What repairing did, or would do.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct RepairReport {
    /// Nothing was written or deleted.
    pub dry_run: bool,
    /// Packs whose structure is sound.
    pub packs: u64,
    /// Packs that no sound index named, and that one names now.
    pub indexed: Vec<String>,
    /// Damaged index segments that were removed.
    pub removed: Vec<String>,
    /// Layers whose locator was written anew.
    pub relocated: Vec<String>,
    /// Other things that were mended; one line each.
    pub mended: Vec<String>,
    /// What cannot be repaired.
    pub lost: Vec<Lost>,
    /// Damaged packs that nothing uses: collecting garbage deletes them.
    pub unused: Vec<Lost>,
}

impl RepairReport {
    /// Whether all is well now.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.lost.is_empty()
    }

    fn lose(&mut self, error: &StoreError, layers: Vec<String>) {
        let object = object_of(error);
        let what = error.to_string();
        if let Some(lost) = self.lost.iter_mut().find(|l| l.object == object) {
            lost.layers.extend(layers);
            return;
        }
        self.lost.push(Lost {
            object,
            what,
            layers,
            good: None,
        });
    }
}

impl LayerStore {
    /// Rebuilds indexes and locators that are lost or damaged.
    ///
    /// # Errors
    /// If the store cannot be listed or written. What is damaged is in the report.
    pub fn repair(&self, dry_run: bool) -> Result<RepairReport> {
        let mut report = RepairReport {
            dry_run,
            ..RepairReport::default()
        };
        let store = if dry_run {
            self.clone()
        } else {
            self.guarded()?
        };
        let marker = match store.check_marker() {
            // A newer store's is left alone.
            Err(error)
                if error.is_damage()
                    && !store.has_newer_marker()?
                    && !store.blobs().list("refs/")?.is_empty() =>
            {
                let mended = format!("{} written anew: {error}", Key::marker());
                report.mended.push(mended);
                if dry_run {
                    return Ok(report); // nothing else can be looked at before that
                }
                store.replace_marker()?;
                true
            }
            known => known?,
        };
        if marker {
        } else if store.blobs().list("refs/")?.is_empty()
            && store.blobs().list("packs/")?.is_empty()
        {
            return Ok(report); // no store yet
        } else {
            if !dry_run {
                store.ensure_marker()?;
            }
            report
                .mended
                .push(format!("{} written anew", Key::marker()));
        }
        let leases = Leases::read(&**store.blobs(), None)?;
        let mut marks = mark(&store, &leases)?;
        let restored = store.repair_manifests(&marks, &mut report)?;
        if !restored.is_empty() && dry_run {
            (marks.unreadable).retain(|root| !restored.contains(&object_of(&root.error)));
        } else if !restored.is_empty() {
            marks = mark(&store, &leases)?;
        }
        let packs = store.repair_index(&marks, &mut report)?;
        store.repair_layers(marks, &packs, &mut report)?;
        if !report.lost.is_empty() {
            // As locators lead now.
            let marks = mark(&store, &leases)?;
            let unused = |lost: &mut Lost| {
                marks.unreadable.is_empty()
                    && lost.layers.is_empty()
                    && lost.object.starts_with("packs/")
                    && Key::new(&lost.object).is_ok_and(|key| marks.reason(&key).is_none())
            };
            report.unused = report.lost.extract_if(.., unused).collect();
        }
        report.lost.sort_by(|a, b| a.object.cmp(&b.object));
        Ok(report)
    }

    /// Writes manifests anew that are damaged or gone, from the copies in the references that name
    /// them. Their keys.
    fn repair_manifests(
        &self,
        marks: &Marks,
        report: &mut RepairReport,
    ) -> Result<BTreeSet<String>> {
        let mut restored = BTreeSet::new();
        let objects = marks.unreadable.iter().map(|root| object_of(&root.error));
        let bad: BTreeSet<String> = objects.filter(|o| o.starts_with("manifests/")).collect();
        if bad.is_empty() {
            return Ok(restored);
        }
        for object in self.blobs().list("refs/")? {
            let Some(reference) = object.key.to_reference() else {
                continue;
            };
            let (digest, manifest) = match self.copy_in(&reference) {
                Ok(Some(copy)) => copy,
                Ok(None) => continue,
                // Marking has found it too.
                Err(error) if error.is_damage() => continue,
                Err(error) => return Err(error),
            };
            let key = Key::manifest(&digest);
            if !bad.contains(key.as_str()) || !restored.insert(key.to_string()) {
                continue;
            }
            if !report.dry_run {
                let bytes = manifest.to_bytes()?;
                self.blobs().put(&key, &bytes, PutMode::Overwrite)?;
            }
            let mended = format!("{key} written anew from the copy in {}", object.key);
            report.mended.push(mended);
        }
        Ok(restored)
    }

    /// Has a sound index name each sound pack. The packs that are sound.
    fn repair_index(&self, marks: &Marks, report: &mut RepairReport) -> Result<BTreeSet<PackLoc>> {
        let mut named: BTreeSet<PackLoc> = BTreeSet::new();
        let mut damaged: Vec<Key> = Vec::new();
        for object in self.blobs().list("index/")? {
            match self.index_segment(&object.key) {
                Ok(Some(segment)) => named.extend(segment.packs().iter().map(|p| PackLoc {
                    id: p.id,
                    size: p.size,
                })),
                Ok(None) => {}
                Err(error) if error.is_damage() => damaged.push(object.key),
                Err(error) => return Err(error),
            }
        }
        let listed = self.blobs().list("packs/")?;
        let mut sound = BTreeSet::new();
        for object in marks.unlisted_packs(self, &listed)? {
            let Some(id) = object.key.digest() else {
                continue;
            };
            match self.structure_of_pack(&id, object.size) {
                Ok(_) => {
                    report.packs += 1;
                    sound.insert(PackLoc {
                        id,
                        size: object.size,
                    });
                }
                Err(error) if error.is_damage() => report.lose(&error, Vec::new()),
                Err(error) => return Err(error),
            }
        }
        // A pack's table is only kept while its index is made.
        for part in listed.chunks(32) {
            let read = parallel::map(part, |object| {
                let id = object.key.digest().ok_or_else(|| {
                    self.corrupt(&object.key, "its name is not a digest; it is not ours")
                })?;
                if object.key != Key::pack(&id) {
                    return Err(self.corrupt(&object.key, "it is not where its name belongs"));
                }
                let (table_offset, table) = self.structure_of_pack(&id, object.size)?;
                Ok((id, object.size, table_offset, table))
            });
            let mut fresh = Vec::new();
            for pack in read {
                match pack {
                    Ok((id, size, table_offset, table)) => {
                        report.packs += 1;
                        sound.insert(PackLoc { id, size });
                        if !named.contains(&PackLoc { id, size }) {
                            report.indexed.push(Key::pack(&id).to_string());
                            fresh.push((id, size, table_offset, table));
                        }
                    }
                    Err(error) if error.is_damage() => report.lose(&error, Vec::new()),
                    Err(error) => return Err(error),
                }
            }
            if !report.dry_run {
                self.index_packs(fresh, SEGMENT_CHUNKS)?;
            }
        }
        for key in damaged {
            // After what it named is named elsewhere.
            if !report.dry_run {
                self.blobs().delete(&key)?;
            }
            report.removed.push(key.to_string());
        }
        Ok(sound)
    }

    /// Checks what each layer names, and writes locators anew that do not lead to sound packs.
    fn repair_layers(
        &self,
        marks: Marks,
        packs: &BTreeSet<PackLoc>,
        report: &mut RepairReport,
    ) -> Result<()> {
        for root in marks.unreadable {
            // A locator can be made again, which is seen to below.
            if !object_of(&root.error).starts_with("locators/") {
                report.lose(&root.error, vec![root.name]);
            }
        }
        let mut by_map: BTreeMap<Digest, Vec<&UsedLayer>> = BTreeMap::new();
        for layer in marks.layers.values() {
            let same = by_map.entry(layer.manifest.map.digest).or_default();
            same.push(layer);
        }
        for layers in by_map.values() {
            let names = || layers.iter().map(|l| l.name.clone()).collect::<Vec<_>>();
            let Some(layer) = layers.first() else {
                continue;
            };
            for layer in layers {
                if let Err(error) = self.meta(&layer.manifest) {
                    lost_or(error, report, vec![layer.name.clone()])?;
                }
            }
            let map = match self.map(&layer.manifest) {
                Ok(map) => map,
                Err(error) => {
                    lost_or(error, report, names())?;
                    continue;
                }
            };
            let part = match self.seed_marker(&layer.manifest.map.digest) {
                Ok(marker) => marker.is_some(),
                Err(error) => {
                    lost_or(error, report, names())?;
                    false
                }
            };
            let why = match self.locator(&layer.manifest, &map) {
                // Packs of a part of a layer may be elsewhere by purpose.
                Ok(_) if part => continue,
                Ok(locator) => match locator.packs().iter().find(|p| !packs.contains(p)) {
                    None => continue,
                    Some(pack) => self.missing(&Key::pack(&pack.id)),
                },
                Err(error) if error.is_damage() => error,
                Err(error) => return Err(error),
            };
            if report.dry_run {
                // Whether its chunks are somewhere is known once the index is whole.
                report.relocated.extend(names());
                continue;
            }
            let writer = self.writer(WriterOptions {
                jobs: 1,
                ..WriterOptions::default()
            })?;
            match writer.relocate(&layer.manifest, &map) {
                Ok(_) => report.relocated.extend(names()),
                Err(StoreError::InvalidInput { what, .. }) => {
                    let object = why.key().unwrap_or("its locator").to_owned();
                    report.lost.push(Lost {
                        object,
                        what: format!("{why}; {what}"),
                        layers: names(),
                        good: None,
                    });
                }
                Err(error) => lost_or(error, report, names())?,
            }
        }
        Ok(())
    }
}

/// Key of the object that an error is about.
pub(super) fn object_of(error: &StoreError) -> String {
    match (error.key(), error) {
        (Some(key), _) => key.to_owned(),
        (None, StoreError::Unsupported { object, .. }) => {
            let rest = object.strip_prefix("object ").unwrap_or(object);
            rest.split(" in store ").next().unwrap_or(rest).to_owned()
        }
        (None, _) => error.to_string(),
    }
}

fn lost_or(error: StoreError, report: &mut RepairReport, layers: Vec<String>) -> Result<()> {
    if error.is_damage() {
        report.lose(&error, layers);
        Ok(())
    } else {
        Err(error)
    }
}
