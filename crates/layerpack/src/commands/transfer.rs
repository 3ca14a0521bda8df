//! `layerpack push`, `pull` and `copy`: layers from one store to another.

use std::process::ExitCode;

use anyhow::bail;
use layerpack_packer::Progress as _;
use layerpack_store::transfer::{
    Selection, TransferOptions, TransferReport, TransferStep, select, transfer,
};
use layerpack_store::{LayerStore, PublishOutcome};
use serde::Serialize;

use super::Outcome;
use crate::args::{CopyArgs, PullArgs, PushArgs, TransferArgs};
use crate::context::Context;
use crate::failure::usage;
use crate::output::{Table, print, warning};
use crate::progress::Reporter;
use crate::units::human_bytes;

/// A transfer in `-o json`. Sizes in bytes.
#[derive(Debug, Serialize)]
struct Transferred {
    from: String,
    to: String,
    layers: Vec<Layer>,
    /// Stored bytes of frames that moved.
    moved_bytes: u64,
    /// Stored bytes of frames that the target had.
    reused_bytes: u64,
    /// Bytes read from the source's packs, gaps between frames included.
    read_bytes: u64,
    /// Bytes written to the target, all objects together.
    written_bytes: u64,
    /// Range requests to the source.
    requests: u64,
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Layer {
    reference: String,
    digest: String,
    /// `created`, or `already` if the target had it.
    outcome: &'static str,
    moved_frames: u64,
    moved_bytes: u64,
    reused_frames: u64,
    reused_bytes: u64,
    requests: u64,
    /// Signatures and profiles that moved.
    attached: u64,
}

pub(super) fn push(context: &Context, args: &PushArgs) -> Outcome {
    let (from, to) = (context.store()?, context.store_at(&args.to)?);
    run(context, &args.transfer, &from, &to)
}

pub(super) fn pull(context: &Context, args: &PullArgs) -> Outcome {
    let (from, to) = (context.store_at(&args.from)?, context.store()?);
    run(context, &args.transfer, &from, &to)
}

pub(super) fn copy(context: &Context, args: &CopyArgs) -> Outcome {
    let (from, to) = (context.store_at(&args.from)?, context.store_at(&args.to)?);
    run(context, &args.transfer, &from, &to)
}

fn run(context: &Context, args: &TransferArgs, from: &LayerStore, to: &LayerStore) -> Outcome {
    if from.url() == to.url() {
        let same = format!("{} is both source and target: name two stores", to.url());
        return Err(usage(same).into());
    }
    let report = move_layers(context, args, from, to)?;
    show(context, from, to, report)?;
    Ok(ExitCode::SUCCESS)
}

fn move_layers(
    context: &Context,
    args: &TransferArgs,
    from: &LayerStore,
    to: &LayerStore,
) -> anyhow::Result<TransferReport> {
    let selection = Selection {
        patterns: args.refs.clone(),
        all: args.all,
        parents: args.with_parents,
        alone: args.no_parents,
    };
    let layers = select(from, &selection)?;
    if layers.is_empty() {
        bail!("there is no layer in store {}", from.url());
    }
    let mut options = TransferOptions::default();
    options.connections = usize::from(args.connections);
    options.recheck = args.recheck;
    let reporter = Reporter::new("copy", context);
    let report = transfer(from, to, &layers, &options, &mut |step| match step {
        TransferStep::Layer { reference, bytes } => {
            reporter.phase(&format!("{reference}, {} to move", human_bytes(bytes)));
        }
        TransferStep::Moved(bytes) => reporter.bytes(bytes),
    });
    reporter.finish();
    Ok(report?)
}

fn show(
    context: &Context,
    from: &LayerStore,
    to: &LayerStore,
    report: TransferReport,
) -> anyhow::Result<()> {
    let layers: Vec<Layer> = report
        .layers
        .iter()
        .map(|l| Layer {
            reference: l.reference.to_string(),
            digest: l.digest.to_string(),
            outcome: match l.outcome {
                PublishOutcome::Created => "created",
                PublishOutcome::Already => "already",
            },
            moved_frames: l.moved_frames,
            moved_bytes: l.moved_bytes,
            reused_frames: l.reused_frames,
            reused_bytes: l.reused_bytes,
            requests: l.requests,
            attached: l.attached,
        })
        .collect();
    let done = Transferred {
        from: from.url().to_owned(),
        to: to.url().to_owned(),
        moved_bytes: layers.iter().map(|l| l.moved_bytes).sum(),
        reused_bytes: layers.iter().map(|l| l.reused_bytes).sum(),
        requests: layers.iter().map(|l| l.requests).sum(),
        layers,
        read_bytes: report.read_bytes,
        written_bytes: report.written_bytes,
        warnings: report.warnings,
    };
    for line in done.warnings.iter().filter(|_| context.says_warnings()) {
        warning(line);
    }
    print(context.format, &done, |out| {
        let mut table = Table::new(&["LAYER", "OUTCOME", "MOVED", "REUSED"]);
        for layer in &done.layers {
            table.row([
                layer.reference.clone(),
                layer.outcome.to_owned(),
                human_bytes(layer.moved_bytes),
                human_bytes(layer.reused_bytes),
            ]);
        }
        table.write(out)?;
        writeln!(
            out,
            "{} moved in {} requests, {} reused, {} written to {}",
            human_bytes(done.moved_bytes),
            done.requests,
            human_bytes(done.reused_bytes),
            human_bytes(done.written_bytes),
            done.to
        )
    })?;
    Ok(())
}
