//! `layerpack build --split FILE`: one tree as several layers.

use std::process::ExitCode;

use anyhow::Context as _;
use layerpack_packer::{ImageSource, LeftOver, Split, SplitReport, build_split, import_split};
use serde::Serialize;

use super::Outcome;
use super::build::{published, warn};
use crate::args::BuildArgs;
use crate::context::Context;
use crate::failure::of_options;
use crate::output::{note, print};
use crate::progress::Reporter;
use crate::published::Published;
use crate::signing::Signer;
use crate::units::human_bytes;

/// What `-o json` shows.
#[derive(Debug, Serialize)]
struct Parts {
    layers: Vec<Published>,
    left_over: LeftOver,
}

pub(super) fn run(context: &Context, args: BuildArgs) -> Outcome {
    let split = rules(&args)?;
    let base = split.references().next().cloned();
    let base = base.context("the split file has no base")?;
    let store = context.store()?;
    let signer = Signer::new(&args.sign)?;
    let reporter = Reporter::new(&base.to_string(), context);
    let report = if ImageSource::is_image(&args.from) {
        let options = super::import::options(context, base, args)?;
        import_split(&store, &options, &split, &reporter)
    } else {
        let options = super::build::options(context, &store, base, args)?;
        build_split(&store, &options, &split, &reporter)
    };
    reporter.finish();
    let report = report.map_err(of_options)?;
    for part in &report.parts {
        signer.sign(&store, &part.published.digest)?;
    }
    show(context, report)?;
    Ok(ExitCode::SUCCESS)
}

fn rules(args: &BuildArgs) -> anyhow::Result<Split> {
    let path = args.split.as_deref().context("--split names no file")?;
    let text = fs_err::read_to_string(path)?;
    let split = Split::parse(&text, args.name.as_deref(), args.version.as_deref())
        .with_context(|| format!("cannot use {}", path.display()))?;
    Ok(if args.strict { split.strict() } else { split })
}

fn show(context: &Context, report: SplitReport) -> anyhow::Result<()> {
    let mut layers = Vec::with_capacity(report.parts.len());
    for part in report.parts {
        warn(context, &part.warnings);
        layers.push(published(part));
    }
    let parts = Parts {
        layers,
        left_over: report.left_over,
    };
    if !context.quiet && context.format == crate::output::Format::Text {
        for layer in &parts.layers {
            layer.note();
        }
        say_left_over(&parts.left_over);
    }
    print(context.format, &parts, |out| {
        parts
            .layers
            .iter()
            .try_for_each(|layer| writeln!(out, "{}", layer.line()))
    })?;
    Ok(())
}

fn say_left_over(left: &LeftOver) {
    if left.entries == 0 {
        return;
    }
    let went_to = match &left.went_to {
        Some(part) => format!("went to {part}"),
        None => "was left out".to_owned(),
    };
    note(&format!(
        "no rule names {} entries, {}: this {went_to}",
        left.entries,
        human_bytes(left.bytes)
    ));
    for path in &left.paths {
        note(&format!("  {path}"));
    }
    if left.more_paths > 0 {
        note(&format!("  and {} more paths", left.more_paths));
    }
}
