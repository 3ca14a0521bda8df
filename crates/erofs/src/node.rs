//! The inodes of a tree. Most are plain: regular files of less than 4 GiB, their bytes in one run, and
//! all other types, of a time from 1970 to 2106. Those take 20 bytes, links their targets too, files of
//! several names some more, and what many have in common, owners, modes and extended attributes, is
//! there once; all others are kept as they are.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;

use crate::tree::{BlockIndex, FileData, FileLayout, Metadata, NIL, NodeKind, Rdev, Timestamp};

/// One inode.
#[derive(Clone, Debug)]
pub struct Node {
    /// Mode, owner, time, xattrs.
    pub metadata: Metadata,
    /// Type and content. May be replaced, but not from or to a directory: the writer refuses
    /// a tree where that was done.
    pub kind: NodeKind,
    pub(crate) links: u32,
    pub(crate) first: u32, // head of the list of entries, for a directory
}

impl Node {
    pub(crate) fn new(metadata: Metadata, kind: NodeKind) -> Self {
        let links = if kind.is_dir() { 2 } else { 1 };
        Self {
            metadata,
            kind,
            links,
            first: NIL,
        }
    }

    /// Number of links as `stat` shows it: names of a file, 2 + subdirectories of a directory.
    /// 0 after the last name was removed.
    pub fn nlink(&self) -> u32 {
        self.links
    }
}

/// An inode of a tree, to be looked at.
#[derive(Clone, Debug)]
pub struct NodeRef<'t>(Shown<'t>);

#[derive(Clone, Debug)]
enum Shown<'t> {
    Whole(&'t Node),
    Plain(Node),
}

impl Deref for NodeRef<'_> {
    type Target = Node;

    fn deref(&self) -> &Node {
        match &self.0 {
            Shown::Whole(node) => node,
            Shown::Plain(node) => node,
        }
    }
}

/// Mode, user, group, and extended attributes.
type Owner = (u16, u32, u32, BTreeMap<Vec<u8>, Vec<u8>>);

/// Most different owners of plain inodes. What comes after them is kept whole.
const MAX_OWNERS: usize = 1 << 12;
/// Of these, how many may have extended attributes, and of how many bytes: what each inode has of its
/// own must not take the place of what many share.
const MAX_WITH_XATTRS: usize = MAX_OWNERS / 2;
const MAX_XATTRS: usize = 1 << 10;
/// The three top bits of [`Slot::which`] say what it is.
const FORM: u32 = 7 << 29;
/// A file: `a` is its size, `b` the block after its first, or 0.
const FILE: u32 = 0;
/// A directory: `a` is the head of its entries, `b` how many links it has.
const DIRECTORY: u32 = 1 << 29;
/// A symbolic link: its target begins at `a` and has `b` bytes.
const SYMLINK: u32 = 2 << 29;
/// The inode is kept whole, under the number that the other bits are; nothing else counts.
const WHOLE: u32 = 3 << 29;
/// Devices: `a` is the major number, `b` the minor one.
const CHAR_DEVICE: u32 = 4 << 29;
const BLOCK_DEVICE: u32 = 5 << 29;
/// Nothing but what all have.
const FIFO: u32 = 6 << 29;
const SOCKET: u32 = 7 << 29;

/// An inode, if it is plain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    /// Its form, and the number of its owner.
    which: u32,
    nsec: u32,
    sec: u32,
    a: u32,
    b: u32,
}
const _: () = assert!(size_of::<Slot>() == 20);

impl Slot {
    pub(crate) fn numbers(&self) -> [u32; 5] {
        [self.which, self.nsec, self.sec, self.a, self.b]
    }

    pub(crate) fn from_numbers([which, nsec, sec, a, b]: [u32; 5]) -> Self {
        Self {
            which,
            nsec,
            sec,
            a,
            b,
        }
    }

    fn form(&self) -> u32 {
        self.which & FORM
    }

    fn number(&self) -> usize {
        (self.which & !FORM) as usize
    }
}

/// All inodes of a tree, by [`crate::NodeId::index`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Nodes {
    slots: Vec<Slot>,
    whole: Vec<Node>,
    owners: Vec<Owner>,
    numbers: HashMap<Owner, u32>,
    /// Owners that have extended attributes.
    with_xattrs: usize,
    /// Targets of plain symbolic links, one after the other.
    targets: Vec<u8>,
    /// How many names plain files and links have, if not one.
    links: HashMap<u32, u32>,
}

#[expect(
    clippy::indexing_slicing,
    reason = "as in the tree: numbers are only made here and stay in range, slots are never dropped"
)]
impl Nodes {
    pub(crate) fn new(root: Node) -> Self {
        let mut nodes = Self::default();
        nodes.push(root);
        nodes
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The same without its slots. Of no use before [`Nodes::set_slots`].
    pub(crate) fn without_slots(self) -> Self {
        Self {
            slots: Vec::new(),
            ..self
        }
    }

    /// Puts slots back.
    pub(crate) fn set_slots(&mut self, slots: Vec<Slot>) {
        self.slots = slots;
    }

    /// Adds an inode. The caller sees to it that there are no more than 2^32.
    pub(crate) fn push(&mut self, node: Node) {
        let slot = match self.plain(&node) {
            Some(slot) => slot,
            None => self.keep(node),
        };
        self.slots.push(slot);
    }

    /// Puts an inode among the whole ones.
    fn keep(&mut self, node: Node) -> Slot {
        // Files with attributes of their own and the like: 2^29 of them take tens of GiB.
        let number = u32::try_from(self.whole.len()).unwrap_or(u32::MAX);
        assert!(number & FORM == 0, "2^29 inodes that are not plain");
        self.whole.push(node);
        Slot {
            which: number | WHOLE,
            nsec: 0,
            sec: 0,
            a: 0,
            b: 0,
        }
    }

    /// The short form of a plain inode with the links of a new one.
    fn plain(&mut self, node: &Node) -> Option<Slot> {
        let Metadata {
            mode,
            uid,
            gid,
            mtime,
            xattrs,
        } = &node.metadata;
        let sec = u32::try_from(mtime.sec).ok()?;
        let (form, a, b) = match &node.kind {
            NodeKind::File(data) if node.links == 1 => {
                let (size, start) = short(data)?;
                (FILE, size, start)
            }
            NodeKind::Directory => (DIRECTORY, node.first, node.links),
            NodeKind::Symlink(target) if node.links == 1 => {
                let len = u32::try_from(target.len()).ok()?;
                let start = u32::try_from(self.targets.len()).ok()?;
                (SYMLINK, start, len)
            }
            NodeKind::CharDevice(rdev) if node.links == 1 => (CHAR_DEVICE, rdev.major, rdev.minor),
            NodeKind::BlockDevice(rdev) if node.links == 1 => {
                (BLOCK_DEVICE, rdev.major, rdev.minor)
            }
            NodeKind::Fifo if node.links == 1 => (FIFO, 0, 0),
            NodeKind::Socket if node.links == 1 => (SOCKET, 0, 0),
            _ => return None,
        };
        let owner = (*mode, *uid, *gid, xattrs.clone());
        let number = match self.numbers.get(&owner) {
            Some(number) => *number,
            None if self.owners.len() >= MAX_OWNERS => return None,
            None if !xattrs.is_empty() => {
                let lens = xattrs.iter().map(|(name, value)| name.len() + value.len());
                if self.with_xattrs >= MAX_WITH_XATTRS || lens.sum::<usize>() > MAX_XATTRS {
                    return None;
                }
                self.with_xattrs += 1;
                self.number_owner(owner)?
            }
            None => self.number_owner(owner)?,
        };
        if let NodeKind::Symlink(target) = &node.kind {
            self.targets.extend_from_slice(target);
        }
        Some(Slot {
            which: number | form,
            nsec: mtime.nsec,
            sec,
            a,
            b,
        })
    }

    fn number_owner(&mut self, owner: Owner) -> Option<u32> {
        let number = u32::try_from(self.owners.len()).ok()?;
        self.owners.push(owner.clone());
        self.numbers.insert(owner, number);
        Some(number)
    }

    fn whole(&self, index: usize) -> Option<&Node> {
        let slot = &self.slots[index];
        (slot.form() == WHOLE).then(|| &self.whole[slot.number()])
    }

    pub(crate) fn get(&self, index: usize) -> NodeRef<'_> {
        NodeRef(match self.whole(index) {
            Some(node) => Shown::Whole(node),
            None => Shown::Plain(self.unpacked(index)),
        })
    }

    fn unpacked(&self, index: usize) -> Node {
        let slot = &self.slots[index];
        let (mode, uid, gid, xattrs) = &self.owners[slot.number()];
        let metadata = Metadata {
            mode: *mode,
            uid: *uid,
            gid: *gid,
            mtime: Timestamp {
                sec: slot.sec.into(),
                nsec: slot.nsec,
            },
            xattrs: xattrs.clone(),
        };
        let kind = match slot.form() {
            DIRECTORY => NodeKind::Directory,
            SYMLINK => {
                let start = slot.a as usize;
                NodeKind::Symlink(self.targets[start..start + slot.b as usize].to_vec())
            }
            CHAR_DEVICE => NodeKind::CharDevice(rdev(slot)),
            BLOCK_DEVICE => NodeKind::BlockDevice(rdev(slot)),
            FIFO => NodeKind::Fifo,
            SOCKET => NodeKind::Socket,
            _ => NodeKind::File(FileData {
                size: slot.a.into(),
                layout: match BlockIndex::before(slot.b) {
                    Some(start) => FileLayout::Contiguous { start },
                    None => FileLayout::Empty,
                },
            }),
        };
        Node {
            metadata,
            kind,
            links: self.links(index),
            first: self.first(index),
        }
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> &mut Node {
        if self.slots[index].form() != WHOLE {
            let node = self.unpacked(index);
            self.links.remove(&key(index));
            self.slots[index] = self.keep(node);
        }
        let number = self.slots[index].number();
        &mut self.whole[number]
    }

    pub(crate) fn set_data(&mut self, index: usize, data: FileData) {
        let slot = &mut self.slots[index];
        if slot.form() == FILE
            && let Some((size, start)) = short(&data)
        {
            slot.a = size;
            slot.b = start;
        } else if matches!(slot.form(), FILE | WHOLE)
            && let NodeKind::File(there) = &mut self.get_mut(index).kind
        {
            *there = data;
        }
    }

    /// Changes a directory's metadata. It stays plain if it can.
    pub(crate) fn set_metadata(&mut self, index: usize, metadata: Metadata) {
        if self.slots[index].form() == DIRECTORY {
            let node = Node {
                metadata,
                ..self.unpacked(index)
            };
            self.slots[index] = match self.plain(&node) {
                Some(slot) => slot,
                None => self.keep(node),
            };
        } else {
            self.get_mut(index).metadata = metadata;
        }
    }

    pub(crate) fn set_mtime(&mut self, index: usize, mtime: Timestamp) {
        let slot = &mut self.slots[index];
        if slot.form() != WHOLE
            && let Ok(sec) = u32::try_from(mtime.sec)
        {
            slot.sec = sec;
            slot.nsec = mtime.nsec;
        } else {
            self.get_mut(index).metadata.mtime = mtime;
        }
    }

    /// How many links it has.
    pub(crate) fn links(&self, index: usize) -> u32 {
        let slot = &self.slots[index];
        match slot.form() {
            WHOLE => self.whole[slot.number()].links,
            DIRECTORY => slot.b,
            _ if self.links.is_empty() => 1,
            _ => self.links.get(&key(index)).copied().unwrap_or(1),
        }
    }

    pub(crate) fn set_links(&mut self, index: usize, links: u32) {
        let slot = &mut self.slots[index];
        match slot.form() {
            WHOLE => self.whole[slot.number()].links = links,
            DIRECTORY => slot.b = links,
            _ if links == 1 => {
                self.links.remove(&key(index));
            }
            _ => {
                self.links.insert(key(index), links);
            }
        }
    }

    /// Frees what an inode without names holds.
    pub(crate) fn empty(&mut self, index: usize) {
        let slot = self.slots[index];
        if slot.form() == WHOLE {
            let node = &mut self.whole[slot.number()];
            node.metadata.xattrs = BTreeMap::new();
            if !node.kind.is_dir() {
                node.kind = NodeKind::Fifo;
            }
        }
    }

    pub(crate) fn xattrs(&self, index: usize) -> &BTreeMap<Vec<u8>, Vec<u8>> {
        let slot = &self.slots[index];
        match slot.form() {
            WHOLE => &self.whole[slot.number()].metadata.xattrs,
            _ => &self.owners[slot.number()].3,
        }
    }

    pub(crate) fn is_dir(&self, index: usize) -> bool {
        let slot = &self.slots[index];
        match slot.form() {
            WHOLE => self.whole[slot.number()].kind.is_dir(),
            form => form == DIRECTORY,
        }
    }

    /// Head of the list of entries.
    pub(crate) fn first(&self, index: usize) -> u32 {
        let slot = &self.slots[index];
        match slot.form() {
            WHOLE => self.whole[slot.number()].first,
            DIRECTORY => slot.a,
            _ => NIL,
        }
    }

    /// Sets the head of a directory's list of entries.
    pub(crate) fn set_first(&mut self, index: usize, first: u32) {
        let slot = &mut self.slots[index];
        match slot.form() {
            DIRECTORY => slot.a = first,
            _ => self.get_mut(index).first = first,
        }
    }
}

fn rdev(slot: &Slot) -> Rdev {
    Rdev {
        major: slot.a,
        minor: slot.b,
    }
}

/// An index as it is kept: there are no more than 2^32.
fn key(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// Size of a file and the block after the first of its bytes, or 0, if it is empty or one run, and not
/// too large.
fn short(data: &FileData) -> Option<(u32, u32)> {
    let size = u32::try_from(data.size).ok()?;
    match data.layout {
        FileLayout::Empty => Some((size, 0)),
        FileLayout::Contiguous { start } => Some((size, start.following())),
        FileLayout::Chunked { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(uid: u32, data: FileData) -> Node {
        let metadata = Metadata {
            mode: 0o644,
            uid,
            gid: 7,
            mtime: Timestamp { sec: 3, nsec: 9 },
            xattrs: BTreeMap::new(),
        };
        Node::new(metadata, NodeKind::File(data))
    }

    fn run(size: u64, start: u64) -> FileData {
        let start = BlockIndex::new(start).unwrap();
        FileData {
            size,
            layout: FileLayout::Contiguous { start },
        }
    }

    fn same(nodes: &Nodes, index: usize, want: &Node) {
        let node = nodes.get(index);
        assert_eq!((&node.metadata, &node.kind), (&want.metadata, &want.kind));
        assert_eq!((node.links, node.first), (want.links, want.first));
        assert_eq!(nodes.is_dir(index), want.kind.is_dir());
        assert_eq!(nodes.first(index), want.first);
        assert_eq!(nodes.xattrs(index), &want.metadata.xattrs);
    }

    #[test]
    fn every_kind_of_inode_comes_back_as_it_was() {
        let sparse = FileData {
            size: 9000,
            layout: FileLayout::Chunked {
                chunk_bits: 12,
                chunks: vec![None, BlockIndex::new(4), None],
            },
        };
        let mut with_xattr = file(1, run(5, 1));
        with_xattr
            .metadata
            .xattrs
            .insert(b"user.a".to_vec(), vec![1]);
        let mut linked = file(1, run(5, 1));
        linked.links = 2;
        let mut old = file(1, run(5, 1));
        old.metadata.mtime.sec = -3;
        let mut new = file(1, run(5, 1));
        new.metadata.mtime.sec = 1 << 32;
        let all = [
            Node::new(Metadata::default(), NodeKind::Directory),
            file(1, FileData::empty()),
            file(2, run(u32::MAX.into(), 0xffff_fffe)),
            file(1, sparse),
            with_xattr,
            linked,
            Node::new(Metadata::default(), NodeKind::Symlink(b"a".to_vec())),
            file(2, run(u64::MAX, 1)),
            file(2, run(1 << 32, 1)),
            old,
            new,
        ];
        let mut nodes = Nodes::new(all[0].clone());
        for node in all.iter().skip(1) {
            nodes.push(node.clone());
        }
        assert_eq!((nodes.len(), nodes.whole.len()), (11, 6));
        for (index, node) in all.iter().enumerate() {
            same(&nodes, index, node);
        }
        // Whole from the first change on that is not of size, place or time.
        nodes.set_data(1, run(77, 3));
        nodes.set_mtime(1, Timestamp { sec: 1, nsec: 2 });
        assert_eq!(nodes.whole.len(), 6);
        let mut changed = file(1, run(77, 3));
        changed.metadata.mtime = Timestamp { sec: 1, nsec: 2 };
        same(&nodes, 1, &changed);
        nodes.get_mut(1).metadata.uid = 5;
        changed.metadata.uid = 5;
        nodes.set_data(4, run(1, 9));
        nodes.set_mtime(0, Timestamp { sec: 5, nsec: 5 });
        assert_eq!(nodes.whole.len(), 7);
        same(&nodes, 1, &changed);
        assert_eq!(nodes.get(4).kind, NodeKind::File(run(1, 9)));
        assert_eq!(nodes.get(0).metadata.mtime, Timestamp { sec: 5, nsec: 5 });
        // What no longer fits the short form is kept whole, and all of it stays.
        nodes.set_mtime(2, Timestamp { sec: -1, nsec: 3 });
        let mut back = file(2, run(u32::MAX.into(), 0xffff_fffe));
        back.metadata.mtime = Timestamp { sec: -1, nsec: 3 };
        same(&nodes, 2, &back);
        nodes.push(file(2, run(1, 1)));
        nodes.set_data(11, run(1 << 40, 7));
        same(&nodes, 11, &file(2, run(1 << 40, 7)));
        assert_eq!(nodes.whole.len(), 9);
        // Data is for files alone.
        for index in [0, 6] {
            let before = nodes.get(index).kind.clone();
            nodes.set_data(index, run(1, 1));
            assert_eq!(nodes.get(index).kind, before);
        }
        assert!(nodes.is_dir(0));
    }

    #[test]
    fn links_and_entries_are_known_of_plain_inodes() {
        let mut nodes = Nodes::new(Node::new(Metadata::default(), NodeKind::Directory));
        nodes.push(file(1, run(5, 1)));
        for target in [b"first".to_vec(), vec![b'x'; 4095]] {
            nodes.push(Node::new(Metadata::default(), NodeKind::Symlink(target)));
        }
        for (index, links) in [(0, 7), (1, 3), (2, 1), (3, 0)] {
            nodes.set_links(index, links);
        }
        nodes.set_first(0, 77);
        assert_eq!(nodes.whole.len(), 0);
        let all = |nodes: &Nodes| {
            for (index, links, first) in [(0, 7, 77), (1, 3, NIL), (2, 1, NIL), (3, 0, NIL)] {
                let node = nodes.get(index);
                assert_eq!((nodes.links(index), node.nlink()), (links, links));
                assert_eq!((nodes.first(index), node.first), (first, first));
            }
            assert_eq!(nodes.get(2).kind, NodeKind::Symlink(b"first".to_vec()));
            assert_eq!(nodes.get(3).kind, NodeKind::Symlink(vec![b'x'; 4095]));
        };
        all(&nodes);
        // The same when they are kept whole.
        for index in 0..4 {
            nodes.get_mut(index).metadata.uid = 9;
        }
        assert_eq!(nodes.whole.len(), 4);
        all(&nodes);
        nodes.set_links(1, 2);
        nodes.set_first(0, 5);
        assert_eq!((nodes.links(1), nodes.first(0)), (2, 5));
        nodes.empty(2);
        assert_eq!(nodes.get(2).kind, NodeKind::Fifo);
    }

    #[test]
    fn devices_and_the_like_are_plain_too() {
        let mut nodes = Nodes::new(Node::new(Metadata::default(), NodeKind::Directory));
        let last = Rdev {
            major: 0xfff,
            minor: 0xf_ffff,
        };
        let kinds = [
            NodeKind::CharDevice(Rdev::default()),
            NodeKind::CharDevice(last),
            NodeKind::BlockDevice(last),
            NodeKind::Fifo,
            NodeKind::Socket,
        ];
        let all: Vec<Node> = (kinds.into_iter())
            .map(|kind| Node::new(file(3, FileData::empty()).metadata, kind))
            .collect();
        for node in &all {
            nodes.push(node.clone());
        }
        for (index, node) in (1..).zip(&all) {
            same(&nodes, index, node);
            // They may have several names, and have no data.
            nodes.set_links(index, 2);
            nodes.set_data(index, run(1, 1));
            let mut twice = node.clone();
            twice.links = 2;
            same(&nodes, index, &twice);
        }
        assert_eq!(nodes.whole.len(), 0);
        nodes.get_mut(1).metadata.uid = 8;
        assert_eq!((nodes.links(1), nodes.whole.len()), (2, 1));
        assert_eq!(nodes.get(1).kind, all[0].kind);
    }

    #[test]
    fn a_directory_that_is_defined_later_stays_plain() {
        let mut nodes = Nodes::new(Node::new(Metadata::default(), NodeKind::Directory));
        nodes.set_links(0, 5);
        nodes.set_first(0, 3);
        let mut want = Node::new(file(9, FileData::empty()).metadata, NodeKind::Directory);
        (want.links, want.first) = (5, 3);
        nodes.set_metadata(0, want.metadata.clone());
        assert_eq!(nodes.whole.len(), 0);
        same(&nodes, 0, &want);
        // A time that the short form does not have, and back.
        want.metadata.mtime.sec = -1;
        nodes.set_metadata(0, want.metadata.clone());
        assert_eq!(nodes.whole.len(), 1);
        same(&nodes, 0, &want);
        want.metadata.mtime.sec = 1;
        nodes.set_metadata(0, want.metadata.clone());
        same(&nodes, 0, &want);
        // Of anything else it is changed as well.
        nodes.push(file(1, run(5, 1)));
        nodes.set_metadata(1, want.metadata.clone());
        assert_eq!(nodes.get(1).metadata, want.metadata);
        assert_eq!(nodes.get(1).kind, NodeKind::File(run(5, 1)));
    }

    #[test]
    fn attributes_that_many_share_are_there_once() {
        let mut nodes = Nodes::new(Node::new(Metadata::default(), NodeKind::Directory));
        let with = |value: Vec<u8>| {
            let mut node = file(1, run(5, 1));
            node.metadata.xattrs.insert(b"user.a".to_vec(), value);
            node
        };
        let number = |i: usize| i.to_le_bytes().to_vec();
        for _ in 0..100 {
            nodes.push(with(b"same".to_vec()));
        }
        nodes.push(with(vec![1; MAX_XATTRS]));
        assert_eq!((nodes.owners.len(), nodes.whole.len()), (2, 1));
        // Each with its own: there is room for others all the same.
        for i in 0..MAX_WITH_XATTRS + 5 {
            nodes.push(with(number(i)));
        }
        assert_eq!(nodes.whole.len(), 7);
        nodes.push(file(77, run(5, 1)));
        assert_eq!(nodes.whole.len(), 7);
        let value = |nodes: &Nodes, index: usize| {
            let xattrs = nodes.xattrs(index);
            assert_eq!(xattrs, &nodes.get(index).metadata.xattrs);
            xattrs[&b"user.a"[..]].clone()
        };
        assert_eq!(value(&nodes, 100), b"same");
        assert_eq!(value(&nodes, 101), vec![1; MAX_XATTRS]);
        for i in 0..MAX_WITH_XATTRS + 5 {
            assert_eq!(value(&nodes, 102 + i), number(i));
        }
    }

    #[test]
    fn any_number_of_owners_fits() {
        let mut nodes = Nodes::new(Node::new(Metadata::default(), NodeKind::Directory));
        let count = u32::try_from(MAX_OWNERS).unwrap() + 10;
        for uid in 0..count {
            nodes.push(file(uid, FileData::empty()));
        }
        assert_eq!(nodes.whole.len(), 11);
        for uid in 0..count {
            assert_eq!(nodes.get(uid as usize + 1).metadata.uid, uid);
        }
    }
}
