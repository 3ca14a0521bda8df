//! Repositories in diffs below a snapshot: rules about git say nothing of them unless the snapshot
//! takes them in, so what they show is told.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags, openat2};

use super::objects::{Files as _, Mounted, ReadAt};
use super::{Fate, History, Limit, MOST_READ, Named, is_unread, named};
use crate::model::Layer;
use crate::path::join;
use crate::scrub::below::{LowerLayer, covers};
use crate::scrub::report::StillBelow;
use crate::scrub::rules::GitRule;
use crate::scrub::untouched::hides;

/// Most entries of diffs that are looked at.
const MOST_ENTRIES: u64 = 200_000;
/// Most findings.
const MOST_FOUND: usize = 1000;

/// What the diffs below show.
#[derive(Debug, Default)]
pub(in crate::scrub) struct Seen {
    /// Files that the restored sandbox shows and that name newer commits, one entry for each rule.
    pub found: Vec<StillBelow>,
    /// Of rules: whether a repository that one is about has its commit.
    pub rules: Vec<(String, bool)>,
    /// Diffs that have more entries than were looked at.
    pub unseen: Vec<String>,
}

/// Looks through those of `lowers`, topmost first, that are diffs and not hidden by `layer`.
pub(in crate::scrub) fn find(
    rules: &[GitRule],
    history: &mut History,
    lowers: &[LowerLayer],
    layer: &Layer,
) -> Seen {
    let mut seen = Seen::default();
    if rules.is_empty() {
        return seen;
    }
    let mut left = MOST_ENTRIES;
    let mut above: Vec<OwnedFd> = Vec::new();
    for lower in lowers {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(root) = rustix::fs::open(&lower.path, flags, Mode::empty()) else {
            continue;
        };
        if lower.diff {
            let Ok(files) = root.try_clone() else {
                continue;
            };
            let mut look = Look {
                rules,
                history,
                layer,
                above: &above,
                files: Mounted(files),
                name: &lower.name,
                seen: &mut seen,
            };
            if !look.all(&root, &mut left) {
                seen.unseen.push(lower.name.clone());
            }
        }
        above.push(root);
    }
    seen
}

struct Look<'a> {
    rules: &'a [GitRule],
    history: &'a mut History,
    layer: &'a Layer,
    above: &'a [OwnedFd],
    files: Mounted,
    name: &'a str,
    seen: &'a mut Seen,
}

impl Look<'_> {
    /// Whether all entries were looked at.
    fn all(&mut self, root: &OwnedFd, left: &mut u64) -> bool {
        let mut todo = vec![(Vec::new(), false)];
        while let Some((path, in_git)) = todo.pop() {
            let Some(entries) = open(root, &path) else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name().to_bytes();
                if name == b"." || name == b".." {
                    continue;
                }
                let Some(rest) = left.checked_sub(1) else {
                    return false;
                };
                *left = rest;
                let path = join(&path, name);
                match entry.file_type() {
                    FileType::Directory => {
                        let objects = in_git && name == b"objects";
                        if !objects && !hides(self.layer, &path) {
                            todo.push((path, in_git || name == b".git"));
                        }
                    }
                    FileType::RegularFile if in_git => self.file(&path),
                    _ => {}
                }
            }
        }
        true
    }

    fn file(&mut self, path: &[u8]) {
        let Some(named) = named(path) else { return };
        for rule in self.rules.iter().filter(|r| r.is_about(named.directory)) {
            let limit = self.history.commit(named.directory, &rule.newer_than);
            self.seen.rules.push((rule.name.clone(), limit.is_some()));
            let Some(limit) = limit else { continue };
            let newer = is_newer(self.history, &self.files, path, &named, &limit);
            let hidden =
                || hides(self.layer, path) || self.above.iter().any(|root| covers(root, path));
            if newer && self.seen.found.len() < MOST_FOUND && !hidden() {
                self.seen.found.push(StillBelow {
                    path: format!("/{}", crate::show(path)),
                    rule: rule.name.clone(),
                    layers: vec![self.name.to_owned()],
                    visible: true,
                    links: Vec::new(),
                });
            }
        }
        // Each is told once.
        self.seen.rules.sort();
        self.seen.rules.dedup();
    }
}

/// Whether what a layer holds at a path names commits that the rule of that name is to leave out.
pub(in crate::scrub) fn names_newer(
    rules: &[GitRule],
    history: &mut History,
    root: &OwnedFd,
    path: &[u8],
    rule: &str,
) -> bool {
    let (Some(named), Ok(root)) = (named(path), root.try_clone()) else {
        return true;
    };
    let files = Mounted(root);
    let about = |one: &&GitRule| one.name == rule && one.is_about(named.directory);
    rules.iter().filter(about).any(|rule| {
        let limit = history.commit(named.directory, &rule.newer_than);
        limit.is_some_and(|limit| is_newer(history, &files, path, &named, &limit))
    })
}

/// Whether a file of git names commits newer than `limit`; one that cannot be read counts as one that
/// does.
fn is_newer(
    history: &mut History,
    files: &Mounted,
    path: &[u8],
    named: &Named<'_>,
    limit: &Limit,
) -> bool {
    match files.open(path).and_then(|file| read(&*file)) {
        Some(_) if is_unread(named) => true,
        Some(bytes) => history.fate(named, &bytes, limit) != Fate::Stays,
        None => true,
    }
}

fn open(root: &OwnedFd, path: &[u8]) -> Option<Dir> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let path = if path.is_empty() { b"." } else { path };
    let opened = openat2(root, OsStr::from_bytes(path), flags, Mode::empty(), resolve);
    Dir::new(opened.ok()?).ok()
}

/// All of a file that is not too large.
fn read(file: &dyn ReadAt) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let n = file.read_at(&mut buffer, bytes.len() as u64).ok()?;
        if n == 0 {
            return Some(bytes);
        }
        bytes.extend_from_slice(buffer.get(..n)?);
        if bytes.len() as u64 > MOST_READ {
            return None;
        }
    }
}
