//! Gives indexes what the mounted layer will show.
//!
//! git believes an entry if modification and change time, owner, group, inode number and size are
//! what it remembers, and if the index is younger than the file, in whole seconds: else the file
//! might have changed after git looked ("racy"). Of a mounted layer `stat` shows the modification
//! time as change time (EROFS keeps one), the ids of the layer, and as inode number that of the
//! EROFS image, under overlayfs too: with `xino` the layer's number lies in the upper bits, of
//! which git keeps none. The device is not compared.

use std::collections::{HashMap, HashSet};

use layerpack_erofs::{FileType, Image, NodeId, NodeKind, Timestamp};
use layerpack_store::{Digest, LayerWriter};
use serde::Serialize;

use super::blobs::BlobIds;
use super::index::{self, Named, Stat};
use super::stored::Shown;
use super::{Git, Images};
use crate::content;
use crate::error::Result;
use crate::layout;
use crate::model::Layer;
use crate::path::{components, join};

/// Most indexes that a report names.
const REPORTED: usize = 1000;

/// An index that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GitIndex {
    /// Where it lies in the layer, escaped for people.
    pub path: String,
    /// Entries in it.
    pub entries: u64,
    /// Entries that were given what the mounted layer shows.
    pub refreshed: u64,
    /// Files that git will read all the same: their contents are not the index's, or not known.
    pub differing: u64,
    /// Entries whose files this layer does not have.
    pub missing: u64,
    /// Why nothing was done, if so.
    pub left_alone: Option<String>,
}

/// What mounts of layers of a store show.
#[derive(Default)]
pub(crate) struct Known<'a> {
    /// Those that the layer is made of. A file of theirs has the contents of an entry that remembers just
    /// what they show of it.
    pub taken: Images,
    /// What has the files that are not from there, by their paths.
    pub own: Option<&'a Layer>,
    /// Those that are mounted below the layer now and will not be: of some, others will be in their place.
    pub before: Images,
    /// Those others. Both show the same files.
    pub after: Images,
    /// What the layers below were and what they will be, where files of theirs become others.
    pub became: Option<(&'a Layer, &'a Layer)>,
}

struct Seen<'a> {
    taken: Shown<'a>,
    own: Option<&'a Layer>,
    before: Shown<'a>,
    after: Shown<'a>,
    became: Option<(&'a Layer, &'a Layer)>,
}

impl Seen<'_> {
    /// What a mount of the layers that the layer is made of showed of this file.
    fn stat(&self, layer: &Layer, id: NodeId, path: &[u8]) -> Option<Stat> {
        let is_own = || self.own.is_some_and(|own| own.tree.resolve(path).is_some());
        // Of a link the target is known, and of an empty file that it is empty.
        if !matches!(layer.tree.node(id).kind, NodeKind::File(_)) || is_own() {
            return None;
        }
        let was = self.taken.stat(path)?;
        (stat(layer, id, was.ino) == was).then_some(was)
    }

    /// Whether a file of the layers below will be another one: it may look as the one before did.
    fn becomes_another(&self, path: &[u8]) -> bool {
        let Some((before, after)) = self.became else {
            return false;
        };
        let (Some(was), Some(will)) = (before.tree.resolve(path), after.tree.resolve(path)) else {
            return false;
        };
        let identity = |layer: &Layer, id| layer.content(id).map(|content| content.identity());
        match (&before.tree.node(was).kind, &after.tree.node(will).kind) {
            (NodeKind::File(_), NodeKind::File(_)) => {
                identity(before, was) != identity(after, will)
            }
            (NodeKind::Symlink(was), NodeKind::Symlink(will)) => was != will,
            _ => true,
        }
    }
}

/// An index and the working tree that it is of.
struct Found {
    index: NodeId,
    path: Vec<u8>,
    tree: NodeId,
    /// Path of the tree; ends with `/` unless it is empty.
    at: Vec<u8>,
}

/// What an index is to remember.
struct Plan {
    index: NodeId,
    digest: Digest,
    hash: index::Hash,
    files: Vec<(usize, NodeId)>,
    /// Of files in layers below.
    below: Vec<(usize, Stat)>,
    /// Files whose contents are not the index's, or not known.
    differing: Vec<(usize, NodeId)>,
    /// Of files in layers below that become others.
    others: Vec<usize>,
}

impl Plan {
    fn does_nothing(&self) -> bool {
        self.files.is_empty()
            && self.below.is_empty()
            && self.differing.is_empty()
            && self.others.is_empty()
    }
}

impl Git {
    /// Refreshes the indexes of a layer that is ready to be laid out, and stores what was held
    /// back of it.
    pub(crate) fn refresh(
        &mut self,
        layer: &mut Layer,
        writer: &mut LayerWriter,
        known: &Known<'_>,
    ) -> Result<Vec<GitIndex>> {
        if self.indexes.is_empty() {
            return Ok(Vec::new());
        }
        let seen = Seen {
            taken: known.taken.open()?,
            own: known.own,
            before: known.before.open()?,
            after: known.after.open()?,
            became: known.became,
        };
        let mut reports = Vec::new();
        let mut plans = Vec::new();
        for found in self.find(layer) {
            let Some(digest) = self.held_by(layer, found.index) else {
                continue;
            };
            let (report, plan) = self.plan(layer, &found, digest, &seen);
            if reports.len() < REPORTED {
                reports.push(report);
            }
            plans.extend(plan.filter(|plan| !plan.does_nothing()));
        }
        for plan in &plans {
            age(layer, plan);
        }
        let numbers = if plans.is_empty() {
            HashMap::new()
        } else {
            numbers(layer)?
        };
        for plan in plans {
            let Some(bytes) = self.indexes.get(&plan.digest) else {
                continue;
            };
            let mut bytes = bytes.clone();
            let shown = |id: &NodeId| Some(stat(layer, *id, *numbers.get(id)?));
            for at in &plan.others {
                index::forget(&mut bytes, *at);
            }
            for (at, id) in &plan.differing {
                // By chance, or by the index's new age.
                if shown(id).is_some_and(|stat| index::remembers(&bytes, *at, &stat)) {
                    index::forget(&mut bytes, *at);
                }
            }
            let files: Vec<(usize, Stat)> = plan
                .files
                .iter()
                .filter_map(|(at, id)| Some((*at, shown(id)?)))
                .chain(plan.below)
                .collect();
            index::write(&mut bytes, plan.hash, &files);
            let content = content::store_small(writer, &bytes)?;
            layer.set_content(plan.index, content)?;
        }
        self.store_held(layer, writer)?;
        Ok(reports)
    }

    /// The index that a file's content stands for.
    fn held_by(&self, layer: &Layer, id: NodeId) -> Option<Digest> {
        let content = layer.content(id)?;
        let [piece] = *content.pieces else {
            return None;
        };
        self.indexes
            .contains_key(&piece.digest)
            .then_some(piece.digest)
    }

    /// Stores the indexes that are as they were.
    fn store_held(&self, layer: &mut Layer, writer: &mut LayerWriter) -> Result<()> {
        let held: Vec<(NodeId, Digest)> = layer
            .tree
            .walk()
            .filter_map(|entry| Some((entry.id, self.held_by(layer, entry.id)?)))
            .collect();
        for (id, digest) in held {
            if let Some(bytes) = self.indexes.get(&digest) {
                let content = content::store_small(writer, bytes)?;
                layer.set_content(id, content)?;
            }
        }
        Ok(())
    }

    /// Working trees with an index that is held: by a directory `.git`, or by a file `.git` that
    /// names one elsewhere, as those of submodules and further working trees do.
    fn find(&self, layer: &Layer) -> Vec<Found> {
        let mut found = Vec::new();
        let mut seen = HashSet::new();
        for entry in layer.tree.walk() {
            let Some(tree_path) = entry
                .path
                .strip_suffix(b".git")
                .filter(|rest| rest.is_empty() || rest.ends_with(b"/"))
            else {
                continue;
            };
            let path = match &layer.tree.node(entry.id).kind {
                NodeKind::Directory => entry.path.clone(),
                NodeKind::File(_) => {
                    let text = layer
                        .content(entry.id)
                        .and_then(|content| self.links.get(&content.identity()));
                    let target = text
                        .and_then(|text| text.strip_prefix(b"gitdir:"))
                        .map(<[u8]>::trim_ascii);
                    match target {
                        Some(target) if target.starts_with(b"/") => components(target).join(&b'/'),
                        Some(target) => components(&join(tree_path, target)).join(&b'/'),
                        None => continue,
                    }
                }
                _ => continue,
            };
            let path = join(&path, b"index");
            let Some(index) = layer.tree.resolve(&path) else {
                continue;
            };
            if self.held_by(layer, index).is_some() && seen.insert(index) {
                found.push(Found {
                    index,
                    path,
                    tree: entry.parent,
                    at: tree_path.to_vec(),
                });
            }
        }
        found
    }

    fn plan(
        &self,
        layer: &Layer,
        found: &Found,
        digest: Digest,
        seen: &Seen<'_>,
    ) -> (GitIndex, Option<Plan>) {
        let mut report = GitIndex {
            path: crate::show(&found.path),
            entries: 0,
            refreshed: 0,
            differing: 0,
            missing: 0,
            left_alone: None,
        };
        let bytes = self.indexes.get(&digest).map_or(&[][..], Vec::as_slice);
        let summary = match index::read(bytes, |_| {}) {
            Ok(summary) => summary,
            Err(why) => {
                report.left_alone = Some(why.to_owned());
                return (report, None);
            }
        };
        report.entries = u64::from(summary.entries);
        if summary.split {
            report.left_alone =
                Some("it is split; `git update-index --no-split-index` joins its parts".to_owned());
            return (report, None);
        }
        let (mut files, mut below, mut differing) = (Vec::new(), Vec::new(), Vec::new());
        let mut others = Vec::new();
        // git reads what is not older than the index.
        let age = layer.tree.node(found.index).metadata.mtime.sec;
        let believed = |entry: &index::Entry<'_>, stat: &Stat| {
            stat.sec < age && index::remembers(bytes, entry.at, stat)
        };
        let read = index::read(bytes, |entry| {
            if !entry.looked_at || entry.named == Named::Other {
                return;
            }
            match self.look(layer, found.tree, summary.hash, entry) {
                None => {
                    report.missing += 1;
                    let path = [&found.at, entry.path].concat();
                    let was = seen.before.stat(&path).filter(|stat| believed(entry, stat));
                    if let Some(stat) = was.and_then(|_| seen.after.stat(&path)) {
                        below.push((entry.at, stat));
                    }
                    if seen.becomes_another(&path) {
                        others.push(entry.at);
                    }
                }
                Some((id, true)) => files.push((entry.at, id)),
                Some((id, false)) => {
                    let path = [&found.at, entry.path].concat();
                    let was = seen.stat(layer, id, &path);
                    match was.is_some_and(|stat| believed(entry, &stat)) {
                        true => files.push((entry.at, id)),
                        false => {
                            report.differing += 1;
                            differing.push((entry.at, id));
                        }
                    }
                }
            }
        });
        if let Err(why) = read {
            report.left_alone = Some(why.to_owned());
            return (report, None);
        }
        report.refreshed = files.len() as u64;
        let plan = Plan {
            index: found.index,
            digest,
            hash: summary.hash,
            files,
            below,
            differing,
            others,
        };
        (report, Some(plan))
    }

    /// The file of an entry, if the layer has it, and whether it has the entry's contents.
    fn look(
        &self,
        layer: &Layer,
        tree: NodeId,
        hash: index::Hash,
        entry: &index::Entry<'_>,
    ) -> Option<(NodeId, bool)> {
        // By names alone: what lies beyond a symbolic link is no file of the repository.
        let id = entry
            .path
            .split(|&byte| byte == b'/')
            .try_fold(tree, |dir, name| layer.tree.child(dir, name))?;
        let same = match (&layer.tree.node(id).kind, entry.named) {
            (NodeKind::File(_), Named::File) => {
                match layer.content(id).filter(|content| content.size > 0) {
                    None => BlobIds::of(b"").id(hash) == entry.id,
                    Some(content) => self
                        .blobs
                        .get(&content.identity())
                        .is_some_and(|ids| ids.id(hash) == entry.id),
                }
            }
            (NodeKind::Symlink(target), Named::Symlink) => BlobIds::of(target).id(hash) == entry.id,
            _ => false,
        };
        Some((id, same))
    }
}

/// Makes an index younger than all files that it remembers.
fn age(layer: &mut Layer, plan: &Plan) {
    let files = plan.files.iter();
    let youngest = files
        .map(|(_, id)| layer.tree.node(*id).metadata.mtime.sec)
        .chain(plan.below.iter().map(|(_, stat)| stat.sec))
        .max();
    let mtime = &mut layer.tree.node_mut(plan.index).metadata.mtime;
    if let Some(youngest) = youngest.filter(|youngest| mtime.sec <= *youngest) {
        *mtime = Timestamp {
            sec: youngest.saturating_add(1),
            nsec: 0,
        };
    }
}

fn stat(layer: &Layer, id: NodeId, ino: u64) -> Stat {
    let node = layer.tree.node(id);
    let size = match &node.kind {
        NodeKind::Symlink(target) => target.len() as u64,
        _ => layer.size(id),
    };
    Stat {
        sec: node.metadata.mtime.sec,
        nsec: node.metadata.mtime.nsec,
        ino,
        uid: node.metadata.uid,
        gid: node.metadata.gid,
        size,
    }
}

/// The inode numbers of files and symbolic links: the layer is laid out once to see them. What
/// is still to be written into the indexes has no part in them, only its size has.
fn numbers(layer: &mut Layer) -> Result<HashMap<NodeId, u64>> {
    let meta = layout::image(layer)?;
    let image = Image::open(&meta)?;
    let mut numbers = HashMap::new();
    let mut todo = vec![(NodeId::ROOT, image.root()?)];
    while let Some((id, inode)) = todo.pop() {
        for entry in image.read_dir(&inode)? {
            let entry = entry?;
            let Some(child) = layer.tree.child(id, entry.name) else {
                continue;
            };
            match entry.file_type {
                FileType::Directory => todo.push((child, image.inode(entry.nid)?)),
                FileType::File | FileType::Symlink => {
                    numbers.insert(child, entry.nid);
                }
                _ => {}
            }
        }
    }
    Ok(numbers)
}
