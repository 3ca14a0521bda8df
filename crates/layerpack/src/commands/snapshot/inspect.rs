//! `layerpack snapshot inspect`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use layerpack_packer::{EntryKind, View};
use layerpack_store::Kind;
use serde::Serialize;

use super::super::Outcome;
use crate::args::SnapshotInspectArgs;
use crate::context::Context;
use crate::failure::usage;
use crate::output::print;
use crate::stack::parse_reference;
use crate::units::human_bytes;

/// A snapshot in `-o json`.
#[derive(Debug, Serialize)]
struct Shown {
    reference: String,
    digest: String,
    layer_id: String,
    /// The layers that it is made on, bottom first.
    stack: Vec<Below>,
    /// Entries by type; `whiteout` is what it removes.
    entries: BTreeMap<&'static str, u64>,
    /// Apparent bytes of its files.
    bytes: u64,
    /// Digest of the rules that it was scrubbed by, if any.
    rules: Option<String>,
    parameters: BTreeMap<String, String>,
    labels: BTreeMap<String, String>,
    platform: String,
}

#[derive(Debug, Serialize)]
struct Below {
    reference: Option<String>,
    digest: String,
    /// Whether the store has it.
    present: bool,
}

pub(super) fn run(context: &Context, args: &SnapshotInspectArgs) -> Outcome {
    let store = context.store()?;
    let reference = parse_reference(&args.reference)?;
    if reference.kind != Kind::Diff {
        let other = "use `layerpack inspect` for other layers";
        return Err(usage(format!("{reference} is no snapshot: {other}")).into());
    }
    let (digest, manifest) = store.load(&reference)?;
    let stack: Vec<Below> = manifest
        .parents
        .iter()
        .map(|parent| Below {
            reference: parent.reference.as_ref().map(ToString::to_string),
            digest: parent.manifest.to_string(),
            present: store.manifest(&parent.manifest).is_ok(),
        })
        .collect();
    let view = View::open(&store, &[(digest, manifest.clone())])?;
    let mut entries: BTreeMap<&'static str, u64> = BTreeMap::new();
    for entry in view.entries() {
        *entries.entry(EntryKind::as_str(entry.kind)).or_default() += 1;
    }
    let shown = Shown {
        reference: reference.to_string(),
        digest: digest.to_string(),
        layer_id: manifest.layer_id().to_string(),
        stack,
        entries,
        bytes: manifest.counts.bytes,
        rules: manifest.parameters.get("scrub-rules").cloned(),
        parameters: manifest.parameters,
        labels: manifest.labels,
        platform: manifest.platform,
    };
    print(context.format, &shown, |out| {
        writeln!(out, "{} {}", shown.reference, shown.digest)?;
        writeln!(out, "layer id  {}", shown.layer_id)?;
        let counts: Vec<String> = shown
            .entries
            .iter()
            .map(|(kind, count)| format!("{count} {kind}"))
            .collect();
        writeln!(
            out,
            "holds     {}; {}",
            counts.join(", "),
            human_bytes(shown.bytes)
        )?;
        match &shown.rules {
            Some(digest) => writeln!(out, "rules     {digest}")?,
            None => writeln!(out, "rules     none")?,
        }
        for (key, value) in &shown.labels {
            writeln!(out, "label     {key}={value}")?;
        }
        writeln!(out, "made on, bottom first:")?;
        for below in &shown.stack {
            let name = below.reference.as_deref().unwrap_or("(no name)");
            let there = if below.present {
                ""
            } else {
                "  missing in this store: pull the snapshot again"
            };
            writeln!(out, "  {name} {}{there}", below.digest)?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}
