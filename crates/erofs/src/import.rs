//! Reads a whole image back into a [`Tree`].

use std::collections::HashMap;

use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::reader::{Image, Inode};
use crate::tree::{BlockIndex, FileData, FileLayout, Metadata, NodeId, NodeKind, Tree};
use crate::{BLOCK_SIZE, FileType};

impl Tree {
    /// The tree that an image describes. Writing it with the options that the image was written
    /// with gives the same bytes.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for damage (a directory with two names, an entry with the wrong type,
    /// and everything that [`Image`] finds), [`Error::Unsupported`] for files that do not lie
    /// on device 1.
    pub fn from_image(image: &Image<'_>) -> Result<Self> {
        let mut import = Import {
            image,
            once: Budget::once(image),
            expanded: Budget::expanded(image),
        };
        let root = image.root()?;
        let mut tree = Self::new(import.metadata(&root)?);
        let mut known = HashMap::from([(root.nid, NodeId::ROOT)]);
        let mut directories = vec![(root, NodeId::ROOT)];
        while let Some((directory, id)) = directories.pop() {
            for entry in image.read_dir(&directory)? {
                let entry = entry?;
                if let Some(target) = known.get(&entry.nid) {
                    // Refuses directories.
                    tree.link(id, entry.name, *target)
                        .map_err(|error| directory.corrupt(error.to_string()))?;
                    continue;
                }
                let inode = image.inode(entry.nid)?;
                if inode.file_type != entry.file_type {
                    return Err(directory.corrupt(format!(
                        "entry \"{}\" says {:?}, its inode {} {:?}",
                        entry.name.escape_ascii(),
                        entry.file_type,
                        inode.nid,
                        inode.file_type
                    )));
                }
                let metadata = import.metadata(&inode)?;
                let kind = import.kind(&inode)?;
                let child = tree.insert(id, entry.name, metadata, kind)?;
                known.insert(entry.nid, child);
                if inode.is_dir() {
                    directories.push((inode, child));
                }
            }
        }
        Ok(tree)
    }
}

struct Import<'i, 'a> {
    image: &'i Image<'a>,
    once: Budget,
    expanded: Budget,
}

impl Import<'_, '_> {
    fn metadata(&mut self, inode: &Inode) -> Result<Metadata> {
        self.once.charge(inode, inode.own_len(self.image)?)?;
        let mut metadata = Metadata {
            mode: inode.mode & 0o7777,
            uid: inode.uid,
            gid: inode.gid,
            mtime: inode.mtime,
            ..Metadata::default()
        };
        self.image.each_xattr(inode, &mut |xattr| {
            self.expanded.charge(inode, xattr.len())?;
            match metadata.xattrs.insert(xattr.name(), xattr.value.to_vec()) {
                None => Ok(()),
                Some(_) => Err(inode.corrupt(format!(
                    "xattr {} is there twice",
                    xattr.name().escape_ascii()
                ))),
            }
        })?;
        Ok(metadata)
    }

    fn kind(&self, inode: &Inode) -> Result<NodeKind> {
        Ok(match inode.file_type {
            FileType::Directory => NodeKind::Directory,
            FileType::File => NodeKind::File(FileData {
                size: inode.size,
                layout: self.layout(inode)?,
            }),
            FileType::Symlink => NodeKind::Symlink(self.image.symlink(inode)?.to_vec()),
            FileType::CharDevice => NodeKind::CharDevice(inode.rdev().unwrap_or_default()),
            FileType::BlockDevice => NodeKind::BlockDevice(inode.rdev().unwrap_or_default()),
            FileType::Fifo => NodeKind::Fifo,
            FileType::Socket => NodeKind::Socket,
        })
    }

    fn layout(&self, inode: &Inode) -> Result<FileLayout> {
        if inode.size == 0 {
            return Ok(FileLayout::Empty);
        }
        let mut chunks = Vec::new();
        let mut contiguous = true;
        for extent in self.image.layout(inode)? {
            let extent = extent?;
            let chunk = match extent.place {
                None => None,
                Some(place) if place.device == 1 => {
                    Some(BlockIndex::new(place.address / BLOCK_SIZE).ok_or_else(|| {
                        inode.corrupt(format!(
                            "block {} is out of range",
                            place.address / BLOCK_SIZE
                        ))
                    })?)
                }
                Some(place) => {
                    return Err(Error::unsupported(format!(
                        "inode {} has bytes on device {}; only files on device 1 are known",
                        inode.nid, place.device
                    )));
                }
            };
            let expected = chunks
                .first()
                .copied()
                .flatten()
                .map(|first: BlockIndex| first.get() + extent.offset / BLOCK_SIZE);
            contiguous &= match (chunk, expected) {
                (Some(block), Some(expected)) => block.get() == expected,
                (Some(_), None) => chunks.is_empty(),
                (None, _) => false,
            };
            chunks.push(chunk);
        }
        Ok(match chunks.first() {
            Some(Some(start)) if contiguous => FileLayout::Contiguous { start: *start },
            _ if inode.is_chunked() => FileLayout::Chunked {
                chunk_bits: self.image.chunk_index(inode)?.chunk_bits,
                chunks,
            },
            _ => {
                return Err(Error::unsupported(format!(
                    "inode {} is flat but not on device 1",
                    inode.nid
                )));
            }
        })
    }
}
