//! `layerpack seed`: the part of layers that profiles use, for another site.

use std::process::ExitCode;

use layerpack_packer::Progress as _;
use layerpack_store::transfer::{SeedOptions, SeedReport, TransferStep, seed};
use serde::Serialize;

use super::Outcome;
use crate::args::SeedArgs;
use crate::context::Context;
use crate::failure::usage;
use crate::output::{Table, print, warning};
use crate::progress::Reporter;
use crate::stack::parse_reference;
use crate::units::human_bytes;

/// A seed in `-o json`. Sizes in bytes, as stored.
#[derive(Debug, Serialize)]
struct Seeded {
    to: String,
    dry_run: bool,
    layers: Vec<Layer>,
    environments: Vec<Covered>,
    /// Environments of which everything that was read is seeded.
    covered_environments: usize,
    metadata_bytes: u64,
    frame_bytes: u64,
    moved_bytes: u64,
    reused_bytes: u64,
    written_bytes: u64,
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Layer {
    reference: String,
    digest: String,
    metadata_bytes: u64,
    frames: u64,
    bytes: u64,
    all_frames: u64,
    all_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Covered {
    name: String,
    profile: String,
    layers: Vec<String>,
    covered: bool,
    extents: u64,
    covered_extents: u64,
    /// Raw bytes of the extents.
    bytes: u64,
    covered_bytes: u64,
    /// Extents, each as often as there are recordings that read it.
    accesses: u64,
    covered_accesses: u64,
}

pub(super) fn run(context: &Context, args: &SeedArgs) -> Outcome {
    let (from, to) = (context.store()?, context.store_at(&args.to)?);
    if from.url() == to.url() {
        let same = format!("{} is both source and target: name two stores", to.url());
        return Err(usage(same).into());
    }
    let mut profiles = Vec::new();
    for text in &args.profiles {
        profiles.push(from.find_profile(text)?);
    }
    let whole = args
        .layers
        .iter()
        .map(|text| Ok(from.load(&parse_reference(text)?)?))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let options = SeedOptions {
        max_bytes: args.max_bytes.0,
        dry_run: args.dry_run,
        ..SeedOptions::default()
    };
    let reporter = Reporter::new("seed", context);
    let report = seed(
        &from,
        &to,
        &profiles,
        &whole,
        &options,
        &mut |step| match step {
            TransferStep::Layer { reference, bytes } => {
                reporter.phase(&format!("{reference}, {} to move", human_bytes(bytes)));
            }
            TransferStep::Moved(bytes) => reporter.bytes(bytes),
        },
    );
    reporter.finish();
    show(context, to.url(), args.dry_run, report?)?;
    Ok(ExitCode::SUCCESS)
}

fn show(context: &Context, to: &str, dry_run: bool, report: SeedReport) -> anyhow::Result<()> {
    let environments: Vec<Covered> = report
        .environments
        .iter()
        .map(|e| Covered {
            name: e.name.clone(),
            profile: e.profile.to_string(),
            layers: e.layers.iter().map(ToString::to_string).collect(),
            covered: e.is_covered(),
            extents: e.extents,
            covered_extents: e.covered_extents,
            bytes: e.bytes,
            covered_bytes: e.covered_bytes,
            accesses: e.accesses,
            covered_accesses: e.covered_accesses,
        })
        .collect();
    let moved = report.transfer.layers.iter();
    let done = Seeded {
        to: to.to_owned(),
        dry_run,
        covered_environments: environments.iter().filter(|e| e.covered).count(),
        environments,
        layers: report
            .layers
            .iter()
            .map(|l| Layer {
                reference: l.reference.to_string(),
                digest: l.digest.to_string(),
                metadata_bytes: l.metadata_bytes,
                frames: l.frames,
                bytes: l.bytes,
                all_frames: l.all_frames,
                all_bytes: l.all_bytes,
            })
            .collect(),
        metadata_bytes: report.metadata_bytes,
        frame_bytes: report.frame_bytes,
        moved_bytes: moved.clone().map(|l| l.moved_bytes).sum(),
        reused_bytes: moved.map(|l| l.reused_bytes).sum(),
        written_bytes: report.transfer.written_bytes,
        warnings: report.transfer.warnings,
    };
    for line in done.warnings.iter().filter(|_| context.says_warnings()) {
        warning(line);
    }
    print(context.format, &done, |out| {
        let mut table = Table::new(&["LAYER", "METADATA", "SEEDED", "OF"]);
        for layer in &done.layers {
            table.row([
                layer.reference.clone(),
                human_bytes(layer.metadata_bytes),
                human_bytes(layer.bytes),
                human_bytes(layer.all_bytes),
            ]);
        }
        table.write(out)?;
        let mut table = Table::new(&["PROFILE", "COVERED", "READS", "BYTES"]);
        for e in &done.environments {
            table.row([
                if e.name.is_empty() {
                    e.profile.clone()
                } else {
                    e.name.clone()
                },
                if e.covered { "wholly" } else { "in part" }.to_owned(),
                percent(e.covered_accesses, e.accesses),
                percent(e.covered_bytes, e.bytes),
            ]);
        }
        table.write(out)?;
        writeln!(
            out,
            "{} of {} environments wholly covered; {} in frames, {} in metadata{}",
            done.covered_environments,
            done.environments.len(),
            human_bytes(done.frame_bytes),
            human_bytes(done.metadata_bytes),
            if dry_run { "; nothing was written" } else { "" }
        )
    })?;
    Ok(())
}

fn percent(part: u64, whole: u64) -> String {
    match (u128::from(part) * 1000).checked_div(u128::from(whole)) {
        Some(tenths) => format!("{}.{}%", tenths / 10, tenths % 10),
        None => "100.0%".to_owned(),
    }
}
