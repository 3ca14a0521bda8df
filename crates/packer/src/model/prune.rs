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
}
