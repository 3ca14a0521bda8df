//! Names of layers by what this node knows of them, for mounting while their store cannot be asked.
//!
//! The node keeps the manifest of every layer that it mounted, and a published version does not
//! change. So a version that was mounted here before can be mounted again from the node's cache. A
//! store that answers is always believed instead.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context as _, bail};
use layerpack_store::{Digest, LayerStore, Manifest, Reference, StoreError};

use crate::context::Context;
use crate::output::warning;
use crate::stack::{self, StackLayer};

/// As [`stack::resolve`]; where the store cannot be asked, by the node's copies of manifests, with a
/// warning.
///
/// # Errors
/// Those of [`stack::resolve`].
pub(crate) fn resolve(
    context: &Context,
    store: &LayerStore,
    references: &[String],
) -> anyhow::Result<Vec<StackLayer>> {
    let error = match stack::resolve(store, references) {
        Err(error) if is_away(&error) => error,
        resolved => return resolved,
    };
    let known = Known::read(context.root());
    let Ok(layers) = known.resolve(references) else {
        // Why the store does not answer says more than what this node lacks.
        return Err(error);
    };
    if context.says_warnings() {
        warning(&format!(
            "the store {} cannot be asked: {} mounted as this node last had {}",
            store.url(),
            references.join(" "),
            if references.len() == 1 { "it" } else { "them" }
        ));
    }
    Ok(layers)
}

/// Whether the store cannot be asked at all: it cannot be reached, or there is nothing at its place.
fn is_away(error: &anyhow::Error) -> bool {
    let cause = (error.chain()).find_map(|cause| cause.downcast_ref::<StoreError>());
    match cause {
        Some(StoreError::NoStore { .. }) => true,
        Some(cause) => cause.is_transient(),
        None => false,
    }
}

/// The manifests that a node has copies of.
#[derive(Debug, Default)]
struct Known {
    manifests: BTreeMap<Digest, Manifest>,
    /// By name: the one that was written last.
    names: BTreeMap<Reference, (SystemTime, Digest)>,
}

impl Known {
    /// Reads them. What is damaged, or cannot be read by this user, is not known.
    fn read(root: &Path) -> Self {
        let mut known = Self::default();
        let Ok(entries) = fs_err::read_dir(root.join("manifests")) else {
            return known;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let digest = name
                .to_str()
                .and_then(|hex| format!("b3:{hex}").parse::<Digest>().ok());
            let bytes = fs_err::read(entry.path()).ok();
            let Some((digest, bytes)) = digest.zip(bytes) else {
                continue;
            };
            if Digest::of(&bytes) != digest {
                continue;
            }
            let Ok(manifest) = Manifest::from_bytes(&bytes) else {
                continue;
            };
            let written = entry.metadata().and_then(|found| found.modified());
            let written = written.unwrap_or(SystemTime::UNIX_EPOCH);
            let newest = known
                .names
                .entry(manifest.reference())
                .or_insert((written, digest));
            if written >= newest.0 {
                *newest = (written, digest);
            }
            known.manifests.insert(digest, manifest);
        }
        known
    }

    fn manifest(&self, digest: &Digest) -> anyhow::Result<Manifest> {
        let found = self.manifests.get(digest).cloned();
        found.with_context(|| format!("this node does not know the layer {digest}"))
    }

    fn resolve(&self, references: &[String]) -> anyhow::Result<Vec<StackLayer>> {
        let references = stack::parse_all(references)?;
        let mut loaded = Vec::with_capacity(references.len());
        for reference in &references {
            let Some((_, digest)) = self.names.get(reference) else {
                bail!("this node does not know {reference}");
            };
            loaded.push((*digest, self.manifest(digest)?));
        }
        stack::assemble(&references, loaded, &|digest| self.manifest(digest))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use layerpack_packer::{PackDiffOptions, Silent, pack_diff};
    use layerpack_store::MemStore;

    use super::*;

    #[test]
    fn copies_of_manifests_stand_for_names() {
        let dir = tempfile::tempdir().unwrap();
        let store = LayerStore::new(Arc::new(MemStore::new()));
        let (upper, copies) = (dir.path().join("upper"), dir.path().join("manifests"));
        fs_err::create_dir(&upper).unwrap();
        fs_err::create_dir(&copies).unwrap();
        let publish = |name: &str| {
            let reference: Reference = name.parse().unwrap();
            let options = PackDiffOptions::new(reference.clone(), upper.clone());
            pack_diff(&store, &options, &Silent).unwrap();
            store.load(&reference).unwrap()
        };
        let keep = |digest: &Digest, bytes: &[u8]| {
            fs_err::write(copies.join(digest.hex()), bytes).unwrap();
        };
        let (first, manifest) = publish("diff/a:1");
        keep(&first, &manifest.to_bytes().unwrap());
        let (second, manifest) = publish("diff/b:1");
        let mut damaged = manifest.to_bytes().unwrap();
        damaged.push(b' ');
        keep(&second, &damaged);
        fs_err::write(copies.join("note"), "x").unwrap();
        let known = Known::read(dir.path());
        let found = known.resolve(&["diff/a:1".to_owned()]).unwrap();
        assert_eq!((found.len(), found[0].digest), (1, first));
        for absent in ["diff/a:2", "diff/b:1", "no reference"] {
            known.resolve(&[absent.to_owned()]).unwrap_err();
        }
        Known::read(&dir.path().join("none"))
            .resolve(&["diff/a:1".to_owned()])
            .unwrap_err();
    }
}
