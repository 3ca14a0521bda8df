//! `layerpack verify --all`: proves a whole store.

use std::process::ExitCode;

use anyhow::anyhow;

use super::Outcome;
use super::verify::lost_line;
use crate::context::Context;
use crate::output::{note, print, printable};
use crate::units::human_bytes;

pub(super) fn run(context: &Context, read_data: bool) -> Outcome {
    let report = context.store_that_is()?.audit(read_data)?;
    print(context.format, &report, |out| {
        writeln!(
            out,
            "{} objects, {}: {} packs, {} frames read",
            report.objects,
            human_bytes(report.bytes),
            report.packs,
            report.frames
        )?;
        for layer in report.layers.iter().filter(|layer| layer.sound) {
            let proof = match (&layer.part, read_data) {
                (Some(part), _) => format!(
                    "is here in part: {} of {} frames, the others in {}{}",
                    part.present_frames,
                    part.frames,
                    printable(&part.origin),
                    if read_data {
                        "; what is here is good"
                    } else {
                        ""
                    }
                ),
                (None, true) => "is good".to_owned(),
                (None, false) => "is whole (data not read)".to_owned(),
            };
            writeln!(out, "{} {proof}", printable(&layer.name))?;
        }
        for orphan in &report.orphans {
            let size = human_bytes(orphan.size);
            writeln!(out, "unused: {} ({size})", printable(&orphan.object))?;
        }
        Ok(())
    })?;
    if context.says_warnings() {
        for line in &report.warnings {
            note(&printable(&format!("warning: {line}")));
        }
    }
    if report.damaged.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    for damage in &report.damaged {
        note(&printable(&lost_line(damage)));
    }
    Err(anyhow!(
        "{} objects in store {} are damaged: run repair, restore them from a copy of the store, or build their layers again",
        report.damaged.len(),
        context.store_url()
    )
    .into())
}
