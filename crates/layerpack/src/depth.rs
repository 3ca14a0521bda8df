//! Stacks of bounded height, whatever the history of what is mounted.
//!
//! Every snapshot of a restored snapshot is one layer more. Of a long row of diffs, eight at a time
//! from the lowest on are mounted as one layer that is their merge: metadata over the same data,
//! made once, kept in the store under a name of its own, and found there by the next one who mounts
//! the same. Eight such layers are merged in the same way. The stack that a sandbox and its
//! snapshots record stays the one that was asked for.
//!
//! Overlayfs takes 500 layers. Of a stack that is higher, all layers but the lowest are merged in rows
//! like diffs.

use anyhow::Context as _;
use layerpack_packer::{MergeOptions, Silent, merge};
use layerpack_store::{Digest, Kind, LayerName, LayerStore, Reference, Version};

use crate::stack::StackLayer;

/// Diffs in a row that are mounted one by one, and how many become one.
const ROW: usize = 8;
/// Layers that are mounted one by one at most. Overlayfs takes 500, one of which may be that of the
/// directories that the others imply.
const MOST: usize = 490;
/// Name of merged layers; the version is the digest of what was merged.
pub(crate) const NAME: &str = "layerpack-merged";

/// The layers to mount so that `stack` is seen: the same, or with merged ones in place of rows of
/// diffs. What need not be merged and cannot be, in a store that takes no layers for instance, is
/// mounted as it is.
///
/// # Errors
/// When there are more layers than can be mounted, and they cannot be merged.
pub(crate) fn bounded(store: &LayerStore, stack: &[StackLayer]) -> anyhow::Result<Vec<StackLayer>> {
    bounded_to(store, stack, MOST)
}

fn bounded_to(
    store: &LayerStore,
    stack: &[StackLayer],
    most: usize,
) -> anyhow::Result<Vec<StackLayer>> {
    let stack = without_rows(store, stack);
    let Some((lowest, others)) = stack.split_first().filter(|_| stack.len() > most) else {
        return Ok(stack);
    };
    let others = rows(store, others, 0).with_context(|| {
        format!(
            "a stack of {} layers is too high to be mounted as it is, and it cannot be merged",
            stack.len()
        )
    })?;
    Ok(std::iter::once(lowest.clone()).chain(others).collect())
}

/// The stack without rows of diffs on top.
fn without_rows(store: &LayerStore, stack: &[StackLayer]) -> Vec<StackLayer> {
    let begin = stack
        .iter()
        .rposition(|layer| layer.manifest.kind != Kind::Diff)
        .map_or(0, |last| last + 1);
    let (below, diffs) = stack.split_at(begin);
    match rows(store, diffs, 0) {
        Ok(diffs) => below.iter().cloned().chain(diffs).collect(),
        Err(error) => {
            tracing::warn!(error = %format!("{error:#}"), "a long row of diffs is mounted as it is");
            stack.to_vec()
        }
    }
}

/// Diffs that are mounted one by one or as other layers while they end a stack, and what is mounted in
/// their place once one more lies on them; each from the lowest on. The latter are made if they are not
/// there. `None`: all stays as it is, or that cannot be done.
pub(crate) fn moved(
    store: &LayerStore,
    stack: &[StackLayer],
) -> Option<(Vec<StackLayer>, Vec<StackLayer>)> {
    let begin = stack
        .iter()
        .rposition(|layer| layer.manifest.kind != Kind::Diff)
        .map_or(0, |last| last + 1);
    let diffs = stack.get(begin..).unwrap_or_default();
    if diffs.is_empty() || diffs.len() % ROW != 0 {
        return None;
    }
    let both = rows(store, diffs, 0).and_then(|now| Ok((now, rows(store, diffs, 1)?)));
    match both {
        Ok((now, then)) => {
            let pairs = now.iter().zip(&then);
            let same = pairs.take_while(|(a, b)| a.digest == b.digest).count();
            let rest = |all: &[StackLayer]| all.get(same..).unwrap_or_default().to_vec();
            Some((rest(&now), rest(&then)))
        }
        Err(error) => {
            tracing::warn!(error = %format!("{error:#}"), "a long row of diffs cannot be merged");
            None
        }
    }
}

/// `above`: whether one more diff, 1, or none, 0, will lie on these.
fn rows(
    store: &LayerStore,
    diffs: &[StackLayer],
    mut above: usize,
) -> anyhow::Result<Vec<StackLayer>> {
    let mut level: Vec<StackLayer> = diffs.to_vec();
    // What stays of each level, the lowest level last.
    let mut tops: Vec<Vec<StackLayer>> = Vec::new();
    while level.len() + above > ROW {
        let whole = (level.len() + above - 1) / ROW * ROW;
        let rest = level.split_off(whole.min(level.len()));
        above = 0; // it is among the rest
        tops.push(rest);
        level = level
            .chunks(ROW)
            .map(|row| merged(store, row))
            .collect::<anyhow::Result<_>>()?;
    }
    while let Some(top) = tops.pop() {
        level.extend(top);
    }
    Ok(level)
}

/// The merge of a row, made if it is not there.
fn merged(store: &LayerStore, row: &[StackLayer]) -> anyhow::Result<StackLayer> {
    let list: Vec<String> = row.iter().map(|layer| layer.digest.to_string()).collect();
    let list = list.join(",");
    let digest = Digest::of(list.as_bytes()).to_string();
    let version: String = digest
        .chars()
        .filter(char::is_ascii_hexdigit)
        .take(40)
        .collect();
    let reference = Reference::new(Kind::Diff, LayerName::new(NAME)?, Version::new(&version)?);
    let found = |digest, manifest| StackLayer {
        name: reference.to_string(),
        digest,
        manifest,
    };
    if store.has_reference(&reference)? {
        let (digest, manifest) = store.load(&reference)?;
        // A name says nothing: somebody else may have published something under it.
        if manifest.parameters.get("merged") == Some(&list) {
            return Ok(found(digest, manifest));
        }
        anyhow::bail!("{reference} is not the merge that its name stands for: remove it");
    }
    let mut layers = Vec::with_capacity(row.len());
    for layer in row {
        let named: Reference = layer.name.parse()?;
        // Merged are those that are mounted, not what their names stand for by now.
        anyhow::ensure!(
            store.resolve(&named)? == layer.digest,
            "{named} is another layer by now"
        );
        layers.push(named);
    }
    merge(
        store,
        &MergeOptions::new(reference.clone(), layers),
        &Silent,
    )?;
    let (digest, manifest) = store.load(&reference)?;
    Ok(found(digest, manifest))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use layerpack_packer::{PackDiffOptions, pack_diff};
    use layerpack_store::MemStore;

    use super::*;

    fn chain(store: &LayerStore, length: u32) -> Vec<StackLayer> {
        let dir = tempfile::tempdir().unwrap();
        (0..length)
            .map(|n| {
                let upper = dir.path().join(n.to_string());
                fs_err::create_dir(&upper).unwrap();
                fs_err::write(upper.join(format!("f{n}")), n.to_string()).unwrap();
                let reference: Reference = format!("diff/d:{n}").parse().unwrap();
                let options = PackDiffOptions::new(reference.clone(), upper);
                pack_diff(store, &options, &Silent).unwrap();
                let (digest, manifest) = store.load(&reference).unwrap();
                StackLayer {
                    name: reference.to_string(),
                    digest,
                    manifest,
                }
            })
            .collect()
    }

    /// Entries that a stack shows.
    fn names(store: &LayerStore, stack: &[StackLayer]) -> usize {
        let layers: Vec<_> = stack
            .iter()
            .map(|l| (l.digest, l.manifest.clone()))
            .collect();
        match layers.is_empty() {
            true => 0,
            false => layerpack_packer::View::open(store, &layers)
                .unwrap()
                .entries()
                .count(),
        }
    }

    #[test]
    fn more_layers_than_can_be_mounted_become_fewer() {
        let store = LayerStore::new(Arc::new(MemStore::new()));
        let mut all = chain(&store, 40);
        // No row of diffs on top: each layer counts.
        let toolkit: Reference = "toolkit/t:1".parse().unwrap();
        let of = vec!["diff/d:0".parse().unwrap(), "diff/d:1".parse().unwrap()];
        merge(&store, &MergeOptions::new(toolkit.clone(), of), &Silent).unwrap();
        let (digest, manifest) = store.load(&toolkit).unwrap();
        all.push(StackLayer {
            name: toolkit.to_string(),
            digest,
            manifest,
        });
        assert_eq!(bounded_to(&store, &all, 41).unwrap().len(), 41);
        let stack = bounded_to(&store, &all, 40).unwrap();
        assert_eq!(stack.len(), 13);
        assert_eq!(stack[0].digest, all[0].digest);
        assert_eq!(names(&store, &stack), names(&store, &all));
    }

    #[test]
    fn rows_become_layers_and_are_found_again() {
        let store = LayerStore::new(Arc::new(MemStore::new()));
        let all = chain(&store, 75);
        for (length, height) in [(0, 0), (1, 1), (8, 8), (9, 2), (16, 9), (17, 3), (75, 5)] {
            let stack = bounded(&store, &all[..length]).unwrap();
            assert_eq!(stack.len(), height, "{length}");
            assert_eq!(names(&store, &stack), names(&store, &all[..length]));
        }
        // Nothing new the second time.
        let before = store.entries().unwrap().len();
        bounded(&store, &all).unwrap();
        assert_eq!(store.entries().unwrap().len(), before);
        // What one more diff moves is known before it is there.
        let digests = |stack: &[StackLayer]| stack.iter().map(|l| l.digest).collect::<Vec<_>>();
        for length in [1, 8, 9, 16, 64, 72, 74] {
            let now = digests(&bounded(&store, &all[..length]).unwrap());
            let mut next = digests(&bounded(&store, &all[..=length]).unwrap());
            next.pop();
            let Some((before, after)) = moved(&store, &all[..length]) else {
                assert_eq!(now, next, "{length}");
                continue;
            };
            let stay = now.len() - before.len();
            assert_eq!(now[stay..], digests(&before), "{length}");
            assert_eq!(next[stay..], digests(&after), "{length}");
            assert_eq!(now[..stay], next[..stay], "{length}");
        }
        // A name that stands for something else is not believed.
        let merged = bounded(&store, &all[..9]).unwrap()[0].name.parse().unwrap();
        store.remove(&merged).unwrap();
        let dir = tempfile::tempdir().unwrap();
        pack_diff(
            &store,
            &PackDiffOptions::new(merged, dir.path().to_owned()),
            &Silent,
        )
        .unwrap();
        assert_eq!(bounded(&store, &all[..9]).unwrap().len(), 9);
    }
}
