//! Whiteouts in directories that overlayfs does not merge.
//!
//! overlayfs filters whiteouts out of a listing only where it merges directories. In one that a
//! single layer of the stack has, names of whiteouts would be listed and not be found: ghosts. So
//! whiteouts within opaque directories, which hide nothing, are dropped, and a directory that
//! keeps whiteouts carries an empty `trusted.overlay.origin`, by which overlayfs knows "a
//! directory that may have whiteouts" (it means "copied up from an unknown place" and is looked at
//! for nothing else in a lower layer with `index=off`). The mark is put on when the layer is laid
//! out and taken off when it is read back.

use layerpack_erofs::NodeId;

use super::{Layer, OPAQUE};
use crate::error::Result;

/// Marks a directory whose listing must be filtered.
const MAY_HAVE_WHITEOUTS: &[u8] = b"trusted.overlay.origin";

impl Layer {
    /// Drops whiteouts that hide nothing, since an opaque directory is on their way.
    pub(super) fn drop_idle_whiteouts(&mut self) -> Result<()> {
        let mut todo = vec![(NodeId::ROOT, false)];
        while let Some((id, hidden)) = todo.pop() {
            let hidden = hidden || self.is_opaque(id);
            let mut idle = Vec::new();
            for (name, child) in self.tree.children(id) {
                if self.tree.node(child).kind.is_dir() {
                    todo.push((child, hidden));
                } else if hidden && self.is_whiteout(child) {
                    idle.push(name.to_vec());
                }
            }
            for name in idle {
                self.tree.remove(id, &name)?;
            }
        }
        Ok(())
    }

    /// Marks the directories that have whiteouts.
    pub(crate) fn mark_whiteouts(&mut self) {
        let mut todo = vec![NodeId::ROOT];
        while let Some(id) = todo.pop() {
            let mut any = false;
            for (_, child) in self.tree.children(id) {
                if self.tree.node(child).kind.is_dir() {
                    todo.push(child);
                } else {
                    any |= self.is_whiteout(child);
                }
            }
            if any && !self.is_opaque(id) {
                let xattrs = &mut self.tree.node_mut(id).metadata.xattrs;
                xattrs.insert(MAY_HAVE_WHITEOUTS.to_vec(), Vec::new());
            }
        }
    }

    /// Takes all marks off that are not the layer's meaning.
    pub(crate) fn unmark_whiteouts(&mut self) {
        let mut todo = vec![NodeId::ROOT];
        while let Some(id) = todo.pop() {
            let xattrs = &mut self.tree.node_mut(id).metadata.xattrs;
            xattrs.retain(|name, _| name == OPAQUE || !crate::xattrs::is_overlay(name));
            for (_, child) in self.tree.children(id) {
                if self.tree.node(child).kind.is_dir() {
                    todo.push(child);
                }
            }
        }
    }
}
