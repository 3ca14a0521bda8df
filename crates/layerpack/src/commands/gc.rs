//! `layerpack gc`: deletes what no layer uses any more, a grace period after it was found unused.

use std::io::{self, Write};
use std::process::ExitCode;

use layerpack_store::{Amount, GcOptions, GcReport};

use super::Outcome;
use crate::args::GcArgs;
use crate::context::Context;
use crate::output::{print, warning};
use crate::units::human_bytes;

pub(super) fn run(context: &Context, args: &GcArgs) -> Outcome {
    let report = context.store()?.collect(GcOptions {
        grace: args.grace.grace.0,
        dry_run: args.grace.dry_run,
        wait: args.grace.wait,
    })?;
    print(context.format, &report, |out| describe(out, &report))?;
    if context.says_warnings() {
        report.problems.iter().for_each(|line| warning(line));
    }
    Ok(ExitCode::SUCCESS)
}

/// Lines for people.
pub(super) fn describe(out: &mut dyn Write, report: &GcReport) -> io::Result<()> {
    let (deleted, condemned) = if report.dry_run {
        ("would delete", "would condemn")
    } else {
        ("deleted", "condemned")
    };
    writeln!(out, "{deleted} {}", amount(report.deleted))?;
    writeln!(out, "{condemned} {}", amount(report.condemned))?;
    for waiting in &report.waiting {
        writeln!(
            out,
            "waiting: {}, for {}",
            amount(waiting.amount),
            waiting.why
        )?;
    }
    for (reason, kept) in &report.kept {
        let reason = serde_json::to_value(reason).unwrap_or_default();
        let reason = reason.as_str().unwrap_or("unknown").to_owned();
        writeln!(out, "kept ({reason}): {}", amount(*kept))?;
    }
    Ok(())
}

fn amount(amount: Amount) -> String {
    let objects = match amount.objects {
        1 => "1 object".to_owned(),
        n => format!("{n} objects"),
    };
    format!("{objects}, {}", human_bytes(amount.bytes))
}
