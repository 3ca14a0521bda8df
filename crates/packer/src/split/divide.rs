//! Takes one tree apart by the rules of a [`Split`].
//!
//! Every entry goes to one part. A directory that leads to an entry of a part, and is not the
//! part's own, is implicit there, so it takes what the part says that has it: the stack of all
//! parts shows the tree as it was, and what one part holds does not show in the bytes of another.

use std::collections::{BTreeMap, HashMap};

use layerpack_erofs::{NodeId, NodeKind};
use serde::Serialize;

use super::rules::{HardLinks, Leftover, Split};
use crate::error::{PackError, Result};
use crate::model::{Layer, implicit_metadata};
use crate::path::components;
use crate::warnings::Warnings;

/// Paths that are listed of what was left over.
const LISTED: usize = 20;

/// What no rule named. Directories that lead to something named do not count.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct LeftOver {
    /// Where it went: the part, or nowhere.
    pub went_to: Option<String>,
    /// Names.
    pub entries: u64,
    /// Apparent bytes of its files, each name counted.
    pub bytes: u64,
    /// The first of the topmost paths, escaped for people.
    pub paths: Vec<String>,
    /// How many more topmost paths there are.
    pub more_paths: u64,
}

/// One name of the tree, without the path: of those there is one at a time, since they may be
/// long and many.
struct Item {
    parent: NodeId,
    id: NodeId,
    directory: bool,
    /// The part that it goes to.
    part: Option<usize>,
    /// No rule named it or anything below it.
    left: bool,
}

/// The parts' layers in their order, and what was left over.
pub(super) fn divide(
    split: &Split,
    layer: &Layer,
    warnings: &mut Warnings,
) -> Result<(Vec<Layer>, LeftOver)> {
    let mut items = items(split, layer);
    mark_leftovers(&mut items);
    let left = report(split, layer, &items)?;
    let to = match split.leftover {
        Leftover::Part(part) => Some(part),
        Leftover::Drop | Leftover::Refuse => None,
    };
    for item in &mut items {
        if item.left {
            item.part = to;
        } else if item.part.is_none() {
            // Leads to something that a rule names.
            item.part = Some(0);
        }
    }
    if split.hard_links == HardLinks::Together {
        join_links(layer, &mut items, warnings);
    }
    Ok((build(split, layer, &items, warnings)?, left))
}

fn items(split: &Split, layer: &Layer) -> Vec<Item> {
    let mut items = Vec::with_capacity(layer.tree.len());
    for entry in layer.tree.walk() {
        let directory = layer.tree.node(entry.id).kind.is_dir();
        let part = if entry.id == NodeId::ROOT {
            Some(0)
        } else {
            split.part_of(&components(&entry.path), directory)
        };
        items.push(Item {
            parent: entry.parent,
            id: entry.id,
            directory,
            part,
            left: part.is_none(),
        });
    }
    items
}

/// Directories that lead to something with a part are not left over.
fn mark_leftovers(items: &mut [Item]) {
    let mut leads: std::collections::HashSet<NodeId> = std::collections::HashSet::new();
    // What is in a directory comes after it.
    for item in items.iter_mut().rev() {
        if item.directory && leads.contains(&item.id) {
            item.left = false;
        }
        if !item.left {
            leads.insert(item.parent);
        }
    }
}

fn report(split: &Split, layer: &Layer, items: &[Item]) -> Result<LeftOver> {
    let mut left = LeftOver::default();
    let mut above: std::collections::HashSet<NodeId> = std::collections::HashSet::new();
    for (entry, item) in layer.tree.walk().zip(items) {
        if !item.left {
            continue;
        }
        left.entries += 1;
        left.bytes += layer.size(item.id);
        if item.directory {
            above.insert(item.id);
        }
        if above.contains(&item.parent) {
            continue;
        }
        if left.paths.len() < LISTED {
            left.paths.push(format!("/{}", crate::show(&entry.path)));
        } else {
            left.more_paths += 1;
        }
    }
    if left.entries > 0 {
        match split.leftover {
            Leftover::Part(part) => {
                left.went_to = split.references().nth(part).map(ToString::to_string);
            }
            Leftover::Drop => {}
            Leftover::Refuse => {
                let more = left.more_paths + left.paths.len() as u64 - 1;
                let more = match more {
                    0 => String::new(),
                    more => format!(" and {more} more"),
                };
                let first = left.paths.first().map_or("", String::as_str);
                return Err(PackError::InvalidOption {
                    option: "split".to_owned(),
                    why: format!("no rule names {first}{more}; add a rule, or allow leftovers"),
                });
            }
        }
    }
    Ok(left)
}

/// Gives all names of a file to the lowest of their parts.
fn join_links(layer: &Layer, items: &mut [Item], warnings: &mut Warnings) {
    let linked = |item: &Item| !item.directory && layer.tree.node(item.id).nlink() > 1;
    let mut lowest: HashMap<NodeId, usize> = HashMap::new();
    for item in items.iter().filter(|item| linked(item)) {
        if let Some(part) = item.part {
            let slot = lowest.entry(item.id).or_insert(part);
            *slot = part.min(*slot);
        }
    }
    let (mut moved, mut example) = (0u64, None);
    for (entry, item) in layer.tree.walk().zip(items) {
        let to = lowest.get(&item.id).copied();
        if linked(item) && item.part.is_some() && item.part != to {
            moved += 1;
            example.get_or_insert_with(|| crate::show(&entry.path));
            item.part = to;
        }
    }
    if let Some(example) = example {
        warnings.add(format!(
            "{moved} names of hard linked files, such as /{example}, went to a lower part that has another name of the same file; hard-links = \"copy\" gives each part a file of its own"
        ));
    }
}

/// The directories that exist in some part, by the tree's node.
struct Directory {
    parent: NodeId,
    name: Vec<u8>,
    /// The directory in each part that has it.
    made: BTreeMap<usize, NodeId>,
}

fn build(
    split: &Split,
    layer: &Layer,
    items: &[Item],
    warnings: &mut Warnings,
) -> Result<Vec<Layer>> {
    let mut parts: Vec<Layer> = (0..split.parts.len())
        .map(|part| Layer::new(part == 0))
        .collect();
    let mut directories: HashMap<NodeId, Directory> = HashMap::new();
    directories.insert(
        NodeId::ROOT,
        Directory {
            parent: NodeId::ROOT,
            name: Vec::new(),
            made: (0..parts.len()).map(|part| (part, NodeId::ROOT)).collect(),
        },
    );
    let mut copies: HashMap<(usize, NodeId), NodeId> = HashMap::new();
    let mut counts = vec![0u64; parts.len()];
    for (entry, item) in layer.tree.walk().zip(items) {
        let node = layer.tree.node(item.id);
        let name = entry.path.rsplit(|&byte| byte == b'/').next();
        let name = name.unwrap_or_default();
        if item.id == NodeId::ROOT {
            if let Some(base) = parts.first_mut() {
                base.define_start(
                    NodeId::ROOT,
                    node.metadata.clone(),
                    !layer.is_implicit(NodeId::ROOT),
                );
            }
            continue;
        }
        if item.directory {
            directories.insert(
                item.id,
                Directory {
                    parent: item.parent,
                    name: name.to_vec(),
                    made: BTreeMap::new(),
                },
            );
        }
        let Some(part) = item.part else { continue };
        if let Some(count) = counts.get_mut(part) {
            *count += 1;
        }
        let Some(target) = parts.get_mut(part) else {
            continue;
        };
        let into = if item.directory { item.id } else { item.parent };
        let made = lead(target, part, &mut directories, into)?;
        if item.directory {
            target.tree.node_mut(made).metadata = node.metadata.clone();
            target.set_implicit(made, layer.is_implicit(item.id));
            continue;
        }
        if let Some(copy) = copies.get(&(part, item.id)) {
            target.tree.link(made, name, *copy)?;
            continue;
        }
        let copy = target
            .tree
            .insert(made, name, node.metadata.clone(), node.kind.clone())?;
        if let Some(content) = layer.content(item.id) {
            target.set_content(copy, content)?;
        }
        if node.nlink() > 1 {
            copies.insert((part, item.id), copy);
        }
    }
    for (reference, count) in split.references().zip(&counts).skip(1) {
        if *count == 0 && split.is_strict() {
            return Err(PackError::InvalidOption {
                option: "strict".to_owned(),
                why: format!("{reference} would be empty: nothing matches its rules"),
            });
        }
        if *count == 0 {
            warnings.add(format!("{reference} is empty: nothing matches its rules"));
        }
    }
    Ok(parts)
}

/// The directory of a part that stands for one of the tree, made with those above it where they
/// are missing.
fn lead(
    part: &mut Layer,
    index: usize,
    directories: &mut HashMap<NodeId, Directory>,
    wanted: NodeId,
) -> Result<NodeId> {
    let mut missing = Vec::new();
    let mut at = wanted;
    let mut here = loop {
        let Some(directory) = directories.get(&at) else {
            break NodeId::ROOT;
        };
        if let Some(made) = directory.made.get(&index) {
            break *made;
        }
        missing.push(at);
        at = directory.parent;
    };
    for id in missing.into_iter().rev() {
        let Some(directory) = directories.get_mut(&id) else {
            continue;
        };
        let metadata = implicit_metadata();
        here = part
            .tree
            .insert(here, &directory.name, metadata, NodeKind::Directory)?;
        part.set_implicit(here, true);
        directory.made.insert(index, here);
    }
    Ok(here)
}
