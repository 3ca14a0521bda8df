//! Bytes in order, most of which lie in an unnamed temporary file: what is written piece by piece and
//! read once, such as a large metadata image on its way into the store. As in [`crate::spool`], they
//! stay in memory where no file can be made or written.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::{Result, StoreError};
use crate::spool::create;

/// Bytes in memory before some go to the file.
const KEEP: usize = 1 << 20;
/// Bytes that are read at once.
const PIECE: usize = 128 << 10;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Spill {
    /// What the bytes are, for messages.
    what: &'static str,
    /// Where the file is to be; `None`: there is to be none (any more).
    directory: Option<PathBuf>,
    file: Option<File>,
    /// Bytes in the file, and their checksum.
    stored: u64,
    crc: u32,
    /// The bytes after those.
    tail: Vec<u8>,
}

impl From<Vec<u8>> for Spill {
    fn from(bytes: Vec<u8>) -> Self {
        Self {
            tail: bytes,
            ..Self::default()
        }
    }
}

impl Spill {
    /// Nothing so far of `what`, which is for messages. A file is to be in the directory `scratch`;
    /// `None`: all stays in memory.
    #[must_use]
    pub fn new(what: &'static str, scratch: Option<&Path>) -> Self {
        Self {
            what,
            directory: scratch.map(Path::to_owned),
            ..Self::default()
        }
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) {
        self.tail.extend_from_slice(bytes);
        let Some(directory) = self
            .directory
            .as_deref()
            .filter(|_| self.tail.len() >= KEEP)
        else {
            return;
        };
        if self.file.is_none() {
            self.file = create(directory).ok();
        }
        let written =
            (self.file.as_ref()).is_some_and(|f| f.write_all_at(&self.tail, self.stored).is_ok());
        if written {
            self.crc = crc32c::crc32c_append(self.crc, &self.tail);
            self.stored += self.tail.len() as u64;
            self.tail.clear();
        } else {
            self.directory = None; // what is in the file stays there, the rest here
        }
    }

    /// All bytes, if none are in a file.
    pub(crate) fn in_memory(&self) -> Option<&[u8]> {
        (self.stored == 0).then_some(self.tail.as_slice())
    }

    /// Hands all bytes to `out`, piece by piece.
    ///
    /// # Errors
    /// Those of `out`; [`StoreError::Io`] if the file cannot be read or has other bytes than were
    /// written.
    pub fn emit(&self, out: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let fail = |source| StoreError::Io {
            operation: "keep",
            store: self.place(),
            key: self.what.to_owned(),
            source,
        };
        let mut piece = vec![0; PIECE];
        let (mut at, mut crc) = (0, 0);
        while let Some(file) = self.file.as_ref().filter(|_| at < self.stored) {
            let len = usize::try_from(self.stored - at).map_or(PIECE, |left| left.min(PIECE));
            let bytes = piece.get_mut(..len).unwrap_or_default();
            file.read_exact_at(bytes, at).map_err(fail)?;
            crc = crc32c::crc32c_append(crc, bytes);
            at += len as u64;
            if at == self.stored && crc != self.crc {
                let what = "its bytes are not those that were written";
                return Err(fail(io::Error::new(io::ErrorKind::InvalidData, what)));
            }
            out(bytes)?;
        }
        out(&self.tail)
    }

    fn place(&self) -> String {
        match &self.directory {
            Some(directory) => format!("a temporary file in {}", directory.display()),
            None => "a temporary file".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(directory: Option<&Path>) -> (Spill, Vec<u8>) {
        let mut spill = Spill::new("a tree", directory);
        let mut all = Vec::new();
        for i in 0..300_u16 {
            let bytes = [i.to_le_bytes(); 5000].concat();
            spill.write(&bytes);
            all.extend(bytes);
        }
        (spill, all)
    }

    fn bytes(spill: &Spill) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        spill.emit(&mut |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(bytes)
    }

    #[test]
    fn bytes_come_back_wherever_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let (spill, all) = full(Some(dir.path()));
        assert!(spill.in_memory().is_none() && spill.tail.len() < KEEP);
        assert!(bytes(&spill).unwrap() == all);
        let (spill, all) = full(None);
        assert_eq!(spill.in_memory(), Some(all.as_slice()));
        assert!(bytes(&spill).unwrap() == all);
        // A file where the directory should be.
        let file = tempfile::NamedTempFile::new().unwrap();
        let (spill, all) = full(Some(file.path()));
        assert_eq!(spill.in_memory(), Some(all.as_slice()));
        assert!(bytes(&Spill::default()).unwrap().is_empty());
        assert_eq!(Spill::from(vec![1, 2]).in_memory(), Some([1, 2].as_slice()));
    }

    #[test]
    fn other_bytes_in_the_file_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let (spill, _) = full(Some(dir.path()));
        let file = spill.file.as_ref().unwrap();
        file.write_all_at(b"x", 777_777).unwrap();
        assert!(matches!(bytes(&spill), Err(StoreError::Io { .. })));
    }
}
