//! `layerpack rm`: takes references out of the store.
//!
//! Contents stay, since other layers may share them and nodes may have them mounted.

use std::process::ExitCode;

use layerpack_store::{LayerStore, Reference};
use serde::Serialize;

use super::Outcome;
use crate::args::RmArgs;
use crate::context::Context;
use crate::output::{print, warning};
use crate::stack::parse_reference;

#[derive(Debug, Serialize)]
struct Removed {
    removed: Vec<String>,
}

pub(super) fn run(context: &Context, args: &RmArgs) -> Outcome {
    // All are looked up first: a typing error in the last must not leave half of it done.
    let references = args
        .refs
        .iter()
        .map(|text| parse_reference(text))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let store = context.store()?;
    for reference in &references {
        // A reference that is there but damaged can be taken out too: that mends it.
        if !store.has_reference(reference)? {
            store.resolve(reference)?;
        }
    }
    let mut done = Removed {
        removed: Vec::new(),
    };
    for reference in &references {
        store.remove(reference)?;
        done.removed.push(reference.to_string());
    }
    if context.says_warnings() {
        match dangling(&store, &references) {
            Ok(lines) => lines.iter().for_each(|line| warning(line)),
            Err(error) => warning(&format!("cannot tell which channels point to it: {error}")),
        }
    }
    print(context.format, &done, |out| {
        for reference in &done.removed {
            writeln!(out, "{reference}")?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Channels that point to what was removed: they keep its data.
fn dangling(store: &LayerStore, removed: &[Reference]) -> anyhow::Result<Vec<String>> {
    let mut lines = Vec::new();
    for entry in store.channels()? {
        let Ok(channel) = &entry.channel else {
            continue;
        };
        let target = entry.name.version(channel.current.version.clone());
        if removed.contains(&target) {
            lines.push(format!(
                "channel {} still points to {target} and keeps its data; move it (tag) or remove it (untag)",
                entry.name
            ));
        }
    }
    Ok(lines)
}
