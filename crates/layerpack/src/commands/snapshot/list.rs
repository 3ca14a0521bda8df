//! `layerpack snapshot ls`.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::UNIX_EPOCH;

use layerpack_store::transfer::matches;
use layerpack_store::{Kind, Manifest};
use serde::Serialize;

use super::super::Outcome;
use crate::args::SnapshotLsArgs;
use crate::context::Context;
use crate::output::{Table, print, warning};
use crate::stack::parse_reference;
use crate::units::human_bytes;

/// A snapshot in `-o json`.
#[derive(Debug, Serialize)]
struct Row {
    reference: String,
    digest: String,
    /// Apparent bytes of its files.
    size: u64,
    files: u64,
    /// The layers that it is made on, bottom first.
    stack: Vec<String>,
    labels: BTreeMap<String, String>,
    /// Seconds since 1970 by the store's clock, if it says.
    published: Option<u64>,
}

pub(super) fn run(context: &Context, args: &SnapshotLsArgs) -> Outcome {
    let store = context.store_that_is()?;
    let on = match &args.on {
        None => None,
        Some(text) => Some(store.resolve(&parse_reference(text)?)?),
    };
    let mut rows = Vec::new();
    for entry in store.entries()? {
        let reference = entry.reference;
        let named = |pattern: &String| matches(pattern, reference.name.as_str());
        // What nodes merged to mount it is no snapshot of anything.
        let own = reference.name.as_str() == crate::depth::NAME;
        if reference.kind != Kind::Diff || own || !args.name.iter().all(named) {
            continue;
        }
        let read = entry
            .manifest
            .and_then(|digest| Ok((digest, store.manifest(&digest)?)));
        match read {
            Ok((_, manifest))
                if on.is_some_and(|on| manifest.parents.iter().all(|p| p.manifest != on)) => {}
            Ok((digest, manifest)) => rows.push(Row {
                reference: reference.to_string(),
                digest: digest.to_string(),
                size: manifest.counts.bytes,
                files: manifest.counts.files,
                stack: stack(&manifest),
                labels: manifest.labels,
                published: entry
                    .modified
                    .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
                    .map(|since| since.as_secs()),
            }),
            // One that is damaged must not hide the others; `verify` says how.
            Err(error) => warning(&format!("{reference} cannot be read: {error}")),
        }
    }
    print(context.format, &rows, |out| {
        let mut table = Table::new(&["SNAPSHOT", "DIGEST", "SIZE", "FILES", "MADE ON"]);
        for row in &rows {
            table.row([
                row.reference.clone(),
                row.digest.chars().take(15).collect(),
                human_bytes(row.size),
                row.files.to_string(),
                row.stack.join(" "),
            ]);
        }
        table.write(out)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The layers that a snapshot is made on, by name where they have one.
pub(super) fn stack(manifest: &Manifest) -> Vec<String> {
    manifest
        .parents
        .iter()
        .map(|parent| {
            parent
                .reference
                .as_ref()
                .map_or_else(|| parent.manifest.to_string(), ToString::to_string)
        })
        .collect()
}
