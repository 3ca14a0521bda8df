//! `layerpack verify --all`: proves a whole store.

use std::process::ExitCode;

use anyhow::anyhow;
use layerpack_store::{AuditReport, PublicKey};
use serde::Serialize;

use super::Outcome;
use super::verify::{is_signed, lacks_signature, lost_line, without};
use crate::args::VerifyArgs;
use crate::context::Context;
use crate::output::{note, print, printable};
use crate::units::human_bytes;

/// A store in `-o json`.
#[derive(Debug, Serialize)]
struct Proven<'a> {
    #[serde(flatten)]
    report: &'a AuditReport,
    /// Layers without a good signature that counts, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    unsigned: Option<Vec<&'a str>>,
}

pub(super) fn run(context: &Context, args: &VerifyArgs, keys: Option<&[PublicKey]>) -> Outcome {
    let read_data = args.read_data;
    let store = context.store_that_is()?;
    let report = store.audit(read_data)?;
    let mut unsigned = Vec::new();
    for layer in report.layers.iter().filter(|_| keys.is_some()) {
        if !is_signed(
            &store,
            &layer.name,
            &layer.manifest,
            keys.unwrap_or_default(),
        )? {
            unsigned.push(layer.name.as_str());
        }
    }
    let proven = Proven {
        report: &report,
        unsigned: keys.map(|_| unsigned.clone()),
    };
    print(context.format, &proven, |out| {
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
            let lacks = without(&layer.missing_parents);
            let signed = match unsigned.contains(&layer.name.as_str()) {
                true => "; it has no good signature",
                false => "",
            };
            writeln!(out, "{} {proof}{lacks}{signed}", printable(&layer.name))?;
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
        for superseded in &report.superseded {
            note(&printable(&format!("warning: {}", superseded.what)));
        }
    }
    if !unsigned.is_empty() {
        let error = lacks_signature(&unsigned, &args.key);
        if report.damaged.is_empty() {
            return Err(error.into());
        }
        note(&printable(&error.to_string()));
    }
    if report.damaged.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    for damage in &report.damaged {
        note(&printable(&lost_line(damage)));
    }
    let good = report.damaged.iter().map(|damage| damage.good.as_deref());
    if let Some(good) = good.collect::<Option<Vec<_>>>()
        && let Some(good) = good.first()
    {
        return Err(anyhow!(
            "{} objects are damaged or missing at one address of store {} and right at another: copy the layers there anew (layerpack copy --all --recheck --from {good} --to ADDRESS)",
            report.damaged.len(),
            context.store_url()
        )
        .into());
    }
    Err(anyhow!(
        "{} objects in store {} are damaged: run repair, restore them from a copy of the store, or build their layers again",
        report.damaged.len(),
        context.store_url()
    )
    .into())
}
