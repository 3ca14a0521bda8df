//! What a directory store changes on its filesystem, one method per system call, so that a test can
//! record the calls and tell what a crash may leave of them. Reading needs no such thing.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;

use fs_err as fs;

use super::PutOutcome;

/// The changes that a directory store makes. As given, they are the system's.
pub(crate) trait Disk: Send + Sync + fmt::Debug {
    /// mkdir
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    /// open, exclusively creating
    fn create_new(&self, path: &Path) -> io::Result<fs::File> {
        fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
    }

    /// write
    fn write(&self, file: &mut fs::File, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    /// fsync of a file
    fn sync_file(&self, file: &fs::File) -> io::Result<()> {
        file.sync_all()
    }

    /// fsync of a directory
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        match fs::File::open(path)?.sync_all() {
            // Filesystems that cannot sync a directory keep names durable themselves.
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
                ) =>
            {
                Ok(())
            }
            other => other,
        }
    }

    /// link
    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    /// rename
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    /// rename, if nothing has the name; `refused` is why a link was not possible
    fn rename_if_absent(
        &self,
        from: &Path,
        to: &Path,
        refused: io::Error,
    ) -> io::Result<PutOutcome> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        use rustix::io::Errno;
        match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(PutOutcome::Created),
            Err(Errno::EXIST) => Ok(PutOutcome::Exists),
            // The first error says more: the filesystem has neither.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => Err(refused),
            Err(e) => Err(e.into()),
        }
    }

    /// unlink
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

/// The system's filesystem.
#[derive(Debug)]
pub(crate) struct System;

impl Disk for System {}
