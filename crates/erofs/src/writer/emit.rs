//! Second pass: streams the image out.

use std::io;

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::error::{Error, Result};
use crate::format::{
    BLOCK, CHUNK_INDEXES, COMPAT_CHECKSUM, COMPAT_MTIME, FORMAT_EXTENDED, FileType,
    INCOMPAT_CHUNKED, INCOMPAT_DEVICES, LAYOUT_CHUNKED, LAYOUT_INLINE, LAYOUT_PLAIN, MAGIC,
    NULL_BLOCK, RawChunk, RawCompact, RawDevice, RawExtended, RawSuperblock, SLOT,
    SUPERBLOCK_OFFSET, checksum,
};
use crate::sparse::chunk_bits_for;
use crate::tree::{FileData, FileLayout, NodeId, NodeKind, Rdev};
use crate::writer::WriteOptions;
use crate::writer::directory::{Dirent, encode};
use crate::writer::plan::{Directory, Plan, Tail};
use crate::writer::xattrs::body_count;
use crate::{BLOCK_BITS, BLOCK_SIZE};

/// Bytes gathered before they go out.
const BUFFER: usize = 256 * 1024;

/// Writes the planned image; returns its size in bytes.
pub(super) fn emit(
    plan: &Plan<'_>,
    options: &WriteOptions,
    uuid: [u8; 16],
    out: &mut dyn io::Write,
) -> Result<u64> {
    let mut sink = Sink {
        out,
        buffer: Vec::with_capacity(BUFFER + BLOCK),
        flushed: 0,
    };
    sink.pad_to(SUPERBLOCK_OFFSET as u64)?;
    let superblock = superblock(plan, options, uuid)?;
    sink.write(superblock.as_bytes())?;
    if options.has_device() {
        let device = RawDevice {
            tag: options.device_tag,
            blocks: U32::new(fits(options.data_blocks)?),
            mapped_block: U32::new(fits(plan.blocks)?),
            reserved: [0; 56],
        };
        sink.write(device.as_bytes())?;
    }
    let mut bytes = Vec::new();
    let mut ino = 0_u32;
    let mut symlinks = plan.long_symlinks.iter();
    for id in plan.order() {
        ino = ino.checked_add(1).ok_or(Error::TooLarge {
            what: "inodes",
            limit: u64::from(u32::MAX),
        })?;
        sink.pad_to(plan.nid(id) * SLOT as u64)?;
        bytes.clear();
        encode_inode(plan, options, id, ino, &mut symlinks, &mut bytes)?;
        sink.write(&bytes)?;
    }
    sink.pad_to(plan.shared_start)?;
    plan.shared.emit(|xattr| sink.write(xattr))?;
    sink.pad_to(plan.first_block * BLOCK_SIZE)?;
    for directory in &plan.directories {
        emit_directory(plan, directory, &mut sink)?;
    }
    for (id, block) in &plan.long_symlinks {
        if let NodeKind::Symlink(target) = &plan.tree.node(*id).kind {
            sink.pad_to(block * BLOCK_SIZE)?;
            sink.write(target)?;
        }
    }
    sink.pad_to(plan.blocks * BLOCK_SIZE)?;
    sink.finish()
}

/// Gives a whole image another UUID.
pub(super) fn set_uuid(image: &mut [u8], uuid: [u8; 16]) {
    let start = SUPERBLOCK_OFFSET + std::mem::offset_of!(RawSuperblock, uuid);
    if let Some(field) = image.get_mut(start..start + 16) {
        field.copy_from_slice(&uuid);
    }
    set_checksum(image);
}

/// Puts the checksum into the superblock of an image's beginning.
fn set_checksum(start: &mut [u8]) {
    let start_of_field = SUPERBLOCK_OFFSET + std::mem::offset_of!(RawSuperblock, checksum);
    if let Some(sum) = checksum(start)
        && let Some(field) = start.get_mut(start_of_field..start_of_field + 4)
    {
        field.copy_from_slice(&sum.to_le_bytes());
    }
}

fn superblock(plan: &Plan<'_>, options: &WriteOptions, uuid: [u8; 16]) -> Result<RawSuperblock> {
    let has_device = options.has_device();
    let own_data = if options.data_follows {
        options.data_blocks
    } else {
        0
    };
    let mut incompat = 0;
    if plan.chunked {
        incompat |= INCOMPAT_CHUNKED;
    }
    if has_device {
        incompat |= INCOMPAT_DEVICES;
    }
    let root = u16::try_from(plan.nid(NodeId::ROOT)).map_err(|_| Error::TooLarge {
        what: "slots before the root inode",
        limit: u64::from(u16::MAX),
    })?;
    Ok(RawSuperblock {
        magic: U32::new(MAGIC),
        checksum: U32::ZERO, // the sink fills it in
        compat: U32::new(COMPAT_CHECKSUM | COMPAT_MTIME),
        block_bits: BLOCK_BITS,
        ext_slots: 0,
        root_nid: U16::new(root),
        inodes: U64::new(plan.inode_count()),
        epoch: U64::new(plan.epoch.sec.cast_unsigned()),
        epoch_nsec: U32::new(plan.epoch.nsec),
        blocks: U32::new(fits(plan.blocks + own_data)?),
        meta_block: U32::ZERO,
        xattr_block: U32::new(fits(shared_block(plan))?),
        uuid,
        volume_name: options.volume_name,
        incompat: U32::new(incompat),
        compression: U16::ZERO,
        extra_devices: U16::new(u16::from(has_device)),
        device_slot: U16::new(if has_device { DEVICE_SLOT } else { 0 }),
        directory_bits: 0,
        prefix_count: 0,
        prefix_start: U32::ZERO,
        packed_nid: U64::ZERO,
        xattr_filter: 0,
        reserved: [0; 23],
    })
}

/// The device table directly follows the superblock.
const DEVICE_SLOT: u16 = 9;
const _: () = assert!(
    DEVICE_SLOT as usize * size_of::<RawDevice>() == SUPERBLOCK_OFFSET + size_of::<RawSuperblock>()
);

/// The block that numbers of shared xattrs count from: 0 if there are none.
fn shared_block(plan: &Plan<'_>) -> u64 {
    if plan.shared.bytes == 0 {
        0
    } else {
        plan.shared_start / BLOCK_SIZE
    }
}

fn encode_inode(
    plan: &Plan<'_>,
    options: &WriteOptions,
    id: NodeId,
    ino: u32,
    symlinks: &mut std::slice::Iter<'_, (NodeId, u64)>,
    out: &mut Vec<u8>,
) -> Result<()> {
    let node = plan.tree.node(id);
    let metadata = &node.metadata;
    let (_, body, tail) = plan.shape(id)?;
    let layout = match tail {
        Tail::None => LAYOUT_PLAIN,
        Tail::Inline(_) => LAYOUT_INLINE,
        Tail::Chunks(_) => LAYOUT_CHUNKED,
    };
    let (file_type, data) = match &node.kind {
        NodeKind::Directory => {
            let block = match plan.directory(id) {
                // Without full blocks before an inline tail there is none to name.
                Some(dir) if plan.packed(dir).full_blocks > 0 || tail == Tail::None => {
                    plan.block(dir)
                }
                _ => 0,
            };
            (FileType::Directory, fits(block)?)
        }
        NodeKind::File(data) => {
            let format = chunk_format(data);
            (FileType::File, if tail == Tail::None { 0 } else { format })
        }
        NodeKind::Symlink(_) => {
            let block = if tail == Tail::None {
                symlinks.next().map_or(0, |next| next.1)
            } else {
                0
            };
            (FileType::Symlink, fits(block)?)
        }
        NodeKind::CharDevice(rdev) => (FileType::CharDevice, encode_rdev(*rdev)),
        NodeKind::BlockDevice(rdev) => (FileType::BlockDevice, encode_rdev(*rdev)),
        NodeKind::Fifo => (FileType::Fifo, 0),
        NodeKind::Socket => (FileType::Socket, 0),
    };
    let mode = U16::new(file_type.mode_bits() | metadata.mode);
    let xattr_count = U16::new(body_count(body));
    if plan.is_compact(id) {
        let inode = RawCompact {
            format: U16::new(layout << 1),
            xattr_count,
            mode,
            nlink: U16::new(fits(plan.links(id))?),
            size: U32::new(fits(plan.size(id))?),
            reserved: U32::ZERO,
            data: U32::new(data),
            ino: U32::new(ino),
            uid: U16::new(fits(metadata.uid)?),
            gid: U16::new(fits(metadata.gid)?),
            reserved2: U32::ZERO,
        };
        out.extend_from_slice(inode.as_bytes());
    } else {
        let inode = RawExtended {
            format: U16::new(layout << 1 | FORMAT_EXTENDED),
            xattr_count,
            mode,
            reserved: U16::ZERO,
            size: U64::new(plan.size(id)),
            data: U32::new(data),
            ino: U32::new(ino),
            uid: U32::new(metadata.uid),
            gid: U32::new(metadata.gid),
            mtime: U64::new(metadata.mtime.sec.cast_unsigned()),
            mtime_nsec: U32::new(metadata.mtime.nsec),
            nlink: U32::new(plan.links(id)),
            reserved2: [0; 16],
        };
        out.extend_from_slice(inode.as_bytes());
    }
    let area = plan.shared_start - shared_block(plan) * BLOCK_SIZE;
    let encoded = plan.shared.encode_body(metadata, area, out);
    encoded.map_err(|reason| plan.refuse(id, reason))?;
    match (&node.kind, tail) {
        (NodeKind::Directory, Tail::Inline(_)) => {
            if let Some(directory) = plan.directory(id) {
                let entries = dirents(plan, directory).skip(plan.packed(directory).tail_first);
                encode::<Error>(entries, |block| {
                    out.extend_from_slice(block);
                    Ok(())
                })?;
            }
        }
        (NodeKind::Symlink(target), Tail::Inline(_)) => out.extend_from_slice(target),
        (NodeKind::File(data), Tail::Chunks(_)) => {
            out.resize(out.len().next_multiple_of(8), 0);
            let (device, first) = if options.data_follows {
                (0, plan.blocks)
            } else {
                (1, 0)
            };
            encode_chunks(data, device, first, out)?;
        }
        _ => {}
    }
    Ok(())
}

fn chunk_format(data: &FileData) -> u32 {
    let bits = match &data.layout {
        FileLayout::Empty => return 0,
        FileLayout::Contiguous { .. } => chunk_bits_for(data.size),
        FileLayout::Chunked { chunk_bits, .. } => *chunk_bits,
    };
    u32::from(bits - BLOCK_BITS) | CHUNK_INDEXES
}

/// The chunk index of a file whose blocks count from `first` of a device.
fn encode_chunks(data: &FileData, device: u16, first: u64, out: &mut Vec<u8>) -> Result<()> {
    let mut push = |place: Option<u64>| -> Result<()> {
        let (device, block) = match place {
            Some(block) => (device, fits(first + block)?),
            None => (0, NULL_BLOCK),
        };
        let chunk = RawChunk {
            reserved: U16::ZERO,
            device: U16::new(device),
            block: U32::new(block),
        };
        out.extend_from_slice(chunk.as_bytes());
        Ok(())
    };
    match &data.layout {
        FileLayout::Empty => Ok(()),
        FileLayout::Contiguous { start } => {
            let bits = chunk_bits_for(data.size);
            let step = 1_u64 << (bits - BLOCK_BITS);
            let count = data.size.div_ceil(1 << bits);
            (0..count).try_for_each(|chunk| push(Some(start.get() + chunk * step)))
        }
        FileLayout::Chunked { chunks, .. } => chunks
            .iter()
            .try_for_each(|chunk| push(chunk.map(|block| block.get()))),
    }
}

/// The kernel's 32-bit form of a device number.
fn encode_rdev(rdev: Rdev) -> u32 {
    (rdev.minor & 0xff) | (rdev.major << 8) | ((rdev.minor & !0xff) << 12)
}

fn dirents<'t>(plan: &Plan<'t>, directory: &Directory) -> impl Iterator<Item = Dirent<'t>> {
    plan.entries(directory).map(|(name, child)| Dirent {
        name,
        nid: plan.nid(child),
        file_type: match plan.tree.node(child).kind {
            NodeKind::Directory => FileType::Directory,
            NodeKind::File(_) => FileType::File,
            NodeKind::Symlink(_) => FileType::Symlink,
            NodeKind::CharDevice(_) => FileType::CharDevice,
            NodeKind::BlockDevice(_) => FileType::BlockDevice,
            NodeKind::Fifo => FileType::Fifo,
            NodeKind::Socket => FileType::Socket,
        },
    })
}

/// Writes the blocks of a directory that are not inline.
fn emit_directory(plan: &Plan<'_>, directory: &Directory, sink: &mut Sink<'_>) -> Result<()> {
    let inline = matches!(plan.shape(plan.node(directory))?.2, Tail::Inline(_));
    let blocks = plan.packed(directory).full_blocks + u64::from(!inline);
    let first = plan.block(directory);
    let mut written = 0;
    if blocks == 0 {
        return Ok(());
    }
    encode(dirents(plan, directory), |block| {
        if written == blocks {
            return Ok(());
        }
        sink.pad_to((first + written) * BLOCK_SIZE)?;
        written += 1;
        sink.write(block)
    })
}

fn fits<T, U: TryFrom<T>>(value: T) -> Result<U> {
    U::try_from(value).map_err(|_| Error::TooLarge {
        what: "blocks of metadata and data",
        limit: u64::from(u32::MAX),
    })
}

/// Counts, pads and checksums what goes out.
struct Sink<'a> {
    out: &'a mut dyn io::Write,
    buffer: Vec<u8>,
    flushed: u64,
}

impl Sink<'_> {
    fn position(&self) -> u64 {
        self.flushed + self.buffer.len() as u64
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= BUFFER {
            self.flush()
        } else {
            Ok(())
        }
    }

    /// Zeros up to a position that is not behind.
    fn pad_to(&mut self, position: u64) -> Result<()> {
        while self.position() < position {
            let zeros = (position - self.position()).min(BLOCK_SIZE);
            let zeros = usize::try_from(zeros).unwrap_or(BLOCK);
            self.buffer.resize(self.buffer.len() + zeros, 0);
            if self.buffer.len() >= BUFFER {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if self.flushed == 0 {
            set_checksum(&mut self.buffer);
        }
        let written = self.out.write_all(&self.buffer);
        written.map_err(|source| Error::Write {
            offset: self.flushed,
            source,
        })?;
        self.flushed += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    fn finish(mut self) -> Result<u64> {
        self.flush()?;
        self.out.flush().map_err(|source| Error::Write {
            offset: self.flushed,
            source,
        })?;
        Ok(self.flushed)
    }
}
