//! The inodes of a tree. Most are plain files: regular, one name, no extended attributes, their bytes
//! in one run, of less than 4 GiB and of a time from 1970 to 2106. Those take 20 bytes; all others are
//! kept as they are.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;

use crate::tree::{BlockIndex, FileData, FileLayout, Metadata, NIL, NodeKind, Timestamp};

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

/// Mode, user and group.
type Owner = (u16, u32, u32);

/// Most different owners of plain files. What comes after them is kept whole.
const MAX_OWNERS: usize = 1 << 12;
/// The top bit of [`Slot::which`]: the inode is kept whole.
const WHOLE: u32 = 1 << 31;

/// An inode: a plain file, or the number of one that is kept whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    /// Number of an owner, or with [`WHOLE`] of a whole inode, and then nothing else counts.
    which: u32,
    nsec: u32,
    sec: u32,
    size: u32,
    start: Option<BlockIndex>,
}
const _: () = assert!(size_of::<Slot>() == 20);

impl Slot {
    pub(crate) fn numbers(&self) -> [u32; 5] {
        // The block after the first, as it is kept; 0: none.
        let start = self.start.map_or(0, BlockIndex::following);
        [self.which, self.nsec, self.sec, self.size, start]
    }

    pub(crate) fn from_numbers([which, nsec, sec, size, start]: [u32; 5]) -> Self {
        Self {
            which,
            nsec,
            sec,
            size,
            start: BlockIndex::before(start),
        }
    }
}

/// All inodes of a tree, by [`crate::NodeId::index`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Nodes {
    slots: Vec<Slot>,
    whole: Vec<Node>,
    owners: Vec<Owner>,
    numbers: HashMap<Owner, u32>,
}

static NO_XATTRS: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();

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
        // Directories, links and the like: 2^31 of them take hundreds of GiB.
        let number = u32::try_from(self.whole.len()).unwrap_or(u32::MAX);
        assert!(number & WHOLE == 0, "2^31 inodes that are not plain files");
        self.whole.push(node);
        Slot {
            which: number | WHOLE,
            nsec: 0,
            sec: 0,
            size: 0,
            start: None,
        }
    }

    /// The short form of a plain file.
    fn plain(&mut self, node: &Node) -> Option<Slot> {
        let Metadata {
            mode,
            uid,
            gid,
            mtime,
            xattrs,
        } = &node.metadata;
        let NodeKind::File(data) = &node.kind else {
            return None;
        };
        if node.links != 1 || !xattrs.is_empty() {
            return None;
        }
        let (size, start) = short(data)?;
        let sec = u32::try_from(mtime.sec).ok()?;
        let owner = (*mode, *uid, *gid);
        let number = match self.numbers.get(&owner) {
            Some(number) => *number,
            None if self.owners.len() >= MAX_OWNERS => return None,
            None => {
                let number = u32::try_from(self.owners.len()).ok()?;
                self.owners.push(owner);
                self.numbers.insert(owner, number);
                number
            }
        };
        Some(Slot {
            which: number,
            nsec: mtime.nsec,
            sec,
            size,
            start,
        })
    }

    fn whole(&self, index: usize) -> Option<&Node> {
        let which = self.slots[index].which;
        (which & WHOLE != 0).then(|| &self.whole[(which & !WHOLE) as usize])
    }

    pub(crate) fn get(&self, index: usize) -> NodeRef<'_> {
        NodeRef(match self.whole(index) {
            Some(node) => Shown::Whole(node),
            None => Shown::Plain(self.unpacked(index)),
        })
    }

    fn unpacked(&self, index: usize) -> Node {
        let slot = &self.slots[index];
        let (mode, uid, gid) = self.owners[slot.which as usize];
        let metadata = Metadata {
            mode,
            uid,
            gid,
            mtime: Timestamp {
                sec: slot.sec.into(),
                nsec: slot.nsec,
            },
            xattrs: BTreeMap::new(),
        };
        let layout = match slot.start {
            Some(start) => FileLayout::Contiguous { start },
            None => FileLayout::Empty,
        };
        let size = slot.size.into();
        Node::new(metadata, NodeKind::File(FileData { size, layout }))
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> &mut Node {
        if self.slots[index].which & WHOLE == 0 {
            let node = self.unpacked(index);
            self.slots[index] = self.keep(node);
        }
        let which = self.slots[index].which & !WHOLE;
        &mut self.whole[which as usize]
    }

    pub(crate) fn set_data(&mut self, index: usize, data: FileData) {
        let slot = &mut self.slots[index];
        if slot.which & WHOLE == 0
            && let Some((size, start)) = short(&data)
        {
            slot.size = size;
            slot.start = start;
        } else if let NodeKind::File(there) = &mut self.get_mut(index).kind {
            *there = data;
        }
    }

    pub(crate) fn set_mtime(&mut self, index: usize, mtime: Timestamp) {
        let slot = &mut self.slots[index];
        if slot.which & WHOLE == 0
            && let Ok(sec) = u32::try_from(mtime.sec)
        {
            slot.sec = sec;
            slot.nsec = mtime.nsec;
        } else {
            self.get_mut(index).metadata.mtime = mtime;
        }
    }

    pub(crate) fn xattrs(&self, index: usize) -> &BTreeMap<Vec<u8>, Vec<u8>> {
        self.whole(index)
            .map_or(&NO_XATTRS, |node| &node.metadata.xattrs)
    }

    pub(crate) fn is_dir(&self, index: usize) -> bool {
        self.whole(index).is_some_and(|node| node.kind.is_dir())
    }

    /// Head of the list of entries.
    pub(crate) fn first(&self, index: usize) -> u32 {
        self.whole(index).map_or(NIL, |node| node.first)
    }
}

/// Size of a file and where its bytes begin, if it is empty or one run, and not too large.
fn short(data: &FileData) -> Option<(u32, Option<BlockIndex>)> {
    let size = u32::try_from(data.size).ok()?;
    match data.layout {
        FileLayout::Empty => Some((size, None)),
        FileLayout::Contiguous { start } => Some((size, Some(start))),
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
        assert_eq!((nodes.len(), nodes.whole.len()), (11, 9));
        for (index, node) in all.iter().enumerate() {
            same(&nodes, index, node);
        }
        // Whole from the first change on that is not of size, place or time.
        nodes.set_data(1, run(77, 3));
        nodes.set_mtime(1, Timestamp { sec: 1, nsec: 2 });
        assert_eq!(nodes.whole.len(), 9);
        let mut changed = file(1, run(77, 3));
        changed.metadata.mtime = Timestamp { sec: 1, nsec: 2 };
        same(&nodes, 1, &changed);
        nodes.get_mut(1).metadata.uid = 5;
        changed.metadata.uid = 5;
        nodes.set_data(4, run(1, 9));
        nodes.set_mtime(0, Timestamp { sec: 5, nsec: 5 });
        assert_eq!(nodes.whole.len(), 10);
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
        assert_eq!(nodes.whole.len(), 12);
        // Data is for files alone.
        nodes.set_data(0, run(1, 1));
        assert!(nodes.is_dir(0));
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
