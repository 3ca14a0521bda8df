//! What lies below a layer while it is made: the merged layers of its chain.
//!
//! Paths of entries follow symbolic links of the layers below just as their own, and a hard link
//! may name a file of theirs, which is then copied up with all its names, so that it stays one
//! file. Nothing else of them gets into the layer. What a whiteout or an opaque mark of the layer
//! has hidden so far is not followed.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use layerpack_erofs::{NodeId, Tree};

use super::{Content, Layer, Place};
use crate::error::Result;
use crate::path::join;

/// See the module's documentation.
pub(crate) struct Below {
    layer: Layer,
    /// Directories of the layers below by directories of the layer at the same path.
    of: HashMap<NodeId, NodeId>,
    /// What was copied up: node below, node of the layer.
    copied: BTreeMap<NodeId, NodeId>,
}

impl Layer {
    /// An empty layer, not at the bottom, above the merged layers `below`.
    pub(crate) fn above(below: Self) -> Self {
        let mut layer = Self::new(false);
        layer.below = Some(Box::new(Below {
            layer: below,
            of: HashMap::from([(NodeId::ROOT, NodeId::ROOT)]),
            copied: BTreeMap::new(),
        }));
        layer
    }

    /// Takes the layers below back.
    pub(crate) fn take_below(&mut self) -> Option<Self> {
        self.below.take().map(|below| below.layer)
    }

    /// A layer of a tree with contents by [`NodeId::index`] and its implicit directories. Its
    /// whiteouts and opaque marks are settled.
    pub(crate) fn from_parts(
        tree: Tree,
        contents: Vec<Option<Content>>,
        implicit: HashSet<NodeId>,
        bottom: bool,
    ) -> Self {
        Self {
            tree,
            contents,
            implicit,
            whiteouts: BTreeSet::new(),
            opaque: BTreeSet::new(),
            bottom,
            below: None,
            kept: HashSet::new(),
            warnings: crate::warnings::Warnings::default(),
        }
    }

    /// Says whether a directory is one that no entry defined.
    pub(crate) fn set_implicit(&mut self, directory: NodeId, implicit: bool) {
        if implicit {
            self.implicit.insert(directory);
        } else {
            self.implicit.remove(&directory);
        }
    }

    /// What the layers below show under a name of a directory that the layer has.
    pub(super) fn beneath(&self, parent: NodeId, name: &[u8]) -> Option<(NodeId, &Layer)> {
        let below = self.below.as_ref()?;
        let hidden = self.opaque.contains(&parent)
            || self.is_opaque(parent)
            || self.whiteouts.contains(&(parent, name.to_vec()));
        if hidden {
            return None;
        }
        let id = below.layer.tree.child(*below.of.get(&parent)?, name)?;
        Some((id, &below.layer))
    }

    /// Notes that the layer has a directory `child` under a name of `parent`.
    pub(super) fn descend(&mut self, parent: NodeId, name: &[u8], child: NodeId) {
        let beneath = self
            .beneath(parent, name)
            .filter(|(id, layer)| layer.tree.node(*id).kind.is_dir())
            .map(|(id, _)| id);
        if let Some(below) = self.below.as_mut() {
            match beneath {
                Some(id) => below.of.insert(child, id),
                None => below.of.remove(&child),
            };
        }
    }

    /// Copies what the layers below show at `place` into the layer, unless that is nothing or a
    /// directory.
    pub(crate) fn copy_up(&mut self, place: &Place) -> Result<Option<NodeId>> {
        let Place::Named { parent, name } = place else {
            return Ok(None);
        };
        let Some((id, layer)) = self.beneath(*parent, name) else {
            return Ok(None);
        };
        let node = layer.tree.node(id);
        if node.kind.is_dir() {
            return Ok(None);
        }
        let (metadata, kind) = (node.metadata.clone(), node.kind.clone());
        let content = layer.content(id).cloned();
        // Another of its names may have come before.
        let known = self.below.as_ref().and_then(|below| below.copied.get(&id));
        if let Some(known) = known.copied().filter(|id| self.tree.node(*id).nlink() > 0) {
            self.tree.link(*parent, name, known)?;
            return Ok(Some(known));
        }
        let copy = self.tree.insert(*parent, name, metadata, kind)?;
        if let Some(content) = content {
            self.set_content(copy, content);
        }
        if let Some(below) = self.below.as_mut() {
            below.copied.insert(id, copy);
        }
        Ok(Some(copy))
    }

    /// Gives what was copied up its other names of the layers below too, where they still show.
    pub(super) fn link_copies(&mut self) -> Result<()> {
        let Some(below) = self.below.as_ref() else {
            return Ok(());
        };
        let mut wanted: Vec<(NodeId, NodeId)> = Vec::new();
        for (id, copy) in &below.copied {
            if below.layer.tree.node(*id).nlink() > 1 && self.tree.node(*copy).nlink() > 0 {
                wanted.push((*id, *copy));
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let wanted: HashMap<NodeId, NodeId> = wanted.into_iter().collect();
        // Names below of what was copied, where the layer hides neither them nor a directory on
        // their way: directory path, name, copy.
        let mut missing: Vec<(Vec<u8>, Vec<u8>, NodeId)> = Vec::new();
        let mut todo = vec![(Vec::new(), NodeId::ROOT, Some(NodeId::ROOT))];
        while let Some((path, lower, own)) = todo.pop() {
            for (name, child) in below.layer.tree.children(lower) {
                let mine = own.and_then(|own| self.tree.child(own, name));
                let hidden = own.is_some_and(|own| {
                    self.opaque.contains(&own)
                        || self.is_opaque(own)
                        || self.whiteouts.contains(&(own, name.to_vec()))
                });
                if hidden {
                    continue;
                }
                if below.layer.tree.node(child).kind.is_dir() {
                    if mine.is_none_or(|mine| self.tree.node(mine).kind.is_dir()) {
                        todo.push((join(&path, name), child, mine));
                    }
                } else if let Some(copy) = wanted.get(&child)
                    && mine.is_none()
                {
                    missing.push((path.clone(), name.to_vec(), *copy));
                }
            }
        }
        for (path, name, copy) in missing {
            let names: Vec<&[u8]> = crate::path::components(&path);
            let mut parent = NodeId::ROOT;
            for name in names {
                parent = match self.tree.child(parent, name) {
                    Some(child) => child,
                    None => self.insert_implicit(parent, name)?,
                };
            }
            self.tree.link(parent, &name, copy)?;
        }
        Ok(())
    }
}
