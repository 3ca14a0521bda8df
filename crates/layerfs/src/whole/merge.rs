//! What a stack of layers shows: one tree, and for each file the layer that its bytes are in.
//!
//! The rules are overlayfs's, for a stack that nothing lies below: a whiteout removes what is
//! below it and is not seen; an opaque directory hides what is below; a directory over a
//! directory takes its place and keeps what is in it, unless the layer does not define it
//! (implicit), then the one below keeps its metadata; anything else replaces what is below.

use std::collections::{HashMap, HashSet};

use layerpack_erofs::{Metadata, NodeId, NodeKind, Rdev, Tree};

/// Mark of a directory that shows nothing of the layers below.
const OPAQUE: &[u8] = b"trusted.overlay.opaque";
/// Attributes with these beginnings are overlayfs's own.
const OVERLAY: [&[u8]; 2] = [b"trusted.overlay.", b"user.overlay."];
/// The device that means "nothing here".
const WHITEOUT: Rdev = Rdev { major: 0, minor: 0 };

/// One layer to be merged.
#[derive(Debug)]
pub(super) struct LayerTree {
    pub(super) tree: Tree,
    /// Directories that the layer has and does not define.
    pub(super) implicit: HashSet<NodeId>,
}

/// The stack's tree.
#[derive(Debug)]
pub(super) struct Merged {
    tree: Tree,
    /// Number of the layer of each inode, by [`NodeId::index`].
    origin: Vec<u16>,
}

impl Merged {
    /// Merges layers, given from the bottom up.
    ///
    /// # Errors
    /// What the tree refuses; only for layers whose metadata contradicts itself.
    pub(super) fn new(layers: &[LayerTree]) -> Result<Self, layerpack_erofs::Error> {
        let root = layers
            .first()
            .map(|layer| layer.tree.node(NodeId::ROOT).metadata.clone())
            .unwrap_or_default();
        let mut merged = Self {
            tree: Tree::new(shown(root)),
            origin: vec![0],
        };
        for (number, layer) in (0_u16..).zip(layers) {
            merged.lay_over(number, layer)?;
        }
        Ok(merged)
    }

    /// The tree.
    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Number of the layer that an inode comes from, counted from the bottom.
    pub(super) fn origin(&self, id: NodeId) -> usize {
        self.origin.get(id.index()).copied().map_or(0, usize::from)
    }

    fn lay_over(&mut self, number: u16, upper: &LayerTree) -> Result<(), layerpack_erofs::Error> {
        // Inodes of the layer with several names, and what they became.
        let mut known: HashMap<NodeId, NodeId> = HashMap::new();
        self.merge_directory(NodeId::ROOT, upper, NodeId::ROOT)?;
        let mut todo = vec![(NodeId::ROOT, NodeId::ROOT)];
        while let Some((into, from)) = todo.pop() {
            for (name, id) in upper.tree.children(from) {
                let node = upper.tree.node(id);
                let there = self.tree.child(into, name);
                if let Some(there) = there {
                    if node.kind.is_dir() && self.tree.is_dir(there) {
                        self.merge_directory(there, upper, id)?;
                        todo.push((there, id));
                        continue;
                    }
                    self.tree.remove(into, name)?;
                }
                if node.kind == NodeKind::CharDevice(WHITEOUT) {
                    continue;
                }
                if let Some(made) = known.get(&id) {
                    self.tree.link(into, name, *made)?;
                    continue;
                }
                let made = self.tree.insert(
                    into,
                    name,
                    shown(node.metadata.clone()),
                    node.kind.clone(),
                )?;
                self.origin.resize(made.index() + 1, number);
                if node.kind.is_dir() {
                    todo.push((made, id));
                } else if node.nlink() > 1 {
                    known.insert(id, made);
                }
            }
        }
        Ok(())
    }

    /// A directory that both have.
    fn merge_directory(
        &mut self,
        into: NodeId,
        upper: &LayerTree,
        from: NodeId,
    ) -> Result<(), layerpack_erofs::Error> {
        let xattrs = upper.tree.xattrs(from);
        if xattrs.get(OPAQUE).is_some_and(|value| value == b"y") {
            let names: Vec<Vec<u8>> = self
                .tree
                .children(into)
                .map(|(name, _)| name.to_vec())
                .collect();
            for name in names {
                self.tree.remove(into, &name)?;
            }
        }
        if !upper.implicit.contains(&from) {
            self.tree.node_mut(into).metadata = shown(upper.tree.node(from).metadata.clone());
        }
        Ok(())
    }
}

/// Metadata without overlayfs's own attributes.
fn shown(mut metadata: Metadata) -> Metadata {
    metadata
        .xattrs
        .retain(|name, _| !OVERLAY.iter().any(|prefix| name.starts_with(prefix)));
    metadata
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use layerpack_erofs::FileData;

    use super::*;

    fn meta(mode: u16) -> Metadata {
        Metadata {
            mode,
            ..Metadata::default()
        }
    }

    fn layer(mode: u16) -> LayerTree {
        LayerTree {
            tree: Tree::new(meta(mode)),
            implicit: HashSet::new(),
        }
    }

    impl LayerTree {
        fn add(&mut self, path: &str, mode: u16, kind: NodeKind) -> NodeId {
            let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
            let dir = self.tree.resolve(dir.as_bytes()).unwrap();
            self.tree
                .insert(dir, name.as_bytes(), meta(mode), kind)
                .unwrap()
        }

        fn file(&mut self, path: &str, mode: u16) -> NodeId {
            self.add(path, mode, NodeKind::File(FileData::empty()))
        }

        fn dir(&mut self, path: &str, mode: u16) -> NodeId {
            self.add(path, mode, NodeKind::Directory)
        }

        fn whiteout(&mut self, path: &str) {
            self.add(path, 0, NodeKind::CharDevice(WHITEOUT));
        }

        fn opaque(&mut self, id: NodeId) {
            let xattrs = &mut self.tree.node_mut(id).metadata.xattrs;
            xattrs.insert(OPAQUE.to_vec(), b"y".to_vec());
        }
    }

    /// Paths with mode and number of layer, in order.
    fn show(layers: &[LayerTree]) -> Vec<(String, u16, usize)> {
        let merged = Merged::new(layers).unwrap();
        let mut all: Vec<_> = merged
            .tree()
            .walk()
            .map(|entry| {
                let node = merged.tree().node(entry.id);
                assert!(node.metadata.xattrs.is_empty());
                (
                    String::from_utf8(entry.path).unwrap(),
                    node.metadata.mode,
                    merged.origin(entry.id),
                )
            })
            .collect();
        all.sort();
        all
    }

    fn expect(list: &[(&str, u16, usize)]) -> Vec<(String, u16, usize)> {
        list.iter()
            .map(|(path, mode, origin)| ((*path).to_owned(), *mode, *origin))
            .collect()
    }

    #[test]
    fn whiteouts_opaque_and_implicit_directories_act_as_in_an_overlay() {
        let mut base = layer(0o755);
        base.dir("d", 0o700);
        base.file("d/gone", 1);
        base.file("d/kept", 2);
        base.dir("hidden", 0o711);
        base.file("hidden/old", 3);
        base.file("file", 4);
        base.dir("dir", 0o750);
        base.file("dir/below", 5);
        let mut upper = layer(0o700);
        let d = upper.dir("d", 0o777);
        upper.implicit.insert(d);
        upper.whiteout("d/gone");
        upper.whiteout("d/never");
        let hidden = upper.dir("hidden", 0o770);
        upper.opaque(hidden);
        upper.file("hidden/new", 6);
        // A directory in place of a file, a file in place of a directory.
        upper.dir("file", 0o701);
        upper.file("file/in", 7);
        upper.file("dir", 8);
        assert_eq!(
            show(&[base, upper]),
            expect(&[
                ("", 0o700, 0),
                ("d", 0o700, 0),
                ("d/kept", 2, 0),
                ("dir", 8, 1),
                ("file", 0o701, 1),
                ("file/in", 7, 1),
                ("hidden", 0o770, 0),
                ("hidden/new", 6, 1),
            ])
        );
    }

    #[test]
    fn names_of_one_inode_stay_one_inode() {
        let mut base = layer(0o755);
        let file = base.file("a", 1);
        base.tree.link(NodeId::ROOT, b"b", file).unwrap();
        base.tree.link(NodeId::ROOT, b"c", file).unwrap();
        let mut upper = layer(0o755);
        upper.whiteout("b");
        let merged = Merged::new(&[base, upper]).unwrap();
        let (a, c) = (
            merged.tree().child(NodeId::ROOT, b"a").unwrap(),
            merged.tree().child(NodeId::ROOT, b"c").unwrap(),
        );
        assert_eq!(a, c);
        assert_eq!(merged.tree().node(a).nlink(), 2);
        assert_eq!(merged.tree().child(NodeId::ROOT, b"b"), None);
    }

    #[test]
    fn marks_of_the_lowest_layer_mean_nothing_and_are_not_seen() {
        let mut base = layer(0o755);
        let d = base.dir("d", 0o700);
        base.opaque(d);
        base.opaque(NodeId::ROOT);
        base.file("d/a", 1);
        base.whiteout("w");
        assert_eq!(
            show(&[base]),
            expect(&[("", 0o755, 0), ("d", 0o700, 0), ("d/a", 1, 0)])
        );
    }
}
