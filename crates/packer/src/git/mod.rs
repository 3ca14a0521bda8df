//! Refreshes git's index in a layer, so that `git status` on the mounted layer believes it.
//!
//! An index remembers of each file what `stat` said when git last looked at its contents. In a
//! layer inode numbers and change times are others than where the repository was packed from, so
//! git would read every file again. While a source is read its indexes are held back and the ids
//! of its files' contents are taken; once the layer's inode numbers are known, the entries whose
//! files have just those contents get what `stat` will say of the mounted layer. SEMANTICS.md,
//! "Git indexes", says which are left alone.

mod blobs;
pub(crate) mod index;
mod refresh;
mod stored;

use std::collections::HashMap;

use layerpack_store::{Digest, LayerWriter, StoreError};

use self::blobs::{BlobIds, Hashed};
use crate::content::{self, Bytes, Content, Next, Piece, Pieces};
use crate::error::Result;

pub use refresh::GitIndex;
pub(crate) use refresh::Known;
pub(crate) use stored::Images;

/// Largest index that is refreshed in bytes, and all of one build together.
const MAX_INDEX: u64 = 64 << 20;
const MAX_HELD: usize = 256 << 20;
/// Longest text of a file `.git`.
const MAX_LINK: u64 = 4096;
/// Files beyond this size are not hashed, so git reads them.
const MAX_HASHED: u64 = 4 << 30;

/// What was seen of a source.
#[derive(Default)]
pub(crate) struct Git {
    /// Ids of contents, by [`Content::identity`].
    blobs: HashMap<Digest, BlobIds>,
    /// Indexes that are not stored yet, by their bytes' digest, which stands for their content
    /// until then.
    indexes: HashMap<Digest, Vec<u8>>,
    held: usize,
    /// Texts of files called `.git`, by [`Content::identity`].
    links: HashMap<Digest, Vec<u8>>,
}

/// Stores a file's content called `name`, as [`content::store`] does, and has `git` take note.
pub(crate) fn store(
    git: Option<&mut Git>,
    writer: &mut LayerWriter,
    name: &[u8],
    source: &mut dyn Bytes,
    size: u64,
) -> Result<Content> {
    let Some(git) = git.filter(|_| size <= MAX_HASHED) else {
        return content::store(writer, source, size);
    };
    if name == b"index" && git.has_room(size) {
        let bytes = collect(source, size)?;
        return git.small(writer, name, &bytes);
    }
    let mut hashed = Hashed::new(source, size);
    let content = content::store(writer, &mut hashed, size)?;
    if let Some(ids) = hashed.finish() {
        git.blobs.insert(content.identity(), ids);
    }
    Ok(content)
}

/// The same for a file in memory.
pub(crate) fn store_small(
    git: Option<&mut Git>,
    writer: &mut LayerWriter,
    name: &[u8],
    bytes: &[u8],
) -> Result<Content> {
    match git {
        None => content::store_small(writer, bytes),
        Some(git) => git.small(writer, name, bytes),
    }
}

impl Git {
    fn has_room(&self, size: u64) -> bool {
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        size as u64 <= MAX_INDEX && self.held.saturating_add(size) <= MAX_HELD
    }

    /// Holds an index back; what stands for its content until it is stored.
    fn hold(&mut self, bytes: &[u8]) -> Content {
        let digest = Digest::of(bytes);
        if self.indexes.insert(digest, bytes.to_vec()).is_none() {
            self.held += bytes.len();
        }
        Content {
            size: bytes.len() as u64,
            pieces: Pieces::One(Piece {
                offset: 0,
                len: u32::try_from(bytes.len()).unwrap_or(u32::MAX),
                digest,
            }),
        }
    }

    fn small(&mut self, writer: &mut LayerWriter, name: &[u8], bytes: &[u8]) -> Result<Content> {
        let size = bytes.len() as u64;
        if name == b"index" && bytes.starts_with(b"DIRC") && self.has_room(size) {
            return Ok(self.hold(bytes));
        }
        let content = content::store_small(writer, bytes)?;
        let identity = content.identity();
        if name == b".git" && size <= MAX_LINK {
            self.links.insert(identity, bytes.to_vec());
        }
        self.blobs.insert(identity, BlobIds::of(bytes));
        Ok(content)
    }
}

/// All bytes of a file that is to be held in memory.
fn collect(source: &mut dyn Bytes, size: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let next = match source.next(&mut buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            next => next.map_err(|error| content::unwrap(StoreError::Input(error)))?,
        };
        match next {
            Next::Data(n) => bytes.extend_from_slice(buffer.get(..n).unwrap_or_default()),
            Next::Hole(n) => {
                let len = bytes.len() as u64 + n;
                bytes.resize(usize::try_from(len.min(size)).unwrap_or_default(), 0);
            }
            Next::End => return Ok(bytes),
        }
        if bytes.len() as u64 > size {
            // More than was announced: whoever stores it finds out.
            return Ok(bytes);
        }
    }
}
