//! `layerpack du`: what layers take up, and what of it they share.

use std::process::ExitCode;

use layerpack_store::Leftovers;
use layerpack_store::query::{Amount, usage};
use serde::Serialize;

use crate::args::DuArgs;
use crate::commands::Outcome;
use crate::context::Context;
use crate::output::{Table, print, warning};
use crate::stack::parse_reference;
use crate::units::human_bytes;

/// What is shown in `-o json`. Sizes in bytes.
#[derive(Debug, Serialize)]
struct Shown {
    layers: Vec<Layer>,
    kinds: Vec<KindSum>,
    /// Different chunks of all layers of the store.
    total: Sizes,
    unreadable: Vec<String>,
    /// What lies in the store that is no object.
    temporaries: Leftovers,
}

#[derive(Debug, Serialize)]
struct Layer {
    reference: String,
    digest: String,
    all: Sizes,
    /// Of chunks that no other layer has.
    unique: Sizes,
    shared: Sizes,
    /// Metadata image, map and locator, as stored.
    metadata_bytes: u64,
}

#[derive(Debug, Serialize)]
struct KindSum {
    kind: &'static str,
    layers: u64,
    all: Sizes,
    /// Of chunks that no layer of another kind has.
    unique: Sizes,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Sizes {
    chunks: u64,
    raw_bytes: u64,
    stored_bytes: u64,
}

impl From<Amount> for Sizes {
    fn from(amount: Amount) -> Self {
        Self {
            chunks: amount.chunks,
            raw_bytes: amount.raw_bytes,
            stored_bytes: amount.stored_bytes,
        }
    }
}

fn less(all: Amount, unique: Amount) -> Sizes {
    Sizes {
        chunks: all.chunks.saturating_sub(unique.chunks),
        raw_bytes: all.raw_bytes.saturating_sub(unique.raw_bytes),
        stored_bytes: all.stored_bytes.saturating_sub(unique.stored_bytes),
    }
}

pub(crate) fn du(context: &Context, args: &DuArgs) -> Outcome {
    let references = args
        .refs
        .iter()
        .map(|text| parse_reference(text))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let store = if references.is_empty() {
        context.store_to_list()?
    } else {
        context.store_to_read()?
    };
    for reference in &references {
        store.resolve(reference)?;
    }
    let usage = usage(&store)?;
    let wanted = |reference| references.is_empty() || references.contains(reference);
    for (reference, error) in &usage.unreadable {
        if references.contains(reference) {
            return Err(anyhow::anyhow!("{reference} cannot be read: {error}").into());
        }
    }
    let shown = Shown {
        layers: usage
            .layers
            .iter()
            .filter(|layer| wanted(&layer.reference))
            .map(|layer| Layer {
                reference: layer.reference.to_string(),
                digest: layer.digest.to_string(),
                all: layer.all.into(),
                unique: layer.unique.into(),
                shared: less(layer.all, layer.unique),
                metadata_bytes: layer.metadata_bytes,
            })
            .collect(),
        kinds: usage
            .kinds
            .iter()
            .map(|kind| KindSum {
                kind: kind.kind.as_str(),
                layers: kind.layers,
                all: kind.all.into(),
                unique: kind.unique.into(),
            })
            .collect(),
        total: usage.total.into(),
        unreadable: usage
            .unreadable
            .iter()
            .map(|(reference, error)| format!("{reference}: {error}"))
            .collect(),
        temporaries: store.blobs().leftovers(false)?,
    };
    for line in shown.unreadable.iter().filter(|_| context.says_warnings()) {
        warning(&format!("not counted: {line}"));
    }
    print(context.format, &shown, |out| {
        let mut table = Table::new(&[
            "LAYER",
            "RAW",
            "STORED",
            "UNIQUE",
            "UNIQUE STORED",
            "SHARED",
        ]);
        for layer in &shown.layers {
            table.row([
                layer.reference.clone(),
                human_bytes(layer.all.raw_bytes),
                human_bytes(layer.all.stored_bytes),
                human_bytes(layer.unique.raw_bytes),
                human_bytes(layer.unique.stored_bytes),
                human_bytes(layer.shared.raw_bytes),
            ]);
        }
        for kind in shown.kinds.iter().filter(|_| references.is_empty()) {
            table.row([
                format!("all {} ({})", kind.kind, kind.layers),
                human_bytes(kind.all.raw_bytes),
                human_bytes(kind.all.stored_bytes),
                human_bytes(kind.unique.raw_bytes),
                human_bytes(kind.unique.stored_bytes),
                human_bytes(kind.all.raw_bytes.saturating_sub(kind.unique.raw_bytes)),
            ]);
        }
        table.write(out)?;
        if references.is_empty() {
            writeln!(
                out,
                "{} in different chunks, {} stored",
                human_bytes(shown.total.raw_bytes),
                human_bytes(shown.total.stored_bytes)
            )?;
            crate::commands::gc::temporaries(out, &shown.temporaries)?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}
