//! Inodes.

use crate::BLOCK_SIZE;
use crate::error::{Error, Result};
use crate::format::{
    FORMAT_EXTENDED, FileType, LAYOUT_CHUNKED, LAYOUT_INLINE, LAYOUT_PLAIN, RawCompact,
    RawExtended, RawXattrHeader, SLOT,
};
use crate::reader::Image;
use crate::tree::{Rdev, Timestamp};

/// How the content of an inode is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    Plain,
    Inline,
    Chunked,
}

/// An inode of an [`Image`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inode {
    /// Number that names the inode in the image and in directory entries.
    pub nid: u64,
    /// Serial number.
    pub ino: u32,
    /// Type.
    pub file_type: FileType,
    /// Type and permission bits as in `st_mode`.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Modification time.
    pub mtime: Timestamp,
    /// Number of links.
    pub nlink: u32,
    /// Whether this is the small form of inode.
    pub compact: bool,
    pub(crate) layout: Layout,
    pub(crate) data: u32,
    pub(crate) offset: u64,
    pub(crate) core_len: u64,
    pub(crate) body_len: u64,
}

impl Inode {
    /// Whether this is a directory.
    pub fn is_dir(&self) -> bool {
        self.file_type == FileType::Directory
    }

    /// Device number of a character or block device.
    pub fn rdev(&self) -> Option<Rdev> {
        matches!(self.file_type, FileType::CharDevice | FileType::BlockDevice).then_some(Rdev {
            major: (self.data >> 8) & 0xfff,
            minor: (self.data & 0xff) | ((self.data >> 12) & 0xf_ff00),
        })
    }

    pub(crate) fn is_chunked(&self) -> bool {
        self.layout == Layout::Chunked
    }

    pub(crate) fn is_inline(&self) -> bool {
        self.layout == Layout::Inline
    }

    /// End of the inode with its xattrs, in bytes from the start of the image.
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.core_len + self.body_len
    }

    pub(crate) fn corrupt(&self, reason: impl Into<String>) -> Error {
        Error::corrupt(format!("inode {}", self.nid), self.offset, reason)
    }
}

impl<'a> Image<'a> {
    /// The inode with number `nid`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if there can be none, [`Error::Unsupported`] if it is compressed.
    pub fn inode(&self, nid: u64) -> Result<Inode> {
        let start = self.superblock.meta_block * BLOCK_SIZE;
        let offset = nid
            .checked_mul(SLOT as u64)
            .and_then(|slots| slots.checked_add(start));
        let offset = offset.ok_or_else(|| {
            Error::corrupt(
                format!("inode {nid}"),
                u64::MAX,
                "passes the end of the image",
            )
        })?;
        let object = || format!("inode {nid}");
        let outside = || Error::corrupt(object(), offset, "passes the end of the image");
        let compact: RawCompact = self.read(offset).ok_or_else(outside)?;
        let format = compact.format.get();
        let layout = match format >> 1 {
            LAYOUT_PLAIN => Layout::Plain,
            LAYOUT_INLINE => Layout::Inline,
            LAYOUT_CHUNKED => Layout::Chunked,
            1 | 3 => {
                return Err(Error::unsupported(format!(
                    "inode {nid} is compressed; rebuild the image without compression"
                )));
            }
            _ => {
                return Err(Error::corrupt(
                    object(),
                    offset,
                    format!("format is {format:#x}"),
                ));
            }
        };
        let mode = compact.mode.get();
        let file_type = FileType::from_mode(mode)
            .ok_or_else(|| Error::corrupt(object(), offset, format!("mode is {mode:#o}")))?;
        let body_len = match u64::from(compact.xattr_count.get()) {
            0 => 0,
            count => size_of::<RawXattrHeader>() as u64 + 4 * (count - 1),
        };
        let inode = if format & FORMAT_EXTENDED == 0 {
            Inode {
                nid,
                ino: compact.ino.get(),
                file_type,
                mode,
                uid: u32::from(compact.uid.get()),
                gid: u32::from(compact.gid.get()),
                size: u64::from(compact.size.get()),
                mtime: self.superblock.epoch,
                nlink: u32::from(compact.nlink.get()),
                compact: true,
                layout,
                data: compact.data.get(),
                offset,
                core_len: size_of::<RawCompact>() as u64,
                body_len,
            }
        } else {
            let raw: RawExtended = self.read(offset).ok_or_else(outside)?;
            Inode {
                nid,
                ino: raw.ino.get(),
                file_type,
                mode,
                uid: raw.uid.get(),
                gid: raw.gid.get(),
                size: raw.size.get(),
                mtime: Timestamp {
                    sec: raw.mtime.get().cast_signed(),
                    nsec: raw.mtime_nsec.get(),
                },
                nlink: raw.nlink.get(),
                compact: false,
                layout,
                data: raw.data.get(),
                offset,
                core_len: size_of::<RawExtended>() as u64,
                body_len,
            }
        };
        if inode.end() > self.len() {
            return Err(inode.corrupt("its xattrs pass the end of the image"));
        }
        if inode.mtime.nsec >= 1_000_000_000 {
            return Err(inode.corrupt(format!("time has {} nanoseconds", inode.mtime.nsec)));
        }
        if i64::try_from(inode.size).is_err() {
            return Err(inode.corrupt(format!("size is {}", inode.size)));
        }
        if layout == Layout::Chunked && file_type != FileType::File {
            return Err(inode.corrupt("only regular files have chunks"));
        }
        Ok(inode)
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the inode is no symbolic link, its target is outside of the image,
    /// empty, too long for Linux (4095 bytes), or holds NUL.
    pub fn symlink(&self, inode: &Inode) -> Result<&'a [u8]> {
        if inode.file_type != FileType::Symlink {
            return Err(inode.corrupt("not a symbolic link"));
        }
        if inode.size == 0 || inode.size > 4095 {
            return Err(inode.corrupt(format!("symbolic link target of {} bytes", inode.size)));
        }
        let target = self.content_block(inode, 0)?;
        if target.contains(&0) {
            return Err(inode.corrupt("symbolic link target contains NUL"));
        }
        Ok(target)
    }
}
