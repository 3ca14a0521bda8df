//! `layerpack merge`: consecutive layers as one over the same data.

use std::process::ExitCode;

use layerpack_packer::{MergeOptions, merge};
use layerpack_store::{LayerStore, Reference};

use super::Outcome;
use super::build::{labels, warn};
use super::ls::parse_kind;
use crate::args::MergeArgs;
use crate::context::Context;
use crate::failure::{of_options, usage};
use crate::progress::Reporter;
use crate::published::Published;
use crate::signing::Signer;
use crate::stack::{named, parse_reference};

pub(super) fn run(context: &Context, args: MergeArgs) -> Outcome {
    let signer = Signer::new(&args.sign)?;
    let options = options(args)?;
    let store = context.store()?;
    publish(context, &store, &options, &signer)
}

/// Merges, signs and prints what came of it.
pub(super) fn publish(
    context: &Context,
    store: &LayerStore,
    options: &MergeOptions,
    signer: &Signer,
) -> Outcome {
    let reporter = Reporter::new(&options.reference.to_string(), context);
    let report = merge(store, options, &reporter);
    reporter.finish();
    let report = report.map_err(of_options)?;
    warn(context, &report.warnings);
    signer.sign(store, &report.published.digest)?;
    Published::new(
        &report.published,
        report.counts,
        report.meta_bytes,
        report.warnings,
        report.cpu_seconds,
    )
    .with_git(report.git)
    .print(context)?;
    Ok(ExitCode::SUCCESS)
}

fn options(args: MergeArgs) -> anyhow::Result<MergeOptions> {
    let layers = args
        .refs
        .iter()
        .map(|text| parse_reference(text))
        .collect::<anyhow::Result<Vec<Reference>>>()?;
    let kind = match (&args.kind, layers.first()) {
        (Some(kind), _) => parse_kind(kind)?,
        (None, Some(first)) => first.kind,
        (None, None) => return Err(usage("name the layers to merge")),
    };
    let reference = named(kind, &args.name, &args.version)?;
    let mut options = MergeOptions::new(reference, layers);
    options.labels = labels(&args.label)?;
    options.git_index = !args.no_git_index;
    Ok(options)
}
