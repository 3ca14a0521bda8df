//! `layerpack snapshot rebase`: a snapshot on other layers.

use std::process::ExitCode;

use anyhow::bail;
use layerpack_packer::{RebaseConflict, RebaseOptions, Strategy, rebase};
use layerpack_store::Kind;
use serde::Serialize;

use super::super::Outcome;
use super::super::build::{labels, warn};
use super::{open, parents};
use crate::args::{SnapshotRebaseArgs, StrategyArg};
use crate::context::Context;
use crate::output::{Format, note, print, printable};
use crate::progress::Reporter;
use crate::published::Published;
use crate::signing::Signer;
use crate::stack::{StackLayer, named, resolve};

/// A rebase in `-o json`.
#[derive(Debug, Serialize)]
struct Rebased {
    /// Absent if conflicts stood against it.
    #[serde(flatten)]
    published: Option<Published>,
    conflicts: Vec<RebaseConflict>,
    /// Paths of which the snapshot said what the new layers say anyway.
    dropped: u64,
}

pub(super) fn run(context: &Context, args: SnapshotRebaseArgs) -> Outcome {
    let signer = Signer::new(&args.sign)?;
    let labels = labels(&args.label)?;
    let store = context.store()?;
    let (snapshot, below) = open(&store, &args.reference)?;
    let onto = resolve(&store, &args.onto)?;
    leaves_nothing_behind(&args.reference, &below, &onto)?;
    let reference = named(Kind::Diff, &args.name, &args.version)?;
    let mut options = RebaseOptions::new(reference, snapshot.digest, parents(&onto));
    options.labels = labels;
    options.strategy = match args.strategy {
        StrategyArg::Fail => Strategy::Fail,
        StrategyArg::Snapshot => Strategy::Snapshot,
        StrategyArg::Base => Strategy::Base,
    };
    let reporter = Reporter::new(&options.reference.to_string(), context);
    let report = rebase(&store, &options, &reporter);
    reporter.finish();
    let report = report?;
    if context.says_warnings() {
        for conflict in &report.conflicts {
            note(&printable(&line(conflict)));
        }
    }
    let count = report.conflicts.len();
    let published = match report.made {
        None => None,
        Some(made) => {
            warn(context, &made.warnings);
            signer.sign(&store, &made.published.digest)?;
            let published = Published::new(
                &made.published,
                made.counts,
                made.meta_bytes,
                made.warnings,
                made.cpu_seconds,
            );
            Some(published.with_git(made.git))
        }
    };
    let rebased = Rebased {
        published,
        conflicts: report.conflicts,
        dropped: report.dropped,
    };
    let Some(published) = &rebased.published else {
        if context.format == Format::Json {
            print(context.format, &rebased, |_| Ok(()))?;
        }
        return Err(anyhow::anyhow!(
            "{} cannot be put there: {count} conflicts; choose whose word stands with --strategy snapshot or --strategy base",
            args.reference
        )
        .into());
    };
    print(context.format, &rebased, |out| {
        writeln!(out, "{}", published.line())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// A snapshot of a chain holds only what came last: the diffs that it was made on have to be among the
/// new layers, or others in their place.
fn leaves_nothing_behind(
    snapshot: &str,
    below: &[StackLayer],
    onto: &[StackLayer],
) -> anyhow::Result<()> {
    let is_diff = |layer: &&StackLayer| layer.manifest.kind == Kind::Diff;
    if onto.iter().any(|layer| is_diff(&layer)) {
        return Ok(());
    }
    let left: Vec<&str> = below
        .iter()
        .filter(is_diff)
        .map(|layer| layer.name.as_str())
        .collect();
    match left.as_slice() {
        [] => Ok(()),
        left => bail!(
            "{snapshot} was made on {}, which --onto does not name: what they changed would be left behind. \
             Make one snapshot of them with `layerpack snapshot squash {snapshot}` and rebase that, or \
             rebase them first and name the results in --onto",
            left.join(", ")
        ),
    }
}

fn line(conflict: &RebaseConflict) -> String {
    let kind = serde_json::to_value(conflict.kind)
        .ok()
        .and_then(|value| value.as_str().map(str::to_owned))
        .unwrap_or_default();
    let what = match conflict.differences.join(",") {
        text if text.is_empty() => text,
        text => format!(" ({text})"),
    };
    format!(
        "conflict {}: {kind}; snapshot: {}; was: {}; is now: {}{what}",
        conflict.path, conflict.snapshot, conflict.before, conflict.after
    )
}
