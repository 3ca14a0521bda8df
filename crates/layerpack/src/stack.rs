//! From references on the command line to the stack of layers they mean.
//!
//! References are given from the bottom up. A stack that begins with a diff is short for the
//! layers which that diff was made on, followed by what was given; a stack that begins with
//! anything else is taken as it is.

use anyhow::Context as _;
use layerpack_store::{Digest, Kind, LayerName, LayerStore, Manifest, Reference, Version, at_once};

use crate::depth;
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

/// Most layers a stack may have. Overlayfs takes 500; what mounts more has some merged first
/// ([`crate::depth`]).
const MAX_LAYERS: usize = 2000;

/// Manifests of parents that are asked for at once.
const PARENTS: usize = 8;

/// Most bytes of manifests that go along with a request to the daemon; it fetches the others itself.
const MAX_GIVEN: usize = 256 << 10;

/// The manifests of layers as they are stored, for a daemon that is to mount them.
pub(crate) fn manifests(layers: &[StackLayer]) -> Vec<String> {
    let mut room = MAX_GIVEN;
    let texts = layers.iter().filter_map(|layer| {
        let text = String::from_utf8(layer.manifest.to_bytes().ok()?).ok()?;
        room = room.checked_sub(text.len())?;
        Some(text)
    });
    texts.collect()
}

/// Parses a reference; the error says what one looks like.
pub(crate) fn parse_reference(text: &str) -> anyhow::Result<Reference> {
    Ok(text.parse()?)
}

/// The reference of a layer that somebody wants to publish.
///
/// # Errors
/// For what is no name or version, and for the name of the layers that mounts of long rows of diffs make:
/// whatever else had that name would be in their way.
pub(crate) fn named(kind: Kind, name: &str, version: &str) -> anyhow::Result<Reference> {
    let reference = Reference::new(kind, LayerName::new(name)?, Version::new(version)?);
    if name == depth::NAME {
        return Err(usage(format!(
            "the name {name} is reserved for layers that are made of long rows of diffs: choose another"
        )));
    }
    Ok(reference)
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
    let references = parse_all(references)?;
    let loaded = store.load_all(&references)?;
    assemble(&references, loaded, &|digest| Ok(store.manifest(digest)?))
}

/// Parses references.
///
/// # Errors
/// Of the first that is none.
pub(crate) fn parse_all(references: &[String]) -> anyhow::Result<Vec<Reference>> {
    (references.iter())
        .map(|text| parse_reference(text))
        .collect()
}

/// The stack that these layers mean, in the order of their references; `manifest` reads those of
/// parents.
///
/// # Errors
/// When a layer occurs twice, there are too many, or a parent cannot be had.
pub(crate) fn assemble(
    references: &[Reference],
    loaded: Vec<(Digest, Manifest)>,
    manifest: &(dyn Fn(&Digest) -> anyhow::Result<Manifest> + Sync),
) -> anyhow::Result<Vec<StackLayer>> {
    let mut given: Vec<StackLayer> = references
        .iter()
        .zip(loaded)
        .map(|(reference, (digest, manifest))| StackLayer {
            name: reference.to_string(),
            digest,
            manifest,
        })
        .collect();
    let mut stack = match given.first() {
        Some(first) if first.manifest.kind == Kind::Diff => parents(first, manifest)?,
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

fn parents(
    diff: &StackLayer,
    manifest: &(dyn Fn(&Digest) -> anyhow::Result<Manifest> + Sync),
) -> anyhow::Result<Vec<StackLayer>> {
    at_once(&diff.manifest.parents, PARENTS, |parent| {
        let name = parent
            .reference
            .as_ref()
            .map_or_else(|| parent.manifest.to_string(), ToString::to_string);
        let manifest = manifest(&parent.manifest)
            .with_context(|| format!("{} was made on {name}, which cannot be read", diff.name))?;
        Ok(StackLayer {
            name,
            digest: parent.manifest,
            manifest,
        })
    })
}
