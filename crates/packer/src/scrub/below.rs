//! Looks for paths in the layers that a sandbox lies on.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, fgetxattr, openat, openat2, statat,
};
use rustix::io::Errno;

use super::Asked;
use super::links::{self, Linked};
use super::report::StillBelow;
use crate::model::{Layer, OPAQUE};
use crate::path::{components, join};

/// Most entries of one directory, at any depth, that are looked at for something that is not asked for
/// by itself.
const MOST_ENTRIES: usize = 10_000;

/// A layer below the upper, as a directory of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LowerLayer {
    /// Its name in reports.
    pub name: String,
    /// Where it is mounted.
    pub path: PathBuf,
    /// Whether it is a diff, or several in one: what sandboxes wrote.
    pub diff: bool,
}

/// Those of `asked` that a layer holds below `layer`. `lowers` come topmost first; one that cannot be
/// looked into holds nothing. `is_newer`: whether a rule about git has something against what a layer
/// holds at a path.
pub(super) fn find(
    lowers: &[LowerLayer],
    layer: &Layer,
    asked: Vec<Asked>,
    is_newer: &mut dyn FnMut(&OwnedFd, &Asked) -> bool,
) -> Vec<StillBelow> {
    if asked.is_empty() {
        return Vec::new();
    }
    let roots: Vec<(&str, OwnedFd)> = lowers
        .iter()
        .filter_map(|lower| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let root = rustix::fs::open(&lower.path, flags, Mode::empty()).ok()?;
            Some((lower.name.as_str(), root))
        })
        .collect();
    let single = asked.iter().filter(|asked| !asked.whole);
    let single: HashSet<Vec<u8>> = single.map(|asked| asked.path.clone()).collect();
    let mut found = Vec::new();
    let (mut linked, mut paths) = (Vec::new(), Vec::new());
    for asked in asked {
        let path = &asked.path;
        let mut layers = Vec::new();
        let mut visible = false;
        let mut several = Vec::new();
        for (at, (name, root)) in roots.iter().enumerate() {
            match look(root, path) {
                Found::Directory if asked.whole && !has_more(root, path, &single) => {}
                // Its content here is another one.
                Found::Entry if asked.git && !is_newer(root, &asked) => {}
                found @ (Found::Entry | Found::Directory) => {
                    // What lies under another layer's entry or whiteout does not show.
                    let mut above = roots.iter().take(at);
                    visible |= layers.is_empty()
                        && !asked.hidden
                        && !above.any(|(_, root)| hides(root, path));
                    let directory = matches!(found, Found::Directory);
                    if layers.is_empty() && (asked.whole || !directory) {
                        let numbers = links::numbers(root, path, directory);
                        several = numbers.into_iter().map(|inode| (at, inode)).collect();
                    }
                    layers.push((*name).to_owned());
                }
                Found::Whiteout => break,
                Found::Nothing => {}
            }
        }
        if !layers.is_empty() {
            linked.extend(several.into_iter().map(|(layer, inode)| Linked {
                finding: found.len(),
                layer,
                inode,
            }));
            found.push(StillBelow {
                path: format!("/{}", crate::show(path)),
                rule: asked.rule,
                layers,
                visible,
                links: Vec::new(),
            });
            paths.push(asked.path);
        }
    }
    if !linked.is_empty() {
        let roots: Vec<&OwnedFd> = roots.iter().map(|(_, root)| root).collect();
        links::name(&roots, layer, &linked, &mut found, &paths);
    }
    found
}

/// Whether a layer has a path, or hides it in those below.
pub(super) fn covers(root: &OwnedFd, path: &[u8]) -> bool {
    !matches!(look(root, path), Found::Nothing) || hides(root, path)
}

enum Found {
    Entry,
    Directory,
    Whiteout,
    Nothing,
}

/// What a layer has at a path; never through a symbolic link.
fn look(root: &OwnedFd, path: &[u8]) -> Found {
    let (parent, name) = match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (
            path.get(..at).unwrap_or_default(),
            path.get(at + 1..).unwrap_or_default(),
        ),
        None => (&b"."[..], path),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let Ok(parent) = openat2(
        root,
        OsStr::from_bytes(parent),
        flags,
        Mode::empty(),
        resolve,
    ) else {
        return Found::Nothing;
    };
    match statat(&parent, OsStr::from_bytes(name), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat)
            if FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
                && stat.st_rdev == 0 =>
        {
            Found::Whiteout
        }
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
            Found::Directory
        }
        Ok(_) => Found::Entry,
        Err(_) => Found::Nothing,
    }
}

/// Whether a directory of a layer has something in it that is no directory and not one of `single`.
/// Where there is too much to look at, it has.
fn has_more(root: &OwnedFd, path: &[u8], single: &HashSet<Vec<u8>>) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let mut left = MOST_ENTRIES;
    let mut todo = vec![path.to_vec()];
    while let Some(path) = todo.pop() {
        let name = OsStr::from_bytes(&path);
        let opened = openat2(root, name, flags, Mode::empty(), resolve);
        let Some(entries) = opened.ok().and_then(|fd| Dir::new(fd).ok()) else {
            return true;
        };
        for entry in entries.flatten() {
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let Some(rest) = left.checked_sub(1) else {
                return true;
            };
            left = rest;
            let path = join(&path, name);
            match entry.file_type() {
                FileType::Directory => todo.push(path),
                // Its number tells: this may be one.
                FileType::CharacterDevice if matches!(look(root, &path), Found::Whiteout) => {}
                _ if single.contains(&path) => {}
                _ => return true,
            }
        }
    }
    false
}

/// Whether a layer that does not have a path hides it in those below: something else than a directory
/// is on the way, or a directory that is opaque.
fn hides(root: &OwnedFd, path: &[u8]) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(mut here) = openat(root, ".", flags, Mode::empty()) else {
        return false;
    };
    let name = OsStr::from_bytes(OPAQUE);
    for component in components(path) {
        let mut value = [0; 1];
        if fgetxattr(&here, name, &mut value).is_ok() && value == *b"y" {
            return true;
        }
        match openat(&here, OsStr::from_bytes(component), flags, Mode::empty()) {
            Ok(next) => here = next,
            Err(Errno::NOTDIR | Errno::LOOP) => return true,
            Err(_) => return false,
        }
    }
    false
}
