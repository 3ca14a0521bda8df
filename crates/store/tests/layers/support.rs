//! Small layers with known content.

use std::sync::Arc;

use layerpack_store::{
    BlobStore, Draft, Extent, FileChunks, LayerMap, LayerStore, LayerWriter, MapBuilder, MemStore,
    Published, Reference, Result, WriterOptions,
};

/// SplitMix64 bytes: do not compress.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Bytes that compress about as text does.
pub(crate) fn text(seed: u64, len: usize) -> Vec<u8> {
    let words = [
        "layer", "pack", "store", "frame", "chunk", "digest", "\n", " ",
    ];
    noise(seed, len)
        .iter()
        .flat_map(|b| words[usize::from(b % 8)].bytes())
        .take(len)
        .collect()
}

pub(crate) fn reference(text: &str) -> Reference {
    text.parse().unwrap()
}

pub(crate) fn memory() -> (Arc<dyn BlobStore>, LayerStore) {
    let blobs: Arc<dyn BlobStore> = Arc::new(MemStore::new());
    (Arc::clone(&blobs), LayerStore::new(blobs))
}

/// One writer thread and a fixed level: as little as possible left to chance.
pub(crate) fn options() -> WriterOptions {
    WriterOptions {
        level: 1,
        jobs: 1,
        // Small, so that small layers have several.
        frame: 64 << 10,
        ..WriterOptions::default()
    }
}

/// Lays files out as a packer does: each at the next multiple of 4096.
pub(crate) fn lay_out(files: &[FileChunks]) -> LayerMap {
    let mut extents = Vec::new();
    let mut end = 0_u64;
    for file in files {
        let mut at = end;
        for &(digest, len) in &file.chunks {
            extents.push(Extent {
                data_offset: at,
                len,
                digest,
            });
            at += u64::from(len);
        }
        end = at.next_multiple_of(4096);
    }
    let mut builder = MapBuilder::new(end);
    for extent in extents {
        builder.push(extent);
    }
    builder.implicit(b"").implicit(b"usr/lib");
    builder.build().unwrap()
}

pub(crate) fn add(writer: &mut LayerWriter, files: &[Vec<u8>]) -> Result<Vec<FileChunks>> {
    files
        .iter()
        .map(|bytes| writer.add_file(&mut bytes.as_slice(), bytes.len() as u64))
        .collect()
}

pub(crate) fn publish_with(
    store: &LayerStore,
    name: &str,
    files: &[Vec<u8>],
    options: WriterOptions,
) -> Result<Published> {
    let mut writer = store.writer(options)?;
    let chunks = add(&mut writer, files)?;
    writer.finish(Draft::new(reference(name), text(7, 3000), lay_out(&chunks)))
}

pub(crate) fn publish(store: &LayerStore, name: &str, files: &[Vec<u8>]) -> Result<Published> {
    publish_with(store, name, files, options())
}

/// What the data address space of these files must be.
pub(crate) fn data_of(files: &[Vec<u8>]) -> Vec<u8> {
    let mut data = Vec::new();
    for file in files {
        data.extend_from_slice(file);
        data.resize(data.len().next_multiple_of(4096), 0);
    }
    data
}

/// Reads a layer whole, as a node would.
pub(crate) fn read_all(store: &LayerStore, name: &str) -> Result<Vec<u8>> {
    let (_, manifest) = store.load(&reference(name))?;
    assert_eq!(
        store.meta(&manifest)?,
        text(7, 3000),
        "wrong metadata was handed out"
    );
    let map = store.map(&manifest)?;
    let locator = store.locator(&manifest, &map)?;
    store.read_data(&map, &locator, 0..map.data_size())
}

/// A few files of each sort: empty, tiny, small, one chunk, cut, compressible and not.
pub(crate) fn sample(seed: u64) -> Vec<Vec<u8>> {
    vec![
        Vec::new(),
        b"#!/bin/sh\n".to_vec(),
        text(seed, 5000),
        noise(seed + 1, 300),
        text(seed + 2, 64 << 10),
        noise(seed + 3, (64 << 10) + 1),
        text(seed + 4, 700_000),
        text(seed, 5000),
    ]
}
