//! Proving a whole store: every object that is there, every byte if asked for, and that each layer's
//! chunks lie where its locator says. One pass over the packs serves all layers. Damage is named with
//! the layers that it touches; what nothing uses is listed apart.
//!
//! Memory: the tables of all packs (40 bytes a chunk).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Mutex;

use serde::Serialize;

use super::collect::{family, reason_of};
use super::condemned::Condemned;
use super::lease::{Leases, is_volatile};
use super::mark::{Marks, Reason, Unknown, UsedLayer, mark, places_of};
use super::parallel;
use super::repair::{Lost, object_of};
use crate::blob::{Disagreement, ObjectInfo};
use crate::digest::{Digest, Hasher};
use crate::error::{Result, StoreError};
use crate::format::locator::Locator;
use crate::format::map::LayerMap;
use crate::format::pack::{FRAMES_START, PackTable};
use crate::key::Key;
use crate::layer::repack::{chunks_by_frame, place_of};
use crate::layer::{LayerStore, SeedMarker};
use crate::manifest::ParentRef;
use crate::reference::Reference;

/// An object that nothing uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Orphan {
    /// The object's key.
    pub object: String,
    /// Its size in bytes.
    pub size: u64,
}

/// A layer of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AuditedLayer {
    /// Reference, or what else uses it.
    pub name: String,
    /// Digest of its manifest.
    pub manifest: Digest,
    /// Nothing that it needs is damaged, as far as was looked.
    pub sound: bool,
    /// Set where the store has only a part of it, by purpose: what is elsewhere was not looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<SeedMarker>,
    /// Layers that it was made on, by name (by digest where its manifest has no name), which are
    /// not in the store. Each has a warning too.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing_parents: Vec<String>,
}

/// What proving a store found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct AuditReport {
    /// Whether the packs' data was read; else only their headers, footers and tables.
    pub read_data: bool,
    /// Objects in the store.
    pub objects: u64,
    /// Their sizes, in bytes.
    pub bytes: u64,
    /// Packs looked at.
    pub packs: u64,
    /// Frames read and verified.
    pub frames: u64,
    /// The layers.
    pub layers: Vec<AuditedLayer>,
    /// What is damaged or missing.
    pub damaged: Vec<Lost>,
    /// What is damaged in packs that are there, where it is sure that no layer needs it: bytes that a
    /// healed layer has elsewhere by now, and packs that nothing uses. `what` says what clears it.
    pub superseded: Vec<Lost>,
    /// What nothing uses. It was checked as far as its name tells what it must be.
    pub orphans: Vec<Orphan>,
    /// What harms no layer, one line each.
    pub warnings: Vec<String>,
}

/// What is damaged so far, by object.
#[derive(Debug, Default)]
struct Findings {
    damaged: BTreeMap<String, Finding>,
}

#[derive(Debug)]
struct Finding {
    what: String,
    layers: BTreeSet<String>,
    /// See [`Lost::good`].
    good: Option<String>,
    /// It is not there.
    missing: bool,
}

impl Finding {
    fn is_of_a_pack_that_is_there(&self, object: &str) -> bool {
        self.layers.is_empty()
            && self.good.is_none()
            && !self.missing
            && object.starts_with("packs/")
    }
}

impl Findings {
    fn add(&mut self, error: &StoreError, layer: Option<&str>) {
        let key = object_of(error);
        let found = self.damaged.entry(key).or_insert_with(|| Finding {
            what: error.to_string(),
            layers: BTreeSet::new(),
            good: None,
            missing: matches!(error, StoreError::Missing { .. }),
        });
        found.layers.extend(layer.map(str::to_owned));
    }

    /// What one address has wrong and another right. Where it is damage besides, that counts.
    fn disagree(&mut self, found: &Disagreement) {
        self.damaged
            .entry(found.key.clone())
            .or_insert_with(|| Finding {
                what: found.to_error().to_string(),
                layers: BTreeSet::new(),
                good: Some(found.good.clone()),
                missing: false,
            });
    }

    /// Whether it is known of each layer which bytes it uses.
    fn know_all_uses(&self, marks: &Marks) -> bool {
        marks.unknown == Unknown::Nothing
            && marks.unreadable.is_empty()
            && !self.damaged.keys().any(|key| {
                ["locators/", "maps/", "manifests/"]
                    .iter()
                    .any(|family| key.starts_with(family))
            })
    }

    /// Passes on what is no damage.
    fn note<T>(&mut self, result: Result<T>, layer: Option<&str>) -> Result<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) if is_finding(&error) => {
                self.add(&error, layer);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// What clears damage of a pack that no layer touches.
fn remedy_of_unneeded(marks: &Marks, object: &str) -> Option<&'static str> {
    let key = Key::new(object).ok()?;
    match marks.reason(&key) {
        None => Some("nothing uses the pack, and `layerpack gc` deletes it"),
        // Layers need other bytes of it.
        Some(Reason::Unknown) => None,
        Some(_) => Some(
            "no layer uses these bytes any more, and `layerpack prune --min-live 100` leaves them out of a new pack",
        ),
    }
}

/// A place that cannot be read is damage too: the next place may be readable.
fn is_finding(error: &StoreError) -> bool {
    error.is_damage() || matches!(error, StoreError::Io { .. })
}

/// A pack that was looked at.
struct Pack {
    size: u64,
    table: PackTable,
    chunks: Vec<(usize, usize)>,
    /// Frames that are damaged, by offset.
    bad: HashMap<u64, StoreError>,
}

impl LayerStore {
    /// Verifies the whole store; with `read_data` every byte of it.
    ///
    /// # Errors
    /// If the store cannot be listed. What is damaged is in the report.
    pub fn audit(&self, read_data: bool) -> Result<AuditReport> {
        let mut report = AuditReport {
            read_data,
            ..AuditReport::default()
        };
        drop(self.blobs().take_disagreements());
        if let Some(lost) = self.lost_marker()? {
            report.warnings.push(lost.to_string());
        }
        let objects = self.blobs().list("")?;
        for object in &objects {
            report.objects += 1;
            report.bytes += object.size;
        }
        let mut findings = Findings::default();
        let leases = Leases::read(&**self.blobs(), None)?;
        let marks = mark(self, &leases)?;
        for root in &marks.unreadable {
            findings.add(&root.error, Some(&root.name));
        }
        self.audit_references(&objects, &mut findings)?;
        for (key, why) in &leases.unknown {
            if is_volatile(key) {
                // It names what a writer was about to use: nothing that is there is lost with it.
                report.warnings.push(format!(
                    "{why}: left by a writer whose machine stopped, or of a newer version; nothing is collected until it has expired"
                ));
            } else {
                findings.add(&self.corrupt(key, "it is no lease of this version"), None);
            }
        }
        for (_, error) in Condemned::read(&**self.blobs())?.damaged {
            findings.add(&error, None);
        }
        let mut packs = BTreeMap::new();
        let mut unlisted = marks.unlisted_packs(self, &objects)?;
        unlisted.extend(self.packs_of_copies(&marks, &objects, &unlisted)?);
        let listed: Vec<&ObjectInfo> = objects
            .iter()
            .filter(|object| object.key.as_str().starts_with("packs/"))
            .chain(&unlisted)
            .collect();
        let frames = Mutex::new(0_u64);
        for part in listed.chunks(16) {
            let read = parallel::map(part, |object| self.audit_pack(object, read_data, &frames));
            for (object, pack) in part.iter().zip(read) {
                report.packs += 1;
                if let Some((id, pack)) = findings.note(pack, None)? {
                    for error in pack.bad.values() {
                        findings.add(error, None);
                    }
                    packs.insert(id, pack);
                } else {
                    tracing::debug!(key = %object.key, "is damaged");
                }
            }
        }
        report.frames = frames.into_inner().unwrap_or_default();
        let mut parts = self.audit_layers(&marks, &packs, &mut findings)?;
        self.audit_signatures(&objects, &marks, &mut findings)?;
        // An index names what is listed.
        let unlisted = unlisted.iter().filter_map(|object| object.key.digest());
        let unlisted = unlisted.collect();
        self.audit_index(
            &objects,
            &marks,
            &packs,
            &unlisted,
            &mut findings,
            &mut report,
        )?;
        self.audit_orphans(&objects, &marks, &mut findings, &mut report)?;
        for found in self.blobs().take_disagreements() {
            findings.disagree(&found);
        }
        for (digest, layer) in &marks.layers {
            let sound = !findings
                .damaged
                .values()
                .any(|finding| finding.layers.contains(&layer.name));
            let parents = layer.manifest.parents.iter();
            let missing: Vec<&ParentRef> = parents
                .filter(|parent| marks.absent.contains(&parent.manifest))
                .collect();
            for parent in &missing {
                let line = self.lacks_parent(&layer.manifest, parent);
                report.warnings.push(format!("{}: {line}", layer.name));
            }
            report.layers.push(AuditedLayer {
                name: layer.name.clone(),
                manifest: *digest,
                sound,
                part: parts.remove(&layer.name),
                missing_parents: missing.iter().map(|parent| parent.name()).collect(),
            });
        }
        report.layers.sort_by(|a, b| a.name.cmp(&b.name));
        let sure = findings.know_all_uses(&marks);
        for (object, finding) in findings.damaged {
            let remedy = match sure && finding.is_of_a_pack_that_is_there(&object) {
                true => remedy_of_unneeded(&marks, &object),
                false => None,
            };
            let lost = |what| Lost {
                object,
                what,
                layers: finding.layers.into_iter().collect(),
                good: finding.good,
            };
            match remedy {
                Some(remedy) => {
                    let what = format!("{}; {remedy}", finding.what);
                    report.superseded.push(lost(what));
                }
                None => report.damaged.push(lost(finding.what)),
            }
        }
        Ok(report)
    }

    /// Of a store with several addresses: packs that its layers need and that the address which is
    /// listed does not have. A copy may have them, and reading tells. What a part of a layer lacks
    /// by purpose is none of them.
    fn packs_of_copies(
        &self,
        marks: &Marks,
        listed: &[ObjectInfo],
        unlisted: &[ObjectInfo],
    ) -> Result<Vec<ObjectInfo>> {
        if self.blobs().first_url() == self.blobs().url() {
            return Ok(Vec::new());
        }
        let known: HashSet<&Key> = listed.iter().chain(unlisted).map(|o| &o.key).collect();
        let layers: Vec<&UsedLayer> = marks.layers.values().collect();
        let mut found = BTreeMap::new();
        for part in layers.chunks(16) {
            let places = parallel::map(part, |layer| {
                match self.seed_marker(&layer.manifest.map.digest) {
                    Ok(None) => places_of(self, &layer.manifest).map(|places| places.packs),
                    Ok(Some(_)) => Ok(Vec::new()),
                    Err(error) => Err(error),
                }
            });
            for packs in places {
                match packs {
                    Ok(packs) => found.extend(packs.iter().map(|p| (Key::pack(&p.id), p.size))),
                    // It is looked at again with its layer, and named then.
                    Err(error) if is_finding(&error) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(found
            .into_iter()
            .filter(|(key, _)| !known.contains(key))
            .map(|(key, size)| ObjectInfo {
                key,
                size,
                modified: None,
            })
            .collect())
    }

    /// The copies of manifests in references; what else is wrong with one was found by marking.
    fn audit_references(&self, objects: &[ObjectInfo], findings: &mut Findings) -> Result<()> {
        let references: Vec<Reference> = (objects.iter())
            .filter_map(|object| object.key.to_reference())
            .collect();
        for part in references.chunks(16) {
            let checked = parallel::map(part, |reference| self.check_copy(reference));
            for (reference, checked) in part.iter().zip(checked) {
                findings.note(checked, Some(&reference.to_string()))?;
            }
        }
        Ok(())
    }

    /// A pack's structure and, with `read_data`, all its bytes.
    fn audit_pack(
        &self,
        object: &ObjectInfo,
        read_data: bool,
        read: &Mutex<u64>,
    ) -> Result<(Digest, Pack)> {
        let id = object
            .key
            .digest()
            .filter(|id| Key::pack(id) == object.key)
            .ok_or_else(|| self.corrupt(&object.key, "its name is not that of a pack"))?;
        let (table_offset, table) = self.structure_of_pack(&id, object.size)?;
        let mut bad = HashMap::new();
        if read_data {
            let all: Vec<usize> = (0..table.frames.len()).collect();
            let mut hasher = Hasher::new();
            hasher.update(&self.blobs().get_range(&object.key, 0..FRAMES_START)?);
            self.read_stored_frames(&id, &table, &all, &mut |index, stored| {
                if let Ok(mut frames) = read.lock() {
                    *frames += 1;
                }
                let offset = table.frames.get(index).map_or(0, |f| f.offset);
                match stored {
                    Ok(stored) => {
                        hasher.update(stored);
                    }
                    Err(error) if is_finding(&error) => {
                        bad.insert(offset, error);
                    }
                    Err(error) => return Err(error),
                }
                Ok(())
            })?;
            // Frames follow each other without gaps: these were all bytes before the table.
            let tail = self
                .blobs()
                .get_range(&object.key, table_offset..object.size)?;
            hasher.update(&tail);
            let digest = hasher.finish();
            if bad.is_empty() && digest != id {
                return Err(self.corrupt(&object.key, format!("its digest is {digest}")));
            }
        }
        let chunks = chunks_by_frame(&table);
        let pack = Pack {
            size: object.size,
            table,
            chunks,
            bad,
        };
        Ok((id, pack))
    }

    fn audit_layers(
        &self,
        marks: &Marks,
        packs: &BTreeMap<Digest, Pack>,
        findings: &mut Findings,
    ) -> Result<BTreeMap<String, SeedMarker>> {
        let mut parts = BTreeMap::new();
        let layers: Vec<&UsedLayer> = marks.layers.values().collect();
        for part in layers.chunks(16) {
            let loaded = parallel::map(part, |layer| {
                let meta = self.meta(&layer.manifest).map(|_| ());
                let map = self.map(&layer.manifest);
                let locator = match &map {
                    Ok(map) => Some(self.locator(&layer.manifest, map)),
                    Err(_) => None,
                };
                (meta, map, locator)
            });
            for (layer, (meta, map, locator)) in part.iter().zip(loaded) {
                let name = Some(layer.name.as_str());
                findings.note(meta, name)?;
                let map = findings.note(map, name)?;
                let locator = match locator {
                    Some(locator) => findings.note(locator, name)?,
                    None => None,
                };
                if let (Some(map), Some(locator)) = (map, locator) {
                    let part = self.audit_places(layer, &map, &locator, packs, findings);
                    parts.extend(part.map(|part| (layer.name.clone(), part)));
                }
            }
        }
        Ok(parts)
    }

    /// That signatures of the layers' manifests are by the keys that they name.
    fn audit_signatures(
        &self,
        objects: &[ObjectInfo],
        marks: &Marks,
        findings: &mut Findings,
    ) -> Result<()> {
        let signatures = objects.iter().filter_map(|object| {
            let rest = object.key.as_str().strip_prefix("signatures/")?;
            let manifest = Digest::from_hex(rest.split_once('/')?.0).ok()?;
            Some((&object.key, manifest, marks.layers.get(&manifest)?))
        });
        for part in signatures.collect::<Vec<_>>().chunks(16) {
            let checked = parallel::map(part, |(key, manifest, _)| self.signer(manifest, key));
            for ((_, _, layer), signer) in part.iter().zip(checked) {
                findings.note(signer, Some(&layer.name))?;
            }
        }
        Ok(())
    }

    /// That each chunk of a layer is where its locator says, by the packs' tables.
    fn audit_places(
        &self,
        layer: &UsedLayer,
        map: &LayerMap,
        locator: &Locator,
        packs: &BTreeMap<Digest, Pack>,
        findings: &mut Findings,
    ) -> Option<SeedMarker> {
        let name = Some(layer.name.as_str());
        let key = Key::locator(&layer.manifest.map.digest);
        // Of a part of a layer, packs that are not here are elsewhere by purpose.
        let part = match self.seed_marker(&layer.manifest.map.digest) {
            Ok(marker) => marker,
            Err(error) => {
                findings.add(&error, name);
                None
            }
        };
        for loc in locator.packs() {
            let pack_key = Key::pack(&loc.id);
            match packs.get(&loc.id) {
                None if part.is_some() && !findings.damaged.contains_key(pack_key.as_str()) => {}
                // Damaged, and named as such already; or not there.
                None => findings.add(&self.missing(&pack_key), name),
                Some(pack) if pack.size != loc.size => {
                    let what = format!("it has {} bytes, its locator says {}", pack.size, loc.size);
                    findings.add(&self.corrupt(&pack_key, what), name);
                }
                Some(_) => {}
            }
        }
        let mut wrong = 0_u64;
        for (number, frame) in (0_u32..).zip(locator.frames()) {
            let pack = usize::try_from(frame.pack)
                .ok()
                .and_then(|p| locator.packs().get(p))
                .and_then(|loc| packs.get(&loc.id));
            let Some(pack) = pack else { continue };
            if let Some(error) = pack.bad.get(&frame.offset) {
                findings.add(error, name);
            }
            let at = pack
                .table
                .frames
                .binary_search_by_key(&frame.offset, |f| f.offset);
            let found = at.ok().and_then(|at| {
                let table = pack.table.frames.get(at)?;
                (place_of(table, frame.pack) == *frame).then_some(*pack.chunks.get(at)?)
            });
            let Some((first, count)) = found else {
                wrong += 1;
                continue;
            };
            let chunks = pack.table.chunks.get(first..first.saturating_add(count));
            let chunks = chunks.unwrap_or_default();
            for &extent in locator.extents_of_frame(number) {
                let Ok(extent) = usize::try_from(extent) else {
                    continue;
                };
                let (Some(extent), Some((_, offset))) =
                    (map.extents().get(extent), locator.extent(extent))
                else {
                    continue;
                };
                let there = chunks.iter().any(|chunk| {
                    (chunk.offset, chunk.len, chunk.digest) == (offset, extent.len, extent.digest)
                });
                wrong += u64::from(!there);
            }
        }
        if wrong > 0 {
            let what = format!("{wrong} of its places are not what the packs' tables say");
            findings.add(&self.corrupt(&key, what), name);
        }
        part
    }

    fn audit_index(
        &self,
        objects: &[ObjectInfo],
        marks: &Marks,
        packs: &BTreeMap<Digest, Pack>,
        unlisted: &BTreeSet<Digest>,
        findings: &mut Findings,
        report: &mut AuditReport,
    ) -> Result<()> {
        let mut named: BTreeSet<Digest> = BTreeSet::new();
        let mut stale = 0_u64;
        for object in objects {
            if !object.key.as_str().starts_with("index/") {
                continue;
            }
            let segment = findings.note(self.index_segment(&object.key), None)?;
            for pack in segment.flatten().iter().flat_map(|s| s.packs()) {
                match packs.get(&pack.id) {
                    Some(there) if there.size == pack.size => {
                        named.insert(pack.id);
                    }
                    _ => stale += 1,
                }
            }
        }
        if stale > 0 {
            report.warnings.push(format!(
                "indexes name {stale} packs that are gone or damaged; prune or repair tidies that up"
            ));
        }
        let expected = packs.keys().filter(|id| !unlisted.contains(id));
        for id in expected.filter(|id| !named.contains(id)) {
            let key = Key::pack(id);
            if marks.reason(&key).is_some() {
                report.warnings.push(format!(
                    "no index names {key}: new layers cannot share its chunks until repair made one"
                ));
            }
        }
        Ok(())
    }

    fn audit_orphans(
        &self,
        objects: &[ObjectInfo],
        marks: &Marks,
        findings: &mut Findings,
        report: &mut AuditReport,
    ) -> Result<()> {
        for object in objects {
            let key = object.key.as_str();
            let Some(number) = family(key) else {
                let known = [
                    "refs/",
                    "channels/",
                    "claims/",
                    "leases/",
                    "gc/",
                    "profiles/",
                ];
                if object.key != Key::marker() && !known.iter().any(|f| key.starts_with(f)) {
                    report
                        .warnings
                        .push(format!("{key} is of no family that is known here"));
                }
                continue;
            };
            if key.starts_with("index/") || reason_of(marks, &object.key).is_some() {
                continue;
            }
            if number == 0
                && let Some(digest) = object.key.digest()
            {
                findings.note(self.manifest(&digest).map(|_| ()), None)?;
            }
            report.orphans.push(Orphan {
                object: key.to_owned(),
                size: object.size,
            });
        }
        Ok(())
    }
}
