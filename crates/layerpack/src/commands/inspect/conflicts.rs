//! Which paths more than one layer of a stack defines, and how that ends.
//!
//! Only directories that at least two layers have are entered, so the cost follows what layers
//! share, not what they hold. A directory in several layers is no conflict by itself: overlayfs
//! merges them.

use std::collections::BTreeMap;

use anyhow::Context as _;
use layerpack_erofs::{FileType, Image, Inode};
use serde::Serialize;

use crate::output::printable_bytes;

/// Longest path that is followed; images cannot make this loop for ever.
const MAX_PATH: usize = 64 << 10;
/// Marks an opaque directory.
const OPAQUE: &[u8] = b"trusted.overlay.opaque";

/// One layer as the search needs it.
pub(super) struct Layer<'a> {
    /// Its name.
    pub(super) name: &'a str,
    /// Its metadata.
    pub(super) image: Image<'a>,
    /// Its implicit directories: paths without a leading `/`, the root as an empty one.
    pub(super) implicit: std::collections::BTreeSet<&'a [u8]>,
}

/// How a path's definitions relate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Effect {
    /// A file (or link, device, …) replaces another.
    Replaces,
    /// A directory replaces something else, or the reverse.
    Type,
    /// A whiteout deletes what lies below.
    Deletes,
    /// An opaque directory hides the contents of those below.
    Hides,
    /// Directories are merged, but differ in mode or owner: the topmost one's count.
    Attributes,
}

/// A path that several layers define.
#[derive(Debug, Serialize)]
pub(super) struct Conflict {
    /// The path, with a leading `/`; bytes that are not UTF-8 as `\xNN`.
    pub(super) path: String,
    /// What the topmost definition does to those below it.
    pub(super) effect: Effect,
    /// Names of the layers, bottom first; the last one's definition is what a sandbox sees.
    pub(super) layers: Vec<String>,
}

/// One layer's definition of a path.
struct Definition {
    layer: usize,
    inode: Inode,
    what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Directory { opaque: bool, implicit: bool },
    Whiteout,
    Other,
}

/// Finds the conflicts of `layers` (bottom first), sorted by path.
pub(super) fn find(layers: &[Layer<'_>]) -> anyhow::Result<Vec<Conflict>> {
    let mut conflicts = Vec::new();
    let mut roots = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        roots.push(define(
            layer,
            index,
            b"",
            layer.image.root().with_context(|| damaged(layer, b""))?,
        )?);
    }
    let mut pending = vec![(Vec::new(), roots)];
    while let Some((path, definitions)) = pending.pop() {
        if let Some(effect) = effect(&definitions) {
            conflicts.push(Conflict {
                path: format!("/{}", printable_bytes(&path)),
                effect,
                layers: definitions
                    .iter()
                    .filter_map(|d| layers.get(d.layer))
                    .map(|l| l.name.to_owned())
                    .collect(),
            });
        }
        let merged = merged(definitions);
        if merged.len() < 2 || path.len() > MAX_PATH {
            continue;
        }
        let mut children: BTreeMap<Vec<u8>, Vec<Definition>> = BTreeMap::new();
        for directory in merged {
            let Some(layer) = layers.get(directory.layer) else {
                continue;
            };
            for entry in layer
                .image
                .read_dir(&directory.inode)
                .with_context(|| damaged(layer, &path))?
            {
                let entry = entry.with_context(|| damaged(layer, &path))?;
                let mut child = path.clone();
                if !child.is_empty() {
                    child.push(b'/');
                }
                child.extend_from_slice(entry.name);
                let inode = layer
                    .image
                    .inode(entry.nid)
                    .with_context(|| damaged(layer, &child))?;
                let definition = define(layer, directory.layer, &child, inode)?;
                children.entry(child).or_default().push(definition);
            }
        }
        pending.extend(
            children
                .into_iter()
                .filter(|(_, definitions)| definitions.len() > 1),
        );
    }
    conflicts.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(conflicts)
}

fn damaged(layer: &Layer<'_>, path: &[u8]) -> String {
    format!(
        "{}: the metadata of /{} cannot be read (`layerpack verify {}`)",
        layer.name,
        printable_bytes(path),
        layer.name
    )
}

fn define(
    layer: &Layer<'_>,
    index: usize,
    path: &[u8],
    inode: Inode,
) -> anyhow::Result<Definition> {
    let what = match inode.file_type {
        FileType::Directory => {
            let xattrs = layer
                .image
                .xattrs(&inode)
                .with_context(|| damaged(layer, path))?;
            let opaque = xattrs
                .iter()
                .any(|(name, value)| name == OPAQUE && value == b"y");
            What::Directory {
                opaque,
                implicit: layer.implicit.contains(path),
            }
        }
        FileType::CharDevice if inode.rdev().is_some_and(|r| (r.major, r.minor) == (0, 0)) => {
            What::Whiteout
        }
        _ => What::Other,
    };
    Ok(Definition {
        layer: index,
        inode,
        what,
    })
}

/// What the topmost definition does to the one below it, if that is worth telling.
fn effect(definitions: &[Definition]) -> Option<Effect> {
    let (top, below) = definitions.split_last()?;
    let next = below.last()?;
    match (top.what, next.what) {
        (What::Whiteout, What::Whiteout) => None,
        (What::Whiteout, _) => Some(Effect::Deletes),
        (What::Other, What::Other) => Some(Effect::Replaces),
        (What::Directory { .. }, What::Directory { .. }) => {
            if matches!(top.what, What::Directory { opaque: true, .. }) {
                return Some(Effect::Hides);
            }
            let mut explicit = definitions
                .iter()
                .filter(|d| {
                    matches!(
                        d.what,
                        What::Directory {
                            implicit: false,
                            ..
                        }
                    )
                })
                .map(|d| &d.inode);
            let first = explicit.next()?;
            explicit
                .any(|i| (i.mode, i.uid, i.gid) != (first.mode, first.uid, first.gid))
                .then_some(Effect::Attributes)
        }
        // What was deleted below can be anything again.
        (_, What::Whiteout) => None,
        _ => Some(Effect::Type),
    }
}

/// The directories that overlayfs merges: those above the last thing that cuts off what is below.
fn merged(definitions: Vec<Definition>) -> Vec<Definition> {
    let mut merged = Vec::new();
    for definition in definitions {
        match definition.what {
            What::Directory { opaque, .. } => {
                if opaque {
                    merged.clear();
                }
                merged.push(definition);
            }
            What::Whiteout | What::Other => merged.clear(),
        }
    }
    merged
}
