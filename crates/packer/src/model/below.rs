//! What lies below a layer while it is made: the merged layers of its chain.
//!
//! Paths of entries follow symbolic links of the layers below just as their own, and a hard link
//! may name a file of theirs, which is then copied up with all its names, so that it stays one
//! file. So is a file that loses some of its names, to show the right link count. Directories that
//! the layer only passes through take their metadata. Nothing else of them gets into the layer.
//! What a whiteout or an opaque mark of the layer has hidden so far is not followed.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::convert::Infallible;

use layerpack_erofs::{NodeId, NodeKind, Tree};

use super::{Contents, Layer, OPAQUE, Place};
use crate::error::{PackError, Result};
use crate::path::{Step, components, join, walk};

/// See the module's documentation.
pub(crate) struct Below {
    layer: Layer,
    /// Directories of the layers below by directories of the layer at the same path.
    of: HashMap<NodeId, NodeId>,
    /// What was copied up: node below, node of the layer.
    copied: BTreeMap<NodeId, NodeId>,
}

/// Where a path goes from one of its components.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Into a directory.
    On,
    /// Through a symbolic link.
    Elsewhere,
    /// Nowhere.
    End,
}

impl Way {
    fn of(kind: &NodeKind) -> Self {
        match kind {
            NodeKind::Directory => Self::On,
            NodeKind::Symlink(_) => Self::Elsewhere,
            _ => Self::End,
        }
    }
}

/// The targets of symbolic links, by where they lie.
pub(crate) type Targets<'a> = dyn Fn(&[u8]) -> Option<Vec<u8>> + 'a;

/// A name of this layer, and what the layers below have there.
type Here = (Option<NodeId>, Option<NodeId>);

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

    /// Whether layers below are known.
    pub(crate) fn is_above_others(&self) -> bool {
        self.below.is_some()
    }

    /// Takes the layers below back.
    pub(crate) fn take_below(&mut self) -> Option<Self> {
        self.below.take().map(|below| below.layer)
    }

    /// A layer of a tree with contents by [`NodeId::index`] and its implicit directories. Its
    /// whiteouts and opaque marks are settled.
    pub(crate) fn from_parts(
        tree: Tree,
        contents: Contents,
        implicit: HashSet<NodeId>,
        bottom: bool,
    ) -> Self {
        Self {
            tree,
            contents,
            implicit,
            incidental: HashSet::new(),
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
        if self.hides(parent, name) {
            return None;
        }
        let id = below.layer.tree.child(*below.of.get(&parent)?, name)?;
        // One of theirs removed it.
        (!below.layer.is_whiteout(id)).then_some((id, &below.layer))
    }

    /// Whether something that is neither a directory nor a symbolic link is on the way to `path`,
    /// in this layer or in those below: nothing can be at the path then.
    pub(crate) fn is_behind_file(&self, start: NodeId, path: &[u8]) -> bool {
        let lower = self.below.as_deref();
        let mut own = Some(start);
        let mut beneath = lower.and_then(|below| below.of.get(&start).copied());
        let mut names = components(path);
        names.pop();
        for name in names {
            let hidden = own.is_some_and(|own| self.hides(own, name));
            let under = lower.zip(beneath).and_then(|(below, id)| {
                let id = below.layer.tree.child(id, name).filter(|_| !hidden)?;
                let way = Way::of(&below.layer.tree.node(id).kind);
                (!below.layer.is_whiteout(id)).then_some((id, way))
            });
            own = own.and_then(|own| self.tree.child(own, name));
            let there = own.map(|own| Way::of(&self.tree.node(own).kind));
            beneath = under.filter(|(_, way)| *way == Way::On).map(|(id, _)| id);
            match there.or(under.map(|(_, way)| way)) {
                Some(Way::On) => {}
                Some(Way::End) => return true,
                Some(Way::Elsewhere) | None => return false,
            }
        }
        false
    }

    /// Where an entry of this path comes to lie: its names from `start`, with the symbolic links on
    /// the way followed, this layer's and those of the layers below. `links` knows the targets of
    /// others, by where they lie. Changes nothing.
    pub(crate) fn landing(
        &self,
        start: NodeId,
        path: &[u8],
        links: Option<&Targets<'_>>,
    ) -> Vec<u8> {
        let lower = self.below.as_deref();
        let mut names = components(path);
        let Some(last) = names.pop() else {
            return Vec::new();
        };
        let root: Here = (
            Some(start),
            lower.and_then(|below| below.of.get(&start).copied()),
        );
        let joined = |way: &[(Vec<u8>, Here)], last: &[u8]| {
            let mut landed: Vec<&[u8]> = way.iter().map(|(name, _)| name.as_slice()).collect();
            landed.push(last);
            landed.join(&b'/')
        };
        let Ok(way) = walk(&names, |way: &[(Vec<u8>, Here)], name, may_follow| {
            let (own, beneath) = way.last().map_or(root, |(_, here)| *here);
            let hidden = own.is_some_and(|own| self.hides(own, &name));
            let under = lower.zip(beneath).and_then(|(below, id)| {
                let id = below.layer.tree.child(id, &name).filter(|_| !hidden)?;
                (!below.layer.is_whiteout(id)).then(|| (id, below.layer.tree.node(id).kind.clone()))
            });
            let own = own.and_then(|own| self.tree.child(own, &name));
            let kind = own.map(|own| self.tree.node(own).kind.clone());
            let kind = kind.or_else(|| under.as_ref().map(|(_, kind)| kind.clone()));
            let target = match kind {
                Some(NodeKind::Symlink(target)) => Some(target),
                _ => links.and_then(|links| links(&joined(way, &name))),
            };
            Ok::<_, Infallible>(match target.filter(|_| may_follow) {
                Some(target) => Step::Along(target),
                None => {
                    let beneath = under.filter(|(_, kind)| kind.is_dir()).map(|(id, _)| id);
                    Step::Into((name, (own, beneath)))
                }
            })
        });
        joined(&way, last)
    }

    /// What the layer itself has at a path whose links were followed.
    pub(crate) fn child_at(&self, start: NodeId, landed: &[u8]) -> Option<NodeId> {
        let mut names = components(landed).into_iter();
        names.try_fold(start, |at, name| self.tree.child(at, name))
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

    /// Copies what the layers below show at `from` into the layer, under the name `to` alone: its
    /// own names follow at the end, as far as they show then. `None` if there is nothing to be
    /// copied, or a directory.
    pub(crate) fn copy_up(&mut self, from: &Place, to: &Place) -> Result<Option<NodeId>> {
        let (
            Place::Named { parent, name },
            Place::Named {
                parent: at,
                name: as_,
            },
        ) = (from, to)
        else {
            return Ok(None);
        };
        let Some((id, layer)) = self.beneath(*parent, name) else {
            return Ok(None);
        };
        if layer.tree.node(id).kind.is_dir() {
            return Ok(None);
        }
        // Another link may have come before.
        let known = self.below.as_ref().and_then(|below| below.copied.get(&id));
        if let Some(known) = known.copied().filter(|id| self.tree.node(*id).nlink() > 0) {
            return Ok(Some(known));
        }
        self.clear(*at, as_)?;
        self.copy_node(id, *at, as_).map(Some)
    }

    /// Copies a file of the layers below, without its other names.
    fn copy_node(&mut self, id: NodeId, parent: NodeId, name: &[u8]) -> Result<NodeId> {
        let Some(below) = self.below.as_mut() else {
            return Err(PackError::unsupported(name, "nothing lies below the layer"));
        };
        let node = below.layer.tree.node(id);
        let copy = self
            .tree
            .insert(parent, name, node.metadata.clone(), node.kind.clone())?;
        let content = below.layer.content(id);
        below.copied.insert(id, copy);
        if let Some(content) = content {
            self.set_content(copy, content)?;
        }
        Ok(copy)
    }

    /// Whether a name of one of the layer's directories shows nothing of the layers below, whatever
    /// the layer itself has there.
    fn hides(&self, parent: NodeId, name: &[u8]) -> bool {
        self.opaque.contains(&parent)
            || self.is_opaque(parent)
            || self.whiteouts.contains(&(parent, name.to_vec()))
    }

    /// Copies files of the layers below up whose link count would be wrong otherwise, with all
    /// names that still show: those that the layer linked to, and those that lost a name. overlayfs
    /// shows the count that the lower file has, whether its names show or not.
    pub(super) fn copy_linked_files(&mut self) -> Result<()> {
        let linked = self.linked_below();
        for (id, names) in linked {
            let copied = self.below.as_ref().and_then(|b| b.copied.get(&id)).copied();
            let mut copy = copied.filter(|copy| self.tree.node(*copy).nlink() > 0);
            if copy.is_none() && !names.lost {
                continue;
            }
            for (path, name) in names.shown {
                let mut parent = NodeId::ROOT;
                for name in crate::path::components(&path) {
                    parent = match self.tree.child(parent, name) {
                        Some(child) => child,
                        None => self.insert_implicit(parent, name)?,
                    };
                }
                copy = Some(match copy {
                    Some(copy) => {
                        self.tree.link(parent, &name, copy)?;
                        copy
                    }
                    None => self.copy_node(id, parent, &name)?,
                });
            }
        }
        Ok(())
    }

    /// The files below that have several names, and which of these still show without the layer's
    /// doing.
    fn linked_below(&self) -> BTreeMap<NodeId, Names> {
        let mut found: BTreeMap<NodeId, Names> = BTreeMap::new();
        let Some(below) = self.below.as_ref() else {
            return found;
        };
        // Directory path, directory below, the layer's own if it has one, whether it is hidden.
        let mut todo = vec![(Vec::new(), NodeId::ROOT, Some(NodeId::ROOT), false)];
        while let Some((path, lower, own, hidden)) = todo.pop() {
            for (name, child) in below.layer.tree.children(lower) {
                let mine = own.and_then(|own| self.tree.child(own, name));
                let hidden = hidden || own.is_some_and(|own| self.hides(own, name));
                let node = below.layer.tree.node(child);
                if node.kind.is_dir() {
                    let replaced = mine.is_some_and(|mine| !self.tree.node(mine).kind.is_dir());
                    todo.push((join(&path, name), child, mine, hidden || replaced));
                } else if node.nlink() > 1 || below.copied.contains_key(&child) {
                    let names = found.entry(child).or_default();
                    match mine {
                        None if !hidden => names.shown.push((path.clone(), name.to_vec())),
                        Some(mine) if below.copied.get(&child) == Some(&mine) => {}
                        _ => names.lost = true,
                    }
                }
            }
        }
        found
    }

    /// Gives implicit directories the metadata that the layers below show, so that they are right
    /// even where nobody resolves them.
    pub(super) fn inherit(&mut self) {
        let Some(below) = self.below.as_ref() else {
            return;
        };
        let mut inherited = Vec::new();
        let mut todo = vec![(NodeId::ROOT, NodeId::ROOT)];
        while let Some((own, lower)) = todo.pop() {
            if self.implicit.contains(&own) && !below.layer.implicit.contains(&lower) {
                let mut metadata = below.layer.tree.node(lower).metadata.clone();
                // That one of them hides what lies further down is not the layer's to say.
                metadata.xattrs.remove(OPAQUE);
                inherited.push((own, metadata));
            }
            for child in self.tree.children(own) {
                let (name, own_child) = child;
                if !self.tree.node(own_child).kind.is_dir() || self.hides(own, name) {
                    continue;
                }
                if let Some(lower) = below.layer.tree.child(lower, name)
                    && below.layer.tree.node(lower).kind.is_dir()
                {
                    todo.push((own_child, lower));
                }
            }
        }
        for (id, metadata) in inherited {
            self.tree.node_mut(id).metadata = metadata;
        }
    }
}

/// Names of a file below.
#[derive(Default)]
struct Names {
    /// Directory path and name of those that show, and that the layer does not have.
    shown: Vec<(Vec<u8>, Vec<u8>)>,
    /// Whether there are others, which the layer hides.
    lost: bool,
}
