//! `layerpack diff`: how two layers or stacks differ, by metadata and chunk digests.

use std::process::ExitCode;

use layerpack_packer::{ChangeKind, View};
use layerpack_store::LayerStore;
use serde::Serialize;

use super::{PathText, open};
use crate::args::DiffArgs;
use crate::commands::Outcome;
use crate::context::Context;
use crate::output::{print, printable_bytes};

/// A path in `-o json`.
#[derive(Debug, Serialize)]
struct Changed {
    #[serde(flatten)]
    path: PathText,
    change: &'static str,
    #[serde(rename = "type")]
    kind: &'static str,
    old_size: u64,
    new_size: u64,
    /// What differs in an entry that both have.
    differences: Vec<&'static str>,
}

pub(crate) fn diff(context: &Context, args: &DiffArgs) -> Outcome {
    let store = context.store_to_read()?;
    let side = |store: &LayerStore, text: &str| {
        let refs: Vec<String> = text.split(',').map(str::to_owned).collect();
        open(store, &refs, args.alone)
    };
    show(
        context,
        &side(&store, &args.old)?,
        &side(&store, &args.new)?,
    )
}

/// Prints how two views differ.
pub(crate) fn show(context: &Context, old: &View, new: &View) -> Outcome {
    let changes = old.diff(new);
    let shown: Vec<Changed> = changes
        .iter()
        .map(|c| Changed {
            path: PathText::new(&c.path),
            change: match c.kind {
                ChangeKind::Added => "added",
                ChangeKind::Changed => "changed",
                ChangeKind::Removed => "removed",
            },
            kind: c.entry.as_str(),
            old_size: c.old_size,
            new_size: c.new_size,
            differences: c.differences.iter().map(|d| d.as_str()).collect(),
        })
        .collect();
    print(context.format, &shown, |out| {
        for (change, shown) in changes.iter().zip(&shown) {
            let letter = match change.kind {
                ChangeKind::Added => 'A',
                ChangeKind::Changed => 'C',
                ChangeKind::Removed => 'D',
            };
            let what = match shown.differences.join(",") {
                text if text.is_empty() => text,
                text => format!("  ({text})"),
            };
            writeln!(out, "{letter} /{}{what}", printable_bytes(&change.path))?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}
