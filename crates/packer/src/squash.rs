//! Takes the topmost diffs of a stack into a snapshot. Rules hold for what comes from them as for what
//! the sandbox wrote: the result is new, and leaves.

use std::collections::{HashMap, HashSet};

use layerpack_erofs::{NodeId, NodeKind};
use layerpack_store::{Digest, Kind, LayerStore, LayerWriter, Manifest, ParentRef};
use rustix::fs::FileType;

use crate::content::{self, Content};
use crate::error::{PackError, Result};
use crate::export::Contents;
use crate::filter::Filter;
use crate::merge;
use crate::model::Layer;
use crate::path::join;
use crate::scrub::{Files, Judged, Look, Rules, Scrub, ScrubReport, Verdict};
use crate::stored::GitObjects;
use crate::warnings::Warnings;

/// The layer over those that it is to take in, which leave the stack. Excludes and rules have judged
/// `layer` and judge what is not of it.
#[expect(clippy::too_many_arguments, reason = "what a snapshot carries along")]
pub(crate) fn squashed(
    store: &LayerStore,
    squash: &[ParentRef],
    layer: &Layer,
    stack: &mut Vec<ParentRef>,
    filter: &Filter,
    scrub: Option<&Scrub<'_>>,
    writer: Option<&mut LayerWriter>,
    warnings: &mut Warnings,
) -> Result<Layer> {
    let invalid = |why: &str| PackError::InvalidOption {
        option: "squash".to_owned(),
        why: why.to_owned(),
    };
    let kept = stack.len().saturating_sub(squash.len());
    let top = stack.get(kept..).unwrap_or_default();
    if !top
        .iter()
        .map(|p| p.manifest)
        .eq(squash.iter().map(|p| p.manifest))
    {
        return Err(invalid(
            "it names other layers than those on top of the stack",
        ));
    }
    let mut manifests = Vec::with_capacity(squash.len());
    for parent in squash {
        let manifest = store.manifest(&parent.manifest)?;
        if manifest.kind != Kind::Diff {
            return Err(invalid("only diffs can be taken in"));
        }
        manifests.push((parent.manifest, manifest));
    }
    let mut hidden = HashSet::new();
    let mut below = merge::stack_seen(store, &manifests, false, warnings, &mut |diff| {
        if scrub.is_some() {
            hides(diff, &mut hidden);
        }
    })?;
    exclude(&mut below, filter)?;
    merge::overlay::apply(&mut below, layer)?;
    if let Some(scrub) = scrub {
        let judge = Judge {
            store,
            manifests: &manifests,
            upper: layer,
            scrub,
        };
        judge.all(&mut below, &hidden, writer)?;
    }
    stack.truncate(kept);
    Ok(below)
}

/// Takes out of merged layers what rules leave out; what that was. `below`: the layers that they lie
/// on.
pub(crate) fn judged(
    store: &LayerStore,
    manifests: &[(Digest, Manifest)],
    below: &[(Digest, Manifest)],
    rules: &Rules,
    merged: &mut Layer,
    hidden: &HashSet<Vec<u8>>,
    writer: &mut LayerWriter,
) -> Result<ScrubReport> {
    let mut files: Vec<Box<dyn Files>> = Vec::new();
    if rules.asks_git() {
        files.push(Box::new(GitObjects::of(store, manifests, merged)?));
        if !below.is_empty() {
            let lower = merge::stack(store, below, false, &mut Warnings::default())?;
            files.push(Box::new(GitObjects::of(store, below, &lower)?));
        }
    }
    let scrub = Scrub::over(rules, files);
    let judge = Judge {
        store,
        manifests,
        upper: &Layer::new(false),
        scrub: &scrub,
    };
    judge.all(merged, hidden, Some(writer))?;
    match scrub.refusal() {
        Some(refused) => Err(refused),
        None => Ok(scrub.report(&[], merged)),
    }
}

/// Takes out what excludes match, removals too: the layers below decide about it.
fn exclude(layer: &mut Layer, filter: &Filter) -> Result<()> {
    let mut gone = Vec::new();
    let mut todo = vec![(Vec::new(), NodeId::ROOT)];
    while let Some((path, directory)) = todo.pop() {
        for (name, id) in layer.tree.children(directory) {
            let path = join(&path, name);
            let is_dir = layer.tree.node(id).kind.is_dir();
            if filter.excludes_here(&path, is_dir) {
                gone.push((directory, name.to_vec()));
            } else if is_dir {
                todo.push((path, id));
            }
        }
    }
    for (directory, name) in gone {
        layer.tree.remove(directory, &name)?;
    }
    Ok(())
}

/// Paths below which a diff hides what lies under it.
pub(crate) fn hides(diff: &Layer, hidden: &mut HashSet<Vec<u8>>) {
    for entry in diff.tree.walk() {
        let directory = diff.tree.node(entry.id).kind.is_dir();
        if diff.is_whiteout(entry.id) || directory && diff.is_opaque(entry.id) {
            hidden.insert(entry.path);
        }
    }
}

struct Judge<'a> {
    store: &'a LayerStore,
    manifests: &'a [(Digest, Manifest)],
    upper: &'a Layer,
    scrub: &'a Scrub<'a>,
}

/// Files with their names.
type Names = HashMap<NodeId, Vec<Vec<u8>>>;
/// A file to look into: a name, the node, and how.
type Wanted = (Vec<u8>, NodeId, Look);

/// An inode for [`Scrub::name_of`]: no device has this number.
fn inode(id: NodeId) -> (u64, u64) {
    (u64::MAX, id.index() as u64)
}

impl Judge<'_> {
    /// Takes out of the merged layer what rules leave out. Where a diff hid something there, that
    /// stays hidden.
    fn all(
        &self,
        merged: &mut Layer,
        hidden: &HashSet<Vec<u8>>,
        writer: Option<&mut LayerWriter>,
    ) -> Result<()> {
        let (mut gone, names) = self.by_name(merged);
        let mut out: HashSet<NodeId> = HashSet::new();
        let mut wanted: Vec<Wanted> = Vec::new();
        for (id, names) in &names {
            let Some(first) = names.first() else { continue };
            if self.scrub.takes_links(inode(*id)) {
                out.insert(*id);
                continue;
            }
            let metadata = &merged.tree.node(*id).metadata;
            match self.scrub.wants(first, merged.size(*id), metadata) {
                Look::Not => {}
                look => wanted.push((first.clone(), *id, look)),
            }
        }
        // In the order in which they lie in the layer's tree.
        wanted.sort();
        self.by_contents(merged, &wanted, &mut out, writer)?;
        for id in &out {
            gone.extend(names.get(id).into_iter().flatten().cloned());
        }
        for path in &gone {
            let (above, name) = match path.iter().rposition(|byte| *byte == b'/') {
                Some(at) => path.split_at(at),
                None => (&b""[..], path.as_slice()),
            };
            let name = name.strip_prefix(b"/").unwrap_or(name);
            let Some(parent) = merged.tree.resolve(above) else {
                continue;
            };
            if merged.tree.child(parent, name).is_none() {
                continue; // another of its reasons took it
            }
            merged.tree.remove(parent, name)?;
            if hidden.contains(path) {
                merged.put_whiteout(parent, name)?;
            }
        }
        merged.prune_empty(&self.scrub.emptied())?;
        merged.define_below_opaque()
    }

    /// Paths that go by their names, and the names of the files that are left.
    fn by_name(&self, merged: &Layer) -> (Vec<Vec<u8>>, Names) {
        let mut gone = Vec::new();
        let mut files = Names::new();
        for entry in merged.tree.walk() {
            let node = merged.tree.node(entry.id);
            if self.upper.tree.resolve(&entry.path).is_some() {
                continue; // judged when it was scanned
            }
            if merged.is_whiteout(entry.id) {
                self.scrub.removed(&entry.path);
                continue;
            }
            let kind = match &node.kind {
                NodeKind::Directory => FileType::Directory,
                NodeKind::File(_) => FileType::RegularFile,
                NodeKind::Symlink(_) => FileType::Symlink,
                NodeKind::CharDevice(_) => FileType::CharacterDevice,
                NodeKind::BlockDevice(_) => FileType::BlockDevice,
                NodeKind::Fifo => FileType::Fifo,
                NodeKind::Socket => FileType::Socket,
            };
            let (path, size) = (entry.path, merged.size(entry.id));
            let verdict = self.scrub.entry(&path, kind, size, &node.metadata);
            if kind == FileType::RegularFile && node.nlink() > 1 {
                self.scrub.name_of(inode(entry.id), &path, size, verdict);
            }
            match verdict {
                Verdict::Leave => gone.push(path),
                Verdict::Pack if kind == FileType::RegularFile => {
                    files.entry(entry.id).or_default().push(path);
                }
                Verdict::Pack | Verdict::IfEmpty => {}
            }
        }
        (gone, files)
    }

    /// Reads from the store what rules look into.
    fn by_contents(
        &self,
        merged: &mut Layer,
        wanted: &[Wanted],
        out: &mut HashSet<NodeId>,
        mut writer: Option<&mut LayerWriter>,
    ) -> Result<()> {
        if wanted.is_empty() {
            return Ok(());
        }
        let manifests = self.manifests.iter().map(|(_, manifest)| manifest);
        let mut chunks = Contents::new(self.store, manifests)?;
        for (_, id, _) in wanted {
            for piece in merged.content(*id).iter().flat_map(|c| c.pieces.iter()) {
                chunks.expect(piece.digest, piece.len);
            }
        }
        for (path, id, look) in wanted {
            let content = merged.content(*id).unwrap_or(Content {
                size: 0,
                pieces: Vec::new().into(),
            });
            let metadata = merged.tree.node(*id).metadata.clone();
            let judged = match look {
                Look::Not => Judged::Pack,
                Look::Whole => {
                    let size = usize::try_from(content.size).unwrap_or(usize::MAX);
                    let mut bytes = vec![0; size]; // no more than `max-content`
                    for piece in &content.pieces {
                        let from = usize::try_from(piece.offset).unwrap_or(usize::MAX);
                        let chunk = chunks.get(&piece.digest)?;
                        if let Some(place) = bytes.get_mut(from..from.saturating_add(chunk.len())) {
                            place.copy_from_slice(chunk);
                        }
                    }
                    self.scrub.contents(path, &bytes, &metadata)
                }
                Look::Stream => {
                    let mut search = self.scrub.search(path, content.size, &metadata);
                    let mut at = 0;
                    for piece in &content.pieces {
                        search.hole(piece.offset.saturating_sub(at));
                        search.feed(chunks.get(&piece.digest)?);
                        at = piece.offset.saturating_add(piece.len.into());
                    }
                    self.scrub.searched(path, content.size, search)
                }
            };
            match judged {
                Judged::Pack => {}
                Judged::Leave => {
                    out.insert(*id);
                }
                Judged::Instead(bytes) => {
                    if let Some(writer) = writer.as_deref_mut() {
                        let content = content::store_small(writer, &bytes)?;
                        merged.set_content(*id, content)?;
                    }
                }
            }
        }
        Ok(())
    }
}
