//! `layerpack inspect`: one layer's manifest, or what the layers of a stack do to each other.

mod conflicts;

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Context as _;
use layerpack_erofs::Image;
use layerpack_store::query::shared_with;
use layerpack_store::{Digest, LayerStore, Manifest, Reference, SeedMarker};
use serde::Serialize;

use super::Outcome;
use crate::args::InspectArgs;
use crate::context::Context;
use crate::output::{Table, print, printable, warning};
use crate::stack::{self, StackLayer, parse_reference};
use crate::units::human_bytes;
use conflicts::{Conflict, Effect};

/// A layer in `-o json`.
#[derive(Debug, Serialize)]
struct Shown {
    reference: String,
    digest: String,
    layer_id: String,
    /// Whose good signatures the store holds.
    signers: Vec<String>,
    manifest: Manifest,
    /// Set where the store has only a part of it, seeded from another.
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<SeedMarker>,
    /// What it takes up, and shares with each other layer, most first.
    #[serde(skip_serializing_if = "Option::is_none")]
    sharing: Option<Sharing>,
}

/// Different chunks of a layer. Sizes in bytes.
#[derive(Debug, Serialize)]
struct Sharing {
    chunks: u64,
    raw_bytes: u64,
    /// Their part of the frames that they lie in.
    stored_bytes: u64,
    with: Vec<SharedWith>,
}

#[derive(Debug, Serialize)]
struct SharedWith {
    reference: String,
    chunks: u64,
    raw_bytes: u64,
}

/// A stack in `-o json`.
#[derive(Debug, Serialize)]
struct Stack {
    /// Bottom first.
    layers: Vec<String>,
    conflicts: Vec<Conflict>,
}

/// Layers that share something, in text.
const SHOWN: usize = 8;

pub(super) fn run(context: &Context, args: &InspectArgs) -> Outcome {
    let store = context.store_to_read()?;
    if args.stack {
        show_stack(context, &store, &args.refs)?;
    } else {
        show_layers(context, &store, args)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn show_layers(context: &Context, store: &LayerStore, args: &InspectArgs) -> anyhow::Result<()> {
    let mut shown = Vec::with_capacity(args.refs.len());
    for text in &args.refs {
        let reference = parse_reference(text)?;
        let (digest, manifest) = store.load(&reference)?;
        // A layer whose map is damaged can still be shown: `verify` tells the damage.
        let sharing = match args.no_sharing {
            true => None,
            false => sharing(store, &reference, &manifest)
                .map_err(|error| {
                    if context.says_warnings() {
                        warning(&format!("what {reference} shares is not known: {error:#}"));
                    }
                })
                .ok(),
        };
        shown.push(Shown {
            reference: reference.to_string(),
            digest: digest.to_string(),
            layer_id: manifest.layer_id().to_string(),
            signers: signers(context, store, &digest),
            part: part(context, store, &manifest),
            manifest,
            sharing,
        });
    }
    print(context.format, &shown, |out| {
        for (i, layer) in shown.iter().enumerate() {
            if i > 0 {
                writeln!(out)?;
            }
            describe(out, layer)?;
        }
        Ok(())
    })?;
    Ok(())
}

/// What the store says of a layer that it has only a part of.
fn part(context: &Context, store: &LayerStore, manifest: &Manifest) -> Option<SeedMarker> {
    store
        .seed_marker(&manifest.map.digest)
        .unwrap_or_else(|error| {
            if context.says_warnings() {
                warning(&error.to_string());
            }
            None
        })
}

/// Who signed a manifest. What cannot be told is a warning: a store that cannot list is no reason
/// to show nothing.
fn signers(context: &Context, store: &LayerStore, manifest: &Digest) -> Vec<String> {
    let warn = |error: &dyn std::fmt::Display| {
        if context.says_warnings() {
            warning(&error.to_string());
        }
    };
    let entries = store.signatures(manifest).unwrap_or_else(|error| {
        warn(&error);
        Vec::new()
    });
    entries
        .into_iter()
        .filter_map(|entry| match entry.signer {
            Ok(key) => Some(key.to_string()),
            Err(error) => {
                warn(&error);
                None
            }
        })
        .collect()
}

fn sharing(
    store: &LayerStore,
    reference: &Reference,
    manifest: &Manifest,
) -> anyhow::Result<Sharing> {
    let (all, with) = shared_with(store, reference, manifest)?;
    Ok(Sharing {
        chunks: all.chunks,
        raw_bytes: all.raw_bytes,
        stored_bytes: all.stored_bytes,
        with: with
            .into_iter()
            .map(|s| SharedWith {
                reference: s.reference.to_string(),
                chunks: s.amount.chunks,
                raw_bytes: s.amount.raw_bytes,
            })
            .collect(),
    })
}

fn describe(out: &mut dyn Write, layer: &Shown) -> io::Result<()> {
    let manifest = &layer.manifest;
    let counts = &manifest.counts;
    let mut line = |key: &str, value: String| writeln!(out, "{key:<11} {}", printable(&value));
    line("layer", layer.reference.clone())?;
    line("digest", layer.digest.clone())?;
    line("layer id", layer.layer_id.clone())?;
    line("platform", manifest.platform.clone())?;
    for signer in &layer.signers {
        line("signed by", signer.clone())?;
    }
    line(
        "contents",
        format!(
            "{} files, {} directories, {} symlinks, {} others, {}",
            counts.files,
            counts.directories,
            counts.symlinks,
            counts.others,
            human_bytes(counts.bytes)
        ),
    )?;
    line(
        "metadata",
        format!(
            "{} {}",
            manifest.meta.digest,
            human_bytes(manifest.meta.size)
        ),
    )?;
    line(
        "map",
        format!("{} {}", manifest.map.digest, human_bytes(manifest.map.size)),
    )?;
    line("data", human_bytes(manifest.data_size))?;
    if let Some(part) = &layer.part {
        let (here, all) = (part.present_frames, part.frames);
        let text = format!(
            "{here} of {all} frames are in this store, the others in {}",
            part.origin
        );
        line("part", text)?;
    }
    if let Some(sharing) = &layer.sharing {
        line(
            "chunks",
            format!(
                "{}, {}, {} stored",
                sharing.chunks,
                human_bytes(sharing.raw_bytes),
                human_bytes(sharing.stored_bytes)
            ),
        )?;
        for with in sharing.with.iter().take(SHOWN) {
            let shared = human_bytes(with.raw_bytes);
            let text = format!("{} chunks, {shared} with {}", with.chunks, with.reference);
            line("shares", text)?;
        }
        if let Some(more) = sharing.with.len().checked_sub(SHOWN).filter(|n| *n > 0) {
            line(
                "shares",
                format!("with {more} more layers (-o json has all)"),
            )?;
        }
    }
    for parent in &manifest.parents {
        let name = parent
            .reference
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default();
        line(
            "parent",
            format!("{name} {}", parent.manifest)
                .trim_start()
                .to_owned(),
        )?;
    }
    for (what, map) in [
        ("parameter", &manifest.parameters),
        ("label", &manifest.labels),
        ("annotation", &manifest.annotations),
    ] {
        for (key, value) in map {
            line(what, format!("{key}={value}"))?;
        }
    }
    Ok(())
}

fn show_stack(context: &Context, store: &LayerStore, references: &[String]) -> anyhow::Result<()> {
    let layers = stack::resolve(store, references)?;
    let mut sources = Vec::with_capacity(layers.len());
    for layer in &layers {
        sources.push((
            layer,
            store.meta(&layer.manifest)?,
            store.map(&layer.manifest)?,
        ));
    }
    let mut opened = Vec::with_capacity(sources.len());
    for (layer, meta, map) in &sources {
        opened.push(conflicts::Layer {
            name: &layer.name,
            image: Image::open(meta).with_context(|| unreadable(layer))?,
            implicit: map
                .implicit_dirs()
                .iter()
                .map(Vec::as_slice)
                .collect::<BTreeSet<&[u8]>>(),
        });
    }
    let found = Stack {
        layers: layers.iter().map(|layer| layer.name.clone()).collect(),
        conflicts: conflicts::find(&opened)?,
    };
    print(context.format, &found, |out| {
        if found.conflicts.is_empty() {
            return writeln!(out, "no conflicts in {}", found.layers.join(" "));
        }
        let mut table = Table::new(&["EFFECT", "PATH", "LAYERS (bottom first)"]);
        for conflict in &found.conflicts {
            let effect = match conflict.effect {
                Effect::Replaces => "replaces",
                Effect::Type => "type",
                Effect::Deletes => "deletes",
                Effect::Hides => "hides",
                Effect::Attributes => "attributes",
            };
            table.row([
                effect.to_owned(),
                conflict.path.clone(),
                conflict.layers.join(" "),
            ]);
        }
        table.write(out)
    })?;
    Ok(())
}

fn unreadable(layer: &StackLayer) -> String {
    format!(
        "{}: its metadata is no image this version reads (`layerpack verify {}`)",
        layer.name, layer.name
    )
}
