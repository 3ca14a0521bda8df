//! What the files of a layer hold. Most files are one chunk and nothing else, which takes 8 bytes
//! here and 32 in a temporary file, if there is to be one, so that a million of them are no burden.

use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use layerpack_erofs::NodeId;
use layerpack_store::{Digest, Spool};

use crate::content::{Content, Piece, Pieces};
use crate::error::{PackError, Result};

/// The top bit of a slot: its content is among the others.
const OTHER: u32 = 1 << 31;

/// Contents by [`NodeId::index`].
#[derive(Debug, Default)]
pub(crate) struct Contents {
    /// 0: none; else one more than an index into one of the lists.
    slots: Vec<u32>,
    /// Files of one chunk without holes: its length, and its digest.
    lens: Vec<u32>,
    digests: Spool<{ Digest::LEN }>,
    others: Vec<Content>,
    /// Why a digest could not be read. What was not there for that reason is missing in whatever
    /// was made of it: see [`Contents::check`].
    failed: Mutex<Option<io::Error>>,
}

/// A file's content, where it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held<'a> {
    /// One chunk without holes: its number, for [`Contents::whole`].
    Whole(u32),
    /// Anything else.
    Other(&'a Content),
}

fn index(number: u32) -> Option<usize> {
    usize::try_from(number.checked_sub(1)?).ok()
}

impl Contents {
    /// None so far. Digests of many are to lie in a file of the directory `scratch`. Whoever uses
    /// them asks [`Contents::check`] in the end.
    pub(crate) fn spooled(scratch: Option<&Path>) -> Self {
        Self {
            digests: Spool::new(scratch),
            ..Self::default()
        }
    }

    /// Whether everything that was asked for could be read so far.
    pub(crate) fn check(&self) -> Result<()> {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        match failed.take() {
            None => Ok(()),
            Some(source) => Err(PackError::Write {
                path: self.digests.place(),
                source,
            }),
        }
    }

    /// Forgets which file has which content; [`Contents::whole`] goes on to work.
    pub(crate) fn forget_files(&mut self) {
        self.slots = Vec::new();
    }

    /// How many files of one chunk without holes there are at most.
    pub(crate) fn most_whole(&self) -> usize {
        self.lens.len()
    }

    /// Where a file's content is kept.
    pub(crate) fn held(&self, id: NodeId) -> Option<Held<'_>> {
        let slot = *self.slots.get(id.index())?;
        if slot & OTHER != 0 {
            return self.others.get(index(slot & !OTHER)?).map(Held::Other);
        }
        Some(Held::Whole(slot.checked_sub(1)?))
    }

    /// Digest and length of the chunk that is the content with this number.
    pub(crate) fn whole(&self, number: u32) -> Option<(Digest, u32)> {
        let number = usize::try_from(number).ok()?;
        let len = *self.lens.get(number)?;
        match self.digests.get(number) {
            Ok(digest) => Some((Digest::from_bytes(digest), len)),
            Err(error) => {
                let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
                failed.get_or_insert(error);
                None
            }
        }
    }

    /// A file's content.
    pub(crate) fn get(&self, id: NodeId) -> Option<Content> {
        match self.held(id)? {
            Held::Other(content) => Some(content.clone()),
            Held::Whole(number) => {
                let (digest, len) = self.whole(number)?;
                Some(Content {
                    size: len.into(),
                    pieces: Pieces::One(Piece {
                        offset: 0,
                        len,
                        digest,
                    }),
                })
            }
        }
    }

    /// A file's size in bytes; 0 without a content.
    pub(crate) fn size(&self, id: NodeId) -> u64 {
        match self.held(id) {
            None => 0,
            Some(Held::Other(content)) => content.size,
            Some(Held::Whole(number)) => {
                let len = usize::try_from(number).ok().and_then(|n| self.lens.get(n));
                len.map_or(0, |len| (*len).into())
            }
        }
    }

    /// Whether a file has a content.
    pub(crate) fn has(&self, id: NodeId) -> bool {
        self.held(id).is_some()
    }

    /// Gives a file its content.
    pub(crate) fn set(&mut self, id: NodeId, content: Content) -> Result<()> {
        if self.slots.len() <= id.index() {
            self.slots.resize(id.index() + 1, 0);
        }
        let number = |len: usize| {
            u32::try_from(len)
                .ok()
                .filter(|number| number & OTHER == 0)
                .ok_or_else(|| PackError::Limit {
                    object: "the layer".to_owned(),
                    name: "files",
                    limit: OTHER.into(),
                    unit: "files",
                })
        };
        let slot = match &content.pieces {
            Pieces::One(piece) if content.is_dense() => {
                self.lens.push(piece.len);
                self.digests.push(piece.digest.as_bytes());
                number(self.lens.len())?
            }
            _ => {
                self.others.push(content);
                number(self.others.len())? | OTHER
            }
        };
        if let Some(place) = self.slots.get_mut(id.index()) {
            *place = slot;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use layerpack_erofs::{FileData, Metadata, NodeKind, Tree};

    use super::*;

    fn piece(offset: u64, len: u32) -> Piece {
        Piece {
            offset,
            len,
            digest: Digest::of(&offset.to_le_bytes()),
        }
    }

    #[test]
    fn what_is_set_comes_back() {
        let mut tree = Tree::new(Metadata::default());
        let mut ids = Vec::new();
        for name in [b"a", b"b", b"c", b"d", b"e"] {
            let kind = NodeKind::File(FileData::empty());
            let id = tree.insert(NodeId::ROOT, name, Metadata::default(), kind);
            ids.push(id.unwrap());
        }
        let of = |size, pieces: &[Piece]| Content {
            size,
            pieces: pieces.to_vec().into(),
        };
        let all = [
            of(10, &[piece(0, 10)]),
            of(20, &[piece(0, 10)]),
            of(20, &[piece(0, 10), piece(10, 10)]),
            of(0, &[]),
        ];
        let mut contents = Contents::default();
        // The last file gets none, and each of the others another one first.
        for round in [1, 0] {
            for (at, id) in ids.iter().take(4).enumerate() {
                contents.set(*id, all[(at + round) % 4].clone()).unwrap();
            }
        }
        for (id, content) in ids.iter().zip(&all) {
            assert_eq!(contents.get(*id).as_ref(), Some(content));
            assert_eq!(contents.size(*id), content.size);
            assert!(contents.has(*id));
        }
        assert_eq!(contents.get(ids[4]), None);
        assert_eq!(contents.size(ids[4]), 0);
        assert!(!contents.has(ids[4]));
    }

    #[test]
    fn contents_of_many_files_lie_in_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut tree = Tree::new(Metadata::default());
        let mut contents = Contents::spooled(Some(dir.path()));
        let mut ids = Vec::new();
        for i in 0..50_000_u32 {
            let kind = NodeKind::File(FileData::empty());
            let name = i.to_string();
            let id = tree.insert(NodeId::ROOT, name.as_bytes(), Metadata::default(), kind);
            ids.push(id.unwrap());
        }
        let of = |i: u32| Content {
            size: (i + 1).into(),
            pieces: vec![Piece {
                offset: 0,
                len: i + 1,
                digest: Digest::of(&i.to_le_bytes()),
            }]
            .into(),
        };
        for (i, id) in (0..).zip(&ids) {
            contents.set(*id, of(i)).unwrap();
        }
        assert!(contents.digests.is_spilled());
        for (i, id) in (0..).zip(&ids) {
            assert_eq!(contents.get(*id), Some(of(i)));
            assert_eq!(contents.size(*id), u64::from(i) + 1);
        }
        contents.check().unwrap();
        // What cannot be read is told, once.
        assert_eq!(contents.whole(49_999).unwrap().1, 50_000);
        *contents.failed.lock().unwrap() = Some(io::ErrorKind::StorageFull.into());
        contents.check().unwrap_err();
        contents.check().unwrap();
    }
}
