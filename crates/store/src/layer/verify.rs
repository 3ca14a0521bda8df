//! Proving every byte of a layer: reference, manifest, metadata, map, locator, the packs' headers
//! and tables, every frame and every chunk. Damage is collected, not stopped at: one pass tells all
//! that is wrong. Only an unknown reference or a failing backend ends it early. Packs and frames are
//! read and checked by several threads in bounded memory; the report is the same as one thread's.

use std::collections::HashSet;
use std::ops::Range;

use super::LayerStore;
use super::read::{Request, frame_at, plan, range_of};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::index::IndexPack;
use crate::format::locator::{FrameLoc, Locator, PackLoc};
use crate::format::map::LayerMap;
use crate::index::{SegmentStream, segments};
use crate::key::Key;
use crate::manifest::{LayerId, Manifest, ParentRef};
use crate::parallel::{Bounds, Order, for_each};
use crate::reference::{Kind, Reference};

/// Bytes of requests and frames in memory at once, whatever the number of cores.
const MAX_MEMORY: u64 = 64 << 20;
/// What a frame takes at most when it is decompressed.
const MAX_FRAME: u64 = 4 << 20;
/// What a pack's table is taken to need: a usual one needs less, the largest 256 MiB.
const TABLE_WEIGHT: u64 = 8 << 20;
/// Segments read at once, and bytes of them in memory.
const SEGMENTS: Bounds = Bounds {
    threads: 8,
    bytes: 48 << 20,
};
/// Requests under way even where there are fewer cores: a remote store has latency.
const MIN_REQUESTS: usize = 4;

/// One damaged object, or part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The object's key.
    pub key: String,
    /// Bytes of the object concerned, if not all of it.
    pub range: Option<Range<u64>>,
    /// What was found.
    pub what: String,
    /// Ranges of the layer's data address space that cannot be read because of it.
    pub data: Vec<Range<u64>>,
}

/// What verifying a layer found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    /// The layer.
    pub reference: Reference,
    /// Digest of its manifest, if the reference could be read.
    pub manifest: Option<Digest>,
    /// Identity of its content, if the manifest could be read.
    pub layer_id: Option<LayerId>,
    /// Objects looked at.
    pub objects: u64,
    /// Frames verified.
    pub frames: u64,
    /// Chunks verified.
    pub chunks: u64,
    /// Bytes read from the store.
    pub stored_bytes: u64,
    /// Bytes of chunks verified.
    pub raw_bytes: u64,
    /// Frames of the layer that are elsewhere, since the store has only a part of it: not damage.
    pub absent_frames: u64,
    /// What is damaged. Empty: every byte of the layer is right.
    pub damaged: Vec<Damage>,
    /// Layers that this one was made on, by name (by digest where the manifest has no name), whose
    /// manifests are not in the store. Each has a warning too.
    pub missing_parents: Vec<String>,
    /// What does not concern the layer's bytes, one line each: the store's marker is gone, or no
    /// sound index segment names one of the layer's packs, so that new layers cannot share it
    /// (publishing the layer again mends both), or a parent is missing or damaged.
    pub warnings: Vec<String>,
}

impl VerifyReport {
    /// True if every byte of the layer is right.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.damaged.is_empty()
    }
}

/// Records damage, passes other errors on.
fn note<T>(
    damaged: &mut Vec<Damage>,
    result: Result<T>,
    data: impl FnOnce() -> Vec<Range<u64>>,
) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_damage() => {
            let range = match &error {
                StoreError::Corrupt { range, .. } => range.clone(),
                _ => None,
            };
            let key = error.key().map_or_else(|| error.to_string(), str::to_owned);
            damaged.push(Damage {
                key,
                range,
                what: error.to_string(),
                data: data(),
            });
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

impl VerifyReport {
    fn note<T>(
        &mut self,
        result: Result<T>,
        data: impl FnOnce() -> Vec<Range<u64>>,
    ) -> Result<Option<T>> {
        note(&mut self.damaged, result, data)
    }
}

/// A part of the report that one thread makes.
#[derive(Debug, Default)]
struct Part {
    objects: u64,
    frames: u64,
    chunks: u64,
    stored_bytes: u64,
    raw_bytes: u64,
    damaged: Vec<Damage>,
}

impl Part {
    fn note<T>(
        &mut self,
        result: Result<T>,
        data: impl FnOnce() -> Vec<Range<u64>>,
    ) -> Result<Option<T>> {
        note(&mut self.damaged, result, data)
    }

    fn add(&mut self, other: Self) {
        self.objects += other.objects;
        self.frames += other.frames;
        self.chunks += other.chunks;
        self.stored_bytes += other.stored_bytes;
        self.raw_bytes += other.raw_bytes;
        self.damaged.extend(other.damaged);
    }
}

/// Ranges of the data address space that these frames hold, joined where they touch.
fn data_of(map: &LayerMap, locator: &Locator, frames: &[u32]) -> Vec<Range<u64>> {
    let extents = frames.iter().flat_map(|&f| locator.extents_of_frame(f));
    let mut ranges: Vec<Range<u64>> = extents
        .filter_map(|&i| map.extents().get(usize::try_from(i).ok()?))
        .map(|e| e.data_offset..e.end())
        .collect();
    ranges.sort_unstable_by_key(|r| r.start);
    ranges.dedup_by(|next, before| {
        let touches = next.start == before.end;
        if touches {
            before.end = next.end;
        }
        touches
    });
    ranges
}

impl LayerStore {
    /// Reads and verifies every byte of a layer. Damage is in the report; its messages name the
    /// object, the range and the remedy.
    ///
    /// # Errors
    /// [`StoreError::UnknownReference`], or what the backend fails with.
    pub fn verify(&self, reference: &Reference) -> Result<VerifyReport> {
        let mut report = VerifyReport {
            reference: reference.clone(),
            manifest: None,
            layer_id: None,
            objects: 0,
            frames: 0,
            chunks: 0,
            stored_bytes: 0,
            raw_bytes: 0,
            absent_frames: 0,
            damaged: Vec::new(),
            missing_parents: Vec::new(),
            warnings: Vec::new(),
        };
        drop(self.blobs().take_disagreements());
        self.verify_into(reference, &mut report)?;
        // What an address has wrong costs nothing while another has it right, and is damage.
        for found in self.blobs().take_disagreements() {
            report.note::<()>(Err(found.to_error()), Vec::new)?;
        }
        Ok(report)
    }

    fn verify_into(&self, reference: &Reference, report: &mut VerifyReport) -> Result<()> {
        let resolved = self.resolve(reference);
        report.objects += 1;
        let Some(digest) = report.note(resolved, Vec::new)? else {
            return Ok(());
        };
        report.manifest = Some(digest);
        report.note(self.check_copy(reference), Vec::new)?;
        let lost = self.lost_marker()?;
        report.warnings.extend(lost.map(|error| error.to_string()));
        report.objects += 1;
        let Some(manifest) = report.note(self.manifest(&digest), Vec::new)? else {
            return Ok(());
        };
        report.layer_id = Some(manifest.layer_id());
        if &manifest.reference() != reference {
            let what = format!("it names the manifest of {}", manifest.reference());
            report.note::<()>(Err(self.damaged_ref(reference, what)), Vec::new)?;
        }
        self.verify_parents(&manifest, report)?;
        let everything = || {
            std::iter::once(0..manifest.data_size)
                .filter(|r| !r.is_empty())
                .collect::<Vec<_>>()
        };
        report.objects += 1;
        report.note(self.meta(&manifest), Vec::new)?;
        report.objects += 1;
        let Some(map) = report.note(self.map(&manifest), everything)? else {
            return Ok(());
        };
        report.objects += 1;
        let Some(locator) = report.note(self.locator(&manifest, &map), everything)? else {
            return Ok(());
        };
        self.verify_small(&manifest, report)?;
        self.verify_packs(&map, &locator, report)?;
        self.verify_indexed(&locator, report)?;
        Ok(())
    }

    /// That the layers which it was made on are in the store. They are verified by themselves.
    fn verify_parents(&self, manifest: &Manifest, report: &mut VerifyReport) -> Result<()> {
        for parent in &manifest.parents {
            match self.manifest(&parent.manifest) {
                Ok(_) => {}
                Err(StoreError::Missing { .. }) => {
                    report.missing_parents.push(parent.name());
                    report.warnings.push(self.lacks_parent(manifest, parent));
                }
                Err(error) if error.is_damage() => report.warnings.push(format!(
                    "its parent {} cannot be read: {error}",
                    parent.name()
                )),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// What it means that a layer's parent is not in the store.
    pub(crate) fn lacks_parent(&self, manifest: &Manifest, parent: &ParentRef) -> String {
        let name = match &parent.reference {
            Some(reference) => format!("{reference} ({})", parent.manifest),
            None => parent.manifest.to_string(),
        };
        let meaning = match manifest.kind {
            Kind::Diff => {
                ", so it cannot be mounted from there by its name alone; copy the parent there, or name a store that has it too"
            }
            Kind::Base | Kind::Workspace | Kind::Toolkit => "; the layer itself lacks nothing",
        };
        format!("its parent {name} is not in store {}{meaning}", self.url())
    }

    /// That a sound index segment names each pack of the layer.
    fn verify_indexed(&self, locator: &Locator, report: &mut VerifyReport) -> Result<()> {
        let mut open: HashSet<PackLoc> = locator.packs().iter().copied().collect();
        let listed = match segments(self) {
            Err(error @ StoreError::NotSupported { .. }) => {
                report
                    .warnings
                    .push(format!("the index was not looked at: {error}"));
                return Ok(());
            }
            listed => listed?,
        };
        // Which segments say that they name one of the packs: their first bytes. Then those, whole.
        let mut candidates: Vec<&Key> = Vec::new();
        let mut others: Vec<&Key> = Vec::new();
        let loc = |pack: &IndexPack| PackLoc {
            id: pack.id,
            size: pack.size,
        };
        for_each(
            &listed,
            SEGMENTS,
            Order::Kept,
            |_| 64 << 10,
            |(key, _, _)| {
                let stream = SegmentStream::open(self, key)?;
                let names = |p: &IndexPack| open.contains(&loc(p));
                Ok(stream.is_some_and(|s| s.packs().iter().any(names)))
            },
            |number, result| {
                let Some((key, _, _)) = listed.get(number) else {
                    return Ok(());
                };
                match result {
                    Ok(true) => candidates.push(key),
                    Ok(false) => others.push(key),
                    Err(error) if StoreError::is_damage(&error) => others.push(key),
                    Err(error) => return Err(error),
                }
                Ok(())
            },
        )?;
        let mut bad = Vec::new();
        let mut check = |keys: &[&Key], open: &mut HashSet<PackLoc>| {
            for_each(
                keys,
                SEGMENTS,
                Order::Kept,
                |_| 6 << 20,
                |key| self.check_segment(key),
                |_, result| match result {
                    Ok(named) => {
                        for pack in &named {
                            open.remove(&loc(pack));
                        }
                        Ok(())
                    }
                    Err(error) if StoreError::is_damage(&error) => {
                        bad.push(error);
                        Ok(())
                    }
                    Err(error) => Err(error),
                },
            )
        };
        check(&candidates, &mut open)?;
        if !open.is_empty() {
            check(&others, &mut open)?; // to name those that are damaged
        }
        let part = self
            .seed_marker(locator.map_digest())
            .is_ok_and(|m| m.is_some());
        let mut packs = Vec::new();
        for pack in locator.packs().iter().filter(|pack| open.contains(pack)) {
            // Of a part, packs that are elsewhere are not expected in an index.
            if !part || self.blobs().size(&Key::pack(&pack.id))?.is_some() {
                packs.push(pack);
            }
        }
        let lines: Vec<String> = packs
            .into_iter()
            .map(|pack| {
                format!(
                    "no index in store {} names object {}: new layers cannot share its chunks; publish the layer again",
                    self.url(),
                    Key::pack(&pack.id)
                )
            })
            .collect();
        // Perhaps of other packs; but where all of the layer's are named, not its concern.
        if !lines.is_empty() {
            report.warnings.extend(bad.iter().map(ToString::to_string));
        }
        report.warnings.extend(lines);
        Ok(())
    }

    /// Bytes of the objects that were verified whole.
    fn verify_small(&self, manifest: &Manifest, report: &mut VerifyReport) -> Result<()> {
        for key in [
            Key::meta(&manifest.meta.digest),
            Key::map(&manifest.map.digest),
            Key::locator(&manifest.map.digest),
        ] {
            report.stored_bytes += self.blobs().size(&key)?.unwrap_or(0);
        }
        Ok(())
    }

    /// Every pack of the locator: first that it is there and its structure, then its frames, each
    /// on all cores. The report does not depend on who was first.
    fn verify_packs(
        &self,
        map: &LayerMap,
        locator: &Locator,
        report: &mut VerifyReport,
    ) -> Result<()> {
        let bounds = Bounds {
            threads: std::thread::available_parallelism()
                .map_or(1, usize::from)
                .max(MIN_REQUESTS),
            bytes: MAX_MEMORY,
        };
        let mut packs: Vec<(PackLoc, Vec<u32>)> = locator
            .packs()
            .iter()
            .map(|pack| (*pack, Vec::new()))
            .collect();
        for (number, frame) in (0_u32..).zip(locator.frames()) {
            let pack = usize::try_from(frame.pack).ok();
            if let Some((_, list)) = pack.and_then(|p| packs.get_mut(p)) {
                list.push(number);
            }
        }
        let part = self.seed_marker(locator.map_digest());
        if report.note(part, Vec::new)?.flatten().is_some() {
            // What is elsewhere is absent by purpose.
            let mut here = Vec::with_capacity(packs.len());
            for (pack, mine) in packs {
                if self.blobs().size(&Key::pack(&pack.id))?.is_some() {
                    here.push((pack, mine));
                } else {
                    report.absent_frames += mine.len() as u64;
                }
            }
            packs = here;
        }
        let mut parts: Vec<Part> = Vec::with_capacity(packs.len());
        let mut requests: Vec<(usize, Request)> = Vec::new();
        for_each(
            &packs,
            bounds,
            Order::Kept,
            |_| TABLE_WEIGHT,
            |(pack, mine)| self.verify_pack(map, locator, pack, mine),
            |number, result| {
                let (there, part) = result?;
                parts.push(part);
                if let Some((_, mine)) = packs.get(number).filter(|_| there) {
                    requests.extend(plan(locator, mine)?.into_iter().map(|r| (number, r)));
                }
                Ok::<(), StoreError>(())
            },
        )?;
        for_each(
            &requests,
            bounds,
            Order::Kept,
            // One frame at a time is decompressed.
            |(_, request)| (request.range.end - request.range.start).saturating_add(MAX_FRAME),
            |(_, request)| self.verify_request(map, locator, request),
            |number, result| {
                let part = result?;
                let pack = requests
                    .get(number)
                    .and_then(|(pack, _)| parts.get_mut(*pack));
                if let Some(pack) = pack {
                    pack.add(part);
                }
                Ok::<(), StoreError>(())
            },
        )?;
        for part in parts {
            report.objects += part.objects;
            report.frames += part.frames;
            report.chunks += part.chunks;
            report.stored_bytes += part.stored_bytes;
            report.raw_bytes += part.raw_bytes;
            report.damaged.extend(part.damaged);
        }
        Ok(())
    }

    /// Whether the pack is there to read frames from, and what is wrong with its structure.
    fn verify_pack(
        &self,
        map: &LayerMap,
        locator: &Locator,
        pack: &PackLoc,
        frames: &[u32],
    ) -> Result<(bool, Part)> {
        let mut part = Part {
            objects: 1,
            ..Part::default()
        };
        // A pack that is gone is one damage, not one for each of its frames.
        let key = Key::pack(&pack.id);
        let size = self.blobs().size(&key).and_then(|size| match size {
            Some(size) => Ok(size),
            // A copy may have it: its frames can be read then.
            None => self.check_pack_header(&key, pack.size).map(|()| pack.size),
        });
        let Some(size) = part.note(size, || data_of(map, locator, frames))? else {
            return Ok((false, part));
        };
        let structure = self.verify_structure(pack, size, locator, frames);
        part.note(structure, Vec::new)?;
        Ok((true, part))
    }

    /// A pack's header, footer and table, and that the table says of the frames what the locator
    /// says.
    fn verify_structure(
        &self,
        pack: &PackLoc,
        size: u64,
        locator: &Locator,
        frames: &[u32],
    ) -> Result<()> {
        let key = Key::pack(&pack.id);
        if size != pack.size {
            return Err(StoreError::Corrupt {
                store: self.blobs().first_url(),
                key: key.to_string(),
                range: None,
                what: format!("it has {size} bytes, its locator says {}", pack.size),
            });
        }
        self.check_pack_header(&key, size)?;
        let footer = self.read_footer(&key, size)?;
        let table = self.read_table(&key, size, footer.table_offset)?;
        for &number in frames {
            let frame = frame_at(locator, number)?;
            let same = |f: &FrameLoc, t: &crate::format::pack::PackFrame| {
                (f.offset, f.stored_len, f.raw_len, f.codec, f.digest)
                    == (t.offset, t.stored_len, t.raw_len, t.codec, t.digest)
            };
            let found = table
                .frames
                .binary_search_by_key(&frame.offset, |t| t.offset)
                .ok();
            if !found
                .and_then(|i| table.frames.get(i))
                .is_some_and(|t| same(frame, t))
            {
                return Err(self.corrupt(
                    &key,
                    format!(
                        "its table has no such frame as the locator at {}",
                        frame.offset
                    ),
                ));
            }
        }
        Ok(())
    }

    fn verify_request(&self, map: &LayerMap, locator: &Locator, request: &Request) -> Result<Part> {
        let mut part = Part::default();
        let key = Key::pack(&request.pack);
        let verify = |number: u32, stored: &[u8]| {
            self.verify_frame(map, locator, &request.pack, number, stored)
        };
        let results: Vec<Result<u64>> = match self.fetch(&request.pack, request.range.clone()) {
            Ok(bytes) => {
                let mut parts = Vec::with_capacity(request.frames.len());
                for &number in &request.frames {
                    parts.push(range_of(frame_at(locator, number)?));
                }
                let start = request.range.start;
                self.parts_checked(&key, start, &bytes, &parts, &mut |at, stored| {
                    verify(request.frames.get(at).copied().unwrap_or(u32::MAX), stored)
                })
            }
            // Part of the range cannot be read: find out which frames.
            Err(_) => (request.frames.iter())
                .map(|&number| {
                    let range = range_of(frame_at(locator, number)?);
                    self.range_checked(&key, range, &mut |stored| verify(number, stored))
                })
                .collect(),
        };
        for (&number, result) in request.frames.iter().zip(results) {
            let frame = frame_at(locator, number)?;
            let raw = part.note(result, || data_of(map, locator, &[number]))?;
            part.frames += 1;
            part.stored_bytes += u64::from(frame.stored_len);
            part.chunks += locator.extents_of_frame(number).len() as u64;
            part.raw_bytes += raw.unwrap_or(0);
        }
        Ok(part)
    }

    /// Raw bytes of the frame.
    fn verify_frame(
        &self,
        map: &LayerMap,
        locator: &Locator,
        pack: &Digest,
        number: u32,
        stored: &[u8],
    ) -> Result<u64> {
        let frame = frame_at(locator, number)?;
        let raw = self.open_frame(pack, frame, stored)?;
        let mut checked: Option<(u32, Digest)> = None;
        for &i in locator.extents_of_frame(number) {
            let Ok(i) = usize::try_from(i) else { continue };
            let (Some(extent), Some((_, offset))) = (map.extents().get(i), locator.extent(i))
            else {
                continue;
            };
            if checked == Some((offset, extent.digest)) {
                continue;
            }
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            let len = usize::try_from(extent.len).unwrap_or(usize::MAX);
            let bytes = raw
                .get(start..start.saturating_add(len))
                .unwrap_or_default();
            self.check_chunk(pack, frame, extent, bytes)?;
            checked = Some((offset, extent.digest));
        }
        Ok(raw.len() as u64)
    }
}
