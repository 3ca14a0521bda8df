//! Where only some of a source is wanted: directories that are there for nothing.
//!
//! Whether a directory leads to something wanted shows only once all of it was seen, in an archive
//! at its very end. So all directories go into the layer, and those that turn out to hold nothing
//! are taken out again.

use layerpack_erofs::NodeId;

use super::Layer;
use crate::error::Result;

impl Layer {
    /// A directory that was asked for stays even if it is empty.
    pub(crate) fn keep(&mut self, directory: NodeId) {
        self.kept.insert(directory);
    }

    /// Takes out what [`Layer::keep`] did not name and holds nothing, below `start`.
    pub(crate) fn prune(&mut self, start: NodeId) -> Result<()> {
        let mut found: Vec<(NodeId, Vec<u8>, NodeId)> = Vec::new();
        let mut todo = vec![start];
        while let Some(parent) = todo.pop() {
            for (name, id) in self.tree.children(parent) {
                if self.tree.node(id).kind.is_dir() {
                    todo.push(id);
                    found.push((parent, name.to_vec(), id));
                }
            }
        }
        let hiding: std::collections::HashSet<NodeId> =
            self.whiteouts.iter().map(|(parent, _)| *parent).collect();
        // Children were found after their parents.
        for (parent, name, id) in found.into_iter().rev() {
            let needed = self.kept.contains(&id) || hiding.contains(&id);
            if !needed && self.tree.is_childless(id) {
                self.tree.remove(parent, &name)?;
            }
        }
        if self.tree.is_childless(start) && self.whiteouts.is_empty() {
            self.warnings.add(
                "the layer is empty: nothing in the source is what was to be included".to_owned(),
            );
        }
        Ok(())
    }

    /// Takes out the directories at `paths`, parents first, that hold nothing and hide nothing.
    pub(crate) fn prune_empty(&mut self, paths: &[Vec<u8>]) -> Result<()> {
        if paths.is_empty() {
            return Ok(());
        }
        let hiding: std::collections::HashSet<NodeId> =
            self.whiteouts.iter().map(|(parent, _)| *parent).collect();
        for path in paths.iter().rev() {
            let (above, name) = match path.iter().rposition(|byte| *byte == b'/') {
                Some(at) => path.split_at(at),
                None => (&b""[..], path.as_slice()),
            };
            let name = name.strip_prefix(b"/").unwrap_or(name);
            let Some(parent) = self.tree.resolve(above) else {
                continue;
            };
            let Some(id) = self.tree.child(parent, name) else {
                continue;
            };
            let hides = hiding.contains(&id) || self.opaque.contains(&id) || self.is_opaque(id);
            if self.tree.node(id).kind.is_dir() && !hides && self.tree.is_childless(id) {
                self.tree.remove(parent, name)?;
            }
        }
        Ok(())
    }

    /// Takes out all names of these files.
    pub(crate) fn take_out(&mut self, files: &std::collections::HashSet<NodeId>) -> Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        let mut gone: Vec<(NodeId, Vec<u8>)> = Vec::new();
        let mut todo = vec![NodeId::ROOT];
        while let Some(parent) = todo.pop() {
            for (name, id) in self.tree.children(parent) {
                if self.tree.node(id).kind.is_dir() {
                    todo.push(id);
                } else if files.contains(&id) {
                    gone.push((parent, name.to_vec()));
                }
            }
        }
        for (parent, name) in gone {
            self.tree.remove(parent, &name)?;
        }
        Ok(())
    }
}
