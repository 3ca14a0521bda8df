//! `layerpack verify`: reads every byte of layers and checks it.

use std::process::ExitCode;

use anyhow::anyhow;
use layerpack_store::{Damage, Digest, LayerStore, PublicKey, VerifyReport};
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
    /// Whether it has a good signature that counts, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    signed: Option<bool>,
    /// Layers that it was made on and that are not in the store.
    missing_parents: Vec<String>,
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
    let layers = match (lost.layers.as_slice(), &lost.good) {
        ([], Some(_)) => "no layer, since another address has it".to_owned(),
        ([], None) => "no layer that is known".to_owned(),
        (layers, _) => layers.join(", "),
    };
    format!("{} (touches {layers}): {}", lost.object, lost.what)
}

pub(super) fn run(context: &Context, args: &VerifyArgs) -> Outcome {
    // Before anything is read.
    let keys = match args.signed {
        true => Some(signing::trusted(&args.key)?),
        false => None,
    };
    if args.all {
        return super::verify_all::run(context, args, keys.as_deref());
    }
    let references = args
        .refs
        .iter()
        .map(|text| parse_reference(text))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let store = context.store()?;
    let mut verified = Vec::with_capacity(references.len());
    for reference in &references {
        let report = store.verify(reference)?;
        let manifest = report.manifest;
        let mut layer = Verified::from(report);
        if let Some(keys) = &keys {
            let signed = match &manifest {
                Some(digest) => is_signed(&store, &layer.reference, digest, keys)?,
                None => false,
            };
            layer.signed = Some(signed);
        }
        verified.push(layer);
    }
    print(context.format, &verified, |out| {
        for layer in verified
            .iter()
            .filter(|layer| layer.damage.is_empty() && layer.signed != Some(false))
        {
            writeln!(
                out,
                "{} is good: {} chunks, {} ({} stored){}{}",
                layer.reference,
                layer.chunks,
                human_bytes(layer.raw_bytes),
                human_bytes(layer.stored_bytes),
                match layer.absent_frames {
                    0 => String::new(),
                    n => format!("; {n} frames are not in this store, which has only a part"),
                },
                without(&layer.missing_parents)
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
    let unsigned: Vec<&str> = verified
        .iter()
        .filter(|layer| layer.signed == Some(false))
        .map(|layer| layer.reference.as_str())
        .collect();
    if !unsigned.is_empty() {
        let error = lacks_signature(&unsigned, &args.key);
        if bad.is_empty() {
            return Err(error.into());
        }
        note(&printable(&error.to_string()));
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

/// What to add about a layer whose parents are not all in the store.
pub(super) fn without(missing_parents: &[String]) -> String {
    match missing_parents {
        [] => String::new(),
        names => format!(
            "; not in this store: {}, which it was made on",
            printable(&names.join(", "))
        ),
    }
}

/// Whether one of the keys signed the manifest; without keys, whether anybody did. Signatures that
/// are wrong are named.
pub(super) fn is_signed(
    store: &LayerStore,
    name: &str,
    manifest: &Digest,
    keys: &[PublicKey],
) -> anyhow::Result<bool> {
    let mut signed = false;
    for entry in store.signatures(manifest)? {
        match entry.signer {
            Ok(signer) => signed |= keys.is_empty() || keys.contains(&signer),
            Err(error) => note(&printable(&format!("{name}: {error}"))),
        }
    }
    Ok(signed)
}

/// The error about layers that none of the keys given signed, or nobody.
pub(super) fn lacks_signature(names: &[&str], keys: &[String]) -> anyhow::Error {
    anyhow!(
        "{} {} no good signature{}: sign with `layerpack sign`",
        names.join(", "),
        if names.len() == 1 { "has" } else { "have" },
        if keys.is_empty() {
            ""
        } else {
            " by the keys given"
        }
    )
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
            signed: None,
            missing_parents: report.missing_parents,
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
