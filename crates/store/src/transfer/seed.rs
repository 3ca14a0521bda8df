//! Seeding: the part of some layers that recorded profiles use, in another store.
//!
//! Metadata, maps and manifests go whole; of the data only frames that fit a budget, those first
//! that are used most often for their bytes. A frame's use is the number of recordings that read
//! one of its chunks, over all profiles. The target's locators name the seeded frames where they
//! are there and all others where the source has them: with both stores as mirrors everything can
//! be read, with the target alone what is not there is an error that says so (FORMAT.md, section
//! "Parts of layers").

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{Session, TransferOptions, TransferReport, TransferStep, fresh, has_layer};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::Locator;
use crate::format::map::LayerMap;
use crate::format::pack::{FOOTER_LEN, FRAMES_START, TARGET_PACK_LEN};
use crate::key::Key;
use crate::layer::{LayerStore, PublishOutcome, Tables, stored_len};
use crate::manifest::Manifest;
use crate::profile::Profile;
use crate::reference::Reference;

/// What to seed.
#[derive(Debug, Clone, Default)]
pub struct SeedOptions {
    /// Most bytes to use in the target, as stored: frames, what describes them, metadata, profiles
    /// and signatures. What the target has already counts too: the result does not depend on it.
    pub max_bytes: u64,
    /// Only say what would be seeded.
    pub dry_run: bool,
    /// How it is moved.
    pub transfer: TransferOptions,
}

/// A layer that was seeded. Sizes in bytes, as stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeededLayer {
    /// The layer.
    pub reference: Reference,
    /// Digest of its manifest.
    pub digest: Digest,
    /// Metadata, map and locator.
    pub metadata_bytes: u64,
    /// Frames selected.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Frames of the whole layer.
    pub all_frames: u64,
    /// Their bytes.
    pub all_bytes: u64,
}

/// How much of what an environment reads was seeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// The profile's name.
    pub name: String,
    /// The profile's digest.
    pub profile: Digest,
    /// Its layers, bottom first.
    pub layers: Vec<Reference>,
    /// Extents that were read.
    pub extents: u64,
    /// Of these, extents that are seeded.
    pub covered_extents: u64,
    /// Bytes of extents that were read.
    pub bytes: u64,
    /// Of these, bytes that are seeded.
    pub covered_bytes: u64,
    /// Reads: extents, each as often as there are recordings that read it.
    pub accesses: u64,
    /// Of these, reads of what is seeded.
    pub covered_accesses: u64,
}

impl Environment {
    /// Whether everything that was read is seeded.
    #[must_use]
    pub const fn is_covered(&self) -> bool {
        self.covered_extents == self.extents
    }
}

/// What was seeded, or would be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SeedReport {
    /// Layers in the order in which they were published.
    pub layers: Vec<SeededLayer>,
    /// One per profile, in the order given.
    pub environments: Vec<Environment>,
    /// What is needed besides frames and what describes them, in bytes as stored and at most:
    /// metadata, maps, locators, references, signatures, profiles, indexes.
    pub metadata_bytes: u64,
    /// Frames selected of all layers, each once, in bytes as stored.
    pub frame_bytes: u64,
    /// What moved; empty for a dry run.
    pub transfer: TransferReport,
}

/// A layer's map and locator in the source.
struct Loaded {
    digest: Digest,
    manifest: Manifest,
    map: LayerMap,
    locator: Locator,
    /// Taken whole.
    whole: bool,
    metadata_bytes: u64,
}

/// A frame of the source: pack and offset.
type Place = (Digest, u64);

/// What is known of a frame.
#[derive(Debug, Clone, Copy, Default)]
struct Use {
    uses: u64,
    /// Bytes that it takes in the target, what describes it included.
    cost: u64,
    /// Of the profile that reads it first.
    rank: u32,
}

impl Loaded {
    fn read(
        source: &LayerStore,
        digest: Digest,
        manifest: Manifest,
        whole: bool,
        level: i32,
    ) -> Result<Self> {
        let map = source.map(&manifest)?;
        let locator = source.locator(&manifest, &map)?;
        // As they will be stored there.
        let meta = source.meta(&manifest)?;
        let mut metadata_bytes = stored_len(level, &meta)? + stored_len(level, &map.to_bytes())?;
        drop(meta);
        for key in [Key::manifest(&digest), Key::locator(&manifest.map.digest)] {
            metadata_bytes += source.blobs().size(&key)?.unwrap_or(0);
        }
        Ok(Self {
            digest,
            manifest,
            map,
            locator,
            whole,
            metadata_bytes,
        })
    }

    /// Place and stored bytes of frame `number`.
    fn frame(&self, number: u32) -> Option<(Place, u64)> {
        let frame = self.locator.frames().get(usize::try_from(number).ok()?)?;
        let pack = self
            .locator
            .packs()
            .get(usize::try_from(frame.pack).ok()?)?;
        Some(((pack.id, frame.offset), frame.stored_len.into()))
    }

    /// Place and stored bytes of the frame of an extent.
    fn frame_of(&self, extent: u32) -> Option<(Place, u64)> {
        self.frame(self.locator.extent(usize::try_from(extent).ok()?)?.0)
    }
}

/// Seeds what `profiles` (digest and profile) use, and `whole` layers.
///
/// # Errors
/// [`StoreError::InvalidInput`] if the budget does not hold metadata and whole layers, or a
/// profile does not fit its layers; else as [`super::transfer`].
pub fn seed(
    source: &LayerStore,
    target: &LayerStore,
    profiles: &[(Digest, Profile)],
    whole: &[(Digest, Manifest)],
    options: &SeedOptions,
    progress: &mut dyn FnMut(TransferStep<'_>),
) -> Result<SeedReport> {
    let layers = load(source, profiles, whole, options.transfer.writer.level)?;
    let by_digest: HashMap<Digest, usize> = layers
        .iter()
        .enumerate()
        .map(|(index, layer)| (layer.digest, index))
        .collect();
    let mut uses: HashMap<Place, Use> = HashMap::new();
    for (digest, profile) in profiles {
        count(digest, profile, &layers, &by_digest, &mut uses)?;
    }
    let mut report = SeedReport {
        metadata_bytes: besides_frames(source, &layers, options)?,
        ..SeedReport::default()
    };
    let costs = costs(source, &layers, &mut uses)?;
    let selected = choose(&layers, uses, &costs, options.max_bytes, &mut report)?;
    for (digest, profile) in profiles {
        let covered = cover(digest, profile, &layers, &by_digest, &selected);
        report.environments.push(covered);
    }
    let mut parts = Vec::with_capacity(layers.len());
    for layer in &layers {
        let mut seeded = SeededLayer {
            reference: layer.manifest.reference(),
            digest: layer.digest,
            metadata_bytes: layer.metadata_bytes,
            frames: 0,
            bytes: 0,
            all_frames: layer.locator.frames().len() as u64,
            all_bytes: layer.locator.stored_bytes(),
        };
        let mut frames = HashSet::new();
        for (number, _) in (0_u32..).zip(layer.locator.frames()) {
            if let Some((place, stored)) = layer.frame(number)
                && selected.contains(&place)
            {
                seeded.frames += 1;
                seeded.bytes += stored;
                frames.insert(number);
            }
        }
        report.layers.push(seeded);
        parts.push(frames);
    }
    if !options.dry_run {
        report.transfer = move_parts(source, target, &layers, &parts, &options.transfer, progress)?;
    }
    Ok(report)
}

/// The layers, each once: those of profiles from the bottom up.
fn load(
    source: &LayerStore,
    profiles: &[(Digest, Profile)],
    whole: &[(Digest, Manifest)],
    level: i32,
) -> Result<Vec<Loaded>> {
    let mut layers: Vec<Loaded> = Vec::new();
    let mut seen = HashSet::new();
    for (digest, manifest) in whole {
        if seen.insert(*digest) {
            layers.push(Loaded::read(
                source,
                *digest,
                manifest.clone(),
                true,
                level,
            )?);
        }
    }
    for layer in profiles.iter().flat_map(|(_, p)| &p.layers) {
        if seen.insert(layer.manifest) {
            let manifest = source.manifest(&layer.manifest)?;
            layers.push(Loaded::read(
                source,
                layer.manifest,
                manifest,
                false,
                level,
            )?);
        }
    }
    Ok(layers)
}

fn unfit(digest: &Digest, what: impl Into<String>) -> StoreError {
    StoreError::InvalidInput {
        object: format!("what profile {digest} uses"),
        what: what.into(),
    }
}

/// Adds a profile's uses of frames.
fn count(
    digest: &Digest,
    profile: &Profile,
    layers: &[Loaded],
    by_digest: &HashMap<Digest, usize>,
    uses: &mut HashMap<Place, Use>,
) -> Result<()> {
    // A frame is needed as often as the chunk of it that is read most often.
    let mut own: HashMap<Place, Use> = HashMap::new();
    for entry in &profile.entries {
        let layer = layer_of(profile, entry.layer, layers, by_digest)
            .ok_or_else(|| unfit(digest, "one of its layers is not what it says"))?;
        let extent = usize::try_from(entry.extent)
            .ok()
            .and_then(|i| layer.map.extents().get(i));
        let frame = layer.frame_of(entry.extent);
        let (Some(_), Some((place, stored))) = (extent.filter(|e| e.len == entry.len), frame)
        else {
            let what = format!(
                "extent {} of {} bytes is not in layer {}",
                entry.extent,
                entry.len,
                layer.manifest.reference()
            );
            return Err(unfit(digest, what));
        };
        let known = own.entry(place).or_insert(Use {
            uses: 0,
            cost: stored,
            rank: entry.rank,
        });
        known.uses = known.uses.max(entry.count.into());
    }
    for (place, used) in own {
        let sum = uses.entry(place).or_insert(Use { uses: 0, ..used });
        sum.uses += used.uses;
        sum.rank = sum.rank.min(used.rank);
    }
    Ok(())
}

fn layer_of<'a>(
    profile: &Profile,
    number: u32,
    layers: &'a [Loaded],
    by_digest: &HashMap<Digest, usize>,
) -> Option<&'a Loaded> {
    let named = profile.layers.get(usize::try_from(number).ok()?)?;
    let layer = layers.get(*by_digest.get(&named.manifest)?)?;
    (layer.manifest.layer_id() == named.layer).then_some(layer)
}

/// Bytes that a frame and each of its chunks take in a pack's table, and a chunk in an index.
const FRAME_RECORD: u64 = 56;
const CHUNK_RECORD: u64 = 40;
const INDEX_RECORD: u64 = 40;
/// The same of a pack, wherever it lies: its header and footer, its record in an index, and the
/// header of an index of its own.
const PACK_RECORDS: u64 = FRAMES_START + FOOTER_LEN + 48 + 48;
/// A pack in a locator.
const LOCATED_PACK: u64 = 40;
/// A reference or the store's marker, at most, and a seed's marker without its origin.
const SMALL: u64 = 256;

/// Bytes of everything that is not a frame nor describes one: at most.
fn besides_frames(source: &LayerStore, layers: &[Loaded], options: &SeedOptions) -> Result<u64> {
    // Packs end at their size or when a session does.
    let part = TARGET_PACK_LEN.min(options.transfer.session_bytes.max(1));
    let packs = (options.max_bytes / part)
        .saturating_mul(2)
        .saturating_add(2);
    let mut bytes = SMALL;
    bytes = bytes.saturating_add(packs.saturating_mul(PACK_RECORDS));
    for layer in layers {
        let marker = SMALL + source.url().len() as u64;
        let located = packs.saturating_mul(LOCATED_PACK);
        let own = layer.metadata_bytes + SMALL + marker;
        bytes = bytes.saturating_add(own).saturating_add(located);
        bytes += super::attached::size(source, &layer.digest, &layer.manifest)?;
    }
    Ok(bytes)
}

/// What each frame of a whole layer, or that a profile uses, takes in the target.
fn costs(
    source: &LayerStore,
    layers: &[Loaded],
    uses: &mut HashMap<Place, Use>,
) -> Result<HashMap<Place, u64>> {
    let mut costs: HashMap<Place, u64> = HashMap::new();
    let mut tables = Tables::default();
    for layer in layers {
        for (number, _) in (0_u32..).zip(layer.locator.frames()) {
            let Some((place, stored)) = layer.frame(number) else {
                continue;
            };
            if !layer.whole && !uses.contains_key(&place) {
                continue;
            }
            let chunks = tables.chunks(source, &layer.map, &layer.locator, number)?;
            let chunks = (chunks.needed.len() + chunks.others.len()) as u64;
            let cost = stored + FRAME_RECORD + chunks * (CHUNK_RECORD + INDEX_RECORD);
            let known = costs.entry(place).or_default();
            *known = cost.max(*known);
        }
    }
    for (place, used) in uses {
        if let Some(cost) = costs.get(place) {
            used.cost = *cost;
        }
    }
    Ok(costs)
}

/// The frames to seed: whole layers, then by use for bytes as long as they fit.
fn choose(
    layers: &[Loaded],
    uses: HashMap<Place, Use>,
    costs: &HashMap<Place, u64>,
    max_bytes: u64,
    report: &mut SeedReport,
) -> Result<HashSet<Place>> {
    let mut taken: BTreeMap<Place, u64> = BTreeMap::new();
    let mut stored: HashMap<Place, u64> = HashMap::new();
    for layer in layers {
        for (number, _) in (0_u32..).zip(layer.locator.frames()) {
            if let Some((place, bytes)) = layer.frame(number) {
                stored.insert(place, bytes);
                if layer.whole {
                    taken.insert(place, costs.get(&place).copied().unwrap_or(bytes));
                }
            }
        }
    }
    let mut bytes: u64 = report.metadata_bytes.saturating_add(taken.values().sum());
    if bytes > max_bytes {
        return Err(StoreError::InvalidInput {
            object: "a seed".to_owned(),
            what: format!(
                "metadata and whole layers need {bytes} bytes, the limit is {max_bytes}; allow more or name fewer"
            ),
        });
    }
    let mut wanted: Vec<(Place, Use)> = uses
        .into_iter()
        .filter(|(place, _)| !taken.contains_key(place))
        .collect();
    // a.uses / a.cost before b.uses / b.cost, most first, without division.
    wanted.sort_by(|(ap, a), (bp, b)| {
        let left = u128::from(b.uses) * u128::from(a.cost);
        let right = u128::from(a.uses) * u128::from(b.cost);
        left.cmp(&right).then((a.rank, ap).cmp(&(b.rank, bp)))
    });
    for (place, used) in wanted {
        if bytes.saturating_add(used.cost) <= max_bytes {
            bytes += used.cost;
            taken.insert(place, used.cost);
        }
    }
    report.frame_bytes = taken.keys().filter_map(|place| stored.get(place)).sum();
    Ok(taken.into_keys().collect())
}

fn cover(
    digest: &Digest,
    profile: &Profile,
    layers: &[Loaded],
    by_digest: &HashMap<Digest, usize>,
    selected: &HashSet<Place>,
) -> Environment {
    let names = profile.layers.iter().filter_map(|l| {
        let layer = layers.get(*by_digest.get(&l.manifest)?)?;
        Some(layer.manifest.reference())
    });
    let mut environment = Environment {
        name: profile.name.clone(),
        profile: *digest,
        layers: names.collect(),
        extents: 0,
        covered_extents: 0,
        bytes: 0,
        covered_bytes: 0,
        accesses: 0,
        covered_accesses: 0,
    };
    for entry in &profile.entries {
        let covered = layer_of(profile, entry.layer, layers, by_digest)
            .and_then(|layer| layer.frame_of(entry.extent))
            .is_some_and(|(place, _)| selected.contains(&place));
        let (bytes, count) = (u64::from(entry.len), u64::from(entry.count));
        environment.extents += 1;
        environment.bytes += bytes;
        environment.accesses += count;
        if covered {
            environment.covered_extents += 1;
            environment.covered_bytes += bytes;
            environment.covered_accesses += count;
        }
    }
    environment
}

/// Moves the selected frames, then publishes each layer with what is elsewhere.
fn move_parts(
    source: &LayerStore,
    target: &LayerStore,
    layers: &[Loaded],
    parts: &[HashSet<u32>],
    options: &TransferOptions,
    progress: &mut dyn FnMut(TransferStep<'_>),
) -> Result<TransferReport> {
    let is_new = !target.check_marker()?;
    let mut missing = Vec::new();
    for (layer, frames) in layers.iter().zip(parts) {
        // A conflict is told before anything moves.
        if has_layer(target, &layer.digest, &layer.manifest)? {
            missing.push((layer, frames, true));
        } else {
            missing.push((layer, frames, false));
        }
    }
    let mut session = Session {
        source,
        target,
        options,
        writer: None,
        waiting: Vec::new(),
        since: 0,
        report: TransferReport::default(),
    };
    let mut moved = Vec::new();
    for (layer, frames, present) in missing {
        let mut done = fresh(layer.digest, &layer.manifest);
        if present {
            done.outcome = PublishOutcome::Already;
        } else if let Err(error) = session.frames(
            &layer.map,
            &layer.locator,
            Some(frames),
            &mut done,
            progress,
        ) {
            session.give_up();
            return Err(error);
        }
        moved.push((layer, done, present));
    }
    let mut sealed = match session.writer.take() {
        Some(writer) => Some(writer.seal()?),
        None => None,
    };
    let mut report = std::mem::take(&mut session.report);
    for (layer, mut done, present) in moved {
        if let Some(sealed) = sealed.as_mut().filter(|_| !present) {
            let attached = super::attached::copy(source, target, &layer.digest, &layer.manifest)?;
            done.attached = attached.objects;
            report.written_bytes += attached.bytes;
            let all = layer.locator.frames().len() as u64;
            let key = Key::seed(&layer.manifest.map.digest);
            let whole = done.moved_frames + done.reused_frames == all;
            if !whole {
                // Before the locator that names what is not there.
                let here = done.moved_frames + done.reused_frames;
                report.written_bytes +=
                    target.put_seed_marker(&layer.manifest.map.digest, source.url(), all, here)?;
            }
            let meta = source.meta(&layer.manifest)?;
            let published =
                sealed.publish_part(&layer.manifest, &meta, &layer.map, Some(&layer.locator))?;
            done.outcome = published.outcome;
            report.warnings.extend(published.warnings);
            if whole {
                target.blobs().delete(&key)?;
            }
        }
        report.layers.push(done);
    }
    report.written_bytes += sealed.map_or(0, |s| s.stats().new_bytes);
    if is_new {
        // A seed is as small as was asked for; its first collection keeps room again.
        target.blobs().reserve(false)?;
    }
    Ok(report)
}
