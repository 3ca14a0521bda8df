//! Other names of files that rules speak of, in the layers below.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, statat};

use super::below::covers;
use super::report::StillBelow;
use super::untouched::hides;
use crate::model::Layer;
use crate::path::join;

/// Most entries that are looked at for them.
const MOST_ENTRIES: u64 = 200_000;
/// Most entries of one directory that are asked for their number of names.
const MOST_IN_DIRECTORY: u64 = 1000;
/// Most names of one file that are told.
const MOST_NAMES: usize = 20;

/// A file with several names: what was found of it, and where.
#[derive(Debug, Clone, Copy)]
pub(super) struct Linked {
    /// Which of the findings it is.
    pub finding: usize,
    /// Which of the layers has it.
    pub layer: usize,
    /// Its number there.
    pub inode: u64,
}

/// Adds to the findings the other names that the restored sandbox shows.
pub(super) fn name(
    roots: &[&OwnedFd],
    layer: &Layer,
    linked: &[Linked],
    found: &mut [StillBelow],
    paths: &[Vec<u8>],
) {
    let mut left = MOST_ENTRIES;
    for (at, root) in roots.iter().enumerate() {
        let mut wanted: HashMap<u64, Vec<usize>> = HashMap::new();
        for file in linked.iter().filter(|file| file.layer == at) {
            wanted.entry(file.inode).or_default().push(file.finding);
        }
        if wanted.is_empty() {
            continue;
        }
        let above = roots.get(..at).unwrap_or_default();
        let mut names: Vec<(u64, Vec<u8>)> = Vec::new();
        walk(root, b"", &mut left, &mut |inode, path| {
            if wanted.contains_key(&inode) {
                names.push((inode, path));
            }
        });
        names.sort();
        for (inode, path) in names {
            let hidden = hides(layer, &path) || above.iter().any(|root| covers(root, &path));
            if hidden {
                continue;
            }
            for finding in wanted.get(&inode).into_iter().flatten() {
                let own = paths.get(*finding).is_some_and(|own| is_in(&path, own));
                if let Some(found) = found.get_mut(*finding).filter(|_| !own)
                    && found.links.len() < MOST_NAMES
                {
                    found.links.push(format!("/{}", crate::show(&path)));
                }
            }
        }
    }
}

/// Whether a path is another, or below it.
fn is_in(path: &[u8], other: &[u8]) -> bool {
    path.strip_prefix(other)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

/// All in a directory of a layer that is none, by number, as long as any are `left` to be looked at.
fn walk(root: &OwnedFd, from: &[u8], left: &mut u64, entry: &mut dyn FnMut(u64, Vec<u8>)) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let mut todo = vec![from.to_vec()];
    while let Some(path) = todo.pop() {
        let here = if path.is_empty() {
            b"."
        } else {
            path.as_slice()
        };
        let opened = openat2(root, OsStr::from_bytes(here), flags, Mode::empty(), resolve);
        let Some(entries) = opened.ok().and_then(|fd| Dir::new(fd).ok()) else {
            continue;
        };
        for found in entries.flatten() {
            let name = found.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let Some(rest) = left.checked_sub(1) else {
                return;
            };
            *left = rest;
            let path = join(&path, name);
            match found.file_type() {
                FileType::Directory => todo.push(path),
                _ => entry(found.ino(), path),
            }
        }
    }
}

/// Numbers of files with several names at a path that was found, or in the directory there.
pub(super) fn numbers(root: &OwnedFd, path: &[u8], directory: bool) -> Vec<u64> {
    let several = |path: &[u8]| {
        let stat = statat(root, OsStr::from_bytes(path), AtFlags::SYMLINK_NOFOLLOW).ok()?;
        let file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        (file && stat.st_nlink > 1).then_some(stat.st_ino)
    };
    if !directory {
        return several(path).into_iter().collect();
    }
    let mut found = Vec::new();
    let mut left = MOST_IN_DIRECTORY;
    walk(root, path, &mut left, &mut |_, path| {
        found.extend(several(&path));
    });
    found.sort_unstable();
    found.dedup();
    found
}
