//! Where the bytes of files are.

use crate::error::Result;
use crate::format::{CHUNK_BITS_MASK, CHUNK_INDEXES, FileType, NULL_BLOCK, RawChunk};
use crate::reader::Image;
use crate::reader::inode::{Inode, Layout};
use crate::{BLOCK_BITS, BLOCK_SIZE};
use zerocopy::little_endian::U32;

/// A place on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// 0 for the image itself, 1 for the data file.
    pub device: u16,
    /// Byte offset on that device.
    pub address: u64,
}

/// A piece of a regular file that is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataExtent {
    /// Byte offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Where it is; `None` for a hole, which reads as zeros.
    pub place: Option<Place>,
}

/// The pieces of a file in order, from [`Image::layout`]. Ends after the first error.
#[derive(Clone, Debug)]
pub struct Extents<'i, 'a> {
    image: &'i Image<'a>,
    inode: Inode,
    next: u64,
    chunk_bits: u8,
    index: u64,
    entry_len: u64,
}

/// Form of a chunk index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkIndex {
    pub(crate) chunk_bits: u8,
    pub(crate) offset: u64,
    pub(crate) entry_len: u64,
    pub(crate) count: u64,
}

impl<'a> Image<'a> {
    /// The pieces of a regular file: one for each chunk, or one for the blocks and one for an
    /// inline tail. Together they are exactly the file's size.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) if the inode is not a regular file, or its
    /// index is outside of the image. An item is an error if its place is outside of its
    /// device.
    pub fn layout(&self, inode: &Inode) -> Result<Extents<'_, 'a>> {
        if inode.file_type != FileType::File {
            return Err(inode.corrupt("not a regular file"));
        }
        let index = match inode.layout {
            Layout::Chunked => self.chunk_index(inode)?,
            _ => ChunkIndex {
                chunk_bits: 0,
                offset: 0,
                entry_len: 0,
                count: 0,
            },
        };
        Ok(Extents {
            image: self,
            inode: *inode,
            next: 0,
            chunk_bits: index.chunk_bits,
            index: index.offset,
            entry_len: index.entry_len,
        })
    }

    /// The chunk index of a chunk-based inode, checked to be inside of the image.
    pub(crate) fn chunk_index(&self, inode: &Inode) -> Result<ChunkIndex> {
        if inode.data & !(CHUNK_BITS_MASK | CHUNK_INDEXES) != 0 {
            return Err(inode.corrupt(format!("chunk format is {:#x}", inode.data)));
        }
        let above = u8::try_from(inode.data & CHUNK_BITS_MASK).unwrap_or(0);
        let chunk_bits = BLOCK_BITS + above;
        let entry_len = if inode.data & CHUNK_INDEXES == 0 {
            4
        } else {
            8
        };
        let offset = inode.end().next_multiple_of(entry_len);
        let count = inode.size.div_ceil(1 << chunk_bits);
        let end = count
            .checked_mul(entry_len)
            .and_then(|len| len.checked_add(offset));
        if end.is_none_or(|end| end > self.len()) {
            return Err(inode.corrupt(format!(
                "index of {count} chunks passes the end of the image"
            )));
        }
        Ok(ChunkIndex {
            chunk_bits,
            offset,
            entry_len,
            count,
        })
    }

    /// Finds the device of a block of the flat address space.
    fn flat_place(&self, block: u64) -> Place {
        let mapped = self.devices.iter().zip(1..).find(|(device, _)| {
            let start = device.mapped_block;
            start != 0 && block >= start && block - start < device.blocks
        });
        match mapped {
            Some((device, number)) => Place {
                device: number,
                address: (block - device.mapped_block) * BLOCK_SIZE,
            },
            None => Place {
                device: 0,
                address: block * BLOCK_SIZE,
            },
        }
    }

    fn check_place(&self, inode: &Inode, place: Place, len: u64) -> Result<Place> {
        let blocks = match place.device.checked_sub(1) {
            None => Some(self.superblock.blocks),
            Some(index) => self
                .devices
                .get(usize::from(index))
                .map(|device| device.blocks),
        };
        let Some(blocks) = blocks else {
            return Err(inode.corrupt(format!("device {} does not exist", place.device)));
        };
        // Old versions of mkfs.erofs leave the size of a device 0.
        let limit = if blocks == 0 {
            u64::MAX
        } else {
            blocks * BLOCK_SIZE
        };
        let end = place.address.checked_add(len);
        if end.is_none_or(|end| end > limit) {
            return Err(inode.corrupt(format!(
                "{len} bytes at {} pass the end of device {} of {blocks} blocks",
                place.address, place.device
            )));
        }
        Ok(place)
    }

    /// Content of a directory or symbolic link within its block `number`.
    pub(crate) fn content_block(&self, inode: &Inode, number: u64) -> Result<&'a [u8]> {
        let start = number * BLOCK_SIZE;
        let len = inode.size.saturating_sub(start).min(BLOCK_SIZE);
        let inline = inode.layout == Layout::Inline && number == inode.size / BLOCK_SIZE;
        let offset = if inline {
            if inode.end() % BLOCK_SIZE + len > BLOCK_SIZE {
                return Err(inode.corrupt("inline content crosses a block boundary"));
            }
            inode.end()
        } else {
            u64::from(inode.data)
                .saturating_add(number)
                .saturating_mul(BLOCK_SIZE)
        };
        self.slice(offset, len)
            .ok_or_else(|| inode.corrupt(format!("block {number} passes the end of the image")))
    }
}

impl Extents<'_, '_> {
    fn step(&self) -> Result<DataExtent> {
        let inode = &self.inode;
        let (offset, left) = (self.next, inode.size - self.next);
        match inode.layout {
            Layout::Chunked => {
                let chunk = offset >> self.chunk_bits;
                let len = left.min(1 << self.chunk_bits);
                let at = self.index + chunk * self.entry_len;
                let place = self.chunk(at)?;
                let place = place.map(|place| self.image.check_place(inode, place, len));
                Ok(DataExtent {
                    offset,
                    len,
                    place: place.transpose()?,
                })
            }
            Layout::Inline if offset == inode.size / BLOCK_SIZE * BLOCK_SIZE => {
                self.image.content_block(inode, offset / BLOCK_SIZE)?;
                let place = Place {
                    device: 0,
                    address: inode.end(),
                };
                Ok(DataExtent {
                    offset,
                    len: left,
                    place: Some(place),
                })
            }
            Layout::Plain | Layout::Inline => {
                let whole = left - left % BLOCK_SIZE;
                let len = if inode.layout == Layout::Inline {
                    whole
                } else {
                    left
                };
                if inode.data == NULL_BLOCK {
                    return Ok(DataExtent {
                        offset,
                        len,
                        place: None,
                    });
                }
                let place = self.image.flat_place(u64::from(inode.data));
                let place = self.image.check_place(inode, place, len)?;
                Ok(DataExtent {
                    offset,
                    len,
                    place: Some(place),
                })
            }
        }
    }

    fn chunk(&self, at: u64) -> Result<Option<Place>> {
        let outside = || {
            self.inode
                .corrupt("chunk index passes the end of the image")
        };
        if self.entry_len == 4 {
            let block: U32 = self.image.read(at).ok_or_else(outside)?;
            let block = block.get();
            return Ok((block != NULL_BLOCK).then(|| self.image.flat_place(u64::from(block))));
        }
        let raw: RawChunk = self.image.read(at).ok_or_else(outside)?;
        let block = raw.block.get();
        if block == NULL_BLOCK {
            return Ok(None);
        }
        Ok(Some(match raw.device.get() {
            0 => self.image.flat_place(u64::from(block)),
            device => Place {
                device,
                address: u64::from(block) * BLOCK_SIZE,
            },
        }))
    }
}

impl Iterator for Extents<'_, '_> {
    type Item = Result<DataExtent>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.inode.size {
            return None;
        }
        let item = self.step();
        self.next = match &item {
            Ok(extent) => self.next.saturating_add(extent.len.max(1)),
            Err(_) => u64::MAX,
        };
        Some(item)
    }
}
