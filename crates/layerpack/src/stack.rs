//! From references on the command line to the stack of layers they mean.
//!
//! References are given from the bottom up. A stack that begins with a diff is short for the
//! layers which that diff was made on, followed by what was given; a stack that begins with
//! anything else is taken as it is.

use anyhow::Context as _;
use layerpack_store::{Digest, Kind, LayerStore, Manifest, Reference};

use crate::failure::usage;

/// One layer of a stack.
#[derive(Debug, Clone)]
pub(crate) struct StackLayer {
    /// `kind/name:version`, or the digest for a layer known by its digest only.
    pub(crate) name: String,
    /// Digest of its manifest.
    pub(crate) digest: Digest,
    /// Its manifest.
    pub(crate) manifest: Manifest,
}

/// Most layers a stack may have; overlayfs itself takes 500.
const MAX_LAYERS: usize = 400;

/// Parses a reference; the error says what one looks like.
pub(crate) fn parse_reference(text: &str) -> anyhow::Result<Reference> {
    Ok(text.parse()?)
}

/// Resolves references, bottom first.
///
/// # Errors
/// When a reference cannot be read or is unknown, a layer occurs twice, or a diff's parent is no
/// longer in the store.
pub(crate) fn resolve(
    store: &LayerStore,
    references: &[String],
) -> anyhow::Result<Vec<StackLayer>> {
    let mut given = Vec::with_capacity(references.len());
    for text in references {
        let reference = parse_reference(text)?;
        let (digest, manifest) = store.load(&reference)?;
        given.push(StackLayer {
            name: reference.to_string(),
            digest,
            manifest,
        });
    }
    let mut stack = match given.first() {
        Some(first) if first.manifest.kind == Kind::Diff => parents(store, first)?,
        _ => Vec::new(),
    };
    stack.append(&mut given);
    if stack.len() > MAX_LAYERS {
        return Err(usage(format!(
            "a stack of {} layers is too high: {MAX_LAYERS} is the limit, merge some first",
            stack.len()
        )));
    }
    for (i, layer) in stack.iter().enumerate() {
        if stack
            .iter()
            .take(i)
            .any(|other| other.digest == layer.digest)
        {
            return Err(usage(format!(
                "{} is in the stack twice: name each layer once (a leading diff brings its parents along)",
                layer.name
            )));
        }
    }
    Ok(stack)
}

fn parents(store: &LayerStore, diff: &StackLayer) -> anyhow::Result<Vec<StackLayer>> {
    let mut layers = Vec::with_capacity(diff.manifest.parents.len());
    for parent in &diff.manifest.parents {
        let name = parent
            .reference
            .as_ref()
            .map_or_else(|| parent.manifest.to_string(), ToString::to_string);
        let manifest = store
            .manifest(&parent.manifest)
            .with_context(|| format!("{} was made on {name}, which cannot be read", diff.name))?;
        layers.push(StackLayer {
            name,
            digest: parent.manifest,
            manifest,
        });
    }
    Ok(layers)
}
