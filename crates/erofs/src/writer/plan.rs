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

/// A directory of the plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Directory {
    pub(super) node: NodeId,
    pub(super) parent: NodeId,
    first: usize, // its entries in `Plan::children`
    len: usize,
    pub(super) subdirectories: u32,
    pub(super) packed: Packed,
    /// First block of its content, if some of it is not inline.
    pub(super) block: u64,
}

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
    /// Inodes in the order in which they are written.
    pub(super) order: Vec<NodeId>,
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
    children: Vec<u32>,
    /// Numbers of inodes, by [`NodeId::index`].
    nids: Vec<u32>,
    /// Indexes into `directories`.
    numbers: HashMap<NodeId, usize>,
}

impl<'t> Plan<'t> {
    pub(super) fn new(tree: &'t Tree, options: &WriteOptions) -> Result<Self> {
        let mut plan = Self {
            tree,
            epoch: Timestamp::default(),
            shared: Shared::default(),
            order: Vec::with_capacity(tree.len()),
            directories: Vec::new(),
            long_symlinks: Vec::new(),
            chunked: false,
            shared_start: 0,
            first_block: 0,
            blocks: 0,
            children: Vec::with_capacity(tree.len()),
            nids: vec![NONE; tree.slots()],
            numbers: HashMap::new(),
        };
        plan.number_inodes()?;
        for id in &plan.order {
            check_node(&tree.node(*id), options).map_err(|reason| plan.refuse(*id, reason))?;
        }
        plan.epoch = options.build_time.unwrap_or_else(|| plan.commonest_time());
        let shared = Shared::new(tree, plan.order.iter().copied());
        plan.shared = shared.map_err(|(id, reason)| plan.refuse(id, reason))?;
        plan.place_inodes(options.has_device())?;
        plan.place_blocks(options.data_blocks)?;
        Ok(plan)
    }

    pub(super) fn inode_count(&self) -> u64 {
        self.order.len() as u64
    }

    pub(super) fn nid(&self, id: NodeId) -> u64 {
        self.nids.get(id.index()).map_or(0, |nid| u64::from(*nid))
    }

    pub(super) fn directory(&self, id: NodeId) -> Option<&Directory> {
        if !self.tree.is_dir(id) {
            return None;
        }
        self.directories.get(*self.numbers.get(&id)?)
    }

    /// Entries of a directory in order, `.` and `..` included.
    pub(super) fn entries(
        &self,
        directory: &Directory,
    ) -> impl Iterator<Item = (&'t [u8], NodeId)> {
        let end = directory.first + directory.len;
        let all = self.children.get(directory.first..end).unwrap_or_default();
        let tree = self.tree;
        let before = |dots: &[u8]| all.partition_point(|entry| tree.entry(*entry).0 < dots);
        let (head, rest) = all.split_at(before(b"."));
        let (middle, tail) = rest.split_at(before(b"..") - head.len());
        let entry = move |index: &u32| tree.entry(*index);
        (head.iter().map(entry))
            .chain([(b".".as_slice(), directory.node)])
            .chain(middle.iter().map(entry))
            .chain([(b"..".as_slice(), directory.parent)])
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
                    .map_or(0, |directory| directory.packed.tail),
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
            Some(directory) => directory.subdirectories.saturating_add(2),
            None => self.tree.node(id).nlink(),
        }
    }

    /// Size as `stat` shows it.
    pub(super) fn size(&self, id: NodeId) -> u64 {
        match &self.tree.node(id).kind {
            NodeKind::Directory => self.directory(id).map_or(0, |dir| dir.packed.size()),
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

    /// Fills `order`, `directories` and `children`.
    fn number_inodes(&mut self) -> Result<()> {
        self.order.push(NodeId::ROOT);
        let mut stack = vec![(NodeId::ROOT, NodeId::ROOT)];
        while let Some((node, parent)) = stack.pop() {
            let first = self.children.len();
            self.tree.sorted_entries(node, &mut self.children);
            let mut directory = Directory {
                node,
                parent,
                first,
                len: self.children.len() - first,
                subdirectories: 0,
                packed: Packed::default(),
                block: 0,
            };
            directory.packed = pack(self.entries(&directory).map(|(name, _)| name.len()));
            let below = stack.len();
            for entry in self.children.get(first..).unwrap_or_default() {
                let (name, child) = self.tree.entry(*entry);
                let is_dir = self.tree.is_dir(child);
                let Some(nid) = self.nids.get_mut(child.index()) else {
                    continue;
                };
                let is_new = *nid == NONE;
                *nid = 0;
                if is_new {
                    self.order.push(child);
                }
                if !is_dir {
                    if !self.tree.is_childless(child) {
                        return Err(Error::NotADirectory {
                            name: name.to_vec(),
                        });
                    }
                    continue;
                }
                if !is_new || child == NodeId::ROOT {
                    return Err(Error::DirectoryLink {
                        name: name.to_vec(),
                    });
                }
                directory.subdirectories = directory.subdirectories.saturating_add(1);
                stack.push((child, node));
            }
            stack.get_mut(below..).unwrap_or_default().reverse();
            self.numbers.insert(node, self.directories.len());
            self.directories.push(directory);
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
        self.order.iter().filter_map(|id| {
            let node = self.tree.node(*id);
            self.fits_compact(*id, &node).then(|| node.metadata.mtime)
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
        for index in 0..self.order.len() {
            let Some(&id) = self.order.get(index) else {
                break;
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
            if let Some(place) = self.nids.get_mut(id.index()) {
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
            let inline = matches!(self.shape(directory.node)?.2, Tail::Inline(_));
            if let Some(directory) = self.directories.get_mut(index) {
                directory.block = next;
            }
            next += directory.packed.full_blocks + u64::from(!inline);
        }
        for index in 0..self.order.len() {
            let Some(&id) = self.order.get(index) else {
                break;
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
