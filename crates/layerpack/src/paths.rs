//! Which file of a layer has which bytes of the layer's data.

use layerpack_erofs::{Image, Inode};

use crate::output::printable_bytes;

/// Deepest directory that is looked into.
const MAX_DEPTH: usize = 4096;

/// A piece of a file.
#[derive(Debug, Clone, Copy)]
struct Piece {
    /// First byte in the layer's data.
    start: u64,
    /// First byte after it.
    end: u64,
    /// Where it begins in the file.
    offset: u64,
    /// Index of the file.
    file: usize,
}

/// A part of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FilePart {
    /// Path in the layer, fit to be shown.
    pub(crate) path: String,
    /// First byte in the file.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// The files of one layer by their place in its data.
#[derive(Debug, Default)]
pub(crate) struct Paths {
    files: Vec<String>,
    pieces: Vec<Piece>,
}

impl Paths {
    /// Reads a layer's metadata image.
    ///
    /// # Errors
    /// When the image is damaged.
    pub(crate) fn new(meta: &[u8]) -> layerpack_erofs::Result<Self> {
        let image = Image::open(meta)?;
        let mut paths = Self::default();
        let mut open: Vec<(Inode, Vec<u8>, usize)> = vec![(image.root()?, Vec::new(), 0)];
        while let Some((directory, path, depth)) = open.pop() {
            for entry in image.read_dir(&directory)? {
                let entry = entry?;
                let inode = image.inode(entry.nid)?;
                let mut own = path.clone();
                own.push(b'/');
                own.extend_from_slice(entry.name);
                if inode.is_dir() {
                    if depth < MAX_DEPTH {
                        open.push((inode, own, depth + 1));
                    }
                } else if inode.file_type == layerpack_erofs::FileType::File {
                    paths.add(&image, &inode, &own)?;
                }
            }
        }
        paths.pieces.sort_by_key(|piece| (piece.start, piece.file));
        // Files may share bytes: each byte is the first one's that has it.
        let mut end = 0;
        paths.pieces.retain_mut(|piece| {
            let hidden = end.max(piece.start) - piece.start;
            piece.start += hidden;
            piece.offset += hidden;
            let some = piece.start < piece.end;
            end = end.max(piece.end);
            some
        });
        Ok(paths)
    }

    fn add(
        &mut self,
        image: &Image<'_>,
        inode: &Inode,
        path: &[u8],
    ) -> layerpack_erofs::Result<()> {
        let file = self.files.len();
        for extent in image.layout(inode)? {
            let extent = extent?;
            if let Some(place) = extent.place.filter(|place| place.device == 1) {
                self.pieces.push(Piece {
                    start: place.address,
                    end: place.address.saturating_add(extent.len),
                    offset: extent.offset,
                    file,
                });
            }
        }
        self.files.push(printable_bytes(path));
        Ok(())
    }

    /// The parts of files in `start..end` of the data, each byte once: of files that share bytes,
    /// and of several names of one file, the first.
    pub(crate) fn find(&self, start: u64, end: u64) -> Vec<FilePart> {
        let mut parts: Vec<FilePart> = Vec::new();
        let first = self.pieces.partition_point(|piece| piece.end <= start);
        for piece in self.pieces.get(first..).unwrap_or_default() {
            if piece.start >= end {
                break;
            }
            let (from, to) = (piece.start.max(start), piece.end.min(end));
            let Some(path) = self.files.get(piece.file) else {
                continue;
            };
            let offset = piece.offset + (from - piece.start);
            match parts.last_mut() {
                Some(last) if last.path == *path && last.offset + last.len == offset => {
                    last.len += to - from;
                }
                _ => parts.push(FilePart {
                    path: path.clone(),
                    offset,
                    len: to - from,
                }),
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use layerpack_erofs::{
        BlockIndex, FileData, FileLayout, Metadata, NodeKind, Tree, WriteOptions, write_image,
    };

    #[test]
    fn bytes_of_the_data_are_files() {
        let mut tree = Tree::new(Metadata::default());
        let root = tree.root();
        let directory = tree
            .insert(root, b"d", Metadata::default(), NodeKind::Directory)
            .unwrap();
        let mut file = |at, name: &[u8], size, block| {
            let data = FileData {
                size,
                layout: FileLayout::Contiguous {
                    start: BlockIndex::new(block).unwrap(),
                },
            };
            tree.insert(at, name, Metadata::default(), NodeKind::File(data))
                .unwrap();
        };
        file(root, b"a", 5000, 0);
        file(directory, b"b\n", 4096, 2);
        file(root, b"twin", 4096, 2);
        let mut meta = Vec::new();
        let options = WriteOptions {
            data_blocks: 3,
            device_tag: [b'd'; 64],
            ..WriteOptions::default()
        };
        write_image(&tree, &options, &mut meta).unwrap();
        let paths = Paths::new(&meta).unwrap();
        let part = |path: &str, offset, len| FilePart {
            path: path.to_owned(),
            offset,
            len,
        };
        assert_eq!(paths.find(0, 100), [part("/a", 0, 100)]);
        let found = paths.find(4000, 9000);
        assert_eq!(found[0], part("/a", 4000, 1000));
        assert_eq!(found.len(), 2, "the padding is nobody's: {found:?}");
        assert_eq!((found[1].offset, found[1].len), (0, 808));
        assert!(found[1].path == "/twin" || found[1].path == "/d/b\\n");
        assert!(paths.find(5000, 8192).is_empty());
        assert!(Paths::new(&meta[..100]).is_err());
    }
}
