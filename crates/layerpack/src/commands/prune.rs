//! `layerpack prune`: copies what is used out of packs that hold little else, then collects garbage.

use std::process::ExitCode;

use layerpack_store::PruneOptions;

use super::Outcome;
use crate::args::PruneArgs;
use crate::context::Context;
use crate::output::{print, printable, warning};
use crate::units::human_bytes;

pub(super) fn run(context: &Context, args: &PruneArgs) -> Outcome {
    let report = context.store_that_is()?.prune(PruneOptions {
        min_live: args.min_live,
        dry_run: args.grace.dry_run,
        grace: args.grace.grace.0,
        wait: args.grace.wait,
    })?;
    print(context.format, &report, |out| {
        writeln!(
            out,
            "{} packs of {}, of which layers use {}",
            report.packs,
            human_bytes(report.pack_bytes),
            human_bytes(report.live_bytes)
        )?;
        writeln!(
            out,
            "{} {} packs of {} as {}",
            if report.gc.dry_run {
                "would rewrite"
            } else {
                "rewrote"
            },
            report.rewritten_packs,
            human_bytes(report.rewritten_bytes),
            human_bytes(report.written_bytes)
        )?;
        for layer in &report.layers {
            writeln!(out, "moved {}", printable(layer))?;
        }
        super::gc::describe(out, &report.gc)
    })?;
    if context.says_warnings() {
        let all = report.problems.iter().chain(&report.gc.problems);
        all.for_each(|line| warning(line));
    }
    Ok(ExitCode::SUCCESS)
}
