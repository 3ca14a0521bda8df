//! `layerpack flatten`: a stack as one EROFS image for use without us.

use std::process::ExitCode;

use layerpack_packer::{EntryCounts, FlattenOptions, flatten};
use serde::Serialize;

use super::Outcome;
use super::build::warn;
use crate::args::FlattenArgs;
use crate::context::Context;
use crate::failure::of_options;
use crate::output::{note, print};
use crate::progress::Reporter;
use crate::stack::resolve;
use crate::units::human_bytes;

/// A flattened stack in `-o json`.
#[derive(Debug, Serialize)]
struct Flattened {
    file: String,
    layers: usize,
    /// What the image holds.
    counts: EntryCounts,
    /// Size of the file in bytes.
    bytes: u64,
    /// Bytes of metadata in it.
    meta_bytes: u64,
    warnings: Vec<String>,
}

pub(super) fn run(context: &Context, args: FlattenArgs) -> Outcome {
    let store = context.store()?;
    let stack = resolve(&store, &args.refs)?;
    let digests: Vec<_> = stack.iter().map(|layer| layer.digest).collect();
    let file = args.to.display().to_string();
    let options = FlattenOptions::new(digests, args.to);
    let reporter = Reporter::new(&file, context);
    let report = flatten(&store, &options, &reporter);
    reporter.finish();
    let report = report.map_err(of_options)?;
    warn(context, &report.warnings);
    let flattened = Flattened {
        file,
        layers: stack.len(),
        counts: report.counts,
        bytes: report.bytes,
        meta_bytes: report.meta_bytes,
        warnings: report.warnings,
    };
    if !context.quiet && context.format == crate::output::Format::Text {
        note(&format!(
            "{} layers, {}",
            flattened.layers,
            human_bytes(flattened.bytes)
        ));
    }
    print(context.format, &flattened, |out| {
        writeln!(out, "{}", flattened.file)
    })?;
    Ok(ExitCode::SUCCESS)
}
