//! `layerpack checkout`: what a stack shows, as a directory.

use std::path::PathBuf;
use std::process::ExitCode;

use layerpack_packer::checkout;
use serde::Serialize;

use super::Outcome;
use super::build::warn;
use crate::args::CheckoutArgs;
use crate::context::Context;
use crate::failure::usage;
use crate::output::{Format, note, print};
use crate::progress::Reporter;
use crate::stack::resolve;
use crate::units::human_bytes;

/// A checkout in `-o json`.
#[derive(Debug, Serialize)]
struct CheckedOut {
    directory: String,
    layers: Vec<String>,
    entries: u64,
    /// Bytes written, holes left out.
    bytes: u64,
    warnings: Vec<String>,
}

pub(super) fn run(context: &Context, args: &CheckoutArgs) -> Outcome {
    let (directory, refs) = split(args)?;
    let store = context.store()?;
    let stack = resolve(&store, &refs)?;
    let digests: Vec<_> = stack.iter().map(|layer| layer.digest).collect();
    let reporter = Reporter::new(&directory.display().to_string(), context);
    let report = checkout(&store, &digests, &directory, &reporter);
    reporter.finish();
    let report = report?;
    warn(context, &report.warnings);
    let done = CheckedOut {
        directory: directory.display().to_string(),
        layers: stack.into_iter().map(|layer| layer.name).collect(),
        entries: report.entries,
        bytes: report.bytes,
        warnings: report.warnings,
    };
    if !context.quiet && context.format == Format::Text {
        note(&format!(
            "{} entries, {}",
            done.entries,
            human_bytes(done.bytes)
        ));
    }
    print(context.format, &done, |out| {
        writeln!(out, "{}", done.directory)
    })?;
    Ok(ExitCode::SUCCESS)
}

fn split(args: &CheckoutArgs) -> anyhow::Result<(PathBuf, Vec<String>)> {
    let Some((directory, refs)) = args.refs_and_dir.split_last() else {
        return Err(usage("name the layers and a directory"));
    };
    let refs = refs
        .iter()
        .map(|text| match text.to_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(usage(format!("{} is no layer", text.display()))),
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    Ok((std::path::absolute(directory)?, refs))
}
