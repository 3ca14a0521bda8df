//! One tree as several layers: base, workspace and toolkit by path rules.
//!
//! The source is read once, as for a single base, through one writer. The tree is then taken apart
//! (`divide`) and each part is laid out and stored as a layer of its own; when all are, they are
//! published together, the base first.

mod divide;
mod rules;

use std::collections::BTreeMap;

use layerpack_store::{Kind, StoreError, WriteStats, publish_all};

pub use divide::LeftOver;
pub use rules::Split;

use crate::build::Filled;
use crate::cpu::Clock;
use crate::error::{PackError, Result};
use crate::git::Known;
use crate::layout;
use crate::options::{BuildReport, Progress};

/// What became of a tree that was split.
#[derive(Debug)]
pub struct SplitReport {
    /// A report for each part, the base first. What the source's contents cost is in the first:
    /// they are stored once, whatever part they belong to.
    pub parts: Vec<BuildReport>,
    /// What no rule named.
    pub left_over: LeftOver,
}

/// What all parts' manifests say, and how they are written.
pub(crate) struct Said<'a> {
    /// Platform, as in `linux/amd64`.
    pub platform: &'a str,
    /// Labels.
    pub labels: &'a BTreeMap<String, String>,
    /// Annotations.
    pub annotations: &'a BTreeMap<String, String>,
    /// zstd level.
    pub level: i32,
    /// Since when processor time counts.
    pub clock: &'a Clock,
}

/// Publishes the parts of `layer`, which is settled and lies at the bottom.
pub(crate) fn publish(
    split: &Split,
    filled: Filled,
    said: &Said<'_>,
    progress: &dyn Progress,
) -> Result<SplitReport> {
    progress.phase("publish");
    let Filled {
        layer,
        mut writer,
        mut warnings,
        mut git,
    } = filled;
    let divided = divide::divide(split, &layer, &mut warnings);
    drop(layer);
    let made = divided.and_then(|(layers, left_over)| {
        // All are laid out before any is published.
        let mut finished = Vec::with_capacity(layers.len());
        for (mut layer, reference) in layers.into_iter().zip(split.references()) {
            let indexes = match &mut git {
                Some(git) => git.refresh(&mut layer, &mut writer, &Known::default())?,
                None => Vec::new(),
            };
            finished.push((
                layout::finish(layer, reference.clone(), said.level)?,
                indexes,
            ));
        }
        Ok((finished, left_over))
    });
    let (finished, left_over) = match made {
        Ok(made) => made,
        Err(error) => return Err(warnings.tell(error, progress)),
    };
    let mut warnings = warnings.into_vec();
    let tell = |warnings: &[String], error: StoreError| {
        warnings.iter().for_each(|line| progress.warning(line));
        Err(error.into())
    };
    let mut sealed = match writer.seal() {
        Ok(sealed) => sealed,
        Err(error) => return tell(&warnings, error),
    };
    // What the contents cost is said of the first part.
    let mut earlier = WriteStats::default();
    let mut staged = Vec::with_capacity(finished.len());
    let mut rest = Vec::with_capacity(finished.len());
    for (mut part, indexes) in finished {
        part.draft.platform = said.platform.to_owned();
        part.draft.labels.clone_from(said.labels);
        part.draft.annotations.clone_from(said.annotations);
        match sealed.stage(part.draft) {
            Ok(one) => {
                let until = one.stats();
                staged.push(one.counted_from(earlier));
                earlier = until;
            }
            Err(error) => return tell(&warnings, error),
        }
        rest.push((part.counts, part.meta_bytes, said.clock.seconds(), indexes));
    }
    let published = match publish_all(staged) {
        Ok(published) => published,
        Err(error) => return tell(&warnings, error),
    };
    let parts = published.into_iter().zip(rest);
    let parts = parts.map(|(published, (counts, meta_bytes, cpu_seconds, git))| {
        let mut own = std::mem::take(&mut warnings);
        own.extend(published.warnings.iter().cloned());
        BuildReport {
            published,
            counts,
            meta_bytes,
            warnings: own,
            cpu_seconds,
            git,
        }
    });
    Ok(SplitReport {
        parts: parts.collect(),
        left_over,
    })
}

/// Refuses options that do not go with a split.
pub(crate) fn check(kind: Kind) -> Result<()> {
    if kind == Kind::Base {
        return Ok(());
    }
    Err(PackError::InvalidOption {
        option: format!("kind {kind}"),
        why: "a tree is split into a base and what lies on it; the kinds are in the split file"
            .to_owned(),
    })
}
