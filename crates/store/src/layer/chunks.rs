//! Where the chunks of a layer being written are: one list of chunks, of which a large layer's lies in a
//! temporary file, with a table of numbers into it in memory, 5 to 10 bytes a chunk; and one list of
//! the frames that hold them.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use hashbrown::HashTable;

use super::dedupe::StoredChunk;
use super::pack_writer::WrittenPack;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::PackLoc;
use crate::format::pack::PackFrame;
use crate::spool::Spool;

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
    /// Bytes.
    pub(super) len: u32,
    /// Bytes from the start of its frame's raw bytes.
    pub(super) offset: u32,
    place: Place,
}

impl Known {
    pub(super) fn place(&self) -> Place {
        self.place
    }
}

/// In a record: the frame is one of the store, not a ticket.
const STORED: u32 = 1 << 31;
/// Bytes of a record: digest, length, offset, frame.
const RECORD: usize = Digest::LEN + 12;
/// Chunks that the first table has room for.
const FIRST: usize = 1 << 10;

/// A frame of the store.
#[derive(Debug, Clone, Copy)]
struct HeldFrame {
    pack: u32,
    frame: PackFrame,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    list: Spool<RECORD>,
    /// Numbers of records, by digest. Grown by reading the list again, not the table.
    table: HashTable<u32>,
    /// Numbers of frames, plus one, by tickets of frames that were written since; 0: it was not.
    settled: Vec<u32>,
    packs: Vec<PackLoc>,
    pack_numbers: HashMap<PackLoc, u32>,
    frames: Vec<HeldFrame>,
    /// Numbers of frames by pack and offset.
    frame_numbers: HashMap<(u32, u64), u32>,
    /// The frame that was added last: its pack, offset and number.
    last: Option<(PackLoc, u64, u32)>,
}

/// Digests are uniform: any of their bytes make a hash.
fn hash(digest: &[u8; Digest::LEN]) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *digest;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

fn at<T>(list: &[T], number: u32) -> Option<&T> {
    list.get(usize::try_from(number).ok()?)
}

fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
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

/// A frame as a record has it.
fn in_record(place: Place) -> Result<u32> {
    match place {
        Place::New(ticket) if ticket & STORED == 0 => Ok(ticket),
        Place::Stored(number) if number & STORED == 0 => Ok(number | STORED),
        Place::New(_) | Place::Stored(_) => Err(too_many()),
    }
}

fn encode(digest: &Digest, len: u32, offset: u32, frame: u32) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    let (head, tail) = record.split_at_mut(Digest::LEN);
    head.copy_from_slice(digest.as_bytes());
    for (to, number) in tail.chunks_exact_mut(4).zip([len, offset, frame]) {
        to.copy_from_slice(&number.to_le_bytes());
    }
    record
}

/// Digest, and length, offset and frame.
fn decode(record: &[u8; RECORD]) -> ([u8; Digest::LEN], [u32; 3]) {
    let (mut digest, mut numbers) = ([0; Digest::LEN], [0; 3]);
    let (head, tail) = record.split_at(Digest::LEN);
    digest.copy_from_slice(head);
    for (number, bytes) in numbers.iter_mut().zip(tail.chunks_exact(4)) {
        *number = bytes.try_into().map_or(0, u32::from_le_bytes);
    }
    (digest, numbers)
}

impl Holdings {
    /// A long list is to lie in a file of the directory `scratch`.
    pub(super) fn new(scratch: Option<&Path>) -> Self {
        Self {
            list: Spool::new(scratch),
            ..Self::default()
        }
    }

    fn unreadable(&self, source: io::Error) -> StoreError {
        StoreError::Io {
            operation: "keep",
            store: self.list.place(),
            key: "the list of chunks".to_owned(),
            source,
        }
    }

    /// The record of a chunk and its number.
    fn find(&self, digest: &Digest) -> Result<Option<(u32, [u32; 3])>> {
        let mut found = None;
        let mut failed = None;
        self.table.find(hash(digest.as_bytes()), |number| {
            match self.list.get(index(*number)) {
                Ok(record) => {
                    let (there, numbers) = decode(&record);
                    let same = there == *digest.as_bytes();
                    found = same.then_some((*number, numbers));
                    same
                }
                Err(error) => {
                    failed = Some(error);
                    true
                }
            }
        });
        match failed {
            Some(error) => Err(self.unreadable(error)),
            None => Ok(found),
        }
    }

    pub(super) fn get(&self, digest: &Digest) -> Result<Option<Known>> {
        Ok(self.find(digest)?.map(|(_, [len, offset, frame])| Known {
            len,
            offset,
            place: self.place_of(frame),
        }))
    }

    fn place_of(&self, frame: u32) -> Place {
        if frame & STORED != 0 {
            return Place::Stored(frame & !STORED);
        }
        let settled = at(&self.settled, frame).and_then(|number| number.checked_sub(1));
        settled.map_or(Place::New(frame), Place::Stored)
    }

    pub(super) fn contains(&self, digest: &Digest) -> Result<bool> {
        Ok(self.find(digest)?.is_some())
    }

    /// Adds a chunk. If it was there, it is said to be where it is now.
    pub(super) fn insert(
        &mut self,
        digest: Digest,
        len: u32,
        place: Place,
        offset: u32,
    ) -> Result<()> {
        if let Some((number, _)) = self.find(&digest)? {
            let record = encode(&digest, len, offset, in_record(place)?);
            let set = self.list.set(index(number), &record);
            return set.map_err(|error| self.unreadable(error));
        }
        self.insert_new(digest, len, place, offset)
    }

    /// Adds a chunk that is not there.
    pub(super) fn insert_new(
        &mut self,
        digest: Digest,
        len: u32,
        place: Place,
        offset: u32,
    ) -> Result<()> {
        let record = encode(&digest, len, offset, in_record(place)?);
        let number = next(self.list.len())?;
        self.make_room()?;
        self.list.push(&record);
        // There is room: nothing is hashed again.
        self.table
            .insert_unique(hash(digest.as_bytes()), number, |_| 0);
        Ok(())
    }

    /// Room in the table for one chunk more. The records are read in their order, so that it
    /// costs little where they are in a file.
    fn make_room(&mut self) -> Result<()> {
        if self.table.len() < self.table.capacity() {
            return Ok(());
        }
        self.rebuild((self.table.capacity() + 1).max(FIRST))
    }

    /// Gives the table's memory back until [`Holdings::wake`]. Nothing is found meanwhile.
    pub(super) fn rest(&mut self) {
        self.table = HashTable::new();
    }

    /// Ends a [`Holdings::rest`].
    pub(super) fn wake(&mut self) -> Result<()> {
        if self.table.len() == self.list.len() {
            return Ok(());
        }
        self.rebuild(self.list.len())
    }

    fn rebuild(&mut self, most: usize) -> Result<()> {
        self.table = HashTable::new(); // before the next one takes memory
        let mut table = HashTable::with_capacity(most);
        for (number, at) in (0_u32..).zip(0..self.list.len()) {
            let record = self.list.get(at).map_err(|error| self.unreadable(error))?;
            table.insert_unique(hash(&decode(&record).0), number, |_| 0);
        }
        self.table = table;
        Ok(())
    }

    /// Adds a chunk that the store has and that is not here yet.
    pub(super) fn insert_stored(&mut self, digest: &Digest, chunk: &StoredChunk) -> Result<()> {
        let pack = PackLoc {
            id: chunk.pack.id,
            size: chunk.pack.size,
        };
        let number = self.add_frame(pack, chunk.frame)?;
        self.insert_new(*digest, chunk.len, Place::Stored(number), chunk.offset)
    }

    /// Adds a chunk that the store has. If it was there, it is said to be where it is now.
    pub(super) fn put_stored(&mut self, digest: &Digest, chunk: &StoredChunk) -> Result<()> {
        let pack = PackLoc {
            id: chunk.pack.id,
            size: chunk.pack.size,
        };
        let number = self.add_frame(pack, chunk.frame)?;
        self.insert(*digest, chunk.len, Place::Stored(number), chunk.offset)
    }

    fn add_frame(&mut self, loc: PackLoc, frame: PackFrame) -> Result<u32> {
        if let Some((last, offset, number)) = self.last
            && offset == frame.offset
            && last == loc
        {
            return Ok(number);
        }
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
        self.last = Some((loc, frame.offset, known));
        Ok(known)
    }

    /// The frames of this writer, which got the `tickets` after those that are settled, are in the
    /// store now: in these packs, in the order of the tickets' numbers.
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
        for number in tickets {
            let frame = number.and_then(|number| written.get(usize::try_from(number).ok()?));
            // One without a frame cannot have chunks: sealing has flushed them all.
            self.settled.push(frame.map_or(0, |frame| frame + 1));
        }
        Ok(())
    }

    /// The number of tickets that are settled. A writer's begin there.
    pub(super) fn first_ticket(&self) -> usize {
        self.settled.len()
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
            assert!(!holdings.contains(&digest(i)).unwrap());
            holdings.insert(digest(i), i + 1, place(i), i * 2).unwrap();
        }
        for i in 0..5000 {
            let known = holdings.get(&digest(i)).unwrap().unwrap();
            assert_eq!((known.len, known.offset), (i + 1, i * 2));
            assert_eq!(known.place(), place(i));
        }
        let many = Place::New(1 << 31);
        assert!(holdings.insert(digest(5000), 1, many, 0).is_err());
        assert!(!holdings.contains(&digest(5000)).unwrap());
    }

    #[test]
    fn the_last_place_of_a_chunk_counts() {
        let mut holdings = Holdings::default();
        for (len, ticket) in [(1, 5), (2, 6)] {
            let place = Place::New(ticket);
            holdings.insert(digest(1), len, place, 0).unwrap();
        }
        let known = holdings.get(&digest(1)).unwrap().unwrap();
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
            let known = holdings
                .get(&digest(u32::try_from(i).unwrap()))
                .unwrap()
                .unwrap();
            assert_eq!(known.place(), Place::Stored(number));
            assert_eq!((known.len, known.offset), (7, 9));
        }
    }

    #[test]
    fn many_chunks_lie_in_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut holdings = Holdings::new(Some(dir.path()));
        let many = 100_000_u32;
        for i in 0..many {
            holdings
                .insert(digest(i), i + 1, Place::New(i / 7), i)
                .unwrap();
        }
        assert!(holdings.list.is_spilled());
        // Some of them once more, elsewhere.
        for i in (0..many).step_by(1000) {
            holdings
                .insert(digest(i), i + 1, Place::Stored(i), 3)
                .unwrap();
        }
        holdings.rest();
        holdings.wake().unwrap();
        for i in 0..many {
            let known = holdings.get(&digest(i)).unwrap().unwrap();
            let place = match i % 1000 {
                0 => (Place::Stored(i), 3),
                _ => (Place::New(i / 7), i),
            };
            assert_eq!((known.place(), known.offset), place);
            assert_eq!(known.len, i + 1);
        }
        assert!(!holdings.contains(&digest(many)).unwrap());
    }

    #[test]
    fn tickets_of_a_writer_that_goes_on_are_others() {
        let mut holdings = Holdings::default();
        let pack = |id| WrittenPack {
            id: digest(id),
            size: 100,
            table_offset: 50,
            frames: vec![frame(10)],
            chunks: Vec::new(),
        };
        for (id, ticket) in [(1, 0), (2, 2)] {
            assert_eq!(holdings.first_ticket(), usize::try_from(ticket).unwrap());
            holdings
                .insert(digest(id), 7, Place::New(ticket), 0)
                .unwrap();
            holdings.settle(&[Some(0), None], &[pack(id)]).unwrap();
        }
        for (id, number) in [(1, 0), (2, 1)] {
            let known = holdings.get(&digest(id)).unwrap().unwrap();
            assert_eq!(known.place(), Place::Stored(number));
        }
    }
}
