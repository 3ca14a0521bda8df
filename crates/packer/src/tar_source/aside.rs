//! When entries are set aside, and when they come back.
//!
//! Where patterns leave something out, whether an entry is wanted is also a matter of where its path
//! leads and, for a hard link, of what it names. Symbolic links are known while they are set aside
//! ([`super::shadow`]); for whatever else the tree has to be asked, all comes back, and the rest of the
//! archive goes into the tree at once.

use layerpack_erofs::{NodeId, NodeKind};

use super::{Later, Put, Shadow, TarSource, Thing};
use crate::error::Result;

impl TarSource<'_> {
    /// What sets an entry aside; `None`: it goes into the tree. `landed` is where its path leads, where
    /// that was asked.
    pub(super) fn set_aside(
        &mut self,
        put: &Put,
        landed: Option<&[u8]>,
    ) -> Result<Option<&mut Later>> {
        if self.state.later.is_none() {
            let Some((scratch, after)) = &self.state.aside else {
                return Ok(None);
            };
            // Layers below are looked at as well, and what only some is wanted of changes in the end.
            let known = self.filter.selects() || self.layer.is_above_others();
            if self.state.entries <= *after || (landed.is_some() && known) {
                return Ok(None);
            }
            self.state.later = Some(Later::new(scratch));
        }
        if let Some(landed) = landed {
            if self.needs_tree(put, landed) {
                self.bring_back()?;
                return Ok(None);
            }
            match &put.thing {
                Thing::Mark => {} // concerns the layers below
                Thing::Node(_, NodeKind::Symlink(target)) => {
                    self.state.shadow.put(landed, Some(target));
                }
                _ => self.state.shadow.put(landed, None),
            }
        }
        Ok(self.state.later.as_mut())
    }

    /// Whether where paths lead from now on, or what an entry is, can only be told with all entries in
    /// the tree.
    fn needs_tree(&self, put: &Put, landed: &[u8]) -> bool {
        let shadow = &self.state.shadow;
        let there = |path: &[u8]| -> Option<NodeId> { self.layer.child_at(self.start, path) };
        let is_symlink = |id: NodeId| matches!(self.layer.tree.node(id).kind, NodeKind::Symlink(_));
        let is_directory = match &put.thing {
            Thing::Mark => return false,
            Thing::HardLink(link) => {
                let target = self.landing(link);
                // Another name of what is left out, or of a symbolic link, which is one too.
                if self.state.hidden.at(&target).is_some()
                    || shadow.target(&target).is_some()
                    || there(&target).is_some_and(is_symlink)
                {
                    return true;
                }
                false
            }
            Thing::Directory { .. } => true,
            Thing::WhiteoutDevice | Thing::Node(..) => false,
        };
        if shadow.is_full() {
            return true;
        }
        // It takes the place of a link, or of a directory that may have links in it.
        let replaces = |id: NodeId| match self.layer.tree.is_dir(id) {
            true => !is_directory,
            false => is_symlink(id),
        };
        there(landed).is_some_and(replaces) || (!is_directory && shadow.is_above(landed))
    }

    /// Puts what was set aside into the tree, and sets nothing aside any more.
    pub(super) fn bring_back(&mut self) -> Result<()> {
        if self.state.later.is_none() {
            return Ok(());
        }
        self.flush()?;
        self.state.aside = None;
        self.replay()
    }

    /// Puts what was set aside into the tree. All contents are stored.
    pub(super) fn replay(&mut self) -> Result<()> {
        let Some(later) = self.state.later.take() else {
            return Ok(());
        };
        // From here on the tree has the links.
        self.state.shadow = Shadow::default();
        self.state.replaying = true;
        later.replay(&mut |put, content| {
            let id = self.put(put, None)?;
            if let Some((id, content)) = id.zip(content) {
                self.layer.give_content(id, content);
            }
            Ok(())
        })?;
        self.state.replaying = false;
        Ok(())
    }
}
