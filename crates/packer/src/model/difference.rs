//! What one tree changes of another: the layer that turns the layers below into it.
//!
//! Files are equal if their metadata and chunks are, and if they have the same names: a file that
//! gained or lost one is packed anew with those that it has, so that link counts are right. Equal
//! files leave nothing in the layer, and directories only what they have to hold.

use std::collections::{HashMap, HashSet};

use layerpack_erofs::{NodeId, NodeKind};

use super::{Content, Layer, WHITEOUT, whiteout_metadata};
use crate::error::Result;
use crate::filter::Filter;
use crate::path::join;

/// A directory of the new tree on the way through both.
struct Frame {
    /// Index of the directory above; its own for the root.
    above: usize,
    name: Vec<u8>,
    path: Vec<u8>,
    new: NodeId,
    /// The directory below at the same path.
    lower: Option<NodeId>,
    /// What it is in the layer, if it is in it yet.
    own: Option<NodeId>,
}

struct Walk<'a> {
    below: &'a Layer,
    new: &'a Layer,
    filter: &'a Filter,
    layer: Layer,
    frames: Vec<Frame>,
    /// Files of the new tree that are as they are below, all names included.
    unchanged: HashSet<NodeId>,
    /// Files of the new tree with several names, and what they are in the layer.
    linked: HashMap<NodeId, NodeId>,
}

impl Layer {
    /// The layer that makes `new` of the merged layers `below`. Both are settled and without
    /// whiteouts. `root`: whether the root's own metadata counts. What the filter leaves out stays
    /// as it is below.
    pub(crate) fn difference(
        below: &Self,
        new: &Self,
        filter: &Filter,
        root: bool,
    ) -> Result<Self> {
        let mut walk = Walk {
            below,
            new,
            filter,
            layer: Self::new(false),
            frames: vec![Frame {
                above: 0,
                name: Vec::new(),
                path: Vec::new(),
                new: NodeId::ROOT,
                lower: Some(NodeId::ROOT),
                own: Some(NodeId::ROOT),
            }],
            unchanged: unchanged(below, new),
            linked: HashMap::new(),
        };
        let (lower, own) = (
            &below.tree.node(NodeId::ROOT).metadata,
            &new.tree.node(NodeId::ROOT).metadata,
        );
        let shown = if root && !new.is_implicit(NodeId::ROOT) {
            own
        } else {
            lower
        };
        walk.layer.tree.node_mut(NodeId::ROOT).metadata = shown.clone();
        walk.layer.set_implicit(NodeId::ROOT, shown == lower);
        let mut todo = vec![0];
        while let Some(index) = todo.pop() {
            let first = walk.frames.len();
            walk.directory(index)?;
            todo.extend((first..walk.frames.len()).rev());
        }
        let mut layer = walk.layer;
        layer.define_below_opaque()?;
        Ok(layer)
    }
}

impl Walk<'_> {
    fn directory(&mut self, index: usize) -> Result<()> {
        let Some(frame) = self.frames.get(index) else {
            return Ok(());
        };
        let (path, dir, lower) = (frame.path.clone(), frame.new, frame.lower);
        let below = self.below;
        for (name, id) in self.new.tree.children(dir) {
            let there = lower.and_then(|lower| below.tree.child(lower, name));
            if self.new.tree.node(id).kind.is_dir() {
                self.enter(index, &path, name, id, there)?;
            } else if !self.unchanged.contains(&id) {
                self.copy(index, name, id)?;
            }
        }
        let Some(lower) = lower else {
            return Ok(());
        };
        for (name, id) in below.tree.children(lower) {
            let is_dir = below.tree.node(id).kind.is_dir();
            let path = join(&path, name);
            if self.new.tree.child(dir, name).is_some()
                || self.filter.excludes(&path, is_dir)
                || !self.filter.includes(&path, is_dir)
            {
                continue;
            }
            let parent = self.own(index)?;
            let kind = NodeKind::CharDevice(WHITEOUT);
            self.layer
                .tree
                .insert(parent, name, whiteout_metadata(), kind)?;
        }
        Ok(())
    }

    /// Notes a directory of the new tree, and puts it into the layer if it is not as below.
    fn enter(
        &mut self,
        above: usize,
        path: &[u8],
        name: &[u8],
        id: NodeId,
        there: Option<NodeId>,
    ) -> Result<()> {
        let node = self.new.tree.node(id);
        let metadata = &node.metadata;
        let lower = there.filter(|there| self.below.tree.node(*there).kind.is_dir());
        // One that no entry defines is as it is below.
        let same = lower.is_some_and(|lower| {
            self.new.is_implicit(id) || self.below.tree.node(lower).metadata == *metadata
        });
        let own = if same {
            None
        } else {
            let parent = self.own(above)?;
            let kind = NodeKind::Directory;
            let own = self
                .layer
                .tree
                .insert(parent, name, metadata.clone(), kind)?;
            // In place of something else.
            if there.is_some() && lower.is_none() {
                self.layer.make_opaque(own);
            }
            Some(own)
        };
        self.frames.push(Frame {
            above,
            name: name.to_vec(),
            path: join(path, name),
            new: id,
            lower,
            own,
        });
        Ok(())
    }

    /// The layer's directory for a frame, with those on the way to it; they are as below.
    fn own(&mut self, index: usize) -> Result<NodeId> {
        let mut way = Vec::new();
        let mut at = index;
        let mut parent = loop {
            match self.frames.get(at) {
                None => break NodeId::ROOT,
                Some(frame) => match frame.own {
                    Some(own) => break own,
                    None => {
                        way.push(at);
                        at = frame.above;
                    }
                },
            }
        };
        for index in way.into_iter().rev() {
            let Some(frame) = self.frames.get_mut(index) else {
                continue;
            };
            let metadata = match frame.lower {
                Some(lower) => self.below.tree.node(lower).metadata.clone(),
                None => self.new.tree.node(frame.new).metadata.clone(),
            };
            parent = self
                .layer
                .tree
                .insert(parent, &frame.name, metadata, NodeKind::Directory)?;
            frame.own = Some(parent);
            self.layer.set_implicit(parent, true);
        }
        Ok(parent)
    }

    fn copy(&mut self, index: usize, name: &[u8], id: NodeId) -> Result<()> {
        let parent = self.own(index)?;
        if let Some(made) = self.linked.get(&id) {
            self.layer.tree.link(parent, name, *made)?;
            return Ok(());
        }
        let node = self.new.tree.node(id);
        let made =
            self.layer
                .tree
                .insert(parent, name, node.metadata.clone(), node.kind.clone())?;
        if let Some(content) = self.new.content(id) {
            self.layer.set_content(made, content)?;
        }
        if node.nlink() > 1 {
            self.linked.insert(id, made);
        }
        Ok(())
    }
}

/// Files of `new` that `below` has under the same names and no others.
fn unchanged(below: &Layer, new: &Layer) -> HashSet<NodeId> {
    // How many names a file of each has in common.
    let mut common: HashMap<(NodeId, NodeId), u32> = HashMap::new();
    let mut todo = vec![(NodeId::ROOT, NodeId::ROOT)];
    while let Some((dir, lower)) = todo.pop() {
        for (name, id) in new.tree.children(dir) {
            let Some(there) = below.tree.child(lower, name) else {
                continue;
            };
            let dirs = (
                new.tree.node(id).kind.is_dir(),
                below.tree.node(there).kind.is_dir(),
            );
            match dirs {
                (true, true) => todo.push((id, there)),
                (false, false) => *common.entry((id, there)).or_default() += 1,
                _ => {}
            }
        }
    }
    let all = common.into_iter().filter(|((id, there), names)| {
        let (node, lower) = (new.tree.node(*id), below.tree.node(*there));
        node.nlink() == *names
            && lower.nlink() == *names
            && node.metadata == lower.metadata
            && node.kind == lower.kind
            && same_content(new.content(*id), below.content(*there))
    });
    all.map(|((id, _), _)| id).collect()
}

fn same_content(one: Option<Content>, other: Option<Content>) -> bool {
    let is_empty = |content: &Option<Content>| content.as_ref().is_none_or(|c| c.size == 0);
    one == other || is_empty(&one) && is_empty(&other)
}
