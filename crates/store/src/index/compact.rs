//! Many small segments become few. The order is what makes it safe beside readers and crashes: new
//! segments are durable before one of the old is deleted, so at any moment every chunk is named by
//! a segment. Readers that listed before find segments gone and look again. Damaged segments are
//! left alone: that is for `repair`.

use std::collections::{HashMap, HashSet};

use super::stream::{SegmentStream, segments};
use crate::blob::PutMode;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::index::{IndexEntry, IndexPack, IndexSegment};
use crate::key::Key;
use crate::layer::LayerStore;
use crate::parallel::{Bounds, Order, for_each};

/// Reading segments: requests at once, and bytes in memory.
const READ: Bounds = Bounds {
    threads: 8,
    bytes: 32 << 20,
};

/// What is compacted.
#[derive(Debug, Clone)]
pub struct CompactOptions {
    /// Segments below this many bytes are merged.
    pub small_bytes: u64,
    /// About the size in bytes of merged segments, up to 64 MiB. Four times this is needed in
    /// memory.
    pub target_bytes: u64,
    /// Fewer small segments than this are left as they are.
    pub min_segments: usize,
    /// Packs that the index is to name no more, whatever the size of the segments that do: they are
    /// about to be deleted, or gone.
    pub drop_packs: HashSet<Digest>,
    /// Only report what would be done.
    pub dry_run: bool,
}

impl CompactOptions {
    /// Merges what is below 4 MiB into segments of 16 MiB once there are 16.
    #[must_use]
    pub fn recommended() -> Self {
        Self {
            small_bytes: 4 << 20,
            target_bytes: 16 << 20,
            min_segments: 16,
            drop_packs: HashSet::new(),
            dry_run: false,
        }
    }
}

/// What compaction did. Sizes in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CompactReport {
    /// Segments in the store before.
    pub segments_before: u64,
    /// Segments that were replaced.
    pub replaced: u64,
    /// Segments that were written for them.
    pub written: u64,
    /// Bytes of segments written.
    pub written_bytes: u64,
    /// Bytes of segments deleted.
    pub deleted_bytes: u64,
    /// Chunks dropped with their packs.
    pub dropped_chunks: u64,
    /// Damaged segments that were left alone, one line each.
    pub warnings: Vec<String>,
}

/// Merges small segments, and removes packs from the index. Safe beside readers, writers, crashes
/// and other compactions.
///
/// # Errors
/// If the backend fails. Nothing is lost then: run again.
pub fn compact_index(store: &LayerStore, options: &CompactOptions) -> Result<CompactReport> {
    let listed = segments(store)?;
    let mut report = CompactReport {
        segments_before: listed.len() as u64,
        ..CompactReport::default()
    };
    let affected = affected(store, &listed, &options.drop_packs, &mut report)?;
    let small = listed
        .iter()
        .filter(|(_, _, size)| *size < options.small_bytes);
    let merge = small.count() >= options.min_segments.max(2);
    let target = options.target_bytes.clamp(64 << 10, 64 << 20);
    let mut group: Vec<(Key, u64)> = Vec::new();
    let mut bytes = 0;
    for (key, digest, size) in &listed {
        let drops = affected.contains(key);
        if digest.is_none() || !(drops || (merge && *size < options.small_bytes)) {
            continue;
        }
        if *size > target {
            rewrite_large(store, options, (key, *size), target, &mut report)?;
            continue;
        }
        if bytes + size > target {
            replace(
                store,
                options,
                &std::mem::take(&mut group),
                &affected,
                &mut report,
            )?;
            bytes = 0;
        }
        group.push((key.clone(), *size));
        bytes += size;
    }
    replace(store, options, &group, &affected, &mut report)?;
    Ok(report)
}

/// Keys of segments that name a pack to be dropped.
fn affected(
    store: &LayerStore,
    listed: &[(Key, Option<Digest>, u64)],
    drop_packs: &HashSet<Digest>,
    report: &mut CompactReport,
) -> Result<HashSet<Key>> {
    let mut affected = HashSet::new();
    if drop_packs.is_empty() {
        return Ok(affected);
    }
    for_each(
        listed,
        READ,
        Order::Kept,
        |_| 64 << 10,
        |(key, _, _)| {
            let stream = SegmentStream::open(store, key)?;
            let names = |p: &IndexPack| drop_packs.contains(&p.id);
            Ok(stream.is_some_and(|s| s.packs().iter().any(names)))
        },
        |number, result| {
            match result {
                Ok(true) => affected.extend(listed.get(number).map(|(key, _, _)| key.clone())),
                Ok(false) => {}
                Err(error) => left_alone(error, report)?,
            }
            Ok::<(), StoreError>(())
        },
    )?;
    Ok(affected)
}

fn left_alone(error: StoreError, report: &mut CompactReport) -> Result<()> {
    match error {
        StoreError::Missing { .. } => Ok(()), // deleted meanwhile
        error if error.is_damage() => {
            tracing::warn!("left alone: {error}");
            let line = format!("left alone: {error}");
            if !report.warnings.contains(&line) {
                report.warnings.push(line);
            }
            Ok(())
        }
        error => Err(error),
    }
}

/// Chunks gathered for new segments.
#[derive(Default)]
struct Gathered {
    packs: Vec<IndexPack>,
    numbers: HashMap<IndexPack, u32>,
    entries: Vec<IndexEntry>,
}

impl Gathered {
    /// Adds chunks whose packs are those of `named`; says how many were dropped.
    fn add(
        &mut self,
        named: &[IndexPack],
        entries: impl Iterator<Item = IndexEntry>,
        drop_packs: &HashSet<Digest>,
    ) -> u64 {
        let mapped: Vec<Option<u32>> = named
            .iter()
            .map(|pack| {
                if drop_packs.contains(&pack.id) {
                    return None;
                }
                let next = u32::try_from(self.packs.len()).unwrap_or(u32::MAX); // 64 MiB of segments
                let number = *self.numbers.entry(*pack).or_insert(next);
                if number == next {
                    self.packs.push(*pack);
                }
                Some(number)
            })
            .collect();
        let mut dropped = 0;
        for entry in entries {
            match usize::try_from(entry.pack).ok().and_then(|p| mapped.get(p)) {
                Some(Some(pack)) => self.entries.push(IndexEntry {
                    pack: *pack,
                    ..entry
                }),
                _ => dropped += 1,
            }
        }
        dropped
    }

    /// The segments: a digest stands once in each, so further places go to further segments. Only
    /// the packs that a segment's chunks are in are named by it, except by the first, which names
    /// those without chunks too.
    fn segments(self) -> Result<Vec<IndexSegment>> {
        let Self {
            packs, mut entries, ..
        } = self;
        entries.sort_unstable_by_key(|e| (e.digest, e.pack, e.chunk));
        entries.dedup();
        let mut segments = Vec::new();
        let mut rest = entries;
        while !rest.is_empty() || (segments.is_empty() && !packs.is_empty()) {
            let mut last = None;
            let (first, again): (Vec<_>, Vec<_>) = rest
                .into_iter()
                .partition(|e| last.replace(e.digest) != Some(e.digest));
            rest = again;
            if segments.is_empty() {
                segments.push(IndexSegment::new(packs.clone(), first)?);
            } else {
                segments.push(only_used(&packs, first)?);
            }
        }
        Ok(segments)
    }
}

/// A segment of these chunks and the packs they are in.
fn only_used(packs: &[IndexPack], entries: Vec<IndexEntry>) -> Result<IndexSegment> {
    let mut used: Vec<u32> = entries.iter().map(|e| e.pack).collect();
    used.sort_unstable();
    used.dedup();
    let kept: Vec<IndexPack> = used
        .iter()
        .filter_map(|p| packs.get(usize::try_from(*p).ok()?).copied())
        .collect();
    let entries = entries
        .into_iter()
        .filter_map(|e| {
            let pack = u32::try_from(used.binary_search(&e.pack).ok()?).ok()?;
            Some(IndexEntry { pack, ..e })
        })
        .collect();
    Ok(IndexSegment::new(kept, entries)?)
}

/// Replaces a group of segments that fit into memory.
fn replace(
    store: &LayerStore,
    options: &CompactOptions,
    group: &[(Key, u64)],
    affected: &HashSet<Key>,
    report: &mut CompactReport,
) -> Result<()> {
    if group.len() < 2 && !group.iter().any(|(key, _)| affected.contains(key)) {
        return Ok(());
    }
    let mut gathered = Gathered::default();
    let mut old: Vec<(Key, u64)> = Vec::new();
    let mut dropped = 0;
    for_each(
        group,
        READ,
        Order::Kept,
        |(_, size)| size.saturating_mul(2),
        |(key, _)| store.index_segment(key),
        |number, result| {
            match result {
                Ok(Some(segment)) => {
                    let entries = segment.entries().iter().copied();
                    dropped += gathered.add(segment.packs(), entries, &options.drop_packs);
                    old.extend(group.get(number).cloned());
                }
                Ok(None) => {} // deleted meanwhile
                Err(error) => left_alone(error, report)?,
            }
            Ok::<(), StoreError>(())
        },
    )?;
    if old.len() < 2 && !old.iter().any(|(key, _)| affected.contains(key)) {
        return Ok(());
    }
    report.dropped_chunks += dropped;
    let mut new = HashSet::new();
    for segment in gathered.segments()? {
        new.insert(put(store, options, &segment, report)?);
    }
    delete(store, options, &old, &new, report)
}

/// Replaces a segment that is larger than what is held in memory by several.
fn rewrite_large(
    store: &LayerStore,
    options: &CompactOptions,
    (key, size): (&Key, u64),
    target: u64,
    report: &mut CompactReport,
) -> Result<()> {
    let result = (|| {
        let Some(stream) = SegmentStream::open(store, key)? else {
            return Ok(());
        };
        stream.check()?; // before something is written on its word
        let Some(mut stream) = SegmentStream::open(store, key)? else {
            return Ok(());
        };
        let packs = stream.packs().to_vec();
        let mut new = HashSet::new();
        let mut gathered = Gathered::default();
        let mut flush = |gathered: Gathered, report: &mut CompactReport| -> Result<()> {
            if !gathered.entries.is_empty() {
                let segment = only_used(&gathered.packs, gathered.entries)?;
                new.insert(put(store, options, &segment, report)?);
            }
            Ok(())
        };
        while let Some(chunks) = stream.next()? {
            let entries = chunks.iter().map(|c| c.entry());
            report.dropped_chunks += gathered.add(&packs, entries, &options.drop_packs);
            if gathered.entries.len() as u64 * 40 >= target {
                flush(std::mem::take(&mut gathered), report)?;
            }
        }
        flush(gathered, report)?;
        delete(store, options, &[(key.clone(), size)], &new, report)
    })();
    match result {
        Ok(()) => Ok(()),
        Err(error) => left_alone(error, report),
    }
}

/// Writes a segment, durable on return. Its key.
fn put(
    store: &LayerStore,
    options: &CompactOptions,
    segment: &IndexSegment,
    report: &mut CompactReport,
) -> Result<Key> {
    let bytes = segment.to_bytes()?;
    let key = Key::index(&Digest::of(&bytes));
    report.written += 1;
    report.written_bytes += bytes.len() as u64;
    if !options.dry_run {
        store.blobs().put(&key, &bytes, PutMode::Overwrite)?;
    }
    Ok(key)
}

/// Deletes segments whose chunks are in `new`.
fn delete(
    store: &LayerStore,
    options: &CompactOptions,
    old: &[(Key, u64)],
    new: &HashSet<Key>,
    report: &mut CompactReport,
) -> Result<()> {
    for (key, size) in old.iter().filter(|(key, _)| !new.contains(key)) {
        if !options.dry_run {
            store.blobs().delete(key)?;
        }
        report.replaced += 1;
        report.deleted_bytes += size;
    }
    Ok(())
}
