//! First pass: the place of every inode, directory block and shared xattr.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::format::{
    BLOCK, RawCompact, RawDevice, RawExtended, RawSuperblock, SLOT, SUPERBLOCK_OFFSET,
};
use crate::node::Node;
use crate::sparse::chunk_bits_for;
use crate::tree::{FileData, FileLayout, Metadata, NodeId, NodeKind, Rdev, Timestamp, Tree};
use crate::writer::WriteOptions;
use crate::writer::directory::{Packed, pack};
use crate::writer::xattrs::Shared;
use crate::{BLOCK_BITS, BLOCK_SIZE, MAX_CHUNK_BITS};

const NONE: u32 = u32::MAX;
const MAX_SYMLINK: usize = 4095;
/// Different times that are counted one by one: files that were unpacked together have few.
const FEW_TIMES: usize = 1 << 15;

/// A directory of the plan. There may be a million.
#[derive(Clone, Copy, Debug)]
pub(super) struct Directory {
    /// Its entry in the tree; [`NONE`]: it is the root.
    entry: u32,
    /// Its entries in `Plan::children` begin here, and end where those of the next directory begin.
    first: u32,
    /// Number of its inode.
    nid: u32,
    /// Bytes in the last block of its content.
    tail: u16,
    /// Directories in it, unless it is among the large ones.
    subdirectories: u16,
}
const _: () = assert!(size_of::<Directory>() == 16);

/// What is to be known of a directory with more than one block of content, or none of it inline.
#[derive(Clone, Copy, Debug, Default)]
struct Large {
    full_blocks: u64,
    tail_first: usize,
    /// First block of its content.
    block: u64,
    subdirectories: u32,
}

/// Set in [`Plan::children`]: a name of an inode that has its place by another one. Names of a tree take
/// less than 4 GiB, two bytes each at least, so their numbers have this bit to spare.
const REPEATED: u32 = 1 << 31;

/// How the content of an inode follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tail {
    /// Nothing follows.
    None,
    /// Bytes right behind the xattrs, in one block with the whole inode.
    Inline(usize),
    /// Entries of a chunk index, aligned to 8 bytes.
    Chunks(usize),
}

/// Where everything goes.
#[derive(Debug)]
pub(super) struct Plan<'t> {
    pub(super) tree: &'t Tree,
    pub(super) epoch: Timestamp,
    pub(super) shared: Shared<'t>,
    /// Directories in the order of their blocks.
    pub(super) directories: Vec<Directory>,
    /// Symbolic links that are not inline, with their blocks.
    pub(super) long_symlinks: Vec<(NodeId, u64)>,
    pub(super) chunked: bool,
    /// Byte offset of the shared xattrs.
    pub(super) shared_start: u64,
    /// First block after the inodes and shared xattrs.
    pub(super) first_block: u64,
    /// Size of the image in blocks.
    pub(super) blocks: u64,
    /// Entries of the directories, one directory's by name after the other's, [`REPEATED`] or not:
    /// inodes are written in that order after the root.
    children: Vec<u32>,
    /// How many inodes there are.
    inodes: u64,
    /// Numbers of inodes, by [`NodeId::index`]; of directories: indexes into `directories`.
    nids: Vec<u32>,
    large: HashMap<NodeId, Large>,
}

impl<'t> Plan<'t> {
    pub(super) fn new(tree: &'t Tree, options: &WriteOptions) -> Result<Self> {
        let mut plan = Self {
            tree,
            epoch: Timestamp::default(),
            shared: Shared::default(),
            directories: Vec::new(),
            long_symlinks: Vec::new(),
            chunked: false,
            shared_start: 0,
            first_block: 0,
            blocks: 0,
            children: Vec::with_capacity(tree.len()),
            inodes: 0,
            nids: vec![NONE; tree.slots()],
            large: HashMap::new(),
        };
        plan.number_inodes()?;
        for id in plan.order() {
            check_node(&tree.node(id), options).map_err(|reason| plan.refuse(id, reason))?;
        }
        plan.epoch = options.build_time.unwrap_or_else(|| plan.commonest_time());
        let shared = Shared::new(tree, plan.order());
        plan.shared = shared.map_err(|(id, reason)| plan.refuse(id, reason))?;
        plan.place_inodes(options.has_device())?;
        plan.place_blocks(options.data_blocks)?;
        Ok(plan)
    }

    pub(super) fn inode_count(&self) -> u64 {
        self.inodes
    }

    /// Inodes in the order in which they are written.
    pub(super) fn order(&self) -> impl Iterator<Item = NodeId> {
        (0..=self.children.len()).filter_map(|index| self.in_order(index))
    }

    /// The inode with a number of those in the order, of which some are left out.
    fn in_order(&self, index: usize) -> Option<NodeId> {
        let Some(before) = index.checked_sub(1) else {
            return Some(NodeId::ROOT);
        };
        let entry = *self.children.get(before)?;
        (entry & REPEATED == 0).then(|| self.tree.entry(entry).1)
    }

    /// The inode of a directory.
    pub(super) fn node(&self, directory: &Directory) -> NodeId {
        match directory.entry {
            NONE => NodeId::ROOT,
            entry => self.tree.entry(entry).1,
        }
    }

    /// The directory that a directory is in; the root is in itself.
    fn parent(&self, directory: &Directory) -> NodeId {
        match directory.entry {
            NONE => NodeId::ROOT,
            entry => self.tree.holder(entry),
        }
    }

    pub(super) fn nid(&self, id: NodeId) -> u64 {
        match self.directory(id) {
            Some(directory) => directory.nid.into(),
            None => self.nids.get(id.index()).map_or(0, |nid| u64::from(*nid)),
        }
    }

    pub(super) fn directory(&self, id: NodeId) -> Option<&Directory> {
        if !self.tree.is_dir(id) {
            return None;
        }
        self.directories.get(self.number(id)?)
    }

    /// The index of a directory.
    fn number(&self, id: NodeId) -> Option<usize> {
        usize::try_from(*self.nids.get(id.index())?).ok()
    }

    /// How the content of a directory is packed.
    pub(super) fn packed(&self, directory: &Directory) -> Packed {
        let large = self.large.get(&self.node(directory));
        let large = large.copied().unwrap_or_default();
        Packed {
            full_blocks: large.full_blocks,
            tail: directory.tail.into(),
            tail_first: large.tail_first,
        }
    }

    /// First block of a directory's content; 0 if all of it is inline.
    pub(super) fn block(&self, directory: &Directory) -> u64 {
        let large = self.large.get(&self.node(directory));
        large.map_or(0, |large| large.block)
    }

    /// Entries of a directory in order, `.` and `..` included.
    pub(super) fn entries(
        &self,
        directory: &Directory,
    ) -> impl Iterator<Item = (&'t [u8], NodeId)> {
        let (node, parent) = (self.node(directory), self.parent(directory));
        let next = self.number(node).and_then(|number| {
            let next = self.directories.get(number + 1)?;
            usize::try_from(next.first).ok()
        });
        let first = usize::try_from(directory.first).unwrap_or(usize::MAX);
        let all = first..next.unwrap_or(self.children.len());
        let all = self.children.get(all).unwrap_or_default();
        let tree = self.tree;
        let entry = move |index: &u32| tree.entry(*index & !REPEATED);
        let before = |dots: &[u8]| all.partition_point(|index| entry(index).0 < dots);
        let (head, rest) = all.split_at(before(b"."));
        let (middle, tail) = rest.split_at(before(b"..") - head.len());
        (head.iter().map(entry))
            .chain([(b".".as_slice(), node)])
            .chain(middle.iter().map(entry))
            .chain([(b"..".as_slice(), parent)])
            .chain(tail.iter().map(entry))
    }

    /// How an inode's xattrs and content follow it: bytes of xattrs, then the tail.
    pub(super) fn shape(&self, id: NodeId) -> Result<(usize, usize, Tail)> {
        let node = self.tree.node(id);
        let core = if self.is_compact(id) {
            size_of::<RawCompact>()
        } else {
            size_of::<RawExtended>()
        };
        let body = self
            .shared
            .body_len(&node.metadata)
            .map_err(|reason| self.refuse(id, reason))?;
        let inline = |len: usize| match len {
            0 => Tail::None,
            len if core + body + len <= BLOCK => Tail::Inline(len),
            _ => Tail::None,
        };
        let tail = match &node.kind {
            NodeKind::Directory => inline(
                self.directory(id)
                    .map_or(0, |directory| directory.tail.into()),
            ),
            NodeKind::Symlink(target) => inline(target.len()),
            NodeKind::File(FileData {
                layout: FileLayout::Empty,
                ..
            }) => Tail::None,
            NodeKind::File(FileData {
                size,
                layout: FileLayout::Contiguous { .. },
            }) => {
                let count = size.div_ceil(1 << chunk_bits_for(*size));
                Tail::Chunks(usize::try_from(count).unwrap_or(usize::MAX))
            }
            NodeKind::File(FileData {
                layout: FileLayout::Chunked { chunks, .. },
                ..
            }) => Tail::Chunks(chunks.len()),
            _ => Tail::None,
        };
        Ok((core, body, tail))
    }

    /// Whether the small form holds everything the inode has.
    pub(super) fn is_compact(&self, id: NodeId) -> bool {
        let node = self.tree.node(id);
        node.metadata.mtime == self.epoch && self.fits_compact(id, &node)
    }

    /// Links as `stat` shows them.
    pub(super) fn links(&self, id: NodeId) -> u32 {
        match self.directory(id) {
            Some(directory) => {
                let large = self.large.get(&id).map(|large| large.subdirectories);
                let own = || directory.subdirectories.into();
                large.unwrap_or_else(own).saturating_add(2)
            }
            None => self.tree.node(id).nlink(),
        }
    }

    /// Size as `stat` shows it.
    pub(super) fn size(&self, id: NodeId) -> u64 {
        match &self.tree.node(id).kind {
            NodeKind::Directory => (self.directory(id)).map_or(0, |dir| self.packed(dir).size()),
            NodeKind::File(data) => data.size,
            NodeKind::Symlink(target) => target.len() as u64,
            _ => 0,
        }
    }

    pub(super) fn refuse(&self, id: NodeId, reason: String) -> Error {
        Error::Unrepresentable {
            path: self.tree.some_path(id),
            reason,
        }
    }

    fn fits_compact(&self, id: NodeId, node: &Node) -> bool {
        let Metadata { uid, gid, .. } = node.metadata;
        u16::try_from(uid.max(gid).max(self.links(id))).is_ok()
            && u32::try_from(self.size(id)).is_ok()
    }

    /// Fills `directories` and `children`.
    fn number_inodes(&mut self) -> Result<()> {
        let too_many = |what| Error::TooLarge {
            what,
            limit: u64::from(NONE),
        };
        if !self.tree.is_dir(NodeId::ROOT) {
            return Err(Error::NotADirectory { name: Vec::new() });
        }
        self.inodes = 1;
        // Entries that are directories.
        let mut stack: Vec<u32> = vec![NONE];
        while let Some(entry) = stack.pop() {
            let start = self.children.len();
            let mut directory = Directory {
                entry,
                first: u32::try_from(start).map_err(|_| too_many("names"))?,
                nid: NONE,
                tail: 0,
                subdirectories: 0,
            };
            let node = self.node(&directory);
            self.tree.sorted_entries(node, &mut self.children);
            let number = u32::try_from(self.directories.len());
            if let Some(place) = self.nids.get_mut(node.index()) {
                *place = number.map_err(|_| too_many("directories"))?;
            }
            let packed = pack(self.entries(&directory).map(|(name, _)| name.len()));
            let below = stack.len();
            self.enter(start, &mut stack)?;
            let subdirectories = stack.len() - below;
            stack.get_mut(below..).unwrap_or_default().reverse();
            directory.tail = u16::try_from(packed.tail).unwrap_or(u16::MAX); // of 4096 at most
            // One of a single block has far less.
            directory.subdirectories = u16::try_from(subdirectories).unwrap_or(u16::MAX);
            if packed.full_blocks > 0 {
                let large = Large {
                    full_blocks: packed.full_blocks,
                    tail_first: packed.tail_first,
                    block: 0,
                    subdirectories: u32::try_from(subdirectories).unwrap_or(u32::MAX),
                };
                self.large.insert(node, large);
            }
            self.directories.push(directory);
        }
        Ok(())
    }

    /// Looks at the entries of a directory, which begin at `start`: puts the directories among them on
    /// the stack and marks names that are not an inode's first.
    fn enter(&mut self, start: usize, stack: &mut Vec<u32>) -> Result<()> {
        for place in self.children.get_mut(start..).unwrap_or_default() {
            let (name, child) = self.tree.entry(*place);
            let is_dir = self.tree.is_dir(child);
            let Some(nid) = self.nids.get_mut(child.index()) else {
                continue;
            };
            let is_new = *nid == NONE;
            if is_dir && (!is_new || child == NodeId::ROOT) {
                return Err(Error::DirectoryLink {
                    name: name.to_vec(),
                });
            }
            if !is_dir && !self.tree.is_childless(child) {
                return Err(Error::NotADirectory {
                    name: name.to_vec(),
                });
            }
            *nid = 0;
            if is_dir {
                stack.push(*place);
            }
            match is_new {
                true => self.inodes += 1,
                false => *place |= REPEATED,
            }
        }
        Ok(())
    }

    fn commonest_time(&self) -> Timestamp {
        self.commonest_time_of(FEW_TIMES)
    }

    /// Counts up to `few` different times; of more it makes a list.
    fn commonest_time_of(&self, few: usize) -> Timestamp {
        let mut counts: HashMap<Timestamp, usize> = HashMap::new();
        for time in self.times() {
            *counts.entry(time).or_default() += 1;
            if counts.len() > few {
                drop(counts);
                return self.commonest_of_many();
            }
        }
        let counted = counts.into_iter().map(|(time, count)| (count, time));
        first_commonest(counted)
    }

    /// The times of the inodes that are small if they have no time of their own.
    fn times(&self) -> impl Iterator<Item = Timestamp> {
        self.order().filter_map(|id| {
            let node = self.tree.node(id);
            self.fits_compact(id, &node).then(|| node.metadata.mtime)
        })
    }

    fn commonest_of_many(&self) -> Timestamp {
        // Those from 1970 to 2106 in eight bytes, which have the order of times.
        let (mut short, mut others) = (Vec::new(), Vec::new());
        for time in self.times() {
            match u32::try_from(time.sec) {
                Ok(sec) => short.push(u64::from(sec) << 32 | u64::from(time.nsec)),
                Err(_) => others.push(time),
            }
        }
        let unpacked = |(count, time): (usize, u64)| {
            let nsec = u32::try_from(time & u64::from(u32::MAX)).unwrap_or_default();
            let sec = i64::try_from(time >> 32).unwrap_or_default();
            (count, Timestamp { sec, nsec })
        };
        let found = [commonest(short).map(unpacked), commonest(others)];
        first_commonest(found.into_iter().flatten())
    }

    /// Fixes the nid of every inode, in order, leaving no gap but alignment.
    fn place_inodes(&mut self, has_device: bool) -> Result<()> {
        let devices = if has_device {
            size_of::<RawDevice>()
        } else {
            0
        };
        let mut position = (SUPERBLOCK_OFFSET + size_of::<RawSuperblock>() + devices) as u64;
        for index in 0..=self.children.len() {
            let Some(id) = self.in_order(index) else {
                continue;
            };
            let (core, body, tail) = self.shape(id)?;
            self.chunked |= matches!(tail, Tail::Chunks(_));
            let total = core as u64
                + match tail {
                    Tail::None => body as u64,
                    Tail::Inline(len) => (body + len) as u64,
                    Tail::Chunks(count) => (body.next_multiple_of(8) as u64)
                        .saturating_add((count as u64).saturating_mul(8)),
                };
            // An inode that fits a block stays within one, so that every reader finds it (and
            // its inline tail, which must not cross) in one piece; of a longer one, the core.
            let together = if total <= BLOCK_SIZE {
                total
            } else {
                core as u64
            };
            if position % BLOCK_SIZE + together > BLOCK_SIZE {
                position = position.next_multiple_of(BLOCK_SIZE);
            }
            let nid = u32::try_from(position / SLOT as u64)
                .ok()
                .filter(|nid| *nid != NONE);
            let nid = nid.ok_or(Error::TooLarge {
                what: "slots of inodes",
                limit: u64::from(NONE),
            })?;
            let directory = match self.tree.is_dir(id) {
                true => self.number(id),
                false => None,
            };
            if let Some(directory) = directory.and_then(|number| self.directories.get_mut(number)) {
                directory.nid = nid;
            } else if let Some(place) = self.nids.get_mut(id.index()) {
                *place = nid;
            }
            position = position
                .checked_add(total)
                .and_then(|end| end.checked_next_multiple_of(SLOT as u64))
                .ok_or(Error::TooLarge {
                    what: "bytes of inodes",
                    limit: u64::MAX,
                })?;
        }
        self.shared_start = position;
        self.first_block = (position + self.shared.bytes).div_ceil(BLOCK_SIZE);
        Ok(())
    }

    fn place_blocks(&mut self, data_blocks: u64) -> Result<()> {
        let mut next = self.first_block;
        for index in 0..self.directories.len() {
            let Some(directory) = self.directories.get(index).copied() else {
                break;
            };
            let node = self.node(&directory);
            let inline = matches!(self.shape(node)?.2, Tail::Inline(_));
            let blocks = self.packed(&directory).full_blocks + u64::from(!inline);
            if blocks > 0 {
                let large = self.large.entry(node).or_insert(Large {
                    subdirectories: directory.subdirectories.into(),
                    ..Large::default()
                });
                large.block = next;
            }
            next += blocks;
        }
        for index in 0..=self.children.len() {
            let Some(id) = self.in_order(index) else {
                continue;
            };
            if let NodeKind::Symlink(_) = self.tree.node(id).kind
                && self.shape(id)?.2 == Tail::None
            {
                self.long_symlinks.push((id, next));
                next += 1;
            }
        }
        self.blocks = next;
        // Metadata and data share one address space of 32 bits, whose last value means "none".
        let limit = u64::from(u32::MAX) - 1;
        if next.saturating_add(data_blocks) > limit {
            return Err(Error::TooLarge {
                what: "blocks of metadata and data",
                limit,
            });
        }
        Ok(())
    }
}

/// The time with the highest count, the least of several.
fn first_commonest(counted: impl Iterator<Item = (usize, Timestamp)>) -> Timestamp {
    let best = counted.max_by_key(|(count, time)| (*count, std::cmp::Reverse(*time)));
    best.map_or_else(Timestamp::default, |(_, time)| time)
}

/// The commonest of some values, the least of several, and how often it is there.
fn commonest<T: Ord + Copy>(mut values: Vec<T>) -> Option<(usize, T)> {
    values.sort_unstable();
    let runs = values.chunk_by(|a, b| a == b);
    runs.filter_map(|run| Some((run.len(), *run.first()?)))
        .max_by_key(|(count, value)| (*count, std::cmp::Reverse(*value)))
}

/// What the format cannot hold of a single inode.
fn check_node(node: &Node, options: &WriteOptions) -> Result<(), String> {
    let Metadata { mode, mtime, .. } = &node.metadata;
    if *mode > 0o7777 {
        return Err(format!("mode {mode:o} has bits beyond 7777"));
    }
    if mtime.nsec >= 1_000_000_000 {
        return Err(format!("time has {} nanoseconds", mtime.nsec));
    }
    match &node.kind {
        NodeKind::File(data) => check_file(data, options.data_blocks),
        NodeKind::Symlink(target) if target.is_empty() || target.len() > MAX_SYMLINK => {
            Err(format!(
                "symbolic link target of {} bytes; 1 to {MAX_SYMLINK} are possible",
                target.len()
            ))
        }
        NodeKind::Symlink(target) if target.contains(&0) => {
            Err("symbolic link target contains NUL".to_owned())
        }
        NodeKind::CharDevice(Rdev { major, minor })
        | NodeKind::BlockDevice(Rdev { major, minor })
            if *major > 0xfff || *minor > 0xf_ffff =>
        {
            Err(format!(
                "device {major}:{minor}; at most 4095:1048575 is possible"
            ))
        }
        _ => Ok(()),
    }
}

fn check_file(data: &FileData, data_blocks: u64) -> Result<(), String> {
    let size = data.size;
    if i64::try_from(size).is_err() {
        return Err(format!("file of {size} bytes; Linux has at most 2^63 - 1"));
    }
    let blocks = |bytes: u64| bytes.div_ceil(BLOCK_SIZE);
    let inside = |start: u64, bytes: u64| match start.checked_add(blocks(bytes)) {
        Some(end) if end <= data_blocks => Ok(()),
        _ => Err(format!(
            "{} blocks at {start} pass the end of the data file of {data_blocks} blocks",
            blocks(bytes)
        )),
    };
    match &data.layout {
        FileLayout::Empty if size == 0 => Ok(()),
        FileLayout::Empty => Err(format!("file of {size} bytes has no layout")),
        _ if size == 0 => Err("file without bytes has a layout".to_owned()),
        FileLayout::Contiguous { start } => inside(start.get(), size),
        FileLayout::Chunked { chunk_bits, chunks } => {
            if !(BLOCK_BITS..=MAX_CHUNK_BITS).contains(chunk_bits) {
                return Err(format!(
                    "chunks of 2^{chunk_bits} bytes; 2^{BLOCK_BITS} to 2^{MAX_CHUNK_BITS} are possible"
                ));
            }
            let chunk = 1_u64 << chunk_bits;
            if chunks.len() as u64 != size.div_ceil(chunk) {
                return Err(format!(
                    "{} chunks of 2^{chunk_bits} bytes do not make {size} bytes",
                    chunks.len()
                ));
            }
            let mut left = size;
            for place in chunks {
                let len = left.min(chunk);
                left -= len;
                if let Some(start) = place {
                    inside(start.get(), len)?;
                }
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commonest_time_is_found_either_way() {
        let time = |sec: i64, nsec: u32| Timestamp { sec, nsec };
        let cases: [(&[Timestamp], Timestamp); 4] = [
            (&[], time(7, 0)),
            (&[time(7, 0), time(9, 1), time(9, 1)], time(7, 0)),
            (
                &[time(9, 1), time(9, 1), time(9, 2), time(-5, 3)],
                time(9, 1),
            ),
            (
                &[
                    time(-5, 3),
                    time(-5, 3),
                    time(-5, 3),
                    time(9, 1),
                    time(1 << 40, 0),
                ],
                time(-5, 3),
            ),
        ];
        for (times, want) in cases {
            let root = |mtime| Metadata {
                mtime,
                ..Metadata::default()
            };
            let mut tree = Tree::new(root(time(7, 0)));
            for (i, mtime) in times.iter().enumerate() {
                let kind = NodeKind::Fifo;
                let name = i.to_string();
                tree.insert(NodeId::ROOT, name.as_bytes(), root(*mtime), kind)
                    .unwrap();
            }
            let plan = Plan::new(&tree, &WriteOptions::default()).unwrap();
            assert_eq!(plan.epoch, want);
            for few in 0..5 {
                assert_eq!(plan.commonest_time_of(few), want, "{few}");
            }
        }
    }
}
