//! `layerpack repair`: makes indexes and locators anew from the packs, and names what is lost.

use std::process::ExitCode;

use anyhow::anyhow;
use layerpack_store::StoreError;

use super::Outcome;
use crate::args::RepairArgs;
use crate::context::Context;
use crate::output::{note, print, printable};

pub(super) fn run(context: &Context, args: &RepairArgs) -> Outcome {
    let report = context
        .store_to_mend()?
        .repair(args.dry_run)
        .map_err(|error| match error {
            StoreError::NoSpace { .. } => anyhow::Error::from(error)
                .context("repairing writes indexes: run `layerpack gc --grace 0s`, which needs next to no room, first"),
            error => error.into(),
        })?;
    let done = |did: &'static str, would: &'static str| if report.dry_run { would } else { did };
    print(context.format, &report, |out| {
        writeln!(out, "{} sound packs", report.packs)?;
        for pack in &report.indexed {
            writeln!(out, "{} {pack}", done("indexed", "would index"))?;
        }
        for index in &report.removed {
            writeln!(out, "{} {index}", done("removed", "would remove"))?;
        }
        for layer in &report.relocated {
            let what = done("located anew:", "would locate anew:");
            writeln!(out, "{what} {}", printable(layer))?;
        }
        for line in &report.mended {
            writeln!(out, "{}", printable(line))?;
        }
        Ok(())
    })?;
    for unused in report.unused.iter().filter(|_| context.says_warnings()) {
        note(&printable(&format!(
            "warning: {}; nothing uses the pack, and `layerpack gc` deletes it",
            unused.what
        )));
    }
    if report.is_ok() {
        return Ok(ExitCode::SUCCESS);
    }
    for lost in &report.lost {
        note(&printable(&super::verify::lost_line(lost)));
    }
    Err(anyhow!(
        "{} objects in store {} cannot be repaired: restore them from a copy of the store, or build their layers again",
        report.lost.len(),
        context.store_url()
    )
    .into())
}
