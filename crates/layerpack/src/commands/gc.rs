//! `layerpack gc`: deletes what no layer uses any more, a grace period after it was found unused.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::SystemTime;

use layerpack_store::{Amount, GcOptions, GcReport, Leftovers, StoreError};

use super::Outcome;
use crate::args::GcArgs;
use crate::context::Context;
use crate::output::{print, warning};
use crate::units::human_bytes;

pub(super) fn run(context: &Context, args: &GcArgs) -> Outcome {
    let report = context
        .store_that_is()?
        .collect(GcOptions {
            grace: args.grace.grace.0,
            dry_run: args.grace.dry_run,
            wait: args.grace.wait,
        })
        .map_err(|error| match error {
            StoreError::NoSpace { .. } => anyhow::Error::from(error).context(
                "collecting needs a few KiB of room: remove a published version (`layerpack rm`) or anything else on that filesystem, then run again",
            ),
            error => error.into(),
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
        let lists = match waiting.lists.len() {
            1 => String::new(),
            n => format!(" in {n} lists"),
        };
        writeln!(
            out,
            "waiting: {}{lists}, for {}",
            amount(waiting.amount),
            waiting.why
        )?;
    }
    for (reason, kept) in &report.kept {
        let reason = serde_json::to_value(reason).unwrap_or_default();
        let reason = reason.as_str().unwrap_or("unknown").to_owned();
        writeln!(out, "kept ({reason}): {}", amount(*kept))?;
    }
    temporaries(out, &report.temporaries)
}

/// A line on what lies in the store that is no object, if anything does.
pub(super) fn temporaries(out: &mut dyn Write, found: &Leftovers) -> io::Result<()> {
    let files = |n: u64| {
        if n == 1 {
            "1 file".to_owned()
        } else {
            format!("{n} files")
        }
    };
    if found.removed_files > 0 {
        writeln!(
            out,
            "removed {}, {}, of writers that are dead",
            files(found.removed_files),
            human_bytes(found.removed_bytes)
        )?;
    }
    if found.files > 0 {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let age = found.oldest.zip(now.ok()).map(|(oldest, now)| {
            let seconds = now.as_secs().saturating_sub(oldest);
            format!(", the oldest from {} ago", human_age(seconds))
        });
        writeln!(
            out,
            "being written, or left by dead writers elsewhere: {}, {}{}",
            files(found.files),
            human_bytes(found.bytes),
            age.unwrap_or_default()
        )?;
    }
    Ok(())
}

fn human_age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} minutes", seconds / 60),
        _ => format!("{} hours", seconds / 3600),
    }
}

fn amount(amount: Amount) -> String {
    let objects = match amount.objects {
        1 => "1 object".to_owned(),
        n => format!("{n} objects"),
    };
    format!("{objects}, {}", human_bytes(amount.bytes))
}
