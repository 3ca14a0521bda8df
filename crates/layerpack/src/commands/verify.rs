//! `layerpack verify`: reads every byte of layers and checks it.

use std::path::Path;
use std::process::ExitCode;

use anyhow::anyhow;
use layerpack_store::{Damage, LayerStore, PublicKey, Reference, VerifyReport};
use serde::Serialize;

use super::Outcome;
use crate::args::VerifyArgs;
use crate::context::Context;
use crate::output::{note, print, printable};
use crate::signing;
use crate::stack::parse_reference;
use crate::units::human_bytes;

/// One layer in `-o json`.
#[derive(Debug, Serialize)]
struct Verified {
    reference: String,
    digest: Option<String>,
    layer_id: Option<String>,
    objects: u64,
    frames: u64,
    chunks: u64,
    /// Bytes read from the store.
    stored_bytes: u64,
    /// Bytes of file contents that were checked.
    raw_bytes: u64,
    /// Frames that are elsewhere, since the store has only a part of the layer.
    absent_frames: u64,
    damage: Vec<Damaged>,
    /// What is wrong around the layer, without harm to it.
    warnings: Vec<String>,
}

/// A damaged object.
#[derive(Debug, Serialize)]
struct Damaged {
    object: String,
    /// First byte and the byte after the last, when not all of it is concerned.
    range: Option<(u64, u64)>,
    what: String,
    /// What cannot be read because of it: ranges of the layer's data.
    data: Vec<(u64, u64)>,
}

/// A damaged object and the layers that it touches, on one line.
pub(super) fn lost_line(lost: &layerpack_store::Lost) -> String {
    let layers = if lost.layers.is_empty() {
        "no layer that is known".to_owned()
    } else {
        lost.layers.join(", ")
    };
    format!("{} (touches {layers}): {}", lost.object, lost.what)
}

pub(super) fn run(context: &Context, args: &VerifyArgs) -> Outcome {
    if args.all {
        return super::verify_all::run(context, args.read_data);
    }
    let references = args
        .refs
        .iter()
        .map(|text| parse_reference(text))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let store = context.store()?;
    let mut verified = Vec::with_capacity(references.len());
    for reference in &references {
        verified.push(Verified::from(store.verify(reference)?));
    }
    let unsigned = if args.signed {
        unsigned(&store, &references, &args.key)?
    } else {
        Vec::new()
    };
    print(context.format, &verified, |out| {
        for layer in verified
            .iter()
            .filter(|layer| layer.damage.is_empty() && !unsigned.contains(&layer.reference))
        {
            writeln!(
                out,
                "{} is good: {} chunks, {} ({} stored){}",
                layer.reference,
                layer.chunks,
                human_bytes(layer.raw_bytes),
                human_bytes(layer.stored_bytes),
                match layer.absent_frames {
                    0 => String::new(),
                    n => format!("; {n} frames are not in this store, which has only a part"),
                }
            )?;
        }
        Ok(())
    })?;
    for layer in verified.iter().filter(|_| context.says_warnings()) {
        for warning in &layer.warnings {
            note(&printable(&format!(
                "{}: warning: {warning}",
                layer.reference
            )));
        }
    }
    let mut bad = Vec::new();
    for layer in verified.iter().filter(|layer| !layer.damage.is_empty()) {
        for damage in &layer.damage {
            note(&printable(&format!(
                "{}: {}",
                layer.reference,
                damage.text()
            )));
        }
        bad.push(layer.reference.as_str());
    }
    if bad.is_empty() && !unsigned.is_empty() {
        return Err(anyhow!(
            "{} {} no good signature{}: sign with `layerpack sign`",
            unsigned.join(", "),
            if unsigned.len() == 1 { "has" } else { "have" },
            if args.key.is_empty() {
                ""
            } else {
                " by the keys given"
            }
        )
        .into());
    }
    if bad.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(anyhow!(
        "{} damaged in store {}: restore the objects above from a copy of the store, or build the layer again",
        if bad.len() == 1 { format!("{} is", bad.concat()) } else { format!("{} are", bad.join(", ")) },
        context.store_url()
    )
    .into())
}

/// The layers that none of the keys signed; without keys, those that nobody did.
fn unsigned(
    store: &LayerStore,
    references: &[Reference],
    keys: &[String],
) -> anyhow::Result<Vec<String>> {
    let keys = keys
        .iter()
        .map(|text| match text.parse::<PublicKey>() {
            Ok(key) => Ok(key),
            Err(_) => signing::public(Path::new(text)),
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut unsigned = Vec::new();
    for reference in references {
        let manifest = store.resolve(reference)?;
        let signed = store
            .signatures(&manifest)?
            .into_iter()
            .any(|entry| match entry.signer {
                Ok(signer) => keys.is_empty() || keys.contains(&signer),
                Err(error) => {
                    note(&printable(&format!("{reference}: {error}")));
                    false
                }
            });
        if !signed {
            unsigned.push(reference.to_string());
        }
    }
    Ok(unsigned)
}

impl From<VerifyReport> for Verified {
    fn from(report: VerifyReport) -> Self {
        Self {
            reference: report.reference.to_string(),
            digest: report.manifest.map(|digest| digest.to_string()),
            layer_id: report.layer_id.map(|id| id.to_string()),
            objects: report.objects,
            frames: report.frames,
            chunks: report.chunks,
            stored_bytes: report.stored_bytes,
            raw_bytes: report.raw_bytes,
            absent_frames: report.absent_frames,
            damage: report.damaged.into_iter().map(Damaged::from).collect(),
            warnings: report.warnings,
        }
    }
}

impl From<Damage> for Damaged {
    fn from(damage: Damage) -> Self {
        Self {
            object: damage.key,
            range: damage.range.map(|range| (range.start, range.end)),
            what: damage.what,
            data: damage
                .data
                .into_iter()
                .map(|range| (range.start, range.end))
                .collect(),
        }
    }
}

impl Damaged {
    fn text(&self) -> String {
        let range = self
            .range
            .map(|(start, end)| format!(" bytes {start}..{end}"))
            .unwrap_or_default();
        let lost: u64 = self
            .data
            .iter()
            .map(|(start, end)| end.saturating_sub(*start))
            .sum();
        let lost = if lost == 0 {
            String::new()
        } else {
            format!("; {} of the layer cannot be read", human_bytes(lost))
        };
        format!("{}{range} is damaged: {}{lost}", self.object, self.what)
    }
}
