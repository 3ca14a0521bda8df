//! From a finished tree to a layer: data addresses, map, metadata image, manifest draft.
//!
//! Addresses follow the tree alone. Files of up to one block come first, so that the small files
//! of a layer are one range, then all others; each group in directory order: the files of a
//! directory by name, then its directories by name. Equal contents share an address.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;

use layerpack_erofs::{
    BLOCK_SIZE, BlockIndex, FileData, FileLayout, NodeId, NodeKind, WriteOptions, plan_sparse,
    write_image,
};
use layerpack_store::chunker::Params;
use layerpack_store::{
    Counts, Digest, Draft, Extent, Hasher, MapImage, MapWriter, MetaWriter, Reference, StoreError,
};

use crate::content::Content;
use crate::error::{PackError, Result};
use crate::model::{Contents, Held, Layer, Repeats};
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
fn place_files(layer: &mut Layer) -> Result<(Addresses, EntryCounts)> {
    let repeats = layer.contents().repeats()?;
    let mut addresses = Addresses {
        next: 0,
        map: MapWriter::new(layer.contents().scratch()),
        placed: vec![None; repeats.len()],
        repeats,
        known: HashMap::new(),
    };
    let (files, counts) = survey(layer);
    layer.mark_whiteouts();
    for small in [true, false] {
        for id in &files {
            let size = layer.size(*id);
            if (size <= BLOCK_SIZE) != small {
                continue;
            }
            if let Some(layout) = addresses.place(layer.contents(), *id)? {
                layer.tree.set_data(*id, FileData { size, layout });
            }
        }
    }
    layer.contents().check()?;
    addresses.forget();
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
    let (addresses, counts) = place_files(&mut layer)?;
    let extents = addresses.map.extents()?;
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
    for extent in &extents {
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
        extents,
        counts,
    })
}

/// Lays out `layer`, its metadata compressed at a zstd level. Its whiteouts must be settled.
pub(crate) fn finish(mut layer: Layer, reference: Reference, level: i32) -> Result<Finished> {
    let mut meta = MetaWriter::new(level).spilling(layer.contents().scratch());
    let Arranged {
        meta_bytes,
        map,
        counts,
    } = arrange(&mut layer, &mut meta, true)?;
    drop(layer); // it is large
    layerpack_sys::memory::trim();
    let mut draft = Draft::new(reference, meta.finish()?, map);
    draft.counts = Counts {
        files: counts.files,
        directories: counts.directories,
        symlinks: counts.symlinks,
        others: counts.others,
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
    arrange(layer, &mut meta, false)?;
    Ok(meta)
}

/// A layer whose metadata image is written.
struct Arranged {
    meta_bytes: u64,
    /// The map, whose digest is in the image.
    map: MapImage,
    counts: EntryCounts,
}

/// Gives all contents their addresses and writes the metadata image. `last`: the layer is of no use
/// afterwards.
fn arrange(layer: &mut Layer, meta: &mut dyn io::Write, last: bool) -> Result<Arranged> {
    if last {
        layer.tree.rest();
    }
    let (addresses, counts) = place_files(layer)?;
    if last {
        layer.forget_contents();
        layerpack_sys::memory::trim();
    }
    let data_blocks = addresses.next;
    let map = addresses
        .map
        .finish(data_blocks * BLOCK_SIZE, layer.implicit_paths())?;
    let options = WriteOptions {
        data_blocks,
        device_tag: device_tag(&map.blob().digest),
        volume_name: VOLUME,
        // Neither name nor clock: the tree's own.
        ..WriteOptions::default()
    };
    let info = write_image(&layer.tree, &options, meta)?;
    Ok(Arranged {
        meta_bytes: info.bytes,
        map,
        counts,
    })
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
                    let size = layer.size(id);
                    if first && size > 0 {
                        counts.bytes += size;
                        files.push(id);
                    }
                }
                NodeKind::Symlink(_) => counts.symlinks += 1,
                NodeKind::CharDevice(_) if layer.is_whiteout(id) => {
                    counts.others += 1;
                    counts.whiteouts += 1;
                }
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
struct Addresses {
    /// First block that is free.
    next: u64,
    /// The extents so far.
    map: MapWriter,
    /// The contents of one chunk that are there several times.
    repeats: Repeats,
    /// Where those are, by [`Repeats::class`].
    placed: Vec<Option<BlockIndex>>,
    /// The layouts of all contents that are not one chunk, by [`Content::identity`].
    known: HashMap<Digest, FileLayout>,
}

impl Addresses {
    fn place(&mut self, contents: &Contents, id: NodeId) -> Result<Option<FileLayout>> {
        Ok(match contents.held(id) {
            None => None,
            Some(Held::Whole(number)) => self.place_whole(contents, number)?,
            Some(Held::Other(content)) => Some(self.place_other(content)?),
        })
    }

    fn add(&mut self, data_offset: u64, len: u32, digest: Digest) -> Result<()> {
        let extent = Extent {
            data_offset,
            len,
            digest,
        };
        Ok(self.map.push(&extent).map_err(StoreError::from)?)
    }

    fn place_other(&mut self, content: &Content) -> Result<FileLayout> {
        let identity = content.identity();
        if let Some(layout) = self.known.get(&identity) {
            return Ok(layout.clone());
        }
        let start = BlockIndex::new(self.next).ok_or_else(full)?;
        let base = start.byte_offset();
        let layout = if content.is_dense() {
            for piece in &content.pieces {
                self.add(base + piece.offset, piece.len, piece.digest)?;
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
                self.add(base + offset, piece.len, piece.digest)?;
            }
            self.next += plan.blocks();
            plan.layout(start).ok_or_else(full)?
        };
        self.known.insert(identity, layout.clone());
        Ok(layout)
    }

    fn place_whole(&mut self, contents: &Contents, number: u32) -> Result<Option<FileLayout>> {
        let class = self.repeats.class(number);
        let there = class.and_then(|class| self.placed.get(class).copied().flatten());
        if let Some(start) = there {
            return Ok(Some(FileLayout::Contiguous { start }));
        }
        let Some((digest, len)) = contents.whole(number) else {
            return Ok(None); // the number is of these contents
        };
        let start = BlockIndex::new(self.next).ok_or_else(full)?;
        self.add(start.byte_offset(), len, digest)?;
        if let Some(place) = class.and_then(|class| self.placed.get_mut(class)) {
            *place = Some(start);
        }
        let blocks = u64::from(len).div_ceil(BLOCK_SIZE);
        BlockIndex::new(self.next + blocks - 1).ok_or_else(full)?;
        self.next += blocks;
        Ok(Some(FileLayout::Contiguous { start }))
    }

    /// Forgets what only finds equal contents.
    fn forget(&mut self) {
        self.repeats = Repeats::default();
        self.placed = Vec::new();
        self.known = HashMap::new();
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
