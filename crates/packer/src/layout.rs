//! From a finished tree to a layer: data addresses, map, metadata image, manifest draft.
//!
//! Addresses follow the tree alone. Files of up to one block come first, so that the small files
//! of a layer are one range, then all others; each group in directory order: the files of a
//! directory by name, then its directories by name. Equal contents share an address.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;

use layerpack_erofs::{
    BLOCK_SIZE, BlockIndex, FileData, FileLayout, NodeId, NodeKind, WriteOptions, plan_sparse,
    write_image,
};
use layerpack_store::chunker::Params;
use layerpack_store::{
    Counts, Digest, Draft, Extent, Hasher, LayerMap, MapBuilder, Reference, StoreError,
};

use crate::content::{Content, Piece};
use crate::error::{PackError, Result};
use crate::model::Layer;
use crate::options::EntryCounts;

/// Version of everything that decides a layer's bytes besides the formats: what is a hole, the
/// order of addresses, metadata of implicit directories. A change of any is a new number.
pub(crate) const RULES: &str = "1";
/// Name of every image's filesystem.
const VOLUME: [u8; 16] = *b"layerpack\0\0\0\0\0\0\0";

/// A layer ready to be published.
pub(crate) struct Finished {
    /// Metadata, map and counts.
    pub draft: Draft,
    /// What it holds.
    pub counts: EntryCounts,
    /// Size of the metadata image in bytes.
    pub meta_bytes: u64,
}

/// Gives all contents their addresses.
fn place_files(layer: &mut Layer, contents: Contents) -> Result<(Addresses, EntryCounts)> {
    let (files, counts) = survey(layer);
    layer.mark_whiteouts();
    let mut addresses = Addresses::default();
    let (small, large): (Vec<_>, Vec<_>) = files.into_iter().partition(|id| {
        layer
            .content(*id)
            .is_some_and(|content| content.size <= BLOCK_SIZE)
    });
    for id in small.into_iter().chain(large) {
        let Some(content) = layer.content(id) else {
            continue;
        };
        let layout = addresses.place(content)?;
        let size = content.size;
        if contents == Contents::Drop {
            layer.drop_content(id); // the extents say the same
        }
        layer.tree.node_mut(id).kind = NodeKind::File(FileData { size, layout });
    }
    Ok((addresses, counts))
}

/// An image that holds its data itself.
pub(crate) struct Standalone {
    /// The metadata, in front of the data.
    pub meta: Vec<u8>,
    /// Where chunks lie in the data, rising.
    pub extents: Vec<Extent>,
    /// Size of the data in bytes.
    pub data_bytes: u64,
    /// What it holds.
    pub counts: EntryCounts,
}

/// Lays out `layer` as one image for use without us.
pub(crate) fn standalone(mut layer: Layer) -> Result<Standalone> {
    let (addresses, counts) = place_files(&mut layer, Contents::Drop)?;
    let mut options = WriteOptions {
        data_blocks: addresses.next,
        data_follows: true,
        volume_name: VOLUME,
        ..WriteOptions::default()
    };
    let mut meta = Vec::new();
    let info = write_image(&layer.tree, &options, &mut meta)?;
    // The identity is one of the contents too.
    let mut hasher = Hasher::new();
    hasher.update(&info.uuid);
    for extent in &addresses.extents {
        hasher.update(&extent.data_offset.to_le_bytes());
        hasher.update(extent.digest.as_bytes());
    }
    let digest = hasher.finish();
    let mut uuid = info.uuid;
    for (byte, own) in uuid.iter_mut().zip(digest.as_bytes()) {
        *byte = *own;
    }
    let [.., version, _, variant, _, _, _, _, _, _, _] = &mut uuid;
    *version = (*version & 0x0f) | 0x80;
    *variant = (*variant & 0x3f) | 0x80;
    options.uuid = Some(uuid);
    meta.clear();
    write_image(&layer.tree, &options, &mut meta)?;
    Ok(Standalone {
        meta,
        data_bytes: addresses.next * BLOCK_SIZE,
        extents: addresses.extents,
        counts,
    })
}

/// Lays out `layer`. Its whiteouts must be settled.
pub(crate) fn finish(mut layer: Layer, reference: Reference) -> Result<Finished> {
    let mut meta = Vec::new();
    let (meta_bytes, map, counts) = arrange(&mut layer, Contents::Drop, &mut meta)?;
    drop(layer);
    let mut draft = Draft::new(reference, meta, map);
    draft.counts = Counts {
        files: counts.files,
        directories: counts.directories,
        symlinks: counts.symlinks,
        others: counts.others + counts.whiteouts,
        bytes: counts.bytes,
    };
    draft.parameters = BTreeMap::from([
        ("pack-rules".to_owned(), RULES.to_owned()),
        ("chunker".to_owned(), Params::default().to_string()),
    ]);
    Ok(Finished {
        draft,
        counts,
        meta_bytes,
    })
}

/// The metadata image that [`finish`] will make, as long as nothing but the contents of files
/// changes, and neither their sizes nor their holes do.
pub(crate) fn image(layer: &mut Layer) -> Result<Vec<u8>> {
    let mut meta = Vec::new();
    arrange(layer, Contents::Keep, &mut meta)?;
    Ok(meta)
}

/// Whether a layer's contents are needed after they have their addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contents {
    Keep,
    Drop,
}

/// Gives all contents their addresses; writes the metadata image, whose size comes back, and makes
/// the map.
fn arrange(
    layer: &mut Layer,
    contents: Contents,
    meta: &mut dyn io::Write,
) -> Result<(u64, LayerMap, EntryCounts)> {
    let (addresses, counts) = place_files(layer, contents)?;
    let data_blocks = addresses.next;
    let map = addresses.map(layer.implicit_paths())?;
    let map_digest = map.blob().digest;
    let options = WriteOptions {
        data_blocks,
        device_tag: device_tag(&map_digest),
        volume_name: VOLUME,
        // Neither name nor clock: the tree's own.
        ..WriteOptions::default()
    };
    let info = write_image(&layer.tree, &options, meta)?;
    Ok((info.bytes, map, counts))
}

/// All files that have bytes, in directory order, and what there is.
fn survey(layer: &Layer) -> (Vec<NodeId>, EntryCounts) {
    let mut files = Vec::new();
    let mut counts = EntryCounts::default();
    let mut seen: HashSet<NodeId> = HashSet::new();
    let mut directories = vec![NodeId::ROOT];
    while let Some(directory) = directories.pop() {
        counts.directories += 1;
        counts.opaque += u64::from(layer.is_opaque(directory));
        counts.implicit += u64::from(layer.is_implicit(directory));
        let mut below = Vec::new();
        for (_, id) in layer.tree.children(directory) {
            let node = layer.tree.node(id);
            let first = node.nlink() < 2 || node.kind.is_dir() || seen.insert(id);
            match &node.kind {
                NodeKind::Directory => below.push(id),
                NodeKind::File(_) => {
                    counts.files += 1;
                    if first && let Some(content) = layer.content(id) {
                        counts.bytes += content.size;
                        if content.size > 0 {
                            files.push(id);
                        }
                    }
                }
                NodeKind::Symlink(_) => counts.symlinks += 1,
                NodeKind::CharDevice(_) if layer.is_whiteout(id) => counts.whiteouts += 1,
                NodeKind::CharDevice(_)
                | NodeKind::BlockDevice(_)
                | NodeKind::Fifo
                | NodeKind::Socket => {
                    counts.others += 1;
                }
            }
        }
        directories.extend(below.into_iter().rev());
    }
    (files, counts)
}

/// Hands out the data address space.
#[derive(Default)]
struct Addresses {
    /// First block that is free.
    next: u64,
    /// Files of one chunk without holes, most of all files: by that chunk's digest.
    whole: HashMap<Digest, BlockIndex>,
    /// All others, by [`Content::identity`].
    known: HashMap<Digest, FileLayout>,
    extents: Vec<Extent>,
}

impl Addresses {
    fn place(&mut self, content: &Content) -> Result<FileLayout> {
        if let [piece] = &*content.pieces
            && content.is_dense()
        {
            return self.place_whole(piece);
        }
        let identity = content.identity();
        if let Some(layout) = self.known.get(&identity) {
            return Ok(layout.clone());
        }
        let start = BlockIndex::new(self.next).ok_or_else(full)?;
        let base = start.byte_offset();
        let layout = if content.is_dense() {
            for piece in &content.pieces {
                self.extents.push(Extent {
                    data_offset: base + piece.offset,
                    len: piece.len,
                    digest: piece.digest,
                });
            }
            let blocks = content.size.div_ceil(BLOCK_SIZE);
            BlockIndex::new(self.next + blocks - 1).ok_or_else(full)?;
            self.next += blocks;
            FileLayout::Contiguous { start }
        } else {
            let data: Vec<_> = content
                .pieces
                .iter()
                .map(|piece| piece.offset..piece.offset + u64::from(piece.len))
                .collect();
            let plan = plan_sparse(content.size, &data);
            for piece in &content.pieces {
                let offset = plan.address_of(piece.offset).ok_or_else(full)?;
                self.extents.push(Extent {
                    data_offset: base + offset,
                    len: piece.len,
                    digest: piece.digest,
                });
            }
            self.next += plan.blocks();
            plan.layout(start).ok_or_else(full)?
        };
        self.known.insert(identity, layout.clone());
        Ok(layout)
    }

    fn place_whole(&mut self, piece: &Piece) -> Result<FileLayout> {
        let start = BlockIndex::new(self.next).ok_or_else(full)?;
        match self.whole.entry(piece.digest) {
            Entry::Occupied(there) => {
                return Ok(FileLayout::Contiguous {
                    start: *there.get(),
                });
            }
            Entry::Vacant(free) => free.insert(start),
        };
        self.extents.push(Extent {
            data_offset: start.byte_offset(),
            len: piece.len,
            digest: piece.digest,
        });
        let blocks = u64::from(piece.len).div_ceil(BLOCK_SIZE);
        BlockIndex::new(self.next + blocks - 1).ok_or_else(full)?;
        self.next += blocks;
        Ok(FileLayout::Contiguous { start })
    }

    fn map(self, implicit: Vec<Vec<u8>>) -> Result<LayerMap> {
        let mut map = MapBuilder::new(self.next * BLOCK_SIZE);
        for extent in self.extents {
            map.push(extent);
        }
        for path in implicit {
            map.implicit(&path);
        }
        map.build().map_err(|error| StoreError::from(error).into())
    }
}

fn full() -> PackError {
    PackError::Unsupported {
        path: "the source".to_owned(),
        why: "its contents need more than the 16 TiB that a layer can address".to_owned(),
    }
}

/// The map's digest in hexadecimal fills the device's tag exactly.
fn device_tag(map: &Digest) -> [u8; 64] {
    let mut tag = [0; 64];
    for (to, from) in tag.iter_mut().zip(map.hex().bytes()) {
        *to = from;
    }
    tag
}
