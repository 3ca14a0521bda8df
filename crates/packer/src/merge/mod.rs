//! Collapses consecutive layers into one over the same chunks.
//!
//! Only metadata and maps are read. The merged layer's map names the chunks of the layers that it
//! was made from, and its locator the frames that they lie in, so no content is read, compressed
//! or written, unless [`MergeOptions::reframe`] asks for frames of its own, and but for indexes of git. A
//! merge is laid out like any other layer: merging gives the same layer as building one from the merged
//! tree.

mod load;
pub(crate) mod overlay;

use std::collections::HashSet;

use layerpack_store::{Digest, Kind, LayerStore, Manifest, ParentRef, Reference, WriterOptions};

pub(crate) use load::load;

use crate::error::{PackError, Result};
use crate::git::{Git, Known};
use crate::image::CONFIG;
use crate::layout;
use crate::model::Layer;
use crate::options::{BuildReport, Progress};
use crate::scrub::{Rules, ScrubReport};
use crate::squash;
use crate::warnings::Warnings;

/// Longest text of a manifest's parameter in bytes.
const MAX_PARAMETER: usize = 64 << 10;

/// Which layers to merge, into what.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MergeOptions {
    /// What the merged layer is published as. A base applies whiteouts and opaque marks; every
    /// other kind keeps them, for the layers that will lie below.
    pub reference: Reference,
    /// The layers to merge, bottom first.
    pub layers: Vec<Reference>,
    /// Labels of the manifest.
    pub labels: std::collections::BTreeMap<String, String>,
    /// Annotations of the manifest. Of those of the merged layers only the topmost `oci.config` is
    /// taken over.
    pub annotations: std::collections::BTreeMap<String, String>,
    /// zstd level of what is written: metadata and map.
    pub level: i32,
    /// Writes chunks anew that share a frame of the store with what is not in the merged layer, so
    /// that it takes nothing else along to another store.
    pub reframe: bool,
    /// Whether git's indexes are given what the merged layer shows, for those entries that remember what
    /// the merged ones show: no other contents are read for it.
    pub git_index: bool,
}

impl MergeOptions {
    /// Options with everything at its default.
    #[must_use]
    pub fn new(reference: Reference, layers: Vec<Reference>) -> Self {
        Self {
            reference,
            layers,
            labels: std::collections::BTreeMap::new(),
            annotations: std::collections::BTreeMap::new(),
            level: 3,
            reframe: false,
            git_index: true,
        }
    }
}

/// Merges layers and publishes the result.
///
/// # Errors
/// [`PackError::InvalidOption`] if the layers cannot be merged into that kind; [`PackError::Store`]
/// if one cannot be read. Nothing is published then.
pub fn merge(
    store: &LayerStore,
    options: &MergeOptions,
    progress: &dyn Progress,
) -> Result<BuildReport> {
    merged_with(store, options, &[], None, progress).map(|(report, _)| report)
}

/// What [`merge_with_rules`] did.
#[derive(Debug)]
pub struct MergeWithRulesReport {
    /// As of a merge without rules.
    pub merged: BuildReport,
    /// What rules did.
    pub scrub: ScrubReport,
}

/// Merges layers without what rules leave out, and publishes the result: rules hold for all of it, as
/// for what [`crate::snapshot`] takes in. Commits that rules about git name are looked for in the
/// layers and in `below`, on which they lie, bottom first.
///
/// # Errors
/// As [`merge`]; [`PackError::Forbidden`] if a rule forbids something. Nothing is published then.
pub fn merge_with_rules(
    store: &LayerStore,
    options: &MergeOptions,
    below: &[(Digest, Manifest)],
    rules: &Rules,
    progress: &dyn Progress,
) -> Result<MergeWithRulesReport> {
    let (merged, scrub) = merged_with(store, options, below, Some(rules), progress)?;
    Ok(MergeWithRulesReport { merged, scrub })
}

fn merged_with(
    store: &LayerStore,
    options: &MergeOptions,
    below: &[(Digest, Manifest)],
    rules: Option<&Rules>,
    progress: &dyn Progress,
) -> Result<(BuildReport, ScrubReport)> {
    let clock = crate::cpu::Clock::start();
    progress.phase("read");
    let mut manifests: Vec<(Digest, Manifest)> = Vec::with_capacity(options.layers.len());
    for reference in &options.layers {
        manifests.push(store.load(reference)?);
    }
    check(options, &manifests)?;
    let bottom = options.reference.kind == Kind::Base;
    let mut warnings = Warnings::default();
    let mut hidden = HashSet::new();
    let mut layer = stack_seen(store, &manifests, bottom, &mut warnings, &mut |diff| {
        if rules.is_some() {
            squash::hides(diff, &mut hidden);
        }
    })?;
    let writer = || {
        store.writer(WriterOptions {
            level: options.level,
            jobs: 1,
            ..WriterOptions::default()
        })
    };
    let mut early = None;
    let mut scrubbed = ScrubReport::default();
    if let Some(rules) = rules {
        let writer = early.insert(writer()?);
        let judged = squash::judged(store, &manifests, below, rules, &mut layer, &hidden, writer);
        scrubbed = match judged {
            Ok(report) => report,
            Err(error) => return Err(warnings.tell(error, progress)),
        };
    }
    if bottom {
        overlay::bottom(&mut layer)?;
    }

    progress.phase("publish");
    let mut indexes = Vec::new();
    if options.git_index {
        let mut git = Git::default();
        let taken = git.take_up(store, &manifests, &mut layer, &|_| false, &mut warnings)?;
        if git.holds() {
            let writer = match &mut early {
                Some(writer) => writer,
                None => early.insert(writer()?),
            };
            let known = Known {
                taken,
                ..Known::default()
            };
            indexes = git.refresh(&mut layer, writer, &known)?;
        }
    }
    let mut finished = layout::finish(layer, options.reference.clone(), options.level)?;
    let draft = &mut finished.draft;
    draft.platform = platform(&manifests, &mut warnings);
    draft.parents = parents(&manifests);
    draft.labels.clone_from(&options.labels);
    draft.annotations.clone_from(&options.annotations);
    let mut configs = manifests
        .iter()
        .rev()
        .filter_map(|(_, m)| m.annotations.get(CONFIG));
    if let Some(config) = configs.next() {
        let slot = draft.annotations.entry(CONFIG.to_owned());
        slot.or_insert_with(|| config.clone());
    }
    draft
        .parameters
        .insert("merged".to_owned(), merged(&manifests));
    if let Some(rules) = rules {
        let digest = rules.digest().to_string();
        draft.parameters.insert("scrub-rules".to_owned(), digest);
    }
    let mut writer = match early {
        Some(writer) => writer,
        None => writer()?,
    };
    if options.reframe || rules.is_some() {
        writer.reframe(&finished.draft.map.load()?)?;
    }
    let made = writer
        .finish(finished.draft)
        .map(|published| (published, finished.counts, finished.meta_bytes))
        .map_err(PackError::from);
    let ((published, counts, meta_bytes), warnings) = warnings.close(made, progress)?;
    let report = BuildReport {
        published,
        counts,
        meta_bytes,
        warnings,
        cpu_seconds: clock.seconds(),
        git: indexes,
    };
    Ok((report, scrubbed))
}

/// The layers' merge, whiteouts and marks kept. `bottom`: nothing will lie below it.
pub(crate) fn stack(
    store: &LayerStore,
    manifests: &[(Digest, Manifest)],
    bottom: bool,
    warnings: &mut Warnings,
) -> Result<Layer> {
    stack_seen(store, manifests, bottom, warnings, &mut |_| {})
}

/// The same; `seen` gets each layer before it is merged.
pub(crate) fn stack_seen(
    store: &LayerStore,
    manifests: &[(Digest, Manifest)],
    bottom: bool,
    warnings: &mut Warnings,
    seen: &mut dyn FnMut(&Layer),
) -> Result<Layer> {
    let mut merged: Option<Layer> = None;
    let mut before: Option<&(Digest, Manifest)> = None;
    for item in manifests {
        let (_, manifest) = item;
        if let (Some((digest, below)), Some(parent)) = (before, manifest.parents.last())
            && &parent.manifest != digest
        {
            warnings.add(format!(
                "{} was made on top of {}, not of {}",
                manifest.reference(),
                name_of(parent),
                below.reference(),
            ));
        }
        before = Some(item);
        let layer = load(store, manifest, bottom)?;
        seen(&layer);
        match &mut merged {
            None => merged = Some(layer),
            Some(lower) => overlay::apply(lower, &layer)?,
        }
    }
    merged.ok_or_else(|| invalid("layers", "there is none"))
}

fn name_of(parent: &ParentRef) -> String {
    match &parent.reference {
        Some(reference) => reference.to_string(),
        None => parent.manifest.to_string(),
    }
}

fn check(options: &MergeOptions, manifests: &[(Digest, Manifest)]) -> Result<()> {
    let Some((_, first)) = manifests.first() else {
        return Err(invalid(
            "layers",
            "there is nothing to merge; name at least one layer",
        ));
    };
    for (_, manifest) in manifests.iter().skip(1) {
        if manifest.kind == Kind::Base {
            let why = "a base lies at the bottom; name the layers from the bottom up";
            return Err(invalid(&manifest.reference().to_string(), why));
        }
    }
    let kind = options.reference.kind;
    if (kind == Kind::Base) != (first.kind == Kind::Base) {
        let why = format!(
            "the bottom layer {} is of kind {}: only a base makes a base, and it makes nothing else",
            first.reference(),
            first.kind
        );
        return Err(invalid(&format!("kind {kind}"), why));
    }
    Ok(())
}

fn invalid(option: &str, why: impl Into<String>) -> PackError {
    PackError::InvalidOption {
        option: option.to_owned(),
        why: why.into(),
    }
}

/// The platform that the layers were made for.
fn platform(manifests: &[(Digest, Manifest)], warnings: &mut Warnings) -> String {
    let mut platform = String::new();
    for (_, manifest) in manifests {
        if platform.is_empty() {
            platform.clone_from(&manifest.platform);
        } else if !manifest.platform.is_empty() && manifest.platform != platform {
            warnings.add(format!(
                "{} is made for {}, layers below it for {platform}",
                manifest.reference(),
                manifest.platform
            ));
        }
    }
    platform
}

/// What the merged layer still lies on: what its lowest layer does.
fn parents(manifests: &[(Digest, Manifest)]) -> Vec<ParentRef> {
    manifests
        .first()
        .map(|(_, manifest)| manifest.parents.clone())
        .unwrap_or_default()
}

/// The manifests that were merged, bottom first; for more than a parameter holds, the digest of
/// that list.
fn merged(manifests: &[(Digest, Manifest)]) -> String {
    let list: Vec<String> = manifests
        .iter()
        .map(|(digest, _)| digest.to_string())
        .collect();
    let list = list.join(",");
    if list.len() <= MAX_PARAMETER {
        list
    } else {
        Digest::of(list.as_bytes()).to_string()
    }
}
