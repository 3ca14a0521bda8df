//! How two views differ, by metadata and chunk digests.

use layerpack_erofs::{NodeId, NodeKind};

use super::{EntryKind, View};

/// What happened to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// Only the second view has it.
    Added,
    /// Both have it, and it differs.
    Changed,
    /// Only the first view has it.
    Removed,
}

/// What differs in an entry that both views have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Difference {
    /// Another type; nothing else is compared then.
    Type,
    /// Other bytes.
    Content,
    /// Where a symbolic link points.
    Target,
    /// A device's number.
    Device,
    /// Permission bits.
    Mode,
    /// User or group.
    Owner,
    /// Time of last modification.
    Time,
    /// Extended attributes.
    Xattrs,
    /// Number of hard links.
    Links,
}

impl Difference {
    /// The difference's name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Type => "type",
            Self::Content => "content",
            Self::Target => "target",
            Self::Device => "device",
            Self::Mode => "mode",
            Self::Owner => "owner",
            Self::Time => "time",
            Self::Xattrs => "xattrs",
            Self::Links => "links",
        }
    }
}

/// A path at which two views differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Path from the root without a leading `/`; empty for the root.
    pub path: Vec<u8>,
    /// What happened.
    pub kind: ChangeKind,
    /// Type in the second view, or in the first if it was removed.
    pub entry: EntryKind,
    /// Size of the file in the first view; 0 if there is none.
    pub old_size: u64,
    /// Size of the file in the second view; 0 if there is none.
    pub new_size: u64,
    /// What differs, if it was changed.
    pub differences: Vec<Difference>,
}

/// A directory to compare: in the first view, in the second, and its path.
type Todo = (Option<NodeId>, Option<NodeId>, Vec<u8>);

impl View {
    /// What changed from this view to `other`, in the order of paths by their components. Contents
    /// are the same if their chunks are: views whose files were cut by different chunkers differ.
    /// Nothing but the metadata read already is looked at.
    #[must_use]
    pub fn diff(&self, other: &Self) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut todo: Vec<Todo> = vec![(Some(NodeId::ROOT), Some(NodeId::ROOT), Vec::new())];
        while let Some((old, new, path)) = todo.pop() {
            changes.extend(self.compare(other, old, new, &path));
            let directory = |view: &Self, id: Option<NodeId>| {
                id.filter(|id| view.tree().node(*id).kind.is_dir())
            };
            let (old, new) = (directory(self, old), directory(other, new));
            let mut names: Vec<(Vec<u8>, Option<NodeId>, Option<NodeId>)> = Vec::new();
            for (name, id) in old.into_iter().flat_map(|id| self.tree().children(id)) {
                let there = new.and_then(|new| other.tree().child(new, name));
                names.push((name.to_vec(), Some(id), there));
            }
            for (name, id) in new.into_iter().flat_map(|id| other.tree().children(id)) {
                if old.is_none_or(|old| self.tree().child(old, name).is_none()) {
                    names.push((name.to_vec(), None, Some(id)));
                }
            }
            names.sort_unstable_by(|a, b| b.0.cmp(&a.0)); // the stack turns them round
            for (name, old, new) in names {
                let mut below = path.clone();
                if !below.is_empty() {
                    below.push(b'/');
                }
                below.extend_from_slice(&name);
                todo.push((old, new, below));
            }
        }
        changes
    }

    fn compare(
        &self,
        other: &Self,
        old: Option<NodeId>,
        new: Option<NodeId>,
        path: &[u8],
    ) -> Option<Change> {
        let size = |view: &Self, id: Option<NodeId>| id.map_or(0, |id| view.layer.size(id));
        let (kind, entry, differences) = match (old, new) {
            (Some(old), Some(new)) => {
                let differences = self.differences(other, old, new);
                if differences.is_empty() {
                    return None;
                }
                (ChangeKind::Changed, other.kind(new), differences)
            }
            (Some(old), None) => (ChangeKind::Removed, self.kind(old), Vec::new()),
            (None, Some(new)) => (ChangeKind::Added, other.kind(new), Vec::new()),
            (None, None) => return None,
        };
        Some(Change {
            path: path.to_vec(),
            kind,
            entry,
            old_size: size(self, old),
            new_size: size(other, new),
            differences,
        })
    }

    pub(super) fn differences(&self, other: &Self, old: NodeId, new: NodeId) -> Vec<Difference> {
        if self.kind(old) != other.kind(new) {
            return vec![Difference::Type];
        }
        let (a, b) = (self.tree().node(old), other.tree().node(new));
        let mut found = Vec::new();
        match (&a.kind, &b.kind) {
            (NodeKind::File(_), NodeKind::File(_)) => {
                let content = |view: &Self, id| {
                    view.layer
                        .content(id)
                        .map(|c| (c.size, c.pieces.to_vec()))
                        .unwrap_or_default()
                };
                if content(self, old) != content(other, new) {
                    found.push(Difference::Content);
                }
            }
            (NodeKind::Symlink(a), NodeKind::Symlink(b)) if a != b => {
                found.push(Difference::Target);
            }
            (NodeKind::CharDevice(a), NodeKind::CharDevice(b))
            | (NodeKind::BlockDevice(a), NodeKind::BlockDevice(b))
                if a != b =>
            {
                found.push(Difference::Device);
            }
            _ => {}
        }
        let (am, bm) = (&a.metadata, &b.metadata);
        for (differs, what) in [
            (am.mode != bm.mode, Difference::Mode),
            ((am.uid, am.gid) != (bm.uid, bm.gid), Difference::Owner),
            (am.mtime != bm.mtime, Difference::Time),
            (am.xattrs != bm.xattrs, Difference::Xattrs),
            (
                !a.kind.is_dir() && a.nlink() != b.nlink(),
                Difference::Links,
            ),
        ] {
            if differs {
                found.push(what);
            }
        }
        found
    }
}
