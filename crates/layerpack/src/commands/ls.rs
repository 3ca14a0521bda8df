//! `layerpack ls`: the store's layers.

use std::process::ExitCode;

use anyhow::Context as _;
use layerpack_store::Kind;
use serde::Serialize;

use super::Outcome;
use crate::args::LsArgs;
use crate::context::Context;
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
}

pub(super) fn run(context: &Context, args: &LsArgs) -> Outcome {
    let kind = args.kind.as_deref().map(parse_kind).transpose()?;
    let store = context.store()?;
    let mut rows = Vec::new();
    let mut unreadable = Vec::new();
    for entry in store.entries()? {
        let reference = entry.reference;
        if kind.is_some_and(|kind| kind != reference.kind) {
            continue;
        }
        match entry
            .manifest
            .and_then(|digest| Ok((digest, store.manifest(&digest)?)))
        {
            Ok((digest, manifest)) => rows.push(Row {
                reference: reference.to_string(),
                digest: digest.to_string(),
                size: manifest.counts.bytes,
                files: manifest.counts.files,
                platform: manifest.platform,
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
    text.parse::<Kind>().with_context(|| {
        format!("{text:?} is no kind of layer: use base, workspace, toolkit or diff")
    })
}
