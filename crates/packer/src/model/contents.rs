//! What the files of a layer hold. Most files are one chunk and nothing else, which takes 8 bytes
//! here and 32 in a temporary file, if there is to be one, so that a million of them are no burden.
//! Files without a chunk, empty ones mostly, share what is kept of the last one of their size.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use hashbrown::HashTable;
use layerpack_erofs::NodeId;
use layerpack_store::{Digest, Spool};

use crate::content::{Content, Piece, Pieces};
use crate::error::{PackError, Result};

/// The top bit of a slot: its content is among the others.
const OTHER: u32 = 1 << 31;

/// Contents that are compared at a time, about: they take 5 to 11 bytes each meanwhile.
const TOGETHER: usize = 1 << 18;

/// Contents by [`NodeId::index`].
#[derive(Debug, Default)]
pub(crate) struct Contents {
    /// 0: none; else one more than an index into one of the lists.
    slots: Vec<u32>,
    /// Files of one chunk without holes: its length, and its digest.
    lens: Vec<u32>,
    digests: Spool<{ Digest::LEN }>,
    others: Vec<Content>,
    /// What [`Contents::keep`] said of the last content without chunks of a size: of none at all, and of
    /// another one.
    without: [Option<(u64, u32)>; 2],
    /// Where temporary files are to be.
    scratch: Option<PathBuf>,
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

/// Contents of one chunk that are there more than once, by their numbers.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Repeats {
    /// Each with the least of those that are equal to it, rising.
    pairs: Vec<(u32, u32)>,
}

impl Repeats {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.pairs.len()
    }

    /// The same number, less than [`Repeats::len`], for all contents that are equal. `None`: there are
    /// no others.
    pub(crate) fn class(&self, number: u32) -> Option<usize> {
        let at = |number: u32| self.pairs.binary_search_by_key(&number, |(own, _)| *own);
        let (_, first) = self.pairs.get(at(number).ok()?)?;
        at(*first).ok()
    }
}

/// Digests are uniform: any of their bytes make a hash.
fn hash(digest: &Digest) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *digest.as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// By what digests are looked at part by part: none of the bytes of [`hash`].
fn part_of(digest: &Digest) -> u16 {
    let [.., a, b] = *digest.as_bytes();
    u16::from_le_bytes([a, b])
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
            scratch: scratch.map(Path::to_owned),
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

    /// Where temporary files are to be that have to do with these files, if anywhere.
    pub(crate) fn scratch(&self) -> Option<&Path> {
        self.scratch.as_deref()
    }

    /// Those contents of one chunk that are there more than once. Digests are looked through several
    /// times if there are many, so that only some of them have to be found at a time.
    pub(crate) fn repeats(&self) -> Result<Repeats> {
        self.repeats_among(TOGETHER)
    }

    fn repeats_among(&self, together: usize) -> Result<Repeats> {
        let mut pairs = Vec::new();
        let parts = self.lens.len().div_ceil(together).max(1);
        for part in 0..parts {
            let most = self.lens.len() / parts;
            let mut table: HashTable<u32> = HashTable::with_capacity(most + most / 16);
            for (number, _) in (0_u32..).zip(&self.lens) {
                let Some((digest, _)) = self.whole(number) else {
                    break; // told below
                };
                if usize::from(part_of(&digest)) % parts != part {
                    continue;
                }
                let hash_of = |other: &u32| self.whole(*other).map(|(digest, _)| hash(&digest));
                let same = |other: &u32| self.whole(*other).is_some_and(|(d, _)| d == digest);
                match table.find(hash(&digest), same) {
                    Some(first) => pairs.push((number, *first)),
                    None => {
                        table.insert_unique(hash(&digest), number, |other| {
                            hash_of(other).unwrap_or_default()
                        });
                    }
                }
            }
        }
        self.check()?;
        let mut firsts: Vec<u32> = pairs.iter().map(|(_, first)| *first).collect();
        firsts.sort_unstable();
        firsts.dedup();
        pairs.extend(firsts.into_iter().map(|first| (first, first)));
        pairs.sort_unstable();
        Ok(Repeats { pairs })
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
        let kept = self.keep(content)?;
        self.give(id, kept);
        Ok(())
    }

    /// Keeps a content for a file that is to be named later: a number for [`Contents::give`].
    pub(crate) fn keep(&mut self, content: Content) -> Result<u32> {
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
        Ok(match &content.pieces {
            Pieces::One(piece) if content.is_dense() => {
                self.lens.push(piece.len);
                self.digests.push(piece.digest.as_bytes());
                number(self.lens.len())?
            }
            pieces => {
                let without = match pieces.is_empty() {
                    true => self.without.get_mut(usize::from(content.size > 0)),
                    false => None,
                };
                if let Some(Some((size, kept))) = without.as_deref().copied()
                    && size == content.size
                {
                    return Ok(kept);
                }
                let kept = number(self.others.len() + 1)? | OTHER;
                if let Some(without) = without {
                    *without = Some((content.size, kept));
                }
                self.others.push(content);
                kept
            }
        })
    }

    /// Gives a file a content that was kept.
    pub(crate) fn give(&mut self, id: NodeId, kept: u32) {
        if self.slots.len() <= id.index() {
            self.slots.resize(id.index() + 1, 0);
        }
        if let Some(place) = self.slots.get_mut(id.index()) {
            *place = kept;
        }
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
    fn what_is_there_more_than_once_is_found() {
        let mut tree = Tree::new(Metadata::default());
        let mut contents = Contents::default();
        assert_eq!(contents.repeats().unwrap().len(), 0);
        for i in 0..3000_u32 {
            let kind = NodeKind::File(FileData::empty());
            let name = i.to_string();
            let id = tree.insert(NodeId::ROOT, name.as_bytes(), Metadata::default(), kind);
            // The first thousand are all different, the others are each one of a hundred.
            let what = if i < 1000 { i } else { 5000 + i % 100 };
            let piece = piece(what.into(), 10);
            let piece = Piece { offset: 0, ..piece };
            let content = Content {
                size: 10,
                pieces: vec![piece].into(),
            };
            contents.set(id.unwrap(), content).unwrap();
        }
        let whole = contents.repeats().unwrap();
        assert_eq!(whole.len(), 2000);
        for number in 0..3000 {
            let first = (number >= 1000).then_some(number % 100);
            assert_eq!(whole.class(number), first.map(|first| first as usize));
        }
        for together in [1, 13, 1000, 2999] {
            assert_eq!(contents.repeats_among(together).unwrap(), whole);
        }
    }

    #[test]
    fn files_without_chunks_share_what_is_kept() {
        let mut tree = Tree::new(Metadata::default());
        let mut contents = Contents::default();
        let mut all = Vec::new();
        for i in 0..3000_u32 {
            let kind = NodeKind::File(FileData::empty());
            let name = i.to_string();
            let id = tree.insert(NodeId::ROOT, name.as_bytes(), Metadata::default(), kind);
            // Empty, a hole of one of a few sizes, and with something else in between.
            let (size, pieces) = match i % 3 {
                0 => (0, Vec::new()),
                1 => (1 << (20 + i / 1000), Vec::new()),
                _ if i < 10 => (70_000, vec![piece(0, 10), piece(20_000, 10)]),
                _ => (0, Vec::new()),
            };
            let pieces = pieces.into();
            let content = Content { size, pieces };
            let id = id.unwrap();
            contents.set(id, content.clone()).unwrap();
            all.push((id, content));
        }
        for (id, content) in &all {
            assert!(contents.has(*id));
            assert_eq!(contents.get(*id).as_ref(), Some(content));
            assert_eq!(contents.size(*id), content.size);
        }
        // The empty one, three or four sizes of holes, three others.
        assert!(contents.others.len() < 10, "{}", contents.others.len());
        assert!(contents.lens.is_empty());
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
        assert_eq!(contents.repeats_among(7000).unwrap().len(), 0);
        // What cannot be read is told, once.
        assert_eq!(contents.whole(49_999).unwrap().1, 50_000);
        *contents.failed.lock().unwrap() = Some(io::ErrorKind::StorageFull.into());
        contents.check().unwrap_err();
        contents.check().unwrap();
    }
}
