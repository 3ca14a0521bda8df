//! The tree of a filesystem in memory, from which images are written.
//!
//! One arena: inodes ([`crate::node`]), directory entries and name bytes each lie in one vector,
//! and one hash table over (parent, name) serves every look-up, so a million plain files cost about
//! 50 bytes each and their names, however deep they lie, and no code recurses. Where names come in
//! order there need be no table ([`Tree::rest`]): 40 bytes. Entries of a directory form a linked list in
//! insertion order; whatever walks them sorts by name bytes first, so nothing observable depends on the
//! order of insertion.

mod park;
mod steps;

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;

use hashbrown::HashTable;

pub use park::Parked;

use self::steps::Steps;
use crate::error::{Error, Result};
use crate::node::{Node, NodeRef, Nodes};

/// Longest name of a directory entry, in bytes.
pub const MAX_NAME: usize = 255;

pub(crate) const NIL: u32 = u32::MAX;

/// Index of a 4 KiB block on device 1 (the data file). Not a byte offset.
///
/// At most `u32::MAX - 1`: the format uses the last value for "no block".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockIndex(NonZeroU32); // index + 1, so that Option<BlockIndex> takes four bytes

impl BlockIndex {
    /// Block `index`; `None` if the format cannot address it.
    pub fn new(index: u64) -> Option<Self> {
        let next = u32::try_from(index.checked_add(1)?).ok()?;
        NonZeroU32::new(next).map(Self)
    }

    /// The block after this one.
    pub(crate) fn following(self) -> u32 {
        self.0.get()
    }

    /// The block before `next`; `None` before the first.
    pub(crate) fn before(next: u32) -> Option<Self> {
        NonZeroU32::new(next).map(Self)
    }

    /// The index, in blocks of 4 KiB from the start of device 1.
    pub fn get(self) -> u64 {
        u64::from(self.0.get()) - 1
    }

    /// Byte offset of the block on device 1.
    pub fn byte_offset(self) -> u64 {
        self.get() * crate::BLOCK_SIZE
    }
}

/// A point in time: seconds since 1970 (before it: negative) and nanoseconds after them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp {
    /// Seconds since the epoch, rounded down.
    pub sec: i64,
    /// Nanoseconds, below 1,000,000,000.
    pub nsec: u32,
}

/// What every inode has, whatever its kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// Permission bits, set-id and sticky bits: at most `0o7777`. The file type is in
    /// [`NodeKind`].
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Time of last modification.
    pub mtime: Timestamp,
    /// Extended attributes by full name (`user.x`, `trusted.y`, `security.capability`,
    /// `system.posix_acl_access`), values as the kernel shows them.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Number of a character or block device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rdev {
    /// Major number, at most 4095.
    pub major: u32,
    /// Minor number, at most 1,048,575.
    pub minor: u32,
}

/// Size and place of a regular file's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileData {
    /// Size in bytes.
    pub size: u64,
    /// Where the bytes are.
    pub layout: FileLayout,
}

impl FileData {
    /// A file without bytes.
    pub fn empty() -> Self {
        Self {
            size: 0,
            layout: FileLayout::Empty,
        }
    }
}

/// Where the bytes of a regular file lie on device 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileLayout {
    /// No bytes at all; only for size 0.
    Empty,
    /// One run of blocks from `start`, ceil(size / 4096) of them.
    Contiguous {
        /// First block.
        start: BlockIndex,
    },
    /// Equal chunks of 2^`chunk_bits` bytes, each somewhere or a hole. There are
    /// ceil(size / 2^chunk_bits) of them; a last chunk ends with the file.
    Chunked {
        /// Binary logarithm of the chunk size in bytes: 12 to 43.
        chunk_bits: u8,
        /// First block of each chunk; `None` reads as zeros.
        chunks: Vec<Option<BlockIndex>>,
    },
}

/// Type of an inode with what only that type has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// A directory; its entries are in the [`Tree`].
    Directory,
    /// A regular file.
    File(FileData),
    /// A symbolic link with its target: 1 to 4095 bytes without NUL, otherwise any text.
    Symlink(Vec<u8>),
    /// A character device. 0:0 is an overlay whiteout.
    CharDevice(Rdev),
    /// A block device.
    BlockDevice(Rdev),
    /// A named pipe.
    Fifo,
    /// A unix socket.
    Socket,
}

impl NodeKind {
    /// Whether this is a directory.
    pub fn is_dir(&self) -> bool {
        matches!(self, Self::Directory)
    }
}

/// An inode of a [`Tree`]. Valid only for the tree that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(crate) u32);

impl NodeId {
    /// The root directory of any tree.
    pub const ROOT: Self = Self(0);

    /// A small number unique in the tree, usable as an index; never given out again.
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The inode of which [`NodeId::index`] is `index`. Of no use but with the tree that made it.
    pub fn from_index(index: u32) -> Self {
        Self(index)
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    parent: u32,
    pub(crate) node: u32,
    /// Where its name lies, after a byte with its length.
    name: u32,
    prev: u32,
    next: u32,
}
const _: () = assert!(size_of::<Entry>() == 20);

/// The name at a place.
#[expect(
    clippy::indexing_slicing,
    reason = "places are made together with names, which are never dropped"
)]
fn name_at(names: &[u8], place: u32) -> &[u8] {
    let start = place as usize + 1;
    &names[start..start + usize::from(names[start - 1])]
}

/// A filesystem tree: a root directory and what is below it.
#[derive(Clone, Debug)]
pub struct Tree {
    nodes: Nodes,
    entries: Vec<Entry>,
    free_entries: Vec<u32>,
    names: Vec<u8>,
    /// Entries by directory and name; empty while the tree rests.
    table: HashTable<u32>,
    resting: bool,
    /// Whether every directory got its entries in order of their names so far: each list is in falling
    /// order then.
    ascending: bool,
    /// Entries that look-ups passed while the tree rests.
    steps: Steps,
    hasher: RandomState,
    live: usize,
}

/// What [`Tree::walk`] yields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WalkEntry {
    /// Path from the root without a leading `/`; empty for the root.
    pub path: Vec<u8>,
    /// The directory that holds it; the root for the root.
    pub parent: NodeId,
    /// The inode. Comes once for each of its names.
    pub id: NodeId,
}

#[expect(
    clippy::indexing_slicing,
    reason = "NodeId and entry numbers are only made by this module and stay in range: nodes \
              are never dropped, entry slots only reused"
)]
impl Tree {
    /// A tree with nothing but its root directory.
    pub fn new(root: Metadata) -> Self {
        Self {
            nodes: Nodes::new(Node::new(root, NodeKind::Directory)),
            entries: Vec::new(),
            free_entries: Vec::new(),
            names: Vec::new(),
            table: HashTable::new(),
            resting: false,
            ascending: true,
            steps: Steps::default(),
            hasher: RandomState::new(),
            live: 1,
        }
    }

    /// The root directory.
    pub fn root(&self) -> NodeId {
        NodeId::ROOT
    }

    /// The inode whose [`NodeId::index`] is `index`; `None` if there never was one. It may have
    /// been removed since.
    pub fn id_at(&self, index: usize) -> Option<NodeId> {
        let known = u32::try_from(index).ok()?;
        (index < self.nodes.len()).then_some(NodeId(known))
    }

    /// Number of inodes that have a name, the root included.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether there is nothing but the root.
    pub fn is_empty(&self) -> bool {
        self.live == 1
    }

    /// Gives back the memory that only changes and looking up names need. Both go on to work: a name
    /// that comes before one of its directory's makes all of it anew, a look-up goes through its
    /// directory's entries, the last one first, and so does a change once look-ups have passed many
    /// entries. As long as every directory got its entries in order of their names, one after all of
    /// its directory's is added, and found not to be there, without.
    pub fn rest(&mut self) {
        self.table = HashTable::new();
        self.resting = true;
        self.steps.reset();
    }

    /// Has look-ups take no longer than they do in a tree that does not rest, if they have passed many
    /// entries: for those who look up much and change little. Changes see to it themselves.
    pub fn heed(&mut self) {
        if self.resting && self.steps.are_many(self.entries.len()) {
            self.wake();
        }
    }

    fn wake(&mut self) {
        if !std::mem::take(&mut self.resting) {
            return;
        }
        let mut todo = vec![NodeId::ROOT];
        while let Some(id) = todo.pop() {
            let mut index = self.nodes.first(id.index());
            while index != NIL {
                self.put_in_table(index);
                let entry = self.entries[index as usize];
                if self.is_dir(NodeId(entry.node)) {
                    todo.push(NodeId(entry.node));
                }
                index = entry.next;
            }
        }
    }

    /// The inode `id`.
    ///
    /// # Panics
    /// If `id` is of a larger tree.
    pub fn node(&self, id: NodeId) -> NodeRef<'_> {
        self.nodes.get(id.index())
    }

    /// The extended attributes of the inode `id`.
    ///
    /// # Panics
    /// If `id` is of a larger tree.
    pub fn xattrs(&self, id: NodeId) -> &BTreeMap<Vec<u8>, Vec<u8>> {
        self.nodes.xattrs(id.index())
    }

    /// Whether the inode `id` is a directory.
    ///
    /// # Panics
    /// If `id` is of a larger tree.
    pub fn is_dir(&self, id: NodeId) -> bool {
        self.nodes.is_dir(id.index())
    }

    /// The inode `id`, to change its metadata or content. It takes more memory from then on; see
    /// [`Tree::set_data`] and [`Tree::set_mtime`].
    ///
    /// # Panics
    /// If `id` is of a larger tree.
    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes.get_mut(id.index())
    }

    /// Changes an inode's metadata. A directory takes no more memory afterwards if it is like others.
    ///
    /// # Panics
    /// If `id` is of a larger tree.
    pub fn set_metadata(&mut self, id: NodeId, metadata: Metadata) {
        self.nodes.set_metadata(id.index(), metadata);
    }

    /// Gives a regular file its content. Does nothing to anything else.
    ///
    /// # Panics
    /// If `id` is of a larger tree.
    pub fn set_data(&mut self, id: NodeId, data: FileData) {
        self.nodes.set_data(id.index(), data);
    }

    /// Changes an inode's modification time.
    ///
    /// # Panics
    /// If `id` is of a larger tree.
    pub fn set_mtime(&mut self, id: NodeId, mtime: Timestamp) {
        self.nodes.set_mtime(id.index(), mtime);
    }

    /// Adds an inode under a new name.
    ///
    /// # Errors
    /// [`Error::Exists`] if the name is taken (nothing is replaced), [`Error::NotADirectory`],
    /// [`Error::InvalidName`], [`Error::TooLarge`].
    pub fn insert(
        &mut self,
        parent: NodeId,
        name: &[u8],
        metadata: Metadata,
        kind: NodeKind,
    ) -> Result<NodeId> {
        let id = match u32::try_from(self.nodes.len()) {
            Ok(id) if id != NIL => NodeId(id),
            _ => {
                return Err(Error::TooLarge {
                    what: "inodes",
                    limit: u64::from(NIL),
                });
            }
        };
        let is_dir = kind.is_dir();
        self.add_entry(parent, name, id)?;
        self.nodes.push(Node::new(metadata, kind));
        self.live += 1;
        if is_dir {
            let up = self.nodes.links(parent.index()).saturating_add(1);
            self.nodes.set_links(parent.index(), up);
        }
        Ok(id)
    }

    /// Adds another name for an inode that is not a directory.
    ///
    /// # Errors
    /// As [`Tree::insert`]; [`Error::DirectoryLink`] for a directory;
    /// [`Error::NotFound`] if the target has been removed.
    pub fn link(&mut self, parent: NodeId, name: &[u8], target: NodeId) -> Result<()> {
        if self.is_dir(target) {
            return Err(Error::DirectoryLink {
                name: name.to_vec(),
            });
        }
        let links = self.nodes.links(target.index());
        if links == 0 {
            return Err(Error::NotFound {
                name: name.to_vec(),
            });
        }
        let links = links.checked_add(1).ok_or(Error::TooLarge {
            what: "links of one inode",
            limit: u64::from(u32::MAX),
        })?;
        self.add_entry(parent, name, target)?;
        self.nodes.set_links(target.index(), links);
        Ok(())
    }

    /// Removes a name, and with a directory everything below it. Inodes with other names stay.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no such name.
    pub fn remove(&mut self, parent: NodeId, name: &[u8]) -> Result<()> {
        self.heed();
        let first = self.find(parent, name).ok_or_else(|| Error::NotFound {
            name: name.to_vec(),
        })?;
        let mut doomed = vec![first];
        while let Some(index) = doomed.pop() {
            let entry = self.entries[index as usize];
            let node = NodeId(entry.node);
            if self.is_dir(node) {
                let mut child = self.nodes.first(node.index());
                while child != NIL {
                    doomed.push(child);
                    child = self.entries[child as usize].next;
                }
                let up = self.nodes.links(entry.parent as usize).saturating_sub(1);
                self.nodes.set_links(entry.parent as usize, up);
            }
            self.drop_entry(index);
            self.drop_link(node);
        }
        Ok(())
    }

    /// The inode under `name` in `parent`.
    pub fn child(&self, parent: NodeId, name: &[u8]) -> Option<NodeId> {
        self.find(parent, name)
            .map(|index| NodeId(self.entries[index as usize].node))
    }

    /// Entries of a directory in order of their name bytes; nothing for anything else.
    pub fn children(
        &self,
        id: NodeId,
    ) -> impl ExactSizeIterator<Item = (&[u8], NodeId)> + DoubleEndedIterator {
        let mut list = Vec::new();
        self.sorted_entries(id, &mut list);
        list.into_iter().map(|index| {
            let entry = &self.entries[index as usize];
            (self.name_of(entry), NodeId(entry.node))
        })
    }

    /// Whether a directory has no entries.
    pub fn is_childless(&self, id: NodeId) -> bool {
        self.nodes.first(id.index()) == NIL
    }

    /// The inode at a path of names joined by `/`. Empty components and `.` are skipped, `..`
    /// finds nothing, symbolic links are not followed.
    pub fn resolve(&self, path: &[u8]) -> Option<NodeId> {
        path.split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty() && *name != b".")
            .try_fold(NodeId::ROOT, |dir, name| self.child(dir, name))
    }

    /// Every name in the tree, each directory before its entries, entries in order of their
    /// name bytes; the root first.
    pub fn walk(&self) -> impl Iterator<Item = WalkEntry> {
        // For each open directory: what is left of it, and the length of its own path.
        let mut stack: Vec<(NodeId, std::vec::IntoIter<u32>, usize)> = Vec::new();
        let mut path: Vec<u8> = Vec::new();
        let mut started = false;
        std::iter::from_fn(move || {
            let (parent, id) = if started {
                loop {
                    let (directory, left, len) = stack.last_mut()?;
                    path.truncate(*len);
                    if let Some(index) = left.next() {
                        let (name, child) = self.entry(index);
                        if !path.is_empty() {
                            path.push(b'/');
                        }
                        path.extend_from_slice(name);
                        break (*directory, child);
                    }
                    stack.pop();
                }
            } else {
                started = true;
                (NodeId::ROOT, NodeId::ROOT)
            };
            if !self.is_childless(id) {
                let mut list = Vec::new();
                self.sorted_entries(id, &mut list);
                stack.push((id, list.into_iter(), path.len()));
            }
            Some(WalkEntry {
                path: path.clone(),
                parent,
                id,
            })
        })
    }

    /// Appends the numbers of a directory's entries to `out`, sorted by name.
    pub(crate) fn sorted_entries(&self, id: NodeId, out: &mut Vec<u32>) {
        let start = out.len();
        let mut index = self.nodes.first(id.index());
        while index != NIL {
            out.push(index);
            index = self.entries[index as usize].next;
        }
        // The list is newest first, so an input that came sorted is one reversed run.
        out[start..].sort_by(|a, b| {
            self.name_of(&self.entries[*a as usize])
                .cmp(self.name_of(&self.entries[*b as usize]))
        });
    }

    /// The directory that has an entry.
    pub(crate) fn holder(&self, index: u32) -> NodeId {
        NodeId(self.entries[index as usize].parent)
    }

    pub(crate) fn entry(&self, index: u32) -> (&[u8], NodeId) {
        let entry = &self.entries[index as usize];
        (self.name_of(entry), NodeId(entry.node))
    }

    /// Number of inode slots, including those of removed inodes.
    pub(crate) fn slots(&self) -> usize {
        self.nodes.len()
    }

    /// Some path of an inode, for messages.
    pub(crate) fn some_path(&self, id: NodeId) -> Vec<u8> {
        self.walk()
            .find(|entry| entry.id == id)
            .map(|entry| entry.path)
            .unwrap_or_default()
    }

    fn name_of(&self, entry: &Entry) -> &[u8] {
        name_at(&self.names, entry.name)
    }

    fn find(&self, parent: NodeId, name: &[u8]) -> Option<u32> {
        if self.resting {
            let mut passed = 0;
            let found = self.find_in_list(parent, name, &mut passed);
            self.steps.add(passed);
            return found;
        }
        let hash = self.hasher.hash_one((parent.0, name));
        self.table
            .find(hash, |index| {
                let entry = &self.entries[*index as usize];
                entry.parent == parent.0 && self.name_of(entry) == name
            })
            .copied()
    }

    fn find_in_list(&self, parent: NodeId, name: &[u8], passed: &mut u64) -> Option<u32> {
        let mut index = self.nodes.first(parent.index());
        while index != NIL {
            let entry = &self.entries[index as usize];
            match self.name_of(entry).cmp(name) {
                Ordering::Equal => return Some(index),
                // So are all that follow.
                Ordering::Less if self.ascending => return None,
                Ordering::Less | Ordering::Greater => {}
            }
            *passed += 1;
            index = entry.next;
        }
        None
    }

    fn add_entry(&mut self, parent: NodeId, name: &[u8], node: NodeId) -> Result<()> {
        let len = check_name(name)?;
        let head = self.nodes.first(parent.index());
        let last = head == NIL || self.name_of(&self.entries[head as usize]) < name;
        let append = self.ascending && last;
        if !append {
            self.wake();
        }
        self.heed();
        if !self.is_dir(parent) {
            return Err(Error::NotADirectory {
                name: name.to_vec(),
            });
        }
        if parent != NodeId::ROOT && self.nodes.links(parent.index()) == 0 {
            return Err(Error::NotFound {
                name: name.to_vec(),
            });
        }
        if !append && self.find(parent, name).is_some() {
            return Err(Error::Exists {
                name: name.to_vec(),
            });
        }
        let start = u32::try_from(self.names.len()).map_err(|_| Error::TooLarge {
            what: "bytes of names",
            limit: 1 << 32,
        })?;
        let entry = Entry {
            parent: parent.0,
            node: node.0,
            name: start,
            prev: NIL,
            next: head,
        };
        let index = match self.free_entries.pop() {
            Some(index) => {
                self.entries[index as usize] = entry;
                index
            }
            None => {
                let index = u32::try_from(self.entries.len())
                    .ok()
                    .filter(|index| *index != NIL);
                let index = index.ok_or(Error::TooLarge {
                    what: "names",
                    limit: u64::from(NIL),
                })?;
                self.entries.push(entry);
                index
            }
        };
        self.names.push(len);
        self.names.extend_from_slice(name);
        if head != NIL {
            self.entries[head as usize].prev = index;
        }
        self.nodes.set_first(parent.index(), index);
        self.ascending &= last;
        if !self.resting {
            self.put_in_table(index);
        }
        Ok(())
    }

    fn put_in_table(&mut self, index: u32) {
        let (entries, names, hasher) = (&self.entries, &self.names, &self.hasher);
        let hash = |index: &u32| {
            let entry = &entries[*index as usize];
            hasher.hash_one((entry.parent, name_at(names, entry.name)))
        };
        self.table.insert_unique(hash(&index), index, hash);
    }

    fn drop_entry(&mut self, index: u32) {
        let entry = self.entries[index as usize];
        if !self.resting {
            let hash = self.hasher.hash_one((entry.parent, self.name_of(&entry)));
            if let Ok(found) = self.table.find_entry(hash, |other| *other == index) {
                found.remove();
            }
        }
        match entry.prev {
            NIL => self.nodes.set_first(entry.parent as usize, entry.next),
            prev => self.entries[prev as usize].next = entry.next,
        }
        if entry.next != NIL {
            self.entries[entry.next as usize].prev = entry.prev;
        }
        self.free_entries.push(index);
    }

    fn drop_link(&mut self, id: NodeId) {
        let links = match self.is_dir(id) {
            true => 0,
            false => self.nodes.links(id.index()).saturating_sub(1),
        };
        self.nodes.set_links(id.index(), links);
        if links == 0 {
            self.nodes.empty(id.index());
            self.live -= 1;
        }
    }
}

/// Refuses what cannot be a directory entry; returns the length.
pub(crate) fn check_name(name: &[u8]) -> Result<u8> {
    let invalid = |reason| {
        Err(Error::InvalidName {
            name: name.to_vec(),
            reason,
        })
    };
    match name {
        b"" => return invalid("empty"),
        b"." | b".." => return invalid("every directory has it already"),
        _ => {}
    }
    if name.contains(&b'/') {
        return invalid("contains '/'");
    }
    if name.contains(&0) {
        return invalid("contains NUL");
    }
    u8::try_from(name.len()).or_else(|_| invalid("longer than 255 bytes"))
}
