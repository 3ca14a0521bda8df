//! Puts a snapshot on other layers than those that it was made on.
//!
//! Three trees are compared at every path that the snapshot says something of: what was below it,
//! what is to be below it, and what it says. Where the layers below say the same as before, the
//! snapshot's word stands; where they changed in another way than it did, that is a conflict, and
//! a strategy says whose word stands.

use std::collections::BTreeMap;

use layerpack_erofs::NodeId;
use layerpack_store::{Digest, Kind, LayerStore, Manifest, ParentRef, Reference, WriterOptions};
use serde::Serialize;

use super::diff::Difference;
use super::{EntryKind, View};
use crate::error::{PackError, Result};
use crate::git::{Git, Known};
use crate::layout;
use crate::model::Layer;
use crate::options::{BuildReport, Progress};
use crate::path::join;
use crate::warnings::Warnings;

/// Whose word stands in a conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strategy {
    /// Nobody's: nothing is published.
    #[default]
    Fail,
    /// The snapshot's.
    Snapshot,
    /// That of the layers that it is put on.
    Base,
}

/// What both sides did to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ConflictKind {
    /// Both changed it, and differently.
    BothChanged,
    /// Both made it, and differently.
    BothAdded,
    /// The snapshot removed or replaced it, the layers changed it, or what is in it.
    RemovedAndChanged,
    /// The snapshot changed it, the layers removed it.
    ChangedAndRemoved,
}

/// A path of which both sides say something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RebaseConflict {
    /// Path with a leading `/`, escaped for people.
    pub path: String,
    /// What both did.
    pub kind: ConflictKind,
    /// What the snapshot has there.
    pub snapshot: String,
    /// What was below the snapshot there.
    pub before: String,
    /// What the other layers have there.
    pub after: String,
    /// What differs between before and after.
    pub differences: Vec<&'static str>,
}

/// Which snapshot to put on what.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RebaseOptions {
    /// What the result is published as, of kind `diff`.
    pub reference: Reference,
    /// Digest of the snapshot's manifest.
    pub snapshot: Digest,
    /// The layers that it is put on, bottom first.
    pub onto: Vec<ParentRef>,
    /// Whose word stands in conflicts.
    pub strategy: Strategy,
    /// Labels of the manifest.
    pub labels: BTreeMap<String, String>,
}

impl RebaseOptions {
    /// Options with everything at its default.
    #[must_use]
    pub fn new(reference: Reference, snapshot: Digest, onto: Vec<ParentRef>) -> Self {
        Self {
            reference,
            snapshot,
            onto,
            strategy: Strategy::default(),
            labels: BTreeMap::new(),
        }
    }
}

/// What became of it.
#[derive(Debug)]
pub struct RebaseReport {
    /// The layer that was published; `None` if conflicts stood against it.
    pub made: Option<BuildReport>,
    /// All conflicts, in the order of paths.
    pub conflicts: Vec<RebaseConflict>,
    /// Paths of which the snapshot said what the new layers say anyway.
    pub dropped: u64,
}

/// Puts a snapshot on other layers. No contents are read or written but indexes of git, in which entries
/// of the snapshot's own files are given what it shows of them, and those of files that the new layers
/// have others of remember nothing.
///
/// # Errors
/// [`PackError::InvalidOption`], [`PackError::Store`]. Nothing is published then.
pub fn rebase(
    store: &LayerStore,
    options: &RebaseOptions,
    progress: &dyn Progress,
) -> Result<RebaseReport> {
    let clock = crate::cpu::Clock::start();
    progress.phase("read");
    let manifest = store.manifest(&options.snapshot)?;
    let invalid = |option: String, why: &str| PackError::InvalidOption {
        option,
        why: why.to_owned(),
    };
    if manifest.kind != Kind::Diff || options.reference.kind != Kind::Diff {
        let named = manifest.reference().to_string();
        return Err(invalid(named, "only a diff can be put on other layers"));
    }
    let load = |parents: &[ParentRef]| -> Result<Vec<(Digest, Manifest)>> {
        parents
            .iter()
            .map(|parent| Ok((parent.manifest, store.manifest(&parent.manifest)?)))
            .collect()
    };
    let (before, after) = (load(&manifest.parents)?, load(&options.onto)?);
    if before.is_empty() || after.is_empty() {
        let why = "both what it was made on and what it is put on must be known";
        return Err(invalid(manifest.reference().to_string(), why));
    }
    let snapshot = View::open(store, &[(options.snapshot, manifest.clone())])?;
    let mut work = Work {
        before: View::open(store, &before)?,
        after: View::open(store, &after)?,
        snapshot,
        conflicts: Vec::new(),
        drop: Vec::new(),
        inherit: Vec::new(),
        dropped: 0,
        strategy: options.strategy,
    };
    work.compare();
    let Work {
        before,
        after,
        snapshot,
        conflicts,
        drop,
        inherit,
        dropped,
        ..
    } = work;
    if options.strategy == Strategy::Fail && !conflicts.is_empty() {
        return Ok(RebaseReport {
            made: None,
            conflicts,
            dropped,
        });
    }
    progress.phase("publish");
    let mut layer = snapshot.layer;
    apply(&mut layer, &drop, &inherit)?;
    let mut writer = store.writer(WriterOptions {
        jobs: 1,
        ..WriterOptions::default()
    })?;
    // What was dropped moves the numbers of the others.
    let mut git = Git::default();
    let mut warnings = Warnings::default();
    let own = [(options.snapshot, manifest.clone())];
    let known = Known {
        taken: git.take_up(store, &own, &mut layer, &|_| false, &mut warnings)?,
        became: Some((&before.layer, &after.layer)),
        ..Known::default()
    };
    let indexes = git.refresh(&mut layer, &mut writer, &known)?;
    let mut finished = layout::finish(
        layer,
        options.reference.clone(),
        WriterOptions::default().level,
    )?;
    let draft = &mut finished.draft;
    draft.platform.clone_from(&manifest.platform);
    draft.parents.clone_from(&options.onto);
    draft.labels.clone_from(&options.labels);
    draft.annotations.clone_from(&manifest.annotations);
    for (name, value) in &manifest.parameters {
        let slot = draft.parameters.entry(name.clone());
        slot.or_insert_with(|| value.clone());
    }
    draft
        .parameters
        .insert("rebased".to_owned(), options.snapshot.to_string());
    let published = writer.finish(finished.draft)?;
    let mut warnings = warnings.into_vec();
    warnings.extend(published.warnings.iter().cloned());
    Ok(RebaseReport {
        made: Some(BuildReport {
            published,
            counts: finished.counts,
            meta_bytes: finished.meta_bytes,
            warnings,
            cpu_seconds: clock.seconds(),
            git: indexes,
        }),
        conflicts,
        dropped,
    })
}

/// Takes names out, lets directories look as they do below, and drops directories that say nothing.
fn apply(layer: &mut Layer, drop: &[(NodeId, Vec<u8>)], inherit: &[NodeId]) -> Result<()> {
    for (parent, name) in drop {
        layer.clear(*parent, name)?;
    }
    for id in inherit {
        layer.set_implicit(*id, true);
    }
    // Directories that lead nowhere any more, from the deepest on.
    let mut found = Vec::new();
    let mut todo = vec![NodeId::ROOT];
    while let Some(parent) = todo.pop() {
        for (name, id) in layer.tree.children(parent) {
            if layer.tree.node(id).kind.is_dir() {
                todo.push(id);
                found.push((parent, name.to_vec(), id));
            }
        }
    }
    for (parent, name, id) in found.into_iter().rev() {
        if layer.is_implicit(id) && !layer.is_opaque(id) && layer.tree.is_childless(id) {
            layer.clear(parent, &name)?;
        }
    }
    Ok(())
}

struct Work {
    before: View,
    after: View,
    snapshot: View,
    conflicts: Vec<RebaseConflict>,
    /// Names of the snapshot to be taken out.
    drop: Vec<(NodeId, Vec<u8>)>,
    /// Directories whose metadata the snapshot has nothing to say about.
    inherit: Vec<NodeId>,
    dropped: u64,
    strategy: Strategy,
}

/// A path on all sides.
struct Sides {
    path: Vec<u8>,
    snapshot: NodeId,
    before: Option<NodeId>,
    after: Option<NodeId>,
}

impl Work {
    fn compare(&mut self) {
        self.directory(&Sides {
            path: Vec::new(),
            snapshot: NodeId::ROOT,
            before: Some(NodeId::ROOT),
            after: Some(NodeId::ROOT),
        });
        let mut todo = vec![Sides {
            path: Vec::new(),
            snapshot: NodeId::ROOT,
            before: Some(NodeId::ROOT),
            after: Some(NodeId::ROOT),
        }];
        while let Some(here) = todo.pop() {
            let children: Vec<(Vec<u8>, NodeId)> = self
                .snapshot
                .tree()
                .children(here.snapshot)
                .map(|(name, id)| (name.to_vec(), id))
                .collect();
            for (name, id) in children {
                let child = |view: &View, parent: Option<NodeId>| {
                    parent.and_then(|parent| view.tree().child(parent, &name))
                };
                let sides = Sides {
                    path: join(&here.path, &name),
                    snapshot: id,
                    before: child(&self.before, here.before),
                    after: child(&self.after, here.after),
                };
                if self.entry(&sides, here.snapshot, &name) {
                    todo.push(sides);
                }
            }
        }
        self.conflicts.sort_by(|a, b| a.path.cmp(&b.path));
    }

    /// Judges one path; whether what is in it is to be judged too.
    fn entry(&mut self, sides: &Sides, parent: NodeId, name: &[u8]) -> bool {
        let kind = self.snapshot.kind(sides.snapshot);
        let hides = kind != EntryKind::Directory || self.snapshot.layer.is_opaque(sides.snapshot);
        let is_dir = |view: &View, id: Option<NodeId>| {
            id.is_some_and(|id| view.tree().node(id).kind.is_dir())
        };
        if !hides && (is_dir(&self.before, sides.before) || sides.before.is_none()) {
            if is_dir(&self.after, sides.after) {
                self.directory(sides);
                return true;
            }
            if sides.before.is_none() && sides.after.is_none() {
                return true; // new
            }
            // A directory that the layers lost, or have something else in place of.
            let lost = match (sides.before, sides.after) {
                (_, None) => ConflictKind::ChangedAndRemoved,
                (None, Some(_)) => ConflictKind::BothAdded,
                (Some(_), Some(_)) => ConflictKind::BothChanged,
            };
            if self.snapshot.layer.is_implicit(sides.snapshot) && sides.after.is_none() {
                // It only leads to what it holds: that is judged.
                return true;
            }
            return !self.conflict(sides, lost, parent, name);
        }
        let unchanged = self.same_below(sides);
        if kind == EntryKind::Whiteout {
            if sides.after.is_none() {
                self.drop.push((parent, name.to_vec()));
                self.dropped += 1;
            } else if !unchanged {
                self.conflict(sides, ConflictKind::RemovedAndChanged, parent, name);
            }
            return false;
        }
        if unchanged {
            return false;
        }
        if let Some(after) = sides.after
            && self.is_the_same(sides.snapshot, after)
        {
            // Both did the same.
            self.drop.push((parent, name.to_vec()));
            self.dropped += 1;
            return false;
        }
        let what = match (sides.before, sides.after) {
            (None, _) => ConflictKind::BothAdded,
            (Some(_), None) => ConflictKind::ChangedAndRemoved,
            (Some(_), Some(_)) if kind == EntryKind::Directory => ConflictKind::RemovedAndChanged,
            (Some(_), Some(_)) => ConflictKind::BothChanged,
        };
        self.conflict(sides, what, parent, name);
        false
    }

    /// A directory on all sides: only what it looks like can be in conflict. Its time is no reason:
    /// that changes with what is in it.
    fn directory(&mut self, sides: &Sides) {
        let (Some(before), Some(after)) = (sides.before, sides.after) else {
            return;
        };
        if self.snapshot.layer.is_implicit(sides.snapshot) {
            return;
        }
        let looks = |differences: Vec<Difference>| -> Vec<Difference> {
            let no_time = differences.into_iter().filter(|d| *d != Difference::Time);
            no_time.collect()
        };
        let ours = looks(
            self.before
                .differences(&self.snapshot, before, sides.snapshot),
        );
        let theirs = looks(self.before.differences(&self.after, before, after));
        if ours.is_empty() {
            // The snapshot has it for what is in it.
            if !theirs.is_empty() {
                self.inherit.push(sides.snapshot);
            }
            return;
        }
        let both = looks(
            self.after
                .differences(&self.snapshot, after, sides.snapshot),
        );
        if theirs.is_empty() || both.is_empty() {
            return;
        }
        self.note(sides, ConflictKind::BothChanged, &theirs);
        if self.strategy == Strategy::Base {
            self.inherit.push(sides.snapshot);
        }
    }

    /// Notes a conflict; whether the snapshot's word goes.
    fn conflict(&mut self, sides: &Sides, kind: ConflictKind, parent: NodeId, name: &[u8]) -> bool {
        let differences = match (sides.before, sides.after) {
            (Some(before), Some(after)) => self.before.differences(&self.after, before, after),
            _ => Vec::new(),
        };
        self.note(sides, kind, &differences);
        if self.strategy == Strategy::Base {
            self.drop.push((parent, name.to_vec()));
            return true;
        }
        false
    }

    fn note(&mut self, sides: &Sides, kind: ConflictKind, differences: &[Difference]) {
        let said = |view: &View, id: Option<NodeId>| match id {
            None => "nothing".to_owned(),
            Some(id) => match (view.kind(id), view.layer.content(id)) {
                (EntryKind::File, content) => {
                    format!("file of {} bytes", content.map_or(0, |c| c.size))
                }
                (kind, _) => kind.as_str().to_owned(),
            },
        };
        self.conflicts.push(RebaseConflict {
            path: format!("/{}", crate::show(&sides.path)),
            kind,
            snapshot: said(&self.snapshot, Some(sides.snapshot)),
            before: said(&self.before, sides.before),
            after: said(&self.after, sides.after),
            differences: differences.iter().map(|d| d.as_str()).collect(),
        });
    }

    /// Whether the layers below say the same of a path, and of all in it, as they did.
    fn same_below(&self, sides: &Sides) -> bool {
        let mut todo = vec![(sides.before, sides.after)];
        while let Some((before, after)) = todo.pop() {
            let (before, after) = match (before, after) {
                (None, None) => continue,
                (Some(before), Some(after)) => (before, after),
                _ => return false,
            };
            if !self
                .before
                .differences(&self.after, before, after)
                .is_empty()
            {
                return false;
            }
            if !self.before.tree().node(before).kind.is_dir() {
                continue;
            }
            for (name, id) in self.before.tree().children(before) {
                todo.push((Some(id), self.after.tree().child(after, name)));
            }
            for (name, id) in self.after.tree().children(after) {
                if self.before.tree().child(before, name).is_none() {
                    todo.push((None, Some(id)));
                }
            }
        }
        true
    }

    fn is_the_same(&self, snapshot: NodeId, after: NodeId) -> bool {
        !self.snapshot.tree().node(snapshot).kind.is_dir()
            && self
                .after
                .differences(&self.snapshot, after, snapshot)
                .is_empty()
    }
}
