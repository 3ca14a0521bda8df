//! A tree that nobody looks at for a while lies elsewhere: what takes 40 bytes a file and its name
//! in memory is written out, and read back when it is wanted.

use std::io;

use super::{Entry, Metadata, Tree};
use crate::node::Slot;

/// Bytes of an inode's or an entry's numbers.
const RECORD: usize = 20;
/// Bytes that are written or read at once, a whole number of records.
const PIECE: usize = RECORD * 4096;

/// A tree of which only directories, links and the like are in memory. See [`Tree::park`].
#[derive(Debug)]
pub struct Parked {
    /// Without inodes, entries and names.
    tree: Tree,
    slots: usize,
    entries: usize,
    names: usize,
    crc: u32,
}

impl Tree {
    /// Bytes that [`Tree::park`] writes.
    pub fn parked_len(&self) -> usize {
        (self.nodes.len() + self.entries.len()) * RECORD + self.names.len()
    }

    /// Writes most of the tree to `out`, and leaves an empty tree here. The tree rests afterwards,
    /// see [`Tree::rest`]. The bytes are of use to [`Parked::unpark`] alone.
    ///
    /// # Errors
    /// What `out` fails with. Nothing has changed then.
    pub fn park(&mut self, out: &mut dyn io::Write) -> io::Result<Parked> {
        let mut sum = Sum::default();
        let slots = self.nodes.slots().iter().map(Slot::numbers);
        sum.write(slots, out)?;
        sum.write(self.entries.iter().map(Entry::numbers), out)?;
        sum.add(&self.names);
        out.write_all(&self.names)?;
        out.flush()?;
        let mut tree = std::mem::replace(self, Self::new(Metadata::default()));
        tree.rest();
        let parked = Parked {
            slots: tree.nodes.len(),
            entries: tree.entries.len(),
            names: tree.names.len(),
            crc: sum.crc,
            tree: Self {
                entries: Vec::new(),
                names: Vec::new(),
                nodes: tree.nodes.without_slots(),
                ..tree
            },
        };
        Ok(parked)
    }
}

impl Parked {
    /// The tree as it was. `input` has the bytes that [`Tree::park`] wrote.
    ///
    /// # Errors
    /// What `input` fails with; [`io::ErrorKind::InvalidData`] if the bytes are others.
    pub fn unpark(self, input: &mut dyn io::Read) -> io::Result<Tree> {
        let mut sum = Sum::default();
        let mut tree = self.tree;
        let mut slots = Vec::with_capacity(self.slots);
        sum.read(self.slots, input, |numbers| {
            slots.push(Slot::from_numbers(numbers));
        })?;
        tree.nodes.set_slots(slots);
        tree.entries = Vec::with_capacity(self.entries);
        sum.read(self.entries, input, |numbers| {
            tree.entries.push(Entry::from_numbers(numbers));
        })?;
        tree.names = vec![0; self.names];
        input.read_exact(&mut tree.names)?;
        sum.add(&tree.names);
        if sum.crc != self.crc {
            // Nothing of it may be used: numbers in it would lead anywhere.
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the bytes are not those that were written",
            ));
        }
        Ok(tree)
    }
}

impl Entry {
    fn numbers(&self) -> [u32; 5] {
        [self.parent, self.node, self.name, self.prev, self.next]
    }

    fn from_numbers([parent, node, name, prev, next]: [u32; 5]) -> Self {
        Self {
            parent,
            node,
            name,
            prev,
            next,
        }
    }
}

/// The checksum of what was written or read so far.
#[derive(Default)]
struct Sum {
    crc: u32,
}

impl Sum {
    fn add(&mut self, bytes: &[u8]) {
        self.crc = crc32c::crc32c_append(self.crc, bytes);
    }

    fn write(
        &mut self,
        records: impl Iterator<Item = [u32; 5]>,
        out: &mut dyn io::Write,
    ) -> io::Result<()> {
        let mut piece = Vec::with_capacity(PIECE);
        for record in records {
            for number in record {
                piece.extend_from_slice(&number.to_le_bytes());
            }
            if piece.len() >= PIECE {
                self.add(&piece);
                out.write_all(&piece)?;
                piece.clear();
            }
        }
        self.add(&piece);
        out.write_all(&piece)
    }

    fn read(
        &mut self,
        count: usize,
        input: &mut dyn io::Read,
        mut each: impl FnMut([u32; 5]),
    ) -> io::Result<()> {
        let mut piece = vec![0; PIECE];
        let mut left = count.saturating_mul(RECORD);
        while left > 0 {
            let len = left.min(PIECE);
            let bytes = piece.get_mut(..len).unwrap_or_default();
            input.read_exact(bytes)?;
            self.add(bytes);
            for record in bytes.chunks_exact(RECORD) {
                let mut numbers = [0; 5];
                for (number, bytes) in numbers.iter_mut().zip(record.chunks_exact(4)) {
                    *number = bytes.try_into().map_or(0, u32::from_le_bytes);
                }
                each(numbers);
            }
            left -= len;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BlockIndex, FileData, FileLayout, NodeId, NodeKind, Timestamp};
    use super::*;
    use crate::{WriteOptions, write_image};

    fn file(tree: &mut Tree, parent: NodeId, name: &str, i: u32) {
        let metadata = Metadata {
            mode: 0o644,
            uid: i % 3,
            mtime: Timestamp {
                sec: i64::from(i) - 5,
                nsec: i,
            },
            ..Metadata::default()
        };
        let start = BlockIndex::new(i.into()).unwrap();
        let data = FileData {
            size: u64::from(i) + 1,
            layout: FileLayout::Contiguous { start },
        };
        let kind = NodeKind::File(data);
        tree.insert(parent, name.as_bytes(), metadata, kind)
            .unwrap();
    }

    fn sample() -> Tree {
        let mut tree = Tree::new(Metadata::default());
        for d in 0..30 {
            let name = format!("d{d:02}");
            let kind = NodeKind::Directory;
            let dir = tree.insert(NodeId::ROOT, name.as_bytes(), Metadata::default(), kind);
            let dir = dir.unwrap();
            for i in 0..400 {
                file(&mut tree, dir, &format!("f{i}"), d * 400 + i);
            }
        }
        let link = NodeKind::Symlink(b"d01/f7".to_vec());
        tree.insert(NodeId::ROOT, b"link", Metadata::default(), link)
            .unwrap();
        let target = tree.resolve(b"d02/f9").unwrap();
        tree.link(NodeId::ROOT, b"hard", target).unwrap();
        tree.remove(NodeId::ROOT, b"d05").unwrap();
        tree
    }

    fn image(tree: &Tree) -> Vec<u8> {
        let options = WriteOptions {
            data_blocks: 1 << 20,
            device_tag: [b'x'; 64],
            ..WriteOptions::default()
        };
        let mut bytes = Vec::new();
        write_image(tree, &options, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_tree_comes_back_as_it_was() {
        let mut tree = sample();
        let before = image(&tree);
        let mut parked = Vec::new();
        let len = tree.parked_len();
        let away = tree.park(&mut parked).unwrap();
        assert_eq!(parked.len(), len);
        assert!(tree.is_empty());
        let mut back = away.unpark(&mut parked.as_slice()).unwrap();
        assert!(image(&back) == before, "another image");
        // It can be changed and asked for names.
        assert!(back.resolve(b"d29/f399").is_some());
        back.remove(NodeId::ROOT, b"hard").unwrap();
        file(&mut back, NodeId::ROOT, "hard", 3);
        assert!(back.resolve(b"hard").is_some());
        assert_eq!(back.resolve(b"d05"), None);
    }

    #[test]
    fn other_bytes_are_refused() {
        let mut tree = sample();
        let mut parked = Vec::new();
        let away = tree.park(&mut parked).unwrap();
        parked[100_000] ^= 1;
        let error = away.unpark(&mut parked.as_slice()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let mut tree = sample();
        parked.clear();
        let away = tree.park(&mut parked).unwrap();
        parked.pop();
        let error = away.unpark(&mut parked.as_slice()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_tree_stays_where_nothing_can_be_written() {
        struct Full;
        impl io::Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut tree = sample();
        let before = image(&tree);
        tree.park(&mut Full).unwrap_err();
        assert!(image(&tree) == before, "another image");
    }

    /// Entries in order are added without a table, and what is there twice is refused all the same.
    #[test]
    fn a_tree_that_rests_takes_names_in_order() {
        let mut tree = Tree::new(Metadata::default());
        tree.rest();
        for name in ["a", "b", "c"] {
            file(&mut tree, NodeId::ROOT, name, 1);
        }
        assert!(tree.resting && tree.table.is_empty());
        let kind = || NodeKind::File(FileData::empty());
        for name in [b"c", b"a", b"b"] {
            let again = tree.insert(NodeId::ROOT, name, Metadata::default(), kind());
            again.unwrap_err();
        }
        assert_eq!(tree.len(), 4);
        // Not in order: from here on it has its table.
        file(&mut tree, NodeId::ROOT, "aa", 1);
        assert!(!tree.resting && tree.table.len() == 4);
        tree.rest();
        let again = tree.insert(NodeId::ROOT, b"d", Metadata::default(), kind());
        again.unwrap();
        assert!(!tree.resting, "names did not come in order before");
        let names: Vec<_> = tree.children(NodeId::ROOT).map(|(name, _)| name).collect();
        assert_eq!(names, [b"a".as_slice(), b"aa", b"b", b"c", b"d"]);
    }
    /// Look-ups of names other than the last ones are right without a table too, and once they have cost
    /// more than the table would, it is made.
    #[test]
    fn a_tree_that_rests_wakes_when_that_is_dear() {
        const MANY: u32 = 20_000;
        let mut tree = Tree::new(Metadata::default());
        tree.rest();
        for i in 0..MANY {
            file(&mut tree, NodeId::ROOT, &format!("f{i:05}"), i);
        }
        assert!(tree.resting);
        // The newest, one after all, and one that would be before the newest cost nothing.
        for _ in 0..10_000 {
            assert!(tree.child(NodeId::ROOT, b"f19999").is_some());
            assert!(tree.child(NodeId::ROOT, b"g").is_none());
            assert!(tree.child(NodeId::ROOT, b"f199989").is_none());
        }
        tree.heed();
        assert!(tree.resting);
        assert!(tree.child(NodeId::ROOT, b"f00000").is_some());
        assert!(tree.child(NodeId::ROOT, b"a").is_none());
        assert!(tree.child(NodeId::ROOT, b"f000000").is_none());
        // Taken out without a table.
        tree.remove(NodeId::ROOT, b"f19999").unwrap();
        tree.remove(NodeId::ROOT, b"f19000").unwrap();
        assert!(tree.resting && tree.child(NodeId::ROOT, b"f19000").is_none());
        file(&mut tree, NodeId::ROOT, "f19999", 7);
        assert!(tree.resting && tree.clone().child(NodeId::ROOT, b"f19999").is_some());
        let len = tree.len();
        for _ in 0..20 {
            assert!(tree.child(NodeId::ROOT, b"f00001").is_some());
        }
        file(&mut tree, NodeId::ROOT, "f2", 7);
        assert!(!tree.resting && tree.table.len() == len);
        let mut twin = tree.clone();
        twin.rest();
        assert!(image(&twin) == image(&tree), "another image");
        for i in 0..MANY {
            let name = format!("f{i:05}");
            let found = tree.child(NodeId::ROOT, name.as_bytes());
            assert_eq!(found.is_some(), i != 19_000, "{name}");
        }
    }
}
