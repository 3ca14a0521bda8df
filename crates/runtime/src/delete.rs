//! Deleting a sandbox's files.
//!
//! What a sandbox wrote is hostile: names, links, depth. Everything is done
//! relative to open directories and no link is followed. A tree deeper than
//! [`DEPTH`] is flattened on the way (its directories are moved to the top),
//! so that neither the stack nor the number of open files grows with it.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Result, RuntimeError};

/// How deep directories are entered before they are moved to the top.
const DEPTH: usize = 32;

/// Deletes the directory `path` with all that is in it; it may be missing.
pub(crate) fn tree(path: &Path) -> Result<()> {
    let error = |e: Errno| RuntimeError::Setup {
        step: format!("deleting {}", path.display()),
        problem: std::io::Error::from(e).to_string(),
    };
    let top = match open_directory(CWD, path) {
        Ok(top) => top,
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(error(e)),
    };
    let mut moved = 0u64;
    // Each round deletes at least DEPTH levels; it ends when nothing was moved.
    loop {
        let before = moved;
        empty(&top, top.as_fd(), DEPTH, &mut moved).map_err(error)?;
        if moved == before {
            break;
        }
    }
    match rustix::fs::rmdir(path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(error(e)),
    }
}

fn open_directory(at: BorrowedFd<'_>, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, name, flags, Mode::empty())
}

fn empty(
    directory: &OwnedFd,
    top: BorrowedFd<'_>,
    depth: usize,
    moved: &mut u64,
) -> rustix::io::Result<()> {
    // Names first: the directory changes while they are worked off.
    let names: Vec<CString> = Dir::read_from(directory)?
        .filter_map(|entry| entry.ok().map(|e| e.file_name().to_owned()))
        .filter(|name| name.as_c_str() != c"." && name.as_c_str() != c"..")
        .collect();
    for name in names {
        match rustix::fs::unlinkat(directory, name.as_c_str(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR | Errno::PERM) => {
                remove_directory(directory, &name, top, depth, moved)?
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn remove_directory(
    parent: &OwnedFd,
    name: &CStr,
    top: BorrowedFd<'_>,
    depth: usize,
    moved: &mut u64,
) -> rustix::io::Result<()> {
    // Often it is empty, or gone.
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTEMPTY | Errno::EXIST) => {}
        Err(e) => return Err(e),
    }
    if depth == 0 {
        loop {
            *moved += 1;
            let flat = format!(".layerpack-deleting-{moved}");
            match rustix::fs::renameat_with(
                parent,
                name,
                top,
                flat.as_str(),
                rustix::fs::RenameFlags::NOREPLACE,
            ) {
                Err(Errno::EXIST) => {}
                other => return other,
            }
        }
    }
    let directory = open_directory(parent.as_fd(), name)?;
    empty(&directory, top, depth - 1, moved)?;
    rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_not_followed_and_the_outside_stays() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        fs_err::create_dir(&outside).unwrap();
        fs_err::write(outside.join("kept"), b"x").unwrap();
        let tree_at = dir.path().join("tree");
        fs_err::create_dir_all(tree_at.join("a/b")).unwrap();
        symlink(&outside, tree_at.join("a/link")).unwrap();
        symlink("/", tree_at.join("root")).unwrap();
        fs_err::write(tree_at.join("a/b/file"), b"x").unwrap();
        tree(&tree_at).unwrap();
        assert!(!tree_at.exists());
        assert!(outside.join("kept").exists());
        tree(&tree_at).unwrap();
    }

    #[test]
    fn very_deep_trees_go() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("tree");
        fs_err::create_dir(&top).unwrap();
        let mut at = open_directory(CWD, top.as_path()).unwrap();
        for _ in 0..3000 {
            rustix::fs::mkdirat(&at, "directory", Mode::RWXU).unwrap();
            at = open_directory(at.as_fd(), "directory").unwrap();
        }
        drop(at);
        tree(&top).unwrap();
        assert!(!top.exists());
    }
}
