//! Looks for paths in the layers that a sandbox lies on.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, fgetxattr, openat, openat2, statat,
};
use rustix::io::Errno;

use super::Asked;
use super::report::StillBelow;
use crate::model::OPAQUE;
use crate::path::components;

/// A layer below the upper, as a directory of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LowerLayer {
    /// Its name in reports.
    pub name: String,
    /// Where it is mounted.
    pub path: PathBuf,
}

/// Those of `asked` that a layer holds. `lowers` come topmost first; one that cannot be looked into
/// holds nothing.
pub(super) fn find(lowers: &[LowerLayer], asked: Vec<Asked>) -> Vec<StillBelow> {
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
    let mut found = Vec::new();
    for asked in asked {
        let path = &asked.path;
        let mut layers = Vec::new();
        let mut visible = false;
        for (at, (name, root)) in roots.iter().enumerate() {
            match look(root, path) {
                Found::Directory if asked.whole && is_empty(root, path) => {}
                Found::Entry | Found::Directory => {
                    // What lies under another layer's entry or whiteout does not show.
                    let mut above = roots.iter().take(at);
                    visible |= layers.is_empty()
                        && !asked.hidden
                        && !above.any(|(_, root)| hides(root, path));
                    layers.push((*name).to_owned());
                }
                Found::Whiteout => break,
                Found::Nothing => {}
            }
        }
        if !layers.is_empty() {
            found.push(StillBelow {
                path: format!("/{}", crate::show(path)),
                rule: asked.rule,
                layers,
                visible,
            });
        }
    }
    found
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

/// Whether a directory of a layer has nothing in it.
fn is_empty(root: &OwnedFd, path: &[u8]) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let opened = openat2(root, OsStr::from_bytes(path), flags, Mode::empty(), resolve);
    let Some(entries) = opened.ok().and_then(|fd| Dir::new(fd).ok()) else {
        return false;
    };
    let dots = |name: &[u8]| name == b"." || name == b"..";
    entries
        .flatten()
        .all(|entry| dots(entry.file_name().to_bytes()))
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
