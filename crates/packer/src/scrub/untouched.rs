//! Paths that rules name outright and the sandbox did not touch: the layers below may hold them. Only
//! so many names are looked up, whatever the layers hold.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{Dir, Mode, OFlags, ResolveFlags, openat2};

use super::Asked;
use super::below::LowerLayer;
use super::rules::Rules;
use crate::model::Layer;
use crate::path::{components, join};

/// Most directories in `/home` that are looked into.
const MOST_HOMES: usize = 100;
/// Most paths that are looked up.
const MOST: usize = 10_000;

/// Paths to look up in `lowers` besides those of `asked`, with whether `layer` hides them.
pub(super) fn find(
    rules: &Rules,
    lowers: &[LowerLayer],
    layer: &Layer,
    asked: &[Asked],
) -> Vec<Asked> {
    if lowers.is_empty() {
        return Vec::new();
    }
    let mut paths: BTreeSet<Vec<u8>> = BTreeSet::new();
    let mut homes = None;
    for literal in rules.literals() {
        if !literal.anywhere {
            paths.insert(literal.path);
            continue;
        }
        let homes = homes.get_or_insert_with(|| homes_in(lowers));
        paths.extend(homes.iter().map(|home| join(home, &literal.path)));
    }
    let known: BTreeSet<&[u8]> = asked.iter().map(|asked| asked.path.as_slice()).collect();
    let mut found = Vec::new();
    for path in paths.into_iter().take(MOST) {
        // What was asked for is in the report by itself; other things in a directory are not.
        if known.contains(path.as_slice()) {
            continue;
        }
        if let Some(rule) = rules.names_untouched(&path) {
            found.push(Asked {
                rule: rule.name.clone(),
                hidden: hides(layer, &path),
                whole: true,
                git: false,
                path,
            });
        }
    }
    found
}

/// Where names that may be anywhere are looked for: the root, and home directories.
fn homes_in(lowers: &[LowerLayer]) -> BTreeSet<Vec<u8>> {
    let mut homes = BTreeSet::from([Vec::new(), b"root".to_vec()]);
    for lower in lowers {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(root) = rustix::fs::open(&lower.path, flags, Mode::empty()) else {
            continue;
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve =
            ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let home = openat2(
            &root,
            OsStr::from_bytes(b"home"),
            flags,
            Mode::empty(),
            resolve,
        );
        let Some(entries) = home.ok().and_then(|home| Dir::new(home).ok()) else {
            continue;
        };
        for entry in entries.flatten() {
            let name = entry.file_name().to_bytes();
            if homes.len() < MOST_HOMES && name != b"." && name != b".." {
                homes.insert(join(b"home", name));
            }
        }
    }
    homes
}

/// Whether a layer hides what lies below it at a path.
pub(super) fn hides(layer: &Layer, path: &[u8]) -> bool {
    let mut here = layerpack_erofs::NodeId::ROOT;
    for name in components(path) {
        if layer.is_opaque(here) {
            return true;
        }
        match layer.tree.child(here, name) {
            None => return false,
            Some(id) if layer.tree.node(id).kind.is_dir() => here = id,
            Some(_) => return true,
        }
    }
    layer.is_opaque(here)
}
