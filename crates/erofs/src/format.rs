//! On-disk structures, exactly as `FORMAT.md` describes them: little endian, no padding.
//!
//! Field names are ours; the layout is that of the EROFS core format in Linux, reduced to what
//! this crate writes and accepts.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Block size in bytes. Other block sizes are refused.
pub const BLOCK_SIZE: u64 = 4096;
/// Binary logarithm of [`BLOCK_SIZE`].
pub const BLOCK_BITS: u8 = 12;
/// Largest chunk of a file: 2^43 bytes.
pub const MAX_CHUNK_BITS: u8 = BLOCK_BITS + 31;

pub(crate) const BLOCK: usize = 4096;
pub(crate) const SUPERBLOCK_OFFSET: usize = 1024;
pub(crate) const MAGIC: u32 = 0xE0F5_E1E2;
/// Units of inode numbers on disk (nids), in bytes.
pub(crate) const SLOT: usize = 32;
/// "No block": a hole.
pub(crate) const NULL_BLOCK: u32 = u32::MAX;

/// Superblock checksum is present.
pub(crate) const COMPAT_CHECKSUM: u32 = 0x1;
/// Inode times are modification times.
pub(crate) const COMPAT_MTIME: u32 = 0x2;
/// Compressed data is padded at the front; without compressed files it means nothing.
pub(crate) const INCOMPAT_ZERO_PADDING: u32 = 0x1;
/// Chunk-based files.
pub(crate) const INCOMPAT_CHUNKED: u32 = 0x4;
/// Device table.
pub(crate) const INCOMPAT_DEVICES: u32 = 0x8;
pub(crate) const INCOMPAT_KNOWN: u32 = INCOMPAT_ZERO_PADDING | INCOMPAT_CHUNKED | INCOMPAT_DEVICES;

/// Superblock, at byte 1024.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawSuperblock {
    pub(crate) magic: U32,
    pub(crate) checksum: U32, // crc32c without final inversion, of bytes 1024..4096, this field 0
    pub(crate) compat: U32,
    pub(crate) block_bits: u8,
    pub(crate) ext_slots: u8, // 16-byte extensions of the superblock
    pub(crate) root_nid: U16,
    pub(crate) inodes: U64,
    pub(crate) epoch: U64, // seconds (signed), time of every compact inode
    pub(crate) epoch_nsec: U32,
    pub(crate) blocks: U32, // of this device
    pub(crate) meta_block: U32,
    pub(crate) xattr_block: U32,
    pub(crate) uuid: [u8; 16],
    pub(crate) volume_name: [u8; 16],
    pub(crate) incompat: U32,
    pub(crate) compression: U16,
    pub(crate) extra_devices: U16,
    pub(crate) device_slot: U16, // of 128 bytes, from the start of the image
    pub(crate) directory_bits: u8,
    pub(crate) prefix_count: u8,
    pub(crate) prefix_start: U32,
    pub(crate) packed_nid: U64,
    pub(crate) xattr_filter: u8,
    pub(crate) reserved: [u8; 23],
}

/// One additional device.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawDevice {
    pub(crate) tag: [u8; 64],
    pub(crate) blocks: U32,
    pub(crate) mapped_block: U32, // where the device begins in the flat address space
    pub(crate) reserved: [u8; 56],
}

/// Inode of 32 bytes: ids and links of 16 bits, size of 32, the superblock's time.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawCompact {
    pub(crate) format: U16,
    pub(crate) xattr_count: U16,
    pub(crate) mode: U16,
    pub(crate) nlink: U16,
    pub(crate) size: U32,
    pub(crate) reserved: U32,
    pub(crate) data: U32,
    pub(crate) ino: U32,
    pub(crate) uid: U16,
    pub(crate) gid: U16,
    pub(crate) reserved2: U32,
}

/// Inode of 64 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawExtended {
    pub(crate) format: U16,
    pub(crate) xattr_count: U16,
    pub(crate) mode: U16,
    pub(crate) reserved: U16,
    pub(crate) size: U64,
    pub(crate) data: U32,
    pub(crate) ino: U32,
    pub(crate) uid: U32,
    pub(crate) gid: U32,
    pub(crate) mtime: U64,
    pub(crate) mtime_nsec: U32,
    pub(crate) nlink: U32,
    pub(crate) reserved2: [u8; 16],
}

/// Inode format field: bit 0 is the version, bits 1 to 3 the data layout.
pub(crate) const FORMAT_EXTENDED: u16 = 1;
pub(crate) const LAYOUT_PLAIN: u16 = 0;
pub(crate) const LAYOUT_INLINE: u16 = 2;
pub(crate) const LAYOUT_CHUNKED: u16 = 4;

/// `data` of a chunk-based inode: low five bits are chunk bits above block bits.
pub(crate) const CHUNK_BITS_MASK: u32 = 0x1f;
/// The chunk index has entries of 8 bytes with a device number.
pub(crate) const CHUNK_INDEXES: u32 = 0x20;

/// Entry of a chunk index.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawChunk {
    pub(crate) reserved: U16,
    pub(crate) device: U16,
    pub(crate) block: U32,
}

/// Entry of a directory block.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawDirent {
    pub(crate) nid: U64,
    pub(crate) name_offset: U16,
    pub(crate) file_type: u8,
    pub(crate) reserved: u8,
}

/// What precedes the xattrs of an inode; `shared_count` numbers of 32 bits follow, then the
/// inode's own entries.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawXattrHeader {
    pub(crate) name_filter: U32,
    pub(crate) shared_count: u8,
    pub(crate) reserved: [u8; 7],
}

/// An xattr; the name without its prefix and the value follow, padded to 4 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawXattr {
    pub(crate) name_len: u8,
    pub(crate) prefix: u8,
    pub(crate) value_len: U16,
}

const _: () = {
    assert!(size_of::<RawSuperblock>() == 128);
    assert!(size_of::<RawDevice>() == 128);
    assert!(size_of::<RawCompact>() == 32);
    assert!(size_of::<RawExtended>() == 64);
    assert!(size_of::<RawChunk>() == 8);
    assert!(size_of::<RawDirent>() == 12);
    assert!(size_of::<RawXattrHeader>() == 12);
    assert!(size_of::<RawXattr>() == 4);
};

/// Prefixes of xattr names with their numbers. An entry of the ACL numbers has no name of its
/// own: the prefix is the whole name. Number 5, Lustre's, is left out: Linux shows those to nobody.
pub(crate) const XATTR_PREFIXES: [(u8, &[u8]); 5] = [
    (1, b"user."),
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (4, b"trusted."),
    (6, b"security."),
];

/// File types of `mode`.
pub(crate) const S_IFMT: u16 = 0o170_000;
pub(crate) const S_IFIFO: u16 = 0o010_000;
pub(crate) const S_IFCHR: u16 = 0o020_000;
pub(crate) const S_IFDIR: u16 = 0o040_000;
pub(crate) const S_IFBLK: u16 = 0o060_000;
pub(crate) const S_IFREG: u16 = 0o100_000;
pub(crate) const S_IFLNK: u16 = 0o120_000;
pub(crate) const S_IFSOCK: u16 = 0o140_000;

/// Type of an inode as directory entries give it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FileType {
    /// Regular file.
    File = 1,
    /// Directory.
    Directory = 2,
    /// Character device.
    CharDevice = 3,
    /// Block device.
    BlockDevice = 4,
    /// Named pipe.
    Fifo = 5,
    /// Unix socket.
    Socket = 6,
    /// Symbolic link.
    Symlink = 7,
}

impl FileType {
    /// The type that the upper bits of a `st_mode` give.
    pub fn from_mode(mode: u16) -> Option<Self> {
        Some(match mode & S_IFMT {
            S_IFREG => Self::File,
            S_IFDIR => Self::Directory,
            S_IFCHR => Self::CharDevice,
            S_IFBLK => Self::BlockDevice,
            S_IFIFO => Self::Fifo,
            S_IFSOCK => Self::Socket,
            S_IFLNK => Self::Symlink,
            _ => return None,
        })
    }

    /// The upper bits of `st_mode` for this type.
    pub fn mode_bits(self) -> u16 {
        match self {
            Self::File => S_IFREG,
            Self::Directory => S_IFDIR,
            Self::CharDevice => S_IFCHR,
            Self::BlockDevice => S_IFBLK,
            Self::Fifo => S_IFIFO,
            Self::Socket => S_IFSOCK,
            Self::Symlink => S_IFLNK,
        }
    }

    pub(crate) fn from_raw(raw: u8) -> Option<Self> {
        Some(match raw {
            1 => Self::File,
            2 => Self::Directory,
            3 => Self::CharDevice,
            4 => Self::BlockDevice,
            5 => Self::Fifo,
            6 => Self::Socket,
            7 => Self::Symlink,
            _ => return None,
        })
    }
}

/// Superblock checksum: crc32c over the rest of the first block with the checksum field zero,
/// without the final inversion.
pub(crate) fn checksum(first_block: &[u8]) -> Option<u32> {
    let (head, rest) = first_block
        .get(SUPERBLOCK_OFFSET..BLOCK)?
        .split_at_checked(4)?;
    let crc = crc32c::crc32c_append(crc32c::crc32c(head), &[0; 4]);
    Some(!crc32c::crc32c_append(crc, rest.get(4..)?))
}
