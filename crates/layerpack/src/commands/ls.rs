//! `layerpack ls`: the store's layers.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::UNIX_EPOCH;

use layerpack_store::transfer::matches;
use layerpack_store::{Kind, Manifest};
use serde::Serialize;

use super::Outcome;
use crate::args::LsArgs;
use crate::context::Context;
use crate::failure::usage;
use crate::output::{Table, note, print, printable};
use crate::units::human_bytes;

/// One layer in `-o json`.
#[derive(Debug, Serialize)]
struct Row {
    reference: String,
    digest: String,
    /// Bytes of file contents, uncompressed.
    size: u64,
    files: u64,
    platform: String,
    labels: BTreeMap<String, String>,
    /// Seconds since 1970 by the store's clock, if it says.
    published: Option<u64>,
}

/// Whether the layer has all of these labels: `KEY` with any value, or `KEY=VALUE`.
fn has_labels(manifest: &Manifest, wanted: &[String]) -> bool {
    wanted.iter().all(|text| match text.split_once('=') {
        Some((key, value)) => manifest.labels.get(key).is_some_and(|v| v == value),
        None => manifest.labels.contains_key(text),
    })
}

pub(super) fn run(context: &Context, args: &LsArgs) -> Outcome {
    let kind = args.kind.as_deref().map(parse_kind).transpose()?;
    let store = context.store_to_list()?;
    let mut rows = Vec::new();
    let mut unreadable = Vec::new();
    for entry in store.entries()? {
        let reference = entry.reference;
        // What the store does not date is shown: it may be as young.
        let age = entry.modified.and_then(|time| time.elapsed().ok());
        if args
            .since
            .zip(age)
            .is_some_and(|(limit, age)| age > limit.0)
        {
            continue;
        }
        let named = |pattern: &String| matches(pattern, reference.name.as_str());
        if kind.is_some_and(|kind| kind != reference.kind) || !args.name.iter().all(named) {
            continue;
        }
        match entry
            .manifest
            .and_then(|digest| Ok((digest, store.manifest(&digest)?)))
        {
            Ok((_, manifest)) if !has_labels(&manifest, &args.label) => {}
            Ok((digest, manifest)) => rows.push(Row {
                reference: reference.to_string(),
                digest: digest.to_string(),
                size: manifest.counts.bytes,
                files: manifest.counts.files,
                platform: manifest.platform,
                labels: manifest.labels,
                published: entry
                    .modified
                    .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
                    .map(|d| d.as_secs()),
            }),
            // One bad layer must not hide the others.
            Err(error) => unreadable
                .push(anyhow::Error::new(error).context(format!("{reference} cannot be read"))),
        }
    }
    print(context.format, &rows, |out| {
        let mut table = Table::new(&["LAYER", "DIGEST", "SIZE", "FILES", "PLATFORM"]);
        for row in &rows {
            let digest = row.digest.chars().take(15).collect();
            table.row([
                row.reference.clone(),
                digest,
                human_bytes(row.size),
                row.files.to_string(),
                row.platform.clone(),
            ]);
        }
        table.write(out)
    })?;
    let count = unreadable.len();
    match unreadable.pop() {
        None => Ok(ExitCode::SUCCESS),
        Some(last) => {
            for error in &unreadable {
                note(&format!("warning: {}", printable(&format!("{error:#}"))));
            }
            Err(last
                .context(format!(
                    "{count} layers of the store are damaged (`layerpack verify` says how)"
                ))
                .into())
        }
    }
}

/// Parses a kind; the error lists them.
pub(super) fn parse_kind(text: &str) -> anyhow::Result<Kind> {
    text.parse::<Kind>().map_err(|_| {
        usage(format!(
            "{text:?} is no kind of layer: use base, workspace, toolkit or diff"
        ))
    })
}
