//! Where the chunks of a layer being written are: one list of chunks with a table of numbers into
//! it, 49 to 54 bytes a chunk, and one list of the frames that hold them.

use std::collections::HashMap;

use hashbrown::HashTable;

use super::dedupe::StoredChunk;
use super::pack_writer::WrittenPack;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::PackLoc;
use crate::format::pack::PackFrame;

/// Which frame a chunk is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// One of this writer that is not in the store yet: its ticket.
    New(u32),
    /// One of the store: its number in [`Holdings`].
    Stored(u32),
}

/// A chunk of the layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known {
    digest: Digest,
    /// Bytes.
    pub(super) len: u32,
    /// Bytes from the start of its frame's raw bytes.
    pub(super) offset: u32,
    /// A frame; the top bit tells those of the store.
    frame: u32,
}

const STORED: u32 = 1 << 31;

impl Known {
    pub(super) fn place(&self) -> Place {
        match self.frame & STORED {
            0 => Place::New(self.frame),
            _ => Place::Stored(self.frame & !STORED),
        }
    }
}

/// A frame of the store.
#[derive(Debug, Clone, Copy)]
struct HeldFrame {
    pack: u32,
    frame: PackFrame,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    list: Vec<Known>,
    table: HashTable<u32>,
    packs: Vec<PackLoc>,
    pack_numbers: HashMap<PackLoc, u32>,
    frames: Vec<HeldFrame>,
    /// Numbers of frames by pack and offset.
    frame_numbers: HashMap<(u32, u64), u32>,
}

/// Digests are uniform: any of their bytes make a hash.
fn hash(digest: &Digest) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *digest.as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

fn at<T>(list: &[T], number: u32) -> Option<&T> {
    list.get(usize::try_from(number).ok()?)
}

fn too_many() -> StoreError {
    StoreError::InvalidInput {
        object: "a layer".to_owned(),
        what: "it has more than 2^31 chunks, frames or packs".to_owned(),
    }
}

/// The number that something gets at the end of a list.
fn next(len: usize) -> Result<u32> {
    u32::try_from(len)
        .ok()
        .filter(|number| number & STORED == 0)
        .ok_or_else(too_many)
}

impl Holdings {
    pub(super) fn get(&self, digest: &Digest) -> Option<&Known> {
        let same = |number: &u32| at(&self.list, *number).is_some_and(|k| k.digest == *digest);
        let number = self.table.find(hash(digest), same)?;
        at(&self.list, *number)
    }

    pub(super) fn contains(&self, digest: &Digest) -> bool {
        self.get(digest).is_some()
    }

    /// Adds a chunk. If it was there, it is said to be where it is now.
    pub(super) fn insert(
        &mut self,
        digest: Digest,
        len: u32,
        place: Place,
        offset: u32,
    ) -> Result<()> {
        let frame = match place {
            Place::New(ticket) if ticket & STORED == 0 => ticket,
            Place::Stored(number) if number & STORED == 0 => number | STORED,
            Place::New(_) | Place::Stored(_) => return Err(too_many()),
        };
        let known = Known {
            digest,
            len,
            offset,
            frame,
        };
        let list = &mut self.list;
        let same = |number: &u32| at(list, *number).is_some_and(|k| k.digest == digest);
        if let Some(number) = self.table.find(hash(&digest), same).copied() {
            if let Some(slot) = usize::try_from(number).ok().and_then(|n| list.get_mut(n)) {
                *slot = known;
            }
            return Ok(());
        }
        let number = next(list.len())?;
        list.push(known);
        self.table.insert_unique(hash(&digest), number, |number| {
            at(list, *number).map_or(0, |known| hash(&known.digest))
        });
        Ok(())
    }

    /// Adds a chunk that the store has.
    pub(super) fn insert_stored(&mut self, digest: &Digest, chunk: &StoredChunk) -> Result<()> {
        let pack = PackLoc {
            id: chunk.pack.id,
            size: chunk.pack.size,
        };
        let number = self.add_frame(pack, chunk.frame)?;
        self.insert(*digest, chunk.len, Place::Stored(number), chunk.offset)
    }

    fn add_frame(&mut self, loc: PackLoc, frame: PackFrame) -> Result<u32> {
        let number = next(self.packs.len())?;
        let pack = *self.pack_numbers.entry(loc).or_insert(number);
        if pack == number {
            self.packs.push(loc);
        }
        let number = next(self.frames.len())?;
        let place = (pack, frame.offset);
        let known = *self.frame_numbers.entry(place).or_insert(number);
        if known == number {
            self.frames.push(HeldFrame { pack, frame });
        }
        Ok(known)
    }

    /// The frames of this writer, which got `tickets`, are in the store now: in these packs, in
    /// the order of the tickets' numbers.
    pub(super) fn settle(&mut self, tickets: &[Option<u64>], packs: &[WrittenPack]) -> Result<()> {
        let mut written = Vec::with_capacity(packs.iter().map(|p| p.frames.len()).sum());
        for pack in packs {
            let loc = PackLoc {
                id: pack.id,
                size: pack.size,
            };
            for frame in &pack.frames {
                written.push(self.add_frame(loc, *frame)?);
            }
        }
        for known in &mut self.list {
            let Place::New(ticket) = known.place() else {
                continue;
            };
            let number = at(tickets, ticket)
                .copied()
                .flatten()
                .and_then(|number| written.get(usize::try_from(number).ok()?));
            // One without a frame cannot be: sealing has flushed them all.
            if let Some(number) = number {
                known.frame = number | STORED;
            }
        }
        Ok(())
    }

    /// The packs with frames that hold chunks.
    pub(super) fn packs(&self) -> &[PackLoc] {
        &self.packs
    }

    /// The frames that hold chunks, each with its pack's number.
    pub(super) fn frames(&self) -> impl ExactSizeIterator<Item = (u32, &PackFrame)> {
        self.frames.iter().map(|held| (held.pack, &held.frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;

    fn digest(i: u32) -> Digest {
        Digest::of(&i.to_le_bytes())
    }

    fn frame(offset: u64) -> PackFrame {
        PackFrame {
            offset,
            stored_len: 1,
            raw_len: 1,
            codec: Codec::Raw,
            digest: digest(0),
        }
    }

    #[test]
    fn what_is_put_in_is_found() {
        let mut holdings = Holdings::default();
        let place = |i: u32| match i % 2 {
            0 => Place::New(i),
            _ => Place::Stored(i),
        };
        for i in 0..5000 {
            assert!(!holdings.contains(&digest(i)));
            holdings.insert(digest(i), i + 1, place(i), i * 2).unwrap();
        }
        for i in 0..5000 {
            let known = holdings.get(&digest(i)).unwrap();
            assert_eq!((known.len, known.offset), (i + 1, i * 2));
            assert_eq!(known.place(), place(i));
        }
        let many = Place::New(1 << 31);
        assert!(holdings.insert(digest(5000), 1, many, 0).is_err());
        assert!(!holdings.contains(&digest(5000)));
    }

    #[test]
    fn the_last_place_of_a_chunk_counts() {
        let mut holdings = Holdings::default();
        for (len, ticket) in [(1, 5), (2, 6)] {
            let place = Place::New(ticket);
            holdings.insert(digest(1), len, place, 0).unwrap();
        }
        let known = holdings.get(&digest(1)).unwrap();
        assert_eq!((known.len, known.place()), (2, Place::New(6)));
    }

    #[test]
    fn written_frames_take_the_place_of_tickets() {
        let mut holdings = Holdings::default();
        for i in 0..3 {
            let place = Place::New(i);
            holdings.insert(digest(i), 7, place, 9).unwrap();
        }
        // Written in another order than begun.
        let tickets = [Some(2), Some(0), Some(1), None];
        let packs = [(1, 2), (2, 1)].map(|(id, frames)| WrittenPack {
            id: digest(id),
            size: 100,
            table_offset: 50,
            frames: (0..frames).map(|f| frame(10 + f)).collect(),
            chunks: Vec::new(),
        });
        holdings.settle(&tickets, &packs).unwrap();
        let frames: Vec<_> = holdings
            .frames()
            .map(|(pack, f)| (pack, f.offset))
            .collect();
        assert_eq!(frames, [(0, 10), (0, 11), (1, 10)]);
        assert_eq!(holdings.packs().len(), 2);
        for (i, number) in [2, 0, 1].into_iter().enumerate() {
            let known = holdings.get(&digest(u32::try_from(i).unwrap())).unwrap();
            assert_eq!(known.place(), Place::Stored(number));
            assert_eq!((known.len, known.offset), (7, 9));
        }
    }
}
