//! `layerpack snapshot`: diffs that sandboxes left behind, and what can be done with them.

mod inspect;
mod list;
mod rebase;
mod squash;

use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use layerpack_packer::{View, export_layer};
use layerpack_store::{Digest, Kind, LayerStore, Manifest, ParentRef};
use serde::Serialize;

use super::Outcome;
use super::build::warn;
use super::query::show_difference;
use crate::args::{
    ExportArgs, LayerCompression, RmArgs, SnapshotArgs, SnapshotCommand, SnapshotDiffArgs,
    SnapshotExportArgs,
};
use crate::context::Context;
use crate::failure::usage;
use crate::output::print;
use crate::progress::Reporter;
use crate::stack::{StackLayer, parse_reference, resolve};

pub(super) fn run(context: &Context, args: SnapshotArgs) -> Outcome {
    match args.command {
        SnapshotCommand::Ls(args) => list::run(context, &args),
        SnapshotCommand::Inspect(args) => inspect::run(context, &args),
        SnapshotCommand::Diff(args) => diff(context, &args),
        SnapshotCommand::Squash(args) => squash::run(context, args),
        SnapshotCommand::Rebase(args) => rebase::run(context, args),
        SnapshotCommand::Export(args) => export(context, args),
        SnapshotCommand::Rm(args) => {
            for text in &args.refs {
                if parse_reference(text)?.kind != Kind::Diff {
                    let other = "use `layerpack rm` for other layers";
                    return Err(usage(format!("{text} is no snapshot: {other}")).into());
                }
            }
            super::rm::run(context, &RmArgs { refs: args.refs })
        }
    }
}

/// A snapshot and the layers that it is made on, bottom first.
fn open(store: &LayerStore, text: &str) -> anyhow::Result<(StackLayer, Vec<StackLayer>)> {
    if parse_reference(text)?.kind != Kind::Diff {
        return Err(no_snapshot(text));
    }
    let mut stack = resolve(store, &[text.to_owned()])?;
    match stack.pop() {
        Some(top) => Ok((top, stack)),
        None => bail!("{text} has no layers"),
    }
}

fn no_snapshot(text: &str) -> anyhow::Error {
    usage(format!(
        "{text} is no snapshot: those are diff/NAME:VERSION"
    ))
}

/// Layers as the packer takes them.
fn loaded(stack: &[StackLayer]) -> Vec<(Digest, Manifest)> {
    stack
        .iter()
        .map(|layer| (layer.digest, layer.manifest.clone()))
        .collect()
}

/// Layers as a manifest names them.
fn parents(stack: &[StackLayer]) -> Vec<ParentRef> {
    stack
        .iter()
        .map(|layer| ParentRef {
            reference: layer.name.parse().ok(),
            manifest: layer.digest,
        })
        .collect()
}

fn diff(context: &Context, args: &SnapshotDiffArgs) -> Outcome {
    let store = context.store()?;
    let (snapshot, below) = open(&store, &args.reference)?;
    let whole = |top: StackLayer, mut below: Vec<StackLayer>| {
        below.push(top);
        View::open(&store, &loaded(&below))
    };
    let (old, new) = match &args.new {
        // What it changed: the layers below without and with it.
        None => (
            View::open(&store, &loaded(&below))?,
            whole(snapshot, below)?,
        ),
        Some(new) => {
            let old = whole(snapshot, below)?;
            let (top, below) = open(&store, new)?;
            (old, whole(top, below)?)
        }
    };
    show_difference(context, &old, &new)
}

/// A written layer in `-o json`.
#[derive(Debug, Serialize)]
struct Exported {
    reference: String,
    target: String,
    /// Digest of the archive, which is the layer's diff id too.
    digest: String,
    bytes: u64,
    warnings: Vec<String>,
}

fn export(context: &Context, mut args: SnapshotExportArgs) -> Outcome {
    match args.to.split_once(':') {
        // An image is no good without the layers below.
        Some(("oci" | "docker-archive" | "registry", _)) => {
            if parse_reference(&args.reference)?.kind != Kind::Diff {
                return Err(no_snapshot(&args.reference).into());
            }
            let image = ExportArgs {
                refs: vec![args.reference],
                to: args.to,
                tag: None,
                compression: LayerCompression::Gzip,
                plain_http: false,
                mount_from: Vec::new(),
            };
            return super::export::run(context, image);
        }
        Some(("tar", path)) => args.to = path.to_owned(),
        _ => {}
    }
    if matches!(args.to.as_str(), "" | "-") {
        return Err(usage("an archive goes to a file: name one after --to").into());
    }
    let store = context.store()?;
    let (snapshot, mut stack) = open(&store, &args.reference)?;
    let reference = snapshot.name.clone();
    stack.push(snapshot);
    let digests: Vec<Digest> = stack.iter().map(|layer| layer.digest).collect();
    let reporter = Reporter::new(&reference, context);
    let report = export_layer(&store, &digests, Path::new(&args.to), &reporter);
    reporter.finish();
    let report = report?;
    warn(context, &report.warnings);
    let exported = Exported {
        reference,
        target: args.to,
        digest: report.digest,
        bytes: report.bytes,
        warnings: report.warnings,
    };
    print(context.format, &exported, |out| {
        writeln!(out, "{} {}", exported.target, exported.digest)
    })?;
    Ok(ExitCode::SUCCESS)
}
