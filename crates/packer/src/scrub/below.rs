//! Looks for paths in the layers that a sandbox lies on.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, openat2, statat};

use super::report::StillBelow;

/// A layer below the upper, as a directory of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LowerLayer {
    /// Its name in reports.
    pub name: String,
    /// Where it is mounted.
    pub path: PathBuf,
}

/// Those of `asked` (path, rule, whether the snapshot hides it) that a layer holds. `lowers` come
/// topmost first; one that cannot be looked into holds nothing.
pub(super) fn find(lowers: &[LowerLayer], asked: Vec<(Vec<u8>, String, bool)>) -> Vec<StillBelow> {
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
    for (path, rule, hidden) in asked {
        let mut layers = Vec::new();
        let mut visible = false;
        for (name, root) in &roots {
            match look(root, &path) {
                Found::Entry => {
                    // What lies under another layer's entry or whiteout does not show.
                    visible |= layers.is_empty() && !hidden;
                    layers.push((*name).to_owned());
                }
                Found::Whiteout => break,
                Found::Nothing => {}
            }
        }
        if !layers.is_empty() {
            found.push(StillBelow {
                path: format!("/{}", crate::show(&path)),
                rule,
                layers,
                visible,
            });
        }
    }
    found
}

enum Found {
    Entry,
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
        Ok(_) => Found::Entry,
        Err(_) => Found::Nothing,
    }
}
