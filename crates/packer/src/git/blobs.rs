//! Ids of files' contents, taken while they are stored.

use std::io;

use sha1::Sha1;
use sha2::Sha256;

use super::index::Hash;
use crate::content::{Bytes, Next};

/// Most bytes of a file's holes that are hashed: git reads files with more.
const MAX_HOLES: u64 = 256 << 20;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A content's id in repositories of both kinds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlobIds {
    sha1: [u8; 20],
    sha256: [u8; 32],
}

impl BlobIds {
    /// Those of bytes in memory.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut hashing = Hashing::new(bytes.len() as u64);
        hashing.update(bytes);
        hashing.finish()
    }

    /// The id in a repository of that hash.
    pub(crate) fn id(&self, hash: Hash) -> &[u8] {
        match hash {
            Hash::Sha1 => &self.sha1,
            Hash::Sha256 => &self.sha256,
        }
    }
}

struct Hashing {
    sha1: Sha1,
    sha256: Sha256,
    bytes: u64,
}

impl Hashing {
    /// git hashes a content after its kind and size.
    fn new(size: u64) -> Self {
        use sha2::Digest as _;
        let header = format!("blob {size}\0");
        let mut hashing = Self {
            sha1: <Sha1 as sha1::Digest>::new(),
            sha256: Sha256::new(),
            bytes: 0,
        };
        hashing.update(header.as_bytes());
        hashing.bytes = 0;
        hashing
    }

    fn update(&mut self, bytes: &[u8]) {
        sha1::Digest::update(&mut self.sha1, bytes);
        sha2::Digest::update(&mut self.sha256, bytes);
        self.bytes += bytes.len() as u64;
    }

    fn finish(self) -> BlobIds {
        BlobIds {
            sha1: sha1::Digest::finalize(self.sha1).into(),
            sha256: sha2::Digest::finalize(self.sha256).into(),
        }
    }
}

/// A file's bytes on their way to the store, hashed as they pass.
pub(crate) struct Hashed<'a> {
    source: &'a mut dyn Bytes,
    hashing: Hashing,
    size: u64,
    holes: u64,
}

impl<'a> Hashed<'a> {
    /// Those of `source`, a file of `size` bytes.
    pub(crate) fn new(source: &'a mut dyn Bytes, size: u64) -> Self {
        Self {
            source,
            hashing: Hashing::new(size),
            size,
            holes: 0,
        }
    }

    /// The ids, if the file had as many bytes as was said.
    pub(crate) fn finish(self) -> Option<BlobIds> {
        (self.hashing.bytes == self.size).then(|| self.hashing.finish())
    }
}

impl Bytes for Hashed<'_> {
    fn next(&mut self, buffer: &mut [u8]) -> io::Result<Next> {
        let next = self.source.next(buffer)?;
        match next {
            Next::Data(n) => self.hashing.update(buffer.get(..n).unwrap_or_default()),
            Next::Hole(n) if self.holes.saturating_add(n) > MAX_HOLES => {
                // What is left out makes the size wrong, so there will be no ids.
                self.holes = MAX_HOLES;
            }
            Next::Hole(mut n) => {
                self.holes += n;
                while n > 0 {
                    let len = usize::try_from(n).unwrap_or(usize::MAX).min(ZEROS.len());
                    self.hashing.update(ZEROS.get(..len).unwrap_or_default());
                    n -= len as u64;
                }
            }
            Next::End => {}
        }
        Ok(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vast_holes_are_not_hashed() {
        struct Holes(Vec<u64>);
        impl Bytes for Holes {
            fn next(&mut self, _: &mut [u8]) -> io::Result<Next> {
                Ok(self.0.pop().map_or(Next::End, Next::Hole))
            }
        }
        let ids = |holes: Vec<u64>| {
            let size = holes.iter().sum();
            let mut source = Holes(holes);
            let mut hashed = Hashed::new(&mut source, size);
            while hashed.next(&mut [0]).unwrap() != Next::End {}
            hashed.finish()
        };
        assert_eq!(ids(vec![5, 3]), Some(BlobIds::of(&[0; 8])));
        assert_eq!(ids(vec![5, 1 << 50, 3]), None);
    }

    #[test]
    fn ids_are_those_that_git_gives() {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        // `git hash-object`, the second in a repository of --object-format=sha256.
        let empty = BlobIds::of(b"");
        assert_eq!(
            hex(empty.id(Hash::Sha1)),
            "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
        );
        assert_eq!(
            hex(empty.id(Hash::Sha256)),
            "473a0f4c3be8a93681a267e3b1e9a7dcda1185436fe141f7749120a303721813"
        );
        assert_eq!(
            hex(BlobIds::of(b"hello\n").id(Hash::Sha1)),
            "ce013625030ba8dba906f756967f9e9ca394464a"
        );
    }
}
