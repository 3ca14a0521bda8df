//! The bytes of an open file, with its holes skipped, and whether it stayed as it was.

use std::io;
use std::os::fd::OwnedFd;

use rustix::buffer::spare_capacity;
use rustix::fs::{SeekFrom, Stat, fstat, seek};
use rustix::io::{Errno, pread};

use crate::content::{Bytes, Next};
use crate::error::PackError;
use crate::options::Progress;

/// What must not change from when a file is first seen until all of it has been read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    dev: u64,
    ino: u64,
    size: u64,
    mtime: (i64, u64),
    ctime: (i64, u64),
}

impl Identity {
    /// That of a stat.
    pub(crate) fn of(stat: &Stat) -> Self {
        Self {
            dev: stat.st_dev,
            ino: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or_default(),
            mtime: (stat.st_mtime, stat.st_mtime_nsec),
            ctime: (stat.st_ctime, stat.st_ctime_nsec),
        }
    }

    /// A file's size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// From what [`Identity::place`] and the others say.
    pub(crate) fn from_parts(
        (dev, ino): (u64, u64),
        size: u64,
        mtime: (i64, u64),
        ctime: (i64, u64),
    ) -> Self {
        Self {
            dev,
            ino,
            size,
            mtime,
            ctime,
        }
    }

    /// Device and inode number.
    pub(crate) fn place(&self) -> (u64, u64) {
        (self.dev, self.ino)
    }

    /// Time of last modification: seconds since 1970, nanoseconds.
    pub(crate) fn mtime(&self) -> (i64, u64) {
        self.mtime
    }

    /// Time of last change of bytes or metadata: seconds since 1970, nanoseconds.
    pub(crate) fn ctime(&self) -> (i64, u64) {
        self.ctime
    }

    /// What is different in `other`.
    pub(crate) fn difference(&self, other: &Self) -> Option<&'static str> {
        if (self.dev, self.ino) != (other.dev, other.ino) {
            Some("another file took its place")
        } else if self.size != other.size {
            Some("its size changed")
        } else if self.mtime != other.mtime {
            Some("its modification time changed")
        } else if self.ctime != other.ctime {
            Some("its change time changed")
        } else {
            None
        }
    }
}

/// An open file as it was seen first.
pub(crate) struct OpenFile {
    fd: OwnedFd,
    path: Vec<u8>,
    identity: Identity,
    /// Fewer blocks than bytes: it may have holes.
    sparse: bool,
}

impl OpenFile {
    /// Takes `fd` as the file that was seen as `identity`. Whether it is that is only known after
    /// [`OpenFile::check`].
    pub(crate) fn new(fd: OwnedFd, path: Vec<u8>, identity: Identity) -> Self {
        Self {
            fd,
            path,
            identity,
            sparse: false,
        }
    }

    /// Finds out whether it is the file that was seen, and whether it may have holes.
    pub(crate) fn look(&mut self) -> Result<(), PackError> {
        let stat = self.stat()?;
        let blocks = u64::try_from(stat.st_blocks).unwrap_or_default();
        self.sparse = blocks.saturating_mul(512) < self.identity.size;
        self.unchanged(&stat)
    }

    fn stat(&self) -> Result<Stat, PackError> {
        fstat(&self.fd).map_err(|errno| self.error(errno))
    }

    fn error(&self, errno: Errno) -> PackError {
        // A fifo that took a file's place cannot be read at an offset: that it did is what matters.
        if let Ok(stat) = fstat(&self.fd)
            && let Err(changed) = self.unchanged(&stat)
        {
            return changed;
        }
        PackError::io("read", crate::show(&self.path), errno)
    }

    /// The descriptor.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// The file's size in bytes, as first seen.
    pub(crate) fn size(&self) -> u64 {
        self.identity.size
    }

    fn unchanged(&self, stat: &Stat) -> Result<(), PackError> {
        match self.identity.difference(&Identity::of(stat)) {
            None => Ok(()),
            Some(what) => Err(PackError::Changed {
                path: crate::show(&self.path),
                what: what.to_owned(),
            }),
        }
    }

    /// Checks that the file is still what it was, and that all of it was read.
    pub(crate) fn check(&self, read: u64) -> Result<(), PackError> {
        self.unchanged(&self.stat()?)?;
        if read != self.identity.size {
            let what = format!("{read} bytes could be read, it has {}", self.identity.size);
            return Err(PackError::Changed {
                path: crate::show(&self.path),
                what,
            });
        }
        Ok(())
    }

    /// Its bytes from the start.
    pub(crate) fn bytes<'a>(&'a self, progress: &'a dyn Progress) -> FileBytes<'a> {
        FileBytes {
            file: self,
            progress,
            at: 0,
            data_end: if self.sparse { 0 } else { self.identity.size },
        }
    }

    /// All of a small file.
    pub(crate) fn read_whole(&self, progress: &dyn Progress) -> Result<Vec<u8>, PackError> {
        let size = usize::try_from(self.identity.size).unwrap_or(usize::MAX);
        let mut bytes = Vec::with_capacity(size);
        while bytes.len() < size {
            let at = bytes.len() as u64;
            match pread(&self.fd, spare_capacity(&mut bytes), at) {
                Ok(0) => break,
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(self.error(errno)),
            }
        }
        // More than there was, if the file grew: the check says so.
        let read = bytes.len() as u64;
        self.check(read)?;
        progress.bytes(read);
        Ok(bytes)
    }
}

/// See [`OpenFile::bytes`].
pub(crate) struct FileBytes<'a> {
    file: &'a OpenFile,
    progress: &'a dyn Progress,
    at: u64,
    /// Up to here there are no holes.
    data_end: u64,
}

impl FileBytes<'_> {
    fn error(&self, errno: Errno) -> io::Error {
        io::Error::other(self.file.error(errno))
    }
}

impl Bytes for FileBytes<'_> {
    fn next(&mut self, buffer: &mut [u8]) -> io::Result<Next> {
        let (fd, size) = (&self.file.fd, self.file.identity.size);
        if self.at >= size {
            return Ok(Next::End);
        }
        if self.at >= self.data_end {
            let start = match seek(fd, SeekFrom::Data(self.at)) {
                Ok(start) => start.min(size),
                Err(Errno::NXIO) => size,
                // A filesystem that knows no holes.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                    self.data_end = size;
                    self.at
                }
                Err(errno) => return Err(self.error(errno)),
            };
            if start > self.at {
                let hole = start - self.at;
                self.at = start;
                return Ok(Next::Hole(hole));
            }
            if self.data_end != size {
                self.data_end = match seek(fd, SeekFrom::Hole(self.at)) {
                    Ok(end) if end > self.at => end.min(size),
                    Ok(_) | Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NXIO) => size,
                    Err(errno) => return Err(self.error(errno)),
                };
            }
        }
        let want = usize::try_from(self.data_end - self.at)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        match pread(fd, buffer.get_mut(..want).unwrap_or_default(), self.at) {
            // Shorter than it was: the check at the end says so.
            Ok(0) => Ok(Next::End),
            Ok(n) => {
                self.at += n as u64;
                self.progress.bytes(n as u64);
                Ok(Next::Data(n))
            }
            Err(Errno::INTR) => Err(io::ErrorKind::Interrupted.into()),
            Err(errno) => Err(self.error(errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{FileType, Mode, OFlags, open, stat};

    use super::*;
    use crate::options::Silent;

    #[test]
    fn a_fifo_in_a_files_place_is_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let (file, fifo) = (dir.path().join("file"), dir.path().join("fifo"));
        fs_err::write(&file, b"bytes").unwrap();
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, mode, 0).unwrap();
        let seen = Identity::of(&stat(&file).unwrap());
        let fd = open(&fifo, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty()).unwrap();
        let opened = OpenFile::new(fd, b"file".to_vec(), seen);
        let error = opened.read_whole(&Silent).unwrap_err();
        assert!(matches!(error, PackError::Changed { .. }), "{error}");
    }
}
