//! Writes a [`Tree`] as an EROFS metadata image.
//!
//! Layout of the image, with no gap that is not alignment:
//!
//! ```text
//! block 0   superblock (byte 1024), device table, then at once
//! inodes    root, then the entries of each directory together, directories in depth-first
//!           order; xattrs, chunk indexes, short symlinks and last directory blocks inline
//! shared    xattr values that several inodes have
//! blocks    full directory blocks and long symlinks, in the same order
//! ```
//!
//! A planning pass fixes the place of everything, an emitting pass streams it out; between them
//! they hold about 8 bytes per inode beside the tree, and 16 more for each directory. Nothing depends
//! on the order in which the tree was built, and every reserved byte is zero.

mod directory;
mod emit;
mod plan;
mod xattrs;

use std::io;

use crate::error::{Error, Result};
use crate::tree::{Timestamp, Tree};

/// An image of so many blocks is held in memory, so that it is made only once although its UUID is
/// a digest of it.
const HELD_BLOCKS: u64 = 1024;

/// What an image says besides its tree.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    /// Size of device 1 in blocks of 4 KiB. 0: there is no device 1 and no file has bytes.
    pub data_blocks: u64,
    /// The data is not on a device: it follows the metadata in the same file, so that this is
    /// whole by itself.
    pub data_follows: bool,
    /// Goes into the device table to tell which data file belongs to the image, e.g. the
    /// start of a digest as text. Not zero if there is a device: old kernels want a tag.
    pub device_tag: [u8; 64],
    /// Identity of the filesystem; `None` derives it from the image's content.
    pub uuid: Option<[u8; 16]>,
    /// Name of the filesystem, padded with NUL.
    pub volume_name: [u8; 16],
    /// Modification time of the inodes that have no time of their own, which are smaller.
    /// `None` takes the tree's commonest time.
    pub build_time: Option<Timestamp>,
}

impl WriteOptions {
    /// Whether the image needs a device for its data.
    fn has_device(&self) -> bool {
        self.data_blocks > 0 && !self.data_follows
    }
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self {
            data_blocks: 0,
            data_follows: false,
            device_tag: [0; 64],
            uuid: None,
            volume_name: [0; 16],
            build_time: None,
        }
    }
}

/// What [`write_image`] wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageInfo {
    /// Size of the image in bytes, a multiple of 4096. Data that follows is not counted: it
    /// begins here.
    pub bytes: u64,
    /// Number of inodes.
    pub inodes: u64,
    /// The image's UUID, given or derived.
    pub uuid: [u8; 16],
}

/// Writes the tree as an image. The bytes depend on nothing but the tree and the options.
///
/// # Errors
/// [`Error::Unrepresentable`] names an inode that does not fit the format, [`Error::TooLarge`]
/// a limit of the whole; both before anything is written. [`Error::Write`] is the output's.
pub fn write_image(
    tree: &Tree,
    options: &WriteOptions,
    out: &mut dyn io::Write,
) -> Result<ImageInfo> {
    let plan = plan::Plan::new(tree, options)?;
    let (uuid, bytes) = match options.uuid {
        Some(uuid) => (uuid, emit::emit(&plan, options, uuid, out)?),
        None if plan.blocks <= HELD_BLOCKS => {
            let mut image = Vec::new();
            emit::emit(&plan, options, [0; 16], &mut image)?;
            let mut hasher = blake3::Hasher::new();
            hasher.update(&image);
            let uuid = uuid_of(&hasher);
            emit::set_uuid(&mut image, uuid);
            let written = out.write_all(&image).and_then(|()| out.flush());
            written.map_err(|source| Error::Write { offset: 0, source })?;
            (uuid, image.len() as u64)
        }
        None => {
            let uuid = content_uuid(&plan, options)?;
            (uuid, emit::emit(&plan, options, uuid, out)?)
        }
    };
    Ok(ImageInfo {
        bytes,
        inodes: plan.inode_count(),
        uuid,
    })
}

/// A UUID of version 8 from the BLAKE3 digest of the image with a zero UUID.
fn content_uuid(plan: &plan::Plan<'_>, options: &WriteOptions) -> Result<[u8; 16]> {
    let mut hasher = blake3::Hasher::new();
    emit::emit(plan, options, [0; 16], &mut hasher)?;
    Ok(uuid_of(&hasher))
}

fn uuid_of(hasher: &blake3::Hasher) -> [u8; 16] {
    let mut uuid = [0; 16];
    hasher.finalize_xof().fill(&mut uuid);
    let [.., version, _, variant, _, _, _, _, _, _, _] = &mut uuid;
    *version = (*version & 0x0f) | 0x80;
    *variant = (*variant & 0x3f) | 0x80;
    uuid
}
