//! The layer under construction: a filesystem tree, its files' contents, and what it says about
//! the layers below it.
//!
//! Entries are put in one by one, a later one replacing an earlier one of the same path. Whiteouts
//! and opaque marks concern only the layers below, wherever they stand among the entries (OCI
//! image specification, "Whiteouts"), so they are collected and turned into nodes at the end.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;

use layerpack_erofs::{Metadata, NodeId, NodeKind, Rdev, Timestamp, Tree};

use crate::content::Content;
use crate::error::{PackError, Result};
use crate::path::{Step, components, walk};
use crate::warnings::Warnings;

pub(crate) use below::Targets;
pub(crate) use contents::{Contents, Held, Repeats};

mod below;
mod contents;
mod difference;
mod ghosts;
mod prune;

/// What marks an opaque directory in a layer.
pub(crate) const OPAQUE: &[u8] = b"trusted.overlay.opaque";

/// See the module's documentation.
pub(crate) struct Layer {
    /// The tree so far.
    pub tree: Tree,
    /// Contents of files.
    contents: Contents,
    /// Directories that no entry defined.
    implicit: HashSet<NodeId>,
    /// Of these, directories that only paths of marks and of link targets pass through: no entry
    /// is in them.
    incidental: HashSet<NodeId>,
    /// Names that the layers below lose.
    whiteouts: BTreeSet<(NodeId, Vec<u8>)>,
    /// Directories that the layers below do not show through.
    opaque: BTreeSet<NodeId>,
    /// Whether there can be layers below at all.
    bottom: bool,
    /// The merged layers below, where they are known.
    below: Option<Box<below::Below>>,
    /// Directories that stay though nothing is in them, where only some of a source is wanted.
    kept: HashSet<NodeId>,
    /// What was dropped or altered.
    pub warnings: Warnings,
}

/// Where an entry goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// The layer's root.
    Root,
    /// A name in a directory.
    Named {
        /// The directory.
        parent: NodeId,
        /// The name.
        name: Vec<u8>,
    },
}

/// Metadata of directories that nobody defined: where no layer below defines them either, this is
/// what one sees.
pub(crate) fn implicit_metadata() -> Metadata {
    Metadata {
        mode: 0o755,
        uid: 0,
        gid: 0,
        mtime: Timestamp { sec: 0, nsec: 0 },
        xattrs: BTreeMap::new(),
    }
}

impl Layer {
    /// An empty layer with an implicit root. `bottom`: it is the bottom of any stack, so that
    /// whiteouts and opaque marks mean nothing.
    pub(crate) fn new(bottom: bool) -> Self {
        Self {
            tree: Tree::new(implicit_metadata()),
            contents: Contents::default(),
            implicit: HashSet::from([NodeId::ROOT]),
            incidental: HashSet::new(),
            whiteouts: BTreeSet::new(),
            opaque: BTreeSet::new(),
            bottom,
            below: None,
            kept: HashSet::new(),
            warnings: Warnings::default(),
        }
    }

    /// Keeps digests of many files in a file of the directory `scratch`. To be called before there are
    /// any; of use where [`Layer::content`] is not asked for, which does not tell that the file
    /// could not be read: laying out does.
    pub(crate) fn spool_contents(&mut self, scratch: Option<&Path>) {
        self.contents = Contents::spooled(scratch);
    }

    /// Forgets all contents, when all have their addresses.
    pub(crate) fn forget_contents(&mut self) {
        self.contents = Contents::default();
    }

    /// Finds where the entry at `path` goes: resolves symbolic links of this layer on the way to
    /// it, within the root, and adds implicit directories where there is nothing yet.
    pub(crate) fn place(&mut self, start: NodeId, path: &[u8]) -> Result<Place> {
        self.place_for(start, path, true)
    }

    /// The same for a path at which nothing is put: that of a mark, or of a link's target.
    pub(crate) fn place_in_passing(&mut self, start: NodeId, path: &[u8]) -> Result<Place> {
        self.place_for(start, path, false)
    }

    fn place_for(&mut self, start: NodeId, path: &[u8], fills: bool) -> Result<Place> {
        let mut names = components(path);
        let Some(name) = names.pop() else {
            return Ok(Place::Root);
        };
        let parent = self.directory(start, &names, path, fills)?;
        Ok(Place::Named {
            parent,
            name: name.to_vec(),
        })
    }

    fn directory(
        &mut self,
        start: NodeId,
        names: &[&[u8]],
        path: &[u8],
        fills: bool,
    ) -> Result<NodeId> {
        let way = walk(names, |way: &[NodeId], name, may_follow| {
            let here = way.last().copied().unwrap_or(start);
            let own = self.tree.child(here, &name);
            // Through a symbolic link of the layers below as through one of its own.
            let kind = match own {
                Some(child) => Some(self.tree.node(child).kind.clone()),
                None => self
                    .beneath(here, &name)
                    .map(|(id, below)| below.tree.node(id).kind.clone())
                    .filter(|kind| matches!(kind, NodeKind::Symlink(_))),
            };
            match kind {
                None | Some(NodeKind::Directory) => {
                    let child = match own {
                        Some(child) => child,
                        None => {
                            let child = self.insert_implicit(here, &name)?;
                            self.incidental.insert(child);
                            child
                        }
                    };
                    if fills {
                        self.incidental.remove(&child);
                    }
                    self.descend(here, &name, child);
                    Ok(Step::Into(child))
                }
                Some(NodeKind::Symlink(target)) if may_follow => Ok(Step::Along(target)),
                Some(NodeKind::Symlink(_)) => Err(PackError::unsupported(
                    path,
                    "its path leads through a loop of symbolic links",
                )),
                _ => {
                    let why = format!("{} on its way is not a directory", crate::show(&name));
                    Err(PackError::unsupported(path, why))
                }
            }
        })?;
        Ok(way.last().copied().unwrap_or(start))
    }

    fn insert_implicit(&mut self, parent: NodeId, name: &[u8]) -> Result<NodeId> {
        let id = self
            .tree
            .insert(parent, name, implicit_metadata(), NodeKind::Directory)?;
        self.implicit.insert(id);
        Ok(id)
    }

    /// Adds a directory, or defines one that is there.
    pub(crate) fn add_directory(&mut self, place: &Place, metadata: Metadata) -> Result<NodeId> {
        let (parent, name) = named(place, b"")?;
        if let Some(there) = self.tree.child(parent, name) {
            if self.tree.node(there).kind.is_dir() {
                self.tree.set_metadata(there, metadata);
                self.implicit.remove(&there);
                self.incidental.remove(&there);
                return Ok(there);
            }
            // What was there hid a directory of the layers below; its successor does too.
            self.tree.remove(parent, name)?;
            if !self.bottom {
                self.whiteouts.insert((parent, name.to_vec()));
            }
        }
        Ok(self
            .tree
            .insert(parent, name, metadata, NodeKind::Directory)?)
    }

    /// Adds anything but a directory, in place of what is there.
    pub(crate) fn add(
        &mut self,
        place: &Place,
        path: &[u8],
        metadata: Metadata,
        kind: NodeKind,
    ) -> Result<NodeId> {
        let (parent, name) = named(place, path)?;
        self.clear(parent, name)?;
        Ok(self.tree.insert(parent, name, metadata, kind)?)
    }

    /// Adds another name for `target`, in place of what is there.
    pub(crate) fn add_link(&mut self, place: &Place, path: &[u8], target: NodeId) -> Result<()> {
        let (parent, name) = named(place, path)?;
        if self.tree.child(parent, name) == Some(target) {
            return Ok(());
        }
        self.clear(parent, name)?;
        self.tree.link(parent, name, target).map_err(|_| {
            PackError::unsupported(
                path,
                "it is a hard link to a directory, or to what it replaces",
            )
        })
    }

    /// Removes what is there.
    pub(crate) fn clear(&mut self, parent: NodeId, name: &[u8]) -> Result<()> {
        if self.tree.child(parent, name).is_some() {
            self.tree.remove(parent, name)?;
        }
        Ok(())
    }

    /// The layers below lose `name` in `parent`.
    pub(crate) fn add_whiteout(&mut self, parent: NodeId, name: Vec<u8>) {
        self.whiteouts.insert((parent, name));
    }

    /// Nothing of the layers below shows in `directory`.
    pub(crate) fn add_opaque(&mut self, directory: NodeId) {
        self.opaque.insert(directory);
    }

    /// Whether anything of the layers below is taken away.
    pub(crate) fn has_marks(&self) -> bool {
        !self.whiteouts.is_empty() || !self.opaque.is_empty()
    }

    /// Adds directories one in the other, all implicit; the last one's id.
    pub(crate) fn implicit_directories(&mut self, names: &[&[u8]]) -> Result<NodeId> {
        self.directory(NodeId::ROOT, names, b"", true)
    }

    /// Takes the metadata of the source's own root for the directory that it goes to. If that does
    /// not define the directory, it is what one sees where no layer below does, except that the
    /// root of all is never the source's.
    pub(crate) fn define_start(&mut self, start: NodeId, metadata: Metadata, defines: bool) {
        if defines {
            self.implicit.remove(&start);
        } else if start == NodeId::ROOT {
            return;
        }
        self.tree.set_metadata(start, metadata);
    }

    /// Whether no entry defined a directory.
    pub(crate) fn is_implicit(&self, directory: NodeId) -> bool {
        self.implicit.contains(&directory)
    }

    /// Gives a file its content.
    pub(crate) fn set_content(&mut self, id: NodeId, content: Content) -> Result<()> {
        self.contents.set(id, content)
    }

    /// Keeps a content whose file is not in the tree yet; a number for [`Layer::give_content`].
    pub(crate) fn keep_content(&mut self, content: Content) -> Result<u32> {
        self.contents.keep(content)
    }

    /// Gives a file a content that was kept.
    pub(crate) fn give_content(&mut self, id: NodeId, kept: u32) {
        self.contents.give(id, kept);
    }

    /// The contents of all files.
    pub(crate) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// A file's content.
    pub(crate) fn content(&self, id: NodeId) -> Option<Content> {
        self.contents.get(id)
    }

    /// Size of a file's content in bytes; 0 for anything without one.
    pub(crate) fn size(&self, id: NodeId) -> u64 {
        self.contents.size(id)
    }

    /// The layers below lose `name`, which is not there, in a directory of a settled layer.
    pub(crate) fn put_whiteout(&mut self, parent: NodeId, name: &[u8]) -> Result<()> {
        let kind = NodeKind::CharDevice(WHITEOUT);
        self.tree.insert(parent, name, whiteout_metadata(), kind)?;
        Ok(())
    }

    /// Turns whiteouts and opaque marks into nodes and attributes. Afterwards the tree is what the
    /// layer shows to overlayfs.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.copy_linked_files()?;
        self.inherit();
        let whiteouts = std::mem::take(&mut self.whiteouts);
        let opaque = std::mem::take(&mut self.opaque);
        if self.bottom {
            if !whiteouts.is_empty() || !opaque.is_empty() {
                let what = whiteouts.len() + opaque.len();
                self.warnings.add(format!(
                    "{what} whiteouts left out: nothing lies below a base"
                ));
            }
            return Ok(());
        }
        // Before marks become nodes, and outer directories before inner ones, whose numbers are
        // higher.
        for id in &opaque {
            if self.is_live(*id) {
                self.drop_incidental(*id)?;
            }
        }
        for (parent, name) in whiteouts {
            if !self.is_live(parent) {
                continue;
            }
            let there = self.tree.child(parent, &name);
            let there = match there.filter(|id| self.is_incidental(*id)) {
                // Only marks were in it, which have nothing to hide any more.
                Some(_) => {
                    self.tree.remove(parent, &name)?;
                    None
                }
                None => there,
            };
            match there {
                None => {
                    self.tree.insert(
                        parent,
                        &name,
                        whiteout_metadata(),
                        NodeKind::CharDevice(WHITEOUT),
                    )?;
                }
                // A new directory in place of a removed one: its own children only, and nothing
                // to inherit from below.
                Some(id) if self.tree.node(id).kind.is_dir() => {
                    self.drop_incidental(id)?;
                    self.make_opaque(id);
                    self.implicit.remove(&id);
                }
                // Hides what is below by being there.
                Some(_) => {}
            }
        }
        for id in opaque {
            if self.is_live(id) {
                self.make_opaque(id);
            }
        }
        self.define_below_opaque()
    }

    /// Whether a directory and all in it is incidental.
    fn is_incidental(&self, id: NodeId) -> bool {
        let mut todo = vec![id];
        while let Some(id) = todo.pop() {
            if !self.incidental.contains(&id) {
                return false;
            }
            todo.extend(self.tree.children(id).map(|(_, child)| child));
        }
        true
    }

    /// Takes incidental directories out of one that hides what lies below it: their marks have
    /// nothing to hide.
    fn drop_incidental(&mut self, id: NodeId) -> Result<()> {
        let mut todo = vec![id];
        while let Some(id) = todo.pop() {
            let children: Vec<(Vec<u8>, NodeId)> = (self.tree.children(id))
                .filter(|(_, child)| self.tree.node(*child).kind.is_dir())
                .map(|(name, child)| (name.to_vec(), child))
                .collect();
            for (name, child) in children {
                if self.is_incidental(child) {
                    self.tree.remove(id, &name)?;
                } else {
                    todo.push(child);
                }
            }
        }
        Ok(())
    }

    /// Nothing of the layers below shows in a directory, which carries the mark for it.
    pub(crate) fn make_opaque(&mut self, id: NodeId) {
        self.tree
            .node_mut(id)
            .metadata
            .xattrs
            .insert(OPAQUE.to_vec(), b"y".to_vec());
    }

    /// Directories within an opaque one cannot inherit anything: they are the layer's own.
    pub(crate) fn define_below_opaque(&mut self) -> Result<()> {
        self.drop_idle_whiteouts()?;
        if self.implicit.is_empty() {
            return Ok(());
        }
        let mut todo = vec![(NodeId::ROOT, false)];
        while let Some((id, hidden)) = todo.pop() {
            if hidden {
                self.implicit.remove(&id);
            }
            let hidden = hidden || self.is_opaque(id);
            todo.extend(self.directories(id).map(|child| (child, hidden)));
        }
        Ok(())
    }

    fn directories(&self, id: NodeId) -> impl Iterator<Item = NodeId> {
        self.tree
            .children(id)
            .map(|(_, child)| child)
            .filter(|child| self.tree.is_dir(*child))
    }

    /// Whether a directory carries the mark.
    pub(crate) fn is_opaque(&self, id: NodeId) -> bool {
        self.tree.xattrs(id).contains_key(OPAQUE)
    }

    /// Whether a node is a whiteout.
    pub(crate) fn is_whiteout(&self, id: NodeId) -> bool {
        matches!(self.tree.node(id).kind, NodeKind::CharDevice(WHITEOUT))
    }

    fn is_live(&self, directory: NodeId) -> bool {
        directory == NodeId::ROOT || self.tree.node(directory).nlink() > 0
    }

    /// Paths of all implicit directories, in no order.
    pub(crate) fn implicit_paths(&self) -> Vec<Vec<u8>> {
        if self.implicit.is_empty() {
            return Vec::new();
        }
        // Most often the root is one and nothing else is: the rest is not looked at then.
        (self.tree.walk())
            .filter(|entry| self.implicit.contains(&entry.id))
            .take(self.implicit.len())
            .map(|entry| entry.path)
            .collect()
    }

    /// Lets no file be newer than `epoch`, in seconds.
    pub(crate) fn clamp_times(&mut self, epoch: i64) {
        let mut todo = vec![NodeId::ROOT];
        while let Some(id) = todo.pop() {
            let mtime = self.tree.node(id).metadata.mtime;
            let epoch = Timestamp {
                sec: epoch,
                nsec: 0,
            };
            self.tree.set_mtime(id, mtime.min(epoch));
            todo.extend(self.tree.children(id).map(|(_, child)| child));
        }
    }
}

/// overlayfs' whiteout.
pub(crate) const WHITEOUT: Rdev = Rdev { major: 0, minor: 0 };

/// All whiteouts are alike: nothing of what made them is told.
fn whiteout_metadata() -> Metadata {
    Metadata {
        mode: 0,
        ..implicit_metadata()
    }
}

fn named<'a>(place: &'a Place, path: &[u8]) -> Result<(NodeId, &'a [u8])> {
    match place {
        Place::Root => Err(PackError::unsupported(
            path,
            "the root can only be a directory",
        )),
        Place::Named { parent, name } => Ok((*parent, name)),
    }
}
