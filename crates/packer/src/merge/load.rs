//! Reads a published layer back into the form in which layers are made.
//!
//! The metadata image gives the tree, the map the chunks of its files. Files get back exactly the
//! chunks that they were stored as, so whatever is made of them names the same chunks and nothing
//! is read or written again.

use std::collections::HashSet;

use layerpack_erofs::{BLOCK_SIZE, FileData, FileLayout, Image, NodeKind, Tree};
use layerpack_store::{LayerMap, LayerStore, Manifest};

use crate::content::{Content, Piece};
use crate::error::{PackError, Result};
use crate::model::{Contents, Layer};

/// Reads a layer's metadata and map; no file contents.
pub(crate) fn load(store: &LayerStore, manifest: &Manifest, bottom: bool) -> Result<Layer> {
    let map = store.map(manifest)?;
    load_with(store, manifest, &map, bottom)
}

/// The same with the layer's map at hand.
pub(crate) fn load_with(
    store: &LayerStore,
    manifest: &Manifest,
    map: &LayerMap,
    bottom: bool,
) -> Result<Layer> {
    let meta = store.meta(manifest)?;
    let mut tree = Tree::from_image(&Image::open(&meta)?)?;
    drop(meta);
    let mut contents = Contents::default();
    let mut files = Vec::new();
    for entry in tree.walk() {
        if let NodeKind::File(data) = &tree.node(entry.id).kind
            && !contents.has(entry.id)
        {
            let found = content_of(data, map).ok_or_else(|| {
                let why = format!(
                    "the map of {} does not fit its metadata there; run `layerpack verify` on it",
                    manifest.reference()
                );
                PackError::unsupported(&entry.path, why)
            })?;
            contents.set(entry.id, found)?;
            files.push(entry.id);
        }
    }
    // Addresses are given out anew when the layer is laid out.
    for id in files {
        tree.set_data(id, FileData::empty());
    }
    let mut implicit = HashSet::new();
    for path in map.implicit_dirs() {
        let id = tree
            .resolve(path)
            .filter(|id| tree.node(*id).kind.is_dir())
            .ok_or_else(|| {
                let why = format!(
                    "{} lists it as an implicit directory and does not have it",
                    manifest.reference()
                );
                PackError::unsupported(path, why)
            })?;
        implicit.insert(id);
    }
    let mut layer = Layer::from_parts(tree, contents, implicit, bottom);
    layer.unmark_whiteouts();
    Ok(layer)
}

/// A run of a file's bytes that are neighbours in the data address space too.
struct Run {
    offset: u64,
    address: u64,
    len: u64,
}

/// The chunks of a file, or None if one of them is not wholly within a run.
fn content_of(data: &FileData, map: &LayerMap) -> Option<Content> {
    let mut pieces = Vec::new();
    for run in runs(data)? {
        let end = run.address.checked_add(run.len)?;
        let extents = map.extents();
        for extent in extents.get(map.extents_in(run.address..end))? {
            if extent.end() > end {
                return None;
            }
            let within = extent.data_offset.checked_sub(run.address)?;
            pieces.push(Piece {
                offset: run.offset.checked_add(within)?,
                len: extent.len,
                digest: extent.digest,
            });
        }
    }
    Some(Content {
        size: data.size,
        pieces: pieces.into(),
    })
}

fn runs(data: &FileData) -> Option<Vec<Run>> {
    let mut runs: Vec<Run> = Vec::new();
    match &data.layout {
        FileLayout::Empty => {}
        FileLayout::Contiguous { start } => runs.push(Run {
            offset: 0,
            address: start.byte_offset(),
            len: data.size,
        }),
        FileLayout::Chunked { chunk_bits, chunks } => {
            let chunk = 1u64.checked_shl(u32::from(*chunk_bits))?;
            for (index, block) in chunks.iter().enumerate() {
                let Some(block) = block else { continue };
                let offset = chunk.checked_mul(u64::try_from(index).ok()?)?;
                let address = block.get().checked_mul(BLOCK_SIZE)?;
                let len = chunk.min(data.size.checked_sub(offset)?);
                match runs.last_mut() {
                    Some(run)
                        if run.offset + run.len == offset && run.address + run.len == address =>
                    {
                        run.len += len;
                    }
                    _ => runs.push(Run {
                        offset,
                        address,
                        len,
                    }),
                }
            }
        }
    }
    Some(runs)
}

#[cfg(test)]
mod tests {
    use layerpack_erofs::BlockIndex;
    use layerpack_store::{Digest, Extent, MapBuilder};

    use super::*;

    fn map(extents: &[(u64, u32)]) -> LayerMap {
        let mut map = MapBuilder::new(1 << 20);
        for (data_offset, len) in extents {
            map.push(Extent {
                data_offset: *data_offset,
                len: *len,
                digest: Digest::of(&data_offset.to_le_bytes()),
            });
        }
        map.build().unwrap()
    }

    fn pieces(content: &Content) -> Vec<(u64, u32)> {
        content.pieces.iter().map(|p| (p.offset, p.len)).collect()
    }

    #[test]
    fn chunks_come_back_as_they_were_stored() {
        let map = map(&[(4096, 5000), (9096, 100), (16384, 4096), (20480, 4096)]);
        let block = |index| BlockIndex::new(index);
        let dense = FileData {
            size: 5100,
            layout: FileLayout::Contiguous {
                start: block(1).unwrap(),
            },
        };
        assert_eq!(
            pieces(&content_of(&dense, &map).unwrap()),
            [(0, 5000), (5000, 100)]
        );
        let sparse = FileData {
            size: 5 * 4096,
            layout: FileLayout::Chunked {
                chunk_bits: 12,
                chunks: vec![None, block(5), None, block(4), None],
            },
        };
        assert_eq!(
            pieces(&content_of(&sparse, &map).unwrap()),
            [(4096, 4096), (12288, 4096)]
        );
    }

    #[test]
    fn a_chunk_across_a_files_border_is_refused() {
        let map = map(&[(0, 8192)]);
        for start in [0, 1] {
            let data = FileData {
                size: 4096,
                layout: FileLayout::Contiguous {
                    start: BlockIndex::new(start).unwrap(),
                },
            };
            assert!(content_of(&data, &map).is_none());
        }
    }
}
