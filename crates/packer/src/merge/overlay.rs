//! Lays one layer over another: what overlayfs shows of both, as one layer.
//!
//! * A directory of the upper layer takes its metadata with it, unless it is implicit: then the
//!   one below keeps its own.
//! * Anything else replaces what is below, with all that is in it.
//! * A whiteout removes what is below and stays: there may be more layers below.
//! * An opaque directory shows nothing of what is below and stays opaque.
//! * A directory in place of a whiteout, or of anything that is not a directory, becomes opaque:
//!   overlayfs looks no further down than that, and the merged layer must not either.
//!
//! [`bottom`] then drops whiteouts and marks for a layer that nothing lies below.

use std::collections::HashMap;

use layerpack_erofs::{NodeId, NodeKind};

use crate::error::Result;
use crate::model::{Layer, OPAQUE};

/// Lays `upper` over `lower`, in place. Both are settled.
pub(crate) fn apply(lower: &mut Layer, upper: &Layer) -> Result<()> {
    // Inodes of the upper layer with several names, and what they became.
    let mut known: HashMap<NodeId, NodeId> = HashMap::new();
    merge_directory(lower, NodeId::ROOT, upper, NodeId::ROOT)?;
    let mut todo = vec![(NodeId::ROOT, NodeId::ROOT)];
    while let Some((into, from)) = todo.pop() {
        for (name, id) in upper.tree.children(from) {
            let there = lower.tree.child(into, name);
            let is_dir = upper.tree.node(id).kind.is_dir();
            if let Some(there) =
                there.filter(|there| is_dir && lower.tree.node(*there).kind.is_dir())
            {
                merge_directory(lower, there, upper, id)?;
                todo.push((there, id));
                continue;
            }
            if there.is_some() {
                lower.tree.remove(into, name)?;
            }
            let made = copy(lower, into, name, upper, id, &mut known)?;
            if is_dir {
                if there.is_some() {
                    lower.make_opaque(made);
                    lower.set_implicit(made, false);
                }
                todo.push((made, id));
            }
        }
    }
    lower.define_below_opaque()
}

/// The metadata of a directory that both have; removes what an opaque upper one hides.
fn merge_directory(lower: &mut Layer, into: NodeId, upper: &Layer, from: NodeId) -> Result<()> {
    let hides = upper.is_opaque(from);
    let opaque = hides || lower.is_opaque(into);
    if hides {
        let names: Vec<Vec<u8>> = lower
            .tree
            .children(into)
            .map(|(name, _)| name.to_vec())
            .collect();
        for name in names {
            lower.tree.remove(into, &name)?;
        }
    }
    if !upper.is_implicit(from) {
        lower.tree.node_mut(into).metadata = upper.tree.node(from).metadata.clone();
        lower.set_implicit(into, false);
    }
    if opaque {
        lower.make_opaque(into);
    }
    Ok(())
}

/// Copies one node, without what is in it.
fn copy(
    lower: &mut Layer,
    parent: NodeId,
    name: &[u8],
    upper: &Layer,
    id: NodeId,
    known: &mut HashMap<NodeId, NodeId>,
) -> Result<NodeId> {
    if let Some(made) = known.get(&id) {
        lower.tree.link(parent, name, *made)?;
        return Ok(*made);
    }
    let node = upper.tree.node(id);
    let made = lower
        .tree
        .insert(parent, name, node.metadata.clone(), node.kind.clone())?;
    if let Some(content) = upper.content(id) {
        lower.set_content(made, content)?;
    }
    if node.kind.is_dir() {
        lower.set_implicit(made, upper.is_implicit(id));
    } else if node.nlink() > 1 {
        known.insert(id, made);
    }
    Ok(made)
}

/// Drops whiteouts and opaque marks: nothing lies below.
pub(crate) fn bottom(layer: &mut Layer) -> Result<()> {
    let mut todo = vec![NodeId::ROOT];
    while let Some(directory) = todo.pop() {
        let xattrs = &mut layer.tree.node_mut(directory).metadata.xattrs;
        xattrs.remove(OPAQUE);
        let mut gone = Vec::new();
        for (name, id) in layer.tree.children(directory) {
            match layer.tree.node(id).kind {
                NodeKind::Directory => todo.push(id),
                _ if layer.is_whiteout(id) => gone.push(name.to_vec()),
                _ => {}
            }
        }
        for name in gone {
            layer.tree.remove(directory, &name)?;
        }
    }
    Ok(())
}
