//! `layerpack snapshot squash`: one layer of a snapshot and the diffs below it, or of everything.

use std::process::ExitCode;

use anyhow::Context as _;
use layerpack_packer::{MergeOptions, Rules, ScrubReport, merge_with_rules};
use layerpack_store::{Digest, Kind, LayerStore, Manifest, Reference};
use serde::Serialize;

use super::super::build::{labels, warn};
use super::super::pack_diff::rules;
use super::super::{Outcome, merge, scrub_report};
use super::{loaded, open};
use crate::args::SnapshotSquashArgs;
use crate::context::Context;
use crate::output::{Format, print};
use crate::progress::Reporter;
use crate::published::Published;
use crate::signing::Signer;
use crate::stack::named;

pub(super) fn run(context: &Context, args: SnapshotSquashArgs) -> Outcome {
    let signer = Signer::new(&args.sign)?;
    let labels = labels(&args.label)?;
    let rules = match args.no_rules {
        true => None,
        false => rules(context.root(), args.rules.as_deref())?,
    };
    let store = context.store()?;
    let (snapshot, below) = open(&store, &args.reference)?;
    let from = match args.all {
        true => 0,
        false => below
            .iter()
            .rposition(|layer| layer.manifest.kind != Kind::Diff)
            .map_or(0, |last| last + 1),
    };
    let mut layers = Vec::new();
    for layer in below.iter().skip(from).chain([&snapshot]) {
        let reference: Reference = layer.name.parse().with_context(|| {
            format!("a layer below {} has no name to merge it by", snapshot.name)
        })?;
        layers.push(reference);
    }
    let kind = match args.all {
        true => below
            .first()
            .map_or(Kind::Diff, |layer| layer.manifest.kind),
        false => Kind::Diff,
    };
    let reference = named(kind, &args.name, &args.version)?;
    let mut options = MergeOptions::new(reference, layers);
    options.labels = labels;
    // What was removed must not come along in the frames of what was not.
    options.reframe = true;
    options.git_index = !args.no_git_index;
    match rules {
        None => merge::publish(context, &store, &options, &signer),
        Some(rules) => {
            let kept = loaded(below.get(..from).unwrap_or_default());
            publish(context, &store, &options, &kept, &rules, &signer)
        }
    }
}

/// A squashed snapshot in `-o json`.
#[derive(Debug, Serialize)]
struct Squashed {
    #[serde(flatten)]
    published: Published,
    /// What rules did.
    report: ScrubReport,
}

fn publish(
    context: &Context,
    store: &LayerStore,
    options: &MergeOptions,
    kept: &[(Digest, Manifest)],
    rules: &Rules,
    signer: &Signer,
) -> Outcome {
    let reporter = Reporter::new(&options.reference.to_string(), context);
    let report = merge_with_rules(store, options, kept, rules, &reporter);
    reporter.finish();
    let report = report?;
    let merged = report.merged;
    warn(context, &merged.warnings);
    signer.sign(store, &merged.published.digest)?;
    let squashed = Squashed {
        published: Published::new(
            &merged.published,
            merged.counts,
            merged.meta_bytes,
            merged.warnings,
            merged.cpu_seconds,
        )
        .with_git(merged.git),
        report: report.scrub,
    };
    if !context.quiet && context.format == Format::Text {
        squashed.published.note();
        scrub_report::note_all(&squashed.report);
    }
    print(context.format, &squashed, |out| {
        writeln!(out, "{}", squashed.published.line())
    })?;
    Ok(ExitCode::SUCCESS)
}
