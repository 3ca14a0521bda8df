//! A bound on the work that an image can ask for.
//!
//! Structures of a valid image do not overlap, so together they are no larger than it. Damaged
//! or hostile images may name the same bytes as content of many inodes and so ask for work
//! that grows with the square of their size; charging each visited structure ends that.

use crate::error::Result;
use crate::reader::{Image, Inode};

/// Bytes that may still be visited.
#[derive(Debug)]
pub(crate) struct Budget {
    left: u64,
}

impl Budget {
    /// For one visit of each structure of an image.
    pub(crate) fn once(image: &Image<'_>) -> Self {
        Self { left: image.len() }
    }

    /// For values that inodes may share, expanded for each: what real images have, many times
    /// over.
    pub(crate) fn expanded(image: &Image<'_>) -> Self {
        Self {
            left: image.len().saturating_mul(16).saturating_add(64 << 20),
        }
    }

    /// Takes `bytes` for a structure of `inode`.
    pub(crate) fn charge(&mut self, inode: &Inode, bytes: u64) -> Result<()> {
        self.left = self.left.checked_sub(bytes).ok_or_else(|| {
            inode.corrupt("the inodes up to this one name more bytes than the image has")
        })?;
        Ok(())
    }
}

impl Inode {
    /// Bytes of the image that belong to this inode alone, its directory content included.
    pub(crate) fn own_len(&self, image: &Image<'_>) -> Result<u64> {
        use crate::FileType::{Directory, File, Symlink};
        let content = match self.file_type {
            Directory | Symlink => self.size,
            File if self.is_chunked() => {
                let index = image.chunk_index(self)?;
                index.count.saturating_mul(index.entry_len)
            }
            _ => 0,
        };
        Ok((self.core_len + self.body_len).saturating_add(content))
    }
}
