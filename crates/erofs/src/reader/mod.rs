//! Reads an EROFS image that lies in memory.
//!
//! A view over bytes: nothing is copied, cached or trusted. Every offset is checked against the
//! image before it is used, every count against the bytes that would have to hold it, so each
//! call works in time and memory bounded by the size of the image, whatever the image says.
//! Contradictions are [`Error::Corrupt`] with the structure and its offset; features outside of
//! the accepted subset (`FORMAT.md`) are [`Error::Unsupported`].

mod data;
mod directory;
mod inode;
mod xattr;

use zerocopy::FromBytes;

pub use data::{DataExtent, Extents, Place};
pub use directory::{DirEntry, ReadDir};
pub use inode::Inode;

use crate::error::{Error, Result};
use crate::format::{
    BLOCK_BITS, BLOCK_SIZE, COMPAT_CHECKSUM, INCOMPAT_DEVICES, INCOMPAT_KNOWN, MAGIC, RawDevice,
    RawSuperblock, SUPERBLOCK_OFFSET, checksum,
};
use crate::tree::Timestamp;

/// What the superblock says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Superblock {
    /// Size of this image in blocks of 4 KiB.
    pub blocks: u64,
    /// Number of inodes, as claimed.
    pub inodes: u64,
    /// Time of inodes without a time of their own.
    pub epoch: Timestamp,
    /// Identity of the filesystem.
    pub uuid: [u8; 16],
    /// Name of the filesystem, padded with NUL.
    pub volume_name: [u8; 16],
    /// Number of the root inode.
    pub root_nid: u64,
    /// Features a reader may ignore.
    pub compat: u32,
    /// Features a reader must know.
    pub incompat: u32,
    /// Where inode numbers count from, in blocks.
    pub(crate) meta_block: u64,
    /// Where numbers of shared xattrs count from, in blocks.
    pub(crate) xattr_block: u64,
}

/// An additional device that the image names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Tag as written.
    pub tag: [u8; 64],
    /// Size in blocks of 4 KiB; 0: not known.
    pub blocks: u64,
    /// Where the device begins in the flat address space, in blocks; 0: nowhere.
    pub mapped_block: u64,
}

/// An image in memory.
#[derive(Clone, Debug)]
pub struct Image<'a> {
    bytes: &'a [u8],
    superblock: Superblock,
    devices: Vec<Device>,
}

impl<'a> Image<'a> {
    /// Checks the superblock (with its checksum, if the image has one) and the device table.
    /// More bytes than the image claims are ignored.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if this is no EROFS image or needs features that are not known,
    /// [`Error::Corrupt`] if it is damaged.
    pub fn open(bytes: &'a [u8]) -> Result<Self> {
        let raw = superblock_bytes(bytes)?;
        if raw.magic.get() != MAGIC {
            return Err(Error::unsupported("no EROFS magic at byte 1024"));
        }
        if raw.block_bits != BLOCK_BITS || raw.directory_bits != 0 {
            return Err(Error::unsupported(format!(
                "blocks of 2^{} and directory blocks of 2^({0} + {}) bytes; only 4096 is known",
                raw.block_bits, raw.directory_bits
            )));
        }
        let incompat = raw.incompat.get();
        if incompat & !INCOMPAT_KNOWN != 0 {
            return Err(Error::unsupported(format!(
                "incompatible features {:#x}; update layerpack or rebuild the image without them",
                incompat & !INCOMPAT_KNOWN
            )));
        }
        if raw.compression.get() != 0 && incompat & 0x1 == 0 {
            return Err(Error::unsupported("compressed with a fixed sliding window"));
        }
        let corrupt =
            |reason: String| Error::corrupt("superblock", SUPERBLOCK_OFFSET as u64, reason);
        if raw.compat.get() & COMPAT_CHECKSUM != 0 {
            let sum = checksum(bytes).ok_or_else(|| corrupt("first block is cut short".into()))?;
            if sum != raw.checksum.get() {
                return Err(corrupt(format!(
                    "checksum is {:08x}, should be {sum:08x}",
                    raw.checksum.get()
                )));
            }
        }
        let superblock = Superblock {
            blocks: u64::from(raw.blocks.get()),
            inodes: raw.inodes.get(),
            epoch: Timestamp {
                sec: raw.epoch.get().cast_signed(),
                nsec: raw.epoch_nsec.get(),
            },
            uuid: raw.uuid,
            volume_name: raw.volume_name,
            root_nid: u64::from(raw.root_nid.get()),
            compat: raw.compat.get(),
            incompat,
            meta_block: u64::from(raw.meta_block.get()),
            xattr_block: u64::from(raw.xattr_block.get()),
        };
        if superblock.epoch.nsec >= 1_000_000_000 {
            return Err(corrupt(format!(
                "time has {} nanoseconds",
                superblock.epoch.nsec
            )));
        }
        let end = superblock.blocks * BLOCK_SIZE;
        let bytes = usize::try_from(end)
            .ok()
            .and_then(|end| bytes.get(..end))
            .ok_or_else(|| {
                corrupt(format!(
                    "image of {end} bytes is cut short at {}",
                    bytes.len()
                ))
            })?;
        let mut image = Self {
            bytes,
            superblock,
            devices: Vec::new(),
        };
        let devices = raw.extra_devices.get();
        if incompat & INCOMPAT_DEVICES != 0 && devices > 0 {
            image.devices = image.read_devices(devices, raw.device_slot.get())?;
        }
        Ok(image)
    }

    /// What the superblock says.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Additional devices; the first is number 1.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The root directory.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the inode is, or is no directory.
    pub fn root(&self) -> Result<Inode> {
        let root = self.inode(self.superblock.root_nid)?;
        if !root.is_dir() {
            return Err(root.corrupt("root is not a directory"));
        }
        Ok(root)
    }

    /// The inode at a path of names joined by `/`. Empty components and `.` are skipped, `..`
    /// finds nothing, symbolic links are not followed.
    ///
    /// # Errors
    /// [`Error::NotADirectory`] if the path goes through something else, or what
    /// [`Image::lookup`] returns.
    pub fn resolve(&self, path: &[u8]) -> Result<Option<Inode>> {
        let mut inode = self.root()?;
        let names = path.split(|byte| *byte == b'/');
        for name in names.filter(|name| !name.is_empty() && *name != b".") {
            if name == b".." {
                return Ok(None);
            }
            let Some(entry) = self.lookup(&inode, name)? else {
                return Ok(None);
            };
            inode = self.inode(entry.nid)?;
        }
        Ok(Some(inode))
    }

    /// Bytes of the image in a range, if all are there.
    fn slice(&self, offset: u64, len: u64) -> Option<&'a [u8]> {
        let start = usize::try_from(offset).ok()?;
        let end = usize::try_from(offset.checked_add(len)?).ok()?;
        self.bytes.get(start..end)
    }

    /// A structure of the image at an offset.
    fn read<T: FromBytes>(&self, offset: u64) -> Option<T> {
        T::read_from_bytes(self.slice(offset, size_of::<T>() as u64)?).ok()
    }

    pub(crate) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_devices(&self, count: u16, slot: u16) -> Result<Vec<Device>> {
        let len = size_of::<RawDevice>() as u64;
        let start = u64::from(slot) * len;
        let mut devices = Vec::new();
        for index in 0..u64::from(count) {
            let offset = start + index * len;
            let object = || format!("device slot {}", index + 1);
            let raw: RawDevice = self
                .read(offset)
                .ok_or_else(|| Error::corrupt(object(), offset, "passes the end of the image"))?;
            devices.push(Device {
                tag: raw.tag,
                blocks: u64::from(raw.blocks.get()),
                mapped_block: u64::from(raw.mapped_block.get()),
            });
        }
        Ok(devices)
    }
}

fn superblock_bytes(bytes: &[u8]) -> Result<RawSuperblock> {
    let end = SUPERBLOCK_OFFSET + size_of::<RawSuperblock>();
    let raw = bytes.get(SUPERBLOCK_OFFSET..end);
    raw.and_then(|raw| RawSuperblock::read_from_bytes(raw).ok())
        .ok_or_else(|| Error::unsupported(format!("only {} bytes", bytes.len())))
}
