//! Builders of trees with their data file, and views of one tree through different readers, all
//! in the form of the tree compare tool.

use std::collections::{BTreeMap, HashMap};

use erofs_rs::EroFS;
use erofs_rs::backend::SliceImage;
use layerpack_erofs::{
    BLOCK_SIZE, BlockIndex, FileData, FileLayout, Image, ImageInfo, Inode, Metadata, NodeId,
    NodeKind, Tree, WriteOptions, plan_sparse, write_image,
};
use layerpack_fixtures::treecmp::{self, Entry, TreeSnapshot};
use rustix::fs::FileType;

/// Names one file of the data device in images of these tests.
pub(crate) const TAG: &[u8] = b"test-data";

/// A tree under construction with its data file.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) tree: Tree,
    /// Device 1, in sparse form: pieces by byte offset.
    pub(crate) pieces: BTreeMap<u64, Vec<u8>>,
    pub(crate) data_blocks: u64,
}

pub(crate) fn meta(mode: u16) -> Metadata {
    Metadata {
        mode,
        ..Metadata::default()
    }
}

impl Sample {
    pub(crate) fn new(root: Metadata) -> Self {
        Self {
            tree: Tree::new(root),
            pieces: BTreeMap::new(),
            data_blocks: 0,
        }
    }

    pub(crate) fn options(&self) -> WriteOptions {
        let mut device_tag = [0; 64];
        device_tag[..TAG.len()].copy_from_slice(TAG);
        WriteOptions {
            data_blocks: self.data_blocks,
            device_tag,
            ..WriteOptions::default()
        }
    }

    pub(crate) fn image(&self) -> Vec<u8> {
        self.write().0
    }

    pub(crate) fn write(&self) -> (Vec<u8>, ImageInfo) {
        let mut bytes = Vec::new();
        let info = write_image(&self.tree, &self.options(), &mut bytes).unwrap();
        assert_eq!(info.bytes, bytes.len() as u64);
        (bytes, info)
    }

    pub(crate) fn dir(&mut self, parent: NodeId, name: &[u8], metadata: Metadata) -> NodeId {
        self.tree
            .insert(parent, name, metadata, NodeKind::Directory)
            .unwrap()
    }

    pub(crate) fn node(&mut self, parent: NodeId, name: &[u8], kind: NodeKind) -> NodeId {
        self.tree.insert(parent, name, meta(0o644), kind).unwrap()
    }

    /// Puts bytes behind everything on the data device.
    pub(crate) fn store(&mut self, bytes: &[u8]) -> FileData {
        let size = bytes.len() as u64;
        if bytes.is_empty() {
            return FileData::empty();
        }
        let start = BlockIndex::new(self.data_blocks).unwrap();
        self.pieces.insert(start.byte_offset(), bytes.to_vec());
        self.data_blocks += size.div_ceil(BLOCK_SIZE);
        FileData {
            size,
            layout: FileLayout::Contiguous { start },
        }
    }

    /// As [`Sample::store`] for a file that is zeros but for the given pieces.
    pub(crate) fn store_sparse(&mut self, size: u64, pieces: &[(u64, Vec<u8>)]) -> FileData {
        let ranges: Vec<_> = pieces
            .iter()
            .map(|(at, bytes)| *at..*at + bytes.len() as u64)
            .collect();
        let plan = plan_sparse(size, &ranges);
        let start = BlockIndex::new(self.data_blocks).unwrap();
        for (at, bytes) in pieces {
            for (index, byte) in bytes.iter().enumerate() {
                let address = start.byte_offset() + plan.address_of(at + index as u64).unwrap();
                let block = address / BLOCK_SIZE * BLOCK_SIZE;
                let piece = self
                    .pieces
                    .entry(block)
                    .or_insert_with(|| vec![0; BLOCK_SIZE as usize]);
                piece[(address - block) as usize] = *byte;
            }
        }
        self.data_blocks += plan.blocks();
        FileData {
            size,
            layout: plan.layout(start).unwrap(),
        }
    }

    pub(crate) fn file(&mut self, parent: NodeId, name: &[u8], bytes: &[u8]) -> NodeId {
        let data = self.store(bytes);
        self.node(parent, name, NodeKind::File(data))
    }

    /// The data device as one buffer; only for small ones.
    pub(crate) fn data(&self) -> Vec<u8> {
        let mut data = vec![0; usize::try_from(self.data_blocks * BLOCK_SIZE).unwrap()];
        for (at, bytes) in &self.pieces {
            let at = usize::try_from(*at).unwrap();
            data[at..at + bytes.len()].copy_from_slice(bytes);
        }
        data
    }

    /// Bytes of a range of the data device.
    pub(crate) fn read_data(&self, at: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        let from = self
            .pieces
            .range(..=at)
            .next_back()
            .map_or(at, |piece| *piece.0);
        for (start, bytes) in self.pieces.range(from..at + len as u64) {
            for (index, byte) in bytes.iter().enumerate() {
                let address = start + index as u64;
                if address >= at && address < at + len as u64 {
                    out[(address - at) as usize] = *byte;
                }
            }
        }
        out
    }
}

/// Content of a file of the sample, by what the tree says.
pub(crate) fn content(sample: &Sample, data: &FileData, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    let end = (offset + len as u64).min(data.size);
    out.truncate((end - offset) as usize);
    let mut copy = |start: BlockIndex, first: u64, size: u64| {
        let from = offset.max(first);
        let to = end.min(first + size);
        if from < to {
            let at = start.byte_offset() + (from - first);
            let bytes = sample.read_data(at, (to - from) as usize);
            out[(from - offset) as usize..(to - offset) as usize].copy_from_slice(&bytes);
        }
    };
    match &data.layout {
        FileLayout::Empty => {}
        FileLayout::Contiguous { start } => copy(*start, 0, data.size),
        FileLayout::Chunked { chunk_bits, chunks } => {
            for (index, chunk) in chunks.iter().enumerate() {
                if let Some(start) = chunk {
                    copy(*start, (index as u64) << chunk_bits, 1 << chunk_bits);
                }
            }
        }
    }
    out
}

/// An entry of a snapshot with what all inodes have.
struct Basics {
    kind: FileType,
    mode: u16,
    uid: u32,
    gid: u32,
    mtime: (i64, u32),
    nlink: u32,
}

fn entry(
    basics: Basics,
    inode: u64,
    groups: &mut HashMap<u64, Vec<Vec<u8>>>,
    path: &[u8],
) -> Entry {
    let is_dir = basics.kind == FileType::Directory;
    if !is_dir {
        groups.entry(inode).or_default().push(path.to_vec());
    }
    Entry {
        kind: basics.kind,
        mode: u32::from(basics.mode),
        uid: basics.uid,
        gid: basics.gid,
        size: 0,
        mtime: basics.mtime,
        xattrs: BTreeMap::new(),
        nlink: if is_dir { 0 } else { basics.nlink },
        link_group: None,
        rdev: (0, 0),
        target: None,
        digest: None,
    }
}

fn set_groups(snapshot: &mut TreeSnapshot, groups: HashMap<u64, Vec<Vec<u8>>>) {
    for mut paths in groups.into_values().filter(|paths| paths.len() > 1) {
        paths.sort();
        for path in &paths {
            snapshot.entries.get_mut(path).unwrap().link_group = Some(paths[0].clone());
        }
    }
}

/// What a tree says, without contents.
pub(crate) fn of_tree(tree: &Tree) -> TreeSnapshot {
    let mut snapshot = TreeSnapshot::default();
    let mut groups = HashMap::new();
    for item in tree.walk() {
        let node = tree.node(item.id);
        let metadata = &node.metadata;
        let kind = match node.kind {
            NodeKind::Directory => FileType::Directory,
            NodeKind::File(_) => FileType::RegularFile,
            NodeKind::Symlink(_) => FileType::Symlink,
            NodeKind::CharDevice(_) => FileType::CharacterDevice,
            NodeKind::BlockDevice(_) => FileType::BlockDevice,
            NodeKind::Fifo => FileType::Fifo,
            NodeKind::Socket => FileType::Socket,
        };
        let basics = Basics {
            kind,
            mode: metadata.mode,
            uid: metadata.uid,
            gid: metadata.gid,
            mtime: (metadata.mtime.sec, metadata.mtime.nsec),
            nlink: node.nlink(),
        };
        let mut entry = entry(basics, item.id.index() as u64, &mut groups, &item.path);
        entry.xattrs = metadata.xattrs.clone();
        match &node.kind {
            NodeKind::File(data) => entry.size = data.size,
            NodeKind::Symlink(target) => {
                entry.size = target.len() as u64;
                entry.target = Some(target.clone());
            }
            NodeKind::CharDevice(rdev) | NodeKind::BlockDevice(rdev) => {
                entry.rdev = (rdev.major, rdev.minor);
            }
            _ => {}
        }
        snapshot.entries.insert(item.path, entry);
    }
    set_groups(&mut snapshot, groups);
    snapshot
}

/// What our reader finds, each inode read on its own.
pub(crate) fn of_image(image: &Image<'_>) -> TreeSnapshot {
    let mut snapshot = TreeSnapshot::default();
    let mut groups = HashMap::new();
    let mut pending = vec![(Vec::new(), image.root().unwrap())];
    while let Some((path, inode)) = pending.pop() {
        let inode: Inode = inode;
        let kind = FileType::from_raw_mode(u32::from(inode.mode));
        let basics = Basics {
            kind,
            mode: inode.mode & 0o7777,
            uid: inode.uid,
            gid: inode.gid,
            mtime: (inode.mtime.sec, inode.mtime.nsec),
            nlink: inode.nlink,
        };
        let mut entry = entry(basics, inode.nid, &mut groups, &path);
        let xattrs = image.xattrs(&inode).unwrap();
        let count = xattrs.len();
        entry.xattrs = xattrs.into_iter().collect();
        assert_eq!(entry.xattrs.len(), count);
        match kind {
            FileType::Directory => {
                for child in image.read_dir(&inode).unwrap() {
                    let child = child.unwrap();
                    let found = image.lookup(&inode, child.name).unwrap().unwrap();
                    assert_eq!(found, child);
                    let below = join(&path, child.name);
                    let child_inode = image.inode(child.nid).unwrap();
                    assert_eq!(child.file_type, child_inode.file_type);
                    pending.push((below, child_inode));
                }
            }
            FileType::RegularFile => entry.size = inode.size,
            FileType::Symlink => {
                entry.size = inode.size;
                entry.target = Some(image.symlink(&inode).unwrap().to_vec());
            }
            _ => {}
        }
        if let Some(rdev) = inode.rdev() {
            entry.rdev = (rdev.major, rdev.minor);
        }
        snapshot.entries.insert(path, entry);
    }
    set_groups(&mut snapshot, groups);
    snapshot
}

pub(crate) fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() {
        name.to_vec()
    } else {
        [path, name].join(b"/".as_slice())
    }
}

/// Opens an image with the independent reader.
pub(crate) fn peer<'a>(sample: &Sample, meta: &'a [u8], data: &'a [u8]) -> EroFS<SliceImage<'a>> {
    let devices = if sample.data_blocks > 0 {
        vec![SliceImage::new(data)]
    } else {
        vec![]
    };
    EroFS::new_with_devices(SliceImage::new(meta), devices).unwrap()
}

/// What the independent reader finds.
pub(crate) fn of_peer(fs: &EroFS<SliceImage<'_>>) -> TreeSnapshot {
    let mut snapshot = TreeSnapshot::default();
    let mut groups = HashMap::new();
    let root = fs.get_inode(fs.super_block().root_inode_id()).unwrap();
    let mut found = vec![(Vec::new(), root)];
    for item in fs.walk_dir("/").unwrap() {
        let item = item.unwrap();
        let path = item.dir_entry.path();
        let path = path.as_bytes();
        let path = path.strip_prefix(b"/").unwrap_or(path).to_vec();
        if matches!(path.rsplit(|byte| *byte == b'/').next(), Some(b"." | b"..")) {
            continue;
        }
        found.push((path, item.inode));
    }
    for (path, inode) in found {
        use std::os::unix::fs::PermissionsExt as _;
        let basics = Basics {
            kind: FileType::from_raw_mode(inode.file_type().as_raw_mode()),
            mode: (inode.permissions().mode() & 0o7777) as u16,
            uid: inode.uid(),
            gid: inode.gid(),
            mtime: inode.modified_unix(),
            nlink: inode.nlink(),
        };
        let mut entry = entry(basics, inode.id(), &mut groups, &path);
        entry.xattrs = fs.xattrs_inode(inode).unwrap();
        if inode.is_symlink() {
            entry.size = inode.data_size();
            entry.target = Some(fs.read_link_inode(inode).unwrap().as_bytes().to_vec());
        } else if inode.is_file() {
            entry.size = inode.data_size();
        }
        entry.rdev = inode.device().unwrap_or_default();
        snapshot.entries.insert(path, entry);
    }
    set_groups(&mut snapshot, groups);
    snapshot
}

#[track_caller]
pub(crate) fn assert_same(expected: &TreeSnapshot, found: &TreeSnapshot) {
    let differences = treecmp::diff(expected, found);
    assert!(
        differences.is_empty(),
        "{:#?}",
        &differences[..differences.len().min(20)]
    );
}

/// Places of a file that are worth reading: all of a small one, ends of chunks of a large one.
pub(crate) fn probes(data: &FileData) -> Vec<(u64, usize)> {
    if data.size <= 1 << 20 {
        return vec![(0, data.size as usize)];
    }
    let mut edges = vec![0, data.size];
    if let FileLayout::Chunked { chunk_bits, chunks } = &data.layout {
        let step = (chunks.len() / 16).max(1);
        let filled = chunks
            .iter()
            .enumerate()
            .filter(|(index, chunk)| chunk.is_some() || index % step == 0);
        edges.extend(
            filled
                .take(64)
                .map(|(index, _)| (index as u64) << chunk_bits),
        );
    }
    let around = |edge: u64| {
        let start = edge.saturating_sub(4096);
        (start, (data.size - start).min(8192) as usize)
    };
    edges.into_iter().map(around).collect()
}

/// Every regular file of a tree with its path.
pub(crate) fn files(tree: &Tree) -> Vec<(Vec<u8>, FileData)> {
    let files = tree
        .walk()
        .filter_map(|item| match &tree.node(item.id).kind {
            NodeKind::File(data) => Some((item.path, data.clone())),
            _ => None,
        });
    files.collect()
}
